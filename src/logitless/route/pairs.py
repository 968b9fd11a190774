"""Whether both models' logits of a divergence stay in the kernel that makes them, and if not, why.

dZ        one kernel for every divergence: both normalisers are known in backward
sums      of a KL alone: other divergences have terms that need both normalisers first, and read logits twice
stored    in a loss: the sums, and what dZ needs in 16 bits

Sums are sent between the ranks of a vocabulary group, so whether there are any follows from what all ranks know. A rank
that cannot make them so makes the same lines of logits.
"""

from __future__ import annotations

from torch import Tensor

from logitless.call import PLAIN, Call
from logitless.call.checks import vocabulary
from logitless.operands import Logits, Teacher
from logitless.product_table import pair_sizes

FEWER = "the student has ids that the teacher has not"

LINES = 10
"""Of a part: the statistics of both models, and two sums of their KL."""


def pair_apart(call: Call) -> str | None:
    """Why both models' logits go through memory, or None."""
    return pair_apart_everywhere(call) or pair_apart_here(call)


def pair_apart_here(call: Call) -> str | None:
    """The same, from what a rank of a vocabulary group knows of its own operands alone."""
    teacher, linear = call.asked.teacher, call.linear
    if call.apart is not None or linear is None:
        return call.apart
    assert isinstance(teacher, Teacher)
    assert isinstance(teacher.logits, Logits)
    if vocabulary(call.caller, teacher.width, teacher.head or PLAIN, call.shard)[1] != call.columns:
        return FEWER
    own, copied = teacher.tokens, call.index is not None or linear.sequence_parallel
    weight = teacher.logits.opened().weight
    assert isinstance(weight, Tensor)
    refused = call.backend.products.takes(own.detach().reshape(-1, own.shape[-1]), weight, copied=copied)
    return None if refused is None else f"of the teacher's operands {refused}"


def pair_apart_everywhere(call: Call) -> str | None:
    """The same, from what all ranks know."""
    teacher, linear = call.asked.teacher, call.linear
    if call.apart_everywhere is not None or linear is None:
        return call.apart_everywhere
    if getattr(call.backend, "pairs", None) is None:
        return f"the {call.backend_name} backend multiplies one model at a time"
    if not isinstance(teacher, Teacher) or not isinstance(teacher.logits, Logits):
        return "rows have several teachers" if not isinstance(teacher, Teacher) else "the teacher's logits exist"
    own, head = teacher.logits.stands(), teacher.head or PLAIN
    if teacher.ids is not None or teacher.at is not None:
        return "the teacher has other ids or tokens than the student"
    if vocabulary(call.caller, teacher.width, head, call.shard)[0] != call.vocab_size:
        return FEWER
    if call.table is not None:
        return "stats=, top_k= and ids= are read off logits beside a teacher"
    if call.parts > 1:
        return "the student's head is multiplied in parts"
    if linear.bias is not None or own.linear.bias is not None:
        return "a bias is added to logits"
    if linear.match is not None or own.linear.match is not None:
        return "match= rounds logits"
    if call.bits == "canonical":
        return 'bits="canonical" fixes the products'
    if call.negative or head.scale < 0:
        return "a head turns the order of its logits around"
    hidden = teacher.logits.hidden
    refused = call.backend.products.takes_sizes(hidden.dtype, hidden.shape[-1])
    return None if refused is None else f"of the teacher's operands {refused}"


def sums_apart(call: Call) -> str | None:
    """The same of the sums of a divergence: under a vocabulary group, from what all ranks know."""
    apart, kind = pair_apart(call) if call.group is None else pair_apart_everywhere(call), call.kind
    if apart is not None or kind is None:
        return apart
    if kind.kind not in ("forward_kl", "reverse_kl") or call.accepts:
        what = "the acceptance" if call.accepts else f"{kind.kind}"
        return f"{what} has terms that need both normalisers first"
    return "teacher_top1 is read off logits" if "teacher_top1" in call.asked.stats else None


def stored_apart(call: Call) -> str | None:
    """The same of sums in a loss, where dZ is made of what they leave in 16 bits."""
    return sums_apart(call) or ("16-bit exponentials do not tell a softcap's slope" if call.squash else None)


def teacher_width(call: Call) -> int:
    """Of the teacher's hidden states; 0 where there are none."""
    teacher = call.asked.teacher
    hidden = teacher.hidden if isinstance(teacher, Teacher) else None
    return 0 if hidden is None else hidden.shape[-1]


def pair_row(call: Call, teacher: int, stored: bool) -> int:
    """Bytes of a row's parts of the sums, with what is stored besides."""
    columns = max(1, call.mean_columns)
    parts = 4 * LINES * -(-columns // pair_sizes(call.width, teacher).columns)
    return parts + (2 * columns * call.dtype.itemsize if stored else 0)
