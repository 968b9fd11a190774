"""``linear_policy_loss``: the loss of a policy update from hidden states and the head's weight, gradients included.

    check and plan  ->  one pass: chunks of rows, gradients made on the way  ->  backward hands them out, scaled
                    ->  two passes: objective(linear_logprobs(...)), where one pass cannot be

The autograd Function is a seam: what it computes is in ``one_pass``, ``objectives`` and ``sweep``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from logitless.backends import load
from logitless.call import Call, Options, Prepared, as_autocast_would, local_weight, prepare
from logitless.checks import prepare_over
from logitless.errors import LogitlessError, no_second_derivative
from logitless.from_hidden.logprobs import score_rows
from logitless.from_hidden.projection import hidden_gradient, projection_of, selected_rows
from logitless.kept import Kept
from logitless.objectives import Inputs, Objective
from logitless.policy_loss.one_pass import sweep_loss
from logitless.policy_loss.plan import LossPlan, LossShape, choose_loss_plan, find_obstacle, two_pass_memory
from logitless.results import target_column
from logitless.rows import Rows
from logitless.spec import Head, TokenStats, VocabShard

NAME = "linear_policy_loss"

MEMORY = "1GiB"
"""What a chunk of rows may take unless told otherwise."""


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    rows: Rows | Tensor | tuple[Tensor, Tensor],
    objective: Objective,
    *,
    bias: Tensor | None = None,
    head: Head | None = None,
    shard: VocabShard | None = None,
    kept: Kept | None = None,
    hidden_grad: Literal["reduced", "partial"] = "reduced",
    sequence_parallel: bool = False,
    weight_grad: Tensor | None = None,
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
    return_stats: bool = False,
    **fields: Tensor | str | None,
) -> Any:
    """The objective's loss and its gradients in three matrix products, without storing the logits.

    Same loss and gradients as ``objective(linear_logprobs(hidden, weight, rows, ...), rows, ...)``, which takes four.
    Gradients are made in forward, for an upstream gradient of 1; backward multiplies them by the one that arrives.

    Args:
        hidden, weight, rows, bias, head, shard, kept, hidden_grad, sequence_parallel, match, tf32, batch_invariant,
            backend: as for :func:`linear_logprobs`. Kept ids and batch invariance take two passes.
        objective: what to minimise.
        weight_grad: float32 ``[V, D]`` buffer that the weight's gradient is added to, *in forward*, times
            ``grad_scale``. ``weight.grad`` is then left alone. Not added to where no gradient is recorded.
        grad_scale: with ``weight_grad``, the gradient that will arrive at the loss in backward (a loss scale over the
            number of micro-batches, say), a number or a 0-dim tensor. Another one arriving raises on CPU and makes the
            gradient of hidden NaN on an accelerator, where comparing would stall it.
        drop_zeros: leave rows whose gradient is exactly zero (clipped, zero advantage, masked) out of the last two
            products. Their number is fetched per chunk while the device goes on.
        memory: bound on what is held of a chunk of rows: its logits or, where that makes for short chunks, 16-bit
            exponentials of them. Gradients and their accumulators come on top.
        denominator, prompt_tokens, group, fields: as for :meth:`Objective.__call__`.

    Returns:
        ``(loss, metrics)`` as from the objective: a part of the batch's loss, 0-dim, and :class:`Metrics`. With
        ``return_stats`` also the rows' :class:`TokenStats` without graph: the old log-probs of later epochs, say.
        ``explain(hidden, weight, rows, objective=...)`` tells whether it goes in one pass.

    Raises:
        LogitlessError: an argument cannot be honoured; the text says which and why.

    >>> rows = Rows.packed([[0, 1, 2]], [2])
    >>> zeros = torch.zeros(3, 2), torch.zeros(4, 2)
    >>> loss, metrics = linear_policy_loss(*zeros, rows, Objective(), old_logprob="current", advantage=torch.ones(2))
    >>> float(loss)
    -1.0
    """
    _check_objective(objective)
    asked = Options(
        bias=bias,
        entropy=objective.entropy,
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
        caller=NAME,
    )
    _check_grad_scale(grad_scale, weight_grad)

    def check() -> tuple[_Resolved, Inputs]:
        call = _resolve(hidden, weight, rows, objective, asked)
        batch = {"denominator": denominator, "prompt_tokens": prompt_tokens, "group": group}
        return call, objective.inputs(None, call.ready.rows, fields, **batch)

    call, inputs = prepare_over(shard, NAME, check, lambda made: made[0].facts())
    if call.recorded and call.plan.kind == "one pass":
        # A frozen weight has no gradient to add, so its buffer binds nobody to a factor known in advance.
        buffer = weight_grad if call.weight.requires_grad else None
        scale = None if buffer is None else torch.as_tensor(grad_scale).to(call.ready.gain)
        planned = call.ready.rows
        vectors = (None if planned.in_order else planned.index, planned.target, call.ready.gain)
        job = _Job(call.ready.call, call.plan, objective, inputs, drop_zeros)
        loss, *values, metrics = _apply_outside_of_compile(*call.tracked, buffer, scale, *vectors, job)
        stats = TokenStats(*values)
    else:
        stats = _log_probs(call)
        inputs = replace(inputs, logprob=stats.logprob, entropy=stats.entropy)
        loss, metrics = objective.evaluate(inputs)
    return (loss, metrics, _detached(stats)) if return_stats else (loss, metrics)


def loss_plan(hidden: Tensor, weight: Tensor, rows: Any, objective: Objective, **options: Any) -> LossPlan:
    """Which way :func:`linear_policy_loss` goes with these arguments, and why. Computes nothing."""
    _check_objective(objective)
    asked = Options(**{"memory": MEMORY, **options}, caller=NAME)
    return _resolve(hidden, weight, rows, objective, asked).plan


class _Resolved(NamedTuple):
    """A checked call: the operands as autocast would have them, and which way to go."""

    hidden: Tensor
    weight: Tensor
    options: Options
    rows: Any
    ready: Prepared
    plan: LossPlan

    @property
    def tracked(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """What may have a gradient."""
        return self.hidden, self.weight, self.options.bias

    @property
    def recorded(self) -> bool:
        """Whether anything has."""
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in self.tracked)

    def facts(self) -> dict[str, Any]:
        """What the ranks of a vocabulary group must agree on: each chunk is a collective."""
        chunks = f"{self.plan.kind} in {len(self.plan.chunks)} chunks of at most {self.plan.rows} rows"
        more = {"how to go (memory=, objective)": chunks, "whether a gradient is recorded": self.recorded}
        return self.ready.facts(self.hidden) | more


class _Job(NamedTuple):
    """What the seam to autograd passes through besides tensors."""

    call: Call
    plan: LossPlan
    objective: Objective
    inputs: Inputs
    drop_zeros: bool


def _resolve(hidden: Tensor, weight: Tensor, rows: Any, objective: Objective, asked: Options) -> _Resolved:
    weight = local_weight(weight, asked.shard, NAME)
    hidden, weight, bias = as_autocast_would(hidden, weight, asked.bias)
    options = replace(asked, bias=bias)
    ready = prepare(hidden, weight, rows, options)
    return _Resolved(hidden, weight, options, rows, ready, _plan(hidden, ready, objective, options))


def _log_probs(call: _Resolved) -> TokenStats:
    """The first of two passes; backward is the second. The budget is that of :func:`linear_logprobs`."""
    options = replace(call.options, memory=two_pass_memory(call.ready.call.memory))
    stats = score_rows(call.hidden, call.weight, call.rows, options)
    assert stats.entropy is not None
    return TokenStats(stats.logprob.reshape(-1), stats.entropy.reshape(-1), stats.log_z.reshape(-1))


def _detached(stats: TokenStats) -> TokenStats:
    assert stats.entropy is not None
    return TokenStats(stats.logprob.detach(), stats.entropy.detach(), stats.log_z.detach())


def _plan(hidden: Tensor, ready: Prepared, objective: Objective, options: Options) -> LossPlan:
    call, rows = ready.call, ready.rows
    dtypes = {"dtype": hidden.dtype, "logits_dtype": call.logits_dtype}
    obstacle = find_obstacle(
        replay=options.kept is not None,
        invariant=options.batch_invariant,
        split_samples=objective.sequence_level and rows.cp is not None and rows.cp.size > 1,
        **dtypes,
    )
    # Chunks must be the same on every rank of a vocabulary group, each of which takes part in one all_gather per chunk.
    columns = call.columns if call.group is None else -(-call.vocab_size // call.group.size())
    shape = LossShape.of(
        rows.counts,
        columns,
        on_gpu=hidden.device.type == "cuda",
        bias=options.bias is not None,
        capped=bool(call.squash),
        **dtypes,
    )
    return choose_loss_plan(shape, objective.sequence_level, obstacle, call.memory)


class _OnePass(torch.autograd.Function):
    """The seam to autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_grad: Tensor | None,
        scale: Tensor | None,
        index: Tensor | None,
        target: Tensor,
        gain: Tensor,
        job: _Job,
    ) -> Any:
        call = job.call
        column = target_column(target, call.start, call.columns)
        p = projection_of(selected_rows(hidden, index, call), weight, bias, column, gain, call)
        boost = scale if weight_grad is not None else _boost(hidden.dtype, job.inputs)
        out = sweep_loss(
            p,
            job.plan,
            job.objective,
            job.inputs,
            want=ctx.needs_input_grad[:3],
            weight_grad=weight_grad,
            scale=boost,
            drop_zeros=job.drop_zeros,
            group=call.group,
        )
        own_weight = None if weight_grad is not None else out.gradients.weight
        # Whoever runs forward again for backward (a checkpoint) brings the mark of that run, and not of this one.
        ctx.run = object()
        mark = torch.tensor(id(ctx.run))
        ctx.save_for_backward(out.gradients.hidden, own_weight, out.gradients.bias, boost, index, mark)
        ctx.call, ctx.shape = call, hidden.shape
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        ctx.into_buffer, ctx.spent = weight_grad is not None, False
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
        ctx.spent = ctx.into_buffer
        d_hidden, d_weight, d_bias, boost, index, mark = ctx.saved_tensors
        if ctx.into_buffer and int(mark) != id(ctx.run):
            raise LogitlessError(
                f"{NAME}: forward ran again in backward, as torch.utils.checkpoint with use_reentrant=False does, and "
                f"weight_grad was added to both times. Call it outside of the checkpoint, or leave weight_grad out."
            )
        factor = _factor(g_loss, boost, ctx.into_buffer)
        d_hidden, d_weight, d_bias = (
            None if x is None else _scaled(ctx.call.backend, x, factor, dtype)
            for x, dtype in zip((d_hidden, d_weight, d_bias), ctx.dtypes, strict=True)
        )
        if d_hidden is not None:
            d_hidden = hidden_gradient(d_hidden, ctx.shape, index, ctx.call)
        return (d_hidden, d_weight, d_bias, *(None,) * 6)


