"""``audit=k``: k random rows of every call, computed again in float64 and compared.

    pick k rows that have a target  ->  their logits in float64  ->  log-prob and entropy  ->  worst difference so far

The float64 truth is written out in plain torch and shares no code with the results it judges. The audit draws rows from
its own random generator: torch's random state stays untouched, and ranks that make the same calls compare the same
rows. A comparison waits for the device, so the audit is off by default.
"""

from __future__ import annotations

import math
import threading
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from logitless.collectives import gather_over
from logitless.errors import LogitlessError
from logitless.operands import Given, Logits, LoRA, shard_of
from logitless.operands.unit import reading
from logitless.spec import Head, VocabShard

SEED = 0x106171E55
TOLERANCE = 1e-5
"""Largest difference, relative to max(1, |truth|), that passes; one rounding to the result's dtype comes on top."""

SLAB_BYTES = 64 * 2**20
"""Largest float64 copy of a part of the head's weight."""


@dataclass(frozen=True)
class AuditReport:
    """The comparisons of an audit so far.

    Attributes:
        rows: results compared with float64 so far.
        worst: largest ``|ours - truth| / max(1, |truth|)``; NaN or infinity if a value was not finite.
        where: host function and result of the worst difference, or None before the first comparison.
        passed: no difference was above its tolerance.
    """

    rows: int = 0
    worst: float = 0.0
    where: str | None = None
    passed: bool = True

    def __str__(self) -> str:
        if not self.rows:
            return "nothing compared yet"
        verdict = "" if self.passed else ", ABOVE TOLERANCE"
        return f"{self.rows} results compared, worst difference {self.worst:.3g} ({self.where}){verdict}"


