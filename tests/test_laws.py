"""Laws that hold whatever the numbers are: what a shift, a permutation, a split or a factor must do to the results.

No oracle: each law compares the library with itself on two inputs that are related. In float64, where the law is sharp
to 1e-10 of the largest number; how far float32 may be from float64 is the fuzzer's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from calls import from_hidden, loss_from_hidden
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import logitless as ll
from logitless.backends import run_statistics
from logitless.backends.contract import Problem
from logitless.readings.found import Asked, Lines, find
from logitless.softmax import merge, target_column

law = settings(max_examples=12)
PATHS = ("logits", "hidden")
on_both = pytest.mark.parametrize("path", PATHS)


pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Batch:
    """Operands of a head, targets (some -100), upstream gradients, and the call's options."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    upstream: Tensor
    memory: int | str
    backend: str

    @property
    def logits(self) -> Tensor:
        return self.hidden @ self.weight.T


@st.composite
def batches(draw: Any, min_rows: int = 1, whole: bool = False) -> Batch:
    rows, vocab, width = draw(st.integers(min_rows, 9)), draw(st.integers(1, 23)), draw(st.integers(1, 6))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0.1, 1.0, 10.0]))
    target = torch.randint(vocab, (rows,), generator=g)
    if not whole and draw(st.booleans()):
        target[torch.rand(rows, generator=g) < 0.3] = -100
    return Batch(
        hidden=torch.randn(rows, width, generator=g, dtype=torch.float64),
        weight=spread * torch.randn(vocab, width, generator=g, dtype=torch.float64),
        target=target,
        upstream=torch.randn(3, rows, generator=g, dtype=torch.float64),
        memory=draw(st.sampled_from([4096, "64KiB", "1GiB"])),
        backend=draw(st.sampled_from(["reference", "tiled"])),
    )


@dataclass(frozen=True)
class Found:
    """Results, and the gradients of logits, or of hidden and weight."""

    out: ll.TokenStats
    gradients: list[Tensor]


def score(path: str, batch: Batch, rows: Any = None, upstream: Tensor | None = None, **given: Any) -> Found:
    """One call and its gradients; ``logits``, ``hidden`` or ``weight`` may stand in for the batch's own."""
    names = ("logits",) if path == "logits" else ("hidden", "weight")
    leaves = [given.get(n, getattr(batch, n)).detach().clone().requires_grad_() for n in names]
    given = {n: x for n, x in given.items() if n not in ("logits", "hidden", "weight")}
    options = {"entropy": "grad", "memory": batch.memory, "backend": batch.backend} | given
    logits = leaves[0] if path == "logits" else ll.Logits(*leaves)
    out = ll.logprobs(logits, batch.target if rows is None else rows, **options)
    g = batch.upstream if upstream is None else upstream
    kept = [(x, y) for x, y in zip(out[:3], g, strict=True) if x is not None]
    found = torch.autograd.grad([x for x, _ in kept], leaves, [y for _, y in kept])
    return Found(out.each(lambda x: x.detach()), list(found))


def same(a: Tensor | None, b: Tensor | None) -> None:
    assert a is not None
    assert b is not None
    size = max(1.0, *(float(x.abs().max()) if x.numel() else 0.0 for x in (a, b)))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10 * size)


def all_same(a: Found, b: Found) -> None:
    for x, y in zip([*a.out[:3], *a.gradients], [*b.out[:3], *b.gradients], strict=True):
        same(x, y)


def scored(batch: Batch) -> Tensor:
    return (batch.target != -100).double()


@given(batch=batches(), shift=st.floats(-500, 500))
@law
def test_a_constant_added_to_a_row_moves_log_z_alone(batch: Batch, shift: float):
    shifts = torch.linspace(-shift, shift, len(batch.target), dtype=torch.float64)
    before, after = score("logits", batch), score("logits", batch, logits=batch.logits + shifts[:, None])
    same(after.out.logprob, before.out.logprob)
    same(after.out.entropy, before.out.entropy)
    same(after.out.log_z, before.out.log_z + shifts * scored(batch))
    same(after.gradients[0], before.gradients[0])


@on_both
@given(batch=batches(), seed=st.integers(0, 2**31))
@law
def test_the_order_of_the_vocabulary_has_no_meaning(path: str, batch: Batch, seed: int):
    order = torch.randperm(len(batch.weight), generator=torch.Generator().manual_seed(seed))
    place = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))
    target = torch.where(batch.target == -100, -100, place[batch.target.clamp_min(0)])
    before = score(path, batch)
    after = score(path, batch, target, logits=batch.logits[:, order], weight=batch.weight[order])
    back = after.gradients[0][:, place] if path == "logits" else after.gradients[0]
    all_same(before, Found(after.out, [back, *(x[place] for x in after.gradients[1:])]))


