"""``Logits``: logits that stand for ``hidden @ weight.T`` and are computed only if somebody reads them.

    Logits(hidden, weight)       shape, dtype and device of the logits, memory of neither
    x[:, :-1], x.float(), x / T  another ``Logits``: acts on the hidden states, or on a factor
    logprobs(x, rows)            reads hidden states and weight, and never has logits
    anything else                computes the logits (``computed``), counts it with the caller's place, warns once

A logit is ``gain * f(x)``, where x is the head's product and f is the identity, or ``tanh(squash * x)`` under a softcap
that a model applies itself. ``Logits.given`` says of logits that exist what ``Logits`` says of those that do not.
"""

from __future__ import annotations

import importlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from logitless.errors import LogitlessError
from logitless.errors.arguments import dense, instead_of_tensor, refuse_transforms, refused
from logitless.notes import place
from logitless.operands.applied import applied, in_our_names
from logitless.operands.graph import Behind, Edge, laid_out, span, views_of, without_result, wrapper
from logitless.operands.lora import LoRA
from logitless.operands.stands import Bits, Linear, Match, Precision, Stands, product_dtype
from logitless.operands.unit import READ, end_reading, reading
from logitless.spec import VocabShard, graph_break

aten = torch.ops.aten

MADE: Counter[str] = Counter()
"""How often logits were computed after all, by ``file:line``."""


class LogitsMade(UserWarning):
    """Deferred logits were computed, because code read them in a way that hidden states cannot serve."""


@dataclass(frozen=True, eq=False)
class Given:
    """Logits that exist, and their options. Made by :meth:`Logits.given`."""

    logits: Tensor
    shard: VocabShard | None = None
    overwrite: bool = False
    bits: Bits = "fast"


