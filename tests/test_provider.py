"""The table of functions for frameworks: found, frozen, exact alone and over ranks; and every diff of its page runs."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from close import assert_close_to_truth, assert_gradient_close_to_truth
from torch import Tensor
from torch.distributed.tensor import DTensor

import logitless as ll
from logitless import LogitlessError, provider
from logitless.adapters.signatures import plain_signature

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "adapters"))

from hosts import checkout, load  # noqa: E402

PROVIDER = provider.get(version=1)
V, D, N = 101, 8, 24

# What version 1 promises. A change of a line here, other than a further keyword, is version 2.
SIGNATURES = {
    "logprobs_from_logits": "(logits, target, *, temperature=1.0, entropy=None, scale=1.0, softcap=None, "
    "vocab_size=None, vocab_group='whole', vocab_range=None, support=None, outside='error', flat=False, "
    "overwrite_logits=False, backend='auto', memory='16MiB', chunk_rows=None)",
    "logprobs_from_hidden": "(hidden, weight, target, *, bias=None, temperature=1.0, entropy=None, scale=1.0, "
    "softcap=None, vocab_size=None, vocab_group='whole', vocab_range=None, support=None, hidden_grad='reduced', "
    "sequence_parallel=False, weight_grad=None, match=None, outside='error', flat=False, backend='auto', "
    "memory='256MiB', chunk_rows=None)",
    "policy_loss": "(hidden, weight, target, *, old_logprob, advantage, ref_logprob=None, rollout_logprob=None, "
    "objective=mappingproxy({}), denominator=None, bias=None, temperature=1.0, scale=1.0, softcap=None, "
    "vocab_size=None, vocab_group='whole', vocab_range=None, hidden_grad='reduced', sequence_parallel=False, "
    "backend='auto', memory='1GiB', chunk_rows=None)",
    "rows": "(tokens, response_lengths, *, loss_masks=None, loss_mask_only=False, context_parallel=None, cp_rank=0, "
    "cp_size=1, num_tokens=None, device=None)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_version_1_is_what_it_was(name):
    assert plain_signature(getattr(PROVIDER, name)) == SIGNATURES[name]
    assert inspect.getdoc(getattr(PROVIDER, name))


def test_every_function_is_held():
    held = {name for name, x in vars(PROVIDER).items() if callable(x)}
    assert held == set(SIGNATURES) == set(PROVIDER.capabilities().options)
    with pytest.raises(AttributeError):
        PROVIDER.policy_loss = None
    with pytest.raises(LogitlessError, match=r"version 2 is not served; this release has 1\. Ask for one of these"):
        provider.get(version=2)


def test_it_is_found_as_an_entry_point(tmp_path, monkeypatch):
    """As an installed package has it: what pyproject.toml says, in a folder of metadata on the path."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    group = provider.GROUP
    metadata = tmp_path / "logitless-9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: logitless\nVersion: 9\n")
    lines = "\n".join(f"{name} = {value}" for name, value in declared[group].items())
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{lines}\n")
    monkeypatch.syspath_prepend(tmp_path)
    (entry,) = importlib.metadata.entry_points(group=group, name="logitless")
    assert entry.load()(version=1) is PROVIDER


def test_capabilities_are_true(device: torch.device):
    """Every dtype and backend that is listed runs here, or says before the call why it does not."""
    can = PROVIDER.capabilities()
    assert can.version == 1
    target = torch.tensor([1, 2, 0], device=device)
    for dtype in can.dtypes:
        logits = torch.zeros(3, 4, dtype=dtype, device=device)
        assert PROVIDER.logprobs_from_logits(logits, target).logprob.isfinite().all()
    for backend in can.backends:
        logits = torch.zeros(3, 4, device=device)
        assert PROVIDER.logprobs_from_logits(logits, target, backend=backend).logprob.isfinite().all()
    assert set(can.devices) == {"cpu", "cuda"}
    assert can.parallel == ("vocabulary", "sequence", "zigzag", "contiguous")
    assert can.why_not("policy_loss", torch.zeros(2, 2), ["advantage"]) is None
    assert can.why_not("policy_los") == "there is no function policy_los"
    assert can.why_not("rows", options=["top_p", "chunk"]) == "rows has no option chunk, top_p"
    assert can.why_not("policy_loss", torch.zeros(2, dtype=torch.int8)) == "the dtype torch.int8 is not served"
    assert can.why_not("policy_loss", torch.zeros(2, device="meta")) == "the device meta is not served"


