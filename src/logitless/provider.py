"""A table of functions for frameworks that want this library where it is installed, and their own code where it is not.

    provider = logitless.provider.get(version=1)        also found as an entry point of the group "logprobs.provider"
    provider.logprobs_from_logits(logits, target, temperature=0.7, vocab_group=group)     a group, "world" or "whole"
    provider.logprobs_from_hidden(hidden, weight, target, ...)
    provider.policy_loss(hidden, weight, rows, old_logprob=..., advantage=...)
    provider.rows(tokens, response_lengths, ...)         response rows of a pack, in place of targets
    provider.capabilities()                              what runs here
    --linear-logp-provider logitless.provider.vime       the same for vime, in the form of its own interface

Arguments are tensors, numbers, names and process groups: a framework needs no class of ours. Nothing is patched.
docs/maintainers.md says what version 1 promises.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.backends import NAMES, OTHERS
from logitless.collectives import resolve_group
from logitless.errors import LogitlessError
from logitless.errors.arguments import FLOATS, check_flags, dense, instance, refused, sequence
from logitless.loss import policy_loss as loss_of_logits
from logitless.objectives import Metrics, Objective
from logitless.operands import Logits, shard_of
from logitless.rows import Rows
from logitless.rows.layouts import Contiguous, Zigzag
from logitless.score import logprobs
from logitless.seams import columns_of, even_shard, kept_from, placed, shard_between, with_target_kept, without_outside
from logitless.spec import IGNORE, EntropyMode, Head, TokenStats, VocabShard

VERSIONS = (1,)
"""Versions of the interface that this release serves."""

GROUP = "logprobs.provider"
"""Entry point group. The entry's value is :func:`get`; other libraries may register under the same group."""

Outside = Literal["error", "zero", "ignore"]
"""The treatment of a target that is no id of the vocabulary."""

FUNCTIONS = ("logprobs_from_logits", "logprobs_from_hidden", "policy_loss", "rows")


@dataclass(frozen=True)
class Capabilities:
    """What this release serves on this machine.

    Attributes:
        version: of the interface.
        dtypes: of logits, hidden states and weights.
        devices: types of device that are tested.
        backends: values of ``backend=``, besides ``"auto"``.
        parallel: the vocabulary over a group; Megatron's sequence parallelism; context-parallel cuts of ``rows``.
        options: the keywords of each function.
    """

    version: int
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[str, ...]
    backends: tuple[str, ...]
    parallel: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]

    def why_not(self, function: str, x: Tensor | None = None, options: Iterable[str] = ()) -> str | None:
        """Why a call cannot be served, asked before it is made; None if it can be. A framework falls back on a reason.

        >>> get(version=1).capabilities().why_not("logprobs_from_logits", torch.zeros(2, 3, dtype=torch.int64))
        'the dtype torch.int64 is not served'
        """
        if not isinstance(function, str):
            raise refused("why_not: function", "the name of a function", function)
        if x is not None:
            instance(x, Tensor, "why_not: x")
        named = isinstance(options, Iterable) and not isinstance(options, str | bytes | Tensor)
        if not named or not all(isinstance(name, str) for name in options):
            raise refused("why_not: options", "names of options", options)
        if function not in self.options:
            return f"there is no function {function}"
        missing = sorted(set(options) - set(self.options[function]))
        if missing:
            return f"{function} has no option {', '.join(missing)}"
        if x is not None and x.dtype not in self.dtypes:
            return f"the dtype {x.dtype} is not served"
        if x is not None and x.device.type not in self.devices:
            return f"the device {x.device.type} is not served"
        return None


