"""Saves and loads in processes with little: the driver of test_limits.py. Prints a table.

python limits_worker.py DIRECTORY GROUP SEED    (0: every case; else a sample by it)
"""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from forks import Ended, Table, alone, in_child
from refused_calls import DIRECT_IO, NUMBERS, Refused, refuse
from support.machine import points, seconds
from support.states import blank_like
from ways import LOADS, SAVES, is_same, loaded, which

from torch_dcpx import ReadOptions, WriteOptions

_T = TypeVar("_T")
Setting = Callable[[], Any]


def state_of(seed: int, numel: int = 300_000) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(numel, generator=generator),
        "view": torch.randn(60, 50, generator=generator).t(),
        **{f"small{i}": torch.randn(10, generator=generator) for i in range(20)},
        "step": seed,
        "objects": {"key": [1, 2]},
    }


OLD, NEW = state_of(0), state_of(1)
# Threads, windows and O_DIRECT, whatever the machine's cores and the state's size.
OPTIONS = WriteOptions(workers=2, slot_bytes=256 << 10)


class Cases:
    """Runs each way to save and to load in a child of its own, with a setting applied to it."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.table = Table()
        self._random = random.Random(seed) if seed else None

    def some(self, values: Iterable[_T], most: int) -> list[_T]:
        """Returns all values, or `most` that the seed chooses, in their order."""
        all_of_them = list(values)
        if self._random is None or most >= len(all_of_them):
            return all_of_them
        return [all_of_them[i] for i in sorted(self._random.sample(range(len(all_of_them)), most))]

    def saves(self, group: str, name: str, setting: Setting, *, may_fail: bool) -> None:
        for way, save in self.some(SAVES.items(), 2):
            path = self.root / "saves"
            shutil.rmtree(path, ignore_errors=True)
            SAVES["dcp.save"](OLD, path, None)

            def body(save: Any = save, path: Path = path) -> None:
                setting()
                save(NEW, path, OPTIONS)

            ended = in_child(body)
            self.table.add(group, f"{way}, {name}", self.bad_save(ended, path, may_fail=may_fail))

    def bad_save(self, ended: Ended, path: Path, *, may_fail: bool) -> str | None:
        there = which(path, OLD, NEW)
        if "value" in ended.said:
            return None if there == "new" else f"returned, and left {there}"
        if not may_fail or not ended.said.get("is_typed"):
            return str(ended)
        if there not in ("old", "new"):
            return f"raised, and left {there}"
        SAVES["dcp.save"](NEW, path, None)  # nothing that it left is in the way
        if which(path, OLD, NEW) != "new":
            return "the save after it is not whole"
        files = list(path.glob("*.distcp"))
        return None if len(files) == 1 else f"leftovers stay: {files}"

    def loads(self, group: str, name: str, setting: Setting, *, may_fail: bool) -> None:
        path = self.root / "loads"
        shutil.rmtree(path, ignore_errors=True)
        SAVES["dcp.save"](OLD, path, None)
        for way, load in self.some(LOADS.items(), 1):

            def body(load: Any = load) -> bool:
                target = blank_like(OLD)
                setting()
                load(target, path, ReadOptions())
                return is_same(OLD, target)

            ended = in_child(body)
            is_right = ended.said.get("value") is True
            is_well = is_right or (may_fail and ended.said.get("is_typed"))
            self.table.add(group, f"{way}, {name}", None if is_well else str(ended))


def limit(which_limit: int, value: int) -> Setting:
    return lambda: resource.setrlimit(which_limit, (value, value))


def files(cases: Cases) -> None:
    for count in [*cases.some(range(8, 64), points(4)), 64]:
        setting = limit(resource.RLIMIT_NOFILE, count)
        for one in (cases.saves, cases.loads):
            one("ulimit -n", str(count), setting, may_fail=count < 64)


def memory(cases: Cases) -> None:
    """`ulimit -v` of what the process has and a little more: from nothing to all that it takes."""
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for more in [*cases.some(range(96), points(5)), 96]:
        setting = limit(resource.RLIMIT_AS, has + (more << 20))
        for one in (cases.saves, cases.loads):
            one("ulimit -v", f"{more} MiB more", setting, may_fail=more < 96)


REFUSALS: dict[str, list[Refused]] = {
    **{name: [Refused(name)] for name in NUMBERS if name not in ("openat", "fcntl", "ioctl")},
    "O_DIRECT": DIRECT_IO,
    "openat2, O_DIRECT, cachestat, mincore, fallocate, sync_file_range, flock, statx, preadv2": [
        *map(Refused, ("openat2", "cachestat", "mincore", "fallocate", "sync_file_range")),
        *map(Refused, ("flock", "statx", "preadv2", "madvise", "sched_getaffinity")),
        *DIRECT_IO,
    ],
}


def seccomp(cases: Cases) -> None:
    chosen = (errno.ENOSYS, errno.EPERM, errno.EINVAL)
    everything = list(REFUSALS.items())
    for name, calls in [*cases.some(everything[:-1], points(5)), everything[-1]]:
        for number in cases.some(chosen, 1):

            def setting(calls: list[Refused] = calls, number: int = number) -> None:
                refuse(calls, number)

            for one in (cases.saves, cases.loads):
                one("seccomp", f"{name}: {errno.errorcode[number]}", setting, may_fail=False)


def umask(cases: Cases) -> None:
    """Modes of files and directories are what stock gives them."""
    for mask in cases.some((0o000, 0o002, 0o022, 0o027, 0o077), 3):
        for way, save in cases.some(SAVES.items(), 2):
            base = cases.root / f"umask-{mask:o}-{way}"

            def body(base: Path = base, save: Any = save, mask: int = mask) -> list[str]:
                os.umask(mask)
                save(NEW, base / "ours" / "step", OPTIONS)
                (base / "stock").mkdir()
                stock = base / "stock" / "step"
                dcp.save(NEW, storage_writer=dcp.FileSystemWriter(stock), no_dist=True)
                pairs = [(stock, base / "ours"), (stock, base / "ours" / "step")]
                pairs += [(next(stock.glob("*.distcp")), p) for p in (base / "ours/step").iterdir()]
                return [str(p) for s, p in pairs if s.stat().st_mode != p.stat().st_mode]

            ended = in_child(body)
            is_well = ended.said.get("value") == []
            cases.table.add("umask", f"{way}, {mask:03o}", None if is_well else str(ended))


@contextmanager
def mounted(where: Path, *args: str) -> Iterator[Path]:
    where.mkdir(exist_ok=True)
    subprocess.run(["mount", *args, str(where)], check=True, timeout=seconds(60))
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True, timeout=seconds(60))


def read_only(cases: Cases) -> None:
    """A read-only mount: loads work, saves are refused (EROFS), nothing changes."""
    with mounted(cases.root / "disk", "-t", "tmpfs", "tmpfs") as disk:
        SAVES["dcp.save"](OLD, disk / "step", None)
        before = sorted(p.name for p in disk.rglob("*"))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=seconds(60))
        for way, load in LOADS.items():

            def body(load: Any = load) -> bool:
                target = blank_like(OLD)
                load(target, disk / "step", None)
                return is_same(OLD, target)

            ended = in_child(body)
            is_well = ended.said.get("value") is True
            cases.table.add("read-only", way, None if is_well else str(ended))
        for way, save in SAVES.items():
            for name in ("step", "new/step"):
                ended = in_child(lambda save=save, name=name: save(NEW, disk / name, OPTIONS))
                is_well = ended.said.get("is_typed") and ended.said.get("errno") == errno.EROFS
                cases.table.add("read-only", f"{way} to {name}", None if is_well else str(ended))
        is_same_as_before = before == sorted(p.name for p in disk.rglob("*"))
        cases.table.add("read-only", "what is there", None if is_same_as_before else "changed")


def full(cases: Cases) -> None:
    """Disks with room for the old checkpoint and less and less more: a page fewer a case."""
    page = resource.getpagesize()
    with mounted(cases.root / "disk", "-t", "tmpfs", "-o", f"size={1 << 30}", "tmpfs") as disk:
        SAVES["dcp.save"](OLD, disk / "step", OPTIONS)
        pages = os.statvfs(disk).f_blocks - os.statvfs(disk).f_bavail
    for more in cases.some(range(pages + 8), points(8)):
        for way, save in cases.some(SAVES.items(), 2):
            size = f"size={(pages + more) * page}"
            with mounted(cases.root / "disk", "-t", "tmpfs", "-o", size, "tmpfs") as disk:
                SAVES["dcp.save"](OLD, disk / "step", OPTIONS)
                path = disk / "step"
                ended = in_child(lambda save=save, path=path: save(NEW, path, OPTIONS))
                there = which(path, OLD, NEW)
                if "value" in ended.said:
                    is_well = there == "new"
                else:
                    is_well = bool(ended.said.get("is_typed")) and there == "old"
                    is_well &= ended.said.get("errno") == errno.ENOSPC
                    is_well &= len(list(path.iterdir())) == 3  # data, metadata, the lock
                case = f"{way}, {more} pages more"
                cases.table.add("full", case, None if is_well else f"{there}, {ended}")


GROUPS = {group.__name__: group for group in (files, memory, seccomp, umask, read_only, full)}


def main() -> None:
    alone()
    root, group, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    cases = Cases(root, seed)
    warm = root / "warm"
    for way in ("save", "dcp.save"):  # what is imported late, and no memory that is not inherited
        SAVES[way](OLD, warm, OPTIONS)
    for way in LOADS:
        assert is_same(OLD, loaded(way, OLD, warm))
    assert stat.S_ISDIR(warm.stat().st_mode)
    GROUPS[group](cases)
    cases.table.print()


if __name__ == "__main__":
    main()
