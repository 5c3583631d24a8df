"""Errors: stock's types and texts where they are stock's, typed ones with fields where ours."""

from __future__ import annotations

import dataclasses
import errno
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.foreign import Piece, write_foreign
from support.rank_fixture import StartRanks
from support.saves import READERS, WRITERS, change, load, raises_one, read_footer, save
from support.states import assert_same
from support.zip_samples import saved
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from torch_dcpx import (
    CorruptionError,
    DcpxReader,
    DcpxWriter,
    PlanError,
    StorageError,
    errors,
)


def state() -> dict[str, Any]:
    return {
        "weight": torch.arange(60.0).view(6, 10),
        "ids": torch.arange(5),
        "nested": {"step": 3, "names": ["a", "b"]},
    }


def outcome(action: Callable[[], Any], root: Path) -> Any:
    """Returns what the action gives, or type and text of its error, the one of rank 0."""
    try:
        return action()
    except CheckpointException as failed:
        error = failed.failures[0][0]
    except RuntimeError as raised:  # in rank-local mode DCP wraps nothing
        error = raised
    return type(error), str(error).replace(str(root), "ROOT")


def outcome_of_load(target: Any, reader: Any, planner: DefaultLoadPlanner) -> Any:
    def load() -> Any:
        dcp.load(target, storage_reader=reader, planner=planner, no_dist=True)
        return target

    return outcome(load, Path(reader.path))


# ---- Loads --------------------------------------------------------------------------------------

