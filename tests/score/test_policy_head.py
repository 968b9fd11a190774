"""``PolicyHead`` and DTensor weights: hooks, tied embeddings, FSDP2 and tensor parallelism keep their meaning."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from calls import loss_from_hidden
from torch import nn

import logitless as ll

V, D, T = 22, 6, 9


class Tied(nn.Module):
    """The smallest language model with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        linear = nn.Linear(D, V, bias=False)
        linear.weight = self.embedding.weight
        self.head = ll.PolicyHead(linear, entropy="grad")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out = self.head(torch.tanh(self.embedding(tokens[:-1])), tokens[1:])
        return out.logprob.sum() + 0.1 * out.entropy.sum()


def plain_loss(weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    log_p = torch.log_softmax(torch.tanh(weight[tokens[:-1]]) @ weight.T, -1)
    return log_p.gather(1, tokens[1:, None]).sum() - 0.1 * (log_p.exp() * log_p).sum()


def test_tied_embeddings_and_hooks():
    model, tokens, seen = Tied(), torch.randint(V, (T,)), []
    model.head.register_forward_hook(lambda module, args, out: seen.append(out))
    model(tokens).backward()
    weight = model.embedding.weight.detach().clone().requires_grad_()
    plain_loss(weight, tokens).backward()
    assert torch.allclose(model.embedding.weight.grad, weight.grad, atol=1e-5)
    assert len(seen) == 1
    assert isinstance(seen[0], ll.TokenStats)


def test_without_rows_it_is_the_linear_layer():
    head = ll.PolicyHead(nn.Linear(D, V))
    hidden = torch.randn(3, D)
    assert torch.equal(head(hidden), head.linear(hidden))
    assert sorted(head.state_dict()) == ["linear.bias", "linear.weight"]


def test_options_of_the_call_win():
    head = ll.PolicyHead(nn.Linear(D, V), entropy="value", head=ll.Head(temperature=0.5))
    hidden, target = torch.randn(3, D), torch.tensor([1, 2, 3])
    assert head(hidden, target, entropy=None).entropy is None
    direct = ll.logprobs(head.linear(hidden), target, head=ll.Head(temperature=0.5))
    assert torch.allclose(head(hidden, target).logprob, direct.logprob, atol=1e-5)


def loss_of(rows: ll.Rows, **more) -> ll.Loss:
    drawn = torch.Generator().manual_seed(len(rows))
    advantage, old = torch.randn(2, len(rows), generator=drawn)
    return ll.Loss(ll.Objective(entropy_coef=0.1), advantage=advantage, old_logprob=old - 3, denominator=20, **more)


def test_a_loss_in_its_forward_is_the_call():
    """Same bits as the call with the layer's tensors; options of the head and of the loss both count."""
    head = ll.PolicyHead(nn.Linear(D, V), entropy="value", head=ll.Head(softcap=5.0), memory="64KiB")
    hidden, rows = torch.randn(7, D), ll.Rows.packed([[1, 2, 3], [4, 5, 6, 7]], [2, 3])
    temperature = torch.linspace(0.5, 1.5, 5)
    loss = loss_of(rows, temperature=temperature)
    found = head(hidden, rows, loss=loss)
    wanted = loss_from_hidden(
        hidden,
        head.linear.weight,
        rows,
        loss.objective,
        bias=head.linear.bias,
        head=ll.Head(softcap=5.0, temperature=temperature),
        memory="64KiB",
        return_stats=True,
        **loss.arguments,
    )
    assert torch.equal(found.loss, wanted[0])
    assert found.metrics.compute() == wanted[1].compute()
    assert torch.equal(found.stats.logprob, wanted[2].logprob)
    parameters = list(head.parameters())
    for mine, its in zip(*(torch.autograd.grad(x[0], parameters) for x in (found, wanted)), strict=True):
        assert torch.equal(mine, its)


def test_what_a_loss_refuses():
    head, hidden, rows = ll.PolicyHead(nn.Linear(D, V)), torch.zeros(3, D), ll.Rows.packed([[1, 2, 3]], [2])
    with pytest.raises(ll.LogitlessError, match=r"PolicyHead: loss was given without rows. Pass the rows to score."):
        head(hidden, loss=loss_of(rows))
    with pytest.raises(ll.LogitlessError, match=r"PolicyHead: entropy was given without rows"):
        head(hidden, entropy="value")
    with pytest.raises(ll.LogitlessError, match=r"PolicyHead: loss must be a logitless.Loss.* but is Objective. Pass"):
        head(hidden, rows, loss=ll.Objective())
    with pytest.raises(ll.LogitlessError, match=r"Loss: objective must be an Objective or a Preference but is str"):
        ll.Loss("grpo")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ll.LogitlessError, match=r"Objective: policy='ppo_clip' needs the field old_logprob"):
        head(hidden, rows, loss=ll.Loss(ll.Objective(), advantage=torch.ones(2)))


