"""``cross_entropy`` and ``nll_loss`` of logits that are not computed, as torch defines them.

    loss of a row = (1 - e) w[y] (-log p[y])  +  e / V  sum over c of w[c] (-log p[c])

where e is the label smoothing and w the class weights. The second sum is ``log Z sum(w) - x . w``: the mean logit where
there are no weights, and otherwise one dot product of the hidden states with ``w @ weight``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless.deferred.distribution import Distribution
from logitless.deferred.divergence import soft_cross_entropy
from logitless.deferred.lazy import Lazy
from logitless.deferred.read import WIDENED, readable, result_dtype
from logitless.operands import Logits, LoRA
from logitless.operands.passed_on import same
from logitless.score import logprobs
from logitless.spec import IGNORE


class Turned(Lazy):
    """``logits.transpose(1, 2)``, as ``cross_entropy`` wants classes: ``[B, V, S]``."""

    def computed(self) -> Tensor:
        return self.source.computed().transpose(1, 2)

    def answer(self, name: str, args: Any, kwargs: Any) -> Any:
        if name == "cross_entropy":
            return cross_entropy(*args, **kwargs)
        if not args or args[0] is not self:
            return NotImplemented
        if name in ("transpose", "swapaxes", "permute") and _turns(self, name, args[1:]):
            return self.source
        if name in ("contiguous", "clone") and not kwargs:
            return turned(same(self.source))
        if name in ("float", "double", "to"):
            found = getattr(self.source, name)(*args[1:], **kwargs)
            return self if found is self.source else turned(found) if isinstance(found, Logits) else NotImplemented
        return NotImplemented


def _turns(x: Tensor, name: str, dims: tuple[Any, ...]) -> bool:
    """Whether the last two of three dimensions change places."""
    dims = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    if x.dim() != 3 or not all(type(d) is int and -3 <= d < 3 for d in dims):
        return False
    found = tuple(d % 3 for d in dims)
    return found == (0, 2, 1) if name == "permute" else set(found) == {1, 2} and len(found) == 2


def turned(x: Logits) -> Turned:
    batch, length, columns = x.shape
    return Turned.made(x, lambda z: z.transpose(1, 2), (batch, columns, length), x.dtype)


def transpose(name: str) -> Any:
    """A function of torch that may turn logits ``[B, S, V]`` into ``[B, V, S]``."""
    return lambda x, *dims, **kwargs: turned(x) if readable(x) and _turns(x, name, dims) else NotImplemented


def cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = IGNORE,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Of ``[N, V]`` with ``[N]``, of ``[V]`` with one label, and of :class:`Turned` with ``[B, S]``."""
    x = input.source if isinstance(input, Turned) else input
    if not readable(x) or size_average is not None or reduce is not None:
        return NotImplemented
    soft = isinstance(target, Distribution) or (isinstance(target, Tensor) and target.is_floating_point())
    if soft and x is input and x.dim() < 3:
        plain = weight is None and not label_smoothing and ignore_index == IGNORE
        return soft_cross_entropy(x, target, reduction) if plain else NotImplemented
    labels = isinstance(target, Tensor) and target.dtype == torch.int64 and target.shape == x.shape[:-1]
    if not labels or (x.dim() > 2 and not isinstance(input, Turned)) or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    if not 0.0 <= label_smoothing <= 1.0 or type(ignore_index) is not int:
        return NotImplemented
    dtype = result_dtype(x, WIDENED)
    if weight is not None and not _are_of_classes(weight, x, dtype):
        return NotImplemented
    one_product = not x.squash and not isinstance(x.weight, LoRA) and x.shard is None
    if label_smoothing and weight is not None and not one_product:
        return NotImplemented
    return _loss(x, target, weight, ignore_index, reduction, label_smoothing)


def _are_of_classes(weight: Any, x: Logits, dtype: torch.dtype) -> bool:
    """Whether torch takes these weights of classes; autocast makes theirs the dtype of the logits."""
    fits = isinstance(weight, Tensor) and weight.shape == x.shape[-1:] and weight.is_floating_point()
    return fits and (weight.dtype == x.dtype or dtype != x.dtype)


def nll_loss(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = IGNORE,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    """Of ``log_softmax`` that was not computed."""
    if not isinstance(input, Distribution) or (input.form, input.factor) != ("log p", 1.0):
        return NotImplemented
    return cross_entropy(input.source, target, weight, size_average, ignore_index, reduce, reduction)


def _loss(x: Logits, labels: Tensor, weight: Tensor | None, ignore: int, reduction: str, smoothing: float) -> Tensor:
    columns = x.shape[-1]
    left_out = labels == ignore
    target = labels if ignore == IGNORE else torch.where(labels == IGNORE, columns, labels)
    target = target.masked_fill(left_out, IGNORE)
    flat = x.reshape(-1, columns)
    assert isinstance(flat, Logits)
    found = logprobs(flat, target.reshape(-1), stats=("mean_logit",) if smoothing and weight is None else ())
    loss, log_z, mean = (
        None if y is None else y.reshape(labels.shape) for y in (found.logprob, found.log_z, found.mean_logit)
    )
    assert loss is not None
    assert log_z is not None
    of_class = (
        None if weight is None else weight.to(loss.dtype)[labels.masked_fill(left_out, 0)].masked_fill(left_out, 0)
    )
    loss = -loss if of_class is None else -loss * of_class
    if smoothing:
        if weight is None:
            assert mean is not None
            rest = log_z - mean
        else:
            w = weight.to(loss.dtype)
            rest = (log_z * w.sum() - _weighted_sum(flat, w).reshape(labels.shape)) / columns
        loss = (1 - smoothing) * loss + smoothing * rest.masked_fill(left_out, 0.0)
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        loss = loss / ((~left_out).sum() if of_class is None else of_class.sum())
    return loss.to(result_dtype(x, WIDENED))


def _weighted_sum(x: Logits, w: Tensor) -> Tensor:
    """``[R]`` sum over columns of a logit times its class weight."""
    now = x.opened()
    hidden, weight, bias = now.hidden, now.weight, now.linear.bias
    assert isinstance(weight, Tensor)
    found = hidden.to(w.dtype) @ (w @ weight.to(w.dtype))
    found = found if bias is None else found + w @ bias.to(w.dtype)
    return found * x.gain
