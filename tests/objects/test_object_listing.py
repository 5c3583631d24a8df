"""Keys that obstore takes for none, beneath a root or a checkpoint, are passed over."""

from __future__ import annotations

import errno
import io
import json
import urllib.error
import urllib.request
import xml.etree.ElementTree as ET
from email.message import Message
from http.client import IncompleteRead
from typing import Any

import pytest
from click.testing import CliRunner
from object_outcomes import Store, bucket_of, retries
from support.object_fixture import s3_alone
from support.object_proxy import FaultProxy
from support.object_server import ObjectServer
from support.small_managers import manager_of, resumed, save_steps

import torch_dcpx
from torch_dcpx import StorageError
from torch_dcpx.cli.app import app
from torch_dcpx.storage import object_pages
from torch_dcpx.storage.object_listing import Listing
from torch_dcpx.storage.object_pages import listed

NAMES = (
    "a", "b c", "d+e", "f%2Fg", "h&i=j", "k'l", "é", "日本", "m<n>", "~o", "p;q:r@s", '"', "..t",
)  # fmt: skip
_EMPTY = ET.fromstring("<ListBucketResult/>")


def _strays(server: ObjectServer) -> list[str]:
    """Returns keys that obstore refuses: Azurite takes no control characters."""
    return ["/x", "/", "a//x", *(["b\x01c", "d\x7f/e"] if server.scheme == "s3" else [])]


def _put(store: Store) -> None:
    for name in NAMES:
        store.put(name, b"x" * len(name))
        store.put(f"{name}-more/deep", b"")


def _same(found: Listing, expected: Listing) -> bool:
    return found.objects == expected.objects and sorted(found.prefixes) == sorted(expected.prefixes)


def test_own_listing_is_obstores(store: Store) -> None:
    """In names, sizes, tags and dates."""
    _put(store)
    bucket, key = bucket_of(store.url)
    expected = bucket.listing(key)
    assert sorted(expected.objects) == sorted(NAMES)
    assert _same(listed(bucket, key), expected)
    assert _same(listed(bucket, f"{key}/none"), Listing({}, []))


@pytest.mark.parametrize("pages", ["one page", "pages of one key"])
def test_stray_names_are_passed_over(store: Store, proxy: FaultProxy, pages: str) -> None:
    _put(store)
    bucket, key = bucket_of(store.url)
    expected = bucket.listing(key)
    strays = _strays(store.server)
    for stray in strays:
        store.put(stray, b"1")
    if pages == "pages of one key":
        is_signed_by_header = store.server.scheme == "az"  # obstore's own request
        proxy.fail("list", "partial_list", times=None, skip=is_signed_by_header)
    found = bucket.listing(key)
    more = {"f%2Fg", "a"} if store.server.scheme == "s3" else {"a"}
    assert more.issuperset(set(found.prefixes) - set(expected.prefixes))
    assert found.objects == expected.objects
    assert proxy.count("list") >= (len(NAMES) if "one key" in pages else 2)


@s3_alone
def test_folder_of_a_console_is_no_name(store: Store) -> None:
    for name in ("", "a", "sub/"):
        store.put(name, b"")
    bucket, key = bucket_of(store.url)
    assert (list(bucket.listing(key).objects), bucket.listing(key).prefixes) == (["a"], ["sub"])
    assert bucket.listing(f"{key}/sub") == Listing({}, [])
    assert _same(listed(bucket, key), bucket.listing(key))


