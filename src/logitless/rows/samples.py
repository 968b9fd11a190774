"""A batch of samples, checked and joined on the CPU: what every layout starts from.

Nothing here knows about rows of logits. Errors name the sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from logitless.collectives import fingerprint
from logitless.errors import LogitlessError
from logitless.errors.arguments import LARGEST, check_flags, dense, refused, sequence
from logitless.rows.integers import holds_integers, integers, joined
from logitless.rows.layouts import Scheme, here, round_up
from logitless.spec import IGNORE, inspectable

Tokens = Tensor | Sequence[int]


@dataclass(frozen=True, eq=False)
class Samples:
    """A checked batch.

    Attributes:
        ids: all token ids, sample after sample, on the device they came on.
        lengths: ``[N]`` tokens of each sample, on the CPU.
        responses: ``[N]`` response tokens at the end of each sample, on the CPU.
        mask: loss mask of every response token, sample after sample, or None.
        mask_only: whether rows with a zero mask are to be left out.
    """

    ids: Tensor
    lengths: Tensor
    responses: Tensor
    mask: Tensor | None
    mask_only: bool

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def prompts(self) -> Tensor:
        """``[N]`` prompt tokens of each sample."""
        return self.lengths - self.responses

    @property
    def totals(self) -> Tensor:
        """``[N]`` response tokens of each sample that count in the loss: mask nonzero, id not ``-100``.

        Differences of running sums, so that nothing waits for the device of the ids or the masks.
        """
        stop, counted = self.lengths.cumsum(0), self.ids != IGNORE
        if self.mask is not None:
            response_stop = self.responses.cumsum(0)
            before = torch.repeat_interleave(stop - response_stop, self.responses)
            source = torch.arange(len(before), device=before.device) + before
            counted = counted[source.to(counted.device)].to(self.mask.device) & self.mask
            stop = response_stop
        running = torch.nn.functional.pad(counted.cumsum(0), (1, 0))
        return running[stop.to(running.device)] - running[(stop - self.responses).to(running.device)]

    def fingerprints(self) -> tuple[list[str], list[str]]:
        """Fingerprints of each sample's tokens, and of its loss mask, for ranks to compare. Waits for the device."""
        lengths, responses = self.lengths.tolist(), self.responses.tolist()
        masks = [""] * len(self) if self.mask is None else [fingerprint(x) for x in self.mask.split(responses)]
        return [fingerprint(x) for x in self.ids.split(lengths)], masks

    @staticmethod
    def check(
        caller: str,
        tokens: Sequence[Tokens],
        response_lengths: Sequence[int],
        loss_masks: Sequence[Tensor | Sequence[int]] | None,
        loss_mask_only: bool,
    ) -> Samples:
        """The batch, of a list that :func:`check_samples` has let through."""
        check_flags(caller, loss_mask_only=loss_mask_only)
        if not hasattr(response_lengths, "__len__") or getattr(response_lengths, "shape", None) == ():
            raise LogitlessError(
                f"{caller}: response_lengths must be a list, the response tokens of each sample, but is "
                f"{response_lengths!r}. The same for all is [n] * len(tokens)."
            )
        responses = integers(response_lengths, f"{caller}: response_lengths").tolist()
        for sample, ids in enumerate(tokens):
            if isinstance(ids, Tensor) and (ids.dim() != 1 or not holds_integers(ids)):
                raise LogitlessError(
                    f"{caller}: the tokens of sample {sample} must be one-dimensional integers but are "
                    f"{list(ids.shape)} {ids.dtype}."
                )
        if len(responses) != len(tokens):
            raise LogitlessError(f"{caller}: got {len(tokens)} samples but {len(responses)} response_lengths.")
        lengths = [len(t) for t in tokens]
        for sample, (total, response) in enumerate(zip(lengths, responses, strict=True)):
            if response < 0 or response > total:
                raise LogitlessError(f"{caller}: sample {sample} has {total} tokens but a response of {response}.")
            if response and response == total:
                raise LogitlessError(
                    f"{caller}: sample {sample} has an empty prompt, so no row predicts its first token. "
                    f"Prepend a token (BOS), or make it {response - 1} in response_lengths."
                )
        if loss_mask_only and loss_masks is None:
            raise LogitlessError(f"{caller}: loss_mask_only=True needs loss_masks.")
        mask = None
        if loss_masks is not None:
            sequence(loss_masks, f"{caller}: loss_masks", "a list of one mask for each sample")
            _check_masks(caller, loss_masks, responses)
            device = next((x.device for x in loss_masks if isinstance(x, Tensor)), "cpu")
            flat = [x if isinstance(x, Tensor) else torch.tensor(x, device=device) for x in loss_masks]
            mask = (torch.cat(flat) if flat else torch.zeros(0, device="cpu")) != 0
            # The number of scored rows depends on the mask, so a mask on an accelerator is read once, here.
            mask = mask.cpu() if loss_mask_only else mask
        ids = joined(tokens, lambda sample: f"{caller}: the tokens of sample {sample}")
        on_cpu = {"dtype": torch.int64, "device": "cpu"}
        return Samples(ids, torch.tensor(lengths, **on_cpu), torch.tensor(responses, **on_cpu), mask, loss_mask_only)


