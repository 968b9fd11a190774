"""torchtitan: the log-probs and entropies of its RL losses, without gathering the vocabulary.

    compute_logprobs(logits [T, V], labels [T], return_entropy)     float32 [T] and, as a metric, entropies [T]
    PolicyTrainer._build_model(...)     the head of the model is deferred, unless the loss multiplies chunks of tokens

Logits are whole; or a DTensor whose columns are sharded; or, under the spmd_types backend, a plain shard of columns.
The loss must be the same on every rank of the tensor-parallel group, as torchtitan's is. Calls left to torchtitan and
counted as passed on: DTensors with other placements, and runs that check spmd types, which our results do not have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard

from logitless.adapters.host import Host, PassOn
from logitless.adapters.replacing import Options, replaces
from logitless.adapters.scoring import score, score_with_all_entropies
from logitless.adapters.shards import check_ids, cut_shard, even_shard
from logitless.spec import VocabShard

MODULE = "torchtitan.components.loss"


@replaces(MODULE)
def compute_logprobs(options: Options, logits: Tensor, labels: Tensor, *, return_entropy: bool = False) -> Any:
    part = _part(logits)
    if isinstance(part, PassOn):
        return part
    columns, shard = part
    check_ids("labels", labels, tuple(columns.shape[:-1]))
    where, audit = "compute_logprobs", options["audit"]
    if not return_entropy:
        return score(where, columns, labels, audit, shard=shard).logprob.float()
    out = score_with_all_entropies(where, columns, labels, audit, shard=shard, entropy="value")
    assert out.entropy is not None
    return out.logprob.float(), out.entropy.float()


def _part(logits: Tensor) -> tuple[Tensor, VocabShard | None] | PassOn:
    """This rank's columns and which they are; or why torchtitan's own function is to be called."""
    titan = sys.modules[MODULE]
    if isinstance(logits, DTensor):
        return _part_of_dtensor(logits)
    if titan.get_spmd_backend() != "spmd_types":
        return logits, None
    if titan.spmd.is_type_checking():
        return PassOn("spmd types are checked")
    if titan.spmd_mesh_size("tp") == 1:
        return logits, None
    return logits, even_shard(titan.current_spmd_mesh().get_group("tp"), logits.shape[-1])


def _part_of_dtensor(logits: DTensor) -> tuple[Tensor, VocabShard | None] | PassOn:
    mesh, width = logits.device_mesh, logits.shape[-1]
    over = [i for i, p in enumerate(logits.placements) if p.is_shard() and p.dim in (-1, logits.ndim - 1)]  # pyright: ignore[reportAttributeAccessIssue]
    plain = all(type(logits.placements[i]) is Shard for i in over)
    if len(over) > 1 or not plain or any(isinstance(p, Partial) for p in logits.placements):
        return PassOn("placements")
    if not over:
        return logits.to_local(), None
    return logits.to_local(), cut_shard(mesh.get_group(over[0]), width)


@replaces(
    "torchtitan.experiments.rl.actors.trainer",
    "PolicyTrainer._build_model",
    "(self, model_spec, config, device_type)",
    optional=True,
)
def _build_model(original: Callable[..., Any], options: Options, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Builds the policy, after its loss."""
    model = original(self, *args, **kwargs)
    # It multiplies a chunk of tokens with the head and goes back before the next, with one product less than
    # deferred logits.
    if not isinstance(self.loss_fn, sys.modules[MODULE].ChunkedLossWrapper):
        options["heads"].defer(model)
    return model


HOST = Host(
    name="torchtitan",
    package="torchtitan",
    versions=("0.3",),
    replacements=lambda _: [compute_logprobs],
    heads=lambda _: [_build_model],
    logits="deferred",
)
