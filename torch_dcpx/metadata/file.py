"""The `.metadata` file: stock's pickle, the same as columns, and a tail that checks both.

    [pickle][body of columns][tail, 64 B]

Stock readers stop at the pickle's end. Ours start at the tail and build Metadata from the columns:
no object of the pickle comes to life. Only this file says which data files belong to a checkpoint.
docs/reference/format.md specifies every byte.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from torch_dcpx._compat import HAS_KNOWN_ITEMS, TORCH_VERSION
from torch_dcpx._gc import paused_gc
from torch_dcpx._native import _C
from torch_dcpx._version import __version__
from torch_dcpx.errors import CorruptionError, DcpxError, PlanError
from torch_dcpx.metadata.brief import decode_files, digest_of, optional_str
from torch_dcpx.metadata.columns import ColumnReader, encode_body
from torch_dcpx.metadata.decode import decode_storage_meta, open_columns, open_planner
from torch_dcpx.metadata.encode import encode_columns, stock_storage_meta
from torch_dcpx.metadata.lazy import plain_metadata
from torch_dcpx.metadata.parts import (
    MAGIC,
    TAIL,
    VERSION,
    Content,
    check_crc,
    check_tail,
    has_tail,
    scan_stock,
)
from torch_dcpx.metadata.stock import load_stock_metadata, pickle_any
from torch_dcpx.metadata.stock_columns import open_stock_metadata
from torch_dcpx.storage.names import METADATA_NAME, FileEntry
from torch_dcpx.storage.object_url import Location, location_of
from torch_dcpx.storage.place import SmallContent, open_place

logger = logging.getLogger("torch_dcpx")


class CheckpointMetadata(NamedTuple):
    """The content of a `.metadata` file, decoded."""

    metadata: Metadata  # as stock's pickle.load gives it, without a load id
    save_id: str  # of the save that wrote it, each its own; a digest of a file that notes none
    files: dict[str, FileEntry] | None  # every data file by path; None: stock DCP wrote it
    writer: str = ""  # "torch-dcpx 0.1.0, torch 2.13.0", as the file says; "": it does not


def encode_pieces(
    metadata: Metadata, files: Sequence[FileEntry], save_id: str
) -> list[bytes | memoryview]:
    """Returns the content of a `.metadata` file in pieces; every supported stock DCP reads it, too.

    Args:
        metadata: as `StorageWriter.finish` completes it; unchanged.
        files: every data file of the generation.

    Raises:
        PlanError: something that would not come back equal, with its key as `fqn`.
    """
    if type(metadata) is not Metadata:
        raise PlanError(f"encode the metadata: a {type(metadata).__name__} is no stock Metadata")
    if metadata.version is not None and type(metadata.version) is not str:
        raise PlanError(f"encode the metadata: its version is {metadata.version!r}")
    local_plans = getattr(metadata, "all_local_plans", None)  # which Megatron-Core keeps
    metadata = plain_metadata(metadata)
    with paused_gc():
        encoded = encode_columns(metadata, files)  # refuses first, so that the pickle can't fail
        columns = encoded.finished()
        meta = stock_storage_meta(metadata)
        kept = ("checkpoint_id", "save_id", "modules")
        meta_fields = None if meta is None else {name: vars(meta)[name] for name in kept}
        stock: bytes | memoryview
        if encoded.planner_data == "pickle" or local_plans is not None:
            try:
                stock = pickle_any(dataclasses.replace(metadata, storage_meta=meta), local_plans)
            except Exception as error:
                message = f"pickle the metadata with its planner_data: {error}"
                raise PlanError(message) from error
        else:
            stock = _C.pickle_metadata(
                columns,
                encoded.planner_data == "columns",
                encoded.descriptors,
                None if meta_fields is None else tuple(meta_fields.values()),
                metadata.version,
            )
        header: dict[str, Any] = {
            "format": "dcpx-metadata",
            "writer": f"torch-dcpx {__version__}",
            "torch": TORCH_VERSION,
            "save_id": save_id,
            "storage_meta": meta_fields,
            "version": metadata.version,
            "planner_data": encoded.planner_data,
            "descriptors": encoded.descriptors,
        }
        if local_plans is not None:
            header["has_local_plans"] = True
        body, header_bytes = encode_body(header, columns)
    return [stock, *body, _tail(stock, body, header_bytes)]


def _tail(
    stock: bytes | memoryview, body: Sequence[bytes | memoryview], header_bytes: int
) -> bytes:
    """Returns the last 64 bytes of the file: sizes and checksums of the parts before them."""
    body_crc = 0
    for piece in body:
        body_crc = _C.crc32(piece, body_crc)
    sizes = len(stock), sum(map(len, body)), header_bytes
    tail = TAIL.pack(MAGIC, VERSION, _C.crc32(stock), *sizes, body_crc, b"", 0)[:-4]
    return tail + struct.pack("<I", _C.crc32(tail))


def encode_metadata(metadata: Metadata, files: Sequence[FileEntry], save_id: str) -> bytes:
    """Returns the pieces of `encode_pieces` as one."""
    return b"".join(encode_pieces(metadata, files, save_id))


def decode_metadata(
    data: bytes | SmallContent,
    path: str,
    *,
    safe_globals: Sequence[Any] = (),
    trusted: bool = False,
) -> CheckpointMetadata:
    """Reads the content of a `.metadata` file, ours or stock's.

    Args:
        data: the whole file, or the open one: then no more than its columns are in memory at once.
        path: its name, for errors.
        safe_globals: classes and functions that planner_data may name beside stock's own.
        trusted: unpickle without an allow-list, where there is something to unpickle.

    Raises:
        CorruptionError: the bytes differ from those that were written.
        UnsafePickleError: a pickle asks for a global that is not allowed.
        UnsupportedError: a newer version of the format.
    """
    content = Content.of(data)
    with paused_gc():
        if not has_tail(content):
            whole = content.whole()
            metadata = _load_stock(whole, path, safe_globals, trusted)
            return CheckpointMetadata(metadata, digest_of([whole]), None)
        pickle_bytes, pickle_crc, columns = check_tail(content, path)
        pickled: Metadata | None = None
        has_planner = columns.header.get("planner_data") == "pickle"
        has_plans = columns.header.get("has_local_plans") is True
        if has_planner or has_plans or not HAS_KNOWN_ITEMS:
            stock = bytes(content.part(0, pickle_bytes))
            # The file may be another one by now: these bytes are decoded, these are checked.
            check_crc(_C.crc32(stock), pickle_crc, 0, pickle_bytes, "pickle", path)
            pickled = _load_pickle(stock, path, safe_globals, trusted and has_planner)
        found = _of_columns(columns, pickled)
        if has_plans and pickled is not None:
            vars(found.metadata).update(all_local_plans=vars(pickled).get("all_local_plans"))
        return found._replace(save_id=found.save_id or digest_of(content.pieces(content.nbytes)))


def _of_columns(columns: ColumnReader, pickled: Metadata | None) -> CheckpointMetadata:
    """Returns the content of a file of ours; its save id is empty where the file notes none.

    `pickled` is the file's pickle, where it is needed: it alone holds planner_data of a user's own.
    Where this torch's classes have fields that C++ does not know, stock's constructors make all
    objects, so those of the pickle are taken.
    """
    strings = columns.strings()
    entries: dict[str, Any]
    storage: dict[MetadataIndex, Any]
    if pickled is None or HAS_KNOWN_ITEMS:
        entries, storage = open_columns(columns, strings)
    else:
        entries, storage = pickled.state_dict_metadata, pickled.storage_data
    files = decode_files(columns, strings)
    where = columns.header.get("planner_data")
    planner: Any = None
    if where == "columns":
        planner = open_planner(columns, strings)
    elif where == "pickle" and pickled is not None:
        planner = pickled.planner_data
    elif where not in ("none", "pickle"):
        raise columns.error(f"planner_data is said to be in {where!r}")
    meta = decode_storage_meta(columns)
    version = optional_str(columns, columns.header, "version")
    metadata = Metadata(entries, planner, storage, meta, version)
    save_id = optional_str(columns, columns.header, "save_id")
    return CheckpointMetadata(metadata, save_id or "", files, _writer(columns.header))


def _writer(header: dict[str, Any]) -> str:
    """Returns who wrote a file; nothing relies on it, so another type than a text is no fault."""
    ours, torch = header.get("writer"), header.get("torch")
    return f"{ours}, torch {torch}" if isinstance(ours, str) and isinstance(torch, str) else ""


def decode_columns(columns: ColumnReader) -> CheckpointMetadata | None:
    """As `decode_metadata`, of whole columns; None where the pickle is needed as well."""
    if columns.header.get("planner_data") == "pickle" or not HAS_KNOWN_ITEMS:
        return None
    return _of_columns(columns, None)


def decode_file_names(data: bytes | SmallContent, path: str) -> set[str]:
    """As `decode_metadata`, but returns only the names of the data files."""
    content = Content.of(data)
    with paused_gc():
        if has_tail(content):
            columns = check_tail(content, path)[-1]
            return set(decode_files(columns, columns.strings()))
        storage_data = _load_stock(content.whole(), path, (), False).storage_data
        if not isinstance(storage_data, dict):
            return set()
        return {info.relative_path for info in storage_data.values()}


def decode_save_id(data: bytes | SmallContent, path: str) -> str | None:
    """Returns the save that wrote a `.metadata` file, None for stock's. Raises as `check_tail`."""
    content = Content.of(data)
    if not has_tail(content):
        return None
    columns = check_tail(content, path)[-1]
    return optional_str(columns, columns.header, "save_id")


