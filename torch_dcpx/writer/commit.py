"""The coordinator's part of a save: check, publish, remove what was replaced.

1. Check that every chunk and every bytes entry of the metadata has exactly one result, inside its
   file by the file table's size. Else nothing is published.
2. Write `.metadata` under a name of its own, fsync it, rename it over the old one, and fsync the
   directory. The rename is the commit. In a store it is one PUT, on the condition that nothing else
   was put there since the save began.
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
from torch_dcpx.metadata.file import decode_file_names, decode_save_id, encode_pieces
from torch_dcpx.ranks.plan_wire import pack_results, unpack_results
from torch_dcpx.storage.names import (
    METADATA_NAME,
    FileEntry,
    data_file_parts,
    is_data_file_name,
    is_metadata_name,
    is_temporary_name,
)
from torch_dcpx.storage.place import Place, SmallContent
from torch_dcpx.storage.running_save import RunningSave
from torch_dcpx.storage.visibility import is_late_look, look_until_seen

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


def refuse_beside_global(place: Place) -> None:
    """Raises UnsupportedError for a rank-local save beside a checkpoint of all ranks."""
    if METADATA_NAME in place.names():
        raise UnsupportedError(
            f"'{place.path}' holds a checkpoint of all ranks ('{METADATA_NAME}'), which "
            "every load would prefer to the rank-local one (use_collectives=False): save it "
            "to another directory"
        )


def check_present(
    place: Place,
    own_files: Iterable[str],
    files: Sequence[FileEntry] = (),
    save: RunningSave | None = None,
    visible_s: float = 0.0,
) -> None:
    """Looks at what is to be committed.

    Args:
        own_files: of this rank.
        files: of all ranks, which are looked at where `save` has hosts: this node must see those
            of other nodes, within `visible_s` seconds.

    Raises:
        StorageError: a file that this rank wrote is gone, or one cannot be looked at.
        PlanError: a file of another node is not here, or has another size.
    """
    for path in place.missing(list(own_files))[:1]:
        raise StorageError(
            f"'{place.path / path}' was written by this save and is gone: something "
            "else removes files here; nothing is published",
            errno=errno.ENOENT,
            path=str(place.path / path),
        )
    if save is None or not save.hosts:
        return
    sizes = {file.path: file.nbytes for file in files}

    def look() -> None:
        place.check_sizes(sizes, is_exact=True)

    try:
        look_until_seen(place.path, visible_s, look, is_known=True)
    except StorageError as error:
        if not is_late_look(error):
            raise  # a part of the file system fails
        path = error.path or str(place.path)
        rank, *_ = data_file_parts(path.rpartition("/")[2]) or (-1,)
        writer = f"rank {rank} ({save.hosts[rank]})" if 0 <= rank < len(save.hosts) else "a rank"
        raise PlanError(
            f"{writer} has written '{path}', and rank 0 ({save.hosts[0]}) does not see it: "
            f"{error}; '{place.path.parent}' is not one directory on all nodes: mount it on each; "
            "nothing is published"
        ) from error


def publish(
    place: Place,
    name: str,
    metadata: Metadata,
    files: Sequence[FileEntry],
    save_id: str,
    *,
    is_durable: bool,
    lock: Any = None,
) -> None:
    """Commits `metadata` under `name`; `lock` is that of the place's `locks`.

    Raises:
        PlanError: it cannot be represented; nothing was published.
        StorageError, OutcomeUnknownError: as the place's `publish`.
    """
    pieces = encode_pieces(metadata, files, save_id)

    def is_own(file: SmallContent) -> bool:
        return decode_save_id(file, str(place.path / name)) == save_id

    place.publish(name, pieces, is_durable=is_durable, lock=lock, is_own=is_own)


def commit(
    place: Place,
    name: str,
    metadata: Metadata,
    files: Sequence[FileEntry],
    save_id: str,
    *,
    is_durable: bool,
    takes_over_rank_local: bool,
    leftovers: Leftovers,
    lock: Any = None,
) -> None:
    """Publishes `metadata` under `name`, and removes the files that it replaces.

    Args:
        takes_over_rank_local: remove rank-local metadata as well.
        leftovers: whose files of failed saves to remove as well.
        lock: as in `publish`.

    Raises as `publish`.
    """
    replaced = (place.is_replacing(name, lock) and referenced_files(place, name)) or set()
    publish(place, name, metadata, files, save_id, is_durable=is_durable, lock=lock)
    if takes_over_rank_local:
        replaced |= take_over_rank_local(place)
    remove_replaced(place, replaced, leftovers, {name: [file.path for file in files]})


def referenced_files(place: Place, name: str) -> set[str] | None:
    """Returns the data files that a metadata file names; None where it cannot be read.

    Leaves out all but plain names beneath the directory, so that metadata from elsewhere cannot
    make a removal reach outside.
    """
    try:
        with place.open_small(name) as file:
            paths = decode_file_names(file, str(place.path / name))
    except DcpxError as error:
        logger.warning("what '%s' names is not removed: %s", name, str(error))
        return None
    return {path for path in paths if is_data_file_name(path)}


def take_over_rank_local(place: Place) -> set[str]:
    """Removes `__{rank}.metadata` of saves that a global checkpoint has replaced, and returns the
    data files that they named. One that cannot be read stays, and so do its data files.
    """
    replaced: set[str] = set()
    try:
        for name in filter(is_metadata_name, place.names()):
            if name != METADATA_NAME and (files := referenced_files(place, name)) is not None:
                place.unlink(name)
                replaced |= files
    except StorageError as error:
        logger.warning("rank-local metadata of a replaced checkpoint stay: %s", str(error))
    return replaced


def remove_replaced(
    place: Place,
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
        found = unnamed_files(place, replaced, leftovers, published)
        place.unlink_all(sorted(found or ()))
    except StorageError as error:
        logger.warning("files of a replaced checkpoint stay: %s", str(error))


def unnamed_files(
    place: Place,
    replaced: Iterable[str] = (),
    leftovers: Leftovers = "everybody",
    published: Mapping[str, Iterable[str]] | None = None,
) -> set[str] | None:
    """Returns the data files and temporary metadata that no metadata of the directory names.

    None: some metadata cannot be read, and may name any of them. Args: as `remove_replaced`.
    """
    known = published or {}
    if leftovers == "nobody" and not replaced:
        return set()
    names = place.names()
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
        files = set() if name in known else referenced_files(place, name)
        if files is None:
            return None
        candidates -= files
    return candidates


def remove_unpublished(place: Place, name: str, own_files: Iterable[str]) -> None:
    """Removes this rank's files of a save that was not committed under `name`.

    The directory says whether it was, not the error: a rename that reports a failure may have
    happened. Failures are logged; the save's own error is on its way.
    """
    try:
        named = referenced_files(place, name) if name in place.names() else set()
        if named is not None:
            place.unlink_all(path for path in own_files if path not in named)
    except StorageError as error:
        logger.warning("leftovers of a failed save stay: %s", str(error))
