"""Predicted peaks against the allocator's own count, for every path and option; and what ``estimate`` says of itself.

On CPU every case runs at odd sizes where megabytes matter. On a GPU the same comparison runs at the sizes people train
with, and prints one table: ``pytest tests/memory/test_estimate.py --device cuda -s``.
"""

from __future__ import annotations

import gc
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from shared.estimate_records import without_epilogues

import logitless as ll
from benchmarks.bench.predicted import Compared, PeakCase, compare, table
from benchmarks.bench.sized_steps import SizedStep
from logitless.call import MEMORY
from logitless.memory import Estimate, shapes, sized
from logitless.operands.logits import like
from logitless.route import loss as loss_plans

PROMISE = 0.05
CPU = torch.device("cpu")
SLABS = {"path": "hidden", "tokens": 257, "vocab": 2003, "hidden": 66, "memory": "1MiB"}
BLOCKS = {**SLABS, "tokens": 2003, "vocab": 257}
LOGITS = {"path": "logits", "tokens": 503, "vocab": 1031, "memory": "512KiB"}
LOSS = {**SLABS, "path": "loss"}
PLAIN = {"path": "torch", "tokens": 251, "vocab": 1031}
FROZEN = {"needs_grad": ("hidden",)}
F32, GRAD = {"dtype": "float32"}, {"entropy": "grad"}
# Two logits of an id, and so twice the budget: the profiler takes its time per tile.
PAIR = {**SLABS, "path": "pair", "teacher_hidden": 66, "memory": "2MiB"}
LOGIT_PAIR = {**LOGITS, "path": "pair of logits", "memory": "1MiB"}
SENT = {"teacher_hidden": None, "teacher_top_k": 8}
TAUGHT = {"objective": ll.Objective.recipe("distill"), "memory": "2MiB"}
ADAPTER = {"lora_rank": 16, "needs_grad": ("hidden", "a", "b")}
FEW_IDS = {"kept_ids": 1009, "scope": "support"}
SELECTED = {"tokens": 1031, "rows": 257}
BONUS = {"objective": ll.Objective(entropy_coef=0.01)}
EVERYTHING = ll.Objective(entropy_coef=0.01, kl="k3", kl_coef=0.1, correction="tis")
BY_SAMPLE = {"objective": ll.Objective(policy="gspo"), "tokens": 301, "rows": 257, "counts": (50, 3, 70, 0, 61, 40, 33)}

pytestmark = pytest.mark.usefixtures("one_thread")


def predicted(device: str = "cuda", **options) -> Estimate:
    """The estimate of a step given by its sizes."""
    return SizedStep(**options).predicted(device)


def assert_promise(result: Compared) -> None:
    assert result.measured_step > 0
    assert result.error <= PROMISE, "\n" + table([result])


