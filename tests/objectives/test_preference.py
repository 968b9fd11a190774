"""``Preference`` against the papers' formulas in float64, values and gradients, and against TRL's DPO, KTO, CPO, ORPO.

The truth goes sample by sample over lists: sums of log-softmax, then each paper's formula as it is printed. Nothing
is shared with the library. The yardstick is the same in float32.
"""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from calls import loss_from_hidden
from close import assert_close_to_truth, assert_gradient_close_to_truth
from ranks import run_ranks
from torch import Tensor
from torch.nn.functional import log_softmax

import logitless as ll
from logitless.objectives import KINDS

COUNTS = [5, 3, 9, 1, 4, 7, 2, 6]
VOCAB, WIDTH = 83, 11
NEXT, APART = ((0, 2, 4, 6), (1, 3, 5, 7)), ((0, 1, 2, 3), (4, 5, 6, 7))
Z0 = 0.07

KIND_CASES = {
    "dpo": ("dpo", dict(beta=0.3)),
    "dpo, smoothed": ("dpo", dict(beta=0.3, label_smoothing=0.1)),
    "dpo, per token and sft": ("dpo", dict(beta=1.5, per_token=True, sft_coef=0.2)),
    "ipo": ("ipo", dict(beta=0.4)),
    "ipo, sums": ("ipo", dict(beta=0.4, per_token=False)),
    "hinge": ("hinge", dict(beta=0.5)),
    "simpo": ("simpo", {}),
    "cpo": ("cpo", {}),
    "orpo": ("orpo", dict(beta=0.2)),
    "kto": ("kto", dict(beta=0.3, desirable=1.2, undesirable=0.7)),
}


def log_sigmoid(x: Tensor) -> Tensor:
    return -torch.log1p(torch.exp(-x))


def pair_loss(kind: str, w: dict, l: dict, o: dict) -> Tensor:  # noqa: E741
    """Of one pair. w and l have S (sum of log-probs), D (minus the reference's), n (tokens)."""
    mean = o.get("per_token", kind in ("ipo", "simpo"))
    by = {True: (w["n"], l["n"]), False: (1, 1)}[mean]
    difference = w["D"] / by[0] - l["D"] / by[1]
    free = w["S"] / by[0] - l["S"] / by[1]
    sft = -o.get("sft_coef", 1.0 if kind in ("cpo", "orpo") else 0.0) * w["S"] / w["n"]
    beta, smooth = o.get("beta", {"simpo": 2.0}.get(kind, 0.1)), o.get("label_smoothing", 0.0)
    if kind == "dpo":
        h = beta * difference
        return -(1 - smooth) * log_sigmoid(h) - smooth * log_sigmoid(-h) + sft
    if kind == "ipo":
        return (difference - 1 / (2 * beta)) ** 2
    if kind == "hinge":
        return torch.clamp(1 - beta * difference, min=0)
    if kind == "simpo":
        return -log_sigmoid(beta * free - o.get("gamma", 1.0))
    if kind == "cpo":
        return -log_sigmoid(beta * free) + sft
    p, q = (torch.exp(x["S"] / x["n"]) for x in (w, l))
    odds = torch.log(p / (1 - p)) - torch.log(q / (1 - q))
    return -beta * log_sigmoid(odds) + sft


def told(batch, name: str, pairs, dtype):
    """Loss and gradients."""
    rows, hidden, weight, reference = batch
    kind, o = KIND_CASES[name]
    leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
    logp = log_softmax(leaves[0][rows.index] @ leaves[1].T, -1).gather(1, rows.target[:, None]).squeeze(1)
    samples = []
    for sample in range(len(rows.counts)):
        here = (rows.sample == sample) & rows.counted
        s, n = logp[here].sum(), max(1, int(here.sum()))
        samples.append({"S": s, "D": s - reference.to(dtype)[here].sum(), "n": n})
    if kind == "kto":
        wanted = [o["desirable"] * (1 - torch.sigmoid(o["beta"] * (samples[i]["D"] - Z0))) for i in pairs[0]]
        other = [o["undesirable"] * (1 - torch.sigmoid(o["beta"] * (Z0 - samples[i]["D"]))) for i in pairs[1]]
        losses = wanted + other
    else:
        losses = [pair_loss(kind, samples[i], samples[j], o) for i, j in zip(*pairs, strict=True)]
    loss = torch.stack(losses).mean()
    return loss.detach(), torch.autograd.grad(loss, leaves)


