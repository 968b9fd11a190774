"""``explain`` and ``estimate``: a verb called dry, for its route and for its peak bytes.

The call itself runs, on the meta device, where tensors have shapes and no memory: the same checks, the same route, the
same allocations in the same order, and nothing computed. What is not counted: what the caller holds (logits or hidden,
weight, bias, targets, rows, upstream gradients) and what a vendor library allocates once for good (cuBLAS's workspace).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from logitless.call.dry import Dry
from logitless.errors import LogitlessError
from logitless.errors.arguments import described, refused
from logitless.machine import CPU, H200, Machine
from logitless.memory.ledger import Item, Ledger, tensors_in
from logitless.memory.meta import Meta, backward
from logitless.operands import Given, Teacher, Teachers
from logitless.route import Plan
from logitless.rows import Rows
from logitless.spec import format_bytes


@dataclass(frozen=True)
class Estimate:
    """Bytes of a call beyond the caller's own tensors, results and gradients included.

    Attributes:
        call: name of the function.
        backend: which backend works on the logits; None for functions that are not of this library.
        plan: which route the call takes; None for functions that are not of this library.
        forward, backward: items that are alive at the fullest moment of each; no backward, no items.
    """

    call: str
    backend: str | None
    plan: Plan | None
    forward: tuple[Item, ...]
    backward: tuple[Item, ...]

    @property
    def items(self) -> tuple[Item, ...]:
        """The items of forward and backward, once each, in their order."""
        return tuple(dict.fromkeys((*self.forward, *self.backward)))

    @property
    def forward_peak(self) -> int:
        return sum(item.bytes for item in self.forward)

    @property
    def backward_peak(self) -> int:
        return sum(item.bytes for item in self.backward)

    @property
    def peak(self) -> int:
        return max(self.forward_peak, self.backward_peak)

    def __str__(self) -> str:
        how = "" if self.plan is None else f", {self.plan.kind}"
        lines = [f"{self.call}{how}" + ("" if self.backend is None else f", {self.backend} backend")]
        lines.append(f"{'alive at the peak of':52}{'forward':>13}{'backward':>13}")
        for item in self.items:
            cells = [format_bytes(item.bytes) if item in items else "" for items in (self.forward, self.backward)]
            mark = "*" if item.output else " "
            lines.append(f"{mark} {item.name[:50]:50}{cells[0]:>13}{cells[1]:>13}")
        peaks = (self.forward_peak, self.backward_peak)
        lines.append(f"{'peak (* goes to the caller)':52}" + "".join(f"{format_bytes(n):>13}" for n in peaks))
        return "\n".join(lines)


def explain(
    verb: Callable[..., Any], *args: Any, device: Literal["cuda", "cpu"] | Machine | None = None, **options: Any
) -> Plan:
    """Which route a call takes, and why. Computes nothing.

    Args:
        verb: :func:`logprobs` or :func:`policy_loss`.
        args, options: arguments of the call, as it would be made.
        device: as for :func:`estimate`.

    >>> from logitless.operands import Logits
    >>> from logitless.score import logprobs
    >>> print(explain(logprobs, Logits(torch.zeros(2, 3), torch.zeros(4, 3)), torch.tensor([1, 2])).kind)
    forward
    """
    _check("explain", verb, device)
    machine = _machine(device, (args, options))
    with Dry(_kind(machine), machine, stop=True) as dry:
        verb(*args, **options)
    if dry.plan is None:
        name = getattr(verb, "__name__", type(verb).__name__)
        raise LogitlessError(f"explain: {name} is no verb of this library. Pass logitless.logprobs or policy_loss.")
    return dry.plan


def estimate(
    verb: Callable[..., Any],
    *args: Any,
    device: Literal["cuda", "cpu"] | Machine | None = None,
    dropped: float = 0.0,
    **options: Any,
) -> Estimate:
    """Peak bytes of a call and of its backward, item by item. Computes nothing and needs no device.

    Args:
        verb: :func:`logprobs`, :func:`policy_loss`, or any function of torch's that returns tensors.
        args, options: arguments of the call, as it would be made; their numbers are not looked at. Sizes alone go in as
            tensors on the meta device (``logitless.memory.sized``). Gradients are of the tensors that require them.
        device: kind of device that it will run on; None for that of the tensors, and for a GPU where they are on meta.
            Where there is no GPU here, ``"cuda"`` is an H200; a ``logitless.machine.Machine`` is that machine.
        dropped: share of a loss's rows without a gradient (clipped, or of zero advantage). Above 5 % the others are
            moved together, which takes up to 128 MiB, and their hidden states copied.

    Returns:
        :class:`Estimate`, which prints as a table.

    Raises:
        LogitlessError: an argument cannot be honoured; the text says which and why.

    >>> from logitless.score import logprobs
    >>> estimate(logprobs, torch.zeros(64, 1000, requires_grad=True), torch.zeros(64, dtype=torch.int64)).peak >> 10
    254
    """
    _check("estimate", verb, device)
    if isinstance(dropped, bool) or not isinstance(dropped, int | float) or not 0 <= dropped <= 1:
        raise LogitlessError(f"estimate: dropped must be a share between 0 and 1 but is {dropped!r}.")
    if isinstance(options.get("backend"), str) and options["backend"] == "reference":
        raise LogitlessError(
            'estimate: backend="reference" is for checking results, and its memory is not predicted. Ask for "auto", '
            '"tiled" or "triton".'
        )
    machine = _machine(device, (args, options))
    on_gpu = _kind(machine) == "cuda"
    meta = Meta(copies=not on_gpu)
    with Ledger():
        # Tensors that the caller holds are made here, and not counted.
        names = list(inspect.signature(verb).parameters)
        names += [f"argument {i}" for i in range(len(names), len(args))]
        positional = [meta(x, name) for x, name in zip(args, names[: len(args)], strict=True)]
        keywords = {name: meta(x, name) for name, x in options.items()}
    ledger, dry, graded = Ledger(on_gpu), Dry(_kind(machine), machine, dropped), []
    with dry:
        with ledger:
            out = list(dict.fromkeys(tensors_in(verb(*positional, **keywords))))
            ledger.start_backward()
        graded = [x for x in out if x.requires_grad]
        upstream = [torch.ones_like(x) for x in graded]
        with ledger:
            gradients = backward(graded, upstream, meta.leaves)
            ledger.name_output("results of each row", *out)
            for name, gradient in gradients.items():
                ledger.name_output(f"d_{name}", gradient)
    # A gradient that goes into the caller's buffer is none of the results.
    items = ledger.items("forward"), ledger.items("backward") if graded and meta.leaves else ()
    return Estimate(getattr(verb, "__name__", "call"), dry.backend, dry.plan, *items)


def _check(caller: str, verb: Any, device: Any) -> None:
    if not callable(verb) or isinstance(verb, type):
        raise refused(f"{caller}: verb", "a function", verb, " Pass logitless.logprobs, and then its arguments.")
    if not (device is None or isinstance(device, Machine) or (isinstance(device, str) and device in ("cuda", "cpu"))):
        raise LogitlessError(f'{caller}: device must be "cuda", "cpu", a Machine or None but is {described(device)}.')


def _machine(device: str | Machine | None, arguments: Any) -> Machine:
    """The machine that a call is planned for; a GPU is an H200 where there is none here."""
    if isinstance(device, Machine):
        return device
    # A call whose tensors are all on meta is one on a GPU.
    kind = device or _real_device(arguments) or "cuda"
    return H200 if kind == "cuda" and not torch.cuda.is_available() else Machine.of(torch.device(kind))


def _kind(machine: Machine) -> str:
    return "cpu" if machine.name == CPU.name else "cuda"


def _real_device(arguments: Any) -> str | None:
    """Type of the device of the first argument that has numbers; None where all of them are on meta."""
    kinds = (x.device.type for x in tensors_in(_opened(arguments)))
    return next((kind for kind in kinds if kind != "meta"), None)


def _opened(x: Any) -> Any:
    """Arguments, with a tensor of each of our own nouns (logits that exist, rows, teachers) in its place."""
    if isinstance(x, Given):
        return x.logits
    if isinstance(x, Rows):
        return x.index
    if isinstance(x, Teachers):
        return [_opened(member) for member in x.members]
    if isinstance(x, Teacher):
        return x.logits if x.top_k is None else x.top_k.logprobs
    if isinstance(x, tuple | list):
        return [_opened(part) for part in x]
    return {name: _opened(part) for name, part in x.items()} if isinstance(x, dict) else x
