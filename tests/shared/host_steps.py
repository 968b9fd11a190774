"""Training steps of a host's own code, before and after ``install``: the same losses and updates, and no logits made.

same_steps("openrlhf", build)      ``build()`` gives a model and its step, from the same weights each time
same_on_ranks(outcomes)            the same on ranks, of what ``on_rank`` gave on each of them
spoiled()                          within, every log-prob of ours is 1 % off: what compares must notice
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import logitless
from benchmarks.bench.measure import peak_bytes
from logitless.adapters import Installed
from logitless.operands.logits import MADE

STEPS = 3
Build = Callable[[], tuple[nn.Module, Callable[[int], Any]]]


class Run(NamedTuple):
    """Losses of the steps, and the change of every parameter."""

    losses: Tensor
    updates: dict[str, Tensor]


def run(build: Build, batches: int = 0) -> Run:
    """Three steps; ``step(n)`` is the host's, with its loss as the result and the optimizer's step within.

    ``batches`` is the number of the first, which differs between ranks.
    """
    model, step = build()
    first = {name: _numbers(x) for name, x in model.named_parameters()}
    losses = [torch.as_tensor(step(batches + n)).detach().double() for n in range(STEPS)]
    assert len({x.item() for x in losses}) == STEPS
    return Run(torch.stack(losses), {name: _numbers(x) - first[name] for name, x in model.named_parameters()})


def _numbers(x: Any) -> Tensor:
    """A copy of a parameter: whole where it is a DTensor, this rank's part where FSDP1 or ZeRO-3 has the others."""
    x = getattr(x, "ds_tensor", x).detach()
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).clone()


def assert_same(theirs: Run, ours: Run, tolerance: float = 1e-4) -> None:
    """Losses, and the updates of each parameter relative to its norm, in float32."""
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=tolerance, atol=1e-6)
    assert sorted(ours.updates) == sorted(theirs.updates)
    for name, right in theirs.updates.items():
        assert (ours.updates[name] - right).norm() <= tolerance * right.norm(), name
    assert any(x.norm() > 0 for x in theirs.updates.values())


def assert_as_near(theirs: Run, ours: Run, exact: Run) -> None:
    """In half precision: to the steps in float64 no farther than twice as far as the host's own."""

    def far(found: Run) -> tuple[float, float]:
        pairs = ((found.updates[name].double() - x.double(), x.double()) for name, x in exact.updates.items())
        off, whole = torch.tensor([[a.norm(), b.norm()] for a, b in pairs]).norm(dim=0)
        return float((found.losses - exact.losses).norm() / exact.losses.norm()), float(off / whole)

    for mine, other in zip(far(ours), far(theirs), strict=True):
        assert mine <= 2 * other + 1e-3


def same_steps(host: str, build: Build, *, models: int = 1, exact: Build | None = None, **options: Any) -> Installed:
    """Three steps as they are and with the host installed are the same, and no logits are made in the second.

    Args:
        models: how many models of the host are deferred.
        exact: the same steps in float64, for those in half precision.
    """
    theirs = run(build)
    truth = None if exact is None else run(exact)
    logitless.install(host, **options)
    ours = run(build)
    report = next(entry for entry in logitless.status().hosts if entry.host == host)
    logitless.uninstall(host)
    assert report.made == {}, report
    assert any(line.endswith(f"; {models} models so far") for line in report.logits), report
    assert len(report.logits) == 1, report
    if truth is None:
        assert_same(theirs, ours)
    else:
        assert_as_near(theirs, ours, truth)
    return report


class OnRank(NamedTuple):
    """Steps of a host on one rank: as it is, with ours, and with ours 1 % off; and what ``status`` says of ours."""

    before: Run
    ours: Run
    wrong: Run
    made: dict[str, int]
    logits: tuple[str, ...]


def on_rank(host: str, rank: int, build: Build, **options: Any) -> OnRank:
    """The steps on this rank, with batches of its own."""
    importlib.import_module(f"logitless.adapters.{host}")
    with warnings.catch_warnings():
        # What a host and its wrappers warn of is their own business.
        warnings.simplefilter("ignore")
        found = [run(build, 10 * rank)]
        for kind in (nullcontext, spoiled):
            with kind():
                logitless.install(host, **options)
                found.append(run(build, 10 * rank))
                if kind is nullcontext:
                    report = next(entry for entry in logitless.status().hosts if entry.host == host)
                logitless.uninstall(host)
    return OnRank(*found, dict(report.made), report.logits)


def same_on_ranks(outcomes: list[OnRank], models: int = 1, tolerance: float = 1e-4, distinct: bool = True) -> None:
    """The same steps on every rank, none of whose logits are computed; and a wrong number is noticed on each.

    Losses of the ranks are ``distinct`` unless they share their tokens.
    """
    for found in outcomes:
        assert found.made == {}, found.made
        assert found.logits == (f"logits: not computed (deferred); {models} models so far",)
        assert_same(found.before, found.ours, tolerance)
        with pytest.raises(AssertionError):
            assert_same(found.before, found.wrong, tolerance)
    assert not distinct or not torch.equal(outcomes[0].before.losses, outcomes[1].before.losses)


def fewer_bytes(host: str, build: Build, logits: int, **options: Any) -> tuple[int, int]:
    """Peaks of a step before and after, which holds one tensor of the logits' size less at least."""
    peaks = []
    for installed in (False, True):
        if installed:
            logitless.install(host, **options)
        _, step = build()
        step(0)
        peaks.append(peak_bytes(lambda step=step: step(1), torch.device("cpu")))
    logitless.uninstall(host)
    assert peaks[1] < peaks[0] - logits
    return peaks[0], peaks[1]


@contextmanager
def spoiled(every: bool = False) -> Iterator[None]:
    """Within, log-probs of every call are 1.01 times what they are; with ``every`` all of its results are."""

    def off(logprobs: Callable[..., Any]) -> Callable[..., Any]:
        def spoil(*args: Any, **kwargs: Any) -> Any:
            out = logprobs(*args, **kwargs)
            if every:
                return out.each(lambda x: 1.01 * x if x.is_floating_point() else x)
            return out._replace(logprob=1.01 * out.logprob)

        return spoil

    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith(("logitless.adapters.", "logitless.deferred.")) and hasattr(module, "logprobs"):
                patch.setattr(module, "logprobs", off(module.logprobs))
        yield


def notices(host: str, build: Build, **options: Any) -> None:
    """The negative control of :func:`same_steps`."""
    try:
        importlib.import_module(f"logitless.adapters.{host}")
        with spoiled(), pytest.raises(AssertionError):
            same_steps(host, build, **options)
    finally:
        if any(entry.host == host for entry in logitless.status().hosts):
            logitless.uninstall(host)


def same_steps_within(patch: Callable[[], Any], build: Build) -> None:
    """Three steps as they are and within ``patch()`` are the same, and no logits are made; 1 % off is noticed."""
    theirs = run(build)
    MADE.clear()
    with patch():
        assert_same(theirs, run(build))
        assert not MADE
        with spoiled(every=True), pytest.raises(AssertionError):
            assert_same(theirs, run(build))
