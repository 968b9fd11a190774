"""``grpo_plain.py`` with FSDP2: ``torchrun --nproc-per-node 2 examples/grpo_fsdp2.py``, on CPU over gloo.

All that is different:

    the head becomes a PolicyHead   FSDP gathers the weight around it; rows go in, log-probs come out
    fully_shard                     every block, the head, and the rest
    micro-batches                   one denominator for all of them, on all ranks
    loss * world size               FSDP averages gradients, and these losses are parts of a sum

Every rank draws prompts and random numbers of the whole batch and takes its share, so that the curve is the same on any
number of ranks.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from grpo_plain import CLIP_NORM, GROUP, HEAD, OBJECTIVE, PROMPT, Policy, new_prompts, report, reward, sample
from torch import nn
from torch.distributed.fsdp import fully_shard

import logitless as ll
from logitless.objectives import count_over, grpo_advantages

MICRO = 2  # micro-batches of a rank


def sharded_policy() -> Policy:
    """A policy whose weights are the same on any number of ranks, each rank with its share of them."""
    torch.manual_seed(0)
    policy = Policy()
    policy.head = ll.PolicyHead(policy.head, entropy=OBJECTIVE.entropy, head=HEAD)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*policy.blocks, policy.head, policy):
        fully_shard(part, mesh=mesh)
    return policy


def train(steps: int) -> list[float]:
    """Mean reward of every step, over all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    policy, chance = sharded_policy(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    curve = []
    for step in range(steps):
        # Whole groups stay on one rank: advantages need no communication.
        tokens, response_lengths = sample(policy, *(x.chunk(world)[rank] for x in new_prompts(chance)))
        rewards = reward(tokens, response_lengths)
        advantages = grpo_advantages(rewards, groups=GROUP)
        size = len(tokens) // MICRO
        batches = []
        for first in range(0, len(tokens), size):
            part = slice(first, first + size)
            lengths = [PROMPT + n for n in response_lengths[part]]
            rows = ll.Rows.padded(tokens[part], response_lengths[part], lengths=lengths)
            batches.append((tokens[part], rows, advantages[part][rows.sample]))

        denominator = count_over([rows for _, rows, _ in batches], OBJECTIVE.reduce, dist.group.WORLD)
        old = ["current"] * MICRO
        for _ in range(2):
            optimizer.zero_grad()
            found = []
            for i, (ids, rows, advantage) in enumerate(batches):
                out = policy(ids, rows)
                fields = {"old_logprob": old[i], "advantage": advantage}
                loss, metrics = OBJECTIVE(out, rows, denominator=denominator, **fields)
                (loss * world).backward()
                old[i] = out.logprob.detach() if isinstance(old[i], str) else old[i]
                found.append(metrics)
            norm = nn.utils.clip_grad_norm_(policy.parameters(), CLIP_NORM).full_tensor()
            optimizer.step()

        metrics = ll.Metrics.merge(found).reduce(dist.group.WORLD)
        total = rewards.sum()
        dist.all_reduce(total)
        curve.append(float(total) / (len(rewards) * world))
        if rank == 0 and (step % 10 == 0 or step == steps - 1):
            report(step, curve[-1], metrics, norm)
    return curve


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    train(asked.steps)
    dist.barrier()  # nobody leaves while another still talks to it
    dist.destroy_process_group()
    time.sleep(0.2)  # gloo's threads let go of the last collective; one that does so while Python ends aborts it