CASES = {
    "logits": {**LOGITS, **F32, **GRAD},
    "logits, bf16": {**LOGITS, "entropy": "value"},
    "logits, overwritten": {**LOGITS, **F32, **GRAD, "overwrite": True},
    "logits, overwritten, bf16": {**LOGITS, "overwrite": True},
    "logits, rows cut into tiles": {**LOGITS, **F32, **GRAD, "tokens": 7, "vocab": 30011, "memory": "64KiB"},
    "logits, rows": {**LOGITS, **F32, "entropy": "value", "rows": 127},
    "logits, rows, overwritten": {**LOGITS, **GRAD, "rows": 127, "overwrite": True},
    "logits, softcap": {**LOGITS, **F32, **GRAD, "softcap": True, "overwrite": True},
    "logits, kept ids": {**LOGITS, **GRAD, "kept_ids": 9001, "overwrite": True},
    "logits, fewer kept ids than rows": {**LOGITS, **F32, "tokens": 5003, "vocab": 7, "kept_ids": 50},
    "logits, statistics": {**LOGITS, **F32, "stats": ("top1", "collision", "rank"), "top_k": 20, "ids": 9},
    "logits, statistics, bf16": {**LOGITS, "stats": ("rank", "mean_logit", "collision")},
    "logits, a rank, rows cut into tiles": {
        **LOGITS,
        "tokens": 31,
        "vocab": 30011,
        "memory": "1MiB",
        "stats": ("rank",),
    },
    "logits, float64": {**LOGITS, **GRAD, "dtype": "float64", "overwrite": True},
    "logits, forward alone": {**LOGITS, **F32, "entropy": "value", "needs_grad": ()},
    "forward alone": {**SLABS, **F32, "entropy": "value", "needs_grad": ()},
    "slabs": {**SLABS, **F32, **GRAD},
    "slabs, bf16": {**SLABS, **GRAD},
    "blocks": {**BLOCKS, **F32, **GRAD},
    "blocks, bf16": {**BLOCKS, **GRAD},
    "rows": {**SLABS, **GRAD, "tokens": 1031, "rows": 257},
    "rows, blocks": {**BLOCKS, **F32, "tokens": 3001, "rows": 2003},
    "frozen": {**SLABS, **F32, **FROZEN},
    "frozen, bf16, rows": {**BLOCKS, **FROZEN, "tokens": 3001, "rows": 2003},
    "frozen, softcap": {**SLABS, **FROZEN, "softcap": True},
    "frozen, batch-invariant": {**SLABS, **F32, **FROZEN, "bits": "canonical", "memory": "4MiB"},
    "frozen, entropy gradient": {**SLABS, **FROZEN, **GRAD},
    "weight alone": {**SLABS, **GRAD, "needs_grad": ("weight",)},
    "weight alone, blocks": {**BLOCKS, **GRAD, "needs_grad": ("weight",)},
    "bias": {**SLABS, **F32, "bias": True},
    "bias, blocks": {**BLOCKS, "bias": True},
    "softcap": {**SLABS, **F32, **GRAD, "softcap": True},
    "a buffer for d_weight": {**SLABS, **F32, **GRAD, "weight_grad": True},
    "a buffer for d_weight, blocks": {**BLOCKS, **GRAD, "weight_grad": True},
    "a buffer for d_weight alone": {**SLABS, **GRAD, "weight_grad": True, "needs_grad": ("weight",)},
    "match": {**SLABS, **GRAD, "match": "bfloat16"},
    "match, bias, float32 operands": {**SLABS, **F32, "match": "bfloat16", "bias": True},
    "batch-invariant, rows": {**SLABS, **GRAD, "tokens": 1031, "rows": 257, "bits": "canonical", "memory": "4MiB"},
    "kept ids": {**SLABS, **F32, **GRAD, "kept_ids": 9001},
    "kept ids, blocks": {**BLOCKS, **GRAD, "kept_ids": 30011},
    "support": {**SLABS, **F32, **GRAD, "kept_ids": 9001, "scope": "support"},
    "support, bf16, rows, bias": {**BLOCKS, "tokens": 3001, "rows": 2003, "bias": True, **FEW_IDS},
    "support, a buffer for d_weight": {**SLABS, **FEW_IDS, "weight_grad": True},
    "support, adapter": {**SLABS, **FEW_IDS, **ADAPTER},
    "support, from logits": {**LOGITS, **GRAD, **FEW_IDS},
    "statistics": {**SLABS, "stats": ("top1", "mean_logit", "rank"), "top_k": 128, "ids": 40},
    "statistics, a rank, fp32": {**SLABS, **F32, "stats": ("rank",)},
    "statistics, frozen, rows": {**SLABS, **F32, **FROZEN, **SELECTED, "stats": ("top1", "rank"), "top_k": 5},
    "float64": {**SLABS, **GRAD, "dtype": "float64"},
    "float32 head": {**SLABS, **GRAD, "weight_dtype": "float32"},
    "float32 head, frozen, rows": {**SLABS, **FROZEN, **SELECTED, "weight_dtype": "float32"},
    "float32 head, loss": {**LOSS, "weight_dtype": "float32", "memory": "2MiB"},
    "adapter": {**SLABS, **GRAD, "lora_rank": 16},
    "adapter, frozen head, rows, blocks": {**BLOCKS, **F32, **ADAPTER, "tokens": 3001, "rows": 2003, "bias": True},
    "adapter, loss": {**LOSS, **F32, **SELECTED, **ADAPTER, "hidden": 258},
    "loss": {**LOSS, **F32},
    "loss, bf16, rows": {**LOSS, **SELECTED},
    "loss, more rows than columns": {**LOSS, **F32, **BONUS, "tokens": 2003, "vocab": 257},
    "loss, rows, blocks, bf16": {**LOSS, "tokens": 3001, "rows": 2003, "vocab": 257},
    "loss, slabs of a product, bias": {**LOSS, "vocab": 9001, "hidden": 34, "bias": True, "memory": "4MiB"},
    "loss, gradients outweigh the chunk": {**LOSS, **F32, **SELECTED, "hidden": 514, "tokens": 3001},
    "loss, a buffer for d_weight": {**LOSS, **F32, "hidden": 514, "weight_grad": True},
    "loss, a buffer for d_weight, bf16, rows": {**LOSS, **SELECTED, "hidden": 514, "weight_grad": True},
    "loss, frozen": {**LOSS, **FROZEN, **SELECTED, "hidden": 258},
    "loss, softcap, weight alone": {**LOSS, **BONUS, "softcap": True, "needs_grad": ("weight",)},
    "loss, match, bias": {**LOSS, "match": "bfloat16", "bias": True},
    "loss, few rows, bias alone": {**LOSS, **F32, "tokens": 5, "hidden": 3, "bias": True, "needs_grad": ("bias",)},
    "loss, many metrics": {**LOSS, **F32, "tokens": 5003, "vocab": 31, "objective": EVERYTHING},
    "loss, forward alone": {**LOSS, "needs_grad": ()},
    "loss, whole samples": {**LOSS, **F32, **BY_SAMPLE, "memory": "2MiB"},
    "loss, two passes": {**LOSS, **BY_SAMPLE, "memory": "600KiB"},
    "loss, two passes, metrics": {**LOSS, **F32, "tokens": 5003, "vocab": 31, "objective": BY_SAMPLE["objective"]},
    "loss, two passes, kept ids": {**LOSS, **F32, "tokens": 5003, "vocab": 31, "kept_ids": 9001},
    "loss, support": {**LOSS, **F32, "tokens": 5003, "vocab": 31, "kept_ids": 9001, "scope": "support"},
    "loss, no rows": {**LOSS, "rows": 0},
    "divergence": {**PAIR, **F32},
    "divergence, bf16, rows": {**PAIR, **SELECTED, "teacher_hidden": 130},
    "divergence, more rows than columns": {**PAIR, **F32, "tokens": 2003, "vocab": 257},
    "divergence, batch-invariant": {**PAIR, **F32, "bits": "canonical"},
    "divergence, adapter, frozen head": {**PAIR, **F32, **ADAPTER},
    "divergence, b of an adapter alone": {**PAIR, **F32, **ADAPTER, "needs_grad": ("b",)},
    "divergence, a bucket": {**PAIR, **F32, **SENT, "tail": "bucket"},
    "divergence, K ids": {**PAIR, **F32, **SENT, "tail": "renormalise", "tokens": 2003, "vocab": 257},
    "divergence, support": {**PAIR, **F32, **FEW_IDS},
    "divergence, kept ids": {**PAIR, **F32, "kept_ids": 9001},
    "divergence, from logits": LOGIT_PAIR,
    "divergence, from logits, jsd": {**LOGIT_PAIR, "divergence": "jsd"},
    "divergence, from logits, tv, fp32": {**LOGIT_PAIR, **F32, "divergence": "tv"},
    "divergence, from logits, K ids": {**LOGIT_PAIR, "teacher_top_k": 32, "tail": "renormalise"},
    "divergence, from logits, overwritten": {**LOGIT_PAIR, **F32, "overwrite": True},
    "divergence, from logits, a bucket": {**LOGIT_PAIR, **F32, "teacher_top_k": 8},
    "loss, a teacher": {**LOSS, **F32, **TAUGHT, "teacher_hidden": 130},
    "loss, a teacher, bf16, rows": {**LOSS, **SELECTED, **TAUGHT, "teacher_hidden": 66},
    "loss, a teacher, two passes": {**LOSS, **F32, **TAUGHT, "teacher_hidden": 66, "bits": "canonical"},
    "loss, a teacher's K log-probs": {**LOSS, **F32, **TAUGHT, **SENT},
    "loss, a teacher, support": {**LOSS, **F32, **TAUGHT, **FEW_IDS, "teacher_hidden": 66},
    "torch": {**PLAIN, **F32, **GRAD},
    "torch, rows, bf16": {**PLAIN, "rows": 127, "entropy": "value"},
    "torch, from hidden": {**PLAIN, **GRAD, "hidden": 66},
    "torch, from hidden, rows": {**PLAIN, **F32, "hidden": 66, "rows": 127},
    "torch, forward alone": {**PLAIN, **GRAD, "hidden": 66, "needs_grad": ()},
}


