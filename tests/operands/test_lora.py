"""``LoRA``: a head with an adapter, against float64 of the merged weight, which the library never makes."""

from __future__ import annotations

import math

import pytest
import torch
from calls import from_hidden, loss_from_hidden
from close import assert_close_to_truth, assert_gradient_close_to_truth
from torch import Tensor, nn
from torch.nn.functional import linear

import logitless as ll

T, D, V, RANK, SCALE = 29, 24, 83, 5, 1.7
NAMES = ("hidden", "weight", "a", "b", "bias")


def operands(dtype: torch.dtype, trained: tuple[str, ...], device="cpu") -> dict[str, Tensor]:
    sizes = {"hidden": (T, D), "weight": (V, D), "a": (RANK, D), "b": (V, RANK), "bias": (V,)}
    drawn = {
        name: torch.randn(size, device=device) * (1.0 if name == "hidden" else 0.4) for name, size in sizes.items()
    }
    return {name: x.to(dtype).requires_grad_(name in trained) for name, x in drawn.items()}


def copies(given: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: x.detach().to(dtype).requires_grad_(x.requires_grad) for name, x in given.items()}


def loss_of(logprob: Tensor, entropy: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, len(logprob), device=logprob.device, dtype=logprob.dtype)
    return (weights * logprob).sum() + 0.3 * (weights * entropy).sum()


