"""Runs one stage of on_gpu.sh: streams what it prints, ends it at its limit with all it started.

A stage is a command. Of what it prints, three kinds of lines mean something:

    FIGURES {"name": ...}   figures, kept from the moment they are printed
    CANNOT why              with exit status 77: it cannot run here, which is no failure
    REASON why              what a failure is about, where the last line does not say it
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

OK, FAILED, TIMED_OUT, CANNOT = "ok", "failed", "timed out", "cannot"
CANNOT_EXIT = 77
LOG_BYTES = 1 << 20  # of one stage: its first words and its last
_GRACE_S = 3.0  # between SIGABRT, on which Python prints every stack, and SIGKILL
_KILL_S = 2.0  # for a stage to be gone, and again for what it leaves behind
_DRAIN_S = 1.0  # for what is in the pipe once the stage has ended
OVERTIME_S = _GRACE_S + 2 * _KILL_S + _DRAIN_S  # what a stage may take beyond its limit
_REASON_CHARACTERS = 300
_PDEATHSIG, _SUBREAPER = 1, 36  # of prctl
_LIBC = ctypes.CDLL(None, use_errno=True)


class Result(NamedTuple):
    """What a stage came to.

    Attributes:
        exit: its exit status, negative: the signal; None: it did not start.
    """

    stage: str
    outcome: str
    seconds: float
    exit: int | None
    reason: str
    figures: dict[str, Any]

    def as_json(self, *, is_short: bool = False) -> str:
        """Returns one line; a short one has no tables."""
        kept = {k: v for k, v in self.figures.items() if not (is_short and is_table(v))}
        return json.dumps({**self._asdict(), "figures": kept})


def is_table(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"columns", "rows"}


def adopt_orphans() -> None:
    """Makes this process the parent of what a stage leaves behind, so that it can be found."""
    _LIBC.prctl(_SUBREAPER, 1, 0, 0, 0)


def _die_with_parent() -> None:
    """Ends a stage where this process is killed, so that none keeps the GPU."""
    _LIBC.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Stop:
    """Whether somebody asked the whole run to end: a signal's number, or 0."""

    def __init__(self) -> None:
        self.signal = 0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, number: int, _: object) -> None:
        self.signal = self.signal or number


