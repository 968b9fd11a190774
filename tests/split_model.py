"""A tiny model, once in one process and once split over ranks: what must come out the same.

    tokens, places -> embeddings -> hidden states [T, D] -> head [V, D], split over tensor-parallel ranks -> logits
                                                        -> log-probs and entropies -> a loss -> parameter gradients

The whole model walks sample by sample in float64 and scores with the oracle. The split one lays each rank's tokens
out by the oracle of layouts, pads with ids that belong to no one, and asks the library for the rest. Over the sequence
group losses are parts, over the vocabulary group they are copies; hidden-producing parameters add up over both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from close import assert_close_to_truth, assert_gradient_close_to_truth
from cuts import Batch
from schemes import Layout
from torch import Tensor
from truth import plain, truth

from logitless import Head, Logits, VocabShard, logprobs

VOCAB, WIDTH = 11, 7
SHARDS = {1: [(0, 11)], 2: [(0, 4), (4, 11)]}
"""Columns by tensor-parallel rank: an uneven cut, because nothing says it must be even."""
TEMPERATURE = 0.7

LOSSES = ("tokens", "slice", "sum", "redistribute")
"""tokens: a sum over tokens, each rank its own. redistribute: the same in another split's order. slice, sum: one term
per sample that is not a sum over tokens, of gathered responses, under either gradient rule."""


@dataclass(frozen=True)
class Problem:
    """A batch and everything random about it, by seed."""

    batch: Batch
    seed: int = 0
    dtype: torch.dtype = torch.float64

    @cached_property
    def ids(self) -> list[list[int]]:
        draw = self._generator(1)
        return [torch.randint(0, VOCAB, (n,), generator=draw).tolist() for n in self.batch.lengths]

    def parameters(self) -> dict[str, Tensor]:
        draw = self._generator(2)
        shapes = {"embedding": (VOCAB, 5), "place": (max(self.batch.lengths), 5), "hidden": (WIDTH, 5)}
        shapes["head"] = (VOCAB, WIDTH)
        # Small enough that no token is all but certain: its entropy, and a loss made of that, would be rounding error.
        return {name: (0.6 * torch.randn(shape, generator=draw)).to(self.dtype) for name, shape in shapes.items()}

    def weights(self) -> list[tuple[Tensor, Tensor]]:
        """Per sample, what each response token's log-prob and entropy count in the loss; nothing where masked."""
        draw = self._generator(3)
        masks = [torch.tensor(m, dtype=torch.float64) for m in self.batch.masks]
        return [tuple(torch.randn(2, len(m), generator=draw, dtype=torch.float64) * m) for m in masks]

    def _generator(self, salt: int) -> torch.Generator:
        return torch.Generator().manual_seed(10 * self.seed + salt)


@dataclass(frozen=True)
class Setup:
    """One way to split the problem."""

    layout: Layout
    tp: int = 1
    loss: str = "tokens"
    sequence_parallel: bool = False
    mask_only: bool = False


class Groups(NamedTuple):
    """What a rank is handed: its groups, None where it is alone, and its place in each."""

    cp: Any
    tp: Any
    cp_rank: int
    tp_rank: int


class Answer(NamedTuple):
    """Of the whole model, or of one rank: per-sample results, the loss, and gradients by parameter."""

    logprob: list[Tensor]
    entropy: list[Tensor]
    loss: Tensor
    gradients: dict[str, Tensor]
    gathered: tuple[list[Tensor], list[Tensor]] | None = None


def hidden_states(parameters: dict[str, Tensor], ids: Tensor, offsets: Tensor) -> Tensor:
    mixed = parameters["embedding"][ids] + parameters["place"][offsets]
    return torch.tanh(mixed) @ parameters["hidden"].T


