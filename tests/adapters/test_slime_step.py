"""slime's own training step behind a real Megatron-Core model, with its own head and with logits that are not computed.

``forward_only`` for the old log-probs and three times ``train_one_step``: slime's batches, its loss, Megatron's
schedule and gradient buffers, on gloo ranks. Needs slime's sources (``LOGITLESS_HOSTS``, see hosts.py).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hosts import load, put_first
from ranks import close_ranks
from shared.megatron import megatron
from shared.megatron_groups import TIMEOUT
from shared.megatron_step import HOW, Descent, Largest, Outcome, V, check_steps, installed, model_of, on_cpu
from shared.slime import arguments

pytestmark = [
    pytest.mark.skipif(
        not find_spec("megatron") or not find_spec("megatron.core"), reason="megatron-core is not installed"
    ),
    pytest.mark.skipif(not put_first("slime"), reason="LOGITLESS_HOSTS names no checkout of slime"),
]

LENGTHS, RESPONSES, PAD = (29, 42, 38, 17), (12, 20, 11, 9), 8
BATCHES = [[0, 1], [2, 3]]


@pytest.fixture(scope="module", autouse=True)
def fresh_workers() -> Iterator[None]:
    yield
    close_ranks()


def settings(**more: Any) -> Namespace:
    paths = ("custom_megatron_before_log_prob_hook_path", "custom_megatron_before_train_step_hook_path")
    off = ("enable_mtp_training", "ci_test", "use_dynamic_batch_size", "use_rollout_entropy")
    given = dict.fromkeys(paths) | dict.fromkeys(off, False)
    given |= {"seq_length": 64, "micro_batch_size": 1, "decoder_seq_length": None, "data_pad_size_multiplier": PAD}
    return arguments(**given, save_debug_train_data=None, **more)


def rollout(seed: int = 0) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    masks = [(torch.arange(n) % 5 != 2).float() for n in RESPONSES]
    return {
        "tokens": [torch.randint(V, (n,), generator=made) for n in LENGTHS],
        "total_lengths": list(LENGTHS),
        "response_lengths": list(RESPONSES),
        "loss_masks": masks,
        "rollout_mask_sums": [mask.sum() for mask in masks],
        "advantages": [torch.randn(n, generator=made) for n in RESPONSES],
        "micro_batch_indices": BATCHES,
    }


class Schedule:
    def step(self, increment: int) -> None:
        assert increment == len(LENGTHS)


def run(rank: int, world: int, how: str, tp: int, cp: int, half: bool, more: dict[str, Any], **options: Any) -> Outcome:
    """Old log-probs, and three steps on them; or on none, where the ``update`` is the first."""
    (model,) = load("slime", "slime.backends.megatron_utils.model")
    loss, data = load("slime", "slime.backends.megatron_utils.loss", "slime.backends.megatron_utils.data")
    # slime asks where its accelerator is.
    data.accelerator = SimpleNamespace(device=lambda: "cpu", current_device=lambda: "cpu")
    with megatron(tp, cp), on_cpu(), installed("slime", how, **options) as told:
        args = settings(**more)
        model.get_args = lambda: args
        chunks = [model_of(tp, cp, torch.bfloat16 if half else torch.float32)]
        optimizer, batch = Descent(chunks), rollout()
        old = model.forward_only(
            loss.get_log_probs_and_entropy, args, chunks, data.get_data_iterator(batch), [len(BATCHES)]
        )
        scores = old["log_probs"]
        batch["log_probs"] = [x + 0.1 * torch.sin(7 * torch.arange(len(x))) for x in scores]
        batch["advantages"] = [a[: len(x)] for a, x in zip(batch["advantages"], scores, strict=True)]
        batch["ref_log_probs"] = [x + 0.2 * torch.cos(5 * torch.arange(len(x))) for x in scores]
        if more.get("first_update"):
            del batch["log_probs"]
        losses, largest = [], Largest(V // tp)
        for step in range(3):
            with largest:
                told_of, _ = model.train_one_step(
                    args, 0, step, data.get_data_iterator(batch), chunks, optimizer, Schedule(), len(BATCHES), 4
                )
            losses += [told_of["loss"]]
    return Outcome(losses, scores, optimizer.masters, largest.elements, **told)


CASES = {
    "one rank": (1, 1, False, {}),
    "tensor parallel": (2, 1, False, {}),
    "context parallel": (1, 2, False, {}),
    "all-gather": (1, 2, False, {"allgather_cp": True}),
    "both, bfloat16": (2, 2, True, {}),
    "supervised": (2, 1, False, {"loss_type": "sft_loss"}),
    "recomputed loss": (2, 1, False, {"recompute_loss_function": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_three_steps_of_slime(ranks, case):
    tp, cp, half, more = CASES[case]
    before, ours, wrong = (ranks(run, tp * cp, how, tp, cp, half, more, timeout=TIMEOUT) for how in HOW)
    dtype = torch.bfloat16 if half else torch.float32
    # The larger of the two packs, as slime cuts and pads it.
    whole = (71 // cp) * V // tp
    for a, b, c in zip(before, ours, wrong, strict=True):
        check_steps(a, b, dtype, whole)
        with pytest.raises(AssertionError, match=r"(losses|scores|parameters): "):
            check_steps(a, c, dtype, whole)


def test_the_patch_of_the_page(ranks):
    first = "before"
    before, ours, wrong = (
        ranks(run, 2, how, 2, 1, False, {}, timeout=TIMEOUT) for how in (first, "page", "page, wrong")
    )
    # A tile of the provider's budget is larger than these logits.
    for a, b, c in zip(before, ours, wrong, strict=True):
        check_steps(a, b._replace(largest=0), torch.float32, 71 * V // 2)
        with pytest.raises(AssertionError, match=r"(losses|scores|parameters): "):
            check_steps(a, c._replace(largest=0), torch.float32, 71 * V // 2)


FORESEEN: dict[str, tuple[int, int, bool, dict[str, Any]]] = {
    "first update": (1, 1, False, {"first_update": True}),
    "later updates, tensor parallel": (2, 1, False, {}),
    "context parallel": (1, 2, False, {}),
    "both, bfloat16": (2, 2, True, {}),
    "KL": (1, 1, False, {"use_kl_loss": True, "kl_loss_type": "low_var_kl", "kl_loss_coef": 0.3}),
    "unbiased KL": (1, 1, False, {"use_kl_loss": True, "kl_loss_type": "k2", "use_unbiased_kl": True}),
    "dual clip": (1, 1, False, {"eps_clip_c": 1.2}),
    "cispo": (1, 1, False, {"advantage_estimator": "cispo"}),
}

OTHERS: dict[str, dict[str, Any]] = {
    "an entropy bonus": {"entropy_coef": 0.1},
    "sequences": {"advantage_estimator": "gspo"},
    "a loss that is recomputed": {"recompute_loss_function": True},
    "all-gather": {"allgather_cp": True},
    "supervised": {"loss_type": "sft_loss"},
}


def in_the_pass(ranks: Any, tp: int, cp: int, half: bool, more: dict[str, Any]) -> Iterator[tuple[Outcome, ...]]:
    given = {"entropy_coef": 0.0, "kl_loss_coef": 0.1, "use_unbiased_kl": False, **more}
    each = [partial(run, one_pass=True) if how != "before" else run for how in HOW]
    found = (ranks(f, tp * cp, how, tp, cp, half, given, timeout=TIMEOUT) for f, how in zip(each, HOW, strict=True))
    yield from zip(*found, strict=True)


@pytest.mark.parametrize("case", FORESEEN)
def test_three_steps_with_the_loss_in_the_pass(ranks, case):
    tp, cp, half, more = FORESEEN[case]
    dtype, whole = torch.bfloat16 if half else torch.float32, (71 // cp) * V // tp
    for before, ours, wrong in in_the_pass(ranks, tp, cp, half, more):
        # A chunk of this budget is larger than these logits.
        check_steps(before, ours._replace(largest=0), dtype, whole)
        assert ours.expected == "losses in the pass of their log-probs: 6 of 6"
        with pytest.raises(AssertionError, match=r"(losses|scores|parameters): "):
            check_steps(before, wrong._replace(largest=0), dtype, whole)


@pytest.mark.parametrize("case", OTHERS)
def test_three_steps_with_another_loss_are_as_without(ranks, case):
    cp = 2 if case == "all-gather" else 1
    for before, ours, _ in in_the_pass(ranks, 1, cp, False, OTHERS[case]):
        check_steps(before, ours, torch.float32, 71 // cp * V)
        assert not ours.expected
