"""The first snapshot takes its memory once, and after a prewarm none. Counts bytes, not seconds."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import ROOT, RunPython
from support.states import assert_same

from torch_dcpx import _C, DcpxStager
from torch_dcpx.staging import stager as stager_module
from torch_dcpx.staging.arena import ArenaPool

MIB = 1 << 20
NBYTES = 16 * MIB
MADV_POPULATE_WRITE = 23

# Of a process of its own, which gives up calls for good.
PRELUDE = f"""
import ctypes, sys, torch, torch_dcpx as dcpx
sys.path.insert(0, {str(ROOT / "tests" / "faults")!r})
from refused_calls import Refused, refuse
from torch_dcpx.staging.arena import process_pool
state = {{"w": torch.arange({NBYTES} // 8).view(torch.uint8)}}
def taken():
    return [arena.taken_bytes for arena in process_pool()._arenas]
"""


@pytest.fixture
def fresh_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[ArenaPool]:
    pool = ArenaPool()
    monkeypatch.setattr(stager_module, "process_pool", lambda: pool)
    yield pool
    pool.close()


def only_arena(pool: ArenaPool) -> _C.Arena:
    (arena,) = pool._arenas
    return arena


def resident_bytes(arena: _C.Arena) -> int:
    """Returns what the mappings of the arena have of memory, on pages of any size."""
    found, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            begin = int(first.split("-")[0], 16)
            is_inside = arena.address <= begin < arena.address + arena.nbytes
        elif first in ("Rss:", "Swap:") and is_inside:
            found += int(line.split()[1]) << 10
    return found


def by_calls(nbytes: int) -> int:
    """Returns `nbytes`, 0 where this system takes memory only when it is written to."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(MADV_POPULATE_WRITE)
        except OSError:
            return 0
    return nbytes


@pytest.mark.parametrize("is_prewarmed", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
def test_first_stage_or_a_prewarm_takes_the_memory_and_later_stages_take_none(
    fresh_pool: ArenaPool, is_shared: bool, is_prewarmed: bool
) -> None:
    state = {"w": torch.ones(NBYTES, dtype=torch.uint8)}
    stager = DcpxStager(is_shared=is_shared)
    if is_prewarmed:
        stager.prewarm(state)
        assert resident_bytes(only_arena(fresh_pool)) == NBYTES
    for _ in range(2):
        staged = stager.stage(state)
        arena = only_arena(fresh_pool)
        assert arena.taken_bytes == by_calls(NBYTES)
        assert resident_bytes(arena) == NBYTES
        assert_same(state, staged)
        del staged


def test_larger_state_in_an_arena_that_was_used_in_part_takes_the_rest(
    fresh_pool: ArenaPool,
) -> None:
    small = {"w": torch.ones(5 * MIB, dtype=torch.uint8)}
    large = {"w": torch.full((NBYTES,), 3, dtype=torch.uint8)}
    stager = DcpxStager(is_shared=False)
    with fresh_pool.lease(NBYTES) as arena:
        pass
    assert_same(small, stager.stage(small))
    assert arena.taken_bytes == by_calls(5 * MIB)
    assert resident_bytes(arena) < NBYTES
    staged = stager.stage(large)
    assert only_arena(fresh_pool) is arena
    assert resident_bytes(arena) == NBYTES
    assert_same(large, staged)


def test_many_small_tensors_take_each_page_about_once(fresh_pool: ArenaPool) -> None:
    state = {f"{i}": torch.full((5_000 + i % 7,), i % 251, dtype=torch.uint8) for i in range(2_000)}
    staged = DcpxStager(is_shared=False).stage(state)
    arena = only_arena(fresh_pool)
    assert by_calls(sum(tensor.nbytes for tensor in state.values())) <= arena.taken_bytes
    assert arena.taken_bytes <= arena.nbytes + 8 * mmap.PAGESIZE  # borders of 4 MiB pieces
    assert_same(state, staged)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EPERM])
def test_system_without_the_call_takes_memory_as_it_is_written(
    run_warm: RunPython, tmp_path: Path, number: int
) -> None:
    program = f"""{PRELUDE}
refuse([Refused("madvise")], {number})
for name in ("first", "prewarmed"):
    path = {str(tmp_path)!r} + "/" + name
    if name == "prewarmed":
        dcpx.close()
        dcpx.prewarm(state)
    dcpx.async_save(state, path).result()
    loaded = {{"w": torch.zeros_like(state["w"])}}
    dcpx.load(loaded, path)
    print(torch.equal(loaded["w"], state["w"]), taken())
arena = dcpx._C.Arena(3 * 4096)
pages = torch.from_dlpack(arena.lend(0, arena.nbytes)).fill_(7)
arena.prefault(1)
print(bool((pages == 7).all()))
"""
    assert run_warm(program).stdout == "True [0]\nTrue [0]\nTrue\n"


def test_process_that_has_no_huge_pages_takes_as_many_bytes(
    run_warm: RunPython, tmp_path: Path
) -> None:
    program = f"""{PRELUDE}
PR_SET_THP_DISABLE = 41
assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
for name in ("one", "two"):
    dcpx.async_save(state, {str(tmp_path)!r} + "/" + name).result()
    print(taken())
loaded = {{"w": torch.zeros_like(state["w"])}}
dcpx.load(loaded, {str(tmp_path / "two")!r})
print(torch.equal(loaded["w"], state["w"]))
"""
    expected = f"[{by_calls(NBYTES)}]\n"
    assert run_warm(program).stdout == f"{expected}{expected}True\n"


def test_first_save_without_memory_raises_and_the_next_one_saves(
    run_warm: RunPython, tmp_path: Path
) -> None:
    # The system refuses a piece of 1 MiB, which the first state alone has: 2 + 1.
    program = f"""{PRELUDE}
import threading
refuse([Refused("madvise", 1, {MIB})], {errno.ENOMEM})
threads = set(threading.enumerate())
try:
    dcpx.async_save({{"w": state["w"][:{3 * MIB}]}}, {str(tmp_path / "one")!r})
except dcpx.StagingError as error:
    print("refused:", error)
for call in (dcpx.prewarm, lambda part: dcpx.async_save(part, {str(tmp_path / "two")!r}).result()):
    call({{"w": state["w"][:{2 * MIB}]}})
assert set(threading.enumerate()) == threads
print("saved")
"""
    done = run_warm(program)
    first, last = done.stdout.splitlines()
    assert first.startswith(f"refused: cannot take {4 * MIB} B of memory: madvise {MIB} B at ")
    assert first.endswith("Cannot allocate memory")
    assert last == "saved"
    assert not (tmp_path / "one" / ".metadata").exists()
    assert (tmp_path / "two" / ".metadata").exists()
