"""`os` for storage: its calls end at the bound of their operation where a server may be silent.

The kernel interrupts no call on a file system in user space, or of a server, that was sent off and
is not answered. So where other nodes mount a file system, by its type, each call there is made by
`answered`. As long as nothing of such a type is mounted, `os` and `fcntl` share the contents of
Python's: a call costs nothing more. `note_device` and `path_of` find what is mounted later.
"""

from __future__ import annotations

import fcntl as _fcntl
import os as _os
from collections.abc import Callable, Iterator
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch_dcpx import _mounts
from torch_dcpx._answers import answered

_Path = Any  # as os takes it: a name, or a descriptor
_Result = TypeVar("_Result")

_BY_NAME = ("access", "chown", "lstat", "mkdir", "readlink", "rmdir", "stat", "unlink", "utime")
_BY_FILE = (
    *("fdatasync", "fstat", "fstatvfs", "fsync", "ftruncate", "lseek", "pread", "pwrite"),
    *("pwritev", "read", "write"),
)
_BY_PATH = (*_BY_NAME, *_BY_FILE, "listdir", "statvfs")
_BY_TWO_PATHS = ("link", "rename", "replace")
_OF_PATH = ("exists", "isdir", "isfile", "islink", "ismount", "lexists", "realpath", "samefile")
_OF_PATH_OBJECT = (
    *("exists", "is_dir", "is_file", "is_symlink", "lstat", "mkdir", "read_bytes", "read_text"),
    *("rename", "replace", "resolve", "rmdir", "samefile", "stat", "touch", "unlink"),
    *("write_bytes", "write_text"),
)
_LISTING = ("glob", "iterdir", "rglob")


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

    def walk(self, top: _Path, **kwargs: Any) -> Iterator[Any]:
        return iter(answered_at(top, "list", lambda: list(_os.walk(top, **kwargs))))

    def open(self, path: _Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        where = self.where(path, dir_fd)
        if where is None:
            fd = _os.open(path, flags, mode, dir_fd=dir_fd)
            self._paths.pop(fd, None)
            return fd

        def call() -> int:
            return _os.open(path, flags, mode, dir_fd=dir_fd)

        fd = answered(call, f"open '{where}'", where, discard=_os.close)
        self._paths[fd] = where
        return fd

    def copied(self, fd: int, copy: int) -> int:
        """Returns `copy`, a further descriptor of an open file."""
        if fd in self._paths:
            self._paths[copy] = self._paths[fd]
        return copy

    def dup(self, fd: int) -> int:
        return self.copied(fd, _os.dup(fd))

    def close(self, fd: int) -> None:
        where = self._paths.pop(fd, None)
        if where is None:
            _os.close(fd)
        else:
            answered(lambda: _os.close(fd), f"close '{where}'", where, is_proof=False)


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
        self._own = own
        self.flock = own._by_path(_fcntl, "flock")

    def fcntl(self, fd: int, command: int, *args: Any) -> Any:
        found = _fcntl.fcntl(fd, command, *args)
        is_copy = command in (_fcntl.F_DUPFD, _fcntl.F_DUPFD_CLOEXEC)
        return self._own.copied(fd, found) if is_copy else found

    def __getattr__(self, name: str) -> Any:
        return getattr(_fcntl, name)


if TYPE_CHECKING:
    import fcntl as fcntl
    import os as os
else:
    os, fcntl = AnsweredOs.__new__(AnsweredOs), _AnsweredFcntl.__new__(_AnsweredFcntl)
    # What an object has itself goes before the methods of its class: these are Python's functions,
    # also where somebody puts others in their place.
    os.__dict__, fcntl.__dict__ = vars(_os), vars(_fcntl)


def _begin() -> None:
    """Has the calls answered, if anything shared is mounted."""
    ours: Any = os
    if _mounts.HAS_SHARED and vars(ours) is vars(_os):
        made, locks = AnsweredOs(), cast(Any, fcntl)
        locks.__dict__, ours.__dict__ = vars(_AnsweredFcntl(made)), vars(made)


_begin()


def note_device(path: _Path, device: int) -> None:
    """Looks what is mounted now, if a path is on a device that nobody has seen so far.

    Callers compare with `_mounts.LOCAL_DEVICES` themselves, which costs no call.
    """
    _mounts.note_device(_os.fsdecode(path), device)
    _begin()


class AnsweredPath(PosixPath):
    """A path on such a file system."""

    def open(self, *args: Any, **kwargs: Any) -> Any:
        """As `Path.open`; reads and writes of what it returns are not answered."""
        call = super().open
        return answered(lambda: call(*args, **kwargs), f"open '{self}'", str(self))


def _of_path_object(name: str) -> Callable[..., Any]:
    def call(self: Path, *args: Any, **kwargs: Any) -> Any:
        def real() -> Any:
            found = getattr(PosixPath, name)(self, *args, **kwargs)
            return iter(list(found)) if name in _LISTING else found

        return answered(real, f"{name} '{self}'", str(self))

    return call


for _name in (*_OF_PATH_OBJECT, *_LISTING):
    setattr(AnsweredPath, _name, _of_path_object(_name))


def may_be_silent(path: _Path) -> bool:
    """Returns whether a path is on such a file system."""
    return _mounts.HAS_SHARED and _mounts.shared_mount(_os.fspath(path)) is not None


def path_of(*parts: _Path) -> Path:
    """Returns a path, whose methods are answered where it is on such a file system."""
    path = Path(*parts)
    return AnsweredPath(path) if may_be_silent(path) else path


def answered_at(
    path: _Path, verb: str, call: Callable[[], _Result], moved_at: Callable[[], float] | None = None
) -> _Result:
    """Returns what `call` returns, answered as a whole if `path` is on such a file system.

    Args:
        moved_at: as of `answered`, for a call that may be long.
    """
    if not may_be_silent(path):
        return call()
    where = _os.fspath(path)
    return answered(call, f"{verb} '{where}'", where, moved_at=moved_at)
