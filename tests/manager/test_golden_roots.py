"""Roots of managers of earlier layouts resume, bit for bit, and go on."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from golden.make_manager import SAVED, expected, training
from support.states import assert_same

from torch_dcpx import CheckpointManager

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
KINDS = pytest.mark.parametrize("kind", ["plain", "fsdp2"])


@pytest.fixture
def root(tmp_path: Path, kind: str) -> Path:
    with tarfile.open(GOLDEN / "manager-0.1.0.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / kind


def resumed(manager: CheckpointManager, kind: str) -> tuple[Any, dict[str, Any]]:
    run = training(kind)
    info = manager.resume(**run._asdict())
    assert info is not None
    found = run.tensors()
    assert_same({name: expected(name, t).to(t.dtype) for name, t in found.items()}, found)
    assert {name.split(".")[0] for name in found} == {"0", "1", "2", "adamw", "sgd"}
    if kind == "plain":
        for name in ("0.weight", "adamw.0.weight.exp_avg", "adamw.0.weight.exp_avg_sq"):
            assert found[name].is_contiguous(memory_format=torch.channels_last), name
    assert {**run.state, "seen": run.state["seen"].tolist()} == SAVED
    assert run.optimizer["sgd"].param_groups[0]["lr"] == 0.25  # by the schedule's one step
    assert run.optimizer["adamw"].param_groups[1]["initial_lr"] == 0.5
    assert run.lr_scheduler.last_epoch == 1
    return info, run._asdict()


@KINDS
def test_earlier_root_resumes_and_is_ours(root: Path, kind: str) -> None:
    with CheckpointManager(root, no_dist=True, async_save=False, keep_last=1) as manager:
        assert manager.tags() == ["step-1", "step-2"]
        info, parts = resumed(manager, kind)
        assert (info.tag, info.step, info.skipped) == ("step-2", 2, ())
        assert info.user_content == {"note": "of then"}
        manager.save(3, **parts)
        manager.wait()
        assert manager.tags() == ["step-3"]
    with CheckpointManager(root, no_dist=True) as manager:
        info, _ = resumed(manager, kind)
        assert info.step == 3
