"""Students and teachers at random, compared with float64: ``python tests/fuzz/teachers.py --cases 20000``.

    seed  ->  a path, a sort of teacher, heads of both, supports, numbers  ->  values and gradients against masks over
    the vocabulary in float64

Like the fuzzer of the other paths, and apart from it: here every case has two models. The oracle has ``[R, V]`` logits
of both, -inf where a model has no id, and the textbook's sums. Plain torch in the working precision is the yardstick; a
unit of rounding at the size of the logits comes on top. A case that is refused counts as such, and is no failure.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from calls import from_hidden, loss_from_hidden

import logitless as ll
from logitless.backends.divergences import Divergence
from logitless.operands import Teachers

KINDS = ("forward_kl", "reverse_kl", "jsd", "tv", "hellinger", "alpha", "acceptance", "log_acceptance", "lk_hybrid")
BETA, ALPHA, ETA = 0.3, 0.7, 1.6
SCALE = 1.5
"""Of an adapter."""
SORTS = ("head", "logits", "mapped", "fewer", "several", "partly", "shared", "bucket", "renormalise")
NONE = -100
KINK = 2.0**-17
"""Up to which difference of two log-probs total variation has the slope 0, where logits are float32."""
NOWHERE = -800.0
"""Stands for a logarithm of 0 beside a probability that is not, where autograd has no derivative."""


@dataclass(frozen=True)
class Case:
    """One call, as plain data. ``heads`` are (temperature, scale, softcap) of student and teacher; ``lora`` is the rank
    of an adapter on the student's head, ``held`` names what has no gradient. ``alone``: nothing but the divergence is
    in the loss, and no entropy is asked for. ``match`` has what the logits of student and teacher are rounded to.
    """

    seed: int = 0
    path: str = "hidden"
    kind: str = "reverse_kl"
    sort: str = "head"
    dtype: str = "float32"
    rows: int = 5
    vocab: int = 17
    heads: tuple[tuple[Any, float, float | None], ...] = ((1.0, 1.0, None), (1.0, 1.0, None))
    bias: bool = False
    kept: str = ""
    scope: str = "vocabulary"
    tail: str = "renormalise"
    at: bool = False
    student_ids: bool = False
    values: str = "normal"
    ignore: bool = False
    some: bool = False
    frozen: bool = False
    weight_grad: bool = False
    canonical: bool = False
    backend: str = "auto"
    memory: int | str = "1MiB"
    lora: int = 0
    held: tuple[str, ...] = ()
    alone: bool = False
    match: tuple[str | None, str | None] = (None, None)

    def __str__(self) -> str:
        said = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Case({', '.join(said)})"


def draw(seed: int) -> Case:
    r = random.Random(seed)
    case = _drawn(seed, r)
    # Drawn last, so that what older seeds draw besides stays.
    adapter = case.path != "logits" and case.dtype != "bfloat16"
    case = replace(
        case,
        lora=r.choice((0, 0, 1, 3)) if adapter else 0,
        held=r.choice(((), (), ("hidden",), ("hidden", "a"), ("b",), ("a",))) if case.path != "logits" else (),
        alone=r.random() < 0.4 and case.path != "loss",
    )
    # In float64 the oracle's products are ours, so that nearly all of them are rounded to the same side.
    rounds = case.dtype == "float64" and case.path != "logits" and r.random() < 0.5
    match = r.choice((None, "bfloat16", "float16")), r.choice((None, "bfloat16", "float16"))
    return replace(case, match=match) if rounds else case


def _drawn(seed: int, r: random.Random) -> Case:
    head = lambda: (  # noqa: E731
        r.choice((1.0, 1.0, 0.6, "rows")),
        r.choice((1.0, 1.0, 0.3, -1.5)),
        r.choice((None, None, None, 7.0)),
    )
    path = r.choice(("hidden", "hidden", "loss", "logits"))
    sort = r.choice(SORTS)
    if path == "logits":
        sort = r.choice(("logits", "logits", "fewer", "partly", "bucket", "renormalise"))
    dtype = r.choice(("float32", "float32", "float64", "bfloat16"))
    kept = r.choice(("", "", "", "same", "own")) if path != "logits" and sort not in SORTS[-2:] else ""
    case = Case(
        seed=seed,
        path=path,
        kind=r.choice(KINDS),
        sort=sort,
        dtype=dtype,
        rows=r.choice((0, 1, 2, 5, 9, 17)),
        vocab=r.choice((2, 3, 8, 17, 64, 101)),
        heads=(head(), head()),
        bias=r.random() < 0.3 and path != "logits",
        kept=kept,
        scope="support" if kept and r.random() < 0.6 else "vocabulary",
        values=r.choice(("normal", "normal", "peaked", "offset", "near", "masked")),
        ignore=r.random() < 0.3,
        some=r.random() < 0.3,
        frozen=r.random() < 0.2 and path != "logits",
        # A buffer is float32, whatever the operands are.
        weight_grad=r.random() < 0.15 and path == "hidden" and dtype != "float64",
        canonical=r.random() < 0.15 and path != "logits" and (not kept),
        backend=r.choice(("auto", "reference", "tiled")),
        memory=r.choice((200, 500, 3000, 9000, "1MiB")),
    )
    # Drawn late, so that what older seeds draw besides stays.
    sent = case.sort in SORTS[-2:]
    case = replace(
        case,
        tail=r.choice(("renormalise", "bucket")) if case.sort == "partly" else "renormalise",
        at=r.random() < 0.2 and case.sort != "several" and not sent,
        student_ids=r.random() < 0.5 and sent,
        frozen=case.frozen or (case.sort == "shared" and r.random() < 0.7),
    )
    if path != "logits" or r.random() < 0.5:
        return case
    # Beside logits that exist: a teacher whose own are made, and ids that samplers kept.
    sort, kept = r.choice((sort, "head", "mapped", "several")), r.choice(("", "same", "own"))
    kept = "" if sort in SORTS[-2:] else kept
    if sort != case.sort:
        case = replace(case, student_ids=False, tail="renormalise", at=case.at and sort != "several")
    return replace(case, sort=sort, kept=kept, scope="support" if kept and r.random() < 0.6 else "vocabulary")


class Inputs(NamedTuple):
    """Operands in the case's dtype; teachers have their own; masks of what each sampler kept."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    others: tuple[tuple[Tensor, Tensor], ...]
    which: Tensor
    ids: Tensor
    index: Tensor
    target: Tensor
    heat: Tensor
    best: tuple[Tensor, Tensor]
    mask: Tensor
    other_mask: Tensor
    advantage: Tensor
    beyond: tuple[Tensor, Tensor, Tensor]
    at: Tensor
    adapter: tuple[Tensor, ...]


