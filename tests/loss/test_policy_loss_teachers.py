"""Losses with a teacher for each row: rows are grouped by teacher inside, and every field with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from shared.divergence import textbook
from torch import Tensor

import logitless as ll
from logitless.route import loss as route

LENGTHS, RESPONSES = [9, 7, 11], [5, 4, 8]
V, D, ROWS = 83, 12, 17
COEF = 0.7


def draw() -> tuple[ll.Rows, dict[str, Tensor], dict[str, Tensor]]:
    """Rows of three samples, operands, and a number for every row that no other row has."""
    rows = ll.Rows.packed([torch.randint(V, (n,)) for n in LENGTHS], RESPONSES)
    size = sum(LENGTHS)
    hidden, first, second = (torch.randn(size, d) for d in (D, D, 7))
    weights = {"weight": torch.randn(V, D) * 0.5, "one": torch.randn(V, D) * 0.5, "two": torch.randn(V, 7) * 0.5}
    fields = {
        "old_logprob": -4 - torch.rand(ROWS),
        "advantage": torch.linspace(-1.5, 2, ROWS)[torch.randperm(ROWS)],
        "which": torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 1, 0, 0, 1, 0, 1, 1]),
        "temperature": torch.linspace(0.5, 2, ROWS),
    }
    return rows, {"hidden": hidden, "first": first, "second": second, **weights}, fields


def in_torch(rows: ll.Rows, x: dict[str, Tensor], fields: dict[str, Tensor], policy: str, dtype: torch.dtype):
    """The loss, the divergence of each row, and the gradients of hidden states and weight."""
    x, numbers = ({name: y.to(dtype, copy=True) for name, y in group.items()} for group in (x, fields))
    hidden, weight = x["hidden"].requires_grad_(), x["weight"].requires_grad_()
    at = rows.index
    z = hidden[at] @ weight.T / numbers["temperature"][:, None]
    one, two = x["first"][at] @ x["one"].T, x["second"][at] @ x["two"].T
    apart = textbook(z, torch.where(fields["which"][:, None] == 0, one, two), "forward_kl")
    log_ratio = z.log_softmax(-1).gather(1, rows.target[:, None])[:, 0] - numbers["old_logprob"]
    if policy == "gspo":
        means = [log_ratio[rows.sample == i].mean() for i in range(len(LENGTHS))]
        log_ratio = torch.stack(means)[rows.sample]
    ratio = log_ratio.exp()
    advantage = numbers["advantage"]
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.3)) + COEF * apart
    (loss.sum() / ROWS).backward()
    return loss.detach().sum().div(ROWS)[None], apart.detach(), hidden.grad, weight.grad


def test_the_width_of_teachers_is_that_of_their_hidden_states(monkeypatch):
    """What their products cost, whatever the leading dimensions: the mean of those that have a head."""
    seen = []

    def watched(shape: Any, *args: Any) -> Any:
        seen.append(shape)
        return choose(shape, *args)

    choose = route.choose_loss_plan
    monkeypatch.setattr(route, "choose_loss_plan", watched)
    hidden, weight, target = torch.randn(2, 6, D, requires_grad=True), torch.randn(V, D), torch.zeros(2, 6).long()
    members = [ll.Logits(torch.randn(2, 6, n), torch.randn(V, n)) for n in (5, 8)]
    several = ll.Teacher.by_row([*map(ll.Teacher, members), ll.Teacher(torch.randn(2, 6, V))], torch.arange(12) % 3)
    objective = ll.Objective(policy="reinforce", divergence="forward_kl")
    for teacher in (members[1], torch.randn(2, 6, V), several):
        ll.policy_loss(ll.Logits(hidden, weight), target, objective, advantage=torch.ones(12), teacher=teacher)
    assert [(shape.teacher, shape.beside) for shape in seen] == [(8, 4), (0, 4), (6, 4)]


@pytest.mark.parametrize("memory", [6000, "1MiB"])
@pytest.mark.parametrize(("policy", "passes"), [("ppo_clip", "one pass"), ("gspo", "two passes")])
def test_every_row_has_its_own_teacher_and_its_own_numbers(policy: str, passes: str, memory: Any):
    """Old log-probs, advantages, temperatures and samples stay with their rows, whichever teacher these have.

    Means over samples cannot be taken over rows in the order of their teachers, so that there are two passes.
    """
    rows, x, fields = draw()
    hidden, weight = x["hidden"].clone().requires_grad_(), x["weight"].clone().requires_grad_()
    members = [ll.Teacher(ll.Logits(x["first"], x["one"])), ll.Teacher(x["second"] @ x["two"].T)]
    clip = {"clip": (0.2, 0.3)}
    objective = ll.Objective(policy=policy, reduce="token_mean", divergence="forward_kl", divergence_coef=COEF, **clip)
    options: dict[str, Any] = {"old_logprob": fields["old_logprob"], "advantage": fields["advantage"]}
    options |= {"teacher": ll.Teacher.by_row(members, fields["which"]), "memory": memory}
    options |= {"head": ll.Head(temperature=fields["temperature"])}
    logits = ll.Logits(hidden, weight)
    assert ll.explain(ll.policy_loss, logits, rows, objective, **options).kind == passes
    loss, _, stats = ll.policy_loss(logits, rows, objective, return_stats=True, **options)
    loss.backward()
    exact, plain = (in_torch(rows, x, fields, policy, dtype) for dtype in (torch.float64, torch.float32))
    assert_close_to_truth(loss.detach()[None], exact[0], plain[0], name="loss")
    assert_close_to_truth(stats.divergence, exact[1], plain[1], name="divergence")
    assert_gradient_close_to_truth(hidden.grad, exact[2], plain[2], name="d_hidden")
    assert_gradient_close_to_truth(weight.grad, exact[3], plain[3], name="d_weight")


@pytest.mark.parametrize("memory", [6000, "1MiB"])
@pytest.mark.parametrize("correction", [None, "geometric_tis"])
def test_means_over_samples_beside_tokens_that_rows_share(correction: str | None, memory: Any):
    """``Teacher(at=)`` puts rows in the order of its tokens, over which no mean over samples can be taken."""
    rows, x, numbers = draw()
    policy = "gspo" if correction is None else "reinforce"
    objective = ll.Objective(policy=policy, correction=correction, divergence="forward_kl", divergence_coef=COEF)
    at = numbers["which"] * 4 + torch.arange(ROWS) % 4
    fields = {"old_logprob": numbers["old_logprob"], "advantage": numbers["advantage"]}
    fields |= {} if correction is None else {"rollout_logprob": numbers["old_logprob"] + torch.randn(ROWS) / 5}
    found = []
    for theirs in ({"at": at}, {}):
        first = x["first"] if theirs else torch.zeros_like(x["first"]).index_copy(0, rows.index, x["first"][at])
        teacher = ll.Teacher(ll.Logits(first.double(), x["one"].double()), **theirs)
        hidden, weight = (x[name].double().requires_grad_() for name in ("hidden", "weight"))
        logits = ll.Logits(hidden, weight)
        plan = ll.explain(ll.policy_loss, logits, rows, objective, teacher=teacher)
        assert plan.kind == ("two passes" if theirs else "one pass")
        loss, _ = ll.policy_loss(logits, rows, objective, teacher=teacher, memory=memory, **fields)
        loss.backward()
        found.append((loss.detach(), hidden.grad, weight.grad))
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted)
