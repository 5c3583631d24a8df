"""Filters of system calls (seccomp), as containers have them: a call fails with an errno instead of
being made. For a child process: nothing takes a filter off again."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import struct
from collections.abc import Sequence
from typing import NamedTuple

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD_WORD, _IF_EQUAL, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARGUMENTS_AT = 0, 16  # of struct seccomp_data
_COLUMN = {"x86_64": 0, "aarch64": 1}[platform.machine()]

# x86-64, aarch64
NUMBERS = {
    "fallocate": (285, 47),
    "flock": (73, 32),
    "sync_file_range": (277, 84),
    "statx": (332, 291),
    "io_uring_setup": (425, 425),
    "openat": (257, 56),
    "openat2": (437, 437),
    "fcntl": (72, 25),
    "cachestat": (451, 451),
    "mincore": (27, 232),
    "preadv2": (327, 286),
    "pwritev2": (328, 287),
    "madvise": (28, 233),
    "mbind": (237, 235),
    "ioctl": (16, 29),
    "sched_getaffinity": (204, 123),
    "getcpu": (309, 168),
    "copy_file_range": (326, 285),
}


class Refused(NamedTuple):
    """One call, or those of them with some bit set in an argument, and another one's value."""

    call: str
    argument: int = 0
    bits: int = 0  # 0: whatever the arguments
    command: int | None = None  # value of the second argument

    def instructions(self, action: int) -> list[bytes]:
        lines = []
        if self.bits:
            lines += [_line(_LOAD_WORD, _ARGUMENTS_AT + 8 * self.argument)]
            lines += [_line(_IF_ANY_BIT, self.bits, 0, 1), _line(_RETURN, action)]
            lines += [_line(_RETURN, _ALLOW)]
        else:
            lines += [_line(_RETURN, action)]
        if self.command is not None:
            load = _line(_LOAD_WORD, _ARGUMENTS_AT + 8)
            lines = [load, _line(_IF_EQUAL, self.command, 1, 0), _line(_RETURN, _ALLOW), *lines]
        return [_line(_IF_EQUAL, NUMBERS[self.call][_COLUMN], 0, len(lines)), *lines]


# O_DIRECT, wherever it can be asked for: at an open, and afterwards.
DIRECT_IO = [
    Refused("openat", 2, os.O_DIRECT),
    Refused("fcntl", 2, os.O_DIRECT, command=fcntl.F_SETFL),
]


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_void_p))


def refuse(calls: Sequence[Refused], number: int) -> None:
    """From now on `calls` of this thread, and of those that it starts, fail with errno `number`."""
    lines = [_line(_LOAD_WORD, _NUMBER_AT)]
    for call in calls:
        lines += call.instructions(_ERRNO | number)
    lines.append(_line(_RETURN, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(lines))
    program = _Program(len(lines), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
