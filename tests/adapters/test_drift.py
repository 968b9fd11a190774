"""``make drift``: the newest release of an index, of a folder of files here, against records."""

from __future__ import annotations

import json
import subprocess
import sys

import drift
import pytest
import repositories

from logitless.adapters import HOSTS
from logitless.engines import PARTS as ENGINES

RECORDS = [
    {"host": "skyrl", "on": "installed", "version": "0.3.0", "commit": None},
    {"host": "skyrl", "on": "main", "version": "0.5.0", "commit": "abc123def"},
    {"host": "areal", "on": "2.0.0", "version": "unknown", "commit": "fee938ead"},
]


@pytest.fixture
def index(tmp_path, monkeypatch):
    """An index of one package, whose newest releases want a newer Python, were withdrawn, or are none."""
    folder = tmp_path / "pypi" / "skyrl"
    folder.mkdir(parents=True)
    files = {
        "0.3.0": [{"requires_python": ">=3.11", "yanked": False}],
        "0.10.0": [{"requires_python": ">=3.14", "yanked": False}],
        "0.9.1": [{"requires_python": None, "yanked": False}],
        "0.11.0": [{"requires_python": None, "yanked": True}],
        "0.12.0rc1": [{"requires_python": None, "yanked": False}],
        "0.13.0": [],
    }
    (folder / "json").write_text(json.dumps({"releases": files}))
    monkeypatch.setenv("PIP_INDEX_URL", f"{tmp_path.as_uri()}/simple/")
    return drift.index_address()


def test_the_newest_release_is_found_whatever_python_it_wants(index):
    assert drift.newest("skyrl", index) == "0.10.0"


def test_the_address_is_pips_own_where_nothing_is_configured(monkeypatch):
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    monkeypatch.setattr(drift, "_configured", lambda: None)
    address = drift.index_address()
    assert address.startswith("https://")
    assert not address.endswith("simple")
    monkeypatch.setattr(drift, "_configured", lambda: "https://mirror.example/root/simple")
    assert drift.index_address() == "https://mirror.example/root"


def test_a_release_that_was_not_run_is_drift():
    text = drift.drift_of_version("skyrl", "0.10.0", RECORDS)
    assert text.startswith("0.10.0 is out, which the adapter's versions (")
    assert text.endswith("leave out; run on: 0.3.0")
    assert drift.drift_of_version("skyrl", "0.3.1", RECORDS) == "0.3.1 is out; run on: 0.3.0"
    assert drift.drift_of_version("skyrl", "0.3.0", RECORDS) is None
    # AReaL's index has an older release than its repository.
    assert drift.drift_of_version("areal", "1.0.4", RECORDS) is None
    assert drift.drift_of_version("areal", None, RECORDS) is None


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()

    def git(*words):
        names = ["-c", "user.name=n", "-c", "user.email=n@example.com"]
        subprocess.run(["git", "-C", str(folder), *names, *words], check=True, capture_output=True)

    git("init", "--initial-branch", "trunk")
    (folder / "skyrl").mkdir()
    (folder / "skyrl" / "__init__.py").write_text("")
    git("add", "skyrl")
    git("commit", "-m", "first")
    for tag in ("v0.9.1", "v0.10.0", "v0.11.0rc1", "core_v0.2.1", "nightly"):
        git("tag", tag)
    git("commit", "--allow-empty", "-m", "second")
    return folder.as_uri()


def test_the_newest_tag_of_a_repository_is_found(repository):
    assert repositories.newest_tag(repository) == "0.10.0"
    # Other tags of the repository are of other things.
    assert repositories.newest_tag(repository, "core_v") == "0.2.1"
    assert repositories.newest_tag(repository, "gym-v") is None
    with pytest.raises(repositories.UnreachableError, match=r"git ls-remote: fatal: .*nowhere"):
        repositories.newest_tag(f"{repository}/nowhere")


def test_main_and_the_newest_tag_are_cloned(repository, tmp_path, monkeypatch):
    monkeypatch.setitem(repositories.REPOSITORIES, "skyrl", (repository, "v"))
    folder = tmp_path / "hosts"
    assert [path.name for path in repositories.clone("skyrl", folder)] == ["skyrl-main", "skyrl-0.10.0"]
    # What is there stays.
    repositories.clone("skyrl", folder)
    monkeypatch.setenv("LOGITLESS_HOSTS", str(folder))
    assert [path.name for path in drift.checkouts("skyrl")] == ["skyrl-0.10.0", "skyrl-main"]
    commits = {drift.commit(path) for path in drift.checkouts("skyrl")}
    assert len(commits) == 2
    monkeypatch.setitem(repositories.REPOSITORIES, "slime", (f"{repository}/nowhere", "v"))
    monkeypatch.setattr(sys, "argv", ["repositories.py", str(folder), "skyrl", "slime"])
    assert repositories.main() == 1


