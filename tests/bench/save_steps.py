"""Prints what each step of a save costs in Python, in microseconds per 1,000 items.

    python tests/bench/save_steps.py --items 20000

Steps of DCP's own are named after it. Medians over the rounds of one process; a step holds those
that are indented below it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from steps import Step, arguments, medians, print_table
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from torch_dcpx import DcpxWriter
from torch_dcpx.writer import commit, writer
from torch_dcpx.writer import files as write_files
from torch_dcpx.writer.table import WriteTable

STEPS = (
    Step("DCP: flatten the state", DefaultSavePlanner, "set_up_planner"),
    Step("DCP: local plan", DefaultSavePlanner, "create_local_plan"),
    Step("check the plan", writer, "check_plan"),
    Step("DCP: global plan", DefaultSavePlanner, "create_global_plan"),
    Step("write_data", DcpxWriter, "write_data"),
    Step("- resolve_data to rows", WriteTable, "resolve_in_place"),
    Step("- C++: decode, copy, write, fsync", write_files._Window, "flush"),
    Step("finish", DcpxWriter, "finish"),
    Step("- check the results", writer, "verify_results"),
    Step("- encode and publish", commit, "publish"),
    Step("-- encode the metadata", commit, "encode_pieces"),
    Step("the whole save", dcp, "save"),
)


def measure(items: int, item_bytes: int, rounds: int, folder: Path) -> dict[str, float]:
    """Returns microseconds per 1,000 items of each step."""
    state = {"model": {f"layer.{i}.weight": torch.rand(item_bytes // 4) for i in range(items)}}
    path = folder / "save"
    return medians(
        STEPS,
        items,
        rounds,
        lambda: dcp.save(state, storage_writer=DcpxWriter(path), no_dist=True),
        lambda: shutil.rmtree(path),
    )


def main() -> None:
    """Prints the table."""
    print_table(arguments(__doc__, 4096).parse_args(), measure)


if __name__ == "__main__":
    main()
