"""``linear_divergence`` and ``divergence``: how far a student's distribution is from its teacher's, row by row.

    check and resolve the call  ->  rows grouped by teacher  ->  chunks of both models' logits (``pair``)  ->  results
    backward: tiles of both again, for d_hidden, d_weight and d_bias of the student

The autograd Functions are seams: what they compute is in ``pair`` and ``backends/divergences.py``.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from logitless.backends.divergences import Divergence, Kind
from logitless.call import Call, Options, Scope, as_products_take, recorded, resolve_hidden, together, untraced
from logitless.collectives import fingerprint
from logitless.distill.pair import PairChunk, PairPlan, PairTerms, pair_plan
from logitless.distill.source import Source, check_teacher, grouped, ungrouped
from logitless.distill.stats import DivergenceStats, in_shape
from logitless.distill.support import check_supports, score_kept
from logitless.distill.teacher import Teacher, Teachers
from logitless.distill.top_k import check_top_k, listing, score_top_k
from logitless.errors import LogitlessError, no_second_derivative
from logitless.from_hidden.gradients import gradients
from logitless.from_hidden.plan import LinearPlan, SupportPlan, choose_plan
from logitless.from_hidden.projection import Projection, hidden_gradient, selected_rows
from logitless.kept import Kept
from logitless.notes import explained
from logitless.rows import Rows
from logitless.softmax import Normaliser, coefficients
from logitless.spec import Head, VocabShard

MEMORY = "1GiB"
"""What the logits of both may take unless told otherwise."""


@untraced
def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher: Teacher | Teachers,
    rows: Rows | Tensor | tuple[Tensor, Tensor],
    *,
    kind: Kind | Divergence = "reverse_kl",
    beta: float = 0.5,
    alpha: float = 0.5,
    bias: Tensor | None = None,
    head: Head | None = None,
    shard: VocabShard | None = None,
    kept: Kept | None = None,
    scope: Scope = "vocabulary",
    hidden_grad: Literal["reduced", "partial"] = "reduced",
    sequence_parallel: bool = False,
    weight_grad: Tensor | None = None,
    match: Literal["bfloat16", "float16"] | None = None,
    tf32: bool = False,
    batch_invariant: bool = False,
    backend: str = "auto",
    memory: int | str = MEMORY,
) -> DivergenceStats:
    """Divergence of each row's distribution from its teacher's, without storing the logits of either.

    Six matrix products with backward, two of them the teacher's. Where the loss is known in forward,
    :func:`linear_policy_loss` with ``teacher=`` takes four.

    Args:
        hidden, weight, rows, bias, head, shard, hidden_grad, sequence_parallel, weight_grad, match, tf32,
            batch_invariant, backend: the student's, as for :func:`linear_logprobs`. Under a shard the teacher's weight
            is cut likewise, and there are two ``all_gather`` of a few vectors for every chunk of rows.
        teacher: a :class:`Teacher`, or :class:`Teachers` for several in one batch. It gets no gradient. One that sent K
            log-probs (:meth:`Teacher.from_top_k`) takes no product, or none but the student's own.
        kept: ids that the sampler kept: log-prob and divergence are over them and the target, the teacher's
            distribution over the same, or over its own ``kept``: dot products with a few rows of both heads.
        scope: with ``kept``, what entropy and log Z are over, as for :func:`linear_logprobs`. ``"support"`` takes no
            product at all.
        kind: ``"forward_kl"``, KL(teacher || student); ``"reverse_kl"``, KL(student || teacher); ``"jsd"``, ``"tv"``,
            ``"hellinger"``, ``"alpha"``; see docs/distillation.md.
        beta: the teacher's share of the mixture of ``"jsd"``.
        alpha: the power of ``"alpha"``.
        memory: bound on what is held of both models' logits. Gradients and their accumulators come on top.

    Returns:
        :class:`DivergenceStats`.

    Raises:
        LogitlessError: an argument cannot be honoured; the text says which and why.

    >>> student, teacher = torch.zeros(1, 2), torch.tensor([[1.0, 0.0]])
    >>> head = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> linear_divergence(student, head, Teacher(teacher, head), torch.tensor([0]), kind="forward_kl").divergence
    tensor([0.1109])
    """
    options = Options.of(locals() | {"entropy": "grad"}, "linear_divergence")
    with explained(options.caller, memory):
        what = Divergence.of(kind, beta, alpha)
        hidden, weight, options = as_products_take(hidden, weight, options)
        resolve = partial(resolve_pair, hidden, weight, rows, teacher, what, options)
        call = together(options, resolve, lambda made: made.facts() | pair_facts(teacher, what))
        return in_shape(score_pair(hidden, weight, call, teacher, what), call.shape)


def resolve_pair(
    hidden: Tensor, weight: Tensor, rows: Any, teacher: Teacher | Teachers, kind: Divergence, asked: Options
) -> Call:
    """The student's call, with its teacher checked."""
    call = resolve_hidden(hidden, weight, rows, asked)
    check_pair(call, hidden, teacher, kind)
    return call


