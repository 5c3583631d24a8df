"""Every call of DCP's interface, on one rank and on several."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.machine import seconds
from support.rank_fixture import StartRanks
from support.saves import (
    assert_loads,
    assert_whole,
    committed_ids,
    read_footer,
    save,
    save_ids,
)
from support.states import assert_same, blank_like, mixed_state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from torch_dcpx import (
    DcpxReader,
    DcpxSavePlanner,
    DcpxWriter,
    StorageError,
    UnsupportedError,
    verify,
)
from torch_dcpx.metadata.file import decode_save_id

READERS = (DcpxReader, dcp.FileSystemReader)


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable or uninitialized:UserWarning")
def test_keys_alone_load_the_same_with_both_readers(tmp_path: Path) -> None:
    save(mixed_state(3), tmp_path)
    for keys in (None, {"weights"}, {"weights.layer1", "scalar"}, {"optimizer.state"}):
        ours, stock = (
            _load_state_dict_from_keys(keys, storage_reader=reader(tmp_path)) for reader in READERS
        )
        assert_same(stock, ours)
        assert ours


def test_part_of_a_state_loads_and_the_rest_is_not_read(tmp_path: Path) -> None:
    state = mixed_state(3)
    save(state, tmp_path)
    part = {"bf16": state["bf16"], "optimizer": state["optimizer"]}
    reader = DcpxReader(tmp_path)
    target = blank_like(part)
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert_same(part, target)
    assert reader.last_report is not None
    assert reader.last_report.needed_bytes < state["bf16"].nbytes + 4096


def test_cached_plans_of_stock_save_what_the_state_holds_now(tmp_path: Path) -> None:
    state = {"a": torch.zeros(100), "b": {"c": torch.zeros(7, 9)}, "step": 0}
    for step in range(4):
        state["a"].fill_(step)
        state["step"] = step
        if step == 2:
            state["b"]["c"] = torch.full((3, 3), 2.0)  # type: ignore[index]
        dcp.save(
            state,
            storage_writer=DcpxWriter(tmp_path / str(step % 3)),
            planner=DefaultSavePlanner(enable_plan_caching=True),
            no_dist=True,
        )
        assert_loads(state, tmp_path / str(step % 3))


@pytest.mark.parametrize("kwargs", [{}, {"single_file_per_rank": False}])
def test_save_without_a_tensor_or_without_anything(tmp_path: Path, kwargs: Any) -> None:
    for number, state in enumerate(({"step": 3}, {}, {"empty": torch.zeros(0)}, {"a": {}})):
        save(state, tmp_path / str(number), **kwargs)
        assert_whole(state, tmp_path / str(number))


# ---- On several ranks ---------------------------------------------------------------------------


def state_of(seed: int, rows: int = 64) -> dict[str, Any]:
    """Returns this rank's shard of a tensor, a replicated one, and values."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    g = torch.Generator().manual_seed(seed)
    full = torch.randn(rows, 33, generator=g)
    local = full.chunk(mesh.size())[dist.get_rank()].clone()  # stock stages no view of a shard
    return {
        "model": {
            "sharded": DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride()
            ),
            "same": torch.randn(70, generator=g),
        },
        "step": seed,
        "names": ["a", f"b{seed}"],
    }


def plain(state: Any) -> Any:
    if isinstance(state, DTensor):
        return state.to_local()
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return [plain(value) for value in state] if isinstance(state, list) else state


def blank(seed: int, rows: int = 64) -> dict[str, Any]:
    state = state_of(seed + 1000, rows)
    state["step"], state["names"] = None, [None, None]
    return state


def assert_holds(path: Path, seed: int, rows: int = 64, **kwargs: Any) -> None:
    """Asserts that both readers load the state of `seed` on every rank."""
    for reader in READERS:
        target = blank(seed, rows)
        dcp.load(target, storage_reader=reader(path), **kwargs)
        assert_same(plain(state_of(seed, rows)), plain(target), f"{reader.__name__} {path}")


def assert_one_save(path: Path, *, may_be_silent: bool = False) -> None:
    """Asserts that all data files say the save that is committed; or none, if they may."""
    (committed,) = committed_ids(path)
    ids = save_ids(path)
    assert ids[next(name for name in ids if name.startswith("__0_"))] == committed
    assert set(ids.values()) <= {committed} | ({""} if may_be_silent else set()), ids


