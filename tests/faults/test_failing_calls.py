"""System calls of a save and of a load fail once: typed error, or the right result.

C++ calls fail through the seam (`_C.arm_fault`), Python's by a stand-in for `os`. Each loop goes
on until a whole run passes without meeting its fault. C++ calls of saves: test_every_call.py.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.leaks import Held, grown_each_time
from support.saves import assert_loads, assert_whole, files_in, save
from support.states import assert_same, blank_like
from torch.distributed.checkpoint.api import CheckpointException

from torch_dcpx import (
    _C,
    DcpxReader,
    StorageError,
    WriteOptions,
    _descriptors,
)
from torch_dcpx.storage import directory

ROOM = [errno.ENOSPC, errno.EDQUOT, errno.EFBIG]  # room cures these
HARD = [errno.EIO, *ROOM, errno.EMFILE, errno.EACCES, errno.EROFS]
SOME_HARD = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES]  # a disk, room, a quota, a right
SHORT = 0  # a read or write moves half of its bytes
MAX_CALLS = 500
OPTIONS = WriteOptions(workers=2, slot_bytes=256 << 10, host_memory_bytes=512 << 10)


def state_of(seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {
        "small": torch.randn(100, generator=g),
        "strided": torch.randn(300, 402, generator=g)[::2, 1::3],
        "large": torch.randn(150_000, generator=g),
        "step": seed,
    }


def calls_so_far() -> int:
    return sum(_C.call_counts().values())


@contextmanager
def armed(nth: int, code: int) -> Iterator[SimpleNamespace]:
    """Lets the nth call from now on fail; `is_fired` says whether there was one."""
    seam = SimpleNamespace(is_fired=False)
    before = calls_so_far()
    _C.arm_fault(nth, code, "")
    try:
        yield seam
    finally:
        _C.disarm_fault()
        seam.is_fired = calls_so_far() - before > nth


def try_save(seed: int, path: Path) -> Any:
    """Returns None, or the error of the failed save."""
    try:
        save(state_of(seed), path, options=OPTIONS)
    except CheckpointException as failure:
        failure.__traceback__ = None  # its frames hold the failure, and all that the save had
        return failure.failures[0][0].with_traceback(None)
    return None


def try_load(state: dict[str, Any], path: Path) -> tuple[dict[str, Any], Any]:
    """Returns what was loaded, and None or the error of the failed load."""
    target = blank_like(state)
    try:
        dcp.load(target, storage_reader=DcpxReader(path), no_dist=True)
    except CheckpointException as failure:
        return target, failure.failures[0][0].with_traceback(None)
    return target, None


def assert_typed(error: Any, code: int, path: Path) -> None:
    text = str(error)
    assert type(error) is StorageError, repr(error)
    assert error.errno == code
    assert error.path is not None
    assert path in (Path(error.path), Path(error.path).parent)
    assert os.strerror(code) in text
    assert code != errno.EIO or "free" not in text  # room says nothing of a disk that fails
    if code not in ROOM or text.startswith(("list", "open directory")):
        return
    # Where and how much, as far as there is an offset; of a quota not what is free there.
    said = r"a quota [^;]*" if code == errno.EDQUOT else r"free \d+ B[^;]*"
    numbers = re.search(rf"\((needed (\d+) B, )?{said}; [^;]* needs room for both\)$", text)
    assert numbers is not None, text
    if text.startswith(("create", "rename", "mkdir", "fsync directory", "open lock")):
        assert (error.offset, error.nbytes) == (None, None)
    else:
        assert numbers[2] == str(error.nbytes)
        assert f" {error.nbytes} B at offset {error.offset} of" in text


# ---- Calls of C++ -------------------------------------------------------------------------------


def test_every_interrupted_call_of_a_save_and_a_load_is_continued(tmp_path: Path) -> None:
    for nth in range(MAX_CALLS):
        with armed(nth, errno.EINTR) as saving:
            assert try_save(1, tmp_path) is None
        if not saving.is_fired:
            break
    assert nth > 8
    for nth in range(MAX_CALLS):
        with armed(nth, errno.EINTR) as loading:
            found, error = try_load(state_of(1), tmp_path)
        assert error is None
        assert_same(state_of(1), found)
        if not loading.is_fired:
            break
    assert nth > 5


def test_short_counts_change_no_byte_of_the_files(tmp_path: Path) -> None:
    """Both saves write the same bytes up to the random file id, which lies in the footer."""
    state = state_of()  # one: payloads lie congruent to the memory that they came from
    save(state, tmp_path / "whole", options=OPTIONS)
    expected = (tmp_path / "whole" / "__0_0.distcp").read_bytes()
    for nth in range(MAX_CALLS):
        with armed(nth, SHORT) as seam:
            save(state, tmp_path / str(nth), options=OPTIONS)
        found = (tmp_path / str(nth) / "__0_0.distcp").read_bytes()
        assert found[:-4096] == expected[:-4096]
        if not seam.is_fired:
            break


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("writer", ["ours", "stock"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOENT, errno.ESTALE, SHORT])
def test_load_with_any_call_of_cpp_failing_is_typed_or_right(
    tmp_path: Path, code: int, writer: str
) -> None:
    state = state_of()
    save(state, tmp_path, writer)
    for nth in range(MAX_CALLS):
        with armed(nth, code) as seam:
            found, error = try_load(state, tmp_path)
        if error is not None:
            assert isinstance(error, StorageError), repr(error)
            assert (error.errno, error.path) == (code, str(tmp_path / "__0_0.distcp"))
            blanks = {k: v for k, v in blank_like(state).items() if k not in (error.touched or ())}
            assert_same(blanks, {name: found[name] for name in blanks})
        else:
            assert_same(state, found)
        if not seam.is_fired:
            break
    assert nth > 5
    assert error is None


# ---- Calls of Python ----------------------------------------------------------------------------


class CountingOs:
    """The os module; the nth call of one function fails."""

    def __init__(self, name: str, nth: int, code: int) -> None:
        self._name, self._nth, self._code = name, nth, code
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._counted(name, real) if name == self._name else real

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            number = self.calls[name]
            self.calls[name] += 1
            if number == self._nth:
                raise OSError(self._code, os.strerror(self._code))
            return real(*args, **kwargs)

        return call


PYTHON_CALLS = ["open", "write", "fsync", "rename", "listdir", "fstat"]


def patch_python(patch: pytest.MonkeyPatch, failing: CountingOs) -> None:
    for module in (directory, _descriptors):  # which opens files for all of the package
        patch.setattr(module, "os", failing)


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("name", PYTHON_CALLS)
@grown_each_time
def test_save_with_any_call_of_python_failing_leaves_old_or_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, seed: int
) -> None:
    code = HARD[(seed + PYTHON_CALLS.index(name)) % len(HARD)]
    save(state_of(0), tmp_path)
    with monkeypatch.context() as patch:
        patch_python(patch, CountingOs(name, 0, code))
        try_save(0, tmp_path)
    assert_loads(state_of(0), tmp_path)  # what a load imports is not counted
    held = Held()
    current, outcomes = 0, []
    for nth in range(MAX_CALLS):
        before = files_in(tmp_path)
        failing = CountingOs(name, nth, code)
        with monkeypatch.context() as patch:
            patch_python(patch, failing)
            error = try_save(nth + 1, tmp_path)
        held.assert_no_file_or_thread_more()
        is_fired = failing.calls[name] > nth
        if error is None:
            current = nth + 1  # after the commit, where the old files are removed, or not at all
            outcomes.append("new")
        else:
            assert_typed(error, code, tmp_path)
            assert failing.calls[name] == nth + 1 or name != "fsync", "a failed fsync is final"
            after = files_in(tmp_path)
            if after.get(".metadata") == before[".metadata"]:
                assert after == before, (name, nth)
                outcomes.append("old")
            else:  # the rename was done; only making it durable failed
                assert (name, str(error).split(" '")[0]) == ("fsync", "fsync directory")
                current = nth + 1
                outcomes.append("new, but raised")
        assert_loads(state_of(current), tmp_path)
        if not is_fired:
            break
    held.assert_no_memory_more()
    assert nth > 0
    assert error is None
    save(state_of(99), tmp_path)
    assert_whole(state_of(99), tmp_path)
    if name == "fsync":
        # Behind a failed save, before its leftovers go; of the new files' entries, of the metadata,
        # of its entry.
        assert outcomes == ["old", "old", "old", "new, but raised", "new"]


@pytest.mark.usefixtures("no_leaks")
def test_old_file_that_cannot_be_removed_fails_no_save_and_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for code in SOME_HARD:
        path = tmp_path / str(code)
        save(state_of(0), path)
        failing = CountingOs("unlink", 0, code)
        with monkeypatch.context() as patch:
            patch.setattr(directory, "os", failing)
            assert try_save(1, path) is None, code
        assert failing.calls["unlink"] == 1
        assert_loads(state_of(1), path)
        assert (path / "__0_0.distcp").exists()
        save(state_of(2), path)
        assert_whole(state_of(2), path)


@pytest.mark.usefixtures("no_leaks")
def test_directory_that_cannot_be_made_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = os.mkdir
    for code, depth in itertools.product(SOME_HARD, (0, 1)):
        path = tmp_path / f"{code}" / "b"
        failing = (path.parent, path)[depth]

        def fail(made: Path, *args: Any, code: int = code, failing: Path = failing) -> None:
            if made == failing:
                raise OSError(code, os.strerror(code))
            mkdir(made, *args)

        with monkeypatch.context() as patch:
            patch.setattr(os, "mkdir", fail)
            error = try_save(1, path)
        assert_typed(error, code, failing)
        assert error.path == str(failing)
    assert try_save(1, path) is None
    assert_whole(state_of(1), path)
