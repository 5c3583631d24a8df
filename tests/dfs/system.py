"""A file system that is started for tests: its clients' mounts, and its parts that can be lost."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.fuse_wire import unmount
from support.machine import seconds


class System:
    """One file system. Only one of a kind runs on a machine: ports and daemons are shared.

    Attributes:
        folder: where its servers keep their files, and its mounts are.
        mounts: one for each client; each shows the same directory.
        packages: of Debian, that it needs.
        parts: servers of it that `lose` can kill and `bring_back` starts again.
        loses_files: whether what lies on a lost part is missing until it is back.
        has_locks: whether a client sees the locks of another one.
        left_lock_s: seconds after which the lock of a killed client is free.
        late_s: seconds after which a client sees what another one did.
    """

    packages: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    clients = 2
    parts: tuple[str, ...] = ()
    loses_files = False
    has_locks = True
    late_s = 2.0
    left_lock_s = 1

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mounts = [folder / f"client{n}" for n in range(self.clients)]

    @contextlib.contextmanager
    def running(self) -> Iterator[System]:
        """Starts it, and ends all that it has started."""
        for program in self.programs:
            if shutil.which(program) is None:
                pytest.skip(f"{program} is missing: apt-get install {' '.join(self.packages)}")
        for path in self.mounts:
            path.mkdir(parents=True)
        try:
            self.start()
            for number in range(self.clients):
                self.mount(number)
            yield self
        finally:
            for path in self.mounts:
                unmount_all(path)
            self.stop()

    def start(self) -> None:
        """Starts the servers."""

    def stop(self) -> None:
        """Ends what `start` has started, also where that failed half-way."""

    def mount(self, number: int) -> None:
        """Mounts the file system at `mounts[number]`."""
        raise NotImplementedError

    def client_pid(self, number: int) -> int:
        """Returns the process that serves a mount."""
        ends = re.compile(rf"(^|\s){re.escape(str(self.mounts[number]))}($|[\s)])")
        return one_process(lambda words: any(ends.search(word) for word in words))

    def part_pid(self, part: str) -> int | None:
        """Returns the process of a part, if it runs."""
        raise NotImplementedError

    def lose(self, part: str) -> None:
        pid = self.part_pid(part)
        assert pid is not None, f"{part} does not run"
        os.kill(pid, signal.SIGKILL)
        wait_for(f"the end of {part}", lambda: self.part_pid(part) is None)

    def bring_back(self, part: str) -> None:
        raise NotImplementedError

    def settle(self) -> None:
        """Waits until another part can be lost. REQUIRES: nobody writes, or it may never end."""

    @contextlib.contextmanager
    def lost(self, part: str) -> Iterator[None]:
        self.lose(part)
        try:
            yield
        finally:
            self.bring_back(part)

    @contextlib.contextmanager
    def stopped(self, part: str) -> Iterator[None]:
        """Stops a part as it is, and lets it go on."""
        pid = self.part_pid(part)
        assert pid is not None, f"{part} does not run"
        with stopped(pid):
            yield

    @contextlib.contextmanager
    def stopped_client(self, number: int) -> Iterator[None]:
        """Stops a client as it is, and lets it go on."""
        with stopped(self.client_pid(number)):
            yield

    def kill_client(self, number: int) -> None:
        os.kill(self.client_pid(number), signal.SIGKILL)

    def remount(self, number: int) -> None:
        """Mounts again what a killed client has left."""
        unmount_all(self.mounts[number])
        self.mount(number)


def run(
    *command: str | Path,
    quiet: bool = False,
    again_on: Sequence[str] = (),
    env: dict[str, str] | None = None,
) -> str:
    """Returns the output of a command.

    Args:
        command: the program and its arguments.
        quiet: whether it may fail; else that fails the test with its output.
        again_on: texts of failures after which it is repeated, up to four times.
        env: all of its environment. None: this process's.
    """
    words = [str(word) for word in command]
    for left in range(4, -1, -1):
        done = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
            timeout=seconds(120),
        )  # fmt: skip
        if not done.returncode or not left or not any(text in done.stdout for text in again_on):
            break
        time.sleep(1)
    if done.returncode and not quiet:
        pytest.fail(f"{' '.join(words)}: exit {done.returncode}\n{done.stdout}")
    return done.stdout


def wait_for(what: str, is_so: Callable[[], object], deadline_s: float = 90) -> None:
    give_up_at = time.monotonic() + seconds(deadline_s)
    while not is_so():
        if time.monotonic() > give_up_at:
            pytest.fail(f"{what}: not within {seconds(deadline_s):.0f} s")
        time.sleep(0.1)


def processes(is_wanted: Callable[[Sequence[str]], bool]) -> list[int]:
    """Returns the processes of this machine whose command line is a wanted one."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{name}/cmdline").read_bytes().decode().split("\0")[:-1]
                if words and is_wanted(words):
                    found.append(int(name))
    return found


def one_process(is_wanted: Callable[[Sequence[str]], bool]) -> int:
    found = processes(is_wanted)
    assert len(found) == 1, f"{len(found)} processes, expected one"
    return found[0]


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def end(pid: int) -> None:
    """Ends a process that the tests have started, and waits until it has gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGTERM)
        give_up_at = time.monotonic() + seconds(20)
        while is_alive(pid):
            if time.monotonic() > give_up_at:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] not in "ZX"
    except OSError:
        return False


def pid_in(file: Path) -> int | None:
    """Returns the process that a file names, if there are both."""
    with contextlib.suppress(OSError, ValueError):
        pid = int(file.read_text())
        return pid if is_alive(pid) else None
    return None


def unmount_all(path: Path) -> None:
    """Takes each mount from a path, also one whose client has gone."""
    while f" {path} " in Path("/proc/self/mounts").read_text():
        unmount(path)
