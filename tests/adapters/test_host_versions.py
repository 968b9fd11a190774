"""Versions and signatures: known ones, longer ones and other ones; calls that are handed over by name or passed on."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator

import pytest

import logitless
from logitless import LogitlessError
from logitless.adapters import HOSTS
from logitless.adapters.host import Host, PassOn, Replacement, resolve_options
from logitless.adapters.patching import install_host, installed, try_host
from logitless.adapters.signatures import covers, version_of

KNOWN = {"2.5": "(logits, index, temperature=1.0)", "2.0 - 2.4": "(index, logits)", "1": None}


def make_score(original, options):
    def score(logits, index, temperature=1.0):
        return PassOn("negative") if index < 0 else ("ours", logits, index, temperature)

    return score


def host(signature=KNOWN, versions=("1 - 2.5",), make=make_score, **more) -> Host:
    settings = {"module": "fakehost.maths", "name": "score"} | more
    made = Replacement(signature=signature, make=make, **settings)
    mean = Replacement("fakehost.maths", "mean", "(x, *, scale=2.0)", lambda original, _: lambda x, *, scale=2.0: x)
    return Host(name="fake", package="fakehost", versions=versions, replacements=lambda options: [made, mean])


@pytest.fixture
def score(fakehost):
    """Gives the host's function another body, as another version of the host would."""
    maths = sys.modules["fakehost.maths"]

    def define(text: str | None):
        if text is None:
            del maths.score
        else:
            exec(f"def score{text}: return ('host', locals())", vars(maths))
        del sys.modules["fakehost.user"]
        return maths

    return define


def test_ranges():
    for version in ("0.16.0", "0.16.1rc1", "0.17", "0.19.2+cu12"):
        assert covers(["0.16 - 0.19"], version), version
    for version in ("0.15.9", "0.20.0", "0.1", "1.17", "unknown", ""):
        assert not covers(["0.16 - 0.19"], version), version
    assert covers(["3", "0.16"], "0.16.7")


def test_each_known_signature_is_served_by_name(score):
    maths = score("(index, logits)")
    report = install_host(host(), {})
    assert maths.score(1, 2) == maths.score(1, logits=2) == ("ours", 2, 1, 1.0)
    assert report.notes == ()


def test_a_new_parameter_is_honoured_at_its_default_and_passed_on_otherwise(score):
    maths = score("(logits, index, chunk=8, temperature=1.0, *, group=None)")
    report = install_host(host(), {})
    assert report.notes == ("fakehost.maths.score has new parameters: chunk, group. Calls that set one are passed on.",)
    assert maths.score(1, 2) == ("ours", 1, 2, 1.0)
    assert maths.score(1, 2, 8, 0.5, group=None) == ("ours", 1, 2, 0.5)
    assert maths.score(1, 2, temperature=0.5) == ("ours", 1, 2, 0.5)
    assert maths.score(1, 2, 4)[0] == "host"
    given = maths.score(1, 2, group=7)
    assert given == ("host", {"logits": 1, "index": 2, "chunk": 8, "temperature": 1.0, "group": 7})
    assert maths.score(1, -2)[0] == "host"
    entry = installed()[0].replaced[0]
    assert (entry.calls, entry.passed_on) == (6, 3)
    assert entry.why == {"chunk is given": 1, "group is given": 1, "negative": 1}
    text = str(logitless.status())
    assert "fakehost.maths.score: 6 calls, 3 passed on (chunk is given 1, group is given 1, negative 1)" in text
    assert text.startswith("fake 2.5.1 (audit=0, any_version=False, only=None): 3 of 6 calls ours")


def test_a_new_parameter_is_passed_on_also_where_ours_takes_any_argument(score):
    """Ours hands on what it does not read, so a new parameter is missing from no signature."""
    make = lambda original, _: lambda logits, *rest, **more: ("ours", original(logits, *rest, **more)[1])  # noqa: E731
    maths = score("(logits, chunk=8, index=0, temperature=1.0, *, group=None)")
    signature = "(logits, index=0, temperature=1.0)"
    report = install_host(host(signature, make=make), {})
    assert report.notes == ("fakehost.maths.score has new parameters: chunk, group. Calls that set one are passed on.",)
    wanted = {"logits": 1, "chunk": 8, "index": 2, "temperature": 0.5, "group": None}
    assert maths.score(1, 8, 2, 0.5) == maths.score(1, index=2, temperature=0.5, group=None) == ("ours", wanted)
    assert maths.score(1, 4)[0] == maths.score(1, group=7)[0] == maths.score(1, chunk=4)[0] == "host"
    assert installed()[0].replaced[0].why == {"chunk is given": 2, "group is given": 1}
    with pytest.raises(TypeError):
        maths.score(1, colour=2)


