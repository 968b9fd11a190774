"""``defer``: a model whose head returns ``Logits`` instead of multiplying. Nothing else of the model changes.

The forward of the head's module is replaced, and no other: the model's own forward goes on to slice, scale, softcap and
return what the head gave it, and hooks of wrappers run as before. What the head is (weight, bias, LoRA, dtype) is read
when it is called, inside of its module, where FSDP has gathered the weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from logitless.deferred import column_parallel
from logitless.deferred.bound import Bound
from logitless.deferred.placed import (
    Parts,
    Placed,
    Redistributing,
    Replicated,
    Style,
    check_placements,
    is_placed,
    wrapper_of,
)
from logitless.errors import LogitlessError, did_you_mean
from logitless.errors.arguments import check_flags, refused
from logitless.notes import log_once
from logitless.operands import Logits, LoRA
from logitless.operands.logits import made
from logitless.operands.peft import active_adapter, head_weight
from logitless.operands.stands import Match, Watch
from logitless.operands.unit import Unit, gathered
from logitless.spec import VocabShard, parse_memory, untraced

FEW = 256
"""Rows up to which a head without a graph multiplies as ever: a step of generation."""

OPTIONS = ("bits", "precision", "strict", "tf32")
"""Keywords of ``Logits`` that ``defer`` passes on."""

NAMES = ("lm_head", "output_layer")
"""Where a head is looked for in a model that does not tell."""

PARTITIONED = "ds_id"
"""What a parameter has that ZeRO-3 partitions."""

HALF: dict[torch.dtype, Match] = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


class _Around:
    """Who is told of logits that are computed after all; and whether the code that gets the logits knows those of a
    DTensor (``placed``).

    A copy of the head has none of these: what holds the copy is another model.
    """

    def __init__(self, refused: Callable[[str], None] | None = None, placed: bool = True) -> None:
        self.refused, self.placed = refused, placed
        self._shard: tuple[Any, VocabShard] | None = None

    def __reduce__(self) -> Any:
        return _Around, ()

    def shard_of(self, weight: Any) -> VocabShard | None:
        """The columns here of a head that is a DTensor; a collective of its group, once."""
        if not weight.placements[0].is_shard():
            return None
        if self._shard is None or self._shard[0] != weight.device_mesh:
            self._shard = weight.device_mesh, VocabShard.of(weight)
        return self._shard[1]


@dataclass(frozen=True, eq=False)
class _Deferred:
    """Settings of a head whose forward was replaced."""

    rounded: bool
    memory: int | str | None
    options: dict[str, Any]
    around: _Around
    shard: Any = None
    style: Style | Redistributing | None = None


class Deferral:
    """A model that was deferred: ``undo()`` puts its head's forward back, and so does the end of a ``with`` block.

    Attributes:
        model: the model.
    """

    def __init__(self, model: Any, layers: list[Any]) -> None:
        self.model, self._layers = model, layers

    def undo(self) -> None:
        """Put the head's own forward back, and the model's own loss."""
        _restore("undo", self._layers, self.model)

    def __enter__(self) -> Any:
        return self.model

    def __exit__(self, *_: Any) -> None:
        self.undo()

    def __repr__(self) -> str:
        heads = ", ".join(type(layer).__name__ for layer in self._layers)
        return f"Deferral({type(self.model).__name__}, head {heads})"


def defer(
    model: Any,
    *,
    head: str | nn.Module | None = None,
    rounded: bool = True,
    memory: int | str | None = None,
    **options: Any,
) -> Deferral:
    """Let a model return logits that are not computed: :class:`Logits`, a tensor to all code that passes it on.

    The model's own code, and yours, stays as it is. ``model(ids, labels=labels).loss``, ``F.cross_entropy``,
    ``log_softmax(...).gather(...)``, entropies, ``argmax`` and :func:`logprobs` read hidden states and the head's
    weight; what reads the logits in another way computes them, is counted and warns once for each place.

    Args:
        model: a Transformers causal LM, also in peft, DDP or FSDP; Megatron's ``GPTModel``, or a list of its chunks; or
            any module with a linear head.
        head: the head's module, or its name in the model. None: what ``model.get_output_embeddings()`` says, or
            ``lm_head`` or ``output_layer``.
        rounded: round the logits to the dtype of the head's output before the softmax, as the head itself would. False
            keeps the float32 sums of the product, which is closer to the truth, and is what you want where the rollout
            engine's head is float32 too.
        memory: working memory of whatever reads the logits, as for :func:`logprobs`; None for 256MiB, and 1GiB
            for metrics of rows.
        options: ``strict``, ``precision``, ``tf32`` and ``bits`` of :class:`Logits`.

    Returns:
        :class:`Deferral`, to undo it. Without a graph, up to ``FEW`` rows are multiplied as ever, so that generation is
        what it was.

    Raises:
        LogitlessError: no head was found, or it does more than a linear layer.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    >>> with defer(model, head="1"):
    ...     model(torch.zeros(2, 3, dtype=torch.int64))
    Logits([2, 3, 9], torch.float32)
    """
    return defer_or_tell(model, None, head, rounded, memory, **options)


def defer_or_tell(
    model: Any,
    refused: Callable[[str], None] | None,
    head: str | nn.Module | None = None,
    rounded: bool = True,
    memory: int | str | None = None,
    placed: bool = True,
    **options: Any,
) -> Deferral:
    """:func:`defer`; a forward whose logits cannot be deferred computes them and tells why, unless ``refused`` is None:
    then it raises. Without ``placed`` those of a head that is a DTensor cannot be."""
    for name in options:
        if name not in OPTIONS:
            raise LogitlessError(f"defer: there is no option {name!r}.{did_you_mean(name, OPTIONS)}")
    check_flags("defer", rounded=rounded, **options)
    if memory is not None:
        parse_memory(memory)
    heads = [(chunk, _linears(_unit(chunk, head))) for chunk in _chunks(model)]
    for layer in (layer for _, layers in heads for layer in layers):
        _check(layer)
    for chunk, layers in heads:
        for layer in layers:
            parallel = _is_column_parallel(layer)
            shard = column_parallel.shard_of_layer(layer) if parallel else None
            around = _Around(refused, placed)
            style = wrapper_of(layer)
            layer._logitless_deferred = _Deferred(rounded, memory, options, around, shard, style)
            layer.forward = Bound(_wrap_column_parallel if parallel else _wrap, layer)
        owner = _owner_of_loss(chunk)
        if owner is not None and column_parallel.LOSS not in vars(owner):
            setattr(owner, column_parallel.LOSS, Bound(column_parallel.wrap_loss, owner, column_parallel.LOSS))
        log_once(f"deferred the head of {type(_unwrapped(chunk)).__name__}, logits are not computed")
    return Deferral(model, [layer for _, layers in heads for layer in layers])


def undefer(model: Any, *, head: str | nn.Module | None = None) -> None:
    """Put the own forward of a deferred model's head back."""
    _restore("undefer", [layer for chunk in _chunks(model) for layer in _linears(_head(chunk, head))], model)


