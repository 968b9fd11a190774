"""Distillation from two heads: divergences forward and backward, beside bare products and whoever else has them.

    python benchmarks/divergences.py --out benchmarks/results/divergences.jsonl [--peers FOLDER]
    python benchmarks/divergences.py --case D4096 --only ours
    python benchmarks/divergences.py --case D2048-4096 --only "top 64" logprobs --kind reverse_kl

Every contender is given the same operands and the mean over rows as its loss, and is compared with float64 at sampled
rows first: the divergence, where it tells it by row, and d_hidden. Bare products are of the same shapes, in the same
run: student and teacher forward, the same again in backward, d_hidden and d_weight, six in all; four where the loss is
known in forward. A peak counts everything beyond the operands, gradients included.

A teacher that sent its best log-probs takes no product of its own. Those contenders stand beside ``logprobs`` of the
same student and beside its bare products.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import json
import statistics
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import logitless as ll
from benchmarks.bench.measure import interleaved, peak_bytes
from benchmarks.bench.providers import add_peers
from benchmarks.bench.records import Environment
from logitless.spec import format_bytes
from logitless.tools.outputs import text_table

SAMPLED = 24
KINDS = ("reverse_kl", "forward_kl", "jsd")
BETAS = {"reverse_kl": 1.0, "forward_kl": 0.0, "jsd": 0.5}
"""As TRL and Liger name the same three by one number."""
BEST = 64
"""Log-probs of each token that a teacher behind a server sends."""


@dataclass(frozen=True)
class Case:
    """One problem: hidden sizes of student and teacher."""

    name: str
    tokens: int
    vocab: int
    hidden: int
    teacher: int
    dtype: str = "bfloat16"


def cases(device: str) -> list[Case]:
    if device == "cpu":
        return [Case("cpu", 512, 8192, 256, 512, "float32")]
    sizes = ((4096, 4096), (2048, 2048), (2048, 4096), (2048, 5120))
    return [Case(f"D{s}" if s == t else f"D{s}-{t}", 16384, 151936, s, t) for s, t in sizes]


@dataclass(frozen=True, eq=False)
class Inputs:
    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    target: Tensor

    @property
    def logits(self) -> ll.Logits:
        return ll.Logits(self.hidden, self.weight)

    @property
    def teacher(self) -> ll.Logits:
        return ll.Logits(self.teacher_hidden, self.teacher_weight)

    @cached_property
    @torch.no_grad()
    def sent(self) -> tuple[Tensor, Tensor]:
        """Log-probs and ids that the teacher would send, made in chunks of rows."""
        found = []
        for hidden in self.teacher_hidden.split(1024):
            found.append((hidden @ self.teacher_weight.T).float().log_softmax(-1).topk(BEST))
        logprobs, ids = (torch.cat(parts) for parts in zip(*found, strict=True))
        return logprobs, ids


def draw(case: Case, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def normal(rows: int, width: int, scale: float) -> Tensor:
        return torch.empty(rows, width, device=device).normal_(generator=generator).mul_(scale).to(dtype)

    operands = [
        normal(rows, width, scale)
        for width in (case.hidden, case.teacher)
        for rows, scale in ((case.tokens, 1.0), (case.vocab, 2 * width**-0.5))
    ]
    target = torch.randint(case.vocab, (case.tokens,), device=device, generator=generator)
    x = Inputs(*operands, target)
    x.hidden.requires_grad_()
    x.weight.requires_grad_()
    return x


# Contenders: (inputs, kind) to the loss, and the divergence of each row if it is told.

Scored = tuple[Tensor, Tensor | None]


def two_passes(x: Inputs, kind: str) -> Scored:
    return _divergence(x, kind, x.teacher)


def _divergence(x: Inputs, kind: Any, teacher: ll.Logits | ll.Teacher) -> Scored:
    rows = ll.logprobs(x.logits, x.target, teacher=teacher, divergence=kind).divergence
    assert rows is not None
    return rows.mean(), rows.detach()


def as_a_loss(x: Inputs, kind: str, memory: str = "2560MiB") -> Scored:
    objective = ll.Objective.recipe("distill", divergence=kind)
    loss, _, stats = ll.policy_loss(x.logits, x.target, objective, teacher=x.teacher, memory=memory, return_stats=True)
    return loss, stats.divergence


def best_and_rest(x: Inputs, kind: str) -> Scored:
    return _of_sent(x, kind, "bucket")


def best_alone(x: Inputs, kind: str) -> Scored:
    return _of_sent(x, kind, "renormalise")


def _of_sent(x: Inputs, kind: str, tail: str) -> Scored:
    teacher = ll.Teacher.from_top_k(*x.sent, tail=tail)  # pyright: ignore[reportArgumentType]
    return _divergence(x, kind, teacher)


def best_as_a_loss(x: Inputs, kind: str, memory: str = "2560MiB") -> Scored:
    objective, teacher = ll.Objective.recipe("distill", divergence=kind), ll.Teacher.from_top_k(*x.sent)
    loss, _, stats = ll.policy_loss(x.logits, x.target, objective, teacher=teacher, memory=memory, return_stats=True)
    return loss, stats.divergence


def logprobs_alone(x: Inputs, kind: str) -> Scored:
    rows = -ll.logprobs(x.logits, x.target, memory="1GiB").logprob
    return rows.mean(), rows.detach()


def plain(x: Inputs, kind: str) -> Scored:
    z, y = (x.hidden @ x.weight.T).float(), (x.teacher_hidden @ x.teacher_weight.T).float()
    return _of_logits(z, y, kind)


def _of_logits(z: Tensor, y: Tensor, kind: str) -> Scored:
    return _of_logprobs(z.log_softmax(-1), y.log_softmax(-1), kind)


def _of_logprobs(log_p: Tensor, log_q: Tensor, kind: str) -> Scored:
    if kind == "forward_kl":
        rows = (log_q.exp() * (log_q - log_p)).sum(-1)
    elif kind == "reverse_kl":
        rows = (log_p.exp() * (log_p - log_q)).sum(-1)
    else:
        mixture = torch.logaddexp(log_p, log_q) - torch.log(torch.tensor(2.0, device=log_p.device))
        rows = 0.5 * ((log_p.exp() * (log_p - mixture)).sum(-1) + (log_q.exp() * (log_q - mixture)).sum(-1))
    return rows.mean(), rows.detach()


def compiled(x: Inputs, kind: str) -> Scored:
    return _compiled(x.hidden, x.weight, x.teacher_hidden, x.teacher_weight, kind)


@torch.compile
def _compiled(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, kind: str) -> Scored:
    return _of_logits((hidden @ weight.T).float(), (teacher_hidden @ teacher_weight.T).float(), kind)


def trl(x: Inputs, kind: str) -> Scored:
    function = _trl_kernel().ChunkedDivergenceFunction
    rows, _ = function.apply(x.hidden, x.weight, None, x.teacher_hidden, x.teacher_weight, None, BETAS[kind])
    return rows.mean(), rows.detach()


@functools.cache
def _trl_kernel() -> Any:
    """The kernel's module. Without what its package imports besides, which is not needed, nor installed everywhere."""
    if importlib.util.find_spec("datasets") is None:
        spec = importlib.util.find_spec("trl")
        if spec is None:
            raise ImportError("trl is not installed")
        for name in ("trl", "trl.kernels", "trl.trainer", "trl.trainer.utils"):
            sys.modules[name] = types.ModuleType(name)
            folders = [f"{folder}/{name[4:]}" for folder in spec.submodule_search_locations or []]
            sys.modules[name].__path__ = folders
        sys.modules["trl.trainer.utils"].maybe_gather_lm_head_ctx = lambda *_: contextlib.nullcontext()  # pyright: ignore[reportAttributeAccessIssue]
    return importlib.import_module("trl.kernels.chunked_divergence")


