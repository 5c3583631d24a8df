"""Tensor items that torch framed: we find the payload, and refuse what contradicts itself."""

from __future__ import annotations

import io
import mmap
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from support.zip_samples import (
    DTYPES,
    LAYOUTS,
    SparseFile,
    crc_of_zeros,
    find,
    frame,
    framing_of,
    name_of,
    payload_of,
    rewritten,
    saved,
    strided_tensor,
)

from torch_dcpx import _C, errors

# torch says it once a process, wherever the first tensor of complex32 is made.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


def sizes_of(item: bytes) -> tuple[int, ...]:
    found = find(item)
    assert found is not None
    return found.sizes


def is_taken(item: bytes) -> bool:
    """Whether an item is not refused as one that contradicts itself."""
    try:
        find(item)
    except errors.CorruptionError:
        return False
    return True


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_stock_item_of_every_dtype_is_parsed(dtype: torch.dtype) -> None:
    for sizes, strides in LAYOUTS:
        tensor = strided_tensor(dtype, sizes, strides)
        item = saved(tensor)
        found = find(item)
        assert found is not None
        begin = found.payload_offset
        payload = payload_of(tensor)
        assert item[begin : begin + found.payload_bytes] == payload
        assert (found.sizes, found.strides) == (tensor.shape, tensor.stride())
        assert (found.storage_name, found.dtype_name) == framing_of(dtype)[1:]
        assert found.storage_offset == 0
        assert not found.is_big_endian
        crcs = [crc for _, _, offset, _, crc in _C.zip_records(item) if offset == begin]
        assert crcs == [zlib.crc32(payload)]
        # Our own framing of the same tensor says the same.
        ours = find(frame(tensor))
        assert ours is not None
        assert ours._replace(payload_offset=begin) == found


def test_stock_view_of_a_larger_storage_is_parsed_with_its_offset() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    found = find(saved(whole[1:3, 2:4]))
    assert found is not None
    assert (found.storage_offset, found.payload_bytes) == (8, 24 * 4)
    assert (found.sizes, found.strides) == ((2, 2), (6, 1))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_stock_item_of_every_pickle_protocol_is_parsed(protocol: int) -> None:
    buffer = io.BytesIO()
    torch.save(torch.arange(5.0), buffer, pickle_protocol=protocol)
    assert sizes_of(buffer.getvalue()) == (5,)


def test_stock_item_without_crcs_is_parsed() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        item = saved(torch.arange(5.0))
    finally:
        torch.serialization.set_crc32_options(True)
    assert {crc for *_, crc in _C.zip_records(item)} == {0}
    assert sizes_of(item) == (5,)


def other_objects() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantization is deprecated in newer torch
        quantized = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
    tagged = torch.ones(2)
    tagged.colour = "red"  # type: ignore[attr-defined]
    return {
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "quantized": quantized,
        "sparse": torch.eye(2).to_sparse(),
        "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
        "negative": torch.ones(2, dtype=torch.complex64).conj().imag,
        "attributes": tagged,
        "dict": {"weight": torch.ones(2)},
        "two tensors": [torch.ones(2), torch.zeros(2)],
        "number": 7,
        "dtype": torch.float32,
    }


def test_other_objects_are_left_to_torch() -> None:
    found = {name: find(saved(value)) for name, value in other_objects().items()}
    assert found == dict.fromkeys(found)


def test_records_may_come_in_any_order_and_under_any_folder() -> None:
    for order in ([6, 5, 4, 3, 2, 1, 0], [4, 0, 1, 2, 3, 5, 6]):
        assert sizes_of(rewritten(order=order, folder="x")) == (6,)


def test_small_records_other_than_the_pickle_may_be_missing() -> None:
    names = [".format_version", ".storage_alignment", ".data/serialization_id", "byteorder"]
    found = find(rewritten(dict.fromkeys(names)))
    assert found is not None
    assert not found.is_big_endian


def test_byte_order_is_reported() -> None:
    found = find(rewritten({"byteorder": b"big"}))
    assert found is not None
    assert found.is_big_endian
    with pytest.raises(errors.CorruptionError):
        find(rewritten({"byteorder": b"middle"}))


def stock_pickle(**tokens: bytes) -> bytes:
    """Returns the pickle of a float32 [2, 3] with pieces replaced."""
    parts: dict[str, bytes] = {
        "storage": b"ctorch\nFloatStorage\n",
        "key": b"X\x01\x00\x00\x000",
        "numel": b"K\x06",
        "offset": b"K\x00",
        "sizes": b"K\x02K\x03\x86",
        "strides": b"K\x03K\x01\x86",
        "grad": b"\x89",
    }
    parts.update(tokens)
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storage"
        + parts["storage"]
        + parts["key"]
        + b"X\x03\x00\x00\x00cpu"
        + parts["numel"]
        + b"tQ"
        + parts["offset"]
        + parts["sizes"]
        + parts["strides"]
        + parts["grad"]
        + b"ccollections\nOrderedDict\n)RtR."
    )


