"""Loads that meet a re-save: the old checkpoint, the new one, or ESTALE before a tensor changed."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import RunPython
from support.saves import assert_loads, raises_one, save, save_rank_local
from support.states import assert_same
from torch.distributed.checkpoint.planner import LoadPlan

from torch_dcpx import (
    DcpxReader,
    DcpxWriter,
    NotCommittedError,
    ReadOptions,
    StorageError,
)
from torch_dcpx.storage import place


def state_of(seed: int) -> dict[str, Any]:
    return {f"t{i}": torch.full((200_000,), float(10 * seed + i)) for i in range(6)}


class ReplacedReader(DcpxReader):
    """Runs `meanwhile` right after the step named `after`."""

    after = ""
    meanwhile: Callable[[], None]

    def _step(self, name: str, result: Any) -> Any:
        if name == self.after:
            self.meanwhile()
        return result

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("read_metadata", super().read_metadata(*args, **kwargs))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return self._step("prepare_local_plan", super().prepare_local_plan(plan))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return self._step("prepare_global_plan", super().prepare_global_plan(plans))


def replaced_reader(path: Path, after: str, **options: Any) -> ReplacedReader:
    found = ReplacedReader(path, options=ReadOptions(**options))
    found.after = after
    found.meanwhile = lambda: save(state_of(1), path)
    return found


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_checkpoint_replaced_before_its_files_are_open_touches_nothing_and_then_is_read_whole(
    tmp_path: Path, writer: str
) -> None:
    save(state_of(0), tmp_path, writer)
    target = state_of(2)
    with raises_one(StorageError) as raised:
        dcp.load(target, storage_reader=replaced_reader(tmp_path, "read_metadata"), no_dist=True)
    assert raised.error.errno == errno.ESTALE
    assert "was replaced by save" in str(raised.error)
    assert raised.error.touched == ()
    assert_same(state_of(2), target)
    assert_loads(state_of(1), tmp_path)
    for after, direct_io in itertools.product(
        ("prepare_local_plan", "prepare_global_plan"), (True, False)
    ):
        path = tmp_path / f"{after} {direct_io}"
        save(state_of(0), path, writer)
        target = state_of(2)
        reader = replaced_reader(path, after, direct_io=direct_io)
        dcp.load(target, storage_reader=reader, no_dist=True)
        assert_same(state_of(0), target)
        assert_loads(state_of(1), path)


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENOENT])
def test_more_files_than_may_stay_open_are_said_to_be_replaced_or_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    path = tmp_path / "ckpt"
    save(state_of(0), path, single_file_per_rank=False)
    monkeypatch.setattr(place, "_max_open_files", lambda: 0)
    target, reader = state_of(2), replaced_reader(path, "prepare_local_plan")
    if code == errno.ENOENT:
        reader.meanwhile = lambda: shutil.rmtree(path)
    with raises_one(StorageError) as raised:
        dcp.load(target, storage_reader=reader, no_dist=True)
    assert raised.error.errno == code
    assert code == errno.ESTALE or raised.error.path.endswith(".distcp")
    changed = {key for key in target if not torch.equal(target[key], state_of(2)[key])}
    assert changed <= set(raised.error.touched)


def test_any_limit_of_open_files_loads_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(state_of(0), tmp_path, single_file_per_rank=False)
    options = ReadOptions(host_memory_bytes=1 << 20, slot_bytes=1 << 20, workers=1)
    for limit in (0, 1, 4, 6, 4096):
        monkeypatch.setattr(place, "_max_open_files", lambda limit=limit: limit)
        target = {key: value.double() for key, value in state_of(2).items()}  # staged: many windows
        dcp.load(target, storage_reader=DcpxReader(tmp_path, options=options), no_dist=True)
        assert_same({key: value.double() for key, value in state_of(0).items()}, target)


def prepared(path: Path) -> tuple[DcpxReader, LoadPlan]:
    """Returns a reader and its rank's plan, as far as DCP's first collective."""
    found = DcpxReader(path)
    metadata = found.read_metadata()
    found.set_up_storage_reader(metadata, True, rank=0, use_collectives=True)
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(state_of(2), metadata, True)
    return found, found.prepare_local_plan(planner.create_local_plan())


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_ranks_that_found_different_saves_are_told_apart(tmp_path: Path, writer: str) -> None:
    save(state_of(0), tmp_path, writer)
    coordinator, first = prepared(tmp_path)
    same = prepared(tmp_path)[1]
    assert coordinator.prepare_global_plan([first, same]) == [first, same]
    save(state_of(1), tmp_path, writer)
    other = prepared(tmp_path)[1]
    with pytest.raises(StorageError, match=r"rank 0 read .* rank 3 that of ") as caught:
        coordinator.prepare_global_plan(
            [first, same, LoadPlan([]), pickle.loads(pickle.dumps(other))]
        )
    assert caught.value.errno == errno.ESTALE
    assert caught.value.touched == ()


@pytest.mark.usefixtures("no_leaks")
def test_saves_through_one_writer_are_told_apart(tmp_path: Path) -> None:
    """Stock's save id stays the same until the writer is reset."""
    writer = DcpxWriter(tmp_path)
    found = []
    for seed in (0, 1):
        dcp.save(state_of(seed), storage_writer=writer, no_dist=True)
        found.append(prepared(tmp_path))
    (coordinator, first), (_, second) = found
    with pytest.raises(StorageError) as caught:
        coordinator.prepare_global_plan([first, second])
    assert caught.value.errno == errno.ESTALE


