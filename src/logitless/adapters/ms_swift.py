"""ms-swift: log-probs and entropies of its Megatron trainers, from vocabulary-parallel logits.

    compute_logps_and_entropy_from_logits(logits [..., V'], labels [...])     float32 [...], and entropies on request

One collective instead of three or four, no copy of the logits, and a gradient that is right on every rank of the
tensor-parallel group. No call is left to ms-swift. Its other trainers score with TRL's functions: ``install("trl")``.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from logitless.adapters.heads import deferring
from logitless.adapters.host import Host, Option, Replacement
from logitless.adapters.replacing import Options, replaces
from logitless.adapters.schedules import in_schedule
from logitless.adapters.scoring import entropy_mode, score, score_with_all_entropies, untrained
from logitless.adapters.shards import check_ids, even_shard

MODULE = "swift.megatron.trainers.vocab_parallel_utils"


@replaces(MODULE)
def compute_logps_and_entropy_from_logits(
    options: Options, logits: Tensor, labels: Tensor, compute_entropy: bool = False, entropy_chunk_size: int = 512
) -> tuple[Tensor, Tensor | None]:
    """Labels of -100 have log-prob 0, and an entropy."""
    check_ids("labels", labels, tuple(logits.shape[:-1]))
    # As ms-swift's module has it. A group of one rank is none.
    group, width = sys.modules[MODULE].mpu.get_tensor_model_parallel_group(), logits.shape[-1]
    # ms-swift's chunk of rows, as bytes of float32 logits.
    shared: dict[str, Any] = {"shard": even_shard(group, width), "memory": 4 * entropy_chunk_size * width}
    where, audit = "compute_logps_and_entropy_from_logits", options["audit"]
    if not compute_entropy:
        return score(where, logits, labels, audit, **shared).logprob.float(), None
    entropy = entropy_mode(options["entropy_grad"], logits)
    out = score_with_all_entropies(where, logits, labels, audit, entropy=entropy, **shared)
    assert out.entropy is not None
    logprob, value = out.logprob.float(), out.entropy.to(logits.dtype)
    return logprob, value if options["entropy_grad"] else untrained("ms_swift", value, logprob)


def _reads(forward_step_func: Any, **_: Any) -> bool:
    """Whether a trainer's step reads a few numbers of each row: distillation compares whole ones, and a classifier's
    outputs are no logits of tokens."""
    trainer = getattr(forward_step_func, "__self__", None)
    task = getattr(getattr(trainer, "args", None), "task_type", "causal_lm")
    return type(trainer).__name__ != "MegatronGKDTrainer" and task == "causal_lm"


def _heads(_: Options) -> list[Replacement]:
    scored = {
        "4.6": "(model, args, data_iterator, temperature=1.0, no_grad=True, enable_routing_replay=False)",
        "4.4 - 4.5": None,
    }
    model = deferring(lambda model, *_, **__: model)
    return [
        in_schedule("swift.megatron.trainers.base", reads=_reads),
        Replacement("swift.megatron.trainers.utils", "compute_per_token_logps_fn", scored, model),
    ]


HOST = Host(
    name="ms_swift",
    package="swift",
    versions=("4.4 - 4.6",),
    replacements=lambda _: [compute_logps_and_entropy_from_logits],
    options={
        "entropy_grad": Option(
            False, "True: entropy has a gradient; False: it raises. ms-swift logs it and selects tokens"
        ),
    },
    distribution="ms-swift",
    heads=_heads,
    logits="deferred",
)
