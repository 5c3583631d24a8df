"""Exports of what is stored: windows that are read while others are written, and their errors."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from export_cases import assert_artifact, mixed_state
from support.machine import seconds
from support.warm import warm_parent

import torch_dcpx as dcpx
from torch_dcpx import _C, WriteOptions
from torch_dcpx.artifacts.files import open_job
from torch_dcpx.artifacts.rows import BackgroundRows, ExportRows, PieceMemory, Target
from torch_dcpx.reader import files as read_files
from torch_dcpx.storage.directory import Directory

TIGHT = WriteOptions(host_memory_bytes=1 << 20, slot_bytes=256 << 10)


def state_of_many_windows() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(4)
    large = torch.randn(1700, 1001, generator=g)  # pieces of 64 KiB, windows of 256 KiB
    return {**mixed_state(), "large": large, "turned.large": torch.randn(900, 800, generator=g).T}


@pytest.mark.parametrize("file_format", ["safetensors", "torch"])
@pytest.mark.parametrize("direct_io", [True, False])
def test_many_windows_of_a_stored_checkpoint_are_exported_bit_for_bit(
    tmp_path: Path, file_format: Any, direct_io: bool
) -> None:
    state = state_of_many_windows()
    dcpx.save(state, tmp_path / "ckpt", no_dist=True)
    options = WriteOptions(
        host_memory_bytes=1 << 20, slot_bytes=256 << 10, direct_io=direct_io, durability="none"
    )
    report = dcpx.export(
        tmp_path / "ckpt", tmp_path / "out", format=file_format, no_dist=True, options=options
    )
    assert report.written_bytes == sum(t.numel() * t.element_size() for t in state.values())
    if file_format == "safetensors":
        assert_artifact(tmp_path / "out", state)
        return
    found = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_small_tensors_are_read_many_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"t{i}": torch.full((256,), float(i)) for i in range(300)}
    dcpx.save(state, tmp_path / "ckpt", no_dist=True)
    calls = []
    read = read_files._Window._read

    def counted(self: Any, reads: Any, devices: Any) -> None:
        calls.append(len(reads))
        read(self, reads, devices)

    monkeypatch.setattr(read_files._Window, "_read", counted)
    dcpx.export(tmp_path / "ckpt", tmp_path / "out", no_dist=True)
    assert calls == [300]
    assert_artifact(tmp_path / "out", state)


def test_error_of_either_side_is_raised_and_leaves_nothing(tmp_path: Path) -> None:
    dcpx.save(state_of_many_windows(), tmp_path / "ckpt", no_dist=True)
    for kind, nth in (("pwrite", 0), ("pwrite", 9), ("pread", 0), ("pread", 9)):
        _C.arm_fault(nth, errno.EIO, kind)
        try:
            with pytest.raises(dcpx.StorageError, match="Input/output error"):
                dcpx.export(tmp_path / "ckpt", tmp_path / "out", no_dist=True, options=TIGHT)
        finally:
            _C.disarm_fault()
        assert not list((tmp_path / "out").glob("*")), (kind, nth)


def test_memory_that_is_under_way_is_not_filled_again(tmp_path: Path) -> None:
    memory = PieceMemory(1 << 20)
    first = memory.take((1 << 18,), torch.float32)
    second = memory.take((1 << 17,), torch.float64)
    assert first.data_ptr() != second.data_ptr() and first.data_ptr() % 4096 == 0
    memory.give_back([first])
    assert memory.take((4, 1 << 17), torch.int16).data_ptr() == first.data_ptr()
    small = memory.take((10,), torch.uint8)
    memory.give_back([small, small])  # not of here: nothing to give back
    assert memory.take((1 << 20,), torch.uint8).data_ptr() not in (
        first.data_ptr(), second.data_ptr(), small.data_ptr(),
    )  # fmt: skip


def test_pieces_of_other_sizes_take_no_more_than_was_in_use_at_one_time() -> None:
    memory = PieceMemory(1 << 20)
    for round_ in range(4):
        for sizes in ([260 << 10] * 16, [1 << 20] * 4, [700_001] * 6):  # four MiB each
            lent = [memory.take((nbytes - round_,), torch.uint8) for nbytes in sizes]
            held = [*memory._free, *memory._lent.values()]
            assert sum(piece.numel() for piece in held) <= 4.6 * (1 << 20)
            memory.give_back(lent)


class SlowRows:
    """Rows whose writing ends when it is told to."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.has_ended = False

    def add(self, *_: Any) -> None:
        pass

    def leave(self) -> None:
        pass

    def flush(self) -> None:
        self.has_begun.set()
        self.may_end.wait(seconds(120))
        self.has_ended = True


def write_one_batch(rows: Any) -> None:
    with BackgroundRows(rows, 1 << 20) as written:
        copy = written.memory((4,), torch.float32)
        written.add_copy(copy, copy, Target(0, 0, 16, -1))
        written.finish()


