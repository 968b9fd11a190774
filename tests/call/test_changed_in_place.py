"""Tensors that are changed in place between forward and backward: whatever backward reads of them, it raises.

Every autograd Function of the package is part of some case, found by the graph that the case makes. Which of the
case's tensors backward reads is seen by watching it, so that a Function that reads one more is caught here.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from calls import from_hidden, loss_from_hidden
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import logitless as ll
from logitless.adapters.expected import Expectations, Expected, score_expecting
from logitless.adapters.specforge_losses import _Acceptance, _CrossEntropy
from logitless.deferred.column_parallel import into_main_grad
from logitless.memory.meta import _Root, hand_over
from logitless.operands import Teachers

PACKAGE = Path(ll.__file__).parent
T, R, V, D, RANK = 7, 5, 20, 6, 2


def tensors() -> dict[str, Tensor]:
    """What a caller has, new each time: the same numbers."""
    maker = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=maker)

    x = {"logits": normal(T, V), "hidden": normal(T, D), "weight": normal(V, D), "bias": normal(V)}
    x |= {"a": normal(RANK, D), "b": normal(V, RANK), "field": normal(R)}
    for leaf in x.values():
        leaf.requires_grad_()
    x |= {"teacher_logits": normal(T, V), "teacher_hidden": normal(T, D)}
    x |= {"teacher_weight": normal(V, D), "teacher_bias": normal(V), "second_weight": normal(V, D)}
    x |= {"index": torch.tensor([0, 2, 3, 5, 6]), "target": torch.tensor([1, 4, -100, 7, 19])}
    x |= {"every": torch.arange(T), "which": torch.tensor([1, 0, 1, 0, 0]), "sample": torch.tensor([0, 0, 0, 1, 1])}
    x |= {"temperature": torch.linspace(0.5, 1.5, R), "teacher_temperature": torch.linspace(1.5, 0.5, R)}
    x |= {"ids": torch.arange(2 * R).view(R, 2), "columns": torch.arange(V).flip(0)}
    x |= {"kept_ids": torch.arange(2 * R), "kept_lengths": torch.full((R,), 2)}
    x |= {"teacher_kept_ids": torch.arange(3 * R), "teacher_kept_lengths": torch.full((R,), 3)}
    x |= {"top_logprobs": torch.full((R, 3), -2.0), "top_ids": torch.arange(3 * R).view(R, 3)}
    return x | {"old_logprob": normal(R) - 3, "advantage": normal(R), "which_every": torch.arange(T) % 2}


Case = Callable[[dict[str, Tensor]], Tensor]


def rows(x: dict[str, Tensor]) -> ll.Rows:
    return ll.Rows.at(x["index"], x["target"])


def head(x: dict[str, Tensor]) -> ll.Head:
    return ll.Head(temperature=x["temperature"])


def kept(x: dict[str, Tensor]) -> ll.Kept:
    return ll.Kept(x["kept_ids"], x["kept_lengths"])


def teacher_head(x: dict[str, Tensor]) -> ll.Head:
    return ll.Head(temperature=x["teacher_temperature"])


def total(stats: tuple[Tensor | None, ...]) -> Tensor:
    """Something that has a gradient by every result that has one."""
    return torch.stack([g.double().square().sum() for g in stats if g is not None and g.requires_grad]).sum()


def frozen(x: dict[str, Tensor]) -> Tensor:
    return total(
        ll.logprobs(ll.Logits(x["hidden"], x["weight"].detach(), bias=x["bias"].detach()), rows(x), head=head(x))
    )


def with_lora(x: dict[str, Tensor]) -> Tensor:
    lora = ll.LoRA(x["weight"], x["a"], x["b"], 0.5)
    return total(ll.logprobs(ll.Logits(x["hidden"], lora, bias=x["bias"]), rows(x), entropy="grad"))


def hooked(x: dict[str, Tensor]) -> Tensor:
    logits = ll.Logits(x["hidden"], x["weight"])
    logits.register_hook(lambda _: None)
    return total(ll.logprobs(logits, rows(x)))


def loss(x: dict[str, Tensor], objective: ll.Objective, teacher: ll.Teacher | Teachers | None = None, **more):
    fields = {name: x[name] for name in ("old_logprob", "advantage")} if teacher is None else {}
    return loss_from_hidden(
        x["hidden"], x["weight"], rows(x), objective, bias=x["bias"], teacher=teacher, head=head(x), **fields, **more
    )[0]


def pair(x: dict[str, Tensor], teacher: ll.Teacher | Teachers, target=None, **more) -> Tensor:
    scored = rows(x) if target is None else target
    return total(
        from_hidden(
            x["hidden"], x["weight"], scored, teacher=teacher, divergence="jsd", entropy="grad", bias=x["bias"], **more
        )
    )


def taught(x: dict[str, Tensor], **more) -> ll.Teacher:
    return ll.Teacher(
        ll.Logits(x["teacher_hidden"], x["teacher_weight"], bias=x["teacher_bias"]), head=teacher_head(x), **more
    )


def several(x: dict[str, Tensor]) -> Teachers:
    return ll.Teacher.by_row([taught(x), ll.Teacher(ll.Logits(x["teacher_hidden"], x["second_weight"]))], x["which"])


DISTILL = ll.Objective.recipe("distill", divergence="jsd")


def expecting(x: dict[str, Tensor]) -> Tensor:
    """A loss that was not the expected one, so that the logits are made again."""
    fields = {"advantage": torch.ones(T), "old_logprob": "current"}
    asked = {"head": ll.Head(), "memory": "1MiB"}
    logits = ll.Logits(x["hidden"], x["weight"], bias=x["bias"])
    found = score_expecting(
        logits, ll.Rows.every(x["every"]), Expected(ll.Objective(), fields), Expectations(), **asked
    )
    return found.logprob.square().sum()


CASES: dict[str, tuple[Case, str]] = {
    "a loss that was expected": (expecting, "hidden weight bias every"),
    "logprobs": (
        lambda x: total(
            ll.logprobs(
                *(x["logits"], rows(x)),
                **{"entropy": "grad", "head": head(x), "kept": kept(x), "stats": ("collision",)},
                ids=x["ids"],
            )
        ),
        "logits index target kept_ids kept_lengths ids",
    ),
    "logprobs over a support": (
        lambda x: total(ll.logprobs(x["logits"], rows(x), entropy="grad", kept=kept(x).over("support"))),
        "logits index target",
    ),
    "hidden states": (
        lambda x: total(
            from_hidden(
                *(x["hidden"], x["weight"], rows(x)),
                **{"bias": x["bias"], "entropy": "grad", "head": head(x), "kept": kept(x)},
                ids=x["ids"],
            )
        ),
        "hidden weight bias index target kept_ids kept_lengths ids",
    ),
    "hidden states, frozen head": (frozen, "weight index"),
    "hidden states, LoRA": (with_lora, "hidden weight bias a b index"),
    "hidden states over a support": (
        lambda x: total(
            ll.logprobs(ll.Logits(x["hidden"], x["weight"]), rows(x), entropy="grad", kept=kept(x).over("support"))
        ),
        "hidden weight index target",
    ),
    "loss": (lambda x: loss(x, ll.Objective()), "index"),
    "loss, teacher": (lambda x: loss(x, DISTILL, taught(x)), "index"),
    "loss, teacher, two passes": (
        lambda x: loss(x, DISTILL, taught(x), bits="canonical"),
        "hidden weight bias index teacher_weight teacher_bias",
    ),
    "loss, means over samples": (
        lambda x: ll.Objective.recipe("gspo")(
            ll.TokenStats(2 * x["field"], None, None),
            ll.Rows.packed([[1, 2, 3, 4], [5, 6, 7]], [3, 2]),
            old_logprob=x["old_logprob"],
            advantage=x["advantage"],
        )[0],
        "",
    ),
    "preference": (
        lambda x: ll.Preference("simpo").pairs([0], [1])(
            ll.TokenStats(2 * x["field"], None, None), ll.Rows.packed([[1, 2, 3, 4], [5, 6, 7]], [3, 2])
        )[0],
        "",
    ),
    "divergence": (
        lambda x: total(
            ll.logprobs(
                *(x["logits"], rows(x)),
                **{"teacher": ll.Teacher(x["teacher_logits"], head=teacher_head(x)), "head": head(x)},
                **{"divergence": "jsd", "entropy": "grad"},
            )
        ),
        "logits index teacher_logits teacher_temperature",
    ),
    "a teacher": (
        lambda x: pair(x, taught(x), head=head(x)),
        "hidden weight bias index teacher_weight teacher_bias",
    ),
    "a teacher of all rows": (
        lambda x: pair(x, ll.Teacher(ll.Logits(x["teacher_hidden"], x["teacher_weight"])), x["every"]),
        "hidden weight bias teacher_hidden teacher_weight",
    ),
    "a teacher, another vocabulary": (
        lambda x: pair(x, taught(x, ids=x["columns"])),
        "hidden weight bias index teacher_weight teacher_bias",
    ),
    "a teacher, logits": (
        lambda x: pair(x, ll.Teacher(x["teacher_logits"])),
        "hidden weight bias index teacher_logits",
    ),
    "a teacher, several teachers": (
        lambda x: pair(x, several(x)),
        "hidden weight bias teacher_weight teacher_bias second_weight",
    ),
    "a teacher over supports": (
        lambda x: pair(
            x,
            taught(x, kept=ll.Kept(x["teacher_kept_ids"], x["teacher_kept_lengths"])),
            **{"head": head(x), "kept": kept(x).over("support")},
        ),
        "hidden weight index target",
    ),
    "a teacher, K log-probs": (
        lambda x: pair(x, ll.Teacher.from_top_k(x["top_logprobs"], x["top_ids"]), head=head(x)),
        "hidden weight bias index target",
    ),
    "a teacher over K ids": (
        lambda x: pair(x, ll.Teacher.from_top_k(x["top_logprobs"], x["top_ids"], "renormalise")),
        "hidden weight index target",
    ),
    "Rows.gather": (
        lambda x: (
            torch.cat(ll.Rows.packed([[1, 2, 3, 4], [5, 6, 7]], [3, 2]).gather(x["field"], None, grad="sum"))
            .square()
            .sum()
        ),
        "",
    ),
    "Megatron's buffer": (lambda x: into_main_grad(x["weight"]).sum(), ""),
    "computed logits with a buffer": (
        lambda x: (
            ll.Logits(x["hidden"], x["weight"], weight_grad=torch.zeros_like(x["weight"])).computed().square().sum()
        ),
        "hidden weight",
    ),
    "hooks on logits": (hooked, "hidden weight index"),
    "SpecForge's cross entropy": (
        lambda x: (
            _CrossEntropy.apply(x["logits"][None], x["teacher_logits"][None], torch.ones(1, T), 1 << 20)[0]
            .square()
            .sum()
        ),
        "logits teacher_logits",
    ),
    "SpecForge's acceptance": (
        lambda x: _Acceptance.apply(x["logits"][None], x["teacher_logits"][None], 1 << 20)[0].square().sum(),
        "logits teacher_logits",
    ),
    "a dry run": (
        lambda x: _Root.apply((x["teacher_logits"],), 2 * x["logits"]) + hand_over(x["teacher_bias"]).sum(),
        "teacher_logits",
    ),
}
"""Something with a gradient, made from the tensors, and which of them its backward reads."""


READ_NOTHING = {
    "logitless.adapters.scoring._Untrained",
    "logitless.deferred.column_parallel._Gathered",
}
"""Functions whose backward raises, or only sends its gradient to other ranks."""


class Watch(TorchDispatchMode):
    """The memory that operations read."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.layout == torch.strided]
        self.memory |= {x.untyped_storage().data_ptr() for x in read}
        return func(*args, **(kwargs or {}))


