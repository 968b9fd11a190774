"""Cases that were once wrong, crashed or hung, smallest form each, with what was the matter. All are right now.

New failures of the fuzzer come here, shrunk, with one line of what it was.
"""

from __future__ import annotations

from fuzz import teachers
from fuzz.cases import HEAD, LOGITS, LOSS, TWO_CALLS, Case

CORPUS = {
    "a mask over a whole tile gave NaN entropy and gradient": [
        Case(values="lowest first", vocab=60, entropy="grad", memory=memory, backend=backend)
        for memory in (64, "1MiB")
        for backend in ("reference", "tiled")
    ],
    "the same in the kernels": [
        Case(values="lowest first", vocab=101, tokens=2, entropy="grad", backend="triton"),
    ],
    "a mask over a whole tile by the bias, and with exponentials stored": [
        Case(
            path=HEAD,
            dtype=dtype,
            values="lowest first",
            bias=True,
            vocab=60,
            entropy="grad",
            memory=memory,
        )
        for dtype in ("float32", "bfloat16")
        for memory in (3000, "1MiB", "1GiB")
    ],
    "a frozen head of a transposed weight or hidden states": [
        Case(path=HEAD, frozen=("weight", "bias"), backend=backend, **{name: "transposed"})
        for name in ("stride", "weight_stride")
        for backend in ("reference", "tiled")
    ],
    "kept ids and batch invariance crashed unless the rows were a multiple of 1024": [
        Case(path=HEAD, kept="some", canonical=True),
    ],
    "reductions over samples of rows that know of none were silently wrong": [
        Case(path=LOSS, layout=layout, objective=(("reduce", "sample_mean"),)) for layout in ("every", "pair")
    ],
    "rows of a split whose samples' means run over ranks": [
        Case(path=LOSS, layout="zigzag", cp=2, recipe="gspo"),
    ],
    "a batch without a single row": [
        Case(
            path=path,
            layout="packed",
            samples=((3, 0), (1, 0)),
            entropy="grad" if path in (LOGITS, HEAD) else None,
        )
        for path in (LOGITS, HEAD, LOSS, TWO_CALLS)
    ],
    "stored exponentials and entropy of a peaked row": [
        Case(path=HEAD, dtype="float16", values="peaked", entropy="grad", vocab=33, width=8, memory="1GiB"),
    ],
    "the mean of a few logits at the lowest number, which have no finite sum": [
        Case(path=path, values="lowest first", stats=("mean_logit", "rank"), bias=path != LOGITS, backend=backend)
        for path in (LOGITS, HEAD)
        for backend in ("reference", "tiled")
    ],
    "the best of logits in another 16-bit dtype than autocast's": [
        Case(path=HEAD, stats=("rank",), top_k=2, match="float16", autocast=True),
    ],
    "statistics in the interpreter": [
        Case(backend="triton", stats=("top1", "collision", "mean_logit", "rank"), top_k=5, ids=3, kept="some"),
    ],
    "kernels in the interpreter, forward and backward of every path": [
        Case(path=LOGITS, backend="triton", entropy="grad", dtype="bfloat16", ignore=True),
        Case(path=HEAD, backend="triton", entropy="grad", bias=True, softcap=5.0),
        Case(path=LOSS, backend="triton", layout="packed", dtype="float16", recipe="dapo"),
    ],
    "ids of no tokens whose logits lie column by column": [Case(seed=23862, tokens=0, stride="column-major", ids=8)],
}

TEACHERS = {
    "tv of logits as near as their rounding": [
        teachers.Case(
            seed=1516,
            kind="tv",
            vocab=101,
            heads=((1.0, 1.0, None), ("rows", 0.3, None)),
            bias=True,
            values="near",
            some=True,
            backend="reference",
        ),
        teachers.Case(
            seed=30371,
            kind="tv",
            sort="fewer",
            rows=9,
            vocab=2,
            heads=(("rows", 1.0, None), (0.6, 1.0, None)),
            values="peaked",
            ignore=True,
            some=True,
            backend="reference",
            memory=200,
        ),
    ],
    "an acceptance, or a bucket, beside canonical sums was NaN": [
        teachers.Case(kind=kind, sort="partly", tail=tail, canonical=True, memory=memory)
        for kind, tail in (("acceptance", "renormalise"), ("hellinger", "bucket"))
        for memory in (500, "1MiB")
    ],
    "a frozen part of an adapter, and nothing but a divergence": [
        teachers.Case(seed=seed, frozen=True, lora=2, held=held, alone=True)
        for seed, held in enumerate((("a", "b"), ("hidden", "a"), ("b",), ()))
    ],
}
