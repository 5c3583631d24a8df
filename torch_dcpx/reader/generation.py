"""All ranks of a load must read the metadata of one save: each notes which one it read.

Files of ours name their save. Others are what they were while their state in the file system is.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch_dcpx._mounts import is_shared
from torch_dcpx._text import counted
from torch_dcpx.errors import DcpxError, StorageError
from torch_dcpx.storage.object_url import Location
from torch_dcpx.storage.place import FileState, open_place


class Generation(NamedTuple):
    """A rank's note in its plan: the same on all ranks that load from one directory."""

    directory: str  # absolute; links are not followed, so that one that is switched is noticed
    save_id: str  # each save's own; "rank-local" for all that have no metadata in common


def check_same_generation(notes: Iterable[Any]) -> None:
    """Raises StorageError if ranks, whose notes are given in their order, read different saves.

    A planner that makes its own plans need not pass the notes on.
    """
    first: dict[str, tuple[int, str]] = {}  # by directory: ranks may have their own
    for rank, note in enumerate(notes):
        if type(note) is not Generation:
            continue
        directory, save_id = note
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


def replaced(path: str | os.PathLike[str], save_id: str, error: DcpxError) -> StorageError:
    """Returns the error of a load whose checkpoint another save has replaced under it."""
    touched = getattr(error, "touched", None) or ()
    return StorageError(
        f"the checkpoint in '{path}' was replaced by save {save_id} while it was read "
        f"({counted(len(touched), 'tensor')} touched); load it again",
        errno=errno.ESTALE,
        path=getattr(error, "path", None),
        touched=touched,
    )


def note_lost(location: Location, error: StorageError, *, was_open: bool) -> None:
    """Makes the error of a file that is gone since it was opened one of another save: a node may
    see that a file was removed before it sees the metadata that came in its place.

    Args:
        was_open: whether all files were opened. Else one is missing, for which was looked already.
    """
    is_lost = was_open and error.errno == errno.ENOENT
    if is_lost and isinstance(location, Path) and is_shared(location):
        error.errno = errno.ESTALE
        error.message += "; another node has removed it since it was opened: load it again"


def file_states(location: Location) -> dict[str, FileState]:
    """Returns the states of all files of a place, by name. Raises: StorageError."""
    with open_place(location) as place:
        return place.states()


def check_not_replaced(
    location: Location, states: Mapping[str, FileState], way_out: str = "load it again"
) -> None:
    """Raises StorageError unless the files of a place have these states, by name."""
    with open_place(location) as place:
        for name, state in states.items():
            if place.state(name) != state:
                file = str(place.path / name)
                raise StorageError(
                    f"'{file}' was replaced while it was loaded; no tensor was touched, {way_out}",
                    errno=errno.ESTALE,
                    path=file,
                    touched=(),
                )
