"""The truth from hidden states, without a float64 copy of anything large.

Results of sampled rows, and gradients of sampled rows of the weight, are float64 throughout. The gradient of a row of
the weight is a sum over all scored rows, and needs the log Z and entropy of each: plain float32 sums over float32
products, made here in blocks of rows and independently of the library. Those are good to a few 1e-6.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.bench.inputs import BLOCK_ELEMENTS, Batch, product
from benchmarks.bench.measure import LinearTruth, Truth, sampled_tokens, truth_of


class _Results(NamedTuple):
    """Results of every scored row, ``[R]`` each, summed in float32."""

    log_z: Tensor
    logprob: Tensor
    entropy: Tensor


@torch.no_grad()
def with_loss(batch: Batch, hidden: Tensor, weight: Tensor) -> Batch:
    """The batch of a case that is a loss, with old log-probs around the true ones."""
    results = _results(batch, hidden, weight)
    return batch.with_loss(results.logprob, results.entropy)


@torch.no_grad()
def sample_linear_truth(batch: Batch, hidden: Tensor, weight: Tensor, count: int = 64) -> Truth:
    """The truth at ``count`` random rows of the hidden states, and at ``count`` rows of the weight."""
    token = sampled_tokens(batch, count)
    chosen = hidden[token].double()
    truth = truth_of(batch, torch.cat([chosen @ part.double().T for part in _blocks(weight)], dim=1), token)
    column = _sampled_columns(batch, count)
    results = _results(batch, hidden, weight)
    linear = LinearTruth(
        float(results.logprob.double().mean()) if len(batch.rows) else 0.0,
        column,
        torch.isin(column, batch.rows.target),
        *_weight_gradients(batch, hidden, weight[column].double(), column, results),
    )
    back = (_times_weight(d_logits, weight) for d_logits in (truth.by_logprob, truth.by_entropy))
    return truth._replace(by_logprob=next(back), by_entropy=next(back), linear=linear)


def _weight_gradients(
    batch: Batch, hidden: Tensor, weight: Tensor, column: Tensor, results: _Results
) -> tuple[Tensor, Tensor]:
    """Gradients of rows of the weight, by each upstream gradient alone, summed over all scored rows."""
    by_logprob, by_entropy = torch.zeros_like(weight), torch.zeros_like(weight)
    vectors = (batch.rows.index, batch.rows.target, batch.g_logprob, batch.g_entropy, *results)
    for parts in zip(*(vector.split(_block_rows(hidden)) for vector in vectors), strict=True):
        index, target, g_logprob, g_entropy, log_z, _, entropy = (part[:, None] for part in parts)
        rows = hidden[index.squeeze(1)].double()
        logp = rows @ weight.T - log_z
        p = logp.exp()
        by_logprob += (g_logprob.double() * ((target == column).double() - p)).T @ rows
        by_entropy -= (g_entropy.double() * p * (logp + entropy)).T @ rows
    return by_logprob, by_entropy


def _results(batch: Batch, hidden: Tensor, weight: Tensor) -> _Results:
    parts = []
    size = max(1, BLOCK_ELEMENTS // weight.shape[0])
    for index, target in zip(batch.rows.index.split(size), batch.rows.target.split(size), strict=True):
        z = product(hidden[index], weight)
        log_z = z.logsumexp(1)
        logp = z.sub_(log_z[:, None])
        logprob = logp.gather(1, target[:, None]).squeeze(1)
        parts.append((log_z, logprob, -(logp.exp() * logp).sum(1)))
    return _Results(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _times_weight(d_logits: Tensor, weight: Tensor) -> Tensor:
    widths = [part.shape[0] for part in _blocks(weight)]
    pairs = zip(d_logits.split(widths, dim=1), _blocks(weight), strict=True)
    return torch.stack([d @ part.double() for d, part in pairs]).sum(0)


def _blocks(weight: Tensor) -> Iterator[Tensor]:
    yield from weight.split(_block_rows(weight))


def _block_rows(x: Tensor) -> int:
    # In float64, half a gibibyte.
    return max(1, BLOCK_ELEMENTS // 4 // x.shape[1])


def _sampled_columns(batch: Batch, count: int) -> Tensor:
    """``count`` columns, half of them targets and half of them any, and the last column."""
    generator = torch.Generator().manual_seed(batch.seed + 4)
    targets = batch.rows.target.unique().cpu()
    picked = targets[torch.randperm(len(targets), generator=generator)[: count // 2]]
    others = torch.randint(batch.case.vocab, (count // 2,), generator=generator)
    return torch.cat([picked, others, torch.tensor([batch.case.vocab - 1])]).unique().to(batch.labels.device)
