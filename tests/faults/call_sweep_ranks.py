"""One rank of two behind call_shim: each call of either fails once, and both have to raise.

RANK=r python call_sweep_ranks.py LIBRARY DIRECTORY STRIDE OFFSET SCENARIO...
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from call_sweep import (
    MOST_CALLS,
    BadPointError,
    Point,
    arm,
    check_typed,
    described,
    of_all,
    of_rank,
    sampled,
    state_there,
    unwrapped,
)
from forks import alone
from support.call_shim import Action, Kind, Shim
from support.leaks import Held
from support.machine import seconds
from support.saves import assert_whole
from support.states import assert_same, blank_like

import torch_dcpx
from torch_dcpx import DcpxReader, DcpxWriter

RANKS = 2


def _save(state: dict[str, Any], directory: Path) -> None:
    dcp.save(state, storage_writer=DcpxWriter(directory))


def _own_save(state: dict[str, Any], directory: Path) -> None:
    torch_dcpx.save(state, directory)


def _background(state: dict[str, Any], directory: Path) -> None:
    torch_dcpx.async_save(state, directory).result()


def _load(target: dict[str, Any], directory: Path) -> None:
    dcp.load(target, storage_reader=DcpxReader(directory))


def _own_load(target: dict[str, Any], directory: Path) -> None:
    torch_dcpx.load(target, directory)


# name -> what is done, and whether DCP wraps its errors
SAVES: dict[str, tuple[Callable[[dict[str, Any], Path], Any], bool]] = {
    "dcp.save of 2 ranks": (_save, True),
    "torch_dcpx.save of 2 ranks": (_own_save, False),
    "torch_dcpx.async_save of 2 ranks": (_background, False),
}
LOADS: dict[str, tuple[Callable[[dict[str, Any], Path], Any], bool]] = {
    "dcp.load of 2 ranks": (_load, True),
    "torch_dcpx.load of 2 ranks": (_own_load, False),
}


class RankSweep:
    """One scenario on this rank; both ranks are always at the same point."""

    def __init__(self, shim: Shim, tree: Path, name: str, rank: int) -> None:
        self._shim = shim
        self._tree = tree
        self._rank = rank
        self._is_save = name in SAVES
        self._act, self._is_wrapped = (SAVES | LOADS)[name]
        self._directory = tree / "checkpoint"
        self._seed = 1

    def run(self, stride: int, offset: int) -> list[Point]:
        """Returns every point, on each rank."""
        self._tree.mkdir(parents=True, exist_ok=True)
        self._shim.watch(self._tree)
        _save(of_rank(self._seed, self._rank), self._directory)
        for victim in range(RANKS):
            self._once("EIO", 0, victim)
            self._once("COUNT", MOST_CALLS, victim)
        held = Held()
        points = []
        for victim in range(RANKS):
            for code, calls in sampled(stride, offset):
                for nth in calls:
                    point = self._once(code, nth, victim)
                    if point is None:
                        break
                    points.append(point)
                    self._note_leak(held.assert_no_file_or_thread_more, points)
        # Of a point: three of this test's, and as many of DCP's.
        gathers = 6 * len(points)
        self._note_leak(lambda: held.assert_no_memory_more(gathers), points)
        return points

    def _note_leak(self, check: Callable[[], None], points: list[Point]) -> None:
        try:
            check()
        except AssertionError as error:
            points.append(points[-1]._replace(outcome=described(error)))

    def _once(self, code: str, nth: int, victim: int) -> Point | None:
        """Returns the point, with what either rank found bad; None where there was no such call."""
        if self._rank == victim and code != "COUNT":
            arm(self._shim, nth, code)
        elif self._rank == victim:
            self._shim.arm(nth, Action.COUNT, 0, Kind.ALL)
        old = self._seed
        target: dict[str, Any] = (
            of_rank(old + 1, self._rank) if self._is_save else blank_like(of_rank(old, self._rank))
        )
        error: BaseException | None = None
        try:
            self._act(target, self._directory)
        except BaseException as caught:  # noqa: BLE001 - looked at below
            error = caught
        self._shim.disarm()
        names: list[Any] = [self._shim.names() if self._rank == victim else None]
        dist.broadcast_object_list(names, src=victim)
        call = names[0][nth] if len(names[0]) > nth else ""
        outcome = ""
        try:
            outcome = self._checked(error, code, call, names[0][:nth], target, victim)
        except Exception as bad:  # noqa: BLE001 - what a point shows is told, not raised
            outcome = described(bad)
        if self._is_save:
            self._seed = old + 2
            outcome = self._next(outcome)
        outcomes: list[Any] = [None] * RANKS
        dist.all_gather_object(outcomes, outcome)
        worst = max(outcomes, key=lambda text: text.startswith("bad"))
        return Point(code, nth, f"{call} of rank {victim}", worst) if call else None

    def _next(self, outcome: str) -> str:
        """The next save works and cleans up."""
        try:
            _save(of_rank(self._seed, self._rank), self._directory)
            if self._rank == 0:
                assert_whole(of_all(self._seed), self._directory)
        except Exception as bad:  # noqa: BLE001 - told
            return described(bad)
        return outcome

    def _checked(
        self,
        error: BaseException | None,
        code: str,
        call: str,
        before: list[str],
        target: dict[str, Any],
        victim: int,
    ) -> str:
        """Returns what came of the point on this rank. Raises: BadPointError, AssertionError."""
        has_failed: list[Any] = [None] * RANKS
        dist.all_gather_object(has_failed, error is not None)
        if len(set(has_failed)) != 1:
            raise BadPointError(f"raised by rank: {has_failed}: {error!r}")
        one = error and unwrapped(error, is_wrapped=self._is_wrapped)
        if one is not None:
            if code in ("SHORT", "EINTR", "COUNT"):
                raise BadPointError(f"not continued: {one!r}") from one
            check_typed(one, code, call, self._tree)
        if self._is_save:
            return self._checked_save(one, before)
        if one is None:
            assert_same(of_rank(self._seed, self._rank), target)
            return "right"
        if self._rank == victim:
            touched = getattr(one, "touched", None) or ()
            for name, blank in blank_like(of_rank(self._seed, self._rank)).items():
                if name not in touched:
                    assert_same(blank, target[name], name)
        return "raised"

    def _checked_save(self, error: BaseException | None, before: list[str]) -> str:
        if self._rank != 0:
            return ""
        states = {"old": of_all(self._seed), "new": of_all(self._seed + 1)}
        there = state_there(self._directory, states)
        if error is None and there != "new":
            raise BadPointError(f"returned, and {there} is there")
        if error is not None and there == "new":
            if "fsync directory" not in str(error) or "renameat" not in before:
                raise BadPointError(f"new is there: {error!r}")
            return "late"
        return there


def main() -> None:
    library, root, stride, offset, *names = sys.argv[1:]
    rank = int(os.environ["RANK"])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/store", rank=rank, world_size=RANKS,
        timeout=datetime.timedelta(seconds=seconds(60)),
    )  # fmt: skip
    shim = Shim(library)
    for name in names:
        tree = (Path(root) / name.replace(" ", "_")).resolve()
        points = RankSweep(shim, tree, name, rank).run(int(stride), int(offset))
        print(json.dumps([name, points]), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as leave_well: a thread of gloo may still hold a collective's tensors


if __name__ == "__main__":
    alone()
    main()
