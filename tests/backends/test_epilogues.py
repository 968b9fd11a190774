"""Calls from hidden states whose products end in their softmax: which do, and that values and gradients are right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from calls import from_hidden, loss_from_hidden
from shared.linear import HALF, check, draw, draw_rows
from shared.policy_loss import PPO, PPO_FORMULA, make, room
from shared.policy_loss import check as check_loss

import logitless as ll
from benchmarks.bench.predicted import PeakCase, compare
from logitless import machine
from logitless.backends.triton import blocks, products
from logitless.call import Asked
from logitless.call.dry import Dry
from logitless.call.resolve import apart_everywhere, resolve
from logitless.machine import CPU, H200, Machine, row_stride
from logitless.product_table import product_sizes
from logitless.route import Plan, tiles
from logitless.route.costs import LossShape
from logitless.route.loss import choose_loss_plan, loss_plan

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, VOCAB, WIDTH = 23, 523, 24
"""Three column tiles, of which the last goes over the edge."""
FUSED, APART = "Logits stay in the kernels that make them.", "Logits go through memory, because "


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """Names of the product kernels that are launched, in order."""
    names, launch = [], products.launch

    def noting(kernel: str, programs: int, **arguments: Any) -> None:
        names.append(kernel)
        launch(kernel, programs, **arguments)

    monkeypatch.setattr(products, "launch", noting)
    return names


KIND, TILE = {False: "product", True: "turns"}, {False: 256, True: 128}
"""How kernels are named, and columns of a tile."""


# Which calls.


def meta(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def told(hidden: torch.Tensor, weight: torch.Tensor, rows=None, on=H200, bias=None, backend="triton") -> Plan:
    """The plan on a machine; nothing is computed."""
    rows = meta(hidden.shape[:-1].numel(), dtype=torch.int64) if rows is None else rows
    with Dry("cuda", on, stop=True) as dry:
        logits = ll.Logits(hidden.requires_grad_(), weight.requires_grad_(), bias=bias)
        ll.logprobs(logits, rows, backend=backend)
    return dry.plan


def test_what_ends_in_its_softmax(device: torch.device):
    wide = meta(12, 64)
    for hidden in (wide[:, :32], meta(2, 6, 32), meta(2, 7, 64)[:, 1:, :32], meta(6, 2, 32).transpose(0, 1)):
        assert str(told(hidden, meta(40, 32))).endswith(FUSED)
    # Selected rows are copied, and may lie where they like before.
    odd, weight = (torch.zeros(12, n, dtype=torch.bfloat16, device=device) for n in (41, 40))
    index = torch.tensor([7, 3], device=device)
    assert told(odd[:, :40], weight, (index, index)).apart is None
    assert told(meta(12, 32, dtype=torch.float16), meta(40, 32, dtype=torch.float16)).apart is None


@pytest.mark.parametrize(
    ("operands", "options", "why"),
    [
        ((meta(12, 32), meta(40, 32)), {"backend": "tiled"}, "the tiled backend works on logits."),
        (
            (meta(12, 32), meta(40, 32)),
            {"on": replace(H200, epilogues=False)},
            "kernels that do both were not measured",
        ),
        (
            (meta(12, 32, dtype=torch.float32), meta(40, 32, dtype=torch.float32)),
            {},
            "operands are bfloat16 or float16",
        ),
        ((meta(12, 33), meta(40, 33)), {}, "hidden has 33 columns, not a multiple of 8."),
        ((meta(12, 41)[:, :40], meta(50, 40)), {}, "rows of hidden are not contiguous or do not begin at multiples"),
        ((meta(12, 32), meta(32, 40).T), {}, "rows of weight are not contiguous"),
        ((meta(1, 32).expand(12, 32), meta(40, 32)), {}, "rows of hidden are not contiguous"),
        ((meta(12, 32), meta(40, 32)), {"bias": meta(40, 2)[:, 0]}, "bias is not contiguous."),
    ],
)
def test_what_does_not(operands, options: dict, why: str):
    plan = told(*operands, **options)
    assert f"{APART}{why}" in str(plan)
    assert not plan.forward.fused
    assert plan.backward is None or not plan.backward.fused


def test_kept_ids_are_looked_up_in_logits(device: torch.device):
    kept = ll.Kept(torch.tensor([1, 2], device=device), torch.tensor([1, 1], device=device))
    hidden, weight = (torch.zeros(n, 8, device=device, dtype=torch.bfloat16) for n in (2, 40))
    plan = ll.explain(
        ll.logprobs, ll.Logits(hidden, weight), torch.tensor([1, 2], device=device), kept=kept, backend="triton"
    )
    assert str(plan).endswith(f"{APART}kept ids are looked up in logits.")


def test_cards():
    """Those of capability 9; the plan of a CPU concerns Triton's interpreter alone."""
    assert H200.epilogues
    assert CPU.epilogues
    assert not machine._gpu("another", 108, None, False, 8).epilogues


