"""Deferred heads that tensor parallelism has made DTensors, on two real ranks: losses, gradients and their placements.

The truth is the same model with ``output_layouts=Replicate()``, which gathers and computes its logits. ``strict=True``
raises wherever logits are computed. 61 columns are 31 and 30.
"""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from close import assert_gradient_close_to_truth
from torch import Tensor, nn

import logitless as ll
from logitless.deferred import model as deferral
from logitless.deferred import undefer
from logitless.operands.logits import MADE, LogitsMade

V = 61
IDS = torch.randint(3, V, (3, 8), generator=torch.Generator().manual_seed(6))
LABELS = IDS.masked_fill(torch.rand(3, 8, generator=torch.Generator().manual_seed(7)) < 0.3, -100)


class Model(nn.Module):
    """An embedding, a body and a head; the head's input may be this rank's tokens alone."""

    def __init__(self, bias: bool = True, sequence: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.body, self.lm_head = nn.Embedding(V, 8), nn.Linear(8, 8), nn.Linear(8, V, bias=bias)
        self.sequence = sequence
        self.double()

    def forward(self, ids: Tensor) -> Any:
        hidden = torch.tanh(self.body(self.embed(ids)))
        if self.sequence:
            hidden = hidden.chunk(2, 1)[torch.distributed.get_rank()]
        return self.lm_head(hidden)


def idiom(logits: Any) -> Tensor:
    logits = logits[:, :-1].float().double() / 0.7 if logits.dtype == torch.float32 else logits[:, :-1] / 0.7
    logp = torch.log_softmax(logits, dim=-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return -logp.gather(-1, IDS[:, 1:, None]).squeeze(-1).mean() - 0.1 * entropy.mean()


def many(logits: Any) -> Tensor:
    """Whatever else is served, of all columns."""
    best = logits.max(-1)
    found = best.values.sum() + (best.indices * IDS).sum() + logits.min(-1).values.sum()
    found = found + logits.topk(3).values.pow(2).sum() + logits.logsumexp(-1).sum() + logits.mean(-1).pow(2).sum()
    found = (
        found + logits[..., 60].sum() + logits.gather(-1, IDS[..., None]).sum() + (0.3 * logits.sum() + logits.mean())
    )
    smooth = F.cross_entropy(logits.transpose(1, 2), LABELS, label_smoothing=0.1)
    return found + smooth + (logits.argmax(-1) == IDS).double().mean()


LOSSES = {
    "cross_entropy": lambda x: F.cross_entropy(x.view(-1, V), LABELS.view(-1)),
    "the idiom": idiom,
    "many": many,
    "computed": lambda x: x.sigmoid().pow(2).mean(),
    "weights and smoothing": lambda x: F.cross_entropy(
        x.flatten(0, 1), LABELS.flatten(), weight=torch.linspace(0.5, 2, V).double(), label_smoothing=0.2
    ),
    "a softcap": lambda x: idiom(torch.tanh(x / 2.0) * 2.0),
    "logprobs": lambda x: ll.logprobs(x, IDS, entropy="grad").logprob.pow(2).mean(),
}
LOSSES["of the columns here"] = lambda x: (torch.logsumexp(x, -1) * x.max(-1).values).pow(2).mean()
COMPUTES = ("computed", "weights and smoothing")


def parallel(rank: int, model: Any, layout: str, local: bool, wrap: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    shape, names = ((2, 2), ("dp", "tp")) if "FSDP2" in wrap else ((2,), ("tp",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    given = Shard(1) if model.sequence else Replicate()
    out = {"columns": Shard(-1), "all": Replicate(), "tokens": Shard(1)}[layout]
    style: Any = ColwiseParallel(input_layouts=given, output_layouts=out, use_local_output=local)
    parallelize_module(model, mesh["tp"], {"lm_head": RowwiseParallel() if wrap == "rowwise" else style})
    if "FSDP2" in wrap:
        if "own unit" in wrap:
            fully_shard(model.lm_head, mesh=mesh["dp"], reshard_after_forward=True)
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward="resharded" in wrap)
    return model


def run(
    rank: int,
    world: int,
    loss: str,
    layout: str,
    local: bool,
    wrap: str = "",
    few: int = 256,
    bias: bool = True,
    sequence: bool = False,
) -> dict[str, Any]:
    """The loss, and all gradients whole, with the placements of the head's."""
    deferred = not layout.startswith("truth")
    model = parallel(rank, Model(bias, sequence), layout.removeprefix("truth: "), local, wrap)
    deferral.FEW, before = few, deferral.FEW
    MADE.clear()
    try:
        if deferred:
            ll.defer(model, strict=loss not in COMPUTES)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LogitsMade)
            # Of the model's own logits.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
            logits = model(IDS)
            assert isinstance(logits, ll.Logits) == deferred
            value: Any = LOSSES[loss](logits)
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            value.backward()
    finally:
        deferral.FEW = before
    if deferred:
        assert sum(MADE.values()) == (loss in COMPUTES)
        undefer(model)
    found = {name: x.grad for name, x in model.named_parameters()}
    whole = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in found.items()}
    return {"loss": value.detach(), "placements": str(found["lm_head.weight"].placements), **whole}


def same(ranks: Any, world: int, loss: str, layout: str, local: bool, *args: Any, truth: str = "all") -> None:
    wanted = ranks(run, world, loss, f"truth: {truth}", True, *args)
    ours = ranks(run, world, loss, layout, local, *args)
    for theirs, mine in zip(wanted, ours, strict=True):
        assert mine.pop("placements") == theirs.pop("placements")
        assert sorted(mine) == sorted(theirs)
        for name, right in theirs.items():
            assert_gradient_close_to_truth(mine[name], right, right, name)


@pytest.mark.parametrize("loss", LOSSES)
def test_all_columns_of_a_head_that_is_cut(ranks, loss):
    same(ranks, 2, loss, "all", True)


# With labels that are plain, cross_entropy of a DTensor that is computed is torch's own error.
@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "weights and smoothing"])
@pytest.mark.parametrize("layout", ["columns", "all"])
def test_a_dtensor(ranks, loss, layout):
    """``use_local_output=False``: the model's code is handed a DTensor, as torchtitan's loss is."""
    same(ranks, 2, loss, layout, False)