def functions_of(node, found: set[str], visited: set) -> set[str]:
    """Names of the package's Functions in a graph."""
    if node is None or node in visited:
        return found
    visited.add(node)
    made_by = getattr(node, "_forward_cls", None)
    if made_by is not None and made_by.__module__.startswith("logitless"):
        found.add(f"{made_by.__module__}.{made_by.__name__}")
    for before, _ in node.next_functions:
        functions_of(before, found, visited)
    return found


def all_functions() -> set[str]:
    """Those that the package defines, whatever is installed."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(["logitless", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any("autograd.Function" in ast.unparse(x) for x in node.bases):
                found.add(f"{module}.{node.name}")
    return found


def test_every_function_of_the_package_is_part_of_a_case():
    met: set[str] = set()
    for case, _ in CASES.values():
        functions_of(case(tensors()).grad_fn, met, set())
    assert met == all_functions() - READ_NOTHING


@pytest.mark.parametrize("name", CASES)
def test_what_backward_reads_may_not_change_before_it(name: str):
    """A teacher's tensors, listed ids, kept ids and indices were not compared: other gradients came, and no error."""
    case, wanted = CASES[name]
    x = tensors()
    result = case(x)
    with Watch() as seen:
        result.backward()
    read = [key for key, tensor in x.items() if tensor.untyped_storage().data_ptr() in seen.memory]
    # Leaves are where gradients are added, which may be read there; others are read by the Function.
    assert set(wanted.split()) <= set(read)
    silent = []
    for key in read:
        x = tensors()
        result = case(x)
        with torch.no_grad():
            x[key].add_(0)
        try:
            result.backward()
            said = "nothing"
        except (ll.LogitlessError, RuntimeError) as error:
            said = str(error)
        if "in place" not in said and "inplace" not in said:
            silent.append((key, said))
    assert not silent


