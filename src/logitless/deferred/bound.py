"""A method of one module alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


class Bound:
    """``wrap(method of the module's class)`` as a method of this one module; its forward unless a name is given.

    Unlike a method it can be pickled with its module: a method is pickled as an attribute of that name, and while the
    module is made again, there is none but its class's own.
    """

    def __init__(self, wrap: Callable[..., Any], module: nn.Module, name: str = "forward") -> None:
        own = getattr(type(module), name)
        # Named as in a method, for whoever wraps the function once more, as accelerate does.
        self._wrap, self._name, self.__self__, self.__func__ = wrap, name, module, wrap(own)
        functools.update_wrapper(self, MethodType(own, module), updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def __reduce__(self) -> Any:
        return Bound, (self._wrap, self.__self__, self._name)
