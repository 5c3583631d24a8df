"""Timelines: phases of saves and loads by thread, their traces, and the ranges of a profiler."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile
from traces import assert_is_trace

import torch_dcpx as dcpx
from torch_dcpx import DcpxReader, DcpxWriter
from torch_dcpx.timelines import Phase, Timeline

STATE = {"w": torch.arange(300_000.0), "step": 3}


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