def build(case: Case) -> Inputs:
    torch.manual_seed(case.seed)
    dtype, tokens, vocab, width = getattr(torch, case.dtype), case.rows + 3, case.vocab, 8
    size = {"peaked": 6.0, "offset": 1.0}.get(case.values, 1.0)
    hidden = size * torch.randn(tokens, width)
    weight = torch.randn(vocab, width)
    if case.path == "logits":
        hidden, weight = size * 2 * torch.randn(tokens, vocab), torch.eye(vocab)
    bias = torch.randn(vocab) + (200.0 if case.values == "offset" else 0.0) if case.bias else None
    others = tuple((torch.randn(tokens, 11), torch.randn(vocab, 11)) for _ in range(2))
    beside = others[0][0]
    if case.values == "near" and case.path != "logits":
        others = ((hidden, weight + 0.01 * torch.randn(vocab, width)), others[1])
    index = torch.randperm(tokens)[: case.rows] if case.some else torch.arange(case.rows)
    target = torch.randint(vocab, (case.rows,))
    if case.ignore:
        target[::3] = NONE
    if case.values == "masked":
        # A column that the student never says, which may be one that its teacher does.
        column = int(torch.randint(vocab, ()))
        target = torch.where(target == column, NONE, target)
        if case.path == "logits":
            hidden[:, column] = -torch.inf if case.heads[0][1] > 0 else torch.inf
        elif bias is not None:
            bias[column] = -torch.inf if case.heads[0][1] > 0 else torch.inf
    mask = torch.rand(case.rows, vocab) < 0.3
    mask[torch.arange(case.rows), target.clamp_min(0)] = True
    other_mask = mask | (torch.rand(case.rows, vocab) < 0.2)
    best = (2 * torch.randn(case.rows, vocab)).log_softmax(-1).topk(min(4, vocab - 1))
    ids = torch.where(torch.rand(best[1].shape) < 0.15, -1, best[1])
    # A wider vocabulary, of which the student has some ids, in an order of its own.
    beyond = torch.randn(vocab + 7, 11), torch.full((vocab + 7,), -1)
    shared = max(1, vocab - 1)
    beyond[1][torch.randperm(vocab + 7)[:shared]] = torch.randperm(vocab)[:shared]
    convert = lambda x: x.to(dtype)  # noqa: E731
    return Inputs(
        convert(hidden),
        convert(weight),
        None if bias is None else convert(bias),
        tuple((convert(x), convert(w)) for x, w in others),
        torch.randint(2, (case.rows,)),
        torch.randperm(vocab),
        index,
        target,
        0.4 + torch.rand(case.rows),
        (best[0], ids),
        mask,
        other_mask,
        torch.randn(case.rows),
        (convert(beside), convert(beyond[0]), beyond[1]),
        torch.randint(tokens, (case.rows,)),
        tuple(convert(0.3 * torch.randn(size)) for size in ((case.lora, width), (vocab, case.lora)) if case.lora),
    )


