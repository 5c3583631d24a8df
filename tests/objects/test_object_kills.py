"""A process that uses a store is killed at any of its requests: old or new is there, whole.

The proxy kills it when a request has come, which is lost then, or when the store has done it. What
it has uploaded stays and is named by nothing; the next call to the same URL does not mind.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from object_exports import INDEX, KINDS, SINGLE, export, exported, is_same, tensors_of
from object_outcomes import LARGE_NUMEL, Store, retries, save, state_of
from object_roots import Root
from support.machine import points, seconds, spread
from support.object_requests import Request
from support.small_managers import save_steps
from support.warm import warm_parent

pytestmark = pytest.mark.usefixtures("proxy")

_MOST = 200  # no victim has so many requests
_DEADLINE_S = seconds(300)
_IMPORTS = (
    f"import sys; sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]}"
)


class Killed(NamedTuple):
    """How a process ended, and what it asked for."""

    was_killed: bool
    requests: list[Request]

    def commits(self, *ends: str) -> list[Request]:
        """Returns the requests that the store has done that end the upload of such a key."""
        kinds = ("put_object", "complete_upload")
        return [one for one in self.requests if one.kind in kinds and one.key.endswith(ends)]


def killed_at(store: Store, number: int, code: str, *, is_done: bool) -> Killed:
    """Runs code, and kills it when a request has come, which is lost then; or, `is_done`, when the
    store has done it.
    """
    started = threading.Event()
    victim: list[Any] = []

    def kill(_: Request) -> str:
        if not started.wait(_DEADLINE_S):
            raise TimeoutError
        os.kill(victim[0].pid, signal.SIGKILL)
        return "lost_answer" if is_done else "reset"

    store.proxy.hook(number, kill, is_done=is_done)
    with tempfile.TemporaryFile("w+") as out:
        command = ["-c", f"{_IMPORTS}\n{code}"]
        victim.append(warm_parent().start(command, out, out, env=os.environ))
        started.set()
        try:
            status: int = victim[0].wait(_DEADLINE_S)
        finally:
            victim[0].kill()
        out.seek(0)
        said = out.read()
    assert status in (0, -signal.SIGKILL), said
    requests = store.proxy.requests()
    store.proxy.heal()
    return Killed(status != 0, requests)


# ---- A save -------------------------------------------------------------------------------------

# kind of save -> elements of the old state (0: there is none), of the new one
SAVES = {"first": (0, 3000), "over": (3000, 3000), "parts": (3000, LARGE_NUMEL)}


class Saves:
    """Processes that save the new state over the old one."""

    def __init__(self, store: Store, kind: str) -> None:
        old_numel, numel = SAVES[kind]
        self._store, self._new = store, state_of(2, numel)
        self._old = store.saved(state_of(1, old_numel)) if old_numel else {}
        self._code = (
            f"from object_outcomes import save, state_of\nsave(state_of(2, {numel}), {store.url!r})"
        )
        self.before = "old" if old_numel else "none"

    def killed_at(self, number: int, *, is_done: bool) -> tuple[Killed, str]:
        """Has one killed at a request, or at its answer; saves once more. Returns what it left."""
        self._store.reset(self._old)
        killed = killed_at(self._store, number, self._code, is_done=is_done)
        with retries(0):
            what = self._store.found(self._old, self._new).what
            save(state_of(3), self._store.url)
            assert self._store.found({}, state_of(3)).what == "new"
        is_new = any(one.is_done for one in killed.commits("/.metadata"))
        assert what == ("new" if is_new else self.before), killed
        return killed, what


@pytest.mark.parametrize("kind", SAVES)
def test_save_killed_at_a_request_leaves_old_or_new(store: Store, seed: int, kind: str) -> None:
    """A sample: some request before the commit, the commit, and the last one."""
    saves, draw = Saves(store, kind), random.Random(seed)
    whole, what = saves.killed_at(_MOST, is_done=False)
    (commit,) = whole.commits("/.metadata")
    assert (whole.was_killed, what) == (False, "new")
    some = [(draw.randrange(commit.number), draw.random() < 0.5)]
    last = [(len(whole.requests) - 1, False)] if whole.requests[-1] != commit else []
    for number, is_done in [*some, (commit.number, False), (commit.number, True), *last]:
        assert saves.killed_at(number, is_done=is_done)[0].was_killed


@pytest.mark.slow
@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("kind", SAVES)
def test_save_killed_at_any_request_leaves_old_or_new(
    store: Store, seed: int, kind: str, is_done: bool
) -> None:
    saves, seen = Saves(store, kind), []
    for number in spread(_MOST, seed):
        killed, what = saves.killed_at(number, is_done=is_done)
        seen.append(what)
        if not killed.was_killed:
            break
    assert not killed.was_killed and number >= len(killed.requests)
    assert (seen[0], seen[-1]) == (saves.before, "new")
    assert seen == sorted(seen, key="new".__eq__)  # never back


# ---- An export ----------------------------------------------------------------------------------

EXPORTS = [("single", "shards"), ("shards", "shards"), ("shards", "parts")]


def _export_killed_at(
    store: Store, objects: dict[str, bytes], kind: str, number: int, *, is_done: bool
) -> Killed:
    """Has an export killed at a request, or at its answer, and asserts what must hold."""
    store.reset(objects)
    code = (
        "from object_exports import KINDS, export, tensors_of\n"
        f"export(tensors_of(2, KINDS[{kind!r}][0]), {store.url!r}, {kind!r})"
    )
    killed = killed_at(store, number, code, is_done=is_done)
    is_new = any(one.is_done for one in killed.commits(INDEX if kind == "shards" else SINGLE))
    found, used = exported(store.server, store.url)
    is_new &= not (kind == "shards" and SINGLE in used)  # loaders take it until it is removed
    assert is_same(found, tensors_of(2 if is_new else 1, KINDS[kind][0] if is_new else 3000))
    left = store.names() - used
    assert is_new or left <= {one.key.rpartition("/")[2] for one in killed.requests}
    export(tensors_of(3), store.url, "shards")
    assert is_same(exported(store.server, store.url)[0], tensors_of(3))
    return killed


@pytest.mark.parametrize("kinds", EXPORTS, ids="-".join)
def test_export_killed_at_a_request_leaves_old_or_new(
    store: Store, seed: int, kinds: tuple[str, str]
) -> None:
    """A sample: some request before the commit, the commit, and the last one."""
    export(tensors_of(1), store.url, kinds[0])
    objects, draw = store.objects(), random.Random(seed)
    whole = _export_killed_at(store, objects, kinds[1], _MOST, is_done=False)
    commit = whole.commits(INDEX if kinds[1] == "shards" else SINGLE)[0].number
    assert not whole.was_killed and commit > 0
    before = draw.randrange(commit), draw.random() < 0.5
    last = len(whole.requests) - 1
    for number, is_done in (before, (commit, False), (commit, True), (last, False)):
        assert _export_killed_at(store, objects, kinds[1], number, is_done=is_done).was_killed


@pytest.mark.slow
@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("kinds", EXPORTS, ids="-".join)
def test_export_killed_at_any_request_leaves_old_or_new(
    store: Store, seed: int, kinds: tuple[str, str], is_done: bool
) -> None:
    export(tensors_of(1), store.url, kinds[0])
    objects = store.objects()
    for number in spread(_MOST, seed):
        killed = _export_killed_at(store, objects, kinds[1], number, is_done=is_done)
        if not killed.was_killed:
            break
    assert not killed.was_killed and number > 3


# ---- A job with a manager -----------------------------------------------------------------------


class Jobs:
    """Jobs with keep_last=1 that save steps 3 and 4 over 1 and 2."""

    def __init__(self, root: Root) -> None:
        self._root = root
        with retries(0):
            save_steps(root.manager(), 1, 2)
        self._base = root.objects()
        self._code = (
            "from support.small_managers import manager_of, resumed, save_steps\n"
            f"with manager_of({root.url!r}, keep_last=1) as manager:\n"
            "    resumed(manager)\n    save_steps(manager, 3, 4)"
        )

    def killed_at(self, number: int, *, is_done: bool) -> tuple[Killed, list[Request]]:
        """Has one killed at a request, or at its answer; a next job goes on."""
        self._root.reset(self._base)
        killed = killed_at(self._root, number, self._code, is_done=is_done)
        commits = [one for one in killed.commits("/.metadata") if one.is_done]
        newest, whole = (2, 3, 4)[len(commits)], self._root.whole()
        assert newest in whole
        if not commits:  # its first retention, before its first commit, keeps the newest alone
            assert whole <= {1, 2}
        self._root.assert_resumes(newest)
        self._root.assert_cleans_up(1)
        return killed, commits


def test_job_killed_at_a_request_is_continued_and_cleaned_up(root: Root, seed: int) -> None:
    """A sample: the second commit, and some other requests."""
    jobs, draw = Jobs(root), random.Random(seed)
    whole, commits = jobs.killed_at(_MOST, is_done=False)
    assert (whole.was_killed, len(commits)) == (False, 2)
    count, second = len(whole.requests), commits[1].number
    some = [(draw.randrange(count), draw.random() < 0.5) for _ in range(points(5))]
    for number, is_done in [*some, (second, False), (second, True)]:
        print(number, is_done)
        assert jobs.killed_at(number, is_done=is_done)[0].was_killed


@pytest.mark.slow
@pytest.mark.parametrize("is_done", [False, True])
def test_job_killed_at_any_request_is_continued_and_cleaned_up(
    root: Root, seed: int, is_done: bool
) -> None:
    jobs, seen = Jobs(root), []
    for number in spread(_MOST, seed + is_done, 2):  # before one request, behind the next
        killed, commits = jobs.killed_at(number, is_done=is_done)
        seen.append(len(commits))
        if not killed.was_killed:
            break
    assert not killed.was_killed and (seen[0], seen[-1]) == (0, 2)
    assert seen == sorted(seen)  # never back
