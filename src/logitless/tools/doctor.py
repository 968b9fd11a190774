"""``logitless doctor``: which packages are installed, which backends run here, and whether their results are right.

Each backend that runs is tried on small random inputs, forward and backward, in float32 and bfloat16: ``logprobs`` of
logits and of hidden states, with a temperature and a softcap, compared with float64 from the same rounded operands.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from logitless.adapters import HOSTS
from logitless.adapters.patching import try_host
from logitless.adapters.signatures import is_there
from logitless.backends import NAMES, choose_backend, load
from logitless.engines import GROUPS, PARTS, VARIABLE, asked, registered
from logitless.errors import LogitlessError, first_line
from logitless.errors.arguments import refused
from logitless.machine import GLUON, Machine
from logitless.operands import Logits
from logitless.score import logprobs
from logitless.spec import Head, format_bytes

PACKAGES = ("logitless", "torch", "triton", "transformers", "typer", "rich", "matplotlib", "pyarrow")

ROWS, COLUMNS, DEPTH = 37, 1003, 24
HEAD = Head(temperature=0.7, softcap=25.0)

ENGINE_HEADS = ("bfloat16", "float16", "float32")
"""Dtypes that a rollout engine's head may give its logits in."""

VALUE_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
"""The library's promise: largest error of a log-prob or entropy, and error of a gradient relative to its size."""


@dataclass(frozen=True)
class BackendFinding:
    """Whether a backend runs on the device, and why."""

    name: str
    runs: bool
    reason: str


@dataclass(frozen=True)
class ExactnessFinding:
    """Distance of the results from ``"logits"`` or ``"hidden states"`` (``path``) to float64, or the error.

    Attributes:
        value: largest error of log-probs and entropies, relative to their size where that is above 1.
        gradient: largest error of a gradient, relative to its size.
    """

    path: str
    backend: str
    dtype: str
    value: float | None
    gradient: float | None
    failure: str | None

    @property
    def errors(self) -> tuple[str, str]:
        """Both errors as texts, or the failure."""
        if self.value is None or self.gradient is None:
            return self.failure or "", ""
        return f"{self.value:.1e}", f"{self.gradient:.1e}"

    @property
    def ok(self) -> bool:
        if self.value is None or self.gradient is None:
            return False
        # NaN fails: it is not at most a tolerance.
        return self.value <= VALUE_TOLERANCE and self.gradient <= GRADIENT_TOLERANCE[getattr(torch, self.dtype)]


@dataclass(frozen=True)
class HostFinding:
    """A framework with an adapter.

    Attributes:
        found: its version here, or None.
        tested: versions that the adapter was tested with.
        installs: whether ``install`` would succeed here; None where the framework is not found.
        remarks: why it would not; or how this installation differs from the tested ones.
    """

    name: str
    found: str | None
    tested: tuple[str, ...]
    installs: bool | None = None
    remarks: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        if self.installs is None:
            return ""
        return "; ".join(["would install" if self.installs else "would be refused", *self.remarks])


@dataclass(frozen=True)
class Findings:
    """All findings about this machine."""

    versions: dict[str, str | None]
    device: str
    chosen: str
    backends: tuple[BackendFinding, ...]
    exactness: tuple[ExactnessFinding, ...]
    hosts: tuple[HostFinding, ...]
    engines: tuple[HostFinding, ...]

    @property
    def ok(self) -> bool:
        """Whether every backend that runs here is right."""
        return all(finding.ok for finding in self.exactness)

    def as_json(self) -> dict[str, Any]:
        exactness = [asdict(finding) | {"ok": finding.ok} for finding in self.exactness]
        return asdict(self) | {"exactness": exactness, "ok": self.ok}


