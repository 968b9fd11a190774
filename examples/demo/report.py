"""The text that the demo prints: the runs, memory over response fractions, the verdict."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.panel import Panel

from examples.demo.run import Demo, verdict
from logitless.spec import format_bytes
from logitless.tools.outputs import text_table


def show_demo(demo: Demo, figure: Path, console: Console) -> None:
    """Print the outcome: tables within 80 columns, sentences as wide as the terminal or, piped, in one line."""
    setting, measured = demo.setting, demo.by_fraction
    lines = (
        f"\nGRPO, {setting.steps} steps of {setting.samples} samples: repeat {setting.length} digits.",
        f"Two-layer Qwen3 from scratch, vocabulary {setting.vocab}, seed {setting.seed}. Reward by step:\n",
    )
    console.print("\n".join(lines), highlight=False)
    console.print(_runs(demo), highlight=False)
    if demo.busy:
        console.print(
            f"\nThis machine was busy: a run waited {demo.waited:.0%} of its time for the processor. Compare the "
            f"seconds of processor time, not the others; rewards and memory depend on neither.",
            highlight=False,
            style="yellow",
        )
    console.print(
        f"\nPeak of a loss step of {measured.tokens} tokens, vocabulary {measured.vocab}, in MiB:\n", highlight=False
    )
    console.print(_peaks(demo), highlight=False)
    console.print()
    # A frame has lines of its own, which a pipe should not get in the middle of a sentence.
    text = verdict(demo)
    framed = Panel(text, border_style="green" if demo.ok else "red") if console.is_terminal else text
    console.print(framed, highlight=False)
    console.print(f"Figure saved to {figure}", highlight=False)


def _runs(demo: Demo) -> str:
    steps = demo.setting.steps
    marks = sorted({1, *(round(steps * part / 4) for part in range(1, 5))} - {0})
    rows = []
    peaks = format_bytes(demo.plain_peak), format_bytes(demo.our_peak), ""
    for run, peak in zip((demo.plain, demo.ours, demo.control), peaks, strict=True):
        rewards = [f"{run.rewards[step - 1]:.3f}" for step in marks]
        rows.append((run.name, *rewards, f"{run.seconds:.0f} s", f"{run.processor_seconds:.0f} s", peak))
    return text_table(("", *map(str, marks), "time", "processor", "loss step"), rows)


def _peaks(demo: Demo) -> str:
    columns = ("response rows", *(f"{fraction:.0%}" for fraction in demo.by_fraction.fractions))
    # The unit is in the title: with it in every cell the table is wider than a terminal.
    rows = [(name, *(f"{peak / 2**20:.1f}" for peak in peaks)) for name, peaks in demo.by_fraction.peaks.items()]
    return text_table(columns, rows)
