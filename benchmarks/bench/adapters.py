"""Training steps of hosts, before and after installing our adapter, and with logits that are not computed:
``python -m benchmarks.bench.adapters``.

    entry.prepare(device)  ->  before(), after(): one training step each, returning log-probs
    deferred               ->  the step before, with ours installed and the model's head deferred
    measured: peak bytes, median time, and the largest difference between the log-probs of the steps

One record per host and run goes to ``benchmarks/results/adapters.jsonl``; the tables of ``docs/adapters`` are made from
these records alone (``--docs docs/adapters``), and a test compares them. A host is one entry of ``ENTRIES``. Hosts that
are not installed are imported from the sources that ``LOGITLESS_HOSTS`` names (``checkouts.py``).
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import logitless
from benchmarks.bench import checkouts, draft_steps, host_steps
from benchmarks.bench.adapter_records import START, AdapterRecord, append, read, table, with_table
from benchmarks.bench.measure import peak_bytes
from benchmarks.bench.records import Environment
from logitless.adapters.host import SAVED
from logitless.adapters.signatures import version_of
from logitless.errors import LogitlessError
from logitless.operands.logits import MADE

RESULTS = Path("benchmarks/results/adapters.jsonl")


class Steps(NamedTuple):
    """One training step of the host before and after installing ours, and the context that the second runs in; and one
    in which the first runs with logits that are not computed.
    """

    before: Callable[[], Tensor]
    after: Callable[[], Tensor]
    inside: AbstractContextManager[Any]
    deferred: AbstractContextManager[Any] | None = None


@dataclass(frozen=True)
class Entry:
    """A host and how to run one step through it.

    Args:
        host: name of the host in ``install``, and of its page in ``docs/adapters``.
        point: the host's entry point, for the table.
        prepare: makes the steps, from a device and sizes.
        world: the process group that the host expects, on a device.
        on_logits: the step makes logits with and without ours, so that what was saved can be counted by them.
    """

    host: str
    point: str
    prepare: Callable[[torch.device, Sizes], Steps]
    world: Callable[[torch.device], AbstractContextManager[Any]] = nullcontext
    on_logits: bool = False


@dataclass(frozen=True)
class Sizes:
    """Sizes of the batch and of the model. The model has one small layer, so that the head dominates."""

    samples: int
    length: int
    prompt: int
    vocab: int
    hidden: int
    dtype: str

    def __str__(self) -> str:
        batch = f"{self.samples} x {self.length} tokens ({self.prompt} of them prompt)"
        return f"{batch}, vocabulary {self.vocab}, hidden size {self.hidden}, {self.dtype}"


CPU = Sizes(samples=4, length=256, prompt=64, vocab=32_768, hidden=256, dtype="float32")
CUDA = Sizes(samples=8, length=4096, prompt=1024, vocab=151_936, hidden=2048, dtype="bfloat16")
SMOKE = Sizes(samples=2, length=12, prompt=4, vocab=300, hidden=16, dtype="float32")


@contextmanager
def installed(host: str, **options: Any) -> Iterator[None]:
    """``install`` when entered and ``uninstall`` when left; an error if a call was not served by us."""
    logitless.install(host, **options)
    try:
        yield
        report = next(entry for entry in logitless.status().hosts if entry.host == host)
        if report.passed_on or not report.calls:
            raise LogitlessError(f"bench.adapters: {host} ran its own code with ours installed.\n{report}")
    finally:
        logitless.uninstall(host)


@contextmanager
def deferred(host: str, model: Any, head: str | None = None) -> Iterator[None]:
    """Ours installed, and the model's head deferred as a host's own run defers it."""
    keeps = {"logits": "host"} if _has_heads(host) else {}
    with installed(host, **keeps), logitless.defer(model, head=head):
        yield


def _has_heads(host: str) -> bool:
    return importlib.import_module(f"logitless.adapters.{host}").HOST.heads is not None


def _defers(host: str) -> bool:
    """Whether the host's logits are not computed unless asked for."""
    return importlib.import_module(f"logitless.adapters.{host}").HOST.logits == "deferred"


