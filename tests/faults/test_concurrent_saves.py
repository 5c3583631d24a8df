"""Who may save: one at a time, a failed save blocks nobody, and an owner is named."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.machine import seconds
from support.saves import assert_whole, files_in, raises_one, save
from support.warm import warm_parent
from torch.distributed.checkpoint.api import CheckpointException

from torch_dcpx import ConcurrentSaveError, DcpxWriter, StorageError


def state_of(seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(100, generator=g), "b": torch.randn(9, generator=g), "step": seed}


class FailingPlanner(dcp.DefaultSavePlanner):
    """Raises in the middle of `write_data`."""

    def resolve_data(self, write_item: Any) -> Any:
        raise ValueError("resolve_data failed")


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("who", ["same writer", "another writer", "another thread"])
def test_failed_save_never_blocks_the_next(tmp_path: Path, who: str) -> None:
    save(state_of(), tmp_path)
    before = files_in(tmp_path)
    writer = DcpxWriter(tmp_path)
    with raises_one(ValueError):
        dcp.save(state_of(1), storage_writer=writer, planner=FailingPlanner(), no_dist=True)
    assert files_in(tmp_path) == before
    following = writer if who == "same writer" else DcpxWriter(tmp_path)

    def save_again() -> None:
        dcp.save(state_of(2), storage_writer=following, no_dist=True)

    if who == "another thread":
        thread = threading.Thread(target=save_again)
        thread.start()
        thread.join(seconds(60))
    else:
        save_again()
    assert_whole(state_of(2), tmp_path)


class MeanwhilePlanner(dcp.DefaultSavePlanner):
    """Runs something while its save holds the lock."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self._work = work

    def resolve_data(self, write_item: Any) -> Any:
        self._work()
        return super().resolve_data(write_item)


def test_save_from_another_thread_meanwhile_is_refused_with_the_owner(tmp_path: Path) -> None:
    errors: list[Any] = []

    def try_to_save() -> None:
        try:
            save(state_of(9), tmp_path)
        except CheckpointException as failure:
            errors.append(failure.failures[0][0])

    def meanwhile() -> None:
        thread = threading.Thread(target=try_to_save)
        thread.start()
        thread.join(seconds(60))

    dcp.save(state_of(1), storage_writer=DcpxWriter(tmp_path),
             planner=MeanwhilePlanner(meanwhile), no_dist=True)  # fmt: skip
    assert [type(error) for error in errors] == [ConcurrentSaveError] * 3
    assert "pid=" in errors[0].owner
    assert_whole(state_of(1), tmp_path)


OTHER = """
import sys, torch
from pathlib import Path
from support.saves import save
from torch.distributed.checkpoint.api import CheckpointException
try:
    save({"a": torch.zeros(3)}, Path(sys.argv[1]))
    print("saved")
except CheckpointException as failure:
    print(type(failure.failures[0][0]).__name__)
"""


def test_save_from_another_process_meanwhile_is_refused(tmp_path: Path) -> None:
    found: list[str] = []

    def meanwhile() -> None:
        if not found:
            tests = str(Path(__file__).parents[1])
            code = f"import sys; sys.path.insert(0, {tests!r})\n{OTHER}"
            command = ["-c", code, str(tmp_path)]
            found.append(warm_parent().run(command, env=os.environ).stdout)

    dcp.save(state_of(1), storage_writer=DcpxWriter(tmp_path),
             planner=MeanwhilePlanner(meanwhile), no_dist=True)  # fmt: skip
    assert found == ["ConcurrentSaveError\n"]
    assert_whole(state_of(1), tmp_path)


def test_writer_pickles_between_saves_and_in_the_middle_of_one(tmp_path: Path) -> None:
    writer = DcpxWriter(tmp_path)
    copies: list[DcpxWriter] = []
    planner = MeanwhilePlanner(lambda: copies.append(pickle.loads(pickle.dumps(writer))))
    dcp.save(state_of(1), storage_writer=writer, planner=planner, no_dist=True)
    assert_whole(state_of(1), tmp_path)
    dcp.save(state_of(2), storage_writer=copies[0], no_dist=True)
    assert_whole(state_of(2), tmp_path)


def test_directory_removed_in_the_middle_of_a_save_is_a_storage_error(tmp_path: Path) -> None:
    def remove() -> None:
        (tmp_path / "ckpt" / ".dcpx.lock").unlink(missing_ok=True)
        (tmp_path / "ckpt").rmdir()
        (tmp_path / "ckpt").write_text("in the way")

    planner = MeanwhilePlanner(lambda: (tmp_path / "ckpt").is_dir() and remove())
    with raises_one(StorageError):
        dcp.save(state_of(1), storage_writer=DcpxWriter(tmp_path / "ckpt"), planner=planner,
                 no_dist=True)  # fmt: skip
