"""Logits that are not computed, handed to the functions that stand in for hosts', and to hosts' own: served as a tensor
is, and not made.

``Logits(strict=True)`` raises wherever something would compute them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hosts import load
from torch import Tensor

from logitless import LogitlessError, Logits, VocabShard, logprobs
from logitless.adapters import (
    areal,
    megatron,
    nemo_rl,
    nemo_rl_distillation,
    openrlhf,
    skyrl_draft,
    skyrl_fsdp,
    slime_rows,
    trl,
    verl,
)
from logitless.adapters.audit import Audit
from logitless.adapters.scoring import placed

B, S, V, D, K = 3, 7, 53, 9, 4


def made(make: Callable[..., Any], **more: Any) -> tuple[Callable[..., Any], Audit]:
    """Our function, without a host, and its audit."""
    audit = Audit(5)
    shared = {"audit": audit, "entropy_grad": True, "accurate": False, "inplace_backward": True}
    return make(None, {**shared, "overwrite_logits": "always", "memory": "1MiB", **more}), audit


def ids_of(*shape: int) -> Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(3))


TARGET, SEVERAL = ids_of(B, S), ids_of(B, S, K)
TEACHER = torch.randn(B, S, K, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

CALLS: dict[str, tuple[Callable[..., Any], Callable[[Callable[..., Any], Tensor], Any]]] = {
    "areal": (areal.gather_logprobs_entropy.make, lambda f, x: f(x, TARGET, 0.7)),
    "megatron": (megatron.fused_vocab_parallel_cross_entropy.make, lambda f, x: f(x, TARGET, None)),
    "nemo_rl": (nemo_rl.get_next_token_logprobs_from_logits.make, lambda f, x: f(TARGET, x)),
    "nemo_rl, entropy": (nemo_rl.chunked_distributed_entropy.make, lambda f, x: f(x, 2, None)),
    "nemo_rl, K ids and entropy": (
        nemo_rl_distillation.get_distillation_topk_logprobs_from_logits.make,
        lambda f, x: f(x, TEACHER, SEVERAL, True, True),
    ),
    "nemo_rl, over K ids": (
        nemo_rl_distillation.get_distillation_topk_logprobs_from_logits.make,
        lambda f, x: f(x, TEACHER, SEVERAL, False, False)[:2],
    ),
    "openrlhf": (openrlhf.log_probs_from_logits.make, lambda f, x: f(x[:, 1:] * 1.0, TARGET[:, 1:], 0.7)),
    "openrlhf, entropy": (openrlhf.compute_entropy.make, lambda f, x: f(x)),
    "skyrl, entropy": (skyrl_fsdp.chunked_entropy_from_logits.make, lambda f, x: f(x, True, (TARGET > 9).long())),
    "skyrl, draft": (skyrl_draft.draft_soft_ce.make, lambda f, x: f(x, x.detach() * 0.5, (TARGET > 9).float())),
    "trl": (trl.selective_log_softmax_and_entropy.make, lambda f, x: f(x.view(-1, V), TARGET.view(-1), True, 0.7)),
    "trl, K ids": (trl.selective_log_softmax.make, lambda f, x: f(x, SEVERAL, 0.7)),
    "verl": (verl.logprobs_from_logits.make, lambda f, x: f(x.squeeze(0), TARGET)),
    "verl, entropy": (verl.entropy_from_logits.make, lambda f, x: f(x)),
    "verl, squares": (verl.calculate_sum_pi_squared_from_logits.make, lambda f, x: f(x)),
}


def results(function: Callable[..., Any], call: Callable[..., Any], deferred: bool) -> list[Tensor]:
    """What comes out, and the gradients of hidden states and weight."""
    torch.manual_seed(1)
    hidden, weight = (torch.randn(*n, D, dtype=torch.float64, requires_grad=True) for n in ((B, S), (V,)))
    # No leaf, as a model's own.
    logits = Logits(hidden, weight, strict=True) if deferred else hidden @ weight.T
    out = call(function, logits)
    out = [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]
    assert not any(isinstance(x, Logits) for x in out)
    trained = [x for x in out if x.requires_grad]
    upstream = [torch.randn_like(x) for x in trained]
    return [*(x.detach() for x in out), *torch.autograd.grad(trained, (hidden, weight), upstream)]


@pytest.mark.parametrize("name", CALLS)
def test_a_host_is_served_unchanged(name):
    make, call = CALLS[name]
    wanted = results(made(make)[0], call, deferred=False)
    function, audit = made(make)
    ours = results(function, call, deferred=True)
    assert len(ours) == len(wanted)
    for mine, right in zip(ours, wanted, strict=True):
        # Some hosts round to float32 on the way.
        torch.testing.assert_close(mine, right, rtol=1.3e-6, atol=1e-5)
    assert audit.report().passed
    assert audit.report().rows


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("response_only", [False, True])
def test_slime_and_miles(response_only, overwrite):
    options = {"audit": Audit(5), "chunk_size": -1, "overwrite_logits": overwrite, "response_only": response_only}
    tokens = [ids_of(n) for n in (9, 5)]

    def score(function: Any, x: Tensor) -> Any:
        batch = slime_rows.Batch.make(slime_rows.Parallel(None, 0, 1, None), x, tokens, [9, 5], [4, 2])
        found = batch.scores(x.view(1, 14, V), "grad", 0.7, -1, options)
        return tuple(torch.cat(found[key]) for key in ("log_probs", "entropy"))

    wanted, ours = (of_pack(score, deferred) for deferred in (False, True))
    for mine, right in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine, right)
    assert options["audit"].report().passed


def of_pack(score: Callable[..., Any], deferred: bool) -> list[Tensor]:
    torch.manual_seed(1)
    hidden, weight = (torch.randn(*n, D, requires_grad=True) for n in ((1, 14), (V,)))
    logits = Logits(hidden, weight, strict=True) if deferred else hidden @ weight.T
    out = score(None, logits)
    return [*(x.detach() for x in out), *torch.autograd.grad(sum(x.sum() for x in out), (hidden, weight))]


def test_the_logits_own_columns_win():
    """A shard that comes with the logits; otherwise the host's; and never two different ones."""
    hidden, weight = torch.randn(5, D), torch.randn(V, D)
    own, same, other = VocabShard(0, V), VocabShard(0, V), VocabShard(0, V - 1)
    with_shard, without = Logits(hidden, weight, shard=own), Logits(hidden, weight, hidden_grad="partial")
    assert placed(with_shard) is with_shard
    assert placed(with_shard, same, overwrite=True).linear.shard is own
    taken = placed(without, same)
    assert taken.linear.shard is same
    assert taken.linear.hidden_grad == "partial"
    assert without.linear.shard is None
    assert torch.equal(logprobs(taken, torch.arange(5)).logprob, logprobs(without, torch.arange(5)).logprob)
    with pytest.raises(LogitlessError, match=r"hold columns 0 to 53, but the caller says 0 to 52. Make them with the"):
        placed(with_shard, other)
    given = placed(hidden @ weight.T, same)
    assert given.shard is same


