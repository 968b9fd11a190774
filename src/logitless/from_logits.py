"""``logprobs``: per-token log-probability, entropy and log Z from logits, with no second ``[T, V]`` tensor.

    check and resolve the call  ->  statistics kernel  ->  one all_gather if sharded  ->  merge  ->  results
    backward:  three coefficients per row from the upstream gradients  ->  gradient kernel, into one buffer

The autograd Function at the end is a seam: what it computes is in ``softmax``, ``kept`` and ``backends``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.backends import load, run_gradient, run_statistics
from logitless.backends.contract import Problem
from logitless.call import Call, Options, Scope, local_part, resolve_logits, together, untraced
from logitless.errors import LogitlessError, no_second_derivative
from logitless.extras import DIFFERENTIABLE, SavedExtras, extended, upstream_at, write_at_ids
from logitless.kept import Kept
from logitless.notes import explained
from logitless.results import RowResults, extra_results, in_shape, row_results
from logitless.rows import Rows
from logitless.softmax import ELSEWHERE, Coefficients, Normaliser, coefficients
from logitless.spec import IGNORE, EntropyMode, Head, TokenStats, VocabShard
from logitless.support import (
    KeptLogits,
    Support,
    kept_gradient,
    kept_statistics,
    support_gradient,
    support_statistic,
    write_kept,
)


def logprobs(
    logits: Tensor,
    rows: Rows | Tensor | tuple[Tensor, Tensor],
    *,
    entropy: EntropyMode = None,
    head: Head | None = None,
    shard: VocabShard | None = None,
    kept: Kept | None = None,
    scope: Scope = "vocabulary",
    stats: tuple[str, ...] = (),
    top_k: int | None = None,
    further_ids: Tensor | None = None,
    overwrite_logits: bool = False,
    backend: str = "auto",
    memory: int | str = "16MiB",
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
        scope: what entropy and log Z are over. ``"support"``: like the log-prob, over the kept ids and the target.
            Their logits are all that is read, and there is no log Z.
        stats: more results over the whole vocabulary, whatever was kept: any of ``"top1"``, ``"collision"``,
            ``"mean_logit"``, ``"logit_variance"``, ``"max_logit"`` and ``"rank"``. A rank takes one more collective
            under a shard.
        top_k: ids and log-probs of the K most likely tokens, K up to 128.
        further_ids: ``[..., K]`` int64, ids of every row whose log-probs are wanted besides; they have a gradient. An
            id may come twice, and -100 leaves a place out.
        overwrite_logits: write the gradient over the logits in backward instead of into a new buffer. The logits
            must be neither a leaf nor a view, and are lost after backward.
        backend: ``"auto"``, ``"reference"``, ``"tiled"`` or ``"triton"``; see :func:`choose_backend`.
        memory: bound on the working space of the tiled backend, in bytes or as ``"16MiB"``.

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
    # By name, since torch.compile up to 2.12 does not trace locals().
    options = Options(
        entropy=entropy,
        head=head,
        shard=shard,
        kept=kept,
        scope=scope,
        stats=stats,
        top_k=top_k,
        further_ids=further_ids,
        backend=backend,
        memory=memory,
        caller="logprobs",
    )
    with explained(options.caller, memory):
        logits = local_part(options, "logits", logits, logits.dim() - 1 if isinstance(logits, Tensor) else None)
        call = together(options, partial(resolve_logits, logits, rows, options, overwrite_logits), Call.facts)
        return in_shape(score_logits(logits, call), call.shape)


def score_logits(logits: Tensor, call: Call) -> TokenStats:
    """``[R]`` results of a call that was checked."""
    kept = call.asked.kept
    ids, lengths = (None, None) if kept is None else (kept.ids, kept.lengths)
    arguments = (logits, call.index, call.rows.target, call.gain, ids, lengths, call)
    # Collectives, the bookkeeping of overwriting and extras are not traced.
    traced = call.group is None and not call.overwrite and call.extras is None
    logprob, log_z, *more = (_LogProbs.apply if traced else untraced(_LogProbs.apply))(*arguments)
    entropy = more.pop(0) if call.entropy else None
    extras = {} if call.extras is None else dict(zip(call.extras.names, more, strict=True))
    return TokenStats(logprob, entropy, None if call.over_support else log_z, **extras)


class _Saved(NamedTuple):
    """What backward needs, by name."""

    logits: Tensor
    rows: Tensor | None
    target: Tensor
    column: Tensor
    gain: Tensor
    reference: Tensor
    log_sum: Tensor
    logprob: Tensor
    mean: Tensor | None
    kept_ids: Tensor | None
    kept_lengths: Tensor | None
    kept_reference: Tensor | None
    kept_log_sum: Tensor | None
    collision: Tensor | None
    counted: Tensor | None
    further_x: Tensor | None


class _LogProbs(torch.autograd.Function):
    """The seam to autograd: plain functions of this module and below do the work."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        index: Tensor | None,
        target: Tensor,
        gain: Tensor,
        kept_ids: Tensor | None,
        kept_lengths: Tensor | None,
        call: Call,
    ) -> tuple[Tensor, ...]:
        """Log-prob, log Z and, if wanted, entropy and extras: the compiler takes no None among the results."""
        column = call.column_of(target)
        problem = _problem(logits, index, column, gain, call)
        gathered = _gather_support(kept_ids, kept_lengths, target, problem, call)
        support = None
        if gathered is not None and call.over_support:
            statistic = support_statistic(gathered)
        else:
            statistic = run_statistics(call.backend, problem)
            support = None if gathered is None else kept_statistics(gathered)
        lines = None if call.extras is None else call.extras.lines(load(call.backend), problem, slice(None))
        ignored = call.ignored(target)
        results = row_results(statistic, support, ignored, call.entropy, call.group, call.extras, lines)
        extras, saved_extras = _extra_results(results, problem, call)
        ctx.set_materialize_grads(False)
        fixed = [results.entropy] if call.asked.entropy == "value" else []
        fixed += [x for name, x in extras.items() if name not in DIFFERENTIABLE]
        if fixed:
            ctx.mark_non_differentiable(*fixed)
        mean = results.mean if call.asked.entropy == "grad" else None
        saved = _Saved(
            logits=logits,
            rows=index,
            target=target,
            column=column,
            gain=gain,
            reference=results.norm.reference,
            log_sum=results.norm.log_sum,
            logprob=results.logprob,
            mean=mean,
            kept_ids=kept_ids,
            kept_lengths=kept_lengths,
            kept_reference=None if support is None else results.kept_norm.reference,
            kept_log_sum=None if support is None else results.kept_norm.log_sum,
            collision=saved_extras.collision,
            counted=saved_extras.counted,
            further_x=saved_extras.x,
        )
        ctx.save_for_backward(*saved)
        ctx.call, ctx.spent = call, False
        # A leaf may ask for its gradient in another dtype; for anything else autograd keeps the tensor's own.
        asks = logits.is_leaf and not torch.compiler.is_compiling()
        ctx.grad_dtype = (getattr(logits, "grad_dtype", None) if asks else None) or logits.dtype
        entropy = () if results.entropy is None else (results.entropy,)
        return results.logprob, results.log_z, *entropy, *extras.values()

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, g_logprob: Tensor | None, g_log_z: Tensor | None, *more: Tensor | None
    ) -> Any:
        call: Call = ctx.call
        g_entropy, g_extras = (more[0], more[1:]) if call.entropy else (None, more)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise no_second_derivative("logprobs", ", or use torch.log_softmax for this term")
        if ctx.spent:
            raise LogitlessError(
                "logprobs: second backward through a call with overwrite_logits=True, but the first one has replaced "
                "the logits by their gradient, or begun to. Use overwrite_logits=False to keep the graph, or run "
                "forward again."
            )
        if not ctx.needs_input_grad[0]:
            return (None,) * 7
        saved = _Saved(*ctx.saved_tensors)
        with explained(call.asked.caller, call.asked.memory, logits=saved.logits if call.overwrite else None):
            # From here on the logits may be half overwritten, should it fail.
            ctx.spent = call.overwrite
            found = _logits_gradient(call, saved, ctx.grad_dtype, g_logprob, g_entropy, g_log_z, g_extras)
            return (found, *(None,) * 6)


