"""What a client is told to do beside answering: fail, wait, or be without a part of the tree."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import threading
from collections.abc import Callable, Iterator, Sequence

# A path from the root of the mount, and whether a file is, or would be, there.
Place = tuple[str, bool]

_ALWAYS = ("release", "releasedir", "statfs")  # these tell a caller nothing


class Rule:
    """Not thread-safe. `failed` is the number of an error, or 0: wait for `released`."""

    def __init__(self, operations: str, match: str, failed: int, times: int, skip: int) -> None:
        self._operations = operations.split()
        self._match, self.failed, self.times, self._skip = match, failed, times, skip
        self.released = threading.Event()

    def is_for(self, operation: str, places: Sequence[Place]) -> bool:
        """True once for each request that the rule takes: it counts them."""
        if operation not in (self._operations or [operation]) or operation in _ALWAYS:
            return False
        if not self.times or not any(fnmatch.fnmatch(path, self._match) for path, _ in places):
            return False
        if self._skip:
            self._skip -= 1
            return False
        self.times -= 1
        return True


class Rules:
    """Thread-safe. Orders come by `Daemon.obey`, questions from the threads that answer."""

    def __init__(self, begin_thread: Callable[[], None]) -> None:
        self._begin_thread = begin_thread
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._down: dict[str, int] = {}
        self._calls: list[tuple[str, str]] = []
        self._held: list[tuple[str, str]] = []

    # ---- Orders ---------------------------------------------------------------------------------

    def fail(
        self, operations: str, errno: int, match: str = "*", times: int = 1 << 30, skip: int = 0
    ) -> None:
        """Answers requests by an error.

        Args:
            operations: their names, "fsync flush"; "": all of them.
            errno: the error.
            match: a pattern of the paths from the root, "*/.metadata".
            times: how many of them.
            skip: how many are answered well before.
        """
        self._add(operations, match, errno, times, skip)

    def hold(self, operations: str, match: str = "*", times: int = 1 << 30, skip: int = 0) -> None:
        """Lets requests wait for `release`, their callers in the kernel: no signal ends those."""
        self._add(operations, match, 0, times, skip)

    def release(self) -> None:
        """Answers what is held; from now on nothing is."""
        with self._lock:
            held = [rule for rule in self._rules if rule.failed == 0]
            self._rules = [rule for rule in self._rules if rule.failed]
        for rule in held:
            rule.times = 0
            rule.released.set()

    def take_down(self, match: str, lookup: int = errno.ENOENT) -> None:
        """Does without the files of a pattern, as if the server that has them did not answer.

        Args:
            match: a pattern of the paths from the root.
            lookup: what a look-up says: ENOENT or ENOTCONN.
        """
        with self._lock:
            self._down[match] = lookup

    def clear(self) -> None:
        """Ends all that was ordered here, also what is held."""
        self.release()
        with self._lock:
            self._rules.clear()
            self._down.clear()

    def calls(self) -> list[tuple[str, str]]:
        """Returns the requests since the last such question, each with its path from the root."""
        with self._lock:
            calls, self._calls = self._calls, []
        return calls

    def held(self) -> list[tuple[str, str]]:
        """Returns the requests that are held now."""
        with self._lock:
            return list(self._held)

    def _add(self, operations: str, match: str, failed: int, times: int, skip: int) -> None:
        with self._lock:
            self._rules.append(Rule(operations, match, failed, times, skip))

    # ---- Questions ------------------------------------------------------------------------------

    def apply(self, operation: str, places: Sequence[Place]) -> None:
        """Waits, or raises the error, as a rule for the request says."""
        with self._lock:
            self._calls.append((operation, places[-1][0]))
            rule = next((one for one in self._rules if one.is_for(operation, places)), None)
            lost = [self._lost(place) for place in places]
            if operation not in _ALWAYS and any(lost):
                raise OSError(max(lost) if operation == "lookup" else errno.ENOTCONN, "is down")
        if rule is None:
            return
        if rule.failed:
            raise OSError(rule.failed, os.strerror(rule.failed))
        with self._lock:
            self._held.append((operation, places[-1][0]))
        with self.waiting():
            rule.released.wait()
        with self._lock:
            self._held.remove((operation, places[-1][0]))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Has another thread answer while this one waits."""
        self._begin_thread()
        yield

    def is_left_out(self, place: Place) -> bool:
        """True: a listing does not name it."""
        with self._lock:
            return bool(self._lost(place))

    def _lost(self, place: Place) -> int:
        path, is_file = place
        if not is_file:
            return 0
        found = (code for match, code in self._down.items() if fnmatch.fnmatch(path, match))
        return max(found, default=0)
