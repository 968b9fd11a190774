"""The tensors of a case: leaves as they lie in memory, the rows, and what the rows must be.

A case is one part, or one part for each context-parallel rank. The oracle sees the tokens of all parts end to end, and
where each row is among them; which tokens a rank holds comes from ``cuts.py``, not from the library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import cuts
import torch
from torch import Tensor

from fuzz.cases import LINEAR, LOSSES, SAMPLES, SPLIT, Case
from logitless import Contiguous, Kept, Rows, Zigzag

IGNORE = -100

HEAD_LEAVES = ("weight", "bias", "a", "b")
"""Leaves that are the head's."""

SCALE = 0.5
"""Of a LoRA."""


@dataclass(frozen=True)
class Part:
    """What one rank is given.

    Attributes:
        leaf: name of the leaf that holds its tokens.
        lead: leading dimensions of the tensor.
        index, target, sample, position: of its rows, as lists.
        rows: of all rows of the case, those that are its own.
    """

    leaf: str
    lead: tuple[int, ...]
    index: list[int]
    target: list[int]
    sample: list[int]
    position: list[int]
    rows: slice


@dataclass(frozen=True)
class Inputs:
    """A case as tensors on the CPU.

    Attributes:
        leaves: by name, without gradient: ``x0`` .. of the parts, ``weight``, ``bias``, ``a`` and ``b`` of a LoRA.
        views: from a leaf to the tensor that is passed.
        index, target: of all rows, among the tokens of all parts end to end.
        sample, counted, totals: of all rows; counted tokens of each sample.
        masks: loss mask of each sample, or None.
        support: ``[R, V]`` ids each row's log-prob is normalised over, or None.
        kept: one list of ids per row, or None.
        upstream: gradients of log-prob, entropy and log Z.
        ids: ``[R, K]`` listed ids, some of them twice, the target, or left out.
    """

    case: Case
    parts: list[Part]
    leaves: dict[str, Tensor]
    views: dict[str, Callable[[Tensor], Tensor]]
    index: Tensor
    target: Tensor
    sample: Tensor
    counted: Tensor
    totals: Tensor
    tokens: list[list[int]]
    masks: list[list[int]] | None
    temperature: Tensor | float
    support: Tensor | None
    kept: list[list[int]] | None
    upstream: Tensor
    noise: Tensor
    ids: Tensor

    def wanted(self, name: str) -> bool:
        """Whether a leaf has a gradient."""
        kind = name if name in HEAD_LEAVES else "hidden" if self.case.path in LINEAR else "logits"
        return kind not in self.case.frozen

    @property
    def num_columns(self) -> int:
        return self.case.vocab + self.case.extra_columns


def build(case: Case) -> Inputs:
    """The tensors of a case, always the same."""
    g = torch.Generator().manual_seed(case.seed)
    masked = _masked_columns(case, g)
    parts, tokens, masks, sizes = _parts(case, g, masked)
    target = torch.tensor([t for part in parts for t in part.target], dtype=torch.int64)
    starts = [0, *accumulate(sizes)]
    index = torch.tensor([starts[k] + i for k, part in enumerate(parts) for i in part.index], dtype=torch.int64)
    sample = torch.tensor([s for part in parts for s in part.sample], dtype=torch.int64)
    counted = target != IGNORE
    if masks is not None:
        on = [bool(masks[s][p]) for part in parts for s, p in zip(part.sample, part.position, strict=True)]
        counted = counted & torch.tensor(on, dtype=torch.bool)
    num_samples = len(tokens) if case.layout in SAMPLES else 1
    totals = torch.zeros(num_samples).index_add_(0, sample, counted.float())
    leaves, views = _leaves(case, parts, g, masked)
    count = len(target)
    temperature = 0.3 + 2 * torch.rand(count, generator=g) if case.temperature == "rows" else case.temperature
    kept, support = _kept(case, target, g)
    upstream = torch.randn(3, count, generator=g)
    if case.upstream == "zero":
        upstream.zero_()
    elif case.upstream == "some rows":
        upstream[:, ::2] = 0.0
    elif case.upstream != "all":
        upstream[[i for i, name in enumerate(("logprob", "entropy", "log_z")) if name != case.upstream]] = 0.0
    noise = torch.randn(5, max(count, num_samples), generator=g)
    return Inputs(
        case, parts, leaves, views, index, target, sample, counted, totals, tokens, masks, temperature, support, kept,
        upstream, noise, _ids(case, target, g),
    )  # fmt: skip


