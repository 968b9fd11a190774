"""SkyRL's replay of a sampler's support (from 0.4 on), and its weighted sum of entropies, with and without ours."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from hosts import checkout, load
from parity import run
from shared.skyrl import MODEL_UTILS, TEMPERATURE, TORCH_UTILS, WRAPPER, D, V, on_cpu
from torch import Tensor

import logitless

SUPPORT = "skyrl.backends.skyrl_train.utils.sample_support_replay"
LEAD, K = (3, 5), 4


@pytest.fixture(scope="module", autouse=True)
def skyrl():
    load("skyrl", TORCH_UTILS, MODEL_UTILS, WRAPPER)
    load("skyrl")
    if importlib.util.find_spec(SUPPORT) is None:
        pytest.skip("SkyRL has this from 0.4 on")


def drawn() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, sampled ids and supports: some padded, one of the sampled id alone, two rows of none."""
    torch.manual_seed(31)
    hidden, weight = torch.randn(*LEAD, D) * 1.5, torch.randn(V, D)
    support = torch.stack([torch.randperm(V)[:K] for _ in range(15)]).view(*LEAD, K).int()
    support[0, :, 3:] = -1
    support[1, 2, 1:] = -1
    sampled = support[..., 0].long()
    support[2, 1] = support[0, 4] = -1
    return hidden, weight, sampled, support


def true_scores(z: Tensor, sampled: Tensor, support: Tensor) -> list[Tensor]:
    """In plain torch, over whole rows of logits."""
    real = support >= 0
    kept = z.gather(-1, support.long().clamp(min=0))
    log_z = torch.where(real, kept, -torch.inf).logsumexp(-1)
    valid = real.any(-1)
    log_z = torch.where(valid, log_z, 0.0)
    logprob = torch.where(valid, z.gather(-1, sampled[..., None])[..., 0] - log_z, 0.0)
    log_p = torch.where(real, kept - log_z[..., None], 0.0)
    return [logprob, -torch.where(real, log_p.exp() * log_p, 0.0).sum(-1)]


def scored(rank: int, world: int) -> list[Any]:
    """Results and gradients of SkyRL and of ours on this rank's columns, from logits and from hidden states."""
    module, state, _ = load("skyrl", SUPPORT, "megatron.core.parallel_state", TORCH_UTILS)
    utils = load("skyrl", MODEL_UTILS)[0]
    state.initialize_model_parallel(tensor_model_parallel_size=world)
    group = state.get_tensor_model_parallel_group()
    hidden, weight, sampled, support = drawn()
    start, stop = rank * V // world, (rank + 1) * V // world
    part = weight[start:stop]
    where = {"vocab_start_index": start, "vocab_end_index": stop, "tp_group": group}
    asked = {**where, "compute_entropy": True, "entropy_requires_grad": True}
    weights = torch.tensor([0.0, 1.0, 0.5, 0.0, 2.0])

    def from_logits(z: Tensor) -> list[Tensor]:
        out = module.sample_support_scores(z, sampled, support, **asked)
        assert out.valid_mask.tolist() == (support >= 0).any(-1).tolist()
        return [out.logprobs, out.entropy]

    def from_hidden(h: Tensor, w: Tensor) -> list[Tensor]:
        more = {"lm_head_weight": w, "temperature": TEMPERATURE, "chunk_size": 7}
        out = module.sample_support_scores(h, sampled, support, **asked, **more)
        return [out.logprobs, out.entropy]

    def weighted(z: Tensor) -> Tensor:
        return utils.vocab_parallel_entropy_weighted_sum(z, weights, chunk_size=2)

    rows = [torch.linspace(-1, 1, 15).view(LEAD), torch.linspace(1, 2, 15).view(LEAD)]
    calls = [
        (from_logits, [hidden @ part.T], rows),
        (from_hidden, [hidden, part], rows),
        (weighted, [hidden @ part.T], [torch.tensor(1.3)]),
    ]
    results = []
    try:
        with on_cpu():
            results.append([run(*call) for call in calls])
        logitless.install("skyrl", audit=3)
        results.append([run(*call) for call in calls])
        counts = {entry.name.rpartition(".")[2]: entry.calls for entry in logitless.status().hosts[0].replaced}
        assert (counts["sample_support_scores"], counts["vocab_parallel_entropy_weighted_sum"]) == (2, 1)
        with torch.no_grad():
            out = module.sample_support_scores(hidden @ part.T, sampled, support, **where)
        assert out.entropy is None
        results.append(out.logprobs)
        logitless.uninstall("skyrl")
    finally:
        state.destroy_model_parallel()
    return results


