"""A call from its arguments to what they mean: checked and resolved once, before anything runs.

    Asked, Logits   options of the verb and of the head, as the caller gave them
    Call            the same call, checked: which rows, which columns, which backend, which machine

Every verb makes one ``Call`` and hands it on; nothing below asks again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from logitless.backends import choose_backend, load, products_of, require_backend
from logitless.backends.contract import Backend
from logitless.backends.divergences import Divergence
from logitless.call import checks
from logitless.call.asked import PLAIN, Asked
from logitless.collectives import agree_over, fingerprint
from logitless.errors import LogitlessError
from logitless.machine import CPU, Machine
from logitless.operands import Given, Kept, Linear, Logits, LoRA, Teacher, Teachers
from logitless.readings.reading import Row
from logitless.readings.support import Support
from logitless.readings.table import Table
from logitless.rows import Rows
from logitless.softmax import Normaliser, target_column
from logitless.spec import IGNORE, Head, VocabShard, accumulation_dtype, parse_memory

T = TypeVar("T")
P = ParamSpec("P")

MEMORY = {"logits": "16MiB", "hidden": "256MiB", "chunk": "1GiB"}
"""Working memory unless told otherwise: of work on logits, of tiles from hidden states, of chunks of whole rows."""


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
    def needs(self) -> tuple[bool, ...]:
        """Whether logits or hidden states (or a LoRA's part of them), weight, bias and a LoRA's b need a gradient."""
        logits, hidden, weight, bias, y, b = recorded(*self)
        return logits or hidden or y, weight, bias, b


@dataclass(frozen=True, eq=False)
class Call:
    """A checked call: what was asked for, and what it means for these tensors.

    Attributes:
        caller: the verb, for errors.
        asked: the options of the verb.
        linear: the options of the head; None where logits are given.
        shard: the columns here, or None for all.
        rows: the rows to score.
        num_rows: R.
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
        logits_dtype: of logits that are computed here: wide, or what they are rounded to on request.
        backend: the backend, and its name.
        memory: bytes of working memory.
        machine: which table of sizes applies. Work on given logits does not ask.
        width, rank: D of hidden states, 0 where logits are given, and the rank of a LoRA.
        apart: why a product and the softmax of its logits are apart, with logits in memory between them; None where
            one kernel does both.
        overwrite: whether backward may write over the logits.
        found: whether all targets were seen to be in the vocabulary, so that no row is left out, and none is NaN for
            want of its target.
        dropped: in a dry run, where no value can tell, the share of rows without a gradient.
    """

    caller: str
    asked: Asked
    linear: Linear | None
    shard: VocabShard | None
    rows: Rows
    num_rows: int
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
    logits_dtype: torch.dtype
    backend: Backend
    backend_name: str
    memory: int
    machine: Machine
    width: int = 0
    rank: int = 0
    lora_scale: float | Tensor = 1.0
    apart: str | None = "logits are given"
    overwrite: bool = False
    found: bool = False
    dropped: float = 0.0

    @property
    def entropy(self) -> bool:
        """Whether entropy is wanted, with a gradient or without."""
        return self.asked.entropy is not None

    @property
    def kept(self) -> Kept | None:
        return self.asked.kept

    @property
    def over_support(self) -> bool:
        """Whether everything is over the support, and nothing over the vocabulary."""
        return self.asked.kept is not None and self.asked.kept.scope == "support"

    @property
    def found_here(self) -> bool:
        """Whether all targets were seen to be among the columns that are here."""
        return self.found and self.columns == self.vocab_size

    def column_of(self, target: Tensor) -> Tensor:
        """``[R]`` column of each target among those that are here, ``ELSEWHERE`` or ``SKIP``."""
        return target if self.found_here else target_column(target, self.start, self.columns)

    def ignored(self, target: Tensor) -> Tensor | None:
        """``[R]`` rows to leave out; None where none is known to be."""
        return None if self.found else target == IGNORE

    @property
    def mean_columns(self) -> int:
        """Columns of a shard on average over the vocabulary group: the same on every rank of it."""
        return self.columns if self.group is None else -(-self.vocab_size // self.group.size())

    def support(self) -> Support | None:
        """The sampler's support of each row, if there is one."""
        kept = self.asked.kept
        return None if kept is None else Support.of(kept, self.rows.target, self.start, self.vocab_size)

    def row(self, norm: Normaliser) -> Row:
        """What results of readings are made of, of all rows."""
        return Row(norm, self.rows.target, self.gain, self.squash)

    def read_again(self) -> dict[str, Tensor | None]:
        """What backward reads besides what autograd saves, by the argument that it is."""
        teacher, head = self.asked.teacher, None
        members = (
            teacher.members if isinstance(teacher, Teachers) else (teacher,) if isinstance(teacher, Teacher) else ()
        )
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
        }
        head = self.asked.head or PLAIN
        facts |= {name: fingerprint(getattr(head, name)) for name in ("temperature", "scale", "softcap")}
        facts |= _facts(self.asked)
        if self.linear is not None:
            # Backward of hidden states is a collective; that of logits is not.
            facts["whether hidden needs a gradient"] = self.needs[0]
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
            # Names of statistics may come as a set, and in any order.
            found[WORDS.get(name, name)] = tuple(sorted(x)) if name == "stats" else fingerprint(x)
    return found


