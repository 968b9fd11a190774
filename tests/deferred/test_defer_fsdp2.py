"""Training loops under FSDP2 whose readings come where FSDP2 has let go of the head's weight, against the same loops on
the model that is not deferred: losses, gradient norms and parameters of three steps on two ranks, in float64.

A reading gathers the weight and lets go of it again, and its backward gathers it once more. ``strict=True`` raises
wherever logits are computed, and what was left whole would show in the norms: they are of ``model.parameters()``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import logitless as ll

V, STEPS = 61, 3
ROWS = 300
"""More than a head without a graph multiplies as ever."""


class Model(nn.Module):
    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.norm, self.lm_head = nn.Embedding(V, 8), nn.LayerNorm(8), nn.Linear(8, V, bias=False)
        self.body = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
        self.double()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.norm(torch.tanh(self.body(self.embed(ids)))))


def units(kind: str, model: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in model.body:
        fully_shard(layer)
    if kind == "own":
        fully_shard(model.lm_head)
    elif kind == "own, kept":
        fully_shard(model.lm_head, reshard_after_forward=False)
    elif kind == "with the norm":
        fully_shard([model.norm, model.lm_head])
    fully_shard(model, reshard_after_forward=True) if kind == "root, resharded" else fully_shard(model)


def wrapped(kind: str, deferred: bool, seed: int = 3) -> Any:
    # Of FSDP2, of linear layers: nothing changes their results in place here.
    warnings.filterwarnings("ignore", ".*returned a view tensor")
    model = Model(seed)
    if deferred:
        ll.defer(model, strict=True)
    units(kind, model)
    return model


UNITS = ["root", "root, resharded", "own", "own, kept", "with the norm"]


def draw(rank: int, step: int, which: int = 0) -> Tensor:
    return torch.randint(V, (2, ROWS // 2), generator=torch.Generator().manual_seed(100 * which + 10 * step + rank))


def ce(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def score(model: Any, ids: Tensor) -> Tensor:
    return model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).mean()


def two_forwards_in_one_loss(model: Any, one: Tensor, two: Tensor) -> Tensor:
    loss = -F.logsigmoid(score(model, one) - score(model, two))
    loss.backward()
    return loss


def two_losses_then_two_backwards(model: Any, one: Tensor, two: Tensor) -> Tensor:
    first, second = ce(model(one), one), ce(model(two), two)
    first.backward()
    second.backward()
    return first + second


def old_logprobs_before_backward(model: Any, one: Tensor, two: Tensor) -> Tensor:
    loss = score(model, one)
    with torch.no_grad():
        old = score(model, two)
    (loss * (1 + old)).backward()
    return loss


def scoring_after_backward(model: Any, one: Tensor, two: Tensor) -> Tensor:
    loss = ce(model(one), one)
    loss.backward()
    with torch.no_grad():
        return loss + score(model, two) + model(one).logsumexp(-1).mean()


def scoring_with_a_graph_that_nobody_uses(model: Any, one: Tensor, two: Tensor) -> Tensor:
    loss = ce(model(one), one)
    loss.backward()
    return loss + score(model, two).detach()


def two_backwards_of_one_graph(model: Any, one: Tensor, two: Tensor) -> Tensor:
    logits = model(one)
    loss, z = ce(logits, one), logits.logsumexp(-1).pow(2).mean()
    loss.backward(retain_graph=True)
    z.backward()
    return loss + z


def several_readings(model: Any, one: Tensor, two: Tensor) -> Tensor:
    logits = model(one)
    log_p = logits.log_softmax(-1)
    loss = ce(logits, one) - 0.1 * (log_p.exp() * log_p).sum(-1).mean()
    with torch.no_grad():
        right = (logits.argmax(-1) == two).double().mean() + logits.topk(3).values.sum()
    loss = loss + 1e-3 * logits.mean() + F.cross_entropy(logits.flatten(0, 1), one.flatten(), weight=1 + CLASSES)
    loss.backward()
    return loss + right


def a_checkpoint_around_the_loss(model: Any, one: Tensor, two: Tensor) -> Tensor:
    loss: Any = checkpoint(ce, model(one), one, use_reentrant=False)
    (loss + checkpoint(ce, model(two), two, use_reentrant=False)).backward()
    return loss


def a_loss_of_the_library(model: Any, one: Tensor, two: Tensor) -> Tensor:
    fields = {"old_logprob": "current", "advantage": torch.linspace(-1, 1, one.numel(), dtype=torch.float64)}
    loss, _ = ll.policy_loss(model(one).flatten(0, 1), one.flatten(), ll.Objective(entropy_coef=0.1), **fields)
    other, _ = ll.policy_loss(model(two).flatten(0, 1), two.flatten(), ll.Objective(), memory=ROUTE, **fields)
    (loss + other).backward()
    return loss


def a_head_that_is_frozen_while_scoring(model: Any, one: Tensor, two: Tensor) -> Tensor:
    """As an adapter that is off for the reference: FSDP2 hands it on to the gathered weight."""
    logits = model(one)
    model.lm_head.requires_grad_(False)
    with torch.no_grad():
        old = score(model, two)
    model.lm_head.requires_grad_(True)
    loss = ce(logits, one) * (1 + old)
    loss.backward()
    return loss


def a_gradient_that_ends_at_log_probs(model: Any, one: Tensor, two: Tensor) -> Tensor:
    logprob = ll.logprobs(model(one), one).logprob
    loss = -logprob.mean()
    loss.backward(retain_graph=True)
    (found,) = torch.autograd.grad(loss, logprob)
    return loss + found.sum()


CLASSES = torch.linspace(0, 1, V, dtype=torch.float64)
ROUTE = 1 << 14
"""Too little for one pass."""

LOOPS: list[Callable[[Any, Tensor, Tensor], Tensor]] = [
    two_forwards_in_one_loss,
    two_losses_then_two_backwards,
    old_logprobs_before_backward,
    scoring_after_backward,
    scoring_with_a_graph_that_nobody_uses,
    two_backwards_of_one_graph,
    several_readings,
    a_checkpoint_around_the_loss,
    a_loss_of_the_library,
    a_head_that_is_frozen_while_scoring,
    a_gradient_that_ends_at_log_probs,
]


def trained(rank: int, world: int, kind: str, loop: Callable[..., Tensor], deferred: bool) -> Any:
    model = wrapped(kind, deferred)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    numbers = []
    for step in range(STEPS):
        value = loop(model, draw(rank, step), draw(rank, step, 1))
        grads = [x.grad for x in model.parameters()]
        # After a forward without a backward FSDP2 itself leaves some units whole, whose gradients do not show then.
        numbers += [value.item(), *(x.full_tensor().pow(2).sum().item() for x in grads if x is not None)]  # pyright: ignore[reportCallIssue]
        optimizer.step()
        optimizer.zero_grad()
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()  # pyright: ignore[reportCallIssue]
    return numbers, {name: x.detach().full_tensor() for name, x in model.named_parameters()}  # pyright: ignore[reportCallIssue]


def assert_same(wanted: Any, ours: Any) -> None:
    for (numbers, parameters), (own_numbers, own) in zip(wanted, ours, strict=True):
        torch.testing.assert_close(torch.tensor(own_numbers), torch.tensor(numbers), rtol=1e-11, atol=0)
        for name, right in parameters.items():
            assert (own[name] - right).norm() <= 1e-12 * right.norm(), name


@pytest.mark.parametrize("kind", UNITS)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops(ranks, loop, kind):
    wanted, ours = (ranks(trained, 2, kind, loop, deferred) for deferred in (False, True))
    assert_same(wanted, ours)


class Holder(nn.Module):
    """What a framework puts around a model: a value head beside it, or the step of a trainer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)


