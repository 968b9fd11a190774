"""ms-swift's Megatron trainers behind a real Megatron-Core model: its own head, and logits that are not computed.

``compute_per_token_logps`` for the old log-probs and three times ``train_step`` of its GRPO trainer, and ``train_step``
of its supervised one: ms-swift's batches and losses, Megatron's schedule and gradient buffers, on gloo ranks. Needs its
sources (``LOGITLESS_HOSTS``, see hosts.py).
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hosts import load, put_first
from ranks import close_ranks
from shared.megatron import megatron
from shared.megatron_groups import TIMEOUT
from shared.megatron_step import HOW, Descent, Largest, Outcome, V, check_steps, installed, model_of, on_cpu
from test_ms_swift import is_repaired

from benchmarks.bench.checkouts import stand_in

pytestmark = [
    pytest.mark.skipif(
        not find_spec("megatron") or not find_spec("megatron.core"), reason="megatron-core is not installed"
    ),
    pytest.mark.skipif(not put_first("ms_swift"), reason="LOGITLESS_HOSTS names no checkout of ms-swift"),
]

B, S = 2, 284
"""More rows than the 512 that ms-swift works on at a time, and so do we."""

TRAINERS = "swift.megatron.trainers"


@pytest.fixture(scope="module", autouse=True)
def fresh_workers() -> Iterator[None]:
    """ms-swift keeps the group that it first saw."""
    close_ranks()
    yield
    close_ranks()


class Settings(Namespace):
    """Every argument that nobody sets is off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Schedule:
    def step(self, increment: int) -> None:
        assert increment == 2 * B


def batches() -> list[dict[str, Any]]:
    found = []
    for n in range(2):
        made = torch.Generator().manual_seed(n)
        ids = torch.randint(V, (B, S), generator=made)
        labels = ids.masked_fill(torch.arange(S) < torch.tensor([[90], [140]]), -100)
        mask = torch.ones(1, 1, S, S).triu(1).bool()
        places = {"position_ids": torch.arange(S).expand(B, -1), "attention_mask": mask}
        found.append({"input_ids": ids, "labels": labels, **places})
    return found


def load_trainers() -> tuple[Any, Any, Any]:
    # What decorates the methods of a trainer is not stood in for by nothing.
    sys.modules["swift.rlhf_trainers.utils"] = stand_in(
        "swift.rlhf_trainers.utils", profiling_decorator=lambda function: function
    )
    grpo, plain, utils = load("ms_swift", *(f"{TRAINERS}.{name}" for name in ("grpo_trainer", "trainer", "utils")))
    utils.to_device, utils.get_current_device = lambda data, *_, **__: data, lambda: "cpu"
    utils.get_batch_on_this_cp_rank = cut
    return grpo, plain, utils


