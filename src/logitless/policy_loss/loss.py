"""``linear_policy_loss``: the loss of a policy update from hidden states and the head's weight, gradients included.

    check, resolve, choose the route  ->  one pass: chunks of rows, gradients made on the way; backward scales them
                                      ->  two passes: log-probs of all rows, then the objective

The autograd Function is a seam: what it computes is in ``one_pass`` and ``objectives``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from logitless.backends import load
from logitless.backends.divergences import Divergence
from logitless.call import Call, Options, Scope, as_products_take, needs_gradient, resolve_hidden, together, untraced
from logitless.call.lora import LoRA
from logitless.collectives import agree_if, fingerprint
from logitless.distill import Teacher, Teachers
from logitless.distill.divergence import check_pair, pair_facts, score_pair
from logitless.distill.pair import PairPlan
from logitless.distill.source import Source, grouped, ungrouped
from logitless.distill.stats import DivergenceStats
from logitless.distill.support import score_kept
from logitless.distill.teacher import TopK
from logitless.distill.top_k import listing, score_listed
from logitless.errors import LogitlessError, no_second_derivative
from logitless.from_hidden.logprobs import head_fact, score
from logitless.from_hidden.projection import Projection, hidden_gradients, selected_rows
from logitless.kept import Kept
from logitless.notes import explained
from logitless.objectives import Inputs, Metrics, Objective, Preference
from logitless.policy_loss.one_pass import OnePass
from logitless.policy_loss.plan import LossPlan, first_pass, plan_of
from logitless.rows import Rows
from logitless.spec import Head, TokenStats, VocabShard, inspectable

NAME = "linear_policy_loss"

MEMORY = "1GiB"
"""What a chunk of rows may take unless told otherwise."""


@untraced
def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor | LoRA,
    rows: Rows | Tensor | tuple[Tensor, Tensor],
    objective: Objective | Preference,
    *,
    bias: Tensor | None = None,
    head: Head | None = None,
    shard: VocabShard | None = None,
    kept: Kept | None = None,
    scope: Scope = "vocabulary",
    hidden_grad: Literal["reduced", "partial"] = "reduced",
    sequence_parallel: bool = False,
    weight_grad: Tensor | None = None,
    sparse_weight_grad: bool = False,
    grad_scale: float | Tensor = 1.0,
    match: Literal["bfloat16", "float16"] | None = None,
    tf32: bool = False,
    batch_invariant: bool = False,
    drop_zeros: bool = True,
    backend: str = "auto",
    memory: int | str = MEMORY,
    denominator: float | Tensor | None = None,
    prompt_tokens: Tensor | None = None,
    group: Any = None,
    check_group: bool = False,
    teacher: Teacher | Teachers | None = None,
    return_stats: bool = False,
    **fields: Tensor | str | None,
) -> Any:
    """The objective's loss and its gradients in three matrix products, without storing the logits.

    Same loss and gradients as ``objective(linear_logprobs(hidden, weight, rows, ...), rows, ...)``, which takes four.
    Gradients are made in forward, for an upstream gradient of 1; backward multiplies them by the one that arrives.

    Args:
        hidden, weight, rows, bias, head, shard, kept, scope, hidden_grad, sequence_parallel, sparse_weight_grad, match,
            tf32, batch_invariant, backend: as for :func:`linear_logprobs`. Kept ids and batch invariance take two
            passes; ``scope="support"`` takes no product at all, and the objective's entropy is that of the support.
        objective: what to minimise: an :class:`Objective`, or a :class:`Preference` on pairs of samples.
        weight_grad: float32 ``[V, D]`` buffer that the weight's gradient is added to, *in forward*, times
            ``grad_scale``. ``weight.grad`` is then left alone. Not added to where no gradient is recorded. An
            error on the way carries a note if a part has been added.
        grad_scale: with ``weight_grad``, the gradient that will arrive at the loss in backward (a loss scale over the
            number of micro-batches, say), a number or a 0-dim tensor. Another one arriving raises on CPU and makes the
            gradient of hidden NaN on an accelerator, where comparing would stall it.
        drop_zeros: leave rows whose gradient is exactly zero (clipped, zero advantage, masked) out of the last two
            products. Their number is fetched per chunk while the device goes on. A CUDA graph can fetch nothing, and
            multiplies all rows.
        memory: bound on what is held of a chunk of rows: its logits or, where that makes for short chunks, 16-bit
            exponentials of them. Gradients and their accumulators come on top.
        denominator, prompt_tokens, group, check_group, fields: as for :meth:`Objective.__call__`.
        teacher: for an objective with a ``divergence``, as for :func:`linear_divergence`. Four products instead of six.
            With K log-probs of a teacher, three products, of the student alone.

    Returns:
        ``(loss, metrics)`` as from the objective: a part of the batch's loss, 0-dim, and :class:`Metrics`. With
        ``return_stats`` also the rows' :class:`TokenStats` without graph (with a teacher :class:`DivergenceStats`): the
        old log-probs of later epochs, say.
        ``explain(hidden, weight, rows, objective=...)`` tells whether it goes in one pass.

    Raises:
        LogitlessError: an argument cannot be honoured; the text says which and why.

    >>> rows = Rows.packed([[0, 1, 2]], [2])
    >>> zeros = torch.zeros(3, 2), torch.zeros(4, 2)
    >>> loss, metrics = linear_policy_loss(*zeros, rows, Objective(), old_logprob="current", advantage=torch.ones(2))
    >>> float(loss)
    -1.0
    """
    asked = Options.of(locals(), NAME)

    def resolve() -> tuple[Call, LossPlan, Inputs]:
        _check_objective(objective)
        _check_grad_scale(grad_scale, weight_grad)
        call, plan = _resolve(hidden, own, rows, objective, asked, teacher)
        batch = {"denominator": denominator, "prompt_tokens": prompt_tokens, "group": group}
        return call, plan, objective.inputs(None, call.rows, fields, **batch)

    def shared(call: Call, plan: LossPlan, inputs: Inputs) -> dict[str, Any]:
        """Over the ranks that have parts of the same samples."""
        return objective.facts_over_samples(inputs, denominator) | {"the dtype of hidden": str(call.dtype)}

    with explained(NAME, memory, weight_grad=weight_grad):
        hidden, own, asked = as_products_take(hidden, weight, asked)
        needs = needs_gradient(hidden, own, asked)
        facts = {"whether a gradient is recorded": any(needs)} | head_fact(any(needs[1:]))
        call, plan, inputs = agree_if(
            check_group,
            group,
            NAME,
            lambda: together(asked, resolve, lambda made: _facts(*made, objective, teacher) | facts),
            lambda made: shared(*made) | facts,
        )
        work = (call, plan, objective, inputs, grad_scale, drop_zeros, teacher)
        loss, metrics, stats = evaluate(hidden, own, *work)
    return (loss, metrics, stats) if return_stats else (loss, metrics)


def evaluate(
    hidden: Tensor,
    weight: Tensor,
    call: Call,
    plan: LossPlan,
    objective: Objective | Preference,
    inputs: Inputs,
    grad_scale: float | Tensor,
    drop_zeros: bool,
    teacher: Teacher | Teachers | None = None,
) -> tuple[Tensor, Metrics, TokenStats | DivergenceStats]:
    """Loss, metrics and results without graph of a call that was checked."""
    if plan.first is None:
        # A frozen weight has no gradient to add, so its buffer binds nobody to a factor known in advance.
        into_buffer = call.asked.weight_grad is not None and weight.requires_grad
        scale = torch.as_tensor(grad_scale).to(call.gain) if into_buffer else None
        order, taught = None, None
        if isinstance(teacher, Teacher) and teacher.top_k is not None:
            taught = teacher.top_k, _kind(objective)
        elif teacher is not None:
            call, order = grouped(teacher, call)
            inputs = inputs if order is None else inputs.ordered(order)
            taught = Source.of(teacher, call), _kind(objective)
        work = (call, plan, objective, inputs, drop_zeros, taught)
        low_rank = call.asked.low_rank or (None, None)
        loss, *values, metrics = _OnePass.apply(hidden, weight, call.asked.bias, *low_rank, scale, *work)
        return loss, metrics, TokenStats(*values) if taught is None else DivergenceStats(*ungrouped(values, order))
    # The first of two passes; backward is the second. The budget is that of log-probs.
    if isinstance(plan.first, PairPlan):
        assert teacher is not None
        stats = score_pair(hidden, weight, call, teacher, _kind(objective))
    elif teacher is not None and call.asked.kept is not None:
        stats = score_kept(hidden, weight, first_pass(call), plan.first, teacher, _kind(objective))
    elif isinstance(teacher, Teacher) and teacher.top_k is not None:
        stats = score_listed(hidden, weight, first_pass(call), plan.first, teacher.top_k, _kind(objective))
    else:
        stats = score(hidden, weight, first_pass(call), plan.first)
    log_z = stats.log_z if objective.log_z else None
    mean_logit = stats.mean_logit if objective.stats and isinstance(stats, TokenStats) else None
    of_rows = {"logprob": stats.logprob, "entropy": stats.entropy, "log_z": log_z, "mean_logit": mean_logit}
    loss, metrics = objective.evaluate(replace(inputs, **of_rows, divergence=getattr(stats, "divergence", None)))
    return loss, metrics, stats._make(None if x is None else x.detach() for x in stats)


def _kind(objective: Objective | Preference) -> Divergence:
    """The divergence of an objective that goes with a teacher."""
    return Divergence.of(getattr(objective, "divergence", None) or "reverse_kl")


def loss_plan(
    hidden: Tensor,
    weight: Tensor,
    rows: Any,
    objective: Objective | Preference,
    teacher: Teacher | Teachers | None = None,
    **options: Any,
) -> LossPlan:
    """Which route :func:`linear_policy_loss` takes with these arguments, and why. Computes nothing."""
    _check_objective(objective)
    asked = Options.named({"memory": MEMORY, **options}, NAME)
    hidden, weight, asked = as_products_take(hidden, weight, asked)
    return _resolve(hidden, weight, rows, objective, asked, teacher)[1]


def _resolve(
    hidden: Tensor,
    weight: Tensor,
    rows: Any,
    objective: Objective | Preference,
    asked: Options,
    teacher: Teacher | Teachers | None = None,
) -> tuple[Call, LossPlan]:
    divergence = getattr(objective, "divergence", None)
    if (teacher is None) != (divergence is None):
        came = "no teacher" if teacher is None else "a teacher"
        raise LogitlessError(
            f"{NAME}: the objective has divergence={divergence!r} and the call {came}. They go together."
        )
    if objective.stats and (asked.kept is not None or teacher is not None):
        given = "teacher=" if asked.kept is None else "kept="
        raise LogitlessError(
            f"{NAME}: label_smoothing spreads the target over the whole vocabulary, and does not go with {given}."
        )
    call = resolve_hidden(hidden, weight, rows, replace(asked, entropy=objective.entropy, stats=objective.stats))
    if objective.log_z and call.over_support:
        raise LogitlessError(
            f'{NAME}: the objective has a z_coef, but with scope="support" there is no log Z of the vocabulary. Leave '
            f"one of them out."
        )
    if teacher is not None:
        call, teacher = with_teacher(call, hidden, objective, teacher)
    return call, plan_of(call, hidden, weight, objective, teacher)


def with_teacher(
    call: Call, hidden: Tensor, objective: Objective | Preference, teacher: Teacher | Teachers
) -> tuple[Call, Teacher | Teachers | None]:
    """The student's call, with its teacher checked; and the teacher, if its head is multiplied chunk by chunk."""
    if call.asked.low_rank is not None:
        raise LogitlessError(
            f"{NAME}: teacher= does not go with a LoRA. Merge it into one weight, weight + scale * b @ a."
        )
    check_pair(call, hidden, teacher, _kind(objective))
    if isinstance(teacher, Teacher) and teacher.top_k is not None:
        # The other terms of the objective are over the vocabulary, and so are the log-probs that go with them.
        return listing(call, teacher.top_k), None
    if call.asked.kept is None:
        return call, teacher
    # Of the teacher there are dot products alone, and an entropy is among the results of two models.
    asked = replace(call.asked, entropy=objective.entropy or "value")
    return replace(call, asked=asked, entropy=True), None


