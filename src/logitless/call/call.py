"""A call from its arguments to what they mean: checked and resolved once, before anything runs.

    Asked, Logits   options of the verb and of the head, as the caller gave them
    Call            the same call, checked: which rows, which columns, which backend, which machine

Every verb makes one ``Call`` and hands it on; nothing below asks again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from logitless.backends.contract import Backend
from logitless.backends.divergences import Divergence
from logitless.call.asked import PLAIN, Asked
from logitless.call.unchanged import Unchanged
from logitless.collectives import agree_over, fingerprint
from logitless.machine import Machine
from logitless.operands import Kept, Linear, Teacher, Teachers
from logitless.operands.stands import Bits
from logitless.readings.support import Support
from logitless.readings.table import TEACHER_STATS, Table
from logitless.rows import Rows
from logitless.spec import VocabShard, has_values

T = TypeVar("T")


class Operands(NamedTuple):
    """Tensors that may need a gradient: the logits; or hidden states, weight, bias, and a LoRA's two factors.

    Attributes:
        logits: that exist; None where there is a head.
        hidden, weight, bias: of the head.
        y: ``[..., r]`` hidden states times a LoRA's A and its scale, in hidden's dtype.
        b: ``[V, r]`` the LoRA's B, in hidden's dtype.
    """

    logits: Tensor | None = None
    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    y: Tensor | None = None
    b: Tensor | None = None

    @property
    def tokens(self) -> Tensor:
        """Whichever has one row per token."""
        x = self.hidden if self.logits is None else self.logits
        assert x is not None
        return x

    @property
    def low(self) -> tuple[Tensor, Tensor] | None:
        """y and b, of a LoRA."""
        return None if self.y is None or self.b is None else (self.y, self.b)


@dataclass(frozen=True, eq=False)
class Call:
    """A checked call: what was asked for, and what it means for these tensors.

    Attributes:
        caller: the verb, for errors.
        asked: the options of the verb.
        entropy: whether entropy is wanted, with a gradient or without.
        kept, over_support: ids that the sampler kept, and whether everything is over them and nothing over the
            vocabulary.
        linear: the options of the head; None where logits are given.
        shard: the columns here, or None for all.
        rows: the rows to score.
        num_rows: R.
        column: ``[R]`` of each target among the columns here, ``ELSEWHERE`` or ``SKIP``.
        ignored: ``[R]`` rows to leave out; None where none is known to be.
        index: ``[R]`` rows among the tokens; None for all of them in order.
        shape: in which results are returned.
        dtype: of the logits, or of hidden states and weight.
        needs: whether logits or hidden states, weight, bias and a LoRA's b need a gradient.
        gain, squash: factor of each row's logits ``[R]``, and the one inside a softcap's tanh, 0 without one.
        negative: whether the head turns the order of the logits around.
        unit: whether it leaves logits as they are, as far as can be told without asking a device.
        vocab_size: true size of the vocabulary.
        start, columns: the part of it that is here.
        group: process group that holds the rest; None if unsharded.
        table: readings beyond the softmax; None for none.
        kind: which divergence, where there is a teacher.
        taught: whether a teacher's logits over the vocabulary lie beside the student's, as they do not where it sent
            K log-probs.
        logits_dtype: of logits that are computed here: wide, or what they are rounded to on request.
        backend: the backend, and its name.
        memory, budget: bytes of working memory, and as they were asked for, or the default.
        machine: which table of sizes applies. Work on given logits does not ask.
        num_tokens: of hidden states here, 0 where logits are given.
        width, rank, lora_scale: D of hidden states, 0 where logits are given, and rank and scale of a LoRA.
        parts: how many 16-bit products make one of float32 numbers: 2 where the weight alone is float32, 3 where hidden
            states are, too, and ``precision`` asks for it; 1 where operands are multiplied as they are.
        apart, apart_everywhere: why a product and the softmax of its logits are apart, with logits in memory between
            them; None where one kernel does both. The latter from what all ranks of a vocabulary group know.
        overwrite: whether backward may write over the logits.
        bits, canonical: ``"fast"``, or ``"canonical"`` for products of one shape and sums that are order-free, which
            those of float64 are not.
        found, found_here: whether all targets were seen to be in the vocabulary, so that no row is left out, and none
            is NaN for want of its target; and whether they are among the columns here.
        dropped: in a dry run, where no value can tell, the share of rows without a gradient.
    """

    caller: str
    asked: Asked
    entropy: bool
    kept: Kept | None
    over_support: bool
    linear: Linear | None
    shard: VocabShard | None
    rows: Rows
    num_rows: int
    column: Tensor
    ignored: Tensor | None
    index: Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs: tuple[bool, ...]
    gain: Tensor
    squash: float
    negative: bool
    unit: bool
    vocab_size: int
    start: int
    columns: int
    group: Any
    table: Table | None
    kind: Divergence | None
    taught: bool
    logits_dtype: torch.dtype
    backend: Backend
    backend_name: str
    memory: int
    budget: int | str
    machine: Machine
    num_tokens: int = 0
    width: int = 0
    rank: int = 0
    parts: int = 1
    lora_scale: float | Tensor = 1.0
    apart: str | None = "logits are given"
    apart_everywhere: str | None = "logits are given"
    overwrite: bool = False
    bits: Bits = "fast"
    canonical: bool = False
    found: bool = False
    found_here: bool = False
    dropped: float = 0.0

    @property
    def depth(self) -> int:
        """How many numbers a product multiplies for one logit: those of all parts."""
        return self.parts * self.width

    @property
    def mean_columns(self) -> int:
        """Columns of a shard on average over the vocabulary group: the same on every rank of it."""
        return self.columns if self.group is None else -(-self.vocab_size // self.group.size())

    @property
    def columns_by_rank(self) -> tuple[int, ...]:
        """How many columns each rank of the vocabulary group has, padding apart; each number once."""
        bounds = () if self.shard is None else self.shard.bounds
        return tuple(sorted({min(max(self.vocab_size - start, 0), stop - start) for start, stop in bounds}))

    @property
    def teachers(self) -> tuple[Teacher, ...]:
        """The teacher, or one for each row; none where there is none."""
        return members_of(self.asked.teacher)

    @property
    def accepts(self) -> bool:
        """Whether the acceptance is read beside a teacher."""
        return self.kind is not None and (self.kind.accepts or "acceptance" in self.asked.stats)

    @property
    def bucket(self) -> bool:
        """Whether the divergence is over all ids of a teacher, those that the student has not included."""
        return any(x.tail == "bucket" for x in self.teachers)

    @property
    def wants_whole(self) -> bool:
        """Whether a teacher is asked for its whole vocabulary, of which the student has part."""
        asked = self.accepts or self.bucket or any(name in TEACHER_STATS for name in self.asked.stats)
        return asked and any(x.ids is not None for x in self.teachers)

    def support(self) -> Support | None:
        """The sampler's support of each row, if there is one."""
        kept = self.asked.kept
        return None if kept is None else Support.of(kept, self.rows.target, self.start, self.vocab_size)

    def unchanged(self) -> Unchanged:
        """What backward reads besides what autograd saves, as it is now."""
        read = self.read_again().items()
        seen = [(name, x, None if x.is_inference() else x._version) for name, x in read if x is not None]
        return Unchanged(self.caller, tuple(seen))

    def read_again(self) -> dict[str, Tensor | None]:
        """What backward reads besides what autograd saves, by the argument that it is."""
        teacher, members = self.asked.teacher, self.teachers
        found: dict[str, Tensor | None] = {"rows.index": self.rows.index, "rows.target": self.rows.target}
        found |= {"ids": self.asked.ids, "which": getattr(teacher, "which", None)}
        if self.kept is not None:
            found |= {"kept.ids": self.kept.ids, "kept.lengths": self.kept.lengths}
        for number, member in enumerate(members):
            head = member.head
            own = member.read_again()
            if head is not None and isinstance(head.temperature, Tensor):
                own["teacher.head.temperature"] = head.temperature
            place = "teacher" if len(members) == 1 else f"teacher.members[{number}]"
            found |= {name.replace("teacher", place, 1): x for name, x in own.items()}
        return found

    def facts(self) -> dict[str, Any]:
        """What the ranks of a vocabulary group must agree on: every option, and what follows from the tensors.

        Options are compared by walking their dataclasses, so that a new one is compared without being named here.
        """
        facts = {
            "the number of rows": self.num_rows,
            f"the dtype of {'the logits' if self.linear is None else 'hidden'}": str(self.dtype),
            "which rows are scored": fingerprint(self.rows.index),
            "the targets": fingerprint(self.rows.target),
            "the vocabulary size": self.vocab_size,
            "the hidden size": self.width,
            "the rank of a LoRA": self.rank,
            "the scale of a LoRA": fingerprint(self.lora_scale),
            "the backend": self.backend_name,
            "bits": self.bits,
        }
        head = self.asked.head or PLAIN
        facts |= {name: fingerprint(getattr(head, name)) for name in ("temperature", "scale", "softcap")}
        # Logits that are not computed may carry a factor or a softcap of their own.
        facts["the factor of the logits"] = (fingerprint(self.gain), self.squash)
        facts |= _facts(self.asked)
        if self.linear is not None:
            facts["the number of tokens"] = self.num_tokens
            # The gradient of hidden states is summed over the group; that of logits is local.
            facts[f"whether hidden{' or a of a LoRA' if self.rank else ''} needs a gradient"] = self.needs[0]
            facts["whether weight or bias needs a gradient"] = any(self.needs[1:])
            facts |= _facts(self.linear)
        return facts


