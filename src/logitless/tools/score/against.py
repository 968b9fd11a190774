"""Results of a run against the log-probs that the rollout engine reported: ``logitless score --against FIELD``.

The field is one of the input's: a list of numbers for each record, one per token of the response. Written next to the
output: ``OUT.mismatch.json``, and a figure in two styles where matplotlib is installed.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logitless.errors import LogitlessError
from logitless.errors.arguments import LARGEST
from logitless.objectives import Mismatch, mismatch
from logitless.rows import Rows
from logitless.tools.score.files import read_fields
from logitless.tools.score.journal import named_file


@dataclass(frozen=True, eq=False)
class Compared:
    """The report, the ``[R]`` numbers that it is of, and the files that were written."""

    report: Mismatch
    logprob: Tensor
    rollout_logprob: Tensor
    position: Tensor
    files: tuple[Path, ...] = ()

    @property
    def drawable(self) -> bool:
        """Whether a token has a distance that a figure can show."""
        return bool((self.logprob - self.rollout_logprob).isfinite().any())


def compare(data: Path, out: Path, field: str) -> Compared:
    """Results in ``out`` against a field of the input; reads both files through."""
    tokens, trainer, rollout = [], [], []
    results = {result["index"]: result for result in _results(out)}
    # A rejected record has no result to compare, and need not be readable.
    for index, place, own in read_fields(data, (field,), results):
        result = results[index]
        given = _numbers(place, field, own[field])
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


def _results(out: Path) -> Iterator[dict[str, Any]]:
    """Results in a file, each with a number, token ids and as many log-probs."""
    for _, place, result in read_fields(out, ("index", "tokens", "logprob")):
        ids, logprob = result["tokens"], _numbers(place, "logprob", result["logprob"])
        known = isinstance(ids, list) and all(type(x) is int and 0 <= x <= LARGEST for x in ids)
        if type(result["index"]) is not int or not known or len(ids) != len(logprob):
            raise LogitlessError(
                f"score: {place} is no result: wanted an 'index', 'tokens' and as many 'logprob' but got "
                f"{str(result)[:60]}. Was the file changed after it was written?"
            )
        yield {**result, "logprob": logprob}


def _numbers(place: str, field: str, given: Any) -> list[float]:
    """Log-probs of a field as float64, which holds some integers of JSON not at all."""
    if not isinstance(given, list) or not all(type(x) in (int, float) for x in given):
        raise LogitlessError(f"score: {place}: {field!r} must be a list of log-probs but is {str(given)[:60]}.")
    try:
        return [float(x) for x in given]
    except OverflowError:
        raise LogitlessError(
            f"score: {place}: {field!r} must be a list of log-probs but has an integer that is larger than any float."
        ) from None


def write(compared: Compared, out: Path) -> Compared:
    """The report as JSON, and its figure, next to the output."""
    sheet = out.with_name(f"{out.name}.mismatch.json")
    with named_file(sheet):
        sheet.write_text(json.dumps(_plain(compared.report.as_dict()), indent=1, allow_nan=False) + "\n")
        return replace(compared, files=(sheet, *_figures(compared, out)))


def report_text(summary: Any, compared: Compared | None, as_json: bool) -> str:
    """The last text that the command prints."""
    if as_json:
        more = {} if compared is None else {"mismatch": _plain(compared.report.as_dict())}
        return json.dumps(vars(summary) | more, allow_nan=False)
    before = summary.records - summary.scored_records - summary.rejected
    there = f" ({before} were there)" if before else ""
    speed = summary.scored_tokens / (summary.seconds or 1e-9)
    lines = [f"{summary.out}: {summary.records - summary.rejected} records{there}"]
    if summary.rejected:
        lines.append(f"{summary.rejects}: {summary.rejected} records that were rejected, and why")
    if summary.scored_records:
        lines.append(f"{summary.scored_tokens} response tokens in {summary.seconds:.1f} s, {speed:.0f} tokens/s")
    if compared is not None:
        lines += ["", str(compared.report), *(str(path) for path in compared.files)]
        if not compared.drawable:
            lines.append("no figure: no token has two finite log-probs.")
        elif len(compared.files) == 1:
            lines.append("no figure: it needs matplotlib. Install it with pip install matplotlib.")
    return "\n".join(lines)


def _plain(x: Any) -> Any:
    """``x`` with None for numbers that JSON does not have: NaN and the infinite ones."""
    if isinstance(x, dict):
        return {key: _plain(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def _figures(compared: Compared, out: Path) -> Iterator[Path]:
    if importlib.util.find_spec("matplotlib") is None or not compared.drawable:
        return
    from logitless.tools.score.figure import draw_mismatch
    from logitless.tools.style import DARK, LIGHT

    for style in (LIGHT, DARK):
        path = out.with_name(f"{out.name}.mismatch-{style.name}.png")
        draw_mismatch(compared.logprob, compared.rollout_logprob, compared.position, compared.report, path, style)
        yield path
