"""Plans and results as columns: whatever goes in comes out as from a pickle, or it is an error."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random
from collections.abc import Mapping
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from support.machine import points
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from torch_dcpx import PlanError
from torch_dcpx._compat import HAS_STRIDES
from torch_dcpx._plan_classes import MAKER
from torch_dcpx.ranks.plan_wire import RankPlan, WirePlan
from torch_dcpx.storage.names import FileEntry
from torch_dcpx.writer.commit import WriteResults


class Text(str):
    """A name that is no plain str."""


class OwnItem(WriteItem):
    pass


class OwnProperties(TensorProperties):
    pass


def said(value: Any) -> Any:
    """All that an object is, to the classes of its parts; a plan's class is left out."""
    if dataclasses.is_dataclass(value):
        kind = "plan" if isinstance(value, SavePlan) else type(value)
        return kind, {name: said(part) for name, part in vars(value).items() if part is not None}
    if isinstance(value, (list, tuple)):
        return type(value), list(map(said, value))
    if isinstance(value, Mapping):
        return type(value), [(said(key), said(part)) for key, part in value.items()]
    return type(value), value


def sent(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def size(*values: int) -> torch.Size:
    return torch.Size(values)


NAMES = st.one_of(
    st.sampled_from(["a", "a.b", "layers.0.weight", "layers.1.weight", "", ".", "é.0"]),
    st.text(st.characters(codec=None), max_size=8),  # lone surrogates as well
    st.text(max_size=4).map(Text),
)
NUMBERS = st.one_of(
    st.integers(0, 5), st.integers(-(2**63), 2**63 - 1), st.sampled_from([2**63, -(2**70), True])
)
PLAIN = st.integers(-3, 2**40)
SIZES = st.lists(PLAIN, max_size=4).map(torch.Size)
ODD_SIZES = st.one_of(SIZES, SIZES, st.lists(NUMBERS, max_size=3).map(tuple), st.just([1, 2]))
HINTS = st.one_of(st.none(), st.integers(0, 3), NUMBERS)


@st.composite
def properties(draw: Any) -> TensorProperties:
    kind = draw(st.sampled_from([TensorProperties] * 5 + [OwnProperties]))
    made = kind(
        draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8])),
        draw(st.sampled_from([torch.strided, torch.sparse_coo])),
        draw(st.booleans()),
        draw(st.sampled_from([torch.contiguous_format, torch.channels_last])),
        draw(st.sampled_from([True, False, 1])),
    )
    if HAS_STRIDES:
        made.strides = draw(st.one_of(st.none(), st.lists(NUMBERS, max_size=3).map(tuple)))
    return made


@st.composite
def items(draw: Any) -> WriteItem:
    kind = draw(st.sampled_from([WriteItem] * 5 + [OwnItem]))
    index = MetadataIndex(draw(NAMES), draw(st.one_of(st.none(), SIZES)), draw(HINTS))
    data = None
    if draw(st.integers(0, 3)):
        offsets = index.offset if draw(st.booleans()) else draw(ODD_SIZES)
        chunk = ChunkStorageMetadata(offsets, draw(ODD_SIZES))
        if draw(st.integers(0, 9)) == 0:
            chunk.note = "a field of somebody's own"
        data = TensorWriteData(chunk, draw(properties()), draw(ODD_SIZES))
    stream = draw(st.sampled_from([None, None, None, BytesIOWriteData(7)]))
    made = kind(index, draw(st.sampled_from(list(WriteItemType))), stream, data)
    if draw(st.integers(0, 9)) == 0:
        object.__setattr__(made, "note", {"a": 1})
    return made


PARTS = st.one_of(st.integers(-5, 5), NUMBERS, NAMES)


@st.composite
def paths(draw: Any) -> Any:
    if draw(st.booleans()):
        cut = draw(st.lists(st.lists(PARTS, max_size=4), max_size=5))
        return {".".join(map(str, path)): tuple(path) for path in cut}
    names = st.one_of(NAMES, st.integers())
    rows = st.dictionaries(names, st.lists(PARTS, max_size=3).map(tuple), max_size=5)
    return draw(st.one_of(st.none(), rows, st.just({"a": [1]}), st.just({"a": "a"}), st.just({})))


