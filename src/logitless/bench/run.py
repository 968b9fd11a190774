"""The loop: for each case, check every provider against float64, then time those that passed, interleaved.

    fill logits  ->  float64 truth at sampled rows  ->  per provider: run, compare, peak memory
                 ->  repeats x providers: restore the logits (untimed), time forward and backward

A wrong provider gets no time. One that runs out of memory or raises is recorded as such, and the run goes on.
"""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from logitless.bench.cases import CASES, Case, select_cases, select_names
from logitless.bench.inputs import Batch, fill_logits, hand_over, make_batch
from logitless.bench.measure import Errors, StopWatch, Times, Truth, compare, copy_bandwidth, peak_bytes, sample_truth
from logitless.bench.providers import PROVIDERS, Provider, Score, Scores, add_peers
from logitless.bench.records import Environment, Record, append_records
from logitless.errors import LogitlessError

# Wrong means clearly wrong: the float32 sums of plain torch itself are off by up to 3e-5 on CPU, and count as right.
VALUE_TOLERANCE = 1e-4
# Half precision rounds up to three times on the way: the upstream gradient, an intermediate and the result.
GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}

Report = Callable[[str], None]
"""Told what is about to happen, at most ``count_steps`` times."""

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """What the command line asked for.

    Attributes:
        cases, providers: names or shell patterns; none means all that suit the device.
        device: ``"cuda"`` or ``"cpu"``; None takes CUDA where there is one.
        out: file to append to; None means ``benchmarks/results/<device>.jsonl``.
        repeats: timed repeats per provider.
        peers: folder of unpacked packages to import peers from.
        commit: what to record where the code was copied without its git history.
    """

    cases: Sequence[str] = ()
    providers: Sequence[str] = ()
    device: str | None = None
    out: Path | None = None
    repeats: int = 10
    peers: Path | None = None
    commit: str | None = None

    def resolve(self) -> Plan:
        """The cases, providers and device this names; raises if it names none."""
        if self.repeats < 1:
            raise LogitlessError(f"bench: repeats must be 1 or more but is {self.repeats}.")
        if self.device not in (None, "cuda", "cpu"):
            raise LogitlessError(f'bench: device must be "cuda" or "cpu" but is {self.device!r}.')
        if self.device == "cuda" and not torch.cuda.is_available():
            raise LogitlessError('bench: device is "cuda" but torch sees no CUDA device. Use --device cpu.')
        if self.peers is not None:
            add_peers(self.peers)
        device = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        names = select_names(self.providers or ["*"], list(PROVIDERS), "provider")
        return Plan(
            select_cases(self.cases, device.type), {n: PROVIDERS[n] for n in names}, device, self.repeats, self.commit
        )


@dataclass(frozen=True)
class Plan:
    """A resolved request."""

    cases: Sequence[Case]
    providers: Mapping[str, Provider]
    device: torch.device
    repeats: int
    commit: str | None = None

    @property
    def num_steps(self) -> int:
        """How often :func:`run` reports at most: the length of a progress bar."""
        return 1 + len(self.cases) * (1 + len(self.providers) + 1 + self.repeats)


@dataclass(frozen=True, eq=False)
class Workspace:
    """The logits of a case: the buffer providers work on, and a master copy to restore it from where memory allows."""

    batch: Batch
    buffer: Tensor
    master: Tensor | None

    @staticmethod
    def make(case: Case, device: torch.device) -> Workspace:
        batch = make_batch(case, device)
        buffer = fill_logits(batch, torch.empty((case.tokens, case.vocab), dtype=case.torch_dtype, device=device))
        return Workspace(batch, buffer, buffer.clone() if 5 * case.logits_bytes < _memory_of(device) else None)

    def restore(self) -> None:
        """Put the logits back after a provider that may have overwritten them."""
        if self.master is None:
            fill_logits(self.batch, self.buffer)
        else:
            self.buffer.copy_(self.master)


@dataclass(frozen=True)
class Contender:
    """A provider that gave the right numbers and can be timed."""

    record: Record
    score: Score


def execute(request: Request, report: Report) -> tuple[list[Record], Path]:
    """Run a request and append its records, case by case, to the file whose path comes back with them."""
    plan = request.resolve()
    out = request.out or Path("benchmarks/results") / f"{Environment.here(plan.device, plan.commit).slug}.jsonl"
    records: list[Record] = []
    for of_case in run(plan, report):
        append_records(out, of_case)
        records += of_case
    return records, out


