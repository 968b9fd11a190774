"""Ids, places and sizes are whole numbers: every such argument of ``Rows`` and ``Kept``, against what is none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import logitless as ll
from logitless import Kept, Rows

IDS, MASK, PLACES = torch.tensor([5, 6, 7]), torch.tensor([0, 1, 1]), torch.arange(3)
ROWS = Rows.packed([[1, 2, 3]], [2])


def engine(**support):
    return Kept.from_engine(ROWS, [SimpleNamespace(**support)])


LISTS = {
    "Rows.at: index": (lambda x: Rows.at(x, [4, 5]), [0, 1]),
    "Rows.at: target": (lambda x: Rows.at([0, 1], x), [0, 1]),
    "Rows.packed: the tokens of sample 1": (lambda x: Rows.packed([[1, 2], x], [1, 1]), [4, 5]),
    "Rows.packed: response_lengths": (lambda x: Rows.packed([[1, 2], [3, 4]], x), [1, 1]),
    "Rows.packed: cu_seqlens": (lambda x: Rows.packed([[1, 2]], [1], cu_seqlens=x), [0, 2]),
    "Rows.padded: the tokens of sample 0": (lambda x: Rows.padded([x, [1, 2]], [1, 1]), [4, 5]),
    "Rows.padded: response_lengths": (lambda x: Rows.padded([[1, 2], [3, 4]], x), [1, 1]),
    "Rows.padded: lengths": (lambda x: Rows.padded(torch.tensor([[1, 2], [3, 4]]), [1, 1], lengths=x), [2, 2]),
    "Rows.from_mask: cu_seqlens": (lambda x: Rows.from_mask(IDS, MASK, cu_seqlens=x), [0, 3]),
    "Rows.from_labels: cu_seqlens": (lambda x: Rows.from_labels(IDS, cu_seqlens=x), [0, 3]),
    "Kept.from_lists: lists, the ids of row 1": (lambda x: Kept.from_lists([[3], x]), [4, 5]),
    "Kept.from_engine: token_ids of sample 0": (lambda x: engine(token_ids=x, lengths=[1, 1]), [4, 5]),
    "Kept.from_engine: lengths of sample 0": (lambda x: engine(token_ids=[4, 5], lengths=x), [1, 1]),
    "Kept.from_engine: offsets of sample 0": (lambda x: engine(token_ids=[4, 5], offsets=x), [0, 1, 2]),
    "Kept.from_engine: supports: the ids of sample 0": (lambda x: Kept.from_engine(ROWS, [[[4], x]]), [4, 5]),
    "Kept.from_responses: the ids of sample 0": (lambda x: Kept.from_responses(ROWS, [x], [[1, 1]]), [4, 5]),
    "Kept.from_responses: the lengths of sample 0": (lambda x: Kept.from_responses(ROWS, [[4, 5]], [x]), [1, 1]),
}

TENSORS = {
    "Rows.every: target": (Rows.every, IDS),
    "Rows.from_mask: input_ids": (lambda x: Rows.from_mask(x, MASK, cu_seqlens=[0, 3]), IDS),
    "Rows.from_mask: position_ids": (lambda x: Rows.from_mask(IDS, MASK, position_ids=x), PLACES),
    "Rows.from_labels: labels": (Rows.from_labels, IDS),
    "Rows.from_labels: position_ids": (lambda x: Rows.from_labels(IDS, position_ids=x), PLACES),
    "Kept: ids": (lambda x: Kept(x, torch.ones(3, dtype=torch.int64)), IDS),
    "Kept: lengths": (lambda x: Kept(IDS, x), torch.ones(3, dtype=torch.int64)),
    "Kept.from_offsets: offsets": (lambda x: Kept.from_offsets(IDS, x), torch.tensor([0, 3])),
    "Kept.from_padded: ids": (Kept.from_padded, IDS[None]),
    "Kept.from_bits: words": (lambda x: Kept.from_bits(x, 64), IDS[:, None]),
}

SIZES = {
    "Rows.at: num_tokens": (lambda x: Rows.at([0], [1], num_tokens=x), 8),
    "Rows.packed: num_tokens": (lambda x: Rows.packed([[1, 2]], [1], num_tokens=x), 8),
    "Rows.packed: align": (lambda x: Rows.packed([[1, 2]], [1], align=x), 8),
    "Rows.padded: max_length": (lambda x: Rows.padded([[1, 2]], [1], max_length=x), 8),
    "Kept.from_bits: vocab_size": (lambda x: Kept.from_bits(IDS[:, None].to(torch.int8), x), 8),
    "Zigzag: size": (lambda x: ll.Zigzag(0, x), 8),
    "Contiguous: rank": (lambda x: ll.Contiguous(x, 9), 8),
}


def no_integers(good):
    """As floats that would be cut, floats that are whole, bools, and what is no number."""
    yield [*good[:-1], good[-1] + 0.9]
    yield [float(x) for x in good]
    yield [*good[:-1], bool(good[-1])]
    yield [*good[:-1], "1"]
    yield [*good[:-1], None]
    yield [*good[:-1], 2**63]
    yield torch.tensor(good) + 0.9
    yield torch.tensor(good) != 0
    yield torch.tensor(good).to(torch.complex64)


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_other_things_is_refused(name):
    call, good = LISTS[name]
    call(good)
    call(torch.tensor(good))
    call(torch.tensor(good, dtype=torch.int32))
    for bad in no_integers(good):
        with pytest.raises(ll.LogitlessError) as caught:
            call(bad)
        text = str(caught.value)
        assert text.startswith(name), (bad, text)
        # What came: the dtype, or the first entry that is none.
        wrong = [x for x in bad if type(x) is not int or x >= 2**63]
        assert (str(bad.dtype) if isinstance(bad, torch.Tensor) else repr(wrong[0])) in text, (bad, text)


def test_entries_are_counted():
    with pytest.raises(ll.LogitlessError, match=r"^Rows.at: index must hold integers but entry 1 is 1.5\.$"):
        Rows.at([0, 1.5, 2], [1, 2, 3])
    with pytest.raises(ll.LogitlessError, match=r"must hold 64-bit integers but entry 2 is -9223372036854775809\.$"):
        Rows.at([0, 1, -(2**63) - 1], [1, 2, 3])
    with pytest.raises(
        ll.LogitlessError, match=r"^Rows.at: index must be a list or 1-D tensor of integers but is 5\.$"
    ):
        Rows.at(5, [1])


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_of_other_things_is_refused(name):
    call, good = TENSORS[name]
    call(good)
    for bad in (good + 0.9, good.double(), good != 0, good.to(torch.complex64)):
        with pytest.raises(ll.LogitlessError) as caught:
            call(bad)
        assert str(caught.value).startswith(name)
        assert str(bad.dtype) in str(caught.value)


@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_is_none_is_refused(name):
    call, good = SIZES[name]
    call(good)
    for bad in (good + 0.5, float(good), True, "8"):
        with pytest.raises(ll.LogitlessError) as caught:
            call(bad)
        assert str(caught.value).startswith(name)
        assert repr(bad) in str(caught.value)


def test_integers_of_numpy_are_integers():
    np = pytest.importorskip("numpy")
    rows = Rows.packed([np.array([1, 2, 3]), [4, np.int32(5)]], np.array([1, 1]), num_tokens=np.int64(9))
    assert (rows.index.tolist(), rows.target.tolist(), rows.token_shape) == ([1, 3], [3, 5], (9,))
    assert Rows.at(np.array([0, 1]), [np.int64(3), 4]).target.tolist() == [3, 4]
    for bad in (np.array([0.9]), np.array([True]), [np.float64(1.0)], [np.bool_(True)]):
        with pytest.raises(ll.LogitlessError, match=r"^Rows.at: index must hold integers"):
            Rows.at(bad, [1])


@pytest.mark.parametrize(
    ("support", "text"),
    [
        ({"offsets": [0, 2, 1]}, r"offsets of sample 0 must begin with 0 and never fall but are \[0, 2, 1\]\."),
        ({"offsets": [0, 2, 1, 2, 2, 2, 2, 2]}, r"never fall but are \[0, 2, 1, 2, 2, 2, 2, 2\]\."),
        ({"offsets": [0, 2, 1, 2, 2, 2, 2, 2, 2]}, r"never fall but are \[0, 2, 1, 2, 2, 2, 2, 2\] and 1 more\."),
        ({"offsets": [0, 3, 1]}, "must begin with 0 and never fall"),
        ({"offsets": [1, 1, 2]}, "must begin with 0 and never fall"),
        ({"offsets": []}, "must begin with 0 and never fall"),
        ({"offsets": list(range(20, 0, -1))}, r"but are \[20, 19, 18, 17, 16, 15, 14, 13\] and 12 more"),
        ({"lengths": [2, -1]}, "the lengths of sample 0 must be 0 or more but have -1"),
    ],
)
def test_runs_of_an_engine_go_up(support, text):
    """One id in all, and lengths that add up to it: the sum alone does not tell."""
    with pytest.raises(ll.LogitlessError, match=text):
        engine(token_ids=[4], **support)


def test_no_rows_reach_no_token():
    """Of logits without a token, too."""
    assert Rows.at([], [], num_tokens=0).num_tokens == 0
    out = ll.logprobs(torch.zeros(0, 5), Rows.at([], []))
    assert out.logprob.shape == (0,)
