"""A resume ends on all ranks in the same way, whatever the caller's own code raises in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trainings import Called, Held, Patch, Training, manager_of

from torch_dcpx import OptionError, PerRank
from torch_dcpx.ranks.exchange import Exchange


def test_schedulers_that_were_not_saved_so_are_refused_first(tmp_path: Path) -> None:
    training, other = Training(), Training(1)
    training.train(1)
    manager_of(tmp_path).save(1, **training.parts)
    with pytest.raises(OptionError, match="lr_scheduler is a list of 1"):
        manager_of(tmp_path).resume(**{**other.parts, "lr_scheduler": [other.scheduler]})
    assert not other.optimizer.state


def test_scheduler_takes_its_state_behind_the_optimizer(tmp_path: Path) -> None:
    order: list[str] = []

    training, scheduler = Training(), Called(given=lambda _: order.append("scheduler"))
    training.optimizer.register_load_state_dict_post_hook(lambda _: order.append("optimizer"))
    parts = {**training.parts, "lr_scheduler": scheduler}
    manager_of(tmp_path).save(1, **parts)
    manager_of(tmp_path).resume(**parts)
    assert order == ["optimizer", "scheduler"]


@pytest.mark.parametrize(
    ("part", "steps"),
    [
        ({}, ["choose", "read"]),  # and "plan", which is no all_reduce
        ({"state": {"x": 0}}, ["choose", "read", "apply"]),
        ({"dataloader": True}, ["choose", "read", "apply"]),
    ],
    ids="-".join,
)
def test_ranks_agree_no_more_often_than_there_is_something_to_apply(
    tmp_path: Path, monkeypatch: Patch, part: dict[str, Any], steps: list[str]
) -> None:
    own = {"dataloader": Held()} if "dataloader" in part else {}
    manager = manager_of(tmp_path)
    manager.save(1, state={"x": 1}, dataloader=Held(), user_content={"a": PerRank(3)})
    found: list[str] = []
    plain = Exchange.all_reduce

    def counted(self: Exchange, step: str, *args: Any) -> Any:
        found.append(step)
        return plain(self, step, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Exchange, "all_reduce", counted)
    assert manager.resume(**{**part, **own}).user_content == {"a": 3}
    assert list(dict.fromkeys(found)) == steps
