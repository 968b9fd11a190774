"""Programs that use results as tensors are used: written to, kept, hooked, compared, asked for by other names.

Each program runs on logits that torch computed and on ``Logits``, and must give the same numbers and gradients. Results
of readings are remembered, wait, and share memory with one another only where torch's would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import logitless as ll

np = pytest.importorskip("numpy")
pytestmark = pytest.mark.filterwarnings("ignore::logitless.operands.logits.LogitsMade")
B, S, D, V = 2, 5, 8, 37
IDS = torch.randint(V, (B, S), generator=torch.Generator().manual_seed(2))


def entropy(log_p: Any) -> Any:
    return -(log_p.exp() * log_p).sum(-1)


def results(program: Callable[[Any], Any], deferred: bool) -> list[Any]:
    """What a program returns, and its gradients of hidden states and weight."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(*shape, D, generator=generator, dtype=torch.float64) for shape in ((B, S), (V,)))
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    out = program(ll.Logits(hidden, weight) if deferred else hidden @ weight.T)
    out = list(out) if isinstance(out, (tuple, list)) else [out]
    trained = [x for x in out if isinstance(x, Tensor) and x.requires_grad]
    gradients: Any = []
    if trained:
        gradients = torch.autograd.grad(sum(x.square().sum() for x in trained), leaves, allow_unused=True)
    return [*out, *gradients]


def no_graph_first(x: Any) -> Any:
    with torch.no_grad():
        old = x.log_softmax(-1)
    gap = entropy(old).mean()
    return gap, entropy(x.log_softmax(-1)).mean()


def graph_first(x: Any) -> Any:
    new = entropy(x.log_softmax(-1)).mean()
    with torch.no_grad():
        old, copy = x.log_softmax(-1), x.clone()
    return new, entropy(old), entropy(copy.log_softmax(-1))


def written_to(read: Callable[[Any], Any], again: Callable[[Any], Any] | None = None) -> Callable[[Any], Any]:
    """A result is written to, and the same or another one read after that; one that was read before stays."""

    def program(x: Any) -> Any:
        x = x.detach()
        x.softmax(-1)
        first, kept = read(x), read(x)
        first *= 0
        return first, kept, (again or read)(x)

    return program


def a_buffer_of_ids(x: Any) -> Any:
    buffer, found = torch.empty(S, 1, dtype=torch.int64), []
    for i, row in enumerate(x.detach()):
        buffer.fill_(i)
        found.append(row.log_softmax(-1).gather(-1, buffer))
    return torch.stack(found)