class Log:
    """A file that takes what it can: once a write fails, it says so on stdout and is silent."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self.is_lost = False
        try:
            self._file = path.open("wb", buffering=0)  # type: ignore[assignment]
        except OSError as error:
            self._lose(error)

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while self._file is not None and view:
            try:
                view = view[self._file.write(view) :]
            except OSError as error:
                self._lose(error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _lose(self, error: OSError) -> None:
        self.is_lost = True
        say(f"on_gpu: {self._path.name} is not written any more: {error.strerror}")
        self.close()


def say(text: str) -> None:
    """Prints a line at once; a reader of stdout who went away ends nothing."""
    with contextlib.suppress(OSError):
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


class _Output:
    """Puts into the log what a stage prints first, and at its end what it printed last."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._room = LOG_BYTES // 2
        self._tail = b""
        self._lost = 0

    def write(self, data: bytes) -> None:
        self._log.write(data[: self._room])
        kept = self._tail + data[self._room :]
        self._room = max(self._room - len(data), 0)
        self._lost += max(len(kept) - LOG_BYTES // 2, 0)
        self._tail = kept[-LOG_BYTES // 2 :]

    def end(self) -> None:
        left_out = f"\n[{self._lost} B are left out]\n" if self._lost else ""
        self._log.write(left_out.encode() + self._tail)


class _Lines:
    """What a stage's lines mean."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}
        self.cannot = self.reason = self.last = ""
        self._rest = b""
        self._has_crashed = False

    def take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-(1 << 20) :]
        for line in lines:
            self._line(line.decode(errors="replace").strip())

    def end(self) -> None:
        self.take(b"\n")

    def _line(self, line: str) -> None:
        kind, _, rest = line.partition(" ")
        if kind == "FIGURES":
            try:
                self.figures.update(json.loads(rest))
            except ValueError:
                self.reason = f"a line of figures is torn: {rest[:80]}"
        elif kind == "CANNOT":
            self.cannot = rest
        elif kind == "REASON":
            self.reason = rest
        elif line.startswith("Fatal Python error"):  # stacks follow: the log has them
            self._has_crashed = True
        elif line and not self._has_crashed:
            self.last = line


def run_stage(
    name: str,
    command: Sequence[str],
    limit_s: float,
    log: Log,
    stop: Stop,
    environment: Mapping[str, str] | None = None,
) -> Result:
    """Runs a command in a process group of its own for `limit_s` seconds at most.

    Nothing of it is left when this returns: its group and every orphan of it is killed.
    """
    began = time.monotonic()
    lines, output = _Lines(), _Output(log)
    log.write(f"==== {name}\n".encode())
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509  # there are no threads
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
            | dict(environment or {}),
        )
    except OSError as error:
        return Result(name, FAILED, 0.0, None, f"{command[0]}: {error.strerror}", {})
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    os.set_blocking(pipe, False)

    def take() -> bool:
        """Takes some of what is there. Returns whether more may come."""
        data = _read(pipe)
        if data:
            output.write(data)
            lines.take(data)
        return data is not None

    give_up_at, is_late = began + limit_s, False
    while process.poll() is None and not stop.signal:
        left = give_up_at - time.monotonic()
        if left <= 0:
            is_late = True
            break
        if _wait(pipe, min(left, 0.1)):
            take()
    if process.poll() is None:
        _end(process, take)
    _kill_orphans()
    give_up_at = time.monotonic() + _DRAIN_S
    while take() and time.monotonic() < give_up_at:
        _wait(pipe, 0.05)
    process.stdout.close()
    lines.end()
    output.end()
    seconds = round(time.monotonic() - began, 2)
    outcome, reason = _judge(process.returncode, is_late, limit_s, stop, lines)
    return Result(
        name, outcome, seconds, process.returncode, reason[:_REASON_CHARACTERS], lines.figures
    )


def _judge(
    status: int, is_late: bool, limit_s: float, stop: Stop, lines: _Lines
) -> tuple[str, str]:
    """Returns the outcome and what it is about."""
    last = lines.reason or lines.last
    if stop.signal:
        return FAILED, f"the run was ended by {signal.Signals(stop.signal).name}"
    if is_late:
        return TIMED_OUT, f"killed after {limit_s:.0f} s; last line: {last}"
    if status == 0:
        return OK, lines.reason
    if status == CANNOT_EXIT:
        return CANNOT, lines.cannot or last
    if status < 0:
        return FAILED, f"{signal.Signals(-status).name}; last line: {last}"
    return FAILED, last


def _wait(pipe: int, seconds: float) -> bool:
    """Returns whether there is something to read, or the pipe's end; sleeps where that is all."""
    ready, _, _ = select.select([pipe], [], [], seconds)
    if not ready:
        return False
    if seconds:
        time.sleep(0.005)  # a pipe that has ended is ready for ever
    return True


def _read(pipe: int) -> bytes | None:
    """Returns what there is; None at the end of the pipe, b'' where there is nothing now."""
    try:
        return os.read(pipe, 1 << 16) or None
    except BlockingIOError:
        return b""


def _end(process: subprocess.Popen[bytes], take: Callable[[], bool]) -> None:
    """Lets the stage say where it hangs, then kills its group."""
    for number, seconds in ((signal.SIGABRT, _GRACE_S), (signal.SIGKILL, _KILL_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        give_up_at = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < give_up_at:
            take()
            time.sleep(0.02)
        if process.poll() is not None:
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.poll() is None:  # in the kernel, as a driver that hangs: it cannot be waited for
        process.returncode = -signal.SIGKILL


def _kill_orphans() -> None:
    """Kills every process that a stage has left, whatever group it has moved to."""
    give_up_at = time.monotonic() + _KILL_S
    while time.monotonic() < give_up_at:
        left = _children()
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _children() -> list[int]:
    """Returns the processes whose parent this is, and those that lie below them."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            text = Path(f"/proc/{name}/stat").read_text()
            parents[int(name)] = int(text.rpartition(")")[2].split()[1])
    found: list[int] = []
    wanted = {os.getpid()}
    while wanted:
        below = {pid for pid, parent in parents.items() if parent in wanted}
        found += below
        wanted = below
    return found
