"""A slow link to a store: what moves is not ended, and is sent once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from object_outcomes import Store, bucket_of
from support.machine import seconds
from support.object_fixture import s3_alone
from support.slow_link import SlowLink

import torch_dcpx as dcpx
from torch_dcpx import ReadOptions, WriteOptions
from torch_dcpx._answers import StorageTimeout, wait_at_most
from torch_dcpx.storage import object_store
from torch_dcpx.storage.object_stream import Stream

pytestmark = s3_alone

MB = 1_000_000


@pytest.fixture
def link(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], SlowLink]]:
    """Makes the store one behind a link of so many bytes a second."""
    links: list[SlowLink] = []

    def make(bytes_per_s: float) -> SlowLink:
        links.append(SlowLink(store.server.url, bytes_per_s))
        monkeypatch.setenv("AWS_ENDPOINT_URL", links[-1].url)
        return links[-1]

    yield make
    for one in links:
        one.close()


def test_part_that_takes_longer_than_the_bound_on_silence_is_sent_once_while_it_moves(
    store: Store, link: Callable[[float], SlowLink]
) -> None:
    slow = link(2 * MB)
    state = {"w": torch.arange(600_000)}  # 4.8 MB, one request: 2.4 s
    dcpx.save(state, store.url, options=WriteOptions(save_timeout_s=2))
    assert 4.8 * MB < slow.sent < 5.5 * MB


def test_range_that_takes_longer_than_the_bound_on_silence_is_read_once_while_it_moves(
    store: Store, link: Callable[[float], SlowLink]
) -> None:
    state = {"w": torch.arange(600_000)}
    dcpx.save(state, store.url)
    slow = link(2 * MB)
    found = {"w": torch.zeros(600_000, dtype=torch.int64)}
    dcpx.load(found, store.url, options=ReadOptions(load_timeout_s=2))
    assert torch.equal(found["w"], state["w"])
    assert 4.8 * MB < slow.received < 5.5 * MB


def test_range_whose_answer_ends_early_is_read_again_however_long_it_moved(
    store: Store, link: Callable[[float], SlowLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_MAX_REPEATED_S", 1.0)
    body = bytes(2 * MB)
    bucket, key = bucket_of(f"{store.url}/a")
    bucket.put(key, [body])
    link(1 * MB)
    bucket, _ = bucket_of(f"{store.url}/a")
    true_get, ends_early = bucket._obstore.get, [True]

    def get(*args: Any, **more: Any) -> Any:
        found = true_get(*args, **more)
        if ends_early and len(found.bytes()):
            ends_early.clear()
            raise bucket._obstore.exceptions.GenericError("request or response body error")
        return found

    monkeypatch.setattr(bucket._obstore, "get", get)
    with wait_at_most(StorageTimeout(4, "load_timeout_s")):
        assert bytes(bucket.get(key).body) == body


def test_upload_that_moves_is_not_ended_for_the_time_that_it_takes(store: Store) -> None:
    """At 40 kB/s the parts that are under way at first take 14 minutes."""
    options = bucket_of(store.url)[0].uploader.client_options
    assert options["timeout"] == "1 day" and "read_timeout" not in options


@pytest.mark.slow
def test_save_whose_parts_take_longer_than_obstore_gives_a_request_ends(
    store: Store, link: Callable[[float], SlowLink]
) -> None:
    slow = link(0.4 * MB)
    state = {"w": torch.arange(2_000_000)}  # 16 MB, in two parts at a time: 40 s
    dcpx.save(state, store.url)
    assert 16 * MB < slow.sent < 17 * MB


def test_upload_that_fails_leaves_its_share_of_the_link_to_others(store: Store) -> None:
    bucket, key = bucket_of(f"{store.url}/x")

    def pieces(count: int) -> Iterator[bytes]:
        yield from [bytes(1 << 20)] * count
        raise RuntimeError("no more")

    for count in (0, 1, 7):
        with pytest.raises(RuntimeError, match="no more"):
            Stream(bucket, key, 5 << 20, at_once=2).run(pieces(count))
    give_up_at = time.monotonic() + seconds(60)
    while bucket.link.sending._taken_bytes:  # until obstore has let go of its pieces
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    assert store.objects() == {}
