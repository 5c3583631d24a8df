"""Ranks as threads of which one runs at a time, by a clock of their own and in an order by seed.

A thread gives way at each call of its store, and sleeps by a clock that jumps to the next moment
at which somebody wakes. So a deadline costs nothing, and a seed repeats a run.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

from support.machine import seconds

from torch_dcpx._waiting import Deadline
from torch_dcpx.ranks.call_id import CallId
from torch_dcpx.ranks.store import StoreExchange

TIMEOUT_S = 100.0


class Store:
    """A store as torch's HashStore is, but for calls that would block: those are errors."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        self.values.update(zip(keys, values, strict=True))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        total = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        wanted, new = _bytes(expected), _bytes(desired)
        found = self.values.get(key)
        if found is None and wanted:
            return wanted
        if found is None or found == wanted:
            self.values[key] = new
            return new
        return found

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value


class Task:
    """One thread, and until when it sleeps."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.wakes_at = 0.0
        self.is_over = False


class World:
    """The threads, their clock, and who is next."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self.all_over = threading.Event()

    # ---- A Clock -------------------------------------------------------------------------------

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        task = self._own()
        task.wakes_at = self.now + max(seconds, 1e-6)  # so that it goes on, however it is rounded
        self._switch(task)

    # ---- Threads -------------------------------------------------------------------------------

    def start(self, body: Callable[[], None]) -> Task:
        """Makes a thread, which runs once `run` has begun and it is chosen."""
        task = Task()

        def make() -> None:
            task.gate.acquire()
            try:
                body()
            finally:
                task.is_over = True
                self._switch(task)

        self.tasks.append(task)
        threading.Thread(target=make, daemon=True).start()
        return task

    def run(self) -> None:
        """Returns when all threads have ended."""
        first = self._wake_next()
        assert first is not None
        first.gate.release()
        if not self.all_over.wait(seconds(120)):
            raise AssertionError("the ranks hang")

    def give_way(self) -> None:
        """Lets another thread run, perhaps."""
        if self.chance.random() < 0.5:
            self._switch(self._own())

    def join(self, task: Task) -> None:
        while not task.is_over:
            self.sleep(0.05)

    def _own(self) -> Task:
        assert self.current is not None
        return self.current

    def _wake_next(self) -> Task | None:
        """Chooses who runs; the clock goes on where all sleep."""
        living = [task for task in self.tasks if not task.is_over]
        if not living:
            self.current = None
            self.all_over.set()
            return None
        ready = [task for task in living if task.wakes_at <= self.now]
        if not ready:
            self.now = min(task.wakes_at for task in living)
            ready = [task for task in living if task.wakes_at <= self.now]
        self.current = self.chance.choice(ready)
        return self.current

    def _switch(self, task: Task) -> None:
        chosen = self._wake_next()
        if chosen is task or chosen is None:
            return
        chosen.gate.release()
        if not task.is_over:
            task.gate.acquire()


class Client:
    """One rank's access to the store, as StoreClient gives it."""

    def __init__(self, world: World, store: Store) -> None:
        self.name = "group"
        self.world = world
        self.store = store
        self.interrupt_in: int | None = None  # calls of the store
        self.thread = 0  # that is interrupted
        self._calls = itertools.count(1)
        self._numbers = itertools.count(1)

    def next_call(self) -> int:
        return next(self._calls)

    def next_number(self) -> int:
        return next(self._numbers)

    def call(self, doing: str, function: Callable[[Any], Any], deadline: Deadline) -> Any:
        self.world.give_way()
        is_done_first = self.world.chance.random() < 0.5
        if self.interrupt_in is None or threading.get_ident() != self.thread:
            return function(self.store)
        self.interrupt_in -= 1
        is_now = self.interrupt_in < 0
        value = function(self.store) if is_done_first or not is_now else None
        if is_now:
            self.interrupt_in = None
            raise KeyboardInterrupt
        return value

    def post(self, function: Callable[[Any], object]) -> None:
        function(self.store)


class Job:
    """Some ranks, each with the calls that it makes one after the other."""

    def __init__(self, ranks: int) -> None:
        self.world, self.store = World(0), Store()
        self.clients = [Client(self.world, self.store) for _ in range(ranks)]

    def exchange(self, rank: int, call: CallId) -> StoreExchange:
        client, ranks = self.clients[rank], len(self.clients)
        exchange = StoreExchange(client, rank, ranks, TIMEOUT_S, call.name, call, self.world)
        return exchange.entered()

    def call(
        self, rank: int, name: str, target: str, local: Callable[[], Any] | None = None
    ) -> Any:
        """Makes a call of one step; returns what it returns, or its error."""
        try:
            with self.exchange(rank, CallId(name, target)) as exchange:
                return exchange.all_reduce("plan", local or (lambda: rank), sum)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    def run(self, *bodies: Callable[[], Any]) -> list[Any]:
        """Runs the rank's bodies to their end; returns what each returned."""
        results: list[Any] = [None] * len(bodies)

        def one(rank: int) -> None:
            results[rank] = bodies[rank]()

        for rank in range(len(bodies)):
            self.world.start(lambda rank=rank: one(rank))  # type: ignore[misc]
        self.world.run()
        return results
