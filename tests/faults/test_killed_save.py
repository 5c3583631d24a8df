"""A save that is killed before any of its system calls leaves the old checkpoint or the new one.

A shim in front of libc (LD_PRELOAD) raises SIGKILL at the n-th call that changes the file system.
One driver process imports torch once and forks a child for every n; the child saves over a
committed checkpoint, the driver looks at what it left, saves again, and looks once more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import torch_dcpx

TESTS = Path(__file__).resolve().parents[1]

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <unistd.h>

static atomic_long left = -1;   // calls until the kill; negative: not armed
static atomic_long seen;        // calls since arming
static int half = 0;            // of the write that is killed, half the bytes are written

void shim_arm(long n, int is_half) { seen = 0; half = is_half; left = n; }
long shim_seen(void) { return seen; }

static int is_due(void) {
  if (left < 0) return 0;
  seen++;
  return atomic_fetch_sub(&left, 1) == 0;
}
static void count(void) { if (is_due()) kill(getpid(), SIGKILL); }

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define OPEN(name, args, call) \
  int name args { \
    mode_t mode = 0; \
    if (flags & O_CREAT) { va_list a; va_start(a, flags); mode = va_arg(a, mode_t); va_end(a); } \
    if (flags & (O_CREAT | O_TRUNC)) count(); \
    return NEXT(name) call; \
  }
#define CALL(name, args, call) int name args { count(); return NEXT(name) call; }
#define PWRITE(name, offset) \
  ssize_t name(int fd, const void* b, size_t n, offset o) { \
    if (is_due()) { if (half) NEXT(name)(fd, b, n / 8192 * 4096, o); kill(getpid(), SIGKILL); } \
    return NEXT(name)(fd, b, n, o); \
  }

OPEN(open, (const char* p, int flags, ...), (p, flags, mode))
OPEN(open64, (const char* p, int flags, ...), (p, flags, mode))
OPEN(openat, (int d, const char* p, int flags, ...), (d, p, flags, mode))
OPEN(openat64, (int d, const char* p, int flags, ...), (d, p, flags, mode))
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)
ssize_t write(int fd, const void* b, size_t n) {
  if (fd > 2 && is_due()) { if (half) NEXT(write)(fd, b, n / 2); kill(getpid(), SIGKILL); }
  return NEXT(write)(fd, b, n);
}
CALL(fallocate, (int fd, int m, off_t o, off_t n), (fd, m, o, n))
CALL(fallocate64, (int fd, int m, off64_t o, off64_t n), (fd, m, o, n))
CALL(fsync, (int fd), (fd))
CALL(fdatasync, (int fd), (fd))
CALL(ftruncate, (int fd, off_t n), (fd, n))
CALL(ftruncate64, (int fd, off64_t n), (fd, n))
CALL(rename, (const char* a, const char* b), (a, b))
CALL(renameat, (int d, const char* a, int e, const char* b), (d, a, e, b))
CALL(unlink, (const char* p), (p))
CALL(unlinkat, (int d, const char* p, int f), (d, p, f))
CALL(mkdir, (const char* p, mode_t m), (p, m))
CALL(mkdirat, (int d, const char* p, mode_t m), (d, p, m))
CALL(flock, (int fd, int op), (fd, op))
"""

DRIVER = """
import ctypes, json, logging, os, shutil, sys, warnings
from pathlib import Path
import torch

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
torch.set_num_threads(1)  # a pool of threads would not survive the forks
from saves import assert_whole, data_files, load, save
from states import assert_same
from torch_dcpx import WriteOptions

shim = ctypes.CDLL(sys.argv[1])
root, half, step, kind = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
kwargs = {"single_file_per_rank": kind != "a file each"}
if kind != "default":
    kwargs["options"] = WriteOptions(workers=2, slot_bytes=256 << 10, direct_io=kind != "buffered")

def state_of(seed):
    g = torch.Generator().manual_seed(seed)
    return {"small": torch.randn(100, generator=g), "large": torch.randn(200_000, generator=g),
            "strided": torch.randn(60, 50, generator=g).t(), "step": seed}

OLD, NEW, NEXT = (state_of(seed) for seed in range(3))

def state_there(directory):
    found = []
    for reader in ("ours", "stock"):
        loaded = load(OLD, directory, reader)
        found.append("old" if loaded["step"] == 0 else "new")
        assert_same(OLD if found[-1] == "old" else NEW, loaded)
    assert found[0] == found[1]
    return found[0]

def save_new(directory, n):
    child = os.fork()
    if child == 0:
        try:
            shim.shim_arm(n, half)
            save(NEW, directory, **kwargs)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]

save(OLD, root / "warm")  # imports what is imported late, before the first child
points = []
for n in range(0, 1000, step):
    directory = root / str(n)
    if kind != "fresh":
        save(OLD, directory, "stock" if n % 2 else "ours", **({} if n % 2 else kwargs))
    status = save_new(directory, n)
    if kind == "fresh" and not (directory / ".metadata").exists():
        there = "none"
    else:
        there = state_there(directory)
    leftovers = len(data_files(directory))
    save(NEXT, directory, **kwargs)
    assert_whole(NEXT, directory)
    shutil.rmtree(directory)
    points.append([n, status, there, leftovers])
    if status == 0:
        break
print(json.dumps(points))
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shim, compiled: by what the extension was built with."""
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    library = folder / "shim.so"
    subprocess.run(
        ["c++", "-x", "c", "-shared", "-fPIC", "-O1", "-o", library, folder / "shim.c", "-ldl"],
        check=True, timeout=120,
    )  # fmt: skip
    return library


def points_of(
    shim: Path, directory: Path, kind: str, *, step: int = 1, half: bool = False
) -> list[Any]:
    """Runs the driver; returns [n, exit status, state found, data files left] for every point."""
    preload = f"{os.environ.get('LD_PRELOAD', '')} {shim}".strip()
    root = str(Path(torch_dcpx.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-c", DRIVER, str(shim), str(directory), str(int(half)), str(step), kind],
        env={**os.environ, "LD_PRELOAD": preload, "PYTHONPATH": f"{TESTS}:{root}"},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    points: list[Any] = json.loads(result.stdout.splitlines()[-1])
    return points


def check(points: list[Any], before: str) -> None:
    """Asserts `before` until some point and new from it on; all points but the last were kills."""
    states = [there for _, _, there, _ in points]
    assert states == [before] * states.count(before) + ["new"] * states.count("new")
    assert states[0] == before
    assert states[-1] == "new"
    assert [status for _, status, _, _ in points] == [9] * (len(points) - 1) + [0]
    print(f"{len(points) - 1} kills, {states.count(before)} {before}, 0 bad; to {points[-1][0]}")


@pytest.mark.parametrize(
    "kind", ["default", "a file each", pytest.param("buffered", marks=pytest.mark.slow)]
)
def test_save_killed_at_any_system_call_leaves_old_or_new(
    tmp_path: Path, shim: Path, kind: str
) -> None:
    points = points_of(shim, tmp_path, kind)
    check(points, "old")
    assert len(points) > 15
    assert max(leftovers for *_, leftovers in points) > 1  # some were killed with files of both


@pytest.mark.slow
def test_save_killed_in_the_middle_of_a_write_leaves_old_or_new(tmp_path: Path, shim: Path) -> None:
    check(points_of(shim, tmp_path, "buffered", half=True), "old")


def test_first_save_killed_at_any_system_call_leaves_nothing_or_new(
    tmp_path: Path, shim: Path
) -> None:
    check(points_of(shim, tmp_path, "fresh"), "none")
