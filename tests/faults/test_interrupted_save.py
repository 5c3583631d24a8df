"""Ctrl-C and SIGTERM during a save: it stops at once, and the previous checkpoint stays whole."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from support.saves import assert_whole, files_in, raises_one, save
from support.slow_states import SLOW, CopyingPlanner, Seen, gathered_state, windowed_state
from support.states import mixed_state

from torch_dcpx import DcpxWriter, WriteOptions
from torch_dcpx.writer import files as write_files
from torch_dcpx.writer import writer

pytestmark = pytest.mark.usefixtures("no_leaks")

KINDS = {
    "one call": (gathered_state, None, 1),
    "one call, several files": (gathered_state, None, 3),
    "windows, several files": (windowed_state, CopyingPlanner, 2),
}


class Terminated(BaseException):
    """What the program's own handler of SIGTERM raises."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    def terminate(*_: Any) -> None:
        raise Terminated

    # A shell starts what runs in the background with Ctrl-C ignored, and Python keeps to that.
    wanted = {signal.SIGTERM: terminate, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def in_the_middle(done_bytes: int, total_bytes: int) -> bool:
    return 0 < done_bytes < total_bytes


def signalled(number: int, at: Any = in_the_middle) -> Seen:
    """Returns a progress function that sends this process a signal, once, when `at` says so."""
    return Seen(at, lambda: os.kill(os.getpid(), number))


@pytest.mark.parametrize(
    ("kind", "number", "error"),
    [
        *((kind, signal.SIGINT, KeyboardInterrupt) for kind in KINDS),
        ("one call", signal.SIGTERM, Terminated),
        ("windows, several files", signal.SIGTERM, Terminated),
    ],
)
def test_signal_while_bytes_are_written_stops_the_save_and_leaves_nothing(
    tmp_path: Path, kind: str, number: int, error: type[BaseException]
) -> None:
    make, planner, files_per_rank = KINDS[kind]
    save(mixed_state(), tmp_path)
    before = files_in(tmp_path)
    seen = signalled(number)
    options = dataclasses.replace(SLOW, files_per_rank=files_per_rank, progress=seen)
    used = DcpxWriter(tmp_path, options=options)

    with raises_one(error):
        dcp.save(make(), storage_writer=used, planner=planner and planner(), no_dist=True)
    assert seen.is_done
    assert in_the_middle(*seen.calls[-1]), "it had not written everything"
    assert files_in(tmp_path) == before
    assert used.last_report is None
    assert_whole(mixed_state(), tmp_path)

    dcp.save(mixed_state(1), storage_writer=used, no_dist=True)  # the next one
    assert_whole(mixed_state(1), tmp_path)


@pytest.mark.slow
def test_signal_without_collectives_arrives_as_it_is(tmp_path: Path) -> None:
    seen = signalled(signal.SIGINT)
    used = DcpxWriter(tmp_path, options=dataclasses.replace(SLOW, progress=seen))
    with pytest.raises(KeyboardInterrupt):
        dcp.save(gathered_state(), storage_writer=used, no_dist=True, use_collectives=False)
    assert in_the_middle(*seen.calls[-1])
    assert files_in(tmp_path).keys() <= {".dcpx.0.lock"}
    dcp.save(gathered_state(), storage_writer=used, no_dist=True, use_collectives=False)
    assert "__0.metadata" in files_in(tmp_path)


def test_signal_between_the_last_byte_and_the_results_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    save(mixed_state(), tmp_path)
    before = files_in(tmp_path)
    at_the_end = signalled(signal.SIGINT, lambda done, total: done == total)
    with raises_one(KeyboardInterrupt):
        save(mixed_state(1), tmp_path, options=WriteOptions(progress=at_the_end))
    assert files_in(tmp_path) == before
    for module, name in ((write_files, "write_results"), (writer, "WriteResults")):
        with monkeypatch.context() as patch, raises_one(KeyboardInterrupt):
            patch.setattr(module, name, interrupt)
            save(mixed_state(1), tmp_path)
        assert files_in(tmp_path) == before
    assert_whole(mixed_state(), tmp_path)
