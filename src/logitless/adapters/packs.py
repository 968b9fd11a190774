"""Batches of Megatron-based hosts as ``Rows``: padded lines, or sequences packed with padding after each of them.

    cu_seqlens_padded, attention_mask, sub_seq_lengths, target   ->   Rows, and the place of each result in [B, S - 1]
    [R] results of this rank and its context-parallel peers      ->   [B, S - 1], zeros elsewhere

To ``Rows`` a sequence is a sample with a prompt of one token: every later token is predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.errors import LogitlessError
from logitless.rows import Rows, Zigzag
from logitless.rows.exchange import GradRule
from logitless.rows.layouts import ragged_arange


@dataclass(frozen=True, eq=False)
class Batch:
    """The rows of a host's batch on this rank, and the way back to the host's output.

    Attributes:
        rows: the rows to score; one sample per sequence.
        place: ``[P]`` place in the flattened output of every predicted token of the batch, sequence after sequence.
        shape: shape of the output, ``[B, S - 1]``.
        group: the context-parallel group, or None where it has one rank.
        weights: ``[R]`` weight of each row, where the host weighs results.
    """

    rows: Rows
    place: Tensor
    shape: tuple[int, int]
    group: Any
    weights: Tensor | None = None

    def spread(self, values: Tensor, grad: GradRule) -> Tensor:
        """``[R]`` results of this rank and its peers as ``[B, S - 1]``, zeros elsewhere."""
        # The empty part keeps the graph of a batch without sequences.
        whole = torch.cat([values[:0], *self.rows.gather(values, self.group, grad=grad)])
        return values.new_zeros(self.shape[0] * self.shape[1]).index_copy(0, self.place, whole).view(self.shape)


def padded_batch(target: Tensor, local: int, cp_group: Any, device: torch.device, last: int | None = None) -> Batch:
    """``[B, S]`` sequences that are padded to the ranks' ``local`` tokens and cut zigzag.

    With ``last`` only so many results at the end of every line are scored.
    """
    lines, length = target.shape
    ranks = ranks_in(cp_group)
    if local * ranks < length or (ranks > 1 and local % 2):
        raise LogitlessError(
            f"target has {length} tokens per sequence but {ranks} ranks of {local} hold {local * ranks}. Wanted at "
            f"least as many, in {2 * ranks} equal chunks where there is context parallelism."
        )
    predicted = max(length - 1, 0)
    scored = predicted if last is None else min(last, predicted)
    rows = Rows.padded(
        target.detach().unbind(), [scored] * lines, max_length=local * ranks, cp=_split(cp_group), device=device
    )
    place = torch.arange(lines * predicted, device=device).view(lines, predicted)[:, predicted - scored :].flatten()
    return Batch(rows, place, (lines, predicted), cp_group if ranks > 1 else None)


def packed_batch(
    ids: Tensor | None,
    cu_seqlens_padded: Tensor,
    local: int,
    length: int,
    cp_group: Any,
    device: torch.device,
    attention_mask: Tensor | None = None,
    sub_seq_lengths: list[list[int]] | None = None,
    weigh: Callable[[tuple[int, int]], Tensor] | None = None,
) -> Batch:
    """Sequences that are padded one by one, laid end to end and each cut zigzag.

    Results go where the tokens came from: to the places of the attention mask, to the line that a sub-sequence was
    packed in, or to the start of a line where neither is given.

    Args:
        ids: token ids of the whole pack; None if targets do not matter or the caller sets them.
        cu_seqlens_padded: ``[N + 1]`` starts of the padded sequences in the whole pack.
        local: tokens of the pack on this rank.
        length: S of the output.
        weigh: gives the weight of every result, in the shape of the output; results of weight 0 are not scored.
    """
    ranks = ranks_in(cp_group)
    bounds = _bounds(cu_seqlens_padded, local, ranks)
    if sub_seq_lengths is None:
        lengths, place = _lines(attention_mask, bounds.diff(), length)
    else:
        lengths, place = _sub_sequences(sub_seq_lengths, bounds, length)
    shape = (len(lengths) if sub_seq_lengths is None else len(sub_seq_lengths), length - 1)
    predicted, place = _predicted(lengths).tolist(), place.to(device)
    weights = None if weigh is None else weigh(shape).flatten()[place]
    pack = torch.zeros(local * ranks, dtype=torch.int64, device=device) if ids is None else ids.detach().reshape(-1)
    rows = Rows.packed(
        [pack[start : start + n] for start, n in zip(bounds[:-1].tolist(), lengths.tolist(), strict=True)],
        predicted,
        None if weights is None else weights.split(predicted),
        loss_mask_only=weights is not None,
        cp=_split(cp_group),
        cu_seqlens=bounds,
        num_tokens=local,
        device=device,
    )
    group = cp_group if ranks > 1 else None
    return Batch(rows, place, shape, group, None if weights is None else weights[rows.response])


def ranks_in(cp_group: Any) -> int:
    return 1 if cp_group is None else dist.get_world_size(cp_group)


def with_target(rows: Rows, target: Tensor) -> Rows:
    """The rows with other targets: ``[R]``."""
    return replace(rows, target=target, target_range=None)


def _split(cp_group: Any) -> Zigzag | None:
    """This rank's place in the context-parallel group; None where it has one rank."""
    ranks = ranks_in(cp_group)
    return None if ranks == 1 else Zigzag(dist.get_rank(cp_group), ranks)


