"""Times DcpxWriter and DcpxReader beside stock DCP: same state, same run, turn about.

Each round takes the sides in shuffled order; each saves to a fresh directory, with fsync, loads
what it saved once with the files dropped from the page cache and once with them in it, checks
every byte of both loads, and removes the directory. One process, no process group.
"""

import os
import random
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from bitwise import is_same, raw_bytes
from byte_gpt import CONFIGS, ByteGpt, batch_for, load_corpus
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict

from torch_dcpx import DcpxReader, DcpxWriter

SIDES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "torch-dcpx": (DcpxWriter, DcpxReader),
    "stock": (dcp.FileSystemWriter, dcp.FileSystemReader),
    "stock, 2 threads": (partial(dcp.FileSystemWriter, thread_count=2), dcp.FileSystemReader),
}
SAVE = "save, with fsync"
LOAD_COLD = "load, page cache dropped"
LOAD_WARM = "load, page cache full"
OPERATIONS = (SAVE, LOAD_COLD, LOAD_WARM)
Times = dict[tuple[str, str], list[float]]  # (operation, side) -> seconds, one a round


def trained_state(config_name: str) -> dict[str, Any]:
    """Returns model and AdamW state of a model that took one step, so that nothing is zero."""
    config = CONFIGS[config_name]
    torch.manual_seed(0)
    model = ByteGpt(config)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, targets = batch_for(load_corpus(), config, step=1, rank=0, world_size=1)
    model(inputs[:1], targets[:1]).backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def map_tensors(state: Any, change: Callable[[Tensor], Any]) -> Any:
    """Returns nested dicts with `change` applied to every tensor in them."""
    if isinstance(state, Tensor):
        return change(state)
    if isinstance(state, dict):
        return type(state)((key, map_tensors(value, change)) for key, value in state.items())
    return state


def drop_from_page_cache(directory: Path) -> None:
    """Asks the kernel to forget the files' pages, which were synced: no root needed."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_into_page_cache(directory: Path) -> None:
    """Reads all files once through the page cache."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            while file.read(1 << 22):
                pass


def timed_load(reader: dcp.StorageReader, state: Any, destination: Any) -> float:
    """Returns the seconds of a load into `destination`, once every byte was found right.

    Raises:
        ValueError: a byte of the load differs from `state`.
    """
    map_tensors(destination, lambda tensor: raw_bytes(tensor).fill_(0xA5))
    began = time.perf_counter()
    dcp.load(destination, storage_reader=reader, no_dist=True)
    seconds = time.perf_counter() - began
    if not is_same(state, destination):
        raise ValueError("a load of the table is not bit for bit what was saved")
    return seconds


def run_round(side: str, state: Any, destination: Any, directory: Path, times: Times) -> None:
    """Saves once and loads twice with one side, and adds the seconds to `times`."""
    writer, reader = SIDES[side]
    began = time.perf_counter()
    dcp.save(state, storage_writer=writer(directory), no_dist=True)
    times[SAVE, side].append(time.perf_counter() - began)
    drop_from_page_cache(directory)
    times[LOAD_COLD, side].append(timed_load(reader(directory), state, destination))
    read_into_page_cache(directory)
    times[LOAD_WARM, side].append(timed_load(reader(directory), state, destination))
    shutil.rmtree(directory)


def measure(directory: Path, config_name: str, rounds: int) -> str:
    """Returns the table of one run, as text. The first round warms up and is not counted.

    Args:
        directory: where the checkpoints of the run are made and removed.
        config_name: a key of `byte_gpt.CONFIGS`.
        rounds: measured saves and loads, for each side.
    """
    state = trained_state(config_name)
    destination = map_tensors(state, torch.empty_like)
    sizes: list[int] = []
    map_tensors(state, lambda tensor: sizes.append(tensor.nbytes))
    order = random.Random(0)
    for number in range(rounds + 1):
        if number <= 1:  # forget the warm-up
            times: Times = {(op, side): [] for op in OPERATIONS for side in SIDES}
        for side in order.sample(list(SIDES), len(SIDES)):
            run_round(side, state, destination, directory / f"{side}-{number}", times)
        print(f"  round {number} of {rounds}" + " (warm-up)" * (number == 0), flush=True)
    return format_table(times, sum(sizes))


def format_table(times: Times, state_bytes: int) -> str:
    """Returns one line an operation and side: seconds (median, min-max), GB/s, ratio to stock."""
    lines = [f"  {'':25}{'':17}{'bytes':>11}  {'seconds (min-max)':20} {'GB/s':>5}  speed to stock"]
    for operation in OPERATIONS:
        stock_s = statistics.median(times[operation, "stock"])
        for side in SIDES:
            seconds = times[operation, side]
            median_s = statistics.median(seconds)
            spread = f"{median_s:.3f} ({min(seconds):.3f}-{max(seconds):.3f})"
            lines.append(
                f"  {operation:25}{side:17}{state_bytes:>11,}  {spread:20}"
                f" {state_bytes / median_s / 1e9:>5.2f}  {stock_s / median_s:.2f}x"
            )
    return "\n".join(lines)
