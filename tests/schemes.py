"""A layout as data: the library makes its rows from it, the oracle of ``cuts.py`` the tokens of every rank.

packed       samples end to end, not split          lines        one sample per line, right- or left-padded
zigzag       samples end to end, folded             zigzag lines one sample per line, folded
contiguous   samples end to end, one window per rank
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import cuts
from cuts import Batch, Token, round_up
from hypothesis import strategies as st

from logitless import Contiguous, Rows, Zigzag


@dataclass(frozen=True)
class Layout:
    """One way to lay out a batch over ``size`` ranks.

    Args:
        kind: "packed", "zigzag", "contiguous", "lines" or "zigzag lines".
        size: context-parallel ranks.
        align: padded length of a sample is a multiple of this; None for the scheme's own default.
        absorb: multiples of ``align`` that the last sample takes on top; the layout then goes by cu_seqlens.
        extra: padding after the local tokens of a packed layout, or at the end of every line.
        padding: side of the padding of lines.
    """

    kind: str
    size: int = 1
    align: int | None = None
    absorb: int | None = None
    extra: int = 0
    padding: str = "right"

    def spans(self, batch: Batch) -> list[int]:
        """Padded length of every sample of a packed layout."""
        align = self.align or (2 * self.size if self.kind == "zigzag" else 1)
        spans = [round_up(n, align) for n in batch.lengths]
        if self.absorb is not None and spans:
            spans[-1] += self.absorb * align
        return spans

    def width(self, batch: Batch) -> int:
        return max(batch.lengths, default=0) + self.extra

    def num_tokens(self, batch: Batch) -> int:
        """Local length of a packed layout."""
        return round_up(sum(self.spans(batch)), self.size) // self.size + self.extra

    def held(self, batch: Batch) -> list[list[Token]]:
        """The local tokens of every rank, padding included, by the oracle; lines end to end."""
        if self.kind == "packed":
            return cuts.whole(cuts.padded(batch.lengths, self.spans(batch)), self.num_tokens(batch))
        if self.kind == "zigzag":
            return cuts.zigzag(cuts.padded(batch.lengths, self.spans(batch)), self.size, self.num_tokens(batch))
        if self.kind == "contiguous":
            return cuts.contiguous(cuts.padded(batch.lengths, self.spans(batch)), self.size, self.num_tokens(batch))
        width = self.width(batch)
        left = self.padding == "left"
        lines = (
            cuts.left_padded(batch.lengths, width) if left else cuts.padded(batch.lengths, [width] * len(batch.lengths))
        )
        if self.kind == "lines":
            return cuts.whole(lines)
        return cuts.zigzag([line + [None] * (round_up(width, 2 * self.size) - width) for line in lines], self.size)

    def rows(self, batch: Batch, rank: int, tokens: Any = None, masks: Any = None, **options: Any) -> Rows:
        """The library's plan of one rank, by the arguments a user would pass."""
        tokens = batch.tokens if tokens is None else tokens
        masks = batch.masks or None if masks is None else masks
        if self.kind in ("lines", "zigzag lines"):
            cp = Zigzag(rank, self.size) if self.kind == "zigzag lines" else None
            options |= {"cp": cp, "padding": self.padding}
            if self.extra:
                options |= {"max_length": self.width(batch)}
            return Rows.padded(tokens, batch.responses, masks, **options)
        cp = {"packed": None, "zigzag": Zigzag(rank, self.size), "contiguous": Contiguous(rank, self.size)}[self.kind]
        options |= {"cp": cp}
        if self.absorb is not None:
            options |= {"cu_seqlens": [0, *accumulate(self.spans(batch))]}
        elif self.align is not None:
            options |= {"align": self.align}
        if self.extra:
            options |= {"num_tokens": self.num_tokens(batch)}
        return Rows.packed(tokens, batch.responses, masks, **options)


@st.composite
def batches(draw: Any, min_samples: int = 1, max_samples: int = 5, max_length: int = 20) -> Batch:
    """Lengths from 1, responses from none to all but the first token, and a mask for each response."""
    lengths = draw(st.lists(st.integers(1, max_length), min_size=min_samples, max_size=max_samples))
    responses = [draw(st.integers(0, n - 1)) for n in lengths]
    masks = [draw(st.lists(st.integers(0, 1), min_size=r, max_size=r)) for r in responses]
    return Batch(lengths, responses, masks)


@st.composite
def layouts(draw: Any, sizes: st.SearchStrategy[int] | None = None) -> Layout:
    kind = draw(st.sampled_from(["packed", "zigzag", "contiguous", "lines", "zigzag lines"]))
    size = 1 if kind in ("packed", "lines") else draw(st.integers(1, 5) if sizes is None else sizes)
    extra = draw(st.integers(0, 7))
    if "lines" in kind:
        return Layout(kind, size, extra=extra, padding=draw(st.sampled_from(["left", "right"])))
    multiple = 2 * size if kind == "zigzag" else 1
    align = draw(st.none() | st.integers(1, 3).map(lambda n: n * multiple))
    absorb = draw(st.none() | st.integers(0, 3))
    return Layout(kind, size, align=align, absorb=absorb, extra=extra)
