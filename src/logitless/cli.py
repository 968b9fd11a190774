"""The ``logitless`` command: ``bench``, ``plot`` and ``demo``.

Everything it prints comes from ``bench``, ``plots`` and ``demo``; this file only parses, shows progress and formats.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.panel import Panel
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError as error:
    raise SystemExit(f"logitless: {error}. Install the command line with pip install 'logitless[bench]'.") from None

from logitless.bench import records as rec
from logitless.bench.cases import select_names
from logitless.bench.run import Request, execute, listing
from logitless.errors import LogitlessError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
Names = Annotated[list[str] | None, typer.Option(help="Name or shell pattern; may be repeated.")]
OutFile = Annotated[Path | None, typer.Option(help="File to append to; default benchmarks/results/<device>.jsonl.")]


@app.callback()
def about() -> None:
    """Per-token log-probabilities and entropy without paying for the logits: measure it, draw it, see it."""


def main() -> None:
    """Entry point of the ``logitless`` command."""
    try:
        app()
    except LogitlessError as error:
        sys.exit(f"logitless: {error}")


@app.command()
def bench(
    case: Names = None,
    provider: Names = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    out: OutFile = None,
    repeats: Annotated[int, typer.Option(help="Timed repeats per provider.")] = 10,
    peers: Annotated[Path | None, typer.Option(help="Folder of unpacked packages to import peers from.")] = None,
    commit: Annotated[str | None, typer.Option(help="What to record where the code has no git history.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List cases and providers, measure nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records instead of the table.")] = False,
) -> None:
    """Time, peak memory and exactness of every provider on every case, next to the floor of the machine."""
    if show_list:
        print(listing())
        return
    request = Request(case or (), provider or (), device, out, repeats, peers, commit)
    with _progress(request.resolve().num_steps) as report:
        results, path = execute(request, report)
    print(f"{len(results)} records appended to {path}\n", file=sys.stderr)
    if as_json:
        print("\n".join(record.to_json() for record in results))
    else:
        _print_table(results)


@app.command()
def plot(
    file: Annotated[Path, typer.Argument(help="Records written by bench.")],
    case: Names = None,
    provider: Names = None,
    out: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("out"),
) -> None:
    """Draw time and peak memory from records: PNG files in a light and a dark style."""
    _require_matplotlib()
    from logitless.plots import draw_records

    results = rec.read_records(file)
    cases = select_names(case or ["*"], list(dict.fromkeys(r.case["name"] for r in results)), "case")
    names = select_names(provider or ["*"], list(dict.fromkeys(r.provider for r in results)), "provider")
    chosen = [r for r in results if r.case["name"] in cases and r.provider in names]
    for path in draw_records(chosen, out, file.stem):
        print(path)


@app.command()
def demo(out: Annotated[Path, typer.Option(help="Where to save the figure.")] = Path("out/demo.png")) -> None:
    """Score one packed batch on CPU in three ways and compare time, peak memory and exactness."""
    _require_matplotlib()
    from logitless import demo as show

    with _progress(show.num_steps()) as report:
        result = show.run_demo(report)
    show.draw(result, out)
    console = Console(width=None if sys.stdout.isatty() else rec.WIDTH)
    table = Table(title="Log-prob and entropy, forward and backward", title_justify="left", title_style="bold")
    table.add_column("scored by", no_wrap=True)
    for name in ("time", "peak memory", "log-prob", "entropy", "gradient"):
        table.add_column(name, justify="right")
    for outcome in result.outcomes:
        table.add_row(*show.cells(outcome))
    console.print(f"\n{result.scale}.\n", highlight=False)
    console.print(table)
    console.print("Peak memory is beyond the logits. The last three columns are the largest distance to float64 over")
    console.print("every row; gradients relative to the upstream gradient of their row.\n")
    console.print(Panel(show.verdict(result.outcomes), border_style="green"), highlight=False)
    console.print(f"Figure saved to {out}", highlight=False)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr; plain lines where that is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    columns = (BarColumn(bar_width=24), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
    shown = (*columns, TextColumn("{task.description}"))
    # Drawn only between measurements: a bar that redraws itself in a thread would be timed along with the rest.
    with Progress(*shown, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda text: bar.update(task, description=text, advance=1, refresh=True)


def _print_table(results: list[rec.Record]) -> None:
    """The plain table; on a terminal with our own lines in colour."""
    console = Console(width=None if sys.stdout.isatty() else rec.WIDTH)
    for line in rec.text_table(results).splitlines():
        style = "green" if line.startswith("logitless") else "bold" if ": T=" in line else None
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def _require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise LogitlessError("figures need matplotlib. Install it with pip install 'logitless[bench]'.")


if __name__ == "__main__":
    main()
