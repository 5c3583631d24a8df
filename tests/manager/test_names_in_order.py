"""Numbers in the names of checkpoints that no manager saved: which is newest, if names tell it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.saves import save
from trainings import Log, manager_of, on_disk, save_steps, warnings_of
from trainings import resumed as resumed_by

from torch_dcpx.manager.newest import is_lower, numbered, to_ask


def put(root: Path, *names: str) -> None:
    """Saves as others do; the values are 1, 2, ... in the order of the names."""
    for value, name in enumerate(names, 1):
        save({"state": {"x": torch.full((3,), float(value))}}, root / name, "stock")


def resumed(root: Path) -> tuple[str | None, float, list[str]]:
    """Returns what a resume takes, its value, and what else it says may be newer."""
    info, value = resumed_by(root)
    return info.tag, value, [tag for tag, _ in info.skipped]


IN_ORDER = [
    ("checkpoint-900", "checkpoint-1000"), ("global_step90", "global_step100"), ("9", "10"),
    ("step=99.ckpt", "step=100.ckpt"), ("step9-unsharded", "step10-unsharded"),
    ("step-000900", "step-001000"), ("step-0900", "step-1000"), ("step-900", "step-00001000"),
    ("epoch=2-step=100", "epoch=3-step=150"), ("epoch=3-step=99", "epoch=3-step=100"),
    ("epoch=9-val_loss=0.25", "epoch=10-val_loss=0.125"),
    ("v9-val_loss=0.25.ckpt", "v10-val_loss=1.5.ckpt"), ("lr=1e-3-epoch9", "lr=2e-04-epoch10"),
    ("2026-11-28", "2026-12-01"), ("2026-11-28_12-30", "2026-12-01_08-00"),
    ("run_20261128_123000", "run_20261201_080000"), (f"n{'9' * 200}", f"n1{'0' * 200}"),
    ("step--9", "step--10"), ("step_9_of_20", "step_10_of_20"),
]  # fmt: skip


def test_numbers_of_one_form_are_compared(tmp_path: Path) -> None:
    for number, (older, newer) in enumerate(IN_ORDER):
        assert is_lower(older, newer) and not is_lower(newer, older), newer
        names = (older, newer) if number % 2 else (newer, older)
        root = tmp_path / str(number)
        put(root, *names)
        assert resumed(root) == (newer, names.index(newer) + 1, [])
        assert manager_of(root).tags() == [older, newer]


@pytest.mark.parametrize(
    ("taken", "other"),
    [
        ("step-90", "checkpoint-100"),
        ("step-100", "last.ckpt"),
        ("step-100", "step-0100"),
        ("checkpoint-100", "best"),
        ("epoch=3-step=99", "epoch=2-step=100"),
        ("epoch=3-val_loss=0.25", "epoch=3-val_loss=0.5"),
        ("model-v1.10.2", "model-v1.9.3"),
        ("best", "BEST"),
        ("step-9", "step-\u0661\u0660"),  # digits, but none that the others use
        ("epoch=0-step=9", "epoch=-1-step=10"),
        ("2026-11-28_12-30", "2026-11-28"),
    ],
)
def test_names_without_an_order_are_said(
    tmp_path: Path, taken: str, other: str, caplog: Log
) -> None:
    put(tmp_path, taken, other)
    tag, _, told = resumed(tmp_path)
    assert {tag, *told} == {taken, other} and tag is not None
    (reason,) = warnings_of(caplog)
    assert f"'{tag}' was taken, " in reason and f"; tag='{told[0]}' takes this one" in reason
    caplog.clear()
    assert manager_of(tmp_path).resume(tag=told[0]).skipped == ()
    assert not caplog.records


def test_highest_of_each_form_stands_for_all(tmp_path: Path) -> None:
    put(tmp_path, *(f"checkpoint-{n}" for n in (9, 10, 8)), "last", "epoch_2", "epoch_11")
    save_steps(tmp_path, 5)
    assert resumed(tmp_path) == ("step-5", 5.0, ["epoch_11", "checkpoint-10", "last"])


def test_managers_commit_is_taken_and_what_may_be_later_is_said(tmp_path: Path) -> None:
    for foreign, is_told in (
        ("step-200", True), ("step-99", False), ("step-0200", True), ("step-050", False),
        ("step-100.5", True), ("last", True), ("checkpoint-50", True),
    ):  # fmt: skip
        root = tmp_path / foreign
        save_steps(root, 100)
        put(root, foreign)
        for has_pointer in (True, False):
            if not has_pointer:
                (root / "newest").unlink()
            info, value = resumed_by(root)
            assert (info.tag, value) == ("step-100", 100), foreign
            assert [tag for tag, _ in info.skipped] == [foreign] * is_told
            assert manager_of(root).resume(tag=foreign).tag == foreign
            for reason in (reason for _, reason in info.skipped):
                assert "no manager saved it" in reason and "'step-100' was taken" in reason


def test_tags_of_the_manager_are_no_doubts(tmp_path: Path, caplog: Log) -> None:
    manager = manager_of(tmp_path)
    save_steps(manager, 100, 300, 110)
    for name in ("best", "epoch-7", "9000"):
        manager.save(name, step=1, state={"x": torch.zeros(3)})
    save_steps(manager, 120)
    assert resumed(tmp_path) == ("step-120", 120.0, [])
    assert not caplog.records


def test_later_save_of_stock_counts_where_the_pointer_names_one_of_stocks(tmp_path: Path) -> None:
    """As after a first save of the manager that was killed before its commit."""
    put(tmp_path, "step-1", "step-2")
    manager = manager_of(tmp_path)
    manager.resume()
    with manager._root.committing("step-3"):
        pass
    assert '"step-2"' in (tmp_path / "newest").read_text()
    put(tmp_path, "step-4")
    assert resumed(tmp_path)[0] == "step-4"


def test_of_many_directories_the_highest_of_each_form_count(tmp_path: Path, caplog: Log) -> None:
    save_steps(tmp_path, *range(100, 120), 1)
    put(tmp_path, "last", "epoch_3")
    assert resumed(tmp_path) == ("step-1", 1.0, ["epoch_3", "last"])
    fresh = manager_of(tmp_path)._root
    chosen, _ = fresh.newest()
    assert chosen is not None
    asked = to_ask(fresh.files.directories(), chosen, lambda name: name == "step-107")
    assert (asked[:4], len(asked)) == (["step-107", "step-119", "epoch_3", "last"], 16)
    assert "of the 22 names beside it that may be newer only 16 are looked at" in caplog.text
    assert "not 'step-105', for one" in caplog.text


def test_what_is_not_whole_is_no_doubt(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    put(tmp_path, "step-9")
    next((tmp_path / "step-9").glob("__*.distcp")).unlink()
    (tmp_path / "step-10").mkdir()
    (tmp_path / "logs").mkdir()
    assert resumed(tmp_path) == ("step-1", 1.0, [])
    assert on_disk(tmp_path) == {"step-1", "step-9", "step-10", "logs"}


def test_forms_keep_what_is_no_number() -> None:
    assert numbered("a1.5b3") == ("a\0.\0b\0", (3,))
    assert numbered("a3b1.5")[0] != numbered("a1.5b3")[0]
    assert numbered("step-20000000") == ("step-\0", (20_000_000,))
    assert numbered("1999-12-31")[1] == (19991231,) != numbered("1899-12-31")[1]


def test_why_one_was_taken_and_the_other_was_not(tmp_path: Path) -> None:
    for taken, other, why in (
        ("checkpoint-1000-bad", "checkpoint-1000", "the last by the alphabet"),
        ("run2-step-5", "run1-step-9", "for the numbers in its name"),
        ("v1.9", "v1.10", "the last by the alphabet"),
        ("step-8", "step_9", "for its name is 'step-N'"),
    ):
        put(tmp_path / taken, taken, other)
        info, _ = resumed_by(tmp_path / taken)
        ((tag, reason),) = info.skipped
        assert (info.tag, tag) == (taken, other)
        assert f"its name does not say that it is older: '{taken}' was taken, {why};" in reason
