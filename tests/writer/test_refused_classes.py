"""A save of an object that every load will refuse says so once, with what lets it load."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_dcpx as dcpx
from torch_dcpx import DcpxWriter, ReadOptions
from torch_dcpx.unpickle import byte_items


class Settings:
    """Of a user."""

    def __init__(self, rate: float = 0.5) -> None:
        self.rate = rate


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_items, "_told", set())


def stock(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, storage_writer=DcpxWriter(path), no_dist=True)


SAVES: list[Callable[[dict[str, Any], Path], object]] = [
    dcpx.save,
    lambda state, path: dcpx.async_save(state, path).result(),
    stock,
]


@pytest.mark.parametrize("save", SAVES)
def test_it_is_told_once_by_key_and_class_and_the_way_out_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, save: Callable[[Any, Path], object]
) -> None:
    state = {"w": torch.ones(2), "args": Settings(), "more": {"args": [Settings()]}}
    for number in range(2):
        save(state, tmp_path / str(number))
    (text,) = [one for one in caplog.messages if "safe_globals" in one]
    assert "'args' is saved with" in text and "every load refuses" in text
    with pytest.raises(dcpx.UnsafePickleError):
        dcpx.load({"args": None}, tmp_path / "1")
    (name,) = re.findall(r"ReadOptions\(safe_globals=\['(.*)'\]\)", text)
    target: dict[str, Any] = {"args": None}
    dcpx.load(target, tmp_path / "1", options=ReadOptions(safe_globals=[name]))
    assert target["args"].rate == 0.5


def test_nothing_is_said_of_what_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {
        "text": "cnot\nglobal\n", "bytes": b"cposix\nsystem\n", "array": np.arange(3),
        "list": [torch.ones(2), {"k": (1, None)}], "dtype": torch.bfloat16, "set": {1, 2},
    }  # fmt: skip
    with caplog.at_level(logging.WARNING):
        dcpx.save(state, tmp_path)
    assert caplog.messages == []
    dcpx.load(dict(state), tmp_path)
