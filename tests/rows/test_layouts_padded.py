"""Layouts of padded lines and of other frameworks, as tables written out by hand."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

import cuts
import pytest
import torch
from cuts import Batch, round_up, token_id
from hypothesis import given, settings
from hypothesis import strategies as st
from schemes import Layout, batches, layouts
from shared.layouts import SLIME_2, assert_table

from logitless import Contiguous, Kept, LogitlessError, Rows, Zigzag, logprobs

LINES = Batch([5, 9, 2], [2, 6, 1])


def test_padded_lines_zigzag():
    first, second = (Rows.padded(LINES.tokens, [2, 6, 1], max_length=10, cp=Zigzag(rank, 2)) for rank in range(2))
    assert_table(first, [2, 8, 12], [103, 203, 301], [0, 1, 2], [0, 0, 0], [1, 1, 1])
    assert_table(
        second,
        [0, 6, 7, 8, 9, 10],
        [104, 204, 205, 206, 207, 208],
        [0, 1, 1, 1, 1, 1],
        [1, 1, 2, 3, 4, 5],
        [1, 5, 0],
    )
    assert first.token_shape == second.token_shape == (3, 6)
    lines = torch.tensor([ids + [7] * (10 - len(ids)) for ids in LINES.tokens])
    from_tensor = Rows.padded(lines, [2, 6, 1], lengths=[5, 9, 2], cp=Zigzag(1, 2))
    assert torch.equal(from_tensor.index, second.index)
    assert torch.equal(from_tensor.target, second.target)


def test_padded_lines_unsplit():
    rows = Rows.padded(LINES.tokens, [2, 6, 1], max_length=10)
    assert rows.index.tolist() == [2, 3, 12, 13, 14, 15, 16, 17, 20]
    assert rows.token_shape == (3, 10)


def test_left_padded_lines_zigzag():
    """The padding comes first, so the rows sit at the end of the 10 places; two more round the line up to 12.

    rank 0   . . .  4 . .  | . 0 1  8 . .  | . . .  1 . .     rank 1   . . 0  1 2 3  | 2 3 4  5 6 7  | . . .  . . 0
    """
    first, second = (
        Rows.padded(LINES.tokens, [2, 6, 1], max_length=10, padding="left", cp=Zigzag(rank, 2)) for rank in range(2)
    )
    assert_table(first, [], [], [], [], [0, 0, 0])
    assert_table(
        second,
        [4, 5, 6, 7, 8, 9, 10, 11, 17],
        [103, 104, 203, 204, 205, 206, 207, 208, 301],
        [0, 0, 1, 1, 1, 1, 1, 1, 2],
        [0, 1, 0, 1, 2, 3, 4, 5, 0],
        [2, 6, 1],
    )


def test_contiguous_lines_do_not_exist():
    with pytest.raises(LogitlessError, match=r"cp must be a Zigzag or None but is Contiguous.*Rows\.packed"):
        Rows.padded(LINES.tokens, [2, 6, 1], max_length=10, cp=Contiguous(0, 2))


def test_sequences_padded_to_the_tensor_parallel_size():
    """Without context parallelism, multiples of tp = 4: lengths 5, 3, 8 start at 0, 8, 12 of 20."""
    batch = Batch([5, 3, 8], [3, 2, 1])
    starts = [0, 8, 12, 20]
    for options in ({"align": 4}, {"cu_seqlens": starts}, {"cu_seqlens": torch.tensor(starts, dtype=torch.int32)}):
        rows = Rows.packed(batch.tokens, batch.responses, **options)
        assert_table(
            rows, [1, 2, 3, 8, 9, 18], [102, 103, 104, 201, 202, 307], [0, 0, 0, 1, 1, 2], [0, 1, 2, 0, 1, 0], [3, 2, 1]
        )
        assert rows.num_tokens == 20


ALIGNED = Batch([5, 11, 9], [4, 7, 6])


@pytest.mark.parametrize("options", [{"align": 8}, {"cu_seqlens": [0, 8, 24, 40]}])
def test_sequences_padded_for_both_groups(options):
    first, second = (Rows.packed(ALIGNED.tokens, [4, 7, 6], cp=Zigzag(rank, 2), **options) for rank in range(2))
    assert_table(first, [0, 1, 7, 14, 15], [101, 102, 204, 303, 304], [0, 0, 1, 2, 2], [0, 1, 0, 0, 1], [2, 1, 2])
    assert_table(
        second,
        [0, 1, 4, 5, 6, 7, 8, 9, 12, 13, 14, 15],
        [103, 104, 205, 206, 207, 208, 209, 210, 305, 306, 307, 308],
        [0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2],
        [2, 3, 1, 2, 3, 4, 5, 6, 2, 3, 4, 5],
        [2, 6, 4],
    )
    assert first.num_tokens == second.num_tokens == 20


def test_last_sequence_absorbs_the_padding():
    first, second = (
        Rows.packed(ALIGNED.tokens, [4, 7, 6], cp=Zigzag(rank, 2), cu_seqlens=[0, 8, 24, 48]) for rank in range(2)
    )
    assert first.index.tolist() == [0, 1, 7, 14, 15, 16, 17]
    assert first.target.tolist() == [101, 102, 204, 303, 304, 305, 306]
    assert second.index.tolist() == [0, 1, 4, 5, 6, 7, 8, 9, 12, 13]
    assert second.target.tolist() == [103, 104, 205, 206, 207, 208, 209, 210, 307, 308]
    assert first.num_tokens == second.num_tokens == 24


def test_padding_in_an_entry_of_its_own():
    """slime appends the padding of the pack to cu_seqlens as one more sequence; no sample owns it."""
    batch = Batch([5, 3], [2, 2])
    rows = Rows.packed(batch.tokens, batch.responses, cu_seqlens=[0, 5, 8, 16], num_tokens=16)
    assert_table(rows, [2, 3, 5, 6], [103, 104, 201, 202], [0, 0, 1, 1], [0, 1, 0, 1], [2, 2])
    split = Rows.packed(batch.tokens, batch.responses, cp=Zigzag(1, 2), cu_seqlens=[0, 8, 12, 24], num_tokens=12)
    # Chunks of 2 and 1, local starts 0 and 4: rank 1 holds 2 3 4 . | 1 2 and six places of padding.
    assert_table(split, [0, 1, 4], [103, 104, 202], [0, 0, 1], [0, 1, 1], [2, 1])
    assert split.num_tokens == 12


@pytest.mark.parametrize(
    ("cp", "starts", "num_tokens", "index"),
    [
        (None, [0, 5, 8, 16], 16, [2, 3, 5, 6]),
        (Zigzag(1, 2), [0, 8, 12, 24], 12, [0, 1, 4]),
        (Contiguous(0, 2), [0, 5, 8, 16], 8, [2, 3, 5, 6]),
        (Contiguous(1, 2), [0, 5, 8, 16], 8, []),
    ],
)
def test_the_padding_entry_counts_towards_the_local_length(cp, starts, num_tokens, index):
    """cu_seqlens says how long the stream is, padding included, and a contiguous window is a part of that."""
    rows = Rows.packed(Batch([5, 3], [2, 2]).tokens, [2, 2], cp=cp, cu_seqlens=starts)
    assert rows.num_tokens == num_tokens
    assert rows.index.tolist() == index


def test_sequences_padded_to_a_multiple_of_the_users():
    """Multiples of 12 = 2 * cp * 2 over three ranks: lengths 7 and 22 become 12 and 24, chunks of 2 and 4.

    rank 0   0 1  . .  | 0 1 2 3  20 21 . .
    rank 1   2 3  . .  | 4 5 6 7  16 17 18 19
    rank 2   4 5  6 .  | 8 9 10 11  12 13 14 15
    """
    batch = Batch([7, 22], [6, 12])
    rows = [Rows.packed(batch.tokens, batch.responses, cp=Zigzag(rank, 3), align=12) for rank in range(3)]
    assert_table(rows[0], [0, 1, 8], [101, 102, 221], [0, 0, 1], [0, 1, 11], [2, 1])
    assert_table(
        rows[1], [0, 1, 8, 9, 10, 11], [103, 104, 217, 218, 219, 220], [0, 0, 1, 1, 1, 1], [2, 3, 7, 8, 9, 10], [2, 4]
    )
    assert_table(
        rows[2],
        [0, 1, 5, 6, 7, 8, 9, 10, 11],
        [105, 106, 210, 211, 212, 213, 214, 215, 216],
        [0, 0, 1, 1, 1, 1, 1, 1, 1],
        [4, 5, 0, 1, 2, 3, 4, 5, 6],
        [2, 7],
    )
    assert [r.num_tokens for r in rows] == [12, 12, 12]


@pytest.mark.parametrize(
    ("size", "num_tokens", "index"),
    [
        (2, None, [[1, 2, 3, 8, 9], [2, 3, 4, 5, 6]]),
        (4, None, [[1, 2, 3], [3, 4], [2, 3, 4], [0, 1]]),
        (4, 7, [[1, 2, 3], [1, 2, 5, 6], [0, 1, 2], []]),
    ],
)
def test_verl_contiguous(size, num_tokens, index):
    batch = Batch([5, 3, 6], [3, 2, 5])
    for options in ({"align": 4}, {"cu_seqlens": [0, 8, 12, 20]}):
        rows = [
            Rows.packed(batch.tokens, batch.responses, cp=Contiguous(rank, size), num_tokens=num_tokens, **options)
            for rank in range(size)
        ]
        assert [r.index.tolist() for r in rows] == index
        assert [t for r in rows for t in r.target.tolist()] == [102, 103, 104, 201, 202, 301, 302, 303, 304, 305]
        assert [r.num_tokens for r in rows] == [num_tokens or 20 // size] * size


def test_values_of_a_value_head():
    """The same rows select ``[T, 1]`` outputs, one per response token, for each sample."""
    rows = Rows.packed(SLIME_2.tokens, [6, 2, 1], cp=Zigzag(1, 2))
    values = torch.arange(12.0)[:, None]
    assert [v.tolist() for v in rows.split(rows.take(values))] == [
        [[1.0], [2.0], [3.0], [4.0], [5.0]],
        [[6.0]],
        [[9.0]],
    ]


@given(batches(), layouts())
@settings(max_examples=300)
def test_rows_are_those_of_the_tokens_held(batch: Batch, layout: Layout):
    seen: Counter = Counter()
    for rank, held in enumerate(layout.held(batch)):
        rows = layout.rows(batch, rank)
        wanted = [
            (local, token_id(token[0], token[1] + 1), token[0], batch.predicts(token))
            for local, token in enumerate(held)
            if batch.predicts(token) is not None
        ]
        found = list(zip(*(x.tolist() for x in (rows.index, rows.target, rows.sample, rows.position)), strict=True))
        assert found == wanted
        assert rows.num_tokens == len(held)
        assert all(index < rows.num_tokens for index in rows.index.tolist())
        seen.update((sample, position) for _, _, sample, position in found)
    everything = [(sample, position) for sample, n in enumerate(batch.responses) for position in range(n)]
    assert seen == Counter(everything), "not every response token has exactly one row"


@given(batches(), st.integers(1, 5), st.integers(1, 4), st.integers(0, 3))
@settings(max_examples=150)
def test_the_closed_formula_of_padded_sequences(batch: Batch, size: int, tp: int, absorb: int):
    """``rank = k if k < cp else 2cp-1-k; local = cu_padded[i] / cp + (offset - k h) + (h if k >= cp)``, with
    ``h = span / 2cp`` and ``k = floor(offset / h)``, as SkyRL and NeMo-RL compute it."""
    align = 2 * size * tp
    spans = [round_up(n, align) for n in batch.lengths]
    spans[-1] += absorb * align
    starts = [0, *accumulate(spans)]
    wanted: list[list[tuple[int, int, int]]] = [[] for _ in range(size)]
    for sample, response in enumerate(batch.responses):
        half = spans[sample] // (2 * size)
        for position in range(response):
            offset = batch.prompt(sample) + position - 1
            k = offset // half
            rank = k if k < size else 2 * size - 1 - k
            local = starts[sample] // size + (offset - k * half) + (half if k >= size else 0)
            wanted[rank].append((local, sample, position))
    for rank in range(size):
        rows = Rows.packed(batch.tokens, batch.responses, cp=Zigzag(rank, size), cu_seqlens=starts)
        found = zip(rows.index.tolist(), rows.sample.tolist(), rows.position.tolist(), strict=True)
        assert list(found) == wanted[rank]
        assert rows.num_tokens == starts[-1] // size
        if not absorb:
            assert torch.equal(
                Rows.packed(batch.tokens, batch.responses, cp=Zigzag(rank, size), align=align).index, rows.index
            )


@given(batches(), st.integers(1, 5), st.integers(1, 8))
@settings(max_examples=150)
def test_the_windows_of_a_contiguous_stream(batch: Batch, size: int, multiple: int):
    """Rows are the intersection of ``[start + P - 1, start + L - 1)`` with the rank's window, as slime computes it."""
    window = round_up(sum(batch.lengths), size * multiple) // size
    starts = [0, *accumulate(batch.lengths)]
    for rank in range(size):
        low, high = rank * window, (rank + 1) * window
        wanted = []
        for sample, (start, length, response) in enumerate(
            zip(starts[:-1], batch.lengths, batch.responses, strict=True)
        ):
            first, last = max(start + length - response - 1, low), min(start + length - 1, high)
            wanted += [(row - low, sample) for row in range(first, last) if response]
        rows = Rows.packed(batch.tokens, batch.responses, cp=Contiguous(rank, size), num_tokens=window)
        assert list(zip(rows.index.tolist(), rows.sample.tolist(), strict=True)) == wanted


