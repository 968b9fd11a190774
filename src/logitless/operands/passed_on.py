"""Operations that leave logits uncomputed: a rule for each, by the name of torch's function.

A rule returns other ``Logits``, or NotImplemented where only computed logits would do. Rows are leading dimensions: an
operation on them acts on the hidden states, and on a factor that is one number per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from logitless.errors import LogitlessError
from logitless.errors.arguments import FLOATS
from logitless.notes import place
from logitless.operands.graph import total_over
from logitless.operands.logits import METRICS, RULES, Logits, like
from logitless.operands.lora import LoRA
from logitless.spec import inspectable


def _row_dims(x: Logits, *dims: int) -> bool:
    """Whether all of ``dims`` are leading dimensions."""
    return all(isinstance(d, int) and -x.dim() <= d < x.dim() and d % x.dim() < x.dim() - 1 for d in dims)


def _along(name: str, default: int | None = None) -> Callable[..., Any]:
    """The rule of a method whose first argument is a dimension, which must be a leading one."""

    def rule(x: Any, dim: int | None = default, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, Logits) or dim is None or not _row_dims(x, dim):
            return NotImplemented
        dim = dim % x.dim()
        return _of_rows(x, lambda h: getattr(h, name)(dim, *args, **kwargs), view=name != "index_select")

    return rule


def _unsqueeze(x: Any, dim: int) -> Any:
    """A new dimension before the last, counted in the result, which has one more."""
    if not isinstance(x, Logits) or type(dim) is not int or not -x.dim() - 1 <= dim <= x.dim():
        return NotImplemented
    dim = dim % (x.dim() + 1)
    return _of_rows(x, lambda h: h.unsqueeze(dim)) if dim < x.dim() else NotImplemented


def _of_rows(x: Logits, change: Callable[[Tensor], Any], view: bool = True) -> Any:
    """Logits with a change of the hidden states, and of one factor per row; a tuple of them where it makes parts.

    Args:
        view: whether torch would make a view of logits in memory where it can.
    """
    hidden = change(x.hidden)
    gain = change(x.gain[..., None]) if isinstance(x.gain, Tensor) else None
    rows = None
    if view:
        with torch._C._DisableTorchDispatch():  # pyright: ignore[reportAttributeAccessIssue]
            rows = change(x.place_of_rows())
    if isinstance(hidden, (tuple, list)):
        gains = [x.gain] * len(hidden) if gain is None else [g[..., 0] for g in gain]
        parts = (like(x, h, gain=g, part=True) for h, g in zip(hidden, gains, strict=True))
        return type(hidden)(_view_of(x, *pair) for pair in zip(parts, rows or [None] * len(hidden), strict=True))
    return _view_of(x, like(x, hidden, gain=x.gain if gain is None else gain[..., 0]), rows)


def _view_of(x: Logits, new: Logits, rows: Tensor | None) -> Logits:
    """``new``, whose rows would lie there in memory. Where that is the memory of ``x``, what is done to one of them in
    place is seen by the other. Hidden states do not tell: logits are contiguous also where hidden states are not."""
    if rows is not None:
        new._rows = rows
        if torch._C._is_alias_of(x.place_of_rows(), rows):  # pyright: ignore[reportAttributeAccessIssue]
            new._changes, new._seen = x._changes, x._seen
    return new


def _squeeze(x: Any, dim: Any = None) -> Any:
    if not isinstance(x, Logits) or (dim is None and x.shape[-1] == 1):
        return NotImplemented
    dims = range(x.dim() - 1) if dim is None else dim if isinstance(dim, (tuple, list)) else (dim,)
    dims = tuple(d % x.dim() for d in dims) if _row_dims(x, *dims) else None
    return NotImplemented if dims is None else _of_rows(x, lambda h: h.squeeze(dims))


def _blank(function: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of a function that takes shape, dtype and device of its first argument, and none of its numbers."""

    def rule(x: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(x, "placements"):
            return NotImplemented
        return function(torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape), *args, **kwargs)

    return rule


def _split(name: str) -> Callable[..., Any]:
    def rule(x: Any, size: Any = None, dim: int = 0, **kwargs: Any) -> Any:
        size = kwargs.get("split_size", kwargs.get("chunks", size))
        if not isinstance(x, Logits) or size is None or not _row_dims(x, dim):
            return NotImplemented
        dim = dim % x.dim()
        return tuple(_of_rows(x, lambda h: getattr(h, name)(size, dim)))

    return rule


_unbind = _along("unbind", 0)


def _item(x: Any, index: Any) -> Any:
    picked = _rows_of(x, index)
    if isinstance(picked, Logits) and picked._stands.few and not torch.is_grad_enabled():
        count = picked.shape[:-1].numel()
        # A step of generation writes to the few rows that it picks.
        if count < x.shape[:-1].numel() and count <= picked._stands.few:
            return picked.computed()
    return picked


