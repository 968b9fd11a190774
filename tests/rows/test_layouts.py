"""Which rows each rank scores, in every framework's layout: tables written out by hand, then properties.

In the tables token t of sample i has id ``100 * (i + 1) + t``, so a target shows at a glance which token it is.
Row t of a sample predicts its token t + 1; a sample with P prompt tokens of L needs rows P - 1 .. L - 2.
"""

from __future__ import annotations

import pytest
import torch
from cuts import Batch
from shared.layouts import SLIME_2, assert_table

from logitless import Contiguous, Rows, Zigzag


@pytest.mark.parametrize("num_tokens", [None, 12, 17])
def test_slime_zigzag_of_two(num_tokens):
    first, second = (
        Rows.packed(SLIME_2.tokens, [6, 2, 1], cp=Zigzag(rank, 2), num_tokens=num_tokens) for rank in range(2)
    )
    assert_table(first, [3, 6], [110, 201], [0, 1], [5, 0], [1, 1, 0])
    assert_table(
        second,
        [1, 2, 3, 4, 5, 6, 9],
        [105, 106, 107, 108, 109, 202, 304],
        [0, 0, 0, 0, 0, 1, 2],
        [0, 1, 2, 3, 4, 1, 0],
        [5, 1, 1],
    )
    assert first.token_shape == second.token_shape == (num_tokens or 12,)


def test_slime_zigzag_of_three():
    tokens = Batch([17, 2, 7, 6], [14, 1, 0, 1]).tokens
    rows = [Rows.packed(tokens, [14, 1, 0, 1], cp=Zigzag(rank, 3)) for rank in range(3)]
    assert_table(rows[0], [2, 3, 6], [103, 116, 201], [0, 0, 1], [0, 13, 0], [2, 1, 0, 0])
    assert_table(
        rows[1],
        [0, 1, 2, 3, 4, 5, 13],
        [104, 105, 106, 113, 114, 115, 405],
        [0, 0, 0, 0, 0, 0, 3],
        [1, 2, 3, 10, 11, 12, 0],
        [6, 0, 0, 1],
    )
    assert_table(rows[2], [0, 1, 2, 3, 4, 5], [107, 108, 109, 110, 111, 112], [0] * 6, [4, 5, 6, 7, 8, 9], [6, 0, 0, 0])
    assert [r.num_tokens for r in rows] == [14, 14, 14]


def test_slime_zigzag_windows_of_a_rank_without_rows():
    """Length 8 in four chunks of 2; the response is token 7, which token 6 of rank 0 predicts."""
    rows = [Rows.packed([list(range(8))], [1], cp=Zigzag(rank, 2)) for rank in range(2)]
    assert_table(rows[0], [2], [7], [0], [0], [1])
    assert_table(rows[1], [], [], [], [], [0])
    assert rows[1].num_tokens == 4


def test_zigzag_of_one_rank_is_the_pack_with_even_lengths():
    """Lengths 5 and 4: the first is padded to 6, so the second starts there."""
    rows = Rows.packed(Batch([5, 4], [2, 3]).tokens, [2, 3], cp=Zigzag(0, 1))
    assert_table(rows, [2, 3, 6, 7, 8], [103, 104, 201, 202, 203], [0, 0, 1, 1, 1], [0, 1, 0, 1, 2], [2, 3])
    assert rows.num_tokens == 10


def test_masks_follow_the_zigzag():
    """The first table again, with masks: 1 0 0 1 1 1 for sample 0, 0 1 for sample 1, 1 for sample 2."""
    masks = [[1, 0, 0, 1, 1, 1], [0, 1], [1]]
    whole = [Rows.packed(SLIME_2.tokens, [6, 2, 1], masks, cp=Zigzag(rank, 2)) for rank in range(2)]
    assert whole[0].mask.tolist() == [True, False]
    assert whole[1].mask.tolist() == [True, False, False, True, True, True, True]
    some = [Rows.packed(SLIME_2.tokens, [6, 2, 1], masks, loss_mask_only=True, cp=Zigzag(rank, 2)) for rank in range(2)]
    assert some[0].index.tolist() == [3]
    assert some[0].target.tolist() == [110]
    assert some[0].held == (1, 1, 0)
    assert some[0].counts == (1, 0, 0)
    assert some[1].index.tolist() == [1, 4, 5, 6, 9]
    assert some[1].target.tolist() == [105, 108, 109, 202, 304]
    assert some[1].counts == (3, 1, 1)
    parts = some[1].split(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert [p.tolist() for p in parts] == [[1.0, 0.0, 0.0, 2.0, 3.0], [4.0], [5.0]]
    assert some[0].from_responses([torch.arange(6), torch.arange(2), torch.arange(1)]).tolist() == [5]


SLIME_STREAM = Batch([5, 3, 6], [3, 1, 4])


@pytest.mark.parametrize(
    ("size", "num_tokens", "index"),
    [
        (1, None, [[1, 2, 3, 6, 9, 10, 11, 12]]),
        (1, 16, [[1, 2, 3, 6, 9, 10, 11, 12]]),
        (2, None, [[1, 2, 3, 6], [2, 3, 4, 5]]),
        (2, 8, [[1, 2, 3, 6], [1, 2, 3, 4]]),
        (3, 6, [[1, 2, 3], [0, 3, 4, 5], [0]]),
        (4, None, [[1, 2, 3], [2], [1, 2, 3], [0]]),
        (4, 5, [[1, 2, 3], [1, 4], [0, 1, 2], []]),
        (4, 16, [[1, 2, 3, 6, 9, 10, 11, 12], [], [], []]),
    ],
)
def test_slime_contiguous(size, num_tokens, index):
    rows = [
        Rows.packed(SLIME_STREAM.tokens, [3, 1, 4], cp=Contiguous(r, size), num_tokens=num_tokens) for r in range(size)
    ]
    assert [r.index.tolist() for r in rows] == index
    assert [t for r in rows for t in r.target.tolist()] == [102, 103, 104, 202, 302, 303, 304, 305]
    assert [s for r in rows for s in r.sample.tolist()] == [0, 0, 0, 1, 2, 2, 2, 2]
    assert [p for r in rows for p in r.position.tolist()] == [0, 1, 2, 0, 0, 1, 2, 3]
    window = num_tokens or {1: 14, 2: 7, 4: 4}[size]
    assert [r.num_tokens for r in rows] == [window] * size


def test_a_window_that_begins_with_a_prompt_of_one_token():
    """The row of that token predicts a response: it belongs to its own sample, and not to the one before."""
    rows = Rows.packed([[1, 2, 3], [4, 5, 6]], [2, 2], cp=Contiguous(1, 2))
    assert (rows.index.tolist(), rows.target.tolist(), rows.sample.tolist()) == ([0, 1], [5, 6], [1, 1])


def test_slime_contiguous_held():
    """A window of 5 leaves the last of four ranks with padding only."""
    rows = [Rows.packed(SLIME_STREAM.tokens, [3, 1, 4], cp=Contiguous(r, 4), num_tokens=5) for r in range(4)]
    assert [r.held for r in rows] == [(3, 0, 0), (0, 1, 1), (0, 0, 3), (0, 0, 0)]
