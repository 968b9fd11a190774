"""The figures of ``docs/layouts.md``, drawn from ``Rows``.

Every strip shows the local tokens of one rank (or one line of a padded batch), from the same call a user would make.
What a rank holds comes from the scheme's own generator; what is scored comes from the plan; `_check` compares the two,
so a figure that contradicts the library cannot be drawn. Plain SVG text, so that the same code gives the same bytes
whatever plotting library is installed. Colours follow the reader's light or dark setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from logitless import Contiguous, Rows, Zigzag
from logitless.rows.layouts import ragged_arange

# The batch of every figure: sample b is shorter than the 4 chunks a zigzag of two ranks cuts it into.
LENGTHS, RESPONSES = (8, 3, 6), (5, 2, 3)
MASKS = ((1, 1, 0, 0, 1), (1, 1), (0, 1, 1))
TOKENS = [[10 * (sample + 1) + t for t in range(n)] for sample, n in enumerate(LENGTHS)]

WIDTH, LEFT, TOP = 900, 128, 12
PITCH, CELL, CHIP = 33, 29, 17
STRONG, PALE = ("#2563eb", "#c2410c", "#047857"), ("#dbe7fe", "#fde3d3", "#cdf0e1")
DARK_STRONG, DARK_PALE = ("#6ea8ff", "#f59e5b", "#3ecf9a"), ("#1c3254", "#4a2a17", "#123c2e")


@dataclass(frozen=True)
class Cell:
    """One local token: which one it is, and what its row predicts if that row is scored."""

    sample: int | None = None
    offset: int = 0
    scored: int | None = None


@dataclass(frozen=True)
class Strip:
    """A labelled line of cells, and labelled brackets above it: ``(first cell, number of cells, text)``."""

    label: str
    cells: Sequence[Cell]
    note: str = ""
    brackets: Sequence[tuple[int, int, str]] = ()
    results: bool = False
    beside: bool = False
    """Drawn to the right of the strip before it, not below."""


def figures() -> dict[str, str]:
    """File name and SVG text of every layout figure."""
    drawn: dict[str, Callable[[], Iterator[Strip]]] = {
        "layout-packed": _packed,
        "layout-aligned": _aligned,
        "layout-padded": _padded,
        "layout-zigzag": _zigzag,
        "layout-zigzag-padded": _zigzag_padded,
        "layout-contiguous": _contiguous,
        "layout-results": _results,
    }
    return {f"{name}.svg": render(list(strips())) for name, strips in drawn.items()}


def _packed() -> Iterator[Strip]:
    rows = Rows.packed(TOKENS, RESPONSES)
    yield Strip("packed", _lines(rows)[0], "T = 17", _sample_brackets(rows))
    masked = Rows.packed(TOKENS, RESPONSES, MASKS, loss_mask_only=True)
    yield Strip("loss_mask_only", _lines(masked)[0], "T = 17")


def _aligned() -> Iterator[Strip]:
    rows = Rows.packed(TOKENS, RESPONSES, align=4, num_tokens=22)
    yield Strip("align=4", _lines(rows)[0], "num_tokens=22", _sample_brackets(rows))
    rows = Rows.packed(TOKENS, RESPONSES, cu_seqlens=[0, 8, 12, 22])
    yield Strip("cu_seqlens", _lines(rows)[0], "[0, 8, 12, 22]", _sample_brackets(rows))


def _padded() -> Iterator[Strip]:
    right = _lines(Rows.padded(TOKENS, RESPONSES, max_length=9))
    left = _lines(Rows.padded(TOKENS, RESPONSES, max_length=9, padding="left"), lead=[9 - n for n in LENGTHS])
    for sample, (one, other) in enumerate(zip(right, left, strict=True)):
        yield Strip("" if sample else "right", one, f"line {sample}")
        yield Strip("" if sample else "left", other, f"line {sample}", beside=True)


def _zigzag() -> Iterator[Strip]:
    yield from _split_over_two([Rows.packed(TOKENS, RESPONSES, cp=Zigzag(rank, 2)) for rank in range(2)])


def _contiguous() -> Iterator[Strip]:
    yield from _split_over_two(
        [Rows.packed(TOKENS, RESPONSES, cp=Contiguous(rank, 2), num_tokens=10) for rank in range(2)]
    )


def _zigzag_padded() -> Iterator[Strip]:
    plans = [Rows.padded(TOKENS, RESPONSES, max_length=8, cp=Zigzag(rank, 2)) for rank in range(2)]
    for sample, lines in enumerate(zip(*map(_lines, plans), strict=True)):
        for rank, line in enumerate(lines):
            chunk = len(line) // 2
            marks = [(0, chunk, f"chunk {rank}"), (chunk, chunk, f"chunk {3 - rank}")]
            label, marks = ("", []) if sample else (f"rank {rank}", marks)
            yield Strip(label, line, f"line {sample}", marks, beside=rank > 0)


def _results() -> Iterator[Strip]:
    """Results as chips: per rank in contiguous order, after ``redistribute``, and gathered."""
    before = [Rows.packed(TOKENS, RESPONSES, cp=Contiguous(rank, 2), num_tokens=10) for rank in range(2)]
    after = [Rows.packed(TOKENS, RESPONSES, cp=Zigzag(rank, 2)) for rank in range(2)]
    for label, plans in (("contiguous", before), ("redistribute", after)):
        for rank, rows in enumerate(plans):
            yield replace(_result_strip("" if rank else label, rows, f"rank {rank}"), beside=rank > 0)
    yield _result_strip("gather", Rows.packed(TOKENS, RESPONSES), "every rank")


def _split_over_two(plans: Sequence[Rows]) -> Iterator[Strip]:
    """The whole stream with the rank that holds each part, then each rank's tokens."""
    lines = [_lines(rows)[0] for rows in plans]
    spans = plans[0].spans or ()
    size = len(plans)
    stream = [Cell(s, t) if t < LENGTHS[s] else Cell() for s, span in enumerate(spans) for t in range(span)]
    if isinstance(plans[0].cp, Contiguous):
        stream += [Cell()] * (size * len(lines[0]) - len(stream))
        holders = [(rank * len(lines[0]), len(lines[0]), f"rank {rank}") for rank in range(size)]
    else:
        holders, first = [], 0
        for span in spans:
            chunk = span // (2 * size)
            for k in range(2 * size):
                holders.append((first, chunk, f"r{min(k, 2 * size - 1 - k)}"))
                first += chunk
    yield Strip("whole stream", stream, f"{len(stream)} places", holders)
    for rank, (rows, line) in enumerate(zip(plans, lines, strict=True)):
        yield Strip(f"rank {rank}", line, f"T = {rows.num_tokens}")