def ids_that_are_written_to(pick: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def program(x: Any) -> Any:
        values, ids = pick(x.detach())
        ids[:] = 0
        return values

    return program


def a_copy_before(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A step on a result, which is then written to."""

    def program(x: Any) -> Any:
        largest = x.detach().amax(-1)
        step = change(largest)
        largest.mul_(2)
        return step, largest

    return program


def a_step_that_is_written_to(x: Any) -> Any:
    largest = x.detach().amax(-1)
    part, turned = largest[1:], -largest
    part.mul_(3)
    return part, largest, turned


def views_of_parts(x: Any) -> Any:
    found = [part.logsumexp(-1) for part in x.detach()]
    wide, minus = [y.unsqueeze(-1) for y in found], [-y for y in found]
    for y in found:
        y.mul_(2)
    return torch.stack(wide), torch.stack(minus), torch.stack(found)


def temperatures_of_samples(x: Any) -> Any:
    x = x.float()
    return torch.stack([x[i] / t for i, t in enumerate((0.7, 0.9))]).log_softmax(-1)[..., 3]


def turned_before_a_factor(x: Any) -> Any:
    copies = x.transpose(1, 2).contiguous(), x.transpose(1, 2).clone()
    x = x.div_(2)
    return (*(F.cross_entropy(y, IDS) for y in copies), F.cross_entropy(x.transpose(1, 2), IDS))


def threshold(look: Callable[[Any], Any], graph: bool = True) -> Callable[[Any], Any]:
    def program(x: Any) -> Any:
        x = x.float()
        with torch.set_grad_enabled(graph):
            limit = look(x.topk(3).values)
        return (x >= limit).sum(-1)

    return program


def in_inference_mode(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def program(x: Any) -> Any:
        found = read(x)
        with torch.inference_mode():
            found.mean().item()
        return found

    return program


def metrics_of_inference_mode(x: Any) -> Any:
    with torch.inference_mode():
        x.detach().mean(-1).sum().item()
    return x.logsumexp(-1) * x.detach().mean(-1)


def row_of_log_p(x: Any) -> Any:
    return x[0].log_softmax(-1)


def what_is_so_already_without_a_graph(x: Any) -> Any:
    """Torch returns the tensor itself, with its graph."""
    log_p, largest = x.log_softmax(-1), x.max(-1).values
    with torch.no_grad():
        x, log_p = (y.contiguous().double().to(torch.float64).flatten(0, 0) for y in (x, log_p))
        largest = largest.double()
    return x.logsumexp(-1), log_p[..., 3], largest


def a_factor_of_what_is_so_already(x: Any) -> Any:
    same = x.double().contiguous()
    same /= 2
    return x.logsumexp(-1), same.softmax(-1).amax(-1)


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "log-probs, masked": lambda x: x.log_softmax(-1).gather(-1, IDS[..., None]).squeeze(-1).masked_fill_(IDS > 20, 0.0),
    "probabilities, written to": lambda x: x.softmax(-1).gather(-1, IDS[..., None]).mul_(2),
    "rounded by a cast": lambda x: [
        y.float().log_softmax(-1).gather(-1, IDS[..., None]) for y in (x.detach().bfloat16(), x.detach().half())
    ],
    "what is so already": what_is_so_already_without_a_graph,
    "a factor of what is so already": a_factor_of_what_is_so_already,
    "a copy without a graph is read first": no_graph_first,
    "a copy without a graph is read last": graph_first,
    "mean, written to": written_to(lambda x: x.mean(-1)),
    "log Z, written to": written_to(lambda x: x.logsumexp(-1)),
    "log Z, before an entropy": written_to(lambda x: x.logsumexp(-1), lambda x: (x.softmax(-1) * x).sum(-1)),
    "norm, written to": written_to(lambda x: torch.linalg.vector_norm(x, dim=-1)),
    "the smallest, written to": written_to(lambda x: x.min(-1).values),
    "its place, written to": written_to(lambda x: x.min(-1).indices, lambda x: torch.cat([*x.min(-1), *x.max(-1)])),
    "a buffer of ids": a_buffer_of_ids,
    "ids of max": ids_that_are_written_to(lambda x: x.max(-1)),
    "ids of topk": ids_that_are_written_to(lambda x: x.topk(3)),
    "the sign before a change": a_copy_before(lambda m: -m),
    "a cast before a change": a_copy_before(lambda m: m.float()),
    "no cast before a change": a_copy_before(lambda m: m.double()),
    "a slice before a change": a_copy_before(lambda m: m[1:]),
    "detached before a change": a_copy_before(lambda m: m.detach()),
    "a slice that is changed": a_step_that_is_written_to,
    "views of parts": views_of_parts,
    "temperatures of samples": temperatures_of_samples,
    "turned before a factor": turned_before_a_factor,
    "threshold": threshold(lambda v: v[..., -1:]),
    "threshold, no graph": threshold(lambda v: v[..., -1:], graph=False),
    "threshold, new dimension": threshold(lambda v: v[..., -1].unsqueeze(-1)),
    "threshold, detached": threshold(lambda v: v[..., -1:].detach()),
    "threshold, reshaped": threshold(lambda v: v[..., -1].reshape(B, S, 1), graph=False),
    "threshold of a checkpoint": lambda x: checkpoint(threshold(lambda v: v[..., -1:]), x, use_reentrant=False),
    "threshold of detached logits": lambda x: (x.float() >= x.float().detach().topk(3).values[..., -1:]).sum(-1),
    "as large as one of them": lambda x: (x.float() >= x.float().gather(-1, IDS[..., None])).sum(-1),
    "log Z in inference mode": in_inference_mode(lambda x: x.split(1)[0].logsumexp(-1)),
    "max in inference mode": in_inference_mode(lambda x: x.max(-1).values),
    "metrics of inference mode": metrics_of_inference_mode,
    "range": lambda x: (row_of_log_p(x)[range(S), IDS[0]], x[0][range(S), 5], x[0][range(3)].logsumexp(-1)),
    "numpy": lambda x: (x[0][np.arange(S), 5], x[0][np.int64(3), 5], row_of_log_p(x)[np.arange(S), IDS[0].numpy()]),
    "new dimensions": lambda x: (
        x[None, ..., 5],
        x[:, None, :, 5],
        x[:, None, 0].logsumexp(-1),
        x[..., None, :].amax(-1),
    ),
    "the same rows twice": lambda x: -(x[:, 1:].softmax(-1) * x[:, 1:].log_softmax(-1)).sum(-1),
    "detached twice": lambda x: -(x.log_softmax(-1).detach().exp() * x.log_softmax(-1).detach()).sum(-1),
    "axis": lambda x: (entropy(x.log_softmax(-1)), (x.softmax(-1) * x.log_softmax(-1)).sum(axis=-1)),
    "keepdims": lambda x: (x.log_softmax(-1).mean(-1, keepdims=True), x.log_softmax(-1).mean(axis=-1)),
    "other": lambda x: [y.logsumexp(-1) for y in (torch.mul(x, other=2.0), x.mul(other=2.0), torch.div(x, other=2.0))],
    "unbind": lambda x: [y.logsumexp(-1) for y in x.unbind(dim=1)],
    "input": lambda x: (torch.argmax(input=x.transpose(1, 2), dim=1), torch.logsumexp(input=x, dim=-1)),
    "transposed by name": lambda x: torch.transpose(input=x.transpose(1, 2), dim0=1, dim1=2).logsumexp(-1),
    "tensors": lambda x: [getattr(torch, k)(tensors=[y.logsumexp(-1) for y in x.split(1)]) for k in ("cat", "stack")],
    "no columns": lambda x: (x[..., :0].logsumexp(-1), x.detach()[..., :0].sum(-1)),
    "means that are no readings": lambda x: (x.softmax(-1).mean(-1), x.log_softmax(-1).mean(0), x.softmax(-1).sum(-1)),
    "dtypes of a product": lambda x: (x.float().softmax(-1) * F.log_softmax(x, -1, dtype=torch.float64)).sum(-1),
    "with the logits in another dtype": lambda x: (x.float().softmax(-1) * x).sum(-1),
    "numbers of one row": lambda x: (x[0, 1][3], x[0, 1][[3, -1]], x[1, 0].softmax(-1)[IDS], x[0, 0].argmax()),
    "blanks": lambda x: [
        *(y for z in (x, x.log_softmax(-1), x.transpose(1, 2)) for y in (torch.zeros_like(z), torch.full_like(z, 2))),
        *(y for z in (x, x.max(-1).values) for y in (z.new_zeros(2, 3), z.new_tensor([1.5]), torch.ones_like(input=z))),
    ],
    "a number, squeezed": lambda x: torch.stack([row.logsumexp(-1).squeeze(-1) for row in x[0][:1]]),
    "unsqueeze": lambda x: [
        y.logsumexp(-1) for y in (x.unsqueeze(-2), x.unsqueeze(-4), x[0].unsqueeze(1), x.unsqueeze(2))
    ],
    "a view with ones": lambda x: (x.view(1, 1, -1, V).logsumexp(-1), x.view(B, 1, S, 1, -1).logsumexp(-1)),
    "unsqueeze behind": lambda x: x.unsqueeze(-1).logsumexp(-2),
}


ROUNDED = ("temperatures of samples", "dtypes of a product", "with the logits in another dtype")
"""Programs in which torch rounds to float32 on the way."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_numbers_and_gradients(name: str):
    wanted, ours = (results(PROGRAMS[name], deferred) for deferred in (False, True))
    for right, mine in zip(wanted, ours, strict=True):
        assert (right is None) == (mine is None)
        if right is None:
            continue
        assert mine.dtype == right.dtype
        assert mine.shape == right.shape
        assert mine.requires_grad == right.requires_grad
        rounded = name in ROUNDED or right.dtype == torch.float32
        loose = {"atol": 1e-5, "rtol": 1e-5} if rounded else {"atol": 1e-12, "rtol": 1e-10}
        torch.testing.assert_close(mine.detach().clone(), right.detach(), **loose)


def test_what_is_made_of_detached_numbers_has_no_graph():
    largest = ll.Logits(torch.randn(B, S, D, requires_grad=True), torch.randn(V, D)).max(-1).values
    assert (-largest).requires_grad
    assert not (-largest.detach()).requires_grad


@pytest.mark.parametrize(
    "name",
    [
        *("new dimensions", "unsqueeze", "range", "numpy", "a view with ones", "numbers of one row", "blanks"),
        *("the same rows twice", "detached twice"),
    ],
)
def test_none_of_it_computes_logits(name: str):
    for trained in (False, True):
        PROGRAMS[name](ll.Logits(torch.randn(B, S, D, requires_grad=trained), torch.randn(V, D), strict=True))


def test_dimensions_that_are_not_there():
    logits = ll.Logits(torch.randn(B, S, D), torch.randn(V, D))
    for dims in ((1, 5), (1, -4), (1, 3)):
        with pytest.raises(IndexError, match="Dimension out of range"):
            logits.transpose(*dims)


def test_the_sign_of_parts_is_asked_with_the_parts(monkeypatch):
    """A pass over the weight for each of them would be the price of a minus."""
    from logitless.deferred import read

    calls, own = [], read.logprobs
    monkeypatch.setattr(read, "logprobs", lambda *args, **kwargs: calls.append(args) or own(*args, **kwargs))
    logits = ll.Logits(torch.randn(B, S, D), torch.randn(V, D), strict=True)
    torch.cat([(-part.log_softmax(-1)).gather(-1, IDS[i : i + 1, :, None]) for i, part in enumerate(logits.split(1))])
    assert len(calls) == 1


# Gradients of results themselves.


def test_gradients_of_a_result():
    def program(x: Any) -> Any:
        largest, parts = x.max(-1).values, x.split(1)[0].logsumexp(-1)
        largest.retain_grad()
        (largest.square().sum() + parts.sum()).backward(retain_graph=True)
        (by,) = torch.autograd.grad(parts.square().sum(), parts)
        seen = []
        parts.register_hook(lambda g: seen.append(g))
        parts.sum().backward()
        return largest.grad, by, seen[0], largest.requires_grad, largest.is_leaf

    for right, mine in zip(results(program, False)[:3], results(program, True)[:3], strict=True):
        torch.testing.assert_close(mine, right)


def test_a_hook_that_comes_after_the_reading_changes_no_gradient():
    leaf = torch.randn(B, S, D, requires_grad=True)
    for result, refused in ((lambda g: None, False), (lambda g: g, False), (lambda g: 2 * g, True)):
        logits = ll.Logits(leaf, torch.randn(V, D))
        loss = logits.logsumexp(-1).sum()
        logits.register_hook(result)
        said = pytest.raises(ll.LogitlessError, match="Register it before they are read")
        with said if refused else contextlib.nullcontext():
            loss.backward()


def test_a_detached_result_becomes_a_leaf():
    def program(x: Any) -> Any:
        largest = x.detach().max(-1).values.requires_grad_()
        (3 * largest).sum().backward()
        return largest.grad

    for right, mine in zip(results(program, False), results(program, True), strict=True):
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda x, leaf: x.log_softmax(-1).register_hook(lambda g: g), "register_hook"),
        (lambda x, leaf: x.log_softmax(-1).detach().requires_grad_(), "requires_grad_"),
        (lambda x, leaf: x.transpose(1, 2).register_hook(lambda g: g), "register_hook"),
        (lambda x, leaf: torch.autograd.grad(leaf.sum(), x.softmax(-1), allow_unused=True), "grad"),
        (lambda x, leaf: torch.autograd.grad(leaf.sum(), x, allow_unused=True), "grad"),
        (lambda x, leaf: torch.autograd.grad(x.logsumexp(-1).sum(), inputs=[leaf, x]), "grad"),
    ],
)
def test_gradients_of_what_is_never_computed_are_refused(ask: Callable[..., Any], said: str):
    leaf = torch.randn(B, S, D, requires_grad=True)
    with pytest.raises(ll.LogitlessError, match=rf"Logits: {said} at .*test_as_torch.* asks for the gradient of"):
        ask(ll.Logits(leaf, torch.randn(V, D)), leaf)
    log_p = ll.Logits(leaf, torch.randn(V, D)).log_softmax(-1)
    assert log_p.requires_grad_() is log_p


