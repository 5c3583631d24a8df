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


def test_bytes_that_were_under_way_together_count_once_and_those_given_up_not_at_all() -> None:
    window = Window(32 * MIB)
    window.take(8 * MIB, never)
    window.give_back(8 * MIB)
    assert window.nbytes == 32 * MIB
    for _ in range(4):
        window.take(8 * MIB, never)
    for _ in range(4):
        window.give_back(8 * MIB, 20.0)
    assert window.nbytes == 16 * MIB


def test_one_request_always_may_be_under_way_and_the_next_waits() -> None:
    window, idle = Window(MIB), Window(MIB)
    for is_in_vain in (never, lambda: True):  # who would wait in vain goes on
        idle.take(8 * MIB, is_in_vain)
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


def _seen(
    monkeypatch: pytest.MonkeyPatch, looks: list[dict[str, tuple[int, int]]]
) -> list[tuple[bool, bool]]:
    """Returns for each look at such counts whether bytes move, and those of a listing."""
    monkeypatch.setattr(object_link, "_SAMPLE_S", 0.0)
    left = iter(looks)
    monkeypatch.setattr(object_link, "_counts_of_sockets", lambda _: next(left))
    link, found = Link(), []
    for _ in looks:
        link._moved_at = link._listed_at = 0.0
        link._look()
        found.append((link._moved_at > 0, link._listed_at > 0))
    return found


def test_bytes_move_where_a_connection_that_was_there_has_carried_more_in_two_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = [
        {"a": (100, 0)},
        {"a": (100, 0), "b": (5000, 0)},  # a new connection: the kernel takes its first bytes
        {"a": (100, 0), "b": (5000, 0)},
        {"b": (5001, 0)},
        {"b": (5001, 0)},
        {"b": (5002, 0)},
        {"b": (5002, 7)},
        {"b": (5002, 8)},
    ]
    moves = [move for move, _ in _seen(monkeypatch, looks)]
    assert moves == [False, False, False, False, False, True, False, True]


def test_small_requests_prove_nothing_of_one_that_is_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether a look falls between question and answer, or not."""
    counts = [(500, 900), (1000, 1800), (1500, 1800), (1500, 2700), (2000, 2700), (2500, 3600)]
    counts += [(3000, 4500), (3500, 5400)]
    seen = _seen(monkeypatch, [{"a": count} for count in counts])
    assert not any(moves or lists for moves, lists in seen)


def test_pages_of_a_long_listing_are_progress_of_a_listing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = [{"a": (500 * number, 300_000 * number)} for number in range(4)]
    assert _seen(monkeypatch, looks) == [(False, False), *[(False, True)] * 3]


def test_look_at_the_sockets_of_a_process_without_a_free_descriptor_finds_none() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    link = Link()
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        found = link.moved_at()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found == 0.0


@pytest.mark.parametrize(("host", "is_passed"), [("127.0.0.2", True), ("127.0.0.1", False)])
def test_sockets_of_another_store_are_passed_over_where_its_address_is_another_one(
    host: str, *, is_passed: bool
) -> None:
    own, unasked = Link("http://127.0.0.1:9000"), Link("http://127.0.0.3:9000")
    other = Link(f"http://{host}:9000")
    assert own._other_peers() == set()  # not known yet
    own.find_peer()
    other.find_peer()
    assert ((host, 9000) in own._other_peers()) == is_passed
    assert unasked._other_peers() == set() and ("127.0.0.1", 9000) not in own._other_peers()
