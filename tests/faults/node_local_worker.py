"""One rank of test_node_local.py: the same path is another directory on each rank.

    node_local_worker.py DIRECTORY KIND    (under torchrun; KIND: "namespaces" or "paths")

With "namespaces" each rank mounts a tmpfs of its own over one path (root), as nodes with disks of
their own have it; with "paths" each rank saves under a path of its own.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from support.machine import seconds

_CLONE_NEWNS = 0x00020000
RANK = int(os.environ["RANK"])
ROOT, KIND = Path(sys.argv[1]), sys.argv[2]


def own_directory() -> Path:
    """Returns a directory that only this rank sees; before any thread is started."""
    if KIND == "paths":
        path = ROOT / f"node{RANK}" / "ckpt"
        path.mkdir(parents=True)
        return path
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    shared = ROOT / "node"
    shared.mkdir(exist_ok=True)
    for command in (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(shared)],
    ):
        subprocess.run(command, check=True, timeout=seconds(60))
    return shared / "ckpt"


PATH = own_directory()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from support.worker import leave_well  # noqa: E402

import torch_dcpx  # noqa: E402
from torch_dcpx import DcpxReader, DcpxWriter, WriteOptions  # noqa: E402

# One path on all ranks needs no option, whatever lies under it.
OPTIONS = WriteOptions(node_local=KIND == "paths")


def state_of(seed: int) -> dict[str, Any]:
    """This rank's own tensors, and nothing of another's."""
    generator = torch.Generator().manual_seed(seed * 10 + RANK)
    return {f"rank{RANK}": torch.randn(50_000, generator=generator)}


def begin(way: str, state: dict[str, Any]) -> None:
    if way == "save":
        torch_dcpx.save(state, PATH, options=OPTIONS)
    elif way == "async_save":
        torch_dcpx.async_save(state, PATH, options=OPTIONS).result(seconds(60))
    elif way == "dcp.save":
        dcp.save(state, storage_writer=DcpxWriter(PATH))
    else:
        future: Any = dcp.async_save(state, storage_writer=DcpxWriter(PATH))
        future.result(seconds(60))


def is_there(way: str, state: dict[str, Any]) -> bool:
    """Loads what this rank saved: its metadata is the coordinator's, copied as users copy it."""
    target = {key: torch.zeros_like(value) for key, value in state.items()}
    if way == "load":
        torch_dcpx.load(target, PATH)
    else:
        dcp.load(target, storage_reader=DcpxReader(PATH))
    return all(torch.equal(state[key], target[key]) for key in state)


def copy_metadata() -> None:
    """Every node gets the coordinator's metadata, as a launcher's copy step does."""
    box: list[Any] = [(PATH / ".metadata").read_bytes() if RANK == 0 else None]
    dist.broadcast_object_list(box, src=0)
    (PATH / ".metadata").write_bytes(box[0])


def main() -> None:
    dist.init_process_group("gloo")
    cases = bad = 0
    seed = 0
    for way in ("save", "async_save", "dcp.save", "dcp.async_save"):
        for _again in range(2):  # the second time over what is there
            seed += 1
            begin(way, state_of(seed))
            names = sorted(p.name for p in PATH.iterdir())
            copy_metadata()
            for load in ("load", "dcp.load"):
                cases += 1
                is_well = is_there(load, state_of(seed))
                is_well &= sum(n.endswith(".distcp") for n in names) >= 1
                is_well &= (".metadata" in names) or RANK != 0
                bad += not is_well
    if RANK == 0:
        print(f"{KIND}: {cases} cases, bad = {bad}", flush=True)
    assert not bad
    leave_well()


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # noqa: BLE001  (the launcher is told by the exit code)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
