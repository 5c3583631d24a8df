"""One of two ranks is killed before any of its system calls under `dcp.save` or `dcp.async_save`:
the other one's save ends, old or new is there, and the next save works and cleans up."""

from __future__ import annotations

from pathlib import Path

import pytest
from forks import assert_none_bad, table_of
from support.call_shim import compiled, preloaded
from support.machine import EVERY_POINT, stride

WORKER = Path(__file__).with_name("lost_at_calls_worker.py")


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(3000)
def test_rank_killed_at_any_call_ends_the_other_and_leaves_old_or_new(
    tmp_path: Path, seed: int
) -> None:
    library = compiled(tmp_path)
    rows = table_of(
        WORKER, str(library), str(tmp_path), str(1 if EVERY_POINT else stride(12)), str(seed),
        timeout_s=2900, environment={"LD_PRELOAD": preloaded(library)["LD_PRELOAD"]},
    )  # fmt: skip
    assert_none_bad(rows)
    assert len({group for group, case, _ in rows if case != "no call"}) == 4