def test_the_handmade_pickle_is_a_plain_tensor() -> None:
    assert sizes_of(rewritten({"data.pkl": stock_pickle()})) == (2, 3)
    with_grad = stock_pickle(grad=b"\x88")
    assert sizes_of(rewritten({"data.pkl": with_grad})) == (2, 3)


HUGE = b"\x8a\x08" + (2**62).to_bytes(8, "little")


CONTRADICTIONS: list[dict[str, bytes]] = [
    {"sizes": b"K\x02K\x04\x86"},
    {"strides": b"K\x04K\x01\x86"},
    {"offset": b"K\x01"},
    {"offset": b"J\xff\xff\xff\xff"},
    {"sizes": b"J\xff\xff\xff\xffK\x03\x86"},
    {"strides": b"J\xff\xff\xff\xffK\x01\x86"},
    {"sizes": HUGE + HUGE + b"\x86"},
    {"sizes": HUGE + HUGE + b"\x86", "strides": b"K\x00K\x00\x86"},
    {"strides": HUGE + HUGE + b"\x86"},
    {"numel": b"K\x05"},
    {"numel": b"K\x07"},
    {"numel": HUGE},
    {"numel": b"J\xff\xff\xff\xff"},
    {"key": b"X\x01\x00\x00\x001"},
    {"storage": b"ctorch\nDoubleStorage\n"},
]


def test_tensor_that_contradicts_its_storage_raises_corruption() -> None:
    items = [rewritten({"data.pkl": stock_pickle(**tokens)}) for tokens in CONTRADICTIONS]
    taken = [tokens for tokens, item in zip(CONTRADICTIONS, items, strict=True) if is_taken(item)]
    assert taken == []


OTHER_PICKLES = [
    b"",
    b".",
    b"N.",
    b"cos\nsystem\n(X\x02\x00\x00\x00lstR.",
    stock_pickle(storage=b"ctorch\nQInt8Storage\n"),
    stock_pickle(storage=b"ctorch\nFutureStorage\n"),
    stock_pickle() + b"x",
    stock_pickle(sizes=b"h\x00"),
    stock_pickle(sizes=b"K\x02K\x03\x86r\xff\xff\xff\xff"),
    stock_pickle(sizes=b"K\x06\x85"),
    b"(" * 10000,
    b"N" * 10000,
]


def test_any_other_pickle_is_left_to_torch() -> None:
    for pickle in OTHER_PICKLES:
        assert find(rewritten({"data.pkl": pickle})) is None, pickle[:100]


def test_pickle_of_more_than_a_mebibyte_is_left_to_torch() -> None:
    few = rewritten({"data.pkl": b"\x80\x02" * 1000 + stock_pickle()})
    assert sizes_of(few) == (2, 3)
    many = rewritten({"data.pkl": b"\x80\x02" * (1 << 19) + stock_pickle()})
    assert find(many) is None


def test_compressed_records_are_left_to_torch_and_are_listed() -> None:
    item = rewritten(compression=zipfile.ZIP_DEFLATED, value=torch.zeros(1000))
    assert find(item) is None
    assert {row[1] for row in _C.zip_records(item)} == {8}


def test_item_of_the_format_before_zips_is_left_to_torch() -> None:
    buffer = io.BytesIO()
    torch.save(torch.zeros(2000), buffer, _use_new_zipfile_serialization=False)
    legacy = buffer.getvalue()
    assert find(legacy) is None
    assert find(legacy[:15]) is None
    for other in (legacy[:14], b"x" + legacy, legacy[:4] + b"x" + legacy[5:]):
        with pytest.raises(errors.CorruptionError):
            find(other)


def test_missing_payload_or_pickle_raises_corruption() -> None:
    for name in ("data.pkl", "data/0"):
        with pytest.raises(errors.CorruptionError):
            find(rewritten({name: None}))


def test_duplicate_names_raise_corruption() -> None:
    buffer = io.BytesIO(rewritten())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile warns of what this test wants
        with zipfile.ZipFile(buffer, "a") as archive:
            archive.writestr("archive/data/0", bytes(24))
    with pytest.raises(errors.CorruptionError, match="twice"):
        find(buffer.getvalue())


def patched(item: bytes, signature: bytes, index: int, at: int, new: bytes) -> bytes:
    """Returns `item` with `new` written `at` bytes behind the `index`th `signature`."""
    position = -1
    for _ in range(index + 1):
        position = item.index(signature, position + 1)
    return item[: position + at] + new + item[position + at + len(new) :]


CENTRAL, LOCAL, END, DESCRIPTOR = b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08"


