"""Two jobs at one `s3://` root by mistake, late commits, wrong clocks, and names that are alike."""

from __future__ import annotations

import os
import time
from functools import partial

import pytest
import torch
from object_manager_outcomes import HOUR, Root, clock_ahead
from object_managers import manager_of, resumed, save_steps
from object_outcomes import LatePut, error_of, interrupted, retries, unanswered
from support.object_proxy import FaultProxy
from support.object_requests import Request
from support.object_server import ObjectServer

from torch_dcpx import (
    ConcurrentSaveError,
    OutcomeUnknownError,
    StorageError,
    UnsupportedError,
    WriteOptions,
)
from torch_dcpx.manager.store_root import StoreRoot


@pytest.fixture
def root(object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy) -> Root:
    return Root(object_server, object_proxy, object_prefix)


# ---- Two jobs -----------------------------------------------------------------------------------


def test_two_jobs_that_save_in_turns_keep_the_last_commits_of_both(root: Root) -> None:
    one, other = manager_of(root.url, keep_last=2), manager_of(root.url, keep_last=2)
    for step in (1, 3, 5):
        save_steps(one, step)
        save_steps(other, step + 1)
        assert root.whole() == ({1, 2} if step == 1 else {step, step + 1})
        root.assert_resumes(step + 1)
    root.assert_cleans_up(2)


def test_of_two_jobs_that_save_one_tag_at_once_the_later_commit_is_refused(root: Root) -> None:
    one, other = manager_of(root.url, keep_last=2), manager_of(root.url, keep_last=2)
    save_steps(one, 1)

    def overtake(_: Request) -> None:
        save_steps(other, 2)

    root.proxy.hook("put_object", overtake, key="/step-2/.metadata")
    with retries(0):
        assert type(error_of(partial(save_steps, one, 2))) is ConcurrentSaveError
    assert root.whole() == {1, 2}
    root.assert_resumes(2)
    save_steps(one, 3)
    root.assert_resumes(3)
    root.assert_cleans_up(2)


@pytest.mark.parametrize("same_tag", [False, True])
def test_commit_of_an_earlier_job_that_arrives_late_loses_nothing(
    root: Root, monkeypatch: pytest.MonkeyPatch, same_tag: bool
) -> None:
    save_steps(manager_of(root.url), 1)
    with retries(0), monkeypatch.context() as patch:
        late = LatePut(patch)
        late.takes = lambda key: key.endswith("/step-2/.metadata")
        late.before_next = unanswered
        zombie = manager_of(root.url, keep_last=2)
        assert type(error_of(partial(save_steps, zombie, 2))) is OutcomeUnknownError
        late.before_next = lambda: None
        assert resumed(manager_of(root.url)) == 1
        job = manager_of(root.url, keep_last=2)
        save_steps(job, 2 if same_tag else 3)
        if same_tag:
            with pytest.raises(StorageError):
                late.arrive()
        else:
            late.arrive()
        assert root.whole() == ({1, 2} if same_tag else {1, 2, 3})
    root.assert_resumes(2 if same_tag else 3)
    root.assert_cleans_up(2)


