"""Every Triton kernel compiled for cards that are not here: registers, spills and shared memory of each.

    python benchmarks/cards.py --json benchmarks/results/cards.jsonl        all of them, for every target: minutes
    python benchmarks/cards.py --json ... --kernel 'pair_*'                  some of them, in place of their records

Nothing runs. What is compiled is what the library launches: calls of it are made dry, on the meta device, with the
sizes of an H200, and every launch is written down with its arguments instead of being made. Triton itself derives the
signature from those, for a card that a stand-in for its driver names.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

# Before Triton is imported: kernels that are interpreted have nothing to compile.
os.environ.pop("TRITON_INTERPRET", None)

import torch
from torch import Tensor

import logitless as ll
import logitless.backends.triton as package
from logitless.backends.triton.launching import understood
from logitless.machine import H200
from logitless.objectives import Objective

KIB = 1024


@dataclass(frozen=True)
class Target:
    """A card to compile for.

    Attributes:
        backend, arch, warp: as Triton has them.
        cards: which these are.
        shared: bytes of shared memory that a program may have.
        registers: that a thread may have, the architecture's bound.
    """

    backend: str
    arch: int | str
    warp: int
    cards: str
    shared: int
    registers: int


TARGETS = {
    "sm_80": Target("cuda", 80, 32, "A100", 163 * KIB, 255),
    "sm_89": Target("cuda", 89, 32, "L40S, RTX 4090", 99 * KIB, 255),
    "sm_90": Target("cuda", 90, 32, "H100, H200", 227 * KIB, 255),
    "sm_100": Target("cuda", 100, 32, "B200", 227 * KIB, 255),
    "gfx942": Target("hip", "gfx942", 64, "MI300X", 64 * KIB, 512),
    "gfx950": Target("hip", "gfx950", 64, "MI355X", 160 * KIB, 512),
}


@dataclass(frozen=True, eq=False)
class Launch:
    """A launch that was asked for: the kernel, by its module, and its arguments."""

    module: str
    kernel: str
    arguments: dict[str, Any]

    def compiled(self, amd: bool) -> Any:
        """For the card that the driver names."""
        function = getattr(importlib.import_module(f"{package.__name__}.{self.module}"), self.kernel)
        # A kernel keeps what it was compiled to by device, of which there is one here.
        function.device_caches.clear()
        return function.warmup(grid=(1,), **understood(self.arguments, amd))


@dataclass(frozen=True)
class Usage:
    """What a kernel takes on a card.

    Attributes:
        registers: of a thread; on AMD's, vector registers.
        spilled: bytes of a thread that did not fit into them.
        shared: bytes of a program.
        threads: of a program.
    """

    registers: int
    spilled: int
    shared: int
    threads: int

    def too_much(self, target: Target) -> str | None:
        """Why it could not be launched there; None where nothing stands in its way."""
        if self.shared > target.shared:
            return f"{self.shared} bytes of shared memory, of which there are {target.shared}"
        if self.registers > target.registers:
            return f"{self.registers} registers, of which a thread has {target.registers}"
        return None


# What is launched.


HOPPER = {"product_rows_kernel", "product_columns_kernel", "turns_statistics_kernel", "turns_gradient_kernel"}
"""Kernels that are launched on cards of capability 9 alone."""


def targets(launch: Launch) -> list[str]:
    """Cards that a kernel is compiled for."""
    return ["sm_90"] if launch.kernel in HOPPER else list(TARGETS)


def kernels() -> set[tuple[str, str]]:
    """Every kernel of the library, by module: what Triton compiles and a launch can name."""
    found = set()
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.endswith("kernels"):
            continue
        names = vars(importlib.import_module(f"{package.__name__}.{module.name}"))
        found |= {
            (module.name, name)
            for name, x in names.items()
            if name.endswith("_kernel") and x.__module__ == f"{package.__name__}.{module.name}"
        }
    return found


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Launches of dry calls, which are not made where tensors have no values."""
    found: list[Launch] = []

    def launch(kernel: str, programs: int, *, on: Tensor, module: str = "kernels", **arguments: Any) -> None:
        found.append(Launch(module, kernel, arguments))

    modules = [importlib.import_module(f"{package.__name__}.{x.name}") for x in pkgutil.iter_modules(package.__path__)]
    stand_ins = {"launch": launch, "has_values": lambda x: True}
    own = [(x, name, vars(x)[name]) for x in (package, *modules) for name in stand_ins if name in vars(x)]
    for module, name, _ in own:
        setattr(module, name, stand_ins[name])
    try:
        yield found
    finally:
        for module, name, x in own:
            setattr(module, name, x)


