"""`dcpx.inspect` returns what a checkpoint holds, and shows it in few lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.saves import WRITERS, data_files, save, save_rank_local

import torch_dcpx as dcpx

STATE = {
    "model": {"w": torch.ones(20, 30), "b": torch.ones(5, dtype=torch.int64)},
    "optimizer": {"exp_avg": torch.ones(20, 30)},
    "step": 3,
}


@pytest.mark.parametrize("writer", sorted(WRITERS))
def test_it_holds_items_parts_files_and_sums(tmp_path: Path, writer: str) -> None:
    save(STATE, tmp_path, writer)
    found = dcpx.inspect(tmp_path)
    items = {item.fqn: item for item in found.items}
    assert sorted(items) == ["model.b", "model.w", "optimizer.exp_avg", "step"]
    item = items["model.w"]
    assert (item.kind, item.dtype, item.shape) == ("tensor", "float32", (20, 30))
    (part,) = item.parts
    assert part.sizes == (20, 30) and part.nbytes == item.nbytes >= 2400
    assert part.file in data_files(tmp_path)
    assert found.parameters == 605 and found.faults == []
    assert found.dtypes == {"float32": 2, "int64": 1}
    assert found.stored_nbytes == sum(one.nbytes for one in found.items)
    assert len(str(found).splitlines()) == 6 and "605 parameters" in str(found)
    assert found._repr_html_().count("<tr>") == 5 and len(repr(found)) < 600


def test_keys_are_names_first_then_globs_and_are_summed_alone(tmp_path: Path) -> None:
    save({"w[0]": torch.ones(2), "w0": torch.ones(3), "v": torch.ones(4)}, tmp_path)
    assert [item.fqn for item in dcpx.inspect(tmp_path, "w[0]").items] == ["w[0]"]
    found = dcpx.inspect(tmp_path, ["v", "w[01]"])
    assert [item.fqn for item in found.items] == ["w0", "v"] and found.parameters == 7
    assert found.stored_nbytes == sum(item.nbytes for item in found.items)
    with pytest.raises(dcpx.UnknownNameError, match="did you mean 'w0'") as raised:
        dcpx.inspect(tmp_path, "w00")
    assert raised.value.path == str(tmp_path)
    with pytest.raises(dcpx.OptionError, match="keys"):
        dcpx.inspect(tmp_path, [3])  # type: ignore[list-item]


def test_it_has_each_ranks_own_metadata(tmp_path: Path) -> None:
    for rank in range(2):
        save_rank_local(STATE, tmp_path, rank)
    found = dcpx.inspect(tmp_path, "step")
    assert [each.metadata_file for each in found.saves] == ["__0.metadata", "__1.metadata"]
    assert len(found.items) == 2 and "each of 2 ranks saved its own" in found.head()
    assert [row[0] for row in found.table().rows] == ["__0.metadata", "__1.metadata"]


def test_what_is_no_checkpoint_or_damaged_is_said(tmp_path: Path) -> None:
    with pytest.raises(dcpx.NotCommittedError) as raised:
        dcpx.inspect(tmp_path)
    assert not raised.value.files
    save(STATE, tmp_path)
    (name,) = data_files(tmp_path)
    (tmp_path / name).rename(tmp_path / "away")
    assert dcpx.inspect(tmp_path).faults == [f"'{name}' is missing"]
    (tmp_path / "away").rename(tmp_path / name)
    (tmp_path / ".metadata").unlink()
    with pytest.raises(dcpx.NotCommittedError) as raised:
        dcpx.inspect(tmp_path)
    assert raised.value.files == 1


def test_it_opens_what_export_writes(tmp_path: Path) -> None:
    dcpx.export(STATE["model"], tmp_path / "m.safetensors", no_dist=True)
    found = dcpx.inspect(tmp_path / "m.safetensors")
    assert found.parameters == 605 and found.saves[0].written_by == "safetensors"