def _teacher_facts(teacher: Any) -> dict[str, Any]:
    members = teacher.members if isinstance(teacher, Teachers) else (teacher,) if isinstance(teacher, Teacher) else ()
    return {
        "the number of teachers": len(members),
        "which row has which teacher": fingerprint(getattr(teacher, "which", None)),
        **{
            f"the teacher's {field.name}": tuple(member.facts()[number] for member in members)
            for number, field in enumerate(fields(Teacher))
        },
    }


def together(call: Callable[[], T], shard: Any, caller: str, facts_of: Callable[[T], dict[str, Any]]) -> T:
    """``call()``; if the shard asks for it, compared over its group, so that all ranks raise or none does."""
    if shard is None or not getattr(shard, "check_calls", False) or shard.group is None:
        return call()
    return agree_over(shard.group, caller, call, facts_of)


def shard_of(logits: Any) -> Any:
    """The shard that came with logits of any form."""
    return logits.linear.shard if isinstance(logits, Logits) else getattr(logits, "shard", None)


def resolve(
    caller: str, logits: Any, rows: Any, asked: Asked, memory: str | None = None, machine: Machine | None = None
) -> tuple[Call, Operands]:
    """The call, and its operands as products take them.

    Args:
        memory: default of the verb; None for that of log-probs.
        machine: whose sizes apply; None for that of the tensors.
    """
    checks.check_kinds(caller, asked)
    given = logits if isinstance(logits, Given) else None
    if isinstance(logits, Logits):
        return _resolve_hidden(caller, logits, rows, asked, memory, machine)
    x = checks.local_part(caller, "logits", logits if given is None else given.logits, shard_of(logits), last=True)
    chosen, shape = checks.resolve_rows(caller, rows)
    checks.check_logits(caller, x, chosen, shard_of(logits))
    overwrite = given is not None and given.overwrite
    call = _resolve(caller, x, x.shape[-1], chosen, shape, asked, None, shard_of(logits), memory or MEMORY["logits"])
    if overwrite and not torch.compiler.is_compiling():
        checks.check_overwrite(caller, x)
    needs = (*recorded(x), False, False, False)
    return replace(call, overwrite=overwrite, needs=needs, machine=machine or CPU), Operands(x)


