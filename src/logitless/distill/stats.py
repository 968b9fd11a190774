"""``DivergenceStats``: what is known of each row of a student and its teacher."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DivergenceStats(NamedTuple):
    """Per-row results, float32 (float64 for float64 operands), in the shape of the targets if those were given.

    Attributes:
        divergence: of student and teacher, 0 at rows that are left out; differentiable.
        logprob, entropy, log_z: the student's, as in :class:`TokenStats`; differentiable. No log_z with
            ``scope="support"``.
        teacher_logprob: of the target; -inf where the teacher's vocabulary does not have it, NaN where it did not say.
        teacher_entropy: in nats.
    """

    divergence: Tensor
    logprob: Tensor
    entropy: Tensor
    log_z: Tensor | None
    teacher_logprob: Tensor
    teacher_entropy: Tensor


def in_shape(stats: DivergenceStats, shape: tuple[int, ...]) -> DivergenceStats:
    """``[R]`` results in the caller's shape."""
    return stats if len(shape) == 1 else stats._make(None if x is None else x.reshape(shape) for x in stats)
