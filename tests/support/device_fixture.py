"""The `device` fixture: the fake driver as a GPU that saves see, and nothing left of a test."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fake_cuda.fake import FakeCuda


@pytest.fixture
def device(fake_device_memory: FakeCuda) -> Iterator[FakeCuda]:
    """The fake driver, whose tensors torch_dcpx takes for a GPU's; nothing of a test is left."""
    from support.device_snapshots import has_grown, left

    from torch_dcpx import _C, wait
    from torch_dcpx.staging.arena import process_pool

    fake = fake_device_memory
    process_pool().close()
    _C.clear_device_counters()
    before = left(fake)
    yield fake
    fake.clear_failures()
    wait()
    gc.collect()
    process_pool().close()
    assert has_grown(before, left(fake)) == []
