"""Tensors of every dtype and layout, and their items: stock ones, ours, and damaged ones."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from torch_dcpx import _C

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


def frame(tensor: torch.Tensor, pad_bytes: int = 0) -> bytes:
    payload = payload_of(tensor)
    head, tail = _C.zip_frame(
        *framing_of(tensor.dtype),
        list(tensor.shape),
        list(tensor.stride()),
        tensor.dtype.itemsize,
        len(payload),
        pad_bytes,
        zlib.crc32(payload),
    )
    return bytes(head + payload + tail)


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def assert_same(found: torch.Tensor, want: torch.Tensor) -> None:
    assert found.dtype == want.dtype
    assert (found.shape, found.stride()) == (want.shape, want.stride())
    assert found.storage_offset() == want.storage_offset()
    assert payload_of(found) == payload_of(want)


def crc_of_zeros(nbytes: int) -> int:
    crc, block, block_bytes = 0, zlib.crc32(b"\0"), 1
    while nbytes:
        if nbytes & 1:
            crc = _C.crc32_combine(crc, block, block_bytes)
        block = _C.crc32_combine(block, block, block_bytes)
        block_bytes *= 2
        nbytes >>= 1
    return crc


# Hostile items are made by rewriting a stock one with zipfile, so that everything but the one
# thing under test is right.


def rewritten(
    changes: dict[str, bytes | None] | None = None,
    compression: int = zipfile.ZIP_STORED,
    order: list[int] | None = None,
    folder: str = "archive",
    value: torch.Tensor | None = None,
) -> bytes:
    """Returns a stock item with records replaced (None: left out), reordered or renamed."""
    source = zipfile.ZipFile(io.BytesIO(saved(torch.arange(6.0) if value is None else value)))
    records = {name.split("/", 1)[1]: source.read(name) for name in source.namelist()}
    records.update({k: v for k, v in (changes or {}).items() if v is not None})
    for name in [k for k, v in (changes or {}).items() if v is None]:
        del records[name]
    names = list(records)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for index in order or range(len(names)):
            archive.writestr(f"{folder}/{names[index]}", records[names[index]])
    return buffer.getvalue()


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
