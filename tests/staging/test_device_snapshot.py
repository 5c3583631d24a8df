"""Snapshots of device memory, on the fake driver: at one moment, and in few copies."""

from __future__ import annotations

import logging
import types
from typing import Any

import pytest
import torch
from fake_cuda.fake import HELD, FakeCuda
from support.device_snapshots import assert_bits, device_copy, left
from support.machine import points
from support.staged import stage_tensors

from torch_dcpx import _C, DcpxStager, StagingError
from torch_dcpx.staging.arena import process_pool
from torch_dcpx.staging.snapshot import stage_guarded
from torch_dcpx.tensors import device as device_memory

KIB, MIB = 1 << 10, 1 << 20


def layouts(seed: int) -> dict[str, torch.Tensor]:
    """Returns tensors of every kind of layout, of several dtypes."""
    random = torch.Generator().manual_seed(seed)
    base = torch.randn(700, 500, generator=random)
    return {
        "large": torch.randn(3 * MIB // 4, generator=random),
        "small": torch.randn(3, 5, generator=random),
        "transposed": base.t(),
        "rows": base[10:600:3],
        "columns": base[:, 100:300],
        "corner": base[5:50:2, 7:400:3],
        "expanded": torch.randn(1, 40, generator=random).expand(30, 40),
        "permuted": torch.randn(6, 7, 8, 9, generator=random).permute(2, 0, 3, 1)[1:7, :, ::2],
        "half": torch.randn(1000, generator=random).to(torch.float16),
        "bfloat16": torch.randn(33, 77, generator=random).to(torch.bfloat16),
        "float8": torch.randn(1001, generator=random).to(torch.float8_e4m3fn),
        "bool": torch.rand(999, generator=random) < 0.5,
        "complex": torch.randn(50, 50, generator=random, dtype=torch.complex64),
        "int64": torch.randint(-(1 << 60), 1 << 60, (17, 19), generator=random),
        "scalar": torch.tensor(4.5),
        "empty": torch.empty(0, 3),
    }


def test_every_layout_and_dtype_is_staged_bit_for_bit_from_host_and_devices(
    device: FakeCuda, seed: int
) -> None:
    host = layouts(seed)
    tensors, wanted = [], []
    for ordinal in (0, 1, -1):
        state = host if ordinal < 0 else device_copy(device, host, ordinal)
        tensors += state.values()
        wanted += host.values()
    for found, source in zip(stage_tensors(tensors), wanted, strict=True):
        assert_bits(found, source)
        assert found.untyped_storage().nbytes() == found.nbytes
    assert device.notes() == []  # each copy into registered memory


def test_parameters_and_views_are_staged_from_a_device(device: FakeCuda) -> None:
    flat = torch.arange(10_000, dtype=torch.float32)
    on_device = device.device_tensor(flat)
    parameter = torch.nn.Parameter(on_device[100:200].view(10, 10))
    staged = stage_tensors([on_device[1:], parameter, on_device[5000:5001]])
    assert_bits(staged[0], flat[1:])
    assert_bits(staged[1], flat[100:200].view(10, 10))
    assert_bits(staged[2], flat[5000:5001])
    assert not staged[1].requires_grad


# ---- How many copies ----------------------------------------------------------------------------


def test_views_that_fill_one_buffer_are_one_copy_in_whatever_order_they_come(
    device: FakeCuda, seed: int
) -> None:
    flat = torch.arange(MIB, dtype=torch.int32)
    on_device = device.device_tensor(flat)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(seed)).tolist()
    staged = stage_tensors([on_device[i * 16 * KIB : (i + 1) * 16 * KIB] for i in order])
    for i, tensor in zip(order, staged, strict=True):
        assert_bits(tensor, flat[i * 16 * KIB : (i + 1) * 16 * KIB])
    counts = _C.device_counters()
    assert counts["copies_1d"] + counts["batch_pieces"] == 1
    assert counts["bytes_to_host"] == 4 * MIB
    assert (counts["kernels"], counts["copies_2d"]) == (0, 0)


def test_small_tensors_are_one_kernel_and_no_copy(device: FakeCuda) -> None:
    source = [torch.full((101 + 2 * i,), float(i)) for i in range(500)]
    staged = stage_tensors(device.segment(source))
    for found, wanted in zip(staged, source, strict=True):
        assert_bits(found, wanted)
    counts = _C.device_counters()
    assert counts["kernels"] == 1
    assert counts["kernel_pieces"] == 500
    assert counts["copies_1d"] + counts["batches"] + counts["copies_2d"] == 0
    assert counts["events_recorded"] == 2  # the caller's stream, and the copies' end