@dataclass(frozen=True)
class Provider:
    """The functions of one version of the interface."""

    name: str
    version: int
    logprobs_from_logits: Callable[..., TokenStats]
    logprobs_from_hidden: Callable[..., TokenStats]
    policy_loss: Callable[..., tuple[Tensor, Metrics]]
    rows: Callable[..., Rows]

    def capabilities(self) -> Capabilities:
        """What this release serves here."""

        def keywords(name: str) -> tuple[str, ...]:
            parameters = inspect.signature(getattr(self, name)).parameters.values()
            return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)

        return Capabilities(
            version=self.version,
            dtypes=FLOATS,
            devices=("cpu", "cuda"),
            backends=(*NAMES, *OTHERS),
            parallel=("vocabulary", "sequence", "zigzag", "contiguous"),
            options=MappingProxyType({name: keywords(name) for name in FUNCTIONS}),
        )


def get(version: int = 1) -> Provider:
    """The provider of this version of the interface.

    Raises:
        LogitlessError: a ``ValueError``: this release does not serve the version.

    >>> get(version=1).version
    1
    """
    if type(version) is not int or version not in VERSIONS:
        raise LogitlessError(
            f"provider.get: version {version!r} is not served; this release has {', '.join(map(str, VERSIONS))}. "
            f"Ask for one of these, or use your own code."
        )
    return _FIRST


def logprobs_from_logits(
    logits: Tensor,
    target: Tensor | Rows,
    *,
    temperature: float | Tensor = 1.0,
    entropy: EntropyMode = None,
    scale: float = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    vocab_group: Any = "whole",
    vocab_range: tuple[int, int] | None = None,
    support: tuple[Tensor, Tensor] | None = None,
    outside: Outside = "error",
    flat: bool = False,
    overwrite_logits: bool = False,
    backend: str = "auto",
    memory: int | str = "16MiB",
    chunk_rows: int | None = None,
) -> TokenStats:
    """Log-prob, entropy and log Z of each target.

    Args:
        logits: ``[..., V]``, or :class:`logitless.Logits`; this rank's columns under ``vocab_group``.
        target: ``[...]`` ids, -100 to leave a row out; or what ``rows`` returned.
        temperature: a number, also in a 0-dim tensor, or one per row.
        entropy: None, ``"value"`` (without a graph) or ``"grad"``.
        scale, softcap: of the logits, before the temperature.
        vocab_size: true size of a padded vocabulary.
        vocab_group: ``"whole"``: the vocabulary is not split, and no collective is made; or the process group that it
            is split over; or ``"world"``, all ranks. None is an error: it means the first to some frameworks, and the
            last to others.
        vocab_range: ``(start, stop)`` of this rank's columns, which the ranks tell each other in every call; None for
            equal parts in rank order, which they compare in the first call of a group and a size of the vocabulary:
            one more collective, which every rank makes.
        support: ids that the sampler kept and how many of them each row has; log-probs are normalised over these.
        outside: ids outside the vocabulary, other than -100. ``"error"``: an error where that is free to see, NaN
            otherwise. ``"zero"``: log-prob 0 with the gradient of -log Z, as where the target's logit is summed over
            shards. ``"ignore"``: as -100.
        flat: operands and targets of any shapes with as many rows are laid out in one line, and so are results.
        overwrite_logits: write the gradient over the logits in backward.
        backend, memory: as for :func:`logitless.logprobs`.
        chunk_rows: rows of logits worked on at a time, in place of ``memory``.
    """
    check_flags("logprobs_from_logits", flat=flat, overwrite_logits=overwrite_logits)
    if dense(logits, "logprobs_from_logits: logits").dim() < 1:
        raise refused("logprobs_from_logits: logits", "[..., V]", logits)
    head, width = Head(temperature, scale, softcap, vocab_size), logits.shape[-1]
    if flat:
        logits = logits.reshape(logits.shape[:-1].numel(), width)
        target, head = _line(target), replace(head, temperature=_line(temperature))
    operand = placed(logits, _shard(vocab_group, vocab_range, width), overwrite=overwrite_logits)
    # Logits that are not computed may have a shard of their own.
    shard = shard_of(operand)
    options = {"entropy": entropy, "head": head, "backend": backend, "memory": _memory(memory, chunk_rows, width)}
    vocabulary = vocab_size or (width if shard is None else shard.vocab_size)
    return _score(operand, target, outside, vocabulary, support, options)