class Logits(Tensor):
    """Logits of a linear head that are not computed: ``hidden @ weight.T + bias``.

    A tensor to whoever passes it on. Slices, views, transposes and concatenations of leading dimensions, casts,
    multiplication and division by a number or by one number per row, ``detach``, ``clone``, ``contiguous`` and
    ``sum()`` act on the hidden states. Any other operation computes the logits, is counted with its place in the
    caller's code and warns once for each place.

    Args:
        hidden: ``[..., D]`` hidden states; a DTensor is taken if replicated, or with ``sequence_parallel`` if sharded
            by tokens over the group of ``shard``.
        weight: ``[V, D]`` of the head, or a :class:`LoRA`. A DTensor is taken if replicated, or if sharded by rows over
            the group of ``shard=VocabShard.of(weight)``. A frozen weight takes two products instead of four. In float32
            beside hidden states of 16 bits it is multiplied as two parts of 16 bits, nearly as exactly as in float32,
            and its gradient is float32.
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
        tf32: multiply float32 operands in TF32: ``precision="tf32"``.
        precision: how float32 operands are multiplied on an accelerator. ``"float32"`` keeps their 24 bits;
            ``"bfloat16x3"`` 16 of them, in three bfloat16 products instead of 14 times the time of one, with gradients
            as of 16-bit operands; ``"tf32"`` 11, in two.
        bits: ``"canonical"`` adds up columns in one order for all, so that a row has the same bits from logits and from
            hidden states, in every batch, chunk, tile and budget, and under every tensor-parallel degree whose shards
            begin at multiples of 128.
        strict: raise where the logits would be computed.

    >>> logits = Logits(torch.zeros(2, 3, 4), torch.zeros(9, 4))
    >>> logits[:, :-1].float()
    Logits([2, 2, 9], torch.float32)
    """

    in_memory = False
    shard: VocabShard | None
    _stands: Stands
    _behind: Stands | None
    _edge: bool
    _watched: bool
    _memo: dict[Any, Any]
    _read: bool
    _needs: list[tuple[Tensor, bool]]
    _versions: list[tuple[str, Tensor, int]]
    _rows: Tensor | None
    _changes: list[tuple[str, tuple[int, int]]]
    _seen: int

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
        precision: Precision = "float32",
        bits: Bits = "fast",
        strict: bool = False,
    ) -> Logits:
        matrix = weight.weight if isinstance(weight, LoRA) else weight
        if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
            refuse_transforms("Logits")
        given = (hidden, matrix, *(x for x in (bias, weight_grad) if x is not None))
        if not all(isinstance(x, Tensor) and x.layout == torch.strided for x in given):
            _check_tensors(hidden=hidden, weight=matrix, bias=bias, weight_grad=weight_grad)
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
            precision=precision,
            bits=bits,
            strict=strict,
        )
        dtype = hidden.dtype if matrix.dtype == hidden.dtype else product_dtype(hidden, matrix)
        return made(Stands(hidden, weight, linear, dtype), cls)

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            """Type checkers read this signature, and would take that of a plain tensor without it."""

    @staticmethod
    def given(
        logits: Tensor, *, shard: VocabShard | None = None, overwrite: bool = False, bits: Bits = "fast"
    ) -> Given:
        """Logits that exist, for a verb.

        Args:
            logits: ``[..., V]`` float32, bfloat16, float16 or float64; only the last dimension must be contiguous. A
                DTensor is taken if replicated, or if sharded by its last dimension over the group of ``shard``.
            shard: which columns live here, and the group that holds the rest. One ``all_gather`` in forward, nothing in
                backward: every rank of the group must go on to compute the same loss.
            overwrite: write the gradient over the logits in backward instead of into a new buffer. The logits must be
                neither a leaf nor a view, and are lost after backward.
            bits: as for :class:`Logits`.
        """
        return Given(logits, shard, overwrite, bits)

    hidden = property(lambda self: self.stands().hidden, doc="``[..., D]`` hidden states.")
    weight = property(lambda self: self.stands().weight, doc="``[V, D]`` of the head, or a :class:`LoRA`.")
    linear = property(lambda self: self.stands().linear, doc="The options of the head.")
    squash = property(lambda self: self._stands.squash, doc="Factor inside tanh under a softcap; 0 without one.")

    @property
    def gain(self) -> float | Tensor:
        """Factor of all logits, or one for each row ``[...]``."""
        return self._stands.gain

    @gain.setter
    def gain(self, value: float | Tensor) -> None:
        self._stands.gain = value
        if self._behind is not None:
            self._behind.gain = value
        # A copy that shares the memo stands for the logits before the change.
        self._memo = {}
        self._changes.append((place(), span(self.place_of_rows())))
        self._seen = len(self._changes)

    def stands(self) -> Stands:
        """Hidden states, weight and the rest; raises where they have changed since the logits were made. Where somebody
        watches the gradient of the logits, the tensors stand behind them in the graph."""
        weight = self._stands.weight
        matrix = weight.weight if isinstance(weight, LoRA) else weight
        # A plain weight in memory has its numbers; any other may have to be gathered.
        plain = type(matrix) in (Tensor, torch.nn.Parameter) and matrix.untyped_storage().size() > 0
        # FSDP2's is gathered by readings alone.
        if self._stands.unit is None and (not matrix.numel() or not plain):
            self._stands.require()
        if self._seen != len(self._changes):
            self._refuse_changes()
        watched = self._stands.watched
        changed = [name for name, x, version in self._versions if x._version != version]
        if changed or (watched is not None and watched.changed()):
            raise LogitlessError(
                f"Logits: {(*changed, 'weight')[0]} was changed in place after the logits were made, so that they "
                f"stand for other numbers now. Read the logits before the change, or make them again."
            )
        if not torch.is_grad_enabled():
            return self._stands
        # Parameters may have been frozen since, as those of an adapter that is off: a gradient goes where it went then.
        if self._edge and not self._watched and all(x.requires_grad == need for x, need in self._needs):
            self._read = True
            return self._stands
        if self._behind is None:
            tensors = self._stands.tensors()
            if self.requires_grad:
                new = Behind.apply(self, tensors, [need for _, need in self._needs])
            elif any(x.requires_grad for x in tensors):
                # Logits that were made where no gradient is recorded have none.
                new = [x.detach() for x in tensors]
            else:
                return self._stands
            self._behind = self._stands.of(new)
        return self._behind

    def opened(self) -> Stands:
        """The same for a reading that is under way, with the weight whole."""
        now = self.stands()
        if now.unit is not None:
            now.require(torch.is_grad_enabled() and self.requires_grad)
        return now

    def place_of_rows(self) -> Tensor:
        """The rows as torch would have them in memory, whose strides tell views from copies. It has no memory."""
        if self._rows is None:
            self._rows = laid_out(self.shape[:-1])
        return self._rows

    def _refuse_changes(self) -> None:
        """Raise if rows of these were changed in place through a view, or through what these are a view of."""
        first, last = span(self.place_of_rows())
        for where, (low, high) in self._changes[self._seen :]:
            if low <= last and first <= high:
                raise LogitlessError(
                    f"Logits: these share memory with logits that were changed in place at {where}, by which torch "
                    f"would have changed them, too. Take the view after the change, or change a copy: "
                    f"logits / temperature."
                )
        self._seen = len(self._changes)

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Run ``hook`` in backward, once the gradients of hidden states and weight are known and before they go on.

        Wrappers such as FSDP register hooks on a model's output. There is no gradient of the logits: the hook is given
        a tensor of its shape without numbers, which can be added and scaled.
        """
        if not callable(hook):
            raise refused("Logits.register_hook: hook", "a function", hook)
        if self._read and not self._watched:
            # Backward of an earlier reading does not pass the logits, but the tensors that it read.
            for x in self._stands.tensors():
                if x.requires_grad:
                    return x.register_hook(lambda _: without_result(hook))
        self._watched = True
        with torch._C.DisableTorchFunctionSubclass():
            return super().register_hook(hook)

    def __repr__(self, **_: Any) -> str:
        return f"Logits({list(self.shape)}, {self.dtype})"

    @reading
    def computed(self) -> Tensor:
        """The logits, computed as the head would: a plain tensor with a graph."""
        return self.opened().computed()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Not is_compiling: that is also true in what the compiler itself runs, which has no graph to break.
        if torch.compiler.is_dynamo_compiling():
            return graph_break(cls.__torch_function__, func, types, args, kwargs)
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        if func is torch.autograd.grad:
            inputs = kwargs.get("inputs", args[1] if len(args) > 1 else ())
            for x in inputs if isinstance(inputs, (tuple, list)) else (inputs,):
                if isinstance(x, Logits):
                    raise no_gradient(x, name)
        if name == "__get__":
            name = attribute(func)
            if name not in VALUES:
                args[0]._watched |= name == "grad_fn"
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
        elif (
            func in ATTRIBUTES or name in ATTRIBUTE_NAMES or (name == "__set__" and attribute(func) == "requires_grad")
        ):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        since, found = len(READ.units), NotImplemented
        try:
            for found in _answers(name, args, kwargs):
                if found is not NotImplemented:
                    return found
        finally:
            if len(READ.units) > since:
                end_reading(since, found if isinstance(found, tuple) else (found,))
        refuse_change(func, name, args, kwargs)
        given = real(args, name)
        answer = func(*given, **real(kwargs, name))
        if args and isinstance(args[0], Logits):
            args[0]._versions += views_of(given[0], answer)
        return answer

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach_.default:
            return args[0]
        whole = func is aten.view.default and list(args[1]) == list(args[0].shape)
        if whole or func in (aten.detach.default, aten.alias.default, aten.clone.default):
            # Autograd itself makes this call for a tensor that a Function returns as it came, and adds the edge.
            with torch.no_grad():
                return made(args[0]._stands, type(args[0]))
        raise LogitlessError(
            f"Logits: {func} reached logits that were not computed below torch's Python functions, at {place()}. "
            f"Compute them there with logits.computed(), or keep the model's own: logitless.defer(model) is reversible."
        )


RULES: dict[str, Callable[..., Any]] = {}
"""Rules by the name of a function of torch: other ``Logits``, or NotImplemented; filled by ``passed_on``."""

SERVED: dict[str, Callable[..., Any]] = {}
"""Readings by the name of a function of torch that they answer: its result, or NotImplemented; see ``READERS``."""

READERS = "logitless.deferred.served"
"""The module that fills ``SERVED``. It is imported by name, since it stands above this file: it calls the verbs."""

METRICS = "metrics of rows"
"""What logits and their detached copies remember together; see ``logitless.deferred.metrics``."""

ATTRIBUTES = frozenset({Tensor.size, Tensor.dim, Tensor.element_size})
"""Functions that the wrapper itself answers."""

ATTRIBUTE_NAMES = frozenset(
    {
        *("__len__", "is_contiguous", "stride", "_is_view", "is_inference", "nelement", "ndimension", "get_device"),
        *("__hash__", "storage_offset", "is_signed", "_register_hook_dict", "backward", "grad", "requires_grad_"),
        *("is_floating_point", "is_complex", "is_conj", "is_neg", "numel", "result_type"),
    }
)
"""Names of more functions that the wrapper itself answers: of torch, and methods that are no attribute of Tensor."""

VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Attributes that are tensors; the wrapper itself answers all others."""


