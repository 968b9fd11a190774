"""``score`` on a disk that is full or read-only, beside another process, and with a sheet that is none."""

from __future__ import annotations

import errno
import json
import os
import shutil
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
