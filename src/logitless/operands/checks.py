"""What is refused of an operand before any verb sees it, and in which words.

Nothing but kinds of arguments: a shape that one rank alone has wrong is refused by the verb, which tells the others.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from logitless.errors import LogitlessError, adapted
from logitless.errors.arguments import dense


def check_tensors(caller: str, **given: Any) -> None:
    """Raise for an argument that is no tensor; a bias and a buffer may be None."""
    for what, x in given.items():
        if not isinstance(x, Tensor) and (x is not None or what in ("hidden", "weight")):
            hint = instead_of_tensor(x, what)
            raise LogitlessError(f"{caller}: {what} must be a tensor but is {type(x).__name__}.{hint}")
        if isinstance(x, Tensor):
            dense(x, f"{caller}: {what}", "a dense tensor")


def instead_of_tensor(x: Any, what: str) -> str:
    """`` What to do`` where something other than a tensor came for an argument, or nothing."""
    if isinstance(x, list | tuple):
        whole = "torch.stack" if x and isinstance(x[0], Tensor) else "torch.tensor"
        return f" Pass {whole}({what})."
    if hasattr(x, "base_layer"):
        return f" {adapted(f'{type(x).__name__}')}"
    if what == "weight" and isinstance(getattr(x, "weight", None), Tensor):
        return " Pass the layer's weight and bias: layer.weight, bias=layer.bias. Under DDP or FSDP use a PolicyHead."
    if isinstance(getattr(x, "last_hidden_state", None), Tensor):
        return " Pass its last_hidden_state."
    return " Pass its logits." if isinstance(getattr(x, "logits", None), Tensor) else ""
