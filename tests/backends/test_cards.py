"""Every Triton kernel compiles, as it is launched, for one of the cards that ``docs/cards.md`` names, without a card.

All kernels for all of them is ``make cards``. A kernel that no call launches ends the program with its name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from logitless.backends.triton.launching import understood

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed")


def run(tmp_path: Path, *command: str) -> str:
    """Of a process of its own: here kernels are interpreted."""
    names = {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"} | names
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_kernel_compiles_for_one_card_each(tmp_path):
    lines = run(tmp_path, "benchmarks/cards.py", "--turn").splitlines()
    found = [line.split()[:2] for line in lines]
    assert len({kernel for kernel, _ in found}) == len(found) > 20
    assert {target for _, target in found} == {"sm_80", "sm_89", "sm_90", "sm_100", "gfx942", "gfx950"}
    assert not [line for line in lines if "of which" in line]


def test_two_products_of_a_small_width_fit(tmp_path):
    """A width of one step leaves no loop over it, and all loads are stages of the loop over tiles: small models too."""
    text = run(
        tmp_path,
        "-c",
        "import torch, logitless as ll\n"
        "from benchmarks import cards\n"
        "student, teacher = (ll.Logits(cards._empty(512, 24), cards._empty(4096, 24)) for _ in range(2))\n"
        "with cards.recording() as found:\n"
        "    ll.estimate(ll.logprobs, student, cards._ids(512), teacher=teacher, device=cards.H200)\n"
        "card = cards.TARGETS['sm_90']\n"
        "both = {x.kernel: x for x in found if x.kernel in ('pair_sums_kernel', 'pair_gradient_kernel')}\n"
        "print([cards.usage(x, card).too_much(card) for x in both.values()])",
    )
    assert text.strip() == "[None, None]"


def test_a_kernel_that_no_call_launches_is_named(tmp_path):
    """The check itself: with one call less, its kernels are missing."""
    text = run(
        tmp_path,
        "-c",
        "from benchmarks import cards\n"
        "own = cards.calls()\n"
        "own.pop('hidden, support')\n"
        "cards.calls = lambda: own\n"
        "print(cards.unreached(cards.launches()))",
    )
    assert text.strip() == "['dots_kernel', 'sums_kernel']"


def test_a_launch_on_amds_cards_is_without_what_nvidias_alone_have():
    given = {"maxnreg": 128, "FAST": True, "num_warps": 4}
    assert understood(given, amd=False) is given
    assert understood(given, amd=True) == {"FAST": False, "num_warps": 4}