LOADS: dict[str, tuple[dict[str, Any], dict[str, Any], type | None]] = {
    # name -> (targets, planner's arguments, stock's error)
    "missing key": ({"more": torch.zeros(1)}, {}, RuntimeError),
    "missing nested key": ({"nested": {"more": None}}, {}, RuntimeError),
    "missing key, partial load": (
        {"more": torch.ones(1), "ids": torch.zeros(5, dtype=torch.int64)},
        {"allow_partial_load": True},
        None,
    ),
    "fewer keys": ({"ids": torch.zeros(5, dtype=torch.int64)}, {}, None),
    "another size": ({"weight": torch.zeros(6, 11)}, {}, ValueError),
    "another number of dimensions": ({"weight": torch.zeros(60)}, {}, ValueError),
    "a scalar for a matrix": ({"weight": torch.zeros(())}, {}, ValueError),
    "a tensor for bytes": ({"nested": {"step": torch.zeros(3)}}, {}, None),
    "bytes for a tensor": ({"ids": None}, {}, ValueError),
    "a list for a leaf": ({"nested": {"step": [None, None]}}, {}, None),
    "a list for one leaf": ({"nested": {"names": [torch.zeros(1), None]}}, {}, RuntimeError),
    "a leaf for a list": ({"nested": {"names": None}}, {}, None),
    "two keys in one": ({"nested": {"step": None}, "nested.step": None}, {}, ValueError),
    "no flattening": ({"nested": None}, {"flatten_state_dict": False}, RuntimeError),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_load_that_the_planner_refuses_fails_with_stocks_text(tmp_path: Path, writer: str) -> None:
    save(state(), tmp_path, writer)
    for name, (targets, kwargs, error) in LOADS.items():
        found = []
        for reader in READERS.values():
            target = pickle.loads(pickle.dumps(targets))
            found.append(outcome_of_load(target, reader(tmp_path), DefaultLoadPlanner(**kwargs)))
        ours, stock = found
        if error is None:
            assert_same(stock, ours)
        else:
            assert stock[0] is error, name
            assert ours == stock, name


@pytest.mark.parametrize("writer", WRITERS)
def test_target_of_another_size_fails_with_stocks_text(tmp_path: Path, writer: str) -> None:
    save({"w": torch.ones(6, 10)}, tmp_path, writer)
    for made in (torch.zeros(6, 9), torch.zeros(60)):
        planner = DefaultLoadPlanner()
        planner.resolve_tensor = lambda _, made=made: made  # type: ignore[method-assign]
        target = {"w": torch.zeros(6, 10)}
        texts = [outcome_of_load(target, of(tmp_path), planner) for of in READERS.values()]
        assert texts[0] == texts[1]
        assert texts[0][0] is AssertionError
        assert texts[0][1].endswith(f"mismatch sizes {made.size()} vs torch.Size([6, 10])")


CONVERSIONS = [
    (torch.float32, torch.float64), (torch.float64, torch.bfloat16), (torch.int64, torch.float16),
    (torch.float32, torch.int8), (torch.bool, torch.int32), (torch.float32, torch.bool),
    (torch.float32, torch.float8_e4m3fn), (torch.float8_e5m2, torch.float32),
    (torch.float32, torch.complex64), (torch.uint16, torch.int64), (torch.int32, torch.uint8),
]  # fmt: skip


@pytest.mark.parametrize("writer", WRITERS)
def test_target_of_another_dtype_is_converted_as_by_stock(tmp_path: Path, writer: str) -> None:
    g = torch.Generator().manual_seed(5)
    source = {
        f"{a}->{b}": (torch.randn(40, 30, generator=g) * 50).abs().to(a) for a, b in CONVERSIONS
    }
    save(source, tmp_path, writer)
    found = []
    for reader in READERS.values():
        target = {f"{a}->{b}": torch.zeros(40, 30, dtype=b) for a, b in CONVERSIONS}
        dcp.load(target, storage_reader=reader(tmp_path), no_dist=True)
        found.append(target)
    assert_same(found[1], found[0])


@pytest.mark.parametrize("kind", ["smaller", "other dimensions", "sparse"])
def test_stored_tensor_that_is_not_what_the_metadata_says_is_an_error(
    tmp_path: Path, kind: str
) -> None:
    planned = torch.ones(6, 10)
    stored = {
        "smaller": torch.ones(6, 9),
        "other dimensions": torch.ones(60),
        "sparse": torch.eye(6, 10).to_sparse(),
    }[kind]
    write_foreign(tmp_path, [Piece("w", saved(stored), planned)])
    with pytest.raises(CheckpointException):
        load({"w": planned}, tmp_path, "stock")
    with pytest.raises(CheckpointException) as caught:
        load({"w": planned}, tmp_path)
    error = caught.value.failures[0][0]
    if kind != "sparse":  # that one torch itself refuses to copy
        assert type(error) is CorruptionError
        assert (error.fqn, error.path) == ("w", str(tmp_path / "__0_0.distcp"))


# ---- No checkpoint, or a bad one ----------------------------------------------------------------


def test_entry_without_a_place_is_corruption_of_the_metadata(tmp_path: Path) -> None:
    def forget(metadata: Metadata) -> None:
        assert metadata.storage_data is not None
        metadata.storage_data.clear()

    value = torch.ones(3)
    write_foreign(tmp_path, [Piece("w", saved(value), value)], change=forget)
    with raises_one(KeyError):
        load({"w": value}, tmp_path, "stock")
    with raises_one(CorruptionError) as raised:
        load({"w": value}, tmp_path)
    assert (raised.error.fqn, raised.error.touched) == ("w", ())


# ---- Saves --------------------------------------------------------------------------------------


class Refuses:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("I cannot be pickled")


@pytest.mark.parametrize(
    "bad",
    [
        {"a": 1, "b": Refuses()},
        {"a": threading.Lock()},
        {"a": {"b": 1}, "a.b": 2},
        {"a": lambda: 0},
    ],
)
def test_state_that_stock_cannot_save_fails_with_its_text(tmp_path: Path, bad: Any) -> None:
    found = [
        outcome(lambda n=name: save(bad, tmp_path / n, n), tmp_path) for name in ("ours", "stock")
    ]
    assert found[0] == found[1]
    assert isinstance(found[0], tuple)
    assert [*(tmp_path / "ours").glob("*.distcp"), *(tmp_path / "ours").glob(".metadata*")] == []


def test_path_that_is_a_file_is_a_storage_error_with_errno(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointException) as caught:
            save(state(), path, "stock")
        stock = caught.value.failures[0][0]
        with raises_one(StorageError) as raised:
            save(state(), path)
        assert {raised.error.errno, stock.errno} <= {errno.EEXIST, errno.ENOTDIR}
        assert raised.error.path == str(tmp_path / "file")


def test_item_that_the_plan_writes_twice_is_a_plan_error(tmp_path: Path) -> None:
    class Twice(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            return dataclasses.replace(plan, items=[*plan.items, plan.items[-1]])

        def create_global_plan(self, all_plans: Any) -> Any:
            _, metadata = super().create_global_plan(
                [dataclasses.replace(plan, items=plan.items[:-1]) for plan in all_plans]
            )
            return all_plans, metadata

    with raises_one(PlanError) as raised:
        dcp.save({"w": torch.ones(3)}, storage_writer=DcpxWriter(tmp_path / "ckpt"),
                 planner=Twice(), no_dist=True)  # fmt: skip
    assert raised.error.fqn == "w"
    assert not (tmp_path / "ckpt").exists(), "it was refused before anything was made"


# ---- Between ranks ------------------------------------------------------------------------------


def failures(run: Callable[[], object]) -> dict[int, Any]:
    """Returns the error of each rank, as DCP ships them to this one."""
    with pytest.raises(CheckpointException) as caught:
        run()
    return {rank: failure[0] for rank, failure in caught.value.failures.items()}


def damaged_file_of_one_rank_is_named(path: Path) -> None:
    rank = dist.get_rank()
    target = {f"own{rank}": torch.zeros(50_000, dtype=torch.int64)}
    dcp.save({f"own{rank}": torch.arange(50_000)}, storage_writer=DcpxWriter(path))
    dcp.load(target, storage_reader=DcpxReader(path))
    dist.barrier()
    file = path / "__1_0.distcp"
    row = read_footer(file).row("own1")
    if rank == 1:
        change(file, row.payload_offset + 70_000, b"\xff\xfe")
    dist.barrier()
    shipped = failures(lambda: dcp.load(target, storage_reader=DcpxReader(path)))
    assert set(shipped) == {1}
    error = shipped[1]
    assert isinstance(error, errors.CorruptionError)
    assert (error.fqn, error.path) == ("own1", str(file))
    assert error.offset is not None and error.nbytes is not None
    assert error.offset <= row.payload_offset + 70_000 < error.offset + error.nbytes
    assert (error.expected is None) == (error.found is None)


def metadata_of_ranks(path: Path) -> None:
    """Each rank has its own. Where the global one is bad nobody falls back to them."""
    rank = dist.get_rank()
    state = {"w": torch.arange(100), "step": rank}
    dcp.save(state, storage_writer=DcpxWriter(path), use_collectives=False)
    dist.barrier()
    target: dict[str, Any] = {"w": torch.zeros(100, dtype=torch.int64), "step": None}
    dcp.load(target, storage_reader=DcpxReader(path))
    assert target["step"] == rank
    dist.barrier()
    if rank == 0:
        (path / ".metadata").write_bytes(b"\x80\x04 this is no metadata")
    dist.barrier()
    shipped = failures(lambda: dcp.load(target, storage_reader=DcpxReader(path)))
    assert set(shipped) >= {0, 1}
    assert {type(error) for error in shipped.values()} == {errors.CorruptionError}
    assert {error.path for error in shipped.values()} == {str(path / ".metadata")}
    dist.barrier()
    if rank == 1:
        (path / ".metadata").unlink()
        (path / "__1.metadata").unlink()
    dist.barrier()
    shipped = failures(lambda: dcp.load(target, storage_reader=DcpxReader(path)))
    assert set(shipped) == {1}
    assert isinstance(shipped[1], errors.NotCommittedError)
    assert shipped[1].path == str(path / "__1.metadata")
    assert "'__1.metadata'" in str(shipped[1]) and "1 other rank" in str(shipped[1])


@pytest.mark.multirank
@pytest.mark.parametrize("case", [damaged_file_of_one_rank_is_named, metadata_of_ranks])
def test_typed_errors_reach_every_rank_with_their_fields(
    ranks: StartRanks, tmp_path: Path, case: Callable[[Path], None]
) -> None:
    ranks(2)(case, tmp_path / "ckpt")
