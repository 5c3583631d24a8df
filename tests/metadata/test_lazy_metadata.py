"""The dicts that a reader hands out are those of the pickle, and make what is asked for."""

from __future__ import annotations

import copy
import dataclasses
import operator
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hostile import pickles as hp
from hypothesis import given
from support.eager_columns import decode_at_once
from support.metadata_samples import (
    I64,
    PATH,
    canonical,
    encode_small,
    forge,
    many,
    metadatas,
    small,
)
from support.rows import check_rows
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties

from torch_dcpx.checkpoint.save_plan import PlanRound
from torch_dcpx.errors import CorruptionError, DcpxError
from torch_dcpx.metadata import file as metadata_module
from torch_dcpx.metadata import parts as metadata_parts
from torch_dcpx.metadata.file import decode_metadata, encode_metadata
from torch_dcpx.metadata.lazy import StoredEntries, StoredPaths, StoredPlaces
from torch_dcpx.metadata.stock import load_stock_metadata
from torch_dcpx.storage.directory import Directory, SmallFile

FIELDS = ("state_dict_metadata", "storage_data", "planner_data")


def decoded(data: bytes) -> Metadata:
    return decode_metadata(data, PATH).metadata


# ---- The same as a plain dict --------------------------------------------------------------------


@given(metadatas(), st.data())
def test_single_look_ups_in_any_order_are_those_of_plain_dicts(
    metadata: Metadata, draw: st.DataObject
) -> None:
    data = encode_metadata(metadata, [], "id")
    found, wanted = decoded(data), pickle.loads(data)
    entries, places = found.state_dict_metadata, found.storage_data
    assert isinstance(entries, StoredEntries) and isinstance(places, StoredPlaces)
    for name in draw.draw(st.permutations([*wanted.state_dict_metadata, "no such name"])):
        assert (name in entries) == (name in wanted.state_dict_metadata)
        entry = entries.get(name)
        assert canonical(entry) == canonical(wanted.state_dict_metadata.get(name))
        assert entries.get(name) is entry
    for index in draw.draw(st.permutations([*wanted.storage_data, MetadataIndex("no such name")])):
        hintless = MetadataIndex(index.fqn, index.offset, 12345)  # a hint is no part of a key
        place = places.get(hintless)
        assert canonical(place) == canonical(wanted.storage_data.get(index))
        assert (index in places) == (place is not None)
        assert places.get(index) is place
        assert places.find([index, hintless]) == [place, place]
        if place is not None:
            assert places[index] is place
    assert entries.columns is places.columns is not None  # nothing of this made the rest
    assert len(places) == len(wanted.storage_data)
    assert canonical(found) == canonical(wanted)


def test_places_and_entries_handed_out_stay_the_same_objects_when_all_are_made() -> None:
    found = decoded(encode_small())
    index = MetadataIndex("model.weight", [2, 0])
    entry, place = found.state_dict_metadata["step"], found.storage_data[index]
    place.offset += 1
    assert {id(one) for one in found.state_dict_metadata.values()} >= {id(entry)}
    assert found.storage_data[index] is place
    assert place in found.storage_data.values()
    assert list(found.storage_data) == list(small().storage_data)


