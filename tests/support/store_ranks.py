"""Ranks as threads: each with its own client of one store, as processes have."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any

from support.machine import seconds

from torch_dcpx._waiting import Deadline
from torch_dcpx.errors import StorageError
from torch_dcpx.ranks.ballot import Ballot
from torch_dcpx.ranks.store import StoreExchange
from torch_dcpx.ranks.store_client import StoreClient

TIMEOUT_S = seconds(60)
FULL = StorageError("pwrite 8 B of 'c/__2_0.distcp'", errno=errno.ENOSPC, path="c", nbytes=8)


class Killed(BaseException):
    """Ends a rank where it is: it says nothing to the others and cleans nothing up."""


class Ranks:
    """Some ranks of one group, and their clients over several operations."""

    def __init__(self, store: Any, world_size: int, timeout_s: float = TIMEOUT_S) -> None:
        self.store = store
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.clients = [StoreClient(store.clone) for _ in range(world_size)]

    def exchange(self, rank: int, timeout_s: float | None = None) -> StoreExchange:
        """Begins an operation, as `exchange_for` does."""
        deadline_s = self.timeout_s if timeout_s is None else timeout_s
        exchange = StoreExchange(self.clients[rank], rank, self.world_size, deadline_s, "save")
        exchange.enter()
        return exchange

    def run(self, body: Callable[[int], object], ranks: list[int] | None = None) -> list[Any]:
        """Runs `body(rank)` in a thread a rank; returns by rank what it returned or raised."""
        chosen = range(self.world_size) if ranks is None else ranks
        results: list[Any] = [None] * self.world_size

        def rank_thread(rank: int) -> None:
            try:
                results[rank] = body(rank)
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                results[rank] = error

        threads = [threading.Thread(target=rank_thread, args=(rank,)) for rank in chosen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds(120))
            assert not thread.is_alive(), "a rank hangs"
        return results

    def close(self) -> None:
        for client in self.clients:
            client.close()


class Storage:
    """What a commit changes, and everybody can look at."""

    def __init__(self) -> None:
        self.committed: list[Any] = []

    def commit(self, payloads: list[Any]) -> str:
        self.committed.append(payloads)
        return "result"

    def was_committed(self) -> bool:
        return bool(self.committed)


def values_of(body: Callable[[StoreExchange], Any], ranks: Ranks) -> list[Any]:
    def one(rank: int) -> Any:
        with ranks.exchange(rank) as exchange:
            return body(exchange)

    return ranks.run(one)


def ballots(
    ranks: Ranks, body: Callable[[Ballot, StoreExchange], Any], timeout_s: float = TIMEOUT_S
) -> list[Any]:
    def one(rank: int) -> Any:
        exchange = ranks.exchange(rank, timeout_s)
        try:
            result = body(Ballot(exchange, exchange.deadline), exchange)
        except Exception:
            exchange.close()
            raise
        exchange.close()
        return result

    return ranks.run(one)


def assert_no_key_is_left(ranks: Ranks) -> None:
    for client in ranks.clients:
        assert client.settle(Deadline(seconds(30)))
    assert ranks.store.num_keys() == 0
