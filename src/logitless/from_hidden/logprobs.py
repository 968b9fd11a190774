"""``linear_logprobs``: the same results from hidden states and the head's weight, without ever having logits.

    select rows  ->  sweep tiles of hidden @ weight.T for statistics  ->  one all_gather if sharded  ->  results
    backward:  three coefficients per row  ->  sweep the tiles again for d_hidden, d_weight, d_bias

The autograd Function is a seam: what it computes is in ``sweep``, ``results`` and ``softmax``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from logitless.call import Call, Options, as_autocast_would, local_weight, prepare, prepare_together
from logitless.errors import no_second_derivative
from logitless.from_hidden.frozen_head import Unit, sweep_unit, unit_gradient
from logitless.from_hidden.gradients import Exponentials, KeptIds, Projection, Terms, sweep_gradients, sweep_statistics
from logitless.from_hidden.plan import FIXED_ROWS, LinearPlan, Shape, Wishes, choose_plan
from logitless.from_hidden.projection import hidden_gradient, projection_of, selected_rows
from logitless.kept import Kept
from logitless.results import in_shape, row_results, target_column
from logitless.rows import Rows
from logitless.softmax import SKIP, Normaliser, coefficients
from logitless.spec import IGNORE, EntropyMode, Head, TokenStats, VocabShard


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    rows: Rows | Tensor | tuple[Tensor, Tensor],
    *,
    bias: Tensor | None = None,
    entropy: EntropyMode = None,
    head: Head | None = None,
    shard: VocabShard | None = None,
    kept: Kept | None = None,
    hidden_grad: Literal["reduced", "partial"] = "reduced",
    sequence_parallel: bool = False,
    weight_grad: Tensor | None = None,
    match: Literal["bfloat16", "float16"] | None = None,
    tf32: bool = False,
    batch_invariant: bool = False,
    backend: str = "auto",
    memory: int | str = "256MiB",
) -> TokenStats:
    """Log-probability, entropy and log Z of chosen tokens, without storing the logits.

    Same as ``logprobs(hidden @ weight.T + bias, rows, ...)`` with the product in float32.

    Args:
        hidden: ``[..., D]`` hidden states; ``[T / n, D]`` with ``sequence_parallel``.
        weight: ``[V, D]`` of the language-model head, in hidden's dtype. Under a shard, V is the shard's part. A
            DTensor is taken if replicated, or if sharded by rows over the group of ``shard=shard_of(weight)``.
        rows, entropy, head, kept: as for :func:`logprobs`.
        bias: ``[V]`` of the head, or None.
        shard: which rows of the weight live here, and the group that holds the rest. One ``all_gather`` in forward.
        hidden_grad: under a shard, ``"reduced"`` sums the gradient of hidden over the group; ``"partial"`` leaves this
            shard's part, for callers whose own backward does the sum.
        sequence_parallel: hidden is this rank's part of the tokens: it is gathered over the shard's group, and its
            gradient comes back summed and scattered.
        weight_grad: float32 ``[V, D]`` buffer that the weight's gradient is added to in backward (Megatron's
            ``main_grad``). ``weight.grad`` is then left alone.
        match: round the logits to this dtype, as a rollout engine with a half-precision head does; the softmax stays in
            float32 and the gradient passes through the rounding.
        tf32: allow TF32 products of float32 operands.
        batch_invariant: tiles of one fixed height with padded tails, so that a token's results have the same bits
            whatever else is in the batch.
        backend: as for :func:`logprobs`; it works on tiles.
        memory: bound on the working memory of a sweep. Gradients and their accumulators come on top.

    Returns:
        :class:`TokenStats`, as from :func:`logprobs`.

    Raises:
        LogitlessError: an argument cannot be honoured; the text says which and why.

    >>> out = linear_logprobs(torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([1, -100]), entropy="value")
    >>> out.logprob
    tensor([-1.3863,  0.0000])
    """
    options = Options(
        bias=bias,
        entropy=entropy,
        head=head,
        shard=shard,
        kept=kept,
        hidden_grad=hidden_grad,
        sequence_parallel=sequence_parallel,
        weight_grad=weight_grad,
        match=match,
        tf32=tf32,
        batch_invariant=batch_invariant,
        backend=backend,
        memory=memory,
    )
    return score_rows(hidden, weight, rows, options)


def score_rows(hidden: Tensor, weight: Tensor, rows: Any, options: Options) -> TokenStats:
    """:func:`linear_logprobs` with its keyword arguments in one piece."""
    weight = local_weight(weight, options.shard, options.caller)
    hidden, weight, bias = as_autocast_would(hidden, weight, options.bias)
    ready = prepare_together(hidden, weight, rows, replace(options, bias=bias))
    index = None if ready.rows.in_order else ready.rows.index
    tensors = (hidden, weight, bias, options.weight_grad, index, ready.rows.target, ready.gain, *ready.kept)
    values = _apply_outside_of_compile(*tensors, ready.call)
    return in_shape(values, ready.shape)


def linear_plan(hidden: Tensor, weight: Tensor, rows: Any, **options: Any) -> LinearPlan:
    """Which way :func:`linear_logprobs` goes with these arguments, and why. Computes nothing."""
    asked = Options(**options)
    hidden, weight, bias = as_autocast_would(hidden, local_weight(weight, asked.shard, asked.caller), asked.bias)
    ready = prepare(hidden, weight, rows, replace(asked, bias=bias))
    tracked = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    return _plan(len(ready.rows), hidden.device.type, hidden.dtype, ready.call, tracked, asked.kept is not None)


class _LinearLogProbs(torch.autograd.Function):
    """The seam to autograd: plain functions of this module and below do the work."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_grad: Tensor | None,
        index: Tensor | None,
        target: Tensor,
        gain: Tensor,
        kept_ids: Tensor | None,
        kept_lengths: Tensor | None,
        call: Call,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        column = target_column(target, call.start, call.columns)
        projection = projection_of(selected_rows(hidden, index, call), weight, bias, column, gain, call)
        kept = _kept_ids(kept_ids, kept_lengths, target, call)
        device, dtype = hidden.device.type, hidden.dtype
        plan = _plan(len(target), device, dtype, call, ctx.needs_input_grad, kept is not None)
        unit, exponentials, kept_stats = (), (), None
        if call.batch_invariant:
            projection = _padded(projection, FIXED_ROWS)
        if plan.kind == "frozen":
            stats, unit = sweep_unit(projection, plan.forward)
        else:
            held = Exponentials.empty(projection, plan.kept_rows, plan.forward.columns) if plan.kept_rows else None
            stats, kept_stats = sweep_statistics(projection, plan.forward, kept, held)
            exponentials = () if held is None else (held.values, held.reference)
        stats, unit = stats[:, : len(target)], tuple(x[: len(target)] for x in unit)
        results = row_results(stats, kept_stats, target == IGNORE, call.entropy is not None, call.group)
        ctx.set_materialize_grads(False)
        if call.entropy == "value":
            ctx.mark_non_differentiable(results.entropy)
        mean = results.mean if call.entropy == "grad" else None
        rows_saved = (index, target, column, gain, *results.norm, results.logprob, mean)
        kept_saved = (None,) * 4 if kept is None else (kept_ids, kept_lengths, *results.kept_norm)
        ctx.save_for_backward(hidden, weight, bias, *rows_saved, *kept_saved, *unit, *exponentials)
        # Not saved: others may add to the buffer between forward and backward, and that is what it is for.
        ctx.call, ctx.plan, ctx.weight_grad = call, plan, weight_grad
        return results[:3]

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, g_logprob: Tensor | None, g_entropy: Tensor | None, g_log_z: Tensor | None
    ) -> Any:
        if torch.is_grad_enabled():
            raise no_second_derivative("linear_logprobs", ", or use torch.log_softmax for this term")
        call: Call = ctx.call
        hidden, weight, bias, index, target, column, gain, *saved = ctx.saved_tensors
        norm, (logprob, mean), kept_saved, more = Normaliser(*saved[:2]), saved[2:4], saved[4:8], saved[8:]
        plan: LinearPlan = ctx.plan
        g_logprob = torch.zeros_like(logprob) if g_logprob is None else g_logprob.contiguous()
        if plan.kind == "frozen":
            unit = Unit(more[0], more[1])
            # Hidden rows are neither gathered nor selected again: the unit gradients stand in, and are not multiplied.
            projection = projection_of(unit.others, weight, bias, column, gain, call)
            rows = unit_gradient(projection, unit, norm, logprob, g_logprob, g_log_z)
            return (hidden_gradient(rows, hidden.shape, index, call), *(None,) * 9)
        projection = projection_of(selected_rows(hidden, index, call), weight, bias, column, gain, call)
        kept = _kept_ids(kept_saved[0], kept_saved[1], target, call)
        dense = torch.zeros_like(g_logprob) if kept is not None else g_logprob
        coef = coefficients(logprob, norm, mean, dense, g_entropy, g_log_z)
        with_kept = None if kept is None else (kept, Normaliser(*kept_saved[2:]), logprob, g_logprob)
        held = Exponentials(more[0], more[1], plan.forward.columns) if plan.kept_rows else None
        gradients = sweep_gradients(
            projection,
            plan.backward,
            Terms(norm, coef, with_kept, held),
            want=ctx.needs_input_grad[:3],
            weight_grad=ctx.weight_grad,
        )
        d_hidden = None if gradients.hidden is None else hidden_gradient(gradients.hidden, hidden.shape, index, call)
        return (d_hidden, gradients.weight, gradients.bias, *(None,) * 7)


