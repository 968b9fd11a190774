"""The text of every error a single process on CPU can meet: the argument, what was wanted, what came, what to do."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from calls import loss_from_hidden
from shared.errors import raises

from logitless import (
    Head,
    Kept,
    LogitlessError,
    Logits,
    Objective,
    Rows,
    TokenStats,
    VocabShard,
    logprobs,
    policy_loss,
)
from logitless.backends import choose_backend
from logitless.errors import did_you_mean
from logitless.spec import parse_memory

NAN, INF = math.nan, math.inf


def logits_and_rows(tokens: int = 5, vocab: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, vocab), torch.randint(0, vocab, (tokens,))


def test_the_error_is_a_value_error():
    assert issubclass(LogitlessError, ValueError)


# Head.


@pytest.mark.parametrize("temperature", [0, 0.0, -1.0, NAN, INF, -INF, True, "0.7", None, [1.0]])
def test_temperature(temperature):
    with raises(f"Head: temperature must be a positive finite number but is {temperature!r}."):
        Head(temperature=temperature)


@pytest.mark.parametrize(("bad", "shown"), [(0.0, "0.0"), (-0.5, "-0.5"), (NAN, "nan"), (INF, "inf")])
def test_temperature_per_row(bad, shown):
    with raises(f"Head: temperature must be positive and finite but row 2 has {shown}."):
        Head(temperature=torch.tensor([1.0, 0.5, bad, bad]))


def test_temperature_per_row_on_two_dimensions_counts_rows_flat():
    with raises("row 3 has -2.0"):
        Head(temperature=torch.tensor([[1.0, 0.5], [1.0, -2.0]]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_temperature_dtype(dtype):
    with raises(f"Head: temperature must be a floating-point tensor but has dtype {dtype}."):
        Head(temperature=torch.ones(3).to(dtype))


def test_temperature_with_a_gradient():
    with raises("Head: temperature requires grad, but no gradient flows to it. Pass temperature.detach()."):
        Head(temperature=torch.ones(3, requires_grad=True))


@pytest.mark.parametrize("shape", [(4,), (6,), (1,), (), (2, 5)])
def test_temperature_shape(shape):
    logits, target = logits_and_rows()
    with raises(f"Head: temperature has shape {list(shape)} but there are 5 rows. Give one value per row"):
        logprobs(logits, target, head=Head(temperature=torch.ones(shape)))


@pytest.mark.parametrize("scale", [0, 0.0, NAN, INF, False, None])
def test_scale(scale):
    with raises(f"Head: scale must be a finite number other than 0 but is {scale!r}."):
        Head(scale=scale)


@pytest.mark.parametrize("softcap", [0, 0.0, -30.0, NAN, INF, True, "30"])
def test_softcap(softcap):
    with raises(f"Head: softcap must be a positive finite number or None but is {softcap!r}."):
        Head(softcap=softcap)


@pytest.mark.parametrize("vocab_size", [0, -5, 7.0, True, "7"])
def test_vocab_size(vocab_size):
    with raises(f"Head: vocab_size must be a positive integer or None but is {vocab_size!r}."):
        Head(vocab_size=vocab_size)


def test_vocab_size_past_the_logits():
    logits, target = logits_and_rows()
    with raises("logprobs: head.vocab_size is 8 but the logits have only 7 columns in all."):
        logprobs(logits, target, head=Head(vocab_size=8))


# Memory.

BUDGETS = [
    0,
    -1,
    1.5,
    True,
    None,
    "",
    "0",
    "0B",
    "0MiB",
    "-5MiB",
    "12",
    "MiB",
    "a lot",
    "1e3B",
    "nanGiB",
    "5 PiB",
    "0.1B",
]


@pytest.mark.parametrize("memory", BUDGETS)
def test_memory(memory):
    logits, target = logits_and_rows()
    text = f'memory: wanted a positive number of bytes or a size such as "512MiB" but got {memory!r}.'
    with raises(text):
        parse_memory(memory)
    if memory is None:
        # The default of the verb.
        logprobs(logits, target, memory=memory)
        return
    with raises(text):
        logprobs(logits, target, memory=memory)


@pytest.mark.parametrize(
    ("memory", "size"),
    [(1, 1), ("1B", 1), ("3KB", 3000), ("3KiB", 3072), ("1.5 MiB", 1572864), (" 2GB ", 2 * 10**9), ("1TiB", 2**40)],
)
def test_memory_that_is_fine(memory, size):
    assert parse_memory(memory) == size


# Rows.

BUILDERS = [
    pytest.param(Rows.packed, "Rows.packed", id="packed"),
    pytest.param(Rows.padded, "Rows.padded", id="padded"),
]


@pytest.mark.parametrize(("build", "name"), BUILDERS)
class TestRowsFromLists:
    def test_different_numbers_of_samples(self, build, name):
        with raises(f"{name}: got 2 samples but 3 response_lengths."):
            build([[1, 2], [3, 4]], [1, 1, 1])

    @pytest.mark.parametrize("response", [4, -1])
    def test_response_longer_than_its_sample(self, build, name, response):
        with raises(f"{name}: sample 1 has 3 tokens but a response of {response}."):
            build([[1, 2], [3, 4, 5]], [1, response])

    def test_empty_prompt(self, build, name):
        with raises(f"{name}: sample 1 has an empty prompt, so no row predicts its first token. Prepend a token (BOS)"):
            build([[1, 2], [3, 4, 5]], [1, 3])

    def test_number_of_masks(self, build, name):
        with raises(f"{name}: got 2 samples but 1 loss_masks."):
            build([[1, 2], [3, 4]], [1, 1], [[1]])

    @pytest.mark.parametrize("mask", [[1], [1, 0, 1], torch.ones(3)])
    def test_length_of_a_mask(self, build, name, mask):
        text = f"{name}: the loss mask of sample 1 has {len(mask)} entries but its response has 2 tokens."
        with raises(text):
            build([[1, 2], [3, 4, 5]], [1, 2], [[1], mask])

    def test_loss_mask_only_without_masks(self, build, name):
        with raises(f"{name}: loss_mask_only=True needs loss_masks."):
            build([[1, 2]], [1], loss_mask_only=True)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
    def test_tokens_that_are_no_integers(self, build, name, dtype):
        with raises(f"{name}...{dtype}"):
            build([torch.tensor([1, 2, 3]).to(dtype)], [1])


def test_packed_num_tokens():
    with raises("Rows.packed: num_tokens is 4 but the samples need 5 tokens. Pass the padded length of the local pack"):
        Rows.packed([[1, 2], [3, 4, 5]], [1, 1], num_tokens=4)


def test_packed_num_tokens_of_zero():
    with raises("Rows.packed: num_tokens is 0 but the samples need 2 tokens."):
        Rows.packed([[1, 2]], [1], num_tokens=0)


class TestRowsPadded:
    TOKENS = torch.arange(12).reshape(3, 4)

    def test_padding(self):
        with raises('Rows.padded: padding must be "left" or "right" but is \'both\'.'):
            Rows.padded([[1, 2]], [1], padding="both")

    def test_max_length(self):
        with raises("Rows.padded: sample 1 has 3 tokens but max_length is 2."):
            Rows.padded([[1, 2], [3, 4, 5]], [1, 1], max_length=2)

    def test_lengths_with_lists(self):
        with raises("Rows.padded: lengths goes with one [N, S] tensor; lists"):
            Rows.padded([[1, 2]], [1], lengths=[2])

    def test_no_lengths_with_a_tensor(self):
        with raises("Rows.padded: tokens is one tensor of 3 lines but there are no lengths."):
            Rows.padded(self.TOKENS, [1, 1, 1])

    def test_wrong_number_of_lengths(self):
        with raises("Rows.padded: tokens is one tensor of 3 lines but there are 2 lengths."):
            Rows.padded(self.TOKENS, [1, 1, 1], lengths=[4, 4])

    @pytest.mark.parametrize("length", [5, -1])
    def test_a_length_past_the_width(self, length):
        with raises(f"Rows.padded: sample 2 has length {length} but tokens is 4 wide."):
            Rows.padded(self.TOKENS, [1, 1, 1], lengths=[4, 4, length])

    def test_lines_padded_on_the_other_side(self):
        tokens = torch.tensor([[4, 5, 6, 7], [0, 0, 8, 9]])
        text = (
            "Rows.padded: lengths leave out 2 places of line 1 on the right, but it has 2 of padding (id 0) on the "
            "left and 0 on the right. Pass attention_mask= in place of lengths."
        )
        with raises(text):
            Rows.padded(tokens, [1, 1], lengths=[4, 2])
        assert Rows.padded(tokens, [1, 1], lengths=[4, 2], padding="left").target.tolist() == [7, 9]

    def test_an_attention_mask_with_a_hole(self):
        with raises("Rows.padded: attention_mask has padding between the tokens of line 1, so they are no one sample."):
            Rows.padded(self.TOKENS[:2], [1, 1], attention_mask=torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1]]))

    def test_an_attention_mask_of_another_shape(self):
        with raises("Rows.padded: attention_mask must be [3, 4] like tokens but is [3]."):
            Rows.padded(self.TOKENS, [1, 1, 1], attention_mask=torch.ones(3))
        with raises("Rows.padded: attention_mask must be [3, 4] like tokens but is list."):
            Rows.padded(self.TOKENS, [1, 1, 1], attention_mask=[[1] * 4] * 3)

    def test_an_attention_mask_and_lengths(self):
        with raises("Rows.padded: give lengths or attention_mask, not both."):
            Rows.padded(self.TOKENS, [1, 1, 1], attention_mask=self.TOKENS >= 0, lengths=[4, 4, 4])
        with raises("Rows.padded: attention_mask goes with one [N, S] tensor; lists carry their own length."):
            Rows.padded([[1, 2]], [1], attention_mask=torch.ones(1, 2))

    @pytest.mark.parametrize("max_length", [3, 5])
    def test_max_length_with_a_tensor(self, max_length):
        with raises(f"Rows.padded: max_length is {max_length} but tokens is 4 wide. Leave max_length out."):
            Rows.padded(self.TOKENS, [1, 1, 1], lengths=[4, 4, 4], max_length=max_length)

    @pytest.mark.parametrize("shape", [(12,), (3, 2, 2), ()])
    def test_dimensions(self, shape):
        tokens = torch.zeros(shape, dtype=torch.int64)
        with raises(f"Rows.padded: tokens must be [N, S] or a list of samples but has shape {list(shape)}."):
            Rows.padded(tokens, [1], lengths=[1])


class TestRowsAt:
    def test_different_lengths(self):
        with raises("Rows.at: index has 2 entries but target has 3."):
            Rows.at([0, 1], [4, 5, 6])

    def test_negative(self):
        with raises("Rows.at: index must be 0 or more but has -2."):
            Rows.at([0, -1, -2], [4, 5, 6])

    def test_duplicates(self):
        with raises("Rows.at: index holds row 3 more than once. A row has one target; score further targets"):
            Rows.at([9, 3, 5, 3, 9], [1, 2, 3, 4, 5])

    def test_num_tokens(self):
        with raises("Rows.at: index reaches row 7 but num_tokens is 7."):
            Rows.at([0, 7], [1, 1], num_tokens=7)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
    @pytest.mark.parametrize("which", ["index", "target"])
    def test_dtype(self, which, dtype):
        arguments = {"index": torch.tensor([0, 1]), "target": torch.tensor([0, 1])}
        arguments[which] = arguments[which].to(dtype)
        with raises(f"Rows.at: {which} must hold integers but has dtype {dtype}."):
            Rows.at(**arguments)

    def test_dimensions(self):
        with raises("Rows.at: target must be one-dimensional but has shape [1, 2]."):
            Rows.at([0, 1], torch.tensor([[0, 1]]))

    def test_reach_past_the_logits(self):
        logits, _ = logits_and_rows()
        with raises("logprobs: rows reach row 5 but logits has 5 rows ([5])."):
            logprobs(logits, (torch.tensor([0, 5]), torch.tensor([1, 1])))


def test_every_dtype():
    with raises("Rows.every: target must hold integers but has dtype torch.float32."):
        Rows.every(torch.zeros(2, 3))


class TestRowsMovement:
    PLAN = Rows.packed([[1, 2, 3], [4, 5]], [2, 1])

    @pytest.mark.parametrize("caller", ["split", "expand", "sum_by_sample"])
    @pytest.mark.parametrize("shape", [(2,), (4, 3), ()])
    def test_wrong_number_of_rows(self, caller, shape):
        with raises(f"Rows.{caller}: x has shape {list(shape)} but there are 3 rows."):
            getattr(self.PLAN, caller)(torch.zeros(shape))

    def test_take(self):
        with raises("Rows.take: x has shape [6, 2] but these rows were made for leading shape [5]."):
            self.PLAN.take(torch.zeros(6, 2))

    def test_expand_without_a_length(self):
        with raises("Rows.expand: the full length is unknown. Pass num_tokens to Rows.at."):
            Rows.at([1], [2]).expand(torch.zeros(1))

    def test_join_number_of_samples(self):
        with raises("Rows.join: got 1 tensors for 2 samples."):
            self.PLAN.join([torch.zeros(2)])

    def test_join_length(self):
        with raises("Rows.join: sample 1 has 2 entries but 1 response tokens here."):
            self.PLAN.join([torch.zeros(2), torch.zeros(2)])

    def test_join_of_nothing(self):
        with raises("Rows.join: there are no samples, so neither dtype nor device is known."):
            Rows.packed([], []).join([])


# Kept.


class TestKept:
    @pytest.mark.parametrize("which", ["ids", "lengths"])
    @pytest.mark.parametrize(
        "bad", [torch.zeros(2), torch.zeros(2, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.int64)]
    )
    def test_kind(self, which, bad):
        arguments = {"ids": torch.tensor([4, 5]), "lengths": torch.tensor([1, 1])}
        arguments[which] = bad
        with raises(f"Kept: {which} must be a 1-D integer tensor but is {list(bad.shape)} {bad.dtype}."):
            Kept(**arguments)

    @pytest.mark.parametrize(("lengths", "low", "total"), [([2, 2], 2, 4), ([4, -1], -1, 3), ([1, 1], 1, 2)])
    def test_lengths(self, lengths, low, total):
        with raises(
            f"Kept: lengths must be 0 or more and add up to the 3 ids, but the smallest is {low} and they add up to "
            f"{total}."
        ):
            Kept(torch.tensor([4, 5, 6]), torch.tensor(lengths))

    def test_ids_without_rows(self):
        with raises("Kept: lengths must be 0 or more and add up to the 3 ids"):
            Kept(torch.tensor([4, 5, 6]), torch.zeros(0, dtype=torch.int64))

    def test_number_of_rows(self):
        logits, target = logits_and_rows()
        with raises("logprobs: kept has 2 rows but rows has 5."):
            logprobs(logits, target, kept=Kept(torch.tensor([1, 2]), torch.tensor([1, 1])))

    @pytest.mark.parametrize("bad", [-1, 7])
    def test_ids_outside_the_vocabulary(self, bad):
        logits, target = logits_and_rows()
        low, high = min(bad, 3), max(bad, 3)
        with raises(f"logprobs: kept ids run from {low} to {high}, outside the vocabulary of 7."):
            logprobs(logits, target, kept=Kept(torch.tensor([3, bad]), torch.tensor([0, 1, 0, 1, 0])))

    def test_ids_in_the_padding(self):
        logits, _ = logits_and_rows()
        kept = Kept(torch.tensor([3, 6]), torch.tensor([0, 1, 0, 1, 0]))
        with raises("logprobs: kept ids run from 3 to 6, outside the vocabulary of 6."):
            logprobs(logits, torch.zeros(5, dtype=torch.int64), head=Head(vocab_size=6), kept=kept)

    def test_device(self):
        logits, target = logits_and_rows()
        kept = Kept(torch.zeros(5, dtype=torch.int64, device="meta"), torch.ones(5, dtype=torch.int64, device="meta"))
        with raises("logprobs: kept is on meta but logits is on cpu."):
            logprobs(logits, target, kept=kept)

    def test_from_responses_number_of_samples(self):
        rows = Rows.packed([[1, 2, 3], [4, 5]], [2, 1])
        with raises("Kept.from_responses: got ids for 1 and lengths for 2 samples, but the rows have 2."):
            Kept.from_responses(rows, [torch.tensor([1])], [torch.tensor([1, 0]), torch.tensor([0])])

    def test_from_responses_lengths(self):
        rows = Rows.packed([[1, 2, 3], [4, 5]], [2, 1])
        ids = [torch.tensor([1, 2]), torch.tensor([3])]
        with raises("Kept.from_responses: sample 1 has 1 ids but its lengths add up to 2."):
            Kept.from_responses(rows, ids, [torch.tensor([1, 1]), torch.tensor([2])])

    def test_from_responses_number_of_response_tokens(self):
        rows = Rows.packed([[1, 2, 3], [4, 5]], [2, 1])
        ids = [torch.tensor([1, 2]), torch.tensor([3])]
        with raises("Kept.from_responses: sample 0..."):
            Kept.from_responses(rows, ids, [torch.tensor([2]), torch.tensor([1])])


# One thing where another is wanted.


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
        with raises("but is list. Pass torch.tensor(logits)."):
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
        with raises("logprobs: logits must be a tensor of ... but is SimpleNamespace. Pass its logits."):
            logprobs(out, self.TARGET)

    @pytest.mark.parametrize("shape", [(0,), (21,)])
    def test_a_weight_that_is_sharded(self, shape):
        text = f"logprobs: weight must be [V, 3] to go with hidden of size 3 but is {list(shape)}."
        with raises(
            f"{text} Sharded parameters look like this outside of their module's forward (FSDP1, ZeRO-3): use a Pol"
        ):
            logprobs(Logits(torch.zeros(2, 3), torch.zeros(shape)), self.TARGET)

    def test_flat_logits(self):
        text = (
            "logprobs: logits must be [T, V], one row per token, but has shape [14], one row, and there are 2 rows to"
        )
        with raises(f"{text} score. Do not flatten them, or take logits.view(-1, V)."):
            logprobs(torch.zeros(14), self.TARGET)

    def test_one_row_of_logits_is_fine(self):
        assert logprobs(torch.zeros(7), torch.tensor(3)).logprob.shape == ()
        assert logprobs(torch.zeros(7), (torch.tensor([0]), torch.tensor([3]))).logprob.shape == (1,)


# Names that are nearly right, or right elsewhere.


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


# Logits and targets.


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_logits_dtype(dtype):
    with raises(f"logprobs: logits must be a tensor of ['torch.float32',... but is {dtype}."):
        logprobs(torch.zeros(2, 3).to(dtype), torch.tensor([0, 1]))


def test_logits_that_are_no_tensor():
    with raises("logprobs: logits must be a tensor of ['torch.float32',... but is list."):
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


# Shards, as far as one process goes.


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


# Overwriting.


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


# Backends.


@pytest.mark.parametrize("backend", ["cuda", "", "Triton", None])
def test_unknown_backend(backend):
    logits, target = logits_and_rows()
    text = f"backend: wanted one of ['auto', 'reference', 'tiled', 'triton'] but got {backend!r}."
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
