"""The loop: right providers are timed, wrong or failing ones are recorded, and the run goes on."""

import json

import pytest
import torch

from benchmarks.bench.__main__ import main
from benchmarks.bench.cases import CASES
from benchmarks.bench.linear_providers import LINEAR_PROVIDERS
from benchmarks.bench.providers import PROVIDERS, Provider, Scores
from benchmarks.bench.run import Request, Selection, run
from logitless import LogitlessError

CPU = torch.device("cpu")
GOOD = ("torch", "logitless", "logitless-overwrite")


@pytest.fixture(autouse=True)
def _small_bandwidth_buffer(monkeypatch):
    monkeypatch.setattr("logitless.tools.stopwatch.CPU_COPY_BYTES", 1 << 20)


def measure(case, providers):
    (records,) = run(Selection([CASES[case]], providers, CPU, repeats=2, linear_providers=providers))
    return {record.provider: record for record in records}


def spoiled(change, providers=PROVIDERS, **fields):
    """Plain torch with its results changed, as a provider."""
    score = providers["torch"].load()
    return Provider(lambda: lambda batch, *inputs: change(score(batch, *inputs)), **fields)


def raising(error):
    def load():
        def score(batch, logits):
            raise error

        return score

    return Provider(load)


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("smoke")])
def test_every_right_provider_is_timed(case):
    records = measure(case, {name: PROVIDERS[name] for name in GOOD})
    for record in records.values():
        assert record.status == "ok", record.detail
        assert record.repeats == 2
        assert 0 < record.forward_ms <= record.total_ms
        assert record.ratio == pytest.approx(record.total_ms / record.floor_ms)
        assert record.peak_bytes > 0
    assert records["logitless-overwrite"].peak_bytes <= records["logitless"].peak_bytes


LINEAR_SMOKE = [name for name in CASES if name.startswith("linear-smoke")]


@pytest.mark.parametrize("case", LINEAR_SMOKE)
def test_every_right_provider_is_timed_from_hidden_states(case):
    good = ("torch", "logitless", "logitless-logits")
    for record in measure(case, {name: LINEAR_PROVIDERS[name] for name in good}).values():
        assert record.status == "ok", record.detail
        assert record.repeats == 2
        assert 0 < record.forward_ms <= record.total_ms
        assert record.floor_ms == record.gemm_ms[CASES[case].num_gemms - 1]
        assert record.forward_floor_ms == record.gemm_ms[0]
        assert record.ratio == pytest.approx(record.total_ms / record.floor_ms)
        assert record.peak_bytes > 0
        assert (record.errors["weight"] is None) == (not CASES[case].backward or CASES[case].frozen)


class Leak(torch.autograd.Function):
    """The identity, with a gradient that is 1 + ``by`` times the right one."""

    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * (1 + ctx.by), None


def leaking(which, by, **fields):
    """Plain torch with a wrong gradient of one of its inputs, as a provider."""
    score = LINEAR_PROVIDERS["torch"].load()

    def spoil(batch, *inputs):
        return score(batch, *(Leak.apply(x, by) if i == which else x for i, x in enumerate(inputs)))

    return Provider(lambda: spoil, **fields)


@pytest.mark.parametrize(
    ("provider", "what"),
    [
        (spoiled(lambda s: Scores(s.logprob + 1e-3, s.entropy), LINEAR_PROVIDERS), "log-prob is off by 1.0e-03"),
        (spoiled(lambda s: Scores(s.logprob, s.entropy * 1.01), LINEAR_PROVIDERS), "entropy is off by"),
        (leaking(0, 1e-3), "gradient is off by 1.0e-03, allowed 1.0e-04"),
        (leaking(1, 1e-3), "weight's gradient is off by 1.0e-03, allowed 1.0e-04"),
        (leaking(1, 1e-3), "weight's gradient at no target is off by 1.0e-03"),
        (leaking(1, 1e-3, rounds=True), "weight's gradient is off by 1.0e-03, allowed 1.0e-04"),
    ],
)
def test_a_wrong_provider_from_hidden_states_gets_no_time(provider, what):
    record = measure("linear-smoke-grad", {"bad": provider})["bad"]
    assert record.status == "wrong"
    assert what in record.detail
    assert record.total_ms is None
    assert record.floor_ms is not None


def test_rounding_is_allowed_to_those_who_say_so():
    case, plain = "linear-smoke-bf16-grad-peaked", LINEAR_PROVIDERS["torch"]
    records = measure(case, {"says so": plain, "does not": Provider(plain.load)})
    assert records["says so"].status == "ok"
    assert records["does not"].status == "wrong"


