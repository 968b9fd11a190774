"""Three ways to run the same functions, and the rule that picks one.

    reference   whole tensors, plain torch; the twin that kernels are read against
    tiled       plain torch in tiles under a memory budget; any device, any float dtype
    triton      kernels for NVIDIA GPUs; on CPU in Triton's interpreter, for tests

The rule for ``backend="auto"``, applied before anything runs: ``triton`` for CUDA tensors of float32, bfloat16 or
float16 when Triton can be imported, ``tiled`` otherwise. A named backend runs or raises; nothing falls back.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from logitless.backends.blocks import LINES
from logitless.backends.contract import Backend, Problem
from logitless.errors import LogitlessError
from logitless.errors.arguments import refused
from logitless.softmax import WIDTH, Coefficients, Normaliser

NAMES = ("reference", "tiled", "triton")
"""The backends of this package."""

OTHERS: dict[str, Any] = {}
"""Backends from outside, by name: a module, or any object with the functions of :mod:`logitless.backends.contract`."""


class BackendChoice(NamedTuple):
    """The backend that will run, and the reason."""

    name: str
    reason: str


def choose_backend(logits: Tensor, backend: str = "auto", device: str | None = None) -> BackendChoice:
    """Which backend ``backend=`` means for these logits, and why. Runs nothing.

    Args:
        device: type of the device that logits without values stand for; None for their own.

    >>> choose_backend(torch.zeros(2, 3)).name
    'tiled'
    """
    if not isinstance(backend, str):
        raise refused("backend", f"one of {['auto', *NAMES, *OTHERS]}", backend)
    if backend in NAMES or backend in OTHERS:
        return BackendChoice(backend, "named by the caller")
    if backend != "auto":
        raise LogitlessError(f"backend: wanted one of {['auto', *NAMES, *OTHERS]} but got {backend!r}.")
    kind = device or logits.device.type
    if kind != "cuda":
        return BackendChoice("tiled", f"the logits are on {kind}, and the kernels need CUDA")
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return BackendChoice("tiled", f"the kernels do not take {logits.dtype}")
    if not _has_triton() and device is None:
        return BackendChoice("tiled", "Triton is not installed; the extra [triton] brings it")
    return BackendChoice("triton", f"CUDA tensor of {logits.dtype} with Triton installed")


def backend_of(x: Tensor, backend: str, device: str | None) -> tuple[str, Backend]:
    """The backend that will run, by name and as it is. Raises, before anything runs, if it cannot take such tensors."""
    name = choose_backend(x, backend, device).name
    if torch.compiler.is_compiling():
        # A compiler cannot trace the import of a module; the operators below look the backend up by name.
        return name, cast(Backend, None)
    if name == "triton":
        _load(name).require(x)
    return name, load(name)


def load(name: str) -> Backend:
    """The backend's module. ``triton`` imports Triton when it launches its first kernel."""
    return OTHERS[name] if name in OTHERS else _load(name)


if TYPE_CHECKING:
    from logitless.backends import reference, tiled, triton
    from logitless.backends.contract import Pairs, Products

    _HELD: tuple[Backend, ...] = (reference, tiled, triton)
    _HELD_PRODUCTS: Products = triton.products
    _HELD_PAIRS: Pairs = triton.pairs


@functools.cache
def _load(name: str) -> Any:
    return importlib.import_module(f"logitless.backends.{name}")


@functools.cache
def _has_triton() -> bool:
    """Searched for once: a search of the import path costs as much as a kernel launch."""
    return importlib.util.find_spec("triton") is not None


# Both functions are registered as operators, so that torch.compile sees two opaque nodes with known shapes. Operators
# take flat arguments; `run_statistics` and `run_gradient` below are how the rest of the package calls them.


@torch.library.custom_op("logitless::statistics", mutates_args=())
def _statistics(
    logits: Tensor,
    index: Tensor | None,
    column: Tensor,
    gain: Tensor,
    squash: float,
    columns: int,
    first: int,
    entropy: bool,
    memory: int,
    backend: str,
    canonical: bool,
) -> Tensor:
    problem = Problem(logits, index, column, gain, squash, columns, entropy, memory, first, canonical=canonical)
    return load(backend).statistics(problem)


@_statistics.register_fake
def _(logits: Tensor, index: Tensor | None, column: Tensor, gain: Tensor, *rest: Any) -> Tensor:
    *_, canonical = rest
    return gain.new_empty((LINES if canonical else WIDTH, column.shape[0]))


@torch.library.custom_op("logitless::solved", mutates_args=())
def _solved(lines: Tensor, gain: Tensor, backend: str) -> Tensor:
    return load(backend).solved(lines, gain)


@_solved.register_fake
def _(lines: Tensor, gain: Tensor, backend: str) -> Tensor:
    return gain.new_empty((WIDTH, gain.shape[0]))


@torch.library.custom_op("logitless::gradient", mutates_args=("out",))
def _gradient(
    logits: Tensor,
    index: Tensor | None,
    column: Tensor,
    gain: Tensor,
    squash: float,
    columns: int,
    first: int,
    memory: int,
    backend: str,
    reference: Tensor,
    log_sum: Tensor,
    plain: Tensor,
    product: Tensor | None,
    at_target: Tensor,
    square: Tensor | None,
    constant: Tensor | None,
    out: Tensor,
    out_index: Tensor | None,
) -> None:
    problem = Problem(logits, index, column, gain, squash, columns, product is not None, memory, first)
    coef = Coefficients(plain, product, at_target, square, constant)
    load(backend).gradient(problem, Normaliser(reference, log_sum), coef, out, out_index)


def _through_operators(x: Tensor) -> bool:
    """Whether a compiler traces the call, or its tensors are fake: an operator costs as much as a small problem.

    A dry run counts allocations, and an operator's fake would allocate the result alone.
    """
    return torch.compiler.is_compiling() or isinstance(x, FakeTensor)


def run_statistics(backend: str, problem: Problem) -> Tensor:
    """``statistics`` of the named backend: ``[4, R]``."""
    p = problem
    if not _through_operators(p.logits):
        return load(backend).statistics(p)
    places = (p.logits, p.index, p.column, p.gain, p.squash, p.columns, p.first)
    return _statistics(*places, p.entropy, p.memory, backend, p.canonical)


def run_solved(backend: str, lines: Tensor, gain: Tensor) -> Tensor:
    """``solved`` of the named backend: ``[4, R]``."""
    return _solved(lines, gain, backend) if _through_operators(lines) else load(backend).solved(lines, gain)


def run_gradient(
    backend: str, problem: Problem, norm: Normaliser, coef: Coefficients, out: Tensor, out_index: Tensor | None
) -> None:
    """``gradient`` of the named backend, written over all of ``out``; what ``coef.at_ids`` says is not its business."""
    p = problem
    if not _through_operators(p.logits):
        return load(backend).gradient(p, norm, coef, out, out_index)
    _gradient(
        p.logits,
        p.index,
        p.column,
        p.gain,
        p.squash,
        p.columns,
        p.first,
        p.memory,
        backend,
        *norm,
        *coef[:5],
        out,
        out_index,
    )
