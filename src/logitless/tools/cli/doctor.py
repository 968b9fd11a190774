"""``logitless doctor``: the findings as text."""

from __future__ import annotations

import json
from typing import Annotated, Any

from typer import Exit, Option

from logitless.tools.cli.shared import NO, AsJson, Device, console, full_dtype, pick_device

EngineHead = Annotated[
    str | None, Option(help="Dtype of the logits of your rollout engine: says which logits to install frameworks with.")
]


def doctor(device: Device = None, engine_head: EngineHead = None, as_json: AsJson = False) -> None:
    """Show versions, backends that run here, and how exact they are.

    Also tells which frameworks and rollout engines are there, and whether
    our adapters and plug-ins fit them. Nothing is installed.

    Exit code 1 says that a backend runs here and is wrong.
    """
    import torch

    from logitless.tools.doctor import examine

    head = None if engine_head is None else full_dtype(engine_head)
    findings = examine(torch.device(pick_device(device, 0)), head)
    if as_json:
        print(json.dumps(findings.as_json(), indent=1))
    else:
        _print_findings(findings)
    if not findings.ok:
        raise Exit(NO)


def _print_findings(findings: Any) -> None:
    from logitless.tools.outputs import text_table

    out = console()
    facts = [*findings.versions.items(), ("device", findings.device), ("auto", findings.chosen)]
    out.print(text_table((), [(name, value or "not installed") for name, value in facts]))
    out.print("\nBackends", style="bold")
    out.print(text_table((), [(b.name, "runs" if b.runs else "does not run", b.reason) for b in findings.backends]))
    out.print("\nLargest error against float64; of gradients, relative to their size", style="bold")
    tried = [(f.path, f.backend, f.dtype, *f.errors, "ok" if f.ok else "WRONG") for f in findings.exactness]
    lines = text_table(("path", "backend", "dtype", "values", "gradients", ""), tried).splitlines()
    for line, ok in zip(lines, (None, None, *(f.ok for f in findings.exactness)), strict=True):
        out.print(line, style={None: None, True: "green", False: "bold red"}[ok])
    for title, found in (("Adapters", findings.hosts), ("Rollout engines", findings.engines)):
        out.print(f"\n{title}", style="bold")
        tested = [f"tested with {', '.join(h.tested) or 'no version'}" for h in found]
        rows = [(h.name, h.found or "not installed", text) for h, text in zip(found, tested, strict=True)]
        for host, line in zip(found, text_table((), rows).splitlines(), strict=True):
            out.print(line)
            if host.verdict:
                out.print(f"  {host.verdict}")
    verdict = "All that runs here is exact." if findings.ok else "Something that runs here is wrong."
    out.print(f"\n{verdict}", style="green" if findings.ok else "bold red")
