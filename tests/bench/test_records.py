"""Records: strict JSON there and back, and a table that fits and hides nothing."""

import importlib
import json
from dataclasses import asdict, replace

import torch

from benchmarks.bench.cases import CASES
from benchmarks.bench.records import (
    PEERS,
    Environment,
    Record,
    append_records,
    by_case,
    failures,
    footnotes,
    newest,
    read_records,
    records_table,
    unsteady,
)

CASE = CASES["reference-fp32-grad-25pct"]
RECORD = Record(
    case=asdict(CASE),
    provider="logitless-overwrite",
    computes="grad",
    status="ok",
    detail="",
    rows=4096,
    logits_bytes=CASE.logits_bytes,
    forward_floor_ms=0.58,
    floor_ms=3.47,
    bandwidth=4.3e12,
    environment={"device": "x", "commit": "abc", "dirty": False},
    errors={"logprob": 1e-6, "entropy": 3e-6, "gradient": 1e-7, "gradient_row": 2e-6},
    peak_bytes=123456,
    forward_ms=0.9,
    total_ms=1234.5,
    total_range_ms=(1200.0, 1300.0),
    ratio=355.7,
)
LINEAR = replace(
    RECORD,
    case=asdict(CASES["linear-reference-keep"]),
    computes="mean",
    rows=16384,
    forward_floor_ms=28.1,
    floor_ms=89.2,
    gemm_ms=[28.1, 58.6, 89.2, 119.9],
    errors={"logprob": 1e-6, "entropy": None, "gradient": 1e-7, "weight": 2e-3, "weight_rest": 3e-3},
)
LOST = replace(RECORD, provider="torch", status="out of memory", detail="CUDA out of memory. " * 9, total_ms=None)
ABSENT = replace(RECORD, provider="verl", status="absent", detail="No module named 'verl'", total_ms=None)


def test_records_survive_the_file(tmp_path):
    path = tmp_path / "new" / "h200.jsonl"
    append_records(path, [RECORD])
    append_records(path, [LOST])
    back = read_records(path)
    assert [r.provider for r in back] == ["logitless-overwrite", "torch"]
    assert replace(back[0], total_range_ms=RECORD.total_range_ms) == RECORD


def test_records_from_before_hidden_states_are_read(tmp_path):
    old = json.loads(RECORD.to_json())
    del old["gemm_ms"]
    old["case"] = {k: v for k, v in old["case"].items() if k not in ("hidden", "frozen", "memory")}
    path = tmp_path / "old.jsonl"
    path.write_text(json.dumps(old) + "\n")
    (back,) = read_records(path)
    assert back.gemm_ms is None
    assert "floor 3.47 ms at 4300 GB/s" in " ".join(records_table([back]).split())


def test_a_case_from_hidden_states_says_so_and_what_its_floor_is():
    text = " ".join(records_table([LINEAR]).split())
    assert "T=16384 V=151936 D=4096 bfloat16 gaussian, forward + backward, 6.5GiB allowed, entropy grad" in text
    assert "floor 89.2 ms, that of 3 full products (1 to 4: 28.1, 58.6, 89.2, 120 ms)" in text
    assert "logitless-overwrite mean loss" in text
    assert text.endswith("1e-06 3e-03")
    assert "no floor" in records_table([replace(LINEAR, floor_ms=None, gemm_ms=None)])


def test_nan_becomes_null():
    line = replace(RECORD, errors={"logprob": float("nan")}, total_range_ms=(float("inf"), 1.0)).to_json()
    assert json.loads(line)["errors"] == {"logprob": None}
    assert json.loads(line)["total_range_ms"] == [None, 1.0]


def test_the_newest_record_of_a_pair_counts():
    again = replace(RECORD, total_ms=7.0)
    assert newest([RECORD, LOST, again]) == [again, LOST]


def test_cases_are_grouped_in_order_of_appearance():
    other = replace(RECORD, case=asdict(CASES["reference-fp32-grad"]))
    assert [len(g) for g in by_case([RECORD, other, LOST])] == [2, 1]


def test_the_table_fits_in_100_columns_and_names_everyone():
    table = records_table([RECORD, LOST, ABSENT])
    assert max(len(line) for line in table.splitlines()) <= 100
    assert "torch: out of memory, CUDA out of memory." in table
    assert table.count("verl: absent, No module named 'verl'") == 1
    row = next(line for line in table.splitlines() if line.startswith("logitless-overwrite"))
    assert row.split() == "logitless-overwrite + entropy grad 0.90 1234 356 120.6 KiB 3e-06 1e-07".split()


def test_what_holds_for_all_cases_is_said_once():
    other = replace(ABSENT, case=asdict(CASES["reference-fp32-grad"]))
    assert footnotes([ABSENT, other, RECORD]) == ["verl: absent, No module named 'verl'"]
    assert failures([ABSENT, RECORD]) == []


def test_an_unsteady_machine_is_said_to_be_one():
    shaken = replace(RECORD, total_range_ms=(1000.0, 2500.0))
    assert unsteady([RECORD]) == []
    assert unsteady([RECORD, shaken]) == ["unsteady machine, repeats vary: logitless-overwrite 1000.0 to 2500.0 ms"]


def test_the_environment_names_commit_and_versions():
    here = Environment.here(torch.device("cpu"))
    assert here.slug == "cpu"
    assert set(here.versions) - set(PEERS) == {"torch", "triton", "python", "logitless"}
    assert here.commit


def test_versions_of_peers_are_recorded_where_there_are_any(tmp_path, monkeypatch):
    """Also of one that is only unpacked in a folder."""
    monkeypatch.syspath_prepend(tmp_path)
    before = Environment.here(torch.device("cpu")).versions
    folder = tmp_path / "liger_kernel-9.8.7.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: liger-kernel\nVersion: 9.8.7\n")
    importlib.invalidate_caches()
    assert Environment.here(torch.device("cpu")).versions == before | {"liger-kernel": "9.8.7"}
    assert "not installed" not in [before.get(name) for name in PEERS]
