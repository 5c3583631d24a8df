"""Several jobs at one root in a store: in turns, at one request, late, killed, by wrong clocks."""

from __future__ import annotations

import errno
import os
import threading
import time
from functools import partial

import pytest
import torch
from object_outcomes import LatePut, error_of, interrupted, retries, unanswered
from object_roots import HOUR, Root, clock_ahead
from support.object_proxy import FaultProxy
from support.object_requests import Request
from support.small_managers import resumed, save_steps

from torch_dcpx import (
    ConcurrentSaveError,
    OutcomeUnknownError,
    StorageError,
    UnsupportedError,
    WriteOptions,
)
from torch_dcpx.manager.store_root import StoreRoot
from torch_dcpx.storage.object_store import bucket_of

# ---- Two jobs -----------------------------------------------------------------------------------


def test_two_jobs_that_save_in_turns_keep_the_last_commits_of_both(root: Root) -> None:
    one, other = root.manager(keep_last=2), root.manager(keep_last=2)
    for step in (1, 3, 5):
        save_steps(one, step)
        save_steps(other, step + 1)
        assert root.whole() == ({1, 2} if step == 1 else {step, step + 1})
        root.assert_resumes(step + 1)
    root.assert_cleans_up(2)


def test_of_two_jobs_that_save_one_tag_at_once_the_later_commit_is_refused(
    root: Root, proxy: FaultProxy
) -> None:
    one, other = root.manager(keep_last=2), root.manager(keep_last=2)
    save_steps(one, 1)
    proxy.hook("put_object", lambda _: save_steps(other, 2), key="/step-2/.metadata")
    with retries(0):
        assert type(error_of(partial(save_steps, one, 2))) is ConcurrentSaveError
    assert root.whole() == {1, 2}
    root.assert_resumes(2)
    save_steps(one, 3)
    root.assert_resumes(3)
    root.assert_cleans_up(2)


@pytest.mark.parametrize("same_tag", [False, True])
def test_commit_of_an_earlier_job_that_arrives_late_loses_nothing(
    root: Root, monkeypatch: pytest.MonkeyPatch, same_tag: bool
) -> None:
    save_steps(root.manager(), 1)
    with retries(0), monkeypatch.context() as patch:
        late = LatePut(patch)
        late.takes = lambda key: key.endswith("/step-2/.metadata")
        late.before_next = unanswered
        zombie = root.manager(keep_last=2)
        assert type(error_of(partial(save_steps, zombie, 2))) is OutcomeUnknownError
        late.before_next = lambda: None
        assert resumed(root.manager()) == 1
        save_steps(root.manager(keep_last=2), 2 if same_tag else 3)
        if same_tag:
            with pytest.raises(StorageError):
                late.arrive()
        else:
            late.arrive()
        assert root.whole() == ({1, 2} if same_tag else {1, 2, 3})
    root.assert_resumes(2 if same_tag else 3)
    root.assert_cleans_up(2)


def test_root_without_conditional_writes_is_kept_as_well(root: Root, proxy: FaultProxy) -> None:
    options = WriteOptions(conditional_commit=False)
    save_steps(root.manager(keep_last=2, options=options), 1, 2, 3)
    assert not [one for one in proxy.requests("put_object") if one.if_match or one.if_none_match]
    assert root.whole() == {2, 3}
    root.assert_resumes(3)
    root.assert_cleans_up(2)


# ---- The pointer --------------------------------------------------------------------------------


def _raced(patch: pytest.MonkeyPatch, root: Root, *steps: int) -> None:
    """Has another job commit these steps between the next read of the pointer and its PUT."""
    real, other = StoreRoot._found, root.manager()

    def raced(files: StoreRoot) -> object:
        found = real(files)
        patch.setattr(StoreRoot, "_found", real)
        save_steps(other, *steps)
        return found

    patch.setattr(StoreRoot, "_found", raced)


