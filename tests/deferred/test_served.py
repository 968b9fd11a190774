"""torch's own functions on logits that are not computed: what they return of computed ones, with gradients.

``strict=True`` raises wherever logits are computed. In float64 the one tolerance rule leaves 1e-12.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from close import assert_close_to_truth, assert_gradient_close_to_truth
from torch import Tensor

import logitless as ll
from logitless.deferred.distribution import Distribution
from logitless.operands.logits import MADE, LogitsMade

B, S, V, D = 3, 6, 41, 5
GENERATOR = torch.Generator().manual_seed(8)
IDS = torch.randint(V, (B, S), generator=GENERATOR)
LABELS = IDS.masked_fill(torch.rand(B, S, generator=GENERATOR) < 0.3, -100)
SEVERAL = torch.randint(V, (B, S, 4), generator=GENERATOR)
SEVERAL[..., 3] = SEVERAL[..., 0]
CLASSES = torch.rand(V, dtype=torch.float64, generator=GENERATOR)


def results(
    read: Callable[[Any], Any], deferred: bool, dtype: torch.dtype = torch.float64, **kind: Any
) -> list[Tensor]:
    """What comes out, and the gradients of hidden states, weight and whatever else the head has."""
    torch.manual_seed(4)
    sizes = {"hidden": (B, S, D), "weight": (V, D)}
    sizes |= {"bias": (V,)} if kind.get("bias") else {}
    sizes |= {"a": (2, D), "b": (V, 2)} if kind.get("lora") else {}
    x = {name: torch.randn(n, dtype=dtype, requires_grad=True) for name, n in sizes.items()}
    weight: Any = x["weight"]
    if deferred:
        weight = ll.LoRA(weight, x["a"], x["b"], 0.5) if "a" in x else weight
        logits = ll.Logits(x["hidden"], weight, bias=x.get("bias"), strict=True)
    else:
        weight = weight + 0.5 * x["b"] @ x["a"] if "a" in x else weight
        logits = F.linear(x["hidden"], weight, x.get("bias"))
    out = read(kind.get("head", lambda y: y)(logits))
    out = list(out) if isinstance(out, (tuple, list)) else [out]
    assert not any(isinstance(y, (ll.Logits, Distribution)) for y in out)
    trained = [y for y in out if y.requires_grad]
    up = [
        torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(i)) for i, y in enumerate(trained)
    ]
    gradients = torch.autograd.grad(trained, list(x.values()), up) if trained else ()
    return [*(y.detach() for y in out), *gradients]


def same(read: Callable[[Any], Any], **kind: Any) -> None:
    wanted, ours = (results(read, deferred, **kind) for deferred in (False, True))
    assert len(wanted) == len(ours)
    for right, mine in zip(wanted, ours, strict=True):
        assert right.dtype == mine.dtype
        assert right.shape == mine.shape
        if right.is_floating_point() and right.shape[-1:] not in ((V,), (D,)):
            assert_close_to_truth(mine, right, right)
        elif right.is_floating_point():
            assert_gradient_close_to_truth(mine, right, right)
        else:
            assert torch.equal(right, mine)


def entropy(logp: Any) -> Any:
    return -(logp.exp() * logp).sum(-1)


LOSSES: dict[str, Callable[[Any], Any]] = {
    f"{reduction}, smoothing {smoothing}, {'' if weight is None else 'class weights'}": (
        lambda x, r=reduction, s=smoothing, w=weight: F.cross_entropy(
            x.view(-1, V), LABELS.view(-1), weight=w, reduction=r, label_smoothing=s
        )
    )
    for reduction in ("none", "mean", "sum")
    for smoothing in (0.0, 0.1)
    for weight in (None, CLASSES)
}

READS: dict[str, Callable[[Any], Any]] = {
    "another ignore_index": lambda x: F.cross_entropy(x.view(-1, V), IDS.view(-1), ignore_index=int(IDS[0, 0])),
    "one row": lambda x: F.cross_entropy(x[0, 0], IDS[0, 0]),
    "classes in the middle": lambda x: F.cross_entropy(x.transpose(1, 2), LABELS, reduction="none"),
    "permuted": lambda x: F.cross_entropy(x.permute(0, 2, 1).contiguous(), LABELS),
    "a module": lambda x: torch.nn.CrossEntropyLoss(label_smoothing=0.2)(x.flatten(0, 1), LABELS.flatten()),
    "by keyword": lambda x: F.cross_entropy(input=x.view(-1, V), target=LABELS.view(-1)),
    "nll_loss": lambda x: F.nll_loss(F.log_softmax(x.view(-1, V), dim=-1), LABELS.view(-1)),
    "log_softmax, gather": lambda x: x.log_softmax(-1).gather(-1, IDS[..., None]).squeeze(-1),
    "log_softmax, gather of several": lambda x: torch.gather(torch.log_softmax(x, dim=2), 2, SEVERAL),
    "log_softmax, slice, gather": lambda x: F.log_softmax(x / 0.7, -1)[:, :-1].gather(2, IDS[:, 1:, None])[..., 0],
    "log_softmax, view, index": lambda x: x.log_softmax(-1).view(-1, V)[torch.arange(B * S), IDS.view(-1)],
    "log_softmax, index of each dimension": lambda x: x.log_softmax(-1)[torch.arange(B)[:, None], torch.arange(S), IDS],
    "log_softmax in another dtype": lambda x: torch.log_softmax(x, -1, dtype=torch.float64).gather(-1, SEVERAL),
    "softmax, gather": lambda x: torch.softmax(x, -1).gather(-1, SEVERAL),
    "softmax, log": lambda x: x.softmax(-1).log().gather(-1, SEVERAL),
    "softmax of one column": lambda x: x.softmax(-1)[..., 7],
    "mean log-prob": lambda x: (-x.log_softmax(-1).mean(-1), x.log_softmax(-1).sum(-1, keepdim=True)),
    "logsumexp": lambda x: (torch.logsumexp(x, -1), x.logsumexp(dim=2, keepdim=True)),
    "gather": lambda x: (x.gather(-1, IDS[..., None]), torch.gather(x, 2, SEVERAL)),
    "index": lambda x: (
        x[torch.arange(B)[:, None], torch.arange(S), IDS],
        x.view(-1, V)[torch.arange(B * S), IDS.view(-1)],
    ),
    "mean in another dtype": lambda x: x.mean(-1, dtype=torch.float64),
    "norm, without a graph": lambda x: (
        torch.linalg.vector_norm(x.detach().float(), dim=-1, dtype=torch.float64),
        torch.linalg.vector_norm(x.detach()[:, 1:], 1, -1, keepdim=True),
    ),
    "columns": lambda x: (x[..., 4], x[:, -1, [3, 9]], x[:, :, torch.tensor([1, -1])], x[0, 0, 5]),
    "mean logit": lambda x: x.mean(-1),
    "entropy of log_softmax": lambda x: entropy(F.log_softmax(x, dim=-1)),
    "entropy of both": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    "entropy, signs elsewhere": lambda x: torch.sum(-x.softmax(-1) * torch.log_softmax(x, -1), dim=-1),
    "entropy of softmax and logits": lambda x: torch.logsumexp(x, -1) - torch.sum(F.softmax(x, dim=-1) * x, dim=-1),
    "softmax first": lambda x: (lambda p: x.logsumexp(-1) - torch.sum(p * x, -1))(F.softmax(x, dim=-1)),
    "the same, casts": lambda x: x.double().logsumexp(-1) - (x.double() * x.double().softmax(-1)).sum(-1),
    "argmax": lambda x: (x.argmax(-1), x.argmax(dim=2, keepdim=True), (x.argmax(-1) == IDS).double().mean()),
    "max": lambda x: (*x.max(dim=-1), *x.max(-1, keepdim=True), x.max(), x.amax(-1)),
    "min": lambda x: (*x.min(dim=-1), *x.min(-1, keepdim=True), x.amin(-1)),
    "topk": lambda x: (*x.topk(5), *torch.topk(x, 1, dim=2)),
    "max of probabilities": lambda x: (*x.softmax(-1).max(-1), x.log_softmax(-1).amax(-1)),
    "topk of log-probs": lambda x: (*x.log_softmax(-1).topk(3, dim=-1), x.softmax(-1).argmax(-1)),
    "a loop over rows": lambda x: torch.stack([torch.logsumexp(row, dim=-1) for row in x]),
    "a loop over rows with labels": lambda x: torch.stack(
        [F.log_softmax(row, -1).gather(-1, ids[:, None]).squeeze(-1) for row, ids in zip(x, IDS, strict=True)]
    ),
    "a loop over chunks": lambda x: torch.cat([entropy(F.log_softmax(part, -1)) for part in x.view(-1, V).split(4)]),
    "a loop that keeps parts apart": lambda x: [torch.logsumexp(row, -1) * 2 for row in x],
    "a loop over single rows": lambda x: torch.stack([row.logsumexp(-1) for row in x.view(-1, V)]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_cross_entropy(name):
    same(LOSSES[name])


@pytest.mark.parametrize("name", READS)
def test_numbers_of_each_row(name):
    same(READS[name])


SOME = [
    "log_softmax, gather",
    "gather",
    "entropy of log_softmax",
    "max",
    "min",
    "columns",
    "a loop over chunks",
    "mean log-prob",
]


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("head", ["bias", "lora", "softcap", "factor"])
def test_of_other_heads(name, head):
    heads = {"softcap": lambda x: torch.tanh(x / 2) * 2, "factor": lambda x: x / (IDS[..., None] / V + 0.5)}
    same(READS[name], **{head: True} if head in ("bias", "lora") else {"head": heads[head]})


@pytest.mark.parametrize("name", list(LOSSES)[:4])
@pytest.mark.parametrize("head", ["bias", "factor"])
def test_cross_entropy_of_other_heads(name, head):
    same(LOSSES[name], **{"bias": True} if head == "bias" else {"head": lambda x: x / 0.7})


def test_a_loop_is_one_reading(monkeypatch):
    """A pass over the whole weight for each of many parts would be slower than the loop was."""
    from logitless.deferred import read

    calls, own = [], read.logprobs
    monkeypatch.setattr(read, "logprobs", lambda *args, **kwargs: calls.append(args) or own(*args, **kwargs))
    for name in ("a loop over rows", "a loop over rows with labels", "a loop over chunks", "a loop over single rows"):
        calls.clear()
        results(READS[name], deferred=True)
        assert len(calls) == 1, name


@pytest.mark.parametrize("name", ["softmax first", "entropy of both", "entropy of log_softmax"])
def test_an_entropy_is_one_reading(name, monkeypatch):
    from logitless.deferred import read

    calls, own = [], read.logprobs
    monkeypatch.setattr(read, "logprobs", lambda *args, **kwargs: calls.append(args) or own(*args, **kwargs))
    results(READS[name], deferred=True)
    assert len(calls) == 1


def test_what_was_read_before_a_factor_in_place_is_not_read_again():
    hidden, weight = torch.randn(4, D), torch.randn(V, D)
    logits = ll.Logits(hidden, weight, strict=True)
    before = entropy(logits.log_softmax(-1))
    logits /= 0.5
    after = entropy(logits.log_softmax(-1))
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, entropy((hidden @ weight.T / 0.5).log_softmax(-1)))


# Half precision.


@pytest.mark.parametrize("name", ["cross_entropy", *SOME])
def test_in_bfloat16_the_dtype_is_torchs_and_the_error_no_larger(name):
    read = (
        (lambda x: F.cross_entropy(x.view(-1, V).float(), LABELS.view(-1))) if name == "cross_entropy" else READS[name]
    )
    torch.manual_seed(4)
    operands = [torch.randn(n, D).bfloat16() for n in (B * S, V)]
    found = []
    for kind in ("plain", "ours", "truth"):
        hidden, weight = (
            x.clone().to(torch.float64 if kind == "truth" else x.dtype).requires_grad_() for x in operands
        )
        hidden_ = hidden.view(B, S, D)
        logits = ll.Logits(hidden_, weight, match="bfloat16", strict=True) if kind == "ours" else hidden_ @ weight.T
        out = read(logits)
        out = [x for x in (out if isinstance(out, (tuple, list)) else [out]) if x.requires_grad]
        gradients = torch.autograd.grad([x.sum() for x in out], (hidden, weight))
        found.append(([x.detach() for x in out], gradients))
    (plain, d_plain), (ours, d_ours), (truth, d_truth) = found
    for mine, theirs, right in zip(ours, plain, truth, strict=True):
        assert mine.dtype == theirs.dtype
        # Rounded to bfloat16 as torch's result: one unit in the last place may go either way.
        error = (mine.double() - right).abs().max()
        assert error <= 2 * (theirs.double() - right).abs().max() + 2**-9 * right.abs().max()
    for mine, theirs, right in zip(d_ours, d_plain, d_truth, strict=True):
        assert_gradient_close_to_truth(mine, right, theirs)


def test_under_autocast_the_dtype_is_torchs():
    hidden, weight = torch.randn(4, D), torch.randn(V, D)
    with torch.autocast("cpu", torch.bfloat16):
        logits = ll.Logits(hidden.bfloat16(), weight.bfloat16(), strict=True)
        loss, logprob = (
            (lambda x: F.cross_entropy(x, IDS[0, :4])),
            (lambda x: x.log_softmax(-1).gather(-1, SEVERAL[0, :4])),
        )
        assert loss(logits).dtype == loss(hidden @ weight.T).dtype == torch.float32
        assert logprob(logits).dtype == logprob(hidden @ weight.T).dtype == torch.bfloat16


# What cannot be served.


OTHERS: dict[str, Callable[[Any], Any]] = {
    "smoothed probabilities as targets": lambda x: F.cross_entropy(
        x.view(-1, V), torch.full((B * S, V), 1 / V, dtype=x.dtype), label_smoothing=0.1
    ),
    "softmax over tokens": lambda x: x.softmax(1),
    "argmax of everything": lambda x: x.argmax(),
    "more than 128 or the smallest": lambda x: x.topk(3, largest=False).values,
    "a distribution as it is": lambda x: x.softmax(-1) + 0.0,
    "log-probs of another distribution": lambda x: (x.softmax(-1) * (x * 2).log_softmax(-1)).sum(-1),
    "a quadratic": lambda x: x.softmax(-1).pow(2).sum(-1),
    "columns of probabilities": lambda x: x.softmax(-1)[..., 3:7],
    "fewer rows in the index": lambda x: x.gather(-1, IDS[:1, :, None]),
    "classes in the middle, as they are": lambda x: x.transpose(1, 2).exp(),
    "a softcap and class weights": lambda x: F.cross_entropy(
        torch.tanh(x).view(-1, V), IDS.view(-1), weight=CLASSES, label_smoothing=0.1
    ),
}


@pytest.mark.filterwarnings("ignore::logitless.operands.LogitsMade")
@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_is_computed_counted_and_right(name):
    read, found = OTHERS[name], []
    for deferred in (False, True):
        torch.manual_seed(4)
        hidden, weight = (torch.randn(*n, D, dtype=torch.float64, requires_grad=True) for n in ((B, S), (V,)))
        MADE.clear()
        out = read(ll.Logits(hidden, weight) if deferred else hidden @ weight.T)
        gradients = torch.autograd.grad(out.pow(2).sum(), (hidden, weight)) if out.requires_grad else ()
        found.append([out.detach(), *gradients])
    assert sum(MADE.values()) >= 1
    assert all("test_served.py" in place for place in MADE)
    for right, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


def test_a_warning_names_the_place_once():
    logits = ll.Logits(torch.randn(4, D), torch.randn(V, D))
    MADE.clear()
    for _ in range(2):
        probabilities = logits.softmax(-1)
        if not MADE:
            with pytest.warns(LogitsMade, match=r"because cumsum reads them at .*test_served.py:\d+"):
                _ = [probabilities.cumsum(-1) for _ in range(2)]
    assert list(MADE.values()) == [2]


def test_a_label_outside_of_the_vocabulary_is_refused():
    logits = ll.Logits(torch.randn(4, D), torch.randn(V, D))
    labels = torch.tensor([1, 2, V, 3])
    with pytest.raises(ll.LogitlessError, match=r"target 41 of row 2"):
        F.cross_entropy(logits, labels)
    with pytest.raises(ll.LogitlessError, match=r"outside the vocabulary"):
        F.cross_entropy(logits, torch.tensor([1, -100, 5, 3]), ignore_index=5)
    for read in (lambda x: x.gather(-1, labels[:, None]), lambda x: x.log_softmax(-1).gather(-1, -1 * labels[:, None])):
        with pytest.raises(
            ll.LogitlessError, match=r"index at .*test_served.py:\d+ runs from .* outside the 41 columns"
        ):
            read(logits)


def test_of_a_shard_torch_s_function_is_over_its_columns():
    """As a tensor's: code that knows of shards goes on to communicate by itself."""
    shard = ll.VocabShard(0, V)
    hidden, weight = torch.randn(4, D), torch.randn(V, D)
    logits = ll.Logits(hidden, weight, shard=shard, strict=True)
    torch.testing.assert_close(torch.logsumexp(logits, -1), (hidden @ weight.T).logsumexp(-1))
    assert torch.equal(logits.argmax(-1), (hidden @ weight.T).argmax(-1))