def head_of(case: Case, x: Inputs, number: int) -> ll.Head:
    temperature, scale, softcap = case.heads[number]
    return ll.Head(temperature=x.heat if temperature == "rows" else temperature, scale=scale, softcap=softcap)


# The library.


def members_of(case: Case, x: Inputs) -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
    """Hidden states (or logits), weight (None for logits), and the student's id of each column."""
    (hidden, weight), second = x.others
    fewer = weight[: max(1, case.vocab - 2)]
    logits = (hidden @ weight.T)[..., : len(fewer) if case.sort == "fewer" and case.path == "logits" else None]
    if case.path == "logits" and case.sort in ("logits", "fewer"):
        return [(logits, None, None)]
    if case.sort == "partly" and case.path == "logits":
        return [(x.beyond[0] @ x.beyond[1].T, None, x.beyond[2])]
    sorts = {
        "partly": [x.beyond],
        "shared": [(x.hidden.flip(0), x.weight, None)],
        "head": [(hidden, weight, None)],
        "logits": [(logits, None, None)],
        "mapped": [(hidden, fewer, x.ids[: len(fewer)])],
        "fewer": [(hidden, fewer, None)],
        "several": [(hidden, weight, None), (*second, None)],
    }
    return sorts[case.sort]


def teacher_of(case: Case, x: Inputs) -> ll.Teacher | Teachers:
    if case.sort in ("bucket", "renormalise"):
        logprobs, ids = x.best
        if not case.student_ids:
            return ll.Teacher.from_top_k(logprobs, ids, tail=case.sort)  # pyright: ignore[reportArgumentType]
        # The teacher's own number of each id, and the way back.
        own = torch.arange(case.vocab + 7).roll(3)
        back = torch.full((case.vocab + 7,), -1).index_copy(0, own[: case.vocab], torch.arange(case.vocab))
        numbers = torch.where(ids < 0, own[case.vocab], own[ids.clamp_min(0)])
        return ll.Teacher.from_top_k(logprobs, numbers, tail=case.sort, student_ids=back)  # pyright: ignore[reportArgumentType]
    own = ll.Kept.from_mask(x.other_mask) if case.kept == "own" else None
    head, more = head_of(case, x, 1), {"at": x.at} if case.at else {}
    more |= {} if case.tail == "renormalise" else {"tail": case.tail}
    made = [
        ll.Teacher(
            tokens if weight is None else ll.Logits(tokens, weight, match=case.match[1]),  # pyright: ignore[reportArgumentType]
            **{"head": head, "ids": ids, "kept": own, **more},
        )
        for tokens, weight, ids in members_of(case, x)
    ]
    return made[0] if len(made) == 1 else ll.Teacher.by_row(made, x.which)