def logprobs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor | Rows,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: EntropyMode = None,
    scale: float = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    vocab_group: Any = "whole",
    vocab_range: tuple[int, int] | None = None,
    support: tuple[Tensor, Tensor] | None = None,
    hidden_grad: Literal["reduced", "partial"] = "reduced",
    sequence_parallel: bool = False,
    weight_grad: Tensor | None = None,
    match: Literal["bfloat16", "float16"] | None = None,
    outside: Outside = "error",
    flat: bool = False,
    backend: str = "auto",
    memory: int | str = "256MiB",
    chunk_rows: int | None = None,
) -> TokenStats:
    """The same from hidden states ``[..., D]`` and the head's weight ``[V, D]``; no logits are stored.

    ``hidden_grad="partial"`` leaves the sum of hidden's gradient over ``vocab_group`` to the caller. The other keywords
    are those of :func:`logprobs_from_logits` and :class:`logitless.Logits`.
    """
    check_flags("logprobs_from_hidden", flat=flat)
    head, width = Head(temperature, scale, softcap, vocab_size), columns_of("logprobs_from_hidden", hidden, weight)
    if flat:
        hidden, target = hidden.reshape(-1, hidden.shape[-1]), _line(target)
        head = replace(head, temperature=_line(temperature))
    shard = _shard(vocab_group, vocab_range, width)
    parallel: dict[str, Any] = {"sequence_parallel": sequence_parallel, "hidden_grad": hidden_grad}
    logits = Logits(hidden, weight, bias=bias, shard=shard, weight_grad=weight_grad, match=match, **parallel)
    options = {"entropy": entropy, "head": head, "backend": backend, "memory": _memory(memory, chunk_rows, width)}
    vocabulary = vocab_size or (width if shard is None else shard.vocab_size)
    return _score(logits, target, outside, vocabulary, support, options)


def policy_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor | Rows,
    *,
    old_logprob: Tensor | Literal["current"],
    advantage: Tensor,
    ref_logprob: Tensor | None = None,
    rollout_logprob: Tensor | None = None,
    objective: Mapping[str, Any] = MappingProxyType({}),
    denominator: float | Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    vocab_group: Any = "whole",
    vocab_range: tuple[int, int] | None = None,
    hidden_grad: Literal["reduced", "partial"] = "reduced",
    sequence_parallel: bool = False,
    backend: str = "auto",
    memory: int | str = "1GiB",
    chunk_rows: int | None = None,
) -> tuple[Tensor, Metrics]:
    """Loss and metrics of a policy update from hidden states, gradients included.

    Args:
        old_logprob, advantage, ref_logprob, rollout_logprob: one number per row: ``[R]`` of ``rows``, or as many as
            there are targets. ``old_logprob="current"`` on the first step after a rollout.
        objective: settings of :class:`logitless.Objective`: ``{"policy": "ppo_clip", "clip": (0.2, 0.28)}``.
        denominator: divides the sum of the loss; None for this batch's own.
        hidden, weight, target: and the other keywords, as for :func:`logprobs_from_hidden`.
    """
    fields: dict[str, Any] = {"old_logprob": old_logprob, "advantage": advantage}
    fields |= {"ref_logprob": ref_logprob, "rollout_logprob": rollout_logprob}
    if not isinstance(objective, Mapping) or not all(isinstance(name, str) for name in objective):
        raise refused("policy_loss: objective", "a dictionary of settings of an Objective", objective)
    for name, x in fields.items():
        if isinstance(x, Tensor):
            fields[name] = dense(x, f"policy_loss: {name}").reshape(-1)
    columns = columns_of("policy_loss", hidden, weight)
    parallel: dict[str, Any] = {"sequence_parallel": sequence_parallel, "hidden_grad": hidden_grad}
    logits = Logits(hidden, weight, bias=bias, shard=_shard(vocab_group, vocab_range, columns), **parallel)
    return loss_of_logits(
        logits,
        target,
        Objective(**objective),
        head=Head(temperature, scale, softcap, vocab_size),
        denominator=denominator,
        backend=backend,
        memory=_memory(memory, chunk_rows, columns),
        **fields,
    )


