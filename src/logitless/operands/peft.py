"""The weight of a layer that peft may have put a LoRA around: its attributes are read here and nowhere else."""

from __future__ import annotations

from typing import Any

from logitless.errors import LogitlessError, adapted
from logitless.operands.lora import LoRA


def head_weight(caller: str, layer: Any) -> Any:
    """The weight of a layer, or its :class:`LoRA` where peft has put one around it. Any other adapter is refused."""
    if not hasattr(layer, "base_layer"):
        return layer.weight
    name, weight = active_adapter(caller, layer), layer.base_layer.weight
    if name is None:
        # The weight of a merged layer has the adapter in it.
        return weight
    dropout = layer.lora_dropout[name] if name in getattr(layer, "lora_dropout", {}) else None
    return LoRA(weight, layer.lora_A[name].weight, layer.lora_B[name].weight, float(layer.scaling[name]), dropout)


def active_adapter(caller: str, layer: Any) -> str | None:
    """The name of the LoRA that a layer of peft adds to its weight; None where it adds none.

    Raises where the adapter is more than two matrices, a scale and a dropout. A sharded LoRA's matrices may be empty.
    """
    a, b, active = (getattr(layer, name, None) for name in ("lora_A", "lora_B", "active_adapters"))
    if a is None or b is None or active is None or hasattr(layer.base_layer, "base_layer"):
        raise LogitlessError(f"{caller}: {adapted(type(layer).__name__)}")
    names = [name for name in active if name in a]
    if getattr(layer, "disable_adapters", False) or getattr(layer, "merged", False) or not names:
        return None
    name, kind, variants = names[0], type(layer).__name__, getattr(layer, "lora_variant", {})
    refused = {
        f"{len(names)} active adapters ({', '.join(names)})": len(names) > 1,
        "DoRA's magnitudes": getattr(layer, "use_dora", {}).get(name, False),
        f"the variant {type(variants[name]).__name__ if name in variants else ''}": name in variants,
        "a bias of its own": getattr(b[name], "bias", None) is not None,
        "a transposed weight": getattr(layer, "fan_in_fan_out", False),
    }
    for more, there in refused.items():
        if there:
            text = f"{caller}: {kind} has {more}, and only weight + scale * b @ a is computed here. {adapted(kind)}"
            raise LogitlessError(text)
    return name
