"""Room that lacks beneath the file system: a quota (btrfs), a thin volume (ext4 in a sparse file).

All ranks' save fails with numbers, what was there is whole, and with room the next one works.
"""

from __future__ import annotations

import errno
import gc
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.machine import seconds
from support.rank_fixture import StartRanks

import torch_dcpx
from torch_dcpx import StorageError, WriteOptions

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.multirank]


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=seconds(60))


@contextmanager
def mounted(image: Path, where: Path, kind: str) -> Iterator[None]:
    where.mkdir()
    run("mount", "-t", kind, "-o", "loop", image, where)
    try:
        yield
    finally:
        gc.collect()
        run("umount", where)


def sparse(image: Path, nbytes: int) -> Path:
    with image.open("wb") as file:
        file.truncate(nbytes)
    return image


@contextmanager
def quota(folder: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Yields a directory of 64 MiB, and what gives it more."""
    if shutil.which("mkfs.btrfs") is None:
        pytest.skip("mkfs.btrfs is missing: apt-get install btrfs-progs")
    image, where = sparse(folder / "image", 1 << 30), folder / "disk"
    run("mkfs.btrfs", "-q", image)
    with mounted(image, where, "btrfs"):
        run("btrfs", "quota", "enable", where)
        run("btrfs", "subvolume", "create", where / "own")
        run("btrfs", "qgroup", "limit", "64M", where / "own")
        yield where / "own", lambda: run("btrfs", "qgroup", "limit", "none", where / "own")


@contextmanager
def thin(folder: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Yields a file system that believes in 300 MiB and has 40, and what gives it the rest."""
    pool, where = folder / "pool", folder / "disk"
    pool.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", pool)
    try:
        image = sparse(pool / "image", 300 << 20)
        # Its tables lie at the front and have room, so that only data meets the want of it.
        run("mkfs.ext4", "-q", "-m0", "-N64", "-O", "^has_journal", "-E", "nodiscard", image)
        run("dd", f"if={image}", f"of={image}", "bs=1M", "count=4", "conv=notrunc")
        with mounted(image, where, "ext4"):
            yield where, lambda: run("mount", "-o", "remount,size=400m", pool)
    finally:
        run("umount", pool)


# ---- On each rank -------------------------------------------------------------------------------


def state_of(seed: int, mebibytes: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed * 10 + dist.get_rank())
    return {f"rank{dist.get_rank()}": torch.randn(mebibytes << 18, generator=generator)}


def save(seed: int, mebibytes: int, path: Path) -> None:
    """Saves through the page cache: a full thin volume is then met at the fsync."""
    torch_dcpx.save(state_of(seed, mebibytes), path, options=WriteOptions(direct_io=False))


def assert_there(seed: int, mebibytes: int, path: Path) -> None:
    expected = state_of(seed, mebibytes)
    found = {name: torch.zeros_like(value) for name, value in expected.items()}
    torch_dcpx.load(found, path)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def every_rank_is_refused(path: Path, number: int) -> None:
    save(0, 4, path)
    dist.barrier()
    before = sorted(os.listdir(path))
    match = r"\d+ B at offset \d+ of .+: .+\(needed \d+ B, "
    with pytest.raises(StorageError, match=match) as caught:
        save(1, 40, path)
    text = str(caught.value)
    assert caught.value.errno == number, text
    assert ("a quota of" if number == errno.EDQUOT else " B, so full is a quota") in text, text
    assert number != errno.EDQUOT or "free" not in text, text
    dist.barrier()  # each removes its own
    assert sorted(os.listdir(path)) == before
    assert_there(0, 4, path)


def every_rank_saves(path: Path) -> None:
    save(2, 40, path)
    assert_there(2, 40, path)


@pytest.mark.parametrize(("limited", "number"), [(quota, errno.EDQUOT), (thin, errno.ENOSPC)])
def test_want_of_room_beneath_the_file_system_fails_all_ranks_and_keeps_the_old(
    tmp_path: Path, ranks: StartRanks, limited: Any, number: int
) -> None:
    with limited(tmp_path) as (where, give_room):
        started = ranks(2, anew=True)
        try:
            started(every_rank_is_refused, where / "ckpt", number)
            give_room()
            started(every_rank_saves, where / "ckpt")
        finally:
            started.close()
