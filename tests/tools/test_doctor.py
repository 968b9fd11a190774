"""``logitless doctor``: it finds what is there, and what is wrong is found."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

import logitless
from logitless.backends import tiled
from logitless.backends.triton import launching
from logitless.errors import LogitlessError
from logitless.tools import doctor
from logitless.tools.doctor import examine

CPU = torch.device("cpu")


@pytest.fixture
def _plain_torch_only(monkeypatch):
    """Triton's interpreter takes seconds, and so do the imports of frameworks."""
    monkeypatch.setattr(doctor, "NAMES", ("reference", "tiled"))
    monkeypatch.setattr(doctor, "HOSTS", ())


@pytest.mark.usefixtures("interpreted")
def test_every_backend_that_runs_is_exact_here(monkeypatch):
    monkeypatch.setattr(doctor, "HOSTS", ())
    findings = examine(CPU)
    # The suite runs Triton's kernels in its interpreter.
    assert [(b.name, b.runs) for b in findings.backends] == [("reference", True), ("tiled", True), ("triton", True)]
    assert findings.backends[2].reason == "in Triton's interpreter"
    tried = {(f.backend, f.path, f.dtype) for f in findings.exactness}
    assert len(tried) == 3 * 2 * 2
    assert findings.ok, findings.exactness
    assert all(f.value > 0 and f.gradient > 0 for f in findings.exactness)
    assert findings.chosen.startswith("tiled: the logits are on cpu")
    assert findings.versions["torch"] == torch.__version__
    assert findings.device.startswith("cpu (")


@pytest.mark.usefixtures("_plain_torch_only")
def test_it_can_be_printed_as_json():
    text = json.dumps(examine(CPU).as_json())
    fields = json.loads(text)
    assert fields["ok"] is True
    assert fields["exactness"][0]["ok"] is True
    assert {"versions", "device", "backends", "hosts", "engines"} <= set(fields)


@pytest.mark.usefixtures("_plain_torch_only")
def test_a_wrong_gradient_is_found(monkeypatch):
    gradient = tiled.gradient

    def off_by_little(problem, norm, coef, out, out_index):
        gradient(problem, norm, coef, out, out_index)
        out *= 1.0001

    monkeypatch.setattr(tiled, "gradient", off_by_little)
    findings = examine(CPU)
    wrong = {(f.backend, f.dtype) for f in findings.exactness if not f.ok}
    assert wrong == {("tiled", "float32")}
    assert not findings.ok


class _Scaled(torch.autograd.Function):
    """A tensor unchanged, and its gradient multiplied."""

    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.by, None


@pytest.mark.usefixtures("_plain_torch_only")
@pytest.mark.parametrize("by", [1.02, float("nan")])
@pytest.mark.parametrize("which", [0, 1], ids=["hidden", "weight"])
def test_the_worst_gradient_counts(monkeypatch, which: int, by: float):
    """Wrong in one operand alone, whether it comes first or last."""

    def wrong(*operands):
        return logitless.Logits(*[_Scaled.apply(x, by) if i == which else x for i, x in enumerate(operands)])

    monkeypatch.setattr(doctor, "Logits", wrong)
    found = {f.path: f for f in examine(CPU).exactness if f.dtype == "float32"}
    assert found["logits"].ok
    assert not found["hidden states"].ok
    assert found["hidden states"].gradient == pytest.approx(by - 1, rel=1e-2, nan_ok=True)


@pytest.mark.usefixtures("_plain_torch_only")
@pytest.mark.parametrize("off", [0.01, float("nan")])
@pytest.mark.parametrize("which", ["logprob", "entropy"])
def test_a_wrong_value_is_found(monkeypatch, which: str, off: float):
    right = doctor.logprobs

    def shifted(*args, **kwargs):
        out = right(*args, **kwargs)
        return out._replace(**{which: getattr(out, which) + off})

    monkeypatch.setattr(doctor, "logprobs", shifted)
    wrong = [f for f in examine(CPU).exactness if not f.ok]
    assert {f.path for f in wrong} == {"logits", "hidden states"}
    # The gradient of a shift is nothing: the values alone gave it away.
    assert all(f.gradient <= doctor.GRADIENT_TOLERANCE[getattr(torch, f.dtype)] for f in wrong)


