"""The generation commit: names, what is removed when, and what is never published."""

from __future__ import annotations

import copy
import errno
import fcntl
import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.saves import (
    assert_loads,
    assert_whole,
    data_files,
    files_in,
    raises_one,
    referenced,
    save,
    save_rank_local,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from torch_dcpx import DcpxWriter, PlanError, StorageError, UnsupportedError
from torch_dcpx.metadata.file import encode_metadata
from torch_dcpx.storage.names import FileEntry


def state_of(seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(100, generator=g), "b": torch.randn(9, generator=g), "step": seed}


# ---- Names and removal --------------------------------------------------------------------------


@pytest.mark.parametrize("single_file", [True, False])
def test_fresh_directory_with_missing_parents_uses_stock_names(
    tmp_path: Path, single_file: bool
) -> None:
    ours = tmp_path / "a" / "b" / "c"
    save(state_of(), ours, single_file_per_rank=single_file)
    save(state_of(), tmp_path / "stock", "stock", single_file_per_rank=single_file)
    assert data_files(ours) == data_files(tmp_path / "stock")
    assert_whole(state_of(), ours)


@pytest.mark.parametrize("first", ["ours", "stock"])
@pytest.mark.parametrize("single_file", [True, False])
def test_resave_never_uses_a_name_again_and_removes_what_it_replaced(
    tmp_path: Path, first: str, single_file: bool
) -> None:
    save(state_of(0), tmp_path, first, single_file_per_rank=single_file)
    seen = set(data_files(tmp_path))
    for seed in range(1, 4):
        save(state_of(seed), tmp_path, single_file_per_rank=single_file)
        names = set(data_files(tmp_path))
        assert len(names) == (1 if single_file else 3)
        assert not names & seen
        seen |= names
        assert_whole(state_of(seed), tmp_path)


# One sign away from a name that a save gives.
NEARLY_OURS = [
    "__my_notes.distcp", "__0_0.distcp.distcp", "__0.distcp", "__0_.distcp", "__0_x.distcp",
    "__00_0.distcp", "__0_01.distcp", "__0_0.0123456789AB.distcp", "__0_0.0123456789abc.distcp",
    "__0_0.notes.distcp", "__0_0-1.distcp", "__-1_0.distcp", "__0_0_0.distcp", "__\u0663_0.distcp",
    "__0000000000_0.distcp", "__\u0663.metadata.0123456789ab.tmp", ".metadata.0123456789AB.tmp",
]  # fmt: skip


def test_leftovers_go_with_the_next_save_and_files_of_others_stay(tmp_path: Path) -> None:
    save(state_of(), tmp_path)
    leftovers = ["__0_1.distcp", "__7_0.0123456789ab.distcp", "__999999999_10.distcp"]
    others = ["meta.pt", "model.bin", "notes.distcp.txt", "x__0_0.distcp", "distcp", ".hidden",
              "__0_0.txt", ".metadata.mine", ".metadata.tmp", *NEARLY_OURS]  # fmt: skip
    for name in leftovers + others:
        (tmp_path / name).write_text(name)
    temporary = ".metadata.0123456789ab.tmp"  # of a save that was killed before its rename
    (tmp_path / temporary).write_text("x")
    (tmp_path / "__0_9.distcp").mkdir()
    (tmp_path / "__0_8.distcp").symlink_to("meta.pt")
    save(state_of(1), tmp_path)
    assert_loads(state_of(1), tmp_path)
    expected = {*others, *referenced(tmp_path), ".metadata", ".dcpx.lock",
                "__0_9.distcp", "__0_8.distcp"}  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == expected
    assert [(tmp_path / name).read_text() for name in others] == others


@pytest.mark.parametrize("format_of", ["ours", "stock"])
def test_replaced_metadata_that_names_files_outside_removes_nothing_there(
    tmp_path: Path, format_of: str
) -> None:
    ckpt = tmp_path / "ckpt"
    save(state_of(), ckpt, "stock")
    notes = ckpt / "__my_notes.distcp"
    victims = [tmp_path / "__1_0.distcp", ckpt / "meta.pt", ckpt / "sub" / "__2_0.distcp", notes]
    (ckpt / "sub").mkdir()
    for victim in victims:
        victim.write_text("kept")
    paths = ["../__1_0.distcp", str(victims[0]), "meta.pt", "sub/__2_0.distcp", ".metadata", ".."]
    paths.append(notes.name)
    metadata = pickle.loads((ckpt / ".metadata").read_bytes())
    info = next(iter(metadata.storage_data.values()))
    for number, path in enumerate(paths):
        moved = copy.copy(info)
        object.__setattr__(moved, "relative_path", path)
        metadata.storage_data[MetadataIndex(f"x{number}", None, None)] = moved
    data = pickle.dumps(metadata)
    if format_of == "ours":
        files = [FileEntry(path, bytes(16), 1, 1) for path in [info.relative_path, *paths]]
        data = encode_metadata(metadata, files, "save")
    (ckpt / ".metadata").write_bytes(data)
    save(state_of(1), ckpt)
    assert_loads(state_of(1), ckpt)
    assert [victim.read_text() for victim in victims] == ["kept"] * 4
    assert not (ckpt / "__0_0.distcp").exists()


@pytest.mark.parametrize("unreadable", [".metadata", "__3.metadata"])
def test_nothing_is_removed_where_some_metadata_cannot_be_read(
    tmp_path: Path, unreadable: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(state_of(), tmp_path)
    (tmp_path / unreadable).write_bytes(b"\x80\x04garbage")
    before = files_in(tmp_path)
    save(state_of(1), tmp_path)
    after = files_in(tmp_path)
    assert_loads(state_of(1), tmp_path)
    if unreadable == "__3.metadata":
        assert before.items() - after.items() == {(".metadata", before[".metadata"])}
    assert "is not removed" in caplog.text


def test_rank_local_save_removes_its_own_ranks_files_alone(tmp_path: Path) -> None:
    for rank in (0, 1, 11):
        save_rank_local(state_of(rank), tmp_path, rank)
        (tmp_path / f"__{rank}_7.distcp").write_text("leftover")
    before = data_files(tmp_path)
    save_rank_local(state_of(5), tmp_path, 1)
    gone = set(before) - set(data_files(tmp_path))
    assert gone == {name for name in before if name.startswith("__1_")}
    assert len(data_files(tmp_path)) == len(before) - 1


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_global_save_replaces_the_rank_local_checkpoints_of_all_ranks(
    tmp_path: Path, writer: str
) -> None:
    for rank in range(3):
        if writer == "ours":
            save_rank_local(state_of(rank), tmp_path, rank)
        else:
            dcp.save(state_of(), storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True,
                     use_collectives=False)  # fmt: skip
    save(state_of(7), tmp_path)
    assert not list(tmp_path.glob("__*.metadata"))
    assert_loads(state_of(7), tmp_path)
    assert data_files(tmp_path) == referenced(tmp_path)


def files_seen_while_saving(state: dict[str, Any], directory: Path) -> list[list[str]]:
    """Saves, and returns the data files that were there whenever an item was asked for."""
    seen: list[list[str]] = []

    class LookingPlanner(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            seen.append(data_files(directory))
            return super().resolve_data(write_item)

    dcp.save(state, storage_writer=DcpxWriter(directory), planner=LookingPlanner(), no_dist=True)
    assert seen
    return seen


class FailingPlanner(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        raise ZeroDivisionError("planned")


LEFTOVER = "__3_0.0123456789ab.distcp"


def test_leftovers_of_a_failed_save_make_room_before_the_next_writes(tmp_path: Path) -> None:
    """Ranks that succeeded in a save that failed elsewhere leave whole files behind."""
    save(state_of(), tmp_path)
    with raises_one(ZeroDivisionError):
        dcp.save(state_of(1), storage_writer=DcpxWriter(tmp_path), planner=FailingPlanner(),
                 no_dist=True)  # fmt: skip
    (tmp_path / LEFTOVER).write_bytes(bytes(1000))
    assert all(LEFTOVER not in names for names in files_seen_while_saving(state_of(2), tmp_path))
    assert_whole(state_of(2), tmp_path)


def test_files_that_no_failed_save_explains_stay_until_the_commit(tmp_path: Path) -> None:
    """A directory on each node: the coordinator of the last save may have been elsewhere."""
    save(state_of(), tmp_path)
    assert (tmp_path / ".dcpx.lock").read_bytes() == b""
    (tmp_path / LEFTOVER).write_bytes(bytes(1000))
    assert all(LEFTOVER in names for names in files_seen_while_saving(state_of(2), tmp_path))
    assert_whole(state_of(2), tmp_path)


def test_leftovers_stay_while_a_save_of_another_machine_may_be_running(tmp_path: Path) -> None:
    """Where locks do not reach other machines, the record in the lock file may."""
    save(state_of(), tmp_path)
    replaced = referenced(tmp_path)
    (tmp_path / LEFTOVER).write_bytes(bytes(1000))
    (tmp_path / ".dcpx.lock").write_text("host=elsewhere pid=7 boot=another\n")
    assert all(LEFTOVER in names for names in files_seen_while_saving(state_of(1), tmp_path))
    assert_loads(state_of(1), tmp_path)
    assert set(data_files(tmp_path)) == {*referenced(tmp_path), LEFTOVER}
    assert not set(replaced) & set(data_files(tmp_path))
    save(state_of(2), tmp_path)  # the one after that knows that nobody was there
    assert_whole(state_of(2), tmp_path)


@pytest.mark.usefixtures("no_leaks")
def test_file_of_this_save_that_is_gone_before_the_commit_publishes_nothing(
    tmp_path: Path,
) -> None:
    save(state_of(), tmp_path)
    kept = files_in(tmp_path)

    class RobbedWriter(DcpxWriter):
        def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
            for name in data_files(tmp_path):
                if name not in kept:
                    (tmp_path / name).unlink()
            super().finish(metadata, results)

    with raises_one(StorageError) as raised:
        dcp.save(state_of(1), storage_writer=RobbedWriter(tmp_path), no_dist=True)
    assert raised.error.errno == errno.ENOENT
    assert files_in(tmp_path) == kept
    assert_loads(state_of(), tmp_path)


def test_without_locks_the_replaced_files_go_and_leftovers_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, operation: int) -> None:
        if operation != fcntl.LOCK_UN:
            raise OSError(95, "Operation not supported")

    monkeypatch.setattr("torch_dcpx.storage.save_lock.fcntl.flock", refuse)
    save(state_of(), tmp_path)
    replaced = referenced(tmp_path)
    (tmp_path / "__3_0.distcp").write_text("of a save that may be running")
    save(state_of(1), tmp_path)
    assert_loads(state_of(1), tmp_path)
    assert not set(replaced) & set(data_files(tmp_path))
    assert set(data_files(tmp_path)) == {*referenced(tmp_path), "__3_0.distcp"}


def test_new_checkpoint_in_a_directory_of_somebody_else_is_synced_with_its_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def record(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", record)
    (tmp_path / "ckpt").mkdir()
    save(state_of(), tmp_path / "ckpt")
    assert str(tmp_path) in synced
    synced.clear()
    save(state_of(1), tmp_path / "ckpt")  # its entry is durable by now
    assert str(tmp_path) not in synced
    synced.clear()
    save(state_of(1), tmp_path / "quick", sync_files=False)
    assert synced == []


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_file_system_without_fsync_of_directories_is_warned_about_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    real = os.fsync

    def files_only(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        real(fd)

    monkeypatch.setattr(os, "fsync", files_only)
    monkeypatch.setattr("torch_dcpx.storage.directory._warned", set())
    for seed in range(2):
        save(state_of(seed), tmp_path / "new" / "ckpt")
    assert_whole(state_of(1), tmp_path / "new" / "ckpt")
    assert sum("cannot fsync a directory" in r.message for r in caplog.records) == 1


class Label:
    """What a planner may put into planner_data, and no allow-list knows."""


class LabellingPlanner(dcp.DefaultSavePlanner):
    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = {"label": Label()}
        return plans, metadata


def test_planner_data_of_any_class_does_not_keep_replaced_files(tmp_path: Path) -> None:
    for step in range(3):
        dcp.save(state_of(step), storage_writer=DcpxWriter(tmp_path), planner=LabellingPlanner(),
                 no_dist=True)  # fmt: skip
    assert len(data_files(tmp_path)) == 1


# ---- overwrite=False, and results that contradict the metadata ----------------------------------


def test_overwrite_false_refuses_a_checkpoint_with_stocks_text(tmp_path: Path) -> None:
    save(state_of(), tmp_path / "all", overwrite=False)
    (tmp_path / "all" / "__3_0.distcp").write_text("a leftover stays, too")
    save_rank_local(state_of(3), tmp_path / "of rank 1", 1)
    for path in (tmp_path / "all", tmp_path / "of rank 1"):
        before = files_in(path)
        for writer in (DcpxWriter, dcp.FileSystemWriter):
            if writer is DcpxWriter or path.name == "all":
                with raises_one(RuntimeError) as raised:
                    refused = writer(path, overwrite=False)
                    dcp.save(state_of(1), storage_writer=refused, no_dist=True)
                assert str(raised.error) == "Checkpoint already exists and self.overwrite=False."
        assert files_in(path) == before
    save_rank_local(state_of(), own := tmp_path / "own", 0)
    before, again = files_in(own), DcpxWriter(own, overwrite=False)
    with pytest.raises(RuntimeError, match="already exists"):
        dcp.save(state_of(1), storage_writer=again, no_dist=True, use_collectives=False)
    after = {**files_in(own), ".dcpx.0.lock": b""}  # which says that a save did not end
    assert after == before
    save(state_of(1), tmp_path / "all")
    assert_whole(state_of(1), tmp_path / "all")


def test_rank_local_save_over_a_global_checkpoint_is_refused(tmp_path: Path) -> None:
    """Every load would prefer the old one: the new one would be lost without a word."""
    save(state_of(0), tmp_path)
    before = files_in(tmp_path)
    with pytest.raises(UnsupportedError, match="holds a checkpoint of all ranks"):
        save_rank_local(state_of(1), tmp_path, 0)
    assert data_files(tmp_path) == [name for name in before if name.endswith(".distcp")]
    assert_loads(state_of(0), tmp_path)


CONTRADICTIONS: dict[str, Callable[[list[Any], Metadata], Any]] = {
    "missing": lambda results, _: results.pop(),
    "all missing": lambda results, _: results.clear(),
    "duplicate": lambda results, _: results.append(results[0]),
    "unknown item": lambda _, metadata: metadata.state_dict_metadata.pop("a"),
    "chunk that nobody wrote": lambda _, metadata: metadata.state_dict_metadata["a"].chunks.append(
        ChunkStorageMetadata(torch.Size([50]), torch.Size([50]))
    ),
    "behind its file": lambda results, _: object.__setattr__(
        results[0].storage_data, "offset", 10**6
    ),
    "before its file": lambda results, _: object.__setattr__(results[0].storage_data, "offset", -1),
    "unknown file": lambda results, _: object.__setattr__(
        results[0].storage_data, "relative_path", "__9_9.distcp"
    ),
    "no file table": lambda results, _: results.files.clear(),
}


class LyingWriter(DcpxWriter):
    """Changes the results before they are checked."""

    how = ""

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        CONTRADICTIONS[self.how](results[0], metadata)
        super().finish(metadata, results)


@pytest.mark.usefixtures("no_leaks")
def test_results_that_contradict_the_metadata_publish_nothing(tmp_path: Path) -> None:
    save(state_of(), tmp_path)
    before = files_in(tmp_path)
    for how in CONTRADICTIONS:
        writer = LyingWriter(tmp_path)
        writer.how = how
        with raises_one(PlanError):
            dcp.save(state_of(1), storage_writer=writer, no_dist=True)
        assert files_in(tmp_path) == before, how
        assert_loads(state_of(), tmp_path)
    save(state_of(2), tmp_path)
    assert_whole(state_of(2), tmp_path)
