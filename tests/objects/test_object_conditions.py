"""A store whose conditions of a PUT are of no use is refused, unless the user takes the risk; one
that takes a tag in its own form is spoken to in that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from email.message import Message
from typing import Any

import pytest
from click.testing import CliRunner
from object_outcomes import NEW, OLD, OTHER, Store, bucket_of, retries, save
from support.object_connection import Connection
from support.object_fixture import s3_alone
from support.object_proxy import FaultProxy
from support.small_managers import manager_of, resumed, save_steps

from torch_dcpx import ConcurrentSaveError, OutcomeUnknownError, StorageError, UnsupportedError
from torch_dcpx.cli.app import app
from torch_dcpx.storage import object_conditions
from torch_dcpx.storage.object_store import Bucket, _buckets

pytestmark = s3_alone  # Azure signs the conditions

_METADATA = "/.metadata"


@contextmanager
def _heard(change: Callable[[Message], None]) -> Iterator[None]:
    """In the block the store behind every proxy hears the headers of a PUT as `change` leaves
    them.
    """
    forward: Any = Connection._forward

    def changed(self: Connection, method: str, target: str, headers: Message, body: Any) -> Any:
        if method == "PUT":
            change(headers)
        return forward(self, method, target, headers, body)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "_forward", changed)
        yield


def _ignored(*names: str) -> AbstractContextManager[None]:
    """In the block the store ignores these headers of a PUT."""

    def forget(headers: Message) -> None:
        for name in names:
            del headers[name]

    return _heard(forget)


_NO_TAG = '"00000000000000000000000000000000"'


def _matched(take: Callable[[str], str]) -> AbstractContextManager[None]:
    """In the block the store reads If-Match of a PUT by `take`: a tag -> what it compares."""

    def read(headers: Message) -> None:
        tag = headers["If-Match"]
        if tag is not None:
            headers.replace_header("If-Match", take(tag))

    return _heard(read)


def _as_rgw_16(tag: str) -> str:
    """As Ceph's RGW 16.2, which compares what it hears with the tag without quotes."""
    return _NO_TAG if '"' in tag else f'"{tag}"'


@pytest.mark.parametrize(
    "names", [("If-None-Match", "If-Match"), ("If-Match",), ("If-None-Match",)]
)
def test_store_that_ignores_a_condition_is_refused_before_any_data_is_written(
    store: Store, proxy: FaultProxy, names: tuple[str, ...]
) -> None:
    old = store.prepared("old")
    proxy.clear()
    with retries(0), _ignored(*names):
        for _ in range(2):  # and it is not asked again
            with pytest.raises(UnsupportedError, match="conditional_commit=False"):
                save(NEW, store.url)
        assert not proxy.count("put_object", ".distcp")
        assert not proxy.count("create_upload")
        assert proxy.count("put_object", ".dcpx.probe.") == 3 - ("If-None-Match" in names)
    assert store.objects() == old


def test_store_that_ignores_conditions_is_used_where_the_user_says_so(
    store: Store, proxy: FaultProxy
) -> None:
    with retries(0), _ignored("If-None-Match", "If-Match"):
        for state in (OLD, NEW):
            save(state, store.url, conditional_commit=False)
            assert store.found({}, state) == ("new", [])
        proxy.fail("put_object", "lost_answer", key=_METADATA)
        save(OTHER, store.url, conditional_commit=False)
        assert store.found({}, OTHER) == ("new", [])
    puts = proxy.requests("put_object")
    assert not [one for one in puts if one.if_match or one.if_none_match or "probe" in one.key]


def test_store_that_takes_a_tag_without_its_quotes_alone_is_saved_to_again(
    store: Store, proxy: FaultProxy
) -> None:
    with retries(0), _matched(_as_rgw_16):
        for state in (OLD, NEW, OTHER):
            save(state, f"{store.url}/alone")
            assert store.found({}, state, "alone") == ("new", [])
        with manager_of(f"{store.url}/root", keep_last=2) as manager:
            save_steps(manager, 1, 2, 3)
            assert manager.tags() == ["step-2", "step-3"]
            assert resumed(manager) == 3.0


def _bucket(url: str) -> tuple[Bucket, str]:
    """Returns the bucket of a URL, of which this process knows nothing, and the key."""
    _buckets.clear()
    return bucket_of(url)


def test_form_of_a_tag_is_found_by_the_first_put_that_is_refused(
    store: Store, proxy: FaultProxy
) -> None:
    with retries(0), _matched(_as_rgw_16):
        bucket, key = _bucket(f"{store.url}/pointer")
        store.put("pointer", b"1")
        seen = bucket.get(key)
        bucket.put_if(key, [b"2"], seen.tag)
        with pytest.raises(StorageError, match="PreconditionFailed: put"):
            bucket.put_if(key, [b"3"], seen.tag)  # and not because of its form
    assert store.objects() == {"pointer": b"2"}
    assert proxy.count("put_object", ".dcpx.probe.") == 6