def examine(device: torch.device, engine_head: str | None = None) -> Findings:
    """Look at this machine and try the library on a device. With ``engine_head``, the dtype of the rollout engine's
    logits, the findings say which logits hosts should be asked for."""
    # A wrong engine_head is refused before anything is tried.
    advice(engine_head)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise LogitlessError('doctor: device is "cuda" but torch sees no CUDA device. Use --device cpu.')
    choice = choose_backend(torch.zeros(1, 1, device=device))
    backends = tuple(_backend(name, device) for name in NAMES)
    exactness = [
        _exactness(path, backend.name, dtype, device)
        for backend in backends
        if backend.runs
        for path in ("logits", "hidden states")
        for dtype in GRADIENT_TOLERANCE
    ]
    return Findings(
        versions={"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        device=_describe(device),
        chosen=f"{choice.name}: {choice.reason}",
        backends=backends,
        exactness=tuple(exactness),
        hosts=tuple(_host(name, engine_head) for name in HOSTS),
        engines=tuple(_engine(name) for name in sorted(PARTS)),
    )


def _describe(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device.type} ({torch.get_num_threads()} threads)"
    facts = torch.cuda.get_device_properties(device)
    return f"{facts.name}, compute capability {facts.major}.{facts.minor}, {format_bytes(facts.total_memory)}"


def _backend(name: str, device: torch.device) -> BackendFinding:
    try:
        module: Any = load(name)
        reason = module.unavailable(torch.zeros(1, 1, device=device)) if name == "triton" else None
    # A broken installation of Triton can raise anything when it is imported; here that is the finding.
    except Exception as error:
        return BackendFinding(name, False, str(error).strip() or type(error).__name__)
    if reason is not None:
        return BackendFinding(name, False, reason)
    interpreted = name == "triton" and module.interpreted()
    where = "in Triton's interpreter" if interpreted else f"on {device.type}{_products(name, device)}"
    return BackendFinding(name, True, where)


def _products(name: str, device: torch.device) -> str:
    """How Triton's products that end in a softmax are made on this card."""
    if name != "triton" or device.type != "cuda":
        return ""
    try:
        machine = Machine.of(device)
    except LogitlessError as error:
        return f", {error}"
    if not machine.epilogues:
        return ", logits go through memory: fused products were not measured on this card"
    if machine.turns:
        return ", fused products by turns"
    ran = " and ".join(GLUON)
    return f", fused products at once: by turns they were run on capability 9 with Triton {ran} alone"


def _exactness(path: str, backend: str, dtype: torch.dtype, device: torch.device) -> ExactnessFinding:
    name = str(dtype).removeprefix("torch.")
    try:
        ours, truth = _results(path, backend, dtype, device), _results(path, None, dtype, device)
    # A compiler or driver can raise anything, and the user asked to be told.
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        return ExactnessFinding(path, backend, name, None, None, text)
    off = [(a.double() - b).abs() for a, b in zip(ours, truth, strict=True)]
    value = _worst([(x / b.abs().clamp_min(1.0)).amax() for x, b in zip(off[:2], truth[:2], strict=True)])
    gradient = _worst([x.norm() / b.norm() for x, b in zip(off[2:], truth[2:], strict=True)])
    return ExactnessFinding(path, backend, name, value, gradient, None)


def _worst(errors: list[Tensor]) -> float:
    """The largest error, or NaN if one is NaN: Python's own max keeps whichever comes first."""
    return float(torch.stack(errors).amax())


def _results(path: str, backend: str | None, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Log-prob, entropy and gradients; by plain torch in float64 where no backend is named."""
    generator = torch.Generator().manual_seed(0)
    logits, hidden, weight = (
        torch.randn(size, generator=generator) * spread
        for size, spread in (((ROWS, COLUMNS), 8.0), ((ROWS, DEPTH), 2.0), ((COLUMNS, DEPTH), 1.0))
    )
    target = torch.randint(COLUMNS, (ROWS,), generator=generator).to(device)
    upstream = [torch.randn(ROWS, generator=generator).to(device) for _ in range(2)]
    leaves = [logits] if path == "logits" else [hidden, weight]
    leaves = [x.to(device, dtype) for x in leaves]
    leaves = [(x.double() if backend is None else x).requires_grad_() for x in leaves]
    if backend is None:
        out = _truth(leaves[0] if path == "logits" else leaves[0] @ leaves[1].T, target)
        upstream = [g.double() for g in upstream]
    else:
        given = leaves[0] if path == "logits" else Logits(*leaves)
        stats = logprobs(given, target, entropy="grad", head=HEAD, backend=backend, memory="256KiB")
        assert stats.entropy is not None
        out = stats.logprob, stats.entropy
    return [*(x.detach() for x in out), *torch.autograd.grad(out, leaves, upstream)]


def _truth(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    assert HEAD.softcap is not None
    logp = torch.log_softmax(HEAD.softcap * torch.tanh(x / HEAD.softcap) / HEAD.temperature, -1)
    return logp.gather(1, target[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def advice(engine_head: str | None) -> str | None:
    """Which logits to ask for beside a rollout engine whose head has this dtype; None where it was not told.

    >>> advice("float32")
    "the engine's head is float32: install with logits='float32'"
    """
    if engine_head is None:
        return None
    if engine_head not in ENGINE_HEADS:
        raise refused("doctor: engine_head", " or ".join(ENGINE_HEADS), engine_head)
    wanted = "float32" if engine_head == "float32" else "deferred"
    return f"the engine's head is {engine_head}: install with logits={wanted!r}"


def _host(name: str, engine_head: str | None = None) -> HostFinding:
    """Whether the adapter of a host would install: the host is imported, and nothing of it replaced."""
    host = importlib.import_module(f"logitless.adapters.{name}").HOST
    tested = tuple(host.versions)
    if not is_there(host.package):
        return HostFinding(name, None, tested)
    report = _tried(host)
    if isinstance(report, str):
        version = _version(host.distribution or host.package) or "of unknown version"
        return HostFinding(name, version, tested, False, (report,))
    told = advice(engine_head) if host.heads is not None else None
    # A trial defers nothing, so that there is no number of models to tell.
    logits = (line.removesuffix("; 0 models so far") for line in report.logits)
    remarks = (*logits, *([told] if told is not None else []), *report.notes, *report.missing)
    return HostFinding(name, report.version, tested, True, remarks)


def _tried(host: Any, options: dict[str, Any] | None = None) -> Any:
    """The report of a trial installation, or the first line of the error that it raised."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return try_host(host, options or {})
    # A framework can raise anything when it is imported; here that is the finding.
    except Exception as error:
        return first_line(error)


def _engine(name: str) -> HostFinding:
    """Whether a rollout engine would get the parts that the environment asks for; otherwise, which it could."""
    module = importlib.import_module(f"logitless.engines.{name}")
    tested = tuple(module.HOST.versions)
    if not is_there(module.HOST.package):
        return HostFinding(name, None, tested)
    version = _version(name) or "of unknown version"
    try:
        parts = asked(name)
    except LogitlessError as error:
        return HostFinding(name, version, tested, False, (str(error),))
    remarks = [f"{VARIABLE} asks for {', '.join(parts) or 'nothing'}"]
    if not registered(name):
        remarks.append(f"no entry point {GROUPS[name]} of logitless is installed, so that the engine does not find it")
    refused = {part: why for part in PARTS[name] if (why := _without(module, part)) is not None}
    remarks += [f"no {part}: {why}" for part, why in refused.items()]
    fits = not refused.keys() & set(parts) and len(refused) < len(PARTS[name])
    return HostFinding(name, version, tested, fits, tuple(remarks))


def _without(module: Any, part: str) -> str | None:
    """Why an engine would not get a part; None where it would."""
    report = _tried(module.HOST, {"parts": (part,)})
    if isinstance(report, str):
        return report
    there = {entry.name for entry in report.replaced} & {x.path for x in module.OF_PARTS[part]}
    return None if there else "; ".join(report.missing)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
