"""Logits that are not computed, in the hands of code that passes them on: values and gradients of the computed tensor.

Everything is float64, so that the one tolerance rule leaves 1e-12. ``strict=True`` raises wherever logits are computed.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from torch import Tensor

import logitless as ll
from logitless.operands.graph import LogitsGradient
from logitless.operands.logits import MADE, LogitsMade

B, S, V, D = 3, 7, 23, 5


def operands(bias: bool = False, lora: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(11)
    sizes = {"hidden": (B, S, D), "weight": (V, D)}
    sizes |= {"bias": (V,)} if bias else {}
    sizes |= {"a": (2, D), "b": (V, 2)} if lora else {}
    return {name: torch.randn(size, dtype=torch.float64, requires_grad=True) for name, size in sizes.items()}


def logits_of(x: dict[str, Tensor], deferred: bool, **options: Any) -> Any:
    bias = x.get("bias")
    if deferred:
        weight = ll.LoRA(x["weight"], x["a"], x["b"], 0.5) if "a" in x else x["weight"]
        return ll.Logits(x["hidden"], weight, bias=bias, **{"strict": True, **options})
    weight = x["weight"] + 0.5 * x["b"] @ x["a"] if "a" in x else x["weight"]
    return torch.nn.functional.linear(x["hidden"], weight, bias)


def same(
    change: Callable[[Any], Any], *, check: Callable[[Any], Any] | None = None, strict: bool = True, **kind: bool
) -> None:
    """That ``change`` of deferred logits is its change of computed ones: numbers, and gradients of every operand."""
    found = []
    for deferred in (False, True):
        x = operands(**kind)
        out = change(logits_of(x, deferred, strict=strict))
        if deferred and check is not None:
            check(out)
        outs = [y.computed() if isinstance(y, ll.Logits) else y for y in _flat(out)]
        up = [
            torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(i)) for i, y in enumerate(outs)
        ]
        trained = [(y, g) for y, g in zip(outs, up, strict=True) if y.requires_grad]
        gradients = ()
        if trained:
            gradients = torch.autograd.grad([y for y, _ in trained], list(x.values()), [g for _, g in trained])
        found.append(([y.detach() for y in outs], gradients))
    (wanted, exact), (ours, mine) = found
    assert len(wanted) == len(ours)
    for a, b in zip(wanted, ours, strict=True):
        assert a.dtype == b.dtype
        if a.is_floating_point():
            assert_close_to_truth(b.double(), a.double(), a.double())
        else:
            assert torch.equal(a, b)
    assert len(exact) == len(mine)
    for a, b in zip(exact, mine, strict=True):
        assert_gradient_close_to_truth(b, a, a)


def _flat(out: Any) -> list[Any]:
    return [y for x in out for y in _flat(x)] if isinstance(out, (tuple, list)) else [out]


INDEX = torch.tensor([2, 0, 2])
MASK = torch.tensor([[True, False, True, True, False, False, True]] * B)
FACTOR = torch.rand(B, S, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 0.5

RULES: dict[str, Callable[[Any], Any]] = {
    "slices": lambda x: x[:, :-1],
    "steps": lambda x: x[::2, 1:6:2],
    "ellipsis": lambda x: (x[..., :-1, :], x[...], x[..., :]),
    "numbers": lambda x: (x[1], x[-1, 2], x[:, -1]),
    "new dimension": lambda x: (x[None], x[:, None], x.unsqueeze(0), x.unsqueeze(1)),
    "lists": lambda x: (x[INDEX], x[:, INDEX], x[INDEX, INDEX], x[[0, 2]]),
    "masks": lambda x: x[MASK],
    "columns": lambda x: (x[..., 3:9], x[:, :, :-2], x[:, :-1, 2:]),
    "select": lambda x: (x.select(1, 2), x.narrow(1, 2, 3), x.index_select(1, INDEX)),
    "squeeze": lambda x: x[:1].squeeze(0),
    "view": lambda x: (x.view(-1, V), x.view(S, B, V), x.reshape(B * S, V), x.reshape(1, -1, V), x.view((B, S, -1))),
    "view_as": lambda x: x.view_as(torch.empty(B * S, V)),
    "flatten": lambda x: x.flatten(0, 1),
    "transpose": lambda x: (x.transpose(0, 1), x.swapaxes(1, 0), x.permute(1, 0, 2), x.transpose(0, 1).contiguous()),
    "casts": lambda x: (x.double(), x.to(torch.float64), x.to(x), x.type_as(x), x.to("cpu", torch.float64)),
    "numbers as factors": lambda x: (x / 0.7, x * 3, 0.5 * x, x.div(2), torch.mul(x, 4.0), x / -2),
    "a tensor as a factor": lambda x: (x / torch.tensor(0.7, dtype=torch.float64), x * FACTOR[:1, :1]),
    "a factor for each row": lambda x: (x / FACTOR, (x * FACTOR)[:, 1:], FACTOR[0] * x),
    "in place": lambda x: x.clone().div_(0.7),
    "in place, a factor for each row": lambda x: x.clone().mul_(FACTOR),
    "softcap": lambda x: torch.tanh(x / 3.0) * 3.0,
    "softcap, then temperature": lambda x: ((x / 3).tanh() * 3)[:, :-1] / FACTOR[:, 1:],
    "copies": lambda x: (x.clone(), x.contiguous(), x.detach() * 2),
    "data": lambda x: x.data,
    "sum": lambda x: (x.sum(), 0 * x.sum(), (x / FACTOR).sum(), x.mean()),
    "split": lambda x: (x.split(2), x.split([1, 2]), x.split(3, dim=1), torch.split(x, 2)),
    "chunk": lambda x: (x.chunk(2), x.chunk(3, dim=1), x.unbind(0), x.unbind(1)),
    "iteration": lambda x: list(x),
    "cat": lambda x: (torch.cat([x[:1], x[1:]]), torch.cat([x[:, 3:], x[:, :3]], dim=1), torch.cat(x.split(2))),
    "cat of other factors": lambda x: torch.cat([x[:1] / 0.7, x[1:] / FACTOR[1:]]),
    "stack": lambda x: (torch.stack([x[0], x[2]]), torch.stack(list(x))),
}


def not_computed(out: Any) -> None:
    for x in _flat(out):
        assert isinstance(x, ll.Logits) or x.dim() == 0


@pytest.mark.parametrize("name", RULES)
def test_what_passes_logits_on_acts_on_hidden_states(name):
    same(RULES[name], check=not_computed)


@pytest.mark.parametrize("kind", ["bias", "lora"])
@pytest.mark.parametrize("name", ["slices", "columns", "a factor for each row", "softcap", "cat", "sum", "transpose"])
def test_the_same_with_a_bias_and_with_a_lora(name, kind):
    if kind == "lora" and name in ("columns", "sum"):
        pytest.skip("computed: see the test of what is counted")
    same(RULES[name], check=not_computed, **{kind: True})


def test_casts_have_the_dtype_and_no_product():
    lazy = logits_of(operands(), True)
    for dtype, cast in ((torch.float32, lazy.float()), (torch.bfloat16, lazy.bfloat16()), (torch.float16, lazy.half())):
        assert isinstance(cast, ll.Logits)
        assert cast.dtype == cast.computed().dtype == dtype
    assert lazy.to(dtype=torch.float32, copy=True).dtype == torch.float32


OTHERS: dict[str, Callable[[Any], Any]] = {
    "a sum of logits": lambda x: x + x[:, :1],
    "exp": lambda x: x.exp(),
    "comparison": lambda x: x > 0,
    "the transpose": lambda x: x.transpose(0, 2),
    "a mean over tokens": lambda x: x.mean(1),
    "where": lambda x: torch.where(x > 0, x, -1.0),
    "product": lambda x: x @ torch.ones(V, 2, dtype=torch.float64),
    "a cat with a tensor": lambda x: torch.cat([x, torch.ones(1, S, V, dtype=torch.float64)]),
    "a factor with a gradient": lambda x: x * FACTOR.clone().requires_grad_(),
    "a factor for each column": lambda x: x * torch.arange(1.0, V + 1, dtype=torch.float64),
    "factor 0": lambda x: x * 0,
}


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_computes_them_counts_and_warns_once(name):
    MADE.clear()
    x = operands()
    lazy = logits_of(x, True, strict=False)
    with pytest.warns(LogitsMade, match=r"logits were computed, \[3, 7, 23\].*test_logits.py:\d+"):
        OTHERS[name](lazy)
    assert list(MADE) == [place for place in MADE if "test_logits.py" in place]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OTHERS[name](lazy)
    assert all(count >= 2 for count in MADE.values())
    with pytest.raises(ll.LogitlessError, match=r"strict=True forbids to compute them"):
        OTHERS[name](logits_of(x, True))


@pytest.mark.filterwarnings("ignore::logitless.operands.LogitsMade")
@pytest.mark.parametrize("name", OTHERS)
def test_computed_logits_are_the_heads_own(name):
    found = []
    for deferred in (False, True):
        x = operands(bias=True)
        out = OTHERS[name](logits_of(x, deferred, strict=False) if deferred else logits_of(x, False))
        gradients = ()
        if out.requires_grad:
            gradients = torch.autograd.grad(out.sum(), list(x.values()))
        found.append((out.detach(), *gradients))
    for wanted, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)


def test_it_looks_like_the_tensor_it_stands_for():
    x = operands(bias=True)
    lazy, plain = logits_of(x, True), logits_of(x, False)
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "is_cuda", "layout"):
        assert getattr(lazy, name) == getattr(plain, name), name
    assert lazy.size(-1) == V
    assert (len(lazy), lazy.dim(), lazy.numel(), lazy.stride()) == (B, 3, B * S * V, plain.stride())
    assert lazy.is_contiguous()
    before = Counter(MADE)
    assert torch.is_floating_point(lazy)
    assert (torch.is_complex(lazy), torch.is_conj(lazy), torch.is_neg(lazy)) == (False, False, False)
    assert (torch.numel(lazy), torch.result_type(lazy, 1)) == (B * S * V, plain.dtype)
    assert before == MADE
    assert repr(lazy) == "Logits([3, 7, 23], torch.float64)"
    assert not lazy.detach().requires_grad
    with torch.no_grad():
        assert not logits_of(x, True).requires_grad


def test_made_without_a_graph_they_have_none():
    x = operands()
    with torch.no_grad():
        lazy = logits_of(x, True)
    assert not ll.logprobs(lazy[:, 1:], torch.zeros(B, S - 1, dtype=torch.int64)).logprob.requires_grad


WRITES: dict[str, Callable[[Any], Any]] = {
    "an assignment": lambda x: x.__setitem__((0, 0, 3), -1.0),
    "masked_fill_": lambda x: x.masked_fill_(torch.zeros(V, dtype=torch.bool), 0.0),
    "+=": lambda x: x.__iadd__(1.0),
    "a factor for each column": lambda x: x.mul_(torch.arange(1.0, V + 1, dtype=torch.float64)),
    "a pointer": lambda x: x.data_ptr(),
    "out": lambda x: torch.add(torch.ones(1), torch.ones(1), out=x),
}


@pytest.mark.parametrize("name", WRITES)
def test_writing_to_them_is_refused(name):
    with pytest.raises(ll.LogitlessError, match=r"needs logits in memory.*logits = logits.computed\(\)"):
        WRITES[name](logits_of(operands(), True, strict=False))


@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
def test_operands_that_were_changed_since_are_refused(name):
    x = operands(bias=True)
    lazy = logits_of(x, True)
    later = lazy[:, :-1]
    with torch.no_grad():
        x[name].add_(1.0)
    for found in (lazy, later):
        with pytest.raises(ll.LogitlessError, match=rf"Logits: {name} was changed in place"):
            ll.logprobs(found, torch.zeros(found.shape[:-1], dtype=torch.int64))
    with pytest.raises(ll.LogitlessError, match=r"was changed in place"):
        lazy[:, :-1].float()


# In autograd's graph.


def chosen(x: Any) -> Tensor:
    return ll.logprobs(x, torch.arange(B * S).view(B, S) % V, entropy="grad").logprob


def gradients(read: Callable[[Any], Tensor], deferred: bool, **options: Any) -> list[Tensor]:
    x = operands(bias=True)
    read(logits_of(x, deferred, **options)).pow(2).sum().backward()
    return [p.grad for p in x.values()]


class Sink(torch.autograd.Function):
    """As DDP's: the tensor as it came, and something to do in backward."""

    seen: list[Any] = []

    @staticmethod
    def forward(ctx: Any, clone: bool, x: Any) -> Any:
        return x.clone() if clone else x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        Sink.seen.append(gradient)
        return None, gradient