@pytest.mark.parametrize("name", CASES)
def test_the_peak_on_cpu(name: str):
    assert_promise(compare(PeakCase(name, CASES[name]), CPU))


@pytest.mark.parametrize("shape", [SLABS, BLOCKS], ids=["slabs", "blocks"])
@pytest.mark.parametrize(("memory", "kind"), [("1.5MiB", "recompute"), ("3MiB", "keep")])
def test_kept_exponentials(shape: dict, memory: str, kind: str, monkeypatch):
    monkeypatch.setattr("logitless.route.plan.WORK", 1 << 20)
    case = PeakCase(kind, {**shape, **GRAD, "memory": memory})
    plan = case.predicted(CPU).plan
    assert plan is not None
    assert (plan.kind, plan.kept_rows > 0) == (kind, True)
    assert_promise(compare(case, CPU))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {**F32, "dropped": 0.03},
        {**F32, "dropped": 0.3},
        {"dropped": 0.3, "hidden": 66},
        {**F32, "dropped": 0.3, "hidden": 66, "needs_grad": ("weight",)},
        {**F32, "dropped": 0.3, "hidden": 1030, "needs_grad": ("weight",)},
    ],
    ids=str,
)
def test_a_loss_whose_backend_needs_nothing(options: dict, monkeypatch):
    """As on a GPU: copies show that plain torch hides, of the rows that stay and of sums over slabs."""
    choose = loss_plans.choose_loss_plan

    def without_work(*a):
        plan = choose(*a)
        tiles = None if plan.tiles is None else plan.tiles._replace(elementwise=64 << 10)
        return replace(plan, elementwise=64 << 10, tiles=tiles)

    monkeypatch.setattr("logitless.route.loss.choose_loss_plan", without_work)
    monkeypatch.setattr("logitless.passes.one_pass.MOVED", 50_000)
    monkeypatch.setattr("logitless.route.loss.SLAB", 128)
    case = {**LOSS, "tokens": 129, "vocab": 1031, "hidden": 514, "weight_grad": True, **options}
    assert_promise(compare(PeakCase("lean", case), CPU))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("rows", [None, 17])
def test_triton_needs_vectors_alone(rows: int | None, overwrite: bool):
    """Every vector of a row is accounted for; only numbers of a call are not."""
    options = {"path": "logits", "tokens": 33, "vocab": 67, **F32, **GRAD, "backend": "triton", "rows": rows}
    result = compare(PeakCase("triton", {**options, "overwrite": overwrite}), CPU)
    for predicted, measured in ((result.forward, result.measured_forward), (result.step, result.measured_step)):
        assert abs(predicted - measured) <= 16


