"""``score`` on a disk that is full or read-only, beside another process, and with a sheet that is none."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from logitless.errors import LogitlessError
from logitless.tools.score import journal as journal_module
from logitless.tools.score.journal import Journal

SETTINGS = {"input": {"data.jsonl": [1, 2]}, "temperature": 1.0}


def opened(tmp_path: Path, name: str = "out.jsonl") -> Journal:
    journal = Journal(tmp_path / name, SETTINGS, num_records=4, part_size=2)
    journal.open(overwrite=False)
    return journal


def lines(part: int) -> list[bytes]:
    return [json.dumps({"index": 2 * part + i}).encode() + b"\n" for i in range(2)]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_is_told_with_the_file(tmp_path: Path, monkeypatch, code: int):
    journal = opened(tmp_path)
    journal.commit(0, lines(0))

    def full(path: Path, data: bytes) -> None:
        path.touch()
        # As the system raises it when writing to an open file: without a name.
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(LogitlessError) as caught:
            journal.commit(1, lines(1))
    assert str(journal._part(1)) in str(caught.value)
    assert os.strerror(code) in str(caught.value)
    assert not list(journal.folder.glob("*.draft"))
    # Room again: the finished part is there still.
    assert journal.has(0)
    journal.commit(1, lines(1))
    journal.finish()
    assert journal.out.read_bytes() == b"".join([*lines(0), *lines(1)])


def test_a_disk_that_is_full_for_the_output(tmp_path: Path, monkeypatch):
    journal = opened(tmp_path)
    for part in range(2):
        journal.commit(part, lines(part))

    def full(*_) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(journal_module, "write_results", full)
    with pytest.raises(LogitlessError, match=r"out\.jsonl: No space left on device\. Finished parts are kept"):
        journal.finish()


def test_another_process_finished_the_same_output(tmp_path: Path):
    one, other = opened(tmp_path), opened(tmp_path)
    for part in range(2):
        one.commit(part, lines(part))
    one.finish()
    with pytest.raises(LogitlessError, match=r"is gone\. Does another process write to the same --out"):
        other.commit(1, lines(1))
    with pytest.raises(LogitlessError, match="is gone"):
        other.finish()
    assert one.out.read_bytes() == b"".join([*lines(0), *lines(1)])


def test_another_process_removes_the_parts_first(tmp_path: Path, monkeypatch):
    journal = opened(tmp_path)
    for part in range(2):
        journal.commit(part, lines(part))
    flush = journal_module._flush

    def then_remove(path: Path) -> None:
        flush(path)
        if journal.out.exists():
            shutil.rmtree(journal.folder)

    monkeypatch.setattr(journal_module, "_flush", then_remove)
    journal.finish()
    assert journal.out.exists()


@pytest.mark.parametrize("content", ["[1, 2]", '"text"', "3", "null"])
def test_a_sheet_that_is_no_sheet(tmp_path: Path, content: str):
    journal = Journal(tmp_path / "out.jsonl", SETTINGS, num_records=4, part_size=2)
    journal.sheet.write_text(content)
    with pytest.raises(LogitlessError, match=r"out\.jsonl\.score\.json holds no settings of a job but a"):
        journal.open(overwrite=False)
    journal.open(overwrite=True)


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("")
    journal = Journal(tmp_path / "file" / "out.jsonl", SETTINGS, num_records=4, part_size=2)
    with pytest.raises(LogitlessError, match=r"out\.jsonl: Not a directory"):
        journal.open(overwrite=False)


@pytest.mark.parametrize("came", [3, None, [1], "data.jsonl"])
def test_a_sheet_whose_input_is_none(tmp_path: Path, came: object):
    """All else is equal, as if the input had been repaired."""
    journal = Journal(tmp_path / "out.jsonl", SETTINGS, num_records=4, part_size=2, digests=("0" * 16, "1" * 16))
    journal.sheet.write_text(json.dumps({**SETTINGS, "input": came}))
    with pytest.raises(LogitlessError, match=r"begun with other settings: input was .* and is .*, or --overwrite"):
        journal.open(overwrite=False)


def test_a_sheet_that_nests_too_deep(tmp_path: Path):
    journal = Journal(tmp_path / "out.jsonl", SETTINGS, num_records=4, part_size=2)
    journal.sheet.write_text("[" * 100_000)
    with pytest.raises(LogitlessError, match=r"out\.jsonl\.score\.json is no JSON"):
        journal.open(overwrite=False)


def finished(tmp_path: Path, name: str = "out.jsonl") -> Journal:
    journal = opened(tmp_path, name)
    for part in range(2):
        journal.commit(part, lines(part))
    journal.finish()
    return journal


@pytest.mark.parametrize("damage", ["garbage", "a record twice", "another digit"])
def test_a_finished_output_that_was_changed(tmp_path: Path, damage: str):
    """As many lines as before: only the digest tells."""
    journal = finished(tmp_path)
    journal.open(overwrite=False)
    whole = journal.out.read_bytes()
    _, *rest = whole.splitlines(keepends=True)
    changed = {
        "garbage": b"".join([b"garbage\n", *rest]),
        "a record twice": b"".join([rest[0], *rest]),
        "another digit": whole.replace(b"3", b"7"),
    }
    journal.out.write_bytes(changed[damage])
    with pytest.raises(LogitlessError, match=r"out\.jsonl does not have the digest that out\.jsonl\.score\.json noted"):
        journal.open(overwrite=False)
    journal.out.write_bytes(whole)
    journal.open(overwrite=False)


def test_a_finished_output_of_an_earlier_version(tmp_path: Path):
    """Its sheet has no digest."""
    journal = finished(tmp_path)
    journal.sheet.write_text(json.dumps(SETTINGS))
    journal.open(overwrite=False)


def test_an_output_that_was_deleted_is_written_again(tmp_path: Path):
    journal = finished(tmp_path)
    whole, sheet = journal.out.read_bytes(), journal.sheet.read_bytes()
    journal.out.unlink()
    again = finished(tmp_path)
    assert (again.out.read_bytes(), again.sheet.read_bytes()) == (whole, sheet)


def test_a_repaired_input_is_noted(tmp_path: Path):
    """Its sheet is written anew, so that the next run finds the input that it has."""
    journal = Journal(tmp_path / "out.jsonl", SETTINGS, num_records=4, part_size=2, digests=("0" * 16, "1" * 16))
    journal.open(overwrite=False)
    journal.commit(0, lines(0))
    repaired = replace(journal, settings={**SETTINGS, "input": {"data.jsonl": [3, 4]}}, digests=("0" * 16, "2" * 16))
    repaired.open(overwrite=False)
    assert json.loads(journal.sheet.read_bytes())["input"] == {"data.jsonl": [3, 4]}
    repaired.commit(1, lines(1))
    repaired.finish()
    repaired.open(overwrite=False)


def test_files_that_a_job_writes_are_no_files_of_the_model(tmp_path: Path):
    """An output may lie in the folder of its model, and so do its sheet and the report of --against."""
    (tmp_path / "config.json").write_text("{}")
    before = journal_module.facts(tmp_path)
    for name in ("out.jsonl", "out.jsonl.score.json", "out.jsonl.mismatch.json", "out.jsonl.mismatch-light.png"):
        (tmp_path / name).write_text("{}")
    assert journal_module.facts(tmp_path) == before
    assert list(before) == ["config.json"]


def test_an_input_that_is_repaired_before_any_part_is_finished(tmp_path: Path):
    """There is nothing of the other input; where there is, and nothing holds, the job is another."""
    journal = Journal(tmp_path / "out.jsonl", SETTINGS, num_records=4, part_size=2, digests=("0" * 16, "1" * 16))
    journal.open(overwrite=False)
    other = replace(journal, settings={**SETTINGS, "input": {"data.jsonl": [3, 4]}}, digests=("2" * 16, "3" * 16))
    other.open(overwrite=False)
    other.commit(0, lines(0))
    with pytest.raises(LogitlessError, match=r"the input has changed \(data\.jsonl\)"):
        journal.open(overwrite=False)


def test_a_sheet_that_is_deleted_on_the_way_is_written_again(tmp_path: Path):
    journal = opened(tmp_path)
    for part in range(2):
        journal.commit(part, lines(part))
    journal.sheet.unlink()
    journal.finish()
    journal.open(overwrite=False)
    assert json.loads(journal.sheet.read_bytes())["temperature"] == 1.0


@pytest.mark.parametrize("rejected", [0, 1])
def test_results_that_are_missing_are_counted(tmp_path: Path, rejected: int):
    journal = opened(tmp_path)
    reject = b'rejected {"index": 3, "line": 4, "reason": "bad"}\n'
    journal.commit(0, lines(0))
    journal.commit(1, [lines(1)[0], reject] if rejected else lines(1))
    journal.finish()
    journal.out.write_bytes(b"".join(lines(0)))
    told = "4 records, 1 of them rejected. It was" if rejected else r"4 records\. It was"
    with pytest.raises(LogitlessError, match=rf"out\.jsonl holds 2 whole results but the input has {told}"):
        journal.open(overwrite=False)
