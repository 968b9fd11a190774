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
        # Merged, the weight has the adapter in it.
        return weight
    dropout = layer.lora_dropout[name] if name in getattr(layer, "lora_dropout", {}) else None
    return LoRA(weight, layer.lora_A[name].weight, layer.lora_B[name].weight, float(layer.scaling[name]), dropout)


def active_adapter(caller: str, layer: Any) -> str | None:
    """The name of the LoRA that a layer of peft adds to its weight; None where it adds none. Its matrices may be
    elsewhere."""
    a, b, active = (getattr(layer, name, None) for name in ("lora_A", "lora_B", "active_adapters"))
    if a is None or b is None or active is None or hasattr(layer.base_layer, "base_layer"):
        raise LogitlessError(f"{caller}: {adapted(type(layer).__name__)}")
    names = [name for name in active if name in a]
    if getattr(layer, "disable_adapters", False) or getattr(layer, "merged", False) or not names:
        return None
    _check_plain(caller, layer, names)
    return names[0]


def _check_plain(caller: str, layer: Any, names: list[str]) -> None:
    """Raise where the adapter is more than two matrices, a scale and a dropout."""
    name, kind = names[0], type(layer).__name__
    more = None
    if len(names) > 1:
        more = f"{len(names)} active adapters ({', '.join(names)})"
    elif getattr(layer, "use_dora", {}).get(name, False):
        more = "DoRA's magnitudes"
    elif name in getattr(layer, "lora_variant", {}):
        more = f"the variant {type(layer.lora_variant[name]).__name__}"
    elif getattr(layer.lora_B[name], "bias", None) is not None:
        more = "a bias of its own"
    elif getattr(layer, "fan_in_fan_out", False):
        more = "a transposed weight"
    if more is not None:
        raise LogitlessError(
            f"{caller}: {kind} has {more}, and only weight + scale * b @ a is computed here. {adapted(kind)}"
        )
