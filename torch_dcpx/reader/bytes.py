"""Items whose bytes are read whole: Python objects, and tensors that only torch's loader knows.

Stock's planner takes a byte item as a stream, runs `torch.load` on it, and puts the object into the
state. Where that hook is stock's, objects decoded here go there directly: to pack one anew for
stock to load would cost 100 us an item. Plain numbers and texts that torch-dcpx wrote are decoded
in C++, all of a window in one call.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from torch_dcpx._hooks import has_stock_hooks
from torch_dcpx._native import _C
from torch_dcpx.errors import CorruptionError
from torch_dcpx.options import ReadOptions
from torch_dcpx.reader.elements import StateKeys
from torch_dcpx.unpickle.byte_items import decode_byte_item, reencode_byte_item
from torch_dcpx.unpickle.torch_items import fill_target, load_by_torch
from torch_dcpx.unpickle.unpickler import MAX_MESSAGE

# A load decodes these once for all items of the same bytes, as they cannot change. Two items must
# not share a list or a tensor.
_IMMUTABLE = frozenset(
    (int, float, bool, type(None), str, bytes, complex, torch.Size, torch.dtype, torch.device)
)
_MAX_CACHED_BYTES = 4096  # of an item
_MAX_CACHED = 10_000  # items


class BytesRead(NamedTuple):
    """A read under way of an item whose bytes torch or the planner must understand."""

    item: ReadItem
    data: bytearray
    path: str
    descriptors: Sequence[str]
    is_foreign: bool  # in a file of stock's


class BytesFinisher:
    """Hands items that were read to torch or the planner. One per load."""

    def __init__(
        self,
        planner: LoadPlanner,
        transforms: Any,
        options: ReadOptions,
        check_dtype: Callable[[ReadItem, torch.dtype, str], None],
    ) -> None:
        self._check_dtype = check_dtype  # raises if a tensor may not have the dtype
        self._planner = planner
        self._transforms = transforms
        self._options = options
        self._takes_objects = has_stock_hooks(planner, ("load_bytes",))
        self._decoded: dict[bytes, Any] = {}
        self._keys = StateKeys()

    def plain_values(self, reads: Sequence[BytesRead]) -> list[Any]:
        """Returns the numbers, truths, texts and None of torch-dcpx; for others NotImplemented."""
        return _C.plain_values([b"" if read.descriptors else read.data for read in reads])

    def finish(self, read: BytesRead, plain: Any) -> None:
        """Hands one item over; `plain` is its element of `plain_values`.

        Raises: CorruptionError, UnsafePickleError: the item cannot or must not be decoded.
        """
        item = read.item
        data = _undo_extensions(read, self._transforms) if read.descriptors else read.data
        if item.type != LoadItemType.BYTE_IO:
            tensor = load_by_torch(io.BytesIO(data), read.path, item, self._planner, self._options)
            if read.is_foreign:
                self._check_dtype(item, tensor.dtype, read.path)
            fill_target(tensor, item, self._planner)
        elif plain is not NotImplemented and self._takes_objects:
            self._put(item, plain)
        elif plain is not NotImplemented or self._options.trusted:
            self._planner.load_bytes(item, io.BytesIO(data))
        elif self._takes_objects:
            self._put(item, self._decode(read, data))
        else:
            stream = reencode_byte_item(memoryview(data), **self._about(read))
            self._planner.load_bytes(item, stream)

    def _decode(self, read: BytesRead, data: bytes | bytearray) -> Any:
        """Decodes an item; equal bytes of an immutable value once."""
        key = bytes(data) if len(data) <= _MAX_CACHED_BYTES else b""
        if key and key in self._decoded:
            return self._decoded[key]
        value = decode_byte_item(memoryview(data), **self._about(read))
        if key and type(value) in _IMMUTABLE and len(self._decoded) < _MAX_CACHED:
            self._decoded[key] = value
        return value

    def _put(self, item: ReadItem, value: object) -> None:
        """Puts an object into the state, as `load_bytes` of `DcpxLoadPlanner` does."""
        fqn, planner = item.dest_index.fqn, cast(DefaultLoadPlanner, self._planner)
        if planner.flatten_state_dict:
            self._keys.put(planner.original_state_dict, planner.mappings[fqn], value)
        else:
            planner.state_dict[fqn] = value

    def _about(self, read: BytesRead) -> dict[str, Any]:
        fqn, safe_globals = read.item.storage_index.fqn, self._options.safe_globals
        return {"fqn": fqn, "path": read.path, "safe_globals": safe_globals}


def _undo_extensions(read: BytesRead, transforms: Any) -> bytes:
    """Returns the item as it was before the writer's stream extensions changed it.

    Raises: CorruptionError: an extension cannot read the item. Stock's registry raises errors of
        its own for an extension that it lacks.
    """
    stream = transforms.transform_load_stream(read.item, read.descriptors, io.BytesIO(read.data))
    try:
        data: bytes = stream.read(-1)
    except Exception as error:
        fqn = read.item.storage_index.fqn
        cause = f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
        raise CorruptionError(
            f"undo {list(read.descriptors)} of item '{fqn}' of '{read.path}': {cause}",
            fqn=fqn,
            path=read.path,
        ) from error
    return data
