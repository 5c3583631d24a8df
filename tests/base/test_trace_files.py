"""Files of traces: `report.trace`, and those that DCPX_TRACE_DIR asks for."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.async_saves import failing_options
from support.saves import raises_one
from traces import assert_is_trace

import torch_dcpx as dcpx
from torch_dcpx import DcpxReader, DcpxWriter, _trace_files
from torch_dcpx._trace_files import write_trace
from torch_dcpx.errors import OptionError, StorageError
from torch_dcpx.storage.place import PosixPlace
from torch_dcpx.timelines import Timeline

STATE = {"w": torch.arange(300_000.0), "step": 3}


def test_trace_refuses_what_is_no_path() -> None:
    for path in (None, 3, "", b"x", "s3://bucket/trace.json", "~/trace.json"):
        with pytest.raises(OptionError, match="path must be"):
            write_trace({}, path)  # type: ignore[arg-type]


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
        for path in (pipe, link):  # the link is dead
            write_trace({"rank": 3}, path)
        with pytest.raises(OptionError, match="is there"):
            write_trace({"rank": 4}, link)
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
