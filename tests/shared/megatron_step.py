"""A real Megatron-Core model with its own wrappers and gradient buffers on gloo ranks, for the training steps of hosts.

One double: ``Attention`` in the place of Transformer Engine's, which has no CPU build. It attends within each
sequence of the local pack, so that under context parallelism a rank sees its own tokens alone: another model than
Megatron's, and the same one before and after.
"""

from __future__ import annotations

import functools
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import logitless
from logitless.call.resolve import MEMORY
from logitless.deferred import column_parallel
from logitless.operands.logits import MADE

V, D = 106, 16


class Attention(torch.nn.Module):
    """Causal attention of packs ``[t, h, d]`` and of batches ``[s, b, h, d]``."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any = None, **__: Any):
        if packed_seq_params is None or query.dim() == 4:
            parts = [x.permute(1, 2, 0, 3) for x in (query, key, value)]
            out = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
            return out.permute(2, 0, 1, 3).flatten(2)
        ends = packed_seq_params.cu_seqlens_q.tolist()
        # The lengths are those of whole sequences; each rank holds the same share of each.
        share = max(1, ends[-1] // len(query))
        sizes = [(b - a) // share for a, b in itertools.pairwise(ends)]
        sizes[-1] += len(query) - sum(sizes)
        found = []
        for q, k, v in zip(*(x.transpose(0, 1).split(sizes, 1) for x in (query, key, value)), strict=True):
            found.append(torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0])
        return torch.cat(found, 1).transpose(0, 1).flatten(1)


@contextmanager
def on_cpu() -> Iterator[None]:
    """What Megatron wants of CUDA is where to allocate, and a random state."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        patch.setattr(CudaRNGStatesTracker, "fork", lambda *_: warnings.catch_warnings())
        patch.setattr(Tensor, "cuda", lambda self, *_, **__: self)
        for name in ("zeros", "tensor", "empty", "ones"):
            patch.setattr(torch, name, functools.partial(_here, getattr(torch, name)))
        yield


def _here(make: Callable[..., Tensor], *args: Any, device: Any = None, **more: Any) -> Tensor:
    return make(*args, device=None if str(device).startswith("cuda") else device, **more)


