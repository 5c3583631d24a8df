"""What torch.cuda says of tensors and streams is what C++ is told. On a GPU."""

from __future__ import annotations

import time

import pytest
import torch
from cuda_states import _warm_processes, assert_same, busy, on_host, ordinals, state_on
from support.staged import stage_tensors

from torch_dcpx import _C, StagingError
from torch_dcpx.staging.arena import process_pool
from torch_dcpx.tensors import device as device_memory

__all__ = ["_warm_processes"]

pytestmark = pytest.mark.cuda


def test_this_torch_uses_the_driver_that_csrc_loads() -> None:
    assert torch.version.cuda is not None, "the tests of `cuda` need a torch built for CUDA"
    driver = _C.device_driver()
    assert driver["failure"] == ""
    assert driver["devices"] == len(ordinals()) > 0
    assert driver["version"] >= 12000


def test_ordinals_are_those_of_the_tensors_devices() -> None:
    for ordinal in ordinals():
        tensor = torch.ones(3, device=f"cuda:{ordinal}")
        assert device_memory.ordinal_of(tensor) == ordinal
        assert device_memory.ordinal_of(torch.nn.Parameter(tensor)[1:]) == ordinal
        assert not device_memory.is_host(tensor)
    for tensor in (torch.ones(3), torch.ones(3).pin_memory(), torch.ones(3, device="meta")):
        assert device_memory.ordinal_of(tensor) == -1


def test_current_stream_is_the_threads_own_on_each_device() -> None:
    for ordinal in ordinals():
        side = torch.cuda.Stream(ordinal)
        assert device_memory.current_stream(ordinal) == 0
        with torch.cuda.stream(side):
            assert device_memory.current_stream(ordinal) == side.cuda_stream
            assert device_memory.streams_in_use()[ordinal] == side.cuda_stream
        assert device_memory.current_stream(ordinal) == 0


def test_devices_and_host_are_staged_in_one_snapshot() -> None:
    state = {f"{o}.{k}": t for o in ordinals() for k, t in state_on(f"cuda:{o}", o).items()}
    state |= {f"host.{k}": t for k, t in state_on("cpu", 9).items()}
    staged = stage_tensors(list(state.values()))
    assert_same(dict(zip(state, staged, strict=True)), on_host(state))


def test_pack_kernel_runs_where_the_build_has_it() -> None:
    source = [torch.full((101 + i,), float(i), device="cuda") for i in range(500)]
    before = _C.device_counters()["kernels"]
    staged = stage_tensors(source)
    driver = _C.device_driver()
    assert not driver["has_kernel"] or driver["kernel_refusal"] == ""
    assert (_C.device_counters()["kernels"] > before) == driver["has_kernel"]
    for found, wanted in zip(staged, source, strict=True):
        assert torch.equal(found, wanted.cpu())


def test_copies_without_the_kernel_are_the_same() -> None:
    state = state_on("cuda", 3)
    _C.set_pack_image(b"// no image\0")  # the driver refuses it: copies do the work
    try:
        staged = stage_tensors(list(state.values()))
        assert_same(dict(zip(state, staged, strict=True)), on_host(state))
    finally:
        _C.set_pack_image(None)


def test_snapshot_sees_what_the_default_stream_of_a_thread_still_computes() -> None:
    tensor = torch.zeros(1 << 22, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(2)):  # CU_STREAM_PER_THREAD
        assert device_memory.current_stream(0) == 2
        busy(0.2)
        tensor.fill_(7.0)
        (staged,) = stage_tensors([tensor])
    assert torch.equal(staged, torch.full((1 << 22,), 7.0))


def test_capture_is_refused_and_goes_on() -> None:
    tensor, copy = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy.copy_(tensor)
        with pytest.raises(StagingError, match="captur"):
            stage_tensors([tensor])
    graph.replay()
    assert torch.equal(copy.cpu(), torch.ones(1000))


def pinned() -> list[int]:
    return [arena.pinned_bytes for arena in process_pool()._arenas]


@pytest.mark.alone
def test_snapshot_takes_no_device_memory_and_pins_its_arena() -> None:
    process_pool().close()
    state = state_on("cuda", 4)
    stage_tensors(list(state.values()))  # loads the kernel, and begins to pin
    give_up_at = time.monotonic() + 30
    while pinned() != [process_pool().nbytes] and time.monotonic() < give_up_at:
        time.sleep(0.001)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        stage_tensors(list(state.values()))
    assert torch.cuda.mem_get_info()[0] == free
    assert pinned() == [process_pool().nbytes]
