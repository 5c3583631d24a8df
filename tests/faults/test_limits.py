"""Little memory, few files, refused system calls, disks that are full or read-only, odd umasks.

Each case saves and loads in a process of its own, by every entry point: success, or a typed error
and the old checkpoint whole. DCPX_EVERY_POINT=1 runs every case instead of a sample by seed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from forks import assert_none_bad, table_of
from support.machine import EVERY_POINT

WORKER = Path(__file__).with_name("limits_worker.py")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "group",
    [
        "files",
        "memory",
        "seccomp",
        "umask",
        pytest.param("read_only", marks=pytest.mark.root),
        pytest.param("full", marks=pytest.mark.root),
    ],
)
def test_save_and_load_work_or_raise_typed_errors(tmp_path: Path, seed: int, group: str) -> None:
    chosen = "0" if EVERY_POINT else str(seed + 1)
    assert_none_bad(table_of(WORKER, str(tmp_path), group, chosen, timeout_s=3500))
