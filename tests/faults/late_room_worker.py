"""One rank of test_late_room.py: a save that meets the want of room late, and what is there then.

late_room_worker.py DIRECTORY ERRNO    (under torchrun)
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.machine import seconds
from support.worker import leave_well

import torch_dcpx
from torch_dcpx import StorageError, WriteOptions

RANK = int(os.environ["RANK"])
PATH, NUMBER = Path(sys.argv[1]) / "ckpt", getattr(errno, sys.argv[2])
OPTIONS = WriteOptions(direct_io=False)  # a full thin volume is then met at the fsync


def state_of(seed: int, mebibytes: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed * 10 + RANK)
    return {f"rank{RANK}": torch.randn(mebibytes << 18, generator=generator)}


def check_whole(seed: int, mebibytes: int) -> None:
    expected = state_of(seed, mebibytes)
    found = {name: torch.zeros_like(value) for name, value in expected.items()}
    torch_dcpx.load(found, PATH)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


dist.init_process_group("gloo")
torch_dcpx.save(state_of(0, 4), PATH, options=OPTIONS)
dist.barrier()
before = sorted(os.listdir(PATH))
with pytest.raises(StorageError, match=r"\d+ B at offset \d+ of .+: .+\(needed \d+ B, ") as caught:
    torch_dcpx.save(state_of(1, 40), PATH, options=OPTIONS)
error, text = caught.value, str(caught.value)
assert error.errno == NUMBER, text
assert ("a quota of" if NUMBER == errno.EDQUOT else " B, so full is a quota") in text, text
assert NUMBER != errno.EDQUOT or "free" not in text, text
dist.barrier()  # each removes its own
assert sorted(os.listdir(PATH)) == before
check_whole(0, 4)
(PATH.parent / f"seen.{RANK}").touch()
deadline = time.monotonic() + seconds(60)
while not (PATH.parent / "room").exists():  # which the test makes
    assert time.monotonic() < deadline
    time.sleep(0.01)
torch_dcpx.save(state_of(2, 40), PATH, options=OPTIONS)
check_whole(2, 40)
leave_well()
