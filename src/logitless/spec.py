"""The distribution, the vocabulary shard, the memory budget, and the type of the results.

Letters used throughout the package:

    R  rows scored here          N  samples here            T  local tokens (rows of the logits)
    V  vocabulary columns here   K  token ids in ``Kept``   D  hidden size

Small frozen carriers, validated when made, so that everything below can trust them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from logitless.collectives import DryGroup, resolve_group, table_over
from logitless.errors import LogitlessError
from logitless.errors.arguments import FLOATS, check_flags, dense, is_number, refused

IGNORE = -100
"""Target id of a row to leave out: log-prob 0, entropy 0, log Z 0, gradient 0."""

EntropyMode = Literal["value", "grad"] | None

T = TypeVar("T")
P = ParamSpec("P")


class TokenStats(NamedTuple):
    """Results of each row by name, float32 (float64 for float64 logits). Whatever was not asked for is None.

    Attributes:
        logprob: ``[R]`` log-probability of each target; differentiable.
        entropy: ``[R]`` entropy in nats, or None. Differentiable only if ``"grad"`` was asked for.
        log_z: ``[R]`` log of the normaliser over the whole vocabulary; differentiable. None where the scope is the
            support, where a row with one id is not even multiplied.
        top1_id, top1_logprob, top1_hit: ``[R]`` the most likely token, its log-prob, and whether it is the target.
        collision: ``[R]`` sum of the squared probabilities; differentiable.
        mean_logit, logit_variance: ``[R]`` over the columns that are not -inf; the mean is differentiable.
        max_logit: ``[R]`` largest logit.
        rank: ``[R]`` int64, how many tokens are more likely than the target, or as likely with a smaller id.
        top_k_ids, top_k_logprobs: ``[R, K]`` the most likely tokens, the first first; of equal ones the smaller id.
        ids_logprobs: ``[R, K]`` of the ids given; differentiable.
        divergence: ``[R]`` from the teacher's distribution, 0 at rows that are left out; differentiable.
        teacher_logprob: ``[R]`` of the target; -inf where the teacher's vocabulary does not have it, NaN where it did
            not say.
        teacher_entropy: ``[R]`` in nats.
        acceptance: ``[R]`` how likely the teacher accepts what the student draws, ``sum min(p, q)``; differentiable.
        teacher_log_z: ``[R]`` log of the teacher's normaliser over all of its ids.
        teacher_shared: ``[R]`` its probability of the ids that the student has, too.
        teacher_top1_id: ``[R]`` its most likely id, out of all of its own.
    """

    logprob: Tensor
    entropy: Tensor | None = None
    log_z: Tensor | None = None
    top1_id: Tensor | None = None
    top1_logprob: Tensor | None = None
    top1_hit: Tensor | None = None
    collision: Tensor | None = None
    mean_logit: Tensor | None = None
    logit_variance: Tensor | None = None
    max_logit: Tensor | None = None
    rank: Tensor | None = None
    top_k_ids: Tensor | None = None
    top_k_logprobs: Tensor | None = None
    ids_logprobs: Tensor | None = None
    divergence: Tensor | None = None
    teacher_logprob: Tensor | None = None
    teacher_entropy: Tensor | None = None
    acceptance: Tensor | None = None
    teacher_log_z: Tensor | None = None
    teacher_shared: Tensor | None = None
    teacher_top1_id: Tensor | None = None

    def __repr__(self) -> str:
        """The results that are there."""
        there = [f"{name}={x!r}" for name, x in self._asdict().items() if x is not None]
        return f"TokenStats({', '.join(there)})"

    def each(self, change: Callable[[Tensor], Tensor]) -> TokenStats:
        """``change(x)`` in place of every result that is there."""
        return TokenStats(*(None if x is None else change(x) for x in self))  # pyright: ignore[reportArgumentType]

    def shaped(self, shape: tuple[int, ...]) -> TokenStats:
        """``[R]`` results in the caller's shape; lists of ids, and what belongs to them, keep their last dimension."""
        # Vectors stay as they are: FSDP warns of modules that return views.
        return self if len(shape) == 1 else self.each(lambda x: x.reshape((*shape, *x.shape[1:])))


