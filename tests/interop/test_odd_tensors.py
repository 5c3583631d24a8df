"""Tensors that addresses and strides do not describe: kept, or refused by name before any byte."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import odd_tensors
from support.odd_tensors import Folded, Tagged, Wrapper
from support.saves import READERS, WRITERS, assert_loads, files_in, raises_one, save
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from torch_dcpx import (
    _C,
    DcpxReader,
    ReadOptions,
    UnsafePickleError,
    UnsupportedError,
    WriteOptions,
)
from torch_dcpx.unpickle.torch_items import fill_target, load_by_torch

Maker = Callable[[torch.Generator], torch.Tensor]
MEMORYLESS: dict[str, Maker] = {
    "fake": odd_tensors.fake_tensor,
    "freed": odd_tensors.freed_tensor,
    "functional": odd_tensors.functional_tensor,
    "meta": lambda _: torch.empty(4, 5, device="meta"),
    "zero": odd_tensors.zero_tensor,
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", MEMORYLESS)
def test_tensor_without_memory_is_refused_by_name_and_changes_nothing(
    tmp_path: Path, name: str
) -> None:
    kept = {"w": torch.arange(5)}
    save(kept, tmp_path)
    before = files_in(tmp_path)
    with raises_one(UnsupportedError) as raised:
        save({"w": torch.ones(3), "layer.odd": MEMORYLESS[name](generator())}, tmp_path)
    assert "'layer.odd'" in str(raised.error)
    assert files_in(tmp_path) == before
    assert_loads(kept, tmp_path)


def test_refusal_comes_before_the_first_of_many_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte items fill the budget many times over before the odd tensor's turn."""
    state: dict[str, Any] = {f"bytes{i}": bytes(100_000) for i in range(30)}
    windows: list[int] = []

    class Job(_C.WriteJob):
        def write(self, rows: Any, *args: Any, **kwargs: Any) -> Any:
            windows.append(len(rows))
            return super().write(rows, *args, **kwargs)

    monkeypatch.setattr(_C, "WriteJob", Job)
    options = WriteOptions(host_memory_bytes=256 << 10, slot_bytes=256 << 10)
    for name in ("freed", "functional", "meta", "zero"):
        with raises_one(UnsupportedError):
            odd = {"layer.odd": MEMORYLESS[name](generator())}
            save({**state, **odd}, tmp_path, options=options)
        assert windows == [], name
    save(state, tmp_path, options=options)
    assert len(windows) > 10


def test_tensor_under_way_is_saved_as_the_tensor_that_arrives(tmp_path: Path) -> None:
    """Stock pickles the wrapper, and no load takes that."""
    under_way = odd_tensors.async_tensor(generator())
    save({"w": under_way}, tmp_path)
    assert_loads({"w": torch.randn(4, 5, generator=generator())}, tmp_path)


def test_dtype_that_torch_cannot_save_is_refused_by_name(tmp_path: Path) -> None:
    for dtype in (torch.int1, torch.int4, torch.uint7, torch.bits8):
        odd = odd_tensors.low_bits(dtype)(generator())
        with raises_one(UnsupportedError) as raised:
            save({"layer.odd": odd}, tmp_path / "ckpt")
        assert "'layer.odd'" in str(raised.error)
        assert str(dtype) in str(raised.error)
        assert not (tmp_path / "ckpt").exists()


def test_target_without_memory_is_filled_by_torch(tmp_path: Path) -> None:
    save({"w": torch.arange(20.0).view(4, 5)}, tmp_path)
    target = odd_tensors.functional_tensor(generator())
    dcp.load({"w": target}, storage_reader=DcpxReader(tmp_path), no_dist=True)
    torch._sync(target)  # replays on it what was done to its views
    found = torch._from_functional_tensor(target)
    assert torch.equal(found, torch.arange(20.0).view(4, 5))


def test_target_whose_memory_was_freed_is_refused_by_name(tmp_path: Path) -> None:
    save({"layer.freed": torch.ones(4, 5)}, tmp_path)
    with raises_one(UnsupportedError):
        load = {"layer.freed": odd_tensors.freed_tensor(generator())}
        dcp.load(load, storage_reader=DcpxReader(tmp_path), no_dist=True)


def test_sparse_coo_tensor_is_refused_by_the_plan(tmp_path: Path) -> None:
    """Stock's load fills a detached copy of the target, and tells nobody."""
    with raises_one(UnsupportedError) as raised:
        save({"layer.odd": torch.eye(3).to_sparse()}, tmp_path / "ckpt")
    assert "'layer.odd'" in str(raised.error)
    assert not (tmp_path / "ckpt").exists()


# torch 2.15 says that checking takes time.
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")
def test_sparse_coo_item_that_stock_wrote_from_a_device_fills_its_target() -> None:
    stored, target = torch.eye(3).to_sparse(), torch.ones(3, 3).to_sparse()
    data = io.BytesIO()
    torch.save(stored, data)
    data.seek(0)
    index, zeros, sizes = MetadataIndex("w"), torch.Size([0, 0]), torch.Size([3, 3])
    item = ReadItem(LoadItemType.TENSOR, index, zeros, index, zeros, sizes)
    planner = DefaultLoadPlanner()
    planner.state_dict = {"w": target}
    fill_target(load_by_torch(data, "file", item, planner, ReadOptions()), item, planner)
    assert torch.equal(target.to_dense(), torch.eye(3))


