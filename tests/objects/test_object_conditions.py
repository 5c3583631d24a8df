"""A store that ignores the conditions of a PUT is refused, unless the user takes the risk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from typing import Any

import pytest
from object_outcomes import NEW, OLD, OTHER, found, objects_at, prepared, retries, save
from support.object_connection import Connection
from support.object_fixture import s3_alone
from support.object_proxy import FaultProxy
from support.object_server import ObjectServer

from torch_dcpx import UnsupportedError

pytestmark = s3_alone  # Azure signs the conditions

_METADATA = "/.metadata"


@contextmanager
def _ignored(*names: str) -> Iterator[None]:
    """In the block the store behind every proxy ignores these headers of a PUT."""
    forward: Any = Connection._forward

    def forgetful(self: Connection, method: str, target: str, headers: Message, body: Any) -> Any:
        if method == "PUT":
            for name in names:
                del headers[name]
        return forward(self, method, target, headers, body)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "_forward", forgetful)
        yield


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
