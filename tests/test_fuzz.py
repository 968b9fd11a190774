"""The fuzzer's bounded run, the corpus of past failures, and the fuzzer itself: what is wrong is found and shrunk."""

from __future__ import annotations

import pkgutil
import sys
from pathlib import Path

import pytest
import torch
from fuzz import judge, ours, record, shrink, soak, teachers
from fuzz.build import build
from fuzz.cases import DEFAULTS, FEATURES, HEAD, LOSS, LOSSES, NAMES, PATHS, Case, draw, features_on
from fuzz.corpus import CORPUS, TEACHERS
from fuzz.judge import Verdict, verdict
from fuzz.oracle import truth

import logitless as ll

sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))

import make_reliability

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True, scope="module")
def no_group_is_left():
    """Some cases make a process group of one, which other tests of the same process would find in their way."""
    yield
    ours.leave_group()


def wrong(seeds) -> list[tuple[Case, Verdict]]:
    found = ((case, verdict(case)) for case in map(draw, seeds))
    return [(case, v) for case, v in found if v.kind == "wrong"]


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_a_bounded_run(first: int):
    """``make fuzz`` runs as many as there is time for; ``--case SEED`` shrinks one."""
    assert not wrong(range(first, first + 100))


def test_students_and_teachers(monkeypatch):
    """``tests/fuzz/teachers.py`` runs as many as one likes."""
    verdicts = {seed: teachers.verdict(teachers.draw(seed)) for seed in range(70)}
    assert not [said for said in verdicts.values() if said is not None and not said.startswith("refused")]
    assert sum(said is None for said in verdicts.values()) > 45
    # It can fail.
    where = "logitless.readings.found._divergence"
    own = pkgutil.resolve_name(where)

    def off(*args) -> tuple:
        results, saved = own(*args)
        return results, saved | {"mean_slope": 1.01 * saved["mean_slope"]}

    monkeypatch.setattr(where, off)
    assert any((teachers.verdict(teachers.draw(seed)) or "").startswith("d_") for seed in range(15))


def test_crowded_rows():
    """Statistics, the K best, listed ids, an adapter, kept ids, layouts and heads, six at a time."""
    assert not wrong(range(-120, 0))
    counts = [len(features_on(draw(s))) for s in range(-120, 0)]
    assert sum(counts) > 5 * len(counts)


# The interpreter's own arithmetic warns of products below the range, whose exponential is 0.
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("story", CORPUS)
def test_past_failures(story: str, device: torch.device):
    for case in CORPUS[story]:
        found = verdict(case, device.type)
        assert found.kind != "wrong", f"{case}: {found.reason}"


@pytest.mark.parametrize("story", TEACHERS)
def test_past_failures_of_teachers(story: str):
    assert [(str(case), said) for case in TEACHERS[story] if (said := teachers.verdict(case)) is not None] == []


def test_cases_over_two_ranks(ranks):
    from fuzz.team import judge_over_ranks

    # Of negative seeds, statistics and adapters over shards of the vocabulary.
    found = judge_over_ranks(range(-8, 8), 2)
    assert not found.failures, found.failures[0]
    assert found.cases == 16


# The fuzzer itself.


def test_a_seed_is_one_case():
    assert [draw(s) for s in range(50)] == [draw(s) for s in range(50)]
    case = next(c for c in map(draw, range(100)) if c.path == LOSS and c.layout == "packed")
    assert torch.equal(build(case).leaves["x0"], build(case).leaves["x0"])


def test_every_feature_is_drawn_on_every_path_that_has_it():
    seen = {(case.path, name) for case in map(draw, range(4000)) for name in features_on(case)}
    assert {(path, name) for path in PATHS for name in NAMES[path]} <= seen


def test_two_features_are_on_in_most_cases():
    """Some draws are the default, and some have no meaning in their case."""
    counts = [len(features_on(draw(s))) for s in range(500)]
    assert sum(n >= 2 for n in counts) > 400


BUGS = {
    # Where it is seeded, the features without which it cannot be seen, and a seed not far from one that sees it.
    "entropy gradient off by 1e-4": ("logitless.passes.terms.coefficients", {"entropy"}, 10),
    "a row's temperature is another row's": ("logitless.spec.Head.gain", {"temperature"}, 120),
    "the last row of a chunk has no gradient": ("logitless.passes.one_pass.row_gradients", set(), 0),
}


