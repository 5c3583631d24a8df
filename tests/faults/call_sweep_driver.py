"""Runs behind call_shim: sweeps over the calls of saves and loads in this process, as JSON.

python call_sweep_driver.py LIBRARY DIRECTORY STRIDE OFFSET SCENARIO...
"""

from __future__ import annotations

import gc
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from call_sweep import (
    MOST_CALLS,
    BadPointError,
    Point,
    arm,
    assert_next_save_works,
    check_typed,
    described,
    kept,
    sampled,
    state_of,
    state_there,
    unwrapped,
)
from forks import alone
from support.call_shim import Action, Kind, Shim
from support.leaks import Held
from support.saves import load, save, save_rank_local
from support.states import assert_same, blank_like

import torch_dcpx
from torch_dcpx import DcpxReader, DcpxWriter, WriteOptions
from torch_dcpx.staging.arena import process_pool

OPTIONS = WriteOptions(workers=2, slot_bytes=256 << 10)


def _background(state: dict[str, Any], directory: Path) -> None:
    torch_dcpx.async_save(state, directory, no_dist=True).result()


def _stocks_background(state: dict[str, Any], directory: Path) -> None:
    dcp.async_save(state, storage_writer=DcpxWriter(directory), no_dist=True).result()


def _files(state: dict[str, Any], directory: Path) -> None:
    save(state, directory, single_file_per_rank=False, options=OPTIONS)


def _buffered(state: dict[str, Any], directory: Path) -> None:
    save(state, directory, options=WriteOptions(workers=1, direct_io=False))


def _own_save(state: dict[str, Any], directory: Path) -> None:
    torch_dcpx.save(state, directory, no_dist=True)


def _rank_local(state: dict[str, Any], directory: Path) -> None:
    save_rank_local(state, directory, 0)


# name -> what is there before, what is done, and whether DCP wraps its errors
SAVES: dict[str, tuple[str, Callable[[dict[str, Any], Path], None], bool]] = {
    "save to a new directory": ("none", save, True),
    "save over ours": ("ours", save, True),
    "save over stock's": ("stock", save, True),
    "save to a file each": ("ours", _files, True),
    "buffered save": ("ours", _buffered, True),
    "dcp.async_save": ("ours", _stocks_background, True),
    "torch_dcpx.save": ("ours", _own_save, False),
    "torch_dcpx.save to a new directory": ("none", _own_save, False),
    "torch_dcpx.async_save": ("ours", _background, False),
    "rank-local save": ("rank-local", _rank_local, False),
    "first rank-local save": ("none", _rank_local, False),
}


def _dcp_load(target: dict[str, Any], directory: Path) -> None:
    dcp.load(target, storage_reader=DcpxReader(directory), no_dist=True)


def _own_load(target: dict[str, Any], directory: Path) -> None:
    torch_dcpx.load(target, directory, no_dist=True)


# name -> who wrote it, what is done, and whether DCP wraps its errors
LOADS: dict[str, tuple[str, Callable[[dict[str, Any], Path], Any], bool | None]] = {
    "dcp.load of ours": ("ours", _dcp_load, True),
    "dcp.load of stock's": ("stock", _dcp_load, True),
    "dcp.load of rank-local": ("rank-local", _dcp_load, None),
    "torch_dcpx.load of ours": ("ours", _own_load, False),
    "torch_dcpx.load of stock's": ("stock", _own_load, False),
}


