"""Time, peak and errors on hidden states, a head and logits of a model that was really trained.

    python benchmarks/trained_inputs.py --out benchmarks/results/trained.jsonl [--peers FOLDER] [--gaussian]
    python benchmarks/trained_inputs.py --save trained.pt --seconds 120      train once, and measure
    python benchmarks/trained_inputs.py --inputs trained.pt --case '*-grad'  measure again
    python benchmarks/trained_inputs.py --device cpu --seconds 5 --vocab 2000 --tokens 256 --hidden 64 --layers 2 \\
        --heads 4 --length 64 --batch 4 --rate 0.005 --text-bytes 3000000

A small model is trained on text that lies on the machine (``trained_model.py``). Cases are those of ``bench/cases.py``
with its sizes, on held-out text: the same providers, checks, records and table, the bare products among them. What the
model's distributions are like goes into a file of its own, beside the records (``trained-model.jsonl``): log-probs,
entropies and logits, and how often the reference that exponentials start from was guessed right.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from trained_model import Effort, Sizes, look, machine_folders, make_model, texts, tokenize, train

import logitless as ll
from benchmarks.bench.cases import Case, linear_works, select_names
from benchmarks.bench.inputs import Trained, block_rows, product
from benchmarks.bench.linear_providers import LINEAR_PROVIDERS
from benchmarks.bench.providers import PROVIDERS, add_peers
from benchmarks.bench.records import Environment, Record, append_records, records_table
from benchmarks.bench.run import Selection, run
from logitless.backends.contract import SLACK, Running
from logitless.backends.reference import move
from logitless.backends.triton.products import SLACKS

QUANTILES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)
CONFIDENT = 0.99
DEFAULT_PROVIDERS = ("torch", "torch.compile", "trl-head", "trl-kernel", "logitless", "logitless-loss")


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class Route(NamedTuple):
    """Where a reference is guessed: the tiles of a call, how far off a guess may be, and whether it may fall later."""

    name: str
    rows: int
    columns: int
    slack: float
    falls: bool
    used: bool


def routes(trained: Trained) -> list[Route]:
    """A frozen head, whose reference follows a row; stored exponentials, with one reference per slab.

    Products that write exponentials for later take each tile's own maximum: nothing is guessed, and ``used`` says so.
    """
    hidden = trained.hidden.detach().requires_grad_()
    frozen = ll.explain(ll.logprobs, ll.Logits(hidden, trained.weight), trained.target, entropy="value")
    weight = trained.weight.detach().requires_grad_()
    stored = ll.explain(ll.logprobs, ll.Logits(hidden, weight), trained.target, entropy="grad", memory="6.5GiB")
    assert frozen.forward is not None
    assert stored.forward is not None
    assert stored.backward is not None
    slack = SLACKS[hidden.dtype] if frozen.forward.fused else SLACK
    return [
        Route("frozen head", frozen.forward.rows, frozen.forward.columns, slack, False, True),
        Route("stored exponentials", len(hidden), stored.backward.columns, SLACK, True, not stored.forward.fused),
    ]


def wrong_guesses(tops: Tensor, slack: float, falls: bool) -> Tensor:
    """``[R, slabs]`` whether the guess was out of range, from each row's maximum within each slab.

    The first guess is 0, then what the slab before had. Only the first may be too high unless later ones may fall, too.
    """
    reference, skip = torch.zeros_like(tops[:, 0]), torch.zeros_like(tops[:, 0], dtype=torch.bool)
    wrong = []
    for slab, top in enumerate(tops.unbind(1)):
        before = reference.clone()
        move(Running(before, reference, slack, slack if falls or slab == 0 else torch.inf), top, skip)
        wrong.append(reference != before)
    return torch.stack(wrong, 1)


def guesses(route: Route, tops: Tensor) -> dict[str, Any]:
    """How often guesses were right, by slab of a row, by row, and by launch: a whole tile is made again for one row."""
    wrong = wrong_guesses(tops, route.slack, route.falls)
    launches = torch.stack([rows.any(0) for rows in wrong.split(route.rows)])
    return route._asdict() | {
        "slabs": tops.shape[1],
        "right": 1 - float(wrong.float().mean()),
        "right_first": 1 - float(wrong[:, 0].float().mean()),
        "rows_right": 1 - float(wrong.any(1).float().mean()),
        "launches": launches.numel(),
        "launches_right": 1 - float(launches.float().mean()),
    }


@torch.no_grad()
def facts(trained: Trained, ways: Sequence[Route]) -> dict[str, Any]:
    """What the model's distributions are like, from float32 logits, some rows at a time."""
    parts: list[tuple[Tensor, ...]] = []
    tops: dict[str, list[Tensor]] = {route.name: [] for route in ways}
    rows = block_rows(trained.weight.shape[0])
    for hidden, target in zip(trained.hidden.split(rows), trained.target.split(rows), strict=True):
        z = product(hidden, trained.weight)
        for route in ways:
            tops[route.name].append(torch.stack([slab.amax(1) for slab in z.split(route.columns, dim=1)], 1))
        top, best, low = *z.max(1), z.amin(1)
        logp = z.log_softmax(1)
        entropy = -(logp.exp() * logp).sum(1)
        parts.append((logp.gather(1, target[:, None]).squeeze(1), entropy, top, low, logp.amax(1), best == target))
        del z, logp
    logprob, entropy, top, low, surest, hit = (torch.cat(part) for part in zip(*parts, strict=True))
    return {
        "logprob": _spread(logprob),
        "entropy": _spread(entropy),
        "row_maximum": _spread(top),
        "row_minimum": _spread(low),
        "row_range": _spread(top - low),
        "largest_logit": float(torch.maximum(top.abs(), low.abs()).amax()),
        "accuracy": float(hit.float().mean()),
        "targets_above_99": float((logprob.exp() > CONFIDENT).float().mean()),
        "rows_above_99": float((surest.exp() > CONFIDENT).float().mean()),
        "guesses": [guesses(route, torch.cat(tops[route.name])) for route in ways],
    }


