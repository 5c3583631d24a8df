"""Resolves the paths of checkpoints as users give them, and the directory of a relative one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch_dcpx.errors import OptionError, UnsupportedError
from torch_dcpx.storage.names import metadata_name

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

AnyPath: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]


def checked_path(path: AnyPath, way_out: str) -> str:
    """Returns a path as text; bytes that are no UTF-8 come back as `os.fsdecode` has them.

    Args:
        path: as given.
        way_out: what to say where it is a URL.

    Raises:
        UnsupportedError: it is a URL.
        OptionError: it holds a NUL, which no file system can keep, or what its encoding has not.
    """
    text = os.fsdecode(path)
    if "://" in text:
        raise UnsupportedError(f"'{text}' is a URL; {way_out}")
    if "\0" in text:
        raise OptionError(f"{text!r} holds a NUL: no path can", option="path", value=text)
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise OptionError(
            f"{text!r} holds {text[error.start]!r}, which the file system's encoding "
            f"({error.encoding}) has not: no path can",
            option="path",
            value=text,
        ) from error
    return text


def metadata_file(reader: FileSystemReader, rank: int | None) -> str:
    """Returns the name of the metadata file, relative to the checkpoint's directory.

    Raises:
        UnsupportedError: an overridden `_get_metadata_path` leads outside of it.
    """
    given, directory = Path(reader._get_metadata_path(rank)), Path(reader.path)
    if given.is_relative_to(directory):
        name = given.relative_to(directory)
        if name.parts and ".." not in name.parts:
            return str(name)
    raise UnsupportedError(
        f"{type(reader).__name__} overrides `_get_metadata_path` with '{given}', which is not "
        f"beneath '{directory}'"
    )


def refuse_other_metadata_file(writer: FileSystemWriter, rank: int | None) -> None:
    """Raises UnsupportedError when `_get_metadata_path` is overridden to give another name.

    By the names of metadata files a save knows which data files it may remove.
    """
    given, stock = Path(writer._get_metadata_path(rank)), Path(writer.path) / metadata_name(rank)
    if given != stock:
        raise UnsupportedError(
            f"{type(writer).__name__} overrides `_get_metadata_path` with '{given}'; DcpxWriter "
            f"commits by '{stock.name}' alone"
        )


def _caller() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


def _here() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109
    except OSError:  # the directory is gone: so says whoever makes the path
        return None


def absolute(path: str | os.PathLike[str]) -> str:
    """Returns a path from the root on; as it is where it is relative to a directory that is gone.

    Links and ".." stay: what they mean is the file system's to say.
    """
    text = os.fspath(path)
    return text if os.path.isabs(text) else os.path.join(_here() or "", text)  # noqa: PTH117,PTH118


class PathAnchor:
    """The directory that a writer's relative path means, also after a `chdir` of the process.

    The path counts from the current directory of the thread that made the writer, at each call in
    which that thread makes, resets, stages or saves through it. Another thread or process saves
    what it was given, and the path keeps its meaning there. That holds as well for a path that the
    other thread names itself, as `dcp.async_save` does with its `checkpoint_id`: it counts from
    where the state was staged. Not thread-safe; picklable with its writer.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._base: str | None = None
        self._seen_by = (0, 0)
        self._staged: tuple[tuple[int, int], str | None] | None = None  # by whom, and where

    def see(self, path: Path) -> Path:
        """Notes where a call of the writer is made from. Returns the directory of `path`."""
        caller = _caller()
        staged = None
        if self._staged is not None and self._staged[0] != caller:
            staged, self._staged = self._staged, None
        if not path.is_absolute() and (path != self._path or caller == self._seen_by):
            self._path = path
            self._seen_by, self._base = staged or (caller, _here())
        return self.directory(path)

    def stage(self, path: Path) -> None:
        """Like `see`, and what another thread or process sees next is meant from here, too."""
        self.see(path)
        self._staged = _caller(), _here()

    def directory(self, path: Path) -> Path:
        """Returns the directory of `path`, absolute where that was seen."""
        return path if self._base is None or path != self._path else Path(self._base, path)

    @contextmanager
    def applied(self, owner: Any) -> Iterator[None]:
        """Lets `owner.path` be the directory: stock's hooks then look where ours do."""
        given = owner.path
        owner.path = self.directory(Path(given))
        try:
            yield
        finally:
            owner.path = given
