"""Megatron-Core's own groups, loss, head and split, from the real package, initialised over gloo on four ranks.

    tensor-parallel groups  [0 1] [2 3]      context-parallel groups  [0 2] [1 3]

Sequence parallelism in Megatron asks CUDA for the current device and for nothing else; the one test that needs it
answers "cpu". Packed (thd) context parallelism is in Transformer Engine, which has no CPU build: not covered.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from cuts import Batch
from ranks import close_ranks
from shared.megatron_groups import NOISE, TIMEOUT
from shared.parallel import RAGGED, SHORT, setups
from split_model import LOSSES, Answer, Groups, Problem, Setup, assert_same, run_both, run_split
from torch import Tensor
from truth import float64_leaf, truth

from logitless import Logits, Rows, VocabShard, Zigzag, logprobs

pytestmark = pytest.mark.skipif(
    not find_spec("megatron") or not find_spec("megatron.core"), reason="megatron-core is not installed"
)


@pytest.fixture(scope="module", autouse=True)
def fresh_workers() -> Iterator[None]:
    """Megatron leaves global state behind, so the workers that have imported it are not reused."""
    yield
    close_ranks()


@contextmanager
def model_parallel() -> Iterator[Groups]:
    """Two by two ranks, as a training script sets them up."""
    with warnings.catch_warnings():
        for category, message in NOISE:
            warnings.filterwarnings("ignore", message, category)
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, context_parallel_size=2)
        try:
            yield Groups(
                parallel_state.get_context_parallel_group(),
                parallel_state.get_tensor_model_parallel_group(),
                parallel_state.get_context_parallel_rank(),
                parallel_state.get_tensor_model_parallel_rank(),
            )
        finally:
            parallel_state.destroy_model_parallel()


# Every scheme, over Megatron's groups.


def run_cases(rank: int, world: int, cases: list[tuple[Problem, Setup]]) -> list[Answer]:
    with model_parallel() as groups:
        assert (groups.cp_rank, groups.tp_rank) == divmod(rank, 2)
        problem, setup = cases[0]
        setup.layout.rows(problem.batch, groups.cp_rank).check_over(groups.cp)
        return [run_split(problem, setup, groups) for problem, setup in cases]


def test_every_scheme_over_the_groups_of_parallel_state(ranks):
    """Tensor by context by sequence parallelism: values, losses and gradients of one process."""
    problems = [Problem(RAGGED, seed=7), Problem(SHORT, seed=8)]
    cases = [(problem, setup) for problem in problems for setup in setups(4, problem.batch) if setup.tp == 2]
    assert any(setup.sequence_parallel for _, setup in cases)
    references = {(p.seed, loss): run_both(p, loss) for p in problems for loss in LOSSES}
    for (problem, setup), *answers in zip(cases, *ranks(run_cases, 4, cases, timeout=TIMEOUT), strict=True):
        assert_same(problem, setup, answers, *references[problem.seed, setup.loss])


# Its cross entropy.


class Entropies(NamedTuple):
    """Cross entropy and gradient of one rank's columns, by each side."""

    ours: Tensor
    our_gradient: Tensor
    theirs: Tensor
    their_gradient: Tensor
    untouched: tuple[bool, bool]


def compare_entropies(rank: int, world: int, logits: Tensor, target: Tensor, upstream: Tensor) -> Entropies:
    with model_parallel() as groups:
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        shard = VocabShard.even(logits.shape[-1], groups.tp)
        columns = logits[..., shard.start : shard.stop].contiguous()
        ours, theirs = columns.clone().requires_grad_(), columns.clone().requires_grad_()
        loss = -logprobs(Logits.given(ours, shard=shard), target).logprob
        loss.backward(upstream)
        # Not a leaf: it is overwritten.
        given = theirs * 1.0
        their_loss = vocab_parallel_cross_entropy(given, target)
        their_loss.backward(upstream)
        untouched = torch.equal(ours, columns), torch.equal(given, columns)
        return Entropies(loss.detach(), ours.grad, their_loss.detach(), theirs.grad, untouched)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [3.0, 30.0])
def test_vocab_parallel_cross_entropy(ranks, dtype, spread):
    """Never further from the truth than twice Megatron's own distance, sequence-first as Megatron has it."""
    logits = (torch.randn(13, 3, 506) * spread).to(dtype)
    target, upstream = torch.randint(0, 506, (13, 3)), torch.randn(13, 3)
    results = ranks(compare_entropies, 4, logits, target, upstream, timeout=TIMEOUT)
    leaf = float64_leaf(logits)
    loss = -truth(leaf.view(39, 506), range(39), target.flatten()).logprob.view(13, 3)
    loss.backward(upstream.double())
    for r in results:
        assert_close_to_truth(r.ours, loss, r.theirs)
        assert r.untouched == (True, dtype != torch.float32)
    ours, theirs = (torch.cat([getattr(r, name) for r in results[:2]], -1) for name in Entropies._fields[1::2])
    assert_gradient_close_to_truth(ours, leaf.grad, theirs)
    for a, b in ((0, 1), (0, 2), (0, 3)):
        assert torch.equal(results[a].ours, results[b].ours), f"ranks {a} and {b} differ"


# Its head: a column-parallel layer, alone and with sequence-parallel input.


class Scored(NamedTuple):
    logprob: Tensor
    d_hidden: Tensor
    d_weight: Tensor


