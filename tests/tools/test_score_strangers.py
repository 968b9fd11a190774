"""``score`` beside files that others wrote: they are refused by name and stay, with ``--overwrite`` too."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from logitless.errors import LogitlessError
from logitless.tools.score import Job
from logitless.tools.score.journal import Journal

SETTINGS = {"input": {"data.jsonl": [1, 2]}, "temperature": 1.0}
LINES = [b'{"index":0}\n', b'{"index":1}\n']
REJECT = b'rejected {"index": 1, "line": 2, "reason": "score: it is bad."}\n'


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "out.jsonl", SETTINGS, num_records=2, part_size=2)


def finish(journal: Journal, lines: list[bytes], overwrite: bool = False) -> None:
    journal.open(overwrite=overwrite)
    journal.commit(0, lines)
    journal.finish()


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize(
    "name", ["my-data.parquet", "mine.jsonl", "model/config.json", ".hidden", "00000000.jsonl.bak", "1.2.draft/x"]
)
@pytest.mark.parametrize("known", [True, False], ids=["a sheet", "no sheet"])
def test_strangers_in_the_folder_of_parts_stay(journal: Journal, name: str, overwrite: bool, known: bool):
    if known:
        journal.open(overwrite=False)
    mine = journal.folder / name
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_bytes(b"precious")
    with pytest.raises(LogitlessError) as caught:
        journal.open(overwrite=overwrite)
    text = str(caught.value)
    assert f"{journal.folder} holds {name.partition('/')[0]}, which no job wrote" in text
    assert "Move what is yours, or give another --out" in text
    assert mine.read_bytes() == b"precious"
    if "/" in name:
        shutil.rmtree(mine.parent)
    else:
        mine.unlink()
    finish(journal, LINES, overwrite)
    assert not journal.folder.exists()


@pytest.mark.parametrize("overwrite", [True, False])
def test_parts_without_a_sheet_stay(journal: Journal, overwrite: bool):
    """Parts of another program may have such names."""
    mine = journal.folder / "00000000.jsonl"
    journal.folder.mkdir()
    mine.write_bytes(b"precious")
    with pytest.raises(LogitlessError, match=r"out\.jsonl\.parts exists, and no out\.jsonl\.score\.json says how"):
        journal.open(overwrite=overwrite)
    assert mine.read_bytes() == b"precious"


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("content", [b'{"prompt": [1], "response": [2]}\n', b"precious", b"[1]\n", b""])
@pytest.mark.parametrize("known", [True, False], ids=["a sheet", "no sheet"])
def test_a_strangers_rejects_stay(journal: Journal, content: bytes, overwrite: bool, known: bool):
    if known:
        journal.open(overwrite=False)
    journal.rejects.write_bytes(content)
    why = "holds lines that no job wrote" if known else r"exists, and no out\.jsonl\.score\.json says who wrote it"
    with pytest.raises(LogitlessError, match=rf"out\.jsonl\.rejects\.jsonl {why}.*Move or delete it, or give another"):
        journal.open(overwrite=overwrite)
    assert journal.rejects.read_bytes() == content


def test_rejects_without_a_sheet_stay_even_in_our_form(journal: Journal):
    """The rejects of a job whose other files were deleted may be all that is left of a repair."""
    journal.rejects.write_bytes(REJECT.removeprefix(b"rejected "))
    with pytest.raises(LogitlessError, match="says who wrote it"):
        journal.open(overwrite=True)


def test_own_rejects_are_replaced(journal: Journal):
    finish(journal, [LINES[0], REJECT])
    assert json.loads(journal.rejects.read_bytes())["index"] == 1
    journal.open(overwrite=False)
    finish(journal, LINES, overwrite=True)
    assert not journal.rejects.exists()
    assert sorted(path.name for path in journal.out.parent.iterdir()) == ["out.jsonl", "out.jsonl.score.json"]


def test_a_job_that_is_killed_as_it_overwrites_goes_on(journal: Journal, monkeypatch):
    """Before the new sheet is there; the old one goes last, and no file is left that it would have to explain."""

    def killed(*_) -> None:
        raise KeyboardInterrupt

    finish(journal, [LINES[0], REJECT])
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "_write_sheet", killed)
        with pytest.raises(KeyboardInterrupt):
            journal.open(overwrite=True)
    assert not journal.rejects.exists()
    finish(journal, LINES)
    assert journal.out.read_bytes() == b"".join(LINES)


@pytest.mark.parametrize("lines", [LINES, [LINES[0], REJECT]], ids=["without rejects", "with rejects"])
def test_files_that_appear_on_the_way_stay(journal: Journal, lines: list[bytes]):
    journal.open(overwrite=False)
    journal.commit(0, lines)
    mine = journal.folder / "notes.txt"
    mine.write_text("precious")
    journal.rejects.write_text("precious")
    with pytest.raises(LogitlessError, match=r"rejects\.jsonl holds lines that no job wrote"):
        journal.finish()
    assert journal.rejects.read_text() == "precious"
    journal.rejects.unlink()
    # Nothing but the results is missing, and the file of another does not keep them from being written.
    journal.finish()
    assert journal.out.exists()
    assert [path.name for path in journal.folder.iterdir()] == ["notes.txt"]
    journal.open(overwrite=False)
    assert mine.read_text() == "precious"


@pytest.mark.parametrize("where", ["itself", "below", "a link"])
def test_the_model_may_not_lie_in_the_folder_of_parts(tmp_path: Path, where: str):
    parts = tmp_path / "out.jsonl.parts"
    model = parts if where == "itself" else parts / "deep" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    job = Job(tmp_path / "elsewhere", tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    if where == "a link":
        (tmp_path / "link").symlink_to(model, target_is_directory=True)
        model = tmp_path / "link"
    for overwrite in (True, False):
        with pytest.raises(LogitlessError, match=r"the model .* lies in .*out\.jsonl\.parts.*Move it, or give another"):
            replace(job, model=model, overwrite=overwrite)
    assert (model / "config.json").exists()
