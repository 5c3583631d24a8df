"""A save that does not fit: a typed error with numbers, no leftovers, the old checkpoint whole."""

from __future__ import annotations

import errno
import gc
import os
import re
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.leaks import Held, grown_each_time
from support.machine import seconds, spread, stride
from support.saves import assert_loads, assert_whole, files_in, load, raises_one, save
from torch.distributed.checkpoint.api import CheckpointException

from torch_dcpx import _C, DcpxWriter, StorageError, WriteOptions

DISK_BYTES = 24 << 20


def state_of(seed: int, nbytes: int = 10 << 20) -> dict[str, Any]:
    """Two of these do not fit on the disk, one does."""
    g = torch.Generator().manual_seed(seed)
    return {"large": torch.randn(nbytes // 4, generator=g), "step": seed}


def mount(kind: str, folder: Path) -> Path:
    where = folder / "disk"
    where.mkdir()
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(where)]
    else:
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(DISK_BYTES)
        subprocess.run([f"mkfs.{kind}", "-q", "-m0", str(image)], check=True, timeout=seconds(60))
        command = ["mount", "-o", "loop", str(image), str(where)]
    subprocess.run(command, check=True, timeout=seconds(60))
    return where


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    where = mount(request.param, tmp_path)
    try:
        yield where
    finally:
        gc.collect()  # what failed errors refer to
        subprocess.run(["umount", str(where)], check=True, timeout=seconds(60))


def free_bytes(where: Path) -> int:
    status = os.statvfs(where)
    return status.f_bavail * status.f_frsize


@pytest.mark.root
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("single_file", [True, False], ids=["one file", "a file each"])
@pytest.mark.parametrize("direct_io", [True, False], ids=["direct", "buffered"])
def test_resave_that_does_not_fit_names_needed_and_free_bytes_and_keeps_the_old(
    disk: Path, direct_io: bool, single_file: bool
) -> None:
    ckpt = disk / "ckpt"
    save(state_of(0), ckpt)
    before, free = files_in(ckpt), free_bytes(disk)
    big = state_of(1, nbytes=18 << 20)
    writer = DcpxWriter(
        ckpt, single_file_per_rank=single_file, options=WriteOptions(direct_io=direct_io)
    )
    with pytest.raises(CheckpointException) as caught:
        dcp.save(big, storage_writer=writer, no_dist=True)
    error = caught.value.failures[0][0]
    assert type(error) is StorageError, repr(error)
    assert error.errno == errno.ENOSPC
    assert Path(error.path).parent == ckpt
    numbers = re.search(r"needed (\d+) B, free (\d+) B", str(error))
    assert numbers is not None, str(error)
    # Of several files any may be the one that finds the disk full; its own bytes are named.
    assert (18 << 20 if single_file else 1) <= int(numbers[1]) <= 19 << 20
    assert int(numbers[2]) <= free
    # Nothing is left, and nothing of it is still held open, though the error is: room for a save.
    assert files_in(ckpt) == before
    assert free_bytes(disk) >= free - (64 << 10)
    assert_loads(state_of(0), ckpt)
    save({"small": torch.arange(9)}, ckpt)
    assert_whole({"small": torch.arange(9)}, ckpt)


def fill(path: Path, spare: int) -> None:
    """Makes a file that leaves `spare` bytes, or a little more where the file system takes some."""
    nbytes = free_bytes(path.parent) - spare
    with path.open("wb") as file:
        while nbytes > 0:
            try:
                os.posix_fallocate(file.fileno(), 0, nbytes)
                return
            except OSError:
                nbytes -= 16 << 10


@pytest.mark.root
@pytest.mark.usefixtures("no_leaks")
def test_every_size_around_the_last_free_byte_is_saved_whole_or_refused_whole(
    disk: Path, seed: int
) -> None:
    """The disk fills up at the data, the footer, the lock's note, or `.metadata`."""
    ckpt = disk / "ckpt"
    save(state_of(0, 1 << 20), ckpt)
    filler = disk / "filler"
    current, refused, saved = state_of(0, 1 << 20), 0, 0
    for spare in (size << 10 for size in (*spread(1176, seed, 24), 1176)):
        filler.unlink(missing_ok=True)
        fill(filler, spare)
        state = state_of(spare, 1 << 20)
        before = files_in(ckpt)
        try:
            save(state, ckpt)
            current, saved = state, saved + 1
        except CheckpointException as failure:
            error = failure.failures[0][0]
            assert type(error) is StorageError, repr(error)
            assert error.errno == errno.ENOSPC
            assert files_in(ckpt) == before
            refused += 1
        filler.unlink()
        assert_whole(current, ckpt)
    assert refused > 20 // stride(1)
    assert saved > 1 // stride(1)
    print(f"{refused} refused, {saved} saved, 0 bad")


@pytest.mark.parametrize("call", ["save", "load"])
def test_error_that_is_kept_keeps_nothing_open(tmp_path: Path, call: str) -> None:
    """So that a file system can be unmounted, or its space used, while somebody has the error."""
    state = state_of(0, nbytes=1 << 20)
    save(state, tmp_path)
    _C.arm_fault(3, errno.EIO)
    try:
        with pytest.raises(CheckpointException) as caught:
            save(state, tmp_path) if call == "save" else load(state, tmp_path)
    finally:
        _C.disarm_fault()
    targets = [
        os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()
    ]
    assert [target for target in targets if target.startswith(str(tmp_path))] == []
    assert caught.value.failures


# ---- A limit on the size of files, at the data and at the metadata -------------------------------


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Limits what this process may write; Python ignores the signal that comes with it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def many(seed: int) -> dict[str, Any]:
    return {f"layer{i}": torch.full((3, i), seed) for i in range(200)}


def one(seed: int) -> dict[str, Any]:
    return {"large": torch.full((1 << 20,), seed), "step": seed}


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize(
    ("made", "nbytes", "kwargs", "failing"),
    [
        (one, 1 << 20, {}, "__0_0"),
        (one, 1 << 20, {"options": WriteOptions(direct_io=False)}, "__0_0"),
        (one, 1 << 20, {"options": WriteOptions(files_per_rank=2)}, "__0_"),
        # Files of one item each are small; what names them all is not.
        (many, 16 << 10, {"single_file_per_rank": False, "sync_files": False}, ".metadata"),
    ],
    ids=["one file", "buffered", "two files", "metadata"],
)
@grown_each_time
def test_file_that_may_not_grow_fails_the_save_with_numbers_and_keeps_the_old(
    tmp_path: Path, made: Any, nbytes: int, kwargs: dict[str, Any], failing: str
) -> None:
    save(made(0), tmp_path, **kwargs)
    before = files_in(tmp_path)

    def fail() -> Any:
        with files_of_at_most(nbytes), raises_one(StorageError) as raised:
            save(made(1), tmp_path, **kwargs)
        # Its traceback holds the frames of the save, and they all that the save had.
        raised.error.__cause__ = raised.error.__context__ = None
        return raised.error.with_traceback(None)

    fail()
    held = Held()
    error = fail()
    held.assert_no_file_or_thread_more()
    held.assert_no_memory_more()
    assert error.errno == errno.EFBIG
    assert Path(error.path).name.startswith(failing)
    assert error.offset is not None
    assert f"{error.nbytes} B at offset {error.offset} of '{error.path}'" in str(error)
    assert re.search(rf"\(needed {error.nbytes} B, free \d+ B; .* room for both\)", str(error))
    assert files_in(tmp_path) == before
    save(made(2), tmp_path, **kwargs)
    assert_whole(made(2), tmp_path)