@pytest.mark.parametrize("read", ["max", "min", "topk", "softmax", "turned", "gather of log_softmax"])
@pytest.mark.parametrize("beside", [True, False], ids=["beside a loss", "alone"])
def test_results_that_a_reentrant_checkpoint_returns(read: str, beside: bool):
    reads: dict[str, Callable[[Any], Any]] = {
        "max": lambda x: x.max(-1).values,
        "min": lambda x: x.min(-1).values,
        "topk": lambda x: x.topk(3).values,
        "softmax": lambda x: x.softmax(-1),
        "turned": lambda x: x.transpose(1, 2),
        "gather of log_softmax": lambda x: x.log_softmax(-1),
    }

    def gradient(deferred: bool) -> Tensor:
        torch.manual_seed(3)
        hidden, weight = torch.randn(B, S, D, dtype=torch.float64, requires_grad=True), torch.randn(V, D).double()

        def function(h: Tensor) -> Any:
            x = ll.Logits(h, weight) if deferred else h @ weight.T
            return F.cross_entropy(x.flatten(0, 1), IDS.flatten()), reads[read](x)

        loss, found = checkpoint(function, hidden, use_reentrant=True)
        found = found.gather(-1, IDS[..., None]) if read.startswith("gather") else found
        (found.square().mean() + (loss if beside else 0.0)).backward()
        assert hidden.grad is not None
        return hidden.grad

    torch.testing.assert_close(gradient(True), gradient(False))


