"""Shared by the tests of skyrl."""

from __future__ import annotations

import sys
import warnings
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

MODEL_UTILS = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"


TORCH_UTILS = "skyrl.backends.skyrl_train.utils.torch_utils"


WRAPPER = "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper"


V, D, TEMPERATURE, SCALE = 62, 8, 0.7, 1.3


MASK = torch.tensor([[0] * 4 + [1] * 9, [1] * 13, [1] * 5 + [0] * 8]).bool()
"""Three sequences: padded on the left, full, padded on the right."""


@dataclass(frozen=True)
class Layout:
    """Sequences of ``lengths`` padded to ``spans``; the result of token o of sequence i goes to ``place[i][o]``."""

    lengths: list[int]
    spans: list[int]
    place: list[list[tuple[int, int]]]
    shape: tuple[int, int]

    @property
    def bounds(self) -> Tensor:
        return torch.tensor([0, *self.spans]).cumsum(0).int()


def padded_layout() -> Layout:
    batch, length = MASK.shape
    place = [[(row, column) for column in range(length - 1)] for row in range(batch)]
    return Layout([length] * batch, [16] * batch, place, (batch, length - 1))


def masked_layout() -> Layout:
    columns = [row.nonzero().flatten().tolist() for row in MASK]
    place = [[(row, column) for column in where[:-1]] for row, where in enumerate(columns)]
    return Layout([9, 13, 5], [16, 16, 8], place, (3, 12))


def rows_of_sub_sequences() -> Layout:
    """Two sequences packed in the first row by the controller, one in the second."""
    place = [[(0, o) for o in range(8)], [(0, 16 + o) for o in range(4)], [(1, o) for o in range(12)]]
    return Layout([9, 5, 13], [16, 8, 16], place, (2, 23))


def bare_layout() -> Layout:
    """Neither mask nor sub-sequences: padding counts as tokens, as far as the output is wide."""
    place = [[(i, o) for o in range(min(span, 13) - 1)] for i, span in enumerate([16, 16, 8])]
    return Layout([13, 13, 8], [16, 16, 8], place, (3, 12))


LAYOUTS = {
    "padded": padded_layout(),
    "masked": masked_layout(),
    "sub": rows_of_sub_sequences(),
    "bare": bare_layout(),
}


@contextmanager
def on_cpu():
    """SkyRL's gather of padded results wants pinned memory and a GPU for one small index; its sums are eager."""
    tensor, cuda = torch.tensor, torch.Tensor.cuda
    torch.tensor = lambda data, pin_memory=False, **more: tensor(data, **more)
    torch.Tensor.cuda = lambda self, **_: self
    try:
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.tensor, torch.Tensor.cuda = tensor, cuda


def action_weights(layout: Layout, loss_mask: Tensor | None) -> Tensor:
    """Of results that exist: the loss mask of the last six of a row."""
    exists, weights = torch.zeros(layout.shape), torch.zeros(layout.shape)
    for places in layout.place:
        for place in places:
            exists[place] = 1
    weights[:, -6:] = 1 if loss_mask is None else loss_mask
    return (weights * exists).double()


def functional():
    return sys.modules[TORCH_UTILS]


def logits_of(*lead, dtype=torch.float32):
    return (torch.randn(*lead, 507, dtype=torch.float64) * 3).to(dtype)
