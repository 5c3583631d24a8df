"""Room that ends in the middle of a save: quotas of GlusterFS, btrfs and XFS, a small ext4."""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dfs.fixture import on
from dfs.gluster import Gluster
from dfs.system import System, run, unmount_all

import torch_dcpx as dcpx

MIB = 1 << 20
Limit = Callable[[int], None]


def saves_until_full_and_goes_on(root: Path, limit: Limit, codes: tuple[int, ...]) -> None:
    """Saves what has room, then what has none; then makes room, and saves it."""
    import torch

    def state(mib: int, value: int) -> dict[str, object]:
        return {"w": torch.full((mib * MIB // 4,), float(value)), "v": value}

    def loaded(mib: int) -> object:
        found = state(mib, -1)
        dcpx.load(found, root / "one", no_dist=True)
        tensor = found["w"]
        assert isinstance(tensor, torch.Tensor) and bool((tensor == found["v"]).all())
        return found["v"]

    limit(48)
    dcpx.save(state(16, 1), root / "one", no_dist=True)
    with pytest.raises(dcpx.StorageError) as caught:
        dcpx.save(state(64, 2), root / "one", no_dist=True)
    assert caught.value.errno in codes, caught.value
    assert str(root) in str(caught.value)
    if caught.value.errno == errno.EDQUOT:
        # The free room of the whole file system says nothing of a quota.
        assert not re.search(r"free \d", str(caught.value)), caught.value
    assert loaded(16) == 1
    limit(200)
    dcpx.save(state(64, 3), root / "one", no_dist=True)
    assert loaded(64) == 3


@on("gluster")
def test_a_quota_of_gluster_ends_a_save_and_the_next_one_with_room_works(
    system: System, place: str
) -> None:
    assert isinstance(system, Gluster)
    (system.mounts[0] / place).mkdir()
    try:
        saves_until_full_and_goes_on(
            system.mounts[0] / place, lambda mib: system.limit(place, mib * MIB), (errno.EDQUOT,)
        )
    finally:
        system.limit(place, None)


@contextlib.contextmanager
def image(folder: Path, make: list[str], options: str) -> Iterator[Path]:
    """Mounts a file system that lies in a file."""
    if shutil.which(make[0]) is None:
        pytest.skip(f"{make[0]} is missing")
    file, mount = folder / "image", folder / "mount"
    with file.open("wb") as new:
        new.truncate(1 << 30)
    mount.mkdir()
    run(*make, file)
    if "wrong fs type" in run("mount", "-o", f"loop,{options}", file, mount, quiet=True):
        pytest.skip(f"this kernel has no {make[0]} with {options}")
    try:
        yield mount
    finally:
        unmount_all(mount)


def test_a_qgroup_of_btrfs_ends_a_save_and_the_next_one_with_room_works(tmp_path: Path) -> None:
    with image(tmp_path, ["mkfs.btrfs", "-q", "-f"], "rw") as mount:
        run("btrfs", "quota", "enable", mount)
        run("btrfs", "subvolume", "create", mount / "part")

        def limit(mib: int) -> None:
            run("btrfs", "qgroup", "limit", f"{mib}M", mount / "part")

        saves_until_full_and_goes_on(mount / "part", limit, (errno.EDQUOT,))


def test_a_project_quota_of_xfs_ends_a_save_and_the_next_one_with_room_works(
    tmp_path: Path,
) -> None:
    with image(tmp_path, ["mkfs.xfs", "-q", "-f"], "prjquota") as mount:
        (mount / "part").mkdir()
        run("xfs_quota", "-x", "-c", f"project -s -p {mount}/part 7", mount)

        def limit(mib: int) -> None:
            run("xfs_quota", "-x", "-c", f"limit -p bhard={mib}m 7", mount)

        saves_until_full_and_goes_on(mount / "part", limit, (errno.EDQUOT, errno.ENOSPC))


def test_a_small_ext4_that_is_full_ends_a_save_and_the_next_one_with_room_works(
    tmp_path: Path,
) -> None:
    with image(tmp_path, ["mkfs.ext4", "-q", "-m", "0"], "rw") as mount:
        free = run("stat", "-f", "-c", "%a %S", mount).split()

        def limit(mib: int) -> None:
            (mount / "filler").unlink(missing_ok=True)
            room = int(free[0]) * int(free[1]) - mib * MIB
            run("fallocate", "-l", str(room), mount / "filler")

        saves_until_full_and_goes_on(mount, limit, (errno.ENOSPC,))
