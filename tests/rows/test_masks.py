"""``Rows.from_mask``: batches as Hugging Face, TRL and verl make them, against a loop over their tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shared.errors import raises

import logitless as ll

PAD = 0


@st.composite
def batches(draw):
    """Lines of left padding, a prompt, a completion with gaps in its mask, and right padding."""
    lines = draw(st.lists(st.tuples(*(st.integers(0, 3),) * 4), min_size=1, max_size=4))
    width = max(sum(line) + 1 for line in lines)
    ids, mask, attention = (torch.zeros(len(lines), width, dtype=torch.int64) for _ in range(3))
    for n, (left, prompt, completion, _) in enumerate(lines):
        real = slice(left, left + prompt + 1 + completion)
        ids[n, real] = torch.arange(1, prompt + 2 + completion) + 10 * n
        attention[n, real] = 1
        first = left + prompt + 1
        mask[n, first : first + completion] = torch.tensor(
            draw(st.lists(st.integers(0, 1), min_size=completion, max_size=completion))
        )
    return ids, mask, attention


@given(batches())
def test_every_scored_token_has_the_row_before_it(batch):
    ids, mask, attention = batch
    rows = ll.Rows.from_mask(ids, mask, attention)
    places = mask.nonzero().tolist()
    assert rows.index.tolist() == [n * ids.shape[1] + s - 1 for n, s in places]
    assert rows.target.tolist() == [int(ids[n, s]) for n, s in places]
    assert rows.sample.tolist() == [n for n, _ in places]
    assert rows.token_shape == tuple(ids.shape)
    assert rows.totals.tolist() == mask.sum(1).tolist()
    # What comes back per sample is the response with zeros where nothing is scored.
    for n, part in enumerate(rows.split(torch.ones(len(rows)))):
        scored = mask[n].nonzero().squeeze(1)
        wanted = mask[n, scored[0] : scored[-1] + 1] if len(scored) else mask[n, :0]
        assert part.tolist() == wanted.tolist()


@given(batches(), st.booleans())
def test_a_pack_is_its_lines_end_to_end(batch, by_position: bool):
    ids, mask, attention = batch
    lengths = attention.sum(1)
    flat, flat_mask = ids[attention.bool()], mask[attention.bool()]
    place = torch.cat([torch.arange(int(n)) for n in lengths])
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    how = {"position_ids": place} if by_position else {"cu_seqlens": starts}
    rows = ll.Rows.from_mask(flat, flat_mask, **how)
    lines = ll.Rows.from_mask(ids, mask)
    assert rows.target.tolist() == lines.target.tolist()
    assert rows.sample.tolist() == lines.sample.tolist()
    assert rows.counts == lines.counts
    assert rows.index.tolist() == (flat_mask.nonzero().squeeze(1) - 1).tolist()


def test_padding_at_the_end_of_a_pack_is_no_sample():
    ids, mask = torch.tensor([[5, 6, 7, 8, 9, 0, 0]]), torch.tensor([[0, 1, 0, 1, 1, 0, 0]])
    rows = ll.Rows.from_mask(ids, mask, cu_seqlens=torch.tensor([0, 2, 5]))
    assert (rows.index.tolist(), rows.counts, rows.token_shape) == ([0, 2, 3], (1, 2), (1, 7))
    with raises("the mask scores tokens after the last sample of cu_seqlens, 5 on."):
        ll.Rows.from_mask(ids, torch.ones_like(ids).cumsum(1) > 5, cu_seqlens=[0, 2, 5])


def test_it_scores_what_a_model_of_padded_lines_means():
    """A left-padded prompt and a right-padded completion, through the log-softmax of each line."""
    torch.manual_seed(0)
    ids = torch.tensor([[PAD, PAD, 5, 6, 7, 8], [PAD, 3, 4, 9, PAD, PAD]])
    mask = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 0, 0]])
    logits = torch.randn(2, 6, 11, dtype=torch.float64)
    logp = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    rows = ll.Rows.from_mask(ids, mask, ids != PAD)
    torch.testing.assert_close(ll.logprobs(logits, rows).logprob, logp[mask[:, 1:].bool()])


BATCH = torch.tensor([[0, 5, 6, 7], [3, 4, 9, 0]])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([[1, 2]], BATCH), "input_ids must be [N, S] or [T] integers but is a list."),
        ((BATCH.float(), BATCH), "input_ids must be [N, S] or [T] integers but is a tensor [2, 4] torch.float32."),
        ((BATCH, BATCH[:, 2:]), "mask must be [2, 4] like input_ids but is [2, 2]. A mask of the completions alone"),
        ((BATCH, None), "mask must be [2, 4] like input_ids but is None."),
        ((BATCH, torch.tensor([[0, 0, 0, 1], [1, 0, 0, 0]])), "sample 1 is scored from its first token on"),
        ((BATCH, (BATCH == 7) | (BATCH == 0), BATCH != 0), "token 0 of sample 0 is scored but is padding"),
        ((BATCH, BATCH == 5, BATCH != 0), "token 1 of sample 0 is scored but follows on padding"),
    ],
)
def test_what_is_refused(arguments, text: str):
    with raises(text):
        ll.Rows.from_mask(*arguments)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "a pack of one dimension needs cu_seqlens or position_ids."),
        ({"cu_seqlens": [0, 2], "position_ids": torch.arange(4)}, "give cu_seqlens or position_ids, not both."),
        ({"cu_seqlens": [1, 2]}, "cu_seqlens must start at 0 and never fall but is [1, 2]."),
        ({"cu_seqlens": [0, 5]}, "cu_seqlens ends at 5 but input_ids has 4 tokens."),
        ({"position_ids": torch.tensor([0, 1, 3, 4])}, "position_ids must count 0, 1, 2, ... in each sample"),
    ],
)
def test_packs_that_are_refused(options, text: str):
    with raises(text):
        ll.Rows.from_mask(BATCH[0], BATCH[0] == 7, **options)
    with raises("cu_seqlens and position_ids are for one pack"):
        ll.Rows.from_mask(BATCH, BATCH == 7, cu_seqlens=[0, 4, 8])
