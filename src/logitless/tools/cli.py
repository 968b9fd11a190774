"""The ``logitless`` command.

    plan, score, doctor     for users: memory a model will need, log-probs of a file, whether this machine is right
    demo, sweep             what the library is worth on this machine, and at which sizes
    bench, plot             the committed cases, measured and drawn; --base compares two commits

The modules of those names do the work; this file parses arguments, shows progress and prints. A module that one command
needs is imported when that command runs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
except ImportError as error:
    raise SystemExit(f"logitless: {error}. Install the command line with pip install 'logitless[bench]'.") from None

from logitless.errors import LogitlessError
from logitless.spec import format_bytes, parse_memory

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
Names = Annotated[list[str] | None, typer.Option(help="Name or shell pattern; may be repeated.")]
OutFile = Annotated[Path | None, typer.Option(help="File to append to; default benchmarks/results/<device>.jsonl.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Peers = Annotated[Path | None, typer.Option(help="Folder of unpacked packages to import peers from.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")]


@app.callback()
def about(debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False) -> None:
    """Per-token log-probabilities and entropy, without paying for the logits."""


def main() -> None:
    """Entry point of the ``logitless`` command: an error is one line, and exit code 1."""
    try:
        app()
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        if isinstance(error, LogitlessError):
            sys.exit(f"logitless: {error}")
        text = (str(error).strip() or "no message").splitlines()[0]
        sys.exit(f"logitless: {type(error).__name__}: {text} (logitless --debug shows where)")


@app.command()
def plan(
    model: Annotated[str, typer.Option(help="A config.json, its folder, or a preset such as qwen3-8b.")],
    tokens: Annotated[int, typer.Option(help="Tokens of a micro-batch, all CP ranks together.")],
    response_fraction: Annotated[float, typer.Option(help="Part of the tokens that is response.")] = 1.0,
    tp: Annotated[int, typer.Option(help="Ranks that share the vocabulary.")] = 1,
    cp: Annotated[int, typer.Option(help="Ranks that share the sequence.")] = 1,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    entropy: Annotated[str, typer.Option(help="none, value, or grad if it is part of the loss.")] = "value",
    frozen_head: Annotated[bool, typer.Option("--frozen-head", help="The head needs no gradient (LoRA).")] = False,
    card: Annotated[str | None, typer.Option(help="A size such as 80GiB, or a name such as h100-80g.")] = None,
    in_use: Annotated[
        str | None, typer.Option(help="What weights, optimizer and activations take of the card.")
    ] = None,
    memory: Annotated[str, typer.Option(help="Working memory of calls from hidden states.")] = "256MiB",
    kept_ids: Annotated[
        float | None, typer.Option(help="Ids that the sampler kept of each response token, on average.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What the loss step of a model will need, and the call to write.

    With --card, exit code 1 says that the recommended call does not fit.
    """
    from logitless.tools import plan as planner
    from logitless.tools.presets import find_card, find_model

    wanted: Any = None if entropy == "none" else entropy
    step = planner.LossStep(
        find_model(model), tokens, response_fraction, tp, cp, dtype, wanted, frozen_head, memory, kept_ids
    )
    free = None if card is None else max(0, find_card(card) - (parse_memory(in_use) if in_use else 0))
    answer = planner.plan_model(step, free)
    if as_json:
        print(json.dumps(planner.as_json(answer), indent=1))
    else:
        _print_plan(answer)
    if not answer.fits:
        raise typer.Exit(1)


@app.command()
def score(
    model: Annotated[Path, typer.Argument(help="Hugging Face model directory.")],
    data: Annotated[Path, typer.Argument(help="JSONL or Parquet file of prompts and responses.")],
    out: Annotated[Path, typer.Option(help="JSONL or Parquet file to write.")],
    temperature: Annotated[float, typer.Option(help="Temperature at which the responses were sampled.")] = 1.0,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), bfloat16, float16 or float32.")] = "auto",
    device: Device = None,
    tokens_per_batch: Annotated[int, typer.Option(help="Most tokens of a micro-batch, with padding.")] = 16384,
    records_per_part: Annotated[int, typer.Option(help="Records that are committed together.")] = 64,
    prompt_key: Annotated[str, typer.Option(help="Field of the prompt: token ids or text.")] = "prompt",
    response_key: Annotated[str, typer.Option(help="Field of the response.")] = "response",
    plain_text: Annotated[
        bool, typer.Option("--plain-text", help="Do not open text prompts with special tokens.")
    ] = False,
    memory: Annotated[str, typer.Option(help="Working memory of the head.")] = "256MiB",
    against: Annotated[
        str | None, typer.Option(help="Field of the rollout engine's log-probs, to compare with.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start anew, and replace the output.")] = False,
    as_json: AsJson = False,
) -> None:
    """Log-prob and entropy of every response token of a file.

    The same command, run again after a kill, goes on where it stopped. Under torchrun the ranks share the work.
    """
    from logitless.tools.score import Job, score_file
    from logitless.tools.score.against import compare, report_text, write

    with _ranks() as (rank, local_rank, group), _first_explains(rank):
        job = Job(
            model=model,
            data=data,
            out=out,
            temperature=temperature,
            dtype=dtype,
            device=_pick_device(device, local_rank),
            tokens_per_batch=tokens_per_batch,
            records_per_part=records_per_part,
            prompt_key=prompt_key,
            response_key=response_key,
            special_tokens=not plain_text,
            memory=memory,
            overwrite=overwrite,
        )
        with _score_progress(shown=rank == 0) as report:
            summary = score_file(job, report, group)
    if rank == 0:
        found = None if against is None else write(compare(data, out, against), out)
        print(report_text(summary, found, as_json))


