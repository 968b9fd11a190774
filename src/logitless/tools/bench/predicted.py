"""Predicted against measured peaks: the same step, once through ``estimate`` and once through the allocator.

case = PeakCase("frozen", {"path": "linear_logprobs", "tokens": 16384, ..., "needs_grad": ("hidden",)})
print(table([compare(case, torch.device("cuda"))]))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.from_hidden.logprobs import linear_logprobs
from logitless.from_logits import logprobs
from logitless.kept import Kept
from logitless.memory import Estimate, estimate
from logitless.objectives import Objective
from logitless.policy_loss import linear_policy_loss
from logitless.rows import Rows
from logitless.spec import Head, VocabShard, format_bytes
from logitless.tools.bench.inputs import hand_over
from logitless.tools.bench.linear_providers import plain_linear
from logitless.tools.bench.measure import peak_bytes
from logitless.tools.bench.providers import plain
from logitless.tools.bench.tables import text_table


@dataclass(frozen=True)
class PeakCase:
    """A name, and all arguments of :func:`~logitless.memory.estimate` but the device."""

    name: str
    options: dict[str, Any]

    def predicted(self, device: torch.device) -> Estimate:
        return estimate(**self.options, device="cuda" if device.type == "cuda" else "cpu")


class Compared(NamedTuple):
    """Bytes of forward alone and of the whole step, predicted and measured."""

    name: str
    forward: int
    measured_forward: int
    step: int
    measured_step: int

    @property
    def error(self) -> float:
        """The larger of the two relative errors."""
        pairs = ((self.forward, self.measured_forward), (self.step, self.measured_step))
        return max(abs(predicted - measured) / max(1, measured) for predicted, measured in pairs)


def compare(case: PeakCase, device: torch.device, group: Any = None) -> Compared:
    """Measure forward and the whole step of a case, after one step to warm up (workspaces, compiled kernels)."""
    predicted = case.predicted(device)
    forward, backward = _step(case.options, device, group)

    def step() -> None:
        out = forward()
        backward(out)

    if device.type != "cpu":
        step()
    return Compared(
        case.name, predicted.forward_peak, peak_bytes(forward, device), predicted.peak, peak_bytes(step, device)
    )


def table(results: Iterable[Compared]) -> str:
    """One line per case."""
    rows = [(r.name, *map(format_bytes, r[1:]), f"{r.error:.2%}") for r in results]
    return text_table(("case", "forward", "measured", "step", "measured", "error"), rows)


def _step(
    options: dict[str, Any], device: torch.device, group: Any
) -> tuple[Callable[[], list[Tensor]], Callable[[list[Tensor]], object]]:
    """Two functions: forward, which returns the outputs, and backward from those outputs."""
    asked = dict(options)
    path, tokens, vocab = asked.pop("path"), asked.pop("tokens"), asked.pop("vocab")
    dtype, count = getattr(torch, asked.pop("dtype", "bfloat16")), asked.pop("rows", None)
    hidden, entropy = asked.pop("hidden", None), asked.pop("entropy", None)
    needs = asked.pop("needs_grad", ("logits", "hidden", "weight", "bias"))
    num_rows = tokens if count is None else count
    ranks = asked.pop("tensor_parallel", 1)
    columns = -(-vocab // ranks)
    leaves = _leaves(tokens, columns, hidden, dtype, needs, asked, device, ranks)
    rows = _rows(tokens, vocab, count, asked.pop("counts", None), device)
    call = _call(path, leaves, rows, entropy, _arguments(asked, leaves, rows, vocab, ranks, group))
    wanted = [x for x in leaves.values() if x.requires_grad]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    upstream = torch.randn(num_rows, device=device, dtype=wide)
    if path == "linear_policy_loss":
        # With a buffer for the weight's gradient, the upstream gradient must be grad_scale, which is 1.
        upstream = torch.ones((), device=device, dtype=wide)

    def forward() -> Any:
        return call()

    def backward(out: Any) -> None:
        if wanted:
            outputs = [out[0]] if entropy != "grad" else [out[0], out[1]]
            torch.autograd.grad(outputs, wanted, [upstream] * len(outputs), allow_unused=True)

    return forward, backward


def _rows(tokens: int, vocab: int, count: int | None, counts: tuple[int, ...] | None, device: torch.device) -> Any:
    """Targets of all tokens; or :class:`Rows` at ``count`` of them, or of samples with ``counts`` rows each."""
    if counts is not None:
        prompt = (tokens - sum(counts)) // len(counts)
        samples = [torch.randint(vocab, (prompt + length,)) for length in counts]
        return Rows.packed(samples, counts, num_tokens=tokens, device=device)
    target = torch.randint(vocab, (tokens if count is None else count,), device=device)
    if count is None:
        return target
    index = torch.randperm(tokens, device=device)[:count].sort().values
    return Rows.at(index, target, num_tokens=tokens)


def _leaves(
    tokens: int,
    columns: int,
    hidden: int | None,
    dtype: torch.dtype,
    needs: tuple[str, ...],
    asked: dict[str, Any],
    device: torch.device,
    ranks: int,
) -> dict[str, Tensor]:
    def make(name: str, *shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_(name in needs)

    if hidden is None:
        logits = make("", tokens, columns)
        return {"logits": hand_over(logits) if "logits" in needs else logits}
    own = tokens // ranks if asked.get("sequence_parallel") else tokens
    leaves = {"hidden": make("hidden", own, hidden), "weight": make("weight", columns, hidden)}
    if asked.pop("bias", False):
        leaves["bias"] = make("bias", columns)
    return leaves


def _arguments(
    asked: dict[str, Any], leaves: dict[str, Tensor], rows: Any, vocab: int, ranks: int, group: Any
) -> dict[str, Any]:
    """Keyword arguments of the call from those of the estimate."""
    first, num_rows = next(iter(leaves.values())), len(rows)
    if asked.pop("softcap", False):
        asked["head"] = Head(softcap=20.0)
    kept = asked.pop("kept_ids", None)
    if kept is not None:
        each, more = divmod(kept, num_rows)
        lengths = torch.full((num_rows,), each, device=first.device)
        lengths[:more] += 1
        asked["kept"] = Kept(torch.randint(vocab, (kept,), device=first.device), lengths)
    if asked.pop("weight_grad", False):
        asked["weight_grad"] = torch.zeros(leaves["weight"].shape, device=first.device)
    if ranks > 1:
        asked["shard"] = VocabShard.even(vocab, group)
    return asked


def _call(
    path: str, leaves: dict[str, Tensor], rows: Any, entropy: Any, arguments: dict[str, Any]
) -> Callable[[], Any]:
    if path == "torch":
        index, target = (None, rows) if isinstance(rows, Tensor) else (rows.index, rows.target)
        function = plain if "logits" in leaves else plain_linear
        return lambda: function(*leaves.values(), index, target, entropy)
    operands = [leaves[name] for name in ("logits", "hidden", "weight") if name in leaves]
    if "bias" in leaves:
        arguments["bias"] = leaves["bias"]
    if path == "linear_policy_loss":
        objective = arguments.pop("objective", Objective())
        fields = _fields(objective, len(rows), arguments.pop("dropped", 0.0), operands[0].device)
        hidden, weight = operands
        return lambda: linear_policy_loss(hidden, weight, rows, objective, **fields, **arguments)
    function: Any = logprobs if path == "logprobs" else linear_logprobs
    return lambda: function(*operands, rows, entropy=entropy, **arguments)


def _fields(objective: Objective, num_rows: int, dropped: float, device: torch.device) -> dict[str, Any]:
    """Fields of the objective that clip no row and give a share ``dropped`` of the rows no advantage."""
    fields: dict[str, Any] = {name: torch.zeros(num_rows, device=device) for name in objective.required}
    # Spread evenly, so that every chunk has the same share.
    so_far = torch.arange(num_rows + 1, device=device).mul(dropped).floor()
    return {**fields, "old_logprob": "current", "advantage": (so_far[1:] == so_far[:-1]).float()}
