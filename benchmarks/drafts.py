"""A draft head over part of its target's vocabulary: losses forward and backward, beside bare products and peers.

    PYTHONPATH=src:. python benchmarks/drafts.py --peers FOLDER --out benchmarks/results/drafts.jsonl
    PYTHONPATH=src:. python benchmarks/drafts.py --device cpu

16,384 tokens, a target of 151,936 ids, a draft of 32,000 of them, D = 4096. Two questions:

    shared    the forward KL over the ids that both have                        nothing outside of them is multiplied
    whole     the same, with the target's most likely id of all, its log Z      one product over the whole vocabulary
              and the acceptance rate

FOLDER holds ``speculators/losses/fused.py`` and ``specforge/core/{loss,compact_teacher,lk_loss}.py`` of those packages.
Every contender is compared with float64 at sampled rows first. A peak counts everything beyond the operands, gradients
included. Bare products are of the same shapes, in the same run, each into logits that are kept.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import logitless as ll
from benchmarks.bench.measure import interleaved, peak_bytes
from benchmarks.bench.records import Environment
from logitless.spec import format_bytes
from logitless.tools.outputs import text_table

SAMPLED = 24


@dataclass(frozen=True)
class Case:
    """One problem."""

    name: str
    tokens: int
    vocab: int
    draft: int
    hidden: int
    dtype: str = "bfloat16"


def case_of(device: str) -> Case:
    if device == "cpu":
        return Case("cpu", 512, 8192, 2048, 256, "float32")
    return Case("D4096", 16384, 151936, 32000, 4096)


@dataclass(frozen=True, eq=False)
class Inputs:
    """Operands; the weights of the draft and of the target, and which of the target's ids the draft has."""

    hidden: Tensor
    weight: Tensor
    target_hidden: Tensor
    target_weight: Tensor
    t2d: Tensor
    ids: Tensor
    rows: Tensor

    @property
    def draft(self) -> ll.Logits:
        return ll.Logits(self.hidden, self.weight)

    @property
    def teacher(self) -> ll.Teacher:
        return ll.Teacher(ll.Logits(self.target_hidden, self.target_weight), ids=self.ids)


def draw(case: Case, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)

    def normal(rows: int, scale: float) -> Tensor:
        x = torch.empty(rows, case.hidden, device=device).normal_(generator=generator)
        return x.mul_(scale).to(getattr(torch, case.dtype))

    scale = 2 * case.hidden**-0.5
    operands = [
        normal(case.tokens, 1.0),
        normal(case.draft, scale),
        normal(case.tokens, 1.0),
        normal(case.vocab, scale),
    ]
    chosen = torch.randperm(case.vocab, device=device, generator=generator)[: case.draft]
    t2d = torch.zeros(case.vocab, dtype=torch.bool, device=device).index_fill_(0, chosen, True)
    ids = torch.where(t2d, t2d.cumsum(0) - 1, -1)
    for x in operands[:2]:
        x.requires_grad_()
    return Inputs(*operands, t2d, ids, torch.zeros(case.tokens, dtype=torch.int64, device=device))


# Contenders: inputs to the loss, and what else they were asked for.

Scored = tuple[Tensor, dict[str, Tensor]]


def ours_shared(x: Inputs) -> Scored:
    out = ll.logprobs(x.draft, x.rows, teacher=x.teacher, divergence="forward_kl")
    assert out.divergence is not None
    return out.divergence.mean(), {"divergence": out.divergence.detach()}


def ours_frozen(x: Inputs) -> Scored:
    out = ll.logprobs(
        ll.Logits(x.hidden, x.weight.detach()), x.rows, teacher=x.teacher, divergence="forward_kl", memory="2560MiB"
    )
    assert out.divergence is not None
    return out.divergence.mean(), {"divergence": out.divergence.detach()}


def ours_as_a_loss(x: Inputs) -> Scored:
    objective = ll.Objective.recipe("distill", divergence="forward_kl")
    loss, _, stats = ll.policy_loss(x.draft, x.rows, objective, teacher=x.teacher, memory="2560MiB", return_stats=True)
    assert stats.divergence is not None
    return loss, {"divergence": stats.divergence}


