"""What the README and ``docs/benchmarks.md`` say of whole steps, made from records that are made up here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import make_whole_step as page  # noqa: E402
from make_figures import DARK, LIGHT, RECORDS  # noqa: E402

from benchmarks.bench.records import read_records  # noqa: E402

WHERE = {"device": "a GPU", "commit": "abc1234", "versions": {"torch": "2.11.0", "python": "3.12", "trl": "1.16.0"}}
MEMORIES = (80 * 10**9, 141 * 10**9)
BASE = {"environment": WHERE, "shape": {"length": 2048, "prompt": 256}}


def step(model: str, contender: str, ms: float, **more) -> dict:
    apart = {"loss_difference": 1e-6, "grad_norm_difference": 2e-4}
    line = {"kind": "step", "model": model, "contender": contender, "tokens": 16384, "ms": ms, **apart, **more}
    return BASE | line | {"tokens_per_s": 16384e3 / ms, "loss_share": 0.25, "peak_bytes": 3 << 30}


def most(model: str, contender: str, memory: int, tokens: int, refused: int | None) -> dict:
    line = {"kind": "longest", "model": model, "contender": contender, "budget_bytes": memory, "tokens": tokens}
    return BASE | line | {"refused_tokens": refused, "peak_bytes": memory}


@pytest.fixture
def lines(tmp_path) -> list[dict]:
    """Two models; at the larger one, plain torch ran out of memory."""
    failed = {"kind": "step", "model": "4B", "contender": "plain torch", "status": "OutOfMemoryError"}
    nothing = {"kind": "longest", "model": "4B", "contender": "plain torch", "budget_bytes": MEMORIES[0]}
    trainer = {"kind": "trainer", "model": "0.6B", "contender": "TRL's trainer", "tokens": 16384, "ms": 250.0}
    written = [
        step("0.6B", "plain torch", 999.0),
        step("0.6B", "plain torch", 300.0),
        step("0.6B", "ours", 200.0),
        *(most("0.6B", "plain torch", memory, 20480, 22528) for memory in MEMORIES),
        *(most("0.6B", "ours", memory, 409600, None) for memory in MEMORIES),
        BASE | failed,
        step("4B", "ours", 1234.0),
        BASE | nothing | {"status": "no two sizes fit, or no time"},
        most("4B", "ours", MEMORIES[0], 65536, 69632),
        BASE | trainer | {"tokens_per_s": 65536.0, "peak_bytes": 1 << 30, "grad_norm_difference": 0.0},
    ]
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in written))
    return page.read(path)


def test_the_newest_record_counts(lines):
    assert [line["ms"] for line in lines if line["contender"] == "plain torch" and "ms" in line] == [300.0]


def test_the_readme_tells_of_the_largest_model_that_both_could_train(lines):
    text = page.with_readme(f"before\n{page.START}old\n{page.END}after\n", lines)
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    said = " ".join(text.split())
    assert "At 0.6B, 16,384 tokens take 200 ms instead of 300 ms" in said
    assert "a micro-batch of 409,600 tokens instead of 20,480 fits on 80 GB" in said


def test_it_says_where_trl_is_as_good(lines):
    """From records of the same sizes, and from those of exactness; nothing is said where one is missing."""
    exact = read_records(RECORDS)
    both = [*lines, step("0.6B", "TRL", 202.0), *(most("0.6B", "TRL", memory, 409600, None) for memory in MEMORIES)]
    assert page.beside_trl(lines, exact) == page.beside_trl(both, []) == ""
    text = page.readme(both, exact)
    assert "with ours is only 1.0 to 1.0 % faster" in " ".join(text.split())
    assert "[More on that](docs/adapters/trl.md)" in " ".join(text.split())
    assert "[More on that](adapters/trl.md)" in " ".join(" ".join(page.section(both, exact)).split())
    fewer = [*lines, step("0.6B", "TRL", 202.0), *(most("0.6B", "TRL", memory, 4096, None) for memory in MEMORIES)]
    with pytest.raises(AssertionError, match="no longer true"):
        page.beside_trl(fewer, exact)


def test_the_section_has_every_contender_or_why_not(lines):
    text = "\n".join(page.section(lines))
    assert "Sequences have\n2048 tokens, 256 of them prompt" in text
    assert "| 0.6B | plain torch | 300 | 54,613 | 25 % | 3.00 GiB | 1.0e-06, 2.0e-04 |" in text
    assert "|  | **logitless** | 200 | 81,920 | 25 % | 3.00 GiB | 1.0e-06, 2.0e-04 |" in text
    assert "| 4B | plain torch | OutOfMemoryError | | | | |" in text
    assert "| 0.6B | plain torch | 20,480 | 20,480 |" in text
    assert "|  | **logitless** | 409,600+ | 409,600+ |" in text
    assert "| 4B | plain torch | no two sizes fit, or no time | not tried |" in text
    assert "|  | **logitless** | 65,536 | not tried |" in text
    assert "| 0.6B | TRL's trainer | 250 | 65,536 | 1.00 GiB | 0.0e+00 |" in text


def test_without_records_there_is_no_section_and_no_figure(tmp_path):
    assert page.read(tmp_path / "none.jsonl") == []
    assert page.section([]) == []
    assert page.with_readme(f"{page.START}old\n{page.END}", []) == page.START + page.END


@pytest.mark.parametrize("style", [LIGHT, DARK], ids=lambda style: style.name)
def test_the_figure_has_a_bar_for_every_contender(lines, tmp_path, monkeypatch, style):
    drawn = []
    real = page.draw_bars
    monkeypatch.setattr(page, "draw_bars", lambda axis, bars, style: (drawn.append(bars), real(axis, bars, style)))
    page.draw(lines, tmp_path / "figure.png", style)
    assert (tmp_path / "figure.png").stat().st_size > 1000
    assert [[(bar.label, bar.text, bar.ours) for bar in bars] for bars in drawn] == [
        [("plain torch", "54,613", False), ("logitless", "81,920", True)],
        [("plain torch", "20,480", False), ("logitless", "409,600", True)],
        [("plain torch", "OutOfMemoryError", False), ("logitless", "13,277", True)],
        [("plain torch", "no two sizes fit, or no time", False), ("logitless", "65,536", True)],
    ]
