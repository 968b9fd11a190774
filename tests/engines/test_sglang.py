"""SGLang's own sampler, prompt scoring, head and plug-in loader with ours: the bits of a trainer that has no logits."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_sources import loaded
from torch import Tensor

import logitless as ll
from logitless.engines import VARIABLE, plug_into_sglang

T, D, V = 21, 48, 1000


@pytest.fixture(scope="module")
def sources():
    with loaded("sglang") as found:
        yield found


@pytest.fixture
def sglang(sources, monkeypatch) -> SimpleNamespace:
    prompt, head, sampler, logsumexp, plugins = sources
    # SGLang's own kernel, and what it asks of the machine.
    monkeypatch.setattr(sampler, "sampler_softmax", lambda x: x.softmax(-1))
    monkeypatch.setattr(
        prompt, "get_exec", lambda: SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=True))
    )
    for module in (sampler, head):
        switch = SimpleNamespace(get=lambda: False)
        names = ("SGLANG_TRACE_SAMPLER_E2E", "SGLANG_TRACE_LOGITS_E2E", "SGLANG_OPT_USE_GUMBEL_SAMPLE")
        monkeypatch.setattr(module, "envs", SimpleNamespace(**dict.fromkeys(names, switch)))
    return SimpleNamespace(prompt=prompt, head=head, sampler=sampler, logsumexp=logsumexp, plugins=plugins)


def operands() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(T, D).bfloat16(), (3 * torch.randn(V, D) / D**0.5).bfloat16()
    return hidden, weight, torch.randint(V, (T, 3))


def trainer(hidden: Tensor, weight: Tensor, ids: Tensor, **more: Any) -> ll.TokenStats:
    return ll.logprobs(ll.Logits(hidden, weight, bits="canonical"), ids[:, 0], ids=ids, **more)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.view(torch.int32))


def head_of(sglang: SimpleNamespace, fp32: bool = True) -> Any:
    made = object.__new__(sglang.head.LogitsProcessor)
    torch.nn.Module.__init__(made)
    made.use_fp32_lm_head, made.use_fp32_lm_head_output, made.rl_on_policy_target = fp32, False, None
    return made


def sampler_of(sglang: SimpleNamespace) -> Any:
    made = object.__new__(sglang.sampler.Sampler)
    torch.nn.Module.__init__(made)
    made.rl_on_policy_target, made.enable_deterministic, made.use_log_softmax_logprob = None, False, False
    made.use_ascend_backend, made.tp_sync_group, made.cp_sync_group = False, None, None
    made.output_logprob_processor = sglang.prompt.OutputLogprobProcessor()
    made._sample_from_probs = lambda probs, *_: (probs.argmax(-1), None)
    made._sync_token_ids_across_tp = lambda *_: None
    return made


def sampling(temperature: float | None) -> SimpleNamespace:
    count = {"temperatures": None if temperature is None else torch.full((T, 1), temperature)}
    needs = dict.fromkeys(("need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling"), False)
    masks = dict.fromkeys(("sampling_mask_batch_indices", "sampling_support_logprobs_capture_indices"))
    return SimpleNamespace(
        is_all_greedy=temperature is None, has_custom_logit_processor=False, grammars=None, **count, **needs, **masks
    )


def sample(sglang: SimpleNamespace, logits: Tensor, temperature: float | None, ids: Tensor, **more: Any) -> Any:
    output = sglang.head.LogitsProcessorOutput(next_token_logits=logits.clone())
    given = (output, sampling(temperature), True, [2] * T, ids.tolist(), torch.arange(T))
    return sampler_of(sglang)(*given, **more), output


@pytest.mark.parametrize("temperature", [None, 1.0, 0.7, 1.1])
def test_sampled_tokens(sglang, monkeypatch, temperature: float | None):
    """Greedy ones, and random ones over the temperature, which a trainer has in its ``Head`` as a number."""
    hidden, weight, ids = operands()
    logits = torch.matmul(hidden.float(), weight.float().T)
    own_ids, own = sample(sglang, logits, temperature, ids)
    monkeypatch.setenv(VARIABLE, "logprobs,head")
    plug_into_sglang()
    logits = head_of(sglang)._compute_lm_head(hidden, SimpleNamespace(weight=weight))
    sampled, output = sample(sglang, logits, temperature, ids)
    assert torch.equal(own_ids, sampled)
    head = ll.Head(temperature=temperature or 1.0)
    right = trainer(hidden, weight, torch.cat([sampled[:, None].long(), ids], 1), head=head)
    assert same(output.next_token_logprobs, right.logprob)
    assert same(torch.stack(output.next_token_token_ids_logprobs_val), right.ids_logprobs[:, 1:].contiguous())
    assert all(
        torch.equal(a, b)
        for a, b in zip(own.next_token_top_logprobs_idx, output.next_token_top_logprobs_idx, strict=True)
    )
    assert not same(own.next_token_logprobs, right.logprob)
    torch.testing.assert_close(own.next_token_logprobs, output.next_token_logprobs, rtol=2e-6, atol=4e-6)
    (report,) = ll.status().hosts
    assert not report.passed_on


def test_log_probs_of_other_logits(sglang, monkeypatch):
    """Those before a watermark, where SGLang hands them over; and no others than were asked for."""
    hidden, weight, ids = operands()
    monkeypatch.setenv(VARIABLE, "logprobs,head")
    plug_into_sglang()
    logits = head_of(sglang)._compute_lm_head(hidden, SimpleNamespace(weight=weight))
    sampled, output = sample(sglang, 2 * logits, 0.7, ids, logprob_logits=logits.clone())
    right = trainer(hidden, weight, sampled[:, None].long(), head=ll.Head(temperature=0.7))
    assert same(output.next_token_logprobs, right.logprob)
    sampler = sampler_of(sglang)
    output = sglang.head.LogitsProcessorOutput(next_token_logits=logits.clone())
    sampler(output, sampling(None), False, [0] * T, [None] * T, torch.arange(T))
    assert output.next_token_logprobs is None
    sampler.rl_on_policy_target = "fsdp"
    with pytest.raises(ll.LogitlessError, match="rl_on_policy_target='fsdp' rounds logits to bfloat16 once more"):
        sampler(output, sampling(0.7), True, [0] * T, [None] * T, torch.arange(T))


def test_prompts(sglang, monkeypatch):
    """In chunks, under deterministic inference, with the most likely tokens and given ids."""
    hidden, weight, ids = operands()
    monkeypatch.setenv(VARIABLE, "logprobs,head")
    plug_into_sglang()
    head, module = head_of(sglang), SimpleNamespace(weight=weight)
    made = object.__new__(sglang.prompt.InputLogprobProcessor)
    made.enable_logprobs_chunk, made.logprobs_chunk_size, made.vocab_size = True, 8, V
    made.enable_fast_input_logprobs, made.chunking_group = False, None
    metadata = SimpleNamespace(
        sample_indices_cpu=[T - 1],
        input_logprob_indices_cpu=list(range(T)),
        extend_return_top_logprob=True,
        extend_token_ids_logprob=True,
        top_logprobs_nums=[4],
        token_ids_logprobs=[[3, 5, 7]],
        extend_logprob_pruned_lens_cpu=[T],
        extend_input_logprob_token_ids_gpu=ids[:, 0],
    )
    result, _ = made.forward(
        hidden,
        torch.tensor([T - 1]),
        torch.arange(T),
        [0] * T,
        module,
        lambda states, lm_head, *_, **__: head._compute_lm_head(states, lm_head),
        metadata,
    )
    right = trainer(hidden, weight, torch.cat([ids[:, :1], torch.tensor([[3, 5, 7]]).expand(T, -1)], 1), top_k=4)
    assert same(result.token_logprobs, right.logprob)
    assert same(torch.tensor(result.top_logprobs_val[0]), right.top_k_logprobs)
    assert torch.equal(torch.tensor(result.top_logprobs_idx[0]), right.top_k_ids)
    assert same(torch.tensor(result.token_ids_logprobs_val[0]), right.ids_logprobs[:, 1:].contiguous())


def test_the_fused_kernel_of_prompts(sglang, monkeypatch):
    """Its most likely tokens stay SGLang's, and its normaliser is ours. The kernel itself runs on a GPU."""
    _, _, ids = operands()
    logits = torch.randn(T, V)

    def row_logsumexp_topk(x, k):
        best = x.topk(k)
        return x.amax(-1), (x - x.amax(-1, keepdim=True)).logsumexp(-1), best.values, best.indices

    row_logsumexp_topk.__module__ = sglang.logsumexp.__name__
    monkeypatch.setattr(sglang.logsumexp, "row_logsumexp_topk", row_logsumexp_topk)
    monkeypatch.setenv(VARIABLE, "logprobs")
    plug_into_sglang()
    m, s, values, columns = sglang.logsumexp.row_logsumexp_topk(logits, 3)
    right = ll.logprobs(ll.Logits.given(logits, bits="canonical"), ids[:, 0], top_k=3)
    assert same((values - m[:, None]) - s[:, None], right.top_k_logprobs)
    assert torch.equal(columns, right.top_k_ids)