def held(rank: int, world: int, how: str, deferred: bool) -> Any:
    """Losses of a unit that is not among the modules that ``defer`` was given."""
    warnings.filterwarnings("ignore", ".*returned a view tensor")
    from torch.distributed.fsdp import fully_shard

    model: Any = Model()
    if deferred and how != "deferred inside":
        ll.defer(model, strict=True)
    model = copy.deepcopy(model) if how == "a copy" else Holder(model)
    fully_shard(model, reshard_after_forward=True)
    if deferred and how == "deferred inside":
        ll.defer(model.model, strict=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    numbers = []
    for step in range(STEPS):
        one, two = draw(rank, step), draw(rank, step, 1)
        numbers.append(two_losses_then_two_backwards(model, one, two).item())
        optimizer.step()
        optimizer.zero_grad()
    if deferred:
        logits = model(draw(rank, 0))
        ce(model(draw(rank, 1)), draw(rank, 1)).backward()
        optimizer.step()
        with torch.no_grad():
            model(draw(rank, 2))
        with pytest.raises(ll.LogitlessError, match="weight was changed in place after the logits were made"):
            logits.detach().logsumexp(-1)
    return numbers, {}


@pytest.mark.parametrize("how", ["a holder", "deferred inside", "a copy"])
def test_units_outside_of_what_was_deferred(ranks, how):
    wanted, ours = (ranks(held, 2, how, deferred) for deferred in (False, True))
    assert_same(wanted, ours)


def below(rank: int, world: int) -> str:
    from peft import LoraConfig, get_peft_model  # pyright: ignore[reportPrivateImportUsage]
    from torch.distributed.fsdp import fully_shard

    model: Any = get_peft_model(Model(), LoraConfig(target_modules=["lm_head"]))  # pyright: ignore[reportArgumentType]
    ll.defer(model)
    fully_shard(model.base_model.model.lm_head.base_layer)
    try:
        model(draw(rank, 0))
    except ll.LogitlessError as error:
        return str(error)
    return ""


def test_a_unit_below_the_head_is_refused_by_name(ranks):
    pytest.importorskip("peft")
    for said in ranks(below, 2):
        assert said.startswith("defer: FSDP2 has the head's weight in a unit below the head")
        assert "fully_shard(head)" in said


def distilled(rank: int, world: int, kind: str, own: bool, deferred: bool) -> Any:
    """Losses of steps with a teacher that follows the student, whose parameters are both sharded between steps."""
    student, teacher = wrapped(kind, deferred), wrapped(kind, deferred, seed=4)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.5)
    numbers = []
    for step in range(STEPS):
        ids = draw(rank, step)
        with torch.no_grad():
            wanted = teacher(ids)
        for rows in (slice(0, 1), slice(1, 2)):
            mine, theirs = student(ids[rows]).flatten(0, 1), wanted[rows].flatten(0, 1)
            if own and deferred:
                asked = {"teacher": theirs, "divergence": "forward_kl", "memory": 1 << 14}
                loss = ll.logprobs(mine, ids[rows].flatten(), **asked).divergence.mean()  # pyright: ignore[reportArgumentType, reportOptionalMemberAccess]
            else:
                loss = F.kl_div(mine.log_softmax(-1), theirs.softmax(-1), reduction="batchmean")
            loss.backward()
            numbers.append(loss.item())
        # What FSDP2 keeps whole after a forward, unless a backward comes: not what a reading has gathered.
        for unit in (teacher, *((teacher.lm_head,) if kind == "own, kept" else ())):
            unit.reshard()  # pyright: ignore[reportCallIssue]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for x, y in zip(teacher.parameters(), student.parameters(), strict=True):
                assert hasattr(x, "placements")
                assert hasattr(y, "placements")
                x.lerp_(y, 0.3)
    return numbers, {name: x.detach().full_tensor() for name, x in teacher.named_parameters()}  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("own", [False, True], ids=["torch", "ours"])
