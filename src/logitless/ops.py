"""``logprobs``: per-token log-probability, entropy and log Z from logits, with no second ``[T, V]`` tensor.

    check and resolve the call  ->  statistics kernel  ->  one all_gather if sharded  ->  merge  ->  results
    backward:  three coefficients per row from the upstream gradients  ->  gradient kernel, into one buffer

The autograd Function at the end is a seam: what it computes is in ``softmax``, ``kept`` and ``backends``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from logitless.backends import choose_backend, run_gradient, run_statistics
from logitless.backends.contract import Problem, accumulation_dtype
from logitless.collectives import gather_over, require_agreement
from logitless.errors import LogitlessError
from logitless.kept import Kept, KeptLogits, kept_gradient, kept_logits, kept_statistics
from logitless.rows import Rows
from logitless.softmax import ELSEWHERE, SKIP, Coefficients, Normaliser, coefficients, entropy, merge, normaliser
from logitless.spec import IGNORE, EntropyMode, Head, TokenStats, VocabShard, parse_memory

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def logprobs(
    logits: Tensor,
    rows: Rows | Tensor | tuple[Tensor, Tensor],
    *,
    entropy: EntropyMode = None,
    head: Head | None = None,
    shard: VocabShard | None = None,
    kept: Kept | None = None,
    overwrite_logits: bool = False,
    backend: str = "auto",
    memory: int | str = "32MiB",
) -> TokenStats:
    """Log-probability, entropy and log Z of chosen tokens, without a second full-vocabulary tensor.

    Same as ``log_softmax(logits[rows.index].float() / temperature)`` at ``rows.target``, and its entropy.

    Args:
        logits: ``[..., V]`` float32, bfloat16, float16 or float64; the last dimension contiguous. Leading dimensions
            may be strided (``model_output[:, :-1]`` is not copied). Under a shard, V is the shard's part.
        rows: a :class:`Rows`; or targets of shape ``[...]``, one per row of the logits; or ``(index, target)``.
            Target ``-100`` leaves a row out. A target outside the vocabulary raises if it can be seen without asking
            the device, and makes its own row NaN otherwise.
        entropy: None; ``"value"`` for values with no graph; ``"grad"`` for values with one. Log-probs are the same
            bits for all three.
        head: temperature, scale, softcap and true vocabulary size; default ``Head()``.
        shard: which columns live here, and the group that holds the rest. One ``all_gather`` in forward, nothing in
            backward: every rank of the group must go on to compute the same loss.
        kept: ids the sampler kept; the log-prob is normalised over them.
        overwrite_logits: write the gradient over the logits in backward instead of into a new buffer. The logits
            must be neither a leaf nor a view, and are lost after backward.
        backend: ``"auto"``, ``"reference"``, ``"tiled"`` or ``"triton"``; see :func:`choose_backend`.
        memory: bound on the working space of the tiled backend, in bytes or as ``"32MiB"``.

    Returns:
        :class:`TokenStats` of ``[R]`` tensors (shape ``[...]`` if targets were given), float32, or float64 for
        float64 logits.

    The gradient has the dtype of the logits. A half-precision *leaf* whose ``grad_dtype`` was set to float32 gets it in
    float32; for any other tensor autograd itself would round it back.

    Raises:
        LogitlessError: an argument cannot be honoured; the text says which and why.

    >>> out = logprobs(torch.zeros(2, 4), torch.tensor([1, -100]), entropy="value")
    >>> out.logprob
    tensor([-1.3863,  0.0000])
    """
    plan, result_shape = _resolve_rows(rows)
    head = Head() if head is None else head
    if entropy not in (None, "value", "grad"):
        raise LogitlessError(f'logprobs: entropy must be None, "value" or "grad" but is {entropy!r}.')
    _check_logits(logits, plan, shard)
    vocab_size, columns = _vocabulary(logits, head, shard)
    if not torch.compiler.is_compiling():
        _check_targets(plan, vocab_size)
        if overwrite_logits:
            _check_overwrite(logits)
    start = 0 if shard is None else shard.start
    call = _Call(
        entropy=entropy,
        squash=head.squash,
        columns=columns,
        start=start,
        vocab_size=vocab_size,
        overwrite=overwrite_logits,
        backend=choose_backend(logits, backend).name,
        memory=parse_memory(memory),
        group=None if shard is None else shard.group,
    )
    if shard is not None and shard.group is not None and shard.check_calls:
        require_agreement(shard.group, "logprobs", _facts(logits, plan, call, kept))
    gain = head.gain(len(plan), accumulation_dtype(logits.dtype), logits.device)
    kept_ids = None if kept is None else _check_kept(kept, plan, vocab_size, logits.device)
    apply = _LogProbs.apply if call.group is None and not overwrite_logits else _apply_outside_of_compile
    values = apply(logits, plan.index, plan.target, gain, *(kept_ids or (None, None)), call)
    logprob, entropy_value, log_z = (None if x is None else x.reshape(result_shape) for x in values)
    return TokenStats(logprob, entropy_value, log_z)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class _Call:
    """A resolved call: everything but the tensors."""

    entropy: EntropyMode
    squash: float
    columns: int
    start: int
    vocab_size: int
    overwrite: bool
    backend: str
    memory: int
    group: Any


class _LogProbs(torch.autograd.Function):
    """The seam to autograd: plain functions of this module and below do the work."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        index: Tensor,
        target: Tensor,
        gain: Tensor,
        kept_ids: Tensor | None,
        kept_lengths: Tensor | None,
        call: _Call,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        problem = _problem(logits, index, target, gain, call)
        stats = run_statistics(call.backend, problem)
        gathered = _gather_kept(kept_ids, kept_lengths, target, problem, call)
        stats, kept_stats = _whole_vocabulary(stats, gathered, call.group)
        norm = normaliser(stats)
        kept_norm = norm if kept_stats is None else normaliser(kept_stats)
        left_out = target == IGNORE
        logprob = ((stats[3] - kept_norm.reference) - kept_norm.log_sum).masked_fill(left_out, 0.0)
        entropy_value = None if call.entropy is None else entropy(stats, norm).masked_fill(left_out, 0.0)
        log_z = (norm.reference + norm.log_sum).masked_fill(left_out, 0.0)
        ctx.set_materialize_grads(False)
        if call.entropy == "value":
            ctx.mark_non_differentiable(entropy_value)
        kept_saved = () if kept_ids is None else (kept_ids, kept_lengths, *kept_norm)
        entropy_saved = (entropy_value,) if call.entropy == "grad" else ()
        ctx.save_for_backward(logits, index, target, gain, *norm, logprob, *kept_saved, *entropy_saved)
        ctx.call, ctx.has_kept, ctx.spent = call, kept_ids is not None, False
        # A leaf may ask for its gradient in another dtype; for anything else autograd keeps the tensor's own.
        ctx.grad_dtype = (getattr(logits, "grad_dtype", None) if logits.is_leaf else None) or logits.dtype
        return logprob, entropy_value, log_z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_logprob: Tensor | None, g_entropy: Tensor | None, g_log_z: Tensor | None) -> Any:
        call: _Call = ctx.call
        if ctx.spent:
            raise LogitlessError(
                "logprobs: second backward through a call with overwrite_logits=True, but the first one has replaced the "
                "logits by their gradient. Use overwrite_logits=False to keep the graph, or run forward again."
            )
        logits, index, target, gain, reference, log_sum, logprob, *more = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return (None,) * 7
        norm = Normaliser(reference, log_sum)
        kept_ids, kept_lengths, kept_norm = None, None, None
        if ctx.has_kept:
            kept_ids, kept_lengths, kept_norm, more = more[0], more[1], Normaliser(*more[2:4]), more[4:]
        entropy_value = more[0] if more else None
        problem = _problem(logits, index, target, gain, call)
        out, out_index = _gradient_buffer(logits, index, problem, ctx.grad_dtype, call.overwrite)
        g_logprob = torch.zeros_like(logprob) if g_logprob is None else g_logprob.contiguous()
        if kept_norm is None:
            coef = coefficients(logprob, entropy_value, g_logprob, g_entropy, g_log_z)
            run_gradient(call.backend, problem, norm, coef, out, out_index)
        else:
            gathered = _gather_kept(kept_ids, kept_lengths, target, problem, call)
            assert gathered is not None
            none = torch.zeros_like(g_logprob)
            coef = coefficients(logprob, entropy_value, none, g_entropy, g_log_z)
            dense = coef if g_entropy is not None or g_log_z is not None else None
            values = kept_gradient(gathered, kept_norm, logprob, g_logprob, norm, dense)
            _dense_then_kept(call, problem, norm, dense, gathered, values, target, out, out_index)
        if call.overwrite:
            ctx.spent = True
            return (logits.detach(), *(None,) * 6)
        return (out.view(logits.shape), *(None,) * 6)


