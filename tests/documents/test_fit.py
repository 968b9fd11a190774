"""The page that says whether a step will fit: its formulas are `estimate`'s numbers within 5 %, and it shows them.

They are checked twice: read as Python, everywhere; and in a browser, where one is installed.
"""

from __future__ import annotations

import html
import itertools
import json
import math
import re
from pathlib import Path

import pytest
from browser import dom_of

from logitless.tools.plan import WAYS, LossStep
from logitless.tools.presets import CARDS, PRESETS, machine_of

ROOT = Path(__file__).parents[2]
SCRIPT = (ROOT / "docs" / "fit.js").read_text()
PAGE = (ROOT / "docs" / "fit.md").read_text()

NAMES = {
    "plain torch": "plainTorch",
    "slime-style": "slimeStyle",
    "logprobs": "fromLogits",
    "logprobs, overwrite": "overLogits",
    "logprobs of Logits": "fromHidden",
    "policy_loss of Logits": "ofLoss",
}
MODELS = ("qwen3-0.6b", "qwen3-8b", "llama3.1-70b", "gemma2-9b", "deepseek-v2-lite")
GRID = [
    (model, card, tokens, response, tp, cp, entropy)
    for model, card, (tokens, response), (tp, cp), entropy in itertools.product(
        MODELS,
        ("h100-80g", "a100-80g"),
        ((4096, 1.0), (16384, 0.1), (49152, 0.5), (500000, 1.0)),
        ((1, 1), (4, 2)),
        (False, True),
    )
]


def as_python(script: str) -> dict:
    """The formulas of the script, which are written in what both languages have, but for brackets and a few words."""
    block = script.split("// formulas", 1)[1].split("\n", 1)[1].split("// end of formulas")[0]
    lines = []
    for line in block.splitlines():
        line = re.sub(r"^function (\w+)\((.*)\) \{$", r"def \1(\2):", line)
        line = re.sub(r"^  const (\w+) =", r"  \1 =", line)
        lines.append("" if line.startswith("//") or line == "}" else line)
    names: dict = {"ceil": math.ceil, "floor": math.floor, "max": max, "min": min}
    names["pick"] = lambda which, yes, no: yes if which else no
    exec("\n".join(lines), names)
    return names


def table(name: str) -> dict:
    """A table of the script by its name."""
    text = re.search(rf"^const {name} = \{{\n(.*?)^\}}$", SCRIPT, re.DOTALL | re.MULTILINE)[1]
    return json.loads("{" + text.rstrip().rstrip(",") + "}")


def step_of(model: str, card: str, tokens: int, response: float, tp: int, cp: int, entropy: bool) -> LossStep:
    asked = "grad" if entropy else "value"
    return LossStep(PRESETS[model], tokens, response, tp, cp, entropy=asked, device=machine_of(card))


@pytest.fixture(scope="module")
def predicted() -> list[dict[str, int]]:
    """The peaks of every way at every point of the grid, by `estimate`."""
    return [{way.name: way.predict(step_of(*point)).peak for way in WAYS} for point in GRID]


def check(found: dict[str, float], wanted: dict[str, int], point: tuple) -> None:
    for name, bytes_of in wanted.items():
        assert found[name] == pytest.approx(bytes_of, rel=0.05), f"{name} at {point}"


def test_models_and_cards_are_those_of_plan():
    shapes = {name: [shape.hidden, shape.vocab, int(shape.softcap is not None)] for name, shape in PRESETS.items()}
    assert table("MODELS") == shapes
    machines = {name: machine_of(name) for name in CARDS}
    cards = {name: [CARDS[name].memory, m.filling, int(m.epilogues)] for name, m in machines.items()}
    assert table("CARDS") == cards


def test_the_formulas_are_what_estimate_says(predicted: list[dict[str, int]]):
    formulas = as_python(SCRIPT)
    for point, wanted in zip(GRID, predicted, strict=True):
        step, entropy = step_of(*point), point[-1]
        _, filling, fused = table("CARDS")[point[1]]
        sizes = (step.local_tokens, step.rows, step.columns, step.model.hidden)
        more = {
            **dict.fromkeys(("plain torch", "slime-style"), (entropy,)),
            "logprobs of Logits": (filling, fused),
            "policy_loss of Logits": (filling, fused, step.model.softcap is not None),
        }
        check({name: formulas[f](*sizes, *more.get(name, ())) for name, f in NAMES.items()}, wanted, point)


def in_browser(body: str, folder: Path, width: int = 1440) -> str:
    """The text of the element #out after a page with the form, the script and this code has run."""
    form = PAGE.split("<!-- form -->")[1].split("<!-- end of form -->")[0]
    page = folder / "page.html"
    page.write_text(
        f'<!doctype html><meta charset="utf-8"><body>{form}<pre id="out"></pre><script>{SCRIPT}</script>'
        f"<script>document.querySelector('#out').textContent = (() => {{ {body} }})()</script>"
    )
    found = re.search(r'<pre id="out">(.*?)</pre>', dom_of(page.as_uri(), folder, width), re.DOTALL)
    assert found
    return html.unescape(found[1])


def test_a_browser_computes_what_estimate_says(predicted: list[dict[str, int]], tmp_path: Path):
    body = f"""
    const peaks = (point) => Object.fromEntries(WAYS.map((way) => [way.name, way.peak(sizes(...point))]))
    return JSON.stringify({json.dumps(GRID)}.map(peaks))"""
    for point, found, wanted in zip(GRID, json.loads(in_browser(body, tmp_path)), predicted, strict=True):
        check(found, wanted, point)


def test_the_page_answers_what_is_typed(tmp_path: Path):
    body = """
    const form = document.querySelector("#fit")
    const said = () => ["#fit-answer", "#fit-line"].map((name) => document.querySelector(name).textContent)
    const type = (name, value) => {
      form.elements[name].value = value
      form.dispatchEvent(new Event("input"))
      return said()
    }
    const first = said()
    const steps = [first, type("tp", "2"), type("way", "plain torch"), type("tokens", "many"), type("tokens", "4k")]
    const most = [...document.querySelectorAll("#fit-bars .most")].map((x) => Number(x.textContent.replaceAll(",", "")))
    return JSON.stringify({ steps, most, over: document.querySelectorAll("#fit-bars .over").length })"""
    found = json.loads(in_browser(body, tmp_path, width=390))
    first, sharded, plain, wrong, small = found["steps"]
    assert re.fullmatch(r"policy_loss of Logits needs [\d.]+ GiB of [\d.]+ GiB free on each rank: it fits\.", first[0])
    assert first[1] == "loss, metrics = ll.policy_loss(ll.Logits(hidden, weight), rows, objective, ...)"
    assert "ll.Logits(hidden, weight, shard=shard)" in sharded[1]
    assert plain[0].endswith("it does not fit.")
    assert wrong[0] == 'Tokens must be a number such as 65536 or 64k, and is "many".'
    assert small[0].endswith("it fits.")
    step = step_of("qwen3-8b", "h100-80g", 65536, 0.5, 2, 1, False)
    free = (CARDS["h100-80g"].memory << 20) - (40 << 30)
    for way, most in zip(WAYS, found["most"], strict=True):
        # The largest micro-batch is where the peak reaches what is free.
        largest = LossStep(**{**vars(step), "tokens": most})
        assert way.predict(largest).peak == pytest.approx(free, rel=0.05), way.name


def test_nothing_is_loaded_from_elsewhere():
    assert not re.search(r"https?:|import\(|fetch\(|src=", SCRIPT + PAGE)
