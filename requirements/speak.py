"""Runs a command, and says what is under way whenever the command has been silent for 15 seconds.

    python requirements/speak.py [--after SECONDS] COMMAND [ARGUMENT ...]

What the command prints goes on at once and unchanged, on a terminal by a terminal of its own, so
that colours and bars stay. Its end is this program's end: exit status or signal. Nothing is said
after the command has ended. What is said comes from where it is known:

    compilers, linters    the last [17/69] that was printed, and the processes that run (/proc)
    pip                   how many packages are there, and how much was written
    pytest                the tests under way: tests/support/under_way.py notes them in a file

Needs nothing but Python, as the first thing it waits for is the installation of the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import termios
import time
import tty
from collections.abc import Iterable
from pathlib import Path

NOTES = "DCPX_UNDER_WAY"  # the file for pytest's notes
_FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1}
_SI_KERNEL = 0x80
_POLL_S = 0.2
_LEFT_BEHIND_S = 1.0  # for what children that outlive the command still print
_PIPE_BYTES = 1 << 16
_MAX_NAMES = 4
_SOURCES = (".cpp", ".cu", ".c", ".py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--after", type=float, default=15.0, help="seconds of silence (15)")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if not options.command:
        parser.error("no command")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGWINCH})
    with tempfile.NamedTemporaryFile(prefix="under_way.") as notes:
        status = Spoken(options.command, options.after, Path(notes.name), before).run()
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command's own is enough
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-status})
        os.kill(os.getpid(), -status)
    sys.exit(status)


class Channel:
    """One way of output: from the command to a descriptor of this process."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.is_terminal = os.isatty(target)
        if self.is_terminal:
            self.source, self.given = os.openpty()
            tty.setraw(self.given)  # what it prints is the real terminal's to translate
            self.fit()
        else:
            self.source, self.given = os.pipe()
        os.set_blocking(self.source, False)

    def fit(self) -> None:
        """Gives the command's terminal the size of the real one."""
        if self.is_terminal:
            size = fcntl.ioctl(self.target, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(self.source, termios.TIOCSWINSZ, size)

    def read(self) -> bytes | None:
        """Returns what is there to read, None for nothing yet, b"" at the end."""
        try:
            return os.read(self.source, 1 << 16)
        except BlockingIOError:
            return None
        except OSError:  # EIO of a terminal that nobody has open any more
            return b""

    def close(self) -> None:
        os.close(self.source)


class Spoken:
    """A command that runs, and what is known of it."""

    def __init__(
        self, command: list[str], after_s: float, notes: Path, signals: set[signal.Signals]
    ) -> None:
        self._after_s = after_s
        self._began = self._heard = self._spoke = time.monotonic()
        self._packages = _Packages(command) if "pip" in command else None
        self._tests = _Tests(notes)
        self._progress = b""
        self._is_line_open = False
        self._left_bytes = _PIPE_BYTES
        self._channels = _open_channels()
        given = {target: channel.given for target, channel in self._channels.items()}
        try:
            self._child = subprocess.Popen(
                command,
                stdout=given.get(1),
                stderr=given.get(2),
                env={**os.environ, NOTES: str(notes)},
                close_fds=False,  # of make's jobserver
                # There is one thread.
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, signals),  # noqa: PLW1509
            )
        except OSError as error:
            sys.stderr.write(f"{command[0]}: {error.strerror}\n")
            raise SystemExit(127 if isinstance(error, FileNotFoundError) else 126) from error
        for descriptor in set(given.values()):
            os.close(descriptor)

    def run(self) -> int:
        """Returns the command's exit status, the negative number of a signal."""
        waiting = {channel.source: channel for channel in self._channels.values()}
        ended_at: float | None = None
        while waiting or ended_at is None:
            poll_s = _POLL_S if waiting else _POLL_S / 10
            ready, _, _ = select.select(list(waiting), [], [], poll_s)
            for descriptor in ready:
                data = waiting[descriptor].read()
                self._left_bytes -= len(data or b"") if ended_at else 0
                if data == b"" or (data and not self._pass_on(waiting[descriptor], data)):
                    waiting.pop(descriptor).close()
            self._take_signals()
            now = time.monotonic()
            if ended_at is None:
                if self._child.poll() is not None:
                    ended_at = now
                elif now - max(self._heard, self._spoke) > self._after_s:
                    self._speak(now)
            elif now - ended_at > _LEFT_BEHIND_S and (not ready or self._left_bytes < 0):
                break
        return self._child.wait()

    def _pass_on(self, channel: Channel, data: bytes) -> bool:
        """Returns whether somebody reads it; where nobody does, the command is to notice."""
        self._heard = time.monotonic()
        if found := re.findall(rb"\[ *\d+/\d+\]", data):
            self._progress = found[-1]
        if self._packages is not None:
            self._packages.hear(data)
        self._is_line_open = not data.endswith(b"\n")
        return _write(channel.target, data)

    def _take_signals(self) -> None:
        """Those of the terminal have reached the command as well; it gets what came here alone."""
        while (found := signal.sigtimedwait({*_FORWARDED, signal.SIGWINCH}, 0)) is not None:
            if found.si_signo == signal.SIGWINCH:
                for channel in self._channels.values():
                    channel.fit()
            elif found.si_code != _SI_KERNEL and self._child.poll() is None:
                self._child.send_signal(found.si_signo)

    def _speak(self, now: float) -> None:
        self._spoke = now
        said = self._tests.so_far()
        if self._tests.is_over:
            return
        if not said:
            known = [self._progress.decode()]
            known += [self._packages.so_far(self._child.pid)] if self._packages else []
            known += [_listed((_named(w), age) for age, w in _running(self._child.pid) if w)]
            said = ", ".join(filter(None, known))
        start = "\n" if self._is_line_open else ""
        self._is_line_open = False
        target = min(self._channels, default=None)
        if target is not None:
            line = f"{start}-- {_span(now - self._began)}, waiting: {said}\n"
            if not _write(target, line.encode(errors="replace")):
                del self._channels[target]


