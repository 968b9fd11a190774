"""Checks of a teacher against the student's call, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from torch import Tensor

from logitless.call import PLAIN, Call, members_of
from logitless.call.checks import check_kept, check_product, split_factor
from logitless.errors import LogitlessError
from logitless.errors.arguments import check_name, refused
from logitless.operands import Logits, Teacher, Teachers, TopK
from logitless.operands.stands import Bits
from logitless.readings.reading import LARGEST
from logitless.sources.linear import is_split
from logitless.sources.teachers import forbids_others, infinite_bucket, own_vocabulary
from logitless.spec import IGNORE, has_values, inspectable


def check_teacher(given: Teacher | Teachers, tokens: Tensor, call: Call) -> None:
    """Raise, before anything runs, for a teacher that does not go with the student's tokens and vocabulary."""
    name = call.caller
    if not isinstance(given, (Teacher, Teachers)):
        raise LogitlessError(
            f"{name}: teacher must be logits, Logits, a Teacher or Teacher.by_row but is {type(given).__name__}."
        )
    for teacher in members_of(given):
        _check_own_options(teacher, call)
        if teacher.at is not None:
            _check_at(teacher, teacher.at, call)
        elif teacher.tokens.shape[:-1] != tokens.shape[:-1]:
            raise LogitlessError(
                f"{name}: the teacher's hidden states or logits are {list(teacher.tokens.shape)} but the student's are "
                f"{list(tokens.shape)}. They must be of the same tokens."
            )
        for own in (teacher.tokens, teacher.ids, teacher.at):
            if own is not None and own.device != tokens.device:
                raise LogitlessError(
                    f"{name}: logits and ids of the teacher are on {own.device}, the student on {tokens.device}."
                )
        own_shard = teacher.logits.linear.shard if isinstance(teacher.logits, Logits) else None
        if teacher.ids is not None and call.shard is not None and own_shard is None:
            raise LogitlessError(
                f"{name}: under a shard, Teacher(ids=) needs Logits with a shard of their own, which names the "
                f"teacher's columns on this rank. Pass Teacher(Logits(hidden, weight, shard=VocabShard(...)), ids=...)."
            )
        split = call.linear is not None and call.linear.sequence_parallel
        if split and isinstance(teacher.logits, Logits) and isinstance(teacher.logits.gain, Tensor):
            raise split_factor(name, "the teacher's Logits carry", "Teacher(logits, head=Head(temperature=...))")
        if split and teacher.hidden is None:
            raise LogitlessError(
                f"{name}: the teacher is a tensor of logits of all tokens, and with sequence_parallel=True a rank has "
                f"some of them. Pass the teacher's hidden states and weight, as Logits."
            )
        size, columns = own_vocabulary(teacher, call)
        if call.shard is not None and (teacher.head or PLAIN).vocab_size is None:
            # A head that was not cut has more columns than are left of the vocabulary.
            columns = max(columns, teacher.width if teacher.width > call.shard.stop - call.shard.start else 0)
        size = (teacher.head or PLAIN).vocab_size or (size if own_shard is None else own_shard.vocab_size)
        # Columns that are more than the student's may lie on another rank: all of them raise.
        more = call.shard is not None and size > call.vocab_size
        if teacher.ids is None and (more or columns > call.columns):
            had = f"{size} ids" if more else f"{columns} columns here"
            own = call.vocab_size if more else call.columns
            raise LogitlessError(
                f"{name}: the teacher has {had} and the student {own}. If the rest is padding, give the teacher "
                f"Head(vocab_size={call.vocab_size}); otherwise map its columns with ids=."
            )
        ids = teacher.ids
        if ids is not None and ids.numel() and has_values(ids) and int(ids.max()) >= call.vocab_size:
            raise LogitlessError(
                f"{name}: the teacher's ids go up to {int(ids.max())}, outside of the student's vocabulary of "
                f"{call.vocab_size}. Use -1 for columns that the student does not have."
            )


def check_teachers(call: Call, tokens: Tensor, given: Any) -> None:
    """Raise for a teacher that does not go with the call, or with its divergence."""
    members, linear, name = members_of(given), call.linear, call.caller
    if isinstance(given, Teachers) and given.which.is_meta and not call.rows.index.is_meta:
        raise refused(f"{name}: which, the teacher of each row,", "a tensor with numbers", given.which)
    if linear is not None and linear.bits == "canonical" and isinstance(given, Teachers) and call.kept is None:
        raise LogitlessError(
            f'{name}: bits="canonical" goes with one Teacher. With several, how many rows a product has depends on '
            f"who else is in the batch: call once for each of them."
        )
    if call.kept is not None or any(x.kept is not None for x in members):
        _check_supports(call, members)
        check_teacher(given, tokens, call)
        if any(x.ids is not None and x.tail == "bucket" for x in members):
            raise LogitlessError(
                f'{name}: kept= does not work with tail="bucket" of a teacher with ids=: both distributions are over '
                f"the ids that a sampler kept, and there is no outcome for others. Drop one of them."
            )
        return
    if isinstance(given, Teacher) and given.top_k is not None:
        _check_top_k(call, given.top_k)
        return
    check_teacher(given, tokens, call)
    _check_tails(call, members)
    sizes = [min(x.width, (x.head or PLAIN).vocab_size or x.width) for x in members]
    if call.kind is not None and call.kind.kind == "reverse_kl" and call.shard is None and min(sizes) < call.columns:
        raise LogitlessError(
            f"{name}: the teacher has {min(sizes)} ids and the student {call.columns}, so that KL(student || teacher) "
            f"is infinite. Compare over the ids that both have, with head=Head(vocab_size={min(sizes)}), or take "
            f"another divergence: all others are finite."
        )


