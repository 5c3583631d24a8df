"""Jobs beneath one root in a store that meet at a request, and requests that nobody answers."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from object_managers import manager_of, names, resumed, save_steps
from object_outcomes import retries
from support.object_proxy import FaultProxy
from support.object_requests import Request
from support.object_server import ObjectServer

from torch_dcpx import ConcurrentSaveError, StorageError, UnsupportedError
from torch_dcpx.checkpoint.same_directory import Place
from torch_dcpx.integrity.leftovers import remove_leftovers
from torch_dcpx.storage import object_place
from torch_dcpx.storage.object_store import bucket_of
from torch_dcpx.storage.object_url import location_of


def test_note_of_a_damaged_checkpoint_outlives_a_pointer_that_cannot_be_read(
    object_prefix: str, object_proxy: FaultProxy
) -> None:
    """Else retention takes the damaged one for a good one, and removes the last good one."""
    first = manager_of(object_prefix)
    save_steps(first, 1, 2, 3)
    _note_damage(object_prefix, "step-3")
    with retries(0):
        manager = manager_of(object_prefix, keep_last=2)
        object_proxy.fail("get_object", "403", key="/newest")
        with pytest.raises(StorageError, match="newest"):
            save_steps(manager, 4)
        save_steps(manager, 4)
    assert manager.tags() == ["step-2", "step-3", "step-4"]


def test_note_of_another_job_stays_in_the_pointer(object_prefix: str) -> None:
    manager = manager_of(object_prefix, keep_last=2)
    save_steps(manager, 2, 3)
    _note_damage(object_prefix, "step-3")
    save_steps(manager, 4)
    assert manager_of(object_prefix).tags() == ["step-2", "step-3", "step-4"]


def _note_damage(url: str, tag: str) -> None:
    root = manager_of(url)._catalog.root
    root.examined(tag)
    root.note_damaged(tag)
    root.tell_damaged()


def test_pin_beside_a_commit_waits_and_is_of_what_is_there_then(
    object_prefix: str, object_proxy: FaultProxy
) -> None:
    """The save has looked for pins by then."""
    manager = manager_of(object_prefix)
    save_steps(manager, 1)
    pin, waits = threading.Thread(target=manager._catalog.pin, args=("step-1",)), []

    def begin(_: Request) -> None:
        pin.start()
        pin.join(1.0)
        waits.append(pin.is_alive())

    object_proxy.hook("put_object", begin, key="/step-1/.metadata")
    manager.save(1, state={"x": torch.full((40,), 7.0)})
    pin.join()
    assert waits == [True]
    assert resumed(manager) == 7
    with pytest.raises(UnsupportedError, match="pinned"):
        save_steps(manager, 1)


def test_pin_of_another_job_right_before_the_commit_is_respected(
    object_prefix: str, object_proxy: FaultProxy
) -> None:
    manager, other = manager_of(object_prefix), manager_of(object_prefix)
    save_steps(manager, 1)
    object_proxy.hook("put_object", lambda _: other.pin(1), key="/newest")
    with pytest.raises(Exception, match="pinned"):
        save_steps(manager, 1)
    assert resumed(other) == 1


def test_save_that_took_longer_than_the_grace_does_not_commit_without_its_data(
    object_prefix: str, object_proxy: FaultProxy, later: list[float]
) -> None:
    slow = manager_of(object_prefix, grace_s=1e-3)
    other = manager_of(object_prefix, keep_last=1)

    def overtake(_: Request) -> None:
        later[0] = 10_000.0
        save_steps(other, 2)

    object_proxy.hook("put_object", overtake, key="/newest")  # behind the upload
    with pytest.raises(StorageError, match=r"step-1/.*distcp.*No such file"):
        save_steps(slow, 1)
    assert manager_of(object_prefix).tags() == ["step-2"]


def test_removal_spares_what_another_job_commits_under_the_tag(
    object_prefix: str, object_server: ObjectServer, object_proxy: FaultProxy
) -> None:
    manager, other = manager_of(object_prefix), manager_of(object_prefix)
    save_steps(manager, 1, 2)
    seen = []

    def commit(_: Request) -> None:
        other.save(1, state={"x": torch.full((40,), 7.0)})
        seen.append(True)

    object_proxy.hook("put_object", commit, key="/.dcpx.deleted", is_done=True)
    manager.delete(1)
    assert seen and resumed(manager, tag=1) == 7
    assert ".dcpx.deleted" not in names(object_server, object_prefix, "step-1")


@pytest.mark.parametrize("how", ["reset", "403"])
def test_removal_that_nobody_answers_keeps_pins_away_and_a_refused_one_does_not(
    object_prefix: str, object_proxy: FaultProxy, how: str
) -> None:
    """It may be done later."""
    manager = manager_of(object_prefix)
    save_steps(manager, 1, 2)
    with retries(0):
        object_proxy.fail("delete_many", how, times=None if how == "reset" else 1)
        with pytest.raises(StorageError):
            manager.delete(1)
        object_proxy.heal()
        if how == "reset":
            with pytest.raises(ConcurrentSaveError, match="being deleted"):
                manager.pin(1)
        else:
            manager.pin(1)
    assert resumed(manager, tag=1) == 1


def test_pointer_that_nobody_answers_for_fails_the_save_and_leaves_nothing_of_it(
    object_prefix: str, object_server: ObjectServer, object_proxy: FaultProxy
) -> None:
    manager = manager_of(object_prefix)
    save_steps(manager, 1)
    with retries(0):
        object_proxy.fail("put_object", "reset", key="/newest", times=None)
        with pytest.raises(StorageError, match="its outcome is unknown") as caught:
            save_steps(manager, 2)
        assert caught.value.errno == errno.EIO
        object_proxy.heal()
    assert "data" not in names(object_server, object_prefix, "step-2")
    assert resumed(manager) == 1


def test_new_credentials_are_those_of_the_pointer_too(
    object_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = manager_of(object_prefix)
    save_steps(manager, 1)
    place = manager._catalog.root.files._place  # type: ignore[union-attr]
    before = place.bucket
    for name in ("AWS_SESSION_TOKEN", "AZURE_CLIENT_ID"):
        monkeypatch.setenv(name, "new")
    after = manager._catalog.root.files._place.bucket  # type: ignore[union-attr]
    assert after is not before and after is bucket_of(place.path)
    save_steps(manager, 2)
    assert resumed(manager) == 2


def test_gc_removes_marks_behind_the_data(
    object_prefix: str, later: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = manager_of(object_prefix)
    save_steps(manager, 1, 2)
    manager.delete(1)
    later[0] = 1e6
    removed: list[list[str]] = []
    unlink_all = object_place.ObjectPlace.unlink_all

    def noted(self: Any, files: Any) -> None:
        removed.append(list(files))
        unlink_all(self, removed[-1])

    monkeypatch.setattr(object_place.ObjectPlace, "unlink_all", noted)
    found = remove_leftovers(location_of(f"{object_prefix}/step-1"), 0.0)
    data, marks = (each for each in removed if each)
    assert marks == [".dcpx.deleted"] and all(name.endswith(".distcp") for name in data)
    assert set(found.files) == {*data, *marks}


def test_endpoints_tell_places_apart_but_not_what_lies_beneath() -> None:
    one, other = (location_of("s3://b/run", f"http://{host}:1") for host in ("a", "b"))
    assert Place(one, False).digest != Place(other, False).digest
    assert Place(one, False).digest == Place(location_of("s3://b/run", "http://a:1"), False).digest
    plain = location_of("s3://b/run")
    assert (plain / "x").is_relative_to(one) and plain.is_relative_to(one)
    assert not location_of("s3://b/running").is_relative_to(one)
    assert not Path("run").is_relative_to("s3://b/run")
