"""Where two features meet: calls that were once silently wrong, crashed or hung, each with the right answer."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from calls import from_hidden, loss_from_hidden
from torch import nn
from truth import truth

import logitless as ll

BACKENDS = ("reference", "tiled", "triton")


# Rows that know of no samples.


@pytest.mark.parametrize(
    "objective",
    [
        ll.Objective.recipe("dr_grpo", length=6),
        ll.Objective(policy="gspo"),
        ll.Objective(reduce="sample_mean"),
    ],
    ids=["dr_grpo", "gspo", "sample_mean"],
)
@pytest.mark.parametrize("pair", [False, True])
def test_sample_level_objectives_want_samples(objective: ll.Objective, pair: bool):
    """A tensor of targets of four samples was taken for one sample: -4.0 for -1.0."""
    hidden, weight, target = torch.zeros(4, 6, 8), torch.zeros(10, 8), torch.zeros(4, 6, dtype=torch.int64)
    rows = (torch.arange(24), target.flatten()) if pair else target
    fields = {"old_logprob": "current", "advantage": torch.ones(24)}
    with pytest.raises(ll.LogitlessError, match=r"know of no samples\. Make them with Rows\.packed or Rows\.padded"):
        loss_from_hidden(hidden, weight, rows, objective, **fields)
    samples = ll.Rows.padded([[0] * 7] * 4, [6] * 4)
    hidden = torch.zeros(4, 7, 8, requires_grad=True)
    loss, _ = loss_from_hidden(hidden, weight, samples, objective, **fields)
    assert float(loss.detach()) == -1.0


# As many tokens in another order.


def test_leading_dimensions_in_another_order():
    target = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ll.LogitlessError, match=r"made for tokens of shape \[2, 3\] but logits has .* \[3, 2\]"):
        ll.logprobs(torch.randn(3, 2, 7), target)
    rows = ll.Rows.padded([[1, 2, 3, 4], [1, 2, 3]], [2, 1])
    with pytest.raises(ll.LogitlessError, match=r"\[2, 4\] but hidden has leading dimensions \[4, 2\].*transpose"):
        ll.logprobs(ll.Logits(torch.randn(4, 2, 5), torch.randn(7, 5)), rows)
    # Flat tokens, and dimensions of one, say nothing about the order.
    for shape in ((8, 5), (2, 4, 5), (1, 8, 5), (2, 1, 4, 5)):
        assert len(ll.logprobs(ll.Logits(torch.randn(shape), torch.randn(7, 5)), rows).logprob) == 3


# Logits masked with the dtype's lowest number.


# The interpreter's own arithmetic warns of products below the range, whose exponential is 0.
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("memory", [64, "16MiB"])
@pytest.mark.parametrize("masked", [1, 2200])
def test_masked_logits(backend: str, memory, masked: int, device: torch.device):
    """A mask over a whole tile or block of the vocabulary gave NaN entropy and gradient."""
    vocab = 5000 if backend == "triton" else 60
    logits, target = torch.randn(9, vocab), torch.arange(vocab - 9, vocab)
    logits[:, : min(masked, vocab // 2)] = torch.finfo(torch.float32).min
    leaf = logits.to(device, copy=True).requires_grad_()
    out = ll.logprobs(leaf, target.to(device), entropy="grad", backend=backend, memory=memory)
    (out.logprob.sum() + out.entropy.sum()).backward()
    exact = logits.double().requires_grad_()
    right = truth(exact, torch.arange(9), target)
    (right.logprob.sum() + right.entropy.sum()).backward()
    torch.testing.assert_close(out.logprob.double().cpu(), right.logprob, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out.entropy.double().cpu(), right.entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(leaf.grad.double().cpu(), exact.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("memory", ["2KiB", "1MiB", "1GiB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_masking_bias(memory: str, dtype: torch.dtype, device: torch.device):
    """From hidden states, in tiles that hold nothing but the mask, and with exponentials stored."""
    hidden, weight, target = torch.randn(9, 8).to(dtype), torch.randn(60, 8).to(dtype), torch.arange(30, 39)
    bias = torch.zeros(60)
    bias[:30] = torch.finfo(torch.float32).min
    leaves = [x.to(device, copy=True).requires_grad_() for x in (hidden, weight)]
    options = {"bias": bias.to(device), "entropy": "grad", "memory": memory}
    out = from_hidden(*leaves, target.to(device), **options)
    (out.logprob.sum() + out.entropy.sum()).backward()
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    right = truth(exact[0] @ exact[1].T + bias.double(), torch.arange(9), target)
    (right.logprob.sum() + right.entropy.sum()).backward()
    torch.testing.assert_close(out.entropy.double().cpu(), right.entropy, atol=1e-4, rtol=1e-4)
    for mine, theirs in zip(leaves, exact, strict=True):
        error = (mine.grad.double().cpu() - theirs.grad).norm() / theirs.grad.norm()
        assert error <= (1e-2 if dtype == torch.bfloat16 else 1e-5)


# A frozen head whose weight, or hidden states, are not contiguous.


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", ["weight", "hidden"])
def test_frozen_head_of_a_transposed_tensor(backend: str, which: str, device: torch.device):
    hidden, weight = torch.randn(7, 12, device=device), torch.randn(50, 12, device=device)
    target, other = torch.randint(50, (7,), device=device), {"hidden": hidden, "weight": weight}
    other[which] = other[which].T.contiguous().T
    assert not other[which].is_contiguous()
    gradients = []
    for h, w in ((hidden, weight), (other["hidden"], other["weight"])):
        leaf = h.detach().requires_grad_()
        ll.logprobs(ll.Logits(leaf, w), target, backend=backend).logprob.sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


# A module in place of the head.


class Adapted(nn.Module):
    """As adapters on a linear layer look: another layer inside, and a weight that is not all there is."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.extra = base, nn.Linear(4, 10, bias=False)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + self.extra(x)