def test_a_new_parameter_of_a_function_that_takes_any_argument(score):
    make = lambda original, _: lambda *args, **more: ("ours", original(*args, **more)[1])  # noqa: E731
    maths = score("(logits, chunk=8, *rest, group=None, **more)")
    install_host(host("(logits, *rest, **more)", make=make), {})
    wanted = {"logits": 1, "chunk": 8, "rest": (), "group": None, "more": {"index": 2}}
    assert maths.score(1, index=2) == maths.score(1, chunk=8, group=None, index=2) == ("ours", wanted)
    assert maths.score(1, 8, 3) == ("host", {"logits": 1, "chunk": 8, "rest": (3,), "group": None, "more": {}})
    assert maths.score(1, group=7)[0] == maths.score(1, chunk=4)[0] == "host"


def every_form() -> Iterator[tuple[Host, Replacement, str]]:
    """Every known signature of every function that some host's adapter replaces."""
    for name in HOSTS:
        described = importlib.import_module(f"logitless.adapters.{name}").HOST
        for made in described.replacements(resolve_options(described, {})):
            yield from ((described, made, text) for text in made.forms.values() if text is not None)


def longer(text: str, kind: inspect._ParameterKind) -> str:
    """The signature with one more parameter of this kind, whose default is 0."""
    signature = inspect.signature(eval(f"lambda {text[1:-1]}: None", {}))
    more = inspect.Parameter("unheard_of", kind, default=0)
    # A sort by kind keeps the order of the others.
    return str(signature.replace(parameters=sorted([*signature.parameters.values(), more], key=lambda p: p.kind)))


@pytest.mark.parametrize("kind", [inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY], ids=str)
def test_a_new_parameter_of_any_function_of_any_host_is_passed_on(fakehost, kind):
    maths = sys.modules["fakehost.maths"]
    for described, made, text in list(every_form()):
        exec(f"def known{longer(text, kind)}: pass", vars(maths))
        function = Replacement("fakehost.maths", "score", made.signature, made.make, signature_of="known")
        pretended = Host("fake", "fakehost", ("2.5",), lambda _, made=function: [made], options=described.options)
        maths.score.__code__ = (lambda *args, **more: "host").__code__
        report = install_host(pretended, {})
        assert "score has new parameters: unheard_of. Calls that set one" in report.notes[0]
        named = [p for p in inspect.signature(maths.known).parameters.values() if p.kind < p.VAR_POSITIONAL]
        given = {p.name: None for p in named if p.default is p.empty and p.name != "ctx"}
        assert maths.score(**given, unheard_of=1) == "host", (made.path, text)
        assert installed()[0].replaced[0].why == {"unheard_of is given": 1}, (made.path, text)
        logitless.uninstall("fake")


def test_a_call_that_the_host_would_refuse_is_refused(score):
    maths = score("(logits, index, chunk=8, temperature=1.0)")
    install_host(host(), {})
    for args, kwargs in (((1,), {}), ((1, 2, 8, 1.0, 5), {}), ((1, 2), {"index": 2}), ((1, 2), {"colour": 1})):
        with pytest.raises(TypeError):
            maths.score(*args, **kwargs)


OTHER = {
    "(logits, ids, temperature=1.0)": r"gone: index; new: ids",
    "(logits, index, mask, temperature=1.0)": "new: mask",
    "(logits, index, temperature=0.5)": "the order, a kind or a default changed",
    "(logits)": "gone: index",
}


@pytest.mark.parametrize("found", OTHER)
def test_another_signature_is_refused_with_the_difference(score, found):
    maths = score(found)
    before = dict(vars(maths))
    text = (
        "score has a signature that this adapter does not know.\n"
        "  known (2.5): (logits, index, temperature=1.0)\n  known (2.0 - 2.4): (index, logits)\n"
        f"  found (2.5.1): {found}\n  {OTHER[found]}\nNothing was replaced. Use a tested version (1 - 2.5), or report"
    )
    with pytest.raises(LogitlessError, match=re.escape(text)):
        install_host(host(), {"any_version": True})
    assert vars(maths) == before