@pytest.mark.parametrize("memory", [1 << 20, 64 << 20, 256 << 20, 512 << 20])
@pytest.mark.parametrize("rows", [100, 8192, 12288, 16384, 1_000_000])
@pytest.mark.parametrize("columns", [1000, 32768, 151936])
def test_no_more_memory_than_with_tiles_of_logits(columns: int, rows: int, memory: int):
    fused = tiles.Shape(rows, columns, 4, 2, H200, product_sizes(columns, 4096))
    apart = fused._replace(product=None)
    ours, theirs = (tiles.forward_tiles(shape, memory) for shape in (fused, apart))
    assert ours.rows * tiles.parts_row(columns, fused.product) <= max(1056, theirs.rows * theirs.columns * 4)
    assert ours.columns == columns
    ours, theirs = (tiles.backward_tiles(shape, memory) for shape in (fused, apart))
    assert ours.block * ours.columns * 2 <= theirs.block * theirs.columns * 2 + theirs.rows * theirs.columns * 4
    # Exponentials of a block begin where a tile of the product does.
    assert ours.columns == columns or ours.columns % fused.product.columns == 0


def test_chunks_of_a_loss_do_not_depend_on_how_operands_lie():
    """Each chunk is a collective: a rank whose shard is not aligned makes as many of them, its own way."""
    plan, rows = {}, meta(16384, dtype=torch.int64)
    for name, weight in (("aligned", meta(151936, 4096)), ("not", meta(151936, 4097)[:, :4096])):
        logits = ll.Logits(meta(16384, 4096).requires_grad_(), weight.requires_grad_())
        with Dry("cuda", H200):
            call, _ = resolve("policy_loss", logits, rows, Asked(backend="triton", memory="1.5GiB"))
        assert apart_everywhere(call) is None
        plan[name] = loss_plan(call, ll.Objective())
    assert plan["aligned"].chunks == plan["not"].chunks
    assert "16-bit exponentials, written by the product itself" in str(plan["aligned"])
    assert "16-bit exponentials, by tiles of 2048 x 4224 logits" in str(plan["not"])


def test_what_a_loss_costs():
    """Exponentials that a product writes are cheaper: fewer of them make chunks of logits worth leaving."""
    options = {"dtype": torch.bfloat16, "logits_dtype": torch.float32, "machine": H200, "bias": False, "capped": False}
    shapes = [LossShape.of((16384,), 151936, 4096, **options, fused=fused) for fused in (False, True)]
    apart, fused = (choose_loss_plan(shape, False, None, 3 << 29) for shape in shapes)
    assert apart.tiles is None
    assert fused.tiles is not None
    assert len(fused.chunks) < len(apart.chunks)
    # All rows at once stay logits, and dZ is rounded once.
    assert choose_loss_plan(shapes[1], False, None, 11 << 30).tiles is None


# Values and gradients.

HEADS: dict[str, dict[str, Any]] = {
    "plain": {"dtype": torch.bfloat16},
    "float16, temperatures": {"dtype": torch.float16, "temperature": torch.linspace(0.6, 1.7, TOKENS - 4)},
    "softcap": {"softcap": 4.0, "dtype": torch.float16},
    "negative scale": {"scale": -0.7},
    "negative scale, softcap": {"scale": -0.7, "softcap": 4.0, "dtype": torch.float16, "entropy": "value"},
    "padded vocabulary": {"vocab_size": VOCAB - 9},
    "value": {"entropy": "value"},
    "no entropy, blocks": {"entropy": None, "vocab": 11},
    "small budget": {"memory": 40_000},
}


@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_values_and_gradients(options: dict, device: torch.device, launched: list, turns: bool):
    options = dict(options)
    dtype, vocab = options.pop("dtype", torch.bfloat16), options.pop("vocab", VOCAB)
    rows = draw_rows(TOKENS, TOKENS - 4, options.get("vocab_size", vocab))
    check(draw(TOKENS, vocab, WIDTH, dtype), *rows, device=device, backend="triton", **options)
    assert {f"{KIND[turns]}_statistics_kernel", "merge_kernel", f"{KIND[turns]}_gradient_kernel"} == set(launched)


