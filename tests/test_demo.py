"""The demo: a run is the same every time, with either loss step and over any ranks, and its verdict is earned."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from programs import run_program
from rich.console import Console
from typer.testing import CliRunner

from examples.demo import Demo, Setting, num_reports, policy, run, run_demo, steps, verdict
from examples.demo.__main__ import app, main
from examples.demo.figure import draw_demo
from examples.demo.grid import Grid, make_grid
from examples.demo.memory import WAYS, PeaksByFraction, peaks_by_fraction, step_peak
from examples.demo.policy import head_of, hidden_states, new_policy, sample_responses
from examples.demo.report import show_demo
from examples.demo.task import SEPARATOR, draw_prompts, rewards_of
from examples.demo.train import Curve, train, warm_start
from logitless import LogitlessError, Rows

TINY = Setting(steps=4, vocab=128, length=3, prompts=4, group=4, warm_steps=6)
SMALL_BATCHES = {"samples": 2, "length": 16, "vocab": 512, "width": 8, "fractions": (0.5, 1.0)}


def silent(text: str) -> None:
    pass


@pytest.fixture(scope="module")
def start():
    return warm_start(TINY)


# The task and the policy.


def test_rewards_are_the_share_of_digits_in_place():
    generator = torch.Generator().manual_seed(0)
    prompts = draw_prompts(5, 4, generator)
    assert prompts.shape == (5, 5)
    assert (prompts[:, -1] == SEPARATOR).all()
    assert rewards_of(torch.cat([prompts, prompts[:, :4]], 1)).tolist() == [1.0] * 5
    assert rewards_of(torch.cat([prompts, prompts[:, :2], prompts[:, 2:4] + 11], 1)).tolist() == [0.5] * 5


def test_samples_follow_the_policy():
    """Each id comes as often as its probability says, within four standard deviations."""
    one, num = new_policy(16, 3), 4096
    with torch.no_grad():
        one.head.mul_(20)
    prompt = draw_prompts(1, 3, torch.Generator().manual_seed(0))
    sampled = sample_responses(one, prompt.expand(num, -1), torch.arange(num), 1, Grid())[:, -1]
    wanted = torch.softmax(hidden_states(one, prompt, Grid())[0, -1] @ one.head.T, -1).detach()
    assert wanted.max() > 0.1
    spread = (wanted * (1 - wanted) / num).sqrt()
    assert ((torch.bincount(sampled, minlength=16) / num - wanted).abs() <= 4 * spread + 2 / num).all()


def test_a_cached_rollout_sees_what_training_sees():
    """At next to no temperature every token sampled is the likeliest one of the whole sequence's hidden states."""
    one = new_policy(64, 0)
    with torch.no_grad():
        one.head.mul_(1e5)
    prompts = draw_prompts(6, 3, torch.Generator().manual_seed(0))
    whole = sample_responses(one, prompts, torch.arange(6), 5, Grid())
    likeliest = (hidden_states(one, whole, Grid()) @ one.head.T).argmax(-1)
    assert torch.equal(whole[:, 4:], likeliest[:, 3:-1])
    assert len(whole[:, 4:].unique()) > 3


# The loss steps.


@pytest.mark.parametrize("again", [False, True], ids=["on policy", "second update"])
def test_all_steps_have_the_same_loss_and_gradients(again):
    torch.manual_seed(0)
    rows = Rows.padded(list(torch.randint(301, (5, 11))), [7] * 5)
    hidden, weight = torch.randn(5, 11, 12), torch.randn(301, 12)
    head = head_of(weight)
    advantage = torch.randn(5)[rows.sample]
    old = None
    if again:
        old = steps.plain_step(hidden, head, rows, advantage, None)[1] + 0.3 * torch.randn(len(rows))

    def gradients(step, dtype):
        h, layer = hidden.to(dtype).requires_grad_(), head_of(weight.to(dtype))
        loss, logprob = step(h, layer, rows, advantage.to(dtype), None if old is None else old.to(dtype))
        loss.backward()
        return loss.detach(), logprob, h.grad, layer.weight.grad

    log_p = torch.log_softmax(rows.take(hidden).double() @ weight.double().T, -1)
    truth = log_p.gather(1, rows.target[:, None]).squeeze(1)
    plain = gradients(steps.plain_step, torch.float32)
    assert (plain[1] - truth).abs().max() < 1e-5
    for step in (steps.plain_step_by_halves, steps.plain_step_of_all_rows, steps.deferred_step, steps.logitless_step):
        for got, wanted in zip(gradients(step, torch.float32), plain, strict=True):
            assert (got - wanted).abs().max() <= 2e-5 * (1 + wanted.abs().max())
            assert wanted.abs().max() > 1e-3


