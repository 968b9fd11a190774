"""``Kept.from_engine`` on what the rollout engines' own classes return, out of their sources.

``LOGITLESS_HOSTS`` names a folder with ``vllm-main`` and ``sglang-main``, each with its package at the top. Classes are
taken out of the files that define them: the packages themselves import kernels.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import logitless as ll
from benchmarks.bench.checkouts import checkout

ROWS = ll.Rows.packed([[1, 2, 3, 4], [5, 6, 7]], [2, 1])


def taken(path: Path, *names: str, **known: Any) -> SimpleNamespace:
    """Classes and functions of a file by name, wherever they stand in it, without the rest of the file."""
    found = [x for x in ast.walk(ast.parse(path.read_text())) if getattr(x, "name", None) in names]
    assert len(found) == len(names), f"{path} has no longer each of {names}"
    space: dict[str, Any] = {"__name__": __name__, **known}
    source = "from __future__ import annotations\n" + "\n".join(ast.unparse(x) for x in found)
    exec(compile(source, str(path), "exec"), space)
    return SimpleNamespace(**{name: space[name] for name in names})


@pytest.mark.skipif(checkout("vllm") is None, reason="LOGITLESS_HOSTS names no checkout of vLLM")
def test_vllm():
    """What its output processor makes of the chunks of a request, and the chunks themselves."""
    root = checkout("vllm")
    assert root is not None
    given = {"dataclass": dataclass, "NamedTuple": NamedTuple, "np": np, "Sequence": Sequence}
    mask = taken(root / "vllm/outputs.py", "SamplingMask", **given).SamplingMask
    lists = taken(root / "vllm/v1/outputs.py", "SamplingMaskLists", **given).SamplingMaskLists
    chunks = [lists(np.array([3, 9], np.int32), np.array([0, 2])), lists(np.array([4], np.int32), np.array([0, 1]))]
    merged = lists.merge(chunks)
    other = lists(np.array([7, 8], np.int32), np.array([0, 2]))
    for first, second in (
        (mask(merged.to_nested_list()), mask(other.to_nested_list())),
        (SimpleNamespace(token_ids=[1, 2], sampling_mask=mask(merged.to_nested_list())), mask([[7, 8]])),
        (merged, other),
    ):
        kept = ll.Kept.from_engine(ROWS, [first, second])
        assert (kept.ids.tolist(), kept.lengths.tolist()) == ([3, 9, 4, 7, 8], [2, 1, 2])


@pytest.mark.skipif(checkout("sglang") is None, reason="LOGITLESS_HOSTS names no checkout of SGLang")
def test_sglang():
    """What its sampler records of two requests, and its scheduler collects token by token."""
    root = checkout("sglang")
    assert root is not None
    srt = root / "sglang/srt"
    name = "_attach_greedy_sampling_mask_to_output"
    attach = getattr(taken(srt / "layers/sampler.py", name, torch=torch), name)
    name = "add_sampling_mask_return_values"
    collect = getattr(taken(srt / "managers/scheduler_components/batch_result_processor.py", name), name)
    requests = [SimpleNamespace(output_token_sampling_mask=[], output_token_sampling_logprobs=[]) for _ in range(2)]
    for step, sampled in enumerate(([3, 7], [4, 0])):
        output, info = SimpleNamespace(), SimpleNamespace(return_sampling_masks=[True, step == 0])
        attach(None, output, info, torch.tensor(sampled))
        for i, request in enumerate(requests):
            collect(None, i, request, output)
    first, second = (x.output_token_sampling_mask for x in requests)
    kept = ll.Kept.from_engine(ROWS, [first, second[:1]])
    assert (kept.ids.tolist(), kept.lengths.tolist()) == ([3, 4, 7], [1, 1, 1])
    with pytest.raises(ll.LogitlessError, match="has no list of ids for response token 1 but NoneType"):
        ll.Kept.from_engine(ll.Rows.packed([[1, 2, 3]], [2]), [second])