@app.command()
def doctor(device: Device = None, as_json: AsJson = False) -> None:
    """Installed versions, backends that run here, and how exact each is.

    Exit code 1 says that a backend runs here and is wrong.
    """
    import torch

    from logitless.tools.doctor import examine

    findings = examine(torch.device(_pick_device(device, 0)))
    if as_json:
        print(json.dumps(findings.as_json(), indent=1))
    else:
        _print_findings(findings)
    if not findings.ok:
        raise typer.Exit(1)


@app.command()
def bench(
    case: Names = None,
    provider: Names = None,
    device: Device = None,
    out: OutFile = None,
    repeats: Annotated[int, typer.Option(help="Timed repeats per provider.")] = 10,
    peers: Peers = None,
    commit: Annotated[str | None, typer.Option(help="Commit to record where the code has no git history.")] = None,
    base: Annotated[str | None, typer.Option(help="Commit to compare this checkout with.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List cases and providers, measure nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records instead of the table.")] = False,
) -> None:
    """Time, peak memory and exactness of every provider on every case.

    --base REF measures that commit and this checkout, plain torch and ours
    unless --provider says otherwise. Records are then kept only with --out, and
    exit code 1 says that this checkout is wrong or fails where REF did not.
    """
    from logitless.tools.bench.records import records_table
    from logitless.tools.bench.run import Request, execute, listing

    if show_list:
        print(listing())
        return
    request = Request(case or (), provider or (), device, out, repeats, peers, commit)
    if base is not None:
        _bench_against(base, request, as_json)
        return
    with _progress(request.resolve().num_steps) as report:
        results, path = execute(request, report)
    print(f"{len(results)} records appended to {path}\n", file=sys.stderr)
    if as_json:
        print("\n".join(record.to_json() for record in results))
    else:
        _print_records(records_table(results))


@app.command()
def sweep(
    response: Annotated[str, typer.Option(help="Shares of the tokens that are response.")] = "1,0.5,0.25,0.1,0.03",
    tokens: Annotated[str | None, typer.Option(help="T; default 205280, or as many as fit.")] = None,
    vocab: Annotated[str, typer.Option(help="V.")] = "76032",
    entropy: Annotated[str, typer.Option(help="none, value, grad.")] = "grad",
    hidden: Annotated[str, typer.Option(help="D: start from hidden states instead of logits.")] = "",
    memory: Annotated[str, typer.Option(help="Working memory, as 64MiB; with --hidden.")] = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    forward_only: Annotated[bool, typer.Option("--forward-only", help="No backward.")] = False,
    provider: Names = None,
    device: Device = None,
    repeats: Annotated[int, typer.Option(help="Timed repeats per point.")] = 3,
    peers: Peers = None,
    out: Annotated[Path | None, typer.Option(help="Records; default out/sweep-DEVICE.jsonl.")] = None,
    as_json: AsJson = False,
) -> None:
    """Peak memory and time over sizes, each point in a process of its own.

    Sizes are lists, as 1024,2048; every combination is measured. The default
    is the sizes at which training runs out of memory, over the response
    fraction; on a CPU, as many tokens as take about a minute. The same command,
    run again, goes on where it stopped.

    Exit code 1 says that a provider was wrong or failed, 130 that the sweep was
    interrupted. Running out of memory is an answer, not a failure.
    """
    from logitless.tools.bench import sweep as sweeping

    _require_matplotlib()
    sizes = (tokens, vocab, response, entropy, hidden, memory, dtype, not forward_only)
    options = sweeping.Options(*sizes, provider or (), device, repeats, peers)
    wanted = sweeping.resolve_sweep(options, out)
    try:
        with _progress(len(wanted.points)) as report:
            results = sweeping.run_sweep(wanted, report)
    except KeyboardInterrupt:
        print(f"\nStopped. Finished points are in {wanted.out}; the same command goes on from there.", file=sys.stderr)
        raise typer.Exit(130) from None
    _print_sweep(results, wanted.out, as_json)
    raise typer.Exit(sweeping.exit_code(results))