@given(batches(), layouts())
@settings(max_examples=150)
def test_split_and_held(batch: Batch, layout: Layout):
    parts = []
    for rank in range(layout.size):
        rows = layout.rows(batch, rank)
        split = rows.split(rows.position.double())
        assert [len(x) for x in split] == list(rows.held) == list(rows.counts)
        assert torch.equal(rows.join(split), rows.position.double())
        parts.append([x.tolist() for x in split])
    for sample, response in enumerate(batch.responses):
        assert sum(len(p[sample]) for p in parts) == response
        assert sorted(x for p in parts for x in p[sample]) == [float(n) for n in range(response)]


@given(batches(), layouts())
@settings(max_examples=150)
def test_loss_mask_only_is_a_subset(batch: Batch, layout: Layout):
    for rank in range(layout.size):
        full, some = layout.rows(batch, rank), layout.rows(batch, rank, loss_mask_only=True)
        counted = [batch.masks[s][p] for s, p in zip(full.sample.tolist(), full.position.tolist(), strict=True)]
        assert full.mask.tolist() == [bool(m) for m in counted]
        assert some.mask.all()
        keep = torch.tensor(counted, dtype=torch.bool)
        for name in ("index", "target", "sample", "position", "response"):
            assert torch.equal(getattr(some, name), getattr(full, name)[keep]), name
        assert some.held == full.held
        assert some.token_shape == full.token_shape
        values = torch.arange(1.0, len(full) + 1)
        for mine, theirs in zip(some.split(values[keep]), full.split(values * keep), strict=True):
            assert mine.tolist() == theirs.tolist()


