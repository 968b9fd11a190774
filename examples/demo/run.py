"""The demo from start to end: train with plain torch, with ours, and with plain torch once more; measure, judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from examples.demo import train as training
from examples.demo.grid import Grid
from examples.demo.memory import FRACTIONS, PeaksByFraction, peaks_by_fraction, step_peak
from examples.demo.policy import check_transformers, new_policy
from examples.demo.steps import deferred_step, logitless_step, plain_step_by_halves, plain_step_of_all_rows
from examples.demo.train import Curve, Setting, train, warm_start

RISE = 0.15
"""How much more reward the last tenth of a run must have than the first."""

SAME_STEPS = 5
"""Steps at the start, two updates each, in which every sampled token must be the same.

Gradients that are wrong by a hundredth sample another token before that; other roundings do not.
"""

SAME = 2.0
"""How many times ``own_difference`` our run may differ from plain torch, by the largest difference of a mean reward.

Sooner or later a sample falls between two roundings, and from there the runs part. So do two runs of plain torch that
round differently: over seeds 0 to 3, by 0.01, 0.24, 0.10 and 0.22, where ours differ by 0.01, 0.22, 0.12 and 0.06.
"""

NOISE = 0.05
"""A difference that counts as none: a step's reward is a mean over 16 prompts."""


BUSY = 0.2
"""Share of a run's time that others may take before the times of the runs are no longer worth comparing."""


@dataclass(frozen=True, eq=False)
class Demo:
    """The outcome.

    Attributes:
        setting, grid: what was trained, and the ranks of our run.
        plain, ours: the two runs.
        control: plain torch again, with other roundings: each half of the vocabulary by itself.
        plain_peak, our_peak: peak bytes of a loss step of the two runs, on one rank.
        by_fraction: peaks of loss steps at growing response fractions.
    """

    setting: Setting
    grid: Grid
    plain: Curve
    ours: Curve
    control: Curve
    plain_peak: int
    our_peak: int
    by_fraction: PeaksByFraction

    @property
    def rose(self) -> bool:
        return all(run.last_reward >= run.first_reward + RISE for run in (self.plain, self.ours))

    @property
    def difference(self) -> float:
        """Largest difference of a step's mean reward between plain torch and ours."""
        return self.plain.difference(self.ours)

    @property
    def own_difference(self) -> float:
        """Largest difference of a step's mean reward between plain torch and its control run."""
        return self.plain.difference(self.control)

    @property
    def changed_tokens(self) -> int:
        """Number of sampled tokens that differ between the runs."""
        return int((self.plain.tokens != self.ours.tokens).sum())

    @property
    def same_steps(self) -> int:
        """Number of steps before the first sampled token that differs."""
        differs = (self.plain.tokens != self.ours.tokens).flatten(1).any(1).nonzero()
        return int(differs[0]) if len(differs) else self.setting.steps

    @property
    def sampled_tokens(self) -> int:
        return self.setting.steps * self.setting.samples * self.setting.length

    @property
    def same(self) -> bool:
        near = self.difference <= max(NOISE, SAME * self.own_difference)
        return near and self.same_steps >= min(SAME_STEPS, self.setting.steps)

    @property
    def waited(self) -> float:
        """Largest share of its time that a run of one rank waited for the processor."""
        alone = (self.plain, self.control, *((self.ours,) if self.grid.size == 1 else ()))
        return max(run.waited for run in alone)

    @property
    def busy(self) -> bool:
        """Whether the machine was too busy for the times to mean anything."""
        return self.waited > BUSY

    @property
    def leaner(self) -> bool:
        return self.our_peak < self.plain_peak

    @property
    def ok(self) -> bool:
        return self.rose and self.same and self.leaner

    def as_json(self) -> dict[str, Any]:
        runs = {
            run.name: {
                "rewards": run.rewards,
                "loss_step_peak_bytes": peak,
                "seconds": run.seconds,
                "processor_seconds": run.processor_seconds,
            }
            for run, peak in ((self.plain, self.plain_peak), (self.ours, self.our_peak))
        }
        return {
            "ok": self.ok,
            "verdict": verdict(self),
            "steps": self.setting.steps,
            "seed": self.setting.seed,
            "vocab": self.setting.vocab,
            "tp": self.grid.tp,
            "cp": self.grid.cp,
            "runs": runs,
            "busy": self.busy,
            "waited_for_the_processor": self.waited,
            "control_rewards": self.control.rewards,
            "largest_reward_difference": self.difference,
            "largest_reward_difference_of_plain_torch_from_itself": self.own_difference,
            "sampled_tokens": self.sampled_tokens,
            "changed_tokens": self.changed_tokens,
            "same_steps": self.same_steps,
            "sweep": {
                "tokens": self.by_fraction.tokens,
                "vocab": self.by_fraction.vocab,
                "fractions": self.by_fraction.fractions,
                "peak_bytes": self.by_fraction.peaks,
            },
        }


