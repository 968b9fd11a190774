"""Log-probs from hidden states: buffers, precision, other machinery of torch, and errors."""

from __future__ import annotations

import pytest
import torch
from calls import from_hidden
from close import assert_close_to_truth, assert_gradient_close_to_truth
from shared.errors import raises
from shared.linear import (
    BACKENDS,
    GRADIENT_PROMISE,
    Operands,
    check,
    differentiate,
    draw,
    draw_rows,
    ragged,
    refusing,
    tiny,
    whole_operands,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from truth import plain, truth

import logitless as ll

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory", ["192MiB", 12_000])
@pytest.mark.parametrize(("num_rows", "vocab"), [(23, 127), (70, 41)], ids=["slabs", "blocks"])
def test_weight_gradient_into_a_buffer(num_rows: int, vocab: int, memory, dtype: torch.dtype):
    operands, rows = draw(num_rows, vocab, 17, dtype), draw_rows(num_rows, num_rows, vocab)
    upstream = [torch.randn(num_rows) for _ in range(3)]
    buffer, before = torch.randn(vocab, 17), None
    for buffer_or_none in (None, buffer, buffer):
        leaf = operands.leaves()
        options = {"bias": leaf.bias, "entropy": "grad", "weight_grad": buffer_or_none, "memory": memory}
        old = buffer.clone()
        torch.autograd.backward(from_hidden(leaf.hidden, leaf.weight, rows, **options)[:3], upstream)
        if buffer_or_none is None:
            before = leaf
            continue
        assert leaf.weight.grad is None
        assert torch.equal(leaf.hidden.grad, before.hidden.grad)
        assert torch.equal(leaf.bias.grad, before.bias.grad)
        added, returned = buffer - old, before.weight.grad.float()
        # Rounded once when returned, not at all in the buffer.
        assert (added - returned).norm() <= (2e-6 if dtype == torch.float32 else 2.0**-8) * returned.norm()
    exact = operands.leaves(dtype=torch.float64)
    torch.autograd.backward(truth(exact.logits(), *rows), [g.double() for g in upstream])
    off = (added.double() - exact.weight.grad).norm() / exact.weight.grad.norm()
    assert off <= (2e-6 if dtype == torch.float32 else GRADIENT_PROMISE)


def test_one_buffer_for_several_calls_of_one_backward():
    """Micro-batches in flight together, as in a pipeline: each adds its part, in any order."""
    first, second = draw(9, 63, 17), draw(70, 63, 17)
    weight, buffer = first.weight.clone().requires_grad_(), torch.zeros(63, 17)
    target = [torch.randint(63, (n,)) for n in (9, 70)]
    hidden = [x.hidden.clone().requires_grad_() for x in (first, second)]
    losses = [
        ll.logprobs(ll.Logits(h, weight, weight_grad=buffer), t).logprob.sum()
        for h, t in zip(hidden, target, strict=True)
    ]
    buffer.zero_()
    sum(losses).backward()
    usual = weight.detach().clone().requires_grad_()
    sum(ll.logprobs(ll.Logits(h, usual), t).logprob.sum() for h, t in zip(hidden, target, strict=True)).backward()
    assert weight.grad is None
    torch.testing.assert_close(buffer, usual.grad, rtol=1e-5, atol=1e-5)


def test_second_backward_adds_to_the_buffer_again():
    operands, buffer = draw(9, 63, 17).leaves(), torch.zeros(63, 17)
    out = ll.logprobs(ll.Logits(operands.hidden, operands.weight, weight_grad=buffer), torch.randint(63, (9,)))
    out.logprob.sum().backward(retain_graph=True)
    once = buffer.clone()
    out.logprob.sum().backward()
    assert torch.equal(buffer, 2 * once)


@pytest.mark.parametrize(("num_rows", "vocab"), [(23, 127), (70, 41)], ids=["slabs", "blocks"])
def test_a_frozen_weight_leaves_the_buffer_alone(num_rows: int, vocab: int):
    leaf, buffer = draw(num_rows, vocab, 17).leaves(("hidden", "bias")), torch.zeros(vocab, 17)
    target = torch.randint(vocab, (num_rows,))
    out = ll.logprobs(ll.Logits(leaf.hidden, leaf.weight, bias=leaf.bias, weight_grad=buffer), target, entropy="grad")
    (out.logprob.sum() + out.entropy.sum()).backward()
    assert (buffer == 0).all()


def test_no_rows_add_nothing_to_the_buffer():
    leaf, buffer, empty = draw(9, 63, 17).leaves(), torch.ones(63, 17), torch.zeros(0, dtype=torch.int64)
    ll.logprobs(ll.Logits(leaf.hidden, leaf.weight, weight_grad=buffer), (empty, empty)).logprob.sum().backward()
    assert (buffer == 1).all()
    assert leaf.weight.grad is None


@pytest.mark.parametrize("with_bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_rows", "vocab"), [(23, 127), (70, 41)], ids=["slabs", "blocks"])
@pytest.mark.parametrize("match", ["bfloat16", "float16"])
def test_match_rounds_the_logits_once(match: str, num_rows: int, vocab: int, dtype: torch.dtype, with_bias: bool):
    operands = whole_operands(num_rows, vocab, dtype, with_bias)
    index, target = draw_rows(num_rows, num_rows, vocab)
    ours, right, theirs = operands.leaves(), operands.leaves(dtype=torch.float64), operands.leaves()
    exact = operands.logits().double()
    assert torch.equal(exact, right.logits()), "the case is not exact in float32"
    rounding = (exact.to(getattr(torch, match)).double() - exact).detach()
    assert (rounding != 0).any()
    head = {"temperature": 1.7}
    options = {"entropy": "grad", "head": ll.Head(**head), "match": match, "memory": 4 * tiny(num_rows)}
    results = (
        from_hidden(ours.hidden, ours.weight, (index, target), bias=ours.bias, **options),
        # The gradient passes through the rounding.
        truth(right.logits() + rounding, index, target, **head),
        plain(theirs.logits() + rounding.float(), index, target, **head),
    )
    for a, b, c in zip(*(x[:3] for x in results), strict=True):
        assert_close_to_truth(a, b, c)
    upstream = [torch.randn(num_rows, dtype=torch.float64) for _ in range(3)]
    gradients = [differentiate(x, y, upstream) for x, y in zip(results, (ours, right, theirs), strict=True)]
    for name in gradients[0]:
        assert_gradient_close_to_truth(*(g[name] for g in gradients), name)


