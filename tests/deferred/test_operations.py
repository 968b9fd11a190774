"""Operations on ``Logits`` with any argument at all: what a tensor answers, ``Logits`` answer, and what it refuses they
refuse, by torch's own words or by a ``LogitlessError``.

    wrong value, an error of the tensor       an error that is torch's, Python's or ours
    wrong value, a result of the tensor       the same numbers, shape and dtype; or a ``LogitlessError``
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shared.wrong_values import ANYTHING
from torch import Tensor

import logitless as ll

B, S, V, D = 2, 3, 7, 5

IDS = torch.tensor([[0, 6, 3], [2, 2, 5]])
FURTHER: dict[str, Callable[[], Any]] = {
    "-2": lambda: -2,
    "1": lambda: 1,
    "2": lambda: 2,
    "7": lambda: 7,
    "half": lambda: 0.5,
    "ids": lambda: IDS.clone(),
    "ids of a row": lambda: IDS[..., None].clone(),
    "ids too large": lambda: IDS[..., None] + 3,
    "-100": lambda: torch.full((B * S,), -100),
    "a number per row": lambda: torch.linspace(0.5, 2.0, B * S).view(B, S, 1),
    "a number per column": lambda: torch.linspace(0.5, 2.0, V),
    "a tensor of floats": lambda: torch.linspace(0.5, 2.0, B * S * V).view(B, S, V),
    "a mask of rows": lambda: torch.tensor([[True, False, True], [False, False, True]]),
    "a mask": lambda: torch.arange(B * S * V).view(B, S, V) % 3 == 0,
    "a dtype": lambda: torch.float64,
    "a device": lambda: torch.device("cpu"),
    "a slice": lambda: slice(0, None, 2),
    "a slice backwards": lambda: slice(None, None, -1),
    "a pair": lambda: (slice(None), 1),
    "rows and columns": lambda: (..., slice(1, 4)),
    "the last": lambda: (slice(None), slice(None), -1),
    "a shape": lambda: (B * S, V),
    "an open shape": lambda: (-1, V),
    "another shape": lambda: (4, 5),
    "more rows": lambda: (4, B, S, V),
    "rows in another order": lambda: (1, 0, 2),
    "a reduction": lambda: "sum",
    "class weights": lambda: torch.linspace(0.5, 2.0, V, dtype=torch.float64),
}
"""Besides what is wrong anywhere: values that some of the operations take."""

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "z[x]": lambda z, x: z[x],
    "z + x": operator.add,
    "z - x": operator.sub,
    "x - z": lambda z, x: x - z,
    "z * x": operator.mul,
    "x * z": lambda z, x: x * z,
    "z / x": operator.truediv,
    "x / z": lambda z, x: x / z,
    "z == x": lambda z, x: torch.eq(z, x),
    "z > x": operator.gt,
    "to": lambda z, x: z.to(x),
    "view": lambda z, x: z.view(x),
    "reshape": lambda z, x: z.reshape(x),
    "flatten": lambda z, x: z.flatten(x),
    "flatten, to the end": lambda z, x: z.flatten(0, x),
    "transpose": lambda z, x: z.transpose(0, x),
    "unsqueeze": lambda z, x: z.unsqueeze(x),
    "squeeze": lambda z, x: z.squeeze(x),
    "narrow": lambda z, x: z.narrow(1, 0, x),
    "chunk": lambda z, x: z.chunk(x),
    "split": lambda z, x: z.split(x),
    "split, by rows": lambda z, x: z.split(x, 1),
    "index_select": lambda z, x: z.index_select(1, x),
    "masked_fill": lambda z, x: z.masked_fill(x, 0.0),
    "masked_fill, value": lambda z, x: z.masked_fill(torch.zeros(V, dtype=torch.bool), x),
    "where": lambda z, x: torch.where(x, z, 0.0),
    "gather": lambda z, x: z.gather(-1, x),
    "gather, dim": lambda z, x: z.gather(x, IDS[..., None]),
    "argmax": lambda z, x: z.argmax(x),
    "max": lambda z, x: z.max(x),
    "topk": lambda z, x: z.topk(x),
    "topk, dim": lambda z, x: z.topk(2, x),
    "sum": lambda z, x: z.sum(x),
    "mean": lambda z, x: z.mean(x),
    "logsumexp": lambda z, x: z.logsumexp(x),
    "softmax": lambda z, x: z.softmax(x),
    "log_softmax": lambda z, x: z.log_softmax(x),
    "log_softmax, dtype": lambda z, x: z.log_softmax(-1, dtype=x),
    "log_softmax, gather": lambda z, x: z.log_softmax(-1).gather(-1, x),
    "log_softmax, gather, dim": lambda z, x: z.log_softmax(-1).gather(x, IDS[..., None]),
    "cross_entropy": lambda z, x: F.cross_entropy(z.view(-1, V), x),
    "cross_entropy of ids": lambda z, x: F.cross_entropy(z.view(-1, V), x.view(-1)),
    "cross_entropy, weight": lambda z, x: F.cross_entropy(z.view(-1, V), IDS.view(-1), weight=x),
    "cross_entropy, reduction": lambda z, x: F.cross_entropy(z.view(-1, V), IDS.view(-1), reduction=x),
    "cross_entropy, ignore_index": lambda z, x: F.cross_entropy(z.view(-1, V), IDS.view(-1), ignore_index=x),
    "cross_entropy, label_smoothing": lambda z, x: F.cross_entropy(z.view(-1, V), IDS.view(-1), label_smoothing=x),
    "cat": lambda z, x: torch.cat([z, x]),
    "cat, dim": lambda z, x: torch.cat([z, z], x),
    "stack": lambda z, x: torch.stack([z, z], x),
    "clamp": lambda z, x: z.clamp(x),
    "expand": lambda z, x: z.expand(x),
    "permute": lambda z, x: z.permute(x),
}

WORDS = (TypeError, ValueError, IndexError, RuntimeError, NotImplementedError, OverflowError)
"""Errors by which torch and Python refuse an argument; ``AttributeError`` only where a list was asked for its view."""


def tensors(x: Any) -> list[Tensor]:
    """Results as plain tensors."""
    if isinstance(x, Tensor):
        return [x + 0.0 if isinstance(x, ll.Logits) else x]
    if isinstance(x, tuple | list):
        return [y for part in x for y in tensors(part)]
    return [torch.tensor(x)] if isinstance(x, bool | int | float) else []


def outcome(operation: Callable[[Any, Any], Any], z: Any, x: Any) -> list[Tensor] | Exception:
    try:
        return tensors(operation(z, x))
    except Exception as error:
        return error


def compared(ours: list[Tensor] | Exception, right: list[Tensor] | Exception) -> str | None:
    """What is wrong with our answer, if anything."""
    if isinstance(ours, ll.LogitlessError):
        return None
    if isinstance(right, Exception):
        if not isinstance(ours, Exception):
            return f"accepted, where a tensor says {type(right).__name__}: {str(right)[:80]}"
        known = isinstance(ours, (*WORDS, type(right)))
        return None if known else f"{type(ours).__name__}: {ours}"
    if isinstance(ours, Exception):
        return f"{type(ours).__name__}: {str(ours)[:120]}, where a tensor answers"
    kinds, wanted = ([(tuple(x.shape), x.dtype) for x in found] for found in (ours, right))
    if kinds != wanted:
        return f"{kinds} where a tensor gives {wanted}"
    for a, b in zip(ours, right, strict=True):
        if not a.is_meta and not torch.allclose(a.double(), b.double(), rtol=1e-9, atol=1e-9, equal_nan=True):
            return f"off by {(a.double() - b.double()).abs().max().item():.2g}"
    return None


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_a_tensor_answers_and_what_it_refuses(name: str):
    torch.manual_seed(0)
    hidden, weight = torch.randn(B, S, D, dtype=torch.float64), torch.randn(V, D, dtype=torch.float64)
    wrong, answered = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for label, make in {**ANYTHING, **FURTHER}.items():
            right = outcome(OPERATIONS[name], hidden @ weight.T, make())
            ours = outcome(OPERATIONS[name], ll.Logits(hidden.clone(), weight.clone()), make())
            # What lies behind an index on the meta device is no number.
            unread = name == "index_select" and label == "on meta"
            problem = None if unread else compared(ours, right)
            answered += not isinstance(right, Exception)
            if problem is not None:
                wrong.append(f"{label}: {problem}")
    assert not wrong, "\n".join(wrong)
    assert answered, "no value of the table is a right one"
