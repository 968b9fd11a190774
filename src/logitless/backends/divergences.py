"""Divergences of two distributions over the same columns, element by element.

With p the student's probability of a column, q the teacher's, and ``d = log q - log p``:

                              what a column adds                               slope
    forward_kl    KL(q || p)  q d - q + p                                      1 - q / p
    reverse_kl    KL(p || q)  -p d - p + q                                     -d
    alpha         Amari's     (a p + (1-a) q - p^a q^(1-a)) / (a (1-a))        (1 - (q/p)^(1-a)) / (1-a)
    hellinger     squared     (sqrt p - sqrt q)^2 / 2                          (1 - sqrt(q/p)) / 2
    jsd           to a mix    b q log(q / m) + (1-b) p log(p / m)              (1-b) log(p / m)
    tv            variation   |p - q| / 2                                      sign(p - q) / 2

where the mix is ``m = b q + (1 - b) p``.

Three more are of a draft in speculative decoding, which proposes by p and is verified by q. A proposal is accepted with
probability ``A = sum min(p, q) = 1 - tv``. They are numbers of the row, made of its sums:

    acceptance        A                                                        1 where p < q, 0 elsewhere
    log_acceptance    -log A                                                   -1 / A where p < q
    lk_hybrid         w KL(q || p) + (1 - w) tv,  w = e^(-eta A) held fixed    w (1 - q / p) - (1 - w) where p < q

The hybrid is that of Samarin and others, "LK Losses" (2026): where hardly anything is accepted, it is the KL, whose
gradient does not vanish there; where much is, it is what is wanted itself.

Each term is 0 where p = q and never negative, so that nothing cancels in their sum: what the textbook's form leaves out
(``- q + p``) adds up to 0 over the row. The first four are one family, with ``c = 1 - a`` of 1, 0, 1 - a and 1/2. Near
d = 0 its terms are ``p sum_k d^k / k! (1 + c + ... + c^(k-2))``; evaluating the formula there would round d^2 away.

The gradient by the student's logits is ``p slope - p mean``, with ``mean`` the sum of ``p slope`` over the row.

Where both probabilities are 0 a column adds nothing. Where only the other's is, ``forward_kl`` (p = 0) and
``reverse_kl`` (q = 0) are infinite, as defined, and the others finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from logitless.errors import LogitlessError, did_you_mean

Kind = Literal[
    "forward_kl",
    "reverse_kl",
    "jsd",
    "tv",
    "hellinger",
    "alpha",
    "acceptance",
    "log_acceptance",
    "lk_hybrid",
]

KINDS: tuple[str, ...] = get_args(Kind)

ORDER = 9
"""Of the polynomials near 0."""

NEAR = {torch.float32: (0.5, 0.1), torch.float64: (0.02, 0.005)}
"""Up to which ``|d|`` they stand in, for the family and for jsd: there they are exact to the last digits."""

SAME = {torch.float32: 2.0**-17, torch.float64: 2.0**-46}
"""Up to which ``|d|`` two probabilities are equal as far as tv's slope is concerned: 64 roundings of a logit near 1."""