def truth(z: Tensor, target: Tensor, temperature: Any = 1.0) -> tuple[Tensor, Tensor]:
    log_p = (z / temperature).log_softmax(-1)
    return log_p.gather(-1, target.clamp_min(0)[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def run(function: Any, operands: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [x.detach().clone().requires_grad_() for x in operands]
    results = list(function(*leaves))
    generator = torch.Generator().manual_seed(7)
    upstream = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in results]
    return [x.detach() for x in results], list(torch.autograd.grad(results, leaves, upstream))


def check(ours: Any, plain: Any, operands: list[Tensor]) -> None:
    """Values and gradients of both, judged by float64."""
    mine, theirs, exact = run(ours, operands), run(plain, operands), run(plain, [x.double() for x in operands])
    for i in range(len(mine[0])):
        assert_close_to_truth(mine[0][i], exact[0][i], theirs[0][i])
    for i in range(len(operands)):
        assert_gradient_close_to_truth(mine[1][i], exact[1][i], theirs[1][i])


def drawn() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(5)
    return torch.randn(N, V) * 3, torch.randint(V, (N,)), torch.randn(N, D), torch.randn(V, D)


def test_from_logits_and_from_hidden():
    logits, target, hidden, weight = drawn()
    temperature = torch.rand(N) + 0.5
    settings = {"temperature": temperature, "entropy": "grad"}
    plain = lambda z: truth(z, target, temperature[:, None].to(z))  # noqa: E731
    check(lambda z: PROVIDER.logprobs_from_logits(z, target, **settings)[:2], plain, [logits])
    check(
        lambda h, w: PROVIDER.logprobs_from_hidden(h, w, target, **settings)[:2],
        lambda h, w: plain(h @ w.T),
        [hidden, weight],
    )


def test_options_arrive():
    """Each keyword says the same as the library's own argument, to the bit."""
    logits, target, hidden, weight = drawn()
    head = ll.Head(temperature=0.7, scale=0.5, softcap=9.0, vocab_size=V - 4)
    target = target.clamp_max(V - 5)
    given = {"temperature": 0.7, "scale": 0.5, "softcap": 9.0, "vocab_size": V - 4}
    ids, lengths = torch.arange(N) % 7, torch.ones(N, dtype=torch.int64)
    kept = ll.Kept(ids, lengths)
    ours = PROVIDER.logprobs_from_logits(logits, target, support=(ids, lengths), entropy="value", **given)
    own = ll.logprobs(logits, target, kept=kept, entropy="value", head=head)
    assert all(torch.equal(x, y) for x, y in zip(ours[:3], own[:3], strict=True))
    bias = torch.randn(V)
    ours = PROVIDER.logprobs_from_hidden(hidden, weight, target, bias=bias, match="bfloat16", **given).logprob
    assert torch.equal(
        ours, ll.logprobs(ll.Logits(hidden, weight, bias=bias, match="bfloat16"), target, head=head).logprob
    )
    leaf = logits.clone().requires_grad_()
    made = leaf * 1.0
    PROVIDER.logprobs_from_logits(made, target, overwrite_logits=True).logprob.sum().backward()
    assert torch.equal(made.detach(), leaf.grad)


def test_policy_loss():
    _, target, hidden, weight = drawn()
    old, advantage, reference = (torch.randn(3, N) - torch.tensor([4.0, 0.0, 4.0])[:, None]).unbind()
    fields = {"old_logprob": old, "advantage": advantage, "ref_logprob": reference}

    def ours(h: Tensor, w: Tensor) -> list[Tensor]:
        objective = {"clip": (0.2, 0.28), "kl": "k3", "kl_coef": 0.1}
        lines = {name: x.view(4, 6) for name, x in fields.items()}
        h = h.view(4, 6, D)
        loss, metrics = PROVIDER.policy_loss(h, w, target.view(4, 6), objective=objective, denominator=3.0, **lines)
        assert "loss" in metrics.compute()
        return [loss]

    def plain(h: Tensor, w: Tensor) -> list[Tensor]:
        log_p, _ = truth(h @ w.T, target)
        ratio, gap = (log_p - old).exp(), reference - log_p
        policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        return [(policy + 0.1 * (gap.exp() - gap - 1)).sum() / 3.0]

    check(ours, plain, [hidden, weight])


def test_rows_of_a_pack():
    tokens = [torch.arange(1, 9), torch.arange(2, 7)]
    masks = [torch.tensor([1, 0, 1, 1]), torch.tensor([0, 1])]
    whole = PROVIDER.rows(tokens, [4, 2], loss_masks=masks, loss_mask_only=True, num_tokens=16)
    assert whole.index.tolist() == [3, 5, 6, 11]
    parts = [
        PROVIDER.rows(tokens, [4, 2], context_parallel=name, cp_rank=rank, cp_size=2).target.tolist()
        for name in ("zigzag", "contiguous")
        for rank in range(2)
    ]
    own = [
        ll.Rows.packed(tokens, [4, 2], cp=scheme(rank, 2)).target.tolist()
        for scheme in (ll.Zigzag, ll.Contiguous)
        for rank in range(2)
    ]
    assert parts == own
    assert parts[:2] != parts[2:]
    assert PROVIDER.rows(tokens, [4, 2], context_parallel="zigzag").cp is None
    with pytest.raises(LogitlessError, match="cp_size is 2 but context_parallel is None"):
        PROVIDER.rows(tokens, [4, 2], cp_size=2)
    with pytest.raises(LogitlessError, match='must be "zigzag", "contiguous" or None but is \'ring\''):
        PROVIDER.rows(tokens, [4, 2], context_parallel="ring")


def run_parallel(rank: int, world: int) -> None:
    """Even and uneven shards; a host's whole loss is the same on every rank, so each differentiates its own columns."""
    logits, target, hidden, weight = drawn()
    logits, weight = logits[:, :100], weight[:100]
    target = target.clamp_max(99)
    exact = truth(logits.double(), target)
    for bounds in (None, ((0, 30), (30, 100))[rank]):
        start, stop = bounds or (50 * rank, 50 * rank + 50)
        shared: dict[str, Any] = {"vocab_group": dist.group.WORLD, "vocab_range": bounds, "entropy": "grad"}
        mine, (gradient,) = run(
            lambda z, shared=shared: PROVIDER.logprobs_from_logits(z, target, **shared)[:2], [logits[:, start:stop]]
        )
        for found, wanted, plain in zip(mine, exact, truth(logits, target), strict=True):
            assert_close_to_truth(found, wanted, plain)
        if bounds is None:
            request = asked(logits[:, start:stop], target, "value", group=dist.group.WORLD)
            assert torch.equal(provider.vime(request).logp[:, 0], mine[0])
        _, (wide,) = run(lambda z: truth(z, target), [logits.double()])
        _, (plain,) = run(lambda z: truth(z, target), [logits])
        assert_gradient_close_to_truth(gradient, wide[:, start:stop], plain[:, start:stop])
        part = run(
            lambda h, w, shared=shared: PROVIDER.logprobs_from_hidden(h, w, target, hidden_grad="partial", **shared)[
                :2
            ],
            [hidden, weight[start:stop]],
        )[1][0]
        dist.all_reduce(part)
        (wide, _), (plain, _) = (
            run(lambda h, w: truth(h @ w.T, target), [x.to(dtype) for x in (hidden, weight)])[1]
            for dtype in (torch.float64, torch.float32)
        )
        assert_gradient_close_to_truth(part, wide, plain)


def test_over_ranks(ranks):
    ranks(run_parallel, 2)


def run_two_vocabularies(rank: int, world: int) -> None:
    """Rank 0 has the same range of both; rank 1 has not."""
    logits, target, hidden, weight = drawn()
    for width in (49, 50, 49):
        ids, (start, stop) = target.clamp_max(width - 1), ((0, 25), (25, width))[rank]
        shared: dict[str, Any] = {"vocab_group": dist.group.WORLD, "vocab_range": (start, stop)}
        found = PROVIDER.logprobs_from_logits(logits[:, start:stop], ids, **shared).logprob
        exact, plain = (truth(x[:, :width], ids)[0] for x in (logits.double(), logits))
        assert_close_to_truth(found, exact, plain)
        found = PROVIDER.logprobs_from_hidden(hidden, weight[start:stop], ids, **shared).logprob
        exact, plain = (
            truth(h @ w[:width].T, ids)[0] for h, w in ((hidden.double(), weight.double()), (hidden, weight))
        )
        assert_close_to_truth(found, exact, plain)


def test_two_vocabularies_over_ranks(ranks):
    ranks(run_two_vocabularies, 2)


def run_own_shard(rank: int, world: int) -> None:
    _, target, hidden, weight = drawn()
    start, stop = ((0, 25), (25, len(weight)))[rank]
    own = ll.Logits(hidden, weight[start:stop], shard=ll.VocabShard(start, stop, dist.group.WORLD))
    exact, plain = (truth(h @ w.T, target)[0] for h, w in ((hidden.double(), weight.double()), (hidden, weight)))
    for outside in ("zero", "ignore"):
        found = PROVIDER.logprobs_from_logits(own, target, outside=outside).logprob
        assert_close_to_truth(found, exact, plain)


def test_logits_that_are_not_computed_with_a_shard_of_their_own(ranks):
    """The ids that other ranks have are in the vocabulary."""
    ranks(run_own_shard, 2)


def test_a_range_without_a_group_is_refused():
    with pytest.raises(LogitlessError, match=r'vocab_range is \(2, 6\) but vocab_group is "whole"'):
        PROVIDER.logprobs_from_logits(torch.zeros(2, 4), torch.tensor([3, 3]), vocab_range=(2, 6))
    assert PROVIDER.logprobs_from_logits(torch.zeros(2, 4), torch.tensor([3, 3]), vocab_range=(0, 4)).logprob.sum() < 0


def test_a_group_that_is_none_is_refused():
    """slime's None is the world, AReaL's is no group: nobody can tell which was meant."""
    logits, target, hidden, weight = drawn()
    fields = {"old_logprob": torch.zeros(N), "advantage": torch.ones(N)}
    for call in (
        lambda **x: PROVIDER.logprobs_from_logits(logits, target, **x),
        lambda **x: PROVIDER.logprobs_from_hidden(hidden, weight, target, **x),
        lambda **x: PROVIDER.policy_loss(hidden, weight, target, **fields, **x),
    ):
        with pytest.raises(LogitlessError, match=r'vocab_group is None.* Pass vocab_group="whole", "world" or the'):
            call(vocab_group=None)
        with pytest.raises(LogitlessError, match=r"must be \"whole\", \"world\" or a process group but is 'tp'"):
            call(vocab_group="tp")


def test_flat_results_of_operands_in_any_shape():
    logits, target, hidden, weight = drawn()
    wanted = PROVIDER.logprobs_from_hidden(hidden, weight, target, temperature=0.7, entropy="grad")
    # [S, B, D] beside [B, S], as Megatron has them; and a temperature per row, in either shape.
    temperature = torch.full((4, 6), 0.7)
    found = PROVIDER.logprobs_from_hidden(
        hidden.view(6, 4, D), weight, target.view(4, 6), temperature=temperature, entropy="grad", flat=True
    )
    assert found.logprob.shape == found.entropy.shape == (N,)
    assert torch.equal(found.logprob, wanted.logprob)
    wanted = PROVIDER.logprobs_from_logits(logits, target).logprob
    assert torch.equal(
        PROVIDER.logprobs_from_logits(logits.view(6, 4, V), target.view(4, 6), flat=True).logprob, wanted
    )


@pytest.mark.parametrize("source", ["logits", "hidden"])
def test_ids_outside_the_vocabulary_by_name(source):
    logits, target, hidden, weight = drawn()
    target[[3, 9]] = torch.tensor([V + 5, -7])
    target[5] = -100
    inside = (target >= 0) & (target < V)
    score = getattr(PROVIDER, f"logprobs_from_{source}")
    operands = [logits] if source == "logits" else [hidden, weight]

    def plain(*x: Tensor) -> list[Tensor]:
        z = x[0] if source == "logits" else x[0] @ x[1].T
        log_p, log_z = z.log_softmax(-1), z.logsumexp(-1)
        found = log_p.gather(-1, torch.where(inside, target, 0)[:, None])[:, 0]
        return [torch.where(inside, found, torch.where(target == -100, 0.0, log_z.detach() - log_z))]

    def left_out(*x: Tensor) -> list[Tensor]:
        return [torch.where(inside, plain(*x)[0], 0.0)]

    check(lambda *x: [score(*x, target, outside="zero").logprob], plain, operands)
    check(lambda *x: [score(*x, target, outside="ignore").logprob], left_out, operands)
    with pytest.raises(LogitlessError):
        score(*operands, target)
    with pytest.raises(LogitlessError, match=r"outside must be .* but is 'skip'"):
        score(*operands, target, outside="skip")


def test_chunks_by_rows_and_a_temperature_in_a_tensor():
    logits, target, hidden, weight = drawn()
    wanted = PROVIDER.logprobs_from_hidden(hidden, weight, target, temperature=0.7, memory=4 * 5 * V).logprob
    found = PROVIDER.logprobs_from_hidden(hidden, weight, target, temperature=torch.tensor(0.7), chunk_rows=5).logprob
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        PROVIDER.logprobs_from_logits(logits, target, temperature=torch.tensor(0.7), chunk_rows=5).logprob,
        truth(logits, target, 0.7)[0],
    )
    for rows in (0, 2.5):
        with pytest.raises(LogitlessError, match="chunk_rows must be a number of rows, or None for memory, but is"):
            PROVIDER.logprobs_from_logits(logits, target, chunk_rows=rows)


def test_no_adapter_is_imported():
    text = (ROOT / "src" / "logitless" / "provider.py").read_text(encoding="utf-8")
    assert "logitless.adapters" not in text


# vime's interface.


def asked(logits: Tensor, target: Tensor, entropy: str | None = None, keep: Tensor | None = None, group: Any = None):
    """A request as vime makes it: these fields, whatever its class."""
    wanted = {"with_entropy": entropy is not None, "with_entropy_grad": entropy == "grad", "chunk_size": 5}
    return SimpleNamespace(
        logits=logits, target_ids=target, tensor_parallel_group=group, log_prob_keep_mask=keep, context=None, **wanted
    )


@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
def test_vime(masked):
    logits, target, _, _ = drawn()
    keep = torch.rand(N, V) > 0.7 if masked else None
    # The target is always kept.
    shown = None if keep is None else keep | (torch.arange(V) == target[:, None])

    def plain(z: Tensor) -> tuple[Tensor, Tensor]:
        kept = z if shown is None else z.masked_fill(~shown, -torch.inf)
        return truth(kept, target)[0], truth(z, target)[1]

    def ours(z: Tensor) -> tuple[Tensor, Tensor]:
        out = provider.vime(asked(z, target, "grad", keep))
        assert out.logp.shape == (N, 1)
        return out.logp[:, 0], out.entropy

    check(ours, plain, [logits])
    leaf = logits.requires_grad_()
    assert provider.vime(asked(leaf, target)).entropy is None
    assert not provider.vime(asked(leaf, target, "value")).entropy.requires_grad
    nothing = provider.vime(asked(leaf[:0], target[:0], "grad"))
    assert (nothing.logp.shape, nothing.entropy.shape, nothing.logp.requires_grad) == ((0, 1), (0,), True)


@pytest.mark.parametrize(("chunk_size", "chunk_rows"), [(5, 5), (1, 1), (0, None), (-1, None)])
@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
def test_the_chunks_of_vime(chunk_size: int, chunk_rows: int | None, masked: bool, monkeypatch):
    """Its chunk of rows bounds the working memory; 0 and less say that there is none."""
    seen, real = [], provider.logprobs_from_logits

    def scored(*args: Any, **options: Any) -> Any:
        seen.append(options["chunk_rows"])
        return real(*args, **options)

    monkeypatch.setattr(provider, "logprobs_from_logits", scored)
    logits, target, _, _ = drawn()
    request = asked(logits, target, "value", torch.ones(N, V, dtype=torch.bool) if masked else None)
    request.chunk_size = chunk_size
    provider.vime(request)
    assert seen == [chunk_rows] * (1 + masked)


def test_vime_falls_back_on_what_is_not_served():
    with pytest.raises(provider.Unavailable, match=r"provider\.vime: the dtype torch\.int64 is not served") as caught:
        provider.vime(asked(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2)))
    assert caught.value.linear_logp_provider_unavailable


