"""``stats=``, ``top_k=`` and ``ids=`` of a case: what is asked for, what it must give, and with which units.

Ids and ranks have one right answer only where logits are given: logits that are products may be nearly equal, and then
either order is right. There it is checked that ids, ranks and top-1 say the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fuzz.build import IGNORE, Inputs, Part
from fuzz.cases import LOGITS

if TYPE_CHECKING:
    from fuzz.oracle import Scored

GRADED = ("collision", "mean_logit", "ids_logprobs")
IDS = ("top1_id", "rank", "top_k_ids")


def asked(inputs: Inputs, part: Part, device: str) -> dict[str, Any]:
    """Keyword arguments of one part."""
    case = inputs.case
    given: dict[str, Any] = {"stats": case.stats} if case.stats else {}
    if case.top_k:
        given["top_k"] = case.top_k
    if case.ids:
        given["ids"] = inputs.ids[part.rows].to(device)
    return given


def upstream(inputs: Inputs, name: str) -> Tensor:
    """Gradient of a result, in float64: the same for the library and the oracle."""
    case = inputs.case
    shape = (len(inputs.target), *((case.ids,) if name == "ids_logprobs" else ()))
    generator = torch.Generator().manual_seed(case.seed + 1 + GRADED.index(name))
    g = torch.randn(shape, generator=generator, dtype=torch.float64)
    g[::2] *= case.upstream != "some rows"
    return g * (case.upstream in ("all", "some rows"))


def told(inputs: Inputs, active: Tensor, s: Scored) -> dict[str, Tensor]:
    """Every result that is asked for of the rows that are not ignored, with the graph of their logits."""
    case, ids = inputs.case, inputs.ids[active]
    there = s.z != -torch.inf
    order = (s.logits if case.scale > 0 else -s.logits).sort(dim=1, descending=True, stable=True).indices
    own = inputs.target[active][:, None]
    count = there.sum(1)
    # Divided first: a few logits at the lowest number of float64 have no sum.
    mean = torch.where(there, s.z / count[:, None], 0.0).sum(1)
    found = {
        "top1_id": order[:, 0].to(s.z.dtype) if case.vocab else count,
        "top1_logprob": s.log_p.amax(1),
        "collision": s.log_p.exp().square().sum(1),
        "mean_logit": mean,
        "logit_variance": torch.where(there, s.z - mean[:, None], 0.0).square().sum(1) / count,
        "max_logit": s.z.amax(1),
        "rank": (order == own).int().argmax(1).to(s.z.dtype),
        "top_k_ids": order[:, : case.top_k].to(s.z.dtype),
        "top_k_logprobs": s.log_p.gather(1, order[:, : case.top_k]),
        "ids_logprobs": s.log_p.gather(1, ids.clamp_min(0)).masked_fill(ids == IGNORE, 0.0),
    }
    wanted = {*case.stats, *(("top1_id", "top1_logprob") if "top1" in case.stats else ())}
    wanted |= {"top_k_ids", "top_k_logprobs"} if case.top_k else set()
    wanted |= {"ids_logprobs"} if case.ids else set()
    exact = () if case.path == LOGITS else IDS
    return {name: x for name, x in found.items() if name in wanted and name not in exact}


def value_sizes(inputs: Inputs, active: Tensor, s: Scored, sizes: Tensor, size: Tensor) -> dict[str, Tensor]:
    """How large the numbers are of which each result is made, from those of each z ``[R, V]`` and of log Z."""
    case, right = inputs.case, told(inputs, active, s)
    sizes = torch.where(s.z == -torch.inf, 0.0, sizes)
    most = sizes.amax(1)
    order = (s.logits if case.scale > 0 else -s.logits).sort(dim=1, descending=True, stable=True).indices
    of_best = sizes.gather(1, order[:, : max(case.top_k, 1)]) + size[:, None]
    found = {
        "top1_id": torch.zeros_like(size),
        "rank": torch.zeros_like(size),
        "top1_logprob": of_best[:, 0],
        "collision": 4 * size,
        "mean_logit": 1 + most,
        "logit_variance": (1 + most) ** 2,
        "max_logit": of_best[:, 0],
        "top_k_ids": torch.zeros_like(of_best),
        "top_k_logprobs": of_best,
        "ids_logprobs": sizes.gather(1, inputs.ids[active].clamp_min(0)) + size[:, None],
    }
    return {name: found[name] + _finite(x) * (name not in IDS) for name, x in right.items()}


def terms(inputs: Inputs, active: Tensor, s: Scored, p: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """Terms of dZ that a probability of at most so much is a factor of, and all others, every one positive."""
    q, case = p.clamp_max(most), inputs.case
    small, rest = torch.zeros_like(p), torch.zeros_like(p)
    if "collision" in case.stats:
        small = small + 2 * upstream(inputs, "collision")[active].abs()[:, None] * q * (p + p.square().sum(1, True))
    if "mean_logit" in case.stats:
        there = (s.z != -torch.inf).double()
        rest = rest + upstream(inputs, "mean_logit")[active].abs()[:, None] * there / there.sum(1, True)
    if case.ids:
        ids = inputs.ids[active]
        g = upstream(inputs, "ids_logprobs")[active].abs().masked_fill(ids == IGNORE, 0.0)
        small = small + g.sum(1, True) * q
        rest = rest + torch.zeros_like(p).scatter_add(1, ids.clamp_min(0), g)
    return small, rest


def check(out: Any, target: Tensor) -> None:
    """What the results say of the same thing, they say alike."""
    ids, rank, first = out.top_k_ids, out.rank, out.top1_id
    target = target.reshape(-1)
    scored = target != IGNORE
    if rank is not None:
        rank = rank.reshape(-1)
        scored = scored & (rank >= 0)
    if rank is not None and out.top1_hit is not None and not torch.equal((rank == 0), out.top1_hit.reshape(-1)):
        raise AssertionError("top1_hit is not where the rank is 0")
    if ids is not None:
        ids = ids.flatten(0, -2)
        if first is not None and not torch.equal(first.reshape(-1), ids[:, 0]):
            raise AssertionError("top1_id is not the first of top_k_ids")
        listed = (ids == target[:, None]) & scored[:, None]
        if rank is not None and not torch.equal(listed.any(1), scored & (rank < ids.shape[1])):
            raise AssertionError("top_k_ids has other targets than those of a rank below k")


def _finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x.abs(), 0.0)
