"""Transformers: a causal LM whose forward answers with log-probs of chosen rows, and never builds their logits.

    model = patch(model)
    out = model(input_ids, attention_mask=mask, rows=rows, entropy="value")     out.logprob, out.entropy, out.log_z
    out = model(input_ids, attention_mask=mask, rows=rows, loss=Loss(...))      out.loss, out.metrics, out.stats
    model(input_ids)                                                            unchanged: generation, evaluation

Without ``rows`` the model's own forward runs. With ``rows`` the backbone runs, and then the head module, which scores
the rows instead of multiplying: called as a module, FSDP gathers its weight. Of a head that tensor parallelism has
sharded, the weight is read directly. All of it is in the model's forward, so that the hooks of wrappers run.

Scale and softcap of the logits are read from the model's configuration and checked: ``verify`` enlarges the hidden
states and compares with the model's own logits. A head that does more is refused.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from logitless.adapters.audit import Audit, AuditReport
from logitless.adapters.host import Host, Option, suggestion
from logitless.adapters.replacing import Options, replaces
from logitless.adapters.scoring import in_scope
from logitless.call import resolve_rows
from logitless.deferred.bound import Bound
from logitless.errors import LogitlessError, adapted
from logitless.loss import Loss, LossResult
from logitless.objectives import Metrics
from logitless.operands import Kept, Logits
from logitless.operands.peft import head_weight
from logitless.score import logprobs
from logitless.spec import EntropyMode, Head, TokenStats, VocabShard, parse_memory

TESTED = (
    *("cohere", "cohere2", "deepseek_v3", "gemma2", "gemma3_text", "gpt2", "granite"),
    *("llama", "mistral", "mixtral", "phi", "qwen2", "qwen3", "qwen3_moe"),
)
"""Values of ``config.model_type`` that may be patched without ``verify``."""

OF_LOGITS = ("bits", "match", "precision", "tf32")
"""Keywords of ``Logits`` that ``patch`` passes on."""

OPTIONS = ("backend", *OF_LOGITS, "memory")
"""All keywords that ``patch`` passes on; the others are those of ``logprobs``."""

SIZES = (30.0, 1000.0)
"""Standard deviations of the logits in a verification: a missed softcap or scale shows at one of them."""

COARSEST = 2.0**-11
"""Rounding of a TF32 product: a verification allows for it, whatever the dtype."""


class CausalLMScores(NamedTuple):
    """Results of a patched model for rows.

    Attributes:
        logprob, entropy, log_z: as in :class:`logitless.TokenStats`.
        backbone: the backbone's output: hidden states, router logits, and other outputs that were asked for.
        stats: all results, where ``stats=`` asked for more than those three; None otherwise.
    """

    logprob: Tensor
    entropy: Tensor | None
    log_z: Tensor | None
    backbone: Any
    stats: TokenStats | None = None


class CausalLMLoss(NamedTuple):
    """The loss of a patched model; it comes first, where trainers look for it.

    Attributes:
        loss, metrics: as from :func:`logitless.policy_loss`.
        stats: the rows' :class:`logitless.TokenStats`, without graph.
        backbone: as in :class:`CausalLMScores`.
    """

    loss: Tensor
    metrics: Metrics
    stats: TokenStats
    backbone: Any


@dataclass(frozen=True, eq=False)
class _Patch:
    """Settings of a patched model."""

    original: Callable[..., Any]
    head: Head
    options: Mapping[str, Any]
    shard: VocabShard | None
    audit: Audit = field(default_factory=Audit)


@dataclass(frozen=True, eq=False)
class _Question:
    """Arguments of a head that is asked for results instead of logits."""

    rows: Any
    entropy: EntropyMode
    kept: Kept | None
    head: Head
    shard: VocabShard | None
    loss: Loss | None
    stats: tuple[str, ...]
    options: Mapping[str, Any]

    def answer(self, layer: Any, hidden: Tensor) -> TokenStats | LossResult:
        weight, base = head_weight("patch", layer), getattr(layer, "base_layer", layer)
        logits = self.logits(hidden, weight, _local(base.bias))
        more = {name: x for name, x in self.options.items() if name not in OF_LOGITS}
        if self.loss is not None:
            return self.loss.of(logits, self.rows, head=self.head, kept=self.kept, **more)
        asked = {"entropy": self.entropy, "stats": self.stats, "head": self.head, "kept": self.kept}
        return logprobs(logits, self.rows, **asked, **more)

    def logits(self, hidden: Tensor, weight: Any, bias: Tensor | None) -> Logits:
        """Logits with the options that are theirs."""
        more = {name: x for name, x in self.options.items() if name in OF_LOGITS}
        return Logits(hidden, weight, bias=bias, shard=self.shard, **more)


def patch(model: Any, *, verify: bool = True, audit: int | Audit = 0, **options: Any) -> Any:
    """Teach a causal LM's forward ``rows``, ``loss``, ``entropy``, ``temperature``, ``kept``, ``scope`` and ``stats``.

    Same as ``logprobs(model(...).logits, rows, entropy=entropy, head=Head(temperature))``, without the logits; with a
    :class:`logitless.Loss`, the policy loss of these rows.

    Args:
        model: a transformers causal LM, before it is wrapped by FSDP or DDP; or peft's model around one.
        verify: compare with the model's own logits on a few random tokens, in evaluation mode; three small forwards.
            Without it, only the families in ``TESTED`` are accepted.
        audit: rows of every call that are compared with float64; see :func:`audit_of`.
        options: ``match``, ``bits``, ``precision`` and ``tf32`` of :class:`logitless.Logits`, and ``memory`` and
            ``backend`` of :func:`logitless.logprobs`.

    Returns:
        The same model.

    Raises:
        LogitlessError: the model's head is not a plain linear layer with a known scale and softcap.
    """
    for name in options:
        if name not in OPTIONS:
            raise LogitlessError(f"patch: there is no option {name!r}.{suggestion(name, OPTIONS)}")
    whole, model = model, _causal_lm("patch", model)
    if "_logitless" in vars(model):
        raise LogitlessError("patch: this model is already patched. Call unpatch(model) first.")
    layer = _check_model(model)
    if not verify and model.config.model_type not in TESTED:
        raise LogitlessError(
            f"patch: {model.config.model_type} is not one of the tested families ({', '.join(TESTED)}). "
            f"Leave verify=True, so that our results are compared with its logits."
        )
    shard = VocabShard.of(layer.weight) if _is_tensor_parallel(model, layer) else None
    audit = audit if isinstance(audit, Audit) else Audit(audit)
    if audit and hasattr(layer, "base_layer"):
        raise LogitlessError(
            "patch: audit= compares with the head's weight alone, and the head has a LoRA. Drop audit."
        )
    model._logitless = _Patch(model.forward, _head_of(model), options, shard)
    model.forward = Bound(_wrap_forward, model)
    if shard is None:
        for linear in _linears(layer):
            linear.forward = Bound(_wrap_layer, linear)
    if verify:
        try:
            _verify(model)
        except LogitlessError:
            unpatch(model)
            raise
    # Only now: the enlarged hidden states of the verification are not audited.
    model._logitless = replace(model._logitless, audit=audit)
    return whole


def unpatch(model: Any) -> None:
    """Put the original forward of a patched model back."""
    model = _causal_lm("unpatch", model)
    if "_logitless" not in vars(model):
        raise LogitlessError("unpatch: this model is not patched.")
    ours = getattr(vars(model).get("forward"), "__func__", None)
    if not getattr(ours, "_is_logitless", False):
        raise LogitlessError("unpatch: model.forward was replaced by someone else since. Undo that first.")
    patched: _Patch = model._logitless
    del model.forward, model._logitless
    if patched.original != model.forward:
        # The original was an attribute of this model object, as TRL's fused head is.
        model.forward = patched.original
    if patched.shard is None:
        for linear in _linears(model.get_output_embeddings()):
            vars(linear).pop("forward", None)


def audit_of(model: Any) -> AuditReport:
    """The audit's report of a patched model."""
    model = _causal_lm("audit_of", model)
    if "_logitless" not in vars(model):
        raise LogitlessError("audit_of: this model is not patched.")
    return model._logitless.audit.report()


