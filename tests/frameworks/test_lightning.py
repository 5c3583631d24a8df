"""Lightning under the hook and through our strategies: Fabric and Trainer, each with FSDP2 and
FSDP1, sharded checkpoints; plain checkpoints through our CheckpointIO.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.frameworks import ROOT, WITNESS, Framework, check_page, check_seen, check_typos
from support.resume_cases import AdapterCases, ResumeCases, Trained, losses_after
from support.states import assert_same


class TestTrainer(ResumeCases):
    NAME = "lightning"
    CHECKPOINT = "step_{}.ckpt"
    REFUSES_TORN = "does not point to a valid checkpoint"  # it has no meta.pt
    PARTS = ("",)

    @pytest.mark.parametrize("side", ["ours", "stock"])
    def test_consolidated_file_equals_that_of_stock(
        self, trained: Trained, tmp_path: Path, side: str
    ) -> None:
        module = "lightning.fabric.utilities.consolidate_checkpoint"
        folder = trained.framework.folder / side / self.CHECKPOINT.format(6)
        command = [str(trained.framework.bin / "python"), "-m", module, str(folder)]
        files = {}
        for hook in (True, False):
            files[hook] = tmp_path / str(hook) / "whole.ckpt"
            files[hook].parent.mkdir()
            run = trained.framework.run([*command, "--output_file", str(files[hook])], hook=hook)
            if hook:
                check_seen(run, "reader")
        ours, stock = (torch.load(files[hook]) for hook in (True, False))
        assert_same(ours, stock)


class TestTrainerFsdp1(TestTrainer):
    ARGUMENTS = ("--strategy", "fsdp")


class TestFabric(TestTrainer):
    ARGUMENTS = ("--api", "fabric")


class TestFabricFsdp1(TestTrainer):
    ARGUMENTS = ("--api", "fabric", "--strategy", "fsdp")


_ADAPTER = "torch_dcpx.integrations.lightning"
_WORKER = str(ROOT / "tests" / "frameworks" / "lightning_worker.py")


class TestTrainerStrategy(AdapterCases):
    NAME = "lightning"
    CHECKPOINT = "step_{}.ckpt"
    REFUSES_TORN = r"\.metadata"
    OURS = ("--strategy-class", f"{_ADAPTER}:DcpxModelParallelStrategy")

    def test_newest_stays_until_the_next_one_is_whole(
        self, trained: Trained, tmp_path: Path
    ) -> None:
        arguments = (*self.OURS, "--keep", 1, "--save-last")
        # Commits: step_2, last, step_4, last, ...; each removes the one before, if it is another.
        trained.framework.kill_before_commit(3, tmp_path, *arguments, hook=False)
        assert (tmp_path / "step_2.ckpt" / ".metadata").exists()
        for start in ("step_2.ckpt", "last.ckpt"):
            into = tmp_path / f"from-{start}"
            resumed = trained.framework.train(
                into, *arguments, "--resume", tmp_path / start, hook=False
            )
            assert losses_after(0, resumed) == losses_after(2, trained.stock)
            assert {path.name for path in into.iterdir()} == {"step_6.ckpt", "last.ckpt"}

    def test_killed_over_last_leaves_the_one_before(self, trained: Trained, tmp_path: Path) -> None:
        arguments = (*self.OURS, "--save-last")
        trained.framework.kill_before_commit(4, tmp_path, *arguments, hook=False)
        names = {path.name for path in (tmp_path / "last.ckpt").iterdir()}
        assert {"meta.pt", ".metadata"} < names
        assert [name for name in names if name.endswith(".kept")]
        resumed = trained.framework.train(
            tmp_path, *arguments, "--resume", tmp_path / "last.ckpt", hook=False
        )
        assert losses_after(0, resumed) == losses_after(2, trained.stock)


class TestTrainerStrategyFsdp1(AdapterCases):
    NAME = "lightning"
    CHECKPOINT = "step_{}.ckpt"
    REFUSES_TORN = r"\.metadata"
    ARGUMENTS = ("--strategy", "fsdp")
    OURS = ("--strategy-class", f"{_ADAPTER}:DcpxFSDPStrategy")
    RANKS = (1,)


class TestFabricStrategy(AdapterCases):
    NAME = "lightning"
    CHECKPOINT = "step_{}.ckpt"
    REFUSES_TORN = r"\.metadata"
    ARGUMENTS = ("--api", "fabric")
    OURS = ("--strategy-class", f"{_ADAPTER}:DcpxFabricModelParallelStrategy")
    RANKS = (1,)


class TestFabricStrategyFsdp1(AdapterCases):
    NAME = "lightning"
    CHECKPOINT = "step_{}.ckpt"
    REFUSES_TORN = r"\.metadata"
    ARGUMENTS = ("--api", "fabric", "--strategy", "fsdp")
    OURS = ("--strategy-class", f"{_ADAPTER}:DcpxFabricFSDPStrategy")
    RANKS = (1,)


def run_case(case: str, folder: Path, ranks: int) -> list[Any]:
    """Returns what each rank has found."""
    framework = Framework("lightning", folder)
    command = framework.torchrun(ranks=ranks)[:-1]
    path = f"{WITNESS}:{ROOT / 'examples' / 'frameworks'}"
    run = framework.run(
        [*command, _WORKER, case, str(folder / "saved")], hook=False, PYTHONPATH=path
    )
    found: list[Any] = run.result["found"]
    return found


def test_save_that_fails_on_one_rank_is_raised_on_all_and_replaces_nothing(tmp_path: Path) -> None:
    for found in run_case("failing", tmp_path, 2):
        assert "rank 1" in found["error"]
        assert "the disk is gone" in found["error"]
        assert found["whole"] == ["step_2.ckpt"]


def test_save_that_has_failed_at_once_is_raised_at_the_end(tmp_path: Path) -> None:
    for error in run_case("at_once", tmp_path, 2):
        assert "the disk is gone" in error


def test_failed_save_removes_nothing_and_is_raised_once(tmp_path: Path) -> None:
    assert run_case("removed", tmp_path, 1) == [["the disk is gone"]]


def test_rank_that_does_not_save_is_an_error(tmp_path: Path) -> None:
    error, _ = run_case("skips", tmp_path, 2)
    assert error.startswith("RankLostError")
    assert not (tmp_path / "saved" / ".metadata").exists()


def test_plain_checkpoint_keeps_versions_of_modules_and_parameters(tmp_path: Path) -> None:
    assert run_case("versions", tmp_path, 1) == [[[1.0, 1.0], "Parameter"]]


def test_refusals_name_what_is_refused(tmp_path: Path) -> None:
    (found,) = run_case("refused", tmp_path, 1)
    assert len(found) == 8
    for name, text in found.items():
        assert text.startswith("UnsupportedError"), text
        assert name.split()[-1] in text


def test_plain_checkpoints_equal_those_of_stock_and_resume(tmp_path: Path) -> None:
    for found in run_case("plain", tmp_path, 2):
        assert found == {
            "files": {"stock": ["step_6.ckpt"], "ours": ["step_6.ckpt"]},
            "equal": True,
            "steps": 8,
        }


def test_plain_checkpoint_holds_its_state_and_failures_are_told(tmp_path: Path) -> None:
    (found,) = run_case("plain_calls", tmp_path, 1)
    assert found["one"] == [[1, {"b": 2}], 0.0, 2]
    assert found["bytes"] < 5 << 20
    assert found["error"] == "AttributeError"
    assert found["left"] == ["one.ckpt"]  # as it was, and not removed: what came after it failed
    assert found["end"] == ["two.ckpt"]


def test_commands_of_the_page_run(tmp_path: Path) -> None:
    check_page("lightning", tmp_path)


def test_typo_is_told_what_was_meant(tmp_path: Path) -> None:
    calls = {
        "DcpxModelParallelStrategy(write_options=None)": "options",
        "DcpxFSDPStrategy(write_options=None)": "options",
        "DcpxFabricFSDPStrategy(write_options=None)": "options",
        "DcpxFabricModelParallelStrategy(write_options=None)": "options",
        "DcpxFSDPStrategy(async_mode=True)": "async_save",
    }
    check_typos("lightning", tmp_path, calls)
