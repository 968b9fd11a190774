"""A call and its backward, given by sizes: on the meta device for its allocations, on a real one to measure them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from logitless.backends import choose_backend
from logitless.backends.divergences import Divergence
from logitless.call import Call, Options, as_products_take, needs_gradient, resolve_hidden, resolve_logits
from logitless.call.lora import LoRA
from logitless.distill import Teacher
from logitless.distill.divergence import MEMORY as PAIR_MEMORY
from logitless.distill.divergence import check_pair, route_of, score_pair
from logitless.distill.from_logits import score_pair_of_logits
from logitless.distill.pair import PairPlan
from logitless.distill.teacher import TAILS, Tail
from logitless.errors import LogitlessError
from logitless.from_hidden.logprobs import score
from logitless.from_hidden.plan import LinearPlan, SupportPlan, choose_plan
from logitless.from_logits import score_logits
from logitless.kept import Kept
from logitless.machine import CPU, Machine
from logitless.objectives import Objective, Preference
from logitless.policy_loss.loss import MEMORY, evaluate, with_teacher
from logitless.policy_loss.plan import LossPlan, plan_of
from logitless.rows import Rows
from logitless.spec import EntropyMode, Head, accumulation_dtype

FROM_HIDDEN = ("linear_logprobs", "linear_policy_loss", "linear_divergence")
PATHS = ("logprobs", "divergence", *FROM_HIDDEN, "torch")
NAMES = ("logits", "hidden", "weight", "bias", "a", "b")
"""What may need a gradient."""

DTYPES = ("float32", "bfloat16", "float16", "float64")
DEFAULT_MEMORY = {
    "logprobs": "16MiB",
    "divergence": "16MiB",
    "linear_logprobs": "256MiB",
    "linear_policy_loss": MEMORY,
    "linear_divergence": PAIR_MEMORY,
    "torch": "1B",
}

PAIR = Divergence("forward_kl")
"""What kind it is makes no difference to memory."""


def plain(logits: Tensor, index: Tensor | None, target: Tensor, entropy: EntropyMode) -> tuple[Tensor, Tensor | None]:
    """Log-prob and entropy as frameworks write them: one float32 log_softmax, gathered and summed."""
    scored = logits if index is None else logits[index]
    logp = torch.log_softmax(scored.float(), dim=-1)
    logprob = logp.gather(1, target[:, None]).squeeze(1)
    if entropy is None:
        return logprob, None
    if entropy == "value":
        logp = logp.detach()
    return logprob, -(logp.exp() * logp).sum(-1)


def plain_linear(
    hidden: Tensor, weight: Tensor, index: Tensor | None, target: Tensor, entropy: EntropyMode
) -> tuple[Tensor, Tensor | None]:
    """The head as models write it, on the scored rows, and then :func:`plain`."""
    return plain((hidden if index is None else hidden[index]) @ weight.T, None, target, entropy)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A call and its backward, given by sizes: the arguments of :func:`estimate`, checked.

    Attributes:
        path: and all others, as :func:`estimate` takes them.
    """

    path: str
    tokens: int
    vocab: int
    rows: int | None = None
    hidden: int | None = None
    dtype: str = "bfloat16"
    device: str = "cuda"
    entropy: EntropyMode = None
    needs_grad: tuple[str, ...] = NAMES
    bias: bool = False
    softcap: bool = False
    lora_rank: int | None = None
    kept_ids: int | None = None
    scope: Literal["vocabulary", "support"] = "vocabulary"
    stats: tuple[str, ...] = ()
    top_k: int | None = None
    further_ids: int | None = None
    overwrite_logits: bool = False
    weight_grad: bool = False
    match: Literal["bfloat16", "float16"] | None = None
    batch_invariant: bool = False
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    backend: str = "auto"
    memory: int | str | None = None
    objective: Objective | Preference | None = None
    counts: Sequence[int] | None = None
    dropped: float = 0.0
    teacher_hidden: int | None = None
    teacher_top_k: int | None = None
    tail: Tail = "bucket"

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_choices(self)
        _check_combination(self)
        _check_loss(self)
        _check_teacher(self)

    @property
    def num_rows(self) -> int:
        return self.tokens if self.rows is None else self.rows

    @property
    def chosen_backend(self) -> str:
        # The rule reads a device and a dtype, and a tensor on a device that is not here cannot be made.
        stand_in: Any = SimpleNamespace(device=torch.device(self.device), dtype=getattr(torch, self.dtype))
        return choose_backend(stand_in, self.backend).name

    def on(self, device: torch.device, shard: Any = None, machine: Machine | None = None) -> RunningStep:
        """The step with operands on a device. A dry run names the machine whose sizes apply."""
        rows, dtype = self._rows(device), getattr(torch, self.dtype)
        columns, ranks = -(-self.vocab // self.tensor_parallel), self.tensor_parallel
        leaves = {}
        if self.hidden is None:
            leaves["logits"] = torch.zeros(self.tokens, columns, dtype=dtype, device=device)
            if "logits" in self.needs_grad:
                leaves["logits"] = hand_over(leaves["logits"])
        else:
            here = self.tokens // ranks if self.sequence_parallel else self.tokens
            shapes = {"hidden": (here, self.hidden), "weight": (columns, self.hidden)}
            shapes |= {"bias": (columns,)} if self.bias else {}
            if self.lora_rank is not None:
                shapes |= {"a": (self.lora_rank, self.hidden), "b": (columns, self.lora_rank)}
            for name, shape in shapes.items():
                leaves[name] = torch.zeros(shape, dtype=dtype, device=device, requires_grad=name in self.needs_grad)
        weight_grad = None
        if self.weight_grad:
            weight_grad = torch.zeros(leaves["weight"].shape, device=device)
        options = Options(
            bias=leaves.get("bias"),
            entropy=self.entropy,
            head=Head(softcap=20.0) if self.softcap else None,
            shard=shard,
            kept=self._kept(device),
            scope=self.scope,
            stats=self.stats,
            top_k=self.top_k,
            further_ids=self._further(device),
            sequence_parallel=self.sequence_parallel,
            weight_grad=weight_grad,
            match=self.match,
            batch_invariant=self.batch_invariant,
            backend=self.chosen_backend,
            memory=DEFAULT_MEMORY[self.path] if self.memory is None else self.memory,
            caller=self.path,
        )
        return RunningStep(self, leaves, rows, options, self._fields(device), machine, self._teacher(device))

    def _rows(self, device: torch.device) -> Rows | Tensor:
        """Targets of all tokens; or rows of some of them, of samples that have ``counts`` rows each."""
        objective = self.objective or Objective()
        if self.rows is None and self.counts is None and not objective.by_sample:
            return torch.zeros(self.tokens, dtype=torch.int64, device=device)
        half = self.num_rows // 2
        samples = (self.num_rows - half, half) if isinstance(objective, Preference) else (self.num_rows,)
        counts = samples if self.counts is None else tuple(self.counts)
        lengths = torch.tensor(counts, dtype=torch.int64, device=device)
        index = torch.arange(self.num_rows, device=device)
        sample = torch.repeat_interleave(torch.arange(len(counts), device=device), lengths, output_size=self.num_rows)
        return Rows(
            index=index,
            target=torch.zeros_like(index),
            sample=sample,
            position=index,
            token_shape=(self.tokens,),
            held=counts,
            counts=counts,
            totals=lengths,
            response_lengths=counts,
        )

    def _kept(self, device: torch.device) -> Kept | None:
        if self.kept_ids is None:
            return None
        each, more = divmod(self.kept_ids, max(1, self.num_rows))
        lengths = torch.full((self.num_rows,), each, device=device)
        lengths[:more] += 1
        return Kept(torch.arange(self.kept_ids, device=device) % self.vocab, lengths)

    def _further(self, device: torch.device) -> Tensor | None:
        if self.further_ids is None:
            return None
        return torch.zeros((self.num_rows, self.further_ids), dtype=torch.int64, device=device)

    def _teacher(self, device: torch.device) -> Teacher | None:
        """With a head as large as the student's, or logits, or so many log-probs of every row."""
        columns, dtype = -(-self.vocab // self.tensor_parallel), getattr(torch, self.dtype)
        here = self.tokens // self.tensor_parallel if self.sequence_parallel else self.tokens
        if self.teacher_top_k is not None:
            ids = torch.arange(self.teacher_top_k, device=device).repeat(self.num_rows, 1)
            return Teacher.from_top_k(torch.full(ids.shape, -math.log(self.vocab), device=device), ids, self.tail)
        if self.path == "divergence":
            return Teacher.from_logits(torch.zeros(self.tokens, columns, dtype=dtype, device=device))
        if self.teacher_hidden is None:
            return None
        hidden, weight = (torch.zeros(n, self.teacher_hidden, dtype=dtype, device=device) for n in (here, columns))
        return Teacher(hidden, weight)

    def _fields(self, device: torch.device) -> dict[str, Any]:
        """What the objective needs, such that no row is clipped, and as many as asked for have no advantage."""
        objective = self.objective or Objective()
        needed: dict[str, Any] = {name: torch.zeros(self.num_rows, device=device) for name in objective.required}
        if isinstance(objective, Preference):
            return needed
        # Spread evenly, so that every chunk has its share.
        so_far = torch.arange(self.num_rows + 1, device=device).mul(self.dropped).floor()
        return {**needed, "old_logprob": "current", "advantage": (so_far[1:] == so_far[:-1]).float()}


@dataclass(eq=False)
class RunningStep:
    """A step on a device: its operands, and the two halves of it.

    Attributes:
        leaves: what may need a gradient, by name.
        scored: rows, or targets of all tokens.
        options: of the call.
        fields: of the objective.
        machine: whose sizes apply; None for that of the device.
        teacher: of a divergence.
        plan: the route, once forward ran.
    """

    step: Step
    leaves: dict[str, Tensor]
    scored: Rows | Tensor
    options: Options
    fields: dict[str, Any]
    machine: Machine | None
    teacher: Teacher | None = None
    plan: LinearPlan | SupportPlan | LossPlan | PairPlan | None = None

    def __post_init__(self) -> None:
        first, step = next(iter(self.leaves.values())), self.step
        shape = () if step.path == "linear_policy_loss" else (step.num_rows,)
        self.upstream = torch.ones(shape, dtype=accumulation_dtype(first.dtype), device=first.device)
        # Of the log-probs of further ids, whose shape is another.
        self.further_upstream = self.upstream[..., None].expand(*shape, step.further_ids or 1).contiguous()

    def forward(self) -> tuple[Tensor, ...]:
        """What the call returns; the first one or two are differentiated, and extras that can be."""
        paths: dict[str, Callable[[], tuple[Any, ...]]] = {
            "torch": self._plain,
            "logprobs": self._from_logits,
            "linear_logprobs": self._from_hidden,
            "linear_policy_loss": self._policy_loss,
            "divergence": self._pair_of_logits,
            "linear_divergence": self._pair,
        }
        results = paths[self.step.path]()
        # Of two models the divergence alone is differentiated.
        more = () if "divergence" in self.step.path else results[3:]
        self.extras = tuple(x for x in more if x is not None and x.requires_grad)
        return tuple(x for x in results if x is not None)

    def backward(self, out: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Gradients of what needs one, by name."""
        wanted = {name: x for name, x in self.leaves.items() if x.requires_grad}
        if not wanted:
            return {}
        outputs = (*out[: 2 if self.step.entropy == "grad" else 1], *self.extras)
        upstream = tuple(self.further_upstream if x.dim() == 2 else self.upstream for x in outputs)
        found = torch.autograd.grad(_Root.apply(upstream, *outputs), list(wanted.values()), allow_unused=True)
        return {name: x for name, x in zip(wanted, found, strict=True) if x is not None}

    def _plain(self) -> tuple[Any, ...]:
        rows = self.scored
        index, target = (None, rows) if isinstance(rows, Tensor) else (rows.index, rows.target)
        function: Any = plain if "logits" in self.leaves else plain_linear
        return function(*self.leaves.values(), index, target, self.step.entropy)

    def _from_logits(self) -> tuple[Any, ...]:
        logits = self.leaves["logits"]
        call = resolve_logits(logits, self.scored, self.options, self.step.overwrite_logits)
        return score_logits(logits, self._as_run(call))

    def _operands(self) -> tuple[Tensor, Tensor, Options]:
        """Hidden states, weight and options; of a LoRA with the product that a call makes first."""
        hidden, weight = self.leaves["hidden"], self.leaves["weight"]
        if self.step.lora_rank is None:
            return hidden, weight, self.options
        return as_products_take(hidden, LoRA(weight, self.leaves["a"], self.leaves["b"]), self.options)

    def _as_run(self, call: Call) -> Call:
        """The call; of a dry run for a CPU, as if it had seen its targets."""
        return replace(call, found=True) if self.machine == CPU else call

    def _from_hidden(self) -> tuple[Any, ...]:
        hidden, weight, options = self._operands()
        call = self._as_run(resolve_hidden(hidden, weight, self.scored, options, self.machine))
        self.plan = choose_plan(call, needs_gradient(hidden, weight, options))
        return score(hidden, weight, call, self.plan)

    def _pair(self) -> tuple[Any, ...]:
        hidden, weight = self.leaves["hidden"], self.leaves["weight"]
        call = resolve_hidden(hidden, weight, self.scored, replace(self.options, entropy="grad"), self.machine)
        assert self.teacher is not None
        check_pair(call, hidden, self.teacher, PAIR)
        self.plan = route_of(call, needs_gradient(hidden, weight, self.options)[:3], self.teacher)
        return score_pair(hidden, weight, call, self.teacher, PAIR)

    def _pair_of_logits(self) -> tuple[Any, ...]:
        logits, teacher = self.leaves["logits"], self.teacher
        assert teacher is not None
        options = replace(self.options, entropy="grad")
        return score_pair_of_logits(logits, self.scored, teacher, PAIR, options, self.step.overwrite_logits)

    def _policy_loss(self) -> tuple[Any, ...]:
        (hidden, weight, options), objective = self._operands(), self.step.objective or Objective()
        options = replace(options, entropy=objective.entropy, stats=objective.stats)
        call = self._as_run(resolve_hidden(hidden, weight, self.scored, options, self.machine))
        call = replace(call, dropped=self.step.dropped)
        call, multiplied = (call, None) if self.teacher is None else with_teacher(call, hidden, objective, self.teacher)
        self.plan = plan_of(call, hidden, weight, objective, multiplied)
        inputs = objective.inputs(None, call.rows, self.fields)
        loss, metrics, _ = evaluate(hidden, weight, call, self.plan, objective, inputs, 1.0, True, self.teacher)
        self.metrics = metrics
        return (loss,)


class _Root(torch.autograd.Function):
    """A number that hands every output its upstream gradient. Handing them to autograd itself imports sympy."""

    @staticmethod
    def forward(ctx: Any, upstream: tuple[Tensor, ...], *outputs: Tensor) -> Tensor:
        ctx.upstream = upstream
        return upstream[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.upstream


def hand_over(buffer: Tensor) -> Tensor:
    """The buffer as a model's output would arrive: it requires a gradient and is neither a leaf nor a view.

    No copy is made, so whoever overwrites it overwrites ``buffer``.
    """
    handle = torch.zeros((), device=buffer.device, requires_grad=True)
    return _HandOver.apply(handle, buffer)  # pyright: ignore[reportReturnType]


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, handle: Tensor, buffer: Tensor) -> Tensor:
        return buffer.detach()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[None, None]:
        # The gradient is taken at the output; what lies before it does not matter here.
        return None, None


def _check_sizes(step: Step) -> None:
    teacher = {"teacher_hidden": 1, "teacher_top_k": 1}
    optional = {"rows": 0, "hidden": 1, "kept_ids": 0, "further_ids": 1, "lora_rank": 1, **teacher}
    least_of = {"tokens": 0, "vocab": 1, **optional, "tensor_parallel": 1}
    for name, least in least_of.items():
        size = getattr(step, name)
        if size is None and name in optional:
            continue
        if type(size) is not int or size < least:
            raise LogitlessError(f"estimate: {name} must be an integer of at least {least} but is {size!r}.")


def _check_choices(step: Step) -> None:
    for name, choices in (
        ("path", PATHS),
        ("dtype", DTYPES),
        ("device", ("cuda", "cpu")),
        ("entropy", (None, "value", "grad")),
        ("match", (None, "bfloat16", "float16")),
        ("scope", ("vocabulary", "support")),
        ("tail", TAILS),
    ):
        if getattr(step, name) not in choices:
            raise LogitlessError(f"estimate: {name} must be one of {list(choices)} but is {getattr(step, name)!r}.")
    names = step.needs_grad
    if isinstance(names, str) or not set(names) <= set(NAMES):
        raise LogitlessError(f"estimate: needs_grad must be a tuple of names out of {list(NAMES)} but is {names!r}.")
    if step.path != "torch" and step.chosen_backend == "reference":
        raise LogitlessError(
            'estimate: backend="reference" is for checking results, and its memory is not predicted. Ask for "auto", '
            '"tiled" or "triton".'
        )


def _check_combination(step: Step) -> None:
    path, ranks = step.path, step.tensor_parallel
    if (step.hidden is None) == (path in FROM_HIDDEN) and path != "torch":
        wanted = (
            "needs hidden=, the size of a hidden state" if step.hidden is None else "starts from logits: drop hidden="
        )
        raise LogitlessError(f'estimate: path "{path}" {wanted}.')
    if step.rows is not None and step.rows > step.tokens:
        raise LogitlessError(f"estimate: rows must be at most tokens, {step.tokens}, but is {step.rows}.")
    extras = bool(step.stats) or step.top_k is not None or step.further_ids is not None
    if extras and path not in ("logprobs", "linear_logprobs"):
        raise LogitlessError(
            f'estimate: stats, top_k and further_ids go with "logprobs" and "linear_logprobs" but path is "{path}".'
        )
    if step.lora_rank is not None and path not in FROM_HIDDEN:
        raise LogitlessError(f'estimate: lora_rank goes with paths from hidden states but path is "{path}".')
    if step.scope == "support" and step.kept_ids is None:
        raise LogitlessError('estimate: scope="support" needs kept_ids=, the kept ids of all rows together.')
    if path == "torch" and ranks > 1:
        raise LogitlessError(
            'estimate: path "torch" is the log_softmax of one rank. Give the vocabulary of one, and tensor_parallel=1.'
        )
    if step.sequence_parallel and (ranks == 1 or step.tokens % ranks or path not in FROM_HIDDEN):
        raise LogitlessError(
            f"estimate: sequence_parallel=True needs a path from hidden states, and tokens that divide over "
            f"tensor_parallel ranks, but path is {path}, tokens {step.tokens} and tensor_parallel {ranks}."
        )


def _check_loss(step: Step) -> None:
    objective, counts = step.objective, step.counts
    if step.path != "linear_policy_loss":
        if objective is not None or counts is not None or step.dropped:
            raise LogitlessError(
                f'estimate: objective, counts and dropped go with path "linear_policy_loss" but path is "{step.path}".'
            )
        return
    if not isinstance(objective, Objective | Preference | None):
        raise LogitlessError(
            f"estimate: objective must be an Objective or a Preference but is {type(objective).__name__}."
        )
    computed = (objective or Objective()).entropy
    if step.entropy not in (None, computed):
        raise LogitlessError(
            f'estimate: entropy is "{step.entropy}" but the objective computes "{computed}". Leave entropy out; an '
            f"objective with an entropy_coef differentiates it."
        )
    if counts is not None and (sum(counts) != step.num_rows or min(counts, default=0) < 0):
        raise LogitlessError(
            f"estimate: counts must be 0 or more and add up to the {step.num_rows} rows but they add up to "
            f"{sum(counts)}, the smallest being {min(counts, default=0)}."
        )
    if not 0 <= step.dropped <= 1:
        raise LogitlessError(f"estimate: dropped must be a share between 0 and 1 but is {step.dropped!r}.")


def _check_teacher(step: Step) -> None:
    given = [name for name in ("teacher_hidden", "teacher_top_k") if getattr(step, name) is not None]
    taught = getattr(step.objective, "divergence", None) is not None
    may = {"linear_divergence": 1, "linear_policy_loss": int(taught)}.get(step.path, 0)
    if len(given) != may and not (step.path == "divergence" and given in ([], ["teacher_top_k"])):
        wanted = "one of teacher_hidden and teacher_top_k" if may else "none of teacher_hidden and teacher_top_k"
        raise LogitlessError(
            f'estimate: path "{step.path}"{" with this objective" if step.objective is not None else ""} takes '
            f"{wanted} but got {given}."
        )
