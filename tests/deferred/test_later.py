"""Log-prob and entropy of one pass, whichever a framework asks for first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import logitless.deferred.later
import logitless.deferred.read
from logitless import LogitlessError, Logits
from logitless.adapters import scoring
from logitless.adapters.audit import Audit
from logitless.deferred.later import Later
from logitless.spec import untraced

ROWS, WIDTH, COLUMNS = (2, 5), 7, 11


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The passes over the weight that are made."""
    made: list[Any] = []
    for module in (logitless.deferred.later, logitless.deferred.read, scoring):
        plain = module.logprobs

        def counted(*args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            made.append(args)
            return plain(*args, **kwargs)

        monkeypatch.setattr(module, "logprobs", counted)
    return made


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(*ROWS, WIDTH).to(dtype), torch.randn(COLUMNS, WIDTH).to(dtype)
    target = torch.randint(0, COLUMNS, ROWS)
    target[0, 1] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), target


def truth(hidden: Tensor, weight: Tensor, target: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    log_p = (hidden @ weight.T / temperature).log_softmax(-1)
    picked = log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0].masked_fill(target == -100, 0.0)
    return picked, -(log_p.exp() * log_p).sum(-1)


def entropy_of(logits: Tensor, **asked: Any) -> Tensor:
    return scoring.entropy_of_logits("entropy", logits, Audit(0), **{"later": True, **asked})


def log_prob_of(logits: Tensor, target: Tensor) -> Tensor:
    return scoring.score("log_prob", logits, target, Audit(0)).logprob


