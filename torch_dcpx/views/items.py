"""The items of a checkpoint, each made of the metadata when somebody asks for it: there may be
100,000.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from torch_dcpx._text import human_bytes


@dataclass(frozen=True)
class Part:
    """A stored piece of a tensor, or a Python object.

    Attributes:
        offsets, sizes: elements, in the tensor.
        file, offset: where it lies; bytes, in the file.
        nbytes: stored, framing included.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Item:
    """One name of a checkpoint.

    Attributes:
        fqn: its name.
        kind: "tensor" or "object".
        dtype, shape: of the whole tensor; None of an object.
        nbytes: stored, framing included.
        parts: the stored pieces.
    """

    fqn: str
    kind: str
    dtype: str | None
    shape: tuple[int, ...] | None
    nbytes: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class FileSize:
    """Bytes of one data file.

    Attributes:
        found: None: there is no such regular file.
        wanted: as the metadata says.
        is_exact: else a file may be longer: stock's metadata has no sizes of files.
    """

    found: int | None
    wanted: int
    is_exact: bool

    @property
    def is_right(self) -> bool:
        """Whether the file can hold what was written."""
        return self.found is not None and (
            self.found == self.wanted if self.is_exact else self.found >= self.wanted
        )


class Items(Sequence[Item]):
    """The items of some names, each made now."""

    def __init__(self, metadata: Metadata, fqns: Sequence[str]) -> None:
        self._metadata = metadata
        self._fqns = fqns

    def __len__(self) -> int:
        return len(self._fqns)

    @overload
    def __getitem__(self, at: int) -> Item: ...
    @overload
    def __getitem__(self, at: slice) -> Items: ...
    def __getitem__(self, at: int | slice) -> Item | Items:
        if isinstance(at, slice):
            return Items(self._metadata, self._fqns[at])
        return _item(self._metadata, self._fqns[at])

    def __iter__(self) -> Iterator[Item]:
        return (_item(self._metadata, fqn) for fqn in self._fqns)


class Rows(Sequence[Any]):
    """The rows of a table, each made of an item now."""

    def __init__(self, items: Items) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, at: int) -> Any: ...
    @overload
    def __getitem__(self, at: slice) -> Rows: ...
    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            return Rows(self._items[at])
        item = self._items[at]
        shape = "" if item.shape is None else list(item.shape)
        return item.dtype or "object", shape, len(item.parts), human_bytes(item.nbytes), item.fqn


def name_of(dtype: torch.dtype) -> str:
    """Returns "float32" of torch.float32."""
    return str(dtype).removeprefix("torch.")


def _item(metadata: Metadata, fqn: str) -> Item:
    entry = metadata.state_dict_metadata[fqn]
    if not isinstance(entry, TensorStorageMetadata):
        whole = _part(metadata, MetadataIndex(fqn), ())
        return Item(fqn, "object", None, None, whole.nbytes, (whole,))
    parts = tuple(
        _part(metadata, MetadataIndex(fqn, chunk.offsets, at), chunk.sizes)
        for at, chunk in enumerate(entry.chunks)
    )
    nbytes = sum(part.nbytes for part in parts)
    return Item(fqn, "tensor", name_of(entry.properties.dtype), tuple(entry.size), nbytes, parts)


def _part(metadata: Metadata, index: MetadataIndex, sizes: Sequence[int]) -> Part:
    place = (metadata.storage_data or {}).get(index)
    where = ("", 0, 0) if place is None else (place.relative_path, place.offset, place.length)
    return Part(tuple(index.offset or ()), tuple(sizes), *where)
