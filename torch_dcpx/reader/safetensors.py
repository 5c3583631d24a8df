"""Finds the files of tensors that a path means, and the tensors in those of safetensors."""

from __future__ import annotations

import errno
import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch_dcpx._answered_os import os
from torch_dcpx._json import parsed_json
from torch_dcpx._text import counted, printable
from torch_dcpx.errors import (
    CorruptionError,
    DcpxError,
    NotCommittedError,
    StorageError,
    UnsupportedError,
)
from torch_dcpx.reader.hints import absent, linked, listed, not_committed
from torch_dcpx.reader.safetensors_header import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    header_bytes,
    parse_header,
    unique_keys,
)
from torch_dcpx.reader.saved_parts import (
    PARTS_NAME,
    SHARDED_NAME,
    StoredTensor,
    assembled,
    is_part_name,
    refuse_parts,
    sizes_of_parts,
)
from torch_dcpx.storage.names import (
    METADATA_NAME,
    TORCH_SUFFIXES,
    index_kind,
    is_artifact_name,
    is_metadata_name,
)
from torch_dcpx.storage.object_url import Location
from torch_dcpx.storage.place import FileState, Place, is_place, open_place

logger = logging.getLogger("torch_dcpx")

_STEMS = ("model", "diffusion_pytorch_model")  # that Hugging Face's loaders look for
_SINGLE_NAME = "model.safetensors"
_INDEX_NAME = "model.safetensors.index.json"
_FIRST_NAMES = tuple(f"{stem}.safetensors{end}" for stem in _STEMS for end in ("", ".index.json"))
_TORCH_NAMES = ("pytorch_model.bin", "diffusion_pytorch_model.bin", "adapter_model.bin")
_FILE_NAME = re.compile(r"[^/\0\ud800-\udfff]{1,240}\.safetensors")  # beside the index alone
_OF_SEVERAL = re.compile(r".+-\d{5,9}-of-(\d{5,9})(\.[\w-]+)?\.safetensors")  # .fp16, too


class Safetensors(NamedTuple):
    """The tensors of one file, or of the files of one index, or of all ranks' files."""

    directory: Location
    tensors: dict[str, tuple[StoredTensor, ...]]  # the parts of each: one, or those of ranks
    digest: str  # of all headers
    files: dict[str, FileState]  # by name


def find_files(path: Location) -> tuple[Location, str] | None:
    """Returns (directory, name of the file or index) that a path means; None: a checkpoint of DCP.

    Args:
        path: a file `*.safetensors`, `*.index.json`, `*.pt`, `*.pth` or `*.bin`, or a directory.
            In a directory, a `.metadata` comes first, then `model.safetensors`, then its index
            (the order of Hugging Face's loaders), then those of diffusers, then the only
            `*.safetensors` or index of such, then ranks' files, then `pytorch_model.bin`.

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
    return is_artifact_name(path.name) and not is_place(path)


def file_among(path: Location, names: Sequence[str]) -> str | None:
    """Returns the file or index that a directory with these names means; None: a checkpoint of DCP.

    Raises: NotCommittedError: it holds none of these, or several.
    """
    if any(map(is_metadata_name, names)):
        return None
    seen = [name for name in sorted(names) if not name.startswith(".")]  # macOS: ._x.safetensors
    files = [name for name in seen if name.endswith(".safetensors")]
    indices = [name for name in seen if index_kind(name) == "safetensors"]
    shards = [name for name in files if (of := _OF_SEVERAL.fullmatch(name)) and int(of[1]) != 1]
    parts = list(filter(is_part_name, files))
    found = [*indices, *(name for name in files if name not in {*shards, *parts})]
    found = [name for name in _FIRST_NAMES if name in seen][:1] or found
    if parts and found:
        message = (
            f"'{path}' holds '{found[0]}' and {counted(len(parts), 'file')} of ranks, such as "
            f"'{parts[0]}', which are of two saves: name '{path / found[0]}' for the one, and move "
            "the files of ranks to a folder of their own for the other"
        )
        raise NotCommittedError(message, errno=errno.ENOENT, path=str(path))
    if len(found) == 1:
        return found[0]
    if not found and parts and len(parts) == len(files):
        return PARTS_NAME
    if not files and not indices:
        for name in _TORCH_NAMES:
            for one in (name, f"{name}.index.json"):
                if one in seen:
                    return one
        of_bins = [name for name in seen if index_kind(name) == "bin"]
        if of_bins:
            return of_bins[0]
        wanted = (METADATA_NAME, _INDEX_NAME, _SINGLE_NAME)
        raise not_committed(path, sorted(names), wanted)
    if found:
        message = f"'{path}' holds {listed(found)}: name one, such as '{path / found[0]}'"
    else:
        message = (
            f"'{path}' holds {listed(files)}, which are files of one model, and no {_INDEX_NAME} "
            "that says so: bring the index and all files that it names"
        )
    raise NotCommittedError(message, errno=errno.ENOENT, path=str(path))


def read_safetensors(directory_path: Location, name: str) -> Safetensors:
    """Reads the headers of a file, of the files of an index, or of all ranks' (`PARTS_NAME`).

    Tensors that an index does not name, or names in another file, are left out.

    Raises:
        CorruptionError: headers or the index are not what they may be; a FIFO.
        UnsupportedError: a link; an index of files of torch.save; a part of a tensor alone.
        StorageError: a file cannot be read.
    """
    with open_place(directory_path) as directory:
        weight_map = read_index(directory, name) if name.endswith(".json") else None
        held: dict[str, dict[str, StoredTensor]] = {}
        seen = {}
        digest = hashlib.sha256()
        for file in files_of(directory, name, weight_map):
            seen[file] = directory.state(file)
            held[file], header = read_header(directory, file)
            digest.update(header)
    tensors = tensors_of(directory_path, name, weight_map, held)
    for file, left in unnamed_in(weight_map, held).items():
        count, example = counted(len(left), "tensor"), printable(left[0])[:160]
        text = "'%s': left out %s of '%s' that the index does not name there, such as '%s'"
        logger.warning(text, directory_path / name, count, file, example)
    return Safetensors(directory_path, tensors, digest.hexdigest(), seen)


def files_of(directory: Place, name: str, weight_map: Mapping[str, str] | None) -> list[str]:
    """Returns the files that a name means, which may be an index's, or `PARTS_NAME`."""
    if weight_map is not None:
        return sorted(set(weight_map.values()))
    return sorted(filter(is_part_name, directory.names())) if name == PARTS_NAME else [name]