class Answer(NamedTuple):
    values: dict[str, Tensor]
    gradients: dict[str, Tensor]


def ours(case: Case, x: Inputs) -> Answer:
    leaves = _leaves(case, x, x.hidden.dtype)
    hidden, weight, bias = leaves["hidden"], leaves["weight"], leaves.get("bias")
    rows = ll.Rows.at(x.index, x.target, num_tokens=len(hidden))
    shared: dict[str, Any] = {"head": head_of(case, x, 0), "backend": case.backend, "memory": case.memory}
    what = Divergence(case.kind, beta=BETA, alpha=ALPHA, eta=ETA)  # pyright: ignore[reportArgumentType]
    teacher = teacher_of(case, x)
    shared["kept"] = ll.Kept.from_mask(x.mask).over(case.scope) if case.kept else None  # pyright: ignore[reportArgumentType]
    entropy = None if case.alone else "grad"
    if case.path == "logits":
        out = ll.logprobs(hidden, rows, teacher=teacher, divergence=what, entropy=entropy, **shared)
        return _answer(case, leaves, out, total_of(case, out, x))
    if case.lora:
        weight = ll.LoRA(weight, leaves["a"], leaves["b"], scale=SCALE)
    shared |= {"bias": bias, "bits": "canonical" if case.canonical else "fast", "match": case.match[0]}
    if case.path == "loss":
        objective = ll.Objective(policy="reinforce", entropy_coef=0.2, divergence=what, divergence_coef=0.7)
        loss, _, out = loss_from_hidden(
            hidden, weight, rows, objective, teacher=teacher, return_stats=True, advantage=x.advantage, **shared
        )
        return _answer(case, leaves, out, loss)
    buffer = torch.ones(leaves["weight"].shape) if case.weight_grad else None
    shared |= {"teacher": teacher, "divergence": what, "weight_grad": buffer}
    out = from_hidden(hidden, weight, rows, entropy=entropy, **shared)
    found = _answer(case, leaves, out, total_of(case, out, x))
    if buffer is not None and not case.frozen:
        found.gradients["weight"] = buffer - 1
    return found


def total_of(case: Case, out: Any, x: Inputs) -> Tensor:
    steps = torch.linspace(-1.0, 2.0, len(x.target), dtype=out.divergence.dtype)
    if case.alone:
        return (steps * out.divergence).sum()
    # A log-prob that the teacher's ids do not have is -inf.
    logprob = torch.where(out.logprob.isfinite(), out.logprob, 0.0)
    return (steps * (out.divergence + 0.3 * logprob - 0.2 * out.entropy)).sum()


