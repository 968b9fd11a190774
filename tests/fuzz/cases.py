"""A case as plain data, and how one is drawn from a seed.

    seed  ->  a path, two features that are on for certain, now and then more  ->  Case

A feature is a set of fields and a way to draw them; it is on where one of its fields is not the default. Shrinking
turns features off by putting the defaults back. Two are always drawn together, because what breaks is mostly a pair.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

LOGITS, HEAD, MODULE, LOSS, TWO_CALLS = PATHS = (
    "logprobs",
    "logprobs(Logits)",
    "PolicyHead",
    "policy_loss",
    "objective",
)
"""``objective`` is the loss in two calls: ``objective(logprobs(Logits(...)), rows, ...)``."""

LOSSES = (LOSS, TWO_CALLS)
LINEAR = (HEAD, MODULE, *LOSSES)
SAMPLES = ("packed", "lines", "zigzag", "contiguous", "zigzag lines")
"""Layouts that know of samples; the others are ``every``, ``pair`` and ``at``."""

SPLIT = ("zigzag", "contiguous", "zigzag lines")


@dataclass(frozen=True)
class Case:
    """One call, or one call per context-parallel rank. Every field prints, so that a case is its own report.

    Attributes:
        seed: of the numbers in the tensors.
        path: which function.
        tokens, lead: rows of the tensor in layouts without samples, and the lengths of its leading dimensions, if more
            than one.
        vocab, extra_columns: true columns, and columns of padding after them.
        width: hidden size.
        layout, samples: where the rows are; (prompt, response) of each sample.
        cp, align, absorb, extra, left: context-parallel ranks, padding of samples, of the last one, after all of them,
            on which side of lines.
        mask, mask_only, ignore: loss masks, whether masked rows are left out, whether some targets are -100.
        stride, weight_stride: how the tensors lie in memory.
        values: what kind of numbers.
        poison: NaN in rows that nobody asked for.
        lora: rank of an adapter on the head; 0 for none.
        stats, top_k, ids: statistics beyond the softmax, of so many best and so many listed ids.
        frozen: of which tensors no gradient is wanted.
        precision: of float32 products; drawn with Triton's kernels alone, without which it changes nothing on a CPU.
        autocast: float32 operands are rounded to bfloat16 on the way in, float64 ones are not.
        upstream: which results have a gradient.
        twice: backward twice over one graph.
        shards: vocabulary shards, merged in this process; 1 is a process group of one rank.
        ranks, parallel: processes, and what they share: the vocabulary, or the sequence.
    """

    seed: int = 0
    path: str = LOGITS
    dtype: str = "float32"
    tokens: int = 5
    lead: tuple[int, ...] = ()
    vocab: int = 7
    width: int = 4
    layout: str = "every"
    samples: tuple[tuple[int, int], ...] = ((2, 3), (1, 2))
    cp: int = 1
    align: int = 0
    absorb: int = 0
    extra: int = 0
    left: bool = False
    mask: bool = False
    mask_only: bool = False
    ignore: bool = False
    stride: str = ""
    weight_stride: str = ""
    values: str = "normal"
    poison: bool = False
    temperature: float | str = 1.0
    scale: float = 1.0
    softcap: float | None = None
    extra_columns: int = 0
    bias: bool = False
    lora: int = 0
    kept: str = ""
    scope: str = "vocabulary"
    entropy: str | None = None
    stats: tuple[str, ...] = ()
    top_k: int = 0
    ids: int = 0
    memory: int | str | None = None
    backend: str = "auto"
    match: str | None = None
    precision: str = "float32"
    canonical: bool = False
    frozen: tuple[str, ...] = ()
    weight_grad: bool = False
    grad_scale: float = 1.0
    overwrite: bool = False
    keep_zeros: bool = False
    autocast: bool = False
    upstream: str = "all"
    twice: bool = False
    shards: int = 0
    objective: tuple[tuple[str, Any], ...] = ()
    recipe: str = ""
    on_policy: bool = False
    ratios: str = "near"
    advantage: str = "normal"
    denominator: float | None = None
    ranks: int = 1
    parallel: str = ""
    hidden_grad: str = "reduced"
    sequence_parallel: bool = False

    def __str__(self) -> str:
        """The call that makes it: fields that are not the default."""
        said = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Case({', '.join(said)})"


class Feature(NamedTuple):
    """Fields that belong together, the paths that have them, and how they are drawn."""

    names: tuple[str, ...]
    draw: Callable[[random.Random], dict[str, Any]]
    paths: tuple[str, ...] = PATHS


def one_of(name: str, *choices: Any) -> Callable[[random.Random], dict[str, Any]]:
    return lambda r: {name: r.choice(choices)}


def _sizes(r: random.Random) -> dict[str, Any]:
    """Odd, tiny, none at all, and now and then wider than a tile of the small budgets."""
    return {
        "tokens": r.choice((0, 1, 2, 3, 5, 7, 9, 13)),
        "vocab": r.choice((1, 2, 3, 5, 8, 13, 17, 33, 64, 101)),
        "width": r.choice((1, 2, 3, 5, 8, 11, 16)),
        "samples": tuple((r.randint(1, 3), r.choice((0, 0, 1, 2, 3, 4, 6))) for _ in range(r.choice((1, 1, 2, 3, 4)))),
    }


def _layout(r: random.Random) -> dict[str, Any]:
    kind = r.choice(("pair", "at", *SAMPLES, *SAMPLES))
    found: dict[str, Any] = {"layout": kind}
    if kind not in SAMPLES:
        return found
    found["samples"] = tuple((r.randint(1, 3), r.randint(0, 4)) for _ in range(r.randint(1, 4)))
    found["cp"] = r.randint(1, 3) if kind in SPLIT else 1
    found["extra"] = r.choice((0, 0, 1, 3))
    if "lines" in kind:
        found["left"] = r.random() < 0.5
    else:
        found["align"] = r.choice((0, 0, 1, 2))
        found["absorb"] = r.choice((0, 0, 1))
    return found


def _objective(r: random.Random) -> dict[str, Any]:
    policy = r.choice(("ppo_clip", "gspo", "cispo", "sapo", "reinforce", "cross_entropy", "dft"))
    found: dict[str, Any] = {"policy": policy}
    if policy in ("ppo_clip", "gspo", "cispo") and r.random() < 0.5:
        found["clip"] = r.choice(((0.2, 0.28), (0.1, 0.1), (0.0, 0.3), (1.0, 4.0)))
    if policy == "ppo_clip" and r.random() < 0.3:
        found["dual_clip"] = r.choice((1.5, 3.0))
    if policy == "sapo" and r.random() < 0.5:
        found["policy_options"] = (("positive", 0.7), ("negative", 2.0))
    if r.random() < 0.4:
        kinds = ("tis", "icepop", "sequence_tis", "sequence_icepop", "geometric_tis", "geometric_mask", "opsm")
        found["correction"] = r.choice(kinds)
    if r.random() < 0.5:
        found |= {"kl": r.choice(KL_NAMES), "kl_coef": r.choice((0.1, -0.2, 3.0))}
    if r.random() < 0.5:
        found["entropy_coef"] = r.choice((0.05, -0.3, 2.0))
    reduce = r.choice(("token_mean", "sample_mean", "sample_sum", "prompt_mean"))
    found |= {"reduce": reduce, **({"length": r.choice((1, 7))} if reduce == "sample_sum" else {})}
    if r.random() < 0.3:
        found["z_coef"] = r.choice((0.01, -0.1, 1.0))
    return {"objective": tuple(found.items()), "recipe": ""}


def _recipe(r: random.Random) -> dict[str, Any]:
    name = r.choice(RECIPES)
    changes = {"length": 5} if name == "dr_grpo" else {}
    if r.random() < 0.3:
        changes |= {"kl": "k3", "kl_coef": 0.04}
    if r.random() < 0.3:
        changes |= {"entropy_coef": 0.01}
    return {"recipe": name, "objective": tuple(changes.items())}


KL_NAMES = tuple(
    f"{name}{form}" for name in ("k1", "abs", "k2", "k3") for form in ("", "_straight_through", "_weighted")
)
KL_NAMES = tuple(name for name in KL_NAMES if name != "k2_straight_through")
RECIPES = (
    "ppo",
    "grpo",
    "dapo",
    "dr_grpo",
    "gspo",
    "cispo",
    "sapo",
    "reinforce",
    "reinforce++",
    "reinforce++_baseline",
    "sft",
    "dft",
)
VALUES = ("peaked", "zeros", "huge", "offset", "lowest", "minus infinity", "lowest first", "large", "tiny")
MEMORY = (1, 64, 200, 500, 1000, 3000, "16KiB", "64KiB", "1MiB", "1GiB")

STATS = ("top1", "collision", "mean_logit", "logit_variance", "max_logit", "rank")

FEATURES = {
    "dtype": Feature(("dtype",), one_of("dtype", "float64", "bfloat16", "float16", "bfloat16", "float16")),
    "sizes": Feature(("tokens", "vocab", "width", "samples"), _sizes),
    "layout": Feature(("layout", "samples", "cp", "extra", "left", "align", "absorb"), _layout),
    "lead": Feature(("lead",), one_of("lead", (1, 5), (2, 3), (3, 1, 2), (2, 0), ())),
    "mask": Feature(("mask", "mask_only"), lambda r: {"mask": True, "mask_only": r.random() < 0.5}),
    "ignore": Feature(("ignore",), one_of("ignore", True)),
    "stride": Feature(("stride",), one_of("stride", "transposed", "sliced", "expanded", "column-major", "gaps")),
    "weight_stride": Feature(
        ("weight_stride",), one_of("weight_stride", "transposed", "sliced", "expanded", "gaps"), LINEAR
    ),
    "values": Feature(("values",), one_of("values", *VALUES)),
    "poison": Feature(("poison",), one_of("poison", True)),
    "temperature": Feature(("temperature",), one_of("temperature", "rows", 0.7, 2.5, 0.05)),
    "scale": Feature(("scale",), one_of("scale", 0.25, 3.0, -1.0)),
    "softcap": Feature(("softcap",), one_of("softcap", 1.0, 5.0, 30.0)),
    "padding": Feature(("extra_columns",), one_of("extra_columns", 1, 3)),
    "bias": Feature(("bias",), one_of("bias", True), LINEAR),
    "lora": Feature(("lora",), one_of("lora", 1, 2, 4), (HEAD, *LOSSES)),
    "kept": Feature(("kept",), one_of("kept", "some", "none", "all", "twice")),
    "scope": Feature(("scope",), lambda r: {"kept": r.choice(("some", "none", "all", "twice")), "scope": "support"}),
    "entropy": Feature(("entropy",), one_of("entropy", "value", "grad", "grad"), (LOGITS, HEAD, MODULE)),
    "stats": Feature(("stats",), lambda r: {"stats": tuple(r.sample(STATS, r.randint(1, 6)))}, (LOGITS, HEAD, MODULE)),
    "top_k": Feature(("top_k",), one_of("top_k", 1, 2, 5, 128), (LOGITS, HEAD, MODULE)),
    "ids": Feature(("ids",), one_of("ids", 1, 3, 8), (LOGITS, HEAD, MODULE)),
    "memory": Feature(("memory",), one_of("memory", *MEMORY)),
    "backend": Feature(("backend",), one_of("backend", "reference", "tiled")),
    "match": Feature(("match",), one_of("match", "bfloat16", "float16"), LINEAR),
    "canonical": Feature(("canonical",), one_of("canonical", True)),
    "autocast": Feature(("autocast",), one_of("autocast", True), LINEAR),
    "frozen": Feature(
        ("frozen",),
        one_of("frozen", ("weight", "bias"), ("weight", "bias"), ("hidden",), ("bias", "b"), ("weight", "a")),
        LINEAR,
    ),
    "no gradient": Feature(("frozen",), one_of("frozen", ("hidden", "weight", "bias", "a", "b", "logits"))),
    "weight_grad": Feature(
        ("weight_grad", "grad_scale"),
        lambda r: {"weight_grad": True, "grad_scale": r.choice((1.0, 0.5, 1024.0))},
        LINEAR,
    ),
    "overwrite": Feature(("overwrite",), one_of("overwrite", True), (LOGITS,)),
    "keep_zeros": Feature(("keep_zeros",), one_of("keep_zeros", True), (LOSS,)),
    "upstream": Feature(
        ("upstream",), one_of("upstream", "logprob", "log_z", "some rows", "zero"), (LOGITS, HEAD, MODULE)
    ),
    "twice": Feature(("twice",), one_of("twice", True)),
    "shards": Feature(("shards",), one_of("shards", 1, 1, 2, 3)),
    "objective": Feature(("objective", "recipe"), _objective, LOSSES),
    "recipe": Feature(("objective", "recipe"), _recipe, LOSSES),
    "on_policy": Feature(("on_policy",), one_of("on_policy", True), LOSSES),
    "ratios": Feature(("ratios",), one_of("ratios", "wide", "far", "same"), LOSSES),
    "advantage": Feature(("advantage",), one_of("advantage", "zeros", "some zeros", "ones", "large"), LOSSES),
    "denominator": Feature(("denominator",), one_of("denominator", 0.0, 3.0, 1000.0), LOSSES),
}
"""Everything that can be on. Two features with a field in common are alternatives."""

NAMES = {path: tuple(name for name, f in FEATURES.items() if path in f.paths) for path in PATHS}
WEIGHTS = (30, 25, 5, 30, 10)
MORE = 0.05
"""Share of the features that are on besides the two."""

DEFAULTS = {f.name: f.default for f in fields(Case)}


CROWD = (
    *("stats", "top_k", "ids", "lora", "kept", "entropy", "upstream", "layout", "ignore", "frozen"),
    *("temperature", "scale", "softcap", "padding", "bias", "memory", "shards", "canonical"),
)
"""What meets in one row: what is asked of it, its logits, its head and its layout."""


def draw(seed: int, triton_share: float = 0.0, ranks: int = 1) -> Case:
    """The case of a seed: of a negative one a call for log-probs with six features of a row at once.

    Kernels in Triton's interpreter are slow, so that how many cases have them is an argument.
    """
    r = random.Random(seed)
    path = r.choices(PATHS, WEIGHTS)[0] if seed >= 0 else r.choice((LOGITS, HEAD, HEAD))
    names = NAMES[path]
    pair = r.sample(names, 2) if seed >= 0 else r.sample([name for name in CROWD if name in names], 6)
    on = [name for name in names if r.random() < MORE]
    made: dict[str, Any] = {"seed": seed, "path": path}
    if path in LOSSES:
        # A loss without samples knows token means only: most losses have some.
        made |= _layout(r) if r.random() < 0.5 else {"layout": r.choice(("packed", "packed", "every"))}
    for name in (*on, *pair):
        made |= FEATURES[name].draw(r)
    if r.random() < triton_share:
        made["backend"] = "triton"
        made["precision"] = r.choice(("float32", "float32", "bfloat16x3"))
    case = Case(**made)
    if ranks > 1:
        case = replace(case, ranks=ranks, **_parallel(r, case, ranks))
    return settled(case)


def _parallel(r: random.Random, case: Case, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {"shards": 0, "stride": "", "weight_stride": ""}
    if case.path in LOSSES and r.random() < 0.4:
        layout = case.layout if case.layout in SPLIT else r.choice(SPLIT)
        # A budget may be too small on one rank and not on another, which is then left waiting: no budget.
        return found | {"parallel": "sequence", "layout": layout, "cp": ranks, "memory": None}
    found |= {"parallel": "vocabulary", "overwrite": case.overwrite}
    if case.path in LINEAR:
        found["hidden_grad"] = r.choice(("reduced", "reduced", "partial"))
        if r.random() < 0.3:
            found |= {"sequence_parallel": True, "hidden_grad": "reduced"}
            if case.layout in SAMPLES:
                # As many tokens as divide over the ranks.
                found |= {"layout": "packed", "align": ranks, "absorb": 0, "extra": 0, "left": False}
    return found


def settled(case: Case) -> Case:
    """The case without what has no meaning in it. What has a meaning but is refused stays: refusals are tested too."""
    changes: dict[str, Any] = {}
    linear, half = case.path in LINEAR, case.dtype in ("bfloat16", "float16")
    if case.layout != "every" or case.lead == () or case.sequence_parallel:
        changes["lead"] = ()
    if case.layout not in SPLIT or (case.ranks > 1 and case.parallel == "vocabulary"):
        changes["cp"] = 1
    if case.layout not in SAMPLES:
        changes |= {"mask": False, "mask_only": False}
    if case.shards > 1 and (case.path != LOGITS or case.kept or case.overwrite or case.twice or case.cp > 1):
        changes["shards"] = 1
    if case.stats or case.top_k or case.ids:
        changes |= {"top_k": min(case.top_k, case.vocab), "shards": min(changes.get("shards", case.shards), 1)}
    if case.canonical and case.shards > 1:
        changes["shards"] = 1
    if case.canonical and case.values == "large":
        # Logits beyond 1.1e7 count as infinite there.
        changes["values"] = "huge"
    if linear and case.values in ("lowest", "lowest first", "minus infinity"):
        # Logits that are products are masked by the bias.
        changes["bias"] = True
    endless = case.values == "minus infinity" or case.values.startswith("lowest")
    if endless and case.scale < 0:
        # Minus infinity times minus one leaves no distribution, nor does the lowest number over a temperature below 1.
        changes["scale"] = 1.0
    if case.dtype == "float16" and case.values == "tiny":
        # Below 2^-14 float16 has fewer digits, and every rounding on the way counts in full.
        changes["values"] = "normal"
    if case.dtype == "float16" and case.path in LOSSES:
        # Gradients past the range of float16 are infinite however they are computed.
        changes["ratios"] = "near" if case.ratios == "far" else case.ratios
        changes["advantage"] = "ones" if case.advantage == "large" else case.advantage
    if case.match is not None and case.values not in ("zeros", "normal"):
        # Both sides must round the same logits, so they are numbers whose products are exact.
        changes["values"] = "normal"
    if not case.kept:
        changes["scope"] = "vocabulary"
    elif case.scope == "support":
        # There is no log Z. A row of one id has the log-prob 0, and what its logit is nobody asks.
        changes |= {"upstream": "all"} if case.upstream == "log_z" else {}
        changes |= {"values": "normal"} if case.values == "minus infinity" else {}
        changes["objective"] = tuple((name, x) for name, x in case.objective if name != "z_coef")
    if half or not linear:
        changes["autocast"] = False
    if case.dtype != "float32" or case.path not in (HEAD, *LOSSES) or case.autocast or case.lora:
        changes["precision"] = "float32"
    if half or case.autocast or case.match is not None:
        # An adapter's inner product is rounded to such dtypes, before B meets it.
        changes["lora"] = 0
    if not case.weight_grad or case.path != LOSS:
        changes["grad_scale"] = 1.0
    return replace(case, **changes)


def features_on(case: Case) -> list[str]:
    """Names of the features of a case, in the order of the table."""
    on = []
    for name, feature in FEATURES.items():
        if case.path in feature.paths and any(getattr(case, f) != DEFAULTS[f] for f in feature.names):
            on.append(name)
    return on
