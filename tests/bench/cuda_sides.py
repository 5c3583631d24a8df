"""Ways to move a state between device and host, timed one after the other in shuffled rounds."""

from __future__ import annotations

import random
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from cuda_cases import Case
from support.staged import stage_tensors
from torch.distributed.checkpoint.staging import DefaultStager

import torch_dcpx as dcpx
from torch_dcpx import DcpxReader, DcpxWriter, ReadOptions, WriteOptions

State = dict[str, torch.Tensor]
Times = dict[str, list[float]]

_STEPS = 40  # timed at one time, idle or beside a save


def make_state(case: Case, device: torch.device) -> State:
    """Returns tensors of the case's shapes, filled with values that differ."""
    state = {}
    for number, shape in enumerate(case.shapes):
        whole = torch.empty(shape.rows * shape.stride, device=device).uniform_()
        state[f"t{number}"] = whole.view(shape.rows, shape.stride)[:, : shape.columns]
    return state


def interleave(sides: Mapping[str, Callable[[], float]], rounds: int) -> Times:
    """Returns the seconds of each side by round; the first round warms up and is not counted."""
    order = random.Random(0)
    times: Times = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in order.sample(list(sides), len(sides)):
            torch.cuda.synchronize()
            seconds = sides[name]()
            if number:
                times[name].append(seconds)
    return times


def timed(run: Callable[[], object]) -> float:
    """Returns the seconds until `run` has returned and every device is at rest."""
    begin = time.perf_counter()
    kept = run()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    del kept
    return seconds


class Moves:
    """The sides of one case. Holds its state on the device, and one pinned block of its bytes."""

    def __init__(self, case: Case, device: torch.device, folder: Path) -> None:
        """Args:
        folder: in memory (tmpfs), for the checkpoint that is loaded.
        """
        self._device = device
        self._state = make_state(case, device)
        self._block = torch.empty(case.nbytes, dtype=torch.uint8, device=device)
        self._pinned = torch.empty(case.nbytes, dtype=torch.uint8, pin_memory=True)
        self._stager = DefaultStager()
        self._path = folder / "loaded"
        self._folder = folder
        dcp.save(self._state, storage_writer=DcpxWriter(self._path))
        self._check()

    def close(self) -> None:
        self._stager.close()
        shutil.rmtree(self._path)

    def _check(self) -> None:
        """Raises unless what is staged and loaded is the state, bit for bit."""
        names = list(self._state)
        for name, staged in zip(names, stage_tensors(list(self._state.values())), strict=True):
            _assert_same(name, staged, self._state[name].cpu())
        wanted = {name: tensor.clone() for name, tensor in self._state.items()}
        for tensor in self._state.values():
            tensor.zero_()
        self._load(DcpxReader(self._path))
        for name in names:
            _assert_same(name, self._state[name].cpu(), wanted[name].cpu())

    def _load(self, reader: Any) -> None:
        dcp.load(self._state, storage_reader=reader)

    def to_host(self) -> dict[str, Callable[[], float]]:
        """Returns the sides of the way to the host; `block` is one copy of the same bytes."""
        tensors = list(self._state.values())
        return {
            "block": lambda: timed(lambda: self._pinned.copy_(self._block, non_blocking=True)),
            "ours": lambda: timed(lambda: stage_tensors(tensors)),
            "per_tensor": lambda: timed(lambda: [t.to("cpu", non_blocking=True) for t in tensors]),
            "stock_stager": lambda: timed(lambda: _staged(self._stager.stage(self._state))),
        }

    def to_device(self) -> dict[str, Callable[[], float]]:
        """Returns the sides of the way to the device. Loads read files that lie in memory."""
        tensors = list(self._state.values())
        hosts = [tensor.cpu() for tensor in tensors]

        def per_tensor() -> None:
            for tensor, host in zip(tensors, hosts, strict=True):
                tensor.copy_(host, non_blocking=True)

        unverified = ReadOptions(verify="none")
        return {
            "block": lambda: timed(lambda: self._block.copy_(self._pinned, non_blocking=True)),
            "ours": lambda: timed(lambda: self._load(DcpxReader(self._path))),
            "ours_unverified": lambda: timed(
                lambda: self._load(DcpxReader(self._path, options=unverified))
            ),
            "per_tensor": lambda: timed(per_tensor),
            "stock_load": lambda: timed(lambda: self._load(dcp.FileSystemReader(self._path))),
        }

    def stall(self) -> dict[str, Callable[[], float]]:
        """Returns the sides of a save in the background: seconds until the call has returned."""

        def call(overlap: bool) -> float:
            path = self._folder / "saved"
            begin = time.perf_counter()
            handle = dcpx.async_save(
                self._state, path, no_dist=True, options=WriteOptions(overlap=overlap)
            )
            seconds = time.perf_counter() - begin
            handle.result()
            shutil.rmtree(path)
            return seconds

        return {
            "block": self.to_host()["block"],
            "staged": lambda: call(False),
            "overlapped": lambda: call(True),
        }

    def device_bytes(self) -> tuple[int, int]:
        """Returns the device memory that a save takes besides the state: meanwhile, and after."""
        torch.cuda.synchronize()
        free, _ = torch.cuda.mem_get_info(self._device)
        path = self._folder / "saved"
        handle = dcpx.async_save(
            self._state, path, no_dist=True, options=WriteOptions(overlap=True)
        )
        least = free
        while not handle.done():
            least = min(least, torch.cuda.mem_get_info(self._device)[0])
        handle.result()
        shutil.rmtree(path)
        return free - least, free - torch.cuda.mem_get_info(self._device)[0]


def step_seconds(device: torch.device, folder: Path, rounds: int, width: int) -> Times:
    """Returns the median time of a step by round: `idle`, and `saving` beside a save.

    Args:
        width: of the square matrices that a step multiplies.
    """
    generator = torch.Generator(device).manual_seed(1)
    matrices = [
        torch.randn(width, width, device=device, dtype=torch.bfloat16, generator=generator)
        for _ in range(8)
    ]
    state = {f"m{i}": m for i, m in enumerate(matrices)}

    def step() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        x = matrices[0]
        for matrix in matrices:
            x = torch.relu(x @ matrix)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def idle() -> float:
        return statistics.median(step() for _ in range(_STEPS))

    def saving() -> float:
        path = folder / "beside"
        seconds = []
        while len(seconds) < _STEPS:
            handle = dcpx.async_save(state, path, no_dist=True)
            while not handle.done():
                seconds.append(step())
            handle.result()
            shutil.rmtree(path)
        return statistics.median(seconds)

    return interleave({"idle": idle, "saving": saving}, rounds)


def _staged(state: Any) -> Any:
    """Waits for stock's stager, which gives a future."""
    return state.result() if hasattr(state, "result") else state


def _assert_same(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    same = torch.equal(found.view(torch.int32), wanted.view(torch.int32))
    if not same:
        raise AssertionError(f"{name} is not what it was")