def draw(dtype=torch.float32, masks: bool = True, counts=COUNTS, **more):
    tokens = [torch.randint(VOCAB, (2 + n,)).tolist() for n in counts]
    kept = [[1, *(int(x) for x in torch.rand(n - 1) < 0.8)] if n else [] for n in counts]
    rows = ll.Rows.packed(tokens, counts, kept if masks else None, **more)
    hidden, weight = torch.randn(sum(counts) + 2 * len(counts), WIDTH) * 0.4, torch.randn(VOCAB, WIDTH)
    logp = log_softmax(hidden[rows.index] @ weight.T, -1).gather(1, rows.target[:, None]).squeeze(1)
    reference = logp + 0.3 * torch.randn(len(rows))
    return rows, hidden.to(dtype), weight.to(dtype), reference


def preference_of(name: str, pairs=NEXT) -> ll.Preference:
    kind, options = KIND_CASES[name]
    made = ll.Preference(kind, **options)
    return made if pairs is NEXT and kind != "kto" else made.pairs(*pairs)


def fields_of(preference: ll.Preference, reference: Tensor) -> dict[str, Tensor]:
    given = {"ref_logprob": reference} if preference.required else {}
    return given | ({"reference_kl": torch.tensor(Z0, dtype=torch.float64)} if preference.kind == "kto" else {})


def ours(batch, preference: ll.Preference, fields=None, **options):
    rows, hidden, weight, reference = batch
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
    given = fields_of(preference, reference) if fields is None else fields
    loss, metrics = loss_from_hidden(*leaves, rows, preference, **given, **options)
    return loss.detach(), torch.autograd.grad(loss, leaves), metrics.compute()


def assert_right(found, exact, usual, dtype) -> None:
    assert_close_to_truth(found[0], exact[0], usual[0], "loss")
    for mine, right, theirs in zip(found[1], exact[1], usual[1], strict=True):
        assert_gradient_close_to_truth(mine, right, theirs.to(dtype))


@pytest.mark.parametrize(
    ("pairs", "dtype"),
    [(NEXT, torch.float32), (NEXT, torch.bfloat16), (APART, torch.float32)],
    ids=["side by side", "side by side, bfloat16", "apart"],
)
@pytest.mark.parametrize("name", KIND_CASES)
def test_against_the_papers(name, pairs, dtype):
    """In chunks of whole pairs, in one piece, in two passes, and in two calls."""
    batch, preference = draw(dtype), preference_of(name, pairs)
    exact, usual = (told(batch, name, pairs, wide) for wide in (torch.float64, torch.float32))
    for options in ({"memory": 2 * 12 * VOCAB * 4}, {}, {"bits": "canonical"}):
        assert_right(ours(batch, preference, **options), exact, usual, dtype)
    rows, hidden, weight, reference = batch
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    loss, _ = preference(ll.logprobs(ll.Logits(*leaves), rows), rows, **fields_of(preference, reference))
    assert_right((loss, torch.autograd.grad(loss, leaves)), exact, usual, dtype)


def test_every_kind_is_tested():
    assert {kind for kind, _ in KIND_CASES.values()} == set(KINDS)


def test_a_reference_per_sample():
    batch, preference = draw(torch.float64), preference_of("dpo")
    rows, *_, reference = batch
    sums = torch.stack([reference[(rows.sample == i) & rows.counted].double().sum() for i in range(len(COUNTS))])
    whole, by_sample = ours(batch, preference), ours(batch, preference, {"ref_sample_logprob": sums})
    torch.testing.assert_close(whole[:2], by_sample[:2], rtol=1e-12, atol=1e-12)


