"""``Teacher``: where the other distribution of each row comes from. No gradient flows to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from logitless.collectives import fingerprint
from logitless.errors import LogitlessError, did_you_mean
from logitless.errors.arguments import FLOATS, dense, described, instance, sequence
from logitless.operands.kept import Kept
from logitless.operands.logits import Logits, like
from logitless.operands.lora import LoRA
from logitless.spec import Head, inspectable

Tail = Literal["bucket", "renormalise"]
"""The fate of ids that only one of the two has: those that a teacher sent no log-probs of, or that a student with part
of the teacher's vocabulary lacks."""

TAILS = get_args(Tail)

BY_ROW = "Teacher.by_row: "

SURPLUS = 0.01
"""Probabilities of rounded log-probs may add up to 1 and this."""


@dataclass(frozen=True, eq=False)
class TopK:
    """K ids of each row and their log-probs, as a teacher sent them; see :meth:`Teacher.from_top_k`."""

    logprobs: Tensor
    ids: Tensor
    tail: Tail = "bucket"

    def __post_init__(self) -> None:
        name, logprobs, ids = "Teacher.from_top_k", self.logprobs, self.ids
        dense(logprobs, f"{name}: logprobs", "[R, K] floats")
        if logprobs.dtype not in FLOATS or logprobs.dim() < 2:
            raise LogitlessError(f"{name}: logprobs must be [R, K] floats but are {described(logprobs)}.")
        dense(ids, f"{name}: ids", f"int64 {list(logprobs.shape)} like logprobs")
        if ids.dtype != torch.int64 or ids.shape != logprobs.shape or ids.device != logprobs.device:
            raise LogitlessError(
                f"{name}: ids must be int64 {list(logprobs.shape)} like logprobs, and where they are, but are "
                f"{described(ids)}."
            )
        if not ids.shape[-1]:
            raise LogitlessError(f"{name}: there is no id in a row. Give at least one; -1 is padding.")
        _check_tail(name, self.tail)
        if inspectable(ids):
            self._check_values()

    def _check_values(self) -> None:
        ordered = self.ids.sort(-1).values
        if bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()):
            raise LogitlessError("Teacher.from_top_k: a row names an id twice. Leave one of them out, with -1.")
        total = self.logprobs.double().exp().masked_fill(self.ids < 0, 0.0).sum(-1)
        if self.tail == "bucket" and bool((total > 1 + SURPLUS).any()):
            raise LogitlessError(
                f"Teacher.from_top_k: the probabilities of a row add up to {float(total.max()):.4g}. Log-probs are "
                f'wanted, over the whole vocabulary; other numbers only go with tail="renormalise".'
            )


