"""What is alive at the fullest moments of plain torch, as frameworks write the loss step: what there is to save.

One float32 log_softmax, gathered; entropy from it and its exponential; logits in the operands' dtype.
"""

from __future__ import annotations

from collections.abc import Iterator

from logitless.footprints import Item, Moment, Step, in_backward, in_forward, output, selected_rows


def torch_moments(step: Step) -> Iterator[Moment]:
    """``log_softmax(logits[rows].float())``, gathered, and ``-(p * log_p).sum(-1)``; logits in the operands' dtype."""
    size, operand = step.num_rows * step.columns, step.dtype.itemsize
    whole, narrow = size * step.wide, size * operand if operand < step.wide else 0
    shape = f"[{step.num_rows}, {step.columns}]"
    start = [] if step.hidden is None else [in_forward(f"logits {shape}", size * operand), *selected_rows(step)]
    if step.hidden is None and step.rows is not None:
        start = [in_forward(f"logits of the rows {shape}", size * operand)]
    log_p, p = Item(f"log p {shape}", whole, "kept"), Item(f"p {shape}", whole, "kept")
    if narrow:
        yield Moment("forward", (*start, in_forward(f"logits in float32 {shape}", whole), log_p))
    if step.entropy is None:
        yield Moment("forward", (*start, log_p))
    else:
        yield Moment("forward", (*start, log_p, p, in_forward(f"p log p {shape}", whole)))
    if not any(step.needs):
        return
    rows = [item._replace(phase="kept") for item in selected_rows(step)]
    if step.entropy == "grad":
        yield Moment("backward", (*rows, log_p, p, in_backward(f"three gradients {shape}", 3 * whole)))
    yield Moment("backward", (*rows, log_p, in_backward(f"two gradients {shape}", 2 * whole)))
    d_logits = f"d_logits {shape}"
    if narrow:
        yield Moment("backward", (*rows, in_backward(f"{d_logits} in float32", whole), in_backward(d_logits, narrow)))
    yield Moment("backward", (*rows, in_backward(d_logits, size * operand), *_torch_outputs(step)))


def _torch_outputs(step: Step) -> Iterator[Item]:
    """Gradients of what the step started from; where rows were selected, of the rows first."""
    operand = step.dtype.itemsize
    if step.hidden is None:
        if step.rows is not None:
            yield output(f"d_logits [{step.tokens}, {step.columns}]", step.tokens * step.columns * operand)
        return
    if step.needs[0]:
        if step.rows is not None:
            yield in_backward("d_hidden of the rows", step.rows * step.hidden * operand)
        yield output(f"d_hidden [{step.tokens}, {step.hidden}]", step.tokens * step.hidden * operand)
    if step.needs[1]:
        yield output(f"d_weight [{step.columns}, {step.hidden}]", step.columns * step.hidden * operand)
