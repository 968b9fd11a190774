"""``mismatch``: every number by plain Python over lists, over ranks, and as the metrics of an objective."""

from __future__ import annotations

import json
import math
import statistics

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import logitless as ll
from logitless.objectives import mismatch

COUNTS = [7, 0, 13, 1, 5, 4]
BOUND = 0.4


def draw(**more):
    tokens = [torch.randint(50, (2 + n,)).tolist() for n in COUNTS]
    # Sample 5 does not count at all.
    masks = [[int(i != 5 and (t == 0 or torch.rand(()) < 0.8)) for t in range(n)] for i, n in enumerate(COUNTS)]
    whole = ll.Rows.packed(tokens, COUNTS, masks)
    trainer = -torch.rand(len(whole), dtype=torch.float64) * 3
    rollout = trainer + 0.3 * torch.randn(len(whole), dtype=torch.float64)
    return tokens, masks, trainer, rollout


def told(rows, trainer, rollout, quantiles):
    """The report's numbers, one token at a time."""
    kept = [i for i in range(len(rows)) if rows.counted[i]]
    d = [float(trainer[i] - rollout[i]) for i in kept]
    by_sample = {}
    for i, x in zip(kept, d, strict=True):
        by_sample.setdefault(int(rows.sample[i]), []).append((abs(x), x, i))
    effective = lambda w: sum(w) ** 2 / sum(x * x for x in w) / len(w)  # noqa: E731
    distances = sorted(map(abs, d))
    spots = [q * (len(d) - 1) for q in quantiles]
    found = {
        "tokens": len(d),
        "samples": len(by_sample),
        "not_finite": 0,
        "kl_k1": -statistics.fmean(d),
        "kl_k3": statistics.fmean(math.exp(x) - 1 - x for x in d),
        "largest": distances[-1],
        "beyond": sum(x > BOUND for x in distances) / len(d),
        "effective_tokens": effective([math.exp(x) for x in d]),
        "effective_samples": effective([math.exp(sum(x for _, x, _ in own)) for own in by_sample.values()]),
    }
    between = [
        distances[int(s)] + (s - int(s)) * (distances[min(int(s) + 1, len(d) - 1)] - distances[int(s)]) for s in spots
    ]
    worst = sorted(by_sample, key=lambda sample: -max(by_sample[sample])[0])
    return found, between, [(s, max(by_sample[s])[2], by_sample[s]) for s in worst]


def test_every_number():
    tokens, masks, trainer, rollout = draw()
    quantiles = (0.0, 0.25, 0.5, 0.97, 1.0)
    for mask_only in (False, True):
        rows = ll.Rows.packed(tokens, COUNTS, masks, loss_mask_only=mask_only)
        given = trainer[rows.response], rollout[rows.response]
        report = mismatch(*given, rows, bound=BOUND, quantiles=quantiles, worst=3)
        numbers, between, worst = told(rows, *given, quantiles)
        for name, value in numbers.items():
            assert getattr(report, name) == pytest.approx(value, rel=1e-9), name
        assert list(report.quantiles.values()) == pytest.approx(between, rel=1e-9)
        assert len(report.outliers) == 3
        for mine, (sample, row, own) in zip(report.outliers, worst, strict=False):
            assert (mine.sample, mine.position, mine.token) == (
                sample,
                int(rows.position[row]),
                tokens[sample][2 + int(rows.position[row])],
            )
            assert (mine.tokens, mine.beyond) == (len(own), sum(x > BOUND for x, *_ in own))
            assert mine.log_ratio == pytest.approx(sum(x for _, x, _ in own))
            assert (mine.logprob, mine.rollout_logprob) == (float(given[0][row]), float(given[1][row]))


def test_an_objective_logs_the_same_numbers():
    tokens, masks, trainer, rollout = draw()
    rows = ll.Rows.packed(tokens, COUNTS, masks)
    stats = ll.TokenStats(trainer + 0.1, None, None)
    fields = {"old_logprob": trainer, "rollout_logprob": rollout, "advantage": torch.ones(len(rows))}
    numbers = ll.Objective()(stats, rows, **fields)[1].compute()
    report = mismatch(trainer, rollout, rows)
    assert numbers["rollout_kl_k1"] == pytest.approx(report.kl_k1)
    assert numbers["rollout_kl_k3"] == pytest.approx(report.kl_k3)
    assert numbers["rollout_beyond"] == pytest.approx(report.beyond)
    assert numbers["rollout_effective_sample_size"] == pytest.approx(report.effective_tokens)
    assert max(numbers["rollout_log_ratio_max"], -numbers["rollout_log_ratio_min"]) == pytest.approx(report.largest)


