"""The oracle: what a call must give, from plain torch operations and autograd, in float64.

Nothing here is the library's: ``log_softmax``, a product, and the formulas of ``losses.py``. The same lines in the
working precision are the yardstick (*plain torch*). Next to each number stands a *unit*, what rounding alone may do to
it, from the sizes of the terms that are added up there:

    a value      8 roundings at the size of the row's logits
    dZ           8 roundings at that size of  |g| (onehot + p) slope, for 16-bit operands the roundings of dZ itself;
                 a p below the smallest normal number may be 0, as accelerators have it, with all that it is a factor of
    a gradient   those of dZ through |W|, |X| and the views, as errors travel

so that an element that is nothing but cancellation is not asked for digits that no order of summation has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fuzz import extras
from fuzz.build import IGNORE, SCALE, Inputs
from fuzz.cases import LINEAR, LOGITS, LOSS, LOSSES
from fuzz.losses import Fields, Told, fields_of, tell

ROUNDINGS = {torch.float32: 8 * 2.0**-24, torch.float64: 16 * 2.0**-53}
"""Eight roundings. In float64 the truth has as many of its own, and there is no yardstick."""

HALF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""The most that one rounding does: half a unit in the last place of a number just above a power of two."""

LEFT_OUT = {"float32": 0.0, "bfloat16x3": 3 * 2.0**-18}
"""Of a term of a product, by its precision: what two parts of 8 bits leave out of both numbers, and the small parts'
own product."""

BUFFER = 0.25
"""What a buffer for the weight's gradient holds before, so that it is seen whether it is added to."""

STORED = {LOGITS: 1.0, LOSS: 4.0}
"""Roundings to 16 bits on the way: the stored gradient; from hidden states also dZ and the stored exponentials (3), and
in one pass the gradient before it is scaled (4)."""


NAMES = ("logprob", "entropy", "log_z")


@dataclass(frozen=True, eq=False)
class Scored:
    """Results of the rows that are not ignored, and the graph behind them."""

    leaves: dict[str, Tensor]
    rows: Tensor
    weight: Tensor | None
    low: tuple[Tensor, Tensor] | None
    logits: Tensor
    z: Tensor
    slope: Tensor
    log_p: Tensor
    logprob: Tensor
    entropy: Tensor
    log_z: Tensor

    @property
    def sizes_of_weight(self) -> Tensor:
        """What each element of the weight is made of, all of it positive."""
        assert self.weight is not None
        if self.low is None:
            return self.weight.abs()
        a, b = self.low
        return self.weight.abs() + SCALE * b.abs() @ a.abs()


@dataclass(frozen=True, eq=False)
class Answer:
    """What a call gives: values and gradients by name, and for the truth their units.

    Attributes:
        fields: of a loss, what it is given.
        margin, blur: how near a comparison of the loss is to its bound, and how near rounding may bring it.
    """

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]
    value_units: dict[str, Tensor]
    gradient_units: dict[str, Tensor]
    fields: Fields | None = None
    margin: float = 1.0
    blur: float = 0.0


def truth(inputs: Inputs) -> Answer:
    """In float64, with units."""
    return _answer(inputs, torch.float64, None, None)


def plain(inputs: Inputs, fields: Fields | None) -> Answer:
    """As a framework does it today: float32, or float64 for float64; gradients in the dtype of the leaves."""
    dtype = getattr(torch, inputs.case.dtype)
    return _answer(inputs, torch.float64 if dtype == torch.float64 else torch.float32, dtype, fields)