def divergence_plan(
    hidden: Tensor, weight: Tensor, rows: Any, teacher: Teacher | Teachers, kind: Kind | Divergence, **options: Any
) -> PairPlan | LinearPlan | SupportPlan:
    """Which route :func:`linear_divergence` takes with these arguments, and why. Computes nothing."""
    asked = Options.named({"memory": MEMORY, "entropy": "grad", **options}, "linear_divergence")
    hidden, weight, asked = as_products_take(hidden, weight, asked)
    call = resolve_pair(hidden, weight, rows, teacher, Divergence.of(kind), asked)
    return route_of(call, recorded(hidden, weight, asked.bias), teacher)


def route_of(call: Call, needs: tuple[bool, ...], teacher: Teacher | Teachers) -> PairPlan | LinearPlan | SupportPlan:
    """The route of a call that was checked."""
    sent = teacher.top_k if isinstance(teacher, Teacher) else None
    if call.asked.kept is not None:
        return choose_plan(call, needs)
    if sent is None:
        return pair_plan(call, needs)
    if sent.tail == "renormalise":
        return SupportPlan(sent.ids.numel(), "both distributions are over the ids that the teacher sent")
    return choose_plan(listing(call, sent), needs)


def check_pair(call: Call, hidden: Tensor, teacher: Teacher | Teachers, kind: Divergence) -> None:
    """Raise for a teacher that does not go with the call, or with the divergence."""
    members = (teacher,) if isinstance(teacher, Teacher) else getattr(teacher, "members", ())
    if call.asked.batch_invariant and isinstance(teacher, Teachers) and call.asked.kept is None:
        raise LogitlessError(
            f"{call.asked.caller}: batch_invariant=True goes with one Teacher. With several, how many rows a product "
            f"has depends on who else is in the batch: call once for each of them."
        )
    if call.asked.kept is not None or any(x.kept is not None for x in members):
        check_supports(call, members)
        check_teacher(teacher, hidden, call)
        return
    if isinstance(teacher, Teacher) and teacher.top_k is not None:
        check_top_k(call, teacher.top_k)
        return
    check_teacher(teacher, hidden, call)
    sizes = [min(x.width, (x.head or Head()).vocab_size or x.width) for x in members]
    whole = call.asked.shard is None
    if kind.kind == "reverse_kl" and whole and min(sizes) < call.columns:
        raise LogitlessError(
            f"{call.asked.caller}: the teacher has {min(sizes)} ids and the student {call.columns}, so that "
            f"KL(student || teacher) is infinite. Compare over the ids that both have, with "
            f"head=Head(vocab_size={min(sizes)}), or take another kind: all others are finite."
        )


def pair_facts(teacher: Teacher | Teachers, kind: Divergence) -> dict[str, Any]:
    """What the ranks of a vocabulary group must agree on besides."""
    members = (teacher,) if isinstance(teacher, Teacher) else tuple(teacher.members)
    sent = [x.top_k for x in members if x.top_k is not None]
    heads = [x.head or Head() for x in members]
    return {
        "the divergence": str(kind),
        "the number of teachers": len(members),
        "which row has which teacher": fingerprint(getattr(teacher, "which", None)),
        "the teacher's temperature": tuple(fingerprint(x.temperature) for x in heads),
        "the teacher's log-probs": tuple((x.tail, fingerprint(x.ids), fingerprint(x.logprobs)) for x in sent),
        "the ids that the teacher kept": tuple(
            (fingerprint(x.kept.ids), fingerprint(x.kept.lengths)) for x in members if x.kept is not None
        ),
        "the teacher's scale and softcap": tuple((x.scale, x.softcap, x.vocab_size) for x in heads),
    }