@on_both
@given(batch=batches(min_rows=2), seed=st.integers(0, 2**31))
@law
def test_the_order_of_the_rows_is_the_order_of_the_results(path: str, batch: Batch, seed: int):
    order = torch.randperm(len(batch.target), generator=torch.Generator().manual_seed(seed))
    before = score(path, batch)
    after = score(path, batch, (order, batch.target[order]), batch.upstream[:, order])
    for x, y in zip(before.out[:3], after.out[:3], strict=True):
        same(x[order], y)
    for x, y in zip(before.gradients, after.gradients, strict=True):
        same(x, y)


@on_both
@given(batch=batches(min_rows=2), data=st.data())
@law
def test_any_split_of_the_rows(path: str, batch: Batch, data: Any):
    cut = data.draw(st.integers(0, len(batch.target)))
    whole, rows = score(path, batch), torch.arange(len(batch.target))
    parts = [
        score(path, batch, (some, batch.target[some]), batch.upstream[:, some]) for some in (rows[:cut], rows[cut:])
    ]
    for x, y, z in zip(whole.out[:3], parts[0].out[:3], parts[1].out[:3], strict=True):
        same(x, torch.cat([y, z]))
    for x, y, z in zip(whole.gradients, parts[0].gradients, parts[1].gradients, strict=True):
        same(x, y + z)


@on_both
@given(batch=batches())
@law
def test_rows_twice_are_results_twice(path: str, batch: Batch):
    once = score(path, batch)
    again = {"logits": batch.logits.repeat(2, 1), "hidden": batch.hidden.repeat(2, 1)}
    twice = score(path, batch, batch.target.repeat(2), batch.upstream.repeat(1, 2), **{path: again[path]})
    for x, y in zip(once.out[:3], twice.out[:3], strict=True):
        same(x.repeat(2), y)
    same(once.gradients[0].repeat(2, 1), twice.gradients[0])
    for x, y in zip(once.gradients[1:], twice.gradients[1:], strict=True):
        same(2 * x, y)


@given(batch=batches(), temperature=st.floats(0.2, 5.0))
@law
def test_a_row_of_d_logits_sums_to_the_gradient_of_log_z(batch: Batch, temperature: float):
    """A constant shift changes log Z by itself, and nothing else."""
    found = score("logits", batch, head=ll.Head(temperature=temperature))
    same(found.gradients[0].sum(1), batch.upstream[2] * scored(batch) / temperature)


@on_both
@given(batch=batches(), temperature=st.floats(0.2, 5.0), scale=st.sampled_from([0.5, 1.0, -2.0]), by_row=st.booleans())
@law
def test_temperature_divides_and_scale_multiplies(
    path: str, batch: Batch, temperature: float, scale: float, by_row: bool
):
    t: Any = torch.linspace(0.5, temperature, len(batch.target), dtype=torch.float64) if by_row else temperature
    factor = scale / (t[:, None] if by_row else t)
    named = score(path, batch, head=ll.Head(temperature=t, scale=scale))
    own = {"logits": batch.logits * factor, "hidden": batch.hidden * factor}
    by_hand = score(path, batch, **{path: own[path]})
    all_same(named, Found(by_hand.out, [by_hand.gradients[0] * factor, *by_hand.gradients[1:]]))


@given(batch=batches())
@law
def test_probabilities_of_all_tokens_sum_to_one(batch: Batch):
    vocab = len(batch.weight)
    options = {"memory": batch.memory, "backend": batch.backend}
    every = [
        from_hidden(batch.hidden, batch.weight, torch.full_like(batch.target, v), entropy="value", **options)
        for v in range(vocab)
    ]
    log_p = torch.stack([out.logprob for out in every])
    same(log_p.exp().sum(0), torch.ones(len(batch.target), dtype=torch.float64))
    same(-(log_p.exp() * log_p).sum(0), every[0].entropy)


@given(batch=batches())
@law
def test_logits_and_hidden_states_are_one_distribution(batch: Batch):
    a, b = score("logits", batch), score("hidden", batch)
    for x, y in zip(a.out[:3], b.out[:3], strict=True):
        same(x, y)
    same(a.gradients[0] @ batch.weight, b.gradients[0])
    same(a.gradients[0].T @ batch.hidden, b.gradients[1])


@given(batch=batches(), data=st.data())
@law
def test_any_shards_merge_to_the_whole(batch: Batch, data: Any):
    """Any number of shards of any widths, empty ones included, in any order."""
    vocab = len(batch.weight)
    inner = sorted(data.draw(st.lists(st.integers(0, vocab), max_size=4)))
    bounds = data.draw(st.permutations(list(zip([0, *inner], [*inner, vocab], strict=True))))
    index, gain = torch.arange(len(batch.target)), torch.ones(len(batch.target), dtype=torch.float64)
    parts = []
    for start, stop in bounds:
        column = target_column(batch.target, start, stop - start)
        shard = batch.logits[:, start:stop].contiguous()
        problem = Problem(shard, index, column, gain, 0.0, stop - start, True, 4096)
        parts.append(run_statistics(batch.backend, problem))
    asked = Asked(batch.target, gain, 0.0, batch.target == -100, entropy=True, group=None)
    merged = find(asked, Lines(merge(torch.stack(parts)))).results
    whole = score("logits", batch).out
    for name in ("logprob", "entropy", "log_z"):
        same(getattr(whole, name), merged[name])


