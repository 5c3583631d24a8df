"""Every call of an operation fails once: what is checked then, in one process or on two ranks.

Behind call_shim. A sweep goes on until a whole run passes without meeting its fault.
"""

from __future__ import annotations

import errno
import gc
import os
import re
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from call_sweep import (
    KINDS,
    MOST_CALLS,
    BadPointError,
    assert_next_save_works,
    both_rank_local,
    of_all,
    of_rank,
    of_stock,
    state_of,
    state_there,
    stocks_background,
)
from support.call_shim import Action, Kind, Shim
from support.leaks import Held
from support.saves import assert_whole, save
from support.states import assert_same, blank_like
from torch.distributed.checkpoint.api import CheckpointException

import torch_dcpx
from torch_dcpx import DcpxError, DcpxReader, DcpxWriter
from torch_dcpx.staging.arena import process_pool

HARD = ("EIO", "ENOSPC", "EDQUOT", "EMFILE", "EACCES", "EROFS", "ESTALE")
HARMLESS = ("EINTR", "SHORT", "COUNT")
CODES = (*HARD, "EINTR", "SHORT")


def sampled(stride: int, offset: int, names: list[str]) -> Iterator[tuple[str, Iterator[int]]]:
    """Yields each code and the calls that are to fail with it, until there is no such call.

    However few points are tried, one is refused (what opens a file or the directory) and one is
    passed (the first bytes that are moved come in two parts).
    """
    opens = next(nth for nth, name in enumerate(names) if name.startswith("openat"))
    for code, nth in (("EIO", opens), ("SHORT", 0)) if stride > 1 else ():
        yield code, iter((nth,))
    for at, code in enumerate(CODES):
        yield code, iter(range((offset + at) % stride, MOST_CALLS, stride))


class Point(NamedTuple):
    """One call that failed, and with what."""

    code: str
    nth: int
    call: str
    outcome: str  # new, old, none, late (raised after the commit), right, raised, or bad: why


def arm(shim: Shim, nth: int, code: str) -> None:
    """Lets the `nth` call fail with `code`, or cuts it short."""
    if code == "COUNT":
        shim.arm(nth, Action.COUNT, 0, Kind.ALL)
    elif code == "SHORT":
        shim.arm(nth, Action.SHORT, 0, Kind.MOVES)
    else:
        shim.arm(nth, Action.FAIL, getattr(errno, code), Kind.ALL)


def unwrapped(error: BaseException, *, is_wrapped: bool | None) -> BaseException:
    """Returns the error of this rank, out of what DCP wraps it in where it does (None: maybe).

    Its frames are dropped: they hold all that the call had.
    """
    error.__traceback__ = None
    if is_wrapped is False or (is_wrapped is None and not isinstance(error, CheckpointException)):
        return error
    if not isinstance(error, CheckpointException):
        raise BadPointError(f"not wrapped: {error!r}")
    (first, *_) = error.failures.values()
    return first[0].with_traceback(None)


def check_typed(error: BaseException, code: str, call: str, tree: Path) -> None:
    """Raises BadPointError unless the error names what happened, where, and how much."""
    if code in HARMLESS:
        raise BadPointError(f"not continued: {error!r}") from error
    if not isinstance(error, DcpxError):
        raise BadPointError(f"untyped: {error!r}")
    number = getattr(errno, code)
    found: Any = error
    if call == "flock" and code == "EACCES":  # how some systems say that somebody has the lock
        number = errno.EWOULDBLOCK
    if found.errno != number:
        raise BadPointError(f"errno {found.errno}: {error!r}")
    if found.path is None or tree not in (Path(found.path), *Path(found.path).parents):
        raise BadPointError(f"path {found.path}: {error!r}")
    if os.strerror(number) not in str(error) and number != errno.EWOULDBLOCK:
        raise BadPointError(f"text: {error!r}")
    has_numbers = found.offset is not None and re.search(r"\d+ B at offset \d+", str(error))
    if call in ("pwrite", "pwrite64", "write", "pread", "pread64", "preadv") and not has_numbers:
        raise BadPointError(f"no numbers: {error!r}")


def check_untouched(error: BaseException, target: dict[str, Any], like: dict[str, Any]) -> None:
    touched = getattr(error, "touched", None) or ()
    for name, blank in blank_like(like).items():
        if name not in touched:
            assert_same(blank, target[name], name)


def checked_outcome(error: BaseException | None, there: str, before: list[str]) -> str:
    """Returns what came of a save: what is there, or "late"."""
    if error is None and there != "new":
        raise BadPointError(f"returned, and {there} is there")
    if error is not None and there == "new":
        if "fsync directory" not in str(error) or "renameat" not in before:
            raise BadPointError(f"new is there: {error!r}")
        return "late"
    return there


def described(error: BaseException) -> str:
    return "bad: " + "".join(traceback.format_exception(error))[-1500:]


