"""``python -m examples.demo``: a small RL run twice, with plain torch's loss step and with ours.

    task      prompts of digits, and the reward for repeating them
    grid      the ranks of a run: context parallel times tensor parallel
    policy    a tiny transformer from scratch, its rollouts, its hidden states split over ranks
    steps     the loss steps that are compared
    train     GRPO with any of these steps
    memory    peak bytes of a loss step, and how they grow with the response fraction
    run       training, measuring and the verdict
    report    the printed text
    figure    the picture

The vocabulary is far larger than the task needs, so that the loss step weighs what it does in a real model.
"""

from __future__ import annotations

from examples.demo.run import Demo, check_ready, num_reports, run_demo, verdict
from examples.demo.train import Setting

__all__ = ["Demo", "Setting", "check_ready", "num_reports", "run_demo", "verdict"]
