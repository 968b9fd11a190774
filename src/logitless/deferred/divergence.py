"""``Comparison``: what distillation writes of the logits of two models, none of which are computed.

    F.kl_div(log p, q)   F.kl_div(log p, log q, log_target=True)   F.cross_entropy(logits, q)
    (q * (log q - log p)).sum(-1)   (p * (log p - log q)).sum(-1)   (q * log p).sum(-1)

All of them sum, over the vocabulary, the probabilities of one model times multiples of both models' log-probs, and so
are made of a KL divergence and an entropy. One of the two models may have a gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor

from logitless.backends.divergences import Kind
from logitless.deferred.distribution import OF_ROWS, Distribution, distribution, gatherable, same_logits
from logitless.deferred.distribution import product as product_of_one
from logitless.deferred.later import slices
from logitless.deferred.lazy import Waiting
from logitless.deferred.read import WIDENED, over_last, result_dtype
from logitless.errors.arguments import FLOATS
from logitless.operands import Logits, LoRA
from logitless.operands.applied import applied
from logitless.operands.logits import count_made
from logitless.operands.passed_on import same
from logitless.score import logprobs
from logitless.spec import TokenStats

Term = tuple[Logits, float]
"""Log-probs of these logits, so many times."""


class Comparison(Waiting):
    """The sum of ``terms``, times the probabilities of ``weigher`` and a factor of each row where these are not None.
    Once it was computed, for code that nothing here answers, it is a tensor in memory.

    Attributes:
        terms: of two logits; the first have a gradient, if any have.
        weigher: one of the two.
        factor: ``[..., 1]``, a mask for instance, without a gradient.
    """

    terms: tuple[Term, ...]
    weigher: Logits | None
    factor: Tensor | None

    def counted(self, name: str) -> Tensor:
        if self.value is None:
            for x, _ in self.terms:
                count_made(x, name)
        return self.computed()

    def answer(self, name: str, args: Any, kwargs: Any) -> Any:
        if self.value is not None:
            return NotImplemented
        if name in PAIRS:
            return applied(PAIRS[name], args, kwargs)
        if not args or args[0] is not self:
            return NotImplemented
        if name in OF_ROWS and name != "data":
            return self._of_rows(name, args[1:], kwargs)
        rule = ANSWERS.get(name)
        return NotImplemented if rule is None else applied(rule, args, kwargs)

    def _of_rows(self, name: str, args: Any, kwargs: Any) -> Any:
        """The same of other rows of both logits; NotImplemented where that is more than one part of them."""

        def of(x: Any) -> Any:
            return getattr(x, name)(*args, **kwargs)

        if self.factor is not None and name not in OF_FACTORS:
            return NotImplemented
        logs = [distribution(x, "log p") for x, _ in self.terms]
        changed = [x.answer(name, (x, *args), kwargs) for x in logs]
        if not all(isinstance(x, Distribution) for x in changed):
            return NotImplemented
        if self.factor is None and all(x is y for x, y in zip(changed, logs, strict=True)):
            return self
        terms = [(x.source, times) for x, (_, times) in zip(changed, self.terms, strict=True)]
        weigher = next((new for (new, _), (x, _) in zip(terms, self.terms, strict=True) if x is self.weigher), None)
        factor = None if self.factor is None else of(self.factor.expand(*self.shape[:-1], 1))
        if name == "index_select" or (name == "__getitem__" and not slices(*args)):
            # A copy in torch, and whoever has the index may write to it before the copy is read.
            return _comparison(terms, weigher, factor)
        return self.waits_with(_comparison(terms, weigher, factor, lambda: of(self.computed())))

    def row_sums(self) -> Tensor:
        """``[...]`` sums over the vocabulary."""
        found: Any = self._divergence() if self.weigher is not None else self._of_each(lambda log_p: log_p.sum(-1))
        found = found if self.factor is None else found * self.factor.expand(*self.shape[:-1], 1)[..., 0]
        return found.to(result_dtype(self))

    def _of_each(self, read: Callable[[Any], Any]) -> Any:
        """The sum of what is read of the log-probs of each model."""
        return sum(times * read(distribution(x, "log p")) for x, times in self.terms)

    def _divergence(self) -> Tensor:
        """``[...]`` sums over the vocabulary, without the factor. For p the probabilities that weigh, and q the others:

        sum of p log q = -(KL of p to q) - (entropy of p)          sum of p log p = -(entropy of p)
        """
        (student, own), (teacher, others) = self.terms
        of_student, entropies = self.weigher is student, own + others
        wanted = ("grad" if student.requires_grad else "value") if entropies and of_student else None
        out = _beside(student, teacher.detach(), "reverse_kl" if of_student else "forward_kl", wanted)
        assert out.divergence is not None
        found = out.divergence * -(others if of_student else own)
        if entropies:
            entropy = out.entropy if of_student else out.teacher_entropy
            assert entropy is not None
            found = found - entropies * entropy
        return found


def _beside(student: Logits, teacher: Tensor, kind: Kind, entropy: Any = None) -> TokenStats:
    """``[...]`` of every row, of logits of the same shape."""
    columns = student.shape[-1]
    flat = student.reshape(-1, columns)
    anything = torch.zeros(flat.shape[0], dtype=torch.int64, device=flat.device)
    out = logprobs(flat, anything, entropy=entropy, teacher=teacher.reshape(-1, columns), divergence=kind)
    return out.each(lambda x: x.reshape(student.shape[:-1]))


OF_FACTORS = OF_ROWS - {"view", "reshape", "flatten", "type_as", "to", "squeeze"}
"""Rules that hold for a factor of each row as it is: they name no size of the last dimension."""


def _comparison(
    terms: list[Term], weigher: Logits | None, factor: Tensor | None, read: Callable[[], Tensor] | None = None
) -> Comparison:
    """Of two logits, the student's first.

    Args:
        read: computes it of another one that it is a part of; None to compute the logits.
    """
    first = terms[0][0]
    dtype = first.dtype if factor is None else torch.promote_types(first.dtype, factor.dtype)

    def compute(computed: Tensor) -> Tensor:
        logs = [(computed if x is first else x.computed()).log_softmax(-1) for x, _ in terms]
        # A multiple of 0 is none: of -inf it would be NaN.
        found: Any = sum(times * x for x, (_, times) in zip(logs, terms, strict=True) if times)
        weights = [x.exp() for x, (of, _) in zip(logs, terms, strict=True) if of is weigher]
        # A token that is never said adds nothing.
        found = found.masked_fill(weights[0] == 0, 0.0) * weights[0] if weights else found
        return found if factor is None else found * factor

    more = {"terms": tuple(terms), "weigher": weigher, "factor": factor, "value": None, "steps": []}
    more["read"] = read or (lambda: compute(first.computed()))
    return Comparison.made(first, compute, first.shape, dtype, **more)


def _parts(x: Any) -> tuple[Logits | None, list[Term], Tensor | None] | None:
    """Weigher, terms and factor; None of what is no such sum, or has a graph that its logits have not."""
    if isinstance(x, Comparison) and x.value is None and not x.severed():
        return x.weigher, list(x.terms), x.factor
    if _is(x, "p log p"):
        return x.source, [(x.source, x.factor)], None
    return (None, [(x.source, x.factor)], None) if _is(x, "log p") else None


def _is(x: Any, form: str) -> TypeGuard[Distribution]:
    return isinstance(x, Distribution) and x.form == form and not x.severed()


def _sum_of(weigher: Logits | None, terms: list[Term], factor: Tensor | None = None) -> Any:
    """A sum with each model's logits once; NotImplemented unless these are two, of which one is a teacher's."""
    terms = terms if weigher is None else [*terms, (weigher, 0.0)]
    dtype = functools.reduce(torch.promote_types, (x.dtype for x, _ in terms))
    merged: list[Term] = []
    for x, times in terms:
        at = next((i for i, (y, _) in enumerate(merged) if same_logits(x, y)), None)
        if at is None:
            merged.append((same(x.to(dtype)), times))
        else:
            merged[at] = merged[at][0], merged[at][1] + times
    if len(merged) != 2 or not any(times for _, times in merged) or merged[0][0].shape != merged[1][0].shape:
        return NotImplemented
    merged.sort(key=lambda term: not term[0].requires_grad)
    student, teacher = (x for x, _ in merged)
    graded = torch.is_grad_enabled() and teacher.requires_grad
    if graded or not _may_teach(teacher) or student.linear.shard is not None:
        return NotImplemented
    of = None if weigher is None else next(x for x, _ in merged if same_logits(x, weigher))
    return _comparison(merged, of, factor)


def _may_teach(x: Logits) -> bool:
    """Whether a :class:`Teacher` takes these logits."""
    if x.squash and (isinstance(x.gain, Tensor) or x.gain <= 0):
        return False
    return x.linear.shard is None and not isinstance(x.weight, LoRA) and x.weight.dtype == x.hidden.dtype


def product(one: Any, other: Any) -> Any:
    """By a number, by one number per row, or by probabilities; of one model's logits, as entropies are written."""
    if not isinstance(one, Comparison) and not isinstance(other, Comparison):
        found = product_of_one(one, other)
        if found is not NotImplemented:
            return found
    if _parts(one) is None:
        one, other = other, one
    parts = _parts(one)
    if parts is None:
        return NotImplemented
    weigher, terms, factor = parts
    if isinstance(other, (int, float)) and not isinstance(other, bool):
        return _sum_of(weigher, [(x, times * other) for x, times in terms], factor)
    if _is(other, "p") and weigher is None:
        return _sum_of(other.source, [(x, times * other.factor) for x, times in terms], factor)
    if isinstance(one, Comparison) and _of_each_row(other, one):
        # A copy: whoever has the mask may write to it before anything is read.
        other = other.to(torch.promote_types(one.dtype, other.dtype), copy=True)
        return _sum_of(weigher, terms, other if factor is None else factor * other)
    return NotImplemented