@pytest.mark.skipif(checkout("vime") is None, reason="LOGITLESS_HOSTS names no checkout of vime")
def test_vime_itself():
    """vime's own dispatch, in both of its modes."""
    (module,) = load("vime")
    logits, target, _, _ = drawn()
    layout = module.TokenLayout(world_size=1, rank=0, layout="single")
    settings = {"token_layout": layout, "with_entropy": True, "with_entropy_grad": True, "chunk_size": -1}

    def native(*_: Any, **__: Any) -> Any:
        return "vime's own"

    def run_vime(z: Tensor, mode: str) -> Any:
        args = SimpleNamespace(linear_logp_provider="logitless.provider.vime", linear_logp_provider_mode=mode)
        request = module.LinearLogpRequest(logits=z, target_ids=target, tensor_parallel_group=None, **settings)
        return module.compute_linear_logp(args=args, request=request, native=native)

    for mode in ("auto", "strict"):
        check(lambda z, mode=mode: [x.reshape(N) for x in run_vime(z, mode)], lambda z: truth(z, target), [logits])
    assert run_vime(logits.long(), "auto") == "vime's own"
    with pytest.raises(RuntimeError, match=r"is unavailable: provider\.vime: the dtype torch\.int64 is not served"):
        run_vime(logits.long(), "strict")