def test_job_that_notes_damage_beside_one_that_saves_takes_nothing_from_its_pointer(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(manager_of(root.url), 1, 2)
    reader, writer = manager_of(root.url), manager_of(root.url)
    assert resumed(reader) == 2
    reader._root.note_damaged("step-2")
    real = StoreRoot._found

    def raced(files: StoreRoot) -> object:
        found = real(files)
        monkeypatch.setattr(StoreRoot, "_found", real)
        save_steps(writer, 3)
        return found

    monkeypatch.setattr(StoreRoot, "_found", raced)
    reader._root.tell_damaged()
    pointer = manager_of(root.url)._root.files.read()
    assert pointer is not None
    assert (pointer.tag, len(pointer.damaged)) == ("step-3", 1)
    root.assert_resumes(3)


def test_root_without_conditional_writes_is_kept_as_well(root: Root) -> None:
    options = WriteOptions(conditional_commit=False)
    manager = manager_of(root.url, keep_last=2, options=options)
    save_steps(manager, 1, 2, 3)
    assert not [one for one in root.proxy.requests() if one.if_match or one.if_none_match
                if one.kind == "put_object"]  # fmt: skip
    assert root.whole() == {2, 3}
    root.assert_resumes(3)
    root.assert_cleans_up(2)


# ---- Time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("days", [-400, 400])
def test_clock_of_a_job_does_not_count(
    root: Root, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    base, now = root.base(), time.time
    root.reset(base)
    monkeypatch.setattr(time, "time", lambda: now() + days * 24 * HOUR)
    save_steps(manager_of(root.url, keep_last=2), 4, 5)
    assert {name for name in base if name.startswith(("step-1/", "step-9/"))} <= root.names()
    with clock_ahead(2 * HOUR):
        save_steps(manager_of(root.url, keep_last=2), 6)
    assert not [name for name in root.names() if name.startswith(("step-1/", "step-9/"))]
    root.assert_resumes(6)


def test_no_grace_removes_data_behind_the_next_commit(root: Root) -> None:
    manager = manager_of(root.url, keep_last=1, grace_s=0)
    for step in range(1, 5):
        save_steps(manager, step)
    tags = {name.partition("/")[0] for name in root.names()}
    assert tags == {"newest", "step-3", "step-4"}
    root.assert_resumes(4)


# ---- Names --------------------------------------------------------------------------------------

_TAGS = ("step-1", "step-10", "step-1 a", "größe", "日本", "50%20", "a+b", "a:b~c*", "step-1.x")


def test_tags_that_are_alike_or_odd_are_kept_apart(root: Root) -> None:
    manager = manager_of(root.url)
    for number, tag in enumerate(_TAGS):
        manager.save(tag, state={"x": torch.full((40,), float(number))}, step=number + 1)
    assert sorted(manager.tags()) == sorted(_TAGS)
    for number, tag in enumerate(_TAGS):
        assert resumed(manager_of(root.url), tag=tag) == number
    manager.pin("step-10")
    for tag in _TAGS:
        if tag not in ("step-10", _TAGS[-1]):
            manager.delete(tag)
    assert manager.tags() == ["step-10", _TAGS[-1]]
    assert root.objects()["step-10/.dcpx.pin"] == b""


def test_objects_of_others_cost_no_request_and_stay(root: Root) -> None:
    manager = manager_of(root.url, keep_last=1, grace_s=0)
    save_steps(manager, 1, 2, 3)
    counts = []
    foreign = {f"events.{number}" for number in range(1100)}
    for step in (4, 5):
        root.proxy.clear()
        save_steps(manager, step)
        counts.append(root.proxy.count())
        for name in foreign if step == 4 else ():
            root.server.put(f"{root.url}/{name}", b"")
    assert counts[1] <= counts[0] + 8  # pages of the listings of the root
    assert foreign <= root.names()


# ---- Processes ----------------------------------------------------------------------------------


def test_forked_child_is_refused_and_its_parent_goes_on(root: Root) -> None:
    manager = manager_of(root.url, keep_last=1)
    save_steps(manager, 1)
    pid = os.fork()
    if pid == 0:  # no test's code may run on in it
        errors = [error_of(manager.latest), error_of(manager_of(root.url).latest)]
        manager.close()
        os._exit(0 if [type(one) for one in errors] == [UnsupportedError] * 2 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    save_steps(manager, 2)
    root.assert_resumes(2)


_PHASES = ("begin_save", "write", "end_save", "tidy", "remove")


@pytest.mark.parametrize("phase", _PHASES)
def test_interrupted_save_leaves_the_old_or_the_new_checkpoint(
    root: Root, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    save_steps(manager_of(root.url), 1, 2)
    manager = manager_of(root.url, keep_last=1)  # its first commit begins with a retention
    with monkeypatch.context() as patch:
        patch.setattr(StoreRoot, phase, interrupted)
        with pytest.raises(KeyboardInterrupt):
            save_steps(manager, 3)
    whole = root.whole()
    assert whole & {2, 3}
    root.assert_resumes(max(whole))
    root.assert_cleans_up(1)
