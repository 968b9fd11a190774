"""What slime and miles share: the response rows of a batch, scored over context- and tensor-parallel ranks.

    Parallel          this rank's groups, as the host has them
    Batch             rows that are scored here, and rows whose results are returned here
    Batch.scores      log-probs and entropies, one list of tensors per sample for each
    score_every_row   logits and tokens that the host has already cut
    masked_losses     losses of the host, while ``marked`` tells its loss masks

No host is named here: a host's file says which rows there are, and what its arguments mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.adapters.audit import Audit
from logitless.adapters.expected import Expected, score_expecting
from logitless.adapters.host import Option, Replacement
from logitless.adapters.replacing import Options, held, replaces
from logitless.adapters.scoring import computed, every_target, placed, taken_over, tracked
from logitless.adapters.shards import check_ids, even_shard
from logitless.errors import LogitlessError
from logitless.operands import Kept, Logits, shard_of
from logitless.rows import Rows
from logitless.rows.layouts import Contiguous, Zigzag
from logitless.score import logprobs
from logitless.seams import with_target_kept
from logitless.spec import EntropyMode, Head

OPTIONS = {
    "response_only": Option(True, "score response rows only; False: every row of the batch, as the host does"),
    "loss_mask_only": Option(False, "in training, score only rows whose loss mask is nonzero"),
    "overwrite_logits": Option(False, "backward writes the gradient over the logits, which nobody may read again"),
    "chunk_size": Option(-1, "rows of logits worked on at a time; -1: args.log_probs_chunk_size"),
}
"""Options of ``install`` that both hosts have."""


def options_of(args: Any) -> dict[str, Any]:
    """The options that a run's arguments set, for the hosts' ``--custom-megatron-init-path``."""
    return {
        "response_only": getattr(args, "log_probs_response_only", True),
        "loss_mask_only": getattr(args, "log_probs_loss_mask_only", False),
        "overwrite_logits": getattr(args, "logitless_overwrite_logits", False),
        "logits": getattr(args, "logitless_logits", "deferred"),
        "audit": getattr(args, "logitless_audit", 0),
        "any_version": getattr(args, "logitless_any_version", False),
    }


def check_options(host: str, options: Options) -> None:
    if options["loss_mask_only"] and not options["response_only"]:
        raise LogitlessError(
            f'install("{host}"): loss_mask_only=True selects among response rows: response_only=True too.'
        )


# One row per logit row.


def score_every_row(
    logits: Tensor,
    tokens: Tensor,
    tp_group: Any,
    entropy: EntropyMode,
    chunk_size: int,
    options: Options,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``[N, 1]`` log-probs, ``(0,)`` for no rows, and ``[N]`` entropies. ``keep`` is a mask of the logits' shape.

    Without a ``tp_group`` the logits are whole; see :func:`group_of` for hosts that mean the default group.
    """
    if logits.dim() != 2:
        raise LogitlessError(f"logits must be [N, V'] but is {list(logits.shape)}.")
    check_ids("tokens", tokens, (logits.shape[0],))
    audit: Audit = options["audit"]
    if not len(logits):
        # Empty, but with a graph, as on ranks that have rows.
        nothing = computed(logits).sum(-1)
        return nothing, {None: None, "value": nothing.detach(), "grad": nothing}[entropy]
    shard, memory = even_shard(tp_group, logits.shape[1]), memory_of(options, chunk_size, logits.shape[1])
    whole = placed(logits.contiguous(), shard)
    if keep is None:
        out = logprobs(whole, tokens, entropy=entropy, memory=memory)
        audit.of_logits("calculate", whole, tokens, logprob=out.logprob, entropy=out.entropy)
        return out.logprob.unsqueeze(-1), out.entropy
    if keep.shape != logits.shape or keep.dtype != torch.bool:
        raise LogitlessError(
            f"log_prob_keep_mask must be bool {list(logits.shape)} like logits but is {keep.dtype} {list(keep.shape)}."
        )
    shard = shard_of(whole)
    kept = placed(computed(logits).masked_fill(~with_target_kept(keep, tokens, shard), -torch.inf), shard)
    logprob = logprobs(kept, tokens, memory=memory).logprob
    audit.of_logits("calculate with mask", kept, tokens, logprob=logprob)
    entropies = None if entropy is None else logprobs(whole, tokens, entropy=entropy, memory=memory).entropy
    return logprob.unsqueeze(-1), entropies


