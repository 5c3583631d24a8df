"""Tells what holds the files of a manager's root: a directory, or a store."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

from torch_dcpx._arguments import check_options, check_wait
from torch_dcpx.errors import StorageError, UnsupportedError, must_be
from torch_dcpx.manager.directory_root import DirectoryRoot
from torch_dcpx.manager.store_root import StoreRoot
from torch_dcpx.options import ReadOptions, WriteOptions
from torch_dcpx.storage.object_url import ObjectUrl, location_of
from torch_dcpx.storage.paths import AnyPath, absolute, checked_location

_GRACE_S = 3600.0


def files_at(
    root: AnyPath, options: WriteOptions, read_options: ReadOptions, grace_s: float | None
) -> DirectoryRoot | StoreRoot:
    """Returns the files of a root. Args, Raises: as `CheckpointManager`."""
    if options.node_local or read_options.node_local:
        problem = "keeps one root that all nodes share; dcpx.save takes node_local"
        raise UnsupportedError(f"node_local=True: a CheckpointManager {problem}")
    text = checked_location(root, "a root is a directory of a file system, s3:// or az://", "root")
    location = location_of(
        root if isinstance(root, ObjectUrl) else absolute(text), options.endpoint
    )
    if isinstance(location, Path):
        if not location.is_absolute():
            problem = f"manager's root '{text}': the directory of this process is gone"
            raise StorageError(f"{problem}; name it from '/' on", errno=errno.ENOENT, path=text)
        if grace_s is not None:
            raise must_be("grace_s", grace_s, "None: a directory has locks for readers")
        return DirectoryRoot(location, is_durable=options.durability == "full")
    if options.endpoint != read_options.endpoint:
        raise must_be(
            "read_options.endpoint", read_options.endpoint, f"as in options: {options.endpoint!r}"
        )
    check_wait("grace_s", grace_s)
    if grace_s is None:
        grace_s = max(_GRACE_S, 2 * options.save_timeout_s)
    is_conditional = options.conditional_commit
    return StoreRoot(location, grace_s=grace_s, is_conditional=is_conditional)


def checked_options(write: Any, read: Any) -> tuple[WriteOptions, ReadOptions]:
    """Returns the options of a manager, or their defaults. Raises: OptionError."""
    check_options("options", write, WriteOptions)
    check_options("read_options", read, ReadOptions)
    write = write or WriteOptions()
    return write, read or ReadOptions(endpoint=write.endpoint)
