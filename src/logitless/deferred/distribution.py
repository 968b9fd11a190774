"""``Distribution``: ``softmax`` or ``log_softmax`` of logits that are not computed, for code that reads little of it.

log_softmax(x, -1).gather(-1, ids)      log-probs of ids           softmax(x, -1).max(-1)       the most likely
-(p * logp).sum(-1)                     entropy                    (softmax(x, -1) * x).sum(-1) mean logit under p
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from logitless.deferred.later import known, picked_later
from logitless.deferred.lazy import Lazy
from logitless.deferred.metrics import metric, walked
from logitless.deferred.pending import numbers
from logitless.deferred.read import SOFTMAX, ask, best, listable, memo_of, over_last
from logitless.operands import Logits
from logitless.operands.applied import applied
from logitless.operands.graph import views_of
from logitless.operands.logits import RULES, like
from logitless.operands.passed_on import same
from logitless.operands.stands import Stands, is_same

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "log p": lambda x: x.log_softmax(-1),
    "p": lambda x: x.softmax(-1),
    "finite log p": lambda x: x.log_softmax(-1).clamp(min=torch.finfo(x.dtype).min),
    "p log p": lambda x: x.softmax(-1) * x.log_softmax(-1),
    "p x": lambda x: x.softmax(-1) * x,
}
"""What is made of logits."""

OF_IDS = {"log p": "logprob", "p": "probability"}

OF_ROWS = frozenset(
    {
        *("__getitem__", "select", "narrow", "index_select", "unsqueeze", "squeeze", "unbind", "split", "chunk"),
        *("view", "reshape", "flatten", "transpose", "swapaxes", "permute", "contiguous", "clone", "detach", "data"),
        *("float", "double", "bfloat16", "half", "to", "type_as", "__iter__"),
    }
)
"""Rules of logits that hold for what is made of their rows one by one."""


class Distribution(Lazy):
    """``factor`` times one of ``FORMS`` of the source."""

    form: str
    factor: float

    def computed(self) -> Tensor:
        x = FORMS[self.form](self.source.computed().to(self.dtype))
        return x if self.factor == 1.0 else x * self.factor

    def answer(self, name: str, args: Any, kwargs: Any) -> Any:
        if name in PAIRS and len(args) == 2:
            return applied(PAIRS[name], args, kwargs)
        if name == "broadcast_tensors":
            return _broadcast(*args)
        # A distribution elsewhere among the arguments is no answer of its own.
        if not args or args[0] is not self:
            return NotImplemented
        if name in OF_ROWS:
            found = applied(RULES[name], (self.source, *args[1:]), kwargs)
            same = None if found is NotImplemented else self._of(found)
            if same is not None:
                return same
        rule = ANSWERS.get(name)
        return NotImplemented if rule is None else applied(rule, args, kwargs)

    def _of(self, found: Any) -> Any:
        """The same of other rows of the logits; None where columns were cut off."""
        if found is self.source:
            return self
        if isinstance(found, Logits):
            whole = found.shape[-1] == self.source.shape[-1] and found._stands.weight is self.source.stands().weight
            detached = not found.requires_grad and found.shape[-1] == self.source.shape[-1]
            return distribution(found, self.form, self.factor) if whole or detached else None
        if isinstance(found, Tensor):
            # Few rows that were picked without a graph.
            return FORMS[self.form](found) * self.factor if found.shape[-1] == self.source.shape[-1] else None
        if isinstance(found, (tuple, list)):
            return type(found)(self._of(x) for x in found)
        return iter([self._of(x) for x in found])


def distribution(source: Logits, form: str, factor: float = 1.0) -> Distribution:
    """One of ``FORMS`` of logits that are not computed."""
    dtype = source.dtype
    compute, source = FORMS[form], same(source)
    if form == "p":
        memo_of(source)[SOFTMAX] = True
    return Distribution.made(
        source, lambda x: compute(x.to(dtype)) * factor, source.shape, dtype, form=form, factor=factor
    )


def same_logits(one: Logits, other: Logits) -> bool:
    """Whether both stand for the same numbers, whatever their dtype."""
    if one is other:
        return True
    a, b = one.stands(), other.stands()
    return is_same(a.hidden, b.hidden) and a.same_head(b) and _same_gain(a, b) and one.shape == other.shape


def same_numbers(one: Logits, other: Logits) -> bool:
    """The same, whether or not there is a graph behind each: their operands lie in the same memory."""
    a, b = one.stands(), other.stands()
    own, others = ([x.detach() for x in y.tensors()] for y in (a, b))
    alike = len(own) == len(others) and all(map(is_same, own, others))
    return alike and _same_gain(a, b) and a.squash == b.squash and one.shape == other.shape


def _same_gain(a: Stands, b: Stands) -> bool:
    """Whether both have one factor; of factors of rows, the same tensor."""
    return a.gain is b.gain or (not isinstance(a.gain, Tensor) and not isinstance(b.gain, Tensor) and a.gain == b.gain)


def product(one: Any, other: Any) -> Any:
    """By a number; or of a distribution with its logarithm or its logits, as entropies are written."""
    if not isinstance(one, Distribution):
        one, other = other, one
    if isinstance(other, (int, float)) and not isinstance(other, bool):
        return distribution(one.source, one.form, one.factor * other)
    if not isinstance(other, (Logits, Distribution)):
        return NotImplemented
    dtype = torch.promote_types(one.dtype, other.dtype)
    wide: Any = one.source if dtype == one.dtype else one.source.to(dtype)
    if isinstance(other, Logits) and one.form == "p" and same_logits(one.source, other):
        return distribution(wide, "p x", one.factor)
    if isinstance(other, Distribution) and {one.form, other.form} in ({"p", "log p"}, {"p", "finite log p"}):
        if same_logits(one.source, other.source):
            return distribution(wide, "p log p", one.factor * other.factor)
    return NotImplemented


def _divided(x: Distribution, by: Any, **kwargs: Any) -> Any:
    return NotImplemented if kwargs or not isinstance(by, (int, float)) or by == 0 else product(x, 1 / by)


def _scaled(x: Distribution, found: Tensor) -> Tensor:
    return found if x.factor == 1.0 else -found if x.factor == -1.0 else found * x.factor


def _gather(x: Distribution, dim: Any, index: Any, **kwargs: Any) -> Any:
    if x.form not in OF_IDS or kwargs.get("out") is not None or not gatherable(x, dim, index):
        return NotImplemented
    return _scaled(x, numbers(x.source, OF_IDS[x.form], index))


def gatherable(x: Tensor, dim: Any, index: Any) -> bool:
    """Whether every row is asked for a list of columns."""
    ids = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32) and index.dim() > 0
    return over_last(x, dim) and ids and index.shape[:-1] == x.shape[:-1]


def _exp(x: Distribution) -> Any:
    return distribution(x.source, "p") if (x.form, x.factor) == ("log p", 1.0) else NotImplemented


def _log(x: Distribution) -> Any:
    return distribution(x.source, "log p") if (x.form, x.factor) == ("p", 1.0) else NotImplemented


def _again(form: str) -> Callable[..., Any]:
    """``softmax`` or ``log_softmax`` of log-probs, whose probabilities add up to 1 already."""

    def rule(x: Distribution, dim: Any = None, *rest: Any, **kwargs: Any) -> Any:
        # Among the positions is the depth of the stack, for warnings.
        casts = any(y is not None and type(y) is not int for y in (*rest, kwargs.get("dtype")))
        fits = (x.form, x.factor) == ("log p", 1.0) and over_last(x, dim) and not casts
        return distribution(x.source, form) if fits else NotImplemented

    return rule


def _clamp(x: Distribution, min: Any = None, max: Any = None, **kwargs: Any) -> Any:
    """From the smallest number of the dtype on, by which code keeps ``0 * log(0)`` from being NaN: entropies do."""
    fits = x.form == "log p" and x.factor == 1.0 and max is None and not kwargs
    return distribution(x.source, "finite log p") if fits and min == torch.finfo(x.dtype).min else NotImplemented


def _equal(x: Distribution, other: Any) -> Any:
    """A distribution and itself, by which code looks for NaN: one answer for a whole row, and no memory."""
    if other is not x or x.form not in OF_IDS:
        return NotImplemented
    return ask(x.source, "log_z").isfinite()[..., None].expand(x.shape)


def _broadcast(*tensors: Any) -> Any:
    """Smaller tensors in the shape of a distribution, which is as it was."""
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    if any(isinstance(x, (Lazy, Logits)) and x.shape != shape for x in tensors):
        return NotImplemented
    return tuple(x if isinstance(x, (Lazy, Logits)) else x.expand(shape) for x in tensors)


def _neg(x: Distribution) -> Any:
    return distribution(x.source, x.form, -x.factor)


def _sum(x: Distribution, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if not over_last(x, dim) or x.form in ("p", "finite log p"):
        return NotImplemented
    if x.form == "p log p":
        found = -numbers(x.source, "entropy")
    elif x.form == "log p":
        found = (ask(x.source, "mean_logit") - ask(x.source, "log_z")) * x.shape[-1]
    else:
        # In this order one pass is enough.
        entropy = ask(x.source, "entropy")
        found = ask(x.source, "log_z") - entropy
    found = _scaled(x, found)
    found = found.unsqueeze(-1) if keepdim else found
    return found if dtype is None else found.to(dtype)


def _mean(x: Distribution, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if x.form != "log p" or not over_last(x, dim):
        return NotImplemented
    found = _scaled(x, ask(x.source, "mean_logit") - ask(x.source, "log_z"))
    found = found.unsqueeze(-1) if keepdim else found
    return found if dtype is None else found.to(dtype)


# The most likely ids, of logits and of distributions alike.


def leading(x: Any, logits: Logits, count: int) -> tuple[Tensor, Tensor]:
    """``[..., K]`` numbers of ``x``, with a graph, and ids where ``logits`` are largest. Of a row without a
    distribution, with NaN among its logits for instance, all numbers are NaN and all ids 0."""
    ids = best(logits, count)
    none = ids < 0
    ids = ids.masked_fill(none, 0)
    return picked_later(x, ids, none) if isinstance(x, Logits) else ask(x.source, OF_IDS[x.form], ids), ids


def _ranked(x: Any) -> Logits | None:
    """The logits whose order is that of ``x``."""
    if isinstance(x, Logits):
        return x
    return x.source if x.form in OF_IDS and x.factor == 1.0 else None


def argmax(x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    logits, dim = _ranked(x), -1 if dim is None and x.dim() == 1 else dim
    if logits is None or kwargs or not over_last(x, dim):
        return NotImplemented
    ids = best(logits, 1).clamp_min(0)
    return ids if keepdim else ids[..., 0]


def largest(x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    """``max`` over columns; of everything, the largest of the rows'."""
    logits = _ranked(x)
    if logits is None or kwargs or (dim is not None and not over_last(x, dim)):
        return NotImplemented
    found = metric(x, "max") if isinstance(x, Logits) and walked(x) else None
    if found is not None:
        return found.values.max() if dim is None else _extreme(x, found, keepdim)
    values, ids = leading(x, logits, 1)
    if dim is None:
        return values.max()
    return torch.return_types.max((values, ids) if keepdim else (values[..., 0], ids[..., 0]))


