"""Records of measurements: one JSON line each, and a table that fits in 100 columns.

Figures and tables are made from records alone, so that every published number can be traced to a commit, a device and
the versions that produced it.
"""

from __future__ import annotations

import json
import math
import platform
import re
import subprocess
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

import logitless
from benchmarks.bench.cases import Computed
from logitless.errors import LogitlessError
from logitless.spec import format_bytes
from logitless.tools.outputs import RECORDS, default_folder, in_checkout, slug_of, text_table

Status = Literal["ok", "wrong", "out of memory", "failed", "absent"]
COLUMNS = ("provider", "computes", "forward ms", "total ms", "x floor", "peak", "value err", "grad err")
COMPUTES = {None: "log-prob", "value": "+ entropy", "grad": "+ entropy grad", "mean": "mean loss"}
WIDTH = 100
ABSENT = "not installed"
PEERS = (
    *("cut-cross-entropy", "liger-kernel", "liger-cute-kernels", "megatron-core", "nvidia-cutlass-dsl"),
    *("quack-kernels", "transformer-engine", "transformers", "trl", "verl"),
)
"""Packages whose versions belong to a record, where they are installed or unpacked."""
UNSTEADY = 1.5


@dataclass(frozen=True)
class Environment:
    """Where and when a run took place."""

    device: str
    slug: str
    commit: str
    dirty: bool | None
    versions: dict[str, str]
    date: str

    @staticmethod
    def here(device: torch.device, commit: str | None = None) -> Environment:
        """This process, this checkout and the given device; ``commit`` is for code without its git history."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
        slug = slug_of(name) if device.type == "cuda" else "cpu"
        versions = {"torch": torch.__version__, "triton": _version("triton"), "python": platform.python_version()}
        versions["logitless"] = logitless.__version__
        versions |= {name: found for name in PEERS if (found := _version(name)) != ABSENT}
        commit, dirty = _git_state(Path(logitless.__file__).parent) if commit is None else (commit, None)
        return Environment(name, slug, commit, dirty, versions, datetime.now(UTC).isoformat(timespec="seconds"))


@dataclass(frozen=True)
class Record:
    """One provider on one case. Times and memory are None unless ``status`` is ``"ok"``.

    Attributes:
        case: the fields of the :class:`~benchmarks.bench.cases.Case`.
        provider: name of the provider.
        computes: the entropy that the provider computed: None, ``"value"`` or ``"grad"``; or ``"mean"``, a mean loss
            alone.
        status: ``"ok"``, or why there is no time.
        detail: the error, or a remark.
        rows: number of scored rows.
        logits_bytes: size of the logits, stored or not.
        errors: fields of :class:`~benchmarks.bench.measure.Errors`.
        peak_bytes: most bytes alive beyond the inputs: the logits, or the hidden states and the weight.
        forward_ms, total_ms: medians, to the end of forward and of backward.
        total_range_ms: fastest and slowest repeat.
        forward_floor_ms, floor_ms: time to move the bytes that must move, at the copy bandwidth of the same run; from
            hidden states, time of the products that must be made.
        ratio: ``total_ms / floor_ms``.
        bandwidth: bytes per second of a plain copy, reads and writes together.
        repeats: timed repeats.
        refreshed: whether the inputs were restored before each repeat.
        environment: commit, device, versions and date.
        gemm_ms: from hidden states, the times of one, two, three and four full products.
    """

    case: dict[str, Any]
    provider: str
    computes: Computed
    status: Status
    detail: str
    rows: int
    logits_bytes: int
    forward_floor_ms: float | None
    floor_ms: float | None
    bandwidth: float
    environment: dict[str, Any]
    errors: dict[str, float | None] = field(default_factory=dict)
    peak_bytes: int | None = None
    forward_ms: float | None = None
    total_ms: float | None = None
    total_range_ms: tuple[float, float] | None = None
    ratio: float | None = None
    repeats: int = 0
    refreshed: bool = True
    gemm_ms: list[float] | None = None

    def to_json(self) -> str:
        """One line of strict JSON; a number that is not finite becomes null."""
        return json.dumps(_finite(asdict(self)), allow_nan=False)


def append_records(path: Path, records: Iterable[Record]) -> None:
    """Add one line per record to the file, which is made, with its folder, if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(record.to_json() + "\n" for record in records)


def read_records(path: Path) -> list[Record]:
    """All records of a file, oldest first."""
    if not path.is_file():
        raise LogitlessError(f"there is no file of records {path}. Give one that bench or sweep wrote.")
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            records.append(_read_record(line, f"{path}, line {number}"))
    return records