# The diffs of the page, applied.

DIFF = re.compile(r"^```diff\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGE = (ROOT / "docs" / "maintainers.md").read_text(encoding="utf-8")
# Those with deferred logits are run by the tests of hosts' steps.
DIFFS = [diff for diff in DIFF.findall(PAGE) if "provider" in diff]


class LinearCrossEntropy:
    """What verl has under that name, as far as the diff reads it."""

    @staticmethod
    def apply(*args: Any) -> None:
        return None


def patched(diff: str) -> str:
    """The code after the diff: context and added lines."""
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))


def applied(served: Any) -> dict[str, Any]:
    """Every patched function by name, in a module that has this provider, or None."""
    functions: dict[str, Any] = {}
    for diff in DIFFS:
        namespace = {"torch": torch, "DTensor": DTensor, "LinearCrossEntropy": LinearCrossEntropy, "provider": served}
        namespace |= {"get_tensor_model_parallel_group": lambda: "whole", "spmd_mesh_size": lambda axis: 1}
        namespace["IGNORE_INDEX"] = -100
        namespace["mpu"] = SimpleNamespace(get_tensor_model_parallel_group=lambda: "whole")
        exec(patched(diff), namespace)
        for name, x in namespace.items():
            if f"def {name}(" in diff:
                # slime's function and miles's have one name.
                functions[f"{name} of miles" if "true_on_policy" in diff else name] = x
    return functions


