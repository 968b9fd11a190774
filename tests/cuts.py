"""The oracle of layouts: what each rank holds, found by cutting lists the way the frameworks cut tensors.

    samples  ->  pad each one  ->  cut chunks or windows out of the lists  ->  one list of tokens per rank

A token is ``(sample, offset)``, padding is None. Plain lists and slices: no index arithmetic, none of the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Token = tuple[int, int] | None
PAD: Token = None


@dataclass(frozen=True)
class Batch:
    """Samples by their lengths. The id of a token is unique in the batch, so that a target names its token."""

    lengths: list[int]
    responses: list[int]
    masks: list[list[int]] = field(default_factory=list)

    @property
    def tokens(self) -> list[list[int]]:
        return [[token_id(sample, t) for t in range(n)] for sample, n in enumerate(self.lengths)]

    def prompt(self, sample: int) -> int:
        return self.lengths[sample] - self.responses[sample]

    def predicts(self, token: Token) -> int | None:
        """The place in its response of what this token's row predicts, or None if that is no response token."""
        if token is None:
            return None
        sample, offset = token
        position = offset + 1 - self.prompt(sample)
        return position if 0 <= position < self.responses[sample] else None


def token_id(sample: int, offset: int) -> int:
    return 100 * (sample + 1) + offset


def padded(lengths: Sequence[int], spans: Sequence[int]) -> list[list[Token]]:
    """Every sample, right-padded to its span."""
    return [
        [(sample, t) for t in range(n)] + [PAD] * (span - n)
        for sample, (n, span) in enumerate(zip(lengths, spans, strict=True))
    ]


def left_padded(lengths: Sequence[int], width: int) -> list[list[Token]]:
    return [[PAD] * (width - n) + [(sample, t) for t in range(n)] for sample, n in enumerate(lengths)]


def round_up(n: int, multiple: int) -> int:
    while n % multiple:
        n += 1
    return n


def whole(samples: list[list[Token]], num_tokens: int | None = None) -> list[list[Token]]:
    """One rank that holds everything."""
    return [_fill([token for line in samples for token in line], num_tokens)]


def zigzag(samples: list[list[Token]], size: int, num_tokens: int | None = None) -> list[list[Token]]:
    """Chunk r and chunk 2 * size - 1 - r of every sample, for each rank r."""
    held: list[list[Token]] = [[] for _ in range(size)]
    for line in samples:
        length = len(line) // (2 * size)
        assert length * 2 * size == len(line), "the padded sample does not divide"
        chunks = [line[k * length : (k + 1) * length] for k in range(2 * size)]
        for rank in range(size):
            held[rank] += chunks[rank] + chunks[-1 - rank]
    return [_fill(tokens, num_tokens) for tokens in held]


def contiguous(samples: list[list[Token]], size: int, num_tokens: int) -> list[list[Token]]:
    """Equal windows of the padded stream."""
    stream = _fill([token for line in samples for token in line], size * num_tokens)
    return [stream[rank * num_tokens : (rank + 1) * num_tokens] for rank in range(size)]


def _fill(tokens: list[Token], num_tokens: int | None) -> list[Token]:
    extra = 0 if num_tokens is None else num_tokens - len(tokens)
    assert extra >= 0, "the tokens do not fit"
    return tokens + [PAD] * extra
