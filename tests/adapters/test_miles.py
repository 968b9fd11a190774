"""miles's functions with and without ours, on a double or on miles itself (see hosts.py), alone and over ranks.

Which response tokens a rank holds is asked of miles: its ``get_values`` on outputs that hold their own position.
What it shares with slime (supports, overwriting, memory) is tested there.
"""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from close import assert_close_to_truth, assert_gradient_close_to_truth
from hosts import load, put_first
from torch import Tensor

import logitless
from logitless import LogitlessError

DOUBLE = not put_first("miles")
if DOUBLE:
    sys.path.append(str(Path(__file__).parent / "doubles"))

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning")

V = 506
LENGTHS, RESPONSES, LINE = [9, 14, 6], [4, 13, 2], 16
LAYOUTS = ("thd", "allgather", "bshd")
HUB = "miles.backends.training_utils.loss_hub"


def miles() -> tuple[Any, Any, Any]:
    """miles's ``logit_processors``, ``losses`` and ``parallel``."""
    names = (f"{HUB}.logit_processors", f"{HUB}.losses", "miles.backends.training_utils.parallel")
    return tuple(importlib.import_module(name) for name in names) if DOUBLE else tuple(load("miles"))


class Here:
    """One rank of a mesh of tensor- and context-parallel ranks, with a batch in one layout."""

    def __init__(self, layout: str, tp: int = 1, cp: int = 1, groups: Any = None) -> None:
        self.processors, self.losses, parallel = miles()
        rank, (tp_group, cp_group) = dist.get_rank(), groups or (dist.group.WORLD, dist.group.WORLD)
        self.layout, self.tp, self.cp, self.tp_rank, self.cp_rank = layout, tp, cp, rank % tp, rank // tp
        state = {"tp": (self.tp_rank, tp, tp_group), "cp": (self.cp_rank, cp, cp_group)}
        fields = {name: SimpleNamespace(rank=r, size=n, group=g) for name, (r, n, g) in state.items()}
        parallel.set_parallel_state(SimpleNamespace(**fields))
        self.args = Namespace(
            rollout_temperature=0.8,
            log_probs_chunk_size=-1,
            allgather_cp=layout == "allgather",
            qkv_format="bshd" if layout == "bshd" else "thd",
            true_on_policy_mode=False,
        )
        self.tokens = [(torch.arange(n) * 31 + 7 * i) % V for i, n in enumerate(LENGTHS)]
        self.inputs: dict[str, Any] = {
            "unconcat_tokens": self.tokens,
            "total_lengths": LENGTHS,
            "response_lengths": RESPONSES,
            "max_seq_lens": [LINE] * 3 if layout == "bshd" else None,
        }

    def part(self, stream: Tensor) -> Tensor:
        """What this rank's model would return for a stream ``[sum of lengths, ...]``, zeros for padding."""

        def padded(x: Tensor, length: int) -> Tensor:
            return torch.cat([x, x.new_zeros(length - len(x), *x.shape[1:])])

        columns = stream.chunk(self.tp, -1)[self.tp_rank] if stream.shape[-1] > 1 else stream
        if self.args.allgather_cp:
            return padded(columns, -(-len(columns) // self.cp) * self.cp + 2 * self.cp).chunk(self.cp)[self.cp_rank][
                None
            ]
        lines = []
        for sample in columns.split(LENGTHS):
            span = LINE if self.layout == "bshd" else len(sample)
            if self.cp == 1:
                lines.append(padded(sample, span))
                continue
            chunks = padded(sample, -(-span // (2 * self.cp)) * 2 * self.cp).chunk(2 * self.cp)
            lines.append(torch.cat([chunks[self.cp_rank], chunks[-1 - self.cp_rank]]))
        return torch.stack(lines) if self.layout == "bshd" else torch.cat(lines)[None]

    def places(self) -> list[slice]:
        """Rows of the whole stream that predict each response."""
        ends = torch.tensor(LENGTHS).cumsum(0).tolist()
        return [slice(end - r - 1, end - 1) for end, r in zip(ends, RESPONSES, strict=True)]

    def held(self) -> list[Tensor]:
        """Places in its response of the tokens of each sample that belong to this rank."""
        position = torch.zeros(sum(LENGTHS), 1)
        for place, response in zip(self.places(), RESPONSES, strict=True):
            position[place, 0] = torch.arange(float(response))
        found = self.processors.get_values(self.part(position), args=self.args, **self.inputs)["values"]
        return [x.long() for x in found]


def check_scores(here: Here, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Values and gradients, entropy with and without a gradient."""
    torch.manual_seed(5)
    stream = (torch.randn(sum(LENGTHS), V) * 3).to(dtype)
    upstream = [torch.randn(2, r) for r in RESPONSES]
    held = here.held()
    for grad in (False, True):

        def run(grad: bool = grad) -> tuple[Tensor, Tensor, Tensor]:
            leaf = here.part(stream).clone().requires_grad_()
            results = here.processors.get_log_probs_and_entropy(
                leaf, args=here.args, **here.inputs, with_entropy=True, entropy_requires_grad=grad
            )
            assert list(results) == ["log_probs", "entropy"]
            assert [len(x) for x in results["log_probs"]] == [len(x) for x in held]
            logprob, entropy = torch.cat(results["log_probs"]), torch.cat(results["entropy"])
            assert logprob.dtype == entropy.dtype == torch.float32
            g = torch.cat([x[:, at] for x, at in zip(upstream, held, strict=True)], 1)
            ((logprob * g[0]).sum() + ((entropy * g[1]).sum() if grad else 0)).backward()
            return logprob.detach(), entropy.detach(), torch.zeros_like(leaf) if leaf.grad is None else leaf.grad

        exact_leaf, exact = stream.double().requires_grad_(), []
        total = torch.zeros((), dtype=torch.float64)
        for i, place in enumerate(here.places()):
            log_p = (exact_leaf[place] / 0.8).log_softmax(-1)
            logprob = log_p.gather(-1, here.tokens[i][-RESPONSES[i] :, None])[:, 0]
            entropy = -(log_p.exp() * log_p).sum(-1)
            total = total + (logprob * upstream[i][0]).sum() + ((entropy * upstream[i][1]).sum() if grad else 0)
            exact.append(torch.stack([logprob, entropy])[:, held[i]].detach())
        total.backward()
        theirs = run()
        logitless.install("miles", audit=2, **options)
        ours = run()
        (report,) = logitless.status().hosts
        assert (report.replaced[1].calls, report.passed_on) == (1, 0)
        assert report.audit.passed
        logitless.uninstall("miles")
        for mine, right, other in zip(ours[:2], torch.cat(exact, 1), theirs[:2], strict=True):
            assert_close_to_truth(mine, right, other)
        assert ours[2].dtype == dtype
        assert_gradient_close_to_truth(ours[2], here.part(exact_leaf.grad), theirs[2])


def check_values(here: Here) -> None:
    torch.manual_seed(8)
    outputs, upstream = torch.randn(sum(LENGTHS), 1), torch.randn(100)

    def run() -> list[Tensor]:
        leaf = here.part(outputs).clone().requires_grad_()
        values = here.processors.get_values(leaf, args=here.args, **here.inputs)["values"]
        joined = torch.cat(values)
        (joined * upstream[: len(joined)]).sum().backward()
        return [*values, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad]

    theirs = run()
    logitless.install("miles")
    ours = run()
    assert logitless.status().hosts[0].replaced[2].calls == 1
    logitless.uninstall("miles")
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank(world, layout):
    here = Here(layout)
    check_scores(here)
    check_scores(here, torch.bfloat16)
    check_scores(here, response_only=False)
    check_values(here)


def run_mesh(rank: int, world: int) -> None:
    """Tensor-parallel pairs and context-parallel pairs: ranks 0 1 | 2 3 and 0 2 | 1 3."""
    pairs = {pair: dist.new_group(pair) for pair in ((0, 1), (2, 3), (0, 2), (1, 3))}
    tp_group, cp_group = pairs[(rank // 2 * 2, rank // 2 * 2 + 1)], pairs[(rank % 2, rank % 2 + 2)]
    for layout, check in product(LAYOUTS, (check_scores, check_values)):
        check(Here(layout, 2, 2, (tp_group, cp_group)))


def test_four_ranks(ranks):
    ranks(run_mesh, 4, timeout=120)


@pytest.mark.parametrize("grad", [False, True])
def test_calculate(world, grad):
    processors, _, _ = miles()
    torch.manual_seed(2)
    logits, tokens, upstream = torch.randn(41, V) * 3, torch.randint(V, (41,)), torch.randn(2, 41)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        logprob, entropy = processors.calculate_log_probs_and_entropy(
            leaf, tokens, dist.group.WORLD, with_entropy=True, entropy_requires_grad=grad, chunk_size=7
        )
        assert logprob.shape == (41, 1)
        assert entropy.requires_grad == grad
        total = (logprob[:, 0] * upstream[0]).sum() + ((entropy * upstream[1]).sum() if grad else 0)
        return logprob[:, 0].detach(), entropy.detach(), torch.autograd.grad(total, leaf)[0]

    leaf = logits.double().requires_grad_()
    log_p = leaf.log_softmax(-1)
    exact = log_p.gather(-1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    ((exact[0] * upstream[0]).sum() + ((exact[1] * upstream[1]).sum() if grad else 0)).backward()
    theirs = run()
    logitless.install("miles", audit=3)
    ours = run()
    for mine, right, other in zip(ours[:2], exact, theirs[:2], strict=True):
        assert_close_to_truth(mine, right, other)
    assert_gradient_close_to_truth(ours[2], leaf.grad, theirs[2])
    empty = processors.calculate_log_probs_and_entropy(logits[:0], tokens[:0], dist.group.WORLD, with_entropy=True)
    assert [x.shape for x in empty] == [(0,), (0,)]


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_only_rows_that_count_are_scored(world, layout):
    """A NaN in a row that the mask drops does not reach the loss."""
    here = Here(layout)
    masks = [torch.ones(r) for r in RESPONSES]
    masks[1][4] = 0
    stream = torch.randn(sum(LENGTHS), V)
    stream[here.places()[1]][4] = torch.nan
    logits = here.part(stream).requires_grad_()
    batch = {**here.inputs, "loss_masks": masks}
    flat = torch.cat(masks)
    mean = lambda x: (x * flat).sum() / flat.sum()  # noqa: E731
    assert here.losses.sft_loss_function(here.args, batch, logits, mean)[0].isnan()
    logitless.install("miles", loss_mask_only=True)
    loss, _ = here.losses.sft_loss_function(here.args, batch, logits, mean)
    assert loss.isfinite()
    loss.backward()
    assert logits.grad.isfinite().all()
    assert int((logits.grad.flatten(0, 1).abs().sum(-1) > 0).sum()) == int(flat.sum())


def test_what_is_left_to_miles(world):
    here = Here("bshd")
    logits = here.part(torch.randn(sum(LENGTHS), V))
    logitless.install("miles")
    call = here.processors.get_log_probs_and_entropy
    call(logits, args=here.args, **(here.inputs | {"max_seq_lens": [LINE, LINE, LINE - 1]}))
    packed = Here("thd")
    packed.args.true_on_policy_mode = True
    pack = packed.part(torch.randn(sum(LENGTHS), V))
    call(pack, args=packed.args, **packed.inputs)
    packed.processors.get_values(pack[..., :1], args=packed.args, **packed.inputs)
    report = logitless.status().hosts[0]
    assert report.replaced[1].why == {"lines of different lengths": 1, "true on policy": 1}
    assert report.replaced[2].why == {"true on policy": 1}
    # miles's own code calls the other function, once per sample: ours for the lines, its own in true-on-policy mode.
    assert report.replaced[0].calls == 6
    assert report.replaced[0].why == {"true on policy": 3}


def test_a_temperature_of_zero_is_one(world):
    """miles divides only by a positive temperature."""
    here = Here("thd")
    logits = here.part(torch.randn(sum(LENGTHS), V))
    results = []
    logitless.install("miles")
    for temperature in (0.0, 1.0):
        here.args.rollout_temperature = temperature
        results += here.processors.get_log_probs_and_entropy(logits, args=here.args, **here.inputs)["log_probs"]
    assert torch.equal(torch.cat(results[:3]), torch.cat(results[3:]))


def test_the_init_hook_and_names_held_by_value(world):
    from logitless.adapters.miles import custom_megatron_init

    here = Here("thd")
    before = here.losses.get_log_probs_and_entropy
    asked = Namespace(log_probs_loss_mask_only=True, logitless_audit=2, logitless_any_version=True)
    report = custom_megatron_init(asked)
    assert report.options["loss_mask_only"]
    assert report.options["audit"] == 2
    assert report.options["any_version"]
    assert here.losses.get_log_probs_and_entropy is here.processors.get_log_probs_and_entropy is not before
    logitless.uninstall("miles")
    assert here.losses.get_log_probs_and_entropy is before
    with pytest.raises(LogitlessError, match=r'install\("miles"\): loss_mask_only=True selects among response rows'):
        logitless.install("miles", loss_mask_only=True, response_only=False)


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("thd", {"logits": torch.zeros(2, 29, V)}, r"float32 or bfloat16 \[1, T, V'\], one pack, but is torch.float32"),
        ("thd", {"logits": torch.zeros(1, 29, V).half()}, r"but is torch.float16 \[1, 29, 506\]"),
        ("bshd", {"logits": torch.zeros(29, V)}, r"float32 or bfloat16 \[N, S, V'\], but is"),
        ("bshd", {"logits": torch.zeros(3, 15, V)}, r"rows were made for 48 tokens \(\[3, 16\]\)"),
        ("thd", {"total_lengths": [9, 14, 7]}, r"unconcat_tokens have lengths \[9, 14, 6\]"),
    ],
)
def test_errors_name_the_host_function(world, layout, change, message):
    here = Here(layout)
    logitless.install("miles")
    given = {"logits": here.part(torch.zeros(sum(LENGTHS), V)), "args": here.args} | here.inputs | change
    with pytest.raises(LogitlessError, match=rf"^miles\.[a-z_.]+\.get_log_probs_and_entropy: .*{message}"):
        here.processors.get_log_probs_and_entropy(given.pop("logits"), **given)