def test_metrics_by_hand():
    rows = ll.Rows.packed([[0, 1, 2], [0, 3], [0, 4], [0, 5]], [2, 1, 1, 1])
    stats = ll.TokenStats(torch.tensor([-1.0, -2.0, -3.0, -2.0, -1.0]), None, None)
    reference = torch.tensor([-2.0, -2.0, -2.5, -1.0, -1.0])
    loss, metrics = ll.Preference("dpo", beta=0.5)(stats, rows, ref_logprob=reference)
    # Differences to the reference: 1 of sample 0, -0.5 of 1, -1 of 2, 0 of 3.
    numbers = metrics.compute()
    assert numbers["reward_chosen"] == pytest.approx(0.5 * (1 - 1) / 2)
    assert numbers["reward_rejected"] == pytest.approx(0.5 * (-0.5 + 0) / 2)
    assert numbers["reward_margin"] == pytest.approx(0.5 * (1.5 - 1) / 2)
    assert numbers["reward_accuracy"] == 0.5
    assert numbers["logprob_chosen"] == pytest.approx((-3 - 2) / 2)
    assert numbers["logprob_rejected"] == pytest.approx((-3 - 1) / 2)
    assert float(loss) == pytest.approx((math.log1p(math.exp(-0.75)) + math.log1p(math.exp(0.5))) / 2)
    assert numbers["loss"] == pytest.approx(float(loss))


def test_which_route():
    rows, hidden, weight, reference = draw()
    logits, memory = ll.Logits(hidden.requires_grad_(), weight.requires_grad_()), 2 * 12 * VOCAB * 4
    call, given = (ll.policy_loss, logits, rows), {"ref_logprob": reference}
    near = ll.explain(*call, ll.Preference("dpo"), memory=memory, **given)
    assert near.kind == "one pass"
    assert near.chunks == ((0, 8), (8, 18), (18, 29), (29, 37))
    assert "depends on its own pair" in str(near)
    far = ll.explain(*call, ll.Preference("dpo").pairs(*APART), memory=memory, **given)
    assert far.kind == "two passes"
    assert "the longest stretch of rows with whole pairs has 37 where memory= holds 12" in far.reason
    assert ll.explain(*call, ll.Preference("dpo").pairs(*APART), **given).kind == "one pass"
    kto = preference_of("kto")
    alone = ll.explain(*call, kto, memory=2 * 9 * VOCAB * 4, **fields_of(kto, reference))
    assert alone.chunks == ((0, 8), (8, 17), (17, 22), (22, 31), (31, 37))
    found = ll.estimate(*call, ll.Preference("dpo"), device="cpu", **given)
    assert found.peak > 0


def test_samples_without_tokens_and_without_a_pair():
    """An empty sample scores 0; a sample that no pair names has no gradient, nor does it count."""
    batch = draw(torch.float64, masks=False, counts=[4, 0, 3, 5])
    preference = ll.Preference("dpo", beta=0.3).pairs([0], [1])
    exact = told(batch, "dpo", ((0,), (1,)), torch.float64)
    found = ours(batch, preference, memory=2 * 4 * VOCAB * 8)
    torch.testing.assert_close(found[:2], exact, rtol=1e-10, atol=1e-12)
    rows = batch[0]
    assert not found[1][0][rows.index[rows.sample > 1]].any()
    empty = draw(torch.float64, masks=False, counts=[0, 0])
    loss, gradients, _ = ours(empty, ll.Preference("orpo"))
    assert loss.isfinite()
    assert not gradients[1].any()
    none = draw(torch.float64, masks=False, counts=[])
    assert ours(none, ll.Preference("dpo"))[0] == 0


def test_a_denominator_makes_parts_of_one_sum():
    batch = draw(torch.float64, masks=False)
    rows, hidden, weight, reference = batch
    whole = ours(batch, preference_of("dpo"))
    halves = []
    for samples in (range(4), range(4, 8)):
        keep = (rows.sample >= samples[0]) & (rows.sample <= samples[-1])
        part = ll.Rows.packed(
            [[0, *rows.target[rows.sample == i].tolist()] for i in samples], [COUNTS[i] for i in samples]
        )
        states = torch.zeros(part.num_tokens, WIDTH, dtype=torch.float64)
        states[part.index] = hidden[rows.index[keep]]
        halves.append(ours((part, states, weight, reference[keep]), preference_of("dpo"), denominator=4))
    torch.testing.assert_close(halves[0][0] + halves[1][0], whole[0])
    torch.testing.assert_close(halves[0][1][1] + halves[1][1][1], whole[1][1])


