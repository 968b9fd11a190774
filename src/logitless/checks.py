"""The checks every path makes before anything runs: rows, targets, vocabulary, kept ids.

Values that live on an accelerator are not inspected (that would stall the stream); a bad one makes its own row NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from logitless.collectives import agree_over
from logitless.errors import LogitlessError
from logitless.kept import Kept
from logitless.rows import Rows
from logitless.spec import IGNORE, Head, VocabShard

T = TypeVar("T")

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def prepare_over(
    shard: VocabShard | None, caller: str, prepare: Callable[[], T], facts_of: Callable[[T], dict[str, Any]]
) -> T:
    """``prepare()``; if the shard asks for it, compared over its group, so that all ranks raise or none does."""
    if shard is None or shard.group is None or not shard.check_calls:
        return prepare()
    return agree_over(shard.group, caller, prepare, facts_of)


def resolve_rows(caller: str, rows: Any) -> tuple[Rows, tuple[int, ...]]:
    """The plan, and the shape results are returned in."""
    if isinstance(rows, Rows):
        return rows, (len(rows),)
    if isinstance(rows, Tensor):
        return Rows.every(rows), tuple(rows.shape)
    if isinstance(rows, tuple) and len(rows) == 2:
        plan = Rows.at(*rows)
        return plan, (len(plan),)
    raise LogitlessError(
        f"{caller}: rows must be a Rows, a tensor of targets or a pair (index, target) but is {type(rows).__name__}."
    )


def check_logits(caller: str, logits: Tensor, rows: Rows, shard: VocabShard | None) -> None:
    if not isinstance(logits, Tensor) or logits.dtype not in FLOATS:
        came = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise LogitlessError(f"{caller}: logits must be a tensor of {[str(d) for d in FLOATS]} but is {came}.")
    if logits.dim() < 1 or (logits.shape[-1] > 1 and logits.stride(-1) != 1):
        raise LogitlessError(
            f"{caller}: logits must be [..., V] with a contiguous last dimension but has shape {list(logits.shape)} "
            f"and strides {list(logits.stride())}. Pass logits.contiguous(), which copies, or avoid the transpose."
        )
    num_tokens, lead = logits.shape[:-1].numel(), list(logits.shape[:-1])
    if rows.num_tokens is not None and rows.num_tokens != num_tokens:
        raise LogitlessError(
            f"{caller}: rows were made for {rows.num_tokens} tokens ({list(rows.token_shape or ())}) but logits has "
            f"{num_tokens} rows ({lead}). If the pack is padded at its end, pass num_tokens= when making the rows."
        )
    if rows.reach > num_tokens:
        raise LogitlessError(f"{caller}: rows reach row {rows.reach - 1} but logits has {num_tokens} rows ({lead}).")
    for name, x in (("rows", rows.index), ("target", rows.target)):
        if x.device != logits.device:
            raise LogitlessError(f"{caller}: {name} is on {x.device} but logits is on {logits.device}.")
    if shard is not None and shard.stop - shard.start != logits.shape[-1]:
        raise LogitlessError(
            f"{caller}: shard holds columns {shard.start} to {shard.stop} ({shard.stop - shard.start} of them) but "
            f"logits has {logits.shape[-1]} columns."
        )


def vocabulary(caller: str, width: int, head: Head, shard: VocabShard | None) -> tuple[int, int]:
    """True vocabulary size, and how many columns of it are here."""
    start, padded = (0, width) if shard is None else (shard.start, shard.vocab_size)
    size = padded if head.vocab_size is None else head.vocab_size
    if size > padded:
        raise LogitlessError(f"{caller}: head.vocab_size is {size} but the logits have only {padded} columns in all.")
    return size, min(max(size - start, 0), width)


def check_targets(caller: str, rows: Rows, vocab_size: int) -> None:
    """Raise for a target outside the vocabulary, where that can be seen without a device sync."""
    if rows.target.device.type != "cpu":
        low, high = rows.target_range or (0, 0)
        if low >= 0 and high < vocab_size:
            return
    bad = ((rows.target < 0) | (rows.target >= vocab_size)) & (rows.target != IGNORE)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise LogitlessError(
            f"{caller}: target {int(rows.target[row])} of row {row} (sample {int(rows.sample[row])}, position "
            f"{int(rows.position[row])}) is outside the vocabulary of {vocab_size}. Use -100 to leave a row out."
        )


def check_overwrite(logits: Tensor) -> None:
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return
    problem, advice = None, "Pass the model's own output"
    if logits.is_leaf:
        problem = "are a leaf, whose data backward must not replace by its gradient"
    elif logits._is_view():
        problem = "are a view, so that whoever holds the base would read gradients in place of logits"
        advice = "Pass the tensor it was cut from (any [..., V] shape will do)"
    elif not logits.is_contiguous():
        problem = "are not contiguous"
    if problem:
        raise LogitlessError(
            f"logprobs: overwrite_logits=True, but the logits {problem}. {advice}, or drop the option."
        )


def check_kept(caller: str, kept: Kept, rows: Rows, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    if kept.lengths.numel() != len(rows):
        raise LogitlessError(f"{caller}: kept has {kept.lengths.numel()} rows but rows has {len(rows)}.")
    if kept.ids.device != device or kept.lengths.device != device:
        raise LogitlessError(f"{caller}: kept is on {kept.ids.device} but logits is on {device}.")
    if device.type == "cpu" and kept.ids.numel() and not torch.compiler.is_compiling():
        low, high = int(kept.ids.min()), int(kept.ids.max())
        if low < 0 or high >= vocab_size:
            raise LogitlessError(
                f"{caller}: kept ids run from {low} to {high}, outside the vocabulary of {vocab_size}."
            )
    return kept.ids, kept.lengths
