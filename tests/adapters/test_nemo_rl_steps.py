"""NeMo-RL's AutoModel train functions: its loss over micro-batches and its log-probs, whose logits are not computed.

``automodel_forward_backward`` and ``forward_with_post_processing_fn`` as ``DTensorPolicyWorkerV2`` calls them, on what
NeMo-RL's own iterator makes of a batch, padded and packed. Needs its sources (``LOGITLESS_HOSTS``, see hosts.py).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hosts import checkout, load
from patched import with_deferred_logits
from shared.host_steps import OnRank, fewer_bytes, notices, on_rank, same_on_ranks, same_steps, same_steps_within
from shared.megatron_groups import TIMEOUT
from tiny import qwen3
from torch.distributed.device_mesh import init_device_mesh

import logitless
from benchmarks.bench.checkouts import standing_in

pytestmark = pytest.mark.skipif(checkout("nemo_rl") is None, reason="LOGITLESS_HOSTS names no checkout of NeMo-RL")

HALF, B, S, TRAIN = torch.bfloat16, 4, 23, "nemo_rl.models.automodel.train"


@pytest.fixture(scope="module", autouse=True)
def nemo_rl():
    if checkout("nemo_rl") is not None:
        imported()


def imported() -> None:
    load(
        "nemo_rl", TRAIN, "nemo_rl.models.automodel.data", "nemo_rl.algorithms.loss.loss_functions",
        "nemo_rl.distributed.batched_data_dict",
    )  # fmt: skip


def batch_of(n: int, vocab: int, length: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(n)
    mask = torch.ones(B, length)
    mask[:, :5], mask[1, -6:] = 0, 0
    return {
        "input_ids": torch.randint(3, vocab, (B, length), generator=made),
        "input_lengths": torch.tensor([length, length - 6, length, length]),
        "token_mask": mask,
        "sample_mask": torch.tensor([1.0, 1.0, 0.0, 1.0]),
        "advantages": torch.randn(B, length, generator=made),
    }


def clipped(
    dtype: torch.dtype = torch.float32,
    vocab: int = 253,
    length: int = S,
    packed: bool = False,
    temperature: float = 0.7,
    wrap: Callable[[Any], Any] = lambda model: model,
    tp_mesh: Any = None,
    **more: Any,
) -> Any:
    """A policy, and an update with NeMo-RL's clipped loss on log-probs of the policy as it was."""
    train, data = sys.modules[TRAIN], sys.modules["nemo_rl.models.automodel.data"]
    losses, dicts = (
        sys.modules[f"nemo_rl.{name}"] for name in ("algorithms.loss.loss_functions", "distributed.batched_data_dict")
    )
    model = wrap(qwen3(vocab, num_key_value_heads=2).to(HALF).to(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    cfg = {"sequence_packing": {"enabled": packed, "train_mb_tokens": 2 * length}, "dtensor_cfg": {}, **more}
    sampling = SimpleNamespace(temperature=temperature, top_k=None, top_p=1.0)
    meshes = {"device_mesh": None, "cp_mesh": None, "tp_mesh": tp_mesh, "cp_size": 1}
    shared = {"enable_seq_packing": packed, "sampling_params": sampling}
    config = losses.ClippedPGLossConfig
    settings = config() if hasattr(config, "model_fields") else LOSS
    loss_fn = losses.ClippedPGLossFn(settings)
    loss = train.LossPostProcessor(loss_fn, cfg, **meshes, dp_size=1, **shared)
    scored = train.LogprobsPostProcessor(cfg, **meshes, **shared)

    def batches(batch: dict[str, Any]) -> Any:
        whole = dicts.BatchedDataDict(batch)
        parts = (whole.slice(n, n + 2) for n in range(0, B, 2))
        return data.make_processed_microbatch_iterator(parts, SimpleNamespace(eos_token_id=0), cfg, 1)

    def step(n: int) -> Any:
        batch = batch_of(n, vocab, length)
        with torch.no_grad():
            old = torch.cat(
                [
                    train.forward_with_post_processing_fn(model, scored, part, sampling_params=sampling)[0]
                    for part in batches(batch)
                ]
            )
        shifted = old + 0.1 * torch.sin(7 * torch.arange(length))
        batch |= {"prev_logprobs": shifted, "generation_logprobs": shifted, "reference_policy_logprobs": old}
        tokens = (batch["token_mask"] * batch["sample_mask"][:, None]).sum()
        valid = {"global_valid_seqs": batch["sample_mask"].sum(), "global_valid_toks": tokens}
        found = train.automodel_forward_backward(model, batches(batch), loss, sampling_params=sampling, **valid)
        optimizer.step()
        optimizer.zero_grad()
        return sum(x.detach() for x, _ in found) + 1e-3 * old.mean()

    return model, step


LOSS = {
    "reference_policy_kl_penalty": 0.01,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "use_on_policy_kl_approximation": False,
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_ratio": None,
    "token_level_loss": True,
    "force_on_policy_ratio": False,
}
"""Of releases whose settings are a dictionary."""


@pytest.mark.parametrize("chunk", [None, 5], ids=["", "chunks"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_clipped_loss(packed, chunk):
    same_steps("nemo_rl", lambda: clipped(packed=packed, logprob_chunk_size=chunk))


def test_in_half_precision():
    # NeMo-RL divides half-precision logits in their dtype; at a temperature of 1 it divides none.
    same_steps("nemo_rl", lambda: clipped(HALF, temperature=1.0), exact=lambda: clipped(torch.float64, temperature=1.0))


def test_a_wrong_number_is_noticed():
    notices("nemo_rl", clipped)


def test_no_logits_are_held():
    vocab, length = 8192, 140
    fewer_bytes("nemo_rl", lambda: clipped(vocab=vocab, length=length), 4 * 2 * length * vocab)


def parallel(model: Any, mesh: Any) -> Any:
    """NeMo-RL's own tensor parallelism and FSDP2 of a model, from the file: the package wants more than is here."""
    path = checkout("nemo_rl") / "nemo_rl/models/dtensor/parallelize.py"
    spec = importlib.util.spec_from_file_location("nemo_rl_parallelize", path)
    module = importlib.util.module_from_spec(spec)
    with standing_in(("hydra",)):
        spec.loader.exec_module(module)
    return module._parallelize_model(model, mesh["dp"], mesh["tp"], torch.float32)


def steps_on_rank(rank: int, world: int, tp: int, packed: bool, chunk: int | None) -> OnRank:
    imported()
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
    wrap = partial(parallel, mesh=mesh)
    more = {"length": 140, "packed": packed, "logprob_chunk_size": chunk}
    # Ranks of a tensor-parallel group have the same tokens, here more than the head multiplies as ever.
    return on_rank("nemo_rl", rank // tp, partial(clipped, vocab=254, wrap=wrap, tp_mesh=mesh["tp"], **more))


@pytest.mark.parametrize(
    ("tp", "packed", "chunk"),
    [(1, False, None), (2, False, None), (2, True, None), (2, False, 37)],
    ids=["FSDP2", "TP", "TP, packed", "TP, chunks"],
)
def test_clipped_loss_on_two_ranks(ranks, tp, packed, chunk):
    same_on_ranks(ranks(steps_on_rank, 2, tp, packed, chunk, timeout=TIMEOUT), distinct=tp == 1)


def forward(post: Any, model: Any, length: int = 70, **more: Any) -> Any:
    train = sys.modules[TRAIN]
    data = sys.modules["nemo_rl.models.automodel.data"]
    dicts = sys.modules["nemo_rl.distributed.batched_data_dict"]
    cfg = {"sequence_packing": {"enabled": False}, "dtensor_cfg": {}}
    parts = iter([dicts.BatchedDataDict(batch_of(0, 253, length))])
    (part,) = data.make_processed_microbatch_iterator(parts, SimpleNamespace(eos_token_id=0), cfg, 1)
    with torch.no_grad():
        return train.forward_with_post_processing_fn(model, post, part, **more)[0]


def posts(model: Any) -> dict[str, Any]:
    train = sys.modules[TRAIN]
    meshes = {"device_mesh": None, "cp_mesh": None, "tp_mesh": None, "cp_size": 1}
    found = {"top-k": train.TopkLogitsPostProcessor({}, **meshes, k=5)}
    if hasattr(train, "FullLogitsPostProcessor"):
        found["whole"] = train.FullLogitsPostProcessor({}, **meshes)
    return found


def test_what_reads_whole_logits_gets_them():
    """A teacher's top-k is read; a teacher's logits, which another process is sent, are computed by the head itself."""
    model = qwen3(253)
    wanted = {name: forward(post, model) for name, post in posts(model).items()}
    logitless.install("nemo_rl")
    values, ids = forward(posts(model)["top-k"], model)
    assert "forward" in vars(model.lm_head)
    torch.testing.assert_close(values, wanted["top-k"][0])
    assert torch.equal(ids, wanted["top-k"][1])
    if "whole" in wanted:
        found = forward(posts(model)["whole"], model)
        assert type(found) is torch.Tensor
        assert torch.equal(found, wanted["whole"])
        assert "forward" not in vars(model.lm_head)
    assert logitless.status().hosts[0].made == {}


def test_a_reward_model_is_left_alone():
    model = qwen3(253)
    logitless.install("nemo_rl")
    forward(sys.modules[TRAIN].ScorePostProcessor({}), model, is_reward_model=True)
    assert "forward" not in vars(model.lm_head)


def test_a_filter_sorts_the_logits_of_the_head_itself():
    """Log-probs over the support of top-k: NeMo-RL compares logits with the k-th largest, which must be one of them."""
    train, model = sys.modules[TRAIN], qwen3(253)
    sampling = SimpleNamespace(temperature=1.0, top_k=20, top_p=1.0)
    meshes = {"device_mesh": None, "cp_mesh": None, "tp_mesh": None, "cp_size": 1}
    post = train.LogprobsPostProcessor({}, **meshes, sampling_params=sampling)
    wanted = forward(post, model)
    logitless.install("nemo_rl")
    assert torch.equal(forward(post, model), wanted)
    assert "forward" not in vars(model.lm_head)


def test_the_patch_of_the_page():
    same_steps_within(lambda: with_deferred_logits("nemo_rl"), clipped)
