"""torch's own functions that a reading of ``Logits`` answers, by name. Loaded when one of them is first used.

Each returns what torch's function would, with its gradient, or NotImplemented, and then the logits are computed and
counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from logitless.deferred import distribution, divergence, losses
from logitless.deferred.distribution import Distribution
from logitless.deferred.later import COMPARISONS, Later, picked_later
from logitless.deferred.lazy import Lazy
from logitless.deferred.metrics import in_parts, metric, untracked
from logitless.deferred.pending import numbers
from logitless.deferred.read import SOFTMAX, ask, here, memo_of, over_last, readable
from logitless.errors.arguments import FLOATS
from logitless.operands import Logits
from logitless.operands.logits import SERVED, count_made


def _of_logits(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function where its first argument is logits that a reading may answer for."""

    def served(*args: Any, **kwargs: Any) -> Any:
        x, *rest = args or (kwargs.pop("input", None),)
        x = here(x)
        return function(x, *rest, **kwargs) if readable(x) else NotImplemented

    return served


def _softmax(form: str) -> Callable[..., Any]:
    def served(x: Any, dim: Any = None, *rest: Any, **kwargs: Any) -> Any:
        # Among the positions is the depth of the stack, for warnings.
        given = [y for y in (*rest, kwargs.get("dtype")) if y is not None and type(y) is not int]
        if not over_last(x, dim) or any(y not in FLOATS for y in given):
            return NotImplemented
        dtype = given[0] if given else None
        return distribution.distribution(x if dtype is None else x.to(dtype), form)

    return _of_logits(served)


def _logsumexp(x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    if kwargs or not over_last(x, dim):
        return NotImplemented
    found = numbers(x, "log_z")
    if type(found) is torch.Tensor and not found.is_inference():
        memo_of(x)[LOG_Z] = found, found._version
    return found.unsqueeze(-1) if keepdim else found


LOG_Z = "log Z that was handed out"
"""Noted of logits, with its version, so that logits less this tensor are known to be their log-probs."""


def _less_log_z(x: Any, other: Any = None, **kwargs: Any) -> Any:
    """``logits - logits.logsumexp(-1, keepdim=True)``, the log-probs."""
    z, version = memo_of(x).get(LOG_Z, (None, 0))
    if z is None or type(other) is not torch.Tensor or other._base is not z or other._version != version or kwargs:
        return NotImplemented
    aligned = other.shape == (*x.shape[:-1], 1) and other.stride()[:-1] == z.stride()
    # Read without a graph, or detached, its share of the gradient is left out.
    graphs = z.requires_grad == other.requires_grad == (x.requires_grad and torch.is_grad_enabled())
    if not aligned or not graphs:
        return NotImplemented
    memo_of(x)[SOFTMAX] = True
    dtype = torch.promote_types(x.dtype, other.dtype)
    return distribution.distribution(x if dtype == x.dtype else x.to(dtype), "log p")


def _gather(x: Any, dim: Any = None, index: Any = None, **kwargs: Any) -> Any:
    if kwargs.get("out") is not None or not distribution.gatherable(x, dim, index):
        return NotImplemented
    return numbers(x, "logit", index) if x._stands.part else picked_later(x, index)


def _mean(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **kwargs: Any) -> Any:
    if kwargs or not over_last(x, dim):
        return NotImplemented
    found = metric(x, "mean", dtype)
    if found is not None:
        found = found.to(dtype or x.dtype)
    else:
        found = ask(x if dtype is None else x.to(dtype), "mean_logit")
    return found.unsqueeze(-1) if keepdim else found


def _vector_norm(
    x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **kwargs: Any
) -> Any:
    """Of a metric, without a graph: the logits of a few rows at a time."""
    if kwargs or not over_last(x, dim) or not untracked(x):
        return NotImplemented
    found = metric(x, "norm", dtype) if ord == 2 else None
    if found is not None:
        found = found.to(dtype or x.dtype)
    else:
        found = [torch.linalg.vector_norm(part.computed(), ord, -1, dtype=dtype) for part in in_parts(x)]
        found = torch.cat(found).reshape(x.shape[:-1])
    return found.unsqueeze(-1) if keepdim else found


def _norm(
    x: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None, **kwargs: Any
) -> Any:
    order = 2 if p in (None, "fro") else p
    if out is not None or isinstance(order, str):
        return NotImplemented
    return _vector_norm(x, order, dim, keepdim, dtype=dtype, **kwargs)


def _times(*args: Any, **kwargs: Any) -> Any:
    """Logits times their own softmax."""
    found = next((x for x in args if isinstance(x, Lazy)), None)
    return found.answer("mul", args, kwargs) if isinstance(found, Distribution) and not kwargs else NotImplemented


def _compared(name: str) -> Callable[..., Any]:
    """Logits compared with numbers picked from the same: both out of logits that are computed, and counted, here."""

    def served(*args: Any, **kwargs: Any) -> Any:
        logits = next((x for x in args if isinstance(x, Logits)), None)
        picked = next((x for x in args if isinstance(x, Later)), None)
        if logits is None or picked is None or kwargs or not distribution.same_numbers(picked.source, logits):
            return NotImplemented
        count_made(logits, name)
        z = logits.computed()
        value = picked.of_logits(z).to(picked.dtype)
        return getattr(torch, name)(*(z if x is logits else value if x is picked else x for x in args))

    return served


SERVED.update({name: _compared(short) for name, short in COMPARISONS.items()})

SERVED.update(
    {
        "cross_entropy": losses.cross_entropy,
        "nll_loss": losses.nll_loss,
        "log_softmax": _softmax("log p"),
        "softmax": _softmax("p"),
        "logsumexp": _of_logits(_logsumexp),
        "gather": _of_logits(_gather),
        "__getitem__": _of_logits(distribution.columns),
        "argmax": _of_logits(distribution.argmax),
        "max": _of_logits(distribution.largest),
        "amax": _of_logits(distribution.amax),
        "min": _of_logits(distribution.smallest),
        "amin": _of_logits(distribution.amin),
        "topk": _of_logits(distribution.topk),
        "mean": _of_logits(_mean),
        "linalg_vector_norm": _of_logits(_vector_norm),
        "norm": _of_logits(_norm),
        "take_along_dim": _of_logits(lambda x, indices, dim=None: _gather(x, dim, indices)),
        **dict.fromkeys(("sub", "subtract", "__sub__"), _of_logits(_less_log_z)),
        "mul": _times,
        "multiply": _times,
        "__mul__": _times,
        "__rmul__": _times,
        "transpose": losses.transpose("transpose"),
        "swapaxes": losses.transpose("swapaxes"),
        "permute": losses.transpose("permute"),
    }
)

distribution.ANSWERS["nll_loss"] = losses.nll_loss
distribution.PAIRS.update(divergence.PAIRS)