def _wrap_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    # The signature stays the original's: generate() and Trainer read it.
    @functools.wraps(original)
    def forward(self: Any, *args: Any, rows: Any = None, **kwargs: Any) -> Any:
        if rows is not None:
            return _score(self, rows, args, kwargs)
        for name in _KEYWORDS:
            if name in kwargs:
                raise LogitlessError(
                    f"{type(self).__name__}.forward: {name} was given without rows. Pass rows=, which say what is "
                    f"scored."
                )
        return self._logitless.original(*args, **kwargs)

    forward._is_logitless = True  # pyright: ignore[reportAttributeAccessIssue]
    return forward


def _score(model: Any, rows: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CausalLMScores | CausalLMLoss:
    """Run the backbone, then score the rows with the head."""
    name, patched = f"{type(model).__name__}.forward", model._logitless
    entropy, temperature, kept, scope, loss, more = (kwargs.pop(key, default) for key, default in _KEYWORDS.items())
    _check_loss(name, loss, entropy, more)
    inputs = {**_by_name(name, type(model).forward, args), **kwargs}
    for refused in ("labels", "logits_to_keep", "shift_labels"):
        # Callers may pass logits_to_keep by name with its default, 0.
        given = inputs.pop(refused, None)
        if given is not None and not (type(given) is int and given == 0):
            raise LogitlessError(f"{name}: {refused} cannot go with rows, which say what is scored. Drop {refused}.")
    backbone = _backbone(model)(**{"use_cache": False, **inputs})
    layer = model.get_output_embeddings()
    hidden = backbone.last_hidden_state
    if hasattr(hidden, "full_tensor"):
        raise LogitlessError(
            f"{name}: the hidden states are a DTensor. Give the last norm a tp_plan entry that replicates them."
        )
    hidden = hidden.to(layer.weight.device)
    if loss is not None and loss.temperature is not None:
        temperature = loss.temperature
    head = replace(patched.head, temperature=temperature)
    kept = in_scope(name, kept, scope)
    question = _Question(rows, entropy, kept, head, patched.shard, loss, more, patched.options)
    result = _ask(name, layer, hidden, question)
    stats = result.stats if isinstance(result, LossResult) else result
    _audit(name, patched.audit, layer, hidden, question, stats)
    if isinstance(result, LossResult):
        return CausalLMLoss(*result, backbone)
    return CausalLMScores(result.logprob, result.entropy, result.log_z, backbone, result if more else None)


def _check_loss(name: str, loss: Any, entropy: EntropyMode, more: tuple[str, ...]) -> None:
    if loss is None:
        return
    if not isinstance(loss, Loss):
        raise LogitlessError(
            f"{name}: loss must be a logitless.Loss, an objective with its inputs, but is {type(loss).__name__}. Pass "
            f"loss=Loss(objective, advantage=..., old_logprob=...)."
        )
    for given in (*(("entropy",) if entropy is not None else ()), *(("stats",) if more else ())):
        raise LogitlessError(f"{name}: {given} cannot go with loss, whose objective asks for it. Drop {given}.")


def _by_name(name: str, forward: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, Any]:
    """Positional arguments by name: the backbone may have its parameters in another order."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    if len(args) > sum(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters):
        raise LogitlessError(f"{name}: {len(args)} positional arguments cannot be told apart. Pass them by name.")
    return {parameter.name: value for parameter, value in zip(parameters[: len(args)], args, strict=True)}


_KEYWORDS = {"entropy": None, "temperature": 1.0, "kept": None, "scope": None, "loss": None, "stats": ()}
"""What goes with rows, and the values where it is not given."""


def _ask(name: str, layer: Any, hidden: Tensor, question: _Question) -> TokenStats | LossResult:
    if question.shard is not None:
        return question.answer(layer, hidden)
    ours = all(getattr(linear.forward, "__func__", None) is _layer_forward for linear in _linears(layer))
    if hasattr(layer, "base_layer") and not ours:
        raise LogitlessError(
            f"{name}: {adapted(f'the head is now a {type(layer).__name__}, which')} A LoRA that is there first is "
            f"followed: call patch after peft."
        )
    if not ours:
        raise LogitlessError(
            f"{name}: the head is now {type(layer).__name__}, not the linear layer that was patched. An adapter on the "
            f"head changes the logits in ways that are not followed here: leave the head out of it."
        )
    # A bound method, because FSDP's mixed precision looks into dataclasses, and would round a temperature per row.
    return layer(hidden, question.answer)


def _layer_forward(self: nn.Module, hidden: Tensor, answer: Callable[..., Any] | None = None) -> Any:
    """The head's forward: logits, or the answer to a question."""
    return type(self).forward(self, hidden) if answer is None else answer(self, hidden)


def _wrap_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    return _layer_forward


def _local(x: Any) -> Any:
    return x.to_local() if hasattr(x, "to_local") else x


def _audit(name: str, audit: Audit, layer: Any, hidden: Tensor, question: _Question, stats: TokenStats) -> None:
    """Compare with float64; of rows with a support only the entropy, which is over the whole vocabulary."""
    if not audit:
        return
    rows, kept = resolve_rows(name, question.rows)[0], question.kept
    scored = hidden.detach().reshape(-1, hidden.shape[-1]).index_select(0, rows.index)
    audit.of_logits(
        name,
        question.logits(scored, _local(layer.weight), _local(layer.bias)),
        rows.target,
        logprob=stats.logprob if kept is None else None,
        entropy=stats.entropy if kept is None or kept.scope == "vocabulary" else None,
        head=question.head,
    )


# Checks of the model and its head.


def _causal_lm(caller: str, model: Any) -> Any:
    """The causal LM inside of peft's model, whose forward hands every keyword on to it; any other model as it is."""
    if not (hasattr(model, "peft_config") and hasattr(model, "get_base_model")):
        return model
    kinds = [type(config).__name__ for config in model.peft_config.values() if config.is_prompt_learning]
    if kinds and caller == "patch":
        raise LogitlessError(
            f"patch: {kinds[0]} puts virtual tokens before those of the batch, so that rows would point to others. "
            f"Use adapters inside of the layers, as LoRA."
        )
    return model.get_base_model()


def _check_model(model: Any) -> Any:
    missing = [name for name in ("base_model", "get_output_embeddings", "config") if not hasattr(model, name)]
    if missing:
        inner = "patch(model.module)" if isinstance(getattr(model, "module", None), nn.Module) else "patch(model)"
        raise LogitlessError(
            f"patch: model must be a transformers causal LM but {type(model).__name__} has no {missing[0]}. Patch the "
            f"model itself, before it is wrapped: {inner}. Then call the wrapper, which hands rows= on."
        )
    layer = model.get_output_embeddings()
    if layer is None or _backbone(model) is model:
        raise LogitlessError(f"patch: {type(model).__name__} has no language-model head on top of a backbone.")
    if hasattr(layer, "base_layer"):
        # Raises for any adapter but a LoRA of two matrices.
        head_weight("patch", layer)
        if _is_tensor_parallel(model, layer):
            raise LogitlessError(f"patch: {adapted(f'the head is sharded, and {type(layer).__name__}')}")
    for linear in _linears(getattr(layer, "base_layer", layer)):
        if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
            raise LogitlessError(
                f"patch: the head must be a torch.nn.Linear but is {type(linear).__name__}, which may change the "
                f"logits. Compute its logits and pass them to logitless.logprobs."
            )
        if "forward" in vars(linear) and not _is_tensor_parallel(model, linear):
            raise LogitlessError("patch: the forward of the head was replaced by someone else. Undo that first.")
    return layer


def _backbone(model: Any) -> Any:
    """What is below the head. Gemma 3 of transformers 4 calls it by another name than the prefix that it tells."""
    return model.base_model if model.base_model is not model else getattr(model, "get_decoder", lambda: model)()


def _linears(layer: Any) -> list[Any]:
    """The head; or, where peft trains copies of it (modules_to_save), the original and the copies it chooses from."""
    copies = getattr(layer, "modules_to_save", None)
    return [layer] if copies is None else [layer.original_module, *copies.values()]


def _is_tensor_parallel(model: Any, layer: nn.Linear) -> bool:
    """Whether tensor parallelism has sharded the head. FSDP's shards do not count: FSDP gathers them."""
    return (getattr(model, "tp_size", None) or 1) > 1 and hasattr(layer.weight, "placements")


def _head_of(model: Any) -> Head:
    """Scale and softcap, by their names in configurations. ``_verify`` checks that the head does no more."""
    config = model.config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling"):
        value = getattr(config, name, None)
        if value is not None:
            divides = name == "logits_scaling" and config.model_type != "hyperclovax"
            scale = 1 / value if divides else float(value)
            break
    return Head(scale=scale, softcap=getattr(config, "final_logit_softcapping", None))


def _verify(model: Any) -> None:
    """Raise unless our log-probs and entropies are those of the model's own logits, at several sizes of logits."""
    layer = model.get_output_embeddings()
    if any(x.is_meta for x in model.parameters()):
        raise LogitlessError("patch: the weights are on the meta device, so that nothing can be verified. Load them.")
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randint, model.config.get_text_config().vocab_size, (2, 7), generator=generator)
    ids, target = (draw().to(_backbone(model).get_input_embeddings().weight.device) for _ in range(2))
    target = target.to(layer.weight.device)
    with torch.no_grad(), _in_evaluation(model):
        spread = float(_own_logits(model, ids, 1.0).float().std())
        for size in SIZES if spread > 0 else ():
            logp = torch.log_softmax(_own_logits(model, ids, size / spread).double(), -1)
            with _scaled(model, size / spread):
                ours = model(ids, rows=target, entropy="value")
            own = logp.gather(-1, target[..., None]).squeeze(-1), -(logp.exp() * logp).sum(-1)
            off = max(float((a - b).abs().max()) for a, b in zip(own, (ours.logprob, ours.entropy), strict=True))
            # Largest logits are a few times their spread, and each is rounded in the head's dtype.
            allowed = 8 * size * max(torch.finfo(layer.weight.dtype).eps, COARSEST)
            if not off <= allowed:
                raise LogitlessError(
                    f"patch: log-probs from the hidden states of {type(model).__name__} are off by {off:.3g} from its "
                    f"own logits (allowed {allowed:.3g}, logits of size {size:g}). Its head does more than multiply, "
                    f"add a bias, scale by {model._logitless.head.scale:g} and cap at "
                    f"{model._logitless.head.softcap}: it cannot be patched."
                )
        if not spread > 0:
            raise LogitlessError("patch: the model's logits are all the same or not finite: nothing can be verified.")


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Inside the block there is no dropout; the mode of every module is put back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _own_logits(model: Any, ids: Tensor, factor: float) -> Tensor:
    with _scaled(model, factor):
        return model._logitless.original(ids, use_cache=False).logits