def _rows_of(x: Any, index: Any) -> Any:
    """The rows of an index; columns may be cut at their ends where the vocabulary is whole."""
    parts = index if isinstance(index, tuple) else (index,)
    if not isinstance(x, Logits) or any(isinstance(i, Logits) for i in parts):
        return NotImplemented
    indexed = [i for i in parts if i is not None and i is not Ellipsis]
    dims = sum(i.dim() if isinstance(i, Tensor) and i.dtype == torch.bool else 1 for i in indexed)
    dots = any(i is Ellipsis for i in parts)
    view = all(i is None or i is Ellipsis or type(i) in (int, slice) for i in parts)
    if dims < x.dim() and (not dots or parts[-1] is Ellipsis):
        return _of_rows(x, lambda h: h[index], view)
    *lead, last = parts
    if not isinstance(last, slice):
        return NotImplemented
    columns = last.indices(x.shape[-1])
    if columns == (0, x.shape[-1], 1):
        return _of_rows(x, lambda h: h[(*lead, slice(None))], view)
    if columns[2] != 1 or x.linear.shard is not None or x.linear.weight_grad is not None:
        return NotImplemented
    weight = x.weight
    adapted = isinstance(weight, LoRA)
    weight = replace(weight, weight=weight.weight[last], b=weight.b[last]) if adapted else weight[last]
    bias = None if x.linear.bias is None else x.linear.bias[last]
    with torch._C._DisableTorchDispatch():  # pyright: ignore[reportAttributeAccessIssue]
        rows = x.place_of_rows()[..., :1]
    cut = _view_of(x, like(x, weight=weight, linear=replace(x.linear, bias=bias)), rows)
    return _of_rows(cut, lambda h: h[(*lead, slice(None))], view)


def _view(x: Any, *shape: Any, **kwargs: Any) -> Any:
    """Logits in another leading shape; the last dimension stays."""
    if not isinstance(x, Logits) or kwargs.get("dtype") or any(isinstance(n, torch.dtype) for n in shape):
        return NotImplemented
    sizes = kwargs.get("shape", shape)
    sizes = list(sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list, torch.Size)) else sizes)
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    if not sizes or sizes.count(-1) > 1:
        return NotImplemented
    if -1 in sizes:
        rest = math.prod(n for n in sizes if n != -1)
        if rest == 0 or rows * width % rest:
            return NotImplemented
        sizes[sizes.index(-1)] = rows * width // rest
    if sizes[-1] != width or math.prod(sizes[:-1]) != rows:
        return NotImplemented
    return _of_rows(x, lambda h: h.reshape(*sizes[:-1], h.shape[-1]))


def _flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    if not _row_dims(x, start_dim, end_dim):
        return NotImplemented
    first, last = start_dim % x.dim(), end_dim % x.dim()
    return x if first == last else _of_rows(x, lambda h: h.flatten(first, last))


def _transpose(x: Any, dim0: Any = None, dim1: Any = None, **axes: Any) -> Any:
    dims = (axes.get("axis0", dim0), axes.get("axis1", dim1))
    return _of_rows(x, lambda h: h.transpose(*(d % x.dim() for d in dims))) if _row_dims(x, *dims) else NotImplemented


def _permute(x: Any, *given: Any, dims: Any = None) -> Any:
    dims = given if dims is None else dims
    dims = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    if len(dims) != x.dim() or dims[-1] % x.dim() != x.dim() - 1:
        return NotImplemented
    return _of_rows(x, lambda h: h.permute(*dims))


def same(x: Any, **_: Any) -> Any:
    """A copy of the logits, which shares the results that were read already."""
    new = like(x)
    new._memo = x._memo
    return new


def _contiguous(x: Any, **_: Any) -> Any:
    return x if x.place_of_rows().is_contiguous() else same(x)


def _detach(x: Any) -> Any:
    linear = x.linear if x.linear.bias is None else replace(x.linear, bias=x.linear.bias.detach())
    weight = x.weight.detached() if isinstance(x.weight, LoRA) else x.weight.detach()
    new = _view_of(x, like(x, x.hidden.detach(), weight=weight, linear=linear), x.place_of_rows())
    new._memo[METRICS] = x._memo.setdefault(METRICS, [])
    return new


def _let_go(x: Any) -> Any:
    """``detach_``, by which a schedule of pipelines frees the graph of an output that it still has to return."""
    if not isinstance(x, Logits):
        return NotImplemented
    x._stands, x._behind, x._edge, x._memo = _detach(x)._stands, None, False, {}
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.detach_(x)