@dataclass(frozen=True, eq=False)
class Teacher:
    """The other distribution of each row: logits of the same tokens, computed or not. No gradient flows to it.

    Args:
        logits: ``[..., W]`` a tensor, or :class:`Logits` of its own hidden states and head, whose size and dtype are
            its own. Under a shard, the columns that are here, as the student's.
        head: its own temperature, scale, softcap and true vocabulary size; default ``Head()``.
        ids: ``[W]`` the student's id of each of its columns, where the vocabularies differ; -1 for a column that the
            student does not have. Without, column i is the student's column i, and there may be fewer.
        kept: ids that it samples from in every scored row, where the student has ``kept=``, too; they are the student's
            ids, and the target is not forced in. Without, it is taken over the student's.
        top_k: instead of logits, K ids of every row and their log-probs; see :meth:`from_top_k`.
        tail: what becomes of its ids that the student does not have. ``"renormalise"``: it is taken over the ids that
            both have. ``"bucket"``: they are one outcome more, which the student never draws, so that the divergence is
            over all ids of both. Ids that only the student has are outcomes that the teacher never draws, either way.
            An acceptance is that of the teacher over all of its ids, either way; of one that sent K ids (``top_k``), it
            is over the outcomes that its tail makes of them.
        at: ``[R]`` int64, which of its tokens is beside each scored row, where they are not the same tokens: a draft
            that predicts several steps ahead has several rows beside one of the teacher's, which is multiplied once.

    >>> Teacher(torch.zeros(2, 3), ids=torch.zeros(3))
    Traceback (most recent call last):
    logitless.errors.LogitlessError: Teacher: ids must be int64 [3], the student's id of each column, but are
    torch.float32 [3].
    """

    logits: Tensor | None
    head: Head | None = None
    ids: Tensor | None = None
    kept: Kept | None = None
    top_k: TopK | None = None
    tail: Tail = "renormalise"
    at: Tensor | None = None

    def __post_init__(self) -> None:
        _check_tail("Teacher", self.tail)
        if self.kept is not None and not isinstance(self.kept, Kept):
            raise LogitlessError(f"Teacher: kept must be a Kept or None but is {type(self.kept).__name__}.")
        if self.top_k is not None:
            instance(self.top_k, TopK, "Teacher: top_k", " Pass Teacher.from_top_k(logprobs, ids).")
            self._check_alone()
            return
        x = dense(self.logits, "Teacher: logits", "a tensor of floats, or Logits,")
        if x.dtype not in FLOATS or x.dim() < 1:
            raise LogitlessError(f"Teacher: logits must be a tensor of floats, or Logits, but is {described(x)}.")
        if self.head is not None and not isinstance(self.head, Head):
            raise LogitlessError(f"Teacher: head must be a Head or None but is {type(self.head).__name__}.")
        if isinstance(x, Logits):
            _check_linear(x, self.head or Head())
            self._take_factor(x, self.head or Head())
        if self.ids is not None:
            self._check_ids(self.ids)
        if self.at is not None:
            dense(self.at, "Teacher: at", "an int64 tensor of one token per scored row")
            if self.at.dtype != torch.int64:
                raise LogitlessError(f"Teacher: at must be int64, one token per scored row, but is {self.at.dtype}.")

    @staticmethod
    def ids_from_d2t(d2t: Tensor, width: int) -> Tensor:
        """``ids`` of a teacher with ``width`` columns for an EAGLE-3 draft, whose id i is the teacher's ``i + d2t[i]``.

        >>> Teacher.ids_from_d2t(torch.tensor([1, 1, 2]), 6)
        tensor([-1,  0,  1, -1,  2, -1])
        """
        name = "Teacher.ids_from_d2t"
        dense(d2t, f"{name}: d2t", "[V] integers")
        if d2t.dim() != 1 or d2t.dtype not in (torch.int64, torch.int32):
            raise LogitlessError(f"{name}: d2t must be [V] integers but is {described(d2t)}.")
        if type(width) is not int or not len(d2t) <= width < 1 << 31:
            raise LogitlessError(
                f"{name}: width, the number of the teacher's columns, must be an integer of at least {len(d2t)} but is "
                f"{width!r}."
            )
        own = torch.arange(len(d2t), device=d2t.device)
        theirs = own + d2t.to(torch.int64)
        if inspectable(theirs) and len(theirs) and (int(theirs.min()) < 0 or int(theirs.max()) >= width):
            raise LogitlessError(
                f"{name}: d2t leads to ids from {int(theirs.min())} to {int(theirs.max())}, outside of "
                f"{width} columns. It holds offsets: id i of the draft is i + d2t[i]."
            )
        return torch.full((width,), -1, dtype=torch.int64, device=d2t.device).index_copy_(0, theirs, own)

    @staticmethod
    def from_top_k(
        logprobs: Tensor, ids: Tensor, tail: Tail = "bucket", *, student_ids: Tensor | None = None
    ) -> Teacher:
        """From log-probs of K ids of every row, which a teacher sent instead of its head.

        Args:
            logprobs: ``[R, K]`` over its whole vocabulary, for every scored row; no temperature is applied to them.
            ids: ``[R, K]`` int64, each at most once in a row; -1 is padding, wherever it stands.
            tail: ``"bucket"``: all other ids are one outcome more, of both distributions. ``"renormalise"``: both are
                normalised over the K ids, so that log-probs may be logits, too.
            student_ids: ``[W]`` int64, where ``ids`` are the teacher's own: the student's id of each of them, -1 for
                one that it does not have, which then is among the rest, or left out; see :meth:`ids_from_d2t`.

        An acceptance is over these outcomes: with a bucket it is the most that it can be, as if the student drew the
        rest as the teacher does.

        >>> Teacher.from_top_k(torch.tensor([[0.7, 0.6]]).log(), torch.tensor([[3, 5]]))
        Traceback (most recent call last):
        logitless.errors.LogitlessError: Teacher.from_top_k: the probabilities of a row add up to 1.3. Log-probs are
        wanted, over the whole vocabulary; other numbers only go with tail="renormalise".
        """
        if student_ids is not None:
            ids = _translated(ids, student_ids)
        return Teacher(None, top_k=TopK(logprobs, ids, tail))

    @staticmethod
    def by_row(members: Sequence[Teacher | Tensor], which: Tensor) -> Teachers:
        """Several teachers in one batch.

        Args:
            members: each with hidden states (or logits) of all tokens, of which those of its own rows are read.
            which: ``[R]`` int64 number of each row's teacher. A teacher per sample is ``per_sample[rows.sample]``.
        """
        wanted = "a list of at least one Teacher, or of logits,"
        members = [Teacher(x) if isinstance(x, Tensor) else x for x in sequence(members, BY_ROW + "members", wanted)]
        return Teachers(members, which)

    def facts(self) -> tuple[Any, ...]:
        """Fingerprints for ranks to compare: of every field, but of logits, whose parts differ, the kind and size, and
        of a sharded teacher's ids, whether there are any."""
        facts: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        facts["head"] = self.head or Head()
        if isinstance(self.logits, Logits):
            hidden, linear = self.logits.hidden, self.logits.linear
            bias = "no bias" if linear.bias is None else "with a bias"
            exact = (linear.match, linear.tf32, linear.precision)
            facts["logits"] = (str(hidden.dtype), hidden.shape[-1], bias, *exact, self.logits.gain)
            if self.ids is not None and linear.shard is not None:
                facts["ids"] = "of the columns of each rank"
        elif self.logits is not None:
            facts["logits"] = (str(self.logits.dtype), "logits")
        return tuple(map(fingerprint, facts.values()))

    def read_again(self) -> dict[str, Tensor | None]:
        """The tensors that backward reads, by name."""
        more = {"teacher.ids": self.ids, "teacher.at": self.at}
        if not isinstance(self.logits, Logits):
            return {"teacher.logits": self.logits, **more}
        bias, weight = self.logits.linear.bias, self.logits.weight
        assert isinstance(weight, Tensor)
        return {"teacher.hidden": self.logits.hidden, "teacher.weight": weight, "teacher.bias": bias, **more}

    @property
    def width(self) -> int:
        """The teacher's columns, padding included."""
        assert self.logits is not None
        return self.logits.shape[-1]

    @property
    def hidden(self) -> Tensor | None:
        """The teacher's hidden states, where its logits are not computed."""
        return self.logits.hidden if isinstance(self.logits, Logits) else None

    @property
    def tokens(self) -> Tensor:
        """Hidden states or else logits, one row per token, without a graph."""
        assert self.logits is not None
        return (self.logits.hidden if isinstance(self.logits, Logits) else self.logits).detach()

    def _take_factor(self, x: Logits, head: Head) -> None:
        """A factor that logits carry comes before the softcap, as the head's scale does; a softcap that their model has
        applied becomes the head's."""
        if x.squash:
            cap = x.gain * head.scale
            capped = replace(head, softcap=cap, scale=x.squash * cap)
            object.__setattr__(self, "head", capped)
            object.__setattr__(self, "logits", like(x, gain=1.0, squash=0.0))
            return
        if isinstance(x.gain, Tensor) and head.softcap is not None:
            raise LogitlessError(
                "Teacher: head has a softcap, and the Logits carry one factor per row already. Give both in one place: "
                "pass the Logits before the factor, and head=Head(softcap=..., temperature=...)."
            )
        if not isinstance(x.gain, Tensor) and x.gain != 1.0:
            object.__setattr__(self, "head", replace(head, scale=head.scale * x.gain))
            object.__setattr__(self, "logits", like(x, gain=1.0))

    def _check_alone(self) -> None:
        """Raise for an option that K log-probs which were sent do not go with: they are as the teacher made them."""
        for name in ("logits", "head", "ids", "at"):
            if getattr(self, name) is not None:
                raise LogitlessError(
                    f"Teacher: {name} does not go with top_k, whose log-probs are of every row and final. Leave it "
                    f"out; ids of the teacher's own are translated by Teacher.from_top_k(student_ids=)."
                )
        if self.tail != "renormalise":
            raise LogitlessError("Teacher: tail of log-probs that were sent is that of Teacher.from_top_k(tail=).")

    def _check_ids(self, ids: Tensor) -> None:
        wanted = f"int64 [{self.width}], the student's id of each column,"
        dense(ids, "Teacher: ids", wanted)
        if ids.dtype != torch.int64 or tuple(ids.shape) != (self.width,):
            raise LogitlessError(f"Teacher: ids must be {wanted} but are {ids.dtype} {list(ids.shape)}.")
        if inspectable(ids):
            real = ids[ids >= 0]
            if len(real.unique()) != len(real):
                raise LogitlessError("Teacher: ids name one of the student's ids twice. Give each column its own.")


