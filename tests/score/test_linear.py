"""``logprobs`` of ``Logits`` against float64: values and the gradients of hidden, weight and bias, in both loop orders.

The truth is ``hidden @ weight.T + bias`` in float64, from the same rounded operands, scored by the oracle; the
yardstick is the same line in float32. Budgets are small enough that a sweep has many slabs, row tiles and blocks.
"""

from __future__ import annotations

import pytest
import torch
from calls import from_hidden
from close import assert_gradient_close_to_truth
from shared.linear import (
    BACKENDS,
    DTYPES,
    GRADIENT_PROMISE,
    HALF,
    Operands,
    check,
    differentiate,
    draw,
    draw_rows,
    ragged,
    tiny,
)
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from truth import plain, truth

import logitless as ll
from logitless.machine import Tiles

pytestmark = pytest.mark.usefixtures("one_thread")


SIZES = [(17, 1, 17), (19, 63, 33), (40, 507, 16), (80, 63, 17), (130, 131, 5)]
"""Rows, vocabulary, hidden size: one that products with epilogues take. Two with more rows than columns, two with a row
count past the smallest row tile."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "vocab", "width"), SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_odd_sizes(backend: str, num_rows: int, vocab: int, width: int, dtype: torch.dtype, device: torch.device):
    operands, rows = draw(num_rows + 4, vocab, width, dtype), draw_rows(num_rows + 4, num_rows, vocab)
    if backend == "triton" and dtype == torch.float64:
        with pytest.raises(ll.LogitlessError, match=r"its kernels take .* not torch.float64"):
            check(operands, *rows, backend=backend, device=device)
        return
    # The interpreter is slow, and a few tiles are enough there.
    small = tiny(num_rows) if backend != "triton" else 4 * tiny(num_rows)
    # With one column the bias has one number, a sum in which half-precision terms cancel.
    wanted = ("hidden", "weight", "bias")[: 2 if vocab == 1 and dtype in HALF else 3]
    for memory in ("192MiB", small):
        check(operands, *rows, wanted=wanted, backend=backend, device=device, memory=memory)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [2, 2003])
@pytest.mark.parametrize("memory", ["192MiB", 4 * tiny(1)])
def test_one_row(memory, vocab: int, dtype: torch.dtype, device: torch.device):
    """Of narrow logits: the rounding of a single normaliser is luck, which a wide row would magnify."""
    index, target = torch.tensor([3]), torch.tensor([vocab - 1])
    check(draw(5, vocab, 33, dtype, spread=0.5), index, target, device=device, memory=memory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_rows", "vocab"), [(23, 101), (101, 23)], ids=["slabs", "blocks"])
@pytest.mark.parametrize(("tile_rows", "columns", "block"), [(1, 1, 1), (3, 7, 10), (5, 200, 5), (8, 16, 200)])
def test_any_tiles(monkeypatch, tile_rows, columns, block, num_rows, vocab, dtype):
    """Tiles that no budget gives on a CPU: several blocks of rows in both loop orders."""
    if tile_rows == columns == 1:
        num_rows, vocab = num_rows // 2, vocab // 2
    tiles = Tiles(min(tile_rows, num_rows), min(columns, vocab), min(block, num_rows), 4096, slabs=num_rows < vocab)
    monkeypatch.setattr("logitless.route.plan.forward_tiles", lambda *_: tiles)
    monkeypatch.setattr("logitless.route.plan.backward_tiles", lambda *_: tiles)
    check(draw(num_rows, vocab, 17, dtype), *draw_rows(num_rows, num_rows, vocab))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("num_rows", "vocab"), [(150, 507), (300, 63)], ids=["slabs", "blocks"])
def test_the_tiles_do_not_show(num_rows: int, vocab: int, dtype: torch.dtype):
    operands, rows = draw(num_rows, vocab, 33, dtype), draw_rows(num_rows, num_rows, vocab)
    upstream = [torch.randn(num_rows, dtype=torch.float64) for _ in range(3)]
    results = []
    for memory in (tiny(num_rows), "300KB", "2MB", "4GiB"):
        leaf = operands.leaves()
        out = ll.logprobs(ll.Logits(leaf.hidden, leaf.weight, bias=leaf.bias), rows, entropy="grad", memory=memory)
        results.append((*out[:3], *differentiate(out, leaf, upstream).values()))
    off = 1e-12 if dtype == torch.float64 else 1e-6
    for other in results[:-1]:
        for a, b in zip(other, results[-1], strict=True):
            assert (a - b).norm() <= off * b.norm()
            torch.testing.assert_close(a, b, rtol=off, atol=4 * off)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("memory", ["192MiB", 4000])
def test_no_rows(backend: str, memory, device: torch.device):
    leaf = draw(5, 63, 17).leaves(device=device)
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    options = {"bias": leaf.bias, "entropy": "grad", "backend": backend, "memory": memory}
    out = from_hidden(leaf.hidden, leaf.weight, (empty, empty), **options)
    assert [tuple(x.shape) for x in out[:3]] == [(0,)] * 3
    sum(x.sum() for x in out[:3]).backward()
    for x in leaf:
        assert x.grad.shape == x.shape
        assert (x.grad == 0).all()


def test_no_tokens(device: torch.device):
    leaf = draw(0, 63, 17).leaves(device=device)
    out = ll.logprobs(ll.Logits(leaf.hidden, leaf.weight), torch.zeros(0, dtype=torch.int64, device=device))
    out.logprob.sum().backward()
    assert leaf.hidden.grad.shape == (0, 17)
    assert (leaf.weight.grad == 0).all()


@pytest.mark.parametrize("vocab", [3, 63])
def test_nothing_but_ignored_rows(vocab: int, device: torch.device):
    leaf = draw(5, vocab, 17).leaves(device=device)
    ignored = torch.full((5,), -100, device=device)
    out = ll.logprobs(ll.Logits(leaf.hidden, leaf.weight, bias=leaf.bias), ignored, entropy="grad")
    assert all((x == 0).all() for x in out[:3])
    torch.autograd.backward(out[:3], [torch.randn(5, device=device) for _ in out[:3]])
    assert all((x.grad == 0).all() for x in leaf)


@pytest.mark.parametrize("memory", ["192MiB", 6000])
def test_packed_rows_and_pairs_and_whole_targets(memory, device: torch.device):
    """Three ways to name the same rows: the same bits, and zero gradient for tokens that are not scored."""
    rows = ll.Rows.packed([[7, 8, 9], [4, 5, 6, 7, 11]], [1, 3], num_tokens=10, device=device)
    operands = draw(10, 63, 17)
    whole = torch.full((10,), -100, device=device)
    whole[rows.index] = rows.target
    runs = []
    for chosen in (rows, (rows.index, rows.target), whole):
        leaf = operands.leaves(device=device)
        out = ll.logprobs(ll.Logits(leaf.hidden, leaf.weight, bias=leaf.bias), chosen, entropy="grad", memory=memory)
        (out.logprob.sum() + out.entropy.sum()).backward()
        picked = [x if len(x) == len(rows) else x[rows.index] for x in out[:3]]
        runs.append((picked, [x.grad for x in leaf]))
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0] + runs[0][1], runs[1][0] + runs[1][1], strict=True))
    for a, b in zip(runs[0][0] + runs[0][1], runs[2][0] + runs[2][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    left_out = [i for i in range(10) if i not in rows.index.tolist()]
    assert all((grads[0][left_out] == 0).all() and (grads[0][rows.index] != 0).any(-1).all() for _, grads in runs)
    check(operands, rows.index.cpu(), rows.target.cpu(), memory=memory, device=device)


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x[:, :-1],
        lambda x: x[:, ::2],
        lambda x: x.transpose(0, 1),
        lambda x: x[..., ::2],
        lambda x: x.permute(2, 0, 1),
        lambda x: x[1],
        lambda x: x[1, 2],
        lambda x: x[:1].expand(3, 6, 34),
    ],
)
def test_strided_hidden_in_its_own_shape(cut, device: torch.device):
    """``[B, S, D]`` hidden of any strides with ``[B, S]`` targets: results and gradients in the caller's shapes."""
    base = torch.randn(3, 6, 34, device=device).requires_grad_()
    view = cut(base)
    weight = torch.randn(101, view.shape[-1], device=device).requires_grad_()
    target = torch.randint(101, view.shape[:-1], device=device)
    straight = view.detach().contiguous().requires_grad_()
    runs = []
    for hidden, leaf in ((view, base), (straight, straight)):
        out = ll.logprobs(ll.Logits(hidden, weight), target, entropy="grad", memory=20_000)
        assert out.logprob.shape == out.entropy.shape == out.log_z.shape == view.shape[:-1]
        loss = (out.logprob * out.logprob.detach() + out.entropy).sum()
        runs.append((*(x.detach() for x in out[:3]), *torch.autograd.grad(loss, (leaf, weight))))
    (back,) = torch.autograd.grad(view, base, runs[1][3])
    assert all(torch.equal(a, b) for a, b in zip(runs[0], (*runs[1][:3], back, runs[1][4]), strict=True))


