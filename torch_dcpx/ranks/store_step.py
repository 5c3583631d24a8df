"""One step of an operation: every rank tells its part, and all leave it by one answer.

1. Each rank sets `v/RANK` and adds 1 to `n`. The last rank sets `wake`; so does a rank that fails.
2. The coordinator sees `wake`, reads the values, reduces them, sets the results, and claims `a`.
3. All others wait for `a`. It names the rank that set it, and the key to read next.

A rank whose time is up claims `a` itself, with an error that names the missing ranks. Only one
claim stands, so that all ranks leave a step in the same way.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from torch_dcpx._waiting import Deadline
from torch_dcpx.errors import StoreLostError
from torch_dcpx.ranks.exchange import BALLOT
from torch_dcpx.ranks.failures import RankFailure, from_rank
from torch_dcpx.ranks.presence import calls_of, gone_on, presence_of, refuse

if TYPE_CHECKING:
    from torch_dcpx.ranks.store import StoreExchange

T = TypeVar("T")
R = TypeVar("R")

OK, ERROR, VOID = "ok", "error", "void"  # how an answer begins
FAILED = 1 << 32  # what a failure adds to a counter of ranks
FIRST = "0"  # the first step

_GATHER_S = 0.5  # that the ranks wait after a failure, for others that are about to fail as well
_MAX_LOOKED_AFTER = 64  # ranks that may have gone on, at one look


class Own(Generic[T]):
    """A rank's part in a step: a value, or an error."""

    def __init__(self, local: Callable[[], T], *, is_sent: bool) -> None:
        """Calls `local`; pickles its value if this rank sends it to the coordinator."""
        self.value: T | None = None
        self.packed = b""
        self.error: Exception | None = None
        try:
            self.value = local()
            if is_sent:
                self.packed = pickle.dumps(self.value)
        except Exception as error:  # noqa: BLE001 - raised by the exchange, on all ranks
            self.error = error