def calls() -> dict[str, tuple[Any, Any, list[Tensor]]]:
    """A call of each function, and the same in plain torch, on these operands."""
    logits, target, hidden, weight = drawn()
    lines, heads = logits.view(4, 6, V), hidden.view(4, 6, D)
    ids = target.view(4, 6)
    # The second token of a line is not scored.
    partly = ids.clone()
    partly[:, 1] = -100
    return {
        "calculate_log_probs_and_entropy": (
            lambda f, z: [x.reshape(N) for x in f(z, target, None, with_entropy=True)],
            lambda z: truth(z, target),
            [logits],
        ),
        "calculate_log_probs_and_entropy of miles": (
            lambda f, z: [x.reshape(N) for x in f(z, target, None, with_entropy=True)],
            lambda z: truth(z, target),
            [logits],
        ),
        "gather_logprobs_entropy": (lambda f, z: f(z, target, 0.7), lambda z: truth(z, target, 0.7), [logits]),
        "get_next_token_logprobs_from_logits": (
            lambda f, z: [f(ids, z)],
            lambda z: [truth(z[:, :-1], ids[:, 1:])[0]],
            [lines],
        ),
        "_fused_lm_head_logprob_apply": (
            lambda f, h, w: [f("torch", h, w, ids, 0, V, 4, "whole", False)],
            lambda h, w: [truth(h @ w.T, ids)[0]],
            [heads, weight],
        ),
        # As Megatron's model has them, [S, B, D] and [B, S]: verl lays both out in one line, and returns lines.
        "linear_cross_entropy": (
            lambda f, h, w: f(h, w, ids, 0.7, "None"),
            lambda h, w: truth(h.reshape(N, D) @ w.T, target, 0.7),
            [hidden.view(6, 4, D), weight],
        ),
        "selective_log_softmax": (lambda f, z: [f(z, ids)], lambda z: [truth(z, ids)[0]], [lines]),
        "log_probs_from_logits": (lambda f, z: [f(z, ids, 0.7)], lambda z: [truth(z, ids, 0.7)[0]], [lines]),
        "forward": (
            lambda f, h, w: [f(SimpleNamespace(weight=w), h, ids, torch.full((4, 6), 0.7))["logprobs"]],
            lambda h, w: [truth(h @ w.T, ids, 0.7)[0]],
            [heads, weight],
        ),
        "compute_logps_and_entropy_from_logits": (
            lambda f, z: [f(z, ids)[0]],
            lambda z: [truth(z, ids)[0]],
            [lines],
        ),
        "compute_logprobs": (
            lambda f, z: [f(z, target), f(z, target, return_entropy=True)[0]],
            lambda z: [truth(z, target)[0]] * 2,
            [logits],
        ),
        "ForCausalLMLoss": (
            lambda f, z: [f(z, partly, V), f(z, None, V, 7.0, shift_labels=ids)],
            lambda z: [-truth(z[:, :-1], ids[:, 1:])[0][:, 1:].mean(), -truth(z, ids)[0].sum() / 7.0],
            [lines],
        ),
        "vocab_parallel_cross_entropy": (lambda f, z: [f(z, ids)], lambda z: [-truth(z, ids)[0]], [lines]),
    }


