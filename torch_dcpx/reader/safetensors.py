"""Finds the files of tensors that a path means, and the tensors in those of safetensors."""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch_dcpx._json import parsed_json
from torch_dcpx.errors import CorruptionError, NotCommittedError, StorageError
from torch_dcpx.reader.hints import absent, uncommitted
from torch_dcpx.reader.safetensors_header import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    HeaderEntry,
    header_bytes,
    parse_header,
    unique_keys,
)
from torch_dcpx.storage.names import ARTIFACT_SUFFIXES, METADATA_NAME
from torch_dcpx.storage.object_url import Location
from torch_dcpx.storage.place import FileState, Place, is_place, open_place

_SINGLE_NAME = "model.safetensors"
_INDEX_NAME = "model.safetensors.index.json"
_TORCH_NAME = "pytorch_model.bin"
_FILE_NAME = re.compile(r"[^/\0\ud800-\udfff]{1,240}\.safetensors")  # beside the index alone


class StoredTensor(NamedTuple):
    """The place of a tensor."""

    file: str  # relative to the directory
    offset: int  # bytes from the start of the file
    entry: HeaderEntry


class Safetensors(NamedTuple):
    """The tensors of one file, or of the files of one index."""

    directory: Location
    tensors: dict[str, StoredTensor]
    digest: str  # of all headers
    files: dict[str, FileState]  # by name


def find_files(path: Location) -> tuple[Location, str] | None:
    """Returns (directory, name of the file or index) that a path means; None: a checkpoint of DCP.

    Args:
        path: a file `*.safetensors`, `*.index.json`, `*.pt`, `*.pth` or `*.bin`, or a directory.
            In a directory, a `.metadata` comes first, then `model.safetensors`, then the index,
            then the only `*.safetensors`, then `pytorch_model.bin`: the order of Hugging Face's
            loaders.

    Raises:
        NotCommittedError: it holds none of these.
        StorageError: it cannot be listed.
    """
    if names_file(path):
        return path.parent, path.name
    try:
        with open_place(path) as place:
            names = place.names()
    except StorageError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        raise NotCommittedError(absent(path), errno=error.errno, path=str(path)) from error
    name = file_among(path, names)
    return None if name is None else (path, name)


def names_file(path: Location) -> bool:
    """Whether a path is that of a file of tensors or an index, by its suffix."""
    return path.name.endswith(ARTIFACT_SUFFIXES) and not is_place(path)


def file_among(path: Location, names: Sequence[str]) -> str | None:
    """Returns the file or index that a directory with these names means; None: a checkpoint of DCP.

    Raises: NotCommittedError: it holds none of these.
    """
    if any(name.endswith(METADATA_NAME) for name in names):
        return None
    single = [name for name in names if name.endswith(".safetensors")]
    only = single if len(single) == 1 else []
    for name in (_SINGLE_NAME, _INDEX_NAME, *only, _TORCH_NAME):
        if name in names:
            return name
    wanted = (METADATA_NAME, _INDEX_NAME, _SINGLE_NAME)
    message = uncommitted(path, sorted(names), wanted)
    if single:
        message = f"'{path}' holds {len(single)} safetensors files and no {_INDEX_NAME}: name one, "
        message += f"such as '{path / min(single)}'"
    raise NotCommittedError(
        message,
        errno=errno.ENOENT,
        path=str(path),
    )


def read_safetensors(directory_path: Location, name: str) -> Safetensors:
    """Reads the headers of a file, or of the files of an index.

    Raises:
        CorruptionError: headers or the index are not what they may be; a link or a FIFO.
        StorageError: a file cannot be read.
    """
    with open_place(directory_path) as directory:
        weight_map = read_index(directory, name) if name.endswith(".json") else None
        held: dict[str, dict[str, StoredTensor]] = {}
        seen = {}
        digest = hashlib.sha256()
        for file in [name] if weight_map is None else sorted(set(weight_map.values())):
            seen[file] = directory.state(file)
            held[file], header = read_header(directory, file)
            digest.update(header)
    if weight_map is None:
        tensors = held[name]
    else:
        check_index(weight_map, held, str(directory_path / name))
        tensors = {fqn: held[file][fqn] for fqn, file in weight_map.items()}
    return Safetensors(directory_path, tensors, digest.hexdigest(), seen)


def check_index(
    weight_map: Mapping[str, str], held: Mapping[str, Mapping[str, StoredTensor]], path: str
) -> None:
    """Raises CorruptionError unless the index at `path` and its files name the same tensors.

    Args:
        weight_map: file by tensor.
        held: tensors by file.
    """
    for fqn, file in weight_map.items():
        if fqn not in held[file]:
            raise CorruptionError(
                f"'{path}' says that '{fqn}' lies in '{file}', which does not hold it",
                path=path,
                fqn=fqn,
                touched=(),
            )
    for file, tensors in held.items():
        unnamed = [fqn for fqn in tensors if fqn not in weight_map]
        if unnamed:
            raise CorruptionError(
                f"'{file}' holds {len(unnamed)} tensors that '{path}' does not name, such as "
                f"'{unnamed[0]}': they are not of one save; mend the index, or load the files one "
                "by one with strict=False",
                path=path,
                fqn=unnamed[0],
                touched=(),
            )


def read_header(directory: Place, name: str) -> tuple[dict[str, StoredTensor], bytes]:
    """Returns the tensors of one file, and its header with the length before it.

    Raises: CorruptionError, StorageError, UnsupportedError.
    """
    path = str(directory.path / name)
    with directory.open_regular(name) as file:
        prefix = file.part(0, min(LENGTH_BYTES, file.nbytes))
        length = header_bytes(prefix, file.nbytes, path)
        header = file.part(LENGTH_BYTES, length)
        entries = parse_header(header, file.nbytes, path)
    base = LENGTH_BYTES + length
    rows = {entry.name: StoredTensor(name, base + entry.begin, entry) for entry in entries}
    return rows, prefix + header


def read_index(directory: Place, name: str) -> dict[str, str]:
    """Returns an index's file by tensor. Raises: CorruptionError, StorageError."""
    path = str(directory.path / name)

    def fail(what: str) -> CorruptionError:
        return CorruptionError(f"'{path}' is no index of safetensors: {what}", path=path)

    with directory.open_regular(name) as file:
        if file.nbytes > MAX_HEADER_BYTES:
            raise fail(f"it holds {file.nbytes} B, more than {MAX_HEADER_BYTES}")
        text = file.part(0, file.nbytes)
    try:
        index: Any = parsed_json(text, unique_keys)
    except ValueError as error:
        raise fail(f"no JSON that it may be: {str(error)[:200]}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or set(map(type, weight_map.values())) - {str}:
        raise fail("it has no weight_map of texts")
    for file_name in sorted(set(weight_map.values())):
        if _FILE_NAME.fullmatch(file_name) is None:
            raise fail(f"{file_name[:200]!r} is no name of a file beside it")
    return weight_map
