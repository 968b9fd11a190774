"""Megatron-Core with and without ours: its cross entropies, its head, and a whole model, on real gloo ranks.

    two by two:  tensor-parallel groups [0 1] [2 3], context-parallel groups [0 2] [1 3];  and either alone: [0 1] [2 3]

The tolerance rule with Megatron's own function as the yardstick: at most twice its error to float64.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from close import assert_close_to_truth, assert_gradient_close_to_truth
from hosts import put_first, takes
from ranks import close_ranks
from shared.megatron import megatron
from shared.megatron_groups import TIMEOUT
from torch import Tensor
from truth import float64_leaf, truth

import logitless
from logitless import Head, Kept, LogitlessError, Logits, Rows, Zigzag
from logitless.adapters.megatron import POSTPROCESS, Scoring, output_processor, scoring

put_first("megatron")
THERE = find_spec("megatron") and find_spec("megatron.core")
pytestmark = pytest.mark.skipif(not THERE, reason="megatron-core is not installed")

if THERE:
    with warnings.catch_warnings():
        # What Megatron's imports warn of is Megatron's business.
        warnings.simplefilter("ignore")
        importlib.import_module("megatron.core")

MESHES = [(2, 2), (2, 1), (1, 2)]
"""Tensor- and context-parallel sizes; what is left of the four ranks is data parallel."""


@pytest.fixture(scope="module", autouse=True)
def fresh_workers() -> Iterator[None]:
    """Megatron leaves global state behind, so the workers that have imported it are not reused."""
    yield
    close_ranks()


@pytest.fixture
def alone():
    """One process that is a whole Megatron."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with megatron() as parallel_state:
        yield parallel_state
    dist.destroy_process_group()


# The cross entropies.

S, B, V = 13, 3, 506


class Both(NamedTuple):
    theirs: Tensor
    their_gradient: Tensor
    ours: Tensor
    our_gradient: Tensor
    summary: str


