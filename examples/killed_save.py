"""A crash on purpose: a writer whose process dies by SIGKILL while its bytes are being written."""

import os
import signal
import threading
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.checkpoint import SavePlan, SavePlanner

from torch_dcpx import DcpxWriter


def count_data_bytes(path: Path) -> int:
    """Returns how many bytes of a file were written; space that is only reserved counts not."""
    data_bytes = 0
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        offset = 0
        while offset < end:
            try:
                start = os.lseek(file.fileno(), offset, os.SEEK_DATA)
            except OSError:  # ENXIO: only a hole is left
                break
            offset = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            data_bytes += offset - start
    return data_bytes


class KilledMidSave(DcpxWriter):
    """Writes like DcpxWriter until a quarter of its tensors' bytes are in the file, then dies.

    A thread watches the data file from outside. Where the whole file is written before the thread
    had its turn, the process dies right after, when no other rank has heard of it: in both cases
    the coordinator waits for this rank's results, and has nothing to commit.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> NoReturn:
        """Writes this rank's share of the plan, and does not live to report it."""
        total = sum(item.tensor_storage_size() or 0 for item in plan.items)
        threading.Thread(target=self._watch, args=(total // 4,), daemon=True).start()
        super().write_data(plan, planner).wait()
        _die("its data file is whole, and no other rank knows yet")

    def _watch(self, enough_bytes: int) -> None:
        pattern = f"__{dist.get_rank()}_*.distcp"
        while True:
            for path in Path(self.path).glob(pattern):
                written = count_data_bytes(path)
                if written >= enough_bytes:
                    _die(f"{written:,} B of {path.name} are written")
            os.sched_yield()


def _die(moment: str) -> NoReturn:
    text = f"  rank {dist.get_rank()} sends itself SIGKILL in the middle of a save: {moment}\n"
    os.write(1, text.encode())
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL cannot be outlived")
