"""verl with and without ours: the fused heads, the functions on logits, and those on a sharded vocabulary."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from hosts import checkout, load
from parity import assert_parity, run
from programs import run_program

import logitless
from benchmarks.bench.adapters import ENTRIES, SMOKE, measure
from logitless import LogitlessError

V, D = 507, 24
FUNCTIONAL, FUSED = "verl.utils.torch_functional", "verl.utils.experimental.torch_functional"
KERNEL, PARALLEL = "verl.utils.kernel.linear_cross_entropy", "verl.utils.megatron.tensor_parallel"
DISTILLATION = "verl.trainer.distillation.losses"
FLOATS = [torch.float32, torch.bfloat16, torch.float64]


@pytest.fixture(scope="module", autouse=True)
def verl():
    return load("verl", "verl", FUNCTIONAL, FUSED, KERNEL, PARALLEL, DISTILLATION)


def functional():
    return sys.modules[FUNCTIONAL]


def logits_of(*lead, dtype=torch.float32, size=3.0):
    return (torch.randn(*lead, V, dtype=torch.float64) * size).to(dtype)


def true_entropy(z):
    logp = z.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


# Functions on logits.


@pytest.mark.parametrize("lead", [(61,), (3, 17), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_logprobs_from_logits(dtype, lead):
    labels = torch.randint(V, lead)
    assert_parity(
        "verl",
        lambda z: functional().logprobs_from_logits(z, labels, inplace_backward=False),
        lambda z: z.log_softmax(-1).gather(-1, labels[..., None])[..., 0],
        [logits_of(*lead, dtype=dtype)],
        dtypes=[torch.float64 if dtype == torch.float64 else torch.float32],
    )


@pytest.mark.parametrize("inplace", [False, True])
def test_labels_of_another_shape_with_as_many_ids(inplace):
    """verl flattens both: a packed batch has logits [N, V] and labels [1, N]."""
    leaf, labels, upstream = logits_of(17).requires_grad_(), torch.randint(V, (1, 17)), torch.randn(17)
    exact = leaf.detach().double().requires_grad_()
    wanted = exact.log_softmax(-1).gather(-1, labels.view(17, 1))[:, 0]
    plain = leaf.log_softmax(-1).gather(-1, labels.view(17, 1))[:, 0]
    logitless.install("verl")
    ours = functional().logprobs_from_logits(leaf * 1.0, labels, inplace_backward=inplace)
    assert_close_to_truth(ours, wanted, plain)
    gradients = [
        torch.autograd.grad(x, y, upstream.to(x))[0] for x, y in ((ours, leaf), (wanted, exact), (plain, leaf))
    ]
    assert_gradient_close_to_truth(*gradients)
    with pytest.raises(LogitlessError, match=r"labels must be \[17\] but is \[1, 16\]"):
        functional().logprobs_from_logits(leaf * 1.0, labels[:, 1:])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_entropy_from_logits(dtype):
    assert_parity("verl", lambda z: functional().entropy_from_logits(z), true_entropy, [logits_of(3, 17, dtype=dtype)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunked_entropy_is_float32(dtype):
    chunked = lambda z: functional().entropy_from_logits_with_chunking(z, chunk_size=16)  # noqa: E731
    assert_parity("verl", chunked, true_entropy, [logits_of(61, dtype=dtype)])


@pytest.mark.parametrize("size", [1.0, 40.0])
def test_sum_of_squared_probabilities(size):
    """Large logits too, where a difference of two log Z would lose digits."""
    assert_parity(
        "verl",
        lambda z: functional().calculate_sum_pi_squared_from_logits(z),
        lambda z: z.softmax(-1).square().sum(-1),
        [logits_of(3, 17, size=size)],
    )


def test_sum_of_squared_probabilities_is_sharper_than_two_log_z():
    logits = logits_of(200, size=0.5) + 300.0
    logits[:, 0] -= 600.0  # a token that is no measure of the others
    wanted = logits.double().softmax(-1).square().sum(-1)
    theirs = functional().calculate_sum_pi_squared_from_logits(logits)
    logitless.install("verl")
    ours = functional().calculate_sum_pi_squared_from_logits(logits)
    assert ((theirs - wanted) / wanted).abs().max() > 1e-5
    assert ((ours - wanted) / wanted).abs().max() < 2e-6


def test_a_label_of_minus_100_is_left_out():
    logits, labels = logits_of(5).requires_grad_(), torch.tensor([3, -100, 5, 0, -100])
    logitless.install("verl")
    out = functional().logprobs_from_logits(logits, labels)
    out.sum().backward()
    assert out[[1, 4]].tolist() == [0, 0]
    assert logits.grad[[1, 4]].abs().max() == 0
    assert logits.grad[0].abs().max() > 0


@pytest.mark.parametrize("view", [False, True], ids=["own", "view"])
def test_inplace_backward_writes_over_the_logits(view):
    labels, upstream = torch.randint(V, (1, 9)), torch.randn(1, 9)
    weight = torch.randn(V, D, requires_grad=True)
    hidden = torch.randn(1, 9, D)

    def gradient(inplace):
        logits = hidden @ weight.T
        before = logits.detach().clone()
        pair = (logits.squeeze(0), labels.squeeze(0)) if view else (logits, labels)
        out = functional().logprobs_from_logits(*pair, inplace_backward=inplace)
        assert out.shape == pair[1].shape
        (d_weight,) = torch.autograd.grad(out, weight, upstream.view_as(out))
        return d_weight, torch.equal(logits.detach(), before)

    theirs, _ = gradient(True)
    logitless.install("verl")
    ours, kept = gradient(True)
    apart, kept_apart = gradient(False)
    assert not kept
    assert kept_apart
    assert torch.equal(ours, apart)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    logitless.uninstall("verl")
    logitless.install("verl", inplace_backward=False)
    same, kept = gradient(True)
    assert kept
    assert torch.equal(same, ours)


@pytest.mark.parametrize("kind", ["leaf", "part", "strided"])
def test_logits_that_belong_to_others_are_not_overwritten(kind):
    leaf = logits_of(2, 6).requires_grad_()
    labels = torch.randint(V, (2, 6))
    held = leaf if kind == "leaf" else leaf * 1.0
    logits, labels = (held[:, 1:], labels[:, 1:]) if kind == "part" else (held, labels)
    if kind == "strided":
        logits, labels = held.transpose(0, 1), labels.T
    logitless.install("verl")
    before = held.detach().clone()
    functional().logprobs_from_logits(logits, labels, inplace_backward=True).sum().backward()
    assert torch.equal(held.detach(), before)
    assert leaf.grad.abs().sum() > 0


def test_entropy_without_its_gradient():
    logits = logits_of(5).requires_grad_()
    assert functional().entropy_from_logits(logits).requires_grad
    logitless.install("verl", entropy_grad=False)
    assert not functional().entropy_from_logits(logits).requires_grad
    assert not functional().entropy_from_logits_with_chunking(logits).requires_grad


def test_nothing_in_nothing_out():
    logitless.install("verl")
    empty = torch.zeros(0, V, requires_grad=True)
    labels = torch.zeros(0, dtype=torch.int64)
    out = functional().logprobs_from_logits(empty, labels)
    assert out.shape == functional().entropy_from_logits(empty).shape == (0,)
    out.sum().backward()
    assert empty.grad.shape == (0, V)
    with torch.no_grad():
        assert not functional().logprobs_from_logits(empty, labels).requires_grad


def test_wrong_operands_are_named():
    logitless.install("verl")
    cases = {
        r"logprobs_from_logits: labels must be \[5\] but is \[4\]": (logits_of(5), torch.zeros(4, dtype=torch.int64)),
        r"logprobs_from_logits: labels must be integers": (logits_of(5), torch.zeros(5)),
        r"target 507 of row 2": (logits_of(3), torch.tensor([0, 1, V])),
        r"target -1 of row 0": (logits_of(1), torch.tensor([-1])),
    }
    for text, operands in cases.items():
        with pytest.raises(LogitlessError, match=text):
            functional().logprobs_from_logits(*operands)


# The fused heads.


def fused(hidden, weight, ids, temperature=1.0):
    return sys.modules[FUSED].FusedLinearForPPO()(hidden, weight, ids, temperature)


def head_truth(ids, temperature=1.0, scale=1.0, softcap=None, bias=None):
    def scores(hidden, weight):
        z = hidden @ weight.T
        z = (z if bias is None else z + bias.to(z)) * scale
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        logp = (z / temperature).log_softmax(-1)
        return logp.gather(-1, ids[..., None])[..., 0], -(logp.exp() * logp).sum(-1)

    return scores


def operands_of(*lead, dtype=torch.float32):
    return [(torch.randn(*lead, D) * 1.5).to(dtype), torch.randn(V, D).to(dtype)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("lead", [(61,), (3, 17)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_linear(dtype, lead, temperature):
    ids = torch.randint(V, lead, dtype=torch.int32)
    function = lambda hidden, weight: fused(hidden, weight, ids, temperature)  # noqa: E731
    truth = head_truth(ids.long(), temperature)
    assert_parity("verl", function, truth, operands_of(*lead, dtype=dtype), memory="64KiB")


def test_fused_linear_with_the_rest_of_the_head():
    """What verl's own fused heads leave out."""
    ids, bias = torch.randint(V, (61,)), torch.randn(V)
    rest = {"scale": 0.25, "softcap": 3.0}
    truth = head_truth(ids, 0.7, bias=bias, **rest)
    function = lambda hidden, weight: fused(hidden, weight, ids, torch.tensor(0.7))  # noqa: E731
    plain = lambda hidden, weight: tuple(x.to(hidden) for x in truth(hidden, weight))  # noqa: E731
    assert_parity("verl", function, truth, operands_of(61), oracle=plain, bias=lambda: bias, **rest)


