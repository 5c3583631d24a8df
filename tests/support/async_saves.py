"""What tests of saves in the background share."""

from __future__ import annotations

import copy
import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.machine import seconds
from support.saves import load
from support.states import assert_same

from torch_dcpx import StorageError, WriteOptions, wait


@pytest.fixture
def no_save_is_left(tmp_path: Path) -> Iterator[None]:  # the saves end before its folder goes
    """Waits for saves that a test left under way, and raises what failed."""
    yield
    wait()


class Gate:
    """Holds every write of a save until it is opened."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self.reached = threading.Event()

    def __call__(self, _done: int, _total: int) -> None:
        self.reached.set()
        assert self._opened.wait(seconds(60))

    def open(self) -> None:
        self._opened.set()


def gated(**options: Any) -> tuple[Gate, WriteOptions]:
    """Returns a gate, and options of saves that it holds."""
    gate = Gate()
    return gate, WriteOptions(progress=gate, **options)


def stock_load(path: Path, like: dict[str, Any]) -> dict[str, Any]:
    """Returns what stock's reader finds."""
    return load(like, path, "stock")


def assert_saved(path: Path, expected: dict[str, Any]) -> None:
    assert_same(expected, stock_load(path, expected))


def state_of(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "large": torch.rand(600_000, generator=generator),
        "small": torch.rand(3, 5, generator=generator),
        "view": torch.rand(64, 64, generator=generator).t(),
        "strided": torch.rand(64, 64, generator=generator)[::2, 1::3],
        "scalar": torch.tensor(seed),
        "empty": torch.empty(0, 3),
        "step": seed,
        "name": f"run {seed}",
        "tags": {seed},
    }


def copy_of(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)
        for key, value in state.items()
    }


def failing_options(number: int = errno.ENOSPC) -> WriteOptions:
    def fail(_done: int, _total: int) -> None:
        raise StorageError("no room", errno=number, path="here")

    return WriteOptions(progress=fail)