@given(batches(), layouts(), st.booleans())
@settings(max_examples=150)
def test_from_responses_picks_the_tokens_scored_here(batch: Batch, layout: Layout, loss_mask_only: bool):
    responses = [torch.tensor([1000 * (s + 1) + p for p in range(n)]) for s, n in enumerate(batch.responses)]
    for rank in range(layout.size):
        rows = layout.rows(batch, rank, loss_mask_only=loss_mask_only)
        pairs = zip(rows.sample.tolist(), rows.position.tolist(), strict=True)
        assert rows.from_responses(responses).tolist() == [1000 * (s + 1) + p for s, p in pairs]
        # What the targets are, seen from the response.
        ids = [torch.tensor(t[len(t) - n :]) for t, n in zip(batch.tokens, batch.responses, strict=True)]
        assert torch.equal(rows.from_responses(ids).to(torch.int64), rows.target)


@given(batches(), layouts(), st.booleans())
@settings(max_examples=60)
def test_kept_ids_are_those_of_the_tokens_scored_here(batch: Batch, layout: Layout, loss_mask_only: bool):
    """Response token p of sample s has ``(s + p) % 4`` kept ids, each of which says whose it is."""
    names = [
        [[1000 * s + 10 * p + k for k in range((s + p) % 4)] for p in range(n)] for s, n in enumerate(batch.responses)
    ]
    ids = [torch.tensor([i for run in runs for i in run], dtype=torch.int64) for runs in names]
    lengths = [torch.tensor([len(run) for run in runs], dtype=torch.int64) for runs in names]
    for rank in range(layout.size):
        rows = layout.rows(batch, rank, loss_mask_only=loss_mask_only)
        kept = Kept.from_responses(rows, ids, lengths)
        runs = [names[s][p] for s, p in zip(rows.sample.tolist(), rows.position.tolist(), strict=True)]
        assert kept.lengths.tolist() == [len(run) for run in runs]
        assert kept.ids.tolist() == [i for run in runs for i in run]


