"""Finds out whether a store knows conditional PUTs, and in which form it takes a tag.

A condition must refuse what it has to refuse, and take what it has to take: some stores ignore
If-Match, and Ceph's RGW 16.2 refuses the right tag in the quotes in which it gives it.
"""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING, Any

from torch_dcpx.errors import StorageError, UnsupportedError
from torch_dcpx.storage.names import probe_name
from torch_dcpx.storage.object_errors import REFUSED

if TYPE_CHECKING:
    from torch_dcpx.storage.object_store import Bucket

_FIRST, _SECOND = b"torch-dcpx", b"torch-dcpx again"  # of unlike tags
_NOT_DONE = frozenset({errno.EEXIST, errno.ESTALE, errno.EOPNOTSUPP})
# Of a store that has not looked at the condition, as another request is under way: "try again".
_CONFLICTS = ("ConditionalRequestConflict: ", "OperationAborted: ")
_TRIES = 4  # of a PUT that is told so
_PAUSE_S = 0.5


class Conditions:
    """Knows what one bucket makes of conditions; asks it once. Of two threads both may ask."""

    def __init__(self, bucket: Bucket, unknown_tag: str) -> None:
        """Takes an ETag that no object has. Asks nothing yet."""
        self._bucket, self._unknown_tag = bucket, unknown_tag
        self._problem: str | None = None  # "": none; None: not known
        self.has_quotes = True  # around a tag that the store takes

    def mode(self, replaced: str | None) -> Any:
        """Returns obstore's condition of a PUT over the object of this tag; None: over none."""
        return _mode(replaced, has_quotes=self.has_quotes)

    def check(self, prefix: str) -> None:
        """Asks by an object beneath `prefix`, which it removes.

        Raises UnsupportedError: two saves at a time could mix, or none could replace another.
        """
        if self._problem is None:
            self._problem = self._asked(f"{prefix}/{probe_name()}")
        if self._problem:
            raise UnsupportedError(
                f"save to '{self._bucket.url(prefix)}': the store {self._problem}: "
                "WriteOptions(conditional_commit=False) saves all the same, where nobody else "
                "saves to this URL"
            )

    def is_other_form(self, prefix: str) -> bool:
        """Returns whether a tag that was refused in quotes is to be sent without them."""
        if self._problem is not None:
            return False  # it was sent in the form that the store takes
        try:
            self.check(prefix)
        except UnsupportedError:
            return False
        return not self.has_quotes

    def _asked(self, key: str) -> str:
        may_be_there = True
        try:
            try:
                is_put = self._is_put(key, _FIRST, "create")
            except StorageError as error:
                may_be_there = error.errno not in REFUSED
                raise
            return self._tried(key, is_put=is_put)
        finally:
            if may_be_there:
                self._bucket.remove_probe(key)

    def _tried(self, key: str, *, is_put: bool) -> str:
        """Returns the problem, or "", of a store that has put an object, or refused to."""
        if not is_put and self._tag(key) is None:  # else by a try whose answer was lost
            return "refuses If-None-Match where nothing is, so nothing could be committed"
        if self._is_put(key, _SECOND, "create"):
            return "ignores If-None-Match, so two saves at a time could mix"
        tag = self._tag(key)
        for has_quotes in (True, False):
            if self._is_put(key, _SECOND, _mode(self._unknown_tag, has_quotes=has_quotes)):
                return "ignores If-Match, so two saves at a time could mix"
            is_put = self._is_put(key, _SECOND, _mode(tag, has_quotes=has_quotes))
            if is_put or self._tag(key) != tag:  # the latter by a try whose answer was lost
                self.has_quotes = has_quotes
                return ""
        return "refuses If-Match with the tag that an object has, so no save could replace another"

    def _is_put(self, key: str, body: bytes, mode: Any) -> bool:
        """Whether the store puts an object on this condition. Raises: StorageError."""
        for tries_left in reversed(range(_TRIES)):
            try:
                self._bucket.put_again(key, body, mode)
            except StorageError as error:
                is_undecided = str(error).startswith(_CONFLICTS)
                if error.errno not in _NOT_DONE or (is_undecided and not tries_left):
                    raise
                if not is_undecided:
                    return False
            else:
                return True
            time.sleep(_PAUSE_S)
        raise AssertionError("unreachable")

    def _tag(self, key: str) -> str | None:
        found = self._bucket.head(key)
        return None if found is None else found[1]


def _mode(replaced: str | None, *, has_quotes: bool) -> Any:
    if replaced is None:
        return "create"
    return {"e_tag": replaced if has_quotes else replaced.strip('"')}