# ---- In one process -----------------------------------------------------------------------------


def _dcp_load(target: dict[str, Any], directory: Path) -> None:
    dcp.load(target, storage_reader=DcpxReader(directory), no_dist=True)


def _own_load(target: dict[str, Any], directory: Path) -> None:
    torch_dcpx.load(target, directory, no_dist=True)


# name -> who wrote it, what is done, and whether DCP wraps its errors
LOADS: dict[str, tuple[Any, Any, bool | None]] = {
    "dcp.load of ours": (save, _dcp_load, True),
    "dcp.load of stock's": (of_stock, _dcp_load, True),
    "dcp.load of rank-local": (both_rank_local, _dcp_load, None),
    "torch_dcpx.load of ours": (save, _own_load, False),
    "torch_dcpx.load of stock's": (of_stock, _own_load, False),
}


def kept(directory: Path) -> dict[str, bytes]:
    """Returns name -> content of all files but the locks."""
    files = directory.iterdir() if directory.exists() else ()
    return {p.name: p.read_bytes() for p in files if p.is_file() and p.suffix != ".lock"}


class Sweep:
    """One kind of save or load, call by call."""

    def __init__(self, shim: Shim, tree: Path, name: str) -> None:
        self._shim, self._tree, self._is_save = shim, tree, name in KINDS
        self._root = tree / "saves"  # whose own entry, in the tree too, a first save syncs
        self._before, self._act, self._is_wrapped = KINDS[name] if self._is_save else LOADS[name]
        self._is_local = self._is_save and KINDS[name].is_local
        self._seed = self._directories = 0  # the seed: of the state that is there

    def run(self, stride: int, offset: int) -> list[Point]:
        """Returns every point; raises nothing."""
        self._root.mkdir(parents=True)
        self._shim.watch(self._tree)
        self._directory = self._prepared()
        for warm in ("EIO", "EIO", "COUNT"):  # what is imported and kept once
            self._once(warm, 0 if warm == "EIO" else MOST_CALLS)
        names = self._names
        self._settle()
        held, points = Held(), list[Point]()
        for code, calls in sampled(stride, offset, names):
            for nth in calls:
                point = self._once(code, nth)
                if point is None:
                    break
                self._settle()
                points.append(point)
                try:
                    held.assert_no_file_or_thread_more()
                except AssertionError as error:
                    points[-1] = point._replace(outcome=described(error))
        try:
            held.assert_no_memory_more()
        except AssertionError as error:
            points.append(Point("EIO", -1, "all", described(error)))
        return points

    def _settle(self) -> None:
        """Gives back staging memory, which a future's traceback holds until it is collected."""
        if self._act is stocks_background:
            gc.collect()
            process_pool().close()

    def _prepared(self) -> Path:
        """Returns a directory that holds what is to be there before."""
        self._directories += 1
        directory = self._root / f"{self._directories}"
        self._seed += 1
        if self._before is not None:
            self._before(state_of(self._seed), directory)
        return directory

    def _once(self, code: str, nth: int) -> Point | None:
        """Returns the point, or None where there was no such call."""
        try:
            outcome = (self._save_once if self._is_save else self._load_once)(code, nth)
        except Exception as error:  # noqa: BLE001 - what a point shows is told, not raised
            outcome = described(error)
            self._directory = self._prepared()
        return Point(code, nth, self._names[nth], outcome) if len(self._names) > nth else None

    def _tried(self, code: str, nth: int, state: dict[str, Any]) -> BaseException | None:
        """Returns what the act raised while its `nth` system call failed."""
        arm(self._shim, nth, code)
        try:
            self._act(state, self._directory)
        except BaseException as error:  # noqa: BLE001 - looked at by the caller
            return unwrapped(error, is_wrapped=self._is_wrapped)
        finally:
            self._shim.disarm()
            self._names = self._shim.names()
        return None

    def _save_once(self, code: str, nth: int) -> str:
        directory, old, new = self._directory, self._seed, self._seed + 1
        before = kept(directory)
        error = self._tried(code, nth, state_of(new))
        self._seed = new
        call = self._names[nth] if len(self._names) > nth else ""
        if error is not None:
            check_typed(error, code, call, self._tree)
        elif call in ("fsync", "pwrite", "write", "renameat", "fallocate") and code in HARD:
            raise BadPointError(f"{call} failed unnoticed")
        states = {"old": state_of(old), "new": state_of(new)}
        there = state_there(directory, states, is_local=self._is_local)
        outcome = checked_outcome(error, there, self._names[:nth])
        if error is not None and outcome != "late" and kept(directory) != before:
            raise BadPointError(f"{sorted(kept(directory))} where {sorted(before)} was: {error!r}")
        # The next save works and cleans up; what it leaves serves the next point if it can.
        self._seed += 1
        assert_next_save_works(state_of(self._seed), directory, is_local=self._is_local)
        if self._before in (None, of_stock, both_rank_local):
            shutil.rmtree(directory)
            self._directory = self._prepared()
        return outcome

    def _load_once(self, code: str, nth: int) -> str:
        expected = state_of(self._seed)
        target: dict[str, Any] = blank_like(expected)
        error = self._tried(code, nth, target)
        if error is None:
            assert_same(expected, target)
            return "right"
        check_typed(error, code, self._names[nth], self._tree)
        check_untouched(error, target, expected)
        again: dict[str, Any] = blank_like(expected)
        self._act(again, self._directory)
        assert_same(expected, again)
        return "raised"


