"""The end of a Megatron forward pass. The names are held by value, as in the host."""

from nemo_rl.distributed.model_utils import (
    from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs_packed_sequences,
)

__all__ = ["from_parallel_logits_to_logprobs", "from_parallel_logits_to_logprobs_packed_sequences", "post_process"]


def apply_temperature_scaling(logits, sampling_params):
    if sampling_params is not None and sampling_params.temperature != 1.0:
        logits.div_(sampling_params.temperature)
    return logits


def post_process(output_tensor, sampling_params):
    """``[B, S, V']`` logits; or ``[B, S - 1]`` log-probs of the fused head, which the division is not meant for."""
    apply_temperature_scaling(output_tensor, sampling_params)
    return output_tensor


def model_forward(
    model,
    data_dict,
    input_ids_cp_sharded,
    position_ids,
    attention_mask,
    packed_seq_params=None,
    defer_fp32_logits=False,
    mtp_loss_mask=None,
    straggler_timer=None,
    use_fused_linear_logprobs=False,
    media_token_validity_mask=None,
):
    return model(input_ids_cp_sharded, position_ids, attention_mask)
