"""What looks like the files of one save, and may be those of two, is not repaired as if it were."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_saves import save_ranks, sharded
from support.saves import assert_loads, data_files, files_in, save, save_rank_local
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

import torch_dcpx as dcpx
from torch_dcpx import RepairError, RepairReport, WriteOptions
from torch_dcpx.metadata.parts import TAIL


def state_of(value: float) -> dict[str, Any]:
    return {"m": torch.full((10, 3), value), "n": torch.full((5,), value)}


def keep_the_pickle(directory: Path) -> None:
    """Leaves what a cut of `.metadata` behind its pickle leaves."""
    data = (directory / ".metadata").read_bytes()
    (directory / ".metadata").write_bytes(data[: TAIL.unpack(data[-TAIL.size :])[3]])


def repaired(directory: Path, **kwargs: Any) -> RepairReport:
    return dcpx.repair(directory, accept_assumptions=True, **kwargs)


def refused(directory: Path, match: str, **kwargs: Any) -> None:
    before = files_in(directory)
    with pytest.raises(RepairError, match=match):
        dcpx.repair(directory, **kwargs)
    assert files_in(directory) == before


def test_pickle_takes_no_file_of_another_save_for_its_own(tmp_path: Path) -> None:
    save(state_of(0), tmp_path)
    save(state_of(1), tmp_path)  # its file's name has an id
    save(state_of(2), tmp_path / "other")
    (own,) = data_files(tmp_path)
    kept = (tmp_path / own).read_bytes()
    (tmp_path / own).write_bytes((tmp_path / "other/__0_0.distcp").read_bytes())
    keep_the_pickle(tmp_path)
    refused(tmp_path, "it was renamed")
    (tmp_path / own).write_bytes(kept)
    assert dcpx.repair(tmp_path).repaired[0].assumed == ()


def test_what_names_cannot_tell_is_said(tmp_path: Path) -> None:
    save(state_of(1), tmp_path / "one")
    keep_the_pickle(tmp_path / "one")
    (made,) = repaired(tmp_path / "one").repaired
    assert any("of another save" in text for text in made.assumed)
    save(state_of(1), tmp_path / "two", options=WriteOptions(files_per_rank=2))
    (tmp_path / "two/.metadata").unlink()
    (tmp_path / "two/__0_1.distcp").unlink()
    (made,) = repaired(tmp_path / "two").repaired
    assert any("behind its last one" in text for text in made.assumed)


def test_rank_local_metadata_names_no_file_of_another_rank(tmp_path: Path) -> None:
    for rank in range(2):
        save_rank_local(state_of(rank), tmp_path, rank)
        (tmp_path / f"__{rank}.metadata").unlink()
    first, second = data_files(tmp_path)
    why = "__1.metadata': there is no data file that it could name"
    refused(tmp_path, why, files=[first], rank_local=True, accept_assumptions=True)
    misspelt = "__7_0.distcp"
    refused(tmp_path, "No such file", files=[first, second, misspelt], rank_local=True)
    report = repaired(tmp_path, files=[first, second], rank_local=True)
    assert [one.files for one in report.repaired] == [(first,), (second,)]
    assert_loads(state_of(0), tmp_path)  # as rank 0 does


def test_checkpoint_of_all_ranks_is_not_taken_for_those_of_each(tmp_path: Path) -> None:
    for rank in range(2):
        save_rank_local(state_of(rank), tmp_path, rank)
    save_ranks(sharded(state_of(3), 2), tmp_path)  # over them; their locks stay
    (tmp_path / ".metadata").unlink()
    refused(tmp_path, "say which of them is lost")
    (made,) = repaired(tmp_path, rank_local=False).repaired
    assert (made.name, len(made.files)) == (".metadata", 2)
    assert dcpx.verify(tmp_path).ok


def test_checkpoint_that_was_being_deleted_is_not_brought_back(tmp_path: Path) -> None:
    save(state_of(1), tmp_path)
    (tmp_path / ".metadata").rename(tmp_path / ".dcpx.deleted")
    refused(tmp_path, "its manager has removed it")
    repaired(tmp_path, files=["__0_0.distcp"])
    assert dcpx.verify(tmp_path).ok


def test_names_that_no_file_can_have_are_typed_refusals(tmp_path: Path) -> None:
    for name in ("a\0b", "a\ud800b"):
        storage = {MetadataIndex("a"): _StorageInfo(name, 0, 8)}
        metadata = Metadata({"a": BytesStorageMetadata()}, None, storage)
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        refused(tmp_path, "it is good")  # what stock wrote, and no save of ours
        (tmp_path / ".metadata").unlink()
        refused(tmp_path, "file name", files=[name])
