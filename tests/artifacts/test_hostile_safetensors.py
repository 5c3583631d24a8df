"""Safetensors headers that lie: a typed error before anything is allocated or read."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch as st
import torch

import torch_dcpx as dcpx
from torch_dcpx import CorruptionError, ShortReadError, UnsupportedError, load
from torch_dcpx.artifacts import layout as export_layout
from torch_dcpx.reader import safetensors_header
from torch_dcpx.reader.pretrained_reader import PretrainedReader, stored_sizes
from torch_dcpx.reader.safetensors_header import HeaderEntry, encode_header, parse_header

HUGE = 10**18


def row(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> Any:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def write(path: Path, header: Any, data_bytes: int = 8, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + bytes(data_bytes))
    return path


HOSTILE = {
    "no JSON": b"{]",
    "no object": b"[1]",
    "space first": b' {"a":1}',
    "not UTF-8": b'{"\xff":1}',
    "deep": b'{"a":' * 60000,
    "twice": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32"}}',
    "row is a list": {"a": [1]},
    "field missing": {"a": {"dtype": "F32", "shape": [2]}},
    "field too many": {"a": row(extra=1)},
    "unknown dtype": {"a": row("F33")},
    "dtype is a list": {"a": row(["F32"])},
    "dtype lies": {"a": row("F64")},
    "shape lies": {"a": row(shape=[3])},
    "negative size": {"a": row(shape=[-2])},
    "size is true": {"a": row(shape=[True, 2])},
    "size is a float": {"a": row(shape=[2.0])},
    "huge size": {"a": row(shape=[HUGE], offsets=[0, 4 * HUGE])},
    "huge product": {"a": row(shape=[1 << 32, 1 << 32])},
    "huge number": b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}',
    "many dims": {"a": row(shape=[1] * 65 + [2])},
    "offset behind": {"a": row(offsets=[HUGE, HUGE + 8])},
    "offsets turned": {"a": row(offsets=[8, 0])},
    "three offsets": {"a": row(offsets=[0, 8, 8])},
    "overlap": {"a": row(), "b": row(offsets=[4, 12])},
    "gap": {"a": row(shape=[1], offsets=[4, 8])},
    "too short": {"a": row(shape=[1], offsets=[0, 4])},
    "NaN": b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}',
    "metadata": {"__metadata__": {"a": 1}, "a": row()},
}


def test_hostile_header_is_a_typed_error_that_names_the_file(tmp_path: Path) -> None:
    for what, header in HOSTILE.items():
        path = write(tmp_path / f"{what}.safetensors", header)
        with pytest.raises(CorruptionError, match=rf"{what}\.safetensors") as raised:
            stored_sizes(path)
        assert raised.value.path == str(path), what


def test_long_names_are_shortened_in_errors(tmp_path: Path) -> None:
    for count in (1, 160, 161, 100_000):
        path = write(tmp_path / "x.safetensors", {"n" * count: row("F33")})
        with pytest.raises(CorruptionError) as raised:
            stored_sizes(path)
        shown = "n" * 160 + "..." if count > 160 else "n" * count
        assert f"'{shown}'" in str(raised.value), count


@pytest.mark.parametrize("length", [0, 1, 9, 100_000_001, HUGE, (1 << 64) - 1])
def test_header_length_is_compared_with_the_file_before_it_is_read(
    tmp_path: Path, length: int
) -> None:
    for nbytes in (0, 7, 8):  # too short for a header
        (tmp_path / "model.safetensors").write_bytes(bytes(nbytes))
        with pytest.raises(CorruptionError):
            stored_sizes(tmp_path)
    path = write(tmp_path / "model.safetensors", b"{}", 4, length)
    if length == 100_000_001:
        with path.open("r+b") as file:
            file.truncate(200_000_000)  # sparse: the format's limit is what refuses it
    tracemalloc.start()
    try:
        with pytest.raises(CorruptionError, match="header is"):
            stored_sizes(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


INDICES = {
    "no JSON": "{",
    "no map": "{}",
    "map of numbers": '{"weight_map": {"a": 1}}',
    "path above": '{"weight_map": {"a": "../model.safetensors"}}',
    "absolute path": '{"weight_map": {"a": "/etc/passwd.safetensors"}}',
    "path below": '{"weight_map": {"a": "x/model.safetensors"}}',
    "other file": '{"weight_map": {"a": "model.bin"}}',
    "name is not there": '{"weight_map": {"none": "model.safetensors"}}',
}


def test_hostile_index_is_a_typed_error(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": row()})
    path = tmp_path / "model.safetensors.index.json"
    for text in INDICES.values():
        path.write_text(text)
        with pytest.raises(CorruptionError, match=r"index\.json"):
            stored_sizes(path)


def test_what_is_refused_is_refused_by_the_real_package_and_the_other_way_round(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    path = tmp_path / "model.safetensors"
    st.save_file({"a": torch.ones(3), "b": torch.arange(4), "c": torch.zeros(0)}, path)
    good = path.read_bytes()
    for _ in range(120):
        data = bytearray(good)
        for _ in range(rng.randint(1, 2)):
            data[rng.randrange(len(data) - 44)] = rng.choice(b'0123456789,:[]{}" FIU\x00\xff')
        path.write_bytes(data)
        try:
            ours: Any = stored_sizes(path)
        except CorruptionError:
            ours = None
        try:
            with safetensors.safe_open(path, "pt") as held:
                names = list(held.keys())
                theirs: Any = {n: tuple(held.get_slice(n).get_shape()) for n in names}
        except Exception:  # noqa: BLE001 - any error is a refusal
            theirs = None
        if ours is not None:  # ours may refuse more: what it takes, they take
            assert ours == theirs, bytes(data)


def test_file_that_becomes_shorter_is_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    st.save_file({"a": torch.ones(100000)}, path)
    reader = PretrainedReader(path)
    metadata = reader.read_metadata()
    with path.open("r+b") as file:
        file.truncate(2000)
    reader.read_metadata = lambda *_, **__: metadata  # type: ignore[method-assign]
    with pytest.raises(ShortReadError, match=r"model\.safetensors' is shorter"):
        load({"a": torch.zeros(100000)}, storage_reader=reader)


def test_header_of_too_many_tensors_or_values_is_refused_before_it_takes_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = b'{"a":[' + b"[]," * 6_000_000 + b"[]]}"  # 64 B of memory for 3 of the file
    tracemalloc.start()
    try:
        with pytest.raises(UnsupportedError, match=r"1200000\d values and lists"):
            parse_header(lists, len(lists) + 8, "x.safetensors")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    monkeypatch.setattr(safetensors_header, "MAX_FILE_TENSORS", 40)
    for tensors in (40, 41):
        rows = [HeaderEntry(f"t{i}", "uint8", (1,), i, i + 1) for i in range(tensors)]
        head = encode_header(rows, {"format": "pt"})
        path = tmp_path / f"{tensors}.safetensors"
        path.write_bytes(head + bytes(tensors))
        if tensors == 40:
            assert len(stored_sizes(path)) == 40
        else:
            with pytest.raises(UnsupportedError, match="names more than 40 tensors"):
                stored_sizes(path)
    monkeypatch.setattr(export_layout, "MAX_FILE_TENSORS", 40)
    out = tmp_path / "out"  # an export puts no more in a file than are read again
    report = dcpx.export({f"t{i}": torch.ones(1) for i in range(81)}, out, no_dist=True)
    assert len(report.files) == 3
    assert len(stored_sizes(out)) == 81
