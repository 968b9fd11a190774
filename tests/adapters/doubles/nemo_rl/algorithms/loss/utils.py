"""What the losses start from. The names are held by value, as in the host."""

from nemo_rl.algorithms.logits_sampling_utils import need_top_k_or_top_p_filtering
from nemo_rl.distributed.model_utils import (
    from_parallel_logits_to_logprobs_packed_sequences,
    get_distillation_topk_logprobs_from_logits,
    get_next_token_logprobs_from_logits,
)

__all__ = [
    "from_parallel_logits_to_logprobs_packed_sequences",
    "get_distillation_topk_logprobs_from_logits",
    "next_token_logprobs",
]


def next_token_logprobs(data, logits, sampling_params=None):
    """Log-probs, zero where the filter has dropped the target: it finds these places by their -inf."""
    logprobs = get_next_token_logprobs_from_logits(data["input_ids"], logits, sampling_params=sampling_params)
    if need_top_k_or_top_p_filtering(sampling_params):
        logprobs = logprobs.masked_fill(logprobs.isneginf(), 0.0)
    return logprobs
