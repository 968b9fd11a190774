"""Sizes of the matrix products that end in a softmax, with what was measured; part of the table of ``machine.py``."""

from __future__ import annotations

from typing import NamedTuple

from logitless.machine import ALIGNED


class ProductSizes(NamedTuple):
    """Sizes of a matrix product that ends in a softmax.

    Attributes:
        rows, columns, depth: of a tile of logits, and of its operands at a time.
        tiles: column tiles whose statistic stays in registers, to be stored as one part of the row; 0 where every 128
            columns are a part.
        band: row blocks that are worked on side by side, sharing their columns in L2.
        residents: programs on a multiprocessor at the same time.
        warps, stages: of a program, and of its loads.
        flatten: whether loads of the next tile start before a tile ends.
        turns: whether two groups of so many warps take turns, one multiplying while the other ends its tile. A part is
            then of every second tile.
    """

    rows: int
    columns: int
    depth: int
    tiles: int
    band: int = 16
    residents: int = 1
    warps: int = 8
    stages: int = 3
    flatten: bool = True
    turns: bool = False

    def groups(self, columns: int) -> int:
        """How many parts the statistic of a row has."""
        if self.turns:
            return 2 * -(-columns // (2 * self.columns * self.tiles))
        return -(-columns // (self.columns * self.tiles if self.tiles else ALIGNED))


def product_sizes(columns: int, width: int, canonical: bool = False, turns: bool = False) -> ProductSizes:
    """Sizes for operands of this width. The number of rows has no say: a row has the same bits in every batch.

    Args:
        canonical: of products whose parts are blocks of 128 columns.
        turns: of products that are made by turns.
    """
    if canonical:
        # H200, as below, with the merge, D = 4096, 2048 and 1024: 256 x 128 x 64 with a band of 8 1.06, 1.10, 1.19; two
        # programs with 128 x 128 and 4 warps, a band of 16 1.16, 1.07, 1.06, a band of 8 1.08, 1.04, 1.07.
        if width < 3072:
            return ProductSizes(128, 128, 64, 0, band=16 if width < 1536 else 8, residents=2, warps=4)
        return ProductSizes(256, 128, 64, 0, band=8)
    if turns:
        # H200, as below, at D = 4096, 2048 and 1024, a band of 8: 1.01, 1.04, 0.98; 0.91, 0.93, 0.95; 0.92, 0.91, 0.94.
        # A band of 16: 1.00, 1.06, 1.01; 0.96, 0.93, 0.96; 0.92, 0.90, 0.97. Of 32: 1.01, 1.05, 1.08; 0.95, 0.96, 0.95;
        # 0.92, 0.92, 0.98. Parts of 18 tiles are no faster. 64 x 256 with 4 stages: 1.00, 1.05, 1.05; 0.96, 1.02, 0.99;
        # 0.96, 1.06, 0.95.
        tiles = tiles_per_part(-(-columns // 256))
        return ProductSizes(128, 128, 64, tiles, band=8, warps=4, stages=5, turns=True)
    # H200, bfloat16, T = 16384, V = 151936, in multiples of the bare product (benchmarks/epilogues.py): the statistic
    # with its merge, dZ, exponentials. 128 x 256 x 64, 8 warps, 3 stages: 1.09, 1.12, 1.28 at D = 1024; 1.06, 1.07,
    # 1.15 at 2048; 1.04, 1.05, 1.07 at 4096. 256 x 128, whose numbers per row have to be exchanged between warps: 1.10,
    # 1.21, 1.26; 1.05, 1.14, 1.16; 1.03, 1.08, 1.09. A fourth stage, for which tiles are stored in halves, gains
    # nothing: 1.11, 1.14, 1.26 at 1024. Not flattened 1.21, 1.27, 1.39 there.
    return ProductSizes(128, 256, 64, tiles_per_part(-(-columns // 256)))


class PairSizes(NamedTuple):
    """Sizes of two matrix products in one tile.

    Attributes:
        rows, columns, depth, band, residents, warps, stages, flatten: as of :class:`ProductSizes`.
        joint: whether both are summed in one loop, which needs equal widths.
    """

    rows: int
    columns: int
    depth: int
    joint: bool = False
    band: int = 16
    residents: int = 1
    warps: int = 8
    stages: int = 4
    flatten: bool = True


def pair_sizes(width: int, other: int) -> PairSizes:
    """Sizes for operands of these widths. The number of rows has no say."""
    # H200, bfloat16, T = 16384, V = 151936, in multiples of two bare products (benchmarks/pairs.py): dZ of reverse KL,
    # forward KL and jsd, the sums, the sums with 16 bits stored. 128 x 128 x 64, 4 stages, a band of 8: 1.06, 1.09,
    # 1.11, 1.10, 1.18 at D = 4096; 1.20, 1.17, 1.31, 1.20, 1.36 at 2048. A band of 16: 1.08, 1.09, 1.06, 1.11, 1.20;
    # 1.15, 1.20, 1.33, 1.27, 1.49. 6 stages 1.17, 1.17, 1.18, 1.10, 1.27 and 1.16, 1.19, 1.29, 1.27, 1.46. Not
    # flattened is no slower. 64 x 256 1.06, 1.09, 1.15, 1.14, 1.25 and 1.17, 1.26, 1.30, 1.29, 1.52. One loop for both
    # 1.5 to 1.8, two programs of 64 x 128 1.2 to 1.4.
    # Widths of one step leave no loop over them, and the loads of both products are stages of the loop over tiles: four
    # would take 257 and 288 KiB of shared memory, of which there are 227.
    return PairSizes(128, 128, 64, band=8, stages=4 if max(width, other) > 64 else 2)


def tiles_per_part(num_tiles: int) -> int:
    """How many column tiles make a part: about 8, such that little of the last part lies past the last column.

    Few columns make smaller parts, so that there is work for all multiprocessors.

    >>> [tiles_per_part(n) for n in (1024, 594, 125, 99, 3)]
    [8, 9, 5, 3, 1]
    """
    most = max(1, min(10, num_tiles // 24))
    return min(range(max(1, most * 3 // 5), most + 1), key=lambda n: (-num_tiles % n, abs(n - 8)))
