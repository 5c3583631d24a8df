"""Every call of an operation fails once: what must hold after each, counted (behind call_shim).

A scenario prepares a directory, does something to it, and says what may be found afterwards. The
process does this again for each call, until a whole run passes without meeting its fault.
"""

from __future__ import annotations

import errno
import os
import re
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support.call_shim import Action, Kind, Shim
from support.saves import READERS, assert_whole, load
from support.states import assert_same
from torch.distributed.checkpoint.api import CheckpointException

from torch_dcpx import DcpxError

HARD = ("EIO", "ENOSPC", "EDQUOT", "EMFILE", "EACCES", "EROFS", "ESTALE")
CODES = (*HARD, "EINTR", "SHORT")
MOST_CALLS = 1000
# However few points are tried, one is refused (the fourth call opens the directory, or looks at it)
# and one is passed (the first bytes that are moved come in two parts).
ENDS = (("EIO", 3), ("SHORT", 0))


def sampled(stride: int, offset: int) -> Iterator[tuple[str, Iterator[int]]]:
    """Yields each code and the calls that are to fail with it, until there is no such call."""
    for code, nth in ENDS if stride > 1 else ():
        yield code, iter((nth,))
    for at, code in enumerate(CODES):
        yield code, iter(range((offset + at) % stride, MOST_CALLS, stride))


class BadPointError(AssertionError):
    """Something that must not be, after one call has failed."""


class Point(NamedTuple):
    """One call that failed, and with what."""

    code: str
    nth: int
    call: str
    outcome: str  # new, old, none, late (raised after the commit), right, raised, or bad: why


def state_of(seed: int) -> dict[str, Any]:
    """Returns a state that takes each way through the engine: packed, gathered, in place, bytes."""
    g = torch.Generator().manual_seed(seed)
    return {
        "small": torch.randn(100, generator=g),
        "strided": torch.randn(60, 50, generator=g).t(),
        "large": torch.randn(150_000, generator=g),
        "step": seed,
    }


def of_rank(seed: int, rank: int) -> dict[str, Any]:
    """Returns what a rank of several holds: tensors of its own, and a number that all have."""
    own = state_of(2 * seed + rank)
    return {**{f"{name}.{rank}": value for name, value in own.items()}, "step": seed}


def of_all(seed: int, ranks: int = 2) -> dict[str, Any]:
    """Returns what all ranks hold together."""
    return {name: v for rank in range(ranks) for name, v in of_rank(seed, rank).items()}


def kept(directory: Path) -> dict[str, bytes]:
    """Returns name -> content of all files but the locks."""
    if not directory.exists():
        return {}
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.is_file() and not path.name.endswith(".lock")
    }


def arm(shim: Shim, nth: int, code: str, *, lasting: bool = False) -> None:
    """Lets the `nth` call fail with `code`, or cuts it short."""
    if code == "SHORT":
        shim.arm(nth, Action.SHORT, 0, Kind.MOVES)
    else:
        shim.arm(nth, Action.FAIL, getattr(errno, code), Kind.ALL, lasting=lasting)


def unwrapped(error: BaseException, *, is_wrapped: bool | None) -> BaseException:
    """Returns the error of this rank, out of what DCP wraps it in where it does (None: maybe).

    Its frames are dropped: they hold all that the call had.
    """
    error.__traceback__ = None
    if is_wrapped is False:
        return error
    if not isinstance(error, CheckpointException):
        if is_wrapped is None:
            return error
        raise BadPointError(f"not wrapped: {error!r}")
    (first, *_) = error.failures.values()
    return first[0].with_traceback(None)


def check_typed(error: BaseException, code: str, call: str, tree: Path) -> None:
    """Raises BadPointError unless the error names what happened, where, and how much."""
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


def state_there(directory: Path, states: dict[str, dict[str, Any]]) -> str:
    """Returns which of the states both readers find, bit for bit, or "none"."""
    if not (directory / ".metadata").exists():
        return "none"
    found = []
    for reader in READERS:
        loaded = load(next(iter(states.values())), directory, reader)
        found += [name for name, state in states.items() if state["step"] == loaded["step"]]
        assert_same(states[found[-1]], loaded)
    if len(set(found)) != 1:
        raise BadPointError(f"the readers disagree: {found}")
    return found[0]


def assert_next_save_works(save: Any, directory: Path, seed: int) -> None:
    """Asserts that a save succeeds now, and leaves its own files alone."""
    save(state_of(seed), directory)
    assert_whole(state_of(seed), directory)


def described(error: BaseException) -> str:
    return "bad: " + "".join(traceback.format_exception(error))[-1500:]


def table(title: str, points: list[Point]) -> str:
    """Returns a line: points tried, by what they failed with, by what came of it, bad ones."""
    by_code = Counter(point.code for point in points)
    outcomes = Counter(point.outcome for point in points if not point.outcome.startswith("bad"))
    bad = sum(point.outcome.startswith("bad") for point in points)
    codes = " ".join(f"{code} {by_code[code]}" for code in CODES if by_code[code])
    found = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
    return f"{title}: {len(points)} points ({codes}): {found}; {bad} bad"


def chosen(count: int, stride: int, offset: int) -> Iterator[int]:
    """Yields each `stride`-th of `count` numbers, from `offset` on."""
    yield from range(offset % stride, count, stride)
