"""Tensors of every dtype and layout, and their items: stock ones, ours, and damaged ones."""

from __future__ import annotations

import functools
import io
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support.engine_jobs import SLOT_BYTES, open_directory, read_job, scratch

from torch_dcpx import _C
from torch_dcpx.writer.rows import TENSOR, ItemType, WriteRow

LEGACY: dict[torch.dtype, str] = torch.storage._dtype_to_storage_type_map()
NEW: set[torch.dtype] = torch.storage._new_dtypes()
QUANTIZED = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
DTYPES = sorted((set(LEGACY) | set(NEW)) - QUANTIZED, key=str)
LAYOUTS = [
    ((), ()),
    ((0,), (1,)),
    ((3, 0, 2), (2, 2, 1)),
    ((1,), (1,)),
    ((2, 3), (3, 1)),
    ((2, 3), (1, 2)),  # transposed
    ((2, 1, 2, 3, 1), (6, 6, 3, 1, 1)),
    ((300,), (1,)),
    ((2,), (70000,)),
]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def framing_of(dtype: torch.dtype) -> tuple[str, str, str]:
    if dtype in LEGACY:
        return "torch", LEGACY[dtype], ""
    return "torch.storage", "UntypedStorage", name_of(dtype)


def strided_tensor(dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Returns a tensor that owns a whole storage of counted bytes (0 and 1 for bool)."""
    reach = 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    elems = 0 if 0 in sizes else reach
    raw = torch.arange(elems * dtype.itemsize, dtype=torch.int64)
    raw = (raw % (2 if dtype == torch.bool else 251)).to(torch.uint8)
    storage = raw.untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, 0, sizes, strides)


def payload_of(tensor: torch.Tensor) -> bytes:
    storage = tensor.untyped_storage()
    return bytes(torch.empty(0, dtype=torch.uint8).set_(storage).tolist())


def frames(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Returns the items that one save makes of tensors and all of their storages."""
    types, rows = [], []
    for number, tensor in enumerate(tensors):
        name, payload = name_of(tensor.dtype), payload_of(tensor)
        types.append(
            ItemType(*framing_of(tensor.dtype), tensor.dtype.itemsize, 0, 0, name, name, "strided")
        )
        rows.append(
            WriteRow(
                0, TENSOR, number, payload, len(payload), tensor.shape, tensor.stride(), True,
                name, tensor.shape, (0,) * tensor.dim(), None,
            )
        )  # fmt: skip
    with scratch() as directory:
        with open_directory(directory) as fd:
            job = _C.WriteJob(
                dir_fd=fd, dir_path=str(directory), workers=1, segment_bytes=SLOT_BYTES,
                use_direct=False, is_durable=False,
            )  # fmt: skip
            job.add_file(["items"], bytes(16), 0)
        places = zip(*job.write(rows, types, is_final=True), strict=True)
        data = (directory / "items").read_bytes()
    return [data[offset : offset + nbytes] for offset, nbytes in places]


def frame(tensor: torch.Tensor) -> bytes:
    return frames([tensor])[0]


class Found(NamedTuple):
    """What a load finds in an item of a plain tensor. Strides in elements."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    storage_name: str
    dtype_name: str
    is_big_endian: bool
    payload_offset: int  # from the item's start
    payload_bytes: int
    storage_offset: int  # elements


def find(item: bytes | Path) -> Found | None:
    """Returns what a load finds in an item that another writer framed.

    None: the load leaves it to torch.

    Raises:
        CorruptionError: The item contradicts itself.
    """
    if isinstance(item, bytes):
        with scratch() as directory:
            (directory / "item").write_bytes(item)
            return find(directory / "item")
    job = read_job(item.parent)
    forms, places = job.locate(
        [(item.name, False, 0, b"", 0, b"")], [(0, 0, item.stat().st_size, True)]
    )
    [(kind, sizes, strides, _, storage_name, dtype_name, is_big_endian)] = forms
    [(_, *place)] = places
    job.close()
    if kind == "torch":
        return None
    assert kind == "plain"
    return Found(sizes, strides, storage_name, dtype_name, is_big_endian, *place)


def saved(value: Any, **kwargs: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **kwargs)
    return buffer.getvalue()


def assert_same(found: torch.Tensor, want: torch.Tensor) -> None:
    assert found.dtype == want.dtype
    assert (found.shape, found.stride()) == (want.shape, want.stride())
    assert found.storage_offset() == want.storage_offset()
    assert payload_of(found) == payload_of(want)


ZEROS = bytes(64 << 20)


@functools.cache
def _crc_of_blocks(count: int) -> int:
    return _C.crc32(ZEROS, _crc_of_blocks(count - 1)) if count else 0


def crc_of_zeros(nbytes: int) -> int:
    """Returns the CRC of so many zeros, gigabytes in a fraction of a second."""
    count, rest = divmod(nbytes, len(ZEROS))
    return _C.crc32(memoryview(ZEROS)[:rest], _crc_of_blocks(count))


# Hostile items are made by rewriting a stock one with zipfile, so that everything but the one
# thing under test is right.


def rezipped(
    data: bytes,
    changes: dict[str, bytes | None] | None = None,
    compression: int = zipfile.ZIP_STORED,
    only: str | None = None,
    order: list[int] | None = None,
    folder: str = "archive",
) -> bytes:
    """Returns a torch.save item zipped anew, with records replaced (None: left out), added,
    reordered or renamed; all of them or `only` one compressed.
    """
    source = zipfile.ZipFile(io.BytesIO(data))
    records: dict[str, bytes | None] = {
        name.split("/", 1)[1]: source.read(name) for name in source.namelist()
    }
    records.update(changes or {})
    kept = [(name, content) for name, content in records.items() if content is not None]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in [kept[at] for at in order or range(len(kept))]:
            method = compression if only in (None, name) else zipfile.ZIP_STORED
            archive.writestr(f"{folder}/{name}", content, method)
    return buffer.getvalue()


def rewritten(
    changes: dict[str, bytes | None] | None = None,
    compression: int = zipfile.ZIP_STORED,
    value: torch.Tensor | None = None,
    **how: Any,
) -> bytes:
    """Returns a stock item zipped anew."""
    whole = saved(torch.arange(6.0) if value is None else value)
    return rezipped(whole, changes, compression, **how)


class SparseFile(io.RawIOBase):
    """Keeps what torch.save writes, zeros as holes."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.file = path.open("wb")
        self.zeros = bytes(1 << 20)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), len(self.zeros)):
            piece = view[begin : begin + len(self.zeros)]
            if piece == self.zeros:
                self.file.seek(len(piece), io.SEEK_CUR)
            else:
                self.file.write(piece)
        return len(view)

    def close(self) -> None:
        self.file.close()
        super().close()