@app.command()
def plot(
    file: Annotated[Path, typer.Argument(help="Records written by bench.")],
    case: Names = None,
    provider: Names = None,
    out: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("out"),
    as_json: AsJson = False,
) -> None:
    """Draw time and peak memory from records, light and dark."""
    _require_matplotlib()
    from logitless.tools.bench.cases import select_names
    from logitless.tools.bench.records import read_records
    from logitless.tools.plots import draw_records

    results = read_records(file)
    cases = select_names(case or ["*"], list(dict.fromkeys(r.case["name"] for r in results)), "case")
    names = select_names(provider or ["*"], list(dict.fromkeys(r.provider for r in results)), "provider")
    chosen = [r for r in results if r.case["name"] in cases and r.provider in names]
    paths = [str(path) for path in draw_records(chosen, out, file.stem)]
    print(json.dumps(paths) if as_json else "\n".join(paths))


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="GRPO steps of each run.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of weights, prompts and samples.")] = 0,
    tp: Annotated[int, typer.Option(help="Ranks that share the vocabulary; under torchrun.")] = 1,
    cp: Annotated[int, typer.Option(help="Ranks that share the tokens; under torchrun.")] = 1,
    out: Annotated[Path, typer.Option(help="File of the figure.")] = Path("out/demo.png"),
    as_json: AsJson = False,
) -> None:
    """Train a tiny transformer with plain torch's loss step and with ours.

    Same seed, same learning curve, less memory. About two minutes on two cores.

    Exit code 1 says that the reward did not rise, or that the curves differ.
    """
    _require_matplotlib()
    from logitless.tools import demo as show
    from logitless.tools.demo.figure import draw_demo
    from logitless.tools.demo.grid import make_grid
    from logitless.tools.demo.report import show_demo

    with _ranks() as (rank, _, group):
        with _first_explains(rank):
            setting, grid = show.Setting(steps=steps, seed=seed), make_grid(tp, cp, group)
            show.check_ready(setting, grid)
        with _progress(show.num_reports(setting)) if rank == 0 else nullcontext(lambda text: None) as report:
            result = show.run_demo(setting, grid, report)
    if result is None:
        return
    draw_demo(result, out)
    if as_json:
        print(json.dumps({**result.as_json(), "figure": str(out)}))
    else:
        show_demo(result, out, Console(width=None if sys.stdout.isatty() else 80))
    if not result.ok:
        raise typer.Exit(1)


