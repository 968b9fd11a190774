"""A call from its arguments to what they mean: checked and resolved once, before anything runs.

    Options   keyword arguments as the caller gave them (``options``), to be checked (``checks``)
    Call      the same call, checked: which rows, which columns, which backend, which machine

Every path makes one ``Call`` and hands it on; nothing below asks again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from logitless.backends import choose_backend, require_backend
from logitless.backends.triton import products
from logitless.call.checks import (
    check_entropy,
    check_extras,
    check_kept,
    check_kinds,
    check_logits,
    check_lora,
    check_operands,
    check_overwrite,
    check_parallel,
    check_scope,
    check_targets,
    check_tokens,
    vocabulary,
)
from logitless.call.lora import LoRA, LowRank
from logitless.call.options import Options
from logitless.collectives import agree_over, fingerprint
from logitless.errors import LogitlessError
from logitless.extras import Extras, Row
from logitless.machine import CPU, Machine
from logitless.results import target_column
from logitless.rows import Rows
from logitless.softmax import Normaliser
from logitless.spec import IGNORE, Head, accumulation_dtype, parse_memory
from logitless.support import Support

T = TypeVar("T")
P = ParamSpec("P")

PLAIN = Head()
"""The distribution where none is given."""


@dataclass(frozen=True, eq=False)
class Call:
    """A checked call: what was asked for, and what it means for these tensors.

    Attributes:
        asked: the options.
        rows: the rows to score.
        num_rows: R.
        index: ``[R]`` rows among the tokens; None for all of them in order.
        shape: in which results are returned.
        dtype: of the logits, or of hidden states and weight.
        tracked: whether a gradient of the logits or hidden states is recorded.
        entropy: whether entropy is wanted, with a gradient or without.
        gain, squash: factor of each row's logits ``[R]``, and the one inside a softcap's tanh, 0 without one.
        vocab_size: true size of the vocabulary.
        start, columns: the part of it that is here.
        group: process group that holds the rest; None if unsharded.
        logits_dtype: of logits that are computed here: wide, or what they are rounded to on request.
        backend: name of the backend.
        memory: bytes of working memory.
        machine: which table of sizes applies. The path from logits does not ask.
        width: D, of hidden states; 0 where logits are given.
        apart: why a product and the softmax of its logits are apart, with logits in memory between them; None where
            one kernel does both.
        overwrite: whether backward may write over the logits.
        further: names of further sums of the statistic.
        extras: what is asked for beyond log-prob, entropy and log Z; None for nothing.
        dropped: in a dry run, where no value can tell, the share of rows without a gradient.
        found: whether all targets were seen to be in the vocabulary, so that no row is left out, and none is NaN for
            want of its target.
    """

    asked: Options
    rows: Rows
    num_rows: int
    index: Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    tracked: bool
    entropy: bool
    gain: Tensor
    squash: float
    vocab_size: int
    start: int
    columns: int
    group: Any
    logits_dtype: torch.dtype
    backend: str
    memory: int
    machine: Machine
    width: int = 0
    apart: str | None = "logits are given"
    overwrite: bool = False
    further: tuple[str, ...] = ()
    extras: Extras | None = None
    dropped: float = 0.0
    found: bool = False

    @property
    def over_support(self) -> bool:
        """Whether everything is over the support, and nothing over the vocabulary."""
        return self.asked.scope == "support"

    @property
    def unit(self) -> bool:
        """Whether the head leaves logits as they are, as far as can be told without asking a device."""
        head = self.asked.head
        return head is None or head.unit

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
        """What results of extras are made of, of all rows."""
        return Row(norm, self.rows.target, self.gain, self.squash)

    def facts(self) -> dict[str, Any]:
        """What the ranks of a vocabulary group must agree on."""
        asked, head = self.asked, self.asked.head or PLAIN
        from_hidden, kept = asked.caller != "logprobs", asked.kept
        facts = {
            "the number of rows": self.num_rows,
            f"the dtype of {'hidden' if from_hidden else 'the logits'}": str(self.dtype),
            "which rows are scored": fingerprint(self.rows.index),
            "the targets": fingerprint(self.rows.target),
            "entropy": asked.entropy,
            "whether there are kept ids": kept is not None,
            "the kept ids": None if kept is None else (fingerprint(kept.ids), fingerprint(kept.lengths)),
            "scope": asked.scope,
            "stats": tuple(asked.stats),
            "top_k": asked.top_k,
            "the further ids": fingerprint(asked.further_ids),
            "the vocabulary size": self.vocab_size,
            "temperature": fingerprint(head.temperature),
            "scale": head.scale,
            "softcap": head.softcap,
            "match": asked.match,
            "whether there is a bias": asked.bias is not None,
            "the rank of a LoRA": 0 if asked.low_rank is None else asked.low_rank.b.shape[1],
            "hidden_grad": asked.hidden_grad,
            "sequence_parallel": asked.sequence_parallel,
        }
        # Backward of hidden states is a collective; that of logits is not.
        return facts | ({"whether hidden needs a gradient": self.tracked} if from_hidden else {})


def together(asked: Options, resolve: Callable[[], T], facts_of: Callable[[T], dict[str, Any]]) -> T:
    """``resolve()``; if the shard asks for it, compared over its group, so that all ranks raise or none does."""
    shard = asked.shard
    if shard is None or not getattr(shard, "check_calls", False) or shard.group is None:
        return resolve()
    return agree_over(shard.group, asked.caller, resolve, facts_of)


def resolve_logits(logits: Tensor, rows: Any, asked: Options, overwrite: bool) -> Call:
    """The call of :func:`logitless.logprobs`."""
    check_kinds(asked)
    chosen, shape = resolve_rows(asked.caller, rows)
    check_entropy(asked)
    check_scope(asked)
    check_logits(asked.caller, logits, chosen, asked.shard)
    call = _resolve(logits, logits.shape[-1], 0, chosen, shape, asked, CPU, overwrite)
    if overwrite and not torch.compiler.is_compiling():
        check_overwrite(logits)
    return call


def resolve_hidden(hidden: Tensor, weight: Tensor, rows: Any, asked: Options, machine: Machine | None = None) -> Call:
    """The call of a path from hidden states. The machine is that of the tensors, unless a dry run names another."""
    check_kinds(asked)
    check_operands(hidden, weight, asked)
    check_parallel(asked)
    chosen, shape = resolve_rows(asked.caller, rows)
    check_entropy(asked)
    check_scope(asked)
    check_tokens(hidden, weight, chosen, asked)
    machine = Machine.of(hidden.device) if machine is None else machine
    call = _resolve(hidden, weight.shape[0], weight.shape[1], chosen, shape, asked, machine, False)
    return replace(call, apart=apart_everywhere(call) or _apart_here(hidden, weight, call))


def apart_everywhere(call: Call) -> str | None:
    """Why products and softmax are apart on every rank of a vocabulary group, or None: from sizes and options alone."""
    if call.backend != "triton":
        return f"the {call.backend} backend works on logits"
    if not call.machine.epilogues:
        return "kernels that do both were not measured on this machine (logitless tune does)"
    if call.asked.kept is not None:
        return "kept ids are looked up in logits"
    if call.asked.low_rank is not None:
        return "a LoRA's product is added to logits"
    # Kernels compare logits after a softcap, where rounding makes ties that were none.
    if call.extras is not None and (not call.extras.only_best or call.squash):
        return "of stats=, top_k= and further_ids= such products tell top1 and max_logit alone, without a softcap"
    return products.takes_sizes(call.dtype, call.width)


def _apart_here(hidden: Tensor, weight: Tensor, call: Call) -> str | None:
    """The same, from how the operands lie in memory."""
    if call.asked.bias is not None and call.asked.bias.stride(0) != 1:
        return "bias is not contiguous"
    lead = [(n, step) for n, step in zip(hidden.shape[:-1], hidden.stride()[:-1], strict=True) if n != 1]
    flat = all(step == n * below for (_, step), (n, below) in itertools.pairwise(lead))
    if flat and call.index is None and not call.asked.sequence_parallel:
        return products.takes(hidden.detach().reshape(-1, call.width), weight)
    return products.takes(hidden, weight, copied=True)


def _resolve(
    x: Tensor,
    columns: int,
    width: int,
    rows: Rows,
    shape: tuple[int, ...],
    asked: Options,
    machine: Machine,
    overwrite: bool,
) -> Call:
    head = asked.head or PLAIN
    vocab_size, columns = vocabulary(asked.caller, columns, head, asked.shard)
    found = check_targets(asked.caller, rows, vocab_size)
    if asked.kept is not None:
        check_kept(asked.caller, asked.kept, rows, vocab_size, x.device)
    num_rows, wide = rows.index.numel(), accumulation_dtype(x.dtype)
    backend = choose_backend(x, asked.backend).name
    require_backend(backend, x)
    return Call(
        asked=asked,
        rows=rows,
        num_rows=num_rows,
        index=None if rows.in_order else rows.index,
        shape=shape,
        dtype=x.dtype,
        tracked=recorded(x)[0],
        entropy=asked.entropy is not None,
        gain=head.gain(num_rows, wide, x.device),
        squash=head.squash,
        vocab_size=vocab_size,
        start=0 if asked.shard is None else asked.shard.start,
        columns=columns,
        group=None if asked.shard is None else asked.shard.group,
        logits_dtype=wide if asked.match is None else getattr(torch, asked.match),
        backend=backend,
        memory=parse_memory(asked.memory),
        machine=machine,
        width=width,
        overwrite=overwrite,
        extras=_extras(asked, head, x.device, num_rows, shape, vocab_size),
        found=found,
    )


def _extras(
    asked: Options, head: Head, device: torch.device, num_rows: int, shape: tuple[int, ...], vocab_size: int
) -> Extras | None:
    """What is asked for beyond log-prob, entropy and log Z; None for nothing."""
    check_extras(asked, device, num_rows, shape, vocab_size)
    if not asked.stats and asked.top_k is None and asked.further_ids is None:
        return None
    start = 0 if asked.shard is None else asked.shard.start
    ids = None if asked.further_ids is None else asked.further_ids.reshape(num_rows, asked.further_ids.shape[-1])
    return Extras(tuple(asked.stats), asked.top_k or 0, ids, head.scale < 0, start)


def resolve_rows(caller: str, rows: Any) -> tuple[Rows, tuple[int, ...]]:
    """The rows, and the shape that results are returned in."""
    if isinstance(rows, Rows):
        return rows, (len(rows),)
    if isinstance(rows, Tensor):
        return Rows.every(rows), tuple(rows.shape)
    if isinstance(rows, tuple) and len(rows) == 2:
        chosen = Rows.at(*rows)
        return chosen, (len(chosen),)
    came = type(rows).__name__
    hint = " A list of targets, one per row of the logits, goes in as torch.tensor(rows)." if came == "list" else ""
    raise LogitlessError(
        f"{caller}: rows must be a Rows, a tensor of targets or a pair (index, target) but is {came}.{hint}"
    )


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


def needs_gradient(hidden: Tensor, weight: Tensor, asked: Options) -> tuple[bool, ...]:
    """Whether hidden states (or a LoRA's part of them), weight, bias and a LoRA's b need a gradient."""
    y, b = asked.low_rank or (None, None)
    return (any(recorded(hidden, y)), *recorded(weight, asked.bias, b))


def as_products_take(hidden: Tensor, weight: Tensor | LoRA, asked: Options) -> tuple[Tensor, Tensor, Options]:
    """Operands as a linear layer would take them: in autocast's dtype where it is on, the local part of a DTensor, the
    adapter of a LoRA apart."""
    hidden = local_part(asked, "hidden", hidden, 0 if asked.sequence_parallel else None)
    lora = weight if isinstance(weight, LoRA) else None
    own: Tensor = local_part(asked, "weight", weight.weight if isinstance(weight, LoRA) else weight, 0)
    bias, weight_grad = (local_part(asked, name, getattr(asked, name), 0) for name in ("bias", "weight_grad"))
    if bias is not asked.bias or weight_grad is not asked.weight_grad:
        asked = replace(asked, bias=bias, weight_grad=weight_grad)
    if not isinstance(hidden, Tensor) or not isinstance(own, Tensor):
        # The checks will say so. Nothing is cast before: a module's ``to`` would cast the module itself.
        return hidden, own, asked
    kind, wide = hidden.device.type, hidden
    # Autocast leaves float64 alone.
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        bias = None if bias is None else bias.to(dtype)
        hidden, own, asked = hidden.to(dtype), own.to(dtype), replace(asked, bias=bias)
    if lora is not None:
        check_lora(wide, lora, asked)
        b = local_part(asked, "b of the LoRA", lora.b, 0)
        asked = replace(asked, low_rank=LowRank(lora.inner(wide).to(hidden.dtype), b.to(hidden.dtype)))
    return hidden, own, asked


def local_part(asked: Options, name: str, x: Any, dim: int | None) -> Any:
    """What lives here of an argument, out of a DTensor whose meaning is clear; anything else as it is.

    Args:
        dim: along which it may be sharded over the group of ``shard=``; None if it must be whole.
    """
    placements = getattr(x, "placements", None)
    if placements is None:
        return x
    mesh, group = x.device_mesh, getattr(asked.shard, "group", None)
    over_group = mesh.ndim == 1 and group is not None and mesh.get_group() == group
    if all(p.is_replicate() for p in placements) or (over_group and dim is not None and placements[0].is_shard(dim)):
        return x.to_local()
    came = f"{asked.caller}: {name} is a DTensor with placements {placements}"
    if name == "hidden":
        raise LogitlessError(
            f"{came}, but hidden must be whole on every rank: pass hidden.full_tensor() or redistribute it. Only with "
            f"sequence_parallel=True may it be sharded by tokens, over the group of shard=."
        )
    if name == "logits":
        raise LogitlessError(
            f"{came}. Logits may be sharded by their last dimension over the group of shard=, as "
            f"VocabShard.even(vocab_size, mesh) makes it; otherwise pass logits.full_tensor()."
        )
    raise LogitlessError(
        f"{came}, as tensor parallelism and FSDP both make. For tensor parallelism pass "
        f"shard=logitless.shard_of(weight); for FSDP use a PolicyHead, or call inside the forward of the module that "
        f"owns the weight, where FSDP has gathered it."
    )
