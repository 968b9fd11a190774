"""One training step on a causal LM through a host's functions, which are ours once ``install(host)`` was called.

Each maker returns a function that runs forward and backward and gives the log-probs of all next tokens, or of those
of the responses where the host scores no others. It looks the host's functions up as the host's trainers do, by name
and at every call.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

TEMPERATURE = 0.7


class Batch(NamedTuple):
    """A causal LM and what it is trained on.

    Args:
        model: a causal LM of transformers.
        tokens: ``[samples, length]``, no padding.
        prompt: tokens of each sample that are prompt.
    """

    model: Any
    tokens: Tensor
    prompt: int

    def logits(self) -> Tensor:
        return self.model(self.tokens, use_cache=False).logits

    def counted(self, x: Tensor) -> Tensor:
        """Numbers of tokens, with zeros for those that predict a prompt's, or nothing."""
        samples, length = self.tokens.shape
        place = torch.arange(x.numel() // samples, device=x.device)
        if len(place) <= length - self.prompt:
            return x
        counts = (place >= self.prompt - 1) & (place < length - 1)
        return (x.reshape(samples, -1) * counts).view(x.shape)

    def pack(self) -> dict[str, Any]:
        """Lists of one entry per sample, as slime and its kin name them."""
        samples, length = self.tokens.shape
        return {
            "unconcat_tokens": list(self.tokens),
            "total_lengths": [length] * samples,
            "response_lengths": [length - self.prompt] * samples,
        }


def _learn(batch: Batch, logprob: Tensor, entropy: Tensor) -> Tensor:
    """The loss counts the tokens of responses, as in training; those of prompts are scored where the host does so."""
    (batch.counted(logprob).sum() + 0.01 * batch.counted(entropy).sum()).backward()
    batch.model.zero_grad(set_to_none=True)
    return logprob.detach().reshape(-1)


def verl(batch: Batch) -> Callable[[], Tensor]:
    """The step of verl's FSDP engine without fused kernels."""
    functional = importlib.import_module("verl.utils.torch_functional")

    def step() -> Tensor:
        logits = batch.logits()
        logits = logits / torch.tensor(TEMPERATURE, dtype=logits.dtype, device=logits.device)
        entropy = functional.entropy_from_logits(logits)
        labels = batch.tokens.roll(-1, 1)
        return _learn(batch, functional.logprobs_from_logits(logits, labels, inplace_backward=False), entropy)

    return step


def skyrl(batch: Batch) -> Callable[[], Tensor]:
    """The forward of SkyRL's FSDP worker around the model, with an entropy bonus."""
    module = importlib.import_module("skyrl.backends.skyrl_train.workers.model_wrapper")
    wrapper, mask = module.HFModelWrapper(batch.model), torch.ones_like(batch.tokens)
    actions = batch.tokens.shape[1] - batch.prompt
    asked = {"temperature": TEMPERATURE, "return_output": True, "compute_entropy": True}

    def step() -> Tensor:
        logprob, output = wrapper(batch.tokens, actions, mask, **asked)
        return _learn(batch, logprob, output["entropy"][:, -actions - 1 : -1])

    return step


def openrlhf(batch: Batch) -> Callable[[], Tensor]:
    """The whole forward of OpenRLHF's actor around the model."""
    actor = importlib.import_module("openrlhf.models.actor").Actor(batch.model, temperature=TEMPERATURE)
    actor.packing_samples = False
    mask = torch.ones_like(batch.tokens)

    def step() -> Tensor:
        asked = {"return_output": True, "return_logprobs": True, "return_entropy": True}
        logprob, output = actor(batch.tokens, None, mask, **asked)
        return _learn(batch, logprob, output.entropy)

    return step


def slime(batch: Batch) -> Callable[[], Tensor]:
    """A pack through slime's loss, on float32 logits as its Megatron models give them, with an entropy bonus."""
    loss = importlib.import_module("slime.backends.megatron_utils.loss")
    more = {"qkv_format": "thd", "log_probs_chunk_size": -1, "allgather_cp": False}
    args = Namespace(rollout_temperature=TEMPERATURE, entropy_coef=0.01, **more)

    def step() -> Tensor:
        logits = batch.logits().flatten(0, 1)[None].float()
        found = loss.get_log_probs_and_entropy(logits, args=args, **batch.pack(), with_entropy=True)
        # Newer releases put an empty loss before the lists.
        lists = found[1] if isinstance(found, tuple) else found
        return _learn(batch, torch.cat(lists["log_probs"]), torch.cat(lists["entropy"]))

    return step


def miles(batch: Batch) -> Callable[[], Tensor]:
    """A pack through miles's loss, with an entropy bonus."""
    processors = importlib.import_module("miles.backends.training_utils.loss_hub.logit_processors")
    alone = SimpleNamespace(rank=0, size=1, group=dist.group.WORLD)
    importlib.import_module("miles.backends.training_utils.parallel").set_parallel_state(
        SimpleNamespace(tp=alone, cp=alone)
    )
    more = {"qkv_format": "thd", "log_probs_chunk_size": -1, "allgather_cp": False, "true_on_policy_mode": False}
    args = Namespace(rollout_temperature=TEMPERATURE, **more)

    def step() -> Tensor:
        logits = batch.logits().flatten(0, 1)[None]
        lists = processors.get_log_probs_and_entropy(logits, args=args, **batch.pack(), with_entropy=True)
        return _learn(batch, torch.cat(lists["log_probs"]), torch.cat(lists["entropy"]))

    return step


def nemo_rl(batch: Batch) -> Callable[[], Tensor]:
    """The log-probs of NeMo-RL's Megatron worker, of logits that it has divided by the temperature."""
    utils = importlib.import_module("nemo_rl.distributed.model_utils")
    shard = {"vocab_parallel_rank": 0, "vocab_parallel_group": dist.group.WORLD}

    def step() -> Tensor:
        logits = batch.logits().div_(TEMPERATURE)
        logprob = utils.get_next_token_logprobs_from_logits(batch.tokens, logits, **shard)
        return _learn(batch, logprob, logprob.new_zeros(()))

    return step


def areal(batch: Batch) -> Callable[[], Tensor]:
    """The log-probs and entropies of AReaL's FSDP engine, which packs, and the two numbers of each row that it logs."""
    functional = importlib.import_module("areal.utils.functional.vocab_parallel")

    def step() -> Tensor:
        logits, labels = batch.logits().flatten(0, 1), batch.tokens.roll(-1, 1).flatten()
        found = functional.gather_logprobs_entropy(logits, labels, TEMPERATURE)
        logged = [logits.detach().min(-1).values.float(), logits.detach().max(-1).values.float()]
        del logits
        assert all(x.shape == labels.shape for x in logged)
        return _learn(batch, *found)

    return step


def prime_rl(batch: Batch) -> Callable[[], Tensor]:
    """prime-rl's fused head in the place of the model's, with its default chunk."""
    module = importlib.import_module("prime_rl.trainer.models.layers.lm_head")
    weight = batch.model.lm_head.weight
    head = module.FusedOutputLinear(weight.shape[1], weight.shape[0], 1024)
    head.weight = weight
    temperature = torch.full(batch.tokens.shape, TEMPERATURE, device=batch.tokens.device)

    def step() -> Tensor:
        hidden = batch.model.model(batch.tokens, use_cache=False).last_hidden_state
        out = head(hidden, batch.tokens.roll(-1, 1), temperature)
        # Entropy is a metric there.
        return _learn(batch, out["logprobs"], out["entropy"].detach())

    return step


def ms_swift(batch: Batch) -> Callable[[], Tensor]:
    """The log-probs of ms-swift's Megatron trainers, with entropies as a metric."""
    utils = importlib.import_module("swift.megatron.trainers.vocab_parallel_utils")

    def step() -> Tensor:
        logits = batch.logits().div_(TEMPERATURE)
        logprob, entropy = utils.compute_logps_and_entropy_from_logits(logits, batch.tokens.roll(-1, 1), True)
        return _learn(batch, logprob, entropy.detach())

    return step


def torchtitan(batch: Batch) -> Callable[[], Tensor]:
    """The log-probs of torchtitan's RL losses, with entropies as a metric; whole rows, no chunks."""
    loss = importlib.import_module("torchtitan.components.loss")
    # 0.3.0 scores [B, L, V] logits, and the main branch [T, V].
    lines = "[batch, seq_len]" in (loss.compute_logprobs.__doc__ or "")

    def step() -> Tensor:
        logits, labels = batch.logits(), batch.tokens.roll(-1, 1)
        given = (logits, labels) if lines else (logits.flatten(0, 1), labels.flatten())
        return _learn(batch, *loss.compute_logprobs(*given, return_entropy=True))

    return step


def deepspeed(batch: Batch) -> Callable[[], Tensor]:
    """The cross entropy of DeepSpeed's tensor-parallel models, of a vocabulary that one rank has."""
    module = importlib.import_module("deepspeed.sequence.cross_entropy")

    def step() -> Tensor:
        labels, vocab = batch.tokens.roll(-1, 1), batch.model.config.vocab_size
        bounds = {"vocab_start_index": 0, "vocab_end_index": vocab, "global_vocab_size": vocab}
        loss = module.vocab_parallel_cross_entropy(batch.logits(), labels, reduction="none", **bounds)
        return _learn(batch, -loss, loss.new_zeros(()))

    return step


def megatron(hidden: Tensor, labels: Tensor, vocab: int) -> tuple[Callable[[], Tensor], Callable[[], Tensor], Any]:
    """Megatron-Core's head on ``[s, b, h]`` hidden states: its logits and cross entropy, and the output processor; and
    the head.
    """
    parallel = importlib.import_module("megatron.core.tensor_parallel")
    config = importlib.import_module("megatron.core").ModelParallelConfig(
        params_dtype=hidden.dtype, use_cpu_initialization=True
    )
    adapter = importlib.import_module("logitless.adapters.megatron")
    initial = {"init_method": lambda weight: torch.nn.init.normal_(weight, std=0.02), "bias": False}
    layer = parallel.ColumnParallelLinear(hidden.shape[-1], vocab, config=config, gather_output=False, **initial)
    layer.to(hidden.device)
    scoring = adapter.Scoring(memory="64MiB" if hidden.device.type == "cpu" else "256MiB")

    def learn(logprob: Tensor) -> Tensor:
        logprob.sum().backward()
        layer.zero_grad(set_to_none=True)
        hidden.grad = None
        return logprob.detach().reshape(-1)

    def before() -> Tensor:
        logits, _ = layer(hidden)
        return learn(-parallel.vocab_parallel_cross_entropy(logits, labels.T.contiguous()).T)

    def after() -> Tensor:
        return learn(
            adapter.output_processor(
                hidden_states=hidden, output_layer=layer, output_weight=None, labels=labels, context=scoring
            ).logprob
        )

    return before, after, layer