def model_of(
    tp: int, cp: int = 1, dtype: torch.dtype = torch.float32, tied: bool = False, seed: int = 3, **more: Any
) -> Any:
    """A ``GPTModel`` of one layer in Megatron's DDP, in its half-precision wrapper where it is bfloat16."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    torch.manual_seed(seed)
    half = dtype == torch.bfloat16
    config = TransformerConfig(
        num_layers=1,
        hidden_size=D,
        num_attention_heads=2,
        ffn_hidden_size=2 * D,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        use_cpu_initialization=True,
        init_method_std=0.4,
        bf16=half,
        params_dtype=dtype,
        pipeline_dtype=dtype,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = Attention
    settings = {"share_embeddings_and_output_weights": tied, "position_embedding_type": "none"} | more
    model = GPTModel(config, spec, vocab_size=V, max_sequence_length=512, **settings)
    model = Float16Module(config, model) if half else model
    buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    return DistributedDataParallel(config, buffers, model)


class Descent:
    """Gradient descent on Megatron's gradient buffers, with float32 copies of the parameters: an optimizer as hosts
    call it. Megatron's own wants CUDA.
    """

    def __init__(self, models: list[Any], lr: float = 0.1) -> None:
        self.lr = lr
        self.parameters = [p for model in models for p in model.parameters()]
        self.masters = [p.detach().float().clone() for p in self.parameters]

    def zero_grad(self, *_: Any) -> None:
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def step(self) -> tuple[bool, float, None]:
        square = 0.0
        for p, master in zip(self.parameters, self.masters, strict=True):
            master.sub_(self.lr * p.main_grad)
            p.copy_(master)
            square += float(p.main_grad.double().square().sum())
        return True, square**0.5, None


class Largest(TorchDispatchMode):
    """The most elements of a tensor with a dimension of so many columns that any operation within made, forward and
    backward.
    """

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns, self.elements = columns, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, (tuple, list)) else (found,):
            if type(x) is Tensor and self.columns in x.shape:
                self.elements = max(self.elements, x.numel())
        return found


class Outcome(NamedTuple):
    """Three training steps of a host on one rank.

    Attributes:
        losses: what the host reports of each step.
        scores: log-probs of a pass without a graph.
        parameters: in float32, after the last step.
        largest: elements of the largest tensor with the columns of logits that a step made.
        made: who computed logits that were deferred, and how often.
        deferred: how many models were deferred.
        expected: how many losses were made in the pass of their log-probs, where some were expected.
    """

    losses: list[float]
    scores: list[Tensor]
    parameters: list[Tensor]
    largest: int
    made: dict[str, int]
    deferred: str
    expected: str = ""


HOW = ("before", "deferred", "wrong")
"""A host alone; with ours installed; and with logits that are wrong by a hundredth. A fourth is "host": ours installed,
on logits that the host computes, for a host whose own gradients are rounded. "page" is the patch for maintainers, and
"page, wrong" the same with such logits.
"""


@contextmanager
def installed(host: str, how: str, **options: Any) -> Iterator[dict[str, Any]]:
    """Ours installed within, except "before"; yields what ``status`` says at the end."""
    told: dict[str, Any] = {"made": {}, "deferred": ""}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if how == "before":
            yield told
            return
        if how.endswith("wrong"):
            own = column_parallel.logits_of_layer
            patch.setattr(column_parallel, "logits_of_layer", lambda *args, **more: own(*args, **more) * 1.01)
        if how == "host":
            options["logits"] = "host"
        # Chunks that are smaller than the logits of a tiny batch.
        patch.setitem(MEMORY, "hidden", "8KiB")
        if how.startswith("page"):
            _apply_page(host, patch)
            yield told
            told.update(made=dict(MADE), deferred="logits: not computed (deferred); 1 models so far")
            return
        logitless.install(host, **options)
        yield told
        report = logitless.status().hosts[0]
        told.update(made=dict(report.made), deferred=report.logits[0], expected="".join(report.logits[1:]))
        # A version that nobody told, and parameters of a function that no step here gives.
        assert all("unknown" in note or "has new parameters" in note for note in report.notes), report.notes
        logitless.uninstall(host)


def _apply_page(host: str, patch: pytest.MonkeyPatch) -> None:
    """The diff of docs/maintainers.md, in every module that has the function, and models that are deferred."""
    import patched

    owner, name, own = patched.replaced(host)
    ours, package = patched.patched(host, own, vars(owner)), owner.__name__.partition(".")[0]
    for key, module in list(sys.modules.items()):
        if key.partition(".")[0] == package and vars(module).get(name) is own:
            patch.setattr(module, name, ours)
    make = Descent.__init__

    def deferring(self: Any, chunks: Any, **more: Any) -> None:
        logitless.defer(chunks)
        make(self, chunks, **more)

    patch.setattr(Descent, "__init__", deferring)
    MADE.clear()


def check_steps(before: Outcome, ours: Outcome, dtype: torch.dtype, whole: int) -> None:
    """Same losses, scores and parameters; and no tensor as large as the logits of the rows here.

    A bfloat16 head rounds its logits in either way, so that scores and the first loss are the same number. The gradient
    of the logits is rounded to bfloat16 on the host's way alone, and parameters are rounded after each step.
    """
    tight = {"atol": 2e-5, "rtol": 2e-5}
    loose = tight if dtype == torch.float32 else {"atol": 2e-3, "rtol": 5e-2}
    assert len(before.losses) == len(ours.losses) == 3
    for name, near in (("losses", loose), ("scores", tight), ("parameters", loose)):
        for i, (a, b) in enumerate(zip(getattr(before, name), getattr(ours, name), strict=True)):
            allowed = tight if name == "losses" and i == 0 else near
            found, wanted = torch.as_tensor(b), torch.as_tensor(a)
            torch.testing.assert_close(found, wanted, **allowed, msg=lambda m, n=name: f"{n}: {m}")
    assert before.largest >= whole
    assert ours.largest < whole
    assert ours.made == {}
    assert ours.deferred == "logits: not computed (deferred); 1 models so far"
