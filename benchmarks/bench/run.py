"""The loop: for each case, check every provider against float64, then time those that passed, interleaved.

    fill inputs  ->  float64 truth at sampled rows  ->  per provider: run, compare, peak memory
                 ->  repeats x providers: restore the inputs (untimed), time forward and backward

The inputs are logits, or hidden states and the head's weight; from hidden states each round also times the products
that no provider avoids.

A wrong provider gets no time. If a provider runs out of memory or raises, its record says so, and the run goes on.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.bench.cases import CASES, Case, select_cases, select_names
from benchmarks.bench.inputs import Batch, Trained, fill_logits, fill_operands, make_batch
from benchmarks.bench.judgement import complaint_of
from benchmarks.bench.linear_providers import LINEAR_PROVIDERS
from benchmarks.bench.linear_truth import sample_linear_truth, with_loss
from benchmarks.bench.measure import (
    Times,
    Truth,
    compare,
    gemm_times,
    peak_bytes,
    sample_truth,
    warm_up,
)
from benchmarks.bench.providers import PROVIDERS, Provider, Score, Scores, add_peers
from benchmarks.bench.records import Environment, Record, append_records, records_folder
from logitless.errors import LogitlessError
from logitless.memory.meta import hand_over
from logitless.tools.outputs import text_table
from logitless.tools.stopwatch import StopWatch, copy_bandwidth

Report = Callable[[str], None]
"""Told what is about to happen, at most ``Selection.num_steps`` times."""

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """The options of ``python -m benchmarks bench``.

    Attributes:
        cases, providers: names or shell patterns; none means all that suit the device.
        device: ``"cuda"`` or ``"cpu"``; None takes CUDA where torch sees a device.
        out: file to append to; None means ``<device>.jsonl`` in :func:`records_folder`.
        repeats: timed repeats per provider.
        peers: folder of unpacked packages to import peers from.
        commit: commit to record where the code has no git history.
    """

    cases: Sequence[str] = ()
    providers: Sequence[str] = ()
    device: str | None = None
    out: Path | None = None
    repeats: int = 10
    peers: Path | None = None
    commit: str | None = None

    def resolve(self) -> Selection:
        """The cases, providers and device that the options name; raises if a name fits nothing."""
        if self.repeats < 1:
            raise LogitlessError(f"bench: repeats must be 1 or more but is {self.repeats}.")
        if self.device not in (None, "cuda", "cpu"):
            raise LogitlessError(f'bench: device must be "cuda" or "cpu" but is {self.device!r}.')
        if self.device == "cuda" and not torch.cuda.is_available():
            raise LogitlessError('bench: device is "cuda" but torch sees no CUDA device. Use --device cpu.')
        if self.peers is not None:
            add_peers(self.peers)
        device = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        names = select_names(self.providers or ["*"], list(PROVIDERS | LINEAR_PROVIDERS), "provider")
        return Selection(
            select_cases(self.cases, device.type),
            {n: PROVIDERS[n] for n in names if n in PROVIDERS},
            device,
            self.repeats,
            self.commit,
            {n: LINEAR_PROVIDERS[n] for n in names if n in LINEAR_PROVIDERS},
        )


@dataclass(frozen=True)
class Selection:
    """The cases and providers of a request: ``providers`` score logits, ``linear_providers`` hidden states.

    Cases of a trained model are made from ``trained``.
    """

    cases: Sequence[Case]
    providers: Mapping[str, Provider]
    device: torch.device
    repeats: int
    commit: str | None = None
    linear_providers: Mapping[str, Provider] = field(default_factory=dict)
    trained: Trained | None = None

    @property
    def num_steps(self) -> int:
        """How often :func:`run` reports at most: the length of a progress bar."""
        return 1 + sum(1 + len(self.providers_of(case)) + 1 + self.repeats for case in self.cases)

    def providers_of(self, case: Case) -> Mapping[str, Provider]:
        """The providers that start from logits or from hidden states, as the case does."""
        if case.hidden is None:
            return self.providers
        return {n: p for n, p in self.linear_providers.items() if case.loss in p.cases}


@dataclass(frozen=True, eq=False)
class Workspace:
    """The inputs of a case, and a master copy to restore them from where memory allows.

    Attributes:
        batch: rows, targets and upstream gradients.
        inputs: the logits, or the hidden states and the weight, which providers may overwrite.
        master: copies of the inputs.
    """

    batch: Batch
    inputs: tuple[Tensor, ...]
    master: tuple[Tensor, ...] | None

    @staticmethod
    def make(case: Case, device: torch.device, trained: Trained | None = None) -> Workspace:
        batch = make_batch(case, device, trained=trained)
        sizes = [(case.tokens, case.vocab)]
        if case.hidden is not None:
            sizes = [(case.tokens, case.hidden), (case.vocab, case.hidden)]
        inputs = tuple(torch.empty(size, dtype=case.torch_dtype, device=device) for size in sizes)
        _fill(batch, inputs)
        if case.loss:
            batch = with_loss(batch, *inputs)
        fits = 5 * sum(x.nbytes for x in inputs) < _memory_of(device)
        return Workspace(batch, inputs, tuple(x.clone() for x in inputs) if fits else None)

    def restore(self) -> None:
        """Put the inputs back after a provider that may have overwritten them."""
        if self.master is None:
            _fill(self.batch, self.inputs)
            return
        for x, kept in zip(self.inputs, self.master, strict=True):
            x.copy_(kept)

    @property
    def device(self) -> torch.device:
        return self.inputs[0].device

    @cached_property
    def truth(self) -> Truth:
        """Float64 results and gradients at sampled tokens."""
        return _truth(self.batch, self.inputs)

    @cached_property
    def mean_truth(self) -> Truth:
        """The truth for providers that compute a mean loss."""
        return _truth(self.batch.with_mean_loss(), self.inputs)


@dataclass(frozen=True)
class Contender:
    """A provider that gave the right numbers and can be timed."""

    record: Record
    score: Score


def execute(request: Request, report: Report) -> tuple[list[Record], Path]:
    """Run a request; append its records to a file, case by case; return the records and the file's path."""
    selection = request.resolve()
    here = Environment.here(selection.device, selection.commit)
    out = request.out or records_folder() / f"{here.slug}.jsonl"
    records: list[Record] = []
    for of_case in run(selection, report):
        append_records(out, of_case)
        records += of_case
    return records, out


