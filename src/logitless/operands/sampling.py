"""``Sampling``: the distribution that a rollout engine sampled from, in one record.

A trainer's log-probs can only equal the engine's where both are of the same distribution. :class:`Sampling` says which
one tokens were sampled from and which one the engine's log-probs are of; :meth:`Sampling.check` compares it with the
trainer's :class:`~logitless.spec.Head` and names each difference.

    logits  -> rounded to the head's dtype -> scale, softcap -> / temperature -> top-k, top-p, min-p -> a token
                                                            "raw"         "scaled"              "kept"    its log-prob
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from logitless.errors import LogitlessError
from logitless.errors.arguments import check_flags, check_name, instance, is_number, refused
from logitless.operands.stands import Match
from logitless.spec import Head

Reported = Literal["raw", "scaled", "kept"]
"""The logits that log-probs are of: before the temperature, after it, or after it over the kept ids."""

Rounded = Literal["float32", "bfloat16", "float16"]
"""The dtype of a head's logits."""

ALTERING: dict[str, Any] = {
    **{"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": None},
    **{"allowed_token_ids": None, "bad_words": None, "min_tokens": 0, "min_new_tokens": 0},
    **dict.fromkeys(("structured_outputs", "json_schema", "regex", "ebnf", "structural_tag")),
}
"""Parameters of both engines that change single logits, and their values where they change none."""


@dataclass(frozen=True)
class Sampling:
    """The steps between the head's product and a sampled token.

    Attributes:
        temperature: 0 for the most likely token.
        scale, softcap, vocab_size: as in :class:`~logitless.spec.Head`.
        head: dtype that logits were rounded to, ``"float32"`` for sums of a product as they are.
        logprobs: which logits the engine's log-probs are of.
        truncated: whether top-k, top-p or min-p left ids out.
        recorded: whether the engine said which ids it kept.
        altered: parameters that changed single logits: penalties, biases, grammars.

    >>> Sampling(temperature=0.7).differences(Head(temperature=0.7))
    []
    >>> Sampling(temperature=0.7).differences(Head())
    ['temperature is 0.7 in the engine and 1.0 in the head']
    """

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None
    vocab_size: int | None = None
    head: Rounded = "float32"
    logprobs: Reported = "scaled"
    truncated: bool = False
    recorded: bool = False
    altered: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.logprobs, get_args(Reported), "Sampling: logprobs")
        check_name(self.head, get_args(Rounded), "Sampling: head")
        check_flags("Sampling", truncated=self.truncated, recorded=self.recorded)
        if not is_number(self.temperature) or self.temperature < 0:
            raise refused("Sampling: temperature", "a finite number, 0 or more", self.temperature)
        # Head refuses wrong values of its own fields.
        Head(scale=self.scale, softcap=self.softcap, vocab_size=self.vocab_size)
        if not isinstance(self.altered, tuple | list) or not all(isinstance(name, str) for name in self.altered):
            raise refused("Sampling: altered", "names of parameters", self.altered)
        object.__setattr__(self, "altered", tuple(self.altered))

    @staticmethod
    def of_vllm(params: Any, config: Any) -> Sampling:
        """From vLLM's ``SamplingParams`` of a request and the engine's ``ModelConfig``."""
        _has("Sampling.of_vllm: params", params, "a SamplingParams", "temperature")
        wanted = ("hf_text_config", "logprobs_mode", "get_vocab_size", "head_dtype")
        _has("Sampling.of_vllm: config", config, "a ModelConfig", *wanted)
        model = config.hf_text_config
        processed = str(config.logprobs_mode).startswith("processed")
        return Sampling(
            temperature=params.temperature,
            scale=_scale(model),
            softcap=getattr(model, "final_logit_softcapping", None),
            vocab_size=config.get_vocab_size(),
            head=_named(config.head_dtype),
            logprobs="kept" if processed else "raw",
            recorded=bool(getattr(config, "return_sampling_mask", False)),
            **_of_params(params),
        )

    @staticmethod
    def of_sglang(
        params: Any, arguments: Any, config: Any, *, original: bool = False, recorded: bool = False
    ) -> Sampling:
        """From SGLang's sampling parameters, its ``ServerArgs`` and the model's configuration.

        Args:
            params: ``SamplingParams``, or the dictionary of a request.
            original: whether ``SGLANG_RETURN_ORIGINAL_LOGPROB`` is set.
            recorded: whether the request has ``return_sampling_mask``.
        """
        check_flags("Sampling.of_sglang", original=original, recorded=recorded)
        if not isinstance(params, Mapping):
            _has("Sampling.of_sglang: params", params, "a SamplingParams or a request's dictionary", "temperature")
        _has("Sampling.of_sglang: arguments", arguments, "a ServerArgs", "enable_fp32_lm_head", "dtype")
        _has("Sampling.of_sglang: config", config, "a model's configuration", "vocab_size")
        return Sampling(
            temperature=params.get("temperature", 1.0) if isinstance(params, Mapping) else params.temperature,
            scale=_scale(config),
            softcap=getattr(config, "final_logit_softcapping", None),
            vocab_size=config.vocab_size,
            head="float32" if arguments.enable_fp32_lm_head else _named(arguments.dtype, config),
            logprobs="raw" if original else "scaled",
            recorded=recorded,
            **_of_params(params),
        )

    def differences(self, head: Head, *, match: Match = None, kept: bool = False) -> list[str]:
        """The differences between the trainer's distribution and the engine's, a text for each.

        Args:
            head: the trainer's.
            match: of the trainer's :class:`~logitless.Logits`.
            kept: whether the trainer scores over the ids that the engine kept.
        """
        instance(head, Head, "Sampling: head")
        check_flags("Sampling", kept=kept)
        if match is not None:
            check_name(match, ("bfloat16", "float16"), "Sampling: match")
        trainer = {name: getattr(head, name) for name in ("temperature", "scale", "softcap", "vocab_size")}
        if isinstance(head.temperature, Tensor):
            values = head.temperature.detach().reshape(-1).unique()
            # The softmax divides by float32 numbers, and 0.7 in float32 is another number than the engine's 0.7.
            same = bool((values.float() == values.new_tensor(self.temperature, dtype=torch.float32)).all())
            shown = values.tolist()
            trainer["temperature"] = self.temperature if same else shown[0] if len(shown) == 1 else shown
        if self.vocab_size is None:
            del trainer["vocab_size"]
        compared = [(name, getattr(self, name), x) for name, x in trainer.items()]
        found = [f"{name} is {x} in the engine and {y} in the head" for name, x, y in compared if x != y]
        if self.head != (match or "float32"):
            found.append(f"logits are rounded to {self.head} in the engine, and match is {match!r} in the trainer")
        if self.truncated and not kept:
            ids = "which ids it kept is recorded: score with kept=" if self.recorded else "it did not record which"
            found.append(f"the engine sampled from some ids of the vocabulary, and {ids}")
        if kept and not self.truncated:
            found.append("the trainer scores over kept ids, and the engine sampled from the whole vocabulary")
        if self.logprobs == "raw" and self.temperature != 1.0:
            found.append("the engine's log-probs are of logits before the temperature")
        if self.truncated and self.logprobs != "kept":
            found.append("the engine's log-probs are over the whole vocabulary, and its tokens from the ids it kept")
        if self.altered:
            found.append(f"the engine changed logits by {', '.join(self.altered)}, which the trainer does not")
        return found

    def check(self, head: Head, *, match: Match = None, kept: bool = False) -> None:
        """Raise unless the trainer's distribution is the engine's; arguments as for :meth:`differences`."""
        found = self.differences(head, match=match, kept=kept)
        if found:
            raise LogitlessError(f"Sampling: the engine and the trainer have two distributions: {'; '.join(found)}.")


