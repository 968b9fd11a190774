"""Logits, teachers and calls with any of the options of ``test_pairs_of_options``, by name; and the oracle for them.

``oracle`` is plain torch in float64 over dense logits, and ``library`` are the arguments of the call that it is for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import logitless as ll
from logitless.operands import LoRA

T, V, D, E, TRUE = 8, 23, 5, 4, 19
generator = torch.Generator().manual_seed(5)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


LEAVES = {"h": drawn(T, D), "w": drawn(V, D), "bias": drawn(V), "a": drawn(2, D), "b": drawn(V, 2)}
HIDDEN, HEADS, SHIFT = (drawn(T, E), drawn(T, E)), (drawn(V, E), drawn(V, E)), drawn(V)
HEAT, T_HEAT, FACTOR, T_FACTOR = drawn(4, T).abs() + 0.4
INDEX, TARGET = torch.tensor([1, 2, 4, 5, 7]), torch.randint(17, (T,), generator=generator)
KEPT, T_KEPT = torch.rand(2, T, V, generator=generator) < 0.3
KEPT[:, 17:] = T_KEPT[:, 17:] = False
T_KEPT[:, 0] = True
IDS = torch.randint(17, (T, 3), generator=generator)
T_IDS = torch.randperm(V, generator=generator)
T_IDS[(T_IDS >= TRUE) | (T_IDS == 3)] = -1
AT, WHICH = torch.tensor([0, 0, 3, 3, 1, 7, 7, 2]), torch.arange(T) % 2
SENT_IDS = torch.rand(T, 17, generator=generator).argsort(1)[:, :4]
SENT = drawn(T, 17).log_softmax(1).gather(1, SENT_IDS)


def rounded(x: Any, dtype: torch.dtype) -> Any:
    """With the gradient of what was not rounded."""
    return x + (x.detach().to(dtype).to(x) - x.detach())


def changed(x: Any, on: frozenset[str], own: str, factor: Tensor, cast: Any) -> Any:
    """What a model does to its logits: the same lines for the oracle and for the library."""
    x = cast(x) if f"{own}cast" in on else x
    x = x * 1.3 if f"{own}factor" in on else x
    x = x * factor[:, None] if f"{own}row_factor" in on else x
    return 3 * torch.tanh(x / 3) if f"{own}model_cap" in on else x


def by_head(x: Tensor, on: frozenset[str], own: str) -> Tensor:
    """Scale and softcap; temperatures are of scored rows."""
    x = -0.8 * x if f"{own}scale" in on else x
    return 2.0 * torch.tanh(x / 2.0) if f"{own}softcap" in on else x


def head_of(on: frozenset[str], own: str, temperature: float, each: Tensor) -> ll.Head:
    heat = temperature if f"{own}temperature" in on else each if f"{own}row_temperature" in on else 1.0
    cap, scale = 2.0 if f"{own}softcap" in on else None, -0.8 if f"{own}scale" in on else 1.0
    return ll.Head(heat, scale, cap, TRUE if f"{own}vocab_size" in on else None)


def product(on: frozenset[str], number: int) -> Tensor:
    """Logits of a teacher before its head."""
    y = HIDDEN[number] @ HEADS[number].T
    y = y + SHIFT if "t_bias" in on else y
    y = rounded(y, torch.bfloat16) if "t_match" in on else y
    return changed(y, on, "t_", T_FACTOR, lambda x: rounded(x, torch.bfloat16))


def heated(z: Tensor, on: frozenset[str], own: str, temperature: float, each: Tensor) -> Tensor:
    z = z / temperature if f"{own}temperature" in on else z / each[:, None] if f"{own}row_temperature" in on else z
    return z[:, :TRUE] if f"{own}vocab_size" in on else z


def jsd(z: Tensor, y: Tensor) -> Tensor:
    """Of outcomes that either may exclude."""
    logs = z.log_softmax(-1), y.log_softmax(-1)
    middle = (0.5 * logs[0].exp() + 0.5 * logs[1].exp()).clamp_min(1e-300).log()
    terms = [torch.where(x.isinf(), 0.0, x.exp() * (x.masked_fill(x.isinf(), 0.0) - middle)) for x in logs]
    return 0.5 * (terms[0] + terms[1]).sum(-1)


def entropy(z: Tensor) -> Tensor:
    log_p = z.log_softmax(-1)
    return -(log_p.exp() * log_p.masked_fill(log_p.isinf(), 0.0)).sum(-1)


def teachers(z: Tensor, kept: Tensor | None, rows: Tensor, on: frozenset[str]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logits of the student and of the teacher over the same outcomes, and the teacher's over all of its ids."""
    if on & {"t_sent", "t_sent_alone"}:
        ids, q, p = SENT_IDS[rows], SENT[rows], z.log_softmax(-1)
        rest = [torch.ones_like(p, dtype=torch.bool).scatter(1, ids, False)]
        p_rest = [p.masked_fill(~x, -torch.inf).logsumexp(-1, keepdim=True) for x in rest]
        more = ([], []) if "t_sent_alone" in on else (p_rest, [(-q.exp().sum(-1, keepdim=True)).log1p()])
        return torch.cat([p.gather(1, ids), *more[0]], 1), torch.cat([q, *more[1]], 1), None
    each = [by_head(product(on, number), on, "t_") for number in (0, 1)]
    place = AT[rows] if "t_at" in on else rows
    y = torch.stack([each[int(WHICH[r]) if "t_several" in on else 0][t] for r, t in zip(rows, place, strict=True)])
    y, both = heated(y, on, "t_", 1.6, T_HEAT[rows]), torch.full_like(z, -torch.inf)
    whole, ids = y, T_IDS[: y.shape[1]] if "t_ids" in on else torch.arange(y.shape[1])
    both[:, ids[ids >= 0]] = y[:, ids >= 0]
    if "t_bucket" in on:
        nothing = torch.full_like(z[:, :1], -torch.inf)
        others = y[:, ids < 0].logsumexp(-1, keepdim=True)
        return torch.cat([z, nothing], 1), torch.cat([both, others], 1), whole
    if kept is None:
        return z, both, None
    over = T_KEPT[rows][:, : z.shape[1]] if "t_kept" in on else kept
    return z.masked_fill(~kept, -torch.inf), both.masked_fill(~over, -torch.inf), None


