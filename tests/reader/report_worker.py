"""One of two ranks of test_report.py."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.worker import rank_case
from torch.distributed.checkpoint.api import CheckpointException

from torch_dcpx import DcpxReader, DcpxWriter, WriteOptions


class Lines(logging.Handler):
    """What the package's logger said on this rank."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def state_of(rank: int, numel: int) -> dict[str, Any]:
    return {f"rank{rank}.t{i}": torch.full((numel,), float(rank + i)) for i in range(4)}


def report_and_line(path: Path, lines: Lines) -> None:
    """Each rank reports what it wrote itself; the coordinator alone commits, and logs."""
    rank = dist.get_rank()
    calls: list[tuple[int, int]] = []
    options = WriteOptions(files_per_rank=1 + rank, progress=lambda *call: calls.append(call))
    writer = DcpxWriter(path, options=options)
    dcp.save(state_of(rank, 50_000 * (1 + rank)), storage_writer=writer)
    report = writer.last_report
    assert report is not None
    assert (report.items, report.files) == (4, 1 + rank)
    assert report.payload_bytes == 4 * 200_000 * (1 + rank)
    assert calls[0] == (0, report.payload_bytes)
    assert calls[-1] == (report.payload_bytes, report.payload_bytes)
    assert (report.commit_s > 0) is (rank == 0)
    if rank == 1:
        assert lines.lines == []
        return
    (line,) = lines.lines
    nbytes = sum(file.stat().st_size for file in path.glob("*.distcp"))
    assert line.startswith(f"saved '{path}': {nbytes / 1e6:.2f} MB by 2 ranks; ")
    assert line.endswith("; 4 parts, 1 file on this rank")


def bar_of_the_coordinator(path: Path) -> None:
    before, sys.stderr = sys.stderr, Terminal()
    writer = DcpxWriter(path, options=WriteOptions(progress=True))
    dcp.save(state_of(dist.get_rank(), 1000), storage_writer=writer)
    shown, sys.stderr = sys.stderr.getvalue(), before
    assert ("100%" in shown) is (dist.get_rank() == 0), shown


def interrupted_rank(path: Path) -> None:
    """Ctrl-C on one rank fails the save on all; nothing is published, its files are gone."""
    rank = dist.get_rank()
    dcp.save(state_of(rank, 1000), storage_writer=DcpxWriter(path))
    before = {file.name for file in path.iterdir()}
    dist.barrier()

    def interrupt(done_bytes: int, total_bytes: int) -> None:
        if rank == 1 and done_bytes == total_bytes:
            raise KeyboardInterrupt

    options = WriteOptions(files_per_rank=3, progress=interrupt)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state_of(rank, 2000), storage_writer=DcpxWriter(path, options=options))
    assert list(caught.value.failures) == [1]
    assert isinstance(caught.value.failures[1][0], KeyboardInterrupt)
    dist.barrier()
    left = {file.name for file in path.iterdir()} - before
    assert [name for name in left if name.startswith("__1_")] == []
    target = {name: torch.zeros(1000) for name in state_of(rank, 1)}
    dcp.load(target, storage_reader=DcpxReader(path))
    assert all(torch.equal(target[k], v) for k, v in state_of(rank, 1000).items())


def rank_local(path: Path, lines: Lines) -> None:
    """Without collectives every rank commits for itself, and says so."""
    lines.lines.clear()
    writer = DcpxWriter(path)
    dcp.save(state_of(dist.get_rank(), 100), storage_writer=writer, use_collectives=False)
    assert writer.last_report is not None
    assert writer.last_report.commit_s > 0
    assert [line.split(":")[0] for line in lines.lines] == [f"saved '{path}'"]


@rank_case()
def main(root: Path) -> None:
    lines = Lines()
    logging.getLogger("torch_dcpx").addHandler(lines)
    logging.getLogger("torch_dcpx").setLevel(logging.INFO)
    report_and_line(root / "report", lines)
    bar_of_the_coordinator(root / "bar")
    interrupted_rank(root / "interrupted")
    rank_local(root / "local", lines)