def group_of(tp_group: Any) -> Any:
    """To slime and miles, as to torch, no group is the default group."""
    return dist.group.WORLD if tp_group is None and dist.is_initialized() else tp_group


# One tensor per sample.


class Parallel(NamedTuple):
    """This rank's place in its groups."""

    tp_group: Any
    cp_rank: int
    cp_size: int
    cp_group: Any


class Marked(NamedTuple):
    """Loss masks and old log-probs of a batch, which the hosts do not pass to ``get_log_probs_and_entropy``."""

    masks: Sequence[Tensor] | None = None
    old: Sequence[Tensor] | None = None


_UNMARKED = Marked()
marked: ContextVar[Marked] = ContextVar("logitless_loss_masks", default=_UNMARKED)


def masked_losses(module: str) -> list[Replacement]:
    """The host's losses, called while ``get_log_probs_and_entropy`` can read their masks."""

    def loss_function(
        original: Callable[..., Any], args: Any, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Any
    ) -> Any:
        old = batch.get("rollout_log_probs" if getattr(args, "use_rollout_logprobs", False) else "log_probs")
        with held(marked, Marked(batch["loss_masks"], old)):
            return original(args, batch, logits, sum_of_sample_mean)

    return [replaces(module, name)(loss_function) for name in ("policy_loss_function", "sft_loss_function")]


