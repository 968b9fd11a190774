"""torchtitan's RL loss on a deferred head: alone, and in the wrapper that takes the head a chunk of tokens at a time.

Three steps of torchtitan's own ``DAPOLoss`` and ``ChunkedLossWrapper``, before and after. Needs torchtitan's sources
(``LOGITLESS_HOSTS``, see hosts.py).
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hosts import checkout, load
from shared.host_steps import assert_same, run, spoiled
from torch import nn

import logitless
from benchmarks.bench.measure import peak_bytes
from logitless.operands.logits import MADE

pytestmark = pytest.mark.skipif(
    checkout("torchtitan") is None, reason="LOGITLESS_HOSTS names no checkout of torchtitan"
)

LOSS, DAPO = "torchtitan.components.loss", "torchtitan.experiments.rl.losses.dapo"


class Decoder(nn.Module):
    """As torchtitan's: with ``_skip_lm_head`` the hidden states are the result."""

    def __init__(self, vocab: int, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(3)
        self._skip_lm_head = False
        self.embedding, self.lm_head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Any) -> Any:
        hidden = torch.tanh(self.embedding(ids))
        return hidden if self._skip_lm_head else self.lm_head(hidden)


def dapo(chunks: int, vocab: int = 253, length: int = 64, deferred: bool = False) -> Any:
    """A policy and an update on ``[B, L]`` tokens, or on ``[T]`` where torchtitan's losses take those."""
    losses, module = load("torchtitan", LOSS, DAPO)
    losses.spmd = SimpleNamespace(is_type_checking=lambda: False, local=nullcontext, no_typecheck=nullcontext)
    model = Decoder(vocab)
    settings = module.DAPOLoss.Config(ratio_clip_high=0.28)
    loss_fn = settings.build()
    if chunks:
        loss_fn = losses.ChunkedLossWrapper.Config(num_chunks=chunks, loss_fn=settings).build()
        loss_fn.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    if deferred:
        logitless.defer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    flat = "[T, V]" in module.DAPOLoss.__call__.__doc__

    def step(n: int) -> Any:
        draw = torch.Generator().manual_seed(n)
        shape = (length,) if flat else (2, length // 2)
        ids = torch.randint(vocab, shape, generator=draw)
        given = {
            "generator_logprobs": -5.5 + 0.3 * torch.randn(shape, generator=draw),
            "advantages": torch.randn(shape, generator=draw),
            "loss_mask": torch.rand(shape, generator=draw) > 0.3,
        }
        loss, metrics = loss_fn(model(ids), ids.roll(-1, -1), float(length), **given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach() + 1e-2 * metrics["trainer/entropy/mean"]

    return model, step


@pytest.mark.parametrize("chunks", [0, 8], ids=["whole", "chunks"])
def test_three_steps(chunks):
    theirs = run(lambda: dapo(chunks))
    MADE.clear()
    logitless.install("torchtitan")
    assert_same(theirs, run(lambda: dapo(chunks, deferred=True)))
    assert not MADE
    assert logitless.status().hosts[0].passed_on == 0
    with spoiled(), pytest.raises(AssertionError):
        assert_same(theirs, run(lambda: dapo(chunks, deferred=True)))


def test_peaks():
    """The wrapper holds a chunk; without it a deferred head saves as much as the logits."""
    vocab, length, peaks = 8192, 512, {}
    logitless.install("torchtitan")
    for chunks, deferred in ((0, False), (8, False), (0, True)):
        _, step = dapo(chunks, vocab, length, deferred)
        step(0)
        peaks[chunks, deferred] = peak_bytes(lambda step=step: step(1), torch.device("cpu"))
    logits = 4 * length * vocab
    assert peaks[8, False] < logits / 2
    assert peaks[0, True] < peaks[0, False] - 0.9 * logits
