"""``Rows.from_labels``: labels as Transformers has them, against the loss that Transformers makes of them."""

from __future__ import annotations

import pytest
import torch
from close import assert_close_to_truth
from hypothesis import given
from hypothesis import strategies as st
from shared.errors import raises

import logitless as ll

V, D = 37, 12


@st.composite
def labels_of_lines(draw):
    """Lines of labels, any of which may be -100, the first one of a line too."""
    num, width = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    ids = draw(st.lists(st.integers(-2, V - 1), min_size=num * width, max_size=num * width))
    return torch.tensor([i if i >= 0 else -100 for i in ids]).view(num, width)


@given(labels_of_lines())
def test_row_t_predicts_label_t_plus_1(labels):
    rows = ll.Rows.from_labels(labels)
    places = [(n, t) for n, t in (labels != -100).nonzero().tolist() if t > 0]
    assert rows.index.tolist() == [n * labels.shape[1] + t - 1 for n, t in places]
    assert rows.target.tolist() == [int(labels[n, t]) for n, t in places]
    assert rows.sample.tolist() == [n for n, _ in places]
    assert rows.token_shape == tuple(labels.shape)
    assert rows.totals.tolist() == (labels[:, 1:] != -100).sum(1).tolist()


@given(labels_of_lines())
def test_a_pack_is_its_lines_end_to_end(labels):
    """The first label of every sample is left out where the borders are known; one sample needs none."""
    lines, (num, width) = ll.Rows.from_labels(labels), labels.shape
    pack = {"cu_seqlens": [width * n for n in range(num + 1)]}, {"position_ids": torch.arange(width).repeat(num)}
    for how in pack:
        for flat in (labels.flatten(), labels.reshape(1, -1)):
            shaped = {name: x.view(flat.shape) if isinstance(x, torch.Tensor) else x for name, x in how.items()}
            rows = ll.Rows.from_labels(flat, **shaped)
            assert rows.index.tolist() == lines.index.tolist()
            assert rows.target.tolist() == lines.target.tolist()
            assert (rows.counts, rows.token_shape) == (lines.counts, tuple(flat.shape))
    one = ll.Rows.from_labels(labels[0])
    assert (one.index.tolist(), one.counts) == (ll.Rows.from_labels(labels[:1]).index.tolist(), lines.counts[:1])


def batch(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weight, and labels with a prompt, padding on either side, a gap, and no prompt at all."""
    made = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(*shape, D, generator=made, dtype=torch.float64) for shape in ((4, 9), (V,)))
    labels = torch.randint(V, (4, 9), generator=made)
    labels[0, :4], labels[1, :2], labels[1, 6:], labels[2, 5] = -100, -100, -100, -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def transformers_loss(dtype: torch.dtype, **how) -> dict[str, torch.Tensor]:
    from transformers.loss.loss_utils import ForCausalLMLoss, fixed_cross_entropy

    hidden, weight, labels = batch(dtype)
    logits = hidden @ weight.T
    if dtype == torch.float64:
        # Its own function works in float32; this is what it does, in float64.
        shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
        loss = fixed_cross_entropy(logits.view(-1, V), shifted, **how)
    else:
        loss = ForCausalLMLoss(logits, labels, V, **how)
    loss.backward()
    return {"loss": loss.detach(), "hidden": hidden.grad, "weight": weight.grad}


def our_loss(dtype: torch.dtype, way: str, items: int | None) -> dict[str, torch.Tensor]:
    hidden, weight, labels = batch(dtype)
    rows = ll.Rows.from_labels(labels)
    if way == "loss":
        objective = ll.Objective(policy="cross_entropy")
        loss, *_ = ll.policy_loss(ll.Logits(hidden, weight), rows, objective, denominator=items or len(rows))
    else:
        out = ll.logprobs(hidden @ weight.T if way == "logits" else ll.Logits(hidden, weight), rows)
        loss = -out.logprob.sum() / (items or len(rows))
    loss.backward()
    return {"loss": loss.detach(), "hidden": hidden.grad, "weight": weight.grad}


@pytest.mark.parametrize("items", [None, 50])
@pytest.mark.parametrize("way", ["logits", "hidden", "loss"])
def test_it_is_the_loss_of_transformers(way, items):
    """Value and gradients; with the number of items of a whole batch, as its Trainer passes, too."""
    pytest.importorskip("transformers")
    how = {} if items is None else {"num_items_in_batch": items}
    truth, theirs = (transformers_loss(dtype, **how) for dtype in (torch.float64, torch.float32))
    ours = our_loss(torch.float32, way, items)
    for name in truth:
        assert_close_to_truth(ours[name], truth[name], theirs[name], name)


def test_labels_as_targets_are_another_loss():
    """What the constructor is for: unshifted labels score every row with its own token."""
    hidden, weight, labels = batch(torch.float64)
    off = -ll.logprobs(ll.Logits(hidden, weight), labels).logprob.sum() / (labels != -100).sum()
    right = our_loss(torch.float64, "hidden", None)["loss"]
    assert abs(float(off.detach() - right)) > 0.1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([[1, 2]],), "labels must be [N, S] or [T] integers but is a list."),
        ((torch.zeros(2, 3, 4, dtype=torch.int64),), "labels must be [N, S] or [T] integers but is a tensor [2, 3, 4]"),
        ((torch.ones(2, 4, dtype=torch.int64), [0, 4, 8]), "are for one pack, [T] or [1, T], but labels is [2, 4]."),
        ((torch.ones(4, dtype=torch.int64), [0, 5]), "cu_seqlens ends at 5 but labels has 4 tokens."),
        ((torch.ones(4, dtype=torch.int64), [0, 3]), "the labels are not -100 at tokens after the last sample of"),
        ((torch.ones(4, dtype=torch.int64), None, torch.arange(3)), "position_ids must be [4] like labels but is [3]."),
    ],
)
def test_what_is_refused(arguments, text):
    labels, starts, places = (*arguments, None, None)[:3]
    with raises(f"Rows.from_labels: ...{text}"):
        ll.Rows.from_labels(labels, cu_seqlens=starts, position_ids=places)
