"""TRL with and without ours: the fused LM head, the functions on logits, and whole training runs.

The tolerance rule with TRL's own function as the yardstick: at most twice its error to float64.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from hosts import put_first
from tiny import offline_trainer, qwen3, trainer
from truth import truth

import logitless
from benchmarks.bench.measure import peak_bytes
from logitless import LogitlessError

put_first("trl")
pytest.importorskip("trl")

N, D, V = 61, 24, 507
HEADS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"temperature": 1.3, "softcap": 4.0},
    "scale": {"scale": 0.25, "softcap": 3.0},
}
BOTH = ("log_probs", "entropy")


def chunked():
    return pytest.importorskip("trl.kernels.chunked_logprob").ChunkedLogProbFunction


def utils():
    return sys.modules.get("trl.trainer.utils") or __import__("trl.trainer.utils", fromlist=["utils"])


def operands(dtype=torch.float32, bias=False):
    hidden, weight = torch.randn(N, D) * 1.5, torch.randn(V, D)
    tensors = [hidden, weight, torch.randn(V)] if bias else [hidden, weight]
    return [x.to(dtype).requires_grad_() for x in tensors], torch.randint(V, (N,))


def fused(leaves, targets, outputs=BOTH, temperature=1.0, softcap=None, scale=1.0):
    hidden, weight, *bias = leaves
    more = (temperature, 100, softcap, scale, outputs)
    return chunked().apply(hidden, weight, bias[0] if bias else None, targets, *more)


def true_scores(leaves, targets, **head):
    hidden, weight, *bias = leaves
    logits = hidden @ weight.T + (bias[0] if bias else 0)
    return truth(logits, torch.arange(N), targets, **head)


def gradients(scores, leaves, upstream):
    return torch.autograd.grad([scores[0], scores[1]], leaves, [upstream[0].to(scores[0]), upstream[1].to(scores[1])])


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_head(name, dtype, bias):
    leaves, targets = operands(dtype, bias)
    upstream = torch.randn(2, N)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    wanted = true_scores(exact, targets, **HEADS[name])
    theirs = fused(leaves, targets, **HEADS[name])
    their_gradients = gradients(theirs, leaves, upstream)
    logitless.install("trl", memory="64KiB", audit=5)
    ours = fused(leaves, targets, **HEADS[name])
    assert [x is None for x in ours] == [x is None for x in theirs] == [False, False, True, True, True]
    for i, what in enumerate(BOTH):
        assert ours[i].dtype == theirs[i].dtype == torch.float32
        assert ours[i].requires_grad
        assert_close_to_truth(ours[i], wanted[i], theirs[i], what)
    for mine, exactly, other in zip(
        gradients(ours, leaves, upstream), gradients(wanted, exact, upstream), their_gradients, strict=True
    ):
        assert mine.dtype == other.dtype
        assert_gradient_close_to_truth(mine, exactly, other)
    status = logitless.status().hosts[0]
    assert status.replaced[0].calls == 1
    assert status.replaced[0].passed_on == 0
    assert status.audit.rows == 10
    assert status.audit.passed


def test_fused_head_keeps_the_rounding_of_half_precision_unless_accurate():
    leaves, targets = operands(torch.bfloat16)
    exact = true_scores([x.detach().double() for x in leaves], targets)
    theirs = fused(leaves, targets)
    rounded = (leaves[0] @ leaves[1].T).detach()
    plain = truth(rounded.float(), torch.arange(N), targets)
    logitless.install("trl")
    ours = fused(leaves, targets)
    logitless.uninstall("trl")
    logitless.install("trl", accurate=True, audit=N)
    accurate = fused(leaves, targets)
    assert (ours[0] - theirs[0]).abs().max() < 1e-5
    assert (ours[0] - plain.logprob).abs().max() < 1e-5
    assert (theirs[0] - exact.logprob).abs().max() > 1e-2
    assert (accurate[0] - exact.logprob).abs().max() < 1e-5
    assert (accurate[1] - exact.entropy).abs().max() < 1e-5
    assert logitless.status().hosts[0].audit.passed


def test_fused_head_under_autocast():
    leaves, targets = operands()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = fused(leaves, targets)
        logitless.install("trl")
        ours = fused(leaves, targets)
    assert (ours[0] - theirs[0]).abs().max() < 1e-5
    (ours[0].sum() + ours[1].sum()).backward()
    assert all(x.grad.dtype == torch.float32 for x in leaves)


def test_fused_head_with_operands_of_two_dtypes():
    """What ``cast_lm_head_to_fp32`` makes: float32 hidden states on a bfloat16 weight."""
    hidden, weight = torch.randn(N, D, requires_grad=True), torch.randn(V, D).bfloat16().requires_grad_()
    targets = torch.randint(V, (N,))
    theirs = fused([hidden, weight], targets)
    logitless.install("trl")
    ours = fused([hidden, weight], targets)
    torch.testing.assert_close(ours[0], theirs[0], atol=1e-5, rtol=0)
    ours[0].sum().backward()
    assert weight.grad.dtype == torch.bfloat16


def test_fused_head_without_gradients_or_rows():
    leaves, targets = operands()
    logitless.install("trl")
    with torch.no_grad():
        ours = fused(leaves, targets)
    assert not ours[0].requires_grad
    assert not ours[1].requires_grad
    only = fused(leaves, targets, outputs=("log_probs",))
    assert only[1] is None
    empty = fused([leaves[0][:0], leaves[1]], targets[:0])
    assert empty[0].shape == empty[1].shape == (0,)
    assert empty[0].requires_grad
    assert empty[0].sum().backward() is None
    assert torch.count_nonzero(leaves[1].grad) == 0


def test_entropy_as_a_metric():
    leaves, targets = operands()
    logitless.install("trl", entropy_grad=False)
    logprob, entropy, *_ = fused(leaves, targets)
    assert logprob.requires_grad
    assert not entropy.requires_grad


MORE = ("log_sum_sq_probs", "mean_logits", "is_top1")
MORE_HEADS = HEADS | {"scale alone": {"scale": 0.25, "temperature": 0.8}}


@pytest.mark.parametrize("name", MORE_HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_further_outputs(name, dtype):
    """Of likely labels and unlikely ones, and of two ids with the same logits, of which the first is the likeliest."""
    bias = name in ("temperature", "softcap", "scale alone")
    leaves, targets = operands(dtype, bias)
    with torch.no_grad():
        for x in leaves[1:]:
            x[303] = x[3]
        leaves[0][::2] *= 0.2
        leaves[0][:8] = 4 * leaves[1][3].sign()
    logits = sum(x.detach().double() for x in ([leaves[0] @ leaves[1].T, *leaves[2:]]))
    targets[20:] = torch.where(torch.rand(N - 20) < 0.6, logits.argmax(1)[20:], targets[20:])
    targets[:8] = torch.tensor([3, 303] * 4)
    head = MORE_HEADS[name]
    theirs = fused(leaves, targets, (*BOTH, *MORE), **head)
    logitless.install("trl", memory="8KiB")
    ours = fused(leaves, targets, (*BOTH, *MORE), **head)
    assert 15 < int(ours[4].sum()) < N - 15
    exact = [x.detach().double() for x in leaves]
    z = exact[0] @ exact[1].T + (exact[2] if bias else 0)
    z = (z.to(dtype) if dtype != torch.float32 else z).double() * head.get("scale", 1.0)
    z = z if "softcap" not in head else head["softcap"] * torch.tanh(z / head["softcap"])
    z = z / head.get("temperature", 1.0)
    right = (2 * torch.log_softmax(z, -1)).logsumexp(-1), z.mean(-1)
    if dtype == torch.float32 or not bias:  # TRL rounds before it adds a bias, and after
        assert torch.equal(ours[4], theirs[4])
    if "softcap" not in head:  # in float64 fewer logits reach the cap
        assert torch.equal(ours[4], z.argmax(1) == targets)
        assert ours[4][:8].tolist() == [True, False] * 4
    # Ours of the mean is that of logits that are not rounded: each is off by half a unit at most, and they average out.
    slack = 0.0 if dtype == torch.float32 else float(z.abs().max()) * 2**-9
    for i, wanted in zip((2, 3), right, strict=True):
        assert ours[i].dtype == theirs[i].dtype == torch.float32
        assert not ours[i].requires_grad
        off, their_off = ((x[i].double() - wanted).abs().max() for x in (ours, theirs))
        assert off <= 2 * their_off + 5e-6 + slack, MORE[i - 2]
    for i in (2, 3, 4):
        alone = fused(leaves, targets, ("log_probs", MORE[i - 2]), **head)
        torch.testing.assert_close(alone[i], ours[i], atol=1e-6, rtol=0)
        assert [x is None for x in alone] == [False, True] + [j != i for j in (2, 3, 4)]
    report = logitless.status().hosts[0]
    assert (report.calls, report.passed_on) == (4, 0)


def test_a_row_without_a_likeliest_token():
    """Logits that are NaN, or all -inf: no label is a hit, and other rows are not touched."""
    leaves, targets = operands(bias=True)
    likeliest = (leaves[0] @ leaves[1].T + leaves[2]).argmax(1)
    targets = likeliest.clone()
    targets[:2] = 0
    with torch.no_grad():
        leaves[0][0] = torch.nan
    theirs = fused(leaves, targets, (*BOTH, "is_top1"))
    logitless.install("trl")
    ours = fused(leaves, targets, (*BOTH, "is_top1"))
    assert torch.equal(ours[4], theirs[4])
    assert not ours[4][0]
    with torch.no_grad():
        leaves[2].fill_(-torch.inf)
    assert not fused(leaves, targets, (*BOTH, "is_top1"))[4].any()


def test_what_is_left_to_trl():
    leaves, targets = operands()
    before = fused(leaves, targets, outputs=(*BOTH, "of another release"))
    half = torch.randn(3, 5, V).bfloat16()
    index = torch.randint(V, (3, 5))
    alone = utils().selective_log_softmax(half, index), utils().entropy_from_logits(half)
    pair = utils().selective_log_softmax_and_entropy(half, index)
    logitless.install("trl")
    after = fused(leaves, targets, outputs=(*BOTH, "of another release"))
    assert torch.equal(after[0], before[0])
    # Bit for bit, as TRL's own tests compare half precision.
    assert torch.equal(utils().selective_log_softmax(half, index), alone[0])
    assert torch.equal(utils().entropy_from_logits(half), alone[1])
    assert all(map(torch.equal, utils().selective_log_softmax_and_entropy(half, index), pair))
    leaves[1].ds_id = 0  # as DeepSpeed ZeRO-3 marks its parameters
    fused(leaves, targets)
    counts = {
        entry.name.split(".", 3)[-1]: (entry.calls, entry.passed_on) for entry in logitless.status().hosts[0].replaced
    }
    assert counts["ChunkedLogProbFunction.apply"] == (2, 2)
    # The third answers through the first two, in TRL itself.
    assert counts["selective_log_softmax_and_entropy"] == (1, 1)
    assert counts["selective_log_softmax"] == counts["entropy_from_logits"] == (2, 2)


# Functions on logits.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
def test_functions_on_logits(dtype, temperature, masked):
    exact = (torch.randn(3, 21, V, dtype=torch.float64) * 3).to(dtype).double().requires_grad_()
    logits = exact.detach().to(dtype).requires_grad_()
    index, upstream = torch.randint(V, (3, 21)), torch.randn(2, 3, 21)
    mask = (torch.rand(3, 21) > 0.3).long() if masked else None
    target = index if mask is None else index.masked_fill(mask == 0, -100)
    flat = truth(exact.reshape(-1, V), torch.arange(63), target.flatten(), temperature=temperature)
    wanted = [flat.logprob.reshape(3, 21), flat.entropy.reshape(3, 21)]

    def both():
        return utils().selective_log_softmax_and_entropy(logits, index, temperature=temperature, row_mask=mask)

    theirs = both()
    their_gradient = gradients(theirs, [logits], upstream)[0]
    logitless.install("trl", audit=4)
    ours = both()
    for i in range(2):
        assert ours[i].dtype == theirs[i].dtype
        assert_close_to_truth(ours[i], wanted[i], theirs[i], BOTH[i])
    assert_gradient_close_to_truth(
        gradients(ours, [logits], upstream)[0], gradients(wanted, [exact], upstream)[0], their_gradient
    )
    alone = utils().selective_log_softmax(logits, index, temperature, mask)
    assert torch.equal(alone, ours[0])
    if temperature == 1.0 and mask is None:
        assert torch.equal(utils().entropy_from_logits(logits), ours[1])
    assert logitless.status().hosts[0].audit.passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_two_functions_that_every_release_has(dtype):
    exact = (torch.randn(3, 21, V, dtype=torch.float64) * 3).to(dtype).double().requires_grad_()
    logits = exact.detach().to(dtype).requires_grad_()
    index, upstream = torch.randint(V, (3, 21)), torch.randn(2, 3, 21)
    flat = truth(exact.reshape(-1, V), torch.arange(63), index.flatten())
    wanted = [flat.logprob.reshape(3, 21), flat.entropy.reshape(3, 21)]

    def both():
        return utils().selective_log_softmax(logits, index), utils().entropy_from_logits(logits)

    theirs = both()
    their_gradient = gradients(theirs, [logits], upstream)[0]
    logitless.install("trl", audit=4)
    ours = both()
    for i in range(2):
        assert_close_to_truth(ours[i], wanted[i], theirs[i], BOTH[i])
    right = gradients(wanted, [exact], upstream)[0]
    assert_gradient_close_to_truth(gradients(ours, [logits], upstream)[0], right, their_gradient)
    report = logitless.status().hosts[0]
    assert (report.calls, report.passed_on) == (2, 0)
    assert report.audit.passed


def test_entropy_without_a_graph():
    logits, index = torch.randn(4, 5, V, requires_grad=True), torch.randint(V, (4, 5))
    logitless.install("trl")
    logprob, entropy = utils().selective_log_softmax_and_entropy(logits, index, entropy_requires_grad=False)
    assert logprob.requires_grad
    assert not entropy.requires_grad
    assert utils().entropy_from_logits(logits).requires_grad
    assert not utils().entropy_from_logits(logits.detach()).requires_grad


@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
def test_several_log_probs_per_row(masked):
    logits, index = (torch.randn(3, 21, V) * 3).requires_grad_(), torch.randint(V, (3, 21, 6))
    mask = torch.rand(3, 21, 6) > 0.3 if masked else None
    upstream = torch.randn(3, 21, 6)
    exact = logits.detach().double().requires_grad_()
    wanted = torch.log_softmax(exact / 0.9, -1).gather(-1, index)
    wanted = wanted if mask is None else wanted * mask
    theirs = utils().selective_log_softmax(logits, index, 0.9, mask)
    (their_gradient,) = torch.autograd.grad(theirs, logits, upstream)
    logitless.install("trl")
    ours = utils().selective_log_softmax(logits, index, 0.9, mask)
    assert_close_to_truth(ours, wanted, theirs)
    assert_gradient_close_to_truth(
        torch.autograd.grad(ours, logits, upstream)[0],
        torch.autograd.grad(wanted, exact, upstream.double())[0],
        their_gradient,
    )


def test_accurate_half_precision():
    logits, index = (torch.randn(3, 21, V) * 3).bfloat16().requires_grad_(), torch.randint(V, (3, 21))
    logitless.install("trl", accurate=True)
    ours = utils().selective_log_softmax(logits, index)
    exact = torch.log_softmax(logits.detach().double(), -1).gather(-1, index[..., None]).squeeze(-1)
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().max() < 1e-5
    ours.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_strided_and_empty_logits():
    logits, index = torch.randn(V, 3, 4).permute(1, 2, 0), torch.randint(V, (3, 4))
    expected = utils().selective_log_softmax(logits, index)
    logitless.install("trl")
    torch.testing.assert_close(utils().selective_log_softmax(logits, index), expected, atol=1e-6, rtol=0)
    empty = torch.zeros(2, 0, V, requires_grad=True)
    assert utils().selective_log_softmax(empty, torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0)
    assert utils().entropy_from_logits(empty).shape == (2, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda z, i: utils().selective_log_softmax(z, i[:, :2]),
            r"index must be \[3, 4\] or \[3, 4, 'K'\] .* \[3, 2\]",
        ),
        (lambda z, i: utils().selective_log_softmax(z, i.T), r"index must be \[3, 4\]"),
        (lambda z, i: utils().selective_log_softmax(z, i, row_mask=i[0]), r"row_mask must be \[3, 4\] .* \[4\]"),
        (lambda z, i: utils().selective_log_softmax(z, i - 100), "index has the id -100. Ids must not be negative"),
        (lambda z, i: utils().selective_log_softmax(z, i + V), f"outside the vocabulary of {V}"),
        (lambda z, i: utils().selective_log_softmax(z, i[..., None] + V), f"outside the vocabulary of {V}"),
        (lambda z, i: utils().selective_log_softmax(z, i.float()), r"index must be integers but is torch\.float32"),
        (lambda z, i: utils().selective_log_softmax(z, i, 0.0), "temperature must be a positive finite number"),
        (
            lambda z, i: utils().selective_log_softmax_and_entropy(z, i[..., None]),
            r"index must be \[3, 4\], one per row",
        ),
        (lambda z, i: fused([z[0], torch.randn(9, V)], i[0] * 0 - 100), "targets has the id -100"),
        (lambda z, i: fused([z[0], torch.randn(9, V)], i[0] * 0 + 9), "outside the vocabulary of 9"),
        (lambda z, i: fused([z, torch.randn(9, V)], i), r"hidden must be \[N, H\] and targets \[N\]"),
    ],
)
def test_errors_name_the_host_function(call, message):
    logitless.install("trl")
    logits, index = torch.randn(3, 4, V), torch.zeros(3, 4, dtype=torch.int64)
    with pytest.raises(LogitlessError, match=rf"^trl\.[a-z_.]+\.[A-Za-z_.]+: .*{message}"):
        call(logits, index)


def test_another_framework_that_holds_a_name_by_value(monkeypatch):
    """ms-swift's trainers import the function from TRL."""
    holder = ModuleType("swift.rlhf_trainers.grpo_trainer")
    holder.selective_log_softmax = before = utils().selective_log_softmax
    monkeypatch.setitem(sys.modules, holder.__name__, holder)
    logitless.install("trl")
    assert holder.selective_log_softmax is utils().selective_log_softmax is not before
    logitless.uninstall("trl")
    assert holder.selective_log_softmax is utils().selective_log_softmax is before


