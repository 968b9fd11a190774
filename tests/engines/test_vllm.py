"""vLLM's own functions with the plug-in: the bits of a trainer that has no logits."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_sources import loaded
from torch import Tensor, nn

import logitless as ll
from logitless import LogitlessError
from logitless.adapters.signatures import version_of
from logitless.engines import VARIABLE, plug_into_vllm
from logitless.engines.contract import TRAINER
from logitless.engines.vllm import HOST
from logitless.tools import doctor

T, D, V = 21, 48, 1000
LOGPROB = "vllm.v1.worker.gpu.sample.logprob"


@pytest.fixture(scope="module")
def sources():
    with loaded("vllm") as found:
        yield found


@pytest.fixture
def vllm(sources, monkeypatch) -> SimpleNamespace:
    outputs, logprob, prompt, processor, sampler, requests = sources
    # What vLLM 0.24 does on one rank, too.
    monkeypatch.setattr(processor, "tensor_model_parallel_all_gather", lambda logits: logits)
    given = {"outputs": outputs, "logprob": logprob, "prompt": prompt, "processor": processor, "sampler": sampler}
    return SimpleNamespace(requests=requests, **given)


def operands(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(T, D).to(dtype), (3 * torch.randn(V, D) / D**0.5).to(dtype)
    return hidden, weight, torch.randint(V, (T, 3))


def trainer(hidden: Tensor, weight: Tensor, ids: Tensor, **more: Any) -> Tensor:
    found = ll.logprobs(ll.Logits(hidden, weight, bits="canonical", **more), ids[:, 0], ids=ids).ids_logprobs
    assert found is not None
    return found


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


class Model(nn.Module):
    """A model as far as vLLM's runner asks one for logits."""

    def __init__(self, vllm: SimpleNamespace, weight: Tensor, dtype: torch.dtype, padding: int = 24, **more: Any):
        super().__init__()
        self.logits_processor = vllm.processor.LogitsProcessor(len(weight), **more)
        self.logits_processor.head_dtype = dtype
        method = sys.modules["vllm.model_executor.layers.vocab_parallel_embedding"].UnquantizedEmbeddingMethod()
        method.apply = lambda layer, x, bias=None: torch.nn.functional.linear(x, layer.weight, bias)
        padded = torch.cat([weight, torch.full((padding, weight.shape[1]), 100.0, dtype=weight.dtype)])
        self.lm_head = SimpleNamespace(weight=padded, quant_method=method, tp_size=1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.logits_processor(self.lm_head, hidden)


def has_head() -> bool:
    return version_of(HOST) >= "0.30"


def test_the_plug_in_is_off_unless_asked_for(vllm):
    before = vllm.logprob.compute_token_logprobs
    plug_into_vllm()
    assert vllm.logprob.compute_token_logprobs is before
    assert not ll.status().hosts


def test_log_probs(vllm, monkeypatch):
    """Of the newer runner and of the older one; vLLM's own differ in some bits, which is what the plug-in is for."""
    hidden, weight, ids = operands()
    z = ll.Logits(hidden, weight, bits="canonical")
    logits = (hidden.double() @ weight.double().T).float()
    own = vllm.logprob.compute_token_logprobs(logits, ids)
    monkeypatch.setenv(VARIABLE, "logprobs")
    plug_into_vllm()
    ours = vllm.logprob.compute_token_logprobs(logits, ids)
    assert getattr(vllm.prompt, "compute_token_logprobs", vllm.logprob.compute_token_logprobs) is (
        vllm.logprob.compute_token_logprobs
    )
    found = ll.logprobs(ll.Logits.given(logits, bits="canonical"), ids[:, 0], ids=ids).ids_logprobs
    assert same(ours, found)
    assert same(vllm.sampler.Sampler.compute_logprobs(logits).gather(1, ids), found)
    torch.testing.assert_close(ours, own, rtol=2e-6, atol=2e-6)
    assert not same(ours, own)
    rounded = logits.bfloat16()
    found = ll.logprobs(ll.Logits.given(rounded, bits="canonical"), ids[:, 0], ids=ids).ids_logprobs
    assert same(vllm.logprob.compute_token_logprobs(rounded, ids.int()), found)
    assert same(vllm.sampler.Sampler.compute_logprobs(rounded).gather(1, ids), found)
    assert z.shape == logits.shape
    (report,) = ll.status().hosts
    assert (report.host, report.calls, report.passed_on) == ("vllm", 4, 0)


def test_a_float32_head(vllm, monkeypatch):
    """From vLLM's head to its log-probs: what a trainer gets from the same hidden states, whatever the batch."""
    if not has_head():
        pytest.skip("this version has no float32 head")
    hidden, weight, ids = operands()
    model = Model(vllm, weight, torch.float32)
    plain = model.compute_logits(hidden)
    monkeypatch.setenv(VARIABLE, "logprobs,head")
    plug_into_vllm()
    right = trainer(hidden, weight, ids)
    for rows in (slice(None), slice(3, 4), slice(2, 19)):
        logits = model.compute_logits(hidden[rows])
        assert logits.dtype == torch.float32
        assert logits.shape[1] == V
        assert same(vllm.logprob.compute_token_logprobs(logits, ids[rows]), right[rows])
    torch.testing.assert_close(model.compute_logits(hidden), plain, rtol=1e-5, atol=1e-5)
    bias = torch.randn(V + 24).bfloat16()
    logits = model.logits_processor(model.lm_head, hidden, bias)
    assert same(vllm.logprob.compute_token_logprobs(logits, ids), trainer(hidden, weight, ids, bias=bias[:V]))
    model.lm_head.weight = model.lm_head.weight.float()
    with pytest.raises(LogitlessError, match=r"the weight is torch\.float32 and hidden states are torch\.bfloat16"):
        model.compute_logits(hidden)
    model = Model(vllm, weight, torch.bfloat16)
    assert torch.equal(model.compute_logits(hidden), torch.nn.functional.linear(hidden, weight))


def batch(lengths: list[int], done: int = 0) -> SimpleNamespace:
    """Requests whose prompts are all computed in this step, as the runner hands them to the worker."""
    count = len(lengths)
    start = np.cumsum([0, *lengths])
    return SimpleNamespace(
        req_ids=[f"r{i}" for i in range(count)],
        idx_mapping_np=np.arange(count),
        idx_mapping=torch.arange(count),
        num_computed_prefill_tokens_np=np.full(count, done),
        prefill_len_np=np.array(lengths),
        num_scheduled_tokens=np.array(lengths),
        query_start_loc_np=start,
        query_start_loc=torch.from_numpy(start),
        num_tokens=int(start[-1]),
    )


def worker(vllm: SimpleNamespace, count: int, number: int) -> Any:
    try:
        made = vllm.prompt.PromptLogprobsWorker(count, torch.device("cpu"))
    except TypeError:
        made = vllm.prompt.PromptLogprobsWorker(count)
    made.uses_prompt_logprobs[:], made.num_prompt_logprobs[:] = True, number
    made.in_progress_prompt_logprobs = {f"r{i}": [] for i in range(count)}
    return made


def score_prompts(vllm: SimpleNamespace, model: Model, hidden: Tensor, tokens: Tensor, number: int) -> Any:
    lengths = [T - 8, 8]
    ids = torch.zeros(2, T + 1, dtype=torch.int64)
    for i, part in enumerate(tokens.split(lengths)):
        ids[i, 1 : 1 + len(part)] = part
    given = (ids, torch.zeros(2, dtype=torch.int64), np.array(lengths))
    return worker(vllm, 2, number).compute_prompt_logprobs(model.compute_logits, hidden, batch(lengths), *given)


@pytest.mark.parametrize("number", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_from_hidden_states(vllm, monkeypatch, number: int, dtype: torch.dtype):
    """The tokens, the most likely ones and ranks; and no logits anywhere."""
    if dtype == torch.float32 and not has_head():
        pytest.skip("this version has no float32 head")
    hidden, weight, ids = operands()
    model, tokens = Model(vllm, weight, dtype), ids[:, 0]
    own = score_prompts(vllm, model, hidden, tokens, number)
    monkeypatch.setenv(VARIABLE, "prompt")
    plug_into_vllm()
    made = []
    monkeypatch.setattr(vllm.processor.LogitsProcessor, "_get_logits", lambda *_: made.append(1))
    with torch.inference_mode():
        ours = score_prompts(vllm, model, hidden, tokens, number)
    assert not made
    assert own.keys() == ours.keys() == {"r0", "r1"}
    match: Any = None if dtype == torch.float32 else "bfloat16"
    right = trainer(hidden, weight, ids[:, :1], match=match)[:, 0]
    for key, rows in (("r0", slice(0, T - 9)), ("r1", slice(T - 8, T - 1))):
        x, y = own[key], ours[key]
        assert same(y.logprobs[:, 0].contiguous(), right[rows])
        torch.testing.assert_close(x.logprobs, y.logprobs, rtol=2e-6, atol=4e-6)
        assert x.logprobs.shape == y.logprobs.shape == (rows.stop - rows.start, 1 + number)
        assert x.logprob_token_ids.dtype == y.logprob_token_ids.dtype
        if dtype == torch.float32:
            # Among equal logits, of which a head in 16 bits has many, vLLM counts all and we go by ids.
            assert torch.equal(x.logprob_token_ids, y.logprob_token_ids)
            assert torch.equal(x.selected_token_ranks, y.selected_token_ranks)
        assert bool((y.selected_token_ranks <= x.selected_token_ranks).all())


def test_given_ids_of_a_teacher(vllm, monkeypatch):
    """``prompt_logprob_token_ids``, from 0.32 on: the ids that a student sent."""
    if not hasattr(vllm.prompt.PromptLogprobsWorker, "compute_prompt_token_id_logprobs"):
        pytest.skip("this version has no scores of given ids")
    hidden, weight, ids = operands()
    model = Model(vllm, weight, torch.float32)
    monkeypatch.setenv(VARIABLE, "prompt")
    plug_into_vllm()
    monkeypatch.setattr(vllm.processor.LogitsProcessor, "_get_logits", lambda *_: pytest.fail("logits were made"))
    of = worker(vllm, 1, 0)
    scored = ids[2 : T - 1]
    pad = torch.zeros_like(scored, dtype=torch.bool)
    pad[3, 2] = True
    of.token_id_scores["r0"] = vllm.prompt._TokenIdScores(scored, pad, 2)
    with torch.inference_mode():
        found = of.compute_prompt_token_id_logprobs(model.compute_logits, hidden, batch([T]), np.array([T]))["r0"]
    right = trainer(hidden, weight, ids)[2 : T - 1].masked_fill(pad, -torch.inf)
    assert same(found, right)


def test_a_softcap_and_a_scale(vllm, monkeypatch):
    hidden, weight, ids = operands()
    dtype = torch.float32 if has_head() else torch.bfloat16
    model, tokens = Model(vllm, weight, dtype, scale=0.5, soft_cap=4.0), ids[:, 0]
    own = score_prompts(vllm, model, hidden, tokens, 3)
    monkeypatch.setenv(VARIABLE, "prompt")
    plug_into_vllm()
    ours = score_prompts(vllm, model, hidden, tokens, 3)
    close = {"rtol": 2e-6, "atol": 4e-6} if has_head() else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(own["r0"].logprobs, ours["r0"].logprobs, **close)


def test_what_is_left_to_vllm(vllm, monkeypatch):
    """With its logits, and the same numbers of the tokens."""
    hidden, weight, ids = operands()
    dtype = torch.float32 if has_head() else torch.bfloat16
    model, tokens = Model(vllm, weight, dtype), ids[:, 0]
    monkeypatch.setenv(VARIABLE, "prompt,head" if has_head() else "prompt")
    plug_into_vllm()
    few, many = (score_prompts(vllm, model, hidden, tokens, number)["r0"] for number in (4, 200))
    assert many.logprobs.shape[1] == 201
    if has_head():
        assert same(few.logprobs[:, 0].contiguous(), many.logprobs[:, 0].contiguous())
    (report,) = ll.status().hosts
    why = {entry.name.rpartition(".")[2]: entry.why for entry in report.replaced}
    assert why["compute_prompt_logprobs"] == {"more than 128 log-probs of a token are asked for": 1}
    assert why["forward"] == {"tokens are sampled": 1}


def test_parts_that_are_not_there(vllm, monkeypatch):
    monkeypatch.setenv(VARIABLE, "logprob")
    with pytest.raises(LogitlessError, match=r"no part 'logprob' for vllm. Did you mean 'logprobs'\?"):
        plug_into_vllm()
    monkeypatch.setenv(VARIABLE, "logprobs, head")
    monkeypatch.delattr(vllm.processor.LogitsProcessor, "_apply_head", raising=False)
    monkeypatch.setattr("logitless.adapters.patching.version_of", lambda _: "0.24.0")
    before = vllm.logprob.compute_token_logprobs
    with pytest.raises(LogitlessError, match=r"vllm 0\.24\.0 has no place for head: .*_apply_head: not in 0.24"):
        plug_into_vllm()
    assert vllm.logprob.compute_token_logprobs is before
    assert not ll.status().hosts


def test_another_signature_is_refused(vllm, monkeypatch):
    monkeypatch.setattr(vllm.logprob, "compute_token_logprobs", renamed := lambda logits, ids: None)
    renamed.__module__ = LOGPROB
    monkeypatch.setenv(VARIABLE, "logprobs")
    with pytest.raises(LogitlessError, match="has a signature that this adapter does not know"):
        plug_into_vllm()
    assert vllm.logprob.compute_token_logprobs is renamed


def test_doctor_sees_it(vllm, monkeypatch):
    monkeypatch.setenv(VARIABLE, "logprobs,head")
    monkeypatch.setattr(doctor, "registered", lambda _: False)
    found = doctor._engine("vllm")
    assert found.installs is has_head()
    assert "LOGITLESS_ENGINE asks for logprobs, head" in found.verdict
    assert "no entry point vllm.general_plugins of logitless is installed" in found.verdict
    assert ("no head: " in found.verdict) is not has_head()
    assert not ll.status().hosts
    monkeypatch.setenv(VARIABLE, "logprops")
    assert "there is no part 'logprops' for vllm" in doctor._engine("vllm").verdict


class Asked(SimpleNamespace):
    """Parameters of a request, or a configuration: what is not there was not asked for."""

    def __getattr__(self, name: str) -> Any:
        return None

    def verify(self, *_: Any) -> None:
        assert self.temperature > 0


def test_requests_of_another_distribution_are_refused(vllm, monkeypatch):
    """Where vLLM itself refuses requests, by a contract that the trainer gave."""
    monkeypatch.setenv(VARIABLE, "contract")
    monkeypatch.setenv(TRAINER, '{"temperature": 0.7, "match": "bfloat16", "vocab_size": 1000}')
    plug_into_vllm()
    made, size = object.__new__(vllm.requests.InputProcessor), {"get_vocab_size": lambda: 1000}
    config = {"logprobs_mode": "processed_logprobs", "head_dtype": torch.bfloat16, "hf_text_config": SimpleNamespace()}
    vars(made).update(
        model_config=Asked(**config, **size),
        renderer=SimpleNamespace(tokenizer=None, get_tokenizer=lambda: None),
        validate_logits_processors_params=lambda _: None,
        vllm_config=Asked(_check_supports_watermarking=lambda _: False),
        **dict.fromkeys(("speculative_config", "structured_outputs_config")),
    )
    monkeypatch.setattr(vllm.requests, "SamplingParams", Asked)
    monkeypatch.setattr(vllm.requests, "GENERATION_TASKS", ("generate",))
    made._validate_params(Asked(temperature=0.7), ("generate",))
    with pytest.raises(LogitlessError, match=r"temperature is 1\.0 in the engine and 0\.7 in the head"):
        made._validate_params(Asked(temperature=1.0), ("generate",))
    with pytest.raises(LogitlessError, match="the engine sampled from some ids of the vocabulary"):
        made._validate_params(Asked(temperature=0.7, top_p=0.9), ("generate",))
    (report,) = ll.status().hosts
    assert (report.calls, report.passed_on) == (3, 0)