class Sweep:
    """One scenario, call by call."""

    def __init__(self, shim: Shim, tree: Path, name: str, stride: int, offset: int) -> None:
        self._shim = shim
        self._tree = tree
        self._root = tree / "saves"  # whose own entry, in the tree too, a first save syncs
        self._stride = stride
        self._offset = offset
        self._saves = name in SAVES
        self._before, self._act, self._is_wrapped = (SAVES | LOADS)[name]
        self._seed = 0  # of the state that is there
        self._directories = 0

    def run(self) -> list[Point]:
        """Returns every point; raises nothing."""
        shutil.rmtree(self._tree, ignore_errors=True)
        self._root.mkdir(parents=True)
        self._shim.watch(self._tree)
        self._directory = self._prepared()
        for warm in ("EIO", "COUNT", "EIO"):  # what is imported and kept once
            self._once(warm, 0 if warm == "EIO" else MOST_CALLS)
        self._settle()
        held = Held()
        points: list[Point] = []
        for code, calls in sampled(self._stride, self._offset):
            for nth in calls:
                point = self._once(code, nth)
                if point is None:
                    break
                self._settle()
                try:
                    held.assert_no_file_or_thread_more()
                except AssertionError as error:
                    point = point._replace(outcome=described(error))
                points.append(point)
        try:
            held.assert_no_memory_more()
        except AssertionError as error:
            points.append(Point("EIO", -1, "all", described(error)))
        return points

    def _settle(self) -> None:
        """Gives back staging memory, which a future's traceback holds until it is collected."""
        if self._act is _stocks_background:
            gc.collect()
            process_pool().close()

    def _prepared(self) -> Path:
        """Returns a directory that holds what is to be there before."""
        self._directories += 1
        directory = self._root / f"{self._directories}"
        self._seed += 1
        if self._before == "rank-local":
            save_rank_local(state_of(self._seed), directory, 1)
            save_rank_local(state_of(self._seed), directory, 0)
        elif self._before != "none":
            save(state_of(self._seed), directory, self._before)
        return directory

    def _once(self, code: str, nth: int) -> Point | None:
        """Returns the point, or None where there was no such call."""
        check = self._save_once if self._saves else self._load_once
        outcome, names = "", [""]
        try:
            outcome, names = check(code, nth)
        except Exception as error:  # noqa: BLE001 - what a point shows is told, not raised
            names = self._names
            outcome = described(error)
            self._directory = self._prepared()
        return Point(code, nth, names[nth], outcome) if len(names) > nth else None

    def _tried(self, code: str, nth: int, call: Callable[[], None]) -> BaseException | None:
        """Returns what the call raised while its `nth` system call failed."""
        if code == "COUNT":
            self._shim.arm(nth, Action.COUNT, 0, Kind.ALL)
        else:
            arm(self._shim, nth, code)
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - looked at by the caller
            return unwrapped(error, is_wrapped=self._is_wrapped)
        finally:
            self._shim.disarm()
            self._names = self._shim.names()
        return None

    def _save_once(self, code: str, nth: int) -> tuple[str, list[str]]:
        directory, old, new = self._directory, self._seed, self._seed + 1
        before = kept(directory)
        state = state_of(new)
        error = self._tried(code, nth, lambda: self._act(state, directory))
        names = self._names
        self._seed = new
        self._check_save(error, code, names[nth] if len(names) > nth else "", names)
        outcome = self._there(directory, old, new)
        if error is None and outcome != "new":
            raise BadPointError(f"returned, and {outcome} is there")
        if error is not None and outcome == "new":
            if "fsync directory" not in str(error) or "renameat" not in names[:nth]:
                raise BadPointError(f"new is there: {error!r}")
            outcome = "late"
        elif error is not None and kept(directory) != before:
            raise BadPointError(f"{sorted(kept(directory))} where {sorted(before)} was: {error!r}")
        self._next(directory)
        return outcome, names

    def _check_save(
        self, error: BaseException | None, code: str, call: str, names: list[str]
    ) -> None:
        if error is None:
            must_raise = {"fsync", "pwrite", "write", "renameat", "fallocate"}
            if call in must_raise and code not in ("EINTR", "SHORT", "COUNT"):
                raise BadPointError(f"{call} failed unnoticed")
            return
        if code == "SHORT" or code == "COUNT":
            raise BadPointError(f"{error!r}") from error
        if code == "EINTR":
            raise BadPointError(f"not continued: {error!r}") from error
        check_typed(error, code, call, self._tree)

    def _there(self, directory: Path, old: int, new: int) -> str:
        states = {"old": state_of(old), "new": state_of(new)}
        if self._before == "none" and self._act is not _rank_local:
            return state_there(directory, {"new": states["new"]})
        if self._act is not _rank_local:
            return state_there(directory, states)
        if not (directory / "__0.metadata").exists():
            return "none"
        loaded = load(states["old"], directory)
        outcome = "old" if loaded["step"] == old else "new"
        assert_same(states[outcome], loaded)
        return outcome

    def _next(self, directory: Path) -> None:
        """The next save works and cleans up; what it leaves serves the next point if it can."""
        self._seed += 1
        if self._act is _rank_local:
            save_rank_local(state_of(self._seed), directory, 0)
            assert_same(state_of(self._seed), load(state_of(0), directory))
            ranks = {path.name for path in directory.glob("*.metadata")}
            files = len(list(directory.glob("__0_*.distcp")))
            assert files == 1, sorted(directory.iterdir())
            assert ranks <= {"__0.metadata", "__1.metadata"}
        else:
            assert_next_save_works(save, directory, self._seed)
        if self._before in ("none", "stock"):
            shutil.rmtree(directory)
            self._directory = self._prepared()

    def _load_once(self, code: str, nth: int) -> tuple[str, list[str]]:
        expected = state_of(self._seed)
        target: dict[str, Any] = blank_like(expected)
        error = self._tried(code, nth, lambda: self._act(target, self._directory))
        names = self._names
        if error is None:
            assert_same(expected, target)
            return "right", names
        if code in ("EINTR", "SHORT", "COUNT"):
            raise BadPointError(f"not continued: {error!r}") from error
        check_typed(error, code, names[nth], self._tree)
        touched = getattr(error, "touched", None) or ()
        for name, blank in blank_like(expected).items():
            if name not in touched:
                assert_same(blank, target[name], name)
        again: dict[str, Any] = blank_like(expected)
        self._act(again, self._directory)
        assert_same(expected, again)
        return "raised", names


def main() -> None:
    library, root, stride, offset, *names = sys.argv[1:]
    shim = Shim(library)
    for name in names:
        tree = (Path(root) / name.replace(" ", "_")).resolve()
        points = Sweep(shim, tree, name, int(stride), int(offset)).run()
        print(json.dumps([name, points]), flush=True)


if __name__ == "__main__":
    alone()
    main()