def _of_each_row(x: Any, of: Tensor) -> TypeGuard[Tensor]:
    """Whether a tensor has one number for each row of another, or one for all, and no gradient."""
    if type(x) is not Tensor or x.requires_grad or x.is_complex():
        return False
    same_rows = x.dim() == of.dim() and all(n in (1, m) for n, m in zip(x.shape[:-1], of.shape[:-1], strict=True))
    return same_rows and x.shape[-1] == 1


def _plus(one: Any, other: Any, sign: float = 1.0) -> Any:
    first, second = _parts(one), _parts(other)
    if first is None or second is None or first[2] is not None or second[2] is not None:
        return NotImplemented
    weigher, of_other = first[0], second[0]
    alike = weigher is of_other or (weigher is not None and of_other is not None and same_logits(weigher, of_other))
    return _sum_of(weigher, [*first[1], *((x, times * sign) for x, times in second[1])]) if alike else NotImplemented


def _minus(one: Any, other: Any) -> Any:
    return _plus(one, other, -1.0)


def _divided(x: Comparison, by: Any) -> Any:
    return product(x, 1 / by) if isinstance(by, (int, float)) and by != 0 else NotImplemented


def _reduced(x: Comparison, dim: Any, keepdim: bool, dtype: Any, count: int) -> Any:
    """The sum over the vocabulary, or over everything, divided by ``count``."""
    fits = not keepdim if dim is None else over_last(x, dim)
    if not fits or dtype not in (None, *FLOATS):
        return NotImplemented
    found = x.row_sums()
    found = found.sum() if dim is None else found.unsqueeze(-1) if keepdim else found
    return (found / count).to(dtype or found.dtype)