@pytest.mark.parametrize("shape", [(101, 17), (17, 101)])
def test_strided_weight(shape):
    """A transposed view, as a head stored the other way round, and a slice of a wider tensor."""
    base = torch.randn(202, 40)
    weight = base[:101, 3:20] if shape[0] == 101 else base[3:20, :].T.repeat(3, 1)[:101].T.contiguous().T
    hidden, target = torch.randn(9, 17), torch.randint(101, (9,))
    runs = []
    for w in (weight, weight.contiguous()):
        h, w = hidden.clone().requires_grad_(), w.detach().requires_grad_()
        out = ll.logprobs(ll.Logits(h, w), target, entropy="grad", memory=4000)
        runs.append((*out[:3], *torch.autograd.grad(out.logprob.sum() + out.entropy.sum(), (h, w))))
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "head",
    [
        {"temperature": 0.7},
        {"temperature": torch.tensor([0.3, 1.0, 2.5, 0.7, 1.3, 0.9, 40.0]).repeat(3)},
        {"scale": -1.5, "temperature": 0.8},
        {"softcap": 3.0},
        {"softcap": 30.0, "scale": 2.0, "temperature": 0.6},
        {"vocab_size": 120},
        {"vocab_size": 1},
        {"vocab_size": 100, "softcap": 5.0, "temperature": torch.linspace(0.5, 2, 21), "scale": 0.5},
    ],
    ids=lambda head: "-".join(head),
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_head(backend: str, head: dict, device: torch.device):
    operands = draw(25, 127, 17)
    rows = draw_rows(25, 21, head.get("vocab_size", 127))
    check(operands, *rows, backend=backend, device=device, memory=4 * tiny(21), **head)