@pytest.mark.parametrize("clone", [False, True])
def test_a_function_that_hands_them_on_sees_backward(clone):
    Sink.seen.clear()
    ours = gradients(lambda x: chosen(Sink.apply(clone, x)), True)
    assert isinstance(Sink.seen[0], LogitsGradient)
    assert Sink.seen[0].shape == (B, S, V)
    for mine, right in zip(ours, gradients(chosen, False), strict=True):
        assert_gradient_close_to_truth(mine, right, right)


class Squares(torch.autograd.Function):
    """A function of a host that reads logits in its forward and makes their gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        ctx.save_for_backward(x * 1.0 + 0.0)
        return (x * x).sum(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return 2 * ctx.saved_tensors[0] * g[..., None]


READS: dict[str, Callable[[Any], Tensor]] = {
    "alone": Squares.apply,
    "beside a reading": lambda x: Squares.apply(x) + chosen(x),
    "behind a sink": lambda x: (lambda y: Squares.apply(y) + chosen(y) + chosen(y * 2))(Sink.apply(True, x)),
    "of a slice with a factor": lambda x: Squares.apply((torch.tanh(x / 3) * 3)[:, 1:] / 0.7),
}


@pytest.mark.filterwarnings("ignore::logitless.operands.LogitsMade")
@pytest.mark.parametrize("name", READS)
def test_a_function_that_computes_them_gets_its_gradient_through(name):
    ours, wanted = gradients(READS[name], True, strict=False), gradients(READS[name], False)
    for mine, right in zip(ours, wanted, strict=True):
        assert_gradient_close_to_truth(mine, right, right)


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_run_once_before_gradients_go_on(when):
    x, order = operands(), []
    x["hidden"].register_hook(lambda g: order.append("hidden"))
    body = x["hidden"] * 1.0
    lazy = ll.Logits(body, x["weight"], strict=True)
    if when == "before":
        lazy.register_hook(lambda g: order.append("logits"))
    loss = chosen(lazy).sum() + chosen(lazy[:, :] / 0.5).sum()
    if when == "after":
        lazy.register_hook(lambda g: order.append("logits"))
    loss.backward()
    assert order == ["logits", "hidden"]


def test_a_hook_may_scale_the_gradient_and_nothing_else():
    wanted = gradients(lambda x: chosen(x), False)
    x = operands(bias=True)
    lazy = logits_of(x, True)
    lazy.register_hook(lambda g: g * 0.5)
    chosen(lazy).pow(2).sum().backward()
    for mine, right in zip(x.values(), wanted, strict=True):
        assert_gradient_close_to_truth(mine.grad, 0.5 * right, 0.5 * right)
    lazy = logits_of(operands(), True)
    lazy.register_hook(lambda g: g.exp())
    with pytest.raises(
        ll.LogitlessError, match=r"aten.exp.default reads the gradient of logits that were not computed"
    ):
        chosen(lazy).sum().backward()


def test_a_removed_hook_does_not_run():
    x, seen = operands(), []
    lazy = logits_of(x, True)
    lazy.register_hook(seen.append).remove()
    chosen(lazy).sum().backward()
    assert not seen


def test_below_torchs_functions_an_error_names_the_place():
    with pytest.raises(ll.LogitlessError, match=r"below torch's Python functions, at .*test_logits.py.*reversible"):
        with torch._C.DisableTorchFunctionSubclass():
            torch.exp(logits_of(operands(), True).detach())


def test_a_factor_in_place_behind_a_hook():
    """As FSDP2 hooks a model's output, which a framework then divides by a temperature."""
    found = []
    for lazy in (False, True):
        x = operands()
        logits = logits_of(x, lazy)
        logits.register_hook(lambda g: None)
        # Reading makes what stands behind the hook, before the factor comes.
        logits.view(-1, logits.shape[-1])
        logits = logits.clone() if not lazy else logits
        logits.div_(0.7)
        out = torch.logsumexp(logits, -1)
        found.append([out.detach(), *torch.autograd.grad(out.sum(), list(x.values()))])
    for mine, right in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, right)


