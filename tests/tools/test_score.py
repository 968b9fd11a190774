"""``logitless score``: right numbers, and the same bytes whatever kills it and however many ranks share the work."""

from __future__ import annotations

import json
import os
import random
import signal
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from close import assert_close_to_truth
from programs import run_program, start_program

import logitless
from logitless.errors import LogitlessError
from logitless.tools.score import Job, score_file
from logitless.tools.score import journal as journal_module
from logitless.tools.score import run as run_module
from logitless.tools.score.files import Record, Source
from logitless.tools.score.journal import Journal
from logitless.tools.score.model import Scorer, _line, batches
from logitless.tools.score.results import count_results, write_results
from logitless.tools.score.texts import Texts

VOCAB = 211
PROGRAM = Path(logitless.__file__).parent / "__main__.py"


@pytest.fixture(autouse=True)
def _one_thread():
    """As the other processes have: the sums of a matrix product may depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny model and its tokenizer, as a directory."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(5)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    config = Qwen3Config(vocab_size=VOCAB, **sizes, **heads, tie_word_embeddings=False, initializer_range=0.5)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = {"<bos>": 0, "<unk>": 1, "<eos>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<bos>", unk_token="<unk>", eos_token="<eos>")
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    return folder


TEMPLATE = """{{ bos_token }}
{%- for message in messages -%}
{%- if loop.index0 and message.role == loop.previtem.role -%}{{ raise_exception('turns must alternate') }}{%- endif -%}
{%- if message.role == 'user' %} w3 {% else %} w4 {% endif -%}
{%- if message.content != 'strange' or loop.last %}{{ message.content }}{% endif %} <eos> w6
{%- endfor -%}
{%- if add_generation_prompt %} w4{% endif -%}"""
"""w3 and w4 open the turns of user and assistant, <eos> ends one, and w6 is what a template adds after that."""

USER, ANSWER = {"role": "user", "content": "w20 w21"}, {"role": "assistant", "content": "w30 w31 w32"}
STRANGE = {"role": "assistant", "content": "strange"}


def samples(count: int) -> list[dict]:
    draw = random.Random(count)
    ids = lambda least, most: [draw.randrange(VOCAB) for _ in range(draw.randint(least, most))]  # noqa: E731
    made = [{"prompt": ids(1, 9), "response": ids(1, 25), "reward": 0.5} for _ in range(count)]
    made[count // 3] = {"prompt": "w5 w6 w7", "response": "w8 w9"}
    made[count // 2] = {"prompt": ids(2, 3), "response": []}
    return made


def write(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def job(model, tmp_path) -> Job:
    data = write(tmp_path / "in.jsonl", samples(30))
    return Job(model, data, tmp_path / "out.jsonl", temperature=0.7, tokens_per_batch=90, records_per_part=7)


@pytest.fixture
def expected(job, tmp_path) -> bytes:
    """What the job gives when nothing happens to it."""
    whole = replace(job, out=tmp_path / "expected" / "out.jsonl")
    score_file(whole)
    return whole.out.read_bytes()


# The numbers.


def test_results_are_those_of_the_models_own_logits(job):
    from transformers import AutoModelForCausalLM

    summary = score_file(job)
    results = read(job.out)
    given = samples(30)
    given[10] = {"prompt": [0, 5, 6, 7], "response": [8, 9]}
    assert [r["index"] for r in results] == list(range(30))
    assert [r["tokens"] for r in results] == [g["response"] for g in given]
    assert results[15] == {"index": 15, "tokens": [], "logprob": [], "entropy": []}
    assert summary.records == summary.scored_records == 30
    assert summary.scored_tokens == sum(len(g["response"]) for g in given)
    columns = {}
    for dtype in (torch.float64, torch.float32):
        own = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype)
        columns[dtype] = [own_results(own, g["prompt"], g["response"]) for g in given]
    for i, name in enumerate(("logprob", "entropy")):
        ours = torch.tensor([x for r in results for x in r[name]])
        truth, plain = (torch.cat([c[i] for c in columns[d]]) for d in (torch.float64, torch.float32))
        assert_close_to_truth(ours, truth, plain, name)


@torch.no_grad()
def own_results(model, prompt, response):
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1] / 0.7
    logp = torch.log_softmax(logits, -1)
    return logp[torch.arange(len(response)), response], -(logp.exp() * logp).sum(-1)


def test_statistics_on_request(job, tmp_path):
    """Columns of JSONL and of Parquet, against the model's own logits in float64."""
    from transformers import AutoModelForCausalLM

    pq = pytest.importorskip("pyarrow.parquet")
    given = [record for record in samples(8) if isinstance(record["response"], list)][:4]
    job = replace(job, data=write(tmp_path / "few.jsonl", given), stats=("rank", "top1", "collision"))
    score_file(job)
    results, model = read(job.out), AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float64)
    assert list(results[0])[2:] == ["logprob", "entropy", "top1_id", "top1_logprob", "top1_hit", "collision", "rank"]
    for result, record in zip(results, given, strict=True):
        prompt, response = record["prompt"], torch.tensor(record["response"])
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response.tolist()]])).logits[0, len(prompt) - 1 : -1] / 0.7
        p, own = torch.softmax(logits, -1), logits.gather(1, response[:, None])
        assert result["top1_id"] == logits.argmax(-1).tolist()
        assert result["top1_hit"] == (logits.argmax(-1) == response).tolist()
        assert result["rank"] == (logits > own).sum(1).tolist()
        assert result["collision"] == pytest.approx(p.square().sum(1).tolist(), rel=1e-5)
        assert result["top1_logprob"] == pytest.approx(p.max(1).values.log().tolist(), rel=1e-5)
    score_file(replace(job, out=tmp_path / "out.parquet"))
    table = pq.read_table(tmp_path / "out.parquet")
    assert [str(table.schema.field(n).type) for n in ("top1_hit", "rank", "collision")] == [
        f"list<element: {kind}>" for kind in ("bool", "int64", "float")
    ]
    assert table.column("rank").to_pylist() == [r["rank"] for r in results]
    with pytest.raises(LogitlessError, match=r"stats are out of top1.*, but 'top' is none\. Did you mean 'top1'"):
        replace(job, stats=("top",))
    with pytest.raises(LogitlessError, match="the results have a field 'rank' of their own"):
        replace(job, keep=("rank",))