def _spread(x: Tensor) -> dict[str, Any]:
    points = torch.tensor(QUANTILES, dtype=torch.float64)
    found = {"mean": float(x.double().mean()), "deviation": float(x.double().std(correction=0))}
    at = x.double().cpu().quantile(points).tolist()
    return found | {"quantiles": dict(zip(map(str, QUANTILES), at, strict=True))}


def digest(line: dict[str, Any]) -> str:
    """The facts that matter most, in a few lines."""
    told = [
        f"{name}: mean {found['mean']:.2f}, {found['quantiles']['0.0']:.2f} to {found['quantiles']['1.0']:.2f}"
        for name in ("logprob", "entropy", "row_maximum", "row_range")
        for found in (line[name],)
    ]
    told += [f"{name}: {line[name]:.4g}" for name in ("largest_logit", "accuracy", "targets_above_99", "rows_above_99")]
    for way in line["guesses"]:
        right, again = (f"{100 * way[name]:.4g} %" for name in ("right", "launches_right"))
        told.append(
            f"{way['name']}, slabs of {way['columns']} columns, slack {way['slack']:g}: {right} of guesses right, "
            f"{again} of {way['launches']} launches{'' if way['used'] else ' (not used)'}"
        )
    return "\n".join(told)


def cases(trained: Trained, device: torch.device, gaussian: bool) -> list[Case]:
    """From hidden states and from logits; with ``gaussian``, each also on Gaussian inputs of the same sizes."""
    tokens, vocab, hidden = trained.sizes
    kind = "cuda" if device.type == "cuda" else "cpu"
    linear = Case("", kind, tokens, vocab, "bfloat16", entropy="grad", hidden=hidden, logits="trained")
    logits = replace(linear, hidden=None)
    found = [
        *linear_works(linear, "linear-trained"),
        replace(logits, name="trained-bf16-grad"),
        replace(logits, name="trained-fp32-grad", dtype="float32"),
    ]
    others = [replace(c, name=c.name.replace("trained", "gaussian"), logits="gaussian") for c in found]
    return [case for pair in zip(found, others, strict=True) for case in pair] if gaussian else found


