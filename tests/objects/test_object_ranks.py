"""Several ranks at one URL: each uploads its part, one commits, and all raise or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from object_outcomes import NEW, OTHER, LatePut, Store, interrupted, retries, state_of, unanswered
from support.object_proxy import FaultProxy
from support.object_requests import Request
from support.placements import distribute
from support.rank_fixture import StartRanks
from support.states import assert_same
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_dcpx
from torch_dcpx import (
    ConcurrentSaveError,
    DcpxReader,
    DcpxWriter,
    OutcomeUnknownError,
    PlanError,
    RankError,
    StorageError,
)

pytestmark = pytest.mark.multirank

PLACEMENTS = {"weight": Shard(0), "bias": Replicate()}
RANKS = 2


# ---- On each rank -------------------------------------------------------------------------------


def state(seed: int) -> dict[str, Any]:
    """Returns this rank's part of `state_of(seed)`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = state_of(seed)
    return {
        name: distribute(value, mesh, (PLACEMENTS[name],)) if name in PLACEMENTS else value
        for name, value in whole.items()
    }


def local(state: dict[str, Any]) -> dict[str, Any]:
    return {n: one.to_local() if isinstance(one, DTensor) else one for n, one in state.items()}


def by_dcp(state: dict[str, Any], url: str) -> None:
    dcp.save(state, storage_writer=DcpxWriter(url))


def in_background(state: dict[str, Any], url: str) -> None:
    torch_dcpx.async_save(state, url).result()


SAVES: dict[str, Callable[[dict[str, Any], str], Any]] = {
    "dcpx": torch_dcpx.save,
    "dcp": by_dcp,
    "async": in_background,
}


