"""Two clients of one file system, each with a view of its own, for any test: FUSE mounts.

def test_it(two_clients):
    first, second = two_clients
    first.path, second.path         # one directory, through two mounts
    second.keep(attributes_s=1e6)   # what it sees from now on it keeps until second.forget()
    first.fail("fsync", errno.EIO, "*.distcp", times=1)
    second.hold("read"); second.wait_held(); second.release()
    second.take_down("*/.metadata"); second.clear()
    first.stop(); first.go_on(); first.kill()

`fuse_daemon.py` says what is played, and on which file system it was seen. A process whose request
is held, or whose client is stopped, takes no signal before the answer: let that be a child's call.
The tests need root and /dev/fuse; elsewhere they are set aside as those that need root are.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from support.fuse_wire import unmount
from support.machine import seconds

_DAEMON = Path(__file__).with_name("fuse_daemon.py")


def fuse_missing() -> str:
    """Returns why there is no FUSE here, or ""."""
    if os.geteuid() != 0:
        return "a FUSE mount needs root"
    return "" if os.path.exists("/dev/fuse") else "there is no FUSE here (/dev/fuse)"


def pytest_report_header() -> str:
    return f"two clients of one file system are tested: {fuse_missing() or 'yes'}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = fuse_missing()
    for item in items if why else []:
        if "two_clients" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason=why))
            item.add_marker(pytest.mark.root)


class MountedClient:
    """A mount and its daemon, also from another process: `MountedClient(path, address, pid)`.

    Attributes:
        path: the mount, which shows the directory that all clients share.
        address: of the socket that takes orders.
        pid: of the daemon.
    """

    def __init__(self, path: Path, address: str, pid: int) -> None:
        self.path, self.address, self.pid = path, address, pid
        self._lock = threading.Lock()
        self._lines: IO[str] | None = None

    def order(self, name: str, **arguments: Any) -> Any:
        """Has the daemon do something (`Daemon.obey`); returns what it answers."""
        with self._lock:
            if self._lines is None:
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.connect("\0" + self.address)
                    self._lines = connection.makefile("rw")
            self._lines.write(json.dumps((name, arguments)) + "\n")
            self._lines.flush()
            failed, result = json.loads(self._lines.readline())
        if failed:
            raise RuntimeError(f"{name}: {failed}")
        return result

    def keep(self, **seconds: float) -> None:
        """Sets for how long what it sees from now on is kept, which is never looked at anew.

        Args:
            seconds: `name_s`, `attributes_s` and `missing_s`: by the kernel (1, 1, 0); `kept_s`
                and `kept_missing_s`: by the client itself (1, 0).
        """
        self.order("set", **seconds)

    def forget(self) -> None:
        """Ends all that it keeps, as the end of those seconds does."""
        self.order("forget")

    def say_gone(self, code: int) -> None:
        """Sets the error of what the other client has taken away: ESTALE, or ENOENT."""
        self.order("gone", code=code)

    def fail(
        self,
        operations: str,
        errno: int,
        match: str = "*",
        times: int = 1 << 30,
        skip: int = 0,
    ) -> None:
        """Answers requests by an error, "" all; `Rules.fail` has the arguments."""
        self.order("fail", operations=operations, errno=errno, match=match, times=times, skip=skip)

    def hold(self, operations: str, match: str = "*", times: int = 1 << 30, skip: int = 0) -> None:
        """Lets requests wait until `release`."""
        self.order("hold", operations=operations, match=match, times=times, skip=skip)

    def release(self) -> None:
        self.order("release")

    def take_down(self, match: str, lookup: int = errno.ENOENT) -> None:
        """Does without the files of a pattern: the part that has them does not answer."""
        self.order("down", match=match, lookup=lookup)

    def clear(self) -> None:
        """Ends failures, what is held, and what is down."""
        self.order("clear")

    def calls(self) -> list[tuple[str, str]]:
        """Returns the requests since the last such question: operation, path from the root."""
        return [tuple(call) for call in self.order("calls")]

    def wait_held(self, count: int = 1) -> list[tuple[str, str]]:
        """Waits until so many requests are held, and returns them."""
        give_up_at = time.monotonic() + seconds(60)
        while len(held := [tuple(call) for call in self.order("held")]) < count:
            assert time.monotonic() < give_up_at, f"{held} are held, not {count} requests"
            time.sleep(0.005)
        return held

    def stop(self) -> None:
        """Stops the client as it is: whoever asks it waits. It takes no request any more: who waits
        for one that it has taken cannot be killed.
        """
        os.kill(self.pid, signal.SIGSTOP)
        give_up_at = time.monotonic() + seconds(60)
        while any(
            task.read_text().rpartition(")")[2].split()[0] != "T"
            for task in Path(f"/proc/{self.pid}/task").glob("*/stat")
        ):
            assert time.monotonic() < give_up_at, "the client does not stop"
            time.sleep(0.002)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Ends the client: what waits, and all that comes, gets ENOTCONN."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


@contextlib.contextmanager
def mounted_clients(
    folder: Path, count: int = 2, locks: str = "shared"
) -> Iterator[tuple[MountedClient, ...]]:
    """Mounts clients of folder/stored at folder/client0, folder/client1, ...

    Args:
        folder: an empty directory.
        count: of clients.
        locks: "shared": each client sees the others' locks; "local": its own alone.
    """
    (folder / "stored").mkdir()
    with contextlib.ExitStack() as stack:
        yield tuple(stack.enter_context(_mounted(folder, n, locks)) for n in range(count))


@contextlib.contextmanager
def _mounted(folder: Path, number: int, locks: str) -> Iterator[MountedClient]:
    path, address = folder / f"client{number}", f"dcpx-fuse-{uuid.uuid4().hex}"
    path.mkdir()
    command = [sys.executable, "-S", "-E", str(_DAEMON), str(path), str(folder / "stored")]
    with subprocess.Popen([*command, address, locks], stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        client = MountedClient(path, address, daemon.pid)
        try:
            assert daemon.stdout.readline() == b"mounted\n", "the FUSE daemon did not start"
            yield client
        finally:
            client.close()
            client.kill()
            daemon.wait(seconds(60))
            unmount(path)


@pytest.fixture
def two_clients(tmp_path: Path) -> Iterator[tuple[MountedClient, ...]]:
    """Two clients of one directory, which keep names and sizes as GlusterFS's do."""
    folder = tmp_path / "clients"
    folder.mkdir()
    with mounted_clients(folder) as clients:
        yield clients
