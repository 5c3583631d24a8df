"""Traces of several ranks: one operation, merged by `dcpx trace`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from support.async_saves import failing_options
from support.machine import seconds
from support.rank_fixture import StartRanks

import torch_dcpx as dcpx
from torch_dcpx import DcpxReader, DcpxWriter
from torch_dcpx.cli.app import app

ROWS = 1000


def state_of() -> dict[str, Any]:
    return {f"rank{dist.get_rank()}": torch.ones(ROWS), "both": torch.arange(70)}


def merged(folder: Path, *args: str) -> Any:
    """Returns what `dcpx trace --json` says of a folder, and the merged trace."""
    dist.barrier()
    out = folder.parent / f"merged{dist.get_rank()}.json"
    result = CliRunner().invoke(
        app, ["trace", str(folder), "--out", str(out), "--overwrite", "--json", *args]
    )
    assert result.exit_code == 0, result.output
    dist.barrier()
    return json.loads(result.stdout), json.loads(out.read_text())["traceEvents"]


def ranks_of_every_call_are_one_operation(root: Path) -> None:
    calls = {
        "async_save": lambda: dcpx.async_save(state_of(), root / "a").result(seconds(60)),
        "save": lambda: dcpx.save(state_of(), root / "b"),
        "load": lambda: dcpx.load(state_of(), root / "b"),
        "plug_in_save": lambda: dcp.save(state_of(), storage_writer=DcpxWriter(root / "c")),
        "plug_in_load": lambda: dcp.load(state_of(), storage_reader=DcpxReader(root / "c")),
    }
    for name, call in calls.items():
        os.environ["DCPX_TRACE_DIR"] = str(root / name)
        call()
        found, events = merged(root / name)
        assert found["files"] == 2
        assert [each["operation"] for each in found["operations"]] == [name.split("_in_")[-1]]
        assert found["errors"] == []
        assert {event["pid"] for event in events} == {0, 1}
        phases = {row["phase"]: row for row in found["phases"]}
        written = "read" if "load" in name else "write"
        assert phases[written]["ranks"] == 2
        assert phases.get("commit", {"ranks": 1})["ranks"] == 1  # the coordinator's alone


def a_save_that_failed_on_one_rank_has_the_traces_of_both(root: Path) -> None:
    os.environ["DCPX_TRACE_DIR"] = str(root / "failed")
    options = failing_options() if dist.get_rank() == 1 else None
    with pytest.raises(dcpx.StorageError, match="no room"):
        dcpx.save(state_of(), root / "d", options=options)
    found, _ = merged(root / "failed")
    assert found["errors"] == ["StorageError on rank 0", "StorageError on rank 1"]


@pytest.mark.multirank
def test_two_ranks_leave_the_traces_of_one_operation(ranks: StartRanks, tmp_path: Path) -> None:
    for case in (
        ranks_of_every_call_are_one_operation,
        a_save_that_failed_on_one_rank_has_the_traces_of_both,
    ):
        ranks(2)(case, tmp_path)
