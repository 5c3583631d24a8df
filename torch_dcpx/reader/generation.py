"""All ranks of a load must read the metadata of one save: each notes which one it read.

Files of ours name their save. Others are what they were while their state in the file system is.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

from torch.distributed.checkpoint.planner import LoadPlan

from torch_dcpx.errors import StorageError
from torch_dcpx.storage.directory import Directory, storage_error

FileState: TypeAlias = tuple[int, ...]  # differs once a name means another file, or was written to


class Generation(NamedTuple):
    """A rank's note in its plan: the same on all ranks that load from one directory."""

    directory: str  # absolute; links are not followed, so that one that is switched is noticed
    save_id: str  # each save's own; "rank-local" for all that have no metadata in common


def check_same_generation(plans: Sequence[LoadPlan]) -> None:
    """Raises StorageError if ranks, whose plans are given in their order, read different saves.

    A planner that makes its own plans need not pass the notes on.
    """
    first: dict[str, tuple[int, str]] = {}  # by directory: ranks may have their own
    for rank, plan in enumerate(plans):
        if type(plan.storage_data) is not Generation:
            continue
        directory, save_id = plan.storage_data
        other, found = first.setdefault(directory, (rank, save_id))
        if found != save_id:
            raise StorageError(
                f"the checkpoint in '{directory}' was replaced while it was loaded: rank {other} "
                f"read that of save {found}, rank {rank} that of {save_id}; no tensor was "
                "touched, load it again",
                errno=errno.ESTALE,
                path=directory,
                touched=(),
            )


def file_state(directory: Directory, name: str) -> FileState:
    """Returns the state of a file. Raises: StorageError."""
    try:
        found = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
    except OSError as error:
        raise storage_error("stat", directory.path / name, error, is_read=True) from error
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def file_states(path: str | os.PathLike[str]) -> dict[str, FileState]:
    """Returns the states of all files in a directory, by name. Raises: StorageError."""
    states = {}
    with Directory(Path(path)) as directory:
        for name in directory.names():
            with suppress(FileNotFoundError):  # of a save that goes on
                states[name] = file_state(directory, name)
    return states


def check_not_replaced(
    path: str | os.PathLike[str], states: Mapping[str, FileState], way_out: str = "load it again"
) -> None:
    """Raises StorageError unless the files in the directory `path` have these states, by name."""
    with Directory(Path(path)) as directory:
        for name, state in states.items():
            if file_state(directory, name) != state:
                file = str(directory.path / name)
                raise StorageError(
                    f"'{file}' was replaced while it was loaded; no tensor was touched, {way_out}",
                    errno=errno.ESTALE,
                    path=file,
                    touched=(),
                )
