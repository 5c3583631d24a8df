"""Every call of an operation fails once: what is checked then, in one process or on two ranks.

Behind call_shim. A sweep goes on until a whole run passes without meeting its fault.
"""

from __future__ import annotations

import errno
import gc
import os
import re
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
    Kind,
    assert_next_save_works,
    both_rank_local,
    of_all,
    of_rank,
    of_stock,
    state_of,
    state_there,
    stocks_background,
)
from support import call_shim
from support.call_shim import Action, Shim
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
WRITING = ("fsync", "pwrite", "write", "renameat", "fallocate")  # none of which may fail unheard
REPLACED = (None, of_stock, both_rank_local)  # what is there once: a save of ours replaces it


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
        shim.arm(nth, Action.COUNT, 0, call_shim.Kind.ALL)
    elif code == "SHORT":
        shim.arm(nth, Action.SHORT, 0, call_shim.Kind.MOVES)
    else:
        shim.arm(nth, Action.FAIL, getattr(errno, code), call_shim.Kind.ALL)


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


# ---- What is done, in one process and on two ranks ---------------------------------------------


def _dcp_load(target: dict[str, Any], directory: Path) -> None:
    dcp.load(target, storage_reader=DcpxReader(directory), no_dist=True)


def _own_load(target: dict[str, Any], directory: Path) -> None:
    torch_dcpx.load(target, directory, no_dist=True)


def _rank_save(state: dict[str, Any], directory: Path) -> None:
    dcp.save(state, storage_writer=DcpxWriter(directory))


def _rank_background(state: dict[str, Any], directory: Path) -> None:
    torch_dcpx.async_save(state, directory).result()


def _rank_load(target: dict[str, Any], directory: Path) -> None:
    dcp.load(target, storage_reader=DcpxReader(directory))


RANK_SAVES = {
    "dcp.save of 2 ranks": Kind(_rank_save, _rank_save),
    "torch_dcpx.save of 2 ranks": Kind(_rank_save, torch_dcpx.save, False),
    "torch_dcpx.async_save of 2 ranks": Kind(_rank_save, _rank_background, False),
}
SAVES = {**KINDS, **RANK_SAVES}
# name -> who wrote it, what is done, and whether DCP wraps its errors
LOADS: dict[str, tuple[Any, Any, bool | None]] = {
    "dcp.load of ours": (save, _dcp_load, True),
    "dcp.load of stock's": (of_stock, _dcp_load, True),
    "dcp.load of rank-local": (both_rank_local, _dcp_load, None),
    "torch_dcpx.load of ours": (save, _own_load, False),
    "torch_dcpx.load of stock's": (of_stock, _own_load, False),
}
RANK_LOADS: dict[str, tuple[Any, Any, bool | None]] = {
    "dcp.load of 2 ranks": (_rank_save, _rank_load, True),
    "torch_dcpx.load of 2 ranks": (_rank_save, torch_dcpx.load, False),
}


def kept(directory: Path) -> dict[str, bytes]:
    """Returns name -> content of all files but the locks."""
    files = directory.iterdir() if directory.exists() else ()
    return {p.name: p.read_bytes() for p in files if p.is_file() and p.suffix != ".lock"}


