"""A plan as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from logitless.memory import Estimate
from logitless.spec import format_bytes
from logitless.tools.plan.recommend import Choice, ModelPlan
from logitless.tools.plan.ways import LossStep


def answer_lines(plan: ModelPlan) -> list[str]:
    """A few lines: the call to write, its memory, its peak, the micro-batch that fits."""
    best, own, plain = plan.best, plan.own_loss, plan.forecasts[0].estimate.peak
    room = "" if plan.free is None else f" of {format_bytes(plan.free)} free"
    lines = [f"Write {_call_text(best)}: {_products_text(best)}, peak {format_bytes(best.call.peak)}{room}."]
    if plan.free is not None:
        tokens = f"{plan.step.tokens:,} tokens " + ("fit" if plan.fits else "DO NOT FIT")
        most = f"the largest that fits has {plan.most_tokens:,}" if plan.most_tokens else "none fits: take more ranks"
        lines.append(f"Micro-batch: {tokens}; {most}.")
    lines.append(f"Plain torch needs {format_bytes(plain)}, {plain / best.call.peak:.1f} times as much.")
    if own is not best:
        text = f"{_products_text(own)}, peak {format_bytes(own.call.peak)}"
        lines.append(f"If the loss is not an Objective: {_call_text(own)}, {text}.")
    return lines


def _call_text(choice: Choice) -> str:
    verb, _, more = choice.way.name.partition(" of Logits")
    kept = 'kept=kept.over("support"), ' if more else ""
    return f'{verb}(ll.Logits(hidden, weight), ..., {kept}memory="{choice.memory}")'


def _products_text(choice: Choice) -> str:
    return "no matrix product" if choice.products == 0 else f"{choice.products} matrix products"


def headline(step: LossStep) -> str:
    model = step.model
    facts = [f"hidden {model.hidden:,}", f"vocabulary {model.vocab:,}", "tied head" if model.tied else "untied head"]
    facts += [f"softcap {model.softcap:g}"] if model.softcap else []
    facts += [f"logit scale {model.scale:g}"] if model.scale != 1 else []
    response = f"{step.rows:,} of {step.local_tokens:,} tokens are response"
    entropy = {"value": "entropy", "grad": "entropy with its gradient"}.get(str(step.entropy), "no entropy")
    frozen = ", frozen head" if step.frozen_head else ""
    where = step.device if isinstance(step.device, str) else step.device.name
    where = {"cuda": "the GPU at hand, an H200 where there is none", "cpu": "a CPU"}.get(where, where)
    return (
        f"{model.name}: {', '.join(facts)}\n"
        f"each rank of TP {step.tp}, CP {step.cp}: {response}, {step.columns:,} columns\n"
        f"{step.dtype}, log-prob and {entropy}, forward and backward{frozen}\n"
        f"tiles and route of {where}"
    )


def summary_rows(plan: ModelPlan) -> list[tuple[str, str, str, str, str]]:
    """For each way: name, peak, share of plain torch's peak, whether it fits, most tokens."""
    plain = plan.forecasts[0].estimate.peak
    lines = []
    for forecast in plan.forecasts:
        peak = forecast.estimate.peak
        share = "" if forecast is plan.forecasts[0] else f"{peak / plain:.1%}"
        fits = {None: "", True: "yes", False: "no"}[forecast.fits]
        most = "" if forecast.most_tokens is None else f"{forecast.most_tokens:,}"
        lines.append((forecast.way.name, format_bytes(peak), share, fits, most))
    return lines


def as_json(plan: ModelPlan) -> dict[str, Any]:
    """The whole plan, as JSON values."""

    def items(call: Estimate) -> dict[str, Any]:
        sides = {"forward": call.forward, "backward": call.backward}
        listed = {side: [{"name": x.name, "bytes": x.bytes} for x in chosen] for side, chosen in sides.items()}
        return {"peak": call.peak, "forward_peak": call.forward_peak, "backward_peak": call.backward_peak, **listed}

    def choice(chosen: Choice) -> dict[str, Any]:
        named = {"name": chosen.way.name, "memory": chosen.memory, "products": chosen.products}
        return {**named, "plan": str(chosen.call.plan), **items(chosen.call)}

    step = plan.step
    sizes = ("tokens", "response_fraction", "tp", "cp", "dtype", "entropy", "frozen_head", "rows", "columns")
    return {
        "model": asdict(step.model),
        "step": {name: getattr(step, name) for name in sizes} | {"local_tokens": step.local_tokens},
        "free": plan.free,
        "ways": [
            {"name": f.way.name, "fits": f.fits, "most_tokens": f.most_tokens, **items(f.estimate)}
            for f in plan.forecasts
        ],
        "call": {**choice(plan.best), "fits": plan.fits, "most_tokens": plan.most_tokens},
        "own_loss": choice(plan.own_loss),
        "snippet": plan.snippet,
    }
