"""The teacher's log-probs. The name is held by value, as in the host."""

from slime.backends.megatron_utils.loss import get_log_probs_and_entropy


def teacher_log_probs(args, batch, logits):
    return get_log_probs_and_entropy(logits, args=args, with_entropy=False, **batch)[1]["log_probs"]
