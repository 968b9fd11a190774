"""``logitless plan``: the bytes it predicts are those the allocator counts, and the code it recommends runs."""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from benchmarks.bench.measure import peak_bytes
from logitless import Kept, Logits, Objective, logprobs, policy_loss
from logitless.errors import LogitlessError
from logitless.rows import Rows
from logitless.tools.plan import WAYS, LossStep, plan_model, ways
from logitless.tools.plan.recommend import BUDGETS, LESS, snippet
from logitless.tools.plan.show import answer_lines, as_json, headline, summary_rows
from logitless.tools.plan.ways import FROM_HIDDEN, POLICY_LOSS, plain_linear
from logitless.tools.presets import CARDS, PRESETS, ModelShape, find_card, find_count, find_model, machine_of

TINY = ModelShape("tiny", hidden=48, vocab=5003)
STEP = LossStep(TINY, tokens=1501, response_fraction=0.4, dtype="float32", device="cpu", memory="4MiB")


# Predicted and measured.


def make_step(step: LossStep, way: str, device: torch.device):
    """The step as a training loop writes it, from hidden states to their gradients."""
    model, where = step.model, {"device": device, "dtype": getattr(torch, step.dtype)}
    hidden = torch.randn(step.local_tokens, model.hidden, requires_grad=True, **where)
    weight = torch.randn(model.vocab, model.hidden, requires_grad=not step.frozen_head, **where)
    index = torch.randperm(step.local_tokens, device=device)[: step.rows].sort().values
    target = torch.randint(model.vocab, (step.local_tokens,), device=device)
    rows = Rows.at(index, target[: step.rows], num_tokens=step.local_tokens)
    advantage = torch.ones(step.rows, device=device)

    def run():
        logits = None
        if way == "plain torch":
            out = plain_linear(hidden, weight, None, target, step.entropy)
        elif way == "logprobs of Logits":
            out = logprobs(Logits(hidden, weight), rows, entropy=step.entropy, memory=step.memory)
        elif way == "policy_loss of Logits":
            objective = Objective(entropy_coef=0.1 if step.entropy == "grad" else 0.0)
            fields = {"old_logprob": "current", "advantage": advantage}
            loss, _ = policy_loss(Logits(hidden, weight), rows, objective, memory=step.memory, **fields)
            out = (loss,)
        else:
            logits = hidden @ weight.T
            out = logprobs(Logits.given(logits, overwrite="overwrite" in way), rows, entropy=step.entropy)
        outputs = [out[0], out[1]] if step.entropy == "grad" and len(out) > 1 else [out[0]]
        leaves = [hidden] if step.frozen_head else [hidden, weight]
        return torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs]), logits

    return run


@pytest.mark.parametrize("frozen", [False, True], ids=["whole", "frozen"])
@pytest.mark.parametrize("entropy", [None, "value", "grad"])
@pytest.mark.parametrize("way", [way for way in WAYS if way.name != "slime-style"], ids=lambda way: way.name)
def test_the_peak_is_the_measured_one(way, entropy, frozen, device):
    step = replace(STEP, entropy=entropy, frozen_head=frozen)
    if device.type == "cuda":
        large = ModelShape("large", hidden=2048, vocab=50001)
        step = replace(step, model=large, tokens=12289, dtype="bfloat16", device="cuda", memory="256MiB")
    check_peak(way, step, device)


@pytest.mark.parametrize("way", [way for way in WAYS if way.name.startswith("logprobs")], ids=lambda way: way.name)
def test_where_the_head_is_deep_its_own_backward_is_the_peak(way):
    check_peak(way, replace(STEP, model=ModelShape("deep", hidden=1024, vocab=5003), tokens=701), torch.device("cpu"))


def check_peak(way, step, device):
    run = make_step(step, way.name, device)
    run()
    assert way.predict(step).peak == pytest.approx(peak_bytes(run, device), rel=0.05)


