"""Triton's interpreter at four times its speed, and with roundings as hardware has them: the same kernels.

launch     on every call of a device function (and ``tl.max`` is one) all names of ``triton.language`` are looked
           through for those to replace; within one launch they stay replaced, so once per module is enough
types      every operation makes the types of its blocks anew, with names, shapes and sizes: each is kept
operands   two blocks of one type and one shape need neither a cast nor a broadcast
overflow   every integer operation is repeated in 64 bits for an assertion that is made in debug mode alone
bfloat16   from float32 bits are cut off, twice the error of rounding to the nearest; to float32 it is a shift
products   numpy's depend on where in its tile a row lies, on some processors; a GPU's do not. In float64 the sums of
           16-bit operands are exact, and so the same everywhere
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any


def quicken() -> None:
    """For this process, where Triton is installed."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    _patch_names_once(interpreter)
    _keep_types(interpreter)
    _pass_equal_operands(interpreter.interpreter_semantic)
    _convert_bfloat16(interpreter)
    _sum_products_in_float64(interpreter)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _patch_names_once(interpreter: Any) -> None:
    function, executor = interpreter.InterpretedFunction, interpreter.GridExecutor
    launch, patched = executor.__call__, set()

    def launch_afresh(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ not in patched:
            patched.add(self.fn.__module__)
            interpreter._patch_lang(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    executor.__call__, function.__call__ = launch_afresh, call


def _keep_types(interpreter: Any) -> None:
    """Blocks of one type and shape share what is derived from those; shapes that are equal are the same object."""
    core = interpreter.tl.core
    make_block, make_tensor, equal = core.block_type.__init__, core.tensor.__init__, core.dtype.__eq__
    table, numbers, blocks, shapes, sizes = interpreter._get_np_dtype, {}, {}, {}, {}

    def look_up(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in numbers:
            numbers[name] = table(dtype)
        return numbers[name]

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *[n.value if isinstance(n, core.constexpr) else n for n in shape]
        if key not in blocks:
            make_block(self, element_ty, shape)
            self.shape = shapes.setdefault(key[1:], self.shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    def tensor(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else None
        if id(shape) not in sizes:
            make_tensor(self, handle, type)
            # With the shape itself, whose id then stays its own.
            sizes[id(shape)] = self.numel, self.shape, shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape, _ = sizes[id(shape)]

    interpreter._get_np_dtype = look_up
    core.block_type.__init__, core.tensor.__init__ = block, tensor
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _pass_equal_operands(semantic: Any) -> None:
    cast, broadcast, check = semantic.cast, semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl

    def cast_if_needed(x: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        return x if x.dtype is target else cast(x, target, *args, **kwargs)

    def spread(x: Any, like: Any) -> Any:
        block = like.type.with_element_ty(x.dtype)
        return semantic.tensor(semantic.builder.create_splat(block, x.handle), block)

    def broadcast_if_needed(x: Any, y: Any) -> Any:
        if x.shape is y.shape:
            return x, y
        if not x.type.is_block():
            return spread(x, y), y
        if not y.type.is_block():
            return x, spread(y, x)
        return broadcast(x, y)

    def check_if_needed(x: Any, y: Any, lhs: bool = False, rhs: bool = False, add: bool = True, div: bool = False):
        # Division widens, pointers need permission, and numbers become blocks.
        same = not div and isinstance(x, semantic.tensor) and isinstance(y, semantic.tensor) and x.dtype is y.dtype
        if same and not x.dtype.is_ptr():
            return broadcast_if_needed(x, y)
        return check(x, y, lhs, rhs, add, div)

    semantic.cast, semantic.broadcast_impl_value = cast_if_needed, broadcast_if_needed
    semantic.binary_op_type_checking_impl = check_if_needed


def _convert_bfloat16(interpreter: Any) -> None:
    import numpy as np

    convert = interpreter._convert_float

    def to_nearest(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if source.name == "bf16" and target.name == "fp32":
            return x.astype(np.uint32) << 16
        if source.name != "fp32" or target.name != "bf16":
            return convert(x, source, target, mode)
        bits = np.ascontiguousarray(x).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16)

    interpreter._convert_float = to_nearest


def _sum_products_in_float64(interpreter: Any) -> None:
    import numpy as np

    multiply = interpreter.InterpreterBuilder.create_dot

    def multiply_exactly(self: Any, a: Any, b: Any, d: Any, *args: Any) -> Any:
        if not a.data.dtype == b.data.dtype == d.data.dtype == np.float32:
            return multiply(self, a, b, d, *args)
        product = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return interpreter.TensorHandle(product.astype(np.float32), d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = multiply_exactly
