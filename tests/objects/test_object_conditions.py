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
from object_managers import manager_of, resumed, save_steps
from object_outcomes import NEW, OLD, OTHER, found, objects_at, prepared, retries, save
from support.object_connection import Connection
from support.object_fixture import s3_alone
from support.object_proxy import FaultProxy
from support.object_server import ObjectServer

from torch_dcpx import ConcurrentSaveError, OutcomeUnknownError, StorageError, UnsupportedError
from torch_dcpx.cli.app import app
from torch_dcpx.storage import object_conditions
from torch_dcpx.storage.object_store import Bucket, _buckets, bucket_of
from torch_dcpx.storage.object_url import ObjectUrl, location_of

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
    object_server: ObjectServer,
    object_prefix: str,
    object_proxy: FaultProxy,
    names: tuple[str, ...],
) -> None:
    old = prepared(object_server, object_prefix, "old")
    object_proxy.clear()
    with retries(0), _ignored(*names):
        for _ in range(2):  # and it is not asked again
            with pytest.raises(UnsupportedError, match="conditional_commit=False"):
                save(NEW, object_prefix)
        assert not object_proxy.count("put_object", ".distcp")
        assert not object_proxy.count("create_upload")
        assert object_proxy.count("put_object", ".dcpx.probe.") == 3 - ("If-None-Match" in names)
    assert objects_at(object_server, object_prefix) == old


def test_store_that_ignores_conditions_is_used_where_the_user_says_so(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy
) -> None:
    with retries(0), _ignored("If-None-Match", "If-Match"):
        for state in (OLD, NEW):
            save(state, object_prefix, conditional_commit=False)
            assert found(object_server, object_prefix, {}, state) == ("new", [])
        object_proxy.fail("put_object", "lost_answer", key=_METADATA)
        save(OTHER, object_prefix, conditional_commit=False)
        assert found(object_server, object_prefix, {}, OTHER) == ("new", [])
    puts = object_proxy.requests("put_object")
    assert not [one for one in puts if one.if_match or one.if_none_match or "probe" in one.key]


def test_store_that_takes_a_tag_without_its_quotes_alone_is_saved_to_again(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy
) -> None:
    with retries(0), _matched(_as_rgw_16):
        for state in (OLD, NEW, OTHER):
            save(state, f"{object_prefix}/alone")
            assert found(object_server, f"{object_prefix}/alone", {}, state) == ("new", [])
        with manager_of(f"{object_prefix}/root", keep_last=2) as manager:
            save_steps(manager, 1, 2, 3)
            assert manager.tags() == ["step-2", "step-3"]
            assert resumed(manager) == 3.0


def _bucket(url: str) -> tuple[Bucket, str]:
    """Returns the bucket of a URL, of which this process knows nothing, and the key."""
    _buckets.clear()
    place = location_of(url)
    assert isinstance(place, ObjectUrl)
    return bucket_of(place), place.key


def test_form_of_a_tag_is_found_by_the_first_put_that_is_refused(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy
) -> None:
    with retries(0), _matched(_as_rgw_16):
        bucket, key = _bucket(f"{object_prefix}/pointer")
        object_server.put(f"{object_prefix}/pointer", b"1")
        seen = bucket.get(key)
        bucket.put_if(key, [b"2"], seen.tag)
        with pytest.raises(StorageError, match="PreconditionFailed: put"):
            bucket.put_if(key, [b"3"], seen.tag)  # and not because of its form
    assert objects_at(object_server, object_prefix) == {"pointer": b"2"}
    assert object_proxy.count("put_object", ".dcpx.probe.") == 6


def test_store_that_takes_a_tag_in_no_form_is_refused_before_any_data_is_written(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy
) -> None:
    old = prepared(object_server, object_prefix, "old")
    object_proxy.clear()
    with retries(0), _matched(lambda _: _NO_TAG):
        with pytest.raises(UnsupportedError, match=r"tag that an object has.*conditional_commit=F"):
            save(NEW, object_prefix)
        assert not object_proxy.count("put_object", ".distcp")
        assert not object_proxy.count("create_upload")
        told = CliRunner().invoke(app, ["doctor", object_prefix])
        assert told.exit_code == 2 and "conditional_commit=False" in told.output
        save(NEW, object_prefix, conditional_commit=False)
    assert found(object_server, object_prefix, old, NEW) == ("new", [])


