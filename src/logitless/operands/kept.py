"""The sampler's support: log-probs over the token ids that a sampler kept (top-p, top-k, min-p).

A rollout engine that truncates its distribution sampled from ``softmax(z[support])``. Training on the full softmax
would compare two different distributions, so the log-prob is normalised over the support, with the target forced
in. Entropy and log Z stay those of the whole row, unless ``scope`` says that they are over the support too.

Engines report such ids in several forms; each has a constructor here that checks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from logitless.errors import LogitlessError
from logitless.errors.arguments import dense, described, device_named, instance, refused, sequence
from logitless.rows import Rows
from logitless.rows.integers import holds_integers, integers, joined, whole_number
from logitless.spec import inspectable, tracked_by_autograd

Scope = Literal["vocabulary", "support"]
"""The ids that a distribution is over: the whole vocabulary, or those that the sampler kept and the target."""


@dataclass(frozen=True, eq=False)
class Kept:
    """Kept token ids of each row, end to end.

    Args:
        ids: ``[K]`` token ids of the whole vocabulary, in any order; an id twice in a row counts once.
        lengths: ``[R]`` how many ids each row has. A row may have none: its support is then the target alone.
        scope: what entropy and log Z are over. ``"vocabulary"``: the whole row, which is read or multiplied as without
            kept ids. ``"support"``: like the log-prob, over the kept ids and the target. Their logits are all that is
            read, by dot products with a few rows of the weight, and there is no log Z.

    >>> Kept(torch.tensor([5, 7, 9]), torch.tensor([2, 1])).lengths.tolist()
    [2, 1]
    """

    ids: Tensor
    lengths: Tensor
    scope: Scope = "vocabulary"

    def __post_init__(self) -> None:
        for name, x in (("ids", self.ids), ("lengths", self.lengths)):
            dense(x, f"Kept: {name}", "a 1-D integer tensor")
            if x.dim() != 1 or not holds_integers(x):
                raise LogitlessError(f"Kept: {name} must be a 1-D integer tensor but is {list(x.shape)} {x.dtype}.")
        if inspectable(self.lengths):
            total, low = int(self.lengths.sum()), int(self.lengths.min()) if self.lengths.numel() else 0
            if low < 0 or total != self.ids.numel():
                raise LogitlessError(
                    f"Kept: lengths must be 0 or more and add up to the {self.ids.numel()} ids, "
                    f"but the smallest is {low} and they add up to {total}."
                )
        if not isinstance(self.scope, str) or self.scope not in get_args(Scope):
            raise LogitlessError(f'Kept: scope must be "vocabulary" or "support" but is {described(self.scope)}.')
        object.__setattr__(self, "ids", tracked_by_autograd(self.ids.to(torch.int64)))
        object.__setattr__(self, "lengths", tracked_by_autograd(self.lengths.to(torch.int64)))

    def over(self, scope: Scope) -> Kept:
        """The same ids with another scope: ``Kept.from_lists(ids).over("support")``."""
        return Kept(self.ids, self.lengths, scope)

    def cut(self, start: int, stop: int) -> Kept:
        """The ids of rows ``start .. stop``. Waits for an accelerator that they are on."""
        if self.lengths.is_meta:
            first, last = (self.ids.numel() * row // max(1, self.lengths.numel()) for row in (start, stop))
        else:
            first, last = (int(self.lengths[:row].sum()) for row in (start, stop))
        return Kept(self.ids[first:last], self.lengths[start:stop], self.scope)

    @staticmethod
    def from_offsets(ids: Tensor, offsets: Tensor) -> Kept:
        """From ids end to end and ``[R + 1]`` offsets: row r has ``ids[offsets[r] : offsets[r + 1]]``.

        >>> Kept.from_offsets(torch.tensor([5, 7, 9]), torch.tensor([0, 2, 2, 3])).lengths.tolist()
        [2, 0, 1]
        """
        _check_integers("from_offsets", "offsets", offsets, 1)
        if not len(offsets):
            raise LogitlessError("Kept.from_offsets: offsets must have an entry more than there are rows but has none.")
        if inspectable(offsets) and int(offsets[0]) != 0:
            raise LogitlessError(f"Kept.from_offsets: offsets must begin with 0 but begin with {int(offsets[0])}.")
        dense(ids, "Kept.from_offsets: ids", "a 1-D integer tensor")
        if inspectable(offsets) and (int(offsets[-1]) != ids.numel() or bool((offsets.diff() < 0).any())):
            raise LogitlessError(
                f"Kept.from_offsets: offsets must never fall, and end at the {ids.numel()} ids, but are "
                f"{_shown(offsets)}."
            )
        return Kept(ids, offsets.diff())

    @staticmethod
    def from_lists(lists: Sequence[Sequence[int]], device: torch.device | str | None = None) -> Kept:
        """From one list of ids for each row.

        >>> Kept.from_lists([[5, 7], [], [9]]).lengths.tolist()
        [2, 0, 1]
        """
        device = torch.get_default_device() if device is None else device_named(device, "Kept.from_lists: device")
        lists = sequence(lists, "Kept.from_lists: lists", "a list of ids for each row")
        flat = joined(lists, lambda row: f"Kept.from_lists: lists, the ids of row {row},")
        lengths = torch.tensor([len(ids) for ids in lists], dtype=torch.int64, device="cpu")
        return Kept(flat.to(device), lengths.to(device))

    @staticmethod
    def from_padded(ids: Tensor) -> Kept:
        """From ``[R, K]`` ids, as top-k returns them; negative ids are padding, wherever they stand.

        >>> Kept.from_padded(torch.tensor([[5, 7], [9, -1]])).ids.tolist()
        [5, 7, 9]
        """
        _check_integers("from_padded", "ids", ids, 2)
        real = ids >= 0
        return Kept(ids[real], real.sum(1))

    @staticmethod
    def from_mask(mask: Tensor) -> Kept:
        """From a ``[R, V]`` boolean mask, True at ids that were kept (min-p, a grammar).

        >>> Kept.from_mask(torch.tensor([[True, False, True], [False, True, False]])).ids.tolist()
        [0, 2, 1]
        """
        dense(mask, "Kept.from_mask: mask", "[R, V] torch.bool", numbers=True)
        if mask.dim() != 2 or mask.dtype != torch.bool:
            raise LogitlessError(f"Kept.from_mask: mask must be [R, V] torch.bool but is {described(mask)}.")
        return Kept(mask.nonzero()[:, 1], mask.sum(1))

    @staticmethod
    def from_bits(words: Tensor, vocab_size: int) -> Kept:
        """From ``[R, W]`` integers whose bits are a mask of ids: bit b of word w is id ``b + w * bits``, lowest first.

        >>> Kept.from_bits(torch.tensor([[0b101], [0b010]], dtype=torch.int32), 3).ids.tolist()
        [0, 2, 1]
        """
        _check_integers("from_bits", "words", words, 2)
        vocab_size = whole_number(vocab_size, "Kept.from_bits: vocab_size")
        bits = 8 * words.element_size()
        if vocab_size < 1 or not 0 <= words.shape[1] * bits - vocab_size < bits:
            raise LogitlessError(
                f"Kept.from_bits: words of {bits} bits must be [R, {-(-vocab_size // bits)}] for a vocab_size of "
                f"{vocab_size} but are {list(words.shape)}."
            )
        places = torch.arange(bits, device=words.device, dtype=words.dtype)
        mask = (words[:, :, None] >> places) & 1
        return Kept.from_mask(mask.bool().flatten(1)[:, :vocab_size])

    @staticmethod
    def from_engine(rows: Rows, supports: Sequence[Any]) -> Kept:
        """The kept ids of the scored rows, out of the supports that a rollout engine returned for every response.

        Args:
            rows: the rows that are scored.
            supports: one for each sample, for all its response tokens: one list of ids per token (SGLang's
                ``output_token_sampling_mask``); an object that has them as ``token_ids`` (vLLM's ``SamplingMask``), or
                as its ``sampling_mask`` (vLLM's ``CompletionOutput``); or ``token_ids`` end to end, with ``offsets`` or
                ``lengths``.
        """
        instance(rows, Rows, "Kept.from_engine: rows")
        supports = sequence(supports, "Kept.from_engine: supports", "a list of one support for each sample")
        runs = [_response(sample, support) for sample, support in enumerate(supports)]
        return Kept.from_responses(rows, [ids for ids, _ in runs], [lengths for _, lengths in runs])

    @staticmethod
    def from_responses(rows: Rows, ids: Sequence[Tensor], lengths: Sequence[Tensor]) -> Kept:
        """The kept ids of the scored rows, out of the ids that were recorded for every response token.

        Args:
            rows: the rows that are scored.
            ids: per sample, the kept ids of all its response tokens, end to end.
            lengths: per sample, how many ids each response token has: ``[response length]``.
        """
        instance(rows, Rows, "Kept.from_responses: rows")
        for name, x in (("ids", ids), ("lengths", lengths)):
            sequence(x, f"Kept.from_responses: {name}", "a list of one tensor for each sample")
        if len(ids) != len(rows.counts) or len(lengths) != len(rows.counts):
            raise LogitlessError(
                f"Kept.from_responses: got ids for {len(ids)} and lengths for {len(lengths)} samples, "
                f"but the rows have {len(rows.counts)}."
            )
        whole = rows.response_lengths or rows.counts
        ids = [integers(x, f"Kept.from_responses: the ids of sample {i}") for i, x in enumerate(ids)]
        lengths = [integers(x, f"Kept.from_responses: the lengths of sample {i}") for i, x in enumerate(lengths)]
        for sample, (flat, runs) in enumerate(zip(ids, lengths, strict=True)):
            if runs.numel() != whole[sample]:
                raise LogitlessError(
                    f"Kept.from_responses: sample {sample} has lengths for {runs.numel()} tokens but its response has "
                    f"{whole[sample]}."
                )
            if int(runs.sum()) != flat.numel():
                raise LogitlessError(
                    f"Kept.from_responses: sample {sample} has {flat.numel()} ids but its lengths add up to "
                    f"{int(runs.sum())}."
                )
        if not len(ids):
            nothing = torch.zeros(0, dtype=torch.int64, device=rows.index.device)
            return Kept(nothing, nothing)
        flat, runs = torch.cat(ids), torch.cat(lengths)
        if len(runs) and int(runs.min()) < 0:
            sample = next(i for i, x in enumerate(lengths) if bool((x < 0).any()))
            raise LogitlessError(
                f"Kept.from_responses: the lengths of sample {sample} must be 0 or more but have {int(runs.min())}."
            )
        first = torch.tensor([0, *map(len, lengths)], device="cpu").cumsum(0)[:-1].to(runs.device)
        response = first[rows.sample.to(runs.device)] + rows.position.to(runs.device)
        lengths_R = runs[response]
        starts_R = (runs.cumsum(0) - runs)[response]
        row = torch.repeat_interleave(torch.arange(len(response), device=runs.device), lengths_R)
        within = torch.arange(len(row), device=runs.device) - (lengths_R.cumsum(0) - lengths_R)[row]
        return Kept(flat[starts_R[row] + within].to(rows.index.device), lengths_R.to(rows.index.device))


def _response(sample: int, support: Any) -> tuple[Tensor, Tensor]:
    """Ids and lengths of one response, from any form of :meth:`Kept.from_engine`."""
    support = getattr(support, "sampling_mask", support)
    ids = getattr(support, "token_ids", None)
    apart = any(hasattr(support, name) for name in ("offsets", "lengths"))
    if ids is not None and not apart and all(isinstance(token, Sequence | Tensor) or token is None for token in ids):
        support, ids = ids, None
    if ids is not None:
        ids = integers(ids, f"Kept.from_engine: token_ids of sample {sample}")
        lengths = _lengths(sample, support)
        if lengths is not None:
            return ids, lengths
    elif isinstance(support, Sequence) and not isinstance(support, str):
        return _listed(sample, support)
    if support is None:
        raise LogitlessError(
            f"Kept.from_engine: supports: sample {sample} has none. Ask the engine for them (return_sampling_mask), or "
            f"score the sample without kept."
        )
    raise LogitlessError(
        f"Kept.from_engine: supports: sample {sample} must have ids for each response token, a list each, or token_ids "
        f"with offsets or lengths, but is {type(support).__name__}."
    )


def _lengths(sample: int, support: Any) -> Tensor | None:
    """How many ids each response token has, of ids end to end; None where the support says neither that nor offsets."""
    offsets, lengths = getattr(support, "offsets", None), getattr(support, "lengths", None)
    if offsets is None:
        return None if lengths is None else integers(lengths, f"Kept.from_engine: lengths of sample {sample}")
    offsets = integers(offsets, f"Kept.from_engine: offsets of sample {sample}")
    lengths = offsets.diff()
    if not len(offsets) or int(offsets[0]) != 0 or bool((lengths < 0).any()):
        raise LogitlessError(
            f"Kept.from_engine: offsets of sample {sample} must begin with 0 and never fall but are {_shown(offsets)}."
        )
    return lengths


def _listed(sample: int, support: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Ids end to end, and their lengths, from one list of ids for each response token."""
    for position, token in enumerate(support):
        if not isinstance(token, Sequence | Tensor):
            raise LogitlessError(
                f"Kept.from_engine: supports: sample {sample} has no list of ids for response token {position} but "
                f"{type(token).__name__}. An engine that recorded nothing there sampled from the whole vocabulary: "
                f"leave that row out, or score it without kept."
            )
    name = f"Kept.from_engine: supports: the ids of sample {sample}"
    flat = joined(support, lambda token: f"{name}, response token {token},")
    return flat, torch.tensor([len(token) for token in support], dtype=torch.int64, device="cpu")


def _check_integers(caller: str, name: str, x: Any, dims: int) -> None:
    wanted = f"a {dims}-D integer tensor"
    if dense(x, f"Kept.{caller}: {name}", wanted, numbers=name != "offsets").dim() != dims or not holds_integers(x):
        raise refused(f"Kept.{caller}: {name}", wanted, x)


def _shown(x: Tensor, most: int = 8) -> str:
    """The first numbers of a list that may be long."""
    return f"{x[:most].tolist()}" if len(x) <= most else f"{x[:most].tolist()} and {len(x) - most} more"
