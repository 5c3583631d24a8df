"""Prints what a rank's load plan costs, from opening `.metadata` to the places of its items.

    python tests/bench/load_plan.py
    python tests/bench/load_plan.py --case chunks --tensors 1000 --chunks 1024

Case `chunks`: tensors in many chunks each, of which this rank wants one of each. Case `plain`:
whole tensors, of which it wants all. Only `.metadata` is written; files are not opened, so `locate`
stands for finding the places. Each run is a process of its own, sides in turn; memory is the growth
of its peak while it plans. Medians over the rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import torch_dcpx as dcpx
from torch_dcpx.metadata.file import encode_pieces
from torch_dcpx.storage.names import FileEntry

ROW = 8  # elements
SIDES = {
    "torch": (FileSystemReader, DefaultLoadPlanner),
    "dcpx, torch's planner": (dcpx.DcpxReader, DefaultLoadPlanner),
    "dcpx": (dcpx.DcpxReader, dcpx.DcpxLoadPlanner),
}


def write_metadata(path: Path, tensors: int, chunks: int) -> None:
    """Writes the `.metadata` of tensors of `chunks` rows each, a file a row number."""
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    for t in range(tensors):
        name = f"model.layers.{t}.weight"
        own = []
        for c in range(chunks):
            offsets = torch.Size([c, 0])
            own.append(ChunkStorageMetadata(offsets, torch.Size([1, ROW])))
            place = _StorageInfo(f"__{c}_0.distcp", 512 * t, 512)
            storage[MetadataIndex(name, offsets, c)] = place
        entries[name] = TensorStorageMetadata(TensorProperties(), torch.Size([chunks, ROW]), own)
    planner = {name: tuple(name.split(".")) for name in entries}
    files = [FileEntry(f"__{c}_0.distcp", bytes(16), 512 * tensors, 0) for c in range(chunks)]
    metadata = Metadata(entries, planner, storage)
    path.mkdir()
    with (path / ".metadata").open("wb") as file:
        file.writelines(encode_pieces(metadata, files, "a save's id"))


class Shard(torch.Tensor):
    """One row of a tensor that has as many as the checkpoint has chunks."""

    row: int
    rows: int

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([self.row, 0]), torch.Size([1, ROW]))]

    def size(self, *_: Any) -> torch.Size:  # type: ignore[override]
        return torch.Size([self.rows, ROW])


def state_of(tensors: int, chunks: int) -> dict[str, Any]:
    """Returns what a rank in the middle asks for."""
    state: dict[str, Any] = {}
    for t in range(tensors):
        value = torch.empty(1, ROW)
        if chunks > 1:
            value = value.as_subclass(Shard)
            value.row, value.rows = chunks // 2, chunks  # type: ignore[attr-defined]
        state[f"model.layers.{t}.weight"] = value
    return state


def resident_bytes(field: str) -> int:
    """Returns a size of this process: VmRSS, or VmHWM for the largest since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def planned(side: str, path: str, tensors: int, chunks: int) -> dict[str, float]:
    """Plans once. Returns seconds of each step, and MiB."""
    reader_class, planner_class = SIDES[side]
    state = state_of(tensors, chunks)
    reader: Any = reader_class(path)
    planner: Any = planner_class()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, began = resident_bytes("VmRSS"), time.perf_counter()
    metadata = reader.read_metadata()
    read = time.perf_counter()
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = planner.create_local_plan()
    done = time.perf_counter()
    places = [reader.storage_data.get(item.storage_index) for item in plan.items]
    ended = time.perf_counter()
    if len(places) != tensors or None in places:
        raise RuntimeError(f"{len(places)} items of {tensors} tensors")
    seconds = {"read": read - began, "plan": done - read, "locate": ended - done}
    return {**seconds, "all": ended - began, "MiB": (resident_bytes("VmHWM") - before) / 2**20}


def measure(tensors: int, chunks: int, rounds: int, sides: list[str], folder: Path) -> None:
    """Prints a table of the sides."""
    where = folder / f"{tensors}x{chunks}"
    make = f"import load_plan, pathlib as p; load_plan.write_metadata(p.Path({str(where)!r}), "
    own = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", f"{make}{tensors}, {chunks})"], check=True, cwd=own)
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side in sides:
            call = [sys.executable, __file__, "--run", side, str(where), f"{tensors}", f"{chunks}"]
            out = subprocess.run(call, check=True, capture_output=True, text=True).stdout
            found[side].append(json.loads(out))
    size = (where / ".metadata").stat().st_size
    title = f"{tensors} tensors of {chunks} chunks, .metadata of {size / 2**20:.0f} MiB"
    print_table(title, found)


def print_table(title: str, found: dict[str, list[dict[str, float]]]) -> None:
    """Prints the medians of each side's runs."""
    print(title)
    names = ("read", "plan", "locate", "all", "MiB")
    print(f"{'':24}" + "".join(f"{name:>10}" for name in names))
    for side, runs in found.items():
        medians = [statistics.median(one[name] for one in runs) for name in names]
        cells = [f"{value:8.3f} s" for value in medians[:-1]]
        print(f"{side:24}" + "".join(cells) + f"{medians[-1]:10.0f}")


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", choices=("chunks", "plain", "both"), default="both")
    parser.add_argument("--tensors", type=int)
    parser.add_argument("--chunks", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--run", nargs=4, metavar=("SIDE", "PATH", "TENSORS", "CHUNKS"))
    chosen = parser.parse_args()
    if chosen.run:
        side, path, tensors, chunks = chosen.run
        if side != "torch":
            gc.disable()  # as `DcpxReader` does from `read_metadata` to the end of the local plan
        print(json.dumps(planned(side, path, int(tensors), int(chunks))))
        return
    with tempfile.TemporaryDirectory() as folder:
        if chosen.case != "plain":
            tensors = chosen.tensors or 1000
            measure(tensors, chosen.chunks, chosen.rounds, chosen.sides, Path(folder))
        if chosen.case != "chunks":
            tensors = chosen.tensors or 20000
            measure(tensors, 1, chosen.rounds, chosen.sides, Path(folder))


if __name__ == "__main__":
    main()