# The public torch.compiler.disable is the same, but imports the compiler, and with it Triton, when applied.
@torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]
def _apply_outside_of_compile(*args: Any) -> Any:
    """A graph break: the loop over chunks is not traced."""
    return _OnePass.apply(*args)


def _boost(dtype: torch.dtype, inputs: Inputs) -> Tensor | None:
    """A power of two that brings float16 gradients, small by the number of tokens, into that format's range."""
    if dtype != torch.float16 or not len(inputs.weight):
        return None
    largest = inputs.weight.abs().max().float()
    return torch.where(largest > 0, torch.exp2(-torch.log2(largest).floor()), 1.0)


def _factor(g_loss: Tensor, boost: Tensor | None, into_buffer: bool) -> Tensor:
    """What the gradients made in forward are to be multiplied by."""
    if not into_buffer:
        return g_loss if boost is None else g_loss / boost
    assert boost is not None
    # The same factor may have been rounded on the way through the loss.
    same = (g_loss - boost).abs() <= 1e-5 * boost.abs()
    if g_loss.device.type == "cpu" and not bool(same):
        raise LogitlessError(
            f"{NAME}: the gradient {float(g_loss)} arrived at the loss, but weight_grad was added to with grad_scale "
            f"{float(boost)}. Pass grad_scale= the factor that the loss is multiplied by before backward."
        )
    return torch.where(same, torch.ones_like(g_loss), torch.nan)


def _scaled(backend: str, x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * factor`` rounded once to ``dtype``. A new tensor, because backward may come again."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    as_rows = (x, out) if x.dim() == 2 else (x[:, None], out[:, None])
    load(backend).rescale(as_rows[0], factor, as_rows[1])
    return out


def _check_objective(objective: Any) -> None:
    if not isinstance(objective, Objective):
        raise LogitlessError(f"{NAME}: objective must be an Objective but is {type(objective).__name__}.")


def _check_grad_scale(grad_scale: float | Tensor, weight_grad: Tensor | None) -> None:
    if isinstance(grad_scale, Tensor) and grad_scale.dim():
        raise LogitlessError(f"{NAME}: grad_scale must be a number or 0-dim but has shape {list(grad_scale.shape)}.")
    if weight_grad is None and (isinstance(grad_scale, Tensor) or grad_scale != 1.0):
        raise LogitlessError(
            f"{NAME}: grad_scale goes with weight_grad, which is added to before the gradient of the loss arrives. "
            f"Without weight_grad scale the loss instead."
        )
