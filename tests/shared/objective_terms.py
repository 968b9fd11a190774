"""Shared by the tests of objective terms and those that build on them."""

from __future__ import annotations

from objective_truth import FIELDS, Formula

PARTS = [name for name in FIELDS if name not in ("logprob", "entropy")]


POLICIES = {
    "ppo_clip": (dict(clip=(0.2, 0.28)), dict(low=0.2, high=0.28)),
    "dual": (dict(clip=0.1, dual_clip=1.3), dict(low=0.1, high=0.1, dual=1.3)),
    "gspo": (dict(policy="gspo", clip=(0.03, 0.05)), dict(low=0.03, high=0.05)),
    "cispo": (dict(policy="cispo", clip=(0.3, 0.4)), dict(low=0.3, high=0.4)),
    "cispo defaults": (dict(policy="cispo"), dict(low=1.0, high=4.0)),
    "sapo": (dict(policy="sapo"), dict(positive=1.0, negative=1.05)),
    "sapo options": (
        dict(policy="sapo", policy_options={"positive": 2.0, "negative": 0.5}),
        dict(positive=2.0, negative=0.5),
    ),
    "reinforce": (dict(policy="reinforce"), {}),
}


CORRECTIONS = {
    "tis": (0.8, 1.2),
    "icepop": (0.6, 1.3),
    "sequence_tis": (0.5, 1.1),
    "geometric_tis": (0.9, 1.05),
    "sequence_icepop": (0.7, 1.4),
    "geometric_mask": (0.95, 1.2),
    "opsm": (0.05,),
}


def formula_of(name: str, **changes) -> Formula:
    policy = {"dual": "ppo_clip"}.get(name, name.split(" ")[0])
    return Formula(policy=policy, options=POLICIES[name][1], **changes)