def _translated(ids: Tensor, student_ids: Tensor) -> Tensor:
    """The student's id for each of a teacher's ids; padding stays padding."""
    name = "Teacher.from_top_k"
    dense(ids, f"{name}: ids", "int64")
    dense(student_ids, f"{name}: student_ids", "int64 [W]")
    if student_ids.dtype != torch.int64 or student_ids.dim() != 1 or student_ids.device != ids.device:
        raise LogitlessError(
            f"{name}: student_ids must be int64 [W], the student's id of each of the teacher's, and where ids are, on "
            f"{ids.device}, but are {described(student_ids)}."
        )
    if ids.dtype != torch.int64:
        raise LogitlessError(f"{name}: ids must be int64 like student_ids but are {described(ids)}.")
    if inspectable(ids) and ids.numel() and int(ids.max()) >= len(student_ids):
        raise LogitlessError(
            f"{name}: ids go up to {int(ids.max())} but student_ids has {len(student_ids)} of the teacher's. Give one "
            f"for each of its ids."
        )
    return torch.where(ids < 0, -1, student_ids[ids.clamp_min(0)])


def _check_tail(name: str, tail: object) -> None:
    if tail not in TAILS:
        hint = did_you_mean(str(tail), TAILS)
        raise LogitlessError(f"{name}: tail must be 'bucket' or 'renormalise' but is {tail!r}.{hint}")


