"""Providers: what each declares, how peers are found, and that absence has a reason."""

import sys
import textwrap

import pytest
import torch

from benchmarks.bench.cases import Case
from benchmarks.bench.inputs import fill_logits, make_batch
from benchmarks.bench.providers import PROVIDERS, Provider, add_peers

CASE = Case("x", "cpu", 40, 67, entropy="grad", response=0.5)


PEERS = ("liger_kernel", "trl", "verl", "megatron")


@pytest.fixture
def peers(tmp_path, monkeypatch):
    """A folder to unpack stand-ins for peers into, importable during the test alone."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    # Real ones that other tests have imported come back afterwards.
    for name in [name for name in sys.modules if name.split(".")[0] in PEERS]:
        monkeypatch.delitem(sys.modules, name)
    before = set(sys.modules)
    add_peers(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder, path, text):
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(text))


@pytest.mark.parametrize(
    ("computes", "wanted", "left"),
    [("log-prob", "grad", None), ("entropy value", "grad", "value"), ("entropy grad", "grad", "grad"),
     ("entropy grad", "value", "value"), ("entropy value", None, None)],
)  # fmt: skip
def test_a_provider_computes_no_more_than_it_can(computes, wanted, left):
    assert Provider(lambda: None, computes).entropy_of(wanted) == left


@pytest.mark.parametrize("name", ["liger", "trl", "trl-kernel", "verl", "megatron"])
def test_a_missing_peer_says_so(name, monkeypatch):
    for module in [m for m in sys.modules if m.split(".")[0] in PEERS]:
        monkeypatch.delitem(sys.modules, module)
    for package in PEERS:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises((ImportError, ValueError)):
        PROVIDERS[name].load()


@pytest.mark.parametrize("name", ["logitless", "logitless-overwrite"])
def test_ours_agree_with_plain_torch(name):
    batch = make_batch(CASE, torch.device("cpu"))
    logits = fill_logits(batch, torch.empty(40, 67))
    with torch.no_grad():
        wanted, got = (PROVIDERS[n].load()(batch, logits) for n in ("torch", name))
    for a, b in zip(wanted, got, strict=True):
        torch.testing.assert_close(a, b)


def test_a_peer_is_found_in_the_folder(peers):
    write(peers, "verl/__init__.py", "")
    write(peers, "verl/utils/__init__.py", "")
    write(peers, "verl/utils/torch_functional.py", """
        def logprobs_from_logits(logits, labels, inplace_backward=True):
            return logits.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
        def entropy_from_logits(logits):
            return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        """)  # fmt: skip
    batch = make_batch(CASE, torch.device("cpu"))
    logits = fill_logits(batch, torch.empty(40, 67)).requires_grad_()
    wanted, got = (PROVIDERS[n].load()(batch, logits) for n in ("torch", "verl"))
    torch.testing.assert_close(got.logprob, wanted.logprob)
    torch.testing.assert_close(got.entropy, wanted.entropy)
    assert got.entropy.requires_grad


def test_one_file_of_a_package_loads_without_the_package(peers):
    write(peers, "trl/__init__.py", "raise RuntimeError('the package was run')")
    write(peers, "trl/kernels/logprob_entropy.py", """
        def selective_log_softmax_and_entropy(logits, index, row_mask=None):
            logp = logits.log_softmax(-1)
            return logp.gather(1, index[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)
        """)  # fmt: skip
    batch = make_batch(CASE, torch.device("cpu"))
    logits = fill_logits(batch, torch.empty(40, 67))
    wanted, got = (PROVIDERS[n].load()(batch, logits) for n in ("torch", "trl-kernel"))
    torch.testing.assert_close(got.logprob, wanted.logprob)


def test_a_package_without_the_file_says_which(peers):
    write(peers, "trl/__init__.py", "")
    with pytest.raises(ImportError, match=r"trl has no kernels/logprob_entropy.py"):
        PROVIDERS["trl-kernel"].load()