def liger(x: Inputs, kind: str) -> Scored:
    function = importlib.import_module("liger_kernel.transformers.fused_linear_jsd").LigerFusedLinearJSD(BETAS[kind])
    return function(x.hidden, x.weight, x.teacher_hidden, x.teacher_weight, x.target), None


# What each is compared with: of float64 logits of some rows, what it makes of them.


def truth_of_both(x: Inputs, some: Tensor, z: Tensor, kind: str) -> Scored:
    return _of_logits(z, x.teacher_hidden[some].double() @ x.teacher_weight.double().T, kind)


def truth_of_best(x: Inputs, some: Tensor, z: Tensor, kind: str) -> Scored:
    log_q, ids = x.sent[0][some].double(), x.sent[1][some]
    return _of_logprobs(z.gather(1, ids).log_softmax(-1), log_q.log_softmax(-1), kind)


def truth_of_rest(x: Inputs, some: Tensor, z: Tensor, kind: str) -> Scored:
    log_q, ids = x.sent[0][some].double(), x.sent[1][some]
    others = z.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    log_p = torch.cat([z.gather(1, ids), others], -1).log_softmax(-1)
    return _of_logprobs(log_p, torch.cat([log_q, (1 - log_q.exp().sum(-1, keepdim=True)).log()], -1), kind)