# Training.


def test_a_run_is_the_same_every_time_and_for_both_steps(start):
    runs = [
        train("x", start, step, TINY, silent)
        for step in (steps.plain_step, steps.plain_step, steps.logitless_step, steps.deferred_step)
    ]
    assert torch.equal(runs[0].tokens, runs[1].tokens)
    assert torch.equal(runs[0].last[2], runs[1].last[2])
    moved = (runs[0].last[2] - start.head).abs().max()
    for ours in runs[2:]:
        assert torch.equal(runs[0].tokens, ours.tokens)
        assert runs[0].rewards == ours.rewards
        assert (runs[0].last[2] - ours.last[2]).abs().max() < 1e-3 * moved
    other = train("x", start, steps.plain_step, replace(TINY, seed=1), silent)
    assert not torch.equal(other.tokens, runs[0].tokens)


def test_the_reward_rises():
    """Two digits, a smaller vocabulary: a minute's lesson in seconds."""
    easy = Setting(steps=45, vocab=32, length=2, prompts=8, group=16, warm_steps=25, learning_rate=1e-2)
    curve = train("x", warm_start(easy), steps.logitless_step, easy, silent)
    assert curve.first_reward < 0.2
    assert curve.last_reward > curve.first_reward + run.RISE


def test_a_wrong_loss_step_makes_another_curve(start):
    def wrong(hidden, head, rows, advantage, old):
        loss, logprob = steps.logitless_step(hidden, head, rows, advantage, old)
        return -loss, logprob

    runs = [train("x", start, step, TINY, silent) for step in (steps.plain_step, wrong)]
    assert not torch.equal(runs[0].tokens, runs[1].tokens)


def split_run(rank, world, tp, cp):
    grid = make_grid(tp, cp, torch.distributed.group.WORLD)
    begin = warm_start(TINY)
    curve = train("x", begin, steps.logitless_step, TINY, silent, grid)
    return curve.rewards, curve.tokens, curve.last[2], grid.columns(TINY.vocab)


@pytest.mark.parametrize(("tp", "cp"), [(2, 2), (1, 4), (4, 1)])
def test_every_split_gives_the_same_run(tp, cp, ranks, start):
    whole = train("x", start, steps.plain_step, TINY, silent)
    for rewards, tokens, head, columns in ranks(split_run, 4, tp, cp):
        assert rewards == whole.rewards
        assert torch.equal(tokens, whole.tokens)
        moved = (whole.last[2] - start.head).abs().max()
        assert (head - whole.last[2][columns]).abs().max() < 1e-3 * moved


# Memory.


def test_our_loss_step_needs_less_and_follows_the_response():
    measured = peaks_by_fraction(silent, samples=2, length=128, vocab=8192, width=16, fractions=(0.25, 1.0))
    rows, few, deferred, ours = measured.peaks.values()
    logits = 2 * 128 * 8192 * 4
    assert rows[0] > 2 * logits
    assert few[0] < few[1] <= rows[1] * 1.01
    assert ours[1] < deferred[1] < few[1] / 2
    assert measured.tokens == 256


def test_a_peak_leaves_no_gradients_behind():
    hidden, weight = torch.randn(4, 8), torch.randn(64, 8)
    rows = Rows.packed([[1, 2, 3, 4]], [3])
    peak = step_peak(steps.plain_step, hidden, weight, rows, torch.ones(3))
    assert peak == step_peak(steps.plain_step, hidden, weight, rows, torch.ones(3))
    assert hidden.grad is None
    assert weight.grad is None


