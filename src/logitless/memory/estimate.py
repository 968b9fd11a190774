"""``estimate``: the peak bytes of a call, item by item, before anything runs.

The call itself runs, on the meta device, where tensors have shapes and no memory: the same checks, the same route, the
same allocations in the same order, and nothing computed. What is not counted: what the caller holds (logits or hidden,
weight, bias, targets, rows, upstream gradients) and what a vendor library allocates once for good (cuBLAS's workspace).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import torch

from logitless.collectives import DryGroup
from logitless.distill.pair import PairPlan
from logitless.distill.teacher import Tail
from logitless.from_hidden.plan import LinearPlan, SupportPlan
from logitless.machine import CPU, H200, Machine
from logitless.memory.ledger import Item, Ledger
from logitless.memory.step import Step
from logitless.objectives import Objective, Preference
from logitless.policy_loss.plan import LossPlan
from logitless.spec import EntropyMode, format_bytes


@dataclass(frozen=True)
class Estimate:
    """Bytes beyond what the caller holds, results and gradients included.

    Attributes:
        path: which call.
        backend: which backend works on the logits; None for plain torch.
        plan: which route a path from hidden states takes; None for other paths.
        forward, backward: items that are alive at the fullest moment of each; no backward, no items.
    """

    path: str
    backend: str | None
    plan: LinearPlan | SupportPlan | LossPlan | PairPlan | None
    forward: tuple[Item, ...]
    backward: tuple[Item, ...]

    @property
    def items(self) -> tuple[Item, ...]:
        """All of them, once each, as they come up."""
        return tuple(dict.fromkeys((*self.forward, *self.backward)))

    @property
    def forward_peak(self) -> int:
        return sum(item.bytes for item in self.forward)

    @property
    def backward_peak(self) -> int:
        return sum(item.bytes for item in self.backward)

    @property
    def peak(self) -> int:
        return max(self.forward_peak, self.backward_peak)

    def __str__(self) -> str:
        how = "" if self.plan is None else f", {self.plan.kind}"
        lines = [f"{self.path}{how}" + ("" if self.backend is None else f", {self.backend} backend")]
        lines.append(f"{'alive at the peak of':52}{'forward':>13}{'backward':>13}")
        for item in self.items:
            cells = [format_bytes(item.bytes) if item in items else "" for items in (self.forward, self.backward)]
            mark = "*" if item.output else " "
            lines.append(f"{mark} {item.name[:50]:50}{cells[0]:>13}{cells[1]:>13}")
        peaks = (self.forward_peak, self.backward_peak)
        lines.append(f"{'peak (* goes to the caller)':52}" + "".join(f"{format_bytes(n):>13}" for n in peaks))
        return "\n".join(lines)


def estimate(
    path: Literal["logprobs", "linear_logprobs", "linear_policy_loss", "linear_divergence", "divergence", "torch"],
    *,
    tokens: int,
    vocab: int,
    rows: int | None = None,
    hidden: int | None = None,
    dtype: str = "bfloat16",
    device: Literal["cuda", "cpu"] = "cuda",
    entropy: EntropyMode = None,
    needs_grad: tuple[str, ...] = ("logits", "hidden", "weight", "bias", "a", "b"),
    bias: bool = False,
    softcap: bool = False,
    lora_rank: int | None = None,
    kept_ids: int | None = None,
    scope: Literal["vocabulary", "support"] = "vocabulary",
    stats: tuple[str, ...] = (),
    top_k: int | None = None,
    further_ids: int | None = None,
    overwrite_logits: bool = False,
    weight_grad: bool = False,
    match: Literal["bfloat16", "float16"] | None = None,
    batch_invariant: bool = False,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    backend: str = "auto",
    memory: int | str | None = None,
    objective: Objective | Preference | None = None,
    counts: Sequence[int] | None = None,
    dropped: float = 0.0,
    teacher_hidden: int | None = None,
    teacher_top_k: int | None = None,
    tail: Tail = "bucket",
) -> Estimate:
    """Peak bytes of a call and of its backward, item by item. Computes nothing and needs no device.

    Args:
        path: ``"logprobs"``, ``"linear_logprobs"``, ``"linear_policy_loss"``, ``"linear_divergence"``,
            ``"divergence"``; or ``"torch"``, the log_softmax that frameworks write, from logits or, with ``hidden``,
            from hidden states.
        tokens: T, rows of the logits or of hidden; under ``sequence_parallel`` of all ranks together.
        vocab: V, columns of all ranks together.
        rows: R, selected rows (:class:`Rows`); None where targets of all tokens are given in order.
        hidden: D, for paths from hidden states.
        dtype: of the logits, or of hidden and weight.
        device: kind of device that it will run on. Where there is no GPU here, ``"cuda"`` is an H200.
        entropy, overwrite_logits, match, batch_invariant, sequence_parallel, backend, memory: as the path takes them.
        needs_grad: what needs a gradient: ``"logits"``, or ``"hidden"``, ``"weight"``, ``"bias"``, ``"a"`` and ``"b"``.
            ``()`` is forward alone. Names of what the path does not have are passed over.
        bias, softcap, weight_grad: whether there is one.
        lora_rank: rank of a :class:`LoRA` on the head; None for none.
        kept_ids: kept ids of all rows together; None for none.
        scope: as the path takes it; ``"support"`` goes with ``kept_ids``.
        stats, top_k: as the path takes them.
        further_ids: how many further ids every row has; None for none.
        tensor_parallel: ranks that share the vocabulary in equal parts.
        objective: of ``linear_policy_loss``, default ``Objective()``. It decides on ``entropy`` there.
        counts: rows of each sample (``rows.counts``), which an objective that takes means over samples asks for;
            default one sample. Where such samples are split over context-parallel ranks, ask for ``linear_logprobs``.
        dropped: share of the rows without a gradient (clipped, or of zero advantage). Above 5 % the others are moved
            together, which takes up to 128 MiB, and their hidden states copied.
        teacher_hidden: hidden size of a teacher with a head, for ``linear_divergence`` and for an objective with a
            divergence. Its operands are the caller's, as the student's are.
        teacher_top_k, tail: instead, how many log-probs of every row it sent, and what becomes of the rest.

    Returns:
        :class:`Estimate`, which prints as a table.

    Raises:
        LogitlessError: an argument cannot be honoured; the text says which and why.

    >>> estimate("logprobs", tokens=4096, vocab=1000, dtype="float32", device="cpu", overwrite_logits=True).peak >> 20
    2
    """
    # All arguments, each under its own name: a step has the same ones.
    step = Step(**locals())
    on_gpu = device == "cuda"
    machine = CPU if not on_gpu else Machine.of(torch.device("cuda")) if torch.cuda.is_available() else H200
    shard = None
    if tensor_parallel > 1:
        # Gloo, which CPUs use, works on copies.
        group, columns = DryGroup(tensor_parallel, copies=not on_gpu), -(-vocab // tensor_parallel)
        shard = SimpleNamespace(start=0, stop=columns, vocab_size=vocab, group=group, check_calls=False)
    with Ledger():
        # What the caller holds, which is not counted.
        running = step.on(torch.device("meta"), shard, machine)
    ledger = Ledger(on_gpu)
    with ledger:
        out = running.forward()
        ledger.start_backward()
        gradients = running.backward(out)
        ledger.name_output("results of each row", *out)
        for name, gradient in gradients.items():
            ledger.name_output(f"d_{name}", gradient)
    items = ledger.items("forward"), ledger.items("backward") if gradients else ()
    return Estimate(path, None if path == "torch" else step.chosen_backend, running.plan, *items)