def _cast(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda x, **_: _to(x, dtype)


def _to(x: Any, *args: Any, **kwargs: Any) -> Any:
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    if args and (isinstance(args[0], bool) or not isinstance(args[0], (torch.dtype, Tensor, str, int, torch.device))):
        return NotImplemented
    for arg in args:
        if isinstance(arg, torch.dtype):
            dtype = arg
        elif isinstance(arg, Tensor):
            dtype, device = arg.dtype, arg.device
        elif isinstance(arg, (str, int, torch.device)) and not isinstance(arg, bool):
            device = arg
    # By their places the flags are non_blocking and copy.
    flags = [arg for arg in args if isinstance(arg, bool)]
    copy = kwargs.get("copy", len(flags) > 1 and flags[1])
    # torch finds the index of a device that is named without one.
    if device is not None and torch.empty(0, device=device).device != x.device:
        return NotImplemented
    if dtype is not None and dtype not in FLOATS:
        return NotImplemented
    # As in torch, what is of that dtype already is returned itself, also where no gradient is recorded.
    if dtype in (None, x.dtype):
        return like(x) if copy else x
    plain = isinstance(x.gain, float) and x.gain == 1.0 and not x.squash and x.linear.match is None
    if plain and dtype.itemsize == 2 < x.dtype.itemsize:
        return like(x, dtype=dtype, linear=replace(x.linear, match=str(dtype).removeprefix("torch.")))
    return like(x, dtype=dtype)


def _per_row(x: Logits, by: Any) -> float | Tensor | None:
    """A factor as a number, or as one number per row ``[...]``; None where it is neither."""
    if isinstance(by, bool) or isinstance(by, Logits):
        return None
    if isinstance(by, (int, float)):
        # An integer of more bits is refused by torch itself.
        fits = abs(by) < 1 << 63 if isinstance(by, int) else math.isfinite(by)
        return float(by) if fits and by != 0 else None
    if not isinstance(by, Tensor) or not by.is_floating_point() or by.requires_grad:
        return None
    if by.dim() == 0:
        return by.expand(x.shape[:-1])
    if by.shape[-1] != 1 or by.dim() > x.dim():
        return None
    rows = by.shape[:-1]
    last = x.shape[x.dim() - 1 - len(rows) : -1]
    fits = all(n in (1, size) for n, size in zip(rows, last, strict=True))
    return by[..., 0].expand(x.shape[:-1]) if fits else None


def _any_negative(*gains: float | Tensor) -> bool:
    """Whether a number turns the order of the logits around. Where each row has a factor, all of them are above 0."""
    return any(not isinstance(x, Tensor) and x < 0 for x in gains)


def _times(x: Any, other: Any, power: int = 1) -> Any:
    if not isinstance(x, Logits):
        x, other = other, x
        if power < 0 or not isinstance(x, Logits):
            return NotImplemented
    factor = _per_row(x, other)
    if factor is None:
        return NotImplemented
    if isinstance(factor, Tensor) != isinstance(x.gain, Tensor) and _any_negative(factor, x.gain):
        return NotImplemented
    if isinstance(factor, Tensor):
        if inspectable(factor) and not bool((factor > 0).all()):
            return NotImplemented
        factor = factor.to(torch.promote_types(x.dtype, torch.float32))
    dtype = torch.promote_types(x.dtype, other.dtype) if isinstance(other, Tensor) and other.dim() else x.dtype
    return like(x, gain=x.gain * factor if power > 0 else x.gain / factor, dtype=dtype)


def _divide(x: Any, other: Any, **kwargs: Any) -> Any:
    return NotImplemented if kwargs.get("rounding_mode") else _times(x, other, -1)


def _in_place(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of an operation in place: the factor of ``x`` itself changes; views made before are refused then."""

    def change(x: Any, other: Any, **kwargs: Any) -> Any:
        scaled = rule(x, other, **kwargs) if isinstance(x, Logits) else NotImplemented
        if scaled is NotImplemented or scaled.dtype != x.dtype:
            return NotImplemented
        if x.requires_grad and not torch.is_grad_enabled():
            raise LogitlessError(
                f"Logits: a change in place at {place()} where no gradient is recorded, of logits that have one: torch "
                f"would leave the factor out of their gradient. Change them outside of no_grad, or take a copy: "
                f"logits / temperature."
            )
        x.gain = scaled.gain
        return x

    return change


def _tanh(x: Any) -> Any:
    """The tanh of a softcap that a model applies itself; the multiplication after it is a factor again."""
    if x.squash or isinstance(x.gain, Tensor):
        return NotImplemented
    return like(x, squash=abs(x.gain), gain=math.copysign(1.0, x.gain))


def _sum(x: Any, *args: Any, **kwargs: Any) -> Any:
    """``sum()`` of everything, which code adds times 0 to keep a graph connected."""
    if args or kwargs or x.squash or isinstance(x.weight, LoRA):
        return NotImplemented
    now = x.opened()
    hidden, weight, bias = now.shared(now.hidden), now.weight, now.linear.bias
    wide = torch.promote_types(x.dtype, torch.float32)
    h = hidden if not isinstance(x.gain, Tensor) else hidden * x.gain[..., None]
    total = h.reshape(-1, h.shape[-1]).sum(0, dtype=wide) @ weight.sum(0, dtype=wide)
    if bias is not None:
        count = x.gain.sum() if isinstance(x.gain, Tensor) else math.prod(x.shape[:-1])
        total = total + count * bias.sum(dtype=wide)
    if x.shard is not None and now.whole:
        total = total_over(total, x.shard.group)
    return (total if isinstance(x.gain, Tensor) else total * x.gain).to(x.dtype)


def _mean(x: Any, *args: Any, **kwargs: Any) -> Any:
    """``mean()`` of everything, to keep a graph connected, too; the mean of each row is a reading."""
    total = _sum(x, *args, **kwargs) if x.numel() else NotImplemented
    return total if total is NotImplemented else total / x.numel()


def _cat(tensors: Sequence[Any], dim: int = 0, **kwargs: Any) -> Any:
    """Logits of one head, their rows end to end."""
    first = tensors[0]
    if kwargs or not all(isinstance(x, Logits) for x in tensors) or not _row_dims(first, dim):
        return NotImplemented
    now = first.stands()
    if not all(now.same_head(x.stands()) for x in tensors) or any(x.dtype != first.dtype for x in tensors):
        return NotImplemented
    hidden = torch.cat([x.hidden for x in tensors], dim % first.dim())
    if any(isinstance(x.gain, Tensor) or x.gain != first.gain for x in tensors):
        if _any_negative(*(x.gain for x in tensors)):
            return NotImplemented
        wide = {"dtype": torch.promote_types(first.dtype, torch.float32), "device": first.device}
        gains = [x.gain if isinstance(x.gain, Tensor) else torch.full(x.shape[:-1], x.gain, **wide) for x in tensors]
        return like(first, hidden, gain=torch.cat(gains, dim % first.dim()), part=False)
    return like(first, hidden, part=False)


def _stack(tensors: Sequence[Any], dim: int = 0, **kwargs: Any) -> Any:
    """Logits of one head, in a new first dimension."""
    if dim != 0 or kwargs or not all(isinstance(x, Logits) for x in tensors):
        return NotImplemented
    return _cat([_of_rows(x, lambda h: h.unsqueeze(0)) for x in tensors])


BLANKS = {
    function.__name__: _blank(function)
    for function in (
        *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor),
        *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like),
    )
}
"""Rules of what is made of logits, and of what is made of their numbers, alike."""

CASTS = {"float": torch.float32, "bfloat16": torch.bfloat16, "half": torch.float16, "double": torch.float64}

RULES.update({name: _along(name) for name in ("select", "narrow", "index_select")})
RULES.update(BLANKS)
RULES.update({name: _split(name) for name in ("split", "chunk")})
RULES.update({name: _cast(dtype) for name, dtype in CASTS.items()})
for _names, _rule in (
    ("__getitem__", _item),
    ("unbind", _unbind),
    ("squeeze", _squeeze),
    ("unsqueeze", _unsqueeze),
    ("__iter__", lambda x: iter(_unbind(x)) if x.dim() > 1 else NotImplemented),
    ("view reshape", _view),
    ("view_as reshape_as", lambda x, other: _view(x, *other.shape)),
    ("flatten", _flatten),
    ("transpose swapaxes", _transpose),
    ("permute", _permute),
    ("contiguous", _contiguous),
    ("clone", same),
    ("detach", _detach),
    ("detach_", _let_go),
    ("data", lambda x, *_: _detach(x)),
    ("to", _to),
    ("cpu", lambda x: _to(x, "cpu")),
    ("cuda", lambda x, device=None: _to(x, "cuda" if device is None else device)),
    ("type", lambda x, dtype=None: _to(x, dtype) if isinstance(dtype, torch.dtype) else NotImplemented),
    ("type_as", lambda x, other: _to(x, other.dtype)),
    ("mul multiply __mul__ __rmul__", _times),
    ("div divide true_divide __truediv__", _divide),
    ("mul_ __imul__", _in_place(_times)),
    ("div_ __itruediv__", _in_place(_divide)),
    ("tanh", _tanh),
    ("sum", _sum),
    ("mean", _mean),
    ("cat concat concatenate", _cat),
    ("stack", _stack),
):
    RULES.update(dict.fromkeys(_names.split(), _rule))
