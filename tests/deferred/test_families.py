"""``defer`` on the causal language models of Transformers: the same loss, the same gradients, the same tokens, and no
logits. Each family builds its logits in a forward of its own, and a new release of Transformers brings new ones.

Those that people train most are checked here; ``make families`` checks all.
"""

from __future__ import annotations

import importlib.util
import json

import pytest
from families import NOT_BUILT, NOT_GENERATED, ROOT, WITH_IMAGES, check, known

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")

TRAINED = """cohere2 deepseek_v3 ernie4_5 exaone4 falcon_h1 gemma gemma2 gemma3_text gemma4_text glm4 glm4_moe gpt2
gpt_neox gpt_oss granite hunyuan_v1_dense kimi_linear lfm2 llama llama4_text minimax_m2 mistral mixtral nemotron_h olmo2
olmo3 phi3 qwen2 qwen3 qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 starcoder2""".split()


@pytest.mark.parametrize("family", TRAINED)
def test_the_same_without_logits(family: str):
    check(family)


@pytest.mark.parametrize("family", ["gemma3", "internvl", "qwen2_5_vl", "qwen3_vl_moe"])
def test_models_of_images_and_text(family: str):
    check(family, images=True)


def test_the_record_has_every_family():
    """Each was served, or says why it was not tried. A new Transformers has new families: run ``make families``."""
    lines = (ROOT / "benchmarks/results/families.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    seeing = {line["family"]: line["outcome"] for line in found if line["images"]}
    assert seeing == dict.fromkeys(WITH_IMAGES, "served")
    outcomes = {line["family"]: line["outcome"] for line in found if not line["images"]}
    assert set(outcomes) == set(known())
    assert {family: x for family, x in outcomes.items() if x != "served"} == NOT_BUILT
    assert set(NOT_GENERATED) <= {*outcomes, *seeing}
    served = sum(x == "served" for x in outcomes.values())
    page = (ROOT / "docs/defer.md").read_text()
    assert f"and {served} families of models in" in (ROOT / "README.md").read_text()
    assert f"has {len(outcomes)} families of causal language models" in page
    assert f"all {served} give the same loss" in page
    assert f"The other {len(NOT_BUILT)} families were not tried" in page
    assert f"So do {len(WITH_IMAGES)}\nmodels of images and text" in page
