"""``Plan``: which route a call takes, in which tiles and chunks, and why.

    given       no product    logits exist
    forward     1 product     nothing needs a gradient
    frozen      2 products    only hidden does, and entropy is not differentiated: unit gradients in forward
    keep        3 products    16-bit exponentials of all rows fit the budget: backward need not recompute logits
    recompute   4 products    everything else; with the exponentials of some rows stored, between 3 and 4
    pair        6 products    a teacher's logits beside the student's; fewer where the teacher's exist, 3 with a frozen
                              head: unit gradients of the divergence in forward
    support     no product    the scope is the support, or a teacher's K ids: dot products
    one pass    3 products    a loss, evaluated on a chunk of rows while their logits are there; 4 with a teacher
    two passes  4 products    a loss, after the log-probs of all rows

One product fewer where only hidden, or only the head, needs a gradient. Decided from shapes, options and one memory
budget, before anything runs. How large a tile should be is in ``tiles``, what a loss costs in ``costs``, what ranks
send each other in ``sent``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from logitless.call import Call
from logitless.machine import SLAB, WORK, Tiles
from logitless.operands import Teacher
from logitless.product_table import pair_sizes, product_sizes
from logitless.route.pairs import pair_apart, pair_row, sums_apart, teacher_width
from logitless.route.tiles import (
    FIXED_ROWS,
    Shape,
    all_rows,
    backward_tiles,
    divide,
    even_chunks,
    exponentials_alone,
    exponentials_row,
    forward_tiles,
)
from logitless.spec import format_bytes

Kind = Literal["given", "forward", "frozen", "keep", "recompute", "pair", "support", "one pass", "two passes"]

ONLY_SUPPORT = "only the ids that the sampler kept and the targets are asked for"
LISTED = "both distributions are over the ids that the teacher sent"


@dataclass(frozen=True)
class Collective:
    """One collective of a call.

    Attributes:
        kind: of torch.distributed. An ``all_gather_object`` is of pickled facts, and takes two small gathers.
        what: what is sent, in words.
        bytes: of the tensor that this rank hands in: its own part of a gather, all of a sum. 0 for pickled facts.
        when: in forward, or in backward where all results with a graph are differentiated.
        over: whether the group shares the vocabulary, or the tokens.
        ranks: of that group.
        each: whether there is one for every mean over samples that a term of the caller's own takes, which nobody
            knows before it runs. Any other record is one collective.
    """

    kind: Literal["all_gather", "all_reduce", "reduce_scatter", "all_gather_object"]
    what: str
    bytes: int
    when: Literal["forward", "backward"]
    over: Literal["vocabulary", "sequence"]
    ranks: int
    each: bool = False

    @property
    def wire(self) -> float:
        """Bytes that leave this rank where the ranks form a ring.

        >>> Collective("all_reduce", "d_hidden", 1000, "backward", "vocabulary", 4).wire
        1500.0
        """
        others = self.ranks - 1
        share = {"all_gather": others, "all_reduce": 2 * others / self.ranks, "reduce_scatter": others / self.ranks}
        return self.bytes * share.get(self.kind, 0)


def in_words(collectives: Sequence[Collective]) -> list[str]:
    """A line for all collectives of one kind and place: how many, and how many bytes together.

    >>> in_words([Collective("all_gather", "statistics", 48, "forward", "vocabulary", 2)] * 3)
    ['forward: 3 x all_gather of statistics, 144 B, over 2 ranks of the vocabulary']
    """
    lines: dict[tuple[Any, ...], list[int]] = {}
    for x in collectives:
        lines.setdefault((x.when, x.kind, x.what, x.over, x.ranks, x.each), []).append(x.bytes)
    found = []
    for (when, kind, what, over, ranks, each), sizes in lines.items():
        times = f"{len(sizes)} x " if len(sizes) > 1 else ""
        size = f", {format_bytes(sum(sizes))}{' each' if each else ''}" if kind != "all_gather_object" else ""
        found.append(f"{when}: {times}{kind} of {what}{size}, over {ranks} ranks of the {over}")
    return found


@dataclass(frozen=True)
class Plan:
    """The decision.

    Attributes:
        kind: which route.
        reason: why, in a sentence.
        products: matrix products of forward and backward together, of the size of the logits.
        forward, backward: sizes of the two tile loops; None where nothing is multiplied there by tiles.
        kept_rows: how many rows' exponentials are stored for backward.
        chunks: ``(start, stop)`` of each chunk of whole rows whose logits exist at a time.
        columns: of one product into such a chunk.
        tiles: by which a chunk of exponentials is filled; None where the chunk holds logits.
        elementwise: bytes of working space for the plain-torch backend in a chunk.
        whole_samples: whether chunks are whole samples.
        apart: why logits go through memory between a product and its softmax; None where one kernel does both.
        ranked: whether all logits are made once more, to count those above the target's.
        taught: whether there is a teacher, whose logits lie beside the student's.
        unit: whether forward makes the gradients of hidden states for an upstream gradient of 1 at every divergence.
        first: how log-probs are made where they come first: in two passes, or where no gradient is recorded.
        ids: entries of a support, all rows together.
        collectives: what ranks send each other, in order (:mod:`logitless.route.sent`). Only ``explain`` and a dry run
            ask for it.
    """

    kind: Kind
    reason: str
    products: int = 0
    forward: Tiles | None = None
    backward: Tiles | None = None
    kept_rows: int = 0
    chunks: tuple[tuple[int, int], ...] = ()
    columns: int = 0
    tiles: Tiles | None = None
    elementwise: int = 0
    whole_samples: bool = False
    apart: str | None = None
    ranked: bool = False
    taught: bool = False
    unit: bool = False
    first: Plan | None = None
    ids: int = 0
    collectives: tuple[Collective, ...] = ()

    @property
    def crossed(self) -> bool:
        """Whether the sums of a KL come with the statistics of both models, in one look."""
        return self.taught and (self.tiles is not None or (self.kind == "pair" and self.forward is not None))

    @property
    def rows(self) -> int:
        """Of the largest chunk."""
        return max((stop - start for start, stop in self.chunks), default=0)

    def facts(self, chosen_by: str = "memory=") -> dict[str, Any]:
        """What ranks must agree on: they communicate once for every chunk. What a rank stores for backward is its own.

        Args:
            chosen_by: what a rank that goes another way has given differently.
        """
        kind = "by tiles" if self.kind in ("keep", "recompute") else self.kind
        chunks = f" in {len(self.chunks)} chunks of at most {self.rows} rows" if self.chunks else ""
        first = {} if self.first is None else {f"{name} of the first pass": x for name, x in self.first.facts().items()}
        return {f"how to go ({chosen_by})": kind + chunks, "the chunks of rows": self.chunks} | first

    def __str__(self) -> str:
        products = str(self.products)
        if self.kind == "recompute" and self.kept_rows:
            products = f"between {self.products - 1} and {self.products}"
        noun = (
            "no matrix product" if not self.products else f"{products} matrix product{'s' if products != '1' else ''}"
        )
        parts = [f"{self.kind}: {noun}, because {self.reason}.", *self._sizes()]
        if self.kind == "support":
            parts.append(f"{self.ids} dot products.")
        return "\n".join([" ".join(parts), *in_words(self.collectives)])

    def _sizes(self) -> list[str]:
        """Sentences about tiles and chunks."""
        if self.chunks and self.kind in ("one pass", "pair"):
            return [self._chunk_sizes()]
        if self.forward is None:
            return []
        what = "products" if self.forward.fused else "tiles"
        tiles = f"Forward in {what} of {self.forward.rows} x {self.forward.columns} logits"
        if self.backward is not None:
            rows, columns, block, *_ = self.backward
            tiles += f", backward in {what} of {rows} x {columns} and blocks of {block} rows"
        logits = f"Logits go through memory, because {self.apart}"
        if self.apart is None:
            logits = "Logits stay in the kernels that make them"
        if self.ranked:
            logits += ". They are made once more to count those above the target's"
        return [f"{tiles}.", f"{logits}."]

    def _chunk_sizes(self) -> str:
        samples = " of whole samples" if self.whole_samples else ""
        content = "both models' logits" if self.taught else "logits"
        if self.tiles is not None:
            content = f"16-bit exponentials, by tiles of {self.tiles.rows} x {self.tiles.columns} logits"
        if self.tiles is not None and self.tiles.fused:
            content = "16-bit exponentials, written by the product itself"
        if self.tiles is not None and self.taught:
            content = "16-bit exponentials of both models, written by one product"
        back = ""
        if self.backward is not None:
            what = "products" if self.backward.fused else "tiles"
            back = f" Backward in {what} of {self.backward.rows} x {self.backward.columns}."
        if self.kind == "pair" and self.apart is not None:
            back += f" Logits go through memory, because {self.apart}."
        return f"{len(self.chunks)} chunks{samples}, of at most {self.rows} rows of {content}.{back}"


def score_plan(call: Call, whole: bool = False) -> Plan:
    """The route of log-probs with the fewest products that the call and its budget allow.

    Args:
        whole: whether log-probs are over the vocabulary even where a teacher sent K ids to compare over: a loss's are.
    """
    if call.over_support:
        assert call.kept is not None
        return Plan("support", ONLY_SUPPORT, ids=call.kept.ids.numel() + call.num_rows)
    if call.linear is None:
        return _given_plan(call)
    teacher, vocabulary = call.asked.teacher, whole or call.asked.stats or call.asked.top_k
    sent = teacher.top_k if isinstance(teacher, Teacher) else None
    if sent is not None and sent.tail == "renormalise" and not vocabulary:
        return Plan("support", LISTED, ids=sent.ids.numel())
    plan = _pair_plan(call) if call.taught else _tile_plan(call)
    if call.table is None or call.table.rank is None or plan.kind == "pair":
        return plan
    return replace(plan, products=plan.products + 1, ranked=True)


def _given_plan(call: Call) -> Plan:
    """Logits that exist are one chunk, unless a teacher's are made beside them."""
    whole = ((0, call.num_rows),)
    teacher = call.asked.teacher
    if not call.taught or (isinstance(teacher, Teacher) and teacher.hidden is None and teacher.ids is None):
        return Plan("given", "logits exist", chunks=whole, taught=call.taught)
    row = max(1, call.mean_columns) * call.gain.dtype.itemsize
    chunks = even_chunks(call.num_rows, max(1, call.memory // 2 // row)) or whole
    return Plan("given", "logits exist", chunks=chunks, taught=True, columns=SLAB, elementwise=max(1, call.memory // 2))


def _pair_plan(call: Call) -> Plan:
    """Chunks that the budget holds of both models' logits, the same on every rank of a vocabulary group."""
    machine, wide, linear = call.machine, call.gain.dtype.itemsize, call.linear
    assert linear is not None
    row = max(1, call.mean_columns) * (call.logits_dtype.itemsize + wide)
    _, share = divide(machine, call.memory)
    rows = max(1, int(call.memory * (1 - machine.elementwise)) // row)
    chunks = even_chunks(call.num_rows, rows)
    if linear.bits == "canonical":
        rows = min(rows, FIXED_ROWS)
        chunks = tuple((start, start + rows) for start in range(0, call.num_rows, rows))
    widened = call.dtype.itemsize == 2 and not machine.wide_products
    shape = Shape.of(call)._replace(logits_bytes=call.logits_dtype.itemsize + wide, product=None)
    apart, sums = pair_apart(call), sums_apart(call)
    # The product for a LoRA's b has r columns, not D, and is not counted.
    trained, gradients = any(call.needs), call.needs[0] + any(call.needs[1:3])
    graded = call.asked.entropy == "grad" or (call.table is not None and bool(call.table.differentiable))
    # dZ is written over the logits, so a logit must have at least the bytes of an element of dZ.
    room = call.logits_dtype.itemsize >= call.dtype.itemsize
    frozen = call.needs[0] and not any(call.needs[1:]) and not call.rank
    unit = frozen and not graded and call.bits != "canonical" and room
    reason = "a teacher's logits lie beside the student's, and are counted like them"
    if unit:
        reason = "the head needs no gradient, and a teacher's logits lie beside the student's while dZ is made"
    if call.wants_whole:
        reason += "; its whole vocabulary is one of the products"
    if apart is None:
        shape = shape._replace(product=pair_sizes(call.width, teacher_width(call)))
    forward = None
    if sums is None and not unit:
        reason, chunks = "both models' logits are made in one kernel, which ends in their KL", ()
        if apart is None:
            rows = max(1, min(call.memory, WORK) // pair_row(call, teacher_width(call), stored=False))
        rows = max((stop - start for start, stop in even_chunks(call.num_rows, rows)), default=1)
        forward = Tiles(rows, max(1, call.columns), rows, share, fused=apart is None)
    return Plan(
        "pair",
        reason,
        products=(3 if unit else 4 + gradients if trained else 2) + call.wants_whole,
        forward=forward,
        backward=backward_tiles(shape, min(call.memory, WORK)) if trained else None,
        chunks=chunks,
        columns=SLAB if widened else max(1, call.columns),
        elementwise=share,
        apart=sums or (apart if not unit else "dZ is made while both logits are there"),
        taught=True,
        unit=unit,
    )


def _tile_plan(call: Call) -> Plan:
    """From hidden states by tiles."""
    asked, linear, shape = call.asked, call.linear, Shape.of(call)
    assert linear is not None
    hidden, head, kept = call.needs[0], any(call.needs[1:]), call.kept
    differentiated = () if call.table is None else call.table.differentiable
    spare, work = max(0, call.memory - WORK), min(call.memory, WORK)
    canonical = linear.bits == "canonical"
    # Canonical tiles have one width for every batch: readings beyond the softmax add up tiles from left to right.
    apart = shape._replace(rows=FIXED_ROWS if canonical else shape.rows, product=None, blocks=canonical)
    first = apart
    if shape.product is not None:
        first = shape._replace(product=product_sizes(call.columns, call.depth, call.canonical, call.machine.turns))
    if not (hidden or head):
        forward = forward_tiles(first, work)
        forward = forward if kept is None else all_rows(forward, shape)
        return Plan("forward", "nothing needs a gradient", 1, forward, apart=call.apart)
    plain = kept is None and not call.rank and not differentiated
    if hidden and not head and asked.entropy != "grad" and plain:
        reason = "the head needs no gradient and entropy is not differentiated"
        # The tile shares its budget with its exponentials in the operands' dtype.
        forward = forward_tiles(apart._replace(logits_bytes=shape.logits_bytes + shape.operand_bytes), work)
        return Plan("frozen", reason, 2, exponentials_alone(forward, shape), apart=call.apart)
    forward, backward = forward_tiles(first, work), backward_tiles(shape, work)
    if call.machine.same_tiles and not canonical and not forward.fused:
        forward = forward._replace(rows=backward.rows, columns=backward.columns)
    if kept is not None:
        forward, backward = all_rows(forward, shape), all_rows(backward, shape)
    # The product for a LoRA's b has r columns, not D, and is not counted.
    kept_rows, gradients = 0, hidden + any(call.needs[1:3])
    # Exponentials cannot tell a logit of -inf, which has no share in a mean logit, from one far below.
    # The gradient of `rest` is divided by a probability that 16 bits may round to 0.
    exact = "mean_logit" in differentiated or (call.table is not None and call.table.rest)
    storable = shape.operand_bytes == 2 and not call.squash and not exact
    if kept is None and not canonical and storable:
        kept_rows = min(shape.rows, spare // max(1, exponentials_row(shape, backward.columns)))
    if kept_rows and not forward.fused:
        # Stored exponentials have one reference per slab of columns, so forward and backward cut columns alike.
        forward = forward._replace(columns=backward.columns)
    tiles = {"forward": forward, "backward": backward, "kept_rows": kept_rows, "apart": call.apart}
    if kept_rows and kept_rows == shape.rows:
        return Plan("keep", f"the exponentials of all {kept_rows} rows fit the budget", 1 + gradients, **tiles)
    reason = f"gradients are needed, and the budget holds the exponentials of {kept_rows} of {shape.rows} rows"
    return Plan("recompute", reason, 2 + gradients, **tiles)
