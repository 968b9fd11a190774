"""``policy_loss``: the loss of a policy update, gradients included, from logits that exist or that are never computed.

    check, resolve, choose the route  ->  one pass: chunks of rows, gradients made on the way; backward scales them
                                      ->  two passes: log-probs of all rows, then the objective

The autograd Function is a seam: what it computes is in ``passes/one_pass`` and ``objectives``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from logitless.call import PLAIN, Asked, Call, Operands, default_memory, resolve, together
from logitless.call.dry import ACTIVE, announce, under_way
from logitless.call.unchanged import Unchanged
from logitless.collectives import agree_if, fingerprint, resolve_group
from logitless.errors import LogitlessError, no_second_derivative
from logitless.errors.arguments import check_flags, refuse_transforms
from logitless.notes import add_note, explained, version_of
from logitless.objectives import Inputs, Metrics, Objective, Preference
from logitless.operands import Given, Kept, Logits, Teacher, Teachers
from logitless.operands.unit import READ, end_reading
from logitless.passes.one_pass import OnePass, with_results
from logitless.passes.whole import teacher_rows
from logitless.readings.outcomes import Sent
from logitless.route import Collective, Plan, first_pass, in_words, loss_plan, over_samples, over_vocabulary
from logitless.rows import Rows
from logitless.score import score, with_teacher
from logitless.sources.linear import Projection, hidden_gradients, selected_rows
from logitless.sources.teachers import TeacherRows, grouped, ungrouped
from logitless.spec import Head, TokenStats, inspectable, untraced

NAME = "policy_loss"


class Batch(NamedTuple):
    """What a loss is taken of besides the logits.

    Attributes:
        objective: what to minimise.
        fields: ``[R]`` tensors by name, as for :meth:`Objective.__call__`.
        denominator, prompt_tokens, group: as there.
        drop_zeros: leave rows whose gradient is exactly zero out of the last two products.
        check_group: compare the call over the group first.
    """

    objective: Objective | Preference
    fields: dict[str, Any]
    denominator: float | Tensor | None = None
    prompt_tokens: Tensor | None = None
    group: Any = None
    drop_zeros: bool = True
    check_group: bool = False


@overload
def policy_loss(
    logits: Tensor | Given,
    rows: Rows | Tensor | tuple[Tensor, Tensor],
    objective: Objective | Preference,
    *,
    head: Head | None = None,
    kept: Kept | None = None,
    teacher: Tensor | Teacher | Teachers | None = None,
    memory: int | str | None = None,
    backend: Literal["auto", "reference", "tiled", "triton"] | str = "auto",
    drop_zeros: bool = True,
    return_stats: Literal[False] = False,
    denominator: float | Tensor | None = None,
    prompt_tokens: Tensor | None = None,
    group: Any = None,
    check_group: bool = False,
    **fields: Tensor | str | None,
) -> tuple[Tensor, Metrics]: ...


@overload
def policy_loss(
    logits: Tensor | Given,
    rows: Rows | Tensor | tuple[Tensor, Tensor],
    objective: Objective | Preference,
    *,
    head: Head | None = None,
    kept: Kept | None = None,
    teacher: Tensor | Teacher | Teachers | None = None,
    memory: int | str | None = None,
    backend: Literal["auto", "reference", "tiled", "triton"] | str = "auto",
    drop_zeros: bool = True,
    return_stats: Literal[True],
    denominator: float | Tensor | None = None,
    prompt_tokens: Tensor | None = None,
    group: Any = None,
    check_group: bool = False,
    **fields: Tensor | str | None,
) -> tuple[Tensor, Metrics, TokenStats]: ...


def policy_loss(
    logits: Tensor | Given,
    rows: Rows | Tensor | tuple[Tensor, Tensor],
    objective: Objective | Preference,
    *,
    head: Head | None = None,
    kept: Kept | None = None,
    teacher: Tensor | Teacher | Teachers | None = None,
    memory: int | str | None = None,
    backend: Literal["auto", "reference", "tiled", "triton"] | str = "auto",
    drop_zeros: bool = True,
    return_stats: bool = False,
    denominator: float | Tensor | None = None,
    prompt_tokens: Tensor | None = None,
    group: Any = None,
    check_group: bool = False,
    **fields: Tensor | str | None,
) -> Any:
    """The objective's loss and its gradients. From :class:`Logits` in three matrix products, without storing the
    logits.

    Same loss and gradients as ``objective(logprobs(logits, rows, ...), rows, ...)``, which takes four. Gradients are
    made in forward, for an upstream gradient of 1; backward multiplies them by the one that arrives. From logits that
    exist nothing is multiplied: they are read in forward and once more in backward, which writes their gradient.

    Args:
        logits, rows, head, kept, backend: as for :func:`logprobs`. Batch invariance takes two passes; where the kept
            ids' scope is the support there is no product at all, and the objective's entropy is that of the support.
            With ``Logits(weight_grad=)`` the weight's gradient is added to the buffer *in forward*, times
            ``grad_scale``; not where no gradient is recorded. An error on the way carries a note if a part was added.
        objective: what to minimise: an :class:`Objective`, or a :class:`Preference` on pairs of samples.
        teacher: for an objective with a ``divergence``, as for :func:`logprobs`. Four products instead of six. With K
            log-probs of a teacher, three products, of the student alone.
        memory: bound on what is held of a chunk of rows: its logits or, where that makes for short chunks, 16-bit
            exponentials of them. Gradients and their accumulators come on top. None: 16MiB on logits that exist,
            1GiB from hidden states.
        drop_zeros: leave rows whose gradient is exactly zero (clipped, zero advantage, masked) out of the last two
            products. Their number is fetched per chunk while the device goes on; of the last one only where chunks
            before it had some, of a single one only where it is large. A CUDA graph can fetch nothing, and
            multiplies all rows.
        return_stats: return the rows' results, too.
        denominator, prompt_tokens, group, check_group, fields: as for :meth:`Objective.__call__`.

    Returns:
        ``(loss, metrics)`` as from the objective: a part of the batch's loss, 0-dim, and :class:`Metrics`. With
        ``return_stats`` also the rows' :class:`TokenStats` without graph: the old log-probs of later epochs, say.
        ``explain(policy_loss, logits, rows, objective, ...)`` tells whether it goes in one pass.

    Raises:
        LogitlessError: an argument cannot be honoured; the text says which and why.

    >>> rows = Rows.packed([[0, 1, 2]], [2])
    >>> logits = Logits(torch.zeros(3, 2), torch.zeros(4, 2))
    >>> loss, metrics = policy_loss(logits, rows, Objective(), old_logprob="current", advantage=torch.ones(2))
    >>> float(loss)
    -1.0
    """
    if not all(isinstance(x, bool) for x in (drop_zeros, return_stats, check_group)):
        check_flags(NAME, drop_zeros=drop_zeros, return_stats=return_stats, check_group=check_group)
    batch = Batch(objective, fields, denominator, prompt_tokens, group, drop_zeros, check_group)
    teacher = Teacher(teacher) if isinstance(teacher, Tensor) else teacher
    asked = Asked(head=head, kept=kept, teacher=teacher, memory=memory, backend=backend)
    if torch.compiler.is_compiling():
        return untraced(_policy_loss)(logits, rows, asked, batch, return_stats)
    return _policy_loss(logits, rows, asked, batch, return_stats)


def _policy_loss(logits: Any, rows: Any, asked: Asked, batch: Batch, return_stats: bool) -> tuple[Any, ...]:
    if torch._C._are_functorch_transforms_active():
        refuse_transforms(NAME)
    shard = getattr(logits, "shard", None)
    written = logits._stands.linear.weight_grad if isinstance(logits, Logits) else None
    before, since, loss = None if written is None else version_of(written), len(READ.units), None
    try:
        if batch.check_group or (shard is not None and shard.check_calls):
            call, plan, operands, inputs = _agreed(logits, rows, asked, batch, shard)
        else:
            call, plan, operands, inputs = resolve_loss(logits, rows, asked, batch)
        if ACTIVE and under_way() is not None:
            announce(call, with_collectives(call, plan, operands, batch))
        loss, metrics, stats = evaluate(call, plan, operands, inputs, batch)
        return (loss, metrics, stats) if return_stats else (loss, metrics)
    except BaseException as error:
        changed = written is not None and version_of(written) != before
        memory = default_memory(logits, chunks=True) if asked.memory is None else asked.memory
        add_note(error, NAME, memory, "weight_grad" if changed else None)
        raise
    finally:
        if len(READ.units) > since:
            end_reading(since, (loss,))


def _agreed(logits: Any, rows: Any, asked: Asked, batch: Batch, shard: Any) -> tuple[Call, Plan, Operands, Inputs]:
    """:func:`resolve_loss`, compared over the ranks that share the vocabulary, or have parts of the same samples."""

    def in_samples(made: tuple[Call, Plan, Operands, Inputs]) -> dict[str, Any]:
        call, _, _, inputs = made
        return batch.objective.facts_over_samples(inputs, batch.denominator) | {
            "the dtype of the logits or hidden states": str(call.dtype),
            "whether a gradient is recorded": any(call.needs),
            "what is sent": tuple(in_words(_over_samples(call, batch))),
        }

    def in_group() -> tuple[Call, Plan, Operands, Inputs]:
        resolved = partial(resolve_loss, logits, rows, asked, batch)
        return together(resolved, shard, NAME, lambda made: loss_facts(*made, batch))

    return agree_if(batch.check_group, batch.group, NAME, in_group, in_samples)


def resolve_loss(logits: Any, rows: Any, asked: Asked, batch: Batch) -> tuple[Call, Plan, Operands, Inputs]:
    """The call of :func:`policy_loss`, its route, its operands and the objective's inputs, all checked."""
    objective = batch.objective
    if not isinstance(objective, Objective | Preference):
        hint = f" Pass Objective.recipe({objective!r})." if isinstance(objective, str) else ""
        came = type(objective).__name__
        raise LogitlessError(f"{NAME}: objective must be an Objective or a Preference but is {came}.{hint}")
    divergence = getattr(objective, "divergence", None)
    if (asked.teacher is None) != (divergence is None):
        came = "no teacher" if asked.teacher is None else "a teacher"
        raise LogitlessError(
            f"{NAME}: the objective has divergence={divergence!r} and the call {came}. They go together."
        )
    if objective.stats and asked.kept is not None:
        raise LogitlessError(
            f"{NAME}: label_smoothing spreads the target over the whole vocabulary, and does not work with kept=."
        )
    asked = replace(asked, entropy=objective.entropy, stats=objective.stats, divergence=divergence or "reverse_kl")
    call, operands = resolve(NAME, logits, rows, asked, chunks=True)
    linear = call.linear
    scaled = linear is not None and (isinstance(linear.grad_scale, Tensor) or linear.grad_scale != 1.0)
    if linear is not None and scaled and linear.weight_grad is None:
        raise LogitlessError(
            f"{NAME}: grad_scale goes with weight_grad, which is added to before the gradient of the loss arrives. "
            f"Without weight_grad scale the loss instead."
        )
    if objective.log_z and call.over_support:
        raise LogitlessError(
            f"{NAME}: the objective has a z_coef, but where the scope is the support there is no log Z of the "
            f"vocabulary. Leave one of them out."
        )
    if asked.teacher is not None:
        call = with_teacher(call, operands)
    plan = loss_plan(call, objective)
    if ACTIVE and (dry := under_way()) is not None and dry.stop:
        # `explain` needs no fields: the route does not depend on them.
        announce(call, with_collectives(call, plan, operands, batch))
    more = {"denominator": batch.denominator, "prompt_tokens": batch.prompt_tokens, "group": batch.group}
    return call, plan, operands, objective.inputs(None, call.rows, batch.fields, **more)