def _lines(rows: Rows, lead: Sequence[int] | None = None) -> list[list[Cell]]:
    """The local tokens of a plan, line by line, scored rows marked."""
    assert rows.spans is not None
    assert rows.token_shape is not None
    spans = torch.tensor(rows.spans)
    sample, place = ragged_arange(spans) if rows.cp is None else rows.cp.tokens(spans, rows.token_shape[-1])
    offset = place - torch.tensor(lead or [0] * len(spans))[sample]
    cells = [
        Cell(s, t) if 0 <= t < LENGTHS[s] else Cell() for s, t in zip(sample.tolist(), offset.tolist(), strict=True)
    ]
    cells += [Cell()] * ((rows.num_tokens or 0) - len(cells))
    for index, s, position in zip(rows.index.tolist(), rows.sample.tolist(), rows.position.tolist(), strict=True):
        cells[index] = replace(cells[index], scored=position)
        _check(cells[index], s, rows.target[rows.index == index].item())
    width = rows.token_shape[-1]
    return [cells[i : i + width] for i in range(0, len(cells), width)]


def _check(cell: Cell, sample: int, target: float) -> None:
    """The plan and the drawing agree: a scored row's token is followed by its target, which is a response token."""
    assert cell.sample == sample
    assert cell.scored is not None
    assert cell.offset + 1 == LENGTHS[sample] - RESPONSES[sample] + cell.scored
    assert TOKENS[sample][cell.offset + 1] == target


def _result_strip(label: str, rows: Rows, note: str) -> Strip:
    """One chip per result, a bracket around each tensor that ``split`` returns."""
    cells = [Cell(s, 0, p) for s, p in zip(rows.sample.tolist(), rows.position.tolist(), strict=True)]
    firsts = [sum(rows.counts[:sample]) for sample in range(len(rows.counts))]
    marks = [(first, n, _name(sample)) for sample, (first, n) in enumerate(zip(firsts, rows.counts, strict=True)) if n]
    return Strip(label, cells, note, marks, results=True)


def _sample_brackets(rows: Rows) -> list[tuple[int, int, str]]:
    marks, first = [], 0
    for sample, span in enumerate(rows.spans or ()):
        marks.append((first, span, f"sample {_name(sample)}" if span > 2 else _name(sample)))
        first += span
    return marks


def render(strips: Sequence[Strip]) -> str:
    """Strips one below the other, and the legend."""
    body, y, height = [], TOP, 0
    for place, strip in enumerate(strips):
        if not strip.beside:
            y += height + (10 if place and strip.label else 0)
            height = 0
        text, needed = _strip(strip, WIDTH // 2 if strip.beside else 0, y)
        body += text
        height = max(height, needed)
    legend, needed = _legend(y + height + 6, results=strips[0].results)
    y += height + 6 + needed
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" '
        f'font-family="DejaVu Sans, Verdana, Helvetica, sans-serif">'
    )
    page = f'<rect class="page" width="{WIDTH}" height="{y}"/>'
    return "\n".join([head, _style(), _hatch(), page, *filter(None, [*body, *legend]), "</svg>", ""])


