"""prime-rl: the LM heads of its RL trainer, which are given labels and a temperature per token.

    FusedOutputLinear.forward(hidden [b, s, h], labels [b, s], temperature [b, s])    log-probs and entropy, [b, s]
    GemmaFusedOutputLinear.forward                                                    the same under Gemma's softcap
    VanillaOutputLinear.forward        the same, where prime-rl's own returns logits for its trainer to score

The weight is the module's own, read inside its forward, where FSDP has gathered it. The weight's gradient is summed in
float32. Calls without labels or temperature are left to prime-rl, which refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from logitless.adapters.host import Host, Option, PassOn, Replacement
from logitless.adapters.scoring import HALF, entropy_mode, score, untrained
from logitless.adapters.shards import check_ids
from logitless.errors import LogitlessError
from logitless.operands import Logits
from logitless.spec import Head

LAYERS = "prime_rl.trainer.models.layers"

CHUNK = 8192
"""Rows of a tile where prime-rl's head has no ``chunk_size``."""

VOCABULARY_CHUNK = 8192
"""Columns of prime-rl's tile of logits; ``chunk_size`` of the head is its rows."""


def make_forward(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Stands in for ``forward`` of a head; the Gemma head has a softcap, the others none."""

    def forward(
        self: Any, hidden_states: Tensor, labels: Tensor | None = None, temperature: Tensor | float | None = None
    ) -> Any:
        if labels is None or temperature is None:
            return PassOn("no labels" if labels is None else "no temperature")
        lead = tuple(hidden_states.shape[:-1])
        check_ids("labels", labels, lead)
        if isinstance(temperature, Tensor) and temperature.shape != labels.shape:
            raise LogitlessError(f"temperature must be {list(lead)} but is {list(temperature.shape)}.")
        weight, trained = self.weight, options["entropy_grad"]
        match = None if options["accurate"] else HALF.get(hidden_states.dtype)
        out = score(
            type(self).__name__,
            Logits(hidden_states, weight, match=match),
            labels,
            options["audit"],
            head=Head(temperature=temperature, softcap=getattr(self, "softcap", None)),
            entropy=entropy_mode(trained, hidden_states, weight),
            # prime-rl's tile, as bytes of float32 logits; the vanilla head has none.
            memory=4 * getattr(self, "chunk_size", CHUNK) * min(weight.shape[0], VOCABULARY_CHUNK),
        )
        assert out.entropy is not None
        # FSDP warns of modules that return views, as results in the shape of the labels are.
        logprob, entropy = out.logprob.float().clone(), out.entropy.float()
        return {"logprobs": logprob, "entropy": entropy.clone() if trained else untrained("prime_rl", entropy, logprob)}

    return forward


def _replacements(options: Mapping[str, Any]) -> list[Replacement]:
    heads = (
        ("lm_head", "FusedOutputLinear"),
        ("lm_head_gemma", "GemmaFusedOutputLinear"),
        ("lm_head", "VanillaOutputLinear"),
    )
    return [
        Replacement(
            module=f"{LAYERS}.{module}",
            name=f"{name}.forward",
            signature="(self, hidden_states, labels=None, temperature=None)",
            make=make_forward,
        )
        for module, name in heads
    ]


HOST = Host(
    name="prime_rl",
    package="prime_rl",
    versions=("0.4 - 0.8",),
    replacements=_replacements,
    options={
        "accurate": Option(False, "float32 logits of half-precision hidden states instead of prime-rl's rounding"),
        "entropy_grad": Option(
            False, "True: entropy has a gradient, for a bonus in a loss of your own; False: it raises"
        ),
    },
    distribution="prime-rl",
)
