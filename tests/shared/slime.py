"""Shared by the tests of slime."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any, NamedTuple

import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from hosts import load, put_first, takes
from torch import Tensor
from truth import float64_leaf, truth

import logitless

DOUBLE = not put_first("slime")


V = 506


def slime() -> Any:
    """slime's ``loss``; of the double also the modules that hold its names by value."""
    if not DOUBLE:
        return load("slime")[0]
    import slime.backends.megatron_utils.actor
    import slime.backends.megatron_utils.server.logprob_utils  # noqa: F401
    from slime.backends.megatron_utils import loss

    return loss


def arguments(**more: Any) -> Namespace:
    settings = {"rollout_temperature": 0.8, "log_probs_chunk_size": -1, "entropy_coef": 0.1, "allgather_cp": False}
    losses = {"loss_type": "policy_loss", "recompute_loss_function": False, "use_rollout_logprobs": False}
    clip = {"eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": None, "rollout_top_p": 1.0}
    off = ("use_opsm", "use_tis", "use_kl_loss", "get_mismatch_metrics", "calculate_per_token_loss")
    plain = {name: False for name in off} | {"advantage_estimator": "grpo", "qkv_format": "thd"}
    paths = ("custom_pg_loss_reducer_function_path", "custom_tis_function_path")
    return Namespace(**(settings | losses | clip | plain | dict.fromkeys(paths) | more))


class Batch(NamedTuple):
    lengths: list[int]
    responses: list[int]
    padding: int

    def tokens(self) -> list[Tensor]:
        return [(torch.arange(n) * 31 + 7 * i) % V for i, n in enumerate(self.lengths)]

    def places(self) -> list[slice]:
        """Rows of the whole stream that predict each response."""
        ends = torch.tensor(self.lengths).cumsum(0).tolist()
        return [slice(end - r - 1, end - 1) for end, r in zip(ends, self.responses, strict=True)]

    def recorded(self) -> tuple[list[list[int]], list[Tensor]]:
        """Ids that a sampler kept: as a list, with offsets as a tensor; some tokens without any."""
        ids, offsets = [], []
        for i, response in enumerate(self.responses):
            counts = [(3 * i + 5 * t) % 4 * 6 for t in range(response)]
            offsets.append(torch.tensor([0, *counts]).cumsum(0))
            ids.append([(17 * j + i) % V for j in range(sum(counts))])
        return ids, offsets


BATCHES = [Batch([9, 14, 6], [4, 13, 2], 5), Batch([9, 3], [1, 1], 0)]
"""Ragged; and so short that a rank holds no row."""


