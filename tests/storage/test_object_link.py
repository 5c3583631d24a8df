"""The bytes under way to a store follow how long those before took."""

from __future__ import annotations

import resource
import threading

import pytest
from support.machine import seconds

from torch_dcpx.storage import object_link
from torch_dcpx.storage.object_link import Link, Window

MIB = 1 << 20


def never() -> bool:
    return False


def test_quick_bytes_let_more_be_under_way_and_slow_ones_less() -> None:
    window = Window(32 * MIB)
    for _ in range(3):
        window.take(8 * MIB, never)
    window.give_back(8 * MIB, 0.1)
    assert window.nbytes == 40 * MIB and not window.is_slow
    for _ in range(2):
        window.give_back(8 * MIB, 8.0)
    window.take(8 * MIB, never)
    window.give_back(8 * MIB, 40.0)
    assert window.nbytes == 10 * MIB and window.is_slow
    window.take(8 * MIB, never)
    window.give_back(8 * MIB, 8.0)
    assert window.nbytes == 10 * MIB


def test_window_of_a_link_that_was_quick_for_long_follows_it_when_it_is_slow() -> None:
    window = Window(32 * MIB)
    for _ in range(10_000):
        window.take(8 * MIB, never)
        window.give_back(8 * MIB, 0.1)
    window.take(8 * MIB, never)
    window.give_back(8 * MIB, 100.0)
    assert window.is_slow


def test_bytes_that_were_under_way_together_count_once() -> None:
    window = Window(32 * MIB)
    for _ in range(4):
        window.take(8 * MIB, never)
    for _ in range(4):
        window.give_back(8 * MIB, 20.0)
    assert window.nbytes == 16 * MIB


def test_bytes_that_were_given_up_say_nothing() -> None:
    window = Window(32 * MIB)
    window.take(8 * MIB, never)
    window.give_back(8 * MIB)
    assert window.nbytes == 32 * MIB


def test_one_request_always_may_be_under_way_and_the_next_waits() -> None:
    window = Window(MIB)
    window.take(8 * MIB, never)
    has_begun = threading.Event()

    def next_one() -> None:
        window.take(8 * MIB, never)
        has_begun.set()

    thread = threading.Thread(target=next_one)
    thread.start()
    assert not has_begun.wait(0.3)
    window.give_back(8 * MIB, 1.0)
    assert has_begun.wait(seconds(30))
    thread.join()


def test_who_would_wait_in_vain_goes_on() -> None:
    window = Window(MIB)
    window.take(8 * MIB, never)
    window.take(8 * MIB, lambda: True)


def test_bytes_move_where_a_connection_that_was_there_has_carried_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[dict[str, int]] = [
        {"a": 100},
        {"a": 100, "b": 5000},  # a new connection: the kernel takes its first bytes
        {"a": 100, "b": 5000},
        {"b": 5001},
    ]
    monkeypatch.setattr(object_link, "_SAMPLE_S", 0.0)
    left = iter(looks)
    monkeypatch.setattr(object_link, "_counts_of_sockets", lambda: next(left))
    link = Link()
    found = [link.moved_at() for _ in looks]
    assert found[:3] == [0.0, 0.0, 0.0] and found[3] > 0


def test_look_at_the_sockets_of_a_process_without_a_free_descriptor_finds_none() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    link = Link()
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        found = link.moved_at()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found == 0.0
