"""Next-token log-probs from logits or hidden states that are cut over ranks.

Over a tensor-parallel group every rank looks at whole rows, the columns of its peers as constants. Over a
context-parallel group results are gathered, and their gradients summed.
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from nemo_rl.algorithms.logits_sampling_utils import apply_top_k_top_p, need_top_k_or_top_p_filtering


def _whole_rows(logits, group):
    parts = [torch.empty_like(logits, requires_grad=False) for _ in range(group.size())]
    dist.all_gather(parts, logits.detach().contiguous(), group=group)
    parts[group.rank()] = logits
    return torch.cat(parts, dim=-1)


def _scored(logits, target, group, sampling_params, inference_only):
    rows = _whole_rows(logits.float(), group)
    outside = (target < 0) | (target >= rows.shape[-1])
    if need_top_k_or_top_p_filtering(sampling_params):
        if rows.shape[:-1].numel() % group.size():
            raise ValueError("B*S must be divisible by the tensor parallel size for top-k and top-p")
        rows = apply_top_k_top_p(rows, sampling_params.top_k, sampling_params.top_p)[0]
    chosen = rows.gather(-1, target.masked_fill(outside, 0).unsqueeze(-1)).squeeze(-1)
    log_z = rows.logsumexp(-1)
    # An id outside the vocabulary scores 0, though the normaliser is still differentiated.
    result = torch.where(outside, log_z.detach() - log_z, chosen - log_z)
    return result.detach() if inference_only else result


class _Gather(torch.autograd.Function):
    """Zigzag parts of a sequence in order on every rank; gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group, ctx.dim, size = group, dim, group.size()
        parts = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(parts, x.contiguous(), group=group)
        chunks = [None] * (2 * size)
        for rank, part in enumerate(parts):
            chunks[rank], chunks[2 * size - 1 - rank] = part.chunk(2, dim=dim)
        return torch.cat(chunks, dim=dim)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return _mine(total, ctx.group, ctx.dim), None, None


def _mine(x, group, dim):
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    if size == 1:
        return x
    chunks = x.chunk(2 * size, dim=dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=dim)


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits,
    target,
    vocab_start_index,
    vocab_end_index,
    tp_group,
    inference_only=False,
    cp_group=None,
    chunk_size=None,
    sampling_params=None,
):
    size = 1 if cp_group is None else cp_group.size()
    missing = vocab_parallel_logits.shape[1] * size - target.shape[1]
    shifted = torch.nn.functional.pad(target.roll(-1, dims=-1), (0, missing))
    local = _mine(shifted, cp_group, 1)
    values = _scored(vocab_parallel_logits, local, tp_group, sampling_params, inference_only)
    values = values if size == 1 else _Gather.apply(values, cp_group, 1)
    return values[:, : target.shape[1] - 1]


