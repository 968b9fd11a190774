"""From a failing case to the smallest one that still fails, and to a test that can be pasted.

    features off, one by one  ->  sizes down, one by one  ->  again, until nothing changes

Every step is kept if the case still fails; the seed of the numbers stays, so that most of them do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from fuzz.cases import DEFAULTS, FEATURES, SAMPLES, Case, features_on, settled

SMALLER = {"tokens": (1, 2, 3), "vocab": (1, 2, 3, 5), "width": (1, 2, 3), "cp": (1, 2), "ranks": (2,)}
KEPT = ("seed", "path", "ranks", "parallel")
"""What names the case; shrinking leaves these alone."""


def shrink(case: Case, fails: Callable[[Case], bool], most: int = 300) -> Case:
    """The smallest failing case found in so many runs. ``fails(case)`` says whether a case still fails."""
    runs = 0
    changed = True
    while changed and runs < most:
        changed = False
        for candidate in _candidates(case):
            runs += 1
            if runs > most:
                break
            if fails(candidate):
                case, changed = candidate, True
                break
    return case


def _candidates(case: Case) -> Iterator[Case]:
    """Cases that are simpler in one way, the boldest first."""
    seen = {case}

    def new(**changes) -> Iterator[Case]:
        made = settled(replace(case, **changes))
        if made not in seen:
            seen.add(made)
            yield made

    for name in features_on(case):
        yield from new(**{field: DEFAULTS[field] for field in FEATURES[name].names if field not in KEPT})
    for field in fields(case):
        if field.name not in KEPT and getattr(case, field.name) != field.default:
            yield from new(**{field.name: field.default})
    for name, sizes in SMALLER.items():
        for size in sizes:
            if size < getattr(case, name):
                yield from new(**{name: size})
    if case.layout in SAMPLES:
        for i in range(len(case.samples)):
            if len(case.samples) > 1:
                yield from new(samples=case.samples[:i] + case.samples[i + 1 :])
            prompt, response = case.samples[i]
            for smaller in ((1, response), (prompt, response // 2), (prompt, response - 1)):
                if smaller[1] >= 0 and smaller != (prompt, response):
                    yield from new(samples=(*case.samples[:i], smaller, *case.samples[i + 1 :]))
    for i in range(len(case.objective)):
        yield from new(objective=case.objective[:i] + case.objective[i + 1 :])


def as_test(case: Case, reason: str) -> str:
    """A pytest test of the case, ready to paste."""
    said = reason.splitlines()[0] if reason else "fails"
    return (
        "from fuzz.cases import Case\n"
        "from fuzz.judge import verdict\n\n\n"
        f"def test_case_{case.seed}():\n"
        f'    """{said}"""\n'
        f"    case = {case}\n"
        f"    found = verdict(case)\n"
        f'    assert found.kind != "wrong", found.reason\n'
    )