@pytest.mark.slow
@settings(max_examples=points(200), deadline=None)
@given(st.lists(items(), max_size=8), paths(), st.booleans())
def test_plan_comes_out_as_from_a_pickle(
    planned: list[WriteItem], its_paths: Any, usable: bool
) -> None:
    fields = (planned, "of the storage", its_paths, usable)
    wanted = said(sent(SavePlan(*fields)))
    assert said(sent(WirePlan(*fields))) == wanted
    for is_shared in (False, True):
        found = sent(RankPlan(*fields, is_shared=is_shared))
        assert said(SavePlan(found.items, found.storage_data, found.planner_data, usable)) == wanted
        assert type(found) is RankPlan and found.is_shared is is_shared


def shard(fqn: str, row: int, dtype: torch.dtype = torch.float32) -> WriteItem:
    chunk = ChunkStorageMetadata(size(row, 0), size(2, 8))
    data = TensorWriteData(chunk, TensorProperties(dtype), size(64, 8))
    return WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def shards(count: int = 300) -> list[WriteItem]:
    return [shard(f"model.layers.{number}.mlp.weight", 4) for number in range(count)]


def path_of(item: WriteItem) -> tuple[str, str]:
    return ("model", item.index.fqn.removeprefix("model."))


def test_plan_of_shards_takes_few_bytes() -> None:
    planned = shards()
    its_paths = {item.index.fqn: path_of(item) for item in planned}
    assert len(pickle.dumps(WirePlan(planned, planner_data=its_paths))) <= 8 * len(planned)
    assert len(pickle.dumps(SavePlan(planned, planner_data=its_paths))) >= 150 * len(planned)


def test_equal_parts_are_one_object_only_where_nobody_changes_them() -> None:
    planned = [shard("a", 4), shard("b", 4), shard("c", 8)]
    a, b, c = sent(RankPlan(planned, is_shared=True)).items
    assert a.tensor_data is b.tensor_data
    assert a.tensor_data.properties is c.tensor_data.properties
    a, b, _ = sent(WirePlan(planned)).items
    a.tensor_data.properties.dtype = torch.int8
    a.tensor_data.chunk.sizes = size(0)
    assert said(b) == said(planned[1])


def test_plan_says_what_a_rank_told_beside_its_items() -> None:
    digests = {"step": b"12345678", "rate": b"abcdefgh"}
    whole = frozenset({"model.layers.1.mlp.weight", "only here"})
    plan = RankPlan(shards(3), can_split=True, whole_names=whole, digests=digests)
    assert sent(plan) == plan
    odd = dataclasses.replace(plan, digests={"step": b"short", Text("x"): b"12345678"})
    assert said(sent(odd)) == said(odd)


def test_answer_leaves_out_the_paths_that_its_rank_has() -> None:
    its_paths = {"model.a": ("model", "a")}
    offer = RankPlan([shard("model.a", 0)], planner_data=its_paths, has_paths=True)
    at_coordinator = sent(offer)
    assert at_coordinator.planner_data == its_paths
    answer = at_coordinator.planned(at_coordinator.items)
    assert answer.planner_data == its_paths
    assert sent(answer).planner_data is None
    changed = dataclasses.replace(answer, planner_data={"other": ("other",)})
    assert sent(changed).planner_data == {"other": ("other",)}
    without = dataclasses.replace(offer, has_paths=False)
    assert sent(without.planned(without.items)).planner_data == its_paths


def test_plan_equals_one_of_torchs_class_and_is_copied_and_replaced_as_it() -> None:
    planned = shards(2)
    plan, stock = WirePlan(planned, "prefix", {"a": ("a",)}), SavePlan(
        planned, "prefix", {"a": ("a",)}
    )  # fmt: skip
    assert plan == stock and stock == plan
    assert plan != dataclasses.replace(stock, usable=False) and stock != RankPlan(planned)
    assert copy.copy(plan).items is planned
    assert copy.deepcopy(plan) == plan
    other = dataclasses.replace(plan, items=planned[:1])
    assert type(other) is WirePlan and sent(other) == SavePlan(planned[:1], "prefix", {"a": ("a",)})


def test_subclass_with_fields_of_its_own_is_pickled_whole() -> None:
    plan = OwnPlan(shards(2), note="kept")
    assert sent(plan) == plan and sent(plan).note == "kept"


