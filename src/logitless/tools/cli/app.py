"""The command itself: its parts, what all of them share, and its exit codes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import logitless
from logitless.errors import LogitlessError
from logitless.tools.cli.demo import demo
from logitless.tools.cli.doctor import doctor
from logitless.tools.cli.measure import bench, plot, sweep
from logitless.tools.cli.options import BAD_INPUT, BROKEN
from logitless.tools.cli.plan import plan
from logitless.tools.cli.score import score
from logitless.tools.cli.tune import tune

# Plain help: the boxes of rich call a flag a <bool> and are wrapped at 80 columns wherever they go.
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (plan, score, doctor, tune, demo, sweep, bench, plot):
    app.command()(command)


def _version(asked: bool) -> None:
    if asked:
        print(f"logitless {logitless.__version__}")
        raise typer.Exit


@app.callback()
def about(
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Per-token log-probabilities and entropy, without paying for the logits.

    Exit codes: 0 all is well, 1 the answer is no (it does not fit, it is wrong),
    2 wrong usage or input, 3 an error that is not your input's.
    """


def main() -> None:
    """Entry point of the ``logitless`` command: an error is one line, and an exit code that tells its kind."""
    try:
        app()
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        if isinstance(error, LogitlessError):
            _stop(str(error), BAD_INPUT)
        text = (str(error).strip() or "no message").splitlines()[0]
        _stop(f"{type(error).__name__}: {text} (logitless --debug shows where)", BROKEN)


def _stop(text: str, code: int) -> None:
    print(f"logitless: {text}", file=sys.stderr)
    sys.exit(code)