def score_pair(
    hidden: Tensor, weight: Tensor, call: Call, teacher: Teacher | Teachers, kind: Divergence
) -> DivergenceStats:
    """``[R]`` results of a call that was checked."""
    if call.asked.kept is not None:
        plan = choose_plan(call, recorded(hidden, weight, call.asked.bias))
        return score_kept(hidden, weight, call, plan, teacher, kind)
    if isinstance(teacher, Teacher) and teacher.top_k is not None:
        return score_top_k(hidden, weight, call, teacher.top_k, kind)
    ordered, order = grouped(teacher, call)
    source = Source.of(teacher, ordered)
    plan = pair_plan(ordered, recorded(hidden, weight, call.asked.bias))
    values = _LinearDivergence.apply(hidden, weight, call.asked.bias, ordered, plan, source, kind)
    return DivergenceStats(*ungrouped(values, order))


class _Saved(NamedTuple):
    """What backward needs, by name."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    column: Tensor
    reference: Tensor
    log_sum: Tensor
    logprob: Tensor
    shift: Tensor
    teacher_reference: Tensor
    teacher_log_sum: Tensor
    mean: Tensor


class _LinearDivergence(torch.autograd.Function):
    """The seam to autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: Call,
        plan: PairPlan,
        source: Source,
        kind: Divergence,
    ) -> tuple[Tensor, ...]:
        column = call.column_of(call.rows.target)
        p = Projection.of(selected_rows(hidden, call), weight, bias, column, call)
        fixed = call.asked.batch_invariant and bool(plan.chunks)
        both = (p.padded(plan.rows), source.padded(plan.rows)) if fixed else (p, source)
        chunk = PairChunk.empty(*both, kind, plan.rows, plan.columns, plan.elementwise)
        found = [chunk.results(start, stop) for start, stop in plan.chunks]
        vectors = [x.vectors() for x in found] or [(p.gain.new_empty(0),) * 12]
        whole = [torch.cat(lines)[: call.num_rows] for lines in zip(*vectors, strict=True)]
        results, (reference, log_sum, shift, *rest) = whole[:6], whole[6:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*results[4:])
        ctx.save_for_backward(*_Saved(hidden, weight, bias, column, reference, log_sum, results[1], shift, *rest))
        # The teacher and the buffer for the weight's gradient are not saved: neither is differentiated.
        ctx.call, ctx.plan, ctx.source, ctx.kind = call, plan, source, kind
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise no_second_derivative("linear_divergence")
        call: Call = ctx.call
        plan: PairPlan = ctx.plan
        saved = _Saved(*ctx.saved_tensors)
        buffer = call.asked.weight_grad
        with explained(call.asked.caller, call.asked.memory, weight_grad=buffer):
            zero = torch.zeros_like(saved.logprob)
            by, g_logprob, g_entropy, g_log_z = (None if x is None else x.contiguous() for x in upstream[:4])
            norm = Normaliser(saved.reference, saved.log_sum)
            g_logprob = zero if g_logprob is None else g_logprob
            assert plan.backward is not None
            p = Projection.of(selected_rows(saved.hidden, call), saved.weight, saved.bias, saved.column, call)
            terms = PairTerms(
                norm=norm,
                coef=coefficients(saved.logprob, norm, saved.shift, g_logprob, g_entropy, g_log_z),
                source=ctx.source,
                teacher_norm=Normaliser(saved.teacher_reference, saved.teacher_log_sum),
                kind=ctx.kind,
                mean=saved.mean,
                by=zero if by is None else by,
                memory=p.empty((plan.backward.rows, plan.backward.columns), p.gain.dtype).view(-1),
            )
            found = gradients(p, plan.backward, terms, want=ctx.needs_input_grad[:3], weight_grad=buffer)
            d_hidden = None if found.hidden is None else hidden_gradient(found.hidden, saved.hidden.shape, call)
            return d_hidden, found.weight, found.bias, None, None, None, None