class Audit:
    """Running comparison with float64 of ``rows`` random rows per call; with 0, every method returns at once.

    >>> audit = Audit(rows=2)
    >>> logits = torch.zeros(3, 4)
    >>> audit.of_logits("f", logits, torch.tensor([0, 1, 2]), logprob=torch.full((3,), -1.386294361))
    >>> print(audit.report())
    2 results compared, worst difference 2.75e-09 (f logprob)
    """

    def __init__(self, rows: int = 0, seed: int = SEED) -> None:
        if type(rows) is not int or rows < 0:
            raise LogitlessError(f"audit: wanted a number of rows per call, 0 for none, but got {rows!r}.")
        self._rows = rows
        self._generator = torch.Generator().manual_seed(seed)
        self._lock = threading.Lock()
        self._report = AuditReport()

    def __bool__(self) -> bool:
        return self._rows > 0

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {"_rows": self._rows, "_report": self._report, "_generator": self._generator.get_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of an audit in another process: it has a lock of its own, and goes on from the same comparisons."""
        generator = torch.Generator().set_state(state["_generator"])
        vars(self).update({**state, "_generator": generator, "_lock": threading.Lock()})

    def __deepcopy__(self, memo: dict[int, Any]) -> Audit:
        """A copy of a patched model reports to the same audit."""
        return self

    def report(self) -> AuditReport:
        return self._report

    def of_logits(
        self,
        where: str,
        logits: Tensor | Given,
        target: Tensor,
        *,
        logprob: Tensor | None = None,
        entropy: Tensor | None = None,
        head: Head | None = None,
    ) -> None:
        """Compare results with the float64 truth.

        Args:
            where: name of the host function, for the report.
            logits: as for :func:`logitless.logprobs`, before temperature. Of ``Logits(match=)``, which are rounded, the
                tolerance grows by the largest change that this can cause.
            target: ``[...]`` ids; rows whose id is outside the vocabulary are skipped, because hosts differ there.
            logprob, entropy: results of any shape with one entry per row, or None.
            head: as for :func:`logitless.logprobs`.
        """
        x, shard = logits.logits if isinstance(logits, Given) else logits, shard_of(logits)
        if not self or _drops(x):
            return
        chosen = self._choose(target, _vocab_size(x.shape[-1], head, shard))
        rows, rounded = _wide(x, chosen), x.linear.match if isinstance(x, Logits) else None
        slack = 0.0 if rounded is None else _rounding(rows, getattr(torch, rounded), head or Head())
        truths = _truth(rows, target.reshape(-1)[chosen], _rows_of(head or Head(), chosen), shard)
        for name, ours, truth in zip(("logprob", "entropy"), (logprob, entropy), truths, strict=True):
            if ours is not None:
                self.compare(f"{where} {name}", ours.detach().reshape(-1)[chosen.to(ours.device)], truth, slack)

    def of_pair(
        self,
        where: str,
        student: tuple[Logits, Head],
        teacher: tuple[Logits, Head],
        beta: float,
        divergence: Tensor,
        entropy: Tensor,
    ) -> None:
        """Compare a divergence and the student's entropy with the float64 truth.

        Args:
            student, teacher: logits and head.
            beta: 0 for KL(teacher || student), 1 for KL(student || teacher), else the teacher's share of a mixture.
        """
        if not self:
            return
        chosen = self._choose(torch.zeros_like(divergence, dtype=torch.int64), 1)
        log_p, log_q = (_shaped(_wide(x, chosen), head).log_softmax(1) for x, head in (student, teacher))
        self.compare(f"{where} divergence", divergence[chosen], _beta_divergence(log_p, log_q, beta))
        self.compare(f"{where} entropy", entropy[chosen], _mean(log_p, -log_p))

    def compare(self, where: str, ours: Tensor, truth: Tensor, slack: float = 0.0) -> None:
        """Compare our result with a float64 tensor of the same shape; ``slack`` is added to the tolerance."""
        if not self or not ours.numel():
            return
        wide, truth = ours.detach().double().cpu(), truth.detach().cpu()
        same = (wide == truth) | (wide.isnan() & truth.isnan())
        difference = torch.where(same, 0.0, (wide - truth).abs() / truth.abs().clamp_min(1.0))
        self._note(where, difference, TOLERANCE + torch.finfo(ours.dtype).eps + slack)

    def _choose(self, target: Tensor, vocab_size: int) -> Tensor:
        flat = target.detach().reshape(-1)
        scored = ((flat >= 0) & (flat < vocab_size)).nonzero().squeeze(1)
        with self._lock:
            order = torch.randperm(len(scored), generator=self._generator)
        return scored[order[: self._rows].to(scored.device)]

    def _note(self, where: str, difference: Tensor, tolerance: float) -> None:
        # With a NaN among the differences the maximum is NaN; the comparisons below count NaN as a failure.
        worst = float(difference.max())
        with self._lock:
            seen = self._report
            # Once NaN, the worst difference stays NaN.
            new = seen.where is None or not (worst <= seen.worst or math.isnan(seen.worst))
            failed = not worst <= tolerance
            self._report = AuditReport(
                rows=seen.rows + difference.numel(),
                worst=worst if new else seen.worst,
                where=where if new else seen.where,
                passed=seen.passed and not failed,
            )
        if failed and seen.passed:
            warnings.warn(
                f"logitless audit: {where} differs from float64 by {worst:.3g}, above the tolerance {tolerance:.3g}. "
                f"Further differences are kept in logitless.status() without a warning.",
                RuntimeWarning,
                stacklevel=2,
            )


def _vocab_size(width: int, head: Head | None, shard: VocabShard | None) -> int:
    padded = width if shard is None else shard.vocab_size
    return padded if head is None or head.vocab_size is None else head.vocab_size


def _rounding(logits: Tensor, dtype: torch.dtype, head: Head) -> float:
    """Bound on the change of a log-prob when all logits of its row are rounded to the dtype."""
    coldest = float(torch.as_tensor(head.temperature).min())
    largest = float(logits.abs().max()) if logits.numel() else 0.0
    return 2 * torch.finfo(dtype).eps * largest * abs(head.scale) / coldest


def _rows_of(head: Head, chosen: Tensor) -> Head:
    if not isinstance(head.temperature, Tensor) or not head.temperature.dim():
        return head
    return replace(head, temperature=head.temperature.reshape(-1)[chosen.to(head.temperature.device)])


def _truth(logits: Tensor, target: Tensor, head: Head, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    """``[k]`` log-probs and entropies in float64 from ``[k, V]`` raw logits; a group's shards are gathered first."""
    start = 0 if shard is None else shard.start
    z = _shaped(logits, head, shard)
    if shard is not None and shard.group is not None:
        z = _whole_rows(z, shard)
        start = 0
    logp = torch.log_softmax(z, dim=1)
    return logp.gather(1, (target - start)[:, None]).squeeze(1), _mean(logp, -logp)


def _drops(logits: Tensor) -> bool:
    """Whether an adapter drops hidden states at random, so that nobody can tell which."""
    lora = logits.weight if isinstance(logits, Logits) else None
    return isinstance(lora, LoRA) and lora.dropout is not None


@reading
def _wide(logits: Tensor, chosen: Tensor) -> Tensor:
    """``[k, V]`` float64 logits of a few rows."""
    if not isinstance(logits, Logits):
        return logits.detach().reshape(-1, logits.shape[-1])[chosen].double()
    stands = logits.opened()
    hidden, weight, bias = stands.hidden.detach(), stands.weight, stands.linear.bias
    if logits.linear.sequence_parallel:
        hidden = gather_over(logits.linear.shard.group, hidden).flatten(0, 1)  # pyright: ignore[reportOptionalMemberAccess]
    rows = hidden.reshape(-1, hidden.shape[-1])[chosen].double()
    matrix = weight.weight if isinstance(weight, LoRA) else weight
    step = max(1, SLAB_BYTES // (8 * max(1, matrix.shape[1])))
    with torch.autocast(rows.device.type, enabled=False):
        x = torch.cat([rows @ slab.to(hidden.dtype).double().T for slab in matrix.detach().split(step)], dim=1)
        if isinstance(weight, LoRA):
            x = x + weight.scale * (rows @ weight.a.detach().double().T) @ weight.b.detach().double().T
    x = x if bias is None else x + bias.detach().double()
    x = torch.tanh(x * logits.squash) if logits.squash else x
    gain = logits.gain
    return x * (gain.detach().reshape(-1)[chosen][:, None].double() if isinstance(gain, Tensor) else gain)


def _shaped(logits: Tensor, head: Head, shard: VocabShard | None = None) -> Tensor:
    """What the softmax is over, without padding."""
    start = 0 if shard is None else shard.start
    here = max(0, min(_vocab_size(logits.shape[1], head, shard) - start, logits.shape[1]))
    z = logits[:, :here] * head.scale
    z = z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)
    t = head.temperature
    return z / (t.to(z)[:, None] if isinstance(t, Tensor) and t.dim() else t)


def _mean(log_p: Tensor, x: Tensor) -> Tensor:
    """Of x over each row; what has no probability has no say."""
    return torch.where(log_p == -torch.inf, 0.0, log_p.exp() * x).sum(1)


def _beta_divergence(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    if beta == 0:
        return _mean(log_q, log_q - log_p)
    if beta == 1:
        return _mean(log_p, log_p - log_q)
    mix = torch.logaddexp(log_q + math.log(beta), log_p + math.log(1 - beta))
    return beta * _mean(log_q, log_q - mix) + (1 - beta) * _mean(log_p, log_p - mix)


def _whole_rows(z: Tensor, shard: VocabShard) -> Tensor:
    """``[k, V]`` from the shards of all ranks: one gather of k rows, each shard padded to the whole width."""
    padded: Any = z.new_full((z.shape[0], shard.vocab_size), -torch.inf)
    padded[:, shard.start : shard.start + z.shape[1]] = z
    return gather_over(shard.group, padded).amax(0)
