"""The figure of a mismatch: what its lines are, where they lie, and what they are called."""

from __future__ import annotations

import math

import pytest
import torch

import logitless as ll
from logitless.objectives import mismatch

figure = pytest.importorskip("logitless.tools.score.figure", exc_type=ImportError)
style = pytest.importorskip("logitless.tools.style", exc_type=ImportError)


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """The three panels of 4,000 tokens."""
    kept = []
    monkeypatch.setattr(figure, "save", lambda made, path, style: kept.append(made))
    rows = ll.Rows.packed([torch.arange(401)] * 10, [400] * 10)
    rollout = -torch.rand(4000, dtype=torch.float64) * 5
    trainer = rollout + 0.01 * torch.randn(4000, dtype=torch.float64)
    report = mismatch(trainer, rollout, rows, bound=0.02)
    figure.draw_mismatch(trainer, rollout, rows.position, report, tmp_path / "a.png", style.LIGHT)
    return kept[0].axes, (trainer - rollout).abs(), rollout.exp(), rows.position, report


def test_the_share_beyond(drawn):
    (axis, *_), distance, _, _, report = drawn
    share, bound = axis.lines
    assert list(bound.get_xdata()) == [report.bound] * 2
    for x, y in list(zip(share.get_xdata(), share.get_ydata(), strict=True))[::50]:
        assert y == pytest.approx(float((distance >= x).double().mean()), abs=1e-6)


@pytest.mark.parametrize(("panel", "width"), [(1, 0.5), (2, math.log10(2))])
def test_quantiles_lie_in_the_middle_of_their_bins(drawn, panel: int, width: float):
    axes, distance, probability, position, _ = drawn
    along = probability.clamp_min(1e-6) if panel == 1 else position.double() + 1
    lines = axes[panel].lines
    assert [line.get_label() for line in lines] == [name for name, _ in figure.LINES.values()]
    for q, line in zip(figure.LINES, lines, strict=True):
        assert len(line.get_xdata()) >= 2
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True):
            low, high = (10 ** (math.log10(x) + side * width / 2) for side in (-1, 1))
            inside = distance[(along >= low * (1 - 1e-9)) & (along < high * (1 - 1e-9))]
            assert len(inside) >= figure.ENOUGH
            assert y == pytest.approx(float(torch.quantile(inside, q)), rel=1e-6)
