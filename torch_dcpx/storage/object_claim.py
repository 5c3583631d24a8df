"""One object of metadata, and what a save means to put in its place."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Literal

from torch_dcpx.errors import ConcurrentSaveError, CorruptionError
from torch_dcpx.storage.object_store import Bucket, StoredObject
from torch_dcpx.storage.object_url import ObjectUrl

if TYPE_CHECKING:
    from torch_dcpx.storage.running_save import RunningSave


class SmallObject:
    """An object, with what its first request has brought: as `SmallFile`."""

    def __init__(self, bucket: Bucket, key: str, path: ObjectUrl, found: StoredObject) -> None:
        self._bucket, self._key, self.path = bucket, key, path
        self.nbytes, self.tag, body = found
        self._body = memoryview(body or b"")

    def part(self, offset: int, nbytes: int) -> bytes:
        """Returns bytes of the object. Raises: StorageError; CorruptionError: it ends before."""
        if offset + nbytes > self.nbytes:
            raise CorruptionError(
                f"'{self.path}' ends at {self.nbytes} B",
                path=str(self.path),
                offset=offset,
                nbytes=nbytes,
            )
        if offset + nbytes <= len(self._body):
            return bytes(self._body[offset : offset + nbytes])
        if nbytes == 0:
            return b""
        return bytes(self._bucket.get_range(self._key, self.tag, offset, offset + nbytes))


class ObjectClaim:
    """Knows what a save has found in place of its metadata, and means to replace. It keeps nobody
    out: of two saves at a time the later commit fails.
    """

    is_held = False
    left_by: Literal["nobody"] = "nobody"

    def __init__(self, tag: str | None, save: RunningSave | None, *, is_conditional: bool) -> None:
        """Takes the tag of what the save has found; None: nothing."""
        self.tag = tag
        self._save = save
        self.is_conditional = is_conditional

    def set_unsure(self, is_unsure: bool) -> None:
        """Notes whether the save may be committed, now or when a request arrives."""
        if self._save is not None:
            self._save.is_unsure = is_unsure

    def release(self, *, has_ended_well: bool = False) -> None:
        """Does nothing."""


def concurrent(url: ObjectUrl, why: str) -> ConcurrentSaveError:
    return ConcurrentSaveError(
        f"another save has committed to '{url}' since this one began ({why}): nothing of this one "
        "is published; save to another prefix, or one after the other",
        errno=errno.EWOULDBLOCK,
        path=str(url),
    )
