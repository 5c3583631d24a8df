"""What Azure does otherwise than S3: sizes before ends, tags in lists, deletes of what is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from object_outcomes import LARGE_NUMEL, retries, save, state_of
from support.azure_server import _account_signature
from support.object_client import opened

import torch_dcpx as dcpx
from torch_dcpx import StorageError
from torch_dcpx.storage.object_pages import listed
from torch_dcpx.storage.object_place import ObjectPlace
from torch_dcpx.storage.object_store import Bucket, bucket_of
from torch_dcpx.storage.object_url import ObjectUrl, location_of

if TYPE_CHECKING:
    from support.object_proxy import FaultProxy
    from support.object_server import ObjectServer

pytestmark = [
    pytest.mark.parametrize("object_server", ["az"], indirect=True),
    pytest.mark.slow,  # as all that needs Azurite
]


def bucket_at(url: str) -> tuple[Bucket, str]:
    place = location_of(url)
    assert isinstance(place, ObjectUrl)
    return bucket_of(place), place.key


def test_proxy_knows_the_requests_of_azure(object_prefix: str, object_proxy: FaultProxy) -> None:
    save(state_of(1, LARGE_NUMEL), object_prefix)
    asked = [one.kind for one in object_proxy.requests()]
    assert asked.count("upload_part") == 3
    assert asked.count("complete_upload") == 1
    assert "other" not in asked
    commits = object_proxy.requests("put_object", "/.metadata")
    assert [one.if_none_match for one in commits] == ["*"]
    save(state_of(2), object_prefix)
    tag = ObjectPlace(location_of(object_prefix)).state(".metadata")[0]  # type: ignore[arg-type]
    (again,) = object_proxy.requests("put_object", "/.metadata")[1:]
    assert again.if_match.startswith('"0x') and again.if_match != tag


def test_tag_in_a_listing_is_that_of_the_object(object_prefix: str) -> None:
    save(state_of(1), object_prefix)
    place = ObjectPlace(location_of(object_prefix))  # type: ignore[arg-type]
    listed = place.states()
    assert len(listed) == 2
    assert listed == {name: place.state(name) for name in listed}


@pytest.mark.parametrize("nbytes", [0, 1, 9, 10, 11])
def test_end_of_an_object_is_found_by_its_size(
    object_prefix: str, object_server: ObjectServer, nbytes: int
) -> None:
    data = bytes(range(nbytes))
    object_server.put(f"{object_prefix}/a", data)
    bucket, key = bucket_at(f"{object_prefix}/a")
    found = bucket.get_end(key, 10)
    assert (found.nbytes, bytes(found.body)) == (nbytes, data[-10:])
    assert bucket.head(key) == (nbytes, found.tag)


def test_object_that_is_replaced_between_its_size_and_its_end_is_an_error(
    object_prefix: str, object_server: ObjectServer, object_proxy: FaultProxy
) -> None:
    object_server.put(f"{object_prefix}/a", b"12345")
    bucket, key = bucket_at(f"{object_prefix}/a")
    object_proxy.hook("get_object", lambda _: object_server.put(f"{object_prefix}/a", b"54321"))
    with pytest.raises(StorageError, match="ConditionNotMet: get"):
        bucket.get_end(key, 3)


def test_removal_goes_on_where_some_are_gone(
    object_prefix: str, object_server: ObjectServer, object_proxy: FaultProxy
) -> None:
    there = [f"{object_prefix}/{number:03}" for number in range(0, 600, 3)]
    for url in there:
        object_server.put(url, b"")
    object_proxy.fail("delete_many", "lost_answer")
    with retries(1):
        bucket, key = bucket_at(object_prefix)
        bucket.delete([f"{key}/{number:03}" for number in range(600)])
    assert object_proxy.count("delete_many") == 1 + 3
    assert object_server.keys(object_prefix) == []


def test_parts_of_a_save_that_failed_are_no_objects(
    object_prefix: str, object_server: ObjectServer, object_proxy: FaultProxy
) -> None:
    """Nobody can end such an upload: Azure removes its parts after a week."""
    object_proxy.fail("complete_upload", "403", times=None)
    with retries(0), pytest.raises(StorageError, match="AccessDenied"):
        save(state_of(1, LARGE_NUMEL), object_prefix)
    assert object_proxy.count("upload_part") == 3
    assert object_server.keys(object_prefix) == []
    object_proxy.heal()
    save(state_of(2, LARGE_NUMEL), object_prefix)
    assert len(object_server.keys(object_prefix)) == 2


def test_emulator_is_found_by_its_variables(
    object_prefix: str, object_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `AZURE_STORAGE_USE_EMULATOR` says: by plain HTTP, with an account that is not here."""
    for name in object_proxy.environment():
        monkeypatch.delenv(name)
    with pytest.raises(StorageError, match="Account must be specified"):
        dcpx.save({"w": torch.ones(1)}, object_prefix)
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", object_proxy.url)
    with retries(0), pytest.raises(StorageError):
        dcpx.save({"w": torch.ones(1)}, object_prefix)
    assert object_proxy.count("put_object") == 1


def test_obstore_refuses_a_range_from_the_end(object_prefix: str) -> None:
    """Where it does not, a load needs no request for the size."""
    obstore = pytest.importorskip("obstore")
    with pytest.raises(obstore.exceptions.NotSupportedError, match="suffix range"):
        obstore.get(opened(object_prefix), "a", options={"range": {"suffix": 3}})


def test_listing_in_azure_is_signed_by_a_shared_access_signature(
    object_server: ObjectServer, object_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    object_server.put(f"{object_prefix}//x", b"")
    object_server.put(f"{object_prefix}/a", b"")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    given = "&".join(f"{name}={value}" for name, value in _account_signature().items())
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", given.replace("+", "%2B"))
    bucket, key = bucket_at(object_prefix)
    assert list(bucket.listing(key).objects) == ["a"]


def test_listing_in_azure_without_a_key_names_the_way_out(
    object_server: ObjectServer, object_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, key = bucket_at(object_prefix)
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    with pytest.raises(StorageError, match="SAS token: remove that object"):
        listed(bucket, key)
