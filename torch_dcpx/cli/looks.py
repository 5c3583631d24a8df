"""A first look at a path: is it there, and of a kind that the command takes. Imports no torch."""

from __future__ import annotations

import errno
from pathlib import Path

from torch_dcpx._answered_os import os
from torch_dcpx.errors import StorageError
from torch_dcpx.reader.hints import absent, command, linked
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.names import (
    ARTIFACT_SUFFIXES,
    is_artifact_name,
    is_data_file_name,
    is_metadata_name,
)
from torch_dcpx.storage.object_url import Location


def look(path: Location, *, takes_files: bool) -> None:
    """Raises StorageError where a path is no directory, nor a file that the command takes.

    Of a URL it asks nothing: what is there is the command's first request.
    """
    if not isinstance(path, Path):
        return
    if os.path.isfile(path):
        wrong = _wrong_file(path, takes_files=takes_files)
        if wrong:
            raise StorageError(wrong, errno=errno.ENOTDIR, path=str(path))
        return
    try:
        Directory(path).close()
    except StorageError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        why = absent(path)
        if os.path.islink(path):
            why = f"'{path}' is a link to '{os.readlink(path)}', which is not there"
        raise StorageError(why, errno=error.errno, path=str(path)) from error


def _wrong_file(path: Path, *, takes_files: bool) -> str:
    """Returns why a command does not take a file; "" if it does."""
    if is_data_file_name(path.name) or is_metadata_name(path.name):
        return absent(path)
    if not is_artifact_name(path.name):
        suffixes = f"{', '.join(ARTIFACT_SUFFIXES[:-1])} or {ARTIFACT_SUFFIXES[-1]}"
        return (
            f"'{path}' is a file, and no checkpoint, which is a directory; the name of an exported "
            f"file ends in {suffixes}"
        )
    if not takes_files:
        return (
            f"'{path}' is a file, no directory of checkpoints: {command('inspect', path)} shows it"
        )
    if os.path.islink(path):
        return linked(path)
    return ""
