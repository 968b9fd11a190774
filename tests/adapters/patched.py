"""A plugin of pytest: a host's own tests, on the host with the patch of docs/maintainers.md applied.

    LOGITLESS_PATCH=slime pytest -p patched SLIME/tests/test_ppo_logprob_entropy.py

The added lines of the page's diff run before the host's function, which takes the place of "...". Without
``LOGITLESS_PATCH`` the host is as it is: what fails then is the host's business.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests"), str(ROOT)]

from hosts import load  # noqa: E402

from logitless import provider  # noqa: E402

PAGE = (ROOT / "docs" / "maintainers.md").read_text(encoding="utf-8")
WHERE = {
    "prime_rl": ("prime_rl.trainer.models.layers.lm_head", "FusedOutputLinear.forward"),
    "slime": ("slime.utils.ppo_utils", "calculate_log_probs_and_entropy"),
    "torchtitan": ("torchtitan.components.loss", "compute_logprobs"),
    "trl": ("trl.trainer.utils", "selective_log_softmax"),
    "verl": ("verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy"),
}
"""The module and the function that a patch changes, of hosts with tests of it that need no GPU."""

BITS = {"slime": ("STRICT_ATOL", 5e-7)}
"""A tolerance of a host's tests that is below one float32 rounding (6e-8), and one of a few roundings."""

TITLES = {"prime_rl": "prime-rl", "trl": "TRL"}
served = 0
"""Calls of the provider so far."""


def diff_of(host: str) -> str:
    """The page's diff of a host, which its paragraph begins with."""
    found = re.search(rf"^{TITLES.get(host, host)}, `[^\n]*\n(?:[^\n]+\n)*\n```diff\n(.*?)^```$", PAGE, re.M | re.S)
    assert found is not None, f"docs/maintainers.md has no diff of {host}"
    return found[1]


def patched(host: str, original: Any, namespace: dict[str, Any]) -> Any:
    """The host's function after the diff."""
    lines = [line[1:] for line in diff_of(host).splitlines() if not line.startswith("-")]
    text = "\n".join(lines).replace("    ...", "    return _original(**locals())")
    names = {**namespace, "_original": _by_name(original), "provider": Counted()}
    exec(text, names)
    return next(names[name] for name in re.findall(r"^def (\w+)\(", text, re.M))


def _by_name(original: Any) -> Any:
    known = set(inspect.signature(original).parameters) if callable(original) else set()
    return lambda **given: original(**{name: x for name, x in given.items() if name in known})


class Counted:
    """The provider, whose calls are counted: a patch that never serves would pass every test."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(provider.get(version=1), name)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            global served
            served += 1
            return function(*args, **kwargs)

        return call


def apply(host: str) -> None:
    """Load the host and put the patched function where the host's own was."""
    module_name, path = WHERE[host]
    load(host, module_name)
    module: Any = sys.modules[module_name]
    owner, name = module, path
    if "." in path:
        holder, name = path.split(".")
        owner = getattr(module, holder)
    setattr(owner, name, patched(host, getattr(owner, name), vars(module)))


def pytest_configure(config: Any) -> None:
    host = os.environ["LOGITLESS_HOST"]
    load(host, WHERE[host][0])
    if os.environ.get("LOGITLESS_PATCH"):
        apply(host)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    name, tolerance = BITS.get(os.environ["LOGITLESS_HOST"], (None, None))
    for item in items if name else ():
        setattr(item.module, name, tolerance)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"served by the provider: {served}")
