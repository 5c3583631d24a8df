"""Devices that hang, give a save, load or snapshot up, and then go on: nobody's memory changes."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fake_cuda.fake import HUNG, FakeCuda
from support.device_snapshots import assert_bits
from support.device_states import device_0, moved, on_host, tensors
from support.saves import assert_loads, save
from support.staged import stage_tensors
from support.states import assert_same
from torch.distributed.checkpoint.api import CheckpointException

from torch_dcpx import _C, DcpxReader, ReadOptions, WriteOptions
from torch_dcpx.errors import StagingError
from torch_dcpx.staging.arena import process_pool
from torch_dcpx.staging.snapshot import stage_guarded
from torch_dcpx.tensors import copy_guard
from torch_dcpx.tensors import device as device_memory

KIB = 1 << 10
SAVING = WriteOptions(workers=2, slot_bytes=256 * KIB, durability="none")
LOADING = ReadOptions(workers=2, slot_bytes=256 * KIB)
GIVEN_UP = "device 0 is not used until copies that took too long have ended"


@pytest.fixture(autouse=True)
def impatience() -> Iterator[None]:
    """Waits of 20 ms, so that what hangs is given up at once."""
    _C.set_copy_timeouts(0.02, 0.02)
    yield
    _C.set_copy_timeouts(1800, 60)


def hang(device: FakeCuda, tensor: torch.Tensor) -> None:
    """Queues on the current stream a step that does not end before `release_hung`."""
    stream = device.current_streams[0] = device.make_stream()
    device.set_pace(HUNG, stream)
    device.stream_write(tensor, device.read_back(tensor), stream)


def fails(work: Callable[[], object]) -> str:
    """Returns the text of the StagingError that `work` ends with; nothing keeps its frames."""
    with pytest.raises((StagingError, CheckpointException)) as raised:
        work()
    caught: Any = raised.value
    error = caught if isinstance(caught, StagingError) else caught.failures[0][0]
    for one in (caught, error):
        traceback.clear_frames(one.__traceback__)
    assert type(error) is StagingError
    return str(error)


def end(device: FakeCuda) -> None:
    """Lets all that hangs run, and what was kept for it go at the next question."""
    _C.set_copy_timeouts(1800, 60)
    device.release_hung()
    device.sync()
    device.current_streams.clear()
    device_memory.source_events([0])
    gc.collect()


def load(state: Any, directory: Path) -> None:
    dcp.load(state, storage_reader=DcpxReader(directory, options=LOADING), no_dist=True)


def test_targets_of_a_load_that_was_given_up_are_nobody_elses_until_its_copies_have_ended(
    device: FakeCuda, tmp_path: Path
) -> None:
    expected = tensors(3, 400 * KIB)
    save(expected, tmp_path, options=SAVING)
    step = device.device_tensor(torch.zeros(5))
    target = moved(device, {key: torch.zeros_like(t) for key, t in expected.items()}, device_0)
    hang(device, step)
    said = fails(lambda: load(target, tmp_path))
    assert "were not done after" in said
    assert "memory is kept until they have ended" in said
    assert GIVEN_UP in fails(lambda: load(target, tmp_path))
    target.clear()
    gc.collect()
    others = [device.device_tensor(torch.ones(400 * KIB // 4)) for _ in range(3)]
    assert device.count("live_allocations") == 1 + 3 + 3
    end(device)
    for other in others:
        assert_bits(device.read_back(other), torch.ones(400 * KIB // 4))
    assert device.count("live_allocations") == 1 + 3
    again = moved(device, {key: torch.zeros_like(t) for key, t in expected.items()}, device_0)
    load(again, tmp_path)
    assert_same(expected, on_host(device, again))


def test_sources_and_slots_of_a_save_that_was_given_up_live_until_its_copies_have_ended(
    device: FakeCuda, tmp_path: Path
) -> None:
    expected = {**tensors(3, 400 * KIB), **{f"s{i}": torch.arange(50.0) + i for i in range(20)}}
    state = moved(device, expected, device_0)
    hang(device, device.device_tensor(torch.zeros(5)))
    before = device.count("pinned_bytes")
    fails(lambda: save(state, tmp_path, options=SAVING))
    assert not (tmp_path / ".metadata").exists()
    state.clear()
    gc.collect()
    assert device.count("live_allocations") >= len(expected)
    assert device.count("pinned_bytes") > before
    end(device)
    assert device.count("live_allocations") == 0
    assert device.count("pinned_bytes") == before
    save(moved(device, expected, device_0), tmp_path, options=SAVING)
    assert_loads(expected, tmp_path)


def staged_at_once(tensor: torch.Tensor) -> None:
    stage_tensors([tensor])


def staged_behind_a_guard(tensor: torch.Tensor) -> None:
    stage_guarded([tensor])[1].finish()


@pytest.mark.parametrize("stage", [staged_at_once, staged_behind_a_guard])
def test_arena_and_sources_of_a_snapshot_that_was_given_up_wait_for_its_copies(
    device: FakeCuda, stage: Callable[[torch.Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_guard, "_TIMEOUT_S", 0.02)
    source = torch.randn(100_000)
    sources = [device.device_tensor(source)]
    hang(device, sources[0])
    assert "memory is kept until they have ended" in fails(lambda: stage(sources[0]))
    sources.clear()
    gc.collect()
    assert device.count("live_allocations") == 1
    assert GIVEN_UP in fails(lambda: stage(device.device_tensor(source)))
    end(device)
    assert device.count("live_allocations") == 0
    assert_bits(stage_tensors([device.device_tensor(source)])[0], source)
    assert process_pool().count == 2  # the arena came back, and serves