def check_ready(setting: Setting, grid: Grid) -> None:
    """Raise now if the demo could not run to its end."""
    check_transformers()
    setting.check_grid(grid)


def num_reports(setting: Setting) -> int:
    """How often :func:`run_demo` reports on the first rank."""
    return 2 + 3 * training.num_reports(setting) + len(FRACTIONS)


def run_demo(setting: Setting, grid: Grid, report: Callable[[str], None], **sizes: Any) -> Demo | None:
    """Train, measure and return the outcome; ranks other than the first take part in our run and return None.

    Plain torch trains twice on the first rank alone, while the others wait; then all ranks train together.

    Args:
        sizes: options of :func:`peaks_by_fraction`.
    """
    check_ready(setting, grid)
    first = grid.rank == 0
    if first:
        report("learning to answer with digits")
    start = warm_start(setting) if first else new_policy(setting.vocab, setting.seed)
    plain = train("plain torch", start, plain_step_of_all_rows, setting, report) if first else None
    control = train("plain torch, in halves", start, plain_step_by_halves, setting, report) if first else None
    for parameter in start.parameters() if grid.size > 1 else ():
        dist.broadcast(parameter.data, 0, group=grid.world)
    if grid.size == 1:
        name, step = "one line more", deferred_step
    else:
        name, step = f"logitless, TP {grid.tp} x CP {grid.cp}", logitless_step
    ours = train(name, start, step, setting, report, grid)
    if first:
        report("memory of the loss steps")
    our_peak = step_peak(*ours.last)
    if plain is None or control is None:
        return None
    peaks = step_peak(*plain.last), our_peak
    return Demo(setting, grid, plain, ours, control, *peaks, peaks_by_fraction(report, **sizes))


def verdict(demo: Demo) -> str:
    """The outcome in words."""
    first, last = demo.ours.first_reward, demo.ours.last_reward
    rise = (
        f"The reward rose from {first:.2f} to {last:.2f}"
        if demo.rose
        else (f"The reward did not rise by {RISE} in {demo.setting.steps} steps: from {first:.2f} to {last:.2f}")
    )
    if demo.changed_tokens == 0:
        same = f"all {demo.sampled_tokens} sampled tokens are the same in both runs"
    else:
        fits = "the same curve" if demo.same else "NOT the same curve"
        same = (
            f"all tokens sampled in the first {demo.same_steps} steps are the same, and a step's mean reward differs "
            f"by at most {demo.difference:.3f} after that, where plain torch differs from itself by "
            f"{demo.own_difference:.3f}: {fits}"
        )
    ratio = demo.plain_peak / demo.our_peak
    memory = f"{ratio:.1f}x less" if demo.leaner else f"{1 / ratio:.1f}x more, not less,"
    where = "" if demo.grid.size == 1 else " on each rank"
    return f"{rise}; {same}; and the loss step needs {memory} memory{where}."
