"""Log-probs over the sampler's support, by dot products with its ids: beside the whole product, plain torch and floors.

    python benchmarks/supports.py --out benchmarks/results/supports.jsonl            the GPU's cases, or the CPU's
    python benchmarks/supports.py --case mix-4096 --sizes                            one case, over sizes of the kernels
    LOGITLESS_HOSTS=F python benchmarks/supports.py --skyrl                          also SkyRL 0.4's function, before
                                                                                     and after install

Supports are drawn with the sizes that were reported of real ones (mean 8, median 2, p99 82, 46 % of one id), or all
with as many ids. The ids of a row are drawn by Zipf's law, so that some ids are in very many supports. Every contender
is compared with float64 at sampled rows first: log-probs, entropies, d_hidden and d_weight. Two floors are in the same
run: the bytes that have to move at the speed of a copy, and torch's own gather of the same rows (``embedding_bag``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

import logitless as ll
from benchmarks.bench import checkouts
from benchmarks.bench.measure import interleaved, peak_bytes
from benchmarks.bench.records import Environment
from logitless.backends import triton as kernels
from logitless.spec import format_bytes
from logitless.tools.outputs import text_table
from logitless.tools.stopwatch import StopWatch, copy_bandwidth

SAMPLED = 32
SKYRL = "skyrl.backends.skyrl_train.utils.sample_support_replay"
SIZES = ((4, 1024, 4), (8, 1024, 4), (16, 1024, 4), (8, 512, 2), (16, 512, 2), (8, 256, 1), (16, 256, 1), (8, 2048, 8))
"""Entries and columns of a block, and warps, that ``--sizes`` tries."""


@dataclass(frozen=True)
class Case:
    """One problem: ``ids`` in every support, or None for a heavy-tailed mix."""

    name: str
    tokens: int
    vocab: int
    hidden: int
    ids: int | None
    dtype: str = "bfloat16"


def cases(device: str) -> list[Case]:
    if device == "cpu":
        return [Case(f"cpu-{n or 'mix'}", 2048, 32768, 512, n, "float32") for n in (None, 1, 8, 64)]
    sizes = [(4096, n) for n in (None, 1, 8, 64, 1024)] + [(2048, None)]
    return [Case(f"{n or 'mix'}-{d}", 16384, 151936, d, n) for d, n in sizes]


@dataclass(frozen=True, eq=False)
class Inputs:
    hidden: Tensor
    weight: Tensor
    target: Tensor
    kept: ll.Kept
    g_logprob: Tensor
    g_entropy: Tensor


def draw(case: Case, device: torch.device) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    if case.ids is None:
        lengths = torch.empty(case.tokens).log_normal_(1.93, 1.19, generator=generator).round().clamp_min(2)
        lengths[torch.rand(case.tokens, generator=generator) < 0.46] = 1
    else:
        lengths = torch.full((case.tokens,), case.ids)
    lengths = lengths.to(torch.int64)
    share = (-1.1 * torch.log1p(torch.arange(case.vocab, dtype=torch.float64))).exp().cumsum(0)
    spot = torch.rand(int(lengths.sum()), generator=generator, dtype=torch.float64) * share[-1]
    name = torch.randperm(case.vocab, generator=generator)
    ids = name[torch.searchsorted(share, spot).clamp_max(case.vocab - 1)]
    target = ids[lengths.cumsum(0) - 1]
    on_device = torch.Generator(device).manual_seed(1)
    dtype = getattr(torch, case.dtype)
    hidden, weight = (
        torch.empty(n, case.hidden, device=device).normal_(generator=on_device).mul_(scale).to(dtype)
        for n, scale in ((case.tokens, 1.0), (case.vocab, 2 * case.hidden**-0.5))
    )
    g = torch.randn(2, case.tokens, generator=generator).to(device)
    kept = ll.Kept(ids.to(device), lengths.to(device))
    return Inputs(hidden.requires_grad_(), weight.requires_grad_(), target.to(device), kept, *g)


Scores = tuple[Tensor, Tensor | None]


def support(x: Inputs) -> Scores:
    out = ll.logprobs(ll.Logits(x.hidden, x.weight), x.target, kept=x.kept.over("support"), entropy="grad")
    return out.logprob, out.entropy


def vocabulary(x: Inputs) -> Scores:
    """The whole product, and log-probs over the support gathered out of it; entropy is that of the whole row."""
    return ll.logprobs(ll.Logits(x.hidden, x.weight), x.target, kept=x.kept).logprob, None


def masked(x: Inputs) -> Scores:
    """As trainers do it: all logits, everything outside of the support filled with -inf, one log_softmax."""
    logits = (x.hidden @ x.weight.T).float()
    row = torch.repeat_interleave(torch.arange(len(x.target), device=logits.device), x.kept.lengths)
    outside = torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
    outside[row, x.kept.ids] = False
    outside.scatter_(1, x.target[:, None], False)
    logp = torch.log_softmax(logits.masked_fill(outside, -torch.inf), -1)
    return logp.gather(1, x.target[:, None]).squeeze(1), None


def skyrl(x: Inputs) -> Scores:
    """SkyRL's own function from hidden states, on supports padded with -1 to the longest, a thousand rows at a time."""
    (module,) = checkouts.load("skyrl", SKYRL)
    arange = torch.arange(int(x.kept.lengths.max()), device=x.target.device)
    inside = arange < x.kept.lengths[:, None]
    padded = torch.full(inside.shape, -1, dtype=torch.int32, device=x.target.device)
    padded[inside] = x.kept.ids.to(torch.int32)
    # Each id once, as samplers send them: SkyRL adds up what it is given.
    padded = padded.sort(-1, descending=True).values
    padded[:, 1:].masked_fill_(padded[:, 1:] == padded[:, :-1], -1)
    whole = {"vocab_start_index": 0, "vocab_end_index": len(x.weight), "tp_group": None, "chunk_size": 1024}
    asked = {"compute_entropy": True, "entropy_requires_grad": True, "lm_head_weight": x.weight}
    out = module.sample_support_scores(x.hidden, x.target, padded, **whole, **asked)
    return out.logprobs, out.entropy


