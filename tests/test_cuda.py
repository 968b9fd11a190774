"""What only a GPU can show: no host sync, NaN for targets nobody checked, NCCL, 64-bit offsets, allocator peaks.

Skipped where there is no CUDA device. The rest of the suite runs there too, with ``pytest --device cuda``.
"""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist

import logitless as ll

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make(num_tokens: int, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(num_tokens, vocab, device="cuda").to(dtype).requires_grad_()
    return logits, torch.randint(vocab, (num_tokens,), device="cuda")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("backend", ["tiled", "triton"])
@pytest.mark.parametrize("with_kept", [False, True])
def test_no_host_sync(backend: str, with_kept: bool, request):
    logits, target = make(16, 1000)
    lengths = torch.full((16,), 3, device="cuda")
    kept = ll.Kept(torch.randint(1000, (48,), device="cuda"), lengths) if with_kept else None
    temperature = torch.linspace(0.5, 2, 16, device="cuda")
    upstream = torch.randn(16, device="cuda")
    request.getfixturevalue("no_sync")
    head = ll.Head(temperature=temperature, softcap=20.0, vocab_size=990)
    out = ll.logprobs(logits, target, entropy="grad", head=head, kept=kept, backend=backend)
    torch.autograd.backward([out.logprob, out.entropy], [upstream, upstream])


def test_targets_nobody_checked_are_nan_in_their_own_row():
    logits, _ = make(4, 1000)
    out = ll.logprobs(logits, torch.tensor([1, 1000, -5, -100], device="cuda"), entropy="grad")
    (out.logprob.sum() + out.entropy.sum()).backward()
    assert out.logprob.isnan().tolist() == [False, True, True, False]
    assert out.entropy.isnan().tolist() == [False, True, True, False]
    assert logits.grad[[0, 3]].isfinite().all()
    assert logits.grad[[1, 2]].isnan().any(-1).all()


def test_targets_known_on_the_host_still_raise():
    logits = torch.randn(3, 10, device="cuda")
    rows = ll.Rows.packed([[1, 2, 10]], [1], device="cuda")
    with pytest.raises(ll.LogitlessError, match="target 10 of row 0"):
        ll.logprobs(logits, rows)


@pytest.mark.parametrize("masked", [False, True])
def test_rows_from_tokens_on_the_device(masked: bool):
    tokens = [torch.arange(5), torch.arange(10, 17)]
    masks = [torch.tensor([1, 0, 1]), torch.tensor([0, 1])]
    here = ll.Rows.packed(tokens, [3, 2], masks, loss_mask_only=masked)
    there = ll.Rows.packed([t.cuda() for t in tokens], [3, 2], [m.cuda() for m in masks], loss_mask_only=masked)
    for name in ("index", "target", "sample", "position", "response", "mask"):
        assert torch.equal(getattr(here, name), getattr(there, name).cpu())
        assert getattr(there, name).is_cuda


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_memory(dtype: torch.dtype, overwrite: bool):
    leaf, target = make(2048, 151936, dtype)
    logits = leaf * 1.0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = ll.logprobs(ll.Logits.given(logits, overwrite=overwrite), target, entropy="grad")
    torch.autograd.grad(out.logprob.sum() + out.entropy.sum(), logits)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= (0 if overwrite else logits.nbytes) + (2 << 20)


def test_offsets_beyond_32_bits():
    """The last rows of 2.4e9 elements, exact against float64; a wrapped offset would read another row."""
    vocab, num_tokens = 151936, 15872
    logits = torch.randn(num_tokens, vocab, device="cuda").requires_grad_()
    assert logits.numel() > 2**31
    index = torch.tensor([0, 14133, 14134, num_tokens - 1], device="cuda")
    target = torch.tensor([5, 77, vocab - 1, 0], device="cuda")
    out = ll.logprobs(logits, (index, target), entropy="grad")
    (out.logprob.sum() + 0.1 * out.entropy.sum()).backward()
    rows = logits.detach()[index].double().requires_grad_()
    log_p = torch.log_softmax(rows, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    exact = log_p.gather(1, target[:, None]).squeeze(1)
    (exact.sum() + 0.1 * entropy.sum()).backward()
    assert (out.logprob - exact).abs().max() < 1e-5
    assert (out.entropy - entropy).abs().max() < 1e-5
    assert (logits.grad[index] - rows.grad).norm() < 1e-6 * rows.grad.norm()
    assert logits.grad.count_nonzero(-1).count_nonzero() == 4


def test_nccl_group(tmp_path):
    """One rank is all that one GPU allows: the collective, the merge and the shard arithmetic still run."""
    dist.init_process_group("nccl", store=dist.FileStore(os.fspath(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        logits, target = make(7, 507)
        shard = ll.VocabShard.even(507, dist.group.WORLD)
        alone = ll.logprobs(logits, target, entropy="grad")
        grouped = ll.logprobs(ll.Logits.given(logits, shard=shard), target, entropy="grad")
        for a, b in zip(alone[:3], grouped[:3], strict=True):
            assert torch.equal(a, b)
        rows = ll.Rows.packed([[1, 2, 3], [4, 5]], [2, 1], cp=ll.Zigzag(0, 1), device="cuda")
        parts = rows.gather(torch.arange(3.0, device="cuda"), dist.group.WORLD, grad=None)
        assert [p.tolist() for p in parts] == [[0.0, 1.0], [2.0]]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("match", ["bfloat16", "float16", None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_operands_and_logits_of_any_two_dtypes(dtype: torch.dtype, match: str | None):
    """The library writes its results in the operands' dtype or in float32, and in no other."""
    hidden, weight = torch.randn(40, 16, device="cuda", dtype=dtype), torch.randn(70, 16, device="cuda", dtype=dtype)
    target = torch.randint(70, (40,), device="cuda")
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    buffer = torch.zeros(70, 16, device="cuda")
    out = ll.logprobs(ll.Logits(hidden, weight, match=match, weight_grad=buffer), target, entropy="grad")
    (out.logprob.sum() + out.entropy.sum()).backward()
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    z = exact[0] @ exact[1].T
    z = z if match is None else z + (z.to(getattr(torch, match)) - z).detach()
    log_p = torch.log_softmax(z, -1)
    (log_p[range(40), target].sum() - (log_p.exp() * log_p).sum()).backward()
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    # A logit on the edge between two 16-bit numbers is rounded to either.
    edge = 0.0 if match is None else torch.finfo(getattr(torch, match)).eps
    for ours, theirs in ((hidden.grad, exact[0].grad), (buffer, exact[1].grad)):
        assert (ours.double() - theirs).norm() <= (16 * eps + edge) * theirs.norm()


GRAPHS = {
    "logprobs": lambda x: ll.logprobs(x["hidden"] @ x["weight"].T, x["target"], entropy="grad").logprob.sum(),
    "hidden": lambda x: ll.logprobs(ll.Logits(x["hidden"], x["weight"]), x["target"]).logprob.sum(),
    "hidden, odd width": lambda x: ll.logprobs(
        ll.Logits(x["hidden"][:, :60], x["weight"][:, :60]), x["target"], entropy="grad"
    ).logprob.sum(),
    "loss": lambda x: ll.policy_loss(
        ll.Logits(x["hidden"], x["weight"]),
        x["target"],
        ll.Objective(),
        old_logprob="current",
        advantage=x["advantage"],
    )[0],
    "divergence": lambda x: ll.logprobs(
        ll.Logits(x["hidden"], x["weight"]),
        x["target"],
        teacher=ll.Logits(x["teacher"], x["weight"]),
        entropy="grad",
    ).divergence.sum(),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_captured_and_replayed(name: str):
    """A step in a CUDA graph, replayed on other inputs, has the bits of one that is not."""

    def draw() -> dict[str, torch.Tensor]:
        floats = {"hidden": (96, 64), "weight": (1000, 64), "teacher": (96, 64)}
        made = {key: torch.randn(shape, device="cuda").bfloat16() for key, shape in floats.items()}
        advantage = torch.randn(96, device="cuda") * (torch.rand(96, device="cuda") < 0.5)
        return made | {"advantage": advantage, "target": torch.randint(1000, (96,), device="cuda")}

    def step(x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaves = [x["hidden"].detach().requires_grad_(), x["weight"].detach().requires_grad_()]
        loss = GRAPHS[name](x | dict(zip(("hidden", "weight"), leaves, strict=True)))
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    held, other = draw(), draw()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step(held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(held)
    for key, x in other.items():
        held[key].copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    for ours, eager in zip(results, step(other), strict=True):
        # Rows without a gradient are multiplied in a graph, and packed together outside of one.
        close = {"rtol": 1e-2, "atol": 1e-3} if name == "loss" else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(ours, eager, **close)


def widened(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def entropy_of(x: torch.Tensor) -> torch.Tensor:
    log_p = torch.log_softmax(x, -1)
    return -(log_p.exp() * log_p).sum(-1)


UNCHANGED = {
    "cross entropy": lambda x, ids: torch.nn.functional.cross_entropy(widened(x), ids, reduction="none"),
    "log-probs": lambda x, ids: torch.log_softmax(widened(x) / 0.7, -1).gather(-1, ids[:, None]).squeeze(-1),
    "entropy": lambda x, ids: entropy_of(widened(x)),
    "log Z": lambda x, ids: torch.logsumexp(widened(x), -1),
    "best": lambda x, ids: widened(x).topk(3, -1).values.sum(-1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", UNCHANGED)
def test_torchs_functions_on_logits_that_are_not_computed(name: str, dtype: torch.dtype):
    """No further from float64 than the same code on computed logits is, twice over; and nothing of their size."""
    torch.manual_seed(0)
    size = 8192, 32003, 256
    ids = torch.randint(size[1], size[:1], device="cuda")
    hidden, weight = (torch.randn(n, size[2], device="cuda", dtype=dtype, requires_grad=True) for n in size[:2])
    with torch.no_grad():
        weight.mul_(0.1)
    upstream = torch.randn(size[0], device="cuda")

    def run(x: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
        out = UNCHANGED[name](x, ids)
        return [out.detach().double(), *(y.double() for y in torch.autograd.grad(out, leaves, upstream.to(out.dtype)))]

    wide = [y.detach().double().requires_grad_() for y in (hidden, weight)]
    match = "bfloat16" if dtype == torch.bfloat16 else None
    product = wide[0] @ wide[1].T
    # A head in bfloat16 rounds what it returns; the gradient passes.
    rounded = product if match is None else product + (product.to(dtype).double() - product).detach()
    truth = run(rounded, *wide)
    del product, rounded
    plain = run(hidden @ weight.T, hidden, weight)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ours = run(ll.Logits(hidden, weight, match=match, strict=True), hidden, weight)
    peak = torch.cuda.max_memory_allocated() - before
    for mine, theirs, right in zip(ours, plain, truth, strict=True):
        allowed = 2 * (theirs - right).abs().max() + 1e-6 * right.abs().max()
        assert (mine - right).abs().max() <= allowed
    assert peak < size[0] * size[1] * 4 // 2 + 3 * weight.numel() * 8


@pytest.mark.parametrize(("rows", "columns", "width"), [(300, 20000, 1024), (4000, 5000, 136), (64, 151936, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_by_turns_have_the_bits_of_others(rows: int, columns: int, width: int, dtype: torch.dtype):
    """dZ to the last bit, where a ring is filled many times over, with fewer and with more units than programs; the
    statistic is summed in other parts, and differs by their rounding."""
    from logitless.backends.contract import Product
    from logitless.backends.triton import products
    from logitless.softmax import Coefficients, Normaliser

    draw = partial(torch.randn, device="cuda")
    x, w = draw(rows, width).to(dtype), (draw(columns, width) / width**0.5).to(dtype)
    column = torch.randint(columns, (rows,), device="cuda")
    numbers = [draw(rows) for _ in range(3)]
    found = []
    for turns in (False, True):
        p = Product(x, w, None, column, torch.full((rows,), 1.25, device="cuda"), turns=turns)
        lines, out = products.statistics(p), torch.full((rows, columns), torch.nan, device="cuda", dtype=dtype)
        norm = Normaliser(lines[0], lines[1].log())
        products.gradient(p, norm if not found else found[0][2], Coefficients(*numbers), out)
        found.append((lines, out, norm))
    (plain, d_z, _), (lines, ours, _) = found
    assert torch.equal(ours, d_z)
    assert torch.equal(lines[[0, 3]], plain[[0, 3]])
    torch.testing.assert_close(lines[1:3], plain[1:3], rtol=2e-6, atol=1e-6)


def test_a_logprob_by_turns_beside_float64():
    """A real width and vocabulary, all tiles, odd rows."""
    hidden = torch.randn(515, 1024, device="cuda").bfloat16().requires_grad_()
    weight = (2 * torch.randn(151936, 1024, device="cuda") / 32).bfloat16().requires_grad_()
    target = torch.randint(151936, (515,), device="cuda")
    out = ll.logprobs(ll.Logits(hidden, weight), target, entropy="grad")
    z = hidden.detach().double() @ weight.detach().double().T
    wide = torch.log_softmax(z, -1)
    truth = wide.gather(1, target[:, None])[:, 0]
    assert (out.logprob - truth).abs().max() < 6e-5
    assert (out.entropy + (wide.exp() * wide).sum(-1)).abs().max() < 6e-5
    (out.logprob.sum() + out.entropy.sum()).backward()
    p = wide.exp()
    h = -(p * wide).sum(-1, keepdim=True)
    d_z = torch.zeros_like(p).scatter_(1, target[:, None], 1.0) - p - p * (wide + h)
    for ours, exact in ((hidden.grad, d_z @ weight.detach().double()), (weight.grad, d_z.T @ hidden.detach().double())):
        assert (ours.double() - exact).norm() / exact.norm() < 4e-3
