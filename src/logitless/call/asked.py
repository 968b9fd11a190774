"""``Asked``: the options of a verb as the caller gave them, each declared here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from logitless.backends.divergences import Divergence
from logitless.operands import Kept, Teacher, Teachers
from logitless.spec import EntropyMode, Head

PLAIN = Head()
"""The distribution where none is given."""


@dataclass(frozen=True, eq=False)
class Asked:
    """Keyword arguments of :func:`logitless.logprobs`; a loss decides on some of them by its objective.

    Attributes:
        entropy: None; ``"value"`` for values with no graph; ``"grad"`` for values with one.
        head: temperature, scale, softcap and true vocabulary size.
        kept: ids the sampler kept, and what entropy and log Z are over.
        stats, top_k, ids: readings beyond the softmax.
        teacher, divergence: the other distribution, and how far from it.
        memory: bound on the working memory; None for the verb's default.
        backend: name of the backend, or ``"auto"``.
    """

    entropy: EntropyMode = None
    head: Head | None = None
    kept: Kept | None = None
    stats: tuple[str, ...] = ()
    top_k: int | None = None
    ids: Tensor | None = None
    teacher: Teacher | Teachers | Tensor | None = None
    divergence: Divergence | str = "reverse_kl"
    memory: int | str | None = None
    backend: str = "auto"
