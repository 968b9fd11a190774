"""How a Triton kernel is found and launched, and what it cannot take. Triton is imported with the first launch."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from logitless.backends.contract import Problem
from logitless.errors import LogitlessError
from logitless.softmax import Coefficients, Normaliser
from logitless.spec import has_values

NOTHING = contextlib.nullcontext()


def interpreted() -> bool:
    """Whether the kernels run on CPU, in Triton's interpreter."""
    return _kernels().INTERPRETED


def unavailable(logits: Tensor) -> str | None:
    """Why this backend cannot take these logits, or None if it can."""
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its kernels take float32, bfloat16 and float16, not {logits.dtype}"
    if logits.device.type not in ("cuda", "meta") and not interpreted():
        return f"its kernels run on CUDA devices, and the logits are on {logits.device.type}"
    return None


def of_rows(problem: Problem, norm: Normaliser, coef: Coefficients) -> dict[str, Any]:
    """Arguments of every gradient kernel that concern a row and its columns."""
    return {
        "column": problem.column,
        "gain": problem.gain,
        "reference": norm.reference,
        "log_sum": norm.log_sum,
        "plain": coef.plain,
        "product": coef.product,
        "at_target": coef.at_target,
        "columns": problem.columns,
        "first": problem.first,
        "PRODUCT": coef.product is not None,
    }


@functools.cache
def _kernels(module: str = "kernels") -> Any:
    """A module of kernels. A dry run launches no kernel and needs no Triton."""
    if importlib.util.find_spec("triton") is None:
        raise LogitlessError(
            'backend="triton": Triton is not installed. Install it, or logitless with its extra [triton].'
        )
    return importlib.import_module(f"logitless.backends.triton.{module}")


def launch(kernel: str, programs: int, *, on: Tensor, module: str = "kernels", **arguments: Any) -> None:
    """Launch a kernel with so many programs, on the device of a tensor, which need not be the current one.

    Nothing is launched where there are no values, nor for 0 programs.
    """
    if programs == 0 or not has_values(on):
        return
    elsewhere = on.is_cuda and on.device.index != torch.cuda.current_device()
    with torch.cuda.device(on.device) if elsewhere else NOTHING:
        getattr(_kernels(module), kernel)[(programs,)](**understood(arguments, torch.version.hip is not None))


def understood(arguments: dict[str, Any], amd: bool) -> dict[str, Any]:
    """The arguments of a launch, on AMD's cards without what NVIDIA's alone have: a bound on registers, and a FAST
    logarithm."""
    if not amd:
        return arguments
    return {name: False if name == "FAST" else x for name, x in arguments.items() if name != "maxnreg"}


def require(x: Tensor) -> None:
    """Raise if this backend cannot take logits, or operands, such as these."""
    _refuse(unavailable(x))


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise LogitlessError(
            f'backend="triton" cannot run here: {reason}. Use backend="auto" or "tiled"; to run the kernels on CPU, '
            f"set TRITON_INTERPRET=1 before Python starts."
        )


def describable(x: Tensor) -> bool:
    """Whether a descriptor can stand for a matrix: rows contiguous, each beginning at a multiple of 16 bytes."""
    begins = x.stride(0) * x.element_size() % 16 == 0 and (not has_values(x) or x.data_ptr() % 16 == 0)
    # An expanded matrix (stride 0) cannot be a descriptor.
    return begins and x.stride(1) == 1 and x.stride(0) >= x.shape[1]


def described(x: Tensor, rows: int, columns: int) -> Any:
    """A descriptor by which blocks of a matrix are loaded or stored."""
    descriptors = importlib.import_module("triton.tools.tensor_descriptor")
    return descriptors.TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])
