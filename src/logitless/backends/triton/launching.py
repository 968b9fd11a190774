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
        if torch.version.hip is None and not interpreted():
            _ready(module, kernel).launch(programs, on.device.index, arguments)
        else:
            getattr(_kernels(module), kernel)[(programs,)](**understood(arguments, torch.version.hip is not None))


class Ready:
    """A kernel, and what it was compiled to for each kind of arguments.

    Triton looks for that in every launch, which takes the CPU longer than a launch itself. Two launches of one kind
    here are of one kind for Triton: kinds tell everything apart that it compiles for, and a little more.

    Attributes:
        names: of all parameters, in order.
        constant: of each of them, whether it is known when the kernel is compiled.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.names = tuple(x.name for x in function.params)
        self.parameters = frozenset(self.names)
        self.constant = tuple(x.is_constexpr for x in function.params)
        self.compiled: dict[Any, Any] = {}

    def launch(self, programs: int, device: int, arguments: dict[str, Any]) -> None:
        values = [arguments[name] for name in self.names]
        key = (device, *self.kinds(values), *self.options(arguments))
        compiled = self.compiled.get(key)
        if compiled is None:
            # Triton's own launch, which compiles.
            self.compiled[key] = self.function[(programs,)](**arguments)
        else:
            compiled[(programs, 1, 1)](*values)

    def kinds(self, values: list[Any]) -> list[Any]:
        """What a kernel is compiled for: constants by their value, everything else by its kind."""
        return [x if constant else kind(x) for constant, x in zip(self.constant, values, strict=True)]

    def options(self, arguments: dict[str, Any]) -> tuple[Any, ...]:
        """What is no parameter of the kernel: warps, stages and the like."""
        return tuple(sorted((name, arguments[name]) for name in arguments.keys() - self.parameters))


def kind(x: Any) -> Any:
    """What may be compiled for in an argument: the dtype, whether a pointer or a number is a multiple of 16, whether
    the number is 1, and how many bits it takes."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, int):
        # A negative number has room for one more: -2^31 takes 32 bits, 2^31 does not fit.
        return type(x), x == 1, x % 16 == 0, (x if x >= 0 else ~x).bit_length() // 32
    if x is None or isinstance(x, float):
        return type(x)
    # A descriptor; what it describes is aligned, or there would be none.
    return type(x), x.base.dtype, *x.block_shape


@functools.cache
def _ready(module: str, kernel: str) -> Ready:
    return Ready(getattr(_kernels(module), kernel))


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


def described(x: Tensor, rows: int, columns: int, gluon: bool = False) -> Any:
    """A descriptor by which blocks of a matrix are loaded or stored. A kernel in Gluon has to be told how such a block
    lies in shared memory."""
    told = (x, list(x.shape), list(x.stride()), [rows, columns])
    if gluon:
        return _descriptor("triton.experimental.gluon.nvidia.hopper")(*told, _block_layout(rows, columns, x.dtype))
    return _descriptor("triton.tools.tensor_descriptor")(*told)


@functools.cache
def _descriptor(module: str) -> Any:
    return importlib.import_module(module).TensorDescriptor


@functools.cache
def _block_layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    gl = importlib.import_module("triton.experimental.gluon.language")
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([rows, columns], element)
