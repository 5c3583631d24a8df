"""Every way to save and to load in one process: our entry points, and DCP's with our classes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from support.machine import seconds
from support.states import assert_same, blank_like

import torch_dcpx
from torch_dcpx import DcpxReader, DcpxWriter, ReadOptions, WriteOptions

PathLike = str | bytes | os.PathLike[Any]


def _save(state: Any, path: Any, options: WriteOptions | None) -> None:
    torch_dcpx.save(state, path, no_dist=True, options=options)


def _async_save(state: Any, path: Any, options: WriteOptions | None) -> None:
    torch_dcpx.async_save(state, path, no_dist=True, options=options).result(seconds(60))


def _dcp_save(state: Any, path: Any, options: WriteOptions | None) -> None:
    dcp.save(state, storage_writer=DcpxWriter(path, options=options), no_dist=True)


def _dcp_async_save(state: Any, path: Any, options: WriteOptions | None) -> None:
    future: Any = dcp.async_save(
        state, storage_writer=DcpxWriter(path, options=options), no_dist=True
    )
    end = time.monotonic() + seconds(60)
    # Not in one wait: CPython 3.11's traced thread spins while a signal that came just before the
    # wait is not handled.
    while not future.done() and time.monotonic() < end:
        time.sleep(0.02)
    future.result(0)


SAVES: dict[str, Callable[[Any, Any, WriteOptions | None], None]] = {
    "save": _save,
    "async_save": _async_save,
    "dcp.save": _dcp_save,
    "dcp.async_save": _dcp_async_save,
}


def _load(target: Any, path: Any, options: ReadOptions | None) -> None:
    torch_dcpx.load(target, path, no_dist=True, options=options)


def _dcp_load(target: Any, path: Any, options: ReadOptions | None) -> None:
    dcp.load(target, storage_reader=DcpxReader(path, options=options), no_dist=True)


LOADS: dict[str, Callable[[Any, Any, ReadOptions | None], None]] = {
    "load": _load,
    "dcp.load": _dcp_load,
}


def loaded(
    way: str, like: Any, path: PathLike, options: ReadOptions | None = None
) -> dict[str, Any]:
    """Returns what a blank copy of `like` holds after the load."""
    target: dict[str, Any] = blank_like(like)
    LOADS[way](target, path, options)
    return target


def stock_loaded(like: Any, path: Path) -> dict[str, Any]:
    """Returns what stock's reader loads into a blank copy of `like`."""
    target: dict[str, Any] = blank_like(like)
    dcp.load(target, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return target


def is_same(expected: Any, found: Any) -> bool:
    try:
        assert_same(expected, found)
    except AssertionError:
        return False
    return True


def which(path: Path, old: Any, new: Any) -> str:
    """Returns "old" or "new": what stock's reader and ours find, whole and both the same."""
    found = [stock_loaded(old, path), *(loaded(way, old, path) for way in LOADS)]
    for name, state in (("old", old), ("new", new)):
        if all(is_same(state, one) for one in found):
            return name
    return "neither the old nor the new one, or not the same to every reader"
