"""The tensors in a file of torch.save: where they lie, without reading or calling anything of it.

1. `zipfile` reads the directory of the file. A directory or a pickle beyond a limit is refused.
2. The pickle is unpickled as byte items are: names off the allow-list are refused, whatever the
   options, and its storages get no memory.
3. The place of a tensor is its view's place in the record of its storage.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from torch_dcpx._compat import dtype_name
from torch_dcpx.errors import CorruptionError, UnsafePickleError, UnsupportedError
from torch_dcpx.reader.locate import Form, RawPlace
from torch_dcpx.reader.rows import span_elems
from torch_dcpx.reader.safetensors import refuse_link
from torch_dcpx.reader.safetensors_header import MAX_FILE_TENSORS
from torch_dcpx.storage.directory import SmallFile
from torch_dcpx.storage.object_url import Location
from torch_dcpx.storage.place import FileState, PosixPlace
from torch_dcpx.unpickle.byte_items import OBJECTS
from torch_dcpx.unpickle.settle import Settler, build_user_object, refuse
from torch_dcpx.unpickle.torch_objects import StorageRef, storage_ref
from torch_dcpx.unpickle.unpickler import RestrictedUnpickler, malformed_is_corruption, user_globals

_MAX_DIRECTORY_BYTES = 32 << 20  # of 250,000 records and more
_MAX_PICKLE_BYTES = 100_000_000  # as of a safetensors header
_MAX_NAMES_BYTES = 128 << 20  # that flattened names may take, with
_NAME_BYTES, _DEPTH_BYTES = 250, 8  # for each, and each of the dicts around it
_MAX_LOOKS = 20_000_000
_LOCAL = struct.Struct("<4s22xHH")  # magic, and the lengths of name and extra
_PICKLE = "data.pkl"


class TorchFile(NamedTuple):
    """The tensors of one file."""

    directory: Path
    places: dict[str, RawPlace]  # by name, flattened by dots
    paths: dict[str, tuple[Any, ...]]  # keys in the nested dict, by name
    digest: str  # of the pickle
    files: dict[str, FileState]  # its state, by its name
    objects: dict[str, Any]  # what is no tensor, by name


def on_disk(location: Location, name: str) -> Path:
    """Returns the directory of a file; UnsupportedError: it lies in a store, where each record of
    torch.save's is a request.
    """
    if isinstance(location, Path):
        return location
    raise UnsupportedError(
        f"'{location / name}' is a file of torch.save, which is read from disks alone: copy it to "
        "one, or export the checkpoint as safetensors"
    )


def read_torch_file(location: Location, name: str, safe_globals: Sequence[Any] = ()) -> TorchFile:
    """Reads what a file of torch.save says of its tensors, and its objects.

    Args:
        safe_globals: classes and functions that its pickle may name beside those of byte items.

    Raises:
        UnsafePickleError: its pickle asks for a global that is not allowed; TorchScript.
        UnsupportedError: it is a link, lies in a store, is no zip, is compressed, holds no dict, or
            more than `MAX_FILE_TENSORS` tensors.
        CorruptionError: it is malformed; a FIFO.
        StorageError: it cannot be read.
    """
    directory_path = on_disk(location, name)
    path = str(directory_path / name)
    refuse_link(directory_path, name)
    with PosixPlace(directory_path) as directory, directory.open_regular(name) as file:
        state = directory.state(name)
        records = _Records(file)
        held = file.part(*records.place(_PICKLE, _MAX_PICKLE_BYTES))
        own = user_globals(safe_globals, build_user_object)
        with malformed_is_corruption("read", path=path, fqn=_PICKLE):
            table = {**OBJECTS, **own}
            unpickler = RestrictedUnpickler(
                held,
                table,
                path=path,
                fqn=_PICKLE,
                load_storage=storage_ref,
                storages=len(records),
                may_trust=False,
            )
            value = Settler(records.storage, len(held))(unpickler.load())
            if not isinstance(value, dict):
                kind = type(value).__name__
                raise UnsupportedError(f"'{path}' holds a {kind}, not a dict of tensors")
            _refuse_many_names(value, path)
            flat, paths = flatten_state_dict(value)
            tensors = {n: one for n, one in flat.items() if isinstance(one, torch.Tensor)}
            if len(tensors) > MAX_FILE_TENSORS:
                raise UnsupportedError(f"'{path}' names more than {MAX_FILE_TENSORS} tensors")
            places = {n: records.tensor(n, one) for n, one in tensors.items() if records.has(one)}
    _refuse_overlaps(places, path)
    digest = hashlib.sha256(held).hexdigest()
    objects = {n: one for n, one in flat.items() if n not in tensors}
    own_paths = {n: paths[n] for n in places}
    return TorchFile(directory_path, places, own_paths, digest, {name: state}, objects)


def _refuse_many_names(value: dict[Any, Any], path: str) -> None:
    """Raises UnsupportedError where flattened names take far more memory than what they name: a
    dict within itself many times, or very deep ones. As torch flattens, lists of plain values are
    values.
    """
    left_bytes, left_looks = _MAX_NAMES_BYTES, _MAX_LOOKS
    stack: list[tuple[Any, int, int, int]] = [(value, 0, 0, 0)]
    while stack:
        one, depth, name_bytes, lists = stack.pop()
        is_dict = isinstance(one, dict)
        kinds = set(map(type, one.values() if is_dict else one))
        has_nested = any(issubclass(kind, (dict, list)) for kind in kinds)
        lists = 0 if is_dict else lists + 1
        left_looks -= len(one) * lists  # each list around asks what is in it
        if is_dict or has_nested or any(issubclass(kind, torch.Tensor) for kind in kinds):
            left_bytes -= len(one) * (_NAME_BYTES + _DEPTH_BYTES * depth + name_bytes)
        if left_bytes < 0 or left_looks < 0:
            raise UnsupportedError(
                f"'{path}' has dicts and lists whose names would take far more than it has bytes"
            )
        if not (is_dict or has_nested):
            continue
        items: Any = one.items() if is_dict else enumerate(one)
        for key, part in items:
            own = len(key) if isinstance(key, str) else 0
            left_bytes -= own
            if isinstance(part, (dict, list)) and part:
                stack.append((part, depth + 1, name_bytes + own, lists))


def _refuse_overlaps(places: Mapping[str, RawPlace], path: str) -> None:
    """Raises UnsupportedError for views that share a part of their bytes: a read gets each byte for
    one tensor, or for several that have all of it.
    """
    end, last = 0, ("", (0, 0))
    for name, place in sorted(places.items(), key=lambda row: (row[1].offset, -row[1].length)):
        own = place.offset, place.length
        if place.length and place.offset < end and own != last[1]:
            raise UnsupportedError(
                f"'{name}' and '{last[0]}' of '{path}' are views that share a part of their bytes, "
                "which are read for one tensor alone: save clones of them"
            )
        if place.length and own[0] + own[1] > end:
            end, last = own[0] + own[1], (name, own)


class _Records:
    """The records of a file's zip, and the storages that its pickle names."""

    def __init__(self, file: SmallFile) -> None:
        self._file, self._path = file, str(file.path)
        if file.part(0, min(4, file.nbytes)) != b"PK\x03\x04":
            raise UnsupportedError(
                f"'{self._path}' is no zip of torch.save, which torch writes since 1.6: load it "
                "with torch.load(weights_only=True), and save it anew"
            )
        try:
            with zipfile.ZipFile(_Stream(file)) as held:
                rows = held.infolist()
                self._end = held.start_dir
        except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError) as error:
            raise self._error(f"its directory is damaged: {str(error)[:200]}") from error
        tops = [row.filename for row in rows if row.filename.count("/") == 1]
        top = next((one for one in tops if one.endswith(f"/{_PICKLE}")), f"/{_PICKLE}")
        top = top.removesuffix(_PICKLE)
        self._rows = {row.filename.removeprefix(top): row for row in rows}
        if len(self._rows) < len(rows):
            raise self._error("two of its records have one name")
        if "constants.pkl" in self._rows:
            raise UnsafePickleError(
                f"refuse '{self._path}': a TorchScript archive, which is code", path=self._path
            )
        order = b"little"
        if "byteorder" in self._rows:
            order = file.part(*self.place("byteorder", 16))
        if order not in (b"little", b"big"):
            raise self._error(f"its byte order is {order!r}")
        self._is_big_endian = order == b"big"
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._places: dict[int, tuple[int, int]] = {}  # by storage
        self._forms: dict[Any, Form] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def place(self, name: str, max_bytes: int | None = None) -> tuple[int, int]:
        """Returns the offset and the length of a record's bytes in the file."""
        row = self._rows.get(name)
        if row is None:
            raise self._error(f"it lacks the record {name[:80]!r}")
        if row.compress_type != zipfile.ZIP_STORED or row.flag_bits & 1:
            raise UnsupportedError(
                f"'{self._path}' has a compressed or encrypted record {name[:80]!r}, which "
                "torch.save does not write"
            )
        if max_bytes is not None and row.file_size > max_bytes:
            raise UnsupportedError(
                f"'{self._path}' has a record {name[:80]!r} of {row.file_size} B, more than "
                f"{max_bytes}"
            )
        at = row.header_offset
        if at < 0 or at + _LOCAL.size > self._end:
            raise self._error(f"the record {name[:80]!r} begins at byte {at}")
        magic, name_bytes, extra_bytes = _LOCAL.unpack(self._file.part(at, _LOCAL.size))
        begin = at + _LOCAL.size + name_bytes + extra_bytes
        if magic != b"PK\x03\x04" or begin + row.file_size > self._end:
            raise self._error(f"the record {name[:80]!r} does not lie where its directory says")
        return begin, row.file_size

    def storage(self, ref: StorageRef) -> torch.UntypedStorage:
        """Returns a storage without memory, one for all views of it."""
        known = self._storages.get(ref.key)
        if known is not None:
            return known
        begin, nbytes = self.place(f"data/{ref.key}")
        if ref.nbytes > nbytes:
            refuse(f"has storage {ref.key!r:.40} of {ref.nbytes} B in a record of {nbytes} B")
        made = torch.empty(ref.nbytes, dtype=torch.uint8, device="meta").untyped_storage()
        self._places[made._cdata] = begin, nbytes
        self._storages[ref.key] = made
        return made

    def has(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor has bytes in the file: not one that was saved on meta."""
        return tensor.untyped_storage()._cdata in self._places

    def tensor(self, name: str, tensor: torch.Tensor) -> RawPlace:
        """Returns the place of a tensor. Raises: UnsupportedError."""
        if tensor.is_conj() or tensor.is_neg():
            raise UnsupportedError(
                f"'{name}' of '{self._path}' is a conjugate or negated view, whose bytes are "
                "those of another tensor"
            )
        begin, _ = self._places[tensor.untyped_storage()._cdata]
        sizes, strides, dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
        key = sizes, strides, dtype
        if key not in self._forms:
            big = self._is_big_endian
            self._forms[key] = Form("plain", sizes, strides, dtype_name(dtype), "", "", big)
        nbytes = 0 if 0 in sizes else span_elems(sizes, strides) * dtype.itemsize
        offset = begin + int(tensor.storage_offset()) * dtype.itemsize
        return RawPlace(self._file.path.name, offset, nbytes, self._forms[key])

    def _error(self, what: str) -> CorruptionError:
        message = f"'{self._path}' is no file of torch.save that can be read: {what}"
        return CorruptionError(message, path=self._path, touched=())


class _Stream:
    """A file as `zipfile` reads it: by pieces, none above the limit of a directory."""

    def __init__(self, file: SmallFile) -> None:
        self._file, self._at = file, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves to a byte of the file. Raises: OSError: before its beginning."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.nbytes}[whence]
        if base + offset < 0:
            raise OSError("seek before the file's beginning")  # which zipfile takes for no zip
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Returns the byte that is read next."""
        return self._at

    def read(self, nbytes: int = -1) -> bytes:
        """Reads up to `nbytes`. Raises: ValueError: more than a directory may have."""
        left = max(0, self._file.nbytes - self._at)
        nbytes = left if nbytes < 0 else min(nbytes, left)
        if nbytes > _MAX_DIRECTORY_BYTES:
            raise ValueError(f"it has {nbytes} B, more than {_MAX_DIRECTORY_BYTES}")
        part = self._file.part(self._at, nbytes)
        self._at += nbytes
        return part
