"""One batch of TRL's SFT, DPO and KTO trainers, real models and collators: their loss and ours from the hidden states.

The policy has moved away from the reference, so that no margin is zero.
"""

from __future__ import annotations

import pytest
import torch
from hosts import put_first
from tiny import offline_trainer

import logitless as ll

put_first("trl")
pytest.importorskip("trl")


def moved(kind: str, folder, **options):
    """A trainer, one batch of it, and rows of what it scores, one sample per line."""
    run = offline_trainer(kind, folder, per_device_train_batch_size=4, **options)
    run.model.eval().float()
    torch.manual_seed(1)
    with torch.no_grad():
        for x in run.model.parameters():
            x += 0.05 * torch.randn_like(x)
    batch = next(iter(run.get_train_dataloader()))
    mask = batch["completion_mask"] if "completion_mask" in batch else batch["labels"] != -100
    return run, batch, ll.Rows.from_mask(batch["input_ids"], mask)


def both(run, batch, rows, objective, **fields):
    """TRL's loss and ours, with the gradient of the head's weight."""
    run.model.training = True  # TRL logs by it; there is no dropout in this model
    theirs = run.compute_loss(run.model, dict(batch))
    theirs.backward()
    weight = run.model.lm_head.weight
    wanted, weight.grad = weight.grad, None
    hidden = run.model.base_model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    loss, _ = ll.policy_loss(ll.Logits(hidden, weight), rows, objective, **fields)
    loss.backward()
    # Both are float32, and rounded in other places.
    torch.testing.assert_close(loss, theirs.detach(), rtol=1e-5, atol=1e-6)
    assert (weight.grad - wanted).norm() <= 1e-5 * wanted.norm()
    assert wanted.norm() > 1e-3


def reference(run, batch, rows):
    with torch.no_grad():
        hidden = run.ref_model.base_model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        return ll.logprobs(ll.Logits(hidden, run.ref_model.lm_head.weight), rows).logprob


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_sft(loss_type, tmp_path):
    run, batch, rows = moved("SFT", tmp_path, loss_type=loss_type)
    both(run, batch, rows, ll.Objective.recipe({"nll": "sft"}.get(loss_type, loss_type)))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["dpo", "ipo"])
def test_dpo(kind, tmp_path):
    run, batch, rows = moved("DPO", tmp_path, loss_type={"dpo": "sigmoid"}.get(kind, kind), beta=0.3)
    half = len(rows.counts) // 2
    preference = ll.Preference(kind, beta=0.3).pairs(range(half), range(half, 2 * half))
    both(run, batch, rows, preference, ref_logprob=reference(run, batch, rows))


@pytest.mark.filterwarnings("default")
def test_kto(tmp_path):
    run, batch, rows = moved("KTO", tmp_path, beta=0.3, desirable_weight=1.2, undesirable_weight=0.7)
    with torch.no_grad():
        mismatched = [run._compute_kl_logps(model, batch) for model in (run.model, run.ref_model)]
    z = (mismatched[0] - mismatched[1]).mean().clamp(min=0)
    liked = [bool(x) for x in batch["label"]]
    numbers = range(len(liked))
    preference = ll.Preference("kto", beta=0.3, desirable=1.2, undesirable=0.7)
    preference = preference.pairs([i for i in numbers if liked[i]], [i for i in numbers if not liked[i]])
    both(run, batch, rows, preference, ref_logprob=reference(run, batch, rows), reference_kl=z)
