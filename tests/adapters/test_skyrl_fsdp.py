"""SkyRL's FSDP wrapper with and without ours: padded, packed and cut over sequence-parallel ranks.

Its own forward runs, around a small model. flash-attention's two functions that take padding out and put it back are
written out here; nothing else of SkyRL's is.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from close import assert_close_to_truth, assert_gradient_close_to_truth
from hosts import load, takes
from tiny import qwen3
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import logitless

MEGATRON = "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper"
MODULE = "skyrl.backends.skyrl_train.workers.model_wrapper"
ULYSSES = "skyrl.backends.skyrl_train.distributed.ulysses.utils"
V, D, ACTIONS, TEMPERATURE = 253, 16, 5, 0.7
MASK = torch.tensor([[0] * 3 + [1] * 8, [1] * 11, [1] * 8 + [0] * 3])
"""Three lines: padded on the left, full, padded on the right."""


def unpad(x: Tensor, attention_mask: Tensor) -> tuple[Any, ...]:
    index = attention_mask.flatten().nonzero().flatten()
    return x.flatten(0, 1)[index], index, None, None, None


def pad(x: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    return x.new_zeros(batch * seqlen, *x.shape[1:]).index_copy(0, indices, x).view(batch, seqlen, *x.shape[1:])


def wrapped(model: Any, packed: bool = False, parts: int = 1) -> Any:
    load("skyrl", MEGATRON)
    module = load("skyrl")[-1]
    module.unpad_input, module.pad_input = unpad, pad
    wrapper = module.HFModelWrapper(model, bf16=False, sequence_parallel_size=parts)
    wrapper.remove_microbatch_padding = packed
    return wrapper


class Rowwise(torch.nn.Module):
    """A model without attention, whose rows do not care how the sequence is cut."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed, self.lm_head = torch.nn.Embedding(V, D), torch.nn.Linear(D, V, bias=False)

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def forward(self, input_ids, attention_mask=None, position_ids=None, logits_to_keep=slice(None)) -> Any:
        hidden = self.embed(input_ids).tanh() * (1 + position_ids[..., None].to(self.lm_head.weight.dtype) / 7)
        return {"logits": self.lm_head(hidden[:, logits_to_keep])}


def tokens() -> Tensor:
    torch.manual_seed(3)
    return torch.randint(3, V, MASK.shape)


def step(wrapper: Any, sequences: Tensor, upstream: Tensor, num_actions: Any = ACTIONS) -> list[Tensor]:
    """Log-probs and entropies that the worker reads, and the gradients of all weights."""
    settings = {"temperature": TEMPERATURE, "return_output": True, "compute_entropy": True}
    # Before the forward, in which FSDP has other parameters.
    wrapper.zero_grad()
    logprob, output = wrapper(sequences, num_actions, MASK.clone(), **settings)
    entropy = output["entropy"][:, -ACTIONS - 1 : -1]
    (logprob * upstream[0].to(logprob)).sum().add((entropy * upstream[1].to(entropy)).sum()).backward()
    grads = [x.grad for x in wrapper.parameters()]
    return [logprob.detach(), entropy.detach(), *(x.full_tensor() if hasattr(x, "full_tensor") else x for x in grads)]


def masked() -> Tensor:
    """Upstream gradients, none for padding: what a loss mask leaves."""
    torch.manual_seed(5)
    return torch.randn(2, len(MASK), ACTIONS) * MASK[:, -ACTIONS:]


def compare(ours: list[Tensor], theirs: list[Tensor], exact: list[Tensor]) -> None:
    read = MASK[:, -ACTIONS:].bool()
    for mine, other, right in zip(ours[:2], theirs[:2], exact[:2], strict=True):
        assert mine.dtype == other.dtype
        assert_close_to_truth(mine[read], right[read], other[read])
    for mine, other, right in zip(ours[2:], theirs[2:], exact[2:], strict=True):
        assert_gradient_close_to_truth(mine, right, other)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_only_rows_that_are_read_are_multiplied(packed):
    wrapper, sequences, upstream = wrapped(qwen3(V), packed), tokens(), masked()
    theirs = step(wrapper, sequences, upstream)
    exact = step(wrapped(qwen3(V).double(), packed), sequences, upstream)
    # The wrapper was made before: its entropy function is SkyRL's.
    logitless.install("skyrl", audit=4)
    ours = step(wrapper, sequences, upstream)
    compare(ours, theirs, exact)
    report = logitless.status().hosts[0]
    assert (report.calls, report.passed_on) == (3, 0)
    assert report.audit.passed
    assert [len(x._forward_pre_hooks) for x in (wrapper, wrapper.model)] == [0, 0]
    assert wrapper.chunked_entropy_from_logits_fn is not sys.modules[MODULE].chunked_entropy_from_logits
    rows = []
    wrapper.model.lm_head.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[:-1].numel()))
    for before_head in (True, False):
        logitless.uninstall("skyrl")
        logitless.install("skyrl", rows_before_head=before_head)
        wrapper(sequences, [ACTIONS], MASK.clone())
    # The last five results of each line, before its last token; a pack has no row for padding.
    assert rows == ([13, 27] if packed else [15, 33])


