"""Log-prob and entropy of the same logits, from one pass, whichever is asked for first.

    log_prob, then entropy      the pass for the log-probs has the entropies too, and keeps them with the logits
    entropy, then log_prob      the entropies are ``Later``: read when somebody uses them, or by the pass for log-probs

Frameworks call one function for each. From hidden states every pass multiplies with the whole weight, and backward
three times more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from logitless.deferred.lazy import Waiting
from logitless.deferred.pending import of_computed
from logitless.deferred.read import SOFTMAX, ask, checked_ids, memo_of, remember, remembered, result_dtype, softmax_of
from logitless.operands import Logits
from logitless.operands.logits import SERVED
from logitless.operands.passed_on import same
from logitless.score import logprobs
from logitless.spec import IGNORE, TokenStats, accumulation_dtype, untraced


class Later(Waiting):
    """A number of each row, or of some of its ids.

    Attributes:
        of_logits: gives the numbers of logits that exist.
    """

    of_logits: Callable[[Tensor], Tensor]

    def answer(self, name: str, args: Any, kwargs: Any) -> Any:
        """Slices, casts and the sign wait as well: frameworks cut off the last entropy and then ask for log-probs."""
        if name in COMPARISONS:
            return SERVED[name](*args, **kwargs)
        fits = (WAITING if self.value is None else LOOKS).get(name)
        if fits is None or not args or args[0] is not self or not all(map(fits, (*args[1:], *kwargs.values()))):
            return NotImplemented

        def step(x: Tensor) -> Tensor:
            return getattr(x, name)(*args[1:], **kwargs)

        like = torch.empty(self.shape, dtype=self.dtype, device="meta")
        shape = step(like)
        if shape is like:
            return self
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.requires_grad and name != "detach"):
            new = _later(self.source, lambda: step(self.computed()), lambda x: step(self.of_logits(x)), shape)
        return self.waits_with(new)


def slices(index: Any) -> bool:
    """Whether an index makes a view."""
    whole = index if isinstance(index, tuple) else (index,)
    lists = (i for x in whole for i in (x if isinstance(x, list) else (x,)))
    return all(i is None or i is Ellipsis or isinstance(i, (slice, int)) for i in lists)


def _is_dtype(x: Any) -> bool:
    return isinstance(x, torch.dtype)


def _is_int(x: Any) -> bool:
    return type(x) is int


LOOKS: dict[str, Callable[[Any], bool]] = {
    "__getitem__": slices,
    "detach": _is_dtype,
    **dict.fromkeys(("unsqueeze", "squeeze", "view", "reshape", "flatten"), _is_int),
}
"""Other looks at the same numbers, by name, with the arguments that each may have; they can be compared with logits."""

WAITING = LOOKS | dict.fromkeys(("to", "float", "double", "bfloat16", "half", "neg", "__neg__"), _is_dtype)
"""What may be done with numbers that nobody has used."""


COMPARISONS = {"greater_equal": "ge", "greater": "gt", "less_equal": "le", "less": "lt", "not_equal": "ne"}
COMPARISONS |= {name: name.strip("_") for x in ("ge", "gt", "le", "lt", "eq", "ne") for name in (x, f"__{x}__")}
"""Functions by which logits are compared with numbers, and their short names."""


def picked_later(x: Logits, ids: Tensor, none: Tensor | None = None) -> Tensor:
    """``[..., K]`` logits of ids, NaN where there is ``none``. Compared with the logits themselves, they are those that
    are computed then, to the bit: dot products are summed in another order, and the last of a top-k would fall below
    its own value."""
    # A copy: whoever has the ids may write to them before the logits are read.
    ids = checked_ids(ids, x.shape[-1]).clone()
    source: Logits = same(x)

    def marked(z: Tensor) -> Tensor:
        return z if none is None else z.masked_fill(none, torch.nan)

    like = torch.empty(ids.shape, dtype=result_dtype(x), device="meta")
    new = _later(source, lambda: marked(ask(source, "logit", ids)), lambda z: marked(z.gather(-1, ids)), like)
    if _is_checkpointed():
        new.computed()
    return new


@untraced
def log_prob_and_entropy(x: Logits, target: Tensor) -> TokenStats:
    """:func:`logprobs` of every row, with the entropy of all rows; entropies that wait are read with it.

    A row whose target is -100 has log-prob 0, and its entropy.
    """
    graph = torch.is_grad_enabled() and x.requires_grad
    ignored = target == IGNORE
    found = logprobs(x, target.masked_fill(ignored, 0), entropy="grad" if graph else "value")
    remember(memo_of(x), graph, found.each(lambda y: y.reshape(-1)))
    return found._replace(logprob=found.logprob.masked_fill(ignored, 0.0))


@untraced
def entropy_with_log_prob(x: Logits, *, graph: bool, later: bool) -> Tensor | None:
    """``[...]`` entropies that were read with log-probs already, or will be; None where there are none to be had.

    Args:
        graph: whether they have a gradient.
        later: whether log-probs of the same logits will be asked for, so that the entropies may wait for them.
    """
    source: Logits = same(x)
    memo = memo_of(source)
    wanted = graph and torch.is_grad_enabled() and x.requires_grad
    # A reentrant checkpoint runs its function without a graph first.
    waits = later and not _is_checkpointed() and not (x.requires_grad and not torch.is_grad_enabled())

    def read() -> Tensor:
        known = None if torch.is_grad_enabled() else remembered(memo, True, "entropy")
        found = softmax_of(source, "entropy") if known is None else known.detach()
        return found.reshape(source.shape[:-1])

    with torch.set_grad_enabled(wanted):
        if True in memo or wanted in memo:
            return read()
        if not waits:
            return None
        memo[SOFTMAX] = True
        like = torch.empty(source.shape[:-1], dtype=accumulation_dtype(source.hidden.dtype), device="meta")
        return _later(source, read, lambda z: of_computed(z, "entropy", None), like)


def _is_checkpointed() -> bool:
    """Whether a checkpoint runs this code, and will again in backward: what waits would be read in one run alone."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # pyright: ignore[reportAttributeAccessIssue]


def known(x: Logits, value: Tensor, of_logits: Callable[[Tensor], Tensor]) -> Tensor:
    """Numbers of rows that were read already; compared with the logits themselves as those of :func:`picked_later`."""
    found = _later(same(x), lambda: value, of_logits, value)
    found.value = value
    return found


def _later(source: Logits, read: Callable[[], Tensor], of_logits: Callable[[Tensor], Tensor], like: Tensor) -> Later:
    more = {"read": read, "of_logits": of_logits, "value": None, "steps": []}
    return Later.made(source, of_logits, like.shape, like.dtype, **more)
