"""Which rows of the logits matter, and where each result belongs. Built once per micro-batch, on the CPU.

Logit row t predicts token t+1, so a sample of prompt length P and total length L needs rows P-1 .. L-2:

    tokens   p0 p1 p2 r0 r1 r2        P = 3, L = 6
    rows           ^  ^  ^            index  2 3 4
    target         r0 r1 r2           position 0 1 2

A layout only decides the sample and the offset of each local token; one filter (``_select``) does the rest. Packed
batches, padded batches and context-parallel schemes differ in nothing else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from logitless.collectives import resolve_group
from logitless.errors import LogitlessError
from logitless.errors.arguments import check_name, dense, device_named, instance, refused
from logitless.rows.exchange import GradRule, check_one_batch, end_to_end, exchanged, whole_lengths
from logitless.rows.integers import check_distinct, device_of, integers, whole_number
from logitless.rows.layouts import Scheme, check_scheme, check_scheme_of_lines, here, num_ranks, ragged_arange, round_up
from logitless.rows.masks import samples_of_labels, samples_of_mask
from logitless.rows.samples import Samples, Tokens, check_samples, moved, spans_of, unpad
from logitless.spec import IGNORE, inspectable, tracked_by_autograd


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows to score, their targets, and the way back to samples.

    Make one with :meth:`from_mask`, :meth:`from_labels`, :meth:`packed`, :meth:`padded`, :meth:`at` or :meth:`every`.

    Attributes:
        index: ``[R]`` row of the (flattened) logits, each at most once.
        target: ``[R]`` token id that row should predict; ``-100`` is "ignore".
        sample: ``[R]`` which sample the row belongs to, ascending.
        position: ``[R]`` place of the target within its response.
        token_shape: leading shape of the logits these rows were made for: ``(T,)``, ``(N, S)``, or None for any.
        held: response tokens of each sample that have a row here, masked ones included.
        counts: rows of each sample that are scored here.
        totals: ``[N]`` response tokens of each sample that count in the loss, on all ranks together: the mask is
            nonzero and the target is not ``-100``.
        slot: ``[R]`` place of each row among the held response tokens, or None where all of them are scored.
        mask: ``[R]`` loss mask of each row, or None if there are no masks.
        response: ``[R]`` place of each row's target among all response tokens of the batch, sample after sample.
        response_lengths: response tokens of each sample, on all ranks together.
        spans: padded length of each whole sample.
        cp: how the sequence is split, or None.
        in_order: whether the rows are all rows of the logits, in order.
        reach: one past the largest index, where the shape alone does not say it.
        target_range: smallest and largest target, if they were known before the rows went to an accelerator.
        batch: the samples that the rows were cut from, for comparing; None where there are none.
    """

    index: Tensor
    target: Tensor
    sample: Tensor
    position: Tensor
    token_shape: tuple[int, ...] | None
    held: tuple[int, ...]
    counts: tuple[int, ...]
    totals: Tensor
    slot: Tensor | None = None
    mask: Tensor | None = None
    response: Tensor | None = None
    response_lengths: tuple[int, ...] | None = None
    spans: tuple[int, ...] | None = None
    cp: Scheme | None = None
    in_order: bool = False
    reach: int = 0
    target_range: tuple[int, int] | None = None
    batch: Samples | None = None

    def __post_init__(self) -> None:
        for name in ("index", "target", "sample", "position", "totals", "slot", "mask", "response"):
            x = getattr(self, name)
            if x is not None and not torch.compiler.is_compiling() and x.is_inference():
                object.__setattr__(self, name, tracked_by_autograd(x))

    @staticmethod
    def from_mask(
        input_ids: Tensor,
        mask: Tensor,
        attention_mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        position_ids: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> Rows:
        """Rows of a batch as Hugging Face, TRL and verl make it: any padding, and a mask of the tokens to score.

        Args:
            input_ids: ``[N, S]``, one sample per line, padded on either side or on both; or ``[T]`` or ``[1, T]``,
                samples end to end, with ``cu_seqlens`` or ``position_ids``.
            mask: of the same shape, nonzero at the tokens to score (TRL's completion mask, verl's response mask in the
                shape of ``input_ids``). A sample's response is what lies between the first and the last of them;
                :meth:`split` and its kin have zeros at tokens in between that are not scored.
            attention_mask: of the same shape; a check that nothing scored is padding, or follows on it.
            cu_seqlens: ``[N + 1]`` starts of the samples of a pack.
            position_ids: of the pack, counting from 0 in each sample.
            device: where the rows will be used; default the device of ``input_ids``.

        The mask is read once, here, which waits for its device. ``rows.expand(x, at="tokens")`` is ``[N, S]`` again.

        >>> ids = torch.tensor([[0, 0, 5, 6, 7, 8], [0, 3, 4, 9, 0, 0]])  # 0 is padding, on both sides
        >>> rows = Rows.from_mask(ids, torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 0, 0]]))
        >>> rows.index.tolist(), rows.target.tolist(), rows.counts
        ([3, 4, 8], [7, 8, 9], (2, 1))
        """
        batch, spans, sample, offset = samples_of_mask(input_ids, mask, attention_mask, cu_seqlens, position_ids)
        return _select("Rows.from_mask", batch, sample, offset, tuple(input_ids.shape), spans, None, device)

    @staticmethod
    def from_labels(
        labels: Tensor,
        *,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        position_ids: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> Rows:
        """Rows of ``labels`` as Transformers has them: in the places of ``input_ids``, not shifted.

        Row t predicts ``labels[t + 1]``; labels of -100 have no row. The mean of ``-logprobs(logits, rows).logprob``
        is the loss that a Transformers model returns. Labels given as targets would be one token off: targets stand
        in the places of the rows that predict them.

        Args:
            labels: ``[N, S]``, one sample per line, or ``[T]``, one sample; or ``[T]`` or ``[1, T]``, samples end to
                end, with ``cu_seqlens`` or ``position_ids``. The first label of a sample is never scored.
            cu_seqlens, position_ids: of the pack, as for :meth:`from_mask`. Transformers knows of no borders there:
                the labels of a pack have -100 at the first token of every sample.
            device: where the rows will be used; default the device of ``labels``.

        >>> rows = Rows.from_labels(torch.tensor([[-100, -100, 7, 8], [-100, 9, -100, -100]]))
        >>> rows.index.tolist(), rows.target.tolist()
        ([1, 2, 4], [7, 8, 9])
        """
        batch, spans, sample, offset = samples_of_labels(labels, cu_seqlens, position_ids)
        return _select("Rows.from_labels", batch, sample, offset, tuple(labels.shape), spans, None, device)

    @staticmethod
    def packed(
        tokens: Sequence[Tokens],
        response_lengths: Sequence[int],
        loss_masks: Sequence[Tensor | Sequence[int]] | None = None,
        *,
        loss_mask_only: bool = False,
        cp: Scheme | None = None,
        align: int | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        num_tokens: int | None = None,
        device: torch.device | str | None = None,
    ) -> Rows:
        """Rows of samples laid end to end ("thd"), whole or split over a context-parallel group.

        Args:
            tokens: one 1-D tensor or list of ids per sample, prompt and response together, the whole sample on every
                rank.
            response_lengths: how many tokens at the end of each sample are response.
            loss_masks: one mask per sample, as long as its response; nonzero means "counts".
            loss_mask_only: score only the rows whose mask is nonzero. :meth:`split` and :meth:`gather` still return
                every response token, with zeros where the mask is 0.
            cp: :class:`Zigzag`, :class:`Contiguous`, or a :class:`~logitless.rows.layouts.Scheme` of your own; None if
                the sequence is not split.
            align: each sample is padded to a multiple of this; default 1, and ``2 * size`` for zigzag.
            cu_seqlens: ``[N + 1]`` starts of the padded samples in the whole sequence, instead of ``align``; one more
                entry means padding after the last sample.
            num_tokens: rows of the local logits, padding included; default as many as samples or ``cu_seqlens`` need.
            device: where the rows will be used; default the device of the tokens, torch's default device for lists.

        >>> rows = Rows.packed([[7, 8, 9], [4, 5, 6, 7]], [1, 2])
        >>> rows.index.tolist(), rows.target.tolist(), rows.position.tolist()
        ([1, 4, 5], [9, 6, 7], [0, 0, 1])
        """
        check_scheme(cp)
        check_samples("Rows.packed", tokens)
        batch = Samples.check("Rows.packed", tokens, response_lengths, loss_masks, loss_mask_only)
        spans, total = spans_of(batch, cp, align, cu_seqlens)
        fewest = -(-total // num_ranks(cp))
        num_tokens = fewest if num_tokens is None else whole_number(num_tokens, "Rows.packed: num_tokens")
        sample, offset = ragged_arange(spans) if cp is None else cp.tokens(spans, num_tokens)
        if num_tokens < len(sample):
            raise LogitlessError(
                f"Rows.packed: num_tokens is {num_tokens} but the samples need {len(sample)} tokens{here(cp)}. "
                f"Pass the padded length of the local pack, or leave it out."
            )
        device = device_of(tokens) if device is None else device
        return _select("Rows.packed", batch, sample, offset, (num_tokens,), spans, cp, device)

    @staticmethod
    def padded(
        tokens: Tensor | Sequence[Tokens],
        response_lengths: Sequence[int],
        loss_masks: Sequence[Tensor | Sequence[int]] | None = None,
        *,
        lengths: Sequence[int] | None = None,
        attention_mask: Tensor | None = None,
        max_length: int | None = None,
        padding: Literal["left", "right"] = "right",
        loss_mask_only: bool = False,
        cp: Scheme | None = None,
        device: torch.device | str | None = None,
    ) -> Rows:
        """Rows of one sample per line, every line padded to the same length ("bshd").

        Args:
            tokens: ``[N, S]`` tensor with ``attention_mask`` or ``lengths`` given, or one unpadded list of ids per
                sample.
            response_lengths: how many tokens at the end of each sample are response.
            loss_masks, loss_mask_only, device: as for :meth:`packed`.
            lengths: true length of each line when ``tokens`` is one tensor, padded on one side. On the CPU
                a batch is refused whose lines are padded on the other side, or on both.
            attention_mask: ``[N, S]`` in place of ``lengths``, nonzero at the tokens of each line, which may be padded
                on either side or on both, as left-padded prompts with right-padded completions are.
            max_length: padded length of a line; default ``S``, or the longest sample.
            padding: on which side the padding is; an ``attention_mask`` says it itself.
            cp: a scheme that cuts every sample by itself, such as :class:`Zigzag`, which cuts every line into
                ``2 * size`` chunks of ``ceil(max_length / (2 * size))``.

        >>> Rows.padded([[7, 8, 9], [4, 5, 6, 7]], [1, 2], padding="left").index.tolist()
        [2, 5, 6]
        """
        check_name(padding, ("left", "right"), "Rows.padded: padding")
        check_scheme_of_lines(cp)
        max_length = None if max_length is None else whole_number(max_length, "Rows.padded: max_length")
        device, lead = device_of(tokens) if device is None else device, None
        check_samples("Rows.padded", tokens)
        if isinstance(tokens, Tensor):
            tokens, max_length, lead = unpad(tokens, lengths, attention_mask, max_length, padding)
        elif lengths is not None or attention_mask is not None:
            name = "attention_mask" if lengths is None else "lengths"
            raise LogitlessError(f"Rows.padded: {name} goes with one [N, S] tensor; lists carry their own length.")
        batch = Samples.check("Rows.padded", tokens, response_lengths, loss_masks, loss_mask_only)
        longest = int(batch.lengths.max()) if len(batch) else 0
        width = longest if max_length is None else max_length
        if width < longest:
            sample = int(batch.lengths.argmax())
            raise LogitlessError(f"Rows.padded: sample {sample} has {longest} tokens but max_length is {width}.")
        if lead is None:
            lead = width - batch.lengths if padding == "left" else torch.zeros_like(batch.lengths)
        padded = round_up(width, 1 if cp is None else cp.multiple)
        spans = torch.full_like(batch.lengths, padded)
        sample, place = ragged_arange(spans) if cp is None else cp.tokens(spans, width)
        token_shape = (len(batch), padded // num_ranks(cp))
        return _select("Rows.padded", batch, sample, place - lead[sample], token_shape, spans, cp, device)

    @staticmethod
    def at(index: Tensor | Sequence[int], target: Tensor | Sequence[int], num_tokens: int | None = None) -> Rows:
        """Rows from two plain lists: score ``target[i]`` under logits row ``index[i]``.

        The index is checked once, here (one copy to the CPU if it is on an accelerator).

        Args:
            index: ``[R]`` distinct rows of the flattened logits, whose device is that of the rows.
            target: ``[R]`` token ids.
            num_tokens: rows of the logits; default "any number past the largest index".
        """
        device = device_of(index)
        index = integers(index, "Rows.at: index")
        target = integers(target, "Rows.at: target", numbers=not index.is_meta)
        num_tokens = None if num_tokens is None else whole_number(num_tokens, "Rows.at: num_tokens")
        if index.numel() != target.numel():
            raise LogitlessError(f"Rows.at: index has {index.numel()} entries but target has {target.numel()}.")
        shape = None if num_tokens is None else (num_tokens,)
        if index.is_meta:
            # In an estimate nobody has numbers to check; lists have none there, either.
            return single_sample(index, target, shape)
        past = check_distinct(index, num_tokens)
        return single_sample(index.to(device), target.to(device), shape, reach=past)

    @staticmethod
    def every(target: Tensor) -> Rows:
        """Every row of ``[..., V]`` logits, for targets of shape ``[...]``; ``-100`` leaves a row out.

        Row t is scored with ``target[t]``, the token after it. Labels of Transformers, in which that token stands at
        t + 1, go to :meth:`from_labels`.
        """
        dense(target, "Rows.every: target")
        flat = integers(target.flatten(), "Rows.every: target")
        index = torch.arange(flat.numel(), device=flat.device)
        return single_sample(index, flat, tuple(target.shape), in_order=True)

    def __repr__(self) -> str:
        """One line without values, so that nothing waits for a device."""
        number = f"{len(self)} row" + "s" * (len(self) != 1)
        if self.response_lengths is not None:
            number += f" of {len(self.response_lengths)} sample" + "s" * (len(self.response_lengths) != 1)
        tokens = "any tokens" if self.token_shape is None else f"tokens {list(self.token_shape)}"
        split = "" if self.cp is None else f", part {self.cp.rank} of {self.cp.size} ({type(self.cp).__name__})"
        return f"Rows({number}, {tokens}{split}{'' if self.mask is None else ', masked'}, {self.index.device})"

    def __len__(self) -> int:
        return self.index.numel()

    @property
    def num_tokens(self) -> int | None:
        """Tokens that these rows were made for, or None where any number will do."""
        return None if self.token_shape is None else math.prod(self.token_shape)

    @property
    def known_range(self) -> tuple[int, int] | None:
        """Smallest and largest target, if they are known without waiting for a device; None if not.

        They are not known while a CUDA graph is captured: its replay may have other targets in the same memory.
        """
        target = self.target
        if self.target_range is None or torch.compiler.is_compiling() or target._version:
            return None
        return None if target.is_cuda and torch.cuda.is_current_stream_capturing() else self.target_range

    @property
    def complete(self) -> bool:
        """Whether every row is known to count in the loss, and every sample to be here as a whole."""
        split = self.cp is not None and self.cp.size > 1
        return self.mask is None and not split and (self.known_range or (IGNORE, 0))[0] >= 0

    @functools.cached_property
    def counted(self) -> Tensor:
        """``[R]`` whether each row counts in the loss: its mask is nonzero and its target is not ``-100``."""
        scored = self.target != IGNORE
        return scored if self.mask is None else scored & self.mask

    def take(self, x: Tensor) -> Tensor:
        """These rows of ``x``: ``[T, ...]`` (or ``[N, S, ...]``) becomes ``[R, ...]``."""
        dense(x, "Rows.take: x")
        shape = x.shape[:1] if self.token_shape is None else self.token_shape
        if tuple(x.shape[: len(shape)]) != tuple(shape):
            raise LogitlessError(
                f"Rows.take: x has shape {list(x.shape)} but these rows were made for leading shape {list(shape)}."
            )
        return x.flatten(0, len(shape) - 1).index_select(0, self.index)

    def split(self, x: Tensor) -> list[Tensor]:
        """Per-sample results: ``[R]`` becomes one tensor per sample, with an entry for each response token held here.

        Rows that ``loss_mask_only`` left out are zero. Differentiable.
        """
        self._check_rows(x, "split")
        if self.slot is not None:
            x = x.new_zeros((sum(self.held), *x.shape[1:])).index_copy(0, self.slot, x)
        return list(x.split(self.held))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of :meth:`split`: ``[R]`` from one tensor per sample, an entry for each held response token."""
        x = end_to_end("join", "parts", parts, self.held, "{} response tokens here")
        return x if self.slot is None else x.index_select(0, self.slot)

    def from_responses(self, responses: Sequence[Tensor]) -> Tensor:
        """These rows of per-sample tensors that cover *whole* responses (advantages, rewards): ``[R]``.

        Under context parallelism or ``loss_mask_only`` this picks the tokens that are scored here.
        """
        lengths = whole_lengths("from_responses", self)
        whole = end_to_end("from_responses", "responses", responses, lengths, "a response of {} tokens")
        return whole.index_select(0, self.response.to(whole.device))  # pyright: ignore[reportOptionalMemberAccess]

    def gather(self, x: Tensor | Sequence[Tensor], group: Any, *, grad: GradRule, check: bool = False) -> Any:
        """Whole responses on every rank of the sequence group: ``[R]`` becomes one full-length tensor per sample.

        One collective for all samples and all fields; rows that no rank scored are zero.

        Args:
            x: ``[R]`` values, or several such fields of one dtype.
            group: process group or one-dimensional DeviceMesh of the context-parallel ranks; None if not split.
            grad: what backward does, see :mod:`logitless.rows.exchange`: ``"sum"`` if the ranks' losses add up,
                ``"slice"`` if every rank computes the same loss, None for values only.
            check: compare fields over the group first, so that what one rank refuses all refuse, where a sum of other
                sizes would hang or abort. One more small collective.

        Returns:
            A list of ``[response length]`` tensors, or one such list per field.
        """
        whole = exchanged("gather", self, x, group, None, grad, check)
        lists = [list(field.split(whole_lengths("gather", self))) for field in whole]
        return lists[0] if isinstance(x, Tensor) else lists

    def redistribute(
        self, x: Tensor | Sequence[Tensor], to: Rows, group: Any, *, grad: GradRule, check: bool = False
    ) -> Any:
        """The same values in the order of another split: ``[R]`` of these rows becomes ``[R']`` of ``to``.

        For example from contiguous to zigzag. One collective for all samples and all fields; arguments as
        for :meth:`gather`. Rows of ``to`` that no rank scored are zero.
        """
        instance(to, Rows, "Rows.redistribute: to")
        fields = exchanged("redistribute", self, x, group, to, grad, check)
        return fields[0] if isinstance(x, Tensor) else fields

    def check_over(self, group: Any) -> None:
        """Raise on every rank unless the ranks of the sequence group made their rows from one batch, each its own part.

        One small collective, for start-up or debugging.
        """
        process_group = resolve_group(group, "Rows.check_over: group")
        if process_group is not None:
            whole_lengths("check_over", self)
            check_one_batch(self, process_group)

    def expand(self, x: Tensor, *, at: Literal["rows", "tokens"] = "rows") -> Tensor:
        """Results back in the shape of the batch: ``[R]`` becomes ``[N, S]`` if padded, ``[T]`` if packed, 0 elsewhere.

        Args:
            x: ``[R]`` or ``[R, ...]``, such as ``out.logprob``.
            at: "rows": at the row that predicts, as in logits. "tokens": one place on, as in ``input_ids`` and masks.

        >>> rows = Rows.from_mask(torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1]]))
        >>> rows.expand(torch.tensor([1, 2])).tolist(), rows.expand(torch.tensor([3, 4]), at="tokens").tolist()
        ([[0, 1, 2, 0]], [[0, 0, 3, 4]])
        """
        self._check_rows(x, "expand")
        if self.token_shape is None:
            raise LogitlessError("Rows.expand: the full length is unknown. Pass num_tokens to Rows.at.")
        if x.device != self.index.device:
            raise LogitlessError(f"Rows.expand: x is on {x.device} but the rows are on {self.index.device}.")
        if at not in ("rows", "tokens") or (at == "tokens" and (self.cp is not None or self.batch is None)):
            raise LogitlessError(
                f'Rows.expand: at must be "rows", or "tokens" where each row\'s next token is known to be here: not '
                f"under context parallelism, nor of Rows.at and Rows.every. It is {at!r}."
            )
        place = self.index + 1 if at == "tokens" else self.index
        full = x.new_zeros((math.prod(self.token_shape), *x.shape[1:])).index_copy(0, place, x)
        return full.reshape(*self.token_shape, *x.shape[1:])

    def sum_by_sample(self, x: Tensor) -> Tensor:
        """Sum of each sample's rows: ``[R]`` becomes ``[N]``. Same bits on every run (no atomics)."""
        self._check_rows(x, "sum_by_sample")
        if not x.is_floating_point():
            raise refused("Rows.sum_by_sample: x", "a tensor of floats", x)
        lengths = torch.tensor(self.counts, dtype=torch.int64, device=x.device)
        return torch.segment_reduce(x, "sum", lengths=lengths, unsafe=True, initial=0)

    def _check_rows(self, x: Tensor, caller: str) -> None:
        if dense(x, f"Rows.{caller}: x").dim() == 0 or x.shape[0] != len(self):
            raise LogitlessError(f"Rows.{caller}: x has shape {list(x.shape)} but there are {len(self)} rows.")


def _select(
    caller: str,
    batch: Samples,
    sample: Tensor,
    offset: Tensor,
    token_shape: tuple[int, ...],
    spans: Tensor,
    cp: Scheme | None,
    device: torch.device | str | None,
) -> Rows:
    """The one filter: of the local tokens, given by sample and offset, pick those that predict a response token."""
    position = offset - (batch.prompts - 1).index_select(0, sample)
    place = ((position >= 0) & (position < batch.responses.index_select(0, sample))).nonzero().squeeze(1)
    sample, position = sample.index_select(0, place), position.index_select(0, place)
    held = tuple(torch.bincount(sample, minlength=len(batch)).tolist())
    response = (batch.responses.cumsum(0) - batch.responses).index_select(0, sample) + position
    slot = mask = None
    if batch.mask is not None:
        mask = batch.mask[response.to(batch.mask.device)]
        if batch.mask_only:
            slot = mask.nonzero().squeeze(1)
            place, sample, position, response, mask = (x[slot] for x in (place, sample, position, response, mask))
    counts = held if slot is None else tuple(torch.bincount(sample, minlength=len(batch)).tolist())
    source = (batch.lengths.cumsum(0) - batch.responses).index_select(0, sample) + position
    target = batch.ids[source.to(batch.ids.device)]
    target_range = None
    if inspectable(target) and target.numel():
        low, high = target.aminmax()
        target_range = (int(low), int(high))
    device = device_named(device, f"{caller}: device") if device is not None else batch.ids.device
    tensors = {"index": place, "target": target, "sample": sample, "position": position, "response": response}
    tensors |= {"totals": batch.totals, "slot": slot, "mask": mask}
    return Rows(
        **dict(zip(tensors, moved(list(tensors.values()), device), strict=True)),
        token_shape=token_shape,
        held=held,
        counts=counts,
        response_lengths=tuple(batch.responses.tolist()),
        spans=tuple(spans.tolist()),
        cp=cp,
        target_range=target_range,
        batch=batch,
    )


def single_sample(index: Tensor, target: Tensor, shape: tuple[int, ...] | None, **more: Any) -> Rows:
    """Rows that were checked, as one sample. No number is looked at."""
    count, totals = index.numel(), (target != IGNORE).sum(0, keepdim=True)
    position = index if more.get("in_order") else torch.arange(count, device=index.device)
    return Rows(index, target, torch.zeros_like(index), position, shape, (count,), (count,), totals, **more)
