"""Launches of two products in one tile: a student's logits beside its teacher's, which never reach memory.

pair_gradient    -> dZ [R, C] in 16 bits          as ``divergence_gradient`` of a backend says of the logits
pair_sums        -> lines of both, and of a KL    as ``statistics`` and ``divergence`` say
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from logitless.backends.contract import Couple
from logitless.backends.divergences import Divergence
from logitless.backends.triton.launching import described, interpreted, launch
from logitless.backends.triton.products import written
from logitless.machine import multiprocessors
from logitless.product_table import PairSizes, pair_sizes
from logitless.softmax import Coefficients, Normaliser
from logitless.spec import has_values

MODULE, PARTS = "pair_kernels", "pair_part_kernels"

MERGED = {"BLOCK": 32, "AHEAD": 16, "num_warps": 4}
"""Rows per program of the merge, and parts that are loaded at a time."""

LEAN = ("forward_kl", "reverse_kl", "jsd")
"""Divergences whose gradient has a formula of its own for 16 bits."""

LINES = 10
"""Of a part: statistics of student and teacher, and two sums of their KL."""


def gradient(
    couple: Couple,
    norms: tuple[Normaliser, Normaliser],
    kind: Divergence,
    row: tuple[Tensor, Tensor, Tensor],
    coef: Coefficients,
    out: Tensor,
    sizes: PairSizes | None = None,
) -> None:
    """d logits of these rows and columns over all of ``out``, ``[R, C]`` of the operands' dtype, rows at any stride.

    Args:
        norms: of student and teacher.
        row: ``shift``, ``mean`` and ``by`` as in ``divergence_gradient``, ``[R]``, or ``[2, R]`` with the acceptance.
    """
    p = couple.student
    if not has_values(p.hidden) or not out.numel():
        return
    sizes = sizes or pair_sizes(p.hidden.shape[1], couple.teacher.hidden.shape[1])
    shift, mean, by = (x.contiguous() for x in row)
    lean = kind.kind in LEAN and shift.dim() == 1
    family = kind.power is not None and not lean
    launch(
        "pair_gradient_kernel",
        _programs(couple, sizes),
        **_operands(couple, sizes),
        **written(out, sizes.rows, sizes.columns),
        reference=norms[0].reference,
        log_sum=norms[0].log_sum,
        teacher_reference=norms[1].reference,
        teacher_log_sum=norms[1].log_sum,
        shift=shift,
        mean=mean,
        by=by,
        plain=coef.plain,
        product=coef.product,
        at_target=coef.at_target,
        KIND="family" if family else kind.kind,
        C=kind.power if family else kind.beta,
        FACTOR=kind.factor,
        LEAN=lean,
        ACCEPT=shift.dim() == 2,
        PRODUCT=coef.product is not None,
    )


def parts(
    couple: Couple,
    reverse: bool,
    out: Tensor | None = None,
    stored: tuple[Tensor, Tensor] | None = None,
    sizes: PairSizes | None = None,
) -> Tensor:
    """``[column tiles, 10, R]`` parts of both statistics and of a KL.

    Args:
        out: flat memory for them.
        stored: ``[R, C]`` of the operands' dtype: the student's exponentials, and what the KL's gradient needs besides.
    """
    p = couple.student
    sizes = sizes or pair_sizes(p.hidden.shape[1], couple.teacher.hidden.shape[1])
    shape = (-(-p.columns // sizes.columns), LINES, p.rows)
    found = p.gain.new_empty(shape) if out is None else out[: math.prod(shape)].view(shape)
    if not has_values(p.hidden) or not found.numel():
        return found
    values, beside = (None, None) if stored is None else stored
    one, other = (written(x, sizes.rows, sizes.columns) for x in (values, beside))
    assert one["DESCRIBED"] == other["DESCRIBED"]
    launch(
        "pair_sums_kernel",
        _programs(couple, sizes),
        **_operands(couple, sizes),
        parts=found,
        values=one["out"],
        beside=other["out"],
        values_stride=one["out_stride"],
        beside_stride=other["out_stride"],
        REVERSE=reverse,
        ENTROPY=p.entropy,
        EVEN=p.columns % sizes.columns == 0,
        STORED=stored is not None,
        DESCRIBED=one["DESCRIBED"],
    )
    return found


def _programs(couple: Couple, sizes: PairSizes) -> int:
    p = couple.student
    units = -(-p.rows // sizes.rows) * -(-p.columns // sizes.columns)
    return min(units, sizes.residents * multiprocessors(p.hidden.device))


def _operands(couple: Couple, sizes: PairSizes) -> dict[str, Any]:
    """Arguments of both kernels."""
    p, teacher = couple.student, couple.teacher
    return {
        "on": p.hidden,
        "module": MODULE,
        "hidden": described(p.hidden, sizes.rows, sizes.depth),
        "weight": described(p.weight, sizes.columns, sizes.depth),
        "other": described(teacher.hidden, sizes.rows, sizes.depth),
        "other_weight": described(teacher.weight, sizes.columns, sizes.depth),
        "column": p.column,
        "gain": p.gain,
        "teacher_gain": teacher.gain,
        "rows": p.rows,
        "columns": p.columns,
        "first": p.first,
        "squash": p.squash,
        "teacher_squash": teacher.squash,
        "WIDTH": p.hidden.shape[1],
        "OTHER": teacher.hidden.shape[1],
        "BR": sizes.rows,
        "BC": sizes.columns,
        "BD": sizes.depth,
        "BAND": sizes.band,
        "JOINT": sizes.joint,
        "WIDEN": interpreted(),
        "FLATTEN": sizes.flatten,
        "SOFTCAP": bool(p.squash),
        "TEACHER_SOFTCAP": bool(teacher.squash),
        "num_warps": sizes.warps,
        "num_stages": sizes.stages,
    }


def merge(couple: Couple, reverse: bool, parts: Tensor, out: Tensor) -> None:
    """The same from its parts ``[column tiles, 10, R]``."""
    p = couple.student
    launch(
        "pair_merge_kernel",
        -(-p.rows // MERGED["BLOCK"]),
        on=p.hidden,
        module=PARTS,
        parts=parts,
        column=p.column,
        gain=p.gain,
        teacher_gain=couple.teacher.gain,
        out=out,
        rows=p.rows,
        num_parts=len(parts),
        out_stride=out.stride(0),
        REVERSE=reverse,
        **MERGED,
    )


def gradient_from(
    couple: Couple,
    parts: Tensor,
    stored: tuple[Tensor, Tensor],
    norms: tuple[Normaliser, Normaliser],
    reverse: bool,
    row: tuple[Tensor, Tensor],
    coef: Coefficients,
    sizes: PairSizes | None = None,
) -> None:
    """dZ of a KL over the student's exponentials.

    Args:
        parts, stored: as :func:`parts` left them.
        row: ``mean`` and ``by``.
    """
    p, (values, beside) = couple.student, stored
    sizes = sizes or pair_sizes(p.hidden.shape[1], couple.teacher.hidden.shape[1])
    tiles = max(1, 2048 // sizes.columns)
    launch(
        "pair_gradient_from_kernel",
        p.rows * -(-p.columns // (sizes.columns * tiles)),
        on=values,
        module=PARTS,
        values=values,
        beside=beside,
        parts=parts,
        column=p.column,
        gain=p.gain,
        teacher_gain=couple.teacher.gain,
        reference=norms[0].reference,
        log_sum=norms[0].log_sum,
        teacher_reference=norms[1].reference,
        teacher_log_sum=norms[1].log_sum,
        mean=row[0].contiguous(),
        by=row[1].contiguous(),
        plain=coef.plain,
        product=coef.product,
        at_target=coef.at_target,
        out=values,
        rows=p.rows,
        columns=p.columns,
        first=p.first,
        values_stride=values.stride(0),
        beside_stride=beside.stride(0),
        out_stride=values.stride(0),
        REVERSE=reverse,
        PRODUCT=coef.product is not None,
        SLAB=sizes.columns,
        TILES=tiles,
        num_warps=4,
    )
