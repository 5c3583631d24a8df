"""Several ranks save to one URL: all of it is there, or what was there before."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from object_outcomes import found, objects_at, put_objects, save, state_of
from support.object_proxy import FaultProxy
from support.object_requests import Request
from support.object_server import ObjectServer
from support.ranks import run_cases

pytestmark = pytest.mark.multirank

WORKER = Path(__file__).with_name("object_ranks_worker.py")
SAVES = ("dcpx", "dcp", "async")
RANKS = 2
OLD, NEW, OTHER = (state_of(seed) for seed in (1, 2, 3))


@pytest.fixture
def old(object_server: ObjectServer, object_prefix: str) -> dict[str, bytes]:
    """The objects of a checkpoint that one rank has saved."""
    save(OLD, f"{object_prefix}/old")
    return objects_at(object_server, f"{object_prefix}/old")


def test_ranks_save_to_a_store_and_any_number_of_them_loads(
    object_server: ObjectServer, object_prefix: str, tmp_path: Path
) -> None:
    run_cases(WORKER, RANKS, "save", tmp_path, object_prefix)
    for name in SAVES:
        url = f"{object_prefix}/{name}"
        assert found(object_server, url, {}, NEW) == ("new", [])
        files = [key for key in objects_at(object_server, url) if key.startswith("__")]
        assert sorted({key[:4] for key in files}) == ["__0_", "__1_"]
    run_cases(WORKER, 3, "load", tmp_path, object_prefix)


def test_rank_that_cannot_upload_fails_the_save_on_all_ranks(
    object_server: ObjectServer,
    object_prefix: str,
    object_proxy: FaultProxy,
    old: dict[str, bytes],
    tmp_path: Path,
) -> None:
    urls = {f"{name}{failing}": failing for name in SAVES for failing in range(RANKS)}
    for end, failing in urls.items():
        put_objects(object_server, f"{object_prefix}/{end}", old)
        object_proxy.fail("put_object", "403", times=None, key=f"/{end}/__{failing}_")
    run_cases(WORKER, RANKS, "fail", tmp_path, object_prefix)
    for end in urls:
        there = found(object_server, f"{object_prefix}/{end}", old, NEW)
        assert there.what == "old", end
        # Through dcp.save a rank does not learn that another one has failed.
        assert len(there.more) <= (end in ("dcp0", "dcp1")), (end, there)
    assert not object_server.uploads(object_prefix)


def test_save_that_is_overtaken_is_refused_on_all_ranks(
    object_server: ObjectServer,
    object_prefix: str,
    object_proxy: FaultProxy,
    old: dict[str, bytes],
    tmp_path: Path,
) -> None:
    save(OTHER, f"{object_prefix}/other")
    other = objects_at(object_server, f"{object_prefix}/other")
    entered = threading.Event()
    for name in SAVES:
        url = f"{object_prefix}/{name}"
        put_objects(object_server, url, old)

        def overtake(_: Request, url: str = url) -> None:
            for key, data in sorted(other.items(), reverse=True):  # data, then metadata
                object_server.put(f"{url}/{key}", data)
            entered.set()

        object_proxy.hook("put_object", overtake, key=f"/{name}/.metadata")
    run_cases(WORKER, RANKS, "overtaken", tmp_path, object_prefix)
    assert entered.is_set()
    for name in SAVES:
        there = found(object_server, f"{object_prefix}/{name}", {}, OTHER)
        assert there.what == "new"
        # The other save did not remove what it has replaced.
        left = set(there.more) - set(old)
        assert not left if name != "dcp" else len(left) <= 1, (name, left)


@pytest.mark.parametrize("how", ["reset", "lost_answer"])
def test_unknown_outcome_is_raised_on_all_ranks_and_keeps_the_data_of_all(
    object_server: ObjectServer,
    object_prefix: str,
    object_proxy: FaultProxy,
    old: dict[str, bytes],
    tmp_path: Path,
    how: str,
) -> None:
    url = f"{object_prefix}/silent"
    put_objects(object_server, url, old)

    def fall_silent(_: Request) -> str:
        object_proxy.fail("any", "reset", times=None)
        return how

    object_proxy.hook("put_object", fall_silent, key="/silent/.metadata")
    run_cases(WORKER, RANKS, "silent", tmp_path, url)
    object_proxy.heal()
    assert found(object_server, url, old, NEW).what == ("old" if how == "reset" else "new")
    data = set(objects_at(object_server, url)) - set(old)
    assert {name[:4] for name in data} == {"__0_", "__1_"}


@pytest.mark.parametrize("end", ["failures", "interrupt"])
def test_commit_that_arrives_after_its_save_has_ended_finds_the_data_of_all_ranks(
    object_server: ObjectServer,
    object_prefix: str,
    old: dict[str, bytes],
    tmp_path: Path,
    end: str,
) -> None:
    url = f"{object_prefix}/late"
    put_objects(object_server, url, old)
    run_cases(WORKER, RANKS, "late", tmp_path, url, end)
    assert found(object_server, url, old, NEW).what == "new"


def test_ranks_that_name_different_prefixes_are_refused(
    object_server: ObjectServer, object_prefix: str, tmp_path: Path
) -> None:
    run_cases(WORKER, RANKS, "apart", tmp_path, object_prefix)
    for end in ("a", "b", "a1"):
        assert not object_server.keys(f"{object_prefix}/{end}")
