"""Ranks that die, are late or disagree, over real gloo groups, and what their peers see.

    parent   -- job, fault -->   workers      join a group with a short timeout, run a path, meet the fault
    parent   <--- outcome ----   workers      returned what, or raised what, after how long; or died

A team lives on between jobs: only a worker that died is replaced. Nothing here can hang: a worker that is not done long
after the group's timeout prints its stack and ends. Both the tests and ``benchmarks/inject_faults.py`` run these.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from calls import from_hidden, from_logits, loss_from_hidden
from ranks import _context
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from logitless import Contiguous, Head, Kept, Logits, Metrics, Objective, Rows, VocabShard, logprobs, policy_loss
from logitless.objectives import count_over

TIMEOUT = 2.0
"""Seconds that a group waits."""

MARGIN = 8.0
"""Seconds beyond it after which a worker counts as hung, on a machine that is busy with other things."""

MOMENTS = ("before", "inside", "after")


class Fault(NamedTuple):
    """What happens to a rank at one of its collectives.

    Attributes:
        rank: whose fault it is.
        number: which of its collectives, from 0 on.
        moment: "before", killed while the others wait; "inside", killed while it waits for the others; "after",
            killed when it is over; "late", comes after so many seconds.
        seconds: how late.
    """

    rank: int
    number: int
    moment: str
    seconds: float = 0.05


class Outcome(NamedTuple):
    """How a rank's part of a job ended."""

    kind: str
    value: Any = None
    error: str = ""
    notes: str = ""
    seconds: float = 0.0


class Saboteur(TorchDispatchMode):
    """Counts a rank's collectives, and lets the fault happen at the one it is meant for."""

    def __init__(self, rank: int, fault: Fault | None) -> None:
        super().__init__()
        self.rank, self.fault, self.count = rank, fault, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Being sure of it would import the compiler.
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" not in func.namespace:
            return func(*args, **(kwargs or {}))
        now = self.fault if self.fault is not None and self.count == self.fault.number else None
        self.count += 1
        mine = now is not None and now.rank == self.rank
        if now is not None and now.moment == "inside":
            # The others come later than the alarm, whose default is to end the process.
            signal.setitimer(signal.ITIMER_REAL, now.seconds) if mine else time.sleep(3 * now.seconds)
        elif mine and now.moment in ("before", "late"):
            time.sleep(now.seconds)
            if now.moment == "before":
                os.kill(os.getpid(), signal.SIGKILL)
        out = func(*args, **(kwargs or {}))
        if mine and now.moment == "after":
            # A work that nobody has waited for is not over.
            for part in out if isinstance(out, tuple) else (out,):
                if hasattr(part, "wait"):
                    part.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return out


@dataclass
class Team:
    """Workers that outlive their jobs."""

    workers: list[Any] = field(default_factory=list)

    def run(
        self, world: int, function: Callable, *args: Any, fault: Fault | None = None, timeout: float = TIMEOUT
    ) -> list[Outcome]:
        """The outcome of ``function(rank, world, *args)`` of every rank."""
        while len(self.workers) < world:
            self.workers.append(start())
        team = self.workers[:world]
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, pipe) in enumerate(team):
                job = pickle.dumps((function, args))
                pipe.send_bytes(pickle.dumps((rank, world, os.path.join(folder, "store"), timeout, fault, job)))
            outcomes = self._collect(team)
            for (_, pipe), outcome in zip(team, outcomes, strict=True):
                if outcome.kind != "died":
                    pipe.send_bytes(b"done")
            ended = self._collect([x for x, outcome in zip(team, outcomes, strict=True) if outcome.kind != "died"])
        assert all(x.kind == "left" for x in ended), ended
        alive = [x for x, outcome in zip(team, outcomes, strict=True) if outcome.kind != "died"]
        self.workers = alive + self.workers[world:]
        return outcomes

    def _collect(self, team: list[Any]) -> list[Outcome]:
        waiting, outcomes = {pipe: i for i, (_, pipe) in enumerate(team)}, {}
        while waiting:
            for pipe in connection.wait(list(waiting)):
                i = waiting.pop(pipe)
                try:
                    outcomes[i] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    team[i][0].join()
                    outcomes[i] = Outcome("died", team[i][0].exitcode)
        return [outcomes[i] for i in range(len(team))]

    def close(self) -> None:
        for process, pipe in self.workers:
            process.kill()
            process.join()
            pipe.close()
        self.workers = []


