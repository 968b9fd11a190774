"""From values per row to one loss: a weight per row, because every reduction in use is linear.

    token_mean    1 / tokens                                    every token weighs the same
    sample_mean   1 / (tokens of the sample * samples)          every sample weighs the same
    sample_sum    1 / (length * samples)                        a sample weighs by its tokens, over a fixed length
    prompt_mean   1 / (tokens of the prompt's samples * prompts)

Tokens are those that count in the loss. The last factor is the *denominator*: a count over the whole batch, which a
micro-batch cannot know, so it is an argument. The loss of a micro-batch on a rank is then its part of one sum, and sums
and gradients are the same for every way to split the batch over micro-batches, data- and context-parallel ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from logitless.collectives import resolve_group, sum_over
from logitless.errors import LogitlessError
from logitless.errors.arguments import check_flags, check_name, dense, instance, real_numbers, refused, sequence
from logitless.rows import Rows
from logitless.rows.integers import holds_integers, whole_number
from logitless.rows.layouts import num_ranks
from logitless.spec import inspectable

Reduction = Literal["token_mean", "sample_mean", "sample_sum", "prompt_mean"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)


def row_weights(
    rows: Rows,
    reduce: Reduction,
    *,
    length: int | None = None,
    denominator: float | Tensor | None = None,
    prompt_tokens: Tensor | None = None,
    complete: bool = False,
) -> Tensor:
    """``[R]`` float64 weight of each row in the loss, 0 where it does not count.

    Args:
        rows: the rows of this micro-batch on this rank.
        reduce: one of the four above.
        length: the fixed length of ``sample_sum``.
        denominator: tokens (``token_mean``), samples or prompts of the whole batch, see :func:`count_over`; default:
            counted over these samples alone, their tokens on all ranks included.
        prompt_tokens: ``[N]`` counted tokens of all samples of each sample's prompt, for ``prompt_mean``; see
            :func:`prompt_tokens_over`.
        complete: what ``rows.complete`` says, if it was asked.
    """
    known = isinstance(rows, Rows) and isinstance(reduce, str) and reduce in REDUCTIONS
    if not known or not isinstance(complete, bool):
        instance(rows, Rows, "row_weights: rows", " Make one with Rows.packed, say.")
        check_name(reduce, REDUCTIONS, "row_weights: reduce")
        check_flags("row_weights", complete=complete)
    if (reduce == "sample_sum" or length is not None) and (type(length) is not int or length < 1):
        raise refused("row_weights: length", "the fixed length of sample_sum, a positive integer,", length)
    device, num_samples = rows.target.device, len(rows.counts)
    if (prompt_tokens is not None) != (reduce == "prompt_mean"):
        came = "none came" if prompt_tokens is None else f"they came with reduce={reduce!r}"
        raise LogitlessError(
            f'Objective: prompt_tokens go with reduce="prompt_mean", and {came}. Take them from prompt_tokens_over.'
        )
    if complete and prompt_tokens is None and not isinstance(denominator, Tensor):
        return _known_weights(rows, reduce, length, denominator, device)
    count = _denominator(rows, reduce, denominator)
    if prompt_tokens is not None:
        count = count * _check_prompt_tokens(prompt_tokens, num_samples, device)
    elif reduce == "sample_mean":
        count = count * rows.totals
    elif reduce == "sample_sum":
        assert length is not None
        count = count * length
    # What was counted here, or looked at already, is a count.
    scale = inverse(count) if prompt_tokens is not None or isinstance(denominator, Tensor) else _inverse(count)
    return torch.where(rows.counted, scale[rows.sample] if scale.dim() else scale, 0.0)


def _known_weights(
    rows: Rows, reduce: Reduction, length: int | None, denominator: float | None, device: torch.device
) -> Tensor:
    """:func:`row_weights` where everything that they are made of is known on the CPU."""
    if denominator is None:
        denominator = sum(rows.counts) if reduce == "token_mean" else len(rows.counts)
    else:
        check_denominator("Objective", denominator, torch.device("meta"))
    if reduce == "sample_mean":
        each = [count * denominator for count in rows.counts]
        by_sample = torch.tensor([1 / x if x else 0.0 for x in each], dtype=torch.float64, device=device)
        return by_sample[rows.sample]
    count = (float(length or 0) if reduce == "sample_sum" else 1.0) * denominator
    return torch.full(rows.index.shape, 1 / count if count else 0.0, dtype=torch.float64, device=device)


def count_over(rows: Rows | Sequence[Rows], reduce: Reduction, group: Any = None) -> Tensor:
    """The denominator of a whole batch: tokens for ``token_mean``, samples for ``sample_mean`` and ``sample_sum``.

    Args:
        rows: the micro-batches of this rank.
        reduce: the reduction of the objective.
        group: all ranks that have a part of the batch, data-parallel and context-parallel together; None if this
            process has all of it. Under context parallelism each sample is seen by every rank of its group and is
            counted once. One all-reduce of one number.

    Returns:
        0-dim float64 tensor on the device of the rows; nothing waits for the device.

    >>> rows = Rows.packed([[7, 8, 9], [4, 5, 6, 7]], [1, 2])
    >>> count_over([rows, rows], "token_mean").item(), count_over(rows, "sample_mean").item()
    (6.0, 2.0)
    """
    batches = _batches("count_over", rows)
    if isinstance(reduce, str) and reduce == "prompt_mean":
        raise LogitlessError(
            'count_over: the denominator of "prompt_mean" is the number of prompts of the batch, which the caller '
            "knows; the tokens of each prompt come from prompt_tokens_over."
        )
    check_name(reduce, REDUCTIONS, "count_over: reduce")
    if reduce == "token_mean":
        count = functools.reduce(torch.add, [batch.totals.sum() for batch in batches]).double()
    else:
        samples = sum(len(batch.counts) for batch in batches)
        count = torch.full((), samples, dtype=torch.float64, device=batches[0].totals.device)
    return _once_over("count_over", count, batches, group)


def prompt_tokens_over(
    rows: Rows | Sequence[Rows], prompts: Tensor | Sequence[Tensor], num_prompts: int, group: Any = None
) -> list[Tensor]:
    """Counted tokens of all samples of each sample's prompt, on all ranks: ``[N]`` per micro-batch.

    The denominator that goes with them is ``num_prompts`` itself.

    Args:
        rows: the micro-batches of this rank.
        prompts: ``[N]`` number of each sample's prompt, 0 .. num_prompts - 1, for each micro-batch.
        num_prompts: prompts of the whole batch, the same on every rank.
        group: as for :func:`count_over`. One all-reduce of ``[num_prompts]``.
    """
    batches = _batches("prompt_tokens_over", rows)
    num_prompts = whole_number(num_prompts, "prompt_tokens_over: num_prompts")
    if num_prompts < 0:
        raise refused("prompt_tokens_over: num_prompts", "the number of prompts of the batch", num_prompts)
    wanted = "a tensor of the prompt of each sample, or a list of one per micro-batch"
    ids = [prompts] if isinstance(prompts, Tensor) else list(sequence(prompts, "prompt_tokens_over: prompts", wanted))
    if len(ids) != len(batches):
        raise LogitlessError(f"prompt_tokens_over: got {len(batches)} rows but {len(ids)} tensors of prompts.")
    for place, (batch, of_samples) in enumerate(zip(batches, ids, strict=True)):
        whose = f"prompt_tokens_over: prompts of micro-batch {place}"
        dense(of_samples, whose, "a tensor of integers, one per sample", numbers=not batch.totals.is_meta)
        if tuple(of_samples.shape) != (len(batch.counts),) or not holds_integers(of_samples):
            raise LogitlessError(
                f"{whose} must be integers of shape [{len(batch.counts)}], "
                f"one per sample, but are {list(of_samples.shape)} {of_samples.dtype}."
            )
        if inspectable(of_samples) and bool(((of_samples < 0) | (of_samples >= num_prompts)).any()):
            raise LogitlessError(
                f"{whose} must be in 0 .. {num_prompts - 1} but reach "
                f"{int(of_samples.min())} .. {int(of_samples.max())}."
            )
    ids = [x.to(batch.totals.device, torch.int64) for x, batch in zip(ids, batches, strict=True)]
    tokens = batches[0].totals.new_zeros(num_prompts)
    for batch, of_samples in zip(batches, ids, strict=True):
        # Integers, so the order of the sum does not matter.
        tokens = tokens.index_add(0, of_samples, batch.totals)
    tokens = _once_over("prompt_tokens_over", tokens.double(), batches, group)
    return [tokens[of_samples] for of_samples in ids]


def _batches(caller: str, rows: Rows | Sequence[Rows]) -> list[Rows]:
    wanted = "Rows, or a list of the Rows of each micro-batch"
    batches = [rows] if isinstance(rows, Rows) else list(sequence(rows, f"{caller}: rows", wanted))
    for batch in batches:
        instance(batch, Rows, f"{caller}: rows")
    if not batches:
        raise LogitlessError(
            f"{caller}: rows is an empty list, so neither device nor split is known. A rank without samples passes "
            f"Rows.packed([], [])."
        )
    return batches


def _once_over(caller: str, count: Tensor, batches: list[Rows], group: Any) -> Tensor:
    """Sum of a count over ranks; the context-parallel ranks of a sample have the same count, which is taken once."""
    group = resolve_group(group, f"{caller}: group")
    if group is None:
        return count
    size = num_ranks(batches[0].cp)
    if group.size() % size:
        raise LogitlessError(
            f"{caller}: group has {group.size()} ranks but these rows are split over {size} context-parallel ranks. "
            f"Pass the group of all data- and context-parallel ranks together."
        )
    return sum_over(group, count) / size


def _denominator(rows: Rows, reduce: Reduction, denominator: float | Tensor | None) -> Tensor:
    if denominator is None:
        if reduce == "prompt_mean":
            raise LogitlessError(
                'Objective: reduce="prompt_mean" needs denominator=, the number of prompts of the batch; none came.'
            )
        return count_over(rows, reduce)
    return check_denominator("Objective", denominator, rows.target.device)


def check_denominator(caller: str, denominator: float | Tensor, device: torch.device) -> Tensor:
    """0-dim float64 tensor on the device, if it is a count as far as can be seen from here."""
    if isinstance(denominator, Tensor):
        if denominator.is_complex():
            raise refused(f"{caller}: denominator", "a count of 0 or more", denominator)
        if denominator.dim() != 0 or denominator.requires_grad:
            raise LogitlessError(
                f"{caller}: denominator must be a number or a 0-dim tensor without gradient but has shape "
                f"{list(denominator.shape)}{' and requires grad' if denominator.requires_grad else ''}."
            )
        # On an accelerator this check would stall the stream; there a bad value makes the loss NaN.
        if inspectable(denominator) and not 0 <= float(denominator) < math.inf:
            raise LogitlessError(f"{caller}: denominator must be a count of 0 or more but is {float(denominator)}.")
        return denominator.to(device, torch.float64)
    if isinstance(denominator, bool) or not isinstance(denominator, (int, float)) or not 0 <= denominator < math.inf:
        raise LogitlessError(
            f"{caller}: denominator must be a count of 0 or more, a number or a 0-dim tensor, but is {denominator!r}."
        )
    return torch.full((), float(denominator), dtype=torch.float64, device=device)


def _check_prompt_tokens(prompt_tokens: Tensor, num_samples: int, device: torch.device) -> Tensor:
    dense(prompt_tokens, "Objective: prompt_tokens", f"a tensor of {num_samples} counts", numbers=device.type != "meta")
    real_numbers(prompt_tokens, "Objective: prompt_tokens", (num_samples,), "sample")
    return prompt_tokens.detach().to(device, torch.float64)


def inverse(count: Tensor) -> Tensor:
    """``1 / count``, and 0 where the count is 0: a mean over nothing is 0. NaN where it is no count at all."""
    return torch.where((count >= 0) & (count < math.inf), _inverse(count), math.nan)


def _inverse(count: Tensor) -> Tensor:
    """The same of what is a count."""
    return (1 / count).nan_to_num(posinf=0.0)