def _check_own_options(teacher: Teacher, call: Call) -> None:
    """Raise for options of a teacher's Logits that are wrong, and for those that say otherwise than the student's."""
    if not isinstance(teacher.logits, Logits):
        return
    name, own, shard = f"{call.caller}: the teacher's Logits", teacher.logits.linear, call.shard
    check_product(name, own)
    if own.bits not in ("fast", call.bits):
        check_name(own.bits, get_args(Bits), f"{name}: bits")
        raise LogitlessError(
            f"{name} have bits={own.bits!r} and the student bits={call.bits!r}, which decides for both. Pass it to the "
            f"student, too, or leave it out."
        )
    if own.sequence_parallel and not is_split(call):
        raise LogitlessError(
            f"{name} have sequence_parallel=True and the student has not. Give both the hidden states of this rank's "
            f"tokens, or both those of all tokens."
        )
    if own.shard is None:
        return
    columns = own.shard.stop - own.shard.start
    if columns != teacher.width:
        raise LogitlessError(f"{name} have a shard of {columns} columns but a weight of {teacher.width}.")
    if shard is None:
        if own.shard.group is not None and own.shard.vocab_size > teacher.width:
            raise LogitlessError(f"{name} have a shard and the student has none. Give both theirs, or both none.")
        return
    size = (teacher.head or PLAIN).vocab_size or own.shard.vocab_size
    # All ranks know the bounds of all, so that all raise.
    known = len(own.shard.bounds) == len(shard.bounds)
    ours, theirs = (x.bounds if known else ((x.start, x.stop),) for x in (shard, own.shard))
    for (start, stop), (first, last) in zip(ours, theirs, strict=True):
        if teacher.ids is None and first < min(last, size) and (first != start or min(last, size) > stop):
            raise LogitlessError(
                f"{name} have columns {first} to {last} where the student has {start} to {stop}. Cut both heads at the "
                f"same ids, VocabShard({start}, {min(stop, size)}, group) for the teacher's, or name its ids with ids=."
            )


def _check_at(teacher: Teacher, at: Tensor, call: Call) -> None:
    """Raise for ``at`` that is not one token of the teacher for each row."""
    name, count = call.caller, teacher.tokens.shape[:-1].numel()
    if call.linear is not None and call.linear.sequence_parallel and call.group is not None:
        count *= call.group.size()
    if tuple(at.shape) not in (call.shape, (call.num_rows,)):
        raise LogitlessError(
            f"{name}: Teacher(at=) is {list(at.shape)} but there are {call.num_rows} rows. Give one token for each."
        )
    if inspectable(at) and at.numel() and not 0 <= int(at.min()) <= int(at.max()) < count:
        raise LogitlessError(
            f"{name}: Teacher(at=) runs from {int(at.min())} to {int(at.max())}, but the teacher has {count} tokens."
        )


def _check_tails(call: Call, members: Sequence[Teacher]) -> None:
    """Raise for teachers with different tails, and for a divergence that ids without a student's make infinite."""
    if len({x.tail for x in members}) > 1:
        raise LogitlessError(f"{call.caller}: members have different tail=. Call once for each of them.")
    for x in members:
        if x.ids is None or not forbids_others(x, call):
            continue
        size, columns = own_vocabulary(x, call)
        # Ids of other ranks are not known here. Where they can all be the student's, they are counted when they are
        # exchanged.
        other = call.group is None and has_values(x.ids) and bool((x.ids[:columns] < 0).any())
        if other or size > call.vocab_size:
            raise infinite_bucket(call.caller)


def _check_supports(call: Call, members: Sequence[Teacher]) -> None:
    """Raise for teachers whose ids do not go with the call's."""
    name = call.caller
    if any(x.top_k is not None for x in members):
        raise LogitlessError(
            f"{name}: kept= does not work with Teacher.from_top_k, which names its own ids. Drop kept=; with "
            f'tail="renormalise" both distributions are over those ids.'
        )
    supports = [x.kept for x in members if x.kept is not None]
    if supports and (call.kept is None or len(supports) < len(members)):
        raise LogitlessError(
            f"{name}: Teacher(kept=) needs kept= for the student too; of several teachers, all have it or none."
        )
    for kept in supports:
        check_kept(name, kept, call.rows, call.vocab_size, call.gain.device)
        none = (kept.lengths == 0) & (call.rows.target != IGNORE)
        if inspectable(none) and len(supports) == 1 and bool(none.any()):
            raise LogitlessError(f"{name}: the teacher kept no id at all in a row. Give at least one id for each.")


def _check_top_k(call: Call, sent: TopK) -> None:
    """Raise for log-probs that do not go with the rows and the vocabulary of the call."""
    name, ids = call.caller, sent.ids
    if call.asked.ids is not None:
        raise LogitlessError(
            f"{name}: ids= does not work beside a teacher that sent K log-probs. Ask for the log-probs of these ids in "
            f"another call."
        )
    if tuple(ids.shape[:-1]) not in (call.shape, (call.num_rows,)):
        raise LogitlessError(
            f"{name}: the teacher's log-probs are {list(ids.shape)} but there are {call.num_rows} rows. Give K for "
            f"every scored row."
        )
    if ids.device != call.gain.device:
        raise LogitlessError(f"{name}: the teacher's log-probs are on {ids.device}, the student on {call.gain.device}.")
    if inspectable(ids) and ids.numel() and int(ids.max()) >= call.vocab_size:
        raise LogitlessError(
            f"{name}: the teacher's ids go up to {int(ids.max())}, outside of the student's vocabulary of "
            f"{call.vocab_size}. Use -1 for ids that the student does not have."
        )
    if call.vocab_size > LARGEST:
        raise LogitlessError(f"{name}: log-probs of single ids take up to {LARGEST} columns, not {call.vocab_size}.")