def test_columns_of_this_rank_know_their_shard(ranks):
    same(ranks, 2, "logprobs", "columns", True)


def test_torchs_functions_of_this_ranks_columns(ranks):
    """Are of these alone, as of a tensor: code that knows of shards goes on to communicate by itself."""
    same(ranks, 2, "of the columns here", "columns", True, truth="columns")


def parts(rank: int, world: int, deferred: bool) -> list[Tensor]:
    """The same with a gradient of hidden states that is summed here."""
    hidden, weight = (torch.randn(*shape).double().requires_grad_() for shape in ((5, 8), (62, 8)))
    own = weight.chunk(2)[rank]
    logits = hidden @ own.T
    if deferred:
        logits = ll.Logits(hidden, own, shard=ll.VocabShard.even(62, torch.distributed.group.WORLD), strict=True)
    torch.logsumexp(logits, -1).pow(2).sum().backward()
    if not deferred:
        torch.distributed.all_reduce(hidden.grad)
    return [hidden.grad, weight.grad]


def test_functions_of_a_shards_columns_sum_the_gradient_of_hidden_states(ranks):
    wanted, ours = (ranks(parts, 2, deferred) for deferred in (False, True))
    for theirs, mine in zip(wanted, ours, strict=True):
        for right, found in zip(theirs, mine, strict=True):
            assert_gradient_close_to_truth(found, right, right)


@pytest.mark.parametrize("layout", ["columns", "all"])
def test_hidden_states_of_this_ranks_tokens(ranks, layout):
    """Sequence parallelism: the hook gathers them, and their gradient is scattered."""
    same(ranks, 2, "logprobs", layout, True, "", 256, False, True)


@pytest.mark.parametrize("wrap", ["FSDP2", "FSDP2, resharded", "FSDP2, own unit"])
@pytest.mark.parametrize("loss", ["the idiom", "logprobs"])
def test_fsdp2_around_tensor_parallelism(ranks, wrap, loss):
    same(ranks, 4, loss, "all" if loss == "the idiom" else "columns", True, wrap)


