"""``linear_logprobs``: results from hidden states and the head's weight, without ever having logits.

    check and resolve the call  ->  choose the route  ->  tiles of hidden @ weight.T for the statistic  ->
    one all_gather if sharded  ->  results
    backward:  three coefficients per row  ->  the tiles again for d_hidden, d_weight, d_bias

The autograd Function is a seam: what it computes is in ``statistics``, ``gradients``, ``frozen_head`` and ``results``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from logitless.call import Call, Options, Scope, as_products_take, needs_gradient, resolve_hidden, together, untraced
from logitless.call.lora import LoRA
from logitless.errors import no_second_derivative
from logitless.extras import DIFFERENTIABLE, SavedExtras, extended
from logitless.from_hidden.exponentials import Exponentials
from logitless.from_hidden.extra_lines import ExtraLines, count_ahead
from logitless.from_hidden.frozen_head import Unit, statistics_with_unit, unit_gradient
from logitless.from_hidden.gradients import SupportTerms, Terms, gradients
from logitless.from_hidden.plan import FIXED_ROWS, LinearPlan, SupportPlan, Tiles, choose_plan
from logitless.from_hidden.projection import Projection, hidden_gradient, hidden_gradients, selected_rows
from logitless.from_hidden.statistics import row_statistics
from logitless.from_hidden.support import score_support
from logitless.kept import Kept
from logitless.notes import explained
from logitless.results import RowResults, extra_results, in_shape, row_results
from logitless.rows import Rows
from logitless.softmax import Normaliser, coefficients
from logitless.spec import EntropyMode, Head, TokenStats, VocabShard


@untraced
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor | LoRA,
    rows: Rows | Tensor | tuple[Tensor, Tensor],
    *,
    bias: Tensor | None = None,
    entropy: EntropyMode = None,
    head: Head | None = None,
    shard: VocabShard | None = None,
    kept: Kept | None = None,
    scope: Scope = "vocabulary",
    stats: tuple[str, ...] = (),
    top_k: int | None = None,
    further_ids: Tensor | None = None,
    hidden_grad: Literal["reduced", "partial"] = "reduced",
    sequence_parallel: bool = False,
    weight_grad: Tensor | None = None,
    sparse_weight_grad: bool = False,
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
            DTensor is taken if replicated, or if sharded by rows over the group of ``shard=shard_of(weight)``. A
            :class:`LoRA` is a weight with a low-rank adapter.
        rows, entropy, head, kept: as for :func:`logprobs`.
        scope: what entropy and log Z are over. ``"support"``: like the log-prob, over the kept ids and the target, from
            dot products with those rows of the weight alone. No product with the vocabulary, no log Z; vectors over all
            ids are all it takes.
        stats, top_k, further_ids: as for :func:`logprobs`. With them logits go through memory, tile by tile, and a rank
            takes one more product with the vocabulary.
        bias: ``[V]`` of the head, or None.
        shard: which rows of the weight live here, and the group that holds the rest. One ``all_gather`` in forward.
        hidden_grad: under a shard, ``"reduced"`` sums the gradient of hidden over the group; ``"partial"`` leaves this
            shard's part, for callers whose own backward does the sum.
        sequence_parallel: hidden is this rank's part of the tokens: it is gathered over the shard's group, and its
            gradient comes back summed and scattered.
        weight_grad: float32 ``[V, D]`` buffer that the weight's gradient is added to in backward (Megatron's
            ``main_grad``). ``weight.grad`` is then left alone.
        sparse_weight_grad: with ``scope="support"``, the weight's gradient as a sparse tensor of the rows that have
            one, as ``torch.optim.SparseAdam`` takes it. Counting them makes the device wait.
        match: round the logits to this dtype, as a rollout engine with a half-precision head does; the softmax stays in
            float32 and the gradient passes through the rounding.
        tf32: allow TF32 products of float32 operands.
        batch_invariant: tiles of one fixed height with padded tails, or kernels that know of no other row, so that a
            token's results have the same bits whatever else is in the batch.
        backend: as for :func:`logprobs`; it works on tiles.
        memory: bound on the working memory of forward and of backward. Gradients and their accumulators come on top.

    Returns:
        :class:`TokenStats`, as from :func:`logprobs`.

    Raises:
        LogitlessError: an argument cannot be honoured; the text says which and why.

    >>> out = linear_logprobs(torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([1, -100]), entropy="value")
    >>> out.logprob
    tensor([-1.3863,  0.0000])
    """
    options = Options.of(locals(), "linear_logprobs")
    with explained(options.caller, memory):
        hidden, weight, options = as_products_take(hidden, weight, options)
        trained = any(needs_gradient(hidden, weight, options)[1:])
        call, plan = together(
            options, partial(_resolve, hidden, weight, rows, options), lambda made: made[0].facts() | head_fact(trained)
        )
        return in_shape(score(hidden, weight, call, plan), call.shape)