def _restore(caller: str, layers: list[Any], model: Any) -> None:
    for layer in layers:
        if "_logitless_deferred" not in vars(layer):
            raise LogitlessError(f"{caller}: the head {type(layer).__name__} is not deferred.")
        if not isinstance(vars(layer).get("forward"), Bound):
            raise LogitlessError(f"{caller}: the head's forward was replaced by someone else since. Undo that first.")
    for layer in layers:
        style = layer._logitless_deferred.style
        del layer.forward, layer._logitless_deferred
        if style is not None:
            layer.forward = style.forward
    for chunk in _chunks(model):
        owner = _owner_of_loss(chunk)
        if owner is not None and isinstance(vars(owner).get(column_parallel.LOSS), Bound):
            delattr(owner, column_parallel.LOSS)


def is_without_logits(model: Any) -> bool:
    """Whether there is nothing to defer: a stage of a pipeline without a head, one output for each token, or a head
    that is deferred already."""
    inner = _unwrapped(model)
    if getattr(inner, "post_process", True) is False:
        return True
    layer = next((getattr(inner, name) for name in NAMES if hasattr(inner, name)), None)
    weight = getattr(layer, "weight", None)
    one = isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[0] == 1
    return one or (layer is not None and "_logitless_deferred" in vars(layer))


# The head of a model.


def _head(model: Any, head: Any) -> Any:
    """The module that makes the logits."""
    if isinstance(head, nn.Module):
        return head
    if not isinstance(model, nn.Module):
        raise LogitlessError(f"defer: model must be a torch.nn.Module but is {type(model).__name__}.")
    inner = _unwrapped(model)
    if head is not None:
        if not isinstance(head, str):
            raise refused("defer: head", "a module, its name in the model, or None", head)
        found = dict(inner.named_modules()).get(head)
        if found is None:
            names = [name for name, x in inner.named_modules() if isinstance(x, nn.Linear)]
            raise LogitlessError(f"defer: head: the model has no module {head!r}.{did_you_mean(head, names)}")
        return found
    tells = getattr(inner, "get_output_embeddings", None)
    found = tells() if callable(tells) else None
    found = next((getattr(inner, name) for name in NAMES if hasattr(inner, name)), None) if found is None else found
    if found is None:
        raise LogitlessError(
            f"defer: {type(inner).__name__} has neither get_output_embeddings() nor a module called "
            f"{' or '.join(NAMES)}. Name its head: defer(model, head='...'); a stage of a pipeline without one needs "
            f"no defer."
        )
    return found


