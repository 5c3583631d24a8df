"""Checkpoints that are small and ask for much: time, memory, stack."""

from __future__ import annotations

import io
import itertools
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from hostile import pickles as hp
from hostile.corpus import PICKLE_PLACES, WEIGHT, Case, saved, stock
from support.zip_samples import rezipped
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

T, V, N = hp.text, hp.value, hp.name
MODULUS = 2**61 - 1  # of Python's hash of numbers
LAUGHS = T("ab") + b"\x85" + b"2\x86" * 40  # a tuple of 2^40 texts in 90 bytes
MANY = 20_000


def _numbers(count: int = MANY) -> list[bytes]:
    return [V(MODULUS * i) for i in range(1, count)]


def _same_bytes(times: int, make: Callable[[bytes], bytes]) -> bytes:
    """A text of a megabyte, put into the memo, and `times` things made of it."""
    return b"(" + T("a" * (1 << 20)) + b"q\x00" + make(b"h\x00") * times + b"t"


PICKLES: dict[str, bytes] = {
    "deep marks": b"(" * 100_000 + b"t" * 100_000,
    "deep lists": b"]" * 100_000 + b"a" * 99_999,
    "deep tuples": b")" + b"\x85" * 100_000,
    "deep reduces": hp.ORDERED + b")R" * 100_000,
    "deep builds": hp.call(hp.NAMESPACE) * 5000 + b"b" * 4999,
    "a list in itself": b"]q\x00h\x00a",
    "a tuple in itself": b"]q\x00h\x00\x85a",
    "a namespace in itself": hp.call(hp.NAMESPACE) + b"q\x00}" + T("x") + b"h\x00sb",
    "memo LONG_BINPUT": b"Nr\xff\xff\xff\x7f",
    "memo PUT": b"Np2147483647\n",
    "memo PUT of many digits": b"Np" + b"9" * 100_000 + b"\n",
    "memo slots": b"".join(b"Nr" + (i << 24).to_bytes(4, "little") + b"0" for i in range(1, 120)),
    "BINBYTES8": b"\x8e" + (2**62).to_bytes(8, "little"),
    "BINBYTES8 of 2^64": b"\x8e" + b"\xff" * 8,
    "BYTEARRAY8": b"\x96" + (2**40).to_bytes(8, "little"),
    "BINUNICODE8": b"\x8d" + (2**40).to_bytes(8, "little"),
    "BINSTRING negative": b"T\xff\xff\xff\xff",
    "FRAME": b"\x95" + (2**62).to_bytes(8, "little") + b"N",
    "FRAME of nothing": (b"\x95" + bytes(8)) * 100_000 + b"N",
    "LONG4": b"\x8b" + (2**31 - 1).to_bytes(4, "little"),
    "LONG4 that is there": b"\x8b" + (10**6).to_bytes(4, "little") + b"\x7f" * 10**6,
    "INT of 10^6 digits": b"I" + b"1" * 10**6 + b"\n",
    "LONG of 10^6 digits": b"L" + b"1" * 10**6 + b"L\n",
    "FLOAT of 10^6 digits": b"F" + b"1" * 10**6 + b"\n",
    "bytearray of 10^12": hp.call(N("builtins", "bytearray"), V(10**12)),
    "bytearray of 3 GB": hp.call(N("builtins", "bytearray"), V(3 << 30)),
    "bytes of 10^12": hp.call(N("builtins", "bytes"), V(10**12)),
    "list of a range": hp.call(
        N("builtins", "list"), hp.call(N("builtins", "range"), V(0), V(10**12), V(1))
    ),
    "torch.Tensor of 10^9": hp.call(N("torch", "Tensor"), V(10**9)),
    "torch.Tensor by NEWOBJ": hp.new(N("torch", "Tensor"), V(10**9)),
    "FloatStorage of 10^9": hp.call(N("torch", "FloatStorage"), V(10**9)),
    "laughs": LAUGHS,
    "laughs in a list": b"]" + LAUGHS + b"a",
    "laughs as a key": b"}" + LAUGHS + b"Ns",
    "laughs in a set": hp.call(N("builtins", "set"), b"]" + LAUGHS + b"a"),
    "laughs in a frozenset": b"\x80\x04(" + LAUGHS + b"\x91",
    "laughs in a size": hp.call(hp.SIZE, LAUGHS + b"\x85"),
    "laughs as a layout": hp.call(N("torch.serialization", "_get_layout"), LAUGHS),
    "laughs as a memory format": hp.call(
        N("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"), LAUGHS
    ),
    "laughs as a count": b"(" + T("storage") + N("torch", "FloatStorage") + T("0") + T("cpu")
    + LAUGHS + b"tQ",
    "laughs in an exception": hp.call(N("builtins", "getattr"), hp.NAMESPACE, LAUGHS),
    "dict of ints of one hash": b"}(" + b"".join(key + b"N" for key in _numbers()) + b"u",
    "dict of tuples of one hash": b"}(" + b"".join(key + b"\x85N" for key in _numbers()) + b"u",
    "dict by SETITEM": b"}" + b"".join(key + b"Ns" for key in _numbers()),
    "dict by DICT": b"(" + b"".join(key + b"N" for key in _numbers()) + b"d",
    "set of ints of one hash": b"\x80\x04\x8f(" + b"".join(_numbers()) + b"\x90",
    "frozenset of ints of one hash": b"\x80\x04(" + b"".join(_numbers()) + b"\x91",
    "set called of one hash": hp.call(N("builtins", "set"), b"](" + b"".join(_numbers()) + b"e"),
    "OrderedDict of one hash": hp.call(hp.ORDERED)
    + b"(" + b"".join(key + b"N" for key in _numbers()) + b"u",
    "OrderedDict called of one hash": hp.call(
        hp.ORDERED, b"](" + b"".join(key + b"N\x86" for key in _numbers()) + b"e"
    ),
    "one text, bytes of it 2,000 times": _same_bytes(
        2000, lambda text: hp.call(N("_codecs", "encode"), text, T("latin1"))
    ),
    "one text, bytearrays of it": _same_bytes(
        2000, lambda text: hp.call(N("builtins", "bytearray"), text, T("latin-1"))
    ),
    "one list, sets of it": b"(" + V(list(range(100_000))) + b"q\xc8"
    + hp.call(N("builtins", "set"), b"h\xc8") * 1000 + b"t",
    "one list, deques of it": b"(" + V(list(range(100_000))) + b"q\xc8"
    + hp.call(N("collections", "deque"), b"h\xc8") * 5000 + b"t",
    "no STOP": b"N" * 1000,
    "a stack that is empty": b"0",
    "a mark that is missing": b"t",
}  # fmt: skip
# That torch.save could write, or that says little at length.
HARMLESS = {"a list in itself", "a tuple in itself", "a namespace in itself", "FRAME of nothing"}


