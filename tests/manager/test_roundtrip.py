"""Save and resume in one process: what was there comes back, and wrong arguments are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.states import assert_same
from trainings import Held, Log, Patch, Training, manager_of, on_disk, save_steps

import torch_dcpx as dcpx


@pytest.mark.parametrize("is_async", [False, True])
def test_resumed_training_equals_the_uninterrupted_one(tmp_path: Path, is_async: bool) -> None:
    whole = Training()
    losses = [whole.train(step) for step in range(1, 7)]
    first, loader = Training(), Held(position=5)
    with manager_of(tmp_path / "root", async_save=is_async) as manager:
        for step in (1, 2, 3):
            first.train(step)
        saved = manager.save(3, **first.parts, dataloader=loader, user_content={"epoch": 2})
        assert isinstance(saved, dcpx.SaveHandle)
        assert is_async or saved.done()
        first.train(4)  # what was copied is what is saved

    again, loader = Training(seed=1), Held(position=0)
    info = manager_of(tmp_path / "root").resume(**again.parts, dataloader=loader)
    assert (info.tag, info.step, info.user_content) == ("step-3", 3, {"epoch": 2})
    assert info.report is not None and info.report.is_whole
    assert loader.taken == [{"position": 5}]
    assert [again.train(step) for step in (4, 5, 6)] == losses[3:]
    assert_same(whole.model.state_dict(), again.model.state_dict())


def test_optimizer_is_left_alone_on_request(tmp_path: Path) -> None:
    training, other, manager = Training(), Training(1), manager_of(tmp_path)
    training.train(1)
    manager.save(1, **training.parts)
    manager.resume(**other.parts, load_optimizer=False)
    assert_same(training.model.state_dict(), other.model.state_dict())
    assert not other.optimizer.state
    assert other.scheduler.last_epoch == 0


def test_state_holds_tensors_values_objects_and_each_ranks_own(tmp_path: Path) -> None:
    module, own = torch.nn.Linear(2, 2), dcpx.PerRank(torch.get_rng_state())
    manager = manager_of(tmp_path)
    values = {"x": torch.arange(5), "nested": {"a": (1, 2)}}
    manager.save("a name", state={"module": module, **values, "rng": own}, step=7)
    target = {
        "module": torch.nn.Linear(2, 2),
        "x": torch.zeros(5, dtype=torch.long),
        "nested": {"a": None},
        "rng": dcpx.PerRank(None),
    }
    info = manager.resume(state=target)
    assert (info.tag, info.step) == ("a name", 7)
    assert_same(module.state_dict(), target["module"].state_dict())
    assert_same(values, {name: target[name] for name in values})
    assert_same(own.value, target["rng"].value)


def test_part_that_was_not_saved_is_an_error_unless_not_strict(tmp_path: Path) -> None:
    training, loader, manager = Training(), Held(position=3), manager_of(tmp_path)
    training.train(1)
    manager.save(1, model=training.model)
    scheduler = training.scheduler
    for parts, text in (
        ({"lr_scheduler": scheduler, "dataloader": loader}, "lr_scheduler, dataloader was not sav"),
        ({"optimizer": training.optimizer}, r"optimizer\."),
        ({"state": {"rng": dcpx.PerRank(None)}}, r"state\.rng was not saved"),
    ):
        with pytest.raises(dcpx.MismatchError, match=text):
            manager.resume(model=training.model, **parts)
    info = manager.resume(**training.parts, dataloader=loader, strict=False)
    assert not loader.taken
    assert info.report is not None and info.report.missing
    other, beside = Training(5), Training(6)
    manager.resume(**other.parts, strict=False)
    manager.resume(model=beside.model)
    assert not other.optimizer.state
    assert [other.train(i) for i in range(3)] == [beside.train(i) for i in range(3)]
    manager.resume(**other.parts, strict=False)
    assert len(other.optimizer.state) == 4  # what it had stays


def test_wrong_part_tag_or_step_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    manager: Any = manager_of(tmp_path / "root")
    wrong: list[Any] = [
        {"model": {"a": 1}}, {"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1.0)},
        {"model": torch.nn.Linear(1, 1), "optimizer": 3}, {"lr_scheduler": 3},
        {"dataloader": [1, 2]}, {"state": [1]}, {"state": {1: 2}}, {"metrics": {"loss": "low"}},
        {"metrics": 3.0}, {"step": -1},
    ]  # fmt: skip
    for parts in wrong:
        with pytest.raises(dcpx.OptionError):
            manager.save("tag", **parts)
    tags = [
        "", ".", "..", "a/b", "/", "a\0b", "newest", "newest.1", ".hidden", " a", "a\n", "x" * 250,
        "ä" * 125, -1, True, 1.0, b"x", "\udcff\udc00\ud800", None,
    ]  # fmt: skip
    for tag in tags:
        with pytest.raises(dcpx.OptionError, match=r"name a checkpoint|must be an int"):
            manager.save(tag, user_content=0)
        if tag is not None:
            with pytest.raises(dcpx.OptionError):
                manager.resume(tag=tag)
    with pytest.raises(dcpx.OptionError, match="save step 5 with step=7"):
        manager.save(5, step=7, user_content=0)
    assert not (tmp_path / "root").exists()
    manager.save(5, step=5, user_content=0)
    assert manager.latest() == "step-5"
    manager.save("x" * 249, user_content=1)
    assert manager.latest() == "x" * 249


def raised_in(manager: Any, *steps: int) -> None:
    with manager:
        for step in steps:
            manager.save(step, user_content=1)
        raise KeyError("mine")


def test_end_of_the_block_waits_and_hides_no_exception(tmp_path: Path, monkeypatch: Patch) -> None:
    manager = manager_of(tmp_path, async_save=True)
    with pytest.raises(KeyError):
        raised_in(manager, 1)
    assert manager_of(tmp_path).latest() == "step-1"
    with pytest.raises(dcpx.OptionError, match="closed"):
        manager.save(3, user_content=0)
    manager = manager_of(tmp_path)

    def fail(*_: Any) -> None:
        raise ValueError("of a handler of the user's")

    monkeypatch.setattr(manager._retention, "wait", fail)
    with pytest.raises(KeyError, match="mine"):  # it outlives any error of the end
        raised_in(manager)
    with pytest.raises(ValueError, match="handler"), manager:
        pass


def test_failed_save_raises_where_the_block_ends_and_leaves_the_newest(tmp_path: Path) -> None:
    with manager_of(tmp_path, async_save=True) as manager:
        manager.save(1, user_content=1)
    (tmp_path / "step-2").write_text("no directory")
    with pytest.raises(dcpx.DcpxError), manager_of(tmp_path, async_save=True) as manager:
        manager.save(2, user_content=2)
    info = manager_of(tmp_path).resume()
    assert (info.tag, info.user_content) == ("step-1", 1)


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
    with pytest.raises(dcpx.OptionError, match="step"):
        manager_of(tmp_path).save(integer(4), state={"x": 1}, step=integer(5))


def test_counts_steps_and_metrics_that_are_none_are_refused(tmp_path: Path) -> None:
    for value in (True, np.bool_(1), torch.tensor(True), 1.0, "1", -1, 0):
        for name in ("keep_last", "keep_every", "keep_best"):
            given = ("m", "min", value) if name == "keep_best" else value
            with pytest.raises(dcpx.OptionError, match=name):
                dcpx.CheckpointManager(tmp_path, **{name: given})
    manager = manager_of(tmp_path / "run", keep_best=("loss", "min", 1))
    for step in (True, np.bool_(1), torch.tensor(False), 1.0, -1):
        with pytest.raises(dcpx.OptionError):
            save_steps(manager, step)
        with pytest.raises(dcpx.OptionError, match="step"):
            manager.save("named", state={"x": 1}, step=step)
    for value in ("0.3", b"0.3", None, [1.0], "nan"):
        with pytest.raises(dcpx.OptionError, match="metrics") as info:
            save_steps(manager, 1, metrics={"loss": value})
        assert info.value.option == "metrics"
    with pytest.raises(dcpx.OptionError, match="nothing to save"):
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
            with pytest.raises(dcpx.OptionError, match=f"{name} must be .*; give it as {place}="):
                call(model=model, **given)
    assert not (tmp_path / "run").exists()


def test_arguments_by_position_that_have_names_are_refused_with_these(tmp_path: Path) -> None:
    manager: Any = manager_of(tmp_path / "run")
    make: Any = dcpx.CheckpointManager
    model = torch.nn.Linear(2, 2)
    for call, text in (
        (
            lambda: make(dcpx.WriteOptions(), "run"),
            "takes root by position, .* WriteOptions and 'run'; write options=",
        ),
        (
            lambda: make("run", dcpx.ReadOptions()),
            "CheckpointManager takes .*; write read_options=",
        ),
        (
            lambda: manager.save(model, 1),
            "save takes tag_or_step by .* a Linear and 1; write model",
        ),
        (lambda: manager.save(1, {"w": 1}), "all else by name, .*; write model= and the like"),
        (lambda: manager.resume(model), "resume takes nothing by position, .*; write model="),
    ):
        with pytest.raises(dcpx.OptionError, match=text) as raised:
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
