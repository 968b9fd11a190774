"""``logitless demo``: one packed batch scored three ways on CPU, with time, peak memory and distance to float64.

The batch is what a policy update sees: samples of prompt and response laid end to end, logits peaked like a trained
model's, log-prob and entropy both in the loss. All three ways score the response rows only, so plain torch is not made
to look worse by prompt rows that some frameworks also send through the softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from logitless.bench.cases import Case
from logitless.bench.inputs import Batch, fill_logits
from logitless.bench.measure import Errors, StopWatch, compare, peak_bytes, truth_at
from logitless.bench.providers import PROVIDERS, Score
from logitless.bench.records import format_bytes
from logitless.bench.run import step
from logitless.plots import Bar, draw_pair
from logitless.rows import Rows
from logitless.spec import IGNORE

WAYS = {"plain torch": "torch", "logitless": "logitless", "logitless, overwriting": "logitless-overwrite"}
PROMPTS = (180, 420, 96, 305, 260, 512, 75, 210, 140, 259)
RESPONSES = (170, 90, 240, 310, 45, 128, 260, 66, 190, 140)
ROUNDS = 5


@dataclass(frozen=True)
class Outcome:
    """One way of scoring, measured; the time is the best of all rounds."""

    name: str
    seconds: float
    peak: int
    errors: Errors


@dataclass(frozen=True)
class Demo:
    """The batch and what came of it."""

    batch: Batch
    outcomes: Sequence[Outcome]

    @property
    def scale(self) -> str:
        """The batch in one sentence."""
        case, rows = self.batch.case, self.batch.rows
        return (
            f"{len(rows.held)} samples packed into {case.tokens} tokens, {len(rows)} of them response "
            f"({len(rows) / case.tokens:.0%}); vocabulary {case.vocab}, {case.dtype} logits of "
            f"{format_bytes(case.logits_bytes)}"
        )


def num_steps() -> int:
    """How often :func:`run_demo` reports."""
    return 1 + len(WAYS) * 2 + ROUNDS


def run_demo(
    report: Callable[[str], None],
    prompts: Sequence[int] = PROMPTS,
    responses: Sequence[int] = RESPONSES,
    vocab: int = 32768,
) -> Demo:
    """Score one batch in every way, forward and backward, and measure each."""
    report("making logits")
    batch = make_packed_batch(prompts, responses, vocab)
    master = fill_logits(batch, torch.empty(batch.case.tokens, vocab))
    buffer = torch.empty_like(master)
    scorers = {name: PROVIDERS[provider].load() for name, provider in WAYS.items()}
    errors, peaks = {}, {}
    for name, score in scorers.items():
        report(f"{name}: comparing every row with float64")
        errors[name] = _errors(score, batch, master, buffer)
        report(f"{name}: peak memory")
        buffer.copy_(master)
        peaks[name] = peak_bytes(lambda score=score: step(score, batch, buffer), "cpu")
    seconds: dict[str, list[float]] = {name: [] for name in scorers}
    for turn in range(ROUNDS):
        report(f"timing, round {turn + 1} of {ROUNDS}")
        for name, score in scorers.items():
            seconds[name].append(_seconds(score, batch, buffer.copy_(master)))
    return Demo(batch, [Outcome(name, min(seconds[name]), peaks[name], errors[name]) for name in WAYS])


def make_packed_batch(prompts: Sequence[int], responses: Sequence[int], vocab: int, seed: int = 0) -> Batch:
    """Random samples of the given lengths, packed, with random upstream gradients."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [p + r for p, r in zip(prompts, responses, strict=True)]
    tokens = [torch.randint(vocab, (n,), generator=generator) for n in lengths]
    rows = Rows.packed(tokens, responses)
    case = Case(
        "demo", "cpu", sum(lengths), vocab, entropy="grad", response=sum(responses) / sum(lengths), logits="peaked"
    )
    labels = torch.full((case.tokens,), IGNORE).index_copy_(0, rows.index, rows.target)
    g_logprob, g_entropy = torch.randn(2, len(rows), generator=generator)
    return Batch(case, rows, labels, g_logprob, g_entropy, seed)


def verdict(outcomes: Sequence[Outcome]) -> str:
    """What the numbers say, in words."""
    plain, _, ours = outcomes
    memory = _times(plain.peak / ours.peak, "less", "more")
    speed = _times(plain.seconds / ours.seconds, "faster", "slower")
    accuracy = _times(_worst(plain.errors) / _worst(ours.errors), "closer to float64", "further from float64")
    return (
        f"Writing the gradient over the logits, logitless needs {format_bytes(ours.peak)} beyond the logits where "
        f"plain torch needs {format_bytes(plain.peak)} ({memory}), is {speed}, and its worst result is {accuracy}."
    )


def draw(demo: Demo, path: Path) -> None:
    """Memory and time of every way, side by side."""
    memory = [_bar(o, float(o.peak), format_bytes(o.peak)) for o in demo.outcomes]
    seconds = [_bar(o, o.seconds, f"{o.seconds:.2f} s") for o in demo.outcomes]
    draw_pair(memory, seconds, ("Peak memory beyond the logits", "Time, forward + backward"), path)


def cells(outcome: Outcome) -> tuple[str, ...]:
    """A row of the table: way, time, peak, and the distances of log-prob, entropy and gradient to float64."""
    off = outcome.errors
    distances = (off.logprob, off.entropy or 0.0, off.gradient or 0.0)
    return outcome.name, f"{outcome.seconds:.2f} s", format_bytes(outcome.peak), *(f"{x:.1e}" for x in distances)


def _errors(score: Score, batch: Batch, master: Tensor, buffer: Tensor) -> Errors:
    """Distance to float64 over every row, in blocks, so that float64 never holds more than a few rows."""
    scores, gradient = step(score, batch, buffer.copy_(master))
    assert gradient is not None
    parts = [compare(truth_at(batch, master, t), *scores[:2], gradient, "grad") for t in batch.rows.index.split(64)]
    worst = Errors(*(max(x or 0.0 for x in column) for column in zip(*parts, strict=True)))
    # Prompt rows must get a gradient of exactly zero; anything else would show here.
    prompt = float(gradient[batch.labels == IGNORE].abs().amax())
    return worst._replace(gradient=max(worst.gradient or 0.0, prompt))


def _seconds(score: Score, batch: Batch, buffer: Tensor) -> float:
    clock = StopWatch(buffer.device)
    step(score, batch, buffer, clock)
    return sum(clock.laps_ms()) / 1e3


def _bar(outcome: Outcome, value: float, text: str) -> Bar:
    return Bar(outcome.name, value, text, outcome.name.startswith("logitless"))


def _worst(errors: Errors) -> float:
    return max(errors.logprob, errors.entropy or 0.0, errors.gradient or 0.0)


def _times(ratio: float, above: str, below: str) -> str:
    """``3.2x less`` for a ratio of 3.2 and ``2.0x more`` for 0.5."""
    if 0.95 < ratio < 1.05:
        return f"neither {above} nor {below}"
    return f"{ratio:.1f}x {above}" if ratio > 1 else f"{1 / ratio:.1f}x {below}"
