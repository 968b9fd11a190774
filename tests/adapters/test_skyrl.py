"""SkyRL with and without ours: padded and packed, from logits and from hidden states, over TP, CP and both.

A batch is made here; every rank cuts its own tokens and columns out of it, runs SkyRL's own functions and ours on them,
and sends both back. The truth is one float64 pass over the whole batch, with SkyRL's conventions spelled out:

    values      zero outside the attention mask and for ids outside the vocabulary, whose gradient is -p g
    gradients   over context-parallel ranks the padded form adds up, the packed form keeps its own
"""

from __future__ import annotations

import inspect
import sys
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from hosts import checkout, load
from parity import assert_parity, run
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import logitless
from benchmarks.bench.adapters import ENTRIES, SMOKE, measure
from logitless import LogitlessError
from logitless.adapters.skyrl_rows import make_with_actions

MODEL_UTILS = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
TORCH_UTILS = "skyrl.backends.skyrl_train.utils.torch_utils"
WRAPPER = "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper"
V, D, TEMPERATURE, SCALE = 62, 8, 0.7, 1.3
MASK = torch.tensor([[0] * 4 + [1] * 9, [1] * 13, [1] * 5 + [0] * 8]).bool()
"""Three sequences: padded on the left, full, padded on the right."""


@dataclass(frozen=True)
class Layout:
    """Sequences of ``lengths`` padded to ``spans``; the result of token o of sequence i goes to ``place[i][o]``."""

    lengths: list[int]
    spans: list[int]
    place: list[list[tuple[int, int]]]
    shape: tuple[int, int]

    @property
    def bounds(self) -> Tensor:
        return torch.tensor([0, *self.spans]).cumsum(0).int()


def padded_layout() -> Layout:
    batch, length = MASK.shape
    place = [[(row, column) for column in range(length - 1)] for row in range(batch)]
    return Layout([length] * batch, [16] * batch, place, (batch, length - 1))


def masked_layout() -> Layout:
    columns = [row.nonzero().flatten().tolist() for row in MASK]
    place = [[(row, column) for column in where[:-1]] for row, where in enumerate(columns)]
    return Layout([9, 13, 5], [16, 16, 8], place, (3, 12))


def rows_of_sub_sequences() -> Layout:
    """Two sequences packed in the first row by the controller, one in the second."""
    place = [[(0, o) for o in range(8)], [(0, 16 + o) for o in range(4)], [(1, o) for o in range(12)]]
    return Layout([9, 5, 13], [16, 8, 16], place, (2, 23))


def bare_layout() -> Layout:
    """Neither mask nor sub-sequences: padding counts as tokens, as far as the output is wide."""
    place = [[(i, o) for o in range(min(span, 13) - 1)] for i, span in enumerate([16, 16, 8])]
    return Layout([13, 13, 8], [16, 16, 8], place, (3, 12))


LAYOUTS = {
    "padded": padded_layout(),
    "masked": masked_layout(),
    "sub": rows_of_sub_sequences(),
    "bare": bare_layout(),
}


@dataclass(frozen=True)
class Batch:
    """Everything the ranks cut their part from; upstream is one gradient per context-parallel rank."""

    hidden: Tensor
    weight: Tensor
    tokens: dict[str, Tensor]
    upstream: dict[str, Tensor]
    loss_mask: Tensor


def make_batch() -> Batch:
    torch.manual_seed(23)
    tokens, upstream = {}, {}
    for name, layout in LAYOUTS.items():
        ids = torch.randint(V, (sum(layout.spans),))
        # Outside the vocabulary of all ranks: on either side, and the id that others leave out.
        ids[[3, 7, 20]] = torch.tensor([V, -100, V + 9])
        tokens[name] = ids
        upstream[name] = torch.randn(2, *layout.shape, dtype=torch.float64)
    loss_mask = (torch.rand(3, 6) < 0.7).float()
    return Batch(torch.randn(48, D) * 1.5, torch.randn(V, D), tokens, upstream, loss_mask)