@pytest.mark.filterwarnings("ignore::logitless.operands.LogitsMade")
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize(
    "read", [lambda x: x.max(-1), lambda x: x.min(-1), lambda x: x.topk(2), lambda x: x.log_softmax(-1).max(-1)]
)
def test_of_rows_without_a_distribution_numbers_are_nan_and_ids_0(read: Callable[[Any], Any], graph: bool):
    """As torch's of rows of NaN: one row that is no number does not stop the others from being read."""
    hidden, weight = torch.randn(4, D).requires_grad_(graph), torch.randn(V, D)
    with torch.no_grad():
        hidden[1] = torch.nan
    for bias in (None, torch.zeros(V).index_fill_(0, torch.tensor([5]), -torch.inf)):
        wanted, ours = read(F.linear(hidden, weight, bias)), read(ll.Logits(hidden, weight, bias=bias))
        torch.testing.assert_close(ours.values, wanted.values, equal_nan=True)
        good = torch.tensor([0, 2, 3])
        assert torch.equal(ours.indices[good], wanted.indices[good])
        assert ours.values[1].isnan().all()
    broken = weight.index_fill(0, torch.tensor([7]), torch.nan)
    logits = ll.Logits(hidden, broken)
    assert not logits.argmax(-1).any()
    if graph:
        assert torch.isnan(read(logits).values).all()
        assert not read(logits).indices.any()


def test_no_rows():
    hidden, weight = torch.randn(0, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    logits = ll.Logits(hidden, weight, strict=True)
    none = torch.zeros(0, dtype=torch.int64)
    assert F.cross_entropy(logits, none).isnan()
    assert F.cross_entropy(logits, none, reduction="sum") == 0
    found = logits.log_softmax(-1).gather(-1, none[:, None])
    assert found.shape == (0, 1)
    found.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()
