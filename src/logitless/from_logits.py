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
from logitless.checks import (
    check_kept,
    check_logits,
    check_overwrite,
    check_targets,
    prepare_over,
    resolve_rows,
    vocabulary,
)
from logitless.errors import LogitlessError, no_second_derivative
from logitless.kept import Kept, KeptLogits, kept_gradient, kept_logits, kept_statistics, write_kept
from logitless.results import in_shape, row_results, target_column
from logitless.rows import Rows
from logitless.softmax import (
    ELSEWHERE,
    Normaliser,
    coefficients,
)
from logitless.spec import IGNORE, EntropyMode, Head, TokenStats, VocabShard, parse_memory


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

    def prepare() -> _Prepared:
        return _prepare(logits, rows, entropy, head or Head(), shard, kept, overwrite_logits, backend, memory)

    ready = prepare_over(shard, "logprobs", prepare, lambda ready: ready.facts(logits))
    traceable = ready.call.group is None and not overwrite_logits
    apply: Any = _LogProbs.apply if traceable else _apply_outside_of_compile
    values = apply(logits, ready.rows.index, ready.rows.target, ready.gain, *ready.kept, ready.call)
    return in_shape(values, ready.shape)


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


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A checked call, and the vectors it needs."""

    call: _Call
    rows: Rows
    gain: Tensor
    kept: tuple[Tensor | None, Tensor | None]
    shape: tuple[int, ...]

    def facts(self, logits: Tensor) -> dict[str, Any]:
        """What the ranks of a vocabulary group must agree on."""
        return {
            "the number of rows": len(self.rows),
            "the dtype of the logits": str(logits.dtype),
            "entropy": self.call.entropy,
            "whether there are kept ids": self.kept[0] is not None,
            "the vocabulary size": self.call.vocab_size,
        }


def _prepare(
    logits: Tensor,
    rows: Any,
    entropy: EntropyMode,
    head: Head,
    shard: VocabShard | None,
    kept: Kept | None,
    overwrite_logits: bool,
    backend: str,
    memory: int | str,
) -> _Prepared:
    plan, shape = resolve_rows("logprobs", rows)
    if entropy not in (None, "value", "grad"):
        raise LogitlessError(f'logprobs: entropy must be None, "value" or "grad" but is {entropy!r}.')
    check_logits("logprobs", logits, plan, shard)
    vocab_size, columns = vocabulary("logprobs", logits.shape[-1], head, shard)
    if not torch.compiler.is_compiling():
        check_targets("logprobs", plan, vocab_size)
        if overwrite_logits:
            check_overwrite(logits)
    call = _Call(
        entropy=entropy,
        squash=head.squash,
        columns=columns,
        start=0 if shard is None else shard.start,
        vocab_size=vocab_size,
        overwrite=overwrite_logits,
        backend=choose_backend(logits, backend).name,
        memory=parse_memory(memory),
        group=None if shard is None else shard.group,
    )
    gain = head.gain(len(plan), accumulation_dtype(logits.dtype), logits.device)
    kept_ids = (None, None) if kept is None else check_kept("logprobs", kept, plan, vocab_size, logits.device)
    return _Prepared(call, plan, gain, kept_ids, shape)


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
        column = target_column(target, call.start, call.columns)
        problem = _problem(logits, index, column, gain, call)
        stats = run_statistics(call.backend, problem)
        gathered = _gather_kept(kept_ids, kept_lengths, target, problem, call)
        kept_stats = None if gathered is None else kept_statistics(gathered)
        results = row_results(stats, kept_stats, target == IGNORE, call.entropy is not None, call.group)
        ctx.set_materialize_grads(False)
        if call.entropy == "value":
            ctx.mark_non_differentiable(results.entropy)
        kept_saved = () if kept_ids is None else (kept_ids, kept_lengths, *results.kept_norm)
        entropy_saved = (results.mean,) if call.entropy == "grad" else ()
        rows_saved = (index, target, column, gain, *results.norm, results.logprob)
        ctx.save_for_backward(logits, *rows_saved, *kept_saved, *entropy_saved)
        ctx.call, ctx.has_kept, ctx.spent = call, kept_ids is not None, False
        # A leaf may ask for its gradient in another dtype; for anything else autograd keeps the tensor's own.
        ctx.grad_dtype = (getattr(logits, "grad_dtype", None) if logits.is_leaf else None) or logits.dtype
        return results[:3]

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, g_logprob: Tensor | None, g_entropy: Tensor | None, g_log_z: Tensor | None
    ) -> Any:
        call: _Call = ctx.call
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise no_second_derivative("logprobs", ", or use torch.log_softmax for this term")
        if ctx.spent:
            raise LogitlessError(
                "logprobs: second backward through a call with overwrite_logits=True, but the first one has replaced "
                "the logits by their gradient. Use overwrite_logits=False to keep the graph, or run forward again."
            )
        logits, index, target, column, gain, reference, log_sum, logprob, *more = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return (None,) * 7
        norm = Normaliser(reference, log_sum)
        kept_ids, kept_lengths, kept_norm = None, None, None
        if ctx.has_kept:
            kept_ids, kept_lengths, kept_norm, more = more[0], more[1], Normaliser(*more[2:4]), more[4:]
        mean = more[0] if more else None
        problem = _problem(logits, index, column, gain, call)
        out, out_index = _gradient_buffer(logits, index, problem, ctx.grad_dtype, call.overwrite)
        g_logprob = torch.zeros_like(logprob) if g_logprob is None else g_logprob.contiguous()
        if kept_norm is None:
            coef = coefficients(logprob, norm, mean, g_logprob, g_entropy, g_log_z)
            run_gradient(call.backend, problem, norm, coef, out, out_index)
        else:
            gathered = _gather_kept(kept_ids, kept_lengths, target, problem, call)
            assert gathered is not None
            coef = coefficients(logprob, norm, mean, torch.zeros_like(g_logprob), g_entropy, g_log_z)
            dense = coef if g_entropy is not None or g_log_z is not None else None
            values = kept_gradient(gathered, kept_norm, logprob, g_logprob, norm, dense, target == IGNORE)
            if dense is None:
                out.zero_()
            else:
                no_target = replace(problem, column=problem.column.clamp_max(ELSEWHERE))
                run_gradient(call.backend, no_target, norm, dense, out, out_index)
            write_kept(gathered, values, out, out_index)
        if call.overwrite:
            ctx.spent = True
            return (logits.detach(), *(None,) * 6)
        return (out.view(logits.shape), *(None,) * 6)


# The public torch.compiler.disable is the same, but imports the compiler, and with it Triton, when applied.
@torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]
def _apply_outside_of_compile(*args: Any) -> Any:
    """A graph break: collectives and the bookkeeping of overwriting are not traced."""
    return _LogProbs.apply(*args)


def _problem(logits: Tensor, index: Tensor, column: Tensor, gain: Tensor, call: _Call) -> Problem:
    matrix, index = _as_matrix(logits, index)
    entropy_wanted = call.entropy is not None
    return Problem(matrix, index, column, gain, call.squash, call.columns, entropy_wanted, call.memory)


def _as_matrix(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """``[T, V]`` view of ``[..., V]`` logits, and the index into it. Never a copy.

    Leading dimensions that do not collapse, as in ``x[:, :-1]``, become rows with gaps between them: the view spans the
    gaps and the index steps over them.
    """
    lead, width = logits.shape[:-1], logits.shape[-1]
    if logits.is_contiguous():
        return logits.view(lead.numel(), width), index
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


def _gradient_buffer(
    logits: Tensor, index: Tensor, problem: Problem, dtype: torch.dtype, overwrite: bool
) -> tuple[Tensor, Tensor]:
    """The matrix that receives the gradient, and the rows of it that correspond to the problem's rows."""
    if overwrite:
        assert problem.index is not None
        return problem.logits, problem.index
    shape = (logits.shape[:-1].numel(), logits.shape[-1])
    return torch.empty(shape, dtype=dtype, device=logits.device), index
