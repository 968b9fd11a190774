"""A forward of one module alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


class Bound:
    """``wrap(forward of the module's class)`` as a method of this one module.

    Unlike a method it can be pickled with its module: a method is pickled as an attribute of that name, and while the
    module is made again, there is none but its class's own.
    """

    def __init__(self, wrap: Callable[..., Any], module: nn.Module) -> None:
        # Named as in a method, for whoever wraps the function once more, as accelerate does.
        self._wrap, self.__self__, self.__func__ = wrap, module, wrap(type(module).forward)
        functools.update_wrapper(self, MethodType(type(module).forward, module), updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def __reduce__(self) -> Any:
        return Bound, (self._wrap, self.__self__)