def cross_entropy(name: str, logits: Tensor, target: Tensor, upstream: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    from megatron.core import tensor_parallel
    from megatron.core.models.common.language_module import language_module

    leaf = logits.clone().requires_grad_()
    # Not a leaf: it may be overwritten.
    given = leaf * 1.0
    # Megatron compiles its fused one; the same code uncompiled is the same sum, sooner.
    with torch.compiler.set_stance("force_eager"):
        if name == "fused":
            loss = language_module.fused_vocab_parallel_cross_entropy(given, target, group)
        else:
            plain = tensor_parallel.vocab_parallel_cross_entropy
            loss = plain(given, target, **({"tp_group": group} if takes(plain, "tp_group") else {}))
        loss.backward(upstream)
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def run_cross_entropies(
    rank: int, world: int, batches: list[tuple[Tensor, Tensor, Tensor]], home: str
) -> list[list[Both]]:
    """For every mesh: every function on every batch, whose sequence is cut over the context-parallel ranks."""
    meshes = []
    for tp, cp in MESHES:
        with megatron(tp, cp) as state:
            assert Path(state.__file__).parent == Path(home), "another Megatron than that of the test"
            group, part = state.get_tensor_model_parallel_group(), state.get_context_parallel_rank()
            columns = slice(group.rank() * V // tp, (group.rank() + 1) * V // tp)
            local = [
                (z.chunk(cp)[part][..., columns].contiguous(), *(x.chunk(cp)[part].contiguous() for x in rest))
                for z, *rest in batches
            ]
            theirs = [cross_entropy(name, *batch, group) for name in ("plain", "fused") for batch in local]
            logitless.install("megatron", audit=3)
            ours = [cross_entropy(name, *batch, group) for name in ("plain", "fused") for batch in local]
            report = logitless.status().hosts[0]
            assert report.audit.passed
            meshes.append([Both(*a, *b, str(report)) for a, b in zip(theirs, ours, strict=True)])
    return meshes


def whole(results: list[Both], field: str, tp: int, cp: int) -> Tensor:
    """Of the first data-parallel copy: columns over tensor-parallel ranks, tokens over context-parallel ones."""
    rows = [results[c * tp : (c + 1) * tp] for c in range(cp)]
    if "gradient" not in field:
        return torch.cat([getattr(row[0], field) for row in rows])
    return torch.cat([torch.cat([getattr(r, field) for r in row], -1) for row in rows])


def test_cross_entropies(ranks):
    batches = [
        ((torch.randn(S, B, V) * spread).to(dtype), torch.randint(V, (S, B)), torch.randn(S, B))
        for dtype in (torch.float32, torch.bfloat16)
        for spread in (3.0, 30.0)
    ]
    home = find_spec("megatron.core").submodule_search_locations[0]
    per_rank = ranks(run_cross_entropies, 4, batches, home, timeout=TIMEOUT)
    for mesh, (tp, cp) in enumerate(MESHES):
        for case, (logits, target, upstream) in enumerate([*batches, *batches]):
            results = [meshes[mesh][case] for meshes in per_rank]
            leaf = float64_leaf(logits)
            loss = -truth(leaf.view(S * B, V), range(S * B), target.flatten()).logprob.view(S, B)
            loss.backward(upstream.double())
            ours, theirs = whole(results, "ours", tp, cp), whole(results, "theirs", tp, cp)
            assert ours.dtype == theirs.dtype == torch.float32
            assert_close_to_truth(ours, loss, theirs)
            ours, theirs = whole(results, "our_gradient", tp, cp), whole(results, "their_gradient", tp, cp)
            assert ours.dtype == theirs.dtype == logits.dtype
            assert_gradient_close_to_truth(ours, leaf.grad, theirs)
            fused = case >= len(batches)
            if fused and logits.dtype == torch.float32:
                # Megatron rounds this gradient to bfloat16; ours is not.
                assert_gradient_close_to_truth(ours, leaf.grad, leaf.grad.float())
        assert "vocab_parallel_cross_entropy: 4 calls" in per_rank[0][mesh][0].summary
        assert "fused_vocab_parallel_cross_entropy: 4 calls" in per_rank[0][mesh][0].summary


def test_install_and_uninstall(alone):
    from megatron.core import tensor_parallel
    from megatron.core.fusions import fused_cross_entropy
    from megatron.core.models.common.language_module import language_module

    before = tensor_parallel.vocab_parallel_cross_entropy, fused_cross_entropy.fused_vocab_parallel_cross_entropy
    logitless.install("megatron")
    assert tensor_parallel.vocab_parallel_cross_entropy is not before[0]
    assert tensor_parallel.cross_entropy.vocab_parallel_cross_entropy is tensor_parallel.vocab_parallel_cross_entropy
    assert language_module.fused_vocab_parallel_cross_entropy is not before[1]
    logitless.uninstall("megatron")
    assert tensor_parallel.vocab_parallel_cross_entropy is before[0]
    assert language_module.fused_vocab_parallel_cross_entropy is before[1]


def test_label_smoothing_is_left_to_megatron(alone):
    from megatron.core import tensor_parallel

    logits, target = torch.randn(S, B, V), torch.randint(V, (S, B))
    expected = tensor_parallel.vocab_parallel_cross_entropy(logits.clone(), target, 0.1)
    logitless.install("megatron")
    assert torch.equal(
        tensor_parallel.vocab_parallel_cross_entropy(logits.clone(), target, label_smoothing=0.1), expected
    )
    report = logitless.status().hosts[0].replaced[0]
    assert (report.calls, report.passed_on) == (1, 1)


@pytest.mark.parametrize(
    ("rule", "dtype", "overwritten"),
    [
        ("float32", torch.float32, True),
        ("float32", torch.bfloat16, False),
        ("always", torch.bfloat16, True),
        ("never", torch.float32, False),
    ],
)
def test_what_is_overwritten(alone, rule, dtype, overwritten):
    """By the gradient, in backward; never a leaf or a view, which someone else may read."""
    from megatron.core import tensor_parallel

    logitless.install("megatron", overwrite_logits=rule)
    leaf, target = torch.randn(S, B, V).to(dtype).requires_grad_(), torch.randint(V, (S, B))
    given = leaf * 2
    before = given.detach().clone()
    loss = tensor_parallel.vocab_parallel_cross_entropy(given, target)
    assert torch.equal(given, before)
    loss.sum().backward()
    assert torch.equal(given.detach(), leaf.grad / 2) == overwritten
    assert torch.equal(given.detach(), before) != overwritten
    for other in (leaf, (leaf * 2)[1:]):
        before = other.detach().clone()
        tensor_parallel.vocab_parallel_cross_entropy(other, target[: len(other)]).sum().backward()
        assert torch.equal(other.detach(), before)


def test_empty_ignored_and_without_gradients(alone):
    from megatron.core import tensor_parallel

    logitless.install("megatron")
    logits, target = torch.randn(S, B, V), torch.randint(V, (S, B))
    target[2, 1] = -100
    loss = tensor_parallel.vocab_parallel_cross_entropy(logits, target)
    assert not loss.requires_grad
    assert loss[2, 1] == 0
    assert (loss > 0).sum() == S * B - 1
    empty = tensor_parallel.vocab_parallel_cross_entropy(torch.zeros(0, B, V, requires_grad=True), target[:0])
    assert empty.shape == (0, B)
    assert empty.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda z, t: (z, t[:2]), r"target must be \[13, 3\] but is \[2, 3\]"),
        (lambda z, t: (z, t.float()), "target must be integers"),
        (lambda z, t: (z, t + V), f"outside the vocabulary of {V}"),
        (lambda z, t: (z.long(), t), "logits must be a tensor of"),
    ],
)
def test_errors_name_the_host_function(alone, change, message):
    from megatron.core import tensor_parallel

    logitless.install("megatron")
    logits, target = change(torch.randn(S, B, V), torch.zeros(S, B, dtype=torch.int64))
    with pytest.raises(LogitlessError, match=rf"^megatron\.core\.tensor_parallel\.cross_entropy\.\w+: .*{message}"):
        tensor_parallel.vocab_parallel_cross_entropy(logits, target)
    with pytest.raises(LogitlessError, match="overwrite_logits must be one of float32, always, never but is 'no'"):
        logitless.uninstall("megatron") or logitless.install("megatron", overwrite_logits="no")


