"""Megatron-RL's log-probs behind a real Megatron-Core model, with its own head and with logits that are not computed.

Three times its ``get_logprobs`` and a loss of them, in Megatron's gradient buffers, on gloo ranks. It asks the head to
gather the columns of all tensor-parallel ranks, so that logits are computed where there is more than one. Needs the
sources of Megatron-LM (``LOGITLESS_HOSTS``, see hosts.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import close_ranks
from shared.megatron import megatron, megatron_first
from shared.megatron_groups import TIMEOUT
from shared.megatron_step import HOW, Descent, Largest, Outcome, V, check_steps, installed, model_of, on_cpu

from benchmarks.bench.checkouts import standing_in

pytestmark = pytest.mark.skipif(not megatron_first(), reason="LOGITLESS_HOSTS names no checkout of Megatron-LM")

S = 53
MISSING = (
    *("fastapi", "httpx", "hypercorn", "megatron.training", "openai", "quart", "tensorboard"),
    *("torch.utils.tensorboard", "uvicorn", "wandb"),
)


@pytest.fixture(scope="module", autouse=True)
def fresh_workers() -> Iterator[None]:
    yield
    close_ranks()


class Plain:
    """A float32 model, to which Megatron-RL gives an argument of the half-precision wrapper."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config

    def __call__(self, *args: Any, fp32_output: bool, **more: Any) -> Any:
        return self.model(*args, **more)


def run(rank: int, world: int, how: str, tp: int) -> Outcome:
    with megatron(tp) as state, on_cpu(), installed("megatron", how) as told:
        with standing_in(MISSING):
            from megatron.rl import rl_utils
        rl_utils.get_args = lambda: SimpleNamespace(fp16=False, bf16=False)
        rl_utils.get_nvtx_range = lambda: lambda *_, **__: nullcontext()
        chunk = model_of(tp)
        optimizer, losses, largest = Descent([chunk]), [], Largest(V)
        tokens = torch.randint(V, (1, S), generator=torch.Generator().manual_seed(1))
        given = (Plain(chunk), tokens, torch.arange(S)[None])
        groups = SimpleNamespace(cp=None, pp=state.get_pipeline_model_parallel_group())
        rl_utils.get_attr_wrapped_model = lambda *_: groups
        rl_utils.set_model_config_attribute = lambda *_: None
        old: Any = rl_utils.get_logprobs(*given, no_grad=True)
        for _ in range(3):
            chunk.zero_grad_buffer()
            with largest:
                found = rl_utils.get_logprobs(*given)
                ratio = (found - old - 0.1 * torch.sin(torch.arange(S - 1))).clamp(-2, 2).exp()
                loss = -(ratio * torch.cos(3 * torch.arange(S - 1))).mean()
                loss.backward()
            optimizer.step()
            losses.append(float(loss))
    return Outcome(losses, [old], optimizer.masters, largest.elements, **told)


def test_three_steps_of_megatron_rl(ranks):
    before, ours, wrong = (ranks(run, 1, how, 1, timeout=TIMEOUT)[0] for how in HOW)
    check_steps(before, ours, torch.float32, S * V)
    with pytest.raises(AssertionError, match=r"(losses|scores|parameters): "):
        check_steps(before, wrong, torch.float32, S * V)


def test_gathered_columns_are_computed(ranks):
    before, ours = (ranks(run, 2, how, 2, timeout=TIMEOUT) for how in HOW[:2])
    for a, b in zip(before, ours, strict=True):
        assert b.largest >= S * V
        check_steps(a, b._replace(largest=0), torch.float32, S * V)
