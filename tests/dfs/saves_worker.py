"""A rank of `Job`: it resumes, and saves step after step. ROOT NOTES STEPS"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from support.nodes import enter_node

RANK = int(os.environ["RANK"])
_MOUNTS = os.environ["DFS_MOUNTS"].split(":")
enter_node(RANK, _MOUNTS[0], _MOUNTS[RANK])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import torch_dcpx as dcpx  # noqa: E402


def main(root: str, notes: Path, steps: int) -> None:
    began = time.monotonic()

    def note(what: str, **more: object) -> None:
        line = {"what": what, "at_s": round(time.monotonic() - began, 2), **more}
        with (notes / f"rank{RANK}").open("a") as file:
            file.write(json.dumps(line) + "\n")

    dist.init_process_group("gloo")
    timeout_s = float(os.environ["DFS_TIMEOUT_S"])
    state = {f"w{RANK}": torch.zeros(1 << 20), "v": 0}
    manager = dcpx.CheckpointManager(
        root,
        keep_last=3,
        async_save=False,
        allow_fresh="DFS_FRESH" in os.environ,
        options=dcpx.WriteOptions(save_timeout_s=timeout_s),
        read_options=dcpx.ReadOptions(load_timeout_s=timeout_s),
    )
    try:
        taken = manager.resume(state=state)
        last = int(str(state["v"]))
        tensor = state[f"w{RANK}"]
        assert isinstance(tensor, torch.Tensor) and bool((tensor == last).all()), "a mix"
        note("resumed", step=last, tag=str(taken.tag))
        for step in range(last + 1, last + steps + 1):
            stop = [RANK == 0 and (notes / "stop").exists()]
            dist.broadcast_object_list(stop, 0)
            if stop[0]:
                break
            note("begins", step=step)
            manager.save(step, state={f"w{RANK}": torch.full((1 << 20,), float(step)), "v": step})
            note("saved", step=step)
        manager.close()
        note("ended")
    except Exception as error:  # noqa: BLE001 -- all are noted
        note("failed", error=f"{type(error).__name__}: {error}", step=-1)
    os._exit(0)  # without the end of the process group, for which a lost rank is missing


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