def test_store_that_takes_a_tag_in_no_form_is_refused_before_any_data_is_written(
    store: Store, proxy: FaultProxy
) -> None:
    old = store.prepared("old")
    proxy.clear()
    with retries(0), _matched(lambda _: _NO_TAG):
        with pytest.raises(UnsupportedError, match=r"tag that an object has.*conditional_commit=F"):
            save(NEW, store.url)
        assert not proxy.count("put_object", ".distcp")
        assert not proxy.count("create_upload")
        told = CliRunner().invoke(app, ["doctor", store.url])
        assert told.exit_code == 2 and "conditional_commit=False" in told.output
        save(NEW, store.url, conditional_commit=False)
    assert store.found(old, NEW) == ("new", [])


def test_store_that_ignores_a_tag_without_quotes_is_refused(
    store: Store, proxy: FaultProxy
) -> None:
    """It would take each tag in this form, and one save would go over another."""

    def read(headers: Message) -> None:
        tag = headers["If-Match"]
        del headers["If-Match"]
        if tag is not None and '"' in tag:
            headers["If-Match"] = _NO_TAG

    with retries(0), _heard(read), pytest.raises(UnsupportedError, match="ignores If-Match"):
        save(NEW, store.url)
    assert store.objects() == {}


def test_store_that_refuses_to_create_is_refused(store: Store, proxy: FaultProxy) -> None:
    proxy.fail("put_object", "412", times=None, key=".dcpx.probe.")
    with retries(0), pytest.raises(UnsupportedError, match="refuses If-None-Match where nothing"):
        save(NEW, store.url)
    assert store.objects() == {}


@pytest.mark.parametrize("how", ["lost_answer", "409"])
@pytest.mark.parametrize("skip", range(4))
def test_lost_answer_or_conflict_at_the_probe_is_no_refusal_and_is_asked_again(
    store: Store, proxy: FaultProxy, how: str, skip: int
) -> None:
    """S3 says by a conflict that another request is under way, and nothing of the condition."""
    proxy.fail("put_object", how, key=".dcpx.probe.", skip=skip)
    with retries(0 if how == "409" else 1):
        bucket, key = _bucket(store.url)
        bucket.check_conditional(key)
    assert bucket._conditions.has_quotes
    assert proxy.count("put_object", ".dcpx.probe.") == 5
    assert store.objects() == {}


def test_conflict_at_every_probe_forbids_no_later_save(
    store: Store, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_conditions, "_PAUSE_S", 0.01)
    proxy.fail("put_object", "409", times=None, key=".dcpx.probe.")
    with retries(0):
        bucket, key = _bucket(store.url)
        with pytest.raises(StorageError, match="ConditionalRequestConflict: put") as caught:
            bucket.check_conditional(key)
        assert not isinstance(caught.value, UnsupportedError)
        proxy.heal()
        save(NEW, store.url)
    assert store.found({}, NEW) == ("new", [])


@pytest.mark.parametrize(
    ("kind", "skip"), [("put_object", 0), ("put_object", 1), ("put_object", 3), ("head_object", 0)]
)
def test_refused_probe_leaves_nothing(
    store: Store, proxy: FaultProxy, kind: str, skip: int
) -> None:
    proxy.fail(kind, "403", times=None, key=".dcpx.probe.", skip=skip)
    with retries(0):
        bucket, key = _bucket(store.url)
        with pytest.raises(StorageError, match=f"{store.url}/.dcpx.probe."):
            bucket.check_conditional(key)
    assert store.objects() == {}
    is_first = kind == "put_object" and not skip
    assert proxy.count("delete_many") == (not is_first)  # else there is nothing


@pytest.mark.parametrize("before", ["old", "none"])
def test_condition_that_is_refused_while_nothing_has_changed_is_a_refusal(
    store: Store, proxy: FaultProxy, before: str
) -> None:
    old = store.prepared(before)
    proxy.fail("put_object", "412", times=None, key=_METADATA)
    with retries(0), pytest.raises(StorageError, match="PreconditionFailed: put") as caught:
        save(NEW, store.url)
    assert not isinstance(caught.value, (ConcurrentSaveError, OutcomeUnknownError))
    assert store.objects() == old


def test_pointer_that_is_refused_while_nothing_has_changed_is_a_refusal(
    store: Store, proxy: FaultProxy
) -> None:
    with retries(0), manager_of(store.url) as manager:
        save_steps(manager, 1)
        proxy.fail("put_object", "412", times=None, key="/newest")
        with pytest.raises(StorageError, match="PreconditionFailed: put") as caught:
            save_steps(manager, 2)
        assert not isinstance(caught.value, OutcomeUnknownError)
        proxy.heal()
