"""Integers of any type work where an int is asked for, and are kept as plain ints."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest
import torch

from torch_dcpx import OptionError, ReadOptions, WriteOptions
from torch_dcpx._integers import plain_int

Fruit = enum.IntEnum("Fruit", "apple pear plum")
INTEGERS: list[Any] = [3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3), Fruit(3)]
OTHERS: list[Any] = [True, np.bool_(1), torch.tensor(True), 3.0, np.float32(3), torch.tensor(3.0)]
OTHERS += ["3", torch.tensor([3]), np.array([3]), torch.tensor(3, device="meta"), None]


@pytest.mark.parametrize("value", INTEGERS, ids=repr)
def test_integer_of_any_type_becomes_an_int(value: Any) -> None:
    number = plain_int(value)
    assert type(number) is int and number == 3


@pytest.mark.parametrize("value", OTHERS, ids=repr)
def test_anything_else_stays_what_it_is(value: Any) -> None:
    assert plain_int(value) is value


@pytest.mark.parametrize("value", INTEGERS, ids=repr)
def test_options_keep_plain_ints(value: Any) -> None:
    written = WriteOptions(workers=value, files_per_rank=value, max_in_flight=value)
    assert written == WriteOptions(workers=3, files_per_rank=3, max_in_flight=3)
    kept = (written.workers, written.files_per_rank, written.max_in_flight)
    assert [type(number) for number in kept] == [int, int, int]
    slot_bytes = np.int64(1 << 20)
    read = ReadOptions(workers=value, slot_bytes=slot_bytes, host_memory_bytes=8 * slot_bytes)
    numbers = (read.workers, read.slot_bytes, read.host_memory_bytes)
    assert [type(number) for number in numbers] == [int, int, int]


@pytest.mark.parametrize("value", [*OTHERS[:-1], np.int64(0)], ids=repr)
@pytest.mark.parametrize("name", ["workers", "files_per_rank", "max_in_flight"])
def test_options_refuse_what_is_no_integer_or_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name) as info:
        WriteOptions(**{name: value})
    assert info.value.option == name
