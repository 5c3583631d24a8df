"""The coordinator's part of a save: check, publish, remove what was replaced.

1. Check that every chunk and every bytes entry of the metadata has exactly one result, inside its
   file by the file table's size. Else nothing is published.
2. Write `.metadata` under a name of its own, fsync it, rename it over the old one, and fsync the
   directory. The rename is the commit.
3. Remove data files that the replaced metadata named, rank-local metadata that a global checkpoint
   replaces, and leftovers that no metadata names. The new checkpoint is durable by then: a failure
   is logged, and the next save, which removes leftovers first, tries again.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import add, le
from typing import Any, Literal, NoReturn, TypeAlias

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from torch_dcpx._gc import paused_gc
from torch_dcpx.errors import DcpxError, PlanError, StorageError, UnsupportedError
from torch_dcpx.metadata.file import decode_file_names, encode_pieces
from torch_dcpx.ranks.plan_wire import pack_results, unpack_results
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.names import (
    METADATA_NAME,
    FileEntry,
    is_data_file_name,
    is_metadata_name,
    is_temporary_name,
    temporary_name,
)

logger = logging.getLogger("torch_dcpx")

Leftovers: TypeAlias = int | Literal["everybody", "nobody"]  # a rank's


class WriteResults(list[WriteResult]):
    """The results of `write_data`, one an item, which carry the table of the rank's files."""

    def __init__(
        self, results: Iterable[WriteResult] = (), files: Sequence[FileEntry] = ()
    ) -> None:
        super().__init__(results)
        self.files = list(files)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (pack_results(self), self.files)


def _unpacked(packed: tuple[Any, ...], files: Sequence[FileEntry]) -> WriteResults:
    return WriteResults(unpack_results(*packed), files)


@paused_gc()
def verify_results(
    metadata: Metadata, results: Sequence[Sequence[WriteResult]]
) -> tuple[dict[MetadataIndex, Any], list[FileEntry]]:
    """Checks the results of all ranks against the plan's metadata.

    Returns:
        The storage data, index to `_StorageInfo`, and the table of all files.

    Raises:
        PlanError: a chunk has no result or two, or a result has no chunk or lies outside of its
            file; nothing may be published then.
    """
    files: dict[str, FileEntry] = {}
    for rank, rank_results in enumerate(results):
        for entry in getattr(rank_results, "files", ()):
            if entry.path in files:
                raise PlanError(f"rank {rank} reports file '{entry.path}' of another rank")
            files[entry.path] = entry
    flat = list(chain.from_iterable(results))
    indices = [result.index for result in flat]
    places = [result.storage_data for result in flat]
    # Chunks are compared as plain tuples: a MetadataIndex is hashed and compared in Python.
    written = {(index.fqn, index.offset) for index in indices}
    if (
        len(written) != len(flat)
        or not _are_inside(places, files)
        or written != set(_chunks(metadata))
    ):
        _refuse(metadata, results, files)
    return dict(zip(indices, places, strict=True)), list(files.values())


def _chunks(metadata: Metadata) -> list[tuple[str, Any]]:
    """Returns (fqn, offset) of each chunk; of a bytes entry (fqn, None)."""
    chunks: list[tuple[str, Any]] = []
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            chunks += [(fqn, tuple(chunk.offsets)) for chunk in entry.chunks]
        else:
            chunks.append((fqn, None))
    return chunks


def _are_inside(places: Sequence[Any], files: Mapping[str, FileEntry]) -> bool:
    paths = [place.relative_path for place in places]
    if not files.keys() >= set(paths):
        return False
    begins = [place.offset for place in places]
    lengths = [place.length for place in places]
    limits = {path: entry.nbytes for path, entry in files.items()}
    return min(chain(begins, lengths), default=0) >= 0 and all(
        map(le, map(add, begins, lengths), map(limits.__getitem__, paths))
    )


def _refuse(
    metadata: Metadata, results: Sequence[Sequence[WriteResult]], files: Mapping[str, FileEntry]
) -> NoReturn:
    """Raises PlanError for the first result that is wrong, or the first chunk without one."""
    written: set[tuple[str, Any]] = set()
    for rank, rank_results in enumerate(results):
        for result in rank_results:
            index, info = result.index, result.storage_data
            where = f"'{index.fqn}' at offset {index.offset} from rank {rank}"
            chunk = index.fqn, index.offset
            if chunk in written:
                raise PlanError(f"{where} was written twice", fqn=index.fqn)
            file = files.get(info.relative_path)
            if file is None:
                raise PlanError(
                    f"{where} names unknown file '{info.relative_path}': no rank "
                    "reports it. Results must reach `finish` in the lists that "
                    "`DcpxWriter.write_data` returned, which carry the file table",
                    fqn=index.fqn,
                )
            if info.offset < 0 or info.length < 0 or info.offset + info.length > file.nbytes:
                raise PlanError(
                    f"{where} lies at [{info.offset}, {info.offset + info.length}), "
                    f"outside of '{file.path}' of {file.nbytes} B",
                    fqn=index.fqn,
                )
            written.add(chunk)
    expected = _chunks(metadata)
    for fqn, offset in expected:
        if (fqn, offset) not in written:
            raise PlanError(
                f"no rank wrote '{fqn}' at offset {offset}: nothing is published", fqn=fqn
            )
    fqn, offset = next(iter(written.difference(expected)))
    raise PlanError(f"'{fqn}' at offset {offset} was written but is not in the metadata", fqn=fqn)


def refuse_beside_global(directory: Directory) -> None:
    """Raises UnsupportedError for a rank-local save beside a checkpoint of all ranks."""
    if METADATA_NAME in directory.names():
        raise UnsupportedError(
            f"'{directory.path}' holds a checkpoint of all ranks ('{METADATA_NAME}'), which "
            "every load would prefer to the rank-local one (use_collectives=False): save it "
            "to another directory"
        )


