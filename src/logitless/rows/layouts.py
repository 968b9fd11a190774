"""Context-parallel schemes: the sample and the offset of each local token. One short class per scheme.

Samples are padded to ``spans`` and laid end to end; a scheme then says which tokens of that stream a rank has.
With two ranks and one sample of eight tokens:

    Zigzag       rank 0: 0 1 | 6 7     rank 1: 2 3 | 4 5      (each sample cut into 2 x ranks chunks, folded)
    Contiguous   rank 0: 0 1 2 3       rank 1: 4 5 6 7        (the whole stream cut into one window per rank)

Padding is not special: its offset lies past the end of its sample, and the filter in ``rows`` drops it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from logitless.errors import LogitlessError


@runtime_checkable
class Scheme(Protocol):
    """How a stream of padded samples is split over context-parallel ranks. Any object with these members will do."""

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        ...

    @property
    def size(self) -> int:
        """Ranks in the group."""
        ...

    @property
    def multiple(self) -> int:
        """A divisor of every sample's padded length."""
        ...

    @property
    def by_sample(self) -> bool:
        """Whether every sample is cut by itself, so that padded lines can be cut too."""
        ...

    def tokens(self, spans: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Sample and offset of each local token.

        Args:
            spans: ``[N]`` padded length of each sample.
            num_tokens: how many tokens a rank has.
        """
        ...


def check_scheme(cp: Any) -> None:
    """Raise for an object that is no scheme."""
    if cp is not None and not isinstance(cp, Scheme):
        raise LogitlessError(
            f"Rows.packed: cp must be a Zigzag, a Contiguous or None but is {cp!r}. A scheme of your own needs rank, "
            f"size, multiple, by_sample, tokens."
        )


def check_scheme_of_lines(cp: Any) -> None:
    """Raise for an object that is no scheme, or one that does not cut padded lines."""
    if cp is not None and not (isinstance(cp, Scheme) and cp.by_sample):
        raise LogitlessError(
            f"Rows.padded: cp must be a Zigzag or None but is {type(cp).__name__}. A contiguous split of padded lines "
            f"would give one rank all the prompts; pack the samples (Rows.packed) to split them contiguously."
        )


@dataclass(frozen=True)
class _Split:
    """A rank's place in a context-parallel group, checked."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        name = type(self).__name__
        if type(self.size) is not int or self.size < 1:
            raise LogitlessError(f"{name}: size must be a positive integer but is {self.size!r}.")
        if type(self.rank) is not int or not 0 <= self.rank < self.size:
            raise LogitlessError(f"{name}: rank must be in 0 .. {self.size - 1} but is {self.rank!r}.")


class Zigzag(_Split):
    """Rank r has chunk r and chunk 2 * size - 1 - r of every sample: a causal mask gives all ranks the same work.

    As in slime, Megatron, SkyRL, verl and NeMo-RL. Every sample's padded length is a multiple of ``2 * size``.

    Args:
        rank: this rank's place in the context-parallel group.
        size: ranks in that group.
    """

    by_sample = True

    @property
    def multiple(self) -> int:
        """A divisor of every sample's padded length."""
        return 2 * self.size

    def tokens(self, spans: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Sample and offset of each local token, given each sample's padded length ``[N]``."""
        chunk = spans // (2 * self.size)
        sample, place = ragged_arange(2 * chunk)
        length = chunk[sample]
        first = self.rank * length + place
        second = (2 * self.size - 1 - self.rank) * length + (place - length)
        return sample, torch.where(place < length, first, second)


class Contiguous(_Split):
    """Rank r has the r-th equal window of the whole stream, wherever sample borders fall.

    As in slime's all-gather context parallelism and verl's contiguous split. The stream is padded at its end until it
    divides; ``num_tokens`` of :meth:`Rows.packed` is the window's length after that padding.

    Args:
        rank: this rank's place in the context-parallel group.
        size: ranks in that group.
    """

    by_sample, multiple = False, 1

    def tokens(self, spans: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Sample and offset of each local token, given each sample's padded length ``[N]`` and the window's."""
        total, window = int(spans.sum()), num_tokens
        if window * self.size < total:
            raise LogitlessError(
                f"Contiguous: {self.size} ranks of {window} tokens hold {window * self.size} but the samples need "
                f"{total}. num_tokens is the local length after padding: at least {-(-total // self.size)}."
            )
        position = torch.arange(
            min(self.rank * window, total), min((self.rank + 1) * window, total), device=spans.device
        )
        ends = spans.cumsum(0)
        sample = torch.searchsorted(ends, position, right=True)
        return sample, position - (ends - spans)[sample]


def ragged_arange(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """``[2, 3]`` becomes samples ``[0, 0, 1, 1, 1]`` and offsets ``[0, 1, 0, 1, 2]``."""
    sample = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    starts = lengths.cumsum(0) - lengths
    return sample, torch.arange(len(sample), device=lengths.device) - starts.index_select(0, sample)


def round_up(n: Any, multiple: int) -> Any:
    """The next multiple, of a number or a tensor."""
    return n if multiple == 1 else -(-n // multiple) * multiple


def num_ranks(cp: Scheme | None) -> int:
    """Ranks that the tokens are split over."""
    return 1 if cp is None else cp.size


def here(cp: Scheme | None) -> str:
    """The rank and the scheme, for an error."""
    return "" if cp is None else f" on rank {cp.rank} of {cp.size} ({type(cp).__name__})"