@pytest.mark.parametrize("path", ["pair", "loss"])
def test_two_models_in_one_tile(path: str):
    """Parts of the sums and dZ, or 16 bits of both models in a chunk: no logits of either."""
    case = {"path": path, "tokens": 67, "vocab": 515, "hidden": 64, "teacher_hidden": 64, "backend": "triton"}
    case |= {"memory": "256KiB"} | ({"objective": ll.Objective.recipe("distill")} if path == "loss" else {})
    assert_promise(compare(PeakCase(f"{path} in one tile", case), CPU))


@pytest.mark.parametrize("path", ["logits", "hidden"])
def test_ranks_share_the_columns(path: str):
    """The gradient of a rank's shard of the logits, or of the weight, is as large as the shard."""
    sizes = {"tokens": 64, "vocab": 1000, "dtype": "float32", "device": "cpu"}
    sizes |= {} if path == "logits" else {"hidden": 32}
    name, height = ("d_logits", 64) if path == "logits" else ("d_weight", 32)
    for ranks in (1, 2, 3):
        by_size = sized(64, 1000, sizes.get("hidden"), dtype="float32", tensor_parallel=ranks)
        apart = predicted(path=path, **sizes, tensor_parallel=ranks)
        for found in (apart, ll.estimate(ll.logprobs, *by_size, device="cpu")):
            (item,) = (item for item in found.backward if item.name.startswith(name))
            assert item.bytes == 4 * height * -(-1000 // ranks)


def compare_on_rank(rank: int, world: int, cases: list[PeakCase]) -> list[Compared]:
    gc.freeze()
    return [_settled(case) for case in cases]


def _settled(case: PeakCase) -> Compared:
    """The smallest of six tries, or of more: a thread of gloo may let go of its copies late, which can only add. That
    is one try of eight, and most of them on a busy machine."""
    tries, off = [], torch.ones(())
    while len(tries) < 6 or (off and len(tries) < 30):
        tries.append(compare(case, CPU, dist.group.WORLD))
        off = torch.tensor(float(_smallest(tries).error > PROMISE))
        dist.all_reduce(off)
    return _smallest(tries)


def _smallest(tries: list[Compared]) -> Compared:
    return tries[0]._replace(
        measured_forward=min(one.measured_forward for one in tries),
        measured_step=min(one.measured_step for one in tries),
    )


def test_the_peak_of_a_rank(ranks):
    shape = {**SLABS, **F32, **GRAD, "tokens": 502, "vocab": 2006, "tensor_parallel": 2, "memory": "8MiB"}
    loss = {**shape, "path": "loss", "entropy": None, "memory": "1MiB"}
    options = {
        "logits": {**LOGITS, **F32, "vocab": 4, "tokens": 20011, "tensor_parallel": 2, "entropy": "value"},
        "logits, kept ids": {**LOGITS, **F32, "vocab": 4, "tokens": 5003, "tensor_parallel": 2, "kept_ids": 90001},
        "sharded": shape,
        "sharded, kept ids": {**shape, "kept_ids": 9001},
        "sharded, support": {**shape, "kept_ids": 9001, "scope": "support"},
        "sequence parallel": {**shape, "sequence_parallel": True, "hidden": 514},
        "sequence parallel, rows": {**shape, "sequence_parallel": True, "hidden": 514, "rows": 257},
        "sequence parallel, frozen": {**shape, **FROZEN, "entropy": None, "sequence_parallel": True, "hidden": 514},
        "loss, sharded": {**loss, "tokens": 4001, "vocab": 62},
        "loss, sequence parallel, rows": {**loss, "sequence_parallel": True, "hidden": 514, "rows": 257},
    }
    for results in ranks(compare_on_rank, 2, [PeakCase(name, o) for name, o in options.items()]):
        for result in results:
            assert_promise(result)


# On a GPU, at the sizes people train with.

BIG = {"path": "hidden", "tokens": 16384, "vocab": 151936, "hidden": 4096, **GRAD}
BIG_LOSS = {**BIG, "path": "loss", "entropy": None}
LONG = {**BIG, "tokens": 40961, "vocab": 65539, "hidden": 1030}
BIG_LOGITS = {"path": "logits", "tokens": 16384, "vocab": 151936}
CUDA_CASES = {
    "logits, forward alone": {**BIG_LOGITS, "entropy": "value", "needs_grad": ()},
    "logits, fp32": {**BIG_LOGITS, **F32, **GRAD, "tokens": 8191},
    "logits, rows": {**BIG_LOGITS, **GRAD, "rows": 4097},
    "logits, overwritten": {**BIG_LOGITS, **GRAD, "overwrite": True},
    "logits, overwritten, value, rows": {**BIG_LOGITS, "entropy": "value", "rows": 4097, "overwrite": True},
    "logits, overwritten, kept ids": {**BIG_LOGITS, **GRAD, "kept_ids": 700_001, "overwrite": True},
    "logits, tiled, overwritten": {**BIG_LOGITS, **GRAD, "backend": "tiled", "overwrite": True},
    "forward alone": {**BIG, "entropy": "value", "needs_grad": ()},
    "recompute": BIG,
    "recompute, fp32": {**BIG, **F32, "tokens": 8191, "hidden": 2050},
    "recompute, an odd width": {**BIG, "tokens": 8191, "hidden": 2050},
    "forward alone, an odd width": {**BIG, "entropy": "value", "needs_grad": (), "hidden": 2050},
    "recompute, tiled": {**BIG, "tokens": 4097, "backend": "tiled"},
    "rows": {**BIG, "rows": 4097},
    "frozen": {**BIG, **FROZEN, "entropy": "value"},
    "frozen, rows": {**BIG, **FROZEN, "entropy": "value", "rows": 4097},
    "keep": {**BIG, "memory": "6.5GiB"},
    "keep some": {**BIG, "memory": "3GiB"},
    "several blocks of rows": {**LONG},
    "blocks": {**BIG, "tokens": 65536, "vocab": 32768, "hidden": 2048},
    "a buffer for d_weight": {**BIG, "weight_grad": True},
    "weight alone": {**BIG, "needs_grad": ("weight",)},
    "bias": {**BIG, "bias": True},
    "match, bias": {**BIG, "match": "bfloat16", "bias": True},
    "softcap": {**BIG, "softcap": True},
    "batch-invariant, rows": {**BIG, "rows": 4097, "bits": "canonical"},
    "kept ids": {**BIG, "kept_ids": 700_001},
    "support": {**BIG, "kept_ids": 131_072, "scope": "support"},
    "support, many ids, rows, bias": {**BIG, "rows": 4097, "kept_ids": 700_001, "scope": "support", "bias": True},
    "support, a buffer for d_weight": {**BIG, "kept_ids": 131_072, "scope": "support", "weight_grad": True},
    "loss, 2.5 GiB": {**BIG_LOSS, "memory": "2.5GiB"},
    "loss, 1 GiB": BIG_LOSS,
    "loss, a buffer for d_weight, 2.5 GiB": {**BIG_LOSS, "memory": "2.5GiB", "weight_grad": True},
    "loss, a buffer for d_weight, 1 GiB": {**BIG_LOSS, "weight_grad": True},
    "loss, fp32, bias": {**BIG_LOSS, **F32, **BONUS, "tokens": 8191, "hidden": 2050, "bias": True},
    "loss, rows, frozen": {**BIG_LOSS, **FROZEN, "rows": 4097, "memory": "256MiB"},
    "loss, few rows dropped": {**BIG_LOSS, "memory": "2.5GiB", "weight_grad": True, "dropped": 0.03},
    "loss, rows dropped": {**BIG_LOSS, "memory": "2.5GiB", "weight_grad": True, "dropped": 0.3},
    "loss, whole samples": {**BIG_LOSS, **BY_SAMPLE, "tokens": 16384, "rows": 12000, "counts": (1500,) * 8},
    "loss, two passes": {**BIG_LOSS, **BY_SAMPLE, "tokens": 16384, "rows": 12000, "counts": (3000,) * 4},
    "torch": {**BIG_LOGITS, **F32, **GRAD, "path": "torch", "tokens": 4097},
    "torch, rows, bf16": {**BIG_LOGITS, "entropy": "value", "path": "torch", "rows": 4097},
    "torch, from hidden": {**BIG, "path": "torch", "tokens": 4097},
}
# Of a teacher's logits there are two; and statistics at sizes whose temporaries show.
BIG_PAIR = {"path": "pair", "tokens": 8191, "vocab": 151936, "hidden": 2048, "teacher_hidden": 2048}
BIG_LOGIT_PAIR = {"path": "pair of logits", "tokens": 8191, "vocab": 151936}
BIG_SENT = {"teacher_hidden": None, "teacher_top_k": 64}
BIG_TAUGHT = {**BIG_LOSS, "tokens": 8191, "hidden": 2048, "objective": ll.Objective.recipe("distill")}
FURTHER_CUDA_CASES = {
    "logits, statistics": {**BIG_LOGITS, "stats": ("top1", "collision", "mean_logit", "rank"), "top_k": 20, "ids": 9},
    "logits, moments": {**BIG_LOGITS, "stats": ("mean_logit", "logit_variance", "max_logit"), "entropy": "grad"},
    "logits, K ids": {**BIG_LOGITS, "ids": 64},
    "statistics": {**BIG, "stats": ("top1", "collision", "mean_logit", "rank"), "top_k": 20, "ids": 9},
    "statistics, frozen": {**BIG, **FROZEN, "entropy": "value", "stats": ("top1", "max_logit")},
    "K ids": {**BIG, "ids": 64},
    "divergence": BIG_PAIR,
    "divergence, jsd": {**BIG_PAIR, "divergence": "jsd"},
    "divergence, tv": {**BIG_PAIR, "divergence": "tv"},
    "divergence, frozen": {**BIG_PAIR, **FROZEN},
    "divergence, a bucket": {**BIG_PAIR, **BIG_SENT, "tail": "bucket"},
    "divergence, K ids": {**BIG_PAIR, **BIG_SENT, "tail": "renormalise"},
    "divergence, from logits": BIG_LOGIT_PAIR,
    "divergence, from logits, jsd": {**BIG_LOGIT_PAIR, "divergence": "jsd"},
    "divergence, from logits, tv, fp32": {**BIG_LOGIT_PAIR, **F32, "tokens": 4097, "divergence": "tv"},
    "divergence, from logits, overwritten": {**BIG_LOGIT_PAIR, "overwrite": True},
    "divergence, from logits, a bucket": {**BIG_LOGIT_PAIR, "teacher_top_k": 64, "tail": "bucket"},
    "divergence, from logits, K ids": {**BIG_LOGIT_PAIR, "teacher_top_k": 64, "tail": "renormalise"},
    "loss, a teacher": {**BIG_TAUGHT, "teacher_hidden": 2048},
    "loss, a teacher's K log-probs": {**BIG_TAUGHT, **BIG_SENT},
    "adapter": {**BIG, "lora_rank": 64},
    "adapter, frozen head": {**BIG, "lora_rank": 64, "needs_grad": ("hidden", "a", "b")},
    "adapter, loss": {**BIG_LOSS, "lora_rank": 64, "needs_grad": ("hidden", "a", "b")},
    "float32 head": {**BIG, "weight_dtype": "float32"},
    "float32 head, frozen": {**BIG, **FROZEN, "entropy": "value", "weight_dtype": "float32"},
    "float32 head, loss": {**BIG_LOSS, "weight_dtype": "float32"},
}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cases", [CUDA_CASES, FURTHER_CUDA_CASES], ids=["verbs", "readings"])
def test_the_peaks_on_cuda(cases: dict, device: torch.device):
    """All cases, and then one table of predicted and measured bytes, whether they agree or not."""
    if device.type != "cuda":
        pytest.skip("asked for with --device cuda")
    results = []
    for name, options in cases.items():
        results.append(compare(PeakCase(name, options), device))
        torch.cuda.empty_cache()
    print("\n" + table(results))
    off = [result.name for result in results if result.error > PROMISE]
    assert not off, "\n" + table(results)


@pytest.mark.parametrize("name", FURTHER_CUDA_CASES)
def test_no_index_is_copied_out_of_sight(name: str, monkeypatch):
    """Of two indices of other strides a GPU makes copies in the shape of both, which no dispatch mode sees."""

    def seen(func, args, kwargs):
        if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
            several = torch.broadcast_tensors(*(x for x in args[1] if x is not None))
            assert len({x.stride() for x in several}) == 1, [list(x.shape) for x in several]
        return shapes.result_of(func, args, kwargs)

    monkeypatch.setattr("logitless.memory.ledger.result_of", seen)
    PeakCase(name, FURTHER_CUDA_CASES[name]).predicted(torch.device("cuda"))


# What it says of itself.


@pytest.mark.parametrize("verb", ["logprobs", "policy_loss"])
@pytest.mark.parametrize("whole", [False, True], ids=["Logits", "Teacher"])
def test_a_teacher_that_would_have_a_gradient_has_none(verb: str, whole: bool):
    """A model in training as the teacher, whose operands have the names of the student's."""
    found = []
    for trained in (False, True):
        sizes = ((257, 16), (2003, 16), (257, 24), (2003, 24))
        tensors = [torch.empty(size, requires_grad=trained or i < 2) for i, size in enumerate(sizes)]
        teacher = ll.Logits(*tensors[2:])
        asked = {"teacher": ll.Teacher(teacher) if whole else teacher, "memory": "2MiB"}
        args = (ll.Logits(*tensors[:2]), torch.zeros(257, dtype=torch.int64))
        args = args if verb == "logprobs" else (*args, ll.Objective.recipe("distill"))
        found.append(ll.estimate(getattr(ll, verb), *args, **asked, device="cpu"))
    assert found[0].peak == found[1].peak
    assert {item.name.split()[0] for item in found[1].backward if item.output} >= {"d_hidden", "d_weight"}


@pytest.mark.parametrize("softcap", [False, True])
@pytest.mark.parametrize("needs_grad", [("hidden", "weight"), ("hidden",), ()])
@pytest.mark.parametrize("memory", ["1MiB", "600MiB"])
def test_the_plan_is_the_one_that_runs(memory: str, needs_grad: tuple, softcap: bool):
    hidden = torch.zeros(257, 6, dtype=torch.bfloat16).requires_grad_("hidden" in needs_grad)
    weight = torch.zeros(2003, 6, dtype=torch.bfloat16).requires_grad_("weight" in needs_grad)
    head = ll.Head(softcap=20.0) if softcap else None
    target = torch.zeros(257, dtype=torch.int64)
    told = ll.explain(ll.logprobs, ll.Logits(hidden, weight), target, memory=memory, head=head)
    sizes = {"tokens": 257, "vocab": 2003, "hidden": 6, "device": "cpu", "memory": memory}
    assert predicted(path="hidden", **sizes, needs_grad=needs_grad, softcap=softcap).plan == told
    assert ll.estimate(ll.logprobs, ll.Logits(hidden, weight), target, memory=memory, head=head).plan == told


@pytest.mark.parametrize("needs_grad", [("hidden", "weight"), ("hidden",)])
@pytest.mark.parametrize("memory", ["600KiB", "2MiB", "1GiB"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True},
        {"match": "bfloat16"},
        {"match": "bfloat16", "bias": True},
        {"bits": "canonical"},
        BY_SAMPLE,
    ],
    ids=str,
)
def test_the_plan_of_a_loss_is_the_one_that_runs(options: dict, dtype: str, memory: str, needs_grad: tuple):
    counts = options.get("counts", (257,))
    rows = ll.Rows.packed([torch.zeros(6 + n, dtype=torch.int64) for n in counts], counts, num_tokens=301)
    hidden = torch.zeros(301, 6, dtype=getattr(torch, dtype)).requires_grad_()
    weight = torch.zeros(2003, 6, dtype=hidden.dtype).requires_grad_("weight" in needs_grad)
    asked = {name: options[name] for name in ("match", "bits") if name in options}
    bias = torch.zeros(2003) if "bias" in options else None
    objective = options.get("objective", ll.Objective())
    fields = {"old_logprob": "current", "advantage": torch.zeros(257)}
    logits = ll.Logits(hidden, weight, bias=bias, **asked)
    told = ll.explain(ll.policy_loss, logits, rows, objective, memory=memory, **fields)
    sizes = {"tokens": 301, "rows": 257, "vocab": 2003, "hidden": 6, "device": "cpu", "dtype": dtype, "memory": memory}
    assert predicted(path="loss", **{**sizes, **options}, needs_grad=needs_grad).plan == told