def _chunks(model: Any) -> list[Any]:
    """The models of a list, or the one given; without those that say they have no head, as Megatron's stages do."""
    several = model if isinstance(model, (list, tuple)) else [model]
    if not several:
        raise refused("defer: model", "a torch.nn.Module, or a list of them", model)
    return [x for x in several if getattr(_unwrapped(x), "post_process", True) is not False]


def _unwrapped(model: Any) -> Any:
    """The model inside of DDP, FSDP1, Megatron's wrappers and torch.compile."""
    while True:
        for name in ("_orig_mod", "_fsdp_wrapped_module", "module"):
            inner = getattr(model, "_modules", {}).get(name)
            if isinstance(inner, nn.Module) and not hasattr(type(model), "get_output_embeddings"):
                model = inner
                break
        else:
            return model


def _owner_of_loss(model: Any) -> Any:
    """The Megatron model whose method makes losses of its logits; None for any other model."""
    inner = _unwrapped(model) if isinstance(model, nn.Module) else None
    return inner if hasattr(type(inner), column_parallel.LOSS) else None


def _linears(layer: Any) -> list[Any]:
    """The head; or, where peft trains copies of it (modules_to_save), the original and the copies it chooses from."""
    inner = layer._modules.get("_fsdp_wrapped_module")
    if inner is not None:
        return _linears(inner)
    copies = getattr(layer, "modules_to_save", None)
    return [layer] if copies is None else [layer.original_module, *copies.values()]


def _unit(model: Any, head: Any) -> Any:
    """The head; raises where its weight is gone when its forward ends."""
    layer = _head(model, head)
    strategy = getattr(getattr(layer, "sharding_strategy", None), "name", "")
    if strategy in ("FULL_SHARD", "HYBRID_SHARD"):
        raise LogitlessError(
            f"defer: the head is an FSDP1 unit of its own with {strategy}, which lets go of the weight where its "
            f"forward ends. Leave the head in the root unit, use FSDP2 (fully_shard), or use a PolicyHead."
        )
    return layer


def _is_column_parallel(layer: Any) -> bool:
    return any(kind.__name__ == column_parallel.NAME for kind in type(layer).__mro__)


def _check(layer: Any) -> None:
    """Raise for a head that is deferred already, or that does more than multiply."""
    if "_logitless_deferred" in vars(layer):
        raise LogitlessError("defer: this model is already deferred. Call undo() of what defer returned first.")
    if "forward" in vars(layer) and wrapper_of(layer) is None:
        raise LogitlessError("defer: the forward of the head was replaced by someone else. Undo that first.")
    if _is_column_parallel(layer):
        column_parallel.check_layer(layer)
        return
    if hasattr(layer, "base_layer"):
        # Refuses every adapter but a plain LoRA.
        active_adapter("defer", layer)
        layer = layer.base_layer
        if layer._forward_hooks or layer._forward_pre_hooks:
            raise LogitlessError(
                f"defer: {type(layer).__name__} inside of the LoRA on the head has forward hooks, which would not run. "
                f"Put them on the head."
            )
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        raise LogitlessError(
            f"defer: the head must be a torch.nn.Linear but is {type(layer).__name__}, which may do more than multiply "
            f"by its weight. Keep the model's own logits and pass them to logitless.logprobs."
        )


# The head's forward.


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        more = [name for name, x in {**dict(enumerate(args)), **kwargs}.items() if x is not None]
        if more:
            raise LogitlessError(
                f"defer: the head {type(self).__name__} was called with more than hidden states ({more[0]}), and only "
                f"its product is deferred. Keep the model's own logits: undo() of what defer returned."
            )
        style, refused = self._logitless_deferred.style, self._logitless_deferred.around.refused
        own = functools.partial(original, self) if style is None else style.forward
        if _computes(hidden):
            return own(hidden)
        try:
            return _logits(self, hidden) if style is None else style.output(_logits(self, style.hidden(hidden)))
        except LogitlessError as error:
            if refused is None:
                raise
            refused(str(error))
            return own(hidden)

    return forward


def _wrap_column_parallel(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, input_: Tensor, weight: Any = None, runtime_gather_output: Any = None) -> Any:
        settings: _Deferred = self._logitless_deferred
        gathered = self.gather_output if runtime_gather_output is None else runtime_gather_output
        # As inference asks for them.
        if gathered and _computes(input_):
            return original(self, input_, weight, runtime_gather_output)
        match = HALF.get(input_.dtype) if settings.rounded else None
        logits = column_parallel.logits_of_layer(self, input_, weight, settings.shard, match=match, **settings.options)
        spread = settings.shard.group if gathered and settings.shard is not None else None
        own = self.weight if weight is None else weight
        logits = _with(logits, own, memory=settings.memory, spread=spread)
        return logits, self.bias if self.skip_bias_add else None

    return forward


