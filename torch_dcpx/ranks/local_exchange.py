"""An operation of one process by itself: no store, nothing is pickled, nobody is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from torch_dcpx._waiting import Deadline
from torch_dcpx.ranks.call_id import CallId
from torch_dcpx.ranks.exchange import BALLOT, Exchange, Keys, check_pieces, host_name
from torch_dcpx.ranks.failures import RankFailure, error_of, lost_error

T = TypeVar("T")
R = TypeVar("R")


class _LocalKeys:
    """A StoreKeys without a store."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes, deadline: Deadline) -> None:
        self._values[key] = value

    def get(self, key: str, deadline: Deadline) -> bytes | None:
        return self._values.get(key)

    def multi_get(self, keys: Sequence[str], deadline: Deadline) -> list[bytes]:
        return [self._values[key] for key in keys]

    def add(self, key: str, amount: int, deadline: Deadline) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def wait_for(self, key: str, deadline: Deadline, until: Deadline | None = None) -> bytes | None:
        return self._values.get(key)

    def post(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def post_delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._values.pop(key, None)


class LocalExchange(Exchange):
    """One process by itself: the callables run in place, their errors are raised as they are."""

    def __init__(self, timeout_s: float, what: str = "save", call: CallId | None = None) -> None:
        """Begins an operation.

        Args:
            timeout_s: seconds of its deadline, for whoever asks: nobody is waited for here.
            what: what is done, for messages.
            call: which call it is. Default: named as what is done.
        """
        self.what = what
        self.call = call or CallId(what)
        self.rank = 0
        self.world_size = 1
        self.host = host_name()
        self.deadline = Deadline(timeout_s)
        self.phase = "planning"
        self.keys: Keys = _LocalKeys()
        self._answers: dict[str, tuple[str, list[RankFailure]]] = {}
        self._guard = threading.Lock()  # somebody may cancel

    def note_phase(self, phase: str) -> None:
        self.phase = phase

    def all_reduce(self, step: str, local: Callable[[], T], reduce: Callable[[list[T]], R]) -> R:
        return reduce([local()])

    def reduce_scatter(
        self, step: str, local: Callable[[], T], reduce: Callable[[list[T]], list[R]]
    ) -> R:
        pieces = reduce([local()])
        check_pieces(step, len(pieces), 1)
        return pieces[0]

    def fail(self, error: BaseException) -> None:
        self.propose(BALLOT, "error", [self.failure_of(error)], self.deadline)

    def close(self) -> None:
        pass  # nothing is left

    # ---- For the vote --------------------------------------------------------------------------

    def propose(self, name: str, kind: str, failures: list[RankFailure], by: Deadline) -> str:
        with self._guard:
            if name not in self._answers:
                self._answers[name] = (f"{kind} 0", failures)
                self.keys.set(f"{name}/a", self._answers[name][0].encode(), by)
            return self._answers[name][0]

    def error_in(self, name: str, answer: str, own: BaseException | None) -> BaseException:
        return own if own is not None else error_of(self._answers[name][1])

    def missing(self, prefix: str) -> list[int]:
        return [0] if self.keys.get(f"{prefix}/0", self.deadline) is None else []

    def lost_error(self, ranks: Iterable[int], waited_s: float, step: str) -> RankFailure:
        lost = [(rank, self.host, self.phase) for rank in ranks]
        return self.failure_of(lost_error(lost, waited_s, f"{step} of the {self.what}"))

    def note_failure(self, error: BaseException) -> None:
        pass  # nobody else is to know