def test_an_objective_of_ones_own_needs_no_second_edit():
    """A term that keeps three more vectors of a row shows in the estimate as in the allocator's count."""

    def heavy(inputs, power=2.0):
        a, b, c = (inputs.log_ratio * k for k in (1.0, 2.0, 3.0))
        return -inputs.advantage * (a + b + c).exp() ** power, {"mine": a, "yours": b, "theirs": c}

    case = {**LOSS, **F32, "tokens": 5003, "vocab": 31, "objective": ll.Objective(policy=heavy)}
    assert_promise(compare(PeakCase("own", case), CPU))


def test_two_passes_are_those_of_log_probs():
    sizes = {"tokens": 16384, "vocab": 151936, "hidden": 4096, "backend": "triton", "bits": "canonical"}
    loss, first = predicted(path="loss", **sizes), predicted(path="hidden", **sizes, entropy="value")
    assert loss.plan is not None
    assert loss.plan.kind == "two passes"
    assert loss.backward_peak == pytest.approx(first.backward_peak, rel=0.01)
    more = {item.name for item in loss.forward} - {item.name for item in first.forward}
    assert more <= {"vectors of the objective", "vectors of the objective, saved"}
    assert more


def test_what_was_measured_of_a_loss(monkeypatch):
    """On an H200, before there was an estimate or an epilogue: gibibytes at the peak of forward and backward."""
    without_epilogues(monkeypatch)
    # Hidden rows of the last chunk are copied since then, in bfloat16, unless all rows are known to count.
    copied = 4096 * 4096 * 2 / 2**30
    for options, measured in (
        ({"memory": "2.5GiB"}, 4.763),
        ({"memory": "1GiB"}, 3.73),
        ({"memory": "2.5GiB", "weight_grad": True}, 2.445 + copied),
    ):
        assert predicted(**BIG_LOSS, backend="triton", **options).peak / 2**30 == pytest.approx(measured, rel=0.01)


