"""A call and its backward, given by sizes: on a real device to measure them, or without numbers to estimate them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import logitless as ll
from logitless.memory import Estimate, estimate
from logitless.memory.ledger import tensors_in
from logitless.memory.meta import backward, hand_over
from logitless.rows import Rows
from logitless.spec import EntropyMode, VocabShard
from logitless.tools.plan.ways import plain, plain_linear

FROM_HIDDEN = ("hidden", "loss", "pair")
PATHS = ("logits", "pair of logits", *FROM_HIDDEN, "torch")
NAMES = ("logits", "hidden", "weight", "bias", "a", "b")


@dataclass(frozen=True, kw_only=True)
class SizedStep:
    """Sizes and options of a step.

    Attributes:
        path: ``"logits"`` and ``"hidden"`` for log-probs, ``"pair of logits"`` and ``"pair"`` for those with a teacher,
            ``"loss"`` for a policy loss from hidden states, ``"torch"`` for the log_softmax that frameworks write.
        tokens, vocab, rows, hidden: T, V of all ranks, R or None for all tokens in order, D.
        weight_dtype: of the head, where it is another than that of the hidden states.
        kept_ids, ids, teacher_hidden, teacher_top_k, lora_rank: how many there are; None for none.
    """

    path: str
    tokens: int
    vocab: int
    rows: int | None = None
    hidden: int | None = None
    dtype: str = "bfloat16"
    weight_dtype: str | None = None
    entropy: EntropyMode = None
    needs_grad: tuple[str, ...] = NAMES
    bias: bool = False
    softcap: bool = False
    lora_rank: int | None = None
    kept_ids: int | None = None
    scope: Literal["vocabulary", "support"] = "vocabulary"
    stats: tuple[str, ...] = ()
    top_k: int | None = None
    ids: int | None = None
    overwrite: bool = False
    weight_grad: bool = False
    match: Literal["bfloat16", "float16"] | None = None
    bits: Literal["fast", "canonical"] = "fast"
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    backend: str = "auto"
    memory: int | str | None = None
    objective: Any = None
    counts: Sequence[int] | None = None
    dropped: float = 0.0
    teacher_hidden: int | None = None
    teacher_top_k: int | None = None
    tail: Literal["bucket", "renormalise"] = "bucket"
    divergence: str = "forward_kl"

    @property
    def num_rows(self) -> int:
        return self.tokens if self.rows is None else self.rows

    def predicted(self, device: Literal["cuda", "cpu"]) -> Estimate:
        """Its estimate, from tensors without numbers."""
        call = self.on(torch.device("meta"), self._imagined())
        return estimate(call.verb, *call.args, **call.options, device=device, dropped=self.dropped)

    def _imagined(self) -> Any:
        return VocabShard.imagined(self.vocab, self.tensor_parallel) if self.tensor_parallel > 1 else None

    def on(self, device: torch.device, shard: Any = None) -> RunningStep:
        """The step with operands on a device."""
        leaves = self._leaves(device)
        scored = self._rows(device)
        if self.path == "torch":
            index, target = (None, scored) if isinstance(scored, Tensor) else (scored.index, scored.target)
            function: Any = plain if "logits" in leaves else plain_linear
            return RunningStep(self, function, (*leaves.values(), index, target, self.entropy), {}, leaves)
        logits, options = self._logits(leaves, shard, device), self._options(device)
        if self.path != "loss":
            options |= {"entropy": "grad" if "pair" in self.path else self.entropy}
            return RunningStep(self, ll.logprobs, (logits, scored), options, leaves)
        objective = self.objective or ll.Objective()
        return RunningStep(
            self, ll.policy_loss, (logits, scored, objective), options | self._fields(objective, device), leaves
        )

    def _leaves(self, device: torch.device) -> dict[str, Tensor]:
        dtype, columns = getattr(torch, self.dtype), -(-self.vocab // self.tensor_parallel)
        if self.hidden is None:
            logits = torch.zeros(self.tokens, columns, dtype=dtype, device=device)
            return {"logits": hand_over(logits) if "logits" in self.needs_grad else logits}
        here = self.tokens // self.tensor_parallel if self.sequence_parallel else self.tokens
        shapes = {"hidden": (here, self.hidden), "weight": (columns, self.hidden)}
        shapes |= {"bias": (columns,)} if self.bias else {}
        if self.lora_rank is not None:
            shapes |= {"a": (self.lora_rank, self.hidden), "b": (columns, self.lora_rank)}
        of_head = dtype if self.weight_dtype is None else getattr(torch, self.weight_dtype)
        dtypes = {"weight": of_head, "bias": of_head}
        return {
            name: torch.zeros(
                shape, dtype=dtypes.get(name, dtype), device=device, requires_grad=name in self.needs_grad
            )
            for name, shape in shapes.items()
        }

    def _logits(self, leaves: dict[str, Tensor], shard: Any, device: torch.device) -> Any:
        if self.hidden is None:
            return ll.Logits.given(leaves["logits"], shard=shard, overwrite=self.overwrite)
        weight: Any = leaves["weight"]
        buffer = torch.zeros(weight.shape, device=device) if self.weight_grad else None
        if self.lora_rank is not None:
            weight = ll.LoRA(weight, leaves["a"], leaves["b"])
        return ll.Logits(
            leaves["hidden"],
            weight,
            bias=leaves.get("bias"),
            shard=shard,
            sequence_parallel=self.sequence_parallel,
            weight_grad=buffer,
            match=self.match,
            bits=self.bits,
        )

    def _options(self, device: torch.device) -> dict[str, Any]:
        options = {"head": ll.Head(softcap=20.0) if self.softcap else None, "kept": self._kept(device)}
        options |= {"memory": self.memory, "backend": self.backend, "teacher": self._teacher(device)}
        if self.path in ("logits", "hidden"):
            ids = None if self.ids is None else torch.zeros((self.num_rows, self.ids), dtype=torch.int64, device=device)
            options |= {"stats": self.stats, "top_k": self.top_k, "ids": ids}
        if "pair" in self.path:
            options["divergence"] = self.divergence
        return options

    def _rows(self, device: torch.device) -> Rows | Tensor:
        """Targets of all tokens; or rows of some of them, of samples that have ``counts`` rows each."""
        objective = self.objective or ll.Objective()
        if self.rows is None and self.counts is None and not objective.by_sample:
            return torch.zeros(self.tokens, dtype=torch.int64, device=device)
        half = self.num_rows // 2
        samples = (self.num_rows - half, half) if isinstance(objective, ll.Preference) else (self.num_rows,)
        counts = samples if self.counts is None else tuple(self.counts)
        lengths = torch.tensor(counts, dtype=torch.int64, device=device)
        index = torch.arange(self.num_rows, device=device)
        sample = torch.repeat_interleave(torch.arange(len(counts), device=device), lengths, output_size=self.num_rows)
        return Rows(
            index=index,
            target=torch.zeros_like(index),
            sample=sample,
            position=index,
            token_shape=(self.tokens,),
            held=counts,
            counts=counts,
            totals=lengths,
            response_lengths=counts,
        )

    def _kept(self, device: torch.device) -> ll.Kept | None:
        if self.kept_ids is None:
            return None
        each, more = divmod(self.kept_ids, max(1, self.num_rows))
        lengths = torch.full((self.num_rows,), each, device=device)
        lengths[:more] += 1
        return ll.Kept(torch.arange(self.kept_ids, device=device) % self.vocab, lengths, self.scope)

    def _teacher(self, device: torch.device) -> Any:
        """With a head as large as the student's, or logits, or so many log-probs of every row."""
        columns, dtype = -(-self.vocab // self.tensor_parallel), getattr(torch, self.dtype)
        here = self.tokens // self.tensor_parallel if self.sequence_parallel else self.tokens
        if self.teacher_top_k is not None:
            ids = torch.arange(self.teacher_top_k, device=device).repeat(self.num_rows, 1)
            return ll.Teacher.from_top_k(torch.full(ids.shape, -math.log(self.vocab), device=device), ids, self.tail)
        if self.path == "pair of logits":
            return torch.zeros(self.tokens, columns, dtype=dtype, device=device)
        if self.teacher_hidden is None:
            return None
        hidden, weight = (torch.zeros(n, self.teacher_hidden, dtype=dtype, device=device) for n in (here, columns))
        return ll.Logits(hidden, weight)

    def _fields(self, objective: Any, device: torch.device) -> dict[str, Any]:
        """What the objective needs, such that no row is clipped, and as many as asked for have no advantage."""
        needed: dict[str, Any] = {name: torch.zeros(self.num_rows, device=device) for name in objective.required}
        if isinstance(objective, ll.Preference):
            return needed
        # Spread evenly, so that every chunk has its share.
        so_far = torch.arange(self.num_rows + 1, device=device).mul(self.dropped).floor()
        return {**needed, "old_logprob": "current", "advantage": (so_far[1:] == so_far[:-1]).float()}


@dataclass(eq=False)
class RunningStep:
    """A step on a device: the verb, its arguments, and the two halves of it."""

    step: SizedStep
    verb: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    leaves: dict[str, Tensor]

    def __post_init__(self) -> None:
        # The caller's: not counted where peaks are measured.
        first = next(iter(self.leaves.values()))
        wide = torch.float64 if first.dtype == torch.float64 else torch.float32
        rows, more = self.step.num_rows, self.step.ids or 1
        shapes: list[tuple[int, ...]] = [(), (rows,), (rows, more)]
        self.upstream: dict[tuple[int, ...], Tensor] = {
            shape: torch.ones(shape, dtype=wide, device=first.device) for shape in shapes
        }

    def forward(self) -> list[Tensor]:
        """The tensors that the call returns."""
        out = self.verb(*self.args, **self.options)
        flat = [x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor)]
        return list(dict.fromkeys(tensors_in(flat)))

    def backward(self, out: list[Tensor]) -> dict[str, Tensor]:
        """Gradients of what needs one, by name."""
        wanted = {name: x for name, x in self.leaves.items() if x.requires_grad}
        graded = [x for x in out if x.requires_grad]
        return backward(graded, [self.upstream[tuple(x.shape)] for x in graded], wanted)
