"""SpecForge's compact teacher and losses with and without ours, on its own code.

Its cross entropy is a Triton kernel, which runs in Triton's interpreter here.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from hosts import checkout, load
from parity import assert_parity
from torch import Tensor
from transformers import LlamaConfig

import logitless
import logitless as ll
from benchmarks.bench.measure import peak_bytes
from logitless import LogitlessError
from logitless.adapters import specforge
from logitless.adapters.specforge_losses import _chunks

pytestmark = pytest.mark.skipif(checkout("specforge") is None, reason="LOGITLESS_HOSTS names no checkout of SpecForge")
V, D = 211, 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_the_teacher_says_of_all_ids(dtype: torch.dtype):
    """Its probabilities, over all ids and over the draft's, its most likely ids, and the mask that follows."""
    module = load("specforge")[0]
    hidden, weight = torch.randn(2, 9, D).to(dtype), torch.randn(V, D).to(dtype)
    # Equal logits: the first id counts.
    weight[7] = weight[3]
    t2d, mask = torch.rand(V) < 0.4, (torch.rand(2, 9, 1) < 0.7).int()
    theirs = module.compute_target_from_hidden(hidden, weight, t2d, mask, chunk_size=50)
    rounded = (hidden @ weight.T).double()
    exact = rounded.softmax(-1)[..., t2d]
    logitless.install("specforge", audit=3)
    try:
        ours = module.compute_target_from_hidden(hidden, weight, t2d, mask, chunk_size=50)
        (status,) = logitless.status().hosts
        assert status.audit is not None
        assert status.audit.passed
        assert [entry.calls for entry in status.replaced] == [1, 0, 0, 0]
        with pytest.raises(LogitlessError, match="chunk_size must be positive but is 0"):
            module.tiled_logsumexp_argmax(hidden, weight, chunk_size=0)
    finally:
        logitless.uninstall("specforge")
    assert [x.dtype for x in ours] == [x.dtype for x in theirs]
    assert torch.equal(ours[0], theirs[0])
    assert_close_to_truth(ours[1], exact, theirs[1])
    assert torch.equal(ours[2], rounded.argmax(-1))
    assert torch.equal(ours[3], theirs[3])


# Losses.

B, S, LK = 2, 9, specforge.LK


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, probabilities over the draft's ids and over all, as views of longer tensors, and the rows that count."""
    whole = (2 * torch.randn(B, S + 3, V + 40)).softmax(-1)
    mask = (torch.rand(B, S, 1) < 0.7).int()
    q = whole[..., :V]
    return (2 * torch.randn(B, S, V)).to(dtype), (q / q.sum(-1, keepdim=True))[:, 1 : S + 1], q[:, 2 : S + 2], mask


