"""Rows between ranks of a sequence group: results are exchanged, by one collective for all samples and all fields.

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

from logitless.collectives import agree_if, resolve_group, sum_over, table_over
from logitless.errors import LogitlessError, no_second_derivative
from logitless.errors.arguments import check_flags, dense, described, sequence
from logitless.rows.layouts import num_ranks

GradRule = Literal["sum", "slice"] | None


def exchanged(
    caller: str, rows: Any, x: Tensor | Sequence[Tensor], group: Any, to: Any, grad: GradRule, check: bool
) -> tuple[Tensor, ...]:
    """Fields of rows, checked, and exchanged over a group: all response tokens of each, or those of the rows ``to``.

    A field without a graph comes back without one. Ranks must agree on which fields have one.
    """
    check_flags(f"Rows.{caller}", check=check)
    process_group = resolve_group(group, f"Rows.{caller}: group")

    def prepare() -> tuple[Tensor, ...]:
        whole_lengths(caller, rows)
        if to is not None:
            _check_same_samples(rows, to)
        check_ranks(f"Rows.{caller}", rows, process_group)
        return _check_fields(caller, x, len(rows))

    def facts(fields: tuple[Tensor, ...]) -> dict[str, Any]:
        # Backward sends something with "sum" alone, and then of the fields that have a graph.
        sent = tuple(grad == "sum" and torch.is_grad_enabled() and field.requires_grad for field in fields)
        numbers = {"the number of fields": len(fields), "their dtype": str(fields[0].dtype), "grad": grad}
        return numbers | {"which fields have a graph": sent, "the response lengths": whole_lengths(caller, rows)}

    fields = agree_if(check, process_group, f"Rows.{caller}", prepare, facts)
    if grad is not None and (not isinstance(grad, str) or grad not in ("sum", "slice")):
        raise LogitlessError(f'grad: wanted "sum", "slice" or None but got {described(grad)}.')
    if grad is None:
        fields = tuple(field.detach() for field in fields)
    wanted, total = None if to is None else to.response, sum(rows.response_lengths)
    return _Exchange.apply(rows.response, total, wanted, process_group, grad, *fields)  # pyright: ignore[reportReturnType]


def whole_lengths(caller: str, rows: Any) -> tuple[int, ...]:
    """Response tokens of each sample, on all ranks together."""
    if rows.response_lengths is None:
        raise LogitlessError(f"Rows.{caller}: rows made with Rows.at or Rows.every know of no samples.")
    return rows.response_lengths


def end_to_end(caller: str, name: str, parts: Sequence[Tensor], lengths: Sequence[int], has: str) -> Tensor:
    """Tensors of each sample, of these lengths, end to end. ``has`` says in an error what a sample has that many of."""
    argument = f"Rows.{caller}: {name}"
    if len(sequence(parts, argument, "a list of one tensor for each sample")) != len(lengths):
        raise LogitlessError(f"{argument}: got {len(parts)} tensors for {len(lengths)} samples.")
    for sample, (part, length) in enumerate(zip(parts, lengths, strict=True)):
        if dense(part, f"{argument}: that of sample {sample}").shape[:1] != (length,):
            came = part.shape[0] if part.dim() == 1 else list(part.shape)
            raise LogitlessError(f"{argument}: sample {sample} has {came} entries but {has.format(length)}.")
    if not parts:
        raise LogitlessError(f"Rows.{caller}: there are no samples, so neither dtype nor device is known.")
    return torch.cat(list(parts))


def check_ranks(caller: str, rows: Any, group: dist.ProcessGroup | None) -> None:
    """Raise unless these rows are split over as many ranks as the group has."""
    size, world = num_ranks(rows.cp), 1 if group is None else group.size()
    if size != world:
        raise LogitlessError(f"{caller}: these rows are split over {size} ranks but group has {world}.")


def _check_same_samples(rows: Any, to: Any) -> None:
    """Raise unless ``to`` is of the same samples, and split over as many ranks if both are split."""
    if rows.response_lengths != to.response_lengths:
        raise LogitlessError(
            f"Rows.redistribute: to= was made for responses of {list(to.response_lengths or ())} tokens but these "
            f"rows for {list(rows.response_lengths)}. Both must describe the same samples."
        )
    if to.cp is not None and rows.cp is not None and to.cp.size != rows.cp.size:
        raise LogitlessError(
            f"Rows.redistribute: these rows are split over {rows.cp.size} ranks but to= over {to.cp.size} ranks."
        )


def _check_fields(caller: str, x: Tensor | Sequence[Tensor], num_rows: int) -> tuple[Tensor, ...]:
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


class _Exchange(torch.autograd.Function):
    """Fields ``[R]`` at ``place`` of ``total`` places, read back at ``wanted`` (or everywhere if None)."""

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


# Whether the ranks of a sequence group cut their rows from one batch.


def check_one_batch(rows: Any, group: Any) -> None:
    """Raise unless the ranks made their rows from one batch, each its own part. One small collective.

    Every rank sees the same table, so every rank raises the same error, or none does.
    """
    scheme = (type(rows.cp).__name__, num_ranks(rows.cp))
    rank, world = 0 if rows.cp is None else rows.cp.rank, group.size()
    mine = (rank, scheme, rows.num_tokens, rows.spans, rows.response_lengths, *rows.batch.fingerprints())
    ranks, schemes, num_tokens, *by_sample = zip(*table_over(group, mine), strict=True)
    _check_same("the scheme", schemes)
    if list(ranks) != list(range(world)):
        raise LogitlessError(
            f"Rows.check_over: ranks 0 .. {world - 1} of the group made rows of ranks {list(ranks)} of the split."
        )
    check_ranks("Rows.check_over", rows, group)
    for what, by_rank in zip(("padded length", "response length", "tokens", "loss mask"), by_sample, strict=True):
        _check_same("the number of samples", [len(values) for values in by_rank])
        for sample, values in enumerate(zip(*by_rank, strict=True)):
            _check_same(f"the {what} of sample {sample}", values)
    _check_same("num_tokens", num_tokens)


def _check_same(what: str, values: Sequence[Any]) -> None:
    """Raise unless all ranks have one value."""
    if len(set(values)) > 1:
        raise LogitlessError(f"Rows.check_over: ranks disagree about {what}: rank by rank it is {list(values)}.")
