"""``Watch``: a parameter that logits came from, and whether it has changed since.

A version counts what is written to a tensor. Optimizers that write to many DTensors at once (foreach) count none, and
FSDP2 gathers the weight of after such a step where the logits are read: so steps are counted as well.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

_STEPS = WeakTensorKeyDictionary()
"""How often an optimizer has stepped, for each parameter that is watched."""

_hooks: list[Any] = []


class Watch:
    """A parameter as it is now."""

    def __init__(self, parameter: Tensor) -> None:
        if not _hooks:
            _hooks.append(register_optimizer_step_post_hook(_count))
        _STEPS.setdefault(parameter, 0)
        self._parameter, self._state = parameter, _state(parameter)

    def changed(self) -> bool:
        """Whether something was written to it since."""
        return _state(self._parameter) != self._state


def _state(parameter: Tensor) -> tuple[int, int]:
    return parameter._version, _STEPS[parameter]


def _count(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in _STEPS:
                _STEPS[parameter] += 1
