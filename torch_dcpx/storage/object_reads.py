"""Reads of the data objects of a checkpoint, as the jobs of C++ make them."""

from __future__ import annotations

import time
from typing import Any

from torch_dcpx._answers import StorageTimeout, wait_at_most
from torch_dcpx.storage.object_store import Bucket
from torch_dcpx.storage.object_url import ObjectUrl


class ObjectReads:
    """Answers what C++ asks for, on threads of its own: see csrc/dcp/python_objects.h."""

    def __init__(self, bucket: Bucket, path: ObjectUrl, timeout: StorageTimeout) -> None:
        self._bucket, self._path, self._timeout = bucket, path, timeout

    def look(self, name: str, nbytes: int) -> tuple[int, str, Any]:
        with wait_at_most(self._timeout):
            return tuple(self._bucket.get_end((self._path / name).key, nbytes))

    def read(self, name: str, tag: str, begin: int, end: int) -> Any:
        window = self._bucket.link.reading
        window.take(end - begin, bool)
        begun, took_s = time.monotonic(), None
        try:
            with wait_at_most(self._timeout):
                found = self._bucket.get_range((self._path / name).key, tag, begin, end)
            took_s = time.monotonic() - begun
        finally:
            window.give_back(end - begin, took_s)
        return found