@pytest.mark.parametrize(
    ("name", "key", "text"),
    [
        ("a teacher", "teacher_weight", "logprobs: teacher.weight was changed in place"),
        (
            "a teacher of all rows",
            "teacher_hidden",
            "logprobs: teacher.hidden was changed in place",
        ),
        ("a teacher, logits", "teacher_logits", "logprobs: teacher.logits was changed in place"),
        (
            "a teacher, several teachers",
            "second_weight",
            "teacher.members[1].weight was changed in place",
        ),
        ("divergence", "teacher_temperature", "logprobs: teacher.head.temperature was changed in place"),
        ("logprobs", "ids", "logprobs: ids was changed in place"),
        ("hidden states", "kept_ids", "logprobs: kept.ids was changed in place"),
        ("loss", "index", "policy_loss: rows.index was changed in place"),
    ],
)
def test_the_error_names_the_argument(name: str, key: str, text: str):
    x = tensors()
    result = CASES[name][0](x)
    with torch.no_grad():
        x[key].add_(0)
    with pytest.raises(ll.LogitlessError) as raised:
        result.backward()
    assert text in str(raised.value)
    assert "between forward and backward" in str(raised.value)


@pytest.mark.parametrize(
    "name",
    ["a teacher", "a teacher, logits", "divergence", "hidden states"],
)
def test_tensors_of_inference_mode_have_no_version(name: str):
    """What a teacher's forward makes there cannot be changed outside of it, and is taken as it is."""
    x = tensors()
    with torch.inference_mode():
        made = {key: y.clone() for key, y in x.items() if not y.requires_grad}
    CASES[name][0](x).backward()
    theirs = tensors()
    CASES[name][0](theirs | made).backward()
    for key, y in theirs.items():
        ours = x[key].grad
        assert (y.grad is None and ours is None) or torch.equal(y.grad, ours), key  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("name", "key"), [("loss, teacher", "teacher_weight"), ("loss, teacher", "teacher_hidden")])
def test_what_backward_does_not_read_may_change(name: str, key: str):
    """The gradients of one pass are made in forward."""
    x, changed = tensors(), tensors()
    CASES[name][0](x).backward()
    result = CASES[name][0](changed)
    changed[key].zero_()
    result.backward()
    assert torch.equal(changed["hidden"].grad, x["hidden"].grad)  # pyright: ignore[reportArgumentType]