def cut(args: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """The tokens of each line that a context-parallel rank has: ms-swift has them cut by a package that is absent."""
    from megatron.core import parallel_state

    size, rank = args.context_parallel_size, parallel_state.get_context_parallel_rank()

    def own(x: Any) -> Any:
        parts = x.chunk(2 * size, dim=1)
        return torch.cat([parts[rank], parts[2 * size - rank - 1]], dim=1)

    lines = ("input_ids", "labels", "position_ids")
    return batch if size == 1 else {name: own(x) if name in lines else x for name, x in batch.items()}


def trainer_of(kind: Any, chunks: list[Any], optimizer: Any, cp: int = 1, **more: Any) -> Any:
    trainer = object.__new__(kind)
    args = Settings(
        task_type="causal_lm",
        pipeline_model_parallel_size=1,
        context_parallel_size=cp,
        cp_partition_mode="zigzag",
        num_microbatches=2,
        seq_length=S,
        micro_batch_size=B,
        global_batch_size=2 * B,
    )
    vars(trainer).update(
        args=args,
        wrapped_models=chunks,
        optimizer=optimizer,
        opt_param_scheduler=Schedule(),
        enable_routing_replay=False,
        **more,
    )
    # gloo has no mean, and there is one data-parallel rank.
    trainer._all_reduce_metric = lambda metric, *_, **__: metric
    # Rollouts are made in there.
    trainer._replace_data_iterator = lambda iterator: iterator
    return trainer


OPTIONS: dict[str, Any] = {
    "temperature": 0.8,
    "compute_entropy": True,
    "log_entropy": True,
    "top_entropy_quantile": 0.7,
    "beta": 0.1,
    "kl_in_reward": False,
    "loss_type": "grpo",
    "importance_sampling_level": "token",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "disable_rollout_importance_sampling": True,
    "rollout_importance_sampling_mode": None,
    "off_policy_sequence_mask_delta": None,
    "_has_teacher": False,
    "micro_batch_size": B,
    "steps_per_generation": 1,
    "_step": 2,
    "_flush_log_completions": lambda: None,
}


def policy(rank: int, world: int, how: str, tp: int, half: bool) -> Outcome:
    grpo, _, _ = load_trainers()
    data, cp = sys.modules["swift.rl_core.data"], world // tp
    with megatron(tp, cp), on_cpu(), installed("ms_swift", how) as told:
        chunks = [model_of(tp, cp, torch.bfloat16 if half else torch.float32)]
        optimizer = Descent(chunks)
        trainer = trainer_of(
            grpo.MegatronGRPOTrainer,
            chunks,
            optimizer,
            cp,
            unwrapped_models=chunks,
            **OPTIONS,
            _metrics={"train": defaultdict(list)},
        )
        scores = [trainer.compute_per_token_logps(chunks[0], iter([x]), temperature=0.8) for x in batches()]
        scores = [x[0] if isinstance(x, tuple) else x for x in scores]
        losses, largest = [], Largest(V // tp)
        for _ in range(3):
            given = []
            for batch, old in zip(batches(), scores, strict=True):
                mask = batch["labels"].roll(-1, 1) != -100
                made = torch.Generator().manual_seed(5)
                batch["grpo_batch"] = data.GRPOBatch(
                    completion_mask=mask,
                    truncated_mask=torch.zeros(B, dtype=torch.bool),
                    seq_lengths=torch.full((B,), S),
                    old_per_token_logps=old + 0.1 * torch.sin(7 * torch.arange(S)),
                    ref_per_token_logps=old - 0.2 * torch.cos(torch.arange(S)),
                    advantages=torch.randn(B, 1, generator=made).expand(B, S),
                )
                given.append(batch)
            with largest:
                found, *_ = trainer.train_step(iter(given))
            losses.append(sum(float(x["loss"]) for x in found))
    return Outcome(losses, scores, optimizer.masters, largest.elements, **told)


def supervised(rank: int, world: int, how: str, tp: int, half: bool) -> Outcome:
    _, plain, _ = load_trainers()
    with megatron(tp), on_cpu(), installed("ms_swift", how) as told:
        chunks = [model_of(tp, 1, torch.bfloat16)]
        # ms-swift's models scale the gradients themselves, by the number of tokens.
        optimizer, losses, largest = Descent(chunks, lr=0.001), [], Largest(V // tp)
        trainer = trainer_of(plain.MegatronTrainer, chunks, optimizer)
        for _ in range(3):
            with largest:
                found, *_ = trainer.train_step(iter(batches()))
            losses.append(sum(float(x["loss"][0] / x["loss"][1]) for x in found))
    return Outcome(losses, [], optimizer.masters, largest.elements, **told)


CASES = {
    "one rank": (policy, 1, False),
    "tensor parallel": (policy, 2, False),
    "bfloat16": (policy, 2, True),
    "supervised, bfloat16": (supervised, 2, True),
}


@pytest.mark.parametrize("case", CASES)
def test_three_steps_of_ms_swift(ranks, case):
    run, tp, half = CASES[case]
    # Before 4.6 the gradient of ms-swift's own function was not that of its log-probs over more than one rank.
    first = "before" if tp == 1 or run is supervised or is_repaired(*load("ms_swift")) else "host"
    before, ours, wrong = (ranks(run, tp, how, tp, half, timeout=TIMEOUT) for how in (first, *HOW[1:]))
    dtype, whole = torch.bfloat16 if half else torch.float32, B * S * V // tp
    for a, b, c in zip(before, ours, wrong, strict=True):
        check_steps(a, b, dtype, whole)
        with pytest.raises(AssertionError, match=r"(losses|scores|parameters): "):
            check_steps(a, c, dtype, whole)


@pytest.mark.parametrize("tp", [1, 2])
def test_three_steps_of_ms_swift_over_the_context(ranks, tp):
    first = "before" if tp == 1 or is_repaired(*load("ms_swift")) else "host"
    before, ours, wrong = (ranks(policy, 2 * tp, how, tp, False, timeout=TIMEOUT) for how in (first, *HOW[1:]))
    # The rows of a rank are fewer than those that ms-swift works on at a time.
    for a, b, c in zip(before, ours, wrong, strict=True):
        check_steps(a, b._replace(largest=0), torch.float32, B * S * V // tp // 2)
        with pytest.raises(AssertionError, match=r"(losses|scores|parameters): "):
            check_steps(a, c._replace(largest=0), torch.float32, B * S * V // tp // 2)


def test_the_patch_of_the_page(ranks):
    before, ours, wrong = (
        ranks(policy, 1, how, 1, False, timeout=TIMEOUT) for how in ("before", "page", "page, wrong")
    )
    # A tile of the provider's budget is larger than these logits.
    for a, b, c in zip(before, ours, wrong, strict=True):
        check_steps(a, b._replace(largest=0), torch.float32, B * S * V)
        with pytest.raises(AssertionError, match=r"(losses|scores|parameters): "):
            check_steps(a, c._replace(largest=0), torch.float32, B * S * V)