def start() -> tuple[Any, Any]:
    ours, theirs = _context.Pipe()
    process = _context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def serve(pipe: Any) -> None:
    """What a worker does."""
    torch.set_num_threads(1)
    while True:
        try:
            rank, world, store, timeout, fault, job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        late = 0.0 if fault is None else 3 * fault.seconds
        faulthandler.dump_traceback_later(2 * timeout + late + MARGIN, exit=True, file=sys.__stderr__)
        outcome = attempt(rank, world, store, timeout, fault, job)
        with contextlib.suppress(EOFError, BrokenPipeError):
            pipe.send_bytes(pickle.dumps(outcome))
            pipe.recv_bytes()
            dist.destroy_process_group()
            pipe.send_bytes(pickle.dumps(Outcome("left")))
        faulthandler.cancel_dump_traceback_later()


def attempt(rank: int, world: int, store: str, timeout: float, fault: Fault | None, job: bytes) -> Outcome:
    # Joining takes its time on a busy machine; only what comes after is under the short timeout.
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=30)
    )
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    function, args = pickle.loads(job)
    torch.manual_seed(0)
    began = time.monotonic()
    try:
        with warnings.catch_warnings(), Saboteur(rank, fault) as seen:
            warnings.simplefilter("error")
            value = function(rank, world, group, *args)
            if fault is not None and fault.rank == rank and fault.moment == "inside" and seen.count > fault.number:
                # The machine was so busy that the others came first; the alarm is still to come.
                signal.pause()
        return Outcome("returned", (value, seen.count), seconds=time.monotonic() - began)
    except BaseException as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        return Outcome("raised", None, f"{type(error).__name__}: {error}", notes, time.monotonic() - began)


# Paths: every collective of the library, in forward and backward, on a few rows.

