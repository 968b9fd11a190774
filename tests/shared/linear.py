"""Shared by the tests of linear and those that build on them."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from calls import from_hidden
from close import assert_close_to_truth, assert_gradient_close_to_truth
from torch import Tensor
from truth import plain, truth

import logitless as ll

BACKENDS = ("reference", "tiled", "triton")


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


HALF = (torch.bfloat16, torch.float16)


VALUE_PROMISE, GRADIENT_PROMISE = 1e-5, 4e-3
"""What the documentation promises for half-precision operands."""


class Operands(NamedTuple):
    """Of a head. The names are those of the arguments."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    def leaves(self, wanted=("hidden", "weight", "bias"), dtype=None, device=None) -> Operands:
        """Copies of their own, of which the wanted ones have a gradient."""
        copies = (None if x is None else x.detach().to(device=device, dtype=dtype or x.dtype, copy=True) for x in self)
        named = zip(self._fields, copies, strict=True)
        return Operands(*(None if x is None else x.requires_grad_(name in wanted) for name, x in named))

    def logits(self) -> Tensor:
        """As plain torch has them, in at least float32."""
        wide = [x if x is None or x.dtype == torch.float64 else x.float() for x in self]
        return torch.nn.functional.linear(*wide)


def draw(num_tokens: int, vocab: int, width: int, dtype=torch.float32, spread: float = 3.0) -> Operands:
    """Operands of logits with the given spread."""
    x, w = torch.randn(num_tokens, width), torch.randn(vocab, width) * spread / width**0.5
    return Operands(x.to(dtype), w.to(dtype), torch.randn(vocab).to(dtype))


def draw_rows(num_tokens: int, num_rows: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Some rows in any order; every ninth is ignored."""
    target = torch.randint(vocab, (num_rows,))
    target[4::9] = -100
    return torch.randperm(num_tokens)[:num_rows], target


def ragged(kept: list[list[int]], device="cpu") -> ll.Kept:
    flat, lengths = [i for ids in kept for i in ids], [len(ids) for ids in kept]
    return ll.Kept(*(torch.tensor(x, dtype=torch.int64, device=device) for x in (flat, lengths)))


class Scored(NamedTuple):
    """One call and its gradients, by name."""

    out: ll.TokenStats
    gradients: dict[str, Tensor]


def differentiate(out, leaves: Operands, upstream: list[Tensor], entropy: str | None = "grad") -> dict[str, Tensor]:
    """Gradients of the leaves that want one, for random upstream gradients of every output that has a graph."""
    pairs = [(x, g.to(x)) for x, g in zip(out[:3], upstream, strict=True) if x is not None and x.requires_grad]
    if entropy != "grad":
        pairs = [(x, g.to(x)) for x, g in ((out.logprob, upstream[0]), (out.log_z, upstream[2])) if x is not None]
    named = {name: x for name, x in leaves._asdict().items() if x is not None and x.requires_grad}
    outputs, gradients = zip(*pairs, strict=True)
    return dict(zip(named, torch.autograd.grad(outputs, list(named.values()), gradients), strict=True))


def check(
    operands: Operands,
    index: Tensor,
    target: Tensor,
    kept: list[list[int]] | None = None,
    wanted: tuple[str, ...] = ("hidden", "weight", "bias"),
    device="cpu",
    entropy: str | None = "grad",
    scope: str = "vocabulary",
    **options,
) -> Scored:
    """Values and gradients of one call by the tolerance rule, and by the promise for half precision."""
    head = {k: options.pop(k) for k in ("temperature", "scale", "softcap", "vocab_size") if k in options}
    rows = ll.Rows.at(index.to(device), target.to(device), num_tokens=len(operands.hidden))
    leaf = operands.leaves(wanted, device=device)
    ours = from_hidden(
        leaf.hidden,
        leaf.weight,
        rows,
        bias=leaf.bias,
        entropy=entropy,
        head=ll.Head(**head),
        kept=None if kept is None else ragged(kept, device).over(scope),
        **options,
    )
    exact_leaf, plain_leaf = operands.leaves(wanted, torch.float64), operands.leaves(wanted, device=device)
    over = {"kept": kept, "scope": scope, **head}
    exact = truth(exact_leaf.logits(), index, target, **over)
    usual = plain(plain_leaf.logits(), index, target, **over)
    upstream = [torch.randn(len(index), dtype=torch.float64) for _ in range(3)]
    mine, right, theirs = (
        differentiate(out, leaves, upstream, entropy)
        for out, leaves in ((ours, leaf), (exact, exact_leaf), (usual, plain_leaf))
    )
    half = operands.hidden.dtype in HALF
    for name, a, b, c in zip(exact._fields, ours[:3], exact, usual, strict=True):
        if (name == "entropy" and entropy is None) or b is None:
            assert a is None
            continue
        assert_close_to_truth(a, b, c, name)
        assert not half or ((a.cpu() - b).abs() <= VALUE_PROMISE * b.abs().clamp_min(1.0)).all(), name
    assert mine.keys() == right.keys()
    for name in mine:
        assert mine[name].dtype == operands.hidden.dtype, name
        assert_gradient_close_to_truth(mine[name], right[name], theirs[name], f"gradient of {name}")
        if half:
            off = (mine[name].double().cpu() - right[name]).norm()
            assert off <= GRADIENT_PROMISE * right[name].norm(), f"gradient of {name}: {off / right[name].norm():.3g}"
    return Scored(ours, mine)


def whole(*shape: int, largest: int, unit: int, dtype: torch.dtype) -> Tensor:
    """Multiples of 1 / unit in 8 bits, so that products add up without rounding in float32."""
    return (torch.randint(-largest, largest + 1, shape) / unit).to(dtype)


def whole_operands(num_rows: int, vocab: int, dtype: torch.dtype, with_bias: bool = False) -> Operands:
    return Operands(
        whole(num_rows, 33, largest=200, unit=64, dtype=dtype),
        whole(vocab, 33, largest=100, unit=256, dtype=dtype),
        whole(vocab, largest=200, unit=64, dtype=dtype) if with_bias else None,
    )


def refusing(original, limit: int, module: str):
    def wrapper(*args, **kwargs):
        out = original(*args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__", "") == module and out.numel() > limit:
            raise torch.OutOfMemoryError(f"{out.numel()} elements are more than {limit}")
        return out

    return wrapper


def tiny(num_rows: int) -> int:
    """A budget of at most 20 columns of so many rows."""
    return 320 * max(num_rows, 1)
