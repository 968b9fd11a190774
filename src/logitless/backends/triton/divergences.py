"""Launches of the kernels that compare a student with its teacher."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless.backends.contract import Pair
from logitless.backends.tiled import zero_the_rest
from logitless.backends.triton.launching import launch, require
from logitless.machine import divergence_gradient_sizes, divergence_sizes
from logitless.softmax import Coefficients

MODULE = "divergence_kernels"


def divergence(pair: Pair, out: Tensor) -> None:
    """Same as :func:`logitless.backends.reference.divergence`, in one read of both."""
    require(pair.student.logits)
    launch(
        "divergence_kernel",
        pair.student.num_rows,
        on=pair.student.logits,
        module=MODULE,
        **_of_pair(pair),
        out=out,
        out_stride=out.stride(0),
        **divergence_sizes(pair.student.columns),
    )


def divergence_gradient(
    pair: Pair, mean: Tensor, by: Tensor, coef: Coefficients | None, out: Tensor, out_index: Tensor | None
) -> None:
    """Same as :func:`logitless.backends.reference.divergence_gradient`: one read of both, one write."""
    require(pair.student.logits)
    width = out.shape[1]
    launch(
        "divergence_gradient_kernel",
        pair.student.num_rows if width else 0,
        on=pair.student.logits,
        module=MODULE,
        **_of_pair(pair),
        mean=mean.contiguous(),
        by=by.contiguous(),
        plain=None if coef is None else coef.plain,
        product=None if coef is None else coef.product,
        at_target=None if coef is None else coef.at_target,
        out_index=out_index,
        out=out,
        out_stride=out.stride(0),
        width=width,
        first=pair.student.first,
        OUT_INDEXED=out_index is not None,
        TERMS=coef is not None,
        PRODUCT=coef is not None and coef.product is not None,
        **divergence_gradient_sizes(width),
    )
    zero_the_rest(out, out_index, width)


def _of_pair(pair: Pair) -> dict[str, Any]:
    """Arguments of both kernels."""
    student, teacher, kind = pair.student, pair.teacher, pair.kind
    family = kind.power is not None
    return {
        "logits": student.logits,
        "index": student.index,
        "column": student.column,
        "gain": student.gain,
        "reference": pair.norm.reference,
        "log_sum": pair.norm.log_sum,
        "teacher": teacher.logits,
        "teacher_index": teacher.index,
        "teacher_gain": teacher.gain,
        "teacher_reference": pair.teacher_norm.reference,
        "teacher_log_sum": pair.teacher_norm.log_sum,
        "shift": pair.shift if pair.share is None else torch.stack([pair.shift, pair.share]),
        "row_stride": student.logits.stride(0),
        "teacher_stride": teacher.logits.stride(0),
        "columns": student.columns,
        "teacher_columns": teacher.columns,
        "squash": student.squash,
        "teacher_squash": teacher.squash,
        "INDEXED": student.index is not None,
        "TEACHER_INDEXED": teacher.index is not None,
        "SOFTCAP": bool(student.squash),
        "TEACHER_SOFTCAP": bool(teacher.squash),
        "KIND": "family" if family else kind.kind,
        "C": kind.power if family else kind.beta,
        "FACTOR": kind.factor,
        "ACCEPT": pair.share is not None,
    }
