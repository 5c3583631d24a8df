"""`writer.last_report` and the log line: what was written, which way, and where the time went."""

from __future__ import annotations

import dataclasses
import io
import logging
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.rank_fixture import StartRanks
from support.saves import data_files, raises_one, read_footer, save
from support.slow_states import SLOW, CopyingPlanner, windowed_state
from support.states import mixed_state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from torch_dcpx import DcpxReader, DcpxWriter, WriteOptions
from torch_dcpx.reports import WriteReport, saved_line
from torch_dcpx.storage.names import FileEntry
from torch_dcpx.timelines import Timeline
from torch_dcpx.writer.files import Written


def report_of(path: Path, state: Any, planner: Any = None, **kwargs: Any) -> WriteReport:
    writer = DcpxWriter(path, **kwargs)
    assert writer.last_report is None
    dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    assert writer.last_report is not None
    return writer.last_report


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"single_file_per_rank": False},
        {"options": WriteOptions(files_per_rank=2)},
        {"options": WriteOptions(direct_io=False)},
        {"sync_files": False},
        {"options": SLOW, "planner": CopyingPlanner()},
    ],
    ids=["one file", "a file each", "several", "buffered", "not durable", "windows"],
)
def test_report_counts_what_lies_on_the_disk_and_phases_add_up(
    tmp_path: Path, kwargs: dict[str, Any]
) -> None:
    report = report_of(tmp_path, mixed_state(), **kwargs)
    files = data_files(tmp_path)
    infos = dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    assert report.items == len(infos)
    assert report.files == len(files)
    assert report.file_bytes == sum((tmp_path / name).stat().st_size for name in files)
    assert 0 < report.payload_bytes < report.file_bytes
    assert report.direct_bytes + report.buffered_bytes <= report.file_bytes
    assert report.direct_bytes == 0 or kwargs.get("options", SLOW).direct_io
    assert report.slot_bytes > 0
    phases = [report.prepare_s, report.copy_s, report.write_s, report.fsync_s, report.commit_s]
    assert min(phases) >= 0
    assert sum(phases) == pytest.approx(report.total_s)
    assert (report.fsync_s > 0) is (kwargs.get("sync_files") is not False)
    assert report.commit_s > 0
    assert report.gb_per_s == report.file_bytes / report.total_s / 1e9


@pytest.mark.parametrize("in_place", ["always", "never"])
def test_large_tensors_are_written_in_place_as_the_options_say(
    tmp_path: Path, in_place: Any
) -> None:
    state = {"w": torch.arange(2 << 20, dtype=torch.float32)}  # 8 MiB
    report = report_of(tmp_path, state, options=WriteOptions(in_place=in_place))
    if in_place == "always":
        assert 0 <= report.payload_bytes - report.in_place_bytes <= 2 * 4096
    else:
        assert report.in_place_bytes == 0
    assert report.slot_bytes <= WriteOptions().resolved_memory_bytes()


@pytest.mark.parametrize("options", [WriteOptions(), SLOW], ids=["one window", "windows"])
def test_payload_bytes_are_those_of_the_footers_also_for_python_values(
    tmp_path: Path, options: WriteOptions
) -> None:
    state = {f"v{i}": i for i in range(2000)} | {"text": "é" * 99, "w": torch.zeros(9), "l": {1}}
    report = report_of(tmp_path, state, options=options)
    assert report_of(tmp_path / "none", {}).file_bytes == 0
    rows = [row for name in data_files(tmp_path) for row in read_footer(tmp_path / name).rows]
    assert report.payload_bytes == sum(row.payload_bytes for row in rows)