@pytest.mark.parametrize("wanted", [("hidden",), ("weight",), ("bias",)], ids="-".join)
def test_parts_of_the_gradient(wanted: tuple, device: torch.device, launched: list, turns: bool):
    rows = draw_rows(TOKENS, TOKENS, VOCAB)
    check(draw(TOKENS, VOCAB, WIDTH, torch.bfloat16), *rows, wanted=wanted, device=device, backend="triton")
    assert launched.count(f"{KIND[turns]}_gradient_kernel") == 1


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("share", ["half", "all"])
def test_stored_exponentials(dtype: torch.dtype, share: str, monkeypatch, device, launched: list, turns: bool):
    """Of some rows or of all; backward in slabs that are whole tiles of the product."""
    monkeypatch.setattr("logitless.route.plan.WORK", 64 << 10)
    row = 2 * row_stride(VOCAB, 2) + 4 * -(-VOCAB // TILE[turns])
    memory = (64 << 10) + (11 * row if share == "half" else TOKENS * row)
    operands, rows = draw(TOKENS, VOCAB, WIDTH, dtype), draw_rows(TOKENS, TOKENS, VOCAB)
    leaf, target = operands.leaves(device=device), rows[1].to(device)
    plan = ll.explain(
        ll.logprobs, ll.Logits(leaf.hidden, leaf.weight, bias=leaf.bias), target, memory=memory, backend="triton"
    )
    assert plan.kept_rows == (11 if share == "half" else TOKENS)
    out = ll.logprobs(
        ll.Logits(leaf.hidden, leaf.weight, bias=leaf.bias), target, entropy="grad", memory=memory, backend="triton"
    )
    (out.logprob.sum() - 0.3 * out.entropy.sum()).backward()
    assert "gradient_from_tiles_kernel" in launched
    assert (f"{KIND[turns]}_gradient_kernel" in launched) == (share == "half")
    exact = operands.leaves(dtype=torch.float64)
    logp = torch.log_softmax(exact.logits(), 1)
    read = rows[1] >= 0
    picked = logp.gather(1, rows[1].clamp_min(0)[:, None]).squeeze(1)[read].sum()
    (picked + 0.3 * (logp.exp() * logp).sum(1)[read].sum()).backward()
    # Two roundings of 2^-9 each.
    for mine, right in zip(leaf[:2], exact[:2], strict=True):
        assert (mine.grad.double().cpu() - right.grad).norm() <= 4e-3 * right.grad.norm()


FROZEN: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": torch.bfloat16},
    "float16, temperatures": {"dtype": torch.float16, "temperature": torch.linspace(0.6, 1.7, TOKENS - 4)},
    "softcap": {"softcap": 4.0, "entropy": None},
    "negative scale": {"scale": -0.7, "dtype": torch.float16},
    "padded vocabulary": {"vocab_size": VOCAB - 9, "entropy": None},
}