OWN: dict[str, tuple[str, str, Callable[[Any, Tensor], Tensor]]] = {
    "verl, log_softmax": (
        "verl",
        "verl.utils.torch_functional",
        lambda host, x: host.logprobs_from_logits_naive(x / 0.7, TARGET),
    ),
    "verl, a loop": ("verl", "verl.utils.torch_functional", lambda host, x: host.logprobs_from_logits_v2(x, TARGET)),
    "verl, a loop over tokens": (
        "verl",
        "verl.utils.torch_functional",
        lambda host, x: host.logprobs_from_logits_v2(x.view(-1, V), TARGET.view(-1)),
    ),
    "verl, entropy": ("verl", "verl.utils.torch_functional", lambda host, x: host.entropy_from_logits(x)),
    "verl, squares": (
        "verl",
        "verl.utils.torch_functional",
        lambda host, x: host.calculate_sum_pi_squared_from_logits(x),
    ),
    "openrlhf": (
        "openrlhf",
        "openrlhf.models.utils",
        lambda host, x: host.log_probs_from_logits(x * 1.0, TARGET, temperature=0.7),
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_a_hosts_own_function_is_served_unchanged(name):
    """Nothing installed: the host's code as it is written, on what a deferred head returns."""
    host, module, call = OWN[name]
    (loaded,) = load(host, module)
    wanted, ours = (results(loaded, call, deferred) for deferred in (False, True))
    for mine, right in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)
