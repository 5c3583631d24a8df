"""Files of torch's HuggingFaceStorageWriter: tensors in parts, whole or refused, never a part."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as st
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import torch_dcpx as dcpx

WHOLE = torch.arange(24.0).reshape(8, 3)
Part = tuple[torch.Tensor, list[int]]


def write_part(
    folder: Path, rank: int, parts: dict[str, Part], model: int = 1, models: int = 1
) -> Path:
    """Writes a file as torch's writer does."""
    note = {name: {"saved_offsets": at} for name, (_, at) in parts.items()}
    notes = {"DCP_SHARDING_INFO": json.dumps(note), "DCP_VERSION": "1.0", "format": "pt"}
    path = folder / f"shard-{rank:05}-model-{model:05}-of-{models:05}.safetensors"
    st.save_file({name: one.contiguous() for name, (one, _) in parts.items()}, path, notes)
    return path


def write_rows(folder: Path, ends: list[int]) -> list[Path]:
    """Writes rows of WHOLE by rank, and a tensor that rank 1 alone has."""
    begins = [0, *ends[:-1]]
    files = []
    for rank, (begin, end) in enumerate(zip(begins, ends, strict=True), 1):
        parts: dict[str, Part] = {"w": (WHOLE[begin:end], [begin, 0])}
        if rank == 1:
            parts["r"] = torch.ones(5), [0]
        files.append(write_part(folder, rank, parts))
    return files


CALLS: dict[str, Callable[[Path], Any]] = {
    "load_tensors": dcpx.load_tensors,
    "open_checkpoint": dcpx.open_checkpoint,
    "export": lambda path: dcpx.export(path, path.with_name("out"), no_dist=True),
    "verify": dcpx.verify,
    "load_pretrained": lambda path: dcpx.load_pretrained(
        nn.ParameterDict({"w": nn.Parameter(torch.zeros(4, 3))}), path, no_dist=True
    ),
}


def test_parts_of_all_ranks_are_the_whole_tensor_at_every_door(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "hf").mkdir()
    write_rows(tmp_path / "hf", [3, 6, 8])
    with caplog.at_level(logging.WARNING, "torch_dcpx"):
        found = dcpx.load_tensors(tmp_path / "hf")
    assert "3 ranks; no file says if there were more" in caplog.text
    assert torch.equal(found["w"], WHOLE) and torch.equal(found["r"], torch.ones(5))
    with dcpx.open_checkpoint(tmp_path / "hf") as held:
        assert torch.equal(held["w"][2:7], WHOLE[2:7])
    dcpx.export(tmp_path / "hf", tmp_path / "out", no_dist=True)
    assert torch.equal(dcpx.load_tensors(tmp_path / "out")["w"], WHOLE)
    report = dcpx.verify(tmp_path / "hf")
    assert report.ok and report.files == 3 and "form" in report.proved
    assert "none says how many ranks there were" in str(report)
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(8, 3))})
    dcpx.load_pretrained(model, tmp_path / "hf", no_dist=True)
    assert torch.equal(model["w"], WHOLE)


def test_parts_are_cut_in_any_dimension_and_over_several_files_of_a_rank(tmp_path: Path) -> None:
    for rank, begin in enumerate((0, 1, 2), 1):
        write_part(tmp_path, rank, {"x": (torch.ones(1), [begin])}, 2, 2)
    write_part(tmp_path, 1, {"w": (WHOLE[:, :2], [0, 0])}, models=2)
    write_part(tmp_path, 2, {"w": (WHOLE[:5, 2:], [0, 2]), "y": (WHOLE[0], [0])}, models=2)
    write_part(tmp_path, 3, {"w": (WHOLE[5:, 2:], [5, 2]), "y": (WHOLE[0, :0], [3])}, models=2)
    found = dcpx.load_tensors(tmp_path)
    assert torch.equal(found["w"], WHOLE) and torch.equal(found["x"], torch.ones(3))
    assert torch.equal(found["y"], WHOLE[0])


@pytest.mark.parametrize("lost", [(3, 1), (2, 2)])
def test_file_that_may_be_missing_is_named(tmp_path: Path, lost: tuple[int, int]) -> None:
    for rank, begin in enumerate((0, 3, 6), 1):
        write_part(tmp_path, rank, {"w": (WHOLE[begin : begin + 3], [begin, 0])}, 1, 2)
        write_part(tmp_path, rank, {f"own{rank}": (WHOLE, [0, 0])}, 2, 2)
    name = f"shard-{lost[0]:05}-model-{lost[1]:05}-of-00002.safetensors"
    (tmp_path / name).unlink()
    for call in CALLS.values():
        with pytest.raises(dcpx.UnsupportedError, match=f"lacks '{name}'"):
            call(tmp_path)


def test_files_that_are_not_those_of_one_save_are_damage(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("between", "mappings", "more ranks", "dtypes")]
    for folder in folders:
        folder.mkdir()
    for rank in (1, 3):
        write_part(folders[0], rank, {f"own{rank}": (WHOLE, [0, 0])})
    with pytest.raises(dcpx.UnsupportedError, match="lacks 'shard-00002-model"):
        dcpx.load_tensors(folders[0])
    for rank in (1, 2):
        write_part(folders[1], rank, {f"own{rank}": (WHOLE, [0, 0])})
        write_part(folders[1], rank, {f"old{rank}": (WHOLE, [0, 0])}, 2, 2)
    for ends in ([2, 4, 6, 8], [4, 8]):
        write_rows(folders[2], ends)
    write_part(folders[3], 1, {"w": (WHOLE[:4], [0, 0])})
    write_part(folders[3], 2, {"w": (WHOLE[4:].half(), [4, 0])})
    twice = r"hold \[\d:\d, 0:3\] of 'shard-.*twice: .*several saves"
    said = ("several saves", twice, "several dtypes")
    for folder, text in zip(folders[1:], said, strict=True):
        with pytest.raises(dcpx.CorruptionError, match=text):
            dcpx.load_tensors(folder)


