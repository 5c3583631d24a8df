"""CRC-32: every implementation that this CPU has, against zlib."""

from __future__ import annotations

import itertools
import zlib

import hypothesis
import hypothesis.strategies as st
import pytest

from torch_dcpx import _C, errors

NOISE = b"".join(zlib.crc32(bytes([i & 255, i >> 8])).to_bytes(4, "little") for i in range(16384))


@pytest.fixture(params=_C.crc32_implementations())
def implementation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_table_is_always_there_and_last_is_what_crc32_uses() -> None:
    names = _C.crc32_implementations()
    assert names[0] == "table"
    assert len(set(names)) == len(names)
    assert _C.crc32(NOISE) == _C.crc32_with(names[-1], NOISE) == zlib.crc32(NOISE)


def test_every_length_up_to_2000_equals_zlib(implementation: str) -> None:
    for nbytes in range(2000):
        piece = NOISE[:nbytes]
        assert _C.crc32_with(implementation, piece) == zlib.crc32(piece), nbytes


def test_every_alignment_equals_zlib(implementation: str) -> None:
    view = memoryview(NOISE)
    for start in range(130):
        for nbytes in (0, 1, 15, 16, 63, 64, 65, 255, 256, 257, 511, 512, 513, 4099, 40000):
            piece = view[start : start + nbytes]
            found = _C.crc32_with(implementation, piece, 0xDEADBEEF)
            assert found == zlib.crc32(piece, 0xDEADBEEF), (start, nbytes)


@hypothesis.given(data=st.binary(max_size=3000), start=st.integers(0, 2**32 - 1))
def test_any_bytes_from_any_start_equal_zlib(data: bytes, start: int) -> None:
    want = zlib.crc32(data, start)
    assert _C.crc32(data, start) == want
    for name in _C.crc32_implementations():
        assert _C.crc32_with(name, data, start) == want


@hypothesis.given(cuts=st.lists(st.integers(0, len(NOISE)), max_size=5))
def test_pieces_continue_one_another(cuts: list[int]) -> None:
    crc = 0
    borders = [0, *sorted(cuts), len(NOISE)]
    for begin, end in itertools.pairwise(borders):
        crc = _C.crc32(NOISE[begin:end], crc)
    assert crc == zlib.crc32(NOISE)


@hypothesis.given(a=st.binary(max_size=2000), b=st.binary(max_size=2000))
def test_combine_equals_crc_of_both(a: bytes, b: bytes) -> None:
    assert _C.crc32_combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


@hypothesis.given(
    a=st.integers(0, 2**32 - 1),
    b=st.integers(0, 2**32 - 1),
    c=st.integers(0, 2**32 - 1),
    b_bytes=st.integers(0, 2**62),
    c_bytes=st.integers(0, 2**62),
)
def test_combine_is_associative_for_any_length(
    a: int, b: int, c: int, b_bytes: int, c_bytes: int
) -> None:
    left = _C.crc32_combine(_C.crc32_combine(a, b, b_bytes), c, c_bytes)
    right = _C.crc32_combine(a, _C.crc32_combine(b, c, c_bytes), b_bytes + c_bytes)
    assert left == right


def test_buffers_of_every_kind_are_read_and_others_refused() -> None:
    want = zlib.crc32(NOISE)
    assert _C.crc32(bytearray(NOISE)) == _C.crc32(memoryview(NOISE)) == want
    with pytest.raises(BufferError):
        _C.crc32(memoryview(NOISE)[::2])
    with pytest.raises(TypeError):
        _C.crc32("text")


def test_missing_implementation_raises_unsupported() -> None:
    with pytest.raises(errors.UnsupportedError):
        _C.crc32_with("abacus", b"")
