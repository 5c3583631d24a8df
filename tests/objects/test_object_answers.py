"""An answer of a store that is not what was asked for is asked for again."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
from object_outcomes import retries
from support.object_fixture import s3_alone
from support.object_server import ObjectServer

from torch_dcpx import StorageError
from torch_dcpx.storage.object_store import Bucket, bucket_of
from torch_dcpx.storage.object_url import ObjectUrl, location_of

BODY = bytes(range(200))


class Answer:
    """An answer of obstore, with other bytes or another range."""

    def __init__(self, found: Any, change: str) -> None:
        self.meta = found.meta
        begin, end = found.range
        body = bytes(found.bytes())
        if change == "short":
            body = body[:-1]
        self.range = (begin, end) if change == "short" else (begin + 1, end + 1)
        self.bytes = lambda: body


def reads(bucket: Bucket, key: str) -> dict[str, Callable[[], bytes]]:
    tag = bucket.head(key)
    assert tag is not None
    return {
        "get": lambda: bytes(bucket.get(key).body),
        "get_end": lambda: bytes(bucket.get_end(key, 50).body),
        "get_begin": lambda: bytes(bucket.get_begin(key, 50).body),
        "get_range": lambda: bytes(bucket.get_range(key, tag[1], 20, 60)),
    }


WANTED = {"get": BODY, "get_end": BODY[-50:], "get_begin": BODY[:50], "get_range": BODY[20:60]}


@pytest.mark.parametrize("change", ["short", "range"])
@pytest.mark.parametrize("name", WANTED)
@s3_alone
def test_answer_that_was_not_asked_for_is_repeated(
    name: str,
    change: str,
    object_prefix: str,
    object_server: ObjectServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = location_of(f"{object_prefix}/a")
    assert isinstance(url, ObjectUrl)
    with retries(None):
        bucket = bucket_of(url)
        bucket.put(url.key, [BODY])
        read = reads(bucket, url.key)[name]
        true_get, wrong = bucket._obstore.get, [True]

        def get(*args: Any, **more: Any) -> Any:
            found = true_get(*args, **more)
            return Answer(found, change) if wrong.pop() else found

        monkeypatch.setattr(bucket._obstore, "get", get)
        wrong[:] = [False, True]
        assert read() == WANTED[name]
        assert not wrong
        wrong[:] = [True] * 3
        with pytest.raises(StorageError) as caught:
            read()
        assert caught.value.errno == errno.EIO and "the answer has" in str(caught.value)
