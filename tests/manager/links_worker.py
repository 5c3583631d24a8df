"""Calls of a manager through links, on several ranks: `test_links.py` starts it.

links_worker.py ROOT      `latest` is a link to step-300 there, `gone` one to nothing
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.ranks import leave_well
from trainings import manager_of

from torch_dcpx import UnsupportedError


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    root = Path(sys.argv[1])
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
    leave_well()


if __name__ == "__main__":
    main()
