"""Integers of any type work where an int is asked for, and are kept as plain ints."""

from __future__ import annotations

import enum
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torch_dcpx import (
    CheckpointManager,
    DcpxStager,
    DcpxWriter,
    KeyMap,
    Merge,
    OptionError,
    ReadOptions,
    Split,
    Transpose,
    WriteOptions,
    export,
)
from torch_dcpx._integers import plain_int

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