# The whole and its verdict.


def made(plain, ours, peaks=(100, 50), changed=0, control=None):
    tokens = torch.zeros(len(plain), 4, 5, dtype=torch.int64)
    other = tokens.clone()
    other[-1].flatten()[:changed] = 1
    named = (("plain torch", plain, tokens), ("logitless", ours, other), ("again", control or plain, tokens))
    runs = [Curve(n, r, t, 1.0, 0.5, None) for n, r, t in named]
    setting = Setting(steps=len(plain), length=2, prompts=2, group=2)
    return Demo(setting, Grid(), *runs, *peaks, PeaksByFraction(8, 9, (1.0,), {"one line more": (1,)}))


def test_the_verdict_follows_the_numbers():
    good = made([0.1, 0.5], [0.1, 0.5])
    assert good.ok
    text = "The reward rose from 0.10 to 0.50; all 16 sampled tokens are the same in both runs; and the loss step needs"
    assert verdict(good) == f"{text} 2.0x less memory."
    start = [0.1] * 5
    near = made([*start, 0.5], [*start, 0.51], changed=3)
    assert near.ok
    assert "first 5 steps are the same" in verdict(near)
    assert "at most 0.010 after that, where plain torch differs from itself by 0.000: the same curve" in verdict(near)
    as_near = made([*start, 0.5], [*start, 0.69], changed=3, control=[*start, 0.4])
    assert as_near.ok
    assert "at most 0.190 after that, where plain torch differs from itself by 0.100" in verdict(as_near)
    too_soon, too_far, further = (
        made([*start[1:], 0.5], [*start[1:], 0.5], changed=1),
        made([*start, 0.5], [*start, 0.61], changed=3),
        made([*start, 0.5], [*start, 0.71], changed=3, control=[*start, 0.4]),
    )
    for different in (too_soon, too_far, further):
        assert different.rose
        assert not different.ok
        assert "NOT the same curve" in verdict(different)
    assert not made([0.1, 0.2], [0.1, 0.2]).ok
    assert "did not rise by 0.15 in 2 steps" in verdict(made([0.1, 0.2], [0.1, 0.2]))
    assert not made([0.1, 0.5], [0.1, 0.5], peaks=(50, 100)).ok
    assert "2.0x more, not less, memory" in verdict(made([0.1, 0.5], [0.1, 0.5], peaks=(50, 100)))
    assert not made([0.1, float("nan")], [0.1, float("nan")]).ok


def test_a_busy_machine_is_told_from_a_slow_run(monkeypatch):
    """A thread that sleeps does not run, as one that waits for the processor does not."""
    calm = made([0.1, 0.5], [0.1, 0.5])
    assert not calm.busy
    busy = replace(calm, control=replace(calm.control, waited=0.4))
    assert busy.busy
    assert busy.ok
    told = {}
    for demo in (calm, busy):
        out = io.StringIO()
        show_demo(demo, Path("demo.png"), Console(file=out, soft_wrap=True))
        told[demo] = out.getvalue()
    assert "This machine was busy: a run waited 40% of its time for the processor." in told[busy]
    assert "busy" not in told[calm]
    assert verdict(calm) in told[calm].splitlines()
    # Our run on several ranks waits for the others, which says nothing about the machine.
    assert not replace(calm, grid=Grid(cp=2), ours=replace(calm.ours, waited=0.4)).busy
    start, step = warm_start(TINY), partial(slowed, steps.plain_step)
    assert train("slowed", start, step, replace(TINY, steps=1), silent).waited > 0.2


def slowed(step, *arguments):
    time.sleep(0.5)
    return step(*arguments)


def test_it_reports_as_often_as_it_says(tmp_path):
    told = []
    sizes = {name: size for name, size in SMALL_BATCHES.items() if name != "fractions"}
    demo = run_demo(TINY, Grid(), told.append, **sizes)
    assert len(told) == num_reports(TINY)
    assert demo.changed_tokens == 0
    assert demo.difference == demo.own_difference == 0.0
    draw_demo(demo, tmp_path / "new" / "demo.png")
    assert (tmp_path / "new" / "demo.png").read_bytes()[:4] == b"\x89PNG"


