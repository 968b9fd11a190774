"""``Logits``: logits that stand for ``hidden @ weight.T`` and are computed only if somebody reads them.

    Logits(hidden, weight)       shape, dtype and device of the logits, memory of neither
    x[:, :-1], x.float(), x / T  another ``Logits``: acts on the hidden states, or on a factor
    logprobs(x, rows)            reads hidden states and weight, and never has logits
    anything else                computes the logits (``computed``); counted, with its place, and warned about once

A logit is ``gain * f(x)``, where x is the head's product and f is the identity, or ``tanh(squash * x)`` under a softcap
that a model applies itself. ``Logits.given`` says of logits that exist what ``Logits`` says of those that do not.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from logitless.errors import LogitlessError
from logitless.operands.checks import check_tensors
from logitless.operands.lora import LoRA
from logitless.spec import VocabShard

Match = Literal["bfloat16", "float16"] | None

MADE: Counter[str] = Counter()
"""How often logits were computed after all, by ``file:line``."""


class LogitsMade(UserWarning):
    """Deferred logits were computed, because code read them in a way that hidden states cannot serve."""


@dataclass(frozen=True, eq=False)
class Given:
    """Logits that exist, with what a verb should know of them. Made by :meth:`Logits.given`."""

    logits: Tensor
    shard: VocabShard | None = None
    overwrite: bool = False


@dataclass(frozen=True, eq=False)
class Linear:
    """What a head is and how its product is made: the keyword arguments of :class:`Logits`."""

    bias: Tensor | None = None
    shard: VocabShard | None = None
    sequence_parallel: bool = False
    hidden_grad: Literal["reduced", "partial"] = "reduced"
    weight_grad: Tensor | None = None
    grad_scale: float | Tensor = 1.0
    sparse_weight_grad: bool = False
    match: Match = None
    tf32: bool = False
    batch_invariant: bool = False
    strict: bool = False


class Logits(Tensor):
    """Logits of a linear head that are not computed: ``hidden @ weight.T + bias``.

    A tensor to whoever passes it on. Slices, views, transposes and concatenations of leading dimensions, casts,
    multiplication and division by a number or by one number per row, ``detach``, ``clone``, ``contiguous`` and
    ``sum()`` act on the hidden states. Any other operation computes the logits, is counted with its place in the
    caller's code and warns once for each place.

    Args:
        hidden: ``[..., D]`` hidden states; a DTensor is taken if replicated, or with ``sequence_parallel`` if
            sharded by tokens over the group of ``shard``.
        weight: ``[V, D]`` of the head, or a :class:`LoRA`. A DTensor is taken if replicated, or if sharded by rows over
            the group of ``shard=VocabShard.of(weight)``. A frozen weight takes two products instead of four.
        bias: ``[V]`` or None.
        shard: which columns live here, and the group that holds the rest.
        sequence_parallel: hidden states are this rank's tokens, gathered over the group; their gradient is summed and
            scattered.
        hidden_grad: under a shard, ``"reduced"`` sums the gradient of the hidden states over the group, and
            ``"partial"`` leaves that to the caller.
        weight_grad: float32 ``[V, D]`` buffer that the weight's gradient is added to, such as Megatron's ``main_grad``;
            ``weight.grad`` is then left alone.
        grad_scale: with ``weight_grad``, the gradient that will arrive at a :func:`policy_loss` in backward (a loss
            scale over the number of micro-batches, say), a number or a 0-dim tensor: such a loss adds to the buffer in
            forward. Another one arriving raises on CPU and makes the gradient of hidden NaN on an accelerator.
        sparse_weight_grad: where the scope is the support, the weight's gradient as a sparse tensor of the rows read.
        match: round the logits to ``"bfloat16"`` or ``"float16"``, as a head in that dtype does, before the softmax.
            None keeps the float32 sums of the product.
        tf32: multiply float32 operands in TF32.
        batch_invariant: tiles of one height, so that a row has the same bits in every batch.
        strict: raise where the logits would be computed.

    >>> logits = Logits(torch.zeros(2, 3, 4), torch.zeros(9, 4))
    >>> logits[:, :-1].float()
    Logits([2, 2, 9], torch.float32)
    """

    hidden: Tensor
    weight: Tensor | LoRA
    linear: Linear
    shard: VocabShard | None
    gain: float | Tensor
    squash: float
    hooks: list[Callable[[Tensor], Any]]
    _versions: list[tuple[str, Tensor, int]]

    @staticmethod
    def __new__(
        cls,
        hidden: Tensor,
        weight: Tensor | LoRA,
        *,
        bias: Tensor | None = None,
        shard: VocabShard | None = None,
        sequence_parallel: bool = False,
        hidden_grad: Literal["reduced", "partial"] = "reduced",
        weight_grad: Tensor | None = None,
        grad_scale: float | Tensor = 1.0,
        sparse_weight_grad: bool = False,
        match: Match = None,
        tf32: bool = False,
        batch_invariant: bool = False,
        strict: bool = False,
    ) -> Logits:
        matrix = weight.weight if isinstance(weight, LoRA) else weight
        if not all(isinstance(x, Tensor | None) for x in (bias, weight_grad)) or not (
            isinstance(hidden, Tensor) and isinstance(matrix, Tensor)
        ):
            check_tensors("Logits", hidden=hidden, weight=matrix, bias=bias, weight_grad=weight_grad)
        linear = Linear(
            bias=bias,
            shard=shard,
            sequence_parallel=sequence_parallel,
            hidden_grad=hidden_grad,
            weight_grad=weight_grad,
            grad_scale=grad_scale,
            sparse_weight_grad=sparse_weight_grad,
            match=match,
            tf32=tf32,
            batch_invariant=batch_invariant,
            strict=strict,
        )
        return _made(cls, hidden, weight, linear, hidden.dtype)

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            """Nothing: for type checkers, which would otherwise take the arguments of a plain tensor's."""

    @staticmethod
    def given(logits: Tensor, *, shard: VocabShard | None = None, overwrite: bool = False) -> Given:
        """Logits that exist, for a verb.

        Args:
            logits: ``[..., V]`` float32, bfloat16, float16 or float64; only the last dimension must be contiguous. A
                DTensor is taken if replicated, or if sharded by its last dimension over the group of ``shard``.
            shard: which columns live here, and the group that holds the rest. One ``all_gather`` in forward, nothing in
                backward: every rank of the group must go on to compute the same loss.
            overwrite: write the gradient over the logits in backward instead of into a new buffer. The logits must be
                neither a leaf nor a view, and are lost after backward.
        """
        return Given(logits, shard, overwrite)

    @property
    def requires_grad(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight = self.weight
        parts = (weight.weight, weight.a, weight.b) if isinstance(weight, LoRA) else (weight,)
        return any(x is not None and x.requires_grad for x in (self.hidden, self.linear.bias, *parts))

    is_leaf = property(lambda self: False)  # pyright: ignore[reportAssignmentType]

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Run ``hook`` in backward, once the gradients of hidden states and weight are known and before they go on.

        Wrappers such as FSDP register hooks on a model's output. There is no gradient of the logits: the hook is given
        an empty tensor.
        """
        self.hooks.append(hook)
        return _Handle(self.hooks, hook)

    def __repr__(self, **_: Any) -> str:
        return f"Logits({list(self.shape)}, {self.dtype})"

    def read(self) -> tuple[Tensor, Tensor | LoRA, Tensor | None]:
        """Hidden states, weight and bias, unchanged since the head's forward, behind the hooks on the logits."""
        for name, x, version in self._versions:
            if x._version != version:
                raise LogitlessError(
                    f"Logits: {name} was changed in place after the logits were made, so that they stand for other "
                    f"numbers now. Read the logits before the change, or make them again."
                )
        hidden, weight, bias = self.hidden, self.weight, self.linear.bias
        if self.hooks and isinstance(weight, Tensor) and torch.is_grad_enabled():
            hidden, weight = _Gate.apply(self.hooks, hidden, weight)  # pyright: ignore[reportGeneralTypeIssues]
        return hidden, weight, bias

    def computed(self) -> Tensor:
        """The logits, computed as the head would: a plain tensor with a graph."""
        hidden, weight, bias = self.read()
        if isinstance(weight, LoRA):
            low = weight.inner(hidden).to(hidden.dtype) @ weight.b.to(hidden.dtype).T
            x = torch.nn.functional.linear(hidden, weight.weight, bias) + low
        else:
            x = torch.nn.functional.linear(hidden, weight, bias)
        if self.linear.match is not None:
            x = x.to(getattr(torch, self.linear.match))
        x = x.to(torch.promote_types(x.dtype, self.dtype))
        if self.squash:
            x = torch.tanh(x * self.squash)
        gain = self.gain[..., None] if isinstance(self.gain, Tensor) else self.gain
        return (x if isinstance(gain, float) and gain == 1.0 else x * gain).to(self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        if func in ATTRIBUTES or name in ATTRIBUTE_NAMES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        rule = RULES.get(name if name != "__get__" else _attribute(func))
        if rule is not None and args:
            found = rule(*args, **kwargs)
            if found is not NotImplemented:
                return found
        served = SERVED.get(func) or SERVED.get(name)
        if served is not None:
            found = served(*args, **kwargs)
            if found is not NotImplemented:
                return found
        return func(*_real(args, name), **_real(kwargs, name))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise LogitlessError(
            f"Logits: {func} reached logits that were not computed, below torch's Python functions, at {place()}. "
            f"Compute "
            f"them there with logits.computed(), or keep the model's own logits (logitless.defer(model) is reversible)."
        )


RULES: dict[str, Callable[..., Any]] = {}
"""What a function of that name makes of logits that are not computed, or NotImplemented; see ``passed_on``."""

SERVED: dict[Any, Callable[..., Any]] = {}
"""Functions of torch that a reading answers instead, by function or name; filled by who can read."""

ATTRIBUTES = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_meta", "is_cpu", "is_sparse")
) | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size}
"""What the wrapper itself answers."""

