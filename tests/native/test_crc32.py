"""CRC-32 by the fastest implementation, against zlib; tests/cpp has each implementation."""

from __future__ import annotations

import itertools
import zlib
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from torch_dcpx import _C

NOISE = b"".join(zlib.crc32(bytes([i & 255, i >> 8])).to_bytes(4, "little") for i in range(16384))


def test_table_is_always_there() -> None:
    names = _C.crc32_implementations()
    assert names[0] == "table"
    assert len(set(names)) == len(names)
    assert _C.crc32(NOISE) == zlib.crc32(NOISE)


# By the words of /proc/cpuinfo that each of them needs.
NEEDS = {
    "pclmul": {"pclmulqdq", "sse4_1"},
    "vpclmul": {"pclmulqdq", "sse4_1", "avx512f", "vpclmulqdq"},
    "armv8": {"crc32"},
}


def test_what_the_processor_has_is_used_whatever_compiled_the_module() -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    words = {
        word for line in lines if line[:8] in ("flags\t\t:", "Features") for word in line.split()
    }
    has = [name for name in NEEDS if words >= NEEDS[name]]
    assert _C.crc32_implementations()[1:] == has


def test_every_length_up_to_2000_equals_zlib() -> None:
    for nbytes in range(2000):
        piece = NOISE[:nbytes]
        assert _C.crc32(piece) == zlib.crc32(piece), nbytes


def test_every_alignment_equals_zlib() -> None:
    view = memoryview(NOISE)
    for start in range(130):
        for nbytes in (0, 1, 15, 16, 63, 64, 65, 255, 256, 257, 511, 512, 513, 4099, 40000):
            piece = view[start : start + nbytes]
            found = _C.crc32(piece, 0xDEADBEEF)
            assert found == zlib.crc32(piece, 0xDEADBEEF), (start, nbytes)


@hypothesis.given(data=st.binary(max_size=3000), start=st.integers(0, 2**32 - 1))
def test_any_bytes_from_any_start_equal_zlib(data: bytes, start: int) -> None:
    assert _C.crc32(data, start) == zlib.crc32(data, start)


@hypothesis.given(cuts=st.lists(st.integers(0, len(NOISE)), max_size=5))
def test_pieces_continue_one_another(cuts: list[int]) -> None:
    crc = 0
    borders = [0, *sorted(cuts), len(NOISE)]
    for begin, end in itertools.pairwise(borders):
        crc = _C.crc32(NOISE[begin:end], crc)
    assert crc == zlib.crc32(NOISE)


def test_buffers_of_every_kind_are_read_and_others_refused() -> None:
    want = zlib.crc32(NOISE)
    assert _C.crc32(bytearray(NOISE)) == _C.crc32(memoryview(NOISE)) == want
    with pytest.raises(BufferError):
        _C.crc32(memoryview(NOISE)[::2])
    with pytest.raises(TypeError):
        _C.crc32("text")