def stored_save_id(path: str | os.PathLike[str] | Location) -> str | None:
    """Returns the id of the save that committed the checkpoint in directory `path`.

    None: there is no metadata, or stock DCP wrote it. Raises DcpxError where it cannot be read.
    """
    with open_place(location_of(path)) as place:
        if not place.is_regular(METADATA_NAME):
            return None
        with place.open_small(METADATA_NAME) as file:
            return decode_save_id(file, str(place.path / METADATA_NAME))


def committed_save_id(path: str | os.PathLike[str]) -> str | None:
    """As `stored_save_id`; logs an error and returns None.

    A rank calls it when the coordinator of a save does not answer.
    """
    try:
        return stored_save_id(path)
    except DcpxError as error:
        logger.warning("which save committed '%s' cannot be said: %s", path, str(error))
        return None


def _load_stock(data: bytes, path: str, safe_globals: Sequence[Any], trusted: bool) -> Metadata:
    """Reads a whole file of stock's: as columns where it is exactly as torch writes it."""
    found = None if trusted else open_stock_metadata(data)
    return found or _load_pickle(data, path, safe_globals, trusted)


def _load_pickle(data: bytes, path: str, safe_globals: Sequence[Any], trusted: bool) -> Metadata:
    """Reads stock's pickle, which must fill `data`."""
    keys = scan_stock(data, path, trusted=trusted)
    metadata: object = load_stock_metadata(
        data, path, safe_globals, trusted=trusted, compound_keys=keys
    )
    if not isinstance(metadata, Metadata):
        message = f"unpickle {path!r}: a {type(metadata).__name__} is no Metadata"
        raise CorruptionError(message, path=path, offset=0, nbytes=len(data))
    return metadata
