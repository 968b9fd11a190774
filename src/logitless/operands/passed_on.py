"""What can be done with logits that are not computed, so that they stay so: rules by the name of torch's function.

A rule returns another ``Logits``, or NotImplemented where only computed logits would do. Rows are leading dimensions:
whatever acts on them acts on the hidden states, and on a factor that is one number per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from logitless.errors.arguments import FLOATS
from logitless.operands.graph import Total
from logitless.operands.logits import RULES, Logits, like
from logitless.operands.lora import LoRA
from logitless.spec import inspectable


def _row_dims(x: Logits, *dims: int) -> bool:
    """Whether all of these are leading dimensions."""
    return all(isinstance(d, int) and -x.dim() <= d < x.dim() and d % x.dim() < x.dim() - 1 for d in dims)


def _rows_first(name: str) -> Callable[..., Any]:
    """A method of tensors whose first argument is a dimension, and must be a leading one."""

    def rule(x: Any, dim: int | None = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, Logits) or dim is None or not _row_dims(x, dim):
            return NotImplemented
        # A new dimension counts from the end of the result, which has one more.
        if name == "unsqueeze" and dim < 0:
            return NotImplemented
        dim = dim % x.dim()
        return _of_rows(x, lambda h: getattr(h, name)(dim, *args, **kwargs))

    return rule


def _of_rows(x: Logits, change: Callable[[Tensor], Any]) -> Any:
    """The change on hidden states, and on one factor per row; of a tuple of parts, each of them."""
    hidden = change(x.hidden)
    gain = change(x.gain[..., None]) if isinstance(x.gain, Tensor) else None
    if isinstance(hidden, (tuple, list)):
        gains = [x.gain] * len(hidden) if gain is None else [g[..., 0] for g in gain]
        parts = (like(x, h, gain=g, part=True) for h, g in zip(hidden, gains, strict=True))
        return type(hidden)(_view_of(x, part) for part in parts)
    return _view_of(x, like(x, hidden, gain=x.gain if gain is None else gain[..., 0]))


def _view_of(x: Logits, new: Logits) -> Logits:
    """``new``, which torch would have as a view of ``x`` where its hidden states are one: what is done to one of them
    in place is seen by the other."""
    if torch._C._is_alias_of(x._stands.hidden, new._stands.hidden):  # pyright: ignore[reportAttributeAccessIssue]
        new._changes, new._seen = x._changes, x._seen
    return new


def _split(name: str) -> Callable[..., Any]:
    def rule(x: Any, size: Any = None, dim: int = 0, **kwargs: Any) -> Any:
        size = kwargs.get("split_size", kwargs.get("chunks", size))
        if not isinstance(x, Logits) or size is None or not _row_dims(x, dim):
            return NotImplemented
        dim = dim % x.dim()
        return tuple(_of_rows(x, lambda h: getattr(h, name)(size, dim)))

    return rule


def _unbind(x: Any, dim: int = 0) -> Any:
    return _of_rows(x, lambda h: h.unbind(dim % x.dim())) if _row_dims(x, dim) else NotImplemented


def _iter(x: Any) -> Any:
    return iter(_unbind(x)) if x.dim() > 1 else NotImplemented


def _item(x: Any, index: Any) -> Any:
    found = _rows_of(x, index)
    if isinstance(found, Logits) and found._stands.few and not torch.is_grad_enabled():
        picked = found.shape[:-1].numel() < x.shape[:-1].numel()
        # A step of generation writes to the few rows that it picks.
        return found.computed() if picked and found.shape[:-1].numel() <= found._stands.few else found
    return found


def _rows_of(x: Any, index: Any) -> Any:
    """Indices of leading dimensions; columns may be cut at their ends where the vocabulary is whole."""
    if not isinstance(x, Logits):
        return NotImplemented
    whole = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, Logits) for i in whole):
        return NotImplemented
    taken = sum(
        i.dim() if isinstance(i, Tensor) and i.dtype == torch.bool else 1
        for i in whole
        if i is not None and i is not Ellipsis
    )
    if Ellipsis not in [i for i in whole if not isinstance(i, Tensor)]:
        if taken < x.dim():
            return _of_rows(x, lambda h: h[index])
    elif taken < x.dim() and whole[-1] is Ellipsis:
        return _of_rows(x, lambda h: h[index])
    last = whole[-1]
    lead = whole[:-1]
    if not isinstance(last, slice) or any(isinstance(i, Tensor) for i in lead):
        return NotImplemented
    columns = last.indices(x.shape[-1])
    if columns == (0, x.shape[-1], 1):
        return _of_rows(x, lambda h: h[(*lead, slice(None))])
    if columns[2] != 1 or x.linear.shard is not None or isinstance(x.weight, LoRA) or x.linear.weight_grad is not None:
        return NotImplemented
    bias = None if x.linear.bias is None else x.linear.bias[last]
    cut = _view_of(x, like(x, weight=x.weight[last], linear=replace(x.linear, bias=bias)))
    return _of_rows(cut, lambda h: h[(*lead, slice(None))])


def _view(x: Any, *shape: Any, **kwargs: Any) -> Any:
    """Another leading shape; the last dimension stays."""
    if not isinstance(x, Logits) or kwargs.get("dtype") or any(isinstance(n, torch.dtype) for n in shape):
        return NotImplemented
    sizes = kwargs.get("shape", shape)
    sizes = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list, torch.Size)) else sizes
    sizes = list(sizes)
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


def _view_as(x: Any, other: Any) -> Any:
    return _view(x, *other.shape)


def _flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    return (
        _of_rows(x, lambda h: h.flatten(start_dim, end_dim % x.dim()))
        if _row_dims(x, start_dim, end_dim)
        else NotImplemented
    )


def _transpose(x: Any, *dims: int) -> Any:
    return _of_rows(x, lambda h: h.transpose(*(d % x.dim() for d in dims))) if _row_dims(x, *dims) else NotImplemented


def _permute(x: Any, *dims: Any) -> Any:
    dims = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    if len(dims) != x.dim() or dims[-1] % x.dim() != x.dim() - 1:
        return NotImplemented
    return _of_rows(x, lambda h: h.permute(*dims))


def _squeeze(x: Any, dim: int | None = None) -> Any:
    if dim is None or not _row_dims(x, dim):
        return NotImplemented
    return _of_rows(x, lambda h: h.squeeze(dim % x.dim()))


def same(x: Any, **_: Any) -> Any:
    """A copy, which knows what was read of the logits already."""
    new = like(x)
    new._memo = x._memo
    return new


def _contiguous(x: Any, **_: Any) -> Any:
    return _view_of(x, same(x)) if x.hidden.is_contiguous() else same(x)


def _detach(x: Any) -> Any:
    linear = x.linear if x.linear.bias is None else replace(x.linear, bias=x.linear.bias.detach())
    weight = x.weight.detached() if isinstance(x.weight, LoRA) else x.weight.detach()
    return _view_of(x, like(x, x.hidden.detach(), weight=weight, linear=linear))


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
    if device is not None and torch.device(device).type != x.device.type:
        return NotImplemented
    if dtype is not None and dtype not in FLOATS:
        return NotImplemented
    new = like(x, dtype=dtype or x.dtype)
    return _view_of(x, new) if new.dtype == x.dtype and not kwargs.get("copy") else new


def _type_as(x: Any, other: Tensor) -> Any:
    return _to(x, other.dtype)


def _per_row(x: Logits, by: Any) -> float | Tensor | None:
    """A factor as a number, or as one number per row ``[...]``; None where it is neither."""
    if isinstance(by, bool) or isinstance(by, Logits):
        return None
    if isinstance(by, (int, float)):
        # Torch takes no integer of more bits, and says so.
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


def _times(x: Any, by: Any, power: int = 1) -> Any:
    if not isinstance(x, Logits):
        x, by = by, x
        if power < 0 or not isinstance(x, Logits):
            return NotImplemented
    factor = _per_row(x, by)
    if factor is None:
        return NotImplemented
    if isinstance(factor, Tensor) and inspectable(factor) and not bool((factor > 0).all()):
        return NotImplemented
    if isinstance(factor, Tensor) != isinstance(x.gain, Tensor) and _any_negative(factor, x.gain):
        return NotImplemented
    if isinstance(factor, Tensor):
        factor = factor.to(torch.promote_types(x.dtype, torch.float32))
    dtype = torch.promote_types(x.dtype, by.dtype) if isinstance(by, Tensor) and by.dim() else x.dtype
    return like(x, gain=x.gain * factor if power > 0 else x.gain / factor, dtype=dtype)


def _divide(x: Any, by: Any, **kwargs: Any) -> Any:
    return NotImplemented if kwargs.get("rounding_mode") else _times(x, by, -1)


def _in_place(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The factor of ``x`` itself changes; views made before are refused from then on."""

    def change(x: Any, by: Any, **kwargs: Any) -> Any:
        found = rule(x, by, **kwargs) if isinstance(x, Logits) else NotImplemented
        if found is NotImplemented or found.dtype != x.dtype:
            return NotImplemented
        x.gain = found.gain
        return x

    return change


