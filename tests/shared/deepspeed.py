"""DeepSpeed's engine on gloo ranks, of the DeepSpeed that ``make`` installs or of one that is there."""

from __future__ import annotations

import logging
import os
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from benchmarks.bench.checkouts import DEEPSPEED

needs_deepspeed = pytest.mark.skipif(
    not DEEPSPEED.is_dir() and not find_spec("deepspeed"), reason="deepspeed is not installed"
)


def engine_of(rank: int, world: int, model: Any, stage: int, **more: Any) -> Any:
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": "29533"}
    sys.path.append(str(DEEPSPEED))
    import deepspeed

    # Otherwise built in each process, where there is a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.ERROR)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        **more,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)[0]