# What runs in the ranks.


def zigzag(x: Tensor, spans: list[int], rank: int, size: int) -> Tensor:
    """A rank's tokens of a pack, drawn out by hand."""
    if size == 1:
        return x
    parts = []
    for sequence in x.split(spans):
        chunks = sequence.chunk(2 * size)
        parts += [chunks[rank], chunks[2 * size - 1 - rank]]
    return torch.cat(parts)


@contextmanager
def on_cpu():
    """SkyRL's gather of padded results wants pinned memory and a GPU for one small index; its sums are eager."""
    tensor, cuda = torch.tensor, torch.Tensor.cuda
    torch.tensor = lambda data, pin_memory=False, **more: tensor(data, **more)
    torch.Tensor.cuda = lambda self, **_: self
    try:
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.tensor, torch.Tensor.cuda = tensor, cuda


def calls_of(module: Any, batch: Batch, tp: int, cp: int, tp_group: Any, cp_group: Any) -> dict[str, Any]:
    """Every function on this rank's part: name to (function, operands, upstream)."""
    width = V // tp_group.size()
    weight = batch.weight[tp * width : (tp + 1) * width]
    bounds = (tp * width, (tp + 1) * width)
    more = {"inference_only": False, "cp_group": cp_group, "chunk_size": 5}
    calls = {}
    for name, layout in LAYOUTS.items():
        hidden = zigzag(batch.hidden[: sum(layout.spans)], layout.spans, cp, cp_group.size())
        hidden = hidden.view(len(layout.spans), -1, D) if name == "padded" else hidden[None]
        logits = hidden @ weight.T
        ids = batch.tokens[name]
        ids = ids.view(3, 16)[:, :13] if name == "padded" else ids[None]
        pack = () if name == "padded" else (layout.bounds, layout.shape[1] + 1)
        where = {} if name in ("padded", "bare") else {"attention_mask": MASK}
        where |= {"sub_seq_lengths": [[9, 5], [13]]} if name == "sub" else {}
        suffix = "" if name == "padded" else "_packed_sequences"
        g = [batch.upstream[name][cp]]

        def from_logits(z, suffix=suffix, args=(ids, *pack, *bounds, tp_group), where=where):
            return getattr(module, "from_parallel_logits_to_logprobs" + suffix)(z, *args, **more, **where)

        def from_hidden(h, w, suffix=suffix, args=(ids, *pack, *bounds, tp_group), where=where):
            function = getattr(module, "from_parallel_hidden_to_logprobs" + suffix)
            return function(h, w, *args, **more, **where, temperature=TEMPERATURE)

        calls[f"logits {name}"] = (from_logits, [logits], g)
        calls[f"hidden {name}"] = (from_hidden, [hidden, weight], g)
        if name in ("masked", "sub"):
            loss_mask = batch.loss_mask if name == "masked" else None
            args = (*pack, 6, MASK, loss_mask, cp_group)
            sub = where.get("sub_seq_lengths")
            scalars = [torch.tensor(1.0), torch.tensor(SCALE)]

            def entropy(z, args=args, sub=sub):
                return module.vocab_parallel_entropy_packed_sequences(z, *args, sub_seq_lengths=sub)

            def entropy_from_hidden(h, w, args=args, sub=sub):
                function = module.from_parallel_hidden_to_entropy_packed_sequences
                return function(h, w, *args, tp_group, sub_seq_lengths=sub, chunk_size=5, temperature=TEMPERATURE)

            calls[f"entropy logits {name}"] = (entropy, [logits], scalars)
            calls[f"entropy hidden {name}"] = (entropy_from_hidden, [hidden, weight], scalars)
    rows = zigzag(batch.hidden, [16] * 3, cp, cp_group.size()).view(3, -1, D)
    g = [zigzag(batch.upstream["bare"][0].repeat(1, 2)[:, :16].reshape(-1), [16] * 3, cp, cp_group.size()).view(3, -1)]
    fused = lambda h, w: module._fused_vocab_parallel_entropy_from_hidden(h, w, tp_group, 5, TEMPERATURE)  # noqa: E731
    calls["rows logits"] = (lambda z: module.vocab_parallel_entropy(z), [rows @ weight.T], g)
    calls["rows hidden"] = (fused, [rows, weight], g)
    return calls


