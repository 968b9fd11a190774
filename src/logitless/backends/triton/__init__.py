"""Triton kernels for NVIDIA GPUs, and for CPU tensors under Triton's interpreter.

``statistics`` reads each selected row once; ``gradient`` reads it once more and writes it once. Neither allocates
anything larger than a vector: rows are found by index, not gathered, and half-precision logits are widened in
registers.
"""

# pyright: reportArgumentType=false
# Triton's own annotations want tl.constexpr where every caller passes a plain bool or int.

from __future__ import annotations

import contextlib

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from logitless.backends.contract import Problem, Running, over
from logitless.backends.triton.kernels import (
    exponentials_kernel,
    gradient_from_kernel,
    gradient_kernel,
    mix_kernel,
    narrowing_kernel,
    rescale_kernel,
    statistics_kernel,
)
from logitless.backends.triton.sizes import (
    exponentials_sizes,
    gradient_from_sizes,
    gradient_sizes,
    narrowing_sizes,
    statistics_sizes,
)
from logitless.errors import LogitlessError
from logitless.softmax import Coefficients, Normaliser

NOTHING = contextlib.nullcontext()
INTERPRETED = isinstance(statistics_kernel, InterpretedFunction)


def unavailable(logits: Tensor) -> str | None:
    """Why this backend cannot take these logits, or None if it can."""
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its kernels take float32, bfloat16 and float16, not {logits.dtype}"
    if logits.device.type != "cuda" and not INTERPRETED:
        return f"its kernels run on CUDA devices, and the logits are on {logits.device.type}"
    return None


def statistics(problem: Problem, out: Tensor | None = None) -> Tensor:
    """Same as :func:`logitless.backends.reference.statistics`, in one read of the rows."""
    _require_available(problem.logits)
    num_rows = problem.num_rows
    stats = torch.empty((4, num_rows), dtype=torch.float32, device=problem.logits.device) if out is None else out
    if num_rows == 0:
        return stats
    with _on_device_of(problem.logits):
        statistics_kernel[(num_rows,)](
            logits=problem.logits,
            index=problem.index,
            column=problem.column,
            gain=problem.gain,
            stats=stats,
            row_stride=problem.logits.stride(0),
            columns=problem.columns,
            first=problem.first,
            part_stride=stats.stride(0),
            squash=problem.squash,
            INDEXED=problem.index is not None,
            ENTROPY=problem.entropy,
            SOFTCAP=bool(problem.squash),
            **statistics_sizes(problem.logits.dtype, problem.columns),
        )
    return stats


def gradient(problem: Problem, norm: Normaliser, coef: Coefficients, out: Tensor, out_index: Tensor | None) -> None:
    """Same as :func:`logitless.backends.reference.gradient`: one read of the rows, one write of ``out``."""
    _require_available(problem.logits)
    num_rows, (num_tokens, width) = problem.num_rows, out.shape
    if num_rows == 0 or width == 0:
        out.zero_()
        return
    slot = None
    if out_index is not None:
        slot = torch.full((num_tokens,), -1, dtype=torch.int64, device=out.device)
        slot.index_copy_(0, out_index, torch.arange(num_rows, device=out.device))
    sizes = gradient_sizes(problem.logits.dtype, width)
    with _on_device_of(problem.logits):
        gradient_kernel[(num_tokens * triton.cdiv(width, sizes["BLOCK"]),)](
            logits=problem.logits,
            index=problem.index,
            column=problem.column,
            gain=problem.gain,
            reference=norm.reference,
            log_sum=norm.log_sum,
            plain=coef.plain,
            product=coef.product,
            at_target=coef.at_target,
            slot=slot,
            out=out,
            row_stride=problem.logits.stride(0),
            out_stride=out.stride(0),
            columns=problem.columns,
            first=problem.first,
            width=width,
            squash=problem.squash,
            INDEXED=slot is not None,
            PRODUCT=coef.product is not None,
            SOFTCAP=bool(problem.squash),
            **sizes,
        )


