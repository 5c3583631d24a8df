"""A process that saves to a store is killed at any of its requests: old or new is there, whole.

The proxy kills it when a request has come, which is lost then, or when the store has done it. What
it has uploaded stays and is named by nothing; the next save to the same URL does not mind.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
from object_outcomes import LARGE_NUMEL, found, objects_at, put_objects, retries, save, state_of
from object_victims import killed_at
from support.machine import spread
from support.object_proxy import FaultProxy
from support.object_server import ObjectServer

WORKER = Path(__file__).with_name("object_kills_worker.py")
# kind of save -> elements of the old state (0: there is none), of the new one
SAVES = {"first": (0, 3000), "over": (3000, 3000), "parts": (3000, LARGE_NUMEL)}
_MOST = 100
_NEXT = state_of(3)


class Killed(NamedTuple):
    """How the process ended, and what it left."""

    status: int
    what: str  # of `Found`
    commit: int  # the number of the request that was done, as the proxy has seen; -1: none
    requests: int


class Victims:
    """Processes that save the new state over the old one."""

    def __init__(self, server: ObjectServer, proxy: FaultProxy, url: str, kind: str) -> None:
        old_numel, self._numel = SAVES[kind]
        self._server, self._proxy, self._url = server, proxy, url
        self._new = state_of(2, self._numel)
        self._old: dict[str, bytes] = {}
        if old_numel:
            with retries(0):
                save(state_of(1, old_numel), url)
            self._old = objects_at(server, url)
        self.before = "old" if old_numel else "none"

    def killed_at(self, number: int, *, is_done: bool) -> Killed:
        """Has one killed at a request, or `is_done`, at its answer; saves once more."""
        put_objects(self._server, self._url, self._old)
        self._proxy.heal()
        self._proxy.clear()
        arguments = [str(WORKER), self._url, "2", str(self._numel)]
        status = killed_at(self._proxy, number, arguments, is_done=is_done)
        requests = self._proxy.requests()
        self._proxy.heal()
        with retries(0):
            there = found(self._server, self._url, self._old, self._new)
            save(_NEXT, self._url)
            assert found(self._server, self._url, {}, _NEXT).what == "new"
        commits = [
            one.number
            for one in requests
            if one.kind == "put_object" and one.key.endswith("/.metadata") and one.is_done
        ]
        return Killed(status, there.what, *(commits or [-1]), len(requests))

    def check(self, killed: Killed) -> None:
        assert killed.what == ("new" if killed.commit >= 0 else self.before), killed


@pytest.fixture
def victims(
    request: pytest.FixtureRequest,
    object_server: ObjectServer,
    object_prefix: str,
    object_proxy: FaultProxy,
) -> Victims:
    return Victims(object_server, object_proxy, object_prefix, request.param)


@pytest.mark.parametrize("victims", SAVES, indirect=True)
def test_save_killed_at_a_request_leaves_old_or_new(victims: Victims, seed: int) -> None:
    """A sample: some request before the commit, the commit, and some after it, if there are."""
    whole = victims.killed_at(_MOST, is_done=False)
    assert (whole.status, whole.what) == (0, "new")
    draw = random.Random(seed)
    points = [
        (draw.randrange(whole.commit), draw.random() < 0.5),
        (whole.commit, False),
        (whole.commit, True),
        *((number, False) for number in range(whole.commit + 1, whole.requests)[-1:]),
    ]
    for number, is_done in points:
        killed = victims.killed_at(number, is_done=is_done)
        assert killed.status == -signal.SIGKILL
        victims.check(killed)


@pytest.mark.slow
@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("victims", SAVES, indirect=True)
def test_save_killed_at_any_request_leaves_old_or_new(
    victims: Victims, seed: int, is_done: bool
) -> None:
    seen = []
    for number in spread(_MOST, seed):
        killed = victims.killed_at(number, is_done=is_done)
        victims.check(killed)
        seen.append(killed.what)
        if killed.status == 0:
            break
    print(seen)
    assert killed.status == 0
    assert number >= killed.requests
    assert seen[0] == victims.before
    assert seen[-1] == "new"
    assert seen == sorted(seen, key="new".__eq__)  # never back
