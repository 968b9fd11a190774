"""The problems that are measured: every benchmark case is a line of data.

Names read ``shape-dtype-work[-variant]``: ``reference-fp32-grad-peaked`` is the reference shape in float32, forward and
backward with an entropy gradient, on peaked logits. Cases named ``linear-*`` start from hidden states and the head's
weight instead of logits; on CUDA these are in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

import torch

from logitless.errors import LogitlessError
from logitless.spec import EntropyMode

# Cases with these words run only if named: for tests, too large for most cards, or points of one figure.
SET_ASIDE = ("smoke", "huge", "growth")
Computed = EntropyMode | Literal["mean"]
"""The entropy that a provider computed beside the log-prob; or a mean loss alone."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One problem to score.

    Attributes:
        name: how ``--case`` finds it.
        device: ``"cuda"`` or ``"cpu"``, the kind of machine it is sized for.
        tokens: T, rows of the logits.
        vocab: V, columns of the logits.
        dtype: name of the dtype of the logits, or of the hidden states and the weight.
        entropy: None, ``"value"`` or ``"grad"``.
        backward: forward and backward, or forward alone without a graph.
        response: share of the tokens that is scored; the others are prompt.
        logits: ``"gaussian"``, ``"peaked"`` like a trained model's, or ``"trained"``: of a model that is given.
        hidden: D, size of the hidden states that the case starts from; None where it starts from logits.
        frozen: the weight needs no gradient.
        memory: working memory for providers that take a bound, such as ``"6.5GiB"``; None for their default.
        loss: the case is a whole policy loss, PPO's with clipping, and with an entropy bonus if entropy is ``"grad"``.
        zero_advantage: share of the rows whose advantage is exactly zero, in a loss.
    """

    name: str
    device: Literal["cuda", "cpu"]
    tokens: int
    vocab: int
    dtype: str = "float32"
    entropy: EntropyMode = None
    backward: bool = True
    response: float = 1.0
    logits: Literal["gaussian", "peaked", "trained"] = "gaussian"
    hidden: int | None = None
    frozen: bool = False
    memory: str | None = None
    loss: bool = False
    zero_advantage: float = 0.0

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
        """Size of the logits, stored or not."""
        return self.tokens * self.vocab * self.torch_dtype.itemsize

    @property
    def num_gemms(self) -> int:
        """Products of [T, D] by [D, V] that no provider can avoid, from hidden states.

        Forward takes one. Backward takes one for each gradient, and one to recompute the logits unless these, or their
        exponentials, were stored. With a frozen weight and no entropy gradient, d_hidden is known up to a factor per
        row before backward begins.
        """
        if not self.backward:
            return 1
        if self.loss:
            # With the loss known in forward, gradients are made there, and logits are not needed again.
            return 3 - self.frozen
        kept = self.memory is not None or (self.frozen and self.entropy != "grad")
        return 4 - self.frozen - kept

    def bytes_moved(self, num_rows: int) -> tuple[int, int]:
        """Bytes that no provider can avoid moving: in forward, and in forward and backward together.

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