def truth_of_target(x: Inputs, some: Tensor, z: Tensor, kind: str) -> Scored:
    rows = -z.log_softmax(-1).gather(1, x.target[some, None])[:, 0]
    return rows.mean(), rows.detach()


class Contender(NamedTuple):
    """How it scores, the products that it needs at least, what is right, and the kinds that it has."""

    score: Callable[[Inputs, str], Scored]
    products: int | str
    truth: Callable[[Inputs, Tensor, Tensor, str], Scored] = truth_of_both
    kinds: tuple[str, ...] = KINDS


OWN, OWN_ONCE = "the student's 4", "the student's 3"

CONTENDERS = {
    "ours, two passes": Contender(two_passes, 6),
    "ours, as a loss": Contender(as_a_loss, 4),
    "TRL": Contender(trl, 6),
    "Liger": Contender(liger, 4),
    "torch.compile": Contender(compiled, 4),
    "plain torch": Contender(plain, 4),
    "logprobs": Contender(logprobs_alone, OWN, truth_of_target, ("log-prob",)),
    f"top {BEST}, bucket": Contender(best_and_rest, OWN, truth_of_rest),
    f"top {BEST}, bucket, as a loss": Contender(best_as_a_loss, OWN_ONCE, truth_of_rest),
    f"top {BEST}, renormalised": Contender(best_alone, OWN, truth_of_best),
}


def step(score: Callable[[Inputs, str], Scored], x: Inputs, kind: str) -> tuple[Tensor | None, list[Tensor]]:
    loss, rows = score(x, kind)
    return rows, list(torch.autograd.grad(loss, (x.hidden, x.weight)))


def products(x: Inputs, backward: bool) -> None:
    """The bare products: four, and with ``backward`` the first two again. Of as many rows as keep logits in memory."""
    hidden, weight, other, other_weight = (y.detach() for y in (x.hidden, x.weight, x.teacher_hidden, x.teacher_weight))
    for _ in range(2 if backward else 1):
        d_z = hidden @ weight.T
        torch.mm(other, other_weight.T)
    torch.mm(d_z, weight)
    torch.mm(d_z.T, hidden)


def own_products(x: Inputs, backward: bool) -> None:
    """The student's: its logits, with ``backward`` twice, d_hidden and d_weight."""
    hidden, weight = x.hidden.detach(), x.weight.detach()
    for _ in range(2 if backward else 1):
        d_z = hidden @ weight.T
    torch.mm(d_z, weight)
    torch.mm(d_z.T, hidden)


