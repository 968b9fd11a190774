"""``Kept.from_engine`` on what the rollout engines' own classes return, out of their sources.

``LOGITLESS_HOSTS`` names a folder with ``vllm-0.32.0`` and ``sglang-0.5.23``, each with its package at the top; of
several versions the newest is taken. Classes are taken out of the files that define them: the packages themselves
import kernels.
"""

from __future__ import annotations

import ast
import pickle
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional, Union

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


class Struct:
    """As far as SGLang's classes make use of msgspec's."""

    def __init_subclass__(cls, **_: Any) -> None:
        dataclass(cls)


@pytest.mark.skipif(checkout("vllm") is None, reason="LOGITLESS_HOSTS names no checkout of vLLM")
def test_vllm():
    """What its output processor makes of the steps of a request, and the step itself."""
    root = checkout("vllm")
    assert root is not None
    if "class SamplingMaskLists" not in (root / "vllm/v1/outputs.py").read_text():
        pytest.skip("this version records no ids")
    given = {"dataclass": dataclass, "NamedTuple": NamedTuple, "np": np, "Sequence": Sequence}
    mask = taken(root / "vllm/outputs.py", "SamplingMask", **given).SamplingMask
    lists = taken(root / "vllm/v1/outputs.py", "SamplingMaskLists", **given).SamplingMaskLists
    # A step of two requests, and one more of the first.
    steps = [lists(np.array([3, 9, 7, 8], np.int32), np.array([0, 2, 4])), lists(np.array([4], np.int32))]
    first = [*steps[0].slice_request(0, 1).to_nested_list(), *steps[1].to_nested_list()]
    second = steps[0].slice_request(1, 1).to_nested_list()
    whole, other = (
        lists(np.array(ids, np.int32), np.array(at)) for ids, at in (([3, 9, 4], [0, 2, 3]), ([7, 8], [0, 2]))
    )
    for a, b in (
        (mask(first), mask(second)),
        (SimpleNamespace(token_ids=[1, 2], sampling_mask=mask(first)), mask(second)),
        (whole, other),
    ):
        kept = ll.Kept.from_engine(ROWS, [a, b])
        assert (kept.ids.tolist(), kept.lengths.tolist()) == ([3, 9, 4, 7, 8], [2, 1, 2])


@pytest.mark.skipif(checkout("sglang") is None, reason="LOGITLESS_HOSTS names no checkout of SGLang")
def test_sglang():
    """What its scheduler collects token by token, sends in chunks, and its tokenizer manager makes lists of."""
    root = checkout("sglang")
    assert root is not None
    path = root / "sglang/srt/sampling/sampling_mask.py"
    if not path.is_file():
        pytest.skip("this version has another transport of sampling masks")
    known = {"np": np, "array": array, "sys": sys, "pickle": pickle, "List": list, "Optional": Optional}
    known |= {"Tuple": tuple, "Union": Union, "msgspec": SimpleNamespace(Struct=Struct, field=field)}
    names = ("SamplingMaskChunk", "_GrowableArray", "SamplingMaskRows")
    rows = taken(path, *names, **known).SamplingMaskRows
    requests = [rows(), rows()]
    for ids in ([3, 9], [4]):
        requests[0].append(np.array(ids, np.int32), np.zeros(1, np.float32))
    requests[1].append(np.array([7, 8], np.int32), np.zeros(1, np.float32))
    chunks = [request.take() for request in requests]
    for supports in (chunks, [chunk.to_lists(False)[0] for chunk in chunks]):
        kept = ll.Kept.from_engine(ROWS, supports)
        assert (kept.ids.tolist(), kept.lengths.tolist()) == ([3, 9, 4, 7, 8], [2, 1, 2])
    with pytest.raises(ll.LogitlessError, match="has no list of ids for response token 1 but NoneType"):
        ll.Kept.from_engine(ll.Rows.packed([[1, 2, 3]], [2]), [[[3], None]])
    assert isinstance(chunks[0].lengths, np.ndarray)
    assert torch.is_tensor(ll.Kept.from_engine(ROWS, chunks).ids)


def test_rows_of_another_kind_are_named_by_the_function_that_was_called():
    for rows in (None, [0, 1], torch.tensor([0, 1])):
        with pytest.raises(ll.LogitlessError, match=r"^Kept\.from_engine: rows must be a Rows but is "):
            ll.Kept.from_engine(rows, [[[1], [2]], [[3]]])  # pyright: ignore[reportArgumentType]
