"""Which rows of the logits matter, and where each result belongs. Built once per micro-batch, on the host.

Logit row t predicts token t+1, so a sample of prompt length P and total length L needs rows P-1 .. L-2:

    tokens   p0 p1 p2 r0 r1 r2        P = 3, L = 6
    rows           ^  ^  ^            index  2 3 4
    target         r0 r1 r2           position 0 1 2

A layout only decides which ``(sample, offset)`` each local token holds; everything after that is one filter
(``_select``). Packed and padded batches differ in the few lines that lay their tokens out, and a parallel split
of the sequence is one more such function: nothing below it changes.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from logitless.errors import LogitlessError

Tokens = Tensor | Sequence[int]


@dataclass(frozen=True, eq=False)
class Rows:
    """A plan: the rows to score, their targets, and the way back to samples.

    Make one with :meth:`packed`, :meth:`padded`, :meth:`at` or :meth:`every`.

    Attributes:
        index: ``[R]`` row of the (flattened) logits, each at most once.
        target: ``[R]`` token id that row should predict; ``-100`` is "ignore".
        sample: ``[R]`` which sample the row belongs to, ascending.
        position: ``[R]`` place of the target within its response.
        token_shape: leading shape of the logits this plan was made for: ``(T,)``, ``(N, S)``, or None for any.
        held: response tokens of each sample that have a row here, masked ones included.
        counts: rows of each sample that are scored here.
        slot: ``[R]`` place of each row among the held ones, or None where all of them are scored.
        reach: one past the largest index, where the shape alone does not say it.
        target_range: smallest and largest target, if they were known before the plan went to an accelerator.
    """

    index: Tensor
    target: Tensor
    sample: Tensor
    position: Tensor
    token_shape: tuple[int, ...] | None
    held: tuple[int, ...]
    counts: tuple[int, ...]
    slot: Tensor | None = None
    reach: int = 0
    target_range: tuple[int, int] | None = None

    @staticmethod
    def packed(
        tokens: Sequence[Tokens],
        response_lengths: Sequence[int],
        loss_masks: Sequence[Tensor | Sequence[int]] | None = None,
        *,
        loss_mask_only: bool = False,
        num_tokens: int | None = None,
        device: torch.device | str | None = None,
    ) -> Rows:
        """Rows of samples laid end to end without padding between them ("thd").

        Args:
            tokens: one 1-D tensor or list of ids per sample, prompt and response together.
            response_lengths: how many tokens at the end of each sample are response.
            loss_masks: one mask per sample, as long as its response; nonzero means "counts".
            loss_mask_only: score only the rows whose mask is nonzero. :meth:`split` and :meth:`expand` still
                return every response token, with zeros at the others.
            num_tokens: rows of the logits if padding follows the last sample; default the sum of lengths.
            device: where the plan will be used; default the device of the tokens.

        >>> rows = Rows.packed([[7, 8, 9], [4, 5, 6, 7]], [1, 2])
        >>> rows.index.tolist(), rows.target.tolist(), rows.position.tolist()
        ([1, 4, 5], [9, 6, 7], [0, 0, 1])
        """
        batch = _Batch.check("Rows.packed", tokens, response_lengths, loss_masks, loss_mask_only)
        total = int(batch.lengths.sum())
        if num_tokens is not None and num_tokens < total:
            raise LogitlessError(
                f"Rows.packed: num_tokens is {num_tokens} but the samples hold {total} tokens. "
                f"Pass the padded length of the pack, or leave it out."
            )
        sample, offset = _ragged_arange(batch.lengths)
        return _select(batch, torch.arange(total), sample, offset, (num_tokens or total,), device)

    @staticmethod
    def padded(
        tokens: Tensor | Sequence[Tokens],
        response_lengths: Sequence[int],
        loss_masks: Sequence[Tensor | Sequence[int]] | None = None,
        *,
        lengths: Sequence[int] | None = None,
        max_length: int | None = None,
        padding: Literal["left", "right"] = "right",
        loss_mask_only: bool = False,
        device: torch.device | str | None = None,
    ) -> Rows:
        """Rows of one sample per line, every line padded to the same length ("bshd").

        Args:
            tokens: ``[N, S]`` tensor with ``lengths`` given, or one unpadded list of ids per sample.
            response_lengths: how many tokens at the end of each sample are response.
            loss_masks, loss_mask_only, device: as for :meth:`packed`.
            lengths: true length of each line when ``tokens`` is one padded tensor.
            max_length: padded length of a line; default ``S``, or the longest sample.
            padding: on which side the padding is.

        >>> Rows.padded([[7, 8, 9], [4, 5, 6, 7]], [1, 2], padding="left").index.tolist()
        [2, 5, 6]
        """
        if padding not in ("left", "right"):
            raise LogitlessError(f'Rows.padded: padding must be "left" or "right" but is {padding!r}.')
        if isinstance(tokens, Tensor):
            tokens, max_length = _unpad(tokens, lengths, max_length, padding)
        elif lengths is not None:
            raise LogitlessError("Rows.padded: lengths goes with one [N, S] tensor; lists carry their own length.")
        batch = _Batch.check("Rows.padded", tokens, response_lengths, loss_masks, loss_mask_only)
        longest = int(batch.lengths.max()) if len(tokens) else 0
        width = longest if max_length is None else max_length
        if width < longest:
            sample = int(batch.lengths.argmax())
            raise LogitlessError(f"Rows.padded: sample {sample} has {longest} tokens but max_length is {width}.")
        sample, offset = _ragged_arange(batch.lengths)
        place = sample * width + offset
        if padding == "left":
            place = place + (width - batch.lengths)[sample]
        return _select(batch, place, sample, offset, (len(tokens), width), device)

    @staticmethod
    def at(index: Tensor | Sequence[int], target: Tensor | Sequence[int], num_tokens: int | None = None) -> Rows:
        """Rows from a plain pair of lists: score ``target[i]`` under logits row ``index[i]``.

        The index is checked once, here (one device-to-host copy if it lives on an accelerator).

        Args:
            index: ``[R]`` distinct rows of the flattened logits.
            target: ``[R]`` token ids.
            num_tokens: rows of the logits; default "any number past the largest index".
        """
        index, target = _ids(index, "Rows.at: index"), _ids(target, "Rows.at: target")
        if index.numel() != target.numel():
            raise LogitlessError(f"Rows.at: index has {index.numel()} entries but target has {target.numel()}.")
        ordered = index.cpu().sort().values
        if ordered.numel() and int(ordered[0]) < 0:
            raise LogitlessError(f"Rows.at: index must be 0 or more but has {int(ordered[0])}.")
        twice = (ordered[1:] == ordered[:-1]).nonzero()
        if twice.numel():
            raise LogitlessError(
                f"Rows.at: index holds row {int(ordered[twice[0, 0]])} more than once. "
                f"A row has one target; score further targets in calls of their own."
            )
        past = int(ordered[-1]) + 1 if ordered.numel() else 0
        if num_tokens is not None and num_tokens < past:
            raise LogitlessError(f"Rows.at: index reaches row {past - 1} but num_tokens is {num_tokens}.")
        shape = None if num_tokens is None else (num_tokens,)
        return _single_sample(index, target.to(index.device), shape, reach=past)

    @staticmethod
    def every(target: Tensor) -> Rows:
        """Every row of ``[..., V]`` logits, for targets of shape ``[...]``; ``-100`` leaves a row out."""
        flat = _ids(target.reshape(-1) if isinstance(target, Tensor) else target, "Rows.every: target")
        index = torch.arange(flat.numel(), device=flat.device)
        return _single_sample(index, flat, tuple(target.shape))

    def __len__(self) -> int:
        return self.index.numel()

    @property
    def num_tokens(self) -> int | None:
        """Rows of the logits this plan was made for, or None where any number will do."""
        return None if self.token_shape is None else math.prod(self.token_shape)

    def take(self, x: Tensor) -> Tensor:
        """The planned rows of ``x``: ``[T, ...]`` (or ``[N, S, ...]``) becomes ``[R, ...]``."""
        shape = x.shape[:1] if self.token_shape is None else self.token_shape
        if tuple(x.shape[: len(shape)]) != tuple(shape):
            raise LogitlessError(
                f"Rows.take: x has shape {list(x.shape)} but these rows were made for leading shape {list(shape)}."
            )
        return x.flatten(0, len(shape) - 1).index_select(0, self.index)

    def split(self, x: Tensor) -> list[Tensor]:
        """Per-sample results: ``[R]`` becomes one tensor per sample, as long as the response held here.

        Where rows were dropped by ``loss_mask_only`` their places hold zero. Differentiable.
        """
        return list(self._hold(x, "split").split(self.held))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of :meth:`split`: one tensor per sample, as long as its held response, becomes ``[R]``."""
        if len(parts) != len(self.held):
            raise LogitlessError(f"Rows.join: got {len(parts)} tensors for {len(self.held)} samples.")
        for sample, (part, held) in enumerate(zip(parts, self.held, strict=True)):
            if part.shape[0] != held:
                raise LogitlessError(
                    f"Rows.join: sample {sample} has {part.shape[0]} entries but {held} response tokens here."
                )
        if not parts:
            raise LogitlessError("Rows.join: there are no samples, so neither dtype nor device is known.")
        x = torch.cat(list(parts))
        return x if self.slot is None else x.index_select(0, self.slot)

    def expand(self, x: Tensor) -> Tensor:
        """Scatter ``[R]`` back to one value per token, zeros elsewhere: ``[T]``, or ``[N, S]`` if padded."""
        self._check_rows(x, "expand")
        if self.token_shape is None:
            raise LogitlessError("Rows.expand: the full length is unknown. Pass num_tokens to Rows.at.")
        full = x.new_zeros((math.prod(self.token_shape), *x.shape[1:])).index_copy(0, self.index, x)
        return full.reshape(*self.token_shape, *x.shape[1:])

    def sum_by_sample(self, x: Tensor) -> Tensor:
        """Sum of each sample's rows: ``[R]`` becomes ``[N]``. Same bits on every run (no atomics)."""
        self._check_rows(x, "sum_by_sample")
        lengths = torch.tensor(self.counts, device=x.device)
        return torch.segment_reduce(x, "sum", lengths=lengths, unsafe=True, initial=0)

    def _hold(self, x: Tensor, caller: str) -> Tensor:
        self._check_rows(x, caller)
        if self.slot is None:
            return x
        return x.new_zeros((sum(self.held), *x.shape[1:])).index_copy(0, self.slot, x)

    def _check_rows(self, x: Tensor, caller: str) -> None:
        if x.dim() == 0 or x.shape[0] != len(self):
            raise LogitlessError(f"Rows.{caller}: x has shape {list(x.shape)} but there are {len(self)} rows.")