def check_samples(caller: str, tokens: Any) -> None:
    """Raise for one sample where a list of samples is wanted."""
    bare = isinstance(tokens, Tensor) and (tokens.dim() < 2 or tokens.layout != torch.strided)
    listed = isinstance(tokens, Sequence | Tensor) and not isinstance(tokens, str | bytes)
    if bare or not listed or not all(hasattr(sample, "__len__") for sample in tokens):
        came = type(tokens).__name__
        if isinstance(tokens, Tensor | list | tuple):
            came = f"one tensor of shape {list(tokens.shape)}" if isinstance(tokens, Tensor) else f"one {came} of ids"
        raise LogitlessError(
            f"{caller}: tokens must be a list of samples, each a list or 1-D tensor of ids, but is {came}. One sample "
            f"is [tokens]; samples that are already end to end in one tensor are tokens.split(lengths)."
        )


def _check_masks(caller: str, masks: Sequence[Tensor | Sequence[int]], responses: Sequence[int]) -> None:
    if len(masks) != len(responses):
        raise LogitlessError(f"{caller}: got {len(responses)} samples but {len(masks)} loss_masks.")
    for sample, (mask, response) in enumerate(zip(masks, responses, strict=True)):
        wanted, argument = "a list or 1-D tensor of numbers", f"{caller}: loss_masks: the mask of sample {sample}"
        if len(sequence(mask, argument, wanted)) != response:
            raise LogitlessError(f"{argument} has {len(mask)} entries but its response has {response} tokens.")
        flat = mask.dim() == 1 if isinstance(mask, Tensor) else all(isinstance(x, Real) for x in mask)
        if not flat:
            raise refused(argument, wanted, mask)


def unpad(
    tokens: Tensor, lengths: Sequence[int] | None, attention_mask: Tensor | None, max_length: int | None, padding: str
) -> tuple[list[Tensor], int, Tensor]:
    """The samples of padded lines, the width of a line, and how many places of each line come before its sample."""
    if dense(tokens, "Rows.padded: tokens", "[N, S] integers or a list of samples", numbers=True).dim() != 2:
        raise LogitlessError(
            f"Rows.padded: tokens must be [N, S] or a list of samples but has shape {list(tokens.shape)}."
        )
    width = tokens.shape[1]
    if max_length is not None and max_length != width:
        raise LogitlessError(
            f"Rows.padded: max_length is {max_length} but tokens is {width} wide. Leave max_length out."
        )
    if attention_mask is not None:
        if lengths is not None:
            raise LogitlessError("Rows.padded: give lengths or attention_mask, not both.")
        counts, lead = _attended(tokens, attention_mask)
    else:
        counts = _counts(tokens, lengths)
        lead = width - counts if padding == "left" else torch.zeros_like(counts)
        _check_one_side(tokens, counts, padding)
    places = zip(tokens, lead.tolist(), counts.tolist(), strict=True)
    return [line[first : first + n] for line, first, n in places], width, lead


def _counts(tokens: Tensor, lengths: Sequence[int] | None) -> Tensor:
    """``[N]`` tokens of each line, as the caller gave them."""
    num, width = tokens.shape
    counts = None if lengths is None else integers(lengths, "Rows.padded: lengths").cpu()
    if counts is None or len(counts) != num:
        came = "no" if counts is None else len(counts)
        raise LogitlessError(
            f"Rows.padded: tokens is one tensor of {num} lines but there are {came} lengths. Pass attention_mask=, or "
            f"lengths=, how many tokens each line has without its padding, or use "
            f"Rows.from_mask(input_ids, completion_mask)."
        )
    for sample, length in enumerate(counts.tolist()):
        if not 0 <= length <= width:
            raise LogitlessError(f"Rows.padded: sample {sample} has length {length} but tokens is {width} wide.")
    return counts


