"""``PolicyHead``: a language-model head that answers with log-probs, as a module.

It owns the linear layer it replaces, so hooks run, tied embeddings stay tied, and FSDP gathers the weight around its
forward: inside, the weight is an ordinary tensor.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from logitless.errors import LogitlessError
from logitless.from_hidden.logprobs import linear_logprobs
from logitless.spec import TokenStats


class PolicyHead(nn.Module):
    """An LM head that computes log-probs and entropy of chosen tokens and never their logits.

    Args:
        linear: the head it stands in for; its weight and bias are used as they are.
        options: keyword arguments of :func:`linear_logprobs` for every call, such as ``head`` or ``memory``.

    >>> import torch
    >>> head = PolicyHead(nn.Linear(4, 10), entropy="value")
    >>> head(torch.zeros(2, 4), torch.tensor([1, 2])).logprob.shape
    torch.Size([2])
    """

    def __init__(self, linear: nn.Linear, **options: Any) -> None:
        super().__init__()
        if not isinstance(getattr(linear, "weight", None), Tensor) or "bias" in options:
            raise LogitlessError(
                f"PolicyHead: linear must be a linear layer, with its own bias if any, but is {type(linear).__name__}."
            )
        self.linear = linear
        self.options = options

    def forward(self, hidden: Tensor, rows: Any = None, **options: Any) -> TokenStats | Tensor:
        """Results for the rows, or plain logits where no rows are given (generation)."""
        if rows is None:
            return self.linear(hidden)
        bias = getattr(self.linear, "bias", None)
        return linear_logprobs(hidden, self.linear.weight, rows, bias=bias, **{**self.options, **options})
