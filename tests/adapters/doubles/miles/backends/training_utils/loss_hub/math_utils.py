"""Log-probs and entropy from vocabulary-parallel logits, each rank looking at whole rows."""

import torch
import torch.distributed as dist


def _whole_rows(logits, group):
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.detach().contiguous(), group=group)
    parts[group.rank()] = logits
    return torch.cat(parts, dim=-1)


def calculate_log_probs_and_entropy(
    logits,
    tokens,
    tp_group,
    with_entropy=False,
    entropy_requires_grad=True,
    chunk_size=-1,
    true_on_policy=False,
    vocab_size=None,
):
    """``[N, 1]`` log-probs (``(0,)`` without rows) and ``[N]`` entropies or None; true on policy, ``[N]`` log-probs."""
    if not len(logits):
        nothing = logits.new_zeros((0,))
        return nothing, nothing.clone() if with_entropy else None
    rows = logits if tp_group is None else _whole_rows(logits, tp_group)
    rows = rows[..., :vocab_size] if true_on_policy else rows.float()
    log_p = rows.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    log_prob = log_p.gather(-1, tokens[:, None])
    if not with_entropy:
        return log_prob[:, 0] if true_on_policy else log_prob, None
    entropy = entropy if entropy_requires_grad else entropy.detach()
    return log_prob[:, 0] if true_on_policy else log_prob, entropy