@pytest.mark.filterwarnings("ignore::trl.import_utils.TRLExperimentalWarning")
def test_trainers_that_hold_names_by_value():
    import importlib

    held = importlib.import_module("trl.experimental.sdft.loss_utils")
    before = held.selective_log_softmax
    logitless.install("trl")
    assert held.selective_log_softmax is utils().selective_log_softmax is not before
    logitless.uninstall("trl")
    assert held.selective_log_softmax is utils().selective_log_softmax is before
    assert "apply" not in vars(chunked())


# Whole runs.

NUMBERS = ("loss", "grad_norm", "entropy", "kl")


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
@pytest.mark.filterwarnings("default")
def test_a_real_run(kind, tmp_path):
    """The same model, prompts and seed, with and without: the same losses, gradients and weights."""
    runs = []
    for installed in (False, True):
        if installed:
            logitless.install("trl", audit=4)
        run = trainer(kind, tmp_path)
        run.train()
        history = [{name: entry[name] for name in NUMBERS if name in entry} for entry in run.state.log_history]
        runs.append((history[:-1], [x.detach().clone() for x in run.model.parameters()]))
    (plain, plain_weights), (ours, our_weights) = runs
    assert len(plain) == len(ours) == 3
    for theirs, mine in zip(plain, ours, strict=True):
        assert {"loss", "grad_norm", "entropy"} <= set(mine)
        for name in mine:
            assert math.isclose(mine[name], theirs[name], rel_tol=1e-5, abs_tol=1e-6), name
    for theirs, mine in zip(plain_weights, our_weights, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    report = logitless.status().hosts[0]
    # Policy and reference, three steps; some releases have a function for each.
    assert sum(entry.calls for entry in report.replaced if not entry.name.endswith("entropy_from_logits")) >= 6
    assert report.passed_on == 0
    assert report.audit.rows >= 24
    assert report.audit.passed


OFFLINE = {
    "SFT": (2, {}),
    "SFT, dft": (2, {"loss_type": "dft"}),
    "DPO": (4, {}),  # policy and reference, two steps
    "DPO, several losses": (4, {"loss_type": ["sigmoid", "ipo"], "use_weighting": True}),
    "KTO": (8, {}),  # policy and reference, of pairs and of mismatched ones
    "Reward": (0, {}),  # no head over the vocabulary
    "GKD": (0, {"max_new_tokens": 5}),  # two whole distributions are compared, from logits
}


@pytest.mark.parametrize("name", OFFLINE)
@pytest.mark.filterwarnings("default")
def test_nothing_is_passed_on_in_offline_training(name, tmp_path):
    """The same data and seed with and without: the same numbers in the log, and every call of TRL's is answered."""
    (calls, options), kind = OFFLINE[name], name.split(",")[0]
    histories = []
    # Where nothing is called, nothing can differ.
    for installed in (False, True) if calls else (True,):
        if installed:
            logitless.install("trl", audit=2)
        run = offline_trainer(kind, tmp_path, **options)
        run.train()
        histories.append([e for e in run.state.log_history if "loss" in e])
    assert all(len(history) == 2 for history in histories)
    for theirs, mine in zip(histories[0], histories[-1], strict=True):
        assert theirs.keys() == mine.keys()
        assert calls == 0 or {"loss", "grad_norm", "entropy"} <= mine.keys()
        for number in mine.keys() - {"step_time"}:
            assert math.isclose(mine[number], theirs[number], rel_tol=1e-4, abs_tol=1e-5), number
    report = logitless.status().hosts[0]
    assert (report.calls, report.passed_on) == (calls, 0)
    assert calls == 0 or report.audit.passed


@pytest.mark.filterwarnings("default")
def test_no_logits_through_the_trainers_own_method(tmp_path):
    """``_get_per_token_logps_and_entropies`` with gradients stays below one ``[B, S, V]`` in float32."""
    batch, length, vocab = 4, 96, 8192
    run = trainer("GRPO", tmp_path, qwen3(vocab_size=vocab, tie_word_embeddings=True), beta=0.0)
    ids = torch.randint(3, vocab, (batch, length))
    mask = torch.ones_like(ids)

    def step():
        score = run._get_per_token_logps_and_entropies
        logprob, entropy, _ = score(run.model, ids, mask, logits_to_keep=length - 8, compute_entropy=True)
        (logprob.sum() + entropy.sum()).backward()
        run.model.zero_grad()
        return logprob

    step()
    theirs = peak_bytes(step, "cpu")
    expected = step()
    logitless.install("trl", memory="1MiB")
    step()
    ours = peak_bytes(step, "cpu")
    torch.testing.assert_close(step(), expected, atol=1e-4, rtol=0)
    assert ours < batch * length * vocab * 4
    assert ours < theirs / 2
