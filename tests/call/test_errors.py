"""The text of every error a single process on CPU can meet: the argument, what was wanted, what came, what to do."""

from __future__ import annotations

import math

import pytest
import torch
from shared.errors import logits_and_rows, raises

from logitless import (
    Head,
    Kept,
    LogitlessError,
    Logits,
    Rows,
    logprobs,
)
from logitless.spec import parse_memory

NAN, INF = math.nan, math.inf


def test_the_error_is_a_value_error():
    assert issubclass(LogitlessError, ValueError)


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


@pytest.mark.parametrize("shape", [(4,), (6,), (1,), (2, 5)])
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
        text = f"{name}: loss_masks: the mask of sample 1 has {len(mask)} entries but its response has 2 tokens."
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
        with raises("Rows.padded: padding must be one of left, right but is 'both'."):
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
        with raises("Rows.padded: attention_mask must be [3, 4] like tokens but is a list."):
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
        with raises("Rows.padded: tokens must be "):
            Rows.padded(tokens, [1], lengths=[1])


class TestRowsAt:
    def test_different_lengths(self):
        with raises("Rows.at: index has 2 entries but target has 3."):
            Rows.at([0, 1], [4, 5, 6])

    def test_negative(self):
        with raises("Rows.at: index must be 0 or more but has -2."):
            Rows.at([0, -1, -2], [4, 5, 6])

    def test_duplicates(self):
        with raises("Rows.at: index holds row 3 more than once. A row has one target; score other targets"):
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
        with raises("Rows.join: parts: got 1 tensors for 2 samples."):
            self.PLAN.join([torch.zeros(2)])

    def test_join_length(self):
        with raises("Rows.join: parts: sample 1 has 2 entries but 1 response tokens here."):
            self.PLAN.join([torch.zeros(2), torch.zeros(2)])

    def test_join_of_nothing(self):
        with raises("Rows.join: there are no samples, so neither dtype nor device is known."):
            Rows.packed([], []).join([])


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


@pytest.mark.parametrize("of_logits", [True, False])
def test_ids_and_their_logits_without_a_shift(of_logits):
    logits = torch.zeros(2, 5, 7) if of_logits else Logits(torch.zeros(2, 5, 3), torch.zeros(7, 3))
    with raises("logprobs: rows were made for 12 tokens ... Row t predicts token t + 1: ids[..., 1:] go with logits"):
        logprobs(logits, torch.zeros(2, 6, dtype=torch.int64))
    for other in ((2, 7), (3, 5), (2, 1, 6)):
        with pytest.raises(LogitlessError) as caught:
            logprobs(logits, torch.zeros(other, dtype=torch.int64))
        assert "predicts" not in str(caught.value)


def test_a_list_of_kept_ids():
    with raises("logprobs: kept must be a Kept or None but is list. Kept.from_engine, from_lists and their kin make o"):
        logprobs(torch.zeros(1, 3), torch.tensor([1]), kept=[[1, 2]])