TOKENS, VOCABULARY, WIDTH = 4096, 151936, 2048


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16, trained: bool = True) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=trained)


def _ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device="meta")


def _head(trained: bool = True, dtype: torch.dtype = torch.bfloat16, weight: torch.dtype | None = None, **more: Any):
    hidden = _empty(TOKENS, WIDTH, dtype=dtype)
    return ll.Logits(hidden, _empty(VOCABULARY, WIDTH, dtype=weight or dtype, trained=trained), **more)


def _given(dtype: torch.dtype, **more: Any) -> Any:
    return ll.Logits.given(_empty(TOKENS, VOCABULARY, dtype=dtype), **more)


def calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """Calls that between them launch every kernel, at the sizes of a real model."""
    rows, half, wide = _ids(TOKENS), torch.bfloat16, torch.float32
    every = {"stats": ("top1", "rank", "collision", "mean_logit"), "top_k": 4, "ids": _ids(TOKENS, 8)}
    kept = ll.Kept(_ids(8 * TOKENS), torch.full((TOKENS,), 8, device="meta"))
    teacher = ll.Teacher(ll.Logits(_empty(TOKENS, WIDTH, trained=False), _empty(VOCABULARY, WIDTH, trained=False)))
    fields = {"old_logprob": "current", "advantage": torch.empty(TOKENS, device="meta")}
    odd = ll.Logits(_empty(TOKENS, WIDTH), _empty(50257, WIDTH))
    taught = Objective(divergence="jsd", divergence_coef=1.0)
    smoothed = Objective(policy="cross_entropy", policy_options={"label_smoothing": 0.1})
    return {
        "logits, float32": (ll.logprobs, (_given(wide), rows), {"entropy": "grad"}),
        "logits, bfloat16": (ll.logprobs, (_given(half), rows), {"entropy": "grad"}),
        "logits, canonical": (ll.logprobs, (_given(wide, bits="canonical"), rows), {"entropy": "value"}),
        "logits, statistics": (ll.logprobs, (_given(half), rows), every),
        "logits, teacher": (
            ll.logprobs,
            (_given(half), rows),
            {"teacher": ll.Teacher(_empty(TOKENS, VOCABULARY, trained=False)), "divergence": "jsd"},
        ),
        "hidden": (ll.logprobs, (_head(), rows), {"entropy": "grad"}),
        "hidden, stored": (ll.logprobs, (_head(), rows), {"entropy": "grad", "memory": "2GiB"}),
        "hidden, frozen head": (ll.logprobs, (_head(False), rows), {}),
        "hidden, softcap": (ll.logprobs, (_head(), rows), {"entropy": "grad", "head": ll.Head(softcap=30.0)}),
        "hidden, frozen head, fused softcap": (ll.logprobs, (_head(False), rows), {"head": ll.Head(softcap=30.0)}),
        "hidden, frozen head, softcap": (ll.logprobs, (_head(False, wide), rows), {"head": ll.Head(softcap=30.0)}),
        "hidden, float32": (ll.logprobs, (_head(dtype=wide), rows), {"entropy": "grad"}),
        "hidden, float32 head": (ll.logprobs, (_head(weight=wide), rows), {}),
        "hidden, canonical": (ll.logprobs, (_head(bits="canonical"), rows), {"entropy": "value"}),
        "hidden, statistics": (ll.logprobs, (_head(), rows), every),
        "hidden, support": (ll.logprobs, (_head(), rows), {"kept": kept.over("support")}),
        "hidden, teacher": (ll.logprobs, (_head(), rows), {"teacher": teacher}),
        "hidden, teacher, frozen head": (ll.logprobs, (_head(False), rows), {"teacher": teacher}),
        "loss": (ll.policy_loss, (_head(), rows, Objective(entropy_coef=0.01)), fields),
        "loss, odd vocabulary": (ll.policy_loss, (odd, rows, Objective()), fields),
        "loss, small": (ll.policy_loss, (_head(), rows, Objective()), fields | {"memory": "256MiB"}),
        "loss, smoothed": (ll.policy_loss, (_head(), rows, smoothed), {}),
        "loss, teacher": (ll.policy_loss, (_head(), rows, taught), fields | {"teacher": teacher}),
        "loss, teacher, KL": (ll.policy_loss, (_head(), rows, Objective.recipe("distill")), {"teacher": teacher}),
    }


def launches() -> list[Launch]:
    """One of each kernel and its compile-time arguments, in the order in which calls make them."""
    with recording() as found:
        # Another Triton makes nothing by turns; on cards that were not measured no product ends in a softmax.
        for machine in (H200, replace(H200, turns=False), replace(H200, epilogues=False)):
            for verb, args, options in calls().values():
                ll.estimate(verb, *args, device=machine, **options)
    return list({(x.module, x.kernel, _variant(x)): x for x in found}.values())