def test_an_argument_that_comes_from_two_places():
    """One of them was left out."""
    rows, hidden = ll.Rows.packed([[0, 1, 2]], [2]), torch.zeros(3, D)
    head, counted = ll.PolicyHead(nn.Linear(D, V)), ll.PolicyHead(nn.Linear(D, V), denominator=12)
    with pytest.raises(ll.LogitlessError, match="PolicyHead: bias was given to a call"):
        head(hidden, rows, bias=torch.ones(V))
    with pytest.raises(ll.LogitlessError, match="Loss: denominator was given to the Loss and to its head"):
        counted(hidden, rows, loss=loss_of(rows))
    with pytest.raises(ll.LogitlessError, match="Loss: return_stats=False"):
        head(hidden, rows, loss=loss_of(rows), return_stats=False)
    assert head(hidden, rows, loss=loss_of(rows), return_stats=True).stats.logprob.shape == (2,)


def test_it_must_be_given_a_layer():
    with pytest.raises(ll.LogitlessError, match="PolicyHead: linear must be a linear layer"):
        ll.PolicyHead(torch.zeros(3))  # pyright: ignore[reportArgumentType]


def fsdp(rank: int, world: int) -> tuple[float, torch.Tensor, str, float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    linear = nn.Linear(D, V)
    head = ll.PolicyHead(linear, entropy="grad")
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(head, mesh=mesh)
    torch.manual_seed(100 + rank)
    hidden, target = torch.randn(T, D), torch.randint(V, (T,))
    out = head(hidden, target)
    (out.logprob.sum() + 0.1 * out.entropy.sum()).backward()
    gradient = head.linear.weight.grad.full_tensor()
    try:
        ll.logprobs(ll.Logits(hidden, head.linear.weight), target)
        text = "no error"
    except ll.LogitlessError as error:
        text = str(error)
    plain = fully_shard(nn.Linear(1, world, bias=False), mesh=mesh)
    plain(torch.ones(1, 1)).sum().backward()
    return float(out.logprob.detach().sum()), gradient, text, float(plain.weight.grad.full_tensor()[0]) / world


def test_fsdp2(ranks):
    """Each rank has its own tokens; the weight's gradient is the mean over ranks, as FSDP defines it.

    FSDP of torch 2.8 adds up over gloo, of any layer.
    """
    results = ranks(fsdp, 2)
    share = 0.5 if torch.__version__ >= (2, 9) else 1.0
    torch.manual_seed(0)
    linear = nn.Linear(D, V)
    total = 0.0
    for rank, (logprob, *_) in enumerate(results):
        torch.manual_seed(100 + rank)
        hidden, target = torch.randn(T, D), torch.randint(V, (T,))
        out = ll.logprobs(linear(hidden), target, entropy="grad")
        assert float(out.logprob.detach().sum()) == pytest.approx(logprob, abs=1e-4)
        total = total + out.logprob.sum() + 0.1 * out.entropy.sum()
    total.backward()
    for _, gradient, text, of_any_layer in results:
        assert of_any_layer == share
        assert torch.allclose(gradient, linear.weight.grad * share, atol=1e-5)
        assert "for FSDP use a PolicyHead" in text


def mixed_precision(rank: int, world: int) -> tuple[float, float, float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    head = fully_shard(ll.PolicyHead(nn.Linear(D, V)), mesh=init_device_mesh("cpu", (world,)), mp_policy=policy)
    hidden, rows = torch.randn(T, D), ll.Rows.every(torch.randint(V, (T,)))
    temperature = torch.linspace(0.7, 1.3, T)
    out = head(hidden, rows, loss=loss_of(rows, temperature=temperature))
    old = loss_of(rows).arguments["old_logprob"]
    exact = (out.stats.logprob - old).exp().double().mean()
    rounded = (out.stats.logprob - old.bfloat16().float()).exp().double().mean()
    return out.metrics.compute()["ratio"], float(exact), float(rounded)


def test_mixed_precision_does_not_round_the_inputs_of_a_loss(ranks):
    """FSDP casts every tensor that it finds among the arguments; the old log-probs must not be among them."""
    for found, exact, rounded in ranks(mixed_precision, 2):
        assert abs(rounded - exact) > 1e-4
        assert found == pytest.approx(exact, rel=1e-6)


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Embedding(V, D)
        self.head = ll.PolicyHead(nn.Linear(D, V))

    def forward(self, tokens: torch.Tensor, rows: ll.Rows, loss: ll.Loss) -> tuple:
        return self.head(self.body(tokens), rows, loss=loss)


def ddp_with_an_empty_rank(rank: int, world: int, unused: bool) -> list[torch.Tensor]:
    """Two micro-batches, the first of them without synchronisation; the last rank has no response in either."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    ddp = DistributedDataParallel(Policy(), find_unused_parameters=unused)
    for step, around in enumerate((ddp.no_sync, torch.enable_grad)):
        tokens = (torch.arange(5) + 7 * step) % V
        rows = ll.Rows.packed([tokens], [0 if rank == world - 1 else 3 + step])
        with around():
            (ddp(tokens, rows, loss_of(rows)).loss * world).backward()
    return [x.grad for x in ddp.parameters()]


@pytest.mark.parametrize("unused", [False, True], ids=["plain", "find unused"])
def test_ddp_with_an_empty_rank_and_accumulation(ranks, unused):
    torch.manual_seed(0)
    model = Policy()
    for step in range(2):
        tokens = (torch.arange(5) + 7 * step) % V
        rows = ll.Rows.packed([tokens], [3 + step])
        model(tokens, rows, loss_of(rows)).loss.backward()
    for gradients in ranks(ddp_with_an_empty_rank, 2, unused):
        for mine, whole in zip(gradients, model.parameters(), strict=True):
            assert torch.allclose(mine, whole.grad, rtol=1e-6, atol=1e-7)


def tensor_parallel(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    weight, hidden, target = torch.randn(V, D), torch.randn(T, D).requires_grad_(), torch.randint(V, (T,))
    mesh = init_device_mesh("cpu", (world,))
    sharded = distribute_tensor(weight, mesh, [Shard(0)]).detach().requires_grad_()
    out = ll.logprobs(ll.Logits(hidden, sharded, shard=ll.VocabShard.of(sharded)), target)
    out.logprob.sum().backward()
    assert dist.get_world_size() == world
    return out.logprob.detach(), hidden.grad, sharded.grad.full_tensor()


@pytest.mark.parametrize("world", [2, 3])
def test_tensor_parallel_dtensor(ranks, world: int):
    """22 rows over 3 ranks do not divide: the shards are uneven."""
    torch.manual_seed(0)
    weight, hidden = torch.randn(V, D).requires_grad_(), torch.randn(T, D).requires_grad_()
    target = torch.randint(V, (T,))
    out = ll.logprobs(hidden @ weight.T, target)
    out.logprob.sum().backward()
    for logprob, d_hidden, d_weight in ranks(tensor_parallel, world):
        assert torch.allclose(logprob, out.logprob, atol=1e-5)
        assert torch.allclose(d_hidden, hidden.grad, atol=1e-5)
        assert torch.allclose(d_weight, weight.grad, atol=1e-5)


def shard_with_an_empty_last(rank: int, world: int) -> tuple[int, int, int, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    weight, hidden = torch.randn(5, D), torch.randn(T, D)
    sharded = distribute_tensor(weight, init_device_mesh("cpu", (world,)), [Shard(0)])
    shard = ll.VocabShard.of(sharded)
    out = ll.logprobs(ll.Logits(hidden, sharded, shard=shard), torch.arange(T) % 5)
    return shard.start, shard.stop, shard.vocab_size, out.logprob


def test_a_last_shard_of_nothing(ranks):
    """Five rows over four ranks are 2, 2, 1 and none: torch rounds the size of a shard up."""
    results = ranks(shard_with_an_empty_last, 4)
    assert [bounds for *bounds, _ in results] == [[0, 2, 5], [2, 4, 5], [4, 5, 5], [5, 5, 5]]
    torch.manual_seed(0)
    weight, hidden = torch.randn(5, D), torch.randn(T, D)
    right = ll.logprobs(hidden @ weight.T, torch.arange(T) % 5).logprob
    assert all(torch.allclose(logprob, right, atol=1e-5) for *_, logprob in results)


def test_a_shard_of_what_is_no_dtensor():
    with pytest.raises(ll.LogitlessError, match=r"VocabShard\.of: weight must be a DTensor but is Tensor"):
        ll.VocabShard.of(torch.zeros(3, 2))
