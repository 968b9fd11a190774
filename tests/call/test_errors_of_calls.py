"""Errors of calls: one thing where another is wanted, logits, targets, shards, overwriting, backends."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from calls import loss_from_hidden
from shared.errors import logits_and_rows, raises

from logitless import (
    Head,
    Logits,
    Objective,
    Rows,
    TokenStats,
    VocabShard,
    defer,
    logprobs,
    policy_loss,
)
from logitless.backends import choose_backend
from logitless.errors import did_you_mean


class TestRowsOfOneSample:
    TAIL = ". One sample is [tokens]; samples that are already end to end in one tensor are tokens.split(lengths)."

    @pytest.mark.parametrize(
        ("tokens", "came"),
        [
            (torch.tensor([1, 2, 3]), "one tensor of shape [3]"),
            (torch.tensor(3), "one tensor of shape []"),
            ([1, 2, 3], "one list of ids"),
            (5, "int"),
        ],
    )
    def test_tokens(self, tokens, came):
        text = f"Rows.packed: tokens must be a list of samples, each a list or 1-D tensor of ids, but is {came}"
        with raises(text + self.TAIL):
            Rows.packed(tokens, [2])

    def test_a_list_of_ids_that_is_padded(self):
        with raises("Rows.padded: tokens must be a list of samples"):
            Rows.padded([1, 2, 3], [2])

    @pytest.mark.parametrize("lengths", [2, torch.tensor(2)])
    def test_response_lengths(self, lengths):
        text = f"Rows.packed: response_lengths must be a list, the response tokens of each sample, but is {lengths!r}."
        with raises(f"{text} The same for all is [n] * len(tokens)."):
            Rows.packed([[1, 2, 3]], lengths)

    def test_a_padded_tensor_without_lengths(self):
        text = (
            "Rows.padded: tokens is one tensor of 2 lines but there are no lengths. Pass attention_mask=, or lengths="
        )
        with raises(f"{text}, ... or use Rows.from_mask(input_ids, completion_mask)."):
            Rows.padded(torch.tensor([[1, 2, 3], [1, 2, 0]]), [1, 1])


class TestTensors:
    LINEAR, TARGET = torch.nn.Linear(3, 7), torch.tensor([0, 1])

    @pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["plain", "autocast"])
    def test_a_layer_for_its_weight(self, dtype):
        text = "Logits: weight must be a tensor but is Linear. Pass the layer's weight and bias: layer.weight, "
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            with raises(f"{text}bias=layer.bias. Under DDP or FSDP use a PolicyHead."):
                logprobs(Logits(torch.zeros(2, 3), self.LINEAR), self.TARGET)
        assert self.LINEAR.weight.dtype == torch.float32

    def test_lists(self):
        with raises("Logits: hidden must be a tensor but is list. Pass torch.tensor(hidden)."):
            logprobs(Logits([[0.0] * 3], self.LINEAR.weight), self.TARGET)
        with raises("Logits: hidden must be a tensor but is list. Pass torch.stack(hidden)."):
            logprobs(Logits([torch.zeros(3)], self.LINEAR.weight), self.TARGET)
        with raises("Logits: bias must be a tensor but is list. Pass torch.tensor(bias)."):
            logprobs(Logits(torch.zeros(2, 3), self.LINEAR.weight, bias=[0.0] * 7), self.TARGET)
        with raises("but is a list. Pass torch.tensor(logits)."):
            logprobs([[0.0, 1.0]], torch.tensor([0]))

    def test_other_kinds(self):
        zeros = torch.zeros(2, 3), torch.zeros(7, 3)
        text = (
            "rows must be a Rows, a tensor of targets or a pair (index, target) but is list. A list of targets, one per"
        )
        with raises(f"logprobs: {text} row of the logits, goes in as torch.tensor(rows)."):
            logprobs(Logits(*zeros), [0, 1])
        with raises("logprobs: head must be a Head or None but is float. A temperature is Head(temperature=0.7)."):
            logprobs(torch.zeros(2, 7), self.TARGET, head=0.7)
        text = "objective must be an Objective or a Preference but is str."
        with raises(f"policy_loss: {text} Pass Objective.recipe('grpo')."):
            policy_loss(Logits(*zeros), self.TARGET, "grpo")
        with raises("Rows.every: target must be a tensor but is a list. Pass torch.tensor(target)."):
            Rows.every([1, 2])

    def test_a_models_output(self):
        out = SimpleNamespace(last_hidden_state=torch.zeros(2, 3), logits=torch.zeros(2, 7))
        with raises("Logits: hidden must be ... but is SimpleNamespace. Pass its last_hidden_state."):
            logprobs(Logits(out, self.LINEAR.weight), self.TARGET)
        del out.last_hidden_state
        with raises("logprobs: logits must be a tensor of ... but is a SimpleNamespace. Pass its logits."):
            logprobs(out, self.TARGET)

    def test_a_weight_that_is_sharded(self):
        text = "logprobs: weight must be [V, 3] to go with hidden of size 3 but is [21]."
        with raises(
            f"{text} Sharded parameters look like this outside of their module's forward (FSDP1, ZeRO-3): use a Pol"
        ):
            logprobs(Logits(torch.zeros(2, 3), torch.zeros(21)), self.TARGET)
        text = "Logits: the head's weight was let go of since its module's forward, and is [0] without numbers now"
        with raises(
            f"{text}: FSDP1 and ZeRO-3 do so in backward, and where the head is a unit of its own at the end of"
        ):
            logprobs(Logits(torch.zeros(2, 3), torch.zeros(0)), self.TARGET)

    def test_flat_logits(self):
        text = (
            "logprobs: logits must be [T, V], one row per token, but has shape [14], one row, and there are 2 rows to"
        )
        with raises(f"{text} score. Do not flatten them, or take logits.view(-1, V)."):
            logprobs(torch.zeros(14), self.TARGET)

    def test_one_row_of_logits_is_fine(self):
        assert logprobs(torch.zeros(7), torch.tensor(3)).logprob.shape == ()
        assert logprobs(torch.zeros(7), (torch.tensor([0]), torch.tensor([3]))).logprob.shape == (1,)


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("gpro", ["gspo", "grpo", "ppo"], "grpo"),  # two letters that changed places
        ("GRPO", ["gspo", "grpo"], "grpo"),
        ("grp", ["gspo", "grpo"], "grpo"),
        ("grrpo", ["gspo", "grpo"], "grpo"),
        ("dappo", ["ppo", "dapo"], "dapo"),
        ("grpo", ["gspo", "grpo"], "grpo"),
        ("old_log_probs", ["advantage", "old_logprob"], "old_logprob"),
        ("zzz", ["gspo", "grpo"], None),
    ],
)
def test_the_closest_name(name, known, found):
    assert did_you_mean(name, known) == ("" if found is None else f" Did you mean {found!r}?")


class TestObjectiveNames:
    KL = "Here it is called 'kl_coef'. It goes with an estimator, as kl=\"k3\"."

    def test_recipe(self):
        with raises("Objective.recipe: name 'gpro' is not known. Did you mean 'grpo'? Known: ppo, grpo, dapo"):
            Objective.recipe("gpro")

    @pytest.mark.parametrize("name", ["grpo", "gpro", "GRPO"])
    def test_a_recipe_for_a_term(self, name):
        text = (
            f"Objective: policy {name!r} is not a term but the name of a recipe, or close to one. Take Objective.recipe"
        )
        with raises(f"{text}('grpo'). Terms: ppo_clip, gspo"):
            Objective(policy=name)

    def test_a_term(self):
        with raises("Objective: policy 'ppo_clp' is not known. Did you mean 'ppo_clip'?"):
            Objective(policy="ppo_clp")

    def test_beta(self):
        with raises(f"Objective: argument 'beta' is not known. {self.KL} Known: policy, clip"):
            Objective(beta=0.1)
        with raises(f"Objective.recipe: argument 'beta' is not known. {self.KL} Known: policy, clip"):
            Objective.recipe("grpo", beta=0.1)
        with raises(
            f"Objective: no part of it reads the field beta. {self.KL} It is an argument of Objective(...), not"
        ):
            given = {"old_logprob": "current", "advantage": torch.ones(1), "beta": 0.1}
            loss_from_hidden(torch.zeros(1, 3), torch.zeros(7, 3), torch.tensor([0]), Objective(), **given)

    @pytest.mark.parametrize(
        ("name", "ours"), [("epsilon", "clip"), ("loss_agg_mode", "reduce"), ("clip_ratio", "clip")]
    )
    def test_names_of_others(self, name, ours):
        with raises(f"Objective: argument {name!r} is not known. Here it is called {ours!r}. Known"):
            Objective(**{name: 0.2})

    def test_a_setting_in_the_call(self):
        rows = Rows.at([0], [1])
        with raises(
            "Objective: no part of it reads the field kl_coef. It is an argument of Objective(...), not of the"
        ):
            stats = TokenStats(torch.zeros(1), None, None)
            Objective()(stats, rows, old_logprob=torch.zeros(1), advantage=torch.zeros(1), kl_coef=0.1)

    def test_a_spelling(self):
        with raises("Objective: argument 'entropy_coeff' is not known. Did you mean 'entropy_coef'?"):
            Objective(entropy_coeff=0.1)

    @pytest.mark.parametrize(("given", "came"), [("grpo", "'grpo'"), (torch.zeros(2), "Tensor")])
    def test_positional(self, given, came):
        text = (
            f'Objective: wanted keyword arguments but got {came}. Name the term, as policy="ppo_clip", or take a recipe'
        )
        with raises(f'{text} by name, as Objective.recipe("grpo"). Tensors go with the call: objective(stats, rows, '):
            Objective(given)

    def test_a_tensor_for_stats(self):
        rows = Rows.at([0], [1])
        text = "Objective: stats must be the TokenStats of logprobs but is Tensor."
        with raises(f"{text} Log-probs of your own go in as TokenStats(logprob, entropy, None)."):
            Objective()(torch.zeros(1), rows, old_logprob=torch.zeros(1), advantage=torch.zeros(1))

    @pytest.mark.parametrize(
        ("given", "way"),
        [([1.0, 2.0], "torch.tensor(advantage)"), ([[1.0], [2.0]], "rows.from_responses(advantage)")],
    )
    def test_a_list_for_a_field(self, given, way):
        rows, stats = Rows.packed([[1, 2], [3, 4]], [1, 1]), TokenStats(torch.zeros(2), None, None)
        with raises(f"Objective: advantage must be a tensor of shape [2] but is list. Pass {way}."):
            Objective()(stats, rows, old_logprob=torch.zeros(2), advantage=given)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_logits_dtype(dtype):
    with raises(f"logprobs: logits must be a tensor of ['torch.float32',... but is a tensor [2, 3] {dtype}."):
        logprobs(torch.zeros(2, 3).to(dtype), torch.tensor([0, 1]))


def test_logits_that_are_no_tensor():
    with raises("logprobs: logits must be a tensor of ['torch.float32',... but is a list."):
        logprobs([[0.0, 1.0]], torch.tensor([0]))


def test_logits_without_a_vocabulary_dimension():
    with raises("logprobs: logits must be [..., V] with a contiguous last dimension but has shape [] and strides []."):
        logprobs(torch.tensor(1.0), torch.tensor([0]))


def test_transposed_logits():
    text = "has shape [5, 7] and strides [1, 5]. Pass logits.contiguous(), which copies, or avoid the transpose."
    with raises(text):
        logprobs(torch.randn(7, 5).t(), torch.zeros(5, dtype=torch.int64))


def test_strides_that_are_no_whole_rows():
    storage = torch.randn(100)
    logits = storage.as_strided((3, 4, 5), (27, 6, 1))
    with raises("logprobs: logits of shape [3, 4, 5] have strides [27, 6, 1], which are not whole steps of one row."):
        logprobs(logits, torch.zeros(3, 4, dtype=torch.int64))


def test_targets_for_another_shape():
    logits, _ = logits_and_rows()
    with raises("logprobs: rows were made for 4 tokens ([4]) but logits has 5 rows ([5]). If the pack is padded"):
        logprobs(logits, torch.zeros(4, dtype=torch.int64))


def test_packed_rows_for_another_length():
    logits, _ = logits_and_rows()
    with raises("logprobs: rows were made for 3 tokens ([3]) but logits has 5 rows"):
        logprobs(logits, Rows.packed([[1, 2, 3]], [1]))


def test_float_targets():
    logits, _ = logits_and_rows()
    with raises("Rows.every: target must hold integers but has dtype torch.float32."):
        logprobs(logits, torch.zeros(5))


@pytest.mark.parametrize("rows", [None, [1, 2], (1, 2, 3), "rows"])
def test_rows_of_another_kind(rows):
    logits, _ = logits_and_rows()
    text = "logprobs: rows must be a Rows, a tensor of targets or a pair (index, target) but is "
    with raises(f"{text}{type(rows).__name__}."):
        logprobs(logits, rows)


def test_logits_on_another_device():
    with raises("logprobs: rows is on cpu but logits is on meta."):
        logprobs(torch.zeros(2, 3, device="meta"), torch.tensor([0, 1]))


def test_target_on_another_device():
    rows = Rows.at([0, 1], [0, 1])
    rows = replace(rows, target=rows.target.to("meta"))
    with raises("logprobs: target is on meta but logits is on cpu."):
        logprobs(torch.zeros(2, 3), rows)


@pytest.mark.parametrize("bad", [-1, -99, -101, 7, 10**12])
def test_target_outside_the_vocabulary(bad):
    logits, _ = logits_and_rows()
    with raises(f"logprobs: target {bad} of row 3 (sample 0, position 3) is outside the vocabulary of 7. Use -100"):
        logprobs(logits, torch.tensor([0, -100, 6, bad, bad]))


def test_target_outside_the_vocabulary_names_the_sample():
    rows = Rows.packed([[1, 2, 3], [4, 5, 9, 6]], [1, 3])
    with raises("logprobs: target 9 of row 2 (sample 1, position 1) is outside the vocabulary of 7."):
        logprobs(torch.randn(7, 7), rows)


def test_target_in_the_padding():
    logits, _ = logits_and_rows()
    with raises("logprobs: target 6 of row 4 (sample 0, position 4) is outside the vocabulary of 6."):
        logprobs(logits, torch.tensor([0, 1, 2, 3, 6]), head=Head(vocab_size=6))


@pytest.mark.parametrize("entropy", [True, False, "values", "Grad", 1])
def test_entropy(entropy):
    logits, target = logits_and_rows()
    with raises(f'logprobs: entropy must be None, "value" or "grad" but is {entropy!r}.'):
        logprobs(logits, target, entropy=entropy)


class TestVocabShard:
    @pytest.mark.parametrize(("start", "stop"), [(0.0, 7), (0, "7"), (None, 7), (False, 7)])
    def test_integers(self, start, stop):
        with raises(f"VocabShard: start and stop must be integers but are {start!r}, {stop!r}."):
            VocabShard(start, stop)

    @pytest.mark.parametrize(("start", "stop"), [(-1, 7), (5, 4)])
    def test_order(self, start, stop):
        with raises(f"VocabShard: rank 0 has start {start} and stop {stop}. Wanted 0 <= start <= stop."):
            VocabShard(start, stop)

    def test_gap(self):
        text = "VocabShard: the shards leave a gap at column 0: rank 0 starts at 2 where 0 was expected."
        with raises(f"{text} Bounds by rank: [(2, 7)]."):
            VocabShard(2, 7)

    def test_group(self):
        text = "VocabShard.group: wanted a torch.distributed process group, a one-dimensional DeviceMesh or None"
        with raises(f"{text}, but got str."):
            VocabShard(0, 7, group="tp")
        with raises(f"{text}, but got str."):
            VocabShard.even(7, "tp")

    def test_columns(self):
        logits, target = logits_and_rows()
        with raises("logprobs: shard holds columns 0 to 8 (8 of them) but logits has 7 columns."):
            logprobs(Logits.given(logits, shard=VocabShard(0, 8)), target)


class TestOverwrite:
    TAIL = ", or drop the option."

    def test_leaf(self):
        logits, target = logits_and_rows()
        text = "logprobs: overwrite=True, but the logits are a leaf, whose data backward must not replace by its"
        with raises(f"{text} gradient. Pass the model's own output{self.TAIL}"):
            logprobs(Logits.given(logits.requires_grad_(), overwrite=True), target)

    @pytest.mark.parametrize("cut", [lambda x: x[1:], lambda x: x.view(5, 7), lambda x: x[:, :6]])
    def test_view(self, cut):
        logits, target = logits_and_rows()
        view = cut(logits.requires_grad_() * 1.0)
        text = "the logits are a view, so that whoever holds the base would read gradients in place of logits."
        with raises(f"{text} Pass the tensor it was cut from (any [..., V] shape will do){self.TAIL}"):
            logprobs(Logits.given(view, overwrite=True), target[: len(view)].clamp_max(5))

    def test_not_contiguous(self):
        wide = torch.randn(5, 2, 7, requires_grad=True)
        # Elementwise results keep the strides of their input, so this is no view and still has gaps in its order.
        logits = wide.transpose(0, 1) * 1.0
        assert not logits.is_contiguous()
        with raises(f"the logits are not contiguous. Pass the model's own output{self.TAIL}"):
            logprobs(Logits.given(logits, overwrite=True), torch.zeros(2, 5, dtype=torch.int64))

    def test_second_backward(self):
        leaf, target = logits_and_rows()
        logits = leaf.requires_grad_() * 1.0
        out = logprobs(Logits.given(logits, overwrite=True), target)
        total = out.logprob.sum()
        total.backward(retain_graph=True)
        with raises("logprobs: second backward through a call with overwrite=True, but the first one has replaced"):
            total.backward()

    @pytest.mark.parametrize("no_graph", [torch.no_grad, torch.inference_mode])
    def test_without_a_graph_there_is_nothing_to_refuse(self, no_graph):
        logits, target = logits_and_rows()
        before = logits.clone()
        with no_graph():
            out = logprobs(Logits.given(logits.requires_grad_(), overwrite=True), target)
        assert torch.equal(logits, before)
        assert torch.equal(out.logprob, logprobs(before, target).logprob)


@pytest.mark.parametrize("backend", ["cuda", "", "Triton", None])
def test_unknown_backend(backend):
    logits, target = logits_and_rows()
    text = f"backend: wanted one of ['auto', 'reference', 'tiled', 'triton'] but got {backend!r}."
    if backend is None:
        text = "backend must be one of ['auto', 'reference', 'tiled', 'triton'] but is None."
    with raises(text):
        choose_backend(logits, backend)
    with raises(text):
        logprobs(logits, target, backend=backend)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is on only where there is no CUDA")
def test_triton_does_not_take_float64():
    pytest.importorskip("triton")
    logits, target = logits_and_rows()
    text = 'backend="triton" cannot run here: its kernels take float32, bfloat16 and float16, not torch.float64.'
    with raises(f'{text} Use backend="auto" or "tiled"'):
        logprobs(logits.double(), target, backend="triton")


NOT_INTERPRETED = """
import torch, logitless
try:
    logitless.logprobs(torch.zeros(2, 3), torch.tensor([0, 1]), backend="triton")