OPERATIONS: dict[str, Callable[[dict[Any, Any], Any], Any]] = {
    "[]": lambda d, key: d[key],
    "[] of what is missing": lambda d, _: d["missing"],
    "get": lambda d, key: [d.get(key), d.get("missing"), d.get("missing", 7)],
    "in": lambda d, key: [key in d, "missing" in d],
    "[] of what no dict takes": lambda d, _: d[["unhashable"]],
    "in of what no dict takes": lambda d, _: ["unhashable"] in d,
    "iter": lambda d, _: [list(d), list(reversed(d)), len(d), bool(d)],
    "keys": lambda d, _: [list(d.keys()), d.keys() <= {*d, 1}, type(d.keys())],
    "values": lambda d, _: [list(d.values()), len(d.values()), type(d.values())],
    "items": lambda d, _: [list(d.items()), type(d.items())],
    "repr": lambda d, _: repr(d),
    "==": lambda d, _: [d == dict(d), dict(d) == d, d == {}, {} == d, d == 3],  # noqa: SIM300
    "!=": lambda d, _: [d != dict(d), dict(d) != d, d != {}],
    "<": lambda d, _: d < {},
    "hash": lambda d, _: hash(d),
    "dict": lambda d, _: [dict(d), type(dict(d)), {**d}],
    "copies": lambda d, _: [(one, type(one)) for one in (d.copy(), copy.copy(d), copy.deepcopy(d))],
    "pickle": lambda d, _: [
        (one := pickle.loads(pickle.dumps(d, protocol)), type(one)) for protocol in (2, 4)
    ],
    "|": lambda d, _: [d | {1: 2}, type(d | {1: 2}), {1: 2} | d],
    "|=": lambda d, _: d.__ior__({1: 2}),
    "update": lambda d, key: d.update({key: 3, 4: 5}),
    "update of another": lambda d, _: [one := {1: 2}, one.update(d)],
    "[] =": lambda d, key: [d.__setitem__(key, 17), d.__setitem__("new", 17)],
    "del": lambda d, key: d.__delitem__(key),
    "pop": lambda d, key: [d.pop(key), d.pop("missing", None)],
    "renamed": lambda d, key: d.__setitem__("renamed", d.pop(key)),
    "popitem": lambda d, _: d.popitem(),
    "clear": lambda d, _: d.clear(),
    "setdefault": lambda d, key: [d.setdefault(key, 8), d.setdefault("new", 9)],
    "zip": lambda d, _: dict(zip(d, d.values(), strict=True)),
    "comprehension": lambda d, _: {key: value for key, value in d.items() if key != "step"},
    "asdict": lambda d, _: dataclasses.asdict(Metadata(d)),
    "change while iterating": lambda d, _: [d.pop(key) for key in d],
}


def outcome(do: Callable[[dict[Any, Any], Any], Any], target: dict[Any, Any], key: Any) -> Any:
    """What an operation returns or raises, and what the dict is then."""
    try:
        found = do(target, key)
    except (KeyError, TypeError, RuntimeError) as error:
        # The text of these two names the type.
        text = "" if do in (OPERATIONS["<"], OPERATIONS["hash"]) else str(error)
        return type(error), text, canonical(dict(target))
    return canonical(found), canonical(dict(target))


@pytest.mark.parametrize("field", FIELDS)
def test_every_operation_of_a_dict_gives_what_a_dict_gives(field: str) -> None:
    def check(do: Callable[[dict[Any, Any], Any], Any]) -> None:
        for number in range(3):
            for is_looked_at in (False, True):
                found = getattr(decoded(encode_small()), field)
                plain = getattr(pickle.loads(encode_small()), field)
                key = list(plain)[number]
                assert isinstance(found, dict) and type(plain) is dict
                if is_looked_at:
                    found.get(key)
                assert outcome(do, found, key) == outcome(do, plain, key)

    check_rows(OPERATIONS, check)


def updated(one: dict[Any, Any], other: dict[Any, Any]) -> dict[Any, Any]:
    one.update(other)
    return one


PAIRS: dict[str, Callable[[Any, Any], Any]] = {
    "==": lambda one, other: [one == other, other == one, [one] == [other]],
    "!=": operator.ne,
    "|": operator.or_,
    "|=": operator.ior,
    "update": updated,
    "update of what is filled": lambda one, other: updated(dict(one), other),
    "| of what is filled": lambda one, other: dict(one) | other,
    "|= of what is filled": lambda one, other: operator.ior(dict(one), other),
    "{**, **}": lambda one, other: {**one, **other},
    "items ==": lambda one, other: one.items() == other.items(),
    "keys &": lambda one, other: sorted(map(str, one.keys() & other)),
    "set": lambda one, other: sorted(map(str, {*one, *other})),
}