def shared(one: Tensor, other: Tensor) -> bool:
    return torch._C._is_alias_of(one, other)


@pytest.mark.parametrize("name", [name for name in RULES if name not in ("iteration", "sum")])
def test_a_factor_in_place_is_refused_by_views_and_missed_by_copies(name):
    """Whatever torch has as a view of the logits has the factor, too, and they have its own."""
    with torch.no_grad():
        plain = logits_of(operands(), False)
        views = [shared(plain, y) for y in _flat(RULES[name](plain))]
        for place, is_view in enumerate(views):
            logits = logits_of(operands(), True)
            found = _flat(RULES[name](logits))[place]
            before = found.computed()
            logits.div_(0.7)
            if found is logits:
                torch.testing.assert_close(found.computed(), before / 0.7)
            elif is_view:
                with pytest.raises(ll.LogitlessError, match=r"share memory .* in place at .*test_logits.py"):
                    ll.logprobs(found, torch.zeros(found.shape[:-1], dtype=torch.int64))
                other = logits_of(operands(), True)
                _flat(RULES[name](other))[place].div_(0.7)
                with pytest.raises(ll.LogitlessError, match="share memory"):
                    other.computed()
            else:
                assert torch.equal(found.computed(), before)


def test_parts_that_share_no_row_are_changed_one_by_one():
    with torch.no_grad():
        found = []
        for lazy in (False, True):
            parts = logits_of(operands(), lazy).split(1)
            for i, part in enumerate(parts):
                part.div_(0.5 + i)
            found.append(torch.cat([torch.logsumexp(part, -1) for part in parts]))
    assert_close_to_truth(found[1], found[0], found[0])


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        (lambda x: x.log_softmax(-1), lambda y: y.gather(-1, torch.zeros(B, S, 1, dtype=torch.int64))),
        (lambda x: x.softmax(-1), lambda y: y.gather(-1, torch.zeros(B, S, 1, dtype=torch.int64))),
        (lambda x: (x.softmax(-1), x.log_softmax(-1)), lambda y: (y[0] * y[1]).sum(-1)),
        (lambda x: [torch.logsumexp(part, -1) for part in x.unbind(0)], torch.stack),
        (lambda x: x.max(-1).values, lambda y: y),
        (lambda x: x[:, 1:].log_softmax(-1), lambda y: y.gather(-1, torch.zeros(B, S - 1, 1, dtype=torch.int64))),
    ],
    ids=["log_softmax", "softmax", "entropy", "parts", "max", "of a view"],
)
def test_what_was_asked_before_a_factor_in_place_has_none(begin, end):
    with torch.no_grad():
        plain, lazy = (logits_of(operands(), lazy, strict=False) for lazy in (False, True))
        wanted, begun = end(begin(plain)), begin(lazy)
        lazy.div_(0.7)
        assert_close_to_truth(end(begun), wanted, wanted)