def test_later_commit_of_another_job_stays_in_the_pointer(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = root.manager()
    save_steps(manager, 1)
    note = manager._root.note_committed

    def note_committed(*arguments: object) -> None:
        _raced(monkeypatch, root, 4, 5)
        note(*arguments)

    monkeypatch.setattr(manager._root, "note_committed", note_committed)
    save_steps(manager, 3)
    assert b'"step-5"' in root.get("newest")
    root.assert_resumes(5)


def test_job_that_notes_damage_beside_one_that_saves_takes_nothing_from_its_pointer(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(root.manager(), 1, 2)
    reader = root.manager()
    assert resumed(reader) == 2
    reader._root.note_damaged("step-2")
    _raced(monkeypatch, root, 3)
    reader._root.tell_damaged()
    pointer = root.manager()._root.files.read()
    assert pointer is not None
    assert (pointer.tag, len(pointer.damaged)) == ("step-3", 1)
    root.assert_resumes(3)


def _note_damage(root: Root, tag: str) -> None:
    noted = root.manager()._catalog.root
    noted.examined(tag)
    noted.note_damaged(tag)
    noted.tell_damaged()


@pytest.mark.parametrize("is_same_job", [False, True])
def test_note_of_a_damaged_checkpoint_stays_also_where_the_pointer_cannot_be_read_once(
    root: Root, proxy: FaultProxy, is_same_job: bool
) -> None:
    """Else retention takes the damaged one for a good one, and removes the last good one."""
    manager = root.manager(keep_last=2 if is_same_job else None)
    save_steps(manager, 2, 3)
    _note_damage(root, "step-3")
    if not is_same_job:
        with retries(0):
            manager = root.manager(keep_last=2)
            proxy.fail("get_object", "403", key="/newest")
            with pytest.raises(StorageError, match="newest"):
                save_steps(manager, 4)
    save_steps(manager, 4)
    assert root.manager().tags() == ["step-2", "step-3", "step-4"]


def test_pointer_that_nobody_answers_for_fails_the_save_and_leaves_nothing_of_it(
    root: Root, proxy: FaultProxy
) -> None:
    manager = root.manager()
    save_steps(manager, 1)
    with retries(0):
        proxy.fail("put_object", "reset", key="/newest", times=None)
        with pytest.raises(StorageError, match="its outcome is unknown") as caught:
            save_steps(manager, 2)
        assert caught.value.errno == errno.EIO
        proxy.heal()
    assert "data" not in root.kinds("step-2")
    assert resumed(manager) == 1


def test_new_credentials_are_those_of_the_pointer_too(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = root.manager()
    save_steps(manager, 1)
    place = manager._catalog.root.files._place  # type: ignore[union-attr]
    before = place.bucket
    for name in ("AWS_SESSION_TOKEN", "AZURE_CLIENT_ID"):
        monkeypatch.setenv(name, "new")
    after = manager._catalog.root.files._place.bucket  # type: ignore[union-attr]
    assert after is not before and after is bucket_of(place.path)
    save_steps(manager, 2)
    assert resumed(manager) == 2


# ---- Pins and removals --------------------------------------------------------------------------


def test_pin_beside_a_commit_waits_and_is_of_what_is_there_then(
    root: Root, proxy: FaultProxy
) -> None:
    """The save has looked for pins by then."""
    manager = root.manager()
    save_steps(manager, 1)
    pin, waits = threading.Thread(target=manager._catalog.pin, args=("step-1",)), []

    def begin(_: Request) -> None:
        pin.start()
        pin.join(1.0)
        waits.append(pin.is_alive())

    proxy.hook("put_object", begin, key="/step-1/.metadata")
    manager.save(1, state={"x": torch.full((40,), 7.0)})
    pin.join()
    assert waits == [True]
    assert resumed(manager) == 7
    with pytest.raises(UnsupportedError, match="pinned"):
        save_steps(manager, 1)


def test_pin_of_another_job_right_before_the_commit_is_respected(
    root: Root, proxy: FaultProxy
) -> None:
    manager, other = root.manager(), root.manager()
    save_steps(manager, 1)
    proxy.hook("put_object", lambda _: other.pin(1), key="/newest")
    with pytest.raises(Exception, match="pinned"):
        save_steps(manager, 1)
    assert resumed(other) == 1


def test_of_a_pin_and_a_removal_at_once_one_sees_the_other(root: Root, proxy: FaultProxy) -> None:
    manager, other = root.manager(), root.manager()
    save_steps(manager, 1, 2)
    refused: list[str] = []

    def remove(_: Request) -> None:
        with pytest.raises(UnsupportedError, match="it is pinned"):
            other.delete(1)
        refused.append("remove")

    def pin(_: Request) -> None:
        with pytest.raises(ConcurrentSaveError, match="it is being deleted"):
            other.pin(1)
        refused.append("pin")

    proxy.hook("put_object", remove, key="/.dcpx.pin", is_done=True)
    manager.pin(1)
    assert root.kinds("step-1") == {".metadata", "data", ".dcpx.pin"}
    manager.unpin(1)
    proxy.hook("put_object", pin, key="/.dcpx.deleted", is_done=True)
    manager.delete(1)
    assert refused == ["remove", "pin"]
    assert root.kinds("step-1") == {".dcpx.deleted", "data"}


def test_save_that_took_longer_than_the_grace_does_not_commit_without_its_data(
    root: Root, proxy: FaultProxy, later: list[float]
) -> None:
    slow, other = root.manager(grace_s=1e-3), root.manager(keep_last=1)

    def overtake(_: Request) -> None:
        later[0] = 10_000.0
        save_steps(other, 2)

    proxy.hook("put_object", overtake, key="/newest")  # behind the upload
    with pytest.raises(StorageError, match=r"step-1/.*distcp.*No such file"):
        save_steps(slow, 1)
    assert root.manager().tags() == ["step-2"]


def test_removal_spares_what_another_job_commits_under_the_tag(
    root: Root, proxy: FaultProxy
) -> None:
    manager, other, seen = root.manager(), root.manager(), []
    save_steps(manager, 1, 2)

    def commit(_: Request) -> None:
        other.save(1, state={"x": torch.full((40,), 7.0)})
        seen.append(True)

    proxy.hook("put_object", commit, key="/.dcpx.deleted", is_done=True)
    manager.delete(1)
    assert seen and resumed(manager, tag=1) == 7
    assert ".dcpx.deleted" not in root.kinds("step-1")


@pytest.mark.parametrize("how", ["reset", "403"])
def test_removal_that_nobody_answers_keeps_pins_away_and_a_refused_one_does_not(
    root: Root, proxy: FaultProxy, how: str
) -> None:
    """It may be done later."""
    manager = root.manager()
    save_steps(manager, 1, 2)
    with retries(0):
        proxy.fail("delete_many", how, times=None if how == "reset" else 1)
        with pytest.raises(StorageError):
            manager.delete(1)
        proxy.heal()
        if how == "reset":
            with pytest.raises(ConcurrentSaveError, match="being deleted"):
                manager.pin(1)
        else:
            manager.pin(1)
            assert root.kinds("step-1") == {".metadata", "data", ".dcpx.pin"}
    assert resumed(manager, tag=1) == 1


# ---- Time and processes -------------------------------------------------------------------------


@pytest.mark.parametrize("days", [-400, 400])
def test_clock_of_a_job_does_not_count(
    root: Root, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    base, now = root.base(), time.time
    root.reset(base)
    monkeypatch.setattr(time, "time", lambda: now() + days * 24 * HOUR)
    save_steps(root.manager(keep_last=2), 4, 5)
    assert {name for name in base if name.startswith(("step-1/", "step-9/"))} <= root.names()
    with clock_ahead(2 * HOUR):
        save_steps(root.manager(keep_last=2), 6)
    assert not [name for name in root.names() if name.startswith(("step-1/", "step-9/"))]
    root.assert_resumes(6)


def test_no_grace_removes_data_behind_the_next_commit(root: Root) -> None:
    manager = root.manager(keep_last=1, grace_s=0)
    save_steps(manager, 1, 2, 3, 4)
    assert {name.partition("/")[0] for name in root.names()} == {"newest", "step-3", "step-4"}
    root.assert_resumes(4)


def test_objects_of_others_cost_no_request_and_stay(root: Root, proxy: FaultProxy) -> None:
    manager = root.manager(keep_last=1, grace_s=0)
    save_steps(manager, 1, 2, 3)
    counts = []
    foreign = {f"events.{number}" for number in range(1100)}
    for step in (4, 5):
        proxy.clear()
        save_steps(manager, step)
        counts.append(proxy.count())
        for name in foreign if step == 4 else ():
            root.put(name, b"")
    assert counts[1] <= counts[0] + 8  # pages of the listings of the root
    assert foreign <= root.names()


def test_forked_child_is_refused_and_its_parent_goes_on(root: Root) -> None:
    manager = root.manager(keep_last=1)
    save_steps(manager, 1)
    pid = os.fork()
    if pid == 0:  # no test's code may run on in it
        errors = [error_of(manager.latest), error_of(root.manager().latest)]
        manager.close()
        os._exit(0 if [type(one) for one in errors] == [UnsupportedError] * 2 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    save_steps(manager, 2)
    root.assert_resumes(2)


@pytest.mark.parametrize("phase", ["begin_save", "write", "end_save", "tidy", "remove"])
def test_interrupted_save_leaves_the_old_or_the_new_checkpoint(
    root: Root, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    save_steps(root.manager(), 1, 2)
    manager = root.manager(keep_last=1)  # its first commit begins with a retention
    with monkeypatch.context() as patch:
        patch.setattr(StoreRoot, phase, interrupted)
        with pytest.raises(KeyboardInterrupt):
            save_steps(manager, 3)
    whole = root.whole()
    assert whole & {2, 3}
    root.assert_resumes(max(whole))
    root.assert_cleans_up(1)