@torch.compiler.disable
def _apply_outside_of_compile(*args: Any) -> Any:
    """A graph break: collectives and the bookkeeping of overwriting are not traced."""
    return _LogProbs.apply(*args)


def _problem(logits: Tensor, index: Tensor, target: Tensor, gain: Tensor, call: _Call) -> Problem:
    matrix, index = _as_matrix(logits, index)
    column = target - call.start
    inside = (column >= 0) & (column < call.columns)
    column = torch.where(inside, column, ELSEWHERE).masked_fill(target == IGNORE, SKIP)
    entropy_wanted = call.entropy is not None
    return Problem(matrix, index, column, gain, call.squash, call.columns, entropy_wanted, call.memory)


def _as_matrix(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """``[T, V]`` view of ``[..., V]`` logits, and the index into it. Never a copy.

    Leading dimensions that do not collapse, as in ``x[:, :-1]``, become rows with gaps between them: the view spans the
    gaps and the index steps over them.
    """
    lead, width = logits.shape[:-1], logits.shape[-1]
    if logits.is_contiguous():
        return logits.view(-1, width), index
    strides = logits.stride()[:-1]
    long = [n for n, size in zip(strides, lead, strict=True) if size > 1]
    row_stride = min((n for n in long if n > 0), default=max(width, 1))
    if any(n % row_stride for n in long):
        raise LogitlessError(
            f"logprobs: logits of shape {list(logits.shape)} have strides {list(logits.stride())}, which are not whole "
            f"steps of one row. Pass logits.contiguous() (a copy), or the tensor this view was cut from."
        )
    row, rest = torch.zeros_like(index), index
    for size, stride in zip(reversed(lead), reversed(strides), strict=True):
        row, rest = row + rest % size * (stride // row_stride), rest // size
    last = sum((size - 1) * (stride // row_stride) for size, stride in zip(lead, strides, strict=True) if size > 1)
    return logits.as_strided((last + 1 if logits.numel() else 0, width), (row_stride, 1)), row


def _gather_kept(
    ids: Tensor | None, lengths: Tensor | None, target: Tensor, problem: Problem, call: _Call
) -> KeptLogits | None:
    if ids is None or lengths is None:
        return None
    return kept_logits(Kept(ids, lengths), target, problem, call.start, call.vocab_size)


def _whole_vocabulary(stats: Tensor, gathered: KeptLogits | None, group: Any) -> tuple[Tensor, Tensor | None]:
    """Statistics over all shards, and those of the kept ids: one ``all_gather`` for both, or none if unsharded."""
    kept_part = None if gathered is None else kept_statistics(gathered)
    if group is not None:
        parts = gather_over(group, stats if kept_part is None else torch.cat([stats, kept_part]))
        stats = merge(parts[:, :4])
        kept_part = None if kept_part is None else parts[:, 4:]
    elif kept_part is not None:
        kept_part = kept_part[None]
    if kept_part is None:
        return stats, None
    m, s = kept_part.unbind(1)
    return stats, merge(torch.stack([m, s, torch.zeros_like(s), stats[3].expand_as(s)], dim=1))


def _gradient_buffer(
    logits: Tensor, index: Tensor, problem: Problem, dtype: torch.dtype, overwrite: bool
) -> tuple[Tensor, Tensor]:
    """The matrix that receives the gradient, and the rows of it that correspond to the problem's rows."""
    if overwrite:
        return problem.logits, problem.index
    return torch.empty(logits.shape, dtype=dtype, device=logits.device).view(-1, logits.shape[-1]), index


def _dense_then_kept(
    call: _Call,
    problem: Problem,
    norm: Normaliser,
    dense: Coefficients | None,
    gathered: KeptLogits,
    values: Tensor,
    target: Tensor,
    out: Tensor,
    out_index: Tensor,
) -> None:
    """Gradient of entropy and log Z everywhere, then the finished values at the kept ids, each written once."""
    if dense is None:
        out.zero_()
    else:
        no_target = problem.column.clamp_max(ELSEWHERE)
        run_gradient(call.backend, replace(problem, column=no_target), norm, dense, out, out_index)
    if not problem.columns or not target.numel():
        return
    values = values.masked_fill((target == IGNORE)[gathered.row], 0.0).to(out.dtype)
    # Ids that live on another shard must not write. Without asking the device how many there are, each of them repeats
    # the write of an id of its row that lives here, or, where there is none, puts back what column 0 holds.
    place = torch.arange(len(values), device=values.device)
    here = torch.full_like(target, -1).scatter_reduce(
        0, gathered.row, torch.where(gathered.here, place, -1), "amax"
    )[gathered.row]
    place = torch.where(gathered.here, place, here.clamp_min(0))
    column = torch.where(here < 0, 0, gathered.column[place])
    row = out_index[gathered.row]
    out[row, column] = torch.where(here < 0, out[row, 0], values[place])


def _resolve_rows(rows: Any) -> tuple[Rows, tuple[int, ...]]:
    """The plan, and the shape results are returned in."""
    if isinstance(rows, Rows):
        return rows, (len(rows),)
    if isinstance(rows, Tensor):
        return Rows.every(rows), tuple(rows.shape)
    if isinstance(rows, tuple) and len(rows) == 2:
        plan = Rows.at(*rows)
        return plan, (len(plan),)
    raise LogitlessError(
        f"logprobs: rows must be a Rows, a tensor of targets or a pair (index, target) but is {type(rows).__name__}."
    )


def _check_logits(logits: Tensor, rows: Rows, shard: VocabShard | None) -> None:
    if not isinstance(logits, Tensor) or logits.dtype not in FLOATS:
        came = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise LogitlessError(f"logprobs: logits must be a tensor of {[str(d) for d in FLOATS]} but is {came}.")
    if logits.dim() < 1 or (logits.shape[-1] > 1 and logits.stride(-1) != 1):
        raise LogitlessError(
            f"logprobs: logits must be [..., V] with a contiguous last dimension but has shape {list(logits.shape)} and "
            f"strides {list(logits.stride())}. Pass logits.contiguous(), which copies, or avoid the transpose."
        )
    num_tokens, lead = logits.shape[:-1].numel(), list(logits.shape[:-1])
    if rows.num_tokens is not None and rows.num_tokens != num_tokens:
        raise LogitlessError(
            f"logprobs: rows were made for {rows.num_tokens} tokens ({list(rows.token_shape or ())}) but logits has "
            f"{num_tokens} rows ({lead}). If the pack is padded at its end, pass num_tokens= when making the rows."
        )
    for name, x in (("rows", rows.index), ("target", rows.target)):
        if x.device != logits.device:
            raise LogitlessError(f"logprobs: {name} is on {x.device} but logits is on {logits.device}.")
    if shard is not None and shard.stop - shard.start != logits.shape[-1]:
        raise LogitlessError(
            f"logprobs: shard holds columns {shard.start} to {shard.stop} ({shard.stop - shard.start} of them) but logits "
            f"has {logits.shape[-1]} columns."
        )


def _vocabulary(logits: Tensor, head: Head, shard: VocabShard | None) -> tuple[int, int]:
    """True vocabulary size, and how many columns of it are here."""
    start, padded = (0, logits.shape[-1]) if shard is None else (shard.start, shard.vocab_size)
    size = padded if head.vocab_size is None else head.vocab_size
    if size > padded:
        raise LogitlessError(f"logprobs: head.vocab_size is {size} but the logits have only {padded} columns in all.")
    return size, min(max(size - start, 0), logits.shape[-1])


def _check_targets(rows: Rows, vocab_size: int) -> None:
    """Raise for a target outside the vocabulary, where that can be seen without a device sync."""
    if rows.target.device.type != "cpu":
        low, high = rows.target_range or (0, 0)
        if low >= 0 and high < vocab_size:
            return
    bad = ((rows.target < 0) | (rows.target >= vocab_size)) & (rows.target != IGNORE)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise LogitlessError(
            f"logprobs: target {int(rows.target[row])} of row {row} (sample {int(rows.sample[row])}, position "
            f"{int(rows.position[row])}) is outside the vocabulary of {vocab_size}. Use -100 to leave a row out."
        )


def _check_overwrite(logits: Tensor) -> None:
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
        raise LogitlessError(f"logprobs: overwrite_logits=True, but the logits {problem}. {advice}, or drop the option.")


def _check_kept(kept: Kept, rows: Rows, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    if kept.lengths.numel() != len(rows):
        raise LogitlessError(f"logprobs: kept has {kept.lengths.numel()} rows but rows has {len(rows)}.")
    if kept.ids.device != device or kept.lengths.device != device:
        raise LogitlessError(f"logprobs: kept is on {kept.ids.device} but logits is on {device}.")
    if device.type == "cpu" and kept.ids.numel() and not torch.compiler.is_compiling():
        low, high = int(kept.ids.min()), int(kept.ids.max())
        if low < 0 or high >= vocab_size:
            raise LogitlessError(f"logprobs: kept ids run from {low} to {high}, outside the vocabulary of {vocab_size}.")
    return kept.ids, kept.lengths


def _facts(logits: Tensor, rows: Rows, call: _Call, kept: Kept | None) -> dict[str, int]:
    return {
        "the number of rows": len(rows),
        "the dtype of the logits": FLOATS.index(logits.dtype),
        "entropy": (None, "value", "grad").index(call.entropy),
        "kept": int(kept is not None),
        "the vocabulary size": call.vocab_size,
    }