def test_numbers_are_written_with_all_their_digits():
    """What is read back is the same float32, whatever its size."""
    numbers = torch.cat([-torch.rand(200) * 10.0 ** -(torch.arange(200) % 30), torch.tensor([-16777217.0, -1 / 3])])
    record = Record(0, "here", [1], [2] * len(numbers))
    fields = json.loads(_line(record, {"logprob": numbers.tolist(), "entropy": (-numbers).tolist()}))
    assert torch.equal(torch.tensor(fields["logprob"]), numbers)
    assert torch.equal(torch.tensor(fields["entropy"]), -numbers)


def test_batches_keep_the_budget_and_lose_nobody():
    records = [Record(i, "", [1], [2] * n) for i, n in enumerate([3, 30, 5, 5, 0, 17, 4])]
    made = list(batches(records, 24))
    assert [[r.index for r in batch] for batch in made] == [[1], [5], [2, 3, 6, 0]]
    assert all(len(b) == 1 or len(b) * b[0].num_tokens <= 24 for b in made)


def test_alone_in_its_batch_a_record_has_the_same_bits_in_any_file(job, tmp_path):
    alone = replace(job, tokens_per_batch=1)
    score_file(alone)
    other = replace(alone, data=write(tmp_path / "b.jsonl", samples(30)[::-1]), out=tmp_path / "b.out.jsonl")
    score_file(other)
    forth, back = read(alone.out), read(other.out)[::-1]
    assert [r["logprob"] for r in forth] == [r["logprob"] for r in back]
    together = replace(job, out=tmp_path / "c.jsonl", tokens_per_batch=10_000)
    score_file(together)
    for a, b in zip(forth, read(together.out), strict=True):
        torch.testing.assert_close(torch.tensor(a["logprob"]), torch.tensor(b["logprob"]), atol=1e-4, rtol=0)