def by_default(record: AdapterRecord) -> tuple[int, float]:
    """Peak and time after ``install`` without options: logits are not computed where the host's are deferred."""
    peak, ms = (record.deferred_bytes, record.deferred_ms) if _defers(record.host) else (None, None)
    return peak or record.after_bytes, ms or record.after_ms


def measure(entry: Entry, device: torch.device, sizes: Sizes, repeats: int = 5) -> AdapterRecord:
    """All steps of an entry, warmed up, on the same model and batch."""
    with entry.world(device):
        if entry.host in checkouts.MODULES:
            checkouts.load(entry.host)
        torch.manual_seed(0)
        steps = entry.prepare(device, sizes)
        before, before_bytes, before_ms = _run(steps.before, device, repeats)
        with steps.inside:
            after, after_bytes, after_ms = _run(steps.after, device, repeats)
        more = {} if steps.deferred is None else _deferred(steps, before, device, repeats)
    return AdapterRecord(
        host=entry.host,
        version=_version(entry.host),
        point=entry.point,
        sizes=str(sizes),
        before_bytes=before_bytes,
        after_bytes=after_bytes,
        before_ms=before_ms,
        after_ms=after_ms,
        difference=float((after.double() - before.double()).abs().max()),
        environment=asdict(Environment.here(device)),
        **more,
    )


def _deferred(steps: Steps, before: Tensor, device: torch.device, repeats: int) -> dict[str, Any]:
    counted = Counter(MADE)
    assert steps.deferred is not None
    with steps.deferred:
        ours, peak, ms = _run(steps.before, device, repeats)
    difference = float((ours.double() - before.double()).abs().max())
    made = dict(MADE - counted)
    return {"deferred_bytes": peak, "deferred_ms": ms, "deferred_difference": difference, "made": made}


def _version(host: str) -> str:
    """The checkout and its commit, or the version that is installed."""
    folder = checkouts.checkout(host)
    if folder is None:
        return version_of(importlib.import_module(f"logitless.adapters.{host}").HOST)
    commit = checkouts.commit(folder)
    return checkouts.named(host, folder) + (f" `{commit}`" if commit else "")


def _run(step: Callable[[], Tensor], device: torch.device, repeats: int) -> tuple[Tensor, int, float]:
    result = step().detach()
    gc.collect()
    peak = peak_bytes(step, device)
    times = []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        step()
        _wait(device)
        times.append(1e3 * (time.perf_counter() - start))
    return result, peak, statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# The entries.


