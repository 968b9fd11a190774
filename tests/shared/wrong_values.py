"""Values of the wrong kind for any argument, by name, and values that are nearly what a call was given."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

ANYTHING: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "3": lambda: 3,
    "-1": lambda: -1,
    "2**70": lambda: 2**70,
    "1.5": lambda: 1.5,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "text": lambda: "lots",
    "bytes": lambda: b"lots",
    "list": lambda: [1, 2],
    "list of floats": lambda: [0.5, 1.5],
    "list of texts": lambda: ["a", "b"],
    "nested list": lambda: [[1], [2]],
    "big ids": lambda: [2**70],
    "empty list": lambda: [],
    "dict": lambda: {"a": 1},
    "object": object,
    "type": lambda: int,
    "0-dim": lambda: torch.tensor(0.5),
    "matrix": lambda: torch.zeros(2, 3),
    "integers": lambda: torch.zeros(2, 3, dtype=torch.int64),
    "empty": lambda: torch.zeros(0),
    "complex": lambda: torch.zeros(2, 3, dtype=torch.complex64),
    "on meta": lambda: torch.zeros(2, 3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantized": lambda: torch.zeros(2, 3, dtype=torch.float8_e4m3fn),
}
"""Made anew for every call: a call may write to what it is given."""


def nearly(x: Any) -> Iterator[tuple[str, Any]]:
    """Values like a good one, but of another shape, dtype, device or container."""
    if isinstance(x, Tensor) and type(x) is Tensor:
        yield "as a list", x.detach().tolist()
        yield "one dimension more", x[None]
        if x.dim():
            yield "one entry fewer", x[:-1]
            yield "flat and longer", torch.cat([x.flatten(), x.flatten(), x.flatten()])
            yield "an entry of it", x[0]
        yield "as complex", x.to(torch.complex64)
        yield "as bool", x != 0
        yield "as int8", x.to(torch.int8)
        yield "as float16", x.to(torch.float16)
        yield "its shape on meta", x.to("meta")
        yield "its shape, sparse", x.to_sparse()
        yield "as a dict", {"x": x}
        if x.is_floating_point():
            yield "full of nan", torch.full_like(x, math.nan)
        else:
            yield "huge ids", torch.full_like(x, 2**62)
            yield "negative ids", torch.full_like(x, -7)
    elif isinstance(x, list | tuple):
        yield "one fewer", x[:-1]
        yield "one more", [*x, *x[-1:]]
        yield "with None", [*x[:-1], None]
        yield "with a text", [*x[:-1], "lots"]
        yield "as a set", {repr(y) for y in x}
        yield "nested", [list(x)]
    elif isinstance(x, dict):
        yield "as pairs", list(x.items())
        yield "with None", dict.fromkeys(x)
        yield "with texts", dict.fromkeys(x, "lots")
        yield "with lists", {key: [1.0] for key in x}
