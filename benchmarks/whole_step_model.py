"""Models with the shapes of Qwen3, and policy updates of them by way of one loss or another: see ``whole_step.py``."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

import logitless as ll
from benchmarks.bench.linear_providers import trl_head
from benchmarks.bench.measure import peak_bytes
from logitless.adapters.transformers import patch

CLIP = 0.2
OPTIMIZER = "AdamW, fused, state in the dtype of the weights"


@dataclass(frozen=True)
class Shape:
    """A model, and the sequences it is trained on."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    head_dim: int = 128
    vocab: int = 151_936
    dtype: str = "bfloat16"
    length: int = 2048
    prompt: int = 256
    sequences: int = 8


MODELS = {
    shape.name: shape
    for shape in (
        Shape("0.6B", 1024, 28, 16, 8, 3072),
        Shape("1.7B", 2048, 28, 16, 8, 6144),
        Shape("4B", 2560, 36, 32, 8, 9728),
        Shape("tiny", 32, 2, 2, 1, 64, 16, 1000, "float32", 24, 8, 4),
    )
}


class Batch(NamedTuple):
    """``tokens`` are ``[B, S]``, and ``ids`` the same on the CPU, as a loader has them; the rest is ``[B, R]``."""

    ids: Tensor
    tokens: Tensor
    old: Tensor
    advantage: Tensor
    prompt: int
    rows: ll.Rows

    @property
    def target(self) -> Tensor:
        return self.tokens[:, self.prompt :]

    def fields(self) -> dict[str, Tensor]:
        return {"old_logprob": self.old.reshape(-1), "advantage": self.advantage.reshape(-1)}


def make_model(shape: Shape, device: torch.device, seed: int = 0) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=2 * shape.length,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    with torch.device(device), _default_dtype(getattr(torch, shape.dtype)):
        model: Any = Qwen3ForCausalLM(config)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def draw(shape: Shape, sequences: int, device: torch.device) -> Batch:
    """Random tokens and advantages; old log-probs near those of random weights."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, shape.vocab, (sequences, shape.length), generator=generator)
    response = (sequences, shape.length - shape.prompt)
    advantage = torch.randn(sequences, 1, generator=generator).expand(response)
    # Where they are is part of the data, as targets are for the others.
    rows = ll.Rows.padded(ids, [response[1]] * sequences, lengths=[shape.length] * sequences, device=device)
    return Batch(ids, ids.to(device), torch.zeros(response, device=device), advantage.to(device), shape.prompt, rows)


@torch.no_grad()
def with_old(batch: Batch, model: Any) -> Batch:
    """The batch with old log-probs: those of the model, and a tenth of noise."""
    hidden = model.model(batch.tokens, use_cache=False).last_hidden_state
    logprob = ll.logprobs(ll.Logits(hidden, model.lm_head.weight), batch.rows).logprob.reshape(batch.old.shape)
    generator = torch.Generator(batch.old.device).manual_seed(2)
    return batch._replace(old=logprob + 0.1 * torch.randn(logprob.shape, generator=generator, device=logprob.device))


# Contenders: hidden states [B, S, D], weight and batch to the loss.


def clipped(logprob: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    ratio = (logprob - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()


def plain(hidden: Tensor, weight: Tensor, batch: Batch) -> Tensor:
    """Logits of the response in the model's dtype, then float32, as in most trainers."""
    logits = hidden[:, batch.prompt - 1 : -1] @ weight.T
    log_p = torch.log_softmax(logits.float(), -1)
    with torch.no_grad():
        _ = -(log_p.exp() * log_p).sum(-1)
    return clipped(log_p.gather(-1, batch.target[..., None]).squeeze(-1), batch.old, batch.advantage)


def compiled(hidden: Tensor, weight: Tensor, batch: Batch) -> Tensor:
    rows = hidden[:, batch.prompt - 1 : -1].reshape(-1, hidden.shape[-1])
    flat = [x.reshape(-1) for x in (batch.target, batch.old, batch.advantage)]
    for x in (rows, *flat):
        # One compilation for all batches: what differs is the number of rows.
        torch._dynamo.mark_dynamic(x, 0)  # pyright: ignore[reportAttributeAccessIssue]
    return _compiled()(rows, weight, *flat)[0]


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_of_rows)


