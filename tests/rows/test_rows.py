"""The plan for rows: hand-written tables, then properties against a loop over tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from logitless import Contiguous, LogitlessError, Rows, Zigzag


def assert_plan(rows: Rows, table: list[tuple[int, int, int, int]]) -> None:
    """``table`` holds (index, target, sample, position) per row."""
    columns = (rows.index, rows.target, rows.sample, rows.position)
    assert list(zip(*(c.tolist() for c in columns), strict=True)) == table
    assert all(c.dtype == torch.int64 for c in columns)
    assert len(rows) == len(table)


# Known answers. Samples: prompt 2 + response 1, prompt 1 + response 3, prompt 3 and no response, prompt 1 + response 2.
TOKENS = [[10, 11, 12], [20, 21, 22, 23], [30, 31, 32], [40, 41, 42]]
RESPONSES = [1, 3, 0, 2]
MASKS = [[1], [0, 1, 0], [], [0, 0]]


def test_packed_table():
    rows = Rows.packed(TOKENS, RESPONSES)
    assert_plan(rows, [(1, 12, 0, 0), (3, 21, 1, 0), (4, 22, 1, 1), (5, 23, 1, 2), (10, 41, 3, 0), (11, 42, 3, 1)])
    assert rows.token_shape == (13,)
    assert rows.num_tokens == 13
    assert rows.held == rows.counts == (1, 3, 0, 2)


def test_packed_with_padding_at_the_end():
    rows = Rows.packed(TOKENS, RESPONSES, num_tokens=16)
    assert rows.index.tolist() == [1, 3, 4, 5, 10, 11]
    assert rows.expand(torch.arange(1.0, 7.0)).tolist() == [0, 1, 0, 2, 3, 4, 0, 0, 0, 0, 5, 6, 0, 0, 0, 0]


def test_packed_loss_mask_only_table():
    rows = Rows.packed(TOKENS, RESPONSES, MASKS, loss_mask_only=True)
    assert_plan(rows, [(1, 12, 0, 0), (4, 22, 1, 1)])
    assert rows.held == (1, 3, 0, 2)
    assert rows.counts == (1, 1, 0, 0)
    assert [part.tolist() for part in rows.split(torch.tensor([5.0, 7.0]))] == [[5.0], [0.0, 7.0, 0.0], [], [0.0, 0.0]]


def test_masks_without_loss_mask_only_change_nothing():
    assert_plan(
        Rows.packed(TOKENS, RESPONSES, MASKS),
        [(1, 12, 0, 0), (3, 21, 1, 0), (4, 22, 1, 1), (5, 23, 1, 2), (10, 41, 3, 0), (11, 42, 3, 1)],
    )


def test_counted_and_totals():
    assert Rows.packed(TOKENS, RESPONSES).totals.tolist() == RESPONSES
    rows = Rows.packed(TOKENS, RESPONSES, MASKS)
    assert rows.counted.tolist() == [True, False, True, False, False, False]
    assert rows.totals.tolist() == [1, 1, 0, 0]
    fewer = Rows.packed(TOKENS, RESPONSES, MASKS, loss_mask_only=True)
    assert fewer.counted.tolist() == [True, True]
    assert fewer.totals.tolist() == [1, 1, 0, 0]
    # An id of -100 counts nowhere, in a prompt or in a response, masked or not.
    tokens = [[-100, 11, 12], [20, 21, -100, 23], TOKENS[2], TOKENS[3]]
    assert Rows.packed(tokens, RESPONSES).totals.tolist() == [1, 2, 0, 2]
    assert Rows.packed(tokens, RESPONSES, [[1], [1, 1, 0], [], [0, 1]]).totals.tolist() == [1, 1, 0, 1]
    assert Rows.packed(tokens, RESPONSES).counted.tolist() == [True, True, False, True, True, True]
    for mask_only in (False, True):
        masked = Rows.packed(tokens, RESPONSES, [[1], [0, 1, 1], [], [0, 1]], loss_mask_only=mask_only)
        assert masked.counted[masked.target == -100].tolist() == [False]
        assert int(masked.counted.sum()) == int(masked.totals.sum()) == 3
    assert Rows.packed([], []).totals.tolist() == []
    assert Rows.at([4, 2], [7, -100]).totals.tolist() == [1]
    assert Rows.every(torch.tensor([[1, -100], [2, 3]])).totals.tolist() == [3]


@pytest.mark.parametrize("scheme", [Zigzag, Contiguous])
def test_totals_are_of_whole_samples_on_every_rank(scheme):
    plans = [Rows.packed(TOKENS, RESPONSES, MASKS, cp=scheme(rank, 3)) for rank in range(3)]
    assert all(plan.totals.tolist() == [1, 1, 0, 0] for plan in plans)
    assert sum(int(plan.counted.sum()) for plan in plans) == 2


@pytest.mark.parametrize(
    ("padding", "max_length", "index"),
    [
        ("right", None, [1, 4, 5, 6, 12, 13]),
        ("left", None, [2, 4, 5, 6, 13, 14]),
        ("right", 7, [1, 7, 8, 9, 21, 22]),
        ("left", 7, [5, 10, 11, 12, 25, 26]),
    ],
)
def test_padded_table(padding, max_length, index):
    rows = Rows.padded(TOKENS, RESPONSES, padding=padding, max_length=max_length)
    target, sample, position = [12, 21, 22, 23, 41, 42], [0, 1, 1, 1, 3, 3], [0, 0, 1, 2, 0, 1]
    assert_plan(rows, list(zip(index, target, sample, position, strict=True)))
    assert rows.token_shape == (4, max_length or 4)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padded_tensor_equals_lists(padding):
    width = 6
    lines = torch.full((4, width), -1)
    for line, ids in zip(lines, TOKENS, strict=True):
        line[slice(width - len(ids), None) if padding == "left" else slice(len(ids))] = torch.tensor(ids)
    rows = Rows.padded(lines, RESPONSES, MASKS, lengths=[3, 4, 3, 3], padding=padding, loss_mask_only=True)
    twin = Rows.padded(TOKENS, RESPONSES, MASKS, max_length=width, padding=padding, loss_mask_only=True)
    assert rows.index.tolist() == ([4, 9] if padding == "left" else [1, 7])
    assert rows.target.tolist() == [12, 22]
    for name in ("index", "target", "sample", "position", "slot"):
        assert torch.equal(getattr(rows, name), getattr(twin, name)), name
    assert (rows.token_shape, rows.held, rows.counts) == (twin.token_shape, twin.held, twin.counts)


@st.composite
def lines(draw):
    """``[N, S]`` lines with padding on both sides, their attention mask, and how many tokens of each are response."""
    sizes = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(2, 5), st.integers(0, 3)), min_size=1, max_size=4))
    width = max(sum(size) for size in sizes)
    tokens, mask = torch.zeros(2, len(sizes), width, dtype=torch.int64)
    for n, (left, length, _) in enumerate(sizes):
        tokens[n, left : left + length] = 10 * (n + 1) + torch.arange(length)
        mask[n, left : left + length] = 1
    return tokens, mask, [draw(st.integers(0, length - 1)) for _, length, _ in sizes]


@given(lines(), st.sampled_from([torch.int64, torch.bool, torch.float32]))
def test_an_attention_mask_says_where_the_padding_is(batch, dtype):
    tokens, mask, responses = batch
    rows = Rows.padded(tokens, responses, attention_mask=mask.to(dtype))
    index, target = [], []
    for n, response in enumerate(responses):
        real = mask[n].nonzero().squeeze(1).tolist()
        for place in real[len(real) - response :]:
            index.append(n * tokens.shape[1] + place - 1)
            target.append(int(tokens[n, place]))
    assert (rows.index.tolist(), rows.target.tolist()) == (index, target)
    assert rows.response_lengths == tuple(responses)


@given(lines())
def test_lengths_of_lines_are_right_or_refused(batch):
    """Wherever the padding is: the rows of the attention mask, or an error. Each id of these lines is another."""
    tokens, mask, responses = batch
    right = Rows.padded(tokens, responses, attention_mask=mask)
    lengths, width = mask.sum(1).tolist(), tokens.shape[1]
    for padding in ("left", "right"):
        out = [line[: width - n] if padding == "left" else line[n:] for line, n in zip(tokens, lengths, strict=True)]
        if any(len(set(places.tolist())) > 1 for places in out):
            with pytest.raises(LogitlessError, match=f"on the {padding}, but it has"):
                Rows.padded(tokens, responses, lengths=lengths, padding=padding)
        elif not any(places.any() for places in out):
            rows = Rows.padded(tokens, responses, lengths=lengths, padding=padding)
            assert rows.index.tolist() == right.index.tolist()
        else:
            # One token is one id, as padding is: a line with one place of padding, on the other side. Nobody can tell.
            assert width - max(lengths) <= 1


def test_padding_is_told_from_tokens():
    """An end-of-sequence token that is also the padding; what a model wrote after its end; a first token as padding."""
    both = torch.tensor([[2, 2, 5, 6, 2, 2], [2, 5, 6, 7, 8, 2]])
    with pytest.raises(LogitlessError, match=r"leave out 3 places of line 0 on the right, but it has 2 of padding"):
        Rows.padded(both, [1, 1], lengths=[3, 5])
    written = torch.tensor([[2, 5, 6, 2, 8, 9], [2, 5, 6, 7, 8, 2]])
    assert Rows.padded(written, [1, 1], lengths=[4, 6]).target.tolist() == [2, 2]
    right = torch.tensor([[2, 5, 6, 2, 2, 2], [2, 5, 6, 7, 8, 2]])
    assert Rows.padded(right, [1, 1], lengths=[4, 5]).target.tolist() == [2, 8]


def test_lines_padded_on_both_sides_cut_zigzag():
    tokens = torch.tensor([[0, 5, 6, 7, 8, 9, 0, 0]])
    parts = [Rows.padded(tokens, [3], attention_mask=tokens != 0, cp=Zigzag(rank, 2)) for rank in range(2)]
    assert [part.target.tolist() for part in parts] == [[], [7, 8, 9]]
    assert parts[1].index.tolist() == [0, 1, 2]


def test_at_keeps_the_order_it_is_given():
    rows = Rows.at([5, 0, 3], [7, -100, 9], num_tokens=8)
    assert_plan(rows, [(5, 7, 0, 0), (0, -100, 0, 1), (3, 9, 0, 2)])
    assert rows.held == rows.counts == (3,)
    assert rows.take(torch.arange(8) * 10).tolist() == [50, 0, 30]
    assert rows.expand(torch.tensor([1.0, 2.0, 3.0])).tolist() == [2, 0, 0, 3, 0, 1, 0, 0]


def test_at_without_a_length_takes_from_any():
    rows = Rows.at(torch.tensor([4, 1], dtype=torch.int32), torch.tensor([2, 3], dtype=torch.uint8))
    assert rows.num_tokens is None
    assert_plan(rows, [(4, 2, 0, 0), (1, 3, 0, 1)])
    assert rows.take(torch.arange(5)).tolist() == [4, 1]
    assert rows.take(torch.arange(9)).tolist() == [4, 1]


def test_every_row_of_a_whole_tensor():
    rows = Rows.every(torch.tensor([[4, -100, 6], [7, 8, 9]]))
    assert_plan(rows, [(0, 4, 0, 0), (1, -100, 0, 1), (2, 6, 0, 2), (3, 7, 0, 3), (4, 8, 0, 4), (5, 9, 0, 5)])
    assert rows.token_shape == (2, 3)
    assert rows.expand(torch.arange(6.0)).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_every_of_a_scalar_target_is_one_row():
    rows = Rows.every(torch.tensor(3))
    assert_plan(rows, [(0, 3, 0, 0)])
    assert rows.token_shape == ()
    assert rows.num_tokens == 1


@pytest.mark.parametrize("kind", [list, torch.tensor])
@pytest.mark.parametrize("mask_of", [list, torch.tensor, lambda m: torch.tensor(m, dtype=torch.bool)])
def test_kinds_of_tokens_and_masks_agree(kind, mask_of):
    samples = [(t, r, m) for t, r, m in zip(TOKENS, RESPONSES, MASKS, strict=True) if r]
    rows = Rows.packed(
        [kind(t) for t, _, _ in samples],
        torch.tensor([r for _, r, _ in samples]),
        [mask_of(m) for _, _, m in samples],
        loss_mask_only=True,
    )
    assert_plan(rows, [(1, 12, 0, 0), (4, 22, 1, 1)])


def test_a_fractional_mask_counts():
    masks = [torch.tensor([0.5, 0.0, 0.25])]
    assert Rows.packed([[1, 2, 3, 4]], [3], masks, loss_mask_only=True).position.tolist() == [0, 2]


def test_a_list_of_fractions_counts():
    masks = [[0.5, 0.0, 0.25]]
    assert Rows.packed([[1, 2, 3, 4]], [3], masks, loss_mask_only=True).position.tolist() == [0, 2]


def test_int32_tokens_become_int64():
    rows = Rows.packed([torch.tensor([7, 8, 9], dtype=torch.int32)], [2])
    assert_plan(rows, [(0, 8, 0, 0), (1, 9, 0, 1)])


# Empty things.


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(lambda: Rows.packed([], []), id="packed"),
        pytest.param(lambda: Rows.packed([], [], [], loss_mask_only=True), id="packed-masked"),
        pytest.param(lambda: Rows.padded([], []), id="padded"),
        pytest.param(lambda: Rows.padded([], [], padding="left", max_length=5), id="padded-left"),
        pytest.param(lambda: Rows.padded(torch.zeros(0, 5, dtype=torch.int64), [], lengths=[]), id="padded-tensor"),
    ],
)
def test_no_samples(rows):
    rows = rows()
    assert_plan(rows, [])
    assert rows.held == rows.counts == ()
    assert rows.num_tokens == 0
    nothing = torch.zeros(0)
    assert rows.split(nothing) == []
    assert rows.expand(nothing).shape == rows.token_shape
    assert rows.sum_by_sample(nothing).tolist() == []
    assert rows.take(torch.zeros(*rows.token_shape, 3)).shape == (0, 3)


@pytest.mark.parametrize("masked", [False, True])
def test_samples_without_rows(masked):
    if masked:
        rows = Rows.packed([[1, 2, 3], [4, 5]], [2, 1], [[0, 0], [0]], loss_mask_only=True)
    else:
        rows = Rows.packed([[1, 2, 3], [4, 5]], [0, 0])
    assert_plan(rows, [])
    nothing = torch.zeros(0, requires_grad=True)
    assert [part.tolist() for part in rows.split(nothing)] == ([[0.0, 0.0], [0.0]] if masked else [[], []])
    sums = rows.sum_by_sample(nothing)
    assert sums.tolist() == [0.0, 0.0]
    assert rows.expand(nothing).tolist() == [0.0] * 5
    (sums.sum() + rows.expand(nothing).sum() + sum(part.sum() for part in rows.split(nothing))).backward()
    assert nothing.grad is not None
    assert nothing.grad.shape == (0,)


def test_empty_samples_beside_full_ones():
    rows = Rows.packed([[], [5, 6], []], [0, 1, 0])
    assert_plan(rows, [(0, 6, 1, 0)])
    assert rows.sum_by_sample(torch.tensor([3.0])).tolist() == [0.0, 3.0, 0.0]


# Properties, against an oracle that walks token by token.


@dataclass(frozen=True)
class Batch:
    """Random samples; ids are unique over the batch, so that a target names the token it came from."""

    tokens: list[list[int]]
    responses: list[int]
    masks: list[list[int]]
    layout: str
    width: int

    def rows(self, **options) -> Rows:
        if self.layout == "packed":
            total = sum(map(len, self.tokens))
            return Rows.packed(self.tokens, self.responses, self.masks, num_tokens=total + self.width, **options)
        longest = max(map(len, self.tokens), default=0)
        width = longest + self.width
        return Rows.padded(self.tokens, self.responses, self.masks, padding=self.layout, max_length=width, **options)

    def walk(self, loss_mask_only: bool = False) -> list[tuple[int, int, int, int]]:
        """(index, target, sample, position) of every scored token."""
        table, start = [], 0
        width = max(map(len, self.tokens), default=0) + self.width
        for sample, (ids, response) in enumerate(zip(self.tokens, self.responses, strict=True)):
            if self.layout != "packed":
                start = sample * width + (width - len(ids) if self.layout == "left" else 0)
            prompt = len(ids) - response
            for position in range(response):
                if not loss_mask_only or self.masks[sample][position]:
                    table.append((start + prompt + position - 1, ids[prompt + position], sample, position))
            start += len(ids)
        return table


@st.composite
def batches(draw) -> Batch:
    shapes = draw(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=6))
    fresh = iter(range(100, 1000))
    tokens, responses, masks = [], [], []
    for prompt, response in shapes:
        response = response if prompt else 0
        tokens.append([next(fresh) for _ in range(prompt + response)])
        responses.append(response)
        masks.append(draw(st.lists(st.integers(0, 1), min_size=response, max_size=response)))
    return Batch(tokens, responses, masks, draw(st.sampled_from(["packed", "left", "right"])), draw(st.integers(0, 3)))


@given(batches())
def test_every_response_token_once(batch):
    rows = batch.rows()
    assert_plan(rows, batch.walk())
    response_ids = [i for ids, r in zip(batch.tokens, batch.responses, strict=True) for i in ids[len(ids) - r :]]
    assert rows.target.tolist() == response_ids
    assert len(set(rows.index.tolist())) == len(rows)


@given(batches())
def test_the_target_is_the_token_after_the_row(batch):
    rows = batch.rows()
    flat = [-1] * rows.num_tokens
    longest = rows.token_shape[-1]
    start = 0
    for sample, ids in enumerate(batch.tokens):
        if batch.layout != "packed":
            start = sample * longest + (longest - len(ids) if batch.layout == "left" else 0)
        flat[start : start + len(ids)] = ids
        start += len(ids)
    assert [flat[i + 1] for i in rows.index.tolist()] == rows.target.tolist()


@given(batches())
def test_positions_count_up(batch):
    rows = batch.rows()
    assert rows.sample.tolist() == sorted(rows.sample.tolist())
    by_sample = [rows.position[rows.sample == n].tolist() for n in range(len(batch.tokens))]
    assert by_sample == [list(range(r)) for r in batch.responses]


@given(batches())
def test_loss_mask_only_is_the_full_plan_at_kept_positions(batch):
    full, some = batch.rows(), batch.rows(loss_mask_only=True)
    assert_plan(some, batch.walk(loss_mask_only=True))
    kept = torch.tensor([m for mask in batch.masks for m in mask], dtype=torch.bool)
    for name in ("index", "target", "sample", "position"):
        assert torch.equal(getattr(some, name), getattr(full, name)[kept]), name
    values = torch.arange(1.0, len(some) + 1)
    everywhere = torch.zeros(len(full))
    everywhere[kept] = values
    assert_close(some.split(values), full.split(everywhere), rtol=0, atol=0)
    assert torch.equal(some.expand(values), full.expand(everywhere))
    assert some.held == full.held
    assert some.counts == tuple(sum(mask) for mask in batch.masks)


@given(batches(), st.booleans(), st.sampled_from([(), (3,)]))
def test_movement_matches_a_loop(batch, loss_mask_only, feature):
    rows, table = batch.rows(loss_mask_only=loss_mask_only), batch.walk(loss_mask_only)
    tokens = torch.randn(*rows.token_shape, *feature, dtype=torch.float64)
    flat = tokens.reshape(rows.num_tokens, *feature)
    x = torch.stack([flat[i] for i, *_ in table]) if table else torch.zeros(0, *feature, dtype=torch.float64)
    assert torch.equal(rows.take(tokens), x)

    full, parts = torch.zeros_like(flat), [torch.zeros(r, *feature, dtype=torch.float64) for r in batch.responses]
    sums = torch.zeros(len(batch.tokens), *feature, dtype=torch.float64)
    for value, (index, _, sample, position) in zip(x, table, strict=True):
        full[index] = value
        parts[sample][position] = value
        sums[sample] += value
    assert torch.equal(rows.expand(x), full.reshape(tokens.shape))
    assert_close(rows.split(x), parts, rtol=0, atol=0)
    assert torch.equal(rows.join(parts), x)
    assert torch.equal(rows.join(rows.split(x)), x)
    assert_close(rows.sum_by_sample(x), sums, rtol=1e-14, atol=1e-14)


@given(batches(), st.booleans())
@settings(max_examples=50)
def test_gradients_go_back_where_values_came_from(batch, loss_mask_only):
    rows, table = batch.rows(loss_mask_only=loss_mask_only), batch.walk(loss_mask_only)

    def fresh() -> torch.Tensor:
        return torch.randn(len(rows), dtype=torch.float64, requires_grad=True)

    x = fresh()
    g = torch.randn(rows.token_shape, dtype=torch.float64)
    rows.expand(x).backward(g)
    assert x.grad.tolist() == [float(g.flatten()[i]) for i, *_ in table]

    x = fresh()
    g_parts = [torch.randn(r, dtype=torch.float64) for r in batch.responses]
    torch.cat(rows.split(x)).backward(torch.cat(g_parts))
    assert x.grad.tolist() == [float(g_parts[sample][position]) for _, _, sample, position in table]

    x = fresh()
    g = torch.randn(len(batch.tokens), dtype=torch.float64)
    rows.sum_by_sample(x).backward(g)
    assert x.grad.tolist() == [float(g[sample]) for _, _, sample, _ in table]

    tokens = torch.randn(rows.token_shape, dtype=torch.float64, requires_grad=True)
    g = torch.randn(len(rows), dtype=torch.float64)
    rows.take(tokens).backward(g)
    expected = torch.zeros(rows.num_tokens, dtype=torch.float64)
    for value, (index, *_) in zip(g, table, strict=True):
        expected[index] = value
    assert torch.equal(tokens.grad, expected.reshape(rows.token_shape))

    parts = [torch.randn(r, dtype=torch.float64, requires_grad=True) for r in batch.responses]
    rows.join(parts).backward(g)
    for sample, part in enumerate(parts):
        wanted = torch.zeros(len(part), dtype=torch.float64)
        for value, (_, _, owner, position) in zip(g, table, strict=True):
            if owner == sample:
                wanted[position] = value
        assert torch.equal(part.grad, wanted)


@given(st.permutations(range(9)), st.integers(0, 9), st.data())
def test_at_takes_and_expands_like_indexing(order, count, data):
    index = list(order)[:count]
    target = data.draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    rows = Rows.at(index, target, num_tokens=9)
    x = torch.randn(9, 2)
    assert torch.equal(rows.take(x), x[index])
    full = torch.zeros(9, 2)
    full[index] = x[index]
    assert torch.equal(rows.expand(x[index]), full)
    assert_close(rows.sum_by_sample(x[index]), x[index].sum(0, keepdim=True))


def test_sum_by_sample_has_the_same_bits_every_time():
    rows = Rows.packed([[0] * 1001, [0] * 508], [1000, 507])
    x = torch.randn(len(rows))
    first = rows.sum_by_sample(x)
    assert all(torch.equal(rows.sum_by_sample(x), first) for _ in range(5))


def test_scale():
    """200,000 tokens in 1,000 samples: every count, and the first and last rows, by arithmetic."""
    lengths = [200 + (n % 7 - 3) * 10 for n in range(1000)]
    lengths[-1] += 200_000 - sum(lengths)
    responses = [length // 2 for length in lengths]
    tokens, start = [], 0
    for length in lengths:
        tokens.append(list(range(start, start + length)))
        start += length
    masks = [[position % 3 == 0 for position in range(r)] for r in responses]
    # Ids count up over the whole pack, so the token after row i is i + 1.
    rows = Rows.packed(tokens, responses)
    assert start == rows.num_tokens == 200_000
    assert len(rows) == sum(responses)
    assert torch.equal(rows.target, rows.index + 1)
    assert rows.counts == tuple(responses)
    some = Rows.packed(tokens, responses, masks, loss_mask_only=True)
    assert torch.equal(some.target, some.index + 1)
    assert bool((some.position % 3 == 0).all())
    assert some.counts == tuple((r + 2) // 3 for r in responses)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (Rows.packed([[1, 2, 3], [4, 5]], [2, 1]), "Rows(3 rows of 2 samples, tokens [5], cpu)"),
        (
            Rows.padded([[1, 2], [3, 4, 5]], [1, 2], [[1], [0, 1]]),
            "Rows(3 rows of 2 samples, tokens [2, 3], masked, cpu)",
        ),
        (Rows.at([4], [2]), "Rows(1 row, any tokens, cpu)"),
        (
            Rows.packed([list(range(8))], [4], cp=Zigzag(1, 2)),
            "Rows(3 rows of 1 sample, tokens [4], part 1 of 2 (Zigzag), cpu)",
        ),
    ],
)
def test_repr(rows, text):
    """Short, and of rows whose values nobody can see."""
    assert repr(rows) == text
    assert repr(replace(rows, index=rows.index.to("meta"))) == text.replace("cpu", "meta")


class _Copies(TorchDispatchMode):
    """Counts copies from the CPU to another device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            self.count += args[0].device.type == "cpu" and torch.device(kwargs.get("device", "cpu")).type != "cpu"
        return func(*args, **(kwargs or {}))


def test_rows_go_to_a_device_in_one_copy():
    """The meta device stands for any other: it has no values, but each tensor's place in the one buffer."""
    masks = [[1, 0, 1, 1], [0, 1, 1]]
    made = {"tokens": [list(range(9)), list(range(6))], "response_lengths": [4, 3], "loss_masks": masks}
    here = Rows.packed(**made, loss_mask_only=True)
    with _Copies() as copies:
        there = Rows.packed(**made, loss_mask_only=True, device="meta")
    assert copies.count == 1
    place = 0
    for name in ("index", "target", "sample", "position", "response", "totals", "slot", "mask"):
        mine, its = getattr(here, name), getattr(there, name)
        assert (its.shape, its.dtype, its.device.type) == (mine.shape, mine.dtype, "meta"), name
        assert name == "mask" or its.storage_offset() == place, name
        place += mine.numel()
