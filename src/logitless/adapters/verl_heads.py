"""verl's FSDP engine: models whose heads are deferred at their first micro-batch, without fused kernels.

    forward_step             the policy's and the reference's model is deferred; a value model is left alone
    prepare_model_outputs    logits of padded lines are packed first, as they would be with ``use_remove_padding``

With fused kernels the engine's model never calls its head.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from logitless.adapters.heads import deferring
from logitless.adapters.host import Replacement
from logitless.adapters.replacing import replaces
from logitless.operands import Logits

ENGINE = "verl.workers.engine.fsdp.transformer_impl"


def _policy(self: Any, *_: Any, **__: Any) -> Any:
    """The engine's model, unless it gives values: verl's engine of values is a kind of the other."""
    return None if any(kind.__name__ == "FSDPEngineWithValueHead" for kind in type(self).__mro__) else self.module


@replaces(ENGINE, "FSDPEngineWithLMHead.prepare_model_outputs", optional=True)
def prepare_model_outputs(
    original: Callable[..., Any], self: Any, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
) -> Any:
    """verl packs padded logits by a nested tensor, which needs them in memory."""
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Logits) or "temperature_rmpad" in output_args:
        return original(self, output, output_args, micro_batch, logits_processor_func)
    lengths = micro_batch["input_ids"].offsets().diff()
    there = torch.arange(logits.shape[1], device=lengths.device) < lengths[:, None]
    packed = SimpleNamespace(logits=logits[there][None])
    temperature = output_args["temperature"].repeat_interleave(lengths)
    as_packed = micro_batch.copy()
    sys.modules["verl.utils.tensordict_utils"].assign_non_tensor(as_packed, use_remove_padding=True)
    given = {**output_args, "temperature_rmpad": temperature, "pad_size": 0}
    return original(self, packed, given, as_packed, logits_processor_func)


FSDP_HEADS = (
    Replacement(
        module=ENGINE,
        name="FSDPEngineWithLMHead.forward_step",
        signature="(self, micro_batch, loss_function, forward_only)",
        make=deferring(_policy),
        optional=True,
    ),
    prepare_model_outputs,
)
"""Of ``FSDPEngineWithLMHead``, and of VeOmni's engine, which is one."""
