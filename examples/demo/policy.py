"""The policy: a tiny Qwen3 from scratch, and a head that may be split over the vocabulary.

Training under context parallelism splits tokens zigzag: each rank runs the transformer on its tokens, and attention
gathers keys and values. For rollouts each rank has the whole head and a share of the samples.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from examples.demo.grid import Grid
from logitless.collectives import gather_rows_over, scatter_sum_over
from logitless.errors import LogitlessError

WIDTH = 64
ATTENTION = "logitless_demo"


class Policy(nn.Module):
    """Transformer body ``[N, S] -> [N, S, D]`` and a head with a weight ``[V here, D]``."""

    def __init__(self, body: nn.Module, weight: Tensor) -> None:
        super().__init__()
        self.body, self.lm_head = body, head_of(weight)

    @property
    def head(self) -> Tensor:
        return self.lm_head.weight

    def copy(self, columns: slice = slice(None)) -> Policy:
        """New parameters with the same values; of the head, only the given ids."""
        twin = _new_body(self.head.shape[0])
        twin.load_state_dict(self.body.state_dict())
        return Policy(twin, self.head.detach()[columns].clone())


def head_of(weight: Tensor) -> nn.Linear:
    """A linear layer with this weight, which is not copied."""
    layer = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
    layer.weight = nn.Parameter(weight)
    return layer


def check_transformers() -> None:
    """Raise unless transformers is installed."""
    if importlib.util.find_spec("transformers") is None:
        raise LogitlessError("demo: transformers is not installed. Run pip install transformers.")


def new_policy(vocab: int, seed: int) -> Policy:
    """Random weights from a seed; the caller's generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Policy(_new_body(vocab), 0.02 * torch.randn(vocab, WIDTH))


def hidden_states(policy: Policy, tokens: Tensor, grid: Grid) -> Tensor:
    """``[N, S, D]``; under context parallelism, for this rank's tokens, padded."""
    if grid.scheme is None:
        return policy.body(input_ids=tokens, use_cache=False).last_hidden_state
    multiple = grid.scheme.multiple
    span = -(-tokens.shape[1] // multiple) * multiple
    padded = nn.functional.pad(tokens, (0, span - tokens.shape[1]))
    places = [type(grid.scheme)(rank, grid.cp).tokens(torch.tensor([span]), span)[1] for rank in range(grid.cp)]
    here = places[grid.scheme.rank]
    # Padding is at the end, where no real token looks.
    visible = here[:, None] >= torch.cat(places)
    return policy.body(
        input_ids=padded[:, here],
        position_ids=here[None],
        attention_mask=visible[None, None],
        use_cache=False,
        cp_group=grid.cp_group,
    ).last_hidden_state


@torch.no_grad()
def sample_responses(policy: Policy, prompts: Tensor, seeds: Tensor, length: int, grid: Grid) -> Tensor:
    """Prompts ``[N, P]`` with sampled responses behind, ``[N, P + length]``, the same on every rank.

    Each sample has a seed, ``[N]``, and from it one random waiting time per id and token. The sampled id has
    the shortest waiting time over its probability, so policies that differ little seldom sample different ids.
    """
    head, share, cache = grid.gather_head(policy.head.detach()), grid.share(len(prompts)), None
    waits = torch.stack([_waiting_times(int(seed), length, head.shape[0]) for seed in seeds[share]], 1)
    new = prompts[share]
    parts = [new]
    for wait in waits:
        out = policy.body(input_ids=new, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        new = (torch.softmax(out.last_hidden_state[:, -1] @ head.T, -1) / wait).argmax(-1, keepdim=True)
        parts.append(new)
    return grid.gather_shares(torch.cat(parts, 1))


def _waiting_times(seed: int, length: int, vocab: int) -> Tensor:
    return torch.empty(length, vocab).exponential_(generator=torch.Generator().manual_seed(seed))


def _new_body(vocab: int) -> nn.Module:
    from transformers import AttentionInterface, AutoModel, Qwen3Config

    AttentionInterface.register(ATTENTION, _attention)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=WIDTH // 4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    return AutoModel.from_config(config, attn_implementation=ATTENTION)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, cp_group: Any = None, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention ``[N, heads, S, D]``; with a group, over the keys and values of all its ranks."""
    if cp_group is not None:
        key, value = (_Gathered.apply(x, cp_group) for x in (key, value))
    # Without a mask the query is either all tokens, or the last token alone.
    causal = mask is None and query.shape[2] > 1
    out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
    return out.transpose(1, 2), None


class _Gathered(torch.autograd.Function):
    """Tokens of all ranks, ``[N, heads, S, D]`` in rank order. Losses are parts, so backward sums and scatters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gather_rows_over(group, x.movedim(2, 0)).movedim(0, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return scatter_sum_over(ctx.group, gradient.movedim(2, 0)).movedim(0, 2), None
