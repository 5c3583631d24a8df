"""Byte items, made harmless: decoded without executing anything, then written anew.

DCP's planner hands a byte item to `torch.load(weights_only=False)`, which executes the calls that
the file makes. So the planner never gets bytes of the file:
1. `_C.zip_records` parses the zip (stored records only), not torch, which would run TorchScript
   archives and believes the sizes of storages;
2. `unpickler` scans its `data.pkl` for bombs and unpickles it into stand-ins;
3. `settle` builds real objects of exact types: the tables of `plain_objects`, `torch_objects`,
   `numpy_objects` and `random_objects` list those that are allowed;
4. `torch.save` writes these anew, and the planner gets that.
"""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Iterable
from typing import Any

import torch

from torch_dcpx._gc import paused_gc
from torch_dcpx._native import _C
from torch_dcpx.errors import CorruptionError, DcpxError, UnsafePickleError
from torch_dcpx.unpickle.numpy_objects import NUMPY
from torch_dcpx.unpickle.plain_objects import PLAIN
from torch_dcpx.unpickle.random_objects import RANDOM
from torch_dcpx.unpickle.settle import Settler, build_user_object, refuse
from torch_dcpx.unpickle.stand_ins import GlobalTable
from torch_dcpx.unpickle.torch_objects import TORCH, StorageRef, storage_ref
from torch_dcpx.unpickle.unpickler import (
    RestrictedUnpickler,
    is_heavy,
    malformed_is_corruption,
    scanned,
    user_globals,
)

logger = logging.getLogger("torch_dcpx")

OBJECTS: GlobalTable = {**PLAIN, **TORCH, **NUMPY, **RANDOM}
_WAY_OUT = "trusted=True would hand it to the planner unread"
_GLOBAL = re.compile(rb"c([\w.]{1,200})\n([\w.]{1,200})\n", re.ASCII)  # as protocol 2 names one
_MAX_LOOKED_BYTES = 16 << 20
_MAX_UNWEIGHED_BYTES = 1 << 20  # whatever they are, they take less than a load gives
_told: set[str] = set()  # classes and items
_DEVICE = re.compile(r"[a-z]{1,24}(:[0-9]{1,3})?\Z")
_KINDS = {  # first bytes -> what it is
    b"\x80": "a bare pickle (torch.save before 1.6, or pickle.dump)",
    b"\x28\xb5\x2f\xfd": "zstd-compressed data",
    b"\x1f\x8b": "gzip-compressed data",
}


def _device_here(location: str) -> torch.device:
    """Returns the device that a storage was saved from if this machine has it, else the CPU."""
    if not _DEVICE.match(location):
        refuse(f"has a storage saved from {location!r:.40}, which is no device")
    kind, _, index = location.partition(":")
    if kind != "cpu":
        here = torch.accelerator.current_accelerator(check_available=True)
        is_kind = here is not None and here.type == kind
        if is_kind and int(index or 0) < torch.accelerator.device_count():
            return torch.device(location)
    return torch.device("cpu")


