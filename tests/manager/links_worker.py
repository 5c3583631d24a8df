"""Calls of a manager through links, on several ranks: `test_links.py` starts it.

`latest` is a link to step-300, `gone` one to nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.worker import rank_case
from trainings import manager_of

from torch_dcpx import UnsupportedError


@rank_case()
def main(root: Path) -> None:
    manager = manager_of(root)
    before = sorted(path.name for path in (*root.iterdir(), *(root / "step-300").iterdir()))
    dist.barrier()
    for tag, target in (("latest", "step-300"), ("gone", "step-9")):
        for change in (
            lambda tag: manager.save(tag, state={"x": torch.zeros(3)}),
            manager.pin,
            manager.unpin,
            manager.delete,
        ):
            with pytest.raises(UnsupportedError, match=f"{tag}.*link to '{target}'"):
                change(tag)
    assert before == sorted(path.name for path in (*root.iterdir(), *(root / "step-300").iterdir()))
    state = {"x": torch.zeros(3)}
    assert manager.resume(state=state, tag="latest").step == 300
    manager.save(301, state=state)
    assert manager.tags() == ["step-300", "step-301"]