def skyrl_with_ours(x: Inputs) -> Scores:
    checkouts.load("skyrl", SKYRL)
    ll.install("skyrl", only=["sample_support_scores"], any_version=True)
    try:
        return skyrl(x)
    finally:
        ll.uninstall("skyrl")


CONTENDERS: dict[str, Callable[[Inputs], Scores]] = {
    'scope="support"': support,
    'scope="vocabulary"': vocabulary,
    "plain torch, masked": masked,
}


def step(score: Callable[[Inputs], Scores], x: Inputs, clock: StopWatch | None = None) -> tuple[Scores, list[Tensor]]:
    mark = clock.mark if clock else lambda: None
    mark()
    scores = score(x)
    mark()
    pairs = [(s, g) for s, g in zip(scores, (x.g_logprob, x.g_entropy), strict=True) if s is not None]
    gradients = torch.autograd.grad([s for s, _ in pairs], (x.hidden, x.weight), [g.to(s) for s, g in pairs])
    mark()
    return scores, list(gradients)


@torch.no_grad()
def errors(x: Inputs, scores: Scores, gradients: list[Tensor]) -> dict[str, float]:
    """Largest error of log-probs and entropies, relative norms of the errors of gradients, at sampled rows and ids."""
    ends = x.kept.lengths.cumsum(0)
    generator = torch.Generator().manual_seed(2)
    rows = torch.randperm(len(x.target), generator=generator)[:SAMPLED].tolist()
    # Ids of few rows, so that the truth of their gradients needs few rows.
    counts = torch.bincount(x.kept.ids, minlength=len(x.weight))
    few = ((counts > 0) & (counts <= SAMPLED)).nonzero().squeeze(1).cpu()
    some = few[torch.randperm(len(few), generator=generator)[:SAMPLED]].to(x.target.device)
    found = torch.isin(x.kept.ids, some).nonzero().squeeze(1)
    needed = torch.cat([torch.searchsorted(ends, found, right=True), torch.isin(x.target, some).nonzero().squeeze(1)])
    d_weight = dict.fromkeys(some.tolist(), torch.zeros((), device=ends.device))
    worst = {"logprob": 0.0, "entropy": 0.0, "d_hidden": 0.0, "d_weight": 0.0}
    for r in sorted({*rows, *needed.tolist()}):
        end = int(ends[r])
        here = torch.cat([x.kept.ids[end - int(x.kept.lengths[r]) : end], x.target[r : r + 1]]).unique()
        w, onehot = x.weight[here].double(), (here == x.target[r]).double()
        logp = torch.log_softmax(w @ x.hidden[r].double(), 0)
        entropy = -(logp.exp() * logp).sum()
        dz = x.g_logprob[r].double() * (onehot - logp.exp())
        if scores[1] is not None:
            dz -= x.g_entropy[r].double() * logp.exp() * (logp + entropy)
        for place, i in enumerate(here.tolist()):
            if i in d_weight:
                d_weight[i] = d_weight[i] + dz[place] * x.hidden[r].double()
        if r not in rows:
            continue
        worst["logprob"] = max(worst["logprob"], float((scores[0][r].double() - logp @ onehot).abs()))
        if scores[1] is not None:
            worst["entropy"] = max(worst["entropy"], float((scores[1][r].double() - entropy).abs()))
        worst["d_hidden"] = max(worst["d_hidden"], _relative(gradients[0][r], dz @ w))
    for i, truth in d_weight.items():
        worst["d_weight"] = max(worst["d_weight"], _relative(gradients[1][i], truth))
    return worst


