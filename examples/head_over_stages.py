"""The head over all stages of a pipeline: ``torchrun --nproc-per-node 4 examples/head_over_stages.py``, over gloo.

The last stage of a pipeline has its layers and the head, and the others wait for it. Here every stage has a part of the
vocabulary instead, and takes its share of the head's products:

    last stage      hidden states   --broadcast-->   all stages
    every stage     logits of its own columns, never stored; one all_gather of 4 numbers a row
    every stage     d_hidden of its own columns      --sum-->   last stage, where backward goes on

``VocabShard`` takes the pipeline's group as it takes a tensor-parallel one. Gradients of all layers and of the head are
compared with those of one process that has everything.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import logitless as ll

VOCAB, WIDTH, PROMPT = 515, 24, 5
RESPONSES = [[11, 7], [3, 14], [8, 9]]  # micro-batches of two samples
OBJECTIVE = ll.Objective.recipe("dapo")
REAL = {"tokens": 8192, "vocabulary": 151936, "width": 4096}  # a micro-batch of Qwen3-8B


class FromLastStage(torch.autograd.Function):
    """Hidden states of the last stage on every stage. Each has the gradient by its own columns; the last gets the sum.

    With ``Logits(hidden_grad="partial")``, which leaves the sum to us: half of what an all-reduce would send.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.last = group, dist.get_global_rank(group, group.size() - 1)
        everywhere = hidden.detach().clone()
        dist.broadcast(everywhere, ctx.last, group=group)
        return everywhere

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.reduce(total, ctx.last, group=ctx.group)
        return total, None


class Block(nn.Module):
    """The layers of a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(x).relu())


class Batch:
    """A micro-batch, the same on every stage: token ids travel on the CPU, and are small."""

    def __init__(self, responses: list[int]) -> None:
        tokens = [torch.randint(VOCAB, (PROMPT + n,)) for n in responses]
        self.ids, self.rows = torch.cat(tokens), ll.Rows.packed(tokens, responses)
        self.advantage = torch.tensor([1.0, -0.5], dtype=torch.float64)[self.rows.sample]

    def loss(self, hidden: Tensor, weight: Tensor, denominator: int, **options: Any) -> Tensor:
        fields = {"old_logprob": "current", "advantage": self.advantage, "denominator": denominator}
        return ll.policy_loss(ll.Logits(hidden, weight, **options), self.rows, OBJECTIVE, **fields)[0]


def whole_model(stages: int) -> tuple[nn.Embedding, nn.ModuleList, Tensor]:
    """Embedding, blocks and head, the same on every rank, in float64."""
    torch.manual_seed(0)
    embedding, blocks = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Block() for _ in range(stages))
    return embedding.double(), blocks.double(), torch.randn(VOCAB, WIDTH, dtype=torch.float64)


def over_stages(batches: list[Batch], group: dist.ProcessGroup) -> list[Tensor]:
    """Gradients of this stage's block and of its part of the head: all micro-batches forward, the head, all back."""
    stage, last = group.rank(), group.size() - 1
    embedding, blocks, whole = whole_model(group.size())
    block = blocks[stage]
    start, stop = (VOCAB * i // group.size() for i in (stage, stage + 1))
    shard = ll.VocabShard(start, stop, group)  # a collective: once per run
    weight = whole[start:stop].clone().requires_grad_()
    denominator, passed = sum(len(batch.rows) for batch in batches), []
    for batch in batches:
        x = embedding(batch.ids) if stage == 0 else torch.empty(len(batch.ids), WIDTH, dtype=torch.float64)
        if stage > 0:
            dist.recv(x, stage - 1)
            x.requires_grad_()
        passed.append((x, block(x)))
        if stage < last:
            dist.send(passed[-1][1].detach(), stage + 1)
    for batch, (_, y) in zip(batches, passed, strict=True):
        # Stages before the last have nothing to send, and a graph all the same: backward is a collective.
        mine = y if stage == last else torch.empty_like(y).requires_grad_()
        hidden = FromLastStage.apply(mine, group)
        batch.loss(hidden, weight, denominator, shard=shard, hidden_grad="partial").backward()
    for x, y in passed:
        if stage < last:
            gradient = torch.empty_like(y)
            dist.recv(gradient, stage + 1)
            y.backward(gradient)
        if stage > 0:
            dist.send(x.grad, stage - 1)
    return [x.grad for x in (*block.parameters(), weight)]


def in_one_process(batches: list[Batch], stages: int) -> list[Tensor]:
    """Gradients of all blocks, block by block, and of the head."""
    embedding, blocks, weight = whole_model(stages)
    weight.requires_grad_()
    denominator = sum(len(batch.rows) for batch in batches)
    for batch in batches:
        hidden = embedding(batch.ids)
        for block in blocks:
            hidden = block(hidden)
        batch.loss(hidden, weight, denominator).backward()
    return [x.grad for x in (*blocks.parameters(), weight)]


def apart(parts: list[list[Tensor]], right: list[Tensor]) -> float:
    """The largest difference from the gradients of one process, relative to the largest gradient."""
    ours = [x for part in parts for x in part[:-1]] + [torch.cat([part[-1] for part in parts])]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, right, strict=True))


def saved(group: dist.ProcessGroup) -> list[str]:
    """What the last stage holds and multiplies for the head of a real model, alone and with its share."""
    shard = ll.VocabShard.even(REAL["vocabulary"], group)
    lines = []
    for name, part in (("the last stage alone", None), (f"over {group.size()} stages", shard)):
        columns = REAL["vocabulary"] if part is None else part.stop - part.start
        hidden, weight = (
            torch.empty(n, REAL["width"], dtype=torch.bfloat16, device="meta", requires_grad=True)
            for n in (REAL["tokens"], columns)
        )
        rows = torch.zeros(REAL["tokens"], dtype=torch.int64, device="meta")
        logits = ll.Logits(hidden, weight, shard=part, hidden_grad="reduced" if part is None else "partial")
        advantage = torch.zeros(REAL["tokens"], device="meta")
        call = (ll.policy_loss, logits, rows, OBJECTIVE)
        peak = ll.estimate(*call, old_logprob="current", advantage=advantage, device="cuda").peak
        products = ll.explain(*call, device="cuda").products
        work = 2 * products * REAL["tokens"] * columns * REAL["width"]
        lines.append(
            f"{name:22} weight {weight.nbytes / 2**30:.2f} GiB, peak of the loss {peak / 2**30:.2f} GiB, "
            f"{products} products of {columns} columns, {work / 1e12:.1f} TFLOP"
        )
    return lines


def main() -> None:
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(1)
    batches = [Batch(responses) for responses in RESPONSES]
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, over_stages(batches, group))
    lines = saved(group)
    if group.rank() == 0:
        off = apart(parts, in_one_process(batches, group.size()))
        print(f"{group.size()} stages, {len(batches)} micro-batches: gradients off by {off:.1e} from one process")
        print("\n".join(lines))
        size = REAL["tokens"] * REAL["width"] * 2 / 2**20
        print(f"sent for it, per micro-batch: hidden states and d_hidden, {size:.0f} MiB each way, and 4 numbers a row")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.barrier()  # nobody leaves while another still talks to it
    dist.destroy_process_group()
    time.sleep(0.2)  # gloo's threads let go of the last collective; one that does so while Python ends aborts it
