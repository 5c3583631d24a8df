"""Workers of several ranks, started as users start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn


def run_ranks(worker: Path, ranks: int, *args: str) -> None:
    """Runs the worker on `ranks` ranks; fails with their output unless each says that it is done.

    Args:
        worker: a script that prints "rank R done" when all of it held.
        ranks: processes on this machine.
        args: its arguments.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(ranks), str(worker), *args,
    ]  # fmt: skip
    result = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    missing = [r for r in range(ranks) if f"rank {r} done" not in result.stdout]
    assert result.returncode == 0 and not missing, f"{command}\n{result.stdout}"


def leave_well() -> NoReturn:
    """Ends a worker: "done" is printed, and Python does not shut down.

    A thread of gloo may still hold a collective's tensors, and would abort the process while the
    interpreter ends. DCP's process that saves has no end of its own, either.
    """
    import torch.distributed as dist

    dist.barrier()
    print(f"rank {dist.get_rank()} done", flush=True)
    sys.stderr.flush()
    os._exit(0)