def listing() -> str:
    """Tables of all cases and providers."""
    sizes = ("case", "T", "V", "D", "dtype", "logits")
    cases = [(c.name, str(c.tokens), str(c.vocab), str(c.hidden or ""), c.dtype, c.logits) for c in CASES.values()]
    parts = [text_table(sizes, cases)]
    for start, providers in (("logits", PROVIDERS), ("hidden states", LINEAR_PROVIDERS)):
        rows = [(name, p.computes, "CUDA only" if p.cuda_only else "") for name, p in providers.items()]
        parts.append(text_table((f"provider from {start}", "computes at most", ""), rows))
    return "\n\n".join(parts)


def listing_json() -> dict[str, Any]:
    """All cases and providers, as JSON values."""
    starts = {"logits": PROVIDERS, "hidden states": LINEAR_PROVIDERS}
    return {
        "cases": [asdict(case) for case in CASES.values()],
        "providers": [
            {"name": name, "from": start, "computes": provider.computes, "cuda_only": provider.cuda_only}
            for start, known in starts.items()
            for name, provider in known.items()
        ],
    }


def run(selection: Selection, report: Report = lambda text: None) -> Iterator[list[Record]]:
    """Measure every provider on every case; yields the records of one case at a time."""
    environment = Environment.here(selection.device, selection.commit)
    report(f"copy bandwidth of {environment.device}")
    bandwidth = copy_bandwidth(selection.device)
    for case in selection.cases:
        providers = selection.providers_of(case)
        if not providers:
            continue
        report(f"{case.name}: making its inputs")
        space = _make_workspace(case, selection.device, selection.trained)
        if space is None:
            blank = _blank_record(case, round(case.tokens * case.response), bandwidth, environment)
            lost = replace(blank, status="out of memory", detail="the inputs themselves do not fit")
            yield [replace(lost, provider=name) for name in providers]
            continue
        yield _run_case(space, selection, _blank_record(case, len(space.batch.rows), bandwidth, environment), report)
        del space
        _release()