PATCHES = [  # of an item: signature, which of them, bytes behind it, what is written there
    (CENTRAL, 5, 8, b"\x09"),  # encrypted
    (CENTRAL, 5, 20, b"\x19"),  # one byte longer than the plain size
    (CENTRAL, 5, 20, b"\x19\0\0\0\x19\0\0\0"),  # into the descriptor
    (CENTRAL, 5, 20, b"\xfe\xff\xff\x7f" * 2),  # out of the item
    (CENTRAL, 5, 20, b"\xff\xff\xff\xff" * 2),  # zip64 without its field
    (CENTRAL, 5, 34, b"\x01"),  # on another disk
    (CENTRAL, 5, 42, b"\x00\x00\x00\x00"),  # local header of another record
    (CENTRAL, 5, 42, b"\xff\xff\xff\x7f"),  # local header out of the item
    (CENTRAL, 0, 42, b"\x01"),  # no local header there
    (CENTRAL, 0, 28, b"\xff\xff"),  # name beyond the directory
    (CENTRAL, 0, 0, b"PK\x01\x03"),
    (LOCAL, 0, 18, b"\xff"),  # sizes differ
    (LOCAL, 0, 14, b"\0\0\0\0"),  # CRC differs, and no descriptor to hold it
    (LOCAL, 5, 6, b"\x00"),  # descriptor flag differs
    (LOCAL, 5, 8, b"\x08"),  # method differs
    (LOCAL, 5, 30, b"A"),  # name differs
    (LOCAL, 5, 28, b"\xff\xff"),  # extra field beyond the directory
    (DESCRIPTOR, 0, 4, b"\0\0\0\0"),  # CRC differs
    (DESCRIPTOR, 0, 8, b"\x17"),  # size differs
    (END, 0, 4, b"\x01"),  # several disks
    (END, 0, 8, b"\x07\0\x07\0"),  # more entries than there are
    (END, 0, 8, b"\x05\0\x05\0"),  # fewer
    (END, 0, 8, b"\0\0\0\0"),
    (END, 0, 12, b"\x00"),  # directory size
    (END, 0, 16, b"\xff\xff\xff\xff"),  # directory in zip64, which is not there
    (END, 0, 20, b"\x01"),  # comment beyond the end
]


def test_item_that_contradicts_itself_raises_corruption() -> None:
    item = frame(strided_tensor(torch.float32, (2, 3), (3, 1)))
    for patch in PATCHES:
        bad = patched(item, *patch)
        assert bad != item and not is_taken(bad), patch
        with pytest.raises(errors.CorruptionError) as caught:
            _C.zip_records(bad)
        offset, nbytes = caught.value.offset, caught.value.nbytes
        assert offset is not None and nbytes is not None
        assert 0 <= offset <= offset + nbytes <= len(item), patch


def test_truncations_and_every_changed_byte_of_the_pickle_raise_corruption() -> None:
    tensor = strided_tensor(torch.float32, (2, 3), (3, 1))
    for item in (frame(tensor), saved(tensor)):
        assert [n for n in range(0, len(item), 7) if is_taken(item[:n])] == []
        assert not is_taken(item[:-1])
        ((_, _, begin, nbytes, _),) = (
            row for row in _C.zip_records(item) if row[0].endswith("data.pkl")
        )
        for at in range(begin, begin + nbytes):
            assert not is_taken(item[:at] + bytes([item[at] ^ 1]) + item[at + 1 :]), at - begin


def test_overlapping_records_raise_corruption() -> None:
    # The payload of `version` swallows the header and a copy of the end of data/0.
    inner = rewritten(dict.fromkeys((".format_version", ".storage_alignment")))
    rows = {row[0]: row for row in _C.zip_records(inner)}
    first, last = rows["archive/version"], rows["archive/.data/serialization_id"]
    grown = last[2] + 2 - first[2]
    names = [row[0] for row in _C.zip_records(inner)]
    size = grown.to_bytes(4, "little")
    bad = patched(inner, CENTRAL, names.index("archive/version"), 20, size + size)
    bad = patched(bad, LOCAL, names.index("archive/version"), 18, size + size)
    with pytest.raises(errors.CorruptionError, match="overlap"):
        _C.zip_records(bad)


def test_what_is_no_zip_raises_corruption() -> None:
    junk = [b"", b"PK", bytes(22), b"PK\x05\x06" + bytes(18), b"z" * 9000]
    assert [data for data in junk if is_taken(data)] == []


@pytest.mark.slow
@pytest.mark.parametrize("distance", [-1, 0, 4096])
def test_stock_item_above_4_gib_is_parsed(distance: int, tmp_path: Path) -> None:
    nbytes = 2**32 + distance
    hole = tmp_path / "zeros"
    with hole.open("wb") as file:
        file.truncate(nbytes)
    tensor = torch.from_file(str(hole), size=nbytes, dtype=torch.uint8)
    path = tmp_path / "item"
    with SparseFile(path) as sparse:
        torch.save(tensor, sparse)
    found = find(path)
    assert found is not None
    assert found.payload_bytes == nbytes
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        crcs = {name: crc for name, *_, crc in _C.zip_records(view)}
    assert crcs["archive/data/0"] == crc_of_zeros(nbytes)
