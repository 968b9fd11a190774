"""``logitless tune``: a table of the card at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Option

from logitless.tools.cli.shared import AsJson, Device, console, pick_device, progress


def tune(
    device: Device = None,
    out: Annotated[
        Path | None,
        Option(help="File of the table; default: machine-CARD.json, in out of a checkout, or in ~/.cache/logitless."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure matrix products, so that calls take the fastest way.

    Takes some seconds, and writes a table. Calls read it where
    LOGITLESS_MACHINE names it, the same file on every rank. Without it, costs
    are those of an H200, and cards other than Hopper's use no fused kernels,
    which multiply and take the softmax in one go.
    """
    import torch

    from logitless.tools.outputs import default_folder, slug_of, text_table
    from logitless.tools.tune import measure, num_steps, require_card, write

    where = torch.device(pick_device(device, 0))
    require_card(where)
    with progress(num_steps(where)) as report:
        table = measure(where, report=report)
    path = out or default_folder() / f"machine-{slug_of(table['card'])}.json"
    write(table, path)
    if as_json:
        print(json.dumps(table, indent=1))
        return
    screen = console()
    screen.print(text_table(("step", "ms"), [(name, f"{x:.3f}") for name, x in table["milliseconds"].items()]))
    chosen = "are faster, and will be used" if table["epilogues"] else "will not be used"
    why = f": {table['refused']}" if table["refused"] else ""
    screen.print(f"\n{table['card']}: fused kernels (product and softmax in one) {chosen}{why}.")
    screen.print(f"\nWritten. To use it: export LOGITLESS_MACHINE={path}")
