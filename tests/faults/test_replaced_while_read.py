"""Loads that meet trouble half-way say what it was and which tensors may hold new bytes."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.saves import assert_loads, assert_whole, data_files, save
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

from torch_dcpx import (
    _C,
    CorruptionError,
    DcpxReader,
    DcpxWriter,
    ReadOptions,
    StorageError,
    UnsupportedError,
)


def state_of(seed: int) -> dict[str, Any]:
    return {f"t{i}": torch.full((200_000,), float(10 * seed + i)) for i in range(6)}


def failed_load(target: dict[str, Any], reader: DcpxReader) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        dcp.load(target, storage_reader=reader, no_dist=True)
    error: BaseException = caught.value.failures[0][0]
    return error


def test_io_error_of_a_load_names_every_tensor_that_changed(tmp_path: Path) -> None:
    save(state_of(0), tmp_path)
    options = ReadOptions(workers=1, direct_io=False)
    for nth in range(3, 100):
        target = state_of(9)
        _C.arm_fault(nth, errno.EIO)
        try:
            dcp.load(target, storage_reader=DcpxReader(tmp_path, options=options), no_dist=True)
        except CheckpointException as caught:
            error = caught.failures[0][0]
        else:
            break
        finally:
            _C.disarm_fault()
        assert isinstance(error, StorageError)
        before = state_of(9)
        changed = {key for key in target if not torch.equal(target[key], before[key])}
        assert changed <= set(error.touched or ())
    assert nth > 6


def test_metadata_without_an_entry_for_a_tensor_is_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(state_of(0), tmp_path)
    reader = DcpxReader(tmp_path)
    read = DcpxReader.read_metadata

    def read_less(self: DcpxReader, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read(self, *args, **kwargs)
        metadata.storage_data.pop(next(iter(metadata.storage_data)))
        return metadata

    monkeypatch.setattr(DcpxReader, "read_metadata", read_less)
    error = failed_load(state_of(2), reader)
    assert isinstance(error, CorruptionError)
    assert error.fqn == "t0"
    assert error.touched == ()


def test_rank_local_save_over_a_global_checkpoint_is_refused(tmp_path: Path) -> None:
    """Every load would prefer the old one: the new one would be lost without a word."""
    save(state_of(0), tmp_path)
    before = data_files(tmp_path)
    with pytest.raises(UnsupportedError, match="holds a checkpoint of all ranks"):
        dcp.save(
            state_of(1),
            storage_writer=DcpxWriter(tmp_path),
            no_dist=True,
            use_collectives=False,
        )
    assert data_files(tmp_path) == before
    assert_loads(state_of(0), tmp_path)


class Label:
    """What a planner may put into planner_data, and no allow-list knows."""


class LabellingPlanner(DefaultSavePlanner):
    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = {"label": Label()}
        return plans, metadata


def test_planner_data_of_any_class_does_not_keep_replaced_files(tmp_path: Path) -> None:
    for step in range(3):
        dcp.save(
            state_of(step),
            storage_writer=DcpxWriter(tmp_path),
            planner=LabellingPlanner(),
            no_dist=True,
        )
    assert len(data_files(tmp_path)) == 1


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_file_system_without_fsync_of_directories_is_warned_about_not_failed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
) -> None:
    real = os.fsync

    def files_only(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        real(fd)

    monkeypatch.setattr(os, "fsync", files_only)
    monkeypatch.setattr("torch_dcpx.storage.directory._warned", set())
    save(state_of(0), tmp_path / "new" / "ckpt")
    save(state_of(1), tmp_path / "new" / "ckpt")
    assert_whole(state_of(1), tmp_path / "new" / "ckpt")
    assert sum("cannot fsync a directory" in r.message for r in caplog.records) == 1