def test_whole_tensors_of_several_ranks_come_with_the_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in (1, 2):
        write_part(tmp_path, rank, {f"own{rank}": (WHOLE, [0, 0])})
    with caplog.at_level(logging.WARNING, "torch_dcpx"):
        assert list(dcpx.load_tensors(tmp_path)) == ["own1", "own2"]
    assert "2 ranks; no file says if there were more" in caplog.text


@pytest.mark.parametrize("name", ["model.safetensors", "x.safetensors", "index"])
def test_parts_beside_whole_tensors_hide_in_no_folder(tmp_path: Path, name: str) -> None:
    write_rows(tmp_path, [4, 8])
    stale = {"w": torch.zeros(8, 3), "r": torch.zeros(5)}
    if name == "index":
        writer = dcp.HuggingFaceStorageWriter(path=str(tmp_path))
        dcp.save(stale, storage_writer=writer, no_dist=True)
        name = "model.safetensors.index.json"
    else:
        st.save_file(stale, tmp_path / name)
    with pytest.raises(dcpx.NotCommittedError, match="files of ranks") as caught:
        dcpx.load_tensors(tmp_path)
    assert name in str(caught.value)
    assert not dcpx.load_tensors(tmp_path / name)["w"].any()  # the way out


def test_sharded_folder_is_as_its_consolidated_tensors_say(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sharded").mkdir()
    st.save_file({"w": WHOLE, "r": torch.ones(5)}, tmp_path / "model-00001-of-00001.safetensors")
    files = write_rows(tmp_path / "sharded", [3, 6, 8])
    with caplog.at_level(logging.WARNING, "torch_dcpx"):
        assert torch.equal(dcpx.load_tensors(tmp_path / "sharded")["w"], WHOLE)
    assert not caplog.text
    files[2].unlink()
    with pytest.raises(dcpx.CorruptionError, match=r"'w'.*\[6, 3\].*\[8, 3\]"):
        dcpx.load_tensors(tmp_path / "sharded")
    assert [one.kind for one in dcpx.verify(tmp_path / "sharded").faults] == ["disagreement"]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_s_file_is_refused_and_its_folder_named(tmp_path: Path, rank: int) -> None:
    files = write_rows(tmp_path, [4, 8])
    file = files.pop(rank)
    for call in CALLS.values():
        with pytest.raises(dcpx.UnsupportedError, match="name the folder"):
            call(file)
    file.rename(tmp_path / "model.safetensors")
    files[0].unlink()
    for call in CALLS.values():
        with pytest.raises(dcpx.UnsupportedError, match="HuggingFaceStorageWriter"):
            call(tmp_path)


def test_the_only_file_there_is_refused(tmp_path: Path) -> None:
    first, second = write_rows(tmp_path, [4, 8])
    second.unlink()
    for call in CALLS.values():
        with pytest.raises(dcpx.UnsupportedError, match=r"one rank.*put the files of all ranks"):
            call(tmp_path)
    first.rename(tmp_path / "model-00001-of-00001.safetensors")  # the way out, if it is all
    assert dcpx.load_tensors(tmp_path)["w"].shape == (4, 3)


@pytest.mark.parametrize("lost", [0, 1])
def test_hole_is_damage(tmp_path: Path, lost: int) -> None:
    write_rows(tmp_path, [3, 6, 8])[lost].unlink()
    with pytest.raises(dcpx.CorruptionError, match=r"lack element.*a file is missing"):
        dcpx.load_tensors(tmp_path)
    report = dcpx.verify(tmp_path)
    assert [fault.kind for fault in report.faults] == ["disagreement"]


def test_note_that_says_no_offsets_is_damage(tmp_path: Path) -> None:
    offsets = ("3", "[0]", "[0, -1]", "[9223372036854775807, 0]", '"00"')
    notes = ["{", "[]", '{"w": 3}', *(f'{{"w": {{"saved_offsets": {at}}}}}' for at in offsets)]
    for note in notes:
        st.save_file({"w": WHOLE}, tmp_path / "x.safetensors", {"DCP_SHARDING_INFO": note})
        with pytest.raises(dcpx.CorruptionError, match="DCP_SHARDING_INFO"):
            dcpx.load_tensors(tmp_path)


def test_index_over_parts_is_refused(tmp_path: Path) -> None:
    files = write_rows(tmp_path, [4, 8])
    index = {"weight_map": {"w": files[1].name, "r": files[0].name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(dcpx.UnsupportedError, match="what one rank had"):
        dcpx.load_tensors(tmp_path / "model.safetensors.index.json")


def test_what_torch_writes_whole_is_whole(tmp_path: Path) -> None:
    writer = dcp.HuggingFaceStorageWriter(path=str(tmp_path / "one"))
    dcp.save({"w": WHOLE, "r": torch.ones(5)}, storage_writer=writer, no_dist=True)
    assert torch.equal(dcpx.load_tensors(tmp_path / "one")["w"], WHOLE)
    writer = dcp.HuggingFaceStorageWriter(
        path=str(tmp_path / "both"), save_distributed=True, enable_consolidation=True
    )
    dcp.save({"w": WHOLE, "r": torch.ones(5)}, storage_writer=writer, no_dist=True)
    assert torch.equal(dcpx.load_tensors(tmp_path / "both")["w"], WHOLE)
    with pytest.raises(dcpx.UnsupportedError, match="nothing says that there were no others"):
        dcpx.load_tensors(tmp_path / "both/sharded")
