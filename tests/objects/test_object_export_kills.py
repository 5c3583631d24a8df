"""A process that exports to a store is killed at any of its requests: old or new is there, whole.

The proxy kills it when a request has come, which is lost then, or when the store has done it.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from object_exports import INDEX, KINDS, SINGLE, export, exported, is_same, names_at, tensors_of
from object_outcomes import Store, objects_at
from object_victims import killed_at
from support.machine import spread
from support.object_proxy import FaultProxy
from support.object_server import ObjectServer

WORKER = Path(__file__).with_name("object_export_kills_worker.py")
_MOST = 100
EXPORTS = [("single", "shards"), ("shards", "shards"), ("shards", "parts")]


@pytest.fixture
def store(object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy) -> Store:
    return Store(object_server, object_proxy, object_prefix)


def _killed_at(
    store: Store, objects: dict[str, bytes], kind: str, number: int, *, is_done: bool
) -> tuple[bool, int, int]:
    """Has an export killed at a request, or at its answer, and asserts what must hold.

    Returns whether it was killed, the number of the request that commits, and of all.
    """
    store.reset(objects)
    arguments = [str(WORKER), store.url, "2", kind]
    status = killed_at(store.proxy, number, arguments, is_done=is_done)
    requests = store.proxy.requests()
    store.proxy.heal()
    last = INDEX if kind == "shards" else SINGLE
    kinds = ("put_object", "complete_upload")
    commits = [one.number for one in requests if one.kind in kinds and one.key.endswith(last)]
    is_new = any(requests[at].is_done for at in commits)
    found, used = exported(store.server, store.url)
    single_stays = kind == "shards" and SINGLE in used  # loaders take it until it is removed
    is_new &= not single_stays
    assert is_same(found, tensors_of(2 if is_new else 1, KINDS[kind][0] if is_new else 3000))
    left = names_at(store.server, store.url) - used
    assert is_new or left <= {one.key.rpartition("/")[2] for one in requests}
    export(tensors_of(3), store.url, "shards")
    assert is_same(exported(store.server, store.url)[0], tensors_of(3))
    return status != 0, *(commits or [-1])[:1], len(requests)


@pytest.mark.parametrize("kinds", EXPORTS, ids="-".join)
def test_export_killed_at_a_request_leaves_old_or_new(
    store: Store, seed: int, kinds: tuple[str, str]
) -> None:
    """A sample: some request before the commit, the commit, and the last one."""
    export(tensors_of(1), store.url, kinds[0])
    objects = objects_at(store.server, store.url)
    was_killed, commit, count = _killed_at(store, objects, kinds[1], _MOST, is_done=False)
    assert not was_killed and commit > 0
    draw = random.Random(seed)
    before = draw.randrange(commit), draw.random() < 0.5
    for number, is_done in (before, (commit, False), (commit, True), (count - 1, False)):
        was_killed, *_ = _killed_at(store, objects, kinds[1], number, is_done=is_done)
        assert was_killed


@pytest.mark.slow
@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("kinds", EXPORTS, ids="-".join)
def test_export_killed_at_any_request_leaves_old_or_new(
    store: Store, seed: int, kinds: tuple[str, str], is_done: bool
) -> None:
    export(tensors_of(1), store.url, kinds[0])
    objects = objects_at(store.server, store.url)
    for number in spread(_MOST, seed):
        if not _killed_at(store, objects, kinds[1], number, is_done=is_done)[0]:
            break
    assert number > 3
