"""SkyRL with and without ours: padded and packed, from logits and from hidden states, over TP, CP and both.

A batch is made here; every rank cuts its own tokens and columns out of it, runs SkyRL's own functions and ours on them,
and sends both back. The truth is one float64 pass over the whole batch, with SkyRL's conventions spelled out:

    values      zero outside the attention mask and for ids outside the vocabulary, whose gradient is -p g
    gradients   over context-parallel ranks the padded form adds up, the packed form keeps its own
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from hosts import load
from parity import assert_parity, run
from shared.skyrl import (
    LAYOUTS,
    MASK,
    MODEL_UTILS,
    SCALE,
    TEMPERATURE,
    TORCH_UTILS,
    WRAPPER,
    D,
    Layout,
    V,
    action_weights,
    functional,
    logits_of,
    on_cpu,
    padded_layout,
)
from torch import Tensor

import logitless
from logitless.adapters.skyrl_rows import with_actions


@pytest.fixture(scope="module", autouse=True)
def skyrl():
    load("skyrl", TORCH_UTILS, MODEL_UTILS, WRAPPER)
    load("skyrl")


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


def zigzag(x: Tensor, spans: list[int], rank: int, size: int) -> Tensor:
    """A rank's tokens of a pack, drawn out by hand."""
    if size == 1:
        return x
    parts = []
    for sequence in x.split(spans):
        chunks = sequence.chunk(2 * size)
        parts += [chunks[rank], chunks[2 * size - 1 - rank]]
    return torch.cat(parts)


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
        # Ours of the packed entropy calls no weighted sum.
        assert all(entry.calls for entry in functions if "weighted_sum" not in entry.name), status
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
    pass_of = with_actions.make(lambda _, __, call: run(*call), {})
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
