"""A step on slime's own policy loss: as it is, with logits that are not computed, and with its loss in the pass.

    LOGITLESS_HOSTS=checkouts python -m benchmarks.loss_in_the_pass --device cuda --out results.jsonl

The model is that of ``bench/adapters.py``, the head and one small layer. Advantages are drawn, or zero for half of the
samples, as of groups that all succeed or all fail; the old log-probs are the step's own, as in slime's single updates.
"""

from __future__ import annotations

import argparse
import json
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import logitless
from benchmarks.bench import adapters, checkouts
from benchmarks.bench.host_steps import TEMPERATURE, Batch
from benchmarks.bench.records import Environment

OFF = (
    *("use_rollout_logprobs", "use_opsm", "use_tis", "get_mismatch_metrics", "use_kl_loss", "use_unbiased_kl"),
    *("allgather_cp", "recompute_loss_function", "calculate_per_token_loss"),
)
CONTENDERS = ("slime", "logits not computed", "loss in the pass")


def settings() -> Namespace:
    clip = {"eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": None, "entropy_coef": 0.0}
    more = {"advantage_estimator": "grpo", "qkv_format": "thd", "log_probs_chunk_size": -1, "rollout_top_p": 1.0}
    more |= {"custom_pg_loss_reducer_function_path": None}
    return Namespace(**dict.fromkeys(OFF, False), **clip, **more, rollout_temperature=TEMPERATURE)


def step_of(batch: Batch, zeros: bool) -> Callable[[], Tensor]:
    """Forward and backward through ``policy_loss_function``; gives the gradient of the head, as one number."""
    loss, args = sys.modules["slime.backends.megatron_utils.loss"], settings()
    (samples, length), device = batch.tokens.shape, batch.tokens.device
    response = length - batch.prompt
    masks = [torch.ones(response, device=device)] * samples
    advantages = [torch.randn(1, device=device).expand(response) * (not zeros or i % 2) for i in range(samples)]
    given = batch.pack() | {"loss_masks": masks, "advantages": advantages}
    mean = loss.get_sum_of_sample_mean(given["total_lengths"], given["response_lengths"], masks)

    def step() -> Tensor:
        logits = batch.logits().flatten(0, 1)[None].float()
        found, _ = loss.policy_loss_function(args, given, logits, mean)
        del logits
        found.backward()
        norm = batch.model.lm_head.weight.grad.float().norm()
        batch.model.zero_grad(set_to_none=True)
        return norm

    return step


def measured(device: torch.device, sizes: Any, repeats: int = 5) -> list[dict[str, Any]]:
    found = []
    with adapters.megatron_alone(device):
        checkouts.load("slime")
        model = adapters._model(device, sizes)
        tokens = torch.randint(2, sizes.vocab, (sizes.samples, sizes.length), device=device)
        for zeros in (False, True):
            torch.manual_seed(0)
            step, norms = step_of(Batch(model, tokens, sizes.prompt), zeros), []
            for name in CONTENDERS:
                ours = name != "slime"
                options = {"logits": "host", "one_pass": name == CONTENDERS[2]}
                with adapters.installed("slime", **options) if ours else nullcontext():
                    with logitless.defer(model) if ours else nullcontext():
                        norm, peak, ms = adapters._run(step, device, repeats)
                    told = logitless.status().hosts[0].logits if ours else ()
                norms.append(float(norm))
                line = {"contender": name, "zeros": zeros, "peak_bytes": peak, "ms": ms, "status": list(told)}
                line |= {"sizes": str(sizes), "gradient_difference": abs(norms[-1] - norms[0]) / norms[0]}
                found.append(line | {"environment": asdict(Environment.here(device))})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="file to append records to")
    parser.add_argument("--commit", help="commit to record where the code has no git history")
    options = parser.parse_args()
    sizes = adapters.CUDA if options.device == "cuda" else adapters.SMOKE
    for line in measured(torch.device(options.device), sizes):
        if options.commit is not None:
            line["environment"] |= {"commit": options.commit, "dirty": None}
        shown = {name: x for name, x in line.items() if name != "environment"}
        sys.stdout.write(json.dumps(shown) + "\n")
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
