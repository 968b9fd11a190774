"""Where hosts are developed: their repositories, the newest release among the tags, and clones of both.

    python tests/adapters/repositories.py FOLDER            clone the main branch and the newest tag of every host
    python tests/adapters/repositories.py FOLDER slime      of one

``make hosts LOGITLESS_HOSTS=FOLDER`` then runs on them: ``slime-main``, ``slime-0.3.1``, ... What is there already
stays as it is. The exit status is 1 where one could not be had.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORIES = {
    "areal": ("https://github.com/areal-project/AReaL", "v"),
    "deepspeed": ("https://github.com/deepspeedai/DeepSpeed", "v"),
    "megatron": ("https://github.com/NVIDIA/Megatron-LM", "core_v"),
    "miles": ("https://github.com/radixark/miles", "v"),
    "ms_swift": ("https://github.com/modelscope/ms-swift", "v"),
    "nemo_rl": ("https://github.com/NVIDIA-NeMo/RL", "v"),
    "openrlhf": ("https://github.com/OpenRLHF/OpenRLHF", "v"),
    "prime_rl": ("https://github.com/PrimeIntellect-ai/prime-rl", "v"),
    "skyrl": ("https://github.com/NovaSky-AI/SkyRL", "skyrl-v"),
    "slime": ("https://github.com/THUDM/slime", "v"),
    "specforge": ("https://github.com/sgl-project/SpecForge", "v"),
    "speculators": ("https://github.com/vllm-project/speculators", "v"),
    "torchtitan": ("https://github.com/pytorch/torchtitan", "v"),
    "verl": ("https://github.com/verl-project/verl", "v"),
    "vime": ("https://github.com/vllm-project/vime", "v"),
}
"""An address, and what tags of releases begin with. Transformers and TRL are taken as installed: their releases want
packages of their own time."""

RELEASE = re.compile(r"\d+(\.\d+)*(\.post\d+)?")


class UnreachableError(Exception):
    """A source that could not be asked: nothing is known of what it has."""


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def newest_tag(address: str, prefix: str = "v") -> str | None:
    """The newest release among the tags of a repository, or None where it has none."""
    lines = _git("ls-remote", "--tags", "--refs", address).splitlines()
    tags = [line.rpartition("refs/tags/")[2] for line in lines]
    there = [tag.removeprefix(prefix) for tag in tags if tag.startswith(prefix)]
    return max(filter(RELEASE.fullmatch, there), key=numbers, default=None)


def clone(host: str, folder: Path) -> list[Path]:
    """The main branch and the newest tag of a host, in folders as ``LOGITLESS_HOSTS`` wants them."""
    address, prefix = REPOSITORIES[host]
    release = newest_tag(address, prefix)
    wanted = {"main": [], **({release: ["--branch", f"{prefix}{release}"]} if release else {})}
    for name, branch in wanted.items():
        if not (folder / f"{host}-{name}").exists():
            _git("clone", "--quiet", "--depth", "1", *branch, address, str(folder / f"{host}-{name}"))
    return [folder / f"{host}-{name}" for name in wanted]


def _git(*words: str) -> str:
    quiet = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"}
    try:
        done = subprocess.run(["git", *words], env=quiet, capture_output=True, text=True, check=False, timeout=600)
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"git {words[0]} took more than ten minutes") from None
    if done.returncode:
        raise UnreachableError(f"git {words[0]}: {(done.stderr.strip().splitlines() or ['failed'])[0]}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description="Clone the main branch and the newest tag of hosts.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("hosts", nargs="*", choices=[[], *REPOSITORIES], help="all if none")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    missed = 0
    for host in given.hosts or REPOSITORIES:
        try:
            print(host, *(path.name for path in clone(host, given.folder)), flush=True)
        except UnreachableError as error:
            missed += 1
            print(f"{host}: {error}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
