"""Trainings that are killed at a system call of theirs, one after another beneath one root.

    kill_driver.py SHIM ROOT MODE FROM STEP COUNT     (`test_killed_manager.py` starts it)

A process forks a child for each kill; the child resumes and saves three times, with keep_last=2,
and is killed before its n-th call that changes something beneath the root. Then this process looks:
what `resume` takes must be the newest whole checkpoint of all that an oracle of its own finds.

    sweep   each time from the same root of three checkpoints; n = 0, FROM, FROM + STEP ... until
            a child lives
    loop    from what the last kill has left; COUNT kills at calls drawn by the seed FROM

Prints JSON: a row a kill, [n, exit status, step resumed, whole checkpoints].
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import shutil
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from support.call_shim import Action, Shim
from trainings import on_disk

from torch_dcpx import CheckpointManager, PerRank, WriteOptions, load
from torch_dcpx.staging import arena

KEPT = 2
OPTIONS = WriteOptions(workers=1, slot_bytes=256 << 10)


def state_of(step: int) -> dict[str, Any]:
    return {"x": torch.arange(5000.0) + step, "step": step}


def manager_of(root: Path, **kwargs: Any) -> CheckpointManager:
    return CheckpointManager(root, keep_last=KEPT, allow_fresh=True, options=OPTIONS, **kwargs)


def train(root: Path, saves: int, *, is_async: bool) -> None:
    """What the child does: resumes, and saves the next steps."""
    with manager_of(root, async_save=is_async) as manager:
        step = manager.resume(state=state_of(-1)).step or 0
        for later in range(step + 1, step + 1 + saves):
            content = {"step": later, "own": PerRank(later)}
            manager.save(later, state=state_of(later), user_content=content)


def killed(shim: Shim, root: Path, n: int, *, is_async: bool) -> int:
    child = os.fork()
    if child == 0:
        try:
            arena._pool = arena.ArenaPool()  # a job's own process has one; this one is forked
            shim.arm(n, Action.KILL)
            train(root, 3, is_async=is_async)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the parent sees the status
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def whole_steps(root: Path) -> list[int]:
    """The oracle: the steps of what has metadata; all of it must load."""
    steps = []
    for name in on_disk(root):
        if (root / name / ".metadata").exists():
            state = {"state": state_of(-1)}
            load(state, root / name, no_dist=True)
            step = int(name.removeprefix("step-"))
            assert state["state"]["step"] == step
            assert torch.equal(state["state"]["x"], state_of(step)["x"])
            steps.append(step)
    return sorted(steps)


def check(root: Path, is_first: bool) -> tuple[int | None, list[int]]:
    whole = whole_steps(root)
    assert len(whole) <= KEPT + 1, whole
    assert whole or is_first
    state = state_of(-1)
    info = manager_of(root).resume(state=state)
    assert info.step == (whole[-1] if whole else None), (info, whole)
    if whole:
        assert info.user_content == {"step": info.step, "own": info.step}
        assert torch.equal(state["x"], state_of(whole[-1])["x"])
    return info.step, whole


def sweep(shim: Shim, root: Path, begin: int, stride: int, saves: int) -> list[Any]:
    """Kills a training at calls; what it left goes with one of so many `saves` of the next."""
    start = root / "start"
    train(start, 3, is_async=False)
    rows = []
    for n in (0, *range(begin or stride, 1000, stride)):
        here = root / "here"
        shutil.copytree(start, here)
        status = killed(shim, here, n, is_async=n % 2 == 0)
        rows.append([n, status, *check(here, is_first=False)])
        for newest in range(rows[-1][2] + 1, rows[-1][2] + 1 + saves):
            train(here, 1, is_async=False)  # and then all is as if nothing had been
            if on_disk(here) == {f"step-{newest}", f"step-{newest - 1}"}:
                break
        else:
            raise AssertionError(f"{newest} is the newest of {on_disk(here)}")
        shutil.rmtree(here)
        if status == 0:
            break
    return rows


def loop(shim: Shim, root: Path, seed: int, count: int) -> list[Any]:
    rng = random.Random(seed)
    rows: list[Any] = []
    here = root / "loop"
    here.mkdir()
    while len(rows) < count:
        n = rng.randrange(150)
        status = killed(shim, here, n, is_async=bool(rng.randrange(2)))
        step, whole = check(here, is_first=not any(row[2] for row in rows))
        before = rows[-1][2] or 0 if rows else 0
        assert (step or 0) >= before  # nothing that was committed is lost
        rows.append([n, status, step, whole])
    return rows


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)  # a pool of threads would not survive the forks
    shim, root, mode = Shim(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    begin, stride, count = map(int, sys.argv[4:7])
    train(root / "warm", 1, is_async=False)  # imports what is imported late, before the first child
    check(root / "warm", is_first=True)
    shutil.rmtree(root / "warm")
    gc.collect()
    gc.freeze()  # a collection in a child would write to all that was imported
    shim.watch(str(root))
    if mode == "loop":
        rows = loop(shim, root, begin, count)
    else:  # FUSE hears of a closed file, and its lock, a moment later: one save may pass it by
        rows = sweep(shim, root, begin, stride, saves=2 if mode == "sweep on FUSE" else 1)
    assert all(row[1] in (0, signal.SIGKILL) for row in rows), rows
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
