"""Stock's `.metadata` as columns: what `load_stock_metadata` makes of it, or declined."""

from __future__ import annotations

import collections
import dataclasses
import io
import os
import pathlib
import pickle
import pickletools
import random
import tarfile
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hostile import pickles as hp
from support.machine import points
from support.metadata_samples import PATH, canonical, metadatas, small
from support.mutations import mutate
from support.saves import save
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_dcpx._compat import HAS_STRIDES
from torch_dcpx.errors import CorruptionError, DcpxError, UnsafePickleError
from torch_dcpx.metadata.file import decode_file_names, decode_metadata
from torch_dcpx.metadata.stock import load_stock_metadata
from torch_dcpx.metadata.stock_columns import open_stock_metadata

GOLDEN = sorted((Path(__file__).resolve().parents[1] / "golden").glob("stock-*.tar.xz"))
MODULE = "torch.distributed.checkpoint.metadata"
EMPTY_SIZE = torch.Size([])


def assert_same_as_python(data: bytes) -> Metadata:
    """Opens `data`, which must be taken, and compares all of it with what Python makes of it."""
    with hp.watched():
        found = open_stock_metadata(data)
    assert found is not None
    expected = load_stock_metadata(data, PATH)
    assert canonical(found) == canonical(expected)
    for fqn, entry in expected.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            properties = found.state_dict_metadata[fqn].properties
            assert vars(properties) == vars(entry.properties)
    for one, other in zip(found.storage_data.items(), expected.storage_data.items(), strict=True):
        assert [vars(part) for part in one] == [vars(part) for part in other]
    return found


def assert_declined(data: bytes) -> None:
    """And that Python has the say, by whatever way it has it."""
    assert open_stock_metadata(data) is None
    outcomes = []
    for read in (lambda: load_stock_metadata(data, PATH), lambda: decode_metadata(data, PATH)[0]):
        try:
            outcomes.append(canonical(read()))
        except DcpxError as error:
            outcomes.append((type(error), str(error)))
    assert outcomes[0] == outcomes[1]


def many(count: int, **changes: Any) -> Metadata:
    entries, storage = {}, {}
    for number in range(count):
        name = f"layers.{number}.weight"
        size = torch.Size([number, 2])
        chunk = ChunkStorageMetadata(torch.Size([0, 0]), size)
        entries[name] = TensorStorageMetadata(TensorProperties(), size, [chunk])
        storage[MetadataIndex(name, [0, 0], 0)] = _StorageInfo("__0_0.distcp", number, 99)
    mapping = {name: tuple(name.split(".")) for name in entries}
    return dataclasses.replace(Metadata(entries, mapping, storage), **changes)


# ---- What is taken -----------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_and_memo_gives_what_python_gives(protocol: int) -> None:
    assert_same_as_python(pickle.dumps(many(1100), protocol))  # of several batches
    metadata = small()
    data = pickle.dumps(metadata, protocol)
    assert_same_as_python(data)
    assert_same_as_python(pickletools.optimize(data))  # other memo, other frames
    out = io.BytesIO()
    pickle._Pickler(out, protocol).dump(metadata)  # type: ignore[attr-defined]
    assert_same_as_python(out.getvalue())


def test_nothing_is_made_before_it_is_asked_for() -> None:
    found = decode_metadata(pickle.dumps(many(100)), PATH).metadata
    columns: Any = found.storage_data.columns  # type: ignore[attr-defined]
    assert (columns.item_count, columns.made_count) == (100, 0)
    place = found.storage_data[MetadataIndex("layers.7.weight", [0, 0])]
    assert (place.offset, columns.made_count) == (7, 1)
    assert found.state_dict_metadata["layers.7.weight"].size == (7, 2)
    assert columns.made_count == 2


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name.removesuffix(".tar.xz"))
def test_file_that_any_torch_wrote_is_taken(path: Path) -> None:
    with tarfile.open(path) as archive:
        data = archive.extractfile(".metadata").read()  # type: ignore[union-attr]
    found = assert_same_as_python(data)
    assert len(found.state_dict_metadata) > 30


def test_save_of_stock_is_taken(tmp_path: Path) -> None:
    odd = {"odd \x00 names": {"": torch.ones(2), "a.b": {"c": [torch.zeros(0, 3), None]}}}
    odd["größe\ud800"] = torch.tensor(1.0)  # type: ignore[assignment]
    for number, state in enumerate(({}, odd)):
        path = tmp_path / str(number)
        save(state, path, "stock")
        data = (path / ".metadata").read_bytes()
        found: Any = assert_same_as_python(data)
        assert found.storage_meta.checkpoint_id == str(path)
        assert decode_file_names(data, PATH) == ({"__0_0.distcp"} if state else set())


def test_metadata_that_a_reader_handed_out_is_taken() -> None:
    found = open_stock_metadata(pickle.dumps(small()))
    assert_same_as_python(pickle.dumps(found))  # its dicts are calls of `dict`


