"""slime's adapter on one rank: options, memory, overwriting, replay, errors."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hosts import takes
from ranks import close_ranks
from shared.megatron import megatron
from shared.slime import (
    BATCHES,
    DOUBLE,
    Batch,
    Here,
    V,
    arguments,
    check_losses,
    check_scores,
    check_values,
    marks,
    slime,
)
from torch import Tensor

import logitless
from benchmarks.bench.measure import peak_bytes
from logitless import LogitlessError

if DOUBLE:
    sys.path.append(str(Path(__file__).parent / "doubles"))


pytestmark = [
    pytest.mark.skipif(
        not find_spec("megatron") or not find_spec("megatron.core"), reason="megatron-core is not installed"
    ),
    pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def fresh_workers() -> Iterator[None]:
    yield
    close_ranks()


@pytest.fixture
def alone():
    """One process that is a whole Megatron, and slime's modules in it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with megatron():
        yield slime()
    dist.destroy_process_group()


on_the_double = pytest.mark.skipif(not DOUBLE, reason="a shortcut that only the double has")


def test_the_parallel_state_is_the_one_slime_binds(alone, monkeypatch):
    batch = BATCHES[0]
    here = here_alone(alone)
    asked = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(parallel_state, name)

    from megatron.core import parallel_state

    monkeypatch.setattr(alone, "mpu", Watched())
    logitless.install("slime")
    try:
        logits = torch.randn(1, sum(batch.lengths), V)
        alone.get_log_probs_and_entropy(logits, args=here.args, **here.inputs)
    finally:
        logitless.uninstall("slime")
    assert {"get_context_parallel_rank", "get_tensor_model_parallel_group"} <= set(asked)


def here_alone(loss: Any, batch: Batch = BATCHES[0], **more: Any) -> Here:
    inputs = {"unconcat_tokens": batch.tokens(), "total_lengths": batch.lengths, "response_lengths": batch.responses}
    return Here(loss, arguments(**more), batch, inputs, 1, 0, 1, 0)


@pytest.mark.parametrize("allgather", [False, True])
def test_one_rank(alone, allgather):
    for check in (check_scores, check_values, check_losses):
        check(here_alone(alone, allgather_cp=allgather))


def test_only_rows_that_count_are_scored(alone):
    """A NaN in a row that the mask drops does not reach the loss."""
    here = here_alone(alone)
    masks = [torch.ones(r) for r in here.batch.responses]
    masks[1][4] = 0
    stream = torch.randn(sum(here.batch.lengths), V)
    stream[here.batch.places()[1]][4] = math.nan
    batch = here.inputs | marks(masks)
    logits = here.part(stream)[None].requires_grad_()
    args = arguments(loss_type="sft_loss")
    assert alone.loss_function(args, batch, 1, 1, logits)[0].isnan()
    logitless.install("slime", loss_mask_only=True)
    loss = alone.loss_function(args, batch, 1, 1, logits)[0]
    assert loss.isfinite()
    loss.backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("replay", [False, True])
def test_memory(alone, replay):
    """Training: one gradient beside the logits. Without gradients: the working memory alone."""
    _skip_without_replay(alone, replay)
    batch = Batch([100, 120], [70, 110], 0)
    here = here_alone(alone, batch, entropy_coef=0.0, log_probs_chunk_size=8)
    ids, offsets = batch.recorded()
    more = {"top_p_token_ids": ids, "top_p_token_offsets": offsets} if replay else {}
    size = 4 * 220 * 5000
    logits = torch.randn(1, 220, 5000, requires_grad=True)

    def train() -> None:
        results = alone.get_log_probs_and_entropy(logits, args=here.args, **here.inputs, with_entropy=True, **more)[1]
        torch.autograd.grad(torch.cat(results["log_probs"]).sum(), logits)

    def score() -> None:
        with torch.no_grad():
            alone.get_log_probs_and_entropy(logits, args=here.args, **here.inputs, with_entropy=True, **more)

    assert peak_bytes(train, logits.device) > 2 * size
    logitless.install("slime")
    slack = 2**20
    assert peak_bytes(train, logits.device) < size + slack
    assert peak_bytes(score, logits.device) < slack


@pytest.mark.parametrize("strided", [False, True])
def test_the_logits_are_overwritten_if_asked(alone, strided):
    """Megatron's output of a pack is a transposed view of the head's output; the gradient goes into that memory."""
    here = here_alone(alone)
    T = sum(here.batch.lengths)
    hidden, weight = torch.randn(T, 16, requires_grad=True), torch.randn(V, 16)
    seen = []

    def run() -> tuple[Tensor, int]:
        made = (hidden @ weight.T)[:, None] if strided else (hidden @ weight.T)[None]
        whole = made._base if made._base is not None else made
        logits = made.transpose(0, 1) if strided else made
        results = alone.get_log_probs_and_entropy(logits, args=here.args, **here.inputs, with_entropy=True)[1]
        whole.register_hook(lambda g: seen.append(g.data_ptr() == whole.data_ptr()))
        loss = torch.cat(results["log_probs"]).sum() + torch.cat(results["entropy"]).sum()
        return torch.autograd.grad(loss, hidden)[0], 0

    logitless.install("slime")
    plain, _ = run()
    logitless.uninstall("slime")
    logitless.install("slime", overwrite_logits=True, audit=3)
    over, _ = run()
    assert seen == [False, True]
    assert torch.equal(plain, over)
    assert logitless.status().hosts[0].audit.passed
    with pytest.raises(LogitlessError, match="entropy: overwrite_logits=True, but these logits are a leaf"):
        alone.get_log_probs_and_entropy(torch.randn(1, T, V, requires_grad=True), args=here.args, **here.inputs)
    with torch.no_grad():
        alone.get_log_probs_and_entropy(torch.randn(1, T, V), args=here.args, **here.inputs)