@given(batches(max_samples=3), layouts())
@settings(max_examples=60)
def test_logprobs_of_local_logits(batch: Batch, layout: Layout):
    """Logits that put all mass on the next token score 0 on every row, and on no other row."""
    vocab = 17
    ids = [[(7 * s + 5 * t) % vocab for t in range(n)] for s, n in enumerate(batch.lengths)]
    for rank, held in enumerate(layout.held(batch)):
        logits = torch.full((len(held), vocab), -50.0)
        for local, token in enumerate(held):
            if batch.predicts(token) is not None:
                logits[local, ids[token[0]][token[1] + 1]] = 50.0
        rows = layout.rows(batch, rank, tokens=ids)
        out = logprobs(logits.reshape(*rows.token_shape, vocab), rows)
        assert torch.equal(out.logprob, torch.zeros(len(rows)))


def test_no_samples_in_any_scheme():
    for cp in (Zigzag(1, 3), Contiguous(1, 3)):
        rows = Rows.packed([], [], cp=cp)
        assert (len(rows), rows.num_tokens, rows.held) == (0, 0, ())
    assert Rows.padded([], [], cp=Zigzag(0, 2)).token_shape == (0, 0)


TOKENS = Batch([5, 3, 6], [3, 1, 4]).tokens


RESPONSES = [3, 1, 4]


