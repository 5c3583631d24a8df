"""Items that are stored otherwise than the metadata says: of another dtype, or on shared bytes."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.chunked import Box, chunked
from support.saves import raises_one, save
from support.states import assert_same
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem, WriteItem

import torch_dcpx
from torch_dcpx import CorruptionError, DcpxLoadPlanner, DcpxReader, DcpxSavePlanner
from torch_dcpx.metadata.file import decode_metadata, encode_metadata

STATE = {"a": torch.arange(100.0), "b": torch.arange(60.0), "c": torch.arange(40)}


def change_metadata(path: Path, writer: str, change: Callable[[Any], None]) -> None:
    file = path / ".metadata"
    if writer == "stock":
        metadata = pickle.loads(file.read_bytes())
        change(metadata)
        file.write_bytes(pickle.dumps(metadata))
        return
    decoded = decode_metadata(file.read_bytes(), str(file))
    plain = pickle.loads(pickle.dumps(decoded.metadata))
    change(plain)
    assert decoded.files is not None
    file.write_bytes(encode_metadata(plain, list(decoded.files.values()), decoded.save_id))


def say_dtype(name: str, dtype: torch.dtype) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata[name]
        metadata.state_dict_metadata[name] = dataclasses.replace(
            entry, properties=dataclasses.replace(entry.properties, dtype=dtype)
        )

    return change


def load(path: Path, planner: LoadPlanner | None = None, **dtypes: torch.dtype) -> dict[str, Any]:
    target = {
        name: torch.full_like(value, -1, dtype=dtypes.get(name)) for name, value in STATE.items()
    }
    dcp.load(target, storage_reader=DcpxReader(path), planner=planner, no_dist=True)
    return target


@pytest.mark.parametrize("planner", [DefaultLoadPlanner, DcpxLoadPlanner])
def test_other_dtype_than_the_metadata_says_is_corruption(
    tmp_path: Path, planner: type[LoadPlanner]
) -> None:
    save(STATE, tmp_path, "stock")
    change_metadata(tmp_path, "stock", say_dtype("b", torch.float64))
    for wanted in (torch.float32, torch.float64, torch.bfloat16):
        with raises_one(CorruptionError) as raised:
            load(tmp_path, planner(), b=wanted)
        assert "as torch.float32, the metadata says torch.float64" in str(raised.error)
        assert (raised.error.fqn, raised.error.touched) == ("b", ())
    target = {"a": torch.zeros(100)}  # what is not damaged is there
    dcp.load(target, storage_reader=DcpxReader(tmp_path), no_dist=True)
    assert_same({"a": STATE["a"]}, target)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_item_that_only_torch_understands_is_looked_at_too(tmp_path: Path) -> None:
    def quantized(value: float) -> torch.Tensor:
        return torch.quantize_per_tensor(torch.full((4,), value), 0.1, 0, torch.qint8)

    save({"q": quantized(1.0)}, tmp_path, "stock")
    change_metadata(tmp_path, "stock", say_dtype("q", torch.quint8))
    with raises_one(CorruptionError) as raised:
        dcp.load({"q": quantized(0.0)}, storage_reader=DcpxReader(tmp_path), no_dist=True)
    assert "as torch.qint8, the metadata says torch.quint8" in str(raised.error)


def test_export_looks_at_dtypes_too(tmp_path: Path) -> None:
    save(STATE, tmp_path / "saved", "stock")
    change_metadata(tmp_path / "saved", "stock", say_dtype("b", torch.float64))
    with pytest.raises(
        CorruptionError, match=r"float32, the metadata says torch\.float64"
    ) as raised:
        torch_dcpx.export(tmp_path / "saved", tmp_path / "made", no_dist=True)
    assert raised.value.fqn == "b" and not list(tmp_path.glob("made/*"))


class Halves(DcpxSavePlanner):
    def transform_object(self, write_item: Any, value: Any) -> Any:
        return value.half() if write_item.index.fqn == "b" else value


def test_what_our_own_save_converted_is_converted_back_and_targets_as_ever(tmp_path: Path) -> None:
    torch_dcpx.save(STATE, tmp_path / "ours", planner=Halves(), no_dist=True)
    assert_same(STATE, load(tmp_path / "ours"))
    save(STATE, tmp_path / "stock", "stock")
    assert_same(STATE["b"].half(), load(tmp_path / "stock", b=torch.float16)["b"])


class Casts(DefaultLoadPlanner):
    """A planner that knows what it does."""

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


def test_planner_with_a_hook_of_its_own_may_convert(tmp_path: Path) -> None:
    save(STATE, tmp_path, "stock")
    change_metadata(tmp_path, "stock", say_dtype("b", torch.float64))
    found = load(tmp_path, Casts(), b=torch.float64)
    assert_same(STATE["b"].double(), found["b"])


class StockHalves(DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        return data.half() if write_item.index.fqn == "b" else data


def test_error_of_what_a_planner_of_stock_s_converted_names_who_loads_it(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path)
    dcp.save(dict(STATE), storage_writer=writer, planner=StockHalves(), no_dist=True)
    with raises_one(CorruptionError) as raised:
        load(tmp_path)
    assert "torch's FileSystemReader loads it, or a planner with a commit_tensor" in str(
        raised.error
    )
    assert_same(STATE, load(tmp_path, Casts()))
    target = {name: torch.zeros_like(value) for name, value in STATE.items()}
    dcp.load(target, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    assert_same(STATE, target)


# ---- Bytes that two items share ------------------------------------------------------------------


def place_of(metadata: Any, name: str) -> Any:
    return next(key for key in metadata.storage_data if key.fqn == name)


def move(name: str, other: str, by: int) -> Callable[[Any], None]:
    """Puts an item `by` bytes behind where another one begins."""

    def change(metadata: Any) -> None:
        at = metadata.storage_data[place_of(metadata, other)].offset + by
        key = place_of(metadata, name)
        metadata.storage_data[key] = dataclasses.replace(metadata.storage_data[key], offset=at)

    return change


@pytest.mark.parametrize("by", [1, 200])
def test_items_on_the_same_bytes_are_corruption(tmp_path: Path, by: int) -> None:
    save(STATE, tmp_path, "stock")
    change_metadata(tmp_path, "stock", move("b", "a", by))
    with raises_one(CorruptionError) as raised:
        load(tmp_path)
    assert "on bytes of the one at offset 0" in str(raised.error)
    assert (raised.error.fqn, raised.error.touched) == ("b", ())
    assert any(fault.kind == "overlap" for fault in torch_dcpx.verify(tmp_path).faults)


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_one_tensor_may_have_two_names(tmp_path: Path, writer: str) -> None:
    state = {**STATE, "d": STATE["a"].clone()}
    save(state, tmp_path, writer)

    def tie(metadata: Any) -> None:
        own = metadata.storage_data
        own[place_of(metadata, "d")] = own[place_of(metadata, "a")]

    change_metadata(tmp_path, writer, tie)
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.load(target, storage_reader=DcpxReader(tmp_path), no_dist=True)
    assert_same(state, target)


def second_chunk(metadata: Any) -> None:
    """Says that "a" has another hundred elements, in the bytes of the first ones."""
    entry = metadata.state_dict_metadata["a"]
    at = torch.Size([100])
    chunks = [*entry.chunks, dataclasses.replace(entry.chunks[0], offsets=at)]
    entry = dataclasses.replace(entry, size=torch.Size([200]), chunks=chunks)
    metadata.state_dict_metadata["a"] = entry
    key = place_of(metadata, "a")
    metadata.storage_data[dataclasses.replace(key, offset=at, index=1)] = metadata.storage_data[key]


def object_at(name: str) -> Callable[[Any], None]:
    """Says that an object lies where something else does."""

    def change(metadata: Any) -> None:
        own = metadata.storage_data
        own[place_of(metadata, "step")] = own[place_of(metadata, name)]

    return change


@pytest.mark.parametrize(
    ("writer", "change"),
    [
        ("ours", second_chunk),
        ("stock", second_chunk),
        ("stock", object_at("a")),
        ("stock", object_at("epoch")),
    ],
)
def test_bytes_of_two_items_that_are_not_one_tensor_are_corruption(
    tmp_path: Path, writer: str, change: Callable[[Any], None]
) -> None:
    save({**STATE, "step": 3, "epoch": 4}, tmp_path, writer)
    change_metadata(tmp_path, writer, change)
    size = 200 if change is second_chunk else 100
    target = {"b": torch.zeros(60), "a": torch.zeros(size), "step": 0, "epoch": 0}
    with raises_one(CorruptionError) as raised:
        dcp.load(target, storage_reader=DcpxReader(tmp_path), no_dist=True)
    assert "one tensor alone may have two names" in str(raised.error)
    assert raised.error.touched == () and not target["b"].any()


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_chunk_that_is_wanted_in_parts_is_one_item(tmp_path: Path, writer: str) -> None:
    save(STATE, tmp_path, writer)
    boxes = [Box((50,), (50,)), Box((0,), (50,))]
    halves = chunked(boxes, [torch.zeros(50), torch.zeros(50)], [100])
    dcp.load({"a": halves}, storage_reader=DcpxReader(tmp_path), no_dist=True)
    assert_same([STATE["a"][50:], STATE["a"][:50]], halves.parts)


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_two_names_may_have_several_chunks_and_be_wanted_in_parts(
    tmp_path: Path, writer: str
) -> None:
    boxes = [Box((0,), (60,)), Box((60,), (40,))]
    parts = [STATE["a"][:60].clone(), STATE["a"][60:].clone()]
    state = {name: chunked(boxes, parts, [100]) for name in ("one", "two")}
    save({**state, "none": torch.zeros(0), "no": torch.zeros(0, 3)}, tmp_path, writer)

    def tie(metadata: Any) -> None:
        own = metadata.storage_data
        own.update(
            {key: own[dataclasses.replace(key, fqn="one")] for key in own if key.fqn == "two"}
        )

    change_metadata(tmp_path, writer, tie)
    wanted = [Box((0,), (30,)), Box((30,), (70,))]
    target = {
        name: chunked(wanted, [torch.zeros(30), torch.zeros(70)], [100]) for name in ("one", "two")
    }
    empty = {"none": torch.zeros(0), "no": torch.zeros(0, 3)}
    dcp.load({**target, **empty}, storage_reader=DcpxReader(tmp_path), no_dist=True)
    for found in target.values():
        assert_same([STATE["a"][:30], STATE["a"][30:]], found.parts)
    whole = {"one": torch.zeros(100), "two": torch.zeros(100)}
    dcp.load(whole, storage_reader=DcpxReader(tmp_path), no_dist=True)
    assert_same({"one": STATE["a"], "two": STATE["a"]}, whole)