@pytest.mark.parametrize("world", [1, 2])
def test_scores_over_a_support(ranks, world):
    hidden, weight, sampled, support = drawn()
    rows = [torch.linspace(-1, 1, 15).view(LEAD), torch.linspace(1, 2, 15).view(LEAD)]
    weights = torch.tensor([0.0, 1.0, 0.5, 0.0, 2.0])

    def entropy_sum(z: Tensor) -> Tensor:
        log_p = z.log_softmax(-1)
        return (-(log_p.exp() * log_p).sum(-1) * weights.to(z)).sum()

    truths = [
        (lambda z: true_scores(z, sampled, support), [hidden @ weight.T], rows),
        (lambda h, w: true_scores(h @ w.T / TEMPERATURE, sampled, support), [hidden, weight], rows),
        (entropy_sum, [hidden @ weight.T], [torch.tensor(1.3)]),
    ]
    found = ranks(scored, world, timeout=240)
    for case, (truth, operands, upstream) in enumerate(truths):
        exact, exact_gradients = run(truth, [x.double() for x in operands], [x.double() for x in upstream])
        _, plain_gradients = run(truth, operands, upstream)
        parts = []
        for theirs, ours, no_graph in found:
            (values, gradients), (own, _) = ours[case], theirs[case]
            for mine, right, other in zip(values, exact, own, strict=True):
                assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
                assert_close_to_truth(mine, right, other)
            if case == 0:
                assert torch.equal(no_graph, values[0])
            parts.append(gradients)
        # The hidden states' gradients are parts of a sum; columns and rows of the weight are cut.
        whole = [torch.cat([part[0] for part in parts], dim=-1)]
        if case == 1:
            whole = [sum(part[0] for part in parts), torch.cat([part[1] for part in parts])]
        for mine, right, plain in zip(whole, exact_gradients, plain_gradients, strict=True):
            assert_gradient_close_to_truth(mine, right, plain)


def test_rows_without_weight_and_ids_outside_a_support_are_not_read():
    module = load("skyrl", SUPPORT)[0]
    hidden, weight, sampled, support = drawn()
    logits = hidden @ weight.T
    kept = torch.zeros(*LEAD, V).scatter_add(-1, support.long().clamp(min=0), (support >= 0).float()) > 0
    kept.scatter_(-1, sampled[..., None], True)
    leaf = logits.masked_fill(~kept, torch.nan).requires_grad_()
    logitless.install("skyrl")
    out = module.sample_support_scores(
        leaf, sampled, support, vocab_start_index=0, vocab_end_index=V, tp_group=None, compute_entropy=True
    )
    assert not out.entropy.requires_grad
    out.logprobs.sum().backward()
    assert leaf.grad[~kept].abs().max() == 0
    assert leaf.grad[2, 1].abs().max() == 0


def test_what_skyrl_refuses_it_refuses_itself():
    module = load("skyrl", SUPPORT)[0]
    hidden, weight, sampled, support = drawn()
    bounds = {"vocab_start_index": 0, "vocab_end_index": V, "tp_group": None}
    logitless.install("skyrl")
    for text, call in {
        "matching prefix shapes": lambda: module.sample_support_scores(hidden, sampled[:2], support, **bounds),
        "sample support must use": lambda: module.sample_support_scores(hidden, sampled, support.long(), **bounds),
        "temperature must be positive": lambda: module.sample_support_scores(
            hidden, sampled, support, **bounds, lm_head_weight=weight, temperature=0.0
        ),
        "entropy gradients require": lambda: module.sample_support_scores(
            hidden @ weight.T, sampled, support, **bounds, entropy_requires_grad=True
        ),
    }.items():
        with pytest.raises(ValueError, match=text):
            call()
    entry = next(x for x in logitless.status().hosts[0].replaced if x.name.endswith("sample_support_scores"))
    assert (entry.calls, entry.passed_on) == (4, 4)


def test_skyrl_of_this_release_has_both():
    """Said on the page: from 0.4 on."""
    version = logitless.install("skyrl").version
    assert checkout("skyrl") or version == "0.4.0"
