"""Figures of records from hidden states: bars of a case, and curves of growth."""

from dataclasses import asdict, replace

import matplotlib.pyplot as plt
import pytest

from logitless import LogitlessError
from logitless.bench.cases import CASES
from logitless.bench.records import Record
from logitless.plots import LIGHT, draw_case, draw_growth, draw_records


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
        total_ms=case.tokens * case.vocab * case.hidden / 1e11,
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
    monkeypatch.setattr("logitless.plots._save", lambda figure, path, style: figures.append(figure))
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
    assert any("floor 4.00 ms" in text for text in texts)
    assert "16384 x 151936 from 4096" in drawn[0].get_suptitle()
