"""Installing into a made-up host: all or nothing, counted, audited, and put back."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
import threading

import pytest
import torch

import logitless
from logitless import Head, LogitlessError, VocabShard
from logitless.adapters import HOSTS
from logitless.adapters.audit import Audit
from logitless.adapters.host import Host, Option, Replacement
from logitless.adapters.patching import install_host, installed, uninstall_host
from logitless.spec import parse_memory

SCORE = "(logits, index, temperature=1.0)"


def make_score(original, options):
    return lambda logits, index, temperature=1.0: ("ours", options["flavour"], original(logits, index)[0])


def replacement(name="score", signature=SCORE, make=make_score, **more) -> Replacement:
    return Replacement(module=more.pop("module", "fakehost.maths"), name=name, signature=signature, make=make, **more)


def host(*replacements: Replacement, **more) -> Host:
    options = {"flavour": Option("plain", "which one"), "ratio": Option(0.5, "a number"), "extra": Option(None, "any")}
    settings = {"name": "fake", "package": "fakehost", "versions": ("2.4", "2.5"), "options": options} | more
    return Host(replacements=lambda options: list(replacements) or [replacement()], **settings)


def maths():
    return sys.modules["fakehost.maths"]


def test_install_and_uninstall(fakehost):
    before = maths().score
    report = install_host(host(), {"flavour": "odd"})
    assert maths().score(1, 2) == ("ours", "odd", "host")
    assert maths().score.__name__ == "score"
    assert (report.host, report.version, report.replaced[0].name) == ("fake", "2.5.1", "fakehost.maths.score")
    uninstall_host("fake")
    assert maths().score is before
    assert installed() == ()


def test_calls_are_counted(fakehost):
    install_host(host(replacement(), replacement("mean", "(x, *, scale=2.0)", lambda original, options: original)), {})
    for _ in range(3):
        maths().score(1, 2)
    assert [entry.calls for entry in installed()[0].replaced] == [3, 0]
    assert "fakehost.maths.score: 3 calls" in str(logitless.status())


def test_calls_left_to_the_host_are_counted_apart(fakehost):
    make = lambda original, options: lambda logits, index, **_: NotImplemented if index < 0 else "ours"  # noqa: E731
    install_host(host(replacement(make=make)), {})
    assert maths().score(1, 2) == "ours"
    assert maths().score(1, -2, temperature=0.5) == ("host", 1, -2, 0.5)
    assert "fakehost.maths.score: 2 calls, 1 passed on" in str(logitless.status())


def test_what_was_saved_is_an_estimate_by_count(fakehost, monkeypatch):
    """Of the largest call in training that was ours, where the benchmark has a figure for the host."""
    make = lambda original, options: lambda logits, index, **_: NotImplemented if index < 0 else "ours"  # noqa: E731
    install_host(host(replacement(make=make)), {})
    few, many, most = (torch.zeros(2, n, requires_grad=True) for n in (3, 10**6, 10**7))
    maths().score(few, 0)
    maths().score(logits=many, index=0)
    maths().score(most, -1)  # the host's
    maths().score(most.detach(), 0)  # no graph
    with torch.no_grad():
        maths().score(most, 0)
    assert installed()[0].replaced[0].logits == 2 * 10**6
    assert installed()[0].peak_saved is None
    assert "saved" not in str(logitless.status())
    monkeypatch.setattr("logitless.adapters.host._saved", lambda: {"fake": 6.5})
    assert installed()[0].peak_saved == 13 * 10**6
    told = str(logitless.status())
    assert "peak saved in training: about 12.4 MiB, an estimate: 6.5 bytes, as measured on a GPU" in told
    assert "for each of the 2,000,000 logits of the largest call" in told


def test_the_signature_of_another_attribute_may_be_checked(fakehost):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, chunk=2):
            return x + chunk

    maths().Function = Function
    kept = {"make": lambda original, _: lambda x: original(x) * 10, "signature_of": "Function.forward"}
    with pytest.raises(LogitlessError, match=r"Function.forward has a signature that this adapter does not know"):
        install_host(host(replacement("Function.apply", "(ctx, y)", **kept)), {})
    install_host(host(replacement("Function.apply", "(ctx, x, chunk=2)", **kept)), {})
    assert maths().Function.apply(torch.ones(1)).item() == 30
    uninstall_host("fake")
    assert "apply" not in vars(Function)
    assert maths().Function.apply(torch.ones(1)).item() == 3


def test_counting_from_many_threads_loses_nothing(fakehost):
    install_host(host(), {})
    threads = [threading.Thread(target=lambda: [maths().score(1, 2) for _ in range(500)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert installed()[0].replaced[0].calls == 4000


def test_names_held_by_value_are_rebound_and_put_back(fakehost):
    before = maths().score
    install_host(host(replacement(also_in=("fakehost.user", "fakehost.late"))), {})
    assert sys.modules["fakehost.user"].use(1)[0] == "ours"
    late = fakehost("fakehost.late")  # imported after installing: finds ours by itself
    assert late.score is maths().score
    uninstall_host("fake")
    assert sys.modules["fakehost.user"].score is before
    assert late.score is before


def test_methods(fakehost):
    trainer = maths().Trainer
    before = vars(trainer)["step"], vars(trainer)["weigh"], vars(trainer)["build"]
    step = replacement(
        "Trainer.step", "(self, batch, lr=0.1)", lambda original, _: lambda *a, **k: original(*a, **k)[:2]
    )
    weigh = replacement("Trainer.weigh", "(x)", lambda original, _: lambda x: (original(x), "ours"))
    build = replacement("Trainer.build", "(size)", lambda original, _: lambda size: (original(size), "ours"))
    install_host(host(step, weigh, build), {})
    assert trainer().step(7, lr=3) == ("host step", 7)
    assert trainer.weigh(4) == trainer().weigh(4) == (("host weigh", 4), "ours")
    assert trainer.build(5) == trainer().build(5) == (("Trainer", 5), "ours")
    assert maths().Kin().step(7) == ("host step", 7)
    uninstall_host("fake")
    assert (vars(trainer)["step"], vars(trainer)["weigh"], vars(trainer)["build"]) == before


def test_an_inherited_method_is_replaced_in_the_class_that_was_named(fakehost):
    install_host(
        host(replacement("Kin.step", "(self, batch, lr=0.1)", lambda *_: lambda self, batch, lr=0.1: "ours")), {}
    )
    assert maths().Kin().step(1) == "ours"
    assert maths().Trainer().step(1)[0] == "host step"
    uninstall_host("fake")
    assert "step" not in vars(maths().Kin)
    assert maths().Kin().step(1)[0] == "host step"


def test_installing_twice_is_harmless(fakehost):
    install_host(host(), {"flavour": "odd"})
    first = maths().score
    install_host(host(), {"flavour": "odd"})
    assert maths().score is first
    with pytest.raises(LogitlessError, match=r"already installed with other options: flavour='odd' \(now 'plain'\)"):
        install_host(host(), {})
    assert maths().score is first


def test_threads_install_once(fakehost):
    made = []
    ours = replacement(make=lambda original, options: made.append(1) or (lambda *args: "ours"))
    barrier, reports = threading.Barrier(6), []

    def run():
        barrier.wait()
        reports.append(install_host(host(ours), {}))

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reports) == 6
    assert maths().score(1, 2) == "ours"
    assert installed()[0].replaced[0].calls == 1
    uninstall_host("fake")
    assert maths().score(1, 2)[0] == "host"


BAD = {
    "signature": (
        replacement("mean", "(x, *, scale=3.0)"),
        r"maths.mean has a signature that this adapter does not know",
    ),
    "name": (replacement("meen"), "fakehost.maths has no meen"),
    "class": (replacement("Driver.step"), "fakehost.maths has no Driver.step"),
    "module": (replacement(module="fakehost.gone"), "cannot import fakehost.gone: No module named 'fakehost.gone'"),
}


@pytest.mark.parametrize("what", BAD)
def test_all_or_nothing(fakehost, what):
    before = dict(vars(maths()))
    bad, message = BAD[what]
    with pytest.raises(LogitlessError, match=message):
        install_host(host(replacement(), bad), {})
    assert vars(maths()) == before
    assert installed() == ()


def test_a_site_that_cannot_be_set_undoes_the_others(fakehost):
    class Stubborn(type):
        def __setattr__(cls, name, value):
            raise TypeError("no")

    class Closed(metaclass=Stubborn):
        def step(self, batch):
            return batch

    Closed.__dict__["step"].__module__ = "fakehost.maths"
    maths().Closed = Closed
    before = maths().score
    with pytest.raises(TypeError, match="no"):
        install_host(host(replacement(), replacement("Closed.step", "(self, batch)", lambda original, _: original)), {})
    assert maths().score is before
    assert installed() == ()


def test_optional_parts_are_reported(fakehost):
    gone = replacement(module="fakehost.gone", optional=True)
    report = install_host(host(replacement(), gone), {})
    assert report.missing == ("fakehost.gone: No module named 'fakehost.gone'",)
    assert "not there: fakehost.gone" in str(logitless.status())
    uninstall_host("fake")
    with pytest.raises(LogitlessError, match="none of its parts can be imported"):
        install_host(host(gone), {})


def test_only_the_functions_that_are_named_are_replaced(fakehost):
    make_mean = lambda original, options: lambda x, *, scale=2.0: "ours"  # noqa: E731
    both = host(replacement(), replacement(name="mean", signature="(x, *, scale=2.0)", make=make_mean))
    before = maths().score, maths().mean
    for name in ("mean", "maths.mean", "fakehost.maths.mean"):
        report = install_host(both, {"only": [name]})
        assert [x.name for x in report.replaced] == ["fakehost.maths.mean"]
        assert maths().score is before[0]
        assert maths().mean(3) == "ours"
        uninstall_host("fake")
    assert (maths().score, maths().mean) == before
    with pytest.raises(LogitlessError, match=r"only: no function 'means'. Did you mean 'mean'\? Known: mean, score\."):
        install_host(both, {"only": ["score", "means"]})
    for wrong in ("mean", [], [3]):
        with pytest.raises(LogitlessError, match=r"only must be a list of names of functions"):
            install_host(both, {"only": wrong})
    assert (maths().score, maths().mean) == before


def test_a_compiled_caller_breaks_its_graph_at_our_function(fakehost):
    install_host(
        host(replacement(make=lambda original, options: lambda logits, index, temperature=1.0: logits + 1)), {}
    )
    caller = lambda x: maths().score(2 * x, None) * 3  # noqa: E731
    x = torch.arange(3.0)
    compiled = torch.compile(caller, backend="eager")
    for calls in (1, 2, 3):
        assert compiled(x).tolist() == [3.0, 9.0, 15.0]
        assert installed()[0].calls == calls
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(caller, backend="eager", fullgraph=True)(x)


def test_a_package_that_is_not_there(fakehost):
    with pytest.raises(LogitlessError, match="the package no_such_package is not installed"):
        install_host(host(package="no_such_package"), {})


def test_unknown_options_and_types(fakehost):
    with pytest.raises(LogitlessError, match=r"no option 'flavor'. Did you mean 'flavour'\? Known: any_version, audit"):
        install_host(host(), {"flavor": "x"})
    for wrong in ({"flavour": 3}, {"audit": True}, {"any_version": 1}, {"ratio": "x"}, {"audit": 1.5}):
        (name,) = wrong
        with pytest.raises(LogitlessError, match=f"{name} must be of type"):
            install_host(host(), wrong)
    with pytest.raises(LogitlessError, match="audit: wanted a number of rows"):
        install_host(host(), {"audit": -1})
    report = install_host(host(), {"ratio": 1, "extra": "anything"})
    assert dict(report.options) == {
        "audit": 0,
        "any_version": False,
        "only": None,
        "flavour": "plain",
        "ratio": 1,
        "extra": "anything",
    }


def test_someone_elses_replacement_is_not_covered_up(fakehost):
    def impostor(logits, index, temperature=1.0):
        return "theirs"

    maths().score = impostor
    with pytest.raises(LogitlessError, match=r"score is not fakehost's own but .*impostor from .*test_install"):
        install_host(host(), {})


def test_a_holder_with_another_object_is_refused(fakehost):
    sys.modules["fakehost.user"].score = maths().mean
    before = maths().score
    with pytest.raises(LogitlessError, match=r"fakehost\.user\.score is not fakehost\.maths\.score but mean"):
        install_host(host(replacement(also_in=("fakehost.user",))), {})
    assert maths().score is before


def test_uninstall_refuses_what_is_no_longer_ours(fakehost):
    mean = replacement("mean", "(x, *, scale=2.0)", lambda original, _: lambda x: "ours")
    install_host(host(mean, replacement()), {})
    ours = maths().score

    def usurper(*args):
        return "theirs"

    maths().score = usurper
    with pytest.raises(
        LogitlessError, match=r"score is no longer ours: it was replaced by .*usurper from .*nothing was"
    ):
        uninstall_host("fake")
    assert maths().mean(1) == "ours"  # nothing was put back
    assert maths().score is usurper
    maths().score = ours
    uninstall_host("fake")
    assert maths().mean(1) == 2.0


def test_errors_of_ours_name_the_host_function(fakehost):
    def make(original, options):
        def score(logits, index, temperature=1.0):
            return logitless.logprobs(logits, index).logprob

        return score

    install_host(host(replacement(make=make)), {})
    with pytest.raises(LogitlessError, match=r"^fakehost\.maths\.score: logprobs: target 9 of row 0"):
        maths().score(torch.zeros(1, 4), torch.tensor([9]))


def test_unknown_hosts_are_refused_with_a_suggestion():
    with pytest.raises(LogitlessError, match=r"install: there is no host 'nemo-rl'. Did you mean 'nemo_rl'\?"):
        logitless.install("nemo-rl")
    with pytest.raises(LogitlessError, match=r"uninstall: there is no host 'TRL'"):
        logitless.uninstall("TRL")
    with pytest.raises(LogitlessError, match=r'uninstall\("trl"\): it is not installed. Installed: nothing.'):
        logitless.uninstall("trl")


def test_import_loads_no_host():
    hosts = [importlib.import_module(f"logitless.adapters.{name}").HOST for name in HOSTS]
    packages = sorted({host.package.split(".")[0] for host in hosts} | {"ray"})
    assert {"transformers", "trl", "megatron", "slime"} < set(packages)
    program = f"import sys, logitless; print(sorted(set({packages!r}) & set(sys.modules)), logitless.status())"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[] logitless: nothing is installed"


# The audit.


def rows_of(n=37, width=53, dtype=torch.float32):
    logits = (torch.randn(n, width, dtype=torch.float64) * 3).to(dtype)
    return logits, torch.randint(width, (n,))


HEADS = {
    "plain": Head(),
    "temperature": Head(temperature=0.7),
    "softcap": Head(softcap=5.0, scale=0.5),
    "padded": Head(vocab_size=50),
    "per row": Head(temperature=torch.linspace(0.5, 2, 37)),
}


@pytest.mark.parametrize("name", HEADS)
def test_audit_agrees_with_logprobs(name):
    logits, target = rows_of()
    out = logitless.logprobs(logits, target.clamp(max=49), entropy="value", head=HEADS[name])
    audit = Audit(rows=11)
    audit.of_logits("f", logits, target.clamp(max=49), logprob=out.logprob, entropy=out.entropy, head=HEADS[name])
    report = audit.report()
    assert report.rows == 22
    assert report.passed
    assert 0 < report.worst < 3e-6


def test_audit_of_hidden_states(monkeypatch):
    monkeypatch.setattr("logitless.adapters.audit.SLAB_BYTES", 5 * 8 * 7)  # slabs of five rows of the weight
    hidden, weight, bias = torch.randn(6, 6, 7), torch.randn(53, 7), torch.randn(53)
    target = torch.randint(53, (6, 6))
    logits = logitless.Logits(hidden, weight, bias=bias)
    out = logitless.logprobs(logits, target, entropy="value")
    audit = Audit(rows=36)
    audit.of_logits("f", logits, target, logprob=out.logprob, entropy=out.entropy)
    assert audit.report().rows == 72
    assert audit.report().worst < 3e-6
    with pytest.warns(RuntimeWarning, match="f logprob differs from float64"):
        audit.of_logits("f", logitless.Logits(hidden, weight), target, logprob=out.logprob)


def test_audit_warns_once_and_keeps_the_worst():
    logits, target = rows_of()
    logprob = logitless.logprobs(logits, target).logprob
    audit = Audit(rows=37)
    wrong = logprob.clone()
    wrong[5] += 0.25 * max(1.0, abs(float(logprob[5])))
    with pytest.warns(RuntimeWarning, match=r"g logprob differs from float64 by 0.25, above the tolerance 1.01e-05"):
        audit.of_logits("g", logits, target, logprob=wrong)
    audit.of_logits("h", logits, target, logprob=logprob)
    audit.of_logits("h", logits, target, logprob=logprob + 0.01)  # a second difference: no second warning
    report = audit.report()
    assert not report.passed
    assert report.where == "g logprob"
    assert report.rows == 111
    assert "ABOVE TOLERANCE" in str(report)


@pytest.mark.parametrize("off", [0.25, -0.25])
def test_audit_sees_too_much_and_too_little(off):
    logits, target = rows_of()
    logprob = logitless.logprobs(logits, target).logprob
    audit = Audit(rows=37)
    with pytest.warns(RuntimeWarning, match="differs from float64 by"):
        audit.of_logits("f", logits, target, logprob=logprob + off)
    assert not audit.report().passed
    assert audit.report().worst > 0.02


def test_audit_sees_what_is_not_finite():
    logits, target = rows_of()
    logprob = logitless.logprobs(logits, target).logprob
    audit = Audit(rows=37)
    with pytest.warns(RuntimeWarning, match="differs from float64 by nan"):
        audit.of_logits("f", logits, target, logprob=logprob.masked_fill(torch.arange(37) == 3, torch.nan))
    audit.of_logits("g", logits, target, logprob=logprob)
    assert not audit.report().passed
    assert audit.report().where == "f logprob"
    assert math.isnan(audit.report().worst)


def test_audit_sees_a_number_where_the_truth_is_none():
    logits, target = rows_of()
    logprob = logitless.logprobs(logits, target).logprob
    logits[3, 5] = torch.nan
    audit = Audit(rows=37)
    with pytest.warns(RuntimeWarning, match="differs from float64 by nan"):
        audit.of_logits("f", logits, target, logprob=logprob)
    assert not audit.report().passed
    # Where both are NaN, they agree.
    agreed = Audit(rows=37)
    agreed.of_logits("f", logits, target, logprob=logitless.logprobs(logits, target).logprob)
    assert agreed.report().passed


def test_audit_leaves_rows_without_a_target_and_empty_calls_alone():
    logits, target = rows_of()
    target[::2] = -100
    target[1] = 99
    audit = Audit(rows=37)
    out = logitless.logprobs(logits, target.masked_fill(target == 99, -100))
    audit.of_logits("f", logits, target, logprob=out.logprob.masked_fill(target == 99, 7.0))
    assert audit.report().rows == 17
    assert audit.report().worst < 3e-6


def test_audit_of_nothing():
    audit = Audit(rows=3)
    audit.of_logits("f", torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), logprob=torch.zeros(0))
    assert audit.report().rows == 0
    assert str(audit.report()) == "nothing compared yet"
    assert not Audit()


def test_audit_does_not_touch_the_random_state():
    logits, target = rows_of()
    before = torch.get_rng_state()
    Audit(rows=5).of_logits("f", logits, target, logprob=logitless.logprobs(logits, target).logprob)
    assert torch.equal(torch.get_rng_state(), before)


def test_audit_is_reported_by_status(fakehost):
    def make(original, options):
        def score(logits, index, temperature=1.0):
            out = logitless.logprobs(logits, index)
            options["audit"].of_logits("score", logits, index, logprob=out.logprob)
            return out.logprob

        return score

    install_host(host(replacement(make=make)), {"audit": 4})
    maths().score(*rows_of())
    maths().score(*rows_of())
    assert installed()[0].audit.rows == 8
    assert "audit: 8 results compared, worst difference" in str(logitless.status())


def audit_a_shard(rank, world):
    import torch.distributed as dist

    torch.manual_seed(3)
    whole, target = torch.randn(23, 31), torch.randint(29, (23,))
    bounds = [0, 5, 31]
    shard = VocabShard(bounds[rank], bounds[rank + 1], dist.group.WORLD)
    head = Head(vocab_size=29, temperature=0.8)
    logits = logitless.Logits.given(whole[:, shard.start : shard.stop], shard=shard)
    out = logitless.logprobs(logits, target, entropy="value", head=head)
    audit = Audit(rows=9)
    audit.of_logits("f", logits, target, logprob=out.logprob, entropy=out.entropy, head=head)
    return audit.report()


def test_audit_over_a_vocabulary_group(ranks):
    reports = ranks(audit_a_shard, 2)
    assert [report.rows for report in reports] == [18, 18]
    assert all(report.worst < 3e-6 for report in reports)


@pytest.mark.parametrize(
    ("option", "given"),
    [
        (Option("256MiB", "working memory", check=parse_memory), "lots"),
        (Option(1.0, "a factor", check=lambda x: Head(scale=x)), 0.0),
        (Option(1.0, "a factor", check=lambda x: Head(scale=x)), "1"),
    ],
)
def test_a_bad_value_of_an_option_is_refused_before_anything_is_replaced(fakehost, option: Option, given):
    with pytest.raises(LogitlessError, match=rf'install\("fake"\): .*{given!r}'):
        install_host(host(options={"chosen": option}), {"chosen": given})
    assert installed() == ()
    install_host(host(options={"chosen": option}), {"chosen": option.default})


@pytest.mark.parametrize("name", HOSTS)
def test_working_memory_is_checked_by_every_host_that_has_it(name: str):
    options = importlib.import_module(f"logitless.adapters.{name}").HOST.options
    assert all(option.check is parse_memory for key, option in options.items() if key == "memory")