def seeded(name: str, original):
    def coefficients(*args):
        coef = original(*args)
        return coef if coef.product is None else coef._replace(product=coef.product * (1 + 1e-4))

    def gain(self, *args, **kwargs):
        found = original(self, *args, **kwargs)
        return found.roll(1) if isinstance(self.temperature, torch.Tensor) else found

    def row_gradients(*args, **kwargs):
        found, evaluated = original(*args, **kwargs)
        found["logprob"][-1:] = 0.0
        return found, evaluated

    return {f.__name__: f for f in (coefficients, gain, row_gradients)}[name]


@pytest.mark.parametrize("bug", BUGS)
def test_a_seeded_bug_is_found_and_shrunk(bug: str, monkeypatch):
    where, wanted, first = BUGS[bug]
    name = where.rpartition(".")[2]
    monkeypatch.setattr(where, seeded(name, pkgutil.resolve_name(where)))
    case = next((c for c in map(draw, range(first, first + 100)) if verdict(c).kind == "wrong"), None)
    assert case is not None, "the bug was not seen in 100 cases"
    small = shrink.shrink(case, lambda c: verdict(c).kind == "wrong", most=120)
    on = set(features_on(small))
    assert wanted <= on
    assert len(on) <= len(wanted) + 2, small
    pasted, scope = shrink.as_test(small, verdict(small).reason), {}
    exec(pasted, scope)
    with pytest.raises(AssertionError):
        scope[f"test_case_{small.seed}"]()
    monkeypatch.undo()
    scope[f"test_case_{small.seed}"]()


def test_a_digit_too_few_is_wrong():
    """An error of three units fails, one of half a unit does not; plain torch's own error is allowed twice."""
    inputs = build(Case(entropy="grad", vocab=33))
    right = truth(inputs)
    for times, kind in ((0.5, "right"), (50.0, "wrong")):
        values = {n: x + times * right.value_units[n] for n, x in right.values.items()}
        mine = judge.Answer(values, right.gradients, {}, {})
        assert judge.judged(inputs, mine, right).kind == kind
        gradients = {n: x + times * right.gradient_units[n] for n, x in right.gradients.items()}
        assert judge.judged(inputs, judge.Answer(right.values, gradients, {}, {}), right).kind == kind
    poisoned = {n: x.index_fill(0, torch.tensor([0]), torch.nan) for n, x in right.values.items()}
    assert judge.judged(inputs, judge.Answer(poisoned, right.gradients, {}, {}), right).kind == "wrong"
    assert judge.judged(inputs, judge.Answer(right.values, {}, {}, {}), right).kind == "wrong"


def test_units_are_digits_and_not_more():
    """Float32 logits of ordinary size: a unit is a millionth of the value at most, and of the largest gradient."""
    right = truth(build(Case(entropy="grad", vocab=33, tokens=13)))
    for name, unit in right.value_units.items():
        assert float(unit.max()) <= 1e-5 * float(right.values[name].abs().max().clamp_min(1.0))
    assert float(right.gradient_units["x0"].max()) <= 1e-5 * float(right.gradients["x0"].abs().max())


FLUSHED = [
    Case(seed=326, tokens=3, vocab=64, width=16, samples=((3, 3),), temperature=0.05, entropy="grad", twice=True),
    Case(seed=840, temperature=0.05, kept="none", entropy="grad"),
]
"""Cases that a GPU had wrong, of runs before results over the support were drawn."""


@pytest.mark.parametrize(("below", "kind"), [(2.0**-126, "right"), (2.0**-120, "wrong")])
@pytest.mark.parametrize("case", FLUSHED, ids=["326", "840"])
def test_a_probability_below_the_normal_numbers_may_be_zero(case: Case, below: float, kind: str):
    """The exponential of an accelerator flushes it, and in an entropy's gradient it is a factor of log p."""
    inputs = build(case)
    right = truth(inputs)
    log_p = torch.log_softmax(inputs.leaves["x0"].double() / inputs.case.temperature, -1)
    target = torch.nn.functional.one_hot(inputs.target, log_p.shape[1]).bool()
    flushed = right.gradients["x0"].masked_fill((log_p.exp() < below) & ~target, 0.0)
    mine = judge.Answer(right.values, {"x0": flushed}, {}, {})
    assert judge.judged(inputs, mine, right).kind == kind