def test_the_default_memory_is_that_of_the_call():
    for path, default, more in (
        ("logits", "logits", {}),
        ("hidden", "hidden", {"hidden": 66}),
        ("loss", "chunk", {"hidden": 66}),
    ):
        sizes = {"path": path, "tokens": 100_003, "vocab": 20_011, "device": "cpu", **more}
        assert predicted(**sizes) == predicted(**sizes, memory=MEMORY[default])
        assert predicted(**sizes) != predicted(**sizes, memory="3MiB")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("memory", ["600KiB", "64MiB"])
def test_logits_are_estimated_with_their_dtype_and_the_memory_of_defer(memory: str, dtype: str):
    """A metric that is read off ``logits.float()``, or logits of a model under ``defer(model, memory=)``."""
    hidden = torch.zeros(2003, 66, dtype=torch.bfloat16, requires_grad=True)
    weight, target = torch.zeros(4001, 66, dtype=hidden.dtype), torch.zeros(2003, dtype=torch.int64)
    logits = like(ll.Logits(hidden, weight), dtype=getattr(torch, dtype), memory=memory)
    plain = ll.Logits(hidden, weight).to(logits.dtype)
    found = ll.estimate(ll.logprobs, logits, target)
    assert found == ll.estimate(ll.logprobs, plain, target, memory=memory) != ll.estimate(ll.logprobs, plain, target)
    # Whoever computes them gets them in their dtype.
    assert ll.estimate(lambda x: x.computed(), logits).peak >= 2003 * 4001 * logits.element_size()


