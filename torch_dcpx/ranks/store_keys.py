"""The keys of one operation: in a dict of this process, or in a store that ranks share.

In a store they lie beneath the operation's prefix, long values in parts. No call blocks on a key
that is absent: a `compare_set` that cannot match reads it. (`get` would wait for it in C++, for the
store's own timeout.)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

from torch_dcpx._waiting import Deadline
from torch_dcpx.errors import StoreLostError
from torch_dcpx.ranks.failures import NOT_BEGUN
from torch_dcpx.ranks.store_client import StoreClient

T = TypeVar("T")

logger = logging.getLogger("torch_dcpx")

# TCPStore drops the connection at a value of more than 8 MiB.
_PART_BYTES = 4 << 20
_BATCH_KEYS = 256  # keys in one call
_WHOLE, _CUT = b".", b"#"  # how a stored value begins
_NO_MATCH = b"?"  # never stored
_FIRST_POLL_S = 0.001
_MAX_POLL_S = 0.020
_MAX_POLL_S_PER_RANK = 20e-6  # 10,000 ranks ask one server 50,000 times a second

# Of `wait_looking`.
_FIRST_LOOK_S = 1.0
_MAX_LOOK_S = 30.0
_FIRST_WARNING_S = 30.0
_WARNING_S = 60.0  # between two
_MAX_NAMED = 8  # ranks in one warning
_WAITS = "%s waits for %s since %s (%.0f s); it gives up in %.0f s%s"


def _part(key: str, index: int) -> str:
    return f"{key}+{index}"


def _pieces(key: str, value: bytes) -> dict[str, bytes]:
    """Returns the keys and bytes to store for a value; `key` last: once it is there, all is."""
    if len(value) < _PART_BYTES:
        return {key: _WHOLE + value}
    starts = range(0, len(value), _PART_BYTES)
    parts = {_part(key, i): value[s : s + _PART_BYTES] for i, s in enumerate(starts)}
    return {**parts, key: _CUT + str(len(starts)).encode()}


def _set(store: Any, values: dict[str, bytes]) -> None:
    if len(values) == 1:
        ((name, value),) = values.items()
        store.set(name, value)
    else:
        store.multi_set(list(values), list(values.values()))


def _peek(store: Any, key: str) -> bytes | None:
    found: bytes = store.compare_set(key, _NO_MATCH, _NO_MATCH)
    return None if found == _NO_MATCH else found


def _joined(store: Any, key: str, found: bytes) -> bytes | None:
    """Returns the value of a key that holds `found`; None if it was removed meanwhile, as by an
    earlier group on the same store. (A TCPStore gives b"" for such a key.)
    """
    if found[:1] == _WHOLE:
        return found[1:]
    if not found:
        return None
    parts = [store.multi_get([_part(key, i)])[0] for i in range(int(found[1:]))]
    return b"".join(parts) if all(parts) else None


def _get(store: Any, key: str) -> bytes | None:
    found = _peek(store, key)
    return None if found is None else _joined(store, key, found)


def _multi_get(store: Any, names: list[str]) -> list[bytes | None]:
    pairs = zip(names, store.multi_get(names), strict=True)
    return [_joined(store, name, bytes(found)) for name, found in pairs]


def _delete_all(store: Any, names: list[str]) -> None:
    for name in names:
        found = _peek(store, name)
        if found is None:
            continue
        if found[:1] == _CUT:
            for i in range(int(found[1:])):
                store.delete_key(_part(name, i))
        store.delete_key(name)


def _absent(store: Any, names: list[str]) -> list[str]:
    """Returns the absent keys, by few calls if most are there."""
    if store.check(names):
        return []
    if len(names) == 1:
        return names
    middle = len(names) // 2
    return [*_absent(store, names[:middle]), *_absent(store, names[middle:])]


class LocalKeys:
    """The keys of a process by itself, which never waits: as StoreKeys; `add` from one thread."""

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

    def claim(self, key: str, value: bytes, deadline: Deadline) -> bytes:
        return self._values.setdefault(key, value)

    def absent(self, keys: Sequence[str], deadline: Deadline) -> list[str]:
        return [key for key in keys if key not in self._values]

    def wait_for(self, key: str, deadline: Deadline, until: Deadline | None = None) -> bytes | None:
        return self._values.get(key)

    def post(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def post_delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._values.pop(key, None)


class StoreKeys:
    """The keys of one operation in a store. Thread-safe.

    Once a call has lost the store, each further call that waits raises at once.
    """

    def __init__(self, client: StoreClient, prefix: str, who: str, world_size: int) -> None:
        """Args:
        client: of the group's store.
        prefix: of its keys, "dcpx/7/".
        who: for errors, "save on rank 3".
        world_size: ranks that poll.
        """
        self._client = client
        self._prefix = prefix
        self._who = who
        self._max_poll_s = max(_MAX_POLL_S, _MAX_POLL_S_PER_RANK * world_size)
        self._lost: StoreLostError | None = None

    def set(self, key: str, value: bytes, deadline: Deadline) -> None:
        """Sets a key to a value of any size."""
        self.set_all([(key, value)], deadline)

    def set_all(self, values: Iterable[tuple[str, bytes]], deadline: Deadline) -> None:
        """Sets many keys, by few calls; each takes its part of `values` only."""
        batch: dict[str, bytes] = {}
        nbytes = 0
        for key, value in values:
            for name, piece in _pieces(self._prefix + key, value).items():
                if batch and (nbytes + len(piece) > _PART_BYTES or len(batch) == _BATCH_KEYS):
                    self._call("set", next(iter(batch)), partial(_set, values=batch), deadline)
                    batch, nbytes = {}, 0
                batch[name] = piece
                nbytes += len(piece)
        if batch:
            self._call("set", next(iter(batch)), partial(_set, values=batch), deadline)

    def get(self, key: str, deadline: Deadline) -> bytes | None:
        """Returns a key's value; None if it is absent."""
        name = self._prefix + key
        return self._call("get", name, partial(_get, key=name), deadline)

    def multi_get(self, keys: Sequence[str], deadline: Deadline) -> list[bytes]:
        """Returns the values of keys that are all there, by few calls.

        Raises StoreLostError also if one is removed meanwhile.
        """
        values: list[bytes] = []
        for batch in self._batches(keys):
            found = self._call("get", batch[0], partial(_multi_get, names=batch), deadline)
            for name, value in zip(batch, found, strict=True):
                if value is None:
                    raise StoreLostError(
                        f"{self._who}: {name!r} was removed from the process group's store while "
                        "it was read: an earlier group of the same name has only now let go of "
                        "it; the next operation works"
                    )
                values.append(value)
        return values

    def add(self, key: str, amount: int, deadline: Deadline) -> int:
        """Adds to a counter, 0 at first; returns its new value."""
        name = self._prefix + key
        return self._call("count", name, lambda store: int(store.add(name, amount)), deadline)

    def claim(self, key: str, value: bytes, deadline: Deadline) -> bytes:
        """Sets an absent key, to less than 4 MiB; returns its value now: the first claim wins.

        Each claim has a value of its own, so that its rank knows whether it has won; a rank without
        an answer does not know.
        """
        name = self._prefix + key
        (piece,) = _pieces(name, value).values()
        return self._call(
            "claim", name, lambda store: bytes(store.compare_set(name, b"", piece))[1:], deadline
        )

    def absent(self, keys: Sequence[str], deadline: Deadline) -> list[str]:
        """Returns the absent ones of many keys."""
        found: list[str] = []
        for batch in self._batches(keys):
            found += self._call("check", batch[0], partial(_absent, names=batch), deadline)
        return [name.removeprefix(self._prefix) for name in found]

    def wait_for(self, key: str, deadline: Deadline, until: Deadline | None = None) -> bytes | None:
        """Polls a key until it is there, so that signals are served meanwhile.

        Returns its value; None once `until`, by default `deadline`, has passed. The store must
        answer each call until `deadline`.
        """
        until = until or deadline
        begun = deadline.anew(float("inf"))
        while (value := self.get(key, deadline)) is None:
            if until.has_passed:
                return None
            # An eighth of the wait so far: a key that comes soon is seen soon.
            until.sleep(min(max(begun.waited_s / 8, _FIRST_POLL_S), self._max_poll_s))
        return value

    def wait_looking(
        self, key: str, deadline: Deadline, what: str, look: Callable[[], Sequence[int] | None]
    ) -> bytes | None:
        """Waits for a key; after 30 s a WARNING a minute names the ranks that are missing.

        Args:
            what: names the step and the waiting rank, "'plan' of the save on rank 3 (node7)".
            look: called now and then; returns the missing ranks, or None to end the wait.

        Returns its value; None once the deadline has passed, or `look` has ended the wait.
        """
        waiting = deadline.anew(float("inf"))
        look_s, warn_at_s = _FIRST_LOOK_S, _FIRST_WARNING_S
        while True:
            value = self.wait_for(key, deadline, deadline.sooner(look_s))
            if value is not None or deadline.has_passed:
                return value
            look_s = min(2 * look_s, _MAX_LOOK_S)
            missing = look()
            if missing is None:
                return None
            if waiting.waited_s >= warn_at_s:
                warn_at_s = waiting.waited_s + _WARNING_S
                _warn(what, missing, waiting.waited_s, deadline)

    def delete(self, keys: Sequence[str], deadline: Deadline) -> None:
        """Removes keys, if they are there."""
        for batch in self._batches(keys):
            self._call("delete", batch[0], partial(_delete_all, names=batch), deadline)

    def post(self, key: str, value: bytes) -> None:
        """Sets a key to less than 4 MiB soon, in order; nobody learns if it fails."""
        name = self._prefix + key
        self._client.post(partial(_set, values=_pieces(name, value)))

    def post_delete(self, keys: Sequence[str]) -> None:
        """Removes keys soon, in order; nobody learns if it fails."""
        for batch in self._batches(keys):
            self._client.post(partial(_delete_all, names=batch))

    def _batches(self, keys: Sequence[str]) -> Iterator[list[str]]:
        for at in range(0, len(keys), _BATCH_KEYS):
            yield [self._prefix + key for key in keys[at : at + _BATCH_KEYS]]

    def _call(self, verb: str, name: str, function: Callable[[Any], T], deadline: Deadline) -> T:
        if self._lost is not None:
            raise StoreLostError(str(self._lost), waited_s=self._lost.waited_s)
        try:
            return self._client.call(f"{self._who}: {verb} {name!r}", function, deadline)
        except StoreLostError as error:
            self._lost = error
            raise


def _warn(what: str, missing: Sequence[int], waited_s: float, deadline: Deadline) -> None:
    named = ", ".join(map(str, missing[:_MAX_NAMED]))
    if len(missing) > _MAX_NAMED:
        named += f" and {len(missing) - _MAX_NAMED} more"
    whom = f"rank{'s' if len(missing) > 1 else ''} {named}" if missing else "the answer of rank 0"
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited_s))
    hint = NOT_BEGUN if missing else ""
    logger.warning(_WAITS, what, whom, since, waited_s, deadline.remaining_s, hint)


Keys: TypeAlias = LocalKeys | StoreKeys