def test_parquet_in_and_out(job, expected, tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    ids = [{**s, "prompt": [0, 5, 6, 7], "response": [8, 9]} if i == 10 else s for i, s in enumerate(samples(30))]
    fields = {key: [s[key] for s in ids] for key in ("response", "prompt")}
    pq.write_table(pa.table(fields), tmp_path / "in.parquet", row_group_size=11)
    score_file(replace(job, data=tmp_path / "in.parquet", out=tmp_path / "out.parquet"))
    table = pq.read_table(tmp_path / "out.parquet").to_pylist()
    wanted = [json.loads(line) for line in expected.splitlines()]
    assert [r["tokens"] for r in table] == [r["tokens"] for r in wanted]
    for name in ("logprob", "entropy"):
        assert [torch.tensor(r[name]).tolist() for r in wanted] == [r[name] for r in table]


def test_special_tokens_are_left_out_on_request(job):
    score_file(replace(job, special_tokens=False))
    assert read(job.out)[10]["tokens"] == [8, 9]
    with_bos = replace(job, out=job.out.with_name("bos.jsonl"))
    score_file(with_bos)
    assert read(with_bos.out)[10]["logprob"] != read(job.out)[10]["logprob"]


# Chat messages.


def scored_as(job, records, given, **changes):
    """Results of the records, compared with those of the same token ids given outright."""
    job = replace(job, data=write(job.data, records), tokens_per_batch=1, **changes)
    score_file(job)
    plain = replace(job, data=write(job.data.with_name("ids.jsonl"), given), out=job.out.with_name("ids.out.jsonl"))
    score_file(plain)
    return read(job.out), read(plain.out)


def test_the_tokens_of_the_assistant_are_scored(job):
    """All turns, each up to its end-of-sequence token; what the template adds after that was not sampled."""
    opening, first, between = [0, 3, 20, 21, 2, 6, 4], [30, 31, 32, 2], [6, 3, 20, 21, 2, 6, 4]
    records = [
        {"messages": [USER, ANSWER, USER, ANSWER]},
        {"messages": [USER, ANSWER]},
        {"messages": [USER, ANSWER, USER]},
    ]
    whole = {"prompt": opening, "response": [*first, *between, *first]}
    chat, ids = scored_as(job, records, [whole, {"prompt": opening, "response": first}])
    assert [r["tokens"] for r in chat] == [first * 2, first, first]
    for name in ("logprob", "entropy"):
        assert chat[0][name] == [*ids[0][name][:4], *ids[0][name][-4:]]
        assert chat[1][name] == chat[2][name] == ids[1][name]


def test_the_last_turn_alone_and_prompts_of_messages(job):
    records = [{"messages": [USER, STRANGE, USER, ANSWER]}, {"prompt": [USER], "response": "w30 w31 w32 <eos>"}]
    before = [0, 3, 20, 21, 2, 6, 4, 2, 6, 3, 20, 21, 2, 6, 4]
    given = [{"prompt": before, "response": [30, 31, 32, 2]}, {"prompt": before[:7], "response": [30, 31, 32, 2]}]
    chat, ids = scored_as(job, records, given, turns="last")
    assert [r["logprob"] for r in chat] == [r["logprob"] for r in ids]


# Records that cannot be scored, or not whole.


def spoiled() -> list[dict]:
    """Thirty records, some of them bad: token ids, fields, lengths."""
    made = samples(30)
    made[3] = {"prompt": [1], "response": [VOCAB]}
    made[8] = {"prompt": [1]}
    made[20] = {"prompt": [5] * 40, "response": [7] * 40}
    made[22] = {"prompt": "w5 \ud800", "response": "w6"}
    return made


def test_bad_records_are_rejected_on_request_and_the_others_scored(job, expected):
    write(job.data, spoiled())
    with job.data.open("a") as file:
        file.write('{"prompt": [1], "respon')
    summary = score_file(replace(job, on_error="skip"))
    rejects = read(job.out.with_name("out.jsonl.rejects.jsonl"))
    assert [(r["index"], r["line"]) for r in rejects] == [(3, 4), (8, 9), (20, 21), (22, 23), (30, 31)]
    reasons = ("token id 211 is outside", "has no field", "80 tokens", "half of a surrogate pair", "is not JSON")
    for reject, reason in zip(rejects, reasons, strict=True):
        assert reason in reject["reason"]
        assert f"in.jsonl, line {reject['line']}" in reject["reason"]
    assert "has no end: was the file cut off?" in rejects[-1]["reason"]
    assert [r["index"] for r in read(job.out)] == [i for i in range(30) if i not in (3, 8, 20, 22)]
    assert (summary.records, summary.scored_records, summary.rejected) == (31, 26, 5)
    assert summary.rejects == f"{job.out}.rejects.jsonl"
    again = score_file(replace(job, on_error="skip"))
    assert (again.scored_records, again.rejected) == (0, 5)
    score_file(replace(job, data=write(job.data, samples(30)), on_error="skip", overwrite=True))
    assert not job.out.with_name("out.jsonl.rejects.jsonl").exists()
    assert job.out.read_bytes() == expected


def test_finished_parts_survive_the_repair_of_later_records(job, expected, monkeypatch):
    """Seven records to a part: those before the bad one stay, as do those that other ranks have finished."""
    bad = samples(30)
    bad[16] = {"prompt": [1], "response": [VOCAB]}
    write(job.data, bad)
    with pytest.raises(LogitlessError, match=r"in.jsonl, line 17: token id 211"):
        score_file(job)
    write(job.data, samples(30))
    assert score_file(job).scored_records == 30 - 14
    assert job.out.read_bytes() == expected
    # An output that is finished belongs to its input, and so do parts none of which is left.
    write(job.data, bad)
    with pytest.raises(LogitlessError, match=r"the input has changed \(in.jsonl\)"):
        score_file(job)
    job.out.unlink()
    with pytest.raises(LogitlessError, match="line 17"):
        score_file(job)
    write(job.data, samples(30)[::-1])
    with pytest.raises(LogitlessError, match=r"the input has changed \(in.jsonl\)"):
        score_file(job)


def test_a_part_whose_records_change_on_the_way_is_an_error(job):
    """As many records, of the same sizes: only their digest tells."""

    def swap(progress):
        if progress.done == 0:
            write(job.data, [*samples(30)[:-2], *samples(30)[:-3:-1]])

    with pytest.raises(LogitlessError, match="changed while it was read"):
        score_file(job, swap)
    # No results of other records under the digest of these.
    parts = job.out.with_name("out.jsonl.parts").glob("*.jsonl")
    assert sorted(int(part.name[:8]) for part in parts) == [0, 1, 2, 3]


def test_long_records_are_cut_or_rejected(job, tmp_path):
    cut = replace(job, max_length=12, too_long="truncate", tokens_per_batch=1, out=tmp_path / "cut.jsonl")
    score_file(cut)
    score_file(replace(job, tokens_per_batch=1))
    given = samples(30)
    given[10] = {"prompt": [0, 5, 6, 7], "response": [8, 9]}
    for sample, whole, short in zip(given, read(job.out), read(cut.out), strict=True):
        left = min(len(sample["response"]), 12 - len(sample["prompt"]))
        assert short["truncated"] == len(sample["response"]) - left
        assert short["tokens"] == whole["tokens"][:left]
        torch.testing.assert_close(
            torch.tensor(short["logprob"]), torch.tensor(whole["logprob"][:left]), atol=1e-4, rtol=0
        )
    skipped = replace(job, max_length=12, too_long="skip", out=tmp_path / "skip.jsonl")
    assert score_file(skipped).rejected == sum(len(g["prompt"]) + len(g["response"]) > 12 for g in given) > 5
    with pytest.raises(LogitlessError, match=r"more than --max-length 12. Cut the prompt, or see --too-long"):
        score_file(replace(job, max_length=12, out=tmp_path / "stop.jsonl"))
    write(job.data, [{"prompt": [5] * 12, "response": [7]}])
    with pytest.raises(LogitlessError, match="and nothing of the response is left"):
        score_file(replace(cut, out=tmp_path / "none.jsonl"))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_fields_are_kept_on_request(job, tmp_path, suffix, monkeypatch):
    monkeypatch.setattr("logitless.tools.score.results.ROW_GROUP", 4)
    records = [
        {**s, "id": f"r{i}", "reward": i if i < 5 else 0.5, "meta": {"a": [i]}} for i, s in enumerate(samples(9))
    ]
    out = tmp_path / f"kept{suffix}"
    kept = replace(job, data=write(job.data, records), out=out, keep=("id", "reward", "meta"))
    score_file(kept)
    if suffix == ".parquet":
        results = pytest.importorskip("pyarrow.parquet").read_table(out).to_pylist()
    else:
        results = read(out)
    assert [[r["id"], r["reward"], r["meta"]] for r in results] == [[s["id"], s["reward"], s["meta"]] for s in records]
    assert list(results[0]) == ["index", "id", "reward", "meta", "tokens", "logprob", "entropy"]
    with pytest.raises(LogitlessError, match="line 1 has no field 'ids' to keep; it has 'prompt', 'response'"):
        score_file(replace(kept, keep=("ids",), overwrite=True))
    with pytest.raises(LogitlessError, match="the results have a field 'tokens' of their own"):
        replace(kept, keep=("tokens",))
    write(job.data, [{**s, "id": i if i else "zero"} for i, s in enumerate(samples(9))])
    mixed = replace(kept, keep=("id",), overwrite=True)
    if suffix == ".parquet":
        with pytest.raises(LogitlessError, match=r"have no one type, as a Parquet column must: .*Write .jsonl"):
            score_file(mixed)
    else:
        score_file(mixed)
        assert [r["id"] for r in read(out)] == ["zero", *range(1, 9)]
    write(job.data, [{**s, "id": "\ud800"} for s in samples(9)])
    if suffix == ".parquet":
        with pytest.raises(LogitlessError, match=r"half of a surrogate pair, which Parquet does not hold"):
            score_file(mixed)
    else:
        score_file(mixed)
        assert [r["id"] for r in read(out)] == ["\ud800"] * 9


def test_a_torn_parquet_input_is_named(job, tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": [[1]], "response": [[2]]}), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(LogitlessError, match=r"in.parquet is no whole Parquet file: .*Was it cut off\?"):
        score_file(replace(job, data=path))


# Kills.


class Killed(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


@pytest.mark.parametrize("moment", ["while writing", "before renaming", "after renaming"])
def test_wherever_it_is_killed_it_resumes_to_the_same_bytes(job, expected, monkeypatch, moment):
    """Every file is written, flushed and renamed; a kill at each of these, of each file."""
    owner, name = (journal_module, "_flush") if moment == "while writing" else (journal_module.os, "replace")
    survived, kills = getattr(owner, name), 0

    def deadly(path, *target):
        nonlocal kills
        if moment == "while writing":
            os.truncate(path, path.stat().st_size // 2)
        if moment == "after renaming":
            survived(path, *target)
        kills += 1
        raise Killed

    # A file has two flushes, the second of its folder.
    each = 2 if moment == "while writing" else 1
    for number in range(20):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, counted(survived, deadly, each * (number % 2)))
            try:
                score_file(job)
            except Killed:
                continue
            break
    assert kills >= 4
    assert job.out.read_bytes() == expected
    assert sorted(p.name for p in job.out.parent.glob("out.jsonl*")) == ["out.jsonl", "out.jsonl.score.json"]


def counted(first, then, count: int):
    """``first`` so many times, ``then`` after that."""
    left = iter(range(count))
    return lambda *args: (first if next(left, None) is not None else then)(*args)


def command(job: Job, *more: str) -> list[str]:
    options = {"temperature": job.temperature, "tokens-per-batch": job.tokens_per_batch, "out": job.out}
    options |= {"records-per-part": job.records_per_part, "device": "cpu"}
    flat = [str(x) for name, value in options.items() for x in (f"--{name}", value)]
    return ["score", str(job.model), str(job.data), *flat, *more]


def test_killed_for_real_it_resumes_to_the_same_bytes(job, tmp_path):
    data = write(tmp_path / "many.jsonl", samples(200))
    job = replace(job, data=data, tokens_per_batch=1, records_per_part=2)
    whole = replace(job, out=tmp_path / "whole.jsonl")
    score_file(whole)
    process = start_program(PROGRAM, *command(job), folder=tmp_path, written=tmp_path / "said")
    parts, deadline = tmp_path / "out.jsonl.parts", time.monotonic() + 60
    while not (parts.exists() and len(list(parts.glob("*.jsonl"))) >= 3) and time.monotonic() < deadline:
        assert process.is_alive(), (tmp_path / "said.err").read_text()
        time.sleep(0.002)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not job.out.exists()
    there = len(list(parts.glob("*.jsonl")))
    assert 3 <= there < 100
    summary = score_file(job)
    assert summary.scored_records == 200 - 2 * there
    assert job.out.read_bytes() == whole.out.read_bytes()
    assert not parts.exists()


def test_two_ranks_give_the_same_file(job, expected, tmp_path):
    ended = run_program(PROGRAM, *command(job, "--json"), folder=tmp_path, ranks=2)
    assert ended.codes == [0, 0], ended.err
    assert job.out.read_bytes() == expected
    (summary,) = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]
    assert summary["records"] == summary["scored_records"] == 30


def score_on_rank(rank, world, job):
    import torch.distributed as dist

    try:
        score_file(job, group=dist.group.WORLD)
    except LogitlessError as error:
        return str(error)
    return "no error"


def fail_on_rank(rank, world, guilty):
    import torch.distributed as dist

    def act():
        if rank == guilty:
            raise LogitlessError(f"rank {rank} cannot")
        return rank

    try:
        return run_module._together(dist.group.WORLD, act)
    except LogitlessError as error:
        return str(error)


def test_what_fails_on_one_rank_is_raised_on_all(ranks, job):
    assert ranks(fail_on_rank, 2, 1) == ["rank 1 cannot", "rank 1 cannot"]
    assert ranks(fail_on_rank, 2, None) == [0, 1]
    job.out.write_text("mine\n")
    # Only the first rank looks at what is there.
    texts = ranks(score_on_rank, 2, job)
    assert texts[0] == texts[1]
    assert "no out.jsonl.score.json says how it was made" in texts[0]


# What is there already.


def test_a_finished_job_is_left_alone(job, expected, monkeypatch):
    score_file(job)
    monkeypatch.setattr(Scorer, "load", lambda *args, **kwargs: pytest.fail("loaded the model"))
    summary = score_file(job)
    assert (summary.records, summary.scored_records) == (30, 0)
    assert job.out.read_bytes() == expected


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"temperature": 1.0}, "temperature was 0.7 and is 1.0"),
        ({"tokens_per_batch": 91}, "tokens_per_batch was 90 and is 91"),
        ({"memory": "1MiB"}, "memory was 268435456 and is 1048576"),
        ({"special_tokens": False}, "special_tokens was True and is False"),
    ],
)
def test_other_settings_are_refused_unless_overwriting(job, expected, change, text):
    score_file(job)
    with pytest.raises(LogitlessError, match="was begun with other settings: ") as caught:
        score_file(replace(job, **change))
    assert text in str(caught.value)
    assert job.out.read_bytes() == expected
    again = replace(job, **change, overwrite=True)
    assert score_file(again).scored_records == 30
    assert json.loads((job.out.parent / "out.jsonl.score.json").read_text())["temperature"] == again.temperature