def _extra_results(results: RowResults, problem: Problem, call: Call) -> tuple[dict[str, Tensor], SavedExtras]:
    """Results of the extras by name, and what backward needs of them; nothing where none are asked for."""
    extras = call.extras
    if extras is None or results.extras is None:
        return {}, SavedExtras()

    def count(key: Tensor, place: Tensor) -> Tensor:
        return load(call.backend).ahead(problem, key, place, extras.negative)

    return extra_results(extras, results.extras, call.row(results.norm), call.group, count)


def _write_gradient(
    call: Call, problem: Problem, norm: Normaliser, coef: Coefficients, out: Tensor, out_index: Tensor | None
) -> None:
    """dZ of all columns, and then of the further ids."""
    run_gradient(call.backend, problem, norm, coef, out, out_index)
    # Asked here: a compiler would trace the search for the backend.
    if coef.at_ids is not None:
        write_at_ids(load(call.backend), coef, 0, call.columns, out, out_index)


def _logits_gradient(
    call: Call,
    saved: _Saved,
    dtype: torch.dtype,
    g_logprob: Tensor | None,
    g_entropy: Tensor | None,
    g_log_z: Tensor | None,
    g_extras: Sequence[Tensor | None],
) -> Tensor:
    """Gradient of the logits, in a buffer of its own or over them."""
    logits, logprob, norm = saved.logits, saved.logprob, Normaliser(saved.reference, saved.log_sum)
    problem = _problem(logits, saved.rows, saved.column, saved.gain, call)
    out, out_index = gradient_buffer(logits, saved.rows, problem, dtype, call.overwrite)
    g_logprob = torch.zeros_like(logprob) if g_logprob is None else g_logprob
    # The compiler passes zeros for a result that has no gradient.
    g_entropy = None if saved.mean is None else g_entropy
    gathered = _gather_support(saved.kept_ids, saved.kept_lengths, saved.target, problem, call)
    if gathered is not None and call.over_support:
        coef = coefficients(logprob, norm, saved.mean, g_logprob, g_entropy, None)
        out.zero_()
        write_kept(gathered, support_gradient(gathered, norm, coef, saved.target == IGNORE), out, out_index)
    elif saved.kept_reference is None or saved.kept_log_sum is None:
        coef = coefficients(logprob, norm, saved.mean, g_logprob, g_entropy, g_log_z)
        coef = _with_extras(coef, call, saved, g_logprob, g_extras)
        _write_gradient(call, problem, norm, coef, out, out_index)
    else:
        assert gathered is not None
        nothing = torch.zeros_like(g_logprob)
        coef = coefficients(logprob, norm, saved.mean, nothing, g_entropy, g_log_z)
        coef = _with_extras(coef, call, saved, nothing, g_extras)
        dense = coef if any(g is not None for g in (g_entropy, g_log_z, *g_extras)) else None
        kept_norm = Normaliser(saved.kept_reference, saved.kept_log_sum)
        further = upstream_at(dense, gathered.row, gathered.column)
        values = kept_gradient(gathered, kept_norm, logprob, g_logprob, norm, dense, saved.target == IGNORE, further)
        if dense is None:
            out.zero_()
        else:
            no_target = replace(problem, column=problem.column.clamp_max(ELSEWHERE), found=False)
            _write_gradient(call, no_target, norm, dense, out, out_index)
        write_kept(gathered, values, out, out_index)
    return logits.detach() if call.overwrite else out.view(logits.shape)