@dataclasses.dataclass(frozen=True, eq=False)
class OwnPlan(RankPlan):
    note: str = ""


@st.composite
def results(draw: Any) -> WriteResult:
    index = MetadataIndex(draw(NAMES), draw(st.one_of(st.none(), SIZES)), draw(HINTS))
    descriptors = draw(st.sampled_from([None, None, ["zstd"]]))
    place = _StorageInfo(draw(NAMES), draw(NUMBERS), draw(NUMBERS), descriptors)
    return WriteResult(index, draw(NUMBERS), draw(st.sampled_from([place, place, place, "other"])))


@settings(max_examples=points(150), deadline=None)
@given(st.lists(results(), max_size=8))
def test_results_come_out_as_from_a_pickle(written: list[WriteResult]) -> None:
    files = [FileEntry("__0_0.distcp", b"0" * 16, 4096, 0)]
    found = sent(WriteResults(written, files))
    assert said(list(found)) == said(sent(written))
    assert found.files == files
    assert said(list(sent(found))) == said(list(found))


def test_results_take_few_bytes() -> None:
    written = [
        WriteResult(item.index, 64, _StorageInfo("__0_0.distcp", 2048 * number, 64))
        for number, item in enumerate(shards())
    ]
    assert len(pickle.dumps(WriteResults(written))) <= 10 * len(written)


def is_read(message: bytes, properties: list[Any], others: list[Any]) -> bool:
    """Returns whether a message can be read; anything but a PlanError is a bug."""
    try:
        MAKER.unpack_plan(message, properties, others, is_shared=True)
    except PlanError:
        return False
    return True


def test_damaged_messages_are_refused_or_read_but_end_nothing() -> None:
    planned = [
        *shards(3),
        shard("é\ud800", 1),
        WriteItem(MetadataIndex("s"), WriteItemType.BYTE_IO),
    ]
    planned.append(WriteItem(MetadataIndex(Text("t"), size(2), 5), WriteItemType.BYTE_IO))
    planned.append(WriteItem(MetadataIndex("u", size(2), 5), WriteItemType.BYTE_IO))
    its_paths = {item.index.fqn: ("x", 3, "y.z") for item in planned if type(item.index.fqn) is str}
    its_paths["l.0.w"] = ("l", 0, "w")
    message, properties, others, has_paths = MAKER.pack_plan(planned, its_paths, ["s", "more"])
    assert has_paths and is_read(message, properties, others)
    assert not any(is_read(message[:end], properties, others) for end in range(len(message)))
    assert not is_read(message + b"\0", properties, others)
    assert not is_read(message, [], others)
    assert not is_read(message, properties, [])
    assert not is_read(message, properties, [*others, "one more"])
    source = random.Random(9)
    refused, tried = 0, points(20_000)
    for _ in range(tried):
        damaged = bytearray(message)
        for _ in range(source.randint(1, 4)):
            damaged[source.randrange(len(damaged))] = source.choice((0, 1, 127, 128, 255, 64, 3))
        refused += not is_read(bytes(damaged), properties, others)
    assert tried // 10 < refused < tried


def test_damaged_results_are_refused_or_read_but_end_nothing() -> None:
    written = [
        WriteResult(item.index, 64, _StorageInfo("__0_0.distcp", 2048 * number, 64))
        for number, item in enumerate(shards(4))
    ]
    message, others = MAKER.pack_results([*written, "odd"])
    source = random.Random(7)
    for number in range(points(10_000)):
        damaged = bytearray(message[: number % len(message)] if number < len(message) else message)
        if damaged:
            damaged[source.randrange(len(damaged))] = source.randrange(256)
        try:
            found = MAKER.unpack_results(bytes(damaged), others)
        except PlanError:
            continue
        assert all(type(result) in (WriteResult, str) for result in found)


def test_damage_to_what_is_compressed_is_a_typed_error() -> None:
    unpack, (kind, data, nbytes, *rest) = WirePlan(shards()).__reduce_ex__(4)
    for damaged, length in (
        (data[:-1], nbytes),
        (data[:-9], nbytes),
        (b"\0" + data[1:], nbytes),
        (data, nbytes + 1),
    ):
        with pytest.raises(PlanError, match="damaged"):
            unpack(kind, damaged, length, *rest)