def make(options: argparse.Namespace, device: torch.device) -> tuple[Trained, dict[str, Any]]:
    """Train a model; what it makes of held-out text, and how it came about."""
    sizes = Sizes(*(getattr(options, name) for name in Sizes.__dataclass_fields__))
    effort = Effort(*(getattr(options, name) for name in Effort._fields))
    if options.tokens % sizes.length:
        raise SystemExit(f"--tokens must be a multiple of --length, {sizes.length}, but is {options.tokens}")
    start, took = time.perf_counter(), {}
    found = texts(options.text or machine_folders(), options.text_bytes)
    size = sum(map(len, found))
    say(f"{len(found)} texts, {size / 1e6:.1f} million characters")
    took["texts"] = time.perf_counter() - start
    ids = tokenize(found, sizes.vocab, options.bpe_bytes, options.tokens + options.tokens // sizes.length)
    took["tokenize"] = time.perf_counter() - start - took["texts"]
    say(f"{ids.known} different ids, {len(ids.train)} to train on, {len(ids.held_out)} held out")
    if len(ids.train) <= sizes.length:
        raise SystemExit(f"there is too little text to train on: {len(ids.train)} ids")
    model = make_model(sizes, device)
    history = train(model, ids.train, sizes, effort, say)
    trained = look(model, ids.held_out, sizes, options.tokens)
    story = {"texts": len(found), "characters": size, "known_ids": ids.known, "train_ids": len(ids.train)}
    return trained, {"sizes": asdict(sizes), "effort": effort._asdict(), **story, "seconds": took, "history": history}


def obtain(options: argparse.Namespace, device: torch.device) -> tuple[Trained, dict[str, Any]]:
    """What was saved, or a model that is trained now and, if asked, saved."""
    if options.inputs is not None:
        found = torch.load(options.inputs, weights_only=True, map_location=device)
        return Trained(*(found[name] for name in Trained._fields)), found["model"]
    trained, model = make(options, device)
    if options.save is not None:
        torch.save(trained._asdict() | {"model": model}, options.save)
    return trained, model


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file to append records to")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--case", nargs="+", default=["*"], help="names or patterns")
    parser.add_argument("--provider", nargs="+", default=DEFAULT_PROVIDERS, help="names or patterns")
    parser.add_argument("--peers", type=Path, help="folder of unpacked packages to import peers from")
    parser.add_argument("--gaussian", action="store_true", help="also measure Gaussian inputs of the same sizes")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit")
    parser.add_argument("--inputs", type=Path, help="what --save wrote: nothing is trained")
    parser.add_argument("--save", type=Path, help="file for hidden states, head and targets")
    parser.add_argument("--text", type=Path, nargs="+", help="folders; default: the interpreter's and its packages")
    parser.add_argument("--text-bytes", type=int, default=120_000_000)
    parser.add_argument("--bpe-bytes", type=int, default=60_000_000, help="text that the tokenizer is made of")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training")
    parser.add_argument("--steps", type=int, default=1 << 30, help="of training, if they are over sooner")
    parser.add_argument("--rate", type=float, default=6e-4, help="of learning")
    parser.add_argument("--tokens", type=int, default=16384, help="held-out tokens to measure on")
    for name, known in Sizes.__dataclass_fields__.items():
        parser.add_argument(f"--{name}", type=int, default=known.default)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.peers is not None:
        add_peers(options.peers)
    device = torch.device(options.device)
    names = select_names(options.provider, list(PROVIDERS | LINEAR_PROVIDERS), "provider")
    trained, model = obtain(options, device)
    gc.collect()
    if device.type == "cuda":
        # What training took is not there when others are measured.
        torch.cuda.empty_cache()
    where = asdict(Environment.here(device, options.commit))
    line = {"model": model, **facts(trained, routes(trained)), "environment": where}
    say(digest(line))
    if options.out is not None:
        with options.out.with_stem(f"{options.out.stem}-model").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    chosen = [c for c in cases(trained, device, options.gaussian) if any(fnmatchcase(c.name, p) for p in options.case)]
    own, linear = ({n: known[n] for n in names if n in known} for known in (PROVIDERS, LINEAR_PROVIDERS))
    records: list[Record] = []
    for group in run(Selection(chosen, own, device, options.repeats, options.commit, linear, trained), say):
        records += group
        if options.out is not None:
            append_records(options.out, group)
    sys.stdout.write(records_table(records) + "\n")


if __name__ == "__main__":
    main()
