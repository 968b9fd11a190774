"""``divergence``: how far a student's distribution is from its teacher's, from logits of both that exist."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.backends import load
from logitless.backends.contract import Pair, Problem
from logitless.backends.divergences import Divergence, Kind
from logitless.call import Call, Options, local_part, resolve_logits, together, untraced
from logitless.call.checks import vocabulary
from logitless.distill.divergence import check_pair, pair_facts
from logitless.distill.pair import pair_results
from logitless.distill.stats import DivergenceStats, in_shape
from logitless.distill.teacher import Teacher
from logitless.distill.top_k import score_logits_top_k
from logitless.errors import LogitlessError, no_second_derivative
from logitless.from_logits import as_matrix, gradient_buffer
from logitless.notes import explained
from logitless.rows import Rows
from logitless.softmax import Normaliser, coefficients
from logitless.spec import Head, VocabShard


@untraced
def divergence(
    logits: Tensor,
    teacher: Teacher | Tensor,
    rows: Rows | Tensor | tuple[Tensor, Tensor],
    *,
    kind: Kind | Divergence = "reverse_kl",
    beta: float = 0.5,
    alpha: float = 0.5,
    head: Head | None = None,
    shard: VocabShard | None = None,
    overwrite_logits: bool = False,
    backend: str = "auto",
    memory: int | str = "16MiB",
) -> DivergenceStats:
    """Divergence of each row's distribution from its teacher's, with no further full-vocabulary tensor but a gradient.

    Both logits are read twice in forward and once in backward.

    Args:
        logits, rows, head, shard, overwrite_logits, backend, memory: the student's, as for :func:`logprobs`.
        teacher: logits ``[..., W]`` of the same tokens, or ``Teacher.from_logits`` with a head of its own. They may be
            of another dtype, and of fewer columns. They get no gradient. Or ``Teacher.from_top_k``, with K log-probs
            of every row.
        kind, beta, alpha: as for :func:`linear_divergence`.

    Returns:
        :class:`DivergenceStats`.

    >>> student, teacher = torch.zeros(1, 2), torch.tensor([[1.0, 0.0]])
    >>> divergence(student, teacher, torch.tensor([0]), kind="forward_kl").divergence
    tensor([0.1109])
    """
    options = Options(head=head, shard=shard, backend=backend, memory=memory, entropy="grad", caller="divergence")
    with explained(options.caller, memory):
        what = Divergence.of(kind, beta, alpha)
        other = Teacher.from_logits(teacher) if isinstance(teacher, Tensor) else teacher
        logits = local_part(options, "logits", logits, logits.dim() - 1 if isinstance(logits, Tensor) else None)
        resolve = partial(_resolve, logits, rows, other, what, options, overwrite_logits)
        call = together(options, resolve, lambda made: made.facts() | pair_facts(other, what))
        return in_shape(_score(logits, call, other, what), call.shape)


def score_pair_of_logits(
    logits: Tensor, rows: Any, teacher: Teacher, kind: Divergence, asked: Options, overwrite: bool
) -> DivergenceStats:
    """``[R]`` results, with the call checked here: for a dry run."""
    return _score(logits, _resolve(logits, rows, teacher, kind, asked, overwrite), teacher, kind)


def _score(logits: Tensor, call: Call, teacher: Teacher, kind: Divergence) -> DivergenceStats:
    """``[R]`` results of a call that was checked."""
    if teacher.top_k is not None:
        return score_logits_top_k(logits, call, teacher.top_k, kind)
    return DivergenceStats(*_Divergence.apply(logits, call, teacher, kind))


def _resolve(logits: Tensor, rows: Any, teacher: Teacher, kind: Divergence, asked: Options, overwrite: bool) -> Call:
    call = resolve_logits(logits, rows, asked, overwrite)
    check_pair(call, logits, teacher, kind)
    if teacher.top_k is not None:
        return call
    if teacher.logits is None or teacher.ids is not None:
        raise LogitlessError(
            "divergence: teacher must be logits in the order of the student's columns. From hidden states and a head, "
            "or with ids=, use linear_divergence."
        )
    if teacher.logits.stride(-1) != 1:
        raise LogitlessError("divergence: the teacher's logits must be contiguous in their last dimension.")
    return call


class _Saved(NamedTuple):
    """What backward needs, by name."""

    logits: Tensor
    column: Tensor
    reference: Tensor
    log_sum: Tensor
    logprob: Tensor
    shift: Tensor
    teacher_reference: Tensor
    teacher_log_sum: Tensor
    mean: Tensor


class _Divergence(torch.autograd.Function):
    """The seam to autograd."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, call: Call, teacher: Teacher, kind: Divergence) -> tuple[Tensor, ...]:
        column = call.column_of(call.rows.target)
        student, other = _problems(logits, column, call, teacher)
        results = pair_results(load(call.backend), student, other, kind, call.group)
        *values, reference, log_sum, shift, teacher_reference, teacher_log_sum, mean = results.vectors()
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*values[4:])
        norms = (reference, log_sum, values[1], shift, teacher_reference, teacher_log_sum)
        ctx.save_for_backward(*_Saved(logits, column, *norms, mean))
        ctx.call, ctx.teacher, ctx.kind, ctx.spent = call, teacher, kind, False
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise no_second_derivative("divergence")
        if ctx.spent:
            raise LogitlessError(
                "divergence: second backward through a call with overwrite_logits=True, but the first one has replaced "
                "the logits by their gradient. Use overwrite_logits=False to keep the graph."
            )
        call: Call = ctx.call
        saved = _Saved(*ctx.saved_tensors)
        with explained(call.asked.caller, call.asked.memory, logits=saved.logits if call.overwrite else None):
            ctx.spent = call.overwrite
            student, teacher = _problems(saved.logits, saved.column, call, ctx.teacher)
            norm = Normaliser(saved.reference, saved.log_sum)
            teacher_norm = Normaliser(saved.teacher_reference, saved.teacher_log_sum)
            zero = torch.zeros_like(saved.logprob)
            by, g_logprob, g_entropy, g_log_z = (None if x is None else x.contiguous() for x in upstream[:4])
            coef = None
            if not (g_logprob is None and g_entropy is None and g_log_z is None):
                g_logprob = zero if g_logprob is None else g_logprob
                coef = coefficients(saved.logprob, norm, saved.shift, g_logprob, g_entropy, g_log_z)
            logits, index = saved.logits, call.rows.index
            out, out_index = gradient_buffer(logits, index, student, logits.dtype, call.overwrite)
            pair = Pair(student, teacher, norm, teacher_norm, ctx.kind)
            by = zero if by is None else by
            load(call.backend).divergence_gradient(pair, saved.mean, by, coef, out, out_index)
            return logits.detach() if call.overwrite else out.view(logits.shape), None, None, None


def _problems(logits: Tensor, column: Tensor, call: Call, teacher: Teacher) -> tuple[Problem, Problem]:
    """The selected rows of both."""
    assert teacher.logits is not None
    matrix, index = as_matrix(logits, call.rows.index)
    student = Problem(matrix, index, column, call.gain, call.squash, call.columns, True, call.memory)
    head = teacher.head or Head()
    gain = head.gain(call.num_rows, call.gain.dtype, call.gain.device)
    _, columns = vocabulary(call.asked.caller, teacher.width, head, call.asked.shard)
    matrix, index = as_matrix(teacher.logits.detach(), call.rows.index)
    return student, replace(
        student, logits=matrix, index=index, gain=gain, squash=head.squash, columns=columns, unit=False
    )
