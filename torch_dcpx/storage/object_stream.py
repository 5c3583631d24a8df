"""One PUT to a store of pieces that a thread makes, which can be ended at any time.

1. A thread of ours runs a loop; there obstore sends the pieces, by parts or whole.
2. obstore asks for a piece when it may send more. The caller's thread makes it: that may take long.
3. A part begins when the link may have more under way. A piece is let go once the store has it.
4. Where nothing moves within the bound of the operation, or the caller gives up, the request is
   cancelled: no thread is left behind, and no piece is held any more.
"""

from __future__ import annotations

import asyncio
import errno
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch_dcpx._answers import Answer, current_timeout
from torch_dcpx._waiting import ANSWER_THREAD
from torch_dcpx.errors import StorageError
from torch_dcpx.storage.object_services import import_obstore

if TYPE_CHECKING:
    from torch_dcpx.storage.object_store import Bucket

_LOOK_S = 0.5
_POLL_S = 0.1
_ABORT_S = 2.0  # without an answer to the request that ends an upload by parts
_LONG_ABORT_S = 20.0  # where bytes move

_guard = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []  # one, once it is needed


def loop() -> asyncio.AbstractEventLoop:
    """Returns the running loop of this process. Raises RuntimeError: no thread is left."""
    with _guard:
        if not _loops:
            own = asyncio.new_event_loop()
            threading.Thread(target=own.run_forever, name=ANSWER_THREAD, daemon=True).start()
            _loops.append(own)
        return _loops[0]


