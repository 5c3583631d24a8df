"""Dicts that are filled on demand, interrupted, and read by many threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from support.metadata_samples import PATH, canonical, encode_small, many
from support.rows import check_rows
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from torch_dcpx.metadata import lazy as lazy_metadata
from torch_dcpx.metadata.file import decode_metadata
from torch_dcpx.metadata.lazy import StoredEntries


def decoded(data: bytes) -> Metadata:
    return decode_metadata(data, PATH).metadata


def filling_lines(interrupt_at: int) -> Callable[[FrameType, str, Any], Any]:
    """A trace that raises KeyboardInterrupt at a line of `_fill`, counted as they run."""
    seen = 0

    def in_fill(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if event == "line":
            seen += 1
            if seen == interrupt_at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return in_fill

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        its_code = frame.f_code
        is_ours = its_code.co_filename == lazy_metadata.__file__ and its_code.co_name == "_fill"
        return in_fill if is_ours else None

    return trace


@pytest.mark.parametrize("field", ["state_dict_metadata", "storage_data", "planner_data"])
def test_dict_whose_filling_was_interrupted_anywhere_is_filled_the_next_time(field: str) -> None:
    wanted = canonical(getattr(decoded(encode_small()), field))
    interrupted = 0
    for line in range(1, 20):
        found = getattr(decoded(encode_small()), field)
        before = sys.gettrace()
        sys.settrace(filling_lines(line))
        try:
            found.values()
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(before)
        assert canonical(found) == wanted
    assert 5 < interrupted < 19  # every line of it, and no more


@pytest.fixture
def often_switched() -> Iterator[None]:
    """Threads that take turns as often as Python can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def by_threads(count: int, do: Callable[[], Any]) -> list[Any]:
    """What each of `count` calls at once returns, or raises."""
    barrier = threading.Barrier(count)
    found: list[Any] = []

    def work() -> None:
        barrier.wait()
        try:
            found.append(do())
        except Exception as error:  # noqa: BLE001 - compared by the test
            found.append(error)

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


READS: dict[str, Callable[[Any], Any]] = {
    "all entries": lambda found: [type(one) for one in found.state_dict_metadata.values()],
    "entries by name": lambda found: [
        id(found.state_dict_metadata[name]) for name in found.state_dict_metadata
    ],
    "outlines": lambda found: [
        type(found.state_dict_metadata.outline(name)) for name in found.state_dict_metadata
    ],
    "one entry, then all": lambda found: (
        id(found.state_dict_metadata["t7"]),
        [id(one) for one in found.state_dict_metadata.values()],
    ),
    "places": lambda found: (len(found.storage_data), len(list(found.storage_data.values()))),
    "one place, then all": lambda found: (
        id(found.storage_data[MetadataIndex("t7", [1, 0])]),
        [id(one) for one in found.storage_data.values()],
    ),
    "paths": lambda found: (len(found.planner_data), found.planner_data["t7"]),
}


@pytest.mark.usefixtures("often_switched")
def test_threads_that_read_one_metadata_find_the_same() -> None:
    data = many(40, 4)

    def check(read: Callable[[Any], Any]) -> None:
        for _ in range(25):
            metadata = decoded(data)
            found = by_threads(4, lambda: read(metadata))  # noqa: B023 - they end before
            assert found == [found[0]] * 4
            assert not isinstance(found[0], Exception)

    check_rows(READS, check)


@pytest.mark.usefixtures("often_switched")
def test_outlines_while_another_thread_fills_are_entries() -> None:
    data = many(40, 1)
    sizes = [torch.Size([1, 2])] * 40
    for _ in range(50):
        entries = decoded(data).state_dict_metadata
        assert isinstance(entries, StoredEntries)
        turns = iter([True, False, True, False])

        def read() -> Any:
            if next(turns):  # noqa: B023
                return [one.size for one in entries.values()]  # type: ignore[union-attr]  # noqa: B023
            return [entries.outline(name).size for name in entries]  # noqa: B023

        assert by_threads(4, read) == [sizes] * 4
