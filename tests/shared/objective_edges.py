"""Shared by the tests of objective edges and those that build on them."""

from __future__ import annotations

from logitless import Objective
from shared.objective_terms import CORRECTIONS, POLICIES

EVERYTHING = Objective(clip=(0.2, 0.28), correction="tis", kl="k3", kl_coef=0.1, entropy_coef=0.01, dual_clip=3.0)


ALL_POLICIES = [Objective(**options) for options, _ in POLICIES.values()]


ALL_CORRECTIONS = [Objective(correction=name) for name in CORRECTIONS]


ALL = [EVERYTHING, *ALL_POLICIES, *ALL_CORRECTIONS]