def _attended(tokens: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """``[N]`` tokens of each line, and padding before them: any number on either side, but none between them."""
    dense(attention_mask, "Rows.padded: attention_mask", f"{list(tokens.shape)} like tokens", numbers=True)
    if attention_mask.shape != tokens.shape:
        raise LogitlessError(
            f"Rows.padded: attention_mask must be {list(tokens.shape)} like tokens but is {list(attention_mask.shape)}."
        )
    real = attention_mask.detach().cpu() != 0
    counts, place = real.sum(1), torch.arange(tokens.shape[1], device="cpu")
    lead = torch.where(real, place, tokens.shape[1]).amin(1) if real.numel() else torch.zeros_like(counts)
    lead = torch.where(counts > 0, lead, 0)
    torn = (real != ((place >= lead[:, None]) & (place < (lead + counts)[:, None]))).any(1).nonzero()
    if len(torn):
        raise LogitlessError(
            f"Rows.padded: attention_mask has padding between the tokens of line {int(torn[0])}, so they are no one "
            f"sample. Is it a mask of the tokens to score? That goes to Rows.from_mask."
        )
    return counts, lead


def _check_one_side(tokens: Tensor, counts: Tensor, padding: str) -> None:
    """Raise where lengths leave out more than one id, and padding on both sides of every line would explain them.

    Lines may hold anything after their end, such as what a model went on to write. A batch is refused only if there is
    an id of which every line has as many copies at its two ends, together, as lengths leave out, or one more (an
    end-of-sequence token that is also the padding), and none in between. On an accelerator nobody looks.
    """
    if not inspectable(tokens) or not tokens.numel():
        return
    place, width = torch.arange(tokens.shape[1], device="cpu"), tokens.shape[1]
    left_out = width - counts
    out = place >= counts[:, None] if padding == "right" else place < left_out[:, None]
    mixed = (out & (tokens != (tokens[:, -1:] if padding == "right" else tokens[:, :1]))).any(1).nonzero()
    if not len(mixed):
        return
    line = int(mixed[0])
    for pad in {int(tokens[line, 0]), int(tokens[line, -1])}:
        lead, tail = ((x == pad).cumprod(1).sum(1) for x in (tokens, tokens.flip(1)))
        # A line of nothing but padding is all lead and all tail.
        ends = (lead + tail).clamp(max=width)
        explained = (ends >= left_out) & (ends <= left_out + 1) & (ends == (tokens == pad).sum(1))
        if bool(explained.all()):
            raise LogitlessError(
                f"Rows.padded: lengths leave out {int(left_out[line])} places of line {line} on the {padding}, but it "
                f"has {int(lead[line])} of padding (id {pad}) on the left and {int(tail[line])} on the right. Pass "
                f"attention_mask= in place of lengths."
            )


def spans_of(
    batch: Samples, cp: Scheme | None, align: int | None, cu_seqlens: Tensor | Sequence[int] | None
) -> tuple[Tensor, int]:
    """Padded length of each sample, and of all of them with the padding after the last, checked against the scheme."""
    multiple = 1 if cp is None else cp.multiple
    if cu_seqlens is None:
        align = multiple if align is None else align
        if type(align) is not int or not 1 <= align <= LARGEST or align % multiple:
            raise LogitlessError(
                f"Rows.packed: align must be a positive multiple of {multiple}{here(cp)} but is {align!r}."
            )
        spans = round_up(batch.lengths, align)
        return spans, int(spans.sum())
    if align is not None:
        raise LogitlessError("Rows.packed: give align or cu_seqlens, not both.")
    starts = integers(cu_seqlens, "Rows.packed: cu_seqlens").cpu()
    if len(starts) not in (len(batch) + 1, len(batch) + 2):
        raise LogitlessError(
            f"Rows.packed: cu_seqlens has {len(starts)} entries for {len(batch)} samples; wanted {len(batch) + 1}, or "
            f"{len(batch) + 2} with padding after the last sample."
        )
    spans = starts.diff()[: len(batch)]
    for sample, (span, length) in enumerate(zip(spans.tolist(), batch.lengths.tolist(), strict=True)):
        if span < length or span % multiple:
            raise LogitlessError(
                f"Rows.packed: cu_seqlens gives sample {sample} {span} places, but it has {length} tokens and its "
                f"places must be a multiple of {multiple}{here(cp)}."
            )
    if starts[0] != 0 or starts[-1] < starts[len(batch)]:
        raise LogitlessError(f"Rows.packed: cu_seqlens must start at 0 and never fall but is {starts.tolist()}.")
    return spans, int(starts[-1])


def moved(tensors: Sequence[Tensor | None], device: torch.device) -> list[Any]:
    """Integers and masks on a device: those that must go there from a CPU go in one copy, in the order given."""
    going = {} if device.type == "cpu" else {i: x for i, x in enumerate(tensors) if x is not None and x.is_cpu}
    out = [x if x is None or i in going else x.to(device) for i, x in enumerate(tensors)]
    if going:
        sent = torch.cat([x.reshape(-1).to(torch.int64) for x in going.values()]).to(device, non_blocking=True)
        parts = sent.split([x.numel() for x in going.values()])
        for (i, x), part in zip(going.items(), parts, strict=True):
            out[i] = part.view(x.shape).to(x.dtype)
    return out
