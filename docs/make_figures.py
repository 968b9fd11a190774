"""All of ``docs/figures``, the README's table and ``docs/benchmarks.md`` anew: ``python docs/make_figures.py``.

Layouts come from ``Rows`` (``layout_figures.py``), bars, curves and tables from the benchmark records; nothing is done
by hand.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import make_benchmarks
import make_demo
import make_hosts
import make_scale
import make_whole_step
from layout_figures import figures

from benchmarks.bench.records import Record, format_bytes, newest, read_records
from benchmarks.plots import DARK, LIGHT, Style, draw_case, draw_growth, draw_records, draw_response

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
FIGURES = ROOT / "docs" / "figures"
RECORDS = ROOT / "benchmarks" / "results" / "h200.jsonl"
FP32, BF16 = "reference-fp32-grad", "reference-bf16-grad"
LINEAR = "linear-reference-grad"
# In the figure over the response fraction, besides ours: those who compute all that the case asks for.
PEERS = ("torch", "torch.compile", "trl-kernel", "verl-kernel", "liger-chunked")

# Provider and its name in the table, slowest first.
LINES = {
    "torch": "plain torch",
    "torch.compile": "`torch.compile`",
    "liger": "Liger (log-prob only)",
    "trl-kernel": "TRL's kernel",
    "logitless": "**logitless**",
    "logitless-overwrite": "**logitless, overwriting**",
}
LEGEND = (
    "*x floor* compares forward and backward with the least time that the card allows: two reads and one write of the "
    "logits, at the speed of a plain copy in the same run. *peak* is the memory beyond the logits, gradient included."
)
START, END = "<!-- table: python docs/make_figures.py -->\n", "<!-- end of table -->"


def main() -> None:
    """All figures, the table and the page, over those that are there."""
    for name, text in figures().items():
        (FIGURES / name).write_text(text, encoding="utf-8")
    records, steps = read_records(RECORDS), make_whole_step.read()
    for style in (LIGHT, DARK):
        draw_case(_of(records, FP32), FIGURES / f"h200-reference-{style.name}.png", style)
        draw_case(_of(records, LINEAR), FIGURES / f"h200-linear-{style.name}.png", style)
        draw_growth(records, FIGURES / f"h200-growth-{style.name}.png", style)
        response_figure(records, FIGURES / f"h200-response-{style.name}.png", style)
        if make_demo.RECORD.exists():
            make_demo.draw(make_demo.read(), FIGURES / f"{make_demo.NAME}-{style.name}.png", style)
        make_hosts.draw(make_hosts.measured(), FIGURES / f"{make_hosts.NAME}-{style.name}.png", style)
        if steps:
            make_whole_step.draw(steps, FIGURES / f"{make_whole_step.NAME}-{style.name}.png", style)
    make_scale.main()
    draw_records(_of(records, FP32) + _of(records, BF16), FIGURES, "h200")
    text = with_table(README.read_text(encoding="utf-8"), table(records))
    README.write_text(make_whole_step.with_readme(text, steps, records), encoding="utf-8")
    make_benchmarks.PAGE.write_text(
        make_benchmarks.page(records, steps, make_benchmarks.read_trained()), encoding="utf-8"
    )


def response_figure(records: Sequence[Record], path: Path, style: Style) -> None:
    """Peak memory when all, a quarter and 3 % of the tokens are response, from logits and from hidden states."""
    groups = []
    for name in (FP32, LINEAR):
        found = [r for part in ("", "-25pct", "-3pct") for r in _of(records, name + part)]
        groups.append([r for r in found if r.provider in PEERS or r.provider.startswith("logitless")])
    case = groups[1][0].case
    sizes = f"T = {case['tokens']}, V = {case['vocab']}"
    titles = ("From logits, float32", f"From hidden states, bfloat16, D = {case['hidden']}")
    draw_response(groups, titles, f"{sizes}, forward + backward with an entropy gradient", path, style)


def table(records: Sequence[Record]) -> str:
    """The reference case in both dtypes, from the newest records, as Markdown."""
    fp32, bf16 = ({r.provider: r for r in newest(_of(records, name))} for name in (FP32, BF16))
    case, where = fp32["torch"].case, fp32["torch"].environment
    lines = [
        f"Log-prob and entropy of logits that exist, both differentiated: {case['tokens']:,} tokens, vocabulary "
        f"{case['vocab']:,}. {where['device']}, torch {where['versions']['torch']}, commit `{where['commit']}`.",
        "",
        "| | fp32 forward | + backward | x floor | peak | bf16 forward | + backward | x floor | peak |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for provider, name in LINES.items():
        lines.append(f"| {name} | {_cells(fp32[provider])} | {_cells(bf16[provider])} |")
    return "\n".join(lines) + f"\n\n{textwrap.fill(LEGEND, 142)}\n\n"


def with_table(text: str, new: str) -> str:
    """The README with the table between its marks replaced."""
    before, rest = text.split(START)
    return before + START + new + END + rest.split(END)[1]


def _cells(record: Record) -> str:
    assert record.forward_ms is not None
    assert record.total_ms is not None
    assert record.peak_bytes is not None
    times = (f"{record.forward_ms:.2f} ms", f"{record.total_ms:.2f} ms", f"{record.total_ms / record.floor_ms:.2f}")
    return " | ".join([*times, format_bytes(record.peak_bytes)])


def _of(records: Sequence[Record], case: str) -> list[Record]:
    return [r for r in records if r.case["name"] == case]


if __name__ == "__main__":
    main()
