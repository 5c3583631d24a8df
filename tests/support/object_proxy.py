"""An HTTP/1.1 proxy between a client of a store and its server: records requests, injects faults.

A process is sent through it by `environment()`. Then, for example:

    proxy.fail("put_object", "503", times=2)          # the next two are answered SlowDown
    proxy.fail("upload_part", "lost_answer", skip=3)  # the fourth is done, and not answered
    proxy.hook("complete_upload", kill)               # kill(request) is called, and may choose
    proxy.seeded(seed, 0.2)                           # one request in five, the same ones by seed
"""

from __future__ import annotations

import http.client
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from support.machine import seconds
from support.object_connection import Connection, Record
from support.object_requests import KINDS, REFUSALS, Request

if TYPE_CHECKING:
    from support.object_server import ObjectServer

BEFORE = ("reset", *REFUSALS, "delay", "partial_list")  # what happens to a request
AFTER = (
    "lost_answer",
    "done_500",
    "truncate",
    "flip",
)  # to the answer of one that was done
LOSSES = ("reset", "lost_answer", "500", "503", "truncate")  # what a client repeats a request for

_CLOSE_S = seconds(60)
_WAIT_S = seconds(120)

Hook = Callable[[Request], "str | None"]


@dataclass
class _Rule:
    which: str | int
    key: str
    skip: int
    times: int | None
    how: str = ""
    seconds: float = 0.0
    hook: Hook | None = None
    is_done: bool = False

    def takes(self, request: Request) -> bool:
        """Returns whether it applies to this request, and counts it."""
        if self.which not in ("any", request.kind, request.number) or self.key not in request.key:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.times is not None:
            self.times -= 1
        return self.times is None or self.times >= 0


def _no_fault(kind: str) -> str:
    return ""


def _checked(which: str | int) -> str | int:
    if isinstance(which, str) and which not in KINDS and which != "any":
        raise ValueError(f"no kind of request: {which!r}")
    return which