def _answer(inputs: Inputs, wide: torch.dtype, stored: torch.dtype | None, fields: Fields | None) -> Answer:
    case = inputs.case
    active = (inputs.target != IGNORE).nonzero().squeeze(1)
    s = _score(inputs, active, wide, stored)
    told: Told | None = None
    g = inputs.upstream[:, active].to(wide)
    slack = g.abs()
    if case.path in LOSSES:
        fields = fields or fields_of(inputs, active, s.logprob.detach())
        told = tell(inputs, active, fields, s.logprob, s.entropy, s.log_z, wide)
        g, slack = told.upstream, told.slack
    elif case.entropy != "grad":
        g = g * torch.tensor([[1.0], [0.0], [1.0]], dtype=wide)
        slack = g.abs()
    if case.scope == "support" and case.path not in LOSSES:
        # There is no log Z to be differentiated.
        g, slack = (x * torch.tensor([[1.0], [1.0], [0.0]], dtype=wide) for x in (g, slack))
    wanted = {name: x for name, x in s.leaves.items() if x.requires_grad}
    results, gradients = [s.logprob, s.entropy, s.log_z], {}
    told_extras = {} if case.path in LOSSES else extras.told(inputs, active, s)
    graded = [name for name in extras.GRADED if name in told_extras]
    if wanted and s.logprob.requires_grad:
        outputs = [*results, *(told_extras[name] for name in graded)]
        g = [*g, *(extras.upstream(inputs, name)[active].to(wide) for name in graded)]
        found = torch.autograd.grad(outputs, list(wanted.values()), g, retain_graph=True, allow_unused=True)
        pairs = zip(wanted.items(), found, strict=True)
        gradients = {name: torch.zeros_like(x) if d is None else d for (name, x), d in pairs}
    values = {name: _full(x, active, inputs) for name, x in zip(NAMES, results, strict=True)}
    nothing = {name: -1.0 if name in extras.IDS else 0.0 for name in told_extras}
    values |= {name: _full(x, active, inputs, nothing[name]) for name, x in told_extras.items()}
    if told is not None:
        values["loss"] = told.loss
    units, gradient_units, blur = {}, {}, 0.0
    if stored is None:
        units, gradient_units, blur = _units(inputs, active, s, slack, told, wanted)
    return Answer(values, gradients, units, gradient_units, fields, 1.0 if told is None else told.margin, blur)


def _full(x: Tensor, active: Tensor, inputs: Inputs, nothing: float = 0.0) -> Tensor:
    """A value for every row, that of nothing where it is ignored."""
    out = torch.full((len(inputs.target), *x.shape[1:]), nothing, dtype=x.dtype)
    return out.index_copy_(0, active, x.detach())


def len_of(lead: tuple[int, ...]) -> int:
    """Tokens of a tensor with these leading dimensions."""
    return torch.Size(lead).numel()


def _rounded(x: Tensor) -> Tensor:
    """As bfloat16 has it. An infinity stays one."""
    step = (x.bfloat16().to(x) - x).detach()
    return x + torch.where(step.isnan(), 0.0, step)


def _score(inputs: Inputs, active: Tensor, wide: torch.dtype, stored: torch.dtype | None) -> Scored:
    case = inputs.case
    leaves = {
        name: x.to(stored or wide, copy=True).requires_grad_(inputs.wanted(name)) for name, x in inputs.leaves.items()
    }
    last = case.width if case.path in LINEAR else inputs.num_columns
    taken = leaves
    if case.autocast and case.dtype == "float32":
        # Rounded on the way in; the gradient passes through.
        taken = {name: _rounded(x) for name, x in leaves.items()}
    flat = [inputs.views[p.leaf](taken[p.leaf]).reshape(len_of(p.lead), last) for p in inputs.parts]
    tokens = flat[0] if len(flat) == 1 else torch.cat(flat)
    rows = tokens[inputs.index[active]].to(wide)
    weight = low = None
    if case.path in LINEAR:
        weight = inputs.views["weight"](taken["weight"])[: case.vocab].to(wide)
        logits = rows @ weight.T
        if case.lora:
            low = taken["a"].to(wide), taken["b"][: case.vocab].to(wide)
            logits = logits + SCALE * (rows @ low[0].T) @ low[1].T
        if case.bias:
            logits = logits + taken["bias"][: case.vocab].to(wide)
        if case.match is not None:
            rounded = logits.detach().to(getattr(torch, case.match)).to(wide)
            logits = logits + (rounded - logits.detach())
    else:
        rows = logits = rows[:, : case.vocab]
    temperature = inputs.temperature
    if isinstance(temperature, Tensor):
        temperature = temperature[active].to(wide)[:, None]
    slope = torch.full_like(logits, case.scale)
    z = logits * case.scale
    if case.softcap is not None:
        y = torch.tanh(z / case.softcap)
        z, slope = case.softcap * y, case.scale * (1 - y.detach() ** 2)
    z, slope = z / temperature, slope / temperature
    if case.scope == "support":
        z = z.masked_fill(~inputs.support[active], -torch.inf)
    log_p = torch.log_softmax(z, -1)
    p = log_p.exp()
    entropy = -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1)
    target = inputs.target[active][:, None]
    logprob = log_p.gather(-1, target).squeeze(-1)
    if inputs.support is not None:
        own = z.masked_fill(~inputs.support[active], -torch.inf)
        logprob = torch.log_softmax(own, -1).gather(-1, target).squeeze(-1)
    return Scored(leaves, rows, weight, low, logits, z, slope, log_p, logprob, entropy, torch.logsumexp(z, -1))


