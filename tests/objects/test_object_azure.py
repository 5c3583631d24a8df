"""What Azure does otherwise than S3: sizes before ends, tags in lists, deletes of what is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from object_outcomes import LARGE_NUMEL, Store, bucket_of, retries, save, state_of
from support.azure_server import _account_signature
from support.object_client import opened

import torch_dcpx as dcpx
from torch_dcpx import StorageError
from torch_dcpx.storage.object_pages import listed
from torch_dcpx.storage.object_place import ObjectPlace
from torch_dcpx.storage.object_url import location_of

if TYPE_CHECKING:
    from support.object_proxy import FaultProxy

pytestmark = [
    pytest.mark.parametrize("object_server", ["az"], indirect=True),
    pytest.mark.slow,  # as all that needs Azurite
]


def test_proxy_knows_the_requests_of_azure(store: Store, proxy: FaultProxy) -> None:
    save(state_of(1, LARGE_NUMEL), store.url)
    asked = [one.kind for one in proxy.requests()]
    assert asked.count("upload_part") == 3
    assert asked.count("complete_upload") == 1
    assert "other" not in asked
    commits = proxy.requests("put_object", "/.metadata")
    assert [one.if_none_match for one in commits] == ["*"]
    save(state_of(2), store.url)
    tag = ObjectPlace(location_of(store.url)).state(".metadata")[0]  # type: ignore[arg-type]
    (again,) = proxy.requests("put_object", "/.metadata")[1:]
    assert again.if_match.startswith('"0x') and again.if_match != tag


def test_tag_in_a_listing_is_that_of_the_object(store: Store) -> None:
    save(state_of(1), store.url)
    place = ObjectPlace(location_of(store.url))  # type: ignore[arg-type]
    listed = place.states()
    assert len(listed) == 2
    assert listed == {name: place.state(name) for name in listed}


@pytest.mark.parametrize("nbytes", [0, 1, 9, 10, 11])
def test_end_of_an_object_is_found_by_its_size(store: Store, nbytes: int) -> None:
    data = bytes(range(nbytes))
    store.put("a", data)
    bucket, key = bucket_of(f"{store.url}/a")
    found = bucket.get_end(key, 10)
    assert (found.nbytes, bytes(found.body)) == (nbytes, data[-10:])
    assert bucket.head(key) == (nbytes, found.tag)


def test_object_that_is_replaced_between_its_size_and_its_end_is_an_error(
    store: Store, proxy: FaultProxy
) -> None:
    store.put("a", b"12345")
    bucket, key = bucket_of(f"{store.url}/a")
    proxy.hook("get_object", lambda _: store.put("a", b"54321"))
    with pytest.raises(StorageError, match="ConditionNotMet: get"):
        bucket.get_end(key, 3)


def test_removal_goes_on_where_some_are_gone(store: Store, proxy: FaultProxy) -> None:
    for number in range(0, 600, 3):
        store.put(f"{number:03}", b"")
    proxy.fail("delete_many", "lost_answer")
    with retries(1):
        bucket, key = bucket_of(store.url)
        bucket.delete([f"{key}/{number:03}" for number in range(600)])
    assert proxy.count("delete_many") == 1 + 3
    assert store.names() == set()


def test_parts_of_a_save_that_failed_are_no_objects(store: Store, proxy: FaultProxy) -> None:
    """Nobody can end such an upload: Azure removes its parts after a week."""
    proxy.fail("complete_upload", "403", times=None)
    with retries(0), pytest.raises(StorageError, match="AccessDenied"):
        save(state_of(1, LARGE_NUMEL), store.url)
    assert proxy.count("upload_part") == 3
    assert store.names() == set()
    proxy.heal()
    save(state_of(2, LARGE_NUMEL), store.url)
    assert len(store.names()) == 2


def test_emulator_is_found_by_its_variables(
    store: Store, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `AZURE_STORAGE_USE_EMULATOR` says: by plain HTTP, with an account that is not here."""
    for name in proxy.environment():
        monkeypatch.delenv(name)
    with pytest.raises(StorageError, match="Account must be specified"):
        dcpx.save({"w": torch.ones(1)}, store.url)
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", proxy.url)
    with retries(0), pytest.raises(StorageError):
        dcpx.save({"w": torch.ones(1)}, store.url)
    assert proxy.count("put_object") == 1


def test_obstore_refuses_a_range_from_the_end(store: Store) -> None:
    """Where it does not, a load needs no request for the size."""
    obstore = pytest.importorskip("obstore")
    with pytest.raises(obstore.exceptions.NotSupportedError, match="suffix range"):
        obstore.get(opened(store.url), "a", options={"range": {"suffix": 3}})


def test_listing_in_azure_is_signed_by_a_shared_access_signature(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("/x", b"")
    store.put("a", b"")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    given = "&".join(f"{name}={value}" for name, value in _account_signature().items())
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", given.replace("+", "%2B"))
    bucket, key = bucket_of(store.url)
    assert list(bucket.listing(key).objects) == ["a"]


def test_listing_in_azure_without_a_key_names_the_way_out(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, key = bucket_of(store.url)
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    with pytest.raises(StorageError, match="SAS token: remove that object"):
        listed(bucket, key)
