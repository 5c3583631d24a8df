"""The record of a root's holder: who is gone, where that is proved and where it is watched."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from root_jobs import NEVER, PROOFS, alarm, elsewhere, locks, manager_of, put, save, save_once
from support.fuse_fixture import MountedClient
from support.machine import seconds
from trainings import Log, Patch

from torch_dcpx import ConcurrentSaveError, StorageError
from torch_dcpx._answers import answered
from torch_dcpx.storage import root_lock, root_record
from torch_dcpx.storage.directory import storage_error
from torch_dcpx.storage.holder import Holder, now_text
from torch_dcpx.storage.names import root_lock_name
from torch_dcpx.storage.root_record import FileRecord, Seen, identity_of


@pytest.fixture(autouse=True)
def patch(monkeypatch: Patch) -> Any:
    for name, value in PROOFS.items():
        monkeypatch.setattr(root_lock, name, value)
    return monkeypatch.setattr


@pytest.mark.parametrize("has_flock", [True, False])
def test_silent_job_of_another_machine_is_gone(tmp_path: Path, patch: Any, has_flock: bool) -> None:
    put(tmp_path, elsewhere())
    if not has_flock:
        patch(fcntl, "flock", _refuse)
    patch(root_lock, "_GONE_S", 0.3)
    with manager_of(tmp_path) as manager:
        save(manager, 1)
        assert locks(tmp_path) == [root_lock_name(2)]


def test_silence_adds_up_over_calls(tmp_path: Path, patch: Any) -> None:
    put(tmp_path, elsewhere())
    patch(root_lock, "_GONE_S", 1.5)
    patch(root_lock, "_LIMIT_S", 0.8)
    refusals = 0
    with manager_of(tmp_path) as manager:
        while not manager.tags() and refusals < 9:
            try:
                save(manager, 1)
            except ConcurrentSaveError:
                refusals += 1
                if refusals == 1:  # a renewal ends the silence
                    put(tmp_path, elsewhere(renewed=now_text()))
        assert (manager.tags(), refusals) == (["step-1"], 2)


def _refuse(*_: Any) -> None:
    raise OSError(errno.ENOLCK, "no locks")


def test_renewals_go_on_once_a_storage_answers_slowly(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(root_lock, "_GONE_S", 2.0)
    monkeypatch.setattr(root_lock, "_RENEW_S", 0.01)
    answers, has_renewed = threading.Event(), threading.Event()
    true_put = FileRecord.put

    def put_slowly(self: FileRecord, holder: Holder) -> bool:
        def call() -> bool:
            time.sleep(0.5 if answers.is_set() else 3)
            return True

        answered(call, "put", str(self.path))
        has_renewed.set()
        return true_put(self, holder)

    with manager_of(tmp_path) as manager:
        save(manager, 1)
        with monkeypatch.context() as patch:
            patch.setattr(FileRecord, "put", put_slowly)
            assert not has_renewed.wait(2.5)  # one has had no answer
            answers.set()
            assert has_renewed.wait(seconds(20))


def test_job_of_another_machine_that_renews_is_refused_to(tmp_path: Path, patch: Any) -> None:
    put(tmp_path, elsewhere())
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(0.05):
            put(tmp_path, elsewhere(renewed=now_text()))

    renewer = threading.Thread(target=renew)
    renewer.start()
    try:
        patch(root_lock, "_LIMIT_S", NEVER)
        who = "host=node7 pid=4711 since="
        with alarm(), pytest.raises(ConcurrentSaveError, match=who) as caught:
            save(manager_of(tmp_path), 1)
    finally:
        ended.set()
        renewer.join()
    assert caught.value.owner == str(elsewhere(since=caught.value.owner.partition("since=")[2]))
    assert manager_of(tmp_path).tags() == []


def test_wait_has_a_limit(tmp_path: Path, patch: Any) -> None:
    assert root_lock._LIMIT_S <= 60.0
    patch(root_lock, "_LIMIT_S", 0.3)
    for root in ("", "inode:1@0"):  # which another machine may know by another number
        put(tmp_path, elsewhere(root=root))
        with pytest.raises(ConcurrentSaveError, match=r"node7.*save_timeout_s"):
            save(manager_of(tmp_path), 1)


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b"\xff", b'{"format": 1}', elsewhere().encoded()[:40]]
)
def test_record_that_says_nothing_is_watched(tmp_path: Path, patch: Any, content: bytes) -> None:
    (tmp_path / root_lock_name(7)).write_bytes(content)
    patch(root_lock, "_GONE_S", 0.3)
    save(manager_of(tmp_path), 1)
    assert locks(tmp_path) == [root_lock_name(8)]


@pytest.mark.parametrize("kind", ["link", "directory", "pipe"])
def test_what_is_no_file_is_no_record(tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for number in (1, 2, 7):
        root = tmp_path / str(number)
        root.mkdir()
        strange = root / root_lock_name(number)
        if kind == "link":
            strange.symlink_to(victim)
        else:
            (os.mkdir if kind == "directory" else os.mkfifo)(strange)
        for step in (1, 2, 3):
            with alarm(), manager_of(root) as manager:  # nobody waits for the silence of one
                save(manager, step)
                own = set(locks(root)) - {strange.name}
                assert own == {root_lock_name(step + (step >= number))}
        assert strange.is_symlink() or not strange.is_file()
        assert victim.read_text() == "mine"


def test_thread_that_waits_for_another_names_no_other_job(
    tmp_path: Path, patch: Any, caplog: Log
) -> None:
    patch(root_lock, "_ENDING_S", NEVER)
    own = Holder.own(identity_of(tmp_path))
    put(tmp_path, own)
    patch(root_lock, "_tokens", {own.token})  # about to be in the table
    end = threading.Timer(0.5, root_lock._tokens.clear)
    end.start()
    with alarm():
        save(manager_of(tmp_path), 1)
    end.join()
    assert "holds it" not in caplog.text


def test_flock_tells_of_another_container_or_number_of_the_root(tmp_path: Path) -> None:
    """Some file systems in user space number what they hold anew at each mount."""
    for root in ("", "inode:1@0"):
        put(tmp_path, Holder.own(root)._replace(token="other", space="pid:[1]", has_flock=True))
        with (tmp_path / root_lock_name(1)).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(ConcurrentSaveError, match=f"pid={os.getpid()} "):
                save(manager_of(tmp_path), 1)
        save_once(tmp_path)
        for name in locks(tmp_path):
            (tmp_path / name).unlink()


def test_stolen_root_is_noticed_by_the_next_save(tmp_path: Path) -> None:
    manager = manager_of(tmp_path)
    save(manager, 1)
    put(tmp_path, Holder.own("")._replace(pid=os.getppid(), start="", token="other"), 2)
    with pytest.raises(ConcurrentSaveError, match="another job's manager saves there"):
        save(manager, 2)
    assert manager_of(tmp_path).tags() == ["step-1"]
    assert locks(tmp_path) == [root_lock_name(1), root_lock_name(2)]


def test_root_that_is_stolen_in_a_save_commits_nothing(tmp_path: Path, patch: Any) -> None:
    manager = manager_of(tmp_path)
    save(manager, 1)
    patch(manager._root.files, "check_save", lambda *_: put(tmp_path, elsewhere(), 2))
    with pytest.raises(ConcurrentSaveError, match=r"host=node7.*nothing is committed") as caught:
        save(manager, 2)
    assert caught.value.errno == errno.ESTALE
    assert manager_of(tmp_path).tags() == ["step-1"]


def test_root_is_free_where_the_first_look_at_it_fails(tmp_path: Path, monkeypatch: Patch) -> None:
    gc.collect()  # managers of other tests
    for fails in (OSError(errno.EIO, "injected"), OSError(errno.ESTALE, "gone")):

        def put(*_: Any, fails: OSError = fails) -> bool:
            raise storage_error("write", tmp_path, fails)

        with monkeypatch.context() as patch, manager_of(tmp_path) as manager:
            patch.setattr(FileRecord, "put", put)
            with pytest.raises(StorageError, match="write"):
                save(manager, 1)
        assert root_lock._held == {}
        _until(lambda: all(t.name != "dcpx-root" for t in threading.enumerate()), seconds(60))
        save_once(tmp_path)


def test_own_record_that_one_look_misses_is_not_another_jobs(tmp_path: Path, patch: Any) -> None:
    real, missed = FileRecord._put, [True]

    def put(self: FileRecord, holder: Holder) -> bool:
        return not missed.pop() if missed else real(self, holder)

    with manager_of(tmp_path) as manager:
        save(manager, 1)
        patch(FileRecord, "_put", put)
        manager._root.files.lock.check()
        assert not missed


def test_record_that_another_client_has_replaced_is_looked_at_again(
    two_clients: tuple[MountedClient, ...],
) -> None:
    client, root = two_clients[0], two_clients[0].path / "root"
    save_once(root)
    record = FileRecord(root)
    client.forget()
    client.fail("getattr", errno.ESTALE, "root/.dcpx.root*", times=1)
    assert record.look().holder is not None
    client.forget()
    client.fail("getattr", errno.EIO, "root/.dcpx.root*")
    with pytest.raises(StorageError, match=r"\.dcpx\.root\.1': Input/output error"):
        record.look()


def test_listing_that_lacks_a_new_record_is_no_proof_of_it(tmp_path: Path, patch: Any) -> None:
    real, calls = root_record._numbers, [0]

    def numbers(directory: Any) -> list[int]:
        calls[0] += 1
        return [] if calls[0] == 2 else real(directory)

    patch(root_record, "_numbers", numbers)
    with manager_of(tmp_path) as manager:
        save(manager, 1)
        assert manager.tags() == ["step-1"]


def test_thread_renews_and_tells_of_a_stolen_root(tmp_path: Path, patch: Any, caplog: Log) -> None:
    patch(root_lock, "_RENEW_S", 0.05)
    manager = manager_of(tmp_path)
    save(manager, 1)
    record = tmp_path / root_lock_name(1)
    before, limit = record.read_bytes(), seconds(60)
    _until(lambda: record.read_bytes() != before, limit)
    put(tmp_path, elsewhere(), 2)
    _until(lambda: "another job has taken" in caplog.text, limit)
    assert caplog.text.count("another job has taken") == 1


def test_store_that_does_not_answer_holds_up_no_other_root(tmp_path: Path, patch: Any) -> None:
    patch(root_lock, "_RENEW_S", 0.05)
    silent, other = tmp_path / "silent", tmp_path / "other"
    is_asked, answers, put_anew = threading.Event(), threading.Event(), FileRecord.put

    def put_slowly(record: FileRecord, holder: Holder) -> bool:
        if record.path == silent and threading.current_thread().name == "dcpx-root":
            is_asked.set()
            answers.wait()
        return put_anew(record, holder)

    patch(FileRecord, "put", put_slowly)
    try:
        with manager_of(silent) as first, manager_of(other) as second:
            save(first, 1)
            assert is_asked.wait(seconds(60))
            save(second, 1)
            record = other / root_lock_name(1)
            before = record.read_bytes()
            _until(lambda: record.read_bytes() != before, seconds(60))
    finally:
        answers.set()


def test_thread_is_begun_outside_the_guard(tmp_path: Path, patch: Any) -> None:
    # The new thread may collect a manager, which waits for the guard, before it has begun.
    are_held, start = [], threading.Thread.start

    def look(thread: threading.Thread) -> None:
        if thread.name == "dcpx-root":
            are_held.append(root_lock._guard.is_own)
        start(thread)

    patch(threading.Thread, "start", look)
    save_once(tmp_path)
    assert are_held == [False]


def test_thread_waits_for_one_that_is_about_to_hold_the_root(tmp_path: Path, patch: Any) -> None:
    is_taken, is_looked_at = threading.Event(), threading.Event()
    take, look = FileRecord.take, FileRecord.look

    def take_slowly(record: FileRecord, seen: Seen, holder: Holder) -> Holder | None:
        made = take(record, seen, holder)
        is_taken.set()
        assert is_looked_at.wait(seconds(60))
        return made

    def look_at(record: FileRecord) -> Seen:
        seen = look(record)
        if is_taken.is_set():
            is_looked_at.set()
        return seen

    patch(FileRecord, "take", take_slowly)
    patch(FileRecord, "look", look_at)
    with manager_of(tmp_path) as first, manager_of(tmp_path) as second:
        other = threading.Thread(target=save, args=(first, 1))
        other.start()
        assert is_taken.wait(seconds(60))
        save(second, 2)
        other.join()
        assert first.tags() == ["step-1", "step-2"]


def _until(is_done: Callable[[], bool], limit_s: float) -> None:
    ended = threading.Event()
    for _ in range(int(limit_s / 0.02)):
        if is_done():
            return
        ended.wait(0.02)
    raise AssertionError("it did not happen")
