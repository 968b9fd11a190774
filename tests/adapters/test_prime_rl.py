"""prime-rl's fused heads with and without ours, on a double or on prime-rl itself (see hosts.py)."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from hosts import load, put_first, takes
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import logitless
from logitless import LogitlessError

DOUBLE = not put_first("prime_rl")
if DOUBLE:
    sys.path.append(str(Path(__file__).parent / "doubles"))

V, D, B, S = 211, 16, 2, 13
SOFTCAP = 4.0


def heads(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """One head of each kind, with one weight."""
    layers = "prime_rl.trainer.models.layers"
    names = [f"{layers}.lm_head", f"{layers}.lm_head_gemma"]
    plain, gemma = [importlib.import_module(name) for name in names] if DOUBLE else load("prime_rl")
    made = {
        "plain": plain.FusedOutputLinear(D, V, 8),
        "gemma": gemma.GemmaFusedOutputLinear(D, V, 8, SOFTCAP),
        "vanilla": plain.VanillaOutputLinear(D, V),
    }
    torch.manual_seed(3)
    weight = torch.randn(V, D)
    for head in made.values():
        head.weight = torch.nn.Parameter(weight.clone())
        head.to(dtype)
    return made


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(4)
    hidden, labels, temperature = torch.randn(B, S, D), torch.randint(V, (B, S)), torch.rand(B, S) + 0.5
    return hidden.to(dtype), labels, temperature, torch.randn(2, B, S)


def truth(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Tensor, softcap: float | None, dtype: Any):
    """In float64, on logits that are rounded as the host rounds them; the gradient passes through the rounding."""
    logits = hidden @ weight.T
    logits = logits + (logits.detach().to(dtype).double() - logits.detach())
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature[..., None].double()).log_softmax(-1)
    return log_p.gather(-1, labels[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def run(head: Any, hidden: Tensor, labels: Tensor, temperature: Tensor, upstream: Tensor) -> tuple[dict, list[Tensor]]:
    leaf = hidden.clone().requires_grad_()
    out = head(leaf, labels, temperature)
    if out.get("logits") is not None:
        # As prime-rl's trainer goes on, where nothing is installed.
        log_p = (out["logits"].float() / temperature[..., None]).log_softmax(-1)
        out = {"logprobs": log_p.gather(-1, labels[..., None])[..., 0], "entropy": -(log_p.exp() * log_p).sum(-1)}
    assert set(out) == {"logprobs", "entropy"}
    return out, list(torch.autograd.grad(out["logprobs"], [leaf, head.weight], upstream))


@pytest.mark.parametrize("kind", ["plain", "gemma", "vanilla"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("accurate", [False, True], ids=["", "accurate"])
def test_parity(kind, dtype, accurate):
    head = heads(dtype)[kind]
    hidden, labels, temperature, upstream = batch(dtype)
    theirs, their_gradients = run(head, hidden, labels, temperature, upstream[0])
    logitless.install("prime_rl", audit=5, accurate=accurate)
    ours, our_gradients = run(head, hidden, labels, temperature, upstream[0])
    (report,) = logitless.status().hosts
    assert (report.calls, report.passed_on) == (1, 0)
    assert report.audit.passed
    assert report.audit.rows == 10
    leaves = [x.detach().double().requires_grad_() for x in (hidden, head.weight)]
    rounded = torch.float64 if accurate else dtype
    exact = truth(*leaves, labels, temperature, SOFTCAP if kind == "gemma" else None, rounded)
    gradients = torch.autograd.grad(exact[0], leaves, upstream[0].double())
    for mine, right, other in zip((ours["logprobs"], ours["entropy"]), exact, theirs.values(), strict=True):
        assert mine.dtype == other.dtype == torch.float32
        assert_close_to_truth(mine, right, other)
    for mine, right, other in zip(our_gradients, gradients, their_gradients, strict=True):
        assert mine.dtype == other.dtype == dtype
        assert_gradient_close_to_truth(mine, right, other)


def test_a_bonus_that_is_not_trained_raises():
    """As prime-rl does: a gradient of entropy that has no way on would be lost in silence."""
    head = heads()["plain"]
    hidden, labels, temperature, _ = batch(torch.float32)
    logitless.install("prime_rl")
    out = head(hidden, labels, temperature)
    with pytest.raises(LogitlessError, match=r'entropy has no gradient.* Use install\("prime_rl", entropy_grad=True\)'):
        (out["logprobs"] + 0.01 * out["entropy"]).sum().backward()
    out = head(hidden, labels, temperature)
    with pytest.raises(LogitlessError, match="entropy has no gradient"):
        torch.autograd.grad((out["logprobs"] + out["entropy"]).sum(), [head.weight])
    out = head(hidden, labels, temperature)
    (out["logprobs"] + 0.01 * out["entropy"].detach()).sum().backward()
    with torch.no_grad():
        assert not head(hidden, labels, temperature)["entropy"].requires_grad


def test_entropy_is_trained_on_request():
    """prime-rl refuses a gradient of entropy; with entropy_grad=True there is one, and it is right."""
    head = heads()["plain"]
    hidden, labels, temperature, upstream = batch(torch.float32)
    with pytest.raises(AssertionError):
        head(hidden, labels, temperature)["entropy"].sum().backward()
    logitless.install("prime_rl", entropy_grad=True)
    plain = heads()["plain"].weight
    found, wanted = [], []
    for weight, results in ((head.weight, found), (plain, wanted)):
        if results is found:
            entropy = head(hidden, labels, temperature)["entropy"]
        else:
            entropy = truth(hidden, weight, labels, temperature, None, torch.float32)[1]
        results += torch.autograd.grad(entropy, [weight], upstream[1].to(entropy))
    leaf = plain.detach().double().requires_grad_()
    exact = truth(hidden.double(), leaf, labels, temperature, None, torch.float64)[1]
    (right,) = torch.autograd.grad(exact, [leaf], upstream[1].double())
    assert_gradient_close_to_truth(found[0], right, wanted[0])


def test_what_is_left_to_the_host_and_what_is_refused():
    head = heads()["plain"]
    hidden, labels, temperature, _ = batch(torch.float32)
    before = type(head).forward
    logitless.install("prime_rl")
    for given, why in (((), "no labels"), ((labels,), "no temperature")):
        with pytest.raises(AssertionError):
            head(hidden, *given)
        assert logitless.status().hosts[0].replaced[0].why[why] == 1
    with pytest.raises(LogitlessError, match=r"FusedOutputLinear\.forward: labels must be \[2, 13\] but is \[2, 12\]"):
        head(hidden, labels[:, 1:], temperature)
    with pytest.raises(LogitlessError, match=r"temperature must be \[2, 13\] but is \[13\]"):
        head(hidden, labels, temperature[0])
    # prime-rl lays labels and temperatures out in rows, whatever their shapes.
    wanted = head(hidden, labels, temperature)["logprobs"]
    assert torch.equal(head(hidden, labels.flatten(), temperature.reshape(S, B))["logprobs"], wanted)
    assert head(hidden[:, :0], labels[:, :0], temperature[:, :0])["logprobs"].shape == (B, 0)
    logitless.uninstall("prime_rl")
    assert type(head).forward is before


def mask_of(labels: Tensor) -> Tensor:
    """Ids that a sampler kept: some padded, one of the label alone, one without the label, one of none."""
    torch.manual_seed(9)
    mask = torch.stack([torch.randperm(V)[:5] for _ in range(B * S)]).view(B, S, 5)
    mask[..., 0] = labels
    mask[0, :, 3:] = -1
    mask[1, 2, 1:] = -1
    mask[1, 4, 0] = (labels[1, 4] + 1) % V
    mask[1, 5] = -1
    return mask.int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sampling_mask(dtype):
    head = heads(dtype)["plain"]
    if not takes(type(head).forward, "sampling_mask"):
        pytest.skip("this prime-rl has no sampling_mask")
    hidden, labels, temperature, upstream = batch(dtype)
    mask = mask_of(labels)
    replayed = (mask == labels[..., None]).any(-1)
    assert replayed.sum() == B * S - 2

    def scored() -> tuple[dict, list[Tensor]]:
        leaf = hidden.clone().requires_grad_()
        out = head(leaf, labels, temperature, sampling_mask=mask)
        return out, list(torch.autograd.grad(out["logprobs"], [leaf, head.weight], upstream[0]))

    theirs, their_gradients = scored()
    logitless.install("prime_rl")
    ours, our_gradients = scored()
    assert logitless.status().hosts[0].passed_on == 0
    leaves = [x.detach().double().requires_grad_() for x in (hidden, head.weight)]
    logits = leaves[0] @ leaves[1].T
    logits = (logits + (logits.detach().to(dtype).double() - logits.detach())) / temperature[..., None].double()
    kept = torch.zeros(B, S, V + 1).scatter(-1, mask.long() % (V + 1), 1.0)[..., :V].bool() | ~replayed[..., None]
    exact = logits.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    gradients = torch.autograd.grad(exact, leaves, upstream[0].double())
    assert_close_to_truth(ours["logprobs"], exact.detach(), theirs["logprobs"])
    log_p = logits.detach().log_softmax(-1)
    assert_close_to_truth(ours["entropy"], -(log_p.exp() * log_p).sum(-1), theirs["entropy"])
    for mine, right, other in zip(our_gradients, gradients, their_gradients, strict=True):
        assert_gradient_close_to_truth(mine, right, other)
    with pytest.raises(AssertionError, match="softcap"):
        heads(dtype)["gemma"](hidden, labels, temperature, sampling_mask=mask)


def test_a_temperature_in_half_precision_is_inverted_as_the_host_inverts_it():
    """FSDP2 casts it with the other inputs; prime-rl's 1 / T is then rounded, too. ``accurate`` is without both."""
    head = heads(torch.bfloat16)["plain"]
    hidden, labels, temperature, _ = batch(torch.bfloat16)
    temperature = temperature.bfloat16()
    with torch.no_grad():
        theirs = head(hidden, labels, temperature)["logprobs"]
        logitless.install("prime_rl")
        ours = head(hidden, labels, temperature)["logprobs"]
        logitless.uninstall("prime_rl")
        logitless.install("prime_rl", accurate=True)
        accurate = head(hidden, labels, temperature)["logprobs"]
    exact = (hidden.double() @ head.weight.detach().double().T / temperature[..., None].double()).log_softmax(-1)
    exact = exact.gather(-1, labels[..., None])[..., 0]
    assert (ours - theirs).abs().max() < 1e-5
    assert (accurate - exact).abs().max() < 1e-5
    assert (theirs - exact).abs().max() > 5e-3


