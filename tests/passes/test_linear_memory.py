"""Peak bytes of ``logprobs`` of ``Logits``, counted by the allocator's own events.

    peak  <=  memory=  +  d_hidden, d_weight  +  one float32 accumulator of min(R, V) x D  +  vectors

256 rows by 8,192 columns would be 8 MiB of float32 logits, and 2,048 by 512 would be 4 MiB: a single stray buffer of
their size, in any dtype, is above the slack. The hidden size is small, so that gradients are not what is measured.
"""

from __future__ import annotations

import pytest
import torch
from calls import from_hidden
from torch import Tensor

import logitless as ll
from benchmarks.bench.measure import peak_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

SLABS, BLOCKS = (256, 8192), (2048, 512)
"""Rows and columns: fewer rows than columns, and more."""
SHAPES = {"slabs": (*SLABS, 2 << 20), "blocks": (*BLOCKS, 1 << 20)}
"""With a budget that is a quarter of the float32 logits."""
MODES = [("all", "grad"), ("all", None), ("hidden", "grad"), ("hidden", "value"), ("weight", "grad")]
"""What needs a gradient, and the entropy."""


def vectors(num_rows: int) -> int:
    """Room for [R]-sized vectors: 64 of them in int64."""
    return 64 * 8 * num_rows


def operands(num_rows: int, vocab: int, width: int = 16, dtype=torch.float32, wanted: str = "all"):
    hidden, weight = torch.randn(num_rows, width).to(dtype), torch.randn(vocab, width).to(dtype)
    return hidden.requires_grad_(wanted in ("all", "hidden")), weight.requires_grad_(wanted in ("all", "weight"))


def forward_peak(hidden: Tensor, weight: Tensor, rows, **options) -> int:
    return peak_bytes(lambda: from_hidden(hidden.detach(), weight.detach(), rows, **options), "cpu")


def training_peak(hidden: Tensor, weight: Tensor, rows, **options) -> int:
    upstream = torch.randn(len(rows))
    leaves = [x for x in (hidden, weight) if x.requires_grad]

    def step() -> None:
        out = from_hidden(hidden, weight, rows, **options)
        outputs = [out.logprob] if options.get("entropy") != "grad" else [out.logprob, out.entropy]
        torch.autograd.grad(outputs, leaves, [upstream] * len(outputs), allow_unused="weight_grad" in options)

    return peak_bytes(step, "cpu")


def gradients(hidden: Tensor, weight: Tensor) -> int:
    """Bytes of the gradients, of the float32 accumulator, and of hidden rows in float32 where they are narrower."""
    returned = sum(x.nbytes for x in (hidden, weight) if x.requires_grad)
    return returned + 4 * min(len(hidden), len(weight)) * hidden.shape[1] + 4 * hidden.numel()