def by_torch(x: dict[str, Tensor], index: Tensor, target: Tensor, kept: ll.Kept | None = None) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies as an adapted layer makes them, in the operands' dtype up to the logits."""
    hidden = x["hidden"][index]
    logits = linear(hidden, x["weight"], x["bias"]) + SCALE * linear(linear(hidden, x["a"]), x["b"])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if kept is not None:
        row = torch.arange(len(target), device=target.device).repeat_interleave(kept.lengths)
        left_out = torch.ones_like(logits, dtype=torch.bool).index_put_((row, kept.ids), torch.tensor(False))
        logits = logits.masked_fill(left_out, -1e9)
    log_p = torch.log_softmax(logits, -1)
    return log_p.gather(1, target[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)


def policy_loss(advantage: Tensor, logprob: Tensor, entropy: Tensor) -> Tensor:
    return -(advantage * logprob).mean() - 0.3 * entropy.mean()


def lora_of(x: dict[str, Tensor]) -> ll.LoRA:
    return ll.LoRA(x["weight"], x["a"], x["b"], SCALE)


def assert_gradients(ours: dict[str, Tensor], true: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    for name in NAMES:
        if true[name].requires_grad:
            assert_gradient_close_to_truth(ours[name].grad, true[name].grad, plain[name].grad, name)
        else:
            assert ours[name].grad is None


ALL, FROZEN = NAMES, ("hidden", "a", "b")


@pytest.mark.parametrize(
    ("dtype", "trained", "options"),
    [
        (torch.float64, ALL, {"memory": "16KiB"}),
        (torch.float32, FROZEN, {"memory": "16KiB"}),
        # Blocks of rows instead of slabs of columns: more rows than columns are left of the vocabulary.
        (torch.float32, FROZEN, {"head": ll.Head(vocab_size=20), "memory": 2000}),
        # Exponentials of all rows are stored.
        (torch.bfloat16, FROZEN, {}),
        (torch.bfloat16, ALL, {"memory": "16KiB"}),
        (torch.float32, ("b",), {}),
        (torch.float32, ("a",), {"bits": "canonical"}),
        # Where the whole head is frozen and entropy has no gradient, a plain weight would take unit gradients.
        (torch.float32, ("hidden", "a"), {"backend": "triton", "entropy": "value"}),
    ],
    ids=["float64", "frozen", "blocks", "kept", "bfloat16", "only b", "only a", "frozen head"],
)
def test_results_and_gradients(dtype, trained, options, device):
    ours, index = operands(dtype, trained, device), torch.randperm(T, device=device)[: T - 6]
    target = torch.randint(20, (len(index),), device=device)
    if "head" in options:
        plan = ll.explain(
            ll.logprobs, ll.Logits(ours["hidden"], lora_of(ours), bias=ours["bias"]), (index, target), **options
        )
        assert plan.backward.block < len(index)
    true, plain = copies(ours, torch.float64), copies(ours, dtype)
    out = from_hidden(
        ours["hidden"], lora_of(ours), (index, target), bias=ours["bias"], **{"entropy": "grad", **options}
    )
    loss_of(out.logprob, out.entropy).backward()
    columns = V if "head" not in options else 20
    wanted = []
    for x in (true, plain):
        cut = {name: t[:columns] if name in ("weight", "b", "bias") else t for name, t in x.items()}
        wanted.append(by_torch(cut, index, target))
        logprob, entropy = wanted[-1]
        loss_of(logprob, entropy if out.entropy.requires_grad else entropy.detach()).backward()
    for name, mine, right, usual in zip(("logprob", "entropy"), out[:2], *wanted, strict=True):
        assert_close_to_truth(mine, right, usual, name)
    assert_gradients(ours, true, plain)


@pytest.mark.parametrize(
    ("dtype", "trained", "options"),
    [
        (torch.float64, ALL, {}),
        (torch.float32, FROZEN, {"memory": "8KiB"}),
        # Chunks of exponentials, and a factor that float16 gradients are held by.
        (torch.float16, ALL, {"memory": "6KiB"}),
        (torch.bfloat16, FROZEN, {"memory": "6KiB"}),
        (torch.float32, FROZEN, {"bits": "canonical"}),
    ],
    ids=["float64", "frozen", "float16", "bfloat16", "two passes"],
)
def test_policy_loss(dtype, trained, options, device):
    ours, target = operands(dtype, trained, device), torch.randint(V, (T,), device=device)
    objective = ll.Objective(policy="reinforce", entropy_coef=0.3)
    # The largest come last, so that the factor of float16 falls from chunk to chunk.
    advantage = torch.where(torch.arange(T) % 3 == 0, 0.0, torch.linspace(-0.1, 3, T)).to(device)
    rows = ll.Rows.every(target)
    call = (ours["hidden"], lora_of(ours), rows, objective)
    given = {"advantage": advantage, "bias": ours["bias"], "return_stats": True, **options}
    plan = ll.explain(loss_from_hidden, *call, **given)
    assert plan.kind == ("two passes" if "bits" in options else "one pass")
    loss, _, stats = loss_from_hidden(*call, **given)
    (3 * loss).backward()
    true, plain = copies(ours, torch.float64), copies(ours, dtype)
    wanted = []
    for x in (true, plain):
        wanted.append(by_torch(x, torch.arange(T, device=device), target))
        (3 * policy_loss(advantage, *wanted[-1])).backward()
    for name, mine, right, usual in zip(("logprob", "entropy"), stats[:2], *wanted, strict=True):
        assert_close_to_truth(mine, right, usual, name)
    assert float(loss.detach()) == pytest.approx(float(policy_loss(advantage, *stats[:2])), rel=1e-5)
    assert_gradients(ours, true, plain)


def test_tokens_that_nobody_scored(device):
    """Hidden states of a prompt or of padding may be anything: neither results nor gradients see them."""
    ours, index = operands(torch.float32, ALL, device), torch.arange(3, T - 4, device=device)
    target = torch.randint(V, (len(index),), device=device)
    true, plain = copies(ours, torch.float64), copies(ours, torch.float32)
    with torch.no_grad():
        ours["hidden"][:3], ours["hidden"][-4:] = torch.nan, torch.inf
    rows = ll.Rows.at(index, target, num_tokens=T)
    objective = ll.Objective(policy="reinforce", entropy_coef=0.3)
    advantage = torch.linspace(-1, 2, len(index), device=device)
    logits = ll.Logits(ours["hidden"], lora_of(ours), bias=ours["bias"])
    loss, _ = ll.policy_loss(logits, rows, objective, advantage=advantage)
    loss.backward()
    for x in (true, plain):
        policy_loss(advantage, *by_torch(x, index, target)).backward()
    assert_gradients(ours, true, plain)


def test_wide_adapter_of_a_narrow_head(device):
    """As peft keeps it: a and b in float32 on a bfloat16 model, and gradients in float32."""
    ours = operands(torch.bfloat16, ("a", "b"), device)
    ours |= {name: ours[name].detach().float().requires_grad_() for name in ("a", "b")}
    target = torch.randint(V, (T,), device=device)
    out = ll.logprobs(ll.Logits(ours["hidden"], lora_of(ours), bias=ours["bias"]), target)
    out.logprob.sum().backward()
    true, plain = copies(ours, torch.float64), copies(ours, torch.bfloat16)
    for x in (true, plain):
        by_torch(x, torch.arange(T, device=device), target)[0].sum().backward()
    assert ours["a"].grad.dtype == ours["b"].grad.dtype == torch.float32
    for name in ("a", "b"):
        mine = ours[name].grad.bfloat16()
        assert_gradient_close_to_truth(mine, true[name].grad, plain[name].grad, name)


def test_neither_a_merged_weight_nor_one_with_more_columns_exists():
    """Nothing as large as the weight is made where it is frozen; its gradient goes to the caller's buffer where not."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in theirs:
                    largest = max(largest, x.numel())
            return out

    vocab, size, rank, tokens = 4000, 64, 4, 8
    weight, buffer = torch.randn(vocab, size), torch.zeros(vocab, size)
    theirs = {x.untyped_storage().data_ptr() for x in (weight, buffer)}
    hidden, a, b = (torch.randn(n, requires_grad=True) for n in ((tokens, size), (rank, size), (vocab, rank)))
    target = torch.arange(tokens)
    for trained in (False, True):
        weight.requires_grad_(trained)
        with Sizes():
            lora = ll.LoRA(weight, a, b, 2.0)
            out = ll.logprobs(ll.Logits(hidden, lora, weight_grad=buffer if trained else None), target, memory="64KiB")
            out.logprob.sum().backward()
        assert largest < vocab * size / 2
    plain = weight.detach().double().requires_grad_()
    merged = plain + 2 * b.detach().double() @ a.detach().double()
    torch.log_softmax(hidden.detach().double() @ merged.T, -1).gather(1, target[:, None]).sum().backward()
    assert torch.allclose(buffer.double(), plain.grad, atol=1e-5)


def test_dropout_is_on_the_adapter_alone(device):
    ours, target = operands(torch.float64, ALL, device), torch.randint(V, (T,), device=device)
    mask = (torch.rand(T, D, device=device) > 0.3).double() / 0.7
    lora = ll.LoRA(ours["weight"], ours["a"], ours["b"], SCALE, dropout=lambda x: x * mask)
    out = ll.logprobs(ll.Logits(ours["hidden"], lora), target)
    dropped = SCALE * linear(linear(ours["hidden"] * mask, ours["a"]), ours["b"])
    right = torch.log_softmax(linear(ours["hidden"], ours["weight"]) + dropped, -1).gather(1, target[:, None])
    assert torch.allclose(out.logprob, right.squeeze(1), atol=1e-12)


def test_statistics_and_kept_ids(device):
    """What else is made of tiles sees the adapter, too."""
    ours, target = operands(torch.float64, (), device), torch.randint(V, (T,), device=device)
    merged = ours["weight"] + SCALE * ours["b"] @ ours["a"]
    kept = ll.Kept(torch.randint(V, (4 * T,), device=device), torch.full((T,), 4, device=device))
    for options in ({"stats": ("rank", "collision"), "top_k": 3}, {"kept": kept}):
        mine = from_hidden(ours["hidden"], lora_of(ours), target, **options)
        right = from_hidden(ours["hidden"], merged, target, **options)
        for name, x in right._asdict().items():
            assert x is None or torch.allclose(getattr(mine, name), x, atol=1e-11), name


def sharded(rank: int, world: int, support: bool) -> dict[str, Tensor]:
    torch.manual_seed(7)
    x, target = operands(torch.float64, ALL), torch.randint(V, (T,))
    bounds = (0, 30, V)
    here = slice(bounds[rank], bounds[rank + 1])
    shard = ll.VocabShard(here.start, here.stop, torch.distributed.group.WORLD, check_calls=True)
    lora = ll.LoRA(x["weight"][here], x["a"], x["b"][here], SCALE)
    kept = some_ids(target) if support else None
    out = ll.logprobs(
        ll.Logits(x["hidden"], lora, bias=x["bias"][here], shard=shard), target, entropy="grad", kept=kept
    )
    loss_of(out.logprob, out.entropy).backward()
    return {"logprob": out.logprob.detach()} | {name: x[name].grad for name in NAMES}


def some_ids(target: Tensor) -> ll.Kept:
    """Few ids of each row, and nothing over the vocabulary."""
    mask = torch.rand(len(target), V, device=target.device) < 0.1
    return ll.Kept.from_mask(mask.scatter_(1, target[:, None], True)).over("support")


@pytest.mark.parametrize("support", [False, True])
def test_shards_of_the_vocabulary(ranks, support: bool):
    """Every rank has the whole gradient of a, and its own rows of that of b."""
    torch.manual_seed(7)
    x, target = operands(torch.float64, ALL), torch.randint(V, (T,))
    logprob, entropy = by_torch(x, torch.arange(T), target, some_ids(target) if support else None)
    loss_of(logprob, entropy).backward()
    found = ranks(sharded, 2, support)
    for result in found:
        assert torch.allclose(result["logprob"], logprob, atol=1e-12)
        for name in ("hidden", "a"):
            assert torch.allclose(result[name], x[name].grad, atol=1e-11), name
    for name in ("weight", "b", "bias"):
        assert torch.allclose(found[0][name] + found[1][name], x[name].grad, atol=1e-11), name


def test_what_is_refused():
    weight, a, b = torch.zeros(8, 4), torch.zeros(2, 4), torch.zeros(8, 2)
    with pytest.raises(ll.LogitlessError, match=r"LoRA: a must be \[r, 4\] and b \[8, r\] to go with weight \[8, 4\]"):
        ll.LoRA(weight, b, a)
    with pytest.raises(ll.LogitlessError, match=r"LoRA: a must be a matrix of floats but is a Linear. A layer goes in"):
        ll.LoRA(weight, nn.Linear(4, 2), b)  # pyright: ignore[reportArgumentType]
    lora, hidden, target = ll.LoRA(weight, a, b), torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    for options, text in (
        ({"hidden_grad": "partial"}, r'with hidden_grad="partial" the gradient of its a would be a part'),
        ({"sequence_parallel": True}, r"with sequence_parallel=True the gradient of its a would be a part"),
    ):
        with pytest.raises(ll.LogitlessError, match=text):
            from_hidden(hidden, lora, target, **options)
    with pytest.raises(ll.LogitlessError, match="a LoRA for hidden size 4 but hidden has 5"):
        ll.logprobs(ll.Logits(torch.zeros(3, 5), lora), target)
    with pytest.raises(ll.LogitlessError, match="Teacher: the weight of its Logits is a LoRA, which is not followed"):
        ll.Teacher(ll.Logits(hidden, lora))


@pytest.mark.parametrize(
    ("dtype", "trained"),
    [(torch.float64, ALL), (torch.float32, FROZEN), (torch.bfloat16, ALL), (torch.float32, ("b",))],
    ids=["float64", "frozen", "bfloat16", "only b"],
)
def test_over_a_support(dtype, trained, device):
    """It was refused: dot products with rows of the weight and, apart, with rows of b."""
    ours, index = operands(dtype, trained, device), torch.randperm(T, device=device)[: T - 6]
    target = torch.randint(V, (len(index),), device=device)
    kept = some_ids(target)
    true, plain = copies(ours, torch.float64), copies(ours, dtype)
    out = from_hidden(
        ours["hidden"], lora_of(ours), (index, target), bias=ours["bias"], kept=kept, entropy="grad", memory="16KiB"
    )
    wanted = [by_torch(x, index, target, kept) for x in (true, plain)]
    for logprob, entropy in (out[:2], *wanted):
        loss_of(logprob, entropy).backward()
    for name, mine, right, usual in zip(("logprob", "entropy"), out[:2], *wanted, strict=True):
        assert_close_to_truth(mine, right, usual, name)
    assert_gradients(ours, true, plain)


def test_ids_that_a_teacher_sent(device):
    """As of a merged weight: K log-probs, and kept ids beside a teacher's head."""
    x, target = operands(torch.float64, ALL, device), torch.randint(V, (T,), device=device)
    merged = copies(x, torch.float64)
    sent = torch.randn(T, V, device=device).log_softmax(-1).topk(4)
    theirs = ll.Logits(torch.randn(T, D, device=device).double(), torch.randn(V, D, device=device).double())
    for options in (
        {"teacher": ll.Teacher.from_top_k(*sent, tail="renormalise")},
        {"teacher": ll.Teacher.from_top_k(*sent, tail="bucket")},
        {"teacher": theirs, "kept": some_ids(target)},
        {"teacher": ll.Teacher(theirs, at=torch.arange(T, device=device) // 2), "kept": some_ids(target)},
    ):
        found = []
        for of, weight in ((x, lora_of(x)), (merged, merged["weight"] + SCALE * merged["b"] @ merged["a"])):
            out = ll.logprobs(ll.Logits(of["hidden"], weight, bias=of["bias"]), target, **options)
            assert out.divergence is not None
            loss = (torch.linspace(0.5, 2, T, device=device) * out.divergence).sum()
            found.append((out.divergence, *torch.autograd.grad(loss, [of[name] for name in NAMES])))
        for mine, right in zip(*found, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        (torch.tensor(2.0, requires_grad=True), r"requires grad, but no gradient flows to it. Fold it into b"),
        (torch.ones(2), r"of shape \[2\]"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (torch.tensor(math.nan), "nan"),
        (torch.tensor(math.inf), "inf"),
        ("2", "'2'"),
        (None, "None"),
        (True, "True"),
    ],
    ids=str,
)
def test_scales_that_are_refused(scale, text: str):
    with pytest.raises(ll.LogitlessError, match=f"^LoRA: scale .*{text}"):
        ll.LoRA(torch.zeros(8, 4), torch.zeros(2, 4), torch.zeros(8, 2), scale=scale)


def test_a_learned_scale_goes_into_b():
    hidden, target = torch.randn(5, 4), torch.randint(8, (5,))
    weight, a, b = torch.randn(8, 4), torch.randn(2, 4), torch.randn(8, 2)
    grads = []
    for folded in (True, False):
        scale = torch.tensor(1.5, requires_grad=True)
        head = ll.LoRA(weight, a, scale * b) if folded else weight + scale * b @ a
        ll.logprobs(ll.Logits(hidden, head), target).logprob.sum().backward()
        grads.append(scale.grad)
    torch.testing.assert_close(*grads)
    constant = ll.LoRA(weight, a, b, scale=torch.tensor(1.5))
    torch.testing.assert_close(
        ll.logprobs(ll.Logits(hidden, constant), target).logprob,
        ll.logprobs(ll.Logits(hidden, weight + 1.5 * b @ a), target).logprob,
    )


def with_teacher(x: dict[str, Tensor], target: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs, and KL(student || teacher), in the operands' dtype."""
    hidden = x["hidden"]
    log_p = torch.log_softmax(linear(hidden, x["weight"]) + SCALE * linear(linear(hidden, x["a"]), x["b"]), -1)
    log_q = torch.log_softmax(theirs, -1)
    return log_p.gather(1, target[:, None]).squeeze(1), (log_p.exp() * (log_p - log_q)).sum(1)


@pytest.mark.parametrize("trained", [("hidden", "weight", "a", "b"), FROZEN], ids=["all", "frozen"])
@pytest.mark.parametrize("computed", [False, True], ids=["hidden", "logits"])
def test_a_teacher_beside_an_adapter(trained, computed: bool, device):
    """It was refused: the student's gradients come from tiles that have the adapter's part, as without a teacher."""
    ours, target = operands(torch.float64, trained, device), torch.randint(V, (T,), device=device)
    exact = copies(ours, torch.float64)
    theirs = torch.randn(T, D, device=device, dtype=torch.float64), torch.randn(V, D, device=device).double()
    teacher = linear(*theirs) if computed else ll.Logits(*theirs)
    logits = ll.Logits(ours["hidden"], lora_of(ours))
    out = ll.logprobs(logits, target, teacher=teacher, memory="32KiB")
    loss_of(out.logprob, out.divergence).backward()
    logprob, divergence = with_teacher(exact, target, linear(*theirs))
    loss_of(logprob, divergence).backward()
    torch.testing.assert_close(out.logprob, logprob, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out.divergence, divergence, rtol=1e-12, atol=1e-12)
    for name in trained:
        torch.testing.assert_close(ours[name].grad, exact[name].grad, rtol=1e-10, atol=1e-11)
        ours[name].grad = exact[name].grad = None
    objective = ll.Objective(policy="reinforce", divergence="reverse_kl", divergence_coef=0.7)
    advantage, kinds = torch.linspace(-1, 2, T, device=device, dtype=torch.float64), set()
    for memory in ("32KiB", 1 << 30):
        call = (ll.policy_loss, logits, target, objective)
        given = {"teacher": teacher, "advantage": advantage, "memory": memory}
        kinds.add(ll.explain(*call, **given).kind)
        loss, _ = ll.policy_loss(*call[1:], **given)
        loss.backward()
        logprob, divergence = with_teacher(exact, target, linear(*theirs))
        right = (-advantage * logprob + 0.7 * divergence).mean()
        right.backward()
        torch.testing.assert_close(loss, right, rtol=1e-12, atol=1e-12)
        for name in trained:
            torch.testing.assert_close(ours[name].grad, exact[name].grad, rtol=1e-10, atol=1e-11)
            ours[name].grad = exact[name].grad = None
    # On a card, what work costs decides.
    assert device.type != "cpu" or kinds == {"one pass"}


@pytest.mark.parametrize("trained", [("hidden",), ("a",), ("b",), ("hidden", "a")], ids="+".join)
def test_a_divergence_alone_where_a_part_of_the_adapter_is_frozen(trained, device):
    """Both raised in backward: gradients kept in forward have the adapter's columns, and those of b alone were none."""
    ours, target = operands(torch.float64, trained, device), torch.randint(V, (T,), device=device)
    exact = copies(ours, torch.float64)
    theirs = torch.randn(T, D, device=device, dtype=torch.float64), torch.randn(V, D, device=device).double()
    logits, teacher = ll.Logits(ours["hidden"], lora_of(ours)), ll.Logits(*theirs)
    objective = ll.Objective(policy="none", divergence="reverse_kl", divergence_coef=1.0)
    weight = torch.linspace(0.5, 2, T, device=device, dtype=torch.float64)
    for memory in ("4KiB", "32KiB"):
        asked = {"teacher": teacher, "memory": memory}
        divergence = ll.logprobs(logits, target, **asked).divergence
        assert divergence is not None
        loss, _ = ll.policy_loss(logits, target, objective, **asked)
        truth = with_teacher(exact, target, linear(*theirs))[1]
        for found, right in (((weight * divergence).sum(), (weight * truth).sum()), (loss, truth.mean())):
            torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
            gradients = (
                torch.autograd.grad(x, [of[name] for name in trained], retain_graph=True)
                for x, of in ((found, ours), (right, exact))
            )
            for mine, other in zip(*gradients, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-11)


def test_an_adapter_of_rank_0_is_none():
    with pytest.raises(ll.LogitlessError, match="LoRA: a and b have rank 0"):
        ll.LoRA(torch.zeros(5, 3), torch.zeros(0, 3), torch.zeros(5, 0))


@pytest.mark.parametrize("loss", [False, True])
def test_hidden_states_of_a_batch(loss: bool):
    """Lines of tokens, [2, 3, D]: gradients of both parts of a token are told apart by D, not by a line's length."""
    given = {name: x.detach() for name, x in operands(torch.float64, ()).items()}
    given["hidden"] = given["hidden"][:6]
    target, advantage = torch.randint(V, (2, 3)), torch.linspace(-1, 1, 6, dtype=torch.float64)
    ours, true = copies(given, torch.float64), copies(given, torch.float64)
    for x in (*ours.values(), *true.values()):
        x.requires_grad_()
    logits = ll.Logits(ours["hidden"].view(2, 3, D), lora_of(ours), bias=ours["bias"])
    if loss:
        fields = {"old_logprob": "current", "advantage": advantage}
        ll.policy_loss(logits, target, ll.Objective(entropy_coef=0.3), **fields)[0].backward()
    else:
        out = ll.logprobs(logits, target, entropy="grad")
        policy_loss(advantage, out.logprob.flatten(), out.entropy.flatten()).backward()
    policy_loss(advantage, *by_torch(true, torch.arange(6), target.flatten())).backward()
    for name in NAMES:
        torch.testing.assert_close(ours[name].grad, true[name].grad, rtol=1e-9, atol=1e-12)