# The public torch.compiler.disable is the same, but imports the compiler, and with it Triton, when applied.
@torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]
def _apply_outside_of_compile(*args: Any) -> Any:
    """A graph break: the sweep is a loop over tiles and is not traced."""
    return _LinearLogProbs.apply(*args)


def _padded(p: Projection, multiple: int) -> Projection:
    """The same rows and as many left-out ones as make a multiple."""
    missing = -p.num_rows % multiple
    return replace(
        p,
        hidden=torch.nn.functional.pad(p.hidden, (0, 0, 0, missing)),
        column=torch.nn.functional.pad(p.column, (0, missing), value=SKIP),
        gain=torch.nn.functional.pad(p.gain, (0, missing), value=1.0),
    )


def _kept_ids(ids: Tensor | None, lengths: Tensor | None, target: Tensor, call: Call) -> KeptIds | None:
    if ids is None or lengths is None:
        return None
    return KeptIds(Kept(ids, lengths), target, call.start, call.vocab_size)


def _plan(
    num_rows: int, device: str, dtype: torch.dtype, call: Call, needs: Sequence[bool], replay: bool
) -> LinearPlan:
    wishes = Wishes.of(
        needs[:3],
        entropy=call.entropy,
        operand_bytes=dtype.itemsize,
        capped=bool(call.squash),
        replay=replay,
        invariant=call.batch_invariant,
    )
    shape = Shape(num_rows, call.columns, call.logits_dtype.itemsize, dtype.itemsize, device == "cuda")
    return choose_plan(shape, wishes, call.memory)
