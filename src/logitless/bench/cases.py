"""What is measured: every benchmark case is a line of data.

Names read ``shape-dtype-work[-variant]``: ``reference-fp32-grad-peaked`` is the reference shape in float32, forward and
backward with an entropy gradient, on peaked logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

import torch

from logitless.errors import LogitlessError
from logitless.spec import EntropyMode

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One problem to score.

    Attributes:
        name: how ``--case`` finds it.
        device: ``"cuda"`` or ``"cpu"``, the kind of machine it is sized for.
        tokens: T, rows of the logits.
        vocab: V, columns of the logits.
        dtype: name of the dtype of the logits.
        entropy: None, ``"value"`` or ``"grad"``.
        backward: forward and backward, or forward alone without a graph.
        response: share of the rows that is scored; the others are prompt.
        logits: ``"gaussian"``, or ``"peaked"`` like a trained model's.
    """

    name: str
    device: Literal["cuda", "cpu"]
    tokens: int
    vocab: int
    dtype: str = "float32"
    entropy: EntropyMode = None
    backward: bool = True
    response: float = 1.0
    logits: Literal["gaussian", "peaked"] = "gaussian"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise LogitlessError(f"Case {self.name}: dtype must be one of {list(DTYPES)} but is {self.dtype!r}.")
        if not 0 < self.response <= 1:
            raise LogitlessError(f"Case {self.name}: response must be in (0, 1] but is {self.response!r}.")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def logits_bytes(self) -> int:
        return self.tokens * self.vocab * self.torch_dtype.itemsize

    def bytes_moved(self, num_rows: int) -> tuple[int, int]:
        """Bytes that no implementation can avoid moving: in forward, and in forward and backward together.

        Forward reads the scored rows once. Backward reads them once more and writes the gradient of every row.
        """
        row = self.vocab * self.torch_dtype.itemsize
        forward = num_rows * row
        return forward, forward + (num_rows * row + self.tokens * row if self.backward else 0)


def _works(shape: Case, name: str) -> list[Case]:
    """The three kinds of work on one shape: forward alone, entropy as a metric, entropy in the loss."""
    return [
        replace(shape, name=f"{name}-forward", entropy="value", backward=False),
        replace(shape, name=f"{name}-value", entropy="value"),
        replace(shape, name=f"{name}-grad", entropy="grad"),
    ]


def _all_cases() -> list[Case]:
    fp32 = Case("", "cuda", tokens=16384, vocab=151936)
    bf16 = replace(fp32, dtype="bfloat16")
    cpu = Case("", "cpu", tokens=2048, vocab=32768)
    peaked = [
        replace(c, name=f"{c.name}-peaked", logits="peaked")
        for c in _works(fp32, "reference-fp32") + _works(bf16, "reference-bf16")
    ]
    return [
        *_works(fp32, "reference-fp32"),
        *_works(bf16, "reference-bf16"),
        *peaked,
        replace(fp32, name="reference-fp32-grad-25pct", entropy="grad", response=0.25),
        replace(fp32, name="reference-fp32-grad-3pct", entropy="grad", response=0.03),
        # 4.4e9 elements: past 2^31 and past 2^32, where 32-bit offsets have wrapped around either way.
        replace(bf16, name="over-int32-bf16-grad", tokens=28672, entropy="grad"),
        Case("huge-fp32-value", "cuda", tokens=205280, vocab=76032, entropy="value"),
        Case("huge-fp32-grad", "cuda", tokens=205280, vocab=76032, entropy="grad"),
        *_works(cpu, "cpu-fp32"),
        replace(cpu, name="cpu-fp32-grad-peaked", entropy="grad", logits="peaked"),
        replace(cpu, name="cpu-fp32-grad-25pct", entropy="grad", response=0.25),
        *_works(Case("", "cpu", tokens=96, vocab=1000), "smoke-fp32"),
        Case("smoke-bf16-grad-peaked", "cpu", 96, 1000, "bfloat16", entropy="grad", response=0.25, logits="peaked"),
    ]


CASES: dict[str, Case] = {case.name: case for case in _all_cases()}


def select_cases(patterns: Iterable[str], device: str) -> list[Case]:
    """Cases by name or shell pattern (``reference-*-grad``); none named means all of the device but smoke and huge.

    >>> [case.name for case in select_cases(["cpu-fp32-*-peaked"], "cpu")]
    ['cpu-fp32-grad-peaked']
    """
    patterns = list(patterns)
    if not patterns:
        return [c for c in CASES.values() if c.device == device and not c.name.startswith(("smoke", "huge"))]
    return [CASES[name] for name in select_names(patterns, list(CASES), "case")]


def select_names(patterns: Sequence[str], names: Sequence[str], what: str) -> list[str]:
    """The names that match any pattern, in their own order. A pattern that matches nothing raises."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise LogitlessError(f"bench: no {what} matches {pattern!r}. There are {', '.join(names)}.")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