class OfImages(Rowwise):
    def forward(self, input_ids, attention_mask=None, position_ids=None, **images) -> Any:
        return super().forward(input_ids, position_ids=torch.arange(MASK.shape[1]).expand(MASK.shape))


@pytest.mark.parametrize("why", ["a model of images", "a model without logits_to_keep"])
def test_what_is_left_to_skyrl(why):
    """The forward is SkyRL's, with all rows; its functions on logits are still ours."""
    wrapper, sequences, upstream = wrapped(OfImages()), tokens(), masked()
    wrapper.is_vlm = why == "a model of images"
    theirs = step(wrapper, sequences, upstream)
    exact = step(wrapped(OfImages().double()), sequences, upstream)
    logitless.install("skyrl", audit=4)
    ours = step(wrapper, sequences, upstream)
    compare(ours, theirs, exact)
    forward = next(x for x in logitless.status().hosts[0].replaced if x.name.endswith("HFModelWrapper.forward"))
    assert forward.why == {why: 1}


def test_a_forward_over_the_sampler_s_support_is_left_to_skyrl():
    """Parameters of 0.4, which no signature that we know has: SkyRL scores rows that ours would not have multiplied."""
    wrapper, sequences = wrapped(qwen3(V)), tokens()
    if not takes(type(wrapper).forward, "enable_sample_support_replay"):
        pytest.skip("SkyRL before 0.4 has no replay of the sampler's support")
    packed_tensor = importlib.import_module("skyrl.backends.skyrl_train.utils.packed_tensor").PackedTensor
    mask = MASK.sort(dim=1).values
    ids = torch.stack([sequences[:, -ACTIONS:], torch.full((len(MASK), ACTIONS), 1)], dim=-1).int()
    support = packed_tensor.from_segments(list(ids))
    given: dict[str, Any] = {"loss_mask": torch.ones(len(MASK), ACTIONS), "sample_support": support}
    run = lambda: wrapper(sequences, ACTIONS, mask, TEMPERATURE, enable_sample_support_replay=True, **given)  # noqa: E731
    theirs = run()
    logitless.install("skyrl", any_version=True)
    # The scores over the support, which SkyRL's forward then calls, are ours: other roundings of the same numbers.
    torch.testing.assert_close(run(), theirs)
    forward = next(x for x in logitless.status().hosts[0].replaced if x.name.endswith("HFModelWrapper.forward"))
    assert forward.why == {"sample_support is given": 1}


def run_ranks(rank: int, world: int) -> None:
    """The sequence over two ranks, packed and not, with the model's weights sharded over the same ranks."""
    # SkyRL calls what newer torch has renamed.
    warnings.simplefilter("ignore")
    load("skyrl", ULYSSES)[0].set_ulysses_sequence_parallel_group(dist.group.WORLD)
    sequences, upstream = tokens(), masked()
    for packed in (False, True):
        exact = step(wrapped(Rowwise().double(), packed), sequences, upstream)
        model = Rowwise()
        fully_shard(model)
        wrapper = wrapped(model, packed, parts=2)
        theirs = step(wrapper, sequences, upstream)
        logitless.install("skyrl", audit=2)
        ours = step(wrapper, sequences, upstream)
        report = logitless.status().hosts[0]
        logitless.uninstall("skyrl")
        assert (report.calls, report.passed_on) == (3, 0)
        compare(ours, theirs, exact)


def test_over_sequence_parallel_ranks(ranks):
    ranks(run_ranks, 2)