def interrupt_twice() -> None:
    """In a process of its own: a signal that comes late would end all tests."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    rows, main, has_left = SlowRows(), threading.get_ident(), threading.Event()

    def is_leaving() -> bool:
        frame = sys._current_frames().get(main)
        while frame is not None and frame.f_code is not BackgroundRows.__exit__.__code__:
            frame = frame.f_back
        return frame is not None

    def interrupt() -> None:
        rows.has_begun.wait(seconds(120))
        # Again and again: one that comes just before a thread sleeps in a lock does not wake it.
        while not is_leaving() and not has_left.is_set():
            signal.pthread_kill(main, signal.SIGINT)
            end = time.monotonic() + 2
            while time.monotonic() < end and not is_leaving() and not has_left.wait(0.01):
                pass
        time.sleep(0.1)  # into its wait
        if not has_left.is_set():
            signal.pthread_kill(main, signal.SIGINT)
        has_left.wait(0.3)  # it must not, with the batch under way
        rows.may_end.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            write_one_batch(rows)
        assert rows.has_ended
        print("has ended")
    finally:
        has_left.set()
        rows.may_end.set()
        thread.join(seconds(120))


def test_batch_under_way_has_ended_when_it_is_left_after_two_interruptions() -> None:
    command = ["-c", "import test_export_stored as t; t.interrupt_twice()"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = warm_parent().run(command, env=environment, timeout_s=seconds(900))
    assert (result.returncode, result.stdout) == (0, "has ended\n"), result.stderr


def test_windows_use_the_memory_of_the_one_before_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcpx.save(state_of_many_windows(), tmp_path / "ckpt", no_dist=True)
    fresh = []
    make = PieceMemory._fresh
    monkeypatch.setattr(PieceMemory, "_fresh", lambda *a: fresh.append(1) or make(*a))
    dcpx.export(tmp_path / "ckpt", tmp_path / "out", no_dist=True, options=TIGHT)
    # Two windows of four pieces, one that is asked for early, and the ends of tensors.
    assert 2 < len(fresh) <= 16


def written(path: Path, options: WriteOptions, state: dict[str, torch.Tensor]) -> dict[str, int]:
    """Writes tensors one behind the other, from byte 777 on; returns the job's counts."""
    total = sum(tensor.nbytes for tensor in state.values())
    with Directory(path) as directory:
        job = open_job(directory, options)
        job.add_file("f", 777 + total + 3, is_new=True)
        rows, at = ExportRows(job, 1 << 20), 777
        for tensor in state.values():
            target = Target(0, at, tensor.nbytes, -1)
            rows.add(tensor, torch.empty_like(tensor, device="meta"), target)
            at += tensor.nbytes
        rows.flush()
        job.finish(is_whole=True)
    return job.report()


def test_whole_pages_of_long_runs_go_past_the_page_cache(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(8)
    state = {
        "long": torch.randn(1_000_003, generator=g),
        "short": torch.randn(1000, generator=g),
        "turned": torch.randn(900, 701, generator=g),
    }
    expected = b"".join(t.numpy().tobytes() for t in state.values())
    for direct_io in (True, False):
        folder = tmp_path / str(direct_io)
        folder.mkdir()
        found = written(folder, WriteOptions(direct_io=direct_io), state)
        assert (folder / "f").read_bytes() == bytes(777) + expected + bytes(3)
        long_bytes = state["long"].nbytes + state["turned"].nbytes
        if not direct_io or not _has_direct(tmp_path):
            assert found["direct_bytes"] == 0
        else:
            assert long_bytes - 8 * 8192 <= found["direct_bytes"] < long_bytes
        assert found["written_bytes"] == len(expected)


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.EFAULT])
def test_memory_that_takes_no_direct_writes_goes_through_the_page_cache(
    tmp_path: Path, refusal: int
) -> None:
    if not _has_direct(tmp_path):
        pytest.skip("no direct I/O here")
    state = {"long": torch.randn(1_000_003, generator=torch.Generator().manual_seed(8))}
    for nth in (1, 2):  # the first is the cached end of the run
        _C.arm_fault(nth, refusal, "pwrite")
        try:
            (tmp_path / str(nth)).mkdir()
            written(tmp_path / str(nth), WriteOptions(workers=1), state)
        finally:
            _C.disarm_fault()
        found = (tmp_path / str(nth) / "f").read_bytes()
        assert found == bytes(777) + state["long"].numpy().tobytes() + bytes(3)


def _has_direct(path: Path) -> bool:
    try:
        os.close(os.open(path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("refusal", [errno.EOPNOTSUPP, errno.EPERM])
def test_file_has_its_size_before_others_write_where_room_cannot_be_reserved(
    tmp_path: Path, refusal: int
) -> None:
    with Directory(tmp_path) as directory:
        job = open_job(directory, WriteOptions())
        try:
            for name, nbytes in (("f", 12_345), ("g", 0)):
                _C.arm_fault(0, refusal, "fallocate")
                job.add_file(name, nbytes, is_new=True)
                assert (tmp_path / name).stat().st_size == nbytes
            _C.arm_fault(0, refusal, "fallocate")
            with pytest.raises(dcpx.StorageError, match="ftruncate"):
                job.add_file("h", (1 << 63) - 1, is_new=True)  # more than any file system takes
        finally:
            _C.disarm_fault()
            job.abandon()