@pytest.mark.usefixtures("no_leaks")
def test_ranks_with_and_without_metadata_in_common_are_told_apart(tmp_path: Path) -> None:
    save_rank_local(state_of(0), tmp_path, 0)
    local = DcpxReader(tmp_path)
    with pytest.raises(NotCommittedError):
        local.read_metadata()
    metadata = local.read_metadata(rank=0)
    save(state_of(1), tmp_path / "global")
    for path in (tmp_path / "global").iterdir():
        path.rename(tmp_path / path.name.replace("__0_0", "__0_9"))
    local.set_up_storage_reader(metadata, True, rank=0, use_collectives=False)
    first = local.prepare_local_plan(LoadPlan([]))
    assert local.prepare_global_plan([first, first]) == [first, first]
    other = DcpxReader(tmp_path)
    other.read_metadata()
    with pytest.raises(StorageError, match="rank-local") as caught:
        local.prepare_global_plan([first, other.prepare_local_plan(LoadPlan([]))])
    assert caught.value.errno == errno.ESTALE
    local.reset()
    other.reset()


@pytest.mark.usefixtures("no_leaks")
def test_ranks_may_load_from_directories_of_their_own(tmp_path: Path) -> None:
    for rank in range(2):
        save(state_of(rank), tmp_path / str(rank))
    (coordinator, first), (_, second) = (prepared(tmp_path / str(rank)) for rank in range(2))
    assert coordinator.prepare_global_plan([first, second]) == [first, second]
    # What a planner notes in its plans is not ours to compare.
    plans = [first, LoadPlan([], "mine"), LoadPlan([], {"any": "thing"})]
    assert coordinator.prepare_global_plan(plans) == plans


@pytest.mark.usefixtures("no_leaks")
def test_places_that_changed_after_the_files_were_opened_are_read_anew(tmp_path: Path) -> None:
    for seed in (0, 1):
        save(state_of(seed), tmp_path / str(seed))

    class RedirectedReader(DcpxReader):
        def read_data(self, plan: LoadPlan, planner: Any) -> Any:
            self.path = tmp_path / "1"
            return super().read_data(plan, planner)

    class SwappingReader(DcpxReader):
        def read_data(self, plan: LoadPlan, planner: Any) -> Any:
            entries = list(self.storage_data.values())
            self.storage_data = dict(zip(self.storage_data, reversed(entries), strict=True))
            return super().read_data(plan, planner)

    target = state_of(2)
    with raises_one(StorageError):  # its metadata are those of another save
        dcp.load(target, storage_reader=RedirectedReader(tmp_path / "0"), no_dist=True)
    assert_same(state_of(2), target)
    dcp.load(target, storage_reader=SwappingReader(tmp_path / "0"), no_dist=True)
    expected = list(state_of(0).values())
    assert_same(expected[::-1], list(target.values()))


