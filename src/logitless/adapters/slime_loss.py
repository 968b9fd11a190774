"""slime's policy loss, expected while its log-probs are made: ``install("slime", one_pass=True)``.

    loss.policy_loss_function    says which loss it will compute, and then computes it      (wrapped)
    get_log_probs_and_entropy    log-probs, and the gradients of that loss                  (replaced, in slime.py)

The loss of a token is made by slime's own functions, and its weight is what slime's mean multiplies it with. Nothing is
expected of a loss that reads more than one token at a time, or more than log-probs of these: GSPO, OPSM, TIS, a
reduction of the user's own, an entropy bonus; nor where slime makes its log-probs twice, to save memory.
"""

from __future__ import annotations

import inspect
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.adapters.expected import Expected
from logitless.adapters.replacing import held, replaces
from logitless.objectives import Objective

SETTINGS = (
    *("advantage_estimator", "eps_clip", "eps_clip_high", "eps_clip_c"),
    *("use_kl_loss", "use_unbiased_kl", "kl_loss_type", "kl_loss_coef"),
)
"""Arguments of slime that the loss of a token depends on."""


class _Loss(NamedTuple):
    """Arguments of ``policy_loss_function``, and whether it passes on the bound of the dual clip, as after 0.3.1."""

    args: Namespace
    batch: Mapping[str, Any]
    mean: Callable[[Tensor], Tensor]
    dual_clip: bool


_loss: ContextVar[_Loss | None] = ContextVar("logitless_slime_loss", default=None)


@replaces("slime.backends.megatron_utils.loss")
def policy_loss_function(
    original: Callable[..., Any], args: Any, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Any
) -> Any:
    dual_clip = "eps_clip_c" in inspect.unwrap(original).__code__.co_names
    with held(_loss, _Loss(args, batch, sum_of_sample_mean, dual_clip) if _foreseeable(args) else None):
        return original(args, batch, logits, sum_of_sample_mean)


def expected_of(rows: int) -> Expected | None:
    """What the loss that runs has said of so many rows."""
    found = _loss.get()
    if found is None or not rows or not torch.is_grad_enabled():
        return None
    args, batch, mean, dual_clip = found
    lists = {"advantage": batch["advantages"]}
    old = batch["rollout_log_probs"] if args.use_rollout_logprobs else batch.get("log_probs")
    lists |= {"old": old} if old else {}
    lists |= {"reference": batch["ref_log_probs"]} if args.use_kl_loss else {}
    fields = {name: torch.cat(list(x)).float() for name, x in lists.items()}
    if any(len(x) != rows for x in fields.values()):
        return None
    each = torch.zeros_like(fields["advantage"], requires_grad=True)
    (weight,) = torch.autograd.grad(mean(each), each)
    fields["share"] = weight
    settings = {name: getattr(args, name, None) for name in SETTINGS if name != "eps_clip_c" or dual_clip}
    return Expected(Objective(policy=_token_loss, policy_options=settings, needs=tuple(fields)), fields)


def _foreseeable(args: Any) -> bool:
    """Whether the loss is a sum over tokens of what :func:`_token_loss` makes."""
    more = ("use_opsm", "use_tis", "get_mismatch_metrics", "custom_pg_loss_reducer_function_path")
    several = args.advantage_estimator == "gspo" or any(getattr(args, name, None) for name in more)
    return not several and args.entropy_coef == 0 and not args.recompute_loss_function


def _token_loss(inputs: Any, **settings: Any) -> Tensor:
    slime, logprob, fields = sys.modules["slime.backends.megatron_utils.loss"], inputs.logprob, inputs.fields
    args = Namespace(**settings)
    old, clip = fields.get("old", logprob.detach()), (args.eps_clip, args.eps_clip_high)
    if args.advantage_estimator == "cispo":
        loss, _ = slime.compute_cispo_loss(old - logprob, logprob, inputs.advantage, *clip)
    else:
        bound = {"eps_clip_c": args.eps_clip_c} if "eps_clip_c" in settings else {}
        loss, _ = slime.compute_policy_loss(old - logprob, inputs.advantage, *clip, **bound)
    if args.use_kl_loss:
        ratio = (logprob - old).exp() if args.use_unbiased_kl else None
        kl = slime.compute_approx_kl(
            logprob, fields["reference"], kl_loss_type=args.kl_loss_type, importance_ratio=ratio
        )
        loss = loss + args.kl_loss_coef * kl
    return fields["share"] * loss
