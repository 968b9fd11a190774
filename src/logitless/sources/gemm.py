"""Matrix products with the accumulator kept: half-precision operands, float32 result, no rounding in between.

On CUDA the vendor library writes its float32 accumulator out (``out_dtype``). On CPU the operands are widened, which
gives the same products; callers keep them tile-sized, so the widened copies are too. Float32 operands multiply in
IEEE float32 whatever torch's global switch says; TF32 is used only where it was asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from logitless.machine import PIECE, pieces

NOTHING = contextlib.nullcontext()


def multiply(a: Tensor, b: Tensor, out: Tensor, *, wide: bool, add: bool = False, tf32: bool = False) -> None:
    """``out = a @ b``, or ``out += a @ b``, summed in at least float32 and rounded once to ``out``'s dtype. ``wide``
    says that the library writes float32 sums of 16-bit operands."""
    # The library itself writes results in the operands' dtype, and float32 sums of 16-bit operands.
    written = a.dtype == out.dtype or (a.dtype.itemsize == 2 and out.dtype == torch.float32)
    if wide and a.dtype.itemsize == 2:
        columns, depth = _beyond(b.shape[1]), _beyond(a.shape[1]) if a.stride(1) == 1 else 0
        if columns:
            for some in (slice(0, -columns), slice(-columns, None)):
                multiply(a, b[:, some], out[:, some], wide=True, add=add)
            return
        if depth and out.dtype == torch.float32:
            multiply(a[:, :-depth], b[:-depth], out, wide=True, add=add)
            multiply(a[:, -depth:], b[-depth:], out, wide=True, add=True)
            return
        # A sum in two parts would be rounded to 16 bits twice.
        written = written and not depth
    if wide and a.is_meta:
        # On the meta device nothing is computed; only a result that is rounded or widened afterwards is allocated.
        if not written:
            torch.empty((a.shape[0], b.shape[1]), dtype=_wide(a.dtype), device=a.device)
        return
    with _no_autocast(a), _float32_products(a, tf32):
        if wide and not written:
            product = torch.empty((a.shape[0], b.shape[1]), dtype=_wide(a.dtype), device=a.device)
            multiply(a, b, product, wide=True, tf32=tf32)
            out.add_(product) if add else out.copy_(product)
        elif wide:
            _multiply_wide(a, b, out, add)
        elif a.dtype == out.dtype == _wide(out.dtype):
            torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
        else:
            sums = torch.promote_types(a.dtype, _wide(out.dtype))
            product = torch.mm(a.to(sums), b.to(sums))
            out.add_(product) if add else out.copy_(product)


def _multiply_wide(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    """A product whose sums the library writes in ``out``'s dtype."""
    written_to: Any = {"out": out} if out.dtype == a.dtype else {"out_dtype": out.dtype, "out": out}
    torch.addmm(out, a, b, **written_to) if add else torch.mm(a, b, **written_to)


FIXED_ROWS = 1024
"""Rows of a product whose bits must not depend on how many there are."""

FEW_ROWS = (64, 256)
"""Fewer rows for such products: an engine's steps have few, and 1024 would cost them milliseconds."""

FIXED_TILE = (64, 128)
"""Rows and columns of such a product on a CPU, whose library adds up in an order that depends on both numbers."""


def multiply_fixed(a: Tensor, b: Tensor, out: Tensor, *, wide: bool, tf32: bool = False, small: bool = False) -> None:
    """``out = a @ b.T`` in products of one shape, whatever the number of rows; on a CPU, of columns, too.

    Args:
        small: whether fewer rows make a smaller product. Those have the same bits where the library adds up the whole
            width at once, as it does for the many columns of a head (``benchmarks/canonical.py`` looks).
    """
    rows, columns = (FIXED_ROWS, max(1, len(b))) if wide else FIXED_TILE
    if wide and small:
        rows = next((height for height in FEW_ROWS if len(a) <= height), rows)
    for r in pieces(len(a), rows, a.is_meta):
        some = a[r]
        if len(some) < rows:
            some = torch.nn.functional.pad(some, (0, 0, 0, rows - len(some)))
        for c in pieces(len(b), columns, a.is_meta):
            few, here = b[c], out[r, c]
            if wide and len(here) == rows:
                multiply(some, few.T, here, wide=True, tf32=tf32)
                continue
            if len(few) < columns:
                few = torch.nn.functional.pad(few, (0, 0, 0, columns - len(few)))
            product = out.new_empty((rows, columns))
            multiply(some, few.T, product, wide=wide, tf32=tf32)
            here.copy_(product[: here.shape[0], : here.shape[1]])


def add_rows(x: Tensor, out: Tensor, *, wide: bool) -> None:
    """``out += x.sum(0)``, summed in at least float32.

    As a product: torch's own sum over the rows of a wide matrix takes up to 256 results as working space on a GPU.
    """
    # Apart from the total: a product that adds to it rounds to its size once for every row, and not once for all.
    part = torch.empty((x.shape[1], 1), dtype=_wide(x.dtype), device=x.device)
    multiply(x.T, x.new_ones((x.shape[0], 1)), part, wide=wide)
    out.add_(part[:, 0])


def _beyond(extent: int) -> int:
    """The remainder of an extent beyond whole pieces of 16-bit numbers; 0 where it has no whole piece.

    The library takes a kernel that is four times slower where a row of an operand or of the result has a remainder.
    """
    step = PIECE // 2
    return extent % step if extent > step else 0


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _no_autocast(a: Tensor) -> contextlib.AbstractContextManager[object]:
    """A context without autocast, which would round the operands, and on CPU the product, to 16 bits."""
    # Switching costs as much as a launch, and is spared where autocast is off.
    on = not a.is_meta and torch.is_autocast_enabled(a.device.type)
    return torch.autocast(a.device.type, enabled=False) if on else NOTHING


def _float32_products(a: Tensor, tf32: bool) -> contextlib.AbstractContextManager[object]:
    return _switched(tf32) if a.device.type == "cuda" and a.dtype == torch.float32 else NOTHING


@contextlib.contextmanager
def _switched(tf32: bool) -> Iterator[None]:
    switches = torch.backends.cuda.matmul
    # The name of the switch changed in torch 2.9, and mixing the two raises.
    name = "fp32_precision" if hasattr(switches, "fp32_precision") else "allow_tf32"
    value = tf32 if name == "allow_tf32" else "tf32" if tf32 else "ieee"
    before = getattr(switches, name)
    setattr(switches, name, value)
    try:
        yield
    finally:
        setattr(switches, name, before)
