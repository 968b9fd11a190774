"""The trainer's side of a distribution, told to an engine: requests that would sample from another are refused.

    LOGITLESS_ENGINE=logprobs,contract
    LOGITLESS_TRAINER='{"temperature": 0.7, "match": "bfloat16", "vocab_size": 151936}'

The fields are those of :class:`~logitless.Head`, ``match`` of the trainer's :class:`~logitless.Logits`, and ``kept``,
whether it scores over the ids that a sampler kept. What the engine does is read off the request and the model's
configuration (:class:`~logitless.operands.sampling.Sampling`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from logitless.adapters.host import Replacement
from logitless.errors import LogitlessError
from logitless.operands.sampling import Sampling
from logitless.spec import Head

TRAINER = "LOGITLESS_TRAINER"
"""The environment variable with the trainer's numbers; read by :func:`told` alone."""


@dataclass(frozen=True, eq=False)
class Trainer:
    """The trainer's distribution."""

    head: Head
    match: Any = None
    kept: bool = False


def told() -> Trainer:
    """The trainer that the environment describes."""
    text = os.environ.get(TRAINER, "")
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise LogitlessError(f"{TRAINER} must be a JSON object such as {{}} but is {text!r}: {error}.") from None
    of_head = {field.name for field in fields(Head)}
    unknown = set(given) - of_head - {"match", "kept"} if isinstance(given, dict) else {text}
    if unknown or given.get("match") not in (None, "bfloat16", "float16") or type(given.get("kept", False)) is not bool:
        known = ", ".join(sorted({*of_head, "match", "kept"}))
        raise LogitlessError(f"{TRAINER} must be a JSON object with some of {known} but is {text!r}.")
    head = Head(**{name: x for name, x in given.items() if name in of_head})
    return Trainer(head, given.get("match"), given.get("kept", False))


def make_validate(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``InputProcessor._validate_params``, where vLLM refuses requests before they are sent on."""
    trainer = told()

    def _validate_params(self: Any, params: Any, supported_tasks: Any) -> Any:
        found = original(self, params, supported_tasks)
        # Parameters of requests that embed or rank have no temperature.
        if hasattr(params, "temperature"):
            sampling = Sampling.of_vllm(params, self.model_config)
            sampling.check(trainer.head, match=trainer.match, kept=trainer.kept)
        return found

    return _validate_params


VALIDATION = Replacement(
    module="vllm.v1.engine.input_processor",
    name="InputProcessor._validate_params",
    signature="(self, params, supported_tasks)",
    make=make_validate,
)
