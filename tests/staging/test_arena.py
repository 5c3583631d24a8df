"""ArenaPool: memory that is used again once nobody reads it, within what there is."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.machine import seconds
from support.staged import stage_tensors

from torch_dcpx import _C, DcpxError, StagingError
from torch_dcpx.staging import arena as arena_module
from torch_dcpx.staging.arena import ArenaPool, attach, note_written
from torch_dcpx.staging.host_memory import Available, available_memory

MIB = 1 << 20


def stage(pool: ArenaPool, nbytes: int, **kwargs: Any) -> torch.Tensor:
    (tensor,) = stage_tensors([torch.ones(nbytes, dtype=torch.uint8)], pool=pool, **kwargs)
    return tensor


def test_arena_is_used_again_once_the_last_view_of_it_is_gone() -> None:
    pool = ArenaPool()
    tensor = stage(pool, 3 * MIB)
    address = tensor.data_ptr()
    view, storage = tensor.view(-1, 3)[1:], tensor.untyped_storage()
    del tensor
    with pytest.raises(StagingError):
        stage(pool, 3 * MIB, budget_bytes=pool.nbytes, timeout_s=0)
    del view
    with pytest.raises(StagingError):
        stage(pool, 3 * MIB, budget_bytes=pool.nbytes, timeout_s=0)
    del storage
    assert stage(pool, 3 * MIB, budget_bytes=pool.nbytes, timeout_s=0).data_ptr() == address


def test_smallest_free_arena_that_fits_is_taken() -> None:
    pool = ArenaPool()
    large, small = stage(pool, 9 * MIB), stage(pool, 3 * MIB)
    places = large.data_ptr(), small.data_ptr()
    del large, small
    tensors = stage(pool, MIB), stage(pool, 2 * MIB)
    assert tuple(tensor.data_ptr() for tensor in tensors) == places[::-1]
    assert pool.count == 2


def test_growth_gives_the_old_arena_back_before_the_new_one_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = ArenaPool()
    stage(pool, 4 * MIB)
    seen = []
    make = _C.Arena

    def counting(nbytes: int, *, is_shared: bool) -> _C.Arena:
        seen.append(sum(arena.nbytes for arena in pool._arenas))
        return make(nbytes, is_shared=is_shared)

    monkeypatch.setattr(arena_module._C, "Arena", counting)
    stage(pool, 8 * MIB)
    assert seen == [0]
    assert pool.nbytes == 8 * MIB


def test_state_larger_than_the_budget_is_refused_with_both_numbers() -> None:
    pool = ArenaPool(budget_bytes=2 * MIB)
    with pytest.raises(StagingError, match=rf"cannot stage {3 * MIB} B: .* budget of {2 * MIB} B"):
        stage(pool, 3 * MIB)
    assert pool.count == 0
    assert stage(pool, 2 * MIB).numel() == 2 * MIB


def test_more_than_the_available_memory_is_refused_before_anything_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        arena_module, "available_memory", lambda: Available(100 * MIB, "/a/group/memory.max")
    )
    pool = ArenaPool()
    text = rf"cannot stage {40 * MIB} B: {100 * MIB} B .*\(/a/group/memory\.max\)"
    with pytest.raises(StagingError, match=text):
        stage(pool, 40 * MIB)
    assert pool.count == 0
    assert stage(pool, 30 * MIB).numel() == 30 * MIB


def drop_at_the_third_wait(
    monkeypatch: pytest.MonkeyPatch, pool: ArenaPool, held: list[torch.Tensor]
) -> list[float]:
    """Lets the pool's third wait drop what is held; returns the list of the waits' seconds."""
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            held.clear()

    monkeypatch.setattr(pool._guard, "wait", wait)
    return waits


def test_waiting_save_gets_the_arena_that_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ArenaPool(budget_bytes=4 * MIB)
    held = [stage(pool, 3 * MIB)]
    address = held[0].data_ptr()
    waits = drop_at_the_third_wait(monkeypatch, pool, held)
    with pool.lease(3 * MIB, timeout_s=seconds(30)) as arena:
        assert arena.address == address
    assert len(waits) == 3


def test_written_arena_is_waited_for_rather_than_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ArenaPool()
    held = [stage(pool, 3 * MIB)]
    note_written(held[0].data_ptr() + 5)
    waits = drop_at_the_third_wait(monkeypatch, pool, held)
    with pool.lease(3 * MIB):
        assert pool.count == 1
    assert len(waits) == 3


def test_arena_of_a_save_that_never_lets_go_is_left_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = ArenaPool()
    held = stage(pool, 3 * MIB)
    note_written(held.data_ptr())
    waits: list[float] = []  # of a clock that only they move: a busy machine's says nothing
    monkeypatch.setattr(pool._guard, "wait", waits.append)
    monkeypatch.setattr(arena_module, "time", SimpleNamespace(monotonic=lambda: sum(waits)))
    other = stage(pool, 3 * MIB)
    assert pool.count == 2
    assert other.data_ptr() != held.data_ptr()
    assert 0 < sum(waits) < 1


def test_threads_never_get_the_same_arena_at_once() -> None:
    pool = ArenaPool()
    wrong: list[str] = []

    def work(number: int) -> None:
        for step in range(30):
            value = (number * 31 + step) % 251
            source = torch.full((70_000,), value, dtype=torch.uint8)
            (tensor,) = stage_tensors([source], pool=pool)
            if not bool((tensor == value).all()):
                wrong.append(f"{number} {step}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds(60))
    assert wrong == []
    assert pool.count <= 8  # one that it fills, one that it has


def test_arena_that_somebody_fills_is_not_given_to_another() -> None:
    pool = ArenaPool()
    with pool.lease(MIB) as one, pool.lease(MIB) as other:  # nothing lies over them yet
        assert one is not other
    with pool.lease(MIB) as again:
        assert again in (one, other) and pool.count == 2


def test_shared_arena_serves_both_kinds_and_a_private_one_is_replaced() -> None:
    pool = ArenaPool()
    stage(pool, MIB)
    assert [arena.fd for arena in pool._arenas] == [-1]
    address = stage(pool, MIB, is_shared=True).data_ptr()
    assert pool.count == 1
    assert stage(pool, MIB).data_ptr() == address


def test_release_leaves_capsules_valid_and_later_calls_fail() -> None:
    arena = _C.Arena(MIB)
    capsules = [arena.lend(64, 8) for _ in range(5)]
    assert arena.lent == 5
    tensor = torch.utils.dlpack.from_dlpack(capsules.pop())
    del capsules  # that nobody takes
    gc.collect()
    assert arena.lent == 1
    arena.release()
    assert tensor.tolist() == [0] * 8
    with pytest.raises(ValueError, match="the arena was released"):
        arena.lend(0, 1)


def test_place_behind_the_arena_is_refused() -> None:
    arena = _C.Arena(100)
    with pytest.raises(ValueError, match="behind the arena"):
        arena.lend(96, 8)
    with pytest.raises(ValueError, match="too small"):
        _C.snapshot(arena, _C.StageTable([(0, 1, (200,), (1,), -1, None)]), 1)


def test_broken_entries_of_a_table_are_errors() -> None:
    short: list[Any] = [(0, 1, (2,)), (0, 1, (2,), (1, 1)), (0, 0, (2,), (1,)), 7]
    for entry in (*short, (-1, 1, (2,), (1,))):
        with pytest.raises((OverflowError, TypeError, ValueError)):
            _C.StageTable([entry])


def test_attached_arena_shows_the_bytes_and_tells_the_owner_what_was_written() -> None:
    owner = _C.Arena(MIB, is_shared=True)
    torch.utils.dlpack.from_dlpack(owner.lend(0, 3)).copy_(torch.tensor([1, 2, 3]))
    other = attach(owner.fd, MIB)
    seen = torch.utils.dlpack.from_dlpack(other.lend(0, 3))
    assert seen.tolist() == [1, 2, 3]
    assert owner.lent == 0
    note_written(seen.data_ptr())
    assert owner.written == 1
    for fd, nbytes in ((owner.fd, MIB // 2), (owner.fd, 2 * MIB), (-1, MIB)):
        with pytest.raises(DcpxError):
            attach(fd, nbytes)


# ---- host_memory --------------------------------------------------------------------------------


def machine(root: Path, cgroup: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Makes a /proc and a /sys/fs/cgroup; returns both."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "proc", root / "cgroup"


CASES: dict[str, tuple[str, dict[str, str], int, str]] = {
    "no group": ("0::/\n", {}, 4000 << 10, "MemAvailable"),
    "version 2": (
        "0::/job/rank\n",
        {
            "job/rank/memory.max": "max\n", "job/rank/memory.current": "7\n",
            "job/memory.max": "1000000\n", "job/memory.current": "600000\n",
            "job/memory.stat": "anon 5\ninactive_file 100000\nactive_file 9\n",
        },
        500_000, "job/memory.max",
    ),
    "version 2 in a container": (
        "0::/of/the/host\n",
        {"memory.max": "3000\n", "memory.current": "1000\n"},
        2000, "memory.max",
    ),
    "version 1": (
        "5:cpu:/x\n4:memory:/x\n0::/\n",
        {
            "memory/x/memory.limit_in_bytes": "9000\n", "memory/x/memory.usage_in_bytes": "9500\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/memory.usage_in_bytes": "1\n",
        },
        0, "memory/x/memory.limit_in_bytes",
    ),
}  # fmt: skip


def test_available_memory_is_the_least_of_the_machine_and_every_group(tmp_path: Path) -> None:
    for case, (cgroup, files, nbytes, source) in CASES.items():
        found = available_memory(*machine(tmp_path / case, cgroup, files))
        assert found.nbytes == nbytes and found.source.endswith(source), case
    assert available_memory(tmp_path, tmp_path) == Available(None, "")  # where nobody says
    assert (available_memory().nbytes or 0) > 0
