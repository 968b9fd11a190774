"""Providers from hidden states: agreement with plain torch, and peers that load without their packages."""

import sys

import pytest
import torch

from benchmarks.bench.cases import Case
from benchmarks.bench.inputs import fill_operands, make_batch
from benchmarks.bench.linear_providers import LINEAR_PROVIDERS, TRL_COLUMNS, TRL_HEAD, VERL_KERNEL
from benchmarks.bench.linear_truth import with_loss
from benchmarks.bench.providers import Scores, add_peers
from benchmarks.bench.run import take_step

CPU = torch.device("cpu")
PEERS = {
    "liger-flce": "liger_kernel",
    "liger-flce-none": "liger_kernel",
    "liger-chunked": "liger_kernel",
    "liger-sm90": "liger_kernel",
    "liger-native": "liger_kernel",
    "liger-selective": "liger_kernel",
    "cce": "cut_cross_entropy",
    "cce-exact": "cut_cross_entropy",
    "quack": "quack",
    "te": "transformer_engine",
    "trl-head": "trl",
    "verl-kernel": "verl",
}

KERNELS = """
from verl.utils.device import get_device_capability, get_device_name, is_cuda_available
from verl.utils.device import get_torch_device

def forward(hidden, weight, labels):
    logp = (hidden @ weight.T).log_softmax(-1)
    return logp.gather(1, labels[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)
"""
LINEAR_CROSS_ENTROPY = """
def linear_cross_entropy(hidden, weight, labels, temperature, reduction, group):
    from . import kernels
    assert (temperature, reduction, group) == (1.0, "none", None)
    return kernels.forward(hidden, weight, labels)
"""
CHUNKED_LOGPROB = """
import torch

asked = []

class ChunkedLogProbFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, columns, softcap, scale, outputs):
        assert (bias, temperature, softcap, scale) == (None, 1.0, None, 1.0)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets)
        asked.append((columns, outputs))
        logprob, entropy = both(hidden, weight, targets)
        return logprob, entropy if "entropy" in outputs else None, None, None, None

    @staticmethod
    def backward(ctx, g_logprob, g_entropy, *_):
        from ..trainer.utils import maybe_gather_lm_head_ctx

        *leaves, targets = ctx.saved_tensors
        with maybe_gather_lm_head_ctx(leaves[1], None), torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in leaves]
            pairs = zip(both(*leaves, targets), (g_logprob, g_entropy))
            loss = sum((result * g).sum() for result, g in pairs if g is not None)
            return *torch.autograd.grad(loss, leaves), *[None] * 7

def both(hidden, weight, targets):
    logp = (hidden @ weight.T).log_softmax(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)
"""


def workspace(**fields):
    case = Case("x", "cpu", 40, 67, **{"entropy": "grad", "response": 0.5, "hidden": 24} | fields)
    batch = make_batch(case, CPU)
    return batch, fill_operands(batch, torch.empty(40, 24), torch.empty(67, 24))


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["logitless", "logitless-logits"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"response": 1.0}, {"entropy": "value", "frozen": True}, {"entropy": None}, {"memory": "64KiB"},
     {"entropy": "value", "backward": False}],
    ids=str,
)  # fmt: skip
def test_ours_agree_with_plain_torch(name, fields):
    batch, inputs = workspace(**fields)
    wanted, got = (take_step(LINEAR_PROVIDERS[n].load(), batch, inputs) for n in ("torch", name))
    close(got[0].logprob, wanted[0].logprob)
    if batch.case.entropy is not None:
        close(got[0].entropy, wanted[0].entropy)
    assert len(got[1]) == len(wanted[1]) == (0 if not batch.case.backward else 1 if batch.case.frozen else 2)
    for a, b in zip(got[1], wanted[1], strict=True):
        close(a, b)


@pytest.mark.parametrize("name", PEERS)
def test_a_missing_peer_says_so(name, monkeypatch):
    monkeypatch.setitem(sys.modules, PEERS[name], None)
    with pytest.raises((ImportError, ValueError)):
        LINEAR_PROVIDERS[name].load()


