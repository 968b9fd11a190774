"""From arguments to a :class:`~logitless.call.call.Call`: checked and resolved once, before anything runs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from logitless.backends import backend_of
from logitless.backends.divergences import Divergence
from logitless.call import checks
from logitless.call.asked import PLAIN, Asked
from logitless.call.call import Call, Operands
from logitless.call.dry import ACTIVE, under_way
from logitless.errors import LogitlessError
from logitless.machine import CPU, Machine
from logitless.operands import Given, Linear, Logits, LoRA
from logitless.operands.stands import Bits, Stands, factors_of_rows
from logitless.readings.table import Table
from logitless.softmax import target_column
from logitless.spec import IGNORE, Head, VocabShard, accumulation_dtype, parse_memory

MEMORY = {"logits": "16MiB", "hidden": "256MiB", "chunk": "1GiB"}
"""Working memory unless told otherwise: of work on logits, of tiles from hidden states, of chunks of whole rows."""


def default_memory(logits: Any, chunks: bool) -> int | str:
    """The budget of a call that asks for none.

    Args:
        chunks: whether chunks of whole rows are held: in a loss, and beside a teacher.
    """
    if not isinstance(logits, Logits):
        return MEMORY["logits"]
    return logits._stands.memory or MEMORY["chunk" if chunks else "hidden"]


def resolve(caller: str, logits: Any, rows: Any, asked: Asked, chunks: bool = False) -> tuple[Call, Operands]:
    """The call, and its operands as products take them; ``chunks`` as for :func:`default_memory`."""
    shard = getattr(logits, "shard", None)
    if isinstance(logits, Logits):
        stands = logits.opened()
        operands = as_products_take(caller, stands)
        linear = _with_local_parts(caller, stands.linear)
        checked = checks.check_hidden(caller, operands, rows, linear, asked)
        default = default_memory(logits, chunks)
        assert operands.hidden is not None
        head = _of_head(operands, linear, stands)
        call = _resolve(caller, operands.hidden, checked, asked, stands, shard, default, **head)
        if linear.precision == "bfloat16x3":
            call = in_three_parts(call)
        if linear.bits != "fast":
            checks.check_bits(call)
        # The call was made in this function and nobody else holds it yet, so these two may still be set.
        everywhere = apart_everywhere(call)
        object.__setattr__(call, "apart_everywhere", everywhere)
        object.__setattr__(call, "apart", everywhere or _apart_here(operands, call))
        return call, operands
    given = logits if isinstance(logits, Given) else None
    x = _local(caller, "logits", logits if given is None else given.logits, shard, last=True)
    overwrite = given is not None and given.overwrite
    checked = checks.check_given(caller, x, rows, shard, asked, overwrite)
    needs = (torch.is_grad_enabled() and x.requires_grad, False, False, False)
    bits: Bits = "fast" if given is None else given.bits
    default = default_memory(logits, chunks)
    call = _resolve(caller, x, checked, asked, None, shard, default, needs=needs, overwrite=overwrite, bits=bits)
    if bits != "fast":
        checks.check_bits(call)
    return call, Operands(x)


def _of_head(operands: Operands, linear: Linear, stands: Stands) -> dict[str, Any]:
    """What there is to know of the head of a call."""
    hidden, weight = operands.hidden, operands.weight
    assert hidden is not None
    assert weight is not None
    found = {
        "linear": linear,
        "needs": _needs(operands),
        "num_tokens": hidden.shape[:-1].numel(),
        "width": weight.shape[1],
        "rank": 0 if operands.b is None else operands.b.shape[1],
        "parts": 1 if weight.dtype == hidden.dtype else 2,
        "lora_scale": stands.weight.scale if isinstance(stands.weight, LoRA) else 1.0,
        "bits": linear.bits,
    }
    return found if linear.match is None else {**found, "logits_dtype": getattr(torch, linear.match)}


def in_three_parts(call: Call) -> Call:
    """The call with float32 operands in 16-bit parts. On a CPU without kernels parts would be widened again: there the
    call stays as it is."""
    split = call.machine.wide_products or getattr(call.backend, "products", None) is not None
    return replace(call, dtype=torch.bfloat16, parts=3) if split and call.dtype == torch.float32 else call


def _needs(operands: Operands) -> tuple[bool, ...]:
    """Whether hidden states (or a LoRA's part of them), weight, bias and a LoRA's b need a gradient."""
    if not torch.is_grad_enabled():
        return (False,) * 4
    hidden, weight, bias, y, b = [x is not None and x.requires_grad for x in operands[1:]]
    return hidden or y, weight, bias, b


def _resolve(
    caller: str,
    x: Tensor,
    checked: checks.Checked,
    asked: Asked,
    stands: Stands | None,
    shard: VocabShard | None,
    memory: int | str,
    bits: Bits,
    **known: Any,
) -> Call:
    """The call of operands that were checked.

    Args:
        x: whichever operand has one row per token.
        memory: the default budget.
        known: what is known of the logits, or of the head.
    """
    rows, shape, vocab_size, columns, found = checked
    pretended = under_way() if ACTIVE else None
    # A real call on a CPU reads its targets, so a dry call for a CPU counts them as read.
    found = found or (pretended is not None and pretended.machine is CPU)
    num_rows, target, kept, head = rows.index.numel(), rows.target, asked.kept, asked.head or PLAIN
    wide = accumulation_dtype(x.dtype)
    budget = memory if asked.memory is None else asked.memory
    size = parse_memory(budget)
    # Rollout engines keep temperatures in float32, so canonical bits round a number to it before dividing.
    gain = head.gain(num_rows, wide, x.device, single=bits == "canonical")
    squash, negative, unit = head.squash, head.scale < 0, head.unit
    if stands is not None and (stands.squash or isinstance(stands.gain, Tensor) or stands.gain != 1.0):
        gain, squash, negative, unit = _carried(caller, head, stands, rows, gain)
    machine = CPU
    if stands is not None:
        told = None if pretended is None else pretended.machine
        machine = Machine.of(x.device) if told is None else told
    name, backend = backend_of(x, asked.backend, None if pretended is None else pretended.device)
    start, found_here = 0 if shard is None else shard.start, found and columns == vocab_size
    over_support = kept is not None and kept.scope == "support"
    return Call(
        caller=caller,
        asked=asked,
        entropy=asked.entropy is not None,
        kept=kept,
        over_support=over_support,
        shard=shard,
        rows=rows,
        num_rows=num_rows,
        column=target if found_here else target_column(target, start, columns),
        ignored=None if found else target == IGNORE,
        index=None if rows.in_order else rows.index,
        shape=shape,
        dtype=x.dtype,
        gain=gain,
        squash=squash,
        negative=negative,
        unit=unit,
        vocab_size=vocab_size,
        start=start,
        columns=columns,
        group=None if shard is None else shard.group,
        table=_table(asked, num_rows, negative, start),
        kind=None if asked.teacher is None else Divergence.of(asked.divergence),
        taught=asked.teacher is not None and kept is None and getattr(asked.teacher, "top_k", None) is None,
        backend=backend,
        backend_name=name,
        memory=size,
        budget=budget,
        machine=machine,
        found=found,
        found_here=found_here,
        dropped=0.0 if pretended is None else pretended.dropped,
        bits=bits,
        # Order-free sums exist for float32 alone, and only sums over the vocabulary are such.
        canonical=bits == "canonical" and wide == torch.float32 and not over_support,
        **{"linear": None, "logits_dtype": wide, **known},
    )


def _table(asked: Asked, num_rows: int, negative: bool, start: int) -> Table | None:
    """The readings beyond the softmax that are asked for; None for none."""
    if not asked.stats and asked.top_k is None and asked.ids is None:
        return None
    ids = None if asked.ids is None else asked.ids.reshape(num_rows, asked.ids.shape[-1])
    return Table.of(asked.stats, asked.top_k or 0, ids, negative=negative, start=start)


def _carried(caller: str, head: Head, stands: Stands, rows: Any, gain: Tensor) -> tuple[Tensor, float, bool, bool]:
    """``[R]`` gain, squash, whether it turns the order around, and whether it changes nothing, where logits that are
    not computed carry a factor, or a softcap of the model's own; the head's, with its gain, comes after them."""
    if head.softcap is not None and (stands.squash or isinstance(stands.gain, Tensor)):
        carried = "a softcap" if stands.squash else "one factor per row"
        raise LogitlessError(
            f"{caller}: head has a softcap, and the Logits carry {carried} already. Give both in one place."
        )
    if isinstance(stands.gain, Tensor):
        if stands.linear.sequence_parallel:
            raise checks.split_factor(caller, "the Logits carry", "head=Head(temperature=...)")
        factor = factors_of_rows(stands.gain, gain)
        factor = factor if rows.in_order else factor[rows.index]
        return gain * factor, stands.squash, head.scale < 0, False
    negative = head.scale * stands.gain < 0
    if head.softcap is not None:
        return gain, head.squash * stands.gain, negative, False
    unit = not stands.squash and not isinstance(head.temperature, Tensor)
    unit = unit and head.scale * stands.gain == head.temperature
    return gain * stands.gain, stands.squash, negative, unit


def apart_everywhere(call: Call) -> str | None:
    """Why products and softmax are apart on every rank of a vocabulary group, or None: from sizes and options alone."""
    products = getattr(call.backend, "products", None)
    if products is None:
        return f"the {call.backend_name} backend works on logits"
    if not call.machine.epilogues:
        return "kernels that do both were not measured on this machine (logitless tune does)"
    if call.kept is not None:
        return "kept ids are looked up in logits"
    if call.rank:
        return "a LoRA's product is added to logits"
    # Kernels compare logits after the softcap, whose rounding can make ties of logits that differ.
    if call.table is not None and (not call.table.only_best or call.squash):
        return "of stats=, top_k= and ids= such products tell top1 and max_logit alone, without a softcap"
    return products.takes_sizes(call.dtype, call.depth)


def _apart_here(operands: Operands, call: Call) -> str | None:
    """The same, from how the operands lie in memory."""
    hidden, weight, bias, linear = operands.hidden, operands.weight, operands.bias, call.linear
    assert hidden is not None
    assert weight is not None
    assert linear is not None
    if bias is not None and bias.stride(0) != 1:
        return "bias is not contiguous"
    products = call.backend.products
    assert products is not None
    if call.parts > 1:
        # Operands in parts are copied: copies always lie well.
        return None
    lead = [(n, step) for n, step in zip(hidden.shape[:-1], hidden.stride()[:-1], strict=True) if n != 1]
    flat = all(step == n * below for (_, step), (n, below) in itertools.pairwise(lead))
    if flat and call.index is None and not linear.sequence_parallel:
        return products.takes(hidden.detach().reshape(-1, call.width), weight)
    return products.takes(hidden, weight, copied=True)


def _local(caller: str, name: str, x: Any, shard: Any, **where: bool) -> Any:
    """The part of a DTensor that lives here; anything else as it is."""
    return x if getattr(x, "placements", None) is None else checks.local_part(caller, name, x, shard, **where)


def _with_local_parts(caller: str, linear: Linear) -> Linear:
    """The options of a head with the parts of its bias and its buffer that live here."""
    bias, buffer, shard = linear.bias, linear.weight_grad, linear.shard
    if getattr(bias, "placements", None) is None and getattr(buffer, "placements", None) is None:
        return linear
    bias, buffer = _local(caller, "bias", bias, shard), _local(caller, "weight_grad", buffer, shard)
    return replace(linear, bias=bias, weight_grad=buffer)


def autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    """The dtype that autocast multiplies hidden states in; None where it is off. It leaves float64 alone."""
    kind = hidden.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if on else None


def as_products_take(caller: str, stands: Stands) -> Operands:
    """Operands as a linear layer would take them: in autocast's dtype where it is on, the local part of a DTensor, the
    adapter of a LoRA apart."""
    hidden, weight, linear = stands.hidden, stands.weight, stands.linear
    shard, bias = linear.shard, linear.bias
    hidden = _local(caller, "hidden", hidden, shard, sharded=linear.sequence_parallel)
    lora = weight if isinstance(weight, LoRA) else None
    own: Tensor = _local(caller, "weight", weight.weight if isinstance(weight, LoRA) else weight, shard)
    bias = _local(caller, "bias", bias, shard)
    wide, dtype = hidden, autocast_dtype(hidden)
    if dtype is not None:
        bias = None if bias is None else bias.to(dtype)
        hidden, own = hidden.to(dtype), own.to(dtype)
    if lora is None:
        return Operands(None, hidden, own, bias)
    checks.check_lora(caller, wide, lora, linear)
    b = _local(caller, "b of the LoRA", lora.b, shard)
    return Operands(None, hidden, own, bias, lora.inner(wide).to(hidden.dtype), b.to(hidden.dtype))
