"""Cases: what is named, what a pattern finds, and how many bytes must move."""

import pytest

from benchmarks.bench.cases import CASES, Case, select_cases, select_names
from logitless import LogitlessError


def test_the_shapes_that_matter_are_named():
    reference = CASES["reference-fp32-grad"]
    assert (reference.tokens, reference.vocab) == (16384, 151936)
    assert CASES["over-int32-bf16-grad"].tokens * CASES["over-int32-bf16-grad"].vocab > 2**32
    assert CASES["huge-fp32-grad"].logits_bytes == 205280 * 76032 * 4
    linear = CASES["linear-reference-grad"]
    assert (linear.tokens, linear.vocab, linear.hidden, linear.dtype) == (16384, 151936, 4096, "bfloat16")
    assert {c.entropy for c in CASES.values()} == {"value", "grad"}
    assert all(name == case.name for name, case in CASES.items())


def test_none_named_means_the_devices_own_without_smoke_and_huge():
    names = [case.name for case in select_cases([], "cuda")]
    assert "reference-bf16-value-peaked" in names
    assert {"linear-reference-grad", "linear-v256k-grad"} <= set(names)
    assert not any(word in name for name in names for word in ("huge", "smoke", "growth", "cpu"))


def test_a_pattern_stays_on_the_device_and_off_what_is_set_aside():
    names = [case.name for case in select_cases(["linear-*"], "cuda")]
    assert names == [case.name for case in select_cases([], "cuda") if case.hidden is not None]
    assert [case.name for case in select_cases(["linear-huge*"], "cuda")] == ["linear-huge-grad"]
    assert len(select_cases(["linear-growth-*"], "cuda")) == 12
    assert [case.name for case in select_cases(["reference-fp32-value"], "cpu")] == ["reference-fp32-value"]


@pytest.mark.parametrize(
    ("name", "products"),
    [("forward", 1), ("value", 4), ("grad", 4), ("frozen", 2), ("keep", 3), ("grad-3pct", 4)],
)
def test_products_that_nobody_avoids(name, products):
    assert CASES[f"linear-reference-{name}"].num_gemms == products


def test_a_frozen_weight_saves_one_product_even_with_an_entropy_gradient():
    assert Case("x", "cpu", 4, 4, entropy="grad", hidden=2, frozen=True).num_gemms == 3


def test_patterns_keep_the_order_of_the_cases():
    assert select_names(["b*", "a"], ["a", "b1", "b2", "c"], "case") == ["a", "b1", "b2"]


def test_a_pattern_without_match_names_what_there_is():
    with pytest.raises(LogitlessError, match=r"no case matches 'nope'. For cpu there are cpu-fp32-forward,"):
        select_cases(["nope"], "cpu")


@pytest.mark.parametrize(("backward", "total"), [(True, 25 + 25 + 100), (False, 25)])
def test_bytes_moved_counts_prompt_rows_only_as_written(backward, total):
    case = Case("x", "cpu", tokens=100, vocab=7, dtype="bfloat16", backward=backward, response=0.25)
    row = 7 * 2
    assert case.bytes_moved(25) == (25 * row, total * row)


@pytest.mark.parametrize(("field", "value"), [("dtype", "float8"), ("response", 0.0), ("response", 1.5)])
def test_a_bad_case_says_what_is_wrong(field, value):
    with pytest.raises(LogitlessError, match=field):
        Case("x", "cpu", 4, 4, **{field: value})
