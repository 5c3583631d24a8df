"""What tests of two clients play (support/fuse_daemon.py), at the level of calls of os."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fuse_fixture import MountedClient, mounted_clients
from support.machine import seconds

Clients = tuple[MountedClient, MountedClient]
FOR_EVER = 1e6
FUSE = 0x65735546


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


# ---- What is seen late --------------------------------------------------------------------------


def test_a_size_seen_while_a_file_is_written_stays_until_the_time_is_over(keeping: Clients) -> None:
    first, second = keeping
    with (first.path / "data").open("wb") as file:
        assert (second.path / "data").stat().st_size == 0
        file.write(b"x" * 100_000)
    assert (second.path / "data").read_bytes() == b""
    assert (first.path / "data").stat().st_size == 100_000
    second.forget()
    assert (second.path / "data").read_bytes() == b"x" * 100_000


def test_a_listing_alone_has_seen_the_sizes(keeping: Clients) -> None:
    first, second = keeping
    with (first.path / "data").open("wb") as file:
        assert os.listdir(second.path) == ["data"]
        file.write(b"x")
    assert (second.path / "data").stat().st_size == 0


def test_without_orders_a_size_is_right_after_a_second_or_two(two_clients: Clients) -> None:
    first, second = two_clients
    with (first.path / "data").open("wb") as file:
        assert (second.path / "data").stat().st_size == 0
        file.write(b"x")
    wait_until(lambda: (second.path / "data").stat().st_size == 1)


def test_the_own_writes_of_a_client_are_seen_by_it_at_once(keeping: Clients) -> None:
    _, second = keeping
    for size in (3, 1):
        assert error_of(os.stat, second.path / str(size)) == "ENOENT"
        (second.path / str(size)).write_bytes(b"x" * size)
        assert (second.path / str(size)).stat().st_size == size
        os.replace(second.path / str(size), second.path / "data")
        assert (second.path / "data").read_bytes() == b"x" * size


def test_a_name_that_was_missing_stays_missing_until_the_time_is_over(keeping: Clients) -> None:
    first, second = keeping
    assert error_of(os.stat, second.path / "data") == "ENOENT"
    (first.path / "data").write_bytes(b"x")
    assert error_of(opened, second.path / "data") == "ENOENT"
    assert os.listdir(second.path / ".") == ["data"]
    second.forget()
    assert error_of(opened, second.path / "data") == ""


def test_a_missing_name_can_be_kept_by_the_client_where_the_kernel_keeps_none(
    two_clients: Clients,
) -> None:
    first, second = two_clients
    second.keep(kept_missing_s=FOR_EVER)
    assert error_of(os.stat, second.path / "data") == "ENOENT"
    (first.path / "data").write_bytes(b"x")
    second.calls()
    assert error_of(os.stat, second.path / "data") == "ENOENT"
    assert ("lookup", "data") in second.calls()
    second.forget()
    assert error_of(os.stat, second.path / "data") == ""


# ---- Stale handles ------------------------------------------------------------------------------


def test_a_replaced_file_opens_and_its_first_read_is_stale(keeping: Clients) -> None:
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


def test_a_small_replaced_file_gives_its_old_bytes(keeping: Clients) -> None:
    first, second = keeping
    (first.path / "newest").write_text("step-1")
    assert (second.path / "newest").read_text() == "step-1"
    (first.path / "new").write_text("step-22")
    (first.path / "new").rename(first.path / "newest")
    with contextlib.suppress(OSError):  # of the close
        fd = os.open(second.path / "newest", os.O_RDONLY)
        assert os.read(fd, 100) == b"step-1"
        os.close(fd)
    second.forget()
    assert (second.path / "newest").read_text() == "step-22"


def test_a_descriptor_that_has_read_goes_on_after_another_client_has_removed_the_file(
    keeping: Clients,
) -> None:
    first, second = keeping
    (first.path / "data").write_bytes(b"x" * 200_000)
    with (second.path / "data").open("rb", buffering=0) as file:
        file.read(1)
        (first.path / "data").unlink()
        assert os.pread(file.fileno(), 10, 190_000) == b"x" * 10
        assert os.fstat(file.fileno()).st_size == 200_000


def test_an_own_open_file_outlives_its_name(two_clients: Clients) -> None:
    first, _ = two_clients
    (first.path / "data").write_bytes(b"x" * 200_000)
    with (first.path / "data").open("r+b", buffering=0) as file:
        (first.path / "data").unlink()
        assert os.pread(file.fileno(), 10, 190_000) == b"x" * 10
        assert os.pwrite(file.fileno(), b"y", 0) == 1
        os.fsync(file.fileno())


def test_the_descriptor_of_a_replaced_directory_is_stale_and_its_path_works(
    keeping: Clients,
) -> None:
    first, second = keeping
    (first.path / "step").mkdir()
    fd = os.open(second.path / "step", os.O_RDONLY | os.O_DIRECTORY)
    shutil.rmtree(first.path / "step")
    (first.path / "step").mkdir()
    create = os.O_CREAT | os.O_WRONLY
    assert error_of(opened, "data", create, dir_fd=fd) == "ESTALE"
    assert error_of(os.listdir, fd) == "ESTALE"
    assert error_of(os.mkdir, "below", dir_fd=fd) == "ESTALE"
    assert error_of(opened, "none", dir_fd=fd) == "ENOENT"
    os.fsync(fd)
    os.close(fd)
    opened(second.path / "step" / "data", create)
    assert os.listdir(second.path / "step") == ["data"]


def test_a_replaced_directory_can_be_missing_instead_of_stale(keeping: Clients) -> None:
    first, second = keeping
    second.say_gone(errno.ENOENT)
    (first.path / "step").mkdir()
    fd = os.open(second.path / "step", os.O_RDONLY | os.O_DIRECTORY)
    (first.path / "step").rmdir()
    assert error_of(opened, "data", os.O_CREAT | os.O_WRONLY, dir_fd=fd) == "ENOENT"
    os.close(fd)


# ---- Errors, parts that are down, requests that wait --------------------------------------------


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

    save()
    for code in ("EIO", "ENOSPC", "EDQUOT", "ESTALE", "ENOTCONN"):
        # The kernel repeats a call by path once after ESTALE.
        times = 2 if (call, code) == ("rename", "ESTALE") else 1
        first.fail(call, getattr(errno, code), "step*", times=times)
        assert error_of(save) == code
        assert error_of(save) == ""
        second.forget()
        assert (second.path / "step" / "data").read_bytes() == b"x"


def test_what_is_on_a_part_that_is_down_is_missing_and_cannot_be_made(
    two_clients: Clients,
) -> None:
    first, _ = two_clients
    step = first.path / "step"
    step.mkdir()
    for name in (".metadata", "data"):
        (step / name).write_bytes(b"x" * 200_000)
    with (step / ".metadata").open("rb", buffering=0) as file:
        first.take_down("*/.metadata")
        first.forget()
        assert os.listdir(step) == ["data"]
        assert error_of(os.stat, step / ".metadata") == "ENOENT"
        assert error_of(os.read, file.fileno(), 1) == "ENOTCONN"
        assert error_of(opened, step / ".metadata", os.O_CREAT | os.O_WRONLY) == "ENOTCONN"
        assert error_of(os.rename, step / "data", step / ".metadata") == "ENOTCONN"
        (first.path / "other").mkdir()
        first.take_down("*/.metadata", lookup=errno.ENOTCONN)
        assert error_of(os.stat, step / ".metadata") == "ENOTCONN"
        first.clear()
    assert (step / ".metadata").read_bytes() == b"x" * 200_000
    assert sorted(os.listdir(step)) == [".metadata", "data"]


def test_a_held_request_waits_and_others_are_answered(two_clients: Clients) -> None:
    first, _ = two_clients
    for name in ("held", "other"):
        (first.path / name).write_bytes(b"x" * 200_000)
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


def test_a_stopped_client_answers_when_it_goes_on_and_not_at_all_once_killed(
    two_clients: Clients,
) -> None:
    first, second = two_clients
    stat = [sys.executable, "-c", "import os, sys; os.stat(sys.argv[1])", str(first.path / "no")]
    first.stop()
    with subprocess.Popen(stat, stderr=subprocess.DEVNULL) as child:
        assert os.listdir(second.path) == []
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.5)
        first.go_on()
        assert child.wait(seconds(60)) == 1
    first.kill()
    wait_until(lambda: error_of(os.stat, first.path / "no") == "ENOTCONN")
    assert os.listdir(second.path) == []


# ---- Locks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("locks", ["shared", "local"])
def test_both_kinds_of_locks_are_seen_by_the_other_client_where_they_are_shared(
    tmp_path: Path, two_clients: Clients, locks: str
) -> None:
    folder = tmp_path / locks
    folder.mkdir()
    with mounted_clients(folder, locks=locks) as (first, second):
        (first.path / "lock").write_bytes(b"")
        mine, theirs = (client.path / "lock" for client in (first, second))
        for take in (fcntl.flock, fcntl.lockf):
            with mine.open("r+b") as own, theirs.open("r+b") as far:
                take(own, fcntl.LOCK_EX)
                held = error_of(take, far, fcntl.LOCK_EX | fcntl.LOCK_NB)
                assert held == ("EAGAIN" if locks == "shared" else "")
            with theirs.open("r+b") as far:  # no close waits until a flock goes
                take(far, fcntl.LOCK_EX)


def test_who_waits_for_a_lock_gets_it_when_the_other_client_gives_it_back(
    two_clients: Clients,
) -> None:
    first, second = two_clients
    (first.path / "lock").write_bytes(b"")
    with (first.path / "lock").open("r+b") as own, (second.path / "lock").open("r+b") as far:
        fcntl.flock(own, fcntl.LOCK_EX)
        second.calls()
        waiting = threading.Thread(target=fcntl.flock, args=(far, fcntl.LOCK_EX))
        waiting.start()
        wait_until(lambda: ("setlkw", "lock") in second.calls())
        assert waiting.is_alive()
        fcntl.flock(own, fcntl.LOCK_UN)
        waiting.join(seconds(60))
        assert not waiting.is_alive()


# ---- The mount ----------------------------------------------------------------------------------


def test_the_file_system_is_a_fuse_one_to_those_who_ask(two_clients: Clients) -> None:
    for client in two_clients:
        kind = subprocess.check_output(["stat", "-f", "-c", "%t", client.path], text=True)
        assert int(kind, 16) == FUSE


def test_a_node_of_its_own_sees_the_second_client_under_the_path_of_the_first(
    two_clients: Clients, tmp_path: Path
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