def test_a_function_that_only_some_versions_have(score):
    maths = score(None)
    sys.modules["fakehost"].__version__ = "1.7"
    report = install_host(host(), {})
    assert report.missing == ("fakehost.maths.score: not in 1",)
    assert [entry.name for entry in report.replaced] == ["fakehost.maths.mean"]
    logitless.uninstall("fake")
    sys.modules["fakehost"].__version__ = "2.5.1"
    with pytest.raises(LogitlessError, match=r"fakehost\.maths has no score"):
        install_host(host(), {})
    assert maths.mean(3) == 6.0


def test_an_untested_version_warns_before_anything_is_replaced(fakehost):
    before = sys.modules["fakehost.maths"].score
    text = r"version 2\.5\.1 was not tested \(tested: 2\.50, 3\)\. All signatures fit; audit=16"
    with pytest.raises(UserWarning, match=text):
        install_host(host(versions=("2.50", "3")), {})
    assert sys.modules["fakehost.maths"].score is before
    with pytest.warns(UserWarning, match=text):
        install_host(host(versions=("2.50", "3")), {})
    assert "note: version 2.5.1 was not tested" in str(logitless.status())
    logitless.uninstall("fake")
    install_host(host(versions=("2.50", "3")), {"any_version": True})


@pytest.mark.parametrize("told", [None, "0.0.0+unknown"])
def test_a_source_tree_without_a_version_installs_by_its_signatures(fakehost, told):
    sys.modules["fakehost"].__version__ = told
    report = install_host(host(), {})
    assert report.version == "unknown"
    assert report.notes[0].startswith("the version is unknown (tested: 1 - 2.5)")


def test_the_version_is_that_of_the_copy_that_is_imported(tmp_path, monkeypatch):
    """Of two copies of a namespace package, of which the other one has metadata."""
    for name, version in (("checkout", "0.18.0"), ("installed", "0.16.1")):
        package = tmp_path / name / "spacious" / "core"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"__version__ = '{version}'\n")
    metadata = tmp_path / "installed" / "spacious_core-0.16.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: spacious-core\nVersion: 0.16.1\n")
    made = Host("spacious", "spacious.core", ("0.16",), lambda options: [], distribution="spacious-core")
    for first, second, version in (("checkout", "installed", "0.18.0"), ("installed", "checkout", "0.16.1")):
        monkeypatch.setattr(sys, "path", [str(tmp_path / first), str(tmp_path / second), *sys.path])
        assert version_of(made) == version
        for name in ("spacious", "spacious.core"):
            monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("error", [ImportError("libgone.so is missing"), ModuleNotFoundError("No module named 'x'")])
def test_an_import_that_fails_names_the_host(fakehost, error):
    class Broken:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "fakehost.broken":
                raise error

    sys.meta_path.insert(0, Broken)
    try:
        with pytest.raises(LogitlessError, match=rf'install\("fake"\): cannot import fakehost.broken: {error}'):
            install_host(host(module="fakehost.broken", signature="(x)"), {})
        report = install_host(host(module="fakehost.broken", signature="(x)", optional=True), {})
        assert report.missing == (f"fakehost.broken: {error}",)
    finally:
        sys.meta_path.remove(Broken)


def test_a_trial_replaces_nothing(fakehost):
    maths = sys.modules["fakehost.maths"]
    before = dict(vars(maths))
    report = try_host(host())
    assert (report.version, len(report.replaced)) == ("2.5.1", 2)
    assert vars(maths) == before
    assert installed() == ()
    with pytest.raises(LogitlessError, match="does not know"):
        try_host(host("(logits)"))


def test_every_module_of_the_host_that_holds_the_function_gets_ours(fakehost):
    user, maths = sys.modules["fakehost.user"], sys.modules["fakehost.maths"]
    user.alias = before = maths.score
    install_host(host(), {})
    assert user.use(5)[0] == "ours"
    assert user.alias is maths.score
    logitless.uninstall("fake")
    assert user.alias is user.score is before
