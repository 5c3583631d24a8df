"""One rank of export.py: the sides of a sharded state, as a checkpoint and as an artifact."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.distributed as dist
from case_states import COLUMNS, make_blank
from cases import EXPORT_CASES, EXPORT_SIDES, Case, MismatchError
from harness import Side, barrier, run_case, slowest
from meters import extra_peak_bytes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torch_dcpx

State = dict[str, torch.Tensor]


class ExportSides:
    """A case's state, cut by rows over the ranks, and a checkpoint of it."""

    def __init__(self, case: Case, size: str, rank: int, ranks: int, folder: Path) -> None:
        items, item_bytes = case.size(size)
        generator = torch.Generator().manual_seed(rank)
        self._rows = item_bytes // 4 // COLUMNS // ranks
        self._first_row = rank * self._rows
        self._local = {f"layer.{i}.weight": torch.empty(self._rows, COLUMNS) for i in range(items)}
        for tensor in self._local.values():
            tensor.view(torch.int64).random_(generator=generator)
        self._is_alone = ranks == 1
        self._target = {name: torch.empty_like(tensor) for name, tensor in self._local.items()}
        make_blank(self._target)
        self.nbytes = items * self._rows * ranks * COLUMNS * 4
        self._checkpoint = folder / "checkpoint"
        self._save(self._checkpoint)

    def side(self, name: str) -> Side:
        run = {"save": self._save, "live": self._live, "stored": self._stored, "load": self._load}
        check = {"save": self._check_saved, "load": self._check_loaded}
        return Side(name, run[name], check.get(name, self._check_artifact))

    def _sharded(self, local: State) -> dict[str, Any]:
        if self._is_alone:
            return {"model": local}
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return {"model": {n: DTensor.from_local(t, mesh, [Shard(0)]) for n, t in local.items()}}

    def _save(self, path: Path) -> Mapping[str, float]:
        torch_dcpx.save(self._sharded(self._local), path, no_dist=self._is_alone)
        return {}

    def _live(self, path: Path) -> Mapping[str, float]:
        torch_dcpx.export(self._sharded(self._local), path, no_dist=self._is_alone, overwrite=True)
        return {}

    def _stored(self, path: Path) -> Mapping[str, float]:
        torch_dcpx.export(self._checkpoint, path, no_dist=self._is_alone, overwrite=True)
        return {}

    def _load(self, path: Path) -> Mapping[str, float]:
        self._load_from(self._checkpoint)
        return {}

    def _load_from(self, path: Path) -> None:
        torch_dcpx.load(self._sharded(self._target), path, no_dist=self._is_alone)

    def _check_loaded(self, path: Path) -> None:
        for name, tensor in self._local.items():
            check_bits(name, tensor, self._target[name])

    def _check_saved(self, path: Path) -> None:
        make_blank(self._target)
        self._load_from(path)
        self._check_loaded(path)

    def _check_artifact(self, path: Path) -> None:
        """Opens it with the package whose format it is, and compares this rank's rows."""
        barrier()
        with safetensors.safe_open(path / "model.safetensors", "pt") as held:
            if set(held.keys()) != set(self._local):
                raise MismatchError(f"{len(held.keys())} names are not those that were exported")
            for name, tensor in self._local.items():
                rows = held.get_slice(name)[self._first_row : self._first_row + self._rows]
                check_bits(name, tensor, rows)


def check_bits(name: str, expected: torch.Tensor, found: torch.Tensor) -> None:
    """Raises MismatchError where bits differ."""
    if not torch.equal(expected.view(torch.int32), found.view(torch.int32)):
        raise MismatchError(f"{name!r} has other bits than were exported")


def measure(
    *,
    name: str,
    size: str,
    only: Sequence[str],
    rounds: int | None,
    has_meters: bool,
    folder: Path,
) -> dict[str, Any]:
    """Returns the times of the sides, and what each took of memory on the rank that took most."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    case = EXPORT_CASES[name]
    made = ExportSides(case, size, rank, ranks, folder)
    sides = [made.side(side) for side in EXPORT_SIDES if not only or side in only]
    counted = rounds or case.rounds_at(size, ranks)
    times = run_case(f"{case.name}, {ranks} rank(s)", sides, counted, size, folder)
    if {"load", "save"} <= times.keys():
        pairs = zip(times["load"], times["save"], strict=True)
        times["load_and_save"] = [load + save for load, save in pairs]
    found: dict[str, Any] = {"bytes": made.nbytes, "items": case.size(size).items}
    found["times"] = times
    if has_meters:
        found["meters"] = {}
        for side in sides:
            path = folder / f"{side.name}-metered"
            barrier()
            own = extra_peak_bytes(lambda: side.run(path) and None)  # noqa: B023 - called at once
            peak = slowest({"extra_peak_bytes": own})  # of the rank that took most
            found["meters"][side.name] = {what: int(value) for what, value in peak.items()}
            barrier()
            if rank == 0:
                shutil.rmtree(path, ignore_errors=True)
    return found