def test_a_device_that_is_named_is_the_one_that_is_planned_for():
    """On an H200 tiles are larger than those of the CPU that the tensors are on."""
    hidden, weight, target = torch.zeros(3000, 64), torch.zeros(20011, 64), torch.zeros(3000, dtype=torch.int64)
    here, there = (
        ll.explain(ll.logprobs, ll.Logits(hidden, weight), target, device=device) for device in (None, "cuda")
    )
    dry = ll.Logits(hidden.to("meta"), weight.to("meta"))
    assert str(there) == str(ll.explain(ll.logprobs, dry, target.to("meta")))
    assert str(here) == str(ll.explain(ll.logprobs, dry, target.to("meta"), device="cpu")) != str(there)


def test_any_function_can_be_estimated():
    """What frameworks write, beside a verb."""
    hidden, weight = torch.zeros(64, 8, requires_grad=True), torch.zeros(1000, 8, requires_grad=True)

    def plain(hidden, weight):
        return (hidden @ weight.T).log_softmax(-1)[:, 0]

    found = ll.estimate(plain, hidden, weight)
    assert found.plan is None
    assert found.forward_peak >= 2 * 64 * 1000 * 4
    assert found.backward_peak >= 2 * 64 * 1000 * 4


@pytest.mark.parametrize(
    ("device", "dtype", "scratch"),
    [("cuda", "int64", 24), ("cuda", "float32", 24), ("cpu", "int64", 8), ("cpu", "float32", 0)],
)
def test_the_scratch_of_a_sort(device: str, dtype: str, scratch: int):
    """Bytes per element besides values and order, as measured on an H200 and on a CPU."""
    x = torch.empty(1009, dtype=getattr(torch, dtype), device="meta")
    found = ll.estimate(lambda x: x.sort(stable=True).values, x, device=device)
    assert found.peak == 1009 * (x.element_size() + 8 + scratch)


