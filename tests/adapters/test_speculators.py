"""speculators' losses with and without ours, on its own code: its kernels, in Triton's interpreter."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hosts import checkout, load
from parity import assert_parity
from shared.divergence import textbook
from torch import Tensor
from transformers import LlamaConfig

import logitless
import logitless as ll
from benchmarks.bench.checkouts import BARE
from benchmarks.bench.draft_steps import one_tile
from benchmarks.bench.measure import peak_bytes
from logitless import LogitlessError
from logitless.adapters import speculators
from logitless.adapters.speculators import MODULE
from logitless.operands.logits import MADE

pytestmark = pytest.mark.skipif(
    checkout("speculators") is None, reason="LOGITLESS_HOSTS names no checkout of speculators"
)
T, V = 19, 203
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "fused_kl_div_loss": ("forward_kl", {}),
    "fused_reverse_kl_div_loss": ("reverse_kl", {}),
    "fused_js_div_loss": ("jsd", {}),
    "fused_tv_loss": ("tv", {}),
    "fused_nla_loss": ("log_acceptance", {}),
    "fused_lk_hybrid_loss": ("lk_hybrid", {"eta": 2.0}),
    "fused_ce_loss": ("ce", {}),
}


def fused_losses() -> Any:
    """speculators' module, its kernels with one size of a tile: there is no GPU to choose among them."""
    module: Any = load("speculators")[0]
    one_tile(module)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss(interpreted, name: str, dtype: torch.dtype):
    fused_losses()
    kind, more = LOSSES[name]
    logits, targets = ((2 * torch.randn(1, T, V)).to(dtype) for _ in range(2))

    def truth(z: Tensor) -> Tensor:
        if kind == "ce":
            return -z.log_softmax(-1).gather(-1, targets.argmax(-1)[..., None])[..., 0]
        return textbook(z[0], targets[0].to(z), kind, **more)[None]

    assert_parity(
        "speculators",
        lambda z: getattr(sys.modules[speculators.MODULE], name)(z, targets, **more),
        truth,
        [logits],
    )


def test_logits_that_are_not_computed():
    """Of draft and verifier, whose head may have another size; the slices of a step are theirs, too."""
    (fused, _) = load("speculators")
    hidden, weight = torch.randn(1, T, 16, requires_grad=True), torch.randn(V, 16, requires_grad=True)
    other, frozen = torch.randn(1, T, 24), torch.randn(V, 24)
    found = []
    logitless.install("speculators")
    try:
        for deferred in (False, True):
            logits = ll.Logits(hidden, weight) if deferred else hidden @ weight.T
            targets = ll.Logits(other, frozen) if deferred else other @ frozen.T
            rows = fused.fused_lk_hybrid_loss(logits[:, :-2], targets[:, 2:])
            found.append((rows.detach(), *torch.autograd.grad(rows.sum(), (hidden, weight))))
            found[-1] += (fused.fused_ce_loss(logits, targets).detach(),)
    finally:
        logitless.uninstall("speculators")
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_an_acceptance_below_the_least_has_no_gradient():
    (fused, _) = load("speculators")
    z, y = torch.zeros(1, 1, 3), torch.zeros(1, 1, 3)
    z[..., 0] = y[..., 1] = 60.0
    logitless.install("speculators")
    try:
        leaf = z.requires_grad_()
        loss = fused.fused_nla_loss(leaf, y)
        torch.testing.assert_close(loss, torch.tensor([[1e-5]]).log().neg())
        assert not torch.autograd.grad(loss.sum(), leaf)[0].any()
        with pytest.raises(LogitlessError, match="targets must be"):
            fused.fused_tv_loss(leaf, y[..., :2])
    finally:
        logitless.uninstall("speculators")


@pytest.mark.parametrize("name", ["fused_kl_div_loss", "fused_lk_hybrid_loss"])
def test_peaks(interpreted, name: str):
    """On logits that exist, their gradient and no more; where heads return logits that are not computed, no logits."""
    module, rows, ids = fused_losses(), 64, 4000
    hidden, weight = torch.randn(1, rows, 16, requires_grad=True), torch.randn(ids, 16, requires_grad=True)
    other, frozen = torch.randn(1, rows, 24), torch.randn(ids, 24)

    def step(deferred: bool) -> Any:
        logits = ll.Logits(hidden, weight) if deferred else hidden @ weight.T
        targets = ll.Logits(other, frozen) if deferred else other @ frozen.T
        return torch.autograd.grad(getattr(module, name)(logits, targets).sum(), (hidden, weight))

    size = 4 * rows * ids
    before = peak_bytes(lambda: step(False), hidden.device) / size
    logitless.install("speculators", memory="256KiB")
    after, without = (peak_bytes(lambda x=x: step(x), hidden.device) / size for x in (False, True))
    # The logits of both, and a gradient; of the hybrid, speculators makes two and adds them.
    assert before > 2.9
    assert after < before + 0.3
    assert without < 1


# A model's step.


def eagle(kind: str, monkeypatch: Any) -> Any:
    """speculators' EAGLE-3 draft with 60 of 90 ids, and a function that trains it three steps ahead."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "speculators"]:
        # As it is, and not without the imports of its package.
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(BARE, "speculators", ())
    models, fused, losses = load("speculators", "speculators.models.eagle3", MODULE, "speculators.losses.utils")
    one_tile(fused)
    sizes = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    layers = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    layers._attn_implementation = "eager"
    torch.manual_seed(1)
    draft = models.Eagle3DraftModel(models.Eagle3SpeculatorConfig(transformer_layer_config=layers, draft_vocab_size=60))
    chosen = torch.randperm(90)[:60].sort().values
    draft.t2d.zero_()[chosen] = True
    draft.d2t.copy_(chosen - torch.arange(60))
    # What is loaded of a verifier.
    for layer in (draft.embed_tokens, draft.lm_head, draft.verifier_lm_head, draft.verifier_norm):
        torch.nn.init.normal_(layer.weight)

    def step() -> list[Tensor]:
        torch.manual_seed(2)
        draft.zero_grad(set_to_none=True)
        _, loss, _ = draft(
            torch.randn(1, T, 96),
            torch.randint(90, (1, T)),
            torch.zeros(1, T, dtype=torch.int64),
            loss_mask=torch.rand(1, T) < 0.8,
            verifier_last_hidden_states=torch.randn(1, T, 32),
            ttt_steps=3,
            loss_config=losses.resolve_loss_config(kind),
        )
        loss.backward()
        return [loss.detach(), *(x.grad for x in draft.parameters() if x.grad is not None)]

    return draft, step


# Of columns that a tile has and the draft has not.
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("deferred", [False, True], ids=["", "deferred"])
@pytest.mark.parametrize("kind", ["kl_div", "lk_hybrid"])
def test_eagle3s_training_step(interpreted, kind: str, deferred: bool, monkeypatch):
    """speculators' own forward, three steps ahead, and backward: the same loss and gradients, and no logits if heads
    are deferred."""
    draft, step = eagle(kind, monkeypatch)
    theirs = step()
    logitless.install("speculators")
    made = sum(MADE.values())
    if deferred:
        for head in ("lm_head", "verifier_lm_head"):
            ll.defer(draft, head=head)
    ours = step()
    (status,) = logitless.status().hosts
    assert status.calls == 3
    assert sum(MADE.values()) == made
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-4, atol=2e-5)