# ---- On two ranks -------------------------------------------------------------------------------


def _rank_save(state: dict[str, Any], directory: Path) -> None:
    dcp.save(state, storage_writer=DcpxWriter(directory))


def _rank_background(state: dict[str, Any], directory: Path) -> None:
    torch_dcpx.async_save(state, directory).result()


def _rank_load(target: dict[str, Any], directory: Path) -> None:
    dcp.load(target, storage_reader=DcpxReader(directory))


# name -> what is done, and whether DCP wraps its errors
RANK_SAVES: dict[str, tuple[Callable[..., object], bool]] = {
    "dcp.save of 2 ranks": (_rank_save, True),
    "torch_dcpx.save of 2 ranks": (torch_dcpx.save, False),
    "torch_dcpx.async_save of 2 ranks": (_rank_background, False),
}
RANK_LOADS: dict[str, tuple[Callable[..., object], bool]] = {
    "dcp.load of 2 ranks": (_rank_load, True),
    "torch_dcpx.load of 2 ranks": (torch_dcpx.load, False),
}


def from_all(said: Any) -> list[Any]:
    """Returns what each rank says."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, said)
    return found


class RankSweep:
    """One kind of save or load on this rank; both ranks are always at the same point."""

    def __init__(self, shim: Shim, tree: Path, name: str) -> None:
        self._shim, self._tree, self._rank = shim, tree, dist.get_rank()
        self._is_save, self._directory = name in RANK_SAVES, tree / "checkpoint"
        self._act, self._is_wrapped = (RANK_SAVES | RANK_LOADS)[name]
        self._seed = 1

    def run(self, stride: int, offset: int) -> list[Point]:
        """Returns every point, on each rank."""
        self._shim.watch(self._tree)
        _rank_save(of_rank(self._seed, self._rank), self._directory)
        names = []
        for victim in range(2):
            self._once("EIO", 0, victim)
            self._once("COUNT", MOST_CALLS, victim)
            names.append(self._names)
        held, points = Held(), list[Point]()
        for victim in range(2):
            for code, calls in sampled(stride, offset, names[victim]):
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
        if self._rank == victim:
            arm(self._shim, nth, code)
        state = of_rank(self._seed + self._is_save, self._rank)
        target: dict[str, Any] = state if self._is_save else blank_like(state)
        error: BaseException | None = None
        try:
            self._act(target, self._directory)
        except BaseException as caught:  # noqa: BLE001 - looked at below
            error = caught
        self._shim.disarm()
        self._names = names = from_all(self._shim.names())[victim]
        has_failed = from_all(error is not None)
        call = names[nth] if len(names) > nth else ""
        try:
            if len(set(has_failed)) != 1:
                raise BadPointError(f"raised by rank: {has_failed}: {error!r}")
            one = error and unwrapped(error, is_wrapped=self._is_wrapped)
            if one is not None:
                check_typed(one, code, call, self._tree)
            check = self._checked_save if self._is_save else self._checked_load
            outcome = check(one, names[:nth], target, victim)
        except Exception as bad:  # noqa: BLE001 - what a point shows is told, not raised
            outcome = described(bad)
        if self._is_save:  # the next one works and cleans up
            self._seed += 2
            try:
                _rank_save(of_rank(self._seed, self._rank), self._directory)
                if self._rank == 0:
                    assert_whole(of_all(self._seed), self._directory)
            except Exception as bad:  # noqa: BLE001 - told
                outcome = described(bad)
        worst = max(from_all(outcome), key=lambda text: text.startswith("bad"))
        return Point(code, nth, f"{call} of rank {victim}", worst) if call else None

    def _checked_load(
        self, error: BaseException | None, _: list[str], target: dict[str, Any], victim: int
    ) -> str:
        state = of_rank(self._seed, self._rank)
        if error is None:
            assert_same(state, target)
        elif self._rank == victim:
            check_untouched(error, target, state)
        return "right" if error is None else "raised"

    def _checked_save(self, error: BaseException | None, before: list[str], *_: Any) -> str:
        if self._rank != 0:
            return ""
        states = {"old": of_all(self._seed), "new": of_all(self._seed + 1)}
        return checked_outcome(error, state_there(self._directory, states), before)
