"""Tensors that a backward reads although autograd has not saved them: a teacher's head, kept ids, the rows' indices.

Autograd compares the version of what it saves, and so does this: a tensor that was changed in place between forward and
backward would give the gradient of another function. Saving them through autograd instead would hand a teacher's weight
to whatever packs saved tensors (``save_on_cpu``, say), and refuse those of ``torch.inference_mode``, which have no
version: they cannot be written to outside of that mode, and are not compared. Torch counts no writes through ``.data``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from logitless.errors import LogitlessError
from logitless.notes import version_of


class _Seen(NamedTuple):
    """A tensor in forward: the argument that it is, and its version."""

    name: str
    tensor: Tensor
    version: int | None


@dataclass(frozen=True, eq=False)
class Unchanged:
    """What backward will read, as it is in forward. Holds the tensors themselves, no copies.

    Attributes:
        caller: the function to name in an error.
        seen: every tensor, with its version.
    """

    caller: str
    seen: tuple[_Seen, ...]

    @staticmethod
    def of(caller: str, read: Mapping[str, Tensor | None]) -> Unchanged:
        """From tensors by the name of their argument; None is left out."""
        return Unchanged(caller, tuple(_Seen(name, x, version_of(x)) for name, x in read.items() if x is not None))

    def check(self) -> None:
        """Raise for the first that was changed in place since."""
        for name, tensor, version in self.seen:
            if version_of(tensor) != version:
                raise LogitlessError(
                    f"{self.caller}: {name} was changed in place between forward and backward, and backward reads it "
                    f"again. Change it after backward, or pass a copy: {name}.clone()."
                )
