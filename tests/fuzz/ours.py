"""The library's side of a case: the same tensors through the public functions, values and gradients by name."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from calls import from_hidden, from_logits, loss_from_hidden
from torch import Tensor

import logitless as ll
from fuzz import extras
from fuzz.build import IGNORE, SCALE, Inputs, Part, kept_of, rows_of
from fuzz.cases import HEAD, LOGITS, LOSS, LOSSES, MODULE, SAMPLES, TWO_CALLS
from fuzz.losses import FACTOR, Fields, prompts_of
from fuzz.oracle import BUFFER, NAMES, Answer
from logitless.backends import choose_backend, run_gradient, run_statistics
from logitless.backends.contract import Problem
from logitless.readings.found import Asked, Lines, find
from logitless.softmax import coefficients, merge, target_column
from logitless.spec import parse_memory


class WrongRows(AssertionError):
    """The library's rows are not those of the oracle."""


def answer(inputs: Inputs, fields: Fields | None, device: str = "cpu", rank: int = 0) -> Answer:
    """Values and gradients of a case on this rank. Raises what the library raises."""
    case = inputs.case
    leaves = {
        name: cut(x, name, inputs, rank).to(device, copy=True).requires_grad_(inputs.wanted(name))
        for name, x in inputs.leaves.items()
    }
    views = {name: inputs.views[name](x) for name, x in leaves.items()}
    if case.shards > 1:
        return _merged(inputs, leaves, views, device)
    given, start = _options(inputs, views, device, rank)
    outputs, upstream, found = [], [], []
    for k, part in enumerate(inputs.parts):
        if case.parallel == "sequence" and k != rank:
            continue
        rows = rows_of(inputs, part, k, device)
        _check_rows(inputs, part, rows)
        options = given | {"head": _head(inputs, part, device), "kept": kept_of(inputs, part, device)}
        options |= extras.asked(inputs, part, device)
        x = views[part.leaf]
        if case.overwrite:
            # Neither a leaf nor a view, as a model's own output is.
            x = x * 1
        if case.path in LOSSES:
            with _autocast(inputs, device):
                loss, out = _loss(inputs, part, x, views, rows, options, fields, device)
            found.append({"loss": loss.detach(), **_values(out)})
            outputs.append(loss)
            upstream.append(torch.full_like(loss.detach(), FACTOR * case.grad_scale))
            continue
        with _autocast(inputs, device):
            out = _stats(inputs, x, views, rows, options)
        found.append(_values(out) | _extra_values(inputs, out))
        _check_graph(inputs, out, case.entropy)
        extras.check(out, torch.tensor(part.target, dtype=torch.int64, device=device))
        both = [*zip(out[:3], inputs.upstream[:, part.rows], strict=True)]
        both += [(getattr(out, name), extras.upstream(inputs, name)[part.rows]) for name in extras.GRADED]
        pairs = [(v, g) for v, g in both if v is not None and v.requires_grad]
        outputs += [v for v, _ in pairs]
        upstream += [g.to(v).view(v.shape) for v, g in pairs]
    if case.parallel == "sequence":
        leaves = {name: x for name, x in leaves.items() if not name.startswith("x") or name == f"x{rank}"}
    gradients = _gradients(inputs, leaves, outputs, upstream)
    if given.get("weight_grad") is not None:
        gradients.pop("weight", None)
        if inputs.wanted("weight") and outputs:
            gradients["weight"] = _buffered(inputs, given["weight_grad"] - start, leaves["weight"])
    return Answer(_joined(found), gradients, {}, {})


