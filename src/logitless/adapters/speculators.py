"""speculators: the losses of its drafts, on logits of draft and verifier, or on logits that are not computed.

    fused_kl_div_loss, fused_reverse_kl_div_loss, fused_js_div_loss, fused_tv_loss     [1, T, V] twice -> float32 [1, T]
    fused_ce_loss                  cross entropy against the verifier's most likely token
    fused_nla_loss                 -log of the acceptance, at least 1e-5
    fused_lk_hybrid_loss           the KL and tv, blended by the acceptance

The verifier's head is cut to the draft's ids when speculators loads it, so that both are over the same ids. Its eager
losses, which are for checks, stay its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from logitless.adapters.host import Host, Option, Replacement
from logitless.adapters.replacing import Options, replaces
from logitless.adapters.scoring import placed
from logitless.backends.divergences import Divergence, Kind
from logitless.errors import LogitlessError
from logitless.operands import Logits
from logitless.score import logprobs
from logitless.spec import TokenStats, parse_memory

MODULE = "speculators.losses.fused"

LEAST = 1e-5
"""Acceptance whose logarithm the loss ends at, as in speculators."""

PLAIN: dict[str, Kind] = {
    "fused_kl_div_loss": "forward_kl",
    "fused_reverse_kl_div_loss": "reverse_kl",
    "fused_js_div_loss": "jsd",
    "fused_tv_loss": "tv",
}
"""Losses that are a divergence of each row."""


def _plain(name: str) -> Replacement:
    """What stands in for a loss that is a divergence."""

    @replaces(MODULE, name)
    def loss(options: Options, logits: Tensor, targets: Tensor) -> Tensor:
        return _rows(_scored(name, logits, targets, Divergence(PLAIN[name]), options).divergence)

    return loss


@replaces(MODULE)
def fused_ce_loss(options: Options, logits: Tensor, targets: Tensor) -> Tensor:
    _check(logits, targets)
    best = targets.detach().argmax(-1)
    out = logprobs(placed(logits, None), best, memory=options["memory"])
    options["audit"].of_logits("fused_ce_loss", logits, best, logprob=out.logprob)
    return -out.logprob.float()


@replaces(MODULE)
def fused_nla_loss(options: Options, logits: Tensor, targets: Tensor) -> Tensor:
    out = _scored("fused_nla_loss", logits, targets, Divergence("acceptance"), options)
    return -_rows(out.acceptance).clamp_min(LEAST).log()


@replaces(MODULE)
def fused_lk_hybrid_loss(options: Options, logits: Tensor, targets: Tensor, eta: float = 3.0) -> Tensor:
    what = Divergence("lk_hybrid", eta=eta)
    return _rows(_scored("fused_lk_hybrid_loss", logits, targets, what, options).divergence)


def _check(logits: Tensor, targets: Tensor) -> None:
    if logits.shape != targets.shape:
        raise LogitlessError(
            f"targets must be {list(logits.shape)}, as the draft's logits, but are {list(targets.shape)}."
        )


def _scored(name: str, logits: Tensor, targets: Tensor, what: Divergence, options: Options) -> TokenStats:
    """The draft beside the verifier, which gets no gradient, as in speculators."""
    _check(logits, targets)
    first = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    if not isinstance(targets, Logits):
        targets = targets.detach() if targets.stride(-1) == 1 else targets.detach().contiguous()
    out = logprobs(placed(logits, None), first, teacher=targets, divergence=what, memory=options["memory"])
    options["audit"].of_logits(name, logits, first, logprob=out.logprob)
    return out


def _rows(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.float()


LOSSES = (*map(_plain, PLAIN), fused_ce_loss, fused_nla_loss, fused_lk_hybrid_loss)


HOST = Host(
    name="speculators",
    package="speculators",
    versions=("0.9",),
    replacements=lambda _: LOSSES,
    options={"memory": Option("1GiB", "working memory of a call on logits that are not computed", check=parse_memory)},
)
