"""The process group's store, called with a deadline: a clone of it, and a daemon thread.

A call to a TCPStore whose host is stopped blocks without end, whatever its timeout. A call on the
group's own client stalls its other users. So each process has, for each group, one clone of the
store and one thread that makes all calls. A caller waits for the thread until its deadline; a call
that it gives up may still take effect. After an error the thread opens a new clone.
"""

from __future__ import annotations

import atexit
import itertools
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch_dcpx._compat import group_store, process_groups
from torch_dcpx._waiting import STORE_THREAD, Deadline, Guard
from torch_dcpx.errors import StoreLostError, UnsupportedError

T = TypeVar("T")

_ANSWER_S = 5.0  # that a store may take for one call, also when the caller's time is up
_EXIT_S = 1.0  # for calls in flight when the interpreter ends


class _Call(Generic[T]):
    """A function on its way through the thread."""

    def __init__(self, function: Callable[[Any], T], is_waited_for: bool) -> None:
        self.function = function
        self.is_waited_for = is_waited_for
        self.done = threading.Event()
        self.is_given_up = False
        self.value: T | None = None
        self.error: BaseException | None = None


def _serve(calls: queue.SimpleQueue[_Call[Any] | None], open_store: Callable[[], Any]) -> None:
    """The thread. It refers to no client, so that a forgotten client can end it."""
    store: Any = None
    has_failed = False
    while (call := calls.get()) is not None:
        # A new clone may take minutes: none is made for a call that nobody waits for.
        is_idle = store is None and has_failed and not call.is_waited_for
        if not call.is_given_up and not is_idle:
            try:
                if store is None:
                    store = open_store()  # its timeout stays: a HashStore's clone is itself
                call.value = call.function(store)
            except BaseException as error:  # noqa: BLE001 - raised by whoever asked
                call.error = error
                store, has_failed = None, True
        call.done.set()
        del call  # and what it holds


class StoreClient:
    """One process' access to the store of one group. Thread-safe: its calls take turns."""

    _made = itertools.count(1)

    def __init__(self, open_store: Callable[[], Any]) -> None:
        """Starts nothing yet; `open_store` returns a store for the thread's use alone."""
        self.name = f"group {next(StoreClient._made)}"  # no other group of this process has it
        self._open_store = open_store
        self._calls: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._guard = Guard()  # a signal's handler may call as well
        self._pid = os.getpid()
        self._calls_made = itertools.count(1)
        self._numbers = itertools.count(1)

    def next_call(self) -> int:
        """Returns the number of this process' call, for messages."""
        return next(self._calls_made)

    def next_number(self) -> int:
        """Returns the number of this process' next operation.

        All ranks begin their operations in one order. A rank that missed some catches up: it passes
        over operations that have failed without it (StoreExchange.enter).
        """
        return next(self._numbers)

    def call(self, doing: str, function: Callable[[Any], T], deadline: Deadline) -> T:
        """Returns `function(store)`, called in the thread.

        Args:
            doing: for the error: "get 'dcpx/1/plan' for the save of rank 0".
            function: called with the store.
            deadline: until when it must return. It has 5 s at least: with less, a store that
                answers would seem lost.

        Raises:
            StoreLostError: it did not return, or the store raised.
            UnsupportedError: this process was forked from the one that made the client.
        """
        call = self._submit(function, is_waited_for=True)
        patience = Deadline(max(deadline.remaining_s, _ANSWER_S))
        try:
            while not call.done.wait(min(patience.remaining_s, 3600.0)):  # it takes no infinity
                if patience.has_passed:
                    raise StoreLostError(
                        f"{doing}: the process group's store did not answer within "
                        f"{patience.waited_s:.1f} s: the process that hosts it (rank 0, or the "
                        "launcher's agent) is stopped or gone",
                        waited_s=patience.waited_s,
                    )
        except BaseException:
            call.is_given_up = True  # if it has not begun yet, it never does
            raise
        error = call.error
        if isinstance(error, RuntimeError):  # torch's DistError, and older ones
            cause = str(error).split("\n", 1)[0]
            raise StoreLostError(
                f"{doing}: the process group's store failed: {cause}", waited_s=patience.waited_s
            ) from error
        if error is not None:
            raise error
        return call.value  # type: ignore[return-value]

    def post(self, function: Callable[[Any], object]) -> None:
        """Calls `function(store)` after all earlier calls. Waits for nothing. Raises: as `call`."""
        self._submit(function, is_waited_for=False)

    def settle(self, deadline: Deadline) -> bool:
        """Waits until all earlier calls are done. Returns whether they are."""
        with self._guard.held():
            if self._thread is None or self._pid != os.getpid():
                return True
        call = self._submit(lambda _: None, is_waited_for=False)
        return call.done.wait(deadline.remaining_s)

    def close(self) -> None:
        """Ends the thread after all earlier calls. Waits for nothing."""
        with self._guard.held():
            if self._thread is not None and self._pid == os.getpid():
                self._calls.put(None)
                self._thread = None

    def _submit(self, function: Callable[[Any], T], is_waited_for: bool) -> _Call[T]:
        call = _Call(function, is_waited_for)
        if self._pid != os.getpid():
            raise UnsupportedError(
                f"a forked process (pid {os.getpid()}) cannot go on with an operation of its "
                f"parent (pid {self._pid})"
            )
        with self._guard.held():
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_serve,
                    args=(self._calls, self._open_store),
                    name=STORE_THREAD,
                    daemon=True,  # a store that is stopped must not hold the interpreter's end
                )
                self._thread.start()
            self._calls.put(call)
        return call


# ---- One client a group -------------------------------------------------------------------------

_clients: weakref.WeakKeyDictionary[Any, StoreClient] = weakref.WeakKeyDictionary()
_inherited: weakref.WeakSet[Any] = weakref.WeakSet()  # groups of the process we were forked from
_clients_guard = Guard()


def client_of(group: Any) -> StoreClient:
    """Returns this process' client for a ProcessGroup; it ends when the group is collected.

    Raises UnsupportedError if the group belongs to the process from which this one was forked.
    """
    with _clients_guard.held():
        if group in _inherited:
            raise UnsupportedError(
                "a forked process cannot save or load in the name of its parent's rank: use "
                "no_dist=True, or start it with spawn and its own init_process_group"
            )
        client = _clients.get(group)
        if client is None:
            client = _clients[group] = StoreClient(group_store(group).clone)
            weakref.finalize(group, client.close).atexit = False
        return client


def _forget_parents_clients() -> None:
    """In a forked child: the threads are not there, and the group's rank is the parent."""
    global _clients_guard
    _clients_guard = Guard()
    _clients.clear()
    _inherited.update(process_groups())


def _end_calls_in_flight() -> None:
    """At exit: a thread that comes back from C++ into an interpreter that has ended would abort."""
    deadline = Deadline(_EXIT_S)
    for client in list(_clients.values()):
        client.settle(deadline)
        client.close()


os.register_at_fork(after_in_child=_forget_parents_clients)
atexit.register(_end_calls_in_flight)