def _has(argument: str, x: Any, wanted: str, *names: str) -> None:
    """Raise for an object of an engine that lacks one of the attributes ``names``."""
    missing = [name for name in names if not hasattr(x, name)]
    if missing or isinstance(x, type | Tensor):
        raise refused(argument, wanted, x, f" It has no {', '.join(missing)}." if missing else "")


def _of_params(params: Any) -> dict[str, Any]:
    """``truncated`` and ``altered`` of sampling parameters: an object, or a request's dictionary."""

    def of(name: str, default: Any) -> Any:
        found = params.get(name, default) if isinstance(params, Mapping) else getattr(params, name, default)
        return default if found is None else found

    top_k = of("top_k", -1)
    # Both engines write "all" as a number: -1, 0, or one past any vocabulary.
    truncated = 0 < top_k < 1 << 24 or of("top_p", 1.0) < 1.0 or of("min_p", 0.0) > 0.0
    altered = tuple(name for name, usual in ALTERING.items() if (of(name, usual) or usual) != usual)
    return {"truncated": truncated, "altered": altered}


def _scale(config: Any) -> float:
    """Factor of the logits in a model's configuration: Cohere multiplies, Granite divides."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)


def _named(dtype: Any, config: Any = None) -> Any:
    """A dtype by its name; that of the model's configuration where an engine was told to find out."""
    if dtype in ("auto", None):
        dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    return str(dtype).removeprefix("torch.")