class Stream:
    """One upload. Its pieces are made on one thread, and sent by others."""

    def __init__(
        self,
        bucket: Bucket,
        key: str,
        nbytes: int,
        *,
        at_once: int = 0,
        is_ahead: bool = False,
        on_error: Callable[[], object] = bool,
        stop: threading.Event | None = None,
    ) -> None:
        """Sends nothing yet.

        Args:
            nbytes: of a part; without parts, of the object.
            at_once: the most parts under way; 0: it has none, and is put by one request.
            is_ahead: a piece is made while obstore does not ask for one yet.
            on_error: is called, on the loop's thread, when the upload has ended by an error.
            stop: ends it, once it is set.
        """
        self._bucket, self._key = bucket, key
        self._unit_bytes, self._at_once = max(nbytes, 1), at_once
        self._is_ahead, self._on_error = is_ahead, on_error
        self._stop = stop or threading.Event()
        self._timeout = current_timeout()
        self._loop = loop()
        self._wanted = threading.Semaphore(0)
        self._next: asyncio.Future[Any] | None = None
        self._answer: Answer[None] = Answer()
        self._task: asyncio.Task[None] | None = None
        self._has_ended = False
        self._is_given_up = False
        self._is_whole = False  # all pieces are given
        self._since = time.monotonic()  # of the last sign of progress
        # Bytes: given to obstore; let go of those; allowed to be under way, and no more.
        self._given = self._gone = self._allowed = self._returned = 0
        self._guard = threading.RLock()  # of those; whoever lets go of a piece may hold it

    def run(self, pieces: Iterator[Any]) -> None:
        """Uploads all pieces, which are made on this thread. An error of `pieces` aborts it.

        Raises:
            StorageError: of the store. ETIMEDOUT: nothing has moved within the bound; ECANCELED:
                `stop` was set.
            What `pieces` raises.
        """
        self._loop.call_soon_threadsafe(self._begin)
        try:
            while not self._is_whole:
                ahead = [next(pieces, None)] if self._is_ahead else []
                if not self._is_wanted():
                    break
                self._take_part()
                self._hand_over(ahead.pop() if ahead else next(pieces, None))
            while not self._answer.wait(_POLL_S):
                self._check_stop()
        except BaseException as error:
            had_ended = self._has_ended
            self._give_up()
            if had_ended and isinstance(error, Exception):
                self._answer.taken()  # raises why: `pieces` has only learnt that it has ended
            raise
        finally:
            self._return(self._allowed, None)
        self._answer.taken()
        self._timeout.note_answer()

    # ---- On the caller's thread

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise _given_up()

    def _is_wanted(self) -> bool:
        """Waits until obstore asks for a piece. Returns False: the upload has ended."""
        while not self._wanted.acquire(timeout=_POLL_S):
            self._check_stop()
        return not self._has_ended

    def _take_part(self) -> None:
        """Waits until one more part may begin, where the bytes so far fill those before."""
        while self._given >= self._allowed and (self._at_once or not self._allowed):
            self._bucket.link.sending.take(self._unit_bytes, self._may_go)
            self._allowed += self._unit_bytes

    def _may_go(self) -> bool:
        """Whether it would wait in vain: nothing is under way that ends by itself."""
        return self._has_ended or self._stop.is_set() or not self._bucket.link.is_sending()

    def _hand_over(self, piece: Any) -> None:
        """Gives obstore a piece, None behind the last one."""
        if piece is None:
            self._is_whole = True
        else:
            nbytes = memoryview(piece).nbytes
            with self._guard:
                self._given += nbytes
            begun = time.monotonic()
            try:
                seen = weakref.finalize(piece, self._note_gone, nbytes, begun)
            except TypeError:  # bytes
                piece = memoryview(piece)
                seen = weakref.finalize(piece, self._note_gone, nbytes, begun)
            seen.atexit = False
        self._loop.call_soon_threadsafe(self._set_next, piece)

    def _give_up(self) -> None:
        """Ends the upload, aborted. A store that does not answer is not waited for."""
        self._is_given_up = True
        self._loop.call_soon_threadsafe(self._fail_next)
        begun = time.monotonic()
        while not self._answer.wait(_POLL_S):
            since = max(begun, self._since, self._bucket.link.moved_at())
            now = time.monotonic()
            if now - since > _ABORT_S or now - begun > _LONG_ABORT_S:
                self._loop.call_soon_threadsafe(self._cancel)
                self._answer.wait(_ABORT_S)
                return

    def _note_gone(self, nbytes: int, begun: float) -> None:
        """Notes that the store has a piece; on whatever thread lets go of it."""
        self._since = now = time.monotonic()
        with self._guard:
            self._gone += nbytes
        self._return(nbytes, None if self._has_ended or self._is_given_up else now - begun)

    def _return(self, nbytes: int, took_s: float | None) -> None:
        """Allows others so many of the bytes that this one was allowed."""
        with self._guard:
            nbytes = min(nbytes, self._allowed - self._returned)
            self._returned += nbytes
        if nbytes:
            self._bucket.link.sending.give_back(nbytes, took_s)

    @property
    def sent_bytes(self) -> int:
        """Bytes of whole parts that the store does not have: they are under way."""
        with self._guard:
            part_bytes = self._unit_bytes if self._at_once else self._given + 1
            sent = self._given if self._is_whole else self._given // part_bytes * part_bytes
            return max(sent - self._gone, 0)

    # ---- On the loop's thread

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._run())

    async def _run(self) -> None:
        error: BaseException | None = None
        self._bucket.link.uploads.add(self)
        try:
            await self._put()
        except asyncio.CancelledError:
            error = _given_up()
        except BaseException as found:  # noqa: BLE001 - `run` raises it
            error = found
        self._bucket.link.uploads.discard(self)
        self._has_ended = True
        self._answer.give(None, error)
        self._wanted.release()
        if error is not None:
            self._on_error()

    async def _put(self) -> None:
        put = asyncio.ensure_future(
            import_obstore().put_async(
                self._bucket.uploader,
                self._key,
                self,
                use_multipart=self._at_once > 0,
                chunk_size=self._unit_bytes,
                max_concurrency=max(self._at_once, 1),
            )
        )
        verb = "upload" if self._at_once else "put"
        try:
            while not (await asyncio.wait({put}, timeout=_LOOK_S))[0]:
                self._check_answers()
        except BaseException:
            put.cancel()
            raise
        with self._bucket.errors(verb, self._key):
            put.result()

    def _check_answers(self) -> None:
        """Raises StorageError: nothing has moved within the bound."""
        if self._is_given_up:
            return  # `_give_up` waits, for longer than others behind Ctrl-C
        now = time.monotonic()
        if self._next is not None and not self.sent_bytes:
            self._since = now  # obstore waits for us
        wait_s = self._timeout.wait_s
        if now - self._since > wait_s / 4:
            self._since = max(self._since, self._bucket.link.moved_at())
        if now - self._since > wait_s:
            what = f"upload '{self._bucket.url(self._key)}'"
            raise self._timeout.error(what, self._bucket.url(self._key), now - self._since)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        if self._is_given_up:
            raise _given_up()
        self._since = time.monotonic()
        self._next = self._loop.create_future()
        self._wanted.release()
        try:
            piece = await self._next
        finally:
            self._next = None
        if piece is None:
            raise StopAsyncIteration
        return piece

    def _set_next(self, piece: Any) -> None:
        if self._next is not None and not self._next.done():
            self._next.set_result(piece)

    def _fail_next(self) -> None:
        if self._next is not None and not self._next.done():
            self._next.set_exception(_given_up())


def _given_up() -> StorageError:
    return StorageError("the upload was given up", errno=errno.ECANCELED)
