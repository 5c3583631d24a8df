"""CheckpointManager in a store: what it keeps, removes, resumes, pins, and lists."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from object_managers import manager_of, names, resumed, save_steps

import torch_dcpx as dcpx
from torch_dcpx import (
    CheckpointManager,
    ConcurrentSaveError,
    DcpxReader,
    NotCommittedError,
    OptionError,
    ReadOptions,
    StorageError,
    UnsupportedError,
    WriteOptions,
)
from torch_dcpx.manager import resume
from torch_dcpx.manager.store_root import StoreRoot
from torch_dcpx.storage.object_store import Bucket

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.object_server import ObjectServer

HOUR = 3600.0


def test_manager_saves_lists_resumes_and_keeps_the_last(
    object_prefix: str, object_server: ObjectServer, later: list[float]
) -> None:
    manager = manager_of(object_prefix, keep_last=2)
    assert manager.resume(state={"x": torch.zeros(40)}).is_fresh
    assert (manager.latest(), manager.tags()) == (None, [])
    for step in range(1, 5):
        save_steps(manager, step, user_content={"epoch": step}, metrics={"loss": 1.0})
        later[0] += HOUR
    assert manager.tags() == ["step-3", "step-4"]
    assert manager.latest() == "step-4"
    assert names(object_server, object_prefix, "step-1") == set()
    assert names(object_server, object_prefix, "step-2") == {".dcpx.deleted", "data"}
    assert names(object_server, object_prefix, "step-3") == {".metadata", "data"}
    other = manager_of(object_prefix)
    state = {"x": torch.zeros(40)}
    info = other.resume(state=state)
    assert (info.tag, info.step, info.user_content) == ("step-4", 4, {"epoch": 4})
    assert info.metrics == {"loss": 1.0} and state["x"].tolist() == [4.0] * 40
    assert resumed(other, tag=3) == 3


@pytest.mark.parametrize("count", [1, 9])
def test_resume_chooses_again_when_another_job_removes_what_it_has_chosen(
    object_prefix: str, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    manager, other, removed = manager_of(object_prefix), manager_of(object_prefix), []
    save_steps(other, *range(1, 11))
    reader = resume.quiet_reader

    def late(path: str, options: ReadOptions) -> DcpxReader:
        if len(removed) < count:
            other.delete(path.rpartition("/")[2])
            removed.append(path)
        return reader(path, options)

    monkeypatch.setattr(resume, "quiet_reader", late)
    if count == 1:
        assert resumed(manager) == 9
        removed.clear()
        with pytest.raises(NotCommittedError):
            resumed(manager, tag=8)
    else:
        with pytest.raises(NotCommittedError):
            resumed(manager)
        assert resumed(manager) == 1


def test_async_saves_of_a_manager(object_prefix: str) -> None:
    with CheckpointManager(object_prefix, no_dist=True, keep_last=1) as manager:
        handles = [manager.save(step, state={"x": torch.ones(9)}) for step in (1, 2, 3)]
        assert [handle.result().checkpoint_id for handle in handles] == [
            f"{object_prefix}/step-{step}" for step in (1, 2, 3)
        ]
    assert manager_of(object_prefix).tags() == ["step-3"]


def test_data_of_a_removed_checkpoint_stay_for_the_grace(
    object_prefix: str, object_server: ObjectServer, later: list[float]
) -> None:
    manager = manager_of(object_prefix, keep_last=1, grace_s=100)
    save_steps(manager, 1)
    with dcpx.open_checkpoint(f"{object_prefix}/step-1") as reader:
        save_steps(manager, 2)
        with pytest.raises(NotCommittedError):
            dcpx.load_tensors(f"{object_prefix}/step-1")
        later[0] = 97.0
        save_steps(manager, 3)
        assert reader["state.x"][...].tolist() == [1.0] * 40
        later[0] = 101.0
        save_steps(manager, 4)
        with pytest.raises(StorageError, match="No such file"):
            reader["state.x"][...]
    assert names(object_server, object_prefix, "step-1") == set()


def test_tag_that_is_saved_again_while_its_data_wait_is_whole(
    object_prefix: str, object_server: ObjectServer, later: list[float]
) -> None:
    manager = manager_of(object_prefix, keep_last=1)
    save_steps(manager, 1, 2)
    assert ".metadata" not in names(object_server, object_prefix, "step-1")
    save_steps(manager, 1)  # the newest now
    assert names(object_server, object_prefix, "step-1") == {".metadata", "data", ".dcpx.deleted"}
    manager.pin(1)  # `.dcpx.deleted` is of another one
    manager.unpin(1)
    later[0] = HOUR
    save_steps(manager, 2)  # which keeps but the last: 1 goes, now for its own hour
    assert manager.tags() == ["step-2"]
    later[0] = 3 * HOUR
    save_steps(manager, 3)
    assert names(object_server, object_prefix, "step-1") == set()
    assert resumed(manager) == 3


def test_rules_of_steps_metrics_and_pins(object_prefix: str, later: list[float]) -> None:
    manager = manager_of(object_prefix, keep_every=4, keep_best=("loss", "min", 1), grace_s=0)
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


def after_put(patch: pytest.MonkeyPatch, name: str, call: Callable[[], None]) -> None:
    """Has `call` run once, when an object of this name has been put."""
    put, calls = Bucket.put_again, [call]

    def put_then(self: Bucket, key: str, body: bytes) -> None:
        put(self, key, body)
        if key.endswith(f"/{name}") and calls:
            calls.pop()()

    patch.setattr(Bucket, "put_again", put_then)


def test_of_a_pin_and_a_removal_at_once_one_sees_the_other(
    object_prefix: str, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, other = manager_of(object_prefix), manager_of(object_prefix)
    save_steps(manager, 1, 2)
    refused: list[str] = []

    def remove() -> None:
        with pytest.raises(UnsupportedError, match="it is pinned"):
            other.delete(1)
        refused.append("remove")

    def pin() -> None:
        with pytest.raises(ConcurrentSaveError, match="it is being deleted"):
            other.pin(1)
        refused.append("pin")

    with monkeypatch.context() as patch:
        after_put(patch, ".dcpx.pin", remove)
        manager.pin(1)
    assert names(object_server, object_prefix, "step-1") == {".metadata", "data", ".dcpx.pin"}
    manager.unpin(1)
    with monkeypatch.context() as patch:
        after_put(patch, ".dcpx.deleted", pin)
        manager.delete(1)
    assert refused == ["remove", "pin"]
    assert names(object_server, object_prefix, "step-1") == {".dcpx.deleted", "data"}


@pytest.mark.parametrize("damage", ["gone", "torn"])
def test_pointer_that_is_gone_or_torn_is_found_anew(
    object_prefix: str,
    object_server: ObjectServer,
    damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save_steps(manager_of(object_prefix), 1, 2)
    pointer = f"{object_prefix}/newest"
    assert json.loads(object_server.get(pointer))["tag"] == "step-2"
    object_server.remove(pointer)
    if damage == "torn":
        object_server.put(pointer, b"{")
    assert resumed(manager_of(object_prefix)) == 2
    assert ("is of no use" in caplog.text) == (damage == "torn")
    save_steps(manager_of(object_prefix), 3)
    assert json.loads(object_server.get(pointer))["tag"] == "step-3"
    assert resumed(manager_of(object_prefix)) == 3


def test_later_commit_of_another_job_stays_in_the_pointer(
    object_prefix: str, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, other = manager_of(object_prefix), manager_of(object_prefix)
    save_steps(manager, 1)
    save_steps(other, 2)
    real = StoreRoot._found

    def raced(root: StoreRoot) -> Any:
        """Another job replaces the pointer between the read and the PUT."""
        found = real(root)
        monkeypatch.setattr(StoreRoot, "_found", real)
        save_steps(other, 4, 5)
        return found

    def note_committed(*arguments: Any) -> None:
        monkeypatch.setattr(StoreRoot, "_found", raced)
        note(*arguments)

    note = manager._root.note_committed
    monkeypatch.setattr(manager._root, "note_committed", note_committed)
    save_steps(manager, 3)
    pointer = json.loads(object_server.get(f"{object_prefix}/newest"))
    assert pointer["tag"] == "step-5"
    assert resumed(manager_of(object_prefix)) == 5


def test_damaged_newest_is_passed_over_and_noted(
    object_prefix: str, object_server: ObjectServer, later: list[float]
) -> None:
    manager = manager_of(object_prefix, keep_last=1)
    for step in (1, 2):
        manager_of(object_prefix).save(step, state={"x": torch.full((90_000,), float(step))})
    (key,) = (k for k in object_server.keys(f"{object_prefix}/step-2") if "distcp" in k)
    url = f"{object_server.root}/{key}"
    content = object_server.get(url)
    values = torch.full((90_000,), 2.0).numpy().tobytes()
    assert content.count(values) == 1
    object_server.put(url, content.replace(values, values[:-4] + b"\1" + values[-3:]))
    state = {"x": torch.zeros(90_000)}
    info = manager.resume(state=state)
    assert info.tag == "step-1" and torch.equal(state["x"], torch.ones(90_000))
    ((tag, file, _),) = info.passed_over
    assert (tag, file) == ("step-2", url)
    assert json.loads(object_server.get(f"{object_prefix}/newest"))["damaged"]
    with pytest.raises(UnsupportedError, match="not damaged"):
        manager.delete(1)


def test_checkpoint_that_lost_an_object_is_skipped(
    object_prefix: str, object_server: ObjectServer, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(manager_of(object_prefix), 1, 2)
    for key in object_server.keys(f"{object_prefix}/step-2"):
        if key.endswith(".distcp"):
            object_server.remove(f"{object_server.root}/{key}")
    manager = manager_of(object_prefix)
    assert resumed(manager) == 1
    assert "skipped checkpoint 'step-2'" in caplog.text
    assert manager.tags() == ["step-1"]


def test_root_with_parts_of_a_save_alone_is_no_fresh_start(
    object_prefix: str, object_server: ObjectServer
) -> None:
    object_server.put(f"{object_prefix}/logs/a.txt", b"x")
    object_server.put(f"{object_prefix}/notes.txt", b"x")
    assert manager_of(object_prefix).resume(state={"x": torch.zeros(4)}).is_fresh
    object_server.put(f"{object_prefix}/step-1/__0_0.distcp", b"x")
    with pytest.raises(NotCommittedError, match="none of 1 entry is a whole checkpoint"):
        manager_of(object_prefix).resume(state={"x": torch.zeros(4)})
    manager = manager_of(object_prefix, allow_fresh=True)
    assert manager.resume(state={"x": torch.zeros(4)}).is_fresh
    save_steps(manager_of(f"{object_prefix}/run"), 1)
    with pytest.raises(NotCommittedError, match="it is a checkpoint itself"):
        manager_of(f"{object_prefix}/run/step-1").resume(state={"x": torch.zeros(4)})


def test_what_a_root_in_a_store_does_not_take(object_prefix: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="grace_s must be None: a directory has locks"):
        manager_of(str(tmp_path), grace_s=1.0)
    with pytest.raises(OptionError, match=r"read_options\.endpoint"):
        manager_of(
            object_prefix,
            options=WriteOptions(endpoint="http://a:1"),
            read_options=ReadOptions(endpoint="http://b:1"),
        )
    with pytest.raises(UnsupportedError, match="'gs://b/run' is a URL"):
        manager_of("gs://b/run")
    manager = manager_of(object_prefix)
    with pytest.raises(UnsupportedError, match=r"tag='.*://.*a' goes on with a query"):
        manager.save("a?b", state={"x": 1})
    assert manager.latest() is None


def test_endpoint_is_that_of_the_options(object_prefix: str, object_endpoint: str) -> None:
    manager = manager_of(object_prefix, options=WriteOptions(endpoint=object_endpoint))
    save_steps(manager, 1, 2)
    assert resumed(manager) == 2
    dropped = manager.dry_run(lambda name: name, tag=1).dropped
    assert not dropped
