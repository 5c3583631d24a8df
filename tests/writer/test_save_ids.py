"""Which save a file says that it is of: agreed, or none; never that of another one."""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any

import pytest
import torch
from support.metadata_samples import PATH, small, small_files
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.planner import SavePlan

from torch_dcpx import DcpxWriter, PlanError
from torch_dcpx.metadata.file import decode_metadata, encode_metadata
from torch_dcpx.storage.names import FileEntry, id_bytes
from torch_dcpx.storage.running_save import RunningSave, driven
from torch_dcpx.writer import save_ids
from torch_dcpx.writer.save_ids import SavePrefix, save_of, with_save_id, written_id


class Writer:
    """Whoever saves."""


WRITER = Writer()


def follower() -> RunningSave:
    save = RunningSave(WRITER)
    save.save_id = ""
    return save


def plans_of(save: RunningSave, ranks: int = 3) -> list[SavePlan]:
    plans = [SavePlan([], _StoragePrefix(f"__{rank}_")) for rank in range(ranks)]
    return with_save_id(plans, save)


def test_what_is_no_save_id_is_none() -> None:
    texts: list[Any] = ["", "x" * 32, "0" * 31, "0" * 33, "A" * 32, None, 3, b"0" * 32]
    assert [id_bytes(text) for text in texts] == [b""] * len(texts)


def test_files_of_a_table_are_of_the_save_that_the_metadata_names() -> None:
    for save_id, expected in (("0f" * 16, b"\x0f" * 16), ("a name", b"")):
        data = encode_metadata(small(), small_files(), save_id)
        found = decode_metadata(data, PATH).files or {}
        assert {entry.save_id for entry in found.values()} == {expected}


def test_every_rank_is_told_the_coordinators_save() -> None:
    save = RunningSave(WRITER)
    plans = pickle.loads(pickle.dumps(plans_of(save)))
    assert [plan.storage_data.prefix for plan in plans] == ["__0_", "__1_", "__2_"]
    for plan in plans[1:]:
        assert written_id(follower(), plan.storage_data).hex() == save.save_id
    assert written_id(save, plans[0].storage_data).hex() == save.save_id


def test_plan_that_is_written_again_names_no_save() -> None:
    save, later = RunningSave(WRITER), RunningSave(WRITER)
    kept = plans_of(save)[1].storage_data
    copies = [copy.deepcopy(kept), pickle.loads(pickle.dumps(kept)), kept]
    assert written_id(follower(), kept).hex() == save.save_id
    for again in copies:  # as a planner that caches what it has finished gives it
        assert written_id(follower(), again) == b""
    assert written_id(follower(), plans_of(later)[1].storage_data).hex() == later.save_id


def test_plan_that_is_kept_long_names_no_save_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_ids, "_MAX_TAKEN", 4)
    kept = plans_of(RunningSave(WRITER))[1].storage_data
    assert written_id(follower(), kept) != b""
    for _ in range(10):  # it is given at each save, beside new ones of others
        for _ in range(3):
            new = plans_of(RunningSave(WRITER))[2].storage_data
            assert written_id(follower(), new) != b""
        assert written_id(follower(), kept) == b""
    assert len(save_ids._taken) <= 4


def test_fork_that_writes_by_its_parents_plan_names_no_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save, own = follower(), plans_of(RunningSave(WRITER))[1].storage_data
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert written_id(save, own) == b""


def test_rank_that_is_told_nothing_names_no_save() -> None:
    for told in (None, _StoragePrefix("__1_"), SavePrefix("__1_"), SavePrefix("__1_", "a name")):
        assert written_id(follower(), told) == b""
    assert written_id(None, plans_of(RunningSave(WRITER))[1].storage_data) == b""


def test_plans_that_need_no_id_stay_as_they_are() -> None:
    class OwnPrefix(_StoragePrefix):
        """A subclass of somebody's."""

    alone = plans_of(RunningSave(WRITER), 1)
    assert type(alone[0].storage_data) is _StoragePrefix
    with driven():  # its driver tells the ranks
        save = RunningSave(WRITER)
    assert type(plans_of(save)[1].storage_data) is _StoragePrefix
    own = [SavePlan([], OwnPrefix("a")), SavePlan([], None)]
    assert with_save_id(own, RunningSave(WRITER)) == own
    for unknown in (None, follower()):  # hooks called by hand
        assert with_save_id(own, unknown) is own


def test_committed_save_is_that_of_all_files() -> None:
    save = RunningSave(WRITER)
    of_it = FileEntry("a", bytes(16), 1, 1, id_bytes(save.save_id))
    silent = FileEntry("b", bytes(16), 1, 1)
    other = FileEntry("c", bytes(16), 1, 1, bytes([7]) * 16)
    assert save_of([of_it, silent], save) == save.save_id
    for known in (None, follower()):  # hooks called by hand
        assert save_of([silent, of_it], known) == save.save_id
        assert len(save_of([silent], known)) == 32
        with pytest.raises(PlanError, match="'c' was written for save 0707"):
            save_of([silent, of_it, other], known)
    with pytest.raises(PlanError, match=f"commits save {save.save_id}"):
        save_of([other], save)


def test_plan_that_names_its_save_is_one_that_stocks_writer_takes(tmp_path: Any) -> None:
    writer = DcpxWriter(tmp_path)
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    plans = writer.prepare_global_plan([SavePlan([]), SavePlan([])])
    assert [type(plan.storage_data) for plan in plans] == [SavePrefix, SavePrefix]
    assert isinstance(plans[1].storage_data, _StoragePrefix)
    stock = torch.distributed.checkpoint.FileSystemWriter(tmp_path)
    assert stock.prepare_global_plan(plans) == plans