def scores(rank: int, world: int, tp: int, cp: int, batch: Batch) -> dict[str, Any]:
    """``{name: (theirs, our)}`` results and gradients on this rank, and where the rank stands."""
    module, state, _ = load("skyrl", MODEL_UTILS, "megatron.core.parallel_state", TORCH_UTILS)
    state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    try:
        tp_group, cp_group = state.get_tensor_model_parallel_group(), state.get_context_parallel_group()
        calls = calls_of(module, batch, tp_group.rank(), cp_group.rank(), tp_group, cp_group)
        results = {}
        with on_cpu():
            theirs = {}
            for name, (function, operands, upstream) in calls.items():
                if "entropy hidden" in name or name == "rows hidden":
                    with torch.no_grad():  # SkyRL's has no gradient
                        values = function(*operands)
                    theirs[name] = [values] if isinstance(values, Tensor) else list(values), None
                else:
                    theirs[name] = run(function, operands, upstream)
        logitless.install("skyrl", audit=3)
        results = {name: (theirs[name], run(*call)) for name, call in calls.items()}
        assert_same_at_actions({name: call for name, call in calls.items() if name.split()[0] in ("logits", "hidden")})
        (status,) = logitless.status().hosts
        functions = [entry for entry in status.replaced if MODEL_UTILS in entry.name and ".apply" not in entry.name]
        assert all(entry.calls for entry in functions), status
        assert status.audit is not None
        assert status.audit.passed, status.audit
        assert status.audit.rows > 30
    finally:
        for entry in logitless.status().hosts:
            logitless.uninstall(entry.host)
        state.destroy_model_parallel()
    return {"tp": rank % tp, "cp": rank // tp, "scores": results}


def assert_same_at_actions(calls: dict[str, Any]) -> None:
    """Where only the last six results of a line are read, they and their gradients are the same. The others are 0."""
    pass_of = make_with_actions(lambda _, __, call: run(*call), {})
    for name, (function, operands, (upstream,)) in calls.items():
        upstream = upstream.clone()
        upstream[:, :-6] = 0
        (whole,), gradients = run(function, operands, [upstream])
        (read,), read_gradients = pass_of(
            None, [{"num_actions": 6}, {"num_actions": 4}], (function, operands, [upstream])
        )
        torch.testing.assert_close(read[:, -6:], whole[:, -6:], atol=1e-6, rtol=1e-6, msg=name)
        assert not read[:, :-6].any(), name
        for mine, other in zip(read_gradients, gradients, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5, msg=name)


# The truth.


def true_logprobs(z: Tensor, ids: Tensor, layout: Layout) -> Tensor:
    """``[B, S - 1]`` from ``[T, V]`` logits of the whole pack."""
    out = torch.zeros(layout.shape, dtype=z.dtype)
    starts = layout.bounds.tolist()
    for start, places in zip(starts, layout.place, strict=False):
        for offset, (row, column) in enumerate(places):
            logp = z[start + offset].log_softmax(-1)
            log_z = z[start + offset].logsumexp(-1)
            target = int(ids[start + offset + 1])
            out[row, column] = logp[target] if 0 <= target < V else log_z.detach() - log_z
    return out


def true_entropies(z: Tensor, layout: Layout) -> Tensor:
    out = torch.zeros(layout.shape, dtype=z.dtype)
    for start, places in zip(layout.bounds.tolist(), layout.place, strict=False):
        for offset, place in enumerate(places):
            logp = z[start + offset].log_softmax(-1)
            out[place] = -(logp.exp() * logp).sum()
    return out


def action_weights(layout: Layout, loss_mask: Tensor | None) -> Tensor:
    """Of results that exist: the loss mask of the last six of a row."""
    exists, weights = torch.zeros(layout.shape), torch.zeros(layout.shape)
    for places in layout.place:
        for place in places:
            exists[place] = 1
    weights[:, -6:] = 1 if loss_mask is None else loss_mask
    return (weights * exists).double()


def expected(name: str, batch: Batch, rank: dict[str, Any], tp: int, cp: int, dtype: torch.dtype) -> list[Tensor]:
    """The first result on a rank and the gradients of its operands, from one pass over the whole batch."""
    kind, from_hidden = name.split()[-1], "hidden" in name
    layout = LAYOUTS.get(kind) or padded_layout()
    hidden, weight = batch.hidden[: sum(layout.spans)].to(dtype), batch.weight.to(dtype)
    z = (hidden @ weight.T / (TEMPERATURE if from_hidden else 1.0)).requires_grad_()
    if name.startswith("entropy"):
        weights = action_weights(layout, batch.loss_mask if kind == "masked" else None).to(dtype)
        wanted = (true_entropies(z, layout) * weights).sum() / weights.sum()
        loss = SCALE * wanted
    elif name.startswith("rows"):
        logp = z.log_softmax(-1)
        entropies = -(logp.exp() * logp).sum(-1)
        wanted = zigzag(entropies, layout.spans, rank["cp"], cp).view(3, -1)
        loss = (entropies.view(3, 16) * batch.upstream["bare"][0].repeat(1, 2)[:, :16].to(dtype)).sum()
    else:
        wanted, upstream = true_logprobs(z, batch.tokens[kind], layout), batch.upstream[kind].to(dtype)
        loss = (wanted * (upstream[:cp].sum(0) if kind == "padded" else upstream[rank["cp"]])).sum()
    (d_z,) = torch.autograd.grad(loss, z)
    own = slice(rank["tp"] * (V // tp), (rank["tp"] + 1) * (V // tp))
    d_z = zigzag(d_z, layout.spans, rank["cp"], cp)[:, own]
    if not from_hidden:
        return [wanted.detach(), d_z]
    d_z = d_z / TEMPERATURE
    return [wanted.detach(), d_z @ weight[own], d_z.T @ zigzag(hidden, layout.spans, rank["cp"], cp)]


def assert_right(rank: dict[str, Any], batch: Batch, tp: int, cp: int) -> None:
    """All results and gradients of one rank: results beside SkyRL's own, gradients beside plain torch's."""
    for name, ((theirs, their_gradients), (ours, gradients)) in rank["scores"].items():
        wanted, *exact = expected(name, batch, rank, tp, cp, torch.float64)
        _, *plain = expected(name, batch, rank, tp, cp, torch.float32)
        assert ours[0].dtype == theirs[0].dtype == torch.float32, name
        assert_close_to_truth(ours[0], wanted, theirs[0], name)
        for mine, truly, other in zip(gradients, exact, plain, strict=True):
            assert_gradient_close_to_truth(mine.view(truly.shape), truly, other, name)
        for mine, other in zip(gradients, their_gradients or gradients, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_over_ranks(ranks, tp, cp):
    batch = make_batch()
    for scored in ranks(scores, tp * cp, tp, cp, batch, timeout=240):
        assert_right(scored, batch, tp, cp)


# FSDP, and everything else that needs one process.


@pytest.fixture(scope="module", autouse=True)
def skyrl():
    load("skyrl", TORCH_UTILS, MODEL_UTILS, WRAPPER)
    load("skyrl")


def functional():
    return sys.modules[TORCH_UTILS]


def logits_of(*lead, dtype=torch.float32):
    return (torch.randn(*lead, 507, dtype=torch.float64) * 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_logprobs_from_logits(dtype):
    labels = torch.randint(507, (3, 17))
    assert_parity(
        "skyrl",
        lambda z: functional().logprobs_from_logits(z, labels),
        lambda z: z.log_softmax(-1).gather(-1, labels[..., None])[..., 0],
        [logits_of(3, 17, dtype=dtype)],
        dtypes=[torch.float64 if dtype == torch.float64 else torch.float32],
    )


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunked_entropy(dtype, masked):
    mask = (torch.rand(3, 17) < 0.6).to(dtype) if masked else None

    def truth(z):
        logp = z.log_softmax(-1)
        return -(logp.exp() * logp).sum(-1) * (1 if mask is None else mask.double())

    def function(z):
        return functional().chunked_entropy_from_logits(z, requires_grad=True, attention_mask=mask, chunk_size=5)

    assert_parity("skyrl", function, truth, [logits_of(3, 17, dtype=dtype)])


def test_entropy_is_a_metric_unless_asked():
    logits = logits_of(2, 3).requires_grad_()
    logitless.install("skyrl")
    assert not functional().chunked_entropy_from_logits(logits).requires_grad
    assert functional().chunked_entropy_from_logits(logits, requires_grad=True).requires_grad
    with torch.no_grad():
        assert not functional().chunked_entropy_from_logits(logits, requires_grad=True).requires_grad


@pytest.mark.parametrize("inplace", [False, True])
def test_logits_are_lost_only_where_that_was_installed(inplace):
    leaf, labels = logits_of(2, 5).requires_grad_(), torch.randint(507, (2, 5))
    logits = leaf * 1.0
    before = logits.detach().clone()
    logitless.install("skyrl", inplace_backward=inplace)
    functional().logprobs_from_logits(logits, labels, inplace_backward=True).sum().backward()
    assert torch.equal(logits.detach(), before) != inplace
    wanted = -before.softmax(-1)
    wanted.scatter_add_(-1, labels[..., None], torch.ones(2, 5, 1))
    torch.testing.assert_close(leaf.grad, wanted, atol=1e-6, rtol=1e-5)


@pytest.fixture
def alone():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_rows_that_reach_no_result_are_not_computed(alone):
    """A prompt's rows cost nothing in the entropy of a batch, and padding none anywhere."""
    module = sys.modules[MODEL_UTILS]
    layout, ids = LAYOUTS["masked"], torch.randint(V, (1, 40))
    logits = torch.randn(1, 40, V)
    scored = torch.zeros(40, dtype=torch.bool)
    for start, places in zip(layout.bounds.tolist(), layout.place, strict=False):
        scored[start : start + len(places)] = True
    logits[:, ~scored] = torch.nan
    logits.requires_grad_()
    logitless.install("skyrl")
    pack = (ids, layout.bounds, 13, 0, V, alone)
    out = module.from_parallel_logits_to_logprobs_packed_sequences(logits, *pack, attention_mask=MASK)
    out.sum().backward()
    assert out.isfinite().all()
    assert logits.grad[:, ~scored].abs().max() == 0
    with torch.no_grad():
        assert not module.from_parallel_logits_to_logprobs_packed_sequences(logits, *pack).requires_grad
    again = module.from_parallel_logits_to_logprobs_packed_sequences(logits, *pack, True, attention_mask=MASK)
    assert not again.requires_grad  # inference_only
    assert torch.equal(again, out)
    hidden, weights = torch.randn(1, 40, D), action_weights(layout, None)
    used = torch.zeros(40, dtype=torch.bool)
    for start, places in zip(layout.bounds.tolist(), layout.place, strict=False):
        used[start : start + len(places)] = torch.tensor([weights[place] != 0 for place in places])
    hidden[:, ~used] = torch.nan
    hidden.requires_grad_()
    entropy = module.from_parallel_hidden_to_entropy_packed_sequences
    metric, part = entropy(hidden, torch.randn(V, D), layout.bounds, 13, 6, MASK, None, alone, alone)
    part.backward()
    assert metric.isfinite()
    assert not metric.requires_grad
    assert hidden.grad[:, ~used].abs().max() == 0
    assert hidden.grad[:, used].abs().min() > 0


class Stage:
    """The last stage of a Megatron model that hands its hidden states to an output processor, as SkyRL asks it to."""

    config = SimpleNamespace(fp8=None)

    def __init__(self):
        torch.manual_seed(3)
        self.embed, self.layer = torch.randn(V, D), SimpleNamespace(weight=torch.randn(V, D))

    def __call__(self, ids, *_, output_processor, output_processor_context, **__):
        hidden = self.embed[ids].transpose(0, 1)
        return output_processor(hidden_states=hidden, output_layer=self.layer, context=output_processor_context)


def in_turn(forward_step_func, data_iterator, model, num_microbatches, **_):
    """Megatron's schedule of a forward pass without a pipeline, which wants a GPU."""
    steps = (forward_step_func(data_iterator, model[0]) for _ in range(num_microbatches))
    return [collect(output)[1] for output, collect in steps]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_a_pass_of_the_worker_multiplies_response_rows_alone(alone, monkeypatch, packed):
    """SkyRL's own pass for old and reference log-probs, with the fused head."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    module = sys.modules[WRAPPER]
    newer = "total_tokens=" in inspect.getsource(module.preprocess_packed_seqs)
    if packed and newer and "total_tokens" not in PackedSeqParams.__dataclass_fields__:
        pytest.skip("this SkyRL packs for a newer Megatron-Core")
    monkeypatch.setattr(module, "get_forward_backward_func", lambda: in_turn)
    monkeypatch.setattr(module, "get_model_config", lambda model: model.config)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    worker = object.__new__(module.MegatronModelWrapper)
    cfg = SimpleNamespace(logprobs_chunk_size=5)
    facts = {"_fused_lm_head": True, "_fused_lm_head_backend": "torch", "is_vlm": False, "cfg": cfg}
    vars(worker).update({**facts, "remove_microbatch_padding": packed, "actor_module": [Stage()]})
    ids = torch.randint(V, MASK.shape)

    def log_probs():
        positions = (MASK.long().cumsum(1) - 1).clamp(min=0)
        batch = {"sequences": ids, "attention_mask": MASK.long(), "position_ids": positions, "num_actions": 6}
        batch["rollout_expert_indices"] = None
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            out = worker.forward([batch], MASK.shape[1], 3, temperature=TEMPERATURE)
        return out, counter.get_total_flops() / (2 * V * D)

    parallel_state.initialize_model_parallel()
    try:
        with on_cpu():
            theirs, their_rows = log_probs()
        logitless.install("skyrl", rows_before_head=False)
        every, all_rows = log_probs()
        logitless.uninstall("skyrl")
        logitless.install("skyrl")
        ours, rows = log_probs()
        monkeypatch.setattr(Stage, "config", SimpleNamespace(fp8="e4m3", fp8_output_proj=True))
        with pytest.raises(LogitlessError, match=r"fused_lm_head_logprob: .*has fp8_output_proj=True"):
            log_probs()
    finally:
        parallel_state.destroy_model_parallel()
    stage, follows = worker.actor_module[0], MASK[:, :-1] & MASK[:, 1:]
    truth = (stage.embed.double()[ids[:, :-1]] @ stage.layer.weight.double().T / TEMPERATURE).log_softmax(-1)
    truth = truth.gather(-1, ids[:, 1:, None])[..., 0]
    for mine in (ours, every):
        assert_close_to_truth(*(x[:, -6:][follows[:, -6:]] for x in (mine, truth, theirs)))
    # The last six of each line's twelve results are read; packed lines have none for padding.
    assert (their_rows, all_rows, rows) == ((27, 24, 12) if packed else (39, 36, 18))


def test_sequences_without_a_result(alone):
    """One token each: nothing to predict, and still a graph."""
    module = sys.modules[MODEL_UTILS]
    logits = torch.randn(1, 4, V, requires_grad=True)
    logitless.install("skyrl")
    bounds, mask = torch.tensor([0, 2, 4]), torch.tensor([[True, False], [False, True]])
    pack = (torch.zeros(1, 4, dtype=torch.int64), bounds, 2, 0, V, alone)
    out = module.from_parallel_logits_to_logprobs_packed_sequences(logits, *pack, attention_mask=mask)
    assert out.tolist() == [[0], [0]]
    out.sum().backward()
    assert logits.grad.abs().max() == 0


def test_hidden_states_in_another_dtype_than_the_head(alone):
    module = sys.modules[MODEL_UTILS]
    hidden, weight = torch.randn(1, 6, D).bfloat16().requires_grad_(), torch.randn(V, D, requires_grad=True)
    ids = torch.randint(V, (1, 6))
    function = lambda: module.from_parallel_hidden_to_logprobs(hidden, weight, ids, 0, V, alone)  # noqa: E731
    theirs = function()
    logitless.install("skyrl")
    ours = function()
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    ours.sum().backward()
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)


def test_the_rounding_of_half_precision_is_kept_unless_accurate(alone):
    module = sys.modules[MODEL_UTILS]
    hidden, weight = torch.randn(2, 9, 64).bfloat16(), torch.randn(V, 64).bfloat16()
    ids = torch.randint(V, (2, 9))
    exact = (hidden.double() @ weight.double().T).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    score = lambda: module.from_parallel_hidden_to_logprobs(hidden, weight, ids, 0, V, alone, chunk_size=4)  # noqa: E731
    theirs = score()
    logitless.install("skyrl", audit=3)
    ours = score()
    assert logitless.status().hosts[0].audit.passed
    logitless.uninstall("skyrl")
    logitless.install("skyrl", accurate=True)
    accurate = score()
    assert (ours - theirs).abs().max() < 1e-5
    assert (theirs - exact).abs().max() > 1e-2
    assert (accurate - exact).abs().max() < 1e-5


def test_classes_that_are_called_directly(alone):
    """Targets are shifted by the caller; an id outside the vocabulary has log-prob 0 and the gradient -p g."""
    module = sys.modules[MODEL_UTILS]
    hidden, weight, ids = torch.randn(2, 9, D), torch.randn(V, D), torch.randint(V, (2, 9))
    ids[1, 3] = V + 2
    calls = {
        "DistributedLogprob": lambda c, h, w: c.apply(h @ w.T, ids, 0, V, alone, False),
        "ChunkedDistributedLogprob": lambda c, h, w: c.apply(h @ w.T, ids, 0, V, 4, alone, False),
        "FusedLinearChunkedDistributedLogprob": lambda c, h, w: c.apply(h, w, ids, 0, V, 4, alone, False),
    }
    upstream = [torch.randn(2, 9)]

    def truth(h: Tensor, w: Tensor) -> Tensor:
        log_z = (h @ w.T).logsumexp(-1)
        chosen = (h @ w.T).gather(-1, ids.clamp(max=V - 1)[..., None])[..., 0]
        return torch.where(ids < V, chosen - log_z, log_z.detach() - log_z)

    exact, exact_gradients = run(truth, [hidden.double(), weight.double()], [upstream[0].double()])
    for name, call in calls.items():
        function = lambda h, w, name=name, call=call: call(getattr(module, name), h, w)  # noqa: E731
        theirs, their_gradients = run(function, [hidden, weight], upstream)
        logitless.install("skyrl", audit=3)
        ours, our_gradients = run(function, [hidden, weight], upstream)
        counts = {entry.name: entry.calls for entry in logitless.status().hosts[0].replaced}
        assert counts[f"{MODEL_UTILS}.{name}.apply"] == 1
        logitless.uninstall("skyrl")
        assert_close_to_truth(ours[0], exact[0], theirs[0], name)
        for mine, right, other in zip(our_gradients, exact_gradients, their_gradients, strict=True):
            assert_gradient_close_to_truth(mine, right, other, name)


def test_wrong_operands_are_named(alone):
    module = sys.modules[MODEL_UTILS]
    logitless.install("skyrl")
    logits, ids, bounds = torch.randn(1, 40, V), torch.zeros(1, 40, dtype=torch.int64), torch.tensor([0, 16, 32, 40])

    def packed(z=logits, target=ids, cu=bounds, width=13, stop=V, **more):
        return module.from_parallel_logits_to_logprobs_packed_sequences(z, target, cu, width, 0, stop, alone, **more)

    for text, call in {
        r"packed_sequences: target must be \[1, 40\] but is \[1, 39\]": lambda: packed(target=ids[:, :39]),
        r"vocab_parallel_logits must be \[1, T / CP, ...\], one pack, but is \[40, 62\]": lambda: packed(logits[0]),
        r"cu_seqlens_padded must rise from 0 but is \[0, 20, 10, 40\]": lambda: packed(
            cu=torch.tensor([0, 20, 10, 40])
        ),
        r"cu_seqlens_padded ends at 32 but 1 ranks of 40 tokens hold 40": lambda: packed(cu=bounds[:3]),
        r"attention_mask must be \[3, 13\], .* but is \[3, 12\]": lambda: packed(attention_mask=MASK[:, 1:]),
        r"sequence 2 has 9 tokens but cu_seqlens_padded leaves 8": lambda: packed(
            attention_mask=torch.ones(3, 9).bool(), width=9
        ),
        r"sub_seq_lengths describes 2 sub-sequences but cu_seqlens_padded describes 3": lambda: packed(
            sub_seq_lengths=[[9, 5]]
        ),
        r"vocab_start_index 0 and vocab_end_index 61 describe 61 columns, not 62": lambda: packed(stop=61),
    }.items():
        with pytest.raises(LogitlessError, match=text):
            call()
    with pytest.raises(LogitlessError, match=r"target has 6 tokens per sequence but 1 ranks of 5 hold 5"):
        module.from_parallel_logits_to_logprobs(torch.randn(2, 5, V), ids[:, :12].view(2, 6), 0, V, alone)
    entropy = module.from_parallel_hidden_to_entropy_packed_sequences
    with pytest.raises(LogitlessError, match="num_actions must be between 1 and 12 but is 0"):
        entropy(torch.randn(1, 40, D), torch.randn(V, D), bounds, 13, 0, MASK, None, alone, alone)
    with pytest.raises(LogitlessError, match=r"mask shape \[2, 4\] does not match logits shape \[2, 3, 507\]"):
        functional().chunked_entropy_from_logits(logits_of(2, 3), attention_mask=torch.ones(2, 4))


def test_everything_is_replaced_and_put_back():
    module = sys.modules[MODEL_UTILS]
    before = module.from_parallel_logits_to_logprobs, functional().logprobs_from_logits
    report = logitless.install("skyrl")
    assert checkout("skyrl") or report.version == "0.3.0"
    assert len(report.replaced) == 17
    assert not report.missing
    assert module.from_parallel_logits_to_logprobs is not before[0]
    logitless.uninstall("skyrl")
    assert (module.from_parallel_logits_to_logprobs, functional().logprobs_from_logits) == before


@pytest.mark.skipif(checkout("skyrl") is not None, reason="benchmarks run on what is installed")
def test_the_benchmark_runs():
    record = measure(ENTRIES["skyrl"], torch.device("cpu"), SMOKE, repeats=1)
    assert record.difference < 1e-5
    assert record.after_bytes < record.before_bytes
    assert not logitless.status().hosts
