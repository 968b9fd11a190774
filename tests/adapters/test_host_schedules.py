"""Models that a host hands to Megatron's schedule, and what of NeMo-RL and ms-swift reads whole logits."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_host_heads import IDS, Model

from logitless import Logits
from logitless.adapters.heads import Heads
from logitless.adapters.ms_swift import _reads
from logitless.adapters.nemo_rl_heads import _automodel_reads_few, _step_reads_few, reads_few
from logitless.adapters.schedules import in_schedule


class Stage(torch.nn.Module):
    """A stage of a pipeline without a head."""

    post_process = False


def run(*, model: Any, forward_step_func: Any = None) -> list[Any]:
    chunks = model if isinstance(model, list) else [model]
    return [chunk(IDS) for chunk in chunks if isinstance(chunk, Model)]


def test_every_chunk_is_deferred_and_stages_without_a_head_are_not():
    heads = Heads("deferred")
    models = [Model(), Stage(), Model()]
    found = in_schedule("host").make(lambda: run, {"heads": heads})()(model=models)
    assert [type(x) for x in found] == [Logits, Logits]
    assert heads.lines() == ["logits: not computed (deferred); 2 models so far"]
    (one,) = in_schedule("host").make(lambda: run, {"heads": heads})()(model=models[0])
    assert type(one) is Logits
    heads.undo()
    assert type(models[0](IDS)) is torch.Tensor


def test_a_step_that_reads_whole_logits_gets_them():
    model, heads = Model(), Heads("deferred")
    few = in_schedule("host", reads=lambda forward_step_func, **_: forward_step_func == "few")
    get = few.make(lambda: run, {"heads": heads})
    assert type(get()(model=[model], forward_step_func="few")[0]) is Logits
    assert type(get()(model=[model], forward_step_func="whole")[0]) is torch.Tensor
    assert heads.lines() == ["logits: not computed (deferred); 0 models so far"]


def post(kind: str, **holds: Any) -> Any:
    return type(kind, (), holds)()


def loss_of(kind: str | None) -> Any:
    return SimpleNamespace(input_type=None if kind is None else SimpleNamespace(name=kind))


@pytest.mark.parametrize(
    ("given", "few"),
    [
        (post("LogprobsPostProcessor"), True),
        (post("TopkLogitsPostProcessor"), True),
        (post("LossPostProcessor", loss_fn=loss_of("LOGPROB")), True),
        (post("LossPostProcessor", loss_fn=loss_of("DISTILLATION")), True),
        (post("LossPostProcessor", loss_fn=loss_of("LOGIT")), False),
        (post("LossPostProcessor", loss_fn=loss_of(None)), False),
        (post("FullLogitsPostProcessor"), False),
        (None, False),
    ],
)
def test_post_processors_of_nemo_rl(given, few):
    assert reads_few(given) is few
    assert _step_reads_few(partial(run, post_processing_fn=given)) is few
    assert _step_reads_few(partial(run, post_processing_fn=given, enable_hidden_capture=True)) is False


def test_automodel_of_nemo_rl():
    plain, filtered = (SimpleNamespace(top_k=k, top_p=1.0) for k in (None, 20))
    scored = partial(post, "LogprobsPostProcessor")
    assert _automodel_reads_few(None, scored(cp_size=1, sampling_params=plain))
    assert not _automodel_reads_few(None, scored(cp_size=2, sampling_params=plain))
    assert not _automodel_reads_few(None, scored(cp_size=1, sampling_params=filtered))
    assert _automodel_reads_few(
        None, post("LossPostProcessor", cp_size=1, loss_fn=loss_of("LOGPROB"), sampling_params=filtered)
    )


def test_trainers_of_ms_swift():
    def step(name: str, task: str) -> Any:
        return type(
            name, (), {"args": SimpleNamespace(task_type=task), "forward_step": lambda self: None}
        )().forward_step

    assert _reads(step("MegatronGRPOTrainer", "causal_lm"))
    assert not _reads(step("MegatronGKDTrainer", "causal_lm"))
    assert not _reads(step("MegatronTrainer", "seq_cls"))