def test_slime_style_is_what_was_measured_of_it():
    """From float32 logits [16384, 151936], 9.27 GiB: 9.3 GiB more, and 18.6 with entropy's gradient."""
    model = ModelShape("measured", hidden=1, vocab=151936)
    (slime,) = [way for way in WAYS if way.name == "slime-style"]
    for entropy, more in (("value", 9.3), ("grad", 18.6)):
        step = LossStep(model, tokens=16384, dtype="float32", entropy=entropy)
        beyond = slime.predict(step).peak - 16384 * 151936 * 4
        assert beyond / 2**30 == pytest.approx(more, rel=0.05)


def test_half_precision_logits_are_upcast_in_slime_style():
    (slime,) = [way for way in WAYS if way.name == "slime-style"]
    size = 1500 * 5003
    wide = replace(STEP, tokens=1500, dtype="bfloat16", entropy="value")
    # The logits, their gradient, and both casts of it at once.
    assert slime.predict(wide).peak == size * (4 + 4 + 2)


# Shapes.


def test_ranks_share_tokens_and_columns():
    step = LossStep(TINY, tokens=1000, response_fraction=0.5, tp=2, cp=4)
    assert (step.local_tokens, step.rows, step.columns) == (250, 125, 2502)
    alone, shared = (WAYS[0].predict(s).peak for s in (replace(step, tp=1, cp=1), step))
    assert shared == pytest.approx(alone / 8, rel=0.01)


def test_a_rank_has_the_tokens_that_do_not_divide():
    """Of 1,001 tokens over 4 ranks the fullest has 251, and that is the one that runs out of memory."""
    step = LossStep(TINY, tokens=1001, cp=4)
    assert (step.local_tokens, step.rows) == (251, 251)
    even = replace(step, tokens=1004)
    assert [way.predict(step).peak for way in WAYS[:2]] == [way.predict(even).peak for way in WAYS[:2]]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("qwen3-8b", "Qwen3Config"),
        ("gemma2-2b", "Gemma2Config"),
        ("glm4-9b", "Glm4Config"),
        ("deepseek-v3-671b", "DeepseekV3Config"),
    ],
)
def test_presets_are_the_defaults_of_their_configurations(name, config, tmp_path):
    """Those classes default to the model of that size; the others are read the same way."""
    made = getattr(pytest.importorskip("transformers"), config)()
    made.save_pretrained(tmp_path)
    read = find_model(str(tmp_path))
    assert replace(read, name=name, tied=PRESETS[name].tied) == PRESETS[name]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"hidden_size": 8, "vocab_size": 9, "tie_word_embeddings": False}, ModelShape("m", 8, 9)),
        ({"n_embd": 8, "vocab_size": 9}, ModelShape("m", 8, 9, tied=True)),
        ({"hidden_size": 8, "padded_vocab_size": 9}, ModelShape("m", 8, 9, tied=True)),
        ({"hidden_size": 8, "vocab_size": 7, "padded_vocab_size": 9}, ModelShape("m", 8, 9, tied=True)),
        ({"hidden_size": 8, "vocab_size": 9, "logits_scaling": 4.0}, ModelShape("m", 8, 9, scale=0.25, tied=True)),
        ({"hidden_size": 8, "vocab_size": 9, "logit_scale": 0.5}, ModelShape("m", 8, 9, scale=0.5, tied=True)),
        (
            {"text_config": {"hidden_size": 8, "vocab_size": 9, "final_logit_softcapping": 30.0}},
            ModelShape("m", 8, 9, softcap=30.0, tied=True),
        ),
    ],
)
def test_a_configuration_is_read(tmp_path, fields, expected):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "m", **fields}))
    assert find_model(str(path)) == find_model(str(tmp_path)) == expected


# What fits, and what to write.


def test_the_most_tokens_fit_and_no_more():
    free = 4 << 30
    plan = plan_model(replace(STEP, device="cuda"), free)
    for forecast in plan.forecasts:
        most = forecast.most_tokens
        assert most > 0
        assert most % 256 == 0
        assert forecast.way.predict(replace(plan.step, tokens=most)).peak <= free
        assert forecast.way.predict(replace(plan.step, tokens=most + 256)).peak > free
    assert plan_model(replace(STEP, device="cuda"), 1000).forecasts[0].most_tokens == 0