class Step:
    """One rank's part in one step."""

    def __init__(
        self, exchange: StoreExchange, name: str, title: str = "", by: Deadline | None = None
    ) -> None:
        """Args:
        name: the step's number, beneath which its keys lie.
        title: for messages.
        by: the deadline. Default None: the operation's.
        """
        self._exchange = exchange
        self._keys = exchange.keys
        self._name = name
        self._title = repr(title)
        self._deadline = by or exchange.deadline
        self._begun = self._deadline.anew(float("inf"))
        self._seal = exchange.seal

    def tell(self, own: Own[T]) -> None:
        """Tells the others this rank's value, or its error."""
        value = self._seal + own.packed
        self._keys.set(self._key(f"v/{self._exchange.rank}"), value, self._deadline)
        if own.error is not None:
            self.fail(self._exchange.failure_of(own.error))
        self.count()

    def fail(self, failure: RankFailure) -> None:
        """Tells the others that this rank fails here."""
        index = self._keys.add(self._key("n"), FAILED, self._deadline) // FAILED
        self._keys.set(self._key(f"f/{index}"), pickle.dumps(failure), self._deadline)
        if self._name == FIRST:  # for who enters later
            self._keys.add("e", FAILED, self._deadline)
        self._keys.set(self._key("wake"), b"fail", self._deadline)

    def count(self) -> None:
        """Counts this rank's part as done."""
        failed, told = divmod(self._keys.add(self._key("n"), 1, self._deadline), FAILED)
        if told == self._exchange.world_size:
            self._keys.set(self._key("wake"), b"fail" if failed else b"full", self._deadline)

    def failures(self) -> list[RankFailure]:
        """Returns the failures so far."""
        count = self._keys.add(self._key("n"), 0, self._deadline) // FAILED
        keys = (self._key(f"f/{i}") for i in range(1, count + 1))
        told = (self._keys.get(key, self._deadline) for key in keys)
        return [from_rank(failure) for failure in told if failure is not None]

    # ---- The answer ----------------------------------------------------------------------------

    def coordinate(self, own: Own[T], answer: Callable[[list[T]], R]) -> tuple[str, R | None]:
        """Returns the answer that stands, and the result of `answer`."""
        woken = self._wait("wake")
        if woken != b"full":
            standing = self._exchange.standing(self._name, self._deadline)
            if standing is not None:
                return standing, None
        # None is missing if the last one has come after all.
        if woken is None and (missing := self._exchange.missing(self._key("v"))):
            return self._propose(ERROR, [self._lost(missing)]), None
        if woken == b"fail":
            return self._propose(ERROR, self._all_failures()), None
        followers = range(1, self._exchange.world_size)
        packed = self._keys.multi_get([self._key(f"v/{r}") for r in followers], self._deadline)
        strange = [rank for rank, value in enumerate(packed, 1) if not value.startswith(self._seal)]
        if strange:
            return self._propose(ERROR, [self._difference(strange)]), None
        try:
            values = [from_rank(value[len(self._seal) :]) for value in packed]
            result = answer([own.value, *values])  # type: ignore[list-item]
        except StoreLostError:
            raise
        except Exception as error:  # noqa: BLE001 - raised by the exchange, on all ranks
            own.error = error
            failure = self._exchange.failure_of(error)  # of all: they have agreed on the call
            return self._propose(ERROR, [dataclasses.replace(failure, calls=())]), None
        return self._propose(OK, []), result

    def follow(self) -> str:
        """Returns the answer that stands."""
        woken = self._wait("wake")
        standing = None
        if woken == b"fail":
            # The coordinator may be lost, or have much to do before it comes here.
            soon = self._deadline.sooner(4 * _GATHER_S)
            found = self._keys.wait_for(self._key("a"), self._deadline, soon)
            if found is None:
                return self._propose(ERROR, self._all_failures())
            standing = found.decode()
        elif woken is not None:
            found = self._wait("a")
            standing = None if found is None else found.decode()
        # A look around may have given it.
        standing = standing or self._exchange.standing(self._name, self._deadline)
        if standing is None:
            missing = self._exchange.missing(self._key("v")) or [0]
            standing = self._propose(ERROR, [self._lost(missing)])
        return standing

    def _propose(self, kind: str, failures: list[RankFailure]) -> str:
        return self._exchange.propose(self._name, kind, failures, self._deadline)

    def _lost(self, ranks: list[int]) -> RankFailure:
        return self._exchange.lost_error(ranks, self._begun.waited_s, self._title)

    def _all_failures(self) -> list[RankFailure]:
        """Waits a moment for more failures, and returns those of this step.

        Raises StoreLostError if there is none: the rank ended before it could tell.
        """
        gathering = self._deadline.sooner(_GATHER_S)
        while True:
            failed, told = divmod(self._keys.add(self._key("n"), 0, self._deadline), FAILED)
            failures = self.failures()
            is_all = told >= self._exchange.world_size and len(failures) == failed
            if is_all or gathering.has_passed:
                break
            gathering.sleep(0.01)
        if not failures:
            raise StoreLostError(
                f"{self._exchange.waiting(self._title)}: a rank has failed and was ended before it "
                "said why"
            )
        return failures

    # ---- Who is where --------------------------------------------------------------------------

    def _wait(self, key: str) -> bytes | None:
        """Waits for a key. Returns None if the time is up, or once `_look` has found an answer."""
        waiting = self._exchange.waiting(self._title)
        return self._keys.wait_looking(self._key(key), self._deadline, waiting, self._look)

    def _look(self) -> Sequence[int] | None:
        """Looks where the others are. Returns the missing ranks; None once there is an answer."""
        exchange, is_first = self._exchange, self._name == FIRST
        missing = exchange.missed(self._key("v"))
        following = exchange.following_keys()
        for rank in missing[:_MAX_LOOKED_AFTER]:
            there = gone_on(rank, self._keys, following, self._deadline)
            if there is None:
                continue
            if is_first:
                self._propose(VOID, [])
            else:
                error = refuse([(rank, there)], exchange.rank, exchange.presence())
                self._propose(ERROR, [exchange.failure_of(error)])
            return None
        if is_first and exchange.is_coordinator:
            came = sorted(set(range(1, exchange.world_size)) - set(missing))
            here = ((rank, presence_of(rank, self._keys, self._deadline)) for rank in came)
            strange = [rank for rank, one in here if one.compared != exchange.call.compared]
            if strange:
                self._propose(ERROR, [self._difference(strange)])
                return None
        return missing

    def _difference(self, ranks: Sequence[int]) -> RankFailure:
        """Returns the failure of a step in which these ranks make another call."""
        exchange = self._exchange
        others = [(rank, presence_of(rank, self._keys, self._deadline)) for rank in ranks]
        failure = exchange.failure_of(refuse(others, exchange.rank, exchange.presence()))
        calls = calls_of(range(exchange.world_size), self._keys, self._deadline)
        return dataclasses.replace(failure, calls=calls)

    def _key(self, name: str) -> str:
        return f"{self._name}/{name}"


def left_keys(exchange: StoreExchange, steps: int, has_failed: bool, by: Deadline) -> list[str]:
    """Returns the keys that an operation of `steps` steps may have left."""
    keys, names = ["e", "out"], [*map(str, range(steps + 1)), BALLOT]
    for name in names:
        keys += [f"{name}/{key}" for key in ("n", "wake", "a", "v/0", "b/0", "outcome")]
    if not has_failed and exchange.keys.absent([f"{steps}/wake"], by):
        return keys
    # Ranks that have failed, or learnt of a failure, did not clean up.
    values = [f"{name}/{kind}" for name in names for kind in "vs"]
    keys += [f"{value}/{rank}" for value in values for rank in range(exchange.world_size)]
    for name in names:
        standing = exchange.standing(name, by)
        if standing is not None:
            keys.append(f"{name}/b/{standing.split()[1]}")
        told = Step(exchange, name, by=by).failures()
        keys += [f"{name}/f/{i}" for i in range(1, len(told) + 1)]
    return keys