def packed(**options):
    return lambda: Rows.packed(TOKENS, RESPONSES, **options)


def score(num_logits: int, **options):
    return lambda: logprobs(torch.zeros(num_logits, 400), Rows.packed(TOKENS, RESPONSES, **options))


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (packed(cp=Zigzag(1, 2), align=6), ["align", "multiple of 4", "rank 1 of 2", "Zigzag", "is 6"]),
        (packed(align=0), ["align", "is 0"]),
        (packed(align=-4), ["align", "is -4"]),
        (packed(align=2.0), ["align", "is 2.0"]),
        (packed(align=True), ["align", "is True"]),
        (packed(align=4, cu_seqlens=[0, 8, 12, 20]), ["align or cu_seqlens, not both"]),
        (packed(cu_seqlens=[0, 8, 12]), ["cu_seqlens has 3 entries for 3 samples", "4", "5"]),
        (packed(cu_seqlens=[0, 8, 12, 20, 24, 28]), ["cu_seqlens has 6 entries for 3 samples"]),
        (packed(cu_seqlens=[0, 8, 10, 20]), ["cu_seqlens", "sample 1", "2 places", "3 tokens"]),
        (packed(cu_seqlens=[0, 8, 4, 20]), ["cu_seqlens", "sample 1", "-4 places"]),
        (packed(cp=Zigzag(0, 2), cu_seqlens=[0, 8, 14, 22]), ["sample 1", "6 places", "multiple of 4", "rank 0 of 2"]),
        (packed(num_tokens=13), ["num_tokens is 13", "need 14"]),
        (packed(cp=Zigzag(1, 2), num_tokens=9), ["num_tokens is 9", "need 10", "rank 1 of 2"]),
        (packed(cp=Contiguous(1, 3), num_tokens=4), ["3 ranks of 4 tokens hold 12", "need 14", "at least 5"]),
        (score(15), ["made for 14 tokens", "15 rows", "num_tokens"]),
        (score(14, num_tokens=16), ["made for 16 tokens", "14 rows"]),
        (score(14, cp=Zigzag(0, 2)), ["made for 10 tokens", "14 rows"]),
        (score(14, cp=Contiguous(0, 2)), ["made for 7 tokens", "14 rows"]),
        (score(8, cp=Contiguous(1, 2)), ["made for 7 tokens", "8 rows"]),
        (
            lambda: logprobs(torch.zeros(3, 10, 400), Rows.padded(TOKENS, RESPONSES, max_length=10, cp=Zigzag(0, 2))),
            ["made for 18 tokens ([3, 6])", "30 rows ([3, 10])"],
        ),
        (lambda: Rows.padded(TOKENS, RESPONSES, max_length=5, cp=Zigzag(0, 2)), ["sample 2", "6 tokens", "is 5"]),
        (lambda: Rows.packed(TOKENS, [3, 1], cp=Zigzag(0, 2)), ["3 samples", "2 response_lengths"]),
        (lambda: Rows.packed(TOKENS, RESPONSES, [[1] * 3, [1]], cp=Zigzag(0, 2)), ["3 samples", "2 loss_masks"]),
        (
            lambda: Rows.packed(TOKENS, RESPONSES, [[1] * 3, [1, 1], [1] * 4], cp=Zigzag(0, 2)),
            ["sample 1", "2 entries", "1 tokens"],
        ),
        (lambda: Zigzag(0, 0), ["Zigzag", "size", "is 0"]),
        (lambda: Zigzag(2, 2), ["Zigzag", "rank", "0 .. 1", "is 2"]),
        (lambda: Zigzag(-1, 2), ["Zigzag", "rank", "is -1"]),
        (lambda: Contiguous(0.0, 2), ["Contiguous", "rank", "is 0.0"]),
        (lambda: Contiguous(0, True), ["Contiguous", "size", "is True"]),
        (lambda: Contiguous(3, 2), ["Contiguous", "0 .. 1", "is 3"]),
        (lambda: packed(cp=Zigzag(0, 2))().from_responses([torch.zeros(3)] * 2), ["2 tensors for 3 samples"]),
        (
            lambda: packed(cp=Zigzag(0, 2))().from_responses([torch.zeros(3), torch.zeros(2), torch.zeros(4)]),
            ["sample 1", "2 entries", "1 tokens"],
        ),
    ],
)
def test_misconfiguration_is_named(call, parts):
    with pytest.raises(LogitlessError) as caught:
        call()
    text = str(caught.value)
    assert [part for part in parts if part not in text] == [], text


