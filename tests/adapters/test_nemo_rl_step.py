"""NeMo-RL's Megatron train functions behind a real Megatron-Core model: its own head, and logits that are not computed.

``megatron_forward_backward`` for the old log-probs and three times for training, on what ``get_microbatch_iterator``
makes of a batch: NeMo-RL's packing or its padded lines, its loss of clipped ratios with a KL penalty, Megatron's
schedule and gradient buffers, on gloo ranks. Needs the sources of NeMo-RL and of the Megatron-Core that its main
branch wants (``LOGITLESS_HOSTS``, see hosts.py).
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hosts import load, put_first
from ranks import close_ranks
from shared.megatron import megatron, megatron_first
from shared.megatron_groups import TIMEOUT
from shared.megatron_step import HOW, Descent, Largest, Outcome, V, check_steps, installed, model_of, on_cpu

import logitless
from logitless.errors import LogitlessError

pytestmark = pytest.mark.skipif(
    not put_first("nemo_rl") or not megatron_first(),
    reason="LOGITLESS_HOSTS names no checkouts of NeMo-RL and Megatron-Core",
)

LENGTHS, PROMPTS, LINE = (29, 42, 38, 17), (17, 22, 27, 8), 44


@pytest.fixture(scope="module", autouse=True)
def fresh_workers() -> Iterator[None]:
    yield
    close_ranks()


def rollout() -> dict[str, Any]:
    made = torch.Generator().manual_seed(0)
    masks = torch.zeros(len(LENGTHS), LINE)
    for line, prompt, length in zip(masks, PROMPTS, LENGTHS, strict=True):
        line[prompt:length] = 1
    return {
        "input_ids": torch.randint(V, (len(LENGTHS), LINE), generator=made),
        "input_lengths": torch.tensor(LENGTHS),
        "token_mask": masks,
        "sample_mask": torch.tensor([1.0, 1.0, 0.0, 1.0]),
        "advantages": torch.randn(len(LENGTHS), LINE, generator=made),
    }


def settings(tp: int, cp: int, packed: bool, **more: Any) -> dict[str, Any]:
    sizes = {"tensor_model_parallel_size": tp, "context_parallel_size": cp, "pipeline_model_parallel_size": 1}
    return {
        "sequence_packing": {"enabled": packed, "fuse_loss": more.pop("fuse_loss", False)},
        "dynamic_batching": {"enabled": False},
        "megatron_cfg": sizes | {"sequence_parallel": False},
        "make_sequence_length_divisible_by": 2 * cp,
        "logprob_chunk_size": None,
    } | more


def lines(data: torch.Tensor, **_: Any) -> tuple[Any, None, torch.Tensor]:
    """Stands in for a function of Megatron's training scripts, which are no package."""
    return None, None, torch.arange(data.shape[1]).expand_as(data)