def _open_channels() -> dict[int, Channel]:
    """Returns one channel for each open descriptor, one for both where both are the same file."""
    channels: dict[int, Channel] = {}
    for target in (1, 2):
        try:
            flags = fcntl.fcntl(target, fcntl.F_GETFD)
        except OSError:
            continue
        if flags & fcntl.FD_CLOEXEC:  # a file of this program: it was closed, as for the command
            continue
        same = 1 in channels and os.path.sameopenfile(1, target)
        channels[target] = channels[1] if target == 2 and same else Channel(target)
    return channels


def _write(target: int, data: bytes) -> bool:
    """Writes all of it, however slow the reader; returns False where nobody reads any more."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(target, left) :]
        except BlockingIOError:
            select.select([], [target], [], _POLL_S)
        except OSError:
            return False
    return True


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


# ---- What is known of processes -----------------------------------------------------------------


def _running(root: int) -> list[tuple[float, list[str]]]:
    """Returns the age in seconds and the words of each process below `root` that has no child."""
    parents: dict[int, int] = {}
    started: dict[int, float] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                pid = int(process.name)
                if fields[0] != "Z":
                    parents[pid] = int(fields[1])
                    started[pid] = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    below, grown = {root} & parents.keys(), True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in below} - below
        below |= more
        grown = bool(more)
    leaves = below - {parents[pid] for pid in below}
    now, found = time.clock_gettime(time.CLOCK_BOOTTIME), []
    for pid in leaves:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            found.append((now - started[pid], words[:-1]))
    return found


def _listed(running: Iterable[tuple[str, float]]) -> str:
    """Returns the names, the oldest first, and their ages; the first few."""
    oldest = sorted(running, key=lambda one: -one[1])
    names = [f"{name} ({_span(age)})" for name, age in oldest]
    more = [f"{len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else []
    return ", ".join([*names[:_MAX_NAMES], *more])


def _named(words: list[str]) -> str:
    """Returns the program and the source file or the module that it works on."""
    name = Path(words[0]).name
    for option, module in itertools.pairwise(words):
        if name.startswith("python") and re.fullmatch(r"-[IsSuE]*m", option):
            return f"{name} -m {module}"
    source = next((word for word in words[1:] if word.endswith(_SOURCES)), "")
    source = os.path.relpath(source) if source.startswith("/") else source
    return f"{name} {source}".rstrip()


class _Packages:
    """What pip has installed: it prints nothing while it does."""

    def __init__(self, command: list[str]) -> None:
        environment = Path(command[0]).parent.parent
        self._sites = list(environment.glob("lib/python3*/site-packages"))
        self._before = self._count()
        self._wanted = 0
        self._line = b""

    def _count(self) -> int:
        return sum(len(list(site.glob("*.dist-info"))) for site in self._sites)

    def hear(self, data: bytes) -> None:
        lines = (self._line + data).split(b"\n")
        self._line = lines[-1][-100_000:]
        for line in lines:
            if line.startswith(b"Installing collected packages:"):
                self._wanted = line.count(b",") + 1
                self._before = self._count()

    def so_far(self, pid: int) -> str:
        known = []
        if self._wanted:
            known.append(f"installed {self._count() - self._before} of {self._wanted} packages")
        with contextlib.suppress(OSError):  # /proc of some containers has none
            counts = dict(line.split(": ") for line in _lines(f"/proc/{pid}/io"))
            known.append(f"wrote {int(counts['wchar']) >> 20} MiB")
        return ", ".join(known)


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


class _Tests:
    """The tests under way, from the notes of tests/support/under_way.py."""

    def __init__(self, notes: Path) -> None:
        self._notes = notes
        self._stage, self._total, self._done, self._at = "", 0, 0, 0
        self._running: dict[str, float] = {}
        self.is_over = False  # but for the closing line, which is to be the last

    def _read(self) -> None:
        with self._notes.open("rb") as file:
            file.seek(self._at)
            lines = file.read().rpartition(b"\n")[0]
            self._at += len(lines) + bool(lines)
        for line in lines.decode(errors="replace").splitlines():
            kind, at, text = line.split(" ", 2)
            if kind == "stage":
                self._stage = text
            elif kind == "over":
                self.is_over = True
            elif kind == "total":
                self._total, self._stage = int(text), ""
            elif kind == "start":
                self._running[text] = float(at)
            elif self._running.pop(text, None) is not None:
                self._done += 1

    def so_far(self) -> str:
        self._read()
        if self._stage or not self._total:
            return self._stage
        now = time.monotonic()
        running = _listed((name, now - at) for name, at in self._running.items())
        return ", ".join(filter(None, [f"{self._done} of {self._total} tests done", running]))


if __name__ == "__main__":
    main()
