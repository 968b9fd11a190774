"""A call from its arguments to what they mean: checked and resolved once, before anything runs.

    Options   keyword arguments as the caller gave them
    Call      the same call, checked: which rows, which columns, which backend, which machine

Every path makes one ``Call`` and hands it on; nothing below asks again. Values that live on an accelerator are not
inspected, which would stall the stream; a bad one makes its own row NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from logitless.backends import choose_backend, require_backend
from logitless.collectives import agree_over, fingerprint
from logitless.errors import LogitlessError, did_you_mean
from logitless.kept import Kept
from logitless.machine import CPU, Machine
from logitless.rows import Rows
from logitless.spec import (
    IGNORE,
    EntropyMode,
    Head,
    VocabShard,
    accumulation_dtype,
    has_values,
    inspectable,
    parse_memory,
)
from logitless.support import Support

T = TypeVar("T")
P = ParamSpec("P")

PLAIN = Head()
"""The distribution where none is given."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, eq=False)
class Options:
    """Keyword arguments as the caller gave them, and the name to call the function by in errors."""

    bias: Tensor | None = None
    entropy: EntropyMode = None
    head: Head | None = None
    shard: VocabShard | None = None
    kept: Kept | None = None
    hidden_grad: Literal["reduced", "partial"] = "reduced"
    sequence_parallel: bool = False
    weight_grad: Tensor | None = None
    match: Literal["bfloat16", "float16"] | None = None
    tf32: bool = False
    batch_invariant: bool = False
    backend: str = "auto"
    memory: int | str = "256MiB"
    caller: str = "linear_logprobs"

    @staticmethod
    def of(arguments: Mapping[str, Any], caller: str) -> Options:
        """Those of a function's arguments that are options, each under its own name."""
        return Options(**{name: arguments[name] for name in _OPTIONS if name in arguments}, caller=caller)

    @staticmethod
    def named(given: Mapping[str, Any], caller: str) -> Options:
        """Options by name; raises for a name that is none."""
        for name in given:
            if name not in _OPTIONS:
                known = ", ".join(_OPTIONS)
                raise LogitlessError(
                    f"{caller}: {name} is no option that the route depends on.{did_you_mean(name, _OPTIONS)} "
                    f"Options are: {known}."
                )
        return Options(**given, caller=caller)


_OPTIONS = tuple(f.name for f in fields(Options) if f.name != "caller")


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
        overwrite: whether backward may write over the logits.
        further: names of further sums of the statistic.
        dropped: in a dry run, where no value can tell, the share of rows without a gradient.
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
    overwrite: bool = False
    further: tuple[str, ...] = ()
    dropped: float = 0.0

    def support(self) -> Support | None:
        """The sampler's support of each row, if there is one."""
        kept = self.asked.kept
        return None if kept is None else Support.of(kept, self.rows.target, self.start, self.vocab_size)

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
            "the vocabulary size": self.vocab_size,
            "temperature": fingerprint(head.temperature),
            "scale": head.scale,
            "softcap": head.softcap,
            "match": asked.match,
            "whether there is a bias": asked.bias is not None,
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
    _check_kinds(asked)
    chosen, shape = resolve_rows(asked.caller, rows)
    _check_entropy(asked)
    check_logits(asked.caller, logits, chosen, asked.shard)
    call = _resolve(logits, logits.shape[-1], chosen, shape, asked, CPU, overwrite)
    if overwrite and not torch.compiler.is_compiling():
        check_overwrite(logits)
    return call


def resolve_hidden(hidden: Tensor, weight: Tensor, rows: Any, asked: Options, machine: Machine | None = None) -> Call:
    """The call of a path from hidden states. The machine is that of the tensors, unless a dry run names another."""
    _check_kinds(asked)
    _check_operands(hidden, weight, asked)
    _check_parallel(asked)
    chosen, shape = resolve_rows(asked.caller, rows)
    _check_entropy(asked)
    _check_tokens(hidden, weight, chosen, asked)
    machine = Machine.of(hidden.device) if machine is None else machine
    return _resolve(hidden, weight.shape[0], chosen, shape, asked, machine, False)