def run(rank: int, world: int, how: str, tp: int, cp: int, half: bool, packed: bool, more: dict[str, Any]) -> Outcome:
    """Old log-probs, and three steps on them."""
    train, data, losses, dicts = load(
        "nemo_rl",
        "nemo_rl.models.megatron.train",
        "nemo_rl.models.megatron.data",
        "nemo_rl.algorithms.loss.loss_functions",
        "nemo_rl.distributed.batched_data_dict",
    )
    data.get_ltor_masks_and_position_ids = lines
    dicts.BatchedDataDict.to = lambda self, _: self
    sampling = SimpleNamespace(temperature=0.8, top_k=more.pop("top_k", None), top_p=1.0)
    cfg = settings(tp, cp, packed, **more)
    timer = lambda *_, **__: nullcontext()  # noqa: E731
    with megatron(tp, cp), on_cpu(), installed("nemo_rl", how) as told:
        chunks = [model_of(tp, cp, torch.bfloat16 if half else torch.float32)]
        optimizer, largest = Descent(chunks), Largest(V // tp)

        def over(batch: dict[str, Any], post: Any, **asked: Any) -> Any:
            given = dicts.BatchedDataDict(batch)
            given.micro_batch_indices, given.micro_batch_lengths = [[(0, 2), (2, 4)]], [[72, 56]]
            found, number, size, _, length = data.get_microbatch_iterator(given, cfg, 2, straggler_timer=timer)
            asked |= {"straggler_timer": timer, "sampling_params": sampling}
            return train.megatron_forward_backward(chunks[0], found, number, length, size, post, **asked)

        with torch.no_grad():
            old = over(rollout(), train.LogprobsPostProcessor(cfg, sampling), forward_only=True)
        scores = [x["logprobs"] for x in old]
        scores = [torch.nn.functional.pad(x, (0, LINE - x.shape[1])) for x in scores]
        before = torch.cat(scores)
        shifted = before + 0.1 * torch.sin(7 * torch.arange(LINE))
        batch = rollout() | {"prev_logprobs": shifted, "generation_logprobs": shifted}
        batch["reference_policy_logprobs"] = before - 0.2 * torch.cos(torch.arange(LINE))
        loss_fn = losses.ClippedPGLossFn(losses.ClippedPGLossConfig())
        post = train.LossPostProcessor(loss_fn, cfg, num_microbatches=2, sampling_params=sampling)
        seen = []
        for _ in range(3):
            chunks[0].zero_grad_buffer()
            tokens = (batch["token_mask"] * batch["sample_mask"][:, None]).sum()
            valid = {"global_valid_seqs": batch["sample_mask"].sum(), "global_valid_toks": tokens}
            with largest:
                found = over(batch, post, **valid)
            optimizer.step()
            seen.append(sum(float(x["loss"]) for x in found))
    masks = (rollout()["token_mask"] * rollout()["sample_mask"][:, None]).split(2)
    return Outcome(
        seen, [x * m for x, m in zip(scores, masks, strict=True)], optimizer.masters, largest.elements, **told
    )


CASES = {
    "packed": (2, 1, False, True, {}),
    "packed, one loss": (2, 1, False, True, {"fuse_loss": True, "logprob_chunk_size": 16}),
    "context parallel": (1, 2, False, True, {}),
    "both, bfloat16": (2, 2, True, True, {"fuse_loss": True}),
    "padded": (2, 1, False, False, {}),
    "top-k": (1, 1, False, False, {"top_k": 20}),
}


@pytest.mark.parametrize("case", CASES)
def test_three_steps_of_nemo_rl(ranks, case):
    tp, cp, half, packed, more = CASES[case]
    before, ours, wrong = (ranks(run, tp * cp, how, tp, cp, half, packed, more, timeout=TIMEOUT) for how in HOW)
    dtype = torch.bfloat16 if half else torch.float32
    # The smaller of the two packs, or two lines.
    whole = (55 // cp if packed else 2 * LINE) * V // tp
    for a, b, c in zip(before, ours, wrong, strict=True):
        check_steps(a, b, dtype, whole)
        with pytest.raises(AssertionError, match=r"(losses|scores|parameters): "):
            check_steps(a, c, dtype, whole)


def test_a_head_in_mxfp8_is_refused_where_the_head_is_fused():
    """The fused head gets the weight alone; the worker's forward sees the model."""
    (train,) = load("nemo_rl", "nemo_rl.models.megatron.train")
    parameters = inspect.signature(train.model_forward).parameters
    flag = next(name for name in parameters if name in ("use_fused_linear_logprobs", "use_linear_ce_fusion_loss"))
    batch = SimpleNamespace(get_multimodal_dict=lambda **_: {})
    ids = torch.zeros(1, 3, dtype=torch.int64)
    logitless.install("nemo_rl", any_version=True)
    try:
        for fused, fp8 in itertools.product((False, True), repeat=2):
            inner = SimpleNamespace(config=SimpleNamespace(fp8_output_proj=fp8))
            model = type("Wrapper", (), {"module": inner, "__call__": lambda self, **_: "output"})()
            call = functools.partial(train.model_forward, model, batch, ids, ids, None, **{flag: fused})
            if fused and fp8:
                with pytest.raises(LogitlessError, match="has fp8_output_proj=True"):
                    call()
            else:
                assert call() == "output"
    finally:
        logitless.uninstall("nemo_rl")
