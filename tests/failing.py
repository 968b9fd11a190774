"""Steps of every path that can be made to fail: at the k-th allocation, or in a term of the objective.

    step = STEPS["policy one pass, buffer"]
    run = Run(step, dtype)          tensors, a buffer and a graph of its own, the same numbers every time
    with Allocations() as seen:     counts what torch allocates; ``Allocations(fail=k)`` raises at the k-th
        run.go()

Both the tests and ``benchmarks/inject_faults.py``, which makes the record, take their steps from here.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from calls import from_hidden, from_logits, loss_from_hidden
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import logitless as ll
from logitless import backends
from logitless.memory.ledger import tensors_in
from logitless.notes import WRITTEN

TOKENS, VOCAB, WIDTH = 12, 33, 5

# A dispatch mode is off while an operator runs, so the two that are registered are opened here.
OPENED = {
    torch.ops.logitless.statistics.default: backends._statistics._init_fn,
    torch.ops.logitless.gradient.default: backends._gradient._init_fn,
}


class Allocations(TorchDispatchMode):
    """Counts the storages that torch makes; raises, instead of handing it over, at the one of number ``fail``.

    Attributes:
        places: of each, the line of the library that asked for it; None where the caller or autograd did, and for
            those before the one that fails.
        alive: of each, a weak reference.
    """

    def __init__(self, fail: int = 0) -> None:
        super().__init__()
        self.fail = fail
        self.places: list[tuple[str, int] | None] = []
        self.alive: list[weakref.ref] = []

    @property
    def count(self) -> int:
        return len(self.places)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Being sure of it would import the compiler, which takes seconds.
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in OPENED:
            with self:
                return OPENED[func](*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        for x in tensors_in(out) if makes_storage(func) else ():
            if x.untyped_storage().nbytes():
                # Walking up the stack takes longer than most operators.
                self.places.append(place_of(sys._getframe()) if self.fail in (0, self.count + 1) else None)
                self.alive.append(weakref.ref(x.untyped_storage()))
                if self.count == self.fail:
                    raise torch.OutOfMemoryError(
                        f"allocation {self.fail}, of {list(x.shape)} by {func}, was made to fail"
                    )
        return out


@functools.cache
def makes_storage(func: Any) -> bool:
    """Whether an operator's results are new: it neither returns a view nor writes in place."""
    return all(result.alias_info is None for result in func._schema.returns)


def place_of(frame: FrameType | None) -> tuple[str, int] | None:
    """File and line of the innermost function of the library."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("logitless."):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


@dataclass(frozen=True)
class Step:
    """A training step: which path, with which options, and which tensors need a gradient."""

    path: str
    options: dict[str, Any] = field(default_factory=dict)
    frozen: bool = False
    buffer: bool = False
    kept: bool = False
    overwrite: bool = False
    objective: dict[str, Any] = field(default_factory=dict)
    half: bool = False


TILES = {"memory": 2000}
"""A budget of a few columns, or rows: several tiles, blocks and chunks."""

STEPS = {
    "logprobs": Step("logprobs", {"entropy": "grad", "memory": 400}),
    "logprobs over the logits": Step("logprobs", {"entropy": "grad"}, overwrite=True),
    "logprobs, kept ids": Step("logprobs", {"entropy": "grad"}, kept=True),
    "linear, tiles": Step("linear", {"entropy": "grad", **TILES}),
    "linear, buffer": Step("linear", {"entropy": "grad", **TILES}, buffer=True),
    "linear, stored exponentials": Step("linear", {"memory": "1GiB"}, buffer=True, half=True),
    "linear, kept ids": Step("linear", {"memory": 4000}, kept=True, buffer=True),
    "linear, frozen head": Step("linear", TILES, frozen=True),
    "loss in one pass, one chunk": Step("loss", {}, buffer=True, objective={"entropy_coef": 0.1}),
    "loss in one pass, chunks": Step("loss", TILES, buffer=True, objective={"entropy_coef": 0.1}),
    "loss in one pass, whole samples": Step("loss", TILES, objective={"policy": "gspo"}),
    "loss in one pass, exponentials": Step("loss", TILES, buffer=True, half=True),
    "loss in two passes": Step("loss", {"bits": "canonical"}, buffer=True, objective={"entropy_coef": 0.1}),
}
"""Every path, and every route of it."""


class Run:
    """The tensors of a step, and the step itself. Two runs of one step have the same numbers."""

    def __init__(self, step: Step, dtype: torch.dtype, policy: Callable | None = None) -> None:
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.step = step
        tokens = [[int(i) for i in torch.randint(VOCAB, (6,), generator=generator)] for _ in range(2)]
        self.rows = ll.Rows.packed(tokens, [4, 5])
        count = len(self.rows)
        self.leaves = {"hidden": draw(TOKENS, WIDTH).to(dtype).requires_grad_()}
        if step.path == "logprobs":
            self.leaves = {"logits": draw(TOKENS, VOCAB).to(dtype).requires_grad_()}
        else:
            for name, shape in (("weight", (VOCAB, WIDTH)), ("bias", (VOCAB,))):
                self.leaves[name] = draw(*shape).to(dtype).requires_grad_(not step.frozen)
        self.buffer = draw(VOCAB, WIDTH) if step.buffer else None
        self.kept = ll.Kept(torch.arange(2 * count) % VOCAB, torch.full((count,), 2)) if step.kept else None
        self.fields = {"old_logprob": draw(count) - 3, "advantage": draw(count)}
        settings = step.objective if policy is None else {**step.objective, "policy": policy}
        self.objective = ll.Objective(**settings) if step.path == "loss" else None
        self.upstream = draw(2, count)
        self.results: list[Tensor] = []
        self.loss: Any = None
        self.fresh: Any = None

    def options(self) -> dict[str, Any]:
        buffer = {} if self.buffer is None else {"weight_grad": self.buffer}
        return self.step.options | buffer | ({} if self.kept is None else {"kept": self.kept})

    def go(self) -> None:
        """Forward and backward."""
        self.forward()
        loss, self.loss = self.loss, None
        loss.backward()

    def forward(self) -> None:
        x, options = self.leaves, self.options()
        if self.step.path == "loss":
            assert self.objective is not None
            given = {"bias": x["bias"], **self.fields, **options}
            loss, _ = loss_from_hidden(x["hidden"], x["weight"], self.rows, self.objective, **given)
            self.results = [loss.detach()]
        else:
            if self.step.path == "logprobs":
                logits = x["logits"] * 1.0 if self.step.overwrite else x["logits"]
                out = from_logits(logits, self.rows, overwrite=self.step.overwrite, **options)
            else:
                out = from_hidden(x["hidden"], x["weight"], self.rows, bias=x["bias"], **options)
            loss = (out.logprob * self.upstream[0]).sum()
            if out.entropy is not None:
                loss = loss + (out.entropy * self.upstream[1]).sum()
            self.results = [out.logprob.detach()]
        self.loss = loss

    def state(self) -> dict[str, Tensor]:
        """Everything of the caller's that the step reads or writes, but for gradients."""
        at = {"index": self.rows.index, "target": self.rows.target, "sample": self.rows.sample}
        kept = {} if self.kept is None else {"ids": self.kept.ids, "lengths": self.kept.lengths}
        return {**{n: x.detach() for n, x in self.leaves.items()}, **self.fields, **at, **kept}

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: x.grad for name, x in self.leaves.items()}