def test_a_changed_input_is_refused(job):
    score_file(job)
    write(job.data, samples(30)[:-1])
    with pytest.raises(LogitlessError, match=r"the input has changed \(in.jsonl\)"):
        score_file(job)


@pytest.mark.parametrize("when", [2, 5])
def test_an_input_that_changes_on_the_way_is_an_error(job, when):
    """The last part of five is read with one record too many, or not at all."""

    def append(progress):
        if progress.done == when:
            with job.data.open("a") as file:
                file.write(json.dumps({"prompt": [1], "response": [2]}) + "\n")

    with pytest.raises(LogitlessError, match="changed while it was read"):
        score_file(job, append)
    assert not job.out.exists()


def test_somebody_elses_file_is_refused(job):
    job.out.write_text("precious\n")
    with pytest.raises(LogitlessError, match=r"exists, and no out.jsonl.score.json says how it was made"):
        score_file(job)
    assert job.out.read_text() == "precious\n"


def damages(whole: bytes) -> dict[str, bytes]:
    """What may have become of a part: lines lost, lines too many, and as many lines with other bytes."""
    first, *lines = whole.splitlines(keepends=True)
    digit = whole.index(b"-", whole.index(b'"logprob"')) + 1
    return {
        "a line lost": b"".join([first, *lines[:-1]]),
        "a line twice": b"".join([first, *lines, lines[-1]]),
        "lines swapped": b"".join([first, *lines[1:], lines[0]]),
        "another digit": whole[:digit] + (b"7" if whole[digit : digit + 1] != b"7" else b"8") + whole[digit + 1 :],
        "no digest": b"".join(lines),
        "nothing": b"",
    }


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_damaged_part_is_an_error(job, expected, monkeypatch, suffix):
    job = replace(job, out=job.out.with_suffix(suffix))
    monkeypatch.setattr(journal_module.Journal, "finish", lambda self: None)
    score_file(job)
    monkeypatch.undo()
    (part,) = job.out.with_name(f"{job.out.name}.parts").glob("00000001-*.jsonl")
    whole = part.read_bytes()
    (other,) = part.parent.glob("00000002-*.jsonl")
    for damaged in (*damages(whole).values(), other.read_bytes()):
        part.write_bytes(damaged)
        with pytest.raises(LogitlessError, match=rf"{part.name} does not have the digest in its first line"):
            score_file(job)
        assert not job.out.exists()
    part.unlink()
    assert score_file(job).scored_records == 7
    if suffix == ".jsonl":
        assert job.out.read_bytes() == expected