def gradient_over(problem: Problem, norm: Normaliser, coef: Coefficients, dtype: torch.dtype) -> Tensor:
    """Same as :func:`logitless.backends.reference.gradient_over`: one read, one write, no second buffer."""
    out = over(problem.logits, dtype)
    if out.dtype == problem.logits.dtype:
        gradient(problem, norm, coef, out, None)
        return out
    _require_available(problem.logits)
    if problem.num_rows == 0 or problem.columns == 0:
        return out
    with _on_device_of(out):
        narrowing_kernel[(problem.num_rows,)](
            logits=problem.logits,
            column=problem.column,
            gain=problem.gain,
            reference=norm.reference,
            log_sum=norm.log_sum,
            plain=coef.plain,
            product=coef.product,
            at_target=coef.at_target,
            out=out,
            row_stride=problem.logits.stride(0),
            out_stride=out.stride(0),
            columns=problem.columns,
            first=problem.first,
            squash=problem.squash,
            PRODUCT=coef.product is not None,
            SOFTCAP=bool(problem.squash),
            **narrowing_sizes(problem.columns),
        )
    return out


def exponentials(problem: Problem, stats: Tensor, running: Running, out: Tensor, slope: bool) -> None:
    """Same as :func:`logitless.backends.reference.exponentials`, in one launch."""
    if problem.num_rows == 0:
        return
    sums = running.sums
    with _on_device_of(out):
        exponentials_kernel[(problem.num_rows,)](
            logits=problem.logits,
            column=problem.column,
            gain=problem.gain,
            stats=stats,
            before=running.before,
            reference=running.reference,
            sums=sums,
            out=out,
            row_stride=problem.logits.stride(0),
            out_stride=out.stride(0),
            sums_stride=0 if sums is None else sums.stride(0),
            columns=problem.columns,
            first=problem.first,
            part_stride=stats.stride(0),
            sums_columns=0 if sums is None else sums.shape[1],
            squash=problem.squash,
            slack=running.slack,
            drop=running.drop,
            ENTROPY=problem.entropy,
            SOFTCAP=bool(problem.squash),
            SLOPE=slope and bool(problem.squash),
            SUMS=sums is not None,
            **exponentials_sizes(problem.columns),
        )


def gradient_from(
    problem: Problem, references: Tensor, slab: int, norm: Normaliser, coef: Coefficients, out: Tensor
) -> None:
    """Same as :func:`logitless.backends.reference.gradient_from`, in one launch for all slabs."""
    if problem.num_rows == 0 or problem.columns == 0:
        return
    with _on_device_of(out):
        gradient_from_kernel[(problem.num_rows * triton.cdiv(problem.columns, slab),)](
            exponentials=problem.logits,
            column=problem.column,
            gain=problem.gain,
            moved=references,
            reference=norm.reference,
            log_sum=norm.log_sum,
            plain=coef.plain,
            product=coef.product,
            at_target=coef.at_target,
            out=out,
            row_stride=problem.logits.stride(0),
            out_stride=out.stride(0),
            moved_stride=references.stride(0),
            columns=problem.columns,
            slab=slab,
            first=problem.first,
            PRODUCT=coef.product is not None,
            **gradient_from_sizes(min(slab, problem.columns)),
        )


def rescale(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """Same as :func:`logitless.backends.reference.rescale`."""
    if x.numel():
        with _on_device_of(x):
            rescale_kernel[(x.shape[0],)](
                x,
                factor,
                out,
                x.stride(0),
                out.stride(0),
                x.shape[1],
                ROWS=factor.dim() > 0,
                BLOCK=1024,
            )


def mix(x: Tensor, by: Tensor, y: Tensor, index: Tensor, times: Tensor, out: Tensor) -> None:
    """Same as :func:`logitless.backends.reference.mix`."""
    if x.numel():
        with _on_device_of(x):
            mix_kernel[(x.shape[0],)](
                x, by, y, index, times, out, x.stride(0), y.stride(0), out.stride(0), x.shape[1], BLOCK=1024
            )


def _require_available(logits: Tensor) -> None:
    reason = unavailable(logits)
    if reason is not None:
        raise LogitlessError(
            f'backend="triton" cannot run here: {reason}. Use backend="auto" or "tiled"; to run the kernels on CPU, '
            f"set TRITON_INTERPRET=1 before Python starts."
        )


def _on_device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the one that holds the tensors."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return NOTHING
    return torch.cuda.device(x.device)