def test_policy_head_refuses_what_it_would_leave_out():
    with pytest.raises(ll.LogitlessError, match=r"Adapted wraps another layer.*leave the adapter out"):
        ll.PolicyHead(Adapted(nn.Linear(4, 10)))
    linear = nn.Linear(4, 10)
    head = ll.PolicyHead(linear)
    linear.register_forward_hook(lambda *_: None)
    with pytest.raises(ll.LogitlessError, match="Linear has forward hooks, which would not run"):
        head(torch.zeros(2, 4), torch.tensor([1, 2]))


# Terms with parameters.


def test_parameters_of_a_term_get_their_gradient():
    """In one pass they got none, without a word."""
    hidden, weight, target = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4), torch.randint(9, (6,))
    fields = {"old_logprob": "current", "advantage": torch.randn(6)}

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, inputs):
            return -inputs.advantage * inputs.log_ratio.exp() * self.scale

    module = Scaled()
    objective = ll.Objective(policy=module)
    assert ll.explain(ll.policy_loss, ll.Logits(hidden, weight), target, objective).kind == "two passes"
    loss_from_hidden(hidden, weight, target, objective, **fields)[0].backward()
    assert float(module.scale.grad) == pytest.approx(-float(fields["advantage"].mean()), rel=1e-5)
    objective = ll.Objective(policy=lambda inputs: module(inputs))
    with pytest.raises(ll.LogitlessError, match="parameters of its own, which get no gradient in one pass"):
        loss_from_hidden(hidden, weight, target, objective, **fields)


# Numbers that mean nothing.


def test_numbers_that_mean_nothing():
    rows = ll.Rows.packed([[1, 2, 3]], [2])
    stats = ll.TokenStats(torch.zeros(2), torch.zeros(2), torch.zeros(2))
    fields = {"old_logprob": "current", "advantage": torch.ones(2)}
    for wrong in (float("nan"), -1.0, torch.tensor(float("nan")), torch.tensor(-3.0)):
        with pytest.raises(ll.LogitlessError, match="denominator must be a count of 0 or more"):
            ll.Objective()(stats, rows, denominator=wrong, **fields)
    with pytest.raises(ll.LogitlessError, match=r"response_lengths must hold integers but entry 0 is 1.7"):
        ll.Rows.packed([[1, 2, 3]], [1.7])
    objective = ll.Objective(policy=lambda x: (-x.advantage * x.log_ratio.exp(), {"loss": x.advantage}))
    with pytest.raises(ll.LogitlessError, match="names a metric 'loss', which the objective has itself"):
        objective(stats, rows, **fields)