def written(tmp_path, monkeypatch, lines: list[bytes]) -> Journal:
    """A journal whose one part has been written, and whose output has not."""
    journal = Journal(tmp_path / "out.jsonl", {"temperature": 1.0}, len(lines), len(lines))
    monkeypatch.setattr(journal_module, "_flush", lambda path: None)
    journal.open(overwrite=False)
    journal.commit(0, lines)
    return journal


def test_a_torn_line_is_found_wherever_it_is_torn(tmp_path, monkeypatch):
    """A process that is killed tears a draft, which nobody reads; a disk may tear anything."""
    lines = [b'{"index":0,"tokens":[5]}\n', b'{"index":1,"tokens":[7],"logprob":[-0.25],"entropy":[1.5]}\n']
    whole = b"".join(lines)
    journal = written(tmp_path, monkeypatch, lines)
    part = journal._part(0)
    kept = part.read_bytes()
    for point in range(len(kept)):
        draft = part.with_name(f"{part.name}.{point}.draft")
        draft.write_bytes(kept[:point])
        assert journal.has(0)
        assert b"".join(journal._lines()) == whole
        part.write_bytes(kept[:point])
        with pytest.raises(LogitlessError, match=r"00000000.jsonl does not have the digest in its first line"):
            journal.finish()
        assert not journal.out.exists()
        part.write_bytes(kept)
    journal.finish()
    assert journal.out.read_bytes() == whole
    for point in range(len(whole)):
        journal.out.write_bytes(whole[:point])
        with pytest.raises(LogitlessError, match=r"out.jsonl holds [01] whole results but the input has 2 records"):
            journal.open(overwrite=False)
    journal.out.write_bytes(whole)
    journal.open(overwrite=False)


