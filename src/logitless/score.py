"""``logprobs``: what is read off chosen rows of logits, computed or not.

    check and resolve the call  ->  choose the route  ->  a pass over the rows  ->  results
    backward:  coefficients per row from the upstream gradients  ->  dZ of all logits, or of one tile at a time

One autograd Function is the seam for logits that exist and for hidden states; results over a support alone, and
divergences over listed ids, are vectors with graphs of their own behind single logits.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from logitless.backends.divergences import Divergence, Kind
from logitless.call import Asked, Call, Operands, default_memory, resolve, together
from logitless.call.dry import ACTIVE, announce, under_way
from logitless.call.resolve import apart_everywhere
from logitless.errors.arguments import refuse_transforms
from logitless.notes import add_note
from logitless.operands import Given, Kept, Logits, Teacher, Teachers
from logitless.operands.unit import READ, end_reading
from logitless.passes.look import asked_of
from logitless.passes.scoring import scored
from logitless.readings.outcomes import Sent, compared, within
from logitless.readings.over_support import Outcomes, divergence_over, results_over
from logitless.readings.table import Table
from logitless.route import Plan, in_words, over_vocabulary, score_plan
from logitless.rows import Rows
from logitless.softmax import FLOOR, transform
from logitless.sources.listed import entries_of, entry_logits, id_logits, kept_of, place_of
from logitless.sources.teacher_checks import check_teachers
from logitless.sources.teachers import grouped, under_autocast, ungrouped
from logitless.spec import EntropyMode, Head, TokenStats, untraced


def logprobs(
    logits: Tensor | Given,
    rows: Rows | Tensor | tuple[Tensor, Tensor],
    *,
    entropy: EntropyMode = None,
    head: Head | None = None,
    kept: Kept | None = None,
    stats: tuple[str, ...] = (),
    top_k: int | None = None,
    ids: Tensor | None = None,
    teacher: Tensor | Teacher | Teachers | None = None,
    divergence: Kind | Divergence = "reverse_kl",
    memory: int | str | None = None,
    backend: Literal["auto", "reference", "tiled", "triton"] | str = "auto",
) -> TokenStats:
    """Log-probability, entropy, log Z and more of chosen tokens, from logits that exist or that are never computed.

    Same as ``log_softmax(logits[rows.index].float() / temperature)`` at ``rows.target``, and its entropy. From a tensor
    there is no second full-vocabulary tensor; from :class:`Logits` there is not even the first.

    Args:
        logits: ``[..., V]`` a tensor; :meth:`Logits.given` of one, with a shard; or :class:`Logits`.
        rows: the rows to score: a :class:`Rows`; targets for every row, in the leading shape of the logits; or
            ``(index, target)``. Target ``-100`` leaves a row out. Any other id outside the vocabulary raises if it can
            be seen without asking the device, and makes its own row NaN otherwise.
        entropy: None; ``"value"`` for values with no graph; ``"grad"`` for values with one. Log-probs are the same
            bits for all three.
        head: temperature, scale, softcap and true vocabulary size; default ``Head()``.
        kept: ids the sampler kept; the log-prob is normalised over them, and entropy and log Z are over its scope.
        stats: more results over the whole vocabulary, whatever was kept: any of ``"top1"``, ``"collision"``,
            ``"mean_logit"``, ``"logit_variance"``, ``"max_logit"`` and ``"rank"``. A rank takes one more collective
            under a shard. Beside a teacher also ``"acceptance"``, ``"teacher_log_z"``, ``"teacher_shared"`` and
            ``"teacher_top1"``.
        top_k: ids and log-probs of the K most likely tokens, K up to 128.
        ids: ``[..., K]`` int64, ids of every row whose log-probs are wanted besides; they have a gradient. An id may
            come twice, and -100 leaves a place out.
        teacher: the other distribution of each row, which gets no gradient: logits of the same tokens, a tensor or
            :class:`Logits`; a :class:`Teacher` where it has a head or ids of its own; or what a server sent,
            :meth:`Teacher.from_top_k`.
        divergence: how far the row's distribution is from the teacher's: ``"forward_kl"``, KL(teacher || student);
            ``"reverse_kl"``, KL(student || teacher); ``"jsd"``, ``"tv"``, ``"hellinger"``, ``"alpha"``; for drafts
            ``"acceptance"``, ``"log_acceptance"``, ``"lk_hybrid"``; or a :class:`Divergence` with a number of its own.
        memory: bound on the working memory of forward and of backward, in bytes or as ``"256MiB"``. Gradients and their
            accumulators come on top. None: 16MiB on logits, 256MiB from hidden states, 1GiB with a teacher.
        backend: ``"auto"``, ``"reference"``, ``"tiled"`` or ``"triton"``.

    Returns:
        :class:`TokenStats` of ``[R]`` tensors (shape ``[...]`` if targets were given), float32, or float64 for
        float64 logits.

    The gradient has the dtype of the logits, or of hidden states and weight. A half-precision *leaf* whose
    ``grad_dtype`` was set to float32 gets it in float32; for any other tensor autograd itself would round it back.

    Raises:
        LogitlessError: an argument cannot be honoured; the text says which and why.

    >>> out = logprobs(torch.zeros(2, 4), torch.tensor([1, -100]), entropy="value")
    >>> out.logprob
    tensor([-1.3863,  0.0000])
    >>> logprobs(Logits(torch.zeros(2, 3), torch.zeros(4, 3)), torch.tensor([1, -100])).logprob
    tensor([-1.3863,  0.0000])
    """
    # Every option is named, because torch.compile up to 2.12 does not trace locals().
    asked = Asked(
        entropy=entropy,
        head=head,
        kept=kept,
        stats=stats,
        top_k=top_k,
        ids=ids,
        teacher=Teacher(teacher) if isinstance(teacher, Tensor) else teacher,
        divergence=divergence,
        memory=memory,
        backend=backend,
    )
    if torch.compiler.is_compiling() and (isinstance(logits, Logits) or teacher is not None):
        return untraced(_logprobs)(logits, rows, asked)
    return _logprobs(logits, rows, asked)


def _logprobs(logits: Any, rows: Any, asked: Asked) -> TokenStats:
    if torch.compiler.is_compiling():
        return _answered(logits, rows, asked)
    if torch._C._are_functorch_transforms_active():
        refuse_transforms("logprobs")
    since, found = len(READ.units), ()
    try:
        found = _answered(logits, rows, asked)
        return found
    except BaseException as error:
        default = default_memory(logits, chunks=asked.teacher is not None)
        add_note(error, "logprobs", default if asked.memory is None else asked.memory)
        raise
    finally:
        if len(READ.units) > since:
            end_reading(since, found)


def _answered(logits: Any, rows: Any, asked: Asked) -> TokenStats:
    shard = getattr(logits, "shard", None)
    if shard is None or not getattr(shard, "check_calls", False):
        call, plan, operands = resolve_score(logits, rows, asked)
    else:
        call, plan, operands = together(partial(resolve_score, logits, rows, asked), shard, "logprobs", _score_facts)
    if ACTIVE and under_way() is not None:
        announce(call, replace(plan, collectives=over_vocabulary(call, plan, operands)))
    stats = score(call, plan, operands)
    return stats if len(call.shape) == 1 else stats.shaped(call.shape)


def _score_facts(made: tuple[Call, Plan, Operands]) -> dict[str, Any]:
    call, plan, operands = made
    # The list of collectives catches every difference that would make ranks wait, so it is compared last.
    return call.facts() | plan.facts() | {"what is sent": tuple(in_words(over_vocabulary(call, plan, operands)))}


def resolve_score(logits: Any, rows: Any, asked: Asked) -> tuple[Call, Plan, Operands]:
    """The call of :func:`logprobs`, its route and its operands, all checked. Computes nothing."""
    call, operands = resolve("logprobs", logits, rows, asked, chunks=asked.teacher is not None)
    if asked.teacher is not None:
        call = with_teacher(call, operands)
    return call, score_plan(call), operands


def with_teacher(call: Call, operands: Operands) -> Call:
    """The call with its teacher checked; of one that sent K log-probs, asked for the student's of the same ids."""
    teacher = under_autocast(call.asked.teacher)
    check_teachers(call, operands.tokens, teacher)
    if teacher is not call.asked.teacher:
        call = replace(call, asked=replace(call.asked, teacher=teacher))
    if not isinstance(teacher, Teacher) or teacher.top_k is None:
        return call
    sent = teacher.top_k
    ids = Sent.of(sent, call.rows.target, call.gain.dtype).ids
    own, rest = call.asked, sent.tail == "bucket"
    table = Table.of(own.stats, own.top_k or 0, ids, negative=call.negative, start=call.start, rest=rest)
    call = replace(call, table=table)
    if call.linear is None:
        return call
    everywhere = apart_everywhere(call)
    return replace(call, apart=everywhere or call.apart, apart_everywhere=everywhere)


