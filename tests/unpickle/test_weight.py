"""Objects of a pickle take no more memory than 256 MiB and twice its bytes: the scan charges what
they take, measured by a counting allocator, and refuses no honest metadata.
"""

from __future__ import annotations

import io
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import pickles as hp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_dcpx import _C, load_tensors
from torch_dcpx.errors import CorruptionError, UnsupportedError
from torch_dcpx.metadata import file as metadata_file
from torch_dcpx.metadata.file import decode_metadata
from torch_dcpx.unpickle.byte_items import decode_byte_item, tell_refused
from torch_dcpx.unpickle.torch_items import _check_calls

MANY = 30_000


def _int(number: int) -> bytes:
    return b"J" + (number + 70_000).to_bytes(4, "little")


FLOODS: dict[str, Callable[[int], bytes]] = {
    "lists": lambda n: b"(" + b"]" * n + b"l",
    "lists of one": lambda n: b"(" + b"]Na" * n + b"l",
    "dicts": lambda n: b"(" + b"}" * n + b"l",
    "dicts of one": lambda n: b"(" + b"}NNs" * n + b"l",
    "records": lambda n: b"(" + b"}(NM\xff\x7fK\x01G????????u" * n + b"l",
    "empty tuples": lambda n: b"(" + b")" * n + b"t",
    "tuples": lambda n: b"(" + b"N\x85" * n + b"t",
    "deep tuples": lambda n: b"(" + (b")" + b"\x85" * 400) * (n // 400) + b"t",
    "sets": lambda n: b"(" + b"\x8f" * n + b"l",
    "frozensets": lambda n: b"(" + b"(N\x91" * n + b"l",
    "marks": lambda n: b"(" + (b"(" * 400 + b"t" * 400) * (n // 400) + b"l",
    "OrderedDicts": lambda n: b"(" + hp.ORDERED + b"q\x01" + b"0" + b"h\x01)R" * n + b"l",
    "OrderedDicts of one": lambda n: (
        b"(" + hp.ORDERED + b"q\x01" + b"0" + b"h\x01)RNNs" * n + b"l"
    ),
    "lists of globals": lambda n: b"(" + hp.ORDERED + b"q\x01" + b"0" + b"]h\x01)Ra" * n + b"l",
    "long lists": lambda n: b"(" + b"](" * 1 + b"N" * n + b"el",
    "lists of nine": lambda n: b"(" + b"](NNNNNNNNNe" * n + b"l",
    "dicts of nine": lambda n: b"(" + (b"}(" + b"".join(b"K%cN" % i for i in range(9)) + b"u") * n
    + b"l",
    "pairs": lambda n: b"(" + b"NN\x86" * n + b"l",
    "pairs of lists": lambda n: b"(" + b"]]\x86" * n + b"l",
    "lists of dicts": lambda n: b"(" + b"]}a" * n + b"l",
    "flags": lambda n: b"(" + b"\x88" * n + b"l",
    "flags in batches": lambda n: b"](" + b"(" .join([b"\x88" * 1000 + b"e"] * (n // 1000)),
    "Namespaces": lambda n: b"(" + hp.NAMESPACE + b"q\x010" + b"h\x01)R}b" * n + b"l",
    "memo": lambda n: b"(N" + b"".join(b"r" + i.to_bytes(4, "little") for i in range(n)) + b"l",
    "gets": lambda n: b"(]q\x00" + b"h\x00" * n + b"l",
    "ints": lambda n: b"(" + b"".join(map(_int, range(n))) + b"l",
    "long ints": lambda n: b"(" + (b"\x8a\x09" + b"\x7f" * 9) * n + b"l",
    "floats": lambda n: b"(" + b"G????????" * n + b"l",
    "texts": lambda n: b"(" + b"\x8c\x02ab" * n + b"l",
    "wide text": lambda n: hp.text("a" * n * 10 + "\U0001f600"),
    "bytes": lambda n: b"(" + b"C\x02ab" * n + b"l",
    "a dict": lambda n: b"}(" + b"".join(_int(i) + b"N" for i in range(n)) + b"u",
    "a set": lambda n: b"\x8f(" + b"".join(map(_int, range(n))) + b"\x90",
}  # fmt: skip


SAYING = {"ints", "long ints", "floats"}  # numbers, which earn what they take


@pytest.mark.parametrize("name", [name for name in FLOODS if name not in SAYING])
def test_the_scan_charges_what_objects_take(name: str) -> None:
    count = MANY if name == "wide text" else MANY // 10
    body = b"\x80\x04" + FLOODS[name](count) + b"."
    archive = hp.torch_zip(body)
    decode_byte_item(hp.torch_zip(b"\x80\x04N."), fqn="k", path="p")
    tracemalloc.start()
    try:
        decode_byte_item(archive, fqn="k", path="p")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    peak -= 2 * len(body)  # the bytes themselves, which the bound has
    least = int((peak - 4.4 * count) / 1.15) - len(body) - 1024  # what the scan must charge
    if least > 0:
        with pytest.raises(CorruptionError):
            _C.scan_keys(body, base_cost=least, said_earn_per_byte=0)


@pytest.mark.parametrize("name", ["lists", "dicts", "tuples", "sets", "OrderedDicts", "Namespaces"])
def test_a_flood_is_refused_with_its_numbers_before_an_object_is_made(name: str) -> None:
    body = b"\x80\x04" + FLOODS[name](2_000_000) + b"."
    for read in (
        lambda: decode_byte_item(hp.torch_zip(body), fqn="k", path="the file"),
        lambda: decode_metadata(body, "the file"),
    ):
        tracemalloc.start()
        try:
            with pytest.raises(CorruptionError) as caught:
                read()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 5 * len(body) + (1 << 20)
        for part in ("'the file'", "B of memory for its", f"{len(body)} B", "trusted=True"):
            assert part in str(caught.value)


def test_who_trusts_a_heavy_metadata_reads_it() -> None:
    metadata = _metadata(1)
    metadata.planner_data = {"w": ("w",), "many": "MARK"}
    before, after = pickle.dumps(metadata, 2).split(hp.text("MARK"))
    data = before + b"](" + b"]" * 2_500_000 + b"e" + after
    with pytest.raises(CorruptionError, match="of memory for its"):
        decode_metadata(data, "p")
    found = decode_metadata(data, "p", trusted=True).metadata.planner_data
    assert len(found["many"]) == 2_500_000


def _metadata(count: int) -> Metadata:
    entries: dict[str, Any] = {}
    for i in range(count):
        size = torch.Size([1024, i + 1])
        chunk = ChunkStorageMetadata(torch.Size([0, 0]), size)
        properties = TensorProperties(torch.float32)
        entries[f"layers.{i}.w"] = TensorStorageMetadata(properties, size, [chunk])
    places = {
        MetadataIndex(name, torch.Size([0, 0]), 0): _StorageInfo("__0_0.distcp", i << 12, 4096, [])
        for i, name in enumerate(entries)
    }
    planner = {name: tuple(name.split(".")) for name in entries}
    return Metadata(entries, planner, places, StorageMeta("x"), "1")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_honest_metadata_may_have_any_size(protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(_metadata(3000), protocol)
    _C.scan_keys(data, base_cost=1 << 18, states_earn_per_byte=28)  # of 3000, or of a million
    monkeypatch.setattr(metadata_file, "open_stock_metadata", lambda _: None)
    assert len(decode_metadata(data, "p").metadata.state_dict_metadata) == 3000


HONEST: dict[str, Callable[[int], Any]] = {
    "records": lambda n: [{"step": i, "loss": i / 7, "lr": 1e-4 * i} for i in range(n)],
    "ints": lambda n: list(range(70_000, 70_000 + n)),
    "floats": lambda n: [i / 7 for i in range(n)],
    "texts": lambda n: [f"sample {i}" for i in range(n)],
    "pairs": lambda n: [(i + 70_000, i / 7) for i in range(n)],
    "numbers by name": lambda n: {f"layers.{i}.scale": i / 7 for i in range(n)},
}


@pytest.mark.parametrize("count", [1000, 100_000])
@pytest.mark.parametrize("name", HONEST)
def test_what_says_something_may_have_any_size(name: str, count: int) -> None:
    _C.scan_keys(pickle.dumps(HONEST[name](count), 2), base_cost=1 << 18)


_CHUNK = b"ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\nq\x010"
PADDED: dict[str, Callable[[int], bytes]] = {
    "states that are none": lambda n: _CHUNK + b"(" + b"h\x01)\x81}NNsb]]]]" * n + b"l",
    "states of one tuple": lambda n: (
        _CHUNK + b"(NNNNNtq\x020" + b"(" + b"h\x01)\x81h\x02b" * n + b"l"
    ),
    "one state many times": lambda n: _CHUNK + b"h\x01)\x81q\x02" + b"}NNsb" * n,
    "numbers and lists": lambda n: b"(" + b"".join(_int(i) + b"]" for i in range(n)) + b"l",
    "texts and dicts": lambda n: b"(" + b"\x8c\x02ab}}" * n + b"l",
    "a number named again": lambda n: b"(" + _int(1) + b"q\x01" + b"]h\x01a" * n + b"l",
    "storages without records": lambda n: b"(" + b"NQ]]" * n + b"l",
}  # fmt: skip


@pytest.mark.parametrize("name", PADDED)
def test_what_says_nothing_earns_nothing(name: str) -> None:
    data = b"\x80\x04" + PADDED[name](MANY) + b"."
    with pytest.raises(CorruptionError, match="of memory for its"):
        _C.scan_keys(data, True, base_cost=1 << 18, states_earn_per_byte=28, storages=100)


def test_each_storage_makes_room_for_its_tensor() -> None:
    held = io.BytesIO()
    torch.save({f"layers.{i}.weight": torch.ones(2) for i in range(2000)}, held)
    with zipfile.ZipFile(held) as archive:
        data = archive.read("archive/data.pkl")
    _C.scan_keys(data, True, base_cost=1 << 20, storages=2000)
    with pytest.raises(CorruptionError, match="of memory for its"):
        _C.scan_keys(data, True, base_cost=1 << 20, storages=100)


def test_a_save_says_which_item_no_load_takes(caplog: pytest.LogCaptureFixture) -> None:
    many, few = (hp.torch_zip(b"\x80\x02](" + each * 2_500_000 + b"e.") for each in (b"]", b"K\0"))
    for fqn, item in (("many", many), ("few", few)):
        for _ in range(2):
            tell_refused(item, fqn)
    (told,) = caplog.records
    assert "'many'" in told.getMessage() and "trusted=True" in told.getMessage()
    with pytest.raises(CorruptionError, match="of memory for its"):
        decode_byte_item(many, fqn="many", path="p")


def test_a_tensor_item_names_few_classes() -> None:
    names = b"".join(b"ca\n%d\n0" % i for i in range(2000))
    with pytest.raises(CorruptionError, match="more than 1000 classes"):
        _check_calls(memoryview(b"\x80\x02" + names + b"N."), "p", "k")


@pytest.mark.parametrize("kind", ["shared dicts", "deep lists", "many names"])
def test_names_of_a_torch_file_take_no_more_than_it(tmp_path: Path, kind: str) -> None:
    one: Any = {"w": torch.ones(1)}
    if kind == "shared dicts":
        for _ in range(40):
            one = {"a": one, "b": one}
    elif kind == "deep lists":
        inner: Any = [*[None] * 200_000, torch.ones(1)]
        for _ in range(300):
            inner = [inner]
        one = {"w": inner}
    else:
        one = dict.fromkeys(range(600_000))
    torch.save(one, tmp_path / "file.pt")
    with pytest.raises(UnsupportedError, match="would take far more than it has bytes"):
        load_tensors(tmp_path / "file.pt")