def score(hidden: Tensor, weight: Tensor, call: Call, plan: LinearPlan | SupportPlan) -> TokenStats:
    """``[R]`` results of a call that was checked."""
    if isinstance(plan, SupportPlan):
        return score_support(hidden, weight, call)
    results = _LinearLogProbs.apply(hidden, weight, call.asked.bias, *(call.asked.low_rank or (None, None)), call, plan)
    extras = {} if call.extras is None else dict(zip(call.extras.names, results[3:], strict=True))
    return TokenStats(*results[:3], **extras)


def head_fact(trained: bool) -> dict[str, bool]:
    """What ranks must agree on besides: where the head is frozen, backward gathers no hidden states."""
    return {"whether weight or bias needs a gradient": trained}


def linear_plan(hidden: Tensor, weight: Tensor, rows: Any, **options: Any) -> LinearPlan | SupportPlan:
    """Which route :func:`linear_logprobs` takes with these arguments, and why. Computes nothing."""
    hidden, weight, asked = as_products_take(hidden, weight, Options.named(options, "linear_logprobs"))
    return _resolve(hidden, weight, rows, asked)[1]


def _resolve(hidden: Tensor, weight: Tensor, rows: Any, asked: Options) -> tuple[Call, LinearPlan | SupportPlan]:
    call = resolve_hidden(hidden, weight, rows, asked)
    return call, choose_plan(call, needs_gradient(hidden, weight, asked))


class _Saved(NamedTuple):
    """What backward needs, by name; None where the route does not have it."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    y: Tensor | None
    b: Tensor | None
    column: Tensor
    reference: Tensor
    log_sum: Tensor
    logprob: Tensor
    mean: Tensor | None
    kept_reference: Tensor | None = None
    kept_log_sum: Tensor | None = None
    others: Tensor | None = None
    local: Tensor | None = None
    exponentials: Tensor | None = None
    exponentials_reference: Tensor | None = None
    collision: Tensor | None = None
    counted: Tensor | None = None
    further_x: Tensor | None = None

    @property
    def norm(self) -> Normaliser:
        return Normaliser(self.reference, self.log_sum)


class _LinearLogProbs(torch.autograd.Function):
    """The seam to autograd: plain functions of this folder do the work."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        y: Tensor | None,
        b: Tensor | None,
        call: Call,
        plan: LinearPlan,
    ) -> tuple[Tensor | None, ...]:
        """Log-prob, entropy, log Z and extras."""
        target = call.rows.target
        column = call.column_of(target)
        p = Projection.of(selected_rows(hidden, call), weight, bias, column, call, call.found_here)
        if call.asked.batch_invariant and not plan.forward.fused:
            p = p.padded(FIXED_ROWS)
        for_backward, support, lines = {}, None, ExtraLines.empty(p)
        if plan.kind == "frozen":
            statistic, unit = statistics_with_unit(p, plan.forward, lines)
            for_backward = {"others": unit.others[: call.num_rows], "local": unit.local[: call.num_rows]}
        else:
            stored = Exponentials.empty(p, plan.kept_rows, plan.forward) if plan.kept_rows else None
            statistic, support = row_statistics(p, plan.forward, call.support(), stored, lines)
            if stored is not None:
                for_backward = {"exponentials": stored.values, "exponentials_reference": stored.reference}
        own = None if lines is None else lines.values[:, : call.num_rows]
        statistic = statistic[:, : call.num_rows]
        ignored = call.ignored(target)
        results = row_results(statistic, support, ignored, call.entropy, call.group, call.extras, own)
        extras, saved_extras = _extra_results(p, plan.forward, results)
        ctx.set_materialize_grads(False)
        fixed = [x for name, x in extras.items() if name not in DIFFERENTIABLE]
        ctx.mark_non_differentiable(*fixed, *([results.entropy] if call.asked.entropy == "value" else []))
        if support is not None:
            for_backward = {"kept_reference": results.kept_norm.reference, "kept_log_sum": results.kept_norm.log_sum}
        for_backward |= {
            "collision": saved_extras.collision,
            "counted": saved_extras.counted,
            "further_x": saved_extras.x,
        }
        mean = results.mean if call.asked.entropy == "grad" else None
        saved = _Saved(hidden, weight, bias, y, b, column, *results.norm, results.logprob, mean, **for_backward)
        ctx.save_for_backward(*saved)
        # The buffer for the weight's gradient is in the call and not saved: others may add to it before backward does.
        ctx.call, ctx.plan = call, plan
        return *results[:3], *extras.values()

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, g_logprob: Tensor | None, g_entropy: Tensor | None, g_log_z: Tensor | None, *g_extras: Tensor | None
    ) -> Any:
        if torch.is_grad_enabled():
            raise no_second_derivative("linear_logprobs", ", or use torch.log_softmax for this term")
        call: Call = ctx.call
        plan: LinearPlan = ctx.plan
        saved = _Saved(*ctx.saved_tensors)
        buffer = call.asked.weight_grad
        with explained(call.asked.caller, call.asked.memory, weight_grad=buffer):
            g_logprob = torch.zeros_like(saved.logprob) if g_logprob is None else g_logprob.contiguous()
            if plan.kind == "frozen":
                d_hidden = _frozen_gradient(call, saved, g_logprob, g_log_z)
                return d_hidden, *(None,) * 6
            rows = selected_rows(saved.hidden, call)
            p = Projection.of(rows, saved.weight, saved.bias, saved.column, call, call.found_here)
            terms = _terms(p, plan, saved, g_logprob, g_entropy, g_log_z, g_extras)
            assert plan.backward is not None
            needs = ctx.needs_input_grad
            want = (needs[0] or needs[3], *needs[1:3])
            found = gradients(p, plan.backward, terms, want=want, weight_grad=buffer)
            d_hidden, d_y = hidden_gradients(found.hidden, saved.hidden.shape, call, (needs[0], needs[3]))
            return d_hidden, found.weight, found.bias, d_y, found.low, None, None


