"""Megatron-Core through our strategies: a small GPT, small states, kills, failures, stock's files.

CUDA is stubbed by `examples/frameworks/megatron_on_cpu.py`: copies from a GPU, NCCL and Float8
tensors are not run here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.frameworks import ROOT, WITNESS, Framework, check_all_ours, check_typos
from support.resume_cases import AdapterCases, Trained, losses_after

_WORKER = str(ROOT / "tests" / "frameworks" / "megatron_worker.py")
_ADAPTER = "torch_dcpx.integrations.megatron"


class TestGpt(AdapterCases):
    NAME = "megatron"
    CHECKPOINT = "iter_{}"
    REFUSES_TORN = "NotCommittedError"
    OURS = (
        *("--save-strategy", f"{_ADAPTER}:DcpxSaveStrategy"),
        *("--load-strategy", f"{_ADAPTER}:DcpxLoadStrategy"),
    )

    def test_what_lies_beside_is_there(self, trained: Trained) -> None:
        for step in (2, 4, 6):
            stock, ours = (
                trained.framework.folder / side / f"iter_{step}" for side in ("stock", "ours")
            )
            config = "metadata.json"
            assert (ours / config).read_bytes() == (stock / config).read_bytes()
            assert {path.name for path in ours.iterdir()} - {".dcpx.lock"} == {
                ".metadata", "__0_0.distcp", "__1_0.distcp", "common.pt", config,
            }  # fmt: skip


class TestGptInBackground(TestGpt):
    OURS: ClassVar[tuple[object, ...]] = (*TestGpt.OURS, "--async-save", "forked")
    RANKS = ()


def run_case(case: str, folder: Path, *, is_alone: bool = False) -> list[Any]:
    """Returns what each of two ranks has found, or the worker by itself."""
    framework = Framework("megatron", folder)
    command = [str(framework.bin / "python")] if is_alone else framework.torchrun()[:-1]
    path = f"{WITNESS}:{ROOT / 'examples' / 'frameworks'}"
    run = framework.run(
        [*command, _WORKER, case, str(folder / "states")], hook=False, PYTHONPATH=path
    )
    found: list[Any] = run.result["found"]
    return found


def test_each_side_loads_what_each_has_saved(tmp_path: Path) -> None:
    assert run_case("pairs", tmp_path) == [[3.0] * 16] * 2


def test_stock_goes_on_from_plans_that_we_keep_where_asked_for(tmp_path: Path) -> None:
    expected = {"stock without": False, "ours without": False}
    assert run_case("plans", tmp_path) == [
        expected | {"stock": [True, 2.0], "ours": [True, 2.0]}
    ] * 2  # fmt: skip


def test_other_sizes_load_where_megatron_allows_it(tmp_path: Path) -> None:
    first, second = run_case("shapes", tmp_path)
    assert first == second
    for loader in ("stock", "ours"):
        assert first[f"{loader} 6"] == [3.0] * 6
        assert first[f"{loader} 10"] == [3.0] * 8 + [0.0] * 2


def test_metadata_equal_those_that_stock_finds(tmp_path: Path) -> None:
    for stock, ours in run_case("metadata", tmp_path):
        assert ours == stock
        assert ours[0] == {"shards": [8, 4], "copies": [8]}
        assert {"object/shard_0_2", "object/shard_1_2"} < set(ours[1])


@pytest.mark.parametrize("worker", ["forked", "persistent", "nvrx", "nvrx-persistent"])
def test_background_save_holds_the_state_as_it_was_and_tells_failures(
    tmp_path: Path, worker: str
) -> None:
    for found in run_case(worker, tmp_path):
        assert found["first"] == 4.0
        assert "rank 1" in found["error"]
        assert "the disk is gone" in found["error"]
        assert found["after"] == [4.0, 4.0]  # the failed save was to the same folder
        assert set(found["names"]) == {
            ".dcpx.lock", ".metadata", "__0_0.distcp", "__1_0.distcp", "common.pt", "metadata.json",
        }  # fmt: skip


def test_save_that_fails_on_one_rank_leaves_the_checkpoint_that_was_there(tmp_path: Path) -> None:
    for found in run_case("foreground", tmp_path):
        for name in ("over", "empty"):
            assert "rank 1" in found[name]
            assert "the disk is gone" in found[name]
        assert found["after"] == [4.0, 4.0]
        over, empty = found["names"]
        assert "metadata.json" in over
        assert empty == [".dcpx.lock", "common.pt"]  # to Megatron no checkpoint


def test_rank_that_saves_elsewhere_is_an_error_on_all(tmp_path: Path) -> None:
    assert run_case("elsewhere", tmp_path) == ["PlanError"] * 2


def test_what_cannot_be_done_is_refused_by_its_name(tmp_path: Path) -> None:
    for errors, files in run_case("refused", tmp_path):
        assert len(errors) == 6
        for name, error in errors.items():
            assert name in error
        assert not files


def test_killed_save_over_a_checkpoint_leaves_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    found = run_case("kills", tmp_path, is_alone=True)
    assert len(found) > 5
    for one in found:
        fill = "1.0" if one["ended"] == "" else "2.0"
        assert one["loads"] == [fill, fill, "3.0"], one  # the last: saved again
        assert one["again"] == "None"
        assert [name for name in one["names"] if name.startswith(".dcpx.")] == [".dcpx.lock"]
    assert [one["ended"] for one in found] == [""] * (len(found) - 1) + ["None"]


def test_commands_of_the_page_run(tmp_path: Path) -> None:
    runs = Framework("megatron", tmp_path).run_page()
    for step in (2, 4, 6):
        check_all_ours(tmp_path / "run" / f"iter_{step}")
    assert losses_after(0, runs[1]) == losses_after(0, runs[2]) == losses_after(4, runs[0])


def test_typo_is_told_what_was_meant(tmp_path: Path) -> None:
    calls = {
        "DcpxSaveStrategy(write_options=None)": "options",
        "DcpxLoadStrategy(read_options=None)": "options",
    }
    check_typos("megatron", tmp_path, calls)
