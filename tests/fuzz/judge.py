"""The verdict on a case: right, refused, at a bound, or wrong, and how near to the limit.

    error  <=  unit + 2 x plain torch's own error          element by element, in units of ``oracle.py``

Plain torch is asked only where the unit alone is not enough. Infinities and NaN must be the truth's own. A refusal is
right where the table below says so of the case; any other exception is a failure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fuzz import ours
from fuzz.build import Inputs, build
from fuzz.cases import LINEAR, LOGITS, LOSSES, SAMPLES, Case
from fuzz.oracle import Answer, plain, truth
from logitless import LogitlessError, Objective

FACTOR = 2.0
"""Times plain torch's own error."""


@dataclass(frozen=True)
class Verdict:
    """Attributes:
    kind: "right", "refused", "at a bound" or "wrong".
    ratio: the largest error over what is allowed, of all values and gradients.
    reason: which refusal; or what is wrong.
    """

    kind: str
    ratio: float = 0.0
    reason: str = ""


class Refusal(NamedTuple):
    """A documented refusal: the words of its text, and the cases that may see it."""

    words: str
    allowed: Callable[[Case], bool]


def _without_samples(case: Case) -> bool:
    if case.layout in SAMPLES or case.path not in LOSSES:
        return False
    objective = _objective(case)
    return objective.sequence_level or objective.reduce != "token_mean"


def _objective(case: Case) -> Objective:
    changes = {k: dict(v) if k == "policy_options" else v for k, v in case.objective}
    return Objective.recipe(case.recipe, **changes) if case.recipe else Objective(**changes)


REFUSALS = {
    "kept ids with canonical bits": Refusal(
        "kept= adds up the ids of each row", lambda c: bool(c.kept) and c.canonical
    ),
    "shards within a block of canonical bits": Refusal(
        "begins at column", lambda c: c.canonical and c.parallel == "vocabulary"
    ),
    "statistics over a support": Refusal(
        "are never made where", lambda c: c.scope == "support" and bool(c.stats or c.top_k or c.ids)
    ),
    "a LoRA whose gradient would be a part": Refusal(
        "gradient of its a would be a part",
        lambda c: bool(c.lora) and (c.hidden_grad == "partial" or c.sequence_parallel),
    ),
    "memory holds no column": Refusal(
        "do not hold one column", lambda c: c.memory not in (None, "1MiB", "1GiB") and c.path in LINEAR
    ),
    "logits that are not contiguous": Refusal(
        "contiguous last dimension|not whole steps of one row", lambda c: c.path == LOGITS and bool(c.stride)
    ),
    "overwriting a view": Refusal("overwrite=True, but the logits", lambda c: c.overwrite and bool(c.stride)),
    "second backward": Refusal(
        "second backward through a call with", lambda c: c.twice and (c.overwrite or c.weight_grad)
    ),
    "no samples": Refusal("know of no samples", _without_samples),
    "kernels in float64": Refusal("float64", lambda c: c.backend == "triton" and c.dtype == "float64"),
    "means over split samples": Refusal(
        "these rows are split over", lambda c: c.cp > 1 and c.path in LOSSES and _objective(c).sequence_level
    ),
}


def verdict(case: Case, device: str = "cpu") -> Verdict:
    """Run a case and judge it."""
    inputs = build(case)
    right = truth(inputs)
    if case.path in LOSSES and right.margin <= 1e-6 + 16 * right.blur:
        return Verdict("at a bound")
    try:
        mine = ours.answer(inputs, right.fields, device)
    except LogitlessError as error:
        return refusal(case, error)
    except Exception as error:
        return Verdict("wrong", torch.inf, f"{type(error).__name__}: {error}")
    return judged(inputs, mine, right)


def refusal(case: Case, error: LogitlessError) -> Verdict:
    """Whether a refusal is one that this case may see."""
    for name, (words, allowed) in REFUSALS.items():
        if re.search(words, str(error)):
            if allowed(case):
                return Verdict("refused", reason=name)
            break
    return Verdict("wrong", torch.inf, f"refused: {error}")


def judged(inputs: Inputs, mine: Answer, right: Answer, own: Callable[[Answer], Answer] = lambda a: a) -> Verdict:
    """Compare all values and gradients. Of plain torch's answer, ``own`` is the part that is judged here."""
    usual: Answer | None = None
    worst = 0.0
    for kind in ("values", "gradients"):
        exact, units = getattr(right, kind), getattr(right, kind[:-1] + "_units")
        for name, x in getattr(mine, kind).items():
            if x.shape != exact[name].shape:
                return Verdict("wrong", torch.inf, f"{name}: shape {list(x.shape)}, not {list(exact[name].shape)}")
            error = in_units(x, exact[name], units[name])
            if not error <= 1.0:
                wrong = odd(x, exact[name])
                if wrong:
                    return Verdict("wrong", torch.inf, f"{name}: {wrong}")
                error = in_units(x, exact[name], units[name], finite=True)
            if error > 1.0:
                usual = usual or own(plain(inputs, right.fields))
                error /= 1.0 + FACTOR * in_units(getattr(usual, kind)[name], exact[name], units[name], finite=True)
            if not error <= 1.0:
                return Verdict("wrong", error, f"{name}: {error:.3g} times what is allowed\n{_shown(x, exact[name])}")
            worst = max(worst, error)
    missing = set(right.gradients) - set(mine.gradients)
    if missing:
        return Verdict("wrong", torch.inf, f"no gradient of {', '.join(sorted(missing))}")
    return Verdict("right", worst)


def odd(x: Tensor, exact: Tensor) -> str:
    """What is wrong besides digits: infinities and NaN that the truth has not, or has."""
    x = x.detach().cpu()
    special = ~exact.isfinite()
    agree = (x == exact) | (x.isnan() & exact.isnan())
    if bool((special & ~agree).any()):
        return f"{x[special].tolist()} where the truth is {exact[special].tolist()}"
    # A truth past the range of our dtype is infinite there.
    wrong = ~x.isfinite() & exact.to(x.dtype).isfinite()
    if bool(wrong.any()):
        return f"{int(wrong.sum())} entries are not finite where the truth is\n{_shown(x, exact)}"
    return ""


def in_units(x: Tensor, exact: Tensor, unit: Tensor, finite: bool = False) -> float:
    """The largest error, as a multiple of what rounding alone may do there; of entries that are finite, if asked."""
    x = x.detach().cpu()
    error = (x.double() - exact).abs() / unit.clamp_min(1e-300)
    if finite:
        error = torch.where(exact.to(x.dtype).isfinite() & x.isfinite(), error, 0.0)
    return float(error.max()) if error.numel() else 0.0


def _shown(x: Tensor, exact: Tensor) -> str:
    if x.numel() > 64:
        return ""
    return f"ours  {x.detach().cpu().double().tolist()}\ntruth {exact.tolist()}"
