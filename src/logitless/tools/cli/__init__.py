"""The ``logitless`` command.

    plan, score, doctor     for users: memory a model will need, log-probs of a file, whether this machine is right
    tune                    what products cost on this card, for calls to choose by

    app         the command and its exit codes; where commands are that only a checkout has
    shared      options, exit codes, text and progress of several commands; the ranks of torchrun
    plan, score, doctor, tune    the commands: arguments in, text out

The modules of those names in ``tools`` do the work. A module that one command needs is imported when that command runs,
and torch with it: help and usage errors need neither.
"""

import sys

try:
    import rich
    import typer
except ImportError as error:
    sys.stderr.write(
        f"logitless: {error}. The command line needs logitless with its extra [cli], which brings typer and rich.\n"
    )
    raise SystemExit(2) from None

from logitless.tools.cli.app import app, main

__all__ = ["app", "main", "rich", "typer"]
