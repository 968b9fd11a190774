"""Results beyond log-prob, entropy and log Z: ``lines`` for what is asked for and its values, and its ``gradients``."""

from logitless.extras.gradients import SavedExtras, extended, upstream_at, write_at_ids
from logitless.extras.lines import DIFFERENTIABLE, LARGEST, MOST, STATS, Extras, Row

__all__ = [
    "DIFFERENTIABLE",
    "LARGEST",
    "MOST",
    "STATS",
    "Extras",
    "Row",
    "SavedExtras",
    "extended",
    "upstream_at",
    "write_at_ids",
]
