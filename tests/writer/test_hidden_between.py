"""Metadata that one listing shows and the next leaves out: no file that they name goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.saves import data_files

from torch_dcpx import CheckpointManager, StorageError
from torch_dcpx.integrity.leftovers import remove_leftovers
from torch_dcpx.manager.directory_root import DirectoryRoot
from torch_dcpx.manager.removal import resume_removals
from torch_dcpx.storage.names import METADATA_NAME
from torch_dcpx.storage.place import PosixPlace
from torch_dcpx.storage.running_save import RunningSave
from torch_dcpx.storage.save_lock import boot_id
from torch_dcpx.writer.locks import SaveLocks


class Holder:
    """Stands for a writer."""


def tidy_before_a_save(path: Path) -> None:
    (path / ".dcpx.lock").write_text(f"host=here pid=1 boot={boot_id()}\n")  # was killed
    holder, locks = Holder(), SaveLocks()
    with PosixPlace(path) as place:
        locks.take(place, RunningSave(holder))
        locks.tidy(place, METADATA_NAME, is_durable=False)
        locks.release(has_ended_well=True)


def end_a_removal(path: Path) -> None:
    (path / ".dcpx.deleted").write_bytes((path / METADATA_NAME).read_bytes())
    resume_removals(DirectoryRoot(path.parent, is_durable=False), lambda: (), leftovers=True)


def collect(path: Path) -> None:
    (path / "__7_0.distcp").write_bytes(b"left")
    with pytest.raises(StorageError, match="gone"):
        remove_leftovers(path)


@pytest.mark.parametrize("call", [tidy_before_a_save, end_a_removal, collect])
def test_data_of_metadata_that_a_later_listing_leaves_out_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Path], None]
) -> None:
    real = PosixPlace.names
    for listings in range(1, 6):
        root, seen = tmp_path / str(listings), []
        path = root / "step-1"
        with CheckpointManager(root, async_save=False, no_dist=True) as manager:
            manager.save(1, state={"x": torch.arange(6.0)})
        before = data_files(path)

        def names(self: PosixPlace) -> list[str]:
            found = real(self)
            seen.append(METADATA_NAME in found)  # noqa: B023
            late = self.path == path and len(seen) > listings  # noqa: B023
            return [name for name in found if not (late and name == METADATA_NAME)]

        with monkeypatch.context() as patch:
            patch.setattr(PosixPlace, "names", names)
            try:
                call(path)
            except pytest.fail.Exception:
                assert listings > 1  # it has seen enough
        assert set(before) <= set(data_files(path)), listings
