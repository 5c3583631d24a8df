"""Little memory, few files, refused system calls, read-only disks, odd umasks.

Each case saves and loads in a process of its own, by an entry point: success, or a typed error
and the old checkpoint whole. DCPX_EVERY_POINT=1 runs every case instead of a sample by seed.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forks import Ended, Rows, assert_none_bad, in_child, run_alone
from refused_calls import DIRECT_IO, NUMBERS, Refused, refuse
from support.machine import EVERY_POINT, points, seconds
from support.states import blank_like
from ways import LOADS, SAVES, is_same, loaded, which

from torch_dcpx import WriteOptions

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
    """Runs ways to save and to load in a child each, with a setting applied to it."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.rows = root, Rows()
        self._random = random.Random(seed)

    def some(self, values: Iterable[_T], most: int) -> list[_T]:
        """Returns all values, or `most` that the seed chooses, in their order."""
        all_of_them = list(values)
        if EVERY_POINT or most >= len(all_of_them):
            return all_of_them
        return [all_of_them[i] for i in sorted(self._random.sample(range(len(all_of_them)), most))]

    def both(self, name: str, setting: Setting, *, may_fail: bool) -> None:
        for way in self.some(SAVES, 1):
            path = self.root / "saves"
            shutil.rmtree(path, ignore_errors=True)
            SAVES["dcp.save"](OLD, path, None)
            ended = in_child(lambda way=way, to=path: (setting(), SAVES[way](NEW, to, OPTIONS))[1])
            self.rows.append((f"{way}, {name}", bad_save(ended, path, may_fail=may_fail)))
        path = self.root / "loads"
        shutil.rmtree(path, ignore_errors=True)
        SAVES["dcp.save"](OLD, path, None)
        for way in self.some(LOADS, 1):
            ended = in_child(lambda way=way: loads_old(way, path, setting))
            is_well = ended.said.get("value") is True or (may_fail and ended.said.get("is_typed"))
            self.rows.append((f"{way}, {name}", ended.unless(is_well)))


def loads_old(way: str, path: Path, setting: Setting = lambda: None) -> bool:
    target = blank_like(OLD)
    setting()
    LOADS[way](target, path, None)
    return is_same(OLD, target)


def bad_save(ended: Ended, path: Path, *, may_fail: bool) -> str:
    there = which(path, OLD, NEW)
    if "value" in ended.said:
        return "" if there == "new" else f"returned, and left {there}"
    if not may_fail or not ended.said.get("is_typed"):
        return str(ended)
    if there not in ("old", "new"):
        return f"raised, and left {there}"
    SAVES["dcp.save"](NEW, path, None)  # nothing that it left is in the way
    if which(path, OLD, NEW) != "new":
        return "the save after it is not whole"
    files = list(path.glob("*.distcp"))
    return "" if len(files) == 1 else f"leftovers stay: {files}"


def limit(which_limit: int, value: int) -> Setting:
    return lambda: resource.setrlimit(which_limit, (value, value))


def files(cases: Cases) -> None:
    for count in [*cases.some(range(8, 64), points(4)), 64]:
        setting = limit(resource.RLIMIT_NOFILE, count)
        cases.both(f"ulimit -n {count}", setting, may_fail=count < 64)


def memory(cases: Cases) -> None:
    """`ulimit -v` of what the process has and a little more: from nothing to all that it takes."""
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for more in [*cases.some(range(96), points(5)), 96]:
        setting = limit(resource.RLIMIT_AS, has + (more << 20))
        cases.both(f"ulimit -v, {more} MiB more", setting, may_fail=more < 96)


ALL_AT_ONCE = [name for name in NUMBERS if name not in ("openat", "fcntl", "ioctl")]
REFUSALS: dict[str, list[Refused]] = {
    **{name: [Refused(name)] for name in ALL_AT_ONCE},
    "O_DIRECT": DIRECT_IO,
    "many": [
        *map(Refused, ("openat2", "cachestat", "mincore", "fallocate", "sync_file_range")),
        *map(Refused, ("flock", "statx", "preadv2", "madvise", "sched_getaffinity")),
        *DIRECT_IO,
    ],
}


def seccomp(cases: Cases) -> None:
    for name in [*cases.some(list(REFUSALS)[:-1], points(5)), "many"]:
        for number in cases.some((errno.ENOSYS, errno.EPERM, errno.EINVAL), 1):

            def setting(calls: list[Refused] = REFUSALS[name], number: int = number) -> None:
                refuse(calls, number)

            cases.both(f"{name} refused: {errno.errorcode[number]}", setting, may_fail=False)


def umask(cases: Cases) -> None:
    """Modes of files and directories are what stock gives them."""
    for mask in cases.some((0o000, 0o002, 0o022, 0o027, 0o077), 2):
        for way in cases.some(SAVES, 2):
            base = cases.root / f"umask-{mask:o}-{way}"

            def body(base: Path = base, way: str = way, mask: int = mask) -> list[str]:
                os.umask(mask)
                SAVES[way](NEW, base / "ours" / "step", OPTIONS)
                (base / "stock").mkdir()
                stock = base / "stock" / "step"
                dcp.save(NEW, storage_writer=dcp.FileSystemWriter(stock), no_dist=True)
                pairs = [(stock, base / "ours"), (stock, base / "ours" / "step")]
                pairs += [(next(stock.glob("*.distcp")), p) for p in (base / "ours/step").iterdir()]
                return [str(p) for s, p in pairs if s.stat().st_mode != p.stat().st_mode]

            ended = in_child(body)
            cases.rows.append((f"{way}, {mask:03o}", ended.unless(ended.said.get("value") == [])))


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
        for way in LOADS:
            ended = in_child(lambda way=way: loads_old(way, disk / "step"))
            cases.rows.append((way, ended.unless(ended.said.get("value") is True)))
        for way, save in SAVES.items():
            for name in ("step", "new/step"):
                ended = in_child(lambda save=save, name=name: save(NEW, disk / name, OPTIONS))
                is_well = ended.said.get("is_typed") and ended.said.get("errno") == errno.EROFS
                cases.rows.append((f"{way} to {name}", ended.unless(is_well)))
        assert before == sorted(p.name for p in disk.rglob("*"))


GROUPS = {group.__name__: group for group in (files, memory, seccomp, umask, read_only)}


def rows_of(root: Path, group: str, seed: int) -> Rows:
    for way in ("save", "dcp.save"):  # what is imported late, and no memory that is not inherited
        SAVES[way](OLD, root / "warm", OPTIONS)
    assert all(is_same(OLD, loaded(way, OLD, root / "warm")) for way in LOADS)
    cases = Cases(root, seed)
    GROUPS[group](cases)
    return cases.rows


def without_openat2(root: Path) -> Rows:
    SAVES["save"](OLD, root, OPTIONS)
    rows = []
    for number in (errno.ENOSYS, errno.EPERM, errno.EINVAL):

        def body(number: int = number) -> bool:
            refuse([Refused("openat2")], number)
            return is_same(OLD, loaded("load", OLD, root))

        ended = in_child(body)
        rows.append((errno.errorcode[number], ended.unless(ended.said.get("value") is True)))
    return rows


def test_load_works_where_a_container_refuses_openat2(tmp_path: Path) -> None:
    assert_none_bad(run_alone(without_openat2, tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "group", [pytest.param(g, marks=[pytest.mark.root] * (g == "read_only")) for g in GROUPS]
)
def test_save_and_load_work_or_raise_typed_errors(tmp_path: Path, seed: int, group: str) -> None:
    assert_none_bad(run_alone(rows_of, tmp_path, group, seed, deadline_s=3500))
