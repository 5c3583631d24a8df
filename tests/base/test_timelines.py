"""Timelines: phases of saves and loads by thread, their traces, and the ranges of a profiler."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.async_saves import failing_options
from support.saves import raises_one
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

import torch_dcpx as dcpx
from torch_dcpx import DcpxReader, DcpxWriter, _trace_files
from torch_dcpx._trace_files import write_trace
from torch_dcpx.errors import OptionError, StorageError
from torch_dcpx.storage.place import PosixPlace
from torch_dcpx.timelines import Phase, Timeline

STATE = {"w": torch.arange(300_000.0), "step": 3}


def assert_is_trace(trace: Any) -> list[dict[str, Any]]:
    """Returns the events of a Chrome trace: sorted, and on one thread within or beside another."""
    assert trace == json.loads(json.dumps(trace, allow_nan=False))
    events: list[dict[str, Any]] = trace["traceEvents"]
    for event in events:
        assert event["ph"] in ("X", "M")
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert (type(event["pid"]), type(event["tid"])) == (int, int)
        assert 0 <= event["tid"] < 1 << 32  # what Perfetto takes
    spans = [event for event in events if event["ph"] == "X"]
    assert events[-len(spans) :] == spans
    assert [event["ts"] for event in spans] == sorted(event["ts"] for event in spans)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == {(event["pid"], event["tid"]) for event in spans}
    open_until: dict[tuple[int, int], list[float]] = {}
    for event in spans:
        ends = open_until.setdefault((event["pid"], event["tid"]), [])
        end = event["ts"] + event["dur"]
        while ends and ends[-1] <= event["ts"] + 0.001:  # microseconds, rounded to a nanosecond
            ends.pop()
        assert not ends or end <= ends[-1] + 0.002
        ends.append(end)
    return spans


def assert_beside_each_other(phases: tuple[Phase, ...]) -> None:
    last: dict[int, int] = {}
    for phase in phases:
        assert last.get(phase.thread, 0) <= phase.began_ns < phase.ended_ns
        last[phase.thread] = phase.ended_ns


def seconds_of(phases: tuple[Phase, ...], *names: str) -> float:
    return sum(phase.ended_ns - phase.began_ns for phase in phases if phase.name in names) / 1e9


def test_a_phase_within_another_interrupts_it() -> None:
    timeline = Timeline("save")
    with timeline.phase("vote"):
        with timeline.phase("vote"):
            pass
        with timeline.phase("commit"):
            pass
    assert [phase.name for phase in timeline.phases] == ["vote", "commit", "vote"]
    assert_beside_each_other(timeline.phases)
    first, commit, last = timeline.phases
    assert (first.ended_ns, commit.ended_ns) == (commit.began_ns, last.began_ns)


def test_an_error_ends_its_phases_and_threads_have_their_own() -> None:
    timeline = Timeline("save")
    with pytest.raises(OSError, match="full"), timeline.phase("vote"), timeline.phase("commit"):
        raise OSError("full")

    def write() -> None:
        with timeline.phase("write"):
            pass

    thread = threading.Thread(target=write, name="dcpx-save")
    thread.start()
    thread.join()
    found = {phase.name: phase.thread for phase in timeline.phases}
    assert found["vote"] == found["commit"] == threading.get_native_id() != found["write"]
    assert timeline.thread_name(found["write"]) == "dcpx-save"
    assert pickle.loads(pickle.dumps(timeline)).phases == timeline.phases


def test_a_forked_child_ends_the_phase_that_it_is_in() -> None:
    timeline = Timeline("save")
    with timeline.phase("write"):
        child = os.fork()
    if child == 0:  # a thread of another number than the one that began
        names = [phase.name for phase in timeline.phases]
        os._exit(names != ["write"])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_phases_of_a_save_and_a_load_fill_their_seconds(tmp_path: Path) -> None:
    saved = dcpx.save(STATE, tmp_path).result()
    names = [phase.name for phase in saved.phases]
    assert {"plan", "exchange", "write", "sync", "vote", "commit"} <= set(names)
    assert_beside_each_other(saved.phases)
    assert saved.phases == saved.write.phases
    assert 0 < seconds_of(saved.phases, *names) <= saved.total_s
    engine_s = saved.write.copy_s + saved.write.write_s + saved.write.fsync_s
    assert engine_s <= seconds_of(saved.phases, "write")
    loaded = dcpx.load({"w": torch.zeros(300_000), "step": 0}, tmp_path)
    names = [phase.name for phase in loaded.phases]
    assert {"metadata", "plan", "exchange", "locate", "read", "apply"} <= set(names)
    assert loaded.read is not None
    assert loaded.phases == loaded.read.phases
    assert 0 < seconds_of(loaded.phases, *names) <= loaded.total_s
    assert seconds_of(loaded.phases, "read") <= loaded.read_s
    assert seconds_of(loaded.phases, "metadata") <= loaded.read.metadata_s


def test_async_save_has_its_snapshot_on_the_caller_and_writes_in_the_background(
    tmp_path: Path,
) -> None:
    report = dcpx.async_save(STATE, tmp_path / "checkpoint").result()
    threads = {phase.name: phase.thread for phase in report.phases}
    assert threads["plan"] == threads["snapshot"] == threading.get_native_id()
    assert threads["write"] == threads["commit"] != threads["snapshot"]
    report.trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    spans = assert_is_trace(trace)
    assert trace["otherData"]["operation"] == "async_save"
    assert trace["otherData"]["id"] == report.save_id
    assert {span["name"] for span in spans if span["cat"] == "operation"} == {"async_save"}


def test_trace_has_what_each_worker_did(tmp_path: Path) -> None:
    options = dcpx.WriteOptions(workers=2)
    state = {f"t{i}": torch.randn(1 << 18) for i in range(16)}
    written = dcpx.save(state, tmp_path, options=options).result().write
    sums = written._noted.busy
    for kind in ("copy", "write", "sync"):
        assert any(each.kind == kind and each.busy_ns > 0 for each in sums)
    (engine,) = (each for each in sums if each.kind == "engine")
    assert engine.busy_ns / 1e9 == pytest.approx(
        written.copy_s + written.write_s + written.fsync_s, abs=1e-6
    )
    assert sum(each.nbytes for each in sums if each.kind == "write") == written.file_bytes
    trace = written._noted.trace()
    spans = assert_is_trace(trace)
    on_workers = [span for span in spans if span["cat"] == "worker" and span["name"] != "engine"]
    assert {span["name"] for span in on_workers} >= {"copy", "write"}
    busy_ns = sum(each.busy_ns for each in sums if each.kind != "engine")
    assert sum(round(span["dur"] * 1000) for span in on_workers) <= busy_ns
    begun = min(span["ts"] for span in spans if span["name"] == "engine")
    assert all(span["ts"] >= begun for span in on_workers)
    assert trace["otherData"]["seconds"]["worker: write"] > 0
    target = {name: torch.zeros(1 << 18) for name in state}
    loaded = dcpx.load(target, tmp_path)
    assert {"engine", "locate", "read", "verify"} <= {each.kind for each in loaded._noted.busy}
    assert_is_trace(loaded._noted.trace())


def test_a_timeline_is_no_field_and_is_not_sent_to_other_ranks(tmp_path: Path) -> None:
    report = dcpx.save({"a": torch.ones(4)}, tmp_path / "a", no_dist=True).result()
    json.dumps(dataclasses.asdict(report))
    assert pickle.loads(pickle.dumps(report)).phases == report.phases
    metadata: Any = dcp.save({"a": torch.ones(4)}, storage_writer=DcpxWriter(tmp_path / "b"))
    assert metadata.dcpx_report.files == 1
    assert metadata.dcpx_report.phases == ()
    assert len(pickle.dumps(metadata.dcpx_report)) < 2000


@pytest.mark.parametrize("path", [None, 3, "", b"x", "s3://bucket/trace.json", "~/trace.json"])
def test_trace_refuses_what_is_no_path(path: Any) -> None:
    with pytest.raises(OptionError, match="path must be"):
        write_trace({}, path)


def test_a_trace_that_cannot_be_written_names_its_file_and_leaves_nothing(tmp_path: Path) -> None:
    report = dcpx.save(STATE, tmp_path / "checkpoint").result()
    with pytest.raises(StorageError, match="No such file or directory") as caught:
        report.trace(tmp_path / "absent" / "trace.json")
    assert caught.value.path == str(tmp_path / "absent" / "trace.json")
    (tmp_path / "trace.json").mkdir()
    with pytest.raises(StorageError, match="Is a directory"):
        report.trace(tmp_path / "trace.json")
    for path in (".", "/"):
        with pytest.raises(StorageError, match="Is a directory"):
            report.trace(path)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "trace.json"}


def test_a_trace_takes_the_place_of_no_pipe_and_no_link(tmp_path: Path) -> None:
    pipe, link, real = tmp_path / "pipe", tmp_path / "link", tmp_path / "real"
    os.mkfifo(pipe)
    link.symlink_to(real)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # opening to write waits for a reader
    try:
        for path in (pipe, link, link):  # the link is dead at first
            write_trace({"rank": 3}, path)
        assert os.read(reader, 100) == real.read_bytes() == b'{"rank": 3}'
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_trace_has_any_name_that_a_file_can_have(tmp_path: Path) -> None:
    path = tmp_path / ("\N{SNOWMAN}" * 83 + ".json")  # 254 bytes
    write_trace({"rank": 3}, path)
    assert list(tmp_path.iterdir()) == [path]


def files_of(folder: Path) -> dict[str, Any]:
    """Returns the traces in DCPX_TRACE_DIR by their operation."""
    found = [json.loads(path.read_text()) for path in sorted(folder.iterdir())]
    for trace in found:
        assert_is_trace(trace)
    return {trace["otherData"]["operation"]: trace["otherData"] for trace in found}


def test_each_save_and_load_leaves_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "made" / "traces"
    monkeypatch.setenv("DCPX_TRACE_DIR", str(folder))
    saved = dcpx.save(STATE, tmp_path / "a").result()
    dcpx.async_save(STATE, tmp_path / "b").result()
    dcpx.load(dict(STATE), tmp_path / "a")
    found = files_of(folder)
    assert list(found) == ["async_save", "load", "save"]
    assert found["save"]["id"] == saved.save_id
    assert found["save"]["path"] == found["load"]["path"] == str(tmp_path / "a")
    dcpx.save(STATE, tmp_path / "a")
    dcp.save(STATE, storage_writer=DcpxWriter(tmp_path / "c"), no_dist=True)
    dcp.load(dict(STATE), storage_reader=DcpxReader(tmp_path / "c"), no_dist=True)
    assert len(list(folder.iterdir())) == 6


def test_a_manager_leaves_files_of_its_calls_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It reads its own records, too: the newest file must be that of a call, not of such a read.
    folder = tmp_path / "traces"
    monkeypatch.setenv("DCPX_TRACE_DIR", str(folder))
    with dcpx.CheckpointManager(tmp_path / "run", keep_last=1, no_dist=True) as manager:
        for step in (1, 2):
            manager.save(step, state=dict(STATE))
        manager.wait()
        manager.resume(state=dict(STATE))
    found = sorted(path.name.partition("-")[0] for path in folder.iterdir())
    assert found == ["async_save", "async_save", "load"]


def test_a_save_that_is_skipped_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCPX_TRACE_DIR", str(tmp_path / "traces"))
    monkeypatch.setattr("torch_dcpx.checkpoint.save._is_admitted", lambda _run: False)
    assert dcpx.async_save(STATE, tmp_path / "a", no_dist=True).result() is None
    assert not (tmp_path / "traces").exists()


def test_a_failed_save_leaves_its_file_with_the_type_of_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCPX_TRACE_DIR", str(tmp_path / "traces"))
    with pytest.raises(StorageError, match="no room"):
        dcpx.save(STATE, tmp_path / "a", options=failing_options())
    assert files_of(tmp_path / "traces")["save"]["error"]
    with raises_one(StorageError):
        dcp.save(STATE, storage_writer=DcpxWriter(tmp_path / "b", options=failing_options()),
                 no_dist=True)  # fmt: skip
    assert len(list((tmp_path / "traces").iterdir())) == 2
    with pytest.raises(dcpx.NotCommittedError):
        dcpx.load(dict(STATE), tmp_path / "a")
    assert files_of(tmp_path / "traces")["load"]["error"] == "NotCommittedError"


def test_a_directory_that_takes_no_trace_fails_no_save_and_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DCPX_TRACE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        dcpx.save(STATE, tmp_path / "a")
        dcpx.save(STATE, tmp_path / "b")
    (line,) = [r.getMessage() for r in caplog.records if "DCPX_TRACE_DIR" in r.getMessage()]
    assert str(tmp_path / "file") in line
    assert "File exists" in line or "Not a directory" in line
    assert dcpx.load(dict(STATE), tmp_path / "b").is_whole


@pytest.mark.parametrize("folder", ["s3://bucket/traces", "~/traces"])
def test_a_directory_of_no_machine_is_not_made_on_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DCPX_TRACE_DIR", folder)
    with caplog.at_level(logging.WARNING):
        dcpx.save(STATE, tmp_path / "a")
    assert "DCPX_TRACE_DIR must be a path of this machine, no URL" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("error", [MemoryError, RecursionError, TypeError])
def test_an_error_of_any_type_while_a_trace_is_written_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setenv("DCPX_TRACE_DIR", str(tmp_path / "traces"))
    monkeypatch.setattr(_trace_files, "trace_of", fail)
    assert dcpx.save(STATE, tmp_path / "a").result().ranks == 1
    with pytest.raises(StorageError, match="no room"):
        dcpx.save(STATE, tmp_path / "a", options=failing_options())


def test_files_of_a_failed_save_go_before_its_spans_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(PosixPlace, "remove_leftovers", lambda *_: done.append("removed"))
    monkeypatch.setattr(Timeline, "add_spans", lambda *_: done.append("noted"))
    with pytest.raises(StorageError, match="no room"):
        dcpx.save(STATE, tmp_path / "a", options=failing_options())
    assert done == ["removed", "noted"]


@pytest.mark.parametrize("pid", [None, 1])
def test_an_open_checkpoint_notes_its_reads_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pid: int | None
) -> None:
    dcpx.save(STATE, tmp_path)
    made: list[Timeline] = []
    begin = Timeline.__init__

    def noted(timeline: Timeline, *args: Any, **kwargs: Any) -> None:
        begin(timeline, *args, **kwargs)
        timeline.pid = pid or timeline.pid  # 1: as in a forked child of the one that opened it
        made.append(timeline)

    monkeypatch.setattr(Timeline, "__init__", noted)
    with dcpx.open_checkpoint(tmp_path) as checkpoint:
        checkpoint.load_tensors(["w"])
        before = [(timeline.phases, timeline.busy) for timeline in made]
        for _ in range(3):
            checkpoint.load_tensors(["w"])
    assert [(timeline.phases, timeline.busy) for timeline in made] == before
    assert any(phases for phases, _ in before)


def test_hostile_names_stay_in_the_directory(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("DCPX_TRACE_DIR", str(tmp_path / "traces"))
    timeline = Timeline("save", path="a\n\"'\x00</script>\ud800")
    timeline.host, timeline.operation_id = "../../evil/\nhost", "../../../etc/passwd"
    with timeline.phase("write"):
        pass
    timeline.end()
    timeline.end()  # once
    (path,) = (tmp_path / "traces").iterdir()
    assert ".." not in path.name
    spans = assert_is_trace(json.loads(path.read_text()))
    assert [span["name"] for span in spans] == ["save", "write"]


def test_a_profiler_sees_the_phases_of_every_call(tmp_path: Path) -> None:
    # Else it sees the thread that began it, and no save in the background.
    all_threads = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=all_threads) as profiled:
        dcpx.save(STATE, tmp_path / "a")
        dcpx.async_save(STATE, tmp_path / "b").result()
        dcpx.load(dict(STATE), tmp_path / "a")
    names = {event.name for event in profiled.events()}
    saves = ("plan", "exchange", "write", "sync", "vote", "commit")
    wanted = {f"dcpx.{call}/{phase}" for call in ("save", "async_save") for phase in saves}
    loads = ("plan", "exchange", "metadata", "locate", "read", "apply")
    wanted |= {"dcpx.async_save/snapshot", *(f"dcpx.load/{phase}" for phase in loads)}
    assert wanted <= names


def test_a_profiler_sees_the_phases_of_plug_ins(tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        dcp.save(STATE, storage_writer=DcpxWriter(tmp_path), no_dist=True)
        dcp.load(dict(STATE), storage_reader=DcpxReader(tmp_path), no_dist=True)
    names = {event.name for event in profiled.events() if event.name.startswith("dcpx.")}
    assert names == {
        "dcpx.save/plan", "dcpx.save/write", "dcpx.save/sync", "dcpx.save/commit",
        "dcpx.load/metadata", "dcpx.load/locate", "dcpx.load/read",
    }  # fmt: skip


def test_without_a_profiler_there_is_no_range(tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a range without a profiler")

    monkeypatch.setattr(torch.autograd.profiler, "record_function", refuse)
    dcpx.save(STATE, tmp_path)
