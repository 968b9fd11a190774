"""SpecForge: what its compact teacher reads of the target's whole vocabulary.

    tiled_logsumexp_argmax(hidden [..., D], weight [V, D])      float32 log Z [..., 1] and the most likely id [...]

SpecForge multiplies a chunk of the vocabulary at a time and holds its float32 logits, twice. Here one product ends in
both numbers. Logits are rounded to the dtype of the hidden states first, as its linear layer rounds them, so that equal
ones are equal here, too. Its losses take the target's probabilities over the draft's ids, which exist by then, and stay
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from logitless.adapters.host import Host, Option, Replacement
from logitless.adapters.scoring import HALF
from logitless.errors import LogitlessError
from logitless.operands import Logits
from logitless.score import logprobs
from logitless.spec import parse_memory


def make_reduction(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``tiled_logsumexp_argmax``."""

    @torch.no_grad()
    def tiled_logsumexp_argmax(hidden: Tensor, weight: Tensor, *, chunk_size: int = 32768) -> tuple[Tensor, Tensor]:
        if chunk_size <= 0:
            raise LogitlessError(f"chunk_size must be positive but is {chunk_size}.")
        logits = Logits(hidden, weight, match=HALF.get(hidden.dtype))
        first = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
        out = logprobs(logits, first, stats=("top1",), memory=options["memory"])
        options["audit"].of_logits("tiled_logsumexp_argmax", logits, first, logprob=out.logprob)
        assert out.log_z is not None
        assert out.top1_id is not None
        return out.log_z.float()[..., None], out.top1_id

    return tiled_logsumexp_argmax


def _replacements(options: Mapping[str, Any]) -> list[Replacement]:
    return [
        Replacement(
            "specforge.core.compact_teacher",
            "tiled_logsumexp_argmax",
            "(hidden, weight, *, chunk_size=32768)",
            make_reduction,
        )
    ]


HOST = Host(
    name="specforge",
    package="specforge",
    versions=("0.2",),
    replacements=_replacements,
    options={"memory": Option("256MiB", "working memory of a call", check=parse_memory)},
)