def test_a_torn_parquet_file_holds_nothing(tmp_path):
    path = tmp_path / "out.parquet"
    line = b'{"index":0,"tokens":[5],"logprob":[-0.25],"entropy":[1.5]}\n'
    write_results(lambda: [line], path, ".parquet")
    whole = path.read_bytes()
    assert count_results(path) == 1
    for point in (*range(0, len(whole), 97), *range(len(whole) - 9, len(whole))):
        path.write_bytes(whole[:point])
        assert count_results(path) == 0


def test_a_torn_sheet_is_found_wherever_it_is_torn(tmp_path, monkeypatch):
    journal = written(tmp_path, monkeypatch, [b"{}\n"])
    whole = journal.sheet.read_bytes()
    # The newline at its end says nothing.
    for point in range(len(whole) - 1):
        journal.sheet.write_bytes(whole[:point])
        with pytest.raises(LogitlessError, match=r"out.jsonl.score.json is no JSON"):
            journal.open(overwrite=False)
    journal.sheet.write_bytes(whole[:-1])
    journal.open(overwrite=False)


def test_an_empty_file_gives_an_empty_file(job):
    write(job.data, [])
    assert score_file(job).records == 0
    assert job.out.read_bytes() == b""


def test_memory_does_not_grow_with_the_file(tmp_path, model):
    texts = Texts(model)
    texts.encode("w5", True)

    def peak(count: int) -> int:
        source = Source(write(tmp_path / f"{count}.jsonl", samples(count)))
        tracemalloc.start()
        for _ in source.parts(16, lambda part: part % 2 == 0, texts):
            pass
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(4000) < 1.3 * peak(400)