@torch.no_grad()
def _units(
    inputs: Inputs, active: Tensor, s: Scored, slack: Tensor, told: Told | None, wanted: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """What rounding may do to each value, to each element of each gradient, and at most to a log-prob."""
    case, dtype = inputs.case, getattr(torch, inputs.case.dtype)
    in_parts = case.precision != "float32"
    dtype = torch.bfloat16 if (case.autocast and dtype == torch.float32) or in_parts else dtype
    unit = ROUNDINGS[torch.float64 if dtype == torch.float64 else torch.float32] + LEFT_OUT[case.precision]
    p, log_p = s.log_p.exp(), s.log_p.masked_fill(s.log_p == -torch.inf, 0.0).abs()
    gain, size, sizes = _sizes(inputs, active, s, p)
    entropy = s.entropy.abs()
    of_entropy, of_logprob = size * (1 + 2 * entropy), size + s.logprob.abs()
    found = {"logprob": of_logprob, "entropy": of_entropy, "log_z": size + s.log_z.abs()}
    asked = case.path not in LOSSES and bool(case.stats or case.top_k or case.ids)
    found |= extras.value_sizes(inputs, active, s, sizes, size) if asked else {}
    values = {name: unit * _full(x, active, inputs) for name, x in found.items()}
    if told is not None:
        # Ratios are exponentials of log-probs: an error there is a factor of the row's terms.
        by_logprob = told.terms * (1 + of_logprob) + slack[0] * of_logprob
        values["loss"] = unit * (by_logprob + slack[1] * of_entropy + slack[2] * found["log_z"]).sum()
    blur = float((unit * of_logprob).amax()) if len(active) else 0.0
    if not wanted:
        return values, {}, blur
    onehot = torch.zeros_like(p).scatter_(1, inputs.target[active][:, None], 1.0)
    over = p
    if inputs.support is not None:
        own = s.z.masked_fill(~inputs.support[active], -torch.inf)
        over = torch.softmax(own, -1)
    g_l, g_h, g_z = slack[:, :, None]

    def terms(most: float) -> Tensor:
        """The terms that a probability is a factor of, for so much of it at most."""
        q = p.clamp_max(most)
        small = extras.terms(inputs, active, s, p, most)[0] if asked else 0.0
        return g_l * over.clamp_max(most) + g_z * q + g_h * q * (1 + log_p + entropy[:, None]) + small

    core = g_l * onehot + terms(1.0) + (extras.terms(inputs, active, s, p, 1.0)[1] if asked else 0.0)
    every = (g_l + g_h + g_z) * gain
    # An error of a logit is a factor of its probability.
    d_z = torch.expm1((unit * size).clamp_max(50.0))[:, None] * core * gain + 1e-37 * every
    d_z = d_z + terms(torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).smallest_normal) * gain
    if dtype in HALF:
        # Gradients of several parts or ranks are added up in 16 bits, outside of the library. In parts dZ meets the
        # large part of a float32 operand.
        times = STORED.get(case.path, 3.0) + case.ranks - 1 + len(inputs.parts) - 1 + in_parts
        least = torch.finfo(dtype).smallest_normal
        d_z = d_z + times * HALF[dtype] * (core * s.slope.abs() + least * (1 + every))
    return values, _through(inputs, active, s, d_z, wanted, dtype), blur


