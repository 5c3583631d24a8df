"""What the tests' check for leaks finds, and what it lets pass."""

from __future__ import annotations

import mmap
import resource
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.leaks import Held, grown_each_time, stack_bytes

MIB = 1 << 20
LEAKS: dict[str, Callable[[], Any]] = {
    "one block": lambda: bytearray(20 * MIB),
    "small blocks": lambda: [bytes(1000) for _ in range(20_000)],
    "a mapping": lambda: mmap.mmap(-1, 20 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_memory_that_stays_is_found(leak: str) -> None:
    held = Held()
    kept = LEAKS[leak]()
    with pytest.raises(AssertionError, match=r"2\d{7} B more"):
        held.assert_no_memory_more()
    del kept


def test_stacks_that_are_kept_for_the_next_threads_are_no_leak() -> None:
    held = Held()
    barrier = threading.Barrier(12)
    threads = [threading.Thread(target=barrier.wait) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held.assert_no_memory_more()


def test_stack_is_known_by_its_guard_and_not_by_what_lies_behind_it() -> None:
    usual, page = resource.getrlimit(resource.RLIMIT_STACK)[0], resource.getpagesize()

    def maps(*parts: tuple[int, str]) -> str:
        lines, at = [], 1 << 40
        for nbytes, rights in parts:
            lines.append(f"{at:x}-{at + nbytes:x} {rights} 00000000 00:00 0")
            at += nbytes
        return "\n".join(lines)

    guard, other = (page, "---p"), (1 << 26, "---p")
    assert stack_bytes(maps(guard, (usual, "rw-p"), guard, (usual, "rw-p"))) == 2 * usual
    assert stack_bytes(maps(guard, (usual + MIB, "rw-p"))) == usual
    assert stack_bytes(maps(guard, (usual - page, "rw-p"), (usual, "rw-p"))) == 0
    assert stack_bytes(maps(other, (usual, "rw-p"))) == 0


def test_file_that_stays_is_found_and_a_socket_that_goes_is_none() -> None:
    one, other = socket.socketpair()
    held = Held()
    one.close()
    held.assert_no_file_or_thread_more()
    with open(__file__), pytest.raises(AssertionError, match="test_leaks"):
        held.assert_no_file_or_thread_more()
    held.assert_no_file_or_thread_more()
    other.close()


@pytest.mark.parametrize("growths", [1, 2, 3])
def test_growth_is_a_leak_where_it_comes_each_time(growths: int) -> None:
    kept: list[bytearray] = []

    @grown_each_time
    def test() -> None:
        held = Held()
        if len(kept) < growths:
            kept.append(bytearray(20 * MIB))
        held.assert_no_memory_more()

    if growths < 3:
        test()
    else:
        with pytest.raises(AssertionError, match="B more"):
            test()
    assert len(kept) == growths