def test_every_peer_is_named_here():
    ours = {name for name in LINEAR_PROVIDERS if name.startswith(("torch", "logitless"))}
    assert set(LINEAR_PROVIDERS) - ours == set(PEERS)


@pytest.fixture
def trl(tmp_path, monkeypatch):
    """A stand-in for TRL, of which only one file may be run."""
    (tmp_path / "trl" / "kernels").mkdir(parents=True)
    for package in ("trl", "trl/kernels"):
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('the package was run')")
    (tmp_path / "trl" / "kernels" / "chunked_logprob.py").write_text(CHUNKED_LOGPROB)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.split(".")[0] == "trl"]:
        monkeypatch.delitem(sys.modules, name)
    add_peers(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith(TRL_HEAD)]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "fields",
    [{}, {"response": 1.0}, {"entropy": "value"}, {"entropy": "value", "frozen": True}, {"entropy": None},
     {"entropy": "value", "backward": False}, {"loss": True}, {"loss": True, "entropy": "value"}],
    ids=str,
)  # fmt: skip
def test_one_file_of_trl_loads_without_trl(trl, fields):
    batch, inputs = workspace(**fields)
    if batch.case.loss:
        batch = with_loss(batch, *inputs)
    wanted, got = (take_step(LINEAR_PROVIDERS[n].load(), batch, inputs) for n in ("torch", "trl-head"))
    close(got[0].logprob, wanted[0].logprob)
    assert (got[0].entropy is None) == (batch.case.entropy is None)
    if batch.case.entropy is not None:
        close(got[0].entropy, wanted[0].entropy)
    for a, b in zip(got[1], wanted[1], strict=True):
        close(a, b)
    asked = sys.modules[f"{TRL_HEAD}.kernels.chunked_logprob"].asked
    assert asked == [(TRL_COLUMNS, ("log_probs",) if batch.case.entropy is None else ("log_probs", "entropy"))]
    assert "trl" not in sys.modules


@pytest.fixture
def verl(tmp_path, monkeypatch):
    """A stand-in for verl whose own code must not run."""
    folder = tmp_path / "verl" / "utils" / "kernel"
    folder.mkdir(parents=True)
    (tmp_path / "verl" / "__init__.py").write_text("raise RuntimeError('the package was run')")
    (folder / "kernels.py").write_text(KERNELS)
    (folder / "linear_cross_entropy.py").write_text(LINEAR_CROSS_ENTROPY)
    monkeypatch.setattr(sys, "path", list(sys.path))
    # The real one, if another test has imported it, comes back afterwards.
    for name in [name for name in sys.modules if name.split(".")[0] == "verl"]:
        monkeypatch.delitem(sys.modules, name)
    add_peers(tmp_path)
    yield
    # Only these: torch loads parts of itself when they are first used, and cannot load them twice.
    for name in [name for name in sys.modules if name.startswith((VERL_KERNEL, "verl"))]:
        del sys.modules[name]


def test_two_files_of_verl_load_without_verl(verl):
    batch, inputs = workspace()
    wanted, got = (take_step(LINEAR_PROVIDERS[n].load(), batch, inputs) for n in ("torch", "verl-kernel"))
    close(got[0].entropy, wanted[0].entropy)
    for a, b in zip(got[1], wanted[1], strict=True):
        close(a, b)
    assert "verl" not in sys.modules
    assert "verl.utils.device" not in sys.modules


def test_a_mean_loss_is_asked_for_its_own_gradient():
    batch, (hidden, weight) = workspace(entropy=None)

    def score(batch, hidden, weight):
        return Scores(-torch.nn.functional.cross_entropy(hidden @ weight.T, batch.labels), None)

    _, (d_hidden, d_weight) = take_step(score, batch, (hidden, weight))
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    torch.nn.functional.cross_entropy(x @ w.T, batch.labels).backward()
    close(d_hidden, x.grad)
    close(d_weight, w.grad)
