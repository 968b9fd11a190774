"""slime: log-probs, entropy and values of its Megatron backend, from response rows only.

    loss.get_log_probs_and_entropy, loss.get_values     [1, T, V'] of a pack  ->  one tensor per sample
    ppo_utils.calculate_log_probs_and_entropy           [N, V'] logits  ->  [N, 1] and [N]
    loss.policy_loss_function, loss.sft_loss_function   only with loss_mask_only, to read the loss masks; the first also
                                                        with one_pass, to foresee the loss

The flag ``--custom-megatron-init-path logitless.adapters.slime.custom_megatron_init`` installs it, without a source
edit. slime's logits are not written to unless ``overwrite_logits`` asks for it, its lists keep their lengths and zigzag
order on every rank, and temperature and top-p replay make no copy of the logits. Calls left to slime and counted as
passed on: replay in which some response token has no recorded support, and slime 0.3.0's padded batches
(``max_seq_lens``).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from logitless.adapters.host import Host, Installed, Option, PassOn, Replacement
from logitless.adapters.patching import install_host
from logitless.adapters.replacing import Options, replaces
from logitless.adapters.schedules import in_schedule
from logitless.adapters.slime_loss import expected_of, policy_loss_function
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
from logitless.operands import Kept

BACKEND = "slime.backends.megatron_utils"
LOSS = f"{BACKEND}.loss"
VALUES = "(logits, *, args, unconcat_tokens, total_lengths, response_lengths, with_entropy=False, non_loss_data=True"


def custom_megatron_init(args: Any) -> Installed:
    """Install, as slime's ``--custom-megatron-init-path``.

    ``args.log_probs_response_only`` (default True), ``args.log_probs_loss_mask_only``,
    ``args.logitless_overwrite_logits``, ``args.logitless_one_pass``, ``args.logitless_logits``,
    ``args.logitless_audit`` and ``args.logitless_any_version`` are honoured where they are set, for example by
    ``--custom-config-path``.
    """
    return install_host(HOST, options_of(args) | {"one_pass": getattr(args, "logitless_one_pass", False)})


def _parallel() -> Parallel:
    """This rank's groups, from Megatron's parallel state as slime's loss has it: its tests bind another one there."""
    state = sys.modules[LOSS].mpu
    size = state.get_context_parallel_world_size()
    group = state.get_context_parallel_group() if size > 1 else None
    return Parallel(state.get_tensor_model_parallel_group(), state.get_context_parallel_rank(), size, group)


@replaces(
    "slime.utils.ppo_utils",
    signature={"0.3.1": (), "0.3.0": ("log_prob_keep_mask", "with_entropy_grad")},
    also_in=(LOSS,),
)
def calculate_log_probs_and_entropy(
    options: Options,
    logits: Tensor,
    tokens: Tensor,
    tp_group: Any,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: Tensor | None = None,
    with_entropy_grad: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """``[N, 1]`` log-probs, ``(0,)`` for no rows."""
    entropy = entropy_asked(with_entropy, with_entropy_grad)
    return score_every_row(logits, tokens, group_of(tp_group), entropy, chunk_size, options, log_prob_keep_mask)


@replaces(
    LOSS,
    signature={"0.3.1": (), "0.3.0": f"{VALUES}, max_seq_lens=None)"},
    also_in=(f"{BACKEND}.actor", f"{BACKEND}.server.logprob_utils"),
)
def get_log_probs_and_entropy(
    options: Options,
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    top_p_token_ids: Sequence[Any] | None = None,
    top_p_token_offsets: Sequence[Any] | None = None,
) -> Any:
    """Lists in zigzag order, as long as the responses held here."""
    replay = _recorded(top_p_token_ids, top_p_token_offsets, response_lengths)
    if isinstance(replay, PassOn):
        return replay
    _check_outputs(logits, "V'")
    masks, old = marked.get()
    samples = (unconcat_tokens, total_lengths, response_lengths)
    batch = Batch.make(_parallel(), logits, *samples, masks=masks, allgather=args.allgather_cp)
    expected = expected_of(len(batch.rows)) if replay is None and not batch.exchanged else None
    results = batch.scores(
        logits,
        entropy_asked(with_entropy, getattr(args, "entropy_coef", 0.0) != 0),
        getattr(args, "rollout_temperature", 1.0),
        args.log_probs_chunk_size,
        options,
        kept=None if replay is None else Kept.from_responses(batch.rows, *replay),
        old=old,
        expected=expected,
    )
    return torch.empty((0,), device=logits.device), results


@replaces(LOSS, signature={"0.3.1": (), "0.3.0": f"{VALUES}, max_seq_lens=None)"}, also_in=(f"{BACKEND}.actor",))
def get_values(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
) -> Any:
    """Response rows of the value head, without temperature."""
    _check_outputs(logits, 1)
    samples = (unconcat_tokens, total_lengths, response_lengths)
    batch = Batch.make(_parallel(), logits, *samples, allgather=args.allgather_cp)
    return torch.empty((0,), device=logits.device), {"values": batch.values(logits)}


def _recorded(ids: Sequence[Any] | None, offsets: Sequence[Any] | None, response_lengths: Sequence[int]) -> Any:
    """Per sample, the supports of its response tokens and their sizes; passed on if a token has no record."""
    if ids is None or offsets is None:
        return None
    if not len(ids) == len(offsets) == len(response_lengths):
        raise LogitlessError(
            f"top_p_token_ids has {len(ids)} samples and top_p_token_offsets {len(offsets)}, but there are "
            f"{len(response_lengths)} response_lengths."
        )
    starts = [torch.as_tensor(x, dtype=torch.int64).cpu() for x in offsets]
    if any(len(start) != length + 1 for start, length in zip(starts, response_lengths, strict=True)):
        return PassOn("replay without a record")
    flat = [torch.as_tensor(x, dtype=torch.int64).cpu()[s[0] : s[-1]] for x, s in zip(ids, starts, strict=True)]
    return flat, [start.diff() for start in starts]


def _check_outputs(logits: Tensor, width: int | Literal["V'"]) -> None:
    wanted = isinstance(width, str) or logits.shape[-1] == width
    if logits.dim() != 3 or logits.shape[0] != 1 or not wanted or logits.dtype != torch.float32:
        raise LogitlessError(
            f"logits must be float32 [1, T, {width}], one pack, but is {logits.dtype} {list(logits.shape)}."
        )


MASKED = masked_losses(LOSS)


def _replacements(options: Options) -> list[Replacement]:
    check_options("slime", options)
    if options["one_pass"] and (options["loss_mask_only"] or not options["response_only"]):
        raise LogitlessError(
            'install("slime"): one_pass=True wants response_only=True and loss_mask_only=False: rows that the loss '
            "masks drop have no gradient, and are left out of its products anyway."
        )
    found = [calculate_log_probs_and_entropy, get_log_probs_and_entropy, get_values]
    found += [policy_loss_function] if options["one_pass"] else []
    return [*found, *(MASKED if options["loss_mask_only"] else ())]


HOST = Host(
    name="slime",
    package="slime",
    versions=("0.3",),
    replacements=_replacements,
    options=OPTIONS | {"one_pass": Option(False, "True: gradients of the policy loss are made with its log-probs")},
    heads=lambda _: [in_schedule(f"{BACKEND}.model")],
    logits="deferred",
)