@dataclass(frozen=True)
class Divergence:
    """Which divergence, with its number.

    Args:
        kind: ``"forward_kl"`` is the teacher's over the student's, ``"reverse_kl"`` the student's over the teacher's.
        beta: of ``"jsd"``: the teacher's share of the mixture, between 0 and 1.
        alpha: of ``"alpha"``, between 0, where it tends to the forward KL, and 1, where it tends to the reverse one.
        eta: of ``"lk_hybrid"``, how soon it turns from the KL to the acceptance.

    >>> Divergence("reverse-kl")
    Traceback (most recent call last):
    logitless.errors.LogitlessError: divergence: kind 'reverse-kl' is not known. Did you mean 'reverse_kl'?
    Known: forward_kl, reverse_kl, jsd, tv, hellinger, alpha, acceptance, log_acceptance, lk_hybrid.
    """

    kind: Kind = "reverse_kl"
    beta: float = 0.5
    alpha: float = 0.5
    eta: float = 3.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            hint = did_you_mean(str(self.kind), KINDS)
            raise LogitlessError(f"divergence: kind {self.kind!r} is not known.{hint}\nKnown: {', '.join(KINDS)}.")
        mixture = "the teacher's share of the mixture"
        for name, x, what in (("beta", self.beta, mixture), ("alpha", self.alpha, "a power")):
            if isinstance(x, bool) or not isinstance(x, (int, float)) or not 0 < x < 1:
                raise LogitlessError(
                    f"divergence: {name} is {what}, between 0 and 1, but is {x!r}. At the ends use "
                    f'kind="forward_kl" or "reverse_kl".'
                )
        if isinstance(self.eta, bool) or not isinstance(self.eta, (int, float)) or not 0 <= self.eta < float("inf"):
            raise LogitlessError(f"divergence: eta is a number, 0 or more, but is {self.eta!r}.")

    @staticmethod
    def of(given: Divergence | str) -> Divergence:
        """From a name, or as it is."""
        return given if isinstance(given, Divergence) else Divergence(given)  # pyright: ignore[reportArgumentType]

    @property
    def power(self) -> float | None:
        """``c`` of the family; None for those that are not of it."""
        powers = {"forward_kl": 1.0, "reverse_kl": 0.0, "hellinger": 0.5, "alpha": 1.0 - self.alpha, "lk_hybrid": 1.0}
        return powers.get(self.kind)

    @property
    def accepts(self) -> bool:
        """Whether it is made of the acceptance."""
        return self.kind in ("acceptance", "log_acceptance", "lk_hybrid")

    @property
    def of_acceptance(self) -> bool:
        """Whether it is made of the acceptance alone."""
        return self.kind in ("acceptance", "log_acceptance")

    @property
    def alone(self) -> float:
        """What an id that only the teacher has adds, by its probability: the term at p = 0, which is linear in q."""
        if self.kind == "jsd":
            return -self.beta * math.log(self.beta)
        known = {"reverse_kl": 1.0, "tv": 0.5, "hellinger": 0.5, "alpha": 1.0 / self.alpha}
        return known.get(self.kind, 0.0 if self.of_acceptance else math.inf)

    @property
    def factor(self) -> float:
        """What the family's terms are multiplied by."""
        return 0.25 if self.kind == "hellinger" else 1.0


class Element(NamedTuple):
    """Of every element: what it adds to the divergence, and ``p slope``."""

    term: Tensor
    weighted_slope: Tensor


class Combined(NamedTuple):
    """Of every row: the divergence, and its derivatives by the sum of the terms and by the acceptance.

    Attributes:
        value: ``[R]``.
        by_terms, by_acceptance: ``[R]``; None for 1 and 0: a plain sum of terms.
    """

    value: Tensor
    by_terms: Tensor | None = None
    by_acceptance: Tensor | None = None


def combined(what: Divergence, terms: Tensor, tv: Tensor | None, acceptance: Tensor | None) -> Combined:
    """The divergence of rows from their sums.

    Args:
        tv, acceptance: where it is made of them. Either has the digits of the other only where it is the smaller one.
    """
    if not what.accepts:
        return Combined(terms)
    assert tv is not None
    assert acceptance is not None
    if what.kind == "acceptance":
        return Combined(acceptance, torch.zeros_like(terms), torch.ones_like(terms))
    if what.kind == "log_acceptance":
        least = torch.finfo(terms.dtype).tiny
        value = torch.where(tv < 0.5, -torch.log1p(-tv.clamp_max(0.5)), -acceptance.log())
        return Combined(value, torch.zeros_like(terms), -1.0 / acceptance.clamp_min(least))
    weight = torch.exp(-what.eta * acceptance)
    return Combined(weight * terms + (1.0 - weight) * tv, weight, weight - 1.0)


