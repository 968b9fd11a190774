"""What a teacher says of its whole vocabulary, where the student has part of it: no logits of it are ever stored.

    log Z over all ids, the most likely of them        one product that ends in the statistic, for each of its tokens

Forward alone asks for it: backward has it in numbers of the rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from logitless.backends.contract import Problem
from logitless.call import PLAIN, Call, members_of
from logitless.call.resolve import apart_everywhere
from logitless.collectives import gather_over
from logitless.machine import WORK, Machine
from logitless.operands import Logits, Teacher, Teachers
from logitless.passes.look import tile_lines
from logitless.readings.best import Best
from logitless.readings.table import Table
from logitless.route.tiles import Shape, forward_tiles
from logitless.softmax import ELSEWHERE, WIDTH, merge
from logitless.sources.linear import Projection
from logitless.sources.teachers import Part, TeacherRows, own_vocabulary


def teacher_rows(given: Teacher | Teachers, call: Call) -> TeacherRows:
    """The teachers of all rows, with what they say of their whole vocabularies where somebody asks for it."""
    rows, members = TeacherRows.of(given, call), members_of(given)
    if not call.wants_whole:
        return rows
    both = zip(rows.parts, members, strict=True)
    return replace(rows, whole=torch.cat([_lines(part, rows.gain[part.rows], x, call) for part, x in both], 1))


def _lines(part: Part, gain: Tensor, teacher: Teacher, call: Call) -> Tensor:
    """Lines of the rows of a part, over all columns of its teacher on all ranks; see :class:`TeacherRows`."""
    head = teacher.head or PLAIN
    start = 0
    if call.group is not None and isinstance(teacher.logits, Logits) and teacher.logits.linear.shard is not None:
        start = teacher.logits.linear.shard.start
    best = Best(("top1",), 0, head.scale < 0, start)
    table = Table((best,)) if "teacher_top1" in call.asked.stats else None
    if part.projection is not None:
        lines = _of_head(part.projection, teacher, call, table)
    else:
        lines = _of_logits(part, gain, teacher, call, table)
    statistic, more = lines[:WIDTH], lines[WIDTH:]
    if call.group is not None:
        parts = gather_over(call.group, lines)
        statistic = merge(parts[:, :WIDTH])
        more = more if table is None else table.merge(parts[:, WIDTH:])
    others = torch.zeros_like(statistic[:1]) if part.outside is None else part.outside.to(lines).expand_as(lines[:1])
    lines = torch.cat([statistic, others, more])
    return lines if part.place is None else lines[:, part.place.to(lines.device)]


def _of_head(p: Projection, teacher: Teacher, call: Call, table: Table | None) -> Tensor:
    """Lines of the columns here, multiplied tile by tile, or by a kernel that stores no logits."""
    head, backend = teacher.head or PLAIN, call.backend
    own = replace(
        p.call,
        kept=None,
        entropy=True,
        table=table,
        num_rows=len(p.hidden),
        width=p.hidden.shape[1],
        squash=head.squash,
        negative=head.scale < 0,
        unit=False,
        # Canonical sums are of the student alone.
        canonical=False,
        machine=call.machine if call.linear is not None else Machine.of(p.hidden.device),
    )
    apart = apart_everywhere(own)
    if apart is None:
        apart = backend.products.takes(p.hidden, p.weight)
    if apart is None and p.bias is not None and p.bias.stride(0) != 1:
        apart = "bias is not contiguous"
    own = replace(own, apart=apart)
    lines = tile_lines(replace(p, call=own), forward_tiles(Shape.of(own), min(call.memory, WORK)), table, None)
    return lines.statistic if lines.more is None else torch.cat([lines.statistic, lines.more])


def _of_logits(part: Part, gain: Tensor, teacher: Teacher, call: Call, table: Table | None) -> Tensor:
    """Lines of logits that exist."""
    assert part.logits is not None
    assert part.index is not None
    head = teacher.head or PLAIN
    _, columns = own_vocabulary(teacher, call)
    logits = part.logits if part.logits.stride(-1) == 1 else part.logits.contiguous()
    column = torch.full_like(part.index, ELSEWHERE)
    problem = Problem(logits, part.index, column, gain, head.squash, columns, entropy=True, memory=call.memory)
    lines = call.backend.statistics(problem)
    return lines if table is None else torch.cat([lines, table.lines(call.backend, problem, slice(None))])
