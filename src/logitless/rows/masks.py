"""Samples out of a batch and a mask of the tokens to score, whatever its padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from logitless.errors import LogitlessError
from logitless.errors.arguments import dense, refused
from logitless.rows.integers import holds_integers, integers
from logitless.rows.layouts import ragged_arange
from logitless.rows.samples import Samples
from logitless.spec import IGNORE

Cut = tuple[Samples, Tensor, Tensor, Tensor]
"""Samples up to their last scored token; how many places of the batch each has; sample and offset of each place."""


def samples_of_mask(
    input_ids: Tensor,
    mask: Tensor,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | Sequence[int] | None,
    position_ids: Tensor | None,
) -> Cut:
    """Samples of a mask. What precedes the first scored token is its prompt, padding on the left included."""
    name = "Rows.from_mask"
    _check_shapes(name, "input_ids", input_ids, mask=mask, attention_mask=attention_mask, position_ids=position_ids)
    if input_ids.dim() == 1 and cu_seqlens is None and position_ids is None:
        raise LogitlessError(f"{name}: a pack of one dimension needs cu_seqlens or position_ids.")
    spans = _spans(name, "input_ids", input_ids, cu_seqlens, position_ids)
    sample, offset = ragged_arange(spans)
    scored = _within(name, "mask scores", mask.detach().reshape(-1).cpu() != 0, len(sample))
    if attention_mask is not None:
        _check_attention(name, scored, attention_mask.detach().reshape(-1).cpu()[: len(sample)] != 0, sample, offset)
    alone = (scored & (offset == 0)).nonzero().squeeze(1)
    if len(alone):
        raise LogitlessError(
            f"{name}: sample {int(sample[alone[0]])} is scored from its first token on, which no row predicts. Clear "
            f"the mask there, or prepend a token (BOS)."
        )
    return _cut(input_ids, scored, spans, sample, offset)


def samples_of_labels(labels: Tensor, cu_seqlens: Tensor | Sequence[int] | None, position_ids: Tensor | None) -> Cut:
    """Samples of labels. Every label that is not -100 is scored, but for a sample's first, which no row predicts."""
    name = "Rows.from_labels"
    _check_shapes(name, "labels", labels, position_ids=position_ids)
    if labels.dim() == 1 and cu_seqlens is None and position_ids is None:
        cu_seqlens = [0, len(labels)]
    spans = _spans(name, "labels", labels, cu_seqlens, position_ids)
    sample, offset = ragged_arange(spans)
    scored = _within(name, "labels are not -100 at", labels.detach().reshape(-1).cpu() != IGNORE, len(sample))
    return _cut(labels, scored & (offset > 0), spans, sample, offset)


def _cut(ids: Tensor, scored: Tensor, spans: Tensor, sample: Tensor, offset: Tensor) -> Cut:
    last = torch.zeros_like(spans).scatter_reduce(0, sample, torch.where(scored, offset + 1, 0), "amax")
    far = int(spans.max()) if len(spans) else 0
    first = torch.full_like(spans, far).scatter_reduce(0, sample, torch.where(scored, offset, far), "amin")
    first = torch.minimum(first, last)
    before_end = offset < last[sample]
    held = before_end.nonzero().squeeze(1)
    response = (before_end & (offset >= first[sample])).nonzero().squeeze(1)
    inner = scored[response]
    some = not bool(inner.all())
    ids = ids.detach().reshape(-1)
    ids = ids[held.to(ids.device)].to(torch.int64)
    return Samples(ids, last, last - first, inner if some else None, some), spans, sample, offset


def _within(name: str, what: str, scored: Tensor, count: int) -> Tensor:
    """The first ``count`` entries of a mask over a pack, which may have padding after its last sample."""
    if bool(scored[count:].any()):
        raise LogitlessError(f"{name}: the {what} tokens after the last sample of cu_seqlens, {count} on.")
    return scored[:count]


def _check_shapes(caller: str, name: str, ids: Any, **others: Any) -> None:
    wanted = "[N, S] or [T] integers"
    dense(ids, f"{caller}: {name}", wanted, numbers=name == "labels")
    if not holds_integers(ids) or ids.dim() not in (1, 2):
        raise refused(f"{caller}: {name}", wanted, ids)
    for other, x in others.items():
        if x is None and other != "mask":
            continue
        wanted = f"{list(ids.shape)} like {name}"
        x = dense(x, f"{caller}: {other}", wanted, numbers=True)
        if x.is_complex():
            raise refused(f"{caller}: {other}", "a mask", x)
        if x.shape != ids.shape:
            hint = ""
            if x.dim() == 2 and x.shape[0] == ids.shape[0]:
                hint = " A mask of the completions alone is padded with zeros for the prompts first."
            raise LogitlessError(f"{caller}: {other} must be {wanted} but is {list(x.shape)}.{hint}")


def _spans(
    caller: str, name: str, ids: Tensor, cu_seqlens: Tensor | Sequence[int] | None, position_ids: Tensor | None
) -> Tensor:
    """``[N]`` places of each sample: those of its line, or of its part of a pack."""
    if cu_seqlens is not None and position_ids is not None:
        raise LogitlessError(f"{caller}: give cu_seqlens or position_ids, not both.")
    if cu_seqlens is None and position_ids is None:
        return torch.full((ids.shape[0],), ids.shape[1], device="cpu")
    if ids.dim() == 2 and ids.shape[0] != 1:
        raise LogitlessError(
            f"{caller}: cu_seqlens and position_ids are for one pack, [T] or [1, T], but {name} is {list(ids.shape)}. "
            f"For one sample per line leave them out."
        )
    count = ids.numel()
    if position_ids is not None:
        place = integers(position_ids.reshape(-1), f"{caller}: position_ids").cpu()
        begins = (place == 0).nonzero().squeeze(1)
        starts = torch.cat([begins, torch.tensor([count], device="cpu")])
        if count and (
            not len(begins) or int(begins[0]) != 0 or not torch.equal(place, ragged_arange(starts.diff())[1])
        ):
            raise LogitlessError(
                f"{caller}: position_ids must count 0, 1, 2, ... in each sample of the pack, without gaps. Pass "
                f"cu_seqlens where they do not."
            )
        return starts.diff()
    starts = integers(cu_seqlens, f"{caller}: cu_seqlens").cpu()
    if not len(starts) or int(starts[0]) != 0 or bool((starts.diff() < 0).any()):
        raise LogitlessError(f"{caller}: cu_seqlens must start at 0 and never fall but is {starts.tolist()}.")
    if int(starts[-1]) > count:
        raise LogitlessError(f"{caller}: cu_seqlens ends at {int(starts[-1])} but {name} has {count} tokens.")
    return starts.diff()


def _check_attention(caller: str, scored: Tensor, attended: Tensor, sample: Tensor, offset: Tensor) -> None:
    """Raise where a scored token is padding, or the token before it is."""
    before = torch.cat([attended.new_ones(min(1, len(attended))), attended[:-1]]) | (offset == 0)
    for bad, what in ((scored & ~attended, "is padding"), (scored & ~before, "follows on padding")):
        where = bad.nonzero().squeeze(1)
        if len(where):
            i = int(where[0])
            raise LogitlessError(
                f"{caller}: token {int(offset[i])} of sample {int(sample[i])} is scored but {what} by attention_mask. "
                f"Is the mask shifted, or of another batch?"
            )
