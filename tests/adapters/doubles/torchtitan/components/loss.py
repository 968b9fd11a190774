"""Log-probs and entropies from whole logits; shards of columns are gathered first."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate

spmd = SimpleNamespace(is_type_checking=lambda: False)
_mesh = None


def get_spmd_backend():
    return "spmd_types"


def current_spmd_mesh():
    return _mesh


def spmd_mesh_size(axis_name):
    return 1 if _mesh is None else _mesh[axis_name].size()


def _whole(logits, mesh):
    parts = torch.distributed.nn.functional.all_gather(logits.contiguous(), group=mesh.get_group("tp"))
    return torch.cat([x if i == mesh["tp"].get_local_rank() else x.detach() for i, x in enumerate(parts)], -1)


def compute_logprobs(logits, labels, *, return_entropy=False):
    if isinstance(logits, DTensor):
        last = logits.ndim - 1
        to = [Replicate() if p.is_shard(last) or p.is_partial() else p for p in logits.placements]
        logits = logits.redistribute(placements=to).to_local()
    elif spmd_mesh_size("tp") > 1:
        logits = _whole(logits, _mesh)
    logits = logits.float()
    logprobs = -F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
    if not return_entropy:
        return logprobs
    log_p = logits.detach().log_softmax(-1)
    return logprobs, -(log_p.exp() * log_p).sum(-1)