# The output processor on Megatron's own head.

LINES, D = [12, 7, 5], 9
RESPONSES = [6, 6, 1]


class Asked(NamedTuple):
    mesh: tuple[int, int]
    sequence_parallel: bool = False
    tied: bool = False
    main_grad: bool = False
    labels: bool = False


class Scored(NamedTuple):
    logprob: Tensor
    entropy: Tensor
    d_hidden: Tensor
    d_weight: Tensor


ASKED = [
    Asked((2, 2)),
    Asked((2, 2), sequence_parallel=True, main_grad=True),
    Asked((2, 1), sequence_parallel=True, labels=True),
    Asked((2, 1), tied=True, labels=True, main_grad=True),
    Asked((1, 2), main_grad=True),
]


def lines(vocab: int) -> list[list[int]]:
    return [[(7 * s + 3 * t) % vocab for t in range(n)] for s, n in enumerate(LINES)]


def labels_of(vocab: int) -> Tensor:
    """``[b, s]`` next tokens; -100 where there is none."""
    return torch.tensor([ids[1:] + [-100] * (max(LINES) + 1 - len(ids)) for ids in lines(vocab)])


def head_layer(state: Any, weight: Tensor, asked: Asked) -> Any:
    from megatron.core import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear

    tp, cp = asked.mesh
    config = ModelParallelConfig(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        sequence_parallel=asked.sequence_parallel,
        use_cpu_initialization=True,
        params_dtype=weight.dtype,
    )
    group = state.get_tensor_model_parallel_group()
    layer = ColumnParallelLinear(
        weight.shape[1],
        len(weight),
        config=config,
        init_method=torch.nn.init.zeros_,
        bias=False,
        gather_output=False,
        tp_group=group,
        skip_weight_param_allocation=asked.tied,
    )
    return layer


