"""Deferred logits, and what is made of them, in code below torch's functions: addresses, foreign libraries, operators.

What reads is served from computed logits, and counted. What writes, or asks where the numbers lie, is an error that
names the place and the way back: it would write to a copy, or read memory that is gone.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import Tensor

import logitless as ll
from logitless.operands.logits import LogitsMade

pytestmark = pytest.mark.filterwarnings("ignore::logitless.operands.LogitsMade")

H, W = (torch.randn(*shape, generator=torch.Generator().manual_seed(2)) for shape in ((2, 3, 4), (9, 4)))

KINDS: dict[str, Callable[[], Tensor]] = {
    "Logits": lambda: ll.Logits(H, W),
    "log_softmax": lambda: torch.log_softmax(ll.Logits(H, W), -1),
    "softmax": lambda: torch.softmax(ll.Logits(H, W), -1),
    "transposed": lambda: ll.Logits(H, W).transpose(1, 2),
}


@pytest.fixture(scope="module", autouse=True)
def library():
    """Operators of somebody else: one that reads, and two that write, with and without a trailing underscore."""
    made = torch.library.Library("below", "DEF")
    made.define("reads(Tensor x) -> Tensor")
    made.impl("reads", lambda x: x + 1, "CPU")
    made.define("writes(Tensor x, Tensor(a!) out) -> ()")
    made.impl("writes", lambda x, out: None, "CPU")
    made.define("scales(Tensor(a!) x) -> ()")
    made.impl("scales", lambda x: None, "CPU")
    yield made
    made._destroy()


class Address(torch.autograd.Function):
    """A kernel of somebody else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.data_ptr()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError


def launched(x: Tensor) -> None:
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    def kernel(pointer, N: tl.constexpr):
        tl.store(pointer + tl.arange(0, N), 0.0)

    InterpretedFunction(kernel)[(1,)](x, 4)


WRITES: dict[str, Callable[[Any], Any]] = {
    "data_ptr": lambda x: x.data_ptr(),
    "untyped_storage": lambda x: x.untyped_storage(),
    "a kernel in a Function": lambda x: Address.apply(x),
    "__dlpack__": lambda x: x.__dlpack__(),
    "numpy's from_dlpack": np.from_dlpack,
    "numpy's asarray": np.asarray,
    "an operator that writes to its second argument": lambda x: torch.ops.below.writes(torch.ones(2), x),
    "the same by name": lambda x: torch.ops.below.writes(torch.ones(2), out=x),
    "one overload of it": lambda x: torch.ops.below.writes.default(torch.ones(2), x),
    "an operator that writes": lambda x: torch.ops.below.scales(x),
    "an operator of torch that writes": lambda x: torch.ops.aten.exp_(x),
    "an assignment": lambda x: x.__setitem__(0, 0.0),
    "a method in place": lambda x: x.exp_(),
    "out=": lambda x: torch.exp(torch.ones(2, 3, 9), out=x),
    "shared memory": lambda x: x.share_memory_(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRITES)
def test_what_needs_memory_is_refused_with_its_place_and_the_way_back(name, kind):
    with pytest.raises(ll.LogitlessError) as error:
        WRITES[name](KINDS[kind]())
    assert "test_below_torch.py:" in str(error.value)
    assert "logits = logits.computed()" in str(error.value)
    assert "logitless.defer(model) is reversible" in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_of_triton_is_refused(kind):
    pytest.importorskip("triton")
    with pytest.raises(ll.LogitlessError, match=r"(data_ptr|untyped_storage) at .* needs logits in memory"):
        launched(KINDS[kind]())


@pytest.mark.parametrize("kind", [*KINDS, "gradient"])
def test_cpp_code_that_asks_for_an_address_is_refused_by_torch(kind):
    """No Python function is called, so that the error is torch's: better than an address of nothing."""
    if kind == "gradient":
        from logitless.operands.graph import Form, LogitsGradient

        x: Tensor = LogitsGradient(Form.of(H), (None, None))
    else:
        x = KINDS[kind]()
    with pytest.raises(RuntimeError, match="Cannot access data pointer of Tensor"):
        torch._C._to_dlpack(x)


READS: dict[str, Callable[[Any], Any]] = {
    "an operator": lambda x: torch.ops.below.reads(x),
    "an operator of torch": lambda x: torch.ops.aten.sin.default(x),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "a list": lambda x: torch.tensor(x.tolist()),
    "scatter, which returns a new tensor": lambda x: x.scatter(-1, torch.zeros(2, 3, 1, dtype=torch.int64), 9.0),
    "copy_": lambda x: torch.empty(x.shape).copy_(x),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READS)
def test_what_reads_is_given_computed_numbers(name, kind):
    x: Any = KINDS[kind]()
    torch.testing.assert_close(READS[name](x), READS[name](x.computed()))


def test_numbers_of_a_part_are_in_memory_once_they_are_written_to():
    part, other = ll.Logits(H, W).split(1)
    found = torch.logsumexp(part, -1)
    wanted = torch.logsumexp(part.computed(), -1)
    found[0, 0] = 7.0
    wanted[0, 0] = 7.0
    torch.testing.assert_close(found + 0, wanted)
    torch.testing.assert_close(torch.cat([found, torch.logsumexp(other, -1)])[0], wanted[0])


def reduced(rank: int, world: int) -> list[str]:
    import torch.distributed as dist

    found = []
    warnings.simplefilter("ignore", FutureWarning)
    calls: list[Callable[[Any], Any]] = [
        dist.all_reduce,
        lambda x: dist.all_reduce(tensor=x),
        lambda x: dist.broadcast(x, 0),
        lambda x: dist.scatter(x, None if dist.get_rank() else [H, H], 0),
        lambda x: dist.all_gather_into_tensor(x, torch.zeros(1, 3, 9)),
    ]
    for call in calls:
        with pytest.raises(ll.LogitlessError) as error:
            call(ll.Logits(H, W))
        found.append(str(error.value))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LogitsMade)
        into = [torch.empty(2, 3, 9) for _ in range(world)]
        dist.all_gather(into, ll.Logits((rank + 1) * H, W))
    torch.testing.assert_close(torch.stack(into), torch.stack([H @ W.T, 2 * H @ W.T]))
    return found


def test_a_collective_that_writes_to_logits_is_refused():
    for texts in run_ranks(reduced, 2):
        assert len(texts) == 5
        for text in texts:
            assert re.search(r"test_below_torch.py:\d+.*not computed|not computed.*test_below_torch.py:\d+", text), text
            assert "logitless.defer(model) is reversible" in text
