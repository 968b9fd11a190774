"""Tensors of other kinds: distributed, fake, made in inference mode; and copies of what holds a process group."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from calls import from_hidden, loss_from_hidden
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import logitless as ll

R, D, V = 6, 4, 10


def plain_calls(hidden, weight, rows, bias=None, **options) -> list[torch.Tensor]:
    """Results of the three calls, and the gradients of hidden states and weight."""
    fields = {"old_logprob": "current", "advantage": torch.ones(R)}
    out = from_hidden(hidden, weight, rows, bias=bias, entropy="grad", **options)
    loss, _ = loss_from_hidden(hidden, weight, rows, ll.Objective(), bias=bias, **options, **fields)
    (out.logprob.sum() + out.entropy.sum() + loss).backward()
    found = [out.logprob, out.entropy, loss, hidden.grad, weight.grad]
    return [getattr(x, "full_tensor", lambda x=x: x)().detach() for x in found]


def distributed(rank: int, world: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[str]]:
    torch.manual_seed(0)
    x, w, b, target = torch.randn(R, D), torch.randn(V, D), torch.randn(V), torch.randint(0, V, (R,))
    mesh = dist.init_device_mesh("cpu", (world,))
    spread = [distribute_tensor(y, mesh, [Shard(0)]) for y in (w, b)]
    shard = ll.VocabShard.of(spread[0])
    whole = distribute_tensor(x, mesh, [Replicate()]).requires_grad_()
    options = {"bias": spread[1], "shard": shard}
    ours = plain_calls(whole, spread[0].requires_grad_(), target, **options)
    theirs = plain_calls(x.clone().requires_grad_(), w.clone().requires_grad_(), target, bias=b)
    logits = distribute_tensor(x @ w.T + b, mesh, [Shard(1)])
    ours.append(ll.logprobs(ll.Logits.given(logits, shard=shard), target).logprob)
    theirs.append(ll.logprobs(x @ w.T + b, target).logprob)
    layer, a, b = fully_shard(nn.Linear(D, V, bias=False), mesh=mesh), torch.randn(2, D), torch.randn(V, 2)
    texts = []
    for call in (
        lambda: ll.logprobs(ll.Logits(distribute_tensor(x, mesh, [Shard(0)]), w), target),
        lambda: ll.logprobs(logits, target),
        lambda: ll.logprobs(ll.Logits(x, spread[0]), target),
        lambda: ll.logprobs(x @ w.T, distribute_tensor(target, mesh, [Replicate()])),
        lambda: ll.logprobs(ll.Logits(x, ll.LoRA(w, a, distribute_tensor(b, mesh, [Shard(0)]))), target),
        lambda: ll.logprobs(ll.Logits(x, layer.weight), target),
        lambda: ll.policy_loss(ll.Logits(x, ll.LoRA(layer.weight, a, b)), target, ll.Objective.recipe("sft")),
    ):
        with pytest.raises(ll.LogitlessError) as caught:
            call()
        texts.append(str(caught.value))
    return ours, theirs, texts


def test_distributed_tensors(ranks):
    """Raw errors of torch about mixed tensors, for anything but the weight."""
    for ours, theirs, texts in ranks(distributed, 2, timeout=60):
        for mine, plain in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)
        assert "hidden is a DTensor" in texts[0]
        assert "pass hidden.full_tensor()" in texts[0]
        assert "logits is a DTensor" in texts[1]
        assert "weight is a DTensor" in texts[2]
        assert "target is a DTensor" in texts[3]
        assert texts[4].startswith("logprobs: b of the LoRA is a DTensor with placements")
        for text in texts[5:]:
            assert "weight is a DTensor" in text
            assert "for FSDP use a PolicyHead, or call inside the forward of the module that owns the weight" in text


def test_a_weight_that_other_ranks_hold():
    """As DeepSpeed ZeRO-3 leaves a parameter outside of its module: no elements, and the shape beside it."""
    x, target, weight = torch.randn(R, D, requires_grad=True), torch.randint(V, (R,)), nn.Parameter(torch.randn(V, D))
    whole, there = weight.data, torch.empty(0)
    given = {"old_logprob": "current", "advantage": torch.ones(R)}
    out, loss = ll.logprobs(ll.Logits(x, weight), target), loss_from_hidden(x, weight, target, ll.Objective(), **given)
    kept = ll.Kept(target, torch.ones(R, dtype=torch.int64))
    few = ll.logprobs(ll.Logits(x, weight), target, kept=kept.over("support"))
    weight.data, weight.ds_shape = there, whole.shape
    way_out = "use a PolicyHead, and call it through its wrapper"
    for call in (
        lambda: ll.logprobs(ll.Logits(x, weight), target),
        lambda: loss_from_hidden(x, weight, target, ll.Objective(), **given),
        lambda: ll.LoRA(weight, torch.randn(2, D), torch.randn(V, 2)),
    ):
        with pytest.raises(ll.LogitlessError, match=way_out):
            call()
    for result in (out.logprob, few.logprob):
        with pytest.raises(ll.LogitlessError, match=r"whole in forward and is \[0\] now: ZeRO-3 .* policy_loss"):
            result.sum().backward()
    # Gathered again, as its module's wrapper does; and a loss in one pass needs it in forward alone.
    (found,) = torch.autograd.grad(loss[0], x)
    assert found.isfinite().all()
    weight.data = whole
    out = ll.logprobs(ll.Logits(x, weight), target)
    weight.data = there
    weight.data = whole.clone()
    out.logprob.sum().backward()
    assert weight.grad.shape == (V, D)


def calls_without_values(hidden, weight, target, advantage) -> list[torch.Tensor]:
    out = ll.logprobs(ll.Logits(hidden, weight), target, entropy="grad")
    out.logprob.sum().backward()
    ll.logprobs(hidden @ weight.T, target, entropy="grad").logprob.sum().backward()
    loss, _ = ll.policy_loss(
        ll.Logits(hidden, weight), target, ll.Objective(), old_logprob="current", advantage=advantage
    )
    loss.backward()
    return [out.logprob, hidden.grad, weight.grad]


@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_tensors_without_values(kind: str):
    """For shapes and memory: torch's own tools run a model so."""
    device = "cpu" if kind == "fake" else "meta"
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        x, w = torch.zeros(R, D, requires_grad=True), torch.zeros(V, D, requires_grad=True)
        found = calls_without_values(x, w, torch.zeros(R, dtype=torch.int64), torch.ones(R))
    assert [tuple(x.shape) for x in found] == [(R,), (R, D), (V, D)]
    assert {x.device.type for x in found} == {device}