class Sweep:
    """One kind of save or load, call by call; ranks are always at the same point."""

    def __init__(self, shim: Shim, tree: Path, name: str) -> None:
        self._shim, self._tree, self._is_save = shim, tree, name in SAVES
        self._root = tree / "saves"  # whose own entry, in the tree too, a first save syncs
        kinds: dict[str, Any] = {**SAVES, **LOADS, **RANK_LOADS}
        self._before, self._act, self._is_wrapped = kinds[name]
        self._is_local = self._is_save and SAVES[name].is_local
        is_alone = not dist.is_initialized()
        self._rank, self._ranks = (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())
        self._seed = self._directories = 0  # the seed: of the state that is there

    def _state(self, seed: int) -> dict[str, Any]:
        return state_of(seed) if self._ranks == 1 else of_rank(seed, self._rank)

    def _whole(self, seed: int) -> dict[str, Any]:
        return state_of(seed) if self._ranks == 1 else of_all(seed)

    def _from_all(self, said: Any) -> list[Any]:
        """Returns what each rank says."""
        found = [said] * self._ranks
        if self._ranks > 1:
            dist.all_gather_object(found, said)
        return found

    def run(self, stride: int, offset: int) -> list[Point]:
        """Returns every point; raises nothing."""
        self._root.mkdir(parents=True, exist_ok=True)
        self._shim.watch(self._tree)
        self._directory = self._prepared()
        names = []
        for victim in range(self._ranks):
            for warm in ("EIO", "EIO", "COUNT"):  # what is imported and kept once
                self._once(warm, 0 if warm == "EIO" else MOST_CALLS, victim)
            names.append(self._names)
        self._settle()
        held, points = Held(), list[Point]()
        for victim in range(self._ranks):
            for code, calls in sampled(stride, offset, names[victim]):
                for nth in calls:
                    point = self._once(code, nth, victim)
                    if point is None:
                        break
                    self._settle()
                    points.append(point)
                    self._note_leak(held.assert_no_file_or_thread_more, points)
        # Of a point on ranks: three gathers of this test's, and as many of DCP's.
        gathers = 6 * len(points) if self._ranks > 1 else 0
        self._note_leak(lambda: held.assert_no_memory_more(gathers), points)
        return points

    def _note_leak(self, check: Callable[[], None], points: list[Point]) -> None:
        try:
            check()
        except AssertionError as error:
            points.append(points[-1]._replace(outcome=described(error)))

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
            self._before(self._state(self._seed), directory)
        return directory

    def _once(self, code: str, nth: int, victim: int) -> Point | None:
        """Returns the point, with what a rank found bad; None where there was no such call."""
        state, before = self._state(self._seed + self._is_save), kept(self._directory)
        target: dict[str, Any] = state if self._is_save else blank_like(state)
        error: BaseException | None = None
        if self._rank == victim:
            arm(self._shim, nth, code)
        try:
            self._act(target, self._directory)
        except BaseException as caught:  # noqa: BLE001 - looked at below
            error = caught
        finally:
            self._shim.disarm()
        self._names = names = self._from_all(self._shim.names())[victim]
        has_raised = self._from_all(error is not None)
        call = names[nth] if len(names) > nth else ""
        try:
            if len(set(has_raised)) != 1:
                raise BadPointError(f"raised by rank: {has_raised}: {error!r}")
            if error is not None:
                error = unwrapped(error, is_wrapped=self._is_wrapped)
                check_typed(error, code, call, self._tree)
            if self._is_save:
                outcome = self._checked_save(error, code, call, before, names[:nth])
            else:
                outcome = self._checked_load(error, target, victim)
        except Exception as bad:  # noqa: BLE001 - what a point shows is told, not raised
            outcome = described(bad)
        if self._is_save:
            outcome = self._with_the_next(outcome)
        worst = max(self._from_all(outcome), key=lambda text: text.startswith("bad"))
        if worst.startswith("bad") or (self._is_save and self._before in REPLACED):
            self._directory = self._prepared()
        return Point(code, nth, f"{call} of rank {victim}", worst) if call else None

    def _checked_save(
        self, error: BaseException | None, code: str, call: str, before: Any, done: list[str]
    ) -> str:
        if self._rank != 0:
            return ""
        if error is None and self._ranks == 1 and call in WRITING and code in HARD:
            raise BadPointError(f"{call} failed unnoticed")
        states = {"old": self._whole(self._seed), "new": self._whole(self._seed + 1)}
        there = state_there(self._directory, states, is_local=self._is_local)
        outcome = checked_outcome(error, there, done)
        now = kept(self._directory)
        if error is not None and outcome != "late" and self._ranks == 1 and now != before:
            raise BadPointError(f"{sorted(now)} where {sorted(before)} was: {error!r}")
        return outcome

    def _with_the_next(self, outcome: str) -> str:
        """The next save works and cleans up; what it leaves serves the next point if it can."""
        self._seed += 2
        try:
            if self._ranks == 1:
                state = self._state(self._seed)
                assert_next_save_works(state, self._directory, is_local=self._is_local)
            else:
                _rank_save(self._state(self._seed), self._directory)
                if self._rank == 0:
                    assert_whole(of_all(self._seed), self._directory)
        except Exception as bad:  # noqa: BLE001 - told
            return outcome if outcome.startswith("bad") else described(bad)
        return outcome

    def _checked_load(
        self, error: BaseException | None, target: dict[str, Any], victim: int
    ) -> str:
        expected = self._state(self._seed)
        if error is None:
            assert_same(expected, target)
            return "right"
        if self._rank == victim:
            check_untouched(error, target, expected)
        if self._ranks == 1:
            again: dict[str, Any] = blank_like(expected)
            self._act(again, self._directory)
            assert_same(expected, again)
        return "raised"
