"""A host that this package does not know: described by its user, installed, called, and put back."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

import logitless
from logitless import LogitlessError
from logitless.adapters import HOSTS, Host, Option, Replacement

MATHS = """
def score(logits, ids):
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
"""
USER = "from toyrl.maths import score\n"


@pytest.fixture
def toyrl(monkeypatch):
    """Modules of a framework that is nowhere but here."""
    modules = {name: ModuleType(name) for name in ("toyrl", "toyrl.maths", "toyrl.user")}
    modules["toyrl"].__version__ = "1.2.3"
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    exec(MATHS, vars(modules["toyrl.maths"]))
    exec(USER, vars(modules["toyrl.user"]))
    return modules


def make_score(original, options):
    def score(logits, ids):
        out = logitless.logprobs(logits, ids, head=logitless.Head(temperature=options["temperature"]))
        options["audit"].of_logits("score", logits, ids, logprob=out.logprob)
        return out.logprob

    return score


def host(make=make_score) -> Host:
    score = Replacement("toyrl.maths", "score", "(logits, ids)", make, also_in=("toyrl.user",))
    options = {"temperature": Option(1.0, "divides the logits")}
    return Host(name="toyrl", package="toyrl", versions=("1.2",), replacements=lambda _: [score], options=options)


@pytest.mark.parametrize("handle", ["toyrl", host()], ids=["by name", "by host"])
def test_installed_called_and_put_back(toyrl, handle):
    maths, user = toyrl["toyrl.maths"], toyrl["toyrl.user"]
    before = dict(vars(maths)), dict(vars(user))
    logits, ids = torch.randn(5, 63, dtype=torch.float64), torch.randint(63, (5,))
    theirs = maths.score(logits, ids)
    report = logitless.install(host(), audit=2)
    assert (report.host, report.version) == ("toyrl", "1.2.3")
    assert maths.score is user.score is not before[0]["score"]
    for function in (maths.score, user.score):
        torch.testing.assert_close(function(logits, ids), theirs, atol=1e-14, rtol=0)
    (entry,) = logitless.status().hosts
    assert [(x.name, x.calls) for x in entry.replaced] == [("toyrl.maths.score", 2)]
    assert entry.audit.rows == 4
    logitless.uninstall(handle)
    assert (vars(maths), vars(user)) == before
    assert not logitless.status().hosts


def test_options_and_versions_are_checked(toyrl):
    with pytest.raises(LogitlessError, match=r'install\("toyrl"\): there is no option \'temperatur\'. Did you mean'):
        logitless.install(host(), temperatur=2.0)
    toyrl["toyrl"].__version__ = "2.0"
    with pytest.warns(UserWarning, match=r"version 2.0 was not tested \(tested: 1.2\)\. All signatures fit"):
        logitless.install(host())
    logitless.uninstall("toyrl")
    logitless.install(host(), temperature=2.0, any_version=True)
    logits = torch.randn(3, 7)
    ours = toyrl["toyrl.maths"].score(logits, torch.tensor([1, 2, 3]))
    torch.testing.assert_close(ours, (logits / 2).log_softmax(-1)[[0, 1, 2], [1, 2, 3]])


def test_two_hosts_of_one_name(toyrl):
    logitless.install(host())
    ours = toyrl["toyrl.maths"].score
    logitless.install(host())
    assert toyrl["toyrl.maths"].score is ours
    with pytest.raises(LogitlessError, match="another host of that name is installed"):
        logitless.install(host(make=lambda original, options: original))
    assert toyrl["toyrl.maths"].score is ours


def test_names_outside_the_package(toyrl):
    """Built-in names are what they were; an outside one is known while it is installed."""
    with pytest.raises(LogitlessError, match="install: there is no host 'toyrl'"):
        logitless.install("toyrl")
    with pytest.raises(LogitlessError, match="uninstall: there is no host 'toyrl'"):
        logitless.uninstall("toyrl")
    with pytest.raises(LogitlessError, match=r'uninstall\("toyrl"\): it is not installed'):
        logitless.uninstall(host())
    logitless.install(host())
    with pytest.raises(LogitlessError, match=r"no host 'toyr'. Did you mean 'toyrl'\? Known: .*toyrl"):
        logitless.uninstall("toyr")
    assert "toyrl" not in HOSTS


def test_the_log_has_one_line_per_process(toyrl, caplog, monkeypatch):
    """What was installed, on which versions, and whether logits are computed; not again for the same."""
    monkeypatch.setattr("logitless.notes._LOGGED", set())
    with caplog.at_level("INFO", logger="logitless"):
        for _ in range(2):
            logitless.install(host())
            logitless.uninstall("toyrl")
    lines = [record.getMessage() for record in caplog.records]
    (line,) = [line for line in lines if "installed toyrl 1.2.3, 1 functions replaced" in line]
    assert line.startswith(f"logitless {logitless.__version__}: ")
    assert "logits are computed by the host's own head" in line
    assert f"torch {torch.__version__}" in line


def test_the_log_says_that_a_model_is_deferred(caplog, monkeypatch):
    monkeypatch.setattr("logitless.notes._LOGGED", set())
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9))
    with caplog.at_level("INFO", logger="logitless"), logitless.defer(model, head="1"):
        pass
    (line,) = [record.getMessage() for record in caplog.records]
    assert "deferred the head of Sequential, logits are not computed (torch " in line