def rows_of(inputs: Inputs, part: Part, rank: int, device: str = "cpu") -> Any:
    """The ``rows`` argument of one part, by the library."""
    case = inputs.case
    target = torch.tensor(part.target, dtype=torch.int64, device=device)
    if case.layout == "every":
        return target.view(part.lead)
    if case.layout in ("pair", "at"):
        index = torch.tensor(part.index, dtype=torch.int64, device=device)
        return (index, target) if case.layout == "pair" else Rows.at(index, target, num_tokens=part.lead[0])
    responses = [r for _, r in case.samples]
    options: dict[str, Any] = {"loss_mask_only": case.mask_only, "device": device}
    if case.layout in SPLIT:
        options["cp"] = (Contiguous if case.layout == "contiguous" else Zigzag)(rank, case.cp)
    if "lines" in case.layout:
        options |= {"padding": "left" if case.left else "right", "max_length": _width(case)}
        return Rows.padded(inputs.tokens, responses, inputs.masks, **options)
    if case.absorb:
        options["cu_seqlens"] = [0, *accumulate(_spans(case))]
    elif case.align:
        options["align"] = _align(case)
    if case.extra:
        options["num_tokens"] = part.lead[0]
    return Rows.packed(inputs.tokens, responses, inputs.masks, **options)


def kept_of(inputs: Inputs, part: Part, device: str = "cpu") -> Kept | None:
    if inputs.kept is None:
        return None
    own = inputs.kept[part.rows]
    flat, lengths = [i for ids in own for i in ids], [len(ids) for ids in own]
    ids, runs = (torch.tensor(x, dtype=torch.int64, device=device) for x in (flat, lengths))
    return Kept(ids, runs, inputs.case.scope)  # pyright: ignore[reportArgumentType]


# Where tokens are.


def _align(case: Case) -> int:
    multiple = 2 * case.cp if case.layout == "zigzag" else 1
    return max(1, case.align) * multiple


def _spans(case: Case) -> list[int]:
    spans = [cuts.round_up(p + r, _align(case)) for p, r in case.samples]
    spans[-1] += case.absorb * _align(case)
    return spans


def _width(case: Case) -> int:
    return max(p + r for p, r in case.samples) + case.extra


def _held(case: Case) -> list[list[cuts.Token]]:
    """The tokens of every context-parallel rank."""
    lengths = [p + r for p, r in case.samples]
    if "lines" not in case.layout:
        spans = _spans(case)
        samples, size = cuts.padded(lengths, spans), case.cp
        count = cuts.round_up(sum(spans), size) // size + case.extra
        if case.layout == "packed":
            return cuts.whole(samples, count)
        return (cuts.zigzag if case.layout == "zigzag" else cuts.contiguous)(samples, size, count)
    width = _width(case)
    lines = cuts.left_padded(lengths, width) if case.left else cuts.padded(lengths, [width] * len(lengths))
    if case.layout == "lines":
        return cuts.whole(lines)
    return cuts.zigzag([line + [None] * (cuts.round_up(width, 2 * case.cp) - width) for line in lines], case.cp)