@dataclass(frozen=True, eq=False)
class _Batch:
    """A checked batch: lengths on the host, ids and masks joined end to end."""

    ids: Tensor
    lengths: Tensor
    responses: Tensor
    mask: Tensor | None

    @staticmethod
    def check(
        caller: str,
        tokens: Sequence[Tokens],
        response_lengths: Sequence[int],
        loss_masks: Sequence[Tensor | Sequence[int]] | None,
        loss_mask_only: bool,
    ) -> _Batch:
        responses = [int(r) for r in response_lengths]
        if len(responses) != len(tokens):
            raise LogitlessError(f"{caller}: got {len(tokens)} samples but {len(responses)} response_lengths.")
        lengths = [len(t) for t in tokens]
        for sample, (total, response) in enumerate(zip(lengths, responses, strict=True)):
            if response < 0 or response > total:
                raise LogitlessError(f"{caller}: sample {sample} has {total} tokens but a response of {response}.")
            if response and response == total:
                raise LogitlessError(
                    f"{caller}: sample {sample} has an empty prompt, so no row predicts its first token. "
                    f"Prepend a token (BOS) or shorten the response to {response - 1}."
                )
        if loss_mask_only and loss_masks is None:
            raise LogitlessError(f"{caller}: loss_mask_only=True needs loss_masks.")
        mask = None
        if loss_masks is not None:
            _check_masks(caller, loss_masks, responses)
            # The number of scored rows depends on the mask, so a mask on an accelerator is read once, here.
            mask = _concatenate(loss_masks).cpu().bool() if loss_mask_only else None
        return _Batch(_concatenate(tokens), torch.tensor(lengths), torch.tensor(responses), mask)


