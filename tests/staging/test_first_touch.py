"""The first snapshot takes its memory once, and after a prewarm none. Counts pages, not seconds."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import RunPython
from support.states import assert_same

from torch_dcpx import DcpxStager
from torch_dcpx.staging import stager as stager_module
from torch_dcpx.staging.arena import ArenaPool

MIB = 1 << 20
NBYTES = 48 * MIB


@pytest.fixture
def fresh_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[ArenaPool]:
    pool = ArenaPool()
    monkeypatch.setattr(stager_module, "process_pool", lambda: pool)
    yield pool
    pool.close()


def arena_resident_bytes(pool: ArenaPool) -> int:
    """Returns what the mappings of the pool's only arena have of memory."""
    (arena,) = pool._arenas
    found, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            begin = int(first.split("-")[0], 16)
            is_inside = arena.address <= begin < arena.address + arena.nbytes
        elif first == "Rss:" and is_inside:
            found += int(line.split()[1]) << 10
    return found


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.parametrize("is_shared", [False, True])
def test_first_stage_takes_its_memory_once_and_the_second_takes_none(
    fresh_pool: ArenaPool, is_shared: bool
) -> None:
    state = {"w": torch.ones(NBYTES, dtype=torch.uint8)}
    stager = DcpxStager(is_shared=is_shared)
    staged = stager.stage(state)
    taken = arena_resident_bytes(fresh_pool)
    assert NBYTES <= taken <= NBYTES + MIB
    del staged
    before = faults()
    staged = stager.stage(state)
    assert faults() - before < 200  # stacks of threads, Python's own
    assert (fresh_pool.count, arena_resident_bytes(fresh_pool)) == (1, taken)
    assert_same(state, staged)


@pytest.mark.parametrize("is_shared", [False, True])
def test_prewarmed_stage_takes_no_memory_at_all(fresh_pool: ArenaPool, is_shared: bool) -> None:
    state = {"w": torch.ones(NBYTES, dtype=torch.uint8)}
    stager = DcpxStager(is_shared=is_shared)
    stager.prewarm(state)
    taken, before = arena_resident_bytes(fresh_pool), faults()
    assert taken >= NBYTES
    staged = stager.stage(state)
    assert arena_resident_bytes(fresh_pool) == taken
    assert faults() - before < 200  # stacks of threads, Python's own
    assert_same(state, staged)


def test_larger_state_in_an_arena_that_was_used_in_part_is_staged_right(
    fresh_pool: ArenaPool,
) -> None:
    small = {"w": torch.ones(5 * MIB, dtype=torch.uint8)}
    large = {"w": torch.full((NBYTES,), 3, dtype=torch.uint8)}
    stager = DcpxStager()
    with fresh_pool.lease(NBYTES + MIB):
        pass
    assert_same(small, stager.stage(small))
    staged = stager.stage(large)
    assert fresh_pool.count == 1
    assert_same(large, staged)


def test_first_save_without_address_space_raises_and_the_next_one_saves(
    run_python: RunPython, tmp_path: Path
) -> None:
    program = f"""
import resource, torch, torch_dcpx as dcpx
state = {{"w": torch.ones({NBYTES}, dtype=torch.uint8)}}
dcpx.save(state, {str(tmp_path / "warm")!r})
size = int(open("/proc/self/statm").read().split()[0]) * 4096
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (size + {NBYTES // 2}, hard))
try:
    dcpx.async_save(state, {str(tmp_path / "one")!r})
except dcpx.StagingError as error:
    print("refused:", error)
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
dcpx.async_save(state, {str(tmp_path / "two")!r}).result()
print("saved")
"""
    done = run_python(program)
    assert "refused: cannot stage" in done.stdout, done.stdout + done.stderr
    assert "Cannot allocate memory" in done.stdout
    assert done.stdout.endswith("saved\n")
    assert not (tmp_path / "one" / ".metadata").exists()
    assert (tmp_path / "two" / ".metadata").exists()