def ours_whole(x: Inputs) -> Scored:
    stats = ("acceptance", "teacher_top1", "teacher_log_z")
    out = ll.logprobs(x.draft, x.rows, teacher=x.teacher, divergence="forward_kl", stats=stats)
    assert out.divergence is not None
    assert out.acceptance is not None
    assert out.teacher_top1_id is not None
    found = {"divergence": out.divergence, "acceptance": out.acceptance, "top1": out.teacher_top1_id}
    return out.divergence.mean(), {name: y.detach() for name, y in found.items()}


def ours_hybrid(x: Inputs) -> Scored:
    out = ll.logprobs(x.draft, x.rows, teacher=x.teacher, divergence="lk_hybrid")
    assert out.divergence is not None
    assert out.acceptance is not None
    return out.divergence.mean(), {"acceptance": out.acceptance.detach()}


def ours_hybrid_shared(x: Inputs) -> Scored:
    """Of a target whose head was cut beforehand, as speculators cuts it: the acceptance is over the shared ids."""
    out = ll.logprobs(x.draft, x.rows, teacher=ll.Logits(x.target_hidden, _cut(x)), divergence="lk_hybrid")
    assert out.divergence is not None
    return out.divergence.mean(), {}


def ours_hybrid_as_a_loss(x: Inputs, teacher: Any = None) -> Scored:
    objective = ll.Objective.recipe("distill", divergence="lk_hybrid")
    teacher = x.teacher if teacher is None else teacher
    loss, _ = ll.policy_loss(x.draft, x.rows, objective, teacher=teacher, memory="2560MiB")
    return loss, {}


def ours_hybrid_shared_as_a_loss(x: Inputs) -> Scored:
    return ours_hybrid_as_a_loss(x, ll.Logits(x.target_hidden, _cut(x)))


def ours_acceptance_as_a_loss(x: Inputs) -> Scored:
    objective = ll.Objective.recipe("distill", divergence="log_acceptance")
    loss, _ = ll.policy_loss(x.draft, x.rows, objective, teacher=x.teacher, memory="2560MiB")
    return loss, {}


def speculators_frozen(x: Inputs) -> Scored:
    with torch.no_grad():
        targets = x.target_hidden[None] @ _cut(x).T
    rows = peer("speculators.losses.fused").fused_kl_div_loss(x.hidden[None] @ x.weight.detach().T, targets)
    return rows.mean(), {"divergence": rows[0].detach()}


def speculators(x: Inputs) -> Scored:
    """As its models do: the target's head is cut to the draft's ids when it is loaded, which is not counted."""
    with torch.no_grad():
        targets = x.target_hidden[None] @ _cut(x).T
    rows = peer("speculators.losses.fused").fused_kl_div_loss(x.hidden[None] @ x.weight.T, targets)
    return rows.mean(), {"divergence": rows[0].detach()}


def speculators_hybrid(x: Inputs) -> Scored:
    with torch.no_grad():
        targets = x.target_hidden[None] @ _cut(x).T
    rows = peer("speculators.losses.fused").fused_lk_hybrid_loss(x.hidden[None] @ x.weight.T, targets)
    return rows.mean(), {}


def specforge(x: Inputs) -> Scored:
    """The compact teacher, the loss and the acceptance rate; its mask is of ones, so that all rows count."""
    mask = torch.ones(1, len(x.rows), 1, dtype=torch.int32, device=x.hidden.device)
    compact = peer("specforge.core.compact_teacher").compute_target_from_hidden
    p, on_draft, top1, _ = compact(x.target_hidden[None], x.target_weight, x.t2d, mask)
    logits = x.hidden[None] @ x.weight.T
    loss = peer("specforge.core.loss").LogSoftmaxLoss.apply(logits, p, mask)
    with torch.no_grad():
        rate = peer("specforge.core.lk_loss")._acceptance_rate_per_token_from_logits(logits, on_draft)
    return loss, {"acceptance": rate[0], "top1": top1[0]}


CUT: dict[int, Tensor] = {}


def _cut(x: Inputs) -> Tensor:
    if id(x) not in CUT:
        CUT[id(x)] = x.target_weight[x.t2d]
    return CUT[id(x)]


