"""What a call of the linear path asks for, checked and resolved before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from logitless.backends import choose_backend
from logitless.backends.contract import accumulation_dtype
from logitless.checks import FLOATS, check_kept, check_targets, prepare_over, resolve_rows, vocabulary
from logitless.errors import LogitlessError
from logitless.kept import Kept
from logitless.rows import Rows
from logitless.spec import EntropyMode, Head, VocabShard, parse_memory


@dataclass(frozen=True, eq=False)
class Options:
    """The keyword arguments of a linear path, as the caller gave them, and the name to call it by in errors."""

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


@dataclass(frozen=True)
class Call:
    """A resolved call: everything but the tensors."""

    entropy: EntropyMode
    squash: float
    columns: int
    start: int
    vocab_size: int
    backend: str
    memory: int
    group: Any
    logits_dtype: torch.dtype
    reduce_hidden: bool
    sequence_parallel: bool
    tf32: bool
    batch_invariant: bool


@dataclass(frozen=True, eq=False)
class Prepared:
    """A checked call, and the vectors it needs."""

    call: Call
    rows: Rows
    gain: Tensor
    kept: tuple[Tensor | None, Tensor | None]
    shape: tuple[int, ...]

    def facts(self, hidden: Tensor) -> dict[str, Any]:
        """What the ranks of a vocabulary group must agree on."""
        return {
            "the number of rows": len(self.rows),
            "the dtype of hidden": str(hidden.dtype),
            "entropy": self.call.entropy,
            "whether there are kept ids": self.kept[0] is not None,
            "the vocabulary size": self.call.vocab_size,
            "hidden_grad": self.call.reduce_hidden,
            "sequence_parallel": self.call.sequence_parallel,
            "whether hidden needs a gradient": hidden.requires_grad,
        }


def prepare(hidden: Tensor, weight: Tensor, rows: Any, options: Options) -> Prepared:
    """Check everything that can be checked without asking a device, and resolve what the options mean."""
    _check_operands(hidden, weight, options)
    _check_parallel(options)
    plan, shape = resolve_rows(options.caller, rows)
    head, shard = options.head or Head(), options.shard
    _check_tokens(hidden, weight, plan, options)
    vocab_size, columns = vocabulary(options.caller, weight.shape[0], head, shard)
    check_targets(options.caller, plan, vocab_size)
    call = Call(
        entropy=options.entropy,
        squash=head.squash,
        columns=columns,
        start=0 if shard is None else shard.start,
        vocab_size=vocab_size,
        backend=choose_backend(hidden, options.backend).name,
        memory=parse_memory(options.memory),
        group=None if shard is None else shard.group,
        logits_dtype=accumulation_dtype(hidden.dtype) if options.match is None else getattr(torch, options.match),
        reduce_hidden=options.hidden_grad == "reduced",
        sequence_parallel=options.sequence_parallel,
        tf32=options.tf32,
        batch_invariant=options.batch_invariant,
    )
    gain = head.gain(len(plan), accumulation_dtype(hidden.dtype), hidden.device)
    kept = (None, None)
    if options.kept is not None:
        kept = check_kept(options.caller, options.kept, plan, vocab_size, hidden.device)
    return Prepared(call, plan, gain, kept, shape)


def prepare_together(hidden: Tensor, weight: Tensor, rows: Any, options: Options) -> Prepared:
    """:func:`prepare`, compared over the vocabulary group where the shard asks for it."""
    return prepare_over(
        options.shard,
        options.caller,
        lambda: prepare(hidden, weight, rows, options),
        lambda ready: ready.facts(hidden),
    )


def as_autocast_would(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Operands in the dtype that autocast would hand them to a linear layer in, where it is on."""
    kind = hidden.device.type if isinstance(hidden, Tensor) else "cpu"
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def local_weight(weight: Tensor, shard: VocabShard | None, caller: str) -> Tensor:
    """The rows of the weight that live here, out of a DTensor whose meaning is clear."""
    placements = getattr(weight, "placements", None)
    if placements is None:
        return weight
    mesh = weight.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    over_group = mesh.ndim == 1 and shard is not None and mesh.get_group() == shard.group
    if all(p.is_replicate() for p in placements) or (over_group and placements[0].is_shard(0)):
        return weight.to_local()  # pyright: ignore[reportAttributeAccessIssue]
    raise LogitlessError(
        f"{caller}: weight is a DTensor with placements {placements}, as tensor parallelism and FSDP both make. For "
        f"tensor parallelism pass shard=logitless.shard_of(weight); for FSDP use a PolicyHead, or call inside the "
        f"forward of the module that owns the weight, where FSDP has gathered it."
    )


def _check_tokens(hidden: Tensor, weight: Tensor, plan: Rows, options: Options) -> None:
    if options.entropy not in (None, "value", "grad"):
        raise LogitlessError(f'{options.caller}: entropy must be None, "value" or "grad" but is {options.entropy!r}.')
    ranks = options.shard.group.size() if options.sequence_parallel and options.shard is not None else 1
    num_tokens = hidden.shape[:-1].numel() * ranks
    if (plan.num_tokens is not None and plan.num_tokens != num_tokens) or plan.reach > num_tokens:
        wanted = f"at least {plan.reach}" if plan.num_tokens is None else plan.num_tokens
        raise LogitlessError(f"{options.caller}: rows were made for {wanted} tokens but hidden holds {num_tokens}.")
    tensors = {"weight": weight, "rows": plan.index, "target": plan.target}
    for what, x in {**tensors, "bias": options.bias, "weight_grad": options.weight_grad}.items():
        if x is not None and x.device != hidden.device:
            raise LogitlessError(f"{options.caller}: {what} is on {x.device} but hidden is on {hidden.device}.")


def _check_operands(hidden: Tensor, weight: Tensor, options: Options) -> None:
    name, bias, weight_grad, shard, match = (
        getattr(options, field) for field in ("caller", "bias", "weight_grad", "shard", "match")
    )
    if not isinstance(hidden, Tensor) or hidden.dtype not in FLOATS or hidden.dim() < 1:
        came = f"{list(hidden.shape)} {hidden.dtype}" if isinstance(hidden, Tensor) else type(hidden).__name__
        raise LogitlessError(f"{name}: hidden must be [..., D] of {[str(d) for d in FLOATS]} but is {came}.")
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
    if match not in (None, "bfloat16", "float16"):
        raise LogitlessError(f'{name}: match must be None, "bfloat16" or "float16" but is {match!r}.')
    if shard is not None and shard.stop - shard.start != weight.shape[0]:
        raise LogitlessError(
            f"{name}: shard holds columns {shard.start} to {shard.stop} ({shard.stop - shard.start} of them) but "
            f"weight has {weight.shape[0]} rows."
        )


def _check_parallel(options: Options) -> None:
    name = options.caller
    if options.hidden_grad not in ("reduced", "partial"):
        raise LogitlessError(f'{name}: hidden_grad must be "reduced" or "partial" but is {options.hidden_grad!r}.')
    if options.sequence_parallel and (options.shard is None or options.shard.group is None):
        raise LogitlessError(f"{name}: sequence_parallel=True needs a shard with a group to gather over.")
    if options.sequence_parallel and options.hidden_grad == "partial":
        raise LogitlessError(
            f"{name}: sequence_parallel=True gathers hidden here, so its gradient is summed and scattered here too. "
            f'hidden_grad="partial" is for callers that gather hidden themselves and pass it whole.'
        )