def unreached(found: list[Launch]) -> list[str]:
    """Kernels of the library that none of these is of."""
    missing = kernels() - {(x.module, x.kernel) for x in found}
    return sorted(name for _, name in missing)


VARIANTS = 3
"""Of a kernel that are compiled for every card."""


def _first_few(found: list[Launch]) -> Iterator[Launch]:
    seen: Counter[str] = Counter()
    for x in found:
        seen[x.kernel] += 1
        if seen[x.kernel] <= VARIANTS:
            yield x


def _variant(x: Launch) -> str:
    """What tells launches of a kernel apart for its compiler: dtypes, and numbers in capitals."""
    kinds = {name: _kind(name, value) for name, value in x.arguments.items()}
    return json.dumps({name: kind for name, kind in kinds.items() if kind is not None}, sort_keys=True)


def _kind(name: str, value: Any) -> str | None:
    base = getattr(value, "base", value)
    if isinstance(base, Tensor):
        return f"{base.dtype} {getattr(value, 'block_shape', '')}"
    return str(value) if name.isupper() or value is None or name.startswith("num_") else None


# What becomes of it.


class Elsewhere:
    """A stand-in for Triton's driver: it names a card, and has none."""

    def __init__(self, target: Target) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget(target.backend, target.arch, target.warp)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def usage(launch: Launch, target: Target) -> Usage:
    """What the kernel takes there, once it is compiled."""
    from triton.runtime import driver

    driver.set_active(Elsewhere(target))
    made = launch.compiled(amd=target.backend == "hip")
    threads = made.metadata.num_warps * target.warp
    if target.backend == "hip":
        text = made.asm["amdgcn"]
        registers, spilled = (max(map(int, re.findall(rf"\.{name}: +(\d+)", text))) for name in AMD)
        return Usage(registers, 4 * spilled, made.metadata.shared, threads)
    # The assembler tells, and Triton keeps it to itself.
    (arch,) = re.findall(r"^\.target (\w+)", made.asm["ptx"], re.MULTILINE)
    folder = Path(importlib.import_module("triton").__file__).parent / "backends" / "nvidia" / "bin"
    tool = folder / ("ptxas-blackwell" if int(target.arch) >= 100 else "ptxas")
    fused = [] if launch.arguments.get("enable_fp_fusion", True) else ["--fmad=false"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        Path(file.name).write_text(made.asm["ptx"])
        command = [str(tool), "-v", *fused, f"--gpu-name={arch}", file.name, "-o", os.devnull]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (registers,) = re.findall(r"Used (\d+) registers", text)
    spilled = max(map(int, re.findall(r"(\d+) bytes spill stores", text)))
    return Usage(int(registers), spilled, made.metadata.shared, threads)


AMD = ("vgpr_count", "vgpr_spill_count")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="where the records go, in place of those that are there")
    parser.add_argument("--kernel", default="*", help="name or pattern of kernels; records of others stay as they are")
    parser.add_argument("--turn", action="store_true", help="one variant of each kernel, for one target each in turn")
    asked = parser.parse_args()
    found = launches()
    missing = unreached(found)
    if missing:
        sys.exit(f"no call of benchmarks/cards.py launches {', '.join(missing)}")
    if asked.turn:
        firsts = list({(x.module, x.kernel): x for x in reversed(found)}.values())
        todo = [(x, [targets(x)[i % len(targets(x))]]) for i, x in enumerate(firsts)]
    else:
        todo = [(x, targets(x)) for x in _first_few(found) if fnmatchcase(x.kernel, asked.kernel)]
    lines = []
    versions = {"torch": torch.__version__, "triton": importlib.import_module("triton").__version__}
    for launch, names in todo:
        for name in names:
            begun = time.monotonic()
            took = usage(launch, TARGETS[name])
            seconds = round(time.monotonic() - begun, 1)
            line = {"kernel": launch.kernel, "target": name, **asdict(took), "variant": json.loads(_variant(launch))}
            lines.append({**line, "versions": versions})
            print(f"{launch.kernel:32}{name:8}{took}  {seconds} s  {took.too_much(TARGETS[name]) or ''}", flush=True)  # noqa: T201
    if asked.json:
        file = Path(asked.json)
        before = [] if asked.kernel == "*" else [json.loads(x) for x in file.read_text(encoding="utf-8").splitlines()]
        lines = [x for x in before if not fnmatchcase(x["kernel"], asked.kernel)] + lines
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