def test_a_reference_in_float64_is_read_as_the_log_probs_are():
    """In their dtype, as in one pass, where it is narrowed before they are there."""
    rows, one = ll.Rows.packed([[1, 2], [1, 3]], [1, 1]), torch.tensor([-1.0, -1.0])
    reference = one.double() - torch.tensor([1e-9, 0.0], dtype=torch.float64)
    _, metrics = ll.Preference("dpo")(ll.TokenStats(one, None, None), rows, ref_logprob=reference)
    assert metrics.compute()["reward_margin"] == 0.0


# Ranks.


def split(rank, world, tokens, hidden, weight, reference, names):
    """Samples split over context-parallel ranks: parts of one loss, in two passes."""
    rows = ll.Rows.packed(tokens, COUNTS, cp=ll.Zigzag(rank, world))
    whole = ll.Rows.packed(tokens, COUNTS, align=2 * world)
    # Hidden states of the whole pack, of which this rank has those of its rows.
    states = torch.zeros(rows.num_tokens, WIDTH, dtype=torch.float64)
    states[rows.index] = hidden[whole.index][rows.response]
    out = []
    for name in names:
        batch = (rows, states, weight, reference[rows.response])
        options = {"group": dist.group.WORLD, "check_group": True}
        loss, (d_hidden, d_weight), _ = ours(batch, preference_of(name), **options)
        out.append((loss, rows.response, d_hidden[rows.index], d_weight))
    return out