def _select(
    batch: _Batch,
    place: Tensor,
    sample: Tensor,
    offset: Tensor,
    token_shape: tuple[int, ...],
    device: torch.device | str | None,
) -> Rows:
    """The one filter: of all local tokens at ``place``, holding ``(sample, offset)``, keep the rows that matter."""
    prompt = batch.lengths - batch.responses
    first = prompt[sample] - 1
    scored = ((offset >= first) & (offset < batch.lengths[sample] - 1)).nonzero().squeeze(1)
    place, sample, position = place[scored], sample[scored], (offset - first)[scored]
    held = tuple(torch.bincount(sample, minlength=len(prompt)).tolist())
    slot = None
    if batch.mask is not None:
        starts = batch.responses.cumsum(0) - batch.responses
        slot = batch.mask[starts[sample] + position].nonzero().squeeze(1)
        place, sample, position = place[slot], sample[slot], position[slot]
    counts = tuple(torch.bincount(sample, minlength=len(prompt)).tolist())
    first_id = batch.lengths.cumsum(0) - batch.responses
    source = first_id[sample] + position
    device = torch.device(device) if device is not None else batch.ids.device
    target_range = None
    if batch.ids.device.type == "cpu":
        target = batch.ids[source]
        if target.numel():
            target_range = (int(target.min()), int(target.max()))
    else:
        target = batch.ids[source.to(batch.ids.device, non_blocking=True)].to(device)
    # One copy for what was computed on the host.
    place, sample, position = torch.stack([place, sample, position]).to(device, non_blocking=True)
    slot = None if slot is None else slot.to(device)
    return Rows(place, target.to(device), sample, position, token_shape, held, counts, slot, target_range=target_range)


