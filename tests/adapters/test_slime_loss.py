"""What slime's adapter expects of a loss, by slime's own code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logitless.adapters import slime_loss

ARGS = SimpleNamespace(
    advantage_estimator="grpo",
    eps_clip=0.2,
    eps_clip_high=0.3,
    eps_clip_c=1.2,
    use_kl_loss=False,
    use_rollout_logprobs=False,
    entropy_coef=0,
    recompute_loss_function=False,
)


def passes_it_on(args: Any, *_: Any) -> Any:
    assert args.eps_clip_c
    return slime_loss.expected_of(3)


def leaves_it_out(args: Any, *_: Any) -> Any:
    assert args.eps_clip
    return slime_loss.expected_of(3)


@pytest.mark.parametrize("host", [passes_it_on, leaves_it_out])
def test_the_dual_clip_is_expected_where_slime_passes_its_bound_on(host):
    """Releases up to 0.3.1 take the argument, and clip without it."""
    loss = slime_loss.policy_loss_function.make(host, {})
    expected = loss(ARGS, {"advantages": [torch.ones(1), torch.ones(2)]}, torch.zeros(3, 5), torch.mean)
    assert ("eps_clip_c" in expected.objective.policy_options) is (host is passes_it_on)
