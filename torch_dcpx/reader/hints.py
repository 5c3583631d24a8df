"""Says what to do next at a path without a checkpoint, or with a damaged one."""

from __future__ import annotations

import difflib
import errno
import itertools
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torch_dcpx._answered_os import os, path_of
from torch_dcpx._mounts import is_shared
from torch_dcpx._text import counted
from torch_dcpx.errors import (
    CorruptionError,
    DcpxError,
    NotCommittedError,
    ShortReadError,
    StorageError,
    UnsafePickleError,
)
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.names import (
    LOCK_NAME,
    METADATA_NAME,
    POINTER_NAME,
    TOMBSTONE_NAME,
    is_artifact_name,
    is_data_file_name,
    is_metadata_name,
    is_rank_lock,
)
from torch_dcpx.storage.object_url import Location
from torch_dcpx.storage.paths import absolute
from torch_dcpx.storage.save_lock import owner_of
from torch_dcpx.storage.visibility import hidden

_MAX_LOOKED_AT = 1000  # entries of a directory
_MAX_FOLDERS = 100  # that are looked into for what lies two levels down
_MAX_SHOWN = 5
_MIN_PARTS = 3  # "/", "home" and the name itself


def command(verb: str, path: str | os.PathLike[str], *names: str) -> str:
    """Returns a command of `dcpx` on a path, and on names in it, for a shell."""
    return f"`dcpx {verb} {shlex.join([os.fspath(path), *names])}`"


def absent(path: str | os.PathLike[str]) -> str:
    """Returns why a path is no directory, and what is there instead."""
    place = path_of(path)
    if os.path.isfile(place):
        if is_data_file_name(place.name) or is_metadata_name(place.name):
            return f"'{path}' is a file of a checkpoint: name its directory, '{place.parent}'"
        way = "; load_pretrained reads it" if place.suffix == ".safetensors" else ""
        return f"'{path}' is a file, no directory: there is no checkpoint{way}"
    text = f"'{path}' is no directory: there is no checkpoint"
    # Not in "/" or "/home": a look at what lies there could mount all of it.
    is_deep = len(Path(absolute(place)).parts) > _MIN_PARTS
    beside = _checkpoints_in(place.parent) if is_deep else []
    near = difflib.get_close_matches(place.name, beside, 1, cutoff=0.6)
    if near:
        return f"{text}; did you mean '{place.parent / near[0]}'?"
    return text + (f"; '{place.parent}' holds {_named(place.parent, beside)}" if beside else "")


def linked(path: str | os.PathLike[str]) -> str:
    """Returns why a file that is a link is not read, and what to do."""
    meant = path_of(path).resolve()
    if is_artifact_name(meant.name) and meant.is_file():
        return f"'{path}' is a link, which is not followed: name '{meant}'"
    folder = shlex.quote(str(Path(path).parent))
    return (
        f"'{path}' is a link, and no link is followed (Hugging Face's cache consists of them): "
        f"download with local_dir=, or copy what the links mean, `cp -rL {folder} COPY`"
    )


def uncommitted(
    path: Location, names: Sequence[str], wanted: Sequence[str], is_second: bool = False
) -> str:
    """Returns what a directory without the `wanted` files of metadata holds, and what to do.

    Args:
        names: in the directory.
    """
    if METADATA_NAME in names:
        if is_second or wanted[-1] == METADATA_NAME:  # it came between the look and the listing
            return f"'{path}' has a '{METADATA_NAME}' since a moment: load it again"
        return f"'{path}' is a checkpoint of all ranks, not one for each rank: leave out rank"
    missing = " and ".join(f"no '{one}'" for one in wanted if one not in names)
    text = f"'{path}' holds no committed checkpoint: {missing}"
    ranks, files = sum(map(is_metadata_name, names)), sum(map(is_data_file_name, names))
    if ranks:
        if len(wanted) > 1:
            return f"{text}, but metadata of {counted(ranks, 'other rank')}"
        own = f"{text}, but metadata of {counted(ranks, 'rank')}, of each its own"
        one = min(name for name in names if is_metadata_name(name))
        rank = one.removeprefix("__").removesuffix(METADATA_NAME)
        return (
            f"{own}; load_tensors, open_checkpoint, stats and diff take rank={rank}, `dcpx cat`, "
            f"`stats` and `diff` --rank {rank}; to export: export(load_tensors({str(path)!r}, "
            f"rank={rank}), ...)"
        )
    if TOMBSTONE_NAME in names:
        return f"{text}: its manager has removed it"
    saver = _saver(path, names)
    if saver:
        return f"{text}: a save is under way ({saver})"
    why = _hidden(path, names)
    if why:
        return f"look into '{path}': {why}"
    if files:
        late = "" if isinstance(path, Path) else ", or of one under way"
        left = f"{counted(files, 'data file')} of an unfinished save{late}"
        return (
            f"{text}, but {left}; if it had ended well, {command('repair', path)} makes "
            f"'{METADATA_NAME}' anew"
        )
    if not isinstance(path, Path):
        return f"{text}; {command('ls', path)} shows what lies beneath it"
    beneath = _checkpoints_in(path, is_deep=True)
    if not beneath:
        return text
    is_root = POINTER_NAME in names
    root = "; CheckpointManager.resume takes the newest of them" if is_root else ""
    return f"{text}, but {_named(path, beneath)}{root}"


