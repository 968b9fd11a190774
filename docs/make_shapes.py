"""``docs/shapes.md``: calls at the shapes of real models, as a table and a figure, from their record.

    python docs/make_shapes.py

Held by a test. The record is that of ``benchmarks/shapes.py``; the newest line of each model counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from logitless.tools.style import DARK, LIGHT, WIDTH_INCHES, Style, dress, save

ROOT = Path(__file__).parent.parent
PAGE, RECORDS = ROOT / "docs" / "shapes.md", ROOT / "benchmarks" / "results" / "shapes.jsonl"
FIGURES, NAME = ROOT / "docs" / "figures", "shapes"
BEGIN, END = "<!-- table: python docs/make_shapes.py -->\n", "<!-- end of table -->\n"
CALLS = ("forward", "forward and backward", "frozen", "loss", "loss, 2.5 GiB")
DRAWN = ("forward and backward", "loss")


def read() -> list[dict[str, Any]]:
    """The newest line of each model."""
    lines = [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()]
    return list({line["model"]: line for line in lines}.values())


def table(lines: list[dict[str, Any]]) -> str:
    out = [f"| | D | V | T | {' | '.join(CALLS)} | commit |", f"|---|{'---:|' * (3 + len(CALLS))}---|"]
    for line in lines:
        cells = [f"{line['calls'][name]['of_products']:.2f}" for name in CALLS]
        sizes = [str(line[name]) for name in ("hidden", "vocab", "tokens")]
        out.append(f"| {' | '.join([line['model'], *sizes, *cells, '`' + line['commit'][:7] + '`'])} |")
    return "\n".join(out) + "\n"


def made() -> str:
    """The page with its table made anew."""
    lines = read()
    where = f"{lines[0]['device']}, torch {lines[0]['torch']}, bfloat16, in multiples of the bare products:\n\n"
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + where + table(lines) + END + rest.split(END)[1]


def draw(path: Path, style: Style) -> None:
    """One group of bars for each model: times in multiples of the bare products."""
    lines = read()
    figure, axis = plt.subplots(figsize=(WIDTH_INCHES, 0.42 * len(lines) + 1.0), layout="constrained")
    dress(axis, style, "Time in multiples of the bare matrix products")
    for place, (name, colour) in enumerate(zip(DRAWN, (style.others, style.ours), strict=True)):
        values = [line["calls"][name]["of_products"] for line in lines]
        at = [row + (place - 0.5) * 0.4 for row in range(len(lines))]
        axis.barh(at, values, height=0.37, color=colour)
        for y, value in zip(at, values, strict=True):
            # The first model's bars carry the names of the calls.
            text = f"{value:.2f}" + (f"   {name}, {(4, 3)[place]} products" if y == at[0] else "")
            look = {"color": style.ours, "fontweight": "bold"} if place else {"color": style.quiet}
            axis.text(value + 0.015, y, text, va="center", fontsize=9, **look)
    axis.axvline(1.0, color=style.mark, linewidth=1.2, linestyle=(0, (4, 2)))
    axis.set_yticks(range(len(lines)), [f"{x['model']}\n{x['hidden']:,} x {x['vocab']:,}" for x in lines])
    axis.set(xticks=[], xlim=(0, 1.32 * max(x["calls"][name]["of_products"] for x in lines for name in DRAWN)))
    axis.tick_params(labelsize=8, colors=style.text)
    axis.grid(visible=False)
    axis.invert_yaxis()
    save(figure, path, style)


def main() -> None:
    for style in (LIGHT, DARK):
        draw(FIGURES / f"{NAME}-{style.name}.png", style)
    PAGE.write_text(made(), encoding="utf-8")


if __name__ == "__main__":
    main()