# Changes in place.


@pytest.mark.parametrize("view", [lambda x: x.view(-1, V), lambda x: x[0], lambda x: x.unsqueeze(-2)])
def test_views_of_logits_whose_hidden_states_are_not_contiguous(view: Callable[[Any], Any]):
    """Their logits are contiguous, so that torch would have a view."""
    hidden, weight = torch.randn(S, B, D).transpose(0, 1), torch.randn(V, D)
    logits = ll.Logits(hidden, weight)
    part = view(logits)
    part.div_(0.5)
    with pytest.raises(ll.LogitlessError, match=r"share memory with logits that were changed in place at"):
        logits.logsumexp(-1)
    torch.testing.assert_close(part.logsumexp(-1), view(hidden @ weight.T / 0.5).logsumexp(-1))


@pytest.mark.parametrize(
    "copy",
    [
        *(lambda x: x.transpose(0, 1).contiguous(), lambda x: x[[0, 1]], lambda x: x.transpose(0, 1).reshape(-1, V)),
        lambda x: x[..., 2:9].contiguous(),
    ],
)
def test_copies_of_logits_are_not_changed(copy: Callable[[Any], Any]):
    hidden, weight = torch.randn(B, S, D), torch.randn(V, D)
    logits = ll.Logits(hidden, weight)
    other = copy(logits)
    other.div_(0.5)
    torch.testing.assert_close(logits.logsumexp(-1), (hidden @ weight.T).logsumexp(-1))
    torch.testing.assert_close(other.logsumexp(-1), copy(hidden @ weight.T / 0.5).logsumexp(-1))


