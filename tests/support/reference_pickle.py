"""What `csrc/format/metadata_pickle` writes, once more in Python and from the objects themselves.

The bytes in a `.metadata` are to depend neither on torch nor on Python, and not to change from one
release to the next: this is the reference that the C++ is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_dcpx.metadata.stock_classes import MEMORY_FORMATS

_T = TypeVar("_T")

_BATCH = 1000  # objects between two marks, as pickle does it: bounds the unpickler's stack
_TUPLE_OF = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}  # EMPTY_TUPLE, TUPLE1, TUPLE2, TUPLE3
_BOOL = {True: b"\x88", False: b"\x89"}


class _Opcodes:
    """The opcodes so far. A method appends one object; what may come again is memoized.

    A memo's number is the count of MEMOIZE before it: objects are put in the order of the pickle.
    """

    def __init__(self) -> None:
        self.parts = [b"\x80\x04"]  # protocol 4: stock's default up to Python 3.13
        self.put = self.parts.append
        self._gets: dict[object, bytes] = {}  # what is in the memo -> opcode that fetches it
        self._size_gets: dict[tuple[int, ...], bytes] = {}  # the same for torch.Size

    def _memoize(self) -> bytes:
        """Puts the object just appended into the memo; returns the opcode that fetches it."""
        number = len(self._gets) + len(self._size_gets)
        self.put(b"\x94")
        return b"h" + bytes((number,)) if number < 256 else b"j" + number.to_bytes(4, "little")

    def text(self, value: str | None) -> None:
        """A string, or None."""
        found = self._gets.get(value)
        if found is not None:
            self.put(found)
        elif value is None:
            self.put(b"N")
        else:
            data = value.encode("utf-8", "surrogatepass")
            is_short = len(data) < 256
            self.put(b"\x8c" if is_short else b"\x8d")
            self.put(len(data).to_bytes(1 if is_short else 8, "little"))
            self.put(data)
            self._gets[value] = self._memoize()

    def integer(self, value: int) -> None:
        """An integer in its shortest form."""
        if 0 <= value < 1 << 8:
            self.put(b"K" + value.to_bytes(1, "little"))
        elif 0 <= value < 1 << 16:
            self.put(b"M" + value.to_bytes(2, "little"))
        elif -1 << 31 <= value < 1 << 31:
            self.put(b"J" + value.to_bytes(4, "little", signed=True))
        else:
            nbytes = (value.bit_length() >> 3) + 1
            self.put(b"\x8a" + bytes((nbytes,)) + value.to_bytes(nbytes, "little", signed=True))

    def name(self, module: str, name: str) -> None:
        """A global, by its module and name."""
        found = self._gets.get((module, name))
        if found is not None:
            self.put(found)
        else:
            self.text(module)
            self.text(name)
            self.put(b"\x93")
            self._gets[module, name] = self._memoize()

    def call(self, key: object, module: str, name: str, arg: Callable[[], None]) -> None:
        """What `module.name(arg)` gives, made once for each `key`."""
        found = self._gets.get(key)
        if found is not None:
            self.put(found)
        else:
            self.name(module, name)
            arg()
            self.put(b"\x85R")
            self._gets[key] = self._memoize()

    def row(self, values: Sequence[_T], put_one: Callable[[_T], None]) -> None:
        """A tuple of objects that `put_one` appends."""
        code = _TUPLE_OF.get(len(values))
        if code is None:
            self.put(b"(")
        for value in values:
            put_one(value)
        self.put(code or b"t")

    def size(self, value: tuple[int, ...]) -> None:
        """A torch.Size."""
        found = self._size_gets.get(value)
        if found is not None:
            self.put(found)
        else:
            self.name("torch", "Size")
            self.row(value, self.integer)
            self.put(b"\x85R")
            self._size_gets[value] = self._memoize()

    def batches(self, values: Iterable[_T], put_one: Callable[[_T], None], end: bytes) -> None:
        """Objects for the list (`end` is APPENDS) or dict (SETITEMS) on the stack."""
        rest = iter(values)
        while batch := list(islice(rest, _BATCH)):
            self.put(b"(")
            for value in batch:
                put_one(value)
            self.put(end)

    def items(self, values: Iterable[_T], put_one: Callable[[_T], None]) -> None:
        """A list of objects that `put_one` appends."""
        self.put(b"]")
        self.batches(values, put_one, b"e")

    def new(self, cls: type) -> None:
        """An object of one of stock's classes, without attributes yet."""
        self.name(cls.__module__, cls.__qualname__)
        self.put(b")\x81")

    def head(self, cls: type, attribute: str) -> None:
        """An object of `cls` up to the value of its first attribute."""
        self.new(cls)
        self.put(b"}(")
        self.text(attribute)