def _resolve_hidden(
    caller: str, logits: Logits, rows: Any, asked: Asked, memory: str | None, machine: Machine | None
) -> tuple[Call, Operands]:
    linear, shard = logits.linear, logits.linear.shard
    operands = as_products_take(caller, logits, asked)
    hidden, weight = operands.hidden, operands.weight
    assert hidden is not None
    assert weight is not None
    checks.check_linear(caller, hidden, weight, linear, operands, asked)
    chosen, shape = checks.resolve_rows(caller, rows)
    checks.check_tokens(caller, hidden, weight, chosen, linear, asked)
    bias, buffer = (checks.local_part(caller, name, getattr(linear, name), shard) for name in ("bias", "weight_grad"))
    linear = (
        linear
        if buffer is linear.weight_grad and bias is linear.bias
        else replace(linear, bias=bias, weight_grad=buffer)
    )
    chunked = asked.teacher is not None
    default = memory or MEMORY["chunk" if chunked else "hidden"]
    call = _resolve(caller, hidden, weight.shape[0], chosen, shape, asked, logits, shard, default)
    lora = logits.weight if isinstance(logits.weight, LoRA) else None
    call = replace(
        call,
        linear=linear,
        needs=operands.needs,
        machine=Machine.of(hidden.device) if machine is None else machine,
        width=weight.shape[1],
        rank=0 if operands.b is None else operands.b.shape[1],
        lora_scale=1.0 if lora is None else lora.scale,
        logits_dtype=call.gain.dtype if linear.match is None else getattr(torch, linear.match),
    )
    return replace(call, apart=apart_everywhere(call) or _apart_here(operands, call)), operands


def _resolve(
    caller: str,
    x: Tensor,
    columns: int,
    rows: Rows,
    shape: tuple[int, ...],
    asked: Asked,
    logits: Logits | None,
    shard: VocabShard | None,
    memory: str,
) -> Call:
    head = asked.head or PLAIN
    vocab_size, columns = checks.vocabulary(caller, columns, head, shard)
    found = checks.check_targets(caller, rows, vocab_size)
    num_rows, wide = rows.index.numel(), accumulation_dtype(x.dtype)
    if asked.kept is not None:
        checks.check_kept(caller, asked.kept, rows, vocab_size, x.device)
    checks.check_readings(caller, asked, x.device, num_rows, shape, vocab_size)
    name = choose_backend(x, asked.backend).name
    require_backend(name, x)
    gain, squash, negative, unit = _distribution(caller, head, logits, rows, num_rows, wide, x.device)
    start = 0 if shard is None else shard.start
    ids = None if asked.ids is None else asked.ids.reshape(num_rows, asked.ids.shape[-1])
    return Call(
        caller=caller,
        asked=asked,
        linear=None,
        shard=shard,
        rows=rows,
        num_rows=num_rows,
        index=None if rows.in_order else rows.index,
        shape=shape,
        dtype=x.dtype,
        needs=(),
        gain=gain,
        squash=squash,
        negative=negative,
        unit=unit,
        vocab_size=vocab_size,
        start=start,
        columns=columns,
        group=None if shard is None else shard.group,
        table=Table.of(asked.stats, asked.top_k or 0, ids, negative=negative, start=start),
        kind=None if asked.teacher is None else Divergence.of(asked.divergence),
        logits_dtype=wide,
        backend=load(name),
        backend_name=name,
        memory=parse_memory(memory if asked.memory is None else asked.memory),
        machine=CPU,
        found=found,
    )


def _distribution(
    caller: str, head: Head, logits: Logits | None, rows: Rows, num_rows: int, wide: torch.dtype, device: torch.device
) -> tuple[Tensor, float, bool, bool]:
    """``[R]`` gain, squash, whether it turns the order around, and whether it changes nothing.

    Logits that are not computed may carry a factor, and a softcap of the model's own; the head's comes after them.
    """
    gain = head.gain(num_rows, wide, device)
    if logits is None or (not logits.squash and not isinstance(logits.gain, Tensor) and logits.gain == 1.0):
        return gain, head.squash, head.scale < 0, head.unit
    if head.softcap is not None and (logits.squash or isinstance(logits.gain, Tensor)):
        raise LogitlessError(
            f"{caller}: head has a softcap, and the Logits carry {'a softcap' if logits.squash else 'one factor per row'} "
            f"already. Give both in one place."
        )
    if isinstance(logits.gain, Tensor):
        factor = logits.gain.detach().reshape(-1).to(device=device, dtype=wide)
        factor = factor if rows.in_order else factor[rows.index]
        return (
            gain * torch.where((factor > 0) & factor.isfinite(), factor, torch.nan),
            logits.squash,
            head.scale < 0,
            False,
        )
    negative = head.scale * logits.gain < 0
    if head.softcap is not None:
        return gain, head.squash * logits.gain, negative, False
    factor = logits.gain
    unit = not logits.squash and not isinstance(head.temperature, Tensor) and head.scale * factor == head.temperature
    return gain * factor, logits.squash, negative, unit