@pytest.mark.usefixtures("no_leaks")
def test_file_that_the_final_plan_does_without_may_be_missing(tmp_path: Path) -> None:
    """Where each node sees files of its own, planners spread the reads."""
    save(state_of(0), tmp_path, single_file_per_rank=False)
    metadata = DcpxReader(tmp_path).read_metadata()
    missing = next(index for index in metadata.storage_data if index.fqn == "t3")
    (tmp_path / metadata.storage_data[missing].relative_path).unlink()

    class LocalPlanner(dcp.DefaultLoadPlanner):
        def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
            return LoadPlan([item for item in central_plan.items if item.dest_index.fqn != "t3"])

    target = state_of(2)
    dcp.load(target, storage_reader=DcpxReader(tmp_path), planner=LocalPlanner(), no_dist=True)
    assert_same({**state_of(0), "t3": state_of(2)["t3"]}, target)
    with raises_one(StorageError) as raised:
        dcp.load(target, storage_reader=DcpxReader(tmp_path), no_dist=True)
    assert raised.error.errno == errno.ENOENT


def test_process_with_few_descriptors_left_loads_all_the_same(
    tmp_path: Path, run_warm: RunPython
) -> None:
    save({f"t{i}": torch.full((3,), float(i)) for i in range(60)}, tmp_path / "ckpt",
         single_file_per_rank=False)  # fmt: skip
    code = """
import os, resource, sys, torch, warnings
import torch.distributed.checkpoint as dcp
from torch_dcpx import DcpxReader
warnings.simplefilter("ignore")
state = {f"t{i}": torch.zeros(3) for i in range(60)}
dcp.load({}, storage_reader=DcpxReader(sys.argv[1]), no_dist=True)
used = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 60, used + 60))
kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(40)]
dcp.load(state, storage_reader=DcpxReader(sys.argv[1]), no_dist=True)
print(all(int(t[0]) == i for i, t in enumerate(state.values())), flush=True)
os._exit(0)
"""
    assert run_warm(code, str(tmp_path / "ckpt")).stdout == "True\n"


@pytest.mark.usefixtures("no_leaks")
def test_files_kept_open_are_bounded_over_all_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(state_of(0), tmp_path, single_file_per_rank=False)
    monkeypatch.setattr(place, "_max_open_files", lambda: 8)

    def count_of_open_files() -> int:
        links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        return sum(os.path.realpath(link).endswith(".distcp") for link in links)

    kept = [prepared(tmp_path)[0] for _ in range(3)]
    assert count_of_open_files() == 8
    for one in kept[:2]:
        one.reset()
    assert count_of_open_files() <= 6
    target = state_of(2)
    dcp.load(target, storage_reader=kept[0], no_dist=True)
    assert_same(state_of(0), target)
    kept.clear()
    gc.collect()
    assert count_of_open_files() == 0
    again = prepared(tmp_path)[0]  # the budget is whole again
    assert count_of_open_files() == 6
    again.reset()


@pytest.mark.usefixtures("no_leaks")
def test_files_of_a_load_that_went_no_further_are_closed_by_the_next(tmp_path: Path) -> None:
    save(state_of(0), tmp_path)
    kept, _ = prepared(tmp_path)
    assert kept._DcpxReader__found is not None
    copy = pickle.loads(pickle.dumps(kept))
    for again in (kept, copy):
        target = state_of(2)
        dcp.load(target, storage_reader=again, no_dist=True)
        assert_same(state_of(0), target)
        assert again._DcpxReader__found is None


def test_plan_that_changed_after_the_files_were_opened_is_served(tmp_path: Path) -> None:
    """A planner may put items into its final plan that its local plan did not have."""
    save(state_of(0), tmp_path)

    class LatePlanner(dcp.DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            self.whole = super().create_local_plan()
            return LoadPlan(self.whole.items[:2])

        def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
            return self.whole

    target = state_of(2)
    dcp.load(target, storage_reader=DcpxReader(tmp_path), planner=LatePlanner(), no_dist=True)
    assert_same(state_of(0), target)