@torch.no_grad()
def errors(x: Inputs, who: Contender, kind: str, rows: Tensor | None, d_hidden: Tensor) -> dict[str, float]:
    """Largest relative error of the divergences, and relative norm of that of d_hidden, at sampled rows."""
    some = torch.randperm(len(x.target), generator=torch.Generator().manual_seed(1))[:SAMPLED].to(x.target.device)
    weight = x.weight.detach().double()
    z = x.hidden.detach()[some].double() @ weight.T
    with torch.enable_grad():
        z.requires_grad_()
        loss, right = who.truth(x, some, z, kind)
        (d_z,) = torch.autograd.grad(loss * SAMPLED / len(x.target), z)
    truth = d_z @ weight
    worst = {"d_hidden": float((d_hidden[some].double() - truth).norm() / truth.norm())}
    if rows is not None and right is not None:
        worst["divergence"] = float(((rows[some].double() - right) / right).abs().max())
    return worst


def run(case: Case, device: torch.device, options: argparse.Namespace) -> Iterator[dict]:
    x = draw(case, device)
    found: dict[tuple[str, str], dict] = {}
    timed: dict[str, Callable[[], object]] = {
        "4 products": lambda: products(x, backward=False),
        "6 products": lambda: products(x, backward=True),
        f"{OWN} products": lambda: own_products(x, backward=True),
        f"{OWN_ONCE} products": lambda: own_products(x, backward=False),
    }
    for name, who in CONTENDERS.items():
        if options.only and not any(word in name for word in options.only):
            continue
        score = who.score
        for kind in [kind for kind in who.kinds if who.kinds != KINDS or not options.kind or kind in options.kind]:
            try:
                rows, gradients = step(score, x, kind)
                wrong = errors(x, who, kind, rows, gradients[0])
                del rows, gradients
                peak = peak_bytes(lambda score=score, kind=kind: step(score, x, kind), device)
            except (torch.OutOfMemoryError, ImportError) as error:
                found[name, kind] = {"status": type(error).__name__, "text": str(error)[:200]}
                torch.cuda.empty_cache()
                continue
            found[name, kind] = {"errors": wrong, "peak_bytes": peak}
            timed[f"{name} {kind}"] = lambda score=score, kind=kind: step(score, x, kind)
    laps = interleaved(timed, x.hidden, x.weight, options.repeats)
    floors = {n: statistics.median(laps[f"{n} products"]) for n in (4, 6, OWN, OWN_ONCE)}
    for (name, kind), facts in found.items():
        line = {"case": asdict(case), "contender": name, "kind": kind, **facts, "repeats": options.repeats}
        if f"{name} {kind}" in laps:
            here = laps[f"{name} {kind}"]
            line |= {"ms": statistics.median(here), "range_ms": [min(here), max(here)]}
        line |= {"products": CONTENDERS[name].products, "products_ms": floors[CONTENDERS[name].products]}
        line["gradients_bytes"] = x.hidden.nbytes + x.weight.nbytes
        yield line | {"environment": asdict(Environment.here(device, options.commit))}


def table(lines: list[dict]) -> str:
    rows = []
    for line in lines:
        worst = line.get("errors", {})
        rows.append(
            (
                line["case"]["name"],
                line["contender"],
                line["kind"],
                f"{line['ms']:.1f}" if "ms" in line else line.get("status", ""),
                f"{line['ms'] / line['products_ms']:.2f} of {line['products']}" if "ms" in line else "",
                format_bytes(line["peak_bytes"]) if "peak_bytes" in line else "",
                f"{worst['divergence']:.1e}" if "divergence" in worst else "",
                f"{worst['d_hidden']:.1e}" if worst else "",
            )
        )
    return text_table(("case", "contender", "kind", "ms", "products", "peak", "value error", "dX error"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file to append records to")
    parser.add_argument("--case", action="extend", nargs="+", default=[])
    parser.add_argument("--kind", action="extend", nargs="+", default=[])
    parser.add_argument("--only", action="extend", nargs="+", default=[], help="contenders whose name has this word")
    parser.add_argument("--peers", type=Path, help="folder of unpacked packages to import peers from")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit")
    options = parser.parse_args()
    if options.peers is not None:
        add_peers(options.peers)
    device, lines = torch.device(options.device), []
    for case in cases(options.device):
        if options.case and case.name not in options.case:
            continue
        for line in run(case, device, options):
            lines.append(line)
            if options.out is not None:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    sys.stdout.write(table(lines) + "\n")


if __name__ == "__main__":
    main()
