"""Save and resume in one process: what was there comes back, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.states import assert_same
from trainings import Training, manager_of

from torch_dcpx import DcpxError, MismatchError, OptionError, PerRank, SaveHandle, load


@pytest.mark.parametrize("is_async", [False, True])
def test_resumed_training_equals_the_uninterrupted_bit_for_bit(
    tmp_path: Path, is_async: bool
) -> None:
    whole = Training()
    losses = [whole.train(step) for step in range(1, 7)]

    first = Training()
    with manager_of(tmp_path / "root", async_save=is_async) as manager:
        for step in (1, 2, 3):
            first.train(step)
        saved = manager.save(3, **first.parts, user_content={"epoch": 2})
        assert isinstance(saved, SaveHandle)
        assert is_async or saved.done()
        first.train(4)  # what was copied is what is saved

    again = Training(seed=1)
    info = manager_of(tmp_path / "root").resume(**again.parts)
    assert (info.tag, info.step, info.user_content) == ("step-3", 3, {"epoch": 2})
    assert info.report is not None and info.report.is_whole
    assert [again.train(step) for step in (4, 5, 6)] == losses[3:]
    assert_same(whole.model.state_dict(), again.model.state_dict())


@pytest.mark.parametrize("several", [list, dict])
def test_several_optimizers_and_frozen_groups_come_back(tmp_path: Path, several: Any) -> None:
    def made(seed: int) -> tuple[Training, Any]:
        training = Training(seed)
        first, second = training.model
        second.bias.requires_grad_(False)
        optimizers = {
            "one": torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9),
            "two": torch.optim.AdamW(
                [{"params": [second.weight]}, {"params": [second.bias], "lr": 7.0}], lr=0.5
            ),
        }
        return training, optimizers if several is dict else list(optimizers.values())

    def train(training: Training, optimizers: Any, step: int) -> None:
        training.gradients(step)
        for optimizer in optimizers.values() if several is dict else optimizers:
            optimizer.step()

    training, optimizers = made(0)
    train(training, optimizers, 1)
    manager = manager_of(tmp_path)
    manager.save(1, model=training.model, optimizer=optimizers)
    train(training, optimizers, 2)

    other, others = made(1)
    manager.resume(model=other.model, optimizer=others)
    train(other, others, 2)
    assert_same(training.model.state_dict(), other.model.state_dict())


def test_optimizer_is_left_alone_on_request(tmp_path: Path) -> None:
    training = Training()
    training.train(1)
    manager = manager_of(tmp_path)
    manager.save(1, **training.parts)
    other = Training(1)
    manager.resume(**other.parts, load_optimizer=False)
    assert_same(training.model.state_dict(), other.model.state_dict())
    assert not other.optimizer.state
    assert other.scheduler.last_epoch == 0


def test_state_holds_tensors_values_stateful_objects_and_what_is_each_ranks_own(
    tmp_path: Path,
) -> None:
    module = torch.nn.Linear(2, 2)
    manager = manager_of(tmp_path)
    own = PerRank(torch.get_rng_state())
    state = {"module": module, "x": torch.arange(5), "nested": {"a": (1, 2)}, "rng": own}
    manager.save("a name", state=state, step=7)
    target = {
        "module": torch.nn.Linear(2, 2),
        "x": torch.zeros(5, dtype=torch.long),
        "nested": {"a": None},
        "rng": PerRank(None),
    }
    info = manager.resume(state=target)
    assert (info.tag, info.step) == ("a name", 7)
    assert_same(module.state_dict(), target["module"].state_dict())
    assert_same(
        {"x": torch.arange(5), "nested": {"a": (1, 2)}}, {k: target[k] for k in ("x", "nested")}
    )
    assert_same(own.value, target["rng"].value)


class Loader:
    """What a stateful data loader is to a manager."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def test_dataloader_comes_back(tmp_path: Path) -> None:
    manager = manager_of(tmp_path)
    manager.save(1, dataloader=Loader(5))
    loader = Loader()
    manager.resume(dataloader=loader)
    assert loader.position == 5