def score(call: Call, plan: Plan, operands: Operands, whole: bool = False) -> TokenStats:
    """``[R]`` results of a call that was checked.

    Args:
        whole: whether log-probs are over the vocabulary even where a teacher sent K ids to compare over: a loss's are.
    """
    teacher = call.asked.teacher
    if teacher is None:
        return _over_support(call, operands) if call.over_support else scored(call, plan, operands)
    assert isinstance(teacher, Teacher | Teachers)
    if call.kept is not None:
        return _as_asked(_over_supports(call, plan, operands, teacher), call.asked.entropy)
    if isinstance(teacher, Teacher) and teacher.top_k is not None:
        return _as_asked(_over_outcomes(call, plan, operands, teacher, whole), call.asked.entropy)
    ordered, order = grouped(teacher, call)
    return ungrouped(scored(ordered, plan, operands), order)


def _as_asked(found: TokenStats, entropy: EntropyMode) -> TokenStats:
    """Results with their entropy as it was asked for: with a graph, without one, or not at all."""
    x = None if entropy is None else found.entropy
    return found._replace(entropy=x.detach() if x is not None and entropy == "value" else x)


def _over_support(call: Call, operands: Operands) -> TokenStats:
    """Results over the support alone, from single logits."""
    support = call.support()
    assert support is not None
    place = place_of(support, call)
    raw = entry_logits(operands, support, place[1] & ~support.lone(), call, whole=False)
    return results_over(raw, support, place, asked_of(call)._replace(table=None), call.asked.entropy == "grad")