def test_over_a_context_parallel_group():
    world, names = 2, ["dpo", "kto", "orpo"]
    tokens = [torch.randint(VOCAB, (2 + n,)).tolist() for n in COUNTS]
    whole = ll.Rows.packed(tokens, COUNTS, align=2 * world)
    hidden = torch.randn(whole.num_tokens, WIDTH, dtype=torch.float64) * 0.4
    weight, reference = torch.randn(VOCAB, WIDTH, dtype=torch.float64), -torch.rand(len(whole)) * 4
    parts = run_ranks(split, world, tokens, hidden, weight, reference, names)
    for i, name in enumerate(names):
        loss, (d_hidden, d_weight) = told((whole, hidden, weight, reference), name, NEXT, torch.float64)
        torch.testing.assert_close(sum(part[i][0] for part in parts), loss, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(sum(part[i][3] for part in parts), d_weight, rtol=1e-10, atol=1e-12)
        for part in parts:
            torch.testing.assert_close(part[i][2], d_hidden[whole.index][part[i][1]], rtol=1e-10, atol=1e-12)


def pairs_apart(rank, world):
    """Rank 0 has rows of the first samples alone, so that the pairs of each rank go with other samples."""
    rows = ll.Rows.packed([torch.arange(4)] * 4, [2, 2, 2, 2], cp=ll.Contiguous(rank, world))
    logits = ll.Logits(torch.zeros(rows.num_tokens, 4), torch.zeros(5, 4))
    options = {"group": dist.group.WORLD, "check_group": True, "ref_sample_logprob": torch.zeros(4)}
    losses = [float(ll.policy_loss(logits, rows, ll.Preference("dpo"), **options)[0])]
    other = ll.Preference("dpo").pairs([0, 2], [1, 3] if rank else [3, 1])
    try:
        ll.policy_loss(logits, rows, other, **options)
    except ll.LogitlessError as error:
        losses.append("disagree about the pairs" in str(error))
    return losses


def test_ranks_compare_the_pairs_as_they_were_named():
    for loss, refused in run_ranks(pairs_apart, 2):
        assert loss == pytest.approx(math.log(2) / 2)
        assert refused


def sharded(rank, world, batch):
    """A shard of the vocabulary, in chunks of whole pairs; calls are compared over the ranks."""
    rows, hidden, weight, reference = batch
    start, stop = ((0, 50), (50, VOCAB))[rank]
    shard = ll.VocabShard(start, stop, dist.group.WORLD, check_calls=True)
    own = (rows, hidden, weight[start:stop], reference)
    loss, gradients, _ = ours(own, preference_of("dpo"), shard=shard, memory=2 * 12 * VOCAB * 8)
    return loss, *gradients


def test_over_a_vocabulary_group():
    batch = draw(torch.float64)
    loss, (d_hidden, d_weight) = told(batch, "dpo", NEXT, torch.float64)
    parts = run_ranks(sharded, 2, batch)
    for part in parts:
        torch.testing.assert_close(part[:2], (loss, d_hidden), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([part[2] for part in parts]), d_weight, rtol=1e-10, atol=1e-12)


# Errors.


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ll.Preference("dqo"), "kind 'dqo' is not known. Did you mean 'dpo'"),
        (lambda: ll.Preference("dpo", gamma=1.0), "'dpo' does not take gamma. It takes: beta, per_token"),
        (lambda: ll.Preference("dpo", beta=0.0), "beta must be above 0"),
        (lambda: ll.Preference("dpo", beta=math.inf), "beta must be a finite number"),
        (lambda: ll.Preference("dpo", label_smoothing=0.5), r"label_smoothing must be in 0 \.\. 0\.5"),
        (lambda: ll.Preference("dpo").pairs([0, 1], [2]), "chosen names 2 samples but rejected names 1"),
        (lambda: ll.Preference("dpo").pairs([0, 1], [2, 1]), "sample 1 is both chosen and rejected"),
        (lambda: ll.Preference("kto").pairs([0, 1], [2, 1]), "sample 1 is both chosen and rejected"),
        (lambda: ll.Preference("dpo").pairs([0], [-1]), "rejected must be sample numbers"),
        (lambda: ll.Preference("dpo", chosen=(0,)), "chosen and rejected go together"),
        (lambda: ll.Preference("dpo", chosen=(0,), rejected=(-1,)), "rejected must be sample numbers"),
        (lambda: ll.Preference("dpo", chosen=(-1,), rejected=(0,)), "chosen must be sample numbers"),
        (lambda: ll.Preference("kto", chosen=(1, -1), rejected=(0,)), "chosen must be sample numbers"),
        (lambda: ll.Preference("dpo", chosen=(0.0,), rejected=(1,)), "chosen must be sample numbers"),
        (lambda: ll.Preference("dpo", chosen=0, rejected=1), "chosen must be sample numbers, .* but is 0"),
        (lambda: ll.Preference("dpo").pairs(torch.tensor(0), [1]), "chosen must be sample numbers, .* but is 0"),
        (lambda: ll.Preference("dpo", per_token="no"), "per_token must be True or False but is 'no'"),
        (lambda: ll.Preference("dpo", per_token=1), "per_token must be True or False but is 1"),
    ],
)
def test_wrong_settings(make, text):
    with pytest.raises(ll.LogitlessError, match=f"^Preference: {text}"):
        make()


@pytest.mark.parametrize(
    ("preference", "fields", "text"),
    [
        (ll.Preference("kto"), {}, "kto must know which samples are desirable"),
        (ll.Preference("dpo").pairs([0], [8]), {}, "pairs name sample 8, chosen or rejected, but there are 8 samples"),
        (ll.Preference("dpo"), {}, "'dpo' needs log-probs of a reference, .* neither was given"),
        (ll.Preference("simpo"), {"ref_logprob": 37}, "'simpo' does not read the field ref_logprob"),
        (
            ll.Preference("dpo"),
            {"ref_logprobs": 37},
            "does not read the field ref_logprobs. Did you mean 'ref_logprob'",
        ),
        (ll.Preference("dpo"), {"ref_logprob": 8}, r"ref_logprob has shape \[8\] but there are 37 rows"),
        (ll.Preference("dpo"), {"ref_sample_logprob": 7}, r"must be a tensor of shape \[8\] .* of shape \[7\]"),
        (ll.Preference("dpo"), {"ref_logprob": 37, "ref_sample_logprob": 8}, "both came"),
        (ll.Preference("dpo"), {"ref_logprob": 37, "denominator": -1}, "denominator must be a count of 0 or more"),
        (ll.Preference("dpo"), {"ref_logprob": 37, "prompt_tokens": 8}, "prompt_tokens go with"),
    ],
)
def test_wrong_calls(preference, fields, text):
    batch = draw(masks=False)
    given = {name: torch.zeros(n) if n > 0 else n for name, n in fields.items()}
    with pytest.raises(ll.LogitlessError, match=f"Preference: .*{text}"):
        ours(batch, preference, given)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -2.0])
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_denominator_that_is_no_count(kind, value: float):
    with pytest.raises(ll.LogitlessError, match="Preference: denominator must be a count of 0 or more"):
        ours(draw(), ll.Preference("simpo"), denominator=kind(value))


