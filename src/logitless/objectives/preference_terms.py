"""Preference losses: one value per pair of samples, or per sample. Plain functions, and a dictionary of them by name.

With S the sum of a sample's log-probs, D the same minus the reference's, s and d those sums over the sample's number of
tokens; w the chosen sample of a pair, l the rejected one; L = log sigmoid, and o = log(p / (1 - p)) with p = e^s:

    dpo      -(1 - e) L(h) - e L(-h),  h = beta (D_w - D_l), e the label_smoothing      Rafailov et al. 2023
    ipo      (d_w - d_l - 1 / (2 beta))^2                                              Azar et al. 2023
    hinge    max(0, 1 - beta (D_w - D_l))                                              Zhao et al. 2023 (SLiC)
    simpo    -L(beta (s_w - s_l) - gamma)                                              Meng et al. 2024
    cpo      -L(beta (S_w - S_l)) - s_w                                                Xu et al. 2024
    orpo     -beta L(o_w - o_l) - s_w                                                  Hong et al. 2024
    kto      a (1 - sigmoid(beta (D - z))) if desirable, b (1 - sigmoid(beta (z - D))) if not     Ethayarajh et al. 2024
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


class Settings(NamedTuple):
    """Numbers of a loss; see :class:`~logitless.objectives.preference.Preference`."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.0
    per_token: bool = False
    sft_coef: float = 0.0
    desirable: float = 1.0
    undesirable: float = 1.0


class Scores(NamedTuple):
    """``[P]`` what is compared of the chosen and of the rejected samples, and the chosen ones' mean log-prob."""

    chosen: Tensor
    rejected: Tensor
    of_chosen: Tensor


def dpo(x: Scores, p: Settings) -> Tensor:
    h = p.beta * (x.chosen - x.rejected)
    return -(1 - p.label_smoothing) * logsigmoid(h) - p.label_smoothing * logsigmoid(-h)


def ipo(x: Scores, p: Settings) -> Tensor:
    return (x.chosen - x.rejected - 1 / (2 * p.beta)).square()


def hinge(x: Scores, p: Settings) -> Tensor:
    return torch.relu(1 - p.beta * (x.chosen - x.rejected))


def simpo(x: Scores, p: Settings) -> Tensor:
    return -logsigmoid(p.beta * (x.chosen - x.rejected) - p.gamma)


def orpo(x: Scores, p: Settings) -> Tensor:
    odds = (x.chosen - x.rejected) - (_log_complement(x.chosen) - _log_complement(x.rejected))
    return -p.beta * logsigmoid(odds)


def kto(desirable: Tensor, undesirable: Tensor, z: Tensor, p: Settings) -> Tensor:
    """``[P + Q]`` losses of samples that stand alone."""
    liked = p.desirable * torch.sigmoid(-p.beta * (desirable - z))
    return torch.cat([liked, p.undesirable * torch.sigmoid(p.beta * (undesirable - z))])


class Kind(NamedTuple):
    """A named loss.

    Attributes:
        loss: ``(scores, settings)`` to ``[P]`` losses; None for kto, whose samples stand alone.
        reference: whether scores are relative to a reference.
        settings: its defaults.
        takes: the settings that it has.
    """

    loss: Callable[[Scores, Settings], Tensor] | None
    reference: bool = True
    settings: Settings = Settings()
    takes: tuple[str, ...] = ("beta", "per_token", "sft_coef")


SMOOTHED = ("beta", "per_token", "sft_coef", "label_smoothing")
KINDS = {
    "dpo": Kind(dpo, takes=SMOOTHED),
    "ipo": Kind(ipo, settings=Settings(per_token=True)),
    "hinge": Kind(hinge),
    "simpo": Kind(simpo, False, Settings(2.0, gamma=1.0, per_token=True), ("beta", "per_token", "sft_coef", "gamma")),
    "cpo": Kind(dpo, False, Settings(sft_coef=1.0), SMOOTHED),
    "orpo": Kind(orpo, False, Settings(per_token=True, sft_coef=1.0), ("beta", "sft_coef")),
    "kto": Kind(None, takes=("beta", "desirable", "undesirable")),
}


def _log_complement(logprob: Tensor) -> Tensor:
    """``log(1 - e^x)`` for x <= 0. A probability of 1 is taken to be short of it by 1e-12, so that odds are finite."""
    return torch.log(-torch.expm1(logprob.clamp(max=-1e-12)))
