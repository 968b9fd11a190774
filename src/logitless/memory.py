"""``estimate``: the peak bytes of a call, item by item, before anything runs.

The sizes of a call go in, the items that are alive at the fullest moment of forward and of backward come out. Tiles and
plan are those that the call itself would choose; what is alive when is in ``footprints`` and the files named after it,
one function for each path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch

from logitless.backends import choose_backend
from logitless.backends.contract import accumulation_dtype
from logitless.errors import LogitlessError
from logitless.footprints import Item, Moment, Step, logits_moments
from logitless.footprints_linear import linear_moments
from logitless.footprints_loss import Loss, loss_moments
from logitless.footprints_plain import torch_moments
from logitless.from_hidden.plan import LinearPlan
from logitless.objectives import Objective
from logitless.policy_loss import MEMORY
from logitless.policy_loss.plan import LossPlan
from logitless.spec import EntropyMode, parse_memory

PATHS = ("logprobs", "linear_logprobs", "linear_policy_loss", "torch")
FROM_HIDDEN = ("linear_logprobs", "linear_policy_loss")
DTYPES = ("float32", "bfloat16", "float16", "float64")
DEFAULT_MEMORY = {
    "logprobs": "16MiB",
    "linear_logprobs": "256MiB",
    "linear_policy_loss": MEMORY,
    "torch": "1B",
}


@dataclass(frozen=True)
class Estimate:
    """Bytes beyond what the caller holds, results and gradients included.

    Attributes:
        path: which call.
        backend: which backend works on the logits; None for plain torch.
        plan: which way ``linear_logprobs`` or ``linear_policy_loss`` goes; None for other paths.
        forward, backward: items that are alive at the fullest moment of each; no backward, no items.
    """

    path: str
    backend: str | None
    plan: LinearPlan | LossPlan | None
    forward: tuple[Item, ...]
    backward: tuple[Item, ...]

    @property
    def items(self) -> tuple[Item, ...]:
        """All of them, once each, as they come up."""
        return tuple(dict.fromkeys((*self.forward, *self.backward)))

    @property
    def forward_peak(self) -> int:
        return sum(item.bytes for item in self.forward)

    @property
    def backward_peak(self) -> int:
        return sum(item.bytes for item in self.backward)

    @property
    def peak(self) -> int:
        return max(self.forward_peak, self.backward_peak)

    def __str__(self) -> str:
        how = "" if self.plan is None else f", {self.plan.kind}"
        lines = [f"{self.path}{how}" + ("" if self.backend is None else f", {self.backend} backend")]
        lines.append(f"{'alive at the peak of':52}{'forward':>13}{'backward':>13}")
        for item in self.items:
            cells = [size_text(item.bytes) if item in items else "" for items in (self.forward, self.backward)]
            mark = "*" if item.output else " "
            lines.append(f"{mark} {item.name[:50]:50}{cells[0]:>13}{cells[1]:>13}")
        lines.append(f"{'peak (* goes to the caller)':52}" + "".join(f"{size_text(n):>13}" for n in self._peaks()))
        return "\n".join(lines)

    def _peaks(self) -> tuple[int, int]:
        return self.forward_peak, self.backward_peak


def estimate(
    path: Literal["logprobs", "linear_logprobs", "linear_policy_loss", "torch"],
    *,
    tokens: int,
    vocab: int,
    rows: int | None = None,
    hidden: int | None = None,
    dtype: str = "bfloat16",
    device: Literal["cuda", "cpu"] = "cuda",
    entropy: EntropyMode = None,
    needs_grad: tuple[str, ...] = ("logits", "hidden", "weight", "bias"),
    bias: bool = False,
    softcap: bool = False,
    kept_ids: int | None = None,
    overwrite_logits: bool = False,
    weight_grad: bool = False,
    match: Literal["bfloat16", "float16"] | None = None,
    batch_invariant: bool = False,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    backend: str = "auto",
    memory: int | str | None = None,
    objective: Objective | None = None,
    counts: Sequence[int] | None = None,
    dropped: float = 0.0,
) -> Estimate:
    """Peak bytes of a call and of its backward, item by item. Computes nothing and needs no device.

    Args:
        path: ``"logprobs"``, ``"linear_logprobs"``, ``"linear_policy_loss"``; or ``"torch"``, the log_softmax that
            frameworks write, from logits or, with ``hidden``, from hidden states.
        tokens: T, rows of the logits or of hidden; under ``sequence_parallel`` of all ranks together.
        vocab: V, columns of all ranks together.
        rows: R, rows selected by a plan (:class:`Rows`); None where targets of all tokens are given in order.
        hidden: D, for paths from hidden states.
        dtype: of the logits, or of hidden and weight.
        device: kind of device that it will run on.
        entropy, overwrite_logits, match, batch_invariant, sequence_parallel, backend, memory: as the path takes them.
        needs_grad: what needs a gradient: ``"logits"``, or ``"hidden"``, ``"weight"`` and ``"bias"``. ``()`` is forward
            alone. Names of what the path does not have are passed over.
        bias, softcap, weight_grad: whether there is one.
        kept_ids: kept ids of all rows together; None for none.
        tensor_parallel: ranks that share the vocabulary in equal parts.
        objective: of ``linear_policy_loss``, default ``Objective()``. It decides on ``entropy`` there.
        counts: rows of each sample (``rows.counts``), which an objective that takes means over samples asks for;
            default one sample. Where such samples are split over context-parallel ranks, ask for ``linear_logprobs``.
        dropped: share of the rows without a gradient (clipped, or of zero advantage). Above 5 % the others are moved
            together, which takes up to 128 MiB, and their hidden states copied.

    Returns:
        :class:`Estimate`, which prints as a table.

    Raises:
        LogitlessError: an argument cannot be honoured; the text says which and why.

    >>> estimate("logprobs", tokens=4096, vocab=1000, dtype="float32", device="cpu", overwrite_logits=True).peak >> 20
    16
    """
    _check_sizes(tokens=tokens, vocab=vocab, rows=rows, hidden=hidden, kept_ids=kept_ids, ranks=tensor_parallel)
    _check_choices(path, dtype, device, entropy, match)
    _check_combination(path, tokens, rows, hidden, tensor_parallel, sequence_parallel)
    loss = _loss(path, tokens if rows is None else rows, entropy, objective, counts, dropped)
    operands = getattr(torch, dtype)
    from_hidden = hidden is not None
    step = Step(
        tokens=tokens,
        rows=rows,
        columns=-(-vocab // tensor_parallel),
        hidden=hidden,
        dtype=operands,
        logits_dtype=_logits_dtype(operands, from_hidden, match),
        on_gpu=device == "cuda",
        entropy=entropy if loss is None else loss.objective.entropy,
        backend=_backend(path, device, operands, backend),
        memory=parse_memory(DEFAULT_MEMORY[path] if memory is None else memory),
        needs=_needs(needs_grad, from_hidden, bias),
        overwrite=overwrite_logits,
        softcap=softcap,
        bias=bias,
        weight_grad=weight_grad,
        kept=kept_ids,
        batch_invariant=batch_invariant,
        ranks=tensor_parallel if tensor_parallel > 1 else 0,
        sequence_parallel=sequence_parallel,
    )
    plan, moments = _plan_and_moments(path, step, loss)
    fullest = [max((m for m in moments if m.phase == phase), key=lambda m: m.bytes, default=None) for phase in PHASES]
    forward, backward = (() if m is None else tuple(item for item in m.items if item.bytes) for m in fullest)
    return Estimate(path, None if path == "torch" else step.backend, plan, forward, backward)


PHASES = ("forward", "backward")


def _plan_and_moments(path: str, step: Step, loss: Loss | None) -> tuple[LinearPlan | LossPlan | None, list[Moment]]:
    # A further path is a function from a step to its moments, and two lines here.
    if loss is not None:
        plan = loss.plan(step)
        return plan, list(loss_moments(step, plan, loss))
    if path == "linear_logprobs":
        plan = step.plan()
        return plan, list(linear_moments(step, plan))
    return None, list(logits_moments(step) if path == "logprobs" else torch_moments(step))


def size_text(size: int) -> str:
    """Bytes in the unit that leaves three or four digits.

    >>> size_text(1_500_000)
    '1.43 MiB'
    """
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{size} B" if unit == "B" else f"{value:.2f} {unit}"


def _logits_dtype(operands: torch.dtype, from_hidden: bool, match: str | None) -> torch.dtype:
    if not from_hidden:
        return operands
    return accumulation_dtype(operands) if match is None else getattr(torch, match)


def _loss(
    path: str,
    num_rows: int,
    entropy: EntropyMode,
    objective: Objective | None,
    counts: Sequence[int] | None,
    dropped: float,
) -> Loss | None:
    if path != "linear_policy_loss":
        if objective is not None or counts is not None or dropped:
            raise LogitlessError(
                f'estimate: objective, counts and dropped go with path "linear_policy_loss" but path is "{path}".'
            )
        return None
    asked = Objective() if objective is None else objective
    if not isinstance(asked, Objective):
        raise LogitlessError(f"estimate: objective must be an Objective but is {type(asked).__name__}.")
    if entropy not in (None, asked.entropy):
        raise LogitlessError(
            f'estimate: entropy is "{entropy}" but the objective computes "{asked.entropy}". Leave entropy out; an '
            f"objective with an entropy_coef differentiates it."
        )
    if counts is not None and (sum(counts) != num_rows or min(counts, default=0) < 0):
        raise LogitlessError(
            f"estimate: counts must be 0 or more and add up to the {num_rows} rows but they add up to {sum(counts)}, "
            f"the smallest being {min(counts, default=0)}."
        )
    if not 0 <= dropped <= 1:
        raise LogitlessError(f"estimate: dropped must be a share between 0 and 1 but is {dropped!r}.")
    return Loss(asked, (num_rows,) if counts is None else tuple(counts), dropped)


def _needs(names: tuple[str, ...], from_hidden: bool, bias: bool) -> tuple[bool, bool, bool]:
    known = ("logits", "hidden", "weight", "bias")
    if isinstance(names, str) or not set(names) <= set(known):
        raise LogitlessError(f"estimate: needs_grad must be a tuple of names out of {list(known)} but is {names!r}.")
    if not from_hidden:
        return "logits" in names, False, False
    return "hidden" in names, "weight" in names, bias and "bias" in names


def _backend(path: str, device: str, dtype: torch.dtype, backend: str) -> str:
    # The rule reads a device and a dtype, and a tensor on a device that is not here cannot be made.
    stand_in: Any = SimpleNamespace(device=torch.device(device), dtype=dtype)
    name = choose_backend(stand_in, backend).name
    if name == "reference" and path != "torch":
        raise LogitlessError(
            'estimate: backend="reference" is for checking results, and its memory is not predicted. Ask for "auto", '
            '"tiled" or "triton".'
        )
    return name


def _check_sizes(**sizes: int | None) -> None:
    for name, size in sizes.items():
        optional, least = name in ("rows", "hidden", "kept_ids"), 0 if name in ("rows", "kept_ids", "tokens") else 1
        if size is None and optional:
            continue
        if type(size) is not int or size < least:
            argument = "tensor_parallel" if name == "ranks" else name
            raise LogitlessError(f"estimate: {argument} must be an integer of at least {least} but is {size!r}.")


def _check_choices(path: str, dtype: str, device: str, entropy: object, match: object) -> None:
    for name, value, choices in (
        ("path", path, PATHS),
        ("dtype", dtype, DTYPES),
        ("device", device, ("cuda", "cpu")),
        ("entropy", entropy, (None, "value", "grad")),
        ("match", match, (None, "bfloat16", "float16")),
    ):
        if value not in choices:
            raise LogitlessError(f"estimate: {name} must be one of {list(choices)} but is {value!r}.")


def _check_combination(
    path: str, tokens: int, rows: int | None, hidden: int | None, ranks: int, sequence_parallel: bool
) -> None:
    if (hidden is None) == (path in FROM_HIDDEN):
        if path != "torch":
            wanted = (
                "needs hidden=, the size of a hidden state" if hidden is None else "starts from logits: drop hidden="
            )
            raise LogitlessError(f'estimate: path "{path}" {wanted}.')
    if rows is not None and rows > tokens:
        raise LogitlessError(f"estimate: rows must be at most tokens, {tokens}, but is {rows}.")
    if path == "torch" and ranks > 1:
        raise LogitlessError(
            'estimate: path "torch" is the log_softmax of one rank. Give the vocabulary of one, and tensor_parallel=1.'
        )
    if sequence_parallel and (ranks == 1 or tokens % ranks or path not in FROM_HIDDEN):
        raise LogitlessError(
            f"estimate: sequence_parallel=True needs a path from hidden states, and tokens that divide over "
            f"tensor_parallel ranks, but path is {path}, tokens {tokens} and tensor_parallel {ranks}."
        )