def _leaves(case: Case, x: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    given = {"hidden": x.hidden, "weight": x.weight, "bias": x.bias, **dict(zip("ab", x.adapter, strict=False))}
    frozen = ("weight", "bias", *case.held) if case.frozen or case.path == "logits" else case.held
    return {name: t.detach().to(dtype).requires_grad_(name not in frozen) for name, t in given.items() if t is not None}


def _answer(case: Case, leaves: dict[str, Tensor], out: Any, total: Tensor) -> Answer:
    names = ("divergence", "logprob", "entropy", "teacher_logprob", "teacher_entropy")
    wanted = {name: t for name, t in leaves.items() if t.requires_grad}
    found = torch.autograd.grad(total, list(wanted.values()), allow_unused=True) if wanted else ()
    gradients = {name: g for name, g in zip(wanted, found, strict=True) if g is not None}
    values = {name: getattr(out, name) for name in names}
    return Answer({name: y.detach() for name, y in values.items() if y is not None}, gradients)


# The oracle.


class Both(NamedTuple):
    divergence: Tensor
    logprob: Tensor
    entropy: Tensor
    teacher_logprob: Tensor
    teacher_entropy: Tensor


def right(case: Case, x: Inputs, dtype: torch.dtype) -> tuple[Answer, Tensor]:
    """By masks over the vocabulary; and the student's logits."""
    leaves = _leaves(case, x, dtype)
    logits = leaves["hidden"] if case.path == "logits" else leaves["hidden"] @ leaves["weight"].T
    if case.lora:
        logits = logits + SCALE * (leaves["hidden"] @ leaves["a"].T) @ leaves["b"].T
    logits = _rounded(logits[x.index] + leaves.get("bias", torch.zeros((), dtype=dtype)), case.match[0])
    z = _shaped(case, x, 0, logits)
    log_p, log_q, over, entropy_of, whole_q = _distributions(case, x, z, dtype)
    counted, at = x.target != NONE, x.target.clamp_min(0)[:, None]
    listed, of_q = _at_target(case, x, log_p, log_q, at)
    logprob = over.gather(1, at)[:, 0] if over is not None else listed
    of_teacher = _entropy(log_q)
    if case.tail == "bucket" and not case.kept:
        # Of all ids that it has, one by one.
        of_teacher = _entropy(_made_by(case, x, dtype)[0].log_softmax(-1))
    out = Both(_textbook(log_p, log_q, case, whole_q), logprob, _entropy(entropy_of), of_q, of_teacher)
    out = Both(*(torch.where(counted, y, 0.0) for y in out))
    total = total_of(case, out, x)
    if case.path == "loss":
        each = -x.advantage.to(dtype) * out.logprob - 0.2 * out.entropy + 0.7 * out.divergence
        total = torch.where(counted, each, 0.0).sum() / counted.sum().clamp_min(1)
    return _answer(case, leaves, out, total), z.detach()


def _distributions(case: Case, x: Inputs, z: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Log-probs of student and teacher over the outcomes; of the student's log-prob, or None; of its entropy; and of
    the teacher over all of its ids."""
    whole = z.log_softmax(-1)
    if case.sort in ("bucket", "renormalise"):
        log_p, log_q = _outcomes(case, x, z, dtype)
        own = case.sort == "renormalise" and case.path != "loss"
        return log_p, log_q, None if own else whole, log_p if own else whole, log_q  # pyright: ignore[reportReturnType]
    y = torch.full_like(z, -torch.inf)
    for number, (made, ids) in enumerate(zip(_made_by(case, x, dtype), _ids_of(case, x), strict=True)):
        place = torch.arange(made.shape[1]) if ids is None else ids
        all_q = torch.full_like(z, -torch.inf).index_copy(1, place[place >= 0], made.log_softmax(-1)[:, place >= 0])
        spread = torch.full_like(z, -torch.inf).index_copy(1, place[place >= 0], made[:, place >= 0])
        y = torch.where((x.which == number)[:, None], spread, y) if case.sort == "several" else spread
    if case.tail == "bucket" and not case.kept:
        alone = made.log_softmax(-1)[:, place < 0].logsumexp(-1, keepdim=True)
        never = torch.full_like(alone, -torch.inf)
        return torch.cat([whole, never], 1), torch.cat([all_q, alone], 1), whole, whole, torch.cat([all_q, never], 1)
    if not case.kept:
        return whole, y.log_softmax(-1), whole, whole, all_q if case.sort == "partly" else y.log_softmax(-1)
    log_p = z.masked_fill(~x.mask, -torch.inf).log_softmax(-1)
    y = y.masked_fill(~(x.other_mask if case.kept == "own" else x.mask), -torch.inf)
    return log_p, y.log_softmax(-1), log_p, log_p if case.scope == "support" else whole, y.log_softmax(-1)


def _made_by(case: Case, x: Inputs, dtype: torch.dtype) -> list[Tensor]:
    """Logits of the teachers, of the tokens beside the rows."""
    made = [
        y.to(dtype) if w is None else _rounded(y.to(dtype) @ w.to(dtype).T, case.match[1])
        for y, w, _ in members_of(case, x)
    ]
    return [_shaped(case, x, 1, y[x.at if case.at else x.index]).detach() for y in made]


def _ids_of(case: Case, x: Inputs) -> list[Tensor | None]:
    return [ids for _, _, ids in members_of(case, x)]


def _outcomes(case: Case, x: Inputs, z: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    empty, at = x.best[1] < 0, x.best[1].clamp_min(0)
    log_q = x.best[0].double().masked_fill(empty, -torch.inf)
    listed = z.gather(1, at).masked_fill(empty, -torch.inf)
    if case.sort == "renormalise":
        none = empty.all(-1, keepdim=True)
        listed = listed - listed.masked_fill(none, 0.0).logsumexp(-1, keepdim=True)
        return listed, (log_q - log_q.masked_fill(none, 0.0).logsumexp(-1, keepdim=True)).to(dtype)
    taken = torch.zeros_like(z, dtype=torch.bool)
    taken[(~empty).nonzero()[:, 0], x.best[1][~empty]] = True
    rest = z.masked_fill(taken, -torch.inf).logsumexp(-1, keepdim=True)
    left = (1 - log_q.exp().sum(-1, keepdim=True)).clamp_min(0.0).log()
    return torch.cat([listed, rest], 1).log_softmax(-1), torch.cat([log_q, left], 1).to(dtype)


def _at_target(case: Case, x: Inputs, log_p: Tensor, log_q: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets by outcomes: where those are ids of a list, of the target if it is one of them."""
    if case.sort not in ("bucket", "renormalise"):
        return log_p.gather(1, at)[:, 0], log_q.gather(1, at)[:, 0]
    hit = x.best[1] == x.target[:, None]
    missing = torch.nan if case.sort == "bucket" else -torch.inf
    found = [
        torch.where(hit.any(1), torch.where(hit, y[:, : hit.shape[1]], 0.0).sum(1), missing) for y in (log_p, log_q)
    ]
    return found[0], found[1]


def _rounded(logits: Tensor, match: str | None) -> Tensor:
    """With the gradient of logits that were not."""
    if match is None:
        return logits
    moved = logits.detach().to(getattr(torch, match)).to(logits) - logits.detach()
    return logits + torch.where(logits.isfinite(), moved, 0.0)


def _shaped(case: Case, x: Inputs, number: int, logits: Tensor) -> Tensor:
    temperature, scale, softcap = case.heads[number]
    logits = logits * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return logits / (x.heat.to(logits)[:, None] if temperature == "rows" else temperature)


def _entropy(log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)


def _accepted(log_p: Tensor, log_q: Tensor, case: Case) -> Tensor:
    """At the kink the mean of both slopes, as of total variation."""
    p, q = log_p.exp(), log_q.exp()
    equal = (log_p - log_q).abs() <= (0.0 if case.dtype == "float64" else KINK)
    least = torch.minimum(p, q)
    return torch.where(equal, least.detach() + 0.5 * (p - p.detach()), least).sum(-1)


def _textbook(log_p: Tensor, log_q: Tensor, case: Case, whole_q: Tensor) -> Tensor:
    kind = case.kind
    if kind in ("acceptance", "log_acceptance"):
        accepted = _accepted(log_p, whole_q, case)
        # A row in which the teacher sent nothing has divergence 0.
        nothing = (log_q == -torch.inf).all(-1)
        return accepted if kind == "acceptance" else torch.where(nothing, 0.0, -accepted.log())
    if kind == "lk_hybrid":
        accepted = _accepted(log_p, whole_q, case)
        weight = torch.exp(-ETA * accepted.detach())
        return weight * _textbook(log_p, log_q, replace(case, kind="forward_kl"), whole_q) + (1 - weight) * (
            1 - accepted
        )
    none = (log_p == -torch.inf) & (log_q == -torch.inf)
    p, q = log_p.exp(), log_q.exp()
    infinite = ((q > 0) & (log_p == -torch.inf)).any(-1) if kind == "forward_kl" else torch.zeros_like(p[:, 0]).bool()
    if kind == "reverse_kl":
        infinite = ((p > 0) & (log_q == -torch.inf)).any(-1)
    log_p, log_q = (y.masked_fill(none, 0.0).masked_fill(y == -torch.inf, NOWHERE) for y in (log_p, log_q))
    log_p, log_q = (y.masked_fill(none, 0.0) for y in (log_p, log_q))
    if kind == "forward_kl":
        found = (q * (log_q - log_p)).sum(-1)
    elif kind == "reverse_kl":
        found = (p * (log_p - log_q)).sum(-1)
    elif kind == "jsd":
        m = (BETA * q + (1 - BETA) * p).masked_fill(none, 1.0).clamp_min(1e-300).log()
        found = (BETA * q * (log_q - m) + (1 - BETA) * p * (log_p - m)).sum(-1)
    elif kind == "tv":
        # A kink: within the rounding of the logits nobody knows on which side, and the slope is 0 by definition.
        equal = (log_p - log_q).abs() <= (0.0 if case.dtype == "float64" else KINK)
        found = 0.5 * torch.where(equal, (p - q).detach(), p - q).abs().sum(-1)
    else:
        a = 0.5 if kind == "hellinger" else ALPHA
        less = (~none).any(-1).to(p) - (a * log_p + (1 - a) * log_q).exp().masked_fill(none, 0.0).sum(-1)
        found = less if kind == "hellinger" else less / (a * (1 - a))
    return torch.where(infinite, torch.inf, found)


# The verdict.


def verdict(case: Case) -> str | None:
    """What is wrong with a case, or None; "refused: ..." where the library says that it cannot be honoured."""
    x = build(case)
    try:
        found = ours(case, x)
    except ll.LogitlessError as error:
        return f"refused: {str(error).splitlines()[0]}"
    exact, z = right(case, x, torch.float64)
    dtype = x.hidden.dtype
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    plain, _ = right(case, x, wide)
    size = max(1.0, float(z[z.isfinite()].abs().max()) if z.numel() else 1.0)
    unit = 16 * torch.finfo(wide).eps * size
    infinite = not bool(exact.values["divergence"].isfinite().all())
    for name, mine in {**found.values, **{f"d_{k}": v for k, v in found.gradients.items()}}.items():
        gradient = name.startswith("d_")
        if gradient and infinite:
            continue
        truth, usual = ((a.gradients[name[2:]] if gradient else a.values[name]) for a in (exact, plain))
        more = 6 * 2.0**-8 if gradient and dtype == torch.bfloat16 else 0.0
        said = _differs(mine, truth, usual, unit, more, gradient)
        if said is not None:
            return f"{name}: {said}"
    return None


def _differs(mine: Tensor, truth: Tensor, usual: Tensor, unit: float, more: float, gradient: bool) -> str | None:
    finite = truth.isfinite()
    # Autograd has no gradient where everything that it sums is -inf: there the oracle does not know.
    if not gradient and not torch.equal(mine[~finite].double().nan_to_num(7.0), truth[~finite].nan_to_num(7.0)):
        return f"{mine[~finite].tolist()[:4]} where {truth[~finite].tolist()[:4]} is right"
    if not finite.any():
        return None
    largest = truth[finite].abs().max().clamp_min(1.0)
    error, theirs = (float((y.double() - truth)[finite].abs().max() / largest) for y in (mine, usual))
    bound = 8 * (theirs if theirs == theirs else 0.0) + unit + more
    return None if error <= bound else f"error {error:.2g} where {bound:.2g} is allowed, and torch has {theirs:.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Students and teachers at random, compared with float64.")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for seed in range(options.first, options.first + options.cases):
        case = draw(seed)
        said = verdict(case)
        counts["right" if said is None else "refused" if said.startswith("refused") else "wrong"] += 1
        if said is not None and said.startswith("refused"):
            counts[said[:90]] += 1
        elif said is not None:
            sys.stdout.write(f"{said}\n    {case}\n")
    sys.stdout.write("".join(f"{count:8} {name}\n" for name, count in counts.most_common()))


if __name__ == "__main__":
    main()
