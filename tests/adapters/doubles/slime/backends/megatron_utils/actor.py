"""The passes without gradients. The names are held by value, as in the host."""

import torch

from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, get_values


def compute_log_prob(args, batch, logits):
    with torch.no_grad():
        return get_log_probs_and_entropy(logits, args=args, **batch)[1]["log_probs"]


def compute_values(args, batch, outputs):
    with torch.no_grad():
        return get_values(outputs, args=args, **batch)[1]["values"]
