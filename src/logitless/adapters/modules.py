"""Modules of somebody's model: evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Inside the block there is no dropout; the mode of every module is put back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