def check_present(directory: Directory, own_files: Iterable[str]) -> None:
    """Raises StorageError where a file that this rank wrote is gone."""
    for path in own_files:
        if not directory.is_regular(path):
            raise StorageError(
                f"'{directory.path / path}' was written by this save and is gone: something "
                "else removes files here; nothing is published",
                errno=errno.ENOENT,
                path=str(directory.path / path),
            )


def publish(
    directory: Directory,
    name: str,
    metadata: Metadata,
    files: Sequence[FileEntry],
    save_id: str,
    *,
    is_durable: bool,
) -> None:
    """Commits `metadata` under `name`.

    Raises:
        PlanError: it cannot be represented; nothing was published.
        StorageError: it could not be written, and the previous metadata is still in place; or the
            last fsync failed, and a power cut may leave the one or the other.
    """
    pieces = encode_pieces(metadata, files, save_id)
    temporary = temporary_name(name)
    try:
        directory.create(temporary, pieces, is_durable=is_durable)
        directory.rename(temporary, name)
    except BaseException:
        remove_leftover(directory, temporary)
        raise
    if is_durable:
        directory.sync()


def remove_leftover(directory: Directory, name: str) -> None:
    """Removes a file of a save whose own error is on its way: an error in here is only logged."""
    try:
        directory.unlink(name)
    except StorageError as error:
        logger.warning("leftover of a failed save stays: %s", str(error))


def commit(
    directory: Directory,
    name: str,
    metadata: Metadata,
    files: Sequence[FileEntry],
    save_id: str,
    *,
    is_durable: bool,
    takes_over_rank_local: bool,
    leftovers: Leftovers,
) -> None:
    """Publishes `metadata` under `name`, and removes the files that it replaces.

    Args:
        takes_over_rank_local: remove rank-local metadata as well.
        leftovers: whose files of failed saves to remove as well.

    Raises as `publish`.
    """
    replaced = (directory.is_regular(name) and referenced_files(directory, name)) or set()
    publish(directory, name, metadata, files, save_id, is_durable=is_durable)
    if takes_over_rank_local:
        replaced |= take_over_rank_local(directory)
    remove_replaced(directory, replaced, leftovers, {name: [file.path for file in files]})


def referenced_files(directory: Directory, name: str) -> set[str] | None:
    """Returns the data files that a metadata file names; None where it cannot be read.

    Leaves out all but plain names beneath the directory, so that metadata from elsewhere cannot
    make a removal reach outside.
    """
    try:
        with directory.open_small(name) as file:
            paths = decode_file_names(file, str(directory.path / name))
    except DcpxError as error:
        logger.warning("what '%s' names is not removed: %s", name, str(error))
        return None
    return {path for path in paths if is_data_file_name(path)}


def take_over_rank_local(directory: Directory) -> set[str]:
    """Removes `__{rank}.metadata` of saves that a global checkpoint has replaced, and returns the
    data files that they named. One that cannot be read stays, and so do its data files.
    """
    replaced: set[str] = set()
    try:
        for name in filter(is_metadata_name, directory.names()):
            if name != METADATA_NAME and (files := referenced_files(directory, name)) is not None:
                directory.unlink(name)
                replaced |= files
    except StorageError as error:
        logger.warning("rank-local metadata of a replaced checkpoint stay: %s", str(error))
    return replaced


def remove_replaced(
    directory: Directory,
    replaced: set[str],
    leftovers: Leftovers,
    published: Mapping[str, Iterable[str]] | None = None,
) -> None:
    """Removes data files that no metadata of the directory names any more.

    Failures are logged: the save itself goes on, or is done.

    Args:
        replaced: files of metadata that is gone.
        leftovers: whose files of failed saves to remove as well; needs the directory's lock.
        published: files that the caller's metadata names, by its own name: it is not read again.
    """
    try:
        found = unnamed_files(directory, replaced, leftovers, published)
        for name in sorted(found or ()):
            if directory.is_regular(name):
                directory.unlink(name)
    except StorageError as error:
        logger.warning("files of a replaced checkpoint stay: %s", str(error))


def unnamed_files(
    directory: Directory,
    replaced: Iterable[str] = (),
    leftovers: Leftovers = "everybody",
    published: Mapping[str, Iterable[str]] | None = None,
) -> set[str] | None:
    """Returns the data files and temporary metadata that no metadata of the directory names.

    None: some metadata cannot be read, and may name any of them. Args: as `remove_replaced`.
    """
    known = published or {}
    names = directory.names()
    own: tuple[str, ...] = ()
    if leftovers == "everybody":
        own = ("__", ".metadata.")
    elif leftovers != "nobody":
        own = (f"__{leftovers}_", f"__{leftovers}.metadata.")
    candidates = {*replaced, *(name for name in names if name.startswith(own))}
    candidates = {c for c in candidates if is_data_file_name(c) or is_temporary_name(c)}
    candidates = candidates.difference(*known.values())
    if not candidates:
        return candidates
    for name in filter(is_metadata_name, names):
        files = set() if name in known else referenced_files(directory, name)
        if files is None:
            return None
        candidates -= files
    return candidates


def remove_unpublished(directory: Directory, name: str, own_files: Iterable[str]) -> None:
    """Removes this rank's files of a save that was not committed under `name`.

    The directory says whether it was, not the error: a rename that reports a failure may have
    happened. Failures are logged; the save's own error is on its way.
    """
    try:
        named = referenced_files(directory, name) if name in directory.names() else set()
        for path in own_files:
            if named is not None and path not in named:
                directory.unlink(path)
    except StorageError as error:
        logger.warning("leftovers of a failed save stay: %s", str(error))
