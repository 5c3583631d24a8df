"""`verify` of what `export` writes: every flipped bit of a torch file, the form of safetensors."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support.saves import change

import torch_dcpx as dcpx


def state() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    return {f"layer{i}": torch.randn(100, 70, generator=g) for i in range(6)}


def kinds(report: Any) -> set[str]:
    return {finding.kind for finding in report.faults}


@pytest.mark.parametrize("target", ["y.pt", "y.bin", "out"])
def test_whole_torch_file_is_compared_with_its_checksums(tmp_path: Path, target: str) -> None:
    dcpx.export(state(), tmp_path / target, format="torch", no_dist=True)
    calls: list[tuple[int, int]] = []
    report = dcpx.verify(tmp_path / target, progress=lambda *at: calls.append(at))
    assert report.ok
    assert report.path == str(tmp_path / target)
    assert str(report).startswith(f"'{tmp_path / target}' is whole: 6 parts")
    assert report.findings == ()
    assert (report.files, report.items) == (1, 6)
    assert report.checked_bytes > 6 * 100 * 70 * 4
    assert calls
    assert calls[-1][0] == calls[-1][1]


def test_flipped_bit_in_any_tensor_of_a_torch_file_names_it(tmp_path: Path) -> None:
    path = tmp_path / "y.pt"
    dcpx.export(state(), path, no_dist=True)
    with zipfile.ZipFile(path) as held:
        begins = {row.filename: row.header_offset for row in held.infolist()}
    for number in range(6):
        at = begins[f"archive/data/{number}"] + 12_345
        before = change(path, at, b"\0")
        change(path, at, bytes([before[0] ^ 4]))
        (fault,) = dcpx.verify(path).faults
        assert (fault.kind, fault.file) == ("data", "y.pt")
        assert fault.fqns == (f"layer{number}",)
        change(path, at, before)
    assert dcpx.verify(path).ok


def test_damage_around_the_tensors_of_a_torch_file_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "y.pt"
    dcpx.export(state(), path, no_dist=True)
    data = path.read_bytes()
    flips = (data.index(b"layer3"), data.rindex(b"PK\x01\x02") + 20)
    for one in (data[:-30], b"", *(data[:at] + b"\x7f" + data[at + 1 :] for at in flips)):
        path.write_bytes(one)
        report = dcpx.verify(path)
        assert not report.ok
        assert {fault.file for fault in report.faults} == {"y.pt"}


def test_torch_file_with_a_class_is_summed_and_its_names_are_a_note(tmp_path: Path) -> None:
    class Own:
        pass

    Own.__qualname__ = Own.__name__ = "Own"
    globals()["Own"] = Own
    torch.save({"w": torch.ones(50), "own": Own()}, tmp_path / "y.pt")
    report = dcpx.verify(tmp_path / "y.pt")
    assert report.ok
    assert [note.kind for note in report.notes] == ["unchecked"]
    assert "Own" in str(report)
    assert report.checked_bytes > 200


@pytest.mark.parametrize(
    "target", ["y.safetensors", "out", "shards", "shards/model.safetensors.index.json"]
)
def test_whole_safetensors_have_a_note_that_bytes_were_not_compared(
    tmp_path: Path, target: str
) -> None:
    most = 60_000 if "shards" in target else "5GB"
    dcpx.export(state(), tmp_path / target.split("/")[0], max_shard_bytes=most, no_dist=True)
    report = dcpx.verify(tmp_path / target)
    files = 3 if "shards" in target else 1
    assert report.ok
    assert (report.files, report.items, report.checked_bytes) == (files, 6, 0)
    assert [note.kind for note in report.notes] == ["unchecked"] * files
    assert "hold no checksums" in str(report)


def test_damaged_safetensors_have_a_fault_that_names_the_file(tmp_path: Path) -> None:
    dcpx.export(state(), tmp_path, max_shard_bytes=60_000, no_dist=True)
    index = tmp_path / "model.safetensors.index.json"
    file = tmp_path / "model-00002-of-00003.safetensors"
    data, names = file.read_bytes(), json.loads(index.read_text())
    names["weight_map"]["none"] = file.name
    for path, content, kind in (
        (file, data[:-1], "metadata"),
        (file, data[:9] + b"\xff" + data[10:], "metadata"),
        (file, None, "missing"),
        (index, json.dumps(names).encode(), "disagreement"),
        (index, b"{", "metadata"),
    ):
        whole = path.read_bytes()
        path.unlink() if content is None else path.write_bytes(content)
        report = dcpx.verify(tmp_path)
        assert kinds(report) == {kind}
        assert report.faults[0].file == path.name
        path.write_bytes(whole)


def test_links_are_a_question_without_an_answer(tmp_path: Path) -> None:
    dcpx.export(state(), tmp_path / "out", max_shard_bytes=60_000, no_dist=True)
    torch.save({"w": torch.ones(2)}, tmp_path / "y.pt")
    shard = tmp_path / "out/model-00002-of-00003.safetensors"
    for file in (shard, tmp_path / "y.pt"):
        file.rename(tmp_path / "other")
        file.symlink_to(tmp_path / "other")
        with pytest.raises(dcpx.UnsupportedError, match="is a link"):
            dcpx.verify(tmp_path / "out" if file == shard else file)


def test_tensors_that_the_index_does_not_name_are_a_note_and_left_out(tmp_path: Path) -> None:
    dcpx.export(state(), tmp_path, max_shard_bytes=60_000, no_dist=True)
    index = tmp_path / "model.safetensors.index.json"
    weights = json.loads(index.read_text())
    file = weights["weight_map"].pop("layer3")
    index.write_text(json.dumps(weights))
    report = dcpx.verify(tmp_path)
    assert report.ok
    assert [(n.file, n.fqns) for n in report.notes if n.kind == "leftover"] == [(file, ("layer3",))]
    assert set(dcpx.load_tensors(tmp_path)) == set(state()) - {"layer3"}


def test_path_that_is_nothing_stays_an_error_and_a_checkpoint_a_checkpoint(tmp_path: Path) -> None:
    for name in ("nope.pt", "nope.safetensors", "nope"):
        with pytest.raises(dcpx.NotCommittedError, match=name):
            dcpx.verify(tmp_path / name)
    dcpx.save(state(), tmp_path / "ckpt", no_dist=True)
    dcpx.export(state(), tmp_path / "out", no_dist=True)
    (tmp_path / "out/model.safetensors").rename(tmp_path / "ckpt/model.safetensors")
    assert dcpx.verify(tmp_path / "ckpt").metadata_files == (".metadata",)
    (tmp_path / "ckpt" / ".metadata").unlink()
    assert kinds(dcpx.verify(tmp_path / "ckpt")) == {"uncommitted"}
