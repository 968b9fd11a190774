"""Functions that the adapters of several hosts share.

    score                        one call of this library, audited
    score_ids                    log-probs of several ids of every row
    soft_cross_entropy           -sum of q log p, q the probability of another row of logits
    score_with_all_entropies     log-probs of the targets, entropies of rows without one too
    taken_over                   logits that a caller allows backward to overwrite
    score_overwriting            a function that verl and SkyRL share
    in_scope                     kept ids with the scope of a host's keyword
    every_target                 the target of every local token, for the audit
    without_graph                a block in which a host wants no graph
    untrained                    an entropy whose gradient is an error
    squared_probabilities        sum of p^2 per row

Logits are a tensor, or ``Logits`` that are not computed: of a host that has hidden states, or of a model that returns
them. No function here depends on a host; the host's file chooses rows, dtypes and gradient rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from logitless.adapters.audit import Audit
from logitless.adapters.replacing import Options
from logitless.adapters.shards import check_ids
from logitless.deferred.later import entropy_with_log_prob, log_prob_and_entropy
from logitless.errors import LogitlessError
from logitless.operands import Kept, Logits
from logitless.operands.kept import Scope
from logitless.rows import Rows
from logitless.score import logprobs
from logitless.seams import placed
from logitless.spec import IGNORE, EntropyMode, TokenStats, VocabShard

HALF: dict[torch.dtype, Literal["bfloat16", "float16"]] = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def tracked(*tensors: Tensor | None) -> bool:
    """Whether a result computed from these tensors has a graph."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def entropy_mode(wanted: bool, *tensors: Tensor | None) -> EntropyMode:
    """``"grad"`` where a gradient is wanted and can flow."""
    return "grad" if wanted and tracked(*tensors) else "value"


def without_graph(asked: bool) -> AbstractContextManager[Any]:
    """A block whose results have no graph, if asked."""
    return torch.no_grad() if asked else nullcontext()


def product_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype of a product with hidden states: that of autocast, where it is on."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def untrained(host: str, entropy: Tensor, logprob: Tensor) -> Tensor:
    """A copy of the entropy, of the call that made the log-probs, whose gradient is an error.

    For hosts whose own entropy has a graph, or raises. Without a graph a bonus would be lost in silence.
    """
    return _Untrained.apply(entropy, logprob, host) if tracked(logprob) else entropy.clone()  # pyright: ignore[reportReturnType]


class _Untrained(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, entropy: Tensor, logprob: Tensor, host: str) -> Tensor:
        # The log-probs are an input so that whoever asks for the gradient of their operands comes through here.
        ctx.set_materialize_grads(False)
        ctx.host = host
        return entropy.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if gradient is not None:
            raise LogitlessError(
                f"{ctx.host}: entropy has no gradient here, but the loss asks for one. Use "
                f'install("{ctx.host}", entropy_grad=True), or detach the entropy if it is a metric.'
            )
        return None, None, None


def soft_cross_entropy(
    where: str, logits: Tensor, teacher: Tensor, target: Tensor, audit: Audit, shard: VocabShard | None = None
) -> Tensor:
    """``-sum of q log p`` of each row, q the teacher's probability; 0 where the target is to be ignored.

    KL(q, p) and the entropy of q, so that nothing of the size of the logits is held but their gradient.
    """
    student = placed(logits, shard)
    teacher = teacher.detach() if isinstance(teacher, Logits) or teacher.stride(-1) == 1 else teacher.contiguous()
    out = logprobs(student, target, teacher=teacher, divergence="forward_kl", entropy="value")
    audit.of_logits(where, student, target, logprob=out.logprob, entropy=out.entropy)
    assert out.divergence is not None
    assert out.teacher_entropy is not None
    return out.divergence + out.teacher_entropy


def computed(logits: Tensor) -> Tensor:
    """The logits, where single columns of them are read; those that are not computed are computed here."""
    return logits.computed() if isinstance(logits, Logits) else logits


def score(
    where: str,
    logits: Tensor,
    target: Tensor,
    audit: Audit,
    *,
    shard: VocabShard | None = None,
    overwrite: bool = False,
    skip: bool = False,
    **asked: Any,
) -> TokenStats:
    """:func:`logitless.logprobs` of every row; ``asked`` are its keywords.

    A row whose target is -100 gets zeros; with ``skip`` it is not read, or multiplied with the head, either.
    """
    operand, target = placed(logits, shard, overwrite=overwrite), target.long()
    if skip:
        out = _of_labelled(logits, target, shard, asked)
    elif isinstance(operand, Logits) and not asked:
        out = log_prob_and_entropy(operand, target)._replace(entropy=None)
    else:
        out = logprobs(operand, target, **asked)
    audit.of_logits(where, operand, target, logprob=out.logprob, entropy=out.entropy, head=asked.get("head"))
    return out


