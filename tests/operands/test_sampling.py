"""The contract of a distribution: what an engine did, beside the trainer's head."""

from __future__ import annotations

import ast
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import logitless as ll
from benchmarks.bench.checkouts import checkout
from logitless.operands.sampling import ALTERING, Sampling

HEAD = ll.Head(temperature=0.7, softcap=30.0, vocab_size=1000)
SAME = Sampling(temperature=0.7, softcap=30.0, vocab_size=1000)

DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": 1.0}, "temperature is 1.0 in the engine and 0.7 in the head"),
    "greedy": ({"temperature": 0.0}, "temperature is 0.0 in the engine and 0.7 in the head"),
    "scale": ({"scale": 0.25}, "scale is 0.25 in the engine and 1.0 in the head"),
    "softcap": ({"softcap": None}, "softcap is None in the engine and 30.0 in the head"),
    "vocabulary": ({"vocab_size": 1024}, "vocab_size is 1024 in the engine and 1000 in the head"),
    "dtype": ({"head": "bfloat16"}, "logits are rounded to bfloat16 in the engine, and match is None in the trainer"),
    "raw": ({"logprobs": "raw"}, "the engine's log-probs are of logits before the temperature"),
    "lost": ({"truncated": True, "logprobs": "kept"}, "sampled from some ids of the vocabulary, and it did not record"),
    "ids": ({"truncated": True, "recorded": True, "logprobs": "kept"}, "is recorded: score with kept="),
    "penalty": ({"altered": ("min_tokens",)}, "the engine changed logits by min_tokens, which the trainer does not"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_each_difference_is_named(name: str):
    changes, text = DIFFERENT[name]
    engine = replace(SAME, **changes)
    assert any(text in x for x in engine.differences(HEAD))
    with pytest.raises(ll.LogitlessError, match="the engine and the trainer have two distributions"):
        engine.check(HEAD)


def test_what_is_the_same_is_not_named():
    SAME.check(HEAD)
    SAME.check(replace(HEAD, temperature=torch.full((5,), 0.7, dtype=torch.float64)))
    SAME.check(replace(HEAD, temperature=torch.full((5,), 0.7)))
    SAME.check(replace(HEAD, temperature=torch.tensor([])))
    replace(SAME, head="bfloat16").check(HEAD, match="bfloat16")
    kept = replace(SAME, truncated=True, recorded=True, logprobs="kept")
    kept.check(HEAD, kept=True)
    assert kept.differences(HEAD) != []
    assert replace(kept, logprobs="scaled").differences(HEAD, kept=True) == [
        "the engine's log-probs are over the whole vocabulary, and its tokens from the ids it kept"
    ]
    assert SAME.differences(HEAD, kept=True) == [
        "the trainer scores over kept ids, and the engine sampled from the whole vocabulary"
    ]
    assert len(replace(SAME, scale=2.0, head="float16").differences(ll.Head())) == 5
    several = replace(HEAD, temperature=torch.tensor([0.5, 1.0]))
    assert SAME.differences(several) == ["temperature is 0.7 in the engine and [0.5, 1.0] in the head"]
    with pytest.raises(ll.LogitlessError, match="logprobs must be one of"):
        Sampling(logprobs="processed")  # type: ignore[arg-type]


def vllm_config(**more: Any) -> SimpleNamespace:
    model = SimpleNamespace(final_logit_softcapping=30.0)
    given = {"logprobs_mode": "processed_logprobs", "head_dtype": torch.bfloat16, "hf_text_config": model, **more}
    return SimpleNamespace(get_vocab_size=lambda: 1000, **given)


def test_vllm():
    params = SimpleNamespace(temperature=0.7, top_k=0, top_p=1.0, min_p=0.0, **ALTERING)
    found = Sampling.of_vllm(params, vllm_config())
    assert found == replace(SAME, head="bfloat16", logprobs="kept")
    found.check(HEAD, match="bfloat16")
    params.top_p, params.logit_bias, params.min_tokens = 0.9, {3: 1.0}, 2
    found = Sampling.of_vllm(params, vllm_config(logprobs_mode="raw_logprobs", return_sampling_mask=True))
    assert (found.truncated, found.recorded, found.logprobs) == (True, True, "raw")
    assert found.altered == ("logit_bias", "min_tokens")
    granite = vllm_config(hf_text_config=SimpleNamespace(logits_scaling=8.0), head_dtype=torch.float32)
    assert (Sampling.of_vllm(params, granite).scale, Sampling.of_vllm(params, granite).head) == (0.125, "float32")


def test_sglang():
    config = SimpleNamespace(vocab_size=1000, final_logit_softcapping=30.0, dtype=torch.bfloat16)
    auto = SimpleNamespace(enable_fp32_lm_head=False, dtype="auto")
    request = {"temperature": 0.7, "top_k": 1 << 30, "top_p": None}
    found = Sampling.of_sglang(request, auto, config)
    assert found == replace(SAME, head="bfloat16")
    request |= {"min_p": 0.1, "regex": "a+"}
    wide = SimpleNamespace(enable_fp32_lm_head=True, dtype="auto")
    found = Sampling.of_sglang(request, wide, config, original=True, recorded=True)
    assert (found.truncated, found.recorded, found.logprobs, found.head) == (True, True, "raw", "float32")
    assert found.altered == ("regex",)


READ = {
    ("vllm", "vllm/sampling_params.py"): ("temperature", "top_k", "top_p", "min_p", "logit_bias", "min_tokens"),
    ("vllm", "vllm/config/model.py"): ("logprobs_mode", "return_sampling_mask", "head_dtype", "get_vocab_size"),
    ("sglang", "sglang/srt/sampling/sampling_params.py"): ("temperature", "top_k", "top_p", "min_p", "min_new_tokens"),
    ("sglang", "sglang/srt/server_args.py"): ("enable_fp32_lm_head", "dtype"),
}
"""What is read of the engines' own classes, and where they have it."""


@pytest.mark.skipif(not (checkout("vllm") and checkout("sglang")), reason="LOGITLESS_HOSTS names no engines")
def test_the_engines_have_what_is_read():
    seen: set[str] = set()
    for (host, path), names in READ.items():
        tree = ast.walk(ast.parse((checkout(host) / path).read_text()))
        found = {
            x.target.id if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name) else getattr(x, "name", "")
            for x in tree
        }
        assert set(names) <= found, (path, set(names) - found)
        seen |= found
    assert set(ALTERING) <= seen
