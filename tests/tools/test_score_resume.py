"""``score`` that was killed, finds something there already, is given something wrong, or compares."""

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
from programs import run_program, start_program
from shared.score import ANSWER, STRANGE, TEMPLATE, USER, VOCAB, samples, write

import logitless
from logitless.errors import LogitlessError
from logitless.tools.score import Job, score_file
from logitless.tools.score import journal as journal_module
from logitless.tools.score import run as run_module
from logitless.tools.score.files import Source, count_results, write_results
from logitless.tools.score.journal import Journal
from logitless.tools.score.model import Scorer
from logitless.tools.score.texts import Texts


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


PROGRAM = Path(logitless.__file__).parent / "__main__.py"


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
    with pytest.raises(LogitlessError, match=r"needs pyarrow. Install it, or logitless with its extra \[score\]"):
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
