"""Plug-ins for rollout engines: log-probs with the bits that a trainer's ``Logits(bits="canonical")`` has.

    LOGITLESS_ENGINE=logprobs,head      in the environment of vLLM or SGLang; unset, or empty, nothing is replaced
    logprobs                            log-probs of sampled and of given tokens, in one order of summation for all
    head                                the product of a float32 head, in pieces of one shape
    prompt                              vLLM: log-probs, top-k and ranks of prompts without the prompt's logits
    contract                            vLLM: requests that sample from another distribution than LOGITLESS_TRAINER says
                                        are refused

The engines find ``plug_into_vllm`` and ``plug_into_sglang`` by the entry points of this package, and call them in each
of their processes. An engine is a host as the adapters' are: described by a ``Host``, checked before anything is
replaced, and told by ``logitless.status()``. Where a part that was asked for cannot be had, the engine does not start.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os

from logitless.errors import LogitlessError, did_you_mean

VARIABLE = "LOGITLESS_ENGINE"
"""The environment variable that names the parts; read by :func:`asked` alone."""

GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
"""Entry points by which the engines find us."""

PARTS = {"vllm": ("logprobs", "head", "prompt", "contract"), "sglang": ("logprobs", "head")}


def asked(engine: str) -> tuple[str, ...]:
    """The parts that the environment asks of an engine, each once; none where it does not."""
    told = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    known = PARTS[engine]
    for name in told:
        if name not in known:
            raise LogitlessError(
                f"{VARIABLE}: there is no part {name!r} for {engine}.{did_you_mean(name, known)} "
                f"Known: {', '.join(known)}."
            )
    return tuple(name for name in known if name in told)


def plug_into_vllm() -> None:
    """The function that vLLM calls in each process. An error ends the process."""
    _plug("vllm")


def plug_into_sglang() -> None:
    """The function that SGLang calls in each process. SGLang would log an error and go on, so the process is ended."""
    try:
        _plug("sglang")
    except LogitlessError as error:
        raise SystemExit(f"logitless: {error}") from error


def registered(engine: str) -> bool:
    """Whether the engine would find our entry point."""
    return any(x.module == __name__ for x in importlib.metadata.entry_points(group=GROUPS[engine]))


def _plug(engine: str) -> None:
    parts = asked(engine)
    if not parts:
        return
    # An engine that asks for nothing imports nothing of ours.
    adapters, module = (importlib.import_module(f"logitless.{x}") for x in ("adapters", f"engines.{engine}"))
    report = adapters.install(module.HOST, parts=parts)
    there = {entry.name for entry in report.replaced}
    for part in parts:
        if not there & {x.path for x in module.OF_PARTS[part]}:
            adapters.uninstall(module.HOST)
            raise LogitlessError(
                f"{VARIABLE}: {engine} {report.version} has no place for {part}: {'; '.join(report.missing)}. Nothing "
                f"was replaced. Ask for other parts alone."
            )
