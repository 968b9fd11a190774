"""Figures, drawn from records and nothing else, in a light and a dark style.

bars      one panel per case, one bar per provider: time and memory
curves    one line per provider: growth with T, V and D, and memory against the response fraction
sweeps    the points of ``python -m benchmarks sweep``, against the size that varies most
"""

from benchmarks.plots.bars import Bar, draw_bars, draw_case, draw_records
from benchmarks.plots.curves import draw_growth, draw_response
from benchmarks.plots.sweeps import draw_sweep
from logitless.tools.style import DARK, LIGHT, Style

__all__ = [
    "DARK",
    "LIGHT",
    "Bar",
    "Style",
    "draw_bars",
    "draw_case",
    "draw_growth",
    "draw_records",
    "draw_response",
    "draw_sweep",
]