def _linear_cases() -> list[Case]:
    """From hidden states: the reference in every kind of work, other shapes, and a series along each of T, V and D."""
    base = Case("", "cuda", tokens=16384, vocab=151936, dtype="bfloat16", entropy="grad", hidden=4096)
    smoke = Case("", "cpu", tokens=96, vocab=1000, entropy="grad", hidden=64)
    name = "linear-reference"
    return [
        *linear_works(base, name),
        replace(base, name=f"{name}-value", entropy="value"),
        replace(base, name=f"{name}-grad-peaked", logits="peaked"),
        replace(base, name=f"{name}-grad-25pct", response=0.25),
        replace(base, name=f"{name}-grad-3pct", response=0.03),
        replace(base, name=f"{name}-loss-peaked", loss=True, memory="2.5GiB", logits="peaked"),
        replace(base, name=f"{name}-loss-value", loss=True, memory="2.5GiB", entropy="value"),
        replace(base, name=f"{name}-loss-zeros", loss=True, memory="2.5GiB", entropy="value", zero_advantage=0.5),
        replace(base, name="linear-long-grad", tokens=65536, hidden=2048),
        replace(base, name="linear-v32k-grad", vocab=32768),
        replace(base, name="linear-v256k-grad", vocab=262144),
        replace(base, name="linear-huge-grad", tokens=205280, vocab=76032),
        *_growth(replace(base, tokens=8192, vocab=131072)),
        # Smaller hidden states, where what comes after a product weighs more.
        *(case for d in (2048, 1024) for case in linear_works(replace(base, hidden=d), f"linear-d{d}")),
        Case("linear-cpu-grad", "cpu", tokens=8192, vocab=65536, entropy="grad", hidden=256),
        *_works(smoke, "linear-smoke"),
        replace(smoke, name="linear-smoke-frozen", entropy="value", frozen=True),
        replace(smoke, name="linear-smoke-keep", memory="1MiB"),
        replace(smoke, name="linear-smoke-loss", loss=True),
        replace(smoke, name="linear-smoke-loss-zeros", loss=True, entropy="value", zero_advantage=0.5, response=0.25),
        replace(smoke, name="linear-smoke-bf16-grad-peaked", dtype="bfloat16", response=0.25, logits="peaked"),
    ]


def _growth(base: Case) -> list[Case]:
    """The base, and cases that differ from it in one size."""
    name = "linear-growth"
    return [
        replace(base, name=f"{name}-base"),
        *(replace(base, name=f"{name}-t{t}", tokens=t) for t in (2048, 4096, 16384, 32768, 65536)),
        *(replace(base, name=f"{name}-v{v}", vocab=v) for v in (32768, 65536, 262144)),
        *(replace(base, name=f"{name}-d{d}", hidden=d) for d in (1024, 2048, 8192)),
    ]


def linear_works(base: Case, name: str) -> list[Case]:
    """The kinds of work from hidden states on one shape, each a route of its own."""
    return [
        replace(base, name=f"{name}-forward", entropy="value", backward=False),
        replace(base, name=f"{name}-grad"),
        replace(base, name=f"{name}-frozen", entropy="value", frozen=True),
        replace(base, name=f"{name}-keep", memory="6.5GiB"),
        replace(base, name=f"{name}-loss", loss=True, memory="2.5GiB"),
        replace(base, name=f"{name}-loss-1gib", loss=True, memory="1GiB"),
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
        *_linear_cases(),
    ]


CASES: dict[str, Case] = {case.name: case for case in _all_cases()}


def select_cases(patterns: Iterable[str], device: str) -> list[Case]:
    """Cases by name or shell pattern (``reference-*-grad``); no pattern means all cases of the device.

    A pattern finds cases of the device alone, and smoke, huge and growth cases only if it says that word.

    >>> [case.name for case in select_cases(["cpu-fp32-*-peaked"], "cpu")]
    ['cpu-fp32-grad-peaked']
    """
    patterns = list(patterns) or ["*"]
    for pattern in patterns:
        if not any(_finds(pattern, case, device) for case in CASES.values()):
            own = [case.name for case in CASES.values() if case.device == device]
            raise LogitlessError(f"bench: no case matches {pattern!r}. For {device} there are {', '.join(own)}.")
    return [case for case in CASES.values() if any(_finds(pattern, case, device) for pattern in patterns)]


def _finds(pattern: str, case: Case, device: str) -> bool:
    if pattern == case.name:
        return True
    aside = any(word in case.name and word not in pattern for word in SET_ASIDE)
    return case.device == device and not aside and fnmatchcase(case.name, pattern)


def select_names(patterns: Sequence[str], names: Sequence[str], what: str) -> list[str]:
    """The names that match any pattern, in the order of ``names``. A pattern that matches nothing raises."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise LogitlessError(f"bench: no {what} matches {pattern!r}. There are {', '.join(names)}.")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
