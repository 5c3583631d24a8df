"""Directories of each node, which the coordinator cannot see: save, save again, load, by every
entry point. Each node's readers need the coordinator's `.metadata`, which users copy there."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.machine import seconds
from support.rank_fixture import StartRanks

import torch_dcpx
from torch_dcpx import DcpxReader, DcpxWriter, WriteOptions

_CLONE_NEWNS = 0x00020000
WAYS = ("save", "async_save", "dcp.save", "dcp.async_save")


def own_directory(root: Path, kind: str) -> Path:
    """Returns a directory that only this rank sees, and threads that it starts from now on."""
    if kind == "paths":
        return root / f"node{dist.get_rank()}" / "ckpt"
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    shared = root / "node"
    shared.mkdir(exist_ok=True)
    for command in ("mount --make-rprivate /", f"mount -t tmpfs -o size=64m tmpfs {shared}"):
        subprocess.run(command.split(), check=True, timeout=seconds(60))
    return shared / "ckpt"


def save(way: str, state: dict[str, Any], path: Path, options: WriteOptions) -> None:
    ended: Any
    if way.startswith("dcp."):
        call: Any = dcp.save if way == "dcp.save" else dcp.async_save
        ended = call(state, storage_writer=DcpxWriter(path))
    else:
        ended = getattr(torch_dcpx, way)(state, path, options=options)
    if "async" in way:
        ended.result(seconds(60))


def every_rank_saves_to_its_own(root: Path, kind: str) -> None:
    path, rank = own_directory(root, kind), dist.get_rank()
    # One path on all ranks needs no option, whatever lies under it.
    options = WriteOptions(node_local=kind == "paths")
    for seed, (way, _) in enumerate(itertools.product(WAYS, range(2))):  # then over what is there
        generator = torch.Generator().manual_seed(seed * 10 + rank)
        state = {f"rank{rank}": torch.randn(50_000, generator=generator)}
        save(way, state, path, options)
        names = os.listdir(path)
        assert any(name.endswith(".distcp") for name in names), (way, names)
        box: list[Any] = [(path / ".metadata").read_bytes() if rank == 0 else None]
        dist.broadcast_object_list(box, src=0)
        (path / ".metadata").write_bytes(box[0])  # as a launcher's copy step does
        for load in ("load", "dcp.load"):
            target = {key: torch.zeros_like(value) for key, value in state.items()}
            if load == "load":
                torch_dcpx.load(target, path)
            else:
                dcp.load(target, storage_reader=DcpxReader(path))
            assert all(torch.equal(state[key], target[key]) for key in state), (way, load)


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("kind", ["paths", pytest.param("namespaces", marks=pytest.mark.root)])
def test_nodes_with_directories_of_their_own_save_again_and_load(
    tmp_path: Path, ranks: StartRanks, kind: str
) -> None:
    ranks(2, anew=True)(every_rank_saves_to_its_own, tmp_path, kind)
