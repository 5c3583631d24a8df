"""Options are checked once, when they are made, and say what is wrong with them."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, SerializationFormat
from torch.distributed.checkpoint.planner import SavePlan

from torch_dcpx import (
    DcpxReader,
    DcpxWriter,
    OptionError,
    ReadOptions,
    UnsupportedError,
    WriteOptions,
)

MIB = 1 << 20


# What tests/house/argument_table.py does not have: bounds, and what two options together cannot be.
WRONG: list[tuple[type, dict[str, Any], str]] = [
    (WriteOptions, {"workers": 33}, "workers"),  # more slots than the budget holds
    (WriteOptions, {"slot_bytes": 100_000}, "slot_bytes"),
    (WriteOptions, {"slot_bytes": 1 << 31}, "slot_bytes"),
    (WriteOptions, {"slot_bytes": 2 * MIB, "host_memory_bytes": MIB}, "host_memory_bytes"),
    (WriteOptions, {"save_timeout_s": float("inf")}, "save_timeout_s"),
    (ReadOptions, {"load_timeout_s": float("inf")}, "load_timeout_s"),
    (ReadOptions, {"safe_globals": ("system",)}, "safe_globals"),
]


def test_a_value_that_cannot_work_is_named() -> None:
    for cls, kwargs, option in WRONG:
        with pytest.raises(OptionError, match=option) as caught:
            cls(**kwargs)
        assert caught.value.option == option


@pytest.mark.parametrize("cls", [WriteOptions, ReadOptions])
def test_options_are_frozen_picklable_and_documented(cls: type) -> None:
    options = cls()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.slot_bytes = 1
    assert pickle.loads(pickle.dumps(options)) == options
    documented = (Path(__file__).parents[2] / "docs" / "reference" / "options.md").read_text()
    for field in dataclasses.fields(cls):
        assert f"{field.name}:" in (cls.__doc__ or "")
        assert f"`{field.name}`" in documented


@pytest.mark.parametrize(
    ("cores", "local_ranks", "budget", "workers"),
    [
        (2, "1", 64 * MIB, 8),
        (64, "1", 64 * MIB, 16),
        (64, "8", 64 * MIB, 16),
        (64, "16", 64 * MIB, 16),
        (64, "64", 64 * MIB, 4),
        (64, "256", 64 * MIB, 2),
        (1, "nonsense", 64 * MIB, 4),
        (64, "1", 6 * MIB, 3),
        (64, "1", 2 * MIB, 1),
    ],
)
def test_automatic_workers_share_the_cores_and_fit_the_budget(
    monkeypatch: pytest.MonkeyPatch, cores: int, local_ranks: str, budget: int, workers: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_ranks)
    assert WriteOptions(host_memory_bytes=budget).resolved_workers() == workers
    assert ReadOptions(host_memory_bytes=budget).resolved_workers() == workers


@pytest.mark.parametrize("error", [PermissionError(1, "refused"), OverflowError("CPU set")])
def test_cores_count_where_a_container_does_not_say_which_may_be_used(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(_pid: int) -> NoReturn:
        raise error

    monkeypatch.setattr("os.sched_getaffinity", refuse)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert WriteOptions().resolved_workers() == ReadOptions().resolved_workers() == 8


def test_a_budget_that_is_not_given_bounds_slots_and_temporaries_only() -> None:
    assert WriteOptions().host_memory_bytes is None
    assert WriteOptions().resolved_memory_bytes() == 64 * MIB
    assert WriteOptions(host_memory_bytes=3 * MIB).resolved_memory_bytes() == 3 * MIB
    assert WriteOptions().resolved_upload_bytes() == 192 * MIB
    assert WriteOptions(host_memory_bytes=3 * MIB).resolved_upload_bytes() == 3 * MIB


def test_stock_arguments_become_options_and_attributes(tmp_path: Path) -> None:
    writer = DcpxWriter(tmp_path, True, False, 3, 1 << 22, True, False)
    assert writer.options.durability == "none"
    assert writer.options.workers == 3
    assert (writer.sync_files, writer.thread_count) == (False, 3)
    assert writer.per_thread_copy_ahead == 1 << 22
    assert writer.overwrite is False
    assert DcpxWriter(tmp_path).sync_files is True
    assert DcpxWriter(tmp_path).thread_count == WriteOptions().resolved_workers()
    many = DcpxWriter(tmp_path, thread_count=100)
    assert many.options.host_memory_bytes == 200 * MIB


def test_contradicting_arguments_are_refused_and_agreeing_ones_accepted(tmp_path: Path) -> None:
    for kwargs in (
        {"sync_files": True, "options": WriteOptions(durability="none")},
        {"sync_files": False, "options": WriteOptions()},
        {"thread_count": 2, "options": WriteOptions(workers=3)},
        {"thread_count": 2, "options": WriteOptions()},
    ):
        with pytest.raises(OptionError):
            DcpxWriter(tmp_path, **kwargs)  # type: ignore[arg-type]
    options = WriteOptions(durability="none", workers=2)
    assert DcpxWriter(tmp_path, sync_files=False, thread_count=2, options=options).thread_count == 2


def test_what_is_not_written_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="SAFETENSORS"):
        DcpxWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    for cls in (DcpxWriter, DcpxReader):
        with pytest.raises(UnsupportedError, match="gs://bucket/x"):
            cls("gs://bucket/x")
        with pytest.raises(UnsupportedError, match="gs://bucket/x"):
            cls(tmp_path).reset("gs://bucket/x")


def test_a_replaced_file_system_is_refused_by_name(tmp_path: Path) -> None:
    class Elsewhere(FileSystem):
        pass

    writer, reader = DcpxWriter(tmp_path / "ckpt"), DcpxReader(tmp_path / "ckpt")
    writer.fs = reader.fs = Elsewhere()
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    with pytest.raises(UnsupportedError, match="Elsewhere"):
        writer.prepare_local_plan(SavePlan([]))
    with pytest.raises(UnsupportedError, match="Elsewhere"):
        reader.read_metadata()
    with pytest.raises(CheckpointException) as caught:  # not DCP's AssertionError without a cause
        dcp.load({"a": None}, storage_reader=reader, no_dist=True)
    assert isinstance(caught.value.failures[0][0], UnsupportedError)
    assert not (tmp_path / "ckpt").exists()