COMPUTED = pytest.mark.filterwarnings("ignore::logitless.operands.logits.LogitsMade")


@COMPUTED
@pytest.mark.parametrize("turn", [lambda x: x / FACTOR * -1, lambda x: -2 * x / FACTOR, lambda x: x * -1.0 * FACTOR])
def test_a_factor_for_each_row_of_logits_turned_around(turn):
    ids = torch.ones(B, S, 2, dtype=torch.int64)
    same(turn, bias=True, strict=False)
    same(lambda x: (turn(x).argmax(-1).double(), turn(x).log_softmax(-1).gather(-1, ids)), strict=False)
    same(lambda x: torch.cat([x[:1] * FACTOR[:1], x[1:] * -1]), strict=False)


def test_the_largest_of_logits_turned_around_under_a_softcap():
    same(lambda x: ((x / -3.0).tanh() * 3.0).max(-1).values + 0, lora=True)
    same(lambda x: ((x * -0.3).tanh() * -3.0).argmax(-1).double())


@COMPUTED
def test_a_single_token_of_an_adapters_logits():
    same(lambda x: [row.log_softmax(-1)[3] for row in x.flatten(0, 1)], lora=True, strict=False)


def test_numbers_of_parts_wait_for_each_other():
    """So that one reading answers for all of them, and not one product for each."""
    for parts in (lambda x: x.split(2), lambda x: x.chunk(2), lambda x: x.unbind(0), list):
        found = [torch.logsumexp(part, -1) for part in parts(logits_of(operands(), True))]
        assert {type(x).__name__ for x in found} == {"Pending"}
        assert not torch.is_tensor(found[0].value)


@COMPUTED
@pytest.mark.parametrize("factor", [1 << 64, -(1 << 64)])
def test_a_factor_that_torch_does_not_take_is_not_taken(factor):
    for lazy in (False, True):
        with pytest.raises((RuntimeError, OverflowError)):
            logits_of(operands(), lazy, strict=False) * factor


@COMPUTED
def test_more_of_the_largest_than_a_reading_lists():
    """All 200 of 200 columns: more than 128 are computed, and a number past the columns is torch's error."""
    hidden, weight = torch.randn(2, 3, dtype=torch.float64), torch.randn(200, 3, dtype=torch.float64)
    found, wanted = ll.Logits(hidden, weight).topk(200, -1), (hidden @ weight.T).topk(200, -1)
    assert torch.equal(found.indices, wanted.indices)
    with pytest.raises(RuntimeError, match="out of range"):
        ll.Logits(hidden, weight[:5]).topk(6, -1)