def begin_again(run: Run, fresh: Run) -> None:
    """What a trainer that skips a batch does: zero the gradients, the buffer among them."""
    for x in run.leaves.values():
        x.grad = None
    if run.buffer is not None and fresh.buffer is not None:
        run.buffer.copy_(fresh.buffer)


# What every failure is held against.


def reference_of(step: Step, dtype: torch.dtype) -> tuple[Run, list[tuple[str, int] | None]]:
    """A run that was left alone, and where each of its allocations was asked for."""
    right = Run(step, dtype)
    right.fresh = Run(step, dtype)
    right.go()
    counted = Run(step, dtype)
    with Allocations() as seen:
        counted.go()
    same(counted, right)
    return right, seen.places


def failing_points(places: list[tuple[str, int] | None], covered: set[Any], last: bool) -> list[int]:
    """Numbers of the first, or last, allocation of each line that is not covered yet; they are then."""
    at = {place: k for k, place in (enumerate(places, 1) if last else reversed([*enumerate(places, 1)]))}
    points = sorted(k for place, k in at.items() if place not in covered)
    covered.update(places)
    return points


def check_failure(step: Step, dtype: torch.dtype, right: Run, k: int) -> str:
    """Fail at allocation ``k``: a note, nothing half done or said so, and the next step exact. Says where it was."""
    run, fresh = Run(step, dtype), right.fresh
    try:
        with Allocations(k) as seen:
            run.go()
    except torch.OutOfMemoryError as raised:
        notes = " ".join(getattr(raised, "__notes__", ()))
    else:
        raise AssertionError(f"there is no allocation {k}")
    where = seen.places[-1]
    if where is not None:
        assert "Pass a smaller memory=" in notes, (k, where, notes)
    for (what, now), then in zip(run.state().items(), fresh.state().values(), strict=True):
        assert torch.equal(now, then), (k, where, what)
    for name, gradient in run.gradients().items():
        # Autograd hands over one leaf after the other.
        assert gradient is None or torch.equal(gradient, right.gradients()[name]), (k, where, name)
    if run.buffer is not None and not torch.equal(run.buffer, fresh.buffer):
        assert where is None or WRITTEN["weight_grad"] in notes, (k, where, notes)
    begin_again(run, fresh)
    run.go()
    same(run, right)
    touched = run.buffer is not None and WRITTEN["weight_grad"] in notes
    return "outside" if where is None else "buffer holds a part" if touched else "untouched"


def same(run: Run, right: Run) -> None:
    """Bit for bit the same results, gradients and buffer."""
    for ours, theirs in zip(run.results, right.results, strict=True):
        assert torch.equal(ours, theirs)
    for name, gradient in run.gradients().items():
        theirs = right.gradients()[name]
        assert (gradient is None) == (theirs is None), name
        assert gradient is None or torch.equal(gradient, theirs), name
    assert run.buffer is None or torch.equal(run.buffer, right.buffer)
