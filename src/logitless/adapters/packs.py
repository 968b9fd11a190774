"""Rows of batches in the layouts of Megatron-based hosts: padded, or packed with padding after every sequence.

    local token  ->  (sequence, offset)  ->  rows that predict a token of their own sequence
                                             source: where the target is among all tokens
                                             place: where the result belongs in [B, S - 1]

Under context parallelism every sequence is cut zigzag, and results of all ranks come together in ``Plan.spread``. Plans
are made on the host: a few small vectors per micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.errors import LogitlessError
from logitless.rows.exchange import GradRule, exchange_over
from logitless.rows.layouts import Zigzag, ragged_arange


@dataclass(frozen=True, eq=False)
class Plan:
    """Which local rows are scored, and where their results belong.

    Attributes:
        index: ``[R]`` row among the local tokens.
        source: ``[R]`` place of the row's target among all tokens of the batch or pack.
        place: ``[R]`` place of its result in the flattened output.
        shape: of the output: ``[B, S - 1]``.
        group: the context-parallel group, or None where it has one rank.
    """

    index: Tensor
    source: Tensor
    place: Tensor
    shape: tuple[int, int]
    group: Any

    def at(self, keep: Tensor) -> Plan:
        """The rows for which keep is true."""
        return Plan(self.index[keep], self.source[keep], self.place[keep], self.shape, self.group)

    def spread(self, values: Tensor, grad: GradRule) -> Tensor:
        """``[R]`` results of this rank and its peers as ``[B, S - 1]``, zeros elsewhere."""
        total = self.shape[0] * self.shape[1]
        (whole,) = exchange_over(self.group, (values,), self.place, total, None, grad)
        return whole.view(self.shape)


def padded_plan(batch: int, length: int, local: int, cp_group: Any, device: torch.device) -> Plan:
    """Rows of ``[B, S]`` sequences that are padded to the ranks' ``local`` tokens and cut zigzag."""
    split, group = split_over(cp_group)
    span = local * split.size
    if span < length or (split.size > 1 and span % split.multiple):
        raise LogitlessError(
            f"target has {length} tokens per sequence but {split.size} ranks of {local} hold {span}. Wanted at least "
            f"as many, in {2 * split.size} equal chunks where there is context parallelism."
        )
    index, sample, offset = _rows(torch.full((batch,), span), torch.full((batch,), length), split)
    source, place = sample * length + offset + 1, sample * (length - 1) + offset
    return Plan(index.to(device), source.to(device), place.to(device), (batch, max(length - 1, 0)), group)


def packed_plan(
    cu_seqlens_padded: Tensor,
    local: int,
    length: int,
    cp_group: Any,
    device: torch.device,
    attention_mask: Tensor | None = None,
    sub_seq_lengths: list[list[int]] | None = None,
) -> Plan:
    """Rows of sequences that are padded one by one, laid end to end and each cut zigzag.

    Results go where the tokens came from: to the places of the attention mask, to the row that a sub-sequence was
    packed in, or to the start of a row where neither is given.
    """
    split, group = split_over(cp_group)
    spans, starts = _spans(cu_seqlens_padded, local, split)
    if sub_seq_lengths is not None:
        lengths, row, columns = _sub_sequences(sub_seq_lengths, spans)
        batch = len(sub_seq_lengths)
    else:
        lengths, columns = _sequences(attention_mask, spans, length)
        row, batch = torch.arange(len(spans)), len(spans)
    if bool((lengths > spans).any()):
        worst = int((lengths - spans).argmax())
        raise LogitlessError(
            f"sequence {worst} has {int(lengths[worst])} tokens but cu_seqlens_padded leaves {int(spans[worst])}."
        )
    index, sample, offset = _rows(spans, lengths, split)
    column = columns[(lengths.cumsum(0) - lengths)[sample] + offset]
    place = row[sample] * (length - 1) + column
    plan = Plan(index, starts[sample] + offset + 1, place, (batch, length - 1), group).at(column < length - 1)
    return Plan(plan.index.to(device), plan.source.to(device), plan.place.to(device), plan.shape, group)


def split_over(cp_group: Any) -> tuple[Zigzag, Any]:
    """This rank's place in the context-parallel group, and the group unless it has one rank."""
    size = 1 if cp_group is None else dist.get_world_size(cp_group)
    if size == 1:
        return Zigzag(0, 1), None
    return Zigzag(dist.get_rank(cp_group), size), cp_group


def _rows(spans: Tensor, lengths: Tensor, split: Zigzag) -> tuple[Tensor, Tensor, Tensor]:
    """Local rows that predict a token of their own sequence: their index, sample and offset."""
    sample, offset = ragged_arange(spans) if split.size == 1 else split.tokens(spans, 0)
    index = (offset < lengths[sample] - 1).nonzero().squeeze(1)
    return index, sample[index], offset[index]


def _spans(cu_seqlens: Tensor, local: int, split: Zigzag) -> tuple[Tensor, Tensor]:
    bounds = cu_seqlens.detach().long().cpu()
    spans = bounds.diff()
    if bounds.dim() != 1 or len(bounds) < 2 or int(bounds[0]) or bool((spans < 0).any()):
        raise LogitlessError(f"cu_seqlens_padded must rise from 0 but is {bounds.tolist()}.")
    if int(bounds[-1]) != local * split.size:
        raise LogitlessError(
            f"cu_seqlens_padded ends at {int(bounds[-1])} but {split.size} ranks of {local} tokens hold "
            f"{local * split.size}."
        )
    if split.size > 1 and bool((spans % split.multiple).any()):
        raise LogitlessError(
            f"cu_seqlens_padded has sequences of {spans.tolist()} tokens. Each must divide into {split.multiple} "
            f"chunks, two per context-parallel rank."
        )
    return spans, bounds[:-1]


def _sequences(attention_mask: Tensor | None, spans: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Length of every sequence, and the column of each of its tokens, sequence after sequence."""
    if attention_mask is None:
        lengths = spans.clamp_max(length)
        return lengths, ragged_arange(lengths)[1]
    if tuple(attention_mask.shape) != (len(spans), length):
        raise LogitlessError(
            f"attention_mask must be {[len(spans), length]}, one row per packed sequence, but is "
            f"{list(attention_mask.shape)}."
        )
    mask = attention_mask.detach().bool().cpu()
    return mask.sum(1), mask.nonzero()[:, 1]


def _sub_sequences(sub_seq_lengths: list[list[int]], spans: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Length and row of every packed segment, and the column of each of its tokens.

    In its row a segment starts where the padded ones before it end.
    """
    lengths = torch.tensor([int(n) for row in sub_seq_lengths for n in row], dtype=torch.int64)
    if len(lengths) != len(spans):
        raise LogitlessError(
            f"sub_seq_lengths describes {len(lengths)} sub-sequences but cu_seqlens_padded describes {len(spans)}."
        )
    counts = torch.tensor([len(row) for row in sub_seq_lengths])
    row, _ = ragged_arange(counts)
    before = torch.cat([torch.zeros(1, dtype=torch.int64), spans.cumsum(0)])
    first = before[:-1] - before[counts.cumsum(0) - counts][row]
    segment, offset = ragged_arange(lengths)
    return lengths, row, first[segment] + offset
