"""The logits that are never stored, ``hidden @ weight.T + bias``: selected rows, one tile at a time, and back.

hidden [T, D]  ->  rows [R, D]  ->  a tile of logits [rows, columns] in working memory
d_rows [R, D]  ->  d_hidden [T, D], summed over the vocabulary group as the call asks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from logitless.backends.contract import Backend, Problem, Product, Products
from logitless.call import Call, Operands
from logitless.collectives import gather_rows_over, scatter_sum_over, sum_over
from logitless.errors import released
from logitless.machine import PIECE, SLAB, Tiles, pieces, row_stride
from logitless.softmax import SKIP
from logitless.sources.gemm import add_rows, multiply, multiply_fixed


@dataclass(frozen=True, eq=False)
class Projection:
    """Selected rows, the head's weight, and the call that they belong to.

    Attributes:
        hidden: ``[R, D]`` selected rows.
        weight: ``[V, D]``, hidden's dtype; of operands in parts, both are the large part of each number.
        low: ``[V, r]`` more columns of the weight, of a LoRA, and then hidden is ``[R, D + r]``; or None.
        bias: ``[V]`` or None.
        column: ``[R]`` as in :class:`~logitless.backends.contract.Problem`.
        gain: ``[R]`` factor of each row's logits.
        call: the call that asks for the logits.
        backend: the call's backend.
        tf32: whether float32 operands are multiplied in TF32.
        row_parts, weight_parts: ``[R, parts * D]`` and ``[V, parts * D]``, whose product are the logits; None where
            that of hidden and weight are.
        found: whether every row is known to have its target among the columns.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    column: Tensor
    gain: Tensor
    call: Call
    backend: Backend
    low: Tensor | None = None
    tf32: bool = False
    row_parts: Tensor | None = None
    weight_parts: Tensor | None = None
    found: bool = False

    @staticmethod
    def of(
        rows: Tensor, operands: Operands, column: Tensor, call: Call, found: bool = False, multiplied: bool = True
    ) -> Projection:
        """The rows ``[R, D]`` of a call, with the head of its operands; ``multiplied`` where their product is made."""
        weight, bias, low = operands.weight, operands.bias, operands.b
        assert weight is not None
        require_weight(weight, call)
        bias, low = (None if x is None else x.detach() for x in (bias, low))
        tf32 = call.linear is not None and (call.linear.tf32 or call.linear.precision == "tf32")
        p = Projection(rows, weight.detach(), bias, column, call.gain, call, call.backend, low, tf32, found=found)
        return p.in_parts() if multiplied else p

    def in_parts(self) -> Projection:
        """The same with float32 operands as sums of parts of 16 bits, where the call says so. One product adds them up:

            [x, x]         @ [small, large].T             a float32 weight
            [small, x, x]  @ [large, small, large].T      float32 rows, too; small times small is left out

        The small parts come first: then they are not lost in what the large ones have summed up to.
        """
        # Elsewhere a float32 weight is multiplied as it is, and hidden states are widened in copies.
        split = self.call.parts == 3 or self.call.machine.wide_products or self.call.apart is None
        if self.call.parts == 1 or not split:
            return self
        width, parts, large = self.hidden.shape[1], self.call.parts, self.hidden.to(self.call.dtype)
        first = [] if parts == 2 else [(self.hidden - large).to(large.dtype)]
        rows = torch.cat([*first, large, large], 1)
        weight = self.empty((len(self.weight), parts * width), large.dtype)
        for some in pieces(len(weight), SLAB, weight.is_meta):
            *first, small, large = weight[some].split(width, 1)
            large.copy_(self.weight[some])
            small.copy_(self.weight[some] - large)
            for part in first:
                part.copy_(large)
        own = {"hidden": rows[:, -width:], "row_parts": rows, "weight": weight[:, -width:], "weight_parts": weight}
        return replace(self, **own)

    def cut(self, start: int, stop: int) -> Projection:
        """Rows ``start .. stop`` of the projection."""
        if (start, stop) == (0, len(self.hidden)):
            return self
        rows = {name: getattr(self, name) for name in ("hidden", "row_parts", "column", "gain")}
        return replace(self, **{name: x[start:stop] for name, x in rows.items() if x is not None})

    def padded(self, multiple: int) -> Projection:
        """The projection with as many rows to be skipped behind its rows as make a multiple."""
        pad, missing = torch.nn.functional.pad, -len(self.hidden) % multiple
        return replace(
            self,
            hidden=pad(self.hidden, (0, 0, 0, missing)),
            row_parts=None if self.row_parts is None else pad(self.row_parts, (0, 0, 0, missing)),
            column=pad(self.column, (0, missing), value=SKIP),
            gain=pad(self.gain, (0, missing), value=1.0),
            found=self.found and not missing,
        )

    def problem(self, logits: Tensor, memory: int, first: int = 0) -> Problem:
        """The problem that a backend gets, of logits of all rows and of the columns from ``first`` on."""
        return Problem(
            logits=logits,
            index=None,
            column=self.column,
            gain=self.gain,
            squash=self.call.squash,
            columns=logits.shape[1],
            entropy=self.call.entropy,
            memory=memory,
            first=first,
            unit=self.call.unit,
            found=self.found and logits.shape[1] == self.call.columns,
            canonical=self.call.canonical,
        )

    def whole(self, memory: Tensor, elementwise: int, column: Tensor | None = None) -> Problem:
        """The problem of whole rows, whose logits lie at the start of flat memory; ``column`` is of other targets."""
        p = self if column is None else replace(self, column=column)
        return p.problem(rows_in(memory, len(self.hidden), self.call.columns), elementwise)

    def product(self, columns: slice) -> Product:
        """All rows and some columns, for a kernel that multiplies them itself."""
        return Product(
            self.hidden if self.row_parts is None else self.row_parts,
            (self.weight if self.weight_parts is None else self.weight_parts)[columns],
            None if self.bias is None else self.bias[columns],
            self.column,
            self.gain,
            squash=self.call.squash,
            first=columns.start,
            negative=self.call.negative,
            entropy=self.call.entropy,
            top=self.call.table is not None,
            logits_dtype=self.call.logits_dtype,
            canonical=self.call.canonical,
            turns=self.call.machine.turns,
        )

    @property
    def products(self) -> Products:
        """Kernels that multiply and end in a softmax; asked for only where the plan says that the backend has them."""
        return self.backend.products

    def multiply(self, a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
        """``out = a @ b``, or ``out += a @ b``, summed in at least float32."""
        multiply(a, b, out, add=add, tf32=self.tf32, wide=self.call.machine.wide_products)

    def multiply_fixed(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """``out = a @ b.T`` in products of one shape, for bits that do not depend on the number of rows."""
        multiply_fixed(a, b, out, tf32=self.tf32, wide=self.call.machine.wide_products)

    def add_rows(self, x: Tensor, out: Tensor) -> None:
        """``out += x.sum(0)``, summed in at least float32."""
        add_rows(x, out, wide=self.call.machine.wide_products)

    def project(self, first: int, out: Tensor) -> None:
        """The logits of all rows, and of as many columns from ``first`` on as ``out`` has, into ``out``."""
        if not out.numel():
            return
        columns = slice(first, first + out.shape[1])
        # Logits that are rounded to half precision are rounded once, after all sums.
        wide = out if self.bias is None and self.low is None else out.to(self.gain.dtype)
        x, y = self.parts(self.hidden)
        a, b = x, self.weight[columns]
        if self.row_parts is not None and self.weight_parts is not None:
            a, b = self.row_parts, self.weight_parts[columns]
        fixed = self.call.bits == "canonical"
        self.multiply_fixed(a, b, wide) if fixed else self.multiply(a, b.T, wide)
        if self.low is not None and y is not None and fixed:
            added = torch.empty_like(wide)
            self.multiply_fixed(y, self.low[columns], added)
            wide.add_(added)
        elif self.low is not None and y is not None:
            self.multiply(y, self.low[columns].T, wide, add=True)
        if self.bias is not None:
            wide.add_(self.bias[columns])
        if wide is not out:
            out.copy_(wide)
        linear = self.call.linear
        if linear is not None and linear.match is not None and out.dtype != self.call.logits_dtype:
            # Beside the logits of another model, room for both is wide.
            for part in out.split(SLAB, 1):
                part.copy_(part.to(self.call.logits_dtype))

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The columns of hidden rows, or of their gradient, that belong to the weight, and those of a LoRA."""
        size = self.weight.shape[1]
        return (x, None) if self.low is None else (x[:, :size], x[:, size:])

    def times_weight(self, d_z: Tensor, columns: slice, out: Tensor, add: bool = False) -> None:
        """``out = d_z @ weight[columns]``, or added to it; with a LoRA's columns."""
        x, y = self.parts(out)
        self.multiply(d_z, self.weight[columns], x, add=add)
        if self.low is not None and y is not None:
            self.multiply(d_z, self.low[columns], y, add=add)

    def times_whole_weight(self, d_z: Tensor, step: int, out: Tensor) -> None:
        """``out = d_z @ weight``: in one product, or over slabs of ``step`` columns in float32."""
        columns = self.call.columns
        programs, weight = self._dz_programs, self.weight[:columns]
        if programs and self.low is None and self.products.rows_pay(d_z, weight, out, programs):
            self.products.times_weight(d_z, weight, out, programs)
            return
        if step >= columns:
            self.times_weight(d_z, slice(0, columns), out)
            return
        total = self.gain.new_empty(out.shape)
        for slab in pieces(columns, step, self.hidden.is_meta):
            self.times_weight(d_z[:, slab], slab, total, add=slab.start > 0)
        out.copy_(total)

    def add_head(self, d_z: Tensor, rows: Tensor, slabs: Sequence[slice], out: Tensor, add: bool) -> None:
        """``out = d_z.T @ rows``, or added to it, for each slab of columns: the gradient of the weight in float32."""
        x, into, programs = self.parts(rows)[0], out[: self.call.columns], self._dz_programs
        if programs and self.products.columns_pay(d_z, x, into):
            self.products.add_outer(d_z, x, into, add, programs)
            return
        for columns in slabs:
            self.multiply(d_z[:, columns].T, x, out[columns], add=add)

    @property
    def _dz_programs(self) -> int:
        """Programs of the backend's own products of dZ; 0 where it has none here."""
        return self.call.machine.dz_programs if self.call.apart is None else 0

    def add_low(self, d_z: Tensor, rows: Tensor, out: Tensor | None) -> None:
        """``out += d_z.T @ y``, where y are the columns of hidden rows that belong to a LoRA, if there is one."""
        y = self.parts(rows)[1]
        if out is not None and y is not None:
            self.multiply(d_z.T, y, out, add=True)

    def like_weight(self) -> Tensor:
        """Memory of the size and dtype of the weight that the caller gave."""
        return torch.empty(self.weight.shape, dtype=self.weight_dtype, device=self.weight.device)

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of the weight that the caller gave."""
        return self.weight.dtype if self.call.parts == 1 else torch.float32

    def empty_tile(self, tiles: Tiles) -> Tensor:
        """Flat memory of one tile of logits."""
        return self.empty_rows(tiles.rows, tiles.columns, self.call.logits_dtype)

    def tile(self, memory: Tensor, tiles: Tiles, first: int) -> Problem:
        """The tile of all rows and of the columns from ``first`` on, computed into the memory of a tile."""
        rows, width = len(self.hidden), min(tiles.columns, self.call.columns - first)
        logits = rows_in(memory, rows, width)
        self.project(first, logits)
        return self.problem(logits, tiles.elementwise, first)

    def empty_rows(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Flat working memory for :func:`rows_in`."""
        odd = columns * dtype.itemsize % PIECE
        return self.empty((rows, row_stride(columns, dtype.itemsize) if odd else columns), dtype).view(-1)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Working memory. Where the device has none left, the error says which argument asks for less."""
        try:
            return torch.empty(shape, dtype=dtype, device=self.hidden.device)
        except torch.OutOfMemoryError as error:
            error.add_note(
                f"{self.call.caller}: no room for working memory of {list(shape)} {dtype}. Pass a smaller "
                f"memory= (it was {self.call.memory} bytes), or ask logitless.estimate what fits."
            )
            raise


def rows_in(memory: Tensor, rows: int, columns: int) -> Tensor:
    """``[rows, columns]`` at the start of flat memory, each row beginning where products are fast."""
    if columns * memory.element_size() % PIECE == 0:
        return memory[: rows * columns].view(rows, columns)
    width = row_stride(columns, memory.element_size())
    return memory[: rows * width].view(rows, width)[:, :columns]


def require_weight(weight: Tensor, call: Call) -> None:
    """Raise where ZeRO-3 or FSDP1 has let go of the weight since forward."""
    if weight.dim() != 2:
        raise released(call.caller, list(weight.shape))


def is_split(call: Call) -> bool:
    """Whether hidden states are this rank's part of the tokens."""
    return call.linear is not None and call.linear.sequence_parallel


def gathered_tokens(hidden: Tensor, call: Call) -> Tensor:
    """``[T, D]`` hidden states of all tokens: a view, or gathered over the group under sequence parallelism."""
    tokens = hidden.detach().reshape(-1, hidden.shape[-1])
    return gather_rows_over(call.group, tokens) if is_split(call) else tokens


def selected_rows(operands: Operands, call: Call) -> Tensor:
    """``[R, D]`` hidden states of the rows: a copy, small beside the logits, unless the rows are all in order. With
    a LoRA ``[R, D + r]``, and always a copy."""
    assert operands.hidden is not None
    tokens = gathered_tokens(operands.hidden, call)
    rows = tokens if call.index is None else tokens.index_select(0, call.index)
    if operands.y is None:
        return rows
    y = operands.y.detach().reshape(-1, operands.y.shape[-1])
    return torch.cat([rows, y if call.index is None else y.index_select(0, call.index)], 1)


def hidden_gradients(
    rows: Tensor | None, shape: torch.Size, low: torch.Size | None, call: Call, want: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the tokens' hidden states and of a LoRA's part of them, from those of the selected rows.

    Args:
        shape, low: of the hidden states, and of a LoRA's part of them; None without one.
        want: which of the two are wanted.
    """
    if rows is None:
        return None, None
    if low is None:
        return hidden_gradient(rows, shape, call), None
    found = rows[:, : shape[-1]], rows[:, shape[-1] :]
    d_hidden, d_y = (
        hidden_gradient(x.contiguous(), of, call) if wanted else None
        for x, of, wanted in zip(found, (shape, low), want, strict=True)
    )
    return d_hidden, d_y


def hidden_gradient(rows: Tensor, shape: torch.Size, call: Call) -> Tensor:
    """Gradient of the tokens from that of the selected rows, summed over the group as the call asks."""
    # In parts the operands are 16 bits, and so are their gradients' numbers; the caller's hidden states are not.
    tokens = rows = rows.float() if call.parts == 3 else rows
    if call.index is not None:
        num_tokens = shape[:-1].numel() * (call.group.size() if is_split(call) else 1)
        tokens = rows.new_zeros((num_tokens, shape[-1])).index_copy_(0, call.index, rows)
    return reduced_gradient(tokens, shape, call)


def reduced_gradient(tokens: Tensor, shape: torch.Size, call: Call) -> Tensor:
    """This shard's gradient of all tokens, summed over the group as the call asks, in the shape of hidden."""
    if is_split(call):
        tokens = scatter_sum_over(call.group, tokens)
    elif call.linear is not None and call.linear.hidden_grad == "reduced" and call.group is not None:
        tokens = sum_over(call.group, tokens)
    return tokens.view(shape)
