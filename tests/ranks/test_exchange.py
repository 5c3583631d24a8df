"""What ranks agree on through a store, and how the failure of one reaches all."""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.machine import seconds
from support.store_ranks import Ranks, assert_no_key_is_left, values_of
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from torch_dcpx.errors import PlanError, RankError, StorageError
from torch_dcpx.ranks import store_keys
from torch_dcpx.ranks.exchange import Exchange
from torch_dcpx.ranks.failures import RankFailure, error_of, lost_error
from torch_dcpx.ranks.members import exchange_for
from torch_dcpx.ranks.store import StoreExchange

# ---- One process --------------------------------------------------------------------------------


@pytest.fixture
def local() -> Exchange:
    return exchange_for(None, no_dist=False, timeout_s=5)


def test_without_torch_distributed_the_exchange_is_local_and_pickles_nothing(
    local: Exchange,
) -> None:
    assert type(local) is Exchange
    assert (local.rank, local.world_size, local.is_coordinator) == (0, 1, True)
    assert local.what == "save"
    assert 0 < local.deadline.remaining_s <= 5
    value = object()
    assert local.all_reduce("plan", lambda: value, lambda values: values[0]) is value
    assert local.reduce_scatter("plan", lambda: value, lambda values: values) is value


def test_local_exchange_raises_the_very_error_of_the_callable(local: Exchange) -> None:
    error = KeyError("x")

    def fail() -> None:
        raise error

    with pytest.raises(KeyError) as caught, local:
        local.all_reduce("plan", fail, lambda _: None)
    assert caught.value is error


def test_local_exchange_with_pieces_for_others_raises(local: Exchange) -> None:
    with pytest.raises(PlanError, match="2 pieces for 1 ranks"):
        local.reduce_scatter("plan", lambda: 1, lambda values: [*values, 2])


# ---- Ranks as threads ---------------------------------------------------------------------------


def tcp_store(_: Path) -> Any:
    return TCPStore("127.0.0.1", 0, 1, True, use_libuv=True)


def old_tcp_store(_: Path) -> Any:
    return TCPStore("127.0.0.1", 0, 1, True, use_libuv=False)


STORES: dict[str, Callable[[Path], Any]] = {
    "hash": lambda _: HashStore(),
    "file": lambda path: FileStore(str(path / "store"), -1),
    "tcp": tcp_store,
    "tcp-without-uv": old_tcp_store,
}


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    found = Ranks(PrefixStore("group", HashStore()), 4)
    yield found
    found.close()


