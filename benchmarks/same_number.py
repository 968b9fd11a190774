"""One number in a rollout engine and in a trainer, on a GPU: ``python -m benchmarks.same_number``.

Shares of equal bits, of log-probs, entropies and log Z; ``--out`` appends the record.

    sums      canonical results from hidden states against those from ``torch.mm(..., out_dtype=torch.float32)``, which
              is an engine's float32 head, and from the product that the plug-ins put there; hidden sizes of 896 to
              8192, 1 to 4096 rows
    heads     ``F.linear`` in bfloat16 and float16, an engine's usual head, against ``Logits(match=...)``
    engine    the plug-ins' functions against a trainer's head, whose vocabulary is in 1, 2 and 4 shards, scored one by
              one and merged as ranks do; and the report of ``mismatch``
    costs     milliseconds of an engine's steps: the product of a few rows, and log-probs of one token each

It takes about two minutes.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import logitless as ll
from benchmarks.bench.records import Environment
from benchmarks.canonical import milliseconds, share, shares, show
from logitless.backends import triton as backend
from logitless.backends.contract import Product
from logitless.backends.triton import products
from logitless.engines.canonical import all_logprobs, product, token_logprobs
from logitless.objectives.mismatch import mismatch
from logitless.softmax import solved, target_column

VOCAB, MOST = 151936, 4096
WIDTHS = (896, 1024, 1536, 2048, 2560, 3584, 4096, 5120, 8192)
ROWS = (1, 2, 8, 17, 64, 100, 256, 1000, 1024, 2500, 4096)


def operands(width: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(width)
    x = torch.randn(MOST, width, device="cuda").to(dtype)
    w = (2 * torch.randn(VOCAB, width, device="cuda") / width**0.5).to(dtype)
    return x, w, torch.randint(VOCAB, (MOST,), device="cuda")


def score(logits: Any, target: Tensor) -> ll.TokenStats:
    return ll.logprobs(logits, target, entropy="value")


def worst(found: dict[str, float], least: dict[str, float]) -> dict[str, float]:
    return {name: min(x, least.get(name, 1.0)) for name, x in found.items()}


def sums(width: int) -> dict[str, Any]:
    """The least share over all numbers of rows, and the numbers of rows for which it is not 1."""
    x, w, target = operands(width)
    least: dict[str, dict[str, float]] = {}
    unequal: dict[str, list[int]] = {}
    for rows in ROWS:
        here, ids = x[:rows], target[:rows]
        ours = score(ll.Logits(here, w, bits="canonical"), ids)
        z = torch.mm(here, w.T, out_dtype=torch.float32)
        plugged = product(here, w, None, torch.empty_like(z))
        found = {
            "mm": shares(ours, score(ll.Logits.given(z, bits="canonical"), ids)),
            "plug-in": shares(ours, score(ll.Logits.given(plugged, bits="canonical"), ids)),
            "logits of both": {"logits": share(z, plugged)},
        }
        for name, of in found.items():
            least[name] = worst(of, least.get(name, {}))
            if min(of.values()) < 1.0:
                unequal.setdefault(name, []).append(rows)
    return {"hidden": width, "least": least, "unequal at rows": unequal}


def heads(width: int, dtype: torch.dtype) -> dict[str, Any]:
    """A head in 16 bits, as engines and trainers have it, against sums that are rounded once."""
    x, w, target = operands(width, dtype)
    name: Any = str(dtype).removeprefix("torch.")
    found = {}
    for rows in ROWS:
        here, ids = x[:rows], target[:rows]
        ours = score(ll.Logits(here, w, bits="canonical", match=name), ids)
        z = torch.nn.functional.linear(here, w)
        plugged = product(here, w, None, torch.empty_like(z))
        theirs = score(ll.Logits.given(z, bits="canonical"), ids)
        by_product = score(ll.Logits.given(plugged, bits="canonical"), ids)
        found[str(rows)] = {
            "F.linear": shares(ours, theirs),
            "plug-in": shares(ours, by_product),
            "logits": (z.view(torch.int16) == plugged.view(torch.int16)).double().mean().item(),
        }
    return {"hidden": width, "head": name, "shares": found}


def shard_logprobs(x: Tensor, w: Tensor, target: Tensor, degree: int) -> Tensor:
    """A trainer's log-probs, from shards scored one by one and merged as ranks do."""
    start, parts, gain = 0, [], torch.ones(len(x), device="cuda")
    sizes = [VOCAB // 128 // degree * 128] * (degree - 1)
    for size in [*sizes, VOCAB - sum(sizes)]:
        column = target_column(target, start, size)
        given = (x, w[start : start + size], None, column, gain)
        parts.append(products.statistics(Product(*given, canonical=True)))
        start += size
    norm, t, *_ = solved(backend.solved(torch.stack(parts), gain), True, True)
    return (t - norm.reference) - norm.log_sum


def engine(width: int) -> dict[str, Any]:
    """As an engine calls the plug-ins, whose ranks gather their logits."""
    x, w, target = operands(width)
    rows = ll.Rows.packed([target], [MOST - 1])
    found = {}
    for degree in (1, 2, 4):
        parts = [product(x, part, None, torch.empty(MOST, len(part), device="cuda")) for part in w.chunk(degree)]
        z = torch.cat(parts, 1)
        theirs = token_logprobs(z, target[:, None])[:, 0]
        ours = shard_logprobs(x, w, target, degree)
        report = mismatch(ours[rows.index], theirs[rows.index], rows)
        found[str(degree)] = {
            "equal": share(theirs, ours),
            "equal to all columns": share(all_logprobs(z[:256]).gather(1, target[:256, None])[:, 0], ours[:256]),
            "mismatch": {name: getattr(report, name) for name in ("kl_k1", "kl_k3", "largest")},
        }
        del parts, z
    return {"hidden": width, "tensor-parallel degrees": found}


def costs(width: int) -> dict[str, Any]:
    x, w, target = operands(width)
    found = {}
    for rows in (1, 64, 256, 1024):
        here, ids = x[:rows], target[:rows, None]
        z = torch.mm(here, w.T, out_dtype=torch.float32)
        out = torch.empty_like(z)
        found[str(rows)] = milliseconds(
            {
                "mm": lambda here=here, out=out: torch.mm(here, w.T, out_dtype=torch.float32, out=out),
                "product": lambda here=here, out=out: product(here, w, None, out),
                "log_softmax": lambda z=z, ids=ids: z.log_softmax(-1).gather(1, ids),
                "token_logprobs": lambda z=z, ids=ids: token_logprobs(z, ids),
            }
        )
    return {"hidden": width, "milliseconds": found}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--commit")
    given = arguments.parse_args()
    about = {"vocab": VOCAB, "environment": asdict(Environment.here(torch.device("cuda"), given.commit))}
    with torch.no_grad():
        for width in (1024, 4096):
            show({"what": "engine", **engine(width), **about}, given.out)
        for width, dtype in ((1024, torch.bfloat16), (4096, torch.bfloat16), (4096, torch.float16)):
            show({"what": "heads", **heads(width, dtype), **about}, given.out)
        for width in (1024, 4096):
            show({"what": "costs", **costs(width), **about}, given.out)
        for width in WIDTHS:
            show({"what": "sums", **sums(width), **about}, given.out)


if __name__ == "__main__":
    main()
