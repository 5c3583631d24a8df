"""What flock and fcntl are between clients, and when a killed one's are free: printed with -s."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dfs.fixture import MOUNTED, TWO_CLIENTS, on
from dfs.system import System
from support.machine import seconds

_KINDS = ("flock", "lockf")
# Tries to take a lock, says whether it has it, and keeps it until it is killed.
_TAKES = """
import fcntl, sys, time
file = open(sys.argv[1], "r+b")
try:
    getattr(fcntl, sys.argv[2])(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError as error:
    print(error.strerror, flush=True)
else:
    print("has it", flush=True)
    time.sleep(1e6)
"""


@contextlib.contextmanager
def taker(path: Path, kind: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yields a process that tries to take a lock, and what it says."""
    command = [sys.executable, "-S", "-E", "-c", _TAKES, str(path), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def has_lock(path: Path, kind: str) -> bool:
    with taker(path, kind) as (_, said):
        return said == "has it"


def freed_after(path: Path, kind: str, deadline_s: float) -> float:
    """Returns the seconds until another process has the lock of a holder that has just ended."""
    began = time.monotonic()
    while not has_lock(path, kind):
        assert time.monotonic() < began + seconds(deadline_s), "never"
        time.sleep(0.1)
    return time.monotonic() - began


@pytest.fixture
def locked(system: System, place: str) -> list[Path]:
    """One file, as each client sees it."""
    (system.mounts[0] / place).write_bytes(b"x")
    paths = [mount / place for mount in system.mounts]
    while not all(path.exists() for path in paths):
        time.sleep(0.1)
    return paths


@on(*MOUNTED)
@pytest.mark.parametrize("kind", _KINDS)
def test_a_lock_keeps_others_out_on_one_client_and_a_killed_process_leaves_none(
    locked: list[Path], kind: str
) -> None:
    with taker(locked[0], kind) as (process, said):
        assert said == "has it"
        assert not has_lock(locked[0], kind)
        process.kill()
        after = freed_after(locked[0], kind, 30)
    print(f"{kind}, one client: free {after:.1f} s after its process was killed")


@on(*TWO_CLIENTS)
@pytest.mark.parametrize("kind", _KINDS)
def test_a_lock_is_seen_by_the_other_client_as_the_page_says(
    system: System, locked: list[Path], kind: str
) -> None:
    with taker(locked[0], kind) as (process, said):
        assert said == "has it"
        assert has_lock(locked[1], kind) != system.has_locks
        process.kill()
        after = freed_after(locked[1], kind, 30)
    print(f"{kind}, two clients: free {after:.1f} s after its process was killed")


@on(*TWO_CLIENTS)
@pytest.mark.parametrize("kind", _KINDS)
def test_the_lock_of_a_killed_client_is_free_after_the_time_that_the_page_says(
    system: System, locked: list[Path], kind: str
) -> None:
    if not system.has_locks:
        return  # the other client never saw it
    with taker(locked[0], kind) as (_, said):
        assert said == "has it"
        try:
            system.kill_client(0)
            after = freed_after(locked[1], kind, system.left_lock_s + 60)
        finally:
            system.remount(0)
    print(f"{kind}: free {after:.1f} s after its client was killed")


@on(*MOUNTED)
@pytest.mark.parametrize("flags", ["O_RDONLY|O_CREAT", "O_RDWR|O_CREAT"])
def test_how_a_lock_file_can_be_made(system: System, place: str, flags: str) -> None:
    wanted = os.O_CREAT | (os.O_RDWR if "RDWR" in flags else os.O_RDONLY)
    try:
        os.close(os.open(system.mounts[0] / place, wanted, 0o600))
        said = "works"
    except OSError as error:
        said = str(error.strerror)
    print(f"{flags}: {said}")
    assert said == "works" or flags == "O_RDONLY|O_CREAT"
