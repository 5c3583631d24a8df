"""Files of two saves are never one checkpoint: each says which save it is of, and is believed."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.rank_saves import save_ranks, sharded, write_ranks
from support.saves import (
    assert_loads,
    committed_ids,
    data_files,
    files_in,
    load,
    note_save,
    raises_one,
    read_footer,
    save,
    save_ids,
)
from support.states import blank_like

import torch_dcpx as dcpx
from torch_dcpx import CorruptionError, PlanError, RepairError
from torch_dcpx.metadata.file import decode_metadata, encode_metadata
from torch_dcpx.metadata.parts import TAIL


def state_of(value: float) -> dict[str, Any]:
    return {"m": torch.full((9, 3), value), "n": torch.full((5,), value), "step": value}


def killed(directory: Path, value: float, ranks: int = 3) -> str:
    """Leaves what a save that is killed before its commit leaves; returns its id."""
    write_ranks(sharded(state_of(value), ranks), directory)
    (save_id,) = set(save_ids(directory).values())
    return save_id


def refused(directory: Path, match: str, **kwargs: Any) -> RepairError:
    """Asserts that a repair is refused, whatever is accepted, and that no file has changed."""
    before = files_in(directory)
    for dry_run in (True, False):
        with pytest.raises(RepairError, match=match) as caught:
            dcpx.repair(directory, dry_run=dry_run, accept_assumptions=True, **kwargs)
        assert files_in(directory) == before
    return caught.value


# ---- repair --------------------------------------------------------------------------------------


def test_files_of_two_killed_saves_make_no_checkpoint(tmp_path: Path) -> None:
    first, second = killed(tmp_path / "a", 1.0), killed(tmp_path / "b", 2.0)
    shutil.copy(tmp_path / "b/__2_0.distcp", tmp_path / "a")
    named = f"of {first}: '__0_0.distcp', '__1_0.distcp'; of {second}: '__2_0.distcp'"
    error = refused(tmp_path / "a", "2 saves")
    assert named in str(error)
    names = ("__0_0.distcp", "__1_0.distcp", "__2_0.distcp")
    assert error.candidates == names
    refused(tmp_path / "a", "2 saves", files=names)  # nobody can vouch for what is not so
    (tmp_path / "a/__2_0.distcp").unlink()
    refused(tmp_path / "a", "do not hold all of")


def test_file_that_was_renamed_to_another_ranks_is_refused(tmp_path: Path) -> None:
    """Its names hold no hole then, and it alone is half of a save."""
    killed(tmp_path, 1.0, ranks=2)
    (tmp_path / "__1_0.distcp").replace(tmp_path / "__0_0.distcp")
    refused(tmp_path, "'__0_0.distcp' was written by rank 1")


def test_killed_save_is_repaired_where_the_caller_says_that_it_had_ended(tmp_path: Path) -> None:
    save_id = killed(tmp_path, 1.0)
    before = files_in(tmp_path)
    said = dcpx.repair(tmp_path, dry_run=True)
    with pytest.raises(RepairError, match="the save had ended") as caught:
        dcpx.repair(tmp_path)
    assert files_in(tmp_path) == before
    assert caught.value.assumptions == said.assumptions
    assert caught.value.candidates == tuple(data_files(tmp_path))
    assert not any("of one save" in text for text in said.assumptions)  # that is proved
    done = dcpx.repair(tmp_path, accept_assumptions=True)
    assert (done.assumptions, done.repaired) == (said.assumptions, said.repaired)
    assert [one.save_id for one in done.repaired] == [save_id]
    assert committed_ids(tmp_path) == {save_id}
    assert_loads(state_of(1.0), tmp_path)
    assert dcpx.verify(tmp_path).ok


def test_files_that_name_no_save_are_assumed_to_be_of_one(tmp_path: Path) -> None:
    save_id = killed(tmp_path, 1.0)
    note_save(tmp_path / "__1_0.distcp")
    error = refused(tmp_path, "do not say of which save")
    names = error.candidates or ()
    said = dcpx.repair(tmp_path, files=names, dry_run=True)
    assert any(text.endswith("of which: '__1_0.distcp'") for text in said.assumptions)
    assert said.repaired[0].save_id == save_id
    for name in names:
        note_save(tmp_path / name)
    said = dcpx.repair(tmp_path, dry_run=True)
    assert any("all files are of one save" in text for text in said.assumptions)
    dcpx.repair(tmp_path, accept_assumptions=True)
    assert_loads(state_of(1.0), tmp_path)
    assert dcpx.verify(tmp_path).ok


@pytest.mark.parametrize("left", ["columns", "pickle"])
def test_damaged_metadata_takes_no_file_of_another_save(tmp_path: Path, left: str) -> None:
    save_ranks(sharded(state_of(1.0), 3), tmp_path)
    killed(tmp_path / "b", 2.0)
    path = tmp_path / ".metadata"
    whole = path.read_bytes()
    pickle_bytes = TAIL.unpack(whole[-TAIL.size :])[3]
    damaged = {"columns": b"\xff" + whole[1:], "pickle": whole[:pickle_bytes]}[left]
    path.write_bytes(damaged)
    own = (tmp_path / "__2_0.distcp").read_bytes()
    shutil.copy(tmp_path / "b/__2_0.distcp", tmp_path)
    refused(tmp_path, "2 saves" if left == "pickle" else "another save")
    (tmp_path / "__2_0.distcp").write_bytes(own)
    (made,) = dcpx.repair(tmp_path, accept_assumptions=left == "pickle").repaired
    assert (made.source, made.save_id) == (left, read_footer(tmp_path / "__0_0.distcp").save_id)
    assert_loads(state_of(1.0), tmp_path)


# ---- verify and load -----------------------------------------------------------------------------


def mixed(directory: Path, change: Callable[[Path], object]) -> None:
    """Makes a checkpoint whose file table names a file that `change` has changed."""
    save_ranks(sharded(state_of(1.0), 3), directory)
    change(directory / "__2_0.distcp")
    path = directory / ".metadata"
    found = decode_metadata(path.read_bytes(), str(path))
    files = dict(found.files or {})
    data = (directory / "__2_0.distcp").read_bytes()
    (crc,) = struct.unpack("<I", data[-4:])
    entry = files["__2_0.distcp"]
    files["__2_0.distcp"] = entry._replace(file_id=data[-112:-96], footer_crc=crc)
    path.write_bytes(encode_metadata(found.metadata, list(files.values()), found.save_id))


def test_checkpoint_that_names_a_file_of_another_save_is_seen(tmp_path: Path) -> None:
    killed(tmp_path / "b", 2.0)
    mixed(tmp_path / "a", lambda path: shutil.copy(tmp_path / "b" / path.name, path))
    (fault,) = dcpx.verify(tmp_path / "a").faults
    other = read_footer(tmp_path / "b/__2_0.distcp").save_id
    (committed,) = committed_ids(tmp_path / "a")
    assert (fault.kind, fault.file, fault.offset) == ("generation", "__2_0.distcp", 0)
    assert (fault.expected, fault.found) == (f"save id {committed}", f"save id {other}")
    target = blank_like(state_of(0.0))
    untouched = blank_like(state_of(0.0))
    with pytest.raises(CorruptionError, match="another save") as caught:
        dcpx.load(target, tmp_path / "a", no_dist=True)
    error = caught.value
    assert (error.path, error.touched) == (str(tmp_path / "a/__2_0.distcp"), ())
    assert (error.expected, error.found) == (f"save id {committed}", f"save id {other}")
    assert torch.equal(target["m"], untouched["m"])
    with raises_one(CorruptionError) as raised:
        dcp.load(target, storage_reader=dcpx.DcpxReader(tmp_path / "a"), no_dist=True)
    assert "another save" in str(raised.error)


def test_file_or_metadata_that_names_no_save_goes_with_any(tmp_path: Path) -> None:
    mixed(tmp_path, note_save)
    assert dcpx.verify(tmp_path).findings == ()
    assert_loads(state_of(1.0), tmp_path)
    save(state_of(2.0), tmp_path)
    path = tmp_path / ".metadata"
    found = decode_metadata(path.read_bytes(), str(path))
    files = list((found.files or {}).values())
    for save_id in ("", "a name"):
        path.write_bytes(encode_metadata(found.metadata, files, save_id))
        assert dcpx.verify(tmp_path).findings == ()
        assert_loads(state_of(2.0), tmp_path)


# ---- Commit --------------------------------------------------------------------------------------


def test_results_of_another_save_are_not_committed(tmp_path: Path) -> None:
    save(state_of(0.0), tmp_path)
    before = load(state_of(0.0), tmp_path)
    writer, metadata, results = write_ranks(sharded(state_of(1.0), 2), tmp_path)
    *_, others = write_ranks(sharded(state_of(2.0), 2), tmp_path / "other")
    for file in others[1].files:
        shutil.copy(tmp_path / "other" / file.path, tmp_path)
    with pytest.raises(PlanError, match="ranks mix two saves, nothing is published") as caught:
        writer.finish(metadata, [results[0], others[1]])
    assert others[1].files[0].save_id.hex() in str(caught.value)
    assert torch.equal(load(state_of(0.0), tmp_path)["m"], before["m"])
    assert dcpx.verify(tmp_path).ok


def test_every_file_of_a_save_says_the_same(tmp_path: Path) -> None:
    save_ranks(sharded(state_of(1.0), 3), tmp_path, options=dcpx.WriteOptions(files_per_rank=2))
    first = save_ids(tmp_path)
    assert len(first) > 3
    assert set(first.values()) == committed_ids(tmp_path)
    save_ranks(sharded(state_of(2.0), 3), tmp_path)
    assert set(save_ids(tmp_path).values()) == committed_ids(tmp_path) != set(first.values())
    assert len(data_files(tmp_path)) == 3
