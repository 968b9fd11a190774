"""verl's Megatron engine behind a real Megatron-Core model, with its own head and with logits that are not computed.

``forward_backward_batch`` of ``MegatronEngineWithLMHead``, three times: verl's packing, its temperature, entropies and
log-probs, Megatron's schedule and gradient buffers, on gloo ranks. A dictionary stands in for a TensorDict.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hosts import load
from ranks import close_ranks
from shared.megatron import megatron
from shared.megatron_groups import TIMEOUT
from shared.megatron_step import HOW, Descent, Largest, Outcome, V, check_steps, installed, model_of, on_cpu

import logitless
from logitless.errors import LogitlessError

pytestmark = pytest.mark.skipif(
    not find_spec("megatron") or not find_spec("megatron.core"), reason="megatron-core is not installed"
)

LENGTHS = ((29, 42), (38, 17))
ENGINE = "verl.workers.engine.megatron.transformer_impl"


@pytest.fixture(scope="module", autouse=True)
def fresh_workers() -> Iterator[None]:
    yield
    close_ranks()


class Fields(dict):
    """What the engine asks of a TensorDict."""

    def to(self, *_: Any) -> Fields:
        return self


def batches(made: torch.Generator) -> list[Fields]:
    found = []
    for lengths in LENGTHS:
        tokens = [torch.randint(V, (n,), generator=made) for n in lengths]
        masks = [(torch.arange(n) > n // 2).long() for n in lengths]
        more = {"calculate_entropy": True, "temperature": torch.tensor([0.7, 0.9]), "num_micro_batch": len(LENGTHS)}
        advantages = [torch.randn(n, generator=made) for n in lengths]
        found.append(
            Fields(
                input_ids=torch.nested.as_nested_tensor(tokens, layout=torch.jagged),
                loss_mask=torch.nested.as_nested_tensor(masks, layout=torch.jagged),
                advantages=torch.cat(advantages),
                **more,
            )
        )
    return found


def engine_of(module: Any, chunk: Any, padded: bool) -> Any:
    engine = object.__new__(module.MegatronEngineWithLMHead)
    off = ("use_fused_kernels", "pad_to_length", "dynamic_context_parallel", "pad_bshd_to_minibatch_max")
    engine.engine_config = SimpleNamespace(
        **dict.fromkeys(off, False),
        use_remove_padding=not padded,
        context_parallel_size=chunk.config.context_parallel_size,
        entropy_from_logits_with_chunking=False,
        router_replay=SimpleNamespace(mode="disabled"),
    )
    engine.model_config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["Any"]),
        mtp=SimpleNamespace(enable=False, enable_train=False),
        tokenizer=SimpleNamespace(pad_token_id=0),
    )
    engine.module, engine.tf_config, engine.enable_routing_replay = [chunk], chunk.config, False
    engine.tf_config.moe_router_replay = engine.tf_config.enable_routing_replay = False
    return engine


def policy_loss(old: list[torch.Tensor], seen: list[torch.Tensor], model_output: Any, data: Any, dp_group: Any) -> Any:
    """A ratio to the log-probs of the first step, and an entropy bonus; ``seen`` remembers log-probs."""
    logprob, entropy = model_output["log_probs"].values(), model_output["entropy"].values()
    mask = data["loss_mask"].values()
    seen.append(logprob.detach())
    before = old.pop(0) if old else logprob.detach()
    ratio = (logprob - before - 0.1 * torch.sin(7 * torch.arange(len(logprob)))).clamp(-3, 3).exp()
    loss = -((ratio * data["advantages"] + 0.05 * entropy) * mask).sum() / mask.sum()
    return loss, {}


def run(rank: int, world: int, how: str, tp: int, cp: int, half: bool, padded: bool) -> Outcome:
    (module,) = load("verl", ENGINE)
    with (
        megatron(tp, cp),
        on_cpu(),
        installed("verl", how, logits="deferred") as told,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(module, "get_device_id", lambda: "cpu")
        patch.setattr(module, "prepare_micro_batches", lambda data, **_: (data["batches"], None))
        patch.setattr(module, "postprocess_batch_func", lambda output_lst, **_: output_lst)
        patch.setattr(module.tu, "assign_non_tensor", lambda data, **more: data.update(more))
        patch.setattr(module.tu, "get_non_tensor_data", lambda data, key, default: data.get(key, default))
        chunk = model_of(tp, cp, torch.bfloat16 if half else torch.float32)
        engine, optimizer = engine_of(module, chunk, padded), Descent([chunk], lr=0.001 if half else 0.02)
        patch.setattr(type(engine), "is_mp_src_rank_with_outputs", lambda _: True)
        losses, old, largest = [], [], Largest(V // tp)
        for _ in range(3):
            chunk.zero_grad_buffer()
            data = Fields(batches=batches(torch.Generator().manual_seed(5)))
            data["loss_mask"] = data["batches"][0]["loss_mask"]
            seen: list[torch.Tensor] = []
            with largest:
                found = engine.forward_backward_batch(data, partial(policy_loss, list(old), seen))
            old = old or seen
            optimizer.step()
            losses += [sum(x["loss"] for x in found)]
    return Outcome(losses, old, optimizer.masters, largest.elements, **told)


CASES = {
    "tensor parallel": (2, 1, False, False),
    "context parallel": (1, 2, False, False),
    "both, bfloat16": (2, 2, True, False),
    "padded": (2, 1, False, True),
}


@pytest.mark.parametrize("case", CASES)
def test_three_steps_of_verl(ranks, case):
    tp, cp, half, *more = CASES[case]
    before, ours, wrong = (ranks(run, tp * cp, how, tp, cp, half, *more, timeout=TIMEOUT) for how in HOW)
    dtype = torch.bfloat16 if half else torch.float32
    whole = (71 // cp) * V // tp
    for a, b, c in zip(before, ours, wrong, strict=True):
        check_steps(a, b, dtype, whole)
        with pytest.raises(AssertionError, match=r"(losses|scores|parameters): "):
            check_steps(a, c, dtype, whole)


def test_a_head_in_mxfp8_is_refused_where_kernels_are_fused():
    """The fused head gets the weight alone; the engine sees the model. An empty iterator is as far as others come."""
    (module,) = load("verl", ENGINE)
    engine = object.__new__(module.MegatronEngineWithLMHead)
    logitless.install("verl")
    try:
        for fused, fp8 in itertools.product((False, True), repeat=2):
            engine.engine_config = SimpleNamespace(use_fused_kernels=fused)
            inner = SimpleNamespace(config=SimpleNamespace(fp8_output_proj=fp8))
            for model in (inner, SimpleNamespace(module=SimpleNamespace(module=SimpleNamespace(language_model=inner)))):
                error, text = (LogitlessError, "has fp8_output_proj=True") if fused and fp8 else (StopIteration, "^$")
                with pytest.raises(error, match=text):
                    engine.forward_step(iter(()), model, None, None)
    finally:
        logitless.uninstall("verl")