@pytest.mark.usefixtures("_plain_torch_only")
def test_what_is_raised_is_a_finding(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(tiled, "statistics", broken)
    failures = {f.failure for f in examine(CPU).exactness if f.backend == "tiled"}
    assert failures == {"RuntimeError: no such instruction"}


@pytest.mark.parametrize(
    ("value", "gradient", "ok"),
    [
        (1e-5, 1e-5, True),
        (1.01e-5, 0.0, False),
        (0.0, 1.01e-5, False),
        (None, 0.0, False),
        (0.0, None, False),
        (None, None, False),
    ],
)
def test_a_finding_is_right_up_to_the_tolerance(value: float | None, gradient: float | None, ok: bool):
    found = doctor.ExactnessFinding("logits", "tiled", "float32", value, gradient, "it failed")
    assert found.ok is ok
    whole = value is not None and gradient is not None
    assert found.errors == ((f"{value:.1e}", f"{gradient:.1e}") if whole else ("it failed", ""))
    assert replace(found, dtype="bfloat16", failure=None).ok is (ok or (value == 0.0 and gradient is not None))
    assert whole or replace(found, failure=None).errors == ("", "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", ["logits", "hidden states"])
def test_the_truth_is_that_of_the_rounded_operands(path: str, dtype: torch.dtype):
    """By hand, in float64: log-prob, entropy, and the gradients of both together."""
    draw = torch.Generator().manual_seed(0)
    sizes = {"logits": (37, 1003), "hidden": (37, 24), "weight": (1003, 24)}
    spreads = {"logits": 8.0, "hidden": 2.0, "weight": 1.0}
    given = {name: torch.randn(size, generator=draw) * spreads[name] for name, size in sizes.items()}
    target = torch.randint(1003, (37,), generator=draw)
    of_logprob, of_entropy = (torch.randn(37, generator=draw).double()[:, None] for _ in range(2))
    x, h, w = (given[name].to(dtype).double() for name in sizes)
    bent = torch.tanh((x if path == "logits" else h @ w.T) / 25.0)
    logp = torch.log_softmax(25.0 * bent / 0.7, -1)
    p, hit = logp.exp(), torch.nn.functional.one_hot(target, 1003)
    entropy = -(p * logp).sum(-1, keepdim=True)
    slope = of_logprob * (hit - p) - of_entropy * p * (logp + entropy)
    dz = slope * (1 - bent**2) / 0.7
    wanted = [(hit * logp).sum(-1), entropy.squeeze(1), *([dz] if path == "logits" else [dz @ w, dz.T @ h])]
    found = doctor._results(path, None, dtype, CPU)
    assert [y.dtype for y in found] == [torch.float64] * len(wanted)
    for ours, truth in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-12)


def test_a_backend_that_cannot_be_imported_says_why(monkeypatch):
    kernels = launching._kernels
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    kernels.cache_clear()
    try:
        found = doctor._backend("triton", CPU)
    finally:
        kernels.cache_clear()
    assert (found.runs, found.reason) == (
        False,
        'backend="triton": Triton is not installed. Install it, or logitless with its extra [triton].',
    )


def test_hosts_have_a_version_or_none(monkeypatch):
    found = doctor._host("transformers")
    assert found.found == pytest.importorskip("transformers").__version__
    assert found.tested
    assert found.installs
    assert found.verdict.startswith("would install")
    assert not logitless.status().hosts
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert doctor._host("transformers").found is None


def test_engines_that_are_not_here(monkeypatch):
    monkeypatch.setattr(doctor, "is_there", lambda name: False)
    for name in ("sglang", "vllm"):
        found = doctor._engine(name)
        assert (found.found, found.installs, found.verdict) == (None, None, "")
        assert found.tested


def test_an_engine_without_a_version_is_there_whatever_the_environment_asks_for(monkeypatch):
    """With a wrong list of parts it was said not to be installed."""
    monkeypatch.setattr(doctor, "is_there", lambda name: True)
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    monkeypatch.setenv("LOGITLESS_ENGINE", "nonsense")
    found = doctor._engine("vllm")
    assert (found.found, found.installs) == ("of unknown version", False)
    assert "nonsense" in found.verdict


def test_a_host_that_would_be_refused_says_why(monkeypatch):
    from logitless.adapters import transformers

    pytest.importorskip("transformers")
    changed = [replace(x, signature="(nothing)") for x in transformers.HOST.replacements({"audit": 0})]
    host = replace(transformers.HOST, replacements=lambda options: changed)
    monkeypatch.setattr(transformers, "HOST", host)
    found = doctor._host("transformers")
    assert found.installs is False
    assert "has a signature that this adapter does not know" in found.verdict


def test_a_host_whose_parent_package_is_missing(monkeypatch):
    """``find_spec("megatron.core")`` raises where there is no megatron, and took the whole report down with it."""
    real = doctor.importlib.util.find_spec

    def without_megatron(name, package=None):
        if name.startswith("megatron."):
            raise ModuleNotFoundError("No module named 'megatron'", name="megatron")
        return None if name == "megatron" else real(name, package)

    monkeypatch.setattr("importlib.util.find_spec", without_megatron)
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    assert doctor._host("megatron").found is None
    with pytest.raises(LogitlessError, match="the package megatron-core is not installed in this environment"):
        logitless.install("megatron")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_an_error():
    with pytest.raises(LogitlessError, match='device is "cuda" but torch sees no CUDA device'):
        examine(torch.device("cuda"))


@pytest.mark.parametrize(
    ("head", "wanted"), [("float32", "float32"), ("bfloat16", "deferred"), ("float16", "deferred")]
)
def test_which_way_logits_go(monkeypatch, head, wanted):
    """Of a host that defers them, and of one that has none to defer."""
    pytest.importorskip("trl")
    monkeypatch.setattr(doctor, "NAMES", ())
    monkeypatch.setattr(doctor, "HOSTS", ("transformers", "trl"))
    transformers, trl = examine(CPU, head).hosts
    assert f"the engine's head is {head}: install with logits='{wanted}'" in trl.verdict
    assert "logits: " in trl.verdict
    assert "logits" not in transformers.verdict
    assert "engine's head" not in examine(CPU).hosts[1].verdict


def test_a_head_of_another_dtype_is_refused():
    with pytest.raises(LogitlessError, match=r"doctor: engine_head.*float32.*int8"):
        examine(CPU, "int8")