def _extreme(x: Logits, found: Any, keepdim: bool) -> Any:
    """Numbers and columns as torch's function returned them, with a last dimension of one where that is asked for."""
    kind = torch.Tensor.max if isinstance(found, torch.return_types.max) else torch.Tensor.min
    values, ids = (y.unsqueeze(-1) for y in found) if keepdim else found
    return type(found)((known(x, values, lambda z: kind(z, -1, keepdim).values), ids))


def amax(x: Any, dim: Any = (), keepdim: bool = False, **kwargs: Any) -> Any:
    found = largest(x, dim, keepdim, **kwargs) if over_last(x, dim) else NotImplemented
    return found if found is NotImplemented else found[0]


def smallest(x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    """``min`` over columns; with a graph, where the logits of the negated hidden states and bias are largest."""
    if not isinstance(x, Logits) or kwargs or not over_last(x, dim):
        return NotImplemented
    found = metric(x, "min")
    if found is not None:
        return _extreme(x, found, keepdim)
    bias = x.linear.bias
    if bias is not None:
        # Of -inf, which leaves a token out, the negative would leave no distribution.
        bias = bias.neg().clamp(max=torch.finfo(bias.dtype).max / 2)
    values, ids = leading(x, like(x, -x.hidden, linear=replace(x.linear, bias=bias)), 1)
    return torch.return_types.min((values, ids) if keepdim else (values[..., 0], ids[..., 0]))


def amin(x: Any, dim: Any = (), keepdim: bool = False, **kwargs: Any) -> Any:
    found = smallest(x, dim, keepdim, **kwargs) if over_last(x, dim) else NotImplemented
    return found if found is NotImplemented else found[0]


def topk(x: Any, k: Any, dim: Any = -1, largest: bool = True, sorted: bool = True, **kwargs: Any) -> Any:
    logits = _ranked(x)
    if logits is None or kwargs or not largest or not over_last(x, dim) or not listable(logits, k):
        return NotImplemented
    return torch.return_types.topk(leading(x, logits, k))


def columns(x: Any, index: Any) -> Any:
    """``x[index]`` where the index names columns: one for each row, one for all, or a list for all."""
    whole = index if isinstance(index, tuple) else (index,)
    found = _columns(x, whole)
    if isinstance(x, Logits) and all(i is None or i is Ellipsis or isinstance(i, (int, slice)) for i in whole):
        # A view, where torch has logits.
        x._versions += views_of(found, found)
    return found


def _columns(x: Any, whole: tuple[Any, ...]) -> Any:
    *lead, last = (_as_tensor(i, x.device) for i in whole)
    if (isinstance(x, Distribution) and x.form not in OF_IDS) or not _is_ids(last):
        return NotImplemented
    if not all(i is None or i is Ellipsis or isinstance(i, (slice, Tensor)) for i in lead):
        return NotImplemented
    last = torch.where(last < 0, last + x.shape[-1], last)
    if all(_is_ids(i) for i in lead) and len(whole) == x.dim():
        *rows, last = torch.broadcast_tensors(*lead, last)
        if not rows:
            return _taken(x, last.reshape(-1)).reshape(last.shape)
        return _taken(x[tuple(rows)], last[..., None])[..., 0]
    # Numbers are indices like lists to torch, and belong behind slices: elsewhere they change the order of dimensions.
    slices = [not isinstance(i, Tensor) for i in lead]
    named = sum(i is not None for i in lead) == x.dim() - 1 or any(i is Ellipsis for i in lead)
    numbers_last = all(is_slice or i.dim() == 0 for is_slice, i in zip(slices, lead, strict=True))
    if not named or not numbers_last or last.dim() > 1 or slices != sorted(slices, reverse=True):
        return NotImplemented
    rows = x[whole[:-1]]
    found = _taken(rows, last.reshape(-1).expand(*rows.shape[:-1], -1))
    return found if last.dim() else found[..., 0]


def _as_tensor(i: Any, device: torch.device) -> Any:
    """An index that lists places, as a tensor; any other as it is."""
    lists = isinstance(i, (list, int, range)) or (hasattr(i, "__array__") and not isinstance(i, Tensor))
    return torch.as_tensor(i, device=device) if lists else i


def _is_ids(i: Any) -> bool:
    return isinstance(i, Tensor) and i.dtype == torch.int64


def _taken(x: Any, ids: Tensor) -> Tensor:
    if isinstance(x, Distribution):
        return _scaled(x, ask(x.source, OF_IDS[x.form], ids))
    return ask(x, "logit", ids) if isinstance(x, Logits) else x.gather(-1, ids)


PAIRS: dict[str, Callable[..., Any]] = {}
"""Functions of two arguments, of which either may be the distribution; filled by ``served``."""

ANSWERS: dict[str, Callable[..., Any]] = {
    "gather": _gather,
    "take_along_dim": lambda x, indices, dim=None: _gather(x, dim, indices),
    "softmax": _again("p"),
    "log_softmax": _again("log p"),
    "clamp": _clamp,
    "eq": _equal,
    "__eq__": _equal,
    "__getitem__": columns,
    "exp": _exp,
    "log": _log,
    "neg": _neg,
    "__neg__": _neg,
    "negative": _neg,
    "div": _divided,
    "__truediv__": _divided,
    "true_divide": _divided,
    "sum": _sum,
    "mean": _mean,
    "argmax": argmax,
    "max": largest,
    "amax": amax,
    "topk": topk,
}
"""What torch's functions of these names make of a distribution."""
