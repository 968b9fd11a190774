"""What TRL's fused head reports of a token besides its log-prob and entropy; metrics, without gradient.

    is_top1            whether the label is the likeliest token, the first of several: SFT and DPO
    mean_logits        mean logit over the vocabulary: DPO and KTO
    log_sum_sq_probs   log of the sum of squared probabilities: DPO with WPO weights

Most tokens need no logits for these. A label of probability above 1/2 is the likeliest token; one less likely than e^-H
is not, because some token is at least as likely as that. The mean of products is the product with the mean. What is
left is multiplied again, tile by tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from logitless.from_hidden.gemm import multiply
from logitless.machine import SLAB, Machine, pieces
from logitless.spec import Head, TokenStats, parse_memory

MARGIN = 1e-3
"""What a log-prob or an entropy may be off by, and more."""


@dataclass(frozen=True, eq=False)
class Scored:
    """Rows that have been scored.

    Attributes:
        operands: ``[N, D]`` hidden states, ``[V, D]`` weight, ``[N]`` targets.
        bias: ``[V]`` or None.
        head: what becomes of the logits.
        rounded: whether logits are rounded to the dtype of the operands first.
        stats: ``[N]`` results.
        memory: of a tile of logits.
    """

    operands: tuple[Tensor, Tensor, Tensor]
    bias: Tensor | None
    head: Head
    rounded: bool
    stats: TokenStats
    memory: int | str

    @property
    def hidden(self) -> Tensor:
        return self.operands[0]

    @property
    def weight(self) -> Tensor:
        return self.operands[1]

    @property
    def targets(self) -> Tensor:
        return self.operands[2]

    def tile(self, rows: Tensor, columns: slice) -> Tensor:
        """``[C, columns]`` logits of some rows as the softmax sees them, in float32 or wider."""
        dtype = torch.promote_types(self.hidden.dtype, torch.float32)
        out = torch.empty((len(rows), columns.stop - columns.start), dtype=dtype, device=rows.device)
        weight = self.weight[columns]
        multiply(self.hidden.index_select(0, rows), weight.T, out, wide=Machine.of(rows.device).wide_products)
        if self.bias is not None:
            out += self.bias[columns]
        if self.rounded:
            out = out.to(self.hidden.dtype).to(dtype)
        out *= self.head.scale
        if self.head.softcap is not None:
            out = self.head.softcap * torch.tanh_(out / self.head.softcap)
        return out / self.head.temperature


@torch.no_grad()
def further_outputs(x: Scored, outputs: tuple[str, ...]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``log_sum_sq_probs``, ``mean_logits`` and ``is_top1``, each None unless asked for."""
    wanted = {"log_sum_sq_probs", "mean_logits", "is_top1"} & set(outputs)
    found: dict[str, Tensor] = {}
    with torch.autocast(x.hidden.device.type, enabled=False):
        if "mean_logits" in wanted and x.head.softcap is None:
            found["mean_logits"] = _mean_logits(x)
        left = wanted - set(found)
        if left == {"is_top1"}:
            hit, open_rows = _decided(x)
            found["is_top1"] = hit.index_copy(0, open_rows, _by_tiles(x, open_rows, left)["is_top1"])
        elif left:
            found |= _by_tiles(x, torch.arange(len(x.targets), device=x.targets.device), left)
    return found.get("log_sum_sq_probs"), found.get("mean_logits"), found.get("is_top1")


def _decided(x: Scored) -> tuple[Tensor, Tensor]:
    """``[N]`` whether a label is surely the likeliest token, and the rows of which neither is sure."""
    logprob = x.stats.logprob.detach()
    hit = logprob > math.log(0.5) + MARGIN
    some = -math.log(x.weight.shape[0]) if x.stats.entropy is None else -x.stats.entropy.detach()
    # Not "and below": a NaN is decided by nobody.
    sure = hit | (logprob < some - MARGIN)
    return hit, (~sure).nonzero().squeeze(1)


def _mean_logits(x: Scored) -> Tensor:
    """The head is linear, so the mean over its rows comes first."""
    wide = torch.promote_types(x.hidden.dtype, torch.float32)
    mean = x.weight.mean(0, dtype=wide)
    offset = 0.0 if x.bias is None else x.bias.mean(dtype=wide)
    rows = max(1, parse_memory(x.memory) // (max(1, x.hidden.shape[1]) * wide.itemsize))
    parts = [part.to(wide) @ mean for part in x.hidden.split(rows)]
    means = torch.cat(parts) if parts else x.hidden.new_zeros(0, dtype=wide)
    return ((means + offset) * (x.head.scale / x.head.temperature)).float()


def _by_tiles(x: Scored, rows: Tensor, wanted: set[str]) -> dict[str, Tensor]:
    """Outputs of some rows from their logits, of which a tile exists at a time."""
    columns = x.weight.shape[0]
    wide = torch.promote_types(x.hidden.dtype, torch.float32)
    # A tile is there twice while it is transformed, besides what widens the operands of its product.
    step = max(1, parse_memory(x.memory) // (3 * min(SLAB, columns) * wide.itemsize))
    best = torch.full((len(rows),), -torch.inf, dtype=wide, device=rows.device)
    at, total, squares = torch.zeros_like(rows), torch.zeros_like(best), torch.zeros_like(best)
    for some in pieces(len(rows), step):
        here = rows[some]
        log_z = None if x.stats.log_z is None else x.stats.log_z.detach()[here].to(wide)
        for part in pieces(columns, SLAB):
            z = x.tile(here, part)
            if "is_top1" in wanted:
                top, place = z.max(1)
                # Strictly above: of several that are the largest, the first counts.
                at[some] = torch.where(top > best[some], place + part.start, at[some])
                best[some] = torch.maximum(top, best[some])
            if "mean_logits" in wanted:
                total[some] += z.sum(1)
            if "log_sum_sq_probs" in wanted:
                assert log_z is not None
                squares[some] += torch.exp(2 * (z - log_z[:, None])).sum(1)
    # Of a row of NaN, or of nothing but -inf, no token is the likeliest.
    made = {"is_top1": (at == x.targets[rows]) & best.isfinite(), "mean_logits": (total / columns).float()}
    made["log_sum_sq_probs"] = squares.log().float()
    return {name: value for name, value in made.items() if name in wanted}