def test_the_device_is_that_of_tensors_given_by_name():
    """A sort on a CPU takes 8 bytes for each integer, on a GPU 24."""
    x = torch.arange(1009)
    assert ll.estimate(lambda x: x.sort(stable=True).values, x=x).peak == 1009 * (8 + 8 + 8)
    assert ll.estimate(lambda x: x.sort(stable=True).values, x=x.to("meta")).peak == 1009 * (8 + 8 + 24)


def test_numbers_are_not_looked_at():
    logits, rows = sized(64, 1000, 8, dtype="float32")
    hidden, weight = torch.randn(64, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    real = ll.estimate(ll.logprobs, ll.Logits(hidden, weight), torch.randint(1000, (64,)), entropy="grad")
    assert real == ll.estimate(ll.logprobs, logits, rows, entropy="grad", device="cpu")


@pytest.mark.parametrize("index", [torch.tensor([3, 0, 9]), [3, 0, 9], []])
@pytest.mark.parametrize("linear", [True, False])
def test_rows_as_a_pair(index: list[int] | torch.Tensor, linear: bool):
    """``(index, target)``, which the verbs take as it is, was refused, or an error of torch's."""
    hidden, weight = torch.randn(10, 8, requires_grad=True), torch.randn(100, 8)
    logits = ll.Logits(hidden, weight) if linear else hidden @ weight.T
    target = [1] * len(index)
    pair = (index, torch.tensor(target) if isinstance(index, torch.Tensor) else target)
    found, made = ll.estimate(ll.logprobs, logits, pair), ll.estimate(ll.logprobs, logits, ll.Rows.at(*pair))
    assert found.plan == made.plan
    # The call makes the rows itself: a few vectors of integers.
    assert 0 <= found.peak - made.peak <= 100 * len(index) + 100


def test_items_add_up_and_print():
    found = predicted(**BIG, backend="triton")
    assert found.forward_peak == sum(item.bytes for item in found.items if item in found.forward)
    assert found.peak == found.backward_peak == sum(item.bytes for item in found.backward)
    assert {item.phase for item in found.items} == {"forward", "kept", "backward"}
    outputs = {item.name: item.bytes for item in found.items if item.output}
    assert outputs["d_weight [151936, 4096]"] == 2 * 151936 * 4096
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) == len(found.items) + 3
    assert lines[-1].endswith("GiB")
    # What lives in one phase alone has a number there.
    shown = {"forward": (True, False), "backward": (False, True)}
    for item, line in zip(found.items, lines[2:-1], strict=True):
        assert line.startswith("* " if item.output else "  ")
        cells = (line[52:65].strip(), line[65:78].strip())
        assert tuple(map(bool, cells)) == tuple(item in items for items in (found.forward, found.backward))
        assert item.name.endswith(", saved") == (item.phase == "kept" and not item.output)
        assert item.phase == "kept" or tuple(map(bool, cells)) == shown[item.phase]


META = sized(64, 1000, 8)
WRONG = {
    "device must be": {"device": "tpu"},
    'backend="reference" is for checking': {"backend": "reference"},
    "dropped must be a share between 0 and 1 but is 30": {"dropped": 30},
    "memory: wanted a positive": {"memory": "much"},
    "entropy must be None": {"entropy": "yes"},
}


@pytest.mark.parametrize("text", WRONG)
def test_errors(text: str):
    with pytest.raises(ll.LogitlessError, match=re.escape(text)):
        ll.estimate(ll.logprobs, *META, **WRONG[text])


def test_what_the_verb_refuses_is_refused_dry():
    with pytest.raises(ll.LogitlessError, match="objective must be an Objective or a Preference but is str"):
        ll.estimate(ll.policy_loss, *META, "ppo")
    with pytest.raises(ll.LogitlessError, match="explain: print is no verb"):
        ll.explain(print)