@pytest.mark.parametrize("field", FIELDS)
def test_operation_of_two_dicts_gives_what_it_gives_of_plain_ones(field: str) -> None:
    def check(do: Callable[[Any, Any], Any]) -> None:
        pair = [getattr(decoded(encode_small()), field) for _ in range(2)]
        plain = [dict(getattr(decoded(encode_small()), field)) for _ in range(2)]
        assert canonical(do(*pair)) == canonical(do(*plain))
        assert canonical(pair[1]) == canonical(plain[1])

    check_rows(PAIRS, check)


def test_metadata_that_was_read_twice_is_equal() -> None:
    one, other = decoded(many(3, 4)), decoded(many(3, 4))
    assert one == other
    other.storage_data[MetadataIndex("t1", [2, 0])].offset += 1
    assert one != other


def test_entries_kept_for_the_next_save_are_copies_of_all() -> None:
    round_ = SimpleNamespace(_is_private=False)
    found = decoded(encode_small())
    kept = PlanRound._handed(round_, found)  # type: ignore[arg-type]
    assert canonical(kept.state_dict_metadata) == canonical(found.state_dict_metadata)
    assert kept.state_dict_metadata["step"] is not found.state_dict_metadata["step"]


def test_metadata_that_was_handed_out_can_be_encoded_again() -> None:
    found = decode_metadata(encode_small(), PATH)
    again = encode_metadata(found.metadata, list((found.files or {}).values()), "our save id")
    assert again == encode_small()


def test_index_of_another_class_finds_what_equals_it() -> None:
    class Index(MetadataIndex):
        __hash__ = MetadataIndex.__hash__

        def __eq__(self, other: object) -> bool:
            return isinstance(other, MetadataIndex) and self.offset == other.offset

    class Name(str):
        __slots__ = ()

    for index in (
        Index("step", []),
        MetadataIndex(Name("step"), []),
        MetadataIndex("step", torch.Size([1 << 62])),
        MetadataIndex("step"),
    ):
        found, plain = decoded(encode_small()).storage_data, small().storage_data
        assert found.get(index) == plain.get(index)
        assert (index in found) == (index in plain)


# ---- Pickled -------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_pickle_of_metadata_that_was_handed_out_is_read_by_the_allow_list(protocol: int) -> None:
    data = pickle.dumps(decoded(encode_small()), protocol=protocol)
    with hp.watched():
        found = load_stock_metadata(data, PATH)
    for one in (found, pickle.loads(data)):
        assert [type(getattr(one, field)) for field in FIELDS] == [dict] * 3
        assert canonical(one) == canonical(small())


class Reduced:
    """Pickled as whatever it is told."""

    def __init__(self, parts: Callable[[], tuple[Any, ...]]) -> None:
        self.parts = parts

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.parts()


DICTS_THAT: dict[str, Callable[[], tuple[Any, ...]]] = {
    "have arguments": lambda: (dict, ([("w", 1)],)),
    "are appended to": lambda: (dict, (), None, iter([1])),
    "have a state": lambda: (dict, (), {"planted": 1}),
    "have a key without a hash": lambda: (dict, (), None, None, iter([([], 1)])),
}


@pytest.mark.parametrize("field", FIELDS)
def test_pickled_call_of_dict_that_does_more_than_fill_it_is_corruption(field: str) -> None:
    def check(parts: Callable[[], tuple[Any, ...]]) -> None:
        metadata = small()
        setattr(metadata, field, Reduced(parts))
        with hp.watched(), pytest.raises(CorruptionError) as caught:
            load_stock_metadata(pickle.dumps(metadata), PATH)
        assert caught.value.path == PATH

    check_rows(DICTS_THAT, check)


# ---- Made on demand ------------------------------------------------------------------------------