@pytest.mark.parametrize("vocab_size", [57, 9], ids=["slabs", "blocks"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_of_the_weight_is_never_read(backend: str, vocab_size: int, device: torch.device):
    leaf = draw(21, 63, 17).leaves(device=device)
    with torch.no_grad():
        leaf.weight[vocab_size:] = torch.nan
        leaf.bias[vocab_size:] = torch.inf
    target = torch.randint(vocab_size, (21,), device=device)
    options = {"head": ll.Head(vocab_size=vocab_size), "backend": backend, "entropy": "grad", "memory": 4 * tiny(21)}
    for buffer in (None, torch.zeros(63, 17, device=device)):
        out = from_hidden(leaf.hidden, leaf.weight, target, bias=leaf.bias, weight_grad=buffer, **options)
        assert all(x.isfinite().all() for x in out[:3])
        (out.logprob.sum() + out.entropy.sum()).backward()
        d_weight = leaf.weight.grad if buffer is None else buffer
        assert all(x.isfinite().all() for x in (leaf.hidden.grad, d_weight, leaf.bias.grad))
        assert (d_weight[vocab_size:] == 0).all()
        assert (leaf.bias.grad[vocab_size:] == 0).all()
        assert (d_weight[:vocab_size] != 0).any()


@pytest.mark.parametrize("entropy", [None, "value", "grad"])
@pytest.mark.parametrize(("num_rows", "vocab"), [(11, 127), (90, 41)], ids=["slabs", "blocks"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_kept(backend: str, num_rows: int, vocab: int, entropy: str | None, device: torch.device):
    """Rows with no ids, one, a few with repeats, and many; targets inside and outside; ignored rows."""
    index, target = draw_rows(num_rows + 2, num_rows, vocab - 3)
    kept = [torch.randint(vocab - 3, ((0, 1, 3, 30)[i % 4],)).tolist() for i in range(num_rows)]
    kept[3] = [int(target[3]), *kept[3], int(target[3])]
    head = {"vocab_size": vocab - 3, "softcap": 6.0, "temperature": torch.linspace(0.5, 2, num_rows)}
    operands, options = draw(num_rows + 2, vocab, 17), {"backend": backend, "device": device, "entropy": entropy}
    check(operands, index, target, kept=kept, **options)
    check(operands, index, target, kept=kept, memory=4 * tiny(num_rows), **head, **options)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_kept_in_half_precision(dtype: torch.dtype):
    kept = [torch.randint(127, (12,)).tolist() for _ in range(21)]
    for memory in ("192MiB", tiny(21)):
        check(draw(21, 127, 33, dtype), *draw_rows(21, 21, 127), kept=kept, memory=memory)


def test_keeping_everything_is_the_plain_softmax():
    operands, target = draw(4, 101, 17, torch.float64), torch.randint(101, (4,))
    both = [
        ll.logprobs(ll.Logits(operands.hidden, operands.weight), target, kept=kept, memory=2000)
        for kept in (ragged([list(range(101))] * 4), None)
    ]
    torch.testing.assert_close(both[0].logprob, both[1].logprob, rtol=1e-12, atol=1e-12)
    assert torch.equal(both[0].log_z, both[1].log_z)


@pytest.mark.parametrize("memory", ["192MiB", 4000])
@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probs_do_not_depend_on_the_gate(backend: str, memory, device: torch.device):
    leaf, target = draw(7, 127, 17).leaves(device=device), torch.randint(127, (7,), device=device)
    results, gradients = {}, {}
    for mode in (None, "value", "grad"):
        out = ll.logprobs(ll.Logits(leaf.hidden, leaf.weight), target, entropy=mode, backend=backend, memory=memory)
        results[mode] = out
        gradients[mode] = torch.autograd.grad(out.logprob.sum(), leaf[:2])
    assert results[None].entropy is None
    assert torch.equal(results["value"].entropy, results["grad"].entropy)
    assert results["value"].entropy.grad_fn is None
    assert not results["value"].entropy.requires_grad
    assert results["grad"].entropy.grad_fn is not None
    for mode in ("value", "grad"):
        assert torch.equal(results[None].logprob, results[mode].logprob)
        assert torch.equal(results[None].log_z, results[mode].log_z)
        assert all(torch.equal(a, b) for a, b in zip(gradients[None], gradients[mode], strict=True))


@pytest.mark.parametrize("wanted", [("hidden", "weight", "bias"), ("hidden",), ("weight",)], ids="-".join)
@pytest.mark.parametrize("memory", ["192MiB", 8000])
def test_nothing_as_large_as_the_logits_is_saved(memory, wanted):
    leaf, target = draw(40, 127, 17).leaves(wanted), torch.randint(127, (40,))
    for mode in (None, "value", "grad"):
        shapes = shapes_saved(leaf, target, entropy=mode, memory=memory)
        vectors = [shape for shape in shapes if len(shape) == 1]
        # The operands, and at most two [R, D] for a unit gradient formed in forward.
        assert all(shape in ((40, 17), (127, 17)) for shape in shapes if len(shape) > 1), mode
        assert len(shapes) - len(vectors) <= 4, mode
        assert len(vectors) <= 14, mode


@pytest.mark.parametrize("wanted", [("hidden", "weight", "bias"), ("hidden",)], ids="-".join)
def test_value_saves_nothing_that_none_does_not(wanted):
    leaf, target = draw(40, 127, 17).leaves(wanted), torch.randint(127, (40,))
    assert shapes_saved(leaf, target, entropy="value") == shapes_saved(leaf, target, entropy=None)


def shapes_saved(leaf: Operands, target: Tensor, **options) -> list[tuple[int, ...]]:
    shapes = []

    def keep(x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        from_hidden(leaf.hidden, leaf.weight, target, bias=leaf.bias, **options)
    return sorted(shapes)


@pytest.mark.parametrize("which", ["logprob", "entropy", "log_z"])
@pytest.mark.parametrize(("num_rows", "vocab"), [(17, 127), (60, 41)], ids=["slabs", "blocks"])
def test_each_output_may_be_the_only_one_used(which: str, num_rows: int, vocab: int):
    """The upstream gradients of the other two are None, not zeros."""
    operands, (index, target) = draw(num_rows, vocab, 17), draw_rows(num_rows, num_rows, vocab)
    ours, right, theirs = operands.leaves(), operands.leaves(dtype=torch.float64), operands.leaves()
    results = (
        ll.logprobs(ll.Logits(ours.hidden, ours.weight, bias=ours.bias), (index, target), entropy="grad", memory=9000),
        truth(right.logits(), index, target),
        plain(theirs.logits(), index, target),
    )
    for out in results:
        getattr(out, which).sum().backward()
    for a, b, c in zip(ours, right, theirs, strict=True):
        assert_gradient_close_to_truth(a.grad, b.grad, c.grad)


def test_no_graph_without_a_gradient_to_compute():
    leaf, target = draw(7, 63, 17).leaves(), torch.randint(63, (7,))
    with torch.no_grad():
        assert not ll.logprobs(ll.Logits(leaf.hidden, leaf.weight), target, entropy="grad").logprob.requires_grad
    out = ll.logprobs(ll.Logits(leaf.hidden.detach(), leaf.weight.detach()), target, entropy="grad")
    assert not any(x.requires_grad for x in out[:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("num_rows", "vocab"), [(33, 507), (80, 63)], ids=["slabs", "blocks"])
def test_same_as_logprobs_of_the_product(num_rows: int, vocab: int, dtype: torch.dtype):
    operands, target = draw(num_rows, vocab, 33, dtype), torch.randint(vocab, (num_rows,))
    upstream = [torch.randn(num_rows, dtype=torch.float64) for _ in range(3)]
    a, b = operands.leaves(), operands.leaves()
    options = {"entropy": "grad", "head": ll.Head(temperature=0.7, softcap=20.0)}
    mine = from_hidden(a.hidden, a.weight, target, bias=a.bias, memory=tiny(num_rows), **options)
    theirs = ll.logprobs(b.hidden @ b.weight.T + b.bias, target, **options)
    off = 1e-12 if dtype == torch.float64 else 2e-6
    for x, y in zip(mine[:3], theirs[:3], strict=True):
        torch.testing.assert_close(x, y, rtol=off, atol=off)
    gradients = differentiate(mine, a, upstream), differentiate(theirs, b, upstream)
    for name in gradients[0]:
        assert (gradients[0][name] - gradients[1][name]).norm() <= off * gradients[1][name].norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_rows", "vocab"), [(23, 127), (70, 41)], ids=["slabs", "blocks"])
@pytest.mark.parametrize("entropy", [None, "grad"])
def test_freezing_some_leaves_the_others_unchanged(entropy, num_rows: int, vocab: int, dtype: torch.dtype):
    operands, rows = draw(num_rows, vocab, 17, dtype), draw_rows(num_rows, num_rows, vocab)
    upstream = [torch.randn(num_rows, dtype=torch.float64) for _ in range(3)]
    names = operands._fields
    results = {}
    for wanted in (names, names[:2], names[1:], ("hidden", "bias"), *((name,) for name in names)):
        leaf = operands.leaves(wanted)
        out = ll.logprobs(ll.Logits(leaf.hidden, leaf.weight, bias=leaf.bias), rows, entropy=entropy, memory=40_000)
        results[wanted] = differentiate(out, leaf, upstream, entropy)
        assert set(results[wanted]) == set(wanted)
    for wanted, gradients in results.items():
        for name, mine in gradients.items():
            whole = results[names][name]
            # A frozen head may take a route of its own for hidden: other roundings, same gradient.
            if name == "hidden" and entropy is None:
                off = 2e-6 if dtype == torch.float32 else GRADIENT_PROMISE
                assert (mine - whole).float().norm() <= off * whole.float().norm(), wanted
            else:
                assert torch.equal(mine, whole), (wanted, name)


@pytest.mark.parametrize("memory", ["192MiB", 12_000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "vocab"), [(23, 127), (70, 41), (1, 2003)])
@pytest.mark.parametrize("entropy", [None, "value", "grad"])
def test_frozen_head(entropy, num_rows: int, vocab: int, dtype: torch.dtype, memory):
    operands, rows = draw(num_rows + 3, vocab, 33, dtype), draw_rows(num_rows + 3, num_rows, vocab)
    check(operands, *rows, wanted=("hidden",), entropy=entropy, memory=memory)
    check(operands._replace(bias=None), *rows, wanted=("hidden",), entropy=entropy, memory=memory)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("entropy", [None, "value"])
def test_frozen_head_with_options(entropy, backend: str, device: torch.device):
    head = {"vocab_size": 120, "softcap": 8.0, "scale": 1.3, "temperature": torch.linspace(0.5, 2, 23)}
    index, target = draw_rows(25, 23, 120)
    options = {"wanted": ("hidden",), "entropy": entropy, "backend": backend, "device": device, "memory": 4 * tiny(23)}
    check(draw(25, 127, 17), index, target, **head, **options)
    kept = [torch.randint(120, (i % 5,)).tolist() for i in range(23)]
    check(draw(25, 127, 17), index, target, kept=kept, **head, **options)


@pytest.mark.parametrize("which", ["logprob", "log_z"])
@pytest.mark.parametrize("entropy", [None, "value"])
def test_frozen_head_with_one_output_used(entropy, which: str):
    operands, (index, target) = draw(23, 127, 17), draw_rows(23, 23, 127)
    ours, right, theirs = (operands.leaves(("hidden",), dtype) for dtype in (None, torch.float64, None))
    results = (
        ll.logprobs(ll.Logits(ours.hidden, ours.weight, bias=ours.bias), (index, target), entropy=entropy, memory=9000),
        truth(right.logits(), index, target),
        plain(theirs.logits(), index, target),
    )
    upstream = torch.randn(23, dtype=torch.float64)
    for out in results:
        getattr(out, which).backward(upstream.to(out.logprob))
    assert_gradient_close_to_truth(ours.hidden.grad, right.hidden.grad, theirs.hidden.grad)


@pytest.mark.parametrize("wanted", [("hidden", "weight", "bias"), ("hidden",), ("weight",)], ids="-".join)
@pytest.mark.parametrize("entropy", [None, "value", "grad"])
@pytest.mark.parametrize(("num_rows", "vocab"), [(23, 127), (70, 41)], ids=["slabs", "blocks"])
def test_second_backward_has_the_same_bits(num_rows: int, vocab: int, entropy, wanted):
    """Nothing that was saved is written to; another upstream gradient in between changes nothing."""
    leaf, target = draw(num_rows, vocab, 17).leaves(wanted), torch.randint(vocab, (num_rows,))
    out = ll.logprobs(ll.Logits(leaf.hidden, leaf.weight, bias=leaf.bias), target, entropy=entropy, memory=9000)
    outputs = [x for x in out if x is not None and x.requires_grad]
    named = [x for x in leaf if x.requires_grad]
    first, other = ([torch.randn(num_rows) for _ in outputs] for _ in range(2))
    runs = [torch.autograd.grad(outputs, named, g, retain_graph=True) for g in (first, other, first)]
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[2], strict=True))
    assert not torch.equal(runs[0][0], runs[1][0])


@pytest.mark.parametrize("entropy", [None, "grad"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("num_rows", "vocab"), [(150, 507), (300, 63)], ids=["slabs", "blocks"])
@pytest.mark.parametrize("share", [0.3, 0.6, 1.1])
def test_kept_exponentials(monkeypatch, share: float, num_rows: int, vocab: int, dtype: torch.dtype, entropy):
    """None, some or all of the rows are not recomputed, in one tile or in many."""
    operands, rows = draw(num_rows + 3, vocab, 17, dtype), draw_rows(num_rows + 3, num_rows, vocab)
    for work in (512 << 20, 4 * tiny(num_rows)):
        monkeypatch.setattr("logitless.route.plan.WORK", work)
        memory = work + int(share * num_rows * (2 * vocab + 400))
        check(operands, *rows, entropy=entropy, memory=memory, temperature=torch.linspace(0.5, 2, num_rows))


# The interpreter's own arithmetic warns of the logarithm of 0 at the target, which is not used.
@pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")
@pytest.mark.parametrize("backend", BACKENDS)
def test_kept_exponentials_with_padding(backend: str, device: torch.device):
    operands = draw(70, 127, 17, torch.bfloat16)
    operands.weight[120:] = torch.nan
    exact = operands._replace(weight=operands.weight[:120], bias=operands.bias[:120])
    index, target = draw_rows(70, 70, 120)
    upstream = [torch.randn(70, dtype=torch.float64) for _ in range(3)]
    leaf, right = operands.leaves(device=device), exact.leaves(dtype=torch.float64)
    options = {"entropy": "grad", "head": ll.Head(vocab_size=120), "backend": backend, "memory": "1GiB"}
    rows = (index.to(device), target.to(device))
    ours = from_hidden(leaf.hidden, leaf.weight, rows, bias=leaf.bias, **options)
    mine = differentiate(ours, leaf, upstream)
    wanted = differentiate(truth(right.logits(), index, target), right, upstream)
    assert (mine["weight"][120:] == 0).all()
    assert (mine["bias"][120:] == 0).all()
    for name, g in wanted.items():
        off = (mine[name][: len(g)].double().cpu() - g).norm() / g.norm()
        assert off <= GRADIENT_PROMISE, name


@pytest.mark.parametrize("memory", ["192MiB", "1MiB"])
@pytest.mark.parametrize("wanted", [("hidden", "weight", "bias"), ("hidden",)], ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batch_invariant(dtype: torch.dtype, wanted, memory):
    """A token's results have the same bits alone, in another place, and among others; and they are right."""
    operands, target = draw(90, 127, 33, dtype), torch.randint(127, (90,))
    check(operands, torch.arange(90), target, wanted=wanted, bits="canonical", memory=memory)
    leaf = operands.leaves(wanted)
    options = {"bias": leaf.bias, "entropy": "value", "bits": "canonical", "memory": memory}
    everything = from_hidden(leaf.hidden, leaf.weight, target, **options)
    for index in ([7], [80, 3, 7], list(range(50))):
        some = from_hidden(leaf.hidden, leaf.weight, (torch.tensor(index), target[index]), **options)
        assert all(torch.equal(a, b[index]) for a, b in zip(some[:3], everything[:3], strict=True))
