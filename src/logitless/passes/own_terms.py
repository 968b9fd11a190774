"""Whether a term of the caller's own may be worked off in chunks: its rows must not depend on rows of other chunks.

    found in chunks    d loss / d log-prob of each row, from the rows of its chunk alone
    found at once      the same of all rows together

The two are the same numbers where each row (or sample) stands for itself. A term that takes a quantile, a mean or a
maximum over the rows it is given sees another one in every chunk, and the gradients of a chunk are then wrong although
the loss, which is taken of all rows, is right. Losses would not tell: advantages that are whitened inside of a term
sum to 0 over any rows. So the gradients themselves are compared, which are vectors of one number per row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from logitless.errors import LogitlessError
from logitless.objectives import Objective, Preference

RowGradients = dict[str, Tensor | None]
"""``[C]`` gradients of a loss by the results that its terms are on; None where nothing depends on one."""


def differs(in_chunks: Sequence[RowGradients], at_once: RowGradients) -> Tensor:
    """0-dim bool, whether the gradients of any row are others than rounding explains.

    The work on a row is the same in both, so that most of them have the same bits. Half of the digits are compared; a
    number that is what is left of larger ones, which all but cancelled, may have lost more, so a few units in the last
    place of the largest of all are allowed besides.
    """
    like, rows = at_once["logprob"], [gradients["logprob"] for gradients in in_chunks]
    assert like is not None
    found = torch.zeros((), dtype=torch.bool, device=like.device)
    for name, whole in at_once.items():
        parts = [gradients[name] for gradients in in_chunks]
        if whole is None and all(x is None for x in parts):
            continue
        # In some chunks a term may not depend on a result at all.
        whole = torch.zeros_like(like) if whole is None else whole
        joined = torch.cat(
            [torch.zeros_like(row) if x is None else x for x, row in zip(parts, rows, strict=True) if row is not None]
        )
        eps = torch.finfo(whole.dtype).eps
        size = torch.maximum(joined.abs(), whole.abs()).nan_to_num(0, 0, 0)
        bound = eps**0.5 * size + 64 * eps * torch.nn.functional.pad(size, (0, 1)).max()
        # The difference of two infinities is NaN, and so is that of two NaN.
        same = (joined == whole) | (joined.isnan() & whole.isnan()) | ((joined - whole).abs() <= bound)
        found = found | ~same.all()
    return found


def refused(objective: Objective | Preference, chunks: int) -> LogitlessError:
    """The error for terms that look at other rows."""
    names = " or ".join(objective.own_terms)
    others = "other samples than the row's own" if objective.sequence_level else "other rows"
    return LogitlessError(
        f"policy_loss: the gradient of a row is another one in {chunks} chunks than over all rows, so {names} "
        f"of the Objective looks at {others}, or draws random numbers. Declare "
        f'Objective(level="batch"), and it is given all rows of the call at once, in two passes; level="sequence" is '
        f"for terms that look at their own sample alone."
    )
