"""What CheckpointManager promises wherever its root lies: a directory, two clients' mounts of one,
a store.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from support.place_fixture import Place
from support.small_managers import manager_of, resumed, save_steps

from torch_dcpx import (
    CheckpointManager,
    NotCommittedError,
    StorageError,
    UnsupportedError,
)


def blank() -> dict[str, Any]:
    return {"x": torch.zeros(40)}


def test_manager_saves_lists_resumes_and_keeps_the_last(place: Place) -> None:
    with manager_of(place.url, keep_last=2) as manager:
        assert manager.resume(state=blank()).is_fresh
        assert (manager.latest(), manager.tags()) == (None, [])
        for step in range(1, 5):
            save_steps(manager, step, user_content={"epoch": step}, metrics={"loss": 1.0})
        assert manager.tags() == ["step-3", "step-4"] and manager.latest() == "step-4"
    place.forget()
    other, state = manager_of(place.seen), blank()
    info = other.resume(state=state)
    assert (info.tag, info.step, info.user_content) == ("step-4", 4, {"epoch": 4})
    assert info.metrics == {"loss": 1.0} and state["x"].tolist() == [4.0] * 40
    assert resumed(other, tag=3) == 3
    assert not [name for name in place.names("step-1") if name == ".metadata"]


def test_async_saves_return_in_order_and_are_there_at_the_end(place: Place) -> None:
    with CheckpointManager(place.url, no_dist=True, keep_last=1) as manager:
        handles = [manager.save(step, state={"x": torch.ones(9)}) for step in (1, 2, 3)]
        assert [handle.result().checkpoint_id for handle in handles] == [
            f"{place.url}/step-{step}" for step in (1, 2, 3)
        ]
    place.forget()
    assert manager_of(place.seen).tags() == ["step-3"]


def test_rules_of_steps_metrics_and_pins(place: Place) -> None:
    manager = manager_of(place.url, keep_every=4, keep_best=("loss", "min", 1))
    save_steps(manager, 1, metrics={"loss": 5.0})
    manager.pin(1)
    for step, loss in ((2, 0.5), (3, 0.9), (4, 3.0), (5, 2.0), (6, 1.0)):
        save_steps(manager, step, metrics={"loss": loss})
    assert manager.tags() == ["step-1", "step-2", "step-4", "step-6"]
    with pytest.raises(UnsupportedError, match="it is pinned; unpin it first"):
        manager.delete(1)
    with pytest.raises(UnsupportedError, match="it is pinned"):
        manager.save(1, state={"x": torch.zeros(2)})
    manager.unpin(1)
    manager.delete(1)
    assert manager.tags() == ["step-2", "step-4", "step-6"]
    manager.delete(6)
    assert manager.latest() == "step-4"
    manager.delete(2)
    with pytest.raises(UnsupportedError, match="the last whole checkpoint"):
        manager.delete(4)
    with pytest.raises(NotCommittedError):
        manager.pin(6)


def test_tag_that_is_saved_again_behind_its_removal_is_whole(place: Place) -> None:
    with manager_of(place.url, keep_last=1) as manager:
        save_steps(manager, 1, 2)
        assert manager.tags() == ["step-2"]
        save_steps(manager, 1)  # the newest now
        manager.pin(1)
        manager.unpin(1)
        place.forget()
        assert resumed(manager_of(place.seen), tag=1) == 1


@pytest.mark.parametrize("damage", ["gone", "torn"])
def test_pointer_that_is_gone_or_torn_is_found_anew(
    place: Place, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    with manager_of(place.url) as manager:
        save_steps(manager, 1, 2)
    assert json.loads(place.get("newest"))["tag"] == "step-2"
    place.put("newest", b"{") if damage == "torn" else place.delete("newest")
    assert resumed(manager_of(place.seen)) == 2
    assert ("is of no use" in caplog.text) == (damage == "torn")
    with manager_of(place.url) as manager:
        save_steps(manager, 3)
    place.forget()
    assert json.loads(place.get("newest"))["tag"] == "step-3"
    assert resumed(manager_of(place.seen)) == 3


def test_damaged_newest_is_passed_over_and_noted(place: Place) -> None:
    with manager_of(place.url) as manager:
        for step in (1, 2):
            manager.save(step, state={"x": torch.full((90_000,), float(step))})
    name = place.data("step-2")
    content, values = place.get(name), torch.full((90_000,), 2.0).numpy().tobytes()
    assert content.count(values) == 1
    place.put(name, content.replace(values, values[:-4] + b"\1" + values[-3:]))
    manager, state = manager_of(place.url, keep_last=1), {"x": torch.zeros(90_000)}
    info = manager.resume(state=state)
    assert info.tag == "step-1" and torch.equal(state["x"], torch.ones(90_000))
    ((tag, file, _),) = info.passed_over
    assert (tag, file) == ("step-2", f"{place.url}/{name}")
    assert json.loads(place.get("newest"))["damaged"]
    with pytest.raises(UnsupportedError, match="not damaged"):
        manager.delete(1)


def test_checkpoint_that_lost_a_file_is_skipped(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with manager_of(place.url) as manager:
        save_steps(manager, 1, 2)
    place.delete(place.data("step-2"))
    manager = manager_of(place.url)
    if place.is_shared:  # another part of the file system may have it
        with pytest.raises(StorageError, match="is known to be committed"):
            resumed(manager)
        return
    assert resumed(manager) == 1
    assert "skipped checkpoint 'step-2'" in caplog.text
    assert manager.tags() == ["step-1"]


def test_root_with_parts_of_a_save_alone_is_no_fresh_start(place: Place) -> None:
    place.put("logs/a.txt", b"x")
    place.put("notes.txt", b"x")
    assert manager_of(place.url).resume(state=blank()).is_fresh
    place.put("step-1/__0_0.distcp", b"x")
    error, words = (StorageError, "step-1") if place.is_shared else (NotCommittedError, "none of")
    with pytest.raises(error, match=words):
        manager_of(place.url).resume(state=blank())
    assert place.is_shared or manager_of(place.url, allow_fresh=True).resume(state=blank()).is_fresh
    with manager_of(f"{place.url}/run") as manager:
        save_steps(manager, 1)
    with pytest.raises(NotCommittedError, match="it is a checkpoint itself"):
        manager_of(f"{place.url}/run/step-1").resume(state=blank())


_TAGS = ("step-1", "step-10", "step-1 a", "größe", "日本", "50%20", "a+b", "a:b~c*", "step-1.x")


def test_tags_that_are_alike_or_odd_are_kept_apart(place: Place) -> None:
    manager = manager_of(place.url)
    for number, tag in enumerate(_TAGS):
        manager.save(tag, state={"x": torch.full((40,), float(number))}, step=number + 1)
    assert sorted(manager.tags()) == sorted(_TAGS)
    place.forget()
    for number, tag in enumerate(_TAGS):
        assert resumed(manager_of(place.seen), tag=tag) == number
    manager.pin("step-10")
    for tag in _TAGS:
        if tag not in ("step-10", _TAGS[-1]):
            manager.delete(tag)
    assert manager.tags() == ["step-10", _TAGS[-1]]
    assert place.get("step-10/.dcpx.pin") == b""


@pytest.mark.parametrize("name", ["mine", "step-9"])
def test_copies_stay_and_take_no_slot(place: Place, name: str) -> None:
    for url, steps in (("run", (1, 2, 3)), ("other", range(46, 50))):
        with manager_of(f"{place.url}/{url}") as manager:
            save_steps(manager, *steps)
    for source, copy in (("run/step-3", f"run/{name}"), ("other/step-49", "run/step-49")):
        for file in place.names(source):
            place.put(f"{copy}/{file}", place.get(f"{source}/{file}"))
    with manager_of(f"{place.url}/run", keep_last=2) as manager:
        assert resumed(manager) == 3
        save_steps(manager, 4, 5, 6)
        assert manager.tags() == [name, "step-49", "step-5", "step-6"]
        assert (resumed(manager, tag=name), resumed(manager, tag=49)) == (3, 49)
    place.forget()
    assert resumed(manager_of(f"{place.seen}/run")) == 6


def test_export_of_a_tag_is_the_model_alone(place: Place) -> None:
    manager = manager_of(place.url)
    manager.save(7, model=torch.nn.Linear(30, 20), user_content={"epoch": 1})
    report = manager.export(7, f"{place.url}/out")
    assert (report.tensors, report.files) == (2, ("model.safetensors",))
    with pytest.raises(NotCommittedError):
        manager.export(8, f"{place.url}/out")
    assert not manager.dry_run(lambda name: name, tag=7).dropped