# Errors.


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2: wanted a JSON object but got list"),
        ({"prompt": [1]}, "line 2 has no field 'response'; it has 'prompt'. Name the fields with --prompt-key"),
        ({"prompt": [], "response": [1]}, "line 2: 'prompt' has no tokens, so nothing predicts the first token"),
        ({"prompt": [1], "response": [VOCAB]}, f"line 2: token id {VOCAB} is outside of the model's vocabulary"),
        ({"prompt": [1], "response": [1.5]}, "line 2: 'response' must be a list of token ids or a text but is [1.5]"),
        ({"prompt": [1], "response": [{"role": "user"}]}, "A whole conversation goes into 'messages'"),
        ({"prompt": [1], "response": None}, "line 2: 'response' must be a list of token ids or a text but is None"),
        ({"messages": []}, "line 2: 'messages': chat messages must be a list of objects with 'role' and 'content'"),
        ({"messages": [{"content": "w5"}]}, "line 2: 'messages': chat messages must be a list of objects with 'role'"),
        ({"messages": [USER]}, "line 2: 'messages': no message is the assistant's"),
        ({"messages": [ANSWER]}, "line 2: 'messages': the assistant's message comes first"),
        ({"messages": [USER, USER, ANSWER]}, "line 2: 'messages': the chat template refuses it: turns must alternate"),
        ({"messages": [USER, STRANGE, USER, ANSWER]}, "line 2: 'messages': the chat template renders message 1 of the"),
        ('{"prompt": [1], "resp', "line 2 is not JSON: Invalid control character"),
        ("[" * 100000, "line 2 is not JSON"),
        ({"prompt": "w5 \ud800", "response": "w6"}, "line 2: 'prompt': character 3 is half of a surrogate pair"),
        ({"prompt": "w5", "response": "\udfff"}, "line 2: 'response': character 0 is half of a surrogate pair"),
        ({"messages": [USER | {"content": "\ud800"}, ANSWER]}, "line 2: 'messages': character 0 is half of"),
        ({"prompt": [1] * 40, "response": [1] * 40}, "line 2: 80 tokens are more than the model's 64 positions"),
    ],
)
def test_a_bad_record_is_named(job, record, text):
    lines = [json.dumps(samples(30)[0]), record if isinstance(record, str) else json.dumps(record)]
    job.data.write_text("\n".join(lines) + "\n")
    with pytest.raises(LogitlessError) as caught:
        score_file(job)
    assert text in str(caught.value)
    assert "in.jsonl" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"temperature": 0.0}, "temperature must be a positive finite number but is 0.0"),
        ({"dtype": "int8"}, "dtype must be one of ['auto', 'bfloat16', 'float16', 'float32'] but is 'int8'"),
        ({"tokens_per_batch": 0}, "tokens_per_batch must be 1 or more but is 0"),
        ({"out": Path("out.csv")}, "the output must end in .jsonl or .parquet but is out.csv"),
        ({"memory": "0MiB"}, "memory: wanted a positive number of bytes"),
    ],
)
def test_a_bad_setting_is_named(job, change, text):
    with pytest.raises(LogitlessError) as caught:
        replace(job, **change)
    assert text in str(caught.value)