def oracle(on: frozenset[str], loss: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results by name, and the leaves that they have a graph to."""
    leaves = {name: x.clone().requires_grad_() for name, x in LEAVES.items()}
    x = leaves["h"] @ leaves["w"].T
    if "given" in on:
        x = leaves["z"] = x.detach().requires_grad_()
    x = x + 1.7 * leaves["h"] @ leaves["a"].T @ leaves["b"].T if "lora" in on else x
    x = x + leaves["bias"] if "bias" in on else x
    x = rounded(x, torch.bfloat16) if "match" in on else x
    x = by_head(changed(x, on, "", FACTOR, lambda x: rounded(x, torch.bfloat16)), on, "")
    rows = INDEX if "rows" in on else torch.arange(T)
    z, target, kept = heated(x[rows], on, "", 0.6, HEAT[rows]), TARGET[rows][:, None], None
    if on & {"kept", "support"}:
        kept = KEPT[rows][:, : z.shape[1]].scatter(1, target, True)
    over = z if kept is None else z.masked_fill(~kept, -torch.inf)
    found = {"logprob": over.log_softmax(-1).gather(1, target)[:, 0], "log_z": z.logsumexp(-1)}
    found["entropy"] = entropy(over if "support" in on else z)
    if "teacher" in on:
        p, q, whole = teachers(z, kept, rows, on)
        found["divergence"] = jsd(p, q)
        found["teacher_entropy"] = entropy(q if whole is None else whole)
        if "t_sent_alone" in on and not loss:
            listed = z.gather(1, SENT_IDS[rows])
            found |= {"log_z": listed.logsumexp(-1), "entropy": entropy(listed)}
            hit = SENT_IDS[rows] == target
            found["logprob"] = p.log_softmax(-1).masked_fill(~hit, -torch.inf).amax(1)
    log_p = z.log_softmax(-1)
    found |= {"collision": (2 * log_p).exp().sum(-1), "mean_logit": z.mean(-1), "max_logit": z.detach().amax(-1)}
    found |= {"ids_logprobs": log_p.gather(1, IDS[rows]), "top_k_logprobs": log_p.detach().topk(4)[0]}
    left_out = (rows % 3 == 2) & ("ignored" in on)
    return {k: x.masked_fill(left_out if x.dim() == 1 else left_out[:, None], 0.0) for k, x in found.items()}, leaves


def library(on: frozenset[str]) -> tuple[Any, Any, dict[str, Any], dict[str, Tensor]]:
    """Logits, targets or rows, the verb's options, and the leaves; with the buffer of ``weight_grad`` among them."""
    leaves = {name: x.clone().requires_grad_() for name, x in LEAVES.items()}
    rows = INDEX if "rows" in on else torch.arange(T)
    target = TARGET[rows].masked_fill((rows % 3 == 2) & ("ignored" in on), -100)
    bfloat16: Any = {True: "bfloat16", False: None}
    if "given" in on:
        leaves["z"] = (leaves["h"] @ leaves["w"].T).detach().requires_grad_()
        logits: Any = ll.Logits.given(leaves["z"] * 1.0, overwrite="overwrite" in on)
    else:
        leaves["buffer"] = torch.zeros(V, D)
        own: dict[str, Any] = {"weight_grad": leaves["buffer"]} if "weight_grad" in on else {}
        own |= {"grad_scale": 2.5} if "grad_scale" in on else {}
        own |= {"bias": leaves["bias"] if "bias" in on else None, "match": bfloat16["match" in on]}
        adapter = LoRA(leaves["w"], leaves["a"], leaves["b"], scale=1.7)
        weight = adapter if "lora" in on else leaves["w"]
        logits = ll.Logits(leaves["h"], weight, sparse_weight_grad="sparse" in on, **own)
        logits = changed(logits, on, "", FACTOR, lambda x: x.bfloat16().double())
    options: dict[str, Any] = {"head": head_of(on, "", 0.6, HEAT[rows])}
    if on & {"kept", "support"}:
        options["kept"] = ll.Kept.from_mask(KEPT[rows]).over("support" if "support" in on else "vocabulary")
    if on & {"t_sent", "t_sent_alone"}:
        tail: Any = "renormalise" if "t_sent_alone" in on else "bucket"
        options["teacher"] = ll.Teacher.from_top_k(SENT[rows], SENT_IDS[rows], tail=tail)
    elif "teacher" in on:
        members = []
        for number, (hidden, weight) in enumerate(zip(HIDDEN, HEADS, strict=True)):
            shift: Any = SHIFT if "t_bias" in on else None
            y: Any = ll.Logits(hidden, weight, bias=shift, match=bfloat16["t_match" in on])
            y = changed(y, on, "t_", T_FACTOR, lambda x: x.bfloat16().double())
            y = product(on, number) if "t_given" in on else y
            more: dict[str, Any] = {"ids": T_IDS} if "t_ids" in on else {}
            more |= {"tail": "bucket"} if "t_bucket" in on else {}
            more |= {"at": AT[rows]} if "t_at" in on else {}
            more |= {"kept": ll.Kept.from_mask(T_KEPT[rows])} if "t_kept" in on else {}
            members.append(ll.Teacher(y, head=head_of(on, "t_", 1.6, T_HEAT[rows]), **more))
        options["teacher"] = ll.Teacher.by_row(members, WHICH[rows]) if "t_several" in on else members[0]
    return logits, (ll.Rows.at(rows, target) if "rows" in on else target), options, leaves
