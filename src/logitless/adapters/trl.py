"""TRL: the fused LM head of its trainers, and the functions on logits that they share.

    GRPOTrainer, RLOOTrainer, AsyncGRPOTrainer, DPOTrainer, ...
      _get_per_token_logps_and_entropies -> model(..., fused_lm_head=True) -> ChunkedLogProbFunction.apply   (replaced)
    DistillationTrainer
      _chunked_divergence_loss -> ChunkedDivergenceFunction.apply                                           (replaced)
    trainers with logits
      selective_log_softmax, entropy_from_logits, selective_log_softmax_and_entropy                         (replaced)

TRL rounds half-precision logits to their own dtype. So does this adapter, to make runs comparable with earlier runs,
unless ``accurate=True`` asks for float32. Calls left to TRL and counted as passed on: half-precision logits without
``accurate``, and heads under DeepSpeed ZeRO-3, which partitions the weight again before backward. The reward model's
trainer has no such head, and GKD compares whole logits: neither calls anything of this. Divergences are in float32 in
TRL as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from logitless.adapters.audit import Audit
from logitless.adapters.expected import score_expecting
from logitless.adapters.heads import deferring
from logitless.adapters.host import Host, Option, PassOn, Replacement
from logitless.adapters.replacing import Options, replaces
from logitless.adapters.scoring import HALF, entropy_mode, product_dtype, score, score_ids, tracked
from logitless.adapters.trl_loss import compute_loss, expected_of
from logitless.adapters.trl_outputs import asked_of_logits, further_outputs
from logitless.backends.divergences import Divergence
from logitless.errors import LogitlessError
from logitless.operands import Logits, Teacher
from logitless.rows import Rows
from logitless.score import logprobs
from logitless.spec import IGNORE, EntropyMode, Head, TokenStats, parse_memory

UTILS, EXPERIMENTAL = "trl.trainer.utils", "trl.experimental"

EXTRA_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@replaces("trl.kernels.chunked_logprob", "ChunkedLogProbFunction.apply", {"1.15 - 1.16": (), "0.24 - 1.14": None})
def chunked_logprob(
    options: Options,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = EXTRA_OUTPUTS,
) -> Any:
    """Five results per token, None if not asked for."""
    audit: Audit = options["audit"]
    if set(outputs) - {"log_probs", *EXTRA_OUTPUTS}:
        return PassOn("further outputs")
    if hasattr(weight, "ds_id"):
        return PassOn("ZeRO-3")
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        raise LogitlessError(
            f"hidden must be [N, H] and targets [N] but they are {list(hidden.shape)} and {list(targets.shape)}."
        )
    _check_ids("targets", targets)
    dtype = product_dtype(hidden)
    head = Head(temperature=temperature, scale=logit_scale, softcap=final_logit_softcapping)
    match = None if options["accurate"] else HALF.get(dtype)
    bias = None if bias is None else bias.to(dtype)
    logits = Logits(hidden.to(dtype), weight.to(dtype), bias=bias, match=match)
    expected = expected_of(len(targets)) if options["one_pass"] and tracked(hidden, weight, bias) else None
    if expected is not None and not set(outputs) - {"log_probs", "entropy"}:
        rows, counts = Rows.every(targets), options["expectations"]
        found = score_expecting(logits, rows, expected, counts, head=head)
        assert found.entropy is not None
        audit.of_logits("loss", logits, targets, logprob=found.logprob, entropy=found.entropy, head=head)
        return found.logprob.float(), found.entropy.float() if "entropy" in outputs else None, None, None, None
    entropy = entropy_mode(options["entropy_grad"], logits) if "entropy" in outputs else None
    asked: dict[str, Any] = {"stats": asked_of_logits(outputs, head), "memory": options["memory"]}
    out = score("fused LM head", logits, targets, audit, head=head, entropy=entropy, **asked)
    further = further_outputs(outputs, out, logits, head)
    return out.logprob.float(), None if out.entropy is None else out.entropy.float(), *further


@replaces("trl.kernels.chunked_divergence", "ChunkedDivergenceFunction.apply", {"1.16": (), "0.24 - 1.15": None})
def chunked_divergence(
    options: Options,
    student_hidden: Tensor,
    student_weight: Tensor,
    student_bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    beta: float,
    temperature: float = 1.0,
    student_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_final_logit_softcapping: float | None = None,
) -> Any:
    """Divergence from the teacher, and the student's entropy."""
    if hasattr(student_weight, "ds_id") or hasattr(teacher_weight, "ds_id"):
        return PassOn("ZeRO-3")
    vocab, others = len(student_weight), len(teacher_weight)
    if others < vocab:
        raise LogitlessError(f"the teacher's head has {others} rows and the student's {vocab}.")
    # As in TRL, autocast rounds what is multiplied, and not the bias.
    dtype, their_dtype = product_dtype(student_hidden), product_dtype(teacher_hidden)
    logits = Logits(student_hidden.to(dtype), student_weight.to(dtype), bias=student_bias)
    theirs = Logits(teacher_hidden.to(their_dtype), teacher_weight.to(their_dtype), bias=teacher_bias)
    head = Head(temperature=temperature, scale=student_logit_scale, softcap=student_final_logit_softcapping)
    their_head = Head(
        temperature=temperature,
        scale=teacher_logit_scale,
        softcap=teacher_final_logit_softcapping,
        # As TRL: rows of the teacher's head beyond the student's are padding.
        vocab_size=vocab if others > vocab else None,
    )
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(float(beta), "jsd")
    with torch.autocast(student_hidden.device.type, enabled=False):
        out = logprobs(
            logits,
            # No token is singled out.
            torch.zeros(len(student_hidden), dtype=torch.int64, device=student_hidden.device),
            entropy="value",
            head=head,
            teacher=Teacher(theirs, head=their_head),
            divergence=Divergence(kind, beta=beta if kind == "jsd" else 0.5),  # pyright: ignore[reportArgumentType]
            memory=options["memory"],
        )
    assert out.divergence is not None
    assert out.entropy is not None
    audit: Audit = options["audit"]
    audit.of_pair("divergence", (logits, head), (theirs, their_head), beta, out.divergence, out.entropy)
    return out.divergence.float(), out.entropy.float()