def _skip_without_replay(loss: Any, replay: bool = True) -> None:
    if replay and not takes(loss.get_log_probs_and_entropy, "top_p_token_ids"):
        pytest.skip("not in this release")


@on_the_double
def test_names_held_by_value(alone):
    from slime.backends.megatron_utils import actor
    from slime.backends.megatron_utils.server import logprob_utils

    here = here_alone(alone)
    logits = torch.randn(1, 34, V)
    before = actor.compute_log_prob(here.args, here.inputs, logits)
    logitless.install("slime")
    after = actor.compute_log_prob(here.args, here.inputs, logits)
    logprob_utils.teacher_log_probs(here.args, here.inputs, logits)
    actor.compute_values(here.args, here.inputs, logits[..., :1])
    assert [entry.calls for entry in logitless.status().hosts[0].replaced] == [0, 2, 1]
    assert not after[0].requires_grad
    for a, b in zip(after, before, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    logitless.uninstall("slime")
    assert actor.get_values is alone.get_values


def test_replay_without_a_record_is_left_to_slime(alone):
    _skip_without_replay(alone)
    here = here_alone(alone)
    ids, offsets = here.batch.recorded()
    more = {"top_p_token_ids": ids, "top_p_token_offsets": [offsets[0], offsets[1][:5], offsets[2]]}
    logits = torch.randn(1, 34, V)
    before = alone.get_log_probs_and_entropy(logits, args=here.args, **here.inputs, **more)[1]["log_probs"]
    logitless.install("slime")
    after = alone.get_log_probs_and_entropy(logits, args=here.args, **here.inputs, **more)[1]["log_probs"]
    report = logitless.status().hosts[0].replaced[1]
    assert (report.calls, report.passed_on) == (1, 1)
    assert report.why == {"replay without a record": 1}
    for a, b in zip(after, before, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@on_the_double
def test_the_init_hook(alone):
    from slime.backends.megatron_utils import initialize

    path = "logitless.adapters.slime.custom_megatron_init"
    initialize.init(arguments(custom_megatron_init_path=path))
    assert dict(logitless.status().hosts[0].options)["response_only"]
    assert not dict(logitless.status().hosts[0].options)["any_version"]
    logitless.uninstall("slime")
    asked = {"log_probs_loss_mask_only": True, "logitless_audit": 2, "logitless_any_version": True}
    initialize.init(arguments(custom_megatron_init_path=path, **asked))
    options = dict(logitless.status().hosts[0].options)
    assert options["loss_mask_only"]
    assert options["audit"] == 2
    assert options["any_version"]


def test_loss_mask_only_wants_response_only(alone):
    with pytest.raises(LogitlessError, match="loss_mask_only=True selects among response rows"):
        logitless.install("slime", loss_mask_only=True, response_only=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(1, 34, V).bfloat16()}, r"logits must be float32 \[1, T, V'\], one pack"),
        ({"logits": torch.zeros(2, 34, V)}, r"logits must be float32 \[1, T, V'\].* \[2, 34, 506\]"),
        ({"logits": torch.zeros(1, 20, V)}, "num_tokens is 20 but the samples need 29"),
        ({"total_lengths": [9, 14, 7]}, r"unconcat_tokens have lengths \[9, 14, 6\] but total_lengths is \[9, 14, 7\]"),
        ({"total_lengths": [9, 14]}, r"total_lengths is \[9, 14\]"),
        ({"response_lengths": [4, 13]}, "3 samples but 2 response_lengths"),
        ({"response_lengths": [9, 13, 2]}, "sample 0 has an empty prompt"),
        ({"args": arguments(rollout_temperature=0.0)}, "temperature must be a positive finite number"),
        (
            {"top_p_token_ids": [[1]], "top_p_token_offsets": [[0, 1]]},
            "top_p_token_ids has 1 samples and top_p_token_offsets 1, but there are 3 response_lengths",
        ),
    ],
)
def test_errors_name_the_host_function(alone, change, message):
    here = here_alone(alone)
    if not change.keys() <= inspect.signature(alone.get_log_probs_and_entropy).parameters.keys():
        pytest.skip("not in this release")
    logitless.install("slime")
    given = {"logits": torch.zeros(1, 34, V), "args": here.args} | here.inputs | change
    with pytest.raises(LogitlessError, match=rf"^slime\.[a-z_.]+\.get_log_probs_and_entropy: .*{message}"):
        alone.get_log_probs_and_entropy(given.pop("logits"), **given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f, z, t: f(z[0], t, dist.group.WORLD), r"calculate_\w+: logits must be \[N, V'\] but is \[506\]"),
        (lambda f, z, t: f(z, t[:2], dist.group.WORLD), r"tokens must be \[3\] but is \[2\]"),
        (
            lambda f, z, t: f(z, t, dist.group.WORLD, log_prob_keep_mask=z),
            r"log_prob_keep_mask must be bool \[3, 506\] like logits but is torch.float32",
        ),
    ],
)
def test_errors_of_calculate(alone, call, message):
    if "keep_mask" in message and not takes(alone.calculate_log_probs_and_entropy, "log_prob_keep_mask"):
        pytest.skip("not in this release")
    logitless.install("slime")
    with pytest.raises(LogitlessError, match=message):
        call(alone.calculate_log_probs_and_entropy, torch.randn(3, V), torch.zeros(3, dtype=torch.int64))
