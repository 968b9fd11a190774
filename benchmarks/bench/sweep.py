"""Peak memory and time over a grid of sizes: ``python -m benchmarks sweep``.

    Grid    lists of tokens, vocabulary, response fraction, entropy, hidden size, memory: every combination is a case
    Sweep   cases x providers, each point measured in a separate process (``point``), each record appended at once

A point whose record is in the file, from this device, commit and these versions, is not measured again: a sweep that
was stopped goes on where it was. Running out of memory is an answer and is kept; a point that failed is tried again.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from benchmarks.bench.cases import DTYPES, Case, select_names
from benchmarks.bench.linear_providers import LINEAR_PROVIDERS
from benchmarks.bench.point import Point, measure_apart
from benchmarks.bench.providers import PROVIDERS, Provider
from benchmarks.bench.records import (
    UNSTEADY,
    Environment,
    Record,
    append_records,
    failures,
    footnotes,
    read_records,
    worst,
)
from benchmarks.bench.run import Report, Request
from logitless.errors import LogitlessError
from logitless.spec import EntropyMode, format_bytes, parse_memory
from logitless.tools.outputs import default_folder, text_table

T = TypeVar("T")

# Sizes at which training is known to run out of memory, and shares of response to measure.
KNOWN_TOKENS, KNOWN_VOCAB = 205280, 76032
FRACTIONS = (1.0, 0.5, 0.25, 0.1, 0.03)
# A GPU must hold the logits and a gradient of their size; a CPU also five more such tensors of plain torch, and finish
# in a minute.
CUDA_SHARE, CPU_SHARE, CPU_LOGITS = 0.47, 0.1, 128 << 20
# Share of the free memory that a point may take on a CPU.
LIMIT_SHARE = 0.8
ENTROPIES: dict[str, EntropyMode] = {"none": None, "value": "value", "grad": "grad"}
FINISHED = ("ok", "wrong", "out of memory")
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Grid:
    """Lists of sizes. Every combination is a case.

    Attributes:
        tokens, vocab, response, entropy: as in :class:`~benchmarks.bench.cases.Case`.
        hidden: sizes of the hidden states to start from; empty where the cases start from logits.
        memory: working memory for providers that take a bound, from hidden states; empty for their default.
        dtype: dtype of the logits, or of the hidden states and the weight.
        backward: forward and backward, or forward alone.
    """

    tokens: Sequence[int]
    vocab: Sequence[int]
    response: Sequence[float] = FRACTIONS
    entropy: Sequence[EntropyMode] = ("grad",)
    hidden: Sequence[int] = ()
    memory: Sequence[str] = ()
    dtype: str = "float32"
    backward: bool = True

    def __post_init__(self) -> None:
        for name in ("tokens", "vocab", "response", "entropy"):
            if not getattr(self, name):
                raise LogitlessError(f"sweep: {name} needs at least one value.")
        for name in ("tokens", "vocab", "hidden"):
            if any(size < 1 for size in getattr(self, name)):
                raise LogitlessError(f"sweep: {name} must be 1 or more but is {list(getattr(self, name))}.")
        if self.memory and not self.hidden:
            raise LogitlessError("sweep: memory bounds the tiles of hidden states times weight. Give --hidden with it.")
        if not self.backward and "grad" in self.entropy:
            raise LogitlessError('sweep: entropy "grad" needs a backward. Leave --forward-only out, or take "value".')
        for text in self.memory:
            parse_memory(text)

    def cases(self, device: Literal["cuda", "cpu"]) -> list[Case]:
        """One case per combination, the last list running fastest."""
        lists = (self.tokens, self.vocab, self.hidden or (None,), self.memory or (None,), self.entropy, self.response)
        names = ("tokens", "vocab", "hidden", "memory", "entropy", "response")
        made = []
        for values in itertools.product(*map(dict.fromkeys, lists)):
            sizes: dict[str, Any] = dict(zip(names, values, strict=True))
            case = Case("", device, dtype=self.dtype, backward=self.backward, **sizes)
            made.append(replace(case, name=_name(case)))
        return made


def _name(case: Case) -> str:
    """A name with every size that a grid can vary, so that cases of one name are the same."""
    parts = [f"sweep-t{case.tokens}-v{case.vocab}", f"d{case.hidden}" if case.hidden else "", SHORT[case.dtype]]
    parts += [case.memory or "", "" if case.backward else "forward", case.entropy or "logprob"]
    return "-".join(filter(None, [*parts, f"{case.response * 100:g}pct"]))


def default_tokens(device: Literal["cuda", "cpu"], free: int, row_bytes: int) -> int:
    """The known T, or fewer: logits take under half of a GPU, or a tenth of a CPU's free memory.

    >>> default_tokens("cuda", 139 << 30, 76032 * 4), default_tokens("cpu", 23 << 30, 76032 * 4)
    (205280, 384)
    """
    most = CUDA_SHARE * free if device == "cuda" else min(CPU_LOGITS, CPU_SHARE * free)
    rows = int(most / row_bytes)
    return KNOWN_TOKENS if rows >= KNOWN_TOKENS else max(64, rows // 64 * 64)


def free_bytes(device: torch.device) -> int:
    """Free memory of the device; all memory of the machine where the free part is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    table = Path("/proc/meminfo")
    if table.exists():
        lines = dict(line.split(":", 1) for line in table.read_text(encoding="ascii").splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    # A container may be given less than the machine has.
    most, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if most.exists() and (text := most.read_text(encoding="ascii").strip()) != "max":
        free = min(free, int(text) - int(used.read_text(encoding="ascii")))
    return free


def choose_providers(patterns: Sequence[str], grid: Grid, device: str) -> list[str]:
    """Providers by pattern, out of those that start from logits or hidden states as the grid does, on the device.

    No pattern means all on a GPU. On a CPU it means plain torch and ours: loading a peer takes longer than many points.
    """
    known: Mapping[str, Provider] = LINEAR_PROVIDERS if grid.hidden else PROVIDERS
    names = [n for n, p in known.items() if False in p.cases and (device == "cuda" or not p.cuda_only)]
    return select_names(patterns or (["*"] if device == "cuda" else ["torch", "logitless*"]), names, "provider")


@dataclass(frozen=True)
class Sweep:
    """The points of a sweep, and the file of their records."""

    points: Sequence[Point]
    environment: Environment
    out: Path

    @staticmethod
    def of(grid: Grid, providers: Sequence[str], device: torch.device, out: Path, **options: Any) -> Sweep:
        """Every case of the grid with every provider; ``options`` go to :class:`Point`."""
        kind = "cuda" if device.type == "cuda" else "cpu"
        points = [Point(case, name, **options) for case in grid.cases(kind) for name in providers]
        return Sweep(points, Environment.here(device), out)

    def finished(self) -> dict[tuple[str, str], Record]:
        """Records in the file that need not be measured again, by case and provider."""
        here = self.environment
        found = {}
        for record in read_records(self.out) if self.out.exists() else []:
            where = record.environment
            same = all(where[name] == getattr(here, name) for name in ("device", "commit", "dirty"))
            # A package that is there for one of them only has nothing to do with the other.
            same = same and all(where["versions"].get(name, x) == x for name, x in here.versions.items())
            if same and record.status in FINISHED:
                found[record.case["name"], record.provider] = record
        return found


@dataclass(frozen=True)
class Options:
    """The options of the sweep: lists are texts such as ``"1024,2048"``; None means a size that fits."""

    tokens: str | None = None
    vocab: str = str(KNOWN_VOCAB)
    response: str = ",".join(f"{x:g}" for x in FRACTIONS)
    entropy: str = "grad"
    hidden: str = ""
    memory: str = ""
    dtype: str = "float32"
    backward: bool = True
    providers: Sequence[str] = ()
    device: str | None = None
    repeats: int = 3
    peers: Path | None = None


def resolve_sweep(options: Options, out: Path | None = None) -> Sweep:
    """The points that the options name, with default sizes that suit this machine."""
    # Checks device and repeats as ``bench`` does.
    device = Request(device=options.device, repeats=options.repeats).resolve().device
    kind, free = "cuda" if device.type == "cuda" else "cpu", free_bytes(device)
    if options.dtype not in SHORT:
        raise LogitlessError(f"sweep: dtype must be one of {list(SHORT)} but is {options.dtype!r}.")
    vocab = parse_list(options.vocab, "vocab", int)
    row_bytes = max([1, *vocab]) * DTYPES[options.dtype].itemsize
    grid = Grid(
        parse_list(options.tokens, "tokens", int) if options.tokens else [default_tokens(kind, free, row_bytes)],
        vocab,
        parse_list(options.response, "response", float),
        parse_list(options.entropy, "entropy", ENTROPIES.__getitem__),
        parse_list(options.hidden, "hidden", int),
        parse_list(options.memory, "memory", str),
        options.dtype,
        options.backward,
    )
    names = choose_providers(options.providers, grid, kind)
    more = {"repeats": options.repeats, "peers": None if options.peers is None else str(options.peers.resolve())}
    limit = int(LIMIT_SHARE * free) if kind == "cpu" else None
    return Sweep.of(grid, names, device, out or default_folder() / f"sweep-{kind}.jsonl", limit=limit, **more)


def parse_list(text: str, name: str, read: Callable[[str], T]) -> list[T]:
    """
    >>> parse_list("1024, 2048", "tokens", int)
    [1024, 2048]
    """
    try:
        return [read(part.strip()) for part in text.split(",") if part.strip()]
    except (ValueError, KeyError):
        wanted = "none, value or grad" if name == "entropy" else "numbers such as 1024,2048"
        raise LogitlessError(f"sweep: {name} must be a list of {wanted} but is {text!r}.") from None


def run_sweep(sweep: Sweep, report: Report = lambda text: None) -> tuple[list[Record], frozenset[int]]:
    """Measure the points that the file lacks, appending each record.

    A provider that is absent at its first point is not tried again, and has no record in the file.

    Returns:
        The records of all points, and which of them are from an earlier run, by their places in the list.
    """
    mend(sweep.out)
    finished, absent = sweep.finished(), set()
    records: list[Record] = []
    earlier = set()
    for point in sweep.points:
        record = finished.get((point.case.name, point.provider))
        report(f"{point.case.name}: {point.provider}" + ("" if record is None else " (measured before)"))
        if record is not None:
            earlier.add(len(records))
        if record is None and point.provider not in absent:
            record = measure_apart(point, sweep.environment)
            if record.status == "absent":
                absent.add(point.provider)
            else:
                append_records(sweep.out, [record])
        records += [record] if record is not None else []
    return records, frozenset(earlier)


def mend(path: Path) -> None:
    """Drop the last line of the file if a kill cut it off."""
    if not path.exists():
        return
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        path.write_bytes(whole)


def exit_code(records: Iterable[Record]) -> int:
    """1 if a provider was wrong or failed. Running out of memory is an answer."""
    return int(any(record.status in ("wrong", "failed") for record in records))


AXES = {"tokens": "T", "vocab": "V", "hidden": "D", "memory": "memory", "entropy": "entropy", "response": "response"}


def varying(records: Sequence[Record]) -> list[str]:
    """The fields of their cases in which the records differ, in the order of ``AXES``."""
    return [name for name in AXES if len({record.case[name] for record in records}) > 1]


def value_text(name: str, value: Any) -> str:
    """
    >>> value_text("response", 0.25), value_text("entropy", None), value_text("tokens", 4096)
    ('25%', 'none', '4096')
    """
    return f"{100 * value:.3g}%" if name == "response" else str(value or "none")


def fixed_text(records: Sequence[Record]) -> str:
    """The sizes and options that all records share, in words."""
    case, free = records[0].case, varying(records)
    sizes = [f"{AXES[n]}={value_text(n, case[n])}" for n in ("tokens", "vocab", "hidden") if n not in free and case[n]]
    work = "forward + backward" if case["backward"] else "forward only"
    rest = [f"{n} {value_text(n, case[n])}" for n in ("memory", "entropy", "response") if n not in free and case[n]]
    return ", ".join([" ".join([*sizes, case["dtype"]]), work, *rest])


def sweep_table(records: Sequence[Record], earlier: Collection[int] = ()) -> str:
    """One line per point: sizes that vary, provider, time, peak, peak over logits, errors; then failures.

    Args:
        earlier: places of the records that are from an earlier run, which get a star.
    """
    axes, run_ = varying(records), [r for r in records if r.status != "absent"]
    starred = [i in earlier for i, r in enumerate(records) if r.status != "absent"]
    columns = [*(AXES[n] for n in axes), "provider", "total ms", "peak", "of logits", "value err", "grad err"]
    cells = []
    for r, star in zip(run_, starred, strict=True):
        line = [*(value_text(n, r.case[n]) for n in axes), f"{r.provider} *" if star else r.provider]
        if r.total_ms is None or r.peak_bytes is None:
            cells.append([*line, r.status, *["-"] * 4])
            continue
        errors = [worst(r, "logprob", "entropy"), worst(r, "gradient", "weight", "weight_rest")]
        share = f"{100 * r.peak_bytes / r.logits_bytes:.1f}%"
        cells.append([*line, f"{r.total_ms:.2f}", format_bytes(r.peak_bytes), share, *errors])
    notes = [*dict.fromkeys(failures(r for r in run_ if r.status != "out of memory")), *footnotes(records)]
    unsteady = sum(r.total_range_ms is not None and r.total_range_ms[1] > UNSTEADY * r.total_range_ms[0] for r in run_)
    if unsteady:
        notes.append(f"unsteady machine: repeats vary by over half at {unsteady} of {len(run_)} points")
    if any(starred):
        notes.append(f"* measured by an earlier run: {sum(starred)} of {len(run_)} points")
    return "\n".join([fixed_text(records), "", text_table(columns, cells), "", *notes]).rstrip()