@untraced
def _with(logits: Logits, weight: Tensor, **more: Any) -> Logits:
    """The logits, which know the weight's parameter and more of what they stand for."""
    return made(replace(logits._stands, watched=Watch([weight]), **more))


def _computes(hidden: Tensor) -> bool:
    """Whether the head multiplies as ever: few rows, and no graph that would keep them."""
    return not torch.is_grad_enabled() and hidden.shape[:-1].numel() <= FEW


@untraced
def _logits(layer: Any, hidden: Tensor) -> Logits:
    """What the head's product would be."""
    settings: _Deferred = layer._logitless_deferred
    weight, base = head_weight("defer", layer), getattr(layer, "base_layer", layer)
    bias, matrix = base.bias, weight.weight if isinstance(weight, LoRA) else weight
    _check_dropout(weight)
    if hasattr(matrix, PARTITIONED):
        weight, bias = _held(weight), None if bias is None else bias.view_as(bias)
    parts = (weight.weight, weight.a, weight.b) if isinstance(weight, LoRA) else (weight,)
    used = [x for x in (*parts, bias) if x is not None]
    owners = [gathered(x) for x in used]
    # Of what FSDP2 gathered them of, where it has. peft merges an adapter through .data.
    known = [x if owner is None else owner[1] for x, owner in zip(used, owners, strict=True)]
    watched = Watch(known, lambda: tuple(getattr(layer, "merged_adapters", ())))
    own, shard, mesh = owners[0], None, None
    if is_placed(matrix):
        if own is not None and own[1] is matrix:
            raise LogitlessError(
                "defer: FSDP2 has the head's weight in a unit below the head, and it is whole in the forward of that "
                "unit alone. Make the head itself a unit, fully_shard(head), or leave it in the root unit."
            )
        if isinstance(weight, LoRA):
            raise LogitlessError(
                "defer: the head has a LoRA, and its weight is a DTensor: tensor parallelism has sharded it. Merge the "
                "LoRA, leave the head out of the adapter, or keep the model's own logits (undefer)."
            )
        if not settings.around.placed:
            raise LogitlessError(
                "defer: the head's weight is a DTensor: tensor parallelism has sharded it, and the host's own code was "
                "not tried on its logits. To have them deferred all the same, call logitless.defer(model) yourself."
            )
        check_placements(hidden, weight, bias)
        mesh = weight.device_mesh
        hidden, weight, bias, shard = Parts.of(hidden, weight, bias, settings.around.shard_of(weight))
    kind = hidden.device.type
    # As a linear layer does under autocast, which leaves float64 alone. Logits may be read outside of it.
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        hidden, bias, weight = hidden.to(dtype), None if bias is None else bias.to(dtype), _cast(weight, dtype)
    match = HALF.get(hidden.dtype) if settings.rounded else None
    part = {} if shard is None else {"shard": shard, "hidden_grad": "partial"}
    logits = Logits(hidden, weight, bias=bias, match=match, **part, **settings.options)
    unit = None if own is None else Unit(own[0], matrix)
    stands = replace(logits._stands, few=FEW, memory=settings.memory, unit=unit, spread=mesh, watched=watched)
    return made(stands, Logits if mesh is None else Replicated if shard is None else Placed)


def _held(weight: Any) -> Any:
    """A weight that ZeRO-3 has gathered, as another tensor: after the forward the parameter is given other data."""
    if not isinstance(weight, LoRA):
        return weight.view_as(weight)
    a, b = weight.a, weight.b
    return replace(weight, weight=_held(weight.weight), a=a.view_as(a), b=b.view_as(b))


def _check_dropout(weight: Any) -> None:
    """Raise where every reading of the same logits would be of other numbers."""
    dropout = weight.dropout if isinstance(weight, LoRA) else None
    if isinstance(dropout, nn.Dropout) and dropout.training and dropout.p > 0:
        raise LogitlessError(
            f"defer: the LoRA on the head has a dropout of {dropout.p}, which every reading of its logits would draw "
            f"again. Set lora_dropout=0 for the head, or score with a PolicyHead, which reads once."
        )


def _cast(weight: Any, dtype: torch.dtype) -> Any:
    if isinstance(weight, LoRA):
        return replace(weight, weight=weight.weight.to(dtype), a=weight.a.to(dtype), b=weight.b.to(dtype))
    return weight.to(dtype)