def score_with_their_head(
    rank: int, world: int, hidden: Tensor, weight: Tensor, batch: Batch, sequence_parallel: bool
) -> Scored:
    """Every context-parallel rank the same whole lines, to keep this about the tensor-parallel group."""
    with model_parallel() as groups, pytest.MonkeyPatch.context() as patch:
        from megatron.core import ModelParallelConfig
        from megatron.core.tensor_parallel import ColumnParallelLinear

        if sequence_parallel:
            # The only thing it wants of CUDA is where to allocate.
            patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        config = ModelParallelConfig(
            tensor_model_parallel_size=2,
            context_parallel_size=2,
            sequence_parallel=sequence_parallel,
            use_cpu_initialization=True,
            params_dtype=hidden.dtype,
        )
        shard = VocabShard.even(len(weight), groups.tp)
        layer = ColumnParallelLinear(
            hidden.shape[-1],
            len(weight),
            config=config,
            init_method=torch.nn.init.zeros_,
            bias=False,
            gather_output=False,
            tp_group=groups.tp,
        )
        with torch.no_grad():
            layer.weight.copy_(weight[shard.start : shard.stop])
        part = hidden.chunk(2)[groups.tp_rank] if sequence_parallel else hidden
        leaf = part.clone().requires_grad_()
        logits, _ = layer(leaf)
        rows = Rows.padded(small_ids(batch), batch.responses, max_length=len(hidden))
        # Sequence first becomes a line per sample, as a view.
        out = logprobs(Logits.given(logits.transpose(0, 1), shard=shard), rows, entropy="grad")
        (out.logprob**2 + out.entropy * torch.sin(out.logprob)).sum().backward()
        return Scored(out.logprob.detach(), leaf.grad, layer.weight.grad)


def small_ids(batch: Batch) -> list[list[int]]:
    return [[(7 * s + 3 * t) % 10 for t in range(n)] for s, n in enumerate(batch.lengths)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_column_parallel_head(ranks, sequence_parallel):
    batch = Batch([12, 7, 5], [6, 6, 1])
    hidden, weight = torch.randn(12, 3, 9, dtype=torch.float64), torch.randn(10, 9, dtype=torch.float64)
    results = ranks(score_with_their_head, 4, hidden, weight, batch, sequence_parallel, timeout=TIMEOUT)

    hidden_leaf, weight_leaf = float64_leaf(hidden), float64_leaf(weight)
    logits = hidden_leaf @ weight_leaf.T
    ids, terms, logprob = small_ids(batch), [], []
    for sample, response in enumerate(batch.responses):
        prompt = batch.prompt(sample)
        out = truth(logits[:, sample], range(prompt - 1, prompt - 1 + response), ids[sample][prompt:])
        terms.append((out.logprob**2 + out.entropy * torch.sin(out.logprob)).sum())
        logprob.append(out.logprob.detach())
    torch.stack(terms).sum().backward()
    expected = torch.cat(logprob)
    for rank, scored in enumerate(results):
        assert_close_to_truth(scored.logprob, expected, expected)
        d_hidden = hidden_leaf.grad.chunk(2)[rank % 2] if sequence_parallel else hidden_leaf.grad
        assert_gradient_close_to_truth(scored.d_hidden, d_hidden, d_hidden, "d_hidden")
        d_weight = weight_leaf.grad.chunk(2)[rank % 2]
        assert_gradient_close_to_truth(scored.d_weight, d_weight, d_weight, "d_weight")


# Its split of a batch over context-parallel ranks.


def split_their_way(rank: int, world: int, whole: dict[str, Tensor]) -> tuple[int, dict[str, Tensor]]:
    with model_parallel() as groups:
        from megatron.core.utils import get_batch_on_this_cp_rank

        return groups.cp_rank, get_batch_on_this_cp_rank(dict(whole))


@pytest.mark.parametrize("length", [12, 20, 36])
def test_the_zigzag_of_get_batch_on_this_cp_rank(ranks, length):
    """Their loss mask says which rows count, their labels what each predicts: the plan is the same."""
    batch = Batch([11, 3, 9, 12], [6, 2, 8, 1])
    lines = [ids + [0] * (length - len(ids)) for ids in batch.tokens]
    tokens = torch.tensor(lines)
    mask = torch.zeros_like(tokens)
    for sample, response in enumerate(batch.responses):
        mask[sample, batch.lengths[sample] - response - 1 : batch.lengths[sample] - 1] = 1
    whole: dict[str, Any] = {
        "tokens": tokens,
        "labels": tokens.roll(-1, 1),
        "loss_mask": mask,
        "position_ids": torch.arange(length).expand(4, -1).contiguous(),
        "attention_mask": None,
    }
    for cp_rank, local in ranks(split_their_way, 4, whole, timeout=TIMEOUT):
        rows = Rows.padded(batch.tokens, batch.responses, max_length=length, cp=Zigzag(cp_rank, 2))
        assert rows.token_shape == tuple(local["tokens"].shape)
        assert rows.index.tolist() == local["loss_mask"].flatten().nonzero().squeeze(1).tolist()
        assert rows.target.tolist() == rows.take(local["labels"]).tolist()
        prompts = torch.tensor([batch.prompt(sample) for sample in range(4)])
        assert rows.position.tolist() == (rows.take(local["position_ids"]) + 1 - prompts[rows.sample]).tolist()
