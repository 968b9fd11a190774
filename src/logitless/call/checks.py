"""What a call refuses, and in which words: the argument, what was wanted, what came, and what to do.

Values that live on an accelerator are not inspected, which would stall the stream; a bad one makes its own row NaN.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from logitless.backends import blocks
from logitless.backends.divergences import KINDS, Divergence
from logitless.call.asked import PLAIN, Asked
from logitless.errors import ELSEWHERE, LogitlessError
from logitless.errors.arguments import FLOATS, check_flags, described, instead_of_tensor, is_number, refused
from logitless.operands import Kept, Linear, LoRA
from logitless.operands.stands import Precision, wider
from logitless.readings.best import MOST
from logitless.readings.reading import LARGEST
from logitless.readings.table import STATS, TEACHER_STATS
from logitless.rows import Rows
from logitless.spec import IGNORE, Head, VocabShard, has_values, inspectable


class Checked(NamedTuple):
    """What checks found out on their way.

    Attributes:
        rows, shape: the rows, and the shape that results are returned in.
        vocab_size, columns: true size of the vocabulary, and how many columns of it are here.
        found: whether all targets were seen to be in the vocabulary, and none is to be left out.
    """

    rows: Rows
    shape: tuple[int, ...]
    vocab_size: int
    columns: int
    found: bool


def check_given(caller: str, logits: Any, rows: Any, shard: Any, asked: Asked, overwrite: bool) -> Checked:
    """Everything that is refused of a call on logits that exist."""
    check_kinds(caller, asked)
    chosen, shape = resolve_rows(caller, rows)
    check_logits(caller, logits, chosen, shard)
    checked = _checked(caller, logits, logits.shape[-1], chosen, shape, shard, asked)
    if overwrite is not False:
        check_flags(caller, overwrite=overwrite)
    if overwrite and not torch.compiler.is_compiling():
        check_overwrite(caller, logits)
    return checked


def check_hidden(caller: str, operands: Any, rows: Any, linear: Linear, asked: Asked) -> Checked:
    """Everything that is refused of a call on hidden states and a head."""
    hidden, weight = operands.hidden, operands.weight
    check_kinds(caller, asked)
    check_linear(caller, operands, linear, asked)
    chosen, shape = resolve_rows(caller, rows)
    check_tokens(caller, hidden, weight, chosen, linear)
    return _checked(caller, hidden, weight.shape[0], chosen, shape, linear.shard, asked)


def _checked(
    caller: str, x: Tensor, width: int, rows: Rows, shape: tuple[int, ...], shard: Any, asked: Asked
) -> Checked:
    vocab_size, columns = vocabulary(caller, width, asked.head or PLAIN, shard)
    if asked.kept is not None:
        check_kept(caller, asked.kept, rows, vocab_size, x.device)
    if asked.stats != () or asked.top_k is not None or asked.ids is not None:
        check_readings(caller, asked, x.device, rows.index.numel(), shape, vocab_size)
    return Checked(rows, shape, vocab_size, columns, check_targets(caller, rows, vocab_size))


# Checks that all paths share.


def vocabulary(caller: str, width: int, head: Head, shard: VocabShard | None) -> tuple[int, int]:
    """True vocabulary size, and how many columns of it are here."""
    start, padded = (0, width) if shard is None else (shard.start, shard.vocab_size)
    size = padded if head.vocab_size is None else head.vocab_size
    if size > padded:
        raise LogitlessError(f"{caller}: head.vocab_size is {size} but the logits have only {padded} columns in all.")
    return size, min(max(size - start, 0), width)


def check_targets(caller: str, rows: Rows, vocab_size: int) -> bool:
    """Raise for a target outside the vocabulary, where that can be seen without a device sync. Whether all were seen to
    be inside, and none is to be left out."""
    if not rows.target.numel() or not has_values(rows.target):
        return False
    if rows.target.device.type == "cpu":
        low, high = torch.aminmax(rows.target)
        seen = (int(low), int(high))
    else:
        seen = rows.known_range
    low, high = seen or rows.target_range or (0, 0)
    if low >= 0 and high < vocab_size:
        return seen is not None
    bad = ((rows.target < 0) | (rows.target >= vocab_size)) & (rows.target != IGNORE)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise LogitlessError(
            f"{caller}: target {int(rows.target[row])} of row {row} (sample {int(rows.sample[row])}, position "
            f"{int(rows.position[row])}) is outside the vocabulary of {vocab_size}. Use -100 to leave a row out."
        )
    return False


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


def check_kinds(caller: str, asked: Asked) -> None:
    """Raise for an option of another kind than it should be."""
    for name, x, kind in (("head", asked.head, Head), ("kept", asked.kept, Kept)):
        if x is not None and not isinstance(x, kind):
            hint = ""
            if name == "head" and isinstance(x, int | float):
                hint = f" A temperature is Head(temperature={x!r})."
            elif name == "kept":
                hint = " Kept.from_engine, from_lists and their kin make one."
            came = f"{type(x).__name__}.{hint}"
            raise LogitlessError(f"{caller}: {name} must be a {kind.__name__} or None but is {came}")
    if asked.entropy is not None and not (isinstance(asked.entropy, str) and asked.entropy in ("value", "grad")):
        raise LogitlessError(f'{caller}: entropy must be None, "value" or "grad" but is {described(asked.entropy)}.')
    if not isinstance(asked.divergence, Divergence | str):
        raise refused(f"{caller}: divergence", f"a Divergence, or one of {', '.join(KINDS)},", asked.divergence)
    if asked.teacher is None and asked.divergence != "reverse_kl":
        Divergence.of(asked.divergence)


def check_readings(
    caller: str, asked: Asked, device: torch.device, num_rows: int, shape: tuple[int, ...], vocab_size: int
) -> None:
    """Raise for readings beyond the softmax that cannot be had."""
    stats, top_k, ids = asked.stats, asked.top_k, asked.ids
    sent = getattr(asked.teacher, "top_k", None) is not None
    known = STATS if asked.teacher is None or sent or asked.kept is not None else (*STATS, *TEACHER_STATS)
    if not isinstance(stats, tuple | list) or not all(isinstance(x, str) and x in known for x in stats):
        taught = isinstance(stats, tuple | list) and any(x in TEACHER_STATS for x in stats)
        hint = " Those of a teacher need its logits, over its whole vocabulary." if taught else ""
        raise LogitlessError(f"{caller}: stats must be a tuple of names out of {list(known)} but is {stats!r}.{hint}")
    if not stats and top_k is None and ids is None:
        return
    if asked.kept is not None and asked.kept.scope == "support":
        raise LogitlessError(
            f"{caller}: stats=, top_k= and ids= are over the whole vocabulary, whose logits are never made where the "
            f'scope is the support. Ask for them with Kept(..., scope="vocabulary").'
        )
    if vocab_size > LARGEST:
        raise LogitlessError(f"{caller}: stats=, top_k= and ids= take up to {LARGEST} columns, not {vocab_size}.")
    if top_k is not None and (type(top_k) is not int or not 1 <= top_k <= min(MOST, vocab_size)):
        raise LogitlessError(
            f"{caller}: top_k must be between 1 and {min(MOST, vocab_size)}, which is the smaller of {MOST} and the "
            f"vocabulary, but is {top_k!r}."
        )
    if ids is None:
        return
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
        came = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise LogitlessError(f"{caller}: ids must be an int64 tensor but is {came}.")
    if not ids.dim() or tuple(ids.shape[:-1]) not in (shape, (num_rows,)):
        raise LogitlessError(f"{caller}: ids must be {[*shape, 'K']}, K ids for every row, but is {list(ids.shape)}.")
    if ids.device != device:
        raise LogitlessError(f"{caller}: ids is on {ids.device} but the rows are on {device}.")
    if inspectable(ids) and bool((((ids < 0) & (ids != IGNORE)) | (ids >= vocab_size)).any()):
        raise LogitlessError(
            f"{caller}: ids run from {int(ids.min())} to {int(ids.max())}, outside the vocabulary of "
            f"{vocab_size}. Use -100 for places that are to stay empty."
        )


def resolve_rows(caller: str, rows: Any) -> tuple[Rows, tuple[int, ...]]:
    """The rows, and the shape that results are returned in."""
    if isinstance(rows, Rows):
        return rows, (rows.index.numel(),)
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


def local_part(
    caller: str, name: str, x: Any, shard: VocabShard | None, *, sharded: bool = True, last: bool = False
) -> Any:
    """What lives here of an argument that is a DTensor whose meaning is clear.

    Args:
        sharded: whether it may be sharded over the group of the shard, along its first dimension, or its last.
    """
    mesh, placements, group = x.device_mesh, x.placements, getattr(shard, "group", None)
    over_group = mesh.ndim == 1 and group is not None and mesh.get_group() == group
    dim = x.dim() - 1 if last else 0
    if all(p.is_replicate() for p in placements) or (over_group and sharded and placements[0].is_shard(dim)):
        return x.to_local()
    came = f"{caller}: {name} is a DTensor with placements {placements}"
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
        f"shard=logitless.VocabShard.of(weight); for FSDP use a PolicyHead, or call inside the forward of the module "
        f"that owns the weight, where FSDP has gathered it."
    )


def _check_order(caller: str, what: str, lead: list[int], rows: Rows) -> None:
    """Raise for as many tokens as the rows were made for in another order: ``[S, N]`` in place of ``[N, S]``."""
    if rows.token_shape is None or len(rows.token_shape) == 1 or len(lead) == 1:
        return
    shape = [n for n in rows.token_shape if n != 1]
    came = [n for n in lead if n != 1]
    if len(shape) > 1 and len(came) > 1 and came != shape:
        raise LogitlessError(
            f"{caller}: rows were made for tokens of shape {list(rows.token_shape)} but {what} has leading "
            f"dimensions {lead}. If they are [sequence, batch], transpose them: x.transpose(0, 1)."
        )


def _off_by_one(rows: Rows, lead: list[int]) -> str:
    """What to do where ids and their logits were passed without a shift; nothing where the lengths differ by more."""
    if not rows.token_shape or len(rows.token_shape) != len(lead):
        return ""
    *before, made_for = rows.token_shape
    *others, came = lead
    if before != others or abs(made_for - came) != 1:
        return ""
    return " Row t predicts token t + 1: ids[..., 1:] go with logits[..., :-1, :]."


# Checks of logits.


def check_logits(caller: str, logits: Tensor, rows: Rows, shard: VocabShard | None) -> None:
    """Raise for logits that are no matrix of floats, or of other tokens than the rows'."""
    if shard is not None and not hasattr(shard, "vocab_size"):
        raise LogitlessError(f"{caller}: shard must be a VocabShard or None but is {type(shard).__name__}.")
    if not isinstance(logits, Tensor) or logits.dtype not in FLOATS or logits.layout != torch.strided:
        hint = "" if isinstance(logits, Tensor) else instead_of_tensor(logits, "logits")
        raise refused(f"{caller}: logits", f"a tensor of {[str(d) for d in FLOATS]}", logits, hint)
    if logits.dim() < 1 or (logits.shape[-1] > 1 and logits.stride(-1) != 1):
        raise LogitlessError(
            f"{caller}: logits must be [..., V] with a contiguous last dimension but has shape {list(logits.shape)} "
            f"and strides {list(logits.stride())}. Pass logits.contiguous(), which copies, or avoid the transpose."
        )
    num_tokens, lead = logits.shape[:-1].numel(), list(logits.shape[:-1])
    made_for = None if rows.token_shape is None else math.prod(rows.token_shape)
    if logits.dim() == 1 and made_for != 1 and len(rows) != 1:
        raise LogitlessError(
            f"{caller}: logits must be [T, V], one row per token, but has shape {list(logits.shape)}, one row, and "
            f"there are {len(rows)} rows to score. Do not flatten them, or take logits.view(-1, V)."
        )
    if made_for is not None and made_for != num_tokens:
        raise LogitlessError(
            f"{caller}: rows were made for {made_for} tokens ({list(rows.token_shape or ())}) but logits has "
            f"{num_tokens} rows ({lead}). If the pack is padded at its end, pass num_tokens= when making the rows."
            f"{_off_by_one(rows, lead)}"
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


def check_overwrite(caller: str, logits: Tensor) -> None:
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
        raise LogitlessError(f"{caller}: overwrite=True, but the logits {problem}. {advice}, or drop the option.")


# Checks of hidden states and weight.


def check_tokens(caller: str, hidden: Tensor, weight: Tensor, rows: Rows, linear: Linear) -> None:
    """Raise for rows of other tokens than the hidden states', or for tensors on another device."""
    ranks = linear.shard.group.size() if linear.sequence_parallel and linear.shard is not None else 1
    num_tokens = hidden.shape[:-1].numel() * ranks
    made_for = None if rows.token_shape is None else math.prod(rows.token_shape)
    if (made_for is not None and made_for != num_tokens) or rows.reach > num_tokens:
        wanted = f"at least {rows.reach}" if made_for is None else made_for
        hint = _off_by_one(rows, list(hidden.shape[:-1])) if ranks == 1 else ""
        raise LogitlessError(f"{caller}: rows were made for {wanted} tokens but hidden holds {num_tokens}.{hint}")
    first, *more = hidden.shape[:-1] or (1,)
    _check_order(caller, "hidden", [first * ranks, *more], rows)
    tensors = {"weight": weight, "rows": rows.index, "target": rows.target}
    for what, x in {**tensors, "bias": linear.bias, "weight_grad": linear.weight_grad}.items():
        if x is not None and x.device != hidden.device:
            raise LogitlessError(f"{caller}: {what} is on {x.device} but hidden is on {hidden.device}.")


def check_lora(caller: str, hidden: Tensor, lora: LoRA, linear: Linear) -> None:
    """Raise where a LoRA does not go with hidden, or with the options of the head."""
    if linear.hidden_grad == "partial" or linear.sequence_parallel:
        given = "sequence_parallel=True" if linear.sequence_parallel else 'hidden_grad="partial"'
        raise LogitlessError(
            f"{caller}: weight is a LoRA, and with {given} the gradient of its a would be a part on every rank. Pass "
            f'whole hidden states and hidden_grad="reduced".'
        )
    if lora.a.shape[1] != hidden.shape[-1]:
        raise LogitlessError(
            f"{caller}: weight is a LoRA for hidden size {lora.a.shape[1]} but hidden has {hidden.shape[-1]}."
        )
    for what, x in (("a", lora.a), ("b", lora.b)):
        if x.device != hidden.device:
            raise LogitlessError(f"{caller}: {what} of the LoRA is on {x.device} but hidden is on {hidden.device}.")
    placements = getattr(lora.a, "placements", None)
    if placements is not None:
        raise LogitlessError(
            f"{caller}: a of the LoRA is a DTensor with placements {placements}, and must be whole on every rank. "
            f"For FSDP use a PolicyHead, or call inside the forward of the module that owns it."
        )


def check_linear(caller: str, operands: Any, linear: Linear, asked: Asked) -> None:
    """Raise for hidden states, a weight, a bias and options that do not go together."""
    hidden, weight, bias, shard = operands.hidden, operands.weight, operands.bias, linear.shard
    if hidden.dtype not in FLOATS or hidden.dim() < 1:
        raise refused(f"{caller}: hidden", f"[..., D] of {[str(d) for d in FLOATS]}", hidden)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        hint = ""
        if weight.dim() == 2 and weight.shape[0] == hidden.shape[-1]:
            hint = " Did you pass the transposed head?"
        if weight.dim() == 1 or not weight.numel():
            hint = f" {ELSEWHERE}"
        raise LogitlessError(
            f"{caller}: weight must be [V, {hidden.shape[-1]}] to go with hidden of size {hidden.shape[-1]} but is "
            f"{list(weight.shape)}.{hint}"
        )
    if not weight.shape[1]:
        raise LogitlessError(f"{caller}: hidden and weight have hidden size 0, so that there is nothing to multiply.")
    if weight.dtype != hidden.dtype and not (wider(hidden, weight) and operands.b is None):
        raise LogitlessError(
            f"{caller}: weight is {weight.dtype} but hidden is {hidden.dtype}. Cast one of them, or call under "
            f"autocast. Only a float32 weight without a LoRA goes with bfloat16 and float16 hidden states."
        )
    if linear.precision == "bfloat16x3" and operands.b is not None:
        raise LogitlessError(
            f'{caller}: precision="bfloat16x3" goes with a head without a LoRA, whose product is added to logits. '
            f'Merge the LoRA into the weight, or take precision="tf32".'
        )
    if bias is not None and (tuple(bias.shape) != (weight.shape[0],) or not bias.is_floating_point()):
        raise LogitlessError(
            f"{caller}: bias must be [{weight.shape[0]}] floats but is {list(bias.shape)} {bias.dtype}."
        )
    buffer = linear.weight_grad
    if buffer is not None and not hasattr(buffer, "placements"):
        if buffer.shape != weight.shape or buffer.dtype != torch.float32:
            raise LogitlessError(
                f"{caller}: weight_grad must be float32 {list(weight.shape)} but is {buffer.dtype} "
                f"{list(buffer.shape)}."
            )
    _check_options(caller, linear, asked)
    if shard is not None and not hasattr(shard, "vocab_size"):
        raise LogitlessError(f"{caller}: shard must be a VocabShard or None but is {type(shard).__name__}.")
    if shard is not None and shard.stop - shard.start != weight.shape[0]:
        raise LogitlessError(
            f"{caller}: shard holds columns {shard.start} to {shard.stop} ({shard.stop - shard.start} of them) but "
            f"weight has {weight.shape[0]} rows."
        )


def split_factor(caller: str, what: str, instead: str) -> LogitlessError:
    """The error of logits with one factor per row under sequence parallelism."""
    return LogitlessError(
        f"{caller}: {what} one factor for each of this rank's rows, and with sequence_parallel=True rows of all ranks "
        f"are scored. Pass the Logits before the factor, and {instead} with one value for each scored row: 1 / factor."
    )


def check_bits(call: Any) -> None:
    """Raise for a call whose sums cannot be order-free as it asks for.

    Args:
        call: with its ``bits``.
    """
    caller, kept = call.caller, call.kept
    if not isinstance(call.bits, str) or call.bits not in ("fast", "canonical"):
        raise refused(f"{caller}: bits", '"fast" or "canonical"', call.bits)
    if call.bits == "fast":
        return
    # Bounds of all ranks, so that all refuse and none waits for another.
    within = [start for start, _ in (call.shard.bounds if call.shard is not None else ()) if start % blocks.BLOCK]
    if within:
        raise LogitlessError(
            f'{caller}: bits="canonical" adds up columns in blocks of {blocks.BLOCK}, and a shard begins at column '
            f"{within[0]}, within one. Pad the vocabulary so that shards begin at multiples of {blocks.BLOCK}."
        )
    if call.vocab_size > blocks.LARGEST:
        raise LogitlessError(
            f'{caller}: bits="canonical" has room for sums of {blocks.LARGEST} columns, and there are '
            f'{call.vocab_size}. Take bits="fast".'
        )
    if kept is not None and not call.over_support:
        raise LogitlessError(
            f'{caller}: kept= adds up the ids of each row as they are listed, and bits="canonical" columns in blocks. '
            f'Drop one of them, or take Kept(..., scope="support"), which is batch-invariant.'
        )
    if not hasattr(call.backend, "solved") and call.backend is not None:
        raise LogitlessError(
            f'{caller}: bits="canonical" needs a backend with order-free sums, and {call.backend_name!r} has no '
            f'"solved". Take backend="auto".'
        )


FLAGS = ("sequence_parallel", "sparse_weight_grad", "tf32", "strict")
"""Options of a head that are True or False."""


def check_product(caller: str, linear: Linear) -> None:
    """Raise for an option that says wrongly how a head is multiplied and rounded: the student's, or a teacher's."""
    for name in FLAGS:
        if not isinstance(getattr(linear, name), bool):
            check_flags(caller, **{name: getattr(linear, name)})
    if linear.match is not None and not (isinstance(linear.match, str) and linear.match in ("bfloat16", "float16")):
        raise LogitlessError(f'{caller}: match must be None, "bfloat16" or "float16" but is {described(linear.match)}.')
    if not isinstance(linear.precision, str) or linear.precision not in get_args(Precision):
        wanted = " or ".join(f'"{name}"' for name in get_args(Precision))
        raise refused(f"{caller}: precision", wanted, linear.precision)
    if linear.tf32 and linear.precision != "float32":
        raise LogitlessError(f'{caller}: tf32=True asks for precision="tf32", and precision is {linear.precision!r}.')


def _check_options(caller: str, linear: Linear, asked: Asked) -> None:
    check_product(caller, linear)
    scale = linear.grad_scale
    plain = type(scale) is float and math.isfinite(scale)
    if not plain and not (
        is_number(scale) or (isinstance(scale, Tensor) and scale.dim() == 0 and not scale.is_complex())
    ):
        raise refused(f"{caller}: grad_scale", "a number or a 0-dim tensor", scale)
    support = asked.kept is not None and asked.kept.scope == "support"
    if linear.sparse_weight_grad and not support:
        raise LogitlessError(
            f'{caller}: sparse_weight_grad=True goes with kept ids whose scope is "support": over the vocabulary every '
            f"row of the weight has a gradient."
        )
    if linear.sparse_weight_grad and linear.weight_grad is not None:
        raise LogitlessError(
            f"{caller}: weight_grad= is a dense buffer and sparse_weight_grad=True asks for a list. Pass one of them."
        )
    if not isinstance(linear.hidden_grad, str) or linear.hidden_grad not in ("reduced", "partial"):
        raise LogitlessError(
            f'{caller}: hidden_grad must be "reduced" or "partial" but is {described(linear.hidden_grad)}.'
        )
    if linear.sequence_parallel and (linear.shard is None or linear.shard.group is None):
        raise LogitlessError(f"{caller}: sequence_parallel=True needs a shard with a group to gather over.")
    if linear.sequence_parallel and linear.hidden_grad == "partial":
        raise LogitlessError(
            f"{caller}: sequence_parallel=True gathers hidden here, so its gradient is summed and scattered here too. "
            f'hidden_grad="partial" is for callers that gather hidden themselves and pass it whole.'
        )