def test_heads_that_are_left_to_sglang(sglang, monkeypatch):
    hidden, weight, _ = operands()
    monkeypatch.setenv(VARIABLE, "head")
    plug_into_sglang()
    module = SimpleNamespace(weight=weight)
    assert torch.equal(head_of(sglang, fp32=False)._compute_lm_head(hidden, module), hidden @ weight.T)
    buffer = torch.empty(T, V)
    assert head_of(sglang)._compute_lm_head(hidden, module, out=buffer) is buffer
    assert head_of(sglang)._compute_lm_head(hidden, module, out=torch.empty(2, V)).shape == (T, V)
    with pytest.raises(ll.LogitlessError, match=r"the weight is torch\.float32"):
        head_of(sglang)._compute_lm_head(hidden, SimpleNamespace(weight=weight.float()))


def test_sglang_finds_the_plug_in_and_does_not_start_without_it(sglang, monkeypatch):
    """SGLang's loader logs what a plug-in raises, and goes on; what was asked for would silently not be there."""
    name = "logitless"
    point = importlib.metadata.EntryPoint(name, "logitless.engines:plug_into_sglang", "sglang.srt.plugins")
    monkeypatch.setattr(sglang.plugins, "entry_points", lambda group: [point] if group == point.group else [])
    empty = SimpleNamespace(get=lambda: "")
    monkeypatch.setattr(sglang.plugins, "envs", SimpleNamespace(SGLANG_PLUGINS=empty, SGLANG_PLATFORM=empty))
    for asked, replaced in (("", 0), ("logprobs", 1)):
        monkeypatch.setenv(VARIABLE, asked)
        monkeypatch.setattr(sglang.plugins, "_plugins_loaded", False)
        sglang.plugins.load_plugins()
        assert len(ll.status().hosts) == replaced
    ll.uninstall("sglang")
    monkeypatch.setenv(VARIABLE, "prompt")
    monkeypatch.setattr(sglang.plugins, "_plugins_loaded", False)
    with pytest.raises(SystemExit, match="there is no part 'prompt' for sglang"):
        sglang.plugins.load_plugins()
