"""FSDP2 with several optimizers, stages of a pipeline, FSDP1, several saves in flight."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch as st
from support.ranks import run_cases
from support.states import assert_same

WORKER = Path(__file__).with_name("shapes_worker.py")


@pytest.mark.slow  # 20 s: three processes that import torch
@pytest.mark.multirank
def test_what_two_ranks_saved_one_resumes(tmp_path: Path) -> None:
    run_cases(WORKER, 2, "save", tmp_path)
    stored, live = (
        st.load_file(tmp_path / name / "model.safetensors") for name in ("stored", "live")
    )
    assert_same(stored, live)
    run_cases(WORKER, 1, "resume", tmp_path)
