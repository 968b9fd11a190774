"""Figures, drawn from records and nothing else, in a light and a dark style.

style     colours, sizes, device and commits of the records
bars      one panel per case, one bar per provider: time and memory
curves    one line per provider: growth with T, V and D, and memory against the response fraction
mismatch  log-probs of a trainer against those of the engine that sampled
sweeps    the points of ``logitless sweep``, against the size that varies most
"""

from logitless.tools.plots.bars import Bar, draw_bars, draw_case, draw_records
from logitless.tools.plots.curves import draw_growth, draw_response
from logitless.tools.plots.mismatch import draw_mismatch
from logitless.tools.plots.style import DARK, LIGHT, Style
from logitless.tools.plots.sweeps import draw_sweep

__all__ = [
    "DARK",
    "LIGHT",
    "Bar",
    "Style",
    "draw_bars",
    "draw_case",
    "draw_growth",
    "draw_mismatch",
    "draw_records",
    "draw_response",
    "draw_sweep",
]