@contextmanager
def _ranks() -> Iterator[tuple[int, int, Any]]:
    """Rank, rank on this machine and process group under torchrun; 0, 0 and None otherwise."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield 0, 0, None
        return
    from datetime import timedelta

    import torch.distributed as dist

    # Ranks wait for the slowest one, however long it takes; if one dies, torchrun ends the others.
    dist.init_process_group("gloo", timeout=timedelta(days=30))
    yield dist.get_rank(), int(os.environ.get("LOCAL_RANK", "0")), dist.group.WORLD
    # Nobody leaves before all are done. A gloo thread that lets go of its last collective while Python shuts down would
    # abort the process, so they get the time to do so before.
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.2)


@contextmanager
def _first_explains(rank: int) -> Iterator[None]:
    """Where every rank fails alike, the first one says why."""
    try:
        yield
    except LogitlessError:
        if rank == 0:
            raise
        raise typer.Exit(1) from None


def _pick_device(device: str | None, local_rank: int) -> str:
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise LogitlessError(f'device must be "cpu", "cuda" or "cuda:1" and so on but is {device!r}.')
    if kind == "cuda" and not torch.cuda.is_available():
        raise LogitlessError('device is "cuda" but torch sees no CUDA device. Use --device cpu.')
    return f"cuda:{local_rank}" if device == "cuda" else device


@contextmanager
def _score_progress(*, shown: bool) -> Iterator[Callable[[Any], None]]:
    """Parts and tokens per second of this rank on stderr: a bar, or off a terminal a line every ten seconds."""
    console, start = Console(stderr=True), time.monotonic()

    def text(progress: Any) -> str:
        speed = progress.tokens / max(1e-9, time.monotonic() - start)
        return f"{progress.tokens} response tokens, {speed:.0f} tokens/s"

    if not shown:
        yield lambda progress: None
    elif console.is_terminal:
        columns = (BarColumn(bar_width=24), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
        with Progress(*columns, TextColumn("{task.description}"), console=console, transient=True) as bar:
            task = bar.add_task("loading the model", total=None)
            yield lambda p: bar.update(task, completed=p.done, total=p.total, description=text(p))
    else:
        told = start - 10.0

        def line(progress: Any) -> None:
            nonlocal told
            if time.monotonic() - told >= 10.0 or progress.done == progress.total:
                told = time.monotonic()
                print(f"{progress.done}/{progress.total} parts, {text(progress)}", file=sys.stderr, flush=True)

        yield line


def _console() -> Console:
    """Prints text as it is, never wrapped; on a terminal, in colour."""
    return Console(highlight=False, markup=False, soft_wrap=True)


def _print_plan(answer: Any) -> None:
    from logitless.tools.bench.tables import text_table
    from logitless.tools.plan import headline, summary_rows

    console = _console()
    console.print(headline(answer.step), style="bold")
    console.print("\nPeak bytes of the loss step, beyond hidden states and the head's weight\n")
    columns = ("way", "peak", "of plain", *(("fits", "most tokens") if answer.free is not None else ()))
    lines = text_table(columns, [cells[: len(columns)] for cells in summary_rows(answer)]).splitlines()
    for line, ours in zip(lines, (False, False, *(f.way.ours for f in answer.forecasts)), strict=True):
        console.print(line, style="green" if ours else None)
    for forecast in answer.forecasts:
        # The first line names the call; the name of the way says more.
        console.print(f"\n{forecast.way.name}", style="bold")
        console.print(str(forecast.estimate).split("\n", 1)[1])
    console.print("\nRecommended", style="bold")
    console.print(textwrap.fill(str(answer.call.plan), 80))
    console.print(f"Peak {format_bytes(answer.call.peak)}.")
    if not answer.fits:
        lack = f"It does not fit: {format_bytes(answer.free or 0)} are free. Take fewer tokens, or more ranks."
        console.print(lack, style="red")
    console.print(f"\n{answer.snippet}")


def _print_findings(findings: Any) -> None:
    from logitless.tools.bench.tables import text_table

    console = _console()
    facts = [*findings.versions.items(), ("device", findings.device), ("auto", findings.chosen)]
    console.print(text_table((), [(name, value or "not installed") for name, value in facts]))
    console.print("\nBackends", style="bold")
    console.print(text_table((), [(b.name, "runs" if b.runs else "does not run", b.reason) for b in findings.backends]))
    console.print("\nLargest error against float64; of gradients, relative to their size", style="bold")
    tried = [(f.path, f.backend, f.dtype, *f.errors, "ok" if f.ok else "WRONG") for f in findings.exactness]
    lines = text_table(("path", "backend", "dtype", "values", "gradients", ""), tried).splitlines()
    for line, ok in zip(lines, (None, None, *(f.ok for f in findings.exactness)), strict=True):
        console.print(line, style={None: None, True: "green", False: "bold red"}[ok])
    console.print("\nAdapters", style="bold")
    hosts = [(h.name, h.found or "not installed", ", ".join(h.tested) or "no version") for h in findings.hosts]
    verdicts = [h.verdict for h in findings.hosts]
    lines = [(*host[:2], f"tested with {host[2]}", verdict) for host, verdict in zip(hosts, verdicts, strict=True)]
    console.print(text_table((), lines))
    verdict = "All that runs here is exact." if findings.ok else "Something that runs here is wrong."
    console.print(f"\n{verdict}", style="green" if findings.ok else "bold red")


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr; plain lines where stderr is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    columns = (BarColumn(bar_width=24), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
    shown = (*columns, TextColumn("{task.description}"))
    # Drawn only between measurements: a thread that redraws the bar would disturb the times.
    with Progress(*shown, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda text: bar.update(task, description=text, advance=1, refresh=True)


def _print_records(table: str) -> None:
    """On a terminal, headlines in bold and our lines in green."""
    for line in table.splitlines():
        ours = line.startswith("logitless") or " logitless" in line
        _console().print(line, style="bold" if ": T=" in line else "green" if ours else None)


def _print_sweep(results: list[Any], out: Path, as_json: bool) -> None:
    from logitless.tools.bench.sweep import sweep_table
    from logitless.tools.plots import draw_sweep

    if as_json:
        print("\n".join(record.to_json() for record in results))
    else:
        _print_records(sweep_table(results))
    if any(record.total_ms is not None for record in results):
        drawn = draw_sweep(results, out.parent, out.stem)
        print(f"\nRecords in {out}, figures in {', '.join(map(str, drawn))}", file=sys.stderr)


def _bench_against(base: str, request: Any, as_json: bool) -> None:
    from logitless.tools.bench import base as against

    with _progress(against.num_steps(request)) as report:
        comparison = against.compare_with(base, request, report)
    if as_json:
        print("\n".join(compared.to_json() for compared in comparison.compared))
    else:
        print(against.comparison_table(comparison))
    raise typer.Exit(int(comparison.broken))


def _require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise LogitlessError("figures need matplotlib. Install it with pip install 'logitless[bench]'.")


if __name__ == "__main__":
    main()