def test_text_and_json():
    rows = ll.Rows.packed([[0, 1, 2], [3, 4]], [2, 1])
    report = mismatch(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.0, -1.0, -3.5]), rows)
    text = str(report)
    assert text.startswith("mismatch of 3 tokens in 2 samples\n")
    header = "  sample  tokens  beyond  log ratio  worst at      id   trainer   rollout"
    assert text.splitlines().count(header) == 1
    assert header not in str(mismatch(torch.tensor([-1.0, -2.0, -3.0]), torch.full((3,), -1.0), rows, worst=0))
    assert "beyond 0.693             33.3% of the tokens" in text
    first = text.splitlines()[-2].split()
    assert first == ["0", "2", "1", "-1", "1", "2", "-2.000", "-1.000"]
    read = json.loads(json.dumps(report.as_dict()))
    assert read["quantiles"]["0.5"] == 0.5
    assert read["outliers"][0]["token"] == 2
    assert read["tokens"] == 3


def test_numbers_that_are_not_finite_are_not_hidden():
    rows = ll.Rows.packed([[0, 1, 2, 3], [3, 4]], [3, 1], [[1, 1, 0], [1]])
    trainer = torch.tensor([-1.0, -torch.inf, torch.nan, -1.0])
    report = mismatch(trainer, torch.full((4,), -1.0), rows)
    assert (report.not_finite, report.tokens, report.largest) == (1, 3, math.inf)
    assert (report.outliers[0].sample, report.outliers[0].position) == (0, 1)
    assert "not finite               1 tokens" in str(report)
    worse = mismatch(trainer.nan_to_num(torch.nan, neginf=torch.nan), torch.full((4,), -1.0), rows)
    assert math.isnan(worse.kl_k1)
    assert worse.beyond == pytest.approx(1 / 3)


def test_products_over_samples_do_not_overflow():
    rows = ll.Rows.packed([[0] * 4001, [0] * 4001], [4000, 4000])
    drift = torch.full((8000,), 0.5)
    report = mismatch(drift - 2, torch.full((8000,), -2.0), rows, worst=1)
    assert report.effective_samples == pytest.approx(1.0)
    assert report.outliers[0].log_ratio == pytest.approx(2000.0)


def test_no_tokens():
    report = mismatch(torch.zeros(0), torch.zeros(0), ll.Rows.packed([], []))
    assert (report.tokens, report.samples, report.outliers) == (0, 0, ())
    assert math.isnan(report.kl_k3)
    assert str(report)


def on_ranks(rank, world, tokens, masks, trainer, rollout, cp):
    scheme = ll.Zigzag(rank, world) if cp else None
    samples = range(len(COUNTS)) if cp else range(rank, len(COUNTS), world)
    rows = ll.Rows.packed(
        [tokens[i] for i in samples], [COUNTS[i] for i in samples], [masks[i] for i in samples], cp=scheme
    )
    here = [torch.split(x, COUNTS) for x in (trainer, rollout)]
    given = [rows.from_responses([x[i] for i in samples]) for x in here]
    world_group = dist.group.WORLD
    return mismatch(*given, rows, bound=BOUND, cp_group=world_group if cp else None, group=world_group)


@pytest.mark.parametrize("cp", [False, True], ids=["data parallel", "context parallel"])
def test_over_ranks(cp):
    tokens, masks, trainer, rollout = draw()
    rows = ll.Rows.packed(tokens, COUNTS, masks)
    whole = mismatch(trainer, rollout, rows, bound=BOUND)
    parts = run_ranks(on_ranks, 2, tokens, masks, trainer, rollout, cp)
    for part in parts:
        for name in (
            "tokens",
            "samples",
            "kl_k1",
            "kl_k3",
            "largest",
            "beyond",
            "effective_tokens",
            "effective_samples",
        ):
            assert getattr(part, name) == pytest.approx(getattr(whole, name), rel=1e-9), name
    # The worst token of all is on one of the ranks.
    firsts = [(part.outliers[0].logprob, part.outliers[0].rollout_logprob) for part in parts]
    assert (whole.outliers[0].logprob, whole.outliers[0].rollout_logprob) in firsts


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"logprob": torch.zeros(4)}, r"logprob has shape \[4\] but there are 3 rows"),
        ({"bound": -1.0}, "bound must be a number of 0 or more"),
        ({"quantiles": (50,)}, r"quantiles must be numbers in 0 \.\. 1"),
        ({"quantiles": (0.5, 1.5)}, r"quantiles must be numbers in 0 \.\. 1"),
        ({"worst": -1}, "worst must be a number of samples"),
    ],
)
def test_errors(change, text):
    rows = ll.Rows.packed([[0, 1, 2], [3, 4]], [2, 1])
    with pytest.raises(ll.LogitlessError, match=f"^mismatch: {text}"):
        mismatch(**{"logprob": torch.zeros(3), "rollout_logprob": torch.zeros(3), "rows": rows} | change)