@pytest.mark.parametrize("options", FROZEN.values(), ids=FROZEN)
def test_frozen_head(options: dict, device: torch.device, launched: list, turns: bool):
    """Three slabs of one tile each."""
    options = {"entropy": "value", "memory": 3 * TOKENS * TILE[turns], **options}
    rows = draw_rows(TOKENS, TOKENS - 4, options.get("vocab_size", VOCAB))
    drawn = draw(TOKENS, VOCAB, WIDTH, options.pop("dtype", torch.bfloat16))
    check(drawn, *rows, wanted=("hidden",), device=device, backend="triton", **options)
    assert set(launched) == {f"{KIND[turns]}_statistics_kernel", "follow_kernel", "merge_kernel"}
    assert launched.count("follow_kernel") >= 3


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("reach", [4.0, 100.0])
@pytest.mark.parametrize("descending", [False, True])
def test_a_reference_that_must_move(reach: float, descending: bool, dtype: torch.dtype, device, turns: bool):
    """Columns in order of logit, which rise or fall by that much from -reach on: by more than 16 bits can hold."""
    steps = torch.linspace(-reach, reach, VOCAB).to(dtype)[:, None]
    weight = (steps.flip(0) if descending else steps).expand(VOCAB, 8).contiguous().to(device)
    weight[:, 1:] *= torch.randn(7, device=device).to(dtype) / 64
    hidden = torch.tensor([1.0, 0.5, -1.0], device=device)[:, None].expand(3, 8).to(dtype).contiguous().requires_grad_()
    target = torch.tensor([0, 300, VOCAB - 1], device=device)
    # A CPU keeps half of it for elementwise work.
    options = {"memory": 3 * 6 * 150 * (2 if device.type == "cpu" else 1), "backend": "triton"}
    plan = ll.explain(ll.logprobs, ll.Logits(hidden, weight), target, **options)
    assert (plan.kind, plan.apart, plan.forward.columns) == ("frozen", None, 384 if turns else 256)
    out = from_hidden(hidden, weight, target, **options)
    out.logprob.sum().backward()
    exact = hidden.detach().double().requires_grad_()
    right = torch.log_softmax(exact @ weight.double().T, 1).gather(1, target[:, None]).squeeze(1)
    right.sum().backward()
    torch.testing.assert_close(out.logprob.double(), right.detach(), rtol=1e-6, atol=2e-5)
    # The gradient is rounded to 16 bits, by half a unit of its last place, and so are the exponentials that the rows of
    # the weight are multiplied by.
    eps, largest = torch.finfo(dtype).eps, exact.grad.abs().max()
    allowed = eps / 2 * 2.0 ** largest.log2().floor() + eps / 4 * weight.double().abs().max()
    assert (hidden.grad.double() - exact.grad).abs().max() <= allowed


@pytest.mark.skipif(torch.cuda.is_available(), reason="its oracle is on CPU, where kernels need the interpreter")
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_chunks_of_a_loss(dtype: torch.dtype, launched: list):
    """Two chunks of exponentials, the second of them shorter, whose references another chunk had before."""
    lengths, vocab = [11, 7, 7], 259
    problem = make(dtype, lengths, vocab, WIDTH, head={"temperature": torch.linspace(0.6, 1.7, sum(lengths))})
    logits, rows = ll.Logits(*problem.operands.leaves()[:2]), problem.batch.rows()
    options = {"memory": room(9, vocab), "backend": "triton", **problem.fields(rows)}
    plan = ll.explain(ll.policy_loss, logits, rows, ll.Objective(**PPO), **options)
    assert "2 chunks, of at most" in str(plan)
    assert "rows of 16-bit exponentials, written by the product itself" in str(plan)
    check_loss(problem, PPO, PPO_FORMULA, backend="triton", memory=room(9, vocab))
    assert launched.count("gradient_from_tiles_kernel") == 2


def test_chunks_of_a_loss_as_apart(monkeypatch, device: torch.device, launched: list):
    """The same loss and gradients as where logits go through memory, up to two roundings of 16 bits."""
    drawn = draw(26, 259, WIDTH, torch.float16)
    given: dict[str, Any] = {"advantage": torch.randn(26, device=device), "old_logprob": "current"}
    target, runs = torch.randint(259, (26,), device=device), []
    for on in (replace(Machine.of(device), costs=None), replace(Machine.of(device), costs=None, epilogues=False)):
        monkeypatch.setattr(Machine, "of", staticmethod(lambda _, on=on: on))
        leaf = drawn.leaves(device=device)
        call = (leaf.hidden, leaf.weight, target, ll.Objective(entropy_coef=0.1))
        loss, _ = loss_from_hidden(*call, bias=leaf.bias, backend="triton", memory=18800, **given)
        runs.append((loss, *torch.autograd.grad(loss, list(leaf))))
        assert ("gradient_from_tiles_kernel" in launched) == on.epilogues
        launched.clear()
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(runs[0][1:], runs[1][1:], strict=True):
        assert (ours.double() - theirs.double()).norm() <= 8e-3 * theirs.double().norm()


