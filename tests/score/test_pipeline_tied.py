"""Two stages of a pipeline with one embedding between them: what docs/how-to/clusters.md says, over real ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

import logitless as ll

V, D, TOKENS = 67, 12, 23


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    return torch.randn(V, D, generator=g, dtype=torch.float64), torch.randn(D, D, generator=g, dtype=torch.float64)


def batch() -> tuple[torch.Tensor, ll.Rows]:
    ids = torch.randint(V, (TOKENS,), generator=torch.Generator().manual_seed(4))
    return ids, ll.Rows.packed([ids], [TOKENS - 5])


def loss_of(hidden: torch.Tensor, weight: torch.Tensor, rows: ll.Rows) -> torch.Tensor:
    return ll.policy_loss(ll.Logits(hidden, weight), rows, ll.Objective.recipe("sft"))[0]


def stage(rank: int, world: int) -> torch.Tensor:
    """The gradient of this stage's copy of the embedding, after both were added."""
    (embedding, mix), (ids, rows) = weights(), batch()
    tied = embedding.clone().requires_grad_()
    if rank == 0:
        hidden = torch.nn.functional.embedding(ids, tied)
        dist.send(hidden.detach(), 1)
        gradient = torch.empty(TOKENS, D, dtype=torch.float64)
        dist.recv(gradient, 1)
        hidden.backward(gradient)
    else:
        hidden = torch.empty(TOKENS, D, dtype=torch.float64)
        dist.recv(hidden, 0)
        hidden.requires_grad_()
        loss_of(torch.tanh(hidden @ mix), tied, rows).backward()
        dist.send(hidden.grad, 0)
    dist.all_reduce(tied.grad)
    return tied.grad


def test_both_copies_have_the_gradient_of_one_matrix(ranks):
    (embedding, mix), (ids, rows) = weights(), batch()
    tied = embedding.clone().requires_grad_()
    logits = torch.tanh(torch.nn.functional.embedding(ids, tied) @ mix) @ tied.T
    torch.nn.functional.cross_entropy(logits[rows.index], rows.target).backward()
    for gradient in ranks(stage, 2):
        torch.testing.assert_close(gradient, tied.grad, atol=1e-12, rtol=0)
