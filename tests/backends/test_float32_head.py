"""A float32 head above hidden states of 16 bits: its weight is multiplied in two parts, and its gradient is float32.

Above hidden states of float32 both are in parts, where ``precision="bfloat16x3"`` asks for it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared.linear import GRADIENT_PROMISE, HALF, Operands, draw_rows, ragged
from torch import Tensor
from truth import plain, truth

import logitless as ll
from logitless.backends.triton import products

pytestmark = pytest.mark.usefixtures("one_thread")

BACKENDS = ("reference", "tiled", "triton")
TOKENS, VOCAB, WIDTH = 23, 523, 24
DTYPES = (*HALF, torch.float32)
LEFT_OUT = {torch.bfloat16: 2.0**-18, torch.float16: 2.0**-23, torch.float32: 3 * 2.0**-18}
"""Of a product of two numbers, by the dtype of hidden states: two parts of 8 or 11 bits leave out as much of a weight;
with hidden states in parts as much of both, and the product of the small parts."""


def draw(dtype: torch.dtype) -> Operands:
    hidden, weight = torch.randn(TOKENS, WIDTH).to(dtype), torch.randn(VOCAB, WIDTH) * 3 / WIDTH**0.5
    return Operands(hidden, weight, torch.randn(VOCAB))


def allowed(operands: Operands, usual: Tensor, right: Tensor) -> float:
    """Twice float32's own error, its rounding, and what parts leave out."""
    left_out = LEFT_OUT[operands.hidden.dtype]
    total = (operands.hidden.double().abs() @ operands.weight.double().abs().T).max()
    return (
        2 * float((usual - right).abs().max()) + 5e-7 * float(right.abs().max().clamp_min(1)) + left_out * float(total)
    )


def head(leaf: Operands, **more: Any) -> ll.Logits:
    """Logits in parts."""
    precision = "bfloat16x3" if leaf.hidden.dtype == torch.float32 else "float32"
    return ll.Logits(leaf.hidden, leaf.weight, bias=leaf.bias, precision=precision, **more)


def near(mine: Tensor, right: Tensor, name: str) -> None:
    off = float((mine.double().cpu() - right).norm() / right.norm())
    assert off <= GRADIENT_PROMISE, f"gradient of {name}: {off:.3g}"


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    names, launch = [], products.launch

    def noting(kernel: str, programs: int, **arguments: Any) -> None:
        names.append(kernel)
        launch(kernel, programs, **arguments)

    monkeypatch.setattr(products, "launch", noting)
    return names


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["trained", "frozen", "kept", "statistics"])
def test_values_and_gradients(how: str, dtype: torch.dtype, backend: str, device: torch.device, launched: list):
    operands, (index, target) = draw(dtype), draw_rows(TOKENS, TOKENS - 4, VOCAB)
    wanted = ("hidden",) if how == "frozen" else ("hidden", "weight", "bias")
    asked: dict[str, Any] = {"entropy": None} if how == "frozen" else {"entropy": "grad"}
    kept = [sorted({max(int(t), 0), 1, 5, 9}) for t in target] if how == "kept" else None
    if how == "statistics":
        asked |= {"stats": ("mean_logit", "collision"), "top_k": 3}
    leaf, rows = (
        operands.leaves(wanted, device=device),
        ll.Rows.at(index.to(device), target.to(device), num_tokens=TOKENS),
    )
    support = None if kept is None else ragged(kept, device)
    logits = head(leaf)
    assert logits.dtype == torch.float32
    out = ll.logprobs(logits, rows, kept=support, backend=backend, **asked)
    exact = operands.leaves(wanted, torch.float64)
    right = truth(exact.logits(), index, target, kept=kept)
    usual = plain(operands.logits(), index, target, kept=kept)
    for name in ("logprob", "log_z") if how == "frozen" else ("logprob", "entropy", "log_z"):
        mine, want = getattr(out, name).detach().double().cpu(), getattr(right, name)
        assert (mine - want).abs().max() <= allowed(operands, getattr(usual, name), want.detach()), name
    up = torch.randn(len(target), dtype=torch.float64)
    (out.logprob.double().cpu() * up).sum().backward()
    (right.logprob * up).sum().backward()
    for name in wanted:
        mine = getattr(leaf, name).grad
        assert mine.dtype == getattr(operands, name).dtype
        near(mine, getattr(exact, name).grad, name)
    if "weight" in wanted:
        # No detour through 16 bits.
        assert not torch.equal(leaf.weight.grad, leaf.weight.grad.to(HALF[0]).float())
    if backend == "triton" and how in ("trained", "frozen"):
        assert {"product_statistics_kernel", "turns_statistics_kernel"} & set(launched)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("memory", ["40KiB", "1GiB"])
