"""`resume` of several ranks where the newest checkpoint is damaged: for test_fallback.py."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.worker import rank_case
from trainings import damage, large, manager_of

from torch_dcpx import CorruptionError, MismatchError, PlanError


def state_of(value: float) -> dict[str, Any]:
    """A tensor of each rank's own."""
    return {f"x{dist.get_rank()}": large(value)}


def saved(root: Path, *steps: int) -> Path:
    manager = manager_of(root)
    for step in steps:
        manager.save(step, state=state_of(step))
    dist.barrier()
    return root


def damaged(root: Path, step: int, rank: int) -> Path:
    """Damages what one rank wrote; all get the file's name."""
    file = sorted((root / f"step-{step}").glob(f"__{rank}_*.distcp"))[0]
    dist.barrier()
    if dist.get_rank() == 0:
        damage(root / f"step-{step}", rank)
    dist.barrier()
    return file


def all_ranks_fall_back(root: Path, rank: int, warnings: list[str]) -> None:
    file = damaged(saved(root, 1, 2), 2, rank)
    state = state_of(0)
    warnings.clear()
    info = manager_of(root).resume(state=state)
    assert (info.tag, info.step) == ("step-1", 1)
    assert [over[:2] for over in info.passed_over] == [("step-2", str(file))]
    assert set(next(iter(state.values())).tolist()) == {1.0}
    assert len(warnings) == (1 if dist.get_rank() == 0 else 0), warnings
    dist.barrier()


def all_ranks_hear_that_nothing_is_good(root: Path) -> None:
    files = [damaged(saved(root, step), step, step % 2) for step in (1, 2)]
    with pytest.raises(CorruptionError) as info:
        manager_of(root).resume(state=state_of(0))
    assert all(str(file) in str(info.value) for file in files)
    with pytest.raises(CorruptionError, match="step-2"):
        manager_of(root).resume(state=state_of(0), fallback=False)
    with pytest.raises(PlanError, match="rank 1: fallback=False where rank 0 has True"):
        manager_of(root).resume(state=state_of(0), fallback=dist.get_rank() == 0)


def what_one_rank_would_keep_is_an_error_on_all(root: Path) -> None:
    manager = manager_of(saved(root, 1))
    own = state_of(2)
    more = {"y": large(2)} if dist.get_rank() == 1 else {}
    manager.save(2, state={**own, **more})
    dist.barrier()
    damaged(root, 2, 1)
    for forgiven in ({"strict": False}, {"allow_missing": ["state.y"]}):
        with pytest.raises(CorruptionError, match=r"does not hold state\.y"):
            manager.resume(state={**own, **more}, **forgiven)
    with pytest.raises(CorruptionError, match=r"state\.y") as info:
        manager.resume(state={**own, **more})
    assert isinstance(info.value.__cause__, MismatchError)
    assert manager.resume(state=state_of(0)).tag == "step-1"


@rank_case()
def main(root: Path) -> None:
    warnings: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    logging.getLogger("torch_dcpx").addHandler(Heard(logging.WARNING))
    for rank in (0, 1):
        all_ranks_fall_back(root / f"of-{rank}", rank, warnings)
    all_ranks_hear_that_nothing_is_good(root / "none")
    what_one_rank_would_keep_is_an_error_on_all(root / "more")
