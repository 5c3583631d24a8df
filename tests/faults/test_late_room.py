"""Room that lacks beneath the file system: a quota (btrfs), a thin volume (ext4 in a sparse file).

All ranks' save fails with numbers, what was there is whole, and with room the next one works.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.machine import seconds
from support.ranks import run_ranks

WORKER = Path(__file__).with_name("late_room_worker.py")
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


@contextmanager
def quota(folder: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Yields a directory of 64 MiB, and what gives it more."""
    if shutil.which("mkfs.btrfs") is None:
        pytest.skip("mkfs.btrfs is missing: apt-get install btrfs-progs")
    image, where = folder / "image", folder / "disk"
    with image.open("wb") as file:
        file.truncate(1 << 30)
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
        image = pool / "image"
        with image.open("wb") as file:
            file.truncate(300 << 20)
        # Its tables lie at the front and have room, so that only data meets the want of it.
        run("mkfs.ext4", "-q", "-m0", "-N64", "-O", "^has_journal", "-E", "nodiscard", image)
        run("dd", f"if={image}", f"of={image}", "bs=1M", "count=4", "conv=notrunc")
        with mounted(image, where, "ext4"):
            yield where, lambda: run("mount", "-o", "remount,size=400m", pool)
    finally:
        run("umount", pool)


@pytest.mark.parametrize(("limited", "code"), [(quota, "EDQUOT"), (thin, "ENOSPC")])
def test_want_of_room_beneath_the_file_system_fails_all_ranks_and_keeps_the_old(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limited: Callable[[Path], Iterator[tuple[Path, Callable[[], None]]]],
    code: str,
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{WORKER.parents[1]}:{os.environ.get('PYTHONPATH', '')}")
    with limited(tmp_path) as (where, give_room):

        def wait_and_give() -> None:
            while not all((where / f"seen.{rank}").exists() for rank in (0, 1)):
                if is_over.wait(0.01):
                    return
            give_room()
            (where / "room").touch()

        is_over = threading.Event()
        giving = threading.Thread(target=wait_and_give)
        giving.start()
        try:
            run_ranks(WORKER, 2, str(where), code)
        finally:
            is_over.set()
            giving.join(seconds(60))
