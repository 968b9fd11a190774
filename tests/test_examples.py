"""The examples run as a user runs them: in processes of their own, at tiny size, from any folder."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from programs import run_program

EXAMPLES = Path(__file__).parent.parent / "examples"
STEP = re.compile(r"^step +(\d+)  reward ([\d.]+)  entropy ([\d.]+)  gradient ([\d.]+)$", re.MULTILINE)


def run(folder: Path, name: str, *arguments: str, ranks: int = 0) -> str:
    """What the example prints; as under torchrun if ranks are asked for."""
    ended = run_program(EXAMPLES / name, *arguments, folder=folder, ranks=ranks)
    assert ended.codes == [0] * max(ranks, 1), ended.err
    return ended.out


def test_every_example_is_run_and_listed():
    files = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "__init__.py")
    tests, readme = Path(__file__).read_text(), (EXAMPLES / "README.md").read_text()
    assert files
    assert [name for name in files if f'"{name}"' not in tests or name not in readme] == []


def test_grpo_learns_and_fsdp2_gives_the_same_curve(tmp_path):
    """70 steps teach it; the first 11 are the same over two ranks, to the digits that are printed."""
    plain = STEP.findall(run(tmp_path, "grpo_plain.py", "--steps", "70"))
    assert [int(step) for step, *_ in plain] == [0, 10, 20, 30, 40, 50, 60, 69]
    rewards = [float(reward) for _, reward, _, _ in plain]
    assert rewards[0] < 0.15
    assert rewards[-1] > 0.8
    sharded = STEP.findall(run(tmp_path, "grpo_fsdp2.py", "--steps", "11", ranks=2))
    assert [int(step) for step, *_ in sharded] == [0, 10]
    for ours, theirs in zip(sharded, plain[:2], strict=True):
        assert [float(x) for x in ours] == pytest.approx([float(x) for x in theirs], abs=2e-3)


def test_head_over_stages(tmp_path):
    """The gradients of one process, in float64; the last stage has a quarter of the head and of its products."""
    text = run(tmp_path, "head_over_stages.py", ranks=4)
    off = re.search(r"^4 stages, 3 micro-batches: gradients off by (\S+) from one process$", text, re.MULTILINE)
    assert off
    assert float(off[1]) < 1e-12
    line = re.compile(
        r"weight ([\d.]+) GiB, peak of the loss ([\d.]+) GiB, 3 products of (\d+) columns, ([\d.]+) TFLOP"
    )
    alone, shared = ([float(x) for x in found] for found in line.findall(text))
    assert (alone[2], shared[2]) == (151936, 37984)
    assert shared[0] == pytest.approx(alone[0] / 4, abs=0.01)
    assert shared[1] < 0.5 * alone[1]
    assert shared[3] == pytest.approx(alone[3] / 4, abs=0.1)


def test_distillation_on_policy(tmp_path):
    """Both students get closer to the teacher, on what they write and on what they never see; curves are drawn."""
    text = run(tmp_path, "distill_on_policy.py", "--steps", "30", "--figure", "drawn/curves")
    step = re.compile(r"^step +(\d+)  loss ([\d.]+)  kl ([\d.]+)  reward ([\d.]+)$", re.MULTILINE)
    whole, sent = (step.findall(part) for part in text.split("from its ")[1:])
    for found in (whole, sent):
        assert [int(x[0]) for x in found] == [0, 20, 29]
        assert float(found[-1][1]) < 0.95 * float(found[0][1])
        assert float(found[-1][2]) < 0.8 * float(found[0][2])
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == ["curves-dark.png", "curves-light.png"]


def test_a_draft_beside_its_policy(tmp_path):
    """The policy accepts more and more of what the draft proposes; curves are drawn."""
    text = run(tmp_path, "draft_beside_policy.py", "--steps", "31", "--alone", "0", "--figure", "drawn/curves")
    step = re.compile(r"^step +(\d+)  accepted ([\d.]+)  ([\d.]+)  at most ([\d.]+)  reward", re.MULTILINE)
    first, *_, last = ([float(x) for x in found] for found in step.findall(text))
    assert [first[0], last[0]] == [0, 30]
    for one, other in zip(first[1:3], last[1:3], strict=True):
        assert one + 0.05 < other < last[3]
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == ["curves-dark.png", "curves-light.png"]


@pytest.mark.skipif(not find_spec("megatron"), reason="megatron-core is not installed")
def test_megatron_output_layer(tmp_path):
    """Over two ranks; its own message compares with Megatron's cross entropy."""
    text = run(tmp_path, "megatron_output_layer.py", ranks=2)
    assert "2 x 256 ids, 53 of 96 tokens scored" in text
    apart = re.search(r"from Megatron's own by at most (\S+)", text)
    assert apart
    assert float(apart[1]) < 1e-5


@pytest.mark.skipif(not find_spec("trl"), reason="trl is not installed")
def test_trl_trainer(tmp_path):
    text = run(tmp_path, "trl_trainer.py", "--steps", "3")
    assert re.search(r"^reward [\d.]+ -> [\d.]+ in 3 steps$", text, re.MULTILINE)
    assert "ChunkedLogProbFunction.apply: 3 calls\n" in text  # none of them passed on to TRL
    worst = re.search(r"(\d+) results compared, worst difference (\S+)", text)
    assert worst
    assert int(worst[1]) == 24
    assert float(worst[2]) < 1e-5