@pytest.fixture
def tiny(monkeypatch):
    """The command at a size for tests: four steps, so the reward does not rise."""
    whole = run_demo
    monkeypatch.setattr("examples.demo.Setting", lambda steps, seed: replace(TINY, steps=steps, seed=seed))
    monkeypatch.setattr("examples.demo.run_demo", partial(whole, **SMALL_BATCHES))


def test_the_command_prints_tables_within_80_columns_and_a_verdict_in_one_line(tiny, tmp_path):
    result = CliRunner().invoke(app, ["--steps", "3", "--out", str(tmp_path / "demo.png")])
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    (verdict_line,) = [line for line in lines if "did not rise by 0.15 in 3 steps" in line]
    assert max(len(line) for line in lines if line not in (verdict_line, lines[-1]) and "busy" not in line) <= 80
    assert any(re.match(r"plain torch +0\.\d{3}", line) for line in lines)
    assert any(re.match(r"one line more +\d+\.\d +\d+\.\d", line) for line in lines)
    assert "all 144 sampled tokens are the same" in verdict_line
    assert (tmp_path / "demo.png").exists()


def test_the_command_as_json(tiny, tmp_path):
    result = CliRunner().invoke(app, ["--steps", "2", "--out", str(tmp_path / "demo.png"), "--json"])
    answer = json.loads(result.stdout)
    assert answer["ok"] is False
    assert result.exit_code == 1
    assert answer["largest_reward_difference"] == 0.0
    assert answer["runs"]["plain torch"]["rewards"] == answer["runs"]["one line more"]["rewards"]
    assert set(answer["sweep"]["peak_bytes"]) == set(WAYS)


def test_errors_name_what_to_do(monkeypatch):
    with pytest.raises(
        LogitlessError, match=r"tp 2 x cp 2 needs 4 ranks but there is 1. Start it with torchrun --nproc"
    ):
        make_grid(2, 2, None)
    with pytest.raises(LogitlessError, match="cp must be a positive number of ranks but is 0"):
        make_grid(1, 0, None)
    with pytest.raises(LogitlessError, match="steps must be a positive number but is 0"):
        Setting(steps=0)
    with pytest.raises(LogitlessError, match="256 samples cannot be shared evenly by 3 ranks"):
        Setting().check_grid(Grid(cp=3))
    monkeypatch.setattr(policy.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LogitlessError, match=r"transformers is not installed. Run pip install transformers"):
        run_demo(TINY, Grid(), silent)


TORCHRUN = """
import sys
from dataclasses import replace
from functools import partial
from examples import demo
from examples.demo.__main__ import main
tiny = demo.Setting(steps=2, vocab=128, length=3, prompts=4, group=4, warm_steps=6)
demo.Setting = lambda steps, seed: replace(tiny, steps=steps, seed=seed)
demo.run_demo = partial(demo.run_demo, samples=2, length=16, vocab=512, width=8, fractions=(0.5, 1.0))
sys.argv = ["demo", "--steps", "2", *sys.argv[1:]]
main()
"""


def test_under_torchrun(tmp_path):
    """The command itself on four ranks; its exit code is 1, because nothing is learned in two steps."""
    (tmp_path / "tiny.py").write_text(TORCHRUN)
    arguments = ["--tp", "2", "--cp", "2", "--json", "--out", "demo.png"]
    ended = run_program(tmp_path / "tiny.py", *arguments, folder=tmp_path, ranks=4)
    assert ended.codes == [1, 0, 0, 0], ended.err
    answer = json.loads(next(line for line in ended.out.splitlines() if line.startswith("{")))
    assert (answer["tp"], answer["cp"]) == (2, 2)
    assert answer["changed_tokens"] == 0
    assert answer["runs"]["logitless, TP 2 x CP 2"]["rewards"] == answer["runs"]["plain torch"]["rewards"]


def test_wrong_ranks_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo", "--tp", "2"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(
        "python -m examples.demo: demo: tp 2 x cp 1 needs 2 ranks but there is 1."
    )
