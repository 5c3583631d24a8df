"""Footers that claim terabytes in a file of a few KiB: a finding, and no memory for them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

import torch_dcpx as dcpx
from torch_dcpx import _C, RepairError

BLOCK, PAGE, TIB = 64 << 10, 4096, 1 << 40


def up(value: int, to: int) -> int:
    return -(-value // to) * to


def write_sparse(path: Path, data_bytes: int, index_bytes: int) -> None:
    """Writes nothing but a tail whose sizes agree with each other and with the file's."""
    blocks = -(-data_bytes // BLOCK)
    index_at = up(data_bytes, PAGE)
    table_at = index_at + up(index_bytes, 64)
    nbytes = up(table_at + 4 * blocks + 4 * -(-blocks // 1024) + 128, PAGE)
    numbers = (nbytes, data_bytes, index_at, index_bytes, 0, table_at, blocks)
    tail = struct.pack("<8sII16s7QIII", b"DCPXDATA", 1, 0, bytes(16), *numbers, BLOCK, 0, 0)
    tail = tail.ljust(124, b"\0")
    with path.open("wb") as file:
        file.truncate(nbytes - 128)
        file.seek(nbytes - 128)
        file.write(tail + struct.pack("<I", _C.crc32(tail)))


@pytest.mark.parametrize(("data_bytes", "index_bytes"), [(0, 3 * TIB), (12 * TIB, 0)])
def test_footer_of_holes_is_a_finding(tmp_path: Path, data_bytes: int, index_bytes: int) -> None:
    write_sparse(tmp_path / "__0_0.distcp", data_bytes, index_bytes)
    report = dcpx.verify(tmp_path)
    (fault,) = [one for one in report.faults if one.file == "__0_0.distcp"]
    assert fault.kind == "tail" and "hole" in fault.message
    with pytest.raises(RepairError, match="hole"):
        dcpx.repair(tmp_path)
