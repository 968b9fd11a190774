"""Ranks that disagree: every argument that changes the numbers is compared, and all ranks raise the same error."""

from __future__ import annotations

import torch
import torch.distributed as dist
from calls import from_hidden, from_logits, loss_from_hidden

import logitless as ll

V, D, R = 20, 4, 6
LINE = torch.arange(R)


def own_policy(inputs):
    return -inputs.advantage * inputs.logprob


def other_policy(inputs):
    return -2 * inputs.advantage * inputs.logprob


CALLS = {
    "the targets": lambda x: {"target": LINE + x},
    "which rows are scored": lambda x: {"rows": (LINE + x, LINE)},
    "the number of rows": lambda x: {"target": LINE[: R - x]},
    "the dtype": lambda x: {"dtype": (torch.float32, torch.float64)[x]},
    "temperature": lambda x: {"head": ll.Head(temperature=1.0 + x)},
    "temperature ": lambda x: {"head": ll.Head(temperature=torch.ones(R) + x * (LINE == 2))},
    "scale": lambda x: {"head": ll.Head(scale=1.0 + x)},
    "softcap": lambda x: {"head": ll.Head(softcap=30.0 + x)},
    "the vocabulary size": lambda x: {"head": ll.Head(vocab_size=V - x)},
    "entropy": lambda x: {"entropy": (None, "grad")[x]},
    "the kept ids ": lambda x: {
        "kept": ll.Kept(torch.tensor([1, 2] * R), torch.full((R,), 2), ("vocabulary", "support")[x])
    },
    "the kept ids": lambda x: {"kept": ll.Kept(torch.tensor([1, 2 + x] * R), torch.full((R,), 2))},
}
"""What the ranks must agree on, and arguments of either rank."""

FROM_HIDDEN = {
    "match": lambda x: {"match": (None, "bfloat16")[x]},
    "whether there is a bias": lambda x: {"bias": (None, torch.zeros(V // 2))[x]},
    "hidden_grad": lambda x: {"hidden_grad": ("reduced", "partial")[x]},
    "whether hidden needs a gradient": lambda x: {"frozen": bool(x)},
    "whether hidden needs a gradient ": lambda x: {"without_graph": bool(x)},
}
LOSSES = {
    "the objective": lambda x: {"objective": ll.Objective(clip=0.2 + 0.1 * x)},
    "the objective ": lambda x: {"objective": ll.Objective(policy=(own_policy, other_policy)[x])},
    "advantage": lambda x: {"advantage": torch.ones(R) + x},
    "old_logprob": lambda x: {"old_logprob": torch.full((R,), -3.0 - 1e-6 * x)},
    "the fields": lambda x: {"ref_logprob": (None, torch.zeros(R))[x]},
    "the weights of the rows": lambda x: {"denominator": 4.0 + x},
}


def operands(rank: int, asked: dict) -> tuple:
    """Zeros of the asked dtype: what is compared is not the numbers."""
    dtype = asked.pop("dtype", torch.float32)
    hidden = torch.zeros(R + 2 if "rows" in asked else len(asked.get("target", LINE)), D, dtype=dtype)
    hidden.requires_grad_(not asked.pop("frozen", False))
    return hidden, torch.zeros(V // 2, D, dtype=dtype), asked.pop("rows", asked.pop("target", LINE))


def disagree(rank: int, world: int) -> list[dict[str, str]]:
    shard = ll.VocabShard(rank * 10, (rank + 1) * 10, dist.group.WORLD, check_calls=True)
    found = [{}, {}, {}]

    def call(path: int, name: str, function, asked: dict) -> None:
        objective = (asked.pop("objective", ll.Objective()),) if path == 2 else ()
        with torch.set_grad_enabled(not asked.pop("without_graph", False)):
            try:
                hidden, weight, rows = operands(rank, asked)
                x = (hidden @ weight.T,) if path == 0 else (hidden, weight)
                function(*x, rows, *objective, shard=shard, **asked)
                found[path][name] = "no error"
            except ll.LogitlessError as error:
                found[path][name] = str(error)

    for name, made in CALLS.items():
        call(0, name, from_logits, made(rank))
    for name, made in {**CALLS, **FROM_HIDDEN}.items():
        call(1, name, from_hidden, made(rank))
    fields = {"old_logprob": "current", "advantage": torch.ones(R)}
    for name, made in LOSSES.items():
        call(2, name, loss_from_hidden, {**fields, **made(rank)})
    return found


def test_every_argument_that_changes_the_numbers(ranks):
    """Temperature, softcap, match, targets and the objective's numbers were not compared."""
    first, second = ranks(disagree, 2, timeout=60)
    for caller, wanted, ours, theirs in zip(
        ("logprobs", "logprobs", "policy_loss"),
        (CALLS, {**CALLS, **FROM_HIDDEN}, LOSSES),
        first,
        second,
        strict=True,
    ):
        assert ours == theirs
        for name in wanted:
            assert f"{caller}: ranks of one vocabulary group disagree about {name.strip()}" in ours[name], name


class Strange(torch.Tensor):
    """A tensor class that fails in its own way."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError("a failure of the tensor's own")


def fail_in_its_own_way(rank: int, world: int) -> str:
    shard = ll.VocabShard(rank * 10, (rank + 1) * 10, dist.group.WORLD, check_calls=True)
    target = LINE.as_subclass(Strange) if rank else LINE
    try:
        ll.logprobs(ll.Logits.given(torch.zeros(R, 10), shard=shard), (LINE, target))
        return "no error"
    except (ll.LogitlessError, RuntimeError) as error:
        return str(error)


def test_what_is_no_error_of_ours_also_stops_all_ranks(ranks):
    texts = ranks(fail_in_its_own_way, 2, timeout=30)
    assert all("a failure of the tensor's own" in text for text in texts), texts


SAMPLES, RESPONSES = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4]], [4, 2]


def rows_of_another_batch(rank: int, world: int) -> list[str]:
    found = []
    masks = [[1, 1, 1, 1], [1, 1]]
    batches = [
        (SAMPLES, masks),
        ([[1, 2, 3, 4, 5, 6, 7, 9], [1, 2, 3, 4]], masks),
        (SAMPLES, [[1, 1, 0, 1], [1, 1]]),
        (SAMPLES, None),
    ]
    for tokens, loss_masks in batches:
        tokens, loss_masks = (tokens, loss_masks) if rank else (SAMPLES, masks)
        rows = ll.Rows.packed(tokens, RESPONSES, loss_masks, cp=ll.Zigzag(rank, world))
        try:
            rows.check_over(dist.group.WORLD)
            found.append("no error")
        except ll.LogitlessError as error:
            found.append(str(error))
    return found


def test_rows_of_ranks_with_other_tokens_or_masks(ranks):
    """They were accepted, and count_over returned the mean of the ranks' counts."""
    first, second = ranks(rows_of_another_batch, 2, timeout=30)
    assert first == second
    assert first[0] == "no error"
    assert "disagree about the tokens of sample 0" in first[1]
    assert "disagree about the loss mask of sample 0" in first[2]
    assert "disagree about the loss mask of sample 0" in first[3]