def listing() -> str:
    """Cases and providers, one per line."""
    cases = [f"  {c.name:<30} T={c.tokens} V={c.vocab} {c.dtype} {c.logits}" for c in CASES.values()]
    providers = [f"  {n:<30} {p.computes}{', CUDA only' if p.cuda_only else ''}" for n, p in PROVIDERS.items()]
    return "\n".join(["cases", *cases, "providers and the most they compute", *providers])


def run(plan: Plan, report: Report = lambda text: None) -> Iterator[list[Record]]:
    """Measure every provider on every case; yields the records of one case at a time."""
    environment = Environment.here(plan.device, plan.commit)
    report(f"copy bandwidth of {environment.device}")
    bandwidth = copy_bandwidth(plan.device)
    for case in plan.cases:
        report(f"{case.name}: making {case.tokens} x {case.vocab} logits")
        space = _make_workspace(case, plan.device)
        if space is None:
            blank = _blank_record(case, round(case.tokens * case.response), bandwidth, environment)
            lost = replace(blank, status="out of memory", detail="the logits themselves do not fit")
            yield [replace(lost, provider=name) for name in plan.providers]
            continue
        yield _run_case(space, plan, _blank_record(case, len(space.batch.rows), bandwidth, environment), report)
        del space
        _release()


def step(score: Score, batch: Batch, buffer: Tensor, clock: StopWatch | None = None) -> tuple[Scores, Tensor | None]:
    """Forward and, if the case asks for it, backward from given upstream gradients; the gradient comes last."""
    mark = clock.mark if clock else lambda: None
    if not batch.case.backward:
        with torch.no_grad():
            mark()
            scores = score(batch, buffer)
            mark()
        return scores, None
    logits = hand_over(buffer)
    mark()
    scores = score(batch, logits)
    mark()
    outputs, upstream = [scores.logprob], [batch.g_logprob.to(scores.logprob.dtype)]
    if scores.entropy is not None and scores.entropy.requires_grad:
        outputs.append(scores.entropy)
        upstream.append(batch.g_entropy.to(scores.entropy.dtype))
    (gradient,) = torch.autograd.grad(outputs, [logits], upstream)
    mark()
    return scores, gradient


def _make_workspace(case: Case, device: torch.device) -> Workspace | None:
    try:
        return Workspace.make(case, device)
    except torch.OutOfMemoryError:
        return None


def _run_case(space: Workspace, plan: Plan, blank: Record, report: Report) -> list[Record]:
    case = space.batch.case
    truth = sample_truth(space.batch, space.buffer)
    records: dict[str, Record] = {}
    contenders: dict[str, Contender] = {}
    for name, provider in plan.providers.items():
        report(f"{case.name}: checking {name}")
        start = replace(blank, provider=name, computes=provider.entropy_of(case.entropy), detail=provider.note)
        outcome = _qualify(provider, start, space, truth)
        records[name] = outcome.record if isinstance(outcome, Contender) else outcome
        if isinstance(outcome, Contender):
            contenders[name] = outcome
    records |= _time_interleaved(contenders, space, plan.repeats, report)
    return list(records.values())


def _qualify(provider: Provider, record: Record, space: Workspace, truth: Truth) -> Contender | Record:
    """Load, run once against the truth, run again for peak memory. What fails comes back as its record."""
    if provider.cuda_only and space.buffer.device.type != "cuda":
        return replace(record, status="absent", detail="runs on CUDA devices only")
    try:
        score = provider.load()
    except ImportError as error:
        return replace(record, status="absent", detail=_first_line(error))
    return _guarded(record, lambda: _check(score, record, space, truth))


def _check(score: Score, record: Record, space: Workspace, truth: Truth) -> Contender | Record:
    space.restore()
    scores, gradient = step(score, space.batch, space.buffer)
    errors = compare(truth, scores.logprob, scores.entropy, gradient, record.computes)
    complaint = _complaint(errors, scores, truth, space.batch.case)
    record = replace(record, errors=errors._asdict())
    if complaint:
        return replace(record, status="wrong", detail=complaint)
    if scores.logprob.dtype != torch.float32:
        remark = f"results in {str(scores.logprob.dtype).removeprefix('torch.')}"
        record = replace(record, detail="; ".join(filter(None, [record.detail, remark])))
    del scores, gradient
    space.restore()
    peak = peak_bytes(lambda: step(score, space.batch, space.buffer), space.buffer.device)
    return Contender(replace(record, peak_bytes=peak), score)