@pytest.mark.parametrize("kept", [0, 9])
def test_confident_rows(kept: int, monkeypatch, device: torch.device):
    """The target is the maximum, by a lot: log-probs are not above 0, and small gradients are as good as apart."""
    monkeypatch.setattr("logitless.route.plan.WORK", 64 << 10)
    drawn = torch.randn(9, WIDTH)
    drawn *= torch.linspace(3.5, 5.2, 9)[:, None] / drawn.norm(dim=1, keepdim=True)
    weight, target = torch.randn(VOCAB, WIDTH), torch.arange(9, device=device) * 31
    weight[target.cpu()] = drawn
    weight = weight.bfloat16().to(device).requires_grad_()
    options = {"entropy": "value", "backend": "triton", "memory": (64 << 10) + kept * (2 * VOCAB + 12)}
    exact = drawn.bfloat16().double().to(device).requires_grad_()
    right = torch.log_softmax(exact @ weight.detach().double().T, 1).gather(1, target[:, None]).squeeze(1)
    right.sum().backward()
    assert (right > -0.1).sum() > 4
    errors = []
    for on in (Machine.of(device), replace(Machine.of(device), epilogues=False)):
        monkeypatch.setattr(Machine, "of", staticmethod(lambda _, on=on: on))
        hidden = drawn.bfloat16().to(device).requires_grad_()
        assert (ll.explain(ll.logprobs, ll.Logits(hidden, weight), target, **options).apart is None) == on.epilogues
        out = from_hidden(hidden, weight, target, **options)
        out.logprob.sum().backward()
        assert (out.logprob <= 0).all()
        torch.testing.assert_close(out.logprob.double(), right, rtol=1e-5, atol=1e-6)
        errors.append((hidden.grad.double() - exact.grad).norm(dim=1) / exact.grad.norm(dim=1))
    # s is 1 and a little. Adding up a tile rounds it a few times by half a unit in the last place of 1, which is that
    # much of the little; what parts lose of it when they are merged is kept.
    once = 2.0**-24 / -torch.expm1(right.detach())
    assert (errors[0] <= 2 * errors[1] + 4e-3 + 3 * once).all()


# Batches, and memory.


def test_a_row_has_the_same_bits_in_every_batch(device: torch.device):
    """Without padding, in the order in which they come, and from rows of another place."""
    hidden, weight, bias = draw(300, VOCAB, WIDTH, torch.bfloat16).leaves((), device=device)
    target = torch.randint(VOCAB, (300,), device=device)
    options = {"bias": bias, "entropy": "value", "bits": "canonical", "backend": "triton"}
    assert ll.explain(from_hidden, hidden, weight, target, **options).forward.rows == 300
    full = from_hidden(hidden, weight, target, **options)
    for index in ([299], [80, 3, 7], list(range(250, 270))):
        at = torch.tensor(index, device=device)
        some = from_hidden(hidden, weight, (at, target[at]), **options)
        assert all(torch.equal(a, b[at]) for a, b in zip(some[:3], full[:3], strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("width", [1024, 4096])
def test_a_row_has_the_same_bits_in_every_batch_on_cuda(width: int, device: torch.device):
    if device.type != "cuda":
        pytest.skip("asked for with --device cuda")
    hidden = torch.randn(16384, width, device=device, dtype=torch.bfloat16)
    weight = (torch.randn(151936, width, device=device) / width**0.5).bfloat16()
    target = torch.randint(151936, (16384,), device=device)
    options = {"entropy": "value", "bits": "canonical", "backend": "triton"}
    assert ll.explain(from_hidden, hidden, weight, target, **options).apart is None
    full = from_hidden(hidden, weight, target, **options)
    for count in (1, 2, 7, 64, 255, 256, 257, 1000, 4096, 8191, 16383):
        for start in (0, 16384 - count):
            some = slice(start, start + count)
            part = from_hidden(hidden[some], weight, target[some], **options)
            assert all(torch.equal(a, b[some]) for a, b in zip(part[:3], full[:3], strict=True)), (count, start)


@pytest.mark.parametrize(
    "options",
    [
        {"entropy": "grad"},
        {"entropy": "value", "needs_grad": ()},
        {"entropy": "grad", "bits": "canonical", "rows": 31, "bias": True},
    ],
    ids=["gradients", "forward", "batch-invariant"],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/memory/test_estimate.py has its own sizes for a GPU")
def test_the_estimate(options: dict, monkeypatch):
    """What the calls allocate. Kernels allocate nothing, but the interpreter does around them: none is launched."""
    for module in (products, blocks):
        monkeypatch.setattr(module, "launch", lambda *args, **arguments: None)
    sizes = {"path": "hidden", "tokens": 61, "vocab": 2003, "hidden": 64, "memory": "256KiB"}
    result = compare(PeakCase("fused", {**sizes, "backend": "triton", **options}), torch.device("cpu"))
    assert result.measured_step > 0
    assert result.forward == result.measured_forward
    assert result.error <= 0.05