@pytest.mark.parametrize("name", calls())
def test_the_diff_serves_and_falls_back(name):
    call, plain, operands = calls()[name]
    function = applied(PROVIDER)[name]
    check(lambda *x: call(function, *x), plain, operands)
    # What is there now is "...", or, for verl, a function that returns None.
    without = applied(None)[name]
    wanted = list(inspect.signature(without).parameters.values())
    assert without(*[torch.zeros(1) for p in wanted if p.default is p.empty]) is None


def test_areals_logits_are_reused():
    """The gradient is written over them, where they are not the caller's own, and entropy has no graph."""
    logits, target, _, _ = drawn()
    function, leaf = applied(PROVIDER)["gather_logprobs_entropy"], logits.clone().requires_grad_()
    made = leaf * 1.0
    logprob, entropy = function(made, target, 0.7, reuse_logits=True)
    wanted = truth(logits.double().requires_grad_(), target, 0.7)
    torch.testing.assert_close(entropy.double(), wanted[1].detach(), rtol=1e-5, atol=1e-5)
    assert not entropy.requires_grad
    (gradient,) = torch.autograd.grad(logprob.sum(), made, retain_graph=False)
    assert gradient.data_ptr() == made.data_ptr()
    alone, _ = function(leaf, target, 0.7, reuse_logits=True)
    (own,) = torch.autograd.grad(alone.sum(), leaf)
    torch.testing.assert_close(gradient, own)
    assert torch.equal(leaf, logits)


def test_torchtitans_ignored_rows():
    logits, target, _, _ = drawn()
    target[1] = -100
    logprob, entropy = applied(PROVIDER)["compute_logprobs"](logits, target, return_entropy=True)
    assert logprob[1] == 0
    torch.testing.assert_close(entropy.double(), truth(logits.double(), target.clamp_min(0))[1], rtol=1e-5, atol=1e-5)


def test_every_diff_is_called():
    assert set(applied(PROVIDER)) == set(calls())
    assert len(DIFFS) == len(calls())