def with_collectives(call: Call, plan: Plan, operands: Operands, batch: Batch) -> Plan:
    """The plan with all that ranks send each other: the objective comes between log-probs and their backward."""
    found = [*over_vocabulary(call, plan, operands), *_over_samples(call, batch)]
    order = ("forward facts", "forward vocabulary", "forward sequence", "backward sequence", "backward vocabulary")
    found.sort(key=lambda x: order.index(f"{x.when} {'facts' if x.kind == 'all_gather_object' else x.over}"))
    return replace(plan, collectives=tuple(found))


def _over_samples(call: Call, batch: Batch) -> tuple[Collective, ...]:
    group, summed = resolve_group(batch.group, f"{NAME}: group"), batch.fields.get("ref_sample_logprob") is not None
    return over_samples(call, batch.objective, group, batch.check_group, summed)


def evaluate(
    call: Call, plan: Plan, operands: Operands, inputs: Inputs, batch: Batch
) -> tuple[Tensor, Metrics, TokenStats]:
    """Loss, metrics and results without graph of a call that was checked."""
    objective = batch.objective
    if plan.first is None:
        return _one_pass(call, plan, operands, inputs, batch)
    # Two passes: log-probs here, and their backward is the second one. The budget is that of log-probs.
    stats = score(first_pass(call), plan.first, operands, whole=True)
    loss, metrics = objective.evaluate(with_results(objective, call, inputs, stats))
    return loss, metrics, stats.each(lambda x: x.detach())