def peer(name: str) -> Any:
    """One file of a package, without what the package imports besides, which is not needed for it."""
    if name in sys.modules:
        return sys.modules[name]
    for parent in ("speculators", "speculators.losses", "speculators.utils", "specforge", "specforge.core"):
        if parent not in sys.modules:
            sys.modules[parent] = types.ModuleType(parent)
            sys.modules[parent].__path__ = [f"{folder}/{parent.replace('.', '/')}" for folder in sys.path]
    util = types.ModuleType("speculators.utils.util")
    util.is_npu_available = lambda: False  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules["speculators.utils.util"] = util
    return importlib.import_module(name)


class Contender(NamedTuple):
    """How it scores, the bare products that it needs at least, and the loss that it has."""

    score: Callable[[Inputs], Scored]
    products: str
    loss: str = "forward_kl"
    frozen: bool = False


CONTENDERS = {
    "ours, shared": Contender(ours_shared, "6 of the draft's"),
    "ours, shared, as a loss": Contender(ours_as_a_loss, "4 of the draft's"),
    "ours, shared, frozen head": Contender(ours_frozen, "3 of the draft's", frozen=True),
    "ours, whole": Contender(ours_whole, "6 of the draft's, 1 of the target's"),
    "ours, hybrid, shared": Contender(ours_hybrid_shared, "6 of the draft's", "lk_hybrid, shared"),
    "ours, hybrid": Contender(ours_hybrid, "6 of the draft's, 1 of the target's", "lk_hybrid"),
    "ours, hybrid, shared, as a loss": Contender(ours_hybrid_shared_as_a_loss, "4 of the draft's", "lk_hybrid, shared"),
    "ours, hybrid, as a loss": Contender(ours_hybrid_as_a_loss, "4 of the draft's, 1 of the target's", "lk_hybrid"),
    "ours, acceptance, as a loss": Contender(
        ours_acceptance_as_a_loss, "4 of the draft's, 1 of the target's", "log_acceptance"
    ),
    "speculators, shared": Contender(speculators, "4 of the draft's"),
    "speculators, shared, frozen head": Contender(speculators_frozen, "3 of the draft's", frozen=True),
    "speculators, hybrid, shared": Contender(speculators_hybrid, "4 of the draft's", "lk_hybrid, shared"),
    "SpecForge, whole": Contender(specforge, "4 of the draft's, 1 of the target's"),
}


def step(who: Contender, x: Inputs) -> tuple[dict[str, Tensor], list[Tensor]]:
    loss, found = who.score(x)
    return found, list(torch.autograd.grad(loss, (x.hidden,) if who.frozen else (x.hidden, x.weight)))


