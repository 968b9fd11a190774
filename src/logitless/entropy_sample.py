"""``sampled_entropy``: the mean entropy over the whole vocabulary, from a sample of the rows.

Whoever needs entropy as a metric alone, as with ``scope="support"``, need not multiply every row with the vocabulary
for it: the mean of a few hundred rows is known to a percent or so, and the error comes with it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.call import resolve_rows
from logitless.errors import LogitlessError
from logitless.rows import Rows
from logitless.score import logprobs
from logitless.spec import IGNORE, inspectable

NAME = "sampled_entropy"


class SampledEntropy(NamedTuple):
    """The mean over all scored rows, estimated from some of them.

    Attributes:
        mean: 0-dim, unbiased.
        error: 0-dim, standard error of the mean; 0 where every row was taken, NaN from a single one.
        entropy: ``[n]`` of the rows taken, in nats.
        taken: ``[n]`` which rows, ascending.
    """

    mean: Tensor
    error: Tensor
    entropy: Tensor
    taken: Tensor


def sampled_entropy(
    logits: Any, rows: Any, *, sample: int | float = 512, seed: int = 0, **options: Any
) -> SampledEntropy:
    """Mean entropy over the whole vocabulary of a random sample of the rows, with its standard error. No graph.

    Args:
        logits, rows: as for :func:`logprobs`. Rows with target ``-100`` are not drawn from.
        sample: how many rows are taken, or which share of them if below 1. All of them where there are no more.
        seed: of the draw, without replacement. The ranks of a vocabulary group take the same rows; a step's number
            makes another draw each step.
        options: ``head``, ``backend`` and ``memory`` of :func:`logprobs`. A temperature per row is given for all rows.

    Raises:
        LogitlessError: an argument cannot be honoured; the text says which and why.

    >>> from logitless.operands import Logits
    >>> logits = Logits(torch.zeros(9, 2), torch.zeros(4, 2))
    >>> out = sampled_entropy(logits, torch.zeros(9, dtype=torch.int64), sample=5)
    >>> out.mean, len(out.taken)
    (tensor(1.3863), 5)
    """
    for name in options:
        if name not in ("head", "backend", "memory"):
            raise LogitlessError(f"{NAME}: {name} is no option of it. It takes head, backend and memory.")
    chosen, _ = resolve_rows(NAME, rows)
    taken, population = _draw(chosen, sample, seed)
    head = options.get("head")
    if head is not None and isinstance(head.temperature, Tensor) and head.temperature.dim():
        options["head"] = replace(head, temperature=head.temperature.flatten()[taken.to(head.temperature.device)])
    some = Rows.at(chosen.index[taken], chosen.target[taken], num_tokens=chosen.num_tokens)
    with torch.no_grad():
        entropy = logprobs(logits, some, entropy="value", **options).entropy
    assert entropy is not None
    return SampledEntropy(entropy.mean(), _standard_error(entropy, population), entropy, taken)


def _standard_error(sample: Tensor, population: int) -> Tensor:
    """Standard error of the mean of a sample without replacement."""
    if len(sample) == population:
        return sample.new_zeros(())
    if len(sample) == 1:
        return sample.new_full((), torch.nan)
    return (sample.var() / len(sample) * (1 - len(sample) / population)).sqrt()


def _draw(rows: Rows, sample: int | float, seed: int) -> tuple[Tensor, int]:
    """Which rows are taken, and out of how many."""
    if isinstance(sample, bool) or not isinstance(sample, int | float) or not sample > 0:
        raise LogitlessError(f"{NAME}: sample must be a number of rows, or a share below 1, but is {sample!r}.")
    if isinstance(sample, float) and sample >= 1:
        raise LogitlessError(f"{NAME}: sample is {sample}, but a share is below 1. Pass whole rows as an int.")
    ignored = rows.target == IGNORE
    low = (rows.target_range or (IGNORE, 0))[0]
    # The device is asked which rows are left out only where some may be.
    some = inspectable(rows.target) or low < 0
    scored = (~ignored).nonzero().squeeze(1) if some else torch.arange(len(rows), device=rows.target.device)
    count = max(1, round(sample * len(scored))) if isinstance(sample, float) else min(sample, len(scored))
    if not len(scored):
        raise LogitlessError(f"{NAME}: there is no row to draw from: of {len(rows)} rows none is scored.")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(scored), generator=generator, device="cpu")[:count].sort().values
    return scored[order.to(scored.device)], len(scored)
