"""Samples out of a batch and a mask of the tokens to score, whatever its padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from logitless.errors import LogitlessError
from logitless.rows.layouts import ragged_arange
from logitless.rows.samples import NOT_IDS, Samples

NAME = "Rows.from_mask"


def samples_of_mask(
    input_ids: Tensor,
    mask: Tensor,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | Sequence[int] | None,
    position_ids: Tensor | None,
) -> tuple[Samples, Tensor, Tensor, Tensor]:
    """The samples, each up to its last scored token; how many places of the batch each has; sample and offset of each.

    What precedes the first scored token is the sample's prompt: padding on the left too, which nobody reads.
    """
    _check_shapes(input_ids, mask=mask, attention_mask=attention_mask, position_ids=position_ids)
    spans = _spans(input_ids, cu_seqlens, position_ids)
    scored = mask.detach().reshape(-1).cpu() != 0
    sample, offset = ragged_arange(spans)
    if bool(scored[len(sample) :].any()):
        raise LogitlessError(f"{NAME}: the mask scores tokens after the last sample of cu_seqlens, {len(sample)} on.")
    scored = scored[: len(sample)]
    if attention_mask is not None:
        _check_attention(scored, attention_mask.detach().reshape(-1).cpu()[: len(sample)] != 0, sample, offset)
    last = torch.zeros_like(spans).scatter_reduce(0, sample, torch.where(scored, offset + 1, 0), "amax")
    far = int(spans.max()) if len(spans) else 0
    first = torch.full_like(spans, far).scatter_reduce(0, sample, torch.where(scored, offset, far), "amin")
    first = torch.minimum(first, last)
    alone = ((first == 0) & (last > 0)).nonzero().squeeze(1)
    if len(alone):
        raise LogitlessError(
            f"{NAME}: sample {int(alone[0])} is scored from its first token on, which no row predicts. Clear the mask "
            f"there, or prepend a token (BOS)."
        )
    before_end = offset < last[sample]
    held = before_end.nonzero().squeeze(1)
    response = (before_end & (offset >= first[sample])).nonzero().squeeze(1)
    inner = scored[response]
    some = not bool(inner.all())
    ids = input_ids.detach().reshape(-1)
    ids = ids[held.to(ids.device)].to(torch.int64)
    return Samples(ids, last, last - first, inner if some else None, some), spans, sample, offset


def _check_shapes(input_ids: Any, **others: Any) -> None:
    whole = isinstance(input_ids, Tensor) and not input_ids.is_floating_point() and input_ids.dtype not in NOT_IDS
    if not whole or input_ids.dim() not in (1, 2):
        came = (
            f"{list(input_ids.shape)} {input_ids.dtype}" if isinstance(input_ids, Tensor) else type(input_ids).__name__
        )
        raise LogitlessError(f"{NAME}: input_ids must be [N, S] or [T] integers but is {came}.")
    for name, x in others.items():
        if x is None and name != "mask":
            continue
        if not isinstance(x, Tensor) or x.shape != input_ids.shape:
            came = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            hint = ""
            if isinstance(x, Tensor) and x.dim() == 2 and x.shape[0] == input_ids.shape[0]:
                hint = " A mask of the completions alone is padded with zeros for the prompts first."
            raise LogitlessError(f"{NAME}: {name} must be {list(input_ids.shape)} like input_ids but is {came}.{hint}")


def _spans(input_ids: Tensor, cu_seqlens: Tensor | Sequence[int] | None, position_ids: Tensor | None) -> Tensor:
    """``[N]`` places of each sample: those of its line, or of its part of a pack."""
    pack = input_ids.dim() == 1 or input_ids.shape[0] == 1
    if cu_seqlens is not None and position_ids is not None:
        raise LogitlessError(f"{NAME}: give cu_seqlens or position_ids, not both.")
    if cu_seqlens is None and position_ids is None:
        if input_ids.dim() == 1:
            raise LogitlessError(f"{NAME}: a pack of one dimension needs cu_seqlens or position_ids.")
        return torch.full((input_ids.shape[0],), input_ids.shape[1])
    if not pack:
        raise LogitlessError(
            f"{NAME}: cu_seqlens and position_ids are for one pack, [T] or [1, T], but input_ids is "
            f"{list(input_ids.shape)}. For one sample per line leave them out."
        )
    count = input_ids.numel()
    if position_ids is not None:
        place = position_ids.reshape(-1).cpu()
        begins = (place == 0).nonzero().squeeze(1)
        starts = torch.cat([begins, torch.tensor([count])])
        if count and (
            not len(begins) or int(begins[0]) != 0 or not torch.equal(place, ragged_arange(starts.diff())[1])
        ):
            raise LogitlessError(
                f"{NAME}: position_ids must count 0, 1, 2, ... in each sample of the pack, without gaps. Pass "
                f"cu_seqlens where they do not."
            )
        return starts.diff()
    starts = torch.as_tensor(cu_seqlens).to(torch.int64).cpu()
    if starts.dim() != 1 or not len(starts) or int(starts[0]) != 0 or bool((starts.diff() < 0).any()):
        raise LogitlessError(f"{NAME}: cu_seqlens must start at 0 and never fall but is {starts.tolist()}.")
    if int(starts[-1]) > count:
        raise LogitlessError(f"{NAME}: cu_seqlens ends at {int(starts[-1])} but input_ids has {count} tokens.")
    return starts.diff()


def _check_attention(scored: Tensor, attended: Tensor, sample: Tensor, offset: Tensor) -> None:
    """Raise where a scored token is padding, or the token before it is."""
    before = torch.cat([attended.new_ones(min(1, len(attended))), attended[:-1]]) | (offset == 0)
    for bad, what in ((scored & ~attended, "is padding"), (scored & ~before, "follows on padding")):
        where = bad.nonzero().squeeze(1)
        if len(where):
            i = int(where[0])
            raise LogitlessError(
                f"{NAME}: token {int(offset[i])} of sample {int(sample[i])} is scored but {what} by attention_mask. "
                f"Is the mask shifted, or of another batch?"
            )