def _over_supports(call: Call, plan: Plan, operands: Operands, teacher: Teacher | Teachers) -> TokenStats:
    """A divergence over kept ids, from single logits of both; entropy and log Z are over the kept ids' scope."""
    kept, target, kind = call.kept, call.rows.target, call.kind
    assert kept is not None
    assert kind is not None
    if not call.over_support:
        # Two graphs read these logits, and the first backward would overwrite them for the second.
        call = replace(call, overwrite=False)
    outcomes = Outcomes.of(kept, kept_of(teacher), target, call.start, call.vocab_size)
    support, read = outcomes.support, ~outcomes.support.lone()
    others = entries_of(teacher, support, read, call)
    raw = entry_logits(operands, support, read, call).double()
    z, _ = transform(raw, call.gain.double()[support.entries.row], call.squash)
    found = divergence_over(z, others, outcomes, kind, call.gain.dtype)
    if call.over_support:
        return found
    own = scored(call, plan, operands)
    names = ("divergence", "teacher_logprob", "teacher_entropy")
    return own._replace(**{name: getattr(found, name) for name in names})


def _over_outcomes(call: Call, plan: Plan, operands: Operands, teacher: Teacher, whole: bool) -> TokenStats:
    """A divergence from a teacher that sent K log-probs of each row."""
    assert teacher.top_k is not None
    assert call.kind is not None
    other = Sent.of(teacher.top_k, call.rows.target, call.gain.dtype)
    if plan.kind == "support":
        x = id_logits(operands, other.ids, call)
        z, _ = transform(x, call.gain[:, None], call.squash)
        return within(None, z, z.masked_fill(other.empty, FLOOR).logsumexp(-1), other, call.kind)
    own = scored(call, plan, operands)
    if other.rest or whole:
        return compared(own, other, call.kind)
    assert own.ids_logprobs is not None
    assert own.log_z is not None
    # Log-probs over the ids alone have another normaliser: log Z plus the log of the ids' probability.
    log_p = own.ids_logprobs
    log_z = own.log_z + log_p.masked_fill(other.empty, FLOOR).logsumexp(-1)
    return within(own, log_p, log_z, other, call.kind)