def _answers(name: str, args: Any, kwargs: Any) -> Iterator[Any]:
    """The answer of a rule to a function, and then that of a reading."""
    args, kwargs = in_our_names(args, kwargs)
    rule = RULES.get(name)
    if rule is not None and args:
        yield applied(rule, args, kwargs)
    if not SERVED:
        importlib.import_module(READERS)
    served = SERVED.get(name)
    if served is not None:
        yield applied(served, args, kwargs)


def _check_tensors(**given: Any) -> None:
    """Raise for an argument that is no dense tensor; a bias and a buffer may be None."""
    for name, x in given.items():
        if isinstance(x, Tensor):
            dense(x, f"Logits: {name}", "a dense tensor")
        elif x is not None or name in ("hidden", "weight"):
            hint = instead_of_tensor(x, name)
            raise LogitlessError(f"Logits: {name} must be a tensor but is {type(x).__name__}.{hint}")


def shard_of(logits: Any) -> VocabShard | None:
    """The shard that came with logits of any form; None for a plain tensor."""
    return getattr(logits, "shard", None)


def like(x: Logits, hidden: Tensor | None = None, **changes: Any) -> Logits:
    """A copy of logits, of other hidden states, or with another dtype, gain, squash, weight or head."""
    now = x.stands()
    return made(replace(now, hidden=now.hidden if hidden is None else hidden, **changes), type(x))