def _of_labelled(logits: Tensor, target: Tensor, shard: VocabShard | None, asked: Mapping[str, Any]) -> TokenStats:
    flat = target.reshape(-1)
    index = (flat != IGNORE).nonzero().squeeze(1)
    rows = Rows.at(index, flat[index], flat.numel())
    out = logprobs(placed(logits.reshape(-1, logits.shape[-1]), shard), rows, **asked)
    return out.each(lambda x: rows.expand(x).view(target.shape))


def score_ids(
    where: str, logits: Tensor, ids: Tensor, audit: Audit, *, target: Tensor | None = None, **asked: Any
) -> TokenStats:
    """:func:`score` with ``ids_logprobs`` of ``[..., K]`` ids. The first is audited, unless there is another target."""
    target = ids[..., 0] if target is None else target
    return score(where, logits, target, audit, ids=ids.long(), **asked)


def score_with_all_entropies(where: str, logits: Tensor, target: Tensor, audit: Audit, **asked: Any) -> TokenStats:
    """:func:`score`; a row whose target is -100 has log-prob 0, and its entropy, as in hosts that mask later."""
    ignored = target == IGNORE
    out = score(where, logits, target.masked_fill(ignored, 0), audit, **asked)
    return out._replace(logprob=out.logprob.masked_fill(ignored, 0.0))


def entropy_of_logits(
    where: str,
    logits: Tensor,
    audit: Audit,
    *,
    grad: bool = True,
    leave_out: Tensor | None = None,
    later: bool = False,
    **asked: Any,
) -> Tensor:
    """Entropy of every row, with a graph if ``grad`` and the logits have one; 0 where ``leave_out`` is true.

    Args:
        later: whether the host goes on to ask for log-probs of the same logits, on every rank. Of logits that are not
            computed, one pass then answers both.
    """
    if isinstance(logits, Logits) and not asked.keys() - {"shard"} and not audit:
        operand = placed(logits, asked.get("shard"))
        assert isinstance(operand, Logits)
        entropy = entropy_with_log_prob(operand, graph=grad, later=later and leave_out is None)
        if entropy is not None:
            return entropy if leave_out is None else entropy.masked_fill(leave_out, 0.0)
    target = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    if leave_out is not None:
        target.masked_fill_(leave_out, IGNORE)
    entropy = score(where, logits, target, audit, entropy=entropy_mode(grad, logits), **asked).entropy
    assert entropy is not None
    return entropy


def taken_over(logits: Tensor) -> Tensor | None:
    """The tensor that backward may overwrite: the logits, or the tensor they are a reshaped view of; None if neither.

    A leaf belongs to the user, a view of a part shares its tensor with other code, and logits that are not computed
    have no memory.
    """
    if isinstance(logits, Logits):
        return None
    whole = logits._base if logits._is_view() else logits
    if whole is None or whole.is_leaf or not tracked(logits):
        return None
    same = whole.numel() == logits.numel() and whole.shape[-1:] == logits.shape[-1:]
    return whole if same and whole.is_contiguous() and logits.is_contiguous() else None


def score_overwriting(options: Options, logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """``logprobs_from_logits`` of two hosts: float32, as the hosts' flash-attention path gives them.

    With ``inplace_backward=True`` the caller allows backward to write the gradient over the logits, as on that path.
    """
    where = "logprobs_from_logits"
    if labels.shape != logits.shape[:-1] and labels.numel() == logits.shape[:-1].numel():
        # The hosts flatten both, and results have the shape of the logits.
        labels = labels.reshape(logits.shape[:-1])
    check_ids("labels", labels, logits.shape[:-1])
    whole = taken_over(logits) if inplace_backward and options["inplace_backward"] else None
    if whole is None:
        return score(where, logits, labels, options["audit"]).logprob
    target = labels.reshape(whole.shape[:-1])
    out = score(where, whole, target, options["audit"], overwrite=True)
    return out.logprob.view(labels.shape)


def in_scope(caller: str, kept: Kept | None, scope: Scope | None) -> Kept | None:
    """The kept ids with the scope that a host's own keyword asks for; None leaves them their own."""
    if scope is None or (kept is None and scope == "vocabulary"):
        return kept
    if kept is None:
        raise LogitlessError(
            f"{caller}: scope={scope!r} needs kept=, the ids that the sampler kept. Pass a logitless.Kept."
        )
    return kept.over(scope)


def every_target(rows: Rows) -> Tensor:
    """One target per local token: ``-100`` where no row is scored."""
    return rows.expand(rows.target - IGNORE) + IGNORE


def squared_probabilities(where: str, logits: Tensor, audit: Audit, shard: VocabShard | None = None) -> Tensor:
    """Sum of the squared probabilities of every row."""
    target = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    collision = score(where, logits, target, audit, shard=shard, stats=("collision",)).collision
    assert collision is not None
    return collision