@pytest.mark.parametrize("first", ["entropy", "log_prob"])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("use", ["loss", "metric first"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_one_pass_for_both(first: str, cut: bool, use: str, temperature: float, passes: list[Any]) -> None:
    hidden, weight, target = operands()
    logits = Logits(hidden, weight)
    logits.div_(temperature)
    last = (slice(None), slice(None, -1)) if cut else ...
    if first == "entropy":
        entropy = entropy_of(logits).float()[last]
        assert isinstance(entropy, Later)
        log_prob = log_prob_of(logits.clone(), target)
    else:
        log_prob = log_prob_of(logits, target)
        entropy = entropy_of(logits.clone()).float()[last]
    if use == "metric first":
        with torch.no_grad():
            entropy.mean()
    (log_prob.sum() + (entropy * entropy).sum()).backward()
    assert len(passes) == 1

    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    want_log_prob, want_entropy = truth(*wide, target, temperature)
    (want_log_prob.sum() + (want_entropy[last] ** 2).sum()).backward()
    torch.testing.assert_close(log_prob.double(), want_log_prob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), want_entropy[last], rtol=1e-5, atol=1e-5)
    for x, want in zip((hidden, weight), wide, strict=True):
        torch.testing.assert_close(x.grad.double(), want.grad, rtol=1e-5, atol=1e-5)


def test_an_entropy_that_is_never_followed_is_read_when_used(passes: list[Any]) -> None:
    hidden, weight, target = operands()
    entropy = entropy_of(Logits(hidden, weight))
    assert not passes
    assert entropy.shape == torch.Size(ROWS)
    entropy.sum().backward()
    assert len(passes) == 1
    torch.testing.assert_close(entropy + 0, truth(hidden, weight, target)[1])
    assert hidden.grad is not None
    assert hidden.grad.abs().sum() > 0


def test_logits_that_are_divided_afterwards_leave_the_entropy_as_it_was(passes: list[Any]) -> None:
    hidden, weight, target = operands()
    logits = Logits(hidden, weight)
    entropy = entropy_of(logits)
    logits.div_(0.5)
    log_prob = log_prob_of(logits, target)
    torch.testing.assert_close(entropy + 0, truth(hidden, weight, target)[1])
    torch.testing.assert_close(log_prob, truth(hidden, weight, target, 0.5)[0])
    assert len(passes) == 2


def test_without_a_graph(passes: list[Any]) -> None:
    hidden, weight, target = operands()
    with torch.no_grad():
        logits = Logits(hidden, weight)
        entropy = entropy_of(logits)
        log_prob_of(logits, target)
    assert not (entropy + 0).requires_grad
    assert len(passes) == 1


@pytest.mark.parametrize("first", ["entropy", "log_prob"])
def test_an_entropy_that_is_a_metric_has_no_graph(first: str, passes: list[Any]) -> None:
    hidden, weight, target = operands()
    logits = Logits(hidden, weight)
    if first == "entropy":
        entropy = entropy_of(logits, grad=False)
        log_prob_of(logits, target)
    else:
        log_prob_of(logits, target)
        entropy = entropy_of(logits, grad=False)
    assert not (entropy + 0).requires_grad
    torch.testing.assert_close(entropy + 0, truth(hidden, weight, target)[1].detach())
    assert len(passes) == 1


def test_rows_that_are_left_out_are_zero_and_get_no_gradient(passes: list[Any]) -> None:
    hidden, weight, target = operands()
    logits = Logits(hidden, weight)
    log_prob_of(logits, target)
    nothing = torch.zeros(ROWS, dtype=torch.bool)
    nothing[1] = True
    entropy = entropy_of(logits, leave_out=nothing)
    entropy.sum().backward()
    assert len(passes) == 1
    assert not entropy[1].any()
    assert not hidden.grad[1].any()
    assert hidden.grad[0].abs().sum() > 0


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("first", ["entropy", "log_prob"])
def test_a_checkpoint_reads_at_once(reentrant: bool, first: str) -> None:
    hidden, weight, target = operands()
    logits = Logits(hidden * 2, weight)
    log_prob = log_prob_of(logits, target) if first == "log_prob" else None
    entropy = checkpoint(entropy_of, logits, use_reentrant=reentrant)
    assert type(entropy) is Tensor
    log_prob = log_prob_of(logits, target) if log_prob is None else log_prob
    (entropy.square().sum() + log_prob.sum()).backward()
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    picked, want = truth(wide[0] * 2, wide[1], target)
    (want.square().sum() + picked.sum()).backward()
    torch.testing.assert_close(hidden.grad.double(), wide[0].grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight.grad.double(), wide[1].grad, rtol=1e-5, atol=1e-5)


def test_a_weight_that_changed_before_the_entropy_was_used_is_an_error() -> None:
    hidden, weight, _ = operands()
    entropy = entropy_of(Logits(hidden, weight))
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(LogitlessError, match="weight was changed in place"):
        entropy.sum()


def test_compiled_as_frameworks_do(passes: list[Any]) -> None:
    hidden, weight, target = operands()
    logits = Logits(hidden, weight)
    compiled = torch.compile(untraced(entropy_of), dynamic=True, backend="eager")
    entropy = compiled(logits)
    log_prob = log_prob_of(logits, target)
    (entropy.sum() + log_prob.sum()).backward()
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    sum(x.sum() for x in truth(*wide, target)).backward()
    torch.testing.assert_close(weight.grad.double(), wide[1].grad, rtol=1e-5, atol=1e-5)
    assert len(passes) == 1


def test_a_part_that_a_metric_read_first_keeps_its_graph() -> None:
    hidden, weight, _ = operands()
    first, *_ = (torch.logsumexp(part, -1) for part in Logits(hidden, weight).split(1))
    with torch.no_grad():
        first.mean()
    first.sum().backward()
    want = hidden.detach()[:1].requires_grad_()
    (want @ weight.detach().T).logsumexp(-1).sum().backward()
    torch.testing.assert_close(hidden.grad[:1], want.grad)


@pytest.mark.parametrize(
    "kept",
    [
        lambda x: x >= x.topk(5).values[..., -1:],
        lambda x: ~(x < torch.topk(x, 5)[0][..., -1, None]),
        lambda x: torch.topk(x, 5).values[..., [-1]] <= x,
    ],
    ids=["a slice", "as generation does", "the other way round"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore:logits were computed")
def test_the_last_of_a_top_k_is_not_below_itself(kept: Any, dtype: torch.dtype) -> None:
    """Summed in another order, its value was now and then above the logit that it is compared with."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(200, 96).to(dtype), torch.randn(300, 96).to(dtype)
    logits = Logits(hidden, weight)
    found = kept(logits)
    assert type(found) is Tensor
    torch.testing.assert_close(found, kept(logits.computed()))
    assert (found.sum(-1) >= 5).all()


@pytest.mark.filterwarnings("ignore:logits were computed")
def test_the_largest_is_equal_to_itself() -> None:
    torch.manual_seed(0)
    logits = Logits(torch.randn(200, 96), torch.randn(300, 96))
    assert (logits == logits.max(-1, keepdim=True).values).any(-1).all()
    assert (logits == logits.amax(-1, keepdim=True)).any(-1).all()


def test_values_of_a_top_k_have_a_gradient(passes: list[Any]) -> None:
    hidden, weight, _ = operands()
    values = Logits(hidden, weight).topk(3).values
    (values[..., 0] * 2).sum().backward()
    want = hidden.detach().requires_grad_()
    ((want @ weight.detach().T).topk(3).values[..., 0] * 2).sum().backward()
    torch.testing.assert_close(hidden.grad, want.grad)