def _parts(
    case: Case, g: torch.Generator, masked: list[int]
) -> tuple[list[Part], list[list[int]], list[list[int]] | None, list[int]]:
    """The parts, the token ids and masks of the samples, and how many tokens each part has."""
    if case.layout not in SAMPLES:
        lead = case.lead or (case.tokens,)
        if case.sequence_parallel:
            lead = (cuts.round_up(case.tokens, case.ranks),)
        count = int(torch.Size(lead).numel())
        target = _targets(case, count, g, masked)
        index = list(range(count))
        if case.layout != "every":
            index = torch.randperm(count, generator=g).tolist()[: (count + 1) // 2 + 1]
            target = target[: len(index)]
        rows = slice(0, len(index))
        return [Part("x0", lead, index, target, [0] * len(index), index, rows)], [], None, [count]
    batch = cuts.Batch([p + r for p, r in case.samples], [r for _, r in case.samples])
    tokens = [_targets(case, n, g, masked) for n in batch.lengths]
    masks = None
    if case.mask:
        masks = [(torch.rand(r, generator=g) < 0.6).long().tolist() for r in batch.responses]
    parts, sizes, start = [], [], 0
    for rank, held in enumerate(_held(case)):
        found = [(i, token, batch.predicts(token)) for i, token in enumerate(held)]
        if case.mask_only and masks is not None:
            found = [(i, token, p) for i, token, p in found if p is not None and masks[token[0]][p]]
        own = [(i, token[0], p, tokens[token[0]][token[1] + 1]) for i, token, p in found if p is not None]
        lead = (len(batch.lengths), len(held) // len(batch.lengths)) if "lines" in case.layout else (len(held),)
        columns = [[row[k] for row in own] for k in range(4)]
        index, sample, position, target = columns
        parts.append(Part(f"x{rank}", lead, index, target, sample, position, slice(start, start + len(own))))
        sizes.append(len(held))
        start += len(own)
    return parts, tokens, masks, sizes


def _targets(case: Case, count: int, g: torch.Generator, masked: list[int]) -> list[int]:
    """Ids that are not masked; now and then any of them, where a result is defined then."""
    free = [i for i in range(case.vocab) if i not in masked]
    anything = case.path not in LOSSES and not case.kept and case.seed % 8 == 0
    ids = torch.randint(case.vocab if anything else len(free), (count,), generator=g).tolist()
    ids = ids if anything else [free[i] for i in ids]
    if case.ignore:
        drop = torch.rand(count, generator=g).tolist()
        ids = [IGNORE if x < 0.4 else i for i, x in zip(ids, drop, strict=True)]
    return ids


def _masked_columns(case: Case, g: torch.Generator) -> list[int]:
    if case.values == "lowest first":
        return list(range(case.vocab // 2))
    if case.values not in ("lowest", "minus infinity"):
        return []
    return torch.randperm(case.vocab, generator=g).tolist()[: case.vocab // 3]


def _kept(case: Case, target: Tensor, g: torch.Generator) -> tuple[list[list[int]] | None, Tensor | None]:
    if not case.kept:
        return None, None
    share = {"none": 0.0, "all": 1.0}.get(case.kept, 0.4)
    chosen = torch.rand(len(target), case.vocab, generator=g) < share
    kept = [row.nonzero().flatten().tolist() for row in chosen]
    if case.kept == "twice":
        kept = [ids + ids[::-1] for ids in kept]
    support = chosen.scatter(1, target.clamp_min(0)[:, None], True)
    return kept, support


def _ids(case: Case, target: Tensor, g: torch.Generator) -> Tensor:
    ids = torch.randint(case.vocab, (len(target), case.ids), generator=g)
    kind = torch.rand(ids.shape, generator=g)
    ids = torch.where(kind < 0.1, IGNORE, torch.where(kind < 0.3, target.clamp_min(0)[:, None], ids))
    return torch.where(kind > 0.8, ids[:, :1], ids)


# How tensors lie in memory.


def _leaves(
    case: Case, parts: list[Part], g: torch.Generator, masked: list[int]
) -> tuple[dict[str, Tensor], dict[str, Callable[[Tensor], Tensor]]]:
    linear, dtype = case.path in LINEAR, getattr(torch, case.dtype)
    leaves, views = {}, {}
    columns = case.vocab + case.extra_columns
    last = case.width if linear else columns
    lowest = -torch.inf if case.values == "minus infinity" else torch.finfo(dtype).min
    for part in parts:
        shape, view = strided(case.stride, (*part.lead, last), rows_contiguous=not linear)
        leaves[part.leaf], views[part.leaf] = _numbers(case, shape, g, "hidden" if linear else "logits"), view
    if linear:
        shape, views["weight"] = strided(case.weight_stride, (columns, case.width), rows_contiguous=False)
        leaves["weight"] = _numbers(case, shape, g, "weight")
        if case.bias:
            leaves["bias"], views["bias"] = _numbers(case, (columns,), g, "bias"), _same
        if case.lora:
            sizes = {"a": (case.lora, case.width), "b": (columns, case.lora)}
            leaves |= {name: _numbers(case, size, g, "weight") for name, size in sizes.items()}
            views |= dict.fromkeys(sizes, _same)
    for name, x in leaves.items():
        leaves[name] = x = x.to(dtype)
        if masked and (name == "bias" or not linear):
            (x if case.stride == "expanded" and not linear else views[name](x))[..., masked] = lowest
    if case.poison:
        _poison(case, parts, leaves, views)
    return leaves, views


def _numbers(case: Case, shape: tuple[int, ...], g: torch.Generator, kind: str) -> Tensor:
    """What lies in a leaf, before it is rounded."""
    if case.values == "zeros":
        return torch.zeros(shape)
    if case.match is not None:
        # Multiples of 1/8 and 1/4: products and sums of these are exact in float32.
        return torch.randint(-8, 9, shape, generator=g) / (8 if kind == "weight" else 4)
    x = torch.randn(shape, generator=g)
    spread = {"logits": 3.0, "hidden": 1.0, "weight": 3.0 / max(1, case.width) ** 0.5, "bias": 1.0}[kind]
    spread *= {"huge": 100.0 if kind == "logits" else 10.0, "tiny": 1e-6}.get(case.values, 1.0)
    if case.values == "peaked" and kind in ("logits", "hidden"):
        spread *= 12.0
    if case.values == "large":
        spread = (2e4 if case.dtype == "float16" else 1e30) if kind == "logits" else 60.0
    x = x.double() * spread
    if case.values == "large":
        edge = 0.95 * torch.finfo(getattr(torch, case.dtype)).max
        x = x.clamp(-edge, edge)
    return x + 3000.0 if case.values == "offset" and kind in ("logits", "bias") else x


def _poison(case: Case, parts: list[Part], leaves: dict[str, Tensor], views: dict) -> None:
    """NaN wherever nobody may look: around the views, in rows that are not scored, in columns of padding."""
    for part in parts:
        if case.stride == "expanded":
            continue
        x = leaves[part.leaf]
        keep = views[part.leaf](x).clone(memory_format=torch.contiguous_format)
        x.fill_(torch.nan)
        view, width = views[part.leaf](x), keep.shape[-1]
        read = [i for i, t in zip(part.index, part.target, strict=True) if case.path in LINEAR or t != IGNORE]
        flat = torch.full_like(keep, torch.nan).view(-1, width)
        flat[read] = keep.reshape(-1, width)[read]
        view.copy_(flat.view(keep.shape))
        if case.path not in LINEAR:
            view[..., case.vocab :] = torch.nan
    for name in ("weight", "bias", "b"):
        if name in leaves and not (name == "weight" and case.weight_stride == "expanded"):
            views[name](leaves[name])[case.vocab :] = torch.nan


def _same(x: Tensor) -> Tensor:
    return x


def strided(
    kind: str, shape: tuple[int, ...], rows_contiguous: bool
) -> tuple[tuple[int, ...], Callable[[Tensor], Tensor]]:
    """Shape of the leaf, and how the tensor of ``shape`` is cut from it."""
    first, *rest, last = shape
    if kind == "sliced":
        return (*shape[:-1], last + 3), lambda x: x[..., 1 : last + 1]
    if kind == "expanded":
        return (1, *shape[1:]), lambda x: x.expand(shape)
    if kind == "column-major" or (kind == "transposed" and not rest and not rows_contiguous):
        return (last, *shape[:-1]), lambda x: x.movedim(0, -1)
    if kind == "transposed" and rest:
        return (rest[0], first, *rest[1:], last), lambda x: x.transpose(0, 1)
    if kind in ("gaps", "transposed"):
        if rest:
            return (first, rest[0] + 1, *rest[1:], last), lambda x: x[:, :-1]
        return (2 * first, last), lambda x: x[::2]
    return shape, _same
