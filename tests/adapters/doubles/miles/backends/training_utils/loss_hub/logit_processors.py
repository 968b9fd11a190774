"""From logits of a pack, or of padded lines, to one tensor per sample."""

import torch
import torch.distributed as dist

from miles.backends.training_utils.loss_hub.math_utils import calculate_log_probs_and_entropy
from miles.backends.training_utils.parallel import get_parallel_state


class _Sum(torch.autograd.Function):
    """Sum over ranks whose losses add up, so that their gradients do too."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _zigzag(span, total, response):
    """``(offset in the local sample, offset in the sample)`` of the response rows that this rank holds."""
    cp = get_parallel_state().cp
    chunk = -(-span // (2 * cp.size))
    starts = (cp.rank * chunk, (2 * cp.size - 1 - cp.rank) * chunk)
    held = [(half * chunk + t, start + t) for half, start in enumerate(starts) for t in range(chunk)]
    return [(here, t) for here, t in held if total - response - 1 <= t < total - 1], 2 * chunk


def _places(args, count, total_lengths, response_lengths, max_seq_lens):
    """Per sample: its response rows among the local ones, and their places in the response."""
    cp, base, samples = get_parallel_state().cp, 0, []
    for i, (total, response) in enumerate(zip(total_lengths, response_lengths, strict=False)):
        span = total if args.qkv_format == "thd" else max_seq_lens[i]
        if cp.size > 1 and not args.allgather_cp:
            rows, length = _zigzag(span, total, response)
        else:
            rows, length = [(t, t) for t in range(total - response - 1, total - 1)], span
        first = cp.rank * count if cp.size > 1 and args.allgather_cp else 0
        kept = [(base + here - first, t - (total - response) + 1) for here, t in rows]
        samples.append([(here, place) for here, place in kept if 0 <= here < count])
        base += length
    return samples


def _to_zigzag(results, places, total_lengths, response_lengths):
    """Whole responses by a differentiable sum over the context-parallel ranks, then this rank's zigzag part."""
    for key, values in results.items():
        parts = []
        for value, rows, response in zip(values, places, response_lengths, strict=True):
            at = torch.tensor([place for _, place in rows], dtype=torch.long)
            # A rank without rows takes part in the sum of gradients.
            part = value.new_zeros(response, requires_grad=value.requires_grad or not len(value))
            parts.append(part.index_add(0, at, value))
        whole = _Sum.apply(torch.cat(parts), get_parallel_state().cp.group).split(list(response_lengths))
        results[key] = []
        for part, total, response in zip(whole, total_lengths, response_lengths, strict=True):
            mine = [t - (total - response) + 1 for _, t in _zigzag(total, total, response)[0]]
            results[key].append(part[torch.tensor(mine, dtype=torch.long)])


def _rows(logits, args, total_lengths, response_lengths, max_seq_lens):
    flat = logits.reshape(-1, logits.shape[-1])
    if logits.shape[-1] > 1 and args.rollout_temperature > 0:
        flat = flat / args.rollout_temperature
    places = _places(args, len(flat), total_lengths, response_lengths, max_seq_lens)
    return [flat[torch.tensor([here for here, _ in rows], dtype=torch.long)] for rows in places], places


def get_log_probs_and_entropy(
    logits,
    *,
    args,
    unconcat_tokens,
    total_lengths,
    response_lengths,
    with_entropy=False,
    entropy_requires_grad=True,
    non_loss_data=True,
    max_seq_lens=None,
):
    per_sample, places = _rows(logits, args, total_lengths, response_lengths, max_seq_lens)
    results = {"log_probs": []} | ({"entropy": []} if with_entropy else {})
    for i, (rows, at) in enumerate(zip(per_sample, places, strict=True)):
        response = unconcat_tokens[i][-response_lengths[i] :]
        targets = response[torch.tensor([place for _, place in at], dtype=torch.long)]
        log_prob, entropy = calculate_log_probs_and_entropy(
            rows,
            targets,
            get_parallel_state().tp.group,
            with_entropy=with_entropy,
            entropy_requires_grad=entropy_requires_grad,
            chunk_size=args.log_probs_chunk_size,
            true_on_policy=args.true_on_policy_mode,
        )
        results["log_probs"].append(log_prob.reshape(-1))
        if with_entropy:
            results["entropy"].append(entropy)
    if args.allgather_cp and get_parallel_state().cp.size > 1:
        _to_zigzag(results, places, total_lengths, response_lengths)
    return results


def get_values(
    logits,
    *,
    args,
    unconcat_tokens,
    total_lengths,
    response_lengths,
    with_entropy=False,
    non_loss_data=True,
    max_seq_lens=None,
):
    per_sample, places = _rows(logits, args, total_lengths, response_lengths, max_seq_lens)
    results = {"values": [rows.squeeze(-1).float() for rows in per_sample]}
    if args.allgather_cp and get_parallel_state().cp.size > 1:
        _to_zigzag(results, places, total_lengths, response_lengths)
    return results
