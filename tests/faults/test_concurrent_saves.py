"""Who may save: one at a time, a failed save blocks nobody, and an owner is named."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.machine import seconds
from support.saves import assert_whole, files_in, raises_one, save
from torch.distributed.checkpoint.api import CheckpointException

from torch_dcpx import ConcurrentSaveError, DcpxWriter, StorageError


def state_of(seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(100, generator=g), "b": torch.randn(9, generator=g), "step": seed}


class MeanwhilePlanner(dcp.DefaultSavePlanner):
    """Runs something in the middle of `write_data`, while its save holds the lock."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self._work = work

    def resolve_data(self, write_item: Any) -> Any:
        self._work()
        return super().resolve_data(write_item)


def save_and(work: Callable[[], None], seed: int, writer: DcpxWriter) -> None:
    planner = MeanwhilePlanner(work)
    dcp.save(state_of(seed), storage_writer=writer, planner=planner, no_dist=True)


def in_a_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(seconds(60))


def fail() -> None:
    raise ValueError("resolve_data failed")


@pytest.mark.usefixtures("no_leaks")
def test_failed_save_never_blocks_the_next(tmp_path: Path) -> None:
    save(state_of(), tmp_path)
    writer = DcpxWriter(tmp_path)
    again: dict[str, Callable[[], None]] = {
        "same writer": lambda: dcp.save(state_of(2), storage_writer=writer, no_dist=True),
        "another writer": lambda: save(state_of(2), tmp_path),
        "another thread": lambda: in_a_thread(lambda: save(state_of(2), tmp_path)),
    }
    for who, save_again in again.items():
        before = files_in(tmp_path)
        with raises_one(ValueError):
            save_and(fail, 1, writer)
        assert files_in(tmp_path) == before, who
        save_again()
        assert_whole(state_of(2), tmp_path)
        save(state_of(), tmp_path)


def test_save_from_another_thread_meanwhile_is_refused_with_the_owner(tmp_path: Path) -> None:
    errors: list[Any] = []

    def try_to_save() -> None:
        try:
            save(state_of(9), tmp_path)
        except CheckpointException as failure:
            errors.append(failure.failures[0][0])

    save_and(lambda: in_a_thread(try_to_save), 1, DcpxWriter(tmp_path))
    assert [type(error) for error in errors] == [ConcurrentSaveError] * 3
    assert "pid=" in errors[0].owner
    assert_whole(state_of(1), tmp_path)


def test_directory_removed_in_the_middle_of_a_save_is_a_storage_error(tmp_path: Path) -> None:
    def remove() -> None:
        if (tmp_path / "ckpt").is_dir():
            (tmp_path / "ckpt" / ".dcpx.lock").unlink(missing_ok=True)
            (tmp_path / "ckpt").rmdir()
            (tmp_path / "ckpt").write_text("in the way")

    with raises_one(StorageError):
        save_and(remove, 1, DcpxWriter(tmp_path / "ckpt"))