def raised(call: Callable[[], Any]) -> BaseException:
    """Returns what this rank raises, out of what DCP wraps it in."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - looked at
        call()
    error: BaseException = caught.value
    if isinstance(error, CheckpointException):
        (failure,) = {type(each[0]): each[0] for each in error.failures.values()}.values()
        return failure
    return error


def save_twice(url: str) -> None:
    for seed in (1, 2):  # the second one over the first
        for name, save_all in SAVES.items():
            save_all(state(seed), f"{url}/{name}")


def load(url: str) -> None:
    expected = local(state(2))
    for name in SAVES:
        target, stocks = state(3), state(3)
        torch_dcpx.load(target, f"{url}/{name}")
        dcp.load(stocks, storage_reader=DcpxReader(f"{url}/{name}"))
        assert_same(expected, local(target), name)
        assert_same(expected, local(stocks), name)


def fail_by_a_rank(url: str) -> None:
    """The rank's number ends the URL's name."""
    for name, save_all in SAVES.items():
        for failing in range(dist.get_world_size()):
            error = raised(lambda s=save_all, p=f"{url}/{name}{failing}": s(state(2), p))
            assert type(error) is StorageError, error
            assert f"/__{failing}_" in str(error.path)
            dist.barrier()


def are_overtaken(url: str) -> None:
    for name, save_all in SAVES.items():
        error = raised(lambda s=save_all, p=f"{url}/{name}": s(state(2), p))
        assert type(error) is ConcurrentSaveError, error
        dist.barrier()


def hear_nothing_of_the_commit(url: str) -> None:
    with retries(0):
        error = raised(lambda: torch_dcpx.save(state(2), url))
    assert type(error) is OutcomeUnknownError, error


def give_up_a_commit_that_arrives(url: str, end: str) -> None:
    """The store answers again by then: what it shows is the old checkpoint, for the moment."""
    with retries(0), pytest.MonkeyPatch.context() as patch:
        late = LatePut(patch)
        late.before_next = interrupted if end == "interrupt" else unanswered
        error = raised(lambda: torch_dcpx.save(state(2), url))
        if end == "interrupt":
            assert type(error) is (RankError if dist.get_rank() else KeyboardInterrupt), error
        else:
            assert type(error) is OutcomeUnknownError, error
        dist.barrier()
        if dist.get_rank() == 0:
            late.arrive()


def name_different_prefixes(url: str) -> None:
    rank = dist.get_rank()
    for names in (("a", "b"), ("a", "a/b"), ("a", "a1")):
        for name in ("dcpx", "async"):
            error = raised(lambda n=name, p=f"{url}/{names[rank]}": SAVES[n](state(2), p))
            assert type(error) is PlanError, error
            assert all(f"{url}/{one}'" in str(error) for one in names), error
            dist.barrier()
    torch_dcpx.save(state(2), f"{url}/common/" if rank else f"{url}/common")
    target = {"weight": torch.zeros(3000)}
    torch_dcpx.load(target, f"{url}/common")
    assert_same(state_of(2)["weight"], target["weight"])


# ---- Tests --------------------------------------------------------------------------------------


@pytest.fixture
def old(store: Store) -> dict[str, bytes]:
    """The objects of a checkpoint that one rank has saved."""
    return store.saved(state_of(1), "old")


def put_old(store: Store, name: str, old: dict[str, bytes]) -> str:
    for key, data in old.items():
        store.put(f"{name}/{key}", data)
    return f"{store.url}/{name}"


def test_ranks_save_to_a_store_and_any_number_of_them_loads(
    store: Store, ranks: StartRanks
) -> None:
    ranks(RANKS)(save_twice, store.url)
    for name in SAVES:
        assert store.found({}, NEW, name) == ("new", [])
        files = [key for key in store.names(name) if key.startswith("__")]
        assert sorted({key[:4] for key in files}) == ["__0_", "__1_"]
    ranks(3)(load, store.url)


def test_rank_that_cannot_upload_fails_the_save_on_all_ranks(
    store: Store, proxy: FaultProxy, old: dict[str, bytes], ranks: StartRanks
) -> None:
    names = {f"{name}{failing}": failing for name in SAVES for failing in range(RANKS)}
    for name, failing in names.items():
        put_old(store, name, old)
        proxy.fail("put_object", "403", times=None, key=f"/{name}/__{failing}_")
    ranks(RANKS)(fail_by_a_rank, store.url)
    for name in names:
        there = store.found(old, NEW, name)
        assert there.what == "old", name
        # Through dcp.save a rank does not learn that another one has failed.
        assert len(there.more) <= (name in ("dcp0", "dcp1")), (name, there)
    assert not store.server.uploads(store.url)


def test_save_that_is_overtaken_is_refused_on_all_ranks(
    store: Store, proxy: FaultProxy, old: dict[str, bytes], ranks: StartRanks
) -> None:
    other = store.saved(OTHER, "other")
    entered = []
    for name in SAVES:
        put_old(store, name, old)

        def overtake(_: Request, name: str = name) -> None:
            for key, data in sorted(other.items(), reverse=True):  # data, then metadata
                store.put(f"{name}/{key}", data)
            entered.append(name)

        proxy.hook("put_object", overtake, key=f"/{name}/.metadata")
    ranks(RANKS)(are_overtaken, store.url)
    assert entered == list(SAVES)
    for name in SAVES:
        there = store.found({}, OTHER, name)
        assert there.what == "new"
        # The other save did not remove what it has replaced.
        left = set(there.more) - set(old)
        assert not left if name != "dcp" else len(left) <= 1, (name, left)


@pytest.mark.parametrize("how", ["reset", "lost_answer"])
def test_unknown_outcome_is_raised_on_all_ranks_and_keeps_the_data_of_all(
    store: Store, proxy: FaultProxy, old: dict[str, bytes], ranks: StartRanks, how: str
) -> None:
    url = put_old(store, "silent", old)

    def fall_silent(_: Request) -> str:
        proxy.fail("any", "reset", times=None)
        return how

    proxy.hook("put_object", fall_silent, key="/silent/.metadata")
    ranks(RANKS)(hear_nothing_of_the_commit, url)
    proxy.heal()
    assert store.found(old, NEW, "silent").what == ("old" if how == "reset" else "new")
    data = store.names("silent") - set(old)
    assert {name[:4] for name in data} == {"__0_", "__1_"}


@pytest.mark.parametrize("end", ["failures", "interrupt"])
def test_commit_that_arrives_after_its_save_has_ended_finds_the_data_of_all_ranks(
    store: Store, old: dict[str, bytes], ranks: StartRanks, end: str
) -> None:
    ranks(RANKS)(give_up_a_commit_that_arrives, put_old(store, "late", old), end)
    assert store.found(old, NEW, "late").what == "new"


def test_ranks_that_name_different_prefixes_are_refused(store: Store, ranks: StartRanks) -> None:
    ranks(RANKS)(name_different_prefixes, store.url)
    assert {name.partition("/")[0] for name in store.names()} == {"common"}
