"""Resolves the paths of checkpoints as users give them, and the directory of a relative one."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch_dcpx._arguments import check_type
from torch_dcpx._text import shown_url
from torch_dcpx.errors import OptionError, UnsupportedError, must_be
from torch_dcpx.storage.names import metadata_name
from torch_dcpx.storage.object_services import import_obstore
from torch_dcpx.storage.object_url import Location, ObjectUrl, check_url, is_url, location_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

# Of a drive, or a name with a number behind it, somebody may have a directory.
_SQUEEZED = re.compile(r"(?:s3|s3a|az|abfss?|gs|gcs|hdfs|https?|hf|oci|r2|wasbs?):/", re.I)

AnyPath: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]


def checked_path(path: AnyPath, way_out: str, name: str = "path") -> str:
    """Returns a path as text, by `os.fsdecode`.

    Args:
        way_out: ends the message for a URL.
        name: of the argument.

    Raises:
        UnsupportedError: it is a URL.
        OptionError: it is no path, or an empty one; it begins with "~", which no system call knows,
            or like "s3:/", as pathlib writes a URL; it holds a NUL, or a character that the file
            system's encoding lacks.
    """
    check_type(name, path, (str, bytes, os.PathLike), "a path")
    try:
        text = os.fsdecode(path)
    except TypeError as error:  # of an `__fspath__`
        raise must_be(name, path, "a path", f": {error}") from error
    if not text:
        raise _no_path(name, text, "is empty; '.' is the current directory")
    if "://" in text:
        raise UnsupportedError(f"{name}={shown_url(text)!r} is a URL; {way_out}")
    squeezed = _SQUEEZED.match(text)
    if squeezed:  # the rest may hold a password
        why = f"is a URL of one slash, as pathlib makes it: give a str, '{squeezed[0]}/...'"
        raise _no_path(name, f"{squeezed[0]}...", f"{why}; './{squeezed[0]}...' is a directory")
    if text.startswith("~"):
        whole = os.path.expanduser(text)  # noqa: PTH111 - a text
        way = f"write {whole!r}" if whole != text else "there is no such user here"
        why = f"begins with '~', which only a shell expands: {way}; {'./' + text!r} is a name"
        raise _no_path(name, text, f"{why} like any other")
    if "\0" in text:
        raise _no_path(name, text, "holds a NUL: no path can")
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        what = f"holds {text[error.start]!r}, which the file system's encoding ({error.encoding})"
        raise _no_path(name, text, f"{what} has not: no path can") from error
    return text


def checked_location(path: AnyPath, way_out: str, name: str = "path") -> str:
    """Returns a path as `checked_path` does, or an `s3://` or `az://` URL.

    Raises as `checked_path`, for other URLs too, and as `check_url`; UnsupportedError: obstore,
    which speaks to the store, is not installed.
    """
    check_type(name, path, (str, bytes, os.PathLike), "a path")
    text = str(path) if isinstance(path, ObjectUrl) else path
    if isinstance(text, str) and is_url(text):
        check_url(text, name)
        import_obstore()
        return text.rstrip("/")
    return checked_path(path, way_out, name)


def _no_path(name: str, text: str, why: str) -> OptionError:
    return OptionError(f"{name}={text!r} {why}", option=name, value=text)


def own_path(path: AnyPath) -> str:
    """Returns a writer's or reader's path as a text that `checked_path` takes: as a Path, "./~"
    has lost its dot.
    """
    text = os.fsdecode(path)
    return f"./{text}" if text.startswith("~") else text


def metadata_file(reader: FileSystemReader, rank: int | None) -> str:
    """Returns the name of the metadata file, relative to the checkpoint's directory.

    Raises UnsupportedError if an overridden `_get_metadata_path` leads outside of it.
    """
    given, directory = location_of(reader._get_metadata_path(rank)), location_of(reader.path)
    if given.is_relative_to(directory):
        name = given.relative_to(directory)  # type: ignore[arg-type]
        if name.parts and ".." not in name.parts:
            return str(name)
    raise UnsupportedError(
        f"{type(reader).__name__} overrides `_get_metadata_path` with '{given}', which is not "
        f"beneath '{directory}'"
    )


def refuse_other_metadata_file(writer: FileSystemWriter, rank: int | None) -> None:
    """Raises UnsupportedError if an overridden `_get_metadata_path` gives another name.

    A save knows by the names of metadata files which data files it may remove.
    """
    given = location_of(writer._get_metadata_path(rank))
    stock = location_of(writer.path) / metadata_name(rank)
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
    except OSError:  # the directory is gone: the call that makes the path says so
        return None


def absolute(path: str | os.PathLike[str]) -> str:
    """Returns a path from the root on; as it is where the current directory is gone, and a URL.

    Links and ".." stay: the file system resolves them.
    """
    text = os.fspath(path)
    if os.path.isabs(text) or is_url(text):  # noqa: PTH117
        return text
    return os.path.join(_here() or "", text)  # noqa: PTH118


def absolute_text(path: str | os.PathLike[str]) -> str:
    """Returns a path or URL as all ranks may name it, without links followed."""
    return os.fspath(path) if is_url(path) else os.path.abspath(path)  # noqa: PTH100


class PathAnchor:
    """The directory that a writer's relative path means, also after a `chdir` of the process.

    The path counts from the current directory at the last call in which the writer's own thread
    made, reset, staged or saved through it. Another thread or process that saves keeps that
    meaning, also of a path that it names itself, as `dcp.async_save` does with its `checkpoint_id`:
    that counts from where the state was staged. Not thread-safe; picklable with its writer.
    """

    def __init__(self) -> None:
        self._path: Location | None = None
        self._base: str | None = None
        self._seen_by = (0, 0)
        self._staged: tuple[tuple[int, int], str | None] | None = None  # by whom, and where

    def see(self, path: Location) -> Location:
        """Notes where the caller of the writer is. Returns the directory of `path`."""
        caller = _caller()
        staged = None
        if self._staged is not None and self._staged[0] != caller:
            staged, self._staged = self._staged, None
        if not path.is_absolute() and (path != self._path or caller == self._seen_by):
            self._path = path
            self._seen_by, self._base = staged or (caller, _here())
        return self.directory(path)

    def stage(self, path: Location) -> None:
        """As `see`; the next path that another thread or process sees counts from here, too."""
        self.see(path)
        self._staged = _caller(), _here()

    def directory(self, path: Location) -> Location:
        """Returns the directory of `path`, absolute if `see` has noted it."""
        if self._base is None or path != self._path or isinstance(path, ObjectUrl):
            return path
        return Path(self._base, path)

    @contextmanager
    def applied(self, owner: Any) -> Iterator[None]:
        """Sets `owner.path` to the directory in the block: stock's hooks look where ours do."""
        given = owner.path
        owner.path = self.directory(location_of(given))
        try:
            yield
        finally:
            owner.path = given