def tensors_of(
    directory: Location,
    name: str,
    weight_map: Mapping[str, str] | None,
    held: Mapping[str, Mapping[str, StoredTensor]],
) -> dict[str, tuple[StoredTensor, ...]]:
    """Returns the tensors that the name of a file, an index or `PARTS_NAME` means.

    Args:
        weight_map: file by tensor, of an index.
        held: tensors by file.

    Raises: CorruptionError: files do not hold what they should; UnsupportedError: they hold parts.
    """
    if name == PARTS_NAME:
        return assembled(str(directory), held, _consolidated_sizes(directory))
    if weight_map is None:
        refuse_parts(str(directory), name, held[name])
        return {fqn: (one,) for fqn, one in held[name].items()}
    path = str(directory / name)
    tensors = {}
    for fqn, file in weight_map.items():
        if fqn not in held[file]:
            raise CorruptionError(
                f"'{path}' says that '{printable(fqn)[:160]}' lies in '{file}', which does not "
                "hold it",
                path=path,
                fqn=fqn,
                touched=(),
            )
        tensors[fqn] = held[file][fqn]
    for file in held:
        own = {fqn: one for fqn, one in tensors.items() if one.file == file}
        refuse_parts(str(directory), file, own, is_of_index=True)
    return {fqn: (one,) for fqn, one in tensors.items()}


def _consolidated_sizes(folder: Location) -> dict[str, tuple[int, ...]]:
    """Returns the sizes of the tensors that torch has made of ranks' files in `sharded`."""
    if folder.name != SHARDED_NAME:
        return {}
    with suppress(DcpxError):  # none, or none that can be read
        found = find_files(folder.parent)
        if found is not None and not found[1].endswith(TORCH_SUFFIXES):
            tensors = read_safetensors(*found).tensors
            return {fqn: sizes_of_parts(parts) for fqn, parts in tensors.items()}
    return {}


def unnamed_in(
    weight_map: Mapping[str, str] | None, held: Mapping[str, Mapping[str, StoredTensor]]
) -> dict[str, list[str]]:
    """Returns the tensors of each file that the index, if there is one, does not name in it."""
    if weight_map is None:
        return {}
    left = {file: [n for n in own if weight_map.get(n) != file] for file, own in held.items()}
    return {file: names for file, names in left.items() if names}


def refuse_link(folder: Location, name: str) -> None:
    """Raises UnsupportedError for a file that is a link: a whole one elsewhere, and no damage."""
    path = folder / name
    if isinstance(path, Path) and os.path.islink(path):
        raise UnsupportedError(linked(path))


def read_header(directory: Place, name: str) -> tuple[dict[str, StoredTensor], bytes]:
    """Returns the tensors of one file, and its header with the length before it.

    Raises: CorruptionError, StorageError, UnsupportedError.
    """
    path = str(directory.path / name)
    refuse_link(directory.path, name)
    with directory.open_regular(name) as file:
        prefix = file.part(0, min(LENGTH_BYTES, file.nbytes))
        length = header_bytes(prefix, file.nbytes, path)
        header = file.part(LENGTH_BYTES, length)
        entries = parse_header(header, file.nbytes, path)
    base = LENGTH_BYTES + length
    rows = {entry.name: StoredTensor(name, base + entry.begin, entry) for entry in entries}
    return rows, prefix + header


def read_index(directory: Place, name: str) -> dict[str, str]:
    """Returns an index's file by tensor.

    Raises: CorruptionError, StorageError; UnsupportedError: a link; files of torch.save.
    """
    path = str(directory.path / name)

    def fail(what: str) -> CorruptionError:
        return CorruptionError(f"'{path}' is no index of safetensors: {what}", path=path)

    refuse_link(directory.path, name)
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
    of_torch = [one for one in weight_map.values() if one.endswith(TORCH_SUFFIXES)]
    if of_torch and index_kind(name) != "safetensors":
        raise UnsupportedError(
            f"'{path}' is the index of several files of torch.save, such as "
            f"'{printable(min(of_torch))[:160]}', and such files are read one at a time: put the "
            "tensors that it names of each, dcpx.load_tensors(file, names), into one dict; "
            "dcpx.export(dict, FOLDER) makes safetensors of it"
        )
    for file_name in sorted(set(weight_map.values())):
        if _FILE_NAME.fullmatch(file_name) is None:
            raise fail(f"{file_name[:200]!r} is no name of a file beside it")
    return weight_map