def test_report_is_of_the_last_save_and_none_after_a_failed_one(tmp_path: Path) -> None:
    class Broken(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            raise ValueError

    writer = DcpxWriter(tmp_path)
    dcp.save({"w": torch.zeros(10)}, storage_writer=writer, no_dist=True)
    first = writer.last_report
    assert pickle.loads(pickle.dumps(writer)).last_report == first
    dcp.save({"w": torch.zeros(20)}, storage_writer=writer, no_dist=True)
    assert writer.last_report is not None
    assert first is not None
    assert writer.last_report.payload_bytes == 2 * first.payload_bytes
    with raises_one(ValueError):
        dcp.save({"w": torch.zeros(9)}, storage_writer=writer, planner=Broken(), no_dist=True)
    assert writer.last_report is None


def written_of(files: int, **counters: int) -> Written:
    byte_counts = {"direct_bytes": 0, "buffered_bytes": 0, "in_place_bytes": 0, "slot_bytes": 0}
    entries = [FileEntry(f"__0_{n}.distcp", bytes(16), 500, 0) for n in range(files)]
    return Written([], entries, {**byte_counts, **counters}, 0, Timeline("save"))


@pytest.mark.parametrize(
    ("files", "workers", "expected"),
    [
        (1, 4, (0.75, 2.25, 1.0)),  # nobody else has work while the only file is synced
        (4, 2, (0.875, 2.625, 0.5)),
        (2, 4, (0.875, 2.625, 0.5)),
    ],
)
def test_engine_time_is_shared_out_by_what_workers_did(
    files: int, workers: int, expected: tuple[float, ...]
) -> None:
    written = written_of(
        files, copy_ns=2 * 10**9, write_ns=6 * 10**9, fsync_ns=10**9, engine_ns=4 * 10**9
    )
    report = written.report(workers, 4.5)
    assert (report.copy_s, report.write_s, report.fsync_s) == expected
    assert (report.prepare_s, report.commit_s, report.total_s) == (0.5, 0.0, 4.5)
    done, none = (
        report.committed(4.75),
        written_of(0, copy_ns=0, write_ns=0, fsync_ns=0, engine_ns=0),
    )
    assert none.report(4, 0.0).gb_per_s == 0.0
    assert (done.prepare_s, done.commit_s, done.total_s) == (0.5, 0.25, 4.75)


def test_line_says_bytes_rate_phases_and_files() -> None:
    report = WriteReport(
        32, 1, 2_150_000_000, 2_147_483_648, 0, 0, 0, 0, 0.01, 0.3, 0.58, 0.018, 0.002, 0.91
    )
    line = saved_line(report, "ckpt/step-100", 1, report.file_bytes)
    assert line.startswith("saved 'ckpt/step-100': 2.15 GB in 0.91 s (2.36 GB/s): ")
    for phase in ("prepare 0.010", "copy 0.300", "write 0.580", "fsync 0.018", "commit 0.002 s"):
        assert phase in line
    assert line.endswith("; 32 parts, 1 file on this rank")
    few = dataclasses.replace(report, items=1, files=2, file_bytes=999)
    line = saved_line(few, "x", 3, 3 * report.file_bytes)
    assert line.startswith("saved 'x': 6.45 GB by 3 ranks; 999 B in 0.91 s")
    assert line.endswith("; 1 part, 2 files on this rank")


def test_each_save_is_one_line_of_the_packages_logger(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torch_dcpx")
    for seed in range(3):
        save(mixed_state(seed), tmp_path, options=WriteOptions(files_per_rank=2))
    report_of(tmp_path, windowed_state(), CopyingPlanner(), options=SLOW)
    assert [(record.levelname, record.name) for record in caplog.records] == [
        ("INFO", "torch_dcpx")
    ] * 4
    for message in caplog.messages:
        assert message.startswith(f"saved '{tmp_path}': ")
        assert re.search(r"\d+ parts, [12] files? on this rank$", message)


def test_a_failed_save_logs_no_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(DcpxWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            super().finish(metadata, [])

    caplog.set_level(logging.INFO, "torch_dcpx")
    writer = Refusing(tmp_path)
    with pytest.raises(dcp.CheckpointException):
        dcp.save(mixed_state(), storage_writer=writer, no_dist=True)
    assert [record for record in caplog.records if record.name == "torch_dcpx"] == []
    assert writer.last_report is not None
    assert writer.last_report.commit_s == 0.0


class KeepingPlanner(DefaultSavePlanner):
    """Brings the same metadata for every save, with planner data that are pickled as they are."""

    kept: Any = None

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        if self.kept is None:
            self.kept = dataclasses.replace(metadata, planner_data={"a": complex(1, 2)})
        return plans, self.kept


def test_report_rides_on_the_metadata_of_an_asynchronous_save_and_in_no_file(
    tmp_path: Path,
) -> None:
    planner = KeepingPlanner()
    for _ in range(2):
        writer = DcpxWriter(tmp_path)
        state = {"w": torch.arange(1000.0)}
        metadata = dcp.async_save(state, storage_writer=writer, planner=planner).result()
        assert metadata.dcpx_report == writer.last_report
        assert metadata.dcpx_report.commit_s > 0
        assert b"dcpx_report" not in (tmp_path / ".metadata").read_bytes()


# ---- On two ranks --------------------------------------------------------------------------------


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


def report_on_each(root: Path) -> None:
    lines = Lines()
    logging.getLogger("torch_dcpx").addHandler(lines)
    logging.getLogger("torch_dcpx").setLevel(logging.INFO)
    report_and_line(root / "report", lines)
    bar_of_the_coordinator(root / "bar")
    interrupted_rank(root / "interrupted")
    rank_local(root / "local", lines)


@pytest.mark.slow
@pytest.mark.multirank
def test_each_of_two_ranks_reports_its_own_part(tmp_path: Path, ranks: StartRanks) -> None:
    ranks(2, anew=True)(report_on_each, tmp_path)
