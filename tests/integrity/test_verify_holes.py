"""Footers that claim terabytes in a file of a few KiB: a finding, and no memory for them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from conftest import RunPython

import torch_dcpx as dcpx
from torch_dcpx import _C, RepairError
from torch_dcpx.metadata.file import decode_metadata, encode_metadata
from torch_dcpx.storage.names import FileEntry

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


LOADS_HOLLOW_FILES = """
import resource, sys
import torch
import torch_dcpx as dcpx
# Neither the index nor the table that a file claims fits.
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
for path in sys.argv[1:]:
    try:
        dcpx.load({"w": torch.zeros(4)}, path, no_dist=True)
        raise SystemExit(f"{path} was loaded")
    except dcpx.CorruptionError as error:
        assert "a footer with a hole" in str(error), error
        assert str(error.path).endswith("__0_0.distcp")
    peak = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    assert int(peak[0].split()[1]) >> 20 < 1024, (path, peak)
"""


def test_load_takes_no_memory_for_a_footer_of_holes(run_warm: RunPython, tmp_path: Path) -> None:
    """The tail is that of the file which the metadata names, so nothing but the hole is wrong."""
    sizes = [(0, 4 << 30), (0, TIB), (TIB, 0), (12 * TIB, 0)]
    paths = [tmp_path / f"data {data_bytes}, index {index}" for data_bytes, index in sizes]
    for path, (data_bytes, index_bytes) in zip(paths, sizes, strict=True):
        file, meta = path / "__0_0.distcp", path / ".metadata"
        dcpx.save({"w": torch.ones(4)}, path, no_dist=True)
        write_sparse(file, data_bytes, index_bytes)
        assert file.stat().st_blocks * 512 <= 64 << 10
        decoded = decode_metadata(meta.read_bytes(), str(meta))
        with file.open("rb") as raw:
            raw.seek(-4, 2)
            (crc,) = struct.unpack("<I", raw.read())
        entry = FileEntry("__0_0.distcp", bytes(16), file.stat().st_size, crc)
        meta.write_bytes(encode_metadata(decoded.metadata, [entry], decoded.save_id))
    run_warm(LOADS_HOLLOW_FILES, *map(str, paths))
