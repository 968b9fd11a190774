"""``Unit``: FSDP2's unit that holds a head's weight, which is whole while something reads logits that are not computed.

    forward of the unit             a reading                        backward of the reading
    gathered, and maybe let go of   gathered, and as before again    gathered; FSDP2 lets go of it, and sums gradients

A plain product is made inside of the forward, and FSDP2 gathers its weight once more where the gradient of the output
comes by. Here the product is made later, and multiplies by the weight before the gradient comes by the logits. What is
left whole would be read by the next forward as it was before the optimizer's step, and lie among the parameters in the
place of those that have gradients; so a reading leaves nothing whole.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
from torch import Tensor

from logitless.errors import LogitlessError

P = ParamSpec("P")


class Unit:
    """The unit in one forward.

    Args:
        module: with ``unshard`` and ``reshard``.
        weight: the parameter that the unit has gathered.
    """

    def __init__(self, module: Any, weight: Any) -> None:
        self._module, self._weight = module, weight
        # Whether backward has begun, and whether the one that runs has come by the logits.
        self._passed, self._came = False, False

    def require(self, there: bool, graph: bool) -> None:
        """Have the weight whole until the reading that is under way has ended, or all of backward where that runs;
        raise after backward, where other ranks may not come to gather it.

        Args:
            there: whether it is whole.
            graph: whether results of the reading have a gradient.
        """
        if torch._C._current_graph_task_id() >= 0:
            if not there:
                self.gather_in_backward()
            return
        if not there and self._passed:
            raise LogitlessError(
                "Logits: backward has gone through these logits, and FSDP2 has let go of the head's weight since. To "
                "gather it again waits for all ranks, and a rank that logs may be alone. Read what you log before "
                "backward()."
            )
        if not there:
            self.gather()
        READ.units.append((self, not there, graph))

    def gather(self) -> None:
        """Make the weight whole, with all ranks of the unit, unless it is."""
        self._module.unshard()

    def let_go(self) -> None:
        self._module.reshard()

    def gather_in_backward(self) -> None:
        """The same until the end of backward, or as FSDP2 was told where the gradient comes by its hooks."""
        weight = self._weight.to_local() if hasattr(self._weight, "to_local") else self._weight
        if not weight.untyped_storage().size():
            self._came = False
            self.gather()
            _at_the_end_of_backward(lambda: None if self._came else self.let_go())

    def comes_by(self) -> None:
        """The gradient of the logits is about to pass the hooks of FSDP2."""
        self._came = True

    def before_backward(self, _: Tensor) -> None:
        """Hook on the gradient of what was read."""
        self._passed = True
        self.gather_in_backward()


def gathered(x: Any) -> tuple[Any, Tensor] | None:
    """The module of the unit that has gathered this parameter, or has it in part, and what it was gathered of; None of
    parameters that are in no unit of FSDP2."""
    states: Any = sys.modules.get("torch.distributed._composable_state")
    for module, known in () if states is None else list(states._module_state_mapping.items()):
        state = known()
        # Older versions of torch have one group.
        for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]:
            for own in getattr(group, "fsdp_params", ()):
                if own.sharded_param is x or getattr(own, "_unsharded_param", None) is x:
                    return module, own.sharded_param
    return None


def _at_the_end_of_backward(function: Callable[[], None]) -> None:
    """Run a function when the backward that runs now has ended, and FSDP2's own such functions have run."""
    queue: Callable[..., None] = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(function))


class _Read(threading.local):
    """Units of this thread that readings under way have required; whether they gathered them; and whether what they
    read has a gradient."""

    def __init__(self) -> None:
        self.units: list[tuple[Unit, bool, bool]] = []


READ = _Read()


def end_reading(since: int, found: Any = ()) -> None:
    """Let go of what was gathered since ``READ`` had so many units, and have backward of the results gather it again.

    Args:
        found: results, of which tensors count.
    """
    units, READ.units[since:] = READ.units[since:], []
    for unit, ours, _ in units:
        if ours:
            unit.let_go()
    graded = {unit for unit, _, graph in units if graph}
    for x in found:
        # Not of what is not computed yet, whose reading comes later.
        if type(x) is Tensor and x.grad_fn is not None:
            for unit in graded:
                x.register_hook(unit.before_backward)


def reading(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """The function as a reading of its own. Verbs, and torch's functions, spare themselves a call more for each."""

    @functools.wraps(function)
    def read(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        since, found = len(READ.units), None
        try:
            found = function(*args, **kwargs)
            return found
        finally:
            if len(READ.units) > since:
                end_reading(since, (found,))

    return read