def _one_pass(
    call: Call, plan: Plan, operands: Operands, inputs: Inputs, batch: Batch
) -> tuple[Tensor, Metrics, TokenStats]:
    linear, weight, teacher = call.linear, operands.weight, call.asked.teacher
    assert linear is not None
    assert weight is not None
    # A frozen weight adds nothing to its buffer, so no factor has to be known in advance.
    into_buffer = linear.weight_grad is not None and weight.requires_grad
    scale = _as_tensor(linear.grad_scale, call.gain) if into_buffer else None
    order, beside = None, None
    if isinstance(teacher, Teacher) and teacher.top_k is not None:
        beside = Sent.of(teacher.top_k, call.rows.target, call.gain.dtype)
    elif isinstance(teacher, Teacher | Teachers):
        call, order = grouped(teacher, call)
        inputs = inputs if order is None else inputs.ordered(order)
        beside = teacher_rows(teacher, call)
    loss, *values, metrics, names = _OnePass.apply(*operands[1:], scale, call, plan, inputs, batch, beside)  # pyright: ignore[reportGeneralTypeIssues]
    stats = TokenStats(**dict(zip(names, values, strict=True)))
    return loss, metrics, stats if order is None else ungrouped(stats, order)


def loss_facts(call: Call, plan: Plan, operands: Operands, inputs: Inputs, batch: Batch) -> dict[str, Any]:
    """What the ranks of a vocabulary group must agree on: each chunk is a collective, and all compute one loss."""
    given = {**inputs.fields, **inputs.batch}
    return {
        **call.facts(),
        # The objective decides on the route, so it is compared before the route is.
        "the objective": batch.objective.described(),
        "the fields": ", ".join(sorted(inputs.fields)),
        "the weights of the rows (denominator=, masks)": fingerprint(inputs.weight),
        "whether a gradient is recorded": any(call.needs),
        **plan.facts("memory=, objective"),
        **{name: fingerprint(x) for name, x in sorted(given.items())},
        "what is sent": tuple(in_words(with_collectives(call, plan, operands, batch).collectives)),
    }


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
        plan: Plan,
        inputs: Inputs,
        batch: Batch,
        teacher: TeacherRows | Sent | None,
    ) -> Any:
        operands, column = Operands(None, hidden, weight, bias, y, b), call.column
        p = Projection.of(selected_rows(operands, call), operands, column, call)
        # Only a gradient that goes to a buffer is multiplied by its factor in forward.
        buffer = None if scale is None or call.linear is None else call.linear.weight_grad
        needs = ctx.needs_input_grad
        loop = OnePass.over(
            p,
            plan,
            batch.objective,
            inputs,
            want=(needs[0] or needs[3], *needs[1:3]),
            weight_grad=buffer,
            scale=scale,
            drop_zeros=batch.drop_zeros,
            teacher=teacher,
        )
        out = loop.run()
        d_hidden, d_weight, d_bias, d_low = out.gradients
        # A checkpoint that runs forward again saves the mark of that run: another one than this.
        ctx.run = object()
        mark = torch.tensor(id(ctx.run), device="cpu")
        ctx.save_for_backward(d_hidden, d_weight if buffer is None else None, d_bias, d_low, out.scale, mark)
        ctx.call, ctx.shapes = call, (hidden.shape, None if y is None else y.shape)
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias, b)]
        # rows.index is the only argument that backward reads again.
        seen = () if call.index is None else (("rows.index", call.index, call.index._version),)
        ctx.unchanged = Unchanged(NAME, seen)
        ctx.into_buffer, ctx.spent = buffer is not None, False
        stats = {name: x for name, x in out.stats._asdict().items() if x is not None}
        ctx.mark_non_differentiable(*stats.values())
        return out.loss, *stats.values(), out.metrics, tuple(stats)

    @staticmethod
    def backward(ctx: Any, g_loss: Tensor, *rest: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise no_second_derivative(NAME)
        if ctx.spent:
            raise LogitlessError(
                f"{NAME}: second backward through a call with weight_grad=, whose buffer was added to in forward, "
                f"once. Leave weight_grad out to keep the graph, or run forward again."
            )
        ctx.unchanged.check()
        *made, scale, mark = ctx.saved_tensors
        if ctx.into_buffer and int(mark) != id(ctx.run):
            raise LogitlessError(
                f"{NAME}: forward ran again in backward, as torch.utils.checkpoint with use_reentrant=False does, and "
                f"weight_grad was added to both times. Call it outside of the checkpoint, or leave weight_grad out."
            )
        call: Call = ctx.call
        with explained(NAME, call.budget, already="weight_grad" if ctx.into_buffer else None):
            factor = _factor(g_loss, scale, ctx.into_buffer)
            d_rows, d_weight, d_bias, d_low = (
                None if x is None else _scaled(call, x, factor, dtype)
                for x, dtype in zip(made, ctx.dtypes, strict=True)
            )
            needs = ctx.needs_input_grad
            shape, low = ctx.shapes
            d_hidden, d_y = hidden_gradients(d_rows, shape, low, call, (needs[0], needs[3]))
        # Set at the end: after running out of memory, backward may be called again.
        ctx.spent = ctx.into_buffer
        return (d_hidden, d_weight, d_bias, d_y, d_low, *(None,) * 6)


def _as_tensor(x: float | Tensor, like: Tensor) -> Tensor:
    """0-dim. A number does not become a tensor of torch's default dtype first, which may be a narrow one."""
    return x.to(like) if isinstance(x, Tensor) else torch.full((), x, dtype=like.dtype, device=like.device)


def _factor(g_loss: Tensor, scale: Tensor | None, into_buffer: bool) -> Tensor:
    """What the gradients made in forward are to be multiplied by."""
    if not into_buffer:
        return g_loss if scale is None else g_loss / scale
    assert scale is not None
    # The caller's factor may have been rounded on its way through the loss.
    same = (g_loss - scale).abs() <= 1e-5 * scale.abs()
    if inspectable(g_loss) and not bool(same):
        raise LogitlessError(
            f"{NAME}: the gradient {float(g_loss)} arrived at the loss, but weight_grad was added to with grad_scale "
            f"{float(scale)}. Pass Logits(grad_scale=) the factor that the loss is multiplied by before backward."
        )
    return torch.where(same, torch.ones_like(g_loss), torch.nan)


def _scaled(call: Call, x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * factor`` rounded once to ``dtype``. A new tensor, because backward may come again."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    as_rows = (x, out) if x.dim() == 2 else (x[:, None], out[:, None])
    call.backend.rescale(as_rows[0], factor, as_rows[1])
    return out


# A loss as one argument of a module's forward.


class LossResult(NamedTuple):
    """Results of a head that was asked for a loss; the loss comes first, where trainers look for it.

    Attributes:
        loss, metrics: as from :func:`policy_loss`.
        stats: the rows' results, without graph: the old log-probs of later epochs, say.
    """

    loss: Tensor
    metrics: Metrics
    stats: TokenStats


# A plain class: FSDP's mixed precision would look into a dataclass or a container, and round its float32 values.
class Loss:
    """A policy loss to be computed where the head's weight is: in the forward of a module, called through its wrappers.

    :class:`PolicyHead` and models patched by ``logitless.adapters.transformers.patch`` take it as ``loss=``.

    Args:
        objective: what to minimise, an :class:`Objective` or a :class:`Preference`.
        temperature: of sampling, a number or one value per row; None leaves it to the head.
        denominator, prompt_tokens, group, check_group, fields: as for :meth:`Objective.__call__`.

    >>> Loss(Objective(), old_logprob="current", denominator=12)
    Loss(Objective(policy='ppo_clip', clip=(0.2, 0.2), reduce='token_mean'), old_logprob, denominator)
    """

    def __init__(
        self,
        objective: Objective | Preference,
        *,
        temperature: float | Tensor | None = None,
        denominator: float | Tensor | None = None,
        prompt_tokens: Tensor | None = None,
        group: Any = None,
        check_group: bool = False,
        **fields: Tensor | str | None,
    ) -> None:
        if not isinstance(objective, Objective | Preference):
            raise LogitlessError(
                f"Loss: objective must be an Objective or a Preference but is {type(objective).__name__}. Make one, as "
                f'Objective.recipe("grpo"), and give its inputs by name: Loss(objective, advantage=..., ...).'
            )
        check_flags("Loss", check_group=check_group)
        self.objective = objective
        self.temperature = temperature
        batch = {"denominator": denominator, "prompt_tokens": prompt_tokens, "group": group}
        self.arguments: dict[str, Any] = {**fields, **batch, "check_group": check_group}

    def __repr__(self) -> str:
        everything = {**self.arguments, "temperature": self.temperature}
        given = [name for name, x in everything.items() if x is not None and x is not False]
        return f"Loss({', '.join([repr(self.objective), *given])})"

    def of(self, logits: Tensor | Given, rows: Any, *, head: Head | None = None, **options: Any) -> LossResult:
        """The loss of these rows; options are those of :func:`policy_loss`."""
        if self.temperature is not None:
            head = replace(head or PLAIN, temperature=self.temperature)
        for name, own in self.arguments.items():
            given = options.get(name)
            if own is not None and own is not False and given is not None and given is not own:
                raise LogitlessError(f"Loss: {name} was given to the Loss and to its head. Give it in one place.")
        if options.pop("return_stats", True) is False:
            raise LogitlessError("Loss: return_stats=False, but a Loss returns the rows' results always. Leave it out.")
        arguments = {**self.arguments, **options, "head": head, "return_stats": True}
        return LossResult(*policy_loss(logits, rows, self.objective, **arguments))
