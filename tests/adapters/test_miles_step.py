"""miles's own training step behind a real Megatron-Core model, with its own head and with logits that are not computed.

``forward_only`` for the old log-probs and three times ``train_one_step``, packs and padded lines, as for slime
(test_slime_step.py). Needs miles's sources (``LOGITLESS_HOSTS``, see hosts.py).
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hosts import load, put_first
from ranks import close_ranks
from shared.megatron import megatron
from shared.megatron_groups import TIMEOUT
from shared.megatron_step import HOW, Descent, Largest, Outcome, V, check_steps, installed, model_of, on_cpu
from shared.slime import arguments

pytestmark = [
    pytest.mark.skipif(
        not find_spec("megatron") or not find_spec("megatron.core"), reason="megatron-core is not installed"
    ),
    pytest.mark.skipif(not put_first("miles"), reason="LOGITLESS_HOSTS names no checkout of miles"),
]

LENGTHS, RESPONSES, PAD = (29, 42, 38, 17), (12, 20, 11, 9), 8
BATCHES = [[0, 1], [2, 3]]


@pytest.fixture(scope="module", autouse=True)
def fresh_workers() -> Iterator[None]:
    yield
    close_ranks()


class Settings(Namespace):
    """Every argument that nobody sets is off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Dumper:
    """miles's debugging tool, which is another package's."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.wrap_forward_step = lambda function: function

    def finalize(self, model: Any) -> None:
        pass


def settings(**more: Any) -> Namespace:
    given = {"seq_length": 64, "micro_batch_size": 1, "data_pad_size_multiplier": PAD, "true_on_policy_mode": False}
    given |= {"check_for_nan_in_loss_and_grad": True}
    return Settings(**vars(arguments(**given, entropy_requires_grad=True, **more)))


def rollout(data: Any, lines: bool) -> list[Any]:
    made = torch.Generator().manual_seed(0)
    masks = [(torch.arange(n) % 5 != 2).float() for n in RESPONSES]
    batch = {
        "tokens": [torch.randint(V, (n,), generator=made) for n in LENGTHS],
        "total_lengths": list(LENGTHS),
        "response_lengths": list(RESPONSES),
        "loss_masks": masks,
        "rollout_mask_sums": [mask.sum() for mask in masks],
        "advantages": [torch.randn(n, generator=made) for n in RESPONSES],
        "max_seq_lens": [48] * len(LENGTHS) if lines else None,
    }
    return [data.DataIterator(batch, micro_batch_indices=BATCHES)]


def parallel_state(state: Any, parallel: Any, tp: int, cp: int) -> Any:
    def info(group: Any, size: int) -> Any:
        return SimpleNamespace(group=group, gloo_group=group, rank=dist.get_rank(group), size=size)

    alone = SimpleNamespace(group=None, gloo_group=None, rank=0, size=1)
    both = info(state.get_data_parallel_group(with_context_parallel=True), cp)
    more = {"intra_dp": info(state.get_data_parallel_group(), 1), "intra_dp_cp": both, "indep_dp": alone}
    return parallel.ParallelState(
        cp=info(state.get_context_parallel_group(), cp),
        tp=info(state.get_tensor_model_parallel_group(), tp),
        **dict.fromkeys(("pp", "ep", "etp"), alone),
        **more,
    )


def run(rank: int, world: int, how: str, tp: int, cp: int, half: bool, more: dict[str, Any]) -> Outcome:
    """Old log-probs, and three steps on them."""
    (model,) = load("miles", "miles.backends.megatron_utils.model")
    processors = sys.modules["miles.backends.training_utils.loss_hub.logit_processors"]
    data, parallel = (sys.modules[f"miles.backends.training_utils.{name}"] for name in ("data", "parallel"))
    with megatron(tp, cp) as state, on_cpu(), installed("miles", how, logits="deferred") as told:
        parallel.set_parallel_state(parallel_state(state, parallel, tp, cp))
        args = settings(**more)
        model.get_args, model.DumperMegatronUtil = lambda: args, Dumper
        chunks = [model_of(tp, cp, torch.bfloat16 if half else torch.float32)]
        optimizer, iterators = Descent(chunks), rollout(data, more.get("qkv_format") == "bshd")
        scored = model.forward_only(
            processors.get_log_probs_and_entropy, args, chunks, iterators, [len(BATCHES)], rollout_id=0
        )
        scores, batch = scored["log_probs"], iterators[0].rollout_data
        batch["log_probs"] = [x + 0.1 * torch.sin(7 * torch.arange(len(x))) for x in scores]
        batch["advantages"] = [a[: len(x)] for a, x in zip(batch["advantages"], scores, strict=True)]
        losses, largest = [], Largest(V // tp)
        for step in range(3):
            iterators[0].reset()
            with largest:
                told_of, _, _ = model.train_one_step(
                    args,
                    0,
                    step,
                    iterators,
                    chunks,
                    optimizer,
                    SimpleNamespace(step=lambda increment: None),
                    num_microbatches=len(BATCHES),
                    num_rollouts=4,
                    witness_info=None,
                    attempt=0,
                )
            losses += [float(told_of["loss"])]
    return Outcome(losses, scores, optimizer.masters, largest.elements, **told)


CASES = {
    "tensor parallel": (2, 1, False, {}),
    "context parallel": (1, 2, False, {}),
    "both, bfloat16": (2, 2, True, {}),
    "lines": (2, 1, False, {"qkv_format": "bshd"}),
    "supervised": (2, 1, False, {"loss_type": "sft_loss"}),
}


@pytest.mark.parametrize("case", CASES)
def test_three_steps_of_miles(ranks, case):
    tp, cp, half, more = CASES[case]
    how = (*HOW, "host")
    before, ours, wrong, host = (ranks(run, tp * cp, x, tp, cp, half, more, timeout=TIMEOUT) for x in how)
    dtype = torch.bfloat16 if half else torch.float32
    whole = (71 // cp) * V // tp
    for a, b, c, d in zip(before, ours, wrong, host, strict=True):
        # miles scores with Megatron's fused cross entropy, which rounds the gradient of float32 logits to bfloat16.
        check_steps(a, b, torch.bfloat16, whole)
        check_steps(d, b, dtype, whole)
        with pytest.raises(AssertionError, match=r"(losses|scores|parameters): "):
            check_steps(a, c, torch.bfloat16, whole)


def test_the_patch_of_the_page(ranks):
    first = "before"
    before, ours, wrong = (
        ranks(run, 2, how, 2, 1, False, {}, timeout=TIMEOUT) for how in (first, "page", "page, wrong")
    )
    # A tile of the provider's budget is larger than these logits.
    for a, b, c in zip(before, ours, wrong, strict=True):
        check_steps(a, b._replace(largest=0), torch.bfloat16, 71 * V // 2)
        with pytest.raises(AssertionError, match=r"(losses|scores|parameters): "):
            check_steps(a, c._replace(largest=0), torch.bfloat16, 71 * V // 2)