def test_fused_linear_says_what_is_wrong():
    hidden, weight = operands_of(5)
    logitless.install("verl")
    with pytest.raises(LogitlessError, match=r"FusedLinearForPPO.forward: input_ids must be \[5\] but is \[4\]"):
        fused(hidden, weight, torch.zeros(4, dtype=torch.int64))
    with pytest.raises(LogitlessError, match=r"hidden_states must be \[T, D\] or \[B, S, D\] but is \[24\]"):
        fused(hidden[0], weight, torch.tensor(0))
    with pytest.raises(LogitlessError, match=r"temperature must be a positive finite number but is 0\.0"):
        fused(hidden, weight, torch.zeros(5, dtype=torch.int64), 0.0)


def cross_entropy(*args):
    return sys.modules[KERNEL].linear_cross_entropy(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_cross_entropy(dtype):
    """verl's kernel wants a GPU: plain torch stands for it."""
    ids = torch.randint(V, (3, 17))
    truth = lambda *x: tuple(y.reshape(-1) for y in head_truth(ids, 0.7)(*x))  # noqa: E731
    plain = lambda hidden, weight: truth(hidden.float(), weight.float())  # noqa: E731
    function = lambda hidden, weight: cross_entropy(hidden, weight, ids, 0.7, "none")  # noqa: E731
    assert_parity("verl", function, truth, operands_of(3, 17, dtype=dtype), oracle=plain)


def test_a_reduction_is_left_to_verl():
    arguments = (*operands_of(5), torch.zeros(5, dtype=torch.int64), 1.0, "sum")
    # verl's kernel refuses tensors of a CPU; a torch without CUDA refuses NVTX before that.
    with pytest.raises((AssertionError, RuntimeError)) as own:
        cross_entropy(*arguments)
    logitless.install("verl")
    with pytest.raises(own.type) as passed_on:
        cross_entropy(*arguments)
    assert str(passed_on.value) == str(own.value)
    entry = next(x for x in logitless.status().hosts[0].replaced if x.name.endswith(".linear_cross_entropy"))
    assert (entry.calls, entry.passed_on) == (1, 1)


# Installing.


def test_everything_is_replaced_and_put_back():
    (holder,) = load("verl", "verl.trainer.ppo.prefix_grouper_utils")
    before = functional().logprobs_from_logits, sys.modules[KERNEL].linear_cross_entropy
    report = logitless.install("verl")
    assert checkout("verl") or report.version == "0.9.1"
    assert len(report.replaced) + len(report.missing) == 12
    # verl's engine for Megatron imports what it does not bring along.
    assert checkout("verl") or all("No module named 'tensordict'" in text for text in report.missing)
    assert holder.logprobs_from_logits is functional().logprobs_from_logits is not before[0]
    logitless.uninstall("verl")
    assert (functional().logprobs_from_logits, sys.modules[KERNEL].linear_cross_entropy) == before
    assert holder.logprobs_from_logits is before[0]


def test_options_are_checked():
    for text, options in {
        'hidden_grad must be "partial" or "reduced"': {"hidden_grad": "none"},
        "bias must be a function": {"bias": torch.zeros(3)},
        "softcap must be a positive finite number": {"softcap": -1.0},
        "scale must be a finite number other than 0": {"scale": 0.0},
    }.items():
        with pytest.raises(LogitlessError, match=text):
            logitless.install("verl", **options)
    assert not logitless.status().hosts


def test_verl_itself_can_install_us(tmp_path):
    """``VERL_USE_EXTERNAL_MODULES`` names a module that verl imports wherever it is imported: in every worker."""
    (tmp_path / "with_logitless.py").write_text("import logitless\nlogitless.install('verl', rows_before_head=True)\n")
    program = "from hosts import load; load('verl', 'verl'); import logitless; print(len(logitless.status().hosts))"
    (tmp_path / "worker.py").write_text(program)
    given = {"VERL_USE_EXTERNAL_MODULES": "with_logitless"}
    ended = run_program(tmp_path / "worker.py", folder=tmp_path, environment=given)
    assert ended.out.strip() == "1", ended.err


# Over a tensor-parallel group.


def parallel_scores(rank, world, logits, hidden, weight, labels, upstream):
    """What every function gives on this rank's shard, before and after install, with gradients."""
    import torch.distributed as dist

    module, kernel, parallel_state = load("verl", PARALLEL, KERNEL, "megatron.core.parallel_state")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    width = V // world
    own = slice(rank * width, (rank + 1) * width)
    part = logits[..., own]
    # With a second chunk verl's backward stops at logits that the first one changed in place.
    chunk = 64
    calls = {
        "vocab_parallel_log_probs_from_logits": lambda z: module.vocab_parallel_log_probs_from_logits(z * 1.0, labels),
        "vocab_parallel_entropy": lambda z: module.vocab_parallel_entropy(z),
        "vocab_parallel_entropy_with_chunking": lambda z: module.vocab_parallel_entropy_with_chunking(z, chunk),
        "vocab_parallel_sum_pi_squared": lambda z: module.vocab_parallel_sum_pi_squared(z),
    }
    # An older checkout may lack some; what is installed has them all.
    calls = {name: call for name, call in calls.items() if hasattr(module, name) or checkout("verl") is None}
    group = dist.group.WORLD
    fused_call = lambda h, w: kernel.linear_cross_entropy(h, w, labels, 0.7, "none", group)  # noqa: E731
    try:
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            # verl's sum of squares warns that its all-reduce has no gradient: plain torch is the yardstick there.
            warnings.simplefilter("ignore")
            theirs = {name: run(call, [part], [upstream[0]]) for name, call in calls.items()}
        logitless.install("verl", audit=4)
        chunk = 8
        ours = {name: run(call, [part], [upstream[0]]) for name, call in calls.items()}
        fused_ours = run(fused_call, [hidden, weight[own]], [x.reshape(-1) for x in upstream])
        unchanged = part.clone().requires_grad_()
        module.vocab_parallel_entropy(unchanged).sum().backward()
        module.vocab_parallel_log_probs_from_logits(unchanged, labels).sum().backward()
        assert torch.equal(unchanged.detach(), part)
        (status,) = logitless.status().hosts
        assert status.audit is not None
        assert status.audit.passed
        assert status.audit.rows > 30
        logitless.uninstall("verl")
        logitless.install("verl", hidden_grad="reduced")
        reduced = run(fused_call, [hidden, weight[own]], [x.reshape(-1) for x in upstream])
    finally:
        for entry in logitless.status().hosts:
            logitless.uninstall(entry.host)
        parallel_state.destroy_model_parallel()
    return theirs, ours, fused_ours, reduced


@pytest.fixture(scope="module")
def two_ranks(ranks):
    torch.manual_seed(11)
    width = 2 * (V // 2)
    logits, (hidden, weight) = logits_of(3, 17)[..., :width], operands_of(3, 17)
    labels, upstream = torch.randint(width, (3, 17)), torch.randn(2, 3, 17, dtype=torch.float64)
    results = ranks(parallel_scores, 2, logits, hidden, weight[:width], labels, list(upstream), timeout=180)
    return logits, hidden, weight[:width], labels, list(upstream), results


TRUTHS = {
    "vocab_parallel_log_probs_from_logits": lambda z, labels: z.log_softmax(-1).gather(-1, labels[..., None])[..., 0],
    "vocab_parallel_entropy": lambda z, _: true_entropy(z),
    "vocab_parallel_entropy_with_chunking": lambda z, _: true_entropy(z),
    "vocab_parallel_sum_pi_squared": lambda z, _: z.softmax(-1).square().sum(-1),
}


@pytest.mark.parametrize("name", TRUTHS)
def test_sharded_logits(two_ranks, name):
    logits, _, _, labels, upstream, results = two_ranks
    if name not in results[0][0]:
        pytest.skip("this release of verl has no such function")
    (exact,), (exact_gradient,) = run(lambda z: TRUTHS[name](z, labels), [logits.double()], upstream[:1])
    _, (plain_gradient,) = run(lambda z: TRUTHS[name](z, labels), [logits], upstream[:1])
    for rank, (theirs, ours, *_) in enumerate(results):
        own = slice(rank * (V // 2), (rank + 1) * (V // 2))
        assert ours[name][0][0].dtype == theirs[name][0][0].dtype
        assert_close_to_truth(ours[name][0][0], exact, theirs[name][0][0], name)
        assert torch.equal(ours[name][0][0], results[0][1][name][0][0])
        assert_gradient_close_to_truth(ours[name][1][0], exact_gradient[..., own], plain_gradient[..., own], name)


def test_sharded_head(two_ranks):
    """The gradient of hidden is a part on every rank, and whole where that was asked for."""
    _, hidden, weight, labels, upstream, results = two_ranks
    truth = lambda *x: tuple(y.reshape(-1) for y in head_truth(labels, 0.7)(*x))  # noqa: E731
    flat = [x.reshape(-1) for x in upstream]
    exact, (d_hidden, d_weight) = run(truth, [hidden.double(), weight.double()], flat)
    plain, (plain_hidden, plain_weight) = run(truth, [hidden, weight], flat)
    for rank, (_, _, ours, reduced) in enumerate(results):
        own = slice(rank * (V // 2), (rank + 1) * (V // 2))
        for mine, wanted, other in zip(ours[0], exact, plain, strict=True):
            assert_close_to_truth(mine, wanted, other)
        assert_gradient_close_to_truth(ours[1][1], d_weight[own], plain_weight[own])
        assert_gradient_close_to_truth(reduced[1][0], d_hidden, plain_hidden)
        assert (ours[1][0] - d_hidden).norm() > 0.1 * d_hidden.norm()
    whole = sum(ours[1][0] for _, _, ours, _ in results)
    assert_gradient_close_to_truth(whole, d_hidden, plain_hidden)


@pytest.mark.skipif(checkout("verl") is not None, reason="benchmarks run on what is installed")
def test_the_benchmark_runs():
    record = measure(ENTRIES["verl"], torch.device("cpu"), SMOKE, repeats=1)
    assert record.difference < 1e-5
    assert record.after_bytes < record.before_bytes
    assert not logitless.status().hosts