def test_match_with_a_frozen_head():
    operands = whole_operands(23, 127, torch.bfloat16)
    index, target = draw_rows(23, 23, 127)
    ours, right, theirs = (operands.leaves(("hidden",), dtype) for dtype in (None, torch.float64, None))
    rounded = right.logits() + (operands.logits().bfloat16().double() - operands.logits().double())
    results = (
        ll.logprobs(ll.Logits(ours.hidden, ours.weight, match="bfloat16"), (index, target)),
        truth(rounded, index, target),
        plain(theirs.logits() + (rounded.detach() - theirs.logits().detach()).float(), index, target),
    )
    upstream = [torch.randn(23, dtype=torch.float64) for _ in range(3)]
    mine, exact, usual = (
        differentiate(x, y, upstream, None)["hidden"] for x, y in zip(results, (ours, right, theirs), strict=True)
    )
    assert_close_to_truth(results[0].logprob, results[1].logprob, results[2].logprob)
    assert_gradient_close_to_truth(mine, exact, usual)


@pytest.mark.parametrize("place_of_backward", ["inside", "outside"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_is_a_cast_of_the_operands(dtype: torch.dtype, place_of_backward: str):
    """Whatever the operands' dtype, inside autocast they are bfloat16 and the products stay in float32."""
    operands, target = draw(21, 127, 17, dtype), torch.randint(127, (21,))
    inside, outside = operands.leaves(), operands.leaves()
    options = {"entropy": "grad", "memory": 20_000}
    upstream = [torch.randn(21, dtype=torch.float64) for _ in range(3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine = from_hidden(inside.hidden, inside.weight, target, bias=inside.bias, **options)
        gradients = differentiate(mine, inside, upstream) if place_of_backward == "inside" else None
    gradients = gradients or differentiate(mine, inside, upstream)
    cast = [x.bfloat16() for x in outside]
    plainly = from_hidden(cast[0], cast[1], target, bias=cast[2], **options)
    assert all(x.dtype == torch.float32 for x in mine[:3])
    assert all(torch.equal(a, b) for a, b in zip(mine[:3], plainly[:3], strict=True))
    for name, right in differentiate(plainly, outside, upstream).items():
        assert gradients[name].dtype == dtype
        assert torch.equal(gradients[name], right), name


def test_autocast_that_is_off_changes_nothing():
    operands, target = draw(9, 63, 17), torch.randint(63, (9,))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        inside = ll.logprobs(ll.Logits(operands.hidden, operands.weight), target, entropy="value")
    outside = ll.logprobs(ll.Logits(operands.hidden, operands.weight), target, entropy="value")
    assert all(torch.equal(a, b) for a, b in zip(inside[:3], outside[:3], strict=True))


def test_tf32_changes_nothing_on_a_cpu():
    operands, target = draw(9, 63, 17), torch.randint(63, (9,))
    a, b = (ll.logprobs(ll.Logits(operands.hidden, operands.weight, tf32=on), target).logprob for on in (False, True))
    assert torch.equal(a, b)


def test_a_float32_bias_beside_bfloat16_operands():
    operands, (index, target) = draw(21, 127, 17, torch.bfloat16), draw_rows(21, 21, 127)
    operands = operands._replace(bias=torch.randn(127))
    ours, right, theirs = operands.leaves(), operands.leaves(dtype=torch.float64), operands.leaves()
    results = (
        ll.logprobs(ll.Logits(ours.hidden, ours.weight, bias=ours.bias), (index, target), memory=tiny(21)),
        truth(right.logits(), index, target),
        plain(theirs.logits(), index, target),
    )
    assert_close_to_truth(*(x.logprob for x in results))
    for out in results:
        out.logprob.sum().backward()
    assert ours.bias.grad.dtype == torch.float32
    assert (ours.bias.grad - right.bias.grad).norm() <= GRADIENT_PROMISE * right.bias.grad.norm()


@pytest.mark.parametrize("wanted", [("hidden", "weight", "bias"), ("hidden",)], ids="-".join)
@pytest.mark.parametrize(("num_rows", "vocab"), [(3, 6), (5, 3)], ids=["slabs", "blocks"])
def test_gradcheck_in_float64(num_rows: int, vocab: int, wanted):
    target = torch.randint(vocab - 1, (num_rows,))
    target[1] = -100
    head = ll.Head(temperature=torch.linspace(0.7, 2, num_rows).double(), softcap=4.0, vocab_size=vocab - 1)
    kept = ragged([[0, 1], [], [0, 0], [vocab - 2], []][:num_rows])
    leaf = draw(num_rows, vocab, 2, torch.float64).leaves(wanted)
    for entropy in ("grad", None):
        for chosen in (None, kept):

            def outputs(hidden, weight, bias, entropy=entropy, chosen=chosen):
                options = {"head": head, "kept": chosen, "memory": 80 * num_rows}
                out = from_hidden(hidden, weight, target, bias=bias, entropy=entropy, **options)
                return tuple(x for x in out if x is not None)

            assert torch.autograd.gradcheck(outputs, tuple(leaf))


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_bits_on_every_run(backend: str, device: torch.device):
    leaf, target = draw(30, 127, 33, torch.bfloat16).leaves(device=device), torch.randint(127, (30,), device=device)
    options = {"bias": leaf.bias, "entropy": "grad", "backend": backend, "memory": 4 * tiny(30)}
    runs = []
    for _ in range(3):
        out = from_hidden(leaf.hidden, leaf.weight, target, **options)
        runs.append((*out[:3], *torch.autograd.grad(out.logprob.sum() + out.entropy.sum(), leaf)))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def loss_of(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor, entropy: str | None = "grad") -> Tensor:
    out = ll.logprobs(ll.Logits(hidden.tanh(), weight, bias=bias), target, entropy=entropy, memory=4000)
    return (2 * out.logprob + (out.log_z if entropy is None else out.entropy)).sum()


def loss_and_gradients(function, leaf: Operands, *args) -> tuple[Tensor, ...]:
    loss = function(*leaf, *args)
    return loss.detach(), *torch.autograd.grad(loss, [x for x in leaf if x.requires_grad])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The .grad attribute")
@pytest.mark.parametrize("wanted", [("hidden", "weight", "bias"), ("hidden",)], ids="-".join)
def test_compiled_around(wanted):
    torch._dynamo.reset()
    leaf, target = draw(9, 63, 17).leaves(wanted), torch.randint(63, (9,))
    compiled = torch.compile(loss_of, backend="aot_eager")
    for entropy in (None, "grad"):
        runs = (loss_and_gradients(function, leaf, target, entropy) for function in (compiled, loss_of))
        for mine, eager in zip(*runs, strict=True):
            torch.testing.assert_close(mine, eager, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("wanted", [("hidden", "weight", "bias"), ("hidden",)], ids="-".join)
@pytest.mark.parametrize("entropy", [None, "grad"])
def test_checkpointed(wanted, entropy):
    leaf, target = draw(9, 63, 17).leaves(wanted), torch.randint(63, (9,))

    def wrapped(*args) -> Tensor:
        return checkpoint(loss_of, *args, use_reentrant=False)

    for mine, eager in zip(
        loss_and_gradients(wrapped, leaf, target, entropy),
        loss_and_gradients(loss_of, leaf, target, entropy),
        strict=True,
    ):
        assert torch.equal(mine, eager)


@pytest.mark.parametrize("wanted", [("hidden", "weight", "bias"), ("hidden",)], ids="-".join)
def test_second_derivative(wanted):
    leaf = draw(9, 63, 17).leaves(wanted)
    out = ll.logprobs(ll.Logits(leaf.hidden, leaf.weight, bias=leaf.bias), torch.randint(63, (9,)))
    with raises("logprobs: backward with create_graph=True asks for a second derivative"):
        torch.autograd.grad(out.logprob.sum(), leaf.hidden, create_graph=True)


@pytest.mark.parametrize("wanted", [("hidden", "weight", "bias"), ("hidden",), ("weight",)], ids="-".join)
def test_out_of_memory_is_raised_and_says_what_to_do(wanted):
    """Nothing is caught and retried: other tiles would be other bits. The next call is as if nothing had happened."""
    operands, (index, target) = draw(8, 1000, 3), draw_rows(8, 8, 1000)
    leaf = operands.leaves(wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", refusing(torch.empty, 3000, "logitless.sources.linear"))
        with pytest.raises(torch.OutOfMemoryError) as raised:
            ll.logprobs(ll.Logits(leaf.hidden, leaf.weight, bias=leaf.bias), (index, target), memory="192MiB")
    (note,) = raised.value.__notes__
    assert note == (
        "logprobs: no room for working memory of [8, 1000] torch.float32. Pass a smaller memory= (it was "
        "201326592 bytes), or ask logitless.estimate what fits."
    )
    check(operands, index, target, wanted=wanted, memory="192MiB")


def test_out_of_memory_in_backward():
    operands, (index, target) = draw(8, 1000, 3), draw_rows(8, 8, 1000)
    leaf = operands.leaves(("hidden", "weight"))
    out = ll.logprobs(ll.Logits(leaf.hidden, leaf.weight), (index, target), memory="192MiB")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", refusing(torch.empty, 3000, "logitless.sources.linear"))
        with pytest.raises(torch.OutOfMemoryError, match="more than 3000"):
            out.logprob.sum().backward(retain_graph=True)
    assert leaf.hidden.grad is None
    assert leaf.weight.grad is None
    out.logprob.sum().backward()
    assert leaf.weight.grad is not None


def call(hidden=None, weight=None, rows=None, **options):
    """A good call, but for what is given."""
    hidden = torch.randn(5, 8) if hidden is None else hidden
    weight = torch.randn(7, 8) if weight is None else weight
    return from_hidden(hidden, weight, torch.arange(5) if rows is None else rows, **options)


def test_the_good_call_is_good():
    assert call().logprob.shape == (5,)


@pytest.mark.parametrize(
    ("hidden", "came"),
    [
        (torch.zeros(5, 8, dtype=torch.int64), "[5, 8] torch.int64"),
        (torch.zeros(()), "[] torch.float32"),
    ],
)
def test_hidden_that_is_no_float_tensor(hidden, came):
    with raises(f"logprobs: hidden must be [..., D] of ... but is a tensor {came}."):
        call(hidden)


def test_hidden_that_is_no_tensor():
    with raises("Logits: hidden must be a tensor but is list. Pass torch.tensor(hidden)."):
        call([1])


def test_transposed_head():
    wanted = "logprobs: weight must be [V, 8] to go with hidden of size 8 but is "
    with raises(f"{wanted}[8, 7]. Did you pass the transposed head?"):
        call(weight=torch.randn(8, 7))
    with raises(f"{wanted}[8]. Sharded parameters look like this outside of their module's forward"):
        call(weight=torch.randn(8))
    for shape in ((7, 9), (7, 8, 1)):
        with pytest.raises(ll.LogitlessError) as error:
            call(weight=torch.randn(shape))
        assert str(error.value) == f"{wanted}{list(shape)}."


def test_weight_of_another_dtype():
    text = "weight is torch.float32 but hidden is torch.float64. Cast one of them, or call under autocast."
    with raises(f"logprobs: {text}"):
        call(torch.randn(5, 8).double())


@pytest.mark.parametrize("bias", [torch.zeros(8), torch.zeros(7, 1), torch.zeros(7, dtype=torch.int64)])
def test_bias(bias):
    with raises(f"logprobs: bias must be [7] floats but is {list(bias.shape)} {bias.dtype}."):
        call(bias=bias)


@pytest.mark.parametrize("buffer", [torch.zeros(7, 9), torch.zeros(8, 7), torch.zeros(7, 8).bfloat16()])
def test_weight_grad(buffer):
    with raises(f"logprobs: weight_grad must be float32 [7, 8] but is {buffer.dtype} {list(buffer.shape)}."):
        call(weight_grad=buffer)


def test_rows_of_another_token_count():
    with raises("logprobs: rows were made for 4 tokens but hidden holds 5."):
        call(rows=torch.arange(4))
    with raises("logprobs: rows were made for at least 7 tokens but hidden holds 5."):
        call(rows=(torch.tensor([0, 6]), torch.tensor([1, 1])))
    with raises("logprobs: rows must be a Rows, a tensor of targets or a pair (index, target) but is str."):
        call(rows="all")


@pytest.mark.parametrize("what", ["weight", "bias", "weight_grad", "rows", "target"])
def test_another_device(what: str):
    moved = {
        "weight": {"weight": torch.zeros(7, 8, device="meta")},
        "bias": {"bias": torch.zeros(7, device="meta")},
        "weight_grad": {"weight_grad": torch.zeros(7, 8, device="meta")},
        "rows": {"hidden": torch.zeros(5, 8, device="meta"), "weight": torch.zeros(7, 8, device="meta")},
        "target": {"rows": torch.zeros(5, dtype=torch.int64, device="meta")},
    }[what]
    here, there = ("meta", "cpu") if what == "rows" else ("cpu", "meta")
    named = "rows" if what == "target" else what
    with raises(f"logprobs: {named} is on {there} but hidden is on {here}."):
        call(**moved)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"entropy": "both"}, 'logprobs: entropy must be None, "value" or "grad" but is \'both\'.'),
        ({"match": "float32"}, 'logprobs: match must be None, "bfloat16" or "float16" but is \'float32\'.'),
        ({"hidden_grad": "sum"}, 'logprobs: hidden_grad must be "reduced" or "partial" but is \'sum\'.'),
        ({"sequence_parallel": True}, "logprobs: sequence_parallel=True needs a shard with a group to gather"),
        ({"backend": "cuda"}, "backend: wanted one of ['auto', 'reference', 'tiled', 'triton'] but got 'cuda'."),
        ({"memory": 0}, 'memory: wanted a positive number of bytes or a size such as "512MiB" but got 0.'),
        ({"memory": 4}, "memory: ... bytes of working space do not hold one column of 5 rows, which takes "),
        ({"head": ll.Head(vocab_size=8)}, "logprobs: head.vocab_size is 8 but the logits have only 7 columns"),
        ({"head": ll.Head(temperature=torch.ones(4))}, "Head: temperature has shape [4] but there are 5 rows."),
        (
            {"shard": ll.VocabShard(0, 6)},
            "logprobs: shard holds columns 0 to 6 (6 of them) but weight has 7 rows",
        ),
        ({"rows": torch.full((5,), 7)}, "logprobs: target 7 of row 0 (sample 0, position 0) is outside the"),
        ({"kept": ragged([[1]] * 4)}, "logprobs: kept has 4 rows but rows has 5."),
        ({"kept": ragged([[9]] * 5)}, "logprobs: kept ids run from 9 to 9, outside the vocabulary of 7."),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,
)
def test_bad_options(options, text):
    with raises(text):
        call(**options)


def test_sequence_parallel_with_a_shard_that_has_no_group():
    with raises("logprobs: sequence_parallel=True needs a shard with a group to gather over."):
        call(sequence_parallel=True, shard=ll.VocabShard(0, 7))


def test_hidden_states_without_numbers():
    with raises("logprobs: hidden and weight have hidden size 0, so that there is nothing to multiply."):
        ll.logprobs(ll.Logits(torch.zeros(2, 0), torch.zeros(5, 0)), torch.tensor([1, 2]))
