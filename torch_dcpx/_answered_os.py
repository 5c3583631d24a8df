"""`os` for storage: its calls end at the bound of their operation where a server may be silent.

The kernel interrupts no call on a file system in user space, or of a server, that was sent off and
is not answered. So where other nodes mount a file system, by its type, each call there is made by
`answered`. Where nothing of such a type is mounted at the import of this module, `os` is Python's.
"""

from __future__ import annotations

import fcntl as _fcntl
import os as _os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch_dcpx import _descriptors, _mounts
from torch_dcpx._answers import answered

_Path = Any  # as os takes it: a name, or a descriptor

_BY_NAME = ("access", "lstat", "mkdir", "readlink", "rmdir", "stat", "unlink")
_BY_FILE = ("fdatasync", "fsync", "fstat", "ftruncate", "lseek", "pread", "pwrite", "write")
_BY_PATH = (*_BY_NAME, *_BY_FILE, "listdir", "statvfs")
_BY_TWO_PATHS = ("link", "rename", "replace")
_OF_PATH = ("exists", "isdir", "isfile", "islink", "lexists", "realpath")


class _Entries(list[Any]):
    """Holds what `scandir` found, as the context manager that it returns."""

    def __enter__(self) -> Iterator[Any]:
        return iter(self)

    def __exit__(self, *_: object) -> None:
        pass


class AnsweredOs:
    """Stands for `os`. Thread-safe."""

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}  # of open files on such a file system, by descriptor
        for name in _BY_PATH:
            setattr(self, name, self._by_path(_os, name))
        for name in _BY_TWO_PATHS:
            setattr(self, name, self._by_two_paths(name))
        self.path = _AnsweredPath(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(_os, name)

    def where(self, path: _Path, dir_fd: int | None = None) -> str | None:
        """Returns the path of a file where a call may never return, else None."""
        if isinstance(path, int):
            return self._paths.get(path)
        if dir_fd is not None:
            above = self._paths.get(dir_fd)
            return None if above is None else f"{above}/{_os.fsdecode(path)}"
        text = _os.fsdecode(path)
        return None if _mounts.shared_mount(text) is None else text

    def _by_path(self, module: Any, name: str) -> Callable[..., Any]:
        def call(path: _Path, *args: Any, **kwargs: Any) -> Any:
            real = getattr(module, name)
            where = self.where(path, kwargs.get("dir_fd"))
            if where is None:
                return real(path, *args, **kwargs)
            return answered(lambda: real(path, *args, **kwargs), f"{name} '{where}'", where)

        return call

    def _by_two_paths(self, name: str) -> Callable[..., Any]:
        def call(old: _Path, new: _Path, **kwargs: Any) -> Any:
            real = getattr(_os, name)
            where = self.where(new, kwargs.get("dst_dir_fd"))
            if where is None:
                return real(old, new, **kwargs)
            what = f"{name} '{_os.fsdecode(old)}' to '{where}'"
            return answered(lambda: real(old, new, **kwargs), what, where)

        return call

    def scandir(self, path: _Path) -> Any:
        where = self.where(path)
        if where is None:
            return _os.scandir(path)

        def listed() -> _Entries:
            with _os.scandir(path) as entries:
                return _Entries(entries)

        return answered(listed, f"list '{where}'", where)

    def opened(
        self, real: Callable[..., int], path: _Path, flags: int, mode: int, dir_fd: int | None
    ) -> int:
        """Returns what `real`, an `open`, returns."""
        where = self.where(path, dir_fd)
        if where is None:
            fd = real(path, flags, mode, dir_fd=dir_fd)
            self._paths.pop(fd, None)
            return fd

        def call() -> int:
            return real(path, flags, mode, dir_fd=dir_fd)

        fd = answered(call, f"open '{where}'", where, discard=_os.close)
        self._paths[fd] = where
        return fd

    def open(self, path: _Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        return self.opened(_os.open, path, flags, mode, dir_fd)

    def dup(self, fd: int) -> int:
        copy = _os.dup(fd)
        if fd in self._paths:
            self._paths[copy] = self._paths[fd]
        return copy

    def close(self, fd: int) -> None:
        where = self._paths.pop(fd, None)
        if where is None:
            _os.close(fd)
        else:
            answered(lambda: _os.close(fd), f"close '{where}'", where)


class _AnsweredPath:
    """Stands for `os.path`."""

    def __init__(self, own: AnsweredOs) -> None:
        for name in _OF_PATH:
            setattr(self, name, own._by_path(_os.path, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(_os.path, name)


class _AnsweredFcntl:
    """Stands for `fcntl`."""

    def __init__(self, own: AnsweredOs) -> None:
        self.flock = own._by_path(_fcntl, "flock")

    def __getattr__(self, name: str) -> Any:
        return getattr(_fcntl, name)


if TYPE_CHECKING:
    import fcntl as fcntl
    import os as os

    from torch_dcpx._descriptors import open_file as open_file
elif not _mounts.HAS_SHARED:
    os = _os
    fcntl = _fcntl
    open_file = _descriptors.open_file
else:
    os = AnsweredOs()
    fcntl = _AnsweredFcntl(os)

    def open_file(path: _Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        return os.opened(_descriptors.open_file, path, flags, mode, dir_fd)
