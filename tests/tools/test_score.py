"""``logitless score``: right numbers, and the same bytes whatever kills it and however many ranks share the work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from close import assert_close_to_truth
from shared.score import ANSWER, STRANGE, TEMPLATE, USER, VOCAB, samples, write

from logitless.errors import LogitlessError
from logitless.tools.score import Job, score_file
from logitless.tools.score.files import Record, Source
from logitless.tools.score.model import _line, batches


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


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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
        own = AutoModelForCausalLM.from_pretrained(job.model).to(dtype)
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
    results, model = read(job.out), AutoModelForCausalLM.from_pretrained(job.model).double()
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
        # Sums in fixed point are off by at most 7.6e-6 of a block's largest term.
        assert result["top1_logprob"] == pytest.approx(p.max(1).values.log().tolist(), rel=1e-5, abs=7.6e-6)
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


def test_another_card_of_the_kind_goes_on(job):
    """Numbers of cards are a scheduler's business; a CPU gives other bits."""
    first, other = (replace(job, device=device).settings() for device in ("cuda:0", "cuda:3"))
    assert first == other
    assert first != job.settings()


def test_a_part_is_known_by_all_bytes_of_its_records(tmp_path):
    """Records that begin alike are others; blanks around them are not."""
    long = {"prompt": [3] * 5000, "response": [4, 5]}
    found = []
    for name, last, blank in (("a", 5, ""), ("b", 6, ""), ("c", 5, "  ")):
        text = blank + json.dumps({**long, "response": [4, last]}) + blank
        path = tmp_path / f"{name}.jsonl"
        path.write_text(text + "\n", encoding="utf-8")
        found.append(Source(path).survey(7)[1])
    assert found[0] == found[2]
    assert found[0] != found[1]


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
    monkeypatch.setattr("logitless.tools.score.files.ROW_GROUP", 4)
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