TOKENS, SHARD, WIDTH = 6, 10, 4


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """The same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shard_of(rank: int, group: Any) -> VocabShard:
    return VocabShard(rank * SHARD, (rank + 1) * SHARD, group, check_calls=True)


def run_logprobs(rank: int, world: int, group: Any) -> list[Tensor]:
    leaf = numbers(TOKENS, SHARD, seed=rank).requires_grad_()
    logits = Logits.given(leaf, shard=shard_of(rank, group))
    out = logprobs(logits, torch.arange(TOKENS), entropy="grad")
    (out.logprob.sum() + out.entropy.sum()).backward()
    return [out.logprob.detach(), leaf.grad]


def run_linear(rank: int, world: int, group: Any, sequence_parallel: bool = False) -> list[Tensor]:
    hidden, weight = numbers(TOKENS * world, WIDTH).requires_grad_(), numbers(SHARD, WIDTH, seed=rank).requires_grad_()
    mine = hidden.detach().chunk(world)[rank].clone().requires_grad_() if sequence_parallel else hidden
    target = torch.arange(TOKENS * world) % SHARD
    logits = Logits(mine, weight, shard=shard_of(rank, group), sequence_parallel=sequence_parallel)
    out = logprobs(logits, target, entropy="grad")
    (out.logprob.sum() + out.entropy.sum()).backward()
    return [out.logprob.detach(), mine.grad, weight.grad]


def run_sequence_parallel(rank: int, world: int, group: Any) -> list[Tensor]:
    return run_linear(rank, world, group, sequence_parallel=True)


def run_policy_loss(rank: int, world: int, group: Any) -> list[Tensor]:
    hidden, weight = numbers(TOKENS, WIDTH).requires_grad_(), numbers(SHARD, WIDTH, seed=rank).requires_grad_()
    given = {"old_logprob": numbers(TOKENS, seed=8) - 3, "advantage": numbers(TOKENS, seed=9)}
    logits, target = Logits(hidden, weight, shard=shard_of(rank, group)), torch.arange(TOKENS)
    # Room for half of the rows: two chunks, each with its collective.
    memory = TOKENS * SHARD * 4
    loss, _ = policy_loss(logits, target, Objective(), memory=memory, **given)
    loss.backward()
    return [loss.detach(), hidden.grad, weight.grad]


def rows_of(rank: int, world: int) -> Rows:
    return Rows.packed([list(range(8)), list(range(6))], [5, 3], cp=Contiguous(rank, world), num_tokens=14 + 14 % world)


def run_exchange(rank: int, world: int, group: Any) -> list[Tensor]:
    rows = rows_of(rank, world)
    rows.check_over(group)
    leaf = torch.arange(len(rows), dtype=torch.float32).requires_grad_()
    whole = rows.gather(leaf, group, grad="sum")
    again = rows.redistribute(leaf, rows, group, grad="sum")
    (torch.cat(whole).square().sum() + again.sum()).backward()
    return [torch.cat(whole).detach(), again.detach(), leaf.grad]


def run_metrics(rank: int, world: int, group: Any) -> list[Tensor]:
    one = Metrics.of_rows({"ratio": torch.tensor([1.0 + rank, 3.0])}, torch.tensor([True, True]))
    return [torch.tensor(list(one.reduce(group, check=True).compute().values()))]


def run_count(rank: int, world: int, group: Any) -> list[Tensor]:
    return [count_over(Rows.packed([[1, 2, 3 + rank]], [2]), "token_mean", group)]


PATHS: dict[str, Callable] = {
    "logprobs": run_logprobs,
    "logprobs of Logits": run_linear,
    "logprobs of Logits, sequence parallel": run_sequence_parallel,
    "policy_loss": run_policy_loss,
    "Rows.gather, Rows.redistribute": run_exchange,
    "Metrics.reduce": run_metrics,
    "count_over": run_count,
}


PRELUDE = {
    "logprobs of Logits": 4,
    "logprobs of Logits, sequence parallel": 4,
    "policy_loss": 4,
    "Rows.gather, Rows.redistribute": 2,
    "Metrics.reduce": 2,
}
"""Collectives that a path begins with and that ``logprobs`` has, too: of plain values, two each time."""


def is_right(outcome: Outcome, right: Outcome) -> bool:
    """Whether a rank returned, bit for bit, what it returns without a fault."""
    same = zip(outcome.value[0], right.value[0], strict=True) if outcome.kind == "returned" else ()
    return outcome.kind == "returned" and all(torch.equal(ours, theirs) for ours, theirs in same)


def is_named(outcome: Outcome) -> bool:
    """Whether a rank raised an error that names the collective and says what may have happened."""
    return outcome.kind == "raised" and "stopped here. Another rank of the group died" in outcome.notes


# Disagreement: the same call on every rank but for one argument of rank 1.


def call_of(path: str, rank: int, group: Any, **changes: Any) -> list[Tensor]:
    """A call of one of the three paths and its backward, with some things changed."""
    shape, dtype = changes.pop("rows", TOKENS), changes.pop("dtype", torch.float32)
    head = Head(**{name: changes.pop(name) for name in HEAD if name in changes})
    target = (torch.arange(shape) + changes.pop("shift", 0)) % SHARD
    recording = contextlib.nullcontext() if changes.pop("grad_mode", True) else torch.no_grad()
    needs = changes.pop("needs", {"hidden": True, "weight": True})
    if "kept" in changes:
        changes["kept"] = Kept(torch.arange(shape) % SHARD, torch.ones(shape, dtype=torch.int64))
    if "bias" in changes:
        changes["bias"] = torch.ones(SHARD)
    options = {"shard": shard_of(rank, group), "head": head}
    hidden = numbers(TOKENS, WIDTH).to(dtype).requires_grad_(needs["hidden"])
    weight = numbers(SHARD, WIDTH, seed=rank).to(dtype).requires_grad_(needs["weight"])
    rows = (torch.arange(shape), target)
    with recording:
        if path == "logprobs":
            logits = (hidden @ weight.T).detach().requires_grad_(needs["hidden"])
            out = from_logits(logits, rows, **options, **changes).logprob
        elif path == "logprobs of Logits":
            out = from_hidden(hidden, weight, rows, **options, **changes).logprob
        else:
            objective = Objective(**changes.pop("objective", {}))
            given = {"old_logprob": numbers(shape, seed=8) - 3, "advantage": changes.pop("advantage", numbers(shape))}
            out, _ = loss_from_hidden(hidden, weight, rows, objective, **options, **given, **changes)
    if out.requires_grad:
        out.sum().backward()
    return [out.detach()]


DISAGREEMENTS: dict[str, dict[str, Any]] = {
    "rows": {"rows": TOKENS - 1},
    "dtype": {"dtype": torch.bfloat16},
    "entropy": {"entropy": "value"},
    "vocabulary": {"vocab_size": 2 * SHARD - 1},
    "kept ids": {"kept": True},
    "temperature": {"temperature": 0.5},
    "scale": {"scale": 2.0},
    "softcap": {"softcap": 30.0},
    "targets": {"shift": 1},
    "memory": {"memory": 300},
    "gradient mode": {"grad_mode": False},
    "gradient mode, frozen head": {"both": {"needs": {"hidden": True, "weight": False}}, "grad_mode": False},
    "gradient of hidden": {"needs": {"hidden": False, "weight": True}},
    "gradient of weight": {"needs": {"hidden": True, "weight": False}},
    "match": {"match": "bfloat16"},
    "bias": {"bias": True},
    "hidden_grad": {"hidden_grad": "partial"},
    "sequence_parallel": {"sequence_parallel": True},
    "objective": {"objective": {"policy": "reinforce"}},
    "a number of the objective": {"objective": {"clip": 0.1}},
    "entropy bonus": {"objective": {"entropy_coef": 0.1}},
    "denominator": {"denominator": 99.0},
    "advantages": {"advantage": torch.zeros(TOKENS)},
    "a short field": {"advantage": torch.zeros(TOKENS - 1)},
}
"""What rank 1 does differently, by what it is about; what both do is under "both"."""

HIDDEN = ("gradient mode, frozen head", "gradient of weight", "match", "bias", "hidden_grad", "sequence_parallel")
LOSS = ("objective", "a number of the objective", "entropy bonus", "denominator", "advantages", "a short field")
HEAD = ("temperature", "softcap", "scale", "vocab_size")


def abouts(path: str) -> list[str]:
    """What the ranks of a path can disagree about."""
    left_out = {"logprobs": (*HIDDEN, *LOSS), "logprobs of Logits": LOSS, "policy_loss": ("entropy",)}[path]
    return [about for about in DISAGREEMENTS if about not in left_out]


def disagree(rank: int, world: int, group: Any, path: str, timeout: float) -> dict[str, tuple[str, Any]]:
    """What a rank returned or raised, by what the ranks disagreed about. Each has a group of its own."""
    found = {}
    for about in abouts(path):
        own = dist.new_group(timeout=timedelta(seconds=timeout))
        try:
            odd = {**DISAGREEMENTS[about]}
            both = odd.pop("both", {})
            found[about] = "returned", call_of(path, rank, own, **both, **(odd if rank == 1 else {}))
        except Exception as error:
            found[about] = type(error).__name__, str(error)
        dist.barrier()
    return found