def step(score: Score, batch: Batch, buffer: Tensor, clock: StopWatch | None = None) -> tuple[Scores, Tensor | None]:
    """:func:`take_step` on logits: the scores, and the gradient of the logits or None."""
    scores, gradients = take_step(score, batch, (buffer,), clock)
    return scores, gradients[0] if gradients else None


def take_step(
    score: Score, batch: Batch, inputs: tuple[Tensor, ...], clock: StopWatch | None = None
) -> tuple[Scores, tuple[Tensor, ...]]:
    """Forward and, if the case asks for it, backward from given upstream gradients.

    Returns:
        The scores, and the gradients of all inputs but a frozen weight; no gradients without backward.
    """
    mark = clock.mark if clock else lambda: None
    if not batch.case.backward:
        with torch.no_grad():
            mark()
            scores = score(batch, *inputs)
            mark()
        return scores, ()
    frozen = inputs[1:] if batch.case.frozen else ()
    wanted = tuple(hand_over(x) for x in inputs[: len(inputs) - len(frozen)])
    mark()
    scores = score(batch, *wanted, *frozen)
    mark()
    if batch.case.loss:
        loss = batch.loss_of(scores.logprob, scores.entropy) if scores.loss is None else scores.loss
        gradients = torch.autograd.grad(loss, wanted, allow_unused=scores.weight_grad is not None)
        mark()
        return scores, gradients if scores.weight_grad is None else (gradients[0], scores.weight_grad)
    # For a mean loss, the gradient of the loss itself, which its authors make in forward.
    g_logprob = batch.g_logprob if scores.logprob.dim() else -torch.ones((), device=scores.logprob.device)
    outputs, upstream = [scores.logprob], [g_logprob.to(scores.logprob.dtype)]
    if scores.entropy is not None and scores.entropy.requires_grad:
        outputs.append(scores.entropy)
        upstream.append(batch.g_entropy.to(scores.entropy.dtype))
    gradients = torch.autograd.grad(outputs, wanted, upstream)
    mark()
    return scores, gradients


def _fill(batch: Batch, inputs: tuple[Tensor, ...]) -> None:
    fill_logits(batch, *inputs) if batch.case.hidden is None else fill_operands(batch, *inputs)


def _truth(batch: Batch, inputs: tuple[Tensor, ...]) -> Truth:
    if batch.case.hidden is None:
        return sample_truth(batch, inputs[0])
    hidden, weight = inputs
    return sample_linear_truth(batch, hidden, weight)


def _make_workspace(case: Case, device: torch.device, trained: Trained | None) -> Workspace | None:
    try:
        return Workspace.make(case, device, trained)
    except torch.OutOfMemoryError:
        return None


def _run_case(space: Workspace, selection: Selection, blank: Record, report: Report) -> list[Record]:
    case = space.batch.case
    # The truth comes first: providers may overwrite the inputs.
    _ = space.truth
    records: dict[str, Record] = {}
    contenders: dict[str, Contender] = {}
    for name, provider in selection.providers_of(case).items():
        report(f"{case.name}: checking {name}")
        start = replace(blank, provider=name, computes=provider.entropy_of(case.entropy), detail=provider.note)
        outcome = _qualify(provider, start, space)
        records[name] = outcome.record if isinstance(outcome, Contender) else outcome
        if isinstance(outcome, Contender):
            contenders[name] = outcome
    timed, gemm_ms = _time_interleaved(contenders, space, selection.repeats, report)
    return [_with_floor(record, case, gemm_ms) for record in (records | timed).values()]


def _qualify(provider: Provider, record: Record, space: Workspace) -> Contender | Record:
    """Load, compare one run with the truth, measure the peak of another; a provider that fails gives its record."""
    if provider.cuda_only and space.device.type != "cuda":
        return replace(record, status="absent", detail="runs on CUDA devices only")
    try:
        score = provider.load()
    except ImportError as error:
        return replace(record, status="absent", detail=_first_line(error))
    return _guarded(record, lambda: _check(score, record, space, provider.rounds))


