"""Callbacks of users beside ours: `train_trainer.py --callback trainer_callbacks:Watcher`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from transformers import TrainerCallback

from torch_dcpx import WriteOptions
from torch_dcpx.integrations.trainer import DcpxCallback


class Watcher(TrainerCallback):
    """Writes files where the Trainer has its own, calls one save off, saves by DCP at the end."""

    def on_log(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        if state.is_world_process_zero:
            with Path(args.output_dir, "log.txt").open("a") as file:
                file.write(f"{state.global_step}\n")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        if state.is_world_process_zero:
            Path(args.output_dir, f"eval-{state.global_step}.txt").touch()
        if state.global_step == 4:
            control.should_save = False

    def on_train_end(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        dcp.save({"mine": torch.ones(3)}, checkpoint_id=Path(args.output_dir, "mine"))


class Limit(TrainerCallback):
    """Ends the training at its third step, as a limit of time does."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        control.should_training_stop = state.global_step == 3


class SlowSave(DcpxCallback):
    """Saves slowly."""

    def __init__(self) -> None:
        super().__init__(WriteOptions(progress=self._wait_once))

    def _wait_once(self, done: int, _all: int) -> None:
        if done == 0:
            time.sleep(5)
