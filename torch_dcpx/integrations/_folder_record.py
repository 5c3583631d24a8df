"""`.dcpx.folder`: what a save of ours has put in a folder. Nothing else in it is ever removed.

A file is ours while it is what the record says, at the name that it had: a part (a checkpoint of
DCP) by the id of its save, any other file by its digest, all of them while the folder has the name
that it was saved under. So what was renamed, copied or replaced is the user's. Of a folder without
a record, as earlier versions wrote them, nothing is ours.
"""

from __future__ import annotations

import hashlib
import json
import logging
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch_dcpx._answered_os import os
from torch_dcpx._descriptors import open_file
from torch_dcpx._json import parsed_json
from torch_dcpx.errors import DcpxError
from torch_dcpx.metadata.file import stored_save_id
from torch_dcpx.storage.directory import Directory, storage_errors
from torch_dcpx.storage.names import (
    FOLDER_NAME,
    LOCK_NAME,
    METADATA_NAME,
    PIN_NAME,
    READERS_NAME,
    is_data_file_name,
)
from torch_dcpx.storage.place import PosixPlace
from torch_dcpx.storage.publish import publish
from torch_dcpx.writer.commit import referenced_files

logger = logging.getLogger("torch_dcpx")

_FORMAT = 1
_CHUNK_BYTES = 1 << 20


class Record(NamedTuple):
    """One save has put these files in a folder, by paths relative to it."""

    name: str  # of the folder
    save_id: str  # of the folder's save
    parts: dict[str, str] = {}  # noqa: RUF012 - checkpoints of ours: the ids of their saves
    files: dict[str, str] = {}  # noqa: RUF012 - other files, and their digests
    others: tuple[str, ...] = ()  # what has nothing to know it by

    def encoded(self) -> bytes:
        """Returns the content of the file."""
        return json.dumps({"format": _FORMAT, **self._asdict()}).encode() + b"\n"


def read_record(folder: Path) -> Record | None:
    """Returns a folder's record; None: it has none, or one that says nothing of this name, or it is
    a link of the user's.
    """
    if folder.is_symlink():
        return None
    try:
        with Directory(folder) as directory:
            if not directory.is_regular(FOLDER_NAME):
                return None
            content = directory.read_small(FOLDER_NAME)
        found: Any = parsed_json(content)
        record = Record(*(found[name] for name in Record._fields))
        named = [*record.parts.items(), *record.files.items()]
        texts = [
            record.name,
            record.save_id,
            *record.others,
            *(one for each in named for one in each),
        ]
        if found["format"] != _FORMAT or not all(type(text) is str for text in texts):
            raise TypeError(f"its format is {found['format']!r:.20}")
    except (DcpxError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logger.warning(
            "'%s' cannot be read: nothing in '%s' is taken for ours: %s",
            FOLDER_NAME,
            folder,
            str(error)[:200],
        )
        return None
    return record._replace(others=tuple(record.others)) if record.name == folder.name else None


def beyond_limit(folders: Iterable[Path], limit: int, kept: Collection[Path]) -> list[Path]:
    """Returns the folders that a limit does not keep. Only what a record of ours names is counted.

    Args:
        folders: the oldest first.
        limit: how many to keep.
        kept: stay, and count: the one that a save has just published, the best.
    """
    ours = [folder for folder in folders if read_record(folder) is not None]
    others = [folder for folder in ours if folder not in kept]
    return others[: max(0, len(ours) - max(limit, len(ours) - len(others)))]


def write_record(folder: Path, record: Record, *, is_durable: bool) -> None:
    """Writes a folder's record. Raises: StorageError."""
    with Directory(folder) as directory:
        publish(directory, FOLDER_NAME, [record.encoded()], is_durable=is_durable)


def record_of(folder: Path, save_id: str) -> Record:
    """Returns the record of all that lies in a folder. Raises: StorageError."""
    parts: dict[str, str] = {}
    files: dict[str, str] = {}
    others: list[str] = []
    for at, names in _files_in(folder):
        own: frozenset[str] = frozenset()
        part_id = _save_id(folder / at) if METADATA_NAME in names else None
        if part_id is not None:
            parts[at] = part_id
            own = names_of_part(folder / at)
        for name in names:
            rel = os.path.join(at, name)
            if name in own or rel == FOLDER_NAME:
                continue
            is_of_stock = METADATA_NAME in names and is_data_file_name(name)
            digest = None if is_of_stock or name == METADATA_NAME else digest_of(folder / rel)
            if digest is None:
                others.append(rel)
            else:
                files[rel] = digest
    return Record(folder.name, save_id, parts, files, tuple(others))


def ours_in(folder: Path, by: Record | None) -> set[str]:
    """Returns which files of a folder are ours.

    Args:
        by: of the save that replaces it, whose names are given away; None: nothing does.
    """
    own = read_record(folder)
    new = by or Record("", "")
    found = {FOLDER_NAME, *new.files, *new.others}
    for part, save_id in (own.parts if own else {}).items():
        is_pinned = (folder / part / PIN_NAME).exists()
        if part not in new.parts and not is_pinned and _save_id(folder / part) == save_id:
            found.update(_beneath(part, names_of_part(folder / part)))
    for part in new.parts:
        found.update(_beneath(part, names_of_part(folder / part)))
    for rel, digest in (own.files if own else {}).items():
        if rel not in found and digest_of(folder / rel) == digest:
            found.add(rel)
    above = {path for rel in found for path in Path(rel).parents}
    linked = {str(path) for path in above if (folder / path).is_symlink() and path.parts}
    return {rel for rel in found if linked.isdisjoint(map(str, Path(rel).parents))}


def _beneath(part: str, names: frozenset[str]) -> Iterator[str]:
    return (os.path.join(part, name) for name in names)


def names_of_part(part: Path) -> frozenset[str]:
    """Returns the names of a checkpoint's own files: a save in its place replaces them."""
    small = frozenset((LOCK_NAME, READERS_NAME))
    try:
        with PosixPlace(part) as place:
            if not place.is_regular(METADATA_NAME):
                return small
            named = referenced_files(place, METADATA_NAME)
    except DcpxError as error:
        logger.debug("nothing in '%s' is ours: %s", part, error)
        return frozenset()
    return small if named is None else frozenset((*small, METADATA_NAME, *named))


def _save_id(part: Path) -> str | None:
    """Returns the id of the save that committed a checkpoint; None: it is not ours, or no more."""
    try:
        return stored_save_id(part)
    except DcpxError as error:
        logger.debug("'%s' is not ours: %s", part, error)
        return None


def digest_of(path: Path) -> str | None:
    """Returns a digest of a regular file; None of anything else, and where it cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        fd = open_file(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            while piece := os.read(fd, _CHUNK_BYTES):
                digest.update(piece)
        finally:
            os.close(fd)
    except OSError:
        return None
    return digest.hexdigest()


def _files_in(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields each directory, by its path relative to a folder, and the names of what is none."""

    def refuse(error: OSError) -> None:
        raise error

    with storage_errors("list", folder, is_read=True):
        for path, directories, names in os.walk(folder, onerror=refuse):
            links = [one for one in directories if os.path.islink(os.path.join(path, one))]
            at = os.path.relpath(path, folder)
            yield "" if at == "." else at, sorted([*names, *links])