@pytest.mark.parametrize("value", [math.nan, math.inf, -2.0])
def test_a_denominator_that_nobody_may_look_at_makes_the_loss_nan(monkeypatch, value: float):
    """As on an accelerator, where a look would stall the stream."""
    monkeypatch.setattr("logitless.objectives.reduction.inspectable", lambda x: False)
    batch, count = draw(), torch.tensor(value)
    assert ours(batch, ll.Preference("simpo"), denominator=count)[0].isnan()
    assert ours(batch, ll.Objective.recipe("sft"), {}, denominator=count)[0].isnan()


def test_a_denominator_of_another_kind():
    for wrong, text in (("4", "'4'"), (True, "True"), (torch.ones(1), r"shape \[1\]")):
        with pytest.raises(ll.LogitlessError, match=f"Preference: denominator must be .*{text}"):
            ours(draw(), ll.Preference("simpo"), denominator=wrong)


def test_numbers_of_samples_in_fields_are_those_of_pairs():
    made = ll.Preference("dpo", chosen=[0, 2], rejected=torch.tensor([1, 3]))
    assert (made.chosen, made.rejected) == ((0, 2), (1, 3))


def test_an_odd_number_of_samples_and_rows_without_samples():
    with pytest.raises(ll.LogitlessError, match="chosen and rejected by turns, but there are 3"):
        ours(draw(counts=[2, 3, 4]), ll.Preference("simpo"))
    with pytest.raises(ll.LogitlessError, match="know of no samples"):
        ll.Preference("simpo")(ll.TokenStats(torch.zeros(2), None, None), ll.Rows.every(torch.tensor([1, 2])))


# TRL's own losses. Its trainers are not run: a method gets what it reads.


def lines(rows, x) -> Tensor:
    """``[N, longest]``, zeros where there is no token, and a column more, as TRL's masks have one for the prompt."""
    out = torch.zeros(len(rows.counts), max(rows.counts), dtype=x.dtype)
    return out.index_put((rows.sample, rows.position), torch.where(rows.counted, x, torch.zeros_like(x)))


def trainer_of(reference, **own):
    from accelerate import Accelerator

    common = dict(
        accelerator=Accelerator(cpu=True),
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        ref_model=lambda **_: reference,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        precompute_ref_logps=False,
    )
    # With peft installed TRL looks whether the model is one of its.
    model = torch.nn.Module()
    model.is_gradient_checkpointing = False
    return SimpleNamespace(model=model, **common | own)


