"""Makes a golden checkpoint with the torch that runs this: tests/golden/WRITER-VERSION.tar.xz.

    python tests/golden/make_golden.py stock   # torch's own FileSystemWriter
    python tests/golden/make_golden.py ours    # DcpxWriter; PYTHONPATH must find torch_dcpx

Two ranks save `golden_state`, whose every value follows from its name and shape, so that
tests/interop/test_versions.py computes what to expect. Old torch must be able to run this file.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tarfile
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# Oldest first; a torch without one of the last leaves it out.
DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32"),
    *("float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "uint16", "uint32", "uint64", "float8_e8m0fnu"),
)


def ramp(*shape: int, dtype: torch.dtype = torch.float32, start: int = 11) -> torch.Tensor:
    """Returns a tensor whose bytes count up in C order, in steps of 37, modulo 251; bool modulo 2.

    Nothing but integers is computed, so that every torch gives the same bits (NaNs among them).
    """
    itemsize = torch.zeros((), dtype=dtype).element_size()
    nbytes = torch.Size(shape).numel() * itemsize
    raw = (torch.arange(nbytes) * 37 + start) % (2 if dtype == torch.bool else 251)
    return raw.to(torch.uint8).view(dtype).reshape(shape)


def golden_state(shard: Callable[[torch.Tensor, int], Any]) -> dict[str, Any]:
    """Returns the state; `shard` makes of a tensor and a dimension what this rank saves of it."""
    tied = ramp(3, 2, start=5)
    known = [name for name in DTYPES if hasattr(torch, name)]
    return {
        "dtypes": {name: ramp(3, 5, dtype=getattr(torch, name)) for name in known},
        "shapes": {
            "scalar": ramp(),
            "one": ramp(1, dtype=torch.int64),
            "empty": ramp(0),
            "no_rows": ramp(0, 3, dtype=torch.bfloat16),
            "four": ramp(2, 3, 1, 4, dtype=torch.int16),
        },
        "layouts": {
            "transposed": ramp(5, 7).t(),
            "channels_last": ramp(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "strided": ramp(8, 9)[::2, 1::3],
            "expanded": ramp(1, 3, dtype=torch.bool).expand(4, 3),
            "view": ramp(50, dtype=torch.uint8)[10:20],
        },
        "parameters": {
            "trained": torch.nn.Parameter(ramp(4, 3)),
            "frozen": torch.nn.Parameter(ramp(3), requires_grad=False),
            "tied": [tied, tied],
        },
        "sharded": {
            "rows": shard(ramp(5, 3), 0),
            "columns": shard(ramp(4, 7, dtype=torch.bfloat16), 1),
            "one_row": shard(ramp(1, 9, dtype=torch.uint8), 0),
            "no_rows": shard(ramp(0, 4), 0),
        },
        "optimizer": {
            "state": [{"step": ramp(), "exp_avg": ramp(2, 2, start=i)} for i in range(2)],
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}],
        },
        "values": {
            "step": 1 << 70,
            "name": "déjà vu",
            "none": None,
            "flag": True,
            "raw": b"\x00\xff",
            "complex": 1.5 - 2j,
            "set": {1, "a"},
            "ordered": OrderedDict(b=1, a=[2, {"c": 3}]),
            "size": torch.Size([2, 3]),
            "dtype": torch.bfloat16,
        },
    }


def _sharder() -> Callable[[torch.Tensor, int], Any]:
    """Cuts tensors among the ranks as torch.chunk does; no communication."""
    import torch.distributed as dist

    with contextlib.suppress(ImportError):  # torch 2.5 made it public
        from torch.distributed.tensor import DTensor, Shard
    if "DTensor" not in locals():
        from torch.distributed._tensor import DTensor, Shard  # type: ignore[no-redef]
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def shard(full: torch.Tensor, dim: int) -> Any:
        parts = full.chunk(dist.get_world_size(), dim)
        rank = dist.get_rank()
        local = parts[rank] if rank < len(parts) else full.narrow(dim, 0, 0)
        return DTensor.from_local(
            local, mesh, [Shard(dim)], run_check=False, shape=full.shape, stride=full.stride()
        )

    return shard


def _save(writer: str, directory: str) -> None:
    """One rank."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo")
    if writer == "ours":
        from torch_dcpx import DcpxWriter

        storage: Any = DcpxWriter(directory)
    else:
        storage = dcp.FileSystemWriter(directory, thread_count=2)  # two files a rank
    dcp.save(golden_state(_sharder()), storage_writer=storage)
    dist.destroy_process_group()


def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leaves out who and when, and the locks."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return None if entry.name.endswith(".lock") else entry


def main() -> None:
    if len(sys.argv) == 3:
        _save(*sys.argv[1:])
        return
    (writer,) = sys.argv[1:]
    name = f"{writer}-{str(torch.__version__).partition('+')[0]}"
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "ckpt"
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        here = Path(__file__).resolve()
        command = [sys.executable, *launch, str(here), writer, directory.name]
        subprocess.run(command, cwd=scratch, check=True)  # the file says where it was written
        with tarfile.open(here.with_name(f"{name}.tar.xz"), "w:xz") as archive:
            for path in sorted(directory.iterdir()):
                archive.add(path, path.name, filter=anonymous)


if __name__ == "__main__":
    main()
