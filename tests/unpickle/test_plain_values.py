"""Python objects on the short ways: C++ writes and reads what torch.save and stock's planner do."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from support.engine_jobs import scratch
from support.rows import check_rows
from support.saves import data_files, load, read_footer, save
from support.states import assert_same
from support.zip_samples import saved
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from torch_dcpx import _C, DcpxReader, ReadOptions, UnsafePickleError
from torch_dcpx import _hooks as planner_hooks
from torch_dcpx.errors import DcpxError
from torch_dcpx.reader import bytes as read_bytes
from torch_dcpx.unpickle.byte_items import decode_byte_item
from torch_dcpx.writer import table as write_table

values = st.one_of(
    st.integers(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(),
)


def framed(pickled: bytes) -> bytes:
    """Returns the archive that C++ makes of a pickle, whatever it says."""
    with scratch() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_table.pickle, "dumps", lambda *_, **__: pickled)
        save({"v": 1}, directory)
        patch.undo()
        path = directory / data_files(directory)[0]
        (row,) = read_footer(path).rows
        return path.read_bytes()[row.item_offset :][: row.item_bytes]


FRAME = framed(pickle.dumps(7, 2))


@given(values)
def test_value_of_our_archive_is_that_of_the_unpickler(value: Any) -> None:
    archive = framed(pickle.dumps(value, 2))
    (found,) = _C.plain_values([archive])
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        assert found is NotImplemented
        return
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_text_of_many_bytes_is_left_to_the_unpickler(tmp_path: Path) -> None:
    short, long = "x" * (1 << 19), "x" * (1 << 20)  # to look at an archive takes a copy of it
    assert _C.plain_values([framed(pickle.dumps(short, 2))]) == [short]
    assert _C.plain_values([framed(pickle.dumps(long, 2))]) == [NotImplemented]
    save({"v": long}, tmp_path)
    assert load({"v": long}, tmp_path)["v"] == long


def test_archive_with_any_byte_changed_or_missing_is_left_to_the_parser() -> None:
    for at in range(len(FRAME)):
        changed = bytearray(FRAME)
        changed[at] ^= 1
        found = _C.plain_values([FRAME, changed, FRAME[:at]])
        assert found == [7, NotImplemented, NotImplemented], at


PICKLES = [
    b"\x80\x02X\x01\x00\x00\x00abq\x00.",  # a text that claims less than there is
    b"\x80\x02X\xff\xff\xff\xffabq\x00.",
    b"\x80\x02X\x02\x00\x00\x00abq\x01.",
    b"\x80\x02X\x01\x00\x00\x00\xffq\x00.",  # no UTF-8
    *(b"\x80\x02\x8a" + rest for rest in (b"\x00.", b"\x09" + bytes(9) + b".", b"\x02\x00.")),
    *(b"\x80\x02" + rest for rest in (b"K.", b"K\x01K\x02.", b"J\x01\x00.", b"G\x00.", b"NN.")),
    *(b"\x80\x02\x88.", b"\x80\x03K\x01.", b"\x80\x02N", b"\x80\x02.", b".", b""),
]


def test_pickle_of_another_shape_is_left_to_the_unpickler() -> None:
    def check(pickled: bytes) -> None:
        archive = framed(pickled)
        (found,) = _C.plain_values([archive])
        try:
            expected = decode_byte_item(archive, fqn="v", path="p")
        except DcpxError:
            assert found is NotImplemented
        else:
            assert found is NotImplemented or (found, type(found)) == (expected, type(expected))

    check_rows({repr(pickled): pickled for pickled in PICKLES}, check)


def test_global_in_our_own_frame_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."
    monkeypatch.setattr(write_table.pickle, "dumps", lambda *_, **__: hostile)
    save({"v": 1}, tmp_path)
    monkeypatch.undo()
    with pytest.raises(dcp.CheckpointException) as caught:
        load({"v": 1}, tmp_path)
    assert isinstance(caught.value.failures[0][0], UnsafePickleError)


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("value", [3, "x", None, {1, 2}, torch.Size([3]), {"a": [1]}], ids=repr)
def test_object_is_put_where_stocks_hook_puts_it(flatten: bool, value: Any) -> None:
    states = []
    for put in (
        lambda planner, item: planner.load_bytes(item, io.BytesIO(saved(value))),
        lambda planner, item: read_bytes.BytesFinisher(
            planner, None, ReadOptions(), lambda *_: None
        )._put(item, value),
    ):
        planner = DefaultLoadPlanner(flatten_state_dict=flatten)
        state: dict[str, Any] = {"model": {"list": [0, {"x": 0}], "y": 1}, "top": 0}
        planner.set_up_planner(state, None, False)
        for fqn in ("model.list.1.x", "model.y", "top") if flatten else ("top", "model"):
            index, none = MetadataIndex(fqn), torch.Size([0])
            put(planner, ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none))
        states.append((planner.original_state_dict, planner.state_dict))
    assert states[0] == states[1]


def test_equal_bytes_are_decoded_once_where_nobody_can_change_the_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []

    def decode(data: memoryview, **about: Any) -> Any:
        decoded.append(about["fqn"])
        return decode_byte_item(data, **about)

    monkeypatch.setattr(read_bytes, "decode_byte_item", decode)
    state = {f"size{i}": torch.Size([3, 4]) for i in range(50)}
    state |= {f"set{i}": {1, 2} for i in range(3)} | {f"int{i}": i for i in range(50)}
    save(state, tmp_path)
    found = load(state, tmp_path)
    assert_same(state, found)
    assert sorted(decoded) == ["set0", "set1", "set2", "size0"]
    found["set0"].add(3)
    assert found["set1"] == {1, 2}


@pytest.mark.parametrize("options", [ReadOptions(), ReadOptions(trusted=True)])
@pytest.mark.parametrize("is_own", [True, False])
def test_stream_of_an_overridden_hook_holds_the_value(
    tmp_path: Path, options: ReadOptions, is_own: bool
) -> None:
    found = {}

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            assert type(value) is io.BytesIO
            assert value.tell() == 0
            found[read_item.dest_index.fqn] = torch.load(value, weights_only=False)

    state = {"int": 3, "float": 0.5, "text": "é", "none": None, "set": {1, 2}}
    save(state, tmp_path, "ours" if is_own else "stock")
    reader = DcpxReader(tmp_path, options=options)
    dcp.load(dict.fromkeys(state), storage_reader=reader, planner=Planner(), no_dist=True)
    assert found == state


def test_a_number_where_an_archive_belongs_is_refused() -> None:
    with pytest.raises(TypeError):
        _C.plain_values([4096])  # no address is ever read


def test_hook_that_was_replaced_in_torchs_class_before_the_import_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"v": 7, "w": 8}, tmp_path)
    taken = []
    own = DefaultLoadPlanner.load_bytes

    def load_bytes(self: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
        taken.append(read_item.dest_index.fqn)
        own(self, read_item, value)

    monkeypatch.setattr(DefaultLoadPlanner, "load_bytes", load_bytes)
    monkeypatch.setattr(planner_hooks, "_STOCK", planner_hooks._torchs_own())  # as an import does
    assert load({"v": 0, "w": 0}, tmp_path) == {"v": 7, "w": 8}
    assert taken == ["v", "w"]


# ---- Written in C++ ------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]))
scalars = st.one_of(
    st.integers(),
    st.integers(-(1 << 4000), 1 << 4000),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    texts,
)


def records_of(item: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(item)) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def archives(directory: Path) -> dict[str, dict[str, bytes]]:
    """Returns the records of every item's archive, by the last part of the item's name."""
    path = directory / data_files(directory)[0]
    data = path.read_bytes()
    found = {}
    for row in read_footer(path).rows:
        found[row.fqn] = records_of(data[row.item_offset : row.item_offset + row.item_bytes])
    return found


@pytest.mark.slow
@given(st.lists(scalars, min_size=1, max_size=20))
def test_archive_of_a_scalar_has_the_records_of_torch_save(values: list[Any]) -> None:
    state = {f"v{i}": value for i, value in enumerate(values)}
    with scratch() as directory:
        save(state, directory)
        for name, records in archives(directory).items():
            expected = records_of(saved(state[name]))
            expected.pop("archive/.data/serialization_id")
            assert records == expected
        for reader in (DcpxReader, dcp.FileSystemReader):
            loaded = dict.fromkeys(state)
            dcp.load(loaded, storage_reader=reader(directory), no_dist=True)
            assert loaded == state
            assert list(map(type, loaded.values())) == list(map(type, values))


def test_item_is_as_long_as_its_pickle_and_the_stated_overhead(tmp_path: Path) -> None:
    save({"step": 3}, tmp_path)
    path = tmp_path / data_files(tmp_path)[0]
    (row,) = read_footer(path).rows
    pickled = archives(tmp_path)["step"]["archive/data.pkl"]
    assert row.item_bytes == len(pickled) + _C.OBJECT_ZIP_OVERHEAD
    assert (row.payload_offset, row.payload_bytes) == (row.item_offset, row.item_bytes)


class Celsius(float):
    """A subclass, which torch.save names."""


def test_all_other_values_go_through_torch_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_table, "_MAX_CHARS", 100)
    values = [Celsius(3.5), "x" * 101, (1, 2), b"bytes", {1, 2}]
    state = {repr(value): value for value in values}
    save(state, tmp_path)
    assert all("archive/.data/serialization_id" in a for a in archives(tmp_path).values())
    stock = dict.fromkeys(state)
    dcp.load(stock, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert stock == state


def test_scalars_are_written_in_windows_of_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    write = _C.WriteJob.write

    class Job(_C.WriteJob):
        def write(self, rows: Any, types: Any, **kwargs: Any) -> Any:
            calls.append(sum(len(row.source) + _C.OBJECT_ZIP_OVERHEAD for row in rows))
            return write(self, rows, types, **kwargs)

    monkeypatch.setattr("torch_dcpx.writer.files._C.WriteJob", Job)
    state = {f"v{i}": i for i in range(12_000)}
    writer_options = {"per_thread_copy_ahead": 2 << 20, "thread_count": 1}
    save(state, tmp_path, **writer_options)
    assert len(calls) > 2
    assert max(calls) <= 2 << 20
    assert load(state, tmp_path) == state
