"""Kernels in Gluon on a CPU, whose language Triton's interpreter lacks: each group of warps is a thread.

    in registers   Triton's interpreter, as for all other kernels
    groups         threads of which one runs at a time; at every word between groups another one may be drawn
    a copy         leaves NaN where it will arrive, and arrives when it is drawn
    a product      reads shared memory as late as it may: when it is waited for
    a barrier      tells its present round from the one before, and from nothing else

So a group that reads before a step has arrived, or has its place filled again before it was multiplied, gets a wrong
number, and groups that wait for each other are an error. Which of them is drawn follows from a seed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import random
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

KERNELS = "logitless.backends.triton.turns_kernels"


def simulate(monkeypatch: Any, seed: int = 0) -> None:
    """For one test: kernels by turns are launched here, and machines that are asked make products by turns."""
    from triton import language as tl

    from logitless.backends.triton import launching, products

    plainly = launching.described
    monkeypatch.setattr(products, "described", lambda x, rows, columns, gluon=False: plainly(x, rows, columns))
    # How a block lies in shared memory is nobody's business here.
    monkeypatch.setattr(tl.core.tensor_descriptor_base, "layout", None, raising=False)
    monkeypatch.setitem(sys.modules, KERNELS, _loaded(monkeypatch, Groups(random.Random(seed))))
    # A table of modules of its own, which goes with the test.
    monkeypatch.setattr(launching, "_kernels", functools.cache(launching._kernels.__wrapped__))


class Groups:
    """The groups of one program, and copies under way."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.turn = draw, threading.Condition()
        self.waiting: dict[int, Callable[[], bool]] = {}
        self.copies: list[Callable[[], None]] = []
        self.running, self.error = -1, None
        self.here = threading.local()

    def run(self, functions: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        """All groups to their ends."""
        self.running, self.error, self.copies = -1, None, []
        self.waiting = {number: _always for number in range(len(functions))}
        threads = [threading.Thread(target=self._work, args=(n, *x)) for n, x in enumerate(functions)]
        for thread in threads:
            thread.start()
        with self.turn:
            self._draw()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        assert not self.copies, "A copy has not arrived, and nobody waited for it."

    def _work(self, number: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.here.number, self.here.written = number, []
        try:
            self._until_drawn(number)
            function(*arguments)
            assert not self.here.written, "A group ends before what it wrote has left."
        except BaseException as error:
            with self.turn:
                self.error = self.error or error
        with self.turn:
            self._draw()

    def pause(self, until: Callable[[], bool] | None = None) -> None:
        """Let another group run, or another copy arrive; go on once drawn again, and not before the condition holds."""
        number = self.here.number
        with self.turn:
            self.waiting[number] = until or _always
            self._draw()
        self._until_drawn(number)

    def _until_drawn(self, number: int) -> None:
        with self.turn:
            self.turn.wait_for(lambda: self.running == number or self.error is not None)
            if self.error is not None:
                raise self.error

    def _draw(self) -> None:
        while self.error is None:
            ready: list[Any] = [number for number, until in self.waiting.items() if until()]
            if not ready and not self.copies:
                if self.waiting:
                    self.error = AssertionError(f"Groups {sorted(self.waiting)} wait for each other.")
                break
            drawn = self.draw.choice(ready + self.copies)
            if drawn in self.copies:
                self.copies.remove(drawn)
                drawn()
                continue
            self.running = drawn
            del self.waiting[drawn]
            break
        self.turn.notify_all()


def _always() -> bool:
    return True


class Barrier:
    """An mbarrier: a round is over when all have arrived, with all bytes that were expected."""

    def __init__(self, count: int) -> None:
        self.count = self.missing = count
        self.bytes = self.round = 0

    def arrive(self, count: int = 1, expected: int = 0) -> None:
        assert self.missing >= count, "More have arrived at a barrier than it counts."
        self.missing -= count
        self.add(expected)

    def add(self, expected: int) -> None:
        self.bytes += expected
        if not self.missing and not self.bytes:
            self.round, self.missing = self.round ^ 1, self.count


class Shared:
    """Shared memory, or one of its places: the bits of 16-bit numbers, or barriers."""

    def __init__(self, dtype: Any, shape: list[int], data: np.ndarray | None = None) -> None:
        self.dtype, self.shape = dtype, [int(n) for n in shape]
        if data is None:
            data = np.full(self.shape[:1], None) if dtype.is_int() else np.full(self.shape, 0x7FFF, np.uint16)
        self.data = data

    def index(self, place: Any) -> Shared:
        place = int(place)
        assert 0 <= place < self.shape[0]
        # Barriers are objects, whose place alone would not be a view.
        data = self.data[place : place + 1] if self.dtype.is_int() else self.data[place]
        return Shared(self.dtype, self.shape[1:], data)

    def permute(self, order: tuple[int, int]) -> Shared:
        return Shared(self.dtype, self.shape[::-1], self.data.transpose(order))

    def store(self, block: Any) -> None:
        self.data[:] = _bits(block)

    @property
    def barrier(self) -> Barrier:
        return self.data[0]

    def numbers(self) -> np.ndarray:
        """In float64."""
        if self.dtype.is_bf16():
            return (self.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return self.data.view(np.float16).astype(np.float64)


def _bits(block: Any) -> np.ndarray:
    return np.ascontiguousarray(block.handle.data).view(np.uint16)


class Sums:
    """Sums of products, of which the last may be under way."""

    def __init__(self, data: np.ndarray, like: Any) -> None:
        self.data, self.like = data, like
        self.under_way: list[tuple[Shared, Shared]] = []

    def wait(self, left: int) -> None:
        while len(self.under_way) > left:
            a, b = self.under_way.pop(0)
            # As the interpreter multiplies: sums of 16-bit numbers are exact in float64, and rounded once a step.
            self.data = (a.numbers() @ b.numbers() + self.data).astype(np.float32)


def _loaded(monkeypatch: Any, groups: Groups) -> ModuleType:
    """The module of kernels, with a language that is run here."""
    language = Language(groups)
    gluon, hopper = SimpleNamespace(jit=_jit, language=language), _hopper(groups)
    experimental = importlib.import_module("triton.experimental")
    with monkeypatch.context() as patch:
        patch.setattr(experimental, "gluon", gluon, raising=False)
        for name, module in {"": gluon, ".language": language, ".language.nvidia.hopper": hopper}.items():
            patch.setitem(sys.modules, f"triton.experimental.gluon{name}", module)
        spec = importlib.util.find_spec(KERNELS)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    # The interpreter looks for it in what it launches.
    module.tl = importlib.import_module("triton.language")  # pyright: ignore[reportAttributeAccessIssue]
    return module


class Language:
    """``gluon.language``: Triton's, in which it is not said where a block lies."""

    def __init__(self, groups: Groups) -> None:
        self.groups, self.tl = groups, importlib.import_module("triton.language")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tl, name)

    def arange(self, start: int, end: int, layout: Any = None) -> Any:
        return self.tl.arange(start, end)

    def zeros(self, shape: list[int], dtype: Any, layout: Any = None) -> Any:
        return self.tl.zeros(shape, dtype)

    def allocate_shared_memory(self, dtype: Any, shape: list[int], layout: Any) -> Shared:
        return Shared(dtype, shape)

    def warp_specialize(self, functions: list[Any], warps: list[Any], registers: list[Any]) -> None:
        assert len(functions) == len(warps) + 1 == len(registers) + 1
        self.groups.run([(function.fn, arguments) for function, arguments in functions])

    def NVMMADistributedLayout(self, *args: Any) -> None:
        pass

    def SliceLayout(self, *args: Any) -> None:
        pass


class _jit:
    """A kernel, or a function of one."""

    def __new__(cls, fn: Callable[..., Any] | None = None, **options: Any) -> Any:
        return super().__new__(cls) if fn is not None else _jit

    def __init__(self, fn: Callable[..., Any], **options: Any) -> None:
        self.fn = fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        from triton.runtime.interpreter import GridExecutor

        notes = self.fn.__annotations__
        run = GridExecutor(self.fn, list(self.fn.__code__.co_varnames[: self.fn.__code__.co_argcount]), grid)
        run.constexprs = [name for name, note in notes.items() if note.endswith("constexpr")]
        return run


def _hopper(groups: Groups) -> SimpleNamespace:
    """Words between groups, copies, and products."""
    from triton import language as tl
    from triton.runtime.interpreter import TensorHandle

    def init(barrier: Shared, count: int) -> None:
        barrier.data[0] = Barrier(count)

    def wait(barrier: Shared, phase: Any) -> None:
        phase = int(phase)
        groups.pause(lambda: barrier.barrier.round != phase)

    def arrive(barrier: Shared, count: int = 1) -> None:
        barrier.barrier.arrive(count)
        groups.pause()

    def expect(barrier: Shared, size: int) -> None:
        barrier.barrier.arrive(expected=size)

    def copy_in(source: Any, corner: list[Any], barrier: Shared, place: Shared) -> None:
        found = _bits(source.load(corner))
        place.data[:] = 0x7FFF

        def come() -> None:
            place.data[:] = found
            barrier.barrier.add(-found.nbytes)

        groups.copies.append(come)
        groups.pause()

    def copy_out(target: Any, corner: list[Any], staged: Shared) -> None:
        def go() -> None:
            data = staged.data.copy()
            data = data if staged.dtype.is_bf16() else data.view(np.float16)
            block = tl.core.block_type(staged.dtype, staged.shape)
            target.store(corner, tl.core.tensor(TensorHandle(data, staged.dtype), block))

        groups.here.written.append(go)
        groups.pause()

    def store_wait(left: int) -> None:
        written = groups.here.written
        while len(written) > left:
            written.pop(0)()

    def multiply(a: Shared, b: Shared, sums: Any, use_acc: bool, is_async: bool) -> Sums:
        assert is_async
        if not isinstance(sums, Sums):
            data = sums.handle.data if use_acc else np.zeros(sums.handle.data.shape, np.float32)
            sums = Sums(data, sums)
        sums.under_way.append((a, b))
        groups.pause()
        return sums

    def multiply_wait(left: int, of: list[Sums]) -> Any:
        (sums,) = of
        sums.wait(left)
        if left:
            return sums
        return tl.core.tensor(TensorHandle(sums.data, sums.like.handle.dtype), sums.like.type)

    return SimpleNamespace(
        fence_async_shared=lambda: None,
        mbarrier=SimpleNamespace(init=init, wait=wait, arrive=arrive, expect=expect, MBarrierLayout=lambda: None),
        tma=SimpleNamespace(
            async_copy_global_to_shared=copy_in, async_copy_shared_to_global=copy_out, store_wait=store_wait
        ),
        warpgroup_mma=multiply,
        warpgroup_mma_wait=multiply_wait,
    )