def rank_local(path: Path) -> None:
    """`use_collectives=False`, and what happens when the modes change in one directory."""
    rank = dist.get_rank()
    writer = DcpxWriter(path)
    for seed in (1, 2):
        mine = {"rank": torch.full((9,), float(10 * seed + rank)), "step": 10 * seed + rank}
        dcp.save(mine, storage_writer=writer, use_collectives=False)
        for reader in READERS:
            target: dict[str, Any] = {"rank": torch.zeros(9), "step": None}
            dcp.load(target, storage_reader=reader(path))
            assert_same(mine, target)
    assert (path / f"__{rank}.metadata").read_bytes().rfind(b"DCPXMETA") > 0
    (own,) = path.glob(f"__{rank}_*.distcp")
    name = f"__{rank}.metadata"
    assert read_footer(own).save_id == decode_save_id((path / name).read_bytes(), name)
    dist.barrier()
    dcp.save(state_of(3), storage_writer=writer)  # takes the place of all of them
    dist.barrier()
    assert list(path.glob("__*.metadata")) == []
    assert_holds(path, 3)
    with pytest.raises(UnsupportedError, match="checkpoint of all ranks"):
        dcp.save(mine, storage_writer=writer, use_collectives=False)
    dist.barrier()
    assert_holds(path, 3)


def cached_plans(path: Path) -> None:
    """Stock's plan caching: the same plan, then another shape, then that one again.

    A rank that writes by a plan of before does not learn of which save its files are.
    """
    writer = DcpxWriter(path)
    for seed, rows in ((1, 64), (2, 64), (3, 30), (4, 30)):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state_of(seed, rows), storage_writer=writer, planner=planner)
        assert_holds(path, seed, rows)
        assert_one_save(path, may_be_silent=seed % 2 == 0)
        assert verify(path).ok
        dist.barrier()
    planner = DcpxSavePlanner()  # keeps plans as well, and takes each save's id
    for seed in (5, 6):
        dcp.save(state_of(seed), storage_writer=writer, planner=planner)
        assert_holds(path, seed)
        assert_one_save(path)
        dist.barrier()


class FailingPlanner(DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> Any:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("planned")
        return super().resolve_data(write_item)


def next_save_after_a_failure(path: Path) -> None:
    """The coordinator is never told of rank 1's failure, and yet nothing is in the way."""
    writer = DcpxWriter(path)
    dcp.save(state_of(1), storage_writer=writer)
    failures: list[CheckpointException] = []
    go_on = threading.Event()

    def fail() -> None:
        try:
            dcp.save(state_of(2), storage_writer=writer, planner=FailingPlanner())
        except CheckpointException as failure:
            failures.append(failure)  # its traceback keeps the frames of the failed save
        done.set()
        go_on.wait(seconds(120))

    done = threading.Event()
    thread = threading.Thread(target=fail)
    thread.start()
    assert done.wait(seconds(120))
    assert {r: type(failure[0]) for r, failure in failures[0].failures.items()} == {
        1: ZeroDivisionError
    }
    assert_holds(path, 1)
    dist.barrier()
    for following in (writer, DcpxWriter(path)):
        dcp.save(state_of(3), storage_writer=following)
        assert_holds(path, 3)
    go_on.set()
    thread.join(seconds(120))


class LateReader(DcpxReader):
    """Rank 0 saves over the checkpoint between the others' look at the metadata and its own."""

    writer: DcpxWriter

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() != 0:
            metadata = super().read_metadata(*args, **kwargs)
            dist.barrier()
            return metadata
        dist.barrier()
        same = {"model": {"same": torch.zeros(70)}}
        dcp.save(same, storage_writer=self.writer, no_dist=True)
        return super().read_metadata(*args, **kwargs)


def replaced_between_ranks(path: Path) -> None:
    """A re-save between two ranks' looks at the metadata is noticed before a tensor is touched."""
    for format_of in (DcpxWriter, dcp.FileSystemWriter):
        ckpt = path / format_of.__name__
        reader = LateReader(ckpt)
        reader.writer = DcpxWriter(ckpt)
        dcp.save(state_of(1), storage_writer=format_of(ckpt))
        if format_of is DcpxWriter:  # one writer for many saves keeps stock's save id
            dcp.save(state_of(1), storage_writer=reader.writer)
        same = torch.ones(70)
        with pytest.raises(CheckpointException) as caught:
            dcp.load({"model": {"same": same}}, storage_reader=reader)
        errors = [failure[0] for failure in caught.value.failures.values()]
        assert errors, "no rank failed"
        for error in errors:
            assert isinstance(error, StorageError), error
            assert (error.errno, error.touched) == (errno.ESTALE, ())
        assert torch.equal(same, torch.ones(70))
        dist.barrier()


class LosingPlanner(DefaultSavePlanner):
    """Loses an item of rank 1 between the plan and the write."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        if dist.get_rank() == 1:
            plan = SavePlan(plan.items[:-1], plan.storage_data, plan.planner_data)
            self.plan = plan
        return plan


def lost_items(path: Path) -> None:
    """Nothing is published that would miss a chunk, and every rank says so."""
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state_of(6), storage_writer=DcpxWriter(path), planner=LosingPlanner())
    assert "no rank wrote" in str(caught.value)
    assert not (path / ".metadata").exists()


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_every_call_on_several_ranks(ranks: StartRanks, tmp_path: Path, count: int) -> None:
    for call in (
        rank_local,
        cached_plans,
        next_save_after_a_failure,
        replaced_between_ranks,
        lost_items,
    ):
        ranks(count)(call, tmp_path / call.__name__)
