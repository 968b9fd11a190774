"""Numbers of each row of ``Logits`` with their graph, in the shape and dtype that torch's own functions would give."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from logitless.call import Asked
from logitless.errors import LogitlessError
from logitless.notes import place
from logitless.operands import Logits
from logitless.operands.logits import METRICS, made
from logitless.operands.unit import reading
from logitless.readings.best import MOST
from logitless.score import logprobs, resolve_score
from logitless.softmax import transform
from logitless.sources.listed import id_logits
from logitless.spec import TokenStats, inspectable


def readable(x: Any) -> bool:
    """Whether a reading may stand in for torch's function: of the columns here alone, torch's would be of these."""
    return isinstance(x, Logits) and x._stands.whole and x.shape[-1] > 0


def here(x: Any) -> Any:
    """Logits of a shard's columns as logits of just these, which is all that torch's functions know of."""
    if not isinstance(x, Logits) or x._stands.whole or x._stands.linear.sequence_parallel:
        return x
    now = x.stands()
    linear = replace(now.linear, shard=None, hidden_grad="reduced")
    new = made(replace(now, hidden=now.shared(now.hidden), linear=linear))
    new._memo[METRICS] = x._memo.setdefault(METRICS, [])
    return new


def over_last(x: Tensor, dim: Any) -> bool:
    """Whether ``dim`` is the last dimension of ``x``, and no other."""
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    return type(dim) is int and x.dim() > 0 and dim in (-1, x.dim() - 1)


def ask(x: Logits, name: str, ids: Tensor | None = None) -> Tensor:
    """``[...]`` numbers of each row, or ``[..., K]`` of each row's ids.

    Args:
        name: ``"log_z"``, ``"entropy"``, ``"mean_logit"``; or with ids ``"logprob"``, ``"probability"`` or ``"logit"``.
        ids: ``[..., K]`` columns.
    """
    lead = x.shape[:-1]
    if name in ("log_z", "entropy"):
        return _new(softmax_of(x, name).reshape(lead), x)
    flat = x.reshape(-1, x.shape[-1])
    assert isinstance(flat, Logits)
    if ids is None:
        return _new(getattr(_all_rows(flat, stats=(name,)), name).reshape(lead), x)
    ids = checked_ids(ids, x.shape[-1]).reshape(flat.shape[0], ids.shape[-1]).contiguous()
    return _new(_of_ids(flat, name, ids).reshape(*lead, ids.shape[-1]), x)


def _new(found: Tensor, x: Logits) -> Tensor:
    """The numbers as torch returns them: its own tensor, which may be written to, as masks of log-probs are. Backward
    reads the numbers that were found."""
    return found.to(result_dtype(x), copy=True)


SOFTMAX = "softmax was taken"
"""Noted of logits whose entropy will probably be asked for, so that one pass answers that and log Z."""


def softmax_of(x: Logits, name: str) -> Tensor:
    """``[R]`` log Z or entropy; both from one pass where both are asked for, one after the other."""
    x.stands()
    # Copies that were made where no gradient is recorded share the memo.
    memo, graph = memo_of(x), torch.is_grad_enabled() and x.requires_grad
    known = remembered(memo, graph, name)
    if known is not None:
        return known
    flat = x.reshape(-1, x.shape[-1])
    assert isinstance(flat, Logits)
    found = _all_rows(flat, entropy="grad" if name == "entropy" or SOFTMAX in memo else None)
    if found.entropy is not None:
        remember(memo, graph, found)
    return getattr(found, name)


def remember(memo: dict[Any, Any], graph: bool, found: TokenStats) -> None:
    """Keep what was read of logits. Tensors of inference mode have no version by which a change is seen."""
    if not any(isinstance(x, Tensor) and x.is_inference() for x in found):
        memo[graph] = found, versions(found)


def remembered(memo: dict[Any, Any], graph: bool, name: str) -> Tensor | None:
    """A result that was read before; None where there is none, or where somebody has written to what was handed out. A
    copy, since torch's functions return a new tensor each time."""
    found, before = memo.get(graph, (None, ()))
    known = None if found is None or versions(found) != before else getattr(found, name)
    return None if known is None else known.clone()


