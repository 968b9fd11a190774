"""Per-row results between ranks of a sequence group: one collective for all samples and all fields.

Every response token has one place in a vector of all responses, sample after sample. Each rank puts its rows there,
zeros elsewhere; the sum over ranks is the whole, exactly, because one rank writes each place; each rank then reads
the places it wants. What backward does is the caller's choice, because it depends on what the ranks do next:

    grad="sum"    each rank computes a part of the loss and the parts add up: gradients are summed over ranks
    grad="slice"  every rank computes the same loss, so each takes the gradient of its own rows and nothing is sent;
                  values that came from another rank are constants
    grad=None     values only, without graph

Backward with "sum" is a collective, so all ranks must use the result in the loss they differentiate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from logitless.collectives import agree_if, resolve_group, sum_over
from logitless.errors import LogitlessError, no_second_derivative
from logitless.errors.arguments import check_flags, dense, described, sequence

GradRule = Literal["sum", "slice"] | None


def exchanged(
    caller: str, rows: Any, x: Tensor | Sequence[Tensor], group: Any, to: Any, grad: GradRule, check: bool
) -> tuple[Tensor, ...]:
    """Fields of rows, checked, and exchanged over a group: all of them, or those at the rows ``to``."""
    check_flags(f"Rows.{caller}", check=check)
    process_group = resolve_group(group, f"Rows.{caller}: group")

    def prepare() -> tuple[Tensor, ...]:
        whole_lengths(caller, rows)
        check_split(caller, rows, to, 1 if process_group is None else process_group.size())
        return check_fields(caller, x, len(rows))

    def facts(fields: tuple[Tensor, ...]) -> dict[str, Any]:
        return exchange_facts(fields, whole_lengths(caller, rows), grad)

    fields = agree_if(check, process_group, f"Rows.{caller}", prepare, facts)
    wanted = None if to is None else to.response
    return exchange_over(process_group, fields, rows.response, sum(rows.response_lengths), wanted, grad)


def whole_lengths(caller: str, rows: Any) -> tuple[int, ...]:
    """Response tokens of each sample, on all ranks together."""
    if rows.response_lengths is None:
        raise LogitlessError(f"Rows.{caller}: rows made with Rows.at or Rows.every know of no samples.")
    return rows.response_lengths


def exchange_over(
    group: dist.ProcessGroup | None,
    fields: tuple[Tensor, ...],
    place: Tensor,
    total: int,
    wanted: Tensor | None,
    grad: GradRule,
) -> tuple[Tensor, ...]:
    """Fields ``[R]`` at ``place`` of ``total`` places, read back at ``wanted`` (or everywhere if None).

    A field without a graph comes back without one. Ranks must agree on which fields have one.
    """
    if grad is not None and (not isinstance(grad, str) or grad not in ("sum", "slice")):
        raise LogitlessError(f'grad: wanted "sum", "slice" or None but got {described(grad)}.')
    if grad is None:
        fields = tuple(x.detach() for x in fields)
    return _Exchange.apply(place, total, wanted, group, grad, *fields)  # pyright: ignore[reportReturnType]


def end_to_end(caller: str, parts: Sequence[Tensor], lengths: Sequence[int], has: str) -> Tensor:
    """One tensor per sample, of these lengths, as one. ``has`` says of a sample what its length is of."""
    name = "parts" if caller == "join" else "responses"
    wanted = "a list of one tensor for each sample"
    if len(sequence(parts, f"Rows.{caller}: {name}", wanted)) != len(lengths):
        raise LogitlessError(f"Rows.{caller}: {name}: got {len(parts)} tensors for {len(lengths)} samples.")
    for sample, (part, length) in enumerate(zip(parts, lengths, strict=True)):
        if dense(part, f"Rows.{caller}: {name}: that of sample {sample}").shape[:1] != (length,):
            came = part.shape[0] if part.dim() == 1 else list(part.shape)
            raise LogitlessError(f"Rows.{caller}: {name}: sample {sample} has {came} entries but {has.format(length)}.")
    if not parts:
        raise LogitlessError(f"Rows.{caller}: there are no samples, so neither dtype nor device is known.")
    return torch.cat(list(parts))


def check_split(caller: str, rows: Any, to: Any, world: int) -> None:
    """Raise unless ``to``, if there is one, is of the same samples and split over as many ranks, and ``rows`` over all
    ``world`` of them."""
    size = 1 if rows.cp is None else rows.cp.size
    if to is not None and rows.response_lengths != to.response_lengths:
        raise LogitlessError(
            f"Rows.redistribute: to= was made for responses of {list(to.response_lengths or ())} tokens but these "
            f"rows for {list(rows.response_lengths)}. Both must describe the same samples."
        )
    if to is not None and to.cp is not None and rows.cp is not None and to.cp.size != size:
        raise LogitlessError(
            f"Rows.redistribute: these rows are split over {size} ranks but to= over {to.cp.size} ranks."
        )
    if size != world:
        raise LogitlessError(f"Rows.{caller}: these rows are split over {size} ranks but group has {world}.")


def check_fields(caller: str, x: Tensor | Sequence[Tensor], num_rows: int) -> tuple[Tensor, ...]:
    """The fields, each ``[R]`` and all of one dtype."""
    wanted = "a tensor, or a list of tensors,"
    fields = (x,) if isinstance(x, Tensor) else tuple(sequence(x, f"Rows.{caller}: x", wanted))
    for field in fields:
        dense(field, f"Rows.{caller}: x", wanted, numbers=True)
    if not fields:
        raise LogitlessError(f"Rows.{caller}: x is empty; wanted a tensor or at least one field.")
    for field in fields:
        if field.dim() != 1 or field.shape[0] != num_rows or field.dtype != fields[0].dtype:
            raise LogitlessError(
                f"Rows.{caller}: x: wanted fields of shape [{num_rows}] and one dtype but got "
                f"{[(list(f.shape), str(f.dtype)) for f in fields]}."
            )
    return fields


def exchange_facts(fields: tuple[Tensor, ...], lengths: tuple[int, ...], grad: GradRule) -> dict[str, Any]:
    """What ranks must agree on before they exchange these."""
    facts = {"the number of fields": len(fields), "their dtype": str(fields[0].dtype), "grad": grad}
    # Backward sends something with "sum" alone, and then of those that have a graph.
    with_graph = tuple(grad == "sum" and torch.is_grad_enabled() and x.requires_grad for x in fields)
    return facts | {"which fields have a graph": with_graph, "the response lengths": lengths}


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, place: Tensor, total: int, wanted: Tensor | None, group: Any, grad: GradRule, *fields: Tensor
    ) -> tuple[Tensor, ...]:
        whole = _scatter(fields, place, total)
        if group is not None:
            sum_over(group, whole)
        ctx.save_for_backward(place, *(() if wanted is None else (wanted,)))
        ctx.total, ctx.group, ctx.grad = total, group, grad
        out = tuple((whole if wanted is None else whole[:, wanted]).unbind(0))
        ctx.mark_non_differentiable(*(x for x, needed in zip(out, ctx.needs_input_grad[5:], strict=True) if not needed))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise no_second_derivative("Rows.gather, Rows.redistribute")
        place, *wanted = ctx.saved_tensors
        needed = ctx.needs_input_grad[5:]
        used = tuple(g for g, need in zip(gradients, needed, strict=True) if need)
        whole = _scatter(used, wanted[0], ctx.total) if wanted else torch.stack(used)
        if ctx.group is not None and ctx.grad == "sum":
            sum_over(ctx.group, whole)
        parts = iter(whole[:, place].unbind(0))
        return (None,) * 5 + tuple(next(parts) if need else None for need in needed)


def _scatter(fields: tuple[Tensor, ...], place: Tensor, total: int) -> Tensor:
    stacked = torch.stack(fields)
    return stacked.new_zeros((len(fields), total)).index_copy_(1, place, stacked)
