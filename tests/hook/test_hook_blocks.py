"""Blocks of `use` that overlap: when all have ended, all is as it was before the first."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from support.machine import seconds
from torch.distributed.checkpoint import FileSystemWriter

import torch_dcpx
from torch_dcpx import WriteOptions
from torch_dcpx.hook.settings import VARIABLES

pytestmark = pytest.mark.usefixtures("hook_off")

Before = tuple[int | None, dict[str, str | None]]


def used(workers: int) -> AbstractContextManager[None]:
    return torch_dcpx.use(write_options=WriteOptions(workers=workers))


def workers_now() -> int | None:
    """The workers of a writer that is made now; None of stock's."""
    writer: Any = FileSystemWriter("x")
    return writer.options.workers if isinstance(writer, torch_dcpx.DcpxWriter) else None


def variables() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in VARIABLES}


@pytest.fixture(params=["off", "on", "variables"])
def before(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Before:
    """What is there before the first block."""
    if request.param == "variables":
        monkeypatch.setenv("DCPX_SAFE_GLOBALS", "their.own.Name")
    if request.param == "on":
        torch_dcpx.install(write_options=WriteOptions(workers=9))
    return workers_now(), variables()


def test_last_begun_block_counts_and_all_is_as_before_at_the_end(before: Before) -> None:
    for order in itertools.permutations((1, 2, 3)):
        blocks = {workers: used(workers) for workers in (1, 2, 3)}
        for block in blocks.values():
            block.__enter__()
        for workers in order:
            last = max(blocks)
            assert workers_now() == last, order
            assert f'"workers": {last}' in str(variables()["DCPX_INSTALL_WRITE"])
            blocks.pop(workers).__exit__(None, None, None)
        assert (workers_now(), variables()) == before, order
    torch_dcpx.uninstall()
    assert workers_now() is None


def test_block_that_begins_while_an_earlier_one_has_ended(before: Before) -> None:
    first, second, third = used(1), used(2), used(3)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    third.__enter__()
    second.__exit__(None, None, None)
    assert workers_now() == 3
    third.__exit__(None, None, None)
    assert (workers_now(), variables()) == before


def test_blocks_of_two_threads(before: Before) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def other() -> None:
        with used(1):
            has_begun.set()
            assert may_end.wait(seconds(60))

    thread = threading.Thread(target=other)
    thread.start()
    assert has_begun.wait(seconds(60))
    with used(2):
        may_end.set()
        thread.join(seconds(60))
        assert workers_now() == 2
    assert (workers_now(), variables()) == before


def test_blocks_of_tasks_generators_and_errors(before: Before) -> None:
    async def task(workers: int) -> None:
        with used(workers):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        raise KeyError(workers)

    async def tasks() -> list[Any]:
        return await asyncio.gather(task(1), task(2), return_exceptions=True)

    assert [type(error) for error in asyncio.run(tasks())] == [KeyError] * 2
    assert (workers_now(), variables()) == before

    def generated() -> Iterator[int]:
        with used(4):
            yield 1

    generator = generated()
    with used(5):
        next(generator)
    assert workers_now() == 4
    generator.close()  # type: ignore[attr-defined]
    assert (workers_now(), variables()) == before


def test_calls_of_install_in_a_block_end_with_it(before: Before) -> None:
    with used(1):
        torch_dcpx.install(write_options=WriteOptions(workers=6))
        assert workers_now() == 6
    assert (workers_now(), variables()) == before
    with used(1), used(2):
        torch_dcpx.uninstall()
        assert workers_now() is None
    assert (workers_now(), variables()) == before