def per_token(logprob: Tensor, entropy: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The loss of tokens, in float64 so that its own rounding is not in question."""
    logprob, entropy = logprob.double(), entropy.double()
    return (a * logprob**2 + b * torch.sin(logprob) * entropy).sum()


def per_sample(logprob: Tensor, entropy: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The loss of one sample, not a sum over its tokens."""
    logprob, entropy = logprob.double(), entropy.double()
    return (a * logprob).sum() ** 2 + (a * logprob).sum() * (b * entropy).sum()


# In one process.


def run_whole(problem: Problem, loss: str, score: Any = truth) -> Answer:
    wide = score is truth
    parameters = {k: (v.double() if wide else v).requires_grad_() for k, v in problem.parameters().items()}
    logprob, entropy, terms = [], [], []
    for sample, (ids, response) in enumerate(zip(problem.ids, problem.batch.responses, strict=True)):
        hidden = hidden_states(parameters, torch.tensor(ids), torch.arange(len(ids)))
        logits = hidden @ parameters["head"].T
        index = range(len(ids) - response - 1, len(ids) - 1) if response else []
        out = score(logits, list(index), ids[len(ids) - response :], temperature=TEMPERATURE)
        logprob.append(out.logprob)
        entropy.append(out.entropy)
        function = per_token if loss in ("tokens", "redistribute") else per_sample
        terms.append(function(out.logprob, out.entropy, *problem.weights()[sample]))
    total = torch.stack(terms).sum()
    total.backward()
    detached = [[x.detach() for x in values] for values in (logprob, entropy)]
    return Answer(*detached, total.detach(), {k: v.grad for k, v in parameters.items()})


# On one rank.


class GatherSequence(torch.autograd.Function):
    """Sequence parallelism: ``[T / tp, D]`` of every rank becomes ``[T, D]``; the gradient is summed and cut back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.zeros_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        parts = [part.contiguous() for part in gradient.chunk(ctx.group.size())]
        out = torch.zeros_like(parts[0])
        dist.reduce_scatter(out, parts, group=ctx.group)
        return out, None


def run_split(problem: Problem, setup: Setup, groups: Groups) -> Answer:
    batch, layout = problem.batch, setup.layout
    parameters = problem.parameters()
    start, stop = SHARDS[setup.tp][groups.tp_rank]
    shard = None if groups.tp is None else VocabShard(start, stop, groups.tp)
    parameters["head"] = parameters["head"][start:stop].clone()
    parameters = {name: x.requires_grad_() for name, x in parameters.items()}
    hidden = local_hidden_states(problem, setup, groups, parameters)
    rows = layout.rows(batch, groups.cp_rank, tokens=problem.ids, loss_mask_only=setup.mask_only)
    logits = (hidden @ parameters["head"].T).reshape(*rows.token_shape, stop - start)
    out = logprobs(Logits.given(logits, shard=shard), rows, entropy="grad", head=Head(temperature=TEMPERATURE))
    fields = (out.logprob, out.entropy)
    a, b = zip(*problem.weights(), strict=True)
    if setup.loss == "tokens":
        loss = per_token(*fields, rows.from_responses(a), rows.from_responses(b))
    elif setup.loss == "redistribute":
        other = Layout("zigzag" if layout.kind == "contiguous" else "contiguous", layout.size)
        to = other.rows(batch, groups.cp_rank, tokens=problem.ids)
        moved = rows.redistribute(fields, to, groups.cp, grad="sum")
        loss = per_token(*moved, to.from_responses(a), to.from_responses(b))
    else:
        whole = rows.gather(fields, groups.cp, grad=setup.loss)
        terms = [per_sample(*values) for values in zip(*whole, a, b, strict=True)]
        loss = torch.stack(terms).sum() / (layout.size if setup.loss == "sum" else 1)
    loss.backward()
    gathered = rows.gather(fields, groups.cp, grad=None)
    gradients = {name: x.grad for name, x in parameters.items()}
    return Answer(
        [x.detach() for x in rows.split(out.logprob)],
        [x.detach() for x in rows.split(out.entropy)],
        loss.detach(),
        gradients,
        gathered,
    )


def local_hidden_states(problem: Problem, setup: Setup, groups: Groups, parameters: dict[str, Tensor]) -> Tensor:
    """``[T, D]`` of the tokens held here; under sequence parallelism each rank computes a part and gathers the rest."""
    draw = torch.Generator().manual_seed(problem.seed)
    tokens = setup.layout.held(problem.batch)[groups.cp_rank]
    # Padding gets ids of the vocabulary: were a padded row to count, a gradient would show it.
    junk = torch.randint(0, VOCAB, (len(tokens),), generator=draw).tolist()
    ids = torch.tensor([j if t is None else problem.ids[t[0]][t[1]] for t, j in zip(tokens, junk, strict=True)])
    offsets = torch.tensor([0 if t is None else t[1] for t in tokens])
    if not setup.sequence_parallel:
        return hidden_states(parameters, ids, offsets)
    part = len(tokens) // setup.tp
    here = slice(groups.tp_rank * part, (groups.tp_rank + 1) * part)
    return GatherSequence.apply(hidden_states(parameters, ids[here], offsets[here]), groups.tp)


def divisible(layout: Layout, batch: Batch, tp: int) -> Layout:
    """The same layout with enough padding at the end for sequence parallelism."""
    while len(layout.held(batch)[0]) % tp:
        layout = replace(layout, extra=layout.extra + 1)
    return layout


# The comparison.


def run_both(problem: Problem, loss: str) -> tuple[Answer, Answer]:
    """The truth, and what plain torch makes of it in the problem's own precision."""
    return run_whole(problem, loss), run_whole(problem, loss, plain)


def assert_same(problem: Problem, setup: Setup, answers: list[Answer], true: Answer, rough: Answer) -> None:
    """``answers`` in the order of ranks, tensor-parallel rank fastest; the others from :func:`run_both`."""
    size, tp = setup.layout.size, setup.tp
    assert len(answers) == size * tp
    for rank, answer in enumerate(answers):
        assert_values(problem, setup, rank // tp, answer, true, rough)
        copy = answers[rank // tp * tp]
        assert torch.equal(answer.loss, copy.loss), "tensor-parallel ranks have different losses"
    parts = torch.stack([answer.loss for answer in answers[::tp]])
    if setup.loss == "slice":
        assert torch.equal(parts, parts[:1].expand_as(parts)), "context-parallel ranks have different copies"
        parts = parts[:1]
    close(parts.sum()[None], true.loss[None], rough.loss[None], problem.dtype, "loss")
    for name, gradient in true.gradients.items():
        if name == "head":
            shards = [torch.stack([a.gradients["head"] for a in answers[r::tp]]).sum(0) for r in range(tp)]
            ours = torch.cat(shards)
        else:
            ours = torch.stack([a.gradients[name] for a in answers]).sum(0)
        assert_gradient_close_to_truth(ours, gradient, rough.gradients[name], f"gradient of {name}")


def assert_values(problem: Problem, setup: Setup, cp_rank: int, answer: Answer, true: Answer, rough: Answer) -> None:
    """The held part of every response in local order, the whole of it gathered, zeros where nothing was scored."""
    batch = problem.batch
    held: list[list[int]] = [[] for _ in batch.lengths]
    for token in setup.layout.held(batch)[cp_rank]:
        if batch.predicts(token) is not None:
            held[token[0]].append(batch.predicts(token))
    assert answer.gathered is not None
    for name, split, whole in zip(("logprob", "entropy"), answer[:2], answer.gathered, strict=True):
        ours, theirs, expected = [], [], []
        for sample, mask in enumerate(batch.masks):
            scored = torch.tensor(mask if setup.mask_only else [1] * len(mask), dtype=torch.float64)
            exact, single = getattr(true, name)[sample] * scored, getattr(rough, name)[sample] * scored
            assert len(split[sample]) == len(held[sample])
            assert torch.equal(whole[sample][held[sample]], split[sample])
            assert not whole[sample][scored == 0].any(), "a row that was not scored has a value"
            ours.append(whole[sample])
            theirs.append(single)
            expected.append(exact)
        close(torch.cat(ours), torch.cat(expected), torch.cat(theirs), problem.dtype, name)


def close(ours: Tensor, true: Tensor, rough: Tensor, dtype: torch.dtype, name: str) -> None:
    assert_close_to_truth(ours.to(dtype), true, rough.to(dtype), name)
