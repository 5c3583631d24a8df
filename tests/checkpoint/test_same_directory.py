"""Ranks, as threads, that save to directories which they name alike or not."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.store_ranks import Ranks
from torch.distributed import HashStore, PrefixStore

import torch_dcpx as dcpx
from torch_dcpx import DcpxSavePlanner, DcpxWriter, PlanError, StorageError, WriteOptions
from torch_dcpx.checkpoint.same_directory import Place, SameDirectory
from torch_dcpx.checkpoint.save_run import Committed, SaveRun
from torch_dcpx.planners.cache import PlanCache
from torch_dcpx.ranks.store import StoreExchange
from torch_dcpx.storage.directory import Directory

WORLD_SIZE = 3


class Saves:
    """Saves of ranks, each of which keeps its plans."""

    def __init__(self) -> None:
        self.ranks = Ranks(PrefixStore("group", HashStore()), WORLD_SIZE)
        self.plans = [PlanCache() for _ in range(WORLD_SIZE)]

    def run(self, paths: Sequence[Path], local: Sequence[bool] = (False,) * 3) -> list[Any]:
        """Returns what each rank's save returned or raised."""

        def one(rank: int) -> Committed:
            options = WriteOptions(durability="none", workers=1, node_local=local[rank])
            planner = DcpxSavePlanner()
            planner.dcpx_planning.plans = self.plans[rank]
            state = {f"rank{rank}": torch.full((50,), float(rank)), "all": torch.ones(9)}
            writer, exchange = DcpxWriter(paths[rank], options=options), self.ranks.exchange(rank)
            with SaveRun(state, paths[rank], writer, planner, exchange) as run:
                plan = run.plan(lambda: None)
                return run.write_and_settle(lambda: (plan, run.planner))

        return self.ranks.run(one)