def _strip(strip: Strip, x: int, y: int) -> tuple[list[str], int]:
    """SVG of one strip with its labels at ``(x, y)``, and the height it takes."""
    above = 24 if strip.brackets else 0
    left = x + (LEFT if not strip.beside else LEFT - 50)
    parts = [_bracket(left, y, *mark) for mark in strip.brackets]
    y += above
    middle = y + (CHIP if strip.results else CELL) / 2
    parts.append(_text(x + 12, middle - 7, strip.label, "label", "start"))
    parts.append(_text(x + 12, middle + (8 if strip.label else 0), strip.note, "note", "start"))
    for place, cell in enumerate(strip.cells):
        if not strip.results:
            parts += _token(left + place * PITCH, y, cell)
        if cell.scored is not None:
            parts += _chip(left + place * PITCH, y if strip.results else y + CELL + 5, cell, notch=not strip.results)
    if strip.results:
        return parts, above + CHIP + 12
    scored = any(cell.scored is not None for cell in strip.cells)
    return parts, above + CELL + (5 + CHIP if scored else 0) + 9


def _token(x: int, y: int, cell: Cell) -> list[str]:
    box = f'x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="4"'
    if cell.sample is None:
        return [f'<rect {box} class="pad"/>']
    response = cell.offset >= LENGTHS[cell.sample] - RESPONSES[cell.sample]
    shade = f"{'strong' if response else 'pale'}{cell.sample}"
    name = f"{_name(cell.sample)}{cell.offset}"
    return [
        f'<rect {box} class="{shade}"/>',
        _text(x + CELL / 2, y + CELL / 2, name, "on" if response else "in", "middle"),
    ]


def _chip(x: int, y: int, cell: Cell, notch: bool) -> list[str]:
    middle = x + CELL / 2
    pointer = f'<path d="M{_number(middle)} {y - 4}l4 4.5h-8z" class="strong{cell.sample}"/>'
    return [
        pointer if notch else "",
        f'<rect x="{x + 1}" y="{y}" width="{CELL - 2}" height="{CHIP}" rx="8.5" class="chip line{cell.sample}"/>',
        _text(middle, y + CHIP / 2, str(cell.scored), "chiptext", "middle"),
    ]


def _bracket(left: int, y: int, first: int, count: int, text: str) -> str:
    x, end = left + first * PITCH + 1, left + (first + count) * PITCH - (PITCH - CELL) - 1
    line = f'<path d="M{x} {y + 20}v-4H{end}v4" class="bracket"/>'
    return line + _text((x + end) / 2, y + 7, text, "note", "middle")


def _legend(y: int, results: bool) -> tuple[list[str], int]:
    """What the marks mean, with the marks themselves."""
    if results:
        text = "the result of response token 2 of the sample named above the bracket"
        parts = [*_chip(12, y, Cell(0, 0, 2), notch=False), _text(50, y + CHIP / 2, text, "note", "start")]
        return parts, CHIP + 12
    parts, x = [], 12
    for cell, text, room in (
        (Cell(0, 1), "prompt token 1 of sample a", 192),
        (Cell(0, 4), "response token", 118),
        (Cell(), "padding", 78),
    ):
        parts += _token(x, y, cell)
        parts.append(_text(x + CELL + 7, y + CELL / 2, text, "note", "start"))
        x += CELL + 10 + room
    parts += _chip(x, y + 8, Cell(0, 4, 2), notch=True)
    text = "this row is scored; its target is response token 2"
    parts.append(_text(x + CELL + 7, y + 8 + CHIP / 2, text, "note", "start"))
    return parts, CELL + 10


def _style() -> str:
    """Light colours, and dark ones for readers who asked for them; the page is filled, so either is readable."""

    def colours(page: str, text: str, faint: str, on: str, strong: Sequence[str], pale: Sequence[str]) -> str:
        rules = [f".page,.chip{{fill:{page}}}", f"text{{fill:{text}}}", f".note{{fill:{faint}}}", f".on{{fill:{on}}}"]
        rules += [f".bracket{{stroke:{faint}}}.pad{{stroke:{faint}}}.hatch{{stroke:{faint}}}"]
        for sample, (a, b) in enumerate(zip(strong, pale, strict=True)):
            rules.append(f".strong{sample}{{fill:{a}}}.pale{sample}{{fill:{b}}}.line{sample}{{stroke:{a}}}")
        return "".join(rules)

    shape = (
        "text{font-size:12px}.label{font-weight:bold}.note{font-size:11.5px}.chip{stroke-width:1.6}"
        ".chiptext{font-size:11px}.bracket{fill:none}.pad{fill:url(#hatch);stroke-opacity:.55}.hatch{stroke-opacity:.35}"
    )
    light = colours("#ffffff", "#1f2328", "#59636e", "#ffffff", STRONG, PALE)
    dark = colours("#0d1117", "#e6edf3", "#9198a1", "#0d1117", DARK_STRONG, DARK_PALE)
    return f"<style>{shape}{light}\n@media (prefers-color-scheme:dark){{{dark}}}</style>"


def _hatch() -> str:
    return (
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<path d="M0 0V6" class="hatch"/></pattern></defs>'
    )


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    # Centred by a shift of a third of the letters' height: not every viewer knows dominant-baseline.
    if not text:
        return ""
    return f'<text x="{_number(x)}" y="{_number(y + 4)}" text-anchor="{anchor}" class="{kind}">{text}</text>'


def _number(x: float) -> str:
    return f"{x:g}"


def _name(sample: int | None) -> str:
    return "" if sample is None else "abc"[sample]
