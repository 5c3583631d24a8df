"""What tests of events share: who listens, and a state to save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_dcpx as dcpx

STATE = {"w": torch.arange(1000.0), "step": 3}


@pytest.fixture
def heard() -> Iterator[list[Any]]:
    """Returns the list of the events from now on."""
    found: list[Any] = []
    remove = dcpx.on_event(found.append)
    yield found
    remove()


@pytest.fixture
def listen() -> Iterator[Callable[..., Callable[[], None]]]:
    """Returns `on_event`; the callbacks go with the test."""
    removes: list[Callable[[], None]] = []

    def added(callback: Any) -> Callable[[], None]:
        removes.append(dcpx.on_event(callback))
        return removes[-1]

    yield added
    for remove in removes:
        remove()


def target() -> dict[str, Any]:
    """Returns a state to load into."""
    return {"w": torch.zeros(1000), "step": 0}


def async_save(path: Path, **options: Any) -> dcpx.SaveHandle:
    """Saves in the background, and waits for the callbacks."""
    handle = dcpx.async_save(STATE, path, **options)
    handle.exception()
    dcpx.wait()
    return handle
