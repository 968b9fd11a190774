"""Shared by the tests of megatron and those that build on them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import logitless
from benchmarks.bench.checkouts import put_first
from shared.megatron_groups import NOISE


def megatron_first() -> bool:
    """Whether there is a checkout of Megatron-Core: it is then imported, in place of the one that is installed."""
    if not put_first("megatron"):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_module("megatron.core")
    return True


@contextmanager
def megatron(tp: int = 1, cp: int = 1, pp: int = 1, vpp: int | None = None) -> Iterator[Any]:
    """``parallel_state`` of this mesh, as a training script sets it up."""
    with warnings.catch_warnings():
        # What its imports warn of is its own business.
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.models.gpt import gpt_layer_specs as _  # noqa: F401

        warnings.simplefilter("error")
        for category, message in NOISE:
            warnings.filterwarnings("ignore", message, category)

        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            context_parallel_size=cp,
        )
        try:
            yield parallel_state
        finally:
            for entry in logitless.status().hosts:
                logitless.uninstall(entry.host)
            parallel_state.destroy_model_parallel()
