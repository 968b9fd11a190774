"""What a call refuses, and in which words: the argument, what was wanted, what came, and what to do.

Values that live on an accelerator are not inspected, which would stall the stream; a bad one makes its own row NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless.call.lora import LoRA
from logitless.call.options import Options
from logitless.errors import ELSEWHERE, LogitlessError, adapted
from logitless.extras import LARGEST, MOST, STATS
from logitless.kept import Kept
from logitless.rows import Rows
from logitless.spec import IGNORE, Head, VocabShard, has_values, inspectable

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
    if not has_values(rows.target) or not rows.target.numel():
        return False
    seen = inspectable(rows.target)
    low, high = (int(x) for x in torch.aminmax(rows.target)) if seen else rows.target_range or (0, 0)
    if low >= 0 and high < vocab_size:
        return seen
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


def check_kinds(asked: Options) -> None:
    for name, x, kind in (("head", asked.head, Head), ("kept", asked.kept, Kept)):
        if x is not None and not isinstance(x, kind):
            hint = (
                f" A temperature is Head(temperature={x!r})." if name == "head" and isinstance(x, int | float) else ""
            )
            came = f"{type(x).__name__}.{hint}"
            raise LogitlessError(f"{asked.caller}: {name} must be a {kind.__name__} or None but is {came}")
    if asked.shard is not None and not hasattr(asked.shard, "vocab_size"):
        came = type(asked.shard).__name__
        raise LogitlessError(f"{asked.caller}: shard must be a VocabShard or None but is {came}.")


def check_entropy(asked: Options) -> None:
    if asked.entropy not in (None, "value", "grad"):
        raise LogitlessError(f'{asked.caller}: entropy must be None, "value" or "grad" but is {asked.entropy!r}.')


def check_scope(asked: Options) -> None:
    if asked.scope not in ("vocabulary", "support"):
        raise LogitlessError(f'{asked.caller}: scope must be "vocabulary" or "support" but is {asked.scope!r}.')
    if asked.scope == "support" and asked.kept is None:
        raise LogitlessError(
            f'{asked.caller}: scope="support" needs kept=, the ids that the sampler kept. Pass a logitless.Kept.'
        )
    if asked.sparse_weight_grad and asked.scope != "support":
        raise LogitlessError(
            f'{asked.caller}: sparse_weight_grad=True goes with scope="support": over the vocabulary every row of the '
            f"weight has a gradient."
        )
    if asked.sparse_weight_grad and asked.weight_grad is not None:
        raise LogitlessError(
            f"{asked.caller}: weight_grad= is a dense buffer and sparse_weight_grad=True asks for a list of rows. Pass "
            f"one of them."
        )


def check_extras(asked: Options, device: torch.device, num_rows: int, shape: tuple[int, ...], vocab_size: int) -> None:
    name, stats, top_k, ids = asked.caller, asked.stats, asked.top_k, asked.further_ids
    if isinstance(stats, str) or not set(stats) <= set(STATS):
        raise LogitlessError(f"{name}: stats must be a tuple of names out of {list(STATS)} but is {stats!r}.")
    if not stats and top_k is None and ids is None:
        return
    if asked.scope == "support":
        raise LogitlessError(
            f"{name}: stats=, top_k= and further_ids= are over the whole vocabulary, whose logits are never made with "
            f'scope="support". Ask for them with scope="vocabulary".'
        )
    if vocab_size > LARGEST:
        raise LogitlessError(f"{name}: stats=, top_k= and further_ids= take up to {LARGEST} columns, not {vocab_size}.")
    if top_k is not None and (type(top_k) is not int or not 1 <= top_k <= min(MOST, vocab_size)):
        raise LogitlessError(
            f"{name}: top_k must be between 1 and {min(MOST, vocab_size)}, which is the smaller of {MOST} and the "
            f"vocabulary, but is {top_k!r}."
        )
    if ids is None:
        return
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
        came = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise LogitlessError(f"{name}: further_ids must be an int64 tensor but is {came}.")
    if not ids.dim() or tuple(ids.shape[:-1]) not in (shape, (num_rows,)):
        raise LogitlessError(
            f"{name}: further_ids must be {[*shape, 'K']}, K ids for every row, but is {list(ids.shape)}."
        )
    if ids.device != device:
        raise LogitlessError(f"{name}: further_ids is on {ids.device} but the rows are on {device}.")
    if inspectable(ids) and bool((((ids < 0) & (ids != IGNORE)) | (ids >= vocab_size)).any()):
        raise LogitlessError(
            f"{name}: further_ids run from {int(ids.min())} to {int(ids.max())}, outside the vocabulary of "
            f"{vocab_size}. Use -100 for places that are to stay empty."
        )


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
        hint = "" if isinstance(logits, Tensor) else instead_of_tensor(logits, "logits")
        raise LogitlessError(f"{caller}: logits must be a tensor of {[str(d) for d in FLOATS]} but is {came}.{hint}")
    if logits.dim() < 1 or (logits.shape[-1] > 1 and logits.stride(-1) != 1):
        raise LogitlessError(
            f"{caller}: logits must be [..., V] with a contiguous last dimension but has shape {list(logits.shape)} "
            f"and strides {list(logits.stride())}. Pass logits.contiguous(), which copies, or avoid the transpose."
        )
    num_tokens, lead = logits.shape[:-1].numel(), list(logits.shape[:-1])
    if logits.dim() == 1 and rows.num_tokens != 1 and len(rows) != 1:
        raise LogitlessError(
            f"{caller}: logits must be [T, V], one row per token, but has shape {list(logits.shape)}, one row, and "
            f"there are {len(rows)} rows to score. Do not flatten them, or take logits.view(-1, V)."
        )
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


def check_tokens(hidden: Tensor, weight: Tensor, rows: Rows, asked: Options) -> None:
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


def instead_of_tensor(x: Any, what: str) -> str:
    """`` What to do`` where something other than a tensor came for an argument, or nothing."""
    if isinstance(x, list | tuple):
        whole = "torch.stack" if x and isinstance(x[0], Tensor) else "torch.tensor"
        return f" Pass {whole}({what})."
    if hasattr(x, "base_layer"):
        return f" {adapted(f'{type(x).__name__}')}"
    if what == "weight" and isinstance(getattr(x, "weight", None), Tensor):
        return " Pass the layer's weight and bias: layer.weight, bias=layer.bias. Under DDP or FSDP use a PolicyHead."
    if isinstance(getattr(x, "last_hidden_state", None), Tensor):
        return " Pass its last_hidden_state."
    return " Pass its logits." if isinstance(getattr(x, "logits", None), Tensor) else ""


def _check_tensors(hidden: Any, weight: Any, asked: Options) -> None:
    name = asked.caller
    if not isinstance(hidden, Tensor) or hidden.dtype not in FLOATS or hidden.dim() < 1:
        came = f"{list(hidden.shape)} {hidden.dtype}" if isinstance(hidden, Tensor) else type(hidden).__name__
        hint = "" if isinstance(hidden, Tensor) else instead_of_tensor(hidden, "hidden")
        raise LogitlessError(f"{name}: hidden must be [..., D] of {[str(d) for d in FLOATS]} but is {came}.{hint}")
    for what, x in (("weight", weight), ("bias", asked.bias), ("weight_grad", asked.weight_grad)):
        if not isinstance(x, Tensor) and (x is not None or what == "weight"):
            hint = instead_of_tensor(x, what)
            raise LogitlessError(f"{name}: {what} must be a tensor but is {type(x).__name__}.{hint}")


def check_lora(hidden: Tensor, lora: LoRA, asked: Options) -> None:
    """Raise where a LoRA does not go with hidden, or with what else is asked for."""
    name, merged = asked.caller, "Merge it into one weight, weight + scale * b @ a, and pass that"
    if name not in ("linear_logprobs", "linear_policy_loss"):
        raise LogitlessError(f"{name}: weight is a LoRA, which is not followed here. {merged}.")
    if asked.scope == "support":
        raise LogitlessError(
            f'{name}: weight is a LoRA, and scope="support" takes dot products with rows of one weight. {merged}, or '
            f'take scope="vocabulary".'
        )
    if asked.hidden_grad == "partial" or asked.sequence_parallel:
        given = "sequence_parallel=True" if asked.sequence_parallel else 'hidden_grad="partial"'
        raise LogitlessError(
            f"{name}: weight is a LoRA, and with {given} the gradient of its a would be a part on every rank. Pass "
            f'whole hidden states and hidden_grad="reduced".'
        )
    if lora.a.shape[1] != hidden.shape[-1]:
        raise LogitlessError(
            f"{name}: weight is a LoRA for hidden size {lora.a.shape[1]} but hidden has {hidden.shape[-1]}."
        )
    for what, x in (("a", lora.a), ("b", lora.b)):
        if x.device != hidden.device:
            raise LogitlessError(f"{name}: {what} of the LoRA is on {x.device} but hidden is on {hidden.device}.")
    if hasattr(lora.a, "placements"):
        raise LogitlessError(
            f"{name}: a of the LoRA is a DTensor with placements {lora.a.placements}, and must be whole on every rank. "  # pyright: ignore[reportAttributeAccessIssue]
            f"For FSDP use a PolicyHead, or call inside the forward of the module that owns it."
        )


def check_operands(hidden: Tensor, weight: Tensor, asked: Options) -> None:
    _check_tensors(hidden, weight, asked)
    name, bias, weight_grad, shard = asked.caller, asked.bias, asked.weight_grad, asked.shard
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        hint = ""
        if weight.dim() == 2 and weight.shape[0] == hidden.shape[-1]:
            hint = " Did you pass the transposed head?"
        if weight.dim() == 1 or not weight.numel():
            hint = f" {ELSEWHERE}"
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
    if asked.kept is not None and asked.scope == "vocabulary" and asked.batch_invariant:
        raise LogitlessError(
            f"{name}: kept= takes tiles of all rows, and batch_invariant=True tiles of one height whatever the batch. "
            f'Drop one of them, or take scope="support", which is always batch-invariant.'
        )
    if asked.match not in (None, "bfloat16", "float16"):
        raise LogitlessError(f'{name}: match must be None, "bfloat16" or "float16" but is {asked.match!r}.')
    if shard is not None and shard.stop - shard.start != weight.shape[0]:
        raise LogitlessError(
            f"{name}: shard holds columns {shard.start} to {shard.stop} ({shard.stop - shard.start} of them) but "
            f"weight has {weight.shape[0]} rows."
        )


def check_parallel(asked: Options) -> None:
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