def rows(
    tokens: Sequence[Tensor],
    response_lengths: Sequence[int],
    *,
    loss_masks: Sequence[Tensor] | None = None,
    loss_mask_only: bool = False,
    context_parallel: Literal["zigzag", "contiguous"] | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    num_tokens: int | None = None,
    device: torch.device | str | None = None,
) -> Rows:
    """Rows of a pack that predict a response token; the results' ``split`` gives one tensor per sample.

    Args:
        tokens: ids of each sample, prompt and response together; the whole sample on every rank.
        response_lengths: tokens at the end of each sample that are response.
        loss_masks: one mask per response. With ``loss_mask_only`` rows of mask 0 are not scored.
        context_parallel: how the pack is cut over ``cp_size`` ranks, of which this is ``cp_rank``.
        num_tokens: rows of the local logits, padding included.
        device: where the rows will be used.
    """
    schemes = {"zigzag": Zigzag, "contiguous": Contiguous}
    if context_parallel is not None and not (isinstance(context_parallel, str) and context_parallel in schemes):
        raise LogitlessError(
            f'rows: context_parallel must be "zigzag", "contiguous" or None but is {context_parallel!r}.'
        )
    for name, x in (("cp_rank", cp_rank), ("cp_size", cp_size)):
        if type(x) is not int:
            raise refused(f"rows: {name}", "an integer", x)
    if context_parallel is None and cp_size != 1:
        raise LogitlessError(f'rows: cp_size is {cp_size} but context_parallel is None. Say "zigzag" or "contiguous".')
    cp = schemes[context_parallel](cp_rank, cp_size) if context_parallel is not None and cp_size > 1 else None
    options = {"loss_mask_only": loss_mask_only, "cp": cp, "num_tokens": num_tokens, "device": device}
    return Rows.packed(tokens, response_lengths, loss_masks, **options)


class Unavailable(LogitlessError):
    """The error for a request of vime's that is not served: vime's mode ``auto`` then takes its own code."""

    linear_logp_provider_unavailable = True


@dataclass(frozen=True)
class LinearLogp:
    """Results in the form that vime reads: ``[T, 1]`` log-probs, ``[T]`` entropies or None, and who made them."""

    logp: Tensor
    entropy: Tensor | None
    backend_id: str = "logitless"
    contract_id: str = "logitless.provider.1"
    provenance: Mapping[str, Any] = field(default_factory=dict)


def vime(request: Any) -> LinearLogp:
    """Serve vime's ``--linear-logp-provider``: the log-probs of ``request.target_ids``, and entropies where asked for.

    ``request.logits`` are ``[T, V']``, divided by the temperature already, as vime's own code gets them; its chunk of
    rows bounds the working memory. Hidden states of the request are not read: their logits exist.

    Raises:
        Unavailable: a dtype or device that is not served, before anything was computed.
    """
    why = _FIRST.capabilities().why_not("logprobs_from_logits", request.logits)
    if why is not None:
        raise Unavailable(f"provider.vime: {why}.")
    logits, target, group = request.logits, request.target_ids, request.tensor_parallel_group
    entropy: EntropyMode = None if not request.with_entropy else "grad" if request.with_entropy_grad else "value"
    chunk_rows = request.chunk_size if request.chunk_size > 0 else None
    # A request without a group has logits of the whole vocabulary.
    shared: dict[str, Any] = {"vocab_group": "whole" if group is None else group, "chunk_rows": chunk_rows}
    if request.log_prob_keep_mask is None:
        out = logprobs_from_logits(logits, target, entropy=entropy, **shared)
        return LinearLogp(out.logprob.reshape(-1, 1), out.entropy)
    shard = _shard(shared["vocab_group"], None, logits.shape[1])
    kept = with_target_kept(request.log_prob_keep_mask, target, shard)
    logprob = logprobs_from_logits(logits.masked_fill(~kept, -torch.inf), target, **shared).logprob
    # Entropy is over the whole vocabulary.
    whole = None if entropy is None else logprobs_from_logits(logits, target, entropy=entropy, **shared).entropy
    return LinearLogp(logprob.reshape(-1, 1), whole)


