"""`reader.last_report` and the log line: what was read, which way, and where the time went."""

from __future__ import annotations

import dataclasses
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.saves import data_files, raises_one, save
from support.states import assert_same, blank_like, mixed_state

from torch_dcpx import DcpxReader, ReadOptions
from torch_dcpx.errors import CorruptionError
from torch_dcpx.reader.files import ReadCounts
from torch_dcpx.reports import ReadReport, loaded_line
from torch_dcpx.timelines import Timeline


def report_of(path: Path, state: Any, **kwargs: Any) -> ReadReport:
    reader = DcpxReader(path, **kwargs)
    assert reader.last_report is None
    target = blank_like(state)
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert_same(state, target)
    assert reader.last_report is not None
    return reader.last_report


@pytest.mark.parametrize("writer", ["ours", "stock"])
@pytest.mark.parametrize("verify", ["blocks", "none"])
def test_report_counts_bytes_by_path_and_phases_add_up(
    tmp_path: Path, writer: str, verify: Any
) -> None:
    state = mixed_state()
    save(state, tmp_path, writer)
    report = report_of(tmp_path, state, options=ReadOptions(verify=verify))
    infos = dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    assert report.items == len(infos) - 1  # DCP does not plan to read the tensor without elements
    assert report.in_place_bytes + report.through_slot_bytes == report.needed_bytes
    assert 0 < report.needed_bytes <= report.read_bytes
    assert report.foreign_bytes == (report.read_bytes if writer == "stock" else 0)
    is_verified = verify == "blocks" and writer == "ours"
    assert (report.verified_bytes >= report.needed_bytes) is is_verified
    assert is_verified or report.verified_bytes == 0
    phases = [
        report.metadata_s, report.prepare_s, report.read_s, report.verify_s, report.copy_s,
        report.finish_s,
    ]  # fmt: skip
    assert min(phases) >= 0
    assert sum(phases) == pytest.approx(report.total_s)
    assert min(report.metadata_s, report.prepare_s, report.finish_s) > 0
    assert report.gb_per_s == report.needed_bytes / report.total_s / 1e9


def test_report_is_of_the_last_load_and_none_after_a_failed_one(tmp_path: Path) -> None:
    state = {"w": torch.zeros(100)}
    save(state, tmp_path)
    reader = DcpxReader(tmp_path)
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert pickle.loads(pickle.dumps(reader)).last_report == reader.last_report
    (name,) = data_files(tmp_path)
    content = bytearray((tmp_path / name).read_bytes())
    content[200] ^= 1
    (tmp_path / name).write_bytes(content)
    with raises_one(CorruptionError):
        dcp.load(state, storage_reader=reader, no_dist=True)
    assert reader.last_report is None


COUNTERS = {
    "needed_bytes": 2_147_483_648, "read_bytes": 2_147_500_000, "verified_bytes": 2_147_500_000,
    "in_place_bytes": 2_000_000_000, "direct_bytes": 0, "foreign_bytes": 0,
    "slot_bytes": 1 << 21, "read_ns": 1, "verify_ns": 0, "copy_ns": 0,
}  # fmt: skip


def of_read(**counters: int) -> ReadReport:
    counts = ReadCounts(32, 1, engine_s=0.5, finish_s=0.25)
    return counts.report(
        {**COUNTERS, **counters}, metadata_s=0.125, total_s=1.0, timeline=Timeline()
    )


@pytest.mark.parametrize(
    ("counters", "expected"),
    [
        ({"read_ns": 4, "verify_ns": 3, "copy_ns": 1}, (0.25, 0.1875, 0.0625)),
        ({"read_ns": 0, "verify_ns": 0, "copy_ns": 0}, (0.5, 0.0, 0.0)),
    ],
)
def test_engine_time_is_shared_out_by_what_workers_did(
    counters: dict[str, int], expected: tuple[float, ...]
) -> None:
    report = of_read(**counters)
    assert (report.read_s, report.verify_s, report.copy_s) == expected
    assert (report.metadata_s, report.prepare_s, report.finish_s) == (0.125, 0.125, 0.25)


def test_each_load_is_one_line_that_says_bytes_rate_phases_and_items(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = of_read(read_ns=4, verify_ns=3, copy_ns=1)
    said = loaded_line(report, "ckpt/step-100")
    numbers = ["2.15 GB in 1 s (2.15 GB/s)", "metadata 0.125", "prepare 0.125", "read 0.250"]
    numbers += ["verify 0.188", "copy 0.062", "finish 0.250 s", "32 parts, 2.15 GB read"]
    assert said.startswith("loaded 'ckpt/step-100': ")
    assert [said.find(number) for number in numbers] == sorted(map(said.index, numbers))
    nothing = dataclasses.replace(report, items=1, needed_bytes=0, total_s=0.0)
    assert nothing.gb_per_s == 0.0
    assert "0 B in 0 s" in loaded_line(nothing, "x")
    state = {"large": torch.zeros(1000, 1000), "zeros": torch.zeros(0)}
    save(state, tmp_path)
    caplog.set_level(logging.INFO, "torch_dcpx")
    for _ in range(2):
        report = report_of(tmp_path, state)
    assert report.needed_bytes == report.in_place_bytes + report.through_slot_bytes == 4_000_000
    assert report.torch_items == 0
    records = [record for record in caplog.records if record.name == "torch_dcpx"]
    assert [record.levelname for record in records] == ["INFO"] * 2
    assert records[1].message == loaded_line(report, str(tmp_path))