def _check(score: Score, record: Record, space: Workspace, rounds: bool) -> Contender | Record:
    space.restore()
    scores, gradients = take_step(score, space.batch, space.inputs)
    truth = space.truth if scores.logprob.dim() else space.mean_truth
    gradient, d_weight = (*gradients, None, None)[:2]
    errors = compare(truth, scores.logprob, scores.entropy, gradient, record.computes, d_weight)
    complaint = complaint_of(errors, scores, truth, space.batch.case, rounds)
    record = replace(record, errors=errors._asdict())
    if complaint:
        return replace(record, status="wrong", detail=complaint)
    if scores.logprob.dtype != torch.float32:
        remark = f"results in {str(scores.logprob.dtype).removeprefix('torch.')}"
        record = replace(record, detail="; ".join(filter(None, [record.detail, remark])))
    del scores, gradients, gradient, d_weight
    space.restore()
    peak = peak_bytes(lambda: take_step(score, space.batch, space.inputs), space.device)
    return Contender(replace(record, peak_bytes=peak), score)


def _time_interleaved(
    contenders: Mapping[str, Contender], space: Workspace, repeats: int, report: Report
) -> tuple[dict[str, Record], list[float] | None]:
    """Rounds over all contenders, so that clocks and caches drift alike for all. The first round warms up.

    From hidden states, the times of one to four products come with the records.
    """
    records = {name: contender.record for name, contender in contenders.items()}
    turns: list[str | None] = [None, *contenders]
    gemms: list[list[float]] = []
    laps: dict[str, list[Times]] = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        report(f"{space.batch.case.name}: " + (f"timing, round {turn} of {repeats}" if turn else "warming up"))
        # Another order every round, with the products (None) among them: after light work the chip is cooler.
        for name in random.Random(turn).sample(turns, len(turns)):
            if name is None:
                gemms += _products(space) if turn else []
                continue
            if records[name].status != "ok":
                continue
            score = contenders[name].score
            outcome = _guarded(records[name], lambda score=score: _lap(score, space))
            if isinstance(outcome, Record):
                records[name] = outcome
            elif turn:
                laps[name].append(outcome)
    medians = [statistics.median(times) for times in zip(*gemms, strict=True)] or None
    return {name: _with_times(record, laps[name], space) for name, record in records.items()}, medians


def _products(space: Workspace) -> list[list[float]]:
    """Times of the products, once; nothing where the case has no products or no room for their results."""
    if space.batch.case.hidden is None:
        return []
    hidden, weight = space.inputs
    try:
        return [gemm_times(hidden if space.batch.index is None else hidden[space.batch.index], weight)]
    except torch.OutOfMemoryError:
        _release()
        return []


def _lap(score: Score, space: Workspace) -> Times:
    clock = StopWatch(space.device)
    # On a GPU the copy still runs while the CPU launches the step: launch costs hide behind it, as they do behind a
    # model's forward. Without a master copy the inputs keep what the last provider wrote: floats either way.
    if space.master is not None:
        space.restore()
    if space.batch.case.hidden is not None and space.device.type == "cuda":
        warm_up(*space.inputs)
    take_step(score, space.batch, space.inputs, clock)
    times = clock.laps_ms()
    return Times(times[0], sum(times))


def _guarded(record: Record, work: Callable[[], T]) -> T | Record:
    """The result of ``work``, or the record of its failure."""
    try:
        return work()
    except torch.OutOfMemoryError as error:
        outcome = replace(record, status="out of memory", detail=_first_line(error))
    # Peers may raise anything; the record holds the error, and the run goes on.
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
        repeats=len(laps),
        refreshed=refreshed,
        detail="; ".join(filter(None, [record.detail, remark])),
    )


def _with_floor(record: Record, case: Case, gemm_ms: list[float] | None) -> Record:
    """The record with the floor that products set, if any, and its time as a multiple of the floor."""
    if gemm_ms is not None:
        floor = gemm_ms[case.num_gemms - 1]
        record = replace(record, gemm_ms=gemm_ms, forward_floor_ms=gemm_ms[0], floor_ms=floor)
    if record.total_ms is None or record.floor_ms is None:
        return record
    return replace(record, ratio=record.total_ms / record.floor_ms)


def _blank_record(case: Case, num_rows: int, bandwidth: float, environment: Environment) -> Record:
    forward = total = None
    if case.hidden is None:
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