def test_autocast_leaves_float64_alone():
    hidden, weight = torch.randn(3, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert ll.logprobs(ll.Logits(hidden, weight), torch.tensor([1, 2, 3])).logprob.dtype == torch.float64


def test_kept_ids_and_batch_invariance_do_not_go_together():
    """Crashed unless the number of rows was a multiple of 1024."""
    kept = ll.Kept(torch.tensor([1, 2, 3]), torch.tensor([1, 1, 1]))
    target, options = torch.tensor([1, 2, 3]), {"kept": kept, "bits": "canonical"}
    with pytest.raises(ll.LogitlessError, match=r'kept= adds up the ids .* and bits="canonical"'):
        from_hidden(torch.randn(3, 4), torch.randn(5, 4), target, **options)


@pytest.mark.parametrize("wrong", [{"weight": None}, {"bias": [0.0] * 5}, {"weight_grad": 3}], ids=str)
def test_what_is_no_tensor(wrong: dict):
    given = {"weight": torch.randn(5, 4), **wrong}
    (name,) = wrong
    with pytest.raises(ll.LogitlessError, match=f"Logits: {name} must be a tensor but is"):
        from_hidden(torch.randn(3, 4), rows=torch.tensor([1, 2, 3]), **given)


def test_no_gradient_stores_no_exponentials():
    """Under no_grad a trainable weight and a large budget stored exponentials for a backward that never comes."""
    hidden = torch.randn(6, 4).bfloat16().requires_grad_()
    weight = torch.randn(9, 4).bfloat16().requires_grad_()
    target = torch.randint(9, (6,))
    assert ll.explain(ll.logprobs, ll.Logits(hidden, weight), target, memory="1GiB").kind == "keep"
    with torch.no_grad():
        assert ll.explain(ll.logprobs, ll.Logits(hidden, weight), target, memory="1GiB").kind == "forward"


# Shards of nothing, and refusals of one rank.


def score_with_an_empty_shard(rank: int, world: int, memory: str) -> list[torch.Tensor]:
    """The last rank holds nothing but padding."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(s, generator=generator).bfloat16() for s in ((7, 8), (20, 8)))
    bounds = [(0, 20), (20, 24)][rank]
    part = torch.zeros(24, 8).bfloat16().index_copy_(0, torch.arange(20), weight)[slice(*bounds)]
    shard = ll.VocabShard(*bounds, dist.group.WORLD)
    leaves = hidden.requires_grad_(), part.clone().requires_grad_()
    options = {"shard": shard, "head": ll.Head(vocab_size=20), "memory": memory}
    target = torch.arange(7)
    out = from_hidden(*leaves, target, entropy="grad", **options)
    (out.logprob.sum() + out.entropy.sum()).backward()
    fields = {"old_logprob": "current", "advantage": torch.ones(7)}
    loss, _ = loss_from_hidden(*leaves, target, ll.Objective(), **fields, **options)
    loss.backward()
    return [out.logprob.detach(), out.entropy.detach(), loss.detach()]


@pytest.mark.parametrize("memory", ["1KiB", "1GiB"])
def test_a_shard_of_nothing_but_padding(ranks, memory: str):
    """An IndexError there, and all other ranks hung."""
    found = ranks(score_with_an_empty_shard, 2, memory, timeout=30)
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.isfinite().all()


def refuse_on_one_rank(rank: int, world: int) -> str:
    """The same arguments, but one shard is wider than there are rows, and memory= holds no column of its tiles."""
    bounds = [(0, 10), (10, 50)][rank]
    shard = ll.VocabShard(*bounds, dist.group.WORLD, check_calls=True)
    hidden, weight = torch.zeros(20, 4, requires_grad=True), torch.zeros(bounds[1] - bounds[0], 4)
    try:
        target = torch.zeros(20, dtype=torch.int64)
        ll.logprobs(ll.Logits(hidden, weight.requires_grad_(), shard=shard), target, memory=200)
        return "no error"
    except ll.LogitlessError as error:
        return str(error)


def test_what_one_rank_refuses_all_refuse(ranks):
    texts = ranks(refuse_on_one_rank, 2, timeout=30)
    assert all("do not hold one column" in text for text in texts), texts


# Groups that a host wraps.


class Wrapped(dist.ProcessGroup):
    """A group inside another, as slime has them so that groups can be taken down and made again."""

    def __init__(self, inner) -> None:
        super().__init__(dist.get_rank(inner), dist.get_world_size(inner))
        self.inner = inner

    def rank(self) -> int:
        return self.inner.rank()

    def size(self) -> int:
        return self.inner.size()


def unwrapping(function):
    def call(*args, **kwargs):
        args = [x.inner if isinstance(x, Wrapped) else x for x in args]
        return function(*args, **{k: x.inner if isinstance(x, Wrapped) else x for k, x in kwargs.items()})

    return call


UNWRAPPED = ("get_rank", "get_world_size", "all_reduce", "all_gather_into_tensor", "all_gather_object")


def score_over_a_wrapped_group(rank: int, world: int) -> list[list[torch.Tensor]]:
    """Sharded and sequence parallel, by the functions that the host replaced; then again over a group made anew."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(s, generator=generator) for s in ((6, 8), (20, 8)))
    target, found = torch.arange(6), []
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        # The host calls the old names of torch 2.13's collectives, too.
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        for name in (*UNWRAPPED, "reduce_scatter_tensor"):
            patch.setattr(dist, name, unwrapping(getattr(dist, name)))
        group = Wrapped(dist.new_group([0, 1]))
        shard = ll.VocabShard(10 * rank, 10 * rank + 10, group)
        for _ in range(2):
            leaf = hidden.chunk(2)[rank].clone().requires_grad_()
            part = weight.chunk(2)[rank].clone().requires_grad_()
            out = ll.logprobs(ll.Logits(leaf, part, shard=shard, sequence_parallel=True), target, entropy="grad")
            (out.logprob.sum() + out.entropy.sum()).backward()
            found.append([out.logprob.detach(), leaf.grad, part.grad])
            dist.destroy_process_group(group.inner)
            group.inner = dist.new_group([0, 1])
    return found


def test_groups_that_a_host_wraps(ranks):
    results = ranks(score_over_a_wrapped_group, 2, timeout=60)
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(s, generator=generator).double().requires_grad_() for s in ((6, 8), (20, 8)))
    right = truth(hidden @ weight.T, torch.arange(6), torch.arange(6))
    (right.logprob.sum() + right.entropy.sum()).backward()
    for rank, times in enumerate(results):
        for logprob, d_hidden, d_weight in times:
            torch.testing.assert_close(logprob.double(), right.logprob.detach(), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(d_hidden.double(), hidden.grad.chunk(2)[rank], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(d_weight.double(), weight.grad.chunk(2)[rank], atol=1e-5, rtol=1e-5)