class _Archive:
    """The records of one torch.save zip. `data` is borrowed and must outlive it."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        rows = _C.zip_records(data)
        if any(method != 0 for _, method, *_ in rows):
            why = "its records are compressed, which torch.save does not do"
            raise UnsafePickleError(f"{why}; {_WAY_OUT}")
        records = {name: (offset, nbytes) for name, _, offset, nbytes, _ in rows}
        pickles = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            refuse(f"has {len(pickles)} records '<name>/data.pkl', torch.save writes one")
        self._top = pickles[0].removesuffix("data.pkl")
        if any(not name.startswith(self._top) for name in records):
            refuse(f"has records outside of {self._top!r:.40}")
        self._records = {name.removeprefix(self._top): at for name, at in records.items()}
        byteorder = bytes(self.record("byteorder")) if "byteorder" in self._records else b"little"
        if byteorder not in (b"little", b"big"):
            refuse(f"has the byte order {byteorder!r:.40}")
        self._is_swapped = byteorder.decode() != sys.byteorder
        self._storages: dict[str, torch.UntypedStorage] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._records

    def __len__(self) -> int:
        return len(self._records)

    def record(self, name: str) -> memoryview:
        """Returns the bytes of record `name`, borrowed."""
        if name not in self._records:
            refuse(f"lacks the record {name!r:.80}")
        offset, nbytes = self._records[name]
        if offset < 0 or nbytes < 0 or offset + nbytes > len(self._data):
            refuse(f"has the record {name!r:.80} outside of its bytes")
        return self._data[offset : offset + nbytes]

    def storage(self, ref: StorageRef) -> torch.UntypedStorage:
        """Returns the storage of `ref`, read once; all views of one storage share it."""
        known: torch.UntypedStorage | None = self._storages.get(ref.key)
        if known is not None:
            return known
        held = self.record(f"data/{ref.key}")
        if ref.nbytes > len(held):
            refuse(f"has storage {ref.key!r:.40} of {ref.nbytes} B in a record of {len(held)} B")
        if ref.nbytes == 0:
            storage = torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
        else:
            borrowed = torch.frombuffer(bytearray(held[: ref.nbytes]), dtype=torch.uint8)
            storage = borrowed.clone().untyped_storage()  # torch's own alignment and allocator
        if self._is_swapped and ref.dtype is not None:
            storage.byteswap(ref.dtype)  # type: ignore[no-untyped-call]
        known = self._storages[ref.key] = storage.to(device=_device_here(ref.location))
        return known


def _refusal(why: str, path: str, fqn: str) -> UnsafePickleError:
    message = f"refuse to decode item {fqn!r} of {path!r}: {why}; {_WAY_OUT}"
    return UnsafePickleError(message, path=path, fqn=fqn)


def decode_byte_item(
    data: bytes | memoryview, *, fqn: str, path: str, safe_globals: Iterable[Any] = ()
) -> Any:
    """Returns the object that `torch.load(weights_only=False)` would; executes nothing of the item.

    Storages are on the device that they were saved from if it is here, else on the CPU.

    Args:
        data: a `torch.save` archive; read only during the call.
        fqn, path: name of the item and its file, for errors.
        safe_globals: classes and functions allowed beside `OBJECTS`, for this call only.

    Raises:
        UnsafePickleError: it asks for a global that is not allowed, or is no archive.
        CorruptionError: it is malformed, or a part is not what its class takes.
        OptionError: an entry of `safe_globals` has no name.
    """
    view = memoryview(data).cast("B")
    head = bytes(view[:8])
    if not head.startswith(b"PK\x03\x04"):
        kinds = (kind for magic, kind in _KINDS.items() if head.startswith(magic))
        kind = f"{next(kinds, 'unknown data')} of {len(view)} B beginning with {head.hex()}"
        raise _refusal(f"{kind}, not a torch.save archive", path, fqn)
    own = user_globals(safe_globals, build_user_object)
    table = {**OBJECTS, **own} if own else OBJECTS
    with malformed_is_corruption("decode", path=path, fqn=fqn), paused_gc():
        archive = _Archive(view)
        if "constants.pkl" in archive:
            raise _refusal("a TorchScript archive, which is code", path, fqn)
        held = archive.record("data.pkl")
        unpickler = RestrictedUnpickler(
            held, table, path=path, fqn=fqn, load_storage=storage_ref, storages=len(archive)
        )
        return Settler(archive.storage, len(held))(unpickler.load())


def tell_refused(data: bytes, fqn: str) -> None:
    """Logs, once for each class or item, that every load will refuse an item that is saved."""
    if len(data) > _MAX_UNWEIGHED_BYTES:
        _tell_heavy(data, fqn)
    if len(data) > _MAX_LOOKED_BYTES or all(
        tuple(map(bytes.decode, pair)) in OBJECTS for pair in _GLOBAL.findall(data)
    ):
        return
    try:  # the bytes of a text may look the same
        decode_byte_item(data, fqn=fqn, path="")
    except UnsafePickleError as error:
        name = error.global_name
        if name is not None and name not in _told:
            _told.add(name)
            logger.warning(
                "'%s' is saved with an object of '%s', which every load refuses but one with "
                "options=ReadOptions(safe_globals=[%r]): allow it there if it is safe, or save "
                "dicts, lists, numbers and texts in its place",
                fqn,
                name,
                name,
            )
    except DcpxError:  # which its load will say
        return


def _tell_heavy(data: bytes, fqn: str) -> None:
    """Logs that the objects of an item take more memory than a load gives them."""
    try:
        with malformed_is_corruption("look at", path="", fqn=fqn):
            archive = _Archive(memoryview(data))
            held = archive.record("data.pkl")
        scanned(held, path="", fqn=fqn, allow_persid=True, storages=len(archive))
    except CorruptionError as error:
        if is_heavy(error) and fqn not in _told:
            _told.add(fqn)
            logger.warning(
                "'%s' is saved with so many containers (%d B of them) that every load refuses "
                "them but one with trusted=True: save tensors, numpy arrays or texts in their "
                "place",
                fqn,
                len(data),
            )
    except DcpxError:  # which its load will say
        return


def reencode_byte_item(
    data: bytes | memoryview, *, fqn: str, path: str, safe_globals: Iterable[Any] = ()
) -> io.BytesIO:
    """As `decode_byte_item`, but returns a new archive, at its start, which a planner may get."""
    decoded = decode_byte_item(data, fqn=fqn, path=path, safe_globals=safe_globals)
    result = io.BytesIO()
    with malformed_is_corruption("save again", path=path, fqn=fqn), paused_gc():
        torch.save(decoded, result)
    result.seek(0)
    return result