def test_without_a_graph(ranks):
    """Few rows are multiplied as ever, and handed on as the hook wants them; more are not."""
    for few, found in ((256, "Tensor"), (4, "Logits")):
        assert ranks(scored, 2, few) == [(found, True), (found, True)]


def scored(rank: int, world: int, few: int) -> tuple[str, bool]:
    model = parallel(rank, Model(), "all", True, "")
    deferral.FEW, before = few, deferral.FEW
    try:
        with torch.no_grad():
            wanted = model(IDS).log_softmax(-1)
            ll.defer(model, strict=True)
            logits = model(IDS)
            found = torch.log_softmax(logits, -1).gather(-1, IDS[..., None])
    finally:
        deferral.FEW = before
    return type(logits).__name__, torch.allclose(found, wanted.gather(-1, IDS[..., None]), rtol=1e-12)


def refused(rank: int, world: int, kind: str) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    model = Model(bias=kind == "a bias")
    if kind in ("rowwise", "tokens"):
        parallel(rank, model, "tokens" if kind == "tokens" else "all", True, kind)
    elif kind == "a mesh of two":
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight, mesh, [Replicate(), Shard(0)]))
    else:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight, mesh, [Shard(0)]))
        if kind == "a bias":
            model.lm_head.register_forward_pre_hook(lambda _, x: DTensor.from_local(x[0], mesh, [Replicate()]))
        if kind == "a LoRA":
            sys.path.append(str(Path(__file__).parents[1] / "adapters"))
            from test_peft import LoraOfPeft

            model.lm_head = LoraOfPeft(model.lm_head).eval()
    ll.defer(model)
    with pytest.raises(ll.LogitlessError) as error:
        model(IDS)
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("a LoRA", r"the head has a LoRA, and its weight is a DTensor.*Merge the LoRA, leave the head out"),
        ("rowwise", r"placements \(Shard\(dim=1\),\) in its own forward, and only rows.*ColwiseParallel"),
        ("a mesh of two", r"over a mesh of \('dp', 'tp'\).*one dimension alone.*mesh\['tp'\]"),
        ("plain hidden states", r"its hidden states is a plain tensor, and must be replicated.*ColwiseParallel"),
        ("a bias", r"the head's bias must be a DTensor with placements"),
        ("tokens", r"cannot be redistributed to \(Shard\(dim=1\),\).*output_layouts=Shard\(-1\) or Replicate\(\)"),
    ],
)
def test_other_placements_are_refused_by_name(ranks, kind, text):
    for said in ranks(refused, 2, kind):
        assert re.search(text, said), said


def stepped(rank: int, world: int, wrap: str, foreach: bool) -> str:
    from torch.distributed.fsdp import fully_shard

    model: Any = Model()
    if wrap == "FSDP2 alone":
        fully_shard(model)
    else:
        parallel(rank, model, "columns", False, wrap)
    other, own = (torch.optim.SGD(x.parameters(), lr=0.1, foreach=foreach) for x in (model.embed, model.lm_head))
    ll.defer(model)
    logits: Any = model(IDS)
    # Of other logits, since backward lets go of the weight, and nothing is read of these afterwards.
    F.cross_entropy(model(IDS).view(-1, V), LABELS.view(-1)).backward()
    if wrap != "FSDP2 alone":
        assert str(logits.placements) == "(Shard(dim=2),)"
        whole = logits.redistribute(placements=logits.placements).full_tensor()
        assert type(whole) is type(logits.full_tensor()) is ll.Logits
        assert logits.to_local().shape[-1] == (31, 30)[rank % 2]
    idiom(logits)
    other.step()
    idiom(logits)
    own.step()
    with pytest.raises(ll.LogitlessError) as error:
        idiom(logits)
    return str(error.value)


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "one by one"])
@pytest.mark.parametrize("wrap", ["", "FSDP2", "FSDP2 alone"])
def test_an_optimizer_step_in_between_is_refused(ranks, wrap, foreach):
    """Versions alone do not show it: foreach counts none of DTensors, and FSDP2 gathers the weight of after it."""
    for said in ranks(stepped, 4 if wrap == "FSDP2" else 2, wrap, foreach):
        assert said.startswith("Logits: weight was changed in place after the logits were made")