def _relative(gradient: Tensor, truth: Tensor) -> float:
    """Relative norm of an error; of rows that are nothing but rounding, 0."""
    norm = float(truth.norm())
    return float((gradient.double() - truth).norm()) / norm if norm > 1e-6 else 0.0


def floors(x: Inputs) -> tuple[tuple[int, int], Callable[[], object]]:
    """Bytes that forward, and the whole step, have to move; and torch's gather of the same rows of a whole step."""
    arange = torch.arange(len(x.target), device=x.target.device)
    row = torch.cat([torch.repeat_interleave(arange, x.kept.lengths), arange])
    pairs = torch.stack([row, torch.cat([x.kept.ids, x.target])], 1).unique(dim=0)
    several = (torch.bincount(pairs[:, 0], minlength=len(arange)) > 1)[pairs[:, 0]]
    row, ids = pairs[several].unbind(1)
    size = x.hidden.shape[1] * x.hidden.element_size()
    touched = len(row.unique()) * size
    forward = len(ids) * size + touched
    # Backward reads the weight's rows for d_hidden and the hidden rows for d_weight, and writes both gradients.
    total = forward + 2 * len(ids) * size + x.hidden.nbytes + x.weight.nbytes
    order = ids.argsort(stable=True)
    by_row = torch.searchsorted(row.contiguous(), arange)
    by_id = torch.searchsorted(ids[order], torch.arange(len(x.weight), device=ids.device))
    hidden, weight, of_id = x.hidden.detach(), x.weight.detach(), row[order]

    def gather() -> None:
        torch.nn.functional.embedding_bag(ids, weight, by_row, mode="sum")
        torch.nn.functional.embedding_bag(ids, weight, by_row, mode="sum")
        torch.nn.functional.embedding_bag(of_id, hidden, by_id, mode="sum")

    return (forward, total), gather