def _resolve(
    x: Tensor, width: int, rows: Rows, shape: tuple[int, ...], asked: Options, machine: Machine, overwrite: bool
) -> Call:
    head = asked.head or PLAIN
    vocab_size, columns = vocabulary(asked.caller, width, head, asked.shard)
    check_targets(asked.caller, rows, vocab_size)
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
        overwrite=overwrite,
    )


def resolve_rows(caller: str, rows: Any) -> tuple[Rows, tuple[int, ...]]:
    """The rows, and the shape that results are returned in."""
    if isinstance(rows, Rows):
        return rows, (len(rows),)
    if isinstance(rows, Tensor):
        return Rows.every(rows), tuple(rows.shape)
    if isinstance(rows, tuple) and len(rows) == 2:
        chosen = Rows.at(*rows)
        return chosen, (len(chosen),)
    raise LogitlessError(
        f"{caller}: rows must be a Rows, a tensor of targets or a pair (index, target) but is {type(rows).__name__}."
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


def as_products_take(hidden: Tensor, weight: Tensor, asked: Options) -> tuple[Tensor, Tensor, Options]:
    """Operands as a linear layer would take them: in autocast's dtype where it is on, the local part of a DTensor."""
    hidden = local_part(asked, "hidden", hidden, 0 if asked.sequence_parallel else None)
    weight = local_part(asked, "weight", weight, 0)
    bias, weight_grad = (local_part(asked, name, getattr(asked, name), 0) for name in ("bias", "weight_grad"))
    if bias is not asked.bias or weight_grad is not asked.weight_grad:
        asked = replace(asked, bias=bias, weight_grad=weight_grad)
    kind = hidden.device.type if isinstance(hidden, Tensor) else "cpu"
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return hidden, weight, asked
    if hidden.dtype == torch.float64:
        # Autocast leaves float64 alone.
        return hidden, weight, asked
    dtype = torch.get_autocast_dtype(kind)
    bias = None if bias is None else bias.to(dtype)
    return hidden.to(dtype), weight.to(dtype), replace(asked, bias=bias)


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


# Checks that all paths share.


def vocabulary(caller: str, width: int, head: Head, shard: VocabShard | None) -> tuple[int, int]:
    """True vocabulary size, and how many columns of it are here."""
    start, padded = (0, width) if shard is None else (shard.start, shard.vocab_size)
    size = padded if head.vocab_size is None else head.vocab_size
    if size > padded:
        raise LogitlessError(f"{caller}: head.vocab_size is {size} but the logits have only {padded} columns in all.")
    return size, min(max(size - start, 0), width)


def check_targets(caller: str, rows: Rows, vocab_size: int) -> None:
    """Raise for a target outside the vocabulary, where that can be seen without a device sync."""
    if not has_values(rows.target):
        return
    if not inspectable(rows.target):
        low, high = rows.target_range or (0, 0)
        if low >= 0 and high < vocab_size:
            return
    bad = ((rows.target < 0) | (rows.target >= vocab_size)) & (rows.target != IGNORE)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise LogitlessError(
            f"{caller}: target {int(rows.target[row])} of row {row} (sample {int(rows.sample[row])}, position "
            f"{int(rows.position[row])}) is outside the vocabulary of {vocab_size}. Use -100 to leave a row out."
        )


def check_kept(caller: str, kept: Kept, rows: Rows, vocab_size: int, device: torch.device) -> None:
    if kept.lengths.numel() != len(rows):
        raise LogitlessError(f"{caller}: kept has {kept.lengths.numel()} rows but rows has {len(rows)}.")
    if kept.ids.device != device or kept.lengths.device != device:
        raise LogitlessError(f"{caller}: kept is on {kept.ids.device} but logits is on {device}.")
    if inspectable(kept.ids) and kept.ids.numel():
        low, high = int(kept.ids.min()), int(kept.ids.max())
        if low < 0 or high >= vocab_size:
            raise LogitlessError(
                f"{caller}: kept ids run from {low} to {high}, outside the vocabulary of {vocab_size}."
            )


def _check_kinds(asked: Options) -> None:
    for name, x, kind in (("head", asked.head, Head), ("kept", asked.kept, Kept)):
        if x is not None and not isinstance(x, kind):
            raise LogitlessError(f"{asked.caller}: {name} must be a {kind.__name__} or None but is {type(x).__name__}.")
    if asked.shard is not None and not hasattr(asked.shard, "vocab_size"):
        came = type(asked.shard).__name__
        raise LogitlessError(f"{asked.caller}: shard must be a VocabShard or None but is {came}.")


def _check_entropy(asked: Options) -> None:
    if asked.entropy not in (None, "value", "grad"):
        raise LogitlessError(f'{asked.caller}: entropy must be None, "value" or "grad" but is {asked.entropy!r}.')


def _check_order(caller: str, what: str, lead: list[int], rows: Rows) -> None:
    """Raise where as many tokens come in another order: the rows know lines, and the tensor has others."""
    shape = [n for n in rows.token_shape or () if n != 1]
    came = [n for n in lead if n != 1]
    if len(shape) > 1 and len(came) > 1 and came != shape:
        raise LogitlessError(
            f"{caller}: rows were made for tokens of shape {list(rows.token_shape or ())} but {what} has leading "
            f"dimensions {lead}. If they are [sequence, batch], transpose them: x.transpose(0, 1)."
        )


# Checks of logits.


def check_logits(caller: str, logits: Tensor, rows: Rows, shard: VocabShard | None) -> None:
    if not isinstance(logits, Tensor) or logits.dtype not in FLOATS:
        came = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise LogitlessError(f"{caller}: logits must be a tensor of {[str(d) for d in FLOATS]} but is {came}.")
    if logits.dim() < 1 or (logits.shape[-1] > 1 and logits.stride(-1) != 1):
        raise LogitlessError(
            f"{caller}: logits must be [..., V] with a contiguous last dimension but has shape {list(logits.shape)} "
            f"and strides {list(logits.stride())}. Pass logits.contiguous(), which copies, or avoid the transpose."
        )
    num_tokens, lead = logits.shape[:-1].numel(), list(logits.shape[:-1])
    if rows.num_tokens is not None and rows.num_tokens != num_tokens:
        raise LogitlessError(
            f"{caller}: rows were made for {rows.num_tokens} tokens ({list(rows.token_shape or ())}) but logits has "
            f"{num_tokens} rows ({lead}). If the pack is padded at its end, pass num_tokens= when making the rows."
        )
    _check_order(caller, "logits", lead, rows)
    if rows.reach > num_tokens:
        raise LogitlessError(f"{caller}: rows reach row {rows.reach - 1} but logits has {num_tokens} rows ({lead}).")
    for name, x in (("rows", rows.index), ("target", rows.target)):
        if x.device != logits.device:
            raise LogitlessError(f"{caller}: {name} is on {x.device} but logits is on {logits.device}.")
    if shard is not None and shard.stop - shard.start != logits.shape[-1]:
        raise LogitlessError(
            f"{caller}: shard holds columns {shard.start} to {shard.stop} ({shard.stop - shard.start} of them) but "
            f"logits has {logits.shape[-1]} columns."
        )


def check_overwrite(logits: Tensor) -> None:
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return
    problem, advice = None, "Pass the model's own output"
    if logits.is_leaf:
        problem = "are a leaf, whose data backward must not replace by its gradient"
    elif logits._is_view():
        problem = "are a view, so that whoever holds the base would read gradients in place of logits"
        advice = "Pass the tensor it was cut from (any [..., V] shape will do)"
    elif not logits.is_contiguous():
        problem = "are not contiguous"
    if problem:
        raise LogitlessError(
            f"logprobs: overwrite_logits=True, but the logits {problem}. {advice}, or drop the option."
        )


# Checks of hidden states and weight.


def _check_tokens(hidden: Tensor, weight: Tensor, rows: Rows, asked: Options) -> None:
    ranks = asked.shard.group.size() if asked.sequence_parallel and asked.shard is not None else 1
    num_tokens = hidden.shape[:-1].numel() * ranks
    if (rows.num_tokens is not None and rows.num_tokens != num_tokens) or rows.reach > num_tokens:
        wanted = f"at least {rows.reach}" if rows.num_tokens is None else rows.num_tokens
        raise LogitlessError(f"{asked.caller}: rows were made for {wanted} tokens but hidden holds {num_tokens}.")
    first, *more = hidden.shape[:-1] or (1,)
    _check_order(asked.caller, "hidden", [first * ranks, *more], rows)
    tensors = {"weight": weight, "rows": rows.index, "target": rows.target}
    for what, x in {**tensors, "bias": asked.bias, "weight_grad": asked.weight_grad}.items():
        if x is not None and x.device != hidden.device:
            raise LogitlessError(f"{asked.caller}: {what} is on {x.device} but hidden is on {hidden.device}.")


def _check_operands(hidden: Tensor, weight: Tensor, asked: Options) -> None:
    name, bias, weight_grad, shard = asked.caller, asked.bias, asked.weight_grad, asked.shard
    if not isinstance(hidden, Tensor) or hidden.dtype not in FLOATS or hidden.dim() < 1:
        came = f"{list(hidden.shape)} {hidden.dtype}" if isinstance(hidden, Tensor) else type(hidden).__name__
        raise LogitlessError(f"{name}: hidden must be [..., D] of {[str(d) for d in FLOATS]} but is {came}.")
    for what, x in (("weight", weight), ("bias", bias), ("weight_grad", weight_grad)):
        if not isinstance(x, Tensor) and (x is not None or what == "weight"):
            raise LogitlessError(f"{name}: {what} must be a tensor but is {type(x).__name__}.")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        hint = " Did you pass the transposed head?" if weight.dim() == 2 and weight.shape[0] == hidden.shape[-1] else ""
        raise LogitlessError(
            f"{name}: weight must be [V, {hidden.shape[-1]}] to go with hidden of size {hidden.shape[-1]} but is "
            f"{list(weight.shape)}.{hint}"
        )
    if weight.dtype != hidden.dtype:
        raise LogitlessError(
            f"{name}: weight is {weight.dtype} but hidden is {hidden.dtype}. Cast one of them, or call under autocast."
        )
    if bias is not None and (tuple(bias.shape) != (weight.shape[0],) or not bias.is_floating_point()):
        raise LogitlessError(f"{name}: bias must be [{weight.shape[0]}] floats but is {list(bias.shape)} {bias.dtype}.")
    if weight_grad is not None and (weight_grad.shape != weight.shape or weight_grad.dtype != torch.float32):
        raise LogitlessError(
            f"{name}: weight_grad must be float32 {list(weight.shape)} but is {weight_grad.dtype} "
            f"{list(weight_grad.shape)}."
        )
    if asked.kept is not None and asked.batch_invariant:
        raise LogitlessError(
            f"{name}: kept= takes tiles of all rows, and batch_invariant=True tiles of one height whatever the batch. "
            f"Drop one of them."
        )
    if asked.match not in (None, "bfloat16", "float16"):
        raise LogitlessError(f'{name}: match must be None, "bfloat16" or "float16" but is {asked.match!r}.')
    if shard is not None and shard.stop - shard.start != weight.shape[0]:
        raise LogitlessError(
            f"{name}: shard holds columns {shard.start} to {shard.stop} ({shard.stop - shard.start} of them) but "
            f"weight has {weight.shape[0]} rows."
        )


def _check_parallel(asked: Options) -> None:
    name = asked.caller
    if asked.hidden_grad not in ("reduced", "partial"):
        raise LogitlessError(f'{name}: hidden_grad must be "reduced" or "partial" but is {asked.hidden_grad!r}.')
    if asked.sequence_parallel and (asked.shard is None or asked.shard.group is None):
        raise LogitlessError(f"{name}: sequence_parallel=True needs a shard with a group to gather over.")
    if asked.sequence_parallel and asked.hidden_grad == "partial":
        raise LogitlessError(
            f"{name}: sequence_parallel=True gathers hidden here, so its gradient is summed and scattered here too. "
            f'hidden_grad="partial" is for callers that gather hidden themselves and pass it whole.'
        )
