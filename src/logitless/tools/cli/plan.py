"""``logitless plan``: arguments, and the answer as text."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

from typer import Exit, Option

from logitless.errors import LogitlessError
from logitless.tools.cli.shared import NO, AsJson, console, full_dtype


def _names_in(table: str) -> Callable[[str], list[str]]:
    """A function that completes a name in a shell, out of ``PRESETS`` or ``CARDS``."""

    def complete(begun: str) -> list[str]:
        return [name for name in getattr(import_module("logitless.tools.presets"), table) if name.startswith(begun)]

    return complete


def plan(
    model: Annotated[
        str,
        Option(help="A config.json, its folder, or a preset such as qwen3-8b.", autocompletion=_names_in("PRESETS")),
    ],
    tokens: Annotated[
        str, Option(metavar="<tokens>", help="Tokens of a micro-batch, all CP ranks together: 65536 or 64k.")
    ],
    response_fraction: Annotated[float, Option(help="Part of the tokens that is response.")] = 1.0,
    tp: Annotated[int, Option(help="Ranks that share the vocabulary.")] = 1,
    cp: Annotated[int, Option(help="Ranks that share the sequence.")] = 1,
    dtype: Annotated[str, Option(help="bfloat16 (bf16), float16 (fp16) or float32 (fp32).")] = "bfloat16",
    entropy: Annotated[str, Option(help="none, value, or grad if it is part of the loss.")] = "value",
    frozen_head: Annotated[bool, Option("--frozen-head", help="The head needs no gradient (LoRA).")] = False,
    card: Annotated[
        str | None, Option(help="A size such as 80GiB, or a name such as h100-80g.", autocompletion=_names_in("CARDS"))
    ] = None,
    in_use: Annotated[
        str | None, Option(help="What weights, optimizer and activations take of the card; with --card.")
    ] = None,
    memory: Annotated[
        str | None, Option(help="Working memory of calls from hidden states; default: that of each call.")
    ] = None,
    kept_ids: Annotated[
        float | None, Option(help="Ids that the sampler kept of each response token, on average.")
    ] = None,
    full: Annotated[bool, Option("--full", help="Also print the code to paste, and why.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tell the memory of a loss step, and the call to write.

    With --card, exit code 1 says that the recommended call does not fit.
    """
    from logitless.errors.arguments import check_name
    from logitless.spec import parse_memory
    from logitless.tools.plan import LossStep, plan_model
    from logitless.tools.plan.show import as_json as plan_as_json
    from logitless.tools.presets import find_card, find_count, find_model, machine_of

    if in_use is not None and card is None:
        raise LogitlessError("plan: --in-use is a part of the card, and there is no --card. Give one, or leave it out.")
    check_name(entropy, ("none", "value", "grad"), "plan: --entropy")
    wanted: Any = None if entropy == "none" else entropy
    step = LossStep(
        model=find_model(model),
        tokens=find_count(tokens),
        response_fraction=response_fraction,
        tp=tp,
        cp=cp,
        dtype=full_dtype(dtype),
        entropy=wanted,
        frozen_head=frozen_head,
        memory=memory,
        kept_ids=kept_ids,
        device=machine_of(card),
    )
    free = None if card is None else find_card(card) - (parse_memory(in_use) if in_use else 0)
    if free is not None and free <= 0:
        raise LogitlessError(
            f"plan: --in-use {in_use} is all of --card {card}: nothing is left for the step. Give what one card holds "
            f"of weights, optimizer and activations."
        )
    answer = plan_model(step, free)
    if as_json:
        print(json.dumps(plan_as_json(answer), indent=1))
    else:
        _print_plan(answer, full)
    if not answer.fits:
        raise Exit(NO)


def _print_plan(answer: Any, full: bool) -> None:
    """The answer; on request the code to paste, and why: the route, every way, and what each peak is made of."""
    from logitless.tools.outputs import text_table
    from logitless.tools.plan.show import answer_lines, headline, summary_rows

    out = console()
    for line in answer_lines(answer):
        out.print(line, style="bold" if line.startswith("Write") else "red" if "DO NOT FIT" in line else None)
    if not full:
        out.print("With --full: this as code to paste, and every other way.", style="dim")
        return
    out.print(f"\n{answer.snippet}")
    out.print("Why", style="bold")
    out.print(f"{headline(answer.step)}\n{answer.call.plan}")
    out.print("\nPeak bytes of the loss step, beyond hidden states and the head's weight\n")
    columns = ("way", "peak", "of plain", *(("fits", "most tokens") if answer.free is not None else ()))
    lines = text_table(columns, [cells[: len(columns)] for cells in summary_rows(answer)]).splitlines()
    for line, ours in zip(lines, (False, False, *(f.way.ours for f in answer.forecasts)), strict=True):
        out.print(line, style="green" if ours else None)
    for forecast in answer.forecasts:
        # The first line names the call; the name of the way says more.
        out.print(f"\n{forecast.way.name}", style="bold")
        out.print(str(forecast.estimate).split("\n", 1)[1])