def test_the_newer_of_index_and_repository_counts(index, repository, monkeypatch):
    """AReaL's index has an older release than its repository, others' tags come after the index."""
    monkeypatch.setattr(drift, "newest", lambda name, address: "0.9.9")
    monkeypatch.setitem(repositories.REPOSITORIES, "areal", (repository, "v"))
    assert drift.released("areal", index) == ("0.10.0", [])
    monkeypatch.setattr(drift, "newest", lambda name, address: "0.10.1")
    assert drift.released("areal", index) == ("0.10.1", [])
    # Those that only a repository has are not looked up in the index.
    monkeypatch.setitem(repositories.REPOSITORIES, "slime", (repository, "v"))
    assert drift.released("slime", index) == ("0.10.0", [])


def test_a_source_that_cannot_be_reached_is_named(index, repository, monkeypatch, capsys):
    monkeypatch.setitem(repositories.REPOSITORIES, "skyrl", (f"{repository}/nowhere", "v"))
    found, unreachable = drift.released("skyrl", index)
    assert found == "0.10.0"
    assert [text.split(":")[0] for text in unreachable] == ["git ls-remote"]
    # An index without a package says so, too.
    monkeypatch.setitem(repositories.REPOSITORIES, "areal", (repository, "v"))
    found, unreachable = drift.released("areal", index)
    assert (found, len(unreachable)) == ("0.10.0", 1)
    assert unreachable[0].startswith("the index has no answer on areal")
    monkeypatch.setattr(drift, "released", lambda host, address: (None, ["no way"] if host == "skyrl" else []))
    assert drift.main() == 2
    assert "no release found; UNREACHABLE: no way" in capsys.readouterr().out
    monkeypatch.setattr(drift, "released", lambda host, address: ("999.0", ["no way"]))
    assert drift.main() == 1


def test_a_checkout_at_another_commit_is_drift(tmp_path):
    texts = {"skyrl-main": "abc123def456\n", "skyrl-0.4.0": "1234\n", "skyrl-next": "abc123d\n"}
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "COMMIT").write_text(text)
    assert drift.drift_of_checkout("skyrl", tmp_path / "skyrl-main", RECORDS) is None
    assert drift.drift_of_checkout("skyrl", tmp_path / "skyrl-0.4.0", RECORDS) == "0.4.0 has no record"
    # A commit that was run under another name is no drift.
    assert drift.drift_of_checkout("skyrl", tmp_path / "skyrl-next", RECORDS) is None
    (tmp_path / "skyrl-main" / "COMMIT").write_text("fff\n")
    assert drift.drift_of_checkout("skyrl", tmp_path / "skyrl-main", RECORDS) == "main is at fff; run on: abc123def"


def test_every_host_is_asked(index, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(drift, "newest", lambda name, address: asked.append(name))
    monkeypatch.setattr(drift, "newest_tag", lambda repository, prefix: asked.append(repository))
    assert drift.main() == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["host", "newest", "run", "on"]
    assert [line.split()[0] for line in lines] == [*HOSTS, *ENGINES]
    addresses = [address for host, (address, _) in repositories.REPOSITORIES.items() if host in HOSTS]
    assert {"ms-swift", "megatron-core", "skyrl", "vllm", "sglang", *addresses} <= set(asked)
    assert all(line.endswith("no release found") for line in lines)
    monkeypatch.setattr(drift, "newest", lambda name, address: "999.0" if name == "verl" else None)
    assert drift.main() == 1
    assert "999.0 is out, which" in capsys.readouterr().out
    monkeypatch.setattr(drift, "newest", lambda name, address: {"vllm": "999.0", "sglang": "0.5.23"}.get(name))
    assert drift.main() == 1
    *_, vllm, sglang = capsys.readouterr().out.splitlines()
    assert "999.0 is out, which the plug-in's versions (0.24, " in vllm
    assert sglang.split() == ["sglang", "0.5.23", "0.5.23", "as", "recorded"]
