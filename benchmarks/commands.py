"""``python -m benchmarks bench``, ``sweep`` and ``plot``: arguments, tables and figures."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from logitless.errors import LogitlessError
from logitless.tools.cli.app import new_app, run
from logitless.tools.cli.shared import AsJson, Debug, Device, console, full_dtype, progress

Names = Annotated[list[str] | None, typer.Option(help="Name or shell pattern; may be repeated.")]
Peers = Annotated[Path | None, typer.Option(help="Folder of unpacked packages to import peers from.")]


def bench(
    case: Names = None,
    provider: Names = None,
    device: Device = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File to append to; default: see above."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed repeats per provider.")] = 10,
    peers: Peers = None,
    commit: Annotated[str | None, typer.Option(help="Commit to record where the code has no git history.")] = None,
    base: Annotated[str | None, typer.Option(help="Commit to compare this checkout with.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List cases and providers, measure nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print records, or the list, as JSON.")] = False,
) -> None:
    """Time, peak memory and exactness of every provider on every case.

    --base REF measures that commit and this checkout, plain torch and ours
    unless --provider says otherwise. Records are then kept only with --out, and
    exit code 1 says that this checkout is wrong or fails where REF did not.

    Otherwise records are appended to --out: by default DEVICE.jsonl, in
    benchmarks/results of a checkout, and elsewhere in ~/.cache/logitless.
    """
    from benchmarks.bench.records import records_table
    from benchmarks.bench.run import Request, execute, listing, listing_json

    if show_list:
        print(json.dumps(listing_json(), indent=1) if as_json else listing())
        return
    request = Request(case or (), provider or (), device, out, repeats, peers, commit)
    if base is not None:
        _bench_against(base, request, as_json)
        return
    with progress(request.resolve().num_steps) as report:
        results, path = execute(request, report)
    print(f"{len(results)} records appended to {path}\n", file=sys.stderr)
    if as_json:
        print("\n".join(record.to_json() for record in results))
    else:
        _print_records(records_table(results))


def sweep(
    response: Annotated[str, typer.Option(help="Shares of the tokens that are response.")] = "1,0.5,0.25,0.1,0.03",
    tokens: Annotated[str | None, typer.Option(help="T; default 205280, or as many as fit.")] = None,
    vocab: Annotated[str, typer.Option(help="V.")] = "76032",
    entropy: Annotated[str, typer.Option(help="none, value, grad.")] = "grad",
    hidden: Annotated[str, typer.Option(help="D: start from hidden states instead of logits.")] = "",
    memory: Annotated[str, typer.Option(help="Working memory, as 64MiB; with --hidden.")] = "",
    dtype: Annotated[str, typer.Option(help="float32 (fp32), bfloat16 (bf16) or float16 (fp16).")] = "float32",
    forward_only: Annotated[bool, typer.Option("--forward-only", help="No backward.")] = False,
    provider: Names = None,
    device: Device = None,
    repeats: Annotated[int, typer.Option(help="Timed repeats per point.")] = 3,
    peers: Peers = None,
    out: Annotated[Path | None, typer.Option(help="File of the records; default: see above.")] = None,
    as_json: AsJson = False,
) -> None:
    """Peak memory and time over sizes, on this machine.

    Sizes are lists, as 1024,2048; every combination is measured, each point in
    a process of its own. The default is the sizes at which training runs out of memory, over the response
    fraction; on a CPU, as many tokens as take about a minute. The same command,
    run again, goes on where it stopped; points that it finds are marked.
    Records are by default sweep-DEVICE.jsonl, in out of a checkout, and
    elsewhere in ~/.cache/logitless.

    Exit code 1 says that a provider was wrong or failed, 130 that the sweep was
    interrupted. Running out of memory is an answer, not a failure.
    """
    from benchmarks.bench import sweep as sweeping

    require_matplotlib()
    sizes = (tokens, vocab, response, entropy, hidden, memory, full_dtype(dtype), not forward_only)
    options = sweeping.Options(*sizes, provider or (), device, repeats, peers)
    wanted = sweeping.resolve_sweep(options, out)
    try:
        with progress(len(wanted.points)) as report:
            results, earlier = sweeping.run_sweep(wanted, report)
    except KeyboardInterrupt:
        print(f"\nStopped. Finished points are in {wanted.out}; the same command goes on from there.", file=sys.stderr)
        raise typer.Exit(130) from None
    _print_sweep(results, earlier, wanted.out, as_json)
    raise typer.Exit(sweeping.exit_code(results))


def plot(
    file: Annotated[Path, typer.Argument(help="Records written by bench.")],
    case: Names = None,
    provider: Names = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the figures; default: out in a checkout, or ~/.cache/logitless.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw time and peak memory from records, light and dark."""
    require_matplotlib()
    from benchmarks.bench.cases import select_names
    from benchmarks.bench.records import read_records
    from benchmarks.plots import draw_records
    from logitless.tools.outputs import default_folder

    results = read_records(file)
    if not results:
        raise LogitlessError(f"plot: {file} holds no records. Write some with python -m benchmarks bench --out {file}.")
    cases = select_names(case or ["*"], list(dict.fromkeys(r.case["name"] for r in results)), "case")
    names = select_names(provider or ["*"], list(dict.fromkeys(r.provider for r in results)), "provider")
    chosen = [r for r in results if r.case["name"] in cases and r.provider in names]
    paths = [str(path) for path in draw_records(chosen, out or default_folder(), file.stem)]
    print(json.dumps(paths) if as_json else "\n".join(paths))


def _print_sweep(results: list[Any], earlier: frozenset[int], out: Path, as_json: bool) -> None:
    from benchmarks.bench.sweep import sweep_table
    from benchmarks.plots import draw_sweep

    if as_json:
        print("\n".join(record.to_json() for record in results))
    else:
        _print_records(sweep_table(results, earlier))
    if any(record.total_ms is not None for record in results):
        drawn = draw_sweep(results, out.parent, out.stem)
        print(f"\nRecords in {out}, figures in {', '.join(map(str, drawn))}", file=sys.stderr)


def _bench_against(base: str, request: Any, as_json: bool) -> None:
    from benchmarks.bench import base as against

    with progress(against.num_steps(request)) as report:
        comparison = against.compare_with(base, request, report)
    if as_json:
        print("\n".join(compared.to_json() for compared in comparison.compared))
    else:
        print(against.comparison_table(comparison))
    raise typer.Exit(int(comparison.broken))


def _print_records(table: str) -> None:
    """On a terminal, headlines in bold and our lines in green."""
    for line in table.splitlines():
        ours = line.startswith("logitless") or " logitless" in line
        console().print(line, style="bold" if ": T=" in line else "green" if ours else None)


def require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise LogitlessError("figures need matplotlib. Install it with pip install matplotlib.")


app = new_app()
for command in (bench, sweep, plot):
    app.command()(command)


@app.callback()
def about(debug: Debug = False) -> None:
    """Time, peak memory and exactness of log-prob providers, on this machine.

    Exit codes: 0 all is well, 1 the answer is no (a provider is wrong or fails),
    2 wrong usage or input, 3 an error that is not your input's, 130 interrupted.
    """


def main() -> None:
    run(app, "python -m benchmarks")
