"""The one rule for names that are taken, of exports, traces and pages, in Python and in commands.

No file that is there is replaced unasked, and then only one of the same kind; also where another
process makes one meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch_dcpx._answered_os import answered_at, os, path_of
from torch_dcpx._descriptors import open_file, opener
from torch_dcpx.errors import OptionError

HOW_TO_REPLACE = "name another file, or replace it by --overwrite, in Python overwrite=True"
_AT_FDCWD = -100
_NO_REPLACE, _EXCHANGE = 1, 2  # of renameat2
_HAS_NO_SUCH_RENAME = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def taken(path: object, option: str = "path") -> OptionError:
    """Returns the error of a name that something has, and whose replacement nobody asked for."""
    return OptionError(f"'{path}' is there; {HOW_TO_REPLACE}", option=option, value=str(path))


class Replacing(NamedTuple):
    """Says what may be replaced."""

    is_asked: bool  # for at all
    is_same: Callable[[Path], bool]  # whether a file is of the kind that is written
    kind: str  # in words
    option: str = "path"  # that names the file

    def check(self, path: Path) -> None:
        """Raises OptionError where something has the name that may not be replaced."""
        if not os.path.lexists(path):
            return
        if not self.is_asked:
            raise taken(path, self.option)
        if not path.is_file() or not self.is_same(path):
            way = f"name another file: it is no {self.kind}, and --overwrite replaces nothing else"
            raise OptionError(f"'{path}' is there; {way}", option=self.option, value=str(path))

    def move(self, old: Path, new: Path) -> None:
        """Renames to a name that nothing has, or of what may go. Raises: OptionError, OSError."""
        self.check(new)
        if self.is_asked:
            os.replace(old, new)
            return
        try:
            move_new(old, new)
        except FileExistsError:
            self.check(new)
            raise

    def put(self, path: Path, content: bytes) -> None:
        """Writes a file, whole or not at all; into a device or a pipe as it is; a link leads to the
        file that is meant. Raises: OptionError, OSError.
        """
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            with open(path, "wb", opener=opener) as file:
                file.write(content)  # a rename to /dev/null would put a file in its place
            return
        path = path_of(os.path.realpath(path))
        self.check(path)
        # Neither by the name, which may fill 255 bytes, nor by the pid, which containers share.
        beside = path.with_name(f".dcpx.{os.urandom(8).hex()}.tmp")
        with open(beside, "xb", opener=opener) as file:  # a new file, behind no link
            try:
                file.write(content)
                file.close()
                self.move(beside, path)
            except BaseException:
                beside.unlink(missing_ok=True)  # the error that counts is this one
                raise


def move_new(old: Path, new: Path) -> None:
    """Renames to a name that nothing has. Raises: OSError, FileExistsError where something has."""
    try:
        rename_new(old, new)
    except OSError as error:
        if error.errno not in _HAS_NO_SUCH_RENAME:
            raise
        os.close(open_file(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))  # claims it
        os.replace(old, new)


def exchange(one: Path, other: Path) -> None:
    """Gives each of two names what the other has, at once. Raises: OSError."""
    _renameat2(one, other, _EXCHANGE)


def rename_new(old: Path, new: Path) -> None:
    """Renames to a name that nothing has. Raises: OSError, also where no such rename is known."""
    _renameat2(old, new, _NO_REPLACE)


def _renameat2(old: Path, new: Path, flags: int) -> None:
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # musl has none
    names = os.fsencode(old), os.fsencode(new)

    def rename() -> None:
        while call is None or call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], flags) != 0:
            number = errno.ENOSYS if call is None else ctypes.get_errno()
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number), str(old), None, str(new))

    answered_at(new, f"rename '{old}' to", rename)