@pytest.mark.parametrize("kind", [Tagged, Wrapper])
@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_tensor_subclass_is_loaded_with_leave_only(tmp_path: Path, kind: Any, writer: str) -> None:
    def made(seed: int) -> torch.Tensor:
        tensor = torch.randn(4, 5, generator=generator(seed))
        return tensor.as_subclass(Tagged) if kind is Tagged else Wrapper(tensor)

    save({"w": made(1)}, tmp_path, writer)
    with raises_one(UnsafePickleError) as raised:
        dcp.load({"w": made(2)}, storage_reader=DcpxReader(tmp_path), no_dist=True)
    name = f"{kind.__module__}.{kind.__name__}"
    assert (raised.error.global_name, raised.error.fqn) == (name, "w")
    assert f'safe_globals=["{name}"]' in str(raised.error)

    def loads(options: ReadOptions) -> bool:
        target = {"w": made(2)}
        dcp.load(target, storage_reader=DcpxReader(tmp_path, options=options), no_dist=True)
        found, expected = target["w"], made(1)
        assert type(found) is kind
        return bool((found == expected).all())

    assert loads(ReadOptions(safe_globals=(kind,)))
    assert kind not in torch.serialization.get_safe_globals()
    assert loads(ReadOptions(trusted=True))
    with torch.serialization.safe_globals([kind]):
        assert loads(ReadOptions())
        assert loads(ReadOptions(safe_globals=(kind,)))
        assert kind in torch.serialization.get_safe_globals()


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "view"])
def test_chunk_of_other_dimensions_than_its_tensor_comes_back(
    tmp_path: Path, writer: str, reader: str, layout: str
) -> None:
    def made(seed: int) -> torch.Tensor:
        base = torch.randn(8, 6, generator=generator(seed))
        tensor = {"contiguous": base, "transposed": base.t(), "view": base[2:5, 1:]}[layout]
        return tensor.as_subclass(Folded)

    save({"w": made(1)}, tmp_path, writer)
    target = made(2)
    dcp.load({"w": target}, storage_reader=READERS[reader](tmp_path), no_dist=True)
    assert torch.equal(target.as_subclass(torch.Tensor), made(1).as_subclass(torch.Tensor))


# ---- Targets that share memory ------------------------------------------------------------------


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("writer", ["ours", "stock", "compressed"])
def test_tied_targets_of_different_values_hold_the_later_one_whole(
    tmp_path: Path, order: str, writer: str
) -> None:
    """An untied checkpoint in a tied model: nothing is mixed, and nothing is called corrupt."""
    count = 1 << 19
    state = {name: torch.full((count,), float(ord(name))) for name in order}
    extensions: Any = [ZStandard()] if writer == "compressed" else None
    save(state, tmp_path, "stock" if writer == "stock" else "ours", _extensions=extensions)
    shared = torch.zeros(count + 64)
    checks: tuple[Any, ...] = ("blocks", "none")
    ours = [DcpxReader(tmp_path, options=ReadOptions(verify=v, workers=8)) for v in checks]
    for first, second in ((0, 0), (0, 64), (64, 0)):
        found = []
        for reader in (dcp.FileSystemReader(tmp_path), *ours * 3):
            shared.zero_()
            views = (shared[first : first + count], shared[second : second + count])
            target = dict(zip(order, views, strict=True))
            dcp.load(target, storage_reader=reader, no_dist=True)
            found.append(shared.clone())
        assert all(torch.equal(found[0], one) for one in found[1:])


def test_tied_targets_of_which_one_is_converted_hold_the_later_one(tmp_path: Path) -> None:
    for dtypes in ((torch.float64, torch.float32), (torch.float32, torch.float64)):
        state = {n: torch.full((9,), float(i), dtype=dtypes[i]) for i, n in enumerate("ab")}
        save(state, tmp_path / str(dtypes[0]))
        target = torch.full((9,), 7.0)
        dcp.load({"a": target, "b": target},
                 storage_reader=DcpxReader(tmp_path / str(dtypes[0])), no_dist=True)  # fmt: skip
        assert torch.equal(target, torch.full((9,), 1.0))


@pytest.mark.parametrize("writer", WRITERS)
def test_stride_of_a_single_element_beyond_all_bytes_loads_everywhere(
    tmp_path: Path, writer: str
) -> None:
    values = torch.arange(12, dtype=torch.int32)
    huge = (1 << 62, 2), (1 << 62, 1)
    state = {str(i): values.as_strided((1, 3), strides) for i, strides in enumerate(huge)}
    save(state, tmp_path, writer)
    for reader in (DcpxReader(tmp_path), dcp.FileSystemReader(tmp_path)):
        for strides in ((3, 1), *huge):
            target = {name: torch.zeros(12, dtype=torch.int32) for name in state}
            views = {name: own.as_strided((1, 3), strides) for name, own in target.items()}
            dcp.load(views, storage_reader=reader, no_dist=True)
            for name, own in state.items():
                assert torch.equal(views[name], own)
                assert not target[name][5:].any()


def test_target_whose_rows_overlap_gets_what_stock_gives_it(tmp_path: Path) -> None:
    rows = torch.arange(20 * 1100, dtype=torch.float32).reshape(20, 1100)
    save({"t": rows}, tmp_path)
    found = []
    ours = DcpxReader(tmp_path, options=ReadOptions(direct_io=False))
    for reader in (ours, dcp.FileSystemReader(tmp_path)):
        memory = torch.zeros(19 * 550 + 1100)  # each row, longer than a page, covers half the next
        dcp.load(
            {"t": memory.as_strided(rows.shape, (550, 1))}, storage_reader=reader, no_dist=True
        )
        found.append(memory)
    assert torch.equal(*found)