def _sum(x: Comparison, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return _reduced(x, dim, keepdim, dtype, 1)


def _mean(x: Comparison, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return _reduced(x, dim, keepdim, dtype, x.numel() if dim is None else x.shape[-1])


def _gather(x: Comparison, dim: Any, index: Any, **kwargs: Any) -> Any:
    if kwargs or x.weigher is not None or not gatherable(x, dim, index):
        return NotImplemented
    found = x._of_each(lambda log_p: log_p.gather(dim, index))
    return found if x.factor is None else found * x.factor


def kl_div(
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    """``F.kl_div`` of log-probs and of probabilities, or log-probs, of which one or both were not computed."""
    form, lazy = "log p" if log_target else "p", [x for x in (input, target) if isinstance(x, Distribution)]
    fits = all(_is(x, "log p" if x is input else form) and x.factor == 1.0 for x in lazy)
    if not lazy or not fits or size_average is not None or reduce is not None:
        return NotImplemented
    if reduction not in ("none", "sum", "mean", "batchmean"):
        return NotImplemented
    if len(lazy) == 2:
        p, q = (_widened(x.source) for x in (target, input))
        found = _sum_of(p, [(p, 1.0), (q, -1.0)])
        if found is NotImplemented or reduction == "none":
            return found
        rows = found.row_sums()
    else:
        x, other = (input, target) if lazy[0] is input else (target, input)
        if reduction == "none" or not _is_given(other, x):
            return NotImplemented
        rows = _of_given(x.source, other, "forward_kl" if x is input else "reverse_kl", logs=log_target or x is target)
    return rows.sum() / {"sum": 1, "mean": input.numel(), "batchmean": input.shape[0]}[reduction]


def _widened(x: Logits, other: Any = None) -> Any:
    """Logits in the dtype in which autocast takes a loss, and in that of what they are compared with."""
    dtype = result_dtype(x, WIDENED)
    return x.to(dtype if other is None else torch.promote_types(dtype, other.dtype))


def soft_cross_entropy(x: Logits, target: Any, reduction: str) -> Any:
    """``F.cross_entropy`` of ``[N, V]`` or ``[V]`` against probabilities, another model's or given ones."""
    if reduction not in ("none", "sum", "mean"):
        return NotImplemented
    if _is(target, "p") and target.factor == 1.0:
        found = _sum_of(target.source, [(_widened(x), -1.0)])
        if found is NotImplemented:
            return found
        rows = found.row_sums()
    elif _is_given(target, x):
        rows = _of_given(x, target, "cross entropy")
    else:
        return NotImplemented
    return rows if reduction == "none" else getattr(rows, reduction)()


# Beside a tensor that exists: a teacher that is not deferred, targets that are smoothed or sent.


def _is_given(x: Any, of: Tensor) -> TypeGuard[Tensor]:
    """Whether probabilities or log-probs are given for what was not computed, and need no gradient."""
    if type(x) is not Tensor or not x.is_floating_point() or (torch.is_grad_enabled() and x.requires_grad):
        return False
    source = of.source if isinstance(of, Distribution) else of
    assert isinstance(source, Logits)
    return x.shape == of.shape and x.device == of.device and source.linear.shard is None


def _of_given(x: Logits, given: Tensor, what: str, logs: bool = False) -> Tensor:
    """``[...]`` of each row of a student's probabilities p: the KL from given ones or to them, or the cross entropy.

    Given ones need not add up to 1. Of s times probabilities q,

        KL(s q, p) = s KL(q, p) + s log s       KL(p, s q) = KL(p, q) - log s       cross entropy = s (KL(q, p) + H(q))
    """
    student = _widened(x, given)
    wide = given.detach().to(torch.promote_types(given.dtype, torch.float32))
    log_q = wide if logs else wide.log()
    log_s = log_q.logsumexp(-1)
    if what == "reverse_kl":
        found = _beside(student, log_q, "reverse_kl").divergence
        assert found is not None
        return (found - log_s).to(student.dtype)
    s = log_s.exp()
    if not logs:
        # A row of zeros, as masks leave it, is compared with nothing.
        log_q.masked_fill_((s == 0)[..., None], 0.0)
    out = _beside(student, log_q, "forward_kl")
    assert out.divergence is not None
    assert out.teacher_entropy is not None
    more = torch.xlogy(s, s) if what == "forward_kl" else s * out.teacher_entropy
    return (s * out.divergence + more).to(student.dtype)


PAIRS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), product),
    **dict.fromkeys(("add", "__add__", "__radd__"), _plus),
    **dict.fromkeys(("sub", "subtract", "__sub__"), _minus),
    "kl_div": kl_div,
}
"""What torch's functions of these names make of two arguments, of which either may not be computed."""

ANSWERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("neg", "__neg__", "negative"), lambda x: product(x, -1.0)),
    **dict.fromkeys(("div", "__truediv__", "true_divide"), _divided),
    "sum": _sum,
    "mean": _mean,
    "gather": _gather,
}
"""What torch's functions of these names make of a comparison."""