def _hidden(path: Location, names: Sequence[str]) -> str:
    """Returns why a directory may hold a checkpoint that nobody sees, or what the look-up says."""
    if not (isinstance(path, Path) and is_shared(path)):
        return ""
    try:
        with Directory(path) as directory:
            return hidden(directory, names)
    except StorageError as error:
        return str(error)


def _saver(path: Location, names: Sequence[str]) -> str:
    """Returns who saves to a directory at this moment; "" if nobody can be seen."""
    if not isinstance(path, Path):
        return ""
    for name in names:
        if name == LOCK_NAME or is_rank_lock(name):
            with suppress(DcpxError), Directory(path) as directory:  # the error says more
                if owner := owner_of(directory, name):
                    return owner
    return ""


def not_committed(
    path: Location, names: Sequence[str], wanted: Sequence[str], is_second: bool = False
) -> NotCommittedError:
    """Returns the error of a directory without the `wanted` files of metadata; `is_second`: DCP
    asks for a rank's own, for it has found none of all ranks. Its errno is ESTALE where the last
    one is in the listing: another look may open it.
    """
    is_unfinished = not any(map(is_metadata_name, names))
    return NotCommittedError(
        uncommitted(path, names, wanted, is_second),
        errno=errno.ESTALE if wanted[-1] in names else errno.ENOENT,
        path=str(path / wanted[-1]),
        files=sum(map(is_data_file_name, names)) if is_unfinished else 0,
    )


def add_repair(error: CorruptionError, directory: Location, names: Sequence[str]) -> None:
    """Adds to the error of damaged metadata the command that may mend it."""
    if any(map(is_data_file_name, names)) and not isinstance(error, UnsafePickleError):
        error.message += f"; {command('repair', directory)} makes it anew if torch-dcpx wrote it"


def add_verify(error: BaseException, directory: str) -> None:
    """Adds to the error of a damaged or missing data file the command that lists all damage."""
    is_lost = isinstance(error, ShortReadError) or getattr(error, "errno", None) == errno.ENOENT
    if isinstance(error, DcpxError) and (is_lost or isinstance(error, CorruptionError)):
        error.message += f"; {command('verify', directory)} lists all damage"


def _checkpoints_in(path: Path, *, is_deep: bool = False) -> list[str]:
    """Returns the names of checkpoints beneath a directory, the newest first; never raises.

    Args:
        is_deep: look two levels down where there is none at the first.
    """
    found: list[tuple[float, str]] = []
    folders: list[str] = []
    try:
        with os.scandir(path) as entries:
            for entry in itertools.islice(entries, _MAX_LOOKED_AT):
                metadata = path_of(entry.path, METADATA_NAME)
                if entry.name.isprintable() and metadata.is_file():
                    found.append((metadata.stat().st_mtime, entry.name))
                elif is_deep and entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
    except OSError:
        return []  # the error at hand says more
    if not found and is_deep:
        folders = sorted(folders)[:_MAX_FOLDERS]
        return [f"{name}/{one}" for name in folders for one in _checkpoints_in(path / name)]
    return [name for _, name in sorted(found, reverse=True)]


def listed(names: Sequence[str]) -> str:
    """Returns the first names in quotes, and how many more there are."""
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return ", ".join(f"'{name}'" for name in names[:_MAX_SHOWN]) + more


def beneath(path: Location) -> str:
    """Returns which checkpoints lie beneath a directory; "" if there are none, or in a store."""
    if not isinstance(path, Path):
        return ""
    names = _checkpoints_in(path, is_deep=True)
    return f"; it holds {_named(path, names)}" if names else ""


def _named(path: Path, names: Sequence[str]) -> str:
    noun = "the checkpoint" if len(names) == 1 else "the checkpoints"
    return f"{noun} {listed(names)} ({command('ls', path)}): name one of them"