@pytest.mark.parametrize("view", [lambda x: x[..., 3], lambda x: x[0, 1, 2], lambda x: x.select(-1, 3), lambda x: x.mT])
def test_a_view_by_columns_that_is_changed(view: Callable[[Any], Any]):
    logits = ll.Logits(torch.randn(B, S, D), torch.randn(V, D))
    before = logits.logsumexp(-1)
    (view(logits) * 1).mul_(2)
    assert torch.equal(logits.logsumexp(-1), before)
    view(logits).mul_(2)
    with pytest.raises(ll.LogitlessError, match="a view of them was changed in place after the logits were made"):
        logits.flatten(0, 1)


def test_a_list_of_columns_is_a_copy():
    logits = ll.Logits(torch.randn(B, S, D), torch.randn(V, D))
    logits[..., [3, 4]].mul_(2)
    logits.logsumexp(-1)


def test_a_change_in_place_where_no_gradient_is_recorded_is_refused():
    logits = ll.Logits(torch.randn(B, S, D, requires_grad=True), torch.randn(V, D))
    with (
        torch.no_grad(),
        pytest.raises(ll.LogitlessError, match=r"where no gradient is recorded.*logits / temp"),
    ):
        logits.div_(2)


def test_the_mean_of_no_logits_has_a_gradient_of_zero():
    weight = torch.randn(V, D, requires_grad=True)
    (0 * ll.Logits(torch.empty(0, D), weight).mean()).backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_the_sum_of_rows_with_factors_of_their_own_is_not_rounded():
    hidden, weight, by = torch.randn(64, D).bfloat16(), torch.randn(V, D).bfloat16(), torch.rand(64, 1) + 0.5
    found = (ll.Logits(hidden, weight).float() / by).sum()
    truth = (hidden.double() @ weight.double().T / by).sum()
    torch.testing.assert_close(found.double(), truth, atol=1e-3, rtol=1e-5)
