"""Steps, counts, metrics and parts of a manager: what is taken, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainings import Log, manager_of, on_disk, save_steps

from torch_dcpx import CheckpointManager, OptionError, ReadOptions, WriteOptions


@pytest.mark.parametrize(
    "integer", [np.int64, np.array, torch.tensor], ids=lambda kind: kind.__name__
)
def test_integers_of_any_type_are_steps_and_counts(tmp_path: Path, integer: Any) -> None:
    rules = {
        "keep_last": integer(1),
        "keep_every": integer(2),
        "keep_best": ("m", "max", integer(1)),
    }
    with manager_of(tmp_path, **rules) as manager:
        for step in (1, 2, 3, 5):
            save_steps(manager, integer(step), metrics={"m": -step})
        manager.save("named", state={"x": torch.zeros(2)}, step=integer(7))
    assert on_disk(tmp_path) == {"step-1", "step-2", "named"}
    again = manager_of(tmp_path)
    step = again.resume(state={"x": torch.zeros(2)}).step
    assert (type(step), step) == (int, 7)
    again.pin(integer(2))
    with pytest.raises(OptionError, match="step"):
        manager_of(tmp_path).save(integer(4), state={"x": 1}, step=integer(5))


def test_counts_steps_and_metrics_that_are_none_are_refused(tmp_path: Path) -> None:
    for value in (True, np.bool_(1), torch.tensor(True), 1.0, "1", -1, 0):
        for name in ("keep_last", "keep_every", "keep_best"):
            given = ("m", "min", value) if name == "keep_best" else value
            with pytest.raises(OptionError, match=name):
                CheckpointManager(tmp_path, **{name: given})
    manager = manager_of(tmp_path / "run", keep_best=("loss", "min", 1))
    for step in (True, np.bool_(1), torch.tensor(False), 1.0, -1):
        with pytest.raises(OptionError):
            save_steps(manager, step)
        with pytest.raises(OptionError, match="step"):
            manager.save("named", state={"x": 1}, step=step)
    for value in ("0.3", b"0.3", None, [1.0], "nan"):
        with pytest.raises(OptionError, match="metrics") as info:
            save_steps(manager, 1, metrics={"loss": value})
        assert info.value.option == "metrics"
    with pytest.raises(OptionError, match="nothing to save"):
        manager.save(1, metrics={"loss": 1.0})
    assert not (tmp_path / "run").exists()
    manager.save(1, user_content=0)


def test_optimizer_and_scheduler_in_anothers_place_are_refused_with_theirs(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    adam = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(adam, 1)
    manager = manager_of(tmp_path / "run")
    for given, name, place in (
        ({"lr_scheduler": adam}, "lr_scheduler", "optimizer"),
        ({"lr_scheduler": [scheduler, adam]}, "lr_scheduler", "optimizer"),
        ({"optimizer": scheduler}, "optimizer", "lr_scheduler"),
        ({"optimizer": {"a": scheduler}}, "optimizer", "lr_scheduler"),
        ({"dataloader": adam}, "dataloader", "optimizer"),
        ({"dataloader": scheduler}, "dataloader", "lr_scheduler"),
    ):
        for call in (lambda **parts: manager.save(1, **parts), manager.resume):
            with pytest.raises(OptionError, match=f"{name} must be .*; give it as {place}="):
                call(model=model, **given)
    assert not (tmp_path / "run").exists()


def test_arguments_by_position_that_have_names_are_refused_with_these(tmp_path: Path) -> None:
    manager: Any = manager_of(tmp_path / "run")
    make: Any = CheckpointManager
    model = torch.nn.Linear(2, 2)
    for call, text in (
        (
            lambda: make(WriteOptions(), "run"),
            "takes root by position, .* WriteOptions and 'run'; write options=",
        ),
        (lambda: make("run", ReadOptions()), "CheckpointManager takes .*; write read_options="),
        (
            lambda: manager.save(model, 1),
            "save takes tag_or_step by .* a Linear and 1; write model",
        ),
        (lambda: manager.save(1, {"w": 1}), "all else by name, .*; write model= and the like"),
        (lambda: manager.resume(model), "resume takes nothing by position, .*; write model="),
    ):
        with pytest.raises(OptionError, match=text) as raised:
            call()
        assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_keep_best_warns_once_of_saves_without_its_metric(tmp_path: Path, caplog: Log) -> None:
    with manager_of(tmp_path, keep_best=("loss", "min", 1)) as manager:
        save_steps(manager, 1, metrics={"loss": torch.tensor(0.5), "acc": 1})
        assert caplog.records == []
        save_steps(manager, 2, metrics={"acc": 0.5})
        save_steps(manager, 3)
        save_steps(manager, 4, metrics={"loss": float("nan")})
    (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert "'loss'" in record.getMessage() and "'step-2'" in record.getMessage()
    assert "'acc'" in record.getMessage()
    assert on_disk(tmp_path) == {"step-1", "step-4"}
