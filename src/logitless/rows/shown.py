"""What ``repr`` says of rows: their number, what they were made for, how they are split."""

from __future__ import annotations

from typing import Any


def shown(rows: Any) -> str:
    """A line, without values: nothing waits for a device."""
    samples = "" if rows.response_lengths is None else f" of {_number(len(rows.response_lengths), 'sample')}"
    tokens = "any tokens" if rows.token_shape is None else f"tokens {list(rows.token_shape)}"
    split = "" if rows.cp is None else f", part {rows.cp.rank} of {rows.cp.size} ({type(rows.cp).__name__})"
    mask = "" if rows.mask is None else ", masked"
    return f"Rows({_number(len(rows), 'row')}{samples}, {tokens}{split}{mask}, {rows.index.device})"


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
