"""The engines' real functions on a CPU: their files as they are, with stand-ins for all that they import besides.

``LOGITLESS_HOSTS`` names a folder with ``vllm-0.32.0``, ``sglang-0.5.23``, ..., each with its package at the top, as a
wheel unpacks; of several versions the newest is taken. vLLM's kernels run in Triton's interpreter.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import triton
import triton.language

from benchmarks.bench.checkouts import checkout, stand_in, standing_in

BARE = {
    "vllm": (
        *("vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.v1", "vllm.v1.engine", "vllm.v1.sample"),
        *("vllm.v1.worker", "vllm.v1.worker.gpu", "vllm.v1.worker.gpu.sample"),
    ),
    "sglang": ("sglang", "sglang.srt", "sglang.srt.layers"),
}
"""Packages whose ``__init__`` imports the whole engine: their modules are imported without it."""

MISSING = {
    "vllm": (
        *("vllm._custom_ops", "vllm.compilation", "vllm.config", "vllm.distributed", "vllm.envs", "vllm.logger"),
        *("vllm.model_executor.determinism", "vllm.model_executor.layers.batch_invariant", "vllm.platforms"),
        *("vllm.model_executor.layers.linear", "vllm.model_executor.layers.quantization", "vllm.utils"),
        *("vllm.model_executor.layers.utils", "vllm.model_executor.parameter", "vllm.model_executor.utils"),
        *("vllm.sampling_params", "vllm.triton_utils", "vllm.v1.core", "vllm.v1.sample.logits_processor"),
        *("vllm.v1.sample.metadata", "vllm.v1.sample.ops", "vllm.v1.worker.gpu.buffer_utils"),
        *("vllm.v1.worker.gpu.input_batch", "vllm.exceptions", "vllm.inputs", "vllm.lora", "vllm.multimodal"),
        *("vllm.pooling_params", "vllm.renderers", "vllm.tasks", "vllm.tokenizers", "vllm.v1.kv_hints"),
        "vllm._aiter_ops",
    ),
    "sglang": (
        *("sglang.kernels", "sglang.srt.arg_groups", "sglang.srt.beam_search", "sglang.srt.distributed"),
        *("sglang.srt.environ", "sglang.srt.layers.aux_hidden_states", "sglang.srt.layers.dp_attention"),
        *("sglang.srt.layers.layernorm_sp", "sglang.srt.layers.vocab_parallel_embedding", "sglang.srt.managers"),
        *("sglang.srt.model_executor", "sglang.srt.runtime_context", "sglang.srt.sampling", "sglang.srt.server_args"),
        *("sglang.srt.utils", "sglang.utils", "sgl_kernel"),
    ),
}

MODULES = {
    "vllm": (
        *("vllm.v1.outputs", "vllm.v1.worker.gpu.sample.logprob", "vllm.v1.worker.gpu.sample.prompt_logprob"),
        *("vllm.model_executor.layers.logits_processor", "vllm.v1.sample.sampler", "vllm.v1.engine.input_processor"),
    ),
    "sglang": (
        *("sglang.srt.layers.logprob_processor", "sglang.srt.layers.logits_processor", "sglang.srt.layers.sampler"),
        *("sglang.srt.layers.logsumexp", "sglang.srt.plugins"),
    ),
}

NOT_HERE = (
    *("get_bool_env_var", "is_cpu", "is_cuda", "is_gfx1250_supported", "is_hip", "is_musa", "is_npu"),
    *("is_pin_memory_available", "is_xpu", "use_intel_amx_backend"),
)
"""Questions about the machine that SGLang asks while it is imported."""


def _given(engine: str) -> dict[str, ModuleType]:
    """Modules that stand in with something in them."""
    if engine == "vllm":
        names: dict[str, Any] = {"triton": triton, "tl": triton.language}
        return {"vllm.triton_utils": stand_in("vllm.triton_utils", **names)}
    no = {name: lambda *_, **__: False for name in NOT_HERE}
    return {"sglang.srt.utils.common": stand_in("sglang.srt.utils.common", **no)}


@contextmanager
def loaded(engine: str) -> Iterator[list[ModuleType]]:
    """The real modules of an engine, which are gone afterwards: other tests ask whether it is installed."""
    root = checkout(engine)
    if root is None:
        pytest.skip(f"LOGITLESS_HOSTS names no sources of {engine}")
    sys.path.insert(0, str(root))
    for name in BARE[engine]:
        package = ModuleType(name)
        package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = package
    if engine == "vllm":
        vars(sys.modules["vllm.v1.engine"])["EngineCoreRequest"] = object
    try:
        with standing_in(MISSING[engine]):
            sys.modules.update(_given(engine))
            found = [importlib.import_module(name) for name in MODULES[engine]]
        yield found
    finally:
        sys.path.remove(str(root))
        for name in [name for name in sys.modules if name.split(".")[0] == engine]:
            del sys.modules[name]
