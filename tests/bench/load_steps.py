"""Prints what each step of a load costs in Python, in microseconds per 1,000 items.

    python tests/bench/load_steps.py --items 20000
    python tests/bench/load_steps.py --items 20000 --item-bytes 0     (Python scalars)

Steps of DCP's own are named after it. Medians over the rounds of one process; a step holds those
that are indented below it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from load_sides import read_to_cache
from steps import Step, arguments, medians, print_table
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


def measure(items: int, item_bytes: int, rounds: int, folder: Path) -> dict[str, float]:
    """Returns microseconds per 1,000 items of each step; the files are in the page cache."""
    state, path = state_of(items, item_bytes), folder / "save"
    dcp.save(state, storage_writer=DcpxWriter(path), no_dist=True)
    read_to_cache(path)
    return medians(
        STEPS,
        items,
        rounds,
        lambda: dcp.load(state, storage_reader=DcpxReader(path), no_dist=True),
    )


def main() -> None:
    """Prints the table."""
    print_table(arguments(__doc__, 65536).parse_args(), measure)


if __name__ == "__main__":
    main()
