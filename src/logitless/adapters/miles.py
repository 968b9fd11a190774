"""miles: log-probs, entropy and values of its Megatron and FSDP backends, from response rows only.

    logit_processors.get_log_probs_and_entropy, get_values     packs [1, T, V'], or lines [N, S, V'], per sample
    math_utils.calculate_log_probs_and_entropy                 [N, V'] logits  ->  [N, 1] and [N]
    losses.policy_loss_function, sft_loss_function             only with loss_mask_only, to read the loss masks

miles is kin to slime, and so are the rows (slime_rows.py). It has lines of padded samples besides packs, bfloat16
logits besides float32, and returns dictionaries. The flag ``--custom-megatron-init-path
logitless.adapters.miles.custom_megatron_init`` installs it. Calls left to miles and counted as passed on: its
true-on-policy mode, and lines of different lengths or under all-gather context parallelism.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from logitless.adapters.host import Host, Installed, PassOn, Replacement
from logitless.adapters.patching import install_host
from logitless.adapters.replacing import Options, replaces
from logitless.adapters.schedules import in_schedule
from logitless.adapters.slime_rows import (
    OPTIONS,
    Batch,
    Parallel,
    check_options,
    entropy_asked,
    group_of,
    marked,
    masked_losses,
    options_of,
    score_every_row,
)
from logitless.errors import LogitlessError

HUB = "miles.backends.training_utils.loss_hub"


def custom_megatron_init(args: Any) -> Installed:
    """Install, as miles's ``--custom-megatron-init-path``; the arguments are those of slime's adapter."""
    return install_host(HOST, options_of(args))


@replaces(f"{HUB}.math_utils", also_in=(f"{HUB}.logit_processors",))
def calculate_log_probs_and_entropy(
    options: Options,
    logits: Tensor,
    tokens: Tensor,
    tp_group: Any,
    with_entropy: bool = False,
    entropy_requires_grad: bool = True,
    chunk_size: int = -1,
    true_on_policy: bool = False,
    vocab_size: int | None = None,
) -> Any:
    """``[N, 1]`` log-probs, ``(0,)`` for no rows."""
    if true_on_policy:
        return PassOn("true on policy")
    # Outside its true-on-policy mode miles does not read vocab_size either.
    entropy = entropy_asked(with_entropy, entropy_requires_grad)
    return score_every_row(logits, tokens, group_of(tp_group), entropy, chunk_size, options)


@replaces(f"{HUB}.logit_processors", also_in=(f"{HUB}.losses",))
def get_log_probs_and_entropy(
    options: Options,
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    entropy_requires_grad: bool = True,
    non_loss_data: bool = True,
    max_seq_lens: Sequence[int] | None = None,
) -> Any:
    """Lists in zigzag order, as long as the responses held here."""
    if args.true_on_policy_mode:
        return PassOn("true on policy")
    samples = (unconcat_tokens, total_lengths, response_lengths)
    batch = _batch(logits, args, samples, max_seq_lens)
    if isinstance(batch, PassOn):
        return batch
    temperature = args.rollout_temperature if args.rollout_temperature > 0 else 1.0
    entropy = entropy_asked(with_entropy, entropy_requires_grad)
    old = marked.get().old
    return batch.scores(logits, entropy, temperature, args.log_probs_chunk_size, options, old=old)


@replaces(f"{HUB}.logit_processors", also_in=(f"{HUB}.losses",))
def get_values(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    max_seq_lens: Sequence[int] | None = None,
) -> Any:
    """Response rows of the value head."""
    if logits.shape[-1] != 1:
        raise LogitlessError(f"logits of a value head must be [..., 1] but is {list(logits.shape)}.")
    if args.true_on_policy_mode:
        return PassOn("true on policy")
    samples = (unconcat_tokens, total_lengths, response_lengths)
    batch = _batch(logits, args, samples, max_seq_lens, masked=False)
    return batch if isinstance(batch, PassOn) else {"values": batch.values(logits)}


def _batch(
    outputs: Tensor, args: Any, samples: tuple[Any, Any, Any], lines: Sequence[int] | None, masked: bool = True
) -> Batch | PassOn:
    """The rows of a pack or of padded lines; or why the call is left to miles."""
    packed = args.qkv_format == "thd"
    if outputs.dim() != 3 or (packed and outputs.shape[0] != 1) or outputs.dtype not in (torch.float32, torch.bfloat16):
        wanted = "[1, T, V'], one pack" if packed else "[N, S, V']"
        raise LogitlessError(
            f"logits must be float32 or bfloat16 {wanted}, but is {outputs.dtype} {list(outputs.shape)}."
        )
    if not packed and (lines is None or len({int(n) for n in lines}) != 1):
        return PassOn("lines of different lengths")
    if not packed and args.allgather_cp:
        return PassOn("lines under all-gather CP")
    # As miles's module has it: its tests bind another one there.
    state = sys.modules[f"{HUB}.logit_processors"].get_parallel_state()
    parallel = Parallel(state.tp.group, state.cp.rank, state.cp.size, state.cp.group)
    masks = marked.get().masks if masked else None
    line = None if packed or lines is None else int(lines[0])
    return Batch.make(parallel, outputs, *samples, masks=masks, allgather=args.allgather_cp, line=line)


LOSSES = masked_losses(f"{HUB}.losses")


def _replacements(options: Options) -> list[Replacement]:
    check_options("miles", options)
    found = [calculate_log_probs_and_entropy, get_log_probs_and_entropy, get_values]
    return [*found, *(LOSSES if options["loss_mask_only"] else ())]


HOST = Host(
    name="miles",
    package="miles",
    versions=("0.1",),
    replacements=_replacements,
    options=OPTIONS,
    heads=lambda _: [in_schedule("miles.backends.megatron_utils.model", optional=True)],
    logits="deferred",
)
