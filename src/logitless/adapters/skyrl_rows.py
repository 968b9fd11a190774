"""SkyRL's rows: scored from logits, computed or not, checked, and put where SkyRL wants the results."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.adapters.megatron import check_head
from logitless.adapters.packs import Batch, ranks_in, with_target
from logitless.adapters.replacing import Options, held, replaces
from logitless.adapters.scoring import HALF, every_target, without_graph
from logitless.adapters.shards import check_ids, shard_between, vocabulary_of
from logitless.errors import LogitlessError
from logitless.operands import Logits
from logitless.rows import Rows
from logitless.rows.exchange import GradRule
from logitless.score import logprobs
from logitless.seams import placed, without_outside
from logitless.spec import EntropyMode, Head, TokenStats, VocabShard

MODEL_UTILS = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
MEGATRON_WRAPPER = "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper"

_actions: ContextVar[int | None] = ContextVar("num_actions", default=None)
"""How many results at the end of every line SkyRL's Megatron worker reads, while it runs."""


PASS = "(self, micro_batches, seq_len, micro_batch_size, temperature=1.0"


@replaces(MEGATRON_WRAPPER, "MegatronModelWrapper.forward", f"{PASS})", optional=True)
def with_actions(
    original: Callable[..., Any], self: Any, micro_batches: list[dict[str, Any]], *args: Any, **kwargs: Any
) -> Any:
    """A pass of the worker, which cuts the last ``num_actions`` out of every log-prob."""
    if getattr(self, "_fused_lm_head", False):
        check_head("fused_lm_head_logprob", getattr(self.actor_module[0], "config", None))
    read = [int(batch["num_actions"]) for batch in micro_batches]
    with held(_actions, max(read, default=None)):
        return original(self, micro_batches, *args, **kwargs)


TRAINING = f"{PASS}, loss_fn=None, loss_fn_config=None, forward_only=False"
both_passes = replace(
    with_actions,
    name="MegatronModelWrapper.forward_backward_mini_batch",
    signature={"0.4": f"{TRAINING}, return_per_token_outputs=True)", "0.3": f"{TRAINING})"},
)


def read_results() -> int | None:
    """Results at the end of every line that are read; None for all."""
    return _actions.get()


def weigh_read(device: torch.device) -> Callable[[tuple[int, int]], Tensor] | None:
    """Weights for :func:`~logitless.adapters.packs.packed_batch`: 1 for results that are read; None for all."""
    last = read_results()
    if last is None:
        return None
    return lambda shape: (torch.arange(shape[1], device=device) >= shape[1] - last).float().expand(shape)


class Source(NamedTuple):
    """The logits of a call, computed or not, and how they are scored."""

    where: str
    logits: Tensor
    options: Options
    temperature: float = 1.0

    def score(self, rows: Rows, shard: VocabShard | None, entropy: EntropyMode = None) -> TokenStats:
        operand, head = placed(self.logits, shard), Head(temperature=self.temperature)
        memory = self.options["memory"] if isinstance(self.logits, Logits) else None
        out = logprobs(operand, rows, entropy=entropy, head=head, memory=memory)
        if self.options["audit"]:
            seen = {"logprob": out.logprob, "entropy": out.entropy}
            seen = {name: None if x is None else rows.expand(x.detach()) for name, x in seen.items()}
            self.options["audit"].of_logits(self.where, operand, every_target(rows), **seen, head=head)
        return out


def from_hidden(hidden: Tensor, weight: Tensor, options: Options) -> Logits:
    """The logits of SkyRL's fused head."""
    # As Megatron's output layer does: the head's dtype decides.
    hidden, match = hidden.to(weight.dtype), None if options["accurate"] else HALF.get(weight.dtype)
    return Logits(hidden, weight, hidden_grad="partial", match=match)


Vocabulary = tuple[VocabShard | None, int]
"""This rank's shard, and the number of columns over all ranks."""


def logprobs_of_batch(source: Source, batch: Batch, vocabulary: Vocabulary, grad: GradRule, no_graph: bool) -> Tensor:
    """``[B, S - 1]`` float32 log-probs of the next tokens."""
    with without_graph(no_graph):
        return batch.spread(_logprobs(source, batch.rows, vocabulary), grad)


def logprob_of_every(source: Source, target: Tensor, vocabulary: Vocabulary, no_graph: bool) -> Tensor:
    check_ids("target", target, target.shape)
    with without_graph(no_graph):
        return _logprobs(source, Rows.every(target), vocabulary).view(target.shape)


def _logprobs(source: Source, rows: Rows, vocabulary: Vocabulary) -> Tensor:
    shard, size = vocabulary
    return without_outside(rows.target, size, lambda ids: source.score(with_target(rows, ids), shard)).float()


# Checks.


def check_batch(name: str, x: Tensor, target: Tensor) -> None:
    if x.dim() != 3 or target.dim() != 2 or x.shape[0] != target.shape[0]:
        raise LogitlessError(
            f"{name} must be [B, S / CP, ...] and target [B, S] but they are {list(x.shape)} and {list(target.shape)}."
        )
    check_ids("target", target, target.shape)


def check_pack(name: str, x: Tensor, target: Tensor, cp_group: Any) -> None:
    check_packed_tokens(name, x)
    check_ids("target", target, (1, x.shape[1] * ranks_in(cp_group)))


def check_packed_tokens(name: str, x: Tensor) -> None:
    if x.dim() != 3 or x.shape[0] != 1:
        raise LogitlessError(f"{name} must be [1, T / CP, ...], one pack, but is {list(x.shape)}.")


def vocabulary_between(group: Any, start: int, stop: int, width: int) -> Vocabulary:
    if stop - start != width:
        raise LogitlessError(
            f"vocab_start_index {start} and vocab_end_index {stop} describe {stop - start} columns, not {width}."
        )
    # To SkyRL, as to torch, None is the default group.
    shard = shard_between(dist.group.WORLD if group is None else group, start, stop)
    return shard, vocabulary_of(shard, width)