@on_both
@given(batch=batches(), extra=st.integers(1, 5))
@law
def test_padding_of_the_vocabulary_is_never_read(path: str, batch: Batch, extra: int):
    vocab = len(batch.weight)
    pad = torch.nn.functional.pad
    own = {
        "logits": pad(batch.logits, (0, extra), value=torch.nan),
        "hidden": batch.hidden,
        "weight": pad(batch.weight, (0, 0, 0, extra), value=torch.nan),
    }
    found = score(path, batch, head=ll.Head(vocab_size=vocab), **own)
    cut = [found.gradients[0][:, :vocab]] if path == "logits" else [found.gradients[0], found.gradients[1][:vocab]]
    all_same(score(path, batch), Found(found.out, cut))
    rest = found.gradients[0][:, vocab:] if path == "logits" else found.gradients[1][vocab:]
    assert (rest == 0).all()


@on_both
@given(batch=batches())
@law
def test_keeping_every_id_is_keeping_none(path: str, batch: Batch):
    rows, vocab = len(batch.target), len(batch.weight)
    kept = ll.Kept(torch.arange(vocab).repeat(rows), torch.full((rows,), vocab))
    all_same(score(path, batch), score(path, batch, kept=kept))


# Laws of losses.


@st.composite
def losses(draw: Any) -> tuple[Batch, dict[str, Tensor], ll.Objective]:
    batch = draw(batches(min_rows=2, whole=True))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    count = len(batch.target)
    near = ll.logprobs(batch.logits, batch.target).logprob
    fields = {
        "old_logprob": near + 0.3 * torch.randn(count, generator=g, dtype=torch.float64),
        "advantage": torch.randn(count, generator=g, dtype=torch.float64),
    }
    policy = draw(st.sampled_from(["ppo_clip", "cispo", "sapo", "reinforce"]))
    return batch, fields, ll.Objective(policy=policy)


def loss_of(batch: Batch, fields: dict, objective: ll.Objective, rows: Any = None, **given: Any) -> list[Tensor]:
    """Loss, and the gradients of hidden and weight."""
    leaves = [x.detach().clone().requires_grad_() for x in (batch.hidden, batch.weight)]
    rows = batch.target if rows is None else rows
    options = {"memory": batch.memory, "backend": batch.backend} | given
    loss, _ = loss_from_hidden(*leaves, rows, objective, **options, **fields)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@given(drawn=losses(), factor=st.floats(0.01, 100.0))
@law
def test_a_loss_is_linear_in_its_advantages(drawn: Any, factor: float):
    """In a positive factor: the sign of an advantage decides where it is clipped."""
    batch, fields, objective = drawn
    scaled = fields | {"advantage": factor * fields["advantage"]}
    for x, y in zip(loss_of(batch, fields, objective), loss_of(batch, scaled, objective), strict=True):
        same(factor * x, y)


@given(drawn=losses(), factor=st.sampled_from([0.25, 3.0, 1024.0]))
@law
def test_the_buffer_of_the_weight_is_linear_in_grad_scale(drawn: Any, factor: float):
    batch, fields, objective = drawn
    _, d_hidden, d_weight = loss_of(batch, fields, objective)
    buffer = torch.zeros(batch.weight.shape)
    hidden, weight = (x.detach().clone().requires_grad_() for x in (batch.hidden, batch.weight))
    options = {"weight_grad": buffer, "grad_scale": factor, "memory": batch.memory, "backend": batch.backend}
    loss, _ = loss_from_hidden(hidden, weight, batch.target, objective, **options, **fields)
    (factor * loss).backward()
    same(hidden.grad, factor * d_hidden)
    # The buffer is float32.
    size = float(d_weight.abs().max().clamp_min(1e-30))
    assert float((buffer.double() / factor - d_weight).abs().max()) <= 2e-6 * max(size, float(batch.hidden.abs().max()))


@given(drawn=losses(), data=st.data())
@law
def test_micro_batches_with_one_denominator_add_up(drawn: Any, data: Any):
    batch, fields, objective = drawn
    count = len(batch.target)
    cut, rows = data.draw(st.integers(0, count)), torch.arange(count)
    whole = loss_of(batch, fields, objective)
    parts = []
    for some in (rows[:cut], rows[cut:]):
        own = {name: x[some] for name, x in fields.items()}
        parts.append(loss_of(batch, own, objective, (some, batch.target[some]), denominator=count))
    for x, y, z in zip(whole, *parts, strict=True):
        same(x, y + z)


@given(drawn=losses())
@law
def test_a_constant_in_the_bias_changes_no_loss(drawn: Any):
    batch, fields, objective = drawn
    bias = torch.full((len(batch.weight),), 37.5, dtype=torch.float64)
    for x, y in zip(loss_of(batch, fields, objective), loss_of(batch, fields, objective, bias=bias), strict=True):
        same(x, y)