except logitless.LogitlessError as error:
    print(error)
"""


def test_triton_on_cpu_without_its_interpreter():
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", NOT_INTERPRETED], env=environment, capture_output=True, text=True, timeout=60
    )
    text = 'backend="triton" cannot run here: its kernels run on CUDA devices, and the logits are on cpu.'
    assert ran.stdout.startswith(text), ran.stderr
    assert "set TRITON_INTERPRET=1 before Python starts" in ran.stdout


# Out of memory.


def none_left(*_: object) -> None:
    raise torch.OutOfMemoryError("none left")


def test_out_of_memory_names_the_budget_that_the_call_had(monkeypatch):
    """Where none was asked for: less where logits exist, and that of ``defer`` where it was given one."""
    head, target = torch.nn.Linear(8, 16), torch.zeros(4, dtype=torch.int64)
    computed = Logits(torch.zeros(4, 8), head.weight)
    with defer(head, head=head, memory="3KiB"):
        deferred = head(torch.zeros(4, 8))
    monkeypatch.setattr("logitless.score.resolve_score", none_left)
    monkeypatch.setattr("logitless.loss.resolve_loss", none_left)
    cases = [(torch.zeros(4, 16), "16MiB", "16MiB"), (computed, "256MiB", "1GiB"), (deferred, "3KiB", "3KiB")]
    for logits, *budgets in cases:
        for call, budget in zip((logprobs, partial(policy_loss, objective=Objective())), budgets, strict=True):
            with pytest.raises(torch.OutOfMemoryError) as raised:
                call(logits, target)
            assert f"(it was '{budget}')" in raised.value.__notes__[0]