LIMIT = 1 << 32
PEAKS = {
    "straight": lambda n: 7 + 3 * n,
    "bent": lambda n: max(1000 + n, 40 * n - 5000),
    "steps": lambda n: 640 * (n // 10),
    "nearly flat": lambda n: 500 + n // 1000,
    "curved": lambda n: n * n,
}


@pytest.mark.parametrize("peak", PEAKS.values(), ids=PEAKS)
@pytest.mark.parametrize("start", [0.3, 1.0, 17.5, 4000.0])
@pytest.mark.parametrize("free", [0, 6, 7, 999, 12345, 10**6])
def test_the_search_is_exact_on_any_rising_peak(peak, start, free):
    probes = []
    found = ways.largest_fitting(lambda n: probes.append(n) or peak(n), free, LIMIT, (start, peak(start)))
    assert found == max(0, bisect_right(range(LIMIT), free, key=peak) - 1)
    assert len(probes) == len(set(probes)) <= (4 if peak is PEAKS["straight"] else 70)


@pytest.mark.parametrize("model", ["qwen3-0.6b", "gemma2-27b", "llama3.1-405b"])
def test_a_plan_takes_few_estimates(model, monkeypatch):
    """Each runs the call without a device, which takes some hundredths of a second."""
    asked, real = [], ways.estimate
    monkeypatch.setattr(ways, "estimate", lambda *args, **sizes: asked.append(args) or real(*args, **sizes))
    step = LossStep(find_model(model), tokens=32768, response_fraction=0.5)
    plan_model(step)
    assert len(asked) == 5
    asked.clear()
    plan_model(step, find_card("h100-80g"))
    assert len(asked) <= 28


def test_the_recommendation_takes_the_fewest_products_that_fit():
    step = LossStep(find_model("qwen3-8b"), tokens=16384, response_fraction=0.5, entropy="grad")
    plan = plan_model(step)
    assert (plan.best.way, plan.best.products, plan.best.memory) == (POLICY_LOSS, 3, "1GiB")
    assert plan.own_loss.call.plan.kind == "recompute"
    roomy = plan_model(step, find_card("h100-80g"))
    assert (roomy.best.way, roomy.call.plan.kind, roomy.fits) == (POLICY_LOSS, "one pass", True)
    own = roomy.own_loss
    assert (own.call.plan.kind, own.memory, own.products) == ("keep", "4GiB", 3)
    assert roomy.call.peak < own.call.peak
    small = plan_model(step, 3 << 30)
    assert small.own_loss.call.plan.kind == "recompute"
    frozen = plan_model(replace(step, frozen_head=True, entropy="value"), 3 << 30)
    assert frozen.own_loss.call.plan.kind == "frozen"
    assert frozen.best.products == 2
    tight = plan_model(step, 1 << 20)
    assert not tight.fits
    assert not any(forecast.fits for forecast in tight.forecasts)


@pytest.mark.parametrize("entropy", ["value", "grad"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("free", ["1.7GiB", "2.4GiB", "3GiB", "20GiB"])
def test_no_call_that_fits_beats_the_recommended_one(entropy, frozen, free):
    """Fewer products, or as many in less memory with the default budget: none of the calls from hidden states."""
    free = find_card(free)
    step = LossStep(find_model("qwen3-4b"), 16384, 0.25, entropy=entropy, frozen_head=frozen)
    plan = plan_model(step, free)
    tried = [(way, memory) for way in (POLICY_LOSS, FROM_HIDDEN) for memory in (*LESS[::-1], *BUDGETS[2:6])]
    calls = [(way, way.predict(replace(step, memory=memory))) for way, memory in tried]
    fit = [(way, call) for way, call in calls if call.peak <= free]
    assert plan.fits == bool(fit)
    if fit:
        count = {"one pass": 2 if frozen else 3}
        fewest = min(count.get(c.plan.kind) or (c.plan.first if w is POLICY_LOSS else c.plan).products for w, c in fit)
        assert plan.best.products == fewest


def test_a_budget_other_than_the_default_is_recommended_where_it_helps():
    step = LossStep(find_model("llama3.2-1b"), tokens=4096)
    peaks = {memory: POLICY_LOSS.predict(replace(step, memory=memory)).peak for memory in ("1GiB", "512MiB")}
    assert peaks["1GiB"] > peaks["512MiB"]
    plan = plan_model(step, peaks["1GiB"] - 1)
    assert (plan.best.way, plan.best.memory, plan.best.products, plan.fits) == (POLICY_LOSS, "512MiB", 3, True)
    assert plan.most_tokens >= 4096
    # Few rows: the defaults take four products, and a large card has room for three, in either way.
    step = LossStep(find_model("gemma3-1b"), tokens=1024)
    assert plan_model(step).best.products == 4
    plan = plan_model(step, find_card("h100-80g"))
    calls = [way.predict(replace(step, memory=memory)) for way in (POLICY_LOSS, FROM_HIDDEN) for memory in BUDGETS[:6]]
    three = [call.peak for call in calls if call.plan.kind in ("one pass", "keep")]
    assert (plan.best.products, plan.call.peak) == (3, min(three))


def test_the_answer_is_a_few_lines():
    step = LossStep(find_model("qwen3-8b"), 131072, 0.5, 2, 2, entropy="grad")
    plan = plan_model(step, find_card("h100-80g") - (60 << 30))
    lines = answer_lines(plan)
    assert (
        lines[0] == 'Write policy_loss(ll.Logits(hidden, weight), ..., memory="1GiB"): 3 matrix products, '
        "peak 2.74 GiB of 19.65 GiB free."
    )
    assert lines[1] == f"Micro-batch: 131072 tokens fit; the largest that fits has {plan.most_tokens}."
    assert lines[2] == "Plain torch needs 92.73 GiB, 33.9 times as much."
    assert lines[3].startswith(
        'If the loss is not an Objective: logprobs(ll.Logits(hidden, weight), ..., memory="8GiB"), 3 matrix products'
    )
    # A micro-batch as large as promised fits, and one step more does not.
    best = replace(step, memory=plan.best.memory)
    assert POLICY_LOSS.predict(replace(best, tokens=plan.most_tokens)).peak <= plan.free
    assert POLICY_LOSS.predict(replace(best, tokens=plan.most_tokens + 256)).peak > plan.free
    crowded = answer_lines(plan_model(step, 1 << 30))
    assert "131072 tokens DO NOT FIT; the largest that fits has" in crowded[1]
    assert "none fits: take more ranks" in answer_lines(plan_model(step, 1 << 20))[1]


def test_a_memory_that_is_asked_for_is_kept():
    step = LossStep(find_model("qwen3-8b"), 16384, memory="128MiB")
    for free in (None, find_card("h100-80g")):
        plan = plan_model(step, free)
        assert plan.best.memory == plan.own_loss.memory == "128MiB"
        assert 'memory="128MiB"' in plan.snippet


def test_supports_of_few_ids_are_one_way_more():
    step = LossStep(find_model("qwen3-8b"), tokens=16384, entropy="grad")
    names = [forecast.way.name for forecast in plan_model(step).forecasts]
    over = plan_model(replace(step, kept_ids=8.2)).forecasts
    assert [forecast.way.name for forecast in over] == [*names, 'logprobs of Logits, scope="support"']
    assert over[-1].estimate.plan.kind == "support"
    best = plan_model(replace(step, kept_ids=8.2))
    assert (best.call.plan.kind, best.best.products, best.own_loss) == ("support", 0, best.best)
    assert answer_lines(best)[0].startswith(
        'Write logprobs(ll.Logits(hidden, weight), ..., kept=kept.over("support"), memory="256MiB"): no matrix pr'
    )
    assert over[-1].estimate.plan.ids == round(8.2 * 16384) + 16384
    # Gradients and vectors of the ids, and no tile.
    gradients = 2 * (16384 + 151936) * 4096
    assert gradients < over[-1].estimate.peak < gradients + (64 << 20)
    with pytest.raises(LogitlessError, match="plan: kept_ids must be 0 or more on average but is -1"):
        replace(step, kept_ids=-1)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def made_once(namespace, weight, tp, cp, group):
    """What the code takes besides tensors: the shard, made by a function of its own, and the context-parallel group."""
    assert ("make_shard" in namespace) == (tp > 1)
    return [*([namespace["make_shard"](weight, group)] if tp > 1 else []), *([group] if cp > 1 else [])]


@pytest.mark.parametrize("entropy", [None, "value", "grad"])
@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("shape", [TINY, replace(TINY, softcap=20.0, scale=0.5)], ids=["plain", "capped"])
def test_the_recommended_code_runs_and_is_right(group, shape, tp, cp, entropy):
    code = snippet(LossStep(shape, tokens=64, tp=tp, cp=cp, entropy=entropy), "logprobs of Logits", "1MiB")
    assert max(map(len, code.splitlines())) <= 80
    namespace: dict = {}
    exec(code, namespace)
    tokens = [torch.randint(31, (n,)) for n in (6, 8)]
    hidden, weight = torch.randn(14, 5), torch.randn(31, 5)
    results = namespace["score"](hidden, weight, tokens, [2, 5], *made_once(namespace, weight, tp, cp, group))
    logprob = results if entropy is None else results[0]
    assert [len(x) for x in logprob] == [2, 5]
    z = (hidden @ weight.T).double()
    z = z if shape.softcap is None else 20 * torch.tanh(0.5 * z / 20)
    truth = torch.log_softmax(z, -1)
    torch.testing.assert_close(logprob[0].double(), truth[[3, 4], tokens[0][4:]], atol=1e-5, rtol=0)
    if entropy is not None:
        wanted = -(truth.exp() * truth).sum(-1)[8:13]
        torch.testing.assert_close(results[1][1].double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("entropy", ["value", "grad"])
def test_the_recommended_loss_runs_and_is_right(group, tp, cp, entropy):
    code = snippet(LossStep(TINY, tokens=64, tp=tp, cp=cp, entropy=entropy), "policy_loss of Logits", "1MiB")
    assert max(map(len, code.splitlines())) <= 80
    namespace: dict = {}
    exec(code, namespace)
    tokens = [torch.randint(31, (n,)) for n in (6, 8)]
    hidden, weight = torch.randn(14, 5, dtype=torch.float64), torch.randn(31, 5, dtype=torch.float64)
    log_p = torch.log_softmax(hidden @ weight.T, -1)
    rows, targets = torch.tensor([3, 4, 8, 9, 10, 11, 12]), torch.cat([tokens[0][-2:], tokens[1][-5:]])
    logprob, per_token = log_p[rows, targets], -(log_p.exp() * log_p).sum(-1)[rows]
    old = [x - 0.05 for x in logprob.split([2, 5])]
    advantages = torch.tensor([1.0, -2.0], dtype=torch.float64)
    loss, metrics = namespace["policy_loss"](
        hidden, weight, tokens, [2, 5], old, advantages, 9.0, *made_once(namespace, weight, tp, cp, group)
    )
    assert ("group=cp_group" in code) == (cp > 1)
    ratio = (0.05 * torch.ones(7, dtype=torch.float64)).exp()
    wanted = -(ratio * advantages[torch.tensor([0] * 2 + [1] * 5)] + (0.001 * per_token if entropy == "grad" else 0))
    torch.testing.assert_close(loss.double(), wanted.sum() / 9, atol=1e-6, rtol=0)
    assert metrics.compute()["entropy"] == pytest.approx(float(per_token.mean()), abs=1e-5)


def test_the_recommended_code_over_supports_runs_and_is_right():
    code = snippet(LossStep(TINY, tokens=64, kept_ids=2.0), 'logprobs of Logits, scope="support"', "1MiB")
    namespace: dict = {}
    exec(code, namespace)
    hidden, weight, tokens = torch.randn(6, 5), torch.randn(31, 5), torch.arange(6)
    kept = Kept.from_lists([[4, 9], [5, 30, 2]])
    (logprob,), (entropy,) = namespace["score"](hidden, weight, [tokens], [2], kept)
    z = (hidden @ weight.T).double()
    first, second = torch.log_softmax(z[3, [4, 9]], -1), torch.log_softmax(z[4, [5, 30, 2]], -1)
    wanted = torch.stack([first[0], second[0]])
    torch.testing.assert_close(logprob.double(), wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(float(entropy[0]), float(-(first.exp() * first).sum()), atol=1e-5, rtol=0)


def test_it_can_be_shown():
    plan = plan_model(replace(STEP, tp=2), 1 << 30)
    assert "each rank of TP 2, CP 1: 600 of 1501 tokens are response, 2502 columns" in headline(plan.step)
    assert [row[0] for row in summary_rows(plan)] == [way.name for way in WAYS]
    # Each but the first, plain torch, as a share of that.
    peaks = [forecast.estimate.peak for forecast in plan.forecasts]
    assert [row[2] for row in summary_rows(plan)] == ["", *(f"{peak / peaks[0]:.1%}" for peak in peaks[1:])]
    assert "logit scale" not in headline(plan.step)
    scaled = replace(plan.step, model=replace(plan.step.model, scale=0.25))
    assert "logit scale 0.25" in headline(scaled)
    fields = json.loads(json.dumps(as_json(plan)))
    for way in fields["ways"]:
        assert way["peak"] == max(sum(item["bytes"] for item in way[side]) for side in ("forward", "backward"))
    assert fields["call"]["fits"] is True
    assert fields["step"]["rows"] == 600


# Errors.


def test_errors_name_what_was_wanted(tmp_path):
    broken = tmp_path / "config.json"
    for text, said in (
        ("{", "config.json is not JSON"),
        ("[]", "must hold a JSON object but holds list"),
        ('{"vocab_size": 3}', "hidden_size must be a positive integer of at most 2147483648 but is None"),
    ):
        broken.write_text(text)
        with pytest.raises(LogitlessError, match=said):
            find_model(str(broken))
    for call, said in (
        (lambda: find_model("qwen3-9b"), "or a preset but is 'qwen3-9b'. Did you mean 'qwen3-4b'"),
        (lambda: find_card("h100"), "or a name but is 'h100'. Did you mean 'h100-80g'"),
        (lambda: replace(STEP, tokens=0), "tokens must be an integer of at least 1 but is 0"),
        (lambda: replace(STEP, response_fraction=1.5), "response_fraction must be above 0 and at most 1 but is 1.5"),
        (lambda: replace(STEP, dtype="int8"), "dtype must be one of"),
        (lambda: plan_model(replace(STEP, entropy="all")), "entropy must be None"),
    ):
        with pytest.raises(LogitlessError) as caught:
            call()
        assert said in str(caught.value)


def test_cards_and_sizes():
    assert find_card("H100-80G") == CARDS["h100-80g"].memory << 20
    assert find_card("24GiB") == 24 << 30


def test_the_machine_is_that_of_the_card():
    """Of a card without products that end in a softmax, the plan has none, wherever it is asked for."""
    step = LossStep(find_model("qwen3-8b"), tokens=16384, entropy="grad")
    hopper, ampere = (replace(step, device=machine_of(card)) for card in ("h100-80g", "A100-80G"))
    assert machine_of(None) == machine_of("80GiB") == "cuda"
    assert machine_of("h200-141g").epilogues
    assert "written by the product itself" in str(POLICY_LOSS.predict(hopper).plan)
    assert "written by the product itself" not in str(POLICY_LOSS.predict(ampere).plan)
    # Where the product does not end in the statistic, forward holds a tile of logits.
    assert FROM_HIDDEN.predict(ampere).forward_peak > FROM_HIDDEN.predict(hopper).forward_peak
    assert headline(ampere).endswith("tiles and route of a100-80g")


def test_tokens_as_people_write_them():
    written = {"64k": 65536, "64K": 65536, "65_536": 65536, "65536": 65536, "1.5k": 1536, "1m": 1 << 20}
    assert {text: find_count(text) for text in written} == written
    for text in ("many", "0", "-3", "1.5", "64kb", ""):
        with pytest.raises(LogitlessError, match="--tokens must be a number of tokens, as 65536 or 64k, but is"):
            find_count(text)


def test_what_plain_torch_holds_is_called_by_what_made_it():
    """Not by names that rows of this library have."""
    (plain,) = [way for way in WAYS if way.name == "plain torch"]
    held = [item for item in plain.predict(replace(STEP, entropy="grad")).items if item.bytes > 1 << 20]
    names = {item.name.split(" [")[0] for item in held}
    assert "vectors of each row" not in names
    assert any(name.startswith("result of _log_softmax") for name in names), names