def test_a_loss(backend: str, dtype: torch.dtype, memory: str, device: torch.device):
    operands, (index, target) = draw(dtype), draw_rows(TOKENS, TOKENS - 4, VOCAB)
    rows = ll.Rows.at(index.to(device), target.to(device), num_tokens=TOKENS)
    advantage, objective = torch.randn(len(target)), ll.Objective(entropy_coef=0.01)
    grads = []
    for leaf in (operands.leaves(device=device), operands.leaves(dtype=torch.float64, device=device)):
        logits = head(leaf)
        given = {"advantage": advantage.to(device), "old_logprob": "current", "memory": memory}
        loss, _ = ll.policy_loss(logits, rows, objective, **given, backend=backend if not grads else "reference")
        loss.backward()
        grads.append((loss.detach().double(), [x.grad for x in leaf]))
    (loss, mine), (want, right) = grads
    torch.testing.assert_close(loss, want, rtol=1e-4, atol=1e-5)
    assert mine[1].dtype == torch.float32
    for name, x, y in zip(operands._fields, mine, right, strict=True):
        near(x, y.cpu(), name)


@pytest.mark.parametrize("backend", ["tiled", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_buffer_and_a_teacher(backend: str, dtype: torch.dtype, device: torch.device):
    operands, (index, target) = draw(dtype), draw_rows(TOKENS, TOKENS - 4, VOCAB)
    rows = ll.Rows.at(index.to(device), target.to(device), num_tokens=TOKENS)
    leaf, exact = operands.leaves(device=device), operands.leaves(dtype=torch.float64)
    other = torch.randn(TOKENS, VOCAB)
    buffer = torch.ones(VOCAB, WIDTH, device=device)
    logits = head(leaf, weight_grad=buffer)
    found = ll.logprobs(logits, rows, teacher=other.to(device), divergence="forward_kl", backend=backend)
    found.divergence.sum().backward()
    want = ll.logprobs(exact.logits(), (index, target), teacher=other.double(), divergence="forward_kl")
    want.divergence.sum().backward()
    torch.testing.assert_close(found.divergence.double().cpu(), want.divergence, rtol=1e-4, atol=1e-5)
    near(buffer - 1, exact.weight.grad, "weight")
    near(leaf.hidden.grad, exact.hidden.grad, "hidden")
    assert leaf.weight.grad is None


def test_computed_logits_are_those_of_a_float32_layer():
    operands = draw(torch.bfloat16)
    logits = ll.Logits(*operands[:2], bias=operands.bias)
    torch.testing.assert_close(logits.computed(), operands.logits())
    with torch.autocast("cpu", torch.bfloat16):
        assert ll.Logits(*operands[:2]).dtype == torch.bfloat16


@pytest.mark.parametrize("mapped", [False, True])
def test_a_teacher_in_parts(mapped: bool, device: torch.device):
    """Of other ids, too: those are mapped before the weight is cut."""
    operands, taught = draw(torch.float32), draw(torch.bfloat16)
    target, ids = torch.randint(VOCAB, (TOKENS,)), torch.randperm(VOCAB) if mapped else torch.arange(VOCAB)
    own = operands.leaves((), device=device)
    teacher = ll.Teacher(head(own._replace(bias=None)), ids=ids.to(device) if mapped else None)
    student = ll.Logits(taught.hidden.to(device), taught.weight.to(device).bfloat16())
    given = {"teacher": teacher, "divergence": "forward_kl", "backend": "triton"}
    found = ll.logprobs(student, target.to(device), **given).divergence
    z = taught.hidden.double() @ taught.weight.bfloat16().double().T
    other = torch.empty_like(z).index_copy_(1, ids, operands.hidden.double() @ operands.weight.double().T)
    p, q = other.log_softmax(1), z.log_softmax(1)
    torch.testing.assert_close(found.double().cpu(), (p.exp() * (p - q)).sum(1), rtol=1e-4, atol=1e-5)


def test_without_kernels_a_float32_weight_is_multiplied_as_it_is():
    """On a CPU nothing is cut into parts: hidden states are widened, and the bits are those of a float32 layer."""
    operands, target = draw(torch.bfloat16), torch.randint(VOCAB, (TOKENS,))
    for backend in ("reference", "tiled"):
        narrow, wide = (
            ll.logprobs(ll.Logits(x, operands.weight, bias=operands.bias), target, backend=backend).logprob
            for x in (operands.hidden, operands.hidden.float())
        )
        assert torch.equal(narrow, wide)


def test_the_precision_is_seen(device: torch.device):
    """Float32's own product is nearer to the truth, by as much as the parts leave out; without kernels it is made."""
    operands, target = draw(torch.float32)._replace(bias=None), torch.randint(VOCAB, (TOKENS,), device=device)
    leaf = operands.leaves((), device=device)
    found = {}
    for precision in ("float32", "bfloat16x3"):
        for backend in ("tiled", "triton"):
            logits = ll.Logits(leaf.hidden, leaf.weight, precision=precision)
            found[precision, backend] = ll.logprobs(logits, target, backend=backend).logprob
    if device.type == "cpu":
        assert torch.equal(found["float32", "tiled"], found["bfloat16x3", "tiled"])
    off = (found["bfloat16x3", "triton"] - found["float32", "triton"]).abs().max()
    assert 1e-6 < off < 1e-4


def test_what_is_refused():
    operands = draw(torch.bfloat16)
    target = torch.zeros(TOKENS, dtype=torch.int64)
    wide = operands.hidden.float(), operands.weight.to(torch.bfloat16)
    with pytest.raises(ll.LogitlessError, match="Only a float32 weight without a LoRA goes with"):
        ll.logprobs(ll.Logits(*wide), target)
    lora = ll.LoRA(operands.weight, torch.zeros(2, WIDTH), torch.zeros(VOCAB, 2), 1.0)
    with pytest.raises(ll.LogitlessError, match=r"weight is torch\.float32 but hidden is torch\.bfloat16"):
        ll.logprobs(ll.Logits(operands.hidden, lora), target)
    with pytest.raises(ll.LogitlessError, match='precision="bfloat16x3" goes with a head without a LoRA'):
        ll.logprobs(ll.Logits(operands.hidden.float(), lora, precision="bfloat16x3"), target)
    both = operands.hidden.float(), operands.weight
    with pytest.raises(ll.LogitlessError, match='precision must be "float32" or "bfloat16x3" or "tf32" but is'):
        ll.logprobs(ll.Logits(*both, precision="high"), target)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ll.LogitlessError, match="tf32=True asks for precision"):
        ll.logprobs(ll.Logits(*both, tf32=True, precision="bfloat16x3"), target)


def on_a_shard(rank: int, world: int, operands: Operands, target: Tensor) -> dict[str, Tensor]:
    cut = [0, 200, VOCAB][rank : rank + 2]
    part = slice(*cut)
    leaf = replace_weight(operands, part).leaves()
    shard = ll.VocabShard(*cut, dist.group.WORLD)
    out = ll.logprobs(ll.Logits(leaf.hidden, leaf.weight, bias=leaf.bias, shard=shard), target, entropy="grad")
    assert out.entropy is not None
    (out.logprob.sum() + out.entropy.sum()).backward()
    return {"logprob": out.logprob.detach(), "hidden": leaf.hidden.grad, "weight": leaf.weight.grad}


def replace_weight(operands: Operands, part: slice) -> Operands:
    return operands._replace(weight=operands.weight[part], bias=operands.bias[part])


def test_over_a_vocabulary_group(ranks):
    operands, target = draw(torch.bfloat16), torch.randint(VOCAB, (TOKENS,))
    found = ranks(on_a_shard, 2, operands, target)
    exact = operands.leaves(dtype=torch.float64)
    log_p = exact.logits().log_softmax(1)
    picked = log_p.gather(1, target[:, None]).sum()
    (picked - (log_p.exp() * log_p).sum()).backward()
    torch.testing.assert_close(
        found[0]["logprob"].double(), log_p.gather(1, target[:, None])[:, 0], rtol=1e-5, atol=1e-5
    )
    near(torch.cat([x["weight"] for x in found]), exact.weight.grad, "weight")
    off = (found[0]["hidden"].double() - exact.hidden.grad).norm() / exact.hidden.grad.norm()
    assert off <= 2 * GRADIENT_PROMISE
    assert torch.equal(found[0]["hidden"], found[1]["hidden"])


def test_nothing_of_the_size_of_the_logits_is_counted():
    """The estimate knows both parts of the weight."""
    hidden = torch.empty(4096, 1024, device="meta", dtype=torch.bfloat16, requires_grad=True)
    sizes = {}
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.empty(65536, 1024, device="meta", dtype=dtype, requires_grad=True)
        target = torch.empty(4096, device="meta", dtype=torch.int64)
        sizes[dtype] = ll.estimate(ll.logprobs, ll.Logits(hidden, weight), target, device="cuda", backend="triton")
    more = sizes[torch.float32].peak - sizes[torch.bfloat16].peak
    parts, gradient = 4 * 65536 * 1024, 2 * 65536 * 1024
    assert parts <= more <= 1.2 * (parts + gradient)
