"""slime: log-probs, entropy and values of its Megatron backend, from response rows only.

    loss.get_log_probs_and_entropy, loss.get_values     [1, T, V'] of a pack  ->  one tensor per sample
    ppo_utils.calculate_log_probs_and_entropy           [N, V'] logits  ->  [N, 1] and [N]
    loss.policy_loss_function, loss.sft_loss_function   only with loss_mask_only, to read the loss masks

The flag ``--custom-megatron-init-path logitless.adapters.slime.custom_megatron_init`` installs it, without a source
edit. slime's logits are not written to unless ``overwrite_logits`` asks for it, its lists keep their lengths and zigzag
order on every rank, and temperature and top-p replay make no copy of the logits. Calls left to slime and counted as
passed on: replay in which some response token has no recorded support, and slime 0.3.0's padded batches
(``max_seq_lens``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.adapters.audit import Audit
from logitless.adapters.host import Host, Installed, Option, PassOn, Replacement
from logitless.adapters.patching import install_host
from logitless.adapters.scoring import every_target, taken_over, tracked
from logitless.adapters.shards import check_ids, even_shard
from logitless.errors import LogitlessError
from logitless.from_logits import logprobs
from logitless.kept import Kept
from logitless.rows import Rows
from logitless.rows.layouts import Contiguous, Zigzag
from logitless.spec import EntropyMode, Head, VocabShard


def custom_megatron_init(args: Any) -> Installed:
    """Install, as slime's ``--custom-megatron-init-path``.

    ``args.log_probs_response_only`` (default True), ``args.log_probs_loss_mask_only``,
    ``args.logitless_overwrite_logits`` and ``args.logitless_audit`` are honoured where they are set, for example by
    ``--custom-config-path``.
    """
    options = {
        "response_only": getattr(args, "log_probs_response_only", True),
        "loss_mask_only": getattr(args, "log_probs_loss_mask_only", False),
        "overwrite_logits": getattr(args, "logitless_overwrite_logits", False),
        "audit": getattr(args, "logitless_audit", 0),
    }
    return install_host(HOST, options)


def _parallel_state() -> Any:
    """Megatron's parallel state as slime's loss has it: its tests bind another one there."""
    return sys.modules["slime.backends.megatron_utils.loss"].mpu


# One row per logit row.


def make_calculate(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``calculate_log_probs_and_entropy``: ``[N, 1]`` log-probs, ``(0,)`` for no rows."""
    audit: Audit = options["audit"]

    def calculate_log_probs_and_entropy(
        logits: Tensor,
        tokens: Tensor,
        tp_group: Any,
        with_entropy: bool = False,
        chunk_size: int = -1,
        log_prob_keep_mask: Tensor | None = None,
        with_entropy_grad: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        if logits.dim() != 2:
            raise LogitlessError(f"logits must be [N, V'] but is {list(logits.shape)}.")
        check_ids("tokens", tokens, (logits.shape[0],))
        if not len(logits):
            # Empty, but with a graph, as on ranks that have rows.
            nothing = logits.sum(-1)
            return nothing, nothing if with_entropy and with_entropy_grad else _detached(nothing, with_entropy)
        # To slime, as to torch, no group is the default group.
        group = dist.group.WORLD if tp_group is None and dist.is_initialized() else tp_group
        logits, shard = logits.contiguous(), even_shard(group, logits.shape[1])
        shared: dict[str, Any] = {"shard": shard, "memory": _memory(options, chunk_size, logits.shape[1])}
        entropy = _entropy_mode(with_entropy, with_entropy_grad)
        if log_prob_keep_mask is None:
            out = logprobs(logits, tokens, entropy=entropy, **shared)
            audit.of_logits("calculate", logits, tokens, logprob=out.logprob, entropy=out.entropy, shard=shard)
            return out.logprob.unsqueeze(-1), out.entropy
        kept = logits.masked_fill(~_kept_columns(log_prob_keep_mask, tokens, logits, shard), -torch.inf)
        logprob = logprobs(kept, tokens, **shared).logprob
        audit.of_logits("calculate with mask", kept, tokens, logprob=logprob, shard=shard)
        whole = logprobs(logits, tokens, entropy=entropy, **shared).entropy if with_entropy else None
        return logprob.unsqueeze(-1), whole

    return calculate_log_probs_and_entropy


def _kept_columns(keep: Tensor, tokens: Tensor, logits: Tensor, shard: VocabShard | None) -> Tensor:
    """The mask with each row's target set, where this shard has its column."""
    if keep.shape != logits.shape or keep.dtype != torch.bool:
        raise LogitlessError(
            f"log_prob_keep_mask must be bool {list(logits.shape)} like logits but is {keep.dtype} {list(keep.shape)}."
        )
    column = (tokens - (0 if shard is None else shard.start))[:, None]
    here = (column >= 0) & (column < keep.shape[1])
    column = torch.where(here, column, 0)
    return keep.scatter(1, column, here | keep.gather(1, column))


# One tensor per sample.


class _Marked(NamedTuple):
    """Loss masks and old log-probs of a batch, which slime does not pass to ``get_log_probs_and_entropy``."""

    masks: Sequence[Tensor]
    old: Sequence[Tensor] | None


_marked: ContextVar[_Marked | None] = ContextVar("logitless_slime_masks", default=None)


def make_get_log_probs(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``get_log_probs_and_entropy``: lists in zigzag order, as long as the responses held here."""

    def get_log_probs_and_entropy(
        logits: Tensor,
        *,
        args: Any,
        unconcat_tokens: Sequence[Tensor],
        total_lengths: Sequence[int],
        response_lengths: Sequence[int],
        with_entropy: bool = False,
        non_loss_data: bool = True,
        top_p_token_ids: Sequence[Any] | None = None,
        top_p_token_offsets: Sequence[Any] | None = None,
    ) -> Any:
        replay = _recorded(top_p_token_ids, top_p_token_offsets, response_lengths)
        if isinstance(replay, PassOn):
            return replay
        _check_outputs(logits, "V'")
        marked = _marked.get()
        batch = _Batch.make(args, logits, unconcat_tokens, total_lengths, response_lengths, marked and marked.masks)
        kept = None if replay is None else Kept.from_responses(batch.rows, *replay)
        entropy = _entropy_mode(with_entropy, getattr(args, "entropy_coef", 0.0) != 0)
        # Squeezed, not indexed: the gradient of an index is a copy.
        given = _overwritten(logits) if options["overwrite_logits"] else logits.squeeze(0)
        fields = _score(given, batch.rows, kept, entropy, args, options)
        per_sample = batch.split(fields)
        if marked is not None and marked.old is not None:
            per_sample[0] = _filled(batch, per_sample[0], marked.old)
        names = ("log_probs", "entropy")[: len(per_sample)]
        results = dict(zip(names, per_sample, strict=True))
        return torch.empty((0,), device=logits.device), results

    return get_log_probs_and_entropy


def make_get_values(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``get_values``: response rows of the value head, without temperature."""

    def get_values(
        logits: Tensor,
        *,
        args: Any,
        unconcat_tokens: Sequence[Tensor],
        total_lengths: Sequence[int],
        response_lengths: Sequence[int],
        with_entropy: bool = False,
        non_loss_data: bool = True,
    ) -> Any:
        _check_outputs(logits, 1)
        batch = _Batch.make(args, logits, unconcat_tokens, total_lengths, response_lengths, None)
        values = batch.rows.take(logits.squeeze(0)).squeeze(-1)
        return torch.empty((0,), device=logits.device), {"values": batch.split([values])[0]}

    return get_values


def make_loss(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for a loss function: slime's loss, called while ``get_log_probs_and_entropy`` can read the masks."""

    def loss_function(args: Any, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Any) -> Any:
        old = batch.get("rollout_log_probs" if getattr(args, "use_rollout_logprobs", False) else "log_probs")
        token = _marked.set(_Marked(batch["loss_masks"], old))
        try:
            return original(args, batch, logits, sum_of_sample_mean)
        finally:
            _marked.reset(token)

    return loss_function


class _Batch(NamedTuple):
    """Rows that this rank scores, and rows whose results it returns: they differ under all-gather CP."""

    rows: Rows
    wanted: Rows
    group: Any

    @staticmethod
    def make(
        args: Any,
        outputs: Tensor,
        tokens: Sequence[Tensor],
        total_lengths: Sequence[int],
        response_lengths: Sequence[int],
        masks: Sequence[Tensor] | None,
    ) -> _Batch:
        parallel_state = _parallel_state()
        _check_lengths(tokens, total_lengths)
        size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        window: dict[str, Any] = {"num_tokens": outputs.shape[1], "device": outputs.device}
        shared: dict[str, Any] = {"loss_masks": masks, "loss_mask_only": masks is not None}
        if size <= 1:
            rows = Rows.packed(tokens, response_lengths, **shared, **window)
            return _Batch(rows, rows, None)
        zigzag = Zigzag(rank, size)
        if not args.allgather_cp:
            rows = Rows.packed(tokens, response_lengths, cp=zigzag, **shared, **window)
            return _Batch(rows, rows, None)
        rows = Rows.packed(tokens, response_lengths, cp=Contiguous(rank, size), **shared, **window)
        wanted = Rows.packed(tokens, response_lengths, cp=zigzag, **shared, device=outputs.device)
        return _Batch(rows, wanted, parallel_state.get_context_parallel_group())

    def split(self, fields: list[Tensor]) -> list[list[Tensor]]:
        """One list of per-sample tensors for each field. Under all-gather CP, one collective for all of them."""
        if self.group is not None:
            fields = self.rows.redistribute(fields, self.wanted, self.group, grad="sum")
        return [self.wanted.split(x) for x in fields]


def _score(
    logits: Tensor, rows: Rows, kept: Kept | None, entropy: EntropyMode, args: Any, options: Mapping[str, Any]
) -> list[Tensor]:
    """``[R]`` log-probs, and entropies if asked for."""
    parallel_state = _parallel_state()
    audit: Audit = options["audit"]
    shard = even_shard(parallel_state.get_tensor_model_parallel_group(), logits.shape[-1])
    head = Head(temperature=getattr(args, "rollout_temperature", 1.0))
    memory = _memory(options, args.log_probs_chunk_size, logits.shape[-1])
    shared: dict[str, Any] = {"entropy": entropy, "head": head, "shard": shard, "memory": memory}
    # Where nothing over the whole vocabulary is asked for, nothing of it is read.
    shared["scope"] = "support" if kept is not None and entropy is None else "vocabulary"
    shared["overwrite_logits"] = options["overwrite_logits"] and tracked(logits)
    if options["response_only"]:
        out = logprobs(logits, rows, kept=kept, **shared)
    else:
        lengths = None if kept is None else rows.expand(kept.lengths)
        whole = None if kept is None or lengths is None else Kept(kept.ids, lengths)
        out = logprobs(logits, rows.expand(rows.target).view(logits.shape[:-1]), kept=whole, **shared)
        out = out._replace(
            logprob=out.logprob.flatten(), entropy=None if out.entropy is None else out.entropy.flatten()
        )
    fields = [x for x in (out.logprob, out.entropy) if x is not None]
    fields = fields if options["response_only"] else [rows.take(x) for x in fields]
    if audit:
        seen = [rows.expand(x.detach()) for x in fields]
        # The audit normalises over the whole vocabulary, so a log-prob over a support is not compared.
        values = {"logprob": seen[0] if kept is None else None, "entropy": seen[1] if entropy else None}
        audit.of_logits("get_log_probs", logits, every_target(rows), head=head, shard=shard, **values)
    return fields


def _overwritten(logits: Tensor) -> Tensor:
    """The tensor that backward writes the gradient over; an error where others may read it."""
    whole = taken_over(logits)
    if whole is None and tracked(logits):
        raise LogitlessError(
            "overwrite_logits=True, but these logits are a leaf or a view of a part of another tensor, so their memory "
            'belongs to others. Use install("slime") without the option.'
        )
    return logits if whole is None else whole


def _filled(batch: _Batch, log_probs: list[Tensor], old: Sequence[Tensor]) -> list[Tensor]:
    """Old log-probs where no row was scored, so that a ratio that the mask drops is 1 and not an overflow."""
    scored = batch.wanted.split(torch.ones(len(batch.wanted), device=log_probs[0].device)) if log_probs else []
    pairs = zip(log_probs, scored, old, strict=True)
    return [new + (1 - here) * before.detach().to(new) for new, here, before in pairs]


def _recorded(ids: Sequence[Any] | None, offsets: Sequence[Any] | None, response_lengths: Sequence[int]) -> Any:
    """Per sample, the supports of its response tokens and their sizes; passed on if a token has no record."""
    if ids is None or offsets is None:
        return None
    if not len(ids) == len(offsets) == len(response_lengths):
        raise LogitlessError(
            f"top_p_token_ids has {len(ids)} samples and top_p_token_offsets {len(offsets)}, but there are "
            f"{len(response_lengths)} response_lengths."
        )
    starts = [torch.as_tensor(x, dtype=torch.int64).cpu() for x in offsets]
    if any(len(start) != length + 1 for start, length in zip(starts, response_lengths, strict=True)):
        return PassOn("replay without a record")
    flat = [torch.as_tensor(x, dtype=torch.int64).cpu()[s[0] : s[-1]] for x, s in zip(ids, starts, strict=True)]
    return flat, [start.diff() for start in starts]


def _check_outputs(logits: Tensor, width: int | Literal["V'"]) -> None:
    wanted = isinstance(width, str) or logits.shape[-1] == width
    if logits.dim() != 3 or logits.shape[0] != 1 or not wanted or logits.dtype != torch.float32:
        raise LogitlessError(
            f"logits must be float32 [1, T, {width}], one pack, but is {logits.dtype} {list(logits.shape)}."
        )


def _check_lengths(tokens: Sequence[Tensor], total_lengths: Sequence[int]) -> None:
    found = [len(ids) for ids in tokens]
    if found != [int(n) for n in total_lengths]:
        raise LogitlessError(f"unconcat_tokens have lengths {found} but total_lengths is {list(total_lengths)}.")


def _memory(options: Mapping[str, Any], chunk_size: int, columns: int) -> int | str:
    """slime's chunk of rows as bytes of float32 logits; -1 means this library's default."""
    rows = options["chunk_size"] if options["chunk_size"] > 0 else chunk_size
    return 4 * rows * columns if rows > 0 else "16MiB"


def _entropy_mode(wanted: bool, grad: bool) -> EntropyMode:
    return None if not wanted else "grad" if grad else "value"


def _detached(x: Tensor, wanted: bool) -> Tensor | None:
    return x.detach() if wanted else None


def _replacements(options: Mapping[str, Any]) -> list[Replacement]:
    if options["loss_mask_only"] and not options["response_only"]:
        raise LogitlessError(
            'install("slime"): loss_mask_only=True selects among response rows: response_only=True too.'
        )
    backend = "slime.backends.megatron_utils"
    rows = "logits, tokens, tp_group, with_entropy=False, chunk_size=-1"
    keywords = (
        "(logits, *, args, unconcat_tokens, total_lengths, response_lengths, with_entropy=False, non_loss_data=True"
    )
    replacements = [
        Replacement(
            module="slime.utils.ppo_utils",
            name="calculate_log_probs_and_entropy",
            signature={
                "0.3.1": f"({rows}, log_prob_keep_mask=None, with_entropy_grad=True)",
                "0.3.0": f"({rows})",
            },
            make=make_calculate,
            also_in=(f"{backend}.loss",),
        ),
        Replacement(
            module=f"{backend}.loss",
            name="get_log_probs_and_entropy",
            signature={
                "0.3.1": f"{keywords}, top_p_token_ids=None, top_p_token_offsets=None)",
                "0.3.0": f"{keywords}, max_seq_lens=None)",
            },
            make=make_get_log_probs,
            also_in=(f"{backend}.actor", f"{backend}.server.logprob_utils"),
        ),
        Replacement(
            module=f"{backend}.loss",
            name="get_values",
            signature={"0.3.1": f"{keywords})", "0.3.0": f"{keywords}, max_seq_lens=None)"},
            make=make_get_values,
            also_in=(f"{backend}.actor",),
        ),
    ]
    masked = ("policy_loss_function", "sft_loss_function") if options["loss_mask_only"] else ()
    signature = "(args, batch, logits, sum_of_sample_mean)"
    return replacements + [Replacement(f"{backend}.loss", name, signature, make_loss) for name in masked]


HOST = Host(
    name="slime",
    package="slime",
    versions=("0.3",),
    replacements=_replacements,
    options={
        "response_only": Option(True, "score response rows only; False: every row of the pack, as slime does"),
        "loss_mask_only": Option(False, "in training, score only rows whose loss mask is nonzero"),
        "overwrite_logits": Option(False, "backward writes the gradient over the logits, which nobody may read again"),
        "chunk_size": Option(-1, "rows of logits worked on at a time; -1: args.log_probs_chunk_size"),
    },
)