@pytest.mark.parametrize("entropy", [None, "value"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_needs_its_budget(shape: str, dtype: torch.dtype, entropy):
    num_rows, vocab, memory = SHAPES[shape]
    hidden, weight = operands(num_rows, vocab, dtype=dtype)
    rows = torch.randint(vocab, (num_rows,))
    options = {"entropy": entropy, "memory": memory, "head": ll.Head(temperature=0.7)}
    assert forward_peak(hidden, weight, rows, **options) <= memory + vectors(num_rows)


@pytest.mark.parametrize(("wanted", "entropy"), MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_training_needs_its_budget_and_gradients(shape: str, dtype: torch.dtype, wanted: str, entropy):
    num_rows, vocab, memory = SHAPES[shape]
    hidden, weight = operands(num_rows, vocab, dtype=dtype, wanted=wanted)
    peak = training_peak(hidden, weight, torch.randint(vocab, (num_rows,)), entropy=entropy, memory=memory)
    assert peak <= memory + gradients(hidden, weight) + vectors(num_rows)


@pytest.mark.parametrize("memory", [2 << 20, 512 << 10])
@pytest.mark.parametrize(("wanted", "entropy"), [("none", None), ("all", "grad"), ("hidden", None)])
def test_twice_the_vocabulary_needs_no_more(wanted: str, entropy, memory: int):
    """Beyond a larger gradient of the weight, and 16 bytes of statistics per row and slab until they are merged."""
    peaks = []
    for vocab in (4096, 8192):
        hidden, weight = operands(256, vocab, wanted=wanted)
        run, extra = (forward_peak, 0) if wanted == "none" else (training_peak, gradients(hidden, weight))
        peaks.append(run(hidden, weight, torch.randint(vocab, (256,)), entropy=entropy, memory=memory) - extra)
    # Half of the budget is the tile: 256 rows of float32, so many columns to a slab.
    more_slabs = 4096 // (memory // 2 // (256 * 4))
    assert peaks[1] - peaks[0] <= memory // 20 + 16 * 256 * more_slabs


@pytest.mark.parametrize("wanted", ["all", "hidden"])
@pytest.mark.parametrize("shape", SHAPES)
def test_training_peak_falls_with_the_budget(shape: str, wanted: str):
    num_rows, vocab, _ = SHAPES[shape]
    hidden, weight = operands(num_rows, vocab, wanted=wanted)
    rows, entropy = torch.randint(vocab, (num_rows,)), "grad" if wanted == "all" else None
    budgets = [8 << 20, 2 << 20, 512 << 10]
    peaks = [training_peak(hidden, weight, rows, entropy=entropy, memory=memory) for memory in budgets]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] <= budgets[-1] + gradients(hidden, weight) + vectors(num_rows)


def test_selecting_rows_copies_only_them():
    """An eighth of the tokens: a copy of their hidden states, and one gradient of all tokens."""
    num_tokens, vocab, memory = 4096, 8192, 4 << 20
    hidden, weight = operands(num_tokens, vocab)
    index = torch.arange(0, num_tokens, 8)
    rows = ll.Rows.at(index, torch.randint(vocab, (512,)), num_tokens=num_tokens)
    peak = training_peak(hidden, weight, rows, entropy="grad", memory=memory)
    assert peak <= memory + hidden.nbytes + weight.nbytes + 3 * 4 * 512 * 16 + vectors(512)


@pytest.mark.parametrize("shape", SHAPES)
def test_kept_ids_cost_their_own_size(shape: str):
    num_rows, vocab, memory = SHAPES[shape]
    hidden, weight = operands(num_rows, vocab)
    kept = ll.Kept(torch.randint(vocab, (3 * num_rows,)), torch.full((num_rows,), 3))
    options = {"entropy": "grad", "kept": kept, "memory": memory}
    peak = training_peak(hidden, weight, torch.randint(vocab, (num_rows,)), **options)
    # Four entries per row; two dozen vectors of them in int64 and float32.
    entries = 24 * 8 * 4 * num_rows
    assert peak <= memory + gradients(hidden, weight) + vectors(num_rows) + entries


@pytest.mark.parametrize(("num_rows", "vocab"), [(64, 2048), (1024, 512)], ids=["slabs", "blocks"])
def test_a_buffer_for_the_weight_gradient_saves_one(num_rows: int, vocab: int):
    """Neither a gradient of the weight nor an accumulator for it exists besides."""
    memory, width = 256 << 10, 256
    hidden, weight = operands(num_rows, vocab, width)
    rows, buffer = torch.randint(vocab, (num_rows,)), torch.zeros(vocab, width)
    peak = training_peak(hidden, weight, rows, entropy="grad", memory=memory, weight_grad=buffer)
    accumulator = 0 if num_rows >= vocab else hidden.nbytes
    assert peak <= memory + hidden.nbytes + accumulator + vectors(num_rows)
    assert weight.grad is None


def test_memory_to_spare_is_used_and_held_to(monkeypatch):
    """Exponentials of half of the rows, of all, and never more than was allowed."""
    monkeypatch.setattr("logitless.route.plan.WORK", 2 << 20)
    num_rows, vocab = SLABS
    hidden, weight = operands(num_rows, vocab, dtype=torch.bfloat16)
    rows = torch.randint(vocab, (num_rows,))
    peaks = []
    for memory in (2 << 20, 4 << 20, 7 << 20):
        peaks.append(training_peak(hidden, weight, rows, entropy="grad", memory=memory))
        assert peaks[-1] <= memory + gradients(hidden, weight) + vectors(num_rows)
    assert peaks[2] >= peaks[0] + 2 * num_rows * vocab * 0.9


def test_nothing_is_held_between_forward_and_backward_but_vectors():
    num_rows, vocab, memory = SHAPES["slabs"]
    hidden, weight = operands(num_rows, vocab)
    rows, held = torch.randint(vocab, (num_rows,)), []
    held_bytes = []

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in (hidden.data_ptr(), weight.data_ptr()):
            held_bytes.append(x.nbytes)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        held.append(ll.logprobs(ll.Logits(hidden, weight), rows, entropy="grad", memory=memory))
    assert sum(held_bytes) <= 16 * 8 * num_rows


def test_the_counter_sees_the_logits():
    """The measurement itself: plain torch on the same step holds several copies of the logits, and they are counted."""
    num_rows, vocab, _ = SHAPES["slabs"]
    hidden, weight = operands(num_rows, vocab)

    def plain() -> None:
        log_p = torch.log_softmax(hidden @ weight.T, -1)
        torch.autograd.grad(log_p[:, 0].sum() - (log_p.exp() * log_p).sum(), (hidden, weight))

    assert peak_bytes(plain, "cpu") >= 3 * 4 * num_rows * vocab
