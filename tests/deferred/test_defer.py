"""Models deferred by ``ll.defer``: their own code and the user's, unchanged, against the model without it.

``strict=True`` raises wherever logits are computed.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from close import assert_gradient_close_to_truth
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import logitless as ll
from logitless.call import Asked
from logitless.deferred import model as deferral
from logitless.deferred import undefer
from logitless.operands.logits import MADE
from logitless.score import resolve_score

sys.path.append(str(Path(__file__).parents[1] / "adapters"))
from tiny import qwen3

V = 61
IDS = torch.randint(3, V, (3, 9), generator=torch.Generator().manual_seed(6))
LABELS = IDS.masked_fill(torch.rand(3, 9, generator=torch.Generator().manual_seed(7)) < 0.3, -100)


@pytest.fixture
def _transformers():
    pytest.importorskip("transformers")


needs_transformers = pytest.mark.usefixtures("_transformers")


class Plain(nn.Module):
    """A model of nobody: an embedding, a body and a head with a bias."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.body, self.lm_head = nn.Embedding(V, 8), nn.Linear(8, 8), nn.Linear(8, V)
        self.to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(torch.tanh(self.body(self.embed(ids))))


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def same(make: Callable[[], Any], loss: Callable[[Any], Tensor], **options: Any) -> None:
    """That a deferred model gives the loss and the gradients of the model, in float64, and makes no logits."""
    found = []
    for deferred in (False, True):
        model = make().double()
        if deferred:
            ll.defer(model, **{"strict": True, **options})
        value = loss(model)
        found.append((value.detach().double(), gradients(model, value)))
    (wanted, exact), (ours, mine) = found
    # Losses of Transformers are float32 in any case.
    torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=0)
    assert sorted(exact) == sorted(mine)
    for name, right in exact.items():
        if value.dtype == torch.float64:
            assert_gradient_close_to_truth(mine[name], right, right, name)
        else:
            assert (mine[name] - right).norm() <= 2e-6 * right.norm(), name


def idiom(logits: Any) -> Tensor:
    taken = torch.log_softmax(logits[:, :-1] / 0.7, dim=-1).gather(-1, IDS[:, 1:, None]).squeeze(-1)
    return -taken.mean() + 0.1 * (logits.argmax(-1) == IDS).double().mean()


def small(**more: Any) -> Any:
    return qwen3(V, **more)


LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "labels": lambda model: model(IDS, labels=LABELS).loss,
    "labels, tokens of the whole batch": lambda model: (
        model(IDS, labels=LABELS, num_items_in_batch=torch.tensor(11)).loss
    ),
    "the idiom": lambda model: idiom(model(IDS).logits),
    "logits_to_keep": lambda model: (
        model(IDS, logits_to_keep=4).logits.log_softmax(-1).gather(-1, IDS[:, 5:, None]).sum()
    ),
    "logprobs": lambda model: ll.logprobs(model(IDS).logits, IDS, entropy="grad").logprob.sum(),
    "policy_loss": lambda model: ll.policy_loss(
        model(IDS).logits, IDS, ll.Objective(policy="reinforce"), advantage=torch.ones(27).double()
    )[0],
}


@needs_transformers
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("name", LOSSES)
def test_transformers(name, tied):
    same(lambda: small(tie_word_embeddings=tied), LOSSES[name])


