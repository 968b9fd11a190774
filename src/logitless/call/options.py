"""Keyword arguments of the calls, as the caller gave them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import Tensor

from logitless.call.lora import LowRank
from logitless.errors import LogitlessError, did_you_mean
from logitless.kept import Kept
from logitless.spec import EntropyMode, Head, VocabShard

Scope = Literal["vocabulary", "support"]
"""What a distribution is over: the whole vocabulary, or the ids that the sampler kept and the target."""


@dataclass(frozen=True, eq=False)
class Options:
    """Keyword arguments as the caller gave them, the adapter that came with the weight, and the name to call the
    function by in errors."""

    bias: Tensor | None = None
    entropy: EntropyMode = None
    head: Head | None = None
    shard: VocabShard | None = None
    kept: Kept | None = None
    scope: Scope = "vocabulary"
    stats: tuple[str, ...] = ()
    top_k: int | None = None
    further_ids: Tensor | None = None
    hidden_grad: Literal["reduced", "partial"] = "reduced"
    sequence_parallel: bool = False
    weight_grad: Tensor | None = None
    sparse_weight_grad: bool = False
    match: Literal["bfloat16", "float16"] | None = None
    tf32: bool = False
    batch_invariant: bool = False
    backend: str = "auto"
    memory: int | str = "256MiB"
    low_rank: LowRank | None = None
    caller: str = "linear_logprobs"

    @staticmethod
    def of(arguments: Mapping[str, Any], caller: str) -> Options:
        """Those of a function's arguments that are options, each under its own name."""
        return Options(**{name: arguments[name] for name in _OPTIONS if name in arguments}, caller=caller)

    @staticmethod
    def named(given: Mapping[str, Any], caller: str) -> Options:
        """Options by name; raises for a name that is none."""
        for name in given:
            if name not in _OPTIONS:
                known = ", ".join(_OPTIONS)
                raise LogitlessError(
                    f"{caller}: {name} is no option that the route depends on.{did_you_mean(name, _OPTIONS)} "
                    f"Options are: {known}."
                )
        return Options(**given, caller=caller)


_OPTIONS = tuple(f.name for f in fields(Options) if f.name not in ("low_rank", "caller"))
