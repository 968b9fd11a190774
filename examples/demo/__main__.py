"""``python -m examples.demo``: arguments, and the outcome as text and figure."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.commands import require_matplotlib
from logitless.tools.cli.app import new_app, run
from logitless.tools.cli.shared import NO, AsJson, Debug, first_explains, progress, ranks


def demo(
    steps: Annotated[int, typer.Option(help="GRPO steps of each run.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of weights, prompts and samples.")] = 0,
    tp: Annotated[int, typer.Option(help="Ranks that share the vocabulary; under torchrun.")] = 1,
    cp: Annotated[int, typer.Option(help="Ranks that share the tokens; under torchrun.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Figure; default demo.png, in out of a checkout or in ~/.cache/logitless.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """A tiny RL run, with plain torch's loss step and with ours.

    Same seed, same learning curve, less memory. About three minutes on two cores.

    Exit code 1 says that the reward did not rise, or that the curves differ.
    """
    require_matplotlib()
    from examples import demo as show
    from examples.demo.figure import draw_demo
    from examples.demo.grid import make_grid
    from examples.demo.report import show_demo
    from logitless.tools.outputs import default_folder

    with ranks() as (rank, _, group):
        with first_explains(rank):
            setting, grid = show.Setting(steps=steps, seed=seed), make_grid(tp, cp, group)
            show.check_ready(setting, grid)
        with progress(show.num_reports(setting)) if rank == 0 else nullcontext(lambda text: None) as report:
            result = show.run_demo(setting, grid, report)
    if result is None:
        return
    out = out or default_folder() / "demo.png"
    draw_demo(result, out)
    if as_json:
        print(json.dumps({**result.as_json(), "figure": str(out)}))
    else:
        show_demo(result, out, Console(soft_wrap=not sys.stdout.isatty()))
    if not result.ok:
        raise typer.Exit(NO)


app = new_app()
app.command()(demo)


def main() -> None:
    run(app, "python -m examples.demo")


if __name__ == "__main__":
    main()
