"""One training step of a draft's losses through a host's functions, which are ours once ``install(host)`` was called.

Each maker takes a :class:`Draft` and returns a function that runs forward and backward, from hidden states of draft and
target, and gives the losses of all rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

AHEAD = 3
"""Steps ahead of SpecForge's step."""


class Draft(NamedTuple):
    """A draft's hidden states and head beside its target's, and which of the target's ids it has."""

    hidden: Tensor
    head: nn.Linear
    target_hidden: Tensor
    target_weight: Tensor
    t2d: Tensor

    @staticmethod
    def of(device: torch.device, sizes: Any) -> Draft:
        """32,000 ids, or a third of a smaller vocabulary."""
        dtype, count = getattr(torch, sizes.dtype), min(32_000, sizes.vocab // 3)
        shape = (sizes.samples, sizes.length, sizes.hidden)
        hidden, other = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
        head = nn.Linear(sizes.hidden, count, bias=False, device=device, dtype=dtype)
        weight = (torch.randn(sizes.vocab, sizes.hidden, device=device) * 2 * sizes.hidden**-0.5).to(dtype)
        nn.init.normal_(head.weight, std=2 * sizes.hidden**-0.5)
        chosen = torch.randperm(sizes.vocab, device=device)[:count]
        t2d = torch.zeros(sizes.vocab, dtype=torch.bool, device=device).index_fill_(0, chosen, True)
        return Draft(hidden.requires_grad_(), head, other, weight, t2d)

    def learn(self, loss: Tensor) -> None:
        loss.backward()
        self.head.zero_grad(set_to_none=True)
        self.hidden.grad = None


def one_tile(module: Any) -> None:
    """One size of a tile for speculators' kernels, which choose among many on a GPU, and cannot in the interpreter."""
    for kernel in (module.loss_forward_kernel, module.loss_backward_kernel):
        kernel.configs = [next(x for x in kernel.configs if x.kwargs["BLOCK_SIZE"] == 512)]


def speculators(draft: Draft) -> tuple[Callable[[], Tensor], list[nn.Module]]:
    """The LK hybrid of an EAGLE-3 step; the verifier's head is cut to the draft's ids, as when it is loaded."""
    fused = importlib.import_module("speculators.losses.fused")
    if not torch.cuda.is_available():
        one_tile(fused)
    verifier = nn.Linear(draft.head.in_features, draft.head.out_features, bias=False, device="meta")
    verifier.weight = nn.Parameter(draft.target_weight[draft.t2d], requires_grad=False)
    hidden, other = (x.flatten(0, 1)[None] for x in (draft.hidden, draft.target_hidden))

    def step() -> Tensor:
        with torch.no_grad():
            targets = verifier(other)
        rows = fused.fused_lk_hybrid_loss(draft.head(hidden), targets)
        draft.learn(rows.mean())
        return rows.detach().reshape(-1)

    return step, [draft.head, verifier]


def specforge(draft: Draft) -> tuple[Callable[[], Tensor], list[nn.Module]]:
    """EAGLE-3's losses three steps ahead, with the compact teacher and the LK loss that has both terms."""
    model = importlib.import_module("specforge.algorithms.eagle3.model")
    samples, length = draft.hidden.shape[:2]
    mask = torch.ones(samples, length, 1, device=draft.hidden.device)
    none = dict.fromkeys(("global_input_ids", "attention_mask", "loss_mask", "position_ids", "hidden_states"))
    scales = {"lk_loss_type": "lambda", "kl_scale": 1.0, "kl_decay": 1.0}

    def step() -> Tensor:
        compact = model.compute_target_p_padded_from_hidden
        *padded, counts = compact(draft.target_hidden, draft.target_weight, draft.t2d, mask, AHEAD)
        names = ("target_p_padded", "target_p_on_draft_padded", "target_token_ids_padded")
        given = {**dict(zip(names, padded, strict=True)), "position_mask": counts, "seq_length": length, **none}
        losses = []
        for i in range(AHEAD):
            state = model.SdpaLikeAdapter(None).step_view(idx=i, ttt_length=AHEAD, **given)
            parts = {name: getattr(state, name) for name in ("target_p", "target_p_on_draft", "position_mask")}
            logits = draft.head(draft.hidden.roll(-i, 1))
            losses.append(model._compute_loss_and_acceptance_rate(logits=logits, **parts, **scales)[1])
        draft.learn(sum(losses, losses[0].new_zeros(())))
        return torch.stack(losses).detach()

    return step, [draft.head]