def _bounds(cu_seqlens: Tensor, local: int, ranks: int) -> Tensor:
    bounds = cu_seqlens.detach().long().cpu()
    if bounds.dim() != 1 or len(bounds) < 2 or int(bounds[0]) or bool((bounds.diff() < 0).any()):
        raise LogitlessError(f"cu_seqlens_padded must rise from 0 but is {bounds.tolist()}.")
    if int(bounds[-1]) != local * ranks:
        raise LogitlessError(
            f"cu_seqlens_padded ends at {int(bounds[-1])} but {ranks} ranks of {local} tokens hold {local * ranks}."
        )
    return bounds


def _lines(attention_mask: Tensor | None, spans: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """One sequence per line of the output: the length of each, and the place of every predicted token."""
    if attention_mask is None:
        lengths = spans.clamp_max(length)
        return lengths, _from_starts(torch.arange(len(spans)) * (length - 1), lengths)
    if tuple(attention_mask.shape) != (len(spans), length):
        raise LogitlessError(
            f"attention_mask must be {[len(spans), length]}, one line per packed sequence, but is "
            f"{list(attention_mask.shape)}."
        )
    mask = attention_mask.detach().bool().cpu()
    lengths = mask.sum(1)
    _check_room(lengths, spans)
    # A result stands where the token before the predicted one stands: everywhere but at the last token of a line.
    last = torch.where(mask, torch.arange(length), 0).amax(1, keepdim=True)
    return lengths, mask.scatter(1, last, False)[:, :-1].flatten().nonzero().squeeze(1)


def _sub_sequences(sub_seq_lengths: list[list[int]], bounds: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Several sequences per line of the output: the length of each, and the place of every predicted token.

    In its line a sequence starts where the padded ones before it end, and counts as far as the output is wide.
    """
    lengths = torch.tensor([int(n) for line in sub_seq_lengths for n in line], dtype=torch.int64)
    if len(lengths) != len(bounds) - 1:
        raise LogitlessError(
            f"sub_seq_lengths describes {len(lengths)} sub-sequences but cu_seqlens_padded describes {len(bounds) - 1}."
        )
    _check_room(lengths, bounds.diff())
    counts = torch.tensor([len(line) for line in sub_seq_lengths], dtype=torch.int64)
    line, _ = ragged_arange(counts)
    column = bounds[:-1] - bounds[counts.cumsum(0) - counts][line]
    lengths = torch.minimum(lengths, (length - column).clamp_min(0))
    return lengths, _from_starts(line * (length - 1) + column, lengths)


def _predicted(lengths: Tensor) -> Tensor:
    """Tokens of each sequence that a row predicts: all but the first."""
    return (lengths - 1).clamp_min(0)


def _from_starts(starts: Tensor, lengths: Tensor) -> Tensor:
    """Places of the predicted tokens of sequences whose first result stands at ``starts``."""
    sequence, offset = ragged_arange(_predicted(lengths))
    return starts[sequence] + offset


def _check_room(lengths: Tensor, spans: Tensor) -> None:
    if bool((lengths > spans).any()):
        worst = int((lengths - spans).argmax())
        raise LogitlessError(
            f"sequence {worst} has {int(lengths[worst])} tokens but cu_seqlens_padded leaves {int(spans[worst])}."
        )