def test_a_mean_loss_is_checked_as_one():
    def load():
        score = LINEAR_PROVIDERS["torch"].load()
        return lambda batch, *inputs: Scores(score(batch, *inputs).logprob.mean(), None)

    record = measure("linear-smoke-grad", {"mean": Provider(load, "mean loss")})["mean"]
    assert (record.status, record.computes) == ("ok", "mean")
    assert record.errors["weight_rest"] < 1e-4


def test_a_case_without_providers_of_its_kind_is_left_out():
    assert list(run(Selection([CASES["linear-smoke-grad"]], PROVIDERS, CPU, repeats=1))) == []


def test_overwriting_one_does_not_spoil_the_next():
    order = ["logitless-overwrite", "torch", "logitless-overwrite"]
    records = measure("smoke-fp32-grad", {f"{name}{i}": PROVIDERS[name] for i, name in enumerate(order)})
    assert {record.status for record in records.values()} == {"ok"}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda s: Scores(s.logprob + 1e-3, s.entropy), "log-prob is off by 1.0e-03"),
        (lambda s: Scores(s.logprob, s.entropy * 1.01), "entropy is off by"),
        (lambda s: Scores(s.logprob + 0.01 * (s.logprob - s.logprob.detach()), s.entropy), "gradient is off by"),
        (lambda s: Scores(s.logprob * torch.nan, s.entropy), "log-prob is off by nan"),
        (lambda s: Scores(s.logprob, s.entropy.detach()), "gradient is off by"),
    ],
)
def test_a_wrong_provider_gets_no_time(change, what):
    record = measure("smoke-fp32-grad", {"bad": spoiled(change)})["bad"]
    assert record.status == "wrong"
    assert what in record.detail
    assert record.total_ms is None


def test_half_precision_results_are_held_to_their_own_rounding():
    halved = spoiled(lambda s: Scores(s.logprob.bfloat16(), s.entropy))
    record = measure("smoke-fp32-value", {"halved": halved})["halved"]
    assert record.status == "ok"
    assert record.detail == "results in bfloat16"


def test_failures_are_recorded_and_the_run_goes_on():
    providers = {
        "full": raising(torch.OutOfMemoryError("Tried to allocate 9 GiB\nmore")),
        "broken": raising(KeyError("x")),
        "gpu": Provider(lambda: pytest.fail("was loaded"), cuda_only=True),
        "torch": PROVIDERS["torch"],
    }
    records = measure("smoke-fp32-grad", providers)
    assert (records["full"].status, records["full"].detail) == ("out of memory", "Tried to allocate 9 GiB")
    assert (records["broken"].status, records["broken"].detail) == ("failed", "KeyError: 'x'")
    assert records["gpu"].status == "absent"
    assert records["torch"].status == "ok"


def test_log_prob_only_is_checked_without_entropy():
    def load():
        score = PROVIDERS["torch"].load()
        return lambda batch, logits: Scores(score(batch, logits).logprob, None)

    record = measure("smoke-fp32-grad", {"ce": Provider(load, "log-prob")})["ce"]
    assert (record.status, record.computes) == ("ok", None)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (Request(device="tpu"), "device must be"),
        (Request(repeats=0), "repeats must be 1 or more"),
        (Request(providers=["nobody"]), "no provider matches 'nobody'"),
    ],
)
def test_a_bad_request_is_refused_before_anything_runs(request_, text):
    with pytest.raises(LogitlessError, match=text):
        request_.resolve()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused():
    with pytest.raises(LogitlessError, match="torch sees no CUDA device"):
        Request(device="cuda").resolve()


def test_the_plain_command_prints_the_table_last(tmp_path, capsys):
    out = tmp_path / "cpu.jsonl"
    arguments = ["--case", "smoke-fp32-value", "--provider", "torch", "logitless", "--repeats", "1", "--device", "cpu"]
    assert main([*arguments, "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("smoke-fp32-value: T=96 V=1000")
    assert "checking logitless" in printed.err
    assert [json.loads(line)["provider"] for line in out.read_text().splitlines()] == ["torch", "logitless"]


def test_the_plain_command_lists_and_explains(capsys):
    assert main(["--list"]) == 0
    assert "huge-fp32-grad" in capsys.readouterr().out
    assert main(["--case", "nope", "--device", "cpu"]) == 2
    assert "no case matches 'nope'" in capsys.readouterr().err