@pytest.mark.parametrize("kind", UNITS)
def test_a_teacher_that_follows_the_student(ranks, kind, own):
    wanted, ours = (ranks(distilled, 2, kind, own, deferred) for deferred in (False, True))
    assert_same(wanted, ours)


def logs(rank: int, world: int, kind: str, late: bool) -> str:
    """What a rank is told that alone reads logits which its peers do not read."""
    model, ids = wrapped(kind, True), draw(rank, 0)
    logits = model(ids)
    loss = ce(logits, ids)
    if late:
        loss.backward()
    try:
        return f"right {logits.argmax(-1).shape}" if rank == 0 else ""
    except ll.LogitlessError as error:
        return str(error)


@pytest.mark.parametrize("kind", UNITS)
def test_a_rank_that_reads_alone_after_backward_is_told(ranks, kind):
    said, _ = ranks(logs, 2, kind, True)
    assert said.startswith("Logits: backward has gone through these logits, and FSDP2 has let go of the head's weight")
    assert "Read what you log before backward()" in said


@pytest.mark.parametrize("kind", ["root", "own, kept"])
def test_a_rank_may_read_alone_while_the_weight_is_whole(ranks, kind):
    assert ranks(logs, 2, kind, False)[0] == f"right torch.Size([2, {ROWS // 2}])"


def accumulated(rank: int, world: int, kind: str, deferred: bool) -> Any:
    """Steps of two backwards, after the first of which FSDP2 is told to keep the weights whole."""
    model = wrapped(kind, deferred)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    numbers = []
    for step in range(STEPS):
        for last in (False, True):
            ids = draw(rank, step, int(last))
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
            logits = model(ids)
            loss = ce(logits, ids)
            loss.backward()
            # The weight is whole, so that logits can be read after backward.
            numbers += [loss.item()] if last else [loss.item(), logits.detach().logsumexp(-1).mean().item()]
        optimizer.step()
        optimizer.zero_grad()
    return numbers, {name: x.detach().full_tensor() for name, x in model.named_parameters()}


@pytest.mark.parametrize("kind", UNITS)
def test_what_fsdp2_is_told_to_keep_whole_stays_whole(ranks, kind):
    wanted, ours = (ranks(accumulated, 2, kind, deferred) for deferred in (False, True))
    assert_same(wanted, ours)


def gathers(rank: int, world: int) -> list[int]:
    """How often the unit was gathered: after the forward, after slices and factors, after one reading and another."""
    from torch.distributed.fsdp import FSDPModule

    model, count = wrapped("own", True), []
    real = FSDPModule.unshard
    FSDPModule.unshard = lambda self, *args: (count.append(self), real(self, *args))[1]
    try:
        logits, found = model(draw(rank, 0)), [len(count)]
        rows = logits[:, 1:].float() / 0.7
        found.append(len(count))
        log_p = rows.log_softmax(-1)
        (log_p.exp() * log_p).sum(-1)
        found.append(len(count))
        rows.argmax(-1)
        found.append(len(count))
    finally:
        FSDPModule.unshard = real
    return found


def test_a_slice_gathers_nothing(ranks):
    """An entropy and log Z are one reading."""
    assert ranks(gathers, 2) == [[0, 0, 1, 2]] * 2