def _tanh(x: Any) -> Any:
    """A softcap of the model's own: what follows is a factor again."""
    if x.squash or isinstance(x.gain, Tensor):
        return NotImplemented
    return like(x, squash=abs(x.gain), gain=math.copysign(1.0, x.gain))


def _sum(x: Any, *args: Any, **kwargs: Any) -> Any:
    """``sum()`` of everything, which code adds times 0 to keep a graph connected."""
    if args or kwargs or x.squash or isinstance(x.weight, LoRA):
        return NotImplemented
    now = x.stands()
    hidden, weight, bias = now.shared(now.hidden), now.weight, now.linear.bias
    wide = torch.promote_types(x.dtype, torch.float32)
    h = hidden if not isinstance(x.gain, Tensor) else hidden * x.gain[..., None].to(hidden.dtype)
    total = h.reshape(-1, h.shape[-1]).sum(0, dtype=wide) @ weight.sum(0, dtype=wide)
    if bias is not None:
        count = x.gain.sum() if isinstance(x.gain, Tensor) else math.prod(x.shape[:-1])
        total = total + count * bias.sum(dtype=wide)
    if x.shard is not None and now.whole:
        total = Total.apply(total, x.shard.group)
    return (total if isinstance(x.gain, Tensor) else total * x.gain).to(x.dtype)  # pyright: ignore[reportOptionalOperand, reportOptionalMemberAccess]


