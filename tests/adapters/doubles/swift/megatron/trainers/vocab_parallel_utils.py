"""Log-probs and entropies, each rank looking at whole rows; a label of -100 has log-prob 0, and an entropy."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

mpu = SimpleNamespace(
    get_tensor_model_parallel_group=lambda: None,
    get_tensor_model_parallel_rank=lambda: 0,
    get_tensor_model_parallel_world_size=lambda: 1,
)


def _whole_rows(logits):
    group = mpu.get_tensor_model_parallel_group()
    if mpu.get_tensor_model_parallel_world_size() == 1:
        return logits
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.detach().contiguous(), group=group)
    parts[group.rank()] = logits
    return torch.cat(parts, dim=-1)


def compute_logps_and_entropy_from_logits(logits, labels, compute_entropy=False, entropy_chunk_size=512):
    log_p = _whole_rows(logits).log_softmax(-1)
    logps = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100).float()
    return logps, -(log_p.exp() * log_p).sum(-1) if compute_entropy else None
