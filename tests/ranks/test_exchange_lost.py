"""What ranks agree on where one of them, or the store, is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.machine import seconds
from support.store_ranks import Killed, Ranks, assert_no_key_is_left, values_of
from torch.distributed import HashStore, PrefixStore

from torch_dcpx._waiting import Deadline
from torch_dcpx.errors import RankError, RankLostError, StoreLostError
from torch_dcpx.ranks.store_client import StoreClient
from torch_dcpx.ranks.store_step import FIRST, Own, Step


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    found = Ranks(PrefixStore("group", HashStore()), 4)
    yield found
    found.close()


@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("when", ["never begins", "before its value", "after its value", "step 2"])
def test_lost_rank_is_named_with_its_last_phase_on_all_others(
    ranks: Ranks, lost: int, when: str
) -> None:
    def body(rank: int) -> None:
        if rank == lost and when == "never begins":
            ranks.clients[rank].next_number()
            raise Killed
        exchange = ranks.exchange(rank, timeout_s=seconds(1))
        exchange.note_phase("staging")
        if rank == lost and when == "after its value":
            Step(exchange, FIRST).tell(Own(lambda: 1, is_sent=lost != 0))
            raise Killed
        if rank == lost and when == "before its value":
            raise Killed
        try:
            exchange.all_reduce("first", lambda: 1, sum)
            if rank == lost:
                raise Killed
            exchange.all_reduce("second", lambda: 1, sum)
        except RankLostError:
            exchange.close()
            raise

    got = ranks.run(body)
    assert type(got[lost]) is Killed
    survivors = [error for rank, error in enumerate(got) if rank != lost]
    if (lost, when) == (2, "after its value"):  # its value is there: the second step misses it
        assert all("'second'" in str(e) for e in survivors)
    assert [type(e) for e in survivors] == [RankLostError] * 3
    phase = "not begun" if when == "never begins" else "staging"
    assert {(e.ranks, e.phases) for e in survivors} == {((lost,), (phase,))}
    assert len({str(e) for e in survivors}) == 1
    assert f"rank {lost}" in str(survivors[0]).splitlines()[0]


def test_operation_after_one_that_failed_early_on_one_rank_works(ranks: Ranks) -> None:
    def body(rank: int) -> Any:
        first = ranks.exchange(rank)
        if rank == 1:
            first.fail(ValueError("before any step"))
        with pytest.raises(RankError), first:
            first.all_reduce("x", lambda: 1, sum)
        with ranks.exchange(rank) as exchange:
            return exchange.all_reduce("x", lambda: 1, sum)

    assert ranks.run(body) == [4] * 4
    assert_no_key_is_left(ranks)


def test_keys_of_an_earlier_group_are_noticed_and_the_next_operation_works(ranks: Ranks) -> None:
    ranks.run(ranks.exchange)  # all killed
    ranks.clients = Ranks(ranks.store, 4).clients
    got = values_of(lambda exchange: exchange.all_reduce("x", lambda: 1, sum), ranks)
    assert [type(e) for e in got] == [StoreLostError] * 4
    got = values_of(lambda exchange: exchange.all_reduce("x", lambda: 1, sum), ranks)
    assert got == [4] * 4


class ForgetfulStore:
    """A TCPStore of which keys are removed between the wait of a `multi_get` and its read."""

    def __init__(self, store: Any, removed: set[str]) -> None:
        self.store, self.removed = store, removed

    def clone(self) -> Any:
        return ForgetfulStore(self.store.clone(), self.removed)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = self.store.multi_get(keys)
        return [
            b"" if key in self.removed else value for key, value in zip(keys, found, strict=True)
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@pytest.mark.parametrize("removed", ["dcpx/1/0/v/1", "dcpx/1/0/v/1+1"])
def test_value_that_is_removed_while_it_is_read_is_an_error_of_the_store(removed: str) -> None:
    ranks = Ranks(ForgetfulStore(HashStore(), {removed}), 2)
    value = "v" * (9 << 20)  # in three parts
    got = values_of(lambda exchange: exchange.all_reduce("x", lambda: value, len), ranks)
    assert [type(e) for e in got] == [StoreLostError] * 2
    assert all("'dcpx/1/0/v/1' was removed" in str(e) for e in got)
    got = values_of(lambda exchange: exchange.all_reduce("x", lambda: value, len), ranks)
    assert got == [2] * 2
    ranks.close()


# ---- A store that is lost -----------------------------------------------------------------------


class StoppedStore:
    """Answers nothing from the moment it is stopped, as a TCPStore whose host is."""

    def __init__(self, store: Any, stopped: threading.Event, go_on: threading.Event) -> None:
        self.store, self.stopped, self.go_on = store, stopped, go_on

    def clone(self) -> Any:
        return StoppedStore(self.store.clone(), self.stopped, self.go_on)

    def __getattr__(self, name: str) -> Any:
        if self.stopped.is_set():
            self.go_on.wait(seconds(120))
        return getattr(self.store, name)


def test_store_that_stops_is_an_error_on_all_ranks_and_serves_again_when_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch_dcpx.ranks.store_client._ANSWER_S", seconds(0.2))
    stopped, go_on = threading.Event(), threading.Event()
    ranks = Ranks(StoppedStore(HashStore(), stopped, go_on), 2)

    def body(rank: int) -> None:
        with ranks.exchange(rank, timeout_s=seconds(0.5)) as exchange:
            exchange.all_reduce("first", lambda: 1, sum)
            stopped.set()
            exchange.all_reduce("second", lambda: 1, sum)

    got = ranks.run(body)
    assert [type(e) for e in got] == [StoreLostError] * 2
    assert all(f"save on rank {rank} (" in str(got[rank]) for rank in (0, 1))
    stopped.clear()
    go_on.set()
    monkeypatch.undo()
    again = values_of(lambda exchange: exchange.all_reduce("x", lambda: 1, sum), ranks)
    assert again == [2, 2]
    ranks.close()


def test_store_that_raises_is_an_error_that_says_what_was_asked() -> None:
    class GoneStore:
        def clone(self) -> Any:
            return self

        def compare_set(self, *_: object) -> bytes:
            raise RuntimeError("Broken pipe\nstack")

    ranks = Ranks(GoneStore(), 1)
    with pytest.raises(StoreLostError, match=r"claim 'dcpx/1/p/0'.*failed: Broken pipe$"):
        ranks.exchange(0)
    ranks.close()


def test_store_that_failed_is_opened_again_only_for_who_waits() -> None:
    opened = []

    def open_store() -> Any:
        opened.append(1)
        raise RuntimeError("Connection refused")

    client = StoreClient(open_store)
    soon = Deadline(seconds(30))
    for count in (1, 2):
        with pytest.raises(StoreLostError, match=r"get 'x': .*failed: Connection refused"):
            client.call("get 'x'", lambda store: store, soon)
        client.post(lambda store: store)
        assert client.settle(soon)
        assert len(opened) == count
    client.close()