def from_parallel_logits_to_logprobs_packed_sequences(
    vocab_parallel_logits,
    target,
    cu_seqlens_padded,
    unpacked_seqlen,
    vocab_start_index,
    vocab_end_index,
    group,
    inference_only=False,
    cp_group=None,
    chunk_size=None,
    sampling_params=None,
    target_is_pre_rolled=False,
):
    size = 1 if cp_group is None else cp_group.size()
    lengths = cu_seqlens_padded.diff().tolist()
    if not target_is_pre_rolled:
        target = torch.cat([_mine(ids.roll(-1), cp_group, 0) for ids in target[0].split(lengths)])[None]
    values = _scored(vocab_parallel_logits, target, group, sampling_params, inference_only)[0]
    lines = []
    for part in values.split([n // size for n in lengths]):
        whole = part if size == 1 else _Gather.apply(part, cp_group, 0)
        line = whole[: max(len(whole) - 1, 0)][: unpacked_seqlen - 1]
        lines.append(torch.nn.functional.pad(line, (0, unpacked_seqlen - 1 - len(line))))
    return torch.stack(lines)


def dtensor_from_parallel_logits_to_logprobs(
    vocab_parallel_logits,
    target,
    vocab_start_index,
    vocab_end_index,
    tp_group,
    inference_only=False,
    seq_index=None,
    chunk_size=None,
    sampling_params=None,
):
    if not isinstance(target, DTensor):
        values = _scored(vocab_parallel_logits, target.roll(-1, dims=-1), tp_group, sampling_params, inference_only)
        return values[:, :-1]
    assert seq_index is not None, "seq_index is needed under context parallelism"
    in_order = torch.empty_like(seq_index)
    in_order[seq_index] = torch.arange(len(seq_index))
    shifted = target.full_tensor()[:, in_order].roll(-1, dims=-1)[:, seq_index]
    local = distribute_tensor(shifted, target.device_mesh, target.placements).to_local()
    values = _scored(vocab_parallel_logits, local, tp_group, sampling_params, inference_only)
    return DTensor.from_local(values, target.device_mesh, target.placements).full_tensor()[:, in_order][:, :-1]


def get_next_token_logprobs_from_logits(
    input_ids,
    next_token_logits,
    seq_index=None,
    vocab_parallel_rank=None,
    vocab_parallel_group=None,
    context_parallel_group=None,
    sampling_params=None,
    chunk_size=None,
):
    logits = next_token_logits.to(torch.float32)
    if vocab_parallel_group is not None:
        width = logits.shape[-1]
        return from_parallel_logits_to_logprobs(
            logits,
            input_ids,
            vocab_start_index=vocab_parallel_rank * width,
            vocab_end_index=(vocab_parallel_rank + 1) * width,
            tp_group=vocab_parallel_group,
            cp_group=context_parallel_group,
            sampling_params=sampling_params,
        )
    if isinstance(logits, DTensor):
        group = logits.device_mesh.get_group("tp")
        width = logits.to_local().shape[-1]
        return dtensor_from_parallel_logits_to_logprobs(
            logits.to_local(),
            input_ids,
            group.rank() * width,
            (group.rank() + 1) * width,
            group,
            seq_index=seq_index,
            sampling_params=sampling_params,
        )
    rows = logits[:, :-1]
    if sampling_params is not None:
        rows = apply_top_k_top_p(rows, sampling_params.top_k, sampling_params.top_p)[0]
    return rows.log_softmax(-1).gather(-1, input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)


class _GatherTokens(torch.autograd.Function):
    """``[S / TP, B, H]`` of all ranks as ``[S, B, H]``; gradients are summed and cut again."""

    @staticmethod
    def forward(ctx, hidden, group):
        ctx.group = group
        parts = [torch.empty_like(hidden) for _ in range(group.size())]
        dist.all_gather(parts, hidden.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None


def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states,
    output_weight_layer,
    runtime_gather_output,
    target,
    vocab_start_index,
    vocab_end_index,
    tp_group,
    inference_only=False,
    cp_group=None,
    chunk_size=None,
):
    assert cp_group is None or cp_group.size() == 1, "no context parallelism here"
    hidden = _GatherTokens.apply(tensor_parallel_hidden_states, tp_group)
    logits = (hidden @ output_weight_layer.T).transpose(0, 1)
    return _scored(logits, target.roll(-1, dims=-1), tp_group, None, inference_only)[:, :-1]


def _saved(ctx, logits, target, start, group, inference_only):
    rows = _whole_rows(logits.float(), group)
    outside = (target < 0) | (target >= rows.shape[-1])
    log_p = rows.log_softmax(-1)
    chosen = log_p.gather(-1, target.masked_fill(outside, 0).unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0.0)
    if inference_only:
        ctx.mark_non_differentiable(chosen)
    else:
        columns = torch.arange(start, start + logits.shape[-1])
        one = (columns == target.unsqueeze(-1)).float()
        ctx.save_for_backward(one - log_p[..., start : start + logits.shape[-1]].exp())
        ctx.dtype = logits.dtype
    return chosen


class DistributedLogprob(torch.autograd.Function):
    """Log-probs of targets that the caller has shifted."""

    @staticmethod
    def forward(ctx, vocab_parallel_logits, target, vocab_start_index, vocab_end_index, group, inference_only=False):
        return _saved(ctx, vocab_parallel_logits, target, vocab_start_index, group, inference_only)

    @staticmethod
    def backward(ctx, gradient):
        return (ctx.saved_tensors[0] * gradient.unsqueeze(-1)).to(ctx.dtype), *[None] * 5


class ChunkedDistributedLogprob(torch.autograd.Function):
    """The same, some positions at a time."""

    @staticmethod
    def forward(
        ctx,
        vocab_parallel_logits,
        target,
        vocab_start_index,
        vocab_end_index,
        chunk_size,
        tp_group,
        inference_only=False,
    ):
        return _saved(ctx, vocab_parallel_logits, target, vocab_start_index, tp_group, inference_only)

    @staticmethod
    def backward(ctx, gradient):
        return (ctx.saved_tensors[0] * gradient.unsqueeze(-1)).to(ctx.dtype), *[None] * 6


class ChunkedDistributedEntropy(torch.autograd.Function):
    """Sum of p log p: minus the entropy."""

    @staticmethod
    def forward(ctx, vocab_parallel_logits, chunk_size, tp_group, inference_only=False):
        log_p = _whole_rows(vocab_parallel_logits.float(), tp_group).log_softmax(-1)
        result = (log_p.exp() * log_p).sum(-1)
        if inference_only:
            ctx.mark_non_differentiable(result)
        else:
            first = tp_group.rank() * vocab_parallel_logits.shape[-1]
            mine = log_p[..., first : first + vocab_parallel_logits.shape[-1]]
            ctx.save_for_backward(mine.exp() * (mine - result.unsqueeze(-1)))
            ctx.dtype = vocab_parallel_logits.dtype
        return result

    @staticmethod
    def backward(ctx, gradient):
        return (ctx.saved_tensors[0] * gradient.unsqueeze(-1)).to(ctx.dtype), None, None, None


class DistributedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, student_logits, target_logits, group, inference_only=False):
        def whole(x):
            parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, x.contiguous(), group=group)
            return torch.cat(parts, -1)

        z, y = (whole(x.float()) for x in (student_logits, target_logits))
        ctx.save_for_backward(y.softmax(-1), z.softmax(-1))
        ctx.start = dist.get_rank(group) * student_logits.shape[-1]
        ctx.width, ctx.dtype = student_logits.shape[-1], student_logits.dtype
        return -(y.softmax(-1) * z.log_softmax(-1)).sum(-1)

    @staticmethod
    def backward(ctx, grad):
        target, student = ctx.saved_tensors
        own = slice(ctx.start, ctx.start + ctx.width)
        return ((student - target)[..., own] * grad[..., None]).to(ctx.dtype), None, None, None