def _model(device: torch.device, sizes: Sizes) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=2 * sizes.hidden,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=max(8, sizes.hidden // 16),
        max_position_embeddings=2 * sizes.length,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model: Any = Qwen3ForCausalLM(config)
    return model.to(device=device, dtype=getattr(torch, sizes.dtype))


def _transformers(device: torch.device, sizes: Sizes) -> Steps:
    from logitless.adapters.transformers import patch

    model = _model(device, sizes)
    tokens = torch.randint(2, sizes.vocab, (sizes.samples, sizes.length), device=device)
    responses = [sizes.length - sizes.prompt] * sizes.samples
    rows = logitless.Rows.padded(list(tokens), responses)

    def learn(logprob: Tensor, entropy: Tensor) -> Tensor:
        (logprob.sum() + 0.01 * entropy.sum()).backward()
        model.zero_grad(set_to_none=True)
        return logprob.reshape(-1)

    def before() -> Tensor:
        # As trainers do with a model's logits: the response rows, in float32.
        logits = model(tokens, use_cache=False).logits[:, sizes.prompt - 1 : -1].float()
        logp = torch.log_softmax(logits, -1)
        target = tokens[:, sizes.prompt :, None]
        return learn(logp.gather(-1, target).squeeze(-1), -(logp.exp() * logp).sum(-1))

    def after() -> Tensor:
        out = model(tokens, rows=rows, entropy="grad")
        return learn(out.logprob, out.entropy)

    @contextmanager
    def patched() -> Iterator[None]:
        patch(model, memory="64MiB" if device.type == "cpu" else "256MiB")
        yield

    return Steps(before, after, patched())


def _trl(device: torch.device, sizes: Sizes) -> Steps:
    trainer = _grpo_trainer(device, sizes)
    model = trainer.model
    tokens = torch.randint(2, sizes.vocab, (sizes.samples, sizes.length), device=device)
    mask = torch.ones_like(tokens)

    def step() -> Tensor:
        logprob, entropy, _ = trainer._get_per_token_logps_and_entropies(
            model, tokens, mask, logits_to_keep=sizes.length - sizes.prompt, compute_entropy=True
        )
        (logprob.sum() + 0.01 * entropy.sum()).backward()
        model.zero_grad(set_to_none=True)
        return logprob

    return Steps(step, step, installed("trl", memory="64MiB" if device.type == "cpu" else "256MiB"))


def _grpo_trainer(device: torch.device, sizes: Sizes) -> Any:
    """A trainer around a model made here; its tokenizer is never used."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a"))
    folder = tempfile.mkdtemp()
    # Nobody trains here: the arguments are the fewest that make a trainer.
    arguments = {"per_device_train_batch_size": 2, "num_generations": 2, "report_to": "none", "bf16": False}
    return GRPOTrainer(
        model=_model(device, sizes),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(output_dir=folder, use_cpu=device.type == "cpu", **arguments),
        train_dataset=Dataset.from_dict({"prompt": ["a", "a"]}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
    )


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """A process group of one rank."""
    backend = "gloo" if device.type == "cpu" else "nccl"
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def megatron_alone(device: torch.device) -> Iterator[None]:
    """Megatron's groups of one rank."""
    checkouts.put_first("megatron")
    state = importlib.import_module("megatron.core.parallel_state")
    with alone(device):
        state.initialize_model_parallel()
        try:
            yield
        finally:
            state.destroy_model_parallel()


def _megatron(device: torch.device, sizes: Sizes) -> Steps:
    dtype = getattr(torch, sizes.dtype)
    hidden = torch.randn(sizes.length, sizes.samples, sizes.hidden, device=device).to(dtype).requires_grad_()
    labels = torch.randint(sizes.vocab, (sizes.samples, sizes.length), device=device)
    before, after, layer = host_steps.megatron(hidden, labels, sizes.vocab)
    return Steps(
        before, after, nullcontext(), deferred("megatron", torch.nn.ModuleDict({"output_layer": layer}), "output_layer")
    )


def _same_step(host: str) -> Callable[..., Steps]:
    """An entry whose two steps are the same calls; installing replaces the functions that they reach."""

    def prepare(device: torch.device, sizes: Sizes) -> Steps:
        tokens = torch.randint(2, sizes.vocab, (sizes.samples, sizes.length), device=device)
        model = _model(device, sizes)
        run = getattr(host_steps, host)(host_steps.Batch(model, tokens, sizes.prompt))
        keeps = {"logits": "host"} if _has_heads(host) else {}
        # A fused head of the host's own makes no logits to defer.
        return Steps(run, run, installed(host, **keeps), None if host == "prime_rl" else deferred(host, model))

    return prepare


def _draft_step(host: str) -> Callable[..., Steps]:
    """The same for the losses of a draft; both heads are deferred, where there are two."""

    @contextmanager
    def without(heads: list[Any]) -> Iterator[None]:
        with installed(host), ExitStack() as stack:
            for head in heads:
                stack.enter_context(logitless.defer(torch.nn.ModuleDict({"lm_head": head}), head="lm_head"))
            yield

    def prepare(device: torch.device, sizes: Sizes) -> Steps:
        run, heads = getattr(draft_steps, host)(draft_steps.Draft.of(device, sizes))
        return Steps(run, run, installed(host), without(heads))

    return prepare


def _entry(host: str, point: str, world: Callable[..., AbstractContextManager[Any]] = nullcontext) -> Entry:
    return Entry(host, point, _same_step(host), world, on_logits=host not in ("prime_rl", "skyrl"))


ENTRIES = {
    entry.host: entry
    for entry in (
        Entry("transformers", "`model(...)`, log-softmax and entropy of the response rows", _transformers),
        Entry("trl", "`GRPOTrainer._get_per_token_logps_and_entropies`", _trl),
        Entry(
            "megatron",
            "`ColumnParallelLinear` and `vocab_parallel_cross_entropy`, then `output_processor`",
            _megatron,
            megatron_alone,
        ),
        _entry("openrlhf", "`Actor.forward`"),
        _entry("skyrl", "`HFModelWrapper.forward` of the FSDP worker"),
        _entry(
            "verl",
            "`logprobs_from_logits` and `entropy_from_logits` on a model's logits, as the FSDP engine calls them",
        ),
        _entry("slime", "`get_log_probs_and_entropy` on a model's logits in float32, with entropies", megatron_alone),
        _entry("miles", "`get_log_probs_and_entropy` on a model's logits, with entropies", megatron_alone),
        _entry("nemo_rl", "`get_next_token_logprobs_from_logits` on a model's logits, in a group of one rank", alone),
        _entry("areal", "`gather_logprobs_entropy` on a model's logits, and the smallest and the largest of each row"),
        _entry("prime_rl", "`FusedOutputLinear.forward` on a model's hidden states"),
        _entry(
            "ms_swift",
            "`compute_logps_and_entropy_from_logits` on a model's logits, with entropies as a metric",
            megatron_alone,
        ),
        _entry("torchtitan", "`compute_logprobs` on a model's logits, with entropies as a metric"),
        _entry("deepspeed", "`vocab_parallel_cross_entropy` on a model's logits, of one rank"),
        Entry(
            "speculators",
            "`fused_lk_hybrid_loss` of a draft of 32,000 ids, from hidden states",
            _draft_step("speculators"),
        ),
        Entry(
            "specforge",
            "`_compute_loss_and_acceptance_rate` three steps ahead, of a draft of 32,000 ids, and the compact teacher",
            _draft_step("specforge"),
        ),
    )
}


# Records.


def saved(records: Sequence[AdapterRecord]) -> dict[str, float]:
    """Bytes per logit by which the peak of each host's step on logits fell, in its newest record with bfloat16."""
    found = {}
    for record in records:
        read = re.match(r"(\d+) x (\d+) tokens .*, vocabulary (\d+), .*, bfloat16$", record.sizes)
        if read is not None and ENTRIES[record.host].on_logits:
            samples, length, vocab = map(int, read.groups())
            found[record.host] = round((record.before_bytes - by_default(record)[0]) / (samples * length * vocab), 1)
    return {host: found[host] for host in sorted(found) if found[host] > 0}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench.adapters", description=__doc__)
    parser.add_argument("--host", action="extend", nargs="+", default=[], help="default: all hosts")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--samples", type=int, help="samples of the batch, where the device holds no more")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file to append to")
    parser.add_argument("--docs", type=Path, help="pages whose tables are made anew, and what status() says")
    parser.add_argument("--commit", help="commit to record where the code has no git history")
    options = parser.parse_args(arguments)
    if options.docs is not None:
        for page in sorted(options.docs.glob("*.md")):
            text = page.read_text(encoding="utf-8")
            if START in text:
                page.write_text(with_table(text, page.stem, read(options.out)), encoding="utf-8")
        SAVED.write_text(json.dumps(saved(read(options.out)), indent=2) + "\n", encoding="utf-8")
        return 0
    device = torch.device(options.device)
    sizes = CUDA if device.type == "cuda" else CPU
    sizes = sizes if options.samples is None else replace(sizes, samples=options.samples)
    for name in options.host or ENTRIES:
        if name not in ENTRIES:
            raise LogitlessError(f"bench.adapters: there is no entry {name!r}. Known: {', '.join(sorted(ENTRIES))}.")
        record = measure(ENTRIES[name], device, sizes)
        if options.commit is not None:
            record = replace(record, environment={**record.environment, "commit": options.commit, "dirty": None})
        append(options.out, record)
        sys.stdout.write(table(name, [record]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
