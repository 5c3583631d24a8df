"""Few crossings: how often Python calls C++ and C++ the kernel, counted exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.saves import data_files, load, read_footer, save
from support.states import assert_same

from torch_dcpx import _C, DcpxReader, WriteOptions
from torch_dcpx.storage import place

MIB = 1 << 20


def state_of(tensors: int, elems: int = 64) -> dict[str, Any]:
    """Returns this many tensors, and a tenth as many byte items and strided tensors."""
    state: dict[str, Any] = {f"t{i}": torch.randn(elems) for i in range(tensors)}
    for i in range(max(1, tensors // 10)):
        state[f"value{i}"] = {"step": i, "name": "x"}
        state[f"strided{i}"] = torch.randn(20, 10).t()[::2]
    return state


def counting(job_type: type, calls: Counter[str]) -> Callable[..., Any]:
    """Returns a stand-in for a job class that counts the calls of its methods."""

    class Counted:
        def __init__(self, **kwargs: Any) -> None:
            self._job = job_type(**kwargs)

        def __getattr__(self, name: str) -> Any:
            calls[f"{job_type.__name__}.{name}"] += 1
            return getattr(self._job, name)

    return Counted


class CountedDoor:
    """The extension module with counted jobs."""

    def __init__(self, calls: Counter[str]) -> None:
        self.WriteJob = counting(_C.WriteJob, calls)
        self.ReadJob = counting(_C.ReadJob, calls)

    def __getattr__(self, name: str) -> Any:
        return getattr(_C, name)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the calls of the jobs' methods from now on."""
    counted: Counter[str] = Counter()
    monkeypatch.setattr(place, "_C", CountedDoor(counted))
    return counted


@pytest.mark.parametrize("tensors", [3, 300])
def test_a_save_is_one_call_and_a_load_is_two(
    tmp_path: Path, calls: Counter[str], tensors: int
) -> None:
    state = state_of(tensors)
    save(state, tmp_path)
    assert calls == {
        "WriteJob.add_file": 1,
        "WriteJob.write": 1,
        "WriteJob.results": 1,
        "WriteJob.report": 1,
    }
    calls.clear()
    assert_same(state, load(state, tmp_path))
    assert calls == {
        "ReadJob.locate": 1,
        "ReadJob.read": 1,
        "ReadJob.close": 1,
        "ReadJob.report": 1,
    }
    save(state, tmp_path / "stock", "stock")
    calls.clear()
    assert_same(state, load(state, tmp_path / "stock"))
    assert (calls["ReadJob.locate"], calls["ReadJob.read"]) == (1, 1)


def test_a_trace_costs_no_call_more(
    tmp_path: Path, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, counts = state_of(30), []
    for folder in ("", str(tmp_path / "traces")):
        monkeypatch.setenv("DCPX_TRACE_DIR", folder)
        save(state, tmp_path / "checkpoint")
        load(state, tmp_path / "checkpoint")
        counts.append(dict(calls))
        calls.clear()
    assert counts[0] == counts[1]
    assert len(list((tmp_path / "traces").iterdir())) == 2


class CallCounts:
    """System calls made by C++ while the block ran."""

    def __enter__(self) -> Counter[str]:
        self._before = _C.call_counts()
        self._found: Counter[str] = Counter()
        return self._found

    def __exit__(self, *_: object) -> None:
        after = _C.call_counts()
        self._found.update({name: after[name] - self._before[name] for name in after})


def test_packed_small_tensors_share_writes_and_reads(tmp_path: Path) -> None:
    state = {f"t{i}": torch.randn(256) for i in range(1000)}  # 1 KiB each
    with CallCounts() as counts:
        save(state, tmp_path)
    (name,) = data_files(tmp_path)
    footer = read_footer(tmp_path / name)
    segments = -(-footer.data_bytes // MIB)
    assert footer.data_bytes < 3 * MIB  # a tensor of 1 KiB costs less than 3
    assert counts["pwrite"] <= -(-footer.data_bytes // WriteOptions().slot_bytes) + 2
    assert counts["fallocate"] == 1  # the data and the footer
    assert [counts[name] for name in ("open", "fsync", "fstat", "close")] == [1, 1, 1, 1]
    assert [counts[name] for name in ("pread", "unlink")] == [0, 0]

    with CallCounts() as counts:
        assert_same(state, load(state, tmp_path))
    # The tail, the index, page checks, block table, and the extents, all from one open file.
    assert counts["pread"] <= 4 + 2 * segments
    assert counts["open"] == 1
    assert sum(counts[name] for name in ("pwrite", "fsync", "fallocate", "unlink")) == 0


def test_calls_of_a_save_do_not_grow_with_the_number_of_small_tensors(tmp_path: Path) -> None:
    for tensors in (10, 200):
        with CallCounts() as counts:
            save({f"t{i}": torch.randn(64) for i in range(tensors)}, tmp_path / str(tensors))
        assert counts == {
            "open": 1, "fallocate": 1, "pwrite": 2, "fsync": 1, "fstat": 1, "close": 1,
            "ftruncate": 0, "pread": 0, "unlink": 0, "sync_file_range": 0,
        }  # fmt: skip


def test_large_tensor_is_written_a_segment_a_call(tmp_path: Path) -> None:
    state = {"large": torch.randn(5 * MIB // 4 * 4)}  # 20 MiB
    with CallCounts() as counts:
        save(state, tmp_path, options=WriteOptions(slot_bytes=MIB, workers=2, in_place="always"))
    # Four segments for each worker, both ends, the footer: what is in place needs no slot.
    assert 8 <= counts["pwrite"] <= 12
    strided = {"large": torch.randn(5 * MIB // 4, 8)[:, ::2]}  # 20 MiB, through slots of 1 MiB
    with CallCounts() as counts:
        save(strided, tmp_path / "strided", options=WriteOptions(slot_bytes=MIB, workers=2))
    assert 20 <= counts["pwrite"] <= 24
    with CallCounts() as counts:
        assert_same(state, load(state, tmp_path))
    assert 10 <= counts["pread"] <= 17  # slots of 2 MiB, footer, metadata


@pytest.mark.parametrize("durability", ["full", "none"])
def test_every_file_is_synced_once_or_none_at_all(tmp_path: Path, durability: Any) -> None:
    state = state_of(20)
    with CallCounts() as counts:
        save(state, tmp_path, single_file_per_rank=False,
             options=WriteOptions(durability=durability))  # fmt: skip
    files = len(data_files(tmp_path))
    assert files == 20 + 2 + 2 * 2  # tensors, strided ones, and the leaves of the dicts
    assert counts["fsync"] == (files if durability == "full" else 0)
    assert counts["open"] == counts["close"] == counts["fstat"] == files


def test_partial_load_reads_only_blocks_that_it_needs(tmp_path: Path) -> None:
    save({"large": torch.randn(4 * MIB), "small": torch.arange(10)}, tmp_path)
    dcp_reader = DcpxReader(tmp_path)
    target = {"small": torch.zeros(10, dtype=torch.int64)}
    dcp.load(target, storage_reader=dcp_reader, no_dist=True)
    assert_same(torch.arange(10), target["small"])
    assert dcp_reader.last_report is not None
    assert dcp_reader.last_report.needed_bytes == 80
    assert dcp_reader.last_report.read_bytes <= 2 * (64 << 10)