def _extra_results(p: Projection, tiles: Tiles, results: RowResults) -> tuple[dict[str, Tensor], SavedExtras]:
    """Results of the extras by name, and what backward needs of them; nothing where none are asked for."""
    extras = p.call.extras
    if extras is None or results.extras is None:
        return {}, SavedExtras()

    def count(key: Tensor, place: Tensor) -> Tensor:
        return count_ahead(p, tiles, key, place, extras.negative)

    return extra_results(extras, results.extras, p.call.row(results.norm), p.call.group, count)


def _frozen_gradient(call: Call, saved: _Saved, g_logprob: Tensor, g_log_z: Tensor | None) -> Tensor:
    """Gradient of hidden where forward made unit gradients."""
    assert saved.others is not None
    assert saved.local is not None
    # Hidden rows are neither gathered nor selected again: the unit gradients stand in, and are not multiplied.
    p = Projection.of(saved.others, saved.weight, saved.bias, saved.column, call)
    unit = Unit(saved.others, saved.local)
    rows = unit_gradient(p, unit, saved.norm, saved.logprob, g_logprob, g_log_z)
    return hidden_gradient(rows, saved.hidden.shape, call)


def _terms(
    p: Projection,
    plan: LinearPlan,
    saved: _Saved,
    g_logprob: Tensor,
    g_entropy: Tensor | None,
    g_log_z: Tensor | None,
    g_extras: Sequence[Tensor | None],
) -> Terms:
    """What turns a tile of logits into a tile of dZ, from the upstream gradients."""
    ids, support = p.call.support(), None
    dense = g_logprob
    if ids is not None:
        assert saved.kept_reference is not None
        assert saved.kept_log_sum is not None
        # The log-prob's gradient reaches the support alone; entropy and log Z have theirs everywhere.
        dense = torch.zeros_like(g_logprob)
        support = SupportTerms(ids, Normaliser(saved.kept_reference, saved.kept_log_sum), saved.logprob, g_logprob)
    stored = None
    if saved.exponentials is not None and saved.exponentials_reference is not None:
        stored = Exponentials.of(p, saved.exponentials, saved.exponentials_reference, plan.forward)
    coef = coefficients(saved.logprob, saved.norm, saved.mean, dense, g_entropy, g_log_z)
    if p.call.extras is not None:
        results = SavedExtras(saved.collision, saved.counted, saved.further_x)
        row = p.call.row(saved.norm)
        coef = extended(coef, p.call.extras, results, row, saved.logprob, dense, g_extras)
    return Terms(saved.norm, coef, support, stored)