def test_strides_of_torch_2_15_are_taken() -> None:
    properties = TensorProperties()

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if obj is properties:
                return object.__reduce_ex__(obj, 2)[0], (TensorProperties,), state
            return NotImplemented

    five = properties.__getstate__()[:5]  # type: ignore[no-untyped-call]
    for more in ((), (None,), ((3, 1),), (torch.Size([3, 1]),), ((),)):
        state = five + more
        out = io.BytesIO()
        metadata = small()
        metadata.state_dict_metadata["step"].properties = properties  # type: ignore[union-attr]
        Pickler(out, 4).dump(metadata)
        found: Any = assert_same_as_python(out.getvalue())
        wanted = tuple(more[0]) if HAS_STRIDES and more and more[0] is not None else None
        assert getattr(found.state_dict_metadata["step"].properties, "strides", None) == wanted


def test_memory_format_of_python_3_11_2_is_taken() -> None:
    encoding = hp.name(MODULE, "_MEM_FORMAT_ENCODING")
    getattr_ = hp.name("builtins", "getattr")
    plain = pickle.dumps(many(1), 2)
    number = pickletools.optimize(plain)
    call = b"c" + MODULE.encode() + b"\n_MEM_FORMAT_ENCODING\nK\x00\x85R"
    assert call in number
    named = hp.call(getattr_, encoding, hp.text("TORCH_CHANNELS_LAST"))
    found: Any = assert_same_as_python(number.replace(call, named))
    properties = found.state_dict_metadata["layers.0.weight"].properties
    assert properties.memory_format is torch.channels_last
    assert_declined(number.replace(call, hp.call(getattr_, encoding, hp.text("__class__"))))


def test_shared_objects_are_taken() -> None:
    metadata = many(3)
    one: Any = metadata.state_dict_metadata["layers.1.weight"]
    metadata.state_dict_metadata["tied"] = one
    metadata.state_dict_metadata["layers.2.weight"].properties = one.properties  # type: ignore[union-attr]
    metadata.storage_data[MetadataIndex("tied", one.size, 0)] = next(
        iter(metadata.storage_data.values())
    )
    assert_same_as_python(pickle.dumps(metadata))


def test_checkpoint_id_is_what_python_makes_of_it() -> None:
    for place in (None, "", "/a/b", pathlib.PosixPath("/a/b"), Path()):
        metadata = small()
        metadata.storage_meta.checkpoint_id = place  # type: ignore[union-attr]
        data = pickle.dumps(metadata)
        found = decode_metadata(data, PATH).metadata
        assert canonical(found) == canonical(load_stock_metadata(data, PATH))


@hypothesis.given(metadatas())
@hypothesis.settings(max_examples=points(50), deadline=None)
def test_any_metadata_is_what_python_makes_of_it(metadata: Metadata) -> None:
    data = pickle.dumps(metadata)
    found = open_stock_metadata(data)
    place = metadata.storage_meta and metadata.storage_meta.checkpoint_id
    is_odd = isinstance(metadata.planner_data, list) or isinstance(place, pathlib.PurePath)
    assert (found is None) is is_odd
    if found is not None:
        assert canonical(found) == canonical(load_stock_metadata(data, PATH))


# ---- What is declined --------------------------------------------------------------------------


class Other(Metadata):
    pass


@dataclasses.dataclass
class Stray:
    x: int = 1


def test_subclass_of_metadata_is_up_to_python() -> None:
    data = pickle.dumps(Other(small().state_dict_metadata, None, {}))
    assert_declined(data)
    with pytest.raises(UnsafePickleError):
        decode_metadata(data, PATH)
    found = decode_metadata(data, PATH, safe_globals=[Other]).metadata
    assert list(found.state_dict_metadata) == list(small().state_dict_metadata)


def test_bytes_behind_the_pickle_are_up_to_python() -> None:
    for behind in (b"\0", b".", bytes(64)):
        data = pickle.dumps(small()) + behind
        assert open_stock_metadata(data) is None
        with pytest.raises(CorruptionError, match="behind the pickle"):
            decode_metadata(data, PATH)


def test_opcode_beyond_its_frame_is_up_to_python() -> None:
    """CPython reads other bytes there than those that follow."""
    data = pickle.dumps(many(3))
    assert data[2:3] == pickle.FRAME
    for frame_bytes in (1, 20, 45):
        assert_declined(data[:3] + frame_bytes.to_bytes(8, "little") + data[11:])


def test_every_truncation_is_up_to_python() -> None:
    data = pickle.dumps(many(1))
    for nbytes in range(len(data)):
        assert open_stock_metadata(data[:nbytes]) is None
        with pytest.raises(CorruptionError):
            decode_metadata(data[:nbytes], PATH)


