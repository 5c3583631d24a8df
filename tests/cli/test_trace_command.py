"""`dcpx trace` merges what ranks left in DCPX_TRACE_DIR, and shows where time went."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.cli import dcpx, scripts_of
from support.page_samples import write_traces

import torch_dcpx as dcpx_library
from torch_dcpx import DcpxReader
from torch_dcpx._trace_files import write_if_asked
from torch_dcpx.cli import trace_page
from torch_dcpx.timelines import Timeline

SECOND = 10**9


def note(folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int, **changes: Any) -> None:
    """Writes the trace of a rank: it plans for a second, and writes for `rank + 1` seconds."""
    monkeypatch.setenv("DCPX_TRACE_DIR", str(folder))
    began = changes.pop("began", 100)
    timeline = Timeline(changes.pop("operation", "save"), path="/ckpt", rank=rank)
    vars(timeline).update({"operation_id": "3f2a" * 8, "_epoch_ns": 0, **changes})
    noted = (0, "plan"), (1, ""), (1, "write"), (rank + 2, "")
    timeline._noted += [(7, (began + at) * SECOND, name) for at, name in noted]
    write_if_asked(timeline)  # not end(): it leaves no file of another process


def merged(out: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "X"]


def test_ranks_of_a_save_are_merged_and_the_slowest_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = tmp_path / "traces", tmp_path / "merged.json"
    for rank in range(3):
        note(folder, monkeypatch, rank, began=100 + rank)
    result = dcpx("trace", folder, "--out", out)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"save of '/ckpt' (3f2a3f2a3f2a), 3 ranks: {out}"
    assert lines[1].split() == ["phase", "ranks", "min", "s", "median", "s", "max", "s", "slowest"]
    assert lines[2].split()[:5] == ["plan", "3", "1.000", "1.000", "1.000"]
    assert lines[3].split() == ["write", "3", "1.000", "2.000", "3.000", "rank", "2"]
    events = merged(out)
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    starts = {event["pid"]: event["ts"] for event in reversed(events) if event["name"] == "write"}
    assert starts == {0: 1e6, 1: 2e6, 2: 3e6}


def test_the_newest_operation_is_taken_unless_another_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = tmp_path / "traces", tmp_path / "traces" / "merged.json"
    note(folder, monkeypatch, 0, operation_id="old", began=10)
    note(folder, monkeypatch, 0, operation_id="new", began=20, error="StorageError")
    note(folder, monkeypatch, 1, operation_id="new", began=20)
    note(folder, monkeypatch, 1, operation_id="new", began=15, pid=1)  # of a run before this one
    for args, wanted in (((), 2), (("--save-id", "ol"), 1), (("--all",), 4)):
        result = dcpx("trace", folder, "--out", out, "--overwrite", *args, "--json")
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert found["files"] == wanted
        assert len(found["operations"]) == (2 if args == ("--all",) else 1)
        assert found["errors"] == ([] if "ol" in args else ["StorageError on rank 0"])
        pids = {event["pid"] for event in merged(out)}
        assert pids == ({0} if "ol" in args else {0, 1, 2} if "--all" in args else {0, 1})
    assert (
        "failed: StorageError on rank 0"
        in dcpx("trace", folder, "--out", out, "--overwrite").stdout
    )
    assert dcpx("trace", folder, "--save-id", "none").exit_code == 2


def test_all_are_all_where_loads_have_the_id_of_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcpx_library.save({"a": torch.ones(9)}, tmp_path / "checkpoint")
    monkeypatch.setenv("DCPX_TRACE_DIR", str(tmp_path / "traces"))
    for _ in range(2):
        dcp.load({"a": torch.zeros(9)}, storage_reader=DcpxReader(tmp_path / "checkpoint"))
    out = tmp_path / "merged.json"
    result = dcpx("trace", tmp_path / "traces", "--all", "--out", out)
    assert result.stdout.splitlines()[0].startswith("2 traces, 1 rank: ")
    assert [event["name"] for event in merged(out)].count("load") == 2


def test_seconds_of_a_phase_are_the_sum_over_the_operations_of_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(2):
        for number in range(3):
            note(tmp_path, monkeypatch, rank, operation_id=str(number), began=10 * number)
    result = dcpx("trace", tmp_path, "--all", "--out", tmp_path / "merged")
    _, _, plan, write = (line.split() for line in result.stdout.splitlines()[:4])
    assert plan[:5] == ["plan", "2", "3.000", "3.000", "3.000"]
    assert write == ["write", "2", "3.000", "4.500", "6.000", "rank", "1"]


def test_events_of_operations_that_are_not_merged_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A day of training leaves thousands of files, of a megabyte each once it is read.
    def peak_bytes(name: str, operations: int) -> int:
        folder = tmp_path / name
        for number in range(operations):
            note(folder, monkeypatch, 0, operation_id=str(number), began=number)
        for path in folder.iterdir():
            trace = json.loads(path.read_text())
            trace["traceEvents"] *= 100
            path.write_text(json.dumps(trace))
        tracemalloc.start()
        try:
            assert dcpx("trace", folder, "--out", f"{folder}.json").exit_code == 0
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes("first", 1)  # which imports
    assert peak_bytes("many", 20) < 2 * peak_bytes("one", 1)


def test_two_processes_of_one_rank_stay_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = tmp_path / "traces", tmp_path / "merged.json"
    for number, host in enumerate(("node1", "node2")):
        note(folder, monkeypatch, 0, host=host, operation_id=str(number))
    assert dcpx("trace", folder, "--all", "--out", out).exit_code == 0
    assert {event["pid"] for event in merged(out)} == {0, 1}


def change(path: Path, **changes: Any) -> str:
    trace = json.loads(path.read_text())
    trace["otherData"].update(changes)
    return json.dumps(trace)


BAD = {
    "half-written": lambda path: path.read_text()[:-9],
    "empty": lambda _: "",
    "deep": lambda _: "[" * 100_000,
    "nan": lambda path: path.read_text().replace('"dur": 0', '"dur": NaN', 1),
    "not text": lambda _: "\udcff",
    "foreign": lambda _: '{"traceEvents": [], "otherData": {}}',
    "a list": lambda _: "[1]",
    "a later format": lambda path: change(path, dcpx_trace=2),
    "no rank": lambda path: change(path, rank="0"),
    "negative seconds": lambda path: change(path, seconds={"write": -1}),
    "seconds of text": lambda path: change(path, seconds={"write": "1"}),
    "an event of text": lambda path: path.read_text().replace('"ph": "X"', '"ph": 3', 1),
    "an integer above all floats": lambda path: change(path, seconds={"write": 10**400}),
    "a huge time": lambda path: path.read_text().replace('"dur": 0', '"dur": 1e300', 1),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    note(tmp_path, monkeypatch, 0)
    (good,) = tmp_path.iterdir()
    bad = tmp_path / "bad.json"
    bad.write_bytes(BAD[what](good).encode("utf-8", "surrogateescape"))
    result = dcpx("trace", tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert f"'{bad}'" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_directory_without_traces_says_how_to_get_them(tmp_path: Path) -> None:
    result = dcpx("trace", tmp_path)
    assert result.exit_code == 2
    assert f"no trace in '{tmp_path}': set DCPX_TRACE_DIR={tmp_path}" in result.stderr
    result = dcpx("trace", tmp_path / "absent")
    assert result.exit_code == 2
    assert "No such file or directory" in result.stderr


# ---- --html: phases by rank and thread, workers of a few ranks -----------------------------------


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_traces(tmp_path / "traces", monkeypatch)
    monkeypatch.delenv("DCPX_TRACE_DIR")
    return tmp_path / "traces"


def drawn(traces: Path, *args: object) -> Any:
    out = traces.parent / "out.html"
    merged = traces.parent / "out.json"
    result = dcpx("trace", traces, "--out", merged, "--html", out, "--overwrite", *args)
    assert result.exit_code == 0, result.output
    return scripts_of(out)[0]


def test_each_thread_and_worker_of_each_rank_has_a_row_of_boxes(traces: Path) -> None:
    (one,) = drawn(traces)["operations"]
    assert (one["operation"], one["path"], one["ranks"]) == ("save", "/ckpt/step-100", 4)
    rows = [(row["rank"], row["label"], row["is_worker"]) for row in one["rows"]]
    own = [("MainThread", False), ("writer", False)]
    own += [(f"writer: worker {at}", True) for at in range(2)]
    assert rows == [(rank, *each) for rank in range(4) for each in own]
    named = [
        [(one["names"][name], begin, length) for name, begin, length, _ in row["boxes"]]
        for row in one["rows"]
    ]
    assert named[4] == [("plan", 10_000, 300_000)]
    assert named[5][0] == ("write", 310_000, 600_000)
    assert [name for name, *_ in named[6]] == ["copy", "write"] * 5
    phases = {row["phase"]: row for row in one["phases"]}
    assert (phases["write"]["max_s"], phases["write"]["slowest"]) == (pytest.approx(1.2), 3)


def test_command_prints_what_it_prints_without_a_page(traces: Path) -> None:
    out = traces.parent / "out.json"
    plain = dcpx("trace", traces, "--out", out).stdout
    page = traces.parent / "out.html"
    args = "trace", traces, "--out", out, "--html", page, "--overwrite"
    said = dcpx(*args).stdout
    assert said.startswith(plain) and f"wrote '{page}'" in said.replace("\n", "")
    page.unlink()
    assert json.loads(dcpx(*args, "--json").stdout)["files"] == 4


def test_page_that_is_there_is_refused_and_replaced_on_request(traces: Path) -> None:
    drawn(traces)
    args = "trace", traces, "--out", traces.parent / "out.json", "--html"
    page = traces.parent / "out.html"
    before = page.read_bytes()
    assert dcpx(*args, page).exit_code == 2 and page.read_bytes() == before
    assert dcpx(*args, page, "--overwrite").exit_code == 0
    page.write_text("mine")
    assert dcpx(*args, page, "--overwrite").exit_code == 2 and page.read_text() == "mine"


def test_page_stays_small_of_many_ranks_and_operations(
    traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_page, "_MOST_RANKS", 2)
    (one,) = drawn(traces)["operations"]
    assert {row["rank"] for row in one["rows"] if row["is_worker"]} == {2, 3}
    assert len([row for row in one["rows"] if not row["is_worker"]]) == 8
    for number in range(30):
        for path in list(traces.glob("save-3f2a*rank0*")):
            trace = json.loads(path.read_text())
            trace["otherData"]["id"] = f"other{number}"
            (traces / f"other-{number}.json").write_text(json.dumps(trace))
    found = drawn(traces, "--all")
    assert (len(found["operations"]), found["left_out"]) == (20, 11)


def test_spans_that_a_picture_cannot_tell_apart_are_one_box(traces: Path) -> None:
    for path in traces.iterdir():
        trace = json.loads(path.read_text())
        event = trace["traceEvents"][-1]
        tiny = [{**event, "name": "copy", "ts": 10.0 * at, "dur": 9.0} for at in range(5000)]
        trace["traceEvents"] += tiny
        path.write_text(json.dumps(trace))
    (one,) = drawn(traces)["operations"]
    assert max(len(row["boxes"]) for row in one["rows"]) < 1000


def test_hostile_texts_of_a_trace_stay_in_the_data(traces: Path) -> None:
    evil = "</script><script>alert(1)</script>\x1b[2J\u202e"
    for path in traces.iterdir():
        trace = json.loads(path.read_text())
        trace["otherData"].update(path=evil, host=evil, error=evil)
        for event in trace["traceEvents"]:
            event.update(name=evil if event["ph"] == "X" else event["name"], args=[evil])
        path.write_text(json.dumps(trace))
    (one,) = drawn(traces)["operations"]
    text = (traces.parent / "out.html").read_text()
    assert text.count("<script") == 2 and "\x1b" not in text
    assert one["path"] == evil.replace("\x1b", r"\x1b").replace("\u202e", r"\u202e")
