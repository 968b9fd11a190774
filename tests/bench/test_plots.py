"""Figures of records from hidden states: bars of a case, and curves of growth."""

from dataclasses import asdict, replace

import matplotlib.pyplot as plt
import pytest

from benchmarks.bench.cases import CASES
from benchmarks.bench.records import Record
from benchmarks.bench.sweep import Grid
from benchmarks.plots import LIGHT, draw_case, draw_growth, draw_records, draw_response, draw_sweep
from logitless import LogitlessError


def record(case, provider="logitless", **fields):
    made = Record(
        case=asdict(case),
        provider=provider,
        computes="grad",
        status="ok",
        detail="",
        rows=case.tokens,
        logits_bytes=case.logits_bytes,
        forward_floor_ms=1.0,
        floor_ms=4.0,
        bandwidth=4e12,
        environment={"device": "x", "commit": "abc", "dirty": False},
        peak_bytes=case.logits_bytes // 10,
        forward_ms=2.0,
        total_ms=case.tokens * case.vocab * (case.hidden or 1) / 1e11,
        gemm_ms=[1.0, 2.0, 3.0, 4.0],
    )
    return replace(made, **fields)


def growth():
    lost = {"status": "out of memory", "total_ms": None, "peak_bytes": None}
    cases = [case for name, case in CASES.items() if name.startswith("linear-growth-")]
    plain = [record(case, "torch", **(lost if case.tokens > 30000 else {})) for case in cases]
    return [*(record(case) for case in cases), *plain]


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, open."""
    figures = []
    for module in ("bars", "curves", "sweeps"):
        monkeypatch.setattr(f"benchmarks.plots.{module}.save", lambda figure, path, style: figures.append(figure))
    yield figures
    plt.close("all")


def test_growth_has_one_curve_per_provider_and_size(drawn):
    draw_growth(growth(), "x.png", LIGHT)
    axes = drawn[0].axes
    counts = {"logitless": (6, 4, 4), "torch": (4, 4, 4), "floor": (6, 4, 4)}
    for column, axis in enumerate(axes[:3]):
        assert {line.get_label(): len(line.get_xdata()) for line in axis.lines} == {
            name: count[column] for name, count in counts.items()
        }
    assert axes[1].lines[0].get_xdata().tolist() == [32768, 65536, 131072, 262144]
    assert [len(axis.lines) for axis in axes[3:]] == [2, 2, 2]


def test_growth_marks_where_memory_ran_out(drawn):
    draw_growth(growth(), "x.png", LIGHT)
    crosses = [[mark.get_offsets()[:, 0].tolist() for mark in axis.collections] for axis in drawn[0].axes]
    assert crosses == [[], [], [], [[32768.0, 65536.0]], [], []]


def test_growth_needs_its_base(drawn):
    with pytest.raises(LogitlessError, match="growth is drawn around linear-growth-base"):
        draw_growth([r for r in growth() if r.case["name"] != "linear-growth-base"], "x.png", LIGHT)


def test_bars_and_curves_are_drawn_apart(tmp_path):
    records = [record(CASES["linear-reference-grad"]), *growth()]
    names = sorted(path.name for path in draw_records(records, tmp_path, "h200"))
    assert names == sorted(f"h200-{w}-{s}.png" for w in ("growth", "memory", "time") for s in ("light", "dark"))
    assert [path.name for path in draw_records(growth(), tmp_path, "g")] == ["g-growth-light.png", "g-growth-dark.png"]


def test_a_case_from_hidden_states_is_drawn_as_bars(drawn):
    case = CASES["linear-reference-grad"]
    draw_case([record(case), record(case, "liger-flce", computes="mean")], "x.png", LIGHT)
    texts = [text.get_text() for axis in drawn[0].axes for text in axis.texts]
    assert any("(mean loss only)" in text for text in texts)
    assert any("floor 4.00 ms (4 products)" in text for text in texts)
    assert "16,384 x 151,936 from 4,096" in drawn[0].get_suptitle()


def test_memory_over_the_response_fraction_has_a_panel_per_kind_and_names_every_line(drawn):
    shares = ("", "-25pct", "-3pct")
    groups = [
        [record(CASES[name + share], who) for share in shares for who in ("torch", "logitless")]
        for name in ("reference-fp32-grad", "linear-reference-grad")
    ]
    groups[1][0] = replace(groups[1][0], status="absent", peak_bytes=None)
    groups[0].append(record(CASES["reference-fp32-grad"], "measured once"))
    draw_response(groups, ("a", "b"), "what", "x.png", LIGHT)
    left, right = drawn[0].axes
    assert [line.get_label() for line in left.lines] == ["torch", "logitless"]
    assert all(line.get_xdata().tolist() == [0.03, 0.25, 1.0] for line in left.lines)
    assert {line.get_label(): len(line.get_xdata()) for line in right.lines} == {"torch": 2, "logitless": 3}
    assert sorted(text.get_text() for text in left.texts) == ["logitless", "torch"]
    heights = sorted(text.get_position()[1] for text in left.texts)
    assert heights[1] - heights[0] >= 0.08 - 1e-9
    assert drawn[0].get_suptitle().startswith("what")
    assert drawn[0].get_supxlabel() == "x, commit abc"


def swept(**lists):
    grid = Grid(**{"tokens": [64], "vocab": [1000], "response": [1.0]} | lists)
    return [record(case, who) for case in grid.cases("cpu") for who in ("torch", "logitless")]


def test_a_sweep_runs_along_the_size_with_the_most_values(drawn, tmp_path):
    paths = draw_sweep(swept(tokens=[64, 128, 256], entropy=["value", "grad"]), tmp_path, "s")
    assert [path.name for path in paths] == ["s-light.png", "s-dark.png"]
    axes = drawn[0].axes
    assert [axis.get_title(loc="left") for axis in axes[:2]] == ["entropy value", "entropy grad"]
    assert axes[0].lines[0].get_xdata().tolist() == [64, 128, 256]
    assert axes[0].lines[0].get_ydata().tolist() == [n * 1000 * 4 // 10 for n in (64, 128, 256)]
    assert [len(axis.lines) for axis in axes] == [2, 2, 3, 3]
    assert drawn[0].get_suptitle().startswith("V=1000 float32, forward + backward, response 100%")


def test_a_sweep_over_memory_is_drawn_in_mebibytes_and_hides_panels_it_does_not_need(drawn, tmp_path):
    many = swept(
        hidden=[8], memory=["1MiB", "2MiB", "4MiB", "1GiB"], entropy=[None, "value", "grad"], response=[1.0, 0.5]
    )
    draw_sweep(many, tmp_path, "s")
    assert drawn[0].axes[0].lines[0].get_xdata().tolist() == [1, 2, 4, 1024]
    assert sum(axis.get_visible() for axis in drawn[0].axes) == 12
    plt.close("all")
    draw_sweep(swept(hidden=[8, 16, 32], tokens=[8, 16], entropy=["value", "grad"]), tmp_path, "s")
    shown = [axis.get_visible() for axis in drawn[-1].axes]
    assert shown == [True] * 6 + [True, False, False] * 2


def test_a_sweep_of_one_size_becomes_bars_and_one_without_times_is_refused(tmp_path):
    assert len(draw_sweep(swept(), tmp_path, "s")) == 4
    lost = [replace(r, total_ms=None, status="out of memory") for r in swept(tokens=[8, 16])]
    with pytest.raises(LogitlessError, match="no point of the sweep has a time"):
        draw_sweep(lost, tmp_path, "s")