def test_autocast_rounds_as_in_the_host():
    head = heads()["plain"]
    hidden, labels, temperature, upstream = batch(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        theirs, _ = run(head, hidden, labels, temperature, upstream[0])
        logitless.install("prime_rl")
        ours, gradients = run(head, hidden, labels, temperature, upstream[0])
    again, _ = run(head, hidden, labels, temperature, upstream[0])
    assert [x.dtype for x in gradients] == [torch.float32] * 2
    assert (theirs["logprobs"] - ours["logprobs"]).abs().max() < 1e-5
    assert (theirs["logprobs"] - again["logprobs"]).abs().max() > 1e-3


def run_sharded(rank: int, world: int) -> None:
    """FSDP2, as prime-rl shards its heads: the weight is whole inside forward, its gradient comes back in parts."""
    hidden, labels, temperature, upstream = batch(torch.float32)
    alone, head = heads()["plain"], fully_shard(heads()["plain"])
    logitless.install("prime_rl")
    _, gradients = run(alone, hidden, labels, temperature, upstream[0])
    out = head(hidden, labels, temperature)
    (out["logprobs"] * upstream[0]).sum().backward()
    assert logitless.status().hosts[0].calls == 2
    logitless.uninstall("prime_rl")
    # Both ranks have the same batch, and the mean of two equal gradients is that gradient.
    assert torch.equal(head.weight.grad.full_tensor(), gradients[1])


def test_sharded_by_fsdp(ranks):
    ranks(run_sharded, 2)


def run_in_half_precision(rank: int, world: int) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs and the gradient of a head in bfloat16 under FSDP2, which casts the temperature too, before and after
    install."""
    hidden, labels, temperature, upstream = batch(torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    # prime-rl's own head returns a view.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    for installed in (False, True):
        head = fully_shard(heads()["plain"], mp_policy=policy)
        if installed:
            logitless.install("prime_rl")
        out = head(hidden, labels, temperature)
        (out["logprobs"] * upstream[0]).sum().backward()
        found.append([out["logprobs"].detach().float(), head.weight.grad.full_tensor()])
    logitless.uninstall("prime_rl")
    return found[0], found[1]


def test_half_precision_under_fsdp(ranks):
    """At temperatures other than 1: log-probs as the host's, whose 1 / T is rounded, gradients no further off."""
    hidden, labels, temperature, upstream = batch(torch.bfloat16)
    weight = heads(torch.bfloat16)["plain"].weight.detach().double().requires_grad_()
    rounded = (1 / temperature.bfloat16()).double()
    logits = hidden.double() @ weight.T
    logits = logits + (logits.detach().to(torch.bfloat16).double() - logits.detach())
    log_p = (logits * rounded[..., None]).log_softmax(-1)
    exact = log_p.gather(-1, labels[..., None])[..., 0]
    (gradient,) = torch.autograd.grad((exact * upstream[0].double()).sum(), weight)
    for theirs, ours in ranks(run_in_half_precision, 2):
        assert (ours[0] - theirs[0]).abs().max() < 1e-5
        assert_close_to_truth(ours[0], exact.detach(), theirs[0])
        assert_gradient_close_to_truth(ours[1], gradient, theirs[1])
