"""What `hostile/driver` sees of a child: audit events, memory, changed state, files outside."""

from __future__ import annotations

import argparse
import builtins
import collections
import contextlib
import ctypes
import os
import pickle
import stat
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# Events that no load, and no save of ours, may raise.
FORBIDDEN = (
    "builtins.input", "code.__new__", "compile", "ctypes.", "exec", "ftplib.", "function.__new__",
    "http.", "import", "marshal.", "os.chmod", "os.chown", "os.exec", "os.fork", "os.kill",
    "os.link", "os.posix_spawn", "os.putenv", "os.spawn", "os.startfile", "os.symlink",
    "os.system", "os.unsetenv", "pdb.", "pickle.find_class", "pty.", "shutil.",
    "signal.pthread_kill", "smtplib.", "socket.bind", "socket.connect", "subprocess.",
    "sys.addaudithook", "sys.setprofile", "sys.settrace", "tempfile.", "urllib.", "webbrowser.",
)  # fmt: skip
OPENED = ("open", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate")

_events: list[str] | None = None
_sources: frozenset[str] = frozenset()  # of imported modules: tracebacks quote them
_inside = ""


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _events is None:
        return
    if event.startswith(FORBIDDEN):
        if event == "import" and args[0] in sys.modules:
            return
        if event == "pickle.find_class" and (
            args[0] == "torch_dcpx.errors" or args == ("builtins", "AssertionError")
        ):
            return  # what one rank's error is to another: made by us, not by the file
        if event == "compile" and args[1] == "<unknown>":
            return  # `ast.parse`, by which tracebacks find their carets; to run it would be "exec"
        _events.append(f"{event}{args!r:.120}")
    elif event in OPENED and args and isinstance(args[0], str):
        path = args[0]
        # A bare name is of an open directory.
        is_ours = path.startswith((_inside, "/proc/", "/sys/")) or path in _sources
        if "/" in path and not is_ours:
            _events.append(f"{event} {path!r:.120}")


def install() -> None:
    """For good: an audit hook cannot be taken away."""
    global _sources
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    _sources = frozenset(file for file in files if file)
    sys.addaudithook(_hook)
    remember_state()


def begin_events(inside: Path) -> None:
    """From now on events count; files beneath `inside` may be opened."""
    global _events, _inside
    _events, _inside = [], str(inside)


def end_events() -> list[str]:
    global _events
    found, _events = _events or [], None
    return found


# ---- Memory -------------------------------------------------------------------------------------


def status_bytes(field: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def begin_peak() -> int:
    """Returns the resident memory, from which the peak grows."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return status_bytes("VmRSS")


def peak() -> int:
    return status_bytes("VmHWM")


# ---- The process --------------------------------------------------------------------------------

_state: dict[str, Any] = {}


def _now() -> dict[str, Any]:
    watched = (argparse.Namespace, collections.OrderedDict, torch.Size, pickle.Unpickler, os)
    return {
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "random state": bytes(torch.get_rng_state().numpy().tobytes()),
        "safe globals": len(torch.serialization.get_safe_globals()),
        "gradients": torch.is_grad_enabled(),
        "default device": str(torch.get_default_device()),
        "directory": os.getcwd(),
        "environment": dict(os.environ),
        "path": list(sys.path),
        "builtins": {name: id(value) for name, value in vars(builtins).items() if name != "_"},
        "classes": [{name: id(value) for name, value in vars(one).items()} for one in watched],
    }


def remember_state() -> None:
    _state.update(_now())


def changed_state() -> str:
    """Returns what a payload has changed, or ""."""
    now = _now()
    return ", ".join(name for name, value in now.items() if value != _state[name])


# ---- Outside ------------------------------------------------------------------------------------


def make_outside(root: Path, saved: Callable[[Any], bytes]) -> Path:
    """What a case must not reach: a secret, and a data file that could be read."""
    outside = root / "outside"
    outside.mkdir(parents=True)
    (outside / "secret").write_bytes(b"a secret of somebody else's\n")
    (outside / "__0_0.distcp").write_bytes(saved(torch.zeros(3000)) + saved([0, "no", 0.0]))
    (outside / "secret").chmod(0o644)
    return outside


class Outside:
    """Watches a directory: who opens a file by its name here, and what changes."""

    ACCESS, MODIFY, OPEN, MOVED, CREATE, DELETE, ATTRIB = 1, 2, 0x20, 0xC0, 0x100, 0x200, 4
    ISDIR = 0x40000000

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before: Any = None
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> Outside:
        self._before = self._look()  # opens the files itself: so the watch begins behind it
        mask = self.ACCESS | self.MODIFY | self.OPEN | self.MOVED | self.CREATE | self.DELETE
        watched = self._libc.inotify_add_watch(self._fd, os.fsencode(self._path), mask)
        if self._fd < 0 or watched < 0:
            raise OSError(ctypes.get_errno(), "inotify")
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def _look(self) -> Any:
        return {
            path.name: (path.lstat().st_mode, path.lstat().st_size, path.read_bytes())
            for path in self._path.iterdir()
            if path.is_file()
        } | {path.name: None for path in self._path.iterdir() if not path.is_file()}

    def reached(self) -> str:
        """Returns what has been opened or changed here since the last look, or ""."""
        names = set()
        try:
            data = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            data = b""
        while data:
            _, mask, _, nbytes = struct.unpack_from("iIII", data)
            if not mask & self.ISDIR:
                names.add(data[16 : 16 + nbytes].rstrip(b"\0").decode())
            data = data[16 + nbytes :]
        now = self._look()
        changed = sorted(n for n in {*now, *self._before} if now.get(n) != self._before.get(n))
        self._before = now
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 1 << 16)  # our own look
        found = [f"opened {name}" for name in sorted(names)]
        return ", ".join(found + [f"changed {name}" for name in changed])


# ---- What a save may remove ---------------------------------------------------------------------


def bystanders(ckpt: Path) -> dict[str, Any]:
    """What is in a checkpoint and of no save: files of other names, and what is no file."""
    found: dict[str, Any] = {}
    for path in sorted(ckpt.rglob("*")):
        name, status = str(path.relative_to(ckpt)), path.lstat()
        is_file = stat.S_ISREG(status.st_mode)
        if is_file and not name.startswith(("__", ".metadata", ".dcpx")):
            found[name] = status.st_mode, path.read_bytes() if status.st_size < 1 << 20 else b""
        elif not is_file and name != ".metadata":
            found[name] = stat.S_IFMT(status.st_mode), status.st_ino
    return found


def removed(ckpt: Path, before: dict[str, Any]) -> str:
    """Returns which of these are not there any more, or are others, or ""."""
    now = bystanders(ckpt)
    return ", ".join(name for name, was in before.items() if now.get(name) != was)
