"""Saves to a store, and loads of them: by how many requests, by others' readers, while it changes.

That a state comes back bit for bit by every door: tests/contracts/test_checkpoints.py.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fake_cuda.fake import FakeCuda
from object_outcomes import MIB, Store, bucket_of, load, retries, save, state_of
from support.chunked import Box, chunked
from support.device_states import DRIVERS, everywhere, moved, odd_state, on_host, use_driver
from support.machine import seconds
from support.object_fixture import s3_alone
from support.object_proxy import FaultProxy
from support.object_requests import Request
from support.states import assert_same, blank_like, mixed_state

import torch_dcpx as dcpx
from torch_dcpx import (
    _C,
    DcpxReader,
    DcpxSavePlanner,
    DcpxWriter,
    OptionError,
    RankError,
    ReadOptions,
    StorageError,
    WriteOptions,
)

SMALL = WriteOptions(host_memory_bytes=24 * MIB)  # parts of 5 MiB


def loaded(state: dict[str, Any], url: str, **options: Any) -> dict[str, Any]:
    target = blank_like(state)
    dcpx.load(target, url, options=ReadOptions(**options))
    return target


def large_state(seed: int = 0) -> dict[str, Any]:
    """Returns tensors of all paths: packed, in place, gathered, and bytes. 27 MB."""
    g = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(3_000_001, generator=g),
        "gathered": torch.randn(1500, 1700, generator=g).t(),
        "middle": {str(i): torch.randn(90_000 + i, generator=g) for i in range(12)},
        "text": "x" * 300_000,
        **mixed_state(seed),
    }


@s3_alone
@pytest.mark.parametrize("options", [WriteOptions(), SMALL], ids=["save", "parts"])
def test_stocks_and_amazons_readers_read_it(store: Store, options: WriteOptions) -> None:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageReader
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    state = large_state()
    dcpx.save(state, store.url, options=options)
    amazons = S3StorageReader(
        "us-east-1", store.url, s3client_config=S3ClientConfig(force_path_style=True)
    )
    amazons.fs._client._endpoint = store.server.url
    for reader in (FsspecReader(store.url), amazons):
        target = blank_like(state)
        dcp.load(target, storage_reader=reader, no_dist=True)
        assert_same(state, target)


@s3_alone
def test_what_stock_wrote_is_read(store: Store) -> None:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    state = large_state()
    dcp.save(state, storage_writer=FsspecWriter(store.url), no_dist=True)
    assert_same(state, loaded(state, store.url))
    assert_same(state, loaded(state, store.url, host_memory_bytes=MIB, slot_bytes=MIB // 4))


@pytest.mark.parametrize(
    "made",
    [
        {"options": WriteOptions(files_per_rank=3, host_memory_bytes=24 * MIB)},
        {"single_file_per_rank": False},
        {"options": WriteOptions(in_place="never", host_memory_bytes=24 * MIB, workers=1)},
        {"options": WriteOptions(in_place="always", slot_bytes=256 << 10)},
        {"options": WriteOptions(in_place="never")},
    ],
    ids=["files", "file per item", "slots", "in place", "slots of the default"],
)
def test_however_it_is_cut_it_is_the_same(store: Store, made: dict[str, Any]) -> None:
    writer = DcpxWriter(store.url, **made)
    for seed in range(2):
        state = large_state(seed)
        dcpx.save(state, storage_writer=writer)
        assert_same(state, loaded(state, store.url))
    assert writer.last_report is not None
    assert writer.last_report.slot_bytes <= writer.options.resolved_upload_bytes() // 4 * 3
    assert store.has_no_upload()


class DoublingPlanner(DcpxSavePlanner):
    """Gives tensors that it makes as they are asked for."""

    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002 - DCP's name
        return super().transform_object(write_item, object)

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data * 2 if isinstance(data, torch.Tensor) else data


def test_temporaries_of_a_planner_may_go_before_they_are_uploaded(store: Store) -> None:
    g = torch.Generator().manual_seed(3)
    state = {str(i): torch.randn(500_000 + i, generator=g) for i in range(30)}
    writer = DcpxWriter(store.url, options=SMALL)
    dcp.save(state, storage_writer=writer, planner=DoublingPlanner(), no_dist=True)
    assert_same({key: value * 2 for key, value in state.items()}, loaded(state, store.url))


# ---- Requests -----------------------------------------------------------------------------------


def ranges(proxy: FaultProxy) -> list[int]:
    """Returns the bytes of the answers for data, footers left out."""
    data = [one for one in proxy.requests("get_object") if one.key.endswith(".distcp")]
    return [one.received_bytes for one in data if not one.range.startswith("bytes=-")]


@s3_alone  # where a footer's range is known by its form
def test_rows_cost_what_they_hold_and_columns_whole_blocks(store: Store, proxy: FaultProxy) -> None:
    whole = torch.arange(4096 * 1024).reshape(4096, 1024)  # 32 MiB
    dcpx.save({"w": whole}, store.url)
    proxy.clear()
    rows = read_box(store.url, Box((1024, 0), (1024, 1024)))  # 8 MiB
    assert torch.equal(rows, whole[1024:2048])
    assert sum(ranges(proxy)) <= 1.1 * rows.nbytes
    proxy.clear()
    columns = read_box(store.url, Box((0, 3), (64, 2)))
    assert torch.equal(columns, whole[0:64, 3:5])
    assert sum(ranges(proxy)) <= 64 * 8192 + 2 * (64 << 10) + 4096


def read_box(url: str, box: Box) -> torch.Tensor:
    """Returns what a rank of a sharded load reads of "w"."""
    part = torch.zeros(box.sizes, dtype=torch.int64)
    target = {"w": chunked([box], [part], (4096, 1024))}
    dcp.load(target, storage_reader=DcpxReader(url), no_dist=True)
    return part


def test_requests_are_those_that_the_page_counts(store: Store, proxy: FaultProxy) -> None:
    state = {"w": torch.randn(1000, 100), "step": 1}
    dcpx.save(state, f"{store.url}/probe")
    for more in ([], ["get_object", "list", "delete_many"]):
        proxy.clear()
        dcpx.save(state, f"{store.url}/a")
        kinds = [one.kind for one in proxy.requests()]
        assert sorted(kinds) == sorted(["head_object"] + ["put_object"] * 2 + more)
    proxy.clear()
    loaded(state, f"{store.url}/a")
    sizes = ["head_object"] * (store.server.scheme == "az")
    kinds = [one.kind for one in proxy.requests()]
    assert kinds == ["get_object", *sizes, "get_object", "get_object"]


def test_too_little_memory_is_told_before_a_request(store: Store, proxy: FaultProxy) -> None:
    options = WriteOptions(host_memory_bytes=23 * MIB)
    with pytest.raises(OptionError, match="26214400 B are enough"):
        dcpx.save({"w": torch.zeros(1)}, store.url, options=options)
    assert proxy.count("create_upload") == 0
    assert not [one for one in proxy.requests() if one.key.endswith(".distcp")]


# ---- A save that is stopped ---------------------------------------------------------------------


def test_cancelled_save_aborts_its_upload_and_leaves_the_old_checkpoint(
    store: Store, proxy: FaultProxy
) -> None:
    old = store.saved({"w": torch.zeros(3)})
    has_come, may_go = threading.Event(), threading.Event()

    def hold(_: Request) -> None:
        has_come.set()
        assert may_go.wait(seconds(120))

    proxy.hook("upload_part", hold, times=None)
    handle = dcpx.async_save({"w": torch.ones(4 * MIB)}, store.url, options=SMALL)
    assert has_come.wait(seconds(120))
    assert handle.cancel()
    may_go.set()
    with pytest.raises((StorageError, RankError), match="cancelled"):
        handle.result(seconds(120))
    proxy.heal()
    assert store.objects() == old and store.has_no_upload()


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "when all is stored"])
def test_progress_that_raises_leaves_nothing(store: Store, is_late: bool) -> None:
    def report(done_bytes: int, total_bytes: int) -> None:
        if done_bytes == total_bytes or (done_bytes and not is_late):
            raise KeyError("enough")

    options = WriteOptions(host_memory_bytes=24 * MIB, progress=report)
    with pytest.raises(KeyError, match="enough"):
        dcpx.save({str(i): torch.ones(MIB) for i in range(8)}, store.url, options=options)
    assert store.names() == set() and store.has_no_upload()


# ---- What is replaced while it is read ----------------------------------------------------------


def test_load_during_which_another_save_commits_gets_one_checkpoint_whole(
    store: Store, proxy: FaultProxy
) -> None:
    """The other one commits before each of the load's requests, the first included: the load then
    begins anew.
    """
    old_state, new_state = state_of(1, 1_500_000), state_of(2, 1_500_000)  # three ranges
    old = store.saved(old_state)
    proxy.clear()
    load(old_state, store.url)
    steps = []
    for number in range(proxy.count()):
        store.put_all(old)
        proxy.heal()
        proxy.hook("get_object", lambda _: save(new_state, store.url), skip=number)
        found = load(old_state, store.url)
        assert_same(old_state if found["step"] == 1 else new_state, found)
        steps.append(found["step"])
        assert_same(new_state, load(new_state, store.url))
    assert steps[:2] == [2, 2], steps
    proxy.heal()


def test_stocks_file_that_is_replaced_under_its_name_during_a_load_is_read_anew(
    store: Store, proxy: FaultProxy, tmp_path: Path
) -> None:
    """No checksum would tell: the store does, by the ETag."""
    state, other = state_of(1, 300_000), state_of(2, 300_000)
    for folder, each in (("old", state), ("new", other)):
        dcp.save(each, checkpoint_id=tmp_path / folder, no_dist=True)
    store.put_folder(tmp_path / "old")
    name = "__0_0.distcp"
    proxy.hook("get_object", lambda _: store.put(name, (tmp_path / "new" / name).read_bytes()),
               key=name, skip=1)  # fmt: skip
    with retries(0):
        assert_same(other, load(state, store.url))
    assert proxy.count("get_object", name) >= 2
    with dcpx.open_checkpoint(store.url) as opened:
        assert opened.objects["step"] == 2
        assert torch.equal(opened["weight"][5:9], other["weight"][5:9])
        store.put_folder(tmp_path / "old")
        with pytest.raises(StorageError, match="was replaced while it was loaded"):
            opened["weight"][0]


# ---- Answers that are not what was asked for ----------------------------------------------------

BODY = bytes(range(200))
WANTED = {"get": BODY, "get_end": BODY[-50:], "get_begin": BODY[:50], "get_range": BODY[20:60]}


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


@pytest.mark.parametrize("change", ["short", "range"])
@pytest.mark.parametrize("name", WANTED)
@s3_alone
def test_answer_that_was_not_asked_for_is_repeated(
    name: str, change: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with retries(None):
        bucket, key = bucket_of(f"{store.url}/a")
        bucket.put(key, [BODY])
        tag = bucket.head(key)
        assert tag is not None
        reads: dict[str, Callable[[], bytes]] = {
            "get": lambda: bytes(bucket.get(key).body),
            "get_end": lambda: bytes(bucket.get_end(key, 50).body),
            "get_begin": lambda: bytes(bucket.get_begin(key, 50).body),
            "get_range": lambda: bytes(bucket.get_range(key, tag[1], 20, 60)),
        }
        true_get, wrong = bucket._obstore.get, [False, True]

        def get(*args: Any, **more: Any) -> Any:
            found = true_get(*args, **more)
            return Answer(found, change) if wrong.pop() else found

        monkeypatch.setattr(bucket._obstore, "get", get)
        assert reads[name]() == WANTED[name]
        assert not wrong
        wrong[:] = [True] * 3
        with pytest.raises(StorageError, match="the answer has") as caught:
            reads[name]()
        assert caught.value.errno == errno.EIO


# ---- Devices, on the fake driver ----------------------------------------------------------------


@pytest.fixture
def device(fake_device_memory: FakeCuda, fake_cuda: FakeCuda) -> FakeCuda:
    """The fake's memory is device memory, and its driver is asked for anew."""
    _C.forget_device_driver()
    return fake_cuda


@pytest.mark.parametrize("memory_mib", [24, 64])
@pytest.mark.parametrize(("version", "has_kernel"), DRIVERS)
def test_state_on_devices_is_saved_and_loaded_bit_for_bit(
    device: FakeCuda, store: Store, seed: int, version: int, has_kernel: bool, memory_mib: int
) -> None:
    use_driver(device, version, has_kernel)
    expected = odd_state(seed)
    options = WriteOptions(workers=3, slot_bytes=256 << 10, host_memory_bytes=memory_mib * MIB)
    writer = DcpxWriter(store.url, options=options)
    dcp.save(moved(device, expected, everywhere), storage_writer=writer, no_dist=True)
    assert writer.last_report is not None
    assert writer.last_report.slot_bytes <= memory_mib * MIB // 4 * 3
    assert_same(expected, loaded(expected, store.url))
    del expected["expanded"], expected["repeated"]  # no memory to load them into
    state = moved(device, blank_like(expected), everywhere)
    reader = DcpxReader(store.url, options=ReadOptions(host_memory_bytes=4 * MIB))
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert_same(expected, on_host(device, state))
