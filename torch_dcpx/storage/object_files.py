"""Objects for the methods of stock's `FileSystemWriter` and `FileSystemReader` that ours call, or
that a subclass calls.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemBase

from torch_dcpx._hooks import OWN_FILE_SYSTEMS
from torch_dcpx.errors import UnsupportedError
from torch_dcpx.storage.object_store import Bucket, bucket_of
from torch_dcpx.storage.object_url import ObjectUrl, is_url, location_of


class ObjectFileSystem(FileSystemBase):
    """As stock's `FileSystem`, for URLs of stores. Picklable."""

    def __init__(self, endpoint: str | None) -> None:
        self._endpoint = endpoint

    def _place(self, path: str | os.PathLike[str]) -> tuple[Bucket, str]:
        url = location_of(path, self._endpoint)
        if not isinstance(url, ObjectUrl):
            raise UnsupportedError(f"'{path}' is no URL of a store")
        return bucket_of(url), url.key

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Gives the bytes of a whole object. Raises UnsupportedError: a mode that writes."""
        if mode != "rb":
            raise UnsupportedError(f"open '{path}' in mode {mode!r}: objects are read alone")
        bucket, key = self._place(path)
        found = bucket.get(key)
        body = found.body
        if body is None:
            body = bucket.get_range(key, found.tag, 0, found.nbytes)
        yield io.BytesIO(bytes(body))

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{os.fspath(path)}/{suffix}"

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        raise UnsupportedError(f"rename '{path}': a store has no renames")

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Does nothing."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_url(checkpoint_id)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        bucket, key = self._place(path)
        return bucket.head(key) is not None

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        bucket, key = self._place(path)
        bucket.delete([key])

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        bucket, key = self._place(path)
        return [f"{os.fspath(path)}/{name}" for name in bucket.listing(key).objects]


OWN_FILE_SYSTEMS.append(ObjectFileSystem)


def set_location(plugin: Any, text: str, endpoint: str | None) -> None:
    """Sets the path of a writer or reader of stock's class, and what stock's methods look with."""
    if is_url(text):
        plugin.fs, plugin.path = ObjectFileSystem(endpoint), text
    elif isinstance(plugin.fs, ObjectFileSystem):
        plugin.fs, plugin.path = FileSystem(), Path(text)
