"""What a route of a loss costs on a machine: products, bytes that elementwise work moves, accumulators, launches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from logitless.machine import Costs, Machine, Tiles
from logitless.product_table import ProductSizes, product_sizes
from logitless.route.tiles import Shape


@dataclass(frozen=True)
class LossShape:
    """What the decision depends on.

    Attributes:
        counts: rows of each sample, or of each run of samples that depend on each other.
        hidden: D.
        sizes: of the logits that are never stored. Its columns are those of the vocabulary here, or the mean over a
            vocabulary group: the same on all of its ranks.
        exponentials: whether a chunk may hold 16-bit exponentials instead of wider logits. Not under a softcap.
        widened: whether a product copies its operands.
        trained: whether the head's weight needs a gradient.
        beside: bytes of the teacher's logit beside each of the student's; 0 without a teacher.
        teacher: the teacher's hidden size; 0 where its logits exist.
        paired: bytes of a row of both models in 16 bits, where one product writes them; 0 where none does.
        coupled: whether dZ of two passes, and its sums, are made by products of both models.
    """

    counts: tuple[int, ...]
    hidden: int
    sizes: Shape
    exponentials: bool
    widened: bool
    trained: bool = True
    beside: int = 0
    teacher: int = 0
    paired: int = 0
    coupled: tuple[bool, bool] = (False, False)

    @staticmethod
    def of(
        counts: tuple[int, ...],
        columns: int,
        hidden: int,
        *,
        dtype: torch.dtype,
        logits_dtype: torch.dtype,
        machine: Machine,
        bias: bool,
        capped: bool,
        trained: bool = True,
        fused: bool = False,
    ) -> LossShape:
        """From what a call is asked for: operands of ``dtype``, with a bias or without, with a softcap or without, and
        products that end in a softmax or do not."""
        return LossShape(
            counts=counts,
            hidden=hidden,
            sizes=Shape(
                sum(counts),
                columns,
                logits_dtype.itemsize,
                dtype.itemsize,
                machine,
                product_sizes(columns, hidden, turns=machine.turns) if fused else None,
            ),
            exponentials=dtype.itemsize < logits_dtype.itemsize and not capped,
            widened=(dtype.itemsize == 2 and not machine.wide_products) or (bias and logits_dtype.itemsize == 2),
            trained=trained,
        )


def one_pass_seconds(costs: Costs, shape: LossShape, chunks: tuple[tuple[int, int], ...], tiles: Tiles | None) -> float:
    """Of a loss in these chunks, which hold logits, or exponentials that are filled by tiles."""
    sizes = shape.sizes
    elements, product = sizes.rows * sizes.columns, _product_seconds(costs, shape)
    # dW, read and written once more for every chunk.
    adding = len(chunks) * 8 * sizes.columns * shape.hidden / costs.adding if shape.trained else 0.0
    gradients = (2 if shape.trained else 1) * product + adding
    if shape.paired:
        # Both are written, read, and the student's overwritten by dZ.
        product += _product_seconds(costs, shape, shape.teacher)
        moved = elements * 3 * sizes.operand_bytes / costs.bandwidth
        return product + elements * costs.pair_stored + moved + gradients
    if tiles is None:
        # Logits are read for the statistic, then read and overwritten by dZ.
        moved = elements * (2 * sizes.logits_bytes + sizes.operand_bytes)
        if shape.beside:
            # Both are read once more, for their divergence.
            moved += elements * (sizes.logits_bytes + 3 * shape.beside)
            product += _product_seconds(costs, shape, shape.teacher)
        return product + moved / costs.bandwidth + gradients
    overwritten = elements * 2 * sizes.operand_bytes / costs.bandwidth
    if sizes.product is not None:
        end = costs.turns if _by_turns(sizes) else costs.exponentials
        return product + elements * end + overwritten + gradients
    # A tile is read and its exponentials written; those are read and overwritten by dZ.
    filled = elements * (sizes.logits_bytes + sizes.operand_bytes) / costs.bandwidth
    count = sum(-(-(stop - start) // tiles.rows) for start, stop in chunks)
    count *= -(-sizes.columns // tiles.columns)
    filling = max(product + filled + count * costs.launch, count * costs.tile)
    return filling + overwritten + gradients


def two_pass_seconds(costs: Costs, shape: LossShape, work: int) -> float:
    """Of log-probs first and the objective after them, with so many bytes of working memory."""
    sizes, machine = shape.sizes, shape.sizes.machine
    elements = sizes.rows * sizes.columns
    products = (4 if shape.trained else 3) * _product_seconds(costs, shape)
    if shape.beside:
        products += 2 * _product_seconds(costs, shape, shape.teacher)
        both, (sums, gradient) = sizes.logits_bytes + shape.beside, shape.coupled
        looking = costs.pair_sums if sums else 2 * both / costs.bandwidth
        going = costs.pair_gradient if gradient else (both + sizes.operand_bytes) / costs.bandwidth
        return products + elements * (looking + going)
    if sizes.product is not None:
        ends = 2 * costs.turns if _by_turns(sizes) else costs.statistic + costs.gradient
        return products + elements * ends
    # About as many tiles as there will be; in backward, half of the budget is for dZ.
    tiles = ((machine.forward_tile, work), (machine.backward_tile, work // 2))
    per_tile = [max(1, min(rows * columns, room // sizes.logits_bytes)) for (rows, columns), room in tiles]
    count = sum(-(-elements // size) for size in per_tile)
    moved = elements * (2 * sizes.logits_bytes + sizes.operand_bytes)
    return products + moved / costs.bandwidth + count * costs.launch


def _product_seconds(costs: Costs, shape: LossShape, width: int | None = None) -> float:
    return 2 * shape.sizes.rows * shape.sizes.columns * (shape.hidden if width is None else width) / costs.flops


def _by_turns(sizes: Shape) -> bool:
    return isinstance(sizes.product, ProductSizes) and sizes.product.turns