@pytest.mark.parametrize("cp", [2, "zigzag", Zigzag, (0, 2)])
def test_a_scheme_that_is_none(cp):
    for make in (Rows.packed, Rows.padded):
        with pytest.raises(LogitlessError, match="cp must be"):
            make(TOKENS, RESPONSES, cp=cp)


def test_cu_seqlens_that_do_not_start_at_zero():
    """Taken as offsets they would move every row; taken as lengths they would not. Neither is a guess to make."""
    with pytest.raises(LogitlessError, match=r"cu_seqlens.*start.*0"):
        Rows.packed(TOKENS, RESPONSES, cu_seqlens=[4, 12, 16, 24])


def test_cu_seqlens_whose_padding_is_negative():
    with pytest.raises(LogitlessError, match="cu_seqlens"):
        Rows.packed(TOKENS, RESPONSES, cu_seqlens=[0, 8, 12, 20, 16])


def test_the_oracle_disagrees_with_a_wrong_plan():
    """The properties can fail: another rank's plan, or another alignment, is not the oracle's."""
    batch = Batch([11, 3, 5], [6, 2, 1])
    held = Layout("zigzag", 2).held(batch)
    assert held == cuts.zigzag(cuts.padded([11, 3, 5], [12, 4, 8]), 2)
    scored = [[local for local, token in enumerate(tokens) if batch.predicts(token) is not None] for tokens in held]
    assert scored == [[3, 6], [1, 2, 3, 4, 5, 6, 9]]
    assert Layout("zigzag", 2).rows(batch, 1).index.tolist() != scored[0]
    assert Layout("zigzag", 2, align=8).rows(batch, 0).index.tolist() != scored[0]