def _single_sample(index: Tensor, target: Tensor, token_shape: tuple[int, ...] | None, reach: int = 0) -> Rows:
    count = index.numel()
    position = torch.arange(count, device=index.device)
    return Rows(index, target, torch.zeros_like(index), position, token_shape, (count,), (count,), reach=reach)


def _ragged_arange(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """``[2, 3]`` becomes samples ``[0, 0, 1, 1, 1]`` and offsets ``[0, 1, 0, 1, 2]``."""
    sample = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    starts = lengths.cumsum(0) - lengths
    return sample, torch.arange(len(sample)) - starts[sample]


def _concatenate(parts: Sequence[Tensor | Sequence[int]]) -> Tensor:
    if not len(parts):
        return torch.zeros(0, dtype=torch.int64)
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts)).to(torch.int64)  # pyright: ignore[reportArgumentType]
    # An array is filled at C speed; torch.tensor inspects every Python integer.
    ids = array("q", itertools.chain.from_iterable(parts))  # pyright: ignore[reportArgumentType, reportCallIssue]
    return torch.frombuffer(ids, dtype=torch.int64).clone() if len(ids) else torch.zeros(0, dtype=torch.int64)


def _check_masks(caller: str, masks: Sequence[Tensor | Sequence[int]], responses: Sequence[int]) -> None:
    if len(masks) != len(responses):
        raise LogitlessError(f"{caller}: got {len(responses)} samples but {len(masks)} loss_masks.")
    for sample, (mask, response) in enumerate(zip(masks, responses, strict=True)):
        if len(mask) != response:
            raise LogitlessError(
                f"{caller}: the loss mask of sample {sample} has {len(mask)} entries but its response has "
                f"{response} tokens."
            )


def _unpad(
    tokens: Tensor, lengths: Sequence[int] | None, max_length: int | None, padding: str
) -> tuple[list[Tensor], int]:
    if tokens.dim() != 2:
        raise LogitlessError(
            f"Rows.padded: tokens must be [N, S] or a list of samples but has shape {list(tokens.shape)}."
        )
    if lengths is None or len(lengths) != tokens.shape[0]:
        came = "no lengths" if lengths is None else f"{len(lengths)} lengths"
        raise LogitlessError(f"Rows.padded: tokens is one tensor of {tokens.shape[0]} lines but there are {came}.")
    width = tokens.shape[1]
    if max_length is not None and max_length != width:
        raise LogitlessError(
            f"Rows.padded: max_length is {max_length} but tokens is {width} wide. Leave max_length out."
        )
    for sample, length in enumerate(lengths):
        if not 0 <= int(length) <= width:
            raise LogitlessError(f"Rows.padded: sample {sample} has length {length} but tokens is {width} wide.")
    lines = zip(tokens, lengths, strict=True)
    return [line[width - int(n) :] if padding == "left" else line[: int(n)] for line, n in lines], width


def _ids(x: Tensor | Sequence[int], argument: str) -> Tensor:
    x = x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.int64)
    if x.dim() != 1:
        raise LogitlessError(f"{argument} must be one-dimensional but has shape {list(x.shape)}.")
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise LogitlessError(f"{argument} must hold integers but has dtype {x.dtype}.")
    return x.to(torch.int64)
