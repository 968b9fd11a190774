"""torchtitan's own ``PolicyTrainer``: it builds its Qwen3 under FSDP, and its step is what its controller calls.

Three steps before and after ``install``, of its default GRPO loss and of ``ChunkedLossWrapper``. Attention is torch's,
because flex attention has no backward on a CPU; actors of Monarch are plain objects; there is one rank, because its
FSDP sums gradients by an operation that gloo lacks. Needs torchtitan's sources (``LOGITLESS_HOSTS``, see hosts.py) and
the package ``spmd_types``.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hosts import checkout, put_first
from shared.host_steps import assert_same, run, spoiled

import logitless
from benchmarks.bench.checkouts import MISSING, stand_in, standing_in
from benchmarks.bench.measure import peak_bytes

pytestmark = [
    pytest.mark.skipif(checkout("torchtitan") is None, reason="LOGITLESS_HOSTS names no checkout of torchtitan"),
    pytest.mark.skipif(importlib.util.find_spec("spmd_types") is None, reason="the package spmd_types is not there"),
]

VOCAB, LENGTH = 251, 64
RL = "torchtitan.experiments.rl"


class Actor:
    """Of Monarch, in one process."""


def forget() -> None:
    """Another test's torchtitan has a stand-in for spmd_types."""
    for name in [name for name in sys.modules if name.startswith("torchtitan")]:
        del sys.modules[name]


def trainer_module() -> Any:
    """torchtitan's trainer of a policy, for the CPU; its models ask for a class of its other trainer alone."""
    forget()
    put_first("torchtitan")
    absent = {*MISSING["torchtitan"], "tensorboard", "torch.utils.tensorboard"} - {"monarch", "spmd_types"}
    rank = stand_in("rank", rank=0)
    actor = stand_in("monarch.actor", Actor=Actor, concurrent_endpoint=lambda f: f, current_rank=lambda: rank)
    sys.modules |= {"monarch": stand_in("monarch"), "monarch.actor": actor}
    try:
        with standing_in(tuple(absent)), warnings.catch_warnings():
            # What a host's imports warn of is the host's business.
            warnings.simplefilter("ignore")
            module = importlib.import_module(f"{RL}.actors.trainer")
            importlib.import_module("torchtitan.models.qwen3")
            sys.modules["torchtitan.trainer"] = stand_in("torchtitan.trainer")
    finally:
        del sys.modules["monarch"], sys.modules["monarch.actor"]
    for name, x in list(sys.modules.items()):
        if name.startswith("torchtitan"):
            vars(x).update(
                {k: v for k, v in {"device_type": "cpu", "device_module": torch.cpu}.items() if k in vars(x)}
            )
    module.utils.get_local_device = lambda: torch.device("cpu")
    flex = sys.modules["torchtitan.models.common.attention"].FlexAttention
    flex.compiled_flex_attn = staticmethod(_attention)
    return module


def _attention(q: Any, k: Any, v: Any, *, enable_gqa: bool, scale: float | None, **_: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa), None


class Parts:
    """The parameters of a model as far as they are here."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def named_parameters(self) -> Any:
        return [(name, x.to_local()) for name, x in self.model.named_parameters()]


def policy(module: Any, chunks: int = 0, vocab: int = VOCAB, length: int = LENGTH) -> Any:
    """torchtitan's trainer and its step."""
    losses, config = sys.modules["torchtitan.components.loss"], sys.modules["torchtitan.config"]
    qwen3, types = sys.modules["torchtitan.models.qwen3"], sys.modules[f"{RL}.types"]
    spec = qwen3.model_registry("debugmodel", attn_backend="flex")
    spec.model.layers = spec.model.layers[:1]
    spec.model.vocab_size = spec.model.tok_embeddings.num_embeddings = spec.model.lm_head.out_features = vocab
    fields = config.TrainingConfig.__dataclass_fields__
    sizes = {name: length for name in ("seq_len", "max_context_length") if name in fields}
    loss = module.GRPOLoss.Config()
    loss = losses.ChunkedLossWrapper.Config(num_chunks=chunks, loss_fn=loss) if chunks else loss
    settings = module.PolicyTrainer.Config(
        optimizer=sys.modules["torchtitan.components.optimizer"].default_adamw(lr=1e-2, implementation="for-loop"),
        training=config.TrainingConfig(
            dtype="float32", mixed_precision_param="float32", mixed_precision_reduce="float32", steps=10, **sizes
        ),
        loss=loss,
        debug=config.DebugConfig(seed=3),
    )
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # Of random numbers of DTensors on a CPU; ours come below.
        warnings.simplefilter("ignore")
        trainer = module.PolicyTrainer(
            settings, model_spec=spec, compile_config=config.CompileConfig(), output_dir=folder
        )
    draw = torch.Generator().manual_seed(3)
    for name, x in Parts(trainer.model).named_parameters():
        x.detach().normal_(1.0 if "norm" in name else 0.0, 0.1, generator=draw)
    flat = "[T, V]" in sys.modules[f"{RL}.losses.dapo"].DAPOLoss.__call__.__doc__

    def step(n: int) -> Any:
        draw = torch.Generator().manual_seed(n)
        shape = (length,) if flat else (1, length)
        ids = torch.randint(vocab, shape, generator=draw)
        batch = types.TrainingMicrobatch(
            token_ids=ids,
            labels=ids.roll(-1, -1),
            positions=torch.arange(length).view(shape),
            loss_mask=torch.rand(shape, generator=draw) > 0.3,
            generator_logprobs=-5.5 + 0.3 * torch.randn(shape, generator=draw),
            advantages=torch.randn(shape, generator=draw),
        )
        metrics = asyncio.run(trainer.forward_backward([batch], length))
        after = asyncio.run(trainer.optim_step()).metrics
        total = sum(value * (i + 1) for i, (_, value) in enumerate(sorted(metrics.items())))
        return total + after["trainer/grad_norm/mean"]

    return Parts(trainer.model), step


def run_steps(rank: int, world: int, chunks: int) -> None:
    module = trainer_module()
    build = lambda: policy(module, chunks)  # noqa: E731
    theirs = run(build)
    logitless.install("torchtitan")
    try:
        assert_same(theirs, run(build))
        (report,) = logitless.status().hosts
        assert report.made == {}
        assert report.passed_on == 0
        assert report.calls == 3 * max(chunks, 1)
        assert report.logits == (f"logits: not computed (deferred); {0 if chunks else 1} models so far",)
        with spoiled(), pytest.raises(AssertionError):
            assert_same(theirs, run(build))
    finally:
        logitless.uninstall("torchtitan")
        forget()


@pytest.mark.parametrize("chunks", [0, 8], ids=["whole", "chunks"])
def test_three_steps(ranks, chunks):
    ranks(run_steps, 1, chunks)


def run_peaks(rank: int, world: int) -> None:
    """By default no logits are held."""
    module, vocab, length = trainer_module(), 8192, 1024
    peaks = {}
    try:
        for logits in ("host", "deferred"):
            logitless.install("torchtitan", logits=logits)
            _, step = policy(module, 0, vocab, length)
            step(0)
            peaks[logits] = peak_bytes(lambda step=step: step(1), torch.device("cpu"))
            logitless.uninstall("torchtitan")
    finally:
        forget()
    assert peaks["deferred"] < peaks["host"] - 0.9 * 4 * length * vocab


def test_peak(ranks):
    ranks(run_peaks, 1)