def _time_interleaved(
    contenders: Mapping[str, Contender], space: Workspace, repeats: int, report: Report
) -> dict[str, Record]:
    """Rounds over all contenders, so that clocks and caches drift over all of them alike. The first round warms up."""
    records = {name: contender.record for name, contender in contenders.items()}
    laps: dict[str, list[Times]] = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        report(f"{space.batch.case.name}: " + (f"timing, round {turn} of {repeats}" if turn else "warming up"))
        for name, contender in contenders.items():
            if records[name].status != "ok":
                continue
            outcome = _guarded(records[name], lambda contender=contender: _lap(contender.score, space))
            if isinstance(outcome, Record):
                records[name] = outcome
            elif turn:
                laps[name].append(outcome)
    return {name: _with_times(record, laps[name], space) for name, record in records.items()}


def _lap(score: Score, space: Workspace) -> Times:
    clock = StopWatch(space.buffer.device)
    # On a GPU the copy is still running while the host launches what follows: launch costs hide behind it, as they do
    # behind a model's forward. Without a master copy the buffer keeps what the last provider left: floats either way.
    if space.master is not None:
        space.restore()
    step(score, space.batch, space.buffer, clock)
    times = clock.laps_ms()
    return Times(times[0], sum(times))


def _guarded(record: Record, work: Callable[[], T]) -> T | Record:
    """The result of ``work``, or the record of its failure."""
    try:
        return work()
    except torch.OutOfMemoryError as error:
        outcome = replace(record, status="out of memory", detail=_first_line(error))
    # Peers are other people's code and may raise anything; the record says what, and the run goes on.
    except Exception as error:
        outcome = replace(record, status="failed", detail=f"{type(error).__name__}: {_first_line(error)}")
    _release()
    return outcome


def _with_times(record: Record, laps: Sequence[Times], space: Workspace) -> Record:
    if record.status != "ok" or not laps:
        return replace(record, peak_bytes=None)
    totals = [lap.total_ms for lap in laps]
    total = statistics.median(totals)
    refreshed = space.master is not None
    remark = "" if refreshed else "logits not restored between repeats"
    return replace(
        record,
        forward_ms=statistics.median(lap.forward_ms for lap in laps),
        total_ms=total,
        total_range_ms=(min(totals), max(totals)),
        ratio=total / record.floor_ms,
        repeats=len(laps),
        refreshed=refreshed,
        detail="; ".join(filter(None, [record.detail, remark])),
    )


def _blank_record(case: Case, num_rows: int, bandwidth: float, environment: Environment) -> Record:
    forward, total = (moved / bandwidth * 1e3 for moved in case.bytes_moved(num_rows))
    return Record(
        case=asdict(case),
        provider="",
        computes=case.entropy,
        status="ok",
        detail="",
        rows=num_rows,
        logits_bytes=case.logits_bytes,
        forward_floor_ms=forward,
        floor_ms=total,
        bandwidth=bandwidth,
        environment=asdict(environment),
    )


def _complaint(errors: Errors, scores: Scores, truth: Truth, case: Case) -> str:
    """What is wrong with the numbers, or nothing. Results in half precision are held to their own rounding."""
    dtypes = (case.torch_dtype, scores.logprob.dtype)
    checks = [
        ("log-prob", errors.logprob, _allowed(scores.logprob, truth.logprob)),
        ("entropy", errors.entropy, _allowed(scores.entropy, truth.entropy)),
        ("gradient", errors.gradient, max(GRADIENT_TOLERANCE[d] for d in dtypes)),
    ]
    # Written so that NaN, which is not below anything, is wrong.
    wrong = [(what, off, limit) for what, off, limit in checks if off is not None and not off <= limit]
    return ", ".join(f"{what} is off by {off:.1e}, allowed {limit:.1e}" for what, off, limit in wrong)


def _allowed(result: Tensor | None, truth: Tensor) -> float:
    if result is None or result.dtype == torch.float32:
        return VALUE_TOLERANCE
    return torch.finfo(result.dtype).eps * float(truth.abs().amax())


def _memory_of(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
