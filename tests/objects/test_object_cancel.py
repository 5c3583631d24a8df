"""A save to a store that is stopped while it waits for the store."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch
from support.machine import seconds

import torch_dcpx as dcpx
from torch_dcpx import RankError, StorageError, WriteOptions

if TYPE_CHECKING:
    from support.object_proxy import FaultProxy
    from support.object_requests import Request
    from support.object_server import ObjectServer

MIB = 1 << 20


def test_cancelled_save_aborts_its_upload_and_leaves_the_old_checkpoint(
    object_prefix: str, object_proxy: FaultProxy, object_server: ObjectServer
) -> None:
    dcpx.save({"w": torch.zeros(3)}, object_prefix)
    before = object_server.keys(object_prefix)
    has_come, may_go = threading.Event(), threading.Event()

    def hold(_: Request) -> None:
        has_come.set()
        assert may_go.wait(seconds(120))

    object_proxy.hook("upload_part", hold, times=None)
    options = WriteOptions(host_memory_bytes=24 * MIB)
    handle = dcpx.async_save({"w": torch.ones(4 * MIB)}, object_prefix, options=options)
    assert has_come.wait(seconds(120))
    assert handle.cancel()
    may_go.set()
    with pytest.raises((StorageError, RankError), match="cancelled"):
        handle.result(seconds(120))
    object_proxy.heal()
    assert object_server.keys(object_prefix) == before
    assert object_server.uploads(object_prefix) == [] or not object_server.has_aborts
    found = {"w": torch.ones(3)}
    dcpx.load(found, object_prefix)
    assert torch.equal(found["w"], torch.zeros(3))


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "when all is stored"])
def test_progress_that_raises_leaves_nothing(
    object_prefix: str, object_server: ObjectServer, is_late: bool
) -> None:
    def report(done_bytes: int, total_bytes: int) -> None:
        if done_bytes == total_bytes or (done_bytes and not is_late):
            raise KeyError("enough")

    options = WriteOptions(host_memory_bytes=24 * MIB, progress=report)
    with pytest.raises(KeyError, match="enough"):
        dcpx.save({str(i): torch.ones(MIB) for i in range(8)}, object_prefix, options=options)
    assert object_server.keys(object_prefix) == []
    assert object_server.uploads(object_prefix) == [] or not object_server.has_aborts
