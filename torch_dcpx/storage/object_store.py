"""One bucket through obstore: requests, their errors as ours, and what the store can do.

obstore signs, and retries with backoff (10 times, in 3 minutes at most) what did not move for 30 s.
Its calls take no signal and know no deadline of ours: they run on threads of `_answers`; uploads of
large objects, in `object_stream`, can be ended. Payloads are not signed: each block has a sum.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import PurePosixPath
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from torch_dcpx._answers import answered
from torch_dcpx.errors import StorageError, UnsupportedError
from torch_dcpx.storage.names import probe_name
from torch_dcpx.storage.object_conditions import Conditions
from torch_dcpx.storage.object_errors import PANICS, lacks_words, said
from torch_dcpx.storage.object_link import Link
from torch_dcpx.storage.object_listing import Listing, listing_of, tag_of
from torch_dcpx.storage.object_services import (
    SERVICES,
    endpoint_of,
    import_obstore,
    opened,
    settings_of,
)
from torch_dcpx.storage.object_url import ObjectUrl

logger = logging.getLogger("torch_dcpx")

_T = TypeVar("_T")

_TRIES = 3  # of what may be repeated
_PAUSE_S = 0.5
_MAX_REPEATED_S = 60.0  # obstore's own attempts may have taken minutes
_SMALL_BYTES = 1 << 20  # sent within 30 s by any link
WHOLE_BYTES = 8 << 20  # an object of metadata up to here is read by one request


class StoredObject(NamedTuple):
    """An object as one request has found it."""

    nbytes: int
    tag: str  # its ETag: another one is another object
    body: Any  # a buffer with the bytes that were asked for


_guard = Lock()
_buckets: dict[tuple[object, ...], Bucket] = {}  # by name, endpoint and environment
_was_forked = False


def _after_fork() -> None:
    global _guard, _was_forked
    _guard = Lock()  # another thread of the parent may have held it
    _was_forked = _was_forked or bool(_buckets)
    _buckets.clear()


os.register_at_fork(after_in_child=_after_fork)


def bucket_of(url: ObjectUrl) -> Bucket:
    """Returns the bucket of a URL, one for all of a process.

    Raises:
        UnsupportedError: obstore is missing; this process was forked from one that has used it.
        StorageError: settings that it does not take.
    """
    place = url.scheme, url.bucket, url.endpoint
    key = *place, *settings_of(url.scheme)
    with _guard:
        bucket = _buckets.get(key)
        if bucket is None:
            if _was_forked:
                raise UnsupportedError(
                    f"'{url}': this process was forked from one that has used a store, whose "
                    "threads it does not have; start it by 'spawn' or 'forkserver'"
                )
            for old in [one for one in _buckets if one[:3] == place]:
                del _buckets[old]  # of other credentials
            bucket = _buckets[key] = Bucket(url.scheme, url.bucket, url.endpoint)
    return bucket


class Bucket:
    """Requests to one bucket. Thread-safe."""

    def __init__(self, scheme: str, name: str, endpoint: str | None) -> None:
        self.scheme, self.name, self.endpoint = scheme, name, endpoint
        self._service = SERVICES[scheme]
        self._obstore = import_obstore()
        importlib.import_module("obstore.exceptions")
        with self.errors("open", ""):
            self.store = self._deleter = opened(scheme, name, endpoint, _MOVING, _CLIENT)
        self._conditions = Conditions(self, self._service.unknown_tag)
        self.link = Link(endpoint_of(scheme, endpoint))

    @cached_property
    def uploader(self) -> Any:
        """As `store`, for requests that may send for longer than a store may be silent."""
        with self.errors("open", ""):
            return opened(self.scheme, self.name, self.endpoint, _SENDING, _CLIENT)

    def _sender(self, nbytes: int) -> Any:
        """Returns the store for a request that sends so much."""
        return self.store if nbytes <= _SMALL_BYTES else self.uploader

    def url(self, key: str) -> str:
        return f"{self.scheme}://{self.name}/{key}"

    @contextlib.contextmanager
    def errors(
        self, verb: str, key: str, *, offset: int | None = None, nbytes: int | None = None
    ) -> Iterator[None]:
        """Raises errors and panics of obstore as StorageError, without a secret in its text."""
        try:
            yield
        except BaseException as error:
            kinds = self._obstore.exceptions.BaseError, FileNotFoundError
            if not isinstance(error, kinds) and type(error).__name__ not in PANICS:
                raise
            number, code, cause = said(error, self._service)
            range_text = "" if nbytes is None else f" {nbytes} B at offset {offset} of"
            text = f"{verb}{range_text} '{self.url(key)}': {cause}"
            text = f"{code}: {text}" if code else text
            # Without the cause: its text has URLs and answers, which nobody has looked at.
            raise StorageError(
                text, errno=number, path=self.url(key), offset=offset, nbytes=nbytes
            ) from None

    def _repeated(
        self,
        verb: str,
        key: str,
        call: Callable[[], _T],
        *,
        offset: int | None = None,
        nbytes: int | None = None,
    ) -> _T:
        """Returns what `call` returns, a request that may be made twice. obstore does not repeat
        those whose answer was cut, nor POST and conditional PUT.
        """
        began = time.monotonic()
        for tries_left in reversed(range(_TRIES)):
            try:
                with self.errors(verb, key, offset=offset, nbytes=nbytes):
                    return self._answered(verb, key, call)
            except StorageError as error:
                since = max(began, self.link.moved_at())  # a slow link takes long to carry anything
                is_late = time.monotonic() - since > _MAX_REPEATED_S
                if error.errno != errno.EIO or is_late or not tries_left:
                    raise
                logger.debug("again: %s", error)
            time.sleep(_PAUSE_S)
        raise AssertionError("unreachable")

    def _answered(self, verb: str, key: str, call: Callable[[], _T]) -> _T:
        """Returns what a request returns, within the bound of the operation that runs here."""
        url = self.url(key)
        moved_at = self.link.listed_at if verb == "list" else self.link.moved_at

        def made() -> _T:
            self.link.find_peer()  # within the bound
            return call()

        return answered(made, f"{verb} '{url}'", url, moved_at=moved_at)

    def get(self, key: str) -> StoredObject:
        """Returns a whole object; one of more than WHOLE_BYTES without its body."""

        def call() -> StoredObject:
            answer = self._obstore.get(self.store, key)
            meta = answer.meta
            size = meta["size"]
            body = self._body(answer, key, 0, size) if size <= WHOLE_BYTES else None
            return StoredObject(size, tag_of(meta, self.url(key)), body)

        return self._repeated("get", key, call)

    def get_end(self, key: str, nbytes: int) -> StoredObject:
        """Returns the last bytes of an object, or all of a shorter one."""

        def call() -> StoredObject:
            options: dict[str, Any] = {"range": {"suffix": nbytes}}
            if not self._service.has_suffixes:
                meta = self._obstore.head(self.store, key)
                size, tag = meta["size"], tag_of(meta, self.url(key))
                if not size:
                    return StoredObject(0, tag, b"")  # which has no range
                options = {"range": (max(size - nbytes, 0), size), "if_match": tag}
            try:
                answer = self._obstore.get(self.store, key, options=options)
            except self._obstore.exceptions.GenericError:
                # An empty object has no range. An error of HEAD would say less than that of GET.
                with contextlib.suppress(self._obstore.exceptions.BaseError):
                    meta = self._obstore.head(self.store, key)
                    if not meta["size"]:
                        return StoredObject(0, tag_of(meta, self.url(key)), b"")
                raise
            meta = answer.meta
            size = meta["size"]
            body = self._body(answer, key, max(size - nbytes, 0), size)
            return StoredObject(size, tag_of(meta, self.url(key)), body)

        return self._repeated("get", key, call)

    def _body(self, answer: Any, key: str, begin: int, end: int) -> Any:
        """Returns the bytes of an answer. Raises StorageError, EIO: not those that were wanted."""
        body, nbytes = answer.bytes(), end - begin
        if len(body) == nbytes and tuple(answer.range) == (begin, end):
            return body
        raise StorageError(
            f"get {nbytes} B at offset {begin} of '{self.url(key)}': the answer has {len(body)} B "
            f"at offset {answer.range[0]}",
            errno=errno.EIO,
            path=self.url(key),
            offset=begin,
            nbytes=nbytes,
        )

    def get_begin(self, key: str, nbytes: int) -> StoredObject:
        """Returns the first bytes of an object, or all of a shorter one."""
        found = self.head(key)
        if found is None:
            text = f"get '{self.url(key)}': {os.strerror(errno.ENOENT)}"
            raise StorageError(text, errno=errno.ENOENT, path=self.url(key))
        size, tag = found
        end = min(nbytes, size)
        return StoredObject(size, tag, self.get_range(key, tag, 0, end) if end else b"")

    def get_range(self, key: str, tag: str, begin: int, end: int) -> Any:
        """Returns a buffer with a range of the object of this tag."""
        nbytes = end - begin
        options = {"range": (begin, end), "if_match": tag}

        def call() -> Any:
            return self._body(self._obstore.get(self.store, key, options=options), key, begin, end)

        return self._repeated("get", key, call, offset=begin, nbytes=nbytes)

    def head(self, key: str) -> tuple[int, str] | None:
        """Returns size and tag of an object; None if there is none."""
        try:
            meta = self._meta(key)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return None
            raise
        return meta["size"], tag_of(meta, self.url(key))

    def _meta(self, key: str) -> Any:
        """Returns what obstore says of an object. Raises StorageError: ENOENT, it is missing."""
        try:
            return self._repeated("head", key, lambda: self._obstore.head(self.store, key))
        except StorageError as error:
            if not lacks_words(error):
                raise
            try:  # an answer to HEAD has no words: GET says why
                with self.errors("get", key):
                    self._answered("get", key, lambda: self._obstore.get(self.store, key))
            except StorageError as told:
                error = error if told.errno in (errno.ENOENT, errno.ETIMEDOUT) else told
            raise error from None

    def put(self, key: str, pieces: Iterable[Any]) -> None:
        """Puts an object by one request."""
        kept = list(pieces)
        store = self._sender(sum(memoryview(piece).nbytes for piece in kept))

        def call() -> None:
            self._obstore.put(store, key, iter(kept), use_multipart=False)

        with self.errors("put", key):
            self._answered("put", key, call)

    def put_again(self, key: str, body: bytes, mode: Any = "overwrite") -> None:
        """Puts a small object by obstore's `mode`, whatever is there; the request may be made
        twice.
        """
        self._repeated(
            "put",
            key,
            lambda: self._obstore.put(self.store, key, body, mode=mode, use_multipart=False),
        )

    def now_s(self, prefix: str) -> float:
        """Returns the time by the store's clock, in whole seconds since 1970.

        It puts an object beneath `prefix` and removes it.
        """
        key = f"{prefix}/{probe_name()}"
        try:
            self.put_again(key, b"torch-dcpx")
            meta = self._meta(key)
        finally:
            self.remove_probe(key)
        return float(meta["last_modified"].timestamp())

    def remove_probe(self, key: str) -> None:
        """Removes a small object; logs a failure."""
        try:
            self.delete([key])
        except StorageError as error:
            logger.warning("an object of a few bytes stays: %s", error)

    def put_if(self, key: str, pieces: Sequence[Any], replaced: str | None) -> None:
        """Puts an object in place of the one with the tag `replaced`; None: of none.

        Raises StorageError: EEXIST, ESTALE: something else is there; any other errno: unknown.
        """
        try:
            self._put_if(key, pieces, replaced)
        except StorageError as error:
            is_about_tag = replaced is not None and error.errno == errno.ESTALE
            if not (is_about_tag and self._conditions.is_other_form(key.rpartition("/")[0])):
                raise
            self._put_if(key, pieces, replaced)

    def _put_if(self, key: str, pieces: Sequence[Any], replaced: str | None) -> None:
        mode = self._conditions.mode(replaced)
        store = self._sender(sum(memoryview(piece).nbytes for piece in pieces))

        def call() -> None:
            self._obstore.put(store, key, iter(pieces), mode=mode)

        with self.errors("put", key):
            self._answered("put", key, call)

    def listing(self, prefix: str) -> Listing:
        """Returns what lies directly beneath a prefix."""

        def call() -> Listing:
            own = None
            with contextlib.suppress(self._obstore.exceptions.InvalidPathError):
                found = self._obstore.list_with_delimiter(self.store, prefix or None)
                own = listing_of(found, prefix, self.url)
                if found["objects"] or found["common_prefixes"]:
                    return own
            from torch_dcpx.storage import object_pages  # loads urllib and an XML parser

            return object_pages.listed_anew(self, prefix, own)

        return self._repeated("list", prefix, call)

    def delete(self, keys: Sequence[str]) -> None:
        """Removes objects, those that are there, as many a request as the store takes."""
        for begin in range(0, len(keys), self._service.deletes):
            self._delete(list(keys[begin : begin + self._service.deletes]))

    def _delete(self, keys: list[str]) -> None:
        deleter = self._deleter
        try:
            self._repeated("delete", keys[0], lambda: self._obstore.delete(deleter, keys))
        except StorageError as error:
            if error.errno == errno.EOPNOTSUPP and deleter is self.store:
                self._set_single_deletes()
                return self._delete(keys)
            if error.errno != errno.ENOENT:
                raise
            # Azure says so of the first that is not there: others may have failed otherwise.
            left = self._listed(keys) if len(keys) > 1 else []
            if len(left) == len(keys):
                raise
            if left:
                self._delete(left)

    def _set_single_deletes(self) -> None:
        """Removes each object by a request of its own from now on: some gateways know no other."""
        more = {**_CLIENT, **self._service.single_deletes}
        with self.errors("open", ""):
            self._deleter = opened(self.scheme, self.name, self.endpoint, _MOVING, more)

    def _listed(self, keys: list[str]) -> list[str]:
        """Returns those of some keys that are there."""
        found: set[str] = set()
        for parent in {key.rpartition("/")[0] for key in keys}:
            found.update(str(PurePosixPath(parent, name)) for name in self.listing(parent).objects)
        return [key for key in keys if key in found]

    def check_conditional(self, prefix: str) -> None:
        """Raises UnsupportedError, asked once a process: the store's conditions are of no use."""
        self._conditions.check(prefix)


_CLIENT: dict[str, Any] = {}  # more arguments of obstore's class
# Settings of its client. What is received is ended when nothing comes for so long. That would end
# an upload that takes longer than it, also while it moves: there the kernel ends a connection whose
# bytes nobody acknowledges for 30 s, and our bound one to a store that has them and is silent.
_MOVING = {"timeout": "1 day", "read_timeout": "30s"}
_SENDING = {"timeout": "1 day"}
