"""``bits="canonical"``: sums without an order, and therefore the same bits wherever and however a row is scored."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from close import assert_close_to_truth, assert_gradient_close_to_truth
from torch import Tensor

import logitless as ll
from logitless.backends import blocks, load
from logitless.backends.contract import Problem
from logitless.objectives.mismatch import mismatch

T, D, V = 21, 48, 1000
BACKENDS = ("reference", "tiled", "triton")
NAMES = ("logprob", "entropy", "log_z")


CPU = torch.device("cpu")


def operands(device: torch.device = CPU) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(T, D).bfloat16(), (3 * torch.randn(V, D) / D**0.5).bfloat16()
    target = torch.randint(V, (T,))
    target[4] = -100
    return hidden.to(device), weight.to(device), target.to(device)


def products(hidden: Tensor, weight: Tensor) -> Tensor:
    """Float32 sums of 16-bit operands, without a rounding in between that would depend on their order."""
    return (hidden.double() @ weight.double().T).float()


def exact_operands(device: torch.device = CPU) -> tuple[Tensor, Tensor, Tensor]:
    """Operands whose products are exact in float32, so that every library makes the same logits."""
    torch.manual_seed(1)
    hidden, weight = torch.randint(-8, 9, (T, D)), torch.randint(-8, 9, (V, D))
    target = torch.randint(V, (T,))
    target[4] = -100
    return (hidden / 16).bfloat16().to(device), (weight / 8).bfloat16().to(device), target.to(device)


def score(logits: Any, target: Any, **options: Any) -> dict[str, Tensor]:
    out = ll.logprobs(logits, target, entropy="value", **options)
    return {name: getattr(out, name).detach() for name in NAMES}


def assert_same(ours: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    for name in NAMES:
        assert torch.equal(ours[name].view(torch.int32), others[name].view(torch.int32)), name


def problem(z: Tensor, column: Tensor, gain: float = 1.0, **more: Any) -> Problem:
    given = {"squash": 0.0, "columns": z.shape[1], "entropy": True, "memory": 1 << 20, "canonical": True, **more}
    return Problem(z, None, column, torch.full((len(z),), gain, device=z.device), **given)


# The arithmetic.


@pytest.mark.parametrize("gain", [1.0, 0.3, -2.0])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 400.0])
def test_the_lines_are_those_of_float64(spread: float, gain: float):
    torch.manual_seed(0)
    z = spread * torch.randn(16, V) - 7.0
    column = torch.randint(V, (16,))
    m, s, w, t = blocks.solved(blocks.lines(problem(z, column, gain))[None], torch.full((16,), gain))
    x = z.double() * torch.tensor(gain).double()
    right = torch.log_softmax(x, -1)
    plain = torch.log_softmax(z * gain, -1)
    at = column[:, None]
    assert_close_to_truth((t - m) - s.log(), right.gather(1, at)[:, 0], plain.gather(1, at)[:, 0])
    entropies = (-(p.exp() * p.clamp_min(-1e30)).sum(-1) for p in (right, plain))
    assert_close_to_truth((s.log() - w / s).clamp_min(0.0), *entropies)


def test_parts_add_up_in_any_order():
    """Blocks whose maxima lie from one bin to many apart, cut at random multiples of 128 and merged at random."""
    torch.manual_seed(0)
    r, gain = random.Random(0), torch.ones(8)
    z = torch.randn(8, 12 * 128) + (torch.randint(0, 60, (8, 12)) * -1.5).repeat_interleave(128, 1)
    column = torch.randint(12 * 128, (8,))
    whole = blocks.lines(problem(z, column))
    for _ in range(20):
        cuts = sorted({0, 12, *(r.randrange(13) for _ in range(4))})
        parts = []
        for start, stop in itertools.pairwise(cuts):
            part = z[:, start * 128 : stop * 128]
            parts.append(blocks.lines(problem(part, column, first=start * 128)))
        r.shuffle(parts)
        while len(parts) > 1:
            parts.append(blocks.merge(torch.stack([parts.pop(), parts.pop(0)]), gain))
        assert torch.equal(parts[0].view(torch.int32), whole.view(torch.int32))


def test_what_lies_far_below_is_lost_and_nothing_else():
    """The worst case of a block: 127 columns just below half a unit of its maximum are lost, 1.6e-5 at most."""
    z = torch.full((1, 128), -17.0)
    z[0, 0] = 0.01
    m, s, _, t = blocks.solved(blocks.lines(problem(z, torch.zeros(1, dtype=torch.int64)))[None], torch.ones(1))
    right = torch.log_softmax(z.double(), -1)[0, 0]
    assert abs(((t - m) - s.log()).double() - right) < 1.6e-5
    assert -2 * 128 * 2.0**-24 < right


# One number for every way to it.


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head", [ll.Head(), ll.Head(temperature=0.7), ll.Head(scale=-1.0), ll.Head(softcap=5.0)])
def test_logits_and_hidden_states(backend: str, head: ll.Head, device: torch.device):
    hidden, weight, target = exact_operands(device)
    z = products(hidden, weight)
    given = {"backend": backend, "head": head}
    ours = score(ll.Logits.given(z, bits="canonical"), target, **given)
    for memory in (None, "64KiB", 9000):
        logits = ll.Logits(hidden, weight, bits="canonical")
        assert_same(ours, score(logits, target, memory=memory, **given))
        assert_same(ours, score(ll.Logits.given(z, bits="canonical"), target, memory=memory, **given))
    if head.softcap is None and device.type == "cpu":
        # A tanh has other bits in the kernels and in torch, and on a GPU so have exponentials.
        assert_same(ours, score(ll.Logits.given(z, bits="canonical"), target, head=head, backend="reference"))
    fast = score(z, target, **given)
    for name in NAMES:
        torch.testing.assert_close(ours[name], fast[name], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("trained", [(), ("hidden",), ("hidden", "weight")])
def test_batches_and_routes(backend: str, trained: tuple[str, ...], device: torch.device):
    """A row alone, among others and in another order; forward alone, with a frozen head and with gradients."""
    hidden, weight, target = operands(device)
    leaves = (hidden.requires_grad_("hidden" in trained), weight.requires_grad_("weight" in trained))
    ours = score(ll.Logits(*leaves, bits="canonical"), target, backend=backend)
    for index in (torch.tensor([7]), torch.arange(3, 14), torch.randperm(T)):
        index = index.to(device)
        some = score(ll.Logits(*leaves, bits="canonical"), (index, target[index]), backend=backend, memory="48KiB")
        assert_same({name: x[index] for name, x in ours.items()}, some)
    with torch.no_grad():
        assert_same(ours, score(ll.Logits(*leaves, bits="canonical"), target, backend=backend))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rounded_logits_are_those_of_a_head_in_16_bits(backend: str, dtype: torch.dtype, device: torch.device):
    hidden, weight, target = (x.to(dtype) if x.is_floating_point() else x for x in exact_operands(device))
    rounded = products(hidden, weight).to(dtype)
    logits = ll.Logits(hidden, weight, bits="canonical", match=str(dtype).removeprefix("torch."))
    ours = score(ll.Logits.given(rounded, bits="canonical"), target, backend=backend)
    assert_same(ours, score(logits, target, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_float32_head(backend: str, device: torch.device):
    """Its two parts are multiplied as one product: the same bits in every batch, budget and route."""
    hidden, weight, target = operands(device)
    wide = weight.float() + 1e-3 * torch.randn(V, D, device=device)
    ours = score(ll.Logits(hidden, wide, bits="canonical"), target, backend=backend)
    index = torch.arange(3, 14, device=device)
    some = score(ll.Logits(hidden, wide, bits="canonical"), (index, target[index]), backend=backend, memory="512KiB")
    assert_same({name: x[index] for name, x in ours.items()}, some)
    trained = ll.Logits(hidden.requires_grad_(), wide.requires_grad_(), bits="canonical")
    assert_same(ours, score(trained, target, backend=backend))
    torch.testing.assert_close(ours["logprob"], score(hidden.float() @ wide.T, target)["logprob"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_best_columns_beside_it(backend: str, device: torch.device):
    hidden, weight, target = exact_operands(device)
    given: dict[str, Any] = {"stats": ("top1", "max_logit"), "backend": backend, "entropy": "value"}
    ours = ll.logprobs(ll.Logits(hidden, weight, bits="canonical"), target, **given)
    fast = ll.logprobs(products(hidden, weight), target, **given)
    assert torch.equal(ours.top1_id, fast.top1_id)
    torch.testing.assert_close(ours.max_logit, fast.max_logit)
    assert_same(
        score(ll.Logits(hidden, weight, bits="canonical"), target, backend=backend),
        {name: getattr(ours, name) for name in NAMES},
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients(backend: str, dtype: torch.dtype, device: torch.device):
    """Those of logits against float64; and the same bits for a row alone, whichever budget."""
    torch.manual_seed(0)
    z, target, up = (3 * torch.randn(T, V)).to(device, dtype), torch.randint(V, (T,)).to(device), torch.randn(2, T)
    up = up.to(device)

    def gradient(x: Tensor, rows: slice, logits: Any, **given: Any) -> Tensor:
        out = ll.logprobs(logits(x), target[rows], entropy="grad", **given)
        return torch.autograd.grad((out.logprob, out.entropy), x, tuple(up[:, rows].to(out.logprob)))[0]

    def ours(rows: slice = slice(None), **given: Any) -> Tensor:
        x = z[rows].clone().requires_grad_()
        return gradient(x, rows, lambda x: ll.Logits.given(x, bits="canonical"), backend=backend, **given)

    def plain(wide: torch.dtype) -> Tensor:
        x = z.to(wide).requires_grad_()
        log_p = x.float().log_softmax(-1) if wide == torch.bfloat16 else x.log_softmax(-1)
        values = (log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1))
        return torch.autograd.grad(values, x, tuple(up.to(log_p)))[0]

    whole = ours()
    assert_gradient_close_to_truth(whole, plain(torch.float64), plain(dtype))
    assert torch.equal(whole[5:9], ours(slice(5, 9)))
    assert torch.equal(whole, ours(memory=9000))


def shard_of(rank: int, world: int, path: str, backend: str) -> dict[str, Tensor]:
    hidden, weight, target = exact_operands()
    cut = [0, *(128 * (8 * n // world) for n in range(1, world)), V]
    shard = ll.VocabShard(cut[rank], cut[rank + 1], dist.group.WORLD)
    here = weight[cut[rank] : cut[rank + 1]]
    if path == "logits":
        logits = ll.Logits.given(products(hidden, here), shard=shard, bits="canonical")
    else:
        logits = ll.Logits(hidden.requires_grad_(path == "frozen"), here, shard=shard, bits="canonical")
    return score(logits, target, backend=backend)


@pytest.mark.parametrize(("world", "path", "backend"), [(2, "frozen", "tiled"), (4, "logits", "tiled")])
def test_tensor_parallel(ranks, world: int, path: str, backend: str):
    hidden, weight, target = exact_operands()
    ours = score(ll.Logits(hidden, weight, bits="canonical"), target, backend=backend)
    for theirs in ranks(shard_of, world, path, backend):
        assert_same(ours, theirs)


def within_a_block(rank: int, world: int) -> list[str]:
    hidden, weight, target = exact_operands()
    cut, said = (0, 128, 356, V), []
    shard, here = ll.VocabShard(cut[rank], cut[rank + 1], dist.group.WORLD), weight[cut[rank] : cut[rank + 1]]
    given = ll.Logits.given(products(hidden, here), shard=shard, bits="canonical")
    for logits in (ll.Logits(hidden, here, shard=shard, bits="canonical"), given):
        with pytest.raises(ll.LogitlessError) as error:
            ll.logprobs(logits, target)
        said.append(str(error.value))
    return said


def test_shards_within_a_block(ranks):
    """All ranks are told what one of them cannot do, without comparing their calls: bounds are known to all."""
    for said in ranks(within_a_block, 3, timeout=20):
        for text in said:
            assert 'bits="canonical" adds up columns in blocks of 128, and a shard begins at column 356' in text


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("degree", [2, 4])
def test_shards_one_by_one(backend: str, degree: int, device: torch.device):
    """What ranks gather, made in one process by every backend: uneven shards, one of which has nothing but -inf."""
    hidden, weight, target = exact_operands(device)
    z = products(hidden, weight)
    z[:, 896:] = -torch.inf
    ours, module = score(ll.Logits.given(z, bits="canonical"), target, backend=backend), load(backend)
    cuts = [0, 128, V] if degree == 2 else [0, 256, 384, 896, V]
    parts = [
        module.statistics(problem(z[:, start:stop].contiguous(), target, first=start))
        for start, stop in itertools.pairwise(cuts)
    ]
    m, s, w, t = module.solved(torch.stack(parts), torch.ones(T, device=device))
    found = {"logprob": (t - m) - s.log(), "entropy": (s.log() - w / s).clamp_min(0.0), "log_z": m + s.log()}
    read = target != -100
    assert_same({name: x[read] for name, x in ours.items()}, {name: x[read] for name, x in found.items()})


def test_the_mismatch_of_an_engine_is_nothing(device: torch.device):
    """Log-probs of an engine, from its logits, beside those of a trainer that has none."""
    hidden, weight, target = exact_operands(device)
    rows = ll.Rows.packed([target.clamp_min(0)], [T - 1])
    engine = ll.logprobs(ll.Logits.given(products(hidden, weight), bits="canonical"), rows).logprob
    trainer = ll.logprobs(ll.Logits(hidden, weight, bits="canonical"), rows).logprob
    report = mismatch(trainer, engine, rows)
    assert (report.kl_k1, report.kl_k3, report.largest, report.effective_tokens) == (0.0, 0.0, 0.0, 1.0)


# What is no number, and what is refused.


@pytest.mark.parametrize("backend", BACKENDS)
def test_special_values(backend: str, device: torch.device):
    """NaN and +inf make a row NaN, wherever they are; masked columns and blocks do not count."""
    torch.manual_seed(0)
    z = torch.randn(8, 300)
    z[0, 290], z[1, 5], z[2], z[3, :256] = torch.nan, torch.inf, -torch.inf, -torch.inf
    z[4, 128:], z[5, 1:] = torch.finfo(torch.float32).min, -torch.inf
    z[7, :5] = torch.nan
    target = torch.tensor([3, 5, 7, 299, 2, 0, 400, 9])
    z, target = z.to(device), target.to(device)
    ours, fast = (through_a_statistic(z, target, *given) for given in (("canonical", backend), ("fast", "reference")))
    for name in NAMES:
        torch.testing.assert_close(ours[name], fast[name], rtol=2e-6, atol=2e-6, equal_nan=True)
    assert ours["logprob"].isnan().tolist() == [True, True, True, False, False, False, True, True]


def through_a_statistic(z: Tensor, target: Tensor, bits: Any, backend: str) -> dict[str, Tensor]:
    """A call sees a target outside on a CPU, and refuses it."""
    module = load(backend)
    made = module.statistics(problem(z, target, canonical=bits == "canonical"))
    m, s, w, t = module.solved(made[None], torch.ones(len(z), device=z.device)) if bits == "canonical" else made
    log_s = torch.where(t.isnan(), t, s.log())
    return {"logprob": (t - m) - log_s, "entropy": (log_s - w / s).clamp_min(0.0), "log_z": m + log_s}


def test_huge_logits_count_as_infinite():
    z = torch.tensor([[1.0e9, 0.0], [-1.0e9, 0.0], [1.0e7, 1.0e7]])
    out = score(ll.Logits.given(z, bits="canonical"), torch.tensor([0, 1, 0]))
    assert out["logprob"][0].isnan()
    assert out["logprob"][1] == 0.0
    torch.testing.assert_close(out["logprob"][2], -torch.tensor(2.0).log())


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend: str, device: torch.device):
    hidden, weight, target = operands(device)
    for logits in (
        ll.Logits(hidden[:0], weight, bits="canonical"),
        ll.Logits.given(torch.randn(0, V, device=device), bits="canonical"),
    ):
        assert score(logits, target[:0], backend=backend)["logprob"].shape == (0,)


def test_float64_has_its_own_sums():
    z, target = torch.randn(T, V, dtype=torch.float64), torch.randint(V, (T,))
    assert torch.equal(
        ll.logprobs(ll.Logits.given(z, bits="canonical"), target).logprob, ll.logprobs(z, target).logprob
    )


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled():
    z, target = torch.randn(T, V), torch.randint(V, (T,))

    def call(x: Tensor) -> Tensor:
        return ll.logprobs(ll.Logits.given(x, bits="canonical"), target).logprob

    assert torch.equal(torch.compile(call, backend="eager", fullgraph=True)(z), call(z))


def test_refusals():
    hidden, weight, target = operands()
    z = products(hidden, weight)
    with pytest.raises(ll.LogitlessError, match='bits must be "fast" or "canonical" but is'):
        ll.logprobs(ll.Logits(hidden, weight, bits="exact"), target)  # type: ignore[arg-type]
    kept = ll.Kept(torch.arange(T), torch.ones(T, dtype=torch.int64))
    with pytest.raises(ll.LogitlessError, match="kept= adds up the ids of each row as they are listed"):
        ll.logprobs(ll.Logits.given(z, bits="canonical"), target, kept=kept)
    wide = torch.zeros(1, 1, dtype=torch.bfloat16).expand(1, (1 << 21) + 1)
    with pytest.raises(ll.LogitlessError, match="has room for sums of 2097152 columns, and there are 2097153"):
        ll.logprobs(ll.Logits.given(wide.contiguous(), bits="canonical"), torch.tensor([0]))
