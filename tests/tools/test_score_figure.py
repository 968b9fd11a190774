"""The figure of a mismatch: what its lines are, where they lie, and what they are called."""

from __future__ import annotations

import math

import pytest
import torch

import logitless as ll
from logitless.objectives import mismatch

figure = pytest.importorskip("logitless.tools.score.figure", exc_type=ImportError)
style = pytest.importorskip("logitless.tools.style", exc_type=ImportError)
to_hex = pytest.importorskip("matplotlib.colors").to_hex


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """The three panels of 4,000 tokens."""
    kept = []
    monkeypatch.setattr(figure, "save", lambda made, path, style: kept.append(made))
    rows = ll.Rows.packed([torch.arange(401)] * 10, [400] * 10)
    rollout = -torch.rand(4000, dtype=torch.float64) * 5
    trainer = rollout + 0.01 * torch.randn(4000, dtype=torch.float64)
    report = mismatch(trainer, rollout, rows, bound=0.02)
    figure.draw_mismatch(trainer, rollout, rows.position, report, tmp_path / "a.png", style.DARK)
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


def test_the_panels_are_dressed(drawn):
    """A title each, on the style's background, and numbers at powers of ten."""
    titles = ["share of tokens beyond", "|log ratio| by probability", "|log ratio| by place"]
    assert [axis.get_title(loc="left") for axis in drawn[0]] == titles
    for axis in drawn[0]:
        assert to_hex(axis.get_facecolor()) == style.DARK.background
        for ticks in (axis.get_xticks(), axis.get_yticks()):
            tens = [math.log10(tick) for tick in ticks]
            assert len(tens) >= 2
            assert tens == pytest.approx([round(ten) for ten in tens])


def test_the_bound_and_its_share(drawn):
    """Beside the line, 5 points from it, and not across it."""
    (axis, *_), *_, report = drawn
    (text,) = axis.texts
    assert text.get_text() == f"beyond 0.02\n{100 * report.beyond:.2g}%"
    axis.figure.canvas.draw()
    line, _ = axis.transData.transform((report.bound, 1.0))
    assert line - text.get_window_extent().x1 == pytest.approx(5 * axis.figure.dpi / 72, abs=0.1)


def test_names_of_lines_that_meet():
    """One below the other, 8 % of the height apart, beginning at the end of the highest line."""
    made, axis = figure.plt.subplots()
    for end, name in ((5.0, "low"), (10.0, "a"), (10.0, "b"), (9.9, "c")):
        axis.plot([0, 1], [0, end], label=name)
    axis.set_ylim(0, 10)
    style.name_lines(axis, style.LIGHT)
    found = {text.get_text(): text.get_position()[1] for text in axis.texts}
    figure.plt.close(made)
    assert found == pytest.approx({"a": 1.0, "b": 0.92, "c": 0.84, "low": 0.5})


def test_a_figure_is_closed_when_it_is_written(tmp_path):
    before = figure.plt.get_fignums()
    made, _ = figure.plt.subplots()
    style.save(made, tmp_path / "a.png", style.DARK)
    assert (tmp_path / "a.png").stat().st_size > 0
    assert figure.plt.get_fignums() == before