@dataclass(frozen=True, eq=False)
class Head:
    """The distribution that turns logits ``x`` into log-probs, defined once for every path.

    ``log_softmax(softcap * tanh(scale * x / softcap) / temperature)`` over the first ``vocab_size``
    columns; without softcap, ``log_softmax(scale * x / temperature)``.

    Args:
        temperature: positive number, as a float or a 0-dim tensor, or one positive value per row (``[R]``, or the
            shape of the targets). A per-sample temperature is ``per_sample[rows.sample]``.
        scale: multiplies the logits before anything else (Cohere's ``logit_scale``; Granite divides).
        softcap: Gemma's ``final_logit_softcapping``, or None.
        vocab_size: true vocabulary size; columns from there on are padding, never read, gradient 0.

    >>> Head(temperature=0.0)
    Traceback (most recent call last):
    logitless.errors.LogitlessError: Head: temperature must be a positive finite number but is 0.0.
    """

    temperature: float | Tensor = 1.0
    scale: float = 1.0
    softcap: float | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.temperature, Tensor):
            _check_temperature_tensor(self.temperature)
        elif not _is_finite_number(self.temperature) or self.temperature <= 0:
            raise LogitlessError(f"Head: temperature must be a positive finite number but is {self.temperature!r}.")
        if not _is_finite_number(self.scale) or self.scale == 0:
            raise LogitlessError(f"Head: scale must be a finite number other than 0 but is {self.scale!r}.")
        if self.softcap is not None and (not _is_finite_number(self.softcap) or self.softcap <= 0):
            raise LogitlessError(f"Head: softcap must be a positive finite number or None but is {self.softcap!r}.")
        if self.vocab_size is not None and (type(self.vocab_size) is not int or self.vocab_size < 1):
            raise LogitlessError(f"Head: vocab_size must be a positive integer or None but is {self.vocab_size!r}.")

    def gain(self, num_rows: int, dtype: torch.dtype, device: torch.device, single: bool = False) -> Tensor:
        """``[R]`` factor ``a`` of ``z = a * x``, or of ``z = a * tanh(squash * x)`` under a softcap.

        A temperature that is not positive and finite gives NaN, so that its row (and no other) is NaN.

        Args:
            single: whether a number is rounded to ``dtype`` before it divides, as one in a tensor is.
        """
        numerator = self.scale if self.softcap is None else self.softcap
        if not isinstance(self.temperature, Tensor):
            factor = numerator / self.temperature
            if abs(factor) > torch.finfo(dtype).max:
                raise LogitlessError(
                    f"Head: a temperature of {self.temperature!r} makes the factor of the logits {factor:g}, which "
                    f"{dtype} does not hold. For the most likely token take argmax."
                )
            if single and self.temperature != 1.0:
                return numerator / torch.full((num_rows,), self.temperature, dtype=dtype, device=device)
            return torch.full((num_rows,), factor, dtype=dtype, device=device)
        temperature = self.temperature if self.temperature.dim() else self.temperature.expand(num_rows)
        if temperature.numel() != num_rows:
            raise LogitlessError(
                f"Head: temperature has shape {list(self.temperature.shape)} but there are {num_rows} rows. "
                f"Give one value per row; a value per sample is per_sample[rows.sample]."
            )
        t = temperature.detach().reshape(num_rows).to(device=device, dtype=dtype)
        return torch.where((t > 0) & t.isfinite(), numerator / t, torch.nan)

    @property
    def unit(self) -> bool:
        """Whether every gain is 1 and there is no softcap; a tensor of temperatures is not asked."""
        return self.softcap is None and not isinstance(self.temperature, Tensor) and self.scale == self.temperature

    @property
    def squash(self) -> float:
        """``scale / softcap``: the factor inside tanh, or 0 where there is no softcap."""
        return 0.0 if self.softcap is None else self.scale / self.softcap