ATTRIBUTE_NAMES = frozenset(
    {
        "__len__",
        "is_contiguous",
        "stride",
        "_is_view",
        "is_inference",
        "nelement",
        "ndimension",
        "get_device",
        "__hash__",
    }
)


def shard_of(logits: Any) -> VocabShard | None:
    """The shard that came with logits of any form; None for a plain tensor."""
    return getattr(logits, "shard", None)


def like(x: Logits, hidden: Tensor | None = None, **changes: Any) -> Logits:
    """The same logits of other hidden states, or with another dtype, gain or squash."""
    linear, weight = changes.get("linear", x.linear), changes.get("weight", x.weight)
    dtype, gain = changes.get("dtype", x.dtype), changes.get("gain", x.gain)
    new = _made(type(x), x.hidden if hidden is None else hidden, weight, linear, dtype)
    new.gain, new.squash, new.hooks = gain, changes.get("squash", x.squash), x.hooks
    return new


def _attribute(func: Any) -> str:
    return getattr(getattr(func, "__self__", None), "__name__", "")


def place() -> str:
    """``file:line`` of the innermost code that is neither this package nor torch."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] not in ("logitless", "torch"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "nowhere in particular"


def _made(cls: Any, hidden: Tensor, weight: Tensor | LoRA, linear: Linear, dtype: torch.dtype) -> Logits:
    if torch.compiler.is_compiling():
        return _graph_break(cls, hidden, weight, linear, dtype)
    matrix = weight.weight if isinstance(weight, LoRA) else weight
    shape = (*hidden.shape[:-1], matrix.shape[0] if matrix.dim() else 1)
    new = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)  # pyright: ignore[reportAttributeAccessIssue]
    new.hidden, new.weight, new.linear, new.gain, new.squash, new.hooks = hidden, weight, linear, 1.0, 0.0, []
    new.shard = linear.shard
    read = (("hidden", hidden), ("weight", matrix), ("bias", linear.bias))
    new._versions = [(name, x, x._version) for name, x in read if x is not None and not x.is_inference()]
    return new


# Only under a compiler: a call outside of one would import it, and with it Triton. Torch's public
# torch.compiler.disable imports it as soon as it is applied.
@torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]
def _graph_break(*arguments: Any) -> Logits:
    return _made(*arguments)


class _Handle:
    """What ``register_hook`` returns."""

    def __init__(self, hooks: list[Any], hook: Any) -> None:
        self.hooks, self.hook = hooks, hook

    def remove(self) -> None:
        if self.hook in self.hooks:
            self.hooks.remove(self.hook)


class _Gate(torch.autograd.Function):
    """Hidden states and weight unchanged; backward runs the hooks on the logits once both gradients are known."""

    @staticmethod
    def forward(ctx: Any, hooks: list[Any], hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.hooks = hooks
        ctx.set_materialize_grads(False)
        return hidden.view_as(hidden), weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, d_hidden: Tensor | None, d_weight: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        for hook in ctx.hooks:
            hook(torch.empty(0))
        return None, d_hidden, d_weight


# What computes the logits after all.


def _real(x: Any, name: str) -> Any:
    if isinstance(x, Logits):
        if x.linear.strict:
            raise LogitlessError(
                f"Logits: {name} at {place()} reads logits that were not computed, and strict=True forbids it. "
                f"Read them with logitless.logprobs, or compute them with logits.computed()."
            )
        where = place()
        MADE[where] += 1
        if MADE[where] == 1:
            text = f"logits were computed, {list(x.shape)} {x.dtype}, because {name} reads them at {where}"
            warnings.warn(text, LogitsMade, stacklevel=2)
        return x.computed()
    if isinstance(x, (list, tuple)):
        return type(x)(_real(item, name) for item in x)
    if isinstance(x, dict):
        return {key: _real(item, name) for key, item in x.items()}
    return x