def products(x: Inputs, own: int, whole: bool) -> None:
    """``own`` of the draft's size: its logits and the target's at the same ids, d_hidden, d_weight, and the first two
    again. With ``whole`` one of the target's size, a draft's width at a time."""
    hidden, weight, other = x.hidden.detach(), x.weight.detach(), x.target_hidden
    if whole:
        for rows in x.target_weight.split(len(weight)):
            torch.mm(other, rows.T)
    d_z = torch.mm(hidden, weight.T)
    torch.mm(other, _cut(x).T)
    torch.mm(d_z, weight)
    if own > 3:
        torch.mm(d_z.T, hidden)
    for _ in range(max(0, own - 4) // 2):
        torch.mm(hidden, weight.T)
        torch.mm(other, _cut(x).T)


FLOORS: dict[str, tuple[int, bool]] = {
    "3 of the draft's": (3, False),
    "4 of the draft's": (4, False),
    "6 of the draft's": (6, False),
    "4 of the draft's, 1 of the target's": (4, True),
    "6 of the draft's, 1 of the target's": (6, True),
}


def errors(x: Inputs, who: Contender, found: dict[str, Tensor], d_hidden: Tensor) -> dict[str, float]:
    """At sampled rows: largest relative error of results, share of other argmaxes, relative norm of d_hidden's."""
    some = torch.randperm(len(x.rows), generator=torch.Generator().manual_seed(1))[:SAMPLED].to(x.rows.device)
    weight = x.weight.detach().double()
    z = (x.hidden.detach()[some].double() @ weight.T).requires_grad_()
    y = x.target_hidden[some].double() @ x.target_weight.double().T
    log_p, log_q = z.log_softmax(-1), y[:, x.t2d].log_softmax(-1)
    rows = (log_q.exp() * (log_q - log_p)).sum(-1)
    full = log_q if "shared" in who.loss else y.log_softmax(-1)[:, x.t2d]
    accepted = torch.minimum(log_p.exp(), full.exp()).sum(-1)
    if who.loss == "log_acceptance":
        loss = -accepted.log().sum() / len(x.rows)
    elif who.loss != "forward_kl":
        share = torch.exp(-3.0 * accepted.detach())
        loss = (share * rows + (1 - share) * (1 - accepted)).sum() / len(x.rows)
    else:
        loss = rows.sum() / len(x.rows)
    (d_z,) = torch.autograd.grad(loss, z)
    truth = d_z @ weight
    worst = {"d_hidden": float((d_hidden[some].double() - truth).norm() / truth.norm())}
    for name, right in (("divergence", rows), ("acceptance", accepted)):
        if name in found:
            right = right.detach()
            worst[name] = float(((found[name][some].double() - right) / right).abs().max())
    if "top1" in found:
        worst["top1"] = float((found["top1"][some] != y.argmax(-1)).double().mean())
    return worst


def run(case: Case, device: torch.device, options: argparse.Namespace) -> Iterator[dict]:
    x, lines, timed = draw(case, device), {}, {}
    for name, (own, whole) in FLOORS.items():
        timed[name] = lambda own=own, whole=whole: products(x, own, whole)
    for name, who in CONTENDERS.items():
        if options.only and not any(word in name for word in options.only):
            continue
        try:
            found, gradients = step(who, x)
            wrong = errors(x, who, found, gradients[0])
            del found, gradients
            lines[name] = {"errors": wrong, "peak_bytes": peak_bytes(lambda who=who: step(who, x), device)}
            timed[f"contender {name}"] = lambda who=who: step(who, x)
        except (torch.OutOfMemoryError, ImportError) as error:
            lines[name] = {"status": type(error).__name__, "text": str(error)[:300]}
            if device.type == "cuda":
                torch.cuda.empty_cache()
    laps = interleaved(timed, x.hidden, x.weight, options.repeats)
    for name, facts in lines.items():
        who = CONTENDERS[name]
        line = {"case": asdict(case), "contender": name, "loss": who.loss, **facts, "repeats": options.repeats}
        here = laps.get(f"contender {name}")
        if here:
            line |= {"ms": statistics.median(here), "range_ms": [min(here), max(here)]}
        line |= {"products": who.products, "products_ms": statistics.median(laps[who.products])}
        line["gradients_bytes"] = x.hidden.nbytes + (0 if who.frozen else x.weight.nbytes)
        yield line | {"environment": asdict(Environment.here(device, options.commit))}


def table(lines: list[dict]) -> str:
    rows = []
    for line in lines:
        wrong = " ".join(f"{name} {x:.0e}" for name, x in line.get("errors", {}).items())
        rows.append(
            (
                line["contender"],
                f"{line['ms']:.1f}" if "ms" in line else line.get("status", ""),
                f"{line['ms'] / line['products_ms']:.2f} of {line['products']}" if "ms" in line else "",
                format_bytes(line["peak_bytes"]) if "peak_bytes" in line else line.get("text", "")[:60],
                wrong,
            )
        )
    return text_table(("contender", "ms", "products", "peak", "errors"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file to append records to")
    parser.add_argument("--only", action="extend", nargs="+", default=[], help="contenders whose name has this word")
    parser.add_argument("--peers", type=Path, help="folder of unpacked packages to import peers from")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit")
    options = parser.parse_args()
    if options.peers is not None:
        sys.path.append(str(options.peers))
    lines = []
    for line in run(case_of(options.device), torch.device(options.device), options):
        lines.append(line)
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    sys.stdout.write(table(lines) + "\n")


if __name__ == "__main__":
    main()