def score_with_their_head(rank: int, world: int, hidden: Tensor, weight: Tensor) -> list[Scored]:
    scored = []
    for asked in ASKED:
        tp, cp = asked.mesh
        with megatron(tp, cp) as state:
            layer = head_layer(state, weight, asked)
            tp_rank, cp_rank = state.get_tensor_model_parallel_rank(), state.get_context_parallel_rank()
            part = weight.chunk(tp)[tp_rank]
            parameter = torch.nn.Parameter(part.clone()) if asked.tied else layer.weight
            with torch.no_grad():
                parameter.copy_(part)
            if asked.main_grad:
                layer.gradient_accumulation_fusion = True
                # As Megatron's distributed data parallel prepares it, with something there already.
                parameter.main_grad = torch.full(part.shape, 0.5, dtype=torch.float32)
                parameter.grad_added_to_main_grad = False
            cut = Zigzag(cp_rank, cp) if cp > 1 else None
            rows = Rows.padded(lines(len(weight)), RESPONSES, max_length=len(hidden), cp=cut)
            local = hidden if cp == 1 else torch.cat([hidden.chunk(2 * cp)[i] for i in (cp_rank, 2 * cp - 1 - cp_rank)])
            leaf = (local.chunk(tp)[tp_rank] if asked.sequence_parallel else local).clone().requires_grad_()
            out = output_processor(
                hidden_states=leaf,
                output_layer=layer,
                output_weight=parameter if asked.tied else None,
                labels=labels_of(len(weight)) if asked.labels else None,
                loss_mask=None,
                packed_seq_params=None,
                runtime_gather_output=None,
                context=Scoring(None if asked.labels else rows, entropy="grad", head=Head(0.7), memory="1KiB"),
                scale_logits=lambda x: 1.5 * x,
                config=layer.config,
            )
            (out.logprob**2 + out.entropy * torch.sin(out.logprob)).sum().backward()
            gradient = parameter.grad
            if asked.main_grad:
                assert parameter.grad_added_to_main_grad
                assert gradient is not None
                assert not gradient.any()
                gradient = parameter.main_grad - 0.5
            scored.append(Scored(out.logprob.detach(), out.entropy.detach(), leaf.grad, gradient))
    return scored