def test_store_that_ignores_a_tag_without_quotes_is_refused(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy
) -> None:
    """It would take each tag in this form, and one save would go over another."""

    def read(headers: Message) -> None:
        tag = headers["If-Match"]
        del headers["If-Match"]
        if tag is not None and '"' in tag:
            headers["If-Match"] = _NO_TAG

    with retries(0), _heard(read), pytest.raises(UnsupportedError, match="ignores If-Match"):
        save(NEW, object_prefix)
    assert objects_at(object_server, object_prefix) == {}


def test_store_that_refuses_to_create_is_refused(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy
) -> None:
    object_proxy.fail("put_object", "412", times=None, key=".dcpx.probe.")
    with retries(0), pytest.raises(UnsupportedError, match="refuses If-None-Match where nothing"):
        save(NEW, object_prefix)
    assert objects_at(object_server, object_prefix) == {}


@pytest.mark.parametrize("how", ["lost_answer", "truncate"])
@pytest.mark.parametrize("skip", range(4))
def test_lost_answer_to_the_probe_finds_the_same(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy, how: str, skip: int
) -> None:
    object_proxy.fail("put_object", how, key=".dcpx.probe.", skip=skip)
    with retries(1):
        bucket, key = _bucket(object_prefix)
        bucket.check_conditional(key)
    assert bucket._conditions.has_quotes
    assert object_proxy.count("put_object", ".dcpx.probe.") == 5
    assert objects_at(object_server, object_prefix) == {}


@pytest.mark.parametrize("skip", range(4))
def test_conflict_at_the_probe_is_no_refusal_and_is_asked_again(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy, skip: int
) -> None:
    """S3 says by it that another request is under way, and nothing of the condition."""
    object_proxy.fail("put_object", "409", key=".dcpx.probe.", skip=skip)
    with retries(0):
        bucket, key = _bucket(object_prefix)
        bucket.check_conditional(key)
    assert bucket._conditions.has_quotes
    assert objects_at(object_server, object_prefix) == {}


def test_conflict_at_every_probe_forbids_no_later_save(
    object_server: ObjectServer,
    object_prefix: str,
    object_proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(object_conditions, "_PAUSE_S", 0.01)
    object_proxy.fail("put_object", "409", times=None, key=".dcpx.probe.")
    with retries(0):
        bucket, key = _bucket(object_prefix)
        with pytest.raises(StorageError, match="ConditionalRequestConflict: put") as caught:
            bucket.check_conditional(key)
        assert not isinstance(caught.value, UnsupportedError)
        object_proxy.heal()
        save(NEW, object_prefix)
    assert found(object_server, object_prefix, {}, NEW) == ("new", [])


@pytest.mark.parametrize(
    ("kind", "skip"), [("put_object", 0), ("put_object", 1), ("put_object", 3), ("head_object", 0)]
)
def test_refused_probe_leaves_nothing(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy, kind: str, skip: int
) -> None:
    object_proxy.fail(kind, "403", times=None, key=".dcpx.probe.", skip=skip)
    with retries(0):
        bucket, key = _bucket(object_prefix)
        with pytest.raises(StorageError, match=f"{object_prefix}/.dcpx.probe."):
            bucket.check_conditional(key)
    assert objects_at(object_server, object_prefix) == {}
    is_first = kind == "put_object" and not skip
    assert object_proxy.count("delete_many") == (not is_first)  # else there is nothing


@pytest.mark.parametrize("before", ["old", "none"])
def test_condition_that_is_refused_while_nothing_has_changed_is_a_refusal(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy, before: str
) -> None:
    old = prepared(object_server, object_prefix, before)
    object_proxy.fail("put_object", "412", times=None, key=_METADATA)
    with retries(0), pytest.raises(StorageError, match="PreconditionFailed: put") as caught:
        save(NEW, object_prefix)
    assert not isinstance(caught.value, (ConcurrentSaveError, OutcomeUnknownError))
    assert objects_at(object_server, object_prefix) == old


def test_pointer_that_is_refused_while_nothing_has_changed_is_a_refusal(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy
) -> None:
    with retries(0), manager_of(object_prefix) as manager:
        save_steps(manager, 1)
        object_proxy.fail("put_object", "412", times=None, key="/newest")
        with pytest.raises(StorageError, match="PreconditionFailed: put") as caught:
            save_steps(manager, 2)
        assert not isinstance(caught.value, OutcomeUnknownError)
        object_proxy.heal()
