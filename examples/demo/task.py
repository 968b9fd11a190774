"""The task: repeat the digits of the prompt. A program checks the answer, digit by digit.

    prompt  4 0 9 9 2 7 :     response  4 0 9 9 2 7     reward 1
                              response  4 0 1 9 3 7     reward 4 / 6

Token ids 0 .. 9 are the digits and 10 is the separator. The task needs no other id of the vocabulary, and a policy has
to learn to avoid them, like most of a real vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUM_DIGITS = 10
SEPARATOR = 10


def draw_digits(num: int, length: int, generator: torch.Generator) -> Tensor:
    """``[num, length]`` random digits."""
    return torch.randint(NUM_DIGITS, (num, length), generator=generator)


def draw_prompts(num: int, length: int, generator: torch.Generator) -> Tensor:
    """``[num, length + 1]``: digits and the separator."""
    digits = draw_digits(num, length, generator)
    return torch.cat([digits, torch.full((num, 1), SEPARATOR)], 1)


def rewards_of(tokens: Tensor) -> Tensor:
    """``[N]`` share of the prompt's digits that the response repeats in their places.

    >>> rewards_of(torch.tensor([[4, 7, SEPARATOR, 4, 7], [4, 7, SEPARATOR, 7, 7]]))
    tensor([1.0000, 0.5000])
    """
    length = tokens.shape[1] // 2
    return (tokens[:, length + 1 :] == tokens[:, :length]).float().mean(1)
