"""A micro-batch of a loss step, by its sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from logitless.errors import LogitlessError
from logitless.machine import Machine
from logitless.memory import Estimate, Item, estimate, sized
from logitless.spec import EntropyMode, Head
from logitless.tools.presets import ModelShape

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class LossStep:
    """A micro-batch on one of the ranks that share it.

    Args:
        model: shape of the head.
        tokens: size of the micro-batch, all context-parallel ranks together.
        response_fraction: part of the tokens that is response; the rest is prompt and tool output.
        tp, cp: tensor-parallel (vocabulary) and context-parallel (sequence) ranks.
        dtype: of hidden states and weight.
        entropy: as ``logprobs`` takes it.
        frozen_head: whether the head's weight needs no gradient.
        memory: working memory of ``logprobs`` and ``policy_loss`` from hidden states; None for the default of each.
        kept_ids: ids that the sampler kept of each response token, on average; None where it kept all.
        device: ``"cuda"`` for the GPU at hand, or an H200 where there is none; ``"cpu"``; or another machine.
    """

    model: ModelShape
    tokens: int
    response_fraction: float = 1.0
    tp: int = 1
    cp: int = 1
    dtype: str = "bfloat16"
    entropy: EntropyMode = "value"
    frozen_head: bool = False
    memory: int | str | None = None
    kept_ids: float | None = None
    device: Literal["cuda", "cpu"] | Machine = "cuda"

    def __post_init__(self) -> None:
        for name in ("tokens", "tp", "cp"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise LogitlessError(f"plan: {name} must be an integer of at least 1 but is {value!r}.")
        if not 0 < self.response_fraction <= 1:
            raise LogitlessError(
                f"plan: response_fraction must be above 0 and at most 1 but is {self.response_fraction!r}."
            )
        if self.kept_ids is not None and not self.kept_ids >= 0:
            raise LogitlessError(f"plan: kept_ids must be 0 or more on average but is {self.kept_ids!r}.")
        if self.dtype not in BYTES:
            raise LogitlessError(f"plan: dtype must be one of {list(BYTES)} but is {self.dtype!r}.")

    @property
    def local_tokens(self) -> int:
        return -(-self.tokens // self.cp)

    @property
    def rows(self) -> int:
        return max(1, round(self.local_tokens * self.response_fraction))

    @property
    def columns(self) -> int:
        return -(-self.model.vocab // self.tp)

    @property
    def needs_grad(self) -> tuple[str, ...]:
        return ("hidden",) if self.frozen_head else ("hidden", "weight")

    def predict(
        self, verb: Callable[..., Any], *more: Any, hidden: bool, linear: Any = None, **options: Any
    ) -> Estimate:
        """``estimate`` of a verb in this step, from hidden states or from logits that exist.

        Args:
            more: positional arguments after the rows.
            linear: options of the logits.
        """
        logits, rows = sized(
            self.local_tokens,
            self.model.vocab,
            self.model.hidden if hidden else None,
            rows=self.rows,
            dtype=self.dtype,
            needs_grad=("logits", *self.needs_grad),
            tensor_parallel=self.tp,
            **(linear or {}),
        )
        # Triton runs on the card that the step is meant for, whether or not it runs here.
        backend = "tiled" if self.device == "cpu" else "triton"
        head = Head(softcap=self.model.softcap) if self.model.softcap is not None else None
        return estimate(verb, logits, rows, *more, head=head, backend=backend, device=self.device, **options)

    def item(self, name: str, rows: int, columns: int, width: int | None = None, output: bool = False) -> Item:
        """A matrix with its shape in its name."""
        size = rows * columns * (BYTES[self.dtype] if width is None else width)
        return Item(f"{name} [{rows}, {columns}]", size, "backward" if output else "kept", output)

    def gradients(self) -> tuple[Item, ...]:
        """The gradients that the step makes: d_hidden, and d_weight unless the head is frozen."""
        d_hidden = self.item("d_hidden", self.local_tokens, self.model.hidden, output=True)
        d_weight = self.item("d_weight", self.columns, self.model.hidden, output=True)
        return (d_hidden,) if self.frozen_head else (d_hidden, d_weight)