def _pickle(place: str, body: bytes, root: Path) -> None:
    PICKLE_PLACES[place](root, b"\x80\x04" + body + (b"" if body == b"N" * 1000 else b"."))


# ---- Zips ---------------------------------------------------------------------------------------


def _rezipped_weight() -> io.BytesIO:
    return io.BytesIO(rezipped(WEIGHT))


def _inflating(root: Path) -> None:
    """A gigabyte of zeros, deflated twice over to some megabytes of them."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        source = zipfile.ZipFile(io.BytesIO(WEIGHT))
        for name in source.namelist():
            with archive.open(name, "w", force_zip64=True) as record:
                if name.endswith("data/0"):
                    for _ in range(512):
                        record.write(bytes(1 << 20))
                else:
                    record.write(source.read(name))
    stock(root, weight=made.getvalue())


def _lying(field: str, value: int, method: int, record: str, root: Path) -> None:
    made = io.BytesIO()
    source = zipfile.ZipFile(io.BytesIO(WEIGHT))
    with zipfile.ZipFile(made, "w", method) as archive:
        for name in source.namelist():
            archive.writestr(name, source.read(name))
        for info in archive.filelist:
            if info.filename.endswith(record):
                setattr(info, field, value)
    stock(root, weight=made.getvalue())


def _many_entries(root: Path) -> None:
    made = _rezipped_weight()
    with zipfile.ZipFile(made, "a") as archive:
        for i in range(5000):
            archive.writestr(f"archive/data/x{i}", b"")
    stock(root, weight=made.getvalue(), value=made.getvalue())


def _overlapping(root: Path) -> None:
    made = _rezipped_weight()
    with zipfile.ZipFile(made, "a") as archive:
        first = next(info for info in archive.filelist if info.filename.endswith("data/0"))
        last = archive.filelist[-1]
        last.header_offset, last.file_size = first.header_offset, first.file_size
        last.compress_size, last.CRC = first.compress_size, first.CRC
        archive.writestr("archive/z", b"")
    stock(root, weight=made.getvalue())


def _end_record(at: int, value: bytes, root: Path) -> None:
    """Another number in the end of the central directory."""
    item = bytearray(_rezipped_weight().getvalue())
    begin = item.rindex(b"PK\x05\x06") + at
    item[begin : begin + len(value)] = value
    stock(root, weight=bytes(item))


def _descriptor(root: Path) -> None:
    """Sizes behind the data, zero before it, and others in the directory."""
    item = bytearray(_rezipped_weight().getvalue())
    begin = item.index(b"PK\x03\x04")
    item[begin + 6 : begin + 8] = (8).to_bytes(2, "little")
    item[begin + 14 : begin + 26] = bytes(12)
    stock(root, weight=bytes(item))


def _of_bytes(data: bytes, root: Path) -> None:
    stock(root, weight=data, value=data)


# ---- Metadata -----------------------------------------------------------------------------------


def _one_hash(root: Path) -> None:
    """Offsets of eight dimensions, all of one hash."""

    def change(metadata: Metadata) -> None:
        info = _StorageInfo("__0_0.distcp", 0, 1)
        values = (0, MODULUS, 2 * MODULUS, 3 * MODULUS)
        for offsets in itertools.islice(itertools.product(values, repeat=8), 1, 3000):
            metadata.storage_data[MetadataIndex("weight", torch.Size(offsets))] = info

    stock(root, change=change)


def cases() -> Iterator[Case]:
    for place in PICKLE_PLACES:
        for name, body in PICKLES.items():
            if len(body) < 1 << 19 or place in ("byte item", "tensor item"):
                build = partial(_pickle, place, body)
                yield Case("bomb", f"{name} in {place}", build, is_valid=name in HARMLESS)
    yield Case("bomb", "offsets of one hash", _one_hash)
    yield Case("zip", "a record that inflates to 512 MiB", _inflating)
    for method, record, field in itertools.product(
        (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED),
        ("data/0", "data.pkl"),
        ("file_size", "compress_size", "header_offset"),
    ):
        for number in (1, 2**31, 2**32 - 1, 2**40, 10**18):
            build = partial(_lying, field, number, method, record)
            yield Case("zip", f"{record} by {method}: {field} {number}", build)
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        yield Case(
            "zip", f"CRC by {method}", partial(_lying, "CRC", 7, method, "data/0"), is_valid=True
        )
    yield Case("zip", "5,000 records", _many_entries, is_valid=True)
    yield Case("zip", "records that overlap", _overlapping)
    yield Case("zip", "a data descriptor that lies", _descriptor)
    for at, nbytes in ((8, 2), (10, 2), (12, 4), (16, 4), (20, 2)):
        for value in (b"\xff" * nbytes, b"\xfe" * nbytes, b"\x01" + bytes(nbytes - 1)):
            build = partial(_end_record, at, value)
            yield Case("zip", f"end record, {value.hex()} at {at}", build)
    whole = saved(torch.nn.Parameter(torch.arange(3000.0), requires_grad=False))
    for share in (0, 0.01, 0.3, 0.6, 0.9, 0.99):
        yield Case("zip", f"cut at {share}", partial(_of_bytes, whole[: int(share * len(whole))]))
    legacy = saved(torch.arange(3000.0), _use_new_zipfile_serialization=False)
    for number in (2999, 3001, 10**9, 10**18):
        lie = legacy.replace((3000).to_bytes(8, "little"), number.to_bytes(8, "little"))
        yield Case("zip", f"legacy: a storage of {number}", partial(_of_bytes, lie))
