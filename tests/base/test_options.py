"""Options are checked once, when they are made, and say what is wrong with them."""

from __future__ import annotations

import dataclasses
import enum
import os
import pickle
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, SerializationFormat
from torch.distributed.checkpoint.planner import SavePlan

import torch_dcpx as dcpx
from torch_dcpx import (
    CheckpointManager,
    DcpxReader,
    DcpxStager,
    DcpxWriter,
    KeyMap,
    Merge,
    OptionError,
    ReadOptions,
    Split,
    Transpose,
    UnsupportedError,
    WriteOptions,
    export,
)
from torch_dcpx._integers import plain_int

MIB = 1 << 20


# What tests/house/argument_table.py does not have: bounds, and what two options together cannot be.
WRONG: list[tuple[type, dict[str, Any], str]] = [
    (WriteOptions, {"workers": 33}, "workers"),  # more slots than the budget holds
    (WriteOptions, {"direct_io": 1}, "direct_io"),
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


# ---- Integers of any type ------------------------------------------------------------------------


Fruit = enum.IntEnum("Fruit", "apple pear plum")
INTEGERS: list[Any] = [3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3), Fruit(3)]
OTHERS: list[Any] = [True, np.bool_(1), torch.tensor(True), 3.0, np.float32(3), torch.tensor(3.0)]
OTHERS += ["3", torch.tensor([3]), np.array([3]), torch.tensor(3, device="meta"), None]


def test_integer_of_any_type_becomes_an_int_and_anything_else_stays_what_it_is() -> None:
    for value in INTEGERS:
        number = plain_int(value)
        assert type(number) is int and number == 3, value
    assert all(plain_int(value) is value for value in OTHERS)


def test_options_keep_plain_ints() -> None:
    for value in INTEGERS:
        written = WriteOptions(workers=value, files_per_rank=value, max_in_flight=value)
        assert written == WriteOptions(workers=3, files_per_rank=3, max_in_flight=3)
        kept = (written.workers, written.files_per_rank, written.max_in_flight)
        assert [type(number) for number in kept] == [int, int, int]
    slot_bytes = np.int64(1 << 20)
    read = ReadOptions(workers=value, slot_bytes=slot_bytes, host_memory_bytes=8 * slot_bytes)
    numbers = (read.workers, read.slot_bytes, read.host_memory_bytes)
    assert [type(number) for number in numbers] == [int, int, int]


@pytest.mark.parametrize("integer", [np.int64, torch.tensor])
def test_every_argument_that_is_an_integer_takes_one_of_any_type(
    integer: Any, tmp_path: Path
) -> None:
    stager = DcpxStager(host_memory_bytes=integer(1 << 20), workers=integer(2))
    writer = DcpxWriter(tmp_path, thread_count=integer(2), per_thread_copy_ahead=integer(9))
    rules = Split("a", ("b",), dim=integer(1)), Merge("a", "b", dim=integer(1))
    dims = [getattr(rule, "dim", None) for rule in KeyMap(*rules).rules]
    (transpose,) = KeyMap(Transpose("a", (integer(1), integer(0)))).rules
    numbers = [stager.host_memory_bytes, stager.workers, writer.options.workers]
    numbers += [writer.per_thread_copy_ahead, *dims, *transpose.dims]
    assert numbers == [1 << 20, 2, 2, 9, 1, 1, 1, 0]
    assert {type(number) for number in numbers} == {int}
    state = {"w": torch.ones(2)}
    assert export(state, tmp_path / "out", max_shard_bytes=integer(1 << 20)).tensors == 1
    seconds = WriteOptions(save_timeout_s=integer(3)).save_timeout_s
    assert (type(seconds), seconds) == (int, 3)
    with CheckpointManager(tmp_path / "run") as manager:
        watch = manager.save_on_signal([integer(signal.SIGUSR2)])
        assert watch.requested(integer(3)) is False
        os.kill(os.getpid(), signal.SIGUSR2)
        assert watch.requested(integer(4)) is True


def test_options_refuse_what_is_no_integer_or_out_of_range() -> None:
    for value in (*OTHERS[:-1], np.int64(0)):
        for name in ("workers", "files_per_rank", "max_in_flight"):
            with pytest.raises(OptionError, match=name) as info:
                WriteOptions(**{name: value})
            assert info.value.option == name


# ---- What is printed: what is not the default ----------------------------------------------------


@pytest.mark.parametrize("cls", [dcpx.WriteOptions, dcpx.ReadOptions])
def test_options_show_what_is_not_their_default(cls: type) -> None:
    assert repr(cls()) == f"{cls.__name__}()"
    options = cls(workers=3, direct_io=False)
    assert repr(options) == f"{cls.__name__}(workers=3, direct_io=False)"
    assert eval(repr(options), vars(dcpx)) == options == pickle.loads(pickle.dumps(options))
    assert repr(replace(options, workers=None)) == f"{cls.__name__}(direct_io=False)"


def test_writer_and_reader_show_path_and_options() -> None:
    class Own(dcpx.DcpxWriter):
        pass

    assert repr(dcpx.DcpxWriter("run/a")) == "DcpxWriter('run/a')"
    assert repr(Own("a", sync_files=False)) == "Own('a', options=WriteOptions(durability='none'))"
    reader = dcpx.DcpxReader("run/a", options=dcpx.ReadOptions(verify="none"))
    assert repr(reader) == "DcpxReader('run/a', options=ReadOptions(verify='none'))"


def test_manager_shows_root_and_rules() -> None:
    assert repr(dcpx.CheckpointManager("run")) == "CheckpointManager('run')"
    manager = dcpx.CheckpointManager(
        "run", keep_last=3, keep_best=("loss", "min", 1), save_every=5, async_save=False
    )
    assert repr(manager) == (
        "CheckpointManager('run', keep_last=3, keep_best=('loss', 'min', 1), save_every=5, "
        "async_save=False)"
    )