NOT_COMPARED = {
    "shard": "its bounds are compared when it is made",
    "memory": "tiles are a rank's own; chunks between which ranks communicate are compared with the route",
    "backend": "it is compared as it was chosen",
    "head": "it is compared field by field",
    "strict": "it decides on no number",
}
"""Options that the ranks of a vocabulary group do not compare by themselves, and why."""

PARTS = ("bias", "weight_grad")
"""Options of which every rank has its own part."""

WORDS = {"kept": "the kept ids", "ids": "the ids", "divergence": "the divergence"}
"""Options that errors call by another name."""


def _facts(options: Any) -> dict[str, Any]:
    """Every option by name, in a form that can be sent and compared."""
    found = {}
    for name in (field.name for field in fields(options) if field.name not in NOT_COMPARED):
        x = getattr(options, name)
        if name in PARTS:
            found[f"whether there is a {name}"] = x is not None
        elif name == "teacher":
            found |= _teacher_facts(x)
        elif name == "divergence":
            found[WORDS[name]] = str(Divergence.of(x))
        else:
            # The order of the names in stats= decides on nothing.
            found[WORDS.get(name, name)] = tuple(sorted(x)) if name == "stats" else fingerprint(x)
    return found


def _teacher_facts(teacher: Any) -> dict[str, Any]:
    members = members_of(teacher)
    return {
        "the number of teachers": len(members),
        "which row has which teacher": fingerprint(getattr(teacher, "which", None)),
        **{
            f"the teacher's {field.name}": tuple(member.facts()[number] for member in members)
            for number, field in enumerate(fields(Teacher))
        },
    }


def members_of(teacher: Any) -> tuple[Teacher, ...]:
    """One teacher, or all of several; none where there is none."""
    if isinstance(teacher, Teachers):
        return tuple(teacher.members)
    return (teacher,) if isinstance(teacher, Teacher) else ()


def rows_of_each(teacher: Teacher | Teachers, num_rows: int) -> list[int]:
    """How many of the rows each teacher has. In a dry run all rows count as the first teacher's."""
    if isinstance(teacher, Teacher):
        return [num_rows]
    if not has_values(teacher.which):
        return [num_rows, *[0] * (len(teacher.members) - 1)]
    return teacher.which.bincount(minlength=len(teacher.members)).tolist()


def together(call: Callable[[], T], shard: Any, caller: str, facts_of: Callable[[T], dict[str, Any]]) -> T:
    """``call()``; if the shard asks for it, compared over its group, so that all ranks raise or none does."""
    if shard is None or not getattr(shard, "check_calls", False) or shard.group is None:
        return call()
    return agree_over(shard.group, caller, call, facts_of)


def recorded(*tensors: Tensor | None) -> tuple[bool, ...]:
    """For which of them a gradient is recorded."""
    return tuple(torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad for x in tensors)
