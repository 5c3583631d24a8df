"""A manager's root in a store: its requests, and what removed, failed and killed saves leave there.

What it keeps, resumes and refuses as anywhere: tests/contracts/test_managers.py.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from object_outcomes import bucket_of, retries
from object_roots import HOUR, Root
from support.object_fixture import s3_alone
from support.object_proxy import FaultProxy
from support.object_server import ObjectServer
from support.small_managers import manager_of, resumed, save_steps

import torch_dcpx as dcpx
from torch_dcpx import (
    DcpxReader,
    NotCommittedError,
    OptionError,
    ReadOptions,
    StorageError,
    UnsupportedError,
    WriteOptions,
)
from torch_dcpx.checkpoint.same_directory import Place
from torch_dcpx.integrity.leftovers import find_leftovers, remove_leftovers
from torch_dcpx.manager import resume
from torch_dcpx.storage import object_place
from torch_dcpx.storage.object_store import Bucket
from torch_dcpx.storage.object_url import location_of

LEFT = "__1_0.0123456789ab.distcp"


def test_requests_of_a_save_and_a_resume(
    root: Root, proxy: FaultProxy, object_server: ObjectServer
) -> None:
    """As docs/howto/object_stores.md counts them."""
    data = [*["head data"] * (object_server.scheme == "az"), "get data", "get data"]
    manager = root.manager()
    save_steps(manager, 1, 2)
    proxy.clear()
    save_steps(manager, 3)
    assert asked(proxy) == [
        "head .dcpx.pin",  # is there something that a save must not replace?
        "get newest",  # has another job been here?
        "head .metadata",
        "head .metadata",  # does it replace one?
        "put .dcpx.lock",
        "put data",
        "get newest",  # the tag is noted ...
        "put newest",
        "head .dcpx.pin",
        "put .metadata",  # ... committed ...
        "delete_many",
        "head .metadata",
        "get .metadata",
        "get newest",  # ... and pointed to
        "put newest",
        *["list"] * 4,  # behind it: what may go of the root and of each checkpoint
    ]
    proxy.clear()
    resumed(root.manager())
    assert asked(proxy) == [
        "get newest",
        "list",  # is it whole?
        "get .metadata",
        *["get .metadata", *data],  # the manager's record
        "list",  # may something be newer than what the pointer names?
        "head .metadata",
        *["get .metadata", *data],  # the load
    ]


def asked(proxy: FaultProxy) -> list[str]:
    """Returns the requests that have come, in order."""
    found = []
    for one in proxy.requests():
        name = one.key.rpartition("/")[2]
        name = "data" if name.endswith(".distcp") else name
        found.append(f"{one.kind.removesuffix('_object')} {name}".strip())
    return found


def test_what_a_root_in_a_store_does_not_take(root: Root, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="grace_s must be None"):
        manager_of(str(tmp_path), grace_s=1.0)
    with pytest.raises(OptionError, match=r"read_options\.endpoint"):
        root.manager(
            options=WriteOptions(endpoint="http://a:1"),
            read_options=ReadOptions(endpoint="http://b:1"),
        )
    with pytest.raises(UnsupportedError, match="'gs://b/run' is a URL"):
        manager_of("gs://b/run")
    with pytest.raises(UnsupportedError, match=r"tag='.*://.*a' goes on with a query"):
        root.manager().save("a?b", state={"x": 1})
    assert root.manager().latest() is None


def test_endpoint_is_that_of_the_options(root: Root, object_endpoint: str, tmp_path: Path) -> None:
    manager = root.manager(options=WriteOptions(endpoint=object_endpoint))
    save_steps(manager, 1, 2)
    assert resumed(manager) == 2
    assert not manager.dry_run(lambda name: name, tag=1).dropped
    manager.save(7, model=torch.nn.Linear(3, 2))
    assert manager.export(7, tmp_path / "out").tensors == 2


def test_endpoints_tell_places_apart_but_not_what_lies_beneath() -> None:
    one, other = (location_of("s3://b/run", f"http://{host}:1") for host in ("a", "b"))
    assert Place(one, False).digest != Place(other, False).digest
    assert Place(one, False).digest == Place(location_of("s3://b/run", "http://a:1"), False).digest
    plain = location_of("s3://b/run")
    assert (plain / "x").is_relative_to(one) and plain.is_relative_to(one)
    assert not location_of("s3://b/running").is_relative_to(one)
    assert not Path("run").is_relative_to("s3://b/run")


def test_later_checkpoint_of_no_manager_is_told(root: Root) -> None:
    save_steps(root.manager(), 100)
    for name in ("step-90", "step-200"):
        dcpx.save({"state": {"x": torch.ones(40)}}, f"{root.url}/{name}", no_dist=True)
    info = root.manager().resume(state={"x": torch.zeros(40)})
    assert (info.tag, [tag for tag, _ in info.skipped]) == ("step-100", ["step-200"])


@pytest.mark.parametrize("count", [1, 9])
def test_resume_chooses_again_when_another_job_removes_what_it_has_chosen(
    root: Root, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """A directory refuses to remove what is being read; nobody knows that of objects."""
    manager, other, removed = root.manager(), root.manager(), list[str]()
    save_steps(other, *range(1, 11))
    reader = resume.quiet_reader

    def late(path: str, options: ReadOptions) -> DcpxReader:
        if len(removed) < count:
            other.delete(path.rpartition("/")[2])
            removed.append(path)
        return reader(path, options)

    monkeypatch.setattr(resume, "quiet_reader", late)
    if count == 1:
        assert resumed(manager) == 9
        removed.clear()
        with pytest.raises(NotCommittedError):
            resumed(manager, tag=8)
    else:
        with pytest.raises(NotCommittedError):
            resumed(manager)
        assert resumed(manager) == 1


# ---- The grace ----------------------------------------------------------------------------------


def test_data_of_a_removed_checkpoint_stay_for_the_grace(root: Root, later: list[float]) -> None:
    manager = root.manager(keep_last=1, grace_s=100)
    save_steps(manager, 1)
    with dcpx.open_checkpoint(f"{root.url}/step-1") as reader:
        save_steps(manager, 2)
        assert root.kinds("step-1") == {".dcpx.deleted", "data"}
        with pytest.raises(NotCommittedError):
            dcpx.load_tensors(f"{root.url}/step-1")
        later[0] = 97.0
        save_steps(manager, 3)
        assert reader["state.x"][...].tolist() == [1.0] * 40
        later[0] = 101.0
        save_steps(manager, 4)
        with pytest.raises(StorageError, match="No such file"):
            reader["state.x"][...]
    assert root.kinds("step-1") == set()
    assert root.kinds("step-4") == {".metadata", "data"}


def test_grace_is_an_hour_unless_it_is_given(root: Root, later: list[float]) -> None:
    manager = root.manager(keep_last=1)
    save_steps(manager, 1, 2)
    for hours, kinds in ((0.9, {".dcpx.deleted", "data"}), (1.01, set())):
        later[0] = hours * HOUR
        save_steps(manager, 3)
        assert root.kinds("step-1") == kinds


def test_copy_outlives_what_it_is_a_copy_of(root: Root, later: list[float]) -> None:
    manager = root.manager(keep_last=2)
    save_steps(manager, 1, 2, 3)
    for name in root.names("step-3"):
        root.put(f"mine/{name}", root.get(f"step-3/{name}"))
    for step in (4, 5, 6):
        later[0] += 1.1 * HOUR
        save_steps(manager, step)
    assert root.kinds("step-3") == set()
    assert root.kinds("mine") == {".metadata", "data"}
    assert (manager.tags(), resumed(manager, tag="mine")) == (["mine", "step-5", "step-6"], 3.0)


def test_tag_that_is_saved_again_while_its_data_wait_is_whole(
    root: Root, later: list[float]
) -> None:
    manager = root.manager(keep_last=1)
    save_steps(manager, 1, 2)
    assert ".metadata" not in root.kinds("step-1")
    save_steps(manager, 1)  # the newest now
    assert root.kinds("step-1") == {".metadata", "data", ".dcpx.deleted"}
    manager.pin(1)  # `.dcpx.deleted` is of another one
    manager.unpin(1)
    later[0] = HOUR
    save_steps(manager, 2)  # which keeps but the last: 1 goes, now for its own hour
    assert manager.tags() == ["step-2"]
    later[0] = 3 * HOUR
    save_steps(manager, 3)
    assert root.kinds("step-1") == set()
    assert resumed(manager) == 3


def test_objects_of_a_killed_save_and_probes_go_after_the_grace_and_lost_metadata_keep_theirs(
    root: Root, later: list[float]
) -> None:
    root.put("step-9/__0_0.0123456789ab.distcp", b"of a save that was killed")
    root.put("step-9/.dcpx.lock", b"")
    for place in ("", "final/", "step-1/"):
        root.put(f"{place}.dcpx.probe.0123456789ab", b"1")
    manager = root.manager(keep_last=2)
    save_steps(manager, 1)
    root.put("step-8/__0_0.0123456789ab.distcp", b"whose metadata somebody has deleted")
    root.put(f"step-1/{LEFT}", b"of a killed re-save")
    assert root.kinds("step-9") == {"data", ".dcpx.lock"}
    later[0] = 2 * HOUR
    save_steps(manager, 2)
    assert root.kinds("step-9") == set() and root.kinds("step-8") == {"data"}
    assert len(root.names("step-1")) == 2
    assert not [name for name in root.names() if "probe" in name]
    assert manager.tags() == ["step-1", "step-2"]


def test_lost_metadata_keep_their_data_whatever_marks_lie_there(
    root: Root, later: list[float]
) -> None:
    """A mark of another save, or of a removal before, says nothing of this checkpoint."""
    every = root.manager()
    save_steps(every, 1, 2, 3)
    every.delete(2)
    save_steps(every, 2)  # beside `.dcpx.deleted` of the one before
    every._root.files.begin_save("step-1")  # of a save that was killed
    root.delete("step-1/.metadata", "step-2/.metadata")
    assert root.kinds("step-1") == {".dcpx.lock", "data"}
    assert root.kinds("step-2") == {".dcpx.deleted", "data"}
    before = {step: root.names(f"step-{step}") for step in (1, 2)}
    later[0] = 2 * HOUR
    save_steps(root.manager(keep_last=5, allow_fresh=True), 4)
    assert {name for name in before[1] if name.endswith(".distcp")} <= root.names("step-1")
    (left,) = root.names("step-2") & before[2]  # without the mark
    assert left.endswith(".distcp")


def test_save_that_failed_is_no_reason_against_a_fresh_start(
    root: Root, proxy: FaultProxy, later: list[float]
) -> None:
    proxy.fail("put_object", "403", times=None, key="distcp")
    with pytest.raises(StorageError):
        save_steps(root.manager(), 1)
    proxy.heal()
    assert root.names() == {"step-1/.dcpx.lock"}
    manager = root.manager()
    assert manager.resume(state={"x": torch.zeros(40)}).is_fresh
    later[0] = 2 * HOUR
    save_steps(manager, 2)
    assert root.kinds("step-1") == set()


# ---- gc and removals ----------------------------------------------------------------------------


def test_leftovers_are_listed_and_removed_when_they_are_old(root: Root, later: list[float]) -> None:
    save_steps(root.manager(), 1)
    root.put(f"step-1/{LEFT}", b"12345")
    root.put("step-1/.dcpx.probe.0123456789ab", b"1")
    place = location_of(f"{root.url}/step-1")
    found = find_leftovers(place)
    assert found.is_committed and found.files == {LEFT: 5, ".dcpx.probe.0123456789ab": 1}
    assert remove_leftovers(place).files == {}
    later[0] = 24 * HOUR
    assert remove_leftovers(place).files == found.files
    assert root.kinds("step-1") == {".metadata", "data"}
    assert remove_leftovers(place, 0.0).files == {}


def test_leftovers_of_a_removed_checkpoint_stay_for_the_grace_of_its_removal_and_marks_go_last(
    root: Root, later: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(root.manager(keep_last=1), 1, 2)
    place = location_of(f"{root.url}/step-1")
    found = find_leftovers(place)
    assert found.is_removed and set(found.files) >= {".dcpx.deleted"}
    real, unlink_all = Bucket.listing, object_place.ObjectPlace.unlink_all
    removed: list[list[str]] = []

    def as_old(self: Bucket, prefix: str) -> object:
        """The data were put two days before the removal."""
        listing = real(self, prefix)
        objects = {
            name: one._replace(modified_s=one.modified_s - 48 * HOUR * name.endswith(".distcp"))
            for name, one in listing.objects.items()
        }
        return listing._replace(objects=objects)

    def noted(self: object_place.ObjectPlace, files: list[str]) -> None:
        removed.append(list(files))
        unlink_all(self, removed[-1])

    monkeypatch.setattr(Bucket, "listing", as_old)
    monkeypatch.setattr(object_place.ObjectPlace, "unlink_all", noted)
    assert remove_leftovers(place).files == {}
    later[0] = 25 * HOUR
    assert remove_leftovers(place).files == found.files
    assert root.kinds("step-1") == set()
    data, marks = (each for each in removed if each)
    assert marks == [".dcpx.deleted"] and all(name.endswith(".distcp") for name in data)
    assert set(found.files) == {*data, *marks}


def test_object_that_is_gone_hides_no_refusal_of_another_in_the_batch(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, key = bucket_of(root.url)
    gone, kept = f"{key}/gone", f"{key}/kept"
    bucket.put(kept, [b"1"])

    def delete(_store: object, keys: list[str]) -> None:
        if keys[0] == gone:  # as obstore of a batch on Azure: its first error is told, alone
            raise FileNotFoundError(keys[0])
        raise bucket._obstore.exceptions.PermissionDeniedError(keys[0])

    monkeypatch.setattr(bucket._obstore, "delete", delete)
    with pytest.raises(StorageError, match=r"PermissionDeniedError: .*/kept") as caught:
        bucket.delete([gone, kept])
    assert caught.value.errno == errno.EACCES
    bucket.delete([gone])


@s3_alone
def test_store_that_removes_no_objects_by_one_request_is_asked_for_each(
    root: Root, proxy: FaultProxy
) -> None:
    """As some gateways; it is asked for all of them once."""
    for number in range(3):
        root.put(str(number), b"1")
    proxy.fail("delete_many", "501", times=None)
    with retries(1):
        bucket, key = bucket_of(root.url)
        bucket.delete([f"{key}/{number}" for number in range(2)])
        assert proxy.count("delete_many") == 2  # obstore's own repetition
        bucket.delete([f"{key}/2", f"{key}/none"])
    assert (proxy.count("delete_many"), proxy.count("delete")) == (2, 4)
    assert root.names() == set()
