"""OpenRLHF with and without ours: its two functions on logits, and its actor with a tiny model."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch
from hosts import checkout, load
from parity import assert_parity
from tiny import qwen3

import logitless
from benchmarks.bench.adapters import ENTRIES, SMOKE, measure
from benchmarks.bench.measure import peak_bytes
from logitless import LogitlessError

V = 507
UTILS, ACTOR = "openrlhf.models.utils", "openrlhf.models.actor"


@pytest.fixture(scope="module", autouse=True)
def openrlhf():
    return load("openrlhf", UTILS, ACTOR)


@pytest.fixture(autouse=True)
def eager():
    """OpenRLHF compiles its entropy; what it computes is the question here."""
    with torch.compiler.set_stance("force_eager"):
        yield


def utils():
    return sys.modules[UTILS]


def logits_of(*lead, dtype=torch.float32):
    return (torch.randn(*lead, V, dtype=torch.float64) * 3).to(dtype)


def true_entropy(z):
    logp = z.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_log_probs_from_logits(dtype, temperature):
    if dtype == torch.bfloat16 and temperature != 1.0:
        pytest.skip("the division in place rounds to bfloat16: there is no truth to compare with")
    labels = torch.randint(V, (3, 17))
    assert_parity(
        "openrlhf",
        lambda z: utils().log_probs_from_logits(z * 1.0, labels, temperature),
        lambda z: (z / temperature).log_softmax(-1).gather(-1, labels[..., None])[..., 0],
        [logits_of(3, 17, dtype=dtype)],
        dtypes=[torch.float64 if dtype == torch.float64 else torch.float32],
    )


def test_a_temperature_divides_the_logits_in_place():
    """OpenRLHF's callers may count on it, above all for an entropy taken afterwards."""
    logits, labels = logits_of(2, 5), torch.randint(V, (2, 5))
    theirs, ours = logits.clone(), logits.clone()
    utils().log_probs_from_logits(theirs, labels, 0.7)
    logitless.install("openrlhf")
    utils().log_probs_from_logits(ours, labels, 0.7)
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(utils().compute_entropy(ours), true_entropy(logits.double() / 0.7).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compute_entropy(dtype):
    assert_parity("openrlhf", lambda z: utils().compute_entropy(z), true_entropy, [logits_of(3, 17, dtype=dtype)])


def test_entropy_without_its_gradient():
    logits = logits_of(5).requires_grad_()
    logitless.install("openrlhf", entropy_grad=False)
    assert not utils().compute_entropy(logits).requires_grad
    assert utils().log_probs_from_logits(logits, torch.zeros(5, dtype=torch.int64)).requires_grad


def test_nothing_in_nothing_out():
    logitless.install("openrlhf")
    empty = torch.zeros(0, V, requires_grad=True)
    out = utils().log_probs_from_logits(empty, torch.zeros(0, dtype=torch.int64))
    assert out.shape == utils().compute_entropy(empty).shape == (0,)
    out.sum().backward()


def test_wrong_operands_are_named():
    logitless.install("openrlhf")
    score = utils().log_probs_from_logits
    with pytest.raises(LogitlessError, match=r"log_probs_from_logits: labels must be \[5\] but is \[4\]"):
        score(logits_of(5), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(LogitlessError, match=r"temperature must be positive but is 0\.0"):
        score(logits_of(5), torch.zeros(5, dtype=torch.int64), 0.0)
    with pytest.raises(LogitlessError, match="outside the vocabulary of 507"):
        score(logits_of(1), torch.tensor([V]))


# Through the actor.


def actor_of(model, temperature):
    actor = sys.modules[ACTOR].Actor(model, temperature=temperature)
    actor.packing_samples = False
    return actor


def late(actor):
    """Whether the actor takes its entropy before log_probs_from_logits divides the same logits by the temperature.

    OpenRLHF 0.10.4 and 0.11.0 do, and cannot train that entropy at a temperature other than 1: torch finds the logits
    changed since.
    """
    return actor.temperature != 1.0 and "temperature=self.temperature" in inspect.getsource(type(actor).forward)


def step(actor, tokens, mask):
    """Log-probs and entropies of the last five tokens, and the gradient of the head."""
    actor.zero_grad()
    actions = torch.ones(len(tokens), 5)
    logprob, output = actor(tokens, actions, mask, return_output=True, return_entropy=True)
    entropy = output.entropy[:, -5:]
    (logprob.sum() if late(actor) else logprob.sum() + 0.1 * entropy.sum()).backward()
    return logprob.detach(), entropy.detach(), actor.model.lm_head.weight.grad.clone()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_actor_gives_the_same(temperature):
    model = qwen3()
    tokens, mask = torch.randint(2, 250, (3, 11)), torch.ones(3, 11, dtype=torch.int64)
    actor = actor_of(model, temperature)
    theirs = step(actor, tokens, mask)
    report = logitless.install("openrlhf", audit=4)
    assert checkout("openrlhf") or report.version == "0.11.2"
    ours = step(actor, tokens, mask)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=2e-5)
    # After temperature: the policy that the rollout sampled from.
    logits = model(tokens).logits[:, -6:-1].detach().double() / (1.0 if late(actor) else temperature)
    torch.testing.assert_close(ours[1].double(), true_entropy(logits), atol=2e-5, rtol=0)
    (status,) = logitless.status().hosts
    assert [entry.calls for entry in status.replaced] == [1, 1]
    assert status.audit is not None
    assert status.audit.passed
    logitless.uninstall("openrlhf")
    assert sys.modules[ACTOR].compute_entropy is utils().compute_entropy


def test_the_actor_needs_less_memory():
    vocab = 4096
    actor = actor_of(qwen3(vocab_size=vocab), 0.7)
    tokens, mask = torch.randint(2, vocab, (2, 96)), torch.ones(2, 96, dtype=torch.int64)
    before = peak_bytes(lambda: step(actor, tokens, mask), torch.device("cpu"))
    logitless.install("openrlhf")
    after = peak_bytes(lambda: step(actor, tokens, mask), torch.device("cpu"))
    logits = 4 * tokens.numel() * vocab
    assert after < before - 2 * logits


@pytest.mark.skipif(checkout("openrlhf") is not None, reason="benchmarks run on what is installed")
def test_the_benchmark_runs():
    record = measure(ENTRIES["openrlhf"], torch.device("cpu"), SMOKE, repeats=1)
    assert record.difference < 1e-5
    assert record.after_bytes < record.before_bytes
    assert not logitless.status().hosts
