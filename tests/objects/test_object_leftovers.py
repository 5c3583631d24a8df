"""What failed and killed saves leave beneath a manager's root in a store, and when it may go."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
import torch
from object_managers import manager_of, names, resumed, save_steps
from object_outcomes import retries
from support.object_fixture import s3_alone

from torch_dcpx import StorageError
from torch_dcpx.integrity.leftovers import find_leftovers, remove_leftovers
from torch_dcpx.storage.object_store import Bucket, bucket_of
from torch_dcpx.storage.object_url import ObjectUrl, location_of

if TYPE_CHECKING:
    from support.object_proxy import FaultProxy
    from support.object_server import ObjectServer

HOUR = 3600.0
LEFT = "__1_0.0123456789ab.distcp"


def lose_metadata(server: ObjectServer, url: str) -> None:
    server.remove(f"{url}/.metadata")


def test_objects_of_a_killed_save_go_after_the_grace_and_lost_metadata_keep_theirs(
    object_prefix: str, object_server: ObjectServer, later: list[float]
) -> None:
    data = f"{object_prefix}/step-9/__0_0.0123456789ab.distcp"
    object_server.put(data, b"of a save that was killed")
    object_server.put(f"{object_prefix}/step-9/.dcpx.lock", b"")
    manager = manager_of(object_prefix, keep_last=2)
    save_steps(manager, 1)
    lost = f"{object_prefix}/step-8/__0_0.0123456789ab.distcp"
    object_server.put(lost, b"of a checkpoint whose metadata somebody has deleted")
    object_server.put(f"{object_prefix}/step-1/__1_0.0123456789ab.distcp", b"of a killed re-save")
    assert names(object_server, object_prefix, "step-9") == {"data", ".dcpx.lock"}
    later[0] = 2 * HOUR
    save_steps(manager, 2)
    assert names(object_server, object_prefix, "step-9") == set()
    assert names(object_server, object_prefix, "step-8") == {"data"}
    assert len(object_server.keys(f"{object_prefix}/step-1")) == 2
    assert manager.tags() == ["step-1", "step-2"]


def test_leftovers_are_listed_and_removed_when_they_are_old(
    object_prefix: str, object_server: ObjectServer, later: list[float]
) -> None:
    url = f"{object_prefix}/step-1"
    save_steps(manager_of(object_prefix), 1)
    left = "__1_0.0123456789ab.distcp"
    object_server.put(f"{url}/{left}", b"12345")
    object_server.put(f"{url}/.dcpx.probe.0123456789ab", b"1")
    place = location_of(url)
    found = find_leftovers(place)
    assert found.is_committed and found.files == {left: 5, ".dcpx.probe.0123456789ab": 1}
    assert remove_leftovers(place).files == {}
    later[0] = 24 * HOUR
    assert remove_leftovers(place).files == found.files
    assert names(object_server, object_prefix, "step-1") == {".metadata", "data"}
    assert remove_leftovers(place, 0.0).files == {}


def test_lost_metadata_keep_their_data_whatever_marks_lie_there(
    object_prefix: str, object_server: ObjectServer, later: list[float]
) -> None:
    """A mark of another save, or of a removal before, says nothing of this checkpoint."""
    every = manager_of(object_prefix)
    save_steps(every, 1, 2, 3)
    every.delete(2)
    save_steps(every, 2)  # beside `.dcpx.deleted` of the one before
    every._root.files.begin_save("step-1")  # of a save that was killed
    for step in (1, 2):
        lose_metadata(object_server, f"{object_prefix}/step-{step}")
    before = [names(object_server, object_prefix, f"step-{step}") for step in (1, 2)]
    assert before == [{".dcpx.lock", "data"}, {".dcpx.deleted", "data"}]
    keys = {step: object_server.keys(f"{object_prefix}/step-{step}") for step in (1, 2)}
    later[0] = 2 * HOUR
    manager = manager_of(object_prefix, keep_last=5, allow_fresh=True)
    save_steps(manager, 4)
    data = [k for k in keys[1] if k.endswith(".distcp")]
    assert data == [k for k in object_server.keys(f"{object_prefix}/step-1") if "distcp" in k]
    (data,) = (k for k in object_server.keys(f"{object_prefix}/step-2") if k in keys[2])
    assert data.endswith(".distcp")


def test_leftovers_of_a_removed_checkpoint_stay_for_the_grace_of_its_removal(
    object_prefix: str, object_server: ObjectServer, later: list[float]
) -> None:
    manager = manager_of(object_prefix, keep_last=1)
    save_steps(manager, 1)
    real = Bucket.listing
    save_steps(manager, 2)
    found = find_leftovers(location_of(f"{object_prefix}/step-1"))
    assert found.is_removed and set(found.files) >= {".dcpx.deleted"}

    def as_old(self: Bucket, prefix: str) -> object:
        """The data were put two days before the removal."""
        listing = real(self, prefix)
        objects = {
            name: one._replace(modified_s=one.modified_s - 48 * HOUR * name.endswith(".distcp"))
            for name, one in listing.objects.items()
        }
        return listing._replace(objects=objects)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "listing", as_old)
        assert remove_leftovers(location_of(f"{object_prefix}/step-1")).files == {}
        later[0] = 25 * HOUR
        assert remove_leftovers(location_of(f"{object_prefix}/step-1")).files == found.files
    assert names(object_server, object_prefix, "step-1") == set()


def test_save_that_failed_is_no_reason_against_a_fresh_start(
    object_prefix: str, object_server: ObjectServer, object_proxy: FaultProxy, later: list[float]
) -> None:
    object_proxy.fail("put_object", "403", times=None, key="distcp")
    with pytest.raises(StorageError):
        save_steps(manager_of(object_prefix), 1)
    object_proxy.heal()
    assert names(object_server, object_prefix, "step-1") == {".dcpx.lock"}
    manager = manager_of(object_prefix)
    assert manager.resume(state={"x": torch.zeros(40)}).is_fresh
    later[0] = 2 * HOUR
    save_steps(manager, 2)
    assert names(object_server, object_prefix, "step-1") == set()


def test_removal_that_did_not_end_leaves_a_checkpoint_that_can_be_pinned(
    object_prefix: str, object_server: ObjectServer, object_proxy: FaultProxy
) -> None:
    manager = manager_of(object_prefix)
    save_steps(manager, 1, 2)
    object_proxy.fail("delete_many", "403")
    with pytest.raises(StorageError):
        manager.delete(1)
    manager.pin(1)
    assert names(object_server, object_prefix, "step-1") == {".metadata", "data", ".dcpx.pin"}
    assert resumed(manager, tag=1) == 1


def test_object_that_is_gone_hides_no_refusal_of_another_in_the_batch(
    object_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = location_of(object_prefix)
    assert isinstance(url, ObjectUrl)
    bucket = bucket_of(url)

    gone, kept = f"{url.key}/gone", f"{url.key}/kept"
    bucket.put(kept, [b"1"])

    def delete(_store: object, keys: list[str]) -> None:
        if keys[0] == gone:  # as obstore of a batch on Azure: its first error is told, alone
            raise FileNotFoundError(keys[0])
        raise bucket._obstore.exceptions.PermissionDeniedError(keys[0])

    with monkeypatch.context() as patch:
        patch.setattr(bucket._obstore, "delete", delete)
        with pytest.raises(StorageError, match=r"PermissionDeniedError: .*/kept") as caught:
            bucket.delete([gone, kept])
        assert caught.value.errno == errno.EACCES
        bucket.delete([gone])


@s3_alone
def test_store_that_removes_no_objects_by_one_request_is_asked_for_each(
    object_prefix: str, object_server: ObjectServer, object_proxy: FaultProxy
) -> None:
    """As some gateways; it is asked for all of them once."""
    for number in range(3):
        object_server.put(f"{object_prefix}/{number}", b"1")
    object_proxy.fail("delete_many", "501", times=None)
    url = location_of(object_prefix)
    assert isinstance(url, ObjectUrl)
    with retries(1):
        bucket = bucket_of(url)
        bucket.delete([f"{url.key}/{number}" for number in range(2)])
        assert object_proxy.count("delete_many") == 2  # obstore's own repetition
        bucket.delete([f"{url.key}/2", f"{url.key}/none"])
    assert (object_proxy.count("delete_many"), object_proxy.count("delete")) == (2, 4)
    assert object_server.keys(object_prefix) == []


def test_probes_of_killed_jobs_go(
    object_prefix: str, object_server: ObjectServer, later: list[float]
) -> None:
    probe = ".dcpx.probe.0123456789ab"
    for place in ("", "final/", "step-1/"):
        object_server.put(f"{object_prefix}/{place}{probe}", b"1")
    manager = manager_of(object_prefix)
    save_steps(manager, 1)
    later[0] = 2 * HOUR
    save_steps(manager, 2)
    assert not [key for key in object_server.keys(object_prefix) if "probe" in key]
