"""How long async_save keeps its caller, the first time and later; a training step beside a save."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from cuda_cases import Case
from cuda_gpu import Gpu, HostBlock
from cuda_rounds import Found, Side, interleave, timed
from cuda_sides import serves_again, until_pinned
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import torch_dcpx as dcpx
from torch_dcpx import WriteOptions

_STEPS = 40  # timed at one time, idle or beside a save


class Stalls:
    """Saves in the background of one case's state; `seconds` is how long each kept its caller.

    A first save finds no memory of the process's: `dcpx.close` has given it back.
    """

    def __init__(self, gpu: Gpu, case: Case, folder: Path) -> None:
        self._gpu, self._case, self._path = gpu, case, folder / "saved"
        self._state = gpu.state(case)
        self._twin = gpu.for_torch(self._state)
        self._stager: Any = None
        self._stream = gpu.calls.stream()
        self._block = gpu.alloc(case.nbytes)
        self._host = HostBlock(case.nbytes)
        self._host.touch()

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()
        self._gpu.calls.destroy_stream(self._stream)
        self._gpu.free(self._block)
        self._host.close()
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
            is_used_up = self._stager is not None and not serves_again(self._stager)
            if self._stager is not None and (is_first or is_used_up):
                self._stager.close()
                self._stager = None
            self._gpu.synchronize()
            began = time.perf_counter()
            if self._stager is None:
                self._stager = DefaultStager(StagingOptions(**self._gpu.stager_options()))
            done = dcp.async_save(
                self._twin,
                storage_writer=dcp.FileSystemWriter(self._path),
                async_stager=self._stager,
                no_dist=True,
            )
            if hasattr(done, "staging_completion"):
                done.staging_completion.result()
            seconds = time.perf_counter() - began
            (done.upload_completion if hasattr(done, "upload_completion") else done).result()
            shutil.rmtree(self._path)
            return seconds

        return side

    def _copy(self) -> float:
        self._host.register(self._gpu.calls)
        ends = self._host, self._block, self._stream
        return timed(lambda: self._gpu.copy_block(*ends, to_host=True), self._gpu.synchronize)

    def sides(self) -> dict[str, Side]:
        def prewarm() -> None:
            dcpx.close()
            dcpx.prewarm(self._state)
            until_pinned()

        return {
            "block": self._copy,
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
