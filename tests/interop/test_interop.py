"""What DcpxWriter writes, stock reads; what stock wrote, DcpxReader reads; bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.states import DTYPES, assert_same, blank_like, mixed_state, random_bytes
from torch.distributed.checkpoint._extension import ZStandard

from torch_dcpx import DcpxReader, DcpxWriter, ReadOptions, WriteOptions

WRITERS: dict[str, Callable[..., Any]] = {"ours": DcpxWriter, "stock": dcp.FileSystemWriter}
READERS: dict[str, Callable[..., Any]] = {"ours": DcpxReader, "stock": dcp.FileSystemReader}
BOTH_WAYS = pytest.mark.parametrize(
    ("writer", "reader"), [("ours", "stock"), ("stock", "ours"), ("ours", "ours")]
)


def save(state: dict[str, Any], writer: Any, **kwargs: Any) -> Any:
    return dcp.save(state, storage_writer=writer, no_dist=True, **kwargs)


def load(state: dict[str, Any], reader: Any) -> dict[str, Any]:
    target = blank_like(state)
    dcp.load(target, storage_reader=reader, no_dist=True)
    return target


@BOTH_WAYS
def test_every_dtype_comes_back_bit_for_bit(
    tmp_path: Path, writer: str, reader: str, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    state = {}
    for dtype in DTYPES:
        for shape in ((), (0,), (1,), (70_001,), (33, 257)):
            state[f"{dtype}{list(shape)}"] = random_bytes(shape, dtype, g)
    save(state, WRITERS[writer](tmp_path / "ckpt"))
    found = load(state, READERS[reader](tmp_path / "ckpt"))
    # Loading casts nothing, so every bit must survive; NaN patterns included.
    assert_same(state, found)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"single_file_per_rank": False},
        {"thread_count": 1},
        {"thread_count": 3},
        {"sync_files": False},
        {"options": WriteOptions(durability="none", direct_io=False, workers=1)},
        {"options": WriteOptions(slot_bytes=256 << 10, host_memory_bytes=256 << 10)},
        {"_extensions": [ZStandard()]},
        {"_extensions": [ZStandard()], "single_file_per_rank": False},
    ],
    ids=lambda kwargs: re.sub(r" at 0x\w+", "", str(kwargs)),  # the same in each process
)
def test_every_writer_argument_gives_a_readable_checkpoint(
    tmp_path: Path, kwargs: dict[str, Any]
) -> None:
    state = mixed_state()
    save(state, DcpxWriter(tmp_path / "ckpt", **kwargs))
    for reader in READERS.values():
        assert_same(state, load(state, reader(tmp_path / "ckpt")), reader.__name__)


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_every_read_option_loads_the_same(tmp_path: Path, writer: str) -> None:
    state = mixed_state()
    save(state, WRITERS[writer](tmp_path / "ckpt"))
    for options in (
        ReadOptions(verify="none"),
        ReadOptions(direct_io=False),
        ReadOptions(workers=1),
        ReadOptions(slot_bytes=256 << 10, host_memory_bytes=256 << 10),
        ReadOptions(trusted=True),
    ):
        found = load(state, DcpxReader(tmp_path / "ckpt", options=options))
        assert_same(state, found, str(options))


@pytest.mark.parametrize("extensions", [None, [ZStandard()]])
def test_compressed_stock_checkpoint_loads(tmp_path: Path, extensions: Any) -> None:
    state = mixed_state()
    save(state, dcp.FileSystemWriter(tmp_path, _extensions=extensions, thread_count=2))
    reader = DcpxReader(tmp_path)
    assert_same(state, load(state, reader))
    assert reader.last_report is not None
    assert (reader.last_report.torch_items > 0) == (extensions is not None)


@BOTH_WAYS
def test_rank_local_metadata_is_read(tmp_path: Path, writer: str, reader: str) -> None:
    state = mixed_state()
    save(state, WRITERS[writer](tmp_path), use_collectives=False)
    assert (tmp_path / "__0.metadata").exists()
    assert not (tmp_path / ".metadata").exists()
    assert_same(state, load(state, READERS[reader](tmp_path)))


def test_metadata_that_save_returns_equals_what_the_file_says(tmp_path: Path) -> None:
    returned = save(mixed_state(), DcpxWriter(tmp_path))
    ours = DcpxReader(tmp_path).read_metadata()
    stock = dcp.FileSystemReader(tmp_path).read_metadata()
    assert ours.state_dict_metadata == returned.state_dict_metadata
    for entry in returned.state_dict_metadata.values():
        if getattr(getattr(entry, "properties", None), "strides", None) is not None:
            entry.properties.strides = None  # torch 2.15's; older ones could not unpickle it
    assert stock.state_dict_metadata == returned.state_dict_metadata
    for metadata in (ours, stock):
        assert metadata.storage_data == returned.storage_data
        assert metadata.planner_data == returned.planner_data
        assert metadata.version == returned.version


def test_one_writer_and_one_reader_serve_many_checkpoints(tmp_path: Path) -> None:
    writer, reader = DcpxWriter(tmp_path / "0"), DcpxReader(tmp_path / "0")
    for step in range(3):
        state = mixed_state(step)
        dcp.save(state, checkpoint_id=tmp_path / str(step), storage_writer=writer, no_dist=True)
        target = blank_like(state)
        dcp.load(target, checkpoint_id=tmp_path / str(step), storage_reader=reader, no_dist=True)
        assert_same(state, target)


def test_target_of_another_dtype_or_layout_is_converted_as_stock_does(tmp_path: Path) -> None:
    source = {"a": torch.randn(100, 40), "b": torch.arange(50_000), "c": torch.randn(30_000)}
    save(source, DcpxWriter(tmp_path))

    def targets() -> dict[str, Any]:
        return {
            "a": torch.zeros(40, 100, dtype=torch.float64).t(),
            "b": torch.zeros(50_000, dtype=torch.float32),
            "c": torch.zeros(60_000)[::2],
        }

    ours, stock = targets(), targets()
    dcp.load(ours, storage_reader=DcpxReader(tmp_path), no_dist=True)
    dcp.load(stock, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert_same(stock, ours)


def test_parameters_and_tensors_with_grad_round_trip(tmp_path: Path) -> None:
    model = torch.nn.Linear(300, 400)
    other = torch.nn.Linear(300, 400)
    save(model.state_dict(keep_vars=True), DcpxWriter(tmp_path))
    target = other.state_dict(keep_vars=True)
    version = target["weight"]._version
    dcp.load(target, storage_reader=DcpxReader(tmp_path), no_dist=True)
    assert_same(dict(model.named_parameters()), dict(other.named_parameters()))
    assert target["weight"]._version > version, "autograd must hear of the write"
