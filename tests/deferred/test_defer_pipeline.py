"""A deferred head in the last stage of torch's pipelines, on two real ranks: losses and gradients without it.

``strict=True`` raises wherever logits are computed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import logitless as ll
from logitless.deferred import Deferral, defer

V, MICRO = 61, 4
IDS = torch.randint(3, V, (8, 9), generator=torch.Generator().manual_seed(6))


class Stage(nn.Module):
    """One of the parts of a model, as torchtitan cuts it: what is not in a stage is None."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        torch.manual_seed(20 + index)
        self.embed = nn.Embedding(V, 8) if index == 0 else None
        self.body = nn.Linear(8, 8)
        self.lm_head = nn.Linear(8, V, bias=False) if index == count - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        x = torch.tanh(self.body(x))
        return x if self.lm_head is None else self.lm_head(x)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    logp = torch.log_softmax(logits[:, :-1] / 0.7, -1)
    taken = logp.gather(-1, labels[:, 1:, None]).squeeze(-1)
    return -taken.mean() + 0.1 * F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def run(rank: int, world: int, kind: str, deferred: bool) -> list[Any]:
    """Losses of the micro-batches, where they are known, and the gradients of the stages here."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import PipelineStage

    torch.set_default_dtype(torch.float64)
    try:
        schedule = getattr(pipelining, f"Schedule{kind}")
        count = 4 if "Interleaved" in kind else 2
        modules = {index: Stage(index, count) for index in range(rank, count, world)}
        if deferred and rank == world - 1:
            defer(modules[count - 1], strict=True)
        stages: Any = [PipelineStage(x, index, count, torch.device("cpu")) for index, x in modules.items()]
        runs = schedule(stages if count == 4 else stages[0], n_microbatches=MICRO, loss_fn=loss_of)
        losses: list[Tensor] = []
        last = {"target": IDS, "losses": losses} if rank == world - 1 else {}
        out = runs.step(*([IDS] if rank == 0 else []), **last)
        if rank == world - 1:
            assert out.shape == (8, 9, V)
            assert isinstance(out, ll.Logits) == deferred
            assert not out.requires_grad
    finally:
        torch.set_default_dtype(torch.float32)
    return [torch.stack(losses).detach() if losses else torch.zeros(0)] + [
        p.grad for x in modules.values() for p in x.parameters()
    ]


@pytest.mark.parametrize("kind", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_torchs_schedules(ranks, kind):
    wanted, ours = (ranks(run, 2, kind, deferred) for deferred in (False, True))
    assert len(wanted[1][0]) == MICRO
    for theirs, mine in zip(wanted, ours, strict=True):
        for right, found in zip(theirs, mine, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-15)


def test_a_stage_without_a_head():
    with pytest.raises(ll.LogitlessError, match=r"Name its head.*a stage of a pipeline without one needs no defer"):
        ll.defer(Stage(0, 2))


def test_chunks_of_a_virtual_pipeline():
    """A list of models, as Megatron keeps them: those with a head are deferred, and a rank may have none."""
    chunks = [nn.ModuleDict(), Stage(1, 2)]
    chunks[0].post_process = False
    handle = ll.defer(chunks)
    assert isinstance(handle, Deferral)
    assert isinstance(chunks[1](torch.randn(2, 8)), ll.Logits)
    assert repr(handle) == "Deferral(list, head Linear)"
    handle.undo()
    assert type(chunks[1](torch.randn(2, 8))) is Tensor
    with ll.defer(chunks[:1]) as none:
        assert none == chunks[:1]
    with ll.defer(chunks[0]):
        pass
    with pytest.raises(ll.LogitlessError, match=r"defer: model must be a torch.nn.Module, or a list of them"):
        ll.defer([])
    with pytest.raises(ll.LogitlessError, match=r"neither get_output_embeddings\(\) nor"):
        ll.defer([Stage(0, 2), chunks[1]])
    assert type(chunks[1](torch.randn(2, 8))) is Tensor