def versions(found: Iterable[Any]) -> tuple[int, ...]:
    """Of tensors, by which one sees later whether they were written to."""
    return tuple(x._version for x in found if isinstance(x, Tensor))


def memo_of(x: Logits) -> dict[Any, Any]:
    """What was read of the logits already, since hooks on saved tensors were last set.

    A checkpoint sets such hooks and runs its function again in backward, with others, where it must save what it saved
    before: nothing of the first run may be found then.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]
    return x._memo.setdefault(None if hooks is None else weakref.ref(hooks[0]), {})


def _of_ids(x: Logits, name: str, ids: Tensor) -> Tensor:
    """``[R, K]`` log-probs, probabilities or logits of ``[R, K]`` ids."""
    if name == "logit":
        return _picked(x, ids)
    # The target's log-prob is in every pass over the logits; listed ids are a reading of their own.
    one = ids.shape[1] == 1
    found = logprobs(x, ids[:, 0]).logprob[:, None] if one else _all_rows(x, ids=ids).ids_logprobs
    assert found is not None
    return found.exp() if name == "probability" else found


@reading
def _picked(x: Logits, ids: Tensor) -> Tensor:
    """``[R, K]`` single logits: dot products of hidden states and rows of the weight."""
    if x.shard is not None:
        found = _all_rows(x, ids=ids)
        assert found.ids_logprobs is not None
        assert found.log_z is not None
        return found.ids_logprobs + found.log_z[:, None]
    call, _, operands = resolve_score(x, _first_ids(x), Asked())
    z, _ = transform(id_logits(operands, ids, call), call.gain[:, None], call.squash)
    # A row of the weight that is not there is no 0.
    return torch.where(ids < x.shape[-1], z, torch.nan)


def best(x: Logits, count: int) -> Tensor:
    """``[..., K]`` ids of the largest logits, the largest first."""
    with torch.no_grad():
        flat = x.detach().reshape(-1, x.shape[-1])
        assert isinstance(flat, Logits)
        if count == 1:
            ids = _all_rows(flat, stats=("top1",)).top1_id
            assert ids is not None
            ids = ids[:, None]
        else:
            ids = _all_rows(flat, top_k=count).top_k_ids
        assert ids is not None
        return ids.reshape(*x.shape[:-1], count)


def listable(x: Logits, count: Any) -> bool:
    """Whether that many of the most likely ids are a reading."""
    return type(count) is int and 1 <= count <= min(MOST, x.shape[-1])


def _all_rows(x: Logits, **asked: Any) -> TokenStats:
    return logprobs(x, _first_ids(x), **asked)


def _first_ids(x: Logits) -> Tensor:
    """A target for every row, where none is asked about."""
    return torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)


def checked_ids(ids: Tensor, columns: int) -> Tensor:
    """Ids of columns; those outside raise where that can be seen, and otherwise make their own number NaN."""
    if inspectable(ids):
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= columns):
            low, high = int(ids.min()), int(ids.max())
            raise LogitlessError(
                f"Logits: index at {place()} runs from {low} to {high}, outside the {columns} columns."
            )
        return ids.to(torch.int64)
    ids = ids.to(torch.int64)
    # -100 would leave a row out.
    return torch.where(ids < 0, columns, ids)


WIDENED = ("cpu", "cuda", "xpu")
"""Devices on which autocast takes a loss in float32."""


def result_dtype(x: Tensor, wide: tuple[str, ...] = ("cuda", "xpu")) -> torch.dtype:
    """The dtype of the logits; under autocast no less than float32, on devices where it widens the function."""
    kind = x.device.type
    if kind in wide and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.promote_types(x.dtype, torch.float32)
    return x.dtype