@pytest.fixture
def saves() -> Iterator[Saves]:
    found = Saves()
    yield found
    found.ranks.close()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps that the coordinator has begun."""
    begun: list[str] = []
    agree = StoreExchange._agree

    def counted(self: StoreExchange, step: str, *args: Any) -> Any:
        if self.is_coordinator:
            begun.append(step)
        return agree(self, step, *args)

    monkeypatch.setattr(StoreExchange, "_agree", counted)
    return begun


def listed(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def assert_refused(ended: list[Any], *said: str) -> None:
    for error in ended:
        assert isinstance(error, PlanError), error
        assert all(text in str(error) for text in said), error


def assert_whole(ended: list[Any], path: Path) -> None:
    assert all(isinstance(each, Committed) and each.ranks == WORLD_SIZE for each in ended), ended
    assert not dcpx.verify(path).findings
    found = {"all": torch.zeros(9), **{f"rank{n}": torch.zeros(50) for n in range(WORLD_SIZE)}}
    dcpx.load(found, path, no_dist=True)
    assert all(torch.equal(found[f"rank{n}"], torch.full((50,), float(n))) for n in range(3))


@pytest.mark.parametrize(
    "names",
    [
        ("p0", "p1", "p2"),
        ("a/b/c/ckpt", "a/b/other/ckpt", "a/b/c/ckpt"),
        ("a", "a/b", "a/b/c"),
        ("a/b/c", "a/b", "a"),
    ],
    ids=["a path a rank", "one of three elsewhere", "inwards", "outwards"],
)
def test_ranks_that_save_to_different_directories_raise_and_leave_nothing(
    tmp_path: Path, saves: Saves, names: Sequence[str]
) -> None:
    root = tmp_path / "missing"
    paths = [root / name for name in names]
    ended = saves.run(paths)
    assert_refused(ended, f"rank 1 ({_host()}) saves to '{paths[1]}'", f"to '{paths[0]}'")
    assert_refused(ended, "rank 0", "node_local=True", "nothing was written")
    assert listed(tmp_path) == []
    assert_whole(saves.run([root / "common"] * 3), root / "common")


def _host() -> str:
    from torch_dcpx.ranks.exchange import host_name

    return host_name()


def test_refused_ranks_keep_what_was_there(tmp_path: Path, saves: Saves) -> None:
    kept, empty = tmp_path / "kept", tmp_path / "empty"
    assert_whole(saves.run([kept] * 3), kept)
    empty.mkdir()
    before = listed(tmp_path)
    assert_refused(saves.run([kept, empty, kept]), "rank 1", str(empty))
    assert listed(tmp_path) == before
    assert_refused(saves.run([empty, kept, kept]), f"'{kept}'", "2 of 3 ranks")
    assert listed(tmp_path) == before
    assert not dcpx.verify(kept).findings


def test_one_path_on_all_ranks_costs_no_exchange_and_several_names_of_one_directory_one(
    tmp_path: Path, saves: Saves, steps: list[str]
) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "latest").symlink_to(real)
    names = [real, tmp_path / "latest", tmp_path / "real" / ".." / "real"]
    for paths, wanted in ((names, ["plan", "directories"]), ([real] * 3, ["plan"])):
        for _ in range(2):  # the second time by a plan that is kept
            steps.clear()
            assert_whole(saves.run(paths), real)
            assert steps == wanted
    assert not list(real.glob("*.tmp"))


def test_plan_that_is_kept_is_not_used_for_another_directory(tmp_path: Path, saves: Saves) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert_whole(saves.run([one] * 3), one)
    assert_whole(saves.run([other] * 3), other)
    assert_refused(saves.run([one, one, other]), f"rank 2 ({_host()}) saves to '{other}'")
    assert_whole(saves.run([one] * 3), one)


def test_node_local_ranks_have_directories_of_their_own(
    tmp_path: Path, saves: Saves, steps: list[str]
) -> None:
    paths = [tmp_path / f"node{rank}" for rank in range(WORLD_SIZE)]
    ended = saves.run(paths, [True] * 3)
    assert all(isinstance(each, Committed) for each in ended), ended
    assert steps == ["plan"]
    assert all(list(path.glob("*.distcp")) for path in paths)


@pytest.mark.parametrize("is_same", [True, False])
def test_node_local_on_some_ranks_is_refused_on_all(
    tmp_path: Path, saves: Saves, *, is_same: bool
) -> None:
    paths = [tmp_path / ("same" if is_same else f"p{rank}") for rank in range(WORLD_SIZE)]
    assert_refused(
        saves.run(paths, [False, False, True]),
        "node_local=True) on rank 2, not on rank 0",
    )
    assert listed(tmp_path) == []


@pytest.mark.parametrize("error", [OSError(errno.EIO, "look"), KeyboardInterrupt()], ids=repr)
def test_rank_that_fails_while_it_looks_leaves_no_file(
    tmp_path: Path, saves: Saves, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    seen: list[list[str]] = []

    def fail(self: Directory, name: str) -> bool:
        if self.path.name == "link":
            seen.append(listed(real))
            raise error
        return True

    monkeypatch.setattr(Directory, "is_regular", fail)
    ended = saves.run([real, tmp_path / "link", real])
    assert all(isinstance(each, BaseException) for each in ended), ended
    assert any(name.endswith(".tmp") for name in seen[0])
    assert not list(real.glob("*.tmp"))
    monkeypatch.undo()
    assert_whole(saves.run([real, tmp_path / "link", real]), real)


def test_coordinator_that_can_leave_no_file_fails_the_save_on_all_ranks(
    tmp_path: Path, saves: Saves, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Directory, name: str, pieces: Any, *, is_durable: bool) -> None:
        raise StorageError(f"write '{self.path / name}': no room", errno=errno.ENOSPC)

    monkeypatch.setattr(Directory, "create", refuse)
    (tmp_path / "link").symlink_to(tmp_path)
    for error in saves.run([tmp_path, tmp_path / "link", tmp_path]):
        assert isinstance(error, StorageError) and error.errno == errno.ENOSPC


def test_coordinator_that_is_interrupted_before_anybody_looks_leaves_no_file(
    tmp_path: Path, saves: Saves, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: SameDirectory, place: Place, probe: str) -> None:
        if self._exchange.is_coordinator:
            assert [path.name for path in tmp_path.glob("*.tmp")] == [probe]
            raise KeyboardInterrupt
        check(self, place, probe)

    check = SameDirectory.check
    monkeypatch.setattr(SameDirectory, "check", interrupt)
    (tmp_path / "link").symlink_to(tmp_path)
    ended = saves.run([tmp_path, tmp_path / "link", tmp_path])
    assert all(isinstance(each, BaseException) for each in ended), ended
    assert not list(tmp_path.glob("*.tmp"))


def test_rank_of_rank_0s_path_is_on_another_node_and_not_elsewhere(
    tmp_path: Path, saves: Saves, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    is_regular = Directory.is_regular

    def look(self: Directory, name: str) -> bool:
        is_seen = self.path.name == "link" or not name.endswith(".tmp")
        return is_seen and is_regular(self, name)

    monkeypatch.setattr(Directory, "is_regular", look)
    ended = saves.run([tmp_path, tmp_path / "link", tmp_path])
    assert all(isinstance(each, Committed) for each in ended), ended
