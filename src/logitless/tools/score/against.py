"""Results of a run against the log-probs that the rollout engine reported: ``logitless score --against FIELD``.

The field is one of the input's: a list of numbers for each record, one per token of the response. Written next to the
output: ``OUT.mismatch.json``, and a figure in two styles where matplotlib is installed.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logitless.errors import LogitlessError
from logitless.objectives import Mismatch, mismatch
from logitless.rows import Rows
from logitless.tools.score.files import read_fields


@dataclass(frozen=True, eq=False)
class Compared:
    """The report, the ``[R]`` numbers that it is of, and the files that were written."""

    report: Mismatch
    logprob: Tensor
    rollout_logprob: Tensor
    position: Tensor
    files: tuple[Path, ...] = ()


def compare(data: Path, out: Path, field: str) -> Compared:
    """Results in ``out`` against a field of the input; reads both files through."""
    tokens, trainer, rollout = [], [], []
    results = {result["index"]: result for _, result in read_fields(out, ("index", "tokens", "logprob"))}
    for index, (place, own) in enumerate(read_fields(data, (field,))):
        if (result := results.get(index)) is None:
            # A rejected record has no result to compare.
            continue
        given = own[field]
        if not isinstance(given, list) or not all(type(x) in (int, float) for x in given):
            raise LogitlessError(f"score: {place}: {field!r} must be a list of log-probs but is {str(given)[:60]}.")
        if len(given) != len(result["tokens"]):
            raise LogitlessError(
                f"score: {place}: {field!r} has {len(given)} log-probs but the response has {len(result['tokens'])} "
                f"tokens."
            )
        tokens.append(result["tokens"])
        trainer += result["logprob"]
        rollout += given
    # One token stands before each response, and predicts its first.
    rows = Rows.packed([[0, *ids] for ids in tokens], [len(ids) for ids in tokens])
    own, engine = torch.tensor(trainer, dtype=torch.float64), torch.tensor(rollout, dtype=torch.float64)
    return Compared(mismatch(own, engine, rows), own, engine, rows.position)


def write(compared: Compared, out: Path) -> Compared:
    """The report as JSON, and its figure, next to the output."""
    sheet = out.with_name(f"{out.name}.mismatch.json")
    sheet.write_text(json.dumps(compared.report.as_dict(), indent=1) + "\n")
    return replace(compared, files=(sheet, *_figures(compared, out)))


def report_text(summary: Any, compared: Compared | None, as_json: bool) -> str:
    """The last text that the command prints."""
    if as_json:
        more = {} if compared is None else {"mismatch": compared.report.as_dict()}
        return json.dumps(vars(summary) | more)
    before = summary.records - summary.scored_records - summary.rejected
    there = f" ({before} were there)" if before else ""
    speed = summary.scored_tokens / max(1e-9, summary.seconds)
    lines = [f"{summary.out}: {summary.records - summary.rejected} records{there}"]
    if summary.rejected:
        lines.append(f"{summary.rejects}: {summary.rejected} records that were rejected, and why")
    if summary.scored_records:
        lines.append(f"{summary.scored_tokens} response tokens in {summary.seconds:.1f} s, {speed:.0f} tokens/s")
    if compared is not None:
        lines += ["", str(compared.report), *(str(path) for path in compared.files)]
        if len(compared.files) == 1:
            lines.append("no figure: it needs matplotlib. Install it with pip install matplotlib.")
    return "\n".join(lines)


def _figures(compared: Compared, out: Path) -> Iterator[Path]:
    if importlib.util.find_spec("matplotlib") is None or not len(compared.logprob):
        return
    from logitless.tools.score.figure import draw_mismatch
    from logitless.tools.style import DARK, LIGHT

    for style in (LIGHT, DARK):
        path = out.with_name(f"{out.name}.mismatch-{style.name}.png")
        draw_mismatch(compared.logprob, compared.rollout_logprob, compared.position, compared.report, path, style)
        yield path
