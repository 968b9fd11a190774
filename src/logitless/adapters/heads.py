"""Heads of a host's models that return logits which are not computed.

    Host(heads=...)              functions of the host in which a model is at hand before its forward
    options["heads"].defer(m)    has the head of that model return ``Logits``, once; the host's own code passes them on
    uninstall                    puts every head back

A head that cannot be deferred computes as ever, and ``status`` says why. What computes logits after all is counted with
its place.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from logitless.deferred.model import Deferral, defer_or_tell, is_without_logits
from logitless.errors import LogitlessError
from logitless.operands.logits import MADE


class Heads:
    """The models of one installed host that were deferred, and those that could not be.

    Args:
        logits: the option. ``"deferred"`` gives the numbers that the head itself would, rounded to its dtype;
            ``"float32"`` keeps the sums of the product; ``"host"`` leaves all heads alone.
    """

    def __init__(self, logits: str) -> None:
        self.logits = logits
        self._lock = threading.Lock()
        self._models: WeakKeyDictionary[Any, Deferral | str] = WeakKeyDictionary()
        self._why: set[str] = set()
        self._before = Counter(MADE)

    @property
    def wanted(self) -> bool:
        return self.logits != "host"

    def defer(self, model: Any, **options: Any) -> bool:
        """Have the model's head return logits that are not computed; the first call of each model does.

        Args:
            options: as for :func:`logitless.defer`.

        Returns:
            Whether the model's logits are deferred. A part of a model without a head, and a value model, are left
            alone, and so is a model whose head somebody else has deferred.
        """
        if not self.wanted:
            return False
        with self._lock:
            found = self._models.get(model)
            if found is None and is_without_logits(model):
                return False
            if found is None:
                try:
                    found = defer_or_tell(model, self._refused, rounded=self.logits == "deferred", **options)
                except LogitlessError as error:
                    found = str(error)
                self._models[model] = found
            return isinstance(found, Deferral)

    def _refused(self, why: str) -> None:
        """A forward of a deferred head computed its logits after all."""
        with self._lock:
            self._why.add(why)

    def undo(self) -> None:
        """Put every head back."""
        with self._lock:
            for found in self._models.values():
                if isinstance(found, Deferral):
                    found.undo()
            self._models.clear()

    def lines(self) -> list[str]:
        """What ``status`` prints: how many models are deferred, which are not and why, and who computed logits."""
        with self._lock:
            found = list(self._models.values())
            why = {*self._why, *(x for x in found if isinstance(x, str))}
        if not self.wanted:
            return ["logits: computed by the host's own head"]
        number = sum(isinstance(x, Deferral) for x in found)
        lines = [f"logits: not computed ({self.logits}); {number} models so far"]
        lines += [f"logits of a model are computed: {reason}" for reason in sorted(why)]
        return lines + [f"logits made {count} times, by {place}" for place, count in self.made().items()]

    def made(self) -> Mapping[str, int]:
        """How often logits were computed after all since the host was installed, by ``file:line``."""
        return dict((MADE - self._before).most_common())


def deferring(model_of: Callable[..., Any]) -> Callable[[Callable[..., Any], Mapping[str, Any]], Callable[..., Any]]:
    """``make`` of a :class:`~logitless.adapters.host.Replacement` that defers a model and then calls the host.

    Args:
        model_of: the model, from the arguments of the call; or None for a call without one.
    """

    def make(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
        def deferred_first(*args: Any, **kwargs: Any) -> Any:
            model = model_of(*args, **kwargs)
            if model is not None:
                options["heads"].defer(model)
            return original(*args, **kwargs)

        return deferred_first

    return make
