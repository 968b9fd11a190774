"""Hosts' own tests of the functions that the patches of docs/maintainers.md change, with a patch and without.

They run where ``LOGITLESS_HOSTS`` names a checkout with them (``make hosts``). Those that want several ranks know no
patch. Megatron-Core's want NCCL, or count its own all-reduces; miles, ms-swift, OpenRLHF and Transformers have no test
that calls the function that a patch changes, which is looked for in their checkouts.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import patched
import pytest
import torch
from hosts import CHECKOUTS, checkout, load

HERE = Path(__file__).parent
OWN = {
    "areal": ("tests/test_vocab_parallel_inplace.py", "regular_entropy"),
    "nemo_rl": ("tests/unit/distributed/test_distributed_logprob.py", "get_next_token and equivalence"),
    "prime_rl": ("tests/unit/train/rl/test_fused_lm_head.py", "cpu or requires"),
    "skyrl": ("tests/backends/skyrl_train/gpu/gpu_ci/megatron/test_fused_linear_logprob.py", "materialized"),
    "slime": ("tests/test_ppo_logprob_entropy.py", "single_rank or empty"),
    "torchtitan": ("tests/unit_tests/test_loss.py", "compute_logprobs"),
    "trl": ("tests/test_utils.py", "SelectiveLogSoftmax"),
}
NONE = {"miles": "tests", "ms_swift": "tests", "openrlhf": "tests"}
"""Hosts whose tests do not call the function, and where those are."""


def results(folder: Path, host: str, scratch: Path, patch: bool) -> tuple[dict[str, bool], int]:
    """Which tests passed, and how many calls the provider served."""
    file, chosen = OWN[host]
    report = scratch / f"report-{patch}.xml"
    paths = [str(HERE), str(HERE.parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, CHECKOUTS: str(folder), "LOGITLESS_HOST": host, "PYTHONPATH": os.pathsep.join(paths)}
    environment["LOGITLESS_PATCH"] = "1" if patch else ""
    options = ["-p", "patched", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder)]
    options.append("--noconftest")
    command = [sys.executable, "-m", "pytest", "-q", *options, f"--junitxml={report}", file, "-k", chosen]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert report.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    cases = ElementTree.parse(report).getroot().iter("testcase")
    passed = {case.get("name", ""): not any(x.tag in ("failure", "error", "skipped") for x in case) for case in cases}
    return passed, int(done.stdout.rpartition("served: ")[2].split()[0])


@pytest.mark.parametrize("host", OWN)
def test_the_patch_passes_what_the_host_passes(host, tmp_path):
    folder = checkout(host)
    if folder is None or not (folder / OWN[host][0]).is_file():
        pytest.skip(f"no checkout of {host} with its tests")
    before, none = results(folder, host, tmp_path, patch=False)
    after, served = results(folder, host, tmp_path, patch=True)
    assert none == 0
    assert served > 0
    assert any(before.values())
    assert [name for name, passed in before.items() if passed and not after[name]] == []


@pytest.mark.parametrize("host", NONE)
def test_the_host_has_no_test_of_the_function(host):
    """What the page says of it; a test that has come goes into ``OWN``."""
    folder = checkout(host)
    if folder is None or not (folder / NONE[host]).is_dir():
        pytest.skip(f"no checkout of {host} with its tests")
    called = re.compile(rf"\b{patched.WHERE[host][1]}\(")
    files = [
        x for x in (folder / NONE[host]).rglob("*.py") if x.is_file() and called.search(x.read_text(encoding="utf-8"))
    ]
    assert files == []


@pytest.mark.parametrize("host", patched.WHERE)
def test_the_patch_has_every_parameter_of_the_newest_host(host):
    """A call that gives one would otherwise be refused, or the parameter lost."""
    if checkout(host) is None:
        pytest.skip(f"no checkout of {host}")
    _, _, function = patched.replaced(host)
    taken = function.__self__.forward if host == "verl" else function
    ours = inspect.signature(patched.patched(host, function, {})).parameters
    assert set(inspect.signature(taken).parameters) - {"ctx"} <= set(ours)


@pytest.fixture
def on_cpu(monkeypatch):
    """What verl's script asks of a GPU: a place for tensors, a clock, and a count of bytes."""
    empty, randint = torch.empty, torch.randint
    monkeypatch.setattr(torch, "empty", lambda *a, device=None, **k: empty(*a, **k))
    monkeypatch.setattr(torch, "randint", lambda *a, device=None, **k: randint(*a, **k))
    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda other: 0.0)
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)


def test_the_patch_passes_verls_own_script(on_cpu, monkeypatch):
    """Its comparison of values and gradients, in its tolerances, with sizes that a CPU can do."""
    folder = checkout("verl")
    script = folder / "tests" / "utils" / "test_linear_cross_entropy.py" if folder else None
    if script is None or not script.is_file():
        pytest.skip("no checkout of verl with its tests")
    load("verl")
    module: Any = sys.modules[patched.WHERE["verl"][0]]
    before = module.linear_cross_entropy
    patched.apply("verl")
    try:
        spec = importlib.util.spec_from_file_location("verls_own_script", script)
        own: Any = importlib.util.module_from_spec(spec)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            spec.loader.exec_module(own)
            # verl's function on logits takes [N, V] with [1, N] labels on a GPU alone.
            monkeypatch.setattr(own, "run_verl_original_entropy", own.run_torch_entropy)
            case = own.TestLinearCrossEntropy(0)
            sizes = {"dtype": torch.bfloat16, "batch_size": 1, "num_tokens": 48, "hidden_size": 64, "vocab_size": 507}
            monkeypatch.setattr(own.TestLinearCrossEntropy, "generate_hyper", lambda self: vars(self).update(sizes))
            served = patched.served
            case.verify_correctness(iterations=2)
    finally:
        module.linear_cross_entropy = before
    assert patched.served == served + 2
