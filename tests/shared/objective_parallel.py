"""Shared by the tests of objective parallel and those that build on them."""

from __future__ import annotations

from logitless import Contiguous, Zigzag
from shared.objective_terms import CORRECTIONS

SCHEMES = {"zigzag": Zigzag, "contiguous": Contiguous}


CLIP = {"clip": (0.2, 0.28)}, {"low": 0.2, "high": 0.28}


KL = {"kl": "k3", "kl_coef": 0.1}


OBJECTIVES = {
    "ppo": ({**CLIP[0], **KL, "entropy_coef": 0.05}, {"options": CLIP[1], **KL, "entropy_coef": 0.05}),
    "gspo": ({"policy": "gspo", "clip": 0.05}, {"policy": "gspo", "options": {"low": 0.05, "high": 0.05}}),
    **{
        name: (
            {**CLIP[0], "correction": name, "correction_bounds": bounds if len(bounds) == 2 else bounds[0]},
            {"options": CLIP[1], "correction": name, "bounds": bounds},
        )
        for name, bounds in CORRECTIONS.items()
        if name in ("icepop", "sequence_tis", "opsm")
    },
}
