"""The versions that pyproject.toml claims, each tried in an environment of its own: ``pip install nox`` and ``nox``.

A session installs one torch with one Triton (kernels run in its interpreter), runs the tests below, and appends what
came of it to ``benchmarks/results/versions.jsonl``, from which ``docs/reliability.md`` has its table. Pythons that are
not found are skipped. Environments of CUDA builds take several gigabytes, so each is removed when its session ends.
"""

from __future__ import annotations

import shutil

import nox

nox.options.error_on_missing_interpreters = False

PYTHONS = ["3.11", "3.12", "3.13"]
# A torch and the Triton that belongs to it; and the newest Triton with the torch that `make` installs.
PAIRS = [
    ("2.8.0", "3.4.0"),
    ("2.9.1", "3.5.1"),
    ("2.11.0", "3.6.0"),
    ("2.13.0", "3.7.1"),
    ("2.13.0", "3.9.0"),
    ("2.15.0", "3.9.0"),
]
# Numbers, kernels, compile, both paths from hidden states, ranks and shards, the seams to hosts.
TESTS = (
    *("score/test_logprobs", "score/test_special_values", "score/test_linear", "loss/test_policy_loss"),
    *("score/test_compile", "score/test_parallel", "score/test_shards", "call/test_seams", "score/test_policy_head"),
)


@nox.session(python="3.12", venv_backend="venv")
def hosts(session: nox.Session) -> None:
    """The adapters and the seams to hosts on the Python that hosts run on: ``nox -s hosts``."""
    session.env["PIP_NO_COMPILE"] = "0"
    session.install("-c", "constraints.txt", "torch==2.13.0")
    session.install("-c", "constraints.txt", "-e", ".[dev]")
    place = f"{session.virtualenv.location}/hosts"
    session.install("--no-deps", "--upgrade", "--target", place, "-r", "constraints-hosts.txt")
    session.run("python", "-m", "pytest", "tests/adapters", "tests/call/test_seams.py", env={"OMP_NUM_THREADS": "1"})


@nox.session(python=PYTHONS, venv_backend="venv")
@nox.parametrize(("torch", "triton"), PAIRS)
def versions(session: nox.Session, torch: str, triton: str) -> None:
    """One torch and one Triton on one Python: ``nox -s "versions-3.11(torch='2.8.0', triton='3.4.0')"``."""
    session.env["PIP_NO_COMPILE"] = "0"
    # The interpreters of Triton 3.4 to 3.6 do what numpy has since made an error.
    session.install(f"torch=={torch}", "numpy<2.3" if triton < "3.7" else "numpy", "pytest", "hypothesis")
    # Apart from torch, which asks for its own.
    session.install("--no-deps", f"triton=={triton}", "-e", ".")
    report = session.create_tmp() + "/report.xml"
    files = [f"tests/{name}.py" for name in TESTS]
    session.run(
        "python", "-m", "pytest", *files, f"--junitxml={report}", success_codes=[0, 1], env={"OMP_NUM_THREADS": "1"}
    )
    try:
        session.run("python", "benchmarks/versions.py", report)
    finally:
        shutil.rmtree(session.virtualenv.location, ignore_errors=True)