def local(stream: Tensor, batch: Batch, cp: int, rank: int, allgather: bool) -> Tensor:
    """The rows of a whole stream ``[sum of lengths, ...]`` that this rank's model would compute, zeros for padding."""

    def pad(x: Tensor, length: int) -> Tensor:
        return torch.cat([x, x.new_zeros(length - len(x), *x.shape[1:])])

    if allgather:
        return pad(stream, -(-len(stream) // cp) * cp + cp * batch.padding).chunk(cp)[rank]
    parts = []
    for sample in stream.split(batch.lengths):
        chunks = pad(sample, -(-len(sample) // (2 * cp)) * 2 * cp).chunk(2 * cp) if cp > 1 else [sample]
        parts += [chunks[rank], chunks[2 * cp - 1 - rank]] if cp > 1 else chunks
    return pad(torch.cat(parts), sum(map(len, parts)) + batch.padding)


class Here(NamedTuple):
    """What one rank has of a batch."""

    loss: Any
    args: Namespace
    batch: Batch
    inputs: dict[str, Any]
    cp: int
    cp_rank: int
    tp: int
    tp_rank: int

    def part(self, stream: Tensor, columns: bool = True) -> Tensor:
        rows = local(stream, self.batch, self.cp, self.cp_rank, self.args.allgather_cp)
        return rows.chunk(self.tp, dim=-1)[self.tp_rank] if columns else rows

    def held(self) -> list[Tensor]:
        """Places in its response of the tokens of each sample that belong to this rank."""
        position = torch.zeros(sum(self.batch.lengths))
        for place, response in zip(self.batch.places(), self.batch.responses, strict=True):
            position[place] = torch.arange(float(response))
        outputs = self.part(position, columns=False)[None, :, None]
        return [x.long() for x in self.loss.get_values(outputs, args=self.args, **self.inputs)[1]["values"]]


def check_scores(here: Here) -> None:
    """Values and gradients, with and without replay, entropy with and without gradient."""
    torch.manual_seed(5)
    stream = torch.randn(sum(here.batch.lengths), V) * 3
    upstream = [torch.randn(2, r) for r in here.batch.responses]
    held = here.held()
    ids, offsets = here.batch.recorded()
    # Releases without replay have a graph for every entropy, trained or not.
    recorded = takes(here.loss.get_log_probs_and_entropy, "top_p_token_ids")
    for replay in (False, True) if recorded else (False,):
        for coef in (0.0, 0.1) if recorded else (0.1,):
            here.args.entropy_coef = coef
            more = {"top_p_token_ids": ids, "top_p_token_offsets": offsets} if replay else {}

            def run(more: dict = more, coef: float = coef) -> tuple[Tensor, Tensor, Tensor]:
                logits = here.part(stream)[None].clone().requires_grad_()
                empty, results = here.loss.get_log_probs_and_entropy(
                    logits, args=here.args, **here.inputs, with_entropy=True, **more
                )
                assert empty.shape == (0,)
                assert [len(x) for x in results["log_probs"]] == [len(x) for x in results["entropy"]]
                assert [len(x) for x in results["log_probs"]] == [len(x) for x in held]
                assert all(x.requires_grad and x.dtype == torch.float32 for x in results["log_probs"])
                assert all(x.requires_grad == (coef != 0) for x in results["entropy"])
                g = torch.cat([x[:, at] for x, at in zip(upstream, held, strict=True)], 1)
                logprob, entropy = torch.cat(results["log_probs"]), torch.cat(results["entropy"])
                ((logprob * g[0]).sum() + (entropy * g[1]).sum()).backward()
                # On a rank without a row slime's results have no graph down to the logits.
                gradient = torch.zeros_like(logits) if logits.grad is None else logits.grad
                return logprob.detach(), entropy.detach(), gradient[0]

            leaf, exact, total = float64_leaf(stream), [], torch.zeros((), dtype=torch.float64)
            for i, place in enumerate(here.batch.places()):
                rows = leaf[place]
                split = [ids[i][a:b] for a, b in zip(offsets[i][:-1], offsets[i][1:], strict=True)] if replay else None
                target = here.inputs["unconcat_tokens"][i][-here.batch.responses[i] :]
                out = truth(rows, range(len(rows)), target, temperature=0.8, kept=split)
                total = total + (out.logprob * upstream[i][0]).sum()
                total = total + ((out.entropy * upstream[i][1]).sum() if coef else 0)
                exact.append(torch.stack([out.logprob, out.entropy])[:, held[i]].detach())
            total.backward()
            theirs = run()
            logitless.install("slime", audit=2)
            ours = run()
            report = logitless.status().hosts[0]
            assert (report.replaced[1].calls, report.replaced[1].passed_on) == (1, 0)
            assert report.audit.passed
            logitless.uninstall("slime")
            for mine, right, other in zip(ours[:2], torch.cat(exact, 1), theirs[:2], strict=True):
                assert_close_to_truth(mine, right, other)
            assert_gradient_close_to_truth(ours[2], here.part(leaf.grad), theirs[2])
            if coef:
                continue
            logitless.install("slime", response_only=False)
            for a, b in zip(run(), ours, strict=True):
                torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
            logitless.uninstall("slime")


def check_values(here: Here) -> None:
    torch.manual_seed(8)
    outputs, upstream = torch.randn(sum(here.batch.lengths), 1), torch.randn(100)

    def run() -> list[Tensor]:
        leaf = here.part(outputs, columns=False)[None].clone().requires_grad_()
        values = here.loss.get_values(leaf, args=here.args, **here.inputs)[1]["values"]
        joined = torch.cat(values)
        (joined * upstream[: len(joined)]).sum().backward()
        return [*values, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad]

    theirs = run()
    logitless.install("slime")
    ours = run()
    assert logitless.status().hosts[0].replaced[2].calls == 1
    logitless.uninstall("slime")
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))


def marks(masks: list[Tensor]) -> dict[str, Any]:
    """Loss masks and their sums, under the names of several releases."""
    sums = [mask.sum().clamp(min=1) for mask in masks]
    return {"loss_masks": masks, "rollout_mask_sums": sums, "group_mask_sums": sums}


def check_losses(here: Here) -> None:
    """Whole losses: the same number and gradient, also when only rows that count are scored."""
    torch.manual_seed(6)
    stream = torch.randn(sum(here.batch.lengths), V) * 3
    held = here.held()
    masks = [(torch.arange(r) % 3 != 1).float() for r in here.batch.responses]
    for place, mask, tokens in zip(here.batch.places(), masks, here.inputs["unconcat_tokens"], strict=True):
        # What a tool wrote may be so unlikely that a ratio to nothing overflows; the mask drops it.
        rows = torch.arange(place.start, place.stop)[mask == 0]
        stream[rows, tokens[-len(mask) :][mask == 0]] = -900.0
    with torch.no_grad():
        _, before = here.loss.get_log_probs_and_entropy(here.part(stream)[None], args=here.args, **here.inputs)
    old = [x + torch.randn(len(x)) * 0.1 for x in before["log_probs"]]
    advantages = [torch.randn(r)[at] for r, at in zip(here.batch.responses, held, strict=True)]
    batch = here.inputs | marks(masks) | {"log_probs": old, "advantages": advantages}

    def run(**more: Any) -> tuple[float, Tensor]:
        logits = here.part(stream)[None].clone().requires_grad_()
        args = Namespace(**(vars(here.args) | more))
        loss, _, log = here.loss.loss_function(args, batch, 2, 3, logits)
        loss.backward()
        numbers = [torch.as_tensor(x).reshape(-1) for name, x in log.items() if name != "keys"]
        assert torch.cat(numbers).isfinite().all()
        return loss.item(), torch.zeros_like(logits) if logits.grad is None else logits.grad

    # With the rollout's own log-probs nobody has computed others.
    rollout = {"use_rollout_logprobs": True}
    for more in ({"loss_type": "policy_loss"}, {"loss_type": "sft_loss"}, {"recompute_loss_function": True}, rollout):
        given = {"rollout_log_probs": batch.pop("log_probs")} if more is rollout else {}
        batch |= given
        theirs = run(**more)
        logitless.install("slime", loss_mask_only=True, audit=2)
        ours = run(**more)
        report = logitless.status().hosts[0]
        assert sum(entry.calls for entry in report.replaced[3:]) >= 1
        logitless.uninstall("slime")
        assert math.isclose(ours[0], theirs[0], rel_tol=1e-5, abs_tol=1e-5), more
        # Releases without a mask score with Megatron's fused cross entropy, which rounds the gradient to bfloat16.
        exact = takes(here.loss.calculate_log_probs_and_entropy, "log_prob_keep_mask")
        near = {"atol": 1e-6, "rtol": 1e-4} if exact else {"atol": 2**-8 * float(theirs[1].abs().max()), "rtol": 2**-7}
        torch.testing.assert_close(ours[1], theirs[1], **near)