class FaultProxy:
    """A running proxy on a port of its own. Thread-safe; a thread serves each connection."""

    def __init__(self, server: ObjectServer) -> None:
        self.server = server
        self._changed = threading.Condition()
        self._rules: list[_Rule] = []
        self._records: list[Record] = []
        self._chance = _no_fault
        self._connections: dict[Connection, threading.Thread] = {}
        self._errors: list[Exception] = []
        self.broken: list[Exception] = []  # of connections that broke without a fault of ours
        self.closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._acceptor = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._acceptor.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def environment(self) -> dict[str, str]:
        """Returns the variables of a process that uses the store through the proxy."""
        return self.server.environment(self.url)

    # ---- Faults

    def fail(
        self,
        which: str | int,
        how: str,
        times: int | None = 1,
        *,
        key: str = "",
        skip: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """Injects a fault into requests to come. Of the rules that apply, the first counts.

        Args:
            which: a kind (object_requests.KINDS), "any", or a request's number.
            how: before the server hears of the request, "reset" (the connection), "500", "503",
                "501", "409", "412", "403", "400" or "200" (an error in a success) as its answer;
                "delay"; "partial_list" (a page has one key, and says where to go on). Once done,
                "lost_answer" (a reset), "done_500" (the answer is 500), "truncate" (half of the
                answer's body, then the end) or "flip" (a bit in the middle of that body); where the
                answer has no body, the last two are "lost_answer".
            times: requests; None: every one.
            key: what a request's key has in it.
            skip: requests that would fit, but pass.
            seconds: of "delay".
        """
        if how not in (*BEFORE, *AFTER):
            raise ValueError(f"no fault: {how!r}")
        self._add(_Rule(_checked(which), key, skip, times, how, seconds))

    def hook(
        self,
        which: str | int,
        call: Hook,
        times: int | None = 1,
        *,
        key: str = "",
        skip: int = 0,
        is_done: bool = False,
    ) -> None:
        """Calls `call(request)`, which returns the fault to inject, as of `fail`, or None.

        A process that it kills is killed at this point: where it returns "reset", the request is
        lost, and with `is_done` it was done. What it raises, `close` raises.

        Args:
            is_done: at once when the server has done the request (`request.status` is there), not
                when its head has come. Then it returns one of AFTER or None.
        """
        self._add(_Rule(_checked(which), key, skip, times, hook=call, is_done=is_done))

    def seeded(
        self, seed: int, rate: float, kinds: Sequence[str] = (), hows: Sequence[str] = LOSSES
    ) -> None:
        """Injects random faults where no rule does.

        The n-th request of a kind since then meets the same fault for the same seed. Which of
        several at once is the n-th is not decided by the seed.

        Args:
            rate: of requests, from 0 to 1.
            kinds: those that may fail; empty: all.
            hows: the faults, of equal chance.
        """
        seen: Counter[str] = Counter()

        def chance(kind: str) -> str:
            seen[kind] += 1
            draw = random.Random(f"{seed}/{kind}/{seen[kind]}")
            is_due = draw.random() < rate and (not kinds or kind in kinds)
            return draw.choice(hows) if is_due else ""

        with self._changed:
            self._chance = chance

    def heal(self) -> None:
        """From now on, there is no fault and no hook."""
        with self._changed:
            self._rules.clear()
            self._chance = _no_fault

    # ---- Records

    def requests(self, kind: str = "", key: str = "") -> list[Request]:
        """Returns the requests of this kind, or all, with this in their key, as they came."""
        with self._changed:
            found = [record.request for record in self._records]
        return [one for one in found if kind in ("", one.kind) and key in one.key]

    def count(self, kind: str = "", key: str = "") -> int:
        return len(self.requests(kind, key))

    def clear(self) -> None:
        """Forgets the requests; the next one's number is 0. Rules stay."""
        with self._changed:
            self._records.clear()

    def wait(self, kind: str, count: int = 1, key: str = "") -> None:
        """Waits until so many have begun. Raises TimeoutError."""
        give_up_at = time.monotonic() + _WAIT_S
        with self._changed:
            while self.count(kind, key) < count:
                if not self._changed.wait(max(0.0, give_up_at - time.monotonic())):
                    raise TimeoutError(f"no {count} {kind} of {key!r}, but {self.requests()}")

    def close(self) -> None:
        """Cuts every connection, waits for every thread; raises what a hook raised."""
        self.closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._acceptor.join()
        self._listener.close()
        with self._changed:
            connections = dict(self._connections)
        for connection, thread in connections.items():
            connection.cut()
            thread.join(_CLOSE_S)
            if thread.is_alive():
                raise TimeoutError(f"{thread.name} did not end within {_CLOSE_S:.0f} s")
        if self._errors:
            raise self._errors[0]

    # ---- Of its threads

    def begin(self, request: Request) -> tuple[Record, str, float]:
        """Notes a request that has come; returns its record, its fault and the fault's seconds."""
        with self._changed:
            request = request._replace(number=len(self._records))
            record = Record(request)
            self._records.append(record)
            rule = self._due(request, is_done=False)
            how = rule.how if rule else self._chance(request.kind)
            self._changed.notify_all()
        if rule is not None and rule.hook is not None:
            how = rule.hook(request) or ""
        if how == "partial_list" and request.kind != "list":
            raise ValueError(f"partial_list, of {request}")
        self.note(record, fault=how)
        return record, how, rule.seconds if rule else 0.0

    def after(self, record: Record) -> str:
        """Returns what happens to the answer of a request that is done."""
        with self._changed:
            rule = self._due(record.request, is_done=True)
        how = (rule.hook(record.request) or "") if rule and rule.hook else ""
        if how:
            self.note(record, fault=how)
        return record.request.fault

    def note(self, record: Record, **values: object) -> None:
        with self._changed:
            record.request = record.request._replace(**values)  # type: ignore[arg-type]

    def _due(self, request: Request, *, is_done: bool) -> _Rule | None:
        rules = (rule for rule in self._rules if rule.is_done == is_done)
        return next((rule for rule in rules if rule.takes(request)), None)

    def _add(self, rule: _Rule) -> None:
        with self._changed:
            self._rules.append(rule)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # close() has shut it down
            connection = Connection(self, client)
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            with self._changed:
                self._connections[connection] = thread
            thread.start()

    def _serve(self, connection: Connection) -> None:
        is_reset = True
        try:
            is_reset = connection.serve()
        except (OSError, http.client.HTTPException) as error:
            # The client has gone, or the server was killed: the other end sees a reset.
            self.broken.append(error)
        except Exception as error:  # noqa: BLE001  # of a hook, or a mistake here: close() raises it
            self._errors.append(error)
        finally:
            connection.close(is_reset=is_reset)
            with self._changed:
                del self._connections[connection]
