"""The look at an item before torch's own loader gets it: what it refuses, and what it must not."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.rows import check_rows
from support.zip_samples import saved

from torch_dcpx.errors import CorruptionError
from torch_dcpx.unpickle.torch_items import _check_item

MIB = 1 << 20


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def storage(numel: int, *end: bytes) -> bytes:
    parts = text("storage"), named("torch", "FloatStorage"), text("0"), text("cpu"), number(numel)
    return b"(" + b"".join([*parts, *end]) + b"tQ"


def tensor(numel: int, stride: int, *storage_end: bytes) -> bytes:
    """The call for one of `numel` elements in a storage of one, or of all where it has strides."""
    hooks = named("collections", "OrderedDict") + b")R"
    held = storage(numel if stride else 1, *storage_end)
    head = named("torch._utils", "_rebuild_tensor_v2") + b"(" + held + b"K\0"
    return head + number(numel) + b"\x85" + number(stride) + b"\x85\x89" + hooks + b"tR"


def called(module: str, name: str, argument: bytes) -> bytes:
    return b"\x80\x02" + named(module, name) + argument + b"\x85R."


def indirect(module: str, name: str, argument: bytes) -> bytes:
    head = b"\x80\x02" + named("torch._tensor", "_rebuild_from_type_v2") + b"("
    return head + named(module, name) + named("torch", "Tensor") + argument + b"\x85}tR."


def archive(program: bytes, name: str = "archive/data.pkl") -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        file.writestr(name, program)
        file.writestr("archive/version", "3\n")
    return made.getvalue()


def legacy(program: bytes, keys: bytes = b"].", start: bytes = b"\x80\x02") -> bytes:
    magic = b"\x8a\x0a" + torch.serialization.MAGIC_NUMBER.to_bytes(10, "little") + b"."
    return start + magic + start + b"M\xe9\x03." + start + b"}." + program + start + keys


def look(data: bytes) -> None:
    _check_item(io.BytesIO(data), "file", "key", 4096)


SIZE = number(4096)
COMPLEX = named("builtins", "complex")
COMPLEX_KEYS = b"".join(COMPLEX + number(n) + number(0) + b"\x86RN" for n in range(600))
ENCODE = named("_codecs", "encode")
LATIN1 = text("latin1") + b"\x86R"
MEGABYTE = ENCODE + text("a" * (1 << 20)) + b"q\1" + LATIN1 + b"0"
UNFOLDED = text("a") + b")" + b"2\x86" * 40 + b"\x86"  # a pair of a text and 2^40 tuples

HOSTILE = {
    "memory by Python 2's name": archive(called("__builtin__", "bytearray", SIZE)),
    "memory in DATA.PKL": archive(called("builtins", "bytearray", SIZE), "archive/DATA.PKL"),
    "memory by a legacy item without protocol": legacy(
        called("builtins", "bytearray", SIZE), start=b""
    ),
    "memory by another function": archive(indirect("builtins", "bytearray", SIZE)),
    "unwritten tensor": archive(called("torch", "FloatTensor", SIZE)),
    "unwritten tensor by NEWOBJ": archive(
        b"\x80\x02" + named("torch", "FloatTensor") + SIZE + b"\x85\x81."
    ),
    "unwritten tensor by another function": archive(indirect("torch", "Tensor", SIZE)),
    "unwritten legacy storage": legacy(b"\x80\x02" + tensor(9, 1, b"N") + b"."),
    "unfolded tensor as a set": archive(called("builtins", "set", tensor(10**9, 0))),
    "unfolded pair as a set": archive(called("builtins", "set", b"]" + UNFOLDED + b"a")),
    "65 numbers as a set": archive(called("builtins", "set", b"](" + SIZE * 65 + b"e")),
    "memory by another function's list": archive(
        indirect("builtins", "bytearray", b"]" + SIZE + b"a").replace(b"a\x85}t", b"a}t")
    ),
    "inflating codec": archive(b"\x80\x02" + ENCODE + text("a") + text("zip") + b"\x86R."),
    "a text made bytes 40 times": archive(
        b"\x80\x02" + MEGABYTE + (ENCODE + b"h\1" + LATIN1 + b"0") * 40 + b"N."
    ),
    "results of calls as keys": archive(b"\x80\x02}(" + COMPLEX_KEYS + b"u."),
}


def test_torch_is_not_given_what_takes_memory_or_hours() -> None:
    def check(data: bytes) -> None:
        with pytest.raises((CorruptionError, pickle.UnpicklingError)):
            look(data)

    check_rows(HOSTILE, check)


class Annotated(torch.Tensor):
    """A subclass whose instances have attributes."""


def annotated(value: Any) -> torch.Tensor:
    made = torch.arange(6.0).as_subclass(Annotated)
    made.note = value  # type: ignore[attr-defined]
    return made


HONEST: dict[str, Callable[[], Any]] = {
    "bytes": lambda: annotated(b"\xff" * 1000),
    "bytearray": lambda: annotated(bytearray(b"\xff" * 1000)),
    "empty bytearray": lambda: annotated(bytearray()),
    "many names": lambda: annotated({f"name{n}" for n in range(1000)}),
    "pairs": lambda: annotated({("a", 1), ("b", None)}),
    "dicts": lambda: annotated({"a": OrderedDict(b=1), 3: {(1, 2): complex(1, 2)}}),
    "torch's": lambda: annotated(
        [torch.Size((1, 2)), torch.float16, torch.device("cpu"), torch.ones(2)]
    ),
    "sizes as keys": lambda: annotated({torch.Size((n,)): n for n in range(100)}),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed rows": lambda: torch.eye(3).to_sparse_csr(),
    "compressed columns": lambda: torch.eye(3).to_sparse_csc(),
    "blocks": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.qint8),
    "quantized by channels": lambda: torch.quantize_per_channel(
        torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
def test_what_torch_saves_passes(is_zip: bool) -> None:
    def check(make: Callable[[], Any]) -> None:
        data = saved(make(), _use_new_zipfile_serialization=is_zip)
        look(data)
        with torch.serialization.safe_globals([Annotated]):
            torch.load(io.BytesIO(data), weights_only=True)

    check_rows(HONEST, check)


def test_no_buffer_of_the_item_is_left_in_the_error() -> None:
    """Python 3.12.1 crashes as it collects a cycle with one, such as an error that holds itself."""
    data = io.BytesIO(HOSTILE["memory in DATA.PKL"])
    with pytest.raises((CorruptionError, pickle.UnpicklingError)) as caught:
        _check_item(data, "file", "key", 4096)
    data.write(b"longer" * 1000)  # a BufferError while a buffer of it is exported
    del caught
