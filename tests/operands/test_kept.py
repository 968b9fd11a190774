"""Sampling replay: log-probs over kept ids, entropy over the whole row, exact gradients."""

from __future__ import annotations

import pytest
import torch
from shared.logprobs import BACKENDS, check, draw_rows, make_logits

import logitless as ll


def draw_kept(num_rows: int, vocab: int, sizes: tuple[int, ...] = (0, 1, 3, 50)) -> list[list[int]]:
    return [torch.randint(vocab, (sizes[i % len(sizes)],)).tolist() for i in range(num_rows)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ragged_ids_with_the_target_forced_in(backend: str, dtype: torch.dtype, device: torch.device):
    """Rows with no ids, one, a few with repeats, and many; targets inside and outside the kept set."""
    logits = make_logits(12, 507, dtype)
    index, target = draw_rows(12, 9, 507)
    kept = draw_kept(9, 507)
    kept[3] = [int(target[3]), *kept[3], int(target[3])]
    check(logits, index, target, kept=kept, backend=backend, device=device)


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_every_option(backend: str, device: torch.device):
    index, target = draw_rows(9, 7, 300)
    target[2] = -100
    options = {"vocab_size": 300, "softcap": 6.0, "scale": 1.5, "temperature": torch.linspace(0.5, 2, 7)}
    check(
        make_logits(9, 401, torch.float32),
        index,
        target,
        kept=draw_kept(7, 300),
        backend=backend,
        device=device,
        **options,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_kept_logit_of_minus_infinity(backend: str, device: torch.device):
    """A mask over an id that the sampler kept: probability 0, and no gradient, entropy's included."""
    logits, index = make_logits(6, 101, torch.float32), torch.arange(6)
    logits[:, 40:60] = -torch.inf
    kept = [[41, 3, 59], [45], [7, 8], [], [40, 99], [0, 41]]
    check(logits, index, torch.tensor([3, 5, 7, 99, 8, 0]), kept=kept, backend=backend, device=device)


@pytest.mark.parametrize("backend", BACKENDS)
def test_keeping_everything_is_the_plain_softmax(backend: str, device: torch.device):
    logits = make_logits(4, 101, torch.float64).to(device, torch.float32)
    target = torch.randint(101, (4,), device=device)
    everything = ll.Kept(torch.arange(101, device=device).repeat(4), torch.full((4,), 101, device=device))
    with_kept = ll.logprobs(logits, target, kept=everything, backend=backend)
    without = ll.logprobs(logits, target, backend=backend)
    assert torch.allclose(with_kept.logprob, without.logprob, rtol=0, atol=1e-6)
    assert torch.equal(with_kept.log_z, without.log_z)


@pytest.mark.parametrize("mode", [None, "value"])
def test_gradient_lives_on_the_kept_ids_alone(mode: str | None, device: torch.device):
    logits = torch.randn(3, 101, device=device).requires_grad_()
    kept = ll.Kept(torch.tensor([5, 9, 40, 41], device=device), torch.tensor([2, 0, 2], device=device))
    ll.logprobs(logits, torch.tensor([9, 7, 3], device=device), entropy=mode, kept=kept).logprob.sum().backward()
    touched = [row.nonzero().squeeze(1).tolist() for row in logits.grad]
    # A row that keeps its target alone has log-prob 0 and nothing to push.
    assert touched == [[5, 9], [], [3, 40, 41]]
    assert logits.grad.sum(-1).abs().max() < 1e-6


def test_overwriting(device: torch.device):
    base = make_logits(6, 101, torch.float32).to(device).requires_grad_()
    target, kept = (
        torch.randint(101, (6,), device=device),
        ll.Kept(torch.arange(12, device=device), torch.full((6,), 2, device=device)),
    )
    grads = []
    for overwrite in (False, True):
        out = ll.logprobs(ll.Logits.given(base * 1.0, overwrite=overwrite), target, entropy="grad", kept=kept)
        grads.append(torch.autograd.grad(out.logprob.sum() + 0.3 * out.entropy.sum(), base)[0])
    assert torch.equal(*grads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_nobody_could_check_make_their_own_row_nan(backend: str, monkeypatch, device: torch.device):
    monkeypatch.setattr("logitless.call.checks.check_kept", lambda *_: None)
    logits = torch.randn(3, 40, device=device).requires_grad_()
    kept = ll.Kept(torch.tensor([1, 2, 40, 3], device=device), torch.tensor([1, 2, 1], device=device))
    out = ll.logprobs(logits, torch.tensor([1, 2, 3], device=device), kept=kept, backend=backend)
    out.logprob.sum().backward()
    assert out.logprob.isnan().tolist() == [False, True, False]
    assert logits.grad[[0, 2]].isfinite().all()
    assert logits.grad[1].isnan().any()


def test_from_responses_selects_the_scored_rows():
    """Recorded for every response token, kept for the rows that are scored, in their order."""
    rows = ll.Rows.packed([[1, 2, 3, 4], [5, 6], [7, 8, 9]], [3, 0, 2], [[1, 0, 1], [], [0, 1]], loss_mask_only=True)
    ids = [torch.tensor([10, 11, 12, 13]), torch.tensor([], dtype=torch.int64), torch.tensor([20, 21, 22])]
    lengths = [torch.tensor([1, 2, 1]), torch.tensor([], dtype=torch.int64), torch.tensor([2, 1])]
    kept = ll.Kept.from_responses(rows, ids, lengths)
    assert kept.lengths.tolist() == [1, 1, 1]
    assert kept.ids.tolist() == [10, 13, 22]
    everything = ll.Kept.from_responses(ll.Rows.packed([[1, 2, 3, 4], [5, 6], [7, 8, 9]], [3, 0, 2]), ids, lengths)
    assert everything.ids.tolist() == [10, 11, 12, 13, 20, 21, 22]
    assert everything.lengths.tolist() == [1, 2, 1, 2, 1]


@pytest.mark.parametrize(("number", "shown"), [(8, r"6, 5\]\."), (9, r"6, 5\] and 1 more\."), (20, "and 12 more")])
def test_long_offsets_are_shown_in_part(number: int, shown: str):
    offsets = torch.tensor([0, 1, 2, 3, 4, 5, 6, *[5] * (number - 7)])
    with pytest.raises(ll.LogitlessError, match=f"never fall, and end at the 5 ids, but are .*{shown}"):
        ll.Kept.from_offsets(torch.zeros(5, dtype=torch.int64), offsets)