def test_trusted_metadata_is_unpickled_by_python() -> None:
    found = decode_metadata(pickle.dumps(small()), PATH, trusted=True).metadata
    assert type(found.storage_data) is dict


def test_dtype_that_torch_lacks_is_up_to_python() -> None:
    data = pickle.dumps(many(2)).replace(b"\x8c\x07float32", b"\x8c\x07float33")
    assert_declined(data)
    with pytest.raises(UnsafePickleError):
        decode_metadata(data, PATH)


def test_text_that_is_no_utf8_is_up_to_python() -> None:
    data = pickle.dumps(many(1)).replace(b"layers.0.weight", b"layers.\xff.weight")
    assert_declined(data)


class Pairs:
    """Pickled as a dict of these pairs, be keys there twice."""

    def __init__(self, pairs: list[tuple[Any, Any]]) -> None:
        self.pairs = pairs

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (), None, None, iter(self.pairs)


def test_keys_that_are_there_twice_are_up_to_python() -> None:
    metadata: Any = many(2)
    entries, storage = metadata.state_dict_metadata, metadata.storage_data
    for field, table in (("state_dict_metadata", entries), ("storage_data", storage)):
        pairs = list(table.items())
        assert_same_as_python(pickle.dumps(dataclasses.replace(metadata, **{field: Pairs(pairs)})))
        key, value = pairs[0]
        again = "".join(key) if isinstance(key, str) else MetadataIndex(key.fqn, key.offset, 1)
        twice = Pairs([*pairs, (again, value)])
        assert_declined(pickle.dumps(dataclasses.replace(metadata, **{field: twice})))
    twice = Pairs([("a", ("a",)), ("a", ("b",))])
    assert_declined(pickle.dumps(dataclasses.replace(metadata, planner_data=twice)))


def colliding(count: int) -> list[torch.Size]:
    """Offsets that have one hash: of a tuple of two, the second undoes what the first did."""
    p1, p2, mask = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, (1 << 64) - 1
    p5 = 0x27D4EB2F165667C5
    target, back = 12345, pow(p2, -1, 1 << 64)
    found = []
    value = 0
    while len(found) < count:
        value += 1
        acc = (p5 + value * p2) & mask
        acc = (((acc << 31) | (acc >> 33)) & mask) * p1 & mask
        second = (target - acc) * back & mask
        if second < (1 << 61) - 1:
            found.append(torch.Size([value, second]))
    return found


def test_offsets_that_all_have_one_hash_are_up_to_python() -> None:
    offsets = colliding(100)
    assert len(set(map(hash, offsets))) == 1
    storage = {}
    for at, offset in enumerate(offsets):
        storage[MetadataIndex("w", offset)] = _StorageInfo("f", at, 1)
        if at in (63, 64, 99):
            data = pickle.dumps(Metadata({}, None, dict(storage)))
            if at == 63:
                assert_same_as_python(data)
            else:
                assert_declined(data)
    with pytest.raises(CorruptionError, match="with one hash"):
        decode_metadata(data, PATH)


def test_offsets_of_many_chunks_of_one_tensor_are_taken() -> None:
    places = {MetadataIndex("w", [n, 0]): _StorageInfo("f", n, 1) for n in range(300)}
    assert_same_as_python(pickle.dumps(Metadata({}, None, places)))


def test_references_do_not_make_much_of_few_bytes() -> None:
    """5,000 names of one tensor of 64 dimensions: 46 MB of sizes, of 60 KB of pickle."""
    size = torch.Size([1] * 64)
    one = TensorStorageMetadata(TensorProperties(), size, [ChunkStorageMetadata(size, size)] * 9)
    data = pickle.dumps(Metadata({f"{n:x}": one for n in range(5000)}, None, {}))
    assert open_stock_metadata(data) is None


# ---- Mutations: DCPX_FUZZ_ROUNDS=N tries ten times as many (2,000) where slow tests run ----------


def outcome_of(mutant: bytes) -> str:
    found = open_stock_metadata(mutant)
    if found is None:
        return "declined"
    assert canonical(found) == canonical(load_stock_metadata(mutant, PATH))
    return "taken"


@pytest.mark.parametrize(
    "rounds",
    [
        3000,  # 1 in 90 is taken
        pytest.param(
            10 * int(os.environ.get("DCPX_FUZZ_ROUNDS") or points(2000)), marks=pytest.mark.slow
        ),
    ],
    ids=["some", "many"],
)
def test_mutation_is_what_python_makes_of_it_or_declined(seed: int, rounds: int) -> None:
    random_ = random.Random(seed)
    bodies = [pickle.dumps(small(), protocol) for protocol in (2, 3, 4, 5)]
    bodies += [pickletools.optimize(data) for data in bodies]
    outcomes = collections.Counter(
        outcome_of(mutate(random_.choice(bodies), random_)) for _ in range(rounds)
    )
    assert min(outcomes["taken"], outcomes["declined"]) > rounds // 300, outcomes
