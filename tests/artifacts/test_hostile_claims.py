"""Shapes and JSON that claim more than a file has: refused before memory or disk is taken."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

import torch_dcpx as dcpx
from torch_dcpx._json import parsed_json
from torch_dcpx._text import brief_text
from torch_dcpx.cli.app import app
from torch_dcpx.errors import CorruptionError, DcpxError, UnsupportedError
from torch_dcpx.reader.safetensors_header import parse_header

SHAPES = {"all memory": (1 << 34, 1 << 26), "6 GiB": (1 << 16, 6 << 14)}


@pytest.fixture(params=SHAPES)
def liar(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Returns a checkpoint of 2 KB whose metadata claims a large shape."""
    path, shape = tmp_path / "liar", torch.Size(SHAPES[request.param])
    dcp.save({"x": torch.zeros(4, 4, dtype=torch.uint8)}, checkpoint_id=path, no_dist=True)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    entry = metadata.state_dict_metadata["x"]
    entry.size, entry.chunks[0] = shape, ChunkStorageMetadata(torch.Size([0, 0]), shape)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


DOORS: dict[str, Callable[[Path], Any]] = {
    "load_tensors": dcpx.load_tensors,
    "a lazy tensor": lambda path: dcpx.open_checkpoint(path)["x"][...],
    "rows of it": lambda path: dcpx.open_checkpoint(path)["x"][0],
    "export": lambda path: dcpx.export(path, path.parent / "out", no_dist=True),
    "export for torch": lambda path: dcpx.export(
        path, path.parent / "out", format="torch", no_dist=True
    ),
}


def test_a_claim_is_compared_with_the_files(liar: Path) -> None:
    said = r"claims .* such as 'x' of .*the files hold"
    for call in DOORS.values():
        with pytest.raises(CorruptionError, match=said) as caught:
            call(liar)
        assert caught.value.fqn == "x"
        left = [one for one in liar.parent.rglob("*") if one.is_file() and one.parent != liar]
        assert sum(one.stat().st_size for one in left) < 1 << 20
    for arguments in (["diff", str(liar), str(liar)], ["cat", str(liar), "x"]):
        found = CliRunner().invoke(app, arguments)
        assert found.exit_code == 1 and "the files hold" in found.output


def test_an_expanded_tensor_of_a_torch_file_is_compared_too(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(1).expand(1 << 20, 1 << 20)}, tmp_path / "x.pt")
    with pytest.raises(CorruptionError, match="the files hold"):
        dcpx.load_tensors(tmp_path / "x.pt")
    torch.save({"x": torch.ones(1).expand(1 << 10, 1 << 10)}, tmp_path / "x.pt")
    assert dcpx.load_tensors(tmp_path / "x.pt")["x"].sum() == 1 << 20


def test_files_behind_links_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_dcpx.reader.claimed._ROOM_BYTES", 0)
    dcpx.save({"x": torch.ones(1000)}, tmp_path / "real", no_dist=True)
    (tmp_path / "links").mkdir()
    for one in (tmp_path / "real").iterdir():
        (tmp_path / "links" / one.name).symlink_to(one)
    dcpx.export(tmp_path / "real", tmp_path / "out", no_dist=True)
    dcpx.load_tensors(tmp_path / "out")


FLOODS = {
    "lists": b"[" + b"[]," * 3_000_000 + b"[]]",
    "dicts": b"[" + b"{}," * 3_000_000 + b"{}]",
    "pairs": b"{" + b",".join(b'"%x":1' % i for i in range(1_500_000)) + b"}",
}


@pytest.mark.parametrize("name", FLOODS)
def test_json_is_weighed_before_it_is_parsed(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_dcpx._json.json.loads", pytest.fail)
    with pytest.raises(ValueError, match=r"its \d+ B would take [\d.]+ [MG]B of memory"):
        parsed_json(FLOODS[name])
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(b'{"weight_map":{"a":"b.safetensors"},"x":' + FLOODS[name] + b"}")
    with pytest.raises(CorruptionError, match=r"[MG]B of memory"):
        dcpx.load_tensors(index)


def test_deep_json_is_a_value_error() -> None:
    for text in (b"[" * 1_000_000, b'{"a":' * 1_000_000):
        with pytest.raises(ValueError, match=r"nested too deeply|[MG]B of memory"):
            parsed_json(text)


def test_a_large_honest_index_is_read() -> None:
    files = [f"model-{i:05}.safetensors" for i in range(99)]
    names = {f"model.layers.{i}.mlp.experts.w": files[i % 99] for i in range(99_999)}
    assert parsed_json(json.dumps({"weight_map": names}).encode())["weight_map"] == names


@pytest.mark.parametrize(
    "flood",
    [
        b'"n":{' + b",".join(b'"%x":""' % i for i in range(500_000)) + b"}",
        b'"n":[' + b"[]," * 500_000 + b"[]]",
        b'"n":[' + b'"ab",' * 500_000 + b'""]',
    ],
    ids=["pairs", "lists", "texts"],
)
def test_a_header_has_what_its_tensors_need(flood: bytes) -> None:
    header = b"{" + flood + b"}"
    with pytest.raises(UnsupportedError, match="nothing that is loaded has so many"):
        parse_header(header, 8 + len(header), "p")


def test_no_error_shows_more_than_200_characters_of_a_file() -> None:
    for name in ("n" * 10_000, "a b " * 9000, "ü\n" * 5000, "'\"" * 5000):
        assert len(brief_text(name)) <= 200
        for text in (f"load '{name}': no", f"load {name!r}: no"):
            assert len(str(CorruptionError(text, fqn=name))) < 300
    assert len(str(DcpxError(f"load '{'n' * 10_000}': no"))) < 300
    paths = "/".join(["folder"] * 99)
    assert str(DcpxError(f"read '{paths}': no")) == f"read '{paths}': no"
    again = pickle.loads(pickle.dumps(CorruptionError("n" * 999, fqn="n" * 999)))
    assert len(str(again)) <= 200
    assert len(again.fqn) == 999
    longer = CorruptionError("no", fqn="n" * 999)
    longer.message += f" (item '{longer.fqn}')"  # as a reader that learns the name later
    assert len(str(longer)) < 300


LONG = "n" * 3000


@pytest.mark.parametrize("change", ["key", "file", "stored key"])
def test_no_report_shows_more_than_200_characters_of_a_name(tmp_path: Path, change: str) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    ((index, info),) = metadata.storage_data.items()
    (file,) = tmp_path.glob("*.distcp")
    file.write_bytes(bytes(file.stat().st_size))
    if change == "key":
        metadata.state_dict_metadata[LONG] = metadata.state_dict_metadata.pop("w")
    if change == "file":
        metadata.storage_data = {index: dataclasses.replace(info, relative_path=LONG)}
    else:
        metadata.storage_data = {dataclasses.replace(index, fqn=LONG): info}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    report = dcpx.verify(tmp_path)
    assert not report.ok and LONG[:201] not in str(report)
    assert LONG[:201] not in str(dcpx.ls(tmp_path))
    with pytest.raises(DcpxError) as raised:
        dcpx.load({LONG if change == "key" else "w": torch.ones(3)}, tmp_path, no_dist=True)
    assert LONG[:201] not in str(raised.value)
