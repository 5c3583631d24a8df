"""Plain Python values: their archive is made in C++, and is what torch.save makes."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from support.engine_jobs import scratch
from support.saves import data_files, load, read_footer, save

from torch_dcpx import _C, DcpxReader
from torch_dcpx.writer import table as write_table

texts = st.text(st.characters(exclude_categories=["Cs"]))
scalars = st.one_of(
    st.integers(),
    st.integers(-(1 << 4000), 1 << 4000),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    texts,
)


def archives(directory: Path) -> dict[str, dict[str, bytes]]:
    """Returns the records of every item's archive, by the last part of the item's name."""
    path = directory / data_files(directory)[0]
    data = path.read_bytes()
    found = {}
    for row in read_footer(path).rows:
        whole = io.BytesIO(data[row.item_offset : row.item_offset + row.item_bytes])
        with zipfile.ZipFile(whole) as archive:
            assert archive.testzip() is None
            found[row.fqn] = {name: archive.read(name) for name in archive.namelist()}
    return found


def torch_archive(value: object) -> dict[str, bytes]:
    data = io.BytesIO()
    torch.save(value, data)
    with zipfile.ZipFile(data) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.slow
@given(st.lists(scalars, min_size=1, max_size=20))
def test_archive_of_a_scalar_has_the_records_of_torch_save(values: list[Any]) -> None:
    state = {f"v{i}": value for i, value in enumerate(values)}
    with scratch() as directory:
        save(state, directory)
        for name, records in archives(directory).items():
            expected = torch_archive(state[name])
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


@pytest.mark.parametrize("value", [Celsius(3.5), "x" * 101, (1, 2), b"bytes", {1, 2}], ids=repr)
def test_all_other_values_go_through_torch_save(
    value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_table, "_MAX_CHARS", 100)
    state = {"value": value}
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