def _joined(found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Losses of the parts add up; rows follow each other."""
    joined = {name: torch.cat([x[name] for x in found]) for name in found[0] if name != "loss"}
    if "loss" in found[0]:
        joined["loss"] = torch.stack([x["loss"] for x in found]).sum()
    return joined


def _values(out: ll.TokenStats) -> dict[str, Tensor]:
    return {n: v.detach().reshape(-1) for n, v in zip(NAMES, out[:3], strict=True) if v is not None}


def _extra_values(inputs: Inputs, out: ll.TokenStats) -> dict[str, Tensor]:
    """Whatever else came, in rows; ids only where there is one right answer."""
    left_out = {"top1_hit", *(() if inputs.case.path == LOGITS else extras.IDS)}
    came = {n: v.detach() for n, v in out._asdict().items() if v is not None and n not in (*NAMES, *left_out)}
    wide = {n: v if v.is_floating_point() else v.double() for n, v in came.items()}
    return {n: v.flatten(0, -2) if n.endswith("s") else v.reshape(-1) for n, v in wide.items()}


def _autocast(inputs: Inputs, device: str) -> Any:
    return torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=inputs.case.autocast)


def _gradients(inputs: Inputs, leaves: dict[str, Tensor], outputs: list, upstream: list) -> dict[str, Tensor]:
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    live = [(x, g) for x, g in zip(outputs, upstream, strict=True) if x.requires_grad]
    if not wanted or not live:
        return {}
    out, g = zip(*live, strict=True)
    twice = inputs.case.twice
    found = torch.autograd.grad(out, list(wanted.values()), g, retain_graph=twice, allow_unused=True)
    if twice:
        again = torch.autograd.grad(out, list(wanted.values()), g, allow_unused=True)
        for name, a, b in zip(wanted, found, again, strict=True):
            if inputs.case.weight_grad and name == "weight":
                continue
            if (a is None) != (b is None) or (a is not None and not _same_bits(a, b)):
                raise AssertionError(f"the second backward gives {name} another gradient")
    pairs = zip(wanted.items(), found, strict=True)
    return {name: torch.zeros_like(x) if d is None else d for (name, x), d in pairs}


def _buffered(inputs: Inputs, added: Tensor, leaf: Tensor) -> Tensor:
    """What the buffer says the leaf's gradient is: each backward adds to it once."""
    wide = leaf.detach().double().requires_grad_()
    (found,) = torch.autograd.grad(inputs.views["weight"](wide), wide, added.double())
    return (found / 2 if inputs.case.twice else found).float()


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _check_graph(inputs: Inputs, out: ll.TokenStats, entropy: str | None) -> None:
    """Entropy is there if asked for, and has a graph only if that was asked for too."""
    if (out.entropy is None) != (entropy is None):
        raise AssertionError(f"entropy={entropy!r} gave {out.entropy}")
    if out.entropy is not None and out.entropy.requires_grad and entropy != "grad":
        raise AssertionError('entropy="value" has a graph')


def _check_rows(inputs: Inputs, part: Part, rows: Any) -> None:
    if inputs.case.layout not in SAMPLES:
        return
    came = (rows.index.tolist(), rows.target.tolist(), rows.sample.tolist(), rows.position.tolist())
    wanted = (part.index, part.target, part.sample, part.position)
    if came != wanted:
        raise WrongRows(f"rows (index, target, sample, position) are {came}, not {wanted}")
    if rows.totals.tolist() != inputs.totals.tolist():
        raise WrongRows(f"totals are {rows.totals.tolist()}, not {inputs.totals.tolist()}")


def cut(x: Tensor, name: str, inputs: Inputs, rank: int) -> Tensor:
    """This rank's columns of the vocabulary, and its tokens under sequence parallelism."""
    case = inputs.case
    if case.parallel != "vocabulary":
        return x
    a, b = bounds(inputs, rank)
    if name in ("weight", "bias", "b"):
        return x[a:b]
    if name == "a":
        return x
    if case.path == LOGITS:
        return x[..., a:b]
    return x.chunk(case.ranks)[rank] if case.sequence_parallel else x


def bounds(inputs: Inputs, rank: int) -> tuple[int, int]:
    """Uneven shards, now and then one of nothing or of nothing but padding."""
    case = inputs.case
    columns, at = inputs.num_columns, (1, 2, 0, 3)[case.seed % 4]
    middle = (columns * at) // 3
    cuts = (
        [0, middle, columns]
        if case.ranks == 2
        else [0, *(columns * k // case.ranks for k in range(1, case.ranks)), columns]
    )
    return cuts[rank], cuts[rank + 1]


def _options(inputs: Inputs, views: dict[str, Tensor], device: str, rank: int) -> tuple[dict[str, Any], Tensor | None]:
    """Keyword arguments that all parts share, and what the gradient buffer holds before."""
    case = inputs.case
    given: dict[str, Any] = {"backend": case.backend}
    if case.memory is not None:
        given["memory"] = case.memory
    if case.path not in LOSSES:
        given["entropy"] = case.entropy
    if case.shards == 1:
        given["shard"] = ll.VocabShard(0, inputs.num_columns, _group_of_one(), check_calls=case.seed % 2 == 0)
    if case.parallel == "vocabulary":
        given["shard"] = ll.VocabShard(*bounds(inputs, rank), dist.group.WORLD, check_calls=True)
    start = None
    given["bits"] = "canonical" if case.canonical else "fast"
    if case.path == LOGITS:
        given["overwrite"] = case.overwrite
        return given, None
    given |= {"match": case.match, "hidden_grad": case.hidden_grad}
    given["sequence_parallel"] = case.sequence_parallel
    if case.path != MODULE:
        given |= {"bias": views.get("bias"), "precision": case.precision}
    if case.weight_grad:
        buffer = torch.full(views["weight"].shape, BUFFER, device=device)
        given["weight_grad"], start = buffer, buffer.clone()
    return given, start


_groups: list[Any] = []


def _group_of_one() -> Any:
    """A real process group of this process alone, made once."""
    if not _groups:
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        _groups.append(dist.group.WORLD if dist.get_world_size() == 1 else dist.new_group([dist.get_rank()]))
    return _groups[0]


def leave_group() -> None:
    """Let go of the group of one, so that others may make theirs."""
    if _groups and dist.is_initialized():
        dist.destroy_process_group()
    _groups.clear()


def _head(inputs: Inputs, part: Part, device: str) -> ll.Head:
    case, t = inputs.case, inputs.temperature
    t = t[part.rows].to(device) if isinstance(t, Tensor) else t
    vocab = case.vocab if case.extra_columns else None
    return ll.Head(temperature=t, scale=case.scale, softcap=case.softcap, vocab_size=vocab)


def _stats(inputs: Inputs, x: Tensor, views: dict[str, Tensor], rows: Any, options: dict[str, Any]) -> ll.TokenStats:
    path = inputs.case.path
    if path == LOGITS:
        return from_logits(x, rows, **options)
    if path == HEAD:
        return from_hidden(x, _weight(views), rows, **options)
    return ll.PolicyHead(_Layer(views["weight"], views.get("bias")), **options)(x, rows)  # pyright: ignore


def _weight(views: dict[str, Tensor]) -> Any:
    """The head's weight, with its adapter if there is one."""
    return ll.LoRA(views["weight"], views["a"], views["b"], SCALE) if "a" in views else views["weight"]


class _Layer(torch.nn.Module):
    """A linear layer whose weight may be a view of a leaf."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.__dict__["weight"], self.__dict__["bias"] = weight, bias


def _loss(
    inputs: Inputs, part: Part, x: Tensor, views: dict, rows: Any, options: dict, fields: Fields | None, device: str
) -> tuple[Tensor, ll.TokenStats]:
    case = inputs.case
    assert fields is not None
    own = {name: v[part.rows].to(device) for name, v in vars(fields).items()}
    if case.on_policy:
        own["old_logprob"] = "current"
    changes = {k: dict(v) if k == "policy_options" else v for k, v in case.objective}
    objective = ll.Objective.recipe(case.recipe, **changes) if case.recipe else ll.Objective(**changes)
    batch: dict[str, Any] = {"denominator": case.denominator}
    if objective.reduce == "prompt_mean":
        tokens, num = prompts_of(inputs)
        batch |= {
            "prompt_tokens": tokens.to(device),
            "denominator": num if case.denominator is None else case.denominator,
        }
    if case.parallel == "sequence":
        batch |= {"group": dist.group.WORLD, "check_group": case.seed % 2 == 0}
    if case.path == LOSS:
        if case.weight_grad:
            options = options | {"grad_scale": FACTOR * case.grad_scale}
        options = options | {"drop_zeros": not case.keep_zeros}
        if case.seed % 3 == 0 and not case.lora:
            # Every third through the module: the bias is its layer's, and the temperature comes with the loss.
            layer, head = _Layer(views["weight"], options.pop("bias")), options.pop("head")
            module = ll.PolicyHead(layer, head=replace(head, temperature=1.0), **options)  # pyright: ignore
            out = module(x, rows, loss=ll.Loss(objective, temperature=head.temperature, **batch, **own))
            return out.loss, out.stats
        options["return_stats"] = True
        loss, _, stats = loss_from_hidden(x, _weight(views), rows, objective, **options, **batch, **own)
        return loss, stats
    assert case.path == TWO_CALLS
    stats = from_hidden(x, _weight(views), rows, entropy=objective.entropy, **options)
    if not isinstance(rows, ll.Rows):
        stats = stats.each(lambda v: v.reshape(-1))
        rows = ll.Rows.every(rows) if isinstance(rows, Tensor) else ll.Rows.at(*rows)
    return objective(stats, rows, **batch, **own)[0], stats


def _merged(inputs: Inputs, leaves: dict[str, Tensor], views: dict[str, Tensor], device: str) -> Answer:
    """Vocabulary shards one after the other in this process: a statistic each, one merge, a gradient each."""
    case, (part,) = inputs.case, inputs.parts
    x = views[part.leaf]
    matrix = x.detach().reshape(-1, x.shape[-1]).contiguous()
    index, target = (torch.tensor(v, dtype=torch.int64, device=device) for v in (part.index, part.target))
    head, wide = _head(inputs, part, device), torch.float64 if x.dtype == torch.float64 else torch.float32
    gain, memory = head.gain(len(target), wide, x.device), parse_memory(case.memory or "16MiB")
    backend = choose_backend(x, case.backend).name
    cuts = [case.vocab * k // case.shards for k in range(case.shards + 1)]
    problems = []
    for a, b in pairwise(cuts):
        column = target_column(target, a, b - a)
        problems.append(Problem(matrix[:, a:b], index, column, gain, head.squash, b - a, True, memory))
    lines = merge(torch.stack([run_statistics(backend, p) for p in problems]))
    ignored = target == IGNORE
    r = find(Asked(target, gain, head.squash, ignored, entropy=True, group=None), Lines(lines))
    values = {name: r.results[name] for name in NAMES if name != "entropy" or case.entropy is not None}
    if not leaves[part.leaf].requires_grad:
        return Answer(values, {}, {}, {})
    g_l, g_h, g_z = inputs.upstream.to(device, wide)
    g_h = g_h if case.entropy == "grad" else None
    coef = coefficients(r.saved["logprob"], r.norm, r.saved["mean"], g_l, g_h, g_z)
    d_x = torch.zeros_like(matrix)
    for problem, a, b in zip(problems, cuts[:-1], cuts[1:], strict=True):
        out = torch.empty((len(matrix), b - a), dtype=x.dtype, device=x.device)
        run_gradient(backend, problem, r.norm, coef, out, index)
        d_x[:, a:b] = out
    (gradient,) = torch.autograd.grad(x, [leaves[part.leaf]], d_x.view(x.shape))
    return Answer(values, {part.leaf: gradient}, {}, {})
