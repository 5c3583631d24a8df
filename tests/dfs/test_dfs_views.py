"""What a client sees late of what another one did, and for how long: printed with -s or -rA."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from dfs.fixture import TWO_CLIENTS, on
from dfs.system import System
from support.machine import seconds

Case = Callable[[Path, Path], Callable[[], bool]]


def size(first: Path, second: Path) -> Callable[[], bool]:
    with (first / "data").open("wb") as file:
        (second / "data").stat()
        file.write(b"x" * 100_000)
    return lambda: (second / "data").stat().st_size == 100_000


def new_name(first: Path, second: Path) -> Callable[[], bool]:
    assert not (second / "data").exists()
    (first / "data").write_bytes(b"x")
    return (second / "data").exists


def replaced_file(first: Path, second: Path) -> Callable[[], bool]:
    (first / "data").write_bytes(b"old")
    assert (second / "data").read_bytes() == b"old"
    (first / "new").write_bytes(b"newer")
    (first / "new").rename(first / "data")
    return lambda: (second / "data").read_bytes() == b"newer"


def removed_file(first: Path, second: Path) -> Callable[[], bool]:
    (first / "data").write_bytes(b"x")
    assert (second / "data").exists()
    (first / "data").unlink()
    return lambda: not (second / "data").exists()


def replaced_directory(first: Path, second: Path) -> Callable[[], bool]:
    (first / "step").mkdir()
    (first / "step" / "old").write_bytes(b"x")
    assert os.listdir(second / "step") == ["old"]
    shutil.rmtree(first / "step")
    (first / "step").mkdir()
    (first / "step" / "new").write_bytes(b"x")
    return lambda: os.listdir(second / "step") == ["new"]


@on(*TWO_CLIENTS)
@pytest.mark.parametrize(
    "case",
    [size, new_name, replaced_file, removed_file, replaced_directory],
    ids=lambda f: f.__name__,
)
def test_what_another_client_did_is_seen_within_the_time_that_the_page_says(
    system: System, place: str, case: Case
) -> None:
    first, second = (mount / place for mount in system.mounts)
    first.mkdir()
    while not second.exists():
        time.sleep(0.1)
    is_seen = case(first, second)
    began, errors = time.monotonic(), set()
    while True:
        try:
            if is_seen():
                break
        except OSError as error:
            errors.add(str(error.strerror))
        late_s = time.monotonic() - began
        assert late_s < seconds(system.late_s + 2), f"{case.__name__}: not seen"
        time.sleep(0.02)
    late_s = time.monotonic() - began
    print(f"{case.__name__}: seen after {late_s:.1f} s", *sorted(errors))
