"""Peak bytes and matrix products of ``policy_loss`` of ``Logits``, both counted.

    peak  <=  memory= (the chunk of logits, and elementwise work on it)  +  d_hidden  +  d_weight in float32  +  vectors
    or, where memory= is less than that, the gradients twice: as they were made and as backward hands them out

256 rows by 8,192 columns would be 8 MiB of float32 logits: a single stray buffer of their size, in any dtype, is above
the slack, and so is one of the size of the widened weight.
"""

from __future__ import annotations

import pytest
import torch
from calls import loss_from_hidden
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import logitless as ll
from benchmarks.bench.measure import peak_bytes
from logitless.machine import SLAB

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, VOCAB, WIDTH = 256, 8192, 32
MEMORY = 2 << 20
PPO = ll.Objective(entropy_coef=0.01)


def operands(dtype=torch.float32, wanted: str = "all", vocab: int = VOCAB, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    hidden, weight = torch.randn(ROWS, width).to(dtype), (torch.randn(vocab, width) / 4).to(dtype)
    return hidden.requires_grad_(wanted in ("all", "hidden")), weight.requires_grad_(wanted in ("all", "weight"))


def step(hidden: Tensor, weight: Tensor, objective=PPO, advantage: Tensor | None = None, **options) -> None:
    """Forward and backward; what is returned is gone with it."""
    target = torch.arange(len(hidden)) % len(weight)
    advantage = torch.ones(len(hidden)) if advantage is None else advantage
    given = {"old_logprob": "current", "advantage": advantage}
    loss, _ = loss_from_hidden(hidden, weight, target, objective, **given, **options)
    leaves = [x for x in (hidden, weight) if x.requires_grad]
    if loss.requires_grad:
        torch.autograd.grad(loss, leaves, torch.tensor(0.3), allow_unused="weight_grad" in options)


def peak(*args, **options) -> int:
    return peak_bytes(lambda: step(*args, **options), "cpu")


def vectors(num_rows: int = ROWS) -> int:
    """Room for [R]-sized vectors: 64 of them in int64."""
    return 64 * 8 * num_rows


def widened(weight: Tensor, memory: int) -> int:
    """Float32 copies of the operands of one product, and its result: a slab of columns by a chunk of rows, at most."""
    rows = memory // 2 // (4 * len(weight))
    return 4 * SLAB * (rows + 2 * weight.shape[1]) + 2 * 4 * rows * weight.shape[1]


# Memory.


@pytest.mark.parametrize("wanted", ["all", "hidden", "weight"])
@pytest.mark.parametrize("zeros", [False, True])
def test_a_chunk_and_the_gradients(wanted: str, zeros: bool):
    hidden, weight = operands(wanted=wanted)
    advantage = (torch.arange(ROWS) % 2).float() if zeros else None
    objective = ll.Objective() if zeros else PPO
    gradients = sum(x.nbytes for x in (hidden, weight) if x.requires_grad)
    assert peak(hidden, weight, objective, advantage, memory=MEMORY) <= MEMORY + gradients + vectors()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_widens_slabs_only(dtype: torch.dtype):
    hidden, weight = operands(dtype, vocab=4 * SLAB, width=128)
    memory = 4 << 20
    # Of the weight the float32 accumulator, which is there with the gradient only when the chunk is gone.
    allowed = memory + hidden.nbytes + 4 * weight.numel() + vectors() + widened(weight, memory)
    # A second [V, D] in float32, as the widened weight would be, is far above what is allowed.
    used = peak(hidden, weight, memory=memory)
    assert used <= allowed < memory + hidden.nbytes + 8 * weight.numel()
    assert used >= 4 * weight.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_buffer_for_the_weight_gradient_saves_one(dtype: torch.dtype):
    hidden, weight = operands(dtype, width=128)
    buffer = torch.zeros(weight.shape)
    extra = 0 if dtype == torch.float32 else widened(weight, MEMORY)
    used = peak(hidden, weight, memory=MEMORY, weight_grad=buffer, grad_scale=0.3)
    assert used <= MEMORY + 2 * hidden.nbytes + vectors() + extra
    assert peak(hidden, weight, memory=MEMORY) >= used + 4 * weight.numel() - MEMORY
    assert buffer.any()


def test_the_peak_falls_with_the_budget():
    hidden, weight = operands()
    peaks = [peak(hidden, weight, memory=memory) for memory in (16 << 20, 4 << 20, 1 << 20)]
    assert peaks == sorted(peaks, reverse=True)
    # By then the gradients decide: as they were made, and, some rows at a time, as backward hands them out.
    gradients = hidden.nbytes + weight.nbytes
    assert peaks[2] <= gradients + max(1 << 20, gradients + 4 * 1024 * WIDTH) + vectors()
    assert peaks[0] >= 8 << 20


def test_nothing_is_held_for_backward_but_gradients():
    hidden, weight = operands()
    held = []

    def keep(x: Tensor) -> Tensor:
        held.append(x.nbytes)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        given = {"old_logprob": "current", "advantage": torch.ones(ROWS)}
        ll.policy_loss(ll.Logits(hidden, weight), torch.zeros(ROWS).long(), PPO, **given)
    assert hidden.nbytes + weight.nbytes <= sum(held) <= hidden.nbytes + weight.nbytes + vectors()


def test_the_loss_alone_needs_its_budget():
    hidden, weight = operands(wanted="none")
    assert peak(hidden, weight, memory=MEMORY) <= MEMORY + vectors()


def test_the_counter_sees_the_logits():
    """The measurement itself: plain torch on the same step holds several copies of the logits, and they are counted."""
    hidden, weight = operands()

    def plain() -> None:
        log_p = torch.log_softmax(hidden @ weight.T, -1)
        torch.autograd.grad(log_p[:, 0].sum() - (log_p.exp() * log_p).sum(), (hidden, weight))

    assert peak_bytes(plain, "cpu") >= 3 * 4 * ROWS * VOCAB


# Products.


def products(hidden: Tensor, weight: Tensor, *args, **options) -> float:
    """Of forward and backward, in units of hidden @ weight.T."""
    with FlopCounterMode(display=False) as counter:
        step(hidden, weight, *args, **options)
    return counter.get_total_flops() / (2 * len(hidden) * weight.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory", [MEMORY, "1GiB"])
def test_counted_products(memory, dtype: torch.dtype):
    options = {"vocab": 1000, "width": 8}
    trained = operands(dtype, **options)
    assert products(*trained, memory=memory) == pytest.approx(3.0)
    assert products(*operands(dtype, "hidden", **options), memory=memory) == pytest.approx(2.0)
    assert products(*operands(dtype, "weight", **options), memory=memory) == pytest.approx(2.0)
    assert products(*trained, memory=memory, weight_grad=torch.zeros(1000, 8), grad_scale=0.3) == pytest.approx(3.0)
    with torch.no_grad():
        assert products(*trained, memory=memory) == pytest.approx(1.0)
    assert products(*trained, ll.Objective(), memory=memory, bits="canonical") >= 4.0


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_rows_without_a_gradient_are_not_multiplied(share: float):
    """Half of the rows without: one product of all rows, and two of half of them."""
    trained = operands(vocab=1000, width=8)
    advantage = (torch.arange(ROWS) % 4 >= 4 * share).float()
    for memory in (MEMORY, "1GiB"):
        counted = products(*trained, ll.Objective(), advantage, memory=memory)
        assert counted == pytest.approx(1.0 + 2.0 * (1.0 - share))
        assert products(*trained, ll.Objective(), advantage, memory=memory, drop_zeros=False) == pytest.approx(3.0)
        # An entropy term gives every row a gradient.
        assert products(*trained, PPO, advantage, memory=memory) == pytest.approx(3.0)


def test_clipped_rows_are_not_multiplied():
    hidden, weight = operands(vocab=1000, width=8)
    target = torch.arange(ROWS)
    near = ll.logprobs(ll.Logits(hidden.detach(), weight.detach()), target).logprob
    # The ratio is e there, past the bound that a positive advantage is clipped at.
    old = near - (torch.arange(ROWS) % 2)
    with FlopCounterMode(display=False) as counter:
        given = {"old_logprob": old, "advantage": torch.ones(ROWS)}
        loss, metrics = ll.policy_loss(ll.Logits(hidden, weight), target, ll.Objective(), **given)
        loss.backward()
    assert metrics.compute()["clip_fraction"] == 0.5
    assert counter.get_total_flops() / (2 * ROWS * weight.numel()) == pytest.approx(2.0)