def _sizes(inputs: Inputs, active: Tensor, s: Scored, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``[R, 1]`` factor of each row's logits, how large the numbers are of which its z is made, and those of each z."""
    case = inputs.case
    t = inputs.temperature
    t = (
        t[active].double()[:, None]
        if isinstance(t, Tensor)
        else torch.full((len(active), 1), float(t), dtype=torch.float64)
    )
    gain = abs(case.scale) / t
    x = s.logits.abs()
    if s.weight is not None:
        x = s.rows.abs() @ s.sizes_of_weight.T
        if case.bias:
            x = x + inputs.leaves["bias"][: case.vocab].double().abs()
    z = x * gain if case.softcap is None else case.softcap / t + x * s.slope.abs()
    # A logit without probability has no say, however large it is, unless it is the target's.
    sizes = torch.where(z.isfinite(), z, 0.0)
    z = torch.where(p > 1e-30, z, 0.0).scatter_reduce(1, inputs.target[active][:, None], z, "amax")
    z = torch.where(z.isfinite(), z, 0.0)
    size = z.amax(1) if z.shape[1] else z.sum(1)
    # The sum of so many exponentials has a logarithm of its own, however small the logits are.
    return gain, size.clamp_min(1.0 + math.log(case.vocab)), sizes


def _through(
    inputs: Inputs, active: Tensor, s: Scored, d_z: Tensor, wanted: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Units of the leaves from those of dZ: the same sums, with every term positive."""
    units, case = {}, inputs.case
    xs = {name: x for name, x in wanted.items() if name.startswith("x")}
    if xs:
        of_rows = d_z if s.weight is None else d_z @ s.sizes_of_weight
        if len(xs) == 1 and not case.stride and not case.extra_columns and not case.autocast:
            (x,) = xs.values()
            units["x0"] = torch.zeros_like(x)
            units["x0"].view(-1, x.shape[-1])[inputs.index[active]] = of_rows
        else:
            found = torch.autograd.grad(s.rows, list(xs.values()), of_rows, retain_graph=True, allow_unused=True)
            units |= {n: torch.zeros_like(x) if u is None else u for (n, x), u in zip(xs.items(), found, strict=True)}
    if "weight" in wanted and s.weight is not None:
        of_weight = d_z.T @ s.rows.abs()
        if case.weight_grad:
            of_weight = of_weight + ROUNDINGS[torch.float32] * BUFFER
        direct = not case.weight_stride and not case.extra_columns and not case.autocast
        units["weight"] = of_weight if direct else torch.autograd.grad(s.weight, wanted["weight"], of_weight)[0]
        if case.weight_grad and dtype == torch.float64:
            # The buffer is float32, whatever the operands are.
            units["weight"] = units["weight"] * (ROUNDINGS[torch.float32] / ROUNDINGS[torch.float64])
    if s.low is not None:
        a, b = s.low
        both = {"a": SCALE * (d_z @ b.abs()).T @ s.rows.abs(), "b": torch.zeros_like(s.leaves["b"])}
        both["b"][: case.vocab] = SCALE * d_z.T @ (s.rows.abs() @ a.abs().T)
        units |= {name: unit for name, unit in both.items() if name in wanted}
    if "bias" in wanted:
        units["bias"] = torch.zeros_like(wanted["bias"])
        units["bias"][: inputs.case.vocab] = d_z.sum(0)
    if dtype in HALF:
        least = HALF[dtype] * torch.finfo(dtype).smallest_normal
        units = {name: torch.where(u > 0, u + least, u) for name, u in units.items()}
    return units