@dataclass(frozen=True, eq=False)
class VocabShard:
    """Columns ``start .. stop`` of the vocabulary are here; the other ranks of ``group`` have the rest.

    Making one is a collective: the ranks exchange their bounds once and all raise the same error unless the
    shards cover the vocabulary without gap or overlap, in any rank order and in any sizes.

    Args:
        start: first column here.
        stop: one past the last column here; ``start == stop`` is an empty shard.
        group: process group, or one-dimensional DeviceMesh, whose ranks share the vocabulary. None means that
            this process has all of it, and no collective is ever issued.
        check_calls: compare rows, targets, options, dtypes and a loss's fields over the group before every call. One
            more small collective per call, which waits for the device, turns a disagreement between ranks into an
            error instead of a hang or wrong numbers.

    Attributes:
        vocab_size: columns in all shards together, padding included.
        bounds: ``(start, stop)`` of every rank of the group, in rank order.
    """

    start: int
    stop: int
    group: Any = None
    check_calls: bool = False
    vocab_size: int = field(init=False)
    bounds: tuple[tuple[int, ...], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if type(self.start) is not int or type(self.stop) is not int:
            raise LogitlessError(f"VocabShard: start and stop must be integers but are {self.start!r}, {self.stop!r}.")
        check_flags("VocabShard", check_calls=self.check_calls)
        group = resolve_group(self.group, "VocabShard.group")
        bounds = [(self.start, self.stop)] if group is None else table_over(group, (self.start, self.stop))
        object.__setattr__(self, "group", group)
        object.__setattr__(self, "vocab_size", _tiled_size(bounds))
        object.__setattr__(self, "bounds", tuple(bounds))

    def __copy__(self) -> VocabShard:
        return self

    def __deepcopy__(self, memo: Any) -> VocabShard:
        """The shard itself: nothing in it changes, and a copy of a module works over the same ranks."""
        return self

    def __reduce__(self) -> Any:
        if self.group is None:
            return VocabShard, (self.start, self.stop)
        raise LogitlessError(
            "VocabShard: its process group lives in this process and cannot be pickled. Save a module's state_dict(), "
            "and make the shard again where it is loaded."
        )

    @staticmethod
    def even(vocab_size: int, group: Any) -> VocabShard:
        """This rank's shard where the vocabulary is cut into equal shards in rank order, as Megatron does."""
        if type(vocab_size) is not int or vocab_size < 1:
            raise refused("VocabShard.even: vocab_size", "a positive integer", vocab_size)
        group = resolve_group(group, "VocabShard.group")
        world, rank = (1, 0) if group is None else (group.size(), group.rank())
        if vocab_size % world:
            raise LogitlessError(
                f"VocabShard.even: vocab_size {vocab_size} does not divide into {world} equal shards. "
                f"Pad it to a multiple and set Head(vocab_size={vocab_size}), or give start and stop yourself."
            )
        width = vocab_size // world
        return VocabShard(rank * width, (rank + 1) * width, group)

    @staticmethod
    def imagined(vocab_size: int, ranks: int) -> Any:
        """The first of equal shards of a group that is not there, for ``explain`` and ``estimate`` alone."""
        return ImaginedShard(0, -(-vocab_size // ranks), vocab_size, DryGroup(ranks, copies=False))

    @staticmethod
    def of(weight: Any) -> VocabShard:
        """The shard that a tensor-parallel DTensor weight describes: ``Shard(0)`` over a one-dimensional mesh.

        Only the caller knows that the weight is tensor-parallel: FSDP's parameters have the same placements, but are
        gathered before use.
        """
        placements, mesh = getattr(weight, "placements", None), getattr(weight, "device_mesh", None)
        if placements is None or mesh is None:
            raise LogitlessError(f"VocabShard.of: weight must be a DTensor but is {type(weight).__name__}.")
        if mesh.ndim != 1 or not placements[0].is_shard(0):
            raise LogitlessError(
                f"VocabShard.of: weight must be sharded by rows over a one-dimensional mesh but has placements "
                f"{placements}."
            )
        group = mesh.get_group()
        lengths = [n for (n,) in table_over(group, (weight.to_local().shape[0],))]
        start = sum(lengths[: group.rank()])
        return VocabShard(start, start + lengths[group.rank()], group)


class ImaginedShard(NamedTuple):
    """A :class:`VocabShard` of a group that is not there; of its ranks, the bounds of this one alone are known."""

    start: int
    stop: int
    vocab_size: int
    group: DryGroup
    check_calls: bool = False

    @property
    def bounds(self) -> tuple[tuple[int, ...], ...]:
        return ((self.start, self.stop),)


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B\s*")


def parse_memory(memory: int | str) -> int:
    """Bytes from a number of bytes or a string such as ``"512MiB"``, ``"1.5GB"`` or ``"64 KiB"``.

    >>> parse_memory("1.5KiB")
    1536
    """
    if type(memory) is int and memory > 0:
        return memory
    match = _SIZE.fullmatch(memory) if isinstance(memory, str) else None
    if match:
        unit = match[2] or ""
        base = 1024 if unit.endswith("i") else 1000
        size = int(float(match[1]) * base ** " KMGT".index(unit[:1] or " "))
        if size > 0:
            return size
    raise LogitlessError(f'memory: wanted a positive number of bytes or a size such as "512MiB" but got {memory!r}.')


def format_bytes(size: int) -> str:
    """A number of bytes for people, which :func:`parse_memory` reads back up to rounding.

    >>> format_bytes(9_957_277_696), format_bytes(5_000_000), format_bytes(123_456), format_bytes(0)
    ('9.27 GiB', '4.8 MiB', '120.6 KiB', '0 B')
    """
    for unit, power, digits in (("TiB", 4, 2), ("GiB", 3, 2), ("MiB", 2, 1), ("KiB", 1, 1)):
        if size >= 1024**power:
            return f"{size / 1024**power:.{digits}f} {unit}"
    return f"{size} B"


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays float64; every other float is summed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tracked_by_autograd(x: Tensor) -> Tensor:
    """``x``, or its copy if it was made in inference mode: autograd would refuse to save it for backward."""
    if torch.compiler.is_compiling() or not x.is_inference():
        return x
    with torch.inference_mode(False):
        return x.clone()


def has_values(x: Tensor) -> bool:
    """Whether a tensor has numbers: it is not on the meta device, not fake, not being traced."""
    return not (x.is_meta or torch.compiler.is_compiling() or isinstance(x, FakeTensor))


def inspectable(x: Tensor) -> bool:
    """Whether a tensor's numbers may be looked at: on an accelerator that would stall the stream."""
    return x.device.type == "cpu" and has_values(x)


def _is_finite_number(x: object) -> bool:
    return is_number(x) and isinstance(x, int | float)


def _check_temperature_tensor(t: Tensor) -> None:
    if dense(t, "Head: temperature", "a number or a tensor of floats").dtype not in FLOATS:
        raise LogitlessError(f"Head: temperature must be a floating-point tensor but has dtype {t.dtype}.")
    if t.requires_grad:
        raise LogitlessError("Head: temperature requires grad, but no gradient flows to it. Pass temperature.detach().")
    # On an accelerator the check would stall the stream; there a bad value makes its own row NaN.
    if inspectable(t) and not bool(((t > 0) & t.isfinite()).all()):
        row = int((~((t > 0) & t.isfinite())).flatten().nonzero()[0])
        value = float(t.flatten()[row])
        raise LogitlessError(f"Head: temperature must be positive and finite but row {row} has {value}.")


def _tiled_size(bounds: list[tuple[int, ...]]) -> int:
    """Columns in all shards together. Raises where shards overlap or leave a gap."""
    expected = 0
    for rank, (start, stop) in sorted(enumerate(bounds), key=lambda item: item[1]):
        if start < 0 or stop < start:
            raise LogitlessError(
                f"VocabShard: rank {rank} has start {start} and stop {stop}. Wanted 0 <= start <= stop."
            )
        if start != expected:
            what = "overlap" if start < expected else "leave a gap"
            raise LogitlessError(
                f"VocabShard: the shards {what} at column {min(start, expected)}: rank {rank} starts at {start} "
                f"where {expected} was expected. Bounds by rank: {[tuple(b) for b in bounds]}."
            )
        expected = stop
    return expected


# Calls under torch.compile.


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """The function, behind a graph break where torch.compile is tracing."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return graph_break(function, *args, **kwargs)
        return function(*args, **kwargs)

    return call


# graph_break is called under a compiler only: elsewhere its first call would import the compiler, which takes seconds.
# The public torch.compiler.disable imports it as soon as it is applied.
@torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]
def graph_break(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """A call that breaks a compiled graph."""
    return function(*args, **kwargs)
