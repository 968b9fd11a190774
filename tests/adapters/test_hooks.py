"""How each process of a host comes to call ``install``: what docs/adapters/index.md says, run, and held to the sources.

The sources are those of the newest checkout that ``LOGITLESS_HOSTS`` names, or of what is installed.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import FOLDER, checkout

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = (ROOT / "docs" / "adapters" / "index.md").read_text(encoding="utf-8")
PACKAGES = {"ms_swift": "swift"}

HAS = {
    "areal": ("areal/infra/utils/launcher.py", "all_paths.extend(p for p in sys.path"),
    "miles": ("miles/utils/arguments.py", "--custom-megatron-init-path"),
    "ms_swift": ("swift/arguments/base_args/base_args.py", "import_external_file(external_plugin)"),
    "nemo_rl": ("nemo_rl/distributed/virtual_cluster.py", '"env_vars": env_vars,  # Pass thru'),
    "openrlhf": ("openrlhf/cli/train_ppo_ray.py", "ray.init("),
    "prime_rl": ("prime_rl/entrypoints/rl.py", "**config.trainer.env_vars,"),
    "skyrl": ("skyrl/train/utils/utils.py", 'ray.init(runtime_env={"env_vars": env_vars}'),
    "slime": ("slime/utils/arguments.py", "--custom-megatron-init-path"),
    "torchtitan": ("torchtitan/experiments/rl/train.py", "bootstrap=_preimport_torch"),
    "verl": ("verl/__init__.py", 'os.getenv("VERL_USE_EXTERNAL_MODULES", "")'),
}
"""A file of the host, and what the hook of our page rests on."""

UNDER_RAY = ("areal", "miles", "nemo_rl", "openrlhf", "skyrl")


def sources(host: str) -> Path:
    folder = checkout(host)
    places = [] if folder is None else [folder / "src", folder]
    found = [place for place in (*places, FOLDER) if (place / PACKAGES.get(host, host)).is_dir()]
    if not found:
        pytest.skip(f"no source of {host}")
    return found[0]


@pytest.mark.parametrize("host", HAS)
def test_the_host_still_has_what_its_hook_rests_on(host):
    file, text = HAS[host]
    assert text in (sources(host) / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("host", UNDER_RAY)
def test_the_host_has_no_such_hook_of_its_own(host):
    """Ray refuses two in one job."""
    package = sources(host) / PACKAGES.get(host, host)
    assert [x for x in package.rglob("*.py") if "worker_process_setup_hook" in x.read_text(encoding="utf-8")] == []


def snippet(marker: str) -> str:
    """The file of that name on the page."""
    text = PAGE.split(f"`{marker}`", 1)[1]
    return text.split("```python\n", 1)[1].split("```", 1)[0]


def answer(code: str, folder: Path, **given: str) -> str:
    paths = [folder, ROOT / "src", HERE / "doubles", *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), **given}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


SHOW = "import logitless; print([entry.host for entry in logitless.status().hosts])"


def test_sitecustomize_installs_in_ranks_and_not_in_their_launcher(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(snippet("sitecustomize.py"))
    monkeypatch.delenv("RANK", raising=False)
    assert answer(SHOW, tmp_path, RANK="0") == "['prime_rl']"
    assert answer(SHOW, tmp_path) == "[]"


RUN = """
import ray

ray.init(runtime_env={"env_vars": {"A": "1"}}, num_cpus=1, include_dashboard=False, log_to_driver=False)


@ray.remote(runtime_env={"env_vars": {"B": "2"}})
class Worker:
    def installed(self):
        import os, logitless

        return [entry.host for entry in logitless.status().hosts], os.environ["A"], os.environ["B"]


print(ray.get(Worker.remote().installed.remote()))
"""


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_a_hook_of_the_job_runs_in_actors_of_a_host_that_calls_ray_itself(tmp_path):
    """``ray job submit`` hands the driver its runtime environment in this variable."""
    (tmp_path / "with_logitless.py").write_text(snippet("with_logitless.py").replace("skyrl", "prime_rl"))
    job = '{"runtime_env": {"worker_process_setup_hook": "with_logitless.setup"}}'
    given = {"RAY_JOB_CONFIG_JSON_ENV_VAR": job, "RAY_AUTH_MODE": "disabled"}
    assert answer(RUN, tmp_path, **given).splitlines()[-1] == "(['prime_rl'], '1', '2')"
