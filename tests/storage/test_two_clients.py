"""What tests of two clients play (support/fuse_daemon.py), at the level of calls of os."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fuse_fixture import MountedClient, mounted_clients
from support.machine import seconds

Clients = tuple[MountedClient, MountedClient]
FOR_EVER = 1e6


def error_of(call: Callable[..., object], *args: object, **named: object) -> str:
    """Returns the name of the error of a call, or "": it returned."""
    try:
        call(*args, **named)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return ""


def wait_until(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + seconds(60)
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


def opened(path: Path | str, flags: int = os.O_RDONLY, **named: int) -> None:
    os.close(os.open(path, flags, **named))


@pytest.fixture
def keeping(two_clients: Clients) -> Clients:
    """The second keeps what it sees until it is told to forget."""
    two_clients[1].keep(name_s=FOR_EVER, attributes_s=FOR_EVER, kept_s=FOR_EVER, missing_s=FOR_EVER)
    return two_clients


def test_sizes_and_missing_names_are_seen_late_and_own_writes_at_once(keeping: Clients) -> None:
    first, second = keeping
    assert error_of(os.stat, second.path / "new") == "ENOENT"
    (first.path / "new").write_bytes(b"x")
    assert error_of(opened, second.path / "new") == "ENOENT"
    with (first.path / "data").open("wb") as file:
        assert (second.path / "data").stat().st_size == 0
        file.write(b"x" * 100_000)
    assert (second.path / "data").read_bytes() == b""
    second.forget()
    assert (second.path / "data").read_bytes() == b"x" * 100_000
    assert error_of(opened, second.path / "new") == ""
    for size in (3, 1):
        (second.path / "own").write_bytes(b"x" * size)
        os.replace(second.path / "own", second.path / "data")
        assert (second.path / "data").read_bytes() == b"x" * size
    second.keep(kept_missing_s=FOR_EVER)  # by the client, where the kernel keeps none
    assert error_of(os.stat, second.path / "late") == "ENOENT"
    (first.path / "late").write_bytes(b"x")
    assert error_of(os.stat, second.path / "late") == "ENOENT"


def test_without_orders_a_size_is_right_after_a_second_or_two(two_clients: Clients) -> None:
    first, second = two_clients
    with (first.path / "data").open("wb") as file:
        assert (second.path / "data").stat().st_size == 0
        file.write(b"x")
    wait_until(lambda: (second.path / "data").stat().st_size == 1)


def test_replaced_files_and_directories_are_stale(keeping: Clients) -> None:
    first, second = keeping
    (first.path / "data").write_bytes(b"x" * 200_000)
    assert (second.path / "data").stat().st_size == 200_000
    (first.path / "new").write_bytes(b"y" * 100_000)
    (first.path / "new").rename(first.path / "data")
    fd = os.open(second.path / "data", os.O_RDONLY)
    assert error_of(os.pread, fd, 10, 0) == "ESTALE"
    assert error_of(os.close, fd) == "ESTALE"
    second.forget()
    assert (second.path / "data").read_bytes() == b"y" * 100_000
    (first.path / "step").mkdir()
    fd = os.open(second.path / "step", os.O_RDONLY | os.O_DIRECTORY)
    shutil.rmtree(first.path / "step")
    (first.path / "step").mkdir()
    create = os.O_CREAT | os.O_WRONLY
    assert error_of(opened, "data", create, dir_fd=fd) == "ESTALE"
    opened(second.path / "step" / "data", create)
    second.say_gone(errno.ENOENT)
    assert error_of(opened, "data", create, dir_fd=fd) == "ENOENT"
    os.close(fd)


@pytest.mark.parametrize("call", ["fsync", "flush", "rename", "write", "fsyncdir"])
def test_a_call_fails_on_demand_once_and_then_works(two_clients: Clients, call: str) -> None:
    first, second = two_clients
    path = first.path / "step"
    path.mkdir()

    def save() -> None:
        with (path / "part").open("wb", buffering=0) as file:
            file.write(b"x")
            os.fsync(file.fileno())
        (path / "part").rename(path / "data")
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    for code in ("EIO", "ESTALE"):
        # The kernel repeats a call by path once after ESTALE.
        times = 2 if (call, code) == ("rename", "ESTALE") else 1
        first.fail(call, getattr(errno, code), "step*", times=times)
        assert error_of(save) == code
        assert error_of(save) == ""
        second.forget()
        assert (second.path / "step" / "data").read_bytes() == b"x"


def test_parts_that_are_down_requests_that_wait_and_clients_that_end(
    two_clients: Clients,
) -> None:
    first, second = two_clients
    for name in ("down", "held", "other"):
        (first.path / name).write_bytes(b"x" * 200_000)
    first.take_down("down")
    first.forget()
    assert sorted(os.listdir(first.path)) == ["held", "other"]
    assert error_of(os.stat, first.path / "down") == "ENOENT"
    assert error_of(opened, first.path / "down", os.O_CREAT | os.O_WRONLY) == "ENOTCONN"
    first.clear()
    first.forget()
    first.hold("read", "held")
    read = "import pathlib, sys; print(len(pathlib.Path(sys.argv[1]).read_bytes()))"
    command = [sys.executable, "-c", read, str(first.path / "held")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert first.wait_held() == [("read", "held")]
        assert len((first.path / "other").read_bytes()) == 200_000
        assert child.poll() is None
        first.release()
        assert child.communicate(timeout=seconds(60))[0] == "200000\n"
    first.kill()
    wait_until(lambda: error_of(os.stat, first.path / "no") == "ENOTCONN")
    assert len(os.listdir(second.path)) == 3


@pytest.mark.parametrize("locks", ["shared", "local"])
def test_both_kinds_of_locks_are_seen_by_the_other_client_where_they_are_shared(
    tmp_path: Path, locks: str
) -> None:
    with mounted_clients(tmp_path, locks=locks) as (first, second):
        (first.path / "lock").write_bytes(b"")
        mine, theirs = (client.path / "lock" for client in (first, second))
        for take in (fcntl.flock, fcntl.lockf):
            with mine.open("r+b") as own, theirs.open("r+b") as far:
                take(own, fcntl.LOCK_EX)
                held = error_of(take, far, fcntl.LOCK_EX | fcntl.LOCK_NB)
                assert held == ("EAGAIN" if locks == "shared" else "")
            with theirs.open("r+b") as far:  # no close waits until a flock goes
                take(far, fcntl.LOCK_EX)


def test_a_node_of_its_own_sees_the_second_client_under_the_path_of_the_first(
    two_clients: Clients,
) -> None:
    first, second = two_clients
    (first.path / "data").write_bytes(b"x")
    code = (
        "import os, socket, sys\n"
        "from support.nodes import enter_node\n"
        "enter_node(1, sys.argv[1], sys.argv[2])\n"
        "print(os.listdir(sys.argv[1]), socket.gethostname())\n"
        "print(open('/proc/sys/kernel/random/boot_id').read())\n"
    )
    second.calls()
    said = subprocess.check_output(
        [sys.executable, "-c", code, first.path, second.path],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        text=True,
    ).split()
    assert said == ["['data']", "node1", "00000001-0000-4000-8000-000000000000"]
    assert [name for name, _ in second.calls() if name.startswith("opendir")]
