"""What an installation must do, run inside of it by ``environments.py``: ``python inside.py EXTRA CHECKOUT``.

The package comes from its wheel, the README's snippets from the checkout, and nothing else is imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def command(*arguments: str, expect: int = 0) -> str:
    """What ``logitless ARGUMENTS`` prints, or its error; it must end with this exit code."""
    script = Path(sys.executable).with_name("logitless")
    done = subprocess.run([script, *arguments], capture_output=True, text=True, timeout=300)
    said = f"logitless {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    assert done.returncode == expect, said
    return done.stdout or done.stderr


def library(checkout: Path) -> None:
    """Import, the README's snippets in order, and a loop whose loss falls."""
    import torch

    import logitless as ll

    assert checkout not in Path(ll.__file__).resolve().parents, f"{ll.__file__} is the checkout, not the wheel"
    assert ll.__version__ == importlib.metadata.version("logitless")
    for name in ll.__all__:
        assert getattr(ll, name) is not None
    snippets = SNIPPET.findall((checkout / "README.md").read_text(encoding="utf-8"))
    assert len(snippets) >= 2
    namespace: dict = {"__name__": "snippet"}
    for code in snippets:
        exec(code, namespace)

    torch.manual_seed(0)
    body, head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50, bias=False)
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=0.1)
    tokens = [torch.randint(50, (n,)) for n in (9, 6)]
    rows, losses = ll.Rows.packed(tokens, [4, 3]), []
    for _ in range(5):
        loss, _ = ll.policy_loss(ll.Logits(body(torch.cat(tokens)), head.weight), rows, ll.Objective.recipe("sft"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2, losses


def bare(checkout: Path) -> None:
    """No Triton: estimate, plan and doctor are the library's. There is no command, and it says so."""
    import torch

    import logitless as ll
    from logitless.tools.doctor import examine
    from logitless.tools.plan import LossStep, plan_model
    from logitless.tools.presets import find_model

    assert [name for name in ("triton", "typer", "rich") if importlib.util.find_spec(name)] == []
    hidden, weight = (torch.empty(n, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for n in (999, 5003))
    target = torch.empty(999, dtype=torch.int64, device="meta")
    for device in ("cpu", "cuda"):
        assert ll.estimate(ll.logprobs, ll.Logits(hidden, weight), target, device=device).peak > 0
    answer = plan_model(LossStep(find_model("qwen3-8b"), tokens=131072), 80 * 2**30)
    assert answer.fits
    findings = examine(torch.device("cpu"))
    assert findings.ok
    assert {x.name: x.runs for x in findings.backends} == {"reference": True, "tiled": True, "triton": False}
    assert "its extra [cli]" in command("doctor", expect=2)


def triton(checkout: Path) -> None:
    """The kernels can be imported, and refuse a CPU in words."""
    import torch

    import logitless as ll
    import logitless.backends.triton
    from logitless.backends import choose_backend

    assert choose_backend(torch.zeros(1, 3))[0] == "tiled"
    said = ""
    try:
        ll.logprobs(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64), backend="triton")
    except ll.LogitlessError as error:
        said = str(error)
    assert "CUDA" in said, f"the Triton backend on a CPU tensor: {said}"


def cli(checkout: Path) -> None:
    """Version, doctor, plan; and where the commands are that the wheel does not have."""
    assert importlib.metadata.version("logitless") in command("--version")
    command("doctor")
    plan = command("plan", "--model", "qwen3-8b", "--tokens", "131072", "--card", "h100-80g")
    assert "policy_loss" in plan, plan
    assert "python -m examples.demo" in command("demo", expect=2)


def score(checkout: Path) -> None:
    """Log-probs of a file under a model made here, against that model's own logits; JSONL in, Parquet out."""
    import pyarrow.parquet
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        file, out = Path(folder) / "in.jsonl", Path(folder) / "out.parquet"
        file.write_text(json.dumps({"prompt": [3, 17, 5], "response": [6, 30]}) + "\n", encoding="utf-8")
        command("score", folder, str(file), "--out", str(out))
        (found,) = pyarrow.parquet.read_table(out).to_pylist()
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([[3, 17, 5, 6, 30]])).logits[0, 2:4].double(), -1)
    assert torch.allclose(torch.tensor(found["logprob"]).double(), expected[[0, 1], [6, 30]], atol=1e-5)


CHECKS: dict[str, tuple[Callable[[Path], None], ...]] = {
    "none": (library, bare),
    "triton": (library, triton),
    "cli": (library, cli),
    "score": (library, cli, score),
}
"""What each extra must be able to do; ``none`` is the package alone."""

if __name__ == "__main__":
    for check in CHECKS[sys.argv[1]]:
        check(Path(sys.argv[2]).resolve())
        print(f"{sys.argv[1]}: {check.__name__} ok", flush=True)