def apart_everywhere(call: Call) -> str | None:
    """Why products and softmax are apart on every rank of a vocabulary group, or None: from sizes and options alone."""
    products = products_of(call.backend)
    if products is None:
        return f"the {call.backend_name} backend works on logits"
    if not call.machine.epilogues:
        return "kernels that do both were not measured on this machine (logitless tune does)"
    if call.kept is not None:
        return "kept ids are looked up in logits"
    if call.rank:
        return "a LoRA's product is added to logits"
    # Kernels compare logits after a softcap, where rounding makes ties that were none.
    if call.table is not None and (not call.table.only_best or call.squash):
        return "of stats=, top_k= and ids= such products tell top1 and max_logit alone, without a softcap"
    return products.takes_sizes(call.dtype, call.width)


def _apart_here(operands: Operands, call: Call) -> str | None:
    """The same, from how the operands lie in memory."""
    hidden, weight, bias, linear = operands.hidden, operands.weight, operands.bias, call.linear
    assert hidden is not None
    assert weight is not None
    assert linear is not None
    if bias is not None and bias.stride(0) != 1:
        return "bias is not contiguous"
    products = products_of(call.backend)
    lead = [(n, step) for n, step in zip(hidden.shape[:-1], hidden.stride()[:-1], strict=True) if n != 1]
    flat = all(step == n * below for (_, step), (n, below) in itertools.pairwise(lead))
    if flat and call.index is None and not linear.sequence_parallel:
        return products.takes(hidden.detach().reshape(-1, call.width), weight)
    return products.takes(hidden, weight, copied=True)


def as_products_take(caller: str, logits: Logits, asked: Asked) -> Operands:
    """Operands as a linear layer would take them: in autocast's dtype where it is on, the local part of a DTensor, the
    adapter of a LoRA apart."""
    hidden, weight, bias = logits.read()
    shard, linear = logits.linear.shard, logits.linear
    hidden = checks.local_part(caller, "hidden", hidden, shard, sharded=linear.sequence_parallel)
    lora = weight if isinstance(weight, LoRA) else None
    own: Tensor = checks.local_part(caller, "weight", weight.weight if isinstance(weight, LoRA) else weight, shard)
    bias = checks.local_part(caller, "bias", bias, shard)
    kind, wide = hidden.device.type, hidden
    # Autocast leaves float64 alone.
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        bias = None if bias is None else bias.to(dtype)
        hidden, own = hidden.to(dtype), own.to(dtype)
    if lora is None:
        return Operands(None, hidden, own, bias)
    checks.check_lora(caller, wide, lora, linear, asked)
    b = checks.local_part(caller, "b of the LoRA", lora.b, shard)
    return Operands(None, hidden, own, bias, lora.inner(wide).to(hidden.dtype), b.to(hidden.dtype))


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """The function; where torch.compile is tracing, behind a graph break."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return _graph_break(function, *args, **kwargs)
        return function(*args, **kwargs)

    return call


# The public torch.compiler.disable is the same, but imports the compiler, and with it Triton, when applied.
@torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]
def _graph_break(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    return function(*args, **kwargs)


def recorded(*tensors: Tensor | None) -> tuple[bool, ...]:
    """For which of them a gradient is recorded."""
    return tuple(torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad for x in tensors)
