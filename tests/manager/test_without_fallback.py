"""`resume(fallback=False)`: whatever of the newest commit is wrong is an error, and no older one.

Bytes of what is asked for are in `test_fallback.py`; here is what makes a commit no whole one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from trainings import manager_of, save_steps

from torch_dcpx import CorruptionError, DcpxError, ShortReadError, StorageError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save_steps(manager_of(tmp_path), 150, 160)
    return tmp_path


def test_newest_that_is_not_whole_is_an_error(root: Path) -> None:
    """Bytes, metadata, record and sizes: whatever of a committed one is wrong is the error."""

    def spoil_record(path: Path) -> None:
        file = next(path.glob("__0_*.distcp"))
        data = file.read_bytes()
        assert b'"parts"' in data
        file.write_bytes(data.replace(b'"parts"', b'"p\0rts"'))

    def cut(path: Path) -> None:
        file = next(path.glob("__0_*.distcp"))
        file.write_bytes(file.read_bytes()[:-1])

    breaks: list[tuple[Callable[[Path], None], type[DcpxError]]] = [
        (spoil_record, CorruptionError),
        (lambda path: (path / ".metadata").write_bytes(b"cut"), CorruptionError),
        (cut, ShortReadError),
        (lambda path: next(path.glob("__0_*.distcp")).unlink(), StorageError),
    ]
    for step, (spoil, error) in enumerate(breaks, 200):
        save_steps(manager_of(root), step)
        spoil(root / f"step-{step}")
        for allow_fresh in (False, True):
            with pytest.raises(error, match=f"step-{step}"):
                manager_of(root, allow_fresh=allow_fresh).resume(fallback=False)
        assert manager_of(root).resume().tag == "step-160"
        shutil.rmtree(root / f"step-{step}")


def test_save_that_did_not_end_is_no_error(root: Path) -> None:
    for step in (160, 200):
        (root / f"step-{step}").mkdir(exist_ok=True)
        (root / f"step-{step}" / ".metadata").unlink(missing_ok=True)
    info = manager_of(root, allow_older=True).resume(fallback=False)  # the pointer names step-160
    skipped = [tag for tag, _ in info.skipped]
    assert (info.tag, skipped) == ("step-150", ["step-160", "step-200"])


def test_older_one_may_be_damaged(root: Path) -> None:
    (root / "step-150" / ".metadata").write_bytes(b"cut")
    assert manager_of(root).resume(fallback=False).tag == "step-160"