def _with_extras(
    coef: Coefficients, call: Call, saved: _Saved, g_logprob: Tensor, g_extras: Sequence[Tensor | None]
) -> Coefficients:
    """The coefficients with what the upstream gradients of extras add, if there are any."""
    if call.extras is None:
        return coef
    results, row = SavedExtras(*saved[-3:]), call.row(Normaliser(saved.reference, saved.log_sum))
    return extended(coef, call.extras, results, row, saved.logprob, g_logprob, g_extras)


def _problem(logits: Tensor, index: Tensor | None, column: Tensor, gain: Tensor, call: Call) -> Problem:
    matrix, index = as_matrix(logits, index)
    sizes = (call.squash, call.columns, call.entropy, call.memory)
    return Problem(matrix, index, column, gain, *sizes, unit=call.unit, found=call.found_here)


def as_matrix(logits: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """``[T, V]`` view of ``[..., V]`` logits, and the index into it, None for all rows in order. Never a copy.

    Leading dimensions that do not collapse, as in ``x[:, :-1]``, become rows with gaps between them: the view spans the
    gaps and the index steps over them.
    """
    lead, width = logits.shape[:-1], logits.shape[-1]
    if logits.is_contiguous():
        return logits.view(lead.numel(), width), index
    strides = logits.stride()[:-1]
    long = [n for n, size in zip(strides, lead, strict=True) if size > 1]
    row_stride = min([n for n in long if n > 0] or [max(width, 1)])
    if any(n % row_stride for n in long):
        raise LogitlessError(
            f"logprobs: logits of shape {list(logits.shape)} have strides {list(logits.stride())}, which are not whole "
            f"steps of one row. Pass logits.contiguous() (a copy), or the tensor this view was cut from."
        )
    rest = torch.arange(lead.numel(), device=logits.device) if index is None else index
    row = torch.zeros_like(rest)
    for size, stride in zip(reversed(lead), reversed(strides), strict=True):
        row, rest = row + rest % size * (stride // row_stride), rest // size
    last = sum((size - 1) * (stride // row_stride) for size, stride in zip(lead, strides, strict=True) if size > 1)
    return logits.as_strided((last + 1 if logits.numel() else 0, width), (row_stride, 1)), row


def _gather_support(
    ids: Tensor | None, lengths: Tensor | None, target: Tensor, problem: Problem, call: Call
) -> KeptLogits | None:
    if ids is None or lengths is None:
        return None
    return Support.of(Kept(ids, lengths), target, call.start, call.vocab_size).logits(problem)


def gradient_buffer(
    logits: Tensor, index: Tensor | None, problem: Problem, dtype: torch.dtype, overwrite: bool
) -> tuple[Tensor, Tensor | None]:
    """The matrix that receives the gradient, and the rows of it that correspond to the problem's rows."""
    if overwrite:
        return problem.logits, problem.index
    shape = (logits.shape[:-1].numel(), logits.shape[-1])
    if index is None and problem.index is not None:
        # Rows in order, but with gaps between those of the logits.
        index = torch.arange(shape[0], device=logits.device)
    return torch.empty(shape, dtype=dtype, device=logits.device), index