def _facts(
    call: Call, plan: LossPlan, inputs: Inputs, objective: Objective | Preference, teacher: Teacher | Teachers | None
) -> dict[str, Any]:
    """What the ranks of a vocabulary group must agree on: each chunk is a collective, and all compute one loss."""
    chunks = f"{plan.kind} in {len(plan.chunks)} chunks of at most {plan.rows} rows"
    facts = {
        "the objective": objective.described(),
        "the fields": ", ".join(sorted(inputs.fields)),
        "the weights of the rows (denominator=, masks)": fingerprint(inputs.weight),
        "how to go (memory=, objective)": chunks,
    }
    if teacher is not None:
        facts |= pair_facts(teacher, _kind(objective))
    given = {**inputs.fields, **inputs.batch}
    return call.facts() | facts | {name: fingerprint(x) for name, x in sorted(given.items())}


class _Saved(NamedTuple):
    """Gradients made in forward, the factor that they have already, and the mark of the run that made them."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    low: Tensor | None
    scale: Tensor | None
    mark: Tensor


class _OnePass(torch.autograd.Function):
    """The seam to autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        y: Tensor | None,
        b: Tensor | None,
        scale: Tensor | None,
        call: Call,
        plan: LossPlan,
        objective: Objective | Preference,
        inputs: Inputs,
        drop_zeros: bool,
        taught: tuple[Source | TopK, Divergence] | None,
    ) -> Any:
        column = call.column_of(call.rows.target)
        p = Projection.of(selected_rows(hidden, call), weight, bias, column, call)
        # Only gradients that go to a buffer have their factor in advance.
        buffer = None if scale is None else call.asked.weight_grad
        needs = ctx.needs_input_grad
        want = (needs[0] or needs[3], *needs[1:3])
        loop = OnePass.over(
            p,
            plan,
            objective,
            inputs,
            want=want,
            weight_grad=buffer,
            scale=scale,
            drop_zeros=drop_zeros,
            taught=taught,
        )
        out = loop.run()
        d_hidden, d_weight, d_bias, d_low = out.gradients
        # Whoever runs forward again for backward (a checkpoint) brings the mark of that run, and not of this one.
        ctx.run = object()
        mark = torch.tensor(id(ctx.run), device="cpu")
        ctx.save_for_backward(*_Saved(d_hidden, d_weight if buffer is None else None, d_bias, d_low, out.scale, mark))
        ctx.call, ctx.shape = call, hidden.shape
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias, b)]
        ctx.into_buffer, ctx.spent = buffer is not None, False
        ctx.mark_non_differentiable(*out.stats)
        return out.loss, *out.stats, out.metrics

    @staticmethod
    def backward(ctx: Any, g_loss: Tensor, *rest: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise no_second_derivative(NAME)
        if ctx.spent:
            raise LogitlessError(
                f"{NAME}: second backward through a call with weight_grad=, whose buffer was added to in forward, "
                f"once. Leave weight_grad out to keep the graph, or run forward again."
            )
        saved = _Saved(*ctx.saved_tensors)
        if ctx.into_buffer and int(saved.mark) != id(ctx.run):
            raise LogitlessError(
                f"{NAME}: forward ran again in backward, as torch.utils.checkpoint with use_reentrant=False does, and "
                f"weight_grad was added to both times. Call it outside of the checkpoint, or leave weight_grad out."
            )
        with explained(NAME, ctx.call.asked.memory, already="weight_grad" if ctx.into_buffer else None):
            factor = _factor(g_loss, saved.scale, ctx.into_buffer)
            d_rows, d_weight, d_bias, d_low = (
                None if x is None else _scaled(ctx.call.backend, x, factor, dtype)
                for x, dtype in zip(saved[:4], ctx.dtypes, strict=True)
            )
            needs = ctx.needs_input_grad
            d_hidden, d_y = hidden_gradients(d_rows, ctx.shape, ctx.call, (needs[0], needs[3]))
        # Not before: a backward that ran out of memory may come again.
        ctx.spent = ctx.into_buffer
        return (d_hidden, d_weight, d_bias, d_y, d_low, *(None,) * 7)


def _factor(g_loss: Tensor, scale: Tensor | None, into_buffer: bool) -> Tensor:
    """What the gradients made in forward are to be multiplied by."""
    if not into_buffer:
        return g_loss if scale is None else g_loss / scale
    assert scale is not None
    # The same factor may have been rounded on the way through the loss.
    same = (g_loss - scale).abs() <= 1e-5 * scale.abs()
    if inspectable(g_loss) and not bool(same):
        raise LogitlessError(
            f"{NAME}: the gradient {float(g_loss)} arrived at the loss, but weight_grad was added to with grad_scale "
            f"{float(scale)}. Pass grad_scale= the factor that the loss is multiplied by before backward."
        )
    return torch.where(same, torch.ones_like(g_loss), torch.nan)


def _scaled(backend: str, x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * factor`` rounded once to ``dtype``. A new tensor, because backward may come again."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    as_rows = (x, out) if x.dim() == 2 else (x[:, None], out[:, None])
    load(backend).rescale(as_rows[0], factor, as_rows[1])
    return out


def _check_objective(objective: Any) -> None:
    if not isinstance(objective, Objective | Preference):
        hint = f" Pass Objective.recipe({objective!r})." if isinstance(objective, str) else ""
        raise LogitlessError(
            f"{NAME}: objective must be an Objective or a Preference but is {type(objective).__name__}.{hint}"
        )


def _check_grad_scale(grad_scale: float | Tensor, weight_grad: Tensor | None) -> None:
    if isinstance(grad_scale, Tensor) and grad_scale.dim():
        raise LogitlessError(f"{NAME}: grad_scale must be a number or 0-dim but has shape {list(grad_scale.shape)}.")
    if weight_grad is None and (isinstance(grad_scale, Tensor) or grad_scale != 1.0):
        raise LogitlessError(
            f"{NAME}: grad_scale goes with weight_grad, which is added to before the gradient of the loss arrives. "
            f"Without weight_grad scale the loss instead."
        )
