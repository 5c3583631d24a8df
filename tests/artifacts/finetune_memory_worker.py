"""One of two ranks of test_finetune_example.py: what the example's steps take of memory."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import finetune_meta as example
from meters import extra_peak_bytes
from support.worker import rank_case

import torch_dcpx as dcpx

MIB = 1 << 20


def steps(path: Path, width: int) -> tuple[int, int, int]:
    """Returns the bytes of this rank's shards, and the peaks of the load and of the export."""
    example.WIDTH = width
    model = example.sharded_net(dist.get_world_size())
    pretrained, tuned = path / f"pretrained{width}", path / f"tuned{width}"
    load = extra_peak_bytes(
        lambda: dcpx.load_pretrained(model, pretrained, key_map=example.NAMES) and None
    )
    own = sum(tensor.to_local().nbytes for tensor in model.state_dict().values())
    dist.barrier()
    export = extra_peak_bytes(lambda: dcpx.export(model, tuned) and None)
    return own, load, export


@rank_case()
def main(path: Path, width: str) -> None:
    steps(path, 64)  # imports, first uses
    own, load, export = steps(path, int(width))
    whole = 10 * int(width) ** 2 * 4
    said = f"own {own / MIB:.1f}, load {load / MIB:.1f}, export {export / MIB:.1f} MiB"
    print(said, flush=True)
    assert own == whole // dist.get_world_size(), said
    # Kernels count resident pages for each core, and sum up late.
    assert 0.9 * own <= load <= own + dcpx.ReadOptions().host_memory_bytes, said
    assert export <= dcpx.WriteOptions().resolved_memory_bytes(), said
