"""The adapters' benchmark: every entry runs on a small size, and the pages say what the records say."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import logitless
from benchmarks.bench.adapters import (
    ENTRIES,
    SMOKE,
    START,
    append,
    installed,
    main,
    measure,
    read,
    saved,
    table,
    with_table,
)
from benchmarks.bench.checkouts import PACKAGES
from logitless import LogitlessError
from logitless.adapters.host import SAVED

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "adapters.jsonl"
PAGES = sorted(p for p in (ROOT / "docs" / "adapters").glob("*.md") if p.stem != "index")

sys.path.insert(0, str(ROOT / "tests" / "adapters"))
import hosts  # noqa: E402


@pytest.mark.parametrize("host", ENTRIES)
@pytest.mark.filterwarnings("default")
def test_entries_run(host, tmp_path, monkeypatch):
    if not hosts.put_first(host):
        monkeypatch.syspath_prepend(str(ROOT / "tests" / "adapters" / "doubles"))
    if not find_spec(PACKAGES.get(host, host)) and not (hosts.FOLDER / host).is_dir():
        pytest.skip(f"{host} has no double, and LOGITLESS_HOSTS names no checkout")
    # What a host compiles is not ours to try, and takes a C++ compiler many seconds.
    with torch.compiler.set_stance("force_eager"):
        record = measure(ENTRIES[host], torch.device("cpu"), SMOKE, repeats=1)
    assert record.difference < 1e-4
    assert record.before_bytes > 0
    assert record.after_bytes > 0
    if record.deferred_bytes is not None:
        assert record.deferred_difference < 1e-4
        assert record.deferred_bytes > 0
        assert record.made == {}
    assert not logitless.status().hosts
    append(tmp_path / "a.jsonl", record)
    append(tmp_path / "a.jsonl", replace(record, before_ms=1e6))
    assert read(tmp_path / "a.jsonl")[0] == record
    assert "1,000,000 ms" in table(host, read(tmp_path / "a.jsonl"))  # the newest


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_tables_are_what_the_records_say(page):
    """Run ``python -m benchmarks.bench.adapters --docs docs/adapters`` after new records."""
    text = page.read_text()
    assert START in text
    assert with_table(text, page.stem, read(RESULTS)) == text


def test_status_says_what_the_records_say():
    """The same command writes what ``status()`` estimates by."""
    numbers = json.loads(SAVED.read_text())
    assert numbers == saved(read(RESULTS))
    # 67.65 GiB before and 4.45 after, for 8 x 4096 x 151,936 logits.
    assert numbers["verl"] == 13.6
    # Nothing of a head that builds no logits.
    assert not numbers.keys() & {"megatron", "prime_rl", "transformers", "trl"}


def test_unknown_entries_are_refused(tmp_path):
    with pytest.raises(LogitlessError, match="there is no entry 'trll'"):
        main(["--host", "trll", "--out", str(tmp_path / "a.jsonl")])


def test_a_step_that_the_host_served_itself_is_an_error(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "adapters" / "doubles"))
    with pytest.raises(LogitlessError, match="prime_rl ran its own code with ours installed"), installed("prime_rl"):
        pass
    assert not logitless.status().hosts
