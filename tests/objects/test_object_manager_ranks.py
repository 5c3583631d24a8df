"""A manager of several ranks beneath a store's URL: saves, resumes, a rank that cannot upload."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.object_proxy import FaultProxy
from support.ranks import run_cases

pytestmark = pytest.mark.multirank

WORKER = Path(__file__).with_name("object_manager_ranks_worker.py")


def test_ranks_save_resume_fail_and_choose_again_together(
    object_prefix: str, object_proxy: FaultProxy, tmp_path: Path
) -> None:
    run_cases(WORKER, 2, "train", tmp_path, object_prefix)
    run_cases(WORKER, 3, "resume", tmp_path, object_prefix)
    object_proxy.fail("put_object", "403", times=None, key="/step-4/__1_")
    run_cases(WORKER, 2, "fail", tmp_path, object_prefix)
    run_cases(WORKER, 2, "removed", tmp_path, object_prefix)
