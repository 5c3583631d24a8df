"""How long async_save keeps its caller, the first time and later; a training step beside a save."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from cuda_cases import Case
from cuda_gpu import Gpu
from cuda_rounds import Found, Side, interleave
from cuda_sides import OnDevice, serves_again, until_pinned
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import torch_dcpx as dcpx
from torch_dcpx import WriteOptions

_STEPS = 40  # timed at one time, idle or beside a save


class Stalls(OnDevice):
    """Saves in the background of one case's state; `seconds` is how long each kept its caller.

    A first save finds no memory of the process's: `dcpx.close` has given it back.
    """

    def __init__(self, gpu: Gpu, case: Case, folder: Path) -> None:
        super().__init__(gpu, case, folder / "saved")

    def close(self) -> None:
        super().close()
        dcpx.close()

    @property
    def state(self) -> dict[str, torch.Tensor]:
        return self._state

    def _ours(self, overlap: bool, prepare: Callable[[], None] = lambda: None) -> Side:
        def side() -> float:
            prepare()
            self._gpu.synchronize()
            began = time.perf_counter()
            handle = dcpx.async_save(
                self._state, self._path, no_dist=True, options=WriteOptions(overlap=overlap)
            )
            seconds = time.perf_counter() - began
            handle.result()
            shutil.rmtree(self._path)
            return seconds

        return side

    def _stock(self, is_first: bool) -> Side:
        """Returns stock's async_save: its default stager, kept from the first save on.

        Its stall ends when the state is staged: only then may a step change it.
        """

        def side() -> float:
            if self._stagers and (is_first or not serves_again(self._stagers[-1])):
                self._stagers.pop().close()
            self._gpu.synchronize()
            began = time.perf_counter()
            if not self._stagers:
                self._stagers.append(DefaultStager(StagingOptions(**self._gpu.stager_options())))
            done = dcp.async_save(
                self._twin,
                storage_writer=dcp.FileSystemWriter(self._path),
                async_stager=self._stagers[-1],
                no_dist=True,
            )
            if hasattr(done, "staging_completion"):
                done.staging_completion.result()
            seconds = time.perf_counter() - began
            (done.upload_completion if hasattr(done, "upload_completion") else done).result()
            shutil.rmtree(self._path)
            return seconds

        return side

    def sides(self) -> dict[str, Side]:
        def prewarm() -> None:
            dcpx.close()
            dcpx.prewarm(self._state)
            until_pinned()

        return {
            "block": self._block_copy(to_host=True),
            "ours, first": self._ours(False, dcpx.close),
            "ours, later": self._ours(False),
            "ours, overlapped, first": self._ours(True, dcpx.close),
            "ours, overlapped, prewarmed": self._ours(True, prewarm),
            "ours, overlapped, later": self._ours(True),
            "stock, first": self._stock(True),
            "stock, later": self._stock(False),
        }


def step_seconds(gpu: Gpu, folder: Path, rounds: int, width: int, give_up_at: float) -> Found:
    """Returns the median time of a step by round: `idle`, and `saving` beside a save.

    Args:
        width: of the square matrices that a step multiplies.
    """
    kind = torch.float32 if gpu.is_rehearsal else torch.bfloat16
    device = "cpu" if gpu.is_rehearsal else "cuda"
    matrices = [torch.randn(width, width, device=device, dtype=kind) for _ in range(8)]
    saved = gpu.tensors(matrices) if gpu.is_rehearsal else matrices
    state = {f"m{i}": m for i, m in enumerate(saved)}

    def step() -> float:
        began = time.perf_counter()
        x = matrices[0]
        for matrix in matrices:
            x = torch.relu(x @ matrix)
        if not gpu.is_rehearsal:
            torch.cuda.current_stream().synchronize()
        return time.perf_counter() - began

    def idle() -> float:
        return statistics.median(step() for _ in range(_STEPS))

    def saving() -> float:
        path = folder / "beside"
        seconds: list[float] = []
        while len(seconds) < _STEPS:
            handle = dcpx.async_save(state, path, no_dist=True)
            while not handle.done():
                seconds.append(step())
            handle.result()
            shutil.rmtree(path)
        return statistics.median(seconds)

    return interleave({"ours idle": idle, "ours saving": saving}, rounds, give_up_at)