def test_part_that_was_not_saved_is_an_error_unless_not_strict(tmp_path: Path) -> None:
    training, loader = Training(), Loader(3)
    manager = manager_of(tmp_path)
    manager.save(1, model=training.model)
    with pytest.raises(MismatchError, match="lr_scheduler, dataloader was not saved"):
        manager.resume(model=training.model, lr_scheduler=training.scheduler, dataloader=loader)
    with pytest.raises(MismatchError, match=r"state\.rng was not saved"):
        manager.resume(state={"rng": PerRank(None)})
    with pytest.raises(MismatchError, match=r"optimizer\."):
        manager.resume(model=training.model, optimizer=training.optimizer)
    info = manager.resume(**training.parts, dataloader=loader, strict=False)
    assert loader.position == 3
    assert info.report is not None and info.report.missing


def test_optimizer_that_was_not_saved_stays_without_state(tmp_path: Path) -> None:
    training = Training()
    training.train(1)
    manager = manager_of(tmp_path)
    manager.save(1, model=training.model)
    other, beside = Training(5), Training(6)
    manager.resume(**other.parts, strict=False)
    manager.resume(model=beside.model)
    assert not other.optimizer.state
    assert [other.train(i) for i in range(3)] == [beside.train(i) for i in range(3)]
    manager.resume(**other.parts, strict=False)
    assert len(other.optimizer.state) == 4  # what it had stays


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": {"a": 1}},
        {"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1.0)},
        {"model": torch.nn.Linear(1, 1), "optimizer": 3},
        {"lr_scheduler": 3},
        {"dataloader": [1, 2]},
        {"state": [1]},
        {"state": {1: 2}},
        {"metrics": {"loss": "low"}},
        {"metrics": 3.0},
        {"step": -1},
    ],
    ids=",".join,
)
def test_wrong_part_is_refused_before_anything_is_made(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(OptionError):
        manager_of(tmp_path / "root").save("tag", **wrong)
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    "tag",
    ["", ".", "..", "a/b", "/", "a\0b", "newest", "newest.1", ".hidden", " a", "a\n", "x" * 250,
     "ä" * 125, -1, True, 1.0, None, b"x", "\udcff\udc00\ud800"],
    ids=repr,
)  # fmt: skip
def test_bad_tag_is_refused(tmp_path: Path, tag: Any) -> None:
    manager = manager_of(tmp_path / "root")
    with pytest.raises(OptionError, match=r"name a checkpoint|must be an int"):
        manager.save(tag, user_content=0)
    if tag is not None:
        with pytest.raises(OptionError):
            manager.resume(tag=tag)
    assert not (tmp_path / "root").exists()


def test_step_and_another_step_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="save step 5 with step=7"):
        manager_of(tmp_path / "root").save(5, step=7, user_content=0)
    assert not (tmp_path / "root").exists()
    manager_of(tmp_path).save(5, step=5, user_content=0)
    assert manager_of(tmp_path).latest() == "step-5"


def test_longest_tag_is_taken(tmp_path: Path) -> None:
    manager = manager_of(tmp_path)
    manager.save("x" * 249, user_content=1)
    assert manager.latest() == "x" * 249


def test_end_of_the_block_waits_and_hides_no_exception(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, async_save=True)

    def train() -> None:
        with manager:
            manager.save(1, user_content=1)
            raise KeyError("mine")

    with pytest.raises(KeyError):
        train()
    assert manager_of(tmp_path).latest() == "step-1"
    with pytest.raises(OptionError, match="closed"):
        manager.save(3, user_content=0)


def test_exception_of_the_block_outlives_any_error_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = manager_of(tmp_path)

    def fail(*_: Any) -> None:
        raise ValueError("of a handler of the user's")

    monkeypatch.setattr(manager._retention, "wait", fail)

    def train() -> None:
        with manager:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train()
    with pytest.raises(ValueError, match="handler"), manager:
        pass


def test_failed_save_raises_where_the_block_ends_and_leaves_the_newest(tmp_path: Path) -> None:
    with manager_of(tmp_path, async_save=True) as manager:
        manager.save(1, user_content=1)
    (tmp_path / "step-2").write_text("no directory")
    with pytest.raises(DcpxError), manager_of(tmp_path, async_save=True) as manager:
        manager.save(2, user_content=2)
    info = manager_of(tmp_path).resume()
    assert (info.tag, info.user_content) == ("step-1", 1)


def test_checkpoint_is_one_that_dcpx_load_reads(tmp_path: Path) -> None:
    training = Training()
    manager_of(tmp_path).save(1, model=training.model)
    target = {"model": {k: torch.zeros_like(v) for k, v in training.model.state_dict().items()}}
    load(target, tmp_path / "step-1")
    assert_same(training.model.state_dict(), target["model"])
