"""A head that tensor parallelism has made a DTensor, and its logits: a DTensor to the hooks and code that pass them on.

    ColwiseParallel                              hidden states, whole     weight, rows of this rank
    output_layouts=Shard(-1)                     Logits of the rows here, with a shard
    output_layouts=Replicate()                   Logits of all columns, of which this rank multiplies its own
    use_local_output=False                       ``Placed``: either of these, by ``to_local()`` or ``full_tensor()``

The gradient of hidden states is a part on every rank, as a linear layer's own would be, and DTensor sums it: that of a
sequence-parallel layer is scattered by the same collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from logitless.errors import LogitlessError
from logitless.operands import Logits
from logitless.operands.logits import made
from logitless.operands.stands import Stands
from logitless.operands.unit import reading
from logitless.spec import VocabShard


class Parts(NamedTuple):
    """What lives here of a head and its hidden states, as plain tensors."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    shard: VocabShard | None

    @staticmethod
    def of(hidden: Any, weight: Any, bias: Any, shard: VocabShard | None) -> Parts:
        """The parts here, whose gradients have the placements of a linear layer's own."""
        from torch.distributed.tensor import Partial

        if shard is None:
            return Parts(hidden.to_local(), weight.to_local(), None if bias is None else bias.to_local(), None)
        own = hidden.to_local(grad_placements=[Partial()])
        return Parts(own, weight.to_local(), None if bias is None else bias.to_local(), shard)


class Style(NamedTuple):
    """Transformers' own tensor parallelism of a head (``tp_plan``), which replaces its forward and asks for DTensors.

    Attributes:
        forward: the forward that it put in the place of the head's own.
        mesh: the ranks that share the head.
        given, wanted: placements of hidden states and logits.
        local: whether the model's code is handed plain tensors.
    """

    forward: Callable[..., Any]
    mesh: Any
    given: Any
    wanted: Any
    local: bool

    @staticmethod
    def of(forward: Any) -> Style | None:
        """The style whose forward this is; None for any other."""
        if getattr(forward, "__name__", "") != "tp_forward":
            return None
        found = _closure(forward)
        style, mesh = found.get("self"), found.get("mesh")
        if style is None or mesh is None or not hasattr(style, "output_layouts"):
            return None
        return Style(forward, mesh, style.input_layouts, style.output_layouts, style.use_local_output)

    def hidden(self, x: Any) -> Any:
        """Hidden states as a DTensor that is whole on every rank."""
        from torch.distributed.tensor import DTensor

        x = x if is_placed(x) else DTensor.from_local(x, self.mesh, [self.given], run_check=False)
        return x if tuple(x.placements) == _replicated() else x.redistribute(placements=_replicated())

    def output(self, logits: Any) -> Any:
        """Logits as the model's code expects them."""
        logits = logits.redistribute(placements=[self.wanted])
        return logits.to_local() if self.local else logits


class Redistributing(NamedTuple):
    """The forward that torchtitan's ``Module.parallelize`` puts around a head's own, where no axis cuts the vocabulary:
    hidden states and logits go through it as they are.

    Attributes:
        forward: the forward around the head's own.
    """

    forward: Callable[..., Any]

    @staticmethod
    def of(forward: Any) -> Redistributing | None:
        """The wrapper that this forward is; None for any other. Raises where it shares the vocabulary out."""
        if getattr(forward, "__name__", "") != "forward_with_redistribution":
            return None
        found = _closure(forward)
        own, dims = found.get("fn"), found.get("parallel_dims")
        if dims is None or getattr(own, "__func__", None) is not nn.Linear.forward:
            return None
        if dims.tp_enabled:
            raise LogitlessError(
                "defer: the forward of the head was wrapped by torchtitan's tensor parallelism, which cuts the "
                "vocabulary. Let torchtitan's ChunkedLossWrapper call the head, or keep the model's own logits."
            )
        return Redistributing(forward)

    def hidden(self, x: Any) -> Any:
        return x

    def output(self, logits: Any) -> Any:
        return logits


def wrapper_of(layer: Any) -> Style | Redistributing | None:
    """What a framework that is known put in the place of a head's own forward, if anything."""
    forward = vars(layer).get("forward")
    return None if forward is None else Style.of(forward) or Redistributing.of(forward)


def _closure(function: Any) -> dict[str, Any]:
    """Variables of the function around this one, by name."""
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def is_placed(x: Any) -> bool:
    """Whether a tensor is a DTensor."""
    return getattr(x, "placements", None) is not None