def test_rows_and_supports_made_in_inference_mode():
    """Data loaders and rollouts run in it, and autograd refuses to save what they made."""
    with torch.inference_mode():
        rows = ll.Rows.packed([torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3])], [2, 1], [[1, 0], [1]])
        kept = ll.Kept(torch.tensor([1, 2, 3]), torch.tensor([1, 1, 1]))
        advantage, temperature = torch.ones(3), torch.ones(3)
    hidden, weight = torch.randn(7, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    head = ll.Head(temperature=temperature)
    for options in ({}, {"kept": kept}, {"head": head}):
        from_hidden(hidden, weight, rows, entropy="grad", **options).logprob.sum().backward()
        ll.logprobs(hidden @ weight.T, rows, entropy="grad", **options).logprob.sum().backward()
        for reduce in ("token_mean", "sample_mean"):
            objective, fields = ll.Objective(reduce=reduce), {"old_logprob": "current", "advantage": advantage}
            loss, _ = loss_from_hidden(hidden, weight, rows, objective, **options, **fields)
            loss.backward()
    assert hidden.grad.isfinite().all()


def copy_a_head(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    torch.manual_seed(rank)
    head = ll.PolicyHead(nn.Linear(D, V // world), shard=ll.VocabShard.even(V, dist.group.WORLD))
    copied = copy.deepcopy(head)
    nn.init.zeros_(copied.linear.weight)
    nn.init.zeros_(copied.linear.bias)
    x, target = torch.ones(R, D), torch.zeros(R, dtype=torch.int64)
    with pytest.raises(ll.LogitlessError) as caught:
        pickle.dumps(head)
    return head(x, target).logprob.detach(), copied(x, target).logprob.detach(), str(caught.value)


def test_a_head_over_a_group_is_copied_and_not_pickled(ranks):
    """Both failed in torch, which cannot pickle process groups."""
    for own, copied, text in ranks(copy_a_head, 2, timeout=60):
        assert torch.allclose(copied, torch.full((R,), -2.302585))
        assert not torch.allclose(own, copied)
        assert "cannot be pickled. Save a module's state_dict()" in text
    assert pickle.loads(pickle.dumps(ll.VocabShard(0, V))).stop == V