def failing(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize("kind", list(STORES))
def test_steps_give_every_rank_its_result_and_leave_no_key(tmp_path: Path, kind: str) -> None:
    store = STORES[kind](tmp_path)
    ranks = Ranks(PrefixStore("group", store), 3)
    keys_before = store.num_keys()

    def body(exchange: StoreExchange) -> Any:
        total = exchange.all_reduce("sum", lambda: exchange.rank, sum)
        piece = exchange.reduce_scatter(
            "split", lambda: [exchange.rank], lambda values: [(total, v) for v in values]
        )
        exchange.note_phase("staging")
        return piece

    for _ in range(5):
        assert values_of(body, ranks) == [(3, [0]), (3, [1]), (3, [2])]
    assert store.num_keys() == keys_before
    ranks.close()


@pytest.mark.parametrize("kind", ["file", "tcp", "tcp-without-uv"])
def test_values_larger_than_a_store_takes_arrive_whole(tmp_path: Path, kind: str) -> None:
    store = STORES[kind](tmp_path)
    ranks = Ranks(PrefixStore("group", store), 2)
    keys_before = store.num_keys()
    big = bytes(range(251)) * (10 << 12)  # 9.8 MiB

    def body(exchange: StoreExchange) -> Any:
        lengths = exchange.all_reduce(
            "gather", lambda: big, lambda values: ([len(v) for v in values], big)
        )
        piece = exchange.reduce_scatter("split", lambda: big, lambda v: [v[0], v[1][1:]])
        return lengths, piece

    assert values_of(body, ranks) == [
        (([len(big)] * 2, big), big),
        (([len(big)] * 2, big), big[1:]),
    ]
    assert store.num_keys() == keys_before
    ranks.close()


def test_value_at_the_cut_arrives_whole(monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    monkeypatch.setattr(store_keys, "_PART_BYTES", 256)
    for nbytes in (0, 1, *range(240, 258), *range(500, 514), 4000):
        got = values_of(
            lambda e, n=nbytes: e.all_reduce("x", lambda: bytes(n), lambda values: values), ranks
        )
        assert got == [[bytes(nbytes)] * 4] * 4
    assert ranks.store.num_keys() == 0


def test_many_ranks_are_asked_for_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_keys, "_BATCH_KEYS", 3)
    ranks = Ranks(HashStore(), 8)
    got = values_of(
        lambda e: e.reduce_scatter("x", lambda: e.rank, lambda values: [v * 2 for v in values]),
        ranks,
    )
    assert got == [rank * 2 for rank in range(8)]
    assert ranks.store.num_keys() == 0
    ranks.close()


# ---- A rank that fails --------------------------------------------------------------------------


def test_error_of_one_rank_is_raised_on_all_with_class_fields_and_place(ranks: Ranks) -> None:
    error = StorageError("pwrite 8 B of 'c/__3_0.distcp'", errno=errno.ENOSPC, path="c", nbytes=8)

    def body(exchange: StoreExchange) -> None:
        exchange.note_phase("writing")
        exchange.all_reduce(
            "plan", lambda: failing(error) if exchange.rank == 3 else 1, lambda values: values
        )

    got = values_of(body, ranks)
    assert [type(e) for e in got] == [StorageError] * 4
    assert {(e.errno, e.path, e.nbytes) for e in got} == {(errno.ENOSPC, "c", 8)}
    assert {str(e).startswith("rank 3 (") for e in got} == {True}
    assert {str(e).endswith("), writing: pwrite 8 B of 'c/__3_0.distcp'") for e in got} == {True}
    assert [e.__cause__ for e in got] == [None, None, None, error]
    assert_no_key_is_left(ranks)


def test_failures_of_several_ranks_name_the_lowest_first_and_the_others(ranks: Ranks) -> None:
    def body(exchange: StoreExchange) -> None:
        error = KeyError(f"of {exchange.rank}")
        exchange.all_reduce(
            "plan", lambda: failing(error) if exchange.rank else 1, lambda values: values
        )

    got = values_of(body, ranks)
    assert [type(e) for e in got] == [RankError] * 4
    assert {(e.rank, e.phase, e.original) for e in got} == {(1, "planning", "builtins.KeyError")}
    assert {type(e.__cause__) for e in got} == {KeyError}
    lines = str(got[0]).splitlines()
    assert lines[0].startswith("rank 1 (") and lines[0].endswith("KeyError: 'of 1'")
    assert [line[:6] for line in lines[1:3]] == ["rank 2", "rank 3"]
    assert "in failing" in str(got[0])  # where on that rank
    assert len({str(e) for e in got}) == 1
    assert_no_key_is_left(ranks)


def test_error_of_many_ranks_is_the_lowest_ones_and_names_few() -> None:
    told = [RankFailure.of(KeyError(str(r)), r, "host", "writing") for r in range(40, 0, -1)]
    error: Any = error_of(told)
    assert (error.rank, error.original) == (1, "builtins.KeyError")
    assert "rank 2 (host)" in str(error) and "more ranks" in str(error)
    lost: Any = lost_error([(r, "host", "") for r in range(40)], 1.0, "'plan'")
    assert lost.ranks == tuple(range(40)) and re.search(r"and \d+ more", str(lost))


class UnpicklableError(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("no")


class ComesBackAsAnotherError(Exception):
    def __reduce__(self) -> Any:
        return ValueError, ("another",)


@pytest.mark.parametrize("kind", [UnpicklableError, ComesBackAsAnotherError])
def test_error_that_cannot_be_pickled_is_told_by_its_text(ranks: Ranks, kind: type) -> None:
    error = kind("its text")
    got = values_of(
        lambda e: e.all_reduce("x", lambda: failing(error) if e.rank == 2 else 1, sum), ranks
    )
    assert [type(e) for e in got] == [RankError] * 4
    assert all("its text" in str(e).splitlines()[0] for e in got)
    assert [e.__cause__ for e in got] == [None, None, error, None]


@pytest.mark.parametrize("failing_rank", [0, 2])
def test_value_that_cannot_be_pickled_is_an_error_on_all_ranks(
    ranks: Ranks, failing_rank: int
) -> None:
    lock = threading.Lock()

    def body(exchange: StoreExchange) -> Any:
        if failing_rank == 0:  # the result of the coordinator's reduce
            return exchange.all_reduce("x", lambda: 1, lambda _: lock)
        return exchange.all_reduce("x", lambda: lock if exchange.rank == 2 else 1, len)

    got = values_of(body, ranks)
    assert [type(e) for e in got] == [RankError] * 4
    assert {e.rank for e in got} == {failing_rank}
    assert_no_key_is_left(ranks)


@pytest.mark.parametrize("is_scattered", [False, True])
def test_error_of_the_reduction_is_raised_on_all_ranks(ranks: Ranks, is_scattered: bool) -> None:
    def body(exchange: StoreExchange) -> Any:
        if is_scattered:
            return exchange.reduce_scatter("x", lambda: 1, lambda _: [1])
        return exchange.all_reduce("x", lambda: 1, lambda _: failing(PlanError("1 pieces for 4")))

    got = values_of(body, ranks)
    assert [type(e) for e in got] == [PlanError] * 4
    assert all("1 pieces for 4" in str(e) and str(e).startswith("rank 0 (") for e in got)
    assert_no_key_is_left(ranks)


@pytest.mark.slow
def test_failing_rank_wakes_those_that_wait_while_another_is_busy(ranks: Ranks) -> None:
    others_are_out = threading.Event()
    out = []

    def body(rank: int) -> None:
        with ranks.exchange(rank, timeout_s=600) as exchange:
            if rank == 0:  # the coordinator has much to do, and comes when all others have left
                exchange.all_reduce("x", lambda: others_are_out.wait(seconds(60)), len)
            try:
                exchange.all_reduce("x", lambda: failing(KeyError()) if rank == 2 else 1, len)
            finally:
                out.append(rank)
                if len(out) == 3:
                    others_are_out.set()

    got = ranks.run(body)
    assert {(type(e), e.rank) for e in got} == {(RankError, 2)}
    assert others_are_out.is_set()
    assert_no_key_is_left(ranks)


def test_rank_that_raises_between_steps_is_seen_in_the_next(ranks: Ranks) -> None:
    def body(exchange: StoreExchange) -> None:
        exchange.all_reduce("first", lambda: 1, sum)
        if exchange.rank == 1:
            exchange.note_phase("staging")
            raise MemoryError("no arena")
        exchange.reduce_scatter("second", lambda: 1, lambda values: values)

    got = values_of(body, ranks)
    assert [type(e) for e in got] == [RankError, MemoryError, RankError, RankError]
    assert {(e.rank, e.phase) for e in got if type(e) is RankError} == {(1, "staging")}
    assert_no_key_is_left(ranks)


@pytest.mark.parametrize("where", ["local", "waiting", "reduce"])
def test_interrupt_ends_its_own_rank_as_it_is_and_the_others_by_an_error(
    ranks: Ranks, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank_of = {"local": 1, "waiting": 2, "reduce": 0}
    interrupted = rank_of[where]

    def body(exchange: StoreExchange) -> None:
        if exchange.rank == interrupted and where == "waiting":

            def wait_for(*_: object) -> bytes:
                raise KeyboardInterrupt

            monkeypatch.setattr(exchange.keys, "wait_for", wait_for)
        exchange.all_reduce(
            "x",
            lambda: failing(KeyboardInterrupt()) if where == "local" and exchange.rank == 1 else 1,
            lambda _: failing(KeyboardInterrupt()) if where == "reduce" else 1,
        )
        exchange.all_reduce("y", lambda: 1, sum)

    got = values_of(body, ranks)
    assert type(got[interrupted]) is KeyboardInterrupt
    others = [error for rank, error in enumerate(got) if rank != interrupted]
    assert {(type(e), e.rank, e.original) for e in others} == {
        (RankError, interrupted, "builtins.KeyboardInterrupt")
    }
    assert_no_key_is_left(ranks)
