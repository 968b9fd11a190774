"""The losses that read them, as far as a test needs them."""

import torch

from miles.backends.training_utils.loss_hub.logit_processors import get_log_probs_and_entropy, get_values  # noqa: F401


def _scores(args, batch, logits):
    names = ("unconcat_tokens", "total_lengths", "response_lengths")
    lines = batch.get("max_seq_lens")
    scores = get_log_probs_and_entropy(logits, args=args, max_seq_lens=lines, **{name: batch[name] for name in names})
    return torch.cat(scores["log_probs"])


def policy_loss_function(args, batch, logits, sum_of_sample_mean):
    log_probs, old = _scores(args, batch, logits), torch.cat(batch["log_probs"])
    loss = sum_of_sample_mean(-(log_probs - old).exp() * torch.cat(batch["advantages"]))
    return loss, {"loss": loss.clone().detach()}


def sft_loss_function(args, batch, logits, sum_of_sample_mean):
    loss = -sum_of_sample_mean(_scores(args, batch, logits))
    return loss, {"loss": loss.clone().detach()}
