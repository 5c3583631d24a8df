"""Jobs of C++ in a directory that other nodes mount: left behind where nothing moves any more."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.machine import seconds

import torch_dcpx
from torch_dcpx import StorageError, _mounts
from torch_dcpx._answers import StorageTimeout, current_timeout, wait_at_most
from torch_dcpx._mounts import Mount
from torch_dcpx.checkpoint.load import load_for_another_call
from torch_dcpx.reader import reader
from torch_dcpx.storage.answered_job import AnsweredReadJob, AnsweredVerifyJob, AnsweredWriteJob
from torch_dcpx.views import ls

BOUND_S = 0.4


class Job:
    """Stands for a job of C++ whose call lasts until the test ends it, or its hook raises."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.goes_on = threading.Event()
        self.has_begun = threading.Event()
        self.has_ended = threading.Event()
        self.looks_until_done = self._looks = 0
        self.total_bytes = 9
        self.said: list[str] = []

    @property
    def moved(self) -> int:
        """Is another number at each look, until so many have been: then the call returns."""
        if self.looks_until_done:
            self._looks += 1
        if self._looks > self.looks_until_done:
            self.goes_on.set()
        return self._looks

    done_bytes = moved

    def write(self, *_: Any, progress: Callable[[int], None], **__: Any) -> str:
        (self.path / "left.distcp").write_bytes(b"x")
        return self._work(progress)

    def read(self, *_: Any) -> str:
        return self._work(lambda _: None)

    def sum(self, progress: Callable[[int, int], None]) -> str:
        return self._work(lambda done: progress(done, self.total_bytes))

    def _work(self, hook: Callable[[int], None]) -> str:
        self.has_begun.set()
        try:
            self.goes_on.wait()
            hook(self.moved)
            return "done"
        finally:
            self.has_ended.set()

    def report(self, **_: Any) -> dict[str, int]:
        names = ("done_bytes", "copy_ns", "write_ns", "fsync_ns")
        return dict.fromkeys(names, self.moved)

    def created(self) -> list[str]:
        return ["left.distcp"]

    def abandon(self) -> None:
        self.said.append("abandon")

    def close(self) -> None:
        self.said.append("close")

    def leave(self) -> None:
        self.said.append("leave")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.goes_on.set()
    assert made.has_ended.wait(seconds(30)) or not made.has_begun.is_set()


CALLS: dict[str, Callable[[Job], Any]] = {
    "write": lambda job: AnsweredWriteJob(job, job.path).write([], progress=None),
    "read": lambda job: AnsweredReadJob(job, job.path).read([]),
    "sum": lambda job: AnsweredVerifyJob(job, job.path).sum(),
}


@pytest.mark.parametrize("call", CALLS)
def test_job_that_moves_nothing_raises_with_its_directory(job: Job, call: str) -> None:
    with (
        wait_at_most(StorageTimeout(BOUND_S, "save_timeout_s")),
        pytest.raises(StorageError, match="no answer for") as caught,
    ):
        CALLS[call](job)
    assert (caught.value.errno, caught.value.path) == (errno.ETIMEDOUT, str(job.path))


@pytest.mark.parametrize("call", CALLS)
def test_job_that_moves_is_waited_for_as_long_as_it_takes(job: Job, call: str) -> None:
    job.looks_until_done = 20  # one in each quarter of the wait
    with wait_at_most(StorageTimeout(BOUND_S, "save_timeout_s")):
        assert CALLS[call](job) == "done"


def wait_until_said(job: Job, said: list[str]) -> None:
    deadline = time.monotonic() + seconds(30)
    while job.said != said:
        assert time.monotonic() < deadline, job.said
        time.sleep(0.01)


def test_write_that_was_left_removes_its_own_files_when_it_ends(job: Job) -> None:
    made = AnsweredWriteJob(job, job.path)
    with wait_at_most(StorageTimeout(BOUND_S, "save_timeout_s")), pytest.raises(StorageError):
        made.write([], progress=None)
    made.abandon()  # as the writer does, while the job's threads use what that would close
    assert made.created() == []
    assert job.said == []
    job.goes_on.set()
    wait_until_said(job, ["abandon"])
    assert not (job.path / "left.distcp").exists()


def test_write_that_was_left_is_tidied_up_by_its_own_thread_alone(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = AnsweredWriteJob(job, job.path)
    ends, goes_on = threading.Event(), threading.Event()

    def created() -> list[str]:
        ends.set()
        assert goes_on.wait(seconds(30))
        return []

    monkeypatch.setattr(job, "created", created)
    with wait_at_most(StorageTimeout(BOUND_S, "save_timeout_s")), pytest.raises(StorageError):
        made.write([], progress=None)
    job.goes_on.set()
    assert ends.wait(seconds(30))
    made.abandon()  # of the caller, while the thread of the call does so
    assert made.created() == job.said == []
    goes_on.set()
    wait_until_said(job, ["abandon"])


def test_read_that_was_left_is_told_so_at_once_and_closed_when_it_ends(job: Job) -> None:
    made = AnsweredReadJob(job, job.path)
    with wait_at_most(StorageTimeout(BOUND_S, "load_timeout_s")), pytest.raises(StorageError):
        made.read([])
    made.close()
    assert job.said == ["leave"]
    job.goes_on.set()
    wait_until_said(job, ["leave", "close"])


def test_places_on_shared_file_systems_save_load_and_verify_by_such_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_mounts, "HAS_SHARED", True)
    monkeypatch.setattr(_mounts, "MOUNTS", {str(tmp_path): Mount(str(tmp_path), "fuse.new", ())})
    monkeypatch.setattr(_mounts, "_kept", {})
    told: list[int] = []
    options = torch_dcpx.WriteOptions(progress=lambda done, *_: told.append(done))
    state = {"large": torch.randn(3_000_000), "step": 3}
    torch_dcpx.save(state, tmp_path / "a", no_dist=True, options=options)
    found = {"large": torch.zeros(3_000_000), "step": 0}
    report = torch_dcpx.load(found, tmp_path / "a", no_dist=True)
    assert torch.equal(found["large"], state["large"]) and found["step"] == 3
    assert report.read.in_place_bytes == 0  # a read that is left must not write to the target
    assert torch_dcpx.verify(tmp_path / "a").ok
    assert told


def test_calls_that_are_a_part_of_another_share_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("step-1", "step-2"):
        torch_dcpx.save({"x": torch.ones(3)}, tmp_path / name)
    found: list[StorageTimeout] = []

    def note(true: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            found.append(current_timeout())
            return true(*args)

        return noted

    monkeypatch.setattr(reader, "locate_items", note(reader.locate_items))
    own = StorageTimeout(9, "load_timeout_s")
    with wait_at_most(own):
        load_for_another_call({"x": torch.zeros(3)}, reader.quiet_reader(tmp_path / "step-1", None))
        assert found == [own] and current_timeout() is own
    found.clear()
    monkeypatch.setattr(ls, "listed", note(ls.listed))
    torch_dcpx.ls(tmp_path)
    assert len(found) == 2 and found[0] is found[1]
