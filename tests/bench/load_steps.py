"""Prints what each step of a load costs in Python, in microseconds per 1,000 items.

    python tests/bench/load_steps.py --items 20000
    python tests/bench/load_steps.py --items 20000 --item-bytes 0     (Python scalars)

Steps of DCP's own are named after it. Medians over the rounds of one process; a step holds those
that are indented below it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from steps import Step, arguments, print_table, timed
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from torch_dcpx import DcpxReader, DcpxWriter
from torch_dcpx.metadata import file as metadata
from torch_dcpx.reader import files as read_files
from torch_dcpx.reader import reader

STEPS = (
    Step("read_metadata", DcpxReader, "read_metadata"),
    Step("- decode", reader, "decode_metadata"),
    Step("-- check the columns", metadata, "open_columns"),
    Step("DCP: flatten the state", DefaultLoadPlanner, "set_up_planner"),
    Step("DCP: local plan", DefaultLoadPlanner, "create_local_plan"),
    Step("prepare_local_plan", DcpxReader, "prepare_local_plan"),
    Step("- rows and C++: open, index", reader, "locate_items"),
    Step("read_data", DcpxReader, "read_data"),
    Step("- find the targets", read_files._Window, "prepare"),
    Step("- C++: decode, read, verify; then finish", read_files._Window, "flush"),
    Step("the whole load", dcp, "load"),
)


def state_of(items: int, item_bytes: int) -> dict[str, Any]:
    """Returns tensors of `item_bytes`, or different ints where that is 0."""
    values = (
        [torch.rand(item_bytes // 4) for _ in range(items)] if item_bytes else list(range(items))
    )
    return {"model": {f"layer.{i}.weight": value for i, value in enumerate(values)}}


def warm(folder: Path) -> None:
    """Brings the files into the page cache, which direct writes and reads leave empty."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            while file.read(1 << 20):
                pass


def measure(items: int, item_bytes: int, rounds: int, folder: Path) -> dict[str, float]:
    """Returns microseconds per 1,000 items of each step; the first round is not counted."""
    state = state_of(items, item_bytes)
    dcp.save(state, storage_writer=DcpxWriter(folder / "save"), no_dist=True)
    warm(folder / "save")
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        seconds: dict[str, float] = dict.fromkeys((step.title for step in STEPS), 0.0)
        with timed(STEPS, seconds):
            dcp.load(state, storage_reader=DcpxReader(folder / "save"), no_dist=True)
        for title, value in seconds.items():
            if number > 0:
                found[title].append(value / items * 1e9)
    return {title: statistics.median(values) for title, values in found.items()}


def main() -> None:
    """Prints the table."""
    print_table(arguments(__doc__, 65536).parse_args(), measure)


if __name__ == "__main__":
    main()
