"""Prints what each step of a save costs in Python, in microseconds per 1,000 items.

    python tests/bench/save_steps.py --items 20000

Steps of DCP's own are named after it. Medians over the rounds of one process; a step holds those
that are indented below it.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from torch_dcpx import DcpxWriter, commit, write_files, writer
from torch_dcpx.write_table import WriteTable


class Step(NamedTuple):
    """A function that is timed."""

    title: str
    owner: Any
    name: str


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
    Step("- encode and publish", writer, "publish"),
    Step("-- encode the metadata", commit, "encode_pieces"),
    Step("the whole save", dcp, "save"),
)


@contextmanager
def timed(seconds: dict[str, float]) -> Iterator[None]:
    """Adds up the time inside of each step while the block runs."""
    originals = [getattr(step.owner, step.name) for step in STEPS]

    def clocked(title: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # DCP looks at signatures
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[title] += time.perf_counter() - began

        return call

    for step, function in zip(STEPS, originals, strict=True):
        setattr(step.owner, step.name, clocked(step.title, function))
    try:
        yield
    finally:
        for step, function in zip(STEPS, originals, strict=True):
            setattr(step.owner, step.name, function)


def measure(items: int, item_bytes: int, rounds: int, folder: Path) -> dict[str, float]:
    """Returns microseconds per 1,000 items of each step; the first round is not counted."""
    state = {"model": {f"layer.{i}.weight": torch.rand(item_bytes // 4) for i in range(items)}}
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        seconds: dict[str, float] = dict.fromkeys((step.title for step in STEPS), 0.0)
        with timed(seconds):
            dcp.save(state, storage_writer=DcpxWriter(folder / "save"), no_dist=True)
        shutil.rmtree(folder / "save")
        for title, value in seconds.items():
            if number > 0:
                found[title].append(value / items * 1e9)
    return {title: statistics.median(values) for title, values in found.items()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--item-bytes", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the file system to write to")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = measure(args.items, args.item_bytes, args.rounds, Path(folder))
    print(f"| step, {args.items:,} x {args.item_bytes:,} B | us per 1,000 items |\n| --- | --- |")
    for title, value in found.items():
        print(f"| {title} | {value:,.0f} |")


if __name__ == "__main__":
    main()