def test_what_is_not_there_is_named(job, tmp_path, monkeypatch):
    with pytest.raises(LogitlessError, match=r"is the input .* itself"):
        replace(job, out=job.data)
    with pytest.raises(LogitlessError, match=r"is no model directory: there is no config.json in it"):
        score_file(replace(job, model=tmp_path))
    with pytest.raises(LogitlessError, match=r"there is no file .*nothing.jsonl"):
        score_file(replace(job, data=tmp_path / "nothing.jsonl"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LogitlessError, match=r"needs pyarrow. Install it with pip install 'logitless\[score\]'"):
        replace(job, out=tmp_path / "out.parquet")
    with pytest.raises(LogitlessError, match="transformers is not installed"):
        score_file(job)


@pytest.mark.parametrize(
    "spelling", ["a dot", "a way back", "a symlink", "a symlinked folder", "a hard link", "the link"]
)
def test_the_input_is_never_overwritten_however_it_is_spelled(job, tmp_path, spelling):
    data, link = job.data, tmp_path / "link.jsonl"
    (tmp_path / "sub").mkdir()
    (tmp_path / "other").symlink_to(tmp_path, target_is_directory=True)
    given, before = data, data.read_bytes()
    if spelling == "a dot":
        out = Path(os.path.relpath(data))
    elif spelling == "a way back":
        out = tmp_path / "sub" / ".." / data.name
    elif spelling == "a symlinked folder":
        out = tmp_path / "other" / data.name
    elif spelling == "a hard link":
        out = link
        os.link(data, link)
    else:
        link.symlink_to(data)
        given, out = (data, link) if spelling == "a symlink" else (link, data)
    for overwrite in (True, False):
        with pytest.raises(LogitlessError, match=r"--out .* is the input .* itself.*Give another --out"):
            score_file(replace(job, data=given, out=out, overwrite=overwrite))
    assert data.read_bytes() == before


@pytest.mark.parametrize("name", ["out.jsonl.rejects.jsonl", "out.jsonl.parts/mine.jsonl"])
def test_no_file_beside_the_output_may_be_the_input(job, name):
    """The rejects of a job, repaired, are a likely input of the next; to overwrite is to delete the last rejects."""
    data = job.out.with_name("out.jsonl.parts") / "mine.jsonl" if "/" in name else job.out.with_name(name)
    data.parent.mkdir(exist_ok=True)
    write(data, samples(30))
    for overwrite in (True, False):
        with pytest.raises(LogitlessError, match=r"the input .* is a file that this job writes beside .*out.jsonl"):
            score_file(replace(job, data=data, overwrite=overwrite))
    assert data.exists()


def test_texts_without_a_tokenizer_are_an_error(job, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((job.model / name).read_bytes())
    for on_error in ("stop", "skip"):
        with pytest.raises(LogitlessError, match="the input has texts, but no tokenizer could be loaded"):
            score_file(replace(job, model=bare, on_error=on_error))


def test_broken_weights_are_an_error_and_not_a_number(job, monkeypatch):
    load = Scorer.load

    def broken(*args, **kwargs):
        scorer = load(*args, **kwargs)
        scorer.model.lm_head.weight.data[3] = torch.nan
        return scorer

    monkeypatch.setattr(Scorer, "load", staticmethod(broken))
    with pytest.raises(LogitlessError, match="a log-prob or entropy is not finite"):
        score_file(job)


def test_a_model_that_looks_ahead_is_refused(job, monkeypatch):
    from transformers import Qwen3Model

    forward = Qwen3Model.forward

    def ahead(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        out.last_hidden_state = out.last_hidden_state + out.last_hidden_state.mean(1, keepdim=True)
        return out

    monkeypatch.setattr(Qwen3Model, "forward", ahead)
    with pytest.raises(LogitlessError, match="Only causal models can be scored in padded batches"):
        score_file(job)


# Against the log-probs of the engine that sampled.


@pytest.fixture
def scored(tmp_path) -> tuple[Path, Path, list[dict]]:
    """An input with the engine's log-probs, and results for it, as files; and the results."""
    draw = random.Random(3)
    results, records = [], []
    for index in range(40):
        tokens = [draw.randrange(VOCAB) for _ in range(draw.randint(0, 12))]
        logprob = [round(-8 * draw.random(), 5) for _ in tokens]
        engine = [x + draw.gauss(0, 0.05) for x in logprob]
        results.append({"index": index, "tokens": tokens, "logprob": logprob, "entropy": logprob, "engine": engine})
        records.append({"prompt": [1], "response": tokens, "engine": engine})
    # A token of the record with the most tokens that the engine found a thousand times likelier.
    at = max(range(40), key=lambda i: len(results[i]["tokens"]))
    records[at]["engine"][3] = results[at]["engine"][3] = results[at]["logprob"][3] + 7.0
    data, out = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    out.write_text("".join(json.dumps({k: v for k, v in r.items() if k != "engine"}) + "\n" for r in results))
    return data, out, results


def test_mismatch_of_files(scored, tmp_path):
    from logitless.tools.score.against import compare, report_text, write

    data, out, results = scored
    compared = write(compare(data, out, "engine"), out)
    worst = max(results, key=lambda r: len(r["tokens"]))
    report = compared.report
    assert (report.tokens, report.samples) == (
        sum(len(r["tokens"]) for r in results),
        sum(bool(r["tokens"]) for r in results),
    )
    assert report.largest == pytest.approx(7.0)
    assert (report.outliers[0].sample, report.outliers[0].position) == (worst["index"], 3)
    assert report.outliers[0].token == worst["tokens"][3]
    names = [path.name for path in compared.files]
    assert names == ["out.jsonl.mismatch.json", "out.jsonl.mismatch-light.png", "out.jsonl.mismatch-dark.png"]
    assert json.loads(compared.files[0].read_text())["outliers"][0]["position"] == 3
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in compared.files[1:])
    summary = run_module.Summary(str(out), 40, 0, 0, 1.0)
    assert str(report) in report_text(summary, compared, False)
    assert json.loads(report_text(summary, compared, True))["mismatch"]["tokens"] == report.tokens
    # Parquet has the same numbers.
    table = tmp_path / "out.parquet"
    write_results(lambda: [line + b"\n" for line in out.read_bytes().splitlines()], table, ".parquet")
    assert compare(data, table, "engine").report.kl_k3 == pytest.approx(report.kl_k3, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"engine": [1.0]}, "'engine' has 1 log-probs but the response has"),
        ({"engine": "none"}, "'engine' must be a list of log-probs but is none"),
        ({"engine": [None, 1.0]}, "'engine' must be a list of log-probs"),
        ({}, "line 1 has no field 'engine'; it has 'prompt', 'response'"),
    ],
)
def test_a_bad_field_to_compare_with_is_named(scored, change, text):
    from logitless.tools.score.against import compare

    data, out, _ = scored
    first, *rest = data.read_text().splitlines(keepends=True)
    record = {k: v for k, v in json.loads(first).items() if k != "engine"} | change
    data.write_text(json.dumps(record) + "\n" + "".join(rest))
    with pytest.raises(LogitlessError, match=text):
        compare(data, out, "engine")


def test_the_command_compares(job, tmp_path):
    from typer.testing import CliRunner

    from logitless.tools.cli import app

    records = [{"prompt": [3, 4], "response": [5, 6, 7], "engine": [-1.0, -2.0, -3.0]}] * 2
    data, out = tmp_path / "in.jsonl", tmp_path / "scores.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = ["score", job.model, data, "--out", out, "--device", "cpu", "--against", "engine", "--json"]
    result = CliRunner().invoke(app, [str(x) for x in arguments], catch_exceptions=False)
    printed = json.loads(result.stdout.splitlines()[-1])
    own = [json.loads(line)["logprob"] for line in out.read_text().splitlines()]
    assert printed["mismatch"]["kl_k1"] == pytest.approx(sum(-2.0 - sum(x) / 3 for x in own) / 2, rel=1e-6)
    assert printed["records"] == 2