class _StockPickle(_Opcodes):
    """The objects of a Metadata, attribute by attribute: `}(` key value ... `ub` sets them."""

    def metadata(self, metadata: Metadata, storage_meta: StorageMeta | None) -> None:
        self.head(Metadata, "state_dict_metadata")
        self.put(b"}")
        self.batches(metadata.state_dict_metadata.items(), self.entry, b"u")
        self.text("planner_data")
        if metadata.planner_data is None:
            self.put(b"N")
        else:
            self.put(b"}")
            self.batches(metadata.planner_data.items(), self.object_path, b"u")
        self.text("storage_data")
        self.put(b"}")
        self.batches(metadata.storage_data.items(), self.place, b"u")
        self.text("storage_meta")
        if storage_meta is None:
            self.put(b"N")
        else:
            self.storage_meta(storage_meta)
        self.text("version")
        self.text(metadata.version)
        self.put(b"ub.")

    def entry(self, item: tuple[str, Any]) -> None:
        fqn, entry = item
        self.text(fqn)
        if type(entry) is BytesStorageMetadata:
            self.new(BytesStorageMetadata)
            return
        self.head(TensorStorageMetadata, "properties")
        self.properties(entry.properties)
        self.text("size")
        self.size(entry.size)
        self.text("chunks")
        self.items(entry.chunks, self.chunk)
        self.put(b"ub")

    def properties(self, properties: TensorProperties) -> None:
        """The five fields that every torch reads."""
        self.new(TensorProperties)
        self.put(b"(")
        self.name("torch", str(properties.dtype).removeprefix("torch."))
        text = str(properties.layout)
        layout = ("layout", properties.layout)
        self.call(layout, "torch.serialization", "_get_layout", lambda: self.text(text))
        self.put(_BOOL[properties.requires_grad])
        enum, code = _MEM_FORMAT_ENCODING, MEMORY_FORMATS.index(properties.memory_format)
        self.call((enum, code), enum.__module__, enum.__qualname__, lambda: self.integer(code))
        self.put(_BOOL[properties.pin_memory])
        self.put(b"tb")

    def chunk(self, chunk: ChunkStorageMetadata) -> None:
        self.head(ChunkStorageMetadata, "offsets")
        self.size(chunk.offsets)
        self.text("sizes")
        self.size(chunk.sizes)
        self.put(b"ub")

    def object_path(self, item: tuple[str, tuple[str | int, ...]]) -> None:
        fqn, path = item
        self.text(fqn)
        self.row(path, self.key)

    def key(self, key: str | int) -> None:
        found = self._gets.get(key)
        if found is not None:
            self.put(found)
        elif isinstance(key, str):
            self.text(key)
        else:
            self.integer(key)

    def place(self, item: tuple[MetadataIndex, _StorageInfo]) -> None:
        index, place = item
        self.head(MetadataIndex, "fqn")
        self.text(index.fqn)
        self.text("index")
        if index.index is None:
            self.put(b"N")
        else:
            self.integer(index.index)
        if index.offset is not None:
            self.text("offset")
            self.size(index.offset)
        self.put(b"ub")
        self.head(_StorageInfo, "relative_path")
        self.text(place.relative_path)
        self.text("offset")
        self.integer(place.offset)
        self.text("length")
        self.integer(place.length)
        descriptors = place.transform_descriptors
        if descriptors is not None:
            self.text("transform_descriptors")
            self.items(descriptors, self.text)
        self.put(b"ub")

    def storage_meta(self, meta: StorageMeta) -> None:
        self.new(StorageMeta)
        self.put(b"}(")
        for name in ("checkpoint_id", "save_id", "load_id"):
            self.text(name)
            self.text(getattr(meta, name))
        self.text("modules")
        self.items(meta.modules, self.text)
        self.put(b"ub")


def reference_pickle(metadata: Metadata, storage_meta: StorageMeta | None) -> bytes:
    """Pickles a Metadata that holds nothing but stock's classes.

    Args:
        metadata: with planner_data None or a flatten mapping; its storage_meta is not looked at.
        storage_meta: what to write in its place.
    """
    opcodes = _StockPickle()
    opcodes.metadata(metadata, storage_meta)
    return b"".join(opcodes.parts)
