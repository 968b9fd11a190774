"""Single logits of teachers, over the ids that samplers kept."""

from __future__ import annotations

import torch
from torch import Tensor

from logitless.call import PLAIN, Call
from logitless.call.checks import vocabulary
from logitless.collectives import sum_over
from logitless.operands import Kept, Logits, Teacher, Teachers
from logitless.readings.over_support import rows_of
from logitless.readings.support import Support
from logitless.sources.linear import gathered_tokens
from logitless.sources.listed import raw_logits
from logitless.sources.teachers import members_of, own_call, own_gain, own_operands, source_columns


def entries_of(given: Teacher | Teachers, support: Support, read: Tensor, call: Call) -> Tensor:
    """``[E]`` logits in float64 of each row's own teacher, transformed; -inf for ids that it has not."""
    members, row = members_of(given), support.entries.row
    total = call.gain.new_zeros((2, len(row)))
    gain, squash = torch.ones_like(total[0], dtype=torch.float64), torch.zeros_like(total[0], dtype=torch.float64)
    for number, member in enumerate(members):
        mine = torch.ones_like(read) if isinstance(given, Teacher) else given.which[row] == number
        total += torch.where(mine, _member_entries(member, support, read & mine, call), 0.0)
        gain = torch.where(mine, own_gain(member, call, torch.float64)[row], gain)
        squash = torch.where(mine, (member.head or PLAIN).squash, squash)
    raw, has = (total if call.group is None else sum_over(call.group, total)).double()
    z = gain * torch.where(squash == 0, raw, torch.tanh(raw * squash))
    return torch.where(has > 0, z, -torch.inf)


def _member_entries(teacher: Teacher, support: Support, read: Tensor, call: Call) -> Tensor:
    """``[2, E]`` raw logits of the columns that are here, and whether they are."""
    _, columns = vocabulary(call.caller, teacher.width, teacher.head or PLAIN, call.shard)
    column, here = support.place(0, columns)
    source = source_columns(teacher, call, columns)
    if source is not None:
        ids = support.entries.ids
        column = torch.where((ids >= 0) & (ids < len(source)), source[ids.clamp(0, len(source) - 1)], -1)
        here, column = column >= 0, column.clamp_min(0)
    if isinstance(teacher.logits, Logits):
        operands, own = own_operands(teacher), own_call(teacher, call, columns, call.gain)
        assert operands.weight is not None
        tokens, place = gathered_tokens(teacher.tokens, call), (column, here & read)
        raw = raw_logits(tokens, operands.weight, operands.bias, support, place, own)
    else:
        logits = teacher.tokens.reshape(teacher.tokens.shape[:-1].numel(), teacher.width)
        at = call.rows.index[support.entries.row]
        raw = logits[at, column].to(call.gain.dtype) if columns else call.gain.new_zeros(len(at))
    return torch.stack([torch.where(here & read, raw, 0.0), here.to(raw.dtype)])


def kept_of(given: Teacher | Teachers) -> Kept | None:
    """What each row's own teacher kept; None where it is taken over the student's ids."""
    kept = [x.kept for x in members_of(given) if x.kept is not None]
    if isinstance(given, Teacher) or not kept:
        return kept[0] if kept else None
    parts = [torch.arange(len(x.lengths), device=x.ids.device) for x in kept]
    row = torch.cat([rows_of(x, each) for x, each in zip(kept, parts, strict=True)])
    number = torch.cat([torch.full_like(x.ids, i) for i, x in enumerate(kept)])
    mine = number == given.which[row]
    order = row[mine].argsort(stable=True)
    lengths = torch.stack([x.lengths for x in kept]).gather(0, given.which[None])[0]
    return Kept(torch.cat([x.ids for x in kept])[mine][order], lengths)
