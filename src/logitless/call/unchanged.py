"""Tensors that a backward reads although autograd has not saved them: a teacher's head, kept ids, the rows' indices.

Autograd compares the version of what it saves, and so does this: a tensor that was changed in place between forward and
backward would give the gradient of another function. Saving them through autograd instead would hand a teacher's weight
to whatever packs saved tensors (``save_on_cpu``, say), and refuse those of ``torch.inference_mode``, which have no
version: they cannot be written to outside of that mode, and are not compared. Torch counts no writes through ``.data``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from logitless.errors import LogitlessError
from logitless.notes import version_of


@dataclass(frozen=True, eq=False)
class Unchanged:
    """What backward will read, as it is in forward. Holds the tensors themselves, no copies.

    Attributes:
        caller: the function to name in an error.
        seen: the name of the argument that each tensor is, the tensor, and its version.
    """

    caller: str
    seen: tuple[tuple[str, Tensor, int | None], ...]

    def check(self) -> None:
        """Raise for the first that was changed in place since."""
        for name, tensor, version in self.seen:
            if version_of(tensor) != version:
                raise LogitlessError(
                    f"{self.caller}: {name} was changed in place between forward and backward, and backward reads it "
                    f"again. Change it after backward, or pass a copy: {name}.clone()."
                )