def _of_rows(rows: Tensor, weight: Tensor, target: Tensor, old: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax((rows @ weight.T).float(), -1)
    entropy = -(log_p.detach().exp() * log_p.detach()).sum(-1)
    return clipped(log_p.gather(-1, target[:, None]).squeeze(-1), old, advantage), entropy


_trl_head = functools.cache(trl_head)


def trl(hidden: Tensor, weight: Tensor, batch: Batch) -> Tensor:
    """What TRL's GRPO asks of its fused head."""
    rows = hidden[:, batch.prompt - 1 : -1].reshape(-1, hidden.shape[-1])
    logprob, *_ = _trl_head()(rows, weight, batch.target.reshape(-1), ("log_probs", "entropy"))
    return clipped(logprob.view(batch.old.shape), batch.old, batch.advantage)


OBJECTIVE = ll.Objective(policy="ppo_clip", clip=CLIP, reduce="token_mean")


def ours(hidden: Tensor, weight: Tensor, batch: Batch) -> Tensor:
    return ll.policy_loss(ll.Logits(hidden, weight), batch.rows, OBJECTIVE, **batch.fields())[0]


CONTENDERS: dict[str, Callable[[Tensor, Tensor, Batch], Tensor]] = {
    "plain torch": plain,
    "torch.compile": compiled,
    "TRL": trl,
    "ours": ours,
}
FIRST = "plain torch"
"""The others' loss and gradients are compared with these."""


class Trainer:
    """A model, its optimizer, and a step by way of a contender's loss."""

    names: tuple[str, ...] = tuple(CONTENDERS)

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.model = self.made()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
        # Its state is there before anything is measured.
        self.step(self.names[-1], with_old(draw(shape, 2, device), self.model))

    def made(self) -> Any:
        # Whoever gives no rows finds the model as it was.
        return patch(make_model(self.shape, self.device))

    def first(self, contender: str) -> str:
        """Whose loss and gradients a contender's are compared with."""
        return FIRST

    def loss(self, contender: str, batch: Batch) -> Tensor:
        if contender == "ours":
            # As users call it: the patched model's forward returns the loss.
            loss = ll.Loss(OBJECTIVE, **batch.fields())
            return self.model(batch.tokens, rows=batch.rows, loss=loss).loss
        hidden = self.model.model(batch.tokens, use_cache=False).last_hidden_state
        return CONTENDERS[contender](hidden, self.model.lm_head.weight, batch)

    def gradients(self, contender: str, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss and norm of the gradients, which are clipped to 1."""
        loss = self.loss(contender, batch)
        loss.backward()
        return loss.detach(), clip_grad_norm_(self.model.parameters(), 1.0)

    def step(self, contender: str, batch: Batch) -> None:
        self.gradients(contender, batch)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def compare(self, contender: str, batch: Batch) -> tuple[float, float]:
        """Loss and norm of the gradients; the weights stay."""
        found = self.gradients(contender, batch)
        self.clear()
        return float(found[0]), float(found[1])

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def loss_alone(self, contender: str, batch: Batch) -> Callable[[], None]:
        """Forward and backward of the loss, from hidden states that are there."""
        with torch.no_grad():
            hidden = self.model.model(batch.tokens, use_cache=False).last_hidden_state
        hidden, weight = hidden.requires_grad_(), self.model.lm_head.weight

        def part() -> None:
            torch.autograd.grad(CONTENDERS[contender](hidden, weight, batch), (hidden, weight))

        return part

    def peak(self, contender: str, batch: Batch) -> int:
        """Most bytes alive during a step, weights and state of the optimizer included."""
        if self.device.type == "cpu":
            state = [x for y in self.optimizer.state.values() for x in y.values() if isinstance(x, Tensor)]
            alive = sum(x.nbytes for x in (*self.model.parameters(), *state))
        else:
            alive = torch.cuda.memory_allocated(self.device)
        return alive + peak_bytes(lambda: self.step(contender, batch), self.device)