def answer(logp, zeros) -> SimpleNamespace:
    return SimpleNamespace(log_probs=logp, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


TRL_DPO = {
    "sigmoid": ll.Preference("dpo", beta=0.3),
    "hinge": ll.Preference("hinge", beta=0.3),
    "ipo": ll.Preference("ipo", beta=0.3),
    "sigmoid_norm": ll.Preference("dpo", beta=0.3, per_token=True),
}


def scored():
    """Rows, their log-probs with a graph, and a reference, in float64."""
    rows, hidden, weight, reference = draw(torch.float64)
    logp = log_softmax(hidden[rows.index] @ weight.T, -1).gather(1, rows.target[:, None]).squeeze(1)
    return rows, logp.detach().requires_grad_(), reference.double()


def assert_same_as_theirs(preference, rows, logp, theirs, off=1e-12, **fields) -> dict[str, float]:
    mine, metrics = preference(ll.TokenStats(logp, None, None), rows, **fields)
    torch.testing.assert_close(mine, theirs, atol=off, rtol=0)
    both = [torch.autograd.grad(x, logp, retain_graph=True)[0] for x in (mine, theirs)]
    torch.testing.assert_close(*both, atol=off, rtol=0)
    assert both[0].abs().max() > 1e-4
    return metrics.compute()


@pytest.mark.parametrize("kind", TRL_DPO)
def test_same_loss_as_trl_dpo(kind):
    trl = pytest.importorskip("trl")
    rows, logp, reference = scored()
    mask = torch.nn.functional.pad(lines(rows, torch.ones(len(rows), dtype=torch.int64)), (1, 0))
    zeros = torch.zeros_like(mask[:, 1:], dtype=torch.float64)
    trainer = trainer_of(
        answer(lines(rows, reference), zeros),
        beta=0.3,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        loss_types=[kind],
        loss_weights=[1.0],
        use_weighting=False,
    )
    inputs = {"input_ids": torch.zeros_like(mask), "attention_mask": mask, "completion_mask": mask}
    theirs = trl.DPOTrainer._compute_loss(trainer, lambda **_: answer(lines(rows, logp), zeros), inputs, False)
    numbers = assert_same_as_theirs(TRL_DPO[kind].pairs(*APART), rows, logp, theirs, ref_logprob=reference)
    names = {
        "rewards/chosen": "reward_chosen",
        "rewards/margins": "reward_margin",
        "logps/rejected": "logprob_rejected",
    }
    if not TRL_DPO[kind].settings.per_token:
        names["rewards/accuracies"] = "reward_accuracy"
        for own, name in names.items():
            assert numbers[name] == pytest.approx(trainer._metrics["train"][own][0], rel=1e-6), name


def test_same_loss_as_trl_kto():
    trl = pytest.importorskip("trl")
    rows, logp, reference = scored()
    mask = torch.nn.functional.pad(lines(rows, torch.ones(len(rows), dtype=torch.int64)), (1, 0))
    zeros = torch.zeros_like(mask[:, 1:], dtype=torch.float64)
    label = torch.tensor([i in NEXT[0] for i in range(len(COUNTS))])
    model = lambda **_: answer(lines(rows, logp), zeros)  # noqa: E731
    trainer = trainer_of(
        answer(lines(rows, reference), zeros),
        beta=0.3,
        loss_type="kto",
        calculate_KL=True,
        desirable_weight=1.2,
        undesirable_weight=0.7,
        # Sums of log-probs of mismatched pairs: their mean difference is z.
        _compute_kl_logps=lambda which, _: torch.full((8,), Z0 if which is model else 0.0, dtype=torch.float64),
    )
    batch = {"input_ids": torch.zeros_like(mask), "attention_mask": mask, "completion_mask": mask, "label": label}
    theirs = trl.KTOTrainer._compute_loss(trainer, model, batch, False)
    preference = ll.Preference("kto", beta=0.3, desirable=1.2, undesirable=0.7).pairs(*NEXT)
    assert_same_as_theirs(
        preference, rows, logp, theirs, ref_logprob=reference, reference_kl=torch.tensor(Z0, dtype=torch.float64)
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["simpo", "cpo", "orpo"])
def test_same_loss_as_trl_without_a_reference(kind):
    """The part that compares: TRL's cross-entropy of the chosen is a mean over tokens, that of the papers is not."""
    pytest.importorskip("trl")
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    rows, logp, _ = scored()
    sums = torch.zeros(len(COUNTS), dtype=torch.float64).index_add(0, rows.sample, torch.where(rows.counted, logp, 0.0))
    scores = sums if kind == "cpo" else sums / rows.totals
    pair = [scores[list(samples)] for samples in APART]
    own = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"), beta=0.7, label_smoothing=0.0, alpha=0.0)
    if kind == "orpo":
        # In float32 inside, and with the other sign.
        losses = -ORPOTrainer.odds_ratio_loss(own, *pair)[0]
    else:
        own.loss_type, own.simpo_gamma = {"cpo": "sigmoid"}.get(kind, kind), 0.6
        losses, *_ = CPOTrainer.cpo_loss(own, *pair)
    options = {"simpo": {"gamma": 0.6}}.get(kind, {"sft_coef": 0.0})
    preference = ll.Preference(kind, beta=0.7, **options).pairs(*APART)
    assert_same_as_theirs(preference, rows, logp, losses.mean().double(), off=1e-6 if kind == "orpo" else 1e-12)