@pytest.mark.parametrize("memory", ["256MiB", "16KiB"], ids=["", "in chunks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy(interpreted, dtype: torch.dtype, memory: str):
    load("specforge")
    logits, q, _, mask = drawn(dtype)
    assert len(list(_chunks(logits, 16 * 1024))) > B

    def run(z: Tensor) -> Tensor:
        # SpecForge's backward writes over its logits.
        return sys.modules[specforge.LOSS].LogSoftmaxLoss.apply(z.clone(), q, mask)

    truth = lambda z: -(q.double() * z.log_softmax(-1)).sum(-1).mul(mask[..., 0]).mean()  # noqa: E731
    assert_parity("specforge", run, truth, [logits], memory=memory)


def lk(z: Tensor, q: Tensor, mask: Tensor, kind: str, kl: Tensor) -> Tensor:
    """The loss of LK in plain torch."""
    rows = torch.minimum(z.softmax(-1), q.to(z)).sum(-1)
    rate, log_rate = ((x * mask[..., 0]).sum() / mask.sum() for x in (rows, rows.log()))
    weight = 0.8 * torch.exp(-2.0 * rate.detach())
    return -log_rate if kind == "alpha" else weight * kl + (1 - weight) * (1 - rate)


@pytest.mark.parametrize("kind", ["alpha", "lambda", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_of_losses(interpreted, dtype: torch.dtype, kind: str | None):
    """The function that every step of EAGLE-3's training calls: cross entropy, acceptance, and LK losses of both."""
    model = load("specforge")[-1]
    logits, q, whole, mask = drawn(dtype)
    given = {"target_p": q, "target_p_on_draft": whole, "position_mask": mask, "lk_loss_type": kind}
    scales = {"kl_scale": 0.8, "kl_decay": 2.0}

    def run() -> tuple[Tensor, Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        rate, loss = model._compute_loss_and_acceptance_rate(logits=leaf.clone(), **given, **scales)
        return rate, loss.detach(), torch.autograd.grad(loss, leaf)[0]

    exact = logits.double().requires_grad_()
    kl = -(q.double() * exact.log_softmax(-1)).sum(-1).mul(mask[..., 0]).mean()
    wanted = kl if kind is None else lk(exact, whole, mask, kind, kl)
    (gradient,) = torch.autograd.grad(wanted, exact)
    rate = (torch.minimum(exact.detach().softmax(-1), whole.double()).sum(-1) * mask[..., 0]).sum() / mask.sum()
    theirs = run()
    logitless.install("specforge", audit=4)
    ours = run()
    (status,) = logitless.status().hosts
    assert status.audit is not None
    assert status.audit.passed
    assert [entry.calls for entry in status.replaced] == [0, 1, 1, 0]
    assert [x.dtype for x in ours] == [x.dtype for x in theirs]
    assert_close_to_truth(ours[0], rate, theirs[0])
    assert_close_to_truth(ours[1], wanted.detach(), theirs[1])
    assert_gradient_close_to_truth(ours[2], gradient, theirs[2])


def test_what_is_refused():
    load("specforge")
    logits, q, whole, mask = drawn(torch.float32)
    logitless.install("specforge")
    loss = sys.modules[specforge.LOSS].LogSoftmaxLoss
    with pytest.raises(LogitlessError, match=r"target must be \[2, 9, 211\], as the draft's logits"):
        loss.apply(logits, q[..., 1:], mask)
    with pytest.raises(LogitlessError, match=r"position_mask must be \[2, 9, 1\] but is \[2, 8, 1\]"):
        loss.apply(logits, q, mask[:, 1:])
    with pytest.raises(LogitlessError, match=r"target_probs must be \[2, 9, 211\]"):
        sys.modules[LK]._acceptance_rate_per_token_from_logits(logits, whole[:1])


# A model's step.


def eagle(model: Any, length: int, kind: str | None) -> Any:
    """SpecForge's EAGLE-3 model around a small draft, which has 60 of 90 ids."""
    module = sys.modules["specforge.modeling.draft.llama3_eagle"]
    sizes = {"vocab_size": 90, "draft_vocab_size": 60, "hidden_size": 32, "intermediate_size": 48}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, pretraining_tp=1)
    torch.manual_seed(1)
    draft = module.LlamaForCausalLMEagle3(config, attention_backend="sdpa")
    chosen = torch.randperm(90)[:60].sort().values
    draft.t2d.zero_()[chosen] = True
    draft.d2t.copy_(chosen - torch.arange(60))
    return model.OnlineEagle3Model(draft, length=length, lk_loss_type=kind, kl_scale=0.8, kl_decay=2.0)


def trained(model: Any, kind: str | None, compact: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and acceptance rates of three steps ahead, and the gradients of the draft."""
    online = eagle(model, 3, kind)
    torch.manual_seed(2)
    hidden, weight = torch.randn(B, S, 32), torch.randn(90, 32)
    given = {"target": hidden @ weight.T}
    if compact:
        given = {"target": None, "target_hidden_for_compact": hidden, "target_head_weight": weight}
    mask = torch.ones(B, S, 1)
    mask[0, :4] = 0
    losses, rates, *_ = online(
        input_ids=torch.randint(90, (B, S)),
        attention_mask=torch.ones(B, S, dtype=torch.bool),
        loss_mask=mask,
        hidden_states=torch.randn(B, S, 96),
        **given,
    )
    sum(0.8**i * x for i, x in enumerate(losses)).backward()
    return [x.detach() for x in (*losses, *rates)], [x.grad for x in online.parameters() if x.grad is not None]


@pytest.mark.parametrize("compact", [False, True], ids=["", "compact teacher"])
@pytest.mark.parametrize("kind", [None, "lambda"])
@pytest.mark.parametrize("deferred", [False, True], ids=["", "deferred"])
def test_eagle3s_training_step(interpreted, kind: str | None, compact: bool, deferred: bool, monkeypatch):
    """SpecForge's own forward, three steps ahead, and backward: the same losses, rates and gradients of the draft."""
    model = load("specforge")[-1]
    theirs = trained(model, kind, compact)
    logitless.install("specforge")
    if deferred:
        build = eagle
        monkeypatch.setitem(globals(), "eagle", lambda *given: deferred_draft(build(*given)))
    ours = trained(model, kind, compact)
    (status,) = logitless.status().hosts
    assert {entry.calls for entry in status.replaced[1:]} == {3}
    assert status.replaced[0].calls == compact
    for mine, other in zip((x for part in ours for x in part), (x for part in theirs for x in part), strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-4, atol=2e-5)


def deferred_draft(online: Any) -> Any:
    ll.defer(online.draft_model, head="lm_head")
    return online


def test_a_step_ahead_copies_nothing(interpreted):
    """Of three steps with an LK loss: gradients, and no probabilities of the draft or copies of the target's."""
    model = load("specforge")[-1]
    rows, ids = 32, 4096
    logits = torch.randn(2, rows, ids, requires_grad=True)
    padded = torch.randn(2, rows + 3, ids).softmax(-1)
    mask = torch.ones(2, rows, 1)
    adapter = model.SdpaLikeAdapter(None)
    none = dict.fromkeys(("global_input_ids", "attention_mask", "loss_mask", "position_ids", "hidden_states"))
    scales = {"lk_loss_type": "lambda", "kl_scale": 1.0, "kl_decay": 1.0}

    def step() -> Tensor:
        total = logits.new_zeros(())
        for i in range(3):
            given = {"target_p_padded": padded, "target_p_on_draft_padded": padded, "position_mask": mask}
            state = adapter.step_view(idx=i, ttt_length=3, seq_length=rows, **none, **given)
            parts = {name: getattr(state, name) for name in ("target_p", "target_p_on_draft", "position_mask")}
            total = total + model._compute_loss_and_acceptance_rate(logits=logits * 1.0, **parts, **scales)[1]
        return torch.autograd.grad(total, logits)[0]

    before = peak_bytes(step, logits.device) / logits.nbytes
    logitless.install("specforge", memory="1MiB")
    after = peak_bytes(step, logits.device) / logits.nbytes
    # Three tensors of logits, and the gradients that are added up.
    assert before > 12
    assert after < 7.5