TABLE_PIECES = 11_776  # of one table of the kernel, 512 KiB


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [TABLE_PIECES, TABLE_PIECES + 1, 2 * TABLE_PIECES + 1])
def test_overlapped_snapshot_of_many_small_tensors_waits_for_none_of_its_launches(
    device: FakeCuda, pieces: int
) -> None:
    device.set_pace(HELD)  # whoever waits, or asks, makes it run
    flat, before = torch.arange(2 * pieces, dtype=torch.int16), device.count("pinned_bytes")
    on_device = device.device_tensor(flat)
    _, guard = stage_guarded([on_device[2 * i : 2 * i + 1] for i in range(pieces)])
    tables = -(-pieces // TABLE_PIECES)
    assert device.count("cuEventQuery") == 0
    assert _C.device_counters()["kernels"] == tables
    (arena,) = process_pool()._arenas
    assert device.count("pinned_bytes") - before == arena.nbytes + tables * 512 * KIB
    guard.finish()
    assert device.count("pinned_bytes") - before == arena.nbytes


def test_tables_of_a_snapshot_are_bounded_and_more_pieces_wait_for_them(
    device: FakeCuda,
) -> None:
    before = device.count("pinned_bytes")
    boxes = 64 * 256 + 1  # a table has room for the shapes of 256
    flat = torch.arange(6 * boxes, dtype=torch.int32).to(torch.uint8)
    on_device = device.device_tensor(flat)
    views = [(6 * i, on_device[6 * i : 6 * i + 6 : 2]) for i in range(boxes)]
    for (begin, _), found in zip(views, stage_tensors([v for _, v in views]), strict=True):
        assert found.tolist() == flat[begin : begin + 6 : 2].tolist()
    assert _C.device_counters()["kernels"] == 65
    taken_bytes = device.count("pinned_peak_bytes") - before
    assert taken_bytes == process_pool().nbytes + 64 * 512 * KIB


def test_large_tensors_are_one_batch_and_tied_ones_are_copied_once(device: FakeCuda) -> None:
    source = [torch.randn(64 * KIB + i) for i in range(20)]
    stage_tensors([device.device_tensor(tensor) for tensor in source])
    counts = _C.device_counters()
    assert (counts["batches"], counts["batch_pieces"], counts["copies_1d"]) == (1, 20, 0)
    _C.clear_device_counters()
    weight = device.device_tensor(torch.randn(MIB))
    staged = stage_tensors([weight, weight.view(1024, -1), weight, torch.nn.Parameter(weight)])
    assert len({tensor.data_ptr() for tensor in staged}) == 2  # in one form, and in the other
    assert _C.device_counters()["bytes_to_host"] == 2 * 4 * MIB


def test_snapshot_of_a_device_waits_for_events_and_never_for_a_device(device: FakeCuda) -> None:
    before = device.counts()
    stage_tensors([device.device_tensor(torch.randn(MIB)), device.device_tensor(torch.ones(5), 1)])
    after = device.counts()
    for name in ("cuCtxSynchronize", "cuStreamSynchronize", "cuMemAlloc", "cuMemFree"):
        assert after.get(name, 0) == before.get(name, 0), name


def test_snapshot_of_host_tensors_makes_no_call_of_the_driver(device: FakeCuda) -> None:
    device.clear_counts()
    stage_tensors([torch.randn(MIB), torch.ones(5)])
    calls = {name: n for name, n in device.counts().items() if name.startswith("cu") and n}
    assert calls == {}


# ---- The arena ----------------------------------------------------------------------------------


def test_arena_is_registered_once_by_a_prewarm_and_released_by_close(device: FakeCuda) -> None:
    source, before = device.device_tensor(torch.randn(MIB)), left(device)["registrations"]
    DcpxStager(is_shared=False).prewarm({"w": source})
    for _ in range(3):
        stage_tensors([source])
    assert (device.count("cuMemHostRegister"), process_pool().count) == (1, 1)
    assert left(device)["registrations"] == before + 1
    process_pool().close()
    assert left(device)["registrations"] == before


def test_arena_that_cannot_be_registered_is_used_as_it_is_and_one_warning_says_so(
    device: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    device.limit_pinned(0)
    source = torch.randn(MIB)
    with caplog.at_level(logging.WARNING, "torch_dcpx"):
        for _ in range(3):
            staged = stage_tensors([device.device_tensor(source)])
            assert_bits(staged[0], source)
            del staged
            process_pool().close()
    assert len(caplog.records) == 1
    assert "cuMemHostRegister" in caplog.text


def test_arena_of_a_shared_snapshot_is_registered_too(device: FakeCuda) -> None:
    source = torch.randn(MIB)
    staged = DcpxStager().stage({"w": device.device_tensor(source)})
    assert_bits(staged["w"], source)
    assert staged.arena is not None
    assert staged.arena.pinned_bytes == staged.arena.nbytes


# ---- Order --------------------------------------------------------------------------------------


def check_source_event(device: FakeCuda) -> None:
    """Stages what the caller's stream has not computed yet."""
    stream = device.make_stream()
    device.current_streams[0] = stream
    source = [torch.zeros(20_000), torch.zeros(10)]
    tensors = [device.device_tensor(tensor) for tensor in source]
    wanted = [torch.randn(20_000), torch.randn(10)]
    for tensor, data in zip(tensors, wanted, strict=True):
        device.stream_write(tensor, data, stream)
    for found, data in zip(stage_tensors(tensors), wanted, strict=True):
        assert_bits(found, data)


def test_what_the_callers_stream_still_computes_is_what_is_staged(
    device: FakeCuda, seed: int
) -> None:
    for number in range(20):
        device.reset(seed + number)
        check_source_event(device)
    device.set_pace(HELD)
    check_source_event(device)


@pytest.mark.parametrize("stream", [0, 1, 2], ids=["default", "legacy", "per_thread"])
def test_what_a_default_stream_still_computes_is_what_is_staged(
    device: FakeCuda, stream: int
) -> None:
    device.set_pace(HELD)
    device.current_streams[0] = stream
    tensor, wanted = device.device_tensor(torch.zeros(20_000)), torch.randn(20_000)
    device.stream_write(tensor, wanted, stream)
    (staged,), guard = stage_guarded([tensor])
    guard.wait()
    device.stream_write(tensor, torch.zeros(20_000), stream)
    device.stream_sync(stream)
    guard.finish()
    assert_bits(staged, wanted)


@pytest.mark.slow
def test_source_event_holds_over_a_thousand_seeds(device: FakeCuda) -> None:
    for number in range(points(1000)):
        device.reset(number)
        check_source_event(device)


def test_capture_in_progress_is_refused_and_not_broken(device: FakeCuda) -> None:
    stream = device.make_stream()
    device.current_streams[0] = stream
    tensor = device.device_tensor(torch.ones(1000))
    device.set_capturing(stream)
    with pytest.raises(StagingError, match="captur"):
        stage_tensors([tensor])
    assert not device.is_capture_broken(stream)
    device.current_streams[0] = device.make_stream()  # the capture goes on beside the snapshot
    assert_bits(stage_tensors([tensor])[0], torch.ones(1000))
    assert not device.is_capture_broken(stream)


def test_ordinals_are_asked_of_torch_where_the_driver_is_there(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor: Any = types.SimpleNamespace(is_cuda=True, get_device=lambda: 5)
    try:
        _C.forget_device_driver()
        device_memory._is_served.cache_clear()
        assert device_memory.ordinal_of(tensor) == 5
        assert device_memory.ordinal_of(torch.ones(3)) == -1
        monkeypatch.setenv("DCPX_CUDA_DRIVER", "/no/such/driver.so")
        _C.forget_device_driver()
        device_memory._is_served.cache_clear()
        assert device_memory.ordinal_of(tensor) == -1
    finally:
        _C.forget_device_driver()
        device_memory._is_served.cache_clear()


def test_streams_for_another_thread_are_named_or_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[int] = []

    def current_stream(device: int) -> Any:
        return types.SimpleNamespace(
            cuda_stream=(0, 2, 777)[device], synchronize=lambda: waited.append(device)
        )

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert device_memory.streams_in_use() == {0: 0, 1: 2, 2: 777}
    assert waited == [1]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert device_memory.streams_in_use() == {}
