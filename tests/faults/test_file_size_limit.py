"""A limit on the size of files: EFBIG of the real system, at the data and at the metadata."""

from __future__ import annotations

import errno
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.leaks import Held, grown_each_time
from support.saves import assert_whole, files_in, raises_one, save

from torch_dcpx import StorageError, WriteOptions


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Limits what this process may write; Python ignores the signal that comes with it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def many(seed: int) -> dict[str, Any]:
    return {f"layer{i}": torch.full((3, i), seed) for i in range(200)}


def one(seed: int) -> dict[str, Any]:
    return {"large": torch.full((1 << 20,), seed), "step": seed}


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize(
    ("state_of", "nbytes", "kwargs", "failing"),
    [
        (one, 1 << 20, {}, "__0_0"),
        (one, 1 << 20, {"options": WriteOptions(direct_io=False)}, "__0_0"),
        (one, 1 << 20, {"options": WriteOptions(files_per_rank=2)}, "__0_"),
        # Files of one item each are small; what names them all is not.
        (many, 16 << 10, {"single_file_per_rank": False, "sync_files": False}, ".metadata"),
    ],
    ids=["one file", "buffered", "two files", "metadata"],
)
@grown_each_time
def test_file_that_may_not_grow_fails_the_save_with_numbers_and_keeps_the_old(
    tmp_path: Path, state_of: Any, nbytes: int, kwargs: dict[str, Any], failing: str
) -> None:
    save(state_of(0), tmp_path, **kwargs)
    before = files_in(tmp_path)

    def fail() -> Any:
        with files_of_at_most(nbytes), raises_one(StorageError) as raised:
            save(state_of(1), tmp_path, **kwargs)
        # Its traceback holds the frames of the save, and they all that the save had.
        raised.error.__cause__ = raised.error.__context__ = None
        return raised.error.with_traceback(None)

    fail()
    held = Held()
    error = fail()
    held.assert_no_file_or_thread_more()
    held.assert_no_memory_more()
    assert error.errno == errno.EFBIG
    assert Path(error.path).name.startswith(failing)
    assert error.offset is not None
    assert f"{error.nbytes} B at offset {error.offset} of '{error.path}'" in str(error)
    assert re.search(rf"\(needed {error.nbytes} B, free \d+ B; .* room for both\)", str(error))
    assert files_in(tmp_path) == before
    save(state_of(2), tmp_path, **kwargs)
    assert_whole(state_of(2), tmp_path)
