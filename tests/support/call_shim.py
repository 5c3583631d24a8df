"""`call_shim.c` compiled and preloaded: what befalls the n-th system call on a directory tree."""

from __future__ import annotations

import ctypes
import enum
import os
import subprocess
from pathlib import Path

from support.machine import seconds

import torch_dcpx

TESTS = Path(__file__).resolve().parents[1]
SOURCE = Path(__file__).with_name("call_shim.c")


class Action(enum.IntEnum):
    """What happens to the call that is due; the numbers are the C file's."""

    COUNT = 0  # nothing
    KILL = 1  # SIGKILL before it
    HALF_KILL = 2  # SIGKILL after half of the bytes that it moves
    FAIL = 3  # it fails with an errno
    SHORT = 4  # it moves half of its bytes
    POWER = 5  # the file system of the tree is shut down before it, then SIGKILL
    DROP = 6  # it says that it succeeded, and was not made
    HOLD = 7  # it never returns


class Kind(enum.IntFlag):
    """Which calls are counted."""

    CHANGES = 1
    READS = 2
    DIR_FSYNC = 4
    FILE_FSYNC = 8
    WRITES = 16
    MOVES = 32
    ALL = CHANGES | READS


def compiled(folder: Path) -> Path:
    """The shim as a library in `folder`: by what the extension was built with."""
    library = folder / "libcallshim.so"
    subprocess.run(
        ["c++", "-x", "c", "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"],
        check=True, timeout=seconds(120),
    )  # fmt: skip
    return library


def preloaded(library: Path) -> dict[str, str]:
    """The environment of a process that runs behind the shim and finds what the tests share."""
    preload = f"{os.environ.get('LD_PRELOAD', '')} {library}".strip()
    root = Path(torch_dcpx.__file__).parents[1]
    path = f"{TESTS}:{TESTS / 'faults'}:{root}"
    return {**os.environ, "LD_PRELOAD": preload, "PYTHONPATH": path}


class Shim:
    """The shim from within a preloaded process."""

    def __init__(self, library: str | Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.shim_name.restype = ctypes.c_char_p
        self._library.shim_target.restype = ctypes.c_char_p

    def watch(self, tree: str | Path) -> None:
        """Count calls on paths and descriptors beneath `tree` (absolute, without links) alone."""
        self._library.shim_watch(os.fsencode(tree))

    def arm(
        self,
        nth: int,
        action: Action,
        value: int = 0,
        kinds: Kind = Kind.CHANGES,
        *,
        lasting: bool = False,
    ) -> None:
        """From now on, do `action` to the `nth` call (from 0) of `kinds`, or to each from it on.

        Args:
            value: FAIL: the errno; POWER: 1 to flush the journal first, 2 not to.
        """
        self._library.shim_arm(ctypes.c_long(nth), action, value, kinds, lasting)

    def disarm(self) -> None:
        self._library.shim_disarm()

    def drop(self, nth: int, kinds: Kind) -> None:
        """Besides what `arm` has in mind, leave out the `nth` call (from 0) of `kinds`."""
        self._library.shim_drop(ctypes.c_long(nth), kinds)

    def names(self) -> list[str]:
        """The calls since `arm`, in order."""
        seen = self._library.shim_seen()
        return [self._library.shim_name(ctypes.c_long(n)).decode() for n in range(seen)]

    def calls(self) -> list[tuple[str, str]]:
        """The calls since `arm`: name, and the path that it was on, from the tree on."""
        target = self._library.shim_target
        return [(name, target(ctypes.c_long(n)).decode()) for n, name in enumerate(self.names())]
