"""The ``logitless`` command: its commands, its options, and its exit codes."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Exit, Option
from typer.core import TyperGroup

import logitless
from logitless.errors import LogitlessError
from logitless.tools.cli.doctor import doctor
from logitless.tools.cli.plan import plan
from logitless.tools.cli.score import score
from logitless.tools.cli.shared import BAD_INPUT, BROKEN, UNREAD, Debug
from logitless.tools.cli.tune import tune

OF_CHECKOUTS = {
    **{name: f"python -m benchmarks {name}" for name in ("bench", "sweep", "plot")},
    "demo": "python -m examples.demo",
}
"""Commands that the package does not have, and how they are run from the top of a checkout."""


class _Piped(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            try:
                return super().invoke(ctx)
            finally:
                # Text that is still in the buffer may have no reader either.
                sys.stdout.flush()
        except BrokenPipeError:
            # Python flushes once more when it ends, and would complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise Exit(UNREAD) from None


class _Commands(_Piped):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in OF_CHECKOUTS:
            raise LogitlessError(
                f"{args[0]} is not in the installed package. In a checkout of the project, run "
                f"{OF_CHECKOUTS[args[0]]} from its top folder."
            )
        return super().resolve_command(ctx, args)


def new_app(group: type[TyperGroup] = _Piped, *, completion: bool = False) -> typer.Typer:
    """A command with commands of its own, none yet; with completion, a shell can be taught to complete it."""
    # Plain help: the boxes of rich call a flag a <bool> and are wrapped at 80 columns wherever they go.
    return typer.Typer(
        cls=group,
        no_args_is_help=True,
        add_completion=completion,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


app = new_app(_Commands, completion=True)
for command in (plan, score, doctor, tune):
    app.command()(command)


def _version(asked: bool) -> None:
    if asked:
        print(f"logitless {logitless.__version__}")
        raise Exit


@app.callback()
def about(
    debug: Debug = False,
    version: Annotated[bool, Option("--version", help="Print the version.", callback=_version, is_eager=True)] = False,
) -> None:
    """Log-probs, entropy and losses of LLMs, without paying for the logits.

    Exit codes: 0 all is well, 1 the answer is no (it does not fit, it is wrong),
    2 the usage or the input is wrong, 3 an error that the input did not cause.
    """


def main() -> None:
    """Entry point of the ``logitless`` command."""
    run(app, "logitless")


def run(app: typer.Typer, name: str) -> None:
    """Run a command by that name: an error is one line, and an exit code that tells its kind."""
    try:
        app()
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        if isinstance(error, LogitlessError):
            _stop(f"{name}: {error}", BAD_INPUT)
        text = (str(error).strip() or "no message").splitlines()[0]
        _stop(f"{name}: {type(error).__name__}: {text} ({name} --debug shows where)", BROKEN)


def _stop(text: str, code: int) -> None:
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(text, style="red")
    sys.exit(code)
