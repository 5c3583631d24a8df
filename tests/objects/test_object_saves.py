"""Saves to a store, and loads of them: by every entry point, and by other people's readers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.chunked import Box, chunked
from support.object_fixture import s3_alone
from support.states import assert_same, blank_like, mixed_state

import torch_dcpx as dcpx
from torch_dcpx import (
    CorruptionError,
    DcpxLoadPlanner,
    DcpxReader,
    DcpxSavePlanner,
    DcpxWriter,
    NotCommittedError,
    OptionError,
    ReadOptions,
    StorageError,
    WriteOptions,
)

if TYPE_CHECKING:
    from support.object_proxy import FaultProxy
    from support.object_server import ObjectServer

MIB = 1 << 20
SMALL = WriteOptions(host_memory_bytes=24 * MIB)  # parts of 5 MiB


def by_dcp(state: dict[str, Any], url: str) -> None:
    dcp.save(state, storage_writer=DcpxWriter(url), planner=DcpxSavePlanner(), no_dist=True)


def by_stock_planner(state: dict[str, Any], url: str) -> None:
    dcp.save(state, checkpoint_id=url, storage_writer=DcpxWriter("unused"), no_dist=True)


def by_async_save(state: dict[str, Any], url: str) -> None:
    report = dcpx.async_save(state, url).result()
    assert report.checkpoint_id == url


def in_parts(state: dict[str, Any], url: str) -> None:
    dcpx.save(state, url, options=SMALL)


SAVES: dict[str, Callable[[dict[str, Any], str], object]] = {
    "dcpx.save": dcpx.save,
    "async_save": by_async_save,
    "dcp.save": by_dcp,
    "checkpoint_id": by_stock_planner,
    "parts": in_parts,
}


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


@pytest.mark.parametrize("by", SAVES)
def test_state_comes_back_bit_for_bit_and_again_after_a_second_save(
    object_prefix: str, object_server: ObjectServer, by: str
) -> None:
    for seed in range(2):
        state = large_state(seed)
        SAVES[by](state, object_prefix)
        assert_same(state, loaded(state, object_prefix))
    target = blank_like(state)
    reader = DcpxReader(object_prefix)
    dcp.load(target, storage_reader=reader, planner=DcpxLoadPlanner(), no_dist=True)
    assert_same(state, target)
    names = [key.rpartition("/")[2] for key in object_server.keys(object_prefix)]
    assert len(names) == 2 and ".metadata" in names  # those of the first save are gone
    assert object_server.uploads(object_prefix) == []


@s3_alone
@pytest.mark.parametrize("by", ["dcpx.save", "parts"])
def test_stocks_and_amazons_readers_read_it(
    object_prefix: str, object_server: ObjectServer, by: str
) -> None:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageReader
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    state = large_state()
    SAVES[by](state, object_prefix)
    amazons = S3StorageReader(
        "us-east-1", object_prefix, s3client_config=S3ClientConfig(force_path_style=True)
    )
    amazons.fs._client._endpoint = object_server.url
    for reader in (FsspecReader(object_prefix), amazons):
        target = blank_like(state)
        dcp.load(target, storage_reader=reader, no_dist=True)
        assert_same(state, target)


@s3_alone
def test_what_stock_wrote_is_read(object_prefix: str) -> None:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    state = large_state()
    dcp.save(state, storage_writer=FsspecWriter(object_prefix), no_dist=True)
    assert_same(state, loaded(state, object_prefix))
    assert_same(state, loaded(state, object_prefix, host_memory_bytes=MIB, slot_bytes=MIB // 4))


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
def test_however_it_is_cut_it_is_the_same(object_prefix: str, made: dict[str, Any]) -> None:
    state = large_state()
    writer = DcpxWriter(object_prefix, **made)
    dcpx.save(state, storage_writer=writer)
    assert_same(state, loaded(state, object_prefix))
    assert writer.last_report is not None
    assert writer.last_report.slot_bytes <= writer.options.resolved_upload_bytes() // 4 * 3


class DoublingPlanner(DcpxSavePlanner):
    """Gives tensors that it makes as they are asked for."""

    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002 - DCP's name
        return super().transform_object(write_item, object)

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data * 2 if isinstance(data, torch.Tensor) else data


def test_temporaries_of_a_planner_may_go_before_they_are_uploaded(object_prefix: str) -> None:
    g = torch.Generator().manual_seed(3)
    state = {str(i): torch.randn(500_000 + i, generator=g) for i in range(30)}
    writer = DcpxWriter(object_prefix, options=SMALL)
    dcp.save(state, storage_writer=writer, planner=DoublingPlanner(), no_dist=True)
    target = loaded(state, object_prefix)
    assert_same({key: value * 2 for key, value in state.items()}, target)


def test_progress_ends_with_what_is_stored(object_prefix: str) -> None:
    told: list[tuple[int, int]] = []
    options = WriteOptions(
        host_memory_bytes=24 * MIB, progress=lambda done, total: told.append((done, total))
    )
    dcpx.save(large_state(), object_prefix, options=options)
    assert told[0][0] == 0 and told[-1][0] == told[-1][1] > 0
    assert told == sorted(told) and len({done for done, _ in told}) == len(told)


def test_flipped_bit_names_tensor_object_and_range(
    object_prefix: str, object_server: ObjectServer
) -> None:
    state = {"a": torch.arange(1 << 20), "b": torch.arange(1 << 18)}
    dcpx.save(state, object_prefix)
    (key,) = [key for key in object_server.keys(object_prefix) if key.endswith(".distcp")]
    data = bytearray(object_server.get(key))
    at = data.index((1000).to_bytes(8, "little"), 100)
    data[at] ^= 1
    object_server.put(key, bytes(data))
    with pytest.raises(CorruptionError, match="block checksum") as caught:
        loaded(state, object_prefix)
    error = caught.value
    assert error.fqn in ("a", "b") and error.path == f"{object_server.root}/{key}"
    assert error.offset is not None and error.offset <= at < error.offset + (error.nbytes or 0)


def ranges(proxy: FaultProxy) -> list[int]:
    """Returns the bytes of the answers for data, footers left out."""
    data = [one for one in proxy.requests("get_object") if one.key.endswith(".distcp")]
    return [one.received_bytes for one in data if not one.range.startswith("bytes=-")]


@s3_alone  # where a footer's range is known by its form
def test_rows_cost_what_they_hold_and_columns_whole_blocks(
    object_prefix: str, object_proxy: FaultProxy
) -> None:
    whole = torch.arange(4096 * 1024).reshape(4096, 1024)  # 32 MiB
    dcpx.save({"w": whole}, object_prefix)
    object_proxy.clear()
    rows = read_box(object_prefix, Box((1024, 0), (1024, 1024)))  # 8 MiB
    assert torch.equal(rows, whole[1024:2048])
    assert sum(ranges(object_proxy)) <= 1.1 * rows.nbytes
    object_proxy.clear()
    columns = read_box(object_prefix, Box((0, 3), (64, 2)))
    assert torch.equal(columns, whole[0:64, 3:5])
    assert sum(ranges(object_proxy)) <= 64 * 8192 + 2 * (64 << 10) + 4096


def read_box(url: str, box: Box) -> torch.Tensor:
    """Returns what a rank of a sharded load reads of "w"."""
    part = torch.zeros(box.sizes, dtype=torch.int64)
    target = {"w": chunked([box], [part], (4096, 1024))}
    dcp.load(target, storage_reader=DcpxReader(url), no_dist=True)
    return part


def test_requests_are_those_that_the_page_counts(
    object_prefix: str, object_proxy: FaultProxy, object_server: ObjectServer
) -> None:
    state = {"w": torch.randn(1000, 100), "step": 1}
    dcpx.save(state, f"{object_prefix}/probe")
    object_proxy.clear()
    dcpx.save(state, f"{object_prefix}/a")
    kinds = [one.kind for one in object_proxy.requests()]
    assert sorted(kinds) == sorted(["head_object"] + ["put_object"] * 2)
    object_proxy.clear()
    dcpx.save(state, f"{object_prefix}/a")
    kinds = [one.kind for one in object_proxy.requests()]
    more = ["get_object", "list", "delete_many"]
    assert sorted(kinds) == sorted(["head_object"] + ["put_object"] * 2 + more)
    object_proxy.clear()
    loaded(state, f"{object_prefix}/a")
    sizes = ["head_object"] * (object_server.scheme == "az")
    assert [one.kind for one in object_proxy.requests()] == [
        "get_object",
        *sizes,
        *["get_object"] * 2,
    ]


def test_nothing_is_there_before_the_first_save(object_prefix: str) -> None:
    with pytest.raises(NotCommittedError, match="holds no committed checkpoint"):
        dcpx.load({"w": torch.zeros(1)}, object_prefix)


def test_too_little_memory_is_told_before_a_request(
    object_prefix: str, object_proxy: FaultProxy
) -> None:
    options = WriteOptions(host_memory_bytes=23 * MIB)
    with pytest.raises(OptionError, match="26214400 B are enough"):
        dcpx.save({"w": torch.zeros(1)}, object_prefix, options=options)
    assert object_proxy.count("create_upload") == 0
    assert not [one for one in object_proxy.requests() if one.key.endswith(".distcp")]


def test_tensors_and_weights_are_read_by_name(
    object_prefix: str, object_server: ObjectServer, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(300, 200)
    state = {**model.state_dict(), "step": 7}
    dcpx.save(state, f"{object_prefix}/ours")
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    for file in (tmp_path / "stock").iterdir():
        object_server.put(f"{object_prefix}/stock/{file.name}", file.read_bytes())
    for name in ("ours", "stock"):
        url = f"{object_prefix}/{name}"
        assert_same({"bias": model.bias.detach()}, dcpx.load_tensors(url, "bias"))
        with dcpx.open_checkpoint(url) as opened:
            assert torch.equal(opened["weight"][5:9, ::3], model.weight[5:9, ::3])
            assert opened.objects["step"] == 7
            assert opened.path == url
        blank = torch.nn.Linear(300, 200, device="meta")
        dcpx.load_pretrained(blank, url)
        assert_same(model.state_dict(), blank.state_dict())


def test_stocks_objects_that_are_replaced_while_they_are_open_are_an_error(
    object_prefix: str, object_server: ObjectServer, tmp_path: Path
) -> None:
    for seed in range(2):
        dcp.save({"w": torch.full((9,), seed)}, checkpoint_id=tmp_path / str(seed), no_dist=True)
    files = [{file.name: file.read_bytes() for file in (tmp_path / n).iterdir()} for n in "01"]
    for name, data in files[0].items():
        object_server.put(f"{object_prefix}/{name}", data)
    with dcpx.open_checkpoint(object_prefix) as opened:
        assert opened["w"][0] == 0
        for name, data in files[1].items():
            object_server.put(f"{object_prefix}/{name}", data)
        with pytest.raises(StorageError, match="was replaced while it was loaded"):
            opened["w"][0]
