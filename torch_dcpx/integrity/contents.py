"""Reads a checkpoint's directory and metadata, but no data.

`verify`, `repair`, `dcpx ls`, `dcpx inspect` and the manager all begin here. Without torch, but for
`read_commit`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from torch_dcpx.errors import CorruptionError, NotCommittedError
from torch_dcpx.integrity.states import opened
from torch_dcpx.metadata.brief import RECORD_ITEM, Brief, brief_of
from torch_dcpx.reader.hints import add_repair
from torch_dcpx.reader.safetensors import file_among, names_file
from torch_dcpx.storage.names import (
    METADATA_NAME,
    Look,
    index_kind,
    is_data_file_name,
    is_metadata_name,
)
from torch_dcpx.storage.object_url import Location, ObjectUrl, location_of
from torch_dcpx.storage.paths import checked_location
from torch_dcpx.storage.place import Place

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from torch_dcpx.metadata.file import CheckpointMetadata

_WAY_OUT = "copy or mount it, and name the directory"


def location(path: str | os.PathLike[str]) -> Location:
    """Returns what a path means. Raises: as `checked_location`."""
    text = checked_location(path, _WAY_OUT)
    return path if isinstance(path, ObjectUrl) else location_of(text)


def open_checkpoint(path: str | os.PathLike[str]) -> Place:
    """Opens the place of a checkpoint; a prefix of a store without looking if anything is there.

    Raises:
        NotCommittedError: there is no such directory.
        StorageError: it cannot be opened.
        OptionError, UnsupportedError: as `checked_location`.
    """
    return opened(location(path), os.fsdecode(path))


class Contents(NamedTuple):
    """A place, what is in it, and what of that is meant."""

    path: Location  # of the place, or of a file in it
    place: Place
    look: Look
    artifact: str | None  # a file of safetensors or torch.save, or an index; None: a checkpoint


@contextmanager
def open_contents(path: str | os.PathLike[str]) -> Iterator[Contents]:
    """Opens the place of a checkpoint, or of files that `export` writes, and looks at it once.

    Raises: as `open_checkpoint`; StorageError: it cannot be listed.
    """
    where = location(path)
    name = where.name if names_file(where) else None
    directory = where if name is None else where.parent
    with opened(directory, os.fsdecode(path if name is None else directory)) as place:
        look = place.look()
        yield Contents(where, place, look, name or artifact_among(where, look.names))


def artifact_among(where: Location, names: Sequence[str]) -> str | None:
    """Returns the file or index that is meant where these names are; None: a checkpoint, a part of
    one, or nothing.
    """
    if any(map(is_data_file_name, names)):
        return None
    try:
        return file_among(where, names)
    except NotCommittedError:  # the look at a checkpoint says it better
        return None


def refuse_several(where: Location, names: Sequence[str]) -> None:
    """Raises NotCommittedError where files of safetensors lie, of which none is meant."""
    if any(is_data_file_name(name) or is_metadata_name(name) for name in names):
        return
    seen = [name for name in names if not name.startswith(".")]
    if any(name.endswith(".safetensors") or index_kind(name) for name in seen):
        file_among(where, names)


def commits_among(names: Iterable[str]) -> list[str]:
    """Returns the files that commit a checkpoint: `.metadata`, else each rank's own."""
    found = list(filter(is_metadata_name, names))
    return [METADATA_NAME] if METADATA_NAME in found else found


def read_commit(directory: Place, name: str) -> CheckpointMetadata:
    """Reads a file of metadata. Raises as `open_small` of the place and `decode_metadata`."""
    from torch_dcpx.metadata.file import decode_metadata

    with directory.open_small(name) as file, _leading_to_repair(directory):
        return decode_metadata(file, str(directory.path / name))


def read_brief(directory: Place, name: str) -> Brief:
    """As `read_commit`, but what a look asks for alone; without torch, where it can be."""
    with directory.open_small(name) as file, _leading_to_repair(directory):
        found = brief_of(file, str(directory.path / name))
    return found or brief_from(read_commit(directory, name))


def brief_from(found: CheckpointMetadata) -> Brief:
    """Returns the brief of decoded metadata."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    metadata, is_ours = found.metadata, found.files is not None
    at = (metadata.storage_data or {}).get(MetadataIndex(RECORD_ITEM)) if is_ours else None
    record = None if at is None else (at.relative_path, at.offset, at.length)
    items = len(metadata.state_dict_metadata)
    return Brief(found.save_id, items, wanted_sizes(found), is_ours, record)


@contextmanager
def _leading_to_repair(directory: Place) -> Iterator[None]:
    """Adds to the error of damaged metadata what may mend it."""
    try:
        yield
    except CorruptionError as error:
        add_repair(error, directory.path, directory.names())
        raise


def wanted_sizes(found: CheckpointMetadata) -> dict[str, int]:
    """Returns the bytes of each data file; by stock's metadata, the least that it can have."""
    if found.files is not None:
        return {name: entry.nbytes for name, entry in found.files.items()}
    return least_sizes(found.metadata)


def least_sizes(metadata: Metadata) -> dict[str, int]:
    """Returns where the last item of each file ends, in bytes."""
    sizes: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        end = place.offset + place.length
        sizes[place.relative_path] = max(end, sizes.get(place.relative_path, 0))
    return sizes