def test_an_exception_is_wrong_and_so_is_a_refusal_without_reason(monkeypatch):
    case = Case(path=HEAD)
    for error, words in ((IndexError("off by one"), "IndexError"), (ll.LogitlessError("no."), "refused: no.")):

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr(ll, "logprobs", fail)
        assert verdict(case).kind == "wrong"
        assert words in verdict(case).reason
    monkeypatch.setattr(judge, "REFUSALS", {"never": judge.Refusal("no", lambda c: c.kept == "some")})
    assert verdict(case).kind == "wrong"


def test_losses_at_a_bound_are_not_judged():
    """A ratio of exactly 1 - low: either side of the clip is right."""
    case = Case(path=LOSS, on_policy=True, objective=(("clip", (0.0, 0.3)),))
    assert verdict(case).kind == "at a bound"
    share = sum(verdict(c).kind == "at a bound" for c in map(draw, range(150)) if c.path in LOSSES)
    assert share <= 6


def test_features_and_fields_agree():
    for name, feature in FEATURES.items():
        assert set(feature.names) <= set(DEFAULTS), name


# The record and the page.


def test_the_page_shows_the_records():
    """Run ``python docs/make_reliability.py`` after a new record."""
    page, records = make_reliability.PAGE.read_text(encoding="utf-8"), make_reliability.records()
    assert page == make_reliability.filled(page, records)
    assert {r["kind"] for r in records} == {"fuzz", "soak"}
    for r in records:
        assert f"commit `{r['commit']}`" in page
        if r["kind"] == "fuzz":
            assert record.table(r) in page
            assert sum(sum(kinds.values()) for kinds in r["paths"].values()) == r["cases"]
            # What was found stays on record; the page says what became of it.
            assert [f["seed"] for f in r["failures"] if f"`{f['seed']}`" not in page] == []
        else:
            assert r["flat"] is True
            assert r["same"] is True


def test_another_record_is_another_page():
    page, records = make_reliability.PAGE.read_text(encoding="utf-8"), make_reliability.records()
    more = make_reliability.filled(page, [*records, {**records[0], "cases": 7_654_321}])
    assert "7,654,321 cases" in more
    assert more.startswith(page[: page.index(make_reliability.BEGIN)])
    assert more.endswith(page[page.index(make_reliability.END) :])


def test_a_soak_tells_what_grows_and_what_differs(monkeypatch):
    """A short one, and in this process; ``make soak`` is a thousand steps, and one of them in a fresh process."""
    monkeypatch.setattr(soak, "again", lambda saved, n, device: soak.replay(str(saved), n, device))
    monkeypatch.setattr(soak, "WARM", 2)
    found = soak.run(6)
    assert found["same"] is True
    assert len(found["live_tensors"]) == 1
    hoard, replay = [], soak.replay
    monkeypatch.setattr(soak, "allocated_bytes", lambda device: hoard.append(torch.zeros(1)) or 0)
    monkeypatch.setattr(soak, "replay", lambda saved, n, device: replay(saved, n + 1, device))
    found = soak.run(6)
    assert found["flat"] is False
    assert found["same"] is False


def test_a_tally_is_what_was_added():
    tally, other = record.Tally(), record.Tally()
    tally.add(Case(kept="some", ignore=True), Verdict("right", 0.25))
    other.add(Case(dtype="bfloat16"), Verdict("wrong", 3.0, "why"))
    other.add(Case(), Verdict("refused", reason="no samples"))
    other.add(Case(), Verdict("right", 0.5))
    tally.merge(other)
    made = record.as_record(tally, 2.0)
    assert made["cases"] == 4
    assert made["paths"]["logprobs"] == {"right": 2, "refused": 1, "at a bound": 0, "wrong": 1}
    assert made["worst"]["logprobs"]["float32"] == 0.5
    assert made["pairs"]["logprobs"] == 1
    assert "| `logprobs` | 4 | 2 | 1 | 0 | 1 | 1 | 0.50 |" in record.table(made)
    assert [f["reason"] for f in made["failures"]] == ["why"]
