"""``Watch``: parameters that logits came from, and whether they have changed since.

A version counts what is written to a tensor, but not all of it: a fused optimizer counts nothing, one that writes to
many DTensors at once (foreach) neither, and FSDP2 gathers the weight of after a step where logits of before are read.
So the steps of optimizers are counted as well. What is written through ``.data`` is seen by neither; of Megatron's and
DeepSpeed's optimizers, which write so, the float32 copies are watched that these step first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

_STEPS = WeakTensorKeyDictionary()
"""How often an optimizer has stepped, for each parameter that is watched."""

_hooks: list[Any] = []


class Watch:
    """Parameters as they are now.

    Args:
        parameters: those that optimizers know.
        also: tells what else the numbers hang on.
    """

    def __init__(self, parameters: Sequence[Tensor], also: Callable[[], Any] | None = None) -> None:
        if not _hooks:
            _hooks.append(register_optimizer_step_post_hook(_count))
        known = [y for x in parameters for y in (x, *_copies(x))]
        # An inference tensor has no version.
        self._parameters, self._also = [x for x in known if not x.is_inference()], also
        for x in self._parameters:
            _STEPS.setdefault(x, 0)
        self._before = self._now()

    def changed(self) -> bool:
        """Whether something was written to one of them since."""
        return self._now() != self._before

    def _now(self) -> Any:
        return [(x._version, _STEPS[x]) for x in self._parameters], None if self._also is None else self._also()


def _copies(parameter: Any) -> list[Tensor]:
    """The float32 copy of a parameter, or its part here, where Megatron's or DeepSpeed's optimizer has made one."""
    fragment = getattr(getattr(parameter, "_hp_mapping", None), "hp_fragment", None)
    return [x for x in (getattr(parameter, "main_param", None), fragment) if isinstance(x, Tensor)]


def _count(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in _STEPS:
                _STEPS[parameter] += 1
