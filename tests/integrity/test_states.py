"""One look says what lies in a place: a checkpoint, a save under way, what is left, or nothing."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

import pytest
import torch
from conftest import RunPython
from support.held_saves import under_way
from support.saves import save, save_rank_local

import torch_dcpx
from torch_dcpx.integrity.states import State, in_order, state_of, utc_text, walk
from torch_dcpx.integrity.way_out import settled
from torch_dcpx.storage.names import LOCK_NAME, step_in
from torch_dcpx.storage.place import open_place
from torch_dcpx.storage.save_lock import boot_id

STATE = {"w": torch.arange(40.0), "step": 3}


def at(path: Path) -> State:
    with open_place(path) as place:
        return state_of(place)[0]


def test_save_under_way_is_said_by_whom_and_since_when(tmp_path: Path) -> None:
    with under_way(tmp_path / "a", STATE):
        assert all(at(tmp_path / "a").kind == "saving" for _ in range(20))  # no look keeps it away
        found = at(tmp_path / "a")
        assert f"host={socket.gethostname()} pid={os.getpid()}, since 20" in found.text
        with pytest.raises(torch_dcpx.ConcurrentSaveError, match="a save is under way"):
            torch_dcpx.repair(tmp_path / "a", dry_run=True)
    assert at(tmp_path / "a") == State("committed")
    with under_way(tmp_path / "a", STATE):
        found = at(tmp_path / "a")
        assert found.kind == "committed" and f"pid={os.getpid()}" in found.saving


def test_save_that_ends_between_two_looks_is_a_checkpoint(tmp_path: Path) -> None:
    with open_place(tmp_path) as place:
        (tmp_path / "__0_0.distcp").write_bytes(b"1")
        before = place.look()
        save(STATE, tmp_path)
        found, look = state_of(place, before)
    assert found.kind == "committed" and ".metadata" in look.names


def test_save_that_was_killed_is_unfinished(run_warm: RunPython, tmp_path: Path) -> None:
    code = (
        "import os, sys, torch, torch_dcpx, torch_dcpx.writer.commit as commit\n"
        "commit.publish = lambda *_, **__: os.kill(os.getpid(), 9)\n"
        "torch_dcpx.save({'w': torch.ones(9)}, sys.argv[1], no_dist=True)\n"
    )
    assert run_warm(code, str(tmp_path / "a"), check=False).returncode == -9
    assert (tmp_path / "a" / LOCK_NAME).read_text()  # its record names the dead process
    assert at(tmp_path / "a") == State("unfinished", "1 data file of a save that did not end")


def test_removed_is_not_unfinished_and_repair_says_so(tmp_path: Path) -> None:
    save(STATE, tmp_path)
    (tmp_path / ".metadata").rename(tmp_path / ".dcpx.deleted")
    found = at(tmp_path)
    assert found.kind == "removed" and "next commit" in found.text
    with pytest.raises(torch_dcpx.RepairError, match="its manager has removed it"):
        torch_dcpx.repair(tmp_path)
    assert "dcpx repair" not in str(torch_dcpx.verify(tmp_path))
    with pytest.raises(torch_dcpx.NotCommittedError, match="its manager has removed it") as caught:
        torch_dcpx.load({"w": torch.zeros(40)}, tmp_path, no_dist=True)
    assert "dcpx repair" not in str(caught.value)


def test_one_ranks_checkpoint_beside_a_save_of_another(tmp_path: Path) -> None:
    save_rank_local(STATE, tmp_path, 0)
    assert at(tmp_path).kind == "committed"
    (tmp_path / "__1_0.distcp").write_bytes(b"1")
    assert at(tmp_path).kind == "committed"  # and a fault of `verify`
    with (tmp_path / LOCK_NAME).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert at(tmp_path).kind == "saving"


def test_holder_that_the_kernel_does_not_show_is_found_by_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(STATE, tmp_path)
    (tmp_path / ".metadata").unlink()
    monkeypatch.setattr("torch_dcpx.storage.save_lock.holders_of", lambda _: "")
    for record, kind in (
        ("host=far pid=1 boot=11111111-2222", "saving"),  # in sight of the lock alone
        (f"host=other pid=7 boot={boot_id()}", "saving"),  # of another container
        (f"host={socket.gethostname()} pid={os.getpid()} boot={boot_id()}", "saving"),
        ("", "unfinished"),
        ("\x00\xff nonsense = = pid=x", "saving"),
    ):
        (tmp_path / LOCK_NAME).write_text(record)
        assert at(tmp_path).kind == "unfinished", record
        with (tmp_path / LOCK_NAME).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert at(tmp_path).kind == kind, record


def test_walk_goes_two_levels_down_and_no_further(tmp_path: Path) -> None:
    for name in ("checkpoint-500/model_0", "checkpoint-500/optimizer_0", "step-10", "step-9"):
        save(STATE, tmp_path / name)
    save(STATE, tmp_path / "a/b/c")
    (tmp_path / "round").symlink_to(tmp_path)
    (tmp_path / "itself").symlink_to("itself")
    (tmp_path / "latest").symlink_to("step-10")
    found = {seen.name: seen.state.kind for seen in walk(tmp_path)}
    assert {name for name, kind in found.items() if kind == "committed"} == {
        "checkpoint-500/model_0", "checkpoint-500/optimizer_0", "step-9", "step-10", "latest",
    }  # fmt: skip
    assert found["a"] == found["round"] == found["itself"] == "none"


def test_walk_is_bounded_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_dcpx.integrity.states._MOST_BENEATH", 5)
    for number in range(20):
        (tmp_path / f"a{number % 2}/d{number}").mkdir(parents=True)
    save(STATE, tmp_path / "step-1")
    found = list(walk(tmp_path))
    assert [seen.name for seen in found if seen.state.kind == "committed"] == ["step-1"]
    assert "no more than 5 directories" in found[-1].state.text


def test_names_are_in_the_order_of_their_numbers() -> None:
    names = ["step-10", "step-9", "a", "step-²", "10", "9"]
    assert sorted(names, key=in_order) == ["9", "10", "a", "step-9", "step-10", "step-²"]


def test_step_in_a_name() -> None:
    steps = {
        "step-5": 5, "checkpoint-500/optimizer_0": 500, "step_6.ckpt": 6, "iter_0000007": 7,
        "global_step12": 12, "epoch=1-step=20.ckpt": 20, "final": None, "footstep3": None,
        "checkpoint_2": None, "step-" + "9" * 30: None,
    }  # fmt: skip
    assert {name: step_in(name) for name in steps} == steps


def test_dates_that_no_calendar_has_are_none() -> None:
    assert utc_text(0) == "1970-01-01T00:00:00Z"
    assert utc_text(None) is utc_text(-1.0) is utc_text(1e30) is utc_text(float("nan")) is None


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_young_files_without_a_lock_may_be_of_a_save_under_way(tmp_path: Path, writer: str) -> None:
    save(STATE, tmp_path, writer)
    (tmp_path / ".metadata").unlink()
    found = at(tmp_path)
    assert found.kind == "unfinished" and found.is_young
    assert " s ago: a save that takes no lock may be under way" in found.text
    (data,) = tmp_path.glob("*.distcp")
    os.utime(data, (1, 1))
    assert at(tmp_path).text == "1 data file of a save that did not end"
    os.utime(data)
    (tmp_path / LOCK_NAME).write_text("host=here pid=1 boot=2\n")  # a save of ours was killed
    assert at(tmp_path).text == "1 data file of a save that did not end"


def test_a_save_that_may_be_under_way_is_waited_for_before_it_is_removed(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"a part")  # of stock's, which goes on
    with open_place(tmp_path) as place:
        found = settled(place, state_of(place)[0], place.names())
    assert "may be under way; wait until it has ended; if none is, no repair can" in found.text
    os.utime(tmp_path / "__0_0.distcp", (1, 1))
    with open_place(tmp_path) as place:
        assert "wait" not in settled(place, state_of(place)[0], place.names()).text
