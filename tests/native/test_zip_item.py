"""Tensor items that we frame: torch and zipfile read them."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from support.zip_samples import (
    DTYPES,
    LAYOUTS,
    assert_same,
    crc_of_zeros,
    find,
    frame,
    frames,
    name_of,
    strided_tensor,
)

from torch_dcpx import _C

# torch says it once a process, wherever the first tensor of complex32 is made.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_framed_tensor_of_every_dtype_is_read_by_torch_and_zipfile(dtype: torch.dtype) -> None:
    tensors = [strided_tensor(dtype, sizes, strides) for sizes, strides in LAYOUTS]
    for tensor, item in zip(tensors, frames(tensors), strict=True):
        assert_same(torch.load(io.BytesIO(item), weights_only=True), tensor)
        with zipfile.ZipFile(io.BytesIO(item)) as archive:
            assert archive.testzip() is None
            assert [entry.compress_type for entry in archive.infolist()] == [0] * 6


# The bytes of these files are what tests/cpp/test_zip_item.cpp frames.
CORPUS = Path(__file__).resolve().parents[1] / "cpp" / "corpus" / "zip_item"


def test_padding_moves_the_payload_and_nothing_else() -> None:
    tensor = strided_tensor(torch.float32, (4, 8), (8, 1))
    plain = find(CORPUS / "pad_0.pt")
    assert plain is not None
    for pad_bytes in (0, 4, 5, 63, 64, 4096, 65000):
        item = (CORPUS / f"pad_{pad_bytes}.pt").read_bytes()
        assert find(item) == plain._replace(payload_offset=plain.payload_offset + pad_bytes)
        assert_same(torch.load(io.BytesIO(item), weights_only=True), tensor)
        with zipfile.ZipFile(io.BytesIO(item)) as archive:
            assert archive.testzip() is None


def test_records_come_in_the_documented_order_with_their_crcs() -> None:
    item = frame(strided_tensor(torch.float32, (2, 3), (3, 1)))
    rows = _C.zip_records(item)
    names = ["data.pkl", ".format_version", ".storage_alignment", "byteorder", "version", "data/0"]
    assert [row[0] for row in rows] == [f"archive/{name}" for name in names]
    for _, method, offset, nbytes, crc in rows:
        assert method == 0
        assert crc == zlib.crc32(item[offset : offset + nbytes])
    contents = [item[offset : offset + nbytes] for _, _, offset, nbytes, _ in rows[1:5]]
    assert contents == [b"1", b"64", b"little", b"3\n"]


def test_crc_of_zeros_equals_zlib() -> None:
    for nbytes in (0, 1, 63, 4096, 100_003):
        assert crc_of_zeros(nbytes) == zlib.crc32(bytes(nbytes))


@pytest.mark.parametrize("distance", [-1200, -1152, -64, -2, -1, 0, 1, 64])
def test_items_around_4_gib_are_read_by_everyone(distance: int, tmp_path: Path) -> None:
    nbytes = 2**32 + distance
    crc = crc_of_zeros(nbytes)
    frame = (CORPUS / f"{nbytes}_bytes").read_bytes()
    head_bytes = frame.index(b"PK\x07\x08")  # the descriptor behind the payload
    path = tmp_path / "item"
    with path.open("wb") as file:
        file.write(frame[:head_bytes])
        file.seek(nbytes, io.SEEK_CUR)  # a hole: the payload takes no space
        file.write(frame[head_bytes:])

    with zipfile.ZipFile(path) as archive:
        entry = archive.infolist()[-1]
        assert (entry.filename, entry.file_size, entry.CRC) == ("archive/data/0", nbytes, crc)
        assert archive.read("archive/data.pkl").endswith(b".")
    tensor = torch.load(path, mmap=True, weights_only=True)
    assert (tensor.shape, tensor.dtype) == ((nbytes,), torch.uint8)
    assert int(tensor[-1]) == 0
    found = find(path)
    assert found is not None
    assert (found.payload_offset, found.payload_bytes) == (head_bytes, nbytes)
    assert found.sizes == (nbytes,)


def test_items_are_read_with_calculated_storage_offsets() -> None:
    from torch.utils.serialization import config

    tensor = strided_tensor(torch.float32, (4, 8), (8, 1))
    with config.patch({"load.calculate_storage_offsets": True}):
        found = torch.load(CORPUS / "pad_64.pt", weights_only=True)
    assert_same(found, tensor)
