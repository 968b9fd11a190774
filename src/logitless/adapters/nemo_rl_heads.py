"""Models of NeMo-RL whose logits are not computed: of its Megatron workers, and of its AutoModel worker.

    megatron.train.megatron_forward_backward              runs Megatron's schedule: losses, log-probs, a teacher's top-k
    automodel.train.forward_with_post_processing_fn       the same of ``DTensorPolicyWorkerV2``

What becomes of the logits is in the post-processor that NeMo-RL hands over. Those that read whole rows get them from
the model's own head: logits for a teacher's export, losses of logits, draft models; and, of AutoModel, log-probs
over the support of top-k or top-p, and context parallelism, which makes a DTensor of logits.
Reward and value models have no logits. A model whose head is in MXFP8 is refused where the fused head is asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from logitless.adapters.heads import deferring
from logitless.adapters.host import Replacement
from logitless.adapters.megatron import check_model_head
from logitless.adapters.replacing import replaces
from logitless.adapters.schedules import in_schedule

MODEL_UTILS = "nemo_rl.distributed.model_utils"
LOSS_UTILS = "nemo_rl.algorithms.loss.utils"
TRAIN = "nemo_rl.models.megatron.train"

READ = ("LogprobsPostProcessor", "TopkLogitsPostProcessor")
LOSSES = ("LOGPROB", "DISTILLATION")


def reads_few(post: Any) -> bool:
    """Whether a post-processor of NeMo-RL reads a few numbers of each row."""
    kind = type(post).__name__
    if kind == "LossPostProcessor":
        return getattr(getattr(post.loss_fn, "input_type", None), "name", None) in LOSSES
    return kind in READ


def filters(sampling: Any) -> bool:
    """Whether the sampling parameters limit the support; None, -1 and 1.0 do not."""
    if sampling is None:
        return False
    return (sampling.top_k is not None and sampling.top_k > 0) or sampling.top_p not in (None, 1.0)


def _step_reads_few(forward_step_func: Any, **_: Any) -> bool:
    """:func:`reads_few` of a step that NeMo-RL hands to Megatron's schedule."""
    given = getattr(forward_step_func, "keywords", {})
    return not given.get("enable_hidden_capture") and reads_few(given.get("post_processing_fn"))


def _automodel_reads_few(model: Any, post_processing_fn: Any, *_: Any, **__: Any) -> bool:
    post = post_processing_fn
    # Of log-probs without a graph NeMo-RL's own filter sorts whole rows; of losses ours does, a few at a time.
    sorts = type(post).__name__ == READ[0] and filters(post.sampling_params)
    return getattr(post, "cp_size", 1) == 1 and not sorts and reads_few(post)


def _policy(model: Any, post_processing_fn: Any, processed_mb: Any, is_reward_model: Any = False, *_: Any, **__: Any):
    """The model, unless it gives rewards."""
    return None if is_reward_model else model


FIRST = (
    "model, data_dict, input_ids_cp_sharded, position_ids, attention_mask, packed_seq_params=None, "
    "defer_fp32_logits=False"
)


@replaces(
    TRAIN,
    signature={
        "main": f"({FIRST}, mtp_loss_mask=None, straggler_timer=None, use_fused_linear_logprobs=False, "
        "media_token_validity_mask=None)",
        "0.7": f"({FIRST}, mtp_loss_mask=None, straggler_timer=None, use_linear_ce_fusion_loss=False)",
        "0.6": f"({FIRST}, straggler_timer=None, use_linear_ce_fusion_loss=False)",
    },
    optional=True,
)
def model_forward(original: Callable[..., Any], model: Any, *args: Any, **more: Any) -> Any:
    """Every forward of the Megatron workers: the fused head is handed a weight, and here the model is seen."""
    given = inspect.signature(original).bind(model, *args, **more).arguments
    if given.get("use_fused_linear_logprobs") or given.get("use_linear_ce_fusion_loss"):
        check_model_head("the fused head", model)
    return original(model, *args, **more)


def heads(_: Any) -> list[Replacement]:
    """``Host.heads`` of NeMo-RL."""
    return [
        in_schedule(TRAIN, optional=True, reads=_step_reads_few),
        Replacement(
            module="nemo_rl.models.automodel.train",
            name="forward_with_post_processing_fn",
            signature="(model, post_processing_fn, processed_mb, is_reward_model=False, allow_flash_attn_args=True, "
            "global_valid_seqs=None, global_valid_toks=None, sampling_params=None, sequence_dim=1)",
            make=deferring(_policy, _automodel_reads_few),
            optional=True,
        ),
    ]