def _mean(x: Any, *args: Any, **kwargs: Any) -> Any:
    """``mean()`` of everything, for the same; the mean of each row is a reading."""
    total = _sum(x, *args, **kwargs)
    return total if total is NotImplemented else total / x.numel()


def _cat(tensors: Sequence[Any], dim: int = 0, **kwargs: Any) -> Any:
    """Rows of the same head end to end."""
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
        gains = [x.gain if isinstance(x.gain, Tensor) else x.hidden.new_full(x.shape[:-1], x.gain) for x in tensors]
        return like(first, hidden, gain=torch.cat(gains, dim % first.dim()), part=False)
    return like(first, hidden, part=False)


def _stack(tensors: Sequence[Any], dim: int = 0, **kwargs: Any) -> Any:
    """Rows of the same head, in one more dimension before them."""
    if dim != 0 or kwargs or not all(isinstance(x, Logits) for x in tensors):
        return NotImplemented
    return _cat([_of_rows(x, lambda h: h.unsqueeze(0)) for x in tensors])


def _data(x: Any, *_: Any) -> Any:
    return _detach(x)


RULES.update(
    {
        "__getitem__": _item,
        "select": _rows_first("select"),
        "narrow": _rows_first("narrow"),
        "index_select": _rows_first("index_select"),
        "unsqueeze": _rows_first("unsqueeze"),
        "squeeze": _squeeze,
        "unbind": _unbind,
        "split": _split("split"),
        "chunk": _split("chunk"),
        "view": _view,
        "reshape": _view,
        "view_as": _view_as,
        "reshape_as": _view_as,
        "flatten": _flatten,
        "transpose": _transpose,
        "swapaxes": _transpose,
        "permute": _permute,
        "contiguous": _contiguous,
        "clone": same,
        "detach": _detach,
        "detach_": _let_go,
        "data": _data,
        "float": _cast(torch.float32),
        "bfloat16": _cast(torch.bfloat16),
        "half": _cast(torch.float16),
        "double": _cast(torch.float64),
        "to": _to,
        "type_as": _type_as,
        "mul": _times,
        "multiply": _times,
        "__mul__": _times,
        "__rmul__": _times,
        "div": _divide,
        "divide": _divide,
        "true_divide": _divide,
        "__truediv__": _divide,
        "mul_": _in_place(_times),
        "__imul__": _in_place(_times),
        "div_": _in_place(_divide),
        "__itruediv__": _in_place(_divide),
        "tanh": _tanh,
        "sum": _sum,
        "mean": _mean,
        "cat": _cat,
        "__iter__": _iter,
        "stack": _stack,
        "concat": _cat,
        "concatenate": _cat,
    }
)