def check_placements(hidden: Any, weight: Any, bias: Any) -> None:
    """Raise for placements under which the product of what is here is not that of a shard of the vocabulary."""
    mesh, placements = weight.device_mesh, tuple(weight.placements)
    way = "Keep the model's own logits (undefer), or let parallelize_module make the head ColwiseParallel()"
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or f"{mesh.ndim} dimensions"
        raise LogitlessError(
            f"defer: the head's weight is a DTensor over a mesh of {names}, with placements {placements}, and the "
            f"vocabulary may be cut over one dimension alone. {way} of one dimension of the mesh, mesh['tp']."
        )
    if not (placements[0].is_replicate() or placements[0].is_shard(0)):
        raise LogitlessError(
            f"defer: the head's weight is a DTensor with placements {placements} in its own forward, and only rows of "
            f"the weight (Shard(0)) are columns of the logits. {way}."
        )
    if not is_placed(hidden) or tuple(hidden.placements) != _replicated() or hidden.device_mesh != mesh:
        came = f"has placements {tuple(hidden.placements)}" if is_placed(hidden) else "is a plain tensor"
        raise LogitlessError(
            f"defer: the head's weight is a DTensor with placements {placements}, but its hidden states {came}, and "
            f"must be replicated over the same mesh. {way}, whose hooks do that."
        )
    if bias is not None and (not is_placed(bias) or tuple(bias.placements) != placements):
        raise LogitlessError(f"defer: the head's bias must be a DTensor with placements {placements}, as its weight.")


def _replicated() -> tuple[Any, ...]:
    from torch.distributed.tensor import Replicate

    return (Replicate(),)


class Placed(Logits):
    """Logits of all columns that are not computed, with the methods of a DTensor: sharded by columns."""

    replicated = False

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What ``isinstance`` asks after the type: code that takes DTensors apart by their methods takes these too."""
        from torch.distributed.tensor import DTensor

        return DTensor

    @property
    def device_mesh(self) -> Any:
        """The mesh that the logits are spread over."""
        return self._stands.spread

    @property
    def placements(self) -> tuple[Any, ...]:
        """Columns over the ranks of the mesh, or all of them on each."""
        from torch.distributed.tensor import Shard

        return _replicated() if self.replicated else (Shard(self.dim() - 1),)

    def redistribute(
        self, device_mesh: Any = None, placements: Sequence[Any] | None = None, *, async_op: bool = False
    ) -> Placed:
        """The same logits elsewhere: nothing is sent, since nothing is computed."""
        wanted = placements[0] if placements is not None and len(placements) == 1 else None
        by_columns = getattr(wanted, "is_shard", lambda *_: False)() and wanted.dim in (-1, self.dim() - 1)  # pyright: ignore[reportOptionalMemberAccess]
        replicated = wanted is not None and wanted.is_replicate()
        sharded = by_columns and self.linear.shard is not None
        if device_mesh not in (None, self.device_mesh) or not (replicated or sharded):
            raise LogitlessError(
                f"Logits: deferred logits with placements {self.placements} cannot be redistributed to {placements}. "
                f"Give the head output_layouts=Shard(-1) or Replicate(), or keep the model's own logits: "
                f"logitless.defer(model) is reversible."
            )
        return made(self.stands(), Replicated if replicated else Placed)  # pyright: ignore[reportReturnType]

    def to_local(self, *, grad_placements: Any = None) -> Logits:
        """The columns here, with their shard; all columns where they are replicated."""
        now = self.stands()
        return made(now if self.replicated else replace(now, spread=None))

    def full_tensor(self, *, grad_placements: Any = None) -> Logits:
        """All columns."""
        return made(self.stands())

    @reading
    def _here(self) -> Tensor:
        """The columns of this rank, computed."""
        now: Stands = self.opened()
        return now.computed() if self.replicated else replace(now, spread=None).computed()

    def computed(self) -> Tensor:
        """The DTensor that the head itself makes."""
        from torch.distributed.tensor import DTensor

        # Strides as of a contiguous tensor, of which only a part may be here.
        strides = [1]
        for n in reversed(self.shape[1:]):
            strides.insert(0, n * strides[0])
        size = {"shape": self.shape, "stride": tuple(strides)}
        return DTensor.from_local(self._here(), self.device_mesh, self.placements, run_check=False, **size)


class Replicated(Placed):
    """The same, with all columns on every rank of the mesh."""

    replicated = True
