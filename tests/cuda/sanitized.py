"""Small work for compute-sanitizer: the pack kernel's copies (`pack`), or a save and load (`save`).

Tensors come to the device and back by copies alone, and become zeros by the driver's memset, so
that no kernel of torch's runs: strided views are taken on either side.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

from cuda_gpu import the_gpu
from support.staged import stage_tensors

import torch_dcpx as dcpx
from torch_dcpx import _C, WriteOptions

COUNT = 300


def host_state() -> dict[str, torch.Tensor]:
    """Returns odd sizes, rows, columns and steps: what the kernel takes."""
    random = torch.Generator().manual_seed(3)
    state = {
        f"odd{i}": torch.randint(0, 255, (1 + 37 * i % 5000,), dtype=torch.uint8, generator=random)
        for i in range(COUNT)
    }
    state["rows"] = torch.randn(64, 100, generator=random)
    state["wide"] = torch.randn(256, 1 << 10, generator=random)
    return state


def views(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the state with strided views of its matrices."""
    return {**state, "columns": state["rows"][:, 3:50], "steps": state["wide"][::2, 1::3]}


def main(what: str) -> None:
    gpu = the_gpu()
    wanted = host_state()
    whole = dict(zip(wanted, gpu.tensors(list(wanted.values())), strict=True))
    state, wanted = views(whole), views(wanted)
    before = _C.device_counters()["kernels"]
    if what == "pack":
        found = dict(zip(state, stage_tensors(list(state.values())), strict=True))
    else:
        folder = Path(tempfile.mkdtemp(prefix=os.environ.get("ON_GPU_PREFIX", "dcpx-")))
        options = WriteOptions(overlap=True)
        dcpx.async_save(state, folder / "a", no_dist=True, options=options).result()
        gpu.zero(whole)
        dcpx.load(state, folder / "a", no_dist=True)
        found = views(gpu.on_host(whole))
        shutil.rmtree(folder)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    kernels = _C.device_counters()["kernels"] - before
    assert kernels or not _C.device_driver()["has_kernel"], "the kernel did not run"
    print(f"{what}: {len(wanted)} tensors as they were, {kernels} launches of the kernel")


if __name__ == "__main__":
    main(sys.argv[1])