class Batch(NamedTuple):
    """Rows that this rank scores, and rows whose results it returns: they differ under all-gather CP."""

    rows: Rows
    wanted: Rows
    parallel: Parallel
    exchanged: bool

    @staticmethod
    def make(
        parallel: Parallel,
        outputs: Tensor,
        tokens: Sequence[Tensor],
        total_lengths: Sequence[int],
        response_lengths: Sequence[int],
        *,
        masks: Sequence[Tensor] | None = None,
        allgather: bool = False,
        line: int | None = None,
    ) -> Batch:
        """Rows of a pack; or, with ``line``, of samples that are padded to that length, one on each line."""
        found = [len(ids) for ids in tokens]
        if found != [int(n) for n in total_lengths]:
            raise LogitlessError(f"unconcat_tokens have lengths {found} but total_lengths is {list(total_lengths)}.")
        shared: dict[str, Any] = {"loss_masks": masks, "loss_mask_only": masks is not None, "device": outputs.device}
        zigzag = Zigzag(parallel.cp_rank, parallel.cp_size) if parallel.cp_size > 1 else None
        if line is not None:
            rows = Rows.padded(tokens, response_lengths, max_length=line, cp=zigzag, **shared)
            return Batch(rows, rows, parallel, False)
        window: dict[str, Any] = {"num_tokens": outputs.shape[1]}
        if zigzag is None or not allgather:
            rows = Rows.packed(tokens, response_lengths, cp=zigzag, **shared, **window)
            return Batch(rows, rows, parallel, False)
        contiguous = Contiguous(parallel.cp_rank, parallel.cp_size)
        rows = Rows.packed(tokens, response_lengths, cp=contiguous, **shared, **window)
        return Batch(rows, Rows.packed(tokens, response_lengths, cp=zigzag, **shared), parallel, True)

    def split(self, fields: list[Tensor]) -> list[list[Tensor]]:
        """One list of per-sample tensors for each field. Under all-gather CP, one collective for all of them."""
        if self.exchanged:
            fields = self.rows.redistribute(fields, self.wanted, self.parallel.cp_group, grad="sum")
        return [self.wanted.split(x) for x in fields]

    def values(self, outputs: Tensor) -> list[Tensor]:
        """Outputs ``[..., 1]`` of a value head, per sample, in float32."""
        lines = outputs if self.rows.token_shape == outputs.shape[:-1] else outputs.squeeze(0)
        return self.split([self.rows.take(lines).squeeze(-1).float()])[0]

    def scores(
        self,
        logits: Tensor,
        entropy: EntropyMode,
        temperature: float,
        chunk_size: int,
        options: Options,
        *,
        kept: Kept | None = None,
        old: Sequence[Tensor] | None = None,
        expected: Expected | None = None,
    ) -> dict[str, list[Tensor]]:
        """``log_probs`` and, if asked for, ``entropy`` of each sample. ``old`` stands in where no row was scored.

        A loss that is ``expected`` of the log-probs has its gradients made with them.
        """
        # Squeezed, not indexed: the gradient of an index is a copy.
        given = _overwritten(logits) if options["overwrite_logits"] else logits.squeeze(0)
        memory = memory_of(options, chunk_size, logits.shape[-1])
        asked = {"entropy": entropy, "head": Head(temperature=temperature), "memory": memory}
        fields = self._score(given, options, kept, expected, asked)
        per_sample = self.split(fields)
        if old is not None:
            per_sample[0] = self._filled(per_sample[0], old)
        names = ("log_probs", "entropy")[: len(per_sample)]
        return dict(zip(names, per_sample, strict=True))

    def _score(
        self, logits: Tensor, options: Options, kept: Kept | None, expected: Expected | None, asked: dict[str, Any]
    ) -> list[Tensor]:
        """``[R]`` log-probs, and entropies if asked for."""
        rows, audit, entropy, head = self.rows, options["audit"], asked["entropy"], asked["head"]
        shard = even_shard(self.parallel.tp_group, logits.shape[-1])
        operand = placed(logits, shard, overwrite=options["overwrite_logits"] and tracked(logits))
        if kept is not None and entropy is None:
            # Where nothing over the whole vocabulary is asked for, nothing of it is read.
            kept = kept.over("support")
        if expected is not None and isinstance(operand, Logits) and isinstance(operand.weight, Tensor):
            counts = options["expectations"]
            out = score_expecting(operand, rows, expected, counts, head=head, memory=asked["memory"])
            # The hosts add the entropy times 0 to their losses.
            fields = [out.logprob, out.entropy.detach()] if entropy and out.entropy is not None else [out.logprob]
        elif options["response_only"]:
            out = logprobs(operand, rows, kept=kept, **asked)
            fields = [x for x in (out.logprob, out.entropy) if x is not None]
        else:
            every = rows.expand(rows.target)
            whole = None if kept is None else Kept(kept.ids, rows.expand(kept.lengths).flatten(), kept.scope)
            out = logprobs(operand, every.view(logits.shape[:-1]), kept=whole, **asked)
            fields = [rows.take(x.view_as(every)) for x in (out.logprob, out.entropy) if x is not None]
        if audit:
            seen = [rows.expand(x.detach()) for x in fields]
            # The audit normalises over the whole vocabulary, so a log-prob over a support is not compared.
            values = {"logprob": seen[0] if kept is None else None, "entropy": seen[1] if entropy else None}
            audit.of_logits("get_log_probs", operand, every_target(rows), head=head, **values)
        return fields

    def _filled(self, log_probs: list[Tensor], old: Sequence[Tensor]) -> list[Tensor]:
        """Old log-probs where no row was scored, so that a ratio that the mask drops is 1 and not an overflow."""
        device = self.wanted.target.device
        scored = self.wanted.split(torch.ones(len(self.wanted), device=device)) if log_probs else []
        pairs = zip(log_probs, scored, old, strict=True)
        return [new + (1 - here) * before.detach().to(new) for new, here, before in pairs]


def _overwritten(logits: Tensor) -> Tensor:
    """The tensor that backward writes the gradient over; an error where others may read it."""
    whole = taken_over(logits)
    if isinstance(logits, Logits):
        return logits.squeeze(0)
    if whole is None and tracked(logits):
        raise LogitlessError(
            "overwrite_logits=True, but these logits are a leaf or a view of a part of another tensor, so their memory "
            "belongs to others. Install without the option."
        )
    return logits if whole is None else whole


def memory_of(options: Options, chunk_size: int, columns: int) -> int | None:
    """The host's chunk of rows as bytes of float32 logits; -1 means this library's default."""
    rows = options["chunk_size"] if options["chunk_size"] > 0 else chunk_size
    return 4 * rows * columns if rows > 0 else None


def entropy_asked(wanted: bool, grad: bool) -> EntropyMode:
    return None if not wanted else "grad" if grad else "value"
