"""``logitless score``: arguments, progress and the summary."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Argument, Option

from logitless.tools.cli.shared import AsJson, Device, bar, first_explains, full_dtype, pick_device, ranks


def score(
    model: Annotated[Path, Argument(help="Hugging Face model directory.")],
    data: Annotated[Path, Argument(help="JSONL or Parquet file of prompts and responses.")],
    out: Annotated[Path, Option(help="JSONL or Parquet file to write.")],
    temperature: Annotated[float, Option(help="Temperature at which the responses were sampled.")] = 1.0,
    dtype: Annotated[str, Option(help="auto (the checkpoint's), bfloat16 (bf16), float16 or float32.")] = "auto",
    device: Device = None,
    tokens_per_batch: Annotated[int, Option(help="Most tokens of a micro-batch, with padding.")] = 16384,
    records_per_part: Annotated[int, Option(help="Records that are committed together.")] = 64,
    prompt_key: Annotated[str, Option(help="Field of the prompt: token ids or text.")] = "prompt",
    response_key: Annotated[str, Option(help="Field of the response.")] = "response",
    plain_text: Annotated[bool, Option("--plain-text", help="Do not open text prompts with special tokens.")] = False,
    memory: Annotated[str, Option(help="Working memory of the head.")] = "256MiB",
    messages_key: Annotated[str, Option(help="Field of chat messages, in place of both.")] = "messages",
    turns: Annotated[str, Option(help="Messages of the assistant to score: all or last.")] = "all",
    keep: Annotated[list[str] | None, Option(help="Field to copy to the results; may be repeated.")] = None,
    max_length: Annotated[
        int | None, Option(help="Most tokens of a record; default: as many as the model has positions.")
    ] = None,
    too_long: Annotated[str, Option(help="A longer record: stop, truncate (its response) or skip.")] = "stop",
    on_error: Annotated[str, Option(help="A bad record: stop, or skip and write it to OUT.rejects.jsonl.")] = "stop",
    stats: Annotated[
        str | None, Option(help="More columns, as top1,rank: also collision, mean_logit, logit_variance, max_logit.")
    ] = None,
    against: Annotated[str | None, Option(help="Field of the rollout engine's log-probs, to compare with.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Start anew, and replace the output.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compute log-prob and entropy of every response token of a file.

    The same command, run again after a kill or the repair of a bad record,
    goes on where it stopped. Under torchrun the ranks share the work.
    """
    from logitless.tools.score import Job, score_file
    from logitless.tools.score.against import compare, report_text, write
    from logitless.tools.score.files import check_field

    # Job checks these names, with everything else.
    choices: dict[str, Any] = {"turns": turns, "too_long": too_long, "on_error": on_error}
    with ranks() as (rank, local_rank, group), first_explains(rank):
        job = Job(
            model=model,
            data=data,
            out=out,
            temperature=temperature,
            dtype=full_dtype(dtype),
            device=pick_device(device, local_rank),
            tokens_per_batch=tokens_per_batch,
            records_per_part=records_per_part,
            prompt_key=prompt_key,
            response_key=response_key,
            special_tokens=not plain_text,
            memory=memory,
            overwrite=overwrite,
            messages_key=messages_key,
            keep=tuple(keep or ()),
            max_length=max_length,
            stats=tuple(name.strip() for name in stats.split(",")) if stats else (),
            **choices,
        )
        if against is not None:
            # Before everything is scored.
            check_field(job.source().path, against)
        with _score_progress(visible=rank == 0) as report:
            summary = score_file(job, report, group)
    if rank == 0:
        found = None if against is None else write(compare(data, out, against), out)
        print(report_text(summary, found, as_json))


@contextmanager
def _score_progress(*, visible: bool) -> Iterator[Callable[[Any], None]]:
    """Parts and tokens per second of this rank on stderr: a bar, or off a terminal a line every ten seconds."""
    console, start = Console(stderr=True), time.monotonic()

    def text(progress: Any) -> str:
        speed = progress.tokens / max(1e-9, time.monotonic() - start)
        return f"{progress.tokens} response tokens, {speed:.0f} tokens/s"

    if not visible:
        yield lambda progress: None
    elif console.is_terminal:
        with bar(console) as shown:
            task = shown.add_task("loading the model", total=None)
            yield lambda p: shown.update(task, completed=p.done, total=p.total, description=text(p))
    else:
        told = start - 10.0

        def line(progress: Any) -> None:
            nonlocal told
            if time.monotonic() - told >= 10.0 or progress.done == progress.total:
                told = time.monotonic()
                print(f"{progress.done}/{progress.total} parts, {text(progress)}", file=sys.stderr, flush=True)

        yield line
