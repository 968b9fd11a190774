"""The recommended call as code: a function of the tensors and groups that a training loop has."""

from __future__ import annotations

from logitless.tools.plan.step import LossStep

SHARD = [
    "def make_shard(weight, tp_group):  # once per run, for every call",
    "    return ll.VocabShard.even(weight.shape[0] * tp_group.size(), tp_group)\n\n",
]


def snippet(step: LossStep, call: str, memory: int | str) -> str:
    """The code of a call by the name of its way: ``policy_loss``, or ``logprobs`` with a scope or not."""
    groups = [name for name, size in (("shard", step.tp), ("cp_group", step.cp)) if size > 1]
    split = ["cp=ll.Zigzag(cp_group.rank(), cp_group.size())"] if step.cp > 1 else []
    chosen = {"softcap": (step.model.softcap, None), "scale": (step.model.scale, 1.0)}
    head = [f"{name}={value!r}" for name, (value, default) in chosen.items() if value != default]
    options = [f"head=ll.Head({', '.join(head)})"] if head else []
    options += [f"memory={memory!r}".replace("'", '"')]
    linear = ["hidden", "weight", *(["shard=shard"] if step.tp > 1 else [])]
    rows = _call("rows", "Rows.packed", ["tokens", "response_lengths", *split, "device=hidden.device"])
    logits = f"    logits = ll.Logits({', '.join(linear)})"
    if call.startswith("policy_loss"):
        name, given, body = _with_objective(step, options)
    else:
        name, given, body = _without(step, options, support="support" in call)
    takes = ["hidden", "weight", "tokens", "response_lengths", *given, *groups]
    once = SHARD if step.tp > 1 else []
    written = [f"def {name}(", *(f"    {x}," for x in takes), "):", *rows, logits, *body]
    return "\n".join(["import logitless as ll\n\n", *once, *written]) + "\n"


def _with_objective(step: LossStep, options: list[str]) -> tuple[str, list[str], list[str]]:
    """Name, further arguments and body of the function that returns a loss."""
    terms = "entropy_coef=0.001" if step.entropy == "grad" else ""
    fields = ["old_logprob=rows.from_responses(old_logprobs)", "advantage=advantages[rows.sample]"]
    group = ["group=cp_group"] if step.cp > 1 else []
    call = ["logits", "rows", "objective", *fields, "denominator=denominator", *group, *options]
    return (
        "policy_loss",
        ["old_logprobs", "advantages", "denominator"],
        [
            f"    objective = ll.Objective({terms})  # or ll.Objective.recipe(...)",
            "    # denominator: objectives.count_over(all_rows, objective.reduce, group)",
            *_call("loss, metrics", "policy_loss", call),
            "    return loss, metrics",
        ],
    )


def _without(step: LossStep, options: list[str], support: bool) -> tuple[str, list[str], list[str]]:
    """Name, further arguments and body of the function that returns log-probs, and entropy if asked for."""
    entropy = [f'entropy="{step.entropy}"'] if step.entropy else []
    kept = ['kept=kept.over("support")'] if support else []
    call = ["logits", "rows", *kept, *entropy, *options]
    results = "    return rows.split(out.logprob)" + (", rows.split(out.entropy)" if step.entropy else "")
    return "score", ["kept"] if support else [], [*_call("out", "logprobs", call), results]


def _call(name: str, function: str, arguments: list[str]) -> list[str]:
    return [f"    {name} = ll.{function}(", *(f"        {argument}," for argument in arguments), "    )"]
