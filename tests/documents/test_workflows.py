"""One set of commands: what CI, the workflows of the public repository and the commit hooks run are targets of make."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.MULTILINE))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PUBLISH = "uv publish --trusted-publishing always dist/*"
"""The one command that make has no target for: it works nowhere but in the workflow that the registry trusts."""


def load(path: Path) -> dict:
    found = yaml.safe_load(path.read_text())
    # YAML 1.1 reads the key `on` as a truth value.
    return {("on" if key is True else key): value for key, value in found.items()}


def steps(workflow: dict) -> list[dict]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", [])]


def test_there_are_targets_and_workflows():
    assert {"lint", "test", "docs", "serve", "dist", "smoke", "gpu"} <= TARGETS
    assert [path.stem for path in WORKFLOWS] == ["build", "docs", "drift", "gpu", "release", "tests", "versions"]
    assert set(re.search(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)[1].split()) == TARGETS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_that_exist(path: Path):
    workflow = load(path)
    commands = [step["run"] for step in steps(workflow) if "run" in step]
    assert commands
    for command in commands:
        target = re.fullmatch(r"make ([\w-]+)( [A-Z]+=\S.*)?", command)
        assert command == PUBLISH or (target and target[1] in TARGETS), f"make has no target for: {command}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_do_no_more_than_it_must(path: Path):
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert "uses" in job or job["timeout-minutes"] <= 120, name
        asked = set(job.get("permissions", {}))
        assert asked <= {"id-token", "pages"}
        # Where it may speak for the repository, it runs nothing of a pull request.
        assert not asked or "pull_request" not in workflow["on"] or job["if"] == "github.event_name == 'push'"
        assert "self-hosted" not in job.get("runs-on", "") or "pull_request" not in workflow["on"]
    for step in steps(workflow):
        assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])


def test_a_release_publishes_what_was_built_and_tried_from_its_own_tag():
    jobs = load(GITHUB / "workflows" / "release.yml")["jobs"]
    assert jobs["publish"]["needs"] == "build"
    assert jobs["build"] == {"needs": "tag", "uses": "./.github/workflows/build.yml"}
    built = load(GITHUB / "workflows" / "build.yml")
    assert "workflow_call" in built["on"]
    (kept,) = [step["with"] for step in steps(built) if "upload-artifact" in step.get("uses", "")]
    (taken,) = [step["with"] for step in jobs["publish"]["steps"] if "download-artifact" in step.get("uses", "")]
    assert kept["name"] == taken["name"]
    assert set(built["jobs"]["smoke"]["strategy"]["matrix"]["extra"]) == {"none", *EXTRAS} - {"dev", "docs"}


def test_ci_runs_what_the_workflows_of_tests_and_builds_run():
    run = re.findall(r"^make .+$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    tests = load(GITHUB / "workflows" / "tests.yml")
    workflow = [step["run"] for step in steps(tests) if "run" in step]
    # There all tests run under both Pythons, here those of hosts: everything twice would take too long.
    assert run == ["make lint", "make test", "make test312", "make bare"]
    assert workflow == ["make lint", "make test", "make bare"]
    assert tests["jobs"]["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12"]
    assert "none" in load(GITHUB / "workflows" / "build.yml")["jobs"]["smoke"]["strategy"]["matrix"]["extra"]


def test_machines_of_others_install_a_torch_without_cuda():
    """Whatever sets up an environment there, from the address in a variable; a GPU's machine has its own torch."""
    asked = {path.stem for path in WORKFLOWS if "PIP_EXTRA_INDEX_URL" in load(path).get("env", {})}
    assert asked == {path.stem for path in WORKFLOWS} - {"gpu", "release"}


@pytest.mark.parametrize(("name", "command"), [("tests", "make test"), ("docs", "make docs")])
def test_pages_are_seen_in_a_browser_there(name: str, command: str):
    """Tests in a browser skip where there is none; these workflows bring one, and a named one that is missing fails."""
    for job in load(GITHUB / "workflows" / f"{name}.yml")["jobs"].values():
        found = job.get("steps", [])
        for at, step in enumerate(found):
            if step.get("run") == command:
                assert step["env"] == {"LOGITLESS_BROWSER": "${{ steps.chrome.outputs.chrome-path }}"}
                assert found[at - 1] == {"uses": "browser-actions/setup-chrome@v2", "id": "chrome"}
                return
    pytest.fail(f"{name}.yml does not run {command}")


def test_every_python_that_is_claimed_is_tried():
    text = (ROOT / "noxfile.py").read_text()
    pythons = re.search(r"^PYTHONS = \[(.+)\]$", text, re.MULTILINE)[1].replace('"', "").split(", ")
    job = load(GITHUB / "workflows" / "versions.yml")["jobs"]["versions"]
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    assert job["strategy"]["matrix"]["python"] == pythons
    assert [c.rsplit(" ", 1)[1] for c in classifiers if re.search(r":: 3\.\d+$", c)] == pythons


def test_make_lint_runs_the_hooks_of_a_commit_with_tools_that_make_installs():
    assert re.search(r"^lint: .*\n\t\$\(RUN\)pre-commit run --all-files", MAKEFILE, re.MULTILINE)
    hooks = load(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    tools = {hook["entry"].split()[0] for hook in hooks if hook["language"] == "system"}
    installed = {re.split(r"\W", need)[0] for need in EXTRAS["dev"]}
    assert tools == {f".venv/bin/{tool}" for tool in ("ruff", "pyright")}
    assert {"ruff", "pyright", "pre"} <= installed


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_of_issues_have_what_they_need(path: Path):
    form = load(path)
    assert form["name"]
    assert form["description"]
    names = [field["id"] for field in form["body"]]
    assert len(set(names)) == len(names)
    for field in form["body"]:
        assert field["type"] in ("textarea", "input")
        assert field["attributes"]["label"]


def test_the_citation_is_complete():
    citation = load(ROOT / "CITATION.cff")
    assert {"cff-version", "title", "message", "authors", "license"} <= set(citation)
    # The version is written down in one place, and is not this one.
    assert "version" not in citation
