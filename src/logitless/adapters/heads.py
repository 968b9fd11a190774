"""Heads of a host's models that return logits which are not computed.

    Host(heads=...)              functions of the host in which a model is at hand before its forward
    options["heads"].defer(m)    has the head of that model return ``Logits``, once; the host's own code passes them on
    options["heads"].release(m)  puts it back, before a call of the host that reads whole logits
    uninstall                    puts every head back

A head that cannot be deferred computes as ever, and ``status`` says why. What computes logits after all is counted with
its place. No model is kept alive.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal
from weakref import WeakKeyDictionary

from logitless.deferred.model import defer_or_tell, is_without_logits, undefer
from logitless.errors import LogitlessError
from logitless.operands.logits import MADE


class Heads:
    """The models of one installed host that were deferred, and those that could not be.

    Args:
        logits: the option. ``"deferred"`` gives the numbers that the head itself would, rounded to its dtype;
            ``"float32"`` keeps the sums of the product; ``"host"`` leaves all heads alone.
        placed: whether heads that are DTensors are deferred.
    """

    def __init__(self, logits: str, placed: bool = False) -> None:
        self.logits, self._placed = logits, placed
        self._lock = threading.Lock()
        # Whether each model that is still there is deferred, or why it could not be.
        self._models: WeakKeyDictionary[Any, Literal[True] | str] = WeakKeyDictionary()
        self._number, self._why = 0, set[str]()
        self._before = Counter(MADE)

    @property
    def wanted(self) -> bool:
        return self.logits != "host"

    def defer(self, model: Any) -> bool:
        """Have the model's head return logits that are not computed; the first call of each model does.

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
                found = self._first(model)
                self._models[model] = found
            return found is True

    def _first(self, model: Any) -> Literal[True] | str:
        try:
            defer_or_tell(model, self._refused, rounded=self.logits == "deferred", placed=self._placed)
        except LogitlessError as error:
            self._why.add(str(error))
            return str(error)
        self._number += 1
        return True

    def release(self, model: Any) -> None:
        """Put the head of the model back, where it was deferred here."""
        with self._lock:
            if self._models.get(model) is True:
                undefer(model)
                del self._models[model]
                self._number -= 1

    def _refused(self, why: str) -> None:
        """A forward of a deferred head computed its logits after all."""
        with self._lock:
            self._why.add(why)

    def undo(self) -> None:
        """Put every head back."""
        with self._lock:
            for model, found in list(self._models.items()):
                if found is True:
                    undefer(model)
            self._models.clear()

    def lines(self) -> list[str]:
        """What ``status`` prints: how many models are deferred, which are not and why, and who computed logits."""
        with self._lock:
            number, why = self._number, sorted(self._why)
        if not self.wanted:
            return ["logits: computed by the host's own head"]
        lines = [f"logits: not computed ({self.logits}); {number} models so far"]
        lines += [f"logits of a model are computed: {reason}" for reason in why]
        return lines + [f"logits made {count} times, by {place}" for place, count in self.made().items()]

    def made(self) -> Mapping[str, int]:
        """How often logits were computed after all since the host was installed, by ``file:line``."""
        return dict((MADE - self._before).most_common())


def deferring(
    model_of: Callable[..., Any], reads: Callable[..., bool] = lambda *_, **__: True
) -> Callable[[Callable[..., Any], Mapping[str, Any]], Callable[..., Any]]:
    """``make`` of a :class:`~logitless.adapters.host.Replacement` that defers a model and then calls the host.

    Args:
        model_of: the model, from the arguments of the call; or None for a call without one.
        reads: whether a call reads a few numbers of each row; for any other the model's own head computes.
    """

    def make(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
        def deferred_first(*args: Any, **kwargs: Any) -> Any:
            model = model_of(*args, **kwargs)
            if model is not None:
                heads: Heads = options["heads"]
                (heads.defer if reads(*args, **kwargs) else heads.release)(model)
            return original(*args, **kwargs)

        return deferred_first

    return make
