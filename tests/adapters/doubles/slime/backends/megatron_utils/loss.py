"""From packed logits to one tensor per sample, and the losses that use them."""

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from megatron.core import mpu

from slime.utils.ppo_utils import calculate_log_probs_and_entropy


class _Sum(torch.autograd.Function):
    """Sum over a group of ranks whose losses add up, so that their gradients do too."""

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


def _cuts(total_length, response_length, rank, size):
    """The two windows of global rows that a zigzag rank holds and the response needs, and its chunk length."""
    chunk = -(-total_length // (2 * size))
    windows = []
    for start in (rank * chunk, (2 * size - 1 - rank) * chunk):
        first = max(start, total_length - response_length - 1)
        stop = min(start + chunk, total_length - 1)
        windows.append((start, first, stop) if first < stop else (start, start, start))
    return chunk, windows


def _local_rows(count, args, total_lengths, response_lengths):
    """Per sample: where its response rows lie among ``count`` local ones, and their places in the response."""
    size, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    samples, base = [], 0
    for total, response in zip(total_lengths, response_lengths, strict=False):
        prompt, rows = total - response, []
        if size > 1 and not args.allgather_cp:
            chunk, windows = _cuts(total, response, rank, size)
            for half, (start, first, stop) in enumerate(windows):
                rows += [(base + half * chunk + t - start, t - prompt + 1) for t in range(first, stop)]
            base += 2 * chunk
        else:
            window = (rank * count, (rank + 1) * count) if args.allgather_cp else (0, count)
            for t in range(base + prompt - 1, base + total - 1):
                if window[0] <= t < window[1]:
                    rows.append((t - window[0], t - base - prompt + 1))
            base += total
        samples.append(rows)
    return samples


def _to_zigzag(results, places, total_lengths, response_lengths):
    """Whole responses by a differentiable sum over the context-parallel ranks, then this rank's zigzag part."""
    size, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    for key, values in results.items():
        parts = []
        for value, rows, response in zip(values, places, response_lengths, strict=False):
            part = value.new_zeros(response, requires_grad=value.requires_grad)
            parts.append(part.index_add(0, torch.tensor([p for _, p in rows], dtype=torch.long), value))
        whole = _Sum.apply(torch.cat(parts), mpu.get_context_parallel_group())
        results[key] = []
        responses = whole.split(list(response_lengths))
        for part, total, response in zip(responses, total_lengths, response_lengths, strict=False):
            first = total - response - 1
            _, windows = _cuts(total, response, rank, size) if size > 1 else (0, [(0, first, total - 1)])
            results[key].append(torch.cat([part[a - first : b - first] for _, a, b in windows if a < b] or [part[:0]]))


def _check(logits):
    assert logits.dtype == torch.float32, f"{logits.dtype}"
    assert logits.dim() == 3, f"{logits.shape}"
    assert logits.size(0) == 1, f"{logits.shape}"


def get_log_probs_and_entropy(
    logits,
    *,
    args,
    unconcat_tokens,
    total_lengths,
    response_lengths,
    with_entropy=False,
    non_loss_data=True,
    top_p_token_ids=None,
    top_p_token_offsets=None,
):
    _check(logits)
    rows = logits[0] / args.rollout_temperature
    places = _local_rows(len(rows), args, total_lengths, response_lengths)
    targets = torch.zeros(len(rows), dtype=torch.long)
    keep = None if top_p_token_ids is None else torch.ones(rows.shape, dtype=torch.bool)
    first = mpu.get_tensor_model_parallel_rank() * rows.shape[1]
    for i, (tokens, total, response) in enumerate(zip(unconcat_tokens, total_lengths, response_lengths, strict=False)):
        for row, place in places[i]:
            targets[row] = tokens[total - response + place]
            if keep is None or place + 1 >= len(top_p_token_offsets[i]):
                continue
            start, stop = (int(x) for x in top_p_token_offsets[i][place : place + 2])
            ids = torch.as_tensor(top_p_token_ids[i][start:stop], dtype=torch.long) - first
            keep[row] = False
            keep[row, ids[(ids >= 0) & (ids < rows.shape[1])]] = True
    log_prob, entropy = calculate_log_probs_and_entropy(
        rows,
        targets,
        mpu.get_tensor_model_parallel_group(),
        with_entropy=with_entropy,
        with_entropy_grad=with_entropy and args.entropy_coef != 0,
        chunk_size=args.log_probs_chunk_size,
        log_prob_keep_mask=keep,
    )
    fields = {"log_probs": log_prob.squeeze(-1)} | ({"entropy": entropy} if with_entropy else {})
    results = {key: [x[[row for row, _ in rows]] for rows in places] for key, x in fields.items()}
    if args.allgather_cp:
        _to_zigzag(results, places, total_lengths, response_lengths)
    return torch.empty((0,)), results


def get_values(
    logits,
    *,
    args,
    unconcat_tokens,
    total_lengths,
    response_lengths,
    with_entropy=False,
    non_loss_data=True,
):
    _check(logits)
    places = _local_rows(logits.shape[1], args, total_lengths, response_lengths)
    results = {"values": [logits[0, [row for row, _ in rows], 0] for rows in places]}
    if args.allgather_cp:
        _to_zigzag(results, places, total_lengths, response_lengths)
    return torch.empty((0,)), results


def policy_loss_function(args, batch, logits, sum_of_sample_mean):
    replay = {}
    if args.rollout_top_p != 1.0:
        replay = {f"top_p_token_{name}": batch[f"rollout_top_p_token_{name}"] for name in ("ids", "offsets")}
    _, results = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
        **replay,
    )
    log_probs, entropy = torch.cat(results["log_probs"]), torch.cat(results["entropy"])
    old = torch.cat(batch["rollout_log_probs"] if args.use_rollout_logprobs else batch["log_probs"])
    ratio = (log_probs - old).exp()
    clipped = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
    advantages = torch.cat(batch["advantages"])
    loss = sum_of_sample_mean(torch.maximum(-ratio * advantages, -clipped * advantages))
    entropy_loss = sum_of_sample_mean(entropy)
    return loss - args.entropy_coef * entropy_loss, {"pg_loss": loss.detach(), "entropy": entropy_loss.detach()}


def sft_loss_function(args, batch, logits, sum_of_sample_mean):
    _, results = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    loss = -sum_of_sample_mean(torch.cat(results["log_probs"]))
    return loss, {"loss": loss.detach()}


def loss_function(args, batch, num_microbatches, step_global_batch_size, logits):
    size, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    masks = []
    lengths = zip(batch["total_lengths"], batch["response_lengths"], strict=True)
    for mask, (total, response) in zip(batch["loss_masks"], lengths, strict=True):
        first = total - response - 1
        _, windows = _cuts(total, response, rank, size) if size > 1 else (0, [(0, first, total - 1)])
        masks.append(torch.cat([mask[a - first : b - first] for _, a, b in windows if a < b] or [mask[:0]]))

    def sum_of_sample_mean(x):
        parts = zip(x.split([len(m) for m in masks]), masks, batch["loss_masks"], strict=True)
        return sum((part * mask).sum() / whole.sum().clamp_min(1) for part, mask, whole in parts)

    function = {"policy_loss": policy_loss_function, "sft_loss": sft_loss_function}[args.loss_type]
    if args.recompute_loss_function:
        inputs = (args, batch, logits, sum_of_sample_mean)
        loss, log = torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False)
    else:
        loss, log = function(args, batch, logits, sum_of_sample_mean)
    if args.allgather_cp and size > 1:
        loss = loss + 0 * logits.sum()
    return loss * num_microbatches / step_global_batch_size, torch.tensor(1), log