class ChunkedDistributedGatherLogprob(torch.autograd.Function):
    """Log-probs over the vocabulary of several ids of every position."""

    @staticmethod
    def forward(
        ctx,
        vocab_parallel_logits,
        global_indices,
        vocab_start_index,
        vocab_end_index,
        chunk_size,
        tp_group,
        inference_only=False,
    ):
        log_p = _whole_rows(vocab_parallel_logits.float(), tp_group).log_softmax(-1)
        if not inference_only:
            ctx.save_for_backward(log_p[..., vocab_start_index:vocab_end_index].exp(), global_indices)
            ctx.start, ctx.stop = vocab_start_index, vocab_end_index
        return log_p.gather(-1, global_indices)

    @staticmethod
    def backward(ctx, gradient):
        p, ids = ctx.saved_tensors
        here = (ids >= ctx.start) & (ids < ctx.stop)
        found = -p * gradient.sum(-1, keepdim=True)
        found.scatter_add_(-1, (ids - ctx.start).clamp(0, p.shape[-1] - 1), gradient * here)
        return found, *[None] * 6


def get_distillation_topk_logprobs_from_logits(
    student_logits,
    teacher_topk_logits,
    teacher_topk_indices,
    zero_outside_topk,
    calculate_entropy,
    vocab_parallel_rank=None,
    vocab_parallel_group=None,
    context_parallel_group=None,
):
    """Of the ids that a teacher sent: the student's and the teacher's log-probs, and the student's sum of p log p."""
    logits, ids, negative_entropy = student_logits.to(torch.float32), teacher_topk_indices, None
    group, cp, width = vocab_parallel_group, context_parallel_group, logits.shape[-1]
    size = 1 if cp is None else cp.size()
    missing = logits.shape[1] * size - ids.shape[1]
    local = _mine(torch.nn.functional.pad(ids, (0, 0, 0, missing)), cp, 1) if size > 1 else ids
    if group is None:
        log_p = logits.log_softmax(-1)
        own = (log_p if zero_outside_topk else logits).gather(-1, local)
        negative_entropy = (log_p.exp() * log_p).sum(-1) if calculate_entropy else None
    elif zero_outside_topk:
        start = vocab_parallel_rank * width
        own = ChunkedDistributedGatherLogprob.apply(logits, local, start, start + width, 1024, group, False)
        if calculate_entropy:
            negative_entropy = ChunkedDistributedEntropy.apply(logits, 1024, group, False)
    else:
        own = _whole_rows(logits, group).gather(-1, local)
    if size > 1:
        own = _Gather.apply(own, cp, 1)[:, : ids.shape[1]]
        if negative_entropy is not None:
            negative_entropy = _Gather.apply(negative_entropy, cp, 1)[:, : ids.shape[1]]
    own = own if zero_outside_topk else own.log_softmax(-1)
    other = teacher_topk_logits.to(own.dtype).log_softmax(-1)
    return own[:, :-1], other[:, :-1], None if negative_entropy is None else negative_entropy[:, :-1]