def _check_linear(logits: Logits, head: Head) -> None:
    """Raise for Logits whose head does not go with their hidden states, or is of a kind that a teacher cannot have."""
    hidden, weight, bias = logits.hidden, logits.weight, logits.linear.bias
    if isinstance(weight, LoRA):
        raise LogitlessError(
            "Teacher: the weight of its Logits is a LoRA, which is not followed here. Merge it into one weight, "
            "weight + scale * b @ a."
        )
    if logits.squash and (head.softcap is not None or isinstance(logits.gain, Tensor) or logits.gain * head.scale <= 0):
        raise LogitlessError(
            "Teacher: its Logits went through tanh, and then through what one softcap does not say: another softcap, "
            "one factor per row, or a negative one. Pass them before it, and head=Head(softcap=..., temperature=...)."
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise LogitlessError(
            f"Teacher: weight must be [W, {hidden.shape[-1]}] to go with hidden of size {hidden.shape[-1]} but is "
            f"{list(weight.shape)}."
        )
    if weight.dtype != hidden.dtype or weight.device != hidden.device:
        raise LogitlessError(
            f"Teacher: hidden is {hidden.dtype} on {hidden.device} but weight {weight.dtype} on {weight.device}. "
            f"Bring them together."
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise LogitlessError(f"Teacher: bias must be [{weight.shape[0]}] but is {list(bias.shape)}.")


@dataclass(frozen=True, eq=False)
class Teachers:
    """Several teachers in one batch, one for each row; made by :meth:`Teacher.by_row`."""

    members: Sequence[Teacher]
    which: Tensor

    def __post_init__(self) -> None:
        if not self.members or not all(isinstance(x, Teacher) for x in self.members):
            raise LogitlessError(f"{BY_ROW}members must be a list of at least one Teacher, or of logits.")
        if any(x.at is not None for x in self.members):
            raise LogitlessError("Teachers: a member has at=, which works with one Teacher only. Call once for each.")
        if any(x.top_k is not None for x in self.members):
            raise LogitlessError(
                "Teachers: a member has log-probs of K ids. Put those of all rows into one Teacher.from_top_k instead."
            )
        dense(self.which, BY_ROW + "which", "an int64 tensor of one number per row")
        if self.which.dim() != 1 or self.which.dtype != torch.int64:
            raise LogitlessError(f"{BY_ROW}which must be an int64 tensor of one number per row.")
        if inspectable(self.which) and self.which.numel():
            low, high = int(self.which.min()), int(self.which.max())
            if low < 0 or high >= len(self.members):
                raise LogitlessError(
                    f"Teachers: which runs from {low} to {high}, but there are {len(self.members)} members."
                )


def regrouped(given: Teacher | Teachers) -> bool:
    """Whether rows are worked off in another order, that of their teachers, or of the tokens of one that multiplies
    each of them once for several rows."""
    return isinstance(given, Teachers) or (given.at is not None and given.hidden is not None)


def columns_of_ids(ids: Tensor, size: int) -> Tensor:
    """``[size]`` which of a teacher's columns here each of the student's first ids is, -1 for none; from the student's
    id of each of the columns."""
    source = torch.full((size + 1,), -1, dtype=torch.int64, device=ids.device)
    # Columns that the student does not have go to one place after its last.
    place = torch.where(ids < 0, size, ids)
    return source.scatter_(0, place, torch.arange(len(ids), device=ids.device))[:size]
