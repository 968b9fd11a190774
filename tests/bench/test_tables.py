"""Tables as text: every character as it is, numbers to the right, and tabs where there is no rich."""

import sys

from benchmarks.bench.__main__ import main
from logitless.tools.outputs import text_table

ROWS = [("d_weight [9, 4]", "64 B", "-"), (":smile: [bold]x[/bold]", "9.27 GiB", "ok")]


def test_cells_are_shown_as_they_are_and_numbers_stand_to_the_right():
    lines = text_table(("item", "bytes", "note"), ROWS).splitlines()
    assert lines[0].split() == ["item", "bytes", "note"]
    assert set(lines[1]) == {"-", " "}
    assert lines[2] == "d_weight [9, 4]             64 B  -"
    assert lines[3] == ":smile: [bold]x[/bold]  9.27 GiB  ok"


def test_no_line_is_wrapped():
    assert text_table(("a", "b"), [("x" * 500, "y" * 500)]).splitlines()[-1] == "x" * 500 + "  " + "y" * 500


def test_without_columns_there_are_rows_alone():
    assert text_table((), [("torch", "2.13"), ("rich", "none")]) == "torch  2.13\nrich   none"
    assert text_table((), []) == ""


def test_without_rich_there_are_tabs(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.box", None)
    assert text_table(("a", "b"), [("x", "1")]) == "a\tb\nx\t1"
    assert text_table((), [("x", "1")]) == "x\t1"
    assert main(["--list"]) == 0
    assert "torch.compile\tentropy grad\t\n" in capsys.readouterr().out