def run(case: Case, device: torch.device, repeats: int, bandwidth: float, commit: str | None) -> Iterator[dict]:
    x = draw(case, device)
    (forward_bytes, total_bytes), gather = floors(x)
    timed: dict[str, Callable[[], object]] = {"torch's gather": gather}
    found: dict[str, dict] = {"torch's gather": {}}
    for name, score in CONTENDERS.items():
        try:
            scores, gradients = step(score, x)
            wrong = errors(x, scores, gradients)
            del scores, gradients
            peak = peak_bytes(lambda score=score: step(score, x), device)
        except torch.OutOfMemoryError:
            found[name] = {"status": "out of memory"}
            continue
        found[name] = {"errors": wrong, "peak_bytes": peak}
        timed[name] = lambda score=score: step(score, x)
        timed[f"{name}, forward"] = lambda score=score: torch.no_grad()(score)(x)
    laps = interleaved(timed, x.hidden, x.weight, repeats)
    for name, facts in found.items():
        line = {"case": asdict(case), "contender": name, "ids": x.kept.ids.numel(), **facts, "repeats": repeats}
        if name in laps:
            line |= {"total_ms": statistics.median(laps[name]), "range_ms": [min(laps[name]), max(laps[name])]}
        if f"{name}, forward" in laps:
            line["forward_ms"] = statistics.median(laps[f"{name}, forward"])
        line |= {"floor_ms": total_bytes / bandwidth * 1e3, "forward_floor_ms": forward_bytes / bandwidth * 1e3}
        line["gradients_bytes"] = x.hidden.nbytes + x.weight.nbytes
        yield line | {"environment": asdict(Environment.here(device, commit))}


def table(lines: list[dict]) -> str:
    rows = []
    for line in lines:
        beyond = line.get("peak_bytes", 0) - line["gradients_bytes"] if "peak_bytes" in line else None
        worst = line.get("errors", {})
        rows.append(
            (
                line["case"]["name"],
                line["contender"],
                f"{line['forward_ms']:.2f}" if "forward_ms" in line else "",
                f"{line['total_ms']:.2f}" if "total_ms" in line else line.get("status", ""),
                f"{line['total_ms'] / line['floor_ms']:.2f}" if "total_ms" in line else "",
                "" if beyond is None else format_bytes(beyond),
                " ".join(f"{worst[k]:.1e}" for k in ("logprob", "d_hidden", "d_weight")) if worst else "",
            )
        )
    names = ("case", "contender", "forward ms", "total ms", "x bytes", "beyond gradients", "errors: value, dX, dW")
    return text_table(names, rows)


def try_sizes(case: Case, device: torch.device) -> str:
    """The whole step under sizes of the two kernels, for whoever sets those of ``machine.py``."""
    x = draw(case, device)
    rows = []
    tried = {"dots_sizes": lambda: torch.no_grad()(support)(x), "sums_sizes": lambda: step(support, x)}
    for entries, block, warps in SIZES:
        sizes = {"ENTRIES": entries, "BLOCK": block, "STAGES": 3, "num_warps": warps}
        found = []
        for kernel, contender in tried.items():
            with mock.patch.object(kernels, kernel, lambda width, sizes=sizes: sizes):
                found.append(statistics.median(interleaved({"it": contender}, x.hidden, x.weight, 3)["it"]))
        rows.append((str(entries), str(block), str(warps), *(f"{t:.3f}" for t in found)))
    rows.sort(key=lambda row: float(row[-1]))
    return text_table(("entries", "block", "warps", "forward ms by dots", "step ms by sums"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file to append records to")
    parser.add_argument("--case", action="extend", nargs="+", default=[])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--commit")
    parser.add_argument("--skyrl", action="store_true", help="also SkyRL's function, with ours and without")
    parser.add_argument("--sizes", action="store_true", help="try sizes of the kernels instead")
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.skyrl:
        CONTENDERS.update({"SkyRL 0.4": skyrl, "SkyRL 0.4, ours installed": skyrl_with_ours})
    chosen = [c for c in cases(options.device) if not options.case or c.name in options.case]
    if options.sizes:
        sys.stdout.write("\n\n".join(try_sizes(case, device) for case in chosen) + "\n")
        return
    bandwidth, lines = copy_bandwidth(device), []
    for case in chosen:
        for line in run(case, device, options.repeats, bandwidth, options.commit):
            lines.append(line)
            if options.out is not None:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    sys.stdout.write(table(lines) + "\n")


if __name__ == "__main__":
    main()