def attribute(func: Any) -> str:
    """The name of the attribute that ``func`` gets."""
    return getattr(getattr(func, "__self__", None), "__name__", "")


def made(stands: Stands, cls: type[Logits] = Logits) -> Logits:
    """Logits that stand for this, with an edge in the graph to every tensor where one needs a gradient."""
    if torch.compiler.is_dynamo_compiling():
        return graph_break(made, stands, cls)
    named = stands.named()
    edge = torch.is_grad_enabled() and any(x.requires_grad for x in named.values())
    new = wrapper(cls, stands.shape, stands.dtype, stands.hidden.device)
    if edge:
        new = Edge.apply([new], stands.computed_from, *named.values())
    new._stands, new._behind, new._edge, new._watched, new._read = stands, None, edge, False, False
    # Results that torch's functions have read already. The edge does not hold them: that would be a circle.
    new._memo = {}
    # Where these and all views of them were changed in place, and how many of those changes they know of.
    new._rows = None
    new._changes, new._seen = [], 0
    new.shard = stands.linear.shard
    new._needs = [(x, x.requires_grad) for x in named.values()]
    new._versions = [(name, x, x._version) for name, x in named.items() if not x.is_inference()]
    return new


def no_gradient(x: Tensor, name: str) -> LogitlessError:
    """The error of code that asks for the gradient of what was not computed: readings do not pass it."""
    return LogitlessError(
        f"Logits: {name} at {place()} asks for the gradient of {x!r}, which was not computed. Compute it there first: "
        f"x = x.computed()."
    )


# Functions that compute the logits after all.


def real(x: Any, name: str) -> Any:
    """Arguments of a function with the logits in them computed; each time is counted with the caller's place."""
    if isinstance(x, Logits):
        count_made(x, name)
        return x.computed()
    if isinstance(x, (list, tuple)):
        return type(x)(real(item, name) for item in x)
    if isinstance(x, dict):
        return {key: real(item, name) for key, item in x.items()}
    return x


def count_made(x: Logits, name: str) -> None:
    """Count that logits are computed, and warn once for each place; raise where they may not be."""
    where = place()
    if x._stands.linear.strict:
        raise LogitlessError(
            f"Logits: {name} at {where} reads logits that were not computed, and strict=True forbids to compute them. "
            f"Read them with logitless.logprobs, or compute them with logits.computed()."
        )
    MADE[where] += 1
    if MADE[where] == 1:
        text = f"logits were computed, {list(x.shape)} {x.dtype}, because {name} reads them at {where}"
        warnings.warn(text, LogitsMade, stacklevel=2)


def refuse_change(func: Any, name: str, args: Any, kwargs: Any) -> None:
    """Raise for a function that would write to logits that are not in memory, or ask for their address."""
    first = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
    collective = name in COLLECTIVES and getattr(func, "__module__", "").startswith("torch.distributed")
    changes = collective or name in WRITES or (name.endswith("_") and not name.endswith("__"))
    written = (first if changes else None, kwargs.get("out"), *_written(func, args, kwargs))
    # Logits are computed anew for each reading, so that what is written to them would be lost.
    if any(getattr(type(x), "in_memory", True) is False for x in written):
        raise LogitlessError(
            f"Logits: {name} at {place()} needs logits in memory, and these were not computed. Compute them there, "
            f"logits = logits.computed(), or use a function that returns a new tensor. To keep the model's own logits: "
            f"logitless.defer(model) is reversible."
        )


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """The arguments that an operator of ``torch.ops`` says it writes to."""
    packet = [getattr(func, name) for name in func.overloads()] if hasattr(func, "overloads") else [func]
    for schema in (x._schema for x in packet if hasattr(x, "_schema")):
        for i, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield args[i] if i < len(args) and not argument.kwarg_only else kwargs.get(argument.name)


WRITES = frozenset(
    {
        *("__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__imod__"),
        *("__ifloordiv__", "__iand__", "__ior__", "__ixor__", "data_ptr", "untyped_storage", "storage", "retain_grad"),
        *("__dlpack__", "__array__"),
    }
)
"""Functions whose effect on a copy would be lost."""

COLLECTIVES = frozenset(
    {
        *("all_reduce", "broadcast", "reduce", "scatter", "recv", "irecv", "reduce_scatter", "reduce_scatter_tensor"),
        *("all_gather_into_tensor", "all_gather_single", "all_to_all_single"),
    }
)
"""Functions of torch.distributed that write to their first argument."""
