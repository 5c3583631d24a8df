"""Lightning under the hook: Fabric and Trainer, each with FSDP2 and FSDP1, sharded checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.frameworks import check_page, check_seen
from support.resume_cases import ResumeCases, Trained
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


def test_commands_of_the_page_run(tmp_path: Path) -> None:
    check_page("lightning", tmp_path)