def test_output_processor(ranks):
    """Values, and the gradients of hidden states and weight, of every rank against one float64 process."""
    hidden, weight = torch.randn(12, 3, D), torch.randn(10, D)
    per_rank = ranks(score_with_their_head, 4, hidden, weight, timeout=TIMEOUT)

    def expected(asked: Asked, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        h, w = (x.detach().to(dtype, copy=True).requires_grad_() for x in (hidden, weight))
        logits = (h @ w.T).transpose(0, 1).reshape(36, 10)
        flat = labels_of(10).flatten()
        index = torch.arange(36) if asked.labels else Rows.padded(lines(10), RESPONSES, max_length=12).index
        z = 1.5 * logits[index] / 0.7
        log_p = torch.log_softmax(z, -1)
        ignored = flat[index] == -100
        logprob = log_p.gather(1, flat[index].clamp_min(0)[:, None])[:, 0].masked_fill(ignored, 0.0)
        entropy = -(log_p.exp() * log_p).sum(1).masked_fill(ignored, 0.0)
        (logprob**2 + entropy * torch.sin(logprob)).sum().backward()
        return logprob, entropy, h.grad, w.grad

    for case, asked in enumerate(ASKED):
        exact, plain = (expected(asked, dtype) for dtype in (torch.float64, torch.float32))
        tp, cp = asked.mesh
        results = [scored[case] for scored in per_rank]
        for rank, scored in enumerate(results):
            tp_rank, cp_rank = rank % tp, rank // tp % cp
            cut = Zigzag(cp_rank, cp) if cp > 1 else None
            here = Rows.padded(lines(10), RESPONSES, max_length=12, cp=cut)
            for name, i in (("logprob", 0), ("entropy", 1)):
                mine, right, usual = getattr(scored, name).flatten(), exact[i], plain[i]
                if not asked.labels:
                    right, usual = right[here.response], usual[here.response]
                assert_close_to_truth(mine, right, usual, f"{name} {asked}")
            chunks = [x.chunk(2 * cp) for x in (exact[2], plain[2])]
            d_hidden = [torch.cat([c[cp_rank], c[2 * cp - 1 - cp_rank]]) if cp > 1 else torch.cat(c) for c in chunks]
            if asked.sequence_parallel:
                d_hidden = [x.chunk(tp)[tp_rank] for x in d_hidden]
            assert_gradient_close_to_truth(scored.d_hidden, *d_hidden, f"d_hidden {asked}")
        # Parts of the batch are on the context-parallel ranks: their weight gradients add up.
        for tp_rank in range(tp):
            total = sum(results[c * tp + tp_rank].d_weight for c in range(cp))
            d_weight = [x.chunk(tp)[tp_rank] for x in (exact[3], plain[3])]
            assert_gradient_close_to_truth(total, *d_weight, f"d_weight {asked}")


MXFP8 = SimpleNamespace(fp8_output_proj=True)
"""The config of a model whose head is Transformer Engine's, in MXFP8."""


def fake_layer(**more: Any) -> Any:
    settings = {"weight": torch.randn(10, D), "bias": None, "sequence_parallel": False, "tp_group": dist.group.WORLD}
    return SimpleNamespace(**(settings | more))


def score_without_reduction(rank: int, world: int, hidden: Tensor, weight: Tensor, off: bool | None) -> Tensor:
    """d_hidden of a rank whose layer leaves the sum over ranks to its caller, does not, or knows of no choice."""
    choice = {} if off is None else {"disable_grad_reduce": off}
    layer, leaf = fake_layer(weight=weight.chunk(world)[rank], **choice), hidden.clone().requires_grad_()
    labels = torch.arange(len(hidden))[None] % len(weight)
    output_processor(hidden_states=leaf, output_layer=layer, labels=labels).logprob.sum().backward()
    return leaf.grad


@pytest.mark.parametrize("off", [True, False, None])
def test_output_processor_leaves_the_reduction_to_whoever_disabled_it(ranks, off):
    """Summed twice, the gradient of the hidden states would be as many times too large as there are ranks."""
    hidden, weight = torch.randn(7, 1, D), torch.randn(10, D)
    parts = ranks(score_without_reduction, 2, hidden, weight, off, timeout=TIMEOUT)
    exact = hidden.double().requires_grad_()
    truth((exact @ weight.double().T)[:, 0], range(7), torch.arange(7)).logprob.sum().backward()
    assert torch.equal(*parts) is not bool(off)
    total = sum(parts) if off else parts[0]
    torch.testing.assert_close(total.double(), exact.grad, atol=1e-5, rtol=1e-5)


def test_output_processor_with_bias_and_kept_ids(alone):
    layer = fake_layer(bias=torch.randn(10))
    hidden = torch.randn(5, 1, D)
    rows = Rows.packed([[1, 2, 3, 4, 5]], [3])
    kept = Kept(torch.tensor([4, 5, 1]), torch.tensor([1, 1, 1]))
    out = output_processor(hidden_states=hidden, output_layer=layer, context=Scoring(rows, kept=kept))
    logits = (hidden[:, 0] @ layer.weight.T + layer.bias).double()
    exact = truth(logits, rows.index, rows.target, kept=[[4], [5], [1]])
    torch.testing.assert_close(out.logprob.double(), exact.logprob, atol=1e-5, rtol=0)
    assert out.entropy is None


def test_output_processor_scales_as_the_model_and_the_head_say(alone):
    """A model's own scale, and one that the caller knows of: their product."""
    layer, hidden = fake_layer(), torch.randn(5, 1, D)
    rows = Rows.packed([[1, 2, 3, 4, 5]], [3])
    context = Scoring(rows, head=Head(scale=0.5))
    out = output_processor(
        hidden_states=hidden, output_layer=layer, context=context, scale_logits=lambda x: x * 3.0
    ).logprob
    exact = truth((hidden[:, 0] @ layer.weight.T).double(), rows.index, rows.target, scale=1.5)
    torch.testing.assert_close(out.double(), exact.logprob, atol=1e-5, rtol=0)


def test_output_processor_rounds_as_megatron_does_if_asked(alone):
    """A half-precision head rounds its logits; ours do not unless told."""
    layer = fake_layer(weight=torch.randn(10, 64).bfloat16())
    hidden, labels = torch.randn(40, 1, 64).bfloat16(), torch.randint(10, (1, 40))
    shared = {"hidden_states": hidden, "output_layer": layer, "labels": labels}
    plain = output_processor(**shared).logprob
    rounded = output_processor(**shared, context=Scoring(match="bfloat16")).logprob
    exact = truth(hidden[:, 0].double() @ layer.weight.double().T, range(40), labels[0]).logprob
    theirs = truth((hidden[:, 0] @ layer.weight.T).float(), range(40), labels[0]).logprob
    assert (plain[0] - exact).abs().max() < 1e-5
    assert (rounded[0] - theirs).abs().max() < 1e-5
    assert (theirs - exact).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"context": "rows"}, "context must be a Scoring or None but is str"),
        ({"hidden_states": torch.zeros(5, D)}, r"hidden_states must be \[s, b, h\] but is \[5, 9\]"),
        ({}, "nothing to score"),
        ({"labels": torch.zeros(5, 2, dtype=torch.int64)}, r"labels must be \[2, 5\] but is \[5, 2\]"),
        ({"context": Scoring(Rows.packed([[1, 2, 3]], [2]))}, r"rows were made for 3 tokens \(\[3\]\) but .* 2 x 5"),
        (
            {"labels": torch.zeros(2, 5, dtype=torch.int64), "scale_logits": lambda x: x + 1},
            "scale_logits must multiply but turns 0, 1, 2 into 1.0, 2.0, 3.0",
        ),
        (
            {"labels": torch.zeros(2, 5, dtype=torch.int64), "output_layer": SimpleNamespace(config=MXFP8)},
            "config has fp8_output_proj=True, so its head multiplies in MXFP8",
        ),
    ],
)
def test_errors_of_the_output_processor(alone, given, message):
    with pytest.raises(LogitlessError, match=f"^output_processor: (.* )?{message}"):
        output_processor(**({"hidden_states": torch.zeros(5, 2, D), "output_layer": fake_layer()} | given))