@needs_transformers
@pytest.mark.parametrize("name", ["labels", "the idiom"])
@pytest.mark.parametrize("kind", ["Gemma2", "Cohere", "Granite", "GPT2"])
def test_models_that_scale_and_cap_their_logits(kind, name):
    import transformers

    sizes = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    sizes |= {"intermediate_size": 24, "num_key_value_heads": 1, "initializer_range": 0.5, "pad_token_id": 0}
    more = {
        "Gemma2": {"final_logit_softcapping": 3.0},
        "Cohere": {"logit_scale": 0.25},
        "Granite": {"logits_scaling": 3.0},
        "GPT2": {"n_embd": 16, "n_head": 2, "n_layer": 1, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    }
    tokens = {"eos_token_id": 1, "bos_token_id": 2}
    names = ("vocab_size", "initializer_range")
    sizes = sizes if kind != "GPT2" else {key: sizes[key] for key in names}
    config = getattr(transformers, f"{kind}Config")(**sizes | more[kind] | tokens)
    head = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"

    def make() -> Any:
        torch.manual_seed(2)
        return getattr(transformers, head)(config)

    same(make, LOSSES[name])


@needs_transformers
@pytest.mark.parametrize("name", ["selective_log_softmax", "entropy", "both"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_trls_own_functions(name, dtype):
    utils = pytest.importorskip("trl.trainer.utils")
    reads = {
        "selective_log_softmax": lambda x: utils.selective_log_softmax(x[:, :-1], IDS[:, 1:], temperature=0.7).sum(),
        "entropy": lambda x: utils.entropy_from_logits(x, chunk_size=4).sum(),
        "both": lambda x: sum(y.sum() for y in utils.selective_log_softmax_and_entropy(x[:, :-1], IDS[:, 1:])),
    }
    if dtype == torch.float64:
        return same(small, lambda model: reads[name](model(IDS).logits))
    found = []
    for kind in ("plain", "deferred", "truth"):
        model = small().bfloat16()
        model = model.double() if kind == "truth" else model
        if kind == "deferred":
            ll.defer(model, strict=True)
        found.append(gradients(model, reads[name](model(IDS).logits))["lm_head.weight"])
    plain, ours, truth = found
    assert_gradient_close_to_truth(ours, truth, plain)


@needs_transformers
def test_the_number_of_the_heads_own_dtype_or_of_float32():
    """A bfloat16 head rounds its logits, which moves a log-prob; ``rounded=False`` keeps the sums."""
    model = small().bfloat16().eval()
    own = model(IDS).logits.detach()
    hidden = model.model(IDS).last_hidden_state.detach()
    wide = hidden.double() @ model.lm_head.weight.detach().double().T
    targets = IDS.clone()
    with ll.defer(model, strict=True):
        rounded = ll.logprobs(model(IDS).logits, targets).logprob.detach()
    with ll.defer(model, strict=True, rounded=False):
        exact = ll.logprobs(model(IDS).logits, targets).logprob.detach()
    as_own = own.double().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    truth = wide.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(rounded.double(), as_own, rtol=0, atol=2e-6)
    torch.testing.assert_close(exact.double(), truth, rtol=0, atol=2e-6)
    assert (as_own - truth).abs().max() > 1e-3


@needs_transformers
@pytest.mark.parametrize("few", [deferral.FEW, 5], ids=["few rows", "more rows than are computed as ever"])
def test_generation_gives_the_same_tokens(few, monkeypatch):
    monkeypatch.setattr(deferral, "FEW", few)
    model, options = small().eval(), {"max_new_tokens": 5, "pad_token_id": 0}
    drawn = options | {"do_sample": True, "top_k": 7, "top_p": 0.9, "temperature": 0.8, "repetition_penalty": 1.3}
    found = []
    for deferred in (False, True):
        if deferred:
            ll.defer(model, strict=True)
        torch.manual_seed(9)
        found.append([model.generate(IDS, do_sample=False, **options), model.generate(IDS, **drawn)])
    for wanted, ours in zip(*found, strict=True):
        assert torch.equal(wanted, ours)


# Models of nobody.


READS: dict[str, Callable[[Any], Tensor]] = {
    "the idiom": lambda model: idiom(model(IDS)),
    "cross_entropy": lambda model: F.cross_entropy(model(IDS).transpose(1, 2), LABELS, label_smoothing=0.1),
    "a checkpoint around everything": lambda model: idiom(checkpoint(model, IDS, use_reentrant=False)),
    "a compiled body": lambda model: (
        setattr(model, "body", torch.compile(model.body, backend="eager")),
        idiom(model(IDS)),
    )[1],
    "a compiled model": lambda model: idiom(torch.compile(model, backend="eager")(IDS)),
    "a compiled loss": lambda model: torch.compile(idiom, backend="eager")(model(IDS)),
}


# The compiler looks at .grad of everything that comes in, and hides the warning only where it is no error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", READS)
def test_a_plain_module(name):
    same(Plain, READS[name])


@needs_transformers
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", ["labels", "the idiom"])
def test_a_compiled_model_of_transformers(name):
    """The compiler itself asks deferred logits for their device, where there is no graph that could be broken."""
    torch.compiler.reset()
    same(small, lambda model: LOSSES[name](torch.compile(model, backend="eager")))


class AtTheEnd(nn.Module):
    """A model whose head is checkpointed with the old kind, which runs it without a graph first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain()

    def forward(self, ids: Tensor) -> Any:
        inner = self.inner
        hidden = torch.tanh(inner.body(inner.embed(ids)))
        return checkpoint(inner.lm_head, hidden, use_reentrant=True)


@pytest.mark.parametrize("few", [deferral.FEW, 0])
def test_a_reentrant_checkpoint_around_the_head(few, monkeypatch):
    monkeypatch.setattr(deferral, "FEW", few)
    same(AtTheEnd, lambda model: idiom(model(IDS)), head="inner.lm_head", strict=False)


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen head"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_reading(reentrant, frozen):
    """As verl and its kin take entropies: the checkpoint is given the logits themselves."""

    def entropy(x: Tensor) -> Tensor:
        p = torch.softmax(x, -1)
        return torch.logsumexp(x, -1) - (p * x).sum(-1)

    def make() -> Any:
        model = Plain()
        model.lm_head.requires_grad_(not frozen)
        return model

    def loss(model: Any) -> Tensor:
        logits = model(IDS) / 0.7
        return checkpoint(entropy, logits, use_reentrant=reentrant).mean() + idiom(logits)

    same(make, loss)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_autocast(where):
    """The loss of the model under autocast, read inside of it or outside; gradients no farther from float64."""
    found = []
    for kind in ("plain", "deferred", "truth"):
        model = Plain(torch.float64 if kind == "truth" else torch.float32)
        if kind == "deferred":
            ll.defer(model, strict=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=kind != "truth"):
            logits = model(IDS)
            loss = idiom(logits.float() if kind != "truth" else logits) if where == "inside" else None
        if loss is None:
            loss = idiom(logits.float() if kind != "truth" else logits)
        found.append(gradients(model, loss))
    plain, ours, truth = found
    for name, right in truth.items():
        scale = right.norm()
        assert (ours[name].double() - right).norm() <= 2 * (plain[name].double() - right).norm() + 1e-3 * scale, name


def test_a_frozen_head_and_a_frozen_body():
    for frozen in ("lm_head", "body"):

        def make(frozen: str = frozen) -> Plain:
            model = Plain()
            model.get_submodule(frozen).requires_grad_(False)
            model.embed.requires_grad_(frozen != "body")
            return model

        same(make, READS["the idiom"])


def test_two_forwards_before_backward():
    def loss(model: Any) -> Tensor:
        one, other = model(IDS), model(IDS.flip(0))
        return idiom(one) + 2 * idiom(other) + idiom(torch.cat([one[:1], other[:2]]))

    same(Plain, loss)


def test_a_copy_of_a_deferred_model_is_deferred_by_itself():
    model = Plain()
    ll.defer(model, strict=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.lm_head.weight.mul_(2.0)
        logits = other(IDS)
        assert isinstance(logits, ll.Logits)
        assert logits.weight is other.lm_head.weight
        undefer(other)
        assert not isinstance(other(IDS), ll.Logits)
    assert isinstance(model(IDS), ll.Logits)
    assert list(model.state_dict()) == list(Plain().state_dict())


def test_it_is_reversible():
    model = Plain()
    plain = model(IDS)
    handle = ll.defer(model)
    assert isinstance(model(IDS), ll.Logits)
    assert repr(handle) == "Deferral(Plain, head Linear)"
    handle.undo()
    assert torch.equal(model(IDS), plain)
    assert "forward" not in vars(model.lm_head)
    with ll.defer(model, head=model.lm_head) as same_model:
        assert same_model is model
        assert isinstance(model(IDS), ll.Logits)
    assert not isinstance(model(IDS), ll.Logits)
    with pytest.raises(ll.LogitlessError, match=r"undefer: the head Linear is not deferred"):
        undefer(model)


@pytest.mark.filterwarnings("ignore::logitless.operands.LogitsMade")
def test_what_reads_them_otherwise_is_counted():
    model = Plain()
    ll.defer(model)
    MADE.clear()
    model(IDS).exp().sum().backward()
    ((place, count),) = MADE.items()
    assert count == 1
    assert "test_defer.py" in place


# What is refused.


class TwiceLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_what_is_refused_names_the_way_out():
    model = Plain()
    for arguments, text in (
        ({"head": "lm_haed"}, r"the model has no module 'lm_haed'. Did you mean 'lm_head'\?"),
        ({"stricht": True}, r"there is no option 'stricht'. Did you mean 'strict'\?"),
        ({"head": "embed"}, r"the head must be a torch.nn.Linear but is Embedding.*Keep the model's own logits"),
    ):
        with pytest.raises(ll.LogitlessError, match=text):
            ll.defer(model, **arguments)
    with pytest.raises(ll.LogitlessError, match=r"model must be a torch.nn.Module but is int"):
        ll.defer(3)
    with pytest.raises(ll.LogitlessError, match=r"Linear has neither get_output_embeddings\(\) nor.*Name its head"):
        ll.defer(nn.Linear(2, 3))
    model.lm_head = TwiceLinear(8, V)
    with pytest.raises(ll.LogitlessError, match=r"must be a torch.nn.Linear but is TwiceLinear"):
        ll.defer(model)
    model = Plain()
    ll.defer(model)
    with pytest.raises(ll.LogitlessError, match=r"already deferred. Call undo\(\)"):
        ll.defer(model)
    undefer(model)
    model.lm_head.forward = lambda x: x
    with pytest.raises(ll.LogitlessError, match=r"replaced by someone else. Undo that first"):
        ll.defer(model)


class Parallelised(nn.Linear):
    """As torchtitan's: ``parallelize`` puts a forward around the head's own."""

    def parallelize(self, parallel_dims: Any) -> None:
        fn = self.forward

        def forward_with_redistribution(*args: Any) -> Any:
            assert parallel_dims is not None
            return fn(*args)

        self.forward = forward_with_redistribution


def test_a_wrapper_that_redistributes_nothing():
    model, own = Plain(), Plain()
    model.lm_head = Parallelised(8, V, dtype=torch.float64)
    model.load_state_dict(own.state_dict())
    model.lm_head.parallelize(SimpleNamespace(tp_enabled=False))
    before, wanted = model.lm_head.forward, gradients(own, idiom(own(IDS)))
    with ll.defer(model, strict=True):
        assert isinstance(model(IDS), ll.Logits)
        found = gradients(model, idiom(model(IDS)))
    assert model.lm_head.forward is before
    for name, right in wanted.items():
        assert_gradient_close_to_truth(found[name], right, right, name)
    model.lm_head = Parallelised(8, V)
    model.lm_head.parallelize(SimpleNamespace(tp_enabled=True))
    with pytest.raises(ll.LogitlessError, match=r"wrapped by torchtitan's tensor parallelism.*ChunkedLossWrapper"):
        ll.defer(model)


def test_a_weight_that_is_gone_is_refused():
    """As FSDP1 and ZeRO-3 leave it where the head's module ends."""
    model = Plain()
    ll.defer(model)
    logits = model(IDS)
    model.lm_head.weight.untyped_storage().resize_(0)
    with pytest.raises(ll.LogitlessError, match=r"weight was let go of since its module's forward.*root unit"):
        logits[:, :-1]


@pytest.mark.filterwarnings("ignore:logits were computed")
@pytest.mark.parametrize("trained", [True, False], ids=["frozen since", "thawed since"])
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("reading", ["torch", "ours", "slices", "computed"])
def test_gradients_go_where_they_went_when_the_logits_were_made(reading: str, hooked: bool, trained: bool):
    """Whether the head is trained when they are read does not matter to a plain model: its product is made already."""

    def run(deferred: bool) -> dict[str, Tensor]:
        model = Plain()
        model.lm_head.weight.requires_grad_(trained)
        if deferred:
            ll.defer(model, strict=reading != "computed")
        logits = model(IDS)
        if hooked:
            logits.register_hook(lambda g: None)
        model.lm_head.weight.requires_grad_(not trained)
        if reading == "ours" and deferred:
            loss = -ll.logprobs(logits, IDS).logprob.mean()
        elif reading == "computed":
            loss = logits.relu().pow(2).mean()
        else:
            rows = logits[:, 1:] / 0.7 if reading == "slices" else logits
            ids = IDS[:, 1:] if reading == "slices" else IDS
            loss = F.cross_entropy(rows.flatten(0, 1), ids.flatten())
        model.lm_head.weight.requires_grad_(trained)
        return gradients(model, loss)

    wanted, ours = run(False), run(True)
    assert sorted(wanted) == sorted(ours)
    assert ("lm_head.weight" in ours) == trained
    for name, right in wanted.items():
        torch.testing.assert_close(ours[name], right)


def test_an_optimizer_step_in_between_is_refused():
    model = Plain()
    ll.defer(model)
    logits = model(IDS)
    with torch.no_grad():
        model.lm_head.weight.add_(0.1)
    with pytest.raises(ll.LogitlessError, match=r"weight was changed in place after the logits were made"):
        idiom(logits)


def test_a_half_precision_head_without_a_graph_computes_few_rows_as_ever(monkeypatch):
    model = Plain(torch.float32)
    ll.defer(model, strict=True)
    with torch.no_grad():
        assert type(model(IDS)) is Tensor
        monkeypatch.setattr(deferral, "FEW", 9)
        logits = model(IDS)
        assert isinstance(logits, ll.Logits)
        last = logits[:, -1]
        assert type(last) is Tensor
        last[:, 0] = -torch.inf
        assert isinstance(logits[:, :-1], ll.Logits)


def test_how_many_rows_are_few():
    model = Plain(torch.float32)
    ll.defer(model, strict=True)
    with torch.no_grad():
        few, many = (model(torch.zeros(2, n, dtype=torch.int64)) for n in (deferral.FEW // 2, deferral.FEW // 2 + 1))
    assert type(few) is Tensor
    assert isinstance(many, ll.Logits)


def test_the_memory_of_whatever_reads_the_logits():
    model, ids = Plain(), IDS.flatten()
    for given, wanted in ((None, 256 << 20), ("3KiB", 3 << 10), (5000, 5000)):
        with ll.defer(model, memory=given):
            logits = model(ids)[1:].float() / 0.7
            assert resolve_score(logits, ids[1:], Asked())[0].memory == wanted
            assert resolve_score(logits, ids[1:], Asked(memory="2KiB"))[0].memory == 2 << 10
    with pytest.raises(ll.LogitlessError, match=r"memory: wanted .* but got 'lots'"):
        ll.defer(model, memory="lots")
