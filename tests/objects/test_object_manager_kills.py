"""A job beneath a root in a store is killed at any of its requests: the next one goes on.

It resumes from the newest commit, and when the grace is over, its retention leaves nothing of the
killed job but what is kept.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
from object_manager_outcomes import Root
from object_managers import manager_of, save_steps
from object_outcomes import retries
from object_victims import killed_at
from support.machine import points, spread
from support.object_proxy import FaultProxy
from support.object_server import ObjectServer

WORKER = Path(__file__).with_name("object_manager_kills_worker.py")
_MOST = 200
_SAVES = (3, 4)  # of the victim, over 1 and 2


class Killed(NamedTuple):
    """How the process ended, and what it left."""

    status: int
    commits: list[int]  # numbers of the requests that have committed, as the proxy has seen
    requests: int


class Victims:
    """Jobs with keep_last=1 that save steps 3 and 4 over 1 and 2."""

    def __init__(self, root: Root) -> None:
        self._root = root
        root.reset({})
        with retries(0):
            save_steps(manager_of(root.url), 1, 2)
        self._base = root.objects()

    def killed_at(self, number: int, *, is_done: bool) -> Killed:
        """Has one killed at a request, or `is_done`, at its answer; a next job goes on."""
        root = self._root
        root.reset(self._base)
        arguments = [str(WORKER), root.url, "1", *map(str, _SAVES)]
        status = killed_at(root.proxy, number, arguments, is_done=is_done)
        requests = root.proxy.requests()
        root.proxy.heal()
        commits = [
            one.number
            for one in requests
            if one.kind == "put_object" and one.key.endswith("/.metadata") and one.is_done
        ]
        self._check(len(commits))
        return Killed(status, commits, len(requests))

    def _check(self, commits: int) -> None:
        """Asserts what must hold after so many commits of the victim."""
        newest = (2, *_SAVES)[commits]
        whole = self._root.whole()
        assert newest in whole
        if not commits:  # its first retention, before its first commit, keeps the newest alone
            assert whole <= {1, 2}
        self._root.assert_resumes(newest)
        self._root.assert_cleans_up(1)


@pytest.fixture
def victims(object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy) -> Victims:
    return Victims(Root(object_server, object_proxy, object_prefix))


def test_job_killed_at_a_request_is_continued_and_cleaned_up(victims: Victims, seed: int) -> None:
    """A sample: the second commit, and some other requests."""
    whole = victims.killed_at(_MOST, is_done=False)
    assert (whole.status, len(whole.commits)) == (0, 2)
    draw = random.Random(seed)
    some = [(draw.randrange(whole.requests), draw.random() < 0.5) for _ in range(points(5))]
    for number, is_done in [*some, (whole.commits[1], False), (whole.commits[1], True)]:
        print(number, is_done)
        killed = victims.killed_at(number, is_done=is_done)
        assert killed.status == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("is_done", [False, True])
def test_job_killed_at_any_request_is_continued_and_cleaned_up(
    victims: Victims, seed: int, is_done: bool
) -> None:
    seen = []
    for number in spread(_MOST, seed + is_done, 2):  # before one request, behind the next
        killed = victims.killed_at(number, is_done=is_done)
        seen.append(len(killed.commits))
        if killed.status == 0:
            break
    print(seen)
    assert killed.status == 0
    assert (seen[0], seen[-1]) == (0, 2)
    assert seen == sorted(seen)  # never back