@replaces(
    UTILS,
    signature={"1.14 - 1.16": (), "0.24 - 1.13": ("temperature", "row_mask")},
    also_in=(
        f"{EXPERIMENTAL}.a2po.a2po_trainer",
        f"{EXPERIMENTAL}.cpo.cpo_trainer",
        f"{EXPERIMENTAL}.orpo.orpo_trainer",
        f"{EXPERIMENTAL}.sdft.loss_utils",
        f"{EXPERIMENTAL}.sdft.sdft_trainer",
        f"{EXPERIMENTAL}.sdpo.loss_utils",
        f"{EXPERIMENTAL}.sdpo.sdpo_trainer",
        # ms-swift's trainers hold TRL's functions by name.
        "swift.rlhf_trainers.grpo_trainer",
        "swift.rlhf_trainers.rlhf_mixin",
    ),
)
def selective_log_softmax(
    options: Options, logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Any:
    """One log-prob per row, or K of them."""
    if _rounds(logits, options):
        return PassOn("half precision")
    _check_index(logits, index, row_mask)
    if index.dim() == logits.dim():
        return _several(logits, index, temperature, row_mask, options)
    return _score_logits(logits, index, temperature, row_mask, None, options).logprob


@replaces(UTILS)
def entropy_from_logits(options: Options, logits: Tensor, chunk_size: int = 128) -> Any:
    """The chunk size is ignored."""
    if _rounds(logits, options):
        return PassOn("half precision")
    index = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return _score_logits(logits, index, 1.0, None, entropy_mode(True, logits), options).entropy


@replaces(UTILS, signature={"1.14 - 1.16": (), "0.24 - 1.13": None}, also_in=(f"{EXPERIMENTAL}.tpo.tpo_trainer",))
def selective_log_softmax_and_entropy(
    options: Options,
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> Any:
    """One pass over the logits for both."""
    if _rounds(logits, options):
        return PassOn("half precision")
    _check_index(logits, index, row_mask)
    if index.dim() == logits.dim():
        raise LogitlessError(f"index must be {list(logits.shape[:-1])}, one per row, but is {list(index.shape)}.")
    mode = entropy_mode(entropy_requires_grad, logits)
    out = _score_logits(logits, index, temperature, row_mask, mode, options)
    return out.logprob, out.entropy


def _rounds(logits: Tensor, options: Options) -> bool:
    """Whether TRL's own rounding is asked for. Deferred logits are rounded already."""
    return logits.dtype in HALF and not options["accurate"] and not isinstance(logits, Logits)


def _score_logits(
    logits: Tensor,
    index: Tensor,
    temperature: float,
    row_mask: Tensor | None,
    entropy: EntropyMode,
    options: Options,
) -> TokenStats:
    target = index.long() if row_mask is None else index.long().masked_fill(row_mask == 0, IGNORE)
    found = score("logits", logits, target, options["audit"], entropy=entropy, head=Head(temperature=temperature))
    # DPO up to 1.13 writes zeros into what it is given, and backward needs our own.
    return found.each(torch.clone)


def _several(logits: Tensor, index: Tensor, temperature: float, row_mask: Tensor | None, options: Options) -> Tensor:
    """K log-probs per row, all with the log Z of the row."""
    chosen = score_ids("logits", logits, index, options["audit"], head=Head(temperature=temperature)).ids_logprobs
    assert chosen is not None
    return chosen if row_mask is None else chosen.masked_fill(row_mask == 0, 0.0)


def _check_index(logits: Tensor, index: Tensor, row_mask: Tensor | None) -> None:
    lead = logits.shape[:-1]
    if index.shape != lead and (index.dim() != logits.dim() or index.shape[:-1] != lead):
        raise LogitlessError(
            f"index must be {list(lead)} or {[*lead, 'K']} to go with logits of shape {list(logits.shape)} but is "
            f"{list(index.shape)}."
        )
    if row_mask is not None and row_mask.shape != index.shape:
        raise LogitlessError(f"row_mask must be {list(index.shape)} like index but is {list(row_mask.shape)}.")
    _check_ids("index", index)
    if index.dim() == logits.dim() and index.device.type == "cpu" and bool((index >= logits.shape[-1]).any()):
        raise LogitlessError(f"index goes up to {int(index.max())}, outside the vocabulary of {logits.shape[-1]}.")


def _check_ids(name: str, ids: Tensor) -> None:
    """Raise for negative ids: in TRL, callers replace -100 before they call."""
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise LogitlessError(f"{name} must be integers but is {ids.dtype}.")
    # On an accelerator this check would stall the stream.
    if ids.device.type == "cpu" and bool((ids < 0).any()):
        raise LogitlessError(f"{name} has the id {int(ids.min())}. Ids must not be negative; leave rows out by mask.")


def _replacements(options: Options) -> list[Replacement]:
    return [
        *([compute_loss] if options["one_pass"] else []),
        chunked_logprob,
        chunked_divergence,
        selective_log_softmax,
        entropy_from_logits,
        selective_log_softmax_and_entropy,
    ]


WITH_LOGITS = ("CPOTrainer", "ORPOTrainer", "TPOTrainer")
"""Trainers that read logits, and whose own steps were run with deferred ones: none was made."""


def _heads(options: Options) -> list[Replacement]:
    def model_of(self: Any, model: Any, *_: Any, **__: Any) -> Any:
        return model if any(kind.__name__ in WITH_LOGITS for kind in type(self).__mro__) else None

    step = {"1.16": "(self, model, inputs, num_items_in_batch=None)", "0.24 - 1.15": None}
    # From 1.15 on, DPO has a fused head.
    dpo = {"1.0 - 1.14": "(self, *args, **kwargs)", "0.24 - 0.29": None, "1.15 - 1.16": None}
    return [
        Replacement("trl.trainer.base_trainer", "_BaseTrainer.training_step", step, deferring(model_of), optional=True),
        Replacement("trl.trainer.dpo_trainer", "DPOTrainer.training_step", dpo, _deferring_both, optional=True),
    ]


def _deferring_both(original: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """Wraps ``DPOTrainer.training_step``: the policy is deferred, and the reference where it is another model."""
    reference = deferring(lambda self, *_, **__: self.ref_model)
    return deferring(lambda self, model, *_, **__: model)(reference(original, options), options)


HOST = Host(
    name="trl",
    package="trl",
    versions=("0.24 - 1.16",),
    replacements=_replacements,
    heads=_heads,
    logits="deferred",
    options={
        "accurate": Option(False, "float32 results for half-precision inputs instead of TRL's rounding"),
        "entropy_grad": Option(True, "False: no entropy bonus is trained, so entropy is a metric without a graph"),
        "memory": Option("256MiB", "working memory of the fused LM head, and of a divergence", check=parse_memory),
        "one_pass": Option(False, "True: GRPO's gradients are made with its log-probs, in 3 products instead of 4"),
    },
)