def _read_record(line: bytes, place: str) -> Record:
    try:
        return Record(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise LogitlessError(f"{place} is no record of bench or sweep: {error}. Was the file cut off?") from None


def newest(records: Iterable[Record]) -> list[Record]:
    """The last record of every (case, provider), in the order of their first appearance."""
    last = {(record.case["name"], record.provider): record for record in records}
    return list(last.values())


def by_case(records: Iterable[Record]) -> list[list[Record]]:
    """Records grouped by case, cases in order of appearance."""
    order: dict[str, list[Record]] = {}
    for record in records:
        order.setdefault(record.case["name"], []).append(record)
    return list(order.values())


def headline(record: Record) -> str:
    """Sizes, work and floor of a record's case, in one sentence."""
    c = record.case
    work = "forward + backward" if c["backward"] else "forward only"
    entropy = "no entropy" if c["entropy"] is None else f"entropy {c['entropy']}"
    share = "all rows" if record.rows == c["tokens"] else f"{record.rows} of {c['tokens']} rows"
    size, extra = c.get("hidden"), ""
    if size is not None:
        extra = f" D={size}"
        work += ", frozen weight" if c["frozen"] else ""
        work += f", {c['memory']} allowed" if c["memory"] else ""
    return (
        f"{c['name']}: T={c['tokens']} V={c['vocab']}{extra} {c['dtype']} {c['logits']}, {work}, {entropy}, {share}; "
        f"logits {format_bytes(record.logits_bytes)}; {_floor(record)}"
    )


def table_rows(records: Iterable[Record]) -> list[tuple[str, ...]]:
    """Cells under ``COLUMNS`` for the records that have a time, fastest first."""
    timed = sorted((r for r in records if r.total_ms is not None), key=lambda r: r.total_ms or 0.0)
    return [
        (
            record.provider,
            COMPUTES[record.computes],
            _number(record.forward_ms),
            _number(record.total_ms),
            _number(record.ratio),
            "-" if record.peak_bytes is None else format_bytes(record.peak_bytes),
            worst(record, "logprob", "entropy"),
            worst(record, "gradient", "weight", "weight_rest"),
        )
        for record in timed
    ]


def failures(records: Iterable[Record]) -> list[str]:
    """Why a provider that was run has no time, one line each."""
    return [f"{r.provider}: {r.status}, {r.detail}" for r in records if r.status not in ("ok", "absent")]


def unsteady(records: Iterable[Record]) -> list[str]:
    """One line if some repeats took far longer than others: other work was on the machine."""
    spans = ((r.provider, *r.total_range_ms) for r in records if r.total_range_ms is not None)
    noisy = [f"{name} {low:.1f} to {high:.1f} ms" for name, low, high in spans if high > UNSTEADY * low]
    return [f"unsteady machine, repeats vary: {', '.join(noisy)}"] if noisy else []


def footnotes(records: Iterable[Record]) -> list[str]:
    """Remarks on providers, each once; absent providers are named with the reason."""
    parts = ((r, f"absent, {r.detail}" if r.status == "absent" else r.detail) for r in records)
    return list(dict.fromkeys(f"{r.provider}: {text}" for r, text in parts if text and r.status in ("ok", "absent")))


def records_table(records: Sequence[Record]) -> str:
    """All records as text, case by case, at most 100 columns wide."""
    groups = [line for group in by_case(records) for line in _text_group(group)]
    return "\n".join([*groups, *_wrapped(footnotes(records))])


def _floor(record: Record) -> str:
    """The floor, and the bandwidth or products that set it."""
    if record.floor_ms is None:
        return "no floor"
    if record.gemm_ms is None:
        return f"floor {record.floor_ms:.3g} ms at {record.bandwidth / 1e9:.4g} GB/s"
    number = record.gemm_ms.index(record.floor_ms) + 1
    times = ", ".join(_digits(ms) for ms in record.gemm_ms)
    return f"floor {_digits(record.floor_ms)} ms, that of {number} full products (1 to 4: {times} ms)"


def _text_group(group: Sequence[Record]) -> list[str]:
    rows = table_rows(group)
    lines = text_table(COLUMNS, rows).splitlines() if rows else []
    return [*_wrapped([headline(group[0])]), "", *lines, *_wrapped([*failures(group), *unsteady(group)]), ""]


def _wrapped(texts: Iterable[str]) -> list[str]:
    return [line for text in texts for line in textwrap.wrap(text, WIDTH, subsequent_indent="    ")]


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}" if x < 100 else f"{x:.0f}"


def _digits(x: float) -> str:
    """Three digits, or more before the point."""
    return f"{x:.3g}" if x < 1000 else f"{x:.0f}"


def where(records: Sequence[Record]) -> str:
    """Device and commit, or commits, of the records."""
    devices = dict.fromkeys(r.environment["device"] for r in records)
    commits = dict.fromkeys(r.environment["commit"] + ("+" if r.environment["dirty"] else "") for r in records)
    return f"{', '.join(devices)}, commit {', '.join(commits)}"


def records_folder() -> Path:
    """Where ``bench`` appends: the committed records in a checkout, elsewhere the default folder."""
    return RECORDS if in_checkout() else default_folder()


def worst(record: Record, *names: str) -> str:
    """The largest of some errors."""
    values = [v for name in names if (v := record.errors.get(name)) is not None]
    return f"{max(values):.0e}" if values else "-"


def _finite(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _finite(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ABSENT


def _cpu_name() -> str:
    table = Path("/proc/cpuinfo")
    text = table.read_text(encoding="utf-8") if table.exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return f"{model[1] if model else platform.machine()}, {torch.get_num_threads()} threads"


def _git_state(folder: Path) -> tuple[str, bool | None]:
    """Commit of the checkout, and whether tracked files differ from it; unknown outside of a checkout."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown", None