def test_names_counts_and_outlines_make_no_chunk_and_no_place() -> None:
    found = decoded(many(5, 7))
    entries, places = found.state_dict_metadata, found.storage_data
    assert isinstance(entries, StoredEntries)
    assert [*entries] == [f"t{t}" for t in range(5)] == [*entries.keys()]
    assert (len(entries), len(places), "t3" in entries, bool(places)) == (5, 35, True, True)
    outline = entries.outline("t3")
    assert (outline.size, outline.properties, outline.chunks) == ((7, 2), TensorProperties(), [])
    assert entries.outline("missing") is None
    assert entries.chunks("t3") == 3
    assert MetadataIndex("t1", [9, 0]) not in places
    assert entries.columns.made_count == 0


def test_an_entry_makes_its_own_chunks_and_an_index_its_own_place_once() -> None:
    found = decoded(many(5, 7))
    entries, places = found.state_dict_metadata, found.storage_data
    assert isinstance(entries, StoredEntries)
    columns = entries.columns
    for _ in range(2):
        assert len(entries["t2"].chunks) == 7  # type: ignore[union-attr]
        assert places[MetadataIndex("t4", [6, 0])].length == 6
    assert columns.made_count == 7 + 1
    assert entries.outline("t2") is entries["t2"]
    assert entries.chunks("t2") is entries["t2"].chunks  # type: ignore[union-attr]
    assert len(list(entries.values())) == 5
    assert columns.made_count == 5 * 7 + 1
    assert len(dict(places)) == 35
    assert columns.made_count == 5 * 7 + 35


def test_planner_data_is_made_when_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    found = decoded(many(2, 1)).planner_data
    assert isinstance(found, StoredPaths)
    make = found.columns
    monkeypatch.setattr(found, "columns", lambda: calls.append(1) or make())
    assert not calls
    assert found == {"t0": ("t0",), "t1": ("t1",)}
    assert found["t0"] == ("t0",)
    assert calls == [1]


def test_open_file_is_decoded_without_its_pickle_in_memory(tmp_path: Path) -> None:
    data = many(10, 100)
    tail = metadata_parts.TAIL.unpack(data[-64:])
    (tmp_path / ".metadata").write_bytes(data)
    asked: list[int] = []
    part = SmallFile.part

    def noted(self: SmallFile, offset: int, nbytes: int) -> bytes:
        asked.append(nbytes)
        return part(self, offset, nbytes)

    with (
        Directory(tmp_path) as opened,
        opened.open_small(".metadata") as file,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(SmallFile, "part", noted)
        patch.setattr(metadata_parts, "_PIECE_BYTES", 4096)
        found = decode_metadata(file, PATH)
    assert canonical(found.metadata) == canonical(pickle.loads(data))
    assert sorted(asked)[-2:] == [4096, tail[4]]  # a piece of the pickle, and the columns
    assert sum(asked) - asked.count(8) * 8 == len(data)


# ---- Hostile columns -----------------------------------------------------------------------------

EXTREMES = [-I64 - 1, -I64, -2, -1, 0, 1, 2, 3, 255, 1 << 32, 1 << 61, 1 << 62, I64 - 1, I64]


@st.composite
def changes(draw: st.DrawFn) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """Values put, added and removed anywhere in the columns."""
    at = st.integers(0, 1000)
    rows = st.tuples(at, at, st.sampled_from(EXTREMES), st.integers(0, 2))
    chosen = draw(st.lists(rows, min_size=1, max_size=3))

    def change(_: dict[str, Any], columns: dict[str, Any]) -> None:
        for which, at, value, kind in chosen:
            column = columns[sorted(columns)[which % len(columns)]]
            fitting = value if isinstance(column, list) else value & 255
            if kind == 0 and column:
                column[at % len(column)] = fitting
            elif kind == 1:
                column.insert(at % (len(column) + 1), fitting)
            elif column:
                del column[at % len(column)]

    return change


def decoding(data: bytes) -> Any:
    try:
        return canonical(decoded(data))
    except DcpxError as error:
        return type(error), error.path, str(error).split(":")[0]


@given(changes())
def test_forged_columns_are_refused_or_read_as_by_an_eager_decoder(change: Any) -> None:
    data = forge(change)
    found = decoding(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata_module, "open_columns", decode_at_once)
        assert decoding(data) == found