@pytest.mark.parametrize("at", ["root", "checkpoint"])
def test_root_with_a_stray_name_is_used_as_any(store: Store, at: str) -> None:
    def manager() -> Any:
        return manager_of(store.url, keep_last=2, grace_s=0)

    def stray(tag: str) -> None:
        for name in _strays(store.server):
            store.put(f"{tag}/{name}" if at == "checkpoint" else name, b"x")

    with manager() as one:
        save_steps(one, 1)
        stray("step-1")
        save_steps(one, 2, 3, 4)
        stray("step-4")
        assert one.tags() == ["step-3", "step-4"]
    for tag in ("step-1", "step-2"):
        assert ".metadata" not in store.kinds(tag)
    listed = CliRunner().invoke(app, ["ls", store.url, "--json"])
    states = {row["name"]: row["state"] for row in json.loads(listed.stdout)}
    assert states["step-3"] == states["step-4"] == "committed"
    assert CliRunner().invoke(app, ["gc", store.url]).exit_code == 0
    assert torch_dcpx.verify(f"{store.url}/step-4").ok
    store.delete(store.data("step-4"))
    with manager() as one:  # past the newest one, which is damaged
        assert resumed(one) == 3.0


@s3_alone
def test_listing_that_is_none_is_an_error_and_asked_for_again(
    store: Store, proxy: FaultProxy
) -> None:
    store.put("/x", b"")
    store.put("a", b"")
    bucket, key = bucket_of(store.url)
    proxy.fail("list", "truncate", skip=1)
    assert list(bucket.listing(key).objects) == ["a"]
    for how, words in (("403", "AccessDenied: list 's3://"), ("500", "InternalError: list 's3://")):
        proxy.heal()
        proxy.fail("list", how, times=None, skip=1)
        with retries(0), pytest.raises(StorageError, match=words) as caught:
            bucket_of(store.url)[0].listing(key)
        assert "http" not in str(caught.value)


@s3_alone
@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (IncompleteRead(b"<Error><Code>SlowDown</Code>"), "^SlowDown: list 's3:.*': 503 Not now$"),
        (ConnectionResetError(), "^list 's3:.*': 503 Not now$"),
    ],
    ids=["in its words", "before them"],
)
def test_refusal_of_a_listing_that_is_cut_is_an_error_of_the_store(
    store: Store, monkeypatch: pytest.MonkeyPatch, cut: Exception, words: str
) -> None:
    class Body(io.BytesIO):
        def read(self, *_: object) -> bytes:
            raise cut

    def refuse(request: urllib.request.Request, **_: object) -> None:
        raise urllib.error.HTTPError(request.full_url, 503, "Not now", Message(), Body())

    store.put("/x", b"")
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    key = bucket_of(store.url)[1]
    with retries(0), pytest.raises(StorageError, match=words):
        bucket_of(store.url)[0].listing(key)


@s3_alone
def test_page_that_is_no_listing_is_not_an_empty_one(store: Store, proxy: FaultProxy) -> None:
    """obstore takes any XML for a listing, such as the page of a proxy with status 200."""
    store.put("a", b"")
    bucket, key = bucket_of(store.url)
    proxy.fail("list", "200")
    assert list(bucket.listing(key).objects) == ["a"]
    proxy.fail("list", "200", times=None)
    with pytest.raises(StorageError, match=r"list 's3://.*the answer is no listing: <Error>") as e:
        bucket.listing(key)
    assert e.value.errno == errno.EIO
    with pytest.raises(StorageError, match="no listing"):
        manager_of(store.url, allow_fresh=True).resume(state={})
    with pytest.raises(StorageError, match="no listing"):
        manager_of(store.url).tags()


@s3_alone
def test_empty_listing_is_believed_where_the_second_request_has_no_answer(
    store: Store, proxy: FaultProxy
) -> None:
    bucket, key = bucket_of(store.url)
    for how in ("403", "500", "reset"):
        proxy.heal()
        proxy.clear()
        proxy.fail("list", how, times=None, skip=1)
        assert bucket.listing(key) == Listing({}, []), how
        assert proxy.count("list") == 2, how


@s3_alone
def test_listing_of_a_public_bucket_has_no_signature(
    store: Store, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are credentials looked for."""
    asked: list[str] = []
    monkeypatch.setattr(object_pages, "_page", lambda _, url: asked.append(url) or _EMPTY)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    assert listed(*bucket_of(store.url)) == Listing({}, [])
    assert len(asked) == 1 and asked[0].endswith("%2F&delimiter=/") and "X-Amz" not in asked[0]
