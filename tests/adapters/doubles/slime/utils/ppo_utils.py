"""Log-probs and entropy from vocabulary-parallel logits.

Every rank of the tensor-parallel group looks at whole rows, the columns of its peers as constants: each goes on to the
same loss and differentiates its own columns.
"""

import torch
import torch.distributed as dist


def _whole_rows(logits, group):
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.detach().contiguous(), group=group)
    parts[group.rank()] = logits
    return torch.cat(parts, dim=-1)


def calculate_log_probs_and_entropy(
    logits, tokens, tp_group, with_entropy=False, chunk_size=-1, log_prob_keep_mask=None, with_entropy_grad=True
):
    """``[N, 1]`` log-probs (``(0,)`` without rows) and ``[N]`` entropies or None."""
    if not len(logits):
        nothing = logits.new_zeros((0,))
        return nothing, nothing.clone() if with_entropy else None
    size = chunk_size if chunk_size > 0 else len(logits)
    log_probs, entropies = [], []
    for first in range(0, len(logits), size):
        rows = _whole_rows(logits[first : first + size], tp_group)
        target = tokens[first : first + size]
        full = rows.log_softmax(-1)
        kept = full
        if log_prob_keep_mask is not None:
            keep = _whole_rows(log_prob_keep_mask[first : first + size].to(rows.dtype), tp_group) > 0
            keep[torch.arange(len(target)), target] = True
            kept = rows.masked_fill(~keep, -torch.inf).log_softmax(-1)
        known = (target >= 0) & (target < rows.shape[-1])
        # An id outside the vocabulary quietly scores as the likeliest token.
        at = torch.where(known, target, full.detach().argmax(-1))
        log_probs.append(kept.gather(-1, at[:, None]))
        entropies.append(-(full.exp() * full).sum(-1))
    if not with_entropy:
        return torch.cat(log_probs), None
    entropy = torch.cat(entropies)
    return torch.cat(log_probs), entropy if with_entropy_grad else entropy.detach()