@contextmanager
def _scaled(model: Any, factor: float) -> Iterator[None]:
    """Inside the block the backbone's hidden states are multiplied by a factor, for their logits and our results."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state * factor
        return output

    handle = _backbone(model).register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


# install("transformers"): every model that the Auto class makes is patched.


@replaces("transformers.models.auto.modeling_auto", "AutoModelForCausalLM.from_pretrained", "(*model_args, **kwargs)")
def from_pretrained(original: Callable[..., Any], options: Options, *args: Any, **kwargs: Any) -> Any:
    made = original(*args, **kwargs)
    chosen = {"verify": options["verify"], "audit": options["audit"], "memory": options["memory"]}
    if isinstance(made, tuple):
        return (patch(made[0], **chosen), *made[1:])
    return patch(made, **chosen)


from_config = replace(from_pretrained, name="AutoModelForCausalLM.from_config", signature="(**kwargs)")


HOST = Host(
    name="transformers",
    package="transformers",
    versions=("4.51", "4.53", "4.55", "4.57", "5.0", "5.10", "5.22", "5.23"),
    replacements=lambda _: [from_pretrained, from_config],
    options={
        "verify": Option(True, "check our results for every model against its own logits"),
        "memory": Option("256MiB", "working memory of the head", check=parse_memory),
    },
)