# A whole model: by Megatron's own hook, where it has one.


def run_model(rank: int, world: int, tied: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs, and the gradients of all parameters, by the model's own logits and by ours."""
    with megatron(2) as state, pytest.MonkeyPatch.context() as patch:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
        from megatron.core.transformer import TransformerConfig

        # A whole model has much to say about what this machine lacks.
        warnings.simplefilter("ignore")
        # What Megatron wants of CUDA here is where to allocate, and a random state.
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        patch.setattr(CudaRNGStatesTracker, "fork", lambda *_: warnings.catch_warnings())
        sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32}
        off = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "bias_dropout_fusion": False}
        parallel = {"tensor_model_parallel_size": 2, "use_cpu_initialization": True}
        config = TransformerConfig(**sizes, **off, **parallel, init_method_std=0.5)
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=38,
            max_sequence_length=16,
            share_embeddings_and_output_weights=tied,
        )
        tokens = torch.randint(38, (3, 12))
        rows = Rows.padded([line.tolist() for line in tokens], [5, 11, 1])
        inputs = {
            "input_ids": tokens,
            "position_ids": torch.arange(12).expand(3, -1),
            "attention_mask": torch.ones(1, 1, 12, 12).triu(1).bool(),
        }

        def step(out: Any) -> list[Tensor]:
            (out.logprob**2 + out.entropy).sum().backward()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
            return [out.logprob.detach(), out.entropy.detach(), *gradients]

        shard = logitless.VocabShard.even(38, state.get_tensor_model_parallel_group())
        theirs = step(logitless.logprobs(Logits.given(model(**inputs), shard=shard), rows, entropy="grad"))
        asked = Scoring(rows, entropy="grad")
        if takes(GPTModel.forward, "output_processor"):
            ours = step(model(**inputs, output_processor=output_processor, output_processor_context=asked))
        else:
            with scoring(model, asked):
                ours = step(model(**inputs))
                with pytest.raises(LogitlessError, match="being scored already"), scoring(model, asked):
                    pass
        assert model(**inputs).shape == (3, 12, 19)
        return theirs, ours


@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_model(ranks, tied):
    """Without sequence parallelism: Megatron's norm for CPU refuses it."""
    for theirs, ours in ranks(run_model, 2, tied, timeout=TIMEOUT):
        assert len(theirs) == len(ours) > 5
        for a, b in zip(theirs, ours, strict=True):
            torch.testing.assert_close(b, a, atol=2e-5, rtol=2e-5)


def test_models_that_cannot_be_scored(alone):
    rows = Rows.packed([[1, 2]], [1])
    with (
        pytest.raises(LogitlessError, match="model must be a GPTModel, wrapped or not, but holds a Linear"),
        scoring(torch.nn.Linear(2, 2), Scoring(rows)),
    ):
        pass

    class Newer:
        def _postprocess(self) -> None: ...
        def forward(self, output_processor=None) -> None: ...

    with pytest.raises(LogitlessError, match="has the hook itself"), scoring(Newer(), Scoring(rows)):
        pass

    class Other:
        def _postprocess(self, x) -> None: ...
        def forward(self) -> None: ...

    with pytest.raises(LogitlessError, match=r"has the signature \(self, x\)"), scoring(Other(), Scoring(rows)):
        pass

    known = {"_postprocess": eval(f"lambda {POSTPROCESS[1:-1]}: None"), "forward": lambda self: None, "config": MXFP8}
    model = type("Model", (), known)()
    with pytest.raises(LogitlessError, match=r"^scoring: .*has fp8_output_proj=True"), scoring(model, Scoring(rows)):
        pass
