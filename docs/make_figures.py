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
HUGE, LOSS, OVER = "huge-fp32-grad", "linear-reference-loss", "logitless-overwrite"
LINEAR, NARROW = "linear-reference-grad", "linear-d2048-grad"
# In the figure over the response fraction, besides ours: those who compute all that the case asks for.
PEERS = ("torch", "torch.compile", "trl-kernel", "verl-kernel", "liger-chunked")
# From hidden states, by their names in a sentence.
HEADS = {"trl-head": "TRL's head", "liger-sm90": "Liger's Hopper kernel", "torch.compile": "`torch.compile`"}

# Provider and its name in the table, slowest first.
LINES = {
    "torch": "plain torch",
    "torch.compile": "`torch.compile`",
    "liger": "Liger (log-prob only)",
    "trl-kernel": "TRL's kernel",
    "logitless": "**logitless**",
    "logitless-overwrite": "**logitless, overwriting**",
}
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
    README.write_text(make_whole_step.with_readme(text, steps), encoding="utf-8")
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
        f"T = {case['tokens']}, V = {case['vocab']}, log-prob and entropy both differentiated. {where['device']}, "
        f"torch {where['versions']['torch']}, Triton {where['versions']['triton']}, commit `{where['commit']}`.",
        "",
        "| | fp32 forward | + backward | x floor | peak | bf16 forward | + backward | x floor | peak |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for provider, name in LINES.items():
        lines.append(f"| {name} | {_cells(fp32[provider])} | {_cells(bf16[provider])} |")
    return "\n".join(lines) + "\n\n" + notes(records)


def notes(records: Sequence[Record]) -> str:
    """What is not in the table, and what its columns mean, with numbers from the same records."""
    found = {(r.case["name"], r.provider): r for r in newest(records)}
    ours, theirs = (
        {name: found[name, provider] for name in (FP32, BF16, f"{FP32}-peaked")}
        for provider in ("logitless", "trl-kernel")
    )
    behind = [
        _behind(theirs[FP32].forward_ms, ours[FP32].forward_ms),
        *(_behind(theirs[name].total_ms, ours[name].total_ms) for name in (FP32, BF16)),
    ]
    errors = [x[f"{FP32}-peaked"].errors["entropy"] for x in (theirs, ours)]
    huge = {provider: found[HUGE, provider] for provider in ("torch", "torch.compile", "trl-kernel", "liger", OVER)}
    assert {huge[name].status for name in ("torch", "torch.compile")} == {"out of memory"}
    more = {_gigabytes(huge[name].peak_bytes) for name in ("trl-kernel", "liger")}
    assert more == {_gigabytes(huge[OVER].logits_bytes)}
    providers = ("torch", "torch.compile", "verl-kernel", "logitless-loss", "logitless")
    loss = {name: found[LOSS, name] for name in providers}
    costs = {name: _cost(r) for name, r in loss.items()}
    own, heads = found[NARROW, "logitless"], {text: found[NARROW, name] for name, text in HEADS.items()}
    assert len({r.environment["commit"] for r in (own, *heads.values())}) == 1
    case, of_loss = huge[OVER].case, loss["logitless-loss"]
    lines = [
        "The floor is one read of the logits in forward, one read and one write in backward, at the bandwidth of a "
        "plain copy in the same run. Peak is beyond the logits, gradient included; there is no memory budget. Not in "
        "the table:",
        "",
        f"* TRL's kernel is {behind[0]} behind in float32 forward, {behind[1]} with backward, {behind[2]} in bfloat16. "
        f"On peaked logits its entropy is {errors[0]:.0e} off, ours {errors[1]:.0e}.",
        f"* {_gigabytes(huge[OVER].logits_bytes)} of float32 logits (T = {case['tokens']:,}, V = {case['vocab']:,}) "
        f"take {huge[OVER].total_ms:.1f} ms forward and backward with {format_bytes(huge[OVER].peak_bytes or 0)} "
        f"beyond the logits. Plain torch and `torch.compile` run out of memory there; the kernels of TRL and Liger "
        f"need another {more.pop()}.",
        f"* From bfloat16 hidden states of size {of_loss.case['hidden']}, PPO's loss with entropy and its gradients: "
        f"plain torch {costs['torch']}, `torch.compile` {costs['torch.compile']} (logits in bfloat16), verl's kernel "
        f'{costs["verl-kernel"]}; `policy_loss` of `Logits` under `memory="{of_loss.case["memory"]}"` '
        f"{costs['logitless-loss']}, `logprobs` and the objective under 256 MiB {costs['logitless']}. The floor "
        f"of three products is {of_loss.floor_ms:.0f} ms.",
        f"* `logprobs` of `Logits` of size {own.case['hidden']} with an entropy gradient: {_cost(own)}; "
        + ", ".join(f"{text} {_cost(r)}" for text, r in heads.items())
        + ".",
    ]
    return "\n".join(textwrap.fill(line, 142, subsequent_indent="  " * line.startswith("*")) for line in lines) + "\n\n"


def _cost(record: Record) -> str:
    return f"{record.total_ms:.0f} ms and {format_bytes(record.peak_bytes or 0)}"


def _behind(theirs: float | None, ours: float | None) -> str:
    assert theirs is not None
    assert ours is not None
    return f"{100 * (theirs / ours - 1):.0f} %"


def _gigabytes(size: int | None) -> str:
    assert size is not None
    return f"{size / 1e9:.0f} GB"


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
