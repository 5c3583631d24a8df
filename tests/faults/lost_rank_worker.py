"""One rank of test_lost_ranks.py: saves while another rank is killed or stopped.

lost_rank_worker.py RANK WORLD PORT FOLDER KIND LOST PHASE
    KIND    "save" or "async_save", or DCP's with our writer: "dcp.save" or "dcp.async_save"
    LOST    the rank that is lost in PHASE: it says so by a file, and waits to be killed or stopped
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from torch_dcpx import DcpxWriter, WriteOptions, async_save, save
from torch_dcpx._waiting import Deadline
from torch_dcpx.ranks.store_client import client_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.machine import seconds

RANK, WORLD, PORT = map(int, sys.argv[1:4])
FOLDER, KIND, LOST, PHASE = Path(sys.argv[4]), sys.argv[5], int(sys.argv[6]), sys.argv[7]
TIMEOUT_S = seconds(8)  # also the time that a rank has which nobody ends


def lose(phase: str) -> None:
    """Stays here if this rank is to be lost in this phase."""
    if (RANK, phase) == (LOST, PHASE):
        if not KIND.startswith("dcp"):  # a phase is posted, not waited for: the others must know it
            assert client_of(dist.group.WORLD).settle(Deadline(TIMEOUT_S))
        (FOLDER / "lost-now").touch()
        time.sleep(600)


class LosingPlanner(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        lose("planning")
        return super().create_local_plan()


class LosingWriter(DcpxWriter):
    def finish(self, *args: Any, **kwargs: Any) -> None:
        lose("before the commit")
        super().finish(*args, **kwargs)
        lose("after the commit")


def progress(_done: int, _total: int) -> None:
    lose("writing")


def state_of(value: float) -> dict[str, Any]:
    return {f"rank{RANK}": torch.full((1000,), value), "step": int(value)}


def main() -> None:
    store = dist.TCPStore("127.0.0.1", PORT, WORLD, is_master=False)  # the test hosts it
    # DCP's ranks wait for each other in collectives of the group, as long as that says.
    limit = timedelta(seconds=seconds(20)) if KIND.startswith("dcp") else None
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD, timeout=limit)
    path = FOLDER / "checkpoint"
    save(state_of(1), path)
    dist.barrier()
    options = WriteOptions(save_timeout_s=TIMEOUT_S, progress=progress)
    writer = LosingWriter(path, options=options)
    said: dict[str, Any] = {"raised": None}
    try:
        if KIND == "save":
            save(state_of(2), storage_writer=writer, planner=LosingPlanner())
        elif KIND == "dcp.save":
            dcp.save(state_of(2), storage_writer=writer, planner=LosingPlanner())
        elif KIND == "dcp.async_save":
            future: Any = dcp.async_save(
                state_of(2), storage_writer=writer, planner=LosingPlanner()
            )
            future.result(seconds(120))
        else:
            async_save(state_of(2), storage_writer=writer, planner=LosingPlanner()).result(
                seconds(120)
            )
    except Exception as error:  # noqa: BLE001  (told to the test)
        said = {"raised": type(error).__name__, "text": str(error)}
    (FOLDER / f"said-{RANK}").write_text(json.dumps(said))
    os._exit(0)


if __name__ == "__main__":
    main()