def _shard(group: Any, bounds: tuple[int, int] | None, columns: int) -> VocabShard | None:
    """The shard of a group; cached, because making one is a collective. Ranges are compared in every call."""
    if group is None:
        raise LogitlessError(
            'vocab_group is None, which says "not split" in some frameworks and "over all ranks" in others. Pass '
            'vocab_group="whole", "world" or the process group.'
        )
    named = isinstance(group, str)
    if named and group not in ("whole", "world"):
        raise LogitlessError(f'vocab_group must be "whole", "world" or a process group but is {group!r}.')
    if bounds is not None:
        bounds = tuple(sequence(bounds, "vocab_range", "(start, stop) of this rank's columns"))
        if len(bounds) != 2 or not all(type(x) is int for x in bounds):
            raise LogitlessError(f"vocab_range must be (start, stop) of this rank's columns but is {bounds!r}.")
    if named and group == "whole":
        if bounds is not None and bounds != (0, columns):
            raise LogitlessError(f'vocab_range is {bounds} but vocab_group is "whole". Pass the group as well.')
        return None
    group = dist.group.WORLD if named else resolve_group(group, "vocab_group")
    return even_shard(group, columns) if bounds is None else shard_between(group, *bounds)


def _score(
    logits: Any, target: Tensor | Rows, outside: Outside, vocabulary: int, support: Any, options: dict[str, Any]
) -> TokenStats:
    """:func:`logitless.logprobs`; ids outside the vocabulary as the caller wants them."""
    asked = {**options, "kept": None if support is None else kept_from(support)}
    if outside == "error":
        return logprobs(logits, target, **asked)
    if outside not in ("zero", "ignore") or isinstance(target, Rows):
        raise LogitlessError(
            f'outside must be "error", "zero" or "ignore", the last two with a tensor of ids, but is {outside!r}.'
        )
    beyond = ((target < 0) | (target >= vocabulary)) & (target != IGNORE)
    if outside == "ignore":
        return logprobs(logits, target.masked_fill(beyond, IGNORE), **asked)
    made: list[TokenStats] = []

    def scored(ids: Tensor) -> TokenStats:
        made.append(logprobs(logits, torch.where(target == IGNORE, IGNORE, ids), **asked))
        return made[0]

    logprob = without_outside(target, vocabulary, scored)
    return made[0]._replace(logprob=torch.where(target == IGNORE, made[0].logprob, logprob))


def _line(x: Any) -> Any:
    """A tensor of one entry per row, flattened; rows and numbers stay as they are."""
    return x.reshape(-1) if isinstance(x, Tensor) and x.dim() else x


def _memory(memory: int | str, chunk_rows: int | None, columns: int) -> int | str:
    """The working memory in bytes: that of float32 logits of ``chunk_rows`` rows, where they are given."""
    if chunk_rows is None:
        return memory
    if type(chunk_rows) is not int or chunk_rows < 1:
        raise LogitlessError(f"chunk_rows must be a number of rows, or None for memory, but is {chunk_rows!r}.")
    return 4 * chunk_rows * columns


_FIRST = Provider("logitless", 1, logprobs_from_logits, logprobs_from_hidden, policy_loss, rows)
