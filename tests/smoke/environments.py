"""The wheel in environments that have nothing but what each extra declares: ``make smoke``, or ``EXTRAS="cli score"``.

Each environment is made, tried by ``inside.py`` and removed. Extras that are joined, as ``none+cli`` is by ``make
bare``, are added to one environment one after the other, each tried before the next comes. Versions are those of
constraints.txt, which say what is installed if it is asked for, and ask for nothing.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from inside import CHECKS

ROOT = Path(__file__).parent.parent.parent


def try_extras(extras: str, wheel: Path) -> None:
    """One environment, from nothing to the last check; raises where a command fails."""
    with tempfile.TemporaryDirectory(prefix=f"logitless-{extras}-") as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        install = [python, "-m", "pip", "install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt"]
        # Torch first and pinned: a looser request would pull a CUDA build.
        subprocess.run([*install, "torch==2.13.0"], check=True)
        # A CUDA build brings Triton along, and does without.
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "triton"], check=True)
        for extra in extras.split("+"):
            subprocess.run([*install, f"{wheel}[{extra}]" if extra != "none" else wheel], check=True)
            # From elsewhere, isolated: neither the checkout nor PYTHONPATH may stand in for the wheel.
            inside = Path(__file__).with_name("inside.py")
            subprocess.run([python, "-I", inside, extra, ROOT], check=True, cwd=folder)


def main() -> None:
    """Every extra named on the command line, or all; the first failure ends it."""
    (wheel,) = (ROOT / "dist").glob("*.whl")
    for extras in sys.argv[1:] or CHECKS:
        start = time.perf_counter()
        try_extras(extras, wheel.resolve())
        print(f"{extras}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