def over_outcomes(
    log_p: Tensor,
    log_q: Tensor,
    what: Divergence,
    total: Callable[[Tensor], Tensor],
    spread: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """The divergence of each row over listed outcomes, and every outcome's ``p slope``.

    Args:
        total, spread: the sum over each row's outcomes, and a row's number at each of them.
    """
    d = log_q - log_p
    terms, slope = elements(log_p, log_q, d, what)
    if not what.accepts:
        return total(terms), slope
    tv, rising, overlap = accepted(log_p, log_q, d)
    found = combined(what, total(terms), total(tv), total(overlap))
    assert found.by_terms is not None
    assert found.by_acceptance is not None
    return found.value, spread(found.by_terms) * slope + spread(found.by_acceptance) * rising


def accepted(log_p: Tensor, log_q: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of every element: what it adds to tv, the acceptance's ``p slope``, and what it adds to the acceptance.

    The slope is 1 where p is below q and 0 above: sums of it are as small as the acceptance, and have its digits.
    """
    d = d.masked_fill((log_p == -torch.inf) & (log_q == -torch.inf), 0.0)
    p, q = log_p.exp(), log_q.exp()
    below = torch.where(d.abs() < SAME[d.dtype], 0.5, (d > 0).to(d.dtype))
    return _total_variation(p, q, d).term, p * below, torch.minimum(p, q)


def elements(log_p: Tensor, log_q: Tensor, d: Tensor, what: Divergence) -> Element:
    """Terms and weighted slopes. ``d`` is ``log q - log p``, which the caller knows better than the difference of two
    rounded numbers does."""
    nowhere = (log_p == -torch.inf) & (log_q == -torch.inf)
    d = d.masked_fill(nowhere, 0.0)
    if what.of_acceptance:
        return Element(torch.zeros_like(log_p), torch.zeros_like(log_p))
    p, q = log_p.exp(), log_q.exp()
    if what.kind == "tv":
        return _total_variation(p, q, d)
    if what.power is None:
        return _jensen_shannon(p, q, d, what.beta)
    between = None
    if what.power not in (0.0, 1.0):
        between = ((1 - what.power) * log_p + what.power * log_q).exp().masked_fill((p == 0) | (q == 0), 0.0)
    return _family(p, q, d, between, what)


def series(d: Tensor, c: float) -> Tensor:
    """``sum over k of d^k / k! (1 + c + ... + c^(k-2))``, from k = 2 to ORDER."""
    factorial, sums, coefficients = 1.0, 0.0, []
    for k in range(2, ORDER + 1):
        factorial, sums = factorial * k, sums + c ** (k - 2)
        coefficients.append(sums / factorial)
    total = torch.zeros_like(d)
    for coefficient in reversed(coefficients):
        total = total * d + coefficient
    return total * d * d


def _family(p: Tensor, q: Tensor, d: Tensor, between: Tensor | None, what: Divergence) -> Element:
    """``between`` is ``p^(1 - c) q^c``, where that is neither p nor q."""
    c, factor = what.power, what.factor
    assert c is not None
    near = d.abs() < NEAR[d.dtype][0]
    small = torch.where(near, d, 0.0)
    if between is not None:
        far, slope = ((1 - c) * p + c * q - between) / (c * (1 - c)), (p - between) / c
    elif c == 1.0:
        far, slope = torch.where(q > 0, q * d, 0.0) - (q - p), p - q
    else:
        slope = torch.where(p > 0, -p * d, 0.0)
        far = slope - (p - q)
    if c != 0.0:
        slope = torch.where(near, -p * torch.expm1(c * small) / c, slope)
    return Element(factor * torch.where(near, p * series(small, c), far), factor * slope)


def _jensen_shannon(p: Tensor, q: Tensor, d: Tensor, beta: float) -> Element:
    near = d.abs() < NEAR[d.dtype][1]
    x = torch.expm1(torch.where(near, d, 0.0))
    # log(m / p) and log(q / m), by whichever of p and q is larger.
    ratio = torch.exp(-d.abs())
    rest = torch.log(torch.where(d > 0, beta + (1 - beta) * ratio, (1 - beta) + beta * ratio))
    over_p, over_q = torch.where(d > 0, d + rest, rest), torch.where(d > 0, -rest, d - rest)
    far = torch.where(q > 0, beta * q * over_q, 0.0) - torch.where(p > 0, (1 - beta) * p * over_p, 0.0)
    slope = torch.where(p > 0, -(1 - beta) * p * torch.where(near, torch.log1p(beta * x), over_p), 0.0)
    return Element(torch.where(near, p * (beta * _h(x) - _h(beta * x)), far), slope)


def _h(x: Tensor) -> Tensor:
    """``(1 + x) log(1 + x) - x`` for small x."""
    total = torch.zeros_like(x)
    for k in range(ORDER, 1, -1):
        total = total * x + (-1.0) ** k / (k * (k - 1))
    return total * x * x


def _total_variation(p: Tensor, q: Tensor, d: Tensor) -> Element:
    near = d.abs() < NEAR[d.dtype][0]
    difference = torch.where(near, p * torch.expm1(torch.where(near, d, 0.0)), q - p)
    # Where both models are certain, d is rounding error, whose sign may differ in backward: its logits are made anew.
    sign = torch.where(d.abs() < SAME[d.dtype], 0.0, d.sign())
    return Element(0.5 * difference.abs(), -0.5 * p * sign)
