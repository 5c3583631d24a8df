"""`files_per_rank`: several files a rank, which load, are replaced and are removed like one."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.saves import assert_whole, data_files, files_in, read_footer, save
from support.slow_states import SLOW, CopyingPlanner, windowed_state
from support.states import mixed_state
from torch.distributed.checkpoint import CheckpointException

from torch_dcpx import _C, DcpxWriter, OptionError, StorageError, WriteOptions


def several(files: int, **kwargs: Any) -> WriteOptions:
    return WriteOptions(files_per_rank=files, **kwargs)


def test_files_hold_what_a_rank_has_in_equal_parts(tmp_path: Path) -> None:
    state = {f"t{i}": torch.zeros(100_000 * i, dtype=torch.uint8) for i in range(1, 9)}
    save(state, tmp_path, options=several(4))
    loads = [
        sum(row.payload_bytes for row in read_footer(tmp_path / name).rows)
        for name in data_files(tmp_path)
    ]
    assert loads == [900_000] * 4


def test_saves_with_other_numbers_of_files_replace_each_other(tmp_path: Path) -> None:
    for seed, files in enumerate([3, 1, 256, 2, 2]):
        save(mixed_state(seed), tmp_path, options=several(files))
        items = len(dcp.FileSystemReader(tmp_path).read_metadata().storage_data)
        assert len(data_files(tmp_path)) == min(files, items)
        assert_whole(mixed_state(seed), tmp_path)
    save(mixed_state(9), tmp_path, single_file_per_rank=False)
    assert_whole(mixed_state(9), tmp_path)


def test_windows_go_to_several_files(tmp_path: Path) -> None:
    options = several(3, workers=1, slot_bytes=SLOW.slot_bytes, host_memory_bytes=SLOW.slot_bytes)
    writer = DcpxWriter(tmp_path, options=options)
    dcp.save(windowed_state(), storage_writer=writer, planner=CopyingPlanner(), no_dist=True)
    assert len(data_files(tmp_path)) == 3
    assert_whole(windowed_state(), tmp_path)


@pytest.mark.usefixtures("no_leaks")
def test_save_with_any_call_failing_removes_all_of_its_files(tmp_path: Path) -> None:
    def state_of(seed: int) -> dict[str, Any]:
        return {f"t{i}": torch.full((150_000,), seed + i) for i in range(3)} | {"step": seed}

    options = several(3, workers=2, slot_bytes=256 << 10)
    save(state_of(0), tmp_path, options=options)
    before = files_in(tmp_path)
    for nth in range(500):
        already = sum(_C.call_counts().values())
        _C.arm_fault(nth, errno.EIO)
        try:
            save(state_of(1), tmp_path, options=options)
            error = None
        except CheckpointException as failure:
            error = failure.failures[0][0]
        finally:
            _C.disarm_fault()
        if sum(_C.call_counts().values()) - already <= nth:
            break
        assert type(error) is StorageError
        assert files_in(tmp_path) == before, nth
    assert nth > 30, "the loop has met the calls of three files"
    assert error is None
    assert_whole(state_of(1), tmp_path)


def test_a_file_for_each_item_and_several_files_a_rank_contradict_each_other(
    tmp_path: Path,
) -> None:
    with pytest.raises(OptionError, match="single_file_per_rank=False") as caught:
        DcpxWriter(tmp_path, single_file_per_rank=False, options=several(2))
    assert (caught.value.option, caught.value.value) == ("files_per_rank", 2)
    writer = DcpxWriter(tmp_path, options=several(2))
    writer.single_file_per_rank = False
    with pytest.raises(CheckpointException) as failure:
        dcp.save({"w": torch.arange(3)}, storage_writer=writer, no_dist=True)
    assert isinstance(failure.value.failures[0][0], OptionError)
    assert files_in(tmp_path) == {}


def test_thread_count_stays_the_number_of_workers(tmp_path: Path) -> None:
    writer = DcpxWriter(tmp_path, thread_count=2, options=several(3, workers=2))
    dcp.save(mixed_state(), storage_writer=writer, no_dist=True)
    assert len(data_files(tmp_path)) == 3
    assert writer.last_report is not None
    assert writer.last_report.files == 3
