"""SkyRL's Megatron worker behind a real Megatron-Core model, with its own head and with logits that are not computed.

``MegatronModelWrapper.forward`` for the old log-probs and three times ``forward_backward_mini_batch``: SkyRL's packing
or its padded lines, its loss with an entropy bonus, Megatron's schedule and gradient buffers, on gloo ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hosts import load, put_first
from ranks import close_ranks
from shared.megatron import megatron, megatron_first
from shared.megatron_groups import TIMEOUT
from shared.megatron_step import HOW, Descent, Largest, Outcome, V, check_steps, installed, model_of, on_cpu
from shared.skyrl import MODEL_UTILS, TORCH_UTILS, WRAPPER
from shared.skyrl import on_cpu as skyrl_on_cpu

if put_first("skyrl"):
    # SkyRL's main wants a Megatron-Core that is not released.
    megatron_first()

pytestmark = pytest.mark.skipif(
    not find_spec("megatron") or not find_spec("megatron.core"), reason="megatron-core is not installed"
)

PROMPTS, RESPONSES, LINE, ACTIONS = ((17, 9), (4, 23)), ((12, 20), (11, 9)), 40, 20


@pytest.fixture(scope="module", autouse=True)
def fresh_workers() -> Iterator[None]:
    yield
    close_ranks()


def batches() -> list[dict[str, Any]]:
    """Two micro-batches of two lines: padding, prompt, response, padding to the longest response."""
    made, found = torch.Generator().manual_seed(4), []
    for prompts, responses in zip(PROMPTS, RESPONSES, strict=True):
        mask = torch.zeros(2, LINE, dtype=torch.long)
        for line, prompt, response in zip(mask, prompts, responses, strict=True):
            line[LINE - ACTIONS - prompt : LINE - ACTIONS + response] = 1
        actions = mask[:, -ACTIONS:].float()
        found.append(
            {
                "sequences": torch.randint(V, (2, LINE), generator=made) * mask,
                "attention_mask": mask,
                "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
                "num_actions": ACTIONS,
                "base_action_log_probs": None,
                "advantages": torch.randn(2, ACTIONS, generator=made),
                "loss_mask": actions,
                "action_mask": actions,
                "response_mask": None,
                "rollout_action_logprobs": None,
                "rollout_expert_indices": None,
                "num_microbatches": 2,
                "num_real_microbatches": 2,
            }
        )
    return found


def policy_loss(logprob: Any, old: Any, advantages: Any, config: Any, loss_mask: Any, rollout_logprobs: Any) -> Any:
    ratio = (logprob - old - 0.1 * torch.sin(7 * torch.arange(logprob.shape[1]))).clamp(-2, 2).exp()
    return -(ratio * advantages * loss_mask).sum() / 50, {}


def worker_of(module: Any, chunks: list[Any], packed: bool) -> Any:
    algorithm = SimpleNamespace(
        use_entropy_loss=True,
        entropy_loss_coef=0.05,
        use_kl_loss=False,
        kl_loss_coef=0.0,
        policy_loss_type="regular",
        enable_sample_support_replay=False,
    )
    mtp = SimpleNamespace(mtp_loss_weight=0.0, mtp_loss_chunk_size=None, mtp_loss_topk=None)
    cfg = SimpleNamespace(
        algorithm=algorithm,
        policy=SimpleNamespace(megatron_config=mtp),
        remove_microbatch_padding=packed,
        logprobs_chunk_size=None,
        vocab_entropy_chunk_size=None,
        vocab_entropy_chunk_memory_mb=1,
    )
    return module.MegatronModelWrapper(cfg, chunks, policy_loss_fn=policy_loss)


def run(rank: int, world: int, how: str, tp: int, cp: int, half: bool, packed: bool) -> Outcome:
    load("skyrl", TORCH_UTILS, MODEL_UTILS, WRAPPER)
    load("skyrl")
    module = sys.modules[WRAPPER]
    with megatron(tp, cp), on_cpu(), skyrl_on_cpu(), installed("skyrl", how, logits="deferred") as told:
        chunks = [model_of(tp, cp, torch.bfloat16 if half else torch.float32)]
        worker, optimizer = worker_of(module, chunks, packed), Descent(chunks, lr=0.001 if half else 0.02)
        with torch.no_grad():
            scores = worker.forward(batches(), LINE, 2, temperature=0.8)
        scores = [x[:, -ACTIONS:] for x in torch.as_tensor(scores).split(2)]
        losses, largest = [], Largest(V // tp)
        for _ in range(3):
            chunks[0].zero_grad_buffer()
            given = [batch | {"old_action_log_probs": old} for batch, old in zip(batches(), scores, strict=True)]
            with largest:
                found = worker.forward_backward_mini_batch(given, LINE, 2, temperature=0.8)
            optimizer.step()
            losses.append(sum(x["final_loss"] for x in found))
    masks = [batch["loss_mask"] for batch in batches()]
    return Outcome(
        losses, [x * m for x, m in zip(scores, masks, strict=True)], optimizer.masters, largest.elements, **told
    )


CASES = {
    "packed": (2, 1, False, True),
    "context parallel": (1, 2, False, True),
    "both, bfloat16": (2, 2, True, True),
    "padded": (2, 1, False, False),
}


def require_its_megatron() -> None:
    """SkyRL 0.4 names a field of packed sequences that Megatron-Core 0.16, the newest for Python 3.11, has not."""
    load("skyrl", TORCH_UTILS, MODEL_UTILS, WRAPPER)
    utils = Path(sys.modules["skyrl"].__path__[0]) / "backends/skyrl_train/distributed/megatron/megatron_utils.py"
    params = Path(find_spec("megatron.core").submodule_search_locations[0]) / "packed_seq_params.py"
    if "total_tokens" in utils.read_text() and "total_tokens" not in params.read_text():
        pytest.skip("this SkyRL needs a newer Megatron-Core")


@pytest.mark.parametrize("case", CASES)
def test_three_steps_of_skyrl(ranks, case):
    require_its_megatron()
    tp, cp, half, packed = CASES[case]
    before, ours, wrong = (ranks(run, tp * cp, how, tp, cp, half, packed, timeout=TIMEOUT) for how in HOW)
    dtype = torch.bfloat16 if half else torch.float32
    whole = (58 // cp) * V // tp
    for a, b, c in zip(before, ours, wrong, strict=True):
        check_steps(a, b, dtype, whole)
        with pytest.raises(AssertionError, match=r"(losses|scores|parameters): "):
            check_steps(a, c, dtype, whole)
